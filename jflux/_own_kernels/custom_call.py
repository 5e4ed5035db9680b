"""Calls of kernels that are compiled out of tree: docs/guide/device_primitives.md, cc/jflux."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import hashlib
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import _config, _heap, _native
from .._call import ffi_targets, forms
from .._call.forms import Call, Op, WhyNot
from .._call.plans import Arrays, Machine, Plan
from .._call.primitives import make_primitive
from .._ops.products import _product
from .._ranks import meshes
from .._ranks.meshes import AxisName
from . import call_rules, compiling, nvrtc

#: What handlers and references are given; a call's own attributes must have other names.
SUPPLIED = (
    "axis_name", "data_bytes", "groups", "num_signals", "op", "signature", "site", "world",
    "workspace_bytes",
)  # fmt: skip


def include_dir() -> str:
    """The folder to compile kernels and handlers with: for ``#include "jflux/shmem.h"``."""
    here = Path(_native.lib.__file__).absolute().parent
    for folder in (here / "include", Path(__file__).absolute().parents[2] / "cc"):  # a checkout
        if (folder / "jflux" / "shmem.h").exists():
            return str(folder)
    raise FileNotFoundError(f"jflux's headers are not beside {here}: reinstall it")


def library_path() -> str:
    """The library to link handlers with: libjflux_core.so, which ``import jflux`` has loaded."""
    return str(Path(_native.lib.__file__).absolute().with_name("libjflux_core.so"))


@dataclasses.dataclass(frozen=True)
class _Target:
    handlers: dict[str, Any]  # platform -> handler
    load_kernels: Any

    def addresses(self) -> tuple[Any, ...]:
        return (*sorted((p, _address(h)) for p, h in self.handlers.items()), self.load_kernels)


_targets: dict[str, _Target] = {}


def register_custom_call(
    name: str, *, cpu: Any = None, cuda: Any = None, load_kernels: Any = None
) -> None:
    """Makes handlers known to :func:`custom_call`.

    Args:
      name: of the FFI target, which is how calls and error messages name it.
      cpu: the handler on CPUs, an XLA FFI handler as ``XLA_FFI_DEFINE_HANDLER_SYMBOL`` defines it:
        a function of a library that ``ctypes`` has loaded.
      cuda: the handler on CUDA GPUs. XLA may record it into a CUDA graph, and then does not run it
        again: it must only enqueue kernels.
      load_kernels: ``const char* (int ordinal)``: loads the CUDA handler's kernels on this GPU of
        the process, and returns null, or what went wrong (``jflux::shmem::LoadKernels`` in
        jflux/kernel.cuh). Called when the heap is made, or at once if it exists: a kernel that is
        loaded when it is first launched could wait for one that spins.

    Raises:
      ValueError: for a CUDA handler without `load_kernels`; for a name that has other handlers.
      RuntimeError: kernels cannot be loaded.
    """
    handlers = {p: h for p, h in (("cpu", cpu), ("cuda", cuda)) if h is not None}
    if ("cuda" in handlers) != (load_kernels is not None):
        raise ValueError(f"jflux: {name!r} must have both, cuda and load_kernels, or neither")
    load = None if load_kernels is None else _address(load_kernels)
    target = _Target(handlers, load)
    if name in _targets:
        if _targets[name].addresses() != target.addresses():
            raise ValueError(f"jflux: {name!r} is registered already, with other handlers")
        return
    if load is not None:
        with _heap._lock:  # the heap is there, or will find it
            _native.lib.add_kernels(load)
    _targets[name] = target


def _address(function: Any) -> int:
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    return address


@functools.cache
def _register(name: str, platform: str) -> None:
    stages = {"execute": jax.ffi.pycapsule(_targets[name].handlers[platform])}
    ffi_targets.register_handler(name, platform, stages)


def register_handlers(platform: str) -> None:
    """Registers what is known for this platform so far with XLA."""
    for name, target in _targets.items():
        if platform in target.handlers:
            _register(name, platform)


_MOST = 1 << 40  # of bytes and signals: more overflows further down
_KINDS = (bool, int, float, str)  # of attributes; a bool is an int too, so it comes first


@dataclasses.dataclass(frozen=True)
class _Attribute:
    """One of a call. Two are equal if the handler finds the same: 1, 1.0 and True differ, and so do
    0.0 and -0.0."""

    name: str
    exact: str
    value: Any = dataclasses.field(compare=False)

    @classmethod
    def of(cls, name: str, value: Any) -> _Attribute:
        exact = next(kind(value) for kind in _KINDS if isinstance(value, kind))
        return cls(name, repr(exact), exact)


