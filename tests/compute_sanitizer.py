"""NVIDIA's compute-sanitizer on small calls of every op; a table is last:

python tests/compute_sanitizer.py [--tools memcheck ...] [--ops all_reduce ...] [--calls 3]

Two ranks, processes under the tool, share what GPUs there are (shared_gpu.py): one is enough, but
for the ops of TWO_GPUS.
The tools are slow, and ranks wait for each other meanwhile: the deadline of a wait is --deadline.
Only jflux's kernels are instrumented, where the tool can choose kernels. XLA tunes none of its own:
cuBLASLt's have failed under a tool, or not ended. racecheck takes more than 250 GB of the host for
the scripts of TWO_GPUS whose kernels multiply; `dispatch` draws small calls of these.

  memcheck    accesses out of bounds or misaligned, in any memory
  initcheck   reads of global memory that this process has not written. What a peer writes does not
              count as written, so what it says of ops with peers is shown and does not count
  synccheck   invalid use of barriers. It wants all threads of a named barrier to wait at one place,
              and somebody to wait for each phase of an mbarrier. Kernels of grouped products have
              warps that meet at two places, and in the second CTA of a cluster an mbarrier that
              nobody reads: what it says of WITH_TMA is shown and does not count
  racecheck   hazards in shared memory. TMA writes shared memory through the asynchronous proxy, and
              mbarriers order it: racecheck may not know of either. What it says of the products,
              whose kernels use both, is shown and does not count

With --strict all counts. Status 1: a tool has found something, or a run has failed. Logs stay in
--logs.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

from jflux._ops._spec import all_ops

HERE = pathlib.Path(__file__).parent
TOOLS = ("memcheck", "initcheck", "synccheck", "racecheck")
PYTEST = ("-m", "pytest", "-q", "--full")
#: Kernels of one rank, and the scripts or tests that run them.
LOCAL = {
    "grouped_matmul": ["moe_gpu.py"],  # and moe.route
    "grouped_matmul_scaled": ["grouped_scaled_gpu.py"],
    "flash_attention": ["attention_gpu.py"],
    "flash_attention_portable": ["attention_gpu.py", "--portable"],
    "flash_decode": [*PYTEST, "test_flash_decode_half.py", "-k", "pages or nothing"],
    "latent_decode": [*PYTEST, "test_flash_decode_half.py", "-k", "latent and bfloat16"],
    "moe_gate": [*PYTEST, "test_moe_gate.py", "-k", "values and bfloat16"],
    "moe_rows": [*PYTEST, "test_moe_rows.py", "-k", "values and bfloat16"],
    "quantize": [*PYTEST, "test_quantize.py", "-k", "bits and e4m3fn"],
}
#: Ops whose scripts run two ranks in one process, which has to have two GPUs.
TWO_GPUS = {
    "all_gather_grouped_matmul": ["gathered_gpu.py", "--only", "gather"],
    "grouped_matmul_reduce_scatter": ["gathered_gpu.py", "--only", "scatter"],
    "moe_dispatch": ["dispatch_gpu.py"],  # and moe_combine
    "all_gather_attention": ["attention_gpu.py", "--ranks", "2"],
    "all_gather_attention_portable": ["attention_gpu.py", "--ranks", "2", "--portable"],
    "decode_merge": [*PYTEST, "test_decode_merge.py", "-k", "values and 2-shape1"],
    "stress": ["-m", "jflux.stress", "--calls", "40"],  # all ops that have one kernel a call
}
#: Kinds of calls of two ranks that share a GPU (shared_gpu.py) which are not those of one op.
KINDS = ("quantized_sum", "dispatch", "experts")
#: Those whose kernels use TMA and mbarriers, beside the ops with a product.
WITH_TMA = (
    "grouped_matmul", "grouped_matmul_scaled", "flash_attention", "all_gather_grouped_matmul",
    "grouped_matmul_reduce_scatter", "all_gather_attention", "stress", *KINDS,
)  # fmt: skip
FOUND = 99  # the exit status of a program in which a tool has found something


@dataclasses.dataclass
class Outcome:
    op: str
    tool: str
    seconds: float
    verdict: str  # "ok", or what was found
    counts: bool  # whether it makes the run fail

    @property
    def bad(self) -> bool:
        return self.counts and self.verdict != "ok"


def read(logs: list[str], status: int, output: str) -> str:
    """What the logs of a run's ranks and its output say."""
    text = "\n".join(logs)
    errors = sum(int(n) for n in re.findall(r"ERROR SUMMARY: (\d+) error", text))
    for total, worst in re.findall(
        r"RACECHECK SUMMARY: (\d+) hazards? displayed \((\d+) err", text
    ):
        errors += int(worst)
        if int(worst) == 0 and int(total) > 0 and errors == 0:
            return f"{total} warnings"
    if errors:
        first = re.search(r"^=+ (?!COMPUTE-SANITIZER)(\S.*)$", text, re.M)
        return f"{errors} errors: {first[1] if first else ''}"
    if unknown := re.search(r"^.*(not supported|[Uu]nsupported).*$", text, re.M):
        return f"unsupported: {unknown[0].strip('= ')}"
    if status == 0 and not logs:
        return "no log: was the tool run?"
    if status == 0:
        return "ok"
    last = next((line for line in reversed(output.splitlines()) if line.strip()), "no output")
    return f"ended with {status}: {last}"


