"""Where experts lie: choices of experts as choices of the physical slots that hold them, and the
weights of physical slots. Serving and training with redundant experts: DeepSeek-V3 (arXiv
2412.19437, section 3.4)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh

from ..._call import local_ops, value_checks
from ..._ranks import global_arrays, meshes
from ..._ranks.meshes import AxisName
from .._epilogue import sum_dtype
from ..collectives.exchange import all_gather
from ._destinations import number_among_equals, of_earlier_ranks
from .routing import Routing, route

Tree = TypeVar("Tree")


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


def shares(tokens_per_expert: jax.Array, placement: jax.Array) -> jax.Array:
    """i32 [S]: how many choices each physical slot gets from :func:`place`, of so many for each
    expert [E]."""
    experts = tokens_per_expert.shape[0]
    placement = value_checks.to_int32(placement)
    held = _held(placement, experts)
    replicas = held.counts[placement]
    earlier = number_among_equals(placement[:, None], held)[:, 0]
    share = (tokens_per_expert[placement] + replicas - 1 - earlier) // jnp.maximum(replicas, 1)
    return jnp.where(held.destination[:, 0] >= 0, share, 0)


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


# ---- Weights -------------------------------------------------------------------------------------


@functools.partial(meshes.axis_by_name, package="jflux.moe")
def place_weights(
    weights: Tree,
    placement: jax.Array,
    *,
    previous: jax.Array | None = None,
    axis_name: AxisName | None = None,
    mesh: Mesh | AbstractMesh | None = None,
) -> Tree:
    """The weights of physical slots: those of the expert that each holds.

    They come from weights of experts, or from those of physical slots with another placement. What
    an optimizer keeps for weights is placed likewise. The gradient of an expert's weights is the
    sum of those of its slots.

    A rank receives the weights of all other ranks, M at a time, which it holds beside its own:
    (M - 1) / M of all weights that there are.

    Args:
      weights: a pytree of arrays [E / M, ...] per rank of M along `axis_name`; with `previous`
        [S' / M, ...]. Outside ``jax.shard_map`` global arrays, [E, ...] or [S', ...], which other
        mesh axes may split too.
      placement: [S] integers, the expert of each physical slot, as in :func:`place`; the same on
        all ranks.
      previous: [S'] integers, the placement by which the weights lie. None: they are of experts.
      axis_name: the mesh axes that experts are split over. None: weights are whole, and the result
        has a slot for each element of placement.
      mesh: for global arrays; by default the ambient one, or the arrays' own.

    Returns:
      Arrays [S / M, ...] per rank. Zeros for a slot whose expert is not among the weights.

    Raises:
      TypeError, ValueError: arrays that do not fit, when it is traced.
    """
    op = "moe.place_weights"
    placement = _integers(op, "placement", placement)
    tables = [placement] if previous is None else [placement, _integers(op, "previous", previous)]

    def of_one(array: jax.Array, placement: jax.Array, *previous: jax.Array) -> jax.Array:
        ranks = meshes.axis_size(axis_name) if axis_name is not None else 1
        lie = previous[0] if previous else jnp.arange(ranks * array.shape[0], dtype=jnp.int32)
        _check_slots(op, "weights", array, "previous", lie, ranks)
        wanted = _own(op, placement, axis_name)
        same = (wanted[:, None] == lie) & (wanted >= 0)[:, None]
        first = jnp.argmax(same, 1)[:, None] == jnp.arange(same.shape[1])
        return _made_of(array, same & first, lambda held, row: row, axis_name)

    return _over_ranks(op, "weights", of_one, weights, tables, axis_name, mesh)


@functools.partial(meshes.axis_by_name, package="jflux.moe")
def sum_replicas(
    gradients: Tree,
    placement: jax.Array,
    *,
    axis_name: AxisName | None = None,
    mesh: Mesh | AbstractMesh | None = None,
) -> Tree:
    """Gradients of physical slots, summed over those that hold the same expert.

    A slot has the gradient of its own tokens. With these sums the replicas of an expert stay equal:
    the sum is made in float32 (float64 for float64), in the same order for each of them, and
    rounded once, so that they have the same bits on all ranks.

    A rank receives the gradients of all other ranks, M at a time, which it holds beside its own and
    their sums: (M - 1) / M of those of all S slots.

    Args:
      gradients: a pytree of arrays [S / M, ...] per rank of M along `axis_name`, floating. Outside
        ``jax.shard_map`` global arrays [S, ...], which other mesh axes may split too.
      placement: [S] integers, the expert of each physical slot; the same on all ranks.
      axis_name: the mesh axes that slots are split over. None: gradients are whole.
      mesh: for global arrays; by default the ambient one, or the arrays' own.

    Returns:
      As gradients.

    Raises:
      TypeError, ValueError: arrays that do not fit, when it is traced.
    """
    op = "moe.sum_replicas"

    def of_one(array: jax.Array, placement: jax.Array) -> jax.Array:
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise TypeError(f"jflux.{op}: gradients must be floating, got {array.dtype}")
        ranks = meshes.axis_size(axis_name) if axis_name is not None else 1
        _check_slots(op, "gradients", array, "placement", placement, ranks)
        same = _own(op, placement, axis_name)[:, None] == placement
        wide = sum_dtype(array.dtype)
        total = _made_of(array, same, lambda held, row: held + row.astype(wide), axis_name, wide)
        return total.astype(array.dtype)

    tables = [_integers(op, "placement", placement)]
    return _over_ranks(op, "gradients", of_one, gradients, tables, axis_name, mesh)


def _made_of(
    array: jax.Array,
    takes: jax.Array,
    into: Callable[[jax.Array, jax.Array], jax.Array],
    axis_name: AxisName | None,
    dtype: Any = None,
) -> jax.Array:
    """This rank's slots [L, ...], made of those slots of all ranks, [S', ...], that each takes.

    Ranks gather one slot of each rank at a time, in an order that is the same on all of them. It
    goes into the first slot that takes it. In the end the others copy that one.

    Args:
      array: [S' / M, ...], this rank's part.
      takes: bool [L, S']. Two rows are equal, or have nothing in common.
      into: (what a slot holds, at first zeros; a slot that comes) -> what it holds then.
      dtype: of what slots hold; None: the array's.
    """
    own, ranks = takes.shape[0], takes.shape[1] // array.shape[0]
    names = meshes.axes_of(axis_name)
    goes_to = jnp.where(jnp.any(takes, 0), jnp.argmax(takes, 0), own).astype(jnp.int32)
    held = jnp.zeros((own, *array.shape[1:]), dtype or array.dtype)
    axes = meshes.varying((array, takes)) | (meshes.tracked(names) if names else frozenset())
    array, held = (meshes.vary(a, axes) for a in (array, held))

    def one(held: jax.Array, slot: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        row, goes_to = slot
        at = jnp.minimum(goes_to, own - 1)
        before = lax.dynamic_index_in_dim(held, at, keepdims=False)
        after = jnp.where(goes_to < own, into(before, row), before)
        return lax.dynamic_update_index_in_dim(held, after, at, 0), None

    def of_each_rank(held: jax.Array, slot: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        row, goes_to = slot
        return lax.scan(one, held, (_of_all_ranks(row, names), goes_to))

    by_slot = goes_to.reshape(ranks, array.shape[0]).T
    held, _ = lax.scan(of_each_rank, held, (array, by_slot))
    first = goes_to[jnp.argmax(takes, 1)]
    full = jnp.any(takes, 1).reshape(-1, *[1] * (array.ndim - 1))
    return jnp.where(full, held[jnp.minimum(first, own - 1)], jnp.zeros((), held.dtype))


def _of_all_ranks(row: jax.Array, names: tuple[Any, ...]) -> jax.Array:
    """[M, ...]: the rows of all ranks, which go around a ring. Where other mesh axes are Auto and
    split the row, XLA sends parts of it. Before an all-gather it would bring the whole row
    together."""
    rank, ranks = meshes.rank_and_size(names or None)
    if ranks == 1:
        return row[None]
    sizes = meshes.sizes_in_mesh_order(names)
    ring = [(source, (source + 1) % ranks) for source in range(ranks)]
    pairs = meshes.renumbered(ring, names, sizes)
    names = tuple(name for name, _ in sizes)
    rows = meshes.vary(jnp.zeros((ranks, *row.shape), row.dtype), meshes.varying(row))

    def step(carry: tuple[jax.Array, jax.Array], hops: jax.Array) -> tuple[Any, None]:
        row, rows = carry
        row = lax.ppermute(row, names, pairs)
        return (row, lax.dynamic_update_index_in_dim(rows, row, (rank - hops) % ranks, 0)), None

    rows = lax.dynamic_update_index_in_dim(rows, row, rank, 0)
    (_, rows), _ = lax.scan(step, (row, rows), jnp.arange(1, ranks))
    return rows


def _own(op: str, placement: jax.Array, axis_name: AxisName | None) -> jax.Array:
    """This rank's part of a placement."""
    rank, ranks = meshes.rank_and_size(axis_name)
    if placement.shape[0] % ranks:
        raise ValueError(
            f"jflux.{op}: the {ranks} ranks along {axis_name=} do not divide the physical slots of "
            f"placement {placement.shape}"
        )
    return placement.reshape(ranks, -1)[rank]


def _check_slots(
    op: str, name: str, array: jax.Array, by: str, placement: jax.Array, ranks: int
) -> None:
    if array.shape[0] * ranks != placement.shape[0]:
        raise ValueError(
            f"jflux.{op}: {name} {array.shape} have {array.shape[0]} physical slots on each of "
            f"{ranks} ranks, and {by} {placement.shape} has {placement.shape[0]}"
        )


def _integers(op: str, name: str, array: Any) -> jax.Array:
    local_ops.check_arrays(op, **{name: array})
    if not jnp.issubdtype(array.dtype, jnp.integer) or array.ndim != 1:
        raise _not_integers(op, name, "[S]", array)
    return value_checks.to_int32(array)


def _over_ranks(
    op: str,
    name: str,
    of_one: Callable[..., jax.Array],
    tree: Tree,
    tables: Sequence[jax.Array],
    axis_name: AxisName | None,
    mesh: Mesh | AbstractMesh | None,
) -> Tree:
    """`of_one` of each array of the tree, of one rank or outside of ``shard_map`` of all."""
    leaves, structure = jax.tree.flatten(tree)
    for leaf in leaves:
        if not hasattr(leaf, "ndim") or leaf.ndim < 1:
            raise TypeError(
                f"jflux.{op}: {name} must be arrays [slots, ...], got {type(leaf).__name__}"
            )

    def of_all(leaves: list[jax.Array], *tables: jax.Array) -> list[jax.Array]:
        return [of_one(leaf, *tables) for leaf in leaves]

    if axis_name is not None and not meshes.is_bound(axis_name):
        found = global_arrays.split_first(
            of_all, f"{op}: {name}", leaves, tables, axis_name=axis_name, mesh=mesh
        )
    else:
        found = of_all(leaves, *tables)
    return jax.tree.unflatten(structure, found)
