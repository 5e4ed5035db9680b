"""Times the ops on this host's GPUs and writes the figures as JSON.

python -m bench --ranks 4 --lists flux,attention --out bench/results/4xh200.json
python -m bench --ranks 4 --processes 4 ...      one process per GPU
python -m bench --ranks 2 --lists llm,decode --add bench/results/2xh100.json --limit 240
                                                 only what the file lacks, as far as the time goes
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import itertools
import json
import os
import pathlib
import platform
import shutil
import socket
import subprocess
import sys
import time
from typing import Any

os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", ".6")


def parse(description: str | None, lists: str = "flux", adds: bool = False) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--processes", type=int, default=1, help="1, or one for each rank")
    parser.add_argument("--lists", default=lists, help="which shapes, comma-separated")
    parser.add_argument(
        "--peers",
        default="",
        help="comma-separated: pallas, torch; of bench.moe: tokamax, torch; of bench.attention: "
        "transformer_engine, flash_attn3",
    )
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--out", type=pathlib.Path)
    if adds:
        parser.add_argument("--add", type=pathlib.Path, help="adds to this result what it lacks")
        parser.add_argument("--limit", type=float, default=float("inf"), help="seconds")
    parser.add_argument("--process", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.processes not in (1, args.ranks):
        parser.error(f"--processes={args.processes} must be 1 or --ranks={args.ranks}")
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
    """Writes what was measured, and where, as bench/results has it, if there is a path. Benchmarks
    do so after each row: a run may be cut short."""
    import jax

    if path is None or jax.process_index() != 0:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    result = {"machine": machine(ranks, processes), **measured}
    path.write_text(json.dumps(result, indent=1) + "\n")


def initialize(args: argparse.Namespace) -> None:
    """Meets the other processes, if there are some."""
    import jax

    if args.process is not None:
        jax.distributed.initialize(
            f"127.0.0.1:{args.port}", args.processes, args.process, local_device_ids=[args.process]
        )


def kept(path: pathlib.Path, here: dict) -> list[dict]:
    """The rows of an earlier run, each with its date.

    Raises:
      SystemExit: the file is no result of this benchmark, or of another machine than `here`.
    """
    result = json.loads(path.read_text())
    if "rows" not in result:
        raise SystemExit(f"{path} has no rows of python -m bench")
    before = result["machine"]
    for name in ("gpus", "processes"):
        if before[name] != here[name]:
            raise SystemExit(f"{path} is of {name} {before[name]!r}, not {here[name]!r}")
    if "note" in before:
        raise SystemExit(f"{path} is of other kernels: {before['note']}")
    return [{"date": before["date"]} | row for row in result["rows"]]


def still_time(begun: float, longest: float, limit: float) -> bool:
    """Whether one more shape fits, in all processes alike."""
    from jflux import _trial

    return _trial.slowest(time.monotonic() - begun) + longest < limit


def main() -> int:
    begun = time.monotonic()
    args = parse(__doc__, adds=True)
    if args.processes > 1 and args.process is None:
        return spawn(args, "bench")
    initialize(args)
    import jax
    import numpy as np
    from jax.sharding import Mesh

    import jflux

    from . import harness, peers, shapes

    jflux.init(heap_bytes=8 << 30)
    jflux.config.update(strict=True)
    mesh = Mesh(np.array(jax.devices()[: args.ranks]), ("tp",))
    others = peers.start([name for name in args.peers.split(",") if name], mesh)
    rows = kept(args.add, machine(args.ranks, args.processes)) if args.add else []
    have, out = {shapes.of_row(row) for row in rows}, args.add or args.out
    print(harness.HEADING, flush=True)
    asked = itertools.chain(*(shapes.of(name, args.ranks) for name in args.lists.split(",")))
    wanted = [shape for shape in dict.fromkeys(asked) if shape not in have]  # lists share some
    longest = 0.0
    for i, shape in enumerate(wanted):
        if not still_time(begun, longest, args.limit):
            print(f"no time for {len(wanted) - i} shapes, from {wanted[i]} on", file=sys.stderr)
            break
        start = time.monotonic()
        try:
            timings = harness.measure(shape, mesh, args.rounds, others=others)
        except peers.Unavailable as e:  # a peer that has begun, and then broke off
            print(f"{shape}: {e}; again, without peers", file=sys.stderr)
            timings = harness.measure(shape, mesh, args.rounds)
        rows.append(
            dataclasses.asdict(shape)
            | {name: dataclasses.asdict(timing) for name, timing in timings.items()}
        )
        print(harness.line(shape, args.ranks, timings), flush=True)
        save(out, args.ranks, args.processes, rows=rows)
        longest = max(longest, time.monotonic() - start)
    for peer in others:
        peer.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
