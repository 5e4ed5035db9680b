"""Runs all test files on this host's GPUs, a few at a time, random programs, and random calls of
eight ranks, which share the GPUs; a table is last:

python tests/gpu_suite.py [--at-once 5] [--stress 2000] [--limit 600] [FILE...]

Kernels of several processes take turns on a GPU, and wait for peers whose turn it is not: with five
files at a time the suite takes minutes, with eleven it does not end.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

TESTS = pathlib.Path(__file__).parent

# Each starts processes of its own that use the GPUs, and some of them wait for a deadline.
ALONE = ("docs", "examples", "faults", "grid_examples", "multiprocess", "staggered", "stress")


def all_files(folder: pathlib.Path) -> list[str]:
    """Names of the test files without "test_", the largest first: these take longest."""
    files = sorted(folder.glob("test_*.py"), key=lambda file: (-file.stat().st_size, file.name))
    return [file.stem.removeprefix("test_") for file in files]


@dataclasses.dataclass
class Outcome:
    name: str
    seconds: float
    summary: str
    details: list[str]
    right: bool


def run(name: str, command: list[str], logs: pathlib.Path, share: float, until: float) -> Outcome:
    """One process, and those that it starts; killed when the time is up."""
    environment = os.environ | {
        "XLA_PYTHON_CLIENT_MEM_FRACTION": f"{share:.3f}",
        "NCCL_NVLS_ENABLE": "0",
        "PYTHONPATH": os.pathsep.join([str(TESTS.parent), os.environ.get("PYTHONPATH", "")]),
    }
    log, start = logs / f"{name}.log", time.monotonic()
    if start >= until:
        return Outcome(name, 0, "no time left", [], False)
    with log.open("w") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, cwd=TESTS, env=environment,
            start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(until - start)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
    lines = log.read_text(errors="replace").splitlines()
    last = next((line for line in reversed(lines) if line.strip()), "")
    ended = code >= 0 and code != 124
    return Outcome(
        name=name,
        seconds=time.monotonic() - start,
        summary=re.sub(r" in [\d.]+s.*", "", last).strip("= ") if ended else f"not ended: {last}",
        details=[line for line in lines if re.match(r"(FAILED|ERROR|E  |Fatal)", line)][:6]
        or [line for line in lines if re.match(r'  File ".*/tests/', line)][:6],  # where it hangs
        right=code == 0,
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", help="such as tune or test_tune.py; all, if none")
    parser.add_argument("--at-once", type=int, default=5)
    parser.add_argument("--stress", type=int, default=2000, help="calls of random programs")
    parser.add_argument("--shared", type=int, default=40, help="calls of eight ranks (shared_gpu)")
    parser.add_argument("--limit", type=float, default=3600, help="seconds for everything")
    parser.add_argument("--logs", type=pathlib.Path, default=pathlib.Path("/tmp/jflux-gpu-suite"))
    args = parser.parse_args()
    args.logs.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + args.limit
    names = [re.sub(r"^(.*/)?test_|\.py$", "", name) for name in args.files] or all_files(TESTS)

    def test(name: str, share: float) -> Outcome:
        command = [sys.executable, "-m", "pytest", "-q", "--no-header", "--maxfail=5",
                   "-p", "no:cacheprovider", "-o", "faulthandler_timeout=60",
                   f"test_{name}.py"]  # fmt: skip
        if name in ALONE:
            command.append("-s")  # if it does not end, the log has what its processes said
        outcome = run(name, command, args.logs, share, until)
        print(f"{name}: {outcome.summary}", flush=True)
        return outcome

    together = [name for name in names if name not in ALONE]
    with concurrent.futures.ThreadPoolExecutor(args.at_once) as pool:
        outcomes = list(pool.map(lambda name: test(name, 0.6 / args.at_once), together))
    outcomes += [test(name, 0.2) for name in names if name in ALONE]
    if args.stress > 0:
        command = [sys.executable, "-m", "jflux.stress", "--unchecked", "--calls", str(args.stress)]
        outcomes.append(run("stress", command, args.logs, 0.3, until))
    if args.shared > 0:
        command = [sys.executable, "shared_gpu.py", "--ranks", "8", "--calls", str(args.shared)]
        outcomes.append(run("shared", command, args.logs, 0.8, until))
    print()
    for o in outcomes:
        print(f"{'ok  ' if o.right else 'BAD '} {o.name:24} {o.seconds:6.0f} s  {o.summary[:120]}")
        for line in [] if o.right else o.details:
            print(f"       {line[:200]}")
    return not all(o.right for o in outcomes)


if __name__ == "__main__":
    sys.exit(main())
