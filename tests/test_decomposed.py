"""Decomposed calls: a product and one of jflux's collectives instead of one kernel, as few rows are
on GPUs."""

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import (
    PLATFORM,
    PRODUCTS,
    RANKS,
    calls,
    check_gradients,
    check_values,
    compiled_text,
    drawn_meshes,
    examples,
    fused_calls,
    kernel_rows,
    make_mesh,
    of_way,
    run,
)
from hypothesis import given
from hypothesis import strategies as st

import jflux
from jflux._call import tuning_tables
from jflux._ops.collectives import exchange
from jflux._stress.calls import Call, assert_close, normal, operands, per_device

# One that the kernels take on this platform, and how far results may differ.
DTYPE, TOLERANCE = (np.float32, 2e-5) if PLATFORM == "cpu" else (jnp.bfloat16, 5e-2)
OPS = {op: of_way(op).collective.kind for op in PRODUCTS}


@contextlib.contextmanager
def decomposed():
    with jflux.config(always=False), tuning_tables.force(tuning_tables.DECOMPOSED):
        yield


@pytest.mark.parametrize("op", OPS)
@examples(30)
@given(place=drawn_meshes(), data=st.data(), check_vma=st.booleans())
def test_values(op, place, data, check_vma):
    with decomposed():
        check_values(data.draw(calls(op)), *place, check_vma=check_vma)


@pytest.mark.parametrize("op", OPS)
@examples(10)
@given(place=drawn_meshes(), data=st.data(), check_vma=st.booleans())
def test_gradients(op, place, data, check_vma):
    with decomposed():
        check_gradients(
            dataclasses.replace(data.draw(calls(op)), gathered=False), *place, check_vma=check_vma
        )


@pytest.mark.parametrize("op", OPS)
def test_the_collective_is_jflux_s(op, small_sums):
    call, mesh = of_way(op, lead=(kernel_rows(op),), dtype=jnp.bfloat16), make_mesh((2,))
    args = operands(call, mesh, "tp")
    f = per_device(mesh, call.bind("tp"))
    with decomposed():
        assert fused_calls(compiled_text(lambda *a: f(*a), *args)) == [OPS[op]]
    with decomposed(), jflux.config(always=True):
        assert fused_calls(compiled_text(lambda *a: f(*a), *args)) == [op]


