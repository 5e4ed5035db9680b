"""The sites of a body and of the bodies in it, and an order in which it can be evaluated."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var

from .. import _config
from .bodies import BODIES, Body, dropped_with, equations_of, inner_bodies, type_of, where
from .rules import GLOBAL_RULES, RULES
from .sites import Context, Declined, Rule, Scope, Site
from .specs import Spec, Specs

#: An equation, by index, or a site.
Step = int | Site


@dataclasses.dataclass(frozen=True, eq=False)
class BodyPlan:
    """How a body is evaluated.

    Attributes:
      declined: why collectives have no site, or none beside a product.
      inner: by equation and parameter, the plans of the bodies in it.
      steps: what to evaluate, in order.
      functions: of the bodies that are evaluated so, by id, beside each body: always the same one,
        so that JAX finds what it has traced.
    """

    jaxpr: Jaxpr
    scope: Scope
    sites: tuple[Site, ...]
    declined: tuple[Declined, ...]
    inner: Mapping[int, Mapping[str, tuple[BodyPlan, ...]]]
    steps: tuple[Step, ...]
    functions: dict[int, tuple[Any, Callable[..., Any]]] = dataclasses.field(default_factory=dict)

    def walk(self) -> Iterator[BodyPlan]:
        """This one, and those of the bodies in it."""
        yield self
        for bodies in self.inner.values():
            for plans in bodies.values():
                for plan in plans:
                    yield from plan.walk()

    @functools.cached_property
    def is_same(self) -> bool:
        """Whether no site is in it, or in a body in it."""
        return not self.sites and not any(self.changed(index) for index in self.inner)

    @functools.cached_property
    def last_uses(self) -> list[list[Var]]:
        """The variables that no step after this one reads, by step."""
        seen = {var for var in self.jaxpr.outvars if isinstance(var, Var)}
        last: list[list[Var]] = []
        for step in reversed(self.steps):
            if isinstance(step, Site):
                atoms = (*step.inputs, *step.outputs)
            else:
                atoms = (*self.jaxpr.eqns[step].invars, *self.jaxpr.eqns[step].outvars)
            here = {atom for atom in atoms if isinstance(atom, Var)} - seen
            last.append(list(here))
            seen |= here
        return last[::-1]

    def changed(self, index: int) -> bool:
        """Whether an equation has a body with a site."""
        bodies = self.inner.get(index, {}).values()
        return not all(plan.is_same for plans in bodies for plan in plans)


class Planner:
    """Plans each body once for each scope: equations may share one."""

    def __init__(self) -> None:
        self._known: dict[Any, BodyPlan] = {}

    def plan(
        self,
        body: Jaxpr | ClosedJaxpr,
        scope: Scope,
        given: Mapping[Var, Spec] = MappingProxyType({}),
        mesh: Any = None,
    ) -> BodyPlan:
        """Of a body.

        Args:
          given: how its arguments are split, outside of `shard_map`.
          mesh: over which.
        """
        jaxpr = equations_of(body)
        split = tuple((index, given.get(var)) for index, var in enumerate(jaxpr.invars))
        key = id(jaxpr), tuple(scope.axes.items()), scope.platform, split if given else (), mesh
        if key not in self._known:
            self._known[key] = self._plan(jaxpr, scope, given, mesh)
        return self._known[key]

    def _plan(self, jaxpr: Jaxpr, scope: Scope, given: Mapping[Var, Spec], mesh: Any) -> BodyPlan:
        body = Body(jaxpr)
        specs = None if scope.axes else Specs(body, given, mesh)
        plan = functools.partial(self.plan, scope=scope)
        context = Context(body, scope, specs, plan)
        declined = _find(context)
        steps, late = _in_order(body, context.sites)
        sites = tuple(site for site in context.sites if site not in late)
        declined += [Declined(site.op, site.at, CYCLE) for site in late]
        inner: dict[int, dict[str, tuple[BodyPlan, ...]]] = {}
        for index, equation in enumerate(body.equations):
            if equation.primitive.name not in BODIES:
                continue
            within = inside(equation, scope)
            inner[index] = {
                name: tuple(self._inner(equation, one, within, specs) for one in bodies)
                for name, bodies in inner_bodies(equation)
            }
        return BodyPlan(jaxpr, scope, sites, tuple(declined), inner, tuple(steps))

    def _inner(self, equation: JaxprEqn, body: Any, scope: Scope, specs: Specs | None) -> BodyPlan:
        """Of a body of an equation."""
        if specs is None:
            return self.plan(body, scope)
        given, mesh = specs.of_arguments(equation, equations_of(body))
        return self.plan(body, scope, given, mesh)


NOT_WANTED = "`only` or `skip` leaves it out"
CYCLE = "other sites need a part of its results before they can make its operands"


def _find(context: Context) -> list[Declined]:
    """Adds the sites to the context; why others are none."""
    body, scope = context.body, context.scope
    declined: dict[int, Declined] = {}
    for rules in RULES if scope.axes else GLOBAL_RULES:
        for index, equation in enumerate(body.equations):
            rule = rules.get(equation.primitive.name)
            if rule is None or not context.is_free(index):
                continue
            found = _asked(rule, index, context)
            if isinstance(found, Site) and any(type_of(v).weak_type for v in found.outputs):
                found = Declined(found.op, index, "its result has a weak type")
            if isinstance(found, Declined):  # the first reason counts, if no rule finds more
                declined.setdefault(index, found)
            elif found is not None and not scope.wanted(found.op, equation):
                declined.setdefault(index, Declined(found.op, index, NOT_WANTED))
            elif found is not None:
                context.add(found)
    return list(declined.values())


def _asked(rule: Rule, index: int, context: Context) -> Site | Declined | None:
    """What the rule finds. Where it fails the program goes on without an op, unless in strict
    mode."""
    try:
        return rule(context.body, index, context)
    except Exception as error:
        if _config.config.strict:
            raise
        equation = context.body.equations[index]
        name, line = equation.primitive.name, where(equation)
        _config.say_once(
            logging.WARNING,
            f"jflux.fuse leaves the {name} at {line} as it is, by a fault of jflux: "
            f"{type(error).__name__}: {error}",
        )
        return Declined(name, index, f"jflux failed: {type(error).__name__}: {error}")


def inside(equation: JaxprEqn, scope: Scope) -> Scope:
    """Where the bodies of an equation run."""
    if equation.primitive.name != "shard_map":
        return scope
    mesh = equation.params["mesh"]
    axes = dict(scope.axes)
    axes |= {name: mesh.shape[name] for name in equation.params["newly_manual_axes"]}
    device = getattr(mesh, "abstract_mesh", mesh).abstract_device
    platform = scope.platform if device is None else device.platform
    return dataclasses.replace(scope, axes=axes, platform=platform)


def _in_order(body: Body, sites: Sequence[Site]) -> tuple[list[Step], list[Site]]:
    """(what to evaluate, in the order of the equations as far as possible; sites that are left out,
    since they would need each other's results)."""
    left_out: list[Site] = []
    while True:
        taken = [site for site in sites if site not in left_out]
        order = _Order(body, taken)
        if order.cycle is None:
            return order.steps, left_out
        left_out.append(order.cycle)


class _Order:
    """An order by depth-first search: a site comes when one of its results is needed, or else where
    its last equation was.

    Attributes:
      cycle: a site that cannot be evaluated; None: all can.
    """

    def __init__(self, body: Body, sites: Sequence[Site]) -> None:
        self.body = body
        self.steps: list[Step] = []
        self.cycle: Site | None = None
        self._site_of = {var: site for site in sites for var in site.outputs}
        members = {index: site for site in sites for index in site.members}
        needed = {var for site in sites for var in site.inputs if isinstance(var, Var)}
        gone = dropped_with(body, members, needed)
        last = {max(site.members): site for site in sites}
        effects = body.effectful
        self._before = dict(zip(effects[1:], effects[:-1], strict=False))
        self._done: set[int] = set()
        for index in range(len(body.equations)):
            if index in last:
                self._visit(last[index])
            elif index not in gone:
                self._visit(index)
            if self.cycle is not None:
                return

    def _visit(self, step: Step) -> None:
        todo: list[tuple[Step, bool]] = [(step, False)]
        open_: dict[int, Step] = {}
        while todo:
            step, is_ready = todo.pop()
            key = step if isinstance(step, int) else id(step)
            if key in self._done:
                continue
            if is_ready:
                self._done.add(key)
                del open_[key]
                self.steps.append(step)
                continue
            if key in open_:
                sites = [s for s in open_.values() if isinstance(s, Site)]
                self.cycle = sites[-1]
                return
            open_[key] = step
            todo.append((step, True))
            todo += [(one, False) for one in reversed(self._needs(step))]

    def _needs(self, step: Step) -> list[Step]:
        atoms = self.body.equations[step].invars if isinstance(step, int) else step.inputs
        needs: list[Step] = []
        for atom in atoms:
            index = self.body.made_by(atom)
            if index is not None:
                needs.append(self._site_of.get(cast(Var, atom), index))
        if isinstance(step, int) and step in self._before:
            needs.append(self._before[step])
        return needs
