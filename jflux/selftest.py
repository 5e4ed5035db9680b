"""``python -m jflux.selftest``: whether jflux's kernels are right on this machine, in five minutes.

It checks values of random calls against float64, with late ranks and poisoned workspaces; that a
planted fault is found, and a rank that never comes told of at the deadline; and it times a few
calls. Each part is a process of its own with a time limit: one that hangs or crashes is a line of
the report, which can be pasted into an issue.

On GPUs whose kernels nobody has checked (docs/guide/dispatch.md, "Other GPUs"), a run in which all
is right writes a record beside the tuning tables. From then on this machine takes those kernels
without ``jflux.config.unchecked_kernels``, with the same driver and version of jflux. A run in
which something is wrong removes the record. Where JAX has only a CPU, the values and faults of its
kernels are checked.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from ._call import gpu_code, selftest_record
from ._selftest import parts
from ._selftest.report import Done, Machine, removes_record, text, why_no_record
from ._tools import bug_reports

#: Virtual devices of a CPU, unless XLA_FLAGS have another number.
CPU_DEVICES = 4
#: How many lines of a part that failed go to standard error.
LAST_LINES = 30


def _environment() -> dict[str, str]:
    """Of the parts' processes."""
    env = dict(os.environ)
    # The jflux of this process, installed or in a checkout.
    package = str(pathlib.Path(__file__).resolve().parents[1])
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [package, env.get("PYTHONPATH")]))
    flag = "xla_force_host_platform_device_count"
    if flag not in env.get("XLA_FLAGS", ""):
        env["XLA_FLAGS"] = f"{env.get('XLA_FLAGS', '')} --{flag}={CPU_DEVICES}".strip()
    env.setdefault("NCCL_NVLS_ENABLE", "0")  # no kernel of jflux uses NVLink multicast
    return env


def run(command: Sequence[str], seconds: float) -> tuple[int | None, str]:
    """The exit status of a process and what it has printed. None: it was ended after so many
    seconds, with all that it had started."""
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            command, env=_environment(), stdout=output, stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        status = None
        try:
            status = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            pass
        finally:
            if status is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        output.seek(0)
        return status, output.read()


def do(part: parts.Part, seconds: float) -> tuple[Done, dict[str, Any]]:
    """Runs a part in a process of its own: what became of it, and what it has found."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "found.json"
        command = [sys.executable, "-m", "jflux.selftest", "--part", part.name, "--out", str(path)]
        start = time.monotonic()
        status, output = run(command, seconds)
        took = time.monotonic() - start
        found = json.loads(path.read_text()) if path.exists() else {}
    done = verdict(part, status, output, found, took, seconds)
    if done.right is False:
        last = "\n".join(output.splitlines()[-LAST_LINES:])
        print(f"---- {part.name}\n{last}", file=sys.stderr)
    return done, found


def verdict(
    part: parts.Part,
    status: int | None,
    output: str,
    found: dict[str, Any],
    took: float,
    limit: float,
) -> Done:
    """What became of a part, by how its process has ended, what it printed and what it found."""
    if "error" in found:
        return Done(part.name, False, took, found["error"])
    if status is None:
        return Done(part.name, False, took, f"not ended after {limit:.0f} s")
    if status or not found:
        how = f"signal {-status}" if status < 0 else f"status {status}"
        return Done(part.name, False, took, f"its process ended with {how}")
    if part.says is not None and not re.search(part.says, output):
        return Done(part.name, False, took, f"{found['said']}, which does not name the rank")
    return Done(part.name, True, took, found["said"])


def _child(name: str, path: pathlib.Path) -> None:
    """Runs a part in this process, writes what it has found, and ends the process: a GPU on which
    a call has failed does not let it end by itself."""
    gpu_code.PORTABLE_IS_CHECKED = True  # as a record has it
    status = 0
    try:
        found = parts.ALL[name].run()
    except BaseException as error:  # whatever it is, the report should have it
        traceback.print_exc()
        first = (str(error).splitlines() or [""])[0]
        found, status = {"error": f"{type(error).__name__}: {first}"[:300]}, 1
    path.write_text(json.dumps(found))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def selftest(
    limit: float, said: Callable[[Done], None] = lambda done: None
) -> tuple[Machine | None, list[Done], dict[str, Any]]:
    """Runs all parts that this machine can run: the machine, what became of the parts, and what
    they have found for the report.

    Args:
      limit: seconds; parts for which no time is left are left out.
      said: is called with each part when it has ended.
    """
    until = time.monotonic() + limit
    first, found = do(parts.FIRST, min(parts.FIRST.limit, limit))
    said(first)
    if not first.right:
        return None, [first], {}
    machine, done = Machine.of(found["machine"]), [first]
    every: dict[str, Any] = {}
    for part in parts.for_machine(machine):
        left = until - time.monotonic()
        if left < 1:
            done.append(Done(part.name, None, said="no time left"))
        else:
            one, found = do(part, min(part.limit, left))
            if one.right is False and left < part.limit and one.seconds >= left:
                one = Done(part.name, None, one.seconds, "no time left")
            done.append(one)
            every |= found
        said(done[-1])
    return machine, done, every


def settle(machine: Machine | None, done: Sequence[Done]) -> str:
    """Writes the record, or removes it, as the run asks for; says what it did."""
    if machine is not None and removes_record(machine, done):
        there_was = any([selftest_record.remove(kind) for kind in machine.kinds])
        return "the record of an earlier run is removed" if there_was else "nothing is recorded"
    if (why := why_no_record(machine, done)) is not None:
        return f"nothing is recorded ({why})"
    assert machine is not None
    try:
        path = selftest_record.store(
            machine.key, machine.devices, f"{datetime.date.today():%Y-%m-%d}"
        )
    except OSError as error:
        return f"nothing is recorded: {error}; JFLUX_TUNING_DIR names a folder that can be written"
    return (
        f"recorded in {path}: kernels of portable code run here without unchecked_kernels, as long "
        f"as the driver is {machine.driver} and jflux {machine.jflux}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the report; 1 if a part was wrong, else 0."""
    parser = argparse.ArgumentParser(
        prog="python -m jflux.selftest",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--limit", type=float, default=900.0,
        help="seconds; a run that leaves parts out for want of time writes no record",
    )  # fmt: skip
    parser.add_argument("--part", choices=tuple(parts.ALL), help=argparse.SUPPRESS)
    parser.add_argument("--out", type=pathlib.Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.part is not None:
        _child(args.part, args.out)
    machine, done, found = selftest(args.limit, lambda one: print(one, file=sys.stderr, flush=True))
    lines, rows = found.get("lines", ()), found.get("rows", ())
    for line in text(machine, done, lines, rows, settle(machine, done)):
        print(bug_reports.scrub(line))
    return int(any(one.right is False for one in done))


if __name__ == "__main__":
    sys.exit(main())
