"""The ops in plain `lax`: their specification, and what runs where no fused kernel does.

Each function has the signature of the op of the same name, documented there, and means the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jax.typing import DTypeLike

from . import _epilogue, _global, _mesh, _norm
from ._global import several
from ._mesh import AxisName


def matmul(
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


def _end_to_end(
    xs: Sequence[jax.Array], ws: Sequence[jax.Array], transpose_rhs: bool
) -> tuple[jax.Array, jax.Array]:
    """(x, w) over all k, whose product is the sum of ``x_i @ w_i``."""
    if len(xs) == 1:
        return xs[0], ws[0]
    return jnp.concatenate(xs, -1), jnp.concatenate(ws, 1 if transpose_rhs else 0)


def _sum_of_products(
    xs: Sequence[jax.Array],
    ws: Sequence[jax.Array],
    preferred_element_type: DTypeLike | None,
    precision: lax.PrecisionLike,
    transpose_rhs: bool,
) -> jax.Array:
    """The sum of ``x_i @ w_i``."""
    x, w = _end_to_end(xs, ws, transpose_rhs)
    return matmul(x, w, preferred_element_type, precision, transpose_rhs)


def all_gather_matmul(
    x: jax.Array,
    w: jax.Array | Sequence[jax.Array],
    *,
    axis_name: AxisName,
    gather_dimension: int = -2,
    return_gathered: bool = False,
    transpose_rhs: bool = False,
    bias: jax.Array | Sequence[jax.Array | None] | None = None,
    activation: str | None = None,
    gated: bool = False,
    preferred_element_type: DTypeLike | None = None,
    precision: lax.PrecisionLike = None,
    mesh: Mesh | AbstractMesh | None = None,
    x_spec: PartitionSpec | None = None,
) -> Any:
    """``all_gather(x) @ w``: x [..., m/N, k], w [k, n/N] -> [..., m, n/N] per rank of N.

    Arguments, results and the use on global arrays are those of :func:`jflux.all_gather_matmul`;
    any type that `lax.dot_general` takes will do, and products are rounded to y's type before a
    bias or an activation. Errors are `lax`'s.
    """
    if not _mesh.is_bound(axis_name):
        return _global.all_gather_matmul(
            all_gather_matmul, x, w, mesh=mesh, x_spec=x_spec, axis_name=axis_name,
            gather_dimension=gather_dimension, return_gathered=return_gathered,
            transpose_rhs=transpose_rhs, bias=bias, activation=activation, gated=gated,
            preferred_element_type=preferred_element_type, precision=precision,
        )  # fmt: skip
    ws = several(w)
    bias_of = _epilogue.of_each(bias, len(ws))
    epilogue = _epilogue.check("reference.all_gather_matmul", len(ws), bias_of, activation, gated)
    gathered = lax.all_gather(x, axis_name, axis=gather_dimension % x.ndim, tiled=True)

    ys = [matmul(gathered, one, preferred_element_type, precision, transpose_rhs) for one in ws]
    if epilogue is not None:
        biases = [b for b in bias_of if b is not None]
        ys, _ = _epilogue.apply(epilogue, ys, biases, np.dtype(ys[0].dtype))
    y = tuple(ys) if isinstance(w, tuple | list) and not gated else ys[0]
    return (y, gathered) if return_gathered else y


def all_reduce(
    x: Any,
    *,
    axis_name: AxisName,
    residual: jax.Array | None = None,
    norm: _norm.Norm | None = None,
    algorithm: str | None = None,
) -> Any:
    """``psum(x)``: arguments and results are those of :func:`jflux.all_reduce`; any type that
    `lax.psum` takes will do, the algorithm does not matter, and the sum is rounded to x's type
    before a residual is added."""
    del algorithm
    y = lax.psum(x, axis_name)
    if residual is not None:
        y = _epilogue.add(y, [residual])
    if norm is None:
        return y
    return y, _norm.apply(norm.name, norm.epsilon, y, *norm.factors)


def all_gather(x: Any, *, axis_name: AxisName, axis: int = 0, tiled: bool = False) -> Any:
    """``lax.all_gather(x)``: arguments and results are those of :func:`jflux.all_gather`."""
    return lax.all_gather(x, axis_name, axis=axis, tiled=tiled)


def all_to_all(
    x: Any, *, axis_name: AxisName, split_axis: int, concat_axis: int, tiled: bool = False
) -> Any:
    """``lax.all_to_all(x)``: arguments and results are those of :func:`jflux.all_to_all`."""

    def by_tiles(x: jax.Array, split: int, concat: int) -> jax.Array:
        return lax.all_to_all(x, axis_name, split, concat, tiled=True)

    def one(x: jax.Array) -> jax.Array:
        split, concat = split_axis % x.ndim, concat_axis % x.ndim
        if tiled:
            return by_tiles(x, split, concat)
        return untiled(by_tiles, x, split, concat)

    return jax.tree.map(one, x)


def untiled(
    by_tiles: Callable[[jax.Array, int, int], jax.Array], x: jax.Array, split: int, concat: int
) -> jax.Array:
    """all_to_all with ``tiled=False`` of a function that does it with ``tiled=True``: a new
    dimension of one takes the ranks, and the other one goes. (lax's own has no gradient where the
    two are not one.)"""
    at = concat if concat <= split else concat + 1
    split += at <= split
    return jnp.squeeze(by_tiles(jnp.expand_dims(x, at), split, at), split)


def reduce_scatter(
    x: Any, *, axis_name: AxisName, scatter_dimension: int = 0, tiled: bool = False
) -> Any:
    """``lax.psum_scatter(x)``: arguments and results are those of :func:`jflux.reduce_scatter`."""
    return lax.psum_scatter(x, axis_name, scatter_dimension=scatter_dimension, tiled=tiled)


def matmul_all_reduce(
    x: jax.Array,
    w: jax.Array,
    *,
    axis_name: AxisName,
    transpose_rhs: bool = False,
    residual: jax.Array | None = None,
    norm: _norm.Norm | None = None,
    preferred_element_type: DTypeLike | None = None,
    precision: lax.PrecisionLike = None,
    mesh: Mesh | AbstractMesh | None = None,
    x_spec: PartitionSpec | None = None,
) -> Any:
    """``psum(x @ w)``: x [..., m, k/N], w [k/N, n] -> [..., m, n] per rank of N.

    Arguments, results and the use on global arrays are those of
    :func:`jflux.matmul_all_reduce`; partial products are rounded
    to y's type before they are summed, and the sum before a residual is added."""
    if not _mesh.is_bound(axis_name):
        return _global.matmul_all_reduce(
            matmul_all_reduce, x, w, mesh=mesh, x_spec=x_spec, axis_name=axis_name,
            transpose_rhs=transpose_rhs, residual=residual, norm=norm,
            preferred_element_type=preferred_element_type, precision=precision,
        )  # fmt: skip
    partial = matmul(x, w, preferred_element_type, precision, transpose_rhs)
    return all_reduce(partial, axis_name=axis_name, residual=residual, norm=norm)


