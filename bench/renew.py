"""Renews what bench/results has of this host's GPUs, the most telling first; a table is last:

python -m bench.renew --ranks 4 [NAME...] [--missing] [--limit 3600] [--out bench/results]

NAME is what stands behind "4xh200_" in a file's name, or "ops" for "4xh200" itself; all, if none.
Each benchmark is a process of its own, which saves after each row. What has run to its end replaces
the file in --out; what the limit cut short stays in --scratch. With --missing, only rows that the
files in --out lack are measured, and each of them goes there.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]

COLLECTIVES = "bench.collectives --ranks {ranks} --lists all_reduce,norm,pair,all_to_all"
#: By name, the module and its options; {ranks} are all GPUs, and a process for each.
RUNS = {
    "ops": "bench --ranks {ranks} --lists "
    "flux,llm,attention,decode,hundreds,ragged,odd,ulysses,all_to_all_matmul",
    "all_reduce": "bench --ranks {ranks} --lists all_reduce",
    "processes": "bench --ranks {ranks} --processes {ranks} --lists flux,decode",
    "collectives": COLLECTIVES,
    "collectives_processes": f"{COLLECTIVES} --processes {{ranks}}",
    "decode": "bench.decode --ranks {ranks}",
    "blocks": "bench.blocks --ranks {ranks}",
    "accuracy": "bench.accuracy --ranks {ranks}",
    "grids": "bench.grids --ranks {ranks}",
    "xla": "bench.xla --ranks {ranks}",
    "peers": "bench --ranks {ranks} --lists flux,llm,attention --peers pallas,torch",
    "ragged": "bench.collectives --ranks {ranks} --lists ragged",
    "wires": "bench.collectives --ranks {ranks} --lists wire,wire_pair",
    "experts": "bench.experts --ranks {ranks}",
    "gathered": "bench.gathered --ranks {ranks}",
    "scattered": "bench.scattered --ranks {ranks}",
    "attention": "bench.attention --ranks {ranks} --peers transformer_engine,flash_attn3",
    "flash_decode": "bench.flash_decode --ranks {ranks}",
    "maxtext": "bench.maxtext --ranks {ranks}",  # needs the package
    "code_bases": "bench.code_bases --ranks {ranks}",  # of the libraries that are there
    "scaled": "bench.scaled --ranks {ranks} --peers torch",
    "scaled_products": "bench.scaled --ranks 1 --peers torch",  # of one GPU
    "products": "bench.products",  # likewise
    "moe": "bench.moe --ranks 1 --peers tokamax,torch",  # likewise
}
ONE_GPU = ("scaled_products", "products", "moe")

#: Seconds that a benchmark has to end by itself.
TO_END = 10


def short(gpu: str) -> str:
    """A model's name in files and tables: "H100" of "NVIDIA H100 80GB HBM3"."""
    return gpu.split()[:2][-1]


def file_name(name: str, ranks: int, gpu: str) -> str:
    """Of the result of a run, on so many GPUs of a model such as "NVIDIA H100 80GB HBM3"."""
    machine = f"{1 if name in ONE_GPU else ranks}x{short(gpu).lower()}"
    return f"{machine}.json" if name == "ops" else f"{machine}_{name}.json"


def command_of(name: str, ranks: int, out: pathlib.Path, limit: float | None = None) -> list[str]:
    """With a limit, as many rows as fit in so many seconds, beside those that `out` has."""
    module, *options = RUNS[name].format(ranks=ranks).split()
    if limit is not None:
        options += ["--limit", f"{limit:.0f}"]
    result = "--out" if limit is None or not out.exists() else "--add"
    return [sys.executable, "-m", module, *options, result, str(out)]


def gpu_name() -> str:
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader", "-i", "0"]
    return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()


def run(name: str, ranks: int, out: pathlib.Path, seconds: float, missing: bool) -> bool:
    """Whether it ran to its end."""
    env = os.environ | ({"CUDA_VISIBLE_DEVICES": "0"} if name in ONE_GPU else {})
    words = command_of(name, ranks, out, max(0, seconds - TO_END) if missing else None)
    process = subprocess.Popen(words, cwd=ROOT, env=env, start_new_session=True)
    try:
        return process.wait(seconds) == 0
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # its own processes too
        process.wait()
        return False


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(RUNS))
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--missing", action="store_true", help="only rows that --out lacks")
    parser.add_argument("--limit", type=float, default=3600, help="seconds for everything")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "bench" / "results")
    parser.add_argument("--scratch", type=pathlib.Path, default=ROOT / "out" / "renew")
    args = parser.parse_args()
    if unknown := set(args.names) - set(RUNS):
        parser.error(f"no benchmark {', '.join(sorted(unknown))}; there are {', '.join(RUNS)}")
    gpu = gpu_name()
    args.scratch.mkdir(parents=True, exist_ok=True)
    args.out.mkdir(parents=True, exist_ok=True)
    until, lines = time.monotonic() + args.limit, []
    for name in args.names or RUNS:
        path = args.scratch / file_name(name, args.ranks, gpu)
        path.unlink(missing_ok=True)
        if args.missing and (args.out / path.name).exists():
            shutil.copy(args.out / path.name, path)
        start = time.monotonic()
        done = start < until and run(name, args.ranks, path.resolve(), until - start, args.missing)
        if done or (args.missing and path.exists()):
            shutil.copy(path, args.out / path.name)
        kept = done or args.missing
        where = args.out / path.name if kept else path if path.exists() else "nothing"
        verdict = "ok " if done else "BAD"
        lines.append(f"{verdict} {name:22} {time.monotonic() - start:6.0f} s  {where}")
        print(lines[-1], flush=True)
    print("\n" + "\n".join(lines))
    return any(line.startswith("BAD") for line in lines)


if __name__ == "__main__":
    sys.exit(main())
