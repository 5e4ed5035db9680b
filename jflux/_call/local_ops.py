"""Local ops: without peers and without a workspace. They compute on one device, so their calls need
no axis, no mesh and no heap, and mean the same inside `jax.shard_map` and outside.

C++ describes them as cc/runtime/local_op.h does.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir, xla
from jax.sharding import PartitionSpec

from .. import _config, _native
from . import derivatives, explain, ffi_targets, gpu_code, plans
from .plans import Arrays, Path, Plan
from .primitives import (
    BatchRule,
    FlopsRule,
    OpPrimitive,
    ReferenceForm,
    ShapesRule,
    flops_of,
    no_products,
)


class WhyNotRule(Protocol):
    """(operands' types, params, platform) -> why no kernel takes the call, or None."""

    def __call__(self, arrays: Arrays, params: Any, platform: str) -> str | None: ...


def _takes_all(arrays: Arrays, params: Any, platform: str) -> None:
    return None


@dataclasses.dataclass(frozen=True)
class LocalRules:
    """The functions and properties of a local op that the lowering needs.

    Attributes:
      name: of the op; its FFI target is ``jflux_<name>``.
      result_shapes: -> [(shape, dtype)] of the results.
      reference: the call in plain `lax`.
      why_not: why no kernel takes the call.
      why_not_portable: why portable code (`gpu_code`) does not take a call that `why_not` lets
        pass: GPUs that run it may have less shared memory, 99 KiB for a CTA.
      attributes: params -> the FFI attributes of the handler.
      batch: the batching rule.
      checked_on_gpus: whether its GPU kernels have run on a GPU and been compared with the
        reference. Until then GPUs take the reference, unless ``jflux.config.unchecked_kernels``.
      on_cpus: whether CPUs have a handler; else they take the reference.
      check_on_cpus: operands, params -> the operands of the reference on CPUs, after a handler has
        checked their values, as the GPU kernel does. None: the reference takes the call's operands
        unchecked.
      is_optional: whether the reference is as good as the kernel. If so, a call that no kernel
        takes is not logged, and is no error in strict mode.
      prepare: operands, params -> the operands of the handler, computed in `lax`; None: they are
        the call's.
      flops: of the call's products.
      values: how many of the first results `checkify` looks at. Later results may hold anything in
        places that nobody reads. None: all results.
    """

    name: str
    result_shapes: ShapesRule
    reference: ReferenceForm
    why_not: WhyNotRule
    attributes: Callable[[Any], dict[str, Any]]
    batch: BatchRule
    why_not_portable: WhyNotRule = _takes_all
    checked_on_gpus: bool = False
    on_cpus: bool = True
    check_on_cpus: Callable[[Arrays, Any], Arrays] | None = None
    is_optional: bool = False
    prepare: Callable[[Arrays, Any], Sequence[jax.Array]] | None = None
    flops: FlopsRule = no_products
    values: int | None = None


def make_primitive(rules: LocalRules) -> Primitive:
    """A primitive ``jflux_<name>(*operands, params)`` with several results, which vary over the
    mesh axes that any operand varies over. Its derivatives are the caller's to define."""
    primitive = OpPrimitive(f"jflux_{rules.name}")
    primitive.multiple_results = True

    def abstract(*avals: Any, params: Any) -> list[Any]:
        shapes = rules.result_shapes(avals, params)
        return [result_type(avals, shape, dtype) for shape, dtype in shapes]

    primitive.def_abstract_eval(abstract)
    primitive.def_impl(functools.partial(xla.apply_primitive, primitive))

    def lower(ctx: Any, *operands: Any, params: Any, platform: str) -> Any:
        plan = plan_call(rules, ctx.avals_in, params, platform)
        explain.note(rules.name, ctx.avals_in, ctx.avals_out, plan)
        if plan.unsupported:
            _config.fall_back(rules.name, plan.reason)
        if plan.path == Path.REFERENCE:
            check = rules.check_on_cpus if platform == "cpu" and _config.config.fused else None
            if check is not None:
                ffi_targets.register_targets(platform)

            def reference(*operands: jax.Array) -> Any:
                checked = operands if check is None else check(operands, params)
                return rules.reference(checked, params)

            return mlir.lower_fun(reference, multiple_results=True)(ctx, *operands)
        ffi_targets.register_targets(platform)
        attributes = rules.attributes(params)
        if rules.prepare is None:
            return jax.ffi.ffi_lowering(f"jflux_{rules.name}")(ctx, *operands, **attributes)
        prepare = rules.prepare
        results = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in ctx.avals_out]

        def call(*operands: jax.Array) -> Any:
            target = jax.ffi.ffi_call(f"jflux_{rules.name}", results)
            return target(*prepare(operands, params), **attributes)

        return mlir.lower_fun(call, multiple_results=True)(ctx, *operands)

    mlir.register_lowering(primitive, functools.partial(lower, platform="other"))
    for platform in ffi_targets.PLATFORMS:
        mlir.register_lowering(
            primitive, functools.partial(lower, platform=platform), platform=platform
        )
    primitive.batched_by(rules.batch)
    derivatives.check_for_nan(primitive, rules.values)
    flops_of[primitive] = lambda arrays, results, named: rules.flops(arrays, **named)
    return primitive


