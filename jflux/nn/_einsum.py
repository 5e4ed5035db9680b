"""`jnp.einsum` of activations and a kernel, by a :class:`jflux.nn.DotGeneral`."""

from __future__ import annotations

import dataclasses
import string
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Terms:
    """An equation of x and a kernel: the letters of their dimensions, and of the result's."""

    x: str
    kernel: str
    out: str


@dataclasses.dataclass(frozen=True)
class Arrangement:
    """A product of x [*rows, *k] and a kernel [*k, *n] or [*n, *k].

    Attributes:
      x, kernel, y: the letters of its arrays: of the kernel as it is, if that is one of
        `dot_general`'s forms.
    """

    x: str
    kernel: str
    y: str


@dataclasses.dataclass(frozen=True)
class Call:
    """A product of these arrays."""

    x: jax.Array
    kernel: jax.Array
    terms: Terms
    by: Arrangement


@dataclasses.dataclass(frozen=True)
class Einsum:
    """`jax.numpy.einsum`, which asks a :class:`jflux.nn.DotGeneral` for products of two operands,
    whatever the order of their dimensions. See :meth:`jflux.nn.TensorParallel.einsum`.

    The kernel is the second operand, or the first if that alone has as many dimensions as there
    are names. Dimensions that its names split come first among those that are contracted, or among
    the others, so that a rank's part is one of columns or of rows: a kernel in another order is
    transposed, as `jnp.einsum` would do it. What both operands have and the result has too is no
    dimension of a product: such equations are `jnp.einsum`'s.
    """

    dot: Any
    mesh_axes: tuple[Any, ...]

    def __call__(
        self,
        subscripts: Any,
        /,
        *operands: Any,
        precision: Any = None,
        preferred_element_type: Any = None,
        out_sharding: Any = None,
        **others: Any,
    ) -> jax.Array:
        options = {"precision": precision, "preferred_element_type": preferred_element_type}
        if out_sharding is not None:
            options["out_sharding"] = out_sharding
        call = None if set(others) - {"optimize"} else self._product(subscripts, operands)
        if call is None or (out_sharding is not None and call.by.y != call.terms.out):
            return jnp.einsum(subscripts, *operands, **options, **others)
        terms, by = call.terms, call.by
        dtype = jnp.result_type(call.x, call.kernel)
        x = _transposed(call.x.astype(dtype), terms.x, by.x)
        kernel = _transposed(call.kernel.astype(dtype), terms.kernel, by.kernel)
        names = tuple(self.mesh_axes[terms.kernel.index(letter)] for letter in by.kernel)
        contracted = [letter for letter in by.x if letter in by.kernel]
        numbers = tuple(tuple(of.index(c) for c in contracted) for of in (by.x, by.kernel))
        dot = dataclasses.replace(self.dot, mesh_axes=names)
        y = dot(x, kernel, (numbers, ((), ())), **options)
        return _transposed(y, by.y, terms.out)

    def _product(self, subscripts: Any, operands: Sequence[Any]) -> Call | None:
        """The product that an equation is; None: it is none."""
        if len(operands) != 2 or not isinstance(subscripts, str):
            return None
        x, kernel = map(jnp.asarray, operands)
        if is_first := self._is_first(x, kernel):
            x, kernel = kernel, x
        terms = terms_of(subscripts, x.ndim, kernel.ndim, is_first)
        if terms is None:
            return None
        sizes = dict(zip(terms.kernel, kernel.shape, strict=True))
        if any(sizes.get(c, n) != n for c, n in zip(terms.x, x.shape, strict=True)):
            return None  # einsum broadcasts a size of 1, and has a message for others
        by = arranged(terms, self._is_named)
        if by is not None and len(self.mesh_axes) != kernel.ndim:
            raise ValueError(
                f"jflux.nn.TensorParallel.einsum: mesh_axes={self.mesh_axes} must name the "
                f"{kernel.ndim} dimensions of the kernel, which has shape {kernel.shape}"
            )
        return None if by is None else Call(x, kernel, terms, by)

    def _is_first(self, one: Any, other: Any) -> bool:
        """Whether the kernel is the first operand."""
        count = len(self.mesh_axes)
        return bool(one.ndim == count != other.ndim)

    def _is_named(self, dimension: int) -> bool:
        """Whether a dimension of the kernel may be split."""
        return dimension < len(self.mesh_axes) and self.mesh_axes[dimension] is not None


def terms_of(subscripts: str, x_ndim: int, kernel_ndim: int, is_first: bool) -> Terms | None:
    """An equation of two operands with a letter for each dimension; None: it is no such one."""
    inputs, arrow, out = subscripts.replace(" ", "").partition("->")
    parts = inputs.split(",")
    if len(parts) != 2 or not arrow:
        return None
    x, kernel = reversed(parts) if is_first else parts
    if "..." in kernel or kernel_ndim != len(kernel):
        return None
    if "..." in x:
        missing = x_ndim - (len(x) - 3)
        free = [letter for letter in string.ascii_letters if letter not in subscripts]
        if missing < 0 or missing > len(free):
            return None
        more = "".join(free[:missing])
        x, out = x.replace("...", more), out.replace("...", more)
    once = all(len(set(term)) == len(term) for term in (x, kernel, out))
    return Terms(x, kernel, out) if once and len(x) == x_ndim else None


def arranged(terms: Terms, is_named: Any) -> Arrangement | None:
    """The product of an equation; None: it is none. `is_named`: which of the kernel's dimensions
    come first among their like."""
    x, kernel, out = terms.x, terms.kernel, terms.out
    k = [c for c in kernel if c in x and c not in out]
    n = [c for c in kernel if c not in x and c in out]
    rows = [c for c in x if c in out and c not in kernel]  # a layer's sequence is one of x's
    if not (k and n and rows) or len(k) + len(n) != len(kernel) or len(k) + len(rows) != len(x):
        return None
    if sorted(rows + n) != sorted(out):
        return None

    def named_first(letters: Sequence[str]) -> str:
        return "".join(sorted(letters, key=lambda c: not is_named(kernel.index(c))))

    k_, n_ = named_first(k), named_first(n)
    as_it_is = kernel if kernel in (k_ + n_, n_ + k_) else k_ + n_
    return Arrangement("".join(rows) + k_, as_it_is, "".join(rows) + n_)


def _transposed(a: jax.Array, letters: str, wanted: str) -> jax.Array:
    return a if letters == wanted else jnp.transpose(a, [letters.index(c) for c in wanted])