def filter_of(sanitizer: str) -> list[str]:
    """The options that leave XLA out, as this version spells them: its kernels, and its copies of
    what nobody has written."""
    text = subprocess.run([sanitizer, "--help"], text=True, capture_output=True).stdout
    found = []
    for option, value in (
        ("--kernel-name", "kernel_substring=jflux"),
        ("--kernel-regex", "kernel_substring=jflux"),
        ("--check-api-memory-access", "no"),
    ):
        if re.search(rf"{option}\b(?!-)", text) and value not in found:
            found += [option, value]
    return found


def run(args: argparse.Namespace, sanitizer: str, chosen: list[str], op: str, tool: str) -> Outcome:
    folder = args.logs / f"{op}-{tool}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    # XLA enables peer access twice, and expects the error.
    options = ["--report-api-errors", "no"] if tool == "memcheck" else []
    # One tool for both ranks: where each had one, a tool crashed (version 2025.3, CUDA 13.0).
    command = [
        sanitizer, "--tool", tool, "--target-processes", "all", "--error-exitcode", str(FOUND),
        "--print-limit", "20", "--log-file", str(folder / "process-%p.log"), *chosen,
        *options, sys.executable,
    ]  # fmt: skip
    draws = ["--calls", str(args.calls), "--seed", str(args.seed)]
    if script := (LOCAL | TWO_GPUS).get(op):
        command += script
        if "-m" not in script:
            command += ["--limit", str(args.limit / 2), *draws]
    else:
        command += [
            "shared_gpu.py",
            "--ranks",
            "2",
            "--kind" if op in KINDS else "--op",
            op,
            "--small",
        ]
        command += ["--deadline", str(args.deadline), *draws]
    command += ["--portable"] * args.portable
    env = os.environ | {
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0"
    }
    start = time.monotonic()
    process = subprocess.Popen(
        command, cwd=HERE, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True, env=env,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=args.limit)
        status = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, status = process.communicate()[0] + f"\nkilled after {args.limit:.0f} s", 124
    (folder / "output.log").write_text(output)
    logs = [log.read_text(errors="replace") for log in sorted(folder.glob("process-*.log"))]
    is_product = not args.portable and (
        op in WITH_TMA or (op in all_ops() and all_ops()[op].product is not None)
    )
    may_not_know = {
        "racecheck": is_product, "initcheck": op not in LOCAL, "synccheck": op in WITH_TMA,
    }  # fmt: skip
    advisory = may_not_know.get(tool, False) and not args.strict
    return Outcome(op, tool, time.monotonic() - start, read(logs, status, output), not advisory)


def table(outcomes: list[Outcome]) -> str:
    lines = []
    for o in outcomes:
        mark = "BAD " if o.bad else "ok  " if o.verdict == "ok" else "note"
        lines.append(f"{mark} {o.op:22} {o.tool:10} {o.seconds:6.0f} s  {o.verdict[:120]}")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=TOOLS)
    ops = [*all_ops(), *KINDS, *LOCAL, *TWO_GPUS]
    parser.add_argument("--ops", nargs="+", choices=ops, default=ops)
    parser.add_argument("--calls", type=int, default=3, help="of each op, under each tool")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--deadline", type=float, default=1200, help="of a wait, in seconds")
    parser.add_argument("--limit", type=float, default=600, help="seconds of one op under one tool")
    parser.add_argument(
        "--portable", action="store_true",
        help="portable code (tests/portable_gpu.py), of grouped products and of ops over ranks",
    )  # fmt: skip
    parser.add_argument("--strict", action="store_true", help="all that the tools say counts")
    parser.add_argument("--sanitizer", default="compute-sanitizer", help="the program")
    parser.add_argument("--logs", type=pathlib.Path, default="/tmp/jflux-compute-sanitizer")
    args = parser.parse_args(argv)
    sanitizer = shutil.which(args.sanitizer) or shutil.which(
        "/usr/local/cuda/bin/compute-sanitizer"
    )
    if sanitizer is None:
        parser.error(f"there is no {args.sanitizer}; it is part of the CUDA toolkit")
    chosen = filter_of(sanitizer)
    one = functools.partial(run, args, sanitizer, chosen)
    outcomes = []
    for tool in args.tools:
        for op in args.ops:
            outcomes.append(one(op, tool))
            print(table(outcomes[-1:]), flush=True)
    print(f"\n{table(outcomes)}")
    return int(any(o.bad for o in outcomes))


if __name__ == "__main__":
    sys.exit(main())
