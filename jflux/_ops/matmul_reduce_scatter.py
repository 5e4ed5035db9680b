"""matmul_reduce_scatter: wrapper, gradients, and how it lowers. Kernels:
cc/ops/matmul_reduce_scatter."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jax.typing import DTypeLike

from .. import _ffi, _global, _mesh, reference
from .._mesh import AxisName
from . import _product
from . import all_gather_matmul as _dual


@dataclasses.dataclass(frozen=True)
class Params:
    """A call, less its operands."""

    axis_names: tuple[Any, ...]
    world: int
    scatter_dimension: int
    transpose_rhs: bool
    out_dtype: np.dtype
    precision: Any = None


def matmul_reduce_scatter(
    x: jax.Array,
    w: jax.Array,
    *,
    axis_name: AxisName,
    scatter_dimension: int = -2,
    transpose_rhs: bool = False,
    preferred_element_type: DTypeLike | None = None,
    precision: lax.PrecisionLike = None,
    mesh: Mesh | AbstractMesh | None = None,
    x_spec: PartitionSpec | None = None,
) -> jax.Array:
    """``psum_scatter(x @ w, axis_name)``, with the reduction hidden in the product.

    Inside ``jax.shard_map``, per rank of N along `axis_name`::

        x [..., m, k/N]   w [k/N, n]   ->   y [..., m/N, n]

    means what :func:`jflux.reference.matmul_reduce_scatter` means. This is the second half of a
    tensor-parallel layer with sequence-parallel activations (Flux, arXiv 2406.06858, section 3:
    GEMM + ReduceScatter). Peers' partial products travel in y's type and are summed in float32
    (float64 for float64) in a fixed order, so that every run gives the same bits: in rank order on
    the CPU, a rank's own unrounded part first and then the others in rank order on GPUs.

    Outside ``shard_map`` it takes global arrays, x [..., m, k] sharded over `axis_name` in its last
    dimension and w [k, n] in its first, and wraps itself in ``shard_map``.

    Differentiable in reverse mode: dx is one :func:`jflux.all_gather_matmul`, which also gathers
    dy for dw.

    Args:
      x: [..., m, k/N]; float16, bfloat16, float32 or float64 (CPU), float16 or bfloat16 (GPU).
        Other types take the reference.
      w: [k/N, n], or [n, k/N] with `transpose_rhs`; of x's type.
      axis_name: a mesh axis, or a tuple of them (the first one major).
      scatter_dimension: which of x's leading dimensions to scatter; the second to last by default.
      transpose_rhs: w holds the transposed weight. No copy is made.
      preferred_element_type: the type of y; by default x's.
      precision: as in `lax.dot_general`; used by the reference only.
      mesh: for global arrays; by default the ambient mesh (`jax.set_mesh`), or x's own.
      x_spec: for global arrays: how x is sharded, if other dimensions are sharded too; by default
        what its type says (explicit sharding), or not at all. The axis is added at the last
        dimension if it is not there. Operands that are sharded otherwise are brought into place
        first.

    Returns:
      y, this rank's rows of the sum over ranks. Differentiated, dy of another type than x's is
      rounded to it.

    Raises:
      ValueError, TypeError: operands that do not fit, when the call is traced; also for a scatter
        dimension that the ranks do not divide, as in `lax.psum_scatter`. ValueError when it is
        lowered, for a call that the symmetric heap has no room for.
      NotImplementedError: when it is lowered with ``jflux.config.strict``, for one that no kernel
        takes.
      jax.errors.JaxRuntimeError: a peer did not come within the deadline (see :func:`jflux.init`).
    """
    dimension = _product.check_operands(
        "matmul_reduce_scatter", x, w, scatter_dimension, "scatter_dimension"
    )
    if not _mesh.is_bound(axis_name):
        return _global.matmul_reduce_scatter(
            matmul_reduce_scatter, x, w, mesh=mesh, x_spec=x_spec, axis_name=axis_name,
            scatter_dimension=dimension, transpose_rhs=transpose_rhs,
            preferred_element_type=preferred_element_type, precision=precision,
        )  # fmt: skip
    _product.check_contraction("matmul_reduce_scatter", x, w, transpose_rhs)
    world = _mesh.axis_size(axis_name)
    if x.shape[dimension] % world != 0:
        raise ValueError(
            f"jflux.matmul_reduce_scatter: x has {x.shape[dimension]} rows in its "
            f"scatter_dimension={dimension}, which the {world} ranks of {axis_name=} do not "
            f"divide; x has shape {x.shape}"
        )
    out = _product.out_dtype(x, w, preferred_element_type)
    if _product.is_plain("matmul_reduce_scatter", axis_name):
        return reference.matmul_reduce_scatter(
            x, w, axis_name=axis_name, scatter_dimension=dimension, transpose_rhs=transpose_rhs,
            preferred_element_type=preferred_element_type, precision=precision,
        )  # fmt: skip
    x, w = _mesh.vary_together(axis_name, x, w)
    params = Params(
        axis_names=_mesh.as_tuple(axis_name),
        world=world,
        scatter_dimension=dimension,
        transpose_rhs=transpose_rhs,
        out_dtype=out,
        precision=precision,
    )
    if _product.is_empty(x, w):
        return _product.zeros(*_result_shapes(x, w, params)[0], x)
    return differentiable(x, w, params)[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def differentiable(x: jax.Array, w: jax.Array, params: Params) -> list[jax.Array]:
    return _primitive.bind(x, w, params=params)


def _forward(x, w, params):
    return differentiable(x, w, params), (x, w)


def _backward(params, residuals, cotangents):
    x, w = residuals
    dx, dy = _dual.differentiable(
        cotangents[0].astype(x.dtype),
        w,
        _dual.Params(
            axis_names=params.axis_names,
            world=params.world,
            gather_dimension=params.scatter_dimension,
            results=("y", "gathered"),
            transpose_rhs=not params.transpose_rhs,
            out_dtype=x.dtype,
            precision=params.precision,
        ),
    )
    dy = checkpoint_name(dy, _dual.GATHERED)
    dw = _dual.weight_gradient(x, dy, params.transpose_rhs, w.dtype, params.precision)
    return dx, dw


differentiable.defvjp(_forward, _backward)


def _result_shapes(x, w, params):
    shape = list(x.shape)
    shape[params.scatter_dimension] //= params.world
    return [((*shape[:-1], w.shape[0 if params.transpose_rhs else 1]), params.out_dtype)]


def _reference(x, w, *, params):
    partial = reference._matmul(x, w, params.out_dtype, params.precision, params.transpose_rhs)
    return [
        lax.psum_scatter(
            partial, params.axis_names, scatter_dimension=params.scatter_dimension, tiled=True
        )
    ]


def _is_reference(x, w, params):
    return False


def _not_fused(x, w, params, platform):
    return _product.kernel_takes(x, w, params.out_dtype, params.world, platform)


def _rank_shape(x, params):
    return _product.outer_inner(x.shape, params.scatter_dimension, params.world)


def lax_is_faster(m: int, world: int) -> bool:
    """For m rows in all, on GPUs."""
    # n = 12288, k = 49152, 4 x H200 (docs/design/0003): 1.2 of lax's time at m = 64, .92 at 512,
    # .89 at 1024. With rows that are not whole tiles, tile rows that ranks share sweep over w by
    # themselves: 3 x H200: 1.06 at 2049, .98 at 4098.
    ragged = m // world % _product.CUDA_TILE_ROWS != 0
    return m < 512 or (ragged and m < 4096)


def _lax_is_faster(x, w, params, platform):
    return platform == "cuda" and lax_is_faster(_product.total_rows(x), params.world)


def _adapt(x, w, params, platform):
    if platform != "cuda":
        return None
    padded = _product.pad_to_units(x, w, params, _primitive.bind)
    if padded is not None:
        return padded
    outer, inner = _rank_shape(x, params)
    if outer == 1 or inner % _product.CUDA_TILE_ROWS == 0:
        return None

    # The kernel's blocks of rows would straddle leading indices: bring the ranks to the front.
    def rank_major(x, w):
        k = x.shape[-1]
        blocks = x.reshape(outer, params.world, inner, k).swapaxes(0, 1).reshape(-1, k)
        flat = dataclasses.replace(params, scatter_dimension=0)
        (y,) = _primitive.bind(blocks, w, params=flat)
        return [y.reshape(_result_shapes(x, w, params)[0][0])]

    return rank_major


def _batch(primitive, operands, dims, *, params):
    def bind(x, w, shift):
        moved = dataclasses.replace(params, scatter_dimension=params.scatter_dimension + shift)
        return primitive.bind(x, w, params=moved)

    return _product.batch_operands(bind, *operands, *dims, transpose_rhs=params.transpose_rhs)


_primitive = _ffi.make_primitive(
    "matmul_reduce_scatter",
    abstract_eval=_result_shapes,
    reference=_reference,
    rank_shape=_rank_shape,
    is_reference=_is_reference,
    not_fused=_not_fused,
    lax_is_faster=_lax_is_faster,
    adapt=_adapt,
    batch=_batch,
)
