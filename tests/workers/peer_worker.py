"""One of several processes that meet through jax.distributed: peer_worker.py SCENARIO ...

Ends with status 0 and "ok" if all went as the scenario says. Lines that start with "error: " are
the errors that the program got.
"""

import argparse
import contextlib
import faulthandler
import functools
import logging
import os
import signal
import sys
import time
import traceback

import jax
import jax.extend.backend
import jax.numpy as jnp
import numpy as np
from common import expect_error, leave_last  # beside this file
from jax import lax
from jax._src import distributed
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jflux
from jflux import testing
from jflux._ops import _node_exchange as node_exchange_ops

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("scenario")
parser.add_argument("--platform", default="cpu", choices=["cpu", "gpu"])
parser.add_argument("--process", type=int, required=True)
parser.add_argument("--processes", type=int, required=True)
parser.add_argument("--devices", type=int, default=1, help="of each process")
parser.add_argument("--port", type=int, required=True)
parser.add_argument("--nodes", choices=["named"], help="each process is a node")
parser.add_argument("--backend", choices=["nvshmem"], help="of the heap")
parser.add_argument("--next-port", type=int, help="of the store after the first one")
parser.add_argument(
    "--exit", action="store_true", help="ends as a program does, with exit handlers"
)
args = parser.parse_args()

DEADLINE = 5.0
#: In the environment of a process that has replaced another one.
SECOND = "JFLUX_SECOND_PROCESS"
faulthandler.enable()


def start(port=args.port, **options):
    where = options
    if args.scenario == "different_shapes":
        # XLA's processes share the work of tuning, and wait for each other: by program.
        os.environ["XLA_FLAGS"] += " --xla_gpu_shard_autotuning=false"
    if args.platform == "cpu":
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    else:
        first = args.process * args.devices
        where["local_device_ids"] = list(range(first, first + args.devices))
    jax.distributed.initialize(f"127.0.0.1:{port}", args.processes, args.process, **where)
    assert len(jax.devices()) == args.processes * args.devices


def put(mesh, spec, array):
    """A global array that every process has whole."""
    return jax.make_array_from_callback(
        array.shape, NamedSharding(mesh, spec), lambda index: array[index]
    )


def normal(seed, shape, dtype=jnp.bfloat16):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def check(y, want, scale, dtype, terms, factor=1):
    """Compares the shards of y that this process has."""
    bound = factor * testing.tolerance(dtype, terms) * scale
    bound += 8 * float(jnp.finfo(dtype).smallest_subnormal)
    for shard in y.addressable_shards:
        got = np.asarray(shard.data, np.float64)
        error = np.abs(got - want[shard.index])
        assert (error <= bound[shard.index]).all(), (
            f"process {args.process}: off by {error.max()} in shard {shard.index}"
        )


def shard_map(mesh, f, in_specs, out_specs, **options):
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, **options))


def product(op, mesh, axis="tp", rows=3, k=5, n=4, dtype=jnp.bfloat16, seed=0):
    """(f, global operands, exact y, scale, terms) of one call over the mesh's `axis`."""
    ranks = mesh.shape[axis]
    options = {"axis_name": axis}
    if op == "matmul_all_to_all":
        x, w = normal(seed, (ranks * rows, k), dtype), normal(seed + 1, (k, ranks * n), dtype)
        specs, out, terms = (P(axis), P()), P(None, axis), k
        options |= {"split_axis": 1, "concat_axis": 0}
    elif op == "all_gather_matmul":
        x, w = normal(seed, (ranks * rows, k), dtype), normal(seed + 1, (k, ranks * n), dtype)
        specs, out, terms = (P(axis), P(None, axis)), P(None, axis), k
    elif op == "all_to_all_matmul":
        x, w = (
            normal(seed, (ranks * rows, ranks * k), dtype),
            normal(seed + 1, (ranks * k, n), dtype),
        )
        specs, out, terms = (P(None, axis), P()), P(axis), k * ranks
        options |= {"split_axis": 0, "concat_axis": 1}
    else:
        x, w = (
            normal(seed, (ranks * rows, ranks * k), dtype),
            normal(seed + 1, (ranks * k, n), dtype),
        )
        specs, out, terms = (P(None, axis), P(axis)), P(axis), k * ranks
    f = shard_map(mesh, functools.partial(getattr(jflux, op), **options), specs, out)
    operands = [put(mesh, s, a) for s, a in zip(specs, (x, w), strict=True)]
    x, w = x.astype(np.float64), w.astype(np.float64)
    return f, operands, x @ w, abs(x) @ abs(w), terms


