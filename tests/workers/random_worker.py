"""One rank of tests/shared_gpu.py."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import faulthandler
import functools
import itertools
import math
import os
import random
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import jax

parser = argparse.ArgumentParser(description=__doc__)
for name in ("ranks", "calls", "seed", "steps", "rank", "port", "gpus"):
    parser.add_argument(f"--{name}", type=int, required=True)
parser.add_argument("--kind", required=True)
parser.add_argument("--graphs", action="store_true")
args = parser.parse_args()

if args.gpus == 0:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(
    f"127.0.0.1:{args.port}", args.ranks, args.rank,
    local_device_ids=[args.rank % args.gpus] if args.gpus else None,
)  # fmt: skip

# These look at the devices.
import custom_primitives  # noqa: E402
import harness  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax import lax  # noqa: E402
from jax._src.distributed import global_state  # noqa: E402
from jax.sharding import Mesh, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import jflux  # noqa: E402
from jflux import _config, _native, _tuning, testing  # noqa: E402
from jflux._ops import exchange  # noqa: E402
from jflux._ops.all_reduce import ALGORITHMS  # noqa: E402

ROWS = [1, 3, 16, 31, 64, 100, 129, 200, 256]
K = [8, 13, 64, 72, 136, 200, 264, 520, 1000]
N = [8, 31, 64, 136, 264, 520, 1032, 2056]
BARRIERS = itertools.count()
STEPS = 24  # of a loop that GPUs capture; --steps are several such
LIBRARY = os.environ.get(custom_primitives.LIBRARY)
MOST_PRODUCTS = 1 << 28  # of one rank: the host does them in float64


@dataclasses.dataclass
class Case:
    """A call, and what it should give: arrays are [*mesh, ...]."""

    name: str
    mesh: Any
    body: Callable[..., Any]  # of each device's operands
    operands: tuple[Any, ...]
    want: Any  # float64
    scale: Any  # the same of absolute values
    dtype: Any
    terms: int
    choice: Any = None
    in_chunks: bool = False  # an exchange
    is_xlas: bool = False  # at least in part: its bits need not be the same in another program


def barrier() -> None:
    global_state.client.wait_at_barrier(f"barrier {next(BARRIERS)}", 60_000)


def put(array: Any, mesh: Any) -> Any:
    sharding = NamedSharding(mesh, P(*mesh.axis_names))
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


@contextlib.contextmanager
def forced(case: Case) -> Iterator[None]:
    """What is lowered inside takes the case's choice, if there is one."""
    decomposed = case.choice == _tuning.DECOMPOSED
    with (
        _tuning.force(case.choice) if case.choice else contextlib.nullcontext(),
        _config.override(chunked=True) if case.in_chunks else contextlib.nullcontext(),
        jflux.config(always=False) if decomposed else contextlib.nullcontext(),
    ):
        yield


def run_and_check(case: Case, epochs: int | None) -> None:
    """Six calls in two runs, from poisoned workspaces: this rank's part must be right, and the same
    each time. With `epochs`, as if before the second run there had been so many calls."""

    def thrice(*operands):
        return lax.scan(lambda _, __: (None, case.body(*operands)), None, length=3)[1]

    f = jax.jit(harness.per_device(case.mesh, thrice))
    operands = tuple(put(a, case.mesh) for a in case.operands)
    lead = case.mesh.devices.ndim
    bits = set()
    for run in range(2):
        testing.poison_workspaces()
        if run == 1 and epochs is not None and args.gpus:
            barrier()
            testing.set_epochs(epochs)
            barrier()
        with forced(case):
            y = jax.block_until_ready(f(*operands))
        (shard,) = y.addressable_shards
        at = shard.index[:lead]
        for got in np.moveaxis(np.asarray(shard.data), lead, 0):
            harness.assert_close(got, case.want[at], case.scale[at], case.dtype, case.terms)
            bits.add(got.tobytes())
    assert len(bits) == 1, "two runs differ"


