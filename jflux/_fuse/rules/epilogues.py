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
    if len(products) == 1 and (activated := _activated(body, steps[0], context)) is not None:
        return activated
    if len(products) == 2 and (gated := _gated(body, steps[0], steps[1], context)) is not None:
        return gated
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


def _activated(body: Body, step: _Step, context: Context) -> Found | None:
    """``activation(product)``."""
    inside, seen = [step.result], set[int]()
    found: Found | None = None
    while inside:
        for user in body.users.get(inside.pop(0), ()):
            if user == Body.RESULT or user in seen or len(seen) == 2 * MOST:
                continue
            seen.add(user)
            equation = body.equations[user]
            if len(equation.outvars) > 1 or has_effects(equation):
                continue
            (result,) = equation.outvars
            if term(body, result, step.result, casts=True) is None:
                continue
            inside.append(result)
            name = _name(body, result, step.result)
            if name is not None and type_of(result) == type_of(step.result):
                found = _of_results(body, [step], name, result, result, [user], context) or found
    return found


def _gated(body: Body, gate: _Step, other: _Step, context: Context) -> Found | None:
    """``activation(gate) * other``."""
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
            if name is None or not fits:
                continue
            steps = [gate, other]
            found = _of_results(body, steps, name, activated, result, members, context)
            if found is not None:
                return found
    return None


def _of_results(
    body: Body,
    steps: Sequence[_Step],
    name: str,
    activated: Atom,
    result: Var,
    last: Sequence[int],
    context: Context,
) -> Found | None:
    """The epilogue that makes `result` by the equations `last`, the first product activated. If
    others need the products too, for derivatives, the op makes them as well."""
    made = tuple(step.result for step in steps)
    gone = dropped_with(body, last, made)
    between = [i for i in _between(body, made[0], activated) if i in gone]
    members = dict.fromkeys((*between, *last))
    if not all(map(context.is_free, members)):
        return None
    is_needed = any(user not in gone for var in made for user in body.users.get(var, ()))
    biases = tuple(step.bias for step in steps)
    if is_needed and any(bias is not None for bias in biases):
        return None
    every = (*(member for step in steps for member in step.members), *members)
    products = made if is_needed else ()
    return Found(biases, name, len(steps) == 2, (result,), every, products)


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
