"""Registers the library's FFI targets with XLA."""

from __future__ import annotations

import functools
import pathlib
import re
from typing import Any, cast

import jax

from .. import _native

# How JAX names a lowering's platform, and how XLA's FFI does.
PLATFORMS = {"cpu": "cpu", "cuda": "CUDA"}
_SCHEDULING = "--xla_gpu_command_buffer_scheduling_mode="


@functools.cache
def register_targets(platform: str) -> None:
    """Hands the library's handlers for `platform` ("cpu" or "cuda") to XLA.

    Called when an op is lowered: the handlers' state type has to be registered before them, and
    what is registered before the platform's client exists is queued and replayed in the other
    order.
    """
    if platform == "cpu":
        from scipy.linalg import cython_blas

        blas = [_capsule_pointer(cython_blas.__pyx_capi__[name]) for name in ("sgemm", "dgemm")]
        _native.lib.set_blas(*blas)
        jax.devices("cpu")
    for name, target_platform, types in _native.lib.state_types():
        if target_platform == PLATFORMS[platform]:
            jax.ffi.register_ffi_type(name, cast(Any, types), platform=target_platform)
    for name, target_platform, stages in _native.lib.targets():
        if target_platform == PLATFORMS[platform]:
            _register_stages(name, platform, stages)


def concurrent_flag(xla_flags: str) -> str | None:
    """The flag in ``XLA_FLAGS`` that lets XLA run the kernels of a CUDA graph at once, or None.

    A handler cannot refuse that: XLA's only trait for handlers says that they may be captured."""
    # As XLA reads it a file's name begins with no dash. Flags may be longer than a name may be.
    is_name = not xla_flags.lstrip().startswith("--")
    if is_name and pathlib.Path(xla_flags).is_file():
        xla_flags = pathlib.Path(xla_flags).read_text()
    flags = re.findall(rf"{_SCHEDULING}(\S+)", xla_flags)
    return f"{_SCHEDULING}{flags[-1]}" if flags and flags[-1].upper() == "CONCURRENT" else None


def register_handler(name: str, platform: str, stages: dict[str, Any]) -> None:
    """Registers a handler of someone else's, with what the library's own have beside `execute`."""
    own = next(stages for _, p, stages in _native.lib.targets() if p == PLATFORMS[platform])
    _register_stages(name, platform, {**own, **stages})


def _register_stages(name: str, platform: str, stages: dict[str, Any]) -> None:
    # Trait 1: may be recorded into a CUDA graph.
    traits = {"traits": 1} if platform == "cuda" else {}
    jax.ffi.register_ffi_target(name, stages, platform=PLATFORMS[platform], **traits)


def _capsule_pointer(capsule: Any) -> int:
    import ctypes

    api = ctypes.pythonapi
    api.PyCapsule_GetName.restype = ctypes.c_char_p
    api.PyCapsule_GetName.argtypes = [ctypes.py_object]
    api.PyCapsule_GetPointer.restype = ctypes.c_void_p
    api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    return api.PyCapsule_GetPointer(capsule, api.PyCapsule_GetName(capsule))
