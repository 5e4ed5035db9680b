"""A `dot_general` as rows of x times a matrix w."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from .bodies import Atom, Body, type_of
from .views import reshaped


@dataclasses.dataclass(frozen=True)
class Matrix:
    """The other operand as a matrix [k, n], or [n, k].

    Attributes:
      atom: the array that it is made of.
      permutation: of that array's dimensions, after which those of k follow each other, and those
        of n; None: they do.
      transposed: [n, k].
      k, n: sizes of the dimensions that are contracted, and of the others.
    """

    atom: Atom
    permutation: tuple[int, ...] | None
    transposed: bool
    k: tuple[int, ...]
    n: tuple[int, ...]

    @property
    def columns(self) -> int:
        return math.prod(self.n)

    def made_of(self, array: jax.Array) -> jax.Array:
        """The matrix."""
        if self.permutation is not None:
            array = lax.transpose(array, self.permutation)
        k = math.prod(self.k)
        return reshaped(array, (self.columns, k) if self.transposed else (k, self.columns))


@dataclasses.dataclass(frozen=True)
class Product:
    """x times a matrix.

    Attributes:
      index: of the equation.
      side: which of its operands x is.
      contracted: x's dimensions that are contracted, in the order of the matrix's k.
      rows: x's other dimensions, in order. They are the result's first ones, and the matrix's n
        the last ones; or the other way round, if x is the second operand.
    """

    index: int
    equation: JaxprEqn
    side: int
    x: Atom
    contracted: tuple[int, ...]
    rows: tuple[int, ...]
    w: Matrix

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(type_of(self.equation.outvars[0]).dtype)

    @property
    def precision(self) -> Any:
        return self.equation.params["precision"]

    def result(self, y: jax.Array, rows: Sequence[int]) -> jax.Array:
        """The equation's result, of y [..., n] in which x's rows have these sizes."""
        y = reshaped(y, (*rows, *self.w.n))
        if self.side == 0:
            return y
        of_rows, of_n = range(len(rows)), range(len(rows), y.ndim)
        return lax.transpose(y, (*of_n, *of_rows))


def as_product(body: Body, index: int, side: int) -> Product | str:
    """The product of an equation, whose operand `side` is x; or why it is none."""
    equation = body.equations[index]
    contracted, batch = equation.params["dimension_numbers"]
    if batch[0]:
        return "the product has batch dimensions"
    x, w = equation.invars[side], equation.invars[1 - side]
    if type_of(x).dtype != type_of(w).dtype:
        return f"the product's operands are {type_of(x).dtype} and {type_of(w).dtype}"
    if not (hasattr(type_of(x), "ndim") and type_of(x).size and type_of(w).size):
        return "an operand is empty"
    pairs = list(zip(contracted[1 - side], contracted[side], strict=True))
    if not pairs:
        return "nothing is contracted"
    if len(pairs) == type_of(w).ndim:
        return "the other operand is a vector"
    matrix, of_x = _before_transpose(body, w, pairs) or _matrix(w, pairs)
    rows = tuple(i for i in range(type_of(x).ndim) if i not in of_x)
    return Product(index, equation, side, x, of_x, rows, matrix)


Pairs = Sequence[tuple[int, int]]  # dimensions of (w, x) that are contracted with each other


def _before_transpose(body: Body, w: Atom, pairs: Pairs) -> tuple[Matrix, tuple[int, ...]] | None:
    """The matrix of what was transposed to w, if no copy has to be made of that."""
    if (found := body.before_transpose(w)) is None:
        return None
    before, came_from = found
    contracted = {i for i, _ in pairs}
    of_n = [came_from[i] for i in range(type_of(w).ndim) if i not in contracted]
    if of_n != sorted(of_n):
        return None
    matrix, of_x = _matrix(before, [(came_from[i], j) for i, j in pairs])
    return None if matrix.permutation else (matrix, of_x)


def _matrix(w: Atom, pairs: Pairs) -> tuple[Matrix, tuple[int, ...]]:
    """(the matrix, x's contracted dimensions in the order of its k)."""
    shape, ndim = type_of(w).shape, type_of(w).ndim
    of_w, of_x = zip(*sorted(pairs), strict=True)
    rest = tuple(i for i in range(ndim) if i not in of_w)
    k, n = tuple(shape[i] for i in of_w), tuple(shape[i] for i in rest)
    if of_w == tuple(range(len(of_w))):
        return Matrix(w, None, False, k, n), of_x
    if rest == tuple(range(len(rest))):
        return Matrix(w, None, True, k, n), of_x
    return Matrix(w, (*of_w, *rest), False, k, n), of_x
