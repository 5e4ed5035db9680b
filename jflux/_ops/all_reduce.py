"""all_reduce: wrapper, gradients, and how it lowers. Kernels: cc/ops/all_reduce."""

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
from jax.interpreters import ad

from .. import _ffi, _heap, _jflux, _mesh, _norm, reference
from .._mesh import AxisName
from . import _after, _product

#: In the order of AllReduceAlgorithm (cc/ops/all_reduce/all_reduce.h).
ALGORITHMS = ("one_shot", "two_shot", "half_butterfly", "butterfly", "chunked")


@dataclasses.dataclass(frozen=True)
class Params:
    """A call, less its operands: x, the residual if there is one, and the norm's factors."""

    axis_names: tuple[Any, ...]
    world: int
    algorithm: str | None
    after: _after.After = _after.After()

    def alone(self) -> Params:
        """Without what follows the sum."""
        return dataclasses.replace(self, after=_after.After())


def all_reduce(
    x: Any,
    *,
    axis_name: AxisName,
    residual: jax.Array | None = None,
    norm: _norm.Norm | None = None,
    algorithm: str | None = None,
) -> Any:
    """``lax.psum(x, axis_name)``, with the latency of one exchange, or two, where x is small; and
    what follows it in a transformer: a residual in the same kernel, rows normalised there too where
    all data go to all ranks at once.

    Inside ``jax.shard_map``, per rank along `axis_name`: the sum of all ranks' x, the same bits on
    every rank. Each rank writes its data straight into the others' memory: up to 1 MiB in packets
    that carry their own flags, so that there is no barrier and no signal to wait for (the idea of
    NCCL's LL protocol), above in chunks that signals announce. Sums are in float32 (float64 for
    float64), in rank order, and rounded once, after the residual has been added. Above 8 MiB (two
    ranks: 16 MiB), and for types that the kernels do not take, it is ``lax.psum``.

    Differentiable like ``lax.psum``: under ``check_vma=True`` the result does not vary over
    `axis_name`, and its gradient goes to every rank as it is; otherwise the gradient is summed too.

    Args:
      x: an array of any shape, or a pytree of such, each of which is one call; float16, bfloat16,
        float32 or float64. Other types take the reference.
      axis_name: a mesh axis, or a tuple of them.
      residual: of x's shape, of any type and the same on all ranks of the axis: added to the sum (x
        is one array, then). Of x's type the kernel adds it before the sum is rounded; of another
        one XLA adds it to the rounded sum. The result has x's type.
      norm: a :class:`jflux.RMSNorm` or :class:`jflux.LayerNorm` of the sum's rows [..., width],
        whose scale and bias are [width], of any type. The kernel takes those of x's type or
        float32.
      algorithm: "one_shot" (all data to all ranks: one latency), "two_shot" (a reduce-scatter and
        an all-gather: two latencies, fewer bytes), "half_butterfly" or "butterfly" (between pairs
        of ranks, for links that do not join all of them: log2(N) steps and log2(N) times the data,
        or twice the steps and as many bytes as two_shot; their sums are in another order),
        "chunked" (as two_shot, in chunks that signals announce instead of packets: half the bytes
        on the links, and two fences more), or None, which chooses by size and ranks.

    Returns:
      The sum, of x's shape and type; with `norm` a pair: the sum, and its rows normalised.

    Raises:
      ValueError: for an unknown algorithm, or a residual or a norm that does not fit, when the call
        is traced; on GPUs, when it is lowered, for one that the symmetric heap has no room for.
      TypeError: for a norm that is none, when the call is traced.
      NameError: outside ``shard_map``.
      NotImplementedError: when it is lowered with ``jflux.config.strict``, for one that no kernel
        takes.
      jax.errors.JaxRuntimeError: a peer did not come within the deadline (see :func:`jflux.init`).
    """
    if algorithm is not None and algorithm not in ALGORITHMS:
        raise ValueError(
            f"jflux.all_reduce: {algorithm=} must be None or one of {', '.join(ALGORITHMS)}"
        )
    if residual is not None or norm is not None:
        x = jnp.asarray(x)
        x = x.astype(jnp.int32) if x.dtype == bool else x  # as lax.psum
        _after.check("all_reduce", x.shape, residual, norm)
    if _product.is_plain("all_reduce", axis_name):
        return reference.all_reduce(x, axis_name=axis_name, residual=residual, norm=norm)
    params = Params(
        axis_names=_mesh.as_tuple(axis_name),
        world=_mesh.axis_size(axis_name),
        algorithm=algorithm,
    )
    if residual is not None or norm is not None:
        after, added = _after.operands("all_reduce", params.axis_names, residual, norm)
        x, *added = _mesh.vary_together(axis_name, x, *added, same=len(added))
        results = _fused(dataclasses.replace(params, after=after), x, tuple(added))
        return results[0] if norm is None else tuple(results)

    def one(array: Any) -> jax.Array:
        array = jnp.asarray(array)
        if jax.typeof(array).weak_type:  # a number, which stays one
            return reference.all_reduce(array, axis_name=axis_name)
        if array.dtype == bool:  # as lax.psum
            array = array.astype(jnp.int32)
        (array,) = _mesh.vary_together(axis_name, array)
        return bind(params, array)[0]

    return jax.tree.map(one, x)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _fused(params: Params, x: Any, added: tuple[Any, ...]) -> list[jax.Array]:
    return bind(params, x, added)


