"""One rank of tests/shared_gpu.py."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import faulthandler
import functools
import itertools
import os
import random
import sys
import time
import traceback
from collections.abc import Iterator
from typing import Any

import jax

from workers.common import join

parser = argparse.ArgumentParser(description=__doc__)
for name in ("ranks", "calls", "seed", "steps", "rank", "port", "gpus"):
    parser.add_argument(f"--{name}", type=int, required=True)
parser.add_argument("--kind", required=True)
parser.add_argument("--graphs", action="store_true")
parser.add_argument("--op")
parser.add_argument("--portable", action="store_true")
parser.add_argument("--small", action="store_true")
parser.add_argument("--deadline", type=float, required=True)
args = parser.parse_args()

join(args)

# These look at the devices.
import custom_primitives  # noqa: E402
import harness  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax import lax  # noqa: E402
from jax._src.distributed import global_state  # noqa: E402
from jax.sharding import Mesh  # noqa: E402

import jflux  # noqa: E402
from jflux import _config, _native, testing  # noqa: E402
from jflux._call import tuning_tables  # noqa: E402
from jflux._ops._spec import OpSpec, all_ops  # noqa: E402
from jflux._ops.collectives.exchange import MOST_BYTES_IN_PACKETS  # noqa: E402
from jflux._stress import attention, calls, cases, collectives, mixtures, products  # noqa: E402
from jflux._stress.cases import Case  # noqa: E402
from jflux._stress.programs import draw_choice, put  # noqa: E402

BARRIERS = itertools.count()
STEPS = 24  # of a loop that GPUs capture; --steps are several such
LIBRARY = os.environ.get(custom_primitives.LIBRARY)
# Of one rank: the host does them in float64.
MOST_PRODUCTS = 1 << (20 if args.small else 28)


@dataclasses.dataclass
class Chosen:
    """A call, and how its kernels are told to make it."""

    case: Case
    seed: int
    choice: Any = None
    in_chunks: bool = False  # an exchange

    def __str__(self) -> str:
        chunks = " in chunks" if self.in_chunks else ""
        return f"{self.case.name} {self.choice or ''}{chunks}"

    @property
    def is_xlas(self) -> bool:
        """Whether its bits need not be the same in another program."""
        return self.case.is_xlas or self.choice == tuning_tables.DECOMPOSED


def barrier() -> None:
    global_state.client.wait_at_barrier(f"barrier {next(BARRIERS)}", int(2000 * args.deadline))


@contextlib.contextmanager
def forced(chosen: Chosen) -> Iterator[None]:
    """What is lowered inside takes the call's choice, if there is one."""
    decomposed = chosen.choice == tuning_tables.DECOMPOSED
    with (
        tuning_tables.force(chosen.choice) if chosen.choice else contextlib.nullcontext(),
        _config.override(chunked=True) if chosen.in_chunks else contextlib.nullcontext(),
        jflux.config(always=False) if decomposed else contextlib.nullcontext(),
    ):
        yield


def run_and_check(chosen: Chosen, epochs: int | None) -> None:
    """Six calls in two runs, from poisoned workspaces: this rank's part must be right, and the same
    each time. With `epochs`, as if before the second run there had been so many calls."""
    case = chosen.case

    def thrice(*operands):
        return lax.scan(lambda _, __: (None, case.body(*operands)), None, length=3)[1]

    f = jax.jit(calls.per_device(case.mesh, thrice))
    arrays, outputs = case.make(chosen.seed)
    operands = tuple(put(a, case.mesh) for a in arrays)
    lead = case.mesh.devices.ndim
    bits: list[set[bytes]] = [set() for _ in outputs]
    for run in range(2):
        testing.poison_workspaces()
        if run == 1 and epochs is not None and args.gpus:
            barrier()
            testing.set_epochs(epochs)
            barrier()
        with forced(chosen):
            results = jax.tree.leaves(jax.block_until_ready(f(*operands)))
        for y, output, found in zip(results, outputs, bits, strict=True):
            (shard,) = y.addressable_shards
            at = shard.index[:lead]
            want, scale = output.want[at], output.scale[at]
            for got in np.moveaxis(np.asarray(shard.data), lead, 0):
                calls.assert_close(got, want, scale, output.dtype, output.terms)
                found.add(got.tobytes())
    assert all(len(found) == 1 for found in bits), "two runs differ"


