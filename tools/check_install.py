"""Checks an installed jflux from outside: python check_install.py VERSION cuda|cpu.

Fails unless it is of that version, has (cuda) or lacks (cpu) the GPU kernels, lies outside of any
checkout, and loads no driver library but those that JAX has loaded. Prints the sizes of its files.
"""

import pathlib
import sys

import jax  # noqa: F401  with NVIDIA's wheels beside it, it loads the CUDA run time


def mapped() -> set[str]:
    """The file names of what this process has mapped."""
    lines = pathlib.Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[-1].rsplit("/", 1)[-1] for line in lines if "/" in line}


before = mapped()

import jflux  # noqa: E402
from jflux import _build_info, _native  # noqa: E402
from jflux._call import tuning_tables  # noqa: E402

version, kind = sys.argv[1:]
folder = pathlib.Path(jflux.__file__).parent
assert jflux.__version__ == version, jflux.__version__
assert "site-packages" in folder.parts, folder
assert _native.lib.built_with_cuda() == (kind == "cuda"), _build_info.CUDA_DETAIL
for gpu in ("nvidia_h100_80gb_hbm3", "nvidia_h200"):
    assert tuning_tables.shipped_table(gpu), f"the tuning table of {gpu} is missing"

libraries = ("libcuda.so", "libcudart", "libnvshmem")
drivers = [name for name in mapped() - before if name.startswith(libraries)]
assert not drivers, f"importing jflux loaded {drivers}"

print(f"jflux {version}, built with {_build_info.CUDA_DETAIL}, in {sys.version.split()[0]}")
for file in sorted(folder.glob("*.so")):
    print(f"  {file.name:36} {file.stat().st_size / 2**20:6.1f} MiB")
total = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
print(f"  {'all files':36} {total / 2**20:6.1f} MiB")
