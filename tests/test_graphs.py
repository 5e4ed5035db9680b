"""Kernels inside CUDA graphs: XLA captures them, and replays find new inputs and new epochs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import PLATFORM, RANKS, make_mesh, run

import jflux
from jflux import _config, _native
from jflux._ops.collectives.all_reduce import ALGORITHMS
from jflux._stress.calls import Call, assert_close, exact, normal, per_device

STEPS = 60
SCALES = (2.0, -1.0, 0.5)
GATHER = Call("all_gather_matmul", lead=(24,), k=64, n=40, dtype=jnp.bfloat16)
SCATTER = Call("matmul_reduce_scatter", lead=(24,), k=64, n=40, dtype=jnp.bfloat16)

EXCHANGE = Call("matmul_all_to_all", lead=(24,), k=64, n=40, dtype=jnp.bfloat16)


def _inputs(call, mesh, seed):
    world = mesh.devices.size
    x = normal(seed, (world, STEPS, *call.x_shape(world)), call.dtype)
    return x, normal(seed + 1, (world, *call.w_shape(world)), call.dtype)


def _replayed(f, kernels, *operands):
    """The results of a second run, in which the host enqueued few of so many kernels."""
    run(f, *operands)
    before = _native.lib.cuda_launches()
    results = run(f, *operands)
    launches = _native.lib.cuda_launches() - before
    if PLATFORM == "gpu":
        assert launches <= kernels / 4, f"the host enqueued {launches} of {kernels} kernels"
    return results


@pytest.mark.parametrize(
    "calls", [[GATHER], [SCATTER], [EXCHANGE], [GATHER, SCATTER, EXCHANGE]], ids=str
)
def test_replays_with_new_inputs(calls):
    """A loop whose body XLA captures on GPUs: each step takes another x. Most of the kernels that
    ran were enqueued by a replay, and all results are right."""
    mesh = make_mesh((RANKS,))
    operands = [_inputs(call, mesh, 10 * i) for i, call in enumerate(calls)]

    def body(*operands):
        def step(count, xs):
            # Several calls each, so that there is something to capture. Operands and results are
            # scaled, by powers of two: a slice that is an operand itself, or a result that goes
            # straight to its place in an array, XLA passes by an address that changes with each
            # step, and then it has to capture the call anew.
            ys = [
                [2 * call.bind("tp")(x * s, w) for s in SCALES]
                for call, x, (_, w) in zip(calls, xs, operands, strict=True)
            ]
            return count + 1, ys

        return jax.lax.scan(step, 0, [x for x, _ in operands])[1]

    f = jax.jit(per_device(mesh, body))
    results = _replayed(f, RANKS * STEPS * 3 * len(calls), *operands)
    for call, (x, w), ys in zip(calls, operands, results, strict=True):
        for scale, y in zip(SCALES, ys, strict=True):
            for step in (0, 1, STEPS // 2, STEPS - 1):
                args = (2 * scale * x[:, step].astype(np.float64), w.astype(np.float64))
                want = exact(call, mesh, "tp", *args)
                magnitude = exact(call, mesh, "tp", *map(abs, args))
                terms = call.terms(RANKS)
                assert_close(np.asarray(y)[:, step], want, magnitude, call.dtype, terms)


def test_few_rows_of_an_all_reduce():
    """Likewise; of y some columns."""
    mesh = make_mesh((2,))
    x, w = normal(0, (2, STEPS, 64, 136), jnp.bfloat16), normal(1, (2, 136, 8192), jnp.bfloat16)

    def body(x, w):
        def step(count, x):
            ys = [jflux.matmul_all_reduce(x * s, w, axis_name="tp") for s in SCALES]
            return count + 1, [y[:, ::127] for y in ys]

        return jax.lax.scan(step, 0, x)[1]

    results = _replayed(jax.jit(per_device(mesh, body)), 2 * STEPS * len(SCALES), x, w)
    x, w = x.astype(np.float64), w[:, :, ::127].astype(np.float64)
    for scale, ys in zip(SCALES, results, strict=True):
        for step in (0, 1, STEPS // 2, STEPS - 1):
            want = np.einsum("rmk,rkn->mn", scale * x[:, step], w)
            size = np.einsum("rmk,rkn->mn", abs(scale * x[:, step]), abs(w))
            for y in np.asarray(ys)[:, step]:
                assert_close(y, want, size, jnp.bfloat16, 2 * 136)


# ---- Many replays, of small integers, whose sums are exact ---------------------------------------


def _rows_of_all(row):
    return jflux.all_gather(row, axis_name="tp")


WIDTH = 40
SUMS_A_STEP = 4  # so that there is something to capture
#: Each sums x [RANKS, WIDTH] of small integers over the ranks, by other kernels: of a rank's rows.
SUMS = {
    **{a: functools.partial(jflux.all_reduce, axis_name="tp", algorithm=a) for a in ALGORITHMS},
    "residual": lambda x: jflux.all_reduce(x, axis_name="tp", residual=jnp.ones_like(x)) - 1,
    "all_gather": lambda x: jflux.all_gather(x, axis_name="tp").sum(0),
    "reduce_scatter": lambda x: _rows_of_all(jflux.reduce_scatter(x, axis_name="tp")),
    "all_to_all": lambda x: _rows_of_all(
        jflux.all_to_all(x, axis_name="tp", split_axis=0, concat_axis=0).sum(0)
    ),
    "matmul_all_reduce": lambda x: jflux.matmul_all_reduce(
        x, jnp.eye(WIDTH, dtype=x.dtype), axis_name="tp"
    ),
    "matmul_reduce_scatter": lambda x: _rows_of_all(
        jflux.matmul_reduce_scatter(x, jnp.eye(WIDTH, dtype=x.dtype), axis_name="tp")[0]
    ),
    "all_gather_matmul": lambda x: sum(
        jnp.split(jflux.all_gather_matmul(x, jnp.eye(WIDTH, dtype=x.dtype), axis_name="tp"), RANKS)
    ),
}


def _next(x, seen, total, salt):
    """0 to 15, other ones in each step and on each rank; and all sums so far, folded into one."""
    return (3 * x + 5 * total + salt) % 16, 31 * seen + total


EXCHANGES = ("all_gather", "reduce_scatter", "all_to_all")
REPLAYED = [*((name, False) for name in SUMS), *((name, True) for name in EXCHANGES)]


@pytest.mark.parametrize(("name", "in_chunks"), REPLAYED)
def test_ten_thousand_replays(name, in_chunks):
    """Each step has other inputs, and what all sums before it were shows in the end, to the bit."""
    steps = 10_000 if PLATFORM == "gpu" else 200
    mesh = make_mesh((RANKS,))
    x = np.random.default_rng(0).integers(0, 16, (RANKS, RANKS, WIDTH), np.int32)

    def body(x):
        rank = jax.lax.axis_index("tp")

        def step(i, carry):
            for turn in range(SUMS_A_STEP):
                x, _ = carry
                total = SUMS[name](x.astype(jnp.bfloat16)).astype(jnp.int32)
                carry = _next(*carry, total, i + turn + 7 * rank)
            return carry

        return jax.lax.fori_loop(0, steps, step, (x, jnp.zeros_like(x)))

    f = jax.jit(per_device(mesh, body, check_vma=False))
    with _config.override(chunked=in_chunks):
        got = _replayed(f, RANKS * steps * SUMS_A_STEP, x)
    rank, want = np.arange(RANKS, dtype=np.int32)[:, None, None], (x, np.zeros_like(x))
    for i in range(steps):
        for turn in range(SUMS_A_STEP):
            want = _next(*want, want[0].sum(0, dtype=np.int32), i + turn + 7 * rank)
    np.testing.assert_array_equal(got, want)
