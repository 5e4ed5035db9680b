"""all_reduce: wrapper, gradients, and how it lowers. Kernels: cc/ops/all_reduce."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import ad

from .. import _ffi, _heap, _jflux, _mesh, reference
from .._mesh import AxisName
from . import _product

#: In the order of AllReduceAlgorithm (cc/ops/all_reduce/all_reduce.h).
ALGORITHMS = ("one_shot", "two_shot")


@dataclasses.dataclass(frozen=True)
class Params:
    """A call, less its operand."""

    axis_names: tuple[Any, ...]
    world: int
    algorithm: str | None


def all_reduce(x: Any, *, axis_name: AxisName, algorithm: str | None = None) -> Any:
    """``lax.psum(x, axis_name)``, with the latency of one exchange, or two, where x is small.

    Inside ``jax.shard_map``, per rank along `axis_name`: the sum of all ranks' x, the same bits on
    every rank. Each rank writes its data straight into the others' memory, in packets that carry
    their own flags, so that there is no barrier and no signal to wait for (the idea of NCCL's LL
    protocol). Sums are in float32 (float64 for float64), in rank order, and rounded once. Above
    4 MiB, and for types that the kernels do not take, it is ``lax.psum``.

    Differentiable like ``lax.psum``: under ``check_vma=True`` the result does not vary over
    `axis_name`, and its gradient goes to every rank as it is; otherwise the gradient is summed too.

    Args:
      x: an array of any shape, or a pytree of such, each of which is one call; float16, bfloat16,
        float32 or float64. Other types take the reference.
      axis_name: a mesh axis, or a tuple of them.
      algorithm: "one_shot" (all data to all ranks: one latency), "two_shot" (a reduce-scatter and
        an all-gather: two latencies, fewer bytes), or None, which chooses by size and ranks.

    Returns:
      The sum, of x's shape and type.

    Raises:
      ValueError: for an unknown algorithm, when the call is traced; on GPUs, when it is lowered,
        for one that the symmetric heap has no room for.
      NameError: outside ``shard_map``.
      NotImplementedError: when it is lowered with ``jflux.config.strict``, for one that no kernel
        takes.
      jax.errors.JaxRuntimeError: a peer did not come within the deadline (see :func:`jflux.init`).
    """
    if algorithm is not None and algorithm not in ALGORITHMS:
        raise ValueError(
            f"jflux.all_reduce: {algorithm=} must be None or one of {', '.join(ALGORITHMS)}"
        )
    if _product.is_plain("all_reduce", axis_name):
        return reference.all_reduce(x, axis_name=axis_name)
    params = Params(
        axis_names=_mesh.as_tuple(axis_name),
        world=_mesh.axis_size(axis_name),
        algorithm=algorithm,
    )

    def one(array: Any) -> jax.Array:
        array = jnp.asarray(array)
        if jax.typeof(array).weak_type:  # a number, which stays one
            return reference.all_reduce(array, axis_name=axis_name)
        if array.dtype == bool:  # as lax.psum
            array = array.astype(jnp.int32)
        (array,) = _mesh.vary_together(axis_name, array)
        (y,) = _primitive.bind(array, params=params)
        return y

    return jax.tree.map(one, x)


def _algorithm(x: Any, params: Params) -> int:
    """Its number; -1: XLA's own."""
    if params.algorithm is not None:
        return ALGORITHMS.index(params.algorithm)
    return _jflux.choose_all_reduce(params.world, x.size * x.dtype.itemsize)


def _result(x, params):
    return [(x.shape, x.dtype)]


def _reference(x, params):
    return [reference.all_reduce(x, axis_name=params.axis_names)]


def _not_fused(x, params, platform):
    if x.dtype not in _product.CPU_DTYPES:
        return f"{x.dtype} operands, the kernels take {', '.join(_heap._DTYPES)}"
    if params.world > _product.MAX_RANKS:
        return f"{params.world} ranks, the kernels take up to {_product.MAX_RANKS}"
    return None


def _lax_is_faster(x, params, platform, mesh):
    return _algorithm(x, params) < 0


def _launch(x, params, platform, mesh, groups):
    algorithm = _algorithm(x, params)
    if algorithm < 0:  # jflux.config.always
        algorithm = ALGORITHMS.index("two_shot")
    if _ffi.lowers_for_here(mesh):
        number = _heap.dtype_number(np.dtype(x.dtype))
        channel_bytes = functools.partial(
            _jflux.all_reduce_channel_bytes, params.world, x.size, number, algorithm
        )
        _heap.reserve(platform, groups, "all_reduce", channel_bytes)
    return {"algorithm": np.int64(algorithm)}


def _batch(primitive, operands, dims, *, params):
    return primitive.bind(*operands, params=params), dims


def _transpose(cotangents, x, *, params):
    (ct,) = cotangents
    if type(ct) is ad.Zero:
        return [ad.Zero(x.aval)]
    if x.aval.manual_axis_type.varying:  # types are tracked: x varies over the axes at least
        return [lax.pcast(ct, params.axis_names, to="varying")]
    return _primitive.bind(ct, params=params)


_primitive = _ffi.make_primitive(
    "all_reduce",
    abstract_eval=_result,
    reference=_reference,
    not_fused=_not_fused,
    lax_is_faster=_lax_is_faster,
    launch=_launch,
    batch=_batch,
    same_over=lambda params: params.axis_names,
)
ad.deflinear2(_primitive, _transpose)
