"""Products in plain `lax`, as references and decomposed forms make them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from . import _scaled
from ._scaled import Scaled

#: `lax`'s own functions, whatever stands in their place later: a program may put jflux's there
#: (``jax.lax.ragged_dot = jflux.nn.ragged_dot``), which hand calls back to these.
all_gather = lax.all_gather
all_to_all = lax.all_to_all
dot_general = lax.dot_general
psum = lax.psum
psum_scatter = lax.psum_scatter
ragged_dot_general = lax.ragged_dot_general


def several(operand: Any) -> tuple[Any, ...]:
    """An operand that may be a sequence, as one."""
    return tuple(operand) if isinstance(operand, tuple | list) else (operand,)


def dot_dtype(
    x: Any, w: Any, preferred_element_type: DTypeLike | None, precision: lax.PrecisionLike
) -> np.dtype:
    """The type of `lax.dot_general`'s result, for operands of these types: its own rule, which
    knows Python's types, whether JAX has 64-bit types, and what 8-bit types multiply to."""
    one = (jax.ShapeDtypeStruct((1,), dtype) for dtype in (x, w))
    product = functools.partial(
        lax.dot, precision=precision, preferred_element_type=preferred_element_type
    )
    return np.dtype(jax.eval_shape(product, *one).dtype)


def matmul(
    x: Any,
    w: Any,
    preferred_element_type: DTypeLike | None,
    precision: lax.PrecisionLike,
    transpose_rhs: bool,
) -> jax.Array:
    """``x @ w``: x [..., k], w [k, n] or, with `transpose_rhs`, [n, k]."""
    if isinstance(x, Scaled) and isinstance(w, Scaled):
        y = _scaled.matmul(x, w, precision, transpose_rhs)
        return y.astype(_scaled.result_dtype(preferred_element_type))
    contract = ((x.ndim - 1,), (1 if transpose_rhs else 0,))
    wanted = np.dtype(x.dtype if preferred_element_type is None else preferred_element_type)
    is_of_sums = jnp.issubdtype(wanted, jnp.floating) or wanted in (jnp.int8, jnp.int32)
    if jnp.int8 == x.dtype == w.dtype and is_of_sums:
        # Sums are whole numbers, which float32 may not hold.
        return _scaled.whole_sums(x, w, (contract, ((), ()))).astype(wanted)
    return dot_general(
        x, w, (contract, ((), ())), precision=precision,
        preferred_element_type=preferred_element_type,
    )  # fmt: skip


def product(x: jax.Array, w: jax.Array, scales: Sequence[jax.Array], params: Any) -> jax.Array:
    """The product that a call over ranks is made of: of x and w, and, if they have any, their
    scales as kernels take them.

    Args:
      params: has `out_dtype`, `precision` and `transpose_rhs`.
    """
    if not scales:
        return matmul(x, w, params.out_dtype, params.precision, params.transpose_rhs)
    of_rows, of_columns = scales
    y = _scaled.product(x, w, of_rows, of_columns, params.precision, params.transpose_rhs)
    return y.astype(params.out_dtype)


def end_to_end(
    xs: Sequence[jax.Array], ws: Sequence[jax.Array], transpose_rhs: bool
) -> tuple[jax.Array, jax.Array]:
    """(x, w) over all k, whose product is the sum of ``x_i @ w_i``."""
    if len(xs) == 1:
        return xs[0], ws[0]
    return jnp.concatenate(xs, -1), jnp.concatenate(ws, 1 if transpose_rhs else 0)


def sum_of_products(
    xs: Sequence[jax.Array],
    ws: Sequence[jax.Array],
    preferred_element_type: DTypeLike | None,
    precision: lax.PrecisionLike,
    transpose_rhs: bool,
) -> jax.Array:
    """The sum of ``x_i @ w_i``."""
    if isinstance(xs[0], Scaled):
        terms = [
            _scaled.matmul(*pair, precision, transpose_rhs) for pair in zip(xs, ws, strict=True)
        ]
        total = functools.reduce(jnp.add, terms)
        return total.astype(_scaled.result_dtype(preferred_element_type))
    x, w = end_to_end(xs, ws, transpose_rhs)
    return matmul(x, w, preferred_element_type, precision, transpose_rhs)


def weight_gradient(
    x: jax.Array, dy: jax.Array, transpose_rhs: bool, dtype: Any, precision: Any
) -> jax.Array:
    """``x^T @ dy`` over all leading dimensions: [k, n], or [n, k] with `transpose_rhs`."""
    rows = tuple(range(x.ndim - 1))
    lhs, rhs = (dy, x) if transpose_rhs else (x, dy)
    return dot_general(
        lhs, rhs, ((rows, rows), ((), ())), precision=precision, preferred_element_type=dtype
    )


def rounded(dy: Any, like: Any) -> Any:
    """A cotangent in an operand's type, in which gradients are multiplied; None is none."""
    is_real = jnp.issubdtype(like.dtype, jnp.inexact)
    return dy if dy is None or not is_real else dy.astype(like.dtype)
