"""A dispatch whose rows travel in ragged exchanges. Ranks first tell each other how many rows they
send, then which experts each row is for. From this each rank knows where rows lie on all ranks, and
where they come back to."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ... import moe
from ..._ranks import meshes
from ..._ranks.meshes import AxisName
from ..collectives.exchange import all_gather
from . import _destinations
from ._exchanged_rows import Handle, move
from ._partial_sums import PartialSumsHandle


class Route(NamedTuple):
    """Where the rows of a dispatch go.

    Attributes:
      handle: of the dispatch.
      sizes, padded: the rows of each of this rank's experts; the same rounded up to `alignment`.
      chosen: i32 [N, E], rows that each rank has for each expert, with those dropped.
      dropped: i32 [], of this rank's slots.
    """

    handle: Handle | PartialSumsHandle
    sizes: jax.Array
    padded: jax.Array
    chosen: jax.Array
    dropped: jax.Array


def route(
    indices: jax.Array, num_experts: int, options: _destinations.Options, axis_name: AxisName
) -> Route:
    """Where the rows of this rank's tokens go, whose choices are `indices` [T, k]."""
    axis_names = meshes.as_tuple(axis_name)
    world, rank = meshes.axis_size(axis_name), lax.axis_index(axis_names)
    tokens, k = indices.shape
    experts = num_experts // world
    slots, wrong, by_expert = _destinations.choices_of(indices, num_experts)

    # All ranks' counts: the rows that each has for each expert (`chosen`) and each rank (`rows`).
    kept, capacity = slots, options.capacity
    if capacity is not None:
        chosen = all_gather(by_expert.counts, axis_name=axis_name)
        kept = _destinations.keep(slots, by_expert, _destinations.places_of(chosen, rank, capacity))
    to = jnp.where(kept.expert >= 0, kept.expert // experts, -1)
    ranks = jnp.arange(world, dtype=jnp.int32)[:, None]
    goes = jnp.any(to[None] == ranks[:, :, None], axis=2)  # [N, T]
    by_rank = moe.route(jnp.where(goes, ranks, -1), world)
    if capacity is not None:
        rows = all_gather(by_rank.counts, axis_name=axis_name)
    else:
        both = all_gather(jnp.concatenate([by_expert.counts, by_rank.counts]), axis_name=axis_name)
        chosen, rows = both[:, :num_experts], both[:, num_experts:]
    out = _destinations.sizes_between(rows, rank)

    # The rows that this rank sends, rank after rank, in the order of tokens. With each row travel
    # the experts that it goes to, numbered from 0 on their rank.
    most_sent, most_received = min(k, world) * tokens, world * tokens
    going = by_rank.source[:most_sent]
    token, receiver = jnp.where(going >= 0, going % tokens, -1), going // tokens
    sent = jnp.where(kept.has_row & (kept.expert >= 0), kept.expert, -1)[token]
    there = (sent >= 0) & (sent // experts == receiver[:, None])
    dropped = _destinations.dropped_of(slots, kept, wrong)
    there = jnp.where(there, sent % experts, -1)
    if options.on_overflow == "error":
        there = fail_if(dropped, there, axis_name)
    came = move(axis_name, there, most_received, out, fill=-1)  # [N T, k]

    # The rows that this rank's experts get.
    of_experts = moe.route(came, experts)
    sizes = of_experts.counts
    padded = -(-sizes // options.alignment) * options.alignment
    size = _destinations.rows_of_experts(world * tokens, k, experts, options)
    if options.layout == "masked":
        starts = jnp.arange(experts, dtype=jnp.int32) * (size // experts)
        padded = jnp.full(experts, size // experts, jnp.int32)
    else:
        starts = jnp.cumsum(padded) - padded
    slot, row_there = _destinations.expert_rows(came, of_experts, starts, size)
    if options.partial_sums:
        # Each rank sends back one row of a token. The token's first slot on that rank has it.
        part = by_rank.destination[to, jnp.arange(tokens)[:, None]]
        part = jnp.where(_destinations.distinct(to).has_row & (to >= 0), part, -1)
        brief = PartialSumsHandle(token, out, part, slot, row_there, kept.first, axis_names)
        return Route(brief, sizes, padded, chosen, dropped)
    back = _destinations.compacted(came >= 0, row_there, min(k, experts) * most_received)

    # The slots that the rows which come back belong to.
    counts = chosen if capacity is None else _destinations.kept_counts(chosen, capacity)
    home = _destinations.sizes_between(counts.reshape(world, world, experts).sum(2), rank).back()
    own_slot = kept.has_row & (to >= 0)
    going_home = moe.route(jnp.where(own_slot, to, -1), world)
    place = home.received_at[to] + _destinations.number_among_equals(to, going_home)
    place = jnp.take_along_axis(place, jnp.maximum(kept.first, 0), axis=1)
    row = jnp.where(kept.first >= 0, place, -1).astype(jnp.int32)
    handle = Handle(token, out, slot, back, home, kept.first, row, axis_names)
    return Route(handle, sizes, padded, chosen, dropped)


def fail_if(count: jax.Array, x: jax.Array, axis_name: AxisName) -> jax.Array:
    """x, after a ragged_all_to_all that moves nothing and fails unless `count` is 0. The failure is
    an offset out of range, whose value selects the error message (`Meaning` in
    cc/ops/ragged_all_to_all/ragged_all_to_all_ffi.cc)."""
    none = jnp.zeros(meshes.axis_size(axis_name), jnp.int32)
    code = jnp.where(count > 0, jnp.iinfo(jnp.int32).min + count, 0)
    sizes = _destinations.Sizes(none.at[0].set(code), *[none] * 5)
    nothing = move(axis_name, jnp.zeros(1, jnp.int32), 1, sizes)
    return x + nothing.reshape(())  # 0, but XLA cannot know
