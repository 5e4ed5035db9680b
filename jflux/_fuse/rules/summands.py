"""The products whose sum a collective takes, and what is added to its result."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import JaxprEqn, Literal, Var

from ..bodies import Atom, Body, type_of
from ..products import Product, as_product
from ..sites import Context
from ..views import Atoms, Dimension, View, rearranged, reshaped

ADDS = ("add", "add_any")
NAME = "name"  # of checkpoint_name

NOT_LAST = (
    "its product is not contracted along the last dimension of either operand, as the gradient of "
    "a weight is not"
)


@dataclasses.dataclass(frozen=True)
class Layout:
    """How the array that a collective takes is made of y [*rows, n], by atoms that are numbered in
    y's order.

    Attributes:
      sizes: of the atoms.
      rows: the dimensions of y's rows.
      columns: all atoms of n.
      taken: the dimensions of the array that the collective takes.
      moved: those of its dimensions that the collective makes longer or shorter.
      units: the atoms of each of these: a dimension of rows, or the first atoms of n.
    """

    sizes: tuple[int, ...]
    rows: tuple[Dimension, ...]
    columns: Dimension
    taken: tuple[Dimension, ...]
    moved: tuple[int, ...]

    @property
    def units(self) -> list[Dimension]:
        return [self.taken[i] for i in self.moved]

    @property
    def axes(self) -> list[int]:
        """Which of y's dimensions they are in."""
        rows = list(self.rows)
        return [rows.index(unit) if unit in rows else len(rows) for unit in self.units]

    def row_sizes(self) -> list[int]:
        return [View.of(self.sizes).atoms.size(d) for d in self.rows]

    def of_result(self, y: jax.Array, factors: Sequence[Fraction]) -> jax.Array:
        """The collective's result, of the op's. `factors`: by which it changes the sizes of the
        dimensions that it moves."""
        atoms, y_dimensions, result = self._after(factors)
        return rearranged(y, atoms, y_dimensions, result)

    def as_result(self, array: jax.Array, factors: Sequence[Fraction]) -> jax.Array:
        """`of_result`, the other way round."""
        atoms, y_dimensions, result = self._after(factors)
        return rearranged(array, atoms, result, y_dimensions)

    def _after(self, factors: Sequence[Fraction]) -> tuple[Atoms, list[Dimension], list[Dimension]]:
        """The dimensions of the op's result and of the collective's."""
        atoms = View.of(self.sizes).atoms
        y, result = [*self.rows, self.columns], list(self.taken)
        for at, unit, factor in zip(self.moved, self.units, factors, strict=True):
            part = result[at] = atoms.new(int(atoms.size(unit) * factor))
            for i, dimension in enumerate(y):
                if dimension[: len(unit)] == unit:
                    y[i] = (*part, *dimension[len(unit) :])
        return atoms, y, result


@dataclasses.dataclass(frozen=True)
class Term:
    """One product of the sum."""

    product: Product
    layout: Layout

    def x(self, array: jax.Array) -> jax.Array:
        """[*rows, k]."""
        order = (*self.product.rows, *self.product.contracted)
        if order != tuple(range(array.ndim)):
            array = lax.transpose(array, order)
        return reshaped(array, (*self.layout.row_sizes(), math.prod(self.product.w.k)))


