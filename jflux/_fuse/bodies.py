"""The equations of a body as a graph, and the bodies that equations hold."""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, cast

from jax.core import ShapedArray
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

Atom = Var | Literal

#: The bodies of an equation that are rewritten, by primitive: which of its parameters hold them.
BODIES = {
    "jit": ("jaxpr",),
    "scan": ("jaxpr",),
    "while": ("cond_jaxpr", "body_jaxpr"),
    "cond": ("branches",),
    "remat2": ("jaxpr",),
    "checkpoint": ("jaxpr",),
    "closed_call": ("call_jaxpr",),
    "core_closed_call": ("call_jaxpr",),
    "custom_jvp_call": ("call_jaxpr",),
    "custom_vjp_call": ("call_jaxpr",),
    "shard_map": ("jaxpr",),
}


def type_of(atom: Atom) -> ShapedArray:
    """Of an array."""
    return cast(ShapedArray, atom.aval)


def equations_of(body: Jaxpr | ClosedJaxpr) -> Jaxpr:
    """The jaxpr of a body, which may have its constants beside it. (Both are one class from JAX
    0.12 on.)"""
    return body.jaxpr if isinstance(body, ClosedJaxpr) else body


def inner_bodies(equation: JaxprEqn) -> Iterator[tuple[str, Sequence[Any]]]:
    """(parameter, the bodies in it) of an equation."""
    for name in BODIES.get(equation.primitive.name, ()):
        value = equation.params.get(name)
        if value is not None:
            yield name, value if isinstance(value, tuple | list) else (value,)


def where(equation: JaxprEqn) -> str:
    """The line of the program that an equation comes from: "model.py:120 (layer)"."""
    return re.sub(r"(:\d+):\d+", r"\1", source_info_util.summarize(equation.source_info))


def has_effects(equation: JaxprEqn) -> bool:
    """Whether it does more than to compute its results. (That it names a mesh axis is an effect to
    JAX.)"""
    return any(type(effect).__name__ != "NamedAxisEffect" for effect in equation.effects)


class Body:
    """A jaxpr with who makes and who uses each variable. Equations are known by their index.

    Attributes:
      users: of each variable, the equations that read it, each once; `RESULT` for a result.
    """

    RESULT = -1

    def __init__(self, jaxpr: Jaxpr) -> None:
        self.jaxpr = jaxpr
        self.equations: Sequence[JaxprEqn] = jaxpr.eqns
        self.maker: dict[Var, int] = {}
        self.users: dict[Var, list[int]] = {}
        for index, equation in enumerate(self.equations):
            self.maker.update(dict.fromkeys(equation.outvars, index))
            for atom in equation.invars:
                self._use(atom, index)
        for atom in jaxpr.outvars:
            self._use(atom, self.RESULT)

    def _use(self, atom: Atom, index: int) -> None:
        if isinstance(atom, Var):
            users = self.users.setdefault(atom, [])
            if not users or users[-1] != index:
                users.append(index)

    def made_by(self, atom: Atom) -> int | None:
        """The equation that makes it; None: an argument, or a literal."""
        return self.maker.get(atom) if isinstance(atom, Var) else None

    def before_transpose(self, atom: Atom) -> tuple[Atom, tuple[int, ...]] | None:
        """(what it is the transpose of, the permutation), if it is one."""
        index = self.made_by(atom)
        if index is None or self.equations[index].primitive.name != "transpose":
            return None
        equation = self.equations[index]
        return equation.invars[0], equation.params["permutation"]

    def only_user(self, var: Var) -> int | None:
        """The one equation that uses it; None: several do, or it is a result."""
        users = self.users.get(var, ())
        return users[0] if len(users) == 1 and users[0] != self.RESULT else None

    @functools.cached_property
    def effectful(self) -> list[int]:
        """The equations with effects, in the order that they must keep."""
        return [i for i, equation in enumerate(self.equations) if has_effects(equation)]


def dropped_with(body: Body, members: Iterable[int], needed: Collection[Var]) -> set[int]:
    """The equations that nobody needs any more where others stand for `members`: those whose
    results went to `members`, or to each other, alone, and that nobody else needs."""
    gone = set(members)
    candidates = list(gone)
    while candidates:
        for atom in body.equations[candidates.pop()].invars:
            index = body.made_by(atom)
            if index is None or index in gone or has_effects(body.equations[index]):
                continue
            outputs = body.equations[index].outvars
            users = [user for var in outputs for user in body.users.get(var, ())]
            if all(user in gone for user in users) and not any(v in needed for v in outputs):
                gone.add(index)
                candidates.append(index)
    return gone
