"""Finds NVSHMEM's folder, with include/ and lib/. Used by CMake.

Run as a program it prints the path, or an empty line if there is none.
"""

import importlib.util
import os
import sysconfig
from collections.abc import Iterator


def _candidates() -> Iterator[str]:
    """What the user names comes first, then NVIDIA's wheel (nvidia-nvshmem-cu12 or -cu13)."""
    yield os.environ.get("NVSHMEM_HOME", "")
    nvidia = importlib.util.find_spec("nvidia")
    for folder in (nvidia and nvidia.submodule_search_locations) or ():
        yield os.path.join(folder, "nvshmem")
    # pip builds with packages of its own; what is built runs with those of the environment.
    for name in ("platlib", "purelib"):
        yield os.path.join(sysconfig.get_path(name), "nvidia", "nvshmem")


def _is_whole(folder: str) -> bool:
    files = ("include/nvshmem.h", "lib/libnvshmem_device.a", "lib/libnvshmem_host.so.3")
    return all(os.path.exists(os.path.join(folder, file)) for file in files)


def find_nvshmem() -> str:
    """The path of the first that is whole, or an empty string."""
    return next((c for c in _candidates() if c and _is_whole(c)), "")


if __name__ == "__main__":
    print(find_nvshmem())
