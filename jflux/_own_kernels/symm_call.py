"""``jflux.symm.call``: Triton kernels on the symmetric heap, as a JAX primitive."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import _config
from .._call import forms
from .._call.forms import Call, Op, WhyNot
from .._call.plans import Arrays, Machine, Plan
from .._call.primitives import make_primitive
from .._ops.products import _product
from .._ranks import meshes
from .._ranks.meshes import AxisName
from . import call_rules, compiling
from .buffer_layout import Buffer, data_bytes, lay_out

_MOST_SIGNALS = 1 << 20


@dataclasses.dataclass(frozen=True)
class _Option:
    """A constexpr of a kernel. Two are equal if the kernel is compiled alike: 1, 1.0 and True
    differ."""

    name: str
    kind: str
    value: Any

    @classmethod
    def of(cls, name: str, value: Any) -> _Option:
        hash(value)
        return cls(name, type(value).__name__, value)


@dataclasses.dataclass(frozen=True)
class Params:
    """A call, less its operands."""

    kernel: Any
    results: tuple[tuple[tuple[int, ...], np.dtype], ...]
    axis_names: tuple[Any, ...]
    world: int
    buffers: tuple[Buffer, ...]
    num_signals: int
    grid: int
    num_warps: int
    num_stages: int
    options: tuple[_Option, ...]
    reference: Callable[..., Any] | None
    prepared: str | None = None

    @property
    def name(self) -> str:
        return self.kernel.__name__

    @property
    def axis_name(self) -> AxisName:
        return self.axis_names[0] if len(self.axis_names) == 1 else self.axis_names

    def keywords(self) -> dict[str, Any]:
        """For the reference and the derivative."""
        return {"axis_name": self.axis_name, **{o.name: o.value for o in self.options}}


def call(
    kernel: Any,
    *args: Any,
    out_shape: Any,
    axis_name: AxisName,
    grid: int,
    workspace: Mapping[str, Any] | None = None,
    signals: int = 0,
    backend: str = "triton",
    reference: Callable[..., Any] | None = None,
    vjp: Callable[..., Any] | None = None,
    num_warps: int = 4,
    num_stages: int = 3,
    **constexprs: Any,
) -> Any:
    """Runs a Triton kernel on all ranks along `axis_name`, with memory of theirs that it can reach.

    Inside ``jax.shard_map``; works under ``jit``, ``scan``, ``checkpoint``, CUDA graphs and, one
    call after the other, ``vmap``. The kernel is::

        @triton.jit
        def kernel(ctx, x, y, buffer, BLOCK: tl.constexpr): ...

    ``ctx`` is for the functions of :mod:`jflux.triton`. Pointers to the arguments and to the
    results follow, then one for each workspace buffer, by its name, then the constexprs, by name.
    Begin and end of the call are added around it. docs/guide/python_kernels.md has an example.

    Args:
      kernel: a function with ``triton.jit``.
      *args: arrays, one rank's. At least one.
      out_shape: shapes and types of one rank's results: a ``jax.ShapeDtypeStruct`` or a pytree.
      axis_name: a mesh axis, or a tuple of them: up to 8 ranks.
      grid: programs (CTAs) of each rank. All of them must fit on a GPU at once.
      workspace: name -> ``jax.ShapeDtypeStruct``: buffers on each rank, which peers reach. Their
        contents are the call's alone, and undefined when it begins.
      signals: how many signals each rank has.
      backend: "triton".
      reference: (*args, axis_name=..., **constexprs) -> the results, in plain `lax`. It runs on
        CPUs, for one rank or more than 8, for empty arrays, and with
        ``jflux.config(fused=False)``; :func:`jflux.symm.check` compares with it. Best a function
        of a module. None: such calls are errors.
      vjp: (args, results, cotangents, axis_name=..., **constexprs) -> cotangents of `args`, a
        tuple. `args` is a tuple; results and cotangents are as `out_shape`. None: the call has no
        derivative.
      num_warps: of a program.
      num_stages: of Triton's software pipeline.
      **constexprs: hashable values of the kernel's constexprs.

    Returns:
      The results, as `out_shape`.

    Raises (when the function is traced or lowered):
      TypeError: no arguments, no Triton kernel, or a type that Triton has no pointers to.
      ValueError: parameters that do not fit the kernel's; a grid that is not resident at once; a
        number out of range.
      NotImplementedError: no kernel can run and there is no reference; in strict mode, Triton is
        missing.
      NameError: outside ``shard_map``.
    """
    if backend != "triton":
        raise ValueError(f'jflux.symm.call: {backend=} must be "triton"')
    # Of the class: of an instance it raises AttributeError for a name that its code misspells.
    if not hasattr(kernel, "fn") or not hasattr(type(kernel), "cache_key"):
        raise TypeError(f"jflux.symm.call: {kernel!r} must be a function with triton.jit")
    if not args:
        raise TypeError(f"jflux.symm.call: {kernel.__name__} needs at least one argument")
    if not isinstance(grid, int | np.integer):
        raise TypeError(f"jflux.symm.call: {grid=} must be an int: programs have one number")
    if grid < 1:
        raise ValueError(f"jflux.symm.call: {grid=} must be at least 1")
    if not 0 <= signals <= _MOST_SIGNALS:
        raise ValueError(f"jflux.symm.call: {signals=} must be from 0 to {_MOST_SIGNALS}")
    leaves, tree = jax.tree.flatten(out_shape)
    _check_structs("out_shape", leaves)
    _check_structs("workspace", (workspace or {}).values())
    names, options = _bind_parameters(
        kernel, len(args) + len(leaves), dict(workspace or {}), constexprs
    )
    arrays = [jnp.asarray(a) for a in args]
    for dtype in (*(a.dtype for a in arrays), *(leaf.dtype for leaf in leaves)):
        compiling.type_name(dtype)
    buffers = lay_out({name: (workspace or {})[name] for name in names})
    for buffer in buffers:
        compiling.type_name(buffer.dtype)
    params = Params(
        kernel=kernel,
        results=call_rules.results_of(leaves),
        axis_names=meshes.as_tuple(axis_name),
        world=meshes.axis_size(axis_name),
        buffers=buffers,
        num_signals=signals,
        grid=grid,
        num_warps=num_warps,
        num_stages=num_stages,
        options=options,
        reference=reference,
    )
    if meshes.is_manual(axis_name):
        run = functools.partial(_primitive.bind, params=params)
    else:
        _config.fall_back(_title(params), meshes.why_not_manual(axis_name))
        run = functools.partial(_run_reference, params=params)

    def forward(*arrays: Any) -> Any:
        return jax.tree.unflatten(tree, run(*arrays))

    return call_rules.with_vjp(forward, vjp, params)(*arrays)


def _bind_parameters(
    kernel: Any, arrays: int, workspace: dict[str, Any], constexprs: dict[str, Any]
) -> tuple[list[str], tuple[_Option, ...]]:
    """Names of the workspace buffers, and the constexprs, in the order of the kernel's parameters.

    Args:
      arrays: how many arguments and results there are.

    Raises:
      ValueError: they do not fit.
    """
    parameters = compiling.parameters_of(kernel)
    rest = parameters[1 + arrays :]
    names = [p.name for p in rest[: len(workspace)]]
    constants = rest[len(workspace) :]
    values = {
        p.name: p.default for p in constants if p.default is not inspect.Parameter.empty
    } | constexprs
    if (
        len(parameters) < 1 + arrays
        or sorted(names) != sorted(workspace)
        or sorted(values) != sorted(p.name for p in constants)
    ):
        have = ", ".join(p.name for p in parameters)
        raise ValueError(
            f"jflux.symm.call: {kernel.__name__}({have}) must take the context, {arrays} pointers "
            f"to arguments and results, then the buffers {sorted(workspace)} and the constexprs "
            f"{sorted(constexprs)}"
        )
    return names, tuple(_Option.of(p.name, values[p.name]) for p in constants)


def _check_structs(argument: str, those: Iterable[Any]) -> None:
    """Raises for what is no array and no ``jax.ShapeDtypeStruct``."""
    for one in those:
        if not hasattr(one, "shape") or not hasattr(one, "dtype"):
            raise TypeError(
                f"jflux.symm.call: {argument} must have arrays or jax.ShapeDtypeStruct, got {one!r}"
            )


def _title(params: Params) -> str:
    return f"symm.call({params.name})"


def _results(arrays: Arrays, params: Params) -> Any:
    return params.results


def _run_reference(*arrays: Any, params: Params) -> list[Any]:
    if params.reference is None:
        raise NotImplementedError(
            f"jflux.{_title(params)}: no kernel can run this call, and it has no reference="
        )
    got = params.reference(*arrays, **params.keywords())
    return call_rules.checked_results(_title(params), got, params.results)


def _takes(call: Call, machine: Machine) -> Plan | WhyNot:
    params = call.params
    if not machine.on_gpus:
        return WhyNot("Triton kernels run on GPUs")
    if params.world == 1:
        return WhyNot("each group has one rank")
    if why := compiling.why_no_triton():
        return WhyNot(why, unsupported=True)
    if machine.no_atomics and compile_call(call.arrays, params).uses_atomics:
        return WhyNot(
            "it uses atomic operations on peers' memory, as signal_add does, and "
            f"{machine.no_atomics} (nvidia-smi topo -p2p a)"
        )
    return call_rules.plan(
        "Triton compiles the kernel", params.world, data_bytes(params.buffers), params.num_signals
    )


def _signature(arrays: Arrays, params: Params) -> int:
    buffers = [(b.name, b.shape, b.dtype.name, b.offset) for b in params.buffers]
    options = [(o.name, str(o.value)) for o in params.options]
    return call_rules.signature_of(
        arrays, params.results, params.name, params.world, params.grid, params.num_signals, buffers,
        options,
    )  # fmt: skip


def compile_call(arrays: Arrays, params: Params) -> compiling.Compiled:
    """The kernel of a call, for this process's GPUs."""
    return compiling.compile_kernel(
        params.kernel,
        [*(a.dtype for a in arrays), *(dtype for _, dtype in params.results)],
        params.buffers,
        [o.value for o in params.options],
        world=params.world,
        arch=compiling.arch_of_gpus(),
        num_warps=params.num_warps,
        num_stages=params.num_stages,
    )


def _attributes(arrays: Arrays, params: Params, plan: Plan) -> dict[str, Any]:
    compiled = compile_call(arrays, params)
    return {
        "signature": np.int64(_signature(arrays, params)),
        "data_bytes": np.int64(data_bytes(params.buffers)),
        "num_signals": np.int64(params.num_signals),
        **call_rules.module_attributes(compiled, _title(params), params.grid, [compiling.TRITON]),
    }


_op = Op(
    name="symm_call",
    result_shapes=_results,
    reference=lambda arrays, params: _run_reference(*arrays, params=params),
    forms=(forms.kernel(_takes, _attributes, target=lambda params: compiling.TARGET),),
    batch=_product.bind_one_by_one,
    title=_title,
)
_primitive = make_primitive(_op)
call_rules.refuse_derivatives(_primitive, _title)
