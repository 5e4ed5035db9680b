"""Makes JAX primitives of ops, plans their calls, and lowers them as planned."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir, xla
from jax.sharding import Mesh, PartitionSpec

from .. import _config, _heap, _jax_internals
from .._ranks import meshes, node_levels
from .._ranks.node_levels import Levels
from . import call_names, derivatives, explain, ffi_targets, plans
from .forms import BatchRule, Call, Form, Kernel, Op, Run, WhyNot, choose
from .plans import Arrays, Machine, Path, Plan

#: By an op's primitive: (operands' types, results' types, its parameters) -> floating-point
#: operations of one rank.
flops_of: dict[Primitive, Callable[[Any, Any, Any], int]] = {}


class OpPrimitive(Primitive):
    """The primitive of an op, which alone aligns types of variation (``check_vma=True``).

    Whenever it is bound, by a function, by a rule or in a lowering, its operands are cast to vary
    over the op's axes and every axis that any of them varies over; those that are the same on all
    ranks (`Op.varying`) over the latter alone. So a transpose sums the cotangent of an operand over
    the axes along which it was the same. Under ``jax.vmap(..., spmd_axis_name=)`` operands that
    have a batch vary over one axis more than where the function was called.
    """

    def __init__(self, op: Op) -> None:
        super().__init__(f"jflux_{op.name}")
        self.multiple_results = True
        self.label = op.label  # of a call's parameters, as reports name it
        self._op = op

    def bind(self, *operands: Any, params: Any) -> Any:
        explain.tracing(self.label, params, operands)
        own, count = _own_axes(params), self._op.varying(params)
        union = meshes.varying(operands) | meshes.tracked(tuple(own))
        cast = [
            meshes.vary(a, union if count is None or i < count else union - own)
            for i, a in enumerate(operands)
        ]
        return super().bind(*cast, params=params)

    def batched_by(self, rule: BatchRule) -> None:
        """Gives it a batching rule."""

        def batch(operands: Any, dims: Any, *, params: Any) -> tuple[Any, Any]:
            results, result_dims = rule(self, operands, dims, params=params)
            pairs = list(zip(operands, dims, strict=True))
            batched = meshes.varying([a for a, d in pairs if d is not None])
            more = batched - meshes.varying([a for a, d in pairs if d is None]) - _own_axes(params)
            if not more or None not in result_dims:
                return results, result_dims
            # The axis that a batch varies over splits it: what varies over it has a batch.
            size = next(a.shape[d] for a, d in pairs if d is not None)
            wide = [
                jnp.broadcast_to(y, (size, *y.shape)) if d is None else y
                for y, d in zip(results, result_dims, strict=True)
            ]
            return wide, [0 if d is None else d for d in result_dims]

        batching.primitive_batchers[self] = batch


def _own_axes(params: Any) -> frozenset[Any]:
    """The mesh axes that a call names."""
    return frozenset(meshes.axes_and_groups(getattr(params, "axis_names", ()))[0])


def make_primitive(op: Op) -> Primitive:
    """A primitive ``jflux_<name>(*operands, params)`` with several results, all of the first
    operand's kind. Its derivatives are the caller's to define."""
    primitive = OpPrimitive(op)
    if not op.is_local:
        # The group table names devices, so a lowering holds for its devices alone. Without this,
        # JAX reuses it for another mesh of the same shape.
        _jax_internals.lower_for_its_devices(primitive)

    def abstract(*avals: Any, params: Any) -> list[Any]:
        # Results vary over the axes that the operands vary over; a bare shape would claim that
        # they do not, and check_vma=True would let wrong out_specs pass.
        varying = frozenset().union(*(a.manual_axis_type.varying for a in avals))
        varying -= frozenset(op.same_over(params))
        manual = avals[0].manual_axis_type.update(varying=varying)
        results = op.result_shapes(avals, params)
        specs = [PartitionSpec(*(None for _ in shape)) for shape, _ in results]
        if meshes.is_sharded(avals) and (op.is_split_by_xla or not op.is_local):
            # Over Explicit axes that are not manual: as the reference's results.
            types = jax.eval_shape(lambda *arrays: op.reference(arrays, params), *avals)
            specs = [t.sharding.spec for t in types]
        return [
            avals[0].update(
                shape=shape, dtype=dtype, weak_type=False, manual_axis_type=manual,
                sharding=avals[0].sharding.update(spec=spec),
            )
            for (shape, dtype), spec in zip(results, specs, strict=True)
        ]  # fmt: skip

    primitive.def_abstract_eval(abstract)
    primitive.def_impl(functools.partial(xla.apply_primitive, primitive))

    def lower_run(ctx: Any, operands: Any, run: Callable[[Arrays], Any]) -> Any:
        inside = meshes.unsharded_inside(lambda *operands: run(operands), ctx.avals_out)
        return mlir.lower_fun(inside, multiple_results=True)(ctx, *operands)

    def lower(ctx: Any, *operands: Any, params: Any, platform: str) -> Any:
        mesh = None
        if not op.is_local:
            mesh = meshes.concrete_mesh_of(ctx.module_context, params.axis_names)
        planned = plan_call(op, ctx.avals_in, ctx.avals_out, params, platform, mesh)
        if planned.kernel and op.is_split_by_xla and meshes.is_split_by_xla(ctx.module_context):
            planned = Planned(plans.reference("XLA splits the program over devices"))
        if (kernel := planned.kernel) is not None and not op.is_local:
            if why := call_names.why_not(platform):
                planned = Planned(plans.unsupported(why))
            elif canonical := kernel.canonical(ctx.avals_in, params, planned.machine):
                return lower_run(ctx, operands, lambda arrays: canonical(*arrays))
            else:
                planned = _reserve(op, ctx, params, planned, mesh)
        plan, form = planned.plan, planned.form
        _report(op.label(params), ctx, plan, params)
        if form is None:
            return lower_run(ctx, operands, lambda arrays: op.reference(arrays, params))
        if not isinstance(run := form.run, Kernel):
            return lower_run(ctx, operands, lambda arrays: run(arrays, params, plan))
        ffi_targets.register_targets(platform)
        if op.is_local:
            return _lower_local(op.name, run, ctx, operands, params, plan)
        assert mesh is not None
        return _lower_kernel(op.name, run, ctx, operands, params, planned, mesh)

    mlir.register_lowering(primitive, functools.partial(lower, platform="other"))
    for platform in ffi_targets.PLATFORMS:
        rule = functools.partial(lower, platform=platform)
        mlir.register_lowering(primitive, rule, platform=platform)
    primitive.batched_by(op.batch)
    derivatives.check_for_nan(primitive, op.values)
    flops_of[primitive] = lambda arrays, results, named: op.flops(arrays, named["params"])
    return primitive


@dataclasses.dataclass(frozen=True)
class Planned:
    """A call's plan, the form that runs it (None: the reference), and the machine."""

    plan: Plan
    form: Form | None = None
    machine: Machine = Machine("other")

    @property
    def kernel(self) -> Kernel | None:
        """What the form calls."""
        return self.form.run if self.form and isinstance(self.form.run, Kernel) else None


