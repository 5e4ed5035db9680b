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
