"""matmul_all_reduce: a call of its own for large sums, and else made of the other ops. Kernels:
cc/ops/matmul_all_reduce."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jax.typing import DTypeLike

from .. import _epilogue, _ffi, _global, _heap, _mesh, _norm, _tuning, reference
from .._mesh import AxisName
from . import _after, _product, all_reduce, exchange, matmul_reduce_scatter

OP = "matmul_all_reduce"

#: Above so many bytes of y its tiles are summed while others are multiplied.
MOST_BYTES = 4 << 20
#: So many rows, of more bytes than these, are summed by the kernel that multiplies them, where
#: there are two ranks: with more, all tiles to all ranks are more bytes than an all_reduce's
#: (docs/design/0006).
FEW_ROWS = range(32, _product.CUDA_TILE_ROWS + 1)
FEW_ROWS_BYTES = 512 << 10
FEW_ROWS_RANKS = 2


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
    mesh: Mesh | AbstractMesh | None = None,
    x_spec: PartitionSpec | None = None,
) -> Any:
    """``psum(x @ w, axis_name)``: a row-parallel layer whose result every rank has, and what
    follows it in a transformer.

    Inside ``jax.shard_map``, per rank of N along `axis_name`::

        x [..., m, k/N]   w [k/N, n]   ->   y [..., m, n]

    Outside it, x, w and y are the global arrays [..., m, k], [k, n] and [..., m, n], and the op
    wraps itself in a ``shard_map``.

    Up to 4 MiB of y, as in decoding, it is XLA's product and :func:`jflux.all_reduce`, with the
    residual and the norm. Above, each rank sums as many rows, tile by tile while it multiplies, and
    sends every tile that is summed to all others. On GPUs that takes whole tiles of 128 rows for
    each rank, and four times y of the symmetric heap, rounded up to a power of two, which may be
    half of it (see :func:`jflux.init`). What does not fit is two calls:
    :func:`jflux.matmul_reduce_scatter`, which hides half of the communication in the product, and
    an all-gather of y's rows, which is not hidden. (If N does not divide the rows: the product and
    :func:`jflux.all_reduce`.) Where N is 2, 32 to 128 rows with more than 512 KiB of y are one
    kernel of their own, in which both ranks send each other their tiles and sum them.

    Differentiable in both modes like ``lax.psum`` of the product: under ``check_vma=True`` y does
    not vary over `axis_name`, and its gradient needs no communication.

    Args:
      x: [..., m, k/N], of any floating type.
      w: [k/N, n], or [n, k/N] with `transpose_rhs`; of x's type.
      axis_name: a mesh axis, or a tuple of them (the first one major).
      transpose_rhs: w holds the transposed weight. No copy is made.
      residual: [..., m, n] of any type, the same on all ranks of the axis: added to the sum. Of y's
        type the kernels add it before the sum is rounded; of another one XLA adds it to the rounded
        sum. y's type stays.
      norm: a :class:`jflux.RMSNorm` or :class:`jflux.LayerNorm` of y's rows, whose scale and bias
        are [n], of any type. With a product in the same kernel, rows are normalised by XLA.
      preferred_element_type: the type of y, and of the partial products that travel; by default
        x's.
      precision: as in `lax.dot_general`; used where XLA multiplies, not by the kernels.
      mesh: for global arrays; by default the ambient mesh (`jax.set_mesh`), or x's own.
      x_spec: for global arrays: how x is sharded, if other dimensions are sharded too; by default
        what its type says (explicit sharding), or not at all. The axis is added at the last
        dimension if it is not there. Operands that are sharded otherwise are brought into place
        first.

    Returns:
      y; with `norm` a pair: y, and its rows normalised.

    Raises:
      ValueError, TypeError: operands that do not fit, when the call is traced. ValueError when it
        is lowered, for a call that the symmetric heap has no room for.
      NotImplementedError: when it is lowered with ``jflux.config.strict``, for one that no kernel
        takes.
      jax.errors.JaxRuntimeError: a peer did not come within the deadline (see :func:`jflux.init`).
    """
    _product.check_operands(OP, x, w, -2, "the second to last dimension")
    shape = (*x.shape[:-1], _product.columns(w, transpose_rhs))
    _after.check(OP, shape, residual, norm)
    if not _mesh.is_bound(axis_name):
        return _global.matmul_all_reduce(
            matmul_all_reduce, x, w, mesh=mesh, x_spec=x_spec, axis_name=axis_name,
            transpose_rhs=transpose_rhs, residual=residual, norm=norm,
            preferred_element_type=preferred_element_type, precision=precision,
        )  # fmt: skip
    _product.check_contraction(OP, x, w, transpose_rhs)
    if _product.is_plain(OP, axis_name):
        return reference.matmul_all_reduce(
            x, w, axis_name=axis_name, transpose_rhs=transpose_rhs, residual=residual, norm=norm,
            preferred_element_type=preferred_element_type, precision=precision,
        )  # fmt: skip
    names = _mesh.as_tuple(axis_name)
    after, added = _after.operands(OP, names, residual, norm)
    params = Params(
        sums=all_reduce.Params(names, _mesh.axis_size(names), algorithm=None, after=after),
        transpose_rhs=transpose_rhs,
        out_dtype=_product.out_dtype(OP, (x, w), preferred_element_type),
        precision=precision,
    )
    x, w, *added = _mesh.vary_together(axis_name, x, w, *added, same=len(added))
    results = _fused(params, x, w, tuple(added))
    return results[0] if norm is None else tuple(results)


def _partial(params: Params | Large, x: jax.Array, w: jax.Array) -> jax.Array:
    return reference.matmul(x, w, params.out_dtype, params.precision, params.transpose_rhs)


def are_few_rows(rows: int, columns: int, world: int) -> bool:
    """Of a 16-bit type."""
    return rows in FEW_ROWS and rows * columns * 2 > FEW_ROWS_BYTES and world == FEW_ROWS_RANKS


def _is_large(rows: int, columns: int, dtype: np.dtype) -> bool:
    return rows * columns * dtype.itemsize > MOST_BYTES


def is_one_call(shape: tuple[int, ...], dtypes: Sequence[Any], world: int) -> bool:
    """Whether the product and the sum of a y of this shape are one call. dtypes: x's, w's, y's."""
    rows, columns = int(np.prod(shape[:-1])), shape[-1]
    types = [np.dtype(d) for d in dtypes]
    large = _is_large(rows, columns, types[-1])
    halves = len(set(types)) == 1 and types[0] in _product.CUDA_DTYPES
    return (large or halves and are_few_rows(rows, columns, world)) and rows % world == 0


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _fused(params: Params, x: Any, w: Any, added: tuple[Any, ...]) -> list[jax.Array]:
    sums = params.sums
    shape = (*x.shape[:-1], _product.columns(w, params.transpose_rhs))
    if not is_one_call(shape, (x.dtype, w.dtype, params.out_dtype), sums.world):
        return all_reduce.bind(sums, _partial(params, x, w), added)
    residual = [a.reshape(-1, shape[-1]) for a in added[: sums.after.residual]]
    large = Large(
        axis_names=sums.axis_names,
        world=sums.world,
        transpose_rhs=params.transpose_rhs,
        out_dtype=params.out_dtype,
        precision=params.precision,
    )
    (y,) = _primitive.bind(x.reshape(-1, x.shape[-1]), w, *residual, params=large)
    rest = dataclasses.replace(sums.after, residual=False)
    return _after.apply(rest, y.reshape(shape), sums.after.factors(added))


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