def plan_call(
    op: Op,
    avals: Sequence[Any],
    avals_out: Sequence[Any],
    params: Any,
    platform: str,
    mesh: Mesh | None = None,
) -> Planned:
    """How a call is run that is lowered for this mesh. None: it is not known, or the op is
    local."""
    if not _config.config.fused:
        return Planned(plans.reference("jflux.config(fused=False)"))
    if op.is_local:
        machine = Machine(platform)
        return Planned(*choose(op.forms, Call(avals, params), machine), machine)
    if platform not in ffi_targets.PLATFORMS:
        return Planned(plans.unsupported(plans.NO_KERNELS))
    if why := plans.why_symbolic((*avals, *avals_out)):
        return Planned(plans.unsupported(why))
    if any(0 in aval.shape for aval in (*avals, *avals_out)):
        return Planned(plans.reference("an operand or a result is empty"))
    if why := _jax_internals.DEVICES.why_missing():
        return Planned(plans.unsupported(why))
    if mesh is None:
        return Planned(
            plans.unsupported(
                "the mesh is abstract, and the program that is lowered has no devices: call it on "
                "arrays that lie on the mesh's, or under jax.set_mesh(mesh), or give a mesh with "
                "devices"
            )
        )
    if why := _heap.why_not_usable(platform, mesh, meshes.group_table(mesh, params.axis_names)):
        return Planned(plans.unsupported(why))
    if params.world == 1 and meshes.has_subgroups(params.axis_names):
        return Planned(plans.reference("each group has one rank"))
    machine = plans.machine_of(platform, mesh)
    levels = levels_over(platform, mesh, params.axis_names)
    if isinstance(levels, str):
        return Planned(plans.unsupported(levels))
    plan, form = choose_on(op, Call(avals, params, levels), machine)
    if machine.on_gpus:
        plan = plans.in_portable_code(plan, machine.arch, machine.no_record)
    return Planned(plan, form, machine)


