"""Forms of local ops, and what their functions share."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad

from .. import _config, _heap, _native
from . import ffi_targets, gpu_code, plans
from .forms import AttributesRule, Call, Form, Kernel, Reference, WhyNot
from .plans import Arrays, Machine, Path, Plan

#: (operands' types, params, platform) -> why no kernel takes the call, or None.
WhyNotRule = Callable[[Arrays, Any, str], str | None]


def takes_all(arrays: Arrays, params: Any, platform: str) -> None:
    """The rule of a kernel that takes every call."""
    return None


def _on_a_gpu(arrays: Arrays, params: Any) -> Plan:
    return Plan(Path.FUSED, "a local op on a GPU")


def kernel(
    name: str,
    *,
    why_not: WhyNotRule,
    attributes: AttributesRule,
    why_not_portable: WhyNotRule = takes_all,
    checked_on_gpus: bool,
    on_cpus: bool = True,
    is_optional: bool = False,
    prepare: Callable[[Arrays, Any], Any] | None = None,
    plan: Callable[[Arrays, Any], Plan | WhyNot] = _on_a_gpu,
    aliases: Mapping[int, int] | None = None,
) -> Form:
    """The form of a local op that is its kernel.

    Args:
      name: of the op.
      why_not: why no kernel takes the call.
      attributes: of the handler.
      why_not_portable: why portable code (`gpu_code`) does not take a call that `why_not` lets
        pass: GPUs that run it may have less shared memory, 99 KiB for a CTA.
      checked_on_gpus: whether its GPU kernels have run on a GPU and been compared with the
        reference. Until then GPUs take the reference, unless ``jflux.config.unchecked_kernels``.
      on_cpus: whether CPUs have a handler; else they take the reference.
      is_optional: whether the reference is as good as the kernel. If so, a call that no kernel
        takes is not logged, and is no error in strict mode.
      prepare, aliases: as in `Kernel`.
      plan: of a call that the kernel takes on GPUs, where tuning tables know such calls.
    """

    def takes(call: Call, machine: Machine) -> Plan | WhyNot:
        refuse = functools.partial(WhyNot, unsupported=not is_optional)
        arrays, params, platform = call.arrays, call.params, machine.platform
        if why := plans.why_symbolic(arrays):
            return refuse(why)
        if platform not in ffi_targets.PLATFORMS:
            return WhyNot(plans.NO_KERNELS, unsupported=True)
        if platform == "cpu" and not on_cpus:
            return WhyNot("plain lax on CPUs")
        if why := why_not(arrays, params, platform):
            return refuse(why)
        if platform == "cpu":
            return Plan(Path.FUSED, "a local op on a CPU")
        if not _native.lib.built_with_cuda():
            return WhyNot("this build of jflux has no GPU kernels", unsupported=True)
        if why := plans.why_unchecked(checked_on_gpus):
            return refuse(why)
        try:
            arch = _config.config.current().arch or gpu_code.arch_here()
        except RuntimeError as error:
            return refuse(str(error))
        if arch >= gpu_code.HOPPER:
            return plan(arrays, params)
        no_record = _heap.no_record_of_local_ops()
        why = gpu_code.why_not(name, arch, gpu_code.gpu_here(), no_record)
        if why := why or why_not_portable(arrays, params, "cuda"):
            return refuse(why)
        planned = plan(arrays, params)
        if isinstance(planned, WhyNot):
            return planned
        return plans.in_portable_code(planned, arch, no_record)

    return Form(takes, Kernel(attributes, prepare=prepare, aliases=aliases or {}))


def checked_on_cpus(reference: Reference, check: Callable[[Arrays, Any], Arrays]) -> Form:
    """The form of an op that is plain `lax` on CPUs, where `check` gives the operands, after a
    handler has looked at their values, as the GPU kernel does."""

    def takes(call: Call, machine: Machine) -> Plan | None:
        return plans.reference("") if machine.platform == "cpu" else None

    def run(arrays: Arrays, params: Any, plan: Plan) -> Any:
        ffi_targets.register_targets("cpu")
        return reference(check(arrays, params), params)

    return Form(takes, run)


def zero_of(array: Any) -> ad.Zero:
    """A tangent of zero, for a result that does not depend on the differentiated operands."""
    return ad.Zero(jax.typeof(array).to_tangent_aval())


def without_derivative(primitive: Primitive) -> None:
    """Gives an op on integers derivatives of zero."""

    def jvp(primals: Any, tangents: Any, *, params: Any) -> Any:
        results = primitive.bind(*primals, params=params)
        return results, [zero_of(r) for r in results]

    ad.primitive_jvps[primitive] = jvp


#: What rows may hold that nobody has.
RESTS = ("zeros", "undefined")


def is_filled(op: str, rest: str) -> bool:
    """Whether `rest` asks for zeros in rows that nobody has; raises for one that asks for nothing
    known."""
    if rest not in RESTS:
        raise ValueError(f"jflux.{op}: {rest=} must be one of {RESTS}")
    return rest == "zeros"


def fills_unread() -> bool:
    """Whether rows that nobody reads are zeros, where no caller says: where JAX looks for NaN, call
    by call."""
    config: Any = jax.config
    return bool(config.jax_debug_nans)


def unread_rest() -> str:
    """The same as the `rest` of a call."""
    return "zeros" if fills_unread() else "undefined"


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
