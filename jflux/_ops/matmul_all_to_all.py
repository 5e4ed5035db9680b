"""matmul_all_to_all: wrapper, gradients, and how it lowers. Kernels: cc/ops/matmul_all_to_all."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jax.typing import DTypeLike

from .. import _ffi, _global, _mesh, reference
from .._mesh import AxisName
from . import _product, exchange
from .all_gather_matmul import weight_gradient

OP = "matmul_all_to_all"


@dataclasses.dataclass(frozen=True)
class Params:
    """A call, less its operands. `split` and `concat` are dimensions of the product, not
    negative."""

    axis_names: tuple[Any, ...]
    world: int
    split: int
    concat: int
    transpose_rhs: bool
    out_dtype: np.dtype
    precision: Any = None


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
    """``all_to_all(x @ w, axis_name, split_axis, concat_axis, tiled=True)``, with the exchange
    hidden in the product.

    Inside ``jax.shard_map``, per rank of N along `axis_name`, with columns split and rows put
    together, or the other way round::

        x [..., m/N, k]   w [k, n]     ->   y [..., m, n/N]     split_axis=-1, concat_axis=-2
        x [..., m, k]     w [k, n/N]   ->   y [..., m/N, n]     split_axis=-2, concat_axis=-1

    means what :func:`jflux.reference.matmul_all_to_all` means. The first is how a model that is
    parallel over the sequence comes to its heads (DeepSpeed-Ulysses, arXiv 2309.14509): a rank
    computes all heads of its part of the sequence, and gets its own heads of all of it. A tile of
    the product goes to its owner as soon as it is computed, and is not summed with anything: the
    other write branch of Flux's epilogue (arXiv 2406.06858, section 3).

    The two axes may be one. Where they are two different dimensions of rows, where a piece's rows
    are no whole 16-byte units, and, on GPUs, where there are few rows or y is of another type than
    x, it is the product, and :func:`jflux.all_to_all` of it.

    Outside ``shard_map`` it takes global arrays and wraps itself in ``shard_map``: the product is
    sharded along `concat_axis`, so x is (or w is, in its columns, if that is the last one), and y
    is sharded along `split_axis`.

    Differentiable in reverse mode: dy goes back by the inverse :func:`jflux.all_to_all`, and is
    multiplied with w for dx and with x for dw.

    Args:
      x: [..., rows, k]; float16, bfloat16, float32 or float64 (CPU), float16 or bfloat16 (GPU).
        Other types take the reference.
      w: [k, n], or [n, k] with `transpose_rhs`; of x's type.
      axis_name: a mesh axis, or a tuple of them (the first one major).
      split_axis: the dimension of the product ``x @ w`` that N divides: piece r goes to rank r.
      concat_axis: the dimension in which what comes is put together, in rank order.
      transpose_rhs: w holds the transposed weight. No copy is made.
      preferred_element_type: the type of y; by default x's. Sums are in float32 (float64 for
        float64) whatever it is.
      precision: as in `lax.dot_general`; used where XLA multiplies, not by the kernels.
      mesh: for global arrays; by default the ambient mesh (`jax.set_mesh`), or x's own.
      x_spec: for global arrays: how x is sharded, if other dimensions are sharded too; by default
        what its type says (explicit sharding), or not at all.

    Returns:
      y, the product's shape with dimension `split_axis` divided by N and `concat_axis` N times as
      long. Differentiated, dy of another type than x's is rounded to it.

    Raises:
      ValueError, TypeError: operands that do not fit, when the call is traced; also for a dimension
        that the ranks do not divide. ValueError when it is lowered, for a call that the symmetric
        heap has no room for.
      NotImplementedError: when it is lowered with ``jflux.config.strict``, for one that no kernel
        takes.
      jax.errors.JaxRuntimeError: a peer did not come within the deadline (see :func:`jflux.init`).
    """
    _product.check_operands(OP, x, w, -2, "the second to last dimension")
    split = _axis_of_product("split_axis", split_axis, x)
    concat = _axis_of_product("concat_axis", concat_axis, x)
    _product.check_contraction(OP, x, w, transpose_rhs)
    if not _mesh.is_bound(axis_name):
        return _global.matmul_all_to_all(
            matmul_all_to_all, x, w, mesh=mesh, x_spec=x_spec, axis_name=axis_name,
            split_axis=split, concat_axis=concat, transpose_rhs=transpose_rhs,
            preferred_element_type=preferred_element_type, precision=precision,
        )  # fmt: skip
    world = _mesh.axis_size(axis_name)
    shape = (*x.shape[:-1], _product.columns(w, transpose_rhs))
    if shape[split] % world != 0:
        raise ValueError(
            f"jflux.{OP}: the product has {shape[split]} "
            f"{'rows' if split < x.ndim - 1 else 'columns'} in its {split_axis=}, which the "
            f"{world} ranks of {axis_name=} do not divide; x has shape {x.shape}, w {w.shape}"
        )
    out = _product.out_dtype(OP, (x, w), preferred_element_type)
    if _product.is_plain(OP, axis_name):
        return reference.matmul_all_to_all(
            x, w, axis_name=axis_name, split_axis=split, concat_axis=concat,
            transpose_rhs=transpose_rhs, preferred_element_type=preferred_element_type,
            precision=precision,
        )  # fmt: skip
    x, w = _mesh.vary_together(axis_name, x, w)
    params = Params(
        axis_names=_mesh.as_tuple(axis_name),
        world=world,
        split=split,
        concat=concat,
        transpose_rhs=transpose_rhs,
        out_dtype=out,
        precision=precision,
    )
    if 0 in x.shape or 0 in w.shape:
        ((y_shape, _),) = _result_shapes(x, w, params=params)
        return _product.zeros(y_shape, out, x)
    (y,) = differentiable(x, w, params)
    return y


def _axis_of_product(name: str, axis: Any, x: Any) -> int:
    """Not negative. The product has as many dimensions as x."""
    if not isinstance(axis, int | np.integer):
        raise TypeError(f"jflux.{OP}: {name} must be an int, got {axis!r}")
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(
            f"jflux.{OP}: {name}={axis} must name a dimension of the product x @ w, which has "
            f"{x.ndim}; x has shape {x.shape}"
        )
    return int(axis) % x.ndim


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def differentiable(x: jax.Array, w: jax.Array, params: Params) -> list[jax.Array]:
    return _primitive.bind(x, w, params=params)


def _forward(x, w, params):
    return differentiable(x, w, params), (x, w)


def _backward(params, residuals, cotangents):
    (x, w), (dy,) = residuals, cotangents
    back = dataclasses.replace(params, split=params.concat, concat=params.split)
    dproduct = _exchanged(dy.astype(x.dtype), back)
    transposed = not params.transpose_rhs
    dx = reference.matmul(dproduct, w, x.dtype, params.precision, transposed)
    return dx, weight_gradient(x, dproduct, params.transpose_rhs, w.dtype, params.precision)


differentiable.defvjp(_forward, _backward)


def _exchanged(product: jax.Array, params: Params) -> jax.Array:
    names, world = params.axis_names, params.world
    return exchange.bind("all_to_all", product, names, world, params.split, params.concat)


def _multiply(x: jax.Array, w: jax.Array, params: Params) -> jax.Array:
    return reference.matmul(x, w, params.out_dtype, params.precision, params.transpose_rhs)


def _result_shapes(x, w, *, params):
    shape = [*x.shape[:-1], _product.columns(w, params.transpose_rhs)]
    shape[params.split] //= params.world
    shape[params.concat] *= params.world
    return [(tuple(shape), params.out_dtype)]


def _composite(x, w, *, params):
    """The call as a product and an exchange, which sees for itself whether it is `lax`'s."""
    return [_exchanged(_multiply(x, w, params), params)]


