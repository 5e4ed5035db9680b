"""Checks an installed jflux from outside: python check_install.py VERSION cuda|cpu.

Fails unless it is of that version, has (cuda) or lacks (cpu) the GPU kernels, lies outside of any
checkout, and was imported without a driver library. Prints the sizes of its files.
"""

import pathlib
import sys

import jflux
from jflux import _build_info, _native, _tuning

version, kind = sys.argv[1:]
folder = pathlib.Path(jflux.__file__).parent
assert jflux.__version__ == version, jflux.__version__
assert "site-packages" in folder.parts, folder
assert _native.lib.built_with_cuda() == (kind == "cuda"), _build_info.CUDA_DETAIL
assert _tuning.shipped_table("nvidia_h200"), "the tuning tables are missing"

mapped = {line.split()[-1].rsplit("/", 1)[-1] for line in open("/proc/self/maps") if "/" in line}
drivers = [name for name in mapped if name.startswith(("libcuda.so", "libcudart", "libnvshmem"))]
assert not drivers, f"importing jflux loaded {drivers}"

print(f"jflux {version}, built with {_build_info.CUDA_DETAIL}, in {sys.version.split()[0]}")
for file in sorted(folder.glob("*.so")):
    print(f"  {file.name:36} {file.stat().st_size / 2**20:6.1f} MiB")
total = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
print(f"  {'all files':36} {total / 2**20:6.1f} MiB")
