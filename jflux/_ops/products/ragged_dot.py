"""`jax.lax.ragged_dot` and `ragged_dot_general` by the primitives of grouped_matmul, for programs
that call those."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from ..._call import local_ops, value_checks
from .. import _lax
from .._epilogue import sum_dtype
from . import _grouped_primitives, _product
from .grouped_matmul import OP, grouped_matmul

#: Of `jax.lax.ragged_dot`.
_OF_RAGGED_DOT = lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), (0,), (0,))


def ragged_dot(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    group_offset: jax.Array | None = None,
    out_sharding: Any = None,
) -> jax.Array:
    """`jax.lax.ragged_dot` by :func:`jflux.grouped_matmul`: the same arguments, for models that
    call it.

    `lax` itself makes the call with a `group_offset` or an `out_sharding`, with operands of
    different types or of types that no kernel takes, and with a `precision` above the default for
    float32: the kernels of GPUs have no such products.

    Args:
      lhs: [m, k].
      rhs: [g, k, n].
      group_sizes: [g] integers.
      precision, preferred_element_type, group_offset, out_sharding: as in `jax.lax.ragged_dot`.

    Returns:
      [m, n]; rows past the sum of the sizes are zeros if jflux makes the call.

    Raises:
      ValueError, TypeError: as :func:`jflux.grouped_matmul`, or `jax.lax.ragged_dot`.
    """
    return ragged_dot_general(
        lhs, rhs, group_sizes, _OF_RAGGED_DOT, precision, preferred_element_type, group_offset,
        out_sharding,
    )  # fmt: skip


def ragged_dot_general(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    ragged_dot_dimension_numbers: lax.RaggedDotDimensionNumbers,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    group_offset: jax.Array | None = None,
    out_sharding: Any = None,
    *,
    activation: Callable[[jax.Array], jax.Array] | None = None,
) -> jax.Array:
    """`jax.lax.ragged_dot_general` by jflux's grouped products: the same arguments, for programs
    that call it.

    jflux makes products of matrices with one contracted dimension::

        ragged rows           [m, k], [g, k, n] -> [m, n]      jflux.grouped_matmul
        ragged contraction    [m, k], [m, n]    -> [g, k, n]   its gradient of the weights

    Dimensions may be in any order. lhs as above and an rhs [g, k, n], [g, n, k] or [m, n] are taken
    as they are, others are transposed first. `lax` itself makes the calls of other dimensions, and
    those that :func:`ragged_dot` leaves to it. It has no gradients of a ragged contraction; jflux's
    calls have gradients of all orders.

    Args:
      lhs: [m, k] or [k, m], or as in `lax`.
      rhs: of two or three dimensions, or as in `lax`.
      group_sizes: [g] integers, or as in `lax`.
      ragged_dot_dimension_numbers: a `jax.lax.RaggedDotDimensionNumbers`.
      precision, preferred_element_type, group_offset, out_sharding: as in
        `jax.lax.ragged_dot_general`.
      activation: a function of the result, of the sums in float32 (float64 for float64), which are
        then rounded. `lax` has no such argument; ``tokamax.ragged_dot_general(implementation=
        [jflux.nn.ragged_dot_general])`` passes its own.

    Returns:
      As `jax.lax.ragged_dot_general`. What lies past the sum of the sizes counts for nothing, and
      such rows are zeros if jflux makes the call.

    Raises:
      ValueError, TypeError: as :func:`jflux.grouped_matmul`, or `jax.lax.ragged_dot_general`.
    """
    numbers, out = ragged_dot_dimension_numbers, preferred_element_type
    if activation is not None:
        dtype = _lax.dot_dtype(lhs.dtype, rhs.dtype, out, precision)
        wide = sum_dtype(dtype) if jnp.issubdtype(dtype, jnp.floating) else dtype
        y = ragged_dot_general(
            lhs, rhs, group_sizes, numbers, precision, wide, group_offset, out_sharding
        )
        return activation(y).astype(dtype)
    simple = group_offset is None and out_sharding is None
    call = _plan(lhs, rhs, group_sizes, numbers, precision) if simple else None
    if call is not None:
        return call(preferred_element_type=out)
    extra = {} if out_sharding is None else {"out_sharding": out_sharding}
    return _lax.ragged_dot_general(
        lhs, rhs, group_sizes, numbers, precision=precision, group_offset=group_offset,
        preferred_element_type=out, **extra,
    )  # fmt: skip


def _plan(
    lhs: Any, rhs: Any, sizes: Any, numbers: lax.RaggedDotDimensionNumbers, precision: Any
) -> Callable[..., jax.Array] | None:
    """The call of jflux, less its `preferred_element_type`; None: `lax` makes it."""
    is_default = precision in (None, lax.Precision.DEFAULT, "default")
    if lhs.dtype != rhs.dtype or lhs.dtype not in _product.DTYPES["cpu"]:
        return None
    if not is_default and lhs.dtype.itemsize != 2:
        return None
    sizes = jnp.asarray(sizes)  # tokamax's too
    (lhs_k, rhs_k), batch = numbers.dot_dimension_numbers
    if any(batch) or (lhs.ndim, sizes.ndim) != (2, 1):
        return None
    match numbers.lhs_ragged_dimensions, lhs_k, numbers.rhs_group_dimensions, rhs_k, rhs.ndim:
        case (m,), (k,), (e,), (of_k,), 3 if {m, k} == {0, 1} and len({e, of_k} & {0, 1, 2}) == 2:
            x, w = _with_last(lhs, k), jnp.moveaxis(rhs, e, 0)
            of_n = 3 - e - of_k
            return functools.partial(grouped_matmul, x, w, sizes, transpose_rhs=of_k > of_n)
        case (m,), (k,), (), (of_k,), 2 if m == k and {k, of_k} <= {0, 1}:
            x, dy = _with_last(lhs, 1 - k), _with_last(rhs, 1 - of_k)
            if x.shape[0] == dy.shape[0] and jnp.issubdtype(sizes.dtype, jnp.integer):
                return functools.partial(_of_each_group, x, dy, sizes)
    return None


def _with_last(a: Any, dimension: int) -> Any:
    """A matrix with this dimension as the last one."""
    return a if dimension == 1 else a.T


def _of_each_group(
    x: jax.Array, dy: jax.Array, sizes: jax.Array, *, preferred_element_type: Any
) -> jax.Array:
    """``x[rows of e].T @ dy[rows of e]`` of each group: [E, K, N]."""
    local_ops.check_arrays(OP, lhs=x, rhs=dy, group_sizes=sizes)
    out = _product.out_dtype(OP, (x, dy), preferred_element_type)
    if 0 in (*x.shape, *dy.shape, *sizes.shape):
        shape = (sizes.shape[0], x.shape[1], dy.shape[1])
        return _product.zeros(shape, out, x, dy, sizes)
    params = _grouped_primitives.DwParams(out)
    sizes = value_checks.to_int32(sizes)
    (dw,) = _grouped_primitives.grouped_matmul_dw.bind(x, dy, sizes, params=params)
    return dw
