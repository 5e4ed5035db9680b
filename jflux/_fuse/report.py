"""What `fuse` found in a function."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterator

from jax.extend.core import JaxprEqn

from .._call.explain import describe
from .bodies import type_of, where
from .planning import BodyPlan
from .sites import Site


@dataclasses.dataclass(frozen=True)
class Found:
    """A collective of the program.

    Attributes:
      op: the op that stands for it; of one that stays as it is, the op that was looked for.
      where: its line of the program, and the names of `jax.named_scope` and of modules around it.
      operand: shape and type of one rank's operand, such as "bfloat16[1024, 4096]".
      taken: whether the op stands for it.
      reason: why it stays as it is, or why the op hides nothing in a product.
      before: the equations that the op stands for, by their primitives' names.
      hidden: bytes that reach a rank while it multiplies, in one call.
      calls: how often the line runs in one call of the function, as far as loops have a length.
    """

    op: str
    where: str
    operand: str
    taken: bool
    reason: str | None = None
    before: tuple[str, ...] = ()
    hidden: int = 0
    calls: int = 1

    def __str__(self) -> str:
        times = f", {self.calls} times" if self.calls > 1 else ""
        head = f"{self.where}  {self.operand}{times}"
        if not self.taken:
            return f"{head}\n  no {self.op}: {self.reason}"
        counts = collections.Counter(self.before)
        parts = [name if n == 1 else f"{n} {name}" for name, n in counts.items()]
        note = self.reason or f"{self.hidden / (1 << 20):.2f} MiB beside the product"
        return f"{head}\n  {' + '.join(parts)} -> {self.op}  ({note})"


class Report(tuple[Found, ...]):
    """The collectives of a function, in the order of the program. Prints as a report.

    Attributes:
      picture: the products and collectives of each body in which an op is taken, before and after.
    """

    picture: str

    @classmethod
    def of(cls, plan: BodyPlan) -> Report:
        report = cls(_found(plan, 1))
        report.picture = "\n".join(_pictures(plan, "function"))
        return report

    @property
    def taken(self) -> tuple[Found, ...]:
        """Those for which an op stands."""
        return tuple(found for found in self if found.taken)

    def __str__(self) -> str:
        if not self:
            return "no collective that jflux has an op for"
        hidden = sum(found.hidden * found.calls for found in self)
        calls = sum(found.calls for found in self.taken)
        total = sum(found.calls for found in self)
        last = (
            f"{calls} of {total} collectives are jflux's; "
            f"{hidden / (1 << 20):.2f} MiB reach a rank beside products"
        )
        return "\n".join([*map(str, self), last])

    __repr__ = __str__  # what a session or a notebook shows


def _found(plan: BodyPlan, calls: int) -> Iterator[Found]:
    """Those of a body and the bodies in it."""
    equations = plan.jaxpr.eqns
    sites = {site.at: site for site in plan.sites}
    declined = {one.at: one for one in plan.declined}
    for index, equation in enumerate(equations):
        if index in sites or index in declined:
            site, no = sites.get(index), declined.get(index)
            op = site.op if site else no.op  # type: ignore[union-attr]
            members = sorted(site.members) if site else ()
            is_fused = site is not None and site.hidden > 0
            yield Found(
                op, _place(equation), describe([type_of(equation.invars[0])]), site is not None,
                reason=no.reason if no is not None and not is_fused else None,
                before=tuple(_name(equations[i]) for i in members),
                hidden=site.hidden if site else 0, calls=calls,
            )  # fmt: skip
        for plans in plan.inner.get(index, {}).values():
            for inner in plans:
                yield from _found(inner, calls * _length(equation))


def _place(equation: JaxprEqn) -> str:
    names = str(equation.source_info.name_stack)
    return f"{where(equation)} {names}".rstrip()


def _pictures(plan: BodyPlan, name: str) -> Iterator[str]:
    """Of a body and the bodies in it."""
    equations = plan.jaxpr.eqns
    if plan.sites:
        members = {index for site in plan.sites for index in site.members}
        shown = members | {one.at for one in plan.declined}
        shown |= {i for i, e in enumerate(equations) if e.primitive.name == "dot_general"}
        before = [_name(equations[index]) for index in sorted(shown)]
        after = [
            step.op if isinstance(step, Site) else _name(equations[step])
            for step in plan.steps
            if isinstance(step, Site) or step in shown
        ]
        yield f"{name}\n  before  {_joined(before)}\n  after   {_joined(after)}"
    for index, inner in plan.inner.items():
        here = f"{_name(equations[index])}, {where(equations[index])}"
        for plans in inner.values():
            for one in plans:
                yield from _pictures(one, here)


def _joined(names: list[str]) -> str:
    runs = ((name, len(list(run))) for name, run in itertools.groupby(names))
    return " > ".join(name if count == 1 else f"{count} {name}" for name, count in runs)


def _name(equation: JaxprEqn) -> str:
    """Its primitive's; of a call, that of the function."""
    name = equation.primitive.name
    return equation.params["name"] if name == "jit" else name


def _length(equation: JaxprEqn) -> int:
    return equation.params["length"] if equation.primitive.name == "scan" else 1
