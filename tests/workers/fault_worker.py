"""Programs that go wrong, each in a process of its own: fault_worker.py SCENARIO DEVICES.

Prints a line that starts with "error: " for each error that the program got, and "seconds: " for
how long the call took, without its compilation, and ends.
"""

import faulthandler
import functools
import os
import pathlib
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from common import expect_error  # beside this file
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jflux
from jflux import testing
from jflux._ops._spec import all_ops
from jflux._ops.collectives import exchange as exchanges
from jflux._ops.collectives.all_reduce import ALGORITHMS
from jflux._ops.products import matmul_all_reduce

DEADLINE = 2.0
N = int(sys.argv[2])
MESH = Mesh(np.array(jax.devices()[:N]), ("tp",))


def sharded(body, **options):
    options = {"in_specs": (P("tp"), P()), "out_specs": P("tp")} | options
    return jax.jit(jax.shard_map(body, mesh=MESH, check_vma=False, **options))


def operands(k=16, n=8):
    x = np.random.default_rng(0).standard_normal((N * N, k)).astype(jnp.bfloat16)
    w = np.random.default_rng(1).standard_normal((k, n)).astype(jnp.bfloat16)
    return x, w


def attempt(f, *args):
    """Compiles and calls f, and prints the error that it ends in."""
    expect_error(f.lower(*args).compile(), *args)


def gather(x, w):
    return jflux.all_gather_matmul(x, w, axis_name="tp")


