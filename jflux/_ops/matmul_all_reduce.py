"""matmul_all_reduce: made of the other ops, by size. It has no kernel of its own."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.typing import DTypeLike

from .. import _mesh, _norm, reference
from .._mesh import AxisName
from . import _after, _product, all_reduce, exchange, matmul_reduce_scatter

#: Above so many bytes of y the sum is scattered and gathered again: all_reduce is `lax`'s there.
MOST_BYTES = 4 << 20


@dataclasses.dataclass(frozen=True)
class Params:
    """A call, less its operands: x, w, the residual if there is one, and the norm's factors."""

    sums: all_reduce.Params
    transpose_rhs: bool
    out_dtype: np.dtype
    precision: Any


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
) -> Any:
    """``psum(x @ w, axis_name)``: a row-parallel layer whose result every rank has, and what
    follows it in a transformer.

    Inside ``jax.shard_map``, per rank of N along `axis_name`::

        x [..., m, k/N]   w [k/N, n]   ->   y [..., m, n]

    Up to 4 MiB of y, as in decoding, it is XLA's product and :func:`jflux.all_reduce`, with the
    residual and the norm. Above, it is :func:`jflux.matmul_reduce_scatter`, which hides
    half of the communication in the product, and an all-gather of y's rows, which is not hidden
    (if N does not divide the rows: the product and ``lax.psum``).

    Differentiable in both modes like ``lax.psum`` of the product: under ``check_vma=True`` y does
    not vary over `axis_name`, and its gradient needs no communication.

    Args:
      x: [..., m, k/N], of any floating type.
      w: [k/N, n], or [n, k/N] with `transpose_rhs`; of x's type.
      axis_name: a mesh axis, or a tuple of them (the first one major).
      transpose_rhs: w holds the transposed weight. No copy is made.
      residual: [..., m, n], the same on all ranks of the axis: added to the sum.
      norm: a :class:`jflux.RMSNorm` or :class:`jflux.LayerNorm` of y's rows.
      preferred_element_type: the type of y, and of the partial products that travel; by default
        x's.
      precision: as in `lax.dot_general`.

    Returns:
      y; with `norm` a pair: y, and its rows normalised.

    Raises:
      ValueError, TypeError: operands that do not fit, when the call is traced. ValueError when it
        is lowered, for a call that the symmetric heap has no room for.
      NameError: outside ``shard_map``.
      NotImplementedError: when it is lowered with ``jflux.config.strict``, for one that no kernel
        takes.
      jax.errors.JaxRuntimeError: a peer did not come within the deadline (see :func:`jflux.init`).
    """
    _product.check_operands("matmul_all_reduce", x, w, -2, "the second to last dimension")
    _product.check_contraction("matmul_all_reduce", x, w, transpose_rhs)
    shape = (*x.shape[:-1], _product.columns(w, transpose_rhs))
    _after.check("matmul_all_reduce", shape, residual, norm)
    if _product.is_plain("matmul_all_reduce", axis_name):
        return reference.matmul_all_reduce(
            x, w, axis_name=axis_name, transpose_rhs=transpose_rhs, residual=residual, norm=norm,
            preferred_element_type=preferred_element_type, precision=precision,
        )  # fmt: skip
    names = _mesh.as_tuple(axis_name)
    after, added = _after.operands("matmul_all_reduce", names, residual, norm)
    params = Params(
        sums=all_reduce.Params(names, _mesh.axis_size(names), algorithm=None, after=after),
        transpose_rhs=transpose_rhs,
        out_dtype=_product.out_dtype("matmul_all_reduce", (x, w), preferred_element_type),
        precision=precision,
    )
    x, w, *added = _mesh.vary_together(axis_name, x, w, *added, same=len(added))
    results = _fused(params, x, w, tuple(added))
    return results[0] if norm is None else tuple(results)


def _partial(params: Params, x: jax.Array, w: jax.Array) -> jax.Array:
    return reference.matmul(x, w, params.out_dtype, params.precision, params.transpose_rhs)


def scatters(shape: tuple[int, ...], dtype: np.dtype, world: int) -> bool:
    """Whether a y of this shape is scattered and gathered again."""
    rows, columns = int(np.prod(shape[:-1])), shape[-1]
    return rows * columns * dtype.itemsize > MOST_BYTES and rows % world == 0


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _fused(params: Params, x: Any, w: Any, added: tuple[Any, ...]) -> list[jax.Array]:
    sums = params.sums
    shape = (*x.shape[:-1], _product.columns(w, params.transpose_rhs))
    if not scatters(shape, params.out_dtype, sums.world):
        return all_reduce.bind(sums, _partial(params, x, w), added)
    names, residual = sums.axis_names, None
    if sums.after.residual:
        flat = added[0].reshape(-1, shape[-1])
        rows = flat.shape[0] // sums.world
        residual = lax.dynamic_slice_in_dim(flat, lax.axis_index(names) * rows, rows)
    y = matmul_reduce_scatter.matmul_reduce_scatter(
        x.reshape(-1, x.shape[-1]), w, axis_name=names, residual=residual,
        transpose_rhs=params.transpose_rhs, preferred_element_type=params.out_dtype,
        precision=params.precision,
    )  # fmt: skip
    y = exchange.gather_for_all(y, names).reshape(shape)
    rest = dataclasses.replace(sums.after, residual=False)
    return _after.apply(rest, y, sums.after.factors(added))


@functools.partial(_fused.defjvp, symbolic_zeros=True)
def _fused_jvp(params: Params, primals: Any, tangents: Any) -> Any:
    (x, w, added), (dx, dw, dadded) = primals, tangents
    results = _fused(params, x, w, added)
    parts = []
    if not isinstance(dx, SymbolicZero):
        parts.append(_partial(params, dx, w))
    if not isinstance(dw, SymbolicZero):
        parts.append(_partial(params, x, dw))
    dy = all_reduce.bind(params.sums.alone(), sum(parts[1:], parts[0]))[0] if parts else None
    return results, _after.tangents(params.sums.after, results[0], dy, added, dadded)