def check_products(mesh, axis="tp", dtype=jnp.bfloat16, **sizes):
    ops = ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_to_all"]
    if args.platform == "cpu":  # on GPUs its kernel takes larger shards
        ops.append("all_to_all_matmul")
    for seed, op in enumerate(ops):
        f, operands, want, scale, terms = product(
            op, mesh, axis, dtype=dtype, seed=10 * seed, **sizes
        )
        for _ in range(2):
            testing.poison_workspaces()
            check(jax.block_until_ready(f(*operands)), want, scale, dtype, terms)
    check_all_reduce(mesh, axis, dtype, sizes.get("rows", 3), sizes.get("n", 4))
    if sizes.get("rows", 3) == 3:
        check_exchanges(mesh, axis, dtype, 3, sizes.get("n", 4))


def check_without_a_mesh(mesh):
    """The devices are those of the arguments, in their order, in every process."""
    _, operands, want, scale, terms = product("all_gather_matmul", mesh)
    f = jax.jit(functools.partial(jflux.all_gather_matmul, axis_name="tp"))
    assert [call.plan.path for call in jflux.explain(f, *operands)] == ["fused"]
    check(jax.block_until_ready(f(*operands)), want, scale, jnp.bfloat16, terms)


def check_all_reduce(mesh, axis, dtype, *shape):
    shape = (*mesh.devices.shape, *shape)
    spec, along = P(*mesh.axis_names), mesh.axis_names.index(axis)
    x = normal(3, shape, dtype)
    x64 = x.astype(np.float64)
    want, scale = (np.broadcast_to(a.sum(along, keepdims=True), shape) for a in (x64, abs(x64)))
    for algorithm in ("one_shot", "two_shot"):
        f = shard_map(
            mesh,
            lambda x, a=algorithm: lax.pcast(
                jflux.all_reduce(x, axis_name=axis, algorithm=a), axis, to="varying"
            ),
            spec,
            spec,
        )
        for _ in range(2):
            testing.poison_workspaces()
            y = jax.block_until_ready(f(put(mesh, spec, x)))
            check(y, want, scale, dtype, mesh.shape[axis])


def check_matmul_all_reduce(mesh, rows, k, n, dtype=jnp.bfloat16):
    ranks = mesh.size
    x, w = normal(5, (rows, ranks * k), dtype), normal(6, (ranks * k, n), dtype)
    f = functools.partial(jflux.matmul_all_reduce, axis_name="tp")
    f = shard_map(mesh, f, (P(None, "tp"), P("tp")), P())
    operands = put(mesh, P(None, "tp"), x), put(mesh, P("tp"), w)
    x, w = x.astype(np.float64), w.astype(np.float64)
    for _ in range(2):
        testing.poison_workspaces()
        y = jax.block_until_ready(f(*operands))
        check(y, x @ w, abs(x) @ abs(w), dtype, ranks * k)


def check_exchanges(mesh, axis, dtype, rows, n):
    """Each against lax's own; and a norm after a sum."""
    shape = (*mesh.devices.shape, mesh.shape[axis], rows, n)
    spec = P(*mesh.axis_names)
    x = normal(4, shape, dtype)
    lead = mesh.devices.ndim

    def body(module):
        def f(x):
            x = x.reshape(x.shape[lead:])
            norm = jflux.RMSNorm(jnp.ones(n, jnp.float32), 1.0)
            results = [
                module.all_gather(x, axis_name=axis),
                module.all_to_all(x, axis_name=axis, split_axis=0, concat_axis=1),
                module.reduce_scatter(x, axis_name=axis),
                *module.all_reduce(
                    x, axis_name=axis, residual=jnp.ones(x.shape, x.dtype), norm=norm
                ),
                module.matmul_all_reduce(x[0], x[0], axis_name=axis, transpose_rhs=True),
            ]
            return [y.reshape((1,) * lead + y.shape) for y in results]

        return shard_map(mesh, f, spec, [spec] * 6, check_vma=False)

    got, want = (
        jax.block_until_ready(body(m)(put(mesh, spec, x))) for m in (jflux, jflux.reference)
    )
    for g, w in zip(got, want, strict=True):
        for mine, theirs in zip(g.addressable_shards, w.addressable_shards, strict=True):
            mine, theirs = (np.asarray(a.data, np.float64) for a in (mine, theirs))
            assert mine.shape == theirs.shape
            scale = np.abs(theirs).max() + 1
            assert np.abs(mine - theirs).max() <= 8 * jnp.finfo(dtype).eps * scale


