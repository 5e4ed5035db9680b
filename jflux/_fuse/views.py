"""Where the dimensions of an array go, through transposes, reshapes and casts.

A dimension is a tuple of atoms, from the major one to the minor one. An atom is a part of one
dimension of the source. A reshape splits an atom where it splits a dimension::

    [8, 6]                 (a) (b)
    transposed             (b) (a)
    reshaped to [6, 2, 4]  (b) (a1) (a2)
    reshaped to [12, 4]    (b, a1) (a2)

A dimension of size 1 has no atoms.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

Dimension = tuple[int, ...]


class Atoms:
    """The atoms of one source: their sizes, and what they were split into."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.parts: dict[int, tuple[int, int]] = {}

    def new(self, size: int) -> Dimension:
        """A dimension of one atom."""
        if size == 1:
            return ()
        self.sizes.append(size)
        return (len(self.sizes) - 1,)

    def split(self, atom: int, major: int) -> tuple[int, int]:
        """Its two parts, the major one of this size."""
        (one,), (other,) = self.new(major), self.new(self.sizes[atom] // major)
        self.parts[atom] = one, other
        return one, other

    def resolve(self, dimension: Dimension) -> Dimension:
        """The dimension by atoms that are not split."""
        if not any(atom in self.parts for atom in dimension):
            return dimension
        return self.resolve(
            tuple(part for atom in dimension for part in self.parts.get(atom, (atom,)))
        )

    def size(self, dimension: Dimension) -> int:
        return math.prod(self.sizes[atom] for atom in dimension)


@dataclasses.dataclass(frozen=True)
class View:
    """An array made of a source by moving and casting its elements.

    Attributes:
      source: the source's dimensions, before any was split.
      dimensions: of the array, by atoms of the source.
      casts: the types that its elements were cast to, one after the other.
    """

    atoms: Atoms
    source: tuple[Dimension, ...]
    dimensions: tuple[Dimension, ...]
    casts: tuple[np.dtype, ...] = ()

    @classmethod
    def of(cls, shape: Sequence[int]) -> View:
        """A source itself."""
        atoms = Atoms()
        source = tuple(atoms.new(size) for size in shape)
        return cls(atoms, source, source)

    def resolved(self) -> tuple[Dimension, ...]:
        return tuple(map(self.atoms.resolve, self.dimensions))

    def through(self, equation: JaxprEqn) -> View | None:
        """What the equation makes of it, as its only operand; None: no view."""
        name, params = equation.primitive.name, equation.params
        if name in ("pvary", "pcast"):
            return self
        if name == "convert_element_type":
            return dataclasses.replace(self, casts=(*self.casts, np.dtype(params["new_dtype"])))
        if name == "transpose":
            return self._with([self.dimensions[i] for i in params["permutation"]])
        if name == "squeeze":
            gone = set(params["dimensions"])
            return self._with([d for i, d in enumerate(self.dimensions) if i not in gone])
        if name == "reshape" and params["dimensions"] is None:
            return self._reshaped(params["new_sizes"])
        if name == "broadcast_in_dim":
            new: list[Dimension] = [()] * len(params["shape"])
            for at, dimension in zip(params["broadcast_dimensions"], self.dimensions, strict=True):
                new[at] = dimension
            sizes = [self.atoms.size(self.atoms.resolve(d)) for d in new]
            return self._with(new) if sizes == list(params["shape"]) else None
        return None

    def _with(self, dimensions: Sequence[Dimension]) -> View:
        return dataclasses.replace(self, dimensions=tuple(dimensions))

    def _reshaped(self, sizes: Sequence[int]) -> View | None:
        rest = [atom for dimension in self.resolved() for atom in dimension]
        new: list[Dimension] = []
        for size in sizes:
            taken: list[int] = []
            wanted = size
            while wanted > 1:
                atom = rest.pop(0)
                has = self.atoms.sizes[atom]
                if wanted % has == 0:
                    wanted //= has
                elif has % wanted == 0:
                    atom, other = self.atoms.split(atom, wanted)
                    rest.insert(0, other)
                    wanted = 1
                else:
                    return None
                taken.append(atom)
            new.append(tuple(taken))
        return self._with(new)


def rearranged(
    array: jax.Array, atoms: Atoms, now: Sequence[Dimension], wanted: Sequence[Dimension]
) -> jax.Array:
    """An array with these dimensions, with those dimensions. Both have the same atoms."""
    order = [atom for dimension in now for atom in dimension]
    new = [atom for dimension in wanted for atom in dimension]
    if order != new:
        array = reshaped(array, [atoms.sizes[atom] for atom in order])
        array = lax.transpose(array, [order.index(atom) for atom in new])
    return reshaped(array, [atoms.size(dimension) for dimension in wanted])


def reshaped(array: jax.Array, shape: Sequence[int]) -> jax.Array:
    """Of this shape; no equation where it has it."""
    return array if array.shape == tuple(shape) else lax.reshape(array, tuple(shape))


def cast(array: jax.Array, types: Sequence[Any]) -> jax.Array:
    """Cast to these types, one after the other."""
    for dtype in types:
        array = lax.convert_element_type(array, dtype)
    return array
