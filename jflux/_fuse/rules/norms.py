"""A norm of rows, as Flax, Equinox and Haiku write it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

from jax.extend.core import Var

from ..._ops._norm import LayerNorm, RMSNorm
from ..bodies import Atom, Body, has_effects, type_of
from ..expressions import Term, is_constant, term
from ..sites import Context
from .epilogues import vector

#: The most equations of a norm.
MOST = 32


@dataclasses.dataclass(frozen=True)
class Found:
    """A norm of an array.

    Attributes:
      kind: :class:`jflux.RMSNorm` or :class:`jflux.LayerNorm`.
      factors: the scale, and perhaps a bias.
      result: the normalised array.
      members: the equations that it stands for.
    """

    kind: type[RMSNorm] | type[LayerNorm]
    epsilon: float
    factors: tuple[Atom, ...]
    result: Var
    members: tuple[int, ...]

    def norm(self, factors: Sequence[Any]) -> RMSNorm | LayerNorm:
        """Of the arrays that the factors are."""
        scale, *bias = (a.reshape(-1) for a in factors)
        if self.kind is RMSNorm:
            return RMSNorm(scale, self.epsilon)
        return LayerNorm(scale, bias[0] if bias else None, self.epsilon)


def find(body: Body, y: Var, context: Context) -> Found | None:
    """The norm of y's rows, if nobody else needs what it is made of. Others may use y."""
    width = type_of(y).shape[-1]
    vectors: list[Atom] = []

    def as_vector(var: Var) -> Term | None:
        found = None if var is y else vector(body, var, (width,))
        if found is None:
            return None
        if found not in vectors:
            vectors.append(found)
        return "vector", vectors.index(found)

    best = None
    for index in _after(body, y, as_vector, context):
        (result,) = body.equations[index].outvars
        if type_of(result) != type_of(y):
            continue
        written = term(body, result, y, as_vector)
        matched = None if written is None else _match(simple(written), width)
        members = None if matched is None else _between(body, y, result, as_vector)
        if matched is not None and members is not None:
            kind, epsilon, factors = matched
            best = Found(kind, epsilon, tuple(vectors[i] for i in factors), result, members)
    return best


def _after(body: Body, y: Var, as_vector: Any, context: Context) -> Iterable[int]:
    """The first equations that compute something from y and vectors alone."""
    inside, found = {y}, list[int]()
    todo = sorted(u for u in body.users.get(y, ()) if u != Body.RESULT)
    while todo and len(found) < MOST:
        index = todo.pop(0)
        equation = body.equations[index]
        if index in found or not context.is_free(index) or has_effects(equation):
            continue
        variables = [atom for atom in equation.invars if isinstance(atom, Var)]
        if len(equation.outvars) > 1 or not all(
            var in inside or is_constant(body, var) or as_vector(var) is not None
            for var in variables
        ):
            continue
        found.append(index)
        inside.update(equation.outvars)
        users = body.users.get(equation.outvars[0], ())
        todo = sorted({*todo, *(u for u in users if u != Body.RESULT)})
    return found


def _between(body: Body, y: Var, result: Var, as_vector: Any) -> tuple[int, ...] | None:
    """The equations from y to the result; None: others need what is between."""
    members: set[int] = set()
    todo = [result]
    while todo:
        var = todo.pop()
        index = body.made_by(var)
        if index is None or index in members or var is y or as_vector(var) is not None:
            continue
        if is_constant(body, var):
            continue
        members.add(index)
        todo += [atom for atom in body.equations[index].invars if isinstance(atom, Var)]
    made = [var for index in members for var in body.equations[index].outvars if var is not result]
    needed = any(user not in members for var in made for user in body.users.get(var, ()))
    return None if needed else tuple(sorted(members))


# ---- Terms, simplified ---------------------------------------------------------------------------