def replay_and_check(case: Case) -> None:
    """A loop, whose calls GPUs capture and replay, with other inputs in each step: the same bits as
    call by call, and as in every other run of the loop; and after its first run most kernels were
    enqueued by replays."""
    factors, signs = np.resize(np.float32([1, 2, 0.5]), STEPS), (1, -1, 2)

    def scaled(factor, x, *rest):
        return case.body(x * factor.astype(x.dtype), *rest)

    def loop(factors, *operands):
        def step(_, factor):
            # What tests/test_graphs.py says of such a loop.
            return None, [2 * scaled(sign * factor, *operands) for sign in signs]

        return lax.scan(step, None, factors)[1]

    def wide(value):
        return put(np.broadcast_to(value, (*case.mesh.devices.shape, *np.shape(value))), case.mesh)

    def here(y):
        (shard,) = y.addressable_shards
        return shard.data

    def mine(y):
        return np.asarray(here(y)).reshape(y.shape[case.mesh.devices.ndim :])

    operands = tuple(put(a, case.mesh) for a in case.operands)
    once, many = (jax.jit(harness.per_device(case.mesh, f)) for f in (scaled, loop))

    def replayed():
        before = _native.lib.cuda_launches() if args.gpus else 0
        results = jax.block_until_ready(many(wide(factors), *operands))
        launches = _native.lib.cuda_launches() - before if args.gpus else 0
        kernels = STEPS * len(signs)
        assert launches <= kernels / 4, f"the host enqueued {launches} of {kernels} kernels"
        return results

    with forced(case):
        jax.block_until_ready(many(wide(factors), *operands))
        results = replayed()
        for _ in range(STEPS, args.steps, STEPS):
            for first, y in zip(results, replayed(), strict=True):
                assert jnp.array_equal(here(first), here(y)), "two runs of the loop differ"
        for sign, ys in zip(signs, results, strict=True):
            for i in (0, 1, STEPS - 1):
                got, want = mine(ys)[i], 2 * mine(once(wide(sign * factors[i]), *operands))
                if case.is_xlas:
                    scale = 4 * mine(put(case.scale, case.mesh))
                    harness.assert_close(got, want, scale, case.dtype, 2 * case.terms)
                else:
                    np.testing.assert_array_equal(got, want)


@functools.cache
def orders() -> list[list[Any]]:
    """Of the devices, a few: each brings groups of its own, and the heap a workspace for each."""
    rng, devices = random.Random(args.seed), jax.devices()
    return [rng.sample(devices, len(devices)) for _ in range(4)]


def draw(rng: random.Random) -> Case:
    """A call over all ranks, in some order, or over the rows or columns of a mesh of them."""
    devices = rng.choice(orders())
    sizes = [n for n in range(1, len(devices) + 1) if len(devices) % n == 0]
    mesh = Mesh(np.array(devices).reshape(rng.choice(sizes), -1), ("a", "b"))
    axis_name = rng.choice(["a", "b", ("a", "b"), ("b", "a")])
    kinds = [_product] * 6 + [_few_columns] * 3
    kinds += [_waves] * (2 if args.gpus or args.kind == "waves" else 0)  # CPUs compute no waves
    kinds += [_sum, _norm, _large_sum, _exchange, _pieces] + [_custom] * (LIBRARY is not None)
    if args.kind != "any":
        kinds = [kind for kind in kinds if kind.__name__ == f"_{args.kind}"]
    return rng.choice(kinds)(rng, mesh, axis_name)


def _draw_choice(rng: random.Random) -> Any:
    """A configuration that is compiled, or none."""
    if harness.PLATFORM != "gpu" or rng.random() < 0.3:
        return None
    choice = rng.choice(_tuning.compiled())
    if (choice.tile_n, choice.cluster_m) == (128, 1):
        choice = dataclasses.replace(choice, splits=rng.choice([1, 2, 4]))
    return dataclasses.replace(choice, group_m=rng.choice([0, 1, 3, choice.group_m]))


