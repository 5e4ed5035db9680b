"""``python -m jflux.stress --minutes 10``: random programs of all ops, checked, on these devices.

Each program makes a few calls with shapes, types, meshes and device orders of its own, some in a
chain and some independent, beside collectives and products of XLA's. Ranks come late on purpose,
workspaces are poisoned between batches, and each program runs three times: on two different inputs,
and on the first again. Values are compared with float64 on the host; the bits of equal runs, and
those of ranks that have the same result, must be equal.

One process may have all devices. With one process per GPU, start this command once for each:

    python -m jflux.stress --coordinator HOST:PORT --processes 2 --process 0 --local-devices 0
    python -m jflux.stress --coordinator HOST:PORT --processes 2 --process 1 --local-devices 1

or with --distributed under Slurm, Open MPI, Kubernetes: what jax.distributed.initialize() knows.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import random
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import jax

import jflux

from . import _heap, testing
from ._call import gpu_code
from ._ops._spec import ops_with_checked_kernels
from ._tools import virtual_devices
from ._tools.progress import Progress


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jflux.stress",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--minutes", type=float, default=10.0, help="how long")
    add("--calls", type=int, help="how many calls, instead")
    add("--batch", type=int, help="that batch alone, to see a failure again")
    add("--seed", type=int, help="of everything that is random; by default the time")
    add("--in-flight", type=int, default=4, help="programs of a batch, which run at once")
    add("--most-calls", type=int, default=4, help="of a program")
    add("--max-delay-us", type=int, default=2000, help="how late a rank comes, in each call")
    add("--report", type=pathlib.Path, help="writes what was done, and the first failure, as JSON")
    add("--deadline-seconds", type=float, default=60.0, help="of a wait for a peer")
    add("--plant-fault", action="store_true", help="ranks do not wait for their peers: must fail")
    add("--unchecked", action="store_true", help="also GPU kernels that have not been checked yet")
    where = parser.add_argument_group("several processes")
    where.add_argument("--coordinator", help="HOST:PORT of process 0")
    where.add_argument("--processes", type=int)
    where.add_argument("--process", type=int, help="0 to PROCESSES - 1")
    where.add_argument("--local-devices", help="GPUs of this process: 0, or 0,1")
    where.add_argument(
        "--distributed", action="store_true",
        help="jax.distributed.initialize() finds out where the others are",
    )  # fmt: skip
    return parser


def _start_jax(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Chooses the devices, and meets the other processes, before JAX looks at either."""
    by_flags = (args.coordinator, args.processes, args.process)
    if any(flag is not None for flag in by_flags) and None in by_flags:
        parser.error("--coordinator, --processes and --process go together")
    several = args.distributed or args.coordinator is not None
    several = several or "JAX_COORDINATOR_ADDRESS" in os.environ
    if several and args.seed is None:
        args.seed = 0  # the same in all processes
    share = 1 if args.distributed else virtual_devices.DEVICES // (args.processes or 1)
    virtual_devices.ask_for_devices(max(1, share))
    # No kernel of jflux uses NVLink multicast, so NCCL need not set it up either.
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    if not several:
        return
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    local = args.local_devices and [int(d) for d in args.local_devices.split(",")]
    jax.distributed.initialize(*by_flags, local_device_ids=local or None)


def _why_not() -> str | None:
    """Why there is nothing to run here."""
    platform = _heap.default_platform()
    if platform not in ("cpu", "cuda"):
        return f"on {platform} every op takes its lax reference"
    if platform == "cuda" and (reason := _heap._why_no_cuda()):
        return reason
    if jax.device_count() < 2:
        return "there is one device, which has nobody to talk to"
    return None


