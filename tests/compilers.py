"""Builds the libraries of kernels that tests call."""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jax
import pytest

import jflux


def cxx() -> str | None:
    return os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")


def nvcc() -> str | None:
    return shutil.which(os.environ.get("CUDACXX") or "nvcc")


def run(*command: Any) -> None:
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"


def library_of(sources: Path, name: str, folder: Path, variable: str) -> Path:
    """NAME_cpu.cc, and on GPUs NAME_cuda.cu, built as examples/custom_kernel/README.md does without
    CMake; or the library that the environment's `variable` names."""
    if built := os.environ.get(variable):
        return Path(built)
    on_gpus = jax.default_backend() == "gpu"
    compiler = nvcc() if on_gpus else cxx()
    if compiler is None:
        pytest.skip(f"no compiler; {variable} can name a library that is built")
    library = folder / f"lib{name}.so"
    headers = [f"-I{jflux.include_dir()}", "-isystem", jax.ffi.include_dir()]
    rest = [sources / f"{name}_cpu.cc", jflux.library_path(), "-o", library]
    if on_gpus:
        options = ["-std=c++17", "-O3", "-arch=sm_90", "-shared", "-Xcompiler", "-fPIC"]
        run(compiler, *options, *headers, sources / f"{name}_cuda.cu", *rest)
    else:
        options = ["-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
        run(compiler, *options, *headers, *rest)
    return library
