"""What is done to products before anybody else needs them: bias, activation, gate."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np
from jax.extend.core import Literal, Var

from ..bodies import Atom, Body, dropped_with, has_effects, type_of
from ..expressions import activations, is_constant, term
from ..products import Product
from ..sites import Context
from ..views import reshaped
from .summands import ADDS

#: The most equations of an activation.
MOST = 12


@dataclasses.dataclass(frozen=True)
class Found:
    """An epilogue of :func:`jflux.all_gather_matmul`.

    Attributes:
      biases: of each product, or None.
      results: what the op makes: of each product, or the one gated result.
      products: the products of an activated or gated result, if others need them too.
      members: the equations that it stands for.
    """

    biases: tuple[Atom | None, ...]
    activation: str | None
    gated: bool
    results: tuple[Var, ...]
    members: tuple[int, ...]
    products: tuple[Var, ...] = ()

    @property
    def inputs(self) -> tuple[Atom, ...]:
        return tuple(bias for bias in self.biases if bias is not None)

    def bias(self, arrays: Sequence[jax.Array]) -> list[jax.Array | None] | None:
        """The op's argument, of `inputs`."""
        if not arrays:
            return None
        rest = iter(arrays)
        return [None if b is None else reshaped(a := next(rest), (a.size,)) for b in self.biases]


@dataclasses.dataclass(frozen=True)
class _Step:
    """What was made of one product so far."""

    result: Var
    bias: Atom | None = None
    members: tuple[int, ...] = ()


def find(body: Body, products: Sequence[Product], context: Context) -> Found:
    """The epilogue of products of one form, which come in the op's order: a gate before the other.
    One that does nothing, if there is none."""
    steps = [_biased(body, product, context) for product in products]
    if len(products) == 2:
        gated = _gated(body, steps[0], steps[1], context)
        if gated is not None:
            return gated
    if len(products) == 1:
        (one,) = steps
        activated = _activated(body, one.result, context)
        if activated is not None:
            name, result, members = activated
            return Found((one.bias,), name, False, (result,), (*one.members, *members))
        activated = _activated_with_product(body, one.result, context)
        if activated is not None and one.bias is None:
            name, result, members = activated
            return Found((None,), name, False, (result,), members, (one.result,))
    return Found(
        tuple(step.bias for step in steps), None, False, tuple(step.result for step in steps),
        tuple(member for step in steps for member in step.members),
    )  # fmt: skip


def none(products: Sequence[Product]) -> Found:
    """One that does nothing."""
    results = tuple(product.equation.outvars[0] for product in products)
    return Found((None,) * len(products), None, False, results, ())


def _biased(body: Body, product: Product, context: Context) -> _Step:
    (y,) = product.equation.outvars
    user = body.only_user(y)
    plain = _Step(y)
    if product.side == 1 or user is None or not context.is_free(user):
        return plain
    equation = body.equations[user]
    if equation.primitive.name not in ADDS or type_of(equation.outvars[0]) != type_of(y):
        return plain
    one, other = equation.invars
    bias = vector(body, other if one is y else one, product.w.n)
    if bias is None or type_of(bias).dtype != type_of(y).dtype:
        return plain
    return _Step(equation.outvars[0], bias, (user,))


def vector(body: Body, atom: Atom, columns: tuple[int, ...]) -> Atom | None:
    """The array of so many columns that is the same in all rows of this one."""
    while not isinstance(atom, Literal):
        shape = type_of(atom).shape
        lead = len(shape) - len(columns)
        if lead >= 0 and shape[lead:] == columns and set(shape[:lead]) <= {1}:
            return atom
        index = body.made_by(atom)
        if index is None or body.equations[index].primitive.name != "broadcast_in_dim":
            return None
        equation = body.equations[index]
        (source,) = equation.invars
        dimensions = tuple(equation.params["broadcast_dimensions"])
        if dimensions != tuple(range(len(shape) - len(dimensions), len(shape))):
            return None
        atom = source
    return None