@pytest.mark.gpu  # on CPUs it is always one kernel
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("rows", [2, 16, 60, 160])
def test_few_rows_on_gpus(op, rows):
    mesh, call = make_mesh((RANKS,)), of_way(op, k=256, n=512, dtype=jnp.bfloat16)
    per_shard = 1 if call.multiplied_rows(RANKS) == 4 else RANKS
    call = dataclasses.replace(call, lead=(max(1, rows // per_shard),))
    with jflux.config(always=False):
        check_values(call, mesh, "tp")
        f = per_device(mesh, call.bind("tp"))
        forms = [[OPS[op]]]
        if op == "matmul_all_reduce":  # what conftest takes for a large sum
            forms.append(["reduce_scatter", "all_gather"])
        assert fused_calls(compiled_text(f, *operands(call, mesh, "tp"))) in forms


@pytest.mark.parametrize("op", [op for op in OPS if OPS[op] != "all_reduce"])
def test_large_ones_are_lax_s(op, monkeypatch):
    """More bytes that reach a rank than jflux's collective takes."""
    monkeypatch.setattr(exchange, "MOST_BYTES", 1 << 20)
    monkeypatch.setattr(exchange, "MOST_BYTES_IN_PACKETS", 1 << 20)
    call, mesh = of_way(op, lead=(1200,), k=1024, n=1024, dtype=jnp.bfloat16), make_mesh((2,))
    with decomposed():
        f = per_device(mesh, call.bind("tp"))
        assert fused_calls(compiled_text(f, *operands(call, mesh, "tp"))) == []


def test_types_without_kernels_are_lax_s_silently():
    call, mesh = Call("matmul_reduce_scatter", dtype=np.dtype("int32")), make_mesh((2,))
    x, w = operands(call, mesh, "tp")
    f = per_device(mesh, call.bind("tp"))
    with decomposed():  # and strict, since nobody would expect the kernel
        assert fused_calls(compiled_text(lambda *a: f(*a), x, w)) == []


def both(f, args):
    """The results and the gradients of f of two ranks, decomposed and by the references."""
    mesh = make_mesh((2,))
    ours, theirs = (
        per_device(mesh, functools.partial(f, module)) for module in (jflux, jflux.reference)
    )

    def pull(body, *args):
        y, back = jax.vjp(body, *args)
        return y, back(jax.tree.map(jnp.cos, y))

    with decomposed():
        got = run(jax.jit(functools.partial(pull, ours)), *args)
    with jflux.config(fused=False):
        want = run(jax.jit(functools.partial(pull, theirs)), *args)
    for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        np.testing.assert_allclose(
            a.astype(np.float32), b.astype(np.float32), rtol=TOLERANCE, atol=TOLERANCE
        )


def draw(*shapes):
    arrays = [normal(i, (2, *shape), np.float32) / 4 for i, shape in enumerate(shapes)]
    return [a.astype(DTYPE) for a in arrays]


def test_several_weights_and_what_follows():
    x, gate, up, bias = draw((3, 16), (16, 24), (16, 24), (24,))

    def gated(module, x, gate, up, bias):
        return module.all_gather_matmul(
            x, (gate, up), axis_name="tp", activation="silu", gated=True, bias=(bias, None),
            precision="highest", return_gathered=True,
        )  # fmt: skip

    both(gated, (x, gate, up, bias))


def test_several_products_and_what_is_added():
    x1, w1, x2, w2, bias, residual = draw((6, 16), (16, 8), (6, 5), (5, 8), (8,), (3, 8))

    def summed(module, x1, w1, x2, w2, bias, residual):
        return module.matmul_reduce_scatter(
            (x1, x2), (w1, w2), axis_name="tp", bias=bias, residual=residual, precision="highest"
        )

    both(summed, (x1, w1, x2, w2, bias, residual))


def test_several_products_are_not_put_end_to_end():
    x1, w1, x2, w2 = draw((6, 16), (16, 8), (6, 5), (5, 8))
    f = per_device(
        make_mesh((2,)),
        lambda x1, w1, x2, w2: jflux.matmul_reduce_scatter((x1, x2), (w1, w2), axis_name="tp"),
    )
    with decomposed():
        text = jax.jit(f).lower(x1, w1, x2, w2).as_text()
    assert text.count("stablehlo.dot_general") == 2 and "stablehlo.concatenate" not in text


def test_matmul_all_reduce_of_much():
    """More than 4 MiB of y, which is otherwise a kernel of its own."""
    columns = (5 << 20) // 160 // np.dtype(DTYPE).itemsize
    x, w, residual = draw((160, 8), (8, columns), (160, columns))
    residual[1] = residual[0]
    mesh = make_mesh((2,))

    def f(x, w, residual):
        return jflux.matmul_all_reduce(x, w, axis_name="tp", residual=residual, precision="highest")

    body = per_device(mesh, f, check_vma=False)
    with decomposed():
        assert fused_calls(compiled_text(lambda *a: body(*a), x, w, residual)) == ["all_reduce"]
        y = run(jax.jit(body), x, w, residual)
    wide = [a.astype(np.float64) for a in (x, w, residual)]
    want = sum(wide[0][r] @ wide[1][r] for r in range(2)) + wide[2][0]
    scale = sum(np.abs(wide[0][r]) @ np.abs(wide[1][r]) for r in range(2)) + np.abs(wide[2][0])
    for rank in range(2):
        assert_close(np.asarray(y[rank]), want, scale, DTYPE, 16)
