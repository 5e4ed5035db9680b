"""Times small collectives within one jit: microseconds a call.

python -m bench.collectives --ranks 2 --out bench/results/2xh200_collectives.json
python -m bench.collectives --ranks 2 --processes 2 ...      one process per GPU

A contestant is a jitted loop over a chain of calls, each of which takes the last one's result. XLA
puts jflux's kernels into one CUDA graph; its own collectives it launches one by one, unless it is
told otherwise (--xla_gpu_enable_command_buffer). Contestants take turns, round after round; the
median counts. (Numbers grow from call to call, and end as infinities: how long a call takes does
not depend on them.)
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jflux
from jflux import _trial
from jflux._ops.all_reduce import ALGORITHMS

from . import __main__ as bench

SIZES = [512 << i for i in (0, 2, 4, 6, 8, 9, 10, 11, 12, 13, 14, 15, 17)]  # bytes: to 64 MiB
CHAIN = 40
WIDTH = 512  # bytes of a row


def contestants(size: int) -> dict[str, Callable[[jax.Array], jax.Array]]:
    """S: XLA's psum; J: jflux; and each of its algorithms, up to where they lose by far."""
    found: dict[str, Callable[[jax.Array], jax.Array]] = {
        "S": lambda x: jflux.reference.all_reduce(x, axis_name="tp"),
        "J": lambda x: jflux.all_reduce(x, axis_name="tp"),
    }
    if size <= 16 << 20:
        for algorithm in ALGORITHMS:
            found[algorithm] = functools.partial(
                jflux.all_reduce, axis_name="tp", algorithm=algorithm
            )
    return found


def loop(op: Callable[[jax.Array], jax.Array], turns: int) -> Callable[[jax.Array], jax.Array]:
    """So many times CHAIN calls."""

    def chain(_: Any, x: jax.Array) -> jax.Array:
        for _ in range(CHAIN):
            x = op(x)
        return x

    return lambda x: jax.lax.fori_loop(0, turns, chain, x)


def measure(size: int, mesh: Mesh, rounds: int) -> dict[str, Any]:
    """One row."""
    ranks = mesh.devices.size
    turns = 10 if size <= 1 << 20 else 2
    shape = (ranks * size // WIDTH, WIDTH // 2)
    x = _trial.normal(mesh, P("tp", None), shape, jnp.bfloat16, seed=0)
    runs = {}
    for name, op in contestants(size).items():
        program = _trial.compiled(loop(op, turns), mesh, P("tp", None), P("tp", None), x)
        text = program.as_text()
        if name == "S" and text.count(" all-reduce(") + text.count(" all-reduce-start(") != CHAIN:
            raise RuntimeError("XLA has left out some of the calls: the benchmark is wrong")
        runs[name] = _trial.run_of(program, x)
    timings = _trial.interleave(runs, turns * CHAIN, rounds)
    return {"bytes": size} | {name: dataclasses.asdict(t) for name, t in timings.items()}


NAMES = ("S", "J", *ALGORITHMS)


def cells(row: dict[str, Any]) -> list[str]:
    times = [f"{row[n]['median'] * 1e6:.1f}" if n in row else "" for n in NAMES]
    return [str(row["bytes"]), *times, f"{row['J']['median'] / row['S']['median']:.2f}"]


COLUMNS = ("bytes", "S us", "J us", *(f"{a} us" for a in ALGORITHMS), "J / S")


def main() -> int:
    args = bench.parse(__doc__)
    if args.processes > 1 and args.process is None:
        return bench.spawn(args, "bench.collectives")
    bench.initialize(args)
    jflux.init(heap_bytes=1 << 30)
    jflux.config.update(strict=True)
    mesh = Mesh(np.array(jax.devices()[: args.ranks]), ("tp",))
    rows = []
    print(" | ".join(COLUMNS), flush=True)
    for size in SIZES:
        rows.append(measure(size, mesh, args.rounds))
        print(" | ".join(cells(rows[-1])), flush=True)
        if args.out is not None and jax.process_index() == 0:
            result = {"machine": bench.machine(args.ranks, args.processes), "collectives": rows}
            args.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