def values():
    """All ops: shapes, types, several tiles and chunks, meshes of all devices in other orders."""
    devices = np.array(jax.devices())
    dtypes = [jnp.bfloat16, jnp.float16] + [jnp.float32] * (args.platform == "cpu")
    mesh = Mesh(devices, ("tp",))
    for rows, k, n in ((1, 1, 1), (3, 5, 4), (130, 40, 17), (20, 300, 1100)):
        for dtype in dtypes if rows < 100 else dtypes[:1]:
            check_products(mesh, dtype=dtype, rows=rows, k=k, n=n)
    check_products(mesh, rows=200, k=1500, n=3)  # several chunks
    check_matmul_all_reduce(mesh, 64, 136, 8192)  # few rows
    check_matmul_all_reduce(mesh, 128 * len(devices), 72, 10240)  # sums of tiles
    check_products(Mesh(devices[::-1], ("tp",)))
    check_products(Mesh(np.roll(devices, 1), ("tp",)), rows=7)
    for order in (devices, devices[::-1]):
        check_without_a_mesh(Mesh(order, ("tp",)))


def groups():
    """Groups along either axis: within processes, across them, and of all devices."""
    devices = np.array(jax.devices())
    mesh = Mesh(devices.reshape(2, -1), ("a", "b"))
    check_products(mesh, "a")
    check_products(mesh, "b", rows=6)
    check_products(Mesh(devices.reshape(2, -1).T, ("a", "b")), "a", rows=2)


def layer(x, w1, w2):
    h = jnp.tanh(jflux.all_gather_matmul(x, w1, axis_name="tp"))
    return jflux.matmul_reduce_scatter(h, w2, axis_name="tp")


