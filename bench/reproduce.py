"""Times the rows of README's table on this host's GPUs, beside what bench/results says of them:

python -m bench.reproduce [--ranks 4] [--lists attention,decode] [--out mine.json]

--lists takes lists of bench/shapes.py in place of those rows. The last line says how long it took.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import pathlib
import time

from . import command, readme, render, sections, shapes


def published(results: sections.Results, gpu: str, ranks: int) -> dict[shapes.Shape, dict]:
    """The rows of one process and the present kernels on so many of these GPUs; of the GPUs of
    README's table, if there are none."""

    def of_machine(gpus: str) -> dict[shapes.Shape, dict]:
        found = {}
        for _, result in render.of_ops(results):
            machine = result["machine"]
            if machine["gpus"] == gpus and machine["processes"] == 1 and "note" not in machine:
                for row in result["rows"]:
                    found[shapes.of_row(row)] = row | {"gpus": gpus}
        return found

    (first, *_) = readme.ROWS
    return of_machine(f"{ranks} x {gpu}") or of_machine(dict(results)[first]["machine"]["gpus"])


HEADING = "op | m | n | k | XLA ms | jflux ms | speed-up | in bench/results"


def gain(row: dict) -> str:
    return f"{render.ms(row, shapes.fastest_xla(row)) / render.ms(row, 'J'):.2f}"


def line(row: dict, known: dict | None) -> str:
    """One row of the table. Older results lack a form of XLA: the gain without it comes last."""
    cells = [f"{row[name]}" for name in ("op", "m", "n", "k")]
    cells += [f"{render.ms(row, name):.3f}" for name in (shapes.fastest_xla(row), "J")]
    cells.append(gain(row))
    if known:
        cells.append(f"{gain(known)} on {known['gpus']}")
        left_out = [name for name in shapes.XLA if name in row and name not in known]
        if left_out:
            same = {name: value for name, value in row.items() if name not in left_out}
            cells[-1] += f" (here {gain(same)} without {', '.join(left_out)})"
    return " | ".join(cells)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, help="by default all GPUs")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--lists", help="comma-separated; by default the rows of README's table")
    parser.add_argument("--out", type=pathlib.Path, help="writes a result there")
    args = parser.parse_args()
    start = time.monotonic()
    import jax
    import numpy as np
    from jax.sharding import Mesh

    import jflux

    from . import harness

    devices = jax.devices()[: args.ranks]
    ranks = len(devices)
    known = published(render.load(), devices[0].device_kind, ranks)
    if args.lists:
        asked = [s for name in args.lists.split(",") for s in shapes.of(name, ranks)]
    else:
        asked = list(itertools.chain(*readme.ROWS.values()))
    jflux.init(heap_bytes=8 << 30)
    jflux.config.update(strict=True)
    mesh = Mesh(np.array(devices), ("tp",))
    print(f"{ranks} x {devices[0].device_kind}\n{HEADING}", flush=True)
    rows = []
    for shape in dict.fromkeys(asked):
        timings = harness.measure(shape, mesh, args.rounds)
        times = {name: dataclasses.asdict(timing) for name, timing in timings.items()}
        rows.append(dataclasses.asdict(shape) | times)
        print(line(rows[-1], known.get(shape)), flush=True)
        command.save(args.out, ranks, 1, rows=rows)
    print(f"{len(rows)} rows in {time.monotonic() - start:.0f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
