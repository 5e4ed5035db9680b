"""Makes JAX primitives of ops, and lowers their calls as planned."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

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
from .plans import Arrays, Machine, Path, Plan

#: Shape and type of one result.
ShapeDtype = tuple[tuple[int, ...], Any]


class Call(Protocol):
    """What the parameters of every op have: a call, less its operands.

    Attributes:
      axis_names: the mesh axes whose ranks take part.
      world: how many ranks these are.
      prepared: how the operands were brought into a form that the kernel takes, in words, or None.
        Such a call has been planned: it takes the kernel.
    """

    @property
    def axis_names(self) -> tuple[Any, ...]: ...
    @property
    def world(self) -> int: ...
    @property
    def prepared(self) -> str | None: ...


class ShapesRule(Protocol):
    """(operands' types, params) -> [(shape, dtype)] of the results."""

    def __call__(self, arrays: Arrays, params: Any) -> Sequence[ShapeDtype]: ...


class ReferenceForm(Protocol):
    """(operands, params) -> the results, in plain `lax`."""

    def __call__(self, arrays: Arrays, params: Any) -> Sequence[Any]: ...


class DecomposedForm(Protocol):
    """(operands, params, plan) -> the results, by XLA's product and others of jflux's ops."""

    def __call__(self, arrays: Arrays, params: Any, plan: Plan) -> Sequence[Any]: ...


class PlanRule(Protocol):
    """(operands' types, params, machine) -> the plan: a pure function, but for the switches of the
    thread and the tuning tables that it looks the call up in."""

    def __call__(self, arrays: Arrays, params: Any, machine: Machine) -> Plan: ...


class TwoLevelForm(Protocol):
    """(operands, params, plan, levels) -> the results, by XLA's collectives between nodes and
    jflux's ops inside them."""

    def __call__(
        self, arrays: Arrays, params: Any, plan: Plan, levels: Levels
    ) -> Sequence[Any]: ...


class TwoLevelPlanRule(Protocol):
    """(operands' types, params, machine, levels) -> the plan: as `PlanRule`, of a group that lies
    on several nodes."""

    def __call__(self, arrays: Arrays, params: Any, machine: Machine, levels: Levels) -> Plan: ...


class CanonicalRule(Protocol):
    """(operands' types, params, machine) -> a function (*operands) -> the results that brings the
    operands into a form that the kernel takes and binds the primitive again, with `prepared`; None
    if they are in that form."""

    def __call__(
        self, arrays: Arrays, params: Any, machine: Machine
    ) -> Callable[..., Any] | None: ...


class AttributesRule(Protocol):
    """(operands' types, params, plan) -> the FFI attributes of the handler beside `groups`, `site`,
    `sm_count`, `world` and `workspace_bytes`."""

    def __call__(self, arrays: Arrays, params: Any, plan: Plan) -> dict[str, Any]: ...


class FlopsRule(Protocol):
    """(operands' types, params) -> floating-point operations of a rank's products."""

    def __call__(self, arrays: Arrays, params: Any) -> int: ...


class BatchRule(Protocol):
    """(primitive, operands, dims, params=...) -> (results, their batch dimensions)."""

    def __call__(
        self, primitive: Primitive, operands: Any, dims: Any, *, params: Any
    ) -> tuple[Any, Any]: ...


def no_products(arrays: Arrays, params: Any) -> int:
    return 0


def _always_canonical(arrays: Arrays, params: Any, machine: Machine) -> None:
    return None


def _no_decomposed_form(arrays: Arrays, params: Any, plan: Plan) -> Sequence[Any]:
    raise AssertionError(f"a plan chose a form that there is not: {plan.reason}")


def _no_two_level_form(arrays: Arrays, params: Any, plan: Plan, levels: Levels) -> Sequence[Any]:
    raise AssertionError(f"a plan chose a form that there is not: {plan.reason}")


def _inside_nodes_only(arrays: Arrays, params: Any, machine: Machine, levels: Levels) -> Plan:
    return plans.unsupported(f"{levels}, and its kernel reaches the ranks of one node only")


def _nothing_to_register(params: Any, platform: str) -> None:
    """The library's own targets are registered together."""


def _nothing_same(params: Any) -> tuple[Any, ...]:
    return ()


@dataclasses.dataclass(frozen=True)
class Rules:
    """What the lowering asks of an op.

    Attributes:
      name: of the op; its FFI target is ``jflux_<name>``, unless `target` says otherwise.
      result_shapes: -> [(shape, dtype)] of the results.
      reference: the call in plain `lax`.
      decomposed: the call as XLA's product and others of jflux's ops, for ops whose plans may say
        so.
      plan: which path the call takes.
      form_without_room: whether the decomposed form takes over where the kernel's workspace finds
        no room in the heap; else the reference does.
      two_level: the call as XLA's collectives between nodes and jflux's ops inside them.
      plan_two_level: which path a call takes whose ranks lie on several nodes, equally many on
        each.
      canonical: how the operands get into the kernel's form.
      attributes: what the handler takes.
      batch: the batching rule.
      flops: of the call's products, on one rank.
      same_over: params -> the axes that the results do not vary over any more.
      target: params -> the FFI target, of which messages then speak too.
      title: params -> what messages call the call; else its name and target.
      register: (params, platform): registers that target with XLA.
      aliases: operand -> the result that it becomes, by number: both are one buffer.
    """

    name: str
    result_shapes: ShapesRule
    reference: ReferenceForm
    plan: PlanRule
    attributes: AttributesRule
    batch: BatchRule
    decomposed: DecomposedForm = _no_decomposed_form
    form_without_room: bool = True
    two_level: TwoLevelForm = _no_two_level_form
    plan_two_level: TwoLevelPlanRule = _inside_nodes_only
    canonical: CanonicalRule = _always_canonical
    flops: FlopsRule = no_products
    same_over: Callable[[Any], tuple[Any, ...]] = _nothing_same
    target: Callable[[Any], str] | None = None
    title: Callable[[Any], str] | None = None
    register: Callable[[Any, str], None] = _nothing_to_register
    aliases: Mapping[int, int] = dataclasses.field(default_factory=dict)

    def label(self, params: Any) -> str:
        """The op as messages name it."""
        if self.title is not None:
            return self.title(params)
        return self.name if self.target is None else f"{self.name}({self.target(params)})"


#: By an op's primitive: (operands' types, results' types, its parameters) -> floating-point
#: operations of one rank.
flops_of: dict[Primitive, Callable[[Any, Any, Any], int]] = {}


class OpPrimitive(Primitive):
    """The primitive of an op.

    Where types of variation are tracked, its operands vary over the same axes, but those of the op
    itself, over which its wrapper makes them vary. They are cast whenever the primitive is bound:
    under ``jax.vmap(..., spmd_axis_name=)`` those that have a batch vary over one axis more than
    their wrapper saw.
    """

    def bind(self, *operands: Any, params: Any) -> Any:
        own = _own_axes(params)
        return super().bind(*meshes.vary_alike(*operands, but=own), params=params)

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


def make_primitive(rules: Rules) -> Primitive:
    """A primitive ``jflux_<name>(*operands, params)`` with several results, all of the first
    operand's kind."""
    primitive = OpPrimitive(f"jflux_{rules.name}")
    primitive.multiple_results = True
    # The group table names devices, so a lowering holds for its devices alone. Without this, JAX
    # reuses it for another mesh of the same shape.
    _jax_internals.lower_for_its_devices(primitive)

    def abstract(*avals: Any, params: Any) -> list[Any]:
        # Results vary over the axes that the operands vary over; a bare shape would claim that
        # they do not, and check_vma=True would let wrong out_specs pass.
        varying = frozenset().union(*(a.manual_axis_type.varying for a in avals))
        varying -= frozenset(rules.same_over(params))
        manual = avals[0].manual_axis_type.update(varying=varying)
        results = rules.result_shapes(avals, params)
        specs = [PartitionSpec(*(None for _ in shape)) for shape, _ in results]
        if meshes.is_sharded(avals):
            # Over Explicit axes that are not manual: as the reference's results.
            types = jax.eval_shape(lambda *arrays: rules.reference(arrays, params), *avals)
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

    def lower_form(ctx: Any, operands: Any, form: Callable[[Arrays], Any]) -> Any:
        inside = meshes.unsharded_inside(lambda *operands: form(operands), ctx.avals_out)
        return mlir.lower_fun(inside, multiple_results=True)(ctx, *operands)

    def lower(ctx: Any, *operands: Any, params: Any, platform: str) -> Any:
        mesh = meshes.concrete_mesh_of(ctx.module_context, params.axis_names)
        plan, machine = plan_call(rules, ctx.avals_in, ctx.avals_out, params, platform, mesh)
        if plan.path == Path.FUSED and (why := call_names.why_not(platform)):
            plan = plans.unsupported(why)
        canonical = None
        if plan.path == Path.FUSED:
            assert mesh is not None and machine is not None
            canonical = rules.canonical(ctx.avals_in, params, machine)
        if canonical is not None:
            return lower_form(ctx, operands, lambda arrays: canonical(*arrays))
        if plan.path == Path.FUSED:
            assert mesh is not None and machine is not None
            plan = _reserve(rules, ctx, params, plan, machine, mesh)
        _report(rules.label(params), ctx, plan)
        if plan.path == Path.REFERENCE:
            return lower_form(ctx, operands, lambda arrays: rules.reference(arrays, params))
        if plan.path == Path.DECOMPOSED:
            return lower_form(ctx, operands, lambda arrays: rules.decomposed(arrays, params, plan))
        if plan.path == Path.TWO_LEVEL:
            assert mesh is not None
            levels = levels_over(platform, mesh, params.axis_names)
            assert isinstance(levels, Levels)
            form = functools.partial(rules.two_level, params=params, plan=plan, levels=levels)
            return lower_form(ctx, operands, form)
        assert mesh is not None and machine is not None
        return _lower_fused(rules, ctx, operands, params, plan, machine, mesh)

    def lower_elsewhere(ctx: Any, *operands: Any, params: Any) -> Any:
        plan = plans.unsupported("jflux has kernels for CPUs and CUDA GPUs only")
        _report(rules.label(params), ctx, plan)
        return lower_form(ctx, operands, lambda arrays: rules.reference(arrays, params))

    mlir.register_lowering(primitive, lower_elsewhere)
    for platform in ffi_targets.PLATFORMS:
        rule = functools.partial(lower, platform=platform)
        mlir.register_lowering(primitive, rule, platform=platform)
    primitive.batched_by(rules.batch)
    derivatives.check_for_nan(primitive)
    flops_of[primitive] = lambda arrays, results, named: rules.flops(arrays, **named)
    return primitive


def plan_call(
    rules: Rules,
    avals: Sequence[Any],
    avals_out: Sequence[Any],
    params: Any,
    platform: str,
    mesh: Mesh | None,
) -> tuple[Plan, Machine | None]:
    """The plan of a call that is lowered for this mesh (None: it is not known), and the machine."""
    if not _config.config.fused:
        return plans.reference("jflux.config(fused=False)"), None
    if why := plans.why_symbolic((*avals, *avals_out)):
        return plans.unsupported(why), None
    if any(0 in aval.shape for aval in (*avals, *avals_out)):
        return plans.reference("an operand or a result is empty"), None
    if why := _jax_internals.DEVICES.why_missing():
        return plans.unsupported(why), None
    if mesh is None:
        return (
            plans.unsupported(
                "the mesh is abstract, and the program that is lowered has no devices: call it on "
                "arrays that lie on the mesh's, or under jax.set_mesh(mesh), or give a mesh with "
                "devices"
            ),
            None,
        )
    if why := _heap.why_not_usable(platform, mesh, meshes.group_table(mesh, params.axis_names)):
        return plans.unsupported(why), None
    if params.world == 1 and meshes.has_subgroups(params.axis_names):
        return plans.reference("each group has one rank"), None
    machine = plans.machine_of(platform, mesh)
    if why := machine.why_no_kernel(rules.name):
        return plans.unsupported(why), None
    levels = levels_over(platform, mesh, params.axis_names)
    if isinstance(levels, str):
        return plans.unsupported(levels), None
    if levels is not None:
        return rules.plan_two_level(avals, params, machine, levels), machine
    return rules.plan(avals, params, machine), machine


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


def _report(label: str, ctx: Any, plan: Plan) -> None:
    """Says which path a call takes: to jflux.explain, to the log, as an error in strict mode."""
    explain.note(label, ctx.avals_in, ctx.avals_out, plan)
    if plan.unsupported:
        _config.fall_back(label, plan.reason, plan.path)
    elif plan.path in (Path.DECOMPOSED, Path.TWO_LEVEL):
        _config.say_once(logging.INFO, f"jflux.{label} is {plan.path}: {plan.reason}")


def _reserve(rules: Rules, ctx: Any, params: Any, plan: Plan, machine: Machine, mesh: Mesh) -> Plan:
    """The plan, or another one if the symmetric heap has no room for it."""
    if not machine.is_here or _config.config.current().recorder is not None:  # nothing is to run
        return plan
    table = meshes.group_table(mesh, params.axis_names)
    operands = explain.describe(ctx.avals_in)
    why = _heap.reserve(
        machine.platform, table, rules.label(params), operands, plan.workspace_bytes,
        ctx.module_context.module,
    )  # fmt: skip
    if why is None:
        return plan
    has_form = rules.decomposed is not _no_decomposed_form and rules.form_without_room
    path = Path.DECOMPOSED if has_form else Path.REFERENCE
    return Plan(path, f"{operands}: {why}", unsupported=True)


def _lower_fused(
    rules: Rules, ctx: Any, operands: Any, params: Any, plan: Plan, machine: Machine, mesh: Mesh
) -> Any:
    ffi_targets.register_targets(machine.platform)
    rules.register(params, machine.platform)
    table = meshes.group_table(mesh, params.axis_names)
    target = f"jflux_{rules.name}" if rules.target is None else rules.target(params)
    aliases: Any = {"operand_output_aliases": dict(rules.aliases)} if rules.aliases else {}
    # Grids and orders of tiles depend on it, and must be the same on all ranks. A user's own kernel
    # has a grid of the user's.
    own = {"sm_count": np.int64(machine.sm_count)} if rules.target is None else {}
    call_names.expect(target)
    return jax.ffi.ffi_lowering(target, **aliases)(
        ctx,
        *operands,
        groups=table.ravel(),
        site=np.int64(ctx.module_context.new_channel()),
        world=np.int64(table.shape[1]),
        workspace_bytes=np.int64(plan.workspace_bytes),
        **own,
        **rules.attributes(ctx.avals_in, params, plan),
    )


call_names.name_when_lowered()
