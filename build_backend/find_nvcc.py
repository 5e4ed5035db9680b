"""Finds an nvcc that can compile jflux. Used by the build backend, by CMake and by Bazel.

Run as a program it prints the compiler's path, or an empty line if there is none.
"""

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterator

# cudaGetDriverEntryPointByVersion, through which jflux reaches the driver, is this old.
OLDEST = (12, 5)


def _candidates() -> Iterator[str]:
    """What the user names comes first, then the machine's toolkits, then NVIDIA's pip wheels."""
    yield os.environ.get("CUDACXX", "")
    for root in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")):
        if root:
            yield os.path.join(root, "bin", "nvcc")
    yield shutil.which("nvcc") or ""
    yield "/usr/local/cuda/bin/nvcc"
    nvidia = importlib.util.find_spec("nvidia")
    for folder in (nvidia and nvidia.submodule_search_locations) or ():
        yield os.path.join(folder, "cu13", "bin", "nvcc")


def _version(nvcc: str) -> tuple[int, ...]:
    try:
        text = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    except OSError:
        return ()
    found = re.search(r"release (\d+)\.(\d+)", text)
    return tuple(map(int, found.groups())) if found else ()


def find_nvcc() -> str:
    """The path of the first nvcc that is new enough, or an empty string."""
    return next((c for c in _candidates() if c and _version(c) >= OLDEST), "")


if __name__ == "__main__":
    print(find_nvcc())