def _not_fused(x, w, *, params, platform):
    return _product.why_no_kernel([(x, w)], params, platform)


def _by_rows(x: Any, params: Params) -> tuple[bool, bool]:
    """Whether pieces are rows, of the product and of y."""
    return params.split != x.ndim - 1, params.concat != x.ndim - 1


def _extent(x, w, *, params):
    """(outer, inner, k, n) of a piece: its rows as cc/core/rows.h numbers them, and its columns."""
    split_rows, concat_rows = _by_rows(x, params)
    n = _product.columns(w, params.transpose_rhs)
    n = n if split_rows else n // params.world
    if not split_rows and not concat_rows:
        return 1, _product.total_rows(x), x.shape[-1], n
    dimension = params.split if split_rows else params.concat
    blocks = params.world if split_rows else 1
    return *_product.outer_inner(x.shape, dimension, blocks), x.shape[-1], n


#: Rows of a rank's product below which XLA's product and an exchange are taken instead of the
#: kernel. (This and the next figure are estimates, which nobody has measured yet.)
FEWEST_ROWS = 512
#: How much more than it has to the kernel may compute: a piece is whole tiles to it, of 128 columns
#: at least.
MOST_PADDED = 1.125


def kernel_is_faster(piece_rows: int, piece_columns: int, product_rows: int) -> bool:
    """On GPUs, where nothing was measured for the call."""
    tile = _product.CUDA_TILE_ROWS
    computed = -(-piece_rows // tile) * tile * -(-piece_columns // tile) * tile
    return product_rows >= FEWEST_ROWS and computed <= MOST_PADDED * piece_rows * piece_columns


def _apart_is_faster(x, w, *, params):
    outer, inner, _, n = _extent(x, w, params=params)
    m = _product.total_rows(x)
    return not kernel_is_faster(outer * inner, n, m)


def _adapt(x, w, *, params, platform):
    split_rows, concat_rows = _by_rows(x, params)
    composite = functools.partial(_composite, params=params)
    if split_rows and concat_rows and params.split != params.concat:
        return composite
    if platform != "cuda":
        return None
    outer, inner, _, n = _extent(x, w, params=params)
    if params.out_dtype != x.dtype or n % _product.UNIT != 0:
        return composite
    bind = functools.partial(_primitive.bind, params=params)
    if not _product.in_units([x], [w]):
        return lambda x, w: bind(*_product.pad_to_units([x], [w]))
    if outer == 1 or inner % _product.CUDA_TILE_ROWS == 0:
        return None

    # The kernel's tiles of rows would straddle leading indices: bring the ranks to the front.
    def rank_major(x, w):
        if split_rows:
            x = x.reshape(outer, params.world, inner, -1).swapaxes(0, 1)
        split, concat = (int(not by_rows) for by_rows in (split_rows, concat_rows))
        flat = dataclasses.replace(params, split=split, concat=concat)
        (y,) = _primitive.bind(x.reshape(-1, x.shape[-1]), w, params=flat)
        if concat_rows:
            y = y.reshape(params.world, outer, inner, n).swapaxes(0, 1)
        return [y.reshape(shape)]

    ((shape, _),) = _result_shapes(x, w, params=params)
    return rank_major


def _attributes(x, w, *, params, platform):
    split_rows, concat_rows = _by_rows(x, params)
    return {"concat_rows": concat_rows, "split_rows": split_rows}


def _batch(primitive, operands, dims, *, params):
    def bind(x, w, shift=0):
        moved = dataclasses.replace(
            params, split=params.split + shift, concat=params.concat + shift
        )
        return primitive.bind(x, w, params=moved)

    (x, w), (x_dim, w_dim) = operands, dims
    if w_dim is None:
        return bind(jnp.moveaxis(x, x_dim, 0), w, shift=1), [0]
    if x_dim is None:
        # The batch is the minor part of a wider w's columns, so that pieces of them stay together.
        n_axis = _product.columns_axis(params.transpose_rhs)
        w = jnp.moveaxis(w, w_dim, n_axis + 1)
        n, b = w.shape[n_axis : n_axis + 2]
        (y,) = bind(x, w.reshape(*w.shape[:n_axis], n * b, *w.shape[n_axis + 2 :]))
        split_rows, concat_rows = _by_rows(x, params)
        n = n if split_rows else n // params.world
        n = n if concat_rows else n * params.world
        return [y.reshape(*y.shape[:-1], n, b)], [y.ndim]
    return _product.batch_in_turn(bind, operands, dims)


_primitive = _ffi.make_primitive(
    OP,
    abstract_eval=_result_shapes,
    reference=_composite,
    not_fused=_not_fused,
    adapt=_adapt,
    batch=_batch,
    **_product.call_rules(
        OP,
        extent=_extent,
        apart_is_faster=_apart_is_faster,
        attributes=_attributes,
    ),
)