def _product(
    rng: random.Random, mesh: Any, axis_name: Any, most: int = MOST_PRODUCTS, **fields: Any
) -> Case:
    """One of the products, in any configuration that is compiled, or decomposed."""
    world = harness.world_of(mesh, axis_name)
    while True:
        lead = fields.get("lead") or (*rng.choice([(), (), (), (2,)]), rng.choice(ROWS))
        op = rng.choice(harness.OPS)
        axes = range(-len(lead) - 1, len(lead) + 1)
        split = {"split": rng.choice(axes), "concat": rng.choice(axes)}
        drawn = {
            "op": op, "lead": lead, "dimension": rng.randrange(len(lead)), "k": rng.choice(K),
            "n": rng.choice(N), "dtype": rng.choice(harness.HALVES),
            "out": rng.choice([None, None, jnp.float32]), "transpose_rhs": rng.random() < 0.5,
        }  # fmt: skip
        call = harness.Call(**drawn | split | fields)
        if world * math.prod(call.lead) * call.n * call.k <= most:
            break
    x, w = harness.operands(call, mesh, axis_name, seed=rng.randrange(1 << 30))
    choice = _draw_choice(rng)
    size = 4 * world * math.prod(call.lead) * max(call.n, call.k)
    if not call.is_exchange and size <= exchange.MOST_BYTES_IN_PACKETS:
        choice = rng.choice([choice, choice, choice, _tuning.DECOMPOSED])
    want = harness.exact(call, mesh, axis_name, x, w)
    scale = harness.exact(call, mesh, axis_name, abs(x), abs(w))
    f, more = call.bind(axis_name), ()
    if not call.is_exchange and rng.random() < 0.3:
        # A bias for each column, and relu or a residual.
        lead = mesh.devices.shape
        bias = harness.normal(1, (*lead, call.n), np.float32)
        wide = bias.reshape(*lead, *[1] * len(call.lead), call.n)
        want, scale, more = want + wide, scale + abs(wide), (bias,)
        if call.is_gather:
            want = np.maximum(want, 0)
            f = functools.partial(f, activation="relu")
        else:
            residual = harness.normal(2, want.shape, call.out_dtype)
            want, scale = want + residual.astype(np.float64), scale + abs(residual)
            more += (residual,)

    def body(x, w, bias=None, residual=None):
        options = {"bias": bias, "residual": residual}
        return f(x, w, **{name: a for name, a in options.items() if a is not None})

    return Case(
        name=f"{call.op} {call} {axis_name} {choice} {'and more' if more else ''}",
        mesh=mesh,
        body=body,
        operands=(x, w, *more),
        want=want,
        scale=scale,
        dtype=call.dtype,
        terms=call.terms(world),
        choice=choice,
        # An all-to-all may be two calls as well.
        is_xlas=world == 1 or choice == _tuning.DECOMPOSED or call.is_exchange,
    )


def _waves(rng: random.Random, mesh: Any, axis_name: Any) -> Case:
    """A product of more tiles than a GPU computes at a time, with more k-blocks than there are
    stages: store warps wait for the send semaphore (cc/gpu/send_semaphore.cuh), and not all CTAs
    send rows."""
    lead, k = rng.choice([(192,), (256,), (2, 128)]), rng.choice([328, 392, 520])
    n = rng.choice([6152, 8200])
    return _product(rng, mesh, axis_name, most=1 << 34, lead=lead, k=k, n=n)


def _few_columns(rng: random.Random, mesh: Any, axis_name: Any) -> Case:
    """Few rows, and fewer tiles than SMs: clusters share k."""
    op = rng.choice(["all_gather_matmul", "matmul_reduce_scatter"])
    rows = rng.choice([1, 8, 16, 21, 32])
    return _product(rng, mesh, axis_name, op=op, lead=(rows,), dimension=0)


def _sums_of(mesh: Any, axis_name: Any, *arrays: Any) -> list[Any]:
    """Of each array, for each device, the sum over its group, in float64."""
    sums = [np.empty(a.shape) for a in arrays]
    for group in harness.groups_of(mesh, axis_name):
        for one, a in zip(sums, arrays, strict=True):
            total = sum(a[at].astype(np.float64) for at in group)
            for at in group:
                one[at] = total
    return sums


def _sum(rng: random.Random, mesh: Any, axis_name: Any) -> Case:
    world = harness.world_of(mesh, axis_name)
    dtype = rng.choice([*harness.HALVES, jnp.float32])
    sizes = [1, 7, 1000, 4096, 65536, 300_001]
    algorithm = rng.choice(ALGORITHMS)
    if algorithm == "chunked":  # above 1 MiB for each rank to sum chunks are larger
        sizes.append(world * (1 << 19) + 12_345)
    size = rng.choice(sizes)
    x = harness.normal(rng.randrange(1 << 30), (*mesh.devices.shape, size), dtype)
    want, scale = _sums_of(mesh, axis_name, x, abs(x))
    return Case(
        name=f"all_reduce {algorithm} {size} {axis_name}",
        mesh=mesh,
        body=functools.partial(jflux.all_reduce, axis_name=axis_name, algorithm=algorithm),
        operands=(x,),
        want=want,
        scale=scale,
        dtype=dtype,
        terms=world,
    )