# ---- Large sums: x [rows, k], w, and perhaps the residual [rows, n] ------------------------------


@dataclasses.dataclass(frozen=True)
class Large:
    """A call of the primitive, less its operands."""

    axis_names: tuple[Any, ...]
    world: int
    transpose_rhs: bool
    out_dtype: np.dtype
    precision: Any


def _result(x, w, *residual, params):
    return [((x.shape[0], _product.columns(w, params.transpose_rhs)), params.out_dtype)]


def _reference(x, w, *residual, params):
    return [
        reference.matmul_all_reduce(
            x, w, axis_name=params.axis_names, transpose_rhs=params.transpose_rhs,
            residual=residual[0] if residual else None,
            preferred_element_type=params.out_dtype, precision=params.precision,
        )
    ]  # fmt: skip


def _of_two_calls(x, w, *residual, params):
    """The sum scattered, with the residual's rows, and gathered again."""
    names, rows = params.axis_names, x.shape[0] // params.world
    own = None
    if residual:
        own = lax.dynamic_slice_in_dim(residual[0], lax.axis_index(names) * rows, rows)
    y = matmul_reduce_scatter.matmul_reduce_scatter(
        x, w, axis_name=names, residual=own, transpose_rhs=params.transpose_rhs,
        preferred_element_type=params.out_dtype, precision=params.precision,
    )  # fmt: skip
    return [exchange.gather_for_all(y, names)]


def _product_and_sum(x, w, *residual, params):
    """As of few columns: the product, and its sum over the ranks, which sees for itself whether it
    is `lax`'s."""
    sums = all_reduce.Params(
        params.axis_names, params.world, algorithm=None, after=_after.After(bool(residual))
    )
    return all_reduce.bind(sums, _partial(params, x, w), residual)


def _not_fused(x, w, *residual, params, platform):
    if platform == "cuda":  # what no product's kernel takes may still be summed by all_reduce's
        return None
    return _product.kernel_takes(x, w, params.out_dtype, params.world, platform)


def _apart_is_faster(x, w, *residual, params):
    m = x.shape[0]
    return _product.apart_is_faster("matmul_all_reduce", m)