def call_of(spec):
    """A call of an op on (x, w) that its kernel takes on every platform."""
    options = {"axis_name": "tp", **spec.ways[0]}

    def product(x, w):
        x = jnp.tile(x, (128, 1))  # whole tiles of rows and vectors of columns for each rank
        multiplied = x.shape
        if spec.product == "after":
            multiplied = spec.communication(2, **spec.ways[0]).shape(x.shape, N)
        return spec.function(x, jnp.tile(w, (multiplied[1] // x.shape[1], N)), **options)

    def collective(x, w):
        return spec.on(jnp.concatenate([x @ w] * N), **options)

    return product if spec.product else collective


def reduce(x, w, **options):
    return jflux.all_reduce(x @ w, axis_name="tp", **options)


def custom(x, w):
    """examples/custom_kernel, from the library that the environment names."""
    sys.path.append(str(pathlib.Path(__file__).parents[2] / "examples" / "custom_kernel"))
    import halo_exchange

    halo_exchange.load(os.environ["JFLUX_TEST_CUSTOM_KERNEL"])
    return halo_exchange.halo_exchange(x @ w, halo=x.shape[0], axis_name="tp")


def exchange_in_chunks(x, w):
    exchanges.MOST_BYTES_IN_PACKETS = 0  # of this process
    return call_of(all_ops()["all_to_all"])(x, w)


def norm(x, w):
    y = x @ w
    norm = jflux.RMSNorm(jnp.ones(y.shape[-1], jnp.float32))
    return jflux.all_reduce(y, axis_name="tp", norm=norm)[1]


def is_rank(rank):
    return lax.axis_index("tp") == rank


def rank_never_calls(op, absent):
    """`absent` takes the branch without the call."""

    def body(x, w):
        y = jax.eval_shape(op, x, w)
        return lax.cond(is_rank(absent), lambda x, w: jnp.zeros(y.shape, y.dtype), op, x, w)

    attempt(sharded(body), *operands())


def one_call_too_few():
    """The last rank's loop ends one iteration early."""

    def body(x, w):
        count = jnp.where(is_rank(N - 1), 3, 4)
        y = jnp.zeros((x.shape[0] * N, w.shape[1]), x.dtype)
        return lax.fori_loop(0, count, lambda i, y: y + gather((x * i).astype(x.dtype), w), y)

    attempt(sharded(body), *operands())


def different_shapes():
    """Rank 0 calls with fewer columns than the others, in a branch of its own."""

    def body(x, w):
        def narrow(x, w):
            return gather(x[:, :8], w[:8])

        return lax.cond(is_rank(0), narrow, gather, x, w)

    attempt(sharded(body), *operands())


def different_orders():
    """Rank 0 makes two calls of the same shape in the opposite order."""

    def body(x, w):
        def first(x, w):
            return gather(x, w)

        def second(x, w):
            return gather(-x, w)

        def forth(x, w):
            y = first(x, w)
            return second(x + y[: x.shape[0], :1], w)

        def back(x, w):
            y = second(x, w)
            return first(x + y[: x.shape[0], :1], w)

        return lax.cond(is_rank(0), back, forth, x, w)

    attempt(sharded(body), *operands())


def after_an_error():
    """The process goes on: calls after the failed one are right."""
    rank_never_calls(gather, 1)
    x, w = operands()
    f = sharded(gather)
    for _ in range(3):
        y = np.asarray(f(x, w), np.float64).reshape(N, N * N, -1)
        want = x.astype(np.float64) @ w.astype(np.float64)
        bound = testing.tolerance(jnp.bfloat16, 16) * (abs(x).astype(float) @ abs(w).astype(float))
        assert (abs(y - want) <= bound).all()
    print("right after the error")


def others_in_flight():
    """Independent calls around the one that fails: they end too, and the process lives."""

    def body(x, w):
        good = [gather(x * s, w) for s in (1, 2, 4)]
        bad = lax.cond(
            is_rank(0), lambda x, w: jnp.zeros((x.shape[0] * N, w.shape[1]), x.dtype), gather, x, w
        )
        return sum(good) + bad + jnp.tile(lax.psum(x[:, : w.shape[1]], "tp"), (N, 1))

    attempt(sharded(body), *operands())


def a_late_rank():
    """Rank 1 takes three seconds to come, on its host; one is enough for a warning."""

    def late(x):
        time.sleep(3)
        return x

    def body(x, w):
        def wait(x):
            return jax.pure_callback(late, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

        return gather(lax.cond(is_rank(1), wait, lambda x: x, x), w)

    attempt(sharded(body), *operands())


def a_failed_launch():
    """The handler on the last GPU fails, once. No call can be made then."""
    f, args = sharded(gather), operands()
    f = f.lower(*args).compile()
    jax.block_until_ready(f(*args))
    with testing.failing_launches(MESH.devices.flat[-1]):
        expect_error(f, *args)
    expect_error(f, *args)


def concurrent_graphs():
    """XLA may run a graph's kernels at once, which no handler can refuse and nobody has said in
    XLA_FLAGS. Prints whether the result is right."""

    def body(x, w):
        def step(x, _):
            a, b = gather(x, w), gather(-x, w)
            return x * 0.5, (a, b)

        return lax.scan(step, x, length=8)[1]

    x, w = operands(k=256, n=512)
    options = {
        "xla_gpu_command_buffer_scheduling_mode": "CONCURRENT",
        "xla_gpu_graph_min_graph_size": "1",
    }
    f = sharded(body, out_specs=P(None, "tp")).lower(x, w).compile(compiler_options=options)
    try:
        for _ in range(5):
            a, b = (np.asarray(y, np.float32) for y in jax.block_until_ready(f(x, w)))
            want = x.astype(np.float32) @ w.astype(np.float32)
            want = np.stack([np.tile(want * 0.5**i, (N, 1)) for i in range(8)])
            for y in (a, -b):
                np.testing.assert_allclose(y, want, rtol=0.05, atol=0.5)
        print("right")
    except AssertionError as error:
        print("WRONG", error)
    except Exception as error:
        print("error:", str(error).replace("\n", " "))


def decode_call(pages):
    """(a call of flash_decode over all ranks, its operands but lengths). In pages, rank 0's table
    has in place of sequence 2's last page a number that is none."""
    rng = np.random.default_rng(0)
    q, k, v = (
        rng.standard_normal(s).astype(jnp.bfloat16) for s in ((3, 4, 64), *[(3, 64 * N, 2, 64)] * 2)
    )
    if not pages:
        call = functools.partial(jflux.flash_decode, axis_name="tp")
        return sharded(call, in_specs=(P(), P(None, "tp"), P(None, "tp"), P()), out_specs=P()), (
            q, k, v,
        )  # fmt: skip

    def of_pages(q, k, v, lengths, table):
        return jflux.flash_decode(q, k, v, lengths, axis_name="tp", block_table=table)

    specs = (P(), P("tp"), P("tp"), P(), P(None, "tp"))
    # [3, N, 4, 16, ...]: four pages of each sequence on each rank.
    k, v = (a.reshape(3, N, 64, 2, 64).swapaxes(0, 1).reshape(N * 12, 16, 2, 64) for a in (k, v))
    table = np.tile(np.arange(12, dtype=np.int32).reshape(3, 4), (1, N))
    table[2, 3] = 12
    return sharded(of_pages, in_specs=specs, out_specs=P()), (q, k, v, table)


def wrong_decode(pages):
    """A value that flash_decode reports: GPUs finish the call, and the next one fails."""
    f, (q, k, v, *table) = decode_call(pages)
    good = np.array([64 * N, 3, 40], np.int32)  # sequence 2 does not reach the entry that is wrong
    bad = np.array([64 * N, 3, 64 if pages else 64 * N + 1], np.int32)
    jax.block_until_ready(f(q, k, v, good, *table))
    before = f(q, k, v, good, *table)
    try:
        got = np.asarray(f(q, k, v, bad, *table), np.float32)
        print("finished")
        # The other sequences are as they were.
        np.testing.assert_array_equal(got[:2], np.asarray(before, np.float32)[:2])
        assert np.isfinite(got[:2]).all() and np.isnan(got[2]).all() == (not pages)
    except jax.errors.JaxRuntimeError as error:
        print("error:", str(error).replace("\n", " "))
    time.sleep(1)
    attempt_again = jax.jit(lambda q: f(q, k, v, good, *table) * 2)
    try:
        jax.block_until_ready(attempt_again(q))
        print("the next call runs", flush=True)
    except Exception as error:
        print("next error:", str(error).replace("\n", " "), flush=True)


def ends_in_flight():
    """The program ends, in the ordinary way, while calls run."""
    f, args = sharded(gather), operands(k=256, n=512)
    for _ in range(4):
        f(*args)
    print("the end", flush=True)
    sys.exit(0)


CALLS = {
    **{name: call_of(spec) for name, spec in all_ops().items()},
    "custom": custom,
    "exchange_in_chunks": exchange_in_chunks,
    "norm": norm,
    **{name: functools.partial(reduce, algorithm=name) for name in ALGORITHMS},
}
SCENARIOS = {
    "a_failed_launch": a_failed_launch,
    "a_late_rank": a_late_rank,
    "concurrent_graphs": concurrent_graphs,
    "ends_in_flight": ends_in_flight,
    **{
        f"{name}_without_rank_1": functools.partial(rank_never_calls, op, 1)
        for name, op in CALLS.items()
    },
    "one_call_too_few": one_call_too_few,
    "different_shapes": different_shapes,
    "different_orders": different_orders,
    "after_an_error": after_an_error,
    "wrong_length": functools.partial(wrong_decode, pages=False),
    "wrong_page": functools.partial(wrong_decode, pages=True),
    "others_in_flight": others_in_flight,
}

if __name__ == "__main__":
    faulthandler.enable()
    # What is not to end at a deadline.
    patient = sys.argv[1] in ("a_failed_launch", "a_late_rank")
    jflux.init(deadline_seconds=600 if patient else DEADLINE, warn_seconds=1 if patient else 120)
    jflux.config.update(strict=True, always=True, unchecked_kernels=True)
    matmul_all_reduce.MOST_BYTES = 0  # it sums in its kernel
    SCENARIOS[sys.argv[1]]()
    sys.stdout.flush()
    os._exit(0)  # devices may be stuck in a collective of XLA's