def _norm(rng: random.Random, mesh: Any, axis_name: Any) -> Case:
    """A residual and a norm after an all_reduce, in its kernel where all goes to all at once, or
    where two-shot is asked for."""
    world, dtype = harness.world_of(mesh, axis_name), rng.choice(harness.HALVES)
    rows, width = rng.choice([1, 3, 16, 33, 40]), rng.choice([64, 1000, 4096, 8192])
    algorithm = rng.choice([None, None, "one_shot", "two_shot"])
    x = harness.normal(rng.randrange(1 << 30), (*mesh.devices.shape, rows, width), dtype)
    # The same on all ranks: constants of the program.
    residual = harness.normal(1, (rows, width), dtype)
    scale, bias = (harness.normal(seed, (width,), np.float32) for seed in (2, 3))
    norm = rng.choice([jflux.RMSNorm(scale), jflux.LayerNorm(scale), jflux.LayerNorm(scale, bias)])

    def body(x):
        return jflux.all_reduce(
            x, axis_name=axis_name, residual=residual, norm=norm, algorithm=algorithm
        )[1]

    sums, sizes = _sums_of(mesh, axis_name, x, abs(x))
    sums, sizes = sums + residual.astype(np.float64), sizes + abs(residual).astype(np.float64)
    if norm.name == "layer":
        sums = sums - np.mean(sums, -1, keepdims=True)
        sizes = sizes + np.mean(sizes, -1, keepdims=True)
    over = scale / np.sqrt(np.mean(sums**2, -1, keepdims=True) + 1e-6)
    added = norm.factors[1] if len(norm.factors) > 1 else 0
    return Case(
        name=f"{norm.name}-norm {algorithm} {rows} x {width} {axis_name}",
        mesh=mesh,
        body=body,
        operands=(x,),
        want=sums * over + added,
        scale=sizes * abs(over) + abs(added),
        dtype=dtype,
        terms=world,
        is_xlas=world == 1,
    )


def _large_sum(rng: random.Random, mesh: Any, axis_name: Any) -> Case:
    """matmul_all_reduce in one kernel: whole tiles for each rank, or, on two, few rows."""
    world, dtype = harness.world_of(mesh, axis_name), rng.choice(harness.HALVES)
    k, transpose_rhs = rng.choice([64, 136, 392]), rng.random() < 0.5
    if world == 2 and rng.random() < 0.5:
        rows, n = rng.choice([32, 100, 128]), rng.choice([8200, 10248])
    else:  # a row of tiles for each rank, or several, and columns that make it more than 4 MiB
        rows = 128 * world * rng.choice([1, 1, 2, 3])
        n = (2 << 20) // rows // 8 * 8 + rng.choice([8, 1032])
    lead = mesh.devices.shape
    x = harness.normal(rng.randrange(1 << 30), (*lead, rows, k), dtype)
    w = harness.normal(rng.randrange(1 << 30), (*lead, k, n), dtype)
    want, scale = _sums_of(
        mesh, axis_name, *(a.astype(np.float32) @ b for a, b in ((x, w), (abs(x), abs(w))))
    )
    residual = None
    if rng.random() < 0.5:  # of the program: the same on all ranks
        residual = harness.normal(1, (rows, n), dtype)
        want, scale = want + residual.astype(np.float64), scale + abs(residual)
    choice = _draw_choice(rng)

    def body(x, w):
        return jflux.matmul_all_reduce(
            x, w, axis_name=axis_name, transpose_rhs=transpose_rhs, residual=residual
        )

    return Case(
        name=f"matmul_all_reduce {rows} x {n} x {k} {transpose_rhs=} {axis_name} {choice} "
        f"{'' if residual is None else 'and a residual'}",
        mesh=mesh,
        body=body,
        operands=(x, np.ascontiguousarray(np.swapaxes(w, -1, -2)) if transpose_rhs else w),
        want=want,
        scale=scale,
        dtype=dtype,
        terms=world * k,
        choice=choice,
        is_xlas=world == 1,
    )


def _exchange(rng: random.Random, mesh: Any, axis_name: Any) -> Case:
    """There and back: rank r sends its shard s to rank s, which sends it back doubled; and what
    all ranks have, gathered, scattered and summed again, is so many times as much."""
    world = harness.world_of(mesh, axis_name)
    in_chunks = rng.random() < 0.5
    size = rng.choice([1, 5, 64, 1000, 20_000, *[700_001] * in_chunks])
    x = harness.normal(rng.randrange(1 << 30), (*mesh.devices.shape, world, size), jnp.bfloat16)

    def body(x):
        there = jflux.all_to_all(x, axis_name=axis_name, split_axis=0, concat_axis=0)
        back = jflux.all_to_all(2 * there, axis_name=axis_name, split_axis=0, concat_axis=0)
        all_of_it = jflux.all_gather(x[0], axis_name=axis_name)
        return back + jflux.reduce_scatter(all_of_it, axis_name=axis_name)

    first = np.broadcast_to(x[..., :1, :], x.shape).astype(np.float64)
    wide = x.astype(np.float64)
    return Case(
        name=f"exchange {size} {axis_name}{' in chunks' if in_chunks else ''}",
        mesh=mesh,
        body=body,
        operands=(x,),
        want=2 * wide + world * first,
        scale=2 * abs(wide) + world * abs(first),
        dtype=jnp.bfloat16,
        terms=world,
        in_chunks=in_chunks,
    )