def replay_and_check(chosen: Chosen) -> None:
    """A loop, whose calls GPUs capture and replay, with other inputs in each step: the same bits as
    call by call, and as in every other run of the loop; and after its first run most kernels were
    enqueued by replays."""
    case = chosen.case
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

    arrays, (output,) = case.make(chosen.seed)
    operands = tuple(put(a, case.mesh) for a in arrays)
    once, many = (jax.jit(calls.per_device(case.mesh, f)) for f in (scaled, loop))

    def replayed():
        before = _native.lib.cuda_launches() if args.gpus else 0
        results = jax.block_until_ready(many(wide(factors), *operands))
        launches = _native.lib.cuda_launches() - before if args.gpus else 0
        kernels = STEPS * len(signs)
        assert launches <= kernels / 4, f"the host enqueued {launches} of {kernels} kernels"
        return results

    with forced(chosen):
        jax.block_until_ready(many(wide(factors), *operands))
        results = replayed()
        for _ in range(STEPS, args.steps, STEPS):
            for first, y in zip(results, replayed(), strict=True):
                assert jnp.array_equal(here(first), here(y)), "two runs of the loop differ"
        for sign, ys in zip(signs, results, strict=True):
            for i in (0, 1, STEPS - 1):
                got, want = mine(ys)[i], 2 * mine(once(wide(sign * factors[i]), *operands))
                if chosen.is_xlas:
                    scale = 4 * mine(put(output.scale, case.mesh))
                    calls.assert_close(got, want, scale, output.dtype, 2 * output.terms)
                else:
                    np.testing.assert_array_equal(got, want)


@functools.cache
def orders() -> list[list[Any]]:
    """Of the devices, a few: each brings groups of its own, and the heap a workspace for each."""
    rng, devices = random.Random(args.seed), jax.devices()
    return [rng.sample(devices, len(devices)) for _ in range(4)]


def draw(rng: random.Random) -> Chosen:
    """A call over all ranks, in some order, or over the rows or columns of a mesh of them."""
    devices = rng.choice(orders())
    sizes = [n for n in range(1, len(devices) + 1) if len(devices) % n == 0]
    mesh = Mesh(np.array(devices).reshape(rng.choice(sizes), -1), ("a", "b"))
    axis_name = rng.choice(["a", "b", ("a", "b"), ("b", "a")])
    platform = "cuda" if harness.PLATFORM == "gpu" else "cpu"
    place = cases.Place(mesh, axis_name, platform, MOST_PRODUCTS)
    if args.op:
        return _of_op(rng, place, all_ops()[args.op])
    kinds = [_product] * 6 + [_few_columns] * 3
    kinds += [_waves] * (2 if args.gpus or args.kind == "waves" else 0)  # CPUs compute no waves
    kinds += [_sum, _quantized_sum, _norm, _large_sum, _exchange, _one_exchange] + [_custom] * (
        LIBRARY is not None
    )
    kinds += [_dispatch, _experts]
    if not args.graphs:  # a loop would round factors of 8 bits; attention has two results
        kinds += [_scaled, _scaled, _attention]
    if args.kind != "any":
        kinds = [kind for kind in kinds if kind.__name__ == f"_{args.kind}"]
    return rng.choice(kinds)(rng, place)


def _chosen(rng: random.Random, case: Case, **how: Any) -> Chosen:
    return Chosen(case, rng.randrange(1 << 30), **how)


def _of_op(rng: random.Random, place: cases.Place, spec: OpSpec) -> Chosen:
    if spec.name == "all_reduce":
        return rng.choice([_sum, _norm])(rng, place)
    if spec.product is None:
        case = collectives.collective(rng, place, spec=spec)
        return _chosen(rng, case, in_chunks=rng.random() < 0.5)
    return (
        _product(rng, place, op=spec.name) if spec.name in harness.OPS else _large_sum(rng, place)
    )


def _product(rng: random.Random, place: cases.Place, **fields: Any) -> Chosen:
    """One of the products, in any configuration that is compiled, or decomposed."""
    # A gathered x would be a second result; and sums for all ranks have a kind of their own.
    names = [fields["op"]] if "op" in fields else harness.OPS
    spec = all_ops()[rng.choice(names)]
    drawn = {"dtype": rng.choice(calls.HALVES), "gathered": False} | fields
    case = products.product(rng, place, spec=spec, **drawn)
    choice = draw_choice(rng, place.platform)
    if not case.is_xlas and rng.random() < 0.25 and case.most_bytes <= MOST_BYTES_IN_PACKETS:
        choice = tuning_tables.DECOMPOSED
    return _chosen(rng, case, choice=choice)


