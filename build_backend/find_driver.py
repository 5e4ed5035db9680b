"""Tells whether this machine has an NVIDIA driver. Used by the build backend, CMake, Bazel and
tools/venv.sh.

Run as a program it ends with status 0 if there is one, else with 1.
"""

import ctypes
import os
import sys


def have_driver() -> bool:
    if os.path.exists("/proc/driver/nvidia") or os.path.exists("/dev/nvidiactl"):
        return True
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(not have_driver())
