"""The ops in plain `lax`: their specification, and what runs where no fused kernel does.

Each function has the signature of the op of the same name and means the same. They are called
inside `jax.shard_map`, where `axis_name` is bound.
"""

from __future__ import annotations

import jax
from jax import lax
from jax.typing import DTypeLike

from ._mesh import AxisName


def _matmul(
    x: jax.Array,
    w: jax.Array,
    preferred_element_type: DTypeLike | None,
    precision: lax.PrecisionLike,
    transpose_rhs: bool,
) -> jax.Array:
    contract = ((x.ndim - 1,), (1 if transpose_rhs else 0,))
    return lax.dot_general(
        x, w, (contract, ((), ())), precision=precision,
        preferred_element_type=preferred_element_type,
    )  # fmt: skip


def all_gather_matmul(
    x: jax.Array,
    w: jax.Array,
    *,
    axis_name: AxisName,
    gather_dimension: int = -2,
    return_gathered: bool = False,
    transpose_rhs: bool = False,
    preferred_element_type: DTypeLike | None = None,
    precision: lax.PrecisionLike = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """``all_gather(x) @ w``; see :func:`jflux.all_gather_matmul`."""
    gathered = lax.all_gather(x, axis_name, axis=gather_dimension % x.ndim, tiled=True)
    y = _matmul(gathered, w, preferred_element_type, precision, transpose_rhs)
    return (y, gathered) if return_gathered else y


def matmul_reduce_scatter(
    x: jax.Array,
    w: jax.Array,
    *,
    axis_name: AxisName,
    scatter_dimension: int = -2,
    transpose_rhs: bool = False,
    preferred_element_type: DTypeLike | None = None,
    precision: lax.PrecisionLike = None,
) -> jax.Array:
    """``psum_scatter(x @ w)``; see :func:`jflux.matmul_reduce_scatter`."""
    partial = _matmul(x, w, preferred_element_type, precision, transpose_rhs)
    return lax.psum_scatter(
        partial, axis_name, scatter_dimension=scatter_dimension % x.ndim, tiled=True
    )