def _pieces(rng: random.Random, mesh: Any, axis_name: Any) -> Case:
    """One exchange, along any dimensions that shards are parts of, or make."""
    world = harness.world_of(mesh, axis_name)
    dtype = rng.choice([*harness.HALVES, jnp.float32])
    op, tiled = rng.choice(["all_gather", "reduce_scatter", "all_to_all"]), rng.random() < 0.5
    in_chunks = rng.random() < 0.5
    shape = [rng.choice([1, 2, 5, 24, 65]) for _ in range(3)]
    split, concat = rng.randrange(3), rng.randrange(3 + (op == "all_gather" and not tiled))
    if op != "all_gather":
        shape[split] = world * shape[split] if tiled else world
    x = harness.normal(rng.randrange(1 << 30), (*mesh.devices.shape, *shape), dtype)
    options: dict[str, Any] = {"tiled": tiled}
    if op == "all_gather":
        options["axis"] = concat
    elif op == "reduce_scatter":
        options["scatter_dimension"] = split
    else:
        options |= {"split_axis": split, "concat_axis": concat}

    results: list[dict[Any, Any]] = [{}, {}]
    for group in harness.groups_of(mesh, axis_name):
        for result, array in zip(results, (x, abs(x)), strict=True):
            ys = harness.exchanged(op, [array[at].astype(np.float64) for at in group], **options)
            result |= dict(zip(group, ys, strict=True))
    want, scale = (
        np.stack([result[at] for at in np.ndindex(mesh.devices.shape)]).reshape(
            *mesh.devices.shape, *result[0, 0].shape
        )
        for result in results
    )
    return Case(
        name=f"{op} {shape} {options} {axis_name}{' in chunks' if in_chunks else ''}",
        mesh=mesh,
        body=functools.partial(getattr(jflux, op), axis_name=axis_name, **options),
        operands=(x,),
        want=want,
        scale=scale,
        dtype=dtype,
        terms=world,
        in_chunks=in_chunks,
    )


def _custom(rng: random.Random, mesh: Any, axis_name: Any) -> Case:
    """Every device primitive, of the library that the environment names."""
    world, count = harness.world_of(mesh, axis_name), rng.choice([1, 5, 37, 256, 1001])
    shape = (*mesh.devices.shape, *custom_primitives.x_shape(world, count))
    x = harness.normal(rng.randrange(1 << 30), shape, np.float32)

    def body(x):
        bits = lax.bitcast_convert_type(x, jnp.int32)
        y = custom_primitives.every_primitive(bits, axis_name=axis_name)
        return lax.bitcast_convert_type(y, jnp.float32)

    want = custom_primitives.exact(mesh, axis_name, x.view(np.int32)).view(np.float32)
    return Case(
        name=f"custom {count} {axis_name}",
        mesh=mesh,
        body=body,
        operands=(x,),
        want=want.astype(np.float64),
        scale=abs(want).astype(np.float64),
        dtype=np.float32,
        terms=1,
    )


def main() -> None:
    faulthandler.enable()
    jflux.config.update(strict=True, always=True)
    if LIBRARY is not None:
        custom_primitives.load(LIBRARY)
    jflux.init(deadline_seconds=30)
    rng = random.Random(args.seed)
    start = time.monotonic()
    counts: dict[str, int] = {}
    for done in range(1, args.calls + 1):
        case = draw(rng)
        try:
            with testing.planted_faults(max_delay_us=rng.choice([0, 0, 2000])):
                # They are counted in 32 bits.
                run_and_check(case, rng.choice([None, 2**32 - rng.randint(1, 4)]))
                if args.graphs:
                    replay_and_check(case)
        except Exception as error:
            raise AssertionError(f"rank {args.rank}, call {done}, {case.name}") from error
        kind = case.name.split()[0]
        counts[kind] = counts.get(kind, 0) + 1
        if done % 25 == 0:
            jax.clear_caches()
        if args.rank == 0:
            print(f"\r{done}/{args.calls} calls", end="", file=sys.stderr, flush=True)
    if args.rank == 0:
        said = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
        print(
            f"\n{args.calls} calls right ({said}), {args.ranks} ranks on {args.gpus or 'no'} GPUs: "
            f"{time.monotonic() - start:.0f} s (seed={args.seed})"
        )


try:
    main()
except BaseException:
    traceback.print_exc()
    os._exit(1)  # at once: jax.distributed would wait for those that wait for this one
