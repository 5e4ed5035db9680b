"""Prints for which GPUs CMake compiles kernels, as its CMAKE_CUDA_ARCHITECTURES has them: all that
jflux has code for, or, with --here, Hopper's alone where this machine has no other."""

import subprocess
import sys

ALL, HOPPER = "80;90a-real", "90a-real"


def architectures(capabilities: list[str]) -> str:
    """Of a machine with GPUs of these compute capabilities."""
    return HOPPER if capabilities and set(capabilities) == {"9.0"} else ALL


def capabilities_here() -> list[str]:
    """Those of this machine's GPUs; none, if the driver does not say."""
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.split() if done.returncode == 0 else []


if __name__ == "__main__":
    print(architectures(capabilities_here()) if "--here" in sys.argv[1:] else ALL)