def choose_on(op: Op, call: Call, machine: Machine) -> tuple[Plan, Form[Kernel | Run] | None]:
    """The plan of a call, and its form: where the machine has no kernel of the op, one of the
    others, which are made of other ops."""
    forms = op.forms
    if why := machine.why_no_kernel(op.name):
        refused = WhyNot(why, unsupported=True)
        forms = tuple(
            dataclasses.replace(form, takes=lambda call, machine: refused)
            if isinstance(form.run, Kernel)
            else form
            for form in forms
        )
    return choose(forms, call, machine)


def levels_over(platform: str, mesh: Mesh, axis_names: Any) -> Levels | str | None:
    """How the groups of a call lie on nodes: `node_levels.levels_of`."""
    if not meshes.belongs_here(mesh):
        return None  # a topology to compile for, of one node as far as anyone knows
    table = meshes.group_table(mesh, axis_names)
    levels = node_levels.levels_of(table, _heap.node_of(platform), axis_names, mesh.shape)
    if isinstance(levels, Levels) and meshes.has_subgroups(axis_names):
        return f"{levels}, and the call has axis_index_groups"
    if platform == "cuda" and isinstance(levels, Levels):
        between = meshes.group_table(mesh, levels.between)
        by_nvshmem = _heap.why_no_nvshmem(mesh, between) is None
        levels = dataclasses.replace(levels, by_nvshmem=by_nvshmem)
    return levels


def _report(label: str, ctx: Any, plan: Plan, params: Any) -> None:
    """Says which path a call takes: to jflux.explain, to the log, as an error in strict mode."""
    explain.note(label, ctx.avals_in, ctx.avals_out, plan, params)
    if plan.unsupported:
        _config.fall_back(label, plan.reason, plan.path)
    elif plan.path in (Path.DECOMPOSED, Path.TWO_LEVEL):
        _config.say_once(logging.INFO, f"jflux.{label} is {plan.path}: {plan.reason}")


def _reserve(op: Op, ctx: Any, params: Any, planned: Planned, mesh: Any) -> Planned:
    """The call as it is planned, or by a later form if the symmetric heap has no room for it."""
    machine, plan = planned.machine, planned.plan
    recorder = _config.config.current().recorder
    if not machine.is_here or (recorder is not None and not recorder.runs):  # nothing is to run
        return planned
    table = meshes.group_table(mesh, params.axis_names)
    operands = explain.describe(ctx.avals_in)
    why = _heap.reserve(
        machine.platform, table, op.label(params), operands, plan.workspace_bytes,
        ctx.module_context.module,
    )  # fmt: skip
    if why is None:
        return planned
    later = op.forms[op.forms.index(planned.form) + 1 :]
    plan, form = choose(later, Call(ctx.avals_in, params), machine)
    plan = dataclasses.replace(plan, reason=f"{operands}: {why}", unsupported=True)
    return Planned(plan, form, machine)


def _lower_kernel(
    name: str, kernel: Kernel, ctx: Any, operands: Any, params: Any, planned: Planned, mesh: Mesh
) -> Any:
    """The call of the kernel of an op over ranks."""
    plan, machine = planned.plan, planned.machine
    kernel.register(params, machine.platform)
    table = meshes.group_table(mesh, params.axis_names)
    target = f"jflux_{name}" if kernel.target is None else kernel.target(params)
    # Grids and orders of tiles depend on it, and must be the same on all ranks. A user's own kernel
    # has a grid of the user's.
    own = {"sm_count": np.int64(machine.sm_count)} if kernel.target is None else {}
    call_names.expect(target)
    return jax.ffi.ffi_lowering(target, **_aliases(kernel))(
        ctx,
        *operands,
        groups=table.ravel(),
        site=np.int64(ctx.module_context.new_channel()),
        world=np.int64(table.shape[1]),
        workspace_bytes=np.int64(plan.workspace_bytes),
        **own,
        **kernel.attributes(ctx.avals_in, params, plan),
    )


def _aliases(kernel: Kernel) -> dict[str, Any]:
    """The option of a lowering that says which operands become results."""
    return {"operand_output_aliases": dict(kernel.aliases)} if kernel.aliases else {}


def _lower_local(
    name: str, kernel: Kernel, ctx: Any, operands: Any, params: Any, plan: Plan
) -> Any:
    """The call of the kernel of a local op."""
    attributes = kernel.attributes(ctx.avals_in, params, plan)
    if (prepare := kernel.prepare) is None:
        target = f"jflux_{name}"
        return jax.ffi.ffi_lowering(target, **_aliases(kernel))(ctx, *operands, **attributes)
    results = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in ctx.avals_out]

    def call(*operands: Any) -> Any:
        target = jax.ffi.ffi_call(f"jflux_{name}", results)
        return target(*prepare(operands, params), **attributes)

    return mlir.lower_fun(call, multiple_results=True)(ctx, *operands)


call_names.name_when_lowered()
