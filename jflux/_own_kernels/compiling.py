"""Compiles a Triton kernel of a call to a cubin, without Triton's launcher."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from .. import _heap, _native
from .buffer_layout import Buffer

#: The FFI target that launches kernels, and who has compiled them (cc/runtime/module_call_ffi.cc).
TARGET = "jflux_module_call"
TRITON, NVRTC = 0, 1

#: Atomic operations at system scope, but for the one by which a rank notes its own fault.
_ATOMICS = re.compile(r"\b(?:red|atom)\.(?!acq_rel\.sys\.global\.cas\b)[\w.:]*\bsys\b")

#: What to install, or None.
_NEEDED = "pip install 'triton>=3.5'"

# numpy's name -> (in a kernel's signature, in triton.language).
_TYPES = {
    "bool": ("i1", "int8"),
    "int8": ("i8", "int8"),
    "int16": ("i16", "int16"),
    "int32": ("i32", "int32"),
    "int64": ("i64", "int64"),
    "uint8": ("u8", "uint8"),
    "uint16": ("u16", "uint16"),
    "uint32": ("u32", "uint32"),
    "uint64": ("u64", "uint64"),
    "float16": ("fp16", "float16"),
    "bfloat16": ("bf16", "bfloat16"),
    "float32": ("fp32", "float32"),
    "float64": ("fp64", "float64"),
    "float8_e4m3fn": ("fp8e4nv", "float8e4nv"),
    "float8_e5m2": ("fp8e5", "float8e5"),
}


def why_no_triton() -> str | None:
    """Why kernels cannot be compiled, and what to install; None if they can."""
    try:
        import triton
    except ImportError:
        return f"Triton is not installed: {_NEEDED}"
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if version < (3, 5):
        return f"Triton {triton.__version__} is too old: {_NEEDED}"
    return None


def type_name(dtype: Any) -> str:
    """A type as Triton's kernel signatures name it.

    Raises:
      TypeError: Triton has no such type.
    """
    name = np.dtype(dtype).name
    if name not in _TYPES:
        raise TypeError(f"jflux.symm.call: Triton has no pointers to {name}")
    return _TYPES[name][0]


def parameters_of(kernel: Any) -> list[inspect.Parameter]:
    """The parameters of a kernel, which is a function with ``triton.jit``."""
    return list(inspect.signature(kernel.fn).parameters.values())


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A kernel for one architecture.

    Attributes:
      key: names its content.
      image: a cubin.
      function: its entry.
      threads, shared_bytes: of a program (CTA); shared memory beside the static one.
      scratch_bytes: of global memory, of a program.
      uses_atomics: on peers' memory, as ``signal_add`` does: any at system scope.
    """

    key: str
    image: bytes
    function: str
    threads: int
    shared_bytes: int
    scratch_bytes: int
    uses_atomics: bool = False


def arch_of_gpus() -> int:
    """Compute capability of this process's GPUs, 90 for 9.0; of an H100 without any."""
    try:
        device: Any = jax.local_devices(backend="cuda")[0]
    except RuntimeError:
        return 90
    return int(str(device.compute_capability).replace(".", ""))


def load(compiled: Compiled, title: str, grid: int) -> None:
    """Loads a kernel on this process's GPUs, if there is a heap.

    Args:
      title: of the call, in messages.
      grid: programs of a call.

    Raises:
      ValueError: they are not resident at once.
      RuntimeError: the driver does not load the kernel.
    """
    per_sm = _native.lib.add_module(
        compiled.key,
        compiled.image,
        compiled.function,
        compiled.threads,
        compiled.shared_bytes,
        compiled.scratch_bytes,
    )
    if per_sm == 0:
        return
    resident = per_sm * _heap.sm_count()  # of the job's smallest GPU: all processes must agree
    if 0 < resident < grid:
        raise ValueError(
            f"jflux.{title}: grid={grid} programs, of which a GPU holds {resident} at once "
            f"({compiled.threads} threads and {compiled.shared_bytes} bytes of shared memory "
            "each): programs that wait for each other must all run"
        )


def compile_kernel(
    kernel: Any,
    arrays: Sequence[Any],
    buffers: Sequence[Buffer],
    options: Sequence[Any],
    *,
    world: int,
    arch: int,
    num_warps: int,
    num_stages: int,
) -> Compiled:
    """The kernel between the begin and the end of a call (`_entry` of jflux/triton.py).

    Args:
      arrays: types of operands and results, in order.
      options: values of its constexprs, in the order of its parameters.
      world: ranks.
      arch: compute capability, 90 for 9.0.

    Raises:
      NotImplementedError: for what the launcher does not supply.
    """
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from .. import triton as device

    signature = {
        "raw": ("u64",) * (7 + world),
        "arrays": tuple("*" + type_name(dtype) for dtype in arrays),
        "kernel": "constexpr",
        "buffers": (("constexpr", "constexpr"),) * len(buffers),
        "options": ("constexpr",) * len(options),
    }
    constants: dict[tuple[int, ...], Any] = {(2,): kernel}
    for i, buffer in enumerate(buffers):
        constants[3, i, 0] = buffer.offset
        constants[3, i, 1] = getattr(tl, _TYPES[buffer.dtype.name][1])
    for i, value in enumerate(options):
        constants[4, i] = value
    source = ASTSource(
        fn=device._entry,
        signature=signature,
        constexprs=constants,
        attrs={(1, i): [["tt.divisibility", 16]] for i in range(len(arrays))},
    )
    compiled = triton.compile(
        source,
        target=GPUTarget("cuda", arch, 32),
        options={"num_warps": num_warps, "num_stages": num_stages},
    )
    metadata = compiled.metadata
    if metadata.num_ctas != 1 or metadata.profile_scratch_size:
        raise NotImplementedError(
            f"jflux.symm.call: {kernel.__name__} is compiled for clusters or for profiling"
        )
    image = compiled.asm["cubin"]
    return Compiled(
        key=hashlib.sha256(image).hexdigest(),
        image=image,
        function=metadata.name,
        threads=32 * metadata.num_warps,
        shared_bytes=metadata.shared,
        scratch_bytes=metadata.global_scratch_size,
        uses_atomics=_ATOMICS.search(compiled.asm["ptx"]) is not None,
    )
