"""The products that multiply what a collective has made, and who else uses that."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Var

from ..bodies import Body, type_of
from ..products import Product, as_product
from ..sites import Context
from ..views import Dimension, View, rearranged


@dataclasses.dataclass(frozen=True)
class Seen:
    """A view of the collective's result.

    Attributes:
      parent: the variable that it is a view of, and the equation that makes it; None: it is the
        result itself.
    """

    view: View
    parent: tuple[Var, int] | None


@dataclasses.dataclass(frozen=True)
class Form:
    """How products of one call take the result: as [*rows, *contracted].

    Attributes:
      rows: with the dimensions that the collective has made as they were.
    """

    rows: tuple[Dimension, ...]
    contracted: Dimension
    casts: tuple[np.dtype, ...]
    transposed: bool
    dtype: np.dtype
    precision: Any

    @property
    def x(self) -> list[Dimension]:
        return [*self.rows, self.contracted]


@dataclasses.dataclass(frozen=True)
class Consumers:
    """All who use what a collective has made.

    Attributes:
      made: its result.
      seen: all views of it, itself first.
      units: the dimensions of the result that the collective has made longer or shorter.
      members: its equation, and others that make the same of the same array.
    """

    body: Body
    made: Var
    seen: dict[Var, Seen]
    units: list[Dimension]
    members: tuple[int, ...]

    @classmethod
    def of(cls, body: Body, index: int, moved: Sequence[int], context: Context) -> Consumers:
        """Of a collective's equation. `moved`: the dimensions that it makes longer or shorter."""
        (made,) = body.equations[index].outvars
        view = View.of(type_of(made).shape)
        members = (index, *_twins(body, index, context))
        seen = {var: Seen(view, None) for i in members for var in body.equations[i].outvars}
        todo = list(seen)
        while todo:
            var = todo.pop()
            for user in body.users.get(var, ()):
                if user == Body.RESULT or not context.is_free(user):
                    continue
                if len(body.equations[user].invars) != 1:
                    continue
                after = seen[var].view.through(body.equations[user])
                if after is not None:
                    (out,) = body.equations[user].outvars
                    seen[out] = Seen(after, (var, user))
                    todo.append(out)
        resolved = view.resolved()
        return cls(body, made, seen, [resolved[i] for i in moved], members)

    def products(self, context: Context) -> Iterator[tuple[Product, View] | str]:
        """The products of each view, or why one is none."""
        for var, one in self.seen.items():
            for user in self.body.users.get(var, ()):
                if user == Body.RESULT or self.body.equations[user].primitive.name != "dot_general":
                    continue
                if not context.is_free(user):
                    yield "the product belongs to another site"
                    continue
                side = list(self.body.equations[user].invars).index(var)
                product = as_product(self.body, user, side)
                yield product if isinstance(product, str) else (product, one.view)

    def form(
        self,
        product: Product,
        view: View,
        op: str,
        context: Context,
        why_not_contracted: str | None = None,
    ) -> Form | str:
        """How a product takes it, or why the op does not. `why_not_contracted`: why it does not if
        contracted dimensions have a part of those that the collective made."""
        types = [np.dtype(type_of(self.made).dtype), *view.casts]
        if any(after.itemsize > before.itemsize for before, after in itertools.pairwise(types)):
            return f"more bytes would travel: its result is cast from {types[0]} to {types[-1]}"
        if not all(jnp.issubdtype(one, jnp.floating) for one in types[1:]):
            return f"its result is cast to {types[-1]}"
        if why := context.why_not_of(op, types[-1]):
            return why
        dimensions = view.resolved()
        contracted = tuple(atom for i in product.contracted for atom in dimensions[i])
        rows: list[Dimension] = [(atom,) for i in product.rows for atom in dimensions[i]]
        for unit in self.units:
            if not unit:
                return "the collective's dimension has one element"
            if set(unit) & set(contracted):
                if why_not_contracted is not None:
                    return why_not_contracted
                if contracted[: len(unit)] != unit:
                    return "the collective's dimension is not the first one that is contracted"
                continue
            at = rows.index(unit[:1])
            if rows[at : at + len(unit)] != [(atom,) for atom in unit]:
                return "the collective's dimension is taken apart before the product"
            rows[at : at + len(unit)] = [unit]
        if _is_copied(self.body, product):
            return "the product's result would be transposed"
        return Form(
            tuple(rows), contracted, view.casts, product.w.transposed, product.dtype,
            product.precision,
        )  # fmt: skip

    def operand(self, x: jax.Array, form: Form, moved: Sequence[int]) -> jax.Array:
        """The collective's operand, in which the dimensions `moved` have other sizes, as x of the
        op."""
        atoms = self.seen[self.made].view.atoms
        now, wanted = list(self.seen[self.made].view.resolved()), form.x
        for dimension, unit in zip(moved, self.units, strict=True):
            part = now[dimension] = atoms.new(x.shape[dimension])
            for i, one in enumerate(wanted):
                if one[: len(unit)] == unit:
                    wanted[i] = (*part, *one[len(unit) :])
        return rearranged(x, atoms, now, wanted)

    def view_of(self, var: Var, x: Any, form: Form) -> jax.Array:
        """One of `kept`, of what the op has made of x."""
        view = self.seen[var].view
        return rearranged(x, view.atoms, form.x, view.resolved())

    def kept(self, form: Form, members: Sequence[int]) -> list[Var] | str:
        """The arrays, cast as the form's, that others than the members need; or why they cannot
        have them."""
        views = {one.parent[1] for one in self.seen.values() if one.parent}
        casts, found = form.casts, list[Var]()
        for var, one in self.seen.items():
            if all(user in members or user in views for user in self.body.users.get(var, ())):
                continue
            if one.view.casts[: len(casts)] != casts:
                return "its result is also used in the type before its cast"
            while one.parent and len(self.seen[one.parent[0]].view.casts) >= len(casts):
                var = one.parent[0]
                one = self.seen[var]
            if var not in found:
                found.append(var)
        return found

    def casts_to(self, kept: Sequence[Var]) -> list[int]:
        """The equations that make `kept`, unless the collective does."""
        parents = [self.seen[var].parent for var in kept]
        return [parent[1] for parent in parents if parent is not None]


def _twins(body: Body, index: int, context: Context) -> list[int]:
    """Other equations that do the same with the same array. (XLA makes one of them all.)"""
    equation = body.equations[index]
    found = []
    for user in body.users.get(cast(Var, equation.invars[0]), ()):
        other = body.equations[user]
        if user in (index, Body.RESULT) or other.primitive is not equation.primitive:
            continue
        if other.params == equation.params and context.is_free(user):
            found.append(user)
    return found


def _is_copied(body: Body, product: Product) -> bool:
    """Whether the op's result, in which n is last, would be copied to be what is wanted: XLA's
    product could write it so, with rows last."""
    n, rows = len(product.w.n), len(product.rows)
    last = tuple(range(rows, n + rows)) if product.side == 0 else tuple(range(n))  # n's dimensions
    user = body.only_user(product.equation.outvars[0])
    if user is None or body.equations[user].primitive.name != "transpose":
        return product.side == 1
    wanted = tuple(body.equations[user].params["permutation"])
    return wanted[:n] == last if product.side == 0 else wanted[-1] != last[-1]


def result_of(product: Product, y: jax.Array) -> jax.Array:
    """The product's result, of the op's y."""
    x = type_of(product.equation.invars[product.side])
    return product.result(y, [x.shape[i] for i in product.rows])
