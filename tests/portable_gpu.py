"""Checks the portable code of kernels (sm_80) on Hopper GPUs; a table comes last:

python tests/portable_gpu.py [--build build/portable] [--minutes 1] [--limit 540]

A library with portable code alone is built where --build has none, and takes minutes. On a GPU of
compute capability 9.0 the driver then compiles sm_80's PTX: what other GPUs run. Every run is a
process with that library, and ends with a word in the table:

    code        the GPUs run portable code, and ops that have none say so
    doctor      python -m jflux.doctor --unchecked
    stress      random calls against float64, with late ranks, poisoned workspaces, second calls,
                and loops that XLA captures in graphs
    planted     the same without waits, which must be wrong
    collectives, local    a quarter of the tests of ops that have portable code
    missing     a rank that never comes: an error at the deadline
    route       tests/moe_gpu.py's random routings
    dispatch    tests/dispatch_gpu.py on two GPUs
    grouped_scaled    tests/grouped_scaled_gpu.py: grouped products of 8 bits with scales
    attention, attention 2    tests/attention_gpu.py on one GPU and on two

On other GPUs this is not needed: what is installed has the code, and `python -m jflux.selftest`
checks it.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

TESTS = pathlib.Path(__file__).resolve().parent
ROOT = TESTS.parent
#: Tests that expect what portable code leaves to XLA: norms, heads of 256 elements (shape2), and
#: what is computed as it is quantised, or quantised again.
LEFT_OUT = "not norm and not what_follows and not shape2 and not beside_other_collectives"
LEFT_OUT += " and not computed and not again"

CODE = """
import jax, jflux
from jflux import _heap; from jflux._call import gpu_code
capabilities = {d.compute_capability for d in jax.local_devices()}
assert capabilities == {"9.0"}, f"--build is for Hopper, these are {capabilities}"
assert gpu_code.arch_here() == gpu_code.FLOAT8, "the GPUs run code for sm_90a, or none for sm_89"
assert _heap.existing_or_new() == "cuda", _heap.why_no_heap("cuda")
jflux.config.update(unchecked_kernels=True)
for op, has_code in {"all_gather_matmul": True, "grouped_matmul_dw_scaled": False}.items():
    why = gpu_code.why_not(op, gpu_code.arch_here(), gpu_code.gpu_here())
    assert (why is None) == has_code, (op, why)
"""
ROUTE = """
import jflux, moe_gpu
from jflux import _native
jflux.config.update(unchecked_kernels=True)
for seed in range(60):
    moe_gpu.check_route(seed)
print(f"60 routings right, {_native.lib.cuda_launches()} launches")
assert _native.lib.cuda_launches() >= 60
"""


def build(folder: pathlib.Path) -> None:
    """Compiles the library with portable code alone of what has it."""
    configure = [
        "cmake", "-S", str(ROOT), "-B", str(folder), "-DJFLUX_CUDA=ON",
        "-DCMAKE_CUDA_ARCHITECTURES=80", f"-DPython_EXECUTABLE={sys.executable}",
    ]  # fmt: skip
    subprocess.run(configure, check=True, stdout=subprocess.DEVNULL)
    targets = ["--target", "jflux_core", "_jflux", "--parallel"]
    subprocess.run(["cmake", "--build", str(folder), *targets], check=True)


def package(folder: pathlib.Path, into: pathlib.Path) -> None:
    """The Python files of the checkout beside the libraries of a build."""
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(ROOT / "jflux", into / "jflux", ignore=ignored)
    for pattern in ("libjflux_core.so", "_jflux*.so", "_build_info.py"):
        for path in folder.glob(pattern):
            shutil.copy(path, into / "jflux" / path.name)


def commands(minutes: float) -> dict[str, tuple[list[str], bool]]:
    """By name: arguments of Python, and whether they end well."""
    pytest = [
        "-m",
        "pytest",
        "-q",
        "--one-in",
        "4",
        "-n",
        "0",
        "--no-header",
        "-p",
        "no:cacheprovider",
    ]
    files = {
        "collectives": ["all_reduce", "exchange", "ragged_all_to_all"],
        "local": ["moe_gate", "moe_rows", "flash_decode_half", "quantize"],
    }
    stress = ["-m", "jflux.stress", "--unchecked", "--deadline-seconds", "20"]
    attention = [str(TESTS / "attention_gpu.py"), "--portable"]
    missing = [str(TESTS / "test_faults.py"), "-k", "missing_from_a_butterfly"]
    return {
        "code": (["-c", CODE], True),
        "doctor": (["-m", "jflux.doctor", "--unchecked"], True),
        "stress": ([*stress, "--minutes", f"{minutes}"], True),
        "planted": ([*stress, "--calls", "200", "--plant-fault"], False),
        "missing": ([*pytest, *missing], True),
        "route": (["-c", ROUTE], True),
        "dispatch": ([str(TESTS / "dispatch_gpu.py"), "--unchecked", "--calls", "40"], True),
        "grouped_scaled": (
            [str(TESTS / "grouped_scaled_gpu.py"), "--portable", "--calls", "40"], True
        ),
        "attention": ([*attention, "--calls", "60"], True),
        "attention 2": ([*attention, "--calls", "20", "--ranks", "2"], True),
    } | {
        name: (
            [*pytest, "-k", LEFT_OUT, *(str(TESTS / f"test_{file}.py") for file in those)], True
        )
        for name, those in files.items()
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build" / "portable")
    parser.add_argument("--minutes", type=float, default=1.0, help="of stress")
    parser.add_argument("--limit", type=float, default=540, help="seconds, without the build")
    args = parser.parse_args()
    if not (args.build / "libjflux_core.so").exists():
        build(args.build)
    until, rows = time.monotonic() + args.limit, []
    with tempfile.TemporaryDirectory() as temporary:
        place = pathlib.Path(temporary)
        # The loader looks there before it looks beside the module, and may find the checkout's.
        library_path = [path for path in [os.environ.get("LD_LIBRARY_PATH")] if path]
        package(args.build, place)
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([temporary, str(TESTS)]),
            "PYTHONSAFEPATH": "1",  # not the checkout's own package
            "LD_LIBRARY_PATH": os.pathsep.join([f"{place}/jflux", *library_path]),
            "NCCL_NVLS_ENABLE": "0",
        }
        for name, (command, ends_well) in commands(args.minutes).items():
            start, left = time.monotonic(), until - time.monotonic()
            try:
                done = subprocess.run(
                    [sys.executable, *command], env=environment, cwd=place, text=True,
                    stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=max(1.0, left),
                )  # fmt: skip
            except subprocess.TimeoutExpired:
                rows.append((name, time.monotonic() - start, "no time left", False))
                continue
            right = (done.returncode == 0) == ends_well
            if not right:
                print(f"---- {name}\n{done.stdout[-4000:]}", flush=True)
            last = ([line for line in done.stdout.splitlines() if line.strip()] or [""])[-1]
            rows.append((name, time.monotonic() - start, last.strip("= ")[:90], right))
    for name, seconds, last, right in rows:
        print(f"{name:14} {'right' if right else 'WRONG':6} {seconds:6.0f} s  {last}")
    return 0 if all(right for *_, right in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
