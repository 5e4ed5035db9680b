"""Split attention as a fixed number of calls: one causal call, and calls without a mask over whole
chunks of keys.

A chunk is a run of consecutive positions of one rank. A rank has two chunks in zigzag order (c and
2 N - 1 - c of 2 N), otherwise one. In causal attention a chunk attends to all of an earlier chunk,
to itself causally, and to nothing of a later chunk. Which chunks are earlier depends on the rank,
which is known only when the program runs. All ranks run one program, so such a call has the
same size on all ranks, and only its start may depend on the rank::

    zigzag, N = 4, chunks of keys 0 to 7        sizes 4, 2, 1
    rank  queries   attend to                   as
    0     0, 7      -;       0 1 2 3 4 5 6      -;    0..3, 4..5, 6
    1     1, 6      0;       0 1 2 3 4 5        0;    0..3, 4..5
    2     2, 5      0 1;     0 1 2 3 4          0..1; 0..3, 4
    3     3, 4      0 1 2;   0 1 2 3            0..1, 2; 0..3

The late chunk of queries attends to the first N chunks on every rank. Besides, the early chunk
attends to r chunks and the late one to N - 1 - r: together N - 1 on every rank. Halving N - 1 again
and again gives sizes of which some add up to any r, and the others to N - 1 - r. So no rank
makes a call that it does not need.

What was not taken, and why:

- ``lax.switch`` over the rank takes the exact slices, in one call for each chunk of queries. But it
  compiles N programs, and the host waits for the rank to pick one.
- cuDNN's lengths of sequences (its padding mask) allow one call for any number of keys. Some ranks
  have no keys, and cuDNN does not say what it returns then, nor what it writes to the gradients of
  keys beyond the length.
- A pair of chunks as an element of cuDNN's batch is one call, which reads queries and writes
  outputs N - 1 times.

In contiguous order the last rank needs N - 1 chunks and the first one none. All ranks make all
calls and drop the results that they do not need: attention takes as long as the last rank either
way.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from .sequence_layouts import Layout


@dataclasses.dataclass(frozen=True)
class UnmaskedCall:
    """One chunk of queries over consecutive chunks of keys, all pairs of them.

    Attributes:
      width: chunks of keys.
      chunk: which of a rank's chunks of queries, by rank.
      start: the first chunk of keys, by rank.
      used: whether the result counts, by rank.
    """

    width: int
    chunk: Any
    start: Any
    used: Any

    def at(self, *place: Any) -> UnmaskedCall:
        """The call of the rank at `place`. A field that is the same on all ranks is a Python
        number, others are int32 []."""
        return UnmaskedCall(
            self.width, *(_at(a, place) for a in (self.chunk, self.start, self.used))
        )


def _at(table: np.ndarray, place: tuple[Any, ...]) -> Any:
    first = table.flat[0]
    return first.item() if (table == first).all() else jnp.asarray(table)[place]


@dataclasses.dataclass(frozen=True)
class ChunkCalls:
    """The calls of a rank.

    Attributes:
      chunks: how many chunks of queries, and of keys, a rank has.
      causal: whether one causal call makes each of these chunks attend to itself.
      unmasked: the other calls. The start of one counts chunks of the keys at hand: all keys in the
        order of the sequence if they are gathered, one rank's keys around a ring.
    """

    chunks: int
    causal: bool
    unmasked: tuple[UnmaskedCall, ...]

    def at(self, *place: Any) -> ChunkCalls:
        return dataclasses.replace(self, unmasked=tuple(p.at(*place) for p in self.unmasked))


def takes(layout: Layout, ranks: int, causal: bool) -> bool:
    """Whether attention in this order consists of whole chunks."""
    return not causal or ranks == 1 or layout != "striped"


def chunks_of(layout: Layout, ranks: int, causal: bool) -> int:
    """How many chunks a rank has."""
    return 2 if causal and ranks > 1 and layout == "zigzag" else 1


def sizes_of(total: int) -> Iterator[int]:
    """Sizes that add up to `total`, the largest first. Some of them add up to any smaller number:
    take each that still fits. Each size is at most one more than the sum of the later ones."""
    while total > 0:
        size = (total + 1) // 2
        yield size
        total -= size


def over_all_keys(layout: Layout, ranks: int, causal: bool) -> ChunkCalls:
    """The calls of a rank over all keys, which are in the order of the sequence. Fields of
    calls are tables [ranks]."""
    every = np.ones(ranks, np.int32)
    if not causal:  # in which order does not matter
        return ChunkCalls(1, False, (UnmaskedCall(ranks, 0 * every, 0 * every, every > 0),))
    early = np.zeros(ranks, np.int32)  # chunks that the early one has attended to
    late = early + ranks
    left = np.arange(ranks, dtype=np.int32)
    zigzag = chunks_of(layout, ranks, causal) == 2
    unmasked = [UnmaskedCall(ranks, every, 0 * every, every > 0)] if zigzag else []
    for size in sizes_of(ranks - 1):
        fits = left >= size
        if zigzag:
            start = np.where(fits, early, late)
            unmasked.append(UnmaskedCall(size, np.where(fits, 0, every), start, every > 0))
        else:
            unmasked.append(UnmaskedCall(size, 0 * every, np.where(fits, early, 0), fits))
        taken = np.int32(size) * fits
        early, late, left = early + taken, late + np.int32(size) - taken, left - taken
    return ChunkCalls(2 if zigzag else 1, True, tuple(unmasked))


def over_own_keys(causal: bool) -> ChunkCalls:
    """The calls over a rank's own keys. Its chunks are in the order of the sequence, so one causal
    call is enough."""
    once = np.ones(1, np.int32)
    every = UnmaskedCall(1, 0 * once, 0 * once, once > 0).at(0)
    return ChunkCalls(1, True, ()) if causal else ChunkCalls(1, False, (every,))


def over_peer_keys(layout: Layout, ranks: int, causal: bool) -> ChunkCalls:
    """The calls over the keys of another rank. Fields of calls are tables [ranks, ranks], by the
    rank and by the owner of the keys."""
    every = np.ones((ranks, ranks), np.int32)
    if not causal:
        return ChunkCalls(1, False, (UnmaskedCall(1, 0 * every, 0 * every, every > 0),))
    earlier = np.tri(ranks, k=-1, dtype=bool)  # the owner's early chunk is before the rank's
    if chunks_of(layout, ranks, causal) == 1:
        return ChunkCalls(1, False, (UnmaskedCall(1, 0 * every, 0 * every, earlier),))
    both = np.where(earlier, 0, every)
    late_over_early = UnmaskedCall(1, every, 0 * every, every > 0)
    return ChunkCalls(2, False, (late_over_early, UnmaskedCall(1, both, both, every > 0)))
