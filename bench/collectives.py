"""Times small collectives within one jit: microseconds a call.

python -m bench.collectives --ranks 2 --out bench/results/2xh200_collectives.json
python -m bench.collectives --ranks 2 --processes 2 ...      one process per GPU

A contestant is a jitted loop over a chain of calls, each of which takes the last one's result. S is
XLA's own collective, which XLA launches call by call unless it is told otherwise; C is the same
program with XLA's collectives in a CUDA graph too, as jflux's kernels always are. Contestants take
turns, round after round; the median counts. (Numbers grow from call to call, and end as infinities:
how long a call takes does not depend on them.)
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jflux
from jflux import _config
from jflux._ops import _wire
from jflux._tools import trials

from . import command, rates

KiB = 1 << 10
SIZES = [512 << i for i in (0, 2, 4, 6, 8, 9, 10, 11, 12, 13, 14, 15, 17)]  # bytes: to 64 MiB
EXCHANGED = [KiB << i for i in (0, 2, 4, 6, 8, 10, 11, 12, 13, 14, 16)]  # to 64 MiB
QUANTIZED = [512 * KiB << i for i in range(9)]  # to 128 MiB
NORM_ROWS, NORM_WIDTH = (1, 16, 64, 128), 8192
TIMED = ("one_shot", "two_shot", "chunked")  # of all_reduce's algorithms
#: Of an exchange, how J may travel.
TRAVEL: dict[str, Callable[[], Any]] = {
    "packets": functools.partial(_config.override, chunked=False),
    "chunks": functools.partial(_config.override, chunked=True),
}
#: The same, and a wire of 8 bits at any size.
WAYS = TRAVEL | dict.fromkeys(
    _wire.WIRES, functools.partial(jflux.config, always=True, unchecked_kernels=True)
)
CHAIN = 40
WIDTH = 256  # elements of a row, else

# A compiler option replaces the list, where a flag of XLA_FLAGS may add to it ("+COLLECTIVES"):
# these are XLA's defaults, and collectives. jaxlib 0.10.2 and 0.11.2 know all of them.
_CAPTURED = (
    "CONDITIONAL", "CUBLAS", "CUBLASLT", "CUDNN", "CUSTOM_CALL", "DYNAMIC_SLICE_FUSION", "FUSION",
    "COLLECTIVES",
)  # fmt: skip
#: What makes XLA put its collectives into CUDA graphs too.
CAPTURED: dict[str, str | bool] = {"xla_gpu_enable_command_buffer": ",".join(_CAPTURED)}

Step = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Case:
    """Calls of one op and size: each contestant's step, arrays [rows, ...] -> as many."""

    op: str
    bytes: int  # of an all-reduce's x, or of what the exchanges move, the own part too
    rows: int
    width: int
    operands: int
    steps: Mapping[str, Step]  # S among them
    calls: int = 1  # of a step

    def shapes(self, ranks: int) -> list[tuple[int, int]]:
        return [(ranks * self.rows, self.width)] * self.operands