@dataclasses.dataclass(frozen=True)
class Source:
    """A kernel in CUDA C++, and how it is launched.

    Attributes:
      text, name: the source; the name is for messages.
      grid, threads: blocks, and threads of each.
      shared_bytes: of dynamic shared memory.
    """

    text: str
    name: str
    grid: int
    threads: int
    shared_bytes: int


@dataclasses.dataclass(frozen=True)
class Params:
    """A call, less its operands."""

    name: str
    results: tuple[tuple[tuple[int, ...], np.dtype], ...]
    axis_names: tuple[Any, ...]
    world: int
    data_bytes: int
    num_signals: int
    reference: Callable[..., Any]
    attributes: tuple[_Attribute, ...]
    source: Source | None = None
    prepared: str | None = None

    def keywords(self) -> dict[str, Any]:
        """For the reference and the derivative."""
        axis_name = self.axis_names[0] if len(self.axis_names) == 1 else self.axis_names
        return {"axis_name": axis_name, **{a.name: a.value for a in self.attributes}}


def custom_call(
    name: str,
    result_shape_dtypes: Any,
    *,
    axis_name: AxisName,
    data_bytes: int,
    num_signals: int,
    reference: Callable[..., Any],
    vjp: Callable[..., Any] | None = None,
    source: str | os.PathLike[str] | None = None,
    grid: int = 1,
    threads: int = 256,
    shared_bytes: int = 0,
) -> Callable[..., Any]:
    """A call of one's own kernel over the ranks along `axis_name`, as ``jax.ffi.ffi_call`` is for
    kernels that know no ranks. Inside ``jax.shard_map``::

        call = jflux.custom_call("my_op", jax.ShapeDtypeStruct((n,), x.dtype), axis_name="tp", ...)
        y = call(x, scale=2)

    Every rank of the group makes the call. Under ``vmap``, the calls of a batch run one after the
    other.

    Args:
      name: the FFI target, registered with :func:`register_custom_call`. With `source`: the kernel.
      result_shape_dtypes: shapes and types of one rank's results: a ``jax.ShapeDtypeStruct``, or a
        pytree of such.
      axis_name: a mesh axis, or a tuple of them.
      data_bytes: of the symmetric heap that the call uses on each rank.
      num_signals: how many signal words it uses on each rank.
      reference: (*operands, axis_name=..., **attributes) -> the results, in plain `lax`. It runs
        where the handlers cannot: on other platforms, for more than 8 ranks, for empty arrays,
        under ``vmap`` with an axis name, and with ``jflux.config(fused=False)``. Best a function of
        a module: another one each time is another call to JAX's caches.
      vjp: (operands, results, cotangents, axis_name=..., **attributes) -> cotangents of the
        operands, a tuple, as :func:`jflux.symm.call` takes it. None: the call has no derivative.
      source: CUDA C++ with ``extern "C" __global__ void name(const __grid_constant__
        jflux::shmem::CallArgs args, operands..., results..., attributes...)``, or the path to such
        a file. It is compiled by NVRTC when the call is lowered, for this process's GPUs: there is
        no handler to write, and nothing to register. Elsewhere the reference runs. Attributes come
        in the call's order, as ``long``, ``double`` and ``bool``; there is no str.
      grid: blocks of a kernel of `source`, which must all be resident at once.
      threads: of a block of such a kernel.
      shared_bytes: dynamic shared memory of such a block.

    Returns:
      A function (*operands, **attributes) -> the results. Attributes are int, float, bool or str;
      the handler finds them beside those that jflux supplies.

    Raises (when the function is traced):
      TypeError: for no operands, or an attribute of another type.
      ValueError: for negative sizes, a source without the kernel, or an attribute that jflux
        supplies; when it is lowered, for a source that does not compile, or a grid that is not
        resident at once.
      NotImplementedError: for a derivative, without `vjp`.
      NameError: outside ``shard_map``.
    """
    if not (0 <= data_bytes <= _MOST and 0 <= num_signals <= _MOST):
        raise ValueError(
            f"jflux.custom_call: {data_bytes=}, {num_signals=} must be from 0 to {_MOST}"
        )
    if grid < 1 or not 1 <= threads <= 1024 or shared_bytes < 0:
        raise ValueError(f"jflux.custom_call: {grid=}, {threads=}, {shared_bytes=} is no launch")
    kernel = None
    if source is not None:
        kernel = Source(*nvrtc.source_of(source, name), grid, threads, shared_bytes)
    leaves, tree = jax.tree.flatten(result_shape_dtypes)
    results = call_rules.results_of(leaves)

    def call(*operands: Any, **attributes: Any) -> Any:
        if not operands:
            raise TypeError(f"jflux.custom_call: {name!r} needs at least one operand")
        for key, value in attributes.items():
            if key in SUPPLIED:
                raise ValueError(f"jflux.custom_call: {key!r} is an attribute that jflux supplies")
            if not isinstance(value, _KINDS) or (kernel and isinstance(value, str)):
                raise TypeError(
                    f"jflux.custom_call: attribute {key}={value!r} must be a number or str"
                )
        arrays = [jnp.asarray(a) for a in operands]
        world = meshes.axis_size(axis_name)
        ordered = attributes.items() if kernel else sorted(attributes.items())
        params = Params(
            name=name,
            results=results,
            axis_names=meshes.as_tuple(axis_name),
            world=world,
            data_bytes=data_bytes,
            num_signals=num_signals,
            reference=reference,
            attributes=tuple(_Attribute.of(k, v) for k, v in ordered),
            source=kernel,
        )
        if meshes.is_manual(axis_name):
            run = functools.partial(_primitive.bind, params=params)
        else:
            _config.fall_back(_title(params), meshes.why_not_manual(axis_name))
            run = functools.partial(_run_reference, params=params)

        def forward(*arrays: Any) -> Any:
            return jax.tree.unflatten(tree, run(*arrays))

        return call_rules.with_vjp(forward, vjp, params)(*arrays)

    return call