def training():
    """Both ops and their gradients in a loop, among psum and all_gather, several steps in flight,
    late ranks."""
    ranks = len(jax.devices())
    mesh = Mesh(np.array(jax.devices()), ("tp",))
    specs = (P("tp"), P(None, "tp"), P("tp"))
    arrays = [normal(0, (4 * ranks, 8)), normal(1, (8, 4 * ranks)), normal(2, (4 * ranks, 8))]
    arrays[1:] = [(a / 4).astype(a.dtype) for a in arrays[1:]]

    def loss(x, w1, w2):
        # The same calls again and again in one execution, while a peer may be an iteration behind.
        y, _ = lax.scan(lambda y, _: (y + layer(y, w1, w2), None), x, length=6)
        return lax.psum(jnp.sum(y.astype(jnp.float32) ** 2), "tp") / y.size

    def step(x, w1, w2):
        value, grads = jax.value_and_grad(loss, (1, 2))(x, w1, w2)
        everyone = lax.all_gather(value, "tp")
        w1, w2 = ((w - g / 64).astype(w.dtype) for w, g in zip((w1, w2), grads, strict=True))
        return w1, w2, jnp.max(everyone, keepdims=True)

    f = shard_map(mesh, step, specs, (P(None, "tp"), P("tp"), P("tp")))
    x, w1, w2 = (put(mesh, s, a) for s, a in zip(specs, arrays, strict=True))
    losses = []
    with testing.planted_faults(max_delay_us=3000):
        for _ in range(10):
            w1, w2, value = f(x, w1, w2)
            losses.append(value)

    def plain(x, w1, w2):
        def loss(x, w1, w2):
            y = x
            for _ in range(6):
                y = y + jnp.tanh(y @ w1) @ w2
            return jnp.sum(y**2) / (y.size // ranks)

        value, (g1, g2) = jax.value_and_grad(loss, (1, 2))(x, w1, w2)
        return w1 - g1 / 64, w2 - g2 / 64, value

    plain = jax.jit(plain)
    state = [np.asarray(a, np.float32) for a in arrays]
    for value in losses:
        w1, w2, want = plain(*state)
        state[1:] = [np.asarray(a, np.float32) for a in (w1, w2)]
        got = np.asarray(value.addressable_shards[0].data, np.float64)
        assert abs(got / float(want) - 1).max() < 0.05, (got, want)


def loops():
    """One call site again and again, whose result the next call takes: a process may be in the next
    iteration while its peer still works on this one. Signed permutations, so every bit is known."""
    ranks, rows, k, steps = len(jax.devices()), 2, 16, 60
    mesh = Mesh(np.array(jax.devices()), ("tp",))
    rng = np.random.default_rng(0)
    x = normal(0, (ranks, rows, k))
    w = np.stack([np.eye(k)[rng.permutation(k)] * rng.choice([-1, 1], k) for _ in range(ranks)])
    w = w.astype(x.dtype)

    def from_next_rank(h, w):
        y = jflux.all_gather_matmul(h, w, axis_name="tp")
        return lax.dynamic_slice_in_dim(y, (lax.axis_index("tp") + 1) % ranks * rows, rows)

    def to_next_rank(h, w):
        blocks = jnp.zeros((ranks, rows, k), h.dtype)
        blocks = lax.pcast(blocks, "tp", to="varying")
        blocks = blocks.at[(lax.axis_index("tp") + 1) % ranks].set(h)
        return jflux.matmul_reduce_scatter(blocks.reshape(-1, k), w, axis_name="tp")

    for hop, sender in ((from_next_rank, 1), (to_next_rank, -1)):

        def body(x, w, hop=hop):
            return lax.scan(lambda h, _: (hop(h, w[0]), None), x[0], length=steps)[0][None]

        want = x
        for _ in range(steps):
            moved = np.roll(want, -sender, axis=0)
            # The weight is the receiver's in one case and the sender's in the other.
            weights = w if sender == 1 else np.roll(w, 1, axis=0)
            want = np.einsum("rik,rkn->rin", moved.astype(np.float32), weights.astype(np.float32))
            want = want.astype(x.dtype)
        f = shard_map(mesh, body, (P("tp"), P("tp")), P("tp"))
        arrays = [put(mesh, P("tp"), a) for a in (x, w)]
        with testing.planted_faults(max_delay_us=500):
            for _ in range(3):
                for shard in f(*arrays).addressable_shards:
                    np.testing.assert_array_equal(np.asarray(shard.data), want[shard.index])


def local_calls():
    """Calls over one process's devices, unknown to the others, between common ones."""
    everyone = Mesh(np.array(jax.devices()), ("tp",))
    own = Mesh(np.array(jax.local_devices()), ("tp",))
    check_products(everyone)
    if args.process == 0:
        check_products(own)
        check_products(own, rows=9)
    check_products(everyone, rows=4)
    if args.process == args.processes - 1:
        check_products(own, rows=2)
        jax.clear_caches()  # and compile everything again, here alone
    check_products(everyone, rows=4)
    check_products(everyone, rows=3)


def compiled_alone():
    """One process compiles the common program for other purposes, with options, and anew."""
    mesh = Mesh(np.array(jax.devices()), ("tp",))
    op = functools.partial(jflux.all_gather_matmul, axis_name="tp")
    twice = jax.jit(op)  # XLA inlines it

    def body(x, w):
        return twice(x, w), twice(2 * x, w)

    f = shard_map(mesh, body, (P("tp"), P(None, "tp")), P(None, "tp"))
    _, operands, want, scale, terms = product("all_gather_matmul", mesh)

    def run(f):
        for _ in range(2):
            for factor, y in enumerate(jax.block_until_ready(f(*operands)), 1):
                check(y, factor * want, factor * scale, jnp.bfloat16, terms)

    alone = args.process == 0
    if alone:
        f.lower(*operands).compile().cost_analysis()
    run(f)
    options = {"xla_cpu_enable_fast_min_max": True}
    run(f.lower(*operands).compile(options) if alone else f)
    run(f)
    if alone:
        jax.clear_caches()
    run(f)


def again():
    """Shutdown and init in all processes, with other settings."""
    mesh = Mesh(np.array(jax.devices()), ("tp",))
    check_products(mesh)
    for deadline in (7, 9):
        lax_barrier(mesh)
        jflux.shutdown()
        jflux.init(deadline_seconds=deadline, heap_bytes=64 << 20, backend=args.backend)
        check_products(mesh)


def replaced():
    """The last process ends, and a new one takes its place, which knows nothing of the first heap.
    The others begin anew."""
    from jflux._heap import _making

    check_products(Mesh(np.array(jax.devices()), ("tp",)))
    if SECOND in os.environ:
        return
    if args.process == args.processes - 1:
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, SECOND: "1"})
    _making.LEAVE_SECONDS = 0.2
    jflux.shutdown()
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # one does not come
        jax.distributed.shutdown()
    state = distributed.global_state
    state.client = state.service = state.preemption_sync_manager = None
    jax.extend.backend.clear_backends()
    start(args.next_port)
    jflux.init(deadline_seconds=60)
    check_products(Mesh(np.array(jax.devices()), ("tp",)))


