"""Many calls in flight, also among other collectives, of several programs and threads."""

import concurrent.futures
import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import PLATFORM, PRODUCTS, RANKS, check_values, make_mesh, of_way, run
from jax import lax
from jax.sharding import PartitionSpec as P
from layers import (
    VMA,
    assert_near,
    check_product,
    in_float64,
)

import jflux
from jflux._stress.calls import Call, assert_close, exact, normal, operands, per_device

#: Runs of each of two threads at once.
ORDERED_RUNS = 2000 if PLATFORM == "gpu" else 40
GATHER = Call("all_gather_matmul", lead=(3,), k=8, n=6, dtype=jnp.bfloat16)


def test_lowered_together_and_compiled_in_another_order():
    mesh = make_mesh((RANKS,))
    cases = []
    for n in (3, 4, 5):
        call = Call("all_gather_matmul", lead=(2,), k=4, n=n, dtype=jnp.bfloat16)
        op = jax.jit(call.bind("tp"))
        args = operands(call, mesh, "tp", seed=n)
        f = per_device(mesh, lambda x, w, op=op: (op(x, w), op(x * 2, w), op(x * 4, w)))
        cases.append((call, args, jax.jit(f).lower(*args)))
    compiled = [(call, args, lowered.compile()) for call, args, lowered in reversed(cases)]
    pending = [(call, args, f(*args)) for _ in range(3) for call, args, f in compiled]
    for call, (x, w), ys in pending:
        for power, y in enumerate(ys):
            check_product(np.asarray(y, np.float64) / 2**power, call, mesh, x, w)


# ---- Many in flight, among other collectives -----------------------------------------------------


def _mixture(x, ws, calls):
    """Independent calls of both ops between psum, all_gather and products, as a scheduler may run
    them in any order."""
    total, parts = jnp.zeros(x.shape, jnp.float32), []
    for i in range(calls):
        h = jnp.tanh(x * (1 + i / 8)).astype(x.dtype)
        up = jflux.all_gather_matmul(h, ws[0], axis_name="tp")
        parts.append(jflux.matmul_reduce_scatter(up, ws[1], axis_name="tp"))
        parts.append(h @ ws[2])
        if i % 3 == 0:
            parts.append(lax.psum(h, "tp"))
        if i % 4 == 0:
            parts.append(lax.all_gather(h, "tp", axis=0, tiled=True)[: h.shape[0]])
        if i % 5 == 0:
            parts.append(lax.psum_scatter(jnp.tile(h, (RANKS, 1)), "tp", tiled=True))
    return total + sum(p.astype(jnp.float32) for p in parts)


@VMA
def test_independent_calls_among_other_collectives(check_vma):
    """The mixture that deadlocks a handler which blocks, or which completes inline."""
    mesh = make_mesh((RANKS,))
    rows, d = 16, 64
    x = normal(0, (RANKS * rows, d), jnp.bfloat16)
    ws = [(normal(i + 1, (d, d), np.float64) / 8).astype(jnp.bfloat16) for i in range(3)]
    calls = 24
    f = jax.jit(
        jax.shard_map(
            functools.partial(_mixture, calls=calls),
            mesh=mesh,
            in_specs=(P("tp"), [P(None, "tp"), P("tp"), P()]),
            out_specs=P("tp"),
            check_vma=check_vma,
        )  # fmt: skip
    )
    results = []
    for i in range(8):
        results.append(f(x, ws))
        if i % 3 == 0:
            results[-1].block_until_ready()

    def plain(x, w0, w1, w2):
        shards = x.reshape(RANKS, rows, d)
        total = jnp.zeros_like(shards)
        for i in range(calls):
            h = jnp.tanh(shards * (1 + i / 8))
            total += (h @ w0) @ w1 + h @ w2
            total += h.sum(0) * (i % 3 == 0) + h[:1] * (i % 4 == 0) + h.sum(0) * (i % 5 == 0)
        return total.reshape(x.shape)

    want = in_float64(plain, x, *ws)
    for y in results:
        assert_near(y, want)
        np.testing.assert_array_equal(np.asarray(y), np.asarray(results[0]))


