"""Rows between the order of tokens and that of experts (jflux/_ops/experts/moe_rows.py), in the
types that GPUs have kernels for, against numpy in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import PLATFORM, fused_calls

import jflux
from jflux._ops.experts import moe_rows

EPS = {"bfloat16": 2.0**-8, "float16": 2.0**-10, "float32": 2.0**-22}


def places(rng, tokens, k, rows):
    """(source [rows], destination [tokens, k]) that say the same; -1: none."""
    slots = tokens * k
    count = min(rows, int(rng.integers(slots + 1)))
    slot, row = rng.permutation(slots)[:count], rng.permutation(rows)[:count]
    source, destination = np.full(rows, -1, np.int32), np.full(slots, -1, np.int32)
    source[row], destination[slot] = slot, row
    return source, destination.reshape(tokens, k)


def run(f, *operands, taken=True):
    """f of the operands, whose program has a kernel on GPUs if there is one for it."""
    program = jax.jit(f).lower(*operands).compile()
    found = fused_calls(program.as_text())
    assert found == ["moe_rows"] * (taken and PLATFORM == "gpu"), found
    return np.asarray(program(*operands))


SHAPES = [(1, 1, 1, 8), (5, 3, 9, 64), (33, 8, 500, 2048), (64, 2, 70, 4104), (7, 17, 119, 16)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_values(shape, dtype):
    tokens, k, rows, columns = shape
    rng = np.random.default_rng([*shape, len(dtype)])
    source, destination = places(rng, tokens, k, rows)
    y, g = (rng.standard_normal((n, columns)).astype(jnp.dtype(dtype)) for n in (rows, tokens))
    w = rng.standard_normal((tokens, k)).astype(np.float32)
    w[destination < 0] = np.nan  # counts for nothing
    taken = columns * jnp.dtype(dtype).itemsize % 16 == 0
    wide_y, wide_g = (np.asarray(a, np.float64) for a in (y, g))

    want = np.zeros((tokens, columns))
    size = np.zeros((tokens, columns))
    dots, dot_size = np.zeros((tokens, k)), np.zeros((tokens, k))
    for t, j in zip(*np.nonzero(destination >= 0), strict=True):
        row = wide_y[destination[t, j]]
        want[t] += float(w[t, j]) * row
        size[t] += np.abs(float(w[t, j]) * row)
        dots[t, j], dot_size[t, j] = row @ wide_g[t], np.abs(row) @ np.abs(wide_g[t])
    for out in {dtype, "float32"}:
        combine = functools.partial(moe_rows.combine, dtype=out)
        got = run(combine, y, w, source, destination, taken=taken)
        again = run(combine, y, w, source, destination, taken=taken)
        assert got.tobytes() == again.tobytes()
        assert got.dtype == jnp.dtype(out)
        error = np.abs(got.astype(np.float64) - want)
        assert (error <= EPS[out] * np.abs(want) + 2.0**-20 * size + 2.0**-24).all()  # subnormal

    got = run(moe_rows.spread, g, np.where(destination < 0, 0, w), source, destination, taken=taken)
    want = np.zeros((rows, columns))
    filled = source >= 0
    want[filled] = w.reshape(-1)[source[filled], None] * wide_g[source[filled] // k]
    np.testing.assert_allclose(got.astype(np.float64), want, rtol=EPS[dtype], atol=1e-7)
    assert not got[~filled].astype(np.float32).any()

    # Rows of no slot may be anything, and are not looked at.
    spread = functools.partial(moe_rows.spread, fill=False)
    touched = run(spread, g, np.where(destination < 0, 0, w), source, destination, taken=taken)
    assert touched[filled].tobytes() == got[filled].tobytes()

    def dots_of(y, g, source, destination):  # the weights' gradient
        def f(w):
            return jnp.vdot(moe_rows.combine(y, w, source, destination, np.float32), g)

        return jax.grad(f)(jnp.zeros((tokens, k), jnp.float32))

    got = run(
        dots_of, y, g.astype(np.float32), source, destination,
        taken=taken and dtype == "float32",
    )  # fmt: skip
    assert (np.abs(got - dots) <= 2.0**-18 * dot_size + 1e-6).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_dots_of_one_type(dtype):
    tokens, k, rows, columns = 40, 4, 130, 512
    rng = np.random.default_rng(3)
    source, destination = places(rng, tokens, k, rows)
    y, g = (rng.standard_normal((n, columns)).astype(jnp.dtype(dtype)) for n in (rows, tokens))
    params = moe_rows.Params("w", np.dtype(np.float32))
    got = run(lambda *a: moe_rows._bind(params, *a), y, g, source, destination)
    wide_y, wide_g = (np.asarray(a, np.float64) for a in (y, g))
    for (t, j), row in np.ndenumerate(destination):
        want = wide_y[row] @ wide_g[t] if row >= 0 else 0
        assert abs(got[t, j] - want) < 1e-4, (t, j)


def test_gradients_of_a_permutation_and_back():
    """In bfloat16, against the plain form of the same."""
    tokens, k, experts, columns = 48, 3, 5, 256
    rng = np.random.default_rng(4)
    x = jnp.asarray(rng.standard_normal((tokens, columns)), jnp.bfloat16)
    indices = jnp.asarray(rng.integers(-1, experts, (tokens, k)), jnp.int32)
    weights = jnp.asarray(rng.standard_normal((tokens, k)), jnp.float32)

    def loss(x, weights):
        routing = jflux.moe.route(indices, experts)
        rows = jflux.moe.permute(x, routing)
        y = jflux.moe.unpermute(rows * rows, routing, weights)
        return jnp.sum(y.astype(jnp.float32) ** 2)

    got = jax.jit(jax.grad(loss, (0, 1)))(x, weights)
    with jflux.config(fused=False):
        want = jax.jit(lambda *a: jax.grad(loss, (0, 1))(*a))(x, weights)
    for one, other in zip(got, want, strict=True):
        scale = float(jnp.abs(other.astype(jnp.float32)).max())
        np.testing.assert_allclose(
            np.asarray(one, np.float32), np.asarray(other, np.float32), rtol=0, atol=0.02 * scale
        )
