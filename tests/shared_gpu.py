"""Random calls of ranks that share what GPUs there are: python tests/shared_gpu.py --ranks 4

Each rank is a process. Where a GPU has several of them their kernels take turns on it, so a wait
lasts until it is the peer's turn, which may come anywhere in its kernel; nothing here says how fast
anything is. NCCL wants a GPU for every rank: XLA's own collectives have no part in it, and what
comes out is compared with float64 on the host. Without GPUs, or with JAX_PLATFORMS=cpu, the ranks
are CPUs. If JFLUX_TEST_PRIMITIVES names a library of tests/custom_primitives, its kernel is among
the calls.
"""

from __future__ import annotations

import argparse
import glob
import os
import signal
import subprocess
import sys
import time

from workers.common import HERE, environment, free_port


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    kinds = "any product waves few_columns sum quantized_sum norm large_sum scaled dispatch experts"
    kinds += " exchange one_exchange attention custom"
    parser.add_argument("--kind", choices=kinds.split(), default="any", help="of calls (workers/)")
    parser.add_argument(
        "--graphs", action="store_true", help="replay each call with new inputs too"
    )
    parser.add_argument(
        "--steps", type=int, default=24, help="of a call's replays, rounded up to loops of 24"
    )
    parser.add_argument("--op", help="calls of this op alone, instead of a kind")
    parser.add_argument("--small", action="store_true", help="small shapes, for slow tools")
    parser.add_argument(
        "--portable", action="store_true", help="products by the code for other GPUs than Hopper's"
    )
    parser.add_argument("--deadline", type=float, default=30, help="of a wait, in seconds")
    args = parser.parse_args()
    if args.kind == "custom" and "JFLUX_TEST_PRIMITIVES" not in os.environ:
        parser.error("JFLUX_TEST_PRIMITIVES must name a library (tests/test_primitives.py)")

    on_cpus = os.environ.get("JAX_PLATFORMS") == "cpu"
    gpus = 0 if on_cpus else len(glob.glob("/dev/nvidia[0-9]*"))
    env = environment("gpu" if gpus else "cpu", 1)
    env["NCCL_NVLS_ENABLE"] = "0"
    env["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{0.7 / -(-args.ranks // max(gpus, 1)):.3f}"
    command = [sys.executable, "-m", "workers.random_worker"]
    command += ["--port", str(free_port())]
    command += ["--graphs"] * args.graphs + ["--small"] * args.small
    command += ["--portable"] * args.portable
    command += ["--op", args.op] if args.op else []
    for name in ("ranks", "calls", "seed", "steps", "kind", "deadline"):
        command += [f"--{name}", str(getattr(args, name))]
    command += ["--gpus", str(gpus)]
    running = {
        rank: subprocess.Popen([*command, "--rank", str(rank)], env=env, cwd=HERE.parent)
        for rank in range(args.ranks)
    }
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    # The first that fails says why; the others wait for it in vain.
    try:
        while running:
            for rank, process in list(running.items()):
                if process.poll() is None:
                    continue
                del running[rank]
                if process.returncode != 0:
                    print(f"rank {rank} ended with {process.returncode}", file=sys.stderr)
                    return 1
            time.sleep(0.05)
    finally:
        for process in running.values():
            process.kill()
    return 0


if __name__ == "__main__":
    sys.exit(main())
