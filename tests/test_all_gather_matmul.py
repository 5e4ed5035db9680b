"""jflux.all_gather_matmul: the gathered x as a result. What all products share: test_ops_*.py."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from harness import RANKS, make_mesh, run
from jax.sharding import PartitionSpec as P

import jflux
from jflux._stress.calls import Call, assert_close, exact, normal, operands, per_device

GATHER = functools.partial(Call, "all_gather_matmul", gathered=True, dtype=jnp.bfloat16)


def test_gradient_through_gathered_x():
    """The cotangent of the gathered x takes part: dx = (dy @ w^T + dg) summed over ranks."""
    call, mesh = GATHER(lead=(2, 3), k=5, n=4), make_mesh((2,))
    x, w = operands(call, mesh, "tp")
    dy = normal(2, (2, *call.y_shape(2)), call.dtype)
    dg = normal(3, (2, *call.full(2), call.k), call.dtype)
    f = per_device(mesh, call.bind("tp"))
    dx, dw = run(jax.jit(lambda x, w, d: jax.vjp(f, x, w)[1](d)), x, w, (dy, dg))
    x64, w64, dy64, dg64 = (a.astype(np.float64) for a in (x, w, dy, dg))
    whole = np.concatenate(x64, axis=1)
    dwhole = sum(dy64[r] @ w64[r].T + dg64[r] for r in range(2))
    scale = sum(abs(dy64[r]) @ abs(w64[r]).T + abs(dg64[r]) for r in range(2))
    split = functools.partial(np.split, indices_or_sections=2, axis=1)
    assert_close(dx, np.stack(split(dwhole)), np.stack(split(scale)), call.dtype, 8, factor=2)
    want = np.stack([np.tensordot(whole, dy64[r], ((0, 1), (0, 1))) for r in range(2)])
    scale = np.stack([np.tensordot(abs(whole), abs(dy64[r]), ((0, 1), (0, 1))) for r in range(2)])
    assert_close(dw, want, scale, call.dtype, 12)


def test_unused_results():
    """y alone, the gathered x alone, and neither."""
    call, mesh = GATHER(), make_mesh((RANKS,))
    x, w = operands(call, mesh, "tp")
    y_want, gathered_want = exact(call, mesh, "tp", x, w)
    scale = exact(call, mesh, "tp", abs(x), abs(w))[0]
    op = call.bind("tp")
    y = run(jax.jit(per_device(mesh, lambda x, w: op(x, w)[0])), x, w)
    assert_close(y, y_want, scale, call.dtype, call.k)
    gathered = run(jax.jit(per_device(mesh, lambda x, w: op(x, w)[1])), x, w)
    np.testing.assert_array_equal(gathered.astype(np.float64), gathered_want)
    assert run(jax.jit(per_device(mesh, lambda x, w: (op(x, w), x)[1])), x, w).shape == x.shape


def test_nothing_to_compute():
    """The gathered x has its shape without columns of w too."""
    mesh, op = make_mesh((RANKS,)), GATHER().bind("tp")
    args = operands(GATHER(lead=(3,), k=3, n=4), mesh, "tp")
    for rows, k, n in [(0, 3, 4), (2, 0, 4), (2, 3, 0)]:
        body = per_device(
            mesh, lambda x, w, s=(rows, k, n): op(x[: s[0], : s[1]], w[: s[1], : s[2]])
        )
        y, gathered = run(jax.jit(body), *args)
        assert y.shape == (RANKS, rows * RANKS, n) and not y.any()
        assert gathered.shape == (RANKS, rows * RANKS, k)


def test_gathered_x_of_global_arrays():
    mesh = make_mesh((2, RANKS // 2), ("dp", "tp"))
    x, w = normal(0, (4, RANKS * 3, 10), jnp.bfloat16), normal(1, (10, RANKS * 2), jnp.bfloat16)
    y, gathered = run(
        jax.jit(
            functools.partial(
                jflux.all_gather_matmul, axis_name="tp", mesh=mesh, x_spec=P("dp"),
                return_gathered=True, gather_dimension=1,
            )
        ), x, w,
    )  # fmt: skip
    np.testing.assert_array_equal(gathered, x)
    x64, w64 = x.astype(np.float64), w.astype(np.float64)
    assert_close(y, x64 @ w64, abs(x64) @ abs(w64), x.dtype, 10)