def lax_barrier(mesh):
    f = shard_map(mesh, lambda x: lax.psum(x, "tp"), P("tp"), P())
    jax.block_until_ready(f(put(mesh, P("tp"), np.ones(mesh.devices.size, np.float32))))


def compiled_by_all(f, *operands):
    """What comes then is no matter of who compiles faster: the deadline is short."""
    compiled = f.lower(*operands).compile()
    distributed.global_state.client.wait_at_barrier("compiled", 60_000)
    return compiled


def dies(how, op):
    """The last process ends between two calls. The others' next call ends in an error."""
    mesh = Mesh(np.array(jax.devices()), ("tp",))
    f, operands, want, scale, terms = product(op, mesh)
    f = compiled_by_all(f, *operands)
    check(jax.block_until_ready(f(*operands)), want, scale, jnp.bfloat16, terms)
    if args.process == args.processes - 1:
        if how == "exit":
            os._exit(17)
        os.kill(os.getpid(), signal.SIGKILL)
    expect_error(f, *operands)


def never_calls():
    """The last process is there, but does something else."""
    mesh = Mesh(np.array(jax.devices()), ("tp",))
    f, operands, want, scale, terms = product("all_gather_matmul", mesh)
    f = compiled_by_all(f, *operands)
    check(jax.block_until_ready(f(*operands)), want, scale, jnp.bfloat16, terms)
    if args.process == args.processes - 1:
        time.sleep(DEADLINE + 5)
    else:
        expect_error(f, *operands)


def different_shapes():
    """The processes call the op with different shapes."""
    mesh = Mesh(np.array(jax.devices()), ("tp",))
    f, operands, *_ = product("all_gather_matmul", mesh, rows=3 + (args.process == 0))
    expect_error(compiled_by_all(f, *operands), *operands)


def different_heaps():
    """The processes ask for heaps of different sizes, and take the least."""
    mesh = Mesh(np.array(jax.devices()), ("tp",))
    lax_barrier(mesh)
    jflux.shutdown()
    jflux.init(heap_bytes=(64 + args.process) << 20, backend=args.backend)
    assert jflux.heap_report().limit == 64 << 20
    check_products(mesh)


def nodes():
    """Each process is a node: calls inside it run kernels (in strict mode anything else is an
    error), beside collectives of all."""
    mesh = Mesh(np.array(jax.devices()).reshape(args.processes, -1), ("node", "tp"))
    check_products(mesh, "tp")
    check_products(Mesh(mesh.devices.T, ("tp", "node")), "tp", rows=2)
    lax_barrier(Mesh(np.array(jax.devices()), ("tp",)))


def exchanges_between(mesh):
    """By name, functions of each rank's [ranks, ...], and the exact results of all ranks' x."""
    ranks = mesh.size
    groups = (tuple(range(ranks)),)
    rows = np.arange(ranks)
    made = {
        "exchange": (
            lambda x: node_exchange_ops.exchange(x, ("tp",), groups),
            lambda x: x.swapaxes(0, 1),
        ),
        "gather": (
            lambda x: node_exchange_ops.gather(x, ("tp",), groups),
            lambda x: np.broadcast_to(x, (ranks, *x.shape)),
        ),
    }
    for steps in range(1, ranks):
        pairs = [((r + steps) % ranks, r) for r in range(ranks)]
        made[f"shift {steps}"] = (
            lambda x, s=steps, p=pairs: node_exchange_ops.shift(x, ("tp",), groups, s, p),
            lambda x, s=steps: x[(rows + s) % ranks],
        )
    return made


def of_each_rank(mesh, f):
    return shard_map(mesh, lambda x: f(x[0])[None], P("tp"), P("tp"))


def check_shards(y, want):
    for shard in y.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), want[shard.index])


