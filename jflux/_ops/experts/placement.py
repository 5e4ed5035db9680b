"""Where experts lie: choices of experts as choices of the physical slots that hold them.
Serving and training with redundant experts: DeepSeek-V3 (arXiv 2412.19437, section 3.4)."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..._call import local_ops, value_checks
from ..._ranks import meshes
from ..._ranks.meshes import AxisName
from ..collectives.exchange import all_gather
from ._destinations import number_among_equals, of_earlier_ranks
from .routing import Routing, route


@functools.partial(meshes.axis_by_name, package="jflux.moe")
def place(
    topk_indices: jax.Array,
    placement: jax.Array,
    num_experts: int,
    *,
    axis_name: AxisName | None = None,
) -> jax.Array:
    """Choices of experts as choices of the physical slots that hold them.

    The choices of an expert take its physical slots in turn, in the order of (rank, token, j). So
    its slots get equally many, up to one, of all choices and of those of each rank. Which slot a
    choice gets depends on the order of choices, and not on the number of ranks. :func:`route`,
    :func:`jflux.moe_dispatch` and :func:`jflux.dispatch_grouped_matmul` take the result as choices
    among S experts.

    It has no gradient: choices are integers.

    Args:
      topk_indices: [T, k] integers, the experts of each token; -1: none.
      placement: [S] integers, the expert that each physical slot holds, the same on all ranks; -1,
        or any number that is no expert: none. It may change without compiling again.
      num_experts: E, of all ranks together.
      axis_name: inside ``jax.shard_map``, the mesh axes that tokens are split over: turns go on
        from rank to rank. A rank receives 4 E bytes from each other one. None: each rank begins
        with the first slot of each expert.

    Returns:
      i32 [T, k], from 0 to S - 1. -1 for -1, and for an expert that no physical slot holds:
      :func:`statistics` counts both as unassigned. S, which is no slot, for any other number that
      is no expert.

    Raises:
      TypeError, ValueError: choices that are not integers [T, k], a placement that is not integers
        [S], or fewer slots than experts, when it is traced.
    """
    op = "moe.place"
    local_ops.check_arrays(op, topk_indices=topk_indices)
    if not jnp.issubdtype(topk_indices.dtype, jnp.integer) or topk_indices.ndim != 2:
        raise _not_integers(op, "topk_indices", "[T, k]", topk_indices)
    slots = check_placement(op, placement, num_experts).shape[0]
    indices = value_checks.to_int32(topk_indices)
    known = (indices >= 0) & (indices < num_experts)
    by_expert, held = (
        route(jnp.where(known, indices, -1), num_experts),
        _held(placement, num_experts),
    )
    number = number_among_equals(indices, by_expert)
    if axis_name is not None:
        everyones = all_gather(by_expert.counts, axis_name=axis_name)
        rank = lax.axis_index(meshes.as_tuple(axis_name))
        number = number + of_earlier_ranks(everyones, rank)[indices]
    replicas = held.counts[indices]
    turn = number % jnp.maximum(replicas, 1)
    found = jnp.where(replicas > 0, held.source[held.offsets[indices] + turn], -1)
    return jnp.where(known, found, jnp.where(indices == -1, -1, slots))


def check_placement(op: str, placement: Any, num_experts: int) -> jax.Array:
    """A placement, i32 [S]."""
    placement = _integers(op, "placement", placement)
    if placement.shape[0] < num_experts:
        raise ValueError(
            f"jflux.{op}: placement {placement.shape} has fewer physical slots than there are "
            f"experts, {num_experts}; each must have one"
        )
    return placement


def _not_integers(op: str, name: str, shape: str, array: Any) -> Exception:
    kind = TypeError if not jnp.issubdtype(array.dtype, jnp.integer) else ValueError
    return kind(f"jflux.{op}: {name} must be integers {shape}, got {array.dtype} {array.shape}")


def _held(placement: jax.Array, num_experts: int) -> Routing:
    """The physical slots by the expert that they hold, as tokens with one choice."""
    placement = value_checks.to_int32(placement)
    known = (placement >= 0) & (placement < num_experts)
    return route(jnp.where(known, placement, -1)[:, None], num_experts)


def _integers(op: str, name: str, array: Any) -> jax.Array:
    local_ops.check_arrays(op, **{name: array})
    if not jnp.issubdtype(array.dtype, jnp.integer) or array.ndim != 1:
        raise _not_integers(op, name, "[S]", array)
    return value_checks.to_int32(array)