def test_equal_programs_in_flight():
    """Two compilations of one program: their calls carry the same names."""
    mesh = make_mesh((RANKS,))
    op = GATHER.bind("tp")
    fs = [jax.jit(per_device(mesh, lambda x, w: op(x, w))) for _ in range(3)]
    arrays = [operands(GATHER, mesh, "tp", seed=s) for s in range(3)]
    results = [(i, f(*arrays[i])) for _ in range(5) for i, f in enumerate(fs)]
    for i, y in results:
        check_product(np.asarray(y), GATHER, mesh, *arrays[i])


def test_several_groups_with_different_work():
    """Two groups of one program, one of which has a loop twice as long: no group waits for
    another, and calls are not mixed up."""
    if RANKS < 4:
        pytest.skip("needs four devices")
    mesh = make_mesh((2, 2), ("dp", "tp"), order=(3, 1, 0, 2))
    x, w = operands(GATHER, mesh, "tp")
    inner = GATHER.bind("tp")

    def body(x, w):
        count = 3 + 3 * lax.axis_index("dp")

        def add(i, y):  # dependent on i, or XLA takes the call out of the loop
            return y + inner(jnp.where(i % 2 == 0, x, 2 * x), w).astype(jnp.float32)

        return lax.fori_loop(0, count, add, inner(x, w).astype(jnp.float32))

    y = run(jax.jit(per_device(mesh, body)), x, w)
    want = exact(GATHER, mesh, "tp", x, w)
    scale = exact(GATHER, mesh, "tp", abs(x), abs(w))
    for dp, count in enumerate((1 + 4, 1 + 9)):
        assert_close(y[dp], count * want[dp], count * scale[dp], GATHER.dtype, GATHER.k)


def in_threads(count, work, on_error=lambda: None):
    """work(i) in so many threads at once."""
    errors = []

    def attempt(i):
        try:
            work(i)
        except BaseException as error:
            errors.append(error)
            on_error()

    with concurrent.futures.ThreadPoolExecutor(count) as threads:
        list(threads.map(attempt, range(count)))
    assert not errors, errors[0]


def test_threads_that_compile_and_run():
    """Several Python threads, each with programs whose calls XLA inlines several times."""
    mesh = make_mesh((RANKS,))

    def work(thread):
        for n in range(4):
            call = Call("all_gather_matmul", lead=(2,), k=4, n=2 + n, dtype=jnp.bfloat16)
            inner = jax.jit(call.bind("tp"))
            f = per_device(mesh, lambda x, w, op=inner: [op(x * s, w) for s in (1, 2, 4, 8)])
            x, w = operands(call, mesh, "tp", seed=10 * thread + n)
            for _ in range(3):
                for power, y in enumerate(jax.jit(f)(x, w)):
                    check_product(np.asarray(y, np.float64) / 2**power, call, mesh, x, w)

    in_threads(4, work)


@pytest.mark.skipif(
    PLATFORM == "cpu" and jax.__version_info__ < (0, 12),
    reason="XLA:CPU hangs, also with lax's collectives",
)
def test_threads_that_run_different_programs():
    """All devices of a process get the programs of two threads in one order: else calls of both
    would wait for each other."""
    mesh = make_mesh((RANKS,))
    start = threading.Barrier(2)

    def work(thread):
        call = Call("all_gather_matmul", lead=(3 + thread,), k=8, n=6, dtype=jnp.bfloat16)
        op = call.bind("tp")
        x, w = operands(call, mesh, "tp", seed=thread)
        f = jax.jit(per_device(mesh, lambda x, w: [op(x * s, w) for s in (1, 2)]))
        f(x, w)
        start.wait()
        results = [f(x, w) for _ in range(ORDERED_RUNS)]
        for y, twice in results[:: ORDERED_RUNS // 4]:
            check_product(np.asarray(y), call, mesh, x, w)
            check_product(np.asarray(twice, np.float64) / 2, call, mesh, x, w)

    in_threads(2, work, start.abort)


def test_all_products_share_workspaces():
    """Shapes and ops over the same workspaces: no call reads what another one left."""
    mesh = make_mesh((RANKS,))
    for _ in range(2):
        for rows in (1, 5, 2):
            for op in PRODUCTS:
                check_values(of_way(op, lead=(rows,), k=7, n=rows, dtype=jnp.bfloat16), mesh, "tp")