def _activated(body: Body, y: Var, context: Context) -> tuple[str, Var, tuple[int, ...]] | None:
    """(the activation, its result, its equations) of a y that nothing else uses."""
    inside: dict[Var, None] = {y: None}
    members: list[int] = []
    while len(members) < MOST:
        users = sorted({u for var in inside for u in body.users.get(var, ())} - set(members))
        if not users or users[0] == Body.RESULT:
            return None
        index = users[0]
        equation = body.equations[index]
        fits = context.is_free(index) and not has_effects(equation)
        variables = [one for one in equation.invars if isinstance(one, Var)]
        others = [one for one in variables if one not in inside]
        if not fits or len(equation.outvars) > 1 or not all(is_constant(body, o) for o in others):
            return None
        members.append(index)
        (result,) = equation.outvars
        inside[result] = None
        closed = all(
            user in members
            for var in inside
            if var is not result
            for user in body.users.get(var, ())
        )
        if closed and type_of(result) == type_of(y):
            name = _name(body, result, y)
            if name is not None and not _is_copied(body, result):
                return name, result, tuple(members)
    return None


def _activated_with_product(
    body: Body, y: Var, context: Context
) -> tuple[str, Var, tuple[int, ...]] | None:
    """The same of a y that others need too. The last equation makes nothing else."""
    inside, seen = [y], set[int]()
    found: tuple[str, Var, tuple[int, ...]] | None = None
    while inside:
        var = inside.pop(0)
        for user in body.users.get(var, ()):
            if user == Body.RESULT or user in seen or len(seen) == 2 * MOST:
                continue
            seen.add(user)
            equation = body.equations[user]
            if len(equation.outvars) > 1 or not context.is_free(user) or has_effects(equation):
                continue
            (result,) = equation.outvars
            if term(body, result, y, casts=True) is None:
                continue
            inside.append(result)
            if type_of(result) == type_of(y) and (name := _name(body, result, y)) is not None:
                found = name, result, (user,)
    return found


def _is_copied(body: Body, var: Var) -> bool:
    """Whether nothing but a copy is made of it: that is the activation's result, then."""
    user = body.only_user(var)
    return user is not None and body.equations[user].primitive.name == "copy"


def _gated(body: Body, gate: _Step, other: _Step, context: Context) -> Found | None:
    """``activation(gate) * other``. Others may need both, for derivatives."""
    wanted = type_of(gate.result)
    for var in (other.result, *_casts(body, other.result)):
        for user in body.users.get(var, ()):
            equation = body.equations[user]
            if user == Body.RESULT or equation.primitive.name != "mul":
                continue
            one, two = equation.invars
            activated = two if one is var else one
            name = _name(body, activated, gate.result)
            members, result = [user], equation.outvars[0]
            if type_of(result) != wanted and (last := body.only_user(result)) is not None:
                members.append(last)  # a cast, if it is anything that fits
                result = body.equations[last].outvars[0]
            casts = (body.equations[i].primitive.name for i in members[1:])
            fits = type_of(result) == wanted and set(casts) <= {"convert_element_type"}
            if name is None or not fits or not all(map(context.is_free, members)):
                continue
            gone = dropped_with(body, members, ())
            both = gate.result, other.result
            is_needed = any(u not in gone for v in both for u in body.users.get(v, ()))
            made = [i for i in _between(body, gate.result, activated) if i in gone]
            every = (*gate.members, *other.members, *made, *members)
            if not is_needed or (gate.bias is None and other.bias is None):
                products = both if is_needed else ()
                return Found((gate.bias, other.bias), name, True, (result,), every, products)
    return None


def _between(body: Body, y: Var, result: Atom) -> list[int]:
    """The equations that make `result` of y."""
    found: list[int] = []
    todo = [result]
    while todo:
        atom = todo.pop()
        index = None if atom is y else body.made_by(atom)
        if index is not None and index not in found and not is_constant(body, atom):
            found.append(index)
            todo += body.equations[index].invars
    return found


def _casts(body: Body, var: Var) -> list[Var]:
    users = [body.equations[u] for u in body.users.get(var, ()) if u != Body.RESULT]
    return [e.outvars[0] for e in users if e.primitive.name == "convert_element_type"]


def _name(body: Body, result: Atom, y: Var) -> str | None:
    """The activation that makes `result` of y, in whichever type."""
    written = term(body, result, y, casts=True)
    own, wide = activations(np.dtype(type_of(y).dtype)), activations(np.dtype(np.float32))
    return None if written is None else own.get(written) or wide.get(written)
