"""Where the rows of expert parallelism go: pure functions of choices and counts, on integers."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from .routing import Routing, route


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of :func:`jflux.moe_dispatch`."""

    on_overflow: str
    capacity: int | None = None
    alignment: int = 1
    layout: str = "expert"
    partial_sums: bool = False
    fill: bool = True  # rest="zeros"


class Sizes(NamedTuple):
    """Rows between ranks, as one rank's :func:`jflux.ragged_all_to_all` takes them. All are
    int32 [N].

    Attributes:
      starts: where the rows for each rank begin on this one.
      sent: how many there are.
      places: where they land on that rank.
      received: how many come from each rank.
      received_at: where those lie on this rank.
      sent_from: where they lay on that rank.
    """

    starts: jax.Array
    sent: jax.Array
    places: jax.Array
    received: jax.Array
    received_at: jax.Array
    sent_from: jax.Array

    def back(self) -> Sizes:
        """The sizes and places of the same rows on their way back."""
        return Sizes(
            self.received_at, self.received, self.sent_from, self.sent, self.starts, self.places
        )


class Slots(NamedTuple):
    """A rank's slots: slot (t, j) is the j-th choice of token t.

    Attributes:
      expert: i32 [T, k], the expert; -1: none, or dropped.
      first: i32 [T, k], the token's first slot with this expert, whose row it shares; -1: none.
    """

    expert: jax.Array
    first: jax.Array

    @property
    def has_row(self) -> jax.Array:
        """bool [T, k]: whether the slot has a row of its own."""
        return self.first == jnp.arange(self.first.shape[1])[None]


def distinct(expert: jax.Array) -> Slots:
    """The slots of choices [T, k], of which -1 is none."""
    same = (expert[:, :, None] == expert[:, None, :]) & (expert >= 0)[:, :, None]
    first = jnp.where(expert >= 0, jnp.argmax(same, axis=2), -1)
    return Slots(expert, first.astype(jnp.int32))


def keep(slots: Slots, by_expert: Routing, places: jax.Array) -> Slots:
    """The slots that find a place. Expert e has places[e] places, which it gives out in the order
    of slots. `by_expert` routes the slots that have a row."""
    kept = number_among_equals(slots.expert, by_expert) < places[slots.expert]
    kept = jnp.take_along_axis(kept, jnp.maximum(slots.first, 0), axis=1) & (slots.expert >= 0)
    return Slots(jnp.where(kept, slots.expert, -1), jnp.where(kept, slots.first, -1))


def number_among_equals(keys: jax.Array, by_key: Routing) -> jax.Array:
    """For each key, how many earlier ones in row-major order are equal to it. `by_key` routes these
    keys; the result has no meaning for a key that it leaves out."""
    return by_key.destination - by_key.offsets[keys]


def places_of(counts: jax.Array, rank: jax.Array, capacity: int) -> jax.Array:
    """i32 [E]: how many places of each expert earlier ranks leave for this one. `counts` [N, E] has
    the rows of each rank for each expert."""
    return jnp.clip(capacity - of_earlier_ranks(counts, rank), 0).astype(jnp.int32)


def of_earlier_ranks(counts: jax.Array, rank: jax.Array) -> jax.Array:
    """i32 [E]: the sum of what ranks before this one have, of counts [N, E]."""
    earlier = jnp.arange(counts.shape[0])[:, None] < rank
    return jnp.sum(jnp.where(earlier, counts, 0), 0, dtype=jnp.int32)


def kept_counts(counts: jax.Array, capacity: int) -> jax.Array:
    """i32 [N, E]: how many of the rows that each rank has for each expert find a place."""
    earlier = jnp.cumsum(counts, 0) - counts
    return jnp.clip(capacity - earlier, 0, counts).astype(jnp.int32)


def sizes_between(rows: jax.Array, rank: jax.Array) -> Sizes:
    """The sizes and places of this rank's rows, if rows[i, j] rows go from rank i to rank j. On
    both ranks they lie in the order of ranks."""
    by_sender = jnp.cumsum(rows, 1) - rows  # where they begin on their sender
    by_receiver = jnp.cumsum(rows, 0) - rows
    return Sizes(
        by_sender[rank], rows[rank], by_receiver[rank],
        rows[:, rank], by_receiver[:, rank], by_sender[:, rank],
    )  # fmt: skip


def compacted(wanted: jax.Array, values: jax.Array, size: int) -> jax.Array:
    """i32 [size]: the values that are wanted, in order; then -1."""
    order = route(jnp.where(wanted, 0, -1), 1).source[:size]
    return jnp.where(order >= 0, values.ravel()[order].astype(jnp.int32), -1)


def expert_rows(
    local_expert: jax.Array, by_expert: Routing, starts: jax.Array, size: int
) -> tuple[jax.Array, jax.Array]:
    """The rows of this rank's experts, one for each element of local_expert that is not -1, in the
    order of elements.

    Args:
      local_expert: i32, two dimensions.
      by_expert: of it.
      starts: i32 [E_local], the first row of each expert, ascending.
      size: of the rows in all.

    Returns:
      (i32 [size], the element of each row, -1: none; i32, local_expert's shape, the row of each
      element, -1: none).
    """
    row = starts[local_expert] + number_among_equals(local_expert, by_expert)
    rows = jnp.arange(size, dtype=jnp.int32)
    expert = jnp.sum(rows[:, None] >= starts[None], axis=1, dtype=jnp.int32) - 1
    within = rows - starts[expert]
    element = by_expert.source[by_expert.offsets[expert] + within]
    element = jnp.where(within < by_expert.counts[expert], element, -1)
    return element, jnp.where(local_expert >= 0, row, -1).astype(jnp.int32)


def choices_of(indices: jax.Array, num_experts: int) -> tuple[Slots, jax.Array, Routing]:
    """This rank's slots, how many indices are no expert's, and the slots that have a row by
    expert."""
    inside = (indices >= 0) & (indices < num_experts)
    slots = distinct(jnp.where(inside, indices, -1))
    wrong = jnp.sum(~inside & (indices != -1), dtype=jnp.int32)
    return slots, wrong, route(jnp.where(slots.has_row, slots.expert, -1), num_experts)


def dropped_of(slots: Slots, kept: Slots, wrong: jax.Array) -> jax.Array:
    """How many of this rank's slots found no place, or have an index that names no expert."""
    return jnp.sum((slots.expert >= 0) & (kept.expert < 0), dtype=jnp.int32) + wrong


def rows_of_experts(received: int, k: int, experts: int, options: Options) -> int:
    """The number of rows of a dispatch's result: R, or E_local C of a masked layout."""
    capacity, alignment = options.capacity, options.alignment

    def rounded(rows: int) -> int:
        return -(-rows // alignment) * alignment

    if options.layout == "masked":
        return experts * rounded(received if capacity is None else capacity)
    most = rounded(min(k, experts) * received + experts * (alignment - 1))
    return most if capacity is None else min(most, experts * rounded(capacity))