def stress(
    *,
    seed: int,
    minutes: float = 10.0,
    calls: int | None = None,
    batch: int | None = None,
    in_flight: int = 4,
    most_calls: int = 4,
    max_delay_us: int = 2000,
    plant_fault: bool = False,
    report_path: pathlib.Path | None = None,
    progress: Callable[[float, int], None] = lambda done, calls: None,
) -> Any:
    """Runs random programs on all devices, until the time is over or something is wrong. All
    processes call it with the same arguments.

    Args:
      seed: of everything that is random.
      minutes: how long; `calls`: how many calls instead; `batch`: that batch alone.
      in_flight: programs of a batch. They run at once, but for CPU processes that meet through
        gloo, whose collectives must come in the same order everywhere.
      most_calls: of one program.
      max_delay_us: how late a rank comes, in microseconds, in each call.
      plant_fault: ranks do not wait for their peers.
      report_path: where the report goes, if anywhere; process 0 writes it.
      progress: (seconds or calls done, calls that were right).

    Returns:
      The report; its `failure` is None if all was right.
    """
    from ._stress import programs, report, together

    arguments = {
        "seed": seed, "minutes": minutes, "calls": calls, "batch": batch, "in_flight": in_flight,
        "most_calls": most_calls, "max_delay_us": max_delay_us, "plant_fault": plant_fault,
    }  # fmt: skip
    found, start = report.Report(arguments), time.monotonic()
    peers = together.Together()
    path = report_path if peers.process == 0 else None
    platform = _heap.default_platform()
    orders = programs.orders(seed, jax.devices(), _heap.node_of(platform))
    one_by_one = platform == "cpu" and peers.processes > 1

    def make(number: int) -> list[programs.Program]:
        drawn = []
        for i in range(in_flight):
            rng, which = random.Random(f"{seed}/{number}/{i}"), number * in_flight + i
            drawn.append(programs.draw(rng, orders, platform, number=which, most_calls=most_calls))
        return drawn

    def attempt(number: int) -> tuple[list[programs.Program], list[dict[str, str]], Any]:
        """The batch's programs, the digests of their results, and what went wrong."""
        drawn: list[programs.Program] = []
        digests: list[dict[str, str]] = []
        checked: programs.Program | None = None
        try:
            drawn = make(number)
            found.running = [line for p in drawn for line in _describe(p)]
            found.write(path)
            delays = testing.planted_faults(skip_waits=plant_fault, max_delay_us=max_delay_us)
            with delays:
                every = _run(drawn, one_by_one)
            testing.poison_workspaces()
            for checked, results in zip(drawn, every, strict=True):  # noqa: B007
                digests.append(programs.check(checked, results))
            return drawn, digests, None
        except programs.Wrong as error:
            what, case, why = error.what, error.case, str(error)
        except Exception as error:  # whatever it is, the report should have it
            what, case, why = "error", "", f"{type(error).__name__}: {error}"
            if peers.processes == 1 or not isinstance(error, jax.errors.JaxRuntimeError):
                traceback.print_exc()
        return drawn, digests, {
            "what": what, "case": case, "message": why, "batch": number, "seed": seed,
            "process": peers.process,
            "programs": _describe(checked) if checked is not None else found.running,
            "repeat": report.repeat(arguments, number),
        }  # fmt: skip

    number = batch or 0
    while True:
        drawn, digests, failure = attempt(number)
        everywhere = peers.exchange([failure, digests])
        failures = [one for one, _ in everywhere if one is not None]
        if not failures:
            for i, program in enumerate(drawn):
                try:
                    programs.check_between(program, [each[i] for _, each in everywhere])
                except programs.Wrong as error:
                    failures.append({
                        "what": error.what, "case": error.case, "message": str(error),
                        "batch": number, "seed": seed, "programs": _describe(program),
                        "repeat": report.repeat(arguments, number),
                    })  # fmt: skip
        found.seconds = time.monotonic() - start
        if failures:
            found.failure = failures[0]
            break
        for program in drawn:
            found.calls.update(programs.calls_of(program))
        found.batches, found.programs = found.batches + 1, found.programs + len(drawn)
        made = sum(found.calls.values())
        progress(made if calls else found.seconds, made)
        jax.clear_caches()  # thousands of compiled programs would fill the memory
        over = made >= calls if calls else found.seconds >= 60 * minutes
        if batch is not None or peers.first(over):
            break
        number += 1
    found.running = []
    found.write(path)
    return found


def _run(drawn: list[Any], one_by_one: bool) -> list[list[Any]]:
    """The results of a batch's programs, each on its inputs."""
    from ._stress.programs import INPUTS

    results: list[list[Any]] = [[] for _ in drawn]
    for which in range(len(INPUTS)):
        for program, own in zip(drawn, results, strict=True):
            if which < program.runs:
                own.append(program.run(which))
                if one_by_one:
                    jax.block_until_ready(own)
        if which == 1:  # the last run begins with poisoned workspaces
            jax.block_until_ready(results)
            testing.poison_workspaces()
    jax.block_until_ready(results)
    return results


def _describe(program: Any) -> list[str]:
    loop = " (in one loop)" if program.looped else ""
    return [f"{program}{loop}: {case.name}" for case in program.cases]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; 1 if something was wrong."""
    parser = _parser()
    args = parser.parse_args(argv)
    _start_jax(args, parser)
    if reason := _why_not():
        print(f"jflux.stress: nothing to run here: {reason}", file=sys.stderr)
        return 1
    seed = int(time.time()) if args.seed is None else args.seed
    speaks = jax.process_index() == 0
    if speaks:
        print(f"seed {seed}, {jax.device_count()} devices", file=sys.stderr)
    total, unit = (args.calls, "calls") if args.calls else (60 * args.minutes, "s")
    bar = Progress(total, unit, show=speaks)
    try:
        # Elsewhere products are XLA's, and checked as well.
        strict = jax.default_backend() != "gpu" or gpu_code.arch_here() >= gpu_code.HOPPER
        with jflux.config(strict=strict, always=True, unchecked_kernels=args.unchecked):
            jflux.init(deadline_seconds=args.deadline_seconds)
            report = stress(
                seed=seed, minutes=args.minutes, calls=args.calls, batch=args.batch,
                in_flight=args.in_flight, most_calls=args.most_calls,
                max_delay_us=args.max_delay_us, plant_fault=args.plant_fault,
                report_path=args.report,
                progress=lambda done, made: bar.at(done, f"{made} calls right"),
            )  # fmt: skip
    finally:
        bar.close()
    if speaks:
        ops = ops_with_checked_kernels(jax.default_backend())
        missing = sorted({op.name for op in ops} - set(report.calls))
        if missing and report.failure is None:
            print(f"not called: {', '.join(missing)}")
        print(report.summary())
    if report.failure is None:
        return 0
    if speaks:
        print(f"FAILED: {report.failure['message']}")
        for line in report.failure["programs"]:
            print(f"  {line}")
        print(f"to see it again: {report.failure['repeat']}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
