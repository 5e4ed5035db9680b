"""The forms in which an op's calls run, and which of them takes a call.

An op is a reference and a list of forms in order. The first form that takes a call runs it, by a
plan that the form makes. The reason of that plan is the form's own, or else the reason of the last
form before it that does not take the call. The reference takes what no form takes.

Forms are asked when a call is lowered. Some are asked when it is traced (`TRACED`), and go by
shapes, types and switches alone: those of `moe_dispatch` and `dispatch_grouped_matmul`, since each
has a handle of its own, and those of attention, since JAX differentiates cuDNN's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from .. import _config
from .._ranks.node_levels import Levels
from . import plans
from .plans import Arrays, Machine, Path, Plan

#: Shape and type of one result.
ShapeDtype = tuple[tuple[int, ...], Any]


@dataclasses.dataclass(frozen=True)
class Call:
    """A call, as forms are asked about it.

    Attributes:
      arrays: its operands, or their types.
      params: the rest of it. Over ranks it has `axis_names`, the mesh axes whose ranks take part;
        `world`, how many these are; and `prepared`: how the operands were brought into a form that
        the kernel takes, in words, or None. A call with `prepared` has been planned: it takes the
        kernel.
      levels: how its ranks lie on nodes; None: on one.
    """

    arrays: Arrays
    params: Any
    levels: Levels | None = None

    @property
    def inside(self) -> Call:
        """The same call by the ranks of one node alone."""
        if self.levels is None:
            return self
        names, world = (self.levels.inside,), self.levels.local
        return Call(self.arrays, dataclasses.replace(self.params, axis_names=names, world=world))


@dataclasses.dataclass(frozen=True)
class WhyNot:
    """Why a form does not take a call.

    Attributes:
      reason: in words.
      unsupported: an op's user may not expect it: if the reference then takes the call, that is
        logged, and an error in strict mode.
    """

    reason: str
    unsupported: bool = False


#: (call, machine) -> the plan of a call that a form takes, whose reason may be empty; or why it
#: does not take it; or None, where there is nothing to say. A pure function, but for the switches
#: of the thread and the tuning tables.
Takes = Callable[[Call, Machine], Plan | WhyNot | None]
#: (operands, params, plan) -> the results, in `lax` and by other ops.
Run = Callable[[Arrays, Any, Plan], Sequence[Any]]
#: (operands, params) -> the results, in plain `lax`.
Reference = Callable[[Arrays, Any], Sequence[Any]]
#: (operands' types, params) -> [(shape, dtype)] of the results.
ShapesRule = Callable[[Arrays, Any], Sequence[ShapeDtype]]
#: (operands' types, params, machine) -> a function (*operands) -> the results that brings the
#: operands into a form that the kernel takes and binds the primitive again, with `prepared`; None
#: if they are in that form.
CanonicalRule = Callable[[Arrays, Any, Machine], Callable[..., Any] | None]
#: (operands' types, params, plan) -> the FFI attributes of the handler, beside those that all calls
#: over ranks have: `groups`, `site`, `sm_count`, `world` and `workspace_bytes`.
AttributesRule = Callable[[Arrays, Any, Plan], dict[str, Any]]
#: (operands' types, params) -> floating-point operations of a rank's products.
FlopsRule = Callable[[Arrays, Any], int]
#: (primitive, operands, dims, params=...) -> (results, their batch dimensions).
BatchRule = Callable[..., tuple[Any, Any]]


@dataclasses.dataclass(frozen=True)
class Kernel:
    """How a form calls an FFI target.

    Attributes:
      attributes: what the handler takes.
      canonical: how the operands get into the kernel's form.
      prepare: operands, params -> the operands of a local op's handler, computed in `lax`; None:
        they are the call's.
      target: params -> the FFI target; None: ``jflux_<name of the op>``.
      register: (params, platform): registers that target with XLA. The library's own targets are
        registered together.
      aliases: operand -> the result that it becomes, by number: both are one buffer.
    """

    attributes: AttributesRule
    canonical: CanonicalRule = lambda arrays, params, machine: None
    prepare: Callable[[Arrays, Any], Sequence[Any]] | None = None
    target: Callable[[Any], str] | None = None
    register: Callable[[Any, str], None] = lambda params, platform: None
    aliases: Mapping[int, int] = dataclasses.field(default_factory=dict)


T = TypeVar("T")
R = TypeVar("R", covariant=True)


@dataclasses.dataclass(frozen=True)
class Form(Generic[R]):
    """One way to run calls.

    Attributes:
      takes: whether it takes a call, and by which plan.
      run: of an op, the kernel that it calls, or the call in `lax` and by other ops.
      words: what it does. The reason of its plans begins with it, where they have none.
    """

    takes: Takes
    run: R
    words: str = ""


@dataclasses.dataclass(frozen=True)
class Op:
    """An op.

    Attributes:
      name: its FFI target is ``jflux_<name>``, unless its kernel says otherwise.
      result_shapes: -> [(shape, dtype)] of the results.
      reference: the call in plain `lax`.
      forms: the other ways to run it, in the order in which they are asked.
      batch: the batching rule.
      flops: of the call's products, on one rank.
      varying: params -> how many of the first operands vary over the call's axes, as types know
        them; the others are the same on all ranks. None: all vary.
      same_over: params -> the axes that the results do not vary over any more.
      title: params -> what messages call the call; else its name.
      is_local: whether it has no peers and no workspace: its calls compute on one device, need no
        axis, no mesh and no heap, and mean the same inside `jax.shard_map` and outside. In C++ such
        an op has no plan (cc/runtime/op.h).
      is_split_by_xla: of a local op: the reference takes calls on arrays that XLA splits over
        devices, outside of `jax.shard_map` or over axes that it leaves to XLA. A kernel would have
        all of them on each device.
      values: how many of the first results `checkify` looks at. Later results may hold anything in
        places that nobody reads. None: all results.
    """

    name: str
    result_shapes: ShapesRule
    reference: Reference
    forms: tuple[Form[Kernel | Run], ...]
    batch: BatchRule
    flops: FlopsRule = lambda arrays, params: 0
    varying: Callable[[Any], int | None] = lambda params: None
    same_over: Callable[[Any], tuple[Any, ...]] = lambda params: ()
    title: Callable[[Any], str] | None = None
    is_local: bool = False
    is_split_by_xla: bool = False
    values: int | None = None

    def label(self, params: Any) -> str:
        """The op as messages name it."""
        return self.name if self.title is None else self.title(params)

    def plan(
        self, arrays: Arrays, params: Any, machine: Machine, levels: Levels | None = None
    ) -> Plan:
        """The plan of a call."""
        return choose(self.forms, Call(arrays, params, levels), machine)[0]


#: The machine of calls whose form is chosen while they are traced: no device is known.
TRACED = Machine("traced")


def choose(
    forms: Sequence[Form[R]], call: Call, machine: Machine = TRACED
) -> tuple[Plan, Form[R] | None]:
    """The plan of a call, and its form; None is the reference."""
    why = WhyNot("it has no other form")
    for form in forms:
        found = form.takes(call, machine)
        if isinstance(found, Plan):
            if not found.reason:
                words = f"{form.words}: {why.reason}" if form.words else why.reason
                unsupported = found.path == Path.REFERENCE and why.unsupported
                found = dataclasses.replace(found, reason=words, unsupported=unsupported)
            return found, form
        why = found or why
    return Plan(Path.REFERENCE, why.reason, unsupported=why.unsupported), None


# ---- Forms of many ops ---------------------------------------------------------------------------


def inside_nodes(takes: Takes) -> Takes:
    """Of a kernel that reaches the ranks of one node only."""

    def inside(call: Call, machine: Machine) -> Plan | WhyNot | None:
        if call.levels is None:
            return takes(call, machine)
        return WhyNot(
            f"{call.levels}, and its kernel reaches the ranks of one node only", unsupported=True
        )

    return inside


def kernel(takes: Takes, attributes: AttributesRule, **options: Any) -> Form[Kernel | Run]:
    """The form of an op that is one kernel.

    Args:
      options: the rest of `Kernel`.
    """
    return Form(inside_nodes(takes), Kernel(attributes, **options))


def takes_all(call: Call, machine: Machine) -> Plan:
    """Of a form that takes all that forms before it do not."""
    return plans.decomposed("")


def decomposed(run: T, words: str = "") -> Form[T]:
    """The form that takes all that forms before it do not: `run`, by other ops."""
    return Form(takes_all, run, words)


def native_plan(
    op: str, call: Mapping[str, int], machine: Machine, *, fills: str | None = None
) -> dict[str, int] | WhyNot:
    """The native plan of a call, or why the kernel does not take it.

    Args:
      fills: what fills the workspace, in words, for an op whose workspace grows with its
        operands. Such a workspace may take a third of the heap, so that other calls find room,
        those of the op's other forms among them.
    """
    try:
        native = machine.native_plan(op, call)
    except ValueError as refused:
        return WhyNot(str(refused))
    too_much = native["workspace_bytes"] > machine.heap_bytes // 3
    if fills is None or _config.config.always or not too_much:
        return native
    return WhyNot(machine.why_no_room(f"the {fills} take", native["workspace_bytes"], "a third"))