def matmul_all_to_all(
    x: jax.Array,
    w: jax.Array,
    *,
    axis_name: AxisName,
    split_axis: int,
    concat_axis: int,
    transpose_rhs: bool = False,
    preferred_element_type: DTypeLike | None = None,
    precision: lax.PrecisionLike = None,
    mesh: Mesh | AbstractMesh | None = None,
    x_spec: PartitionSpec | None = None,
) -> jax.Array:
    """``all_to_all(x @ w)``: x [..., m/N, k], w [k, n] -> [..., m, n/N] per rank of N, if columns
    are split and rows put together.

    Arguments, results and the use on global arrays are those of :func:`jflux.matmul_all_to_all`;
    any type that `lax.dot_general` takes will do. Errors are `lax`'s.
    """
    if not _mesh.is_bound(axis_name):
        return _global.matmul_all_to_all(
            matmul_all_to_all, x, w, mesh=mesh, x_spec=x_spec, axis_name=axis_name,
            split_axis=split_axis, concat_axis=concat_axis, transpose_rhs=transpose_rhs,
            preferred_element_type=preferred_element_type, precision=precision,
        )  # fmt: skip
    product = matmul(x, w, preferred_element_type, precision, transpose_rhs)
    return all_to_all(
        product, axis_name=axis_name, split_axis=split_axis, concat_axis=concat_axis, tiled=True
    )


def matmul_reduce_scatter(
    x: jax.Array | Sequence[jax.Array],
    w: jax.Array | Sequence[jax.Array],
    *,
    axis_name: AxisName,
    scatter_dimension: int = -2,
    transpose_rhs: bool = False,
    bias: jax.Array | None = None,
    residual: jax.Array | None = None,
    preferred_element_type: DTypeLike | None = None,
    precision: lax.PrecisionLike = None,
    mesh: Mesh | AbstractMesh | None = None,
    x_spec: PartitionSpec | None = None,
) -> jax.Array:
    """``psum_scatter(x @ w)``: x [..., m, k/N], w [k/N, n] -> [..., m/N, n] per rank of N.

    Arguments, results and the use on global arrays are those of
    :func:`jflux.matmul_reduce_scatter`; any type that `lax.dot_general` takes will do, and partial
    products are rounded to y's type before they are summed. Errors are `lax`'s.
    """
    if not _mesh.is_bound(axis_name):
        return _global.matmul_reduce_scatter(
            matmul_reduce_scatter, x, w, mesh=mesh, x_spec=x_spec, axis_name=axis_name,
            scatter_dimension=scatter_dimension, transpose_rhs=transpose_rhs, bias=bias,
            residual=residual, preferred_element_type=preferred_element_type, precision=precision,
        )  # fmt: skip
    xs = several(x)
    partial = _sum_of_products(xs, several(w), preferred_element_type, precision, transpose_rhs)
    y = lax.psum_scatter(
        partial, axis_name, scatter_dimension=scatter_dimension % xs[0].ndim, tiled=True
    )
    return _epilogue.add(y, [a for a in (bias, residual) if a is not None])