def fits_kernel(
    rows: int, k: int, columns: int, world: int, dtype: Any, out_dtype: Any, heap_bytes: int
) -> bool:
    """Whether the GPUs' kernels take a rank's x [rows, k] and w [k, columns]: whole units, one tile
    of rows or whole ones for each rank, and about half of the heap at most."""
    return (
        out_dtype == dtype
        and k % _product.UNIT == 0
        and columns % _product.UNIT == 0
        and (are_few_rows(rows, columns, world) or rows % (world * _product.CUDA_TILE_ROWS) == 0)
        and heap_bytes_of(rows, columns, world) <= heap_bytes // 2
    )


def check_tuned(rows: int, columns: int, k: int, world: int, dtype: np.dtype) -> None:
    """Raises for a call without configurations to choose from; k is a rank's."""
    if not is_one_call((rows, columns), (dtype,) * 3, world):
        raise ValueError(
            f"jflux.tune: {OP} of {rows} x {columns} is a product and an all_reduce: tiles travel "
            f"one by one above {MOST_BYTES} bytes, if the {world} ranks divide the rows"
        )
    heap = _heap.heap_bytes("cuda")
    if not fits_kernel(rows, k, columns, world, dtype, dtype, heap):
        raise ValueError(
            f"jflux.tune: {OP} of {rows} x {columns} is two calls, of which matmul_reduce_scatter "
            f"can be tuned: a kernel takes multiples of {world * _product.CUDA_TILE_ROWS} rows and "
            f"of {_product.UNIT} columns and k, and half of the heap's {heap} bytes at most"
        )


def heap_bytes_of(rows: int, columns: int, world: int) -> int:
    """What a kernel needs, less signals: parts of the own rows, and everybody's finished rows
    (MatmulAllReduceLayout), or the peer's tiles (FewRowsLayout); in whole tiles, and for two calls
    in turn, each a power of two."""
    widest = max(-(-columns // c.tile_n) * c.tile_n for c in _tuning.compiled())
    held = _product.CUDA_TILE_ROWS if are_few_rows(rows, columns, world) else 2 * rows
    return 2 * (1 << (held * widest * 2 - 1).bit_length())


def _adapt(x, w, *residual, params, platform):
    if residual and residual[0].dtype != params.out_dtype:

        def apart(x, w, residual):
            return [_epilogue.add(_primitive.bind(x, w, params=params)[0], [residual])]

        return apart
    (rows, k), columns = x.shape, _product.columns(w, params.transpose_rhs)
    taken = _product.kernel_takes(x, w, params.out_dtype, params.world, platform) is None
    fits = taken and fits_kernel(
        rows, k, columns, params.world, x.dtype, params.out_dtype, _heap.heap_bytes("cuda")
    )
    if platform != "cuda" or fits:
        return None
    large = taken and _is_large(rows, columns, params.out_dtype)
    return functools.partial(_of_two_calls if large else _product_and_sum, params=params)


def _extent(x, w, *residual, params):
    return 1, x.shape[0] // params.world, x.shape[1], _product.columns(w, params.transpose_rhs)


def _batch(primitive, operands, dims, *, params):
    bind = functools.partial(primitive.bind, params=params)
    x, w, *residual = operands
    if dims[0] is None and dims[1] is None:  # the residual alone
        (y,) = bind(x, w)
        batch = jnp.moveaxis(residual[0], dims[2], 0)
        return [_epilogue.add(jnp.broadcast_to(y, batch.shape), [batch])], [0]
    x = x if dims[0] is None else jnp.moveaxis(x, dims[0], 0)
    one_w = [size for i, size in enumerate(w.shape) if i != dims[1]]
    columns = one_w[_product.columns_axis(params.transpose_rhs)]
    few = are_few_rows(x.shape[-2], columns, params.world)
    rows_summed = x.shape[-2] * (x.shape[0] if dims[0] is not None and dims[1] is None else 1)
    # Of a batch one sum is better than many, up to where a merged call's tiles are summed.
    if few and not _is_large(rows_summed, columns, params.out_dtype):
        x_axis = None if dims[0] is None else 0
        apart = functools.partial(_product_and_sum, params=params)
        y = jax.vmap(apart, in_axes=(x_axis, *dims[1:]))(x, w, *residual)
        return y, [0]
    if dims[1] is not None:
        return _product.batch_in_turn(bind, operands, dims)
    added = [
        jnp.broadcast_to(a, (x.shape[0], *a.shape)) if d is None else jnp.moveaxis(a, d, 0)
        for a, d in zip(residual, dims[2:], strict=True)
    ]
    rows = [a.reshape(-1, a.shape[-1]) for a in (x, *added)]
    (y,) = bind(rows[0], w, *rows[1:])
    return [y.reshape(*x.shape[:-1], y.shape[-1])], [0]


_primitive = _ffi.make_primitive(
    OP,
    abstract_eval=_result,
    reference=_reference,
    apart=_product_and_sum,
    not_fused=_not_fused,
    adapt=_adapt,
    batch=_batch,
    same_over=lambda params: params.axis_names,
    **_product.call_rules(
        OP,
        extent=_extent,
        apart_is_faster=_apart_is_faster,
        attributes=lambda *avals, params, platform: {},
    ),
)