@dataclasses.dataclass(frozen=True)
class Sum:
    """The sum of the terms.

    Attributes:
      members: the equations that make it, of products and what is between.
      dtype: of the summed array.
      names: by `checkpoint_name`, of what is summed.
    """

    terms: tuple[Term, ...]
    members: tuple[int, ...]
    dtype: np.dtype
    names: tuple[str, ...]

    @property
    def inputs(self) -> tuple[Atom, ...]:
        """All x, and all w."""
        products = [term.product for term in self.terms]
        return (*(p.x for p in products), *(p.w.atom for p in products))

    @property
    def options(self) -> dict[str, Any]:
        """Of the op."""
        product = self.terms[0].product
        return {
            "transpose_rhs": product.w.transposed, "preferred_element_type": self.dtype,
            "precision": product.precision,
        }  # fmt: skip

    def named(self, y: jax.Array) -> jax.Array:
        """The collective's result by the names of what it takes, which is not there any more."""
        return named(y, self.names)

    def operands(self, arrays: Sequence[jax.Array]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """(all x, all w) as the op takes them, of `inputs`."""
        count = len(self.terms)
        xs = tuple(t.x(a) for t, a in zip(self.terms, arrays[:count], strict=True))
        ws = tuple(t.product.w.made_of(a) for t, a in zip(self.terms, arrays[count:], strict=True))
        return xs, ws


def named(y: jax.Array, names: Sequence[str]) -> jax.Array:
    """y by these names."""
    return functools.reduce(checkpoint_name, names, y)


def find(
    body: Body,
    atom: Atom,
    moved: Sequence[int],
    op: str,
    context: Context,
    columns: str | None = None,
) -> Sum | str:
    """The sum that a collective takes; or why it is none.

    Args:
      moved: the dimensions that the collective makes longer or shorter.
      columns: why these can be no columns of the product; None: they can.
    """
    found = _leaves(body, atom, context)
    if isinstance(found, str):
        return found
    leaves, members = found
    terms = []
    for index, after in leaves:
        equation = body.equations[index]
        view: View | None = View.of(type_of(equation.outvars[0]).shape)
        for user in reversed(after):
            view = _through(view, body.equations[user])
        assert view is not None  # as `_leaves` found
        if why := _why_rounded(np.dtype(type_of(equation.outvars[0]).dtype), view.casts):
            return why
        term = _term(body, index, view, moved, columns)
        if isinstance(term, str):
            return term
        terms.append(term)
    first = terms[0]
    for dtype in (type_of(first.product.x).dtype, type_of(atom).dtype):
        if why := context.why_not_of(op, dtype):
            return why
    for term in terms[1:]:
        one, other = first.product, term.product
        if (one.w.transposed, one.precision) != (other.w.transposed, other.precision):
            return "the weights of the sum's products are stored differently"
        if term.layout != first.layout or type_of(one.x).dtype != type_of(other.x).dtype:
            return "the sum's products have different layouts or types"
    made_by = (body.equations[member] for member in members)
    names = tuple(one.params["name"] for one in made_by if one.primitive.name == NAME)
    return Sum(tuple(terms), tuple(members), np.dtype(type_of(atom).dtype), names)


def _leaves(
    body: Body, summed: Atom, context: Context
) -> tuple[list[tuple[int, list[int]]], list[int]] | str:
    """(products, and the views after each, the last first; all equations of the sum), or why it is
    no sum of products."""
    leaves: list[tuple[int, list[int]]] = []
    members: list[int] = []
    todo: list[tuple[Atom, list[int]]] = [(summed, [])]
    while todo:
        atom, after = todo.pop()
        index = body.made_by(atom)
        if index is None:
            return "what is summed is not a product"
        equation = body.equations[index]
        name = equation.primitive.name
        if name != "dot_general" and name not in ADDS and _view_of(body, index) is None:
            return f"what is summed comes from {name}, not from a product"
        assert isinstance(atom, Var)
        if len(body.users[atom]) > 1:
            return f"{'the product' if name == 'dot_general' else 'what is summed'} has other uses"
        if not context.is_free(index):
            return "the product belongs to another site"
        members.append(index)
        if name == "dot_general":
            leaves.append((index, after))
        elif name not in ADDS:
            todo.append((equation.invars[0], [*after, index]))
        elif equation.invars[0] is equation.invars[1]:
            return "a product is added to itself"
        elif any(type_of(one).shape != type_of(atom).shape for one in equation.invars):
            return "what is summed is not a product"
        else:
            # JAX sums cotangents, by add_any, from the last use to the first. Here they come in the
            # order of their uses, as in an op's own gradient: what memory XLA needs may depend on
            # it.
            operands = equation.invars if name == "add_any" else equation.invars[::-1]
            todo += [(operand, after) for operand in operands]
    return leaves, members


def _view_of(body: Body, index: int) -> View | None:
    equation = body.equations[index]
    if len(equation.invars) != 1 or not type_of(equation.invars[0]).size:
        return None
    return _through(View.of(type_of(equation.invars[0]).shape), equation)


def _through(view: View | None, equation: JaxprEqn) -> View | None:
    return view if equation.primitive.name == NAME else view and view.through(equation)


def _why_rounded(dtype: np.dtype, casts: Sequence[np.dtype]) -> str | None:
    """Why a product in `dtype` that is cast so is no product in the last of these types."""
    for wider in casts:
        if wider.itemsize >= dtype.itemsize or not _is_float(wider) or not _is_float(dtype):
            return f"the product is rounded to {dtype}, and summed in {wider}"
        dtype = wider
    return None


def _is_float(dtype: np.dtype) -> bool:
    return bool(jax.numpy.issubdtype(dtype, jax.numpy.floating))


def _term(
    body: Body, index: int, view: View, moved: Sequence[int], columns: str | None
) -> Term | str:
    reasons = []
    for side in (0, 1):
        product = as_product(body, index, side)
        if isinstance(product, str):
            reasons.append(product)
            continue
        product = _before_transpose(body, product)
        # Dimensions that lie apart are brought together by a copy, which XLA's product needs too.
        if product.contracted[-1] != type_of(product.x).ndim - 1:
            reasons.append(NOT_LAST)
            continue
        if product.w.permutation is not None:
            reasons.append("the product's weight would be copied")
            continue
        layout = _layout(product, view, moved, columns)
        if isinstance(layout, str):
            reasons.append(layout)
        elif _is_copied(layout, side):
            reasons.append("the product's result would be transposed")
        else:
            return Term(product, layout)
    return reasons[0]


def _before_transpose(body: Body, product: Product) -> Product:
    """The same product of what x is the transpose of, if its rows keep their order."""
    if (found := body.before_transpose(product.x)) is None:
        return product
    x, came_from = found
    rows = tuple(came_from[i] for i in product.rows)
    if rows != tuple(sorted(rows)):
        return product
    contracted = tuple(came_from[i] for i in product.contracted)
    return dataclasses.replace(product, x=x, rows=rows, contracted=contracted)


def _is_copied(layout: Layout, side: int) -> bool:
    """Whether the op's result, in which n is last, would be copied to be what the collective takes:
    XLA's product could write it so, with rows last."""
    atoms = [atom for dimension in layout.taken for atom in dimension]
    if side == 0:
        return atoms[: len(layout.columns)] == list(layout.columns) != atoms
    return atoms[-1:] != list(layout.columns[-1:])


def _layout(
    product: Product, view: View, moved: Sequence[int], why_no_columns: str | None
) -> Layout | str:
    result = [view.atoms.resolve(dimension) for dimension in view.source]
    count, ndim = len(product.rows), len(view.source)
    rows = result[:count] if product.side == 0 else result[ndim - count :]
    columns = result[count:] if product.side == 0 else result[: ndim - count]
    of_rows = [atom for dimension in rows for atom in dimension]
    of_columns = [atom for dimension in columns for atom in dimension]
    number = {atom: i for i, atom in enumerate((*of_rows, *of_columns))}
    sizes = tuple(view.atoms.sizes[atom] for atom in number)
    taken = tuple(tuple(number[a] for a in d) for d in view.resolved())
    row_of = list(range(len(of_rows)))  # by atom, which dimension of rows it is in
    n = tuple(range(len(of_rows), len(number)))
    for unit in (taken[i] for i in moved):
        if not unit:
            return "the collective's dimension has one element"
        if unit == n[: len(unit)] and why_no_columns is None:
            continue
        if any(atom >= len(of_rows) for atom in unit):
            return why_no_columns or "the collective's dimension is a part of each column group"
        if unit != tuple(range(unit[0], unit[0] + len(unit))):
            return "the collective's dimension is no dimension of the product's rows"
        for atom in unit:
            row_of[atom] = unit[0]
    groups = itertools.groupby(range(len(of_rows)), key=row_of.__getitem__)
    dimensions = tuple(tuple(group) for _, group in groups) or ((),)  # at least one row
    return Layout(sizes, dimensions, n, taken, tuple(moved))


@dataclasses.dataclass(frozen=True)
class Added:
    """An array that is added to a collective's result.

    Attributes:
      members: the equations that add it.
      array: it, of the result's type and shape.
      result: the sum.
    """

    members: tuple[int, ...]
    array: Atom
    result: Var


def added(body: Body, result: Var, members: Sequence[int], context: Context) -> Added | None:
    """What is added to a result, in its type, or in a wider one to which both are cast, if the sum
    is cast back."""
    found = _added(body, result, context) or _added_wide(body, result, context)
    if found is None or isinstance(found.array, Literal) or found.array is result:
        return None
    one, other = type_of(found.array), type_of(result)
    same = (one.shape, one.dtype) == (other.shape, other.dtype)
    return None if not same or context.depend_on([found.array], members) else found


def _added(body: Body, result: Var, context: Context) -> Added | None:
    """The array that the only user of the result adds to it."""
    user = body.only_user(result)
    if user is None or body.equations[user].primitive.name not in ADDS or not context.is_free(user):
        return None
    one, other = body.equations[user].invars
    return Added((user,), other if one is result else one, body.equations[user].outvars[0])


def _added_wide(body: Body, result: Var, context: Context) -> Added | None:
    """The same through casts: ``(wide(result) + wide(array))``, cast to the result's type."""
    before = _cast(body, body.only_user(result), context)
    if before is None:
        return None
    (wide,) = body.equations[before].outvars
    dtype, wider = (np.dtype(type_of(var).dtype) for var in (result, wide))
    if not (_is_float(dtype) and _is_float(wider) and wider.itemsize > dtype.itemsize):
        return None
    found = _added(body, wide, context)
    if found is None:
        return None
    after = _cast(body, body.only_user(found.result), context)
    # Others may need the array's cast too.
    source = _cast(body, body.made_by(found.array), context)
    if after is None or source is None:
        return None
    (array,), (total,) = body.equations[source].invars, body.equations[after].outvars
    if np.dtype(type_of(total).dtype) != dtype:
        return None
    return Added((before, *found.members, after), array, total)


def _cast(body: Body, index: int | None, context: Context) -> int | None:
    """The equation, if it is a cast that no site has."""
    if index is None or body.equations[index].primitive.name != "convert_element_type":
        return None
    return index if context.is_free(index) else None