def node_exchange():
    """Exchanges between processes that are nodes: every bit, of sizes from a byte to several
    slices, with late ranks and again and again in a loop; then how long small ones take."""
    mesh = Mesh(np.array(jax.devices()), ("tp",))
    ranks = mesh.size
    for name, (f, exact) in exchanges_between(mesh).items():
        g = of_each_rank(mesh, f)
        for shape, dtype in (
            ((1,), np.int8), ((5, 3), jnp.bfloat16), ((1000, 17), np.float32),
            ((3, 70001), np.float16), ((1 << 22,), np.float32),
        ):  # fmt: skip
            x = normal(1, (ranks, ranks, *shape), np.float32) * 100
            x = x.astype(dtype)
            operand = put(mesh, P("tp"), x)
            text = g.lower(operand).as_text()
            assert ("jflux_node_exchange" in text) == (args.backend == "nvshmem"), name
            for _ in range(3):
                testing.poison_workspaces()
                check_shards(jax.block_until_ready(g(operand)), exact(x))
        print("right", name, flush=True)

    hop = exchanges_between(mesh)["exchange"][0]
    again = of_each_rank(mesh, lambda x: lax.scan(lambda h, _: (hop(h) + 1, None), x, length=51)[0])
    x = np.arange(ranks * ranks * 999, dtype=np.float32).reshape(ranks, ranks, 999)
    with testing.planted_faults(max_delay_us=300):
        for _ in range(3):
            check_shards(again(put(mesh, P("tp"), x)), x.swapaxes(0, 1) + 51)
    print("right in a loop with late ranks", flush=True)
    if args.platform == "gpu":
        times(mesh)


def node_exchange_again():
    """After a shutdown: NVSHMEM goes on, and the places of the old workspaces are used again."""
    mesh = Mesh(np.array(jax.devices()), ("tp",))
    x = normal(1, (mesh.size, mesh.size, 5000), np.float32)
    for node in range(3):
        for f, exact in exchanges_between(mesh).values():
            check_shards(of_each_rank(mesh, f)(put(mesh, P("tp"), x)), exact(x))
        lax_barrier(mesh)
        jflux.shutdown()
        jflux.init(node=f"{node} {args.process}", backend=args.backend, heap_bytes=64 << 20)


def two_levels():
    """Each process is a node, and groups span them: values of all ops."""
    mesh = Mesh(np.array(jax.devices()), ("tp",))
    for sizes in ({}, {"rows": 128, "k": 72, "n": 136}, {"rows": 1024, "k": 512, "n": 512}):
        for seed, op in enumerate(
            ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_to_all")
        ):
            f, operands, want, scale, terms = product(op, mesh, seed=10 * seed, **sizes)
            by_nvshmem = "jflux_node_exchange" in f.lower(*operands).as_text()
            assert by_nvshmem == (args.backend == "nvshmem"), op
            for _ in range(3):
                testing.poison_workspaces()
                check(jax.block_until_ready(f(*operands)), want, scale, jnp.bfloat16, terms)
    check_exchanges(mesh, "tp", jnp.bfloat16, 3, 4)
    check_matmul_all_reduce(mesh, 64, 136, 1024)


def nvshmem_reasons():
    """One process asks for NVSHMEM, and gets the usual heap and the reason."""
    logging.basicConfig(stream=sys.stdout)
    jflux.shutdown()
    with jflux.config(strict=False):
        jflux.init(backend="nvshmem")
    assert jflux.heap_report().platform != ""
    assert jflux._heap._jobs["cuda" if args.platform == "gpu" else "cpu"].instead


