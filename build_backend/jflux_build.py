"""scikit-build-core, plus one rule: where a CUDA build is wanted and no nvcc is there, ask for one.

The compiler then comes from NVIDIA's wheels, into pip's throw-away build environment. A CUDA build
is wanted when JFLUX_CUDA=ON, or when it is AUTO (the default) and there is an NVIDIA driver.
"""

import os
import platform
import sys
from typing import Any

from find_driver import have_driver
from find_nvcc import find_nvcc
from scikit_build_core import build as _build
from scikit_build_core.build import *  # noqa: F403

# One release for all five: nvcc's own requirements have no upper bound and would mix releases.
CUDA_WHEELS = [
    f"nvidia-{name}>=13.0,<13.1"
    for name in ("cuda-nvcc", "cuda-crt", "nvvm", "cuda-runtime", "cuda-cccl")
]


def _mode(config_settings: dict[str, Any] | None) -> str:
    """AUTO, ON or OFF, from the same two places as CMake reads it: the define wins."""
    define = (config_settings or {}).get("cmake.define.JFLUX_CUDA")
    return str(define or os.environ.get("JFLUX_CUDA") or "AUTO").upper()


def _cuda_requires(config_settings: dict[str, Any] | None) -> list[str]:
    mode = _mode(config_settings)
    wanted = mode == "ON" or (mode == "AUTO" and have_driver())
    exists = sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64")
    return CUDA_WHEELS if wanted and exists and not find_nvcc() else []


def get_requires_for_build_wheel(config_settings: dict[str, Any] | None = None) -> list[str]:
    return _build.get_requires_for_build_wheel(config_settings) + _cuda_requires(config_settings)


def get_requires_for_build_editable(config_settings: dict[str, Any] | None = None) -> list[str]:
    return _build.get_requires_for_build_editable(config_settings) + _cuda_requires(config_settings)
