"""Which row of the experts' operands each token's copies take, and back. Kernel:
cc/ops/moe_route."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._call import local_ops, value_checks
from ..._call.forms import Op, ShapeDtype
from ..._call.plans import Arrays
from ..._call.primitives import make_primitive
from .._epilogue import sum_dtype
from ..products import _product
from . import moe_rows
from ._checks import check_mask

OP = "moe_route"

#: That the GPU kernel's shared memory has room for.
_MOST_EXPERTS = 1536
#: In 99 KiB of shared memory, which all GPUs of compute capability 8.0 or later have.
_MOST_EXPERTS_PORTABLE = 720


class Routing(NamedTuple):
    """Where slots go. A slot is one choice of one token: slot ``t k + j`` is the j-th of token t.
    Rows lie expert after expert, and within an expert in the order of slots. All are int32. Who
    makes or changes one keeps `destination` and `source` each other's inverse.

    Attributes:
      counts: [E], rows of each expert: the ``group_sizes`` of :func:`jflux.grouped_matmul`.
      offsets: [E + 1], the first row of each expert, and in the end the number of rows.
      destination: [T, k], the row of each slot; -1: it has none.
      source: [T k], the slot of each row; -1 past the last row.
    """

    counts: jax.Array
    offsets: jax.Array
    destination: jax.Array
    source: jax.Array


class Statistics(NamedTuple):
    """How many slots of a batch got an expert, and how many did not. All are int32.

    Attributes:
      tokens_per_expert: [E], slots that chose each expert, with the dropped ones.
      dropped: [], slots that chose an expert and have no row, for want of capacity, or since there
        is no such expert: an index below -1 or from E on, which is an error on CPUs.
      unassigned: [], slots without an expert (-1).
    """

    tokens_per_expert: jax.Array
    dropped: jax.Array
    unassigned: jax.Array


@dataclasses.dataclass(frozen=True)
class Params:
    """A routing, less the choices. capacity -1: any number of rows."""

    num_experts: int
    capacity: int


def route(topk_indices: jax.Array, num_experts: int, *, capacity: int | None = None) -> Routing:
    """Sorts slots by expert, stably: the permutation that brings each expert's rows together.

    It is a counting sort, O(T k + E): in C++ on CPUs, in one kernel on GPUs. Nothing is read on the
    host. It has no gradient: choices are integers.

    Args:
      topk_indices: [T, k] integers, the experts of each token; -1: none. A token may have an expert
        twice, and then has two rows there.
      num_experts: E.
      capacity: an expert takes the first so many of its slots; the others have no row. None: all.

    Returns:
      The routing.

    Raises:
      TypeError, ValueError: choices that are not integers or not [T, k], when it is traced.
      jax.errors.JaxRuntimeError, ValueError: on CPUs, when it runs, for an index below -1 or from
        `num_experts` on. Elsewhere such a slot has no row, and
        :func:`statistics` counts it as dropped.
    """
    local_ops.check_arrays("moe.route", topk_indices=topk_indices)
    if not jnp.issubdtype(topk_indices.dtype, jnp.integer):
        raise TypeError(
            f"jflux.moe.route: topk_indices must be integers (int32), got {topk_indices.dtype}"
        )
    if topk_indices.ndim != 2:
        raise ValueError(
            f"jflux.moe.route: topk_indices must have shape [T, k], got {topk_indices.shape}"
        )
    if num_experts < 1:
        raise ValueError(f"jflux.moe.route: {num_experts=} must be at least 1")
    if capacity is not None and capacity < 0:
        raise ValueError(f"jflux.moe.route: {capacity=} must be None or at least 0")
    params = Params(int(num_experts), -1 if capacity is None else int(capacity))
    indices = value_checks.to_int32(topk_indices)
    if indices.size == 0:
        return Routing(*reference((indices,), params))
    return Routing(*_primitive.bind(indices, params=params))


def statistics(
    topk_indices: jax.Array, routing: Routing, *, mask: jax.Array | None = None
) -> Statistics:
    """How the choices were spread, and how many were dropped.

    Args:
      topk_indices: [T, k], as :func:`route` took them.
      routing: what it returned.
      mask: bool [T]; False: not a token, whose slots count for nothing: they are not `unassigned`
        either. None: all are.

    Returns:
      The statistics.

    Raises:
      ValueError, TypeError: a mask that is not bool [T].
    """
    experts = routing.counts.shape[0]
    indices = value_checks.to_int32(topk_indices)
    real = jnp.ones((), bool)
    if mask is not None:
        local_ops.check_arrays("moe.statistics", mask=mask)
        real = check_mask("jflux.moe.statistics", mask, indices.shape[:1])[:, None]
    unassigned = jnp.sum(real & (indices == -1), dtype=jnp.int32)
    dropped = jnp.sum(real & (indices != -1) & (routing.destination < 0), dtype=jnp.int32)
    return Statistics(count(jnp.where(real, indices, -1), experts), dropped, unassigned)


def count(topk_indices: jax.Array, num_experts: int) -> jax.Array:
    """i32 [E]: how many slots chose each expert. Other numbers count for none."""

    def known(indices: jax.Array) -> jax.Array:
        return jnp.where((indices >= 0) & (indices < num_experts), indices, -1)

    # Others are an error on CPUs alone. Elsewhere XLA makes one call of this and of the routing of
    # the same choices.
    indices = value_checks.to_int32(topk_indices)
    indices = lax.platform_dependent(indices, cpu=known, default=lambda indices: indices)
    return route(indices, num_experts).counts


def permute(x: jax.Array, routing: Routing, *, rest: str = "zeros") -> jax.Array:
    """A copy of its token's row for each slot, in the order of experts.

    Differentiable, any number of times and in both modes: dx is the float32 sum of the copies'
    gradients in the order of j, gathered and never scattered.

    Args:
      x: [T, H].
      routing: of T tokens.
      rest: what rows past ``routing.offsets[-1]`` hold: "zeros", or "undefined", where nothing
        reads them, as in :func:`jflux.grouped_matmul`.

    Returns:
      [T k, H].

    Raises:
      ValueError: x that is not [T, H], when it is traced.
    """
    fill = local_ops.is_filled("moe.permute", rest)
    destination = routing.destination
    _check_rows("moe.permute", "x", x, destination.shape[0], "T", destination)
    ones = jnp.ones(destination.shape, jnp.float32)
    return moe_rows.spread(x, ones, routing.source, destination, fill=fill)


def unpermute(
    y: jax.Array,
    routing: Routing,
    weights: jax.Array | None = None,
    *,
    rest: str = "zeros",
) -> jax.Array:
    """The weighted sum of each token's rows, in the order of j, in float32 (float64 for float64).

    Differentiable, any number of times and in both modes. dy is :func:`permute` with the weights,
    and the gradient of a weight a dot product, both in that type.

    Args:
      y: [T k, H], in the order of experts.
      routing: of T tokens.
      weights: [T, k], of any floating type; None: ones. The weight of a slot without a row does
        not count, and has gradient zero.
      rest: what rows of dy past ``routing.offsets[-1]`` hold, as :func:`permute` has it.

    Returns:
      [T, H], of y's type.

    Raises:
      ValueError: y or weights that do not fit, when it is traced.
    """
    fill = local_ops.is_filled("moe.unpermute", rest)
    destination = routing.destination
    _check_rows("moe.unpermute", "y", y, destination.size, "T k", destination)
    if weights is None:
        weights = jnp.ones(destination.shape, jnp.float32)
    elif weights.shape != destination.shape:
        raise ValueError(
            f"jflux.moe.unpermute: weights have shape {weights.shape}, and the routing has slots "
            f"{destination.shape}"
        )
    weights = weights.astype(sum_dtype(y.dtype))
    return moe_rows.combine(y, weights, routing.source, destination, fill=fill)


def _check_rows(op: str, name: str, a: Any, rows: int, what: str, destination: Any) -> None:
    local_ops.check_arrays(op, **{name: a})
    if a.ndim != 2 or a.shape[0] != rows:
        raise ValueError(
            f"jflux.{op}: {name} must have shape [{what}, H], with {rows} rows for a routing of "
            f"slots {destination.shape}; got {a.shape}"
        )


# ---- The primitive -------------------------------------------------------------------------------


def reference(arrays: Arrays, params: Params) -> list[jax.Array]:
    """The routing in plain `lax`."""
    (indices,) = arrays
    experts, slots = params.num_experts, indices.size
    flat = indices.reshape(-1)
    # Slots without an expert sort behind all experts.
    key = jnp.where((flat >= 0) & (flat < experts), flat, experts)
    slot = lax.iota(jnp.int32, slots)
    key, order = lax.sort((key, slot), num_keys=1, is_stable=True)
    first = jnp.searchsorted(key, jnp.arange(experts + 1, dtype=jnp.int32)).astype(jnp.int32)
    counts = jnp.diff(first)
    if params.capacity >= 0:
        counts = jnp.minimum(counts, params.capacity)
    offsets = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(counts, dtype=jnp.int32)])
    within = slot - first[key]
    kept = (key < experts) & (within < jnp.append(counts, 0)[key])
    row = jnp.where(kept, offsets[key] + within, -1)
    # `order` is a permutation, so that no two writes meet.
    destination = jnp.zeros(slots, jnp.int32).at[order].set(row, unique_indices=True)
    source = jnp.full(slots, -1, jnp.int32)
    source = source.at[jnp.where(kept, row, slots)].set(order, mode="drop", unique_indices=False)
    return [counts, offsets, destination.reshape(indices.shape), source]


def _shapes(arrays: Arrays, params: Params) -> Sequence[ShapeDtype]:
    (indices,) = arrays
    e, i32 = params.num_experts, np.dtype(np.int32)
    return [((e,), i32), ((e + 1,), i32), (indices.shape, i32), ((indices.size,), i32)]


def _why_not(arrays: Arrays, params: Params, platform: str) -> str | None:
    if platform == "cuda" and params.num_experts > _MOST_EXPERTS:
        return f"{params.num_experts} experts, the kernel takes up to {_MOST_EXPERTS}"
    return None


def _why_not_portable(arrays: Arrays, params: Params, platform: str) -> str | None:
    if params.num_experts > _MOST_EXPERTS_PORTABLE:
        return (
            f"{params.num_experts} experts, the kernel takes up to {_MOST_EXPERTS_PORTABLE} on "
            "GPUs other than Hopper"
        )
    return None


def _batch(primitive: Any, operands: Any, dims: Any, *, params: Params) -> Any:
    return _product.batch_one_by_one(
        lambda indices: primitive.bind(indices, params=params), operands, dims
    )


_primitive = make_primitive(
    Op(
        name=OP,
        result_shapes=_shapes,
        reference=reference,
        forms=(
            local_ops.kernel(
                OP,
                why_not=_why_not,
                why_not_portable=_why_not_portable,
                attributes=lambda arrays, params, plan: {"capacity": np.int64(params.capacity)},
                checked_on_gpus=True,
            ),
        ),
        batch=_batch,
        is_local=True,
    )
)
local_ops.without_derivative(_primitive)