def plan_call(rules: LocalRules, avals: Sequence[Any], params: Any, platform: str) -> Plan:
    """The plan of a call that is lowered for this platform."""
    if not _config.config.fused:
        return plans.reference("jflux.config(fused=False)")
    if why := plans.why_symbolic(avals):
        return (plans.reference if rules.is_optional else plans.unsupported)(why)
    if platform not in ffi_targets.PLATFORMS:
        return plans.unsupported("jflux has kernels for CPUs and CUDA GPUs only")
    if platform == "cpu" and not rules.on_cpus:
        return plans.reference("plain lax on CPUs")
    if why := rules.why_not(avals, params, platform):
        return (plans.reference if rules.is_optional else plans.unsupported)(why)
    if platform == "cpu":
        return Plan(Path.FUSED, "a local op on a CPU")
    if not _native.lib.built_with_cuda():
        return plans.unsupported("this build of jflux has no GPU kernels")
    if why := plans.why_unchecked(rules.checked_on_gpus) or _why_no_code(rules, avals, params):
        return (plans.reference if rules.is_optional else plans.unsupported)(why)
    return Plan(Path.FUSED, "a local op on a GPU")


def _why_no_code(rules: LocalRules, avals: Sequence[Any], params: Any) -> str | None:
    """Why this process's GPUs have no code that takes the call, or None."""
    try:
        arch = gpu_code.arch_here()
    except RuntimeError as error:
        return str(error)
    if arch >= gpu_code.HOPPER:
        return None
    why = gpu_code.why_not(rules.name, arch, gpu_code.gpu_here())
    return why or rules.why_not_portable(avals, params, "cuda")


def result_type(avals: Sequence[Any], shape: tuple[int, ...], dtype: Any) -> Any:
    """The type of a result: it varies over the mesh axes that any operand varies over."""
    varying = frozenset().union(*(a.manual_axis_type.varying for a in avals))
    return avals[0].update(
        shape=shape, dtype=dtype, weak_type=False,
        manual_axis_type=avals[0].manual_axis_type.update(varying=varying),
        sharding=avals[0].sharding.update(spec=PartitionSpec(*(None for _ in shape))),
    )  # fmt: skip


def zero_of(array: Any) -> ad.Zero:
    """A tangent of zero, for a result that does not depend on the differentiated operands."""
    return ad.Zero(jax.typeof(array).to_tangent_aval())


def without_derivative(primitive: Primitive) -> None:
    """Gives an op on integers derivatives of zero."""

    def jvp(primals: Any, tangents: Any, *, params: Any) -> Any:
        results = primitive.bind(*primals, params=params)
        return results, [zero_of(r) for r in results]

    ad.primitive_jvps[primitive] = jvp


def check_arrays(op: str, **arrays: Any) -> None:
    """Raises for an argument that is no array, or whose type says that devices share it."""
    for name, array in arrays.items():
        if not hasattr(array, "ndim") or not hasattr(array, "dtype"):
            raise TypeError(f"jflux.{op}: {name} must be an array, got {type(array).__name__}")
        spec = getattr(getattr(jax.typeof(array), "sharding", None), "spec", None)
        if any(axes is not None for axes in spec or ()):
            raise ValueError(
                f"jflux.{op}: {name} {array.shape} is sharded as {spec}, but the op computes on "
                "one device; call it inside jax.shard_map, on each rank's part"
            )
