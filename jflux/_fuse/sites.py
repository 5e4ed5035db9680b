"""What a rule finds in a body."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var

from .._ops._spec import all_ops
from .bodies import Atom, Body, type_of
from .specs import Specs

if TYPE_CHECKING:
    from .planning import BodyPlan


@dataclasses.dataclass(frozen=True)
class Scope:
    """Where a body runs.

    Attributes:
      axes: the mesh axes that `shard_map` has bound, with their sizes.
      platform: of the mesh's devices.
      wanted: (op, equation of its collective) -> whether it may be taken.
    """

    axes: Mapping[Any, int]
    platform: str
    wanted: Callable[[str, JaxprEqn], bool]


@dataclasses.dataclass(frozen=True, eq=False)
class Site:
    """Equations for which one op stands.

    Attributes:
      op: its name.
      at: the equation of the collective.
      members: the equations, by index.
      inputs: what `call` takes.
      outputs: the variables that it makes.
      call: (*inputs) -> outputs.
      hidden: bytes that reach a rank while it multiplies.
    """

    op: str
    at: int
    members: tuple[int, ...]
    inputs: tuple[Atom, ...]
    outputs: tuple[Var, ...]
    call: Callable[..., Sequence[jax.Array]]
    hidden: int


@dataclasses.dataclass(frozen=True)
class Declined:
    """A collective that no op is taken for.

    Attributes:
      op: the one that was looked for.
      at: the equation of the collective.
      reason: why not.
    """

    op: str
    at: int
    reason: str


#: (body, equation, context) -> what is found there; None: nothing that the rule looks for.
Rule = Callable[[Body, int, "Context"], Site | Declined | None]


class Context:
    """What a rule may ask while a body is planned.

    Attributes:
      specs: how its arrays are split over a mesh; None: it is one rank's, inside `shard_map`.
      plan: of another body, which runs in the same scope.
    """

    def __init__(
        self,
        body: Body,
        scope: Scope,
        specs: Specs | None,
        plan: Callable[[Jaxpr | ClosedJaxpr], BodyPlan],
    ) -> None:
        self.body, self.scope, self.specs, self.plan = body, scope, specs, plan
        self.sites: list[Site] = []
        self.owner: dict[int, Site] = {}

    def add(self, site: Site) -> None:
        self.sites.append(site)
        self.owner.update(dict.fromkeys(site.members, site))

    def is_free(self, index: int) -> bool:
        """Whether no site has the equation."""
        return index not in self.owner

    def depend_on(self, atoms: Sequence[Atom], members: Sequence[int]) -> bool:
        """Whether any of these is computed from results of `members`: then one op cannot make the
        results and take these."""
        first, seen = min(members), set()
        todo = [self.body.made_by(atom) for atom in atoms]
        while todo:
            index = todo.pop()
            if index is None or index in seen:
                continue
            seen.add(index)
            if index in members:
                return True
            site = self.owner.get(index)
            if site is not None:
                todo += [self.body.made_by(atom) for atom in site.inputs]
            elif index > first:
                todo += [self.body.made_by(atom) for atom in self.body.equations[index].invars]
        return False

    def why_not_tiled(self, equation: JaxprEqn, names: Sequence[Any]) -> str | None:
        """Why no product is fused with a collective over these axes, whatever is beside it."""
        if not equation.params.get("tiled", True):
            return "the collective is not tiled"
        return self.why_no_groups(equation, names)

    def why_no_groups(self, equation: JaxprEqn, names: Sequence[Any]) -> str | None:
        """The same of one that is tiled."""
        if equation.params.get("axis_index_groups") is not None:
            return "the collective has axis_index_groups"
        return self.why_not(equation, names)

    def why_not(self, equation: JaxprEqn, names: Sequence[Any]) -> str | None:
        """Why no op stands for a collective over these axes."""
        unbound = [name for name in names if name not in self.scope.axes]
        if unbound:
            return f"axis {unbound[0]!r} is no axis of a shard_map's mesh"
        if self.ranks(names) == 1:
            return "the axis has one rank"
        if not all(type_of(atom).size for atom in equation.invars):
            return "the array is empty"
        return None

    def why_not_of(self, op: str, dtype: Any) -> str | None:
        """Why no kernel takes operands of this type."""
        known = all_ops().get(op)
        is_extended = jnp.issubdtype(dtype, jax.dtypes.extended)  # such as a key
        if is_extended or (known is not None and not known.takes(self.scope.platform, dtype)):
            return f"no kernel for {self.scope.platform} takes {dtype}"
        return None

    def ranks(self, names: Sequence[Any]) -> int:
        """How many there are along these axes."""
        return math.prod(self.scope.axes[name] for name in names)


def as_names(axis_name: Any) -> tuple[Any, ...]:
    """The axes of a collective's parameter."""
    return axis_name if isinstance(axis_name, tuple) else (axis_name,)