def times(mesh):
    """Microseconds of one exchange in a loop of many, by NVSHMEM and by XLA's collectives."""
    ranks, steps = mesh.size, 100
    for size in (1 << 10, 1 << 13, 1 << 16, 1 << 20, 1 << 24):
        x = put(mesh, P("tp"), normal(0, (ranks, ranks, size // 4), np.float32))
        found = []
        for fused in (True, False):
            with jflux.config(fused=fused):
                # Another function for each: a cached one would not look at the switch.
                hop = exchanges_between(mesh)["exchange"][0]
                g = of_each_rank(
                    mesh, lambda x, h=hop: lax.scan(lambda a, _: (h(a), None), x, length=steps)[0]
                )
                jax.block_until_ready(g(x))
                spent = []
                for _ in range(5):
                    begin = time.perf_counter()
                    jax.block_until_ready(g(x))
                    spent.append((time.perf_counter() - begin) / steps * 1e6)
                found.append(sorted(spent)[2])
        print(f"time {size} bytes: {found[0]:.1f} us, by XLA {found[1]:.1f} us", flush=True)


def node_never_calls():
    """The last process is there, but does not make the exchange that the others wait for."""
    mesh = Mesh(np.array(jax.devices()), ("tp",))
    f, exact = exchanges_between(mesh)["exchange"]
    x = normal(1, (mesh.size, mesh.size, 100), np.float32)
    operand = put(mesh, P("tp"), x)
    f = compiled_by_all(of_each_rank(mesh, f), operand)
    check_shards(jax.block_until_ready(f(operand)), exact(x))
    if args.process == args.processes - 1:
        time.sleep(DEADLINE + 5)
    else:
        expect_error(f, operand)


def late():
    """The last process comes when the others have given up. Both are there when they try again."""
    from jflux._heap import _rendezvous

    _rendezvous.LEAST_SECONDS = 0.0
    mesh = Mesh(np.array(jax.devices()), ("tp",))
    lax_barrier(mesh)
    jflux.shutdown()
    with jflux.config(strict=False):
        if args.process == args.processes - 1:
            time.sleep(4)
        else:
            jflux.init(deadline_seconds=2, warn_seconds=1)
            assert jflux.heap_report().platform == ""
            print("without a heap", flush=True)
        jflux.init(deadline_seconds=30, warn_seconds=1)
    assert jflux.heap_report().platform != ""
    check_products(mesh)


def absent():
    """The last process does not come before the others have given up. All run the reference, the
    late one too."""
    from jflux._heap import _rendezvous

    _rendezvous.LEAST_SECONDS = 0.0
    mesh = Mesh(np.array(jax.devices()), ("tp",))
    lax_barrier(mesh)
    jflux.shutdown()
    if args.process == args.processes - 1:
        time.sleep(4)
    jflux._heap._settings = jflux._heap.Settings(deadline_seconds=2.0, warn_seconds=1.0)
    with jflux.config(strict=False):
        f, operands, want, scale, terms = product("all_gather_matmul", mesh)
        assert "jflux_" not in f.lower(*operands).as_text()
        check(f(*operands), want, scale, jnp.bfloat16, terms)
    assert jflux.heap_report().platform == ""


SCENARIOS = {
    "values": values,
    "groups": groups,
    "training": training,
    "loops": loops,
    "local_calls": local_calls,
    "compiled_alone": compiled_alone,
    "again": again,
    "replaced": replaced,
    "exit": functools.partial(dies, "exit", "all_gather_matmul"),
    "kill": functools.partial(dies, "kill", "matmul_reduce_scatter"),
    "never_calls": never_calls,
    "different_shapes": different_shapes,
    "different_heaps": different_heaps,
    "nodes": nodes,
    "node_exchange": node_exchange,
    "node_exchange_again": node_exchange_again,
    "node_never_calls": node_never_calls,
    "nvshmem_reasons": nvshmem_reasons,
    "two_levels": two_levels,
    "late": late,
    "absent": absent,
}

if __name__ == "__main__":
    if args.scenario == "replaced":
        jax.config.update("jax_enable_recoverability", True)  # JAX ends who has lost another one
    if SECOND in os.environ:
        start(args.next_port)
    elif args.scenario == "replaced":
        start(shutdown_timeout_seconds=1)
    else:
        start()
    jflux.config.update(strict=True, always=True, unchecked_kernels=True)
    scenarios = args.scenario.split(",")
    fails = scenarios[0] in (
        "exit", "kill", "never_calls", "different_shapes", "node_never_calls",
    )  # fmt: skip
    node = str(args.process) if args.nodes == "named" else None
    jflux.init(deadline_seconds=DEADLINE if fails else 60, node=node, backend=args.backend)
    for scenario in scenarios:
        try:
            SCENARIOS[scenario]()
        except BaseException:
            traceback.print_exc()
            sys.stdout.flush()
            os._exit(1)  # at once: jax.distributed would wait for those that wait for this one
        print("ok", scenario, flush=True)
    if fails or "replaced" in scenarios:  # where processes are recoverable, none waits for others
        leave_last(args.process)
    else:
        jax.distributed.shutdown()  # waits for the others
    if args.exit:
        sys.exit(0)
    os._exit(0)
