"""all_gather_matmul: wrapper, gradients, and how it lowers. Kernels: cc/ops/all_gather_matmul."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.interpreters import partial_eval as pe
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jax.typing import DTypeLike

from .. import _ffi, _global, _mesh, reference
from .._mesh import AxisName
from . import _product

#: The name that `jax.checkpoint` policies know the gathered operands by.
GATHERED = "jflux_gathered"


@dataclasses.dataclass(frozen=True)
class Params:
    """A call, less its operands.

    Attributes:
      results: which of ("y", "gathered") to return; never neither.
    """

    axis_names: tuple[Any, ...]
    world: int
    gather_dimension: int
    results: tuple[str, ...]
    transpose_rhs: bool
    out_dtype: np.dtype
    precision: Any = None


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
    mesh: Mesh | AbstractMesh | None = None,
    x_spec: PartitionSpec | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """``all_gather(x, axis_name) @ w``, with the gather hidden in the product.

    Inside ``jax.shard_map``, per rank of N along `axis_name`::

        x [..., m/N, k]   w [k, n/N]   ->   y [..., m, n/N]

    means what :func:`jflux.reference.all_gather_matmul` means. This is the first half of a
    tensor-parallel layer with sequence-parallel activations (Flux, arXiv 2406.06858, section 3:
    AllGather + GEMM).

    Outside ``shard_map`` it takes global arrays, x [..., m, k] sharded over `axis_name` in its
    gather dimension and w [k, n] in its last one, and wraps itself in ``shard_map``.

    Differentiable in reverse mode. dx is one :func:`jflux.matmul_reduce_scatter`; dw multiplies by
    the gathered x, which is kept under the name ``"jflux_gathered"`` so that a `jax.checkpoint`
    policy can choose to gather it again instead.

    Args:
      x: [..., m/N, k]; float16, bfloat16, float32 or float64 (CPU), float16 or bfloat16 (GPU).
        Other types take the reference.
      w: [k, n/N], or [n/N, k] with `transpose_rhs`; of x's type.
      axis_name: a mesh axis, or a tuple of them (the first one major).
      gather_dimension: which of x's leading dimensions to gather; the second to last by default.
      return_gathered: also return the gathered x, [..., m, k].
      transpose_rhs: w holds the transposed weight. No copy is made.
      preferred_element_type: the type of y; by default x's. Sums are in float32 (float64 for
        float64) whatever it is.
      precision: as in `lax.dot_general`; used by the reference only.
      mesh: for global arrays; by default the ambient mesh (`jax.set_mesh`), or x's own.
      x_spec: for global arrays: how x is sharded, if other dimensions are sharded too; by default
        what its type says (explicit sharding), or not at all. The axis is added at
        `gather_dimension` if it is not there. Operands that are sharded otherwise are brought into
        place first.

    Returns:
      y, or (y, gathered x). Differentiated, dy of another type than x's is rounded to it.

    Raises:
      ValueError, TypeError: operands that do not fit, when the call is traced; ValueError when it
        is lowered, for one that the symmetric heap has no room for.
      NotImplementedError: when it is lowered with ``jflux.config.strict``, for one that no kernel
        takes.
      jax.errors.JaxRuntimeError: a peer did not come within the deadline (see :func:`jflux.init`).
    """
    dimension = _product.check_operands(
        "all_gather_matmul", x, w, gather_dimension, "gather_dimension"
    )
    if not _mesh.is_bound(axis_name):
        return _global.all_gather_matmul(
            all_gather_matmul, x, w, mesh=mesh, x_spec=x_spec, axis_name=axis_name,
            gather_dimension=dimension, return_gathered=return_gathered,
            transpose_rhs=transpose_rhs, preferred_element_type=preferred_element_type,
            precision=precision,
        )  # fmt: skip
    _product.check_contraction("all_gather_matmul", x, w, transpose_rhs)
    world = _mesh.axis_size(axis_name)
    out = _product.out_dtype(x, w, preferred_element_type)
    if _product.is_plain("all_gather_matmul", axis_name):
        return reference.all_gather_matmul(
            x, w, axis_name=axis_name, gather_dimension=dimension, return_gathered=return_gathered,
            transpose_rhs=transpose_rhs, preferred_element_type=preferred_element_type,
            precision=precision,
        )  # fmt: skip
    x, w = _mesh.vary_together(axis_name, x, w)
    params = Params(
        axis_names=_mesh.as_tuple(axis_name),
        world=world,
        gather_dimension=dimension,
        results=("y", "gathered") if return_gathered else ("y",),
        transpose_rhs=transpose_rhs,
        out_dtype=out,
        precision=precision,
    )
    if _product.is_empty(x, w):
        results = [_product.zeros(s, d, x) for s, d in _result_shapes(x, w, params)]
    else:
        results = differentiable(x, w, params)
    return (results[0], results[1]) if return_gathered else results[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def differentiable(x: jax.Array, w: jax.Array, params: Params) -> list[jax.Array]:
    return _primitive.bind(x, w, params=params)


def _forward(x, w, params):
    # `differentiable` and not the primitive, so that gradients have gradients.
    y, gathered = differentiable(x, w, dataclasses.replace(params, results=("y", "gathered")))
    gathered = checkpoint_name(gathered, GATHERED)
    return [y, gathered][: len(params.results)], (gathered, w)


def _backward(params, residuals, cotangents):
    from . import matmul_reduce_scatter as dual

    gathered, w = residuals
    dy = cotangents[0].astype(gathered.dtype)
    (dx,) = dual.differentiable(
        dy,
        w,
        dual.Params(
            axis_names=params.axis_names,
            world=params.world,
            scatter_dimension=params.gather_dimension,
            transpose_rhs=not params.transpose_rhs,
            out_dtype=gathered.dtype,
            precision=params.precision,
        ),
    )
    if len(cotangents) > 1:
        dx += lax.psum_scatter(
            cotangents[1],
            params.axis_names,
            scatter_dimension=params.gather_dimension,
            tiled=True,
        )
    dw = weight_gradient(gathered, dy, params.transpose_rhs, w.dtype, params.precision)
    return dx, dw


differentiable.defvjp(_forward, _backward)


def weight_gradient(
    x: jax.Array, dy: jax.Array, transpose_rhs: bool, dtype: Any, precision: Any
) -> jax.Array:
    """``x^T @ dy`` over all leading dimensions: [k, n], or [n, k] with `transpose_rhs`."""
    rows = tuple(range(x.ndim - 1))
    lhs, rhs = (dy, x) if transpose_rhs else (x, dy)
    return lax.dot_general(
        lhs, rhs, ((rows, rows), ((), ())), precision=precision, preferred_element_type=dtype
    )


def _result_shapes(x, w, params):
    shape = list(x.shape)
    shape[params.gather_dimension] *= params.world
    n = w.shape[0 if params.transpose_rhs else 1]
    known = {"y": ((*shape[:-1], n), params.out_dtype), "gathered": (tuple(shape), x.dtype)}
    return [known[r] for r in params.results]


def _reference(x, w, *, params):
    gathered = lax.all_gather(x, params.axis_names, axis=params.gather_dimension, tiled=True)
    if params.results == ("gathered",):
        return [gathered]
    y = reference._matmul(gathered, w, params.out_dtype, params.precision, params.transpose_rhs)
    return [y, gathered][: len(params.results)]


def _is_reference(x, w, params):
    return params.results == ("gathered",)


def _not_fused(x, w, params, platform):
    return _product.kernel_takes(x, w, params.out_dtype, params.world, platform)


def _rank_shape(x, params):
    return _product.outer_inner(x.shape, params.gather_dimension, 1)


def lax_is_faster(m: int, world: int) -> bool:
    """For m rows in all, on GPUs."""
    # n = 49152, k = 12288, 4 x H200 (docs/design/0003): 1.2 of lax's time at m = 64, .96 at 512,
    # .90 at 1024. With rows that are not whole tiles, tile rows wait for two ranks' rows: 3 x H200:
    # 1.19 at 1026, .98 at 2049.
    rows = m // world
    ragged = rows % _product.CUDA_TILE_ROWS != 0
    return rows < _product.CUDA_TILE_ROWS or (ragged and m < 2048)


def _lax_is_faster(x, w, params, platform):
    return platform == "cuda" and lax_is_faster(_product.total_rows(x) * params.world, params.world)


def _adapt(x, w, params, platform):
    if platform != "cuda":
        return None
    return _product.pad_to_units(x, w, params, _primitive.bind)


def _batch(primitive, operands, dims, *, params):
    def bind(x, w, shift):
        moved = dataclasses.replace(params, gather_dimension=params.gather_dimension + shift)
        return primitive.bind(x, w, params=moved)

    if params.results == ("gathered",):
        x, w = operands
        if dims[0] is None:
            return bind(x, jnp.moveaxis(w, dims[1], 0)[0], 0), [None]
        w = w if dims[1] is None else jnp.moveaxis(w, dims[1], 0)[0]
        return bind(jnp.moveaxis(x, dims[0], 0), w, 1), [0]
    return _product.batch_operands(bind, *operands, *dims, transpose_rhs=params.transpose_rhs)


_primitive = _ffi.make_primitive(
    "all_gather_matmul",
    abstract_eval=_result_shapes,
    reference=_reference,
    rank_shape=_rank_shape,
    is_reference=_is_reference,
    not_fused=_not_fused,
    lax_is_faster=_lax_is_faster,
    adapt=_adapt,
    batch=_batch,
)


def _drop_unused(used, *rest):
    """Recomputing under `jax.checkpoint` wants the gathered x alone: then no product is made."""
    eqn = rest[-1]  # jax 0.12 passes which inputs are live before it
    params = eqn.params["params"]
    if not any(used):
        return [False, False], None
    if all(used):
        return [True, True], eqn
    results = tuple(r for r, u in zip(params.results, used, strict=True) if u)
    outvars = [v for v, u in zip(eqn.outvars, used, strict=True) if u]
    smaller = dataclasses.replace(params, results=results)
    return [True, True], eqn.replace(outvars=outvars, params={"params": smaller})


pe.dce_rules[_primitive] = _drop_unused
