"""XLA at its best beside jflux; the table comes last.

python -m bench.xla --ranks 4 --out bench/results/4xh100_xla.json [--lists llama,flux]

Microseconds a call:

    S            XLA's own sequence, as the other benchmarks time it: a collective and a product
    S captured   with XLA told to capture its collectives in CUDA graphs
    S scheduled  with the latency-hiding scheduler, which is off by default
    W            windowed einsum ("collective matmul"): a product of sharded global arrays under
                 jit, which XLA's partitioner turns into a loop of collective-permutes and products
                 of parts, on several streams
    W scheduled  the same with the latency-hiding scheduler
    J            jflux

W has no form in shard_map: it is made when XLA partitions a program. All options are given to one
program each (`compiler_options`). A contestant that XLA cannot compile or run here is left out, and
so is W where XLA has made no loop of it. Values are compared with those of S before anything is
timed. `--without W` leaves out what begins so: an option of XLA may end the process.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

import jflux
from jflux._tools import trials
from jflux._tools.trials import Trial

from . import command, harness
from .collectives import CAPTURED
from .shapes import AG, RS, Shape, of_row

SCHEDULED: dict[str, Any] = {"xla_gpu_enable_latency_hiding_scheduler": True}
WINDOWED: dict[str, Any] = {
    "xla_gpu_threshold_for_windowed_einsum_mib": 0,
    "xla_gpu_multi_streamed_windowed_einsum": True,  # as by default
}
#: By name, XLA's options.
CONTESTANTS: dict[str, dict[str, Any]] = {
    "S": {},
    "S captured": CAPTURED,
    "S scheduled": SCHEDULED,
    "W": WINDOWED,
    "W scheduled": WINDOWED | SCHEDULED,
    "J": {},
}

THEIRS = tuple(name for name in CONTESTANTS if name != "J")

# Of Llama-2 70B (queries, keys and values; behind the MLP), and of the Flux paper. The most telling
# rows come first.
LISTS: dict[str, list[Shape]] = {
    "llama": [
        Shape(op, m, n, k)
        for m in (2048, 512, 8192, 16, 128)
        for op, n, k in ((AG, 10240, 8192), (RS, 8192, 28672))
    ],
    "flux": [
        Shape(op, m, n, k)
        for m in (2048, 8192, 512)
        for op, n, k in ((AG, 49152, 12288), (RS, 12288, 49152))
    ],
}


def name_of(shape: Shape) -> str:
    return f"{shape.op} {shape.name}"


def windowed(shape: Shape, mesh: Mesh, iterations: int) -> Any:
    """A loop of products of global arrays, lowered: XLA's partitioner is to find the collective.
    Calls depend on each other by the elements of one rank, which travel nowhere."""
    trial = Trial(shape.spec)
    x_spec, _, y_spec = trial.partition
    linked = jax.shard_map(
        trials.with_corner, mesh=mesh, in_specs=(x_spec, y_spec), out_specs=x_spec
    )

    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(x @ w, NamedSharding(mesh, y_spec))

    x, w = trial.operands(shape.m, shape.n, shape.k, mesh, jnp.bfloat16)
    return jax.jit(trials.loop(product, iterations, linked)).lower(x, w)


def is_windowed(program: Any) -> bool:
    return "collective-permute" in program.as_text()


def programs(shape: Shape, mesh: Mesh, iterations: int, names: list[str]) -> dict[str, Any]:
    """Each contestant's, less those that XLA does not take; says why."""
    trial = Trial(shape.spec)
    x_spec, w_spec, y_spec = trial.partition
    operands = trial.operands(shape.m, shape.n, shape.k, mesh, jnp.bfloat16)
    found = {}
    for name in names:
        if name.startswith("W"):
            lowered = windowed(shape, mesh, iterations)
        else:
            body = trials.loop(trial.function(reference=name != "J"), iterations)
            lowered = trials.lowered(body, mesh, (x_spec, w_spec), y_spec, *operands)
        try:
            program = lowered.compile(compiler_options=CONTESTANTS[name])
            y = jax.block_until_ready(program(*operands))
        except jax.errors.JaxRuntimeError as e:
            if not CONTESTANTS[name]:
                raise
            print(f"{shape}, {name}: left out, {str(e).splitlines()[0]}", file=sys.stderr)
            continue
        if name.startswith("W") and not is_windowed(program):
            print(f"{shape}, {name}: left out, XLA made no loop of it", file=sys.stderr)
            continue
        if name == "S":
            wanted = y
        error = float(jnp.abs(y.astype(jnp.float32) - wanted.astype(jnp.float32)).max())
        if not error < 0.2:  # of normal numbers, whose parts are summed in bfloat16
            raise RuntimeError(f"{shape}, {name}: off by {error:.3g}")
        found[name] = trials.run_of(program, *operands)
    return found