@functools.partial(_fused.defjvp, symbolic_zeros=True)
def _fused_jvp(params: Params, primals: Any, tangents: Any) -> Any:
    (x, added), (dx, dadded) = primals, tangents
    results = _fused(params, x, added)
    dy = None if isinstance(dx, SymbolicZero) else bind(params.alone(), dx)[0]
    return results, _after.tangents(params.after, results[0], dy, added, dadded)


def bind(params: Params, x: jax.Array, added: Sequence[jax.Array] = ()) -> list[jax.Array]:
    """The sum, and what follows it; operands' types are those that `all_reduce` gives them. Only
    without what follows it can be differentiated."""
    return _primitive.bind(x, *added, params=params)


def _algorithm(x: Any, params: Params) -> int:
    """Its number; -1: XLA's own."""
    if params.algorithm is not None:
        return ALGORITHMS.index(params.algorithm)
    return _jflux.choose_all_reduce(params.world, x.size * x.dtype.itemsize)


def _result(x, *added, params):
    return [(x.shape, x.dtype)] * params.after.results


def _reference(x, *added, params):
    return _after.apply(params.after, lax.psum(x, params.axis_names), added)


def _not_fused(x, *added, params, platform):
    if x.dtype not in _product.CPU_DTYPES:
        return f"{x.dtype} operands, the kernels take {', '.join(_heap._DTYPES)}"
    if params.world > _product.MAX_RANKS:
        return f"{params.world} ranks, the kernels take up to {_product.MAX_RANKS}"
    if x.size >= 1 << 31:
        return f"{x.size} elements, the kernels take fewer than 2^31"
    return None


def _lax_is_faster(x, *added, params, platform, mesh):
    algorithm = _algorithm(x, params)
    if algorithm < 0:
        return True
    # No error for want of room, where nobody has asked for the kernel.
    chosen = params.algorithm is None and ALGORITHMS[algorithm] == "chunked"
    return (
        chosen
        and x.dtype in _product.CPU_DTYPES
        and _workspace_bytes(x, params, algorithm, 0) > _heap.heap_bytes(platform) // 2
    )


def _workspace_bytes(x: Any, params: Params, algorithm: int, width: int) -> int:
    number = _heap.dtype_number(np.dtype(x.dtype))
    return _jflux.all_reduce_workspace_bytes(params.world, x.size, number, algorithm, width)


def _number_of(x: Any, params: Params) -> int:
    """The algorithm's, of a call that the kernels take."""
    algorithm = _algorithm(x, params)
    return algorithm if algorithm >= 0 else ALGORITHMS.index("chunked")  # jflux.config.always


def _adapt(x, *added, params, platform):
    """Leaves to XLA what the kernels do not add or normalise."""
    after = params.after
    takes_residual = not after.residual or added[0].dtype == x.dtype
    dtypes = {f.dtype for f in after.factors(added)}
    # Unless it is asked for, two-shot leaves rows to XLA: in the kernel all ranks normalise all of
    # them with few threads, which takes longer from 256 KiB on 4 ranks on (docs/design/0006).
    algorithm = ALGORITHMS[_number_of(x, params)]
    takes_norm = after.norm is None or (
        (algorithm == "one_shot" or params.algorithm == "two_shot")
        and (dtypes == {x.dtype} or dtypes == {np.dtype(np.float32)} and x.dtype != np.float64)
        and _jflux.all_reduce_fits_norm(x.size, _heap.dtype_number(x.dtype), x.shape[-1])
    )
    if takes_residual and takes_norm:
        return None

    def apart(x, *added):
        if not takes_residual:
            return _after.apply(after, bind(params.alone(), x)[0], added)
        summed = dataclasses.replace(params, after=_after.After(after.residual))
        (y,) = bind(summed, x, added[: after.residual])
        rest = dataclasses.replace(after, residual=False)
        return _after.apply(rest, y, after.factors(added))

    return apart


def _launch(x, *added, params, platform, mesh, groups):
    algorithm = _number_of(x, params)
    if _ffi.lowers_for_here(mesh):
        width = 0 if params.after.norm is None else x.shape[-1]
        workspace_bytes = functools.partial(_workspace_bytes, x, params, algorithm, width)
        _heap.reserve(platform, groups, "all_reduce", workspace_bytes)
    return {
        "algorithm": np.int64(algorithm),
        "epsilon": np.float64(params.after.epsilon),
        "norm": np.int64(_norm.number(params.after.norm)),
        "residual": params.after.residual,
    }


def _batch(primitive, operands, dims, *, params):
    if len(operands) == 1:
        return primitive.bind(*operands, params=params), dims
    rows, factors = operands[: 1 + params.after.residual], operands[1 + params.after.residual :]
    bind = functools.partial(primitive.bind, params=params)
    if any(d is not None for d in dims[len(rows) :]):
        return _product.batch_in_turn(bind, operands, dims)
    size = next(a.shape[d] for a, d in zip(rows, dims, strict=False) if d is not None)
    rows = [
        jnp.broadcast_to(a, (size, *a.shape)) if d is None else jnp.moveaxis(a, d, 0)
        for a, d in zip(rows, dims, strict=False)
    ]
    results = bind(*rows, *factors)
    return results, [0] * len(results)


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
    adapt=_adapt,
    launch=_launch,
    batch=_batch,
    same_over=lambda params: params.axis_names,
)
# Alone it is linear; calls with a residual or a norm go through _fused.
ad.deflinear2(_primitive, _transpose)