def _all_reduce(size: int) -> Case:
    steps: dict[str, Step] = {
        "S": lambda x: jflux.reference.all_reduce(x, axis_name="tp"),
        "J": lambda x: jflux.all_reduce(x, axis_name="tp"),
    }
    for algorithm in TIMED:
        if size <= 16 << 20 or algorithm == "chunked":  # packets take twice the heap
            steps[algorithm] = functools.partial(
                jflux.all_reduce, axis_name="tp", algorithm=algorithm
            )
    return Case("all_reduce", size, size // (2 * WIDTH), WIDTH, 1, steps)


def _normalised(rows: int) -> Case:
    """A residual and RMSNorm after the sum: S by XLA, J in the kernel, `apart` by XLA after jflux's
    sum, `alone` without them."""
    scale = jnp.full(NORM_WIDTH, 0.1, jnp.bfloat16)

    def step(module: Any, x: jax.Array, residual: jax.Array) -> tuple[jax.Array, jax.Array]:
        norm = jflux.RMSNorm(scale)
        total, normalised = module.all_reduce(x, axis_name="tp", residual=residual, norm=norm)
        return normalised, total

    def apart(x: jax.Array, residual: jax.Array) -> tuple[jax.Array, jax.Array]:
        total = jflux.all_reduce(x, axis_name="tp") + residual
        wide = total.astype(jnp.float32)
        factor = jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)
        return (wide * factor * scale.astype(jnp.float32)).astype(x.dtype), total

    def alone(x: jax.Array, residual: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jflux.all_reduce(x, axis_name="tp"), residual

    steps = {
        "S": functools.partial(step, jflux.reference),
        "J": functools.partial(step, jflux),
        "apart": apart,
        "alone": alone,
    }
    return Case("all_reduce + RMSNorm", 2 * rows * NORM_WIDTH, rows, NORM_WIDTH, 2, steps)


def _of_rows(size: int, ranks: int) -> int:
    """How many rows of WIDTH that is, as a multiple of the ranks."""
    return -(-size // (ranks * 2 * WIDTH)) * ranks


def _ways(step: Any, size: int) -> dict[str, Step]:
    steps = {"S": functools.partial(step, jflux.reference), "J": functools.partial(step, jflux)}
    for name in TRAVEL:
        if size <= 16 << 20 or name == "chunks":  # packets take twice the heap
            steps[name] = steps["J"]
    return steps


def _pair(module: Any, x: jax.Array, **options: Any) -> jax.Array:
    """An all_gather and a reduce_scatter in turn, since one undoes what the other does to the
    shape."""
    gathered = module.all_gather(x, axis_name="tp", tiled=True, **options)
    return module.reduce_scatter(gathered, axis_name="tp", tiled=True, **options)


def _exchange_pair(size: int, ranks: int) -> Case:
    rows = _of_rows(size, ranks)
    op, bytes_ = "all_gather, reduce_scatter", rows * 2 * WIDTH
    return Case(op, bytes_, rows // ranks, WIDTH, 1, _ways(_pair, bytes_), calls=2)


def _quantized_sum(size: int) -> Case:
    """A sum whose data travel in 8 bits, beside the exact one: J."""
    steps: dict[str, Step] = {"S": _all_reduce(size).steps["S"], "J": _all_reduce(size).steps["J"]}
    for wire in _wire.WIRES:
        steps[wire] = functools.partial(jflux.all_reduce, axis_name="tp", wire=wire)
    return Case("all_reduce(wire=)", size, size // (2 * WIDTH), WIDTH, 1, steps)


def _quantized_pair(size: int, ranks: int) -> Case:
    case = _exchange_pair(size, ranks)
    steps = {name: case.steps[name] for name in "SJ"}
    for wire in _wire.WIRES:
        steps[wire] = functools.partial(_pair, jflux, wire=wire)
    return dataclasses.replace(case, op=f"{case.op}, wire=", steps=steps)


def _all_to_all(size: int, ranks: int) -> Case:
    def step(module: Any, x: jax.Array) -> jax.Array:
        return module.all_to_all(x, axis_name="tp", split_axis=0, concat_axis=0, tiled=True)

    rows = _of_rows(size, ranks)
    bytes_ = rows * 2 * WIDTH
    return Case("all_to_all", bytes_, rows, WIDTH, 1, _ways(step, bytes_))


def _ragged(size: int, ranks: int) -> Case:
    """A rank sends the next ones less and less; `dense` is an all_to_all of as many bytes. S is
    lax's where XLA has it."""
    rows = _of_rows(size, ranks)
    bounds = [
        rows * sum(range(ranks, ranks - i, -1)) // sum(range(ranks + 1)) for i in range(ranks)
    ]
    by_distance = jnp.diff(jnp.array([*bounds, rows], jnp.int32))

    def sizes() -> tuple[jax.Array, ...]:
        me, ids = jax.lax.axis_index("tp"), jnp.arange(ranks)
        between = by_distance[(ids - ids[:, None]) % ranks]  # [source, destination]
        starts, places = (jnp.cumsum(between, axis) - between for axis in (1, 0))
        return starts[me], between[me], places[me], between[:, me]

    def step(ragged: Any, x: jax.Array) -> jax.Array:
        return ragged(x, jnp.zeros_like(x), *sizes(), axis_name="tp")

    on_gpus = jax.default_backend() == "gpu"
    xla = jax.lax.ragged_all_to_all if on_gpus else jflux.reference.ragged_all_to_all
    steps = _ways(lambda module, x: step(module.ragged_all_to_all, x), rows * 2 * WIDTH)
    dense = functools.partial(
        jflux.all_to_all, axis_name="tp", split_axis=0, concat_axis=0, tiled=True
    )
    steps |= {"S": functools.partial(step, xla), "dense": dense}
    return Case("ragged_all_to_all", rows * 2 * WIDTH, rows, WIDTH, 1, steps)


LISTS: dict[str, Callable[[int], Iterator[Case]]] = {
    "all_reduce": lambda ranks: map(_all_reduce, SIZES),
    "norm": lambda ranks: map(_normalised, NORM_ROWS),
    "wire": lambda ranks: map(_quantized_sum, QUANTIZED),
    "pair": lambda ranks: (_exchange_pair(size, ranks) for size in EXCHANGED),
    "wire_pair": lambda ranks: (_quantized_pair(size, ranks) for size in QUANTIZED),
    "all_to_all": lambda ranks: (_all_to_all(size, ranks) for size in EXCHANGED),
    "ragged": lambda ranks: (_ragged(size, ranks) for size in EXCHANGED),
}


def loop(step: Step, turns: int) -> Step:
    """So many times CHAIN steps."""

    def chain(_: Any, arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        for _ in range(CHAIN):
            result = step(*arrays)
            arrays = result if isinstance(result, tuple) else (result,)
        return arrays

    return lambda *arrays: jax.lax.fori_loop(0, turns, chain, arrays)


def _collectives(text: str) -> int:
    """XLA's own, in a compiled program."""
    names = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all")
    return sum(text.count(f" {name}(") + text.count(f" {name}-start(") for name in names)


def measure(case: Case, mesh: Mesh, rounds: int) -> dict[str, Any]:
    """One row."""
    turns = 10 if case.bytes <= 1 << 20 else 2
    specs = (P("tp", None),) * case.operands
    operands = [
        trials.normal(mesh, spec, shape, jnp.bfloat16, seed=seed)
        for seed, (spec, shape) in enumerate(
            zip(specs, case.shapes(mesh.devices.size), strict=True)
        )
    ]
    gpu = mesh.devices.flat[0].platform != "cpu"
    runs = {}
    for name, step in case.steps.items():
        with WAYS.get(name, contextlib.nullcontext)():
            program = trials.compiled(loop(step, turns), mesh, specs, specs, *operands)
        if name == "S" and _collectives(program.as_text()) < CHAIN * case.calls:
            raise RuntimeError("XLA has left out some of the calls: the benchmark is wrong")
        runs[name] = trials.run_of(program, *operands)
        if name == "S" and gpu:
            captured = trials.compiled(
                loop(step, turns), mesh, specs, specs, *operands, options=CAPTURED
            )
            runs["C"] = trials.run_of(captured, *operands)
    timings = trials.interleave(runs, turns * CHAIN * case.calls, rounds)
    ranks = mesh.devices.size
    for name in timings.keys() - {"alone"}:  # which moves nothing
        what, moved = f"{case.op}, {name}", case.bytes * (ranks - 1) / ranks
        rates.check(what, timings[name].median, link_bytes=moved)
    return {"op": case.op, "bytes": case.bytes} | {
        name: dataclasses.asdict(t) for name, t in timings.items()
    }


#: The columns of an op's table beside S, C and J.
OTHERS = {
    "all_reduce": TIMED,
    "all_reduce + RMSNorm": ("apart", "alone"),
    "all_reduce(wire=)": _wire.WIRES,
    "all_gather, reduce_scatter": (*TRAVEL,),
    "all_gather, reduce_scatter, wire=": _wire.WIRES,
    "all_to_all": (*TRAVEL,),
    "ragged_all_to_all": (*TRAVEL, "dense"),
}


def columns(op: str) -> list[str]:
    times = [f"{name} us" for name in ("S", "C", "J", *OTHERS.get(op, ()))]
    return ["bytes", *times, "J / S", "J / C"]


def cells(row: dict[str, Any]) -> list[str]:
    names = ("S", "C", "J", *OTHERS.get(row["op"], ()))
    times = [f"{row[n]['median'] * 1e6:.1f}" if n in row else "" for n in names]
    ratios = [
        f"{row['J']['median'] / row[n]['median']:.2f}" if n in row else "" for n in ("S", "C")
    ]
    return [str(row["bytes"]), *times, *ratios]


TABLE = command.Table(
    "collectives", lambda row: (row["op"], row["bytes"]),
    lambda row: f"{row['op']}: {' | '.join(columns(row['op']))}", command.joined(cells),
)  # fmt: skip


def main() -> int:
    args = command.parse(__doc__, lists=",".join(LISTS))
    if args.processes > 1 and args.process is None:
        return command.spawn(args, "bench.collectives")
    command.initialize(args)
    jflux.init(heap_bytes=1 << 30)
    jflux.config.update(strict=True)
    mesh = Mesh(np.array(jax.devices()[: args.ranks]), ("tp",))
    cases = [case for name in args.lists.split(",") for case in LISTS[name](args.ranks)]
    TABLE.measure(
        args,
        {
            (case.op, case.bytes): functools.partial(measure, case, mesh, args.rounds)
            for case in cases
        },
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