def _waves(rng: random.Random, place: cases.Place) -> Chosen:
    """A product of more tiles than a GPU computes at a time, with more k-blocks than there are
    stages: store warps wait for the send semaphore (cc/gpu/send_semaphore.cuh), and not all CTAs
    send rows."""
    lead, k = rng.choice([(192,), (256,), (2, 128)]), rng.choice([328, 392, 520])
    n = rng.choice([6152, 8200])
    place = dataclasses.replace(place, most_products=1 << 34)
    return _product(rng, place, lead=lead, k=k, n=n)


def _few_columns(rng: random.Random, place: cases.Place) -> Chosen:
    """Few rows, and fewer tiles than SMs: clusters share k."""
    op = rng.choice(["all_gather_matmul", "matmul_reduce_scatter"])
    return _product(rng, place, op=op, lead=(rng.choice([1, 8, 16, 21, 32]),), dimension=0)


def _sum(rng: random.Random, place: cases.Place) -> Chosen:
    return _chosen(rng, collectives.all_reduce(rng, place))


def _quantized_sum(rng: random.Random, place: cases.Place) -> Chosen:
    case = rng.choice(
        [
            collectives.quantized_sum, collectives.quantized_exchange, products.quantized_scatter,
            mixtures.quantized_combine, mixtures.quantized_experts,
        ]
    )  # fmt: skip
    return _chosen(rng, case(rng, place))


def _norm(rng: random.Random, place: cases.Place) -> Chosen:
    return _chosen(rng, collectives.norm(rng, place))


def _large_sum(rng: random.Random, place: cases.Place) -> Chosen:
    case = products.large_sum(rng, place)
    return _chosen(rng, case, choice=draw_choice(rng, place.platform))


def _scaled(rng: random.Random, place: cases.Place) -> Chosen:
    return _chosen(rng, products.scaled(rng, place), choice=draw_choice(rng, place.platform))


def _dispatch(rng: random.Random, place: cases.Place) -> Chosen:
    return _chosen(rng, mixtures.dispatch(rng, place))


def _experts(rng: random.Random, place: cases.Place) -> Chosen:
    return _chosen(rng, mixtures.experts(rng, place))


def _attention(rng: random.Random, place: cases.Place) -> Chosen:
    return _chosen(rng, attention.attention(rng, place, gathers=True))


def _exchange(rng: random.Random, place: cases.Place) -> Chosen:
    in_chunks = rng.random() < 0.5
    case = collectives.there_and_back(rng, place, most=700_001 if in_chunks else 20_000)
    return _chosen(rng, case, in_chunks=in_chunks)


def _one_exchange(rng: random.Random, place: cases.Place) -> Chosen:
    return _chosen(rng, collectives.one_exchange(rng, place), in_chunks=rng.random() < 0.5)


def _custom(rng: random.Random, place: cases.Place) -> Chosen:
    """Every device primitive, of the library that the environment names."""
    mesh, axis_name = place.mesh, place.axis_name
    count = rng.choice([1, 5, 37, 256, 1001])

    def body(x):
        bits = lax.bitcast_convert_type(x, jnp.int32)
        y = custom_primitives.every_primitive(bits, axis_name=axis_name)
        return lax.bitcast_convert_type(y, jnp.float32)

    def make(seed):
        shape = (*mesh.devices.shape, *custom_primitives.x_shape(place.world, count))
        x = calls.normal(seed, shape, np.float32)
        want = custom_primitives.exact(mesh, axis_name, x.view(np.int32)).view(np.float32)
        wide = want.astype(np.float64)
        return (x,), [cases.Output(wide, abs(wide), np.float32, 1)]

    return _chosen(rng, Case("custom", f"custom {count} {axis_name}", mesh, axis_name, body, make))


def main() -> None:
    faulthandler.enable()
    jflux.config.update(strict=True, always=True, unchecked_kernels=True)
    if args.portable:
        _config.override_for_good(arch=_native.FLOAT8_ARCH)
    if LIBRARY is not None:
        custom_primitives.load(LIBRARY)
    jflux.init(deadline_seconds=args.deadline)
    rng = random.Random(args.seed)
    start = time.monotonic()
    counts: dict[str, int] = {}
    for done in range(1, args.calls + 1):
        chosen = draw(rng)
        try:
            with testing.planted_faults(max_delay_us=rng.choice([0, 0, 2000])):
                # They are counted in 32 bits.
                run_and_check(chosen, rng.choice([None, 2**32 - rng.randint(1, 4)]))
                if args.graphs:
                    replay_and_check(chosen)
        except Exception as error:
            raise AssertionError(f"rank {args.rank}, call {done}, {chosen}") from error
        kind = chosen.case.name.split()[0]
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
