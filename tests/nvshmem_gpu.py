"""NVSHMEM on the GPUs of one host, one process for each: python tests/nvshmem_gpu.py

    --processes 2       as many as GPUs take part
    --limit 480         seconds for everything
    --only NAME,...     of the runs below

    reasons    one process: NVSHMEM cannot be used, which is said, and the usual heap works
    node       one node: all ops on a heap of NVSHMEM's memory, whose peers are mapped
    again      the same after a shutdown, and with heaps of different sizes
    between    each process is a node: exchanges through NVSHMEM's API alone, every bit, and how
               long small ones take beside XLA's collectives
    levels     each process is a node: the two-level ops, by NVSHMEM between nodes
    twice      the same after a shutdown, on what NVSHMEM has started
    exit       processes end as programs do, with NVSHMEM started
    deadline   a process does not come to an exchange: the other one's call ends in an error

Nothing leaves the host: between these "nodes" NVSHMEM's API takes NVLink. That tests the protocol
and the API's use, and not a network. A table is last; ends with status 1 if a run is wrong.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import pathlib
import re
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

# A host without network cards, and no NVLink multicast. What jflux sets itself is not set here.
for name, value in {
    "NCCL_NVLS_ENABLE": "0",
    "NVSHMEM_DISABLE_NVLS": "1",
    "NVSHMEM_REMOTE_TRANSPORT": "none",
    "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME": "lo",
}.items():
    os.environ.setdefault(name, value)

from workers.common import run_together  # noqa: E402


@dataclasses.dataclass
class Run:
    name: str
    scenario: str
    options: tuple[str, ...] = ("--backend", "nvshmem")
    processes: int | None = None
    seconds: float = 150
    says: tuple[str, ...] = ()  # patterns that the first process prints
    is_wrong: str = ""
    took: float = 0
    output: str = ""

    def start(self, processes: int, seconds: float) -> None:
        begin = time.monotonic()
        try:
            results = run_together(
                self.scenario, platform="gpu", processes=self.processes or processes,
                timeout=min(self.seconds, seconds), options=self.options,
            )  # fmt: skip
        except Exception as error:  # a process that did not end, above all
            self.is_wrong = f"{type(error).__name__}: {str(error)[:200]}"
            results = []
        self.took = time.monotonic() - begin
        self.output = "\n".join(output for _, output in results)
        for process, (status, output) in enumerate(results):
            if status != 0:
                self.is_wrong = self.is_wrong or f"process {process} ended with status {status}"
                print(f"---- {self.name}, process {process}:\n{output[-4000:]}", flush=True)
        for pattern in self.says if results else ():
            if not re.search(pattern, results[0][1], re.M):
                self.is_wrong = self.is_wrong or f"process 0 did not say {pattern!r}"
                print(f"---- {self.name}, process 0:\n{results[0][1][-4000:]}", flush=True)


NODES = ("--backend", "nvshmem", "--nodes", "named")
RUNS = (
    Run("reasons", "nvshmem_reasons", options=(), processes=1, says=("there is one process",)),
    Run("node", "values,loops,training"),
    Run("again", "again,different_heaps,values"),
    Run("between", "node_exchange", options=NODES, says=(r"^time 1024 bytes",)),
    Run("levels", "two_levels", options=NODES),
    Run("twice", "node_exchange_again", options=NODES),
    Run("exit", "node_exchange_again", options=(*NODES, "--exit")),
    Run(
        "deadline", "node_never_calls", options=NODES,
        says=(r"jflux.node_exchange: rank 0 waited 5 s for rank [1-9]", r"^error: "),
    ),
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--limit", type=float, default=480)
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    until = time.monotonic() + args.limit
    runs = [run for run in RUNS if not args.only or run.name in args.only.split(",")]
    for run in runs:
        left = until - time.monotonic()
        if left < 10:
            run.is_wrong = "no time left"
            continue
        run.start(args.processes, left)
        print(f"{run.name}: {run.is_wrong or 'right'} ({run.took:.0f} s)", flush=True)
    print()
    for line in dict.fromkeys(re.findall(r"^time .*$", "\n".join(r.output for r in runs), re.M)):
        print(line)
    for run in runs:
        verdict = "BAD " if run.is_wrong else "ok  "
        print(f"{verdict} {run.name:10} {run.took:5.0f} s  {run.is_wrong[:160]}")
    return any(run.is_wrong for run in runs)


if __name__ == "__main__":
    sys.exit(main())
