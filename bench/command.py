"""What the benchmarks' commands share: options, processes, and results that grow row by row.

A result is a file of bench/results: the machine, and rows under the name of their kind. A row is
saved when it has been measured, for a run may be cut short; `--add FILE` goes on where one was.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import json
import os
import pathlib
import platform
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", ".6")

Row = dict[str, Any]


def parser(
    description: str | None, rounds: int = 8, ranks: int | None = None
) -> argparse.ArgumentParser:
    """The options that `Table.measure` reads. `ranks` is a default."""
    options = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = options.add_argument
    add("--ranks", type=int, default=ranks, required=ranks is None)
    add("--rounds", type=int, default=rounds)
    add("--out", type=pathlib.Path, help="writes a result there")
    add("--add", type=pathlib.Path, help="adds to this result what it lacks")
    add("--limit", type=float, default=float("inf"), help="seconds")
    options.set_defaults(processes=1, begun=time.monotonic())
    return options


def parse(description: str | None, lists: str) -> argparse.Namespace:
    """Those, and what most benchmarks have."""
    options = parser(description)
    add = options.add_argument
    add("--processes", type=int, default=1, help="1, or one for each rank")
    add("--lists", default=lists, help="which shapes, comma-separated")
    add(
        "--peers",
        default="",
        help="comma-separated: pallas, torch; of bench.moe: tokamax, torch; of bench.attention: "
        "transformer_engine, flash_attn3",
    )
    add("--process", type=int, help=argparse.SUPPRESS)
    add("--port", type=int, help=argparse.SUPPRESS)
    args = options.parse_args()
    if args.processes not in (1, args.ranks):
        options.error(f"--processes={args.processes} must be 1 or --ranks={args.ranks}")
    return args


def spawn(args: argparse.Namespace, module: str) -> int:
    """Runs `python -m module` once for each rank; the first one writes the result."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    command = [sys.executable, "-m", module, *sys.argv[1:], "--port", str(port), "--process"]
    children = []
    for process in range(args.processes):
        output = None if process == 0 else subprocess.DEVNULL
        children.append(subprocess.Popen([*command, str(process)], stdout=output))
    return max(child.wait() for child in children)


def initialize(args: argparse.Namespace) -> None:
    """Meets the other processes, if there are some."""
    import jax

    if args.process is not None:
        jax.distributed.initialize(
            f"127.0.0.1:{args.port}", args.processes, args.process, local_device_ids=[args.process]
        )


@functools.cache  # it starts a process
def machine(ranks: int, processes: int) -> dict:
    import jax
    import jaxlib

    import jflux

    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "-i", "0"]
    driver = ""
    if shutil.which(query[0]):
        driver = subprocess.run(query, capture_output=True, text=True).stdout.strip()
    return {
        "gpus": f"{ranks} x {jax.devices()[0].device_kind}",
        "processes": processes,
        "driver": driver,
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "jflux": jflux.__version__,
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
        "environment": {k: v for k, v in os.environ.items() if k.startswith(("NCCL_", "XLA_"))},
    }


def save(path: pathlib.Path | None, ranks: int, processes: int, **measured: Any) -> None:
    """Writes what was measured, and where, as bench/results has it, if there is a path. A process
    that is killed meanwhile leaves the file as it was."""
    import jax

    if path is None or jax.process_index() != 0:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    result = {"machine": machine(ranks, processes), **measured}
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(result, indent=1) + "\n")
    unfinished.replace(path)


def kept(path: pathlib.Path, kind: str, here: dict) -> list[Row]:
    """The rows of an earlier run, each with its date.

    Raises:
      SystemExit: the file is no result of this benchmark, or of another machine than `here`.
    """
    result = json.loads(path.read_text())
    if kind not in result:
        raise SystemExit(f"{path} has no {kind}: it is of another benchmark")
    before = result["machine"]
    for name in ("gpus", "processes"):
        if before[name] != here[name]:
            raise SystemExit(f"{path} is of {name} {before[name]!r}, not {here[name]!r}")
    if "note" in before:
        raise SystemExit(f"{path} is of other kernels: {before['note']}")
    return [{"date": before["date"]} | row for row in result[kind]]


def still_time(begun: float, longest: float, limit: float) -> bool:
    """Whether one more row fits, in all processes alike."""
    from jflux._tools import trials

    return trials.slowest(time.monotonic() - begun) + longest < limit


@dataclasses.dataclass(frozen=True)
class Table:
    """How a benchmark names and prints its rows."""

    kind: str  # their name in a result
    key: Callable[[Row], Hashable]  # what a row is of
    heading: Callable[[Row], str]
    line: Callable[[Row], str]
    #: Contestants that rows of earlier runs may lack. Such a row is measured again.
    newer: Callable[[Row], Sequence[str]] = lambda row: ()

    def lacks(self, row: Row) -> list[str]:
        return [contestant for contestant in self.newer(row) if contestant not in row]

    def measure(
        self, args: argparse.Namespace, wanted: Mapping[Any, Callable[[], Row]]
    ) -> list[Row]:
        """Measures what is wanted, by key, and prints and saves each row. What --add has is left
        as it is, and what --limit has no time for is left out, which a last line says."""
        rows = kept(args.add, self.kind, machine(args.ranks, args.processes)) if args.add else []
        have = {self.key(row) for row in rows if not self.lacks(row)}
        lacking = [key for key in wanted if key not in have]
        if args.add and not lacking:
            print(f"{args.add} has all {len(wanted)} rows", file=sys.stderr)
        heading, longest = None, 0.0
        for i, key in enumerate(lacking):
            if not still_time(args.begun, longest, args.limit):
                rest = len(lacking) - i
                rows_left = "1 row" if rest == 1 else f"{rest} rows"
                print(f"no time for {rows_left}, from {key} on", file=sys.stderr)
                break
            start, row = time.monotonic(), wanted[key]()
            rows = [*(one for one in rows if self.key(one) != key), row]
            if heading != (heading := self.heading(row)):
                print(heading, flush=True)
            print(self.line(row), flush=True)
            save(args.add or args.out, args.ranks, args.processes, **{self.kind: rows})
            longest = max(longest, time.monotonic() - start)
        return rows

    def measure_cases(
        self,
        args: argparse.Namespace,
        lists: Mapping[str, Sequence[Any]],
        measure: Callable[[Any, int, int], Row],
    ) -> list[Row]:
        """:meth:`measure` of the cases of --lists, which are the rows' keys, by
        ``measure(case, ranks, rounds)``."""
        return self.measure(
            args,
            {
                case: functools.partial(measure, case, args.ranks, args.rounds)
                for name in args.lists.split(",")
                for case in lists[name]
            },
        )


def joined(cells: Callable[[Row], Sequence[str]]) -> Callable[[Row], str]:
    """A line of these cells."""
    return lambda row: " | ".join(cells(row))
