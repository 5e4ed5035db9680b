"""Runs all tests on this host's GPUs, shared by a few processes, then the files that need the GPUs
alone, then what is no test file; a table is last:

python tests/gpu_suite.py [--at-once 5] [--done FILE] [--scripts NAME...] [--limit 3600] [FILE...]

    --done                a file of tests that have passed: they are left out, and it grows, so that
                          several runs of some minutes make a whole suite
    --scripts             NAME... of the runs below, by default all; without a NAME none
    --files               no test files, if no FILE follows

    moe                   tests/moe_gpu.py: grouped products with every tile, routing
    grouped_scaled        tests/grouped_scaled_gpu.py: the same in 8 bits with scales
    attention             tests/attention_gpu.py: the kernels of attention
    attention_ranks       the same with --ranks: keys that arrive inside the kernel
    gathered              tests/gathered_gpu.py: gathered rows, scattered sums
    moe_portable, grouped_scaled_portable, shared_portable
                          grouped products, and products of three ranks, by the code for other GPUs
    placed                tests/dispatch_gpu.py: a dispatch and a combine in one kernel each
    symm                  tests/symm_gpu.py: Triton kernels, their faults and times
    two_level, nvshmem    the scripts of these names: nodes of one host
    growth                tests/growth_gpu.py: a heap that grows, with the default settings
    shared                tests/shared_gpu.py: random calls of eight ranks, which share the GPUs
    stress                python -m jflux.stress, in one process, for --minutes
    stress_processes      the same with a process for each GPU
    compute_sanitizer     tests/compute_sanitizer.py; only where it is named
    portable              tests/portable_gpu.py: the code for other GPUs; only where it is named,
                          since it compiles a library

Kernels of several processes take turns on a GPU, and wait for peers whose turn it is not: with five
at a time the suite takes a quarter of an hour, with eleven it does not end. Without pytest-xdist
there is one process.
"""

from __future__ import annotations

import argparse
import dataclasses
import glob
import importlib.util
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

from workers.common import free_port

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


#: One command for each process.
Commands = list[list[str]]


def scripts(gpus: int, minutes: float) -> dict[str, Commands]:
    """What is no test file, by name."""
    python = [sys.executable]
    stress = [*python, "-m", "jflux.stress", "--unchecked", "--minutes", f"{minutes}"]
    ranks = ["--coordinator", f"127.0.0.1:{free_port()}", "--processes", f"{gpus}"]
    return {
        "moe": [[*python, "moe_gpu.py", "--calls", "200", "--limit", "150"]],
        "grouped_scaled": [[*python, "grouped_scaled_gpu.py"]],
        "attention": [[*python, "attention_gpu.py", "--limit", "200"]],
        "attention_ranks": [[*python, "attention_gpu.py", "--ranks", f"{gpus}"]],
        "gathered": [[*python, "gathered_gpu.py", "--ranks", f"{gpus}", "--limit", "300"]],
        "placed": [[*python, "dispatch_gpu.py", "--ranks", f"{gpus}", "--limit", "200"]],
        "symm": [[*python, "symm_gpu.py", "--times", "5", "--limit", "500"]],
        "two_level": [[*python, "two_level_gpu.py", "--nodes", f"{min(gpus, 2)}"]],
        "nvshmem": [[*python, "nvshmem_gpu.py", "--processes", f"{gpus}"]],
        "growth": [[*python, "growth_gpu.py"]],
        "shared": [[*python, "shared_gpu.py", "--ranks", "8", "--calls", "40"]],
        "grouped_scaled_portable": [
            [*python, "grouped_scaled_gpu.py", "--portable", "--calls", "60"]
        ],
        "moe_portable": [[*python, "moe_gpu.py", "--portable", "--calls", "60"]],
        "shared_portable": [
            [
                *python,
                "shared_gpu.py",
                "--portable",
                "--ranks",
                "3",
                "--kind",
                "product",
                "--calls",
                "40",
            ]
        ],
        "stress": [stress],
        "stress_processes": [
            [*stress, *ranks, "--process", f"{i}", "--local-devices", f"{i}"] for i in range(gpus)
        ],
        "compute_sanitizer": [[*python, "compute_sanitizer.py"]],
        "portable": [[*python, "portable_gpu.py", "--minutes", f"{minutes}"]],
    }


