"""Compiles CUDA source to a cubin by NVRTC, the library that comes with JAX's CUDA wheels."""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
import glob
import os
import re
import site
import sys
from pathlib import Path
from typing import Any

#: Headers that NVRTC has none of, as far as jflux's headers need them.
_HEADERS = {
    "cstdint": """#pragma once
using int8_t = signed char; using uint8_t = unsigned char;
using int16_t = short; using uint16_t = unsigned short;
using int32_t = int; using uint32_t = unsigned int;
using int64_t = long; using uint64_t = unsigned long; using uintptr_t = unsigned long;
""",
    "cstddef": """#pragma once
#define offsetof(type, member) ((unsigned long)__INTADDR__(&(((type*)0)->member)))
""",
    "initializer_list": "#pragma once\n",
    "cuda_runtime.h": "#pragma once\n",
}


def _candidates() -> list[str]:
    """Where the wheels of CUDA 13 and 12 put the library, then where the linker finds it."""
    folders = [*site.getsitepackages(), site.getusersitepackages(), *sys.path]
    found = []
    for folder in folders:
        for pattern in ("cu13/lib/libnvrtc.so.*", "cuda_nvrtc/lib/libnvrtc.so.*"):
            found += sorted(glob.glob(os.path.join(folder, "nvidia", pattern)))
    system = ctypes.util.find_library("nvrtc")
    return [*found, *([system] if system else []), "libnvrtc.so.13", "libnvrtc.so.12"]


@functools.cache
def _library() -> Any:
    for path in _candidates():
        try:
            # NVRTC opens these by their names alone.
            for builtins in glob.glob(
                os.path.join(os.path.dirname(path), "libnvrtc-builtins.so.*")
            ):
                ctypes.CDLL(builtins)
            return ctypes.CDLL(path)
        except OSError:
            continue
    raise ImportError("jflux.custom_call(source=...) needs NVRTC: pip install nvidia-cuda-nvrtc")


def _check(status: int, what: str) -> None:
    if status != 0:
        text = _library().nvrtcGetErrorString
        text.restype = ctypes.c_char_p
        raise RuntimeError(f"{what}: {text(status).decode()}")


@functools.lru_cache(maxsize=64)
def compile_source(source: str, name: str, include_dir: str, arch: int) -> bytes:
    """A cubin.

    Args:
      source: CUDA C++.
      name: of the source, in messages.
      include_dir: of jflux's headers.
      arch: compute capability, 90 for 9.0.

    Raises:
      ValueError: it does not compile; with the compiler's messages.
      ImportError: there is no NVRTC.
    """
    lib = _library()
    program = ctypes.c_void_p()
    names = [header.encode() for header in _HEADERS]
    texts = [text.encode() for text in _HEADERS.values()]
    strings = ctypes.c_char_p * len(names)
    _check(
        lib.nvrtcCreateProgram(
            ctypes.byref(program), source.encode(), name.encode(), len(names),
            strings(*texts), strings(*names),
        ),
        "nvrtcCreateProgram",
    )  # fmt: skip
    try:
        suffix = "a" if arch >= 90 else ""
        options = [
            f"--gpu-architecture=sm_{arch}{suffix}",
            f"--include-path={include_dir}",
            "--std=c++17",
            "--device-as-default-execution-space",
            '--define-macro=JFLUX_API=extern "C"',
            "--diag-suppress=1097",  # gnu::may_alias
        ]
        encoded = [option.encode() for option in options]
        status = lib.nvrtcCompileProgram(
            program, len(encoded), (ctypes.c_char_p * len(encoded))(*encoded)
        )
        if status != 0:
            log = _read(lib.nvrtcGetProgramLogSize, lib.nvrtcGetProgramLog, program)
            raise ValueError(f"{name} does not compile:\n{log.decode(errors='replace')}")
        return _read(lib.nvrtcGetCUBINSize, lib.nvrtcGetCUBIN, program)
    finally:
        lib.nvrtcDestroyProgram(ctypes.byref(program))


def _read(size_of: Any, read: Any, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    _check(size_of(program, ctypes.byref(size)), size_of.__name__)
    text = ctypes.create_string_buffer(size.value)
    _check(read(program, text), read.__name__)
    return text.raw


def source_of(source: str | os.PathLike[str], kernel: str) -> tuple[str, str]:
    """(CUDA C++, its name in messages) of a source, which has the kernel, or of the path to one.

    Raises:
      TypeError: it is neither.
      FileNotFoundError: there is no such file.
      ValueError: there is no such kernel in it. It need not compile: NVRTC may not be here.
    """
    if not isinstance(source, str | os.PathLike):
        raise TypeError(f"jflux.custom_call: {source=} must be CUDA C++, or the path to a file")
    if isinstance(source, str) and ("__global__" in source or "\n" in source):
        text, name = source, "source"
    elif os.path.isfile(source):
        text, name = Path(source).read_text(), str(source)
    else:
        raise FileNotFoundError(
            f"jflux.custom_call: source={os.fspath(source)!r} is no file, and no CUDA C++ with a "
            "__global__ function"
        )
    if "__global__" not in text or not re.search(rf"\b{re.escape(kernel)}\b", text):
        raise ValueError(
            f'jflux.custom_call: {name} must have extern "C" __global__ void {kernel}(...), the '
            "kernel that the call names"
        )
    return text, name