def simple(written: Term) -> Term:
    """Sums as ("add", number, terms), products as ("mul", number, factors), both flat and sorted;
    quotients as products; no casts."""
    if not isinstance(written, tuple) or written[0] == "vector":
        return written
    name, said, *operands = written
    ops = [simple(one) for one in operands]
    if name == "convert_element_type":
        return ops[0]
    if name in ("add", "add_any"):
        return _sum(ops)
    if name in ("sub", "neg"):
        return _sum([*ops[:-1], _times([-1.0, ops[-1]])])
    if name == "mul":
        return _times(ops)
    if name == "square" or (name == "integer_pow" and dict(said)["y"] == "2"):
        return "pow2", ops[0]
    if name == "div":
        return _times([ops[0], _inverse(ops[1])])
    if name == "gt" and all(isinstance(one, float) for one in ops):
        return float(ops[0] > ops[1])
    if name == "select_n" and isinstance(ops[0], float):  # `jnp.var` asks for enough elements
        return ops[1 + int(ops[0])]
    if name in ("sum", "rsqrt", "max"):
        return name, *ops
    return name, said, *ops


def _inverse(of: Term) -> Term:
    if isinstance(of, float) and of:
        return 1 / of
    if isinstance(of, tuple) and of[0] == "sqrt":
        return "rsqrt", of[-1]
    return "inverse", of


def _sum(terms: Sequence[Term]) -> Term:
    return _flat("add", 0.0, terms, lambda a, b: a + b)


def _times(factors: Sequence[Term]) -> Term:
    number, rest = 1.0, list[Term]()
    for one in factors:
        if isinstance(one, float):
            number *= one
        elif isinstance(one, tuple) and one[0] == "mul":
            number *= one[1]
            rest += one[2]
        elif one in rest:
            rest.remove(one)
            rest.append(("pow2", one))
        else:
            rest.append(one)
    return _whole("mul", number, 1.0, rest)


def _flat(name: str, number: float, terms: Sequence[Term], join: Any) -> Term:
    unit, rest = number, list[Term]()
    for one in terms:
        if isinstance(one, float):
            number = join(number, one)
        elif isinstance(one, tuple) and one[0] == name:
            number = join(number, one[1])
            rest += one[2]
        else:
            rest.append(one)
    return _whole(name, number, unit, rest)


def _whole(name: str, number: float, unit: float, rest: list[Term]) -> Term:
    if not rest:
        return number
    if number == unit and len(rest) == 1:
        return rest[0]
    return name, number, tuple(sorted(rest, key=repr))


def _match(
    found: Term, width: int
) -> tuple[type[RMSNorm] | type[LayerNorm], float, tuple[int, ...]] | None:
    """(kind, epsilon, the vectors that are scale and bias)."""
    bias: tuple[int, ...] = ()
    if isinstance(found, tuple) and found[0] == "add" and found[1] == 0 and len(found[2]) == 2:
        vectors = [one for one in found[2] if _is(one, "vector")]
        rest = [one for one in found[2] if not _is(one, "vector")]
        if len(vectors) != 1:
            return None
        bias, found = (vectors[0][1],), rest[0]
    if not _is(found, "mul") or found[1] != 1 or len(found[2]) != 3:
        return None
    scales = [one for one in found[2] if _is(one, "vector")]
    roots = [one for one in found[2] if _is(one, "rsqrt") and _is(one[1], "add")]
    rows = [one for one in found[2] if one not in scales and one not in roots]
    if not len(scales) == len(roots) == len(rows) == 1 or len(roots[0][1][2]) != 1:
        return None
    _, epsilon, (spread,) = roots[0][1]
    mean = _times([1 / width, ("sum", "x")])
    centred = _sum(["x", _times([-1.0, mean])])
    squares = _times([1 / width, ("sum", ("pow2", "x"))])
    fast = _sum([squares, _times([-1.0, ("pow2", mean)])])
    slow = _times([1 / width, ("sum", ("pow2", centred))])
    if rows[0] == "x" and not bias and _alike(spread, squares):
        return RMSNorm, epsilon, (scales[0][1],)
    variances = (slow, fast, ("max", *sorted((0.0, fast), key=repr)))
    if _alike(rows[0], centred) and any(_alike(spread, one) for one in variances):
        return LayerNorm, epsilon, (scales[0][1], *bias)
    return None


def _is(found: Term, name: str) -> bool:
    return isinstance(found, tuple) and found[0] == name


def _alike(a: Term, b: Term) -> bool:
    """Whether two terms are equal, numbers up to the rounding of float32."""
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=1e-5)
    if not (isinstance(a, tuple) and isinstance(b, tuple)):
        return bool(a == b)
    return len(a) == len(b) and all(_alike(one, other) for one, other in zip(a, b, strict=True))