def run(name: str, commands: Commands, logs: pathlib.Path, share: float, until: float) -> Outcome:
    """Processes, and those that they start; killed when the time is up. What the first one says is
    logged."""
    environment = os.environ | {
        "XLA_PYTHON_CLIENT_MEM_FRACTION": f"{share:.3f}",
        "NCCL_NVLS_ENABLE": "0",
        "PYTHONPATH": os.pathsep.join([str(TESTS.parent), os.environ.get("PYTHONPATH", "")]),
    }
    log, start = logs / f"{name}.log", time.monotonic()
    if start >= until:
        return Outcome(name, 0, "no time left", [], False)
    with log.open("w") as out:
        processes = [
            subprocess.Popen(
                command, stdout=subprocess.DEVNULL if i else out, stderr=subprocess.STDOUT,
                cwd=TESTS, env=environment, start_new_session=True,
            )
            for i, command in enumerate(commands)
        ]  # fmt: skip
        codes = []
        for process in processes:
            try:
                codes.append(process.wait(max(0, until - time.monotonic())))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                codes.append(process.wait())
    code = next((code for code in codes if code != 0), 0)
    lines = log.read_text(errors="replace").splitlines()
    last = next((line for line in reversed(lines) if line.strip()), "")
    ended = code >= 0 and code != 124
    return Outcome(
        name=name,
        seconds=time.monotonic() - start,
        summary=re.sub(r" in [\d.]+s.*", "", last).strip("= ") if ended else f"not ended: {last}",
        details=[
            line for line in lines if re.match(r"(FAILED|ERROR|E  |Fatal|WRONG|seed \d+: )", line)
        ][:40]
        or [line for line in lines if re.match(r'  File ".*/tests/', line)][:6],  # where it hangs
        right=code == 0,
    )


def command_of(names: list[str], at_once: int, done: pathlib.Path | None) -> list[str]:
    """The command that runs test files."""
    command = [sys.executable, "-m", "pytest", "-q", "--full", "--no-header",
               "--tb=no", "-rN", "-p", "resume", "-p", "no:cacheprovider",
               "-o", "faulthandler_timeout=60"]  # fmt: skip
    if done is not None:
        command += ["--done", str(done.resolve())]
    if at_once > 1 and importlib.util.find_spec("xdist"):
        command += ["-n", str(at_once), "--dist", "worksteal", "--maxfail=60"]
    else:
        command += ["-s", "--maxfail=5"]  # if it does not end, the log has what processes said
    return [*command, *(f"test_{name}.py" for name in names)]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    gpus = len(glob.glob("/dev/nvidia[0-9]*"))
    parser.add_argument("files", nargs="*", help="such as tune or test_tune.py; all, if none")
    parser.add_argument("--files", dest="named", action="store_true", help="those named alone")
    parser.add_argument("--at-once", type=int, default=5)
    parser.add_argument("--done", type=pathlib.Path, help="tests that have passed")
    parser.add_argument("--scripts", nargs="*", choices=list(scripts(gpus, 0)))
    parser.add_argument("--minutes", type=float, default=2.0, help="of stress")
    parser.add_argument("--limit", type=float, default=3600, help="seconds for everything")
    parser.add_argument("--logs", type=pathlib.Path, default=pathlib.Path("/tmp/jflux-gpu-suite"))
    args = parser.parse_args()
    args.logs.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + args.limit
    names = [re.sub(r"^(.*/)?test_|\.py$", "", name) for name in args.files]
    names = names if names or args.named else all_files(TESTS)
    others = scripts(gpus, args.minutes)
    chosen = args.scripts
    if chosen is None:
        chosen = [name for name in others if name not in ("compute_sanitizer", "portable")]

    # A name, commands, and the share of a GPU's memory for each process.
    runs: list[tuple[str, Commands, float]] = []
    if together := [name for name in names if name not in ALONE]:
        share = 0.5 / args.at_once
        runs.append(("tests", [command_of(together, args.at_once, args.done)], share))
    alone = [name for name in names if name in ALONE]
    runs += [(f"test_{name}", [command_of([name], 1, args.done)], 0.2) for name in alone]
    runs += [(name, others[name], 0.3) for name in chosen]
    outcomes = []
    for name, commands, share in runs:
        outcomes.append(run(name, commands, args.logs, share, until))
        print(f"{name}: {outcomes[-1].summary}", flush=True)
    print()
    for o in outcomes:
        print(f"{'ok  ' if o.right else 'BAD '} {o.name:24} {o.seconds:6.0f} s  {o.summary[:120]}")
        for line in [] if o.right else o.details:
            print(f"       {line[:200]}")
    return not all(o.right for o in outcomes)


if __name__ == "__main__":
    sys.exit(main())