def measure(shape: Shape, mesh: Mesh, rounds: int, without: str = "") -> command.Row:
    """One row."""
    ranks = mesh.devices.size
    iterations = trials.iterations_for(0.03, shape.flops(ranks))
    names = [name for name in CONTESTANTS if not (without and name.startswith(without))]
    runs = programs(shape, mesh, iterations, names)
    timings = trials.interleave(runs, iterations, rounds)
    harness.check_rates(shape, ranks, {name: timing.median for name, timing in timings.items()})
    return dataclasses.asdict(shape) | {
        name: dataclasses.asdict(timing) for name, timing in timings.items()
    }


COLUMNS = ("op", "m", "n", "k", *(f"{name} us" for name in CONTESTANTS), "J / S", "J / best")


def best(row: command.Row) -> str:
    """The fastest one of XLA's, by name."""
    return min((name for name in THEIRS if name in row), key=lambda name: row[name]["median"])


def cells(row: command.Row) -> list[str]:
    """One row of the table under COLUMNS."""
    us = {name: row[name]["median"] * 1e6 for name in CONTESTANTS if name in row}
    return [
        *(str(row[field]) for field in ("op", "m", "n", "k")),
        *(f"{us[name]:.1f}" if name in us else "" for name in CONTESTANTS),
        f"{us['J'] / us['S']:.2f}", f"{us['J'] / us[best(row)]:.2f}",
    ]  # fmt: skip


def summary(rows: Sequence[command.Row]) -> str:
    """What the table shows, in sentences."""

    def span(name: str, over: Callable[[command.Row], str], digits: int = 2) -> str:
        found = [
            row[name]["median"] / row[over(row)]["median"]
            for row in rows
            if {name, over(row)} <= row.keys()
        ]
        return f"{min(found):.{digits}f} to {max(found):.{digits}f}" if found else ""

    s = lambda row: "S"  # noqa: E731
    parts = [f"J takes {span('J', s)} of S, and {span('J', best)} of the fastest of XLA's forms"]
    for name, what in (
        ("S captured", "captured collectives"),
        ("S scheduled", "the latency-hiding scheduler"),
        ("W", "windowed einsum"),
        ("W scheduled", "windowed einsum with the scheduler"),
    ):
        if ratios := span(name, s):
            parts.append(f"{what} {ratios}")
    return f"{parts[0]}; over S, {'; '.join(parts[1:])}." if parts[1:] else f"{parts[0]}."


TABLE = command.Table("xla", of_row, lambda _: " | ".join(COLUMNS), command.joined(cells))


def main() -> int:
    options = command.parser(__doc__)
    options.add_argument("--lists", default=",".join(LISTS), help="which shapes, comma-separated")
    options.add_argument("--without", default="", help="contestants that begin so are left out")
    args = options.parse_args()
    jflux.init(heap_bytes=8 << 30)
    jflux.config.update(strict=True)
    mesh = Mesh(np.array(jax.devices()[: args.ranks]), ("tp",))
    TABLE.measure_cases(
        args, LISTS, lambda shape, _, rounds: measure(shape, mesh, rounds, args.without)
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