def _results(arrays: Arrays, params: Params) -> Any:
    return params.results


def _run_reference(*arrays: Any, params: Params) -> list[Any]:
    got = params.reference(*arrays, **params.keywords())
    return call_rules.checked_results(_title(params), got, params.results)


def _takes(call: Call, machine: Machine) -> Plan | WhyNot:
    params = call.params
    target = _targets.get(params.name)
    if params.source is not None:
        if not machine.on_gpus:
            return WhyNot("its source is for GPUs")
    elif target is None or machine.platform not in target.handlers:
        return WhyNot(
            f"no handler was registered for platform {machine.platform!r}", unsupported=True
        )
    reason = "a handler was registered" if params.source is None else "NVRTC compiles its source"
    return call_rules.plan(reason, params.world, params.data_bytes, params.num_signals)


def _attributes(arrays: Arrays, params: Params, plan: Plan) -> dict[str, Any]:
    signature = call_rules.signature_of(
        arrays, params.results, params.name, params.world, params.data_bytes, params.num_signals,
        params.source, params.attributes,
    )  # fmt: skip
    own = _handler_attributes if params.source is None else _source_attributes
    return {
        "signature": np.int64(signature),
        "data_bytes": np.int64(params.data_bytes),
        "num_signals": np.int64(params.num_signals),
        **own(params),
    }


def _handler_attributes(params: Params) -> dict[str, Any]:
    numbers: dict[type, Any] = {bool: np.bool_, int: np.int64, float: np.float64, str: str}
    return {
        "op": params.name,
        **{a.name: numbers[type(a.value)](a.value) for a in params.attributes},
    }


def compile_source(source: Source, kernel: str) -> compiling.Compiled:
    """The kernel, for this process's GPUs."""
    arch = compiling.arch_of_gpus()
    image = nvrtc.compile_source(source.text, source.name, include_dir(), arch)
    launch = f"{kernel} {source.threads} {source.shared_bytes}"
    return compiling.Compiled(
        key=hashlib.sha256(image + launch.encode()).hexdigest(),
        image=image,
        function=kernel,
        threads=source.threads,
        shared_bytes=source.shared_bytes,
        scratch_bytes=0,
    )


def _bits(value: Any) -> int:
    """Of a kernel's parameter, as int64."""
    if isinstance(value, float):
        return int(struct.unpack("<q", struct.pack("<d", value))[0])
    return int(value)


def _source_attributes(params: Params) -> dict[str, Any]:
    assert params.source is not None
    compiled = compile_source(params.source, params.name)
    values = [compiling.NVRTC, *(_bits(a.value) for a in params.attributes)]
    return call_rules.module_attributes(compiled, _title(params), params.source.grid, values)


def _title(params: Params) -> str:
    return f"custom_call({params.name})"


def _target(params: Params) -> str:
    return params.name if params.source is None else compiling.TARGET


def _register_target(params: Params, platform: str) -> None:
    if params.source is None:
        _register(params.name, platform)


_op = Op(
    name="custom_call",
    result_shapes=_results,
    reference=lambda arrays, params: _run_reference(*arrays, params=params),
    forms=(forms.kernel(_takes, _attributes, target=_target, register=_register_target),),
    batch=_product.bind_one_by_one,
    title=_title,
)
_primitive = make_primitive(_op)
call_rules.refuse_derivatives(_primitive, _title)
