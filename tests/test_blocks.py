"""bench/blocks.py: all contestants compute the same, but for what "alone" leaves out."""

import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from harness import RANKS, dots, make_mesh
from jax.sharding import PartitionSpec as P

import jflux

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import blocks  # noqa: E402

TOKENS = 16 * RANKS
GATED = blocks.Model("gated", 16 * RANKS, 32 * RANKS, 2 * RANKS, RANKS, True, TOKENS // 2)
PLAIN = blocks.Model("plain", 16 * RANKS, 32 * RANKS, 2 * RANKS, 2 * RANKS, False, TOKENS // 2)


@pytest.fixture(autouse=True)
def lenient():
    """GPUs have no kernels for float32."""
    with jflux.config(strict=False):
        yield


@pytest.mark.parametrize("part", ["mlp", "block"])
@pytest.mark.parametrize("model", [GATED, PLAIN], ids=lambda m: m.name)
def test_contestants_agree(model, part):
    mesh = make_mesh((RANKS,))
    rng = np.random.default_rng(0)
    shapes = blocks.shapes_of(model, part)
    x = rng.standard_normal((TOKENS, model.width)).astype(np.float32)
    w = {
        name: (rng.standard_normal(shape) / shape[0] ** 0.5).astype(np.float32)
        for name, (shape, _) in shapes.items()
    }
    specs = (P("tp", None), {name: spec for name, (_, spec) in shapes.items()})

    def run(name, ops):
        both = blocks.step_of(name, ops, model, part)
        f = jax.shard_map(
            both, mesh=mesh, in_specs=specs, out_specs=(specs[0], *specs), check_vma=False
        )
        with jax.default_matmul_precision("highest"):
            return jax.tree.map(np.asarray, jax.jit(f)(x, w))

    got, want, fused, alone = (run(*contestant) for contestant in blocks.CONTESTANTS.items())
    for a, b, f, c in zip(*map(jax.tree.leaves, (got, want, fused, alone)), strict=True):
        assert max(np.abs(a - b).max(), np.abs(f - b).max()) <= 1e-4 * np.abs(b).max()
        assert c.shape == b.shape and np.isfinite(c).all()
    if part == "mlp":  # what it should be
        with jax.default_matmul_precision("highest"):
            up = x @ w["up"]
            h = jax.nn.silu(x @ w["gate"]) * up if model.gated else jax.nn.gelu(up)
            np.testing.assert_allclose(got[0], x + h @ w["down"], rtol=1e-3, atol=1e-3)


def _calls(body):
    """Of a step's jaxpr: the products, with their types and what the arguments among their operands
    are, and the additions of whole arrays."""
    arguments = {var: i for i, var in enumerate(body.invars)}
    for equation in body.eqns:
        name, params = equation.primitive.name, equation.params.get("params")
        types = [v.aval.str_short() for v in (*equation.invars, *equation.outvars)]
        if name.startswith("jflux_"):
            yield name, str(params), types, [arguments.get(v) for v in equation.invars]
        elif name == "dot_general":
            yield name, sorted(str(sorted(v.aval.shape)) for v in equation.invars)
        elif (
            name in ("add", "add_any")
            and body.invars[0].aval.shape == equation.outvars[0].aval.shape
        ):
            yield "add", types[-1]


@pytest.mark.parametrize("model", [GATED, PLAIN], ids=lambda m: m.name)
def test_what_is_fused_is_what_is_written_by_hand(model, monkeypatch):
    """In 16 bits, in which XLA's functions add in float32: the same calls of the same arrays in the
    same order, and no addition more."""
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")  # else cuDNN, with sizes of its own
    shapes = {"x": ((TOKENS, model.width), P("tp", None)), **blocks.shapes_of(model, "block")}
    given = {n: jax.ShapeDtypeStruct(shape, "bfloat16") for n, (shape, _) in shapes.items()}
    specs = {n: spec for n, (_, spec) in shapes.items()}
    x, x_spec = given.pop("x"), specs.pop("x")

    def calls(name):
        step = blocks.step_of(name, blocks.CONTESTANTS[name], model, "block")
        f = jax.shard_map(
            step, mesh=make_mesh((RANKS,)), in_specs=(x_spec, specs),
            out_specs=(x_spec, x_spec, specs), check_vma=False,
        )  # fmt: skip
        (mapped,) = jax.make_jaxpr(f)(x, given).eqns
        return list(_calls(mapped.params["jaxpr"]))

    def of_jflux(found):
        return [call for call in found if call[0].startswith("jflux_")]

    written, fused = calls("jflux"), calls("fused")
    assert len(of_jflux(written)) == 8 and of_jflux(fused) == of_jflux(written)
    assert sorted(map(repr, fused)) == sorted(map(repr, written))


def test_a_row(monkeypatch, own_heap):
    own_heap()
    monkeypatch.setattr(blocks.trials, "iterations_for", lambda *_: 2)
    row = blocks.measure(GATED, "mlp", make_mesh((RANKS,)), TOKENS, rounds=2)
    cells = blocks.cells(row)
    assert len(cells) == len(blocks.COLUMNS) and cells[:3] == ["gated", "mlp", str(TOKENS)]
    assert all(float(c) > 0 for c in cells[3:6])
    assert float(cells[9]) >= 0 and row["memory"]["XLA"]["xla"] > 0


def test_steps_depend_on_all_that_is_computed():
    """Else XLA would leave out what nobody needs, weight gradients first."""
    mesh, shapes = make_mesh((RANKS,)), blocks.shapes_of(PLAIN, "mlp")
    rng = np.random.default_rng(0)
    x = rng.standard_normal((TOKENS, PLAIN.width)).astype(np.float32)
    w = {n: rng.standard_normal(s).astype(np.float32) / 8 for n, (s, _) in shapes.items()}
    specs = (P("tp", None), {name: spec for name, (_, spec) in shapes.items()})
    both = blocks.forward_and_backward(blocks.CONTESTANTS["XLA"], PLAIN, "mlp")
    f = jax.jit(
        jax.shard_map(
            blocks.loop(both, 3), mesh=mesh, in_specs=specs, out_specs=specs[0], check_vma=False
        )
    )
    text = f.lower(x, w).compile().as_text()
    assert dots(text) == 6  # two forward, two for dx, two for dw
    out = np.asarray(f(x, w))
    assert (out != x).sum() == RANKS and np.isfinite(out).all()


def test_flops_are_those_of_the_weights():
    model = blocks.MODELS[0]
    weights = 3 * 8192 * 28672
    assert blocks.flops(model, "mlp", 8192, 4) == 6 * 8192 * weights / 4
    assert (
        blocks.flops(model, "block", 8192, 4)
        == 6 * 8192 * (weights + 2 * 8192 * 8192 + 2 * 8192 * 1024) / 4
    )
