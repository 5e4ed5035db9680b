"""A cache of keys and values with its lengths, and a rank's part of it."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._call import value_checks
from ..._ranks import meshes
from ..._ranks.meshes import AxisName
from .._scaled import Scaled
from . import _flash_decode_primitive
from ._checks import DTYPES

#: What to do about a sequence that has no room.
ADVICE = "end a sequence that has filled its cache (new_lengths of 0), or make the cache larger"
ADVICE_ON_PAGES = "give a sequence its pages before its tokens come"


class KVCache(NamedTuple):
    """Keys and values of the tokens so far, of one attention layer. A pytree of arrays.

    Attributes:
      keys, values: [B, S, G, D], or a rank's [B, S/N, G, D], of one type, float16, bfloat16,
        float32 or float64: rank r of N has the positions r S/N to (r + 1) S/N - 1. Or both are
        :class:`jflux.Scaled`, of float8_e4m3fn, float8_e5m2 or int8, half of the bytes: with a
        scale for each position's head, [B, S/N, G, 1], which new ones get as they are written, or
        for each head, [1, 1, G, 1], which the caller chooses and which stays. Values may have
        another width than keys, and are None where they are the first elements of these, as in
        latent attention (`value_width` of :func:`jflux.flash_decode`).
      lengths: int32 [B], how many positions of each sequence are filled; the same on all ranks. A
        sequence that has lost a token, having had no room for it, has S + 1 from then on.
      block_table: None; or integers [B, P], the same on all ranks, for a paged cache (arXiv
        2309.06180, section 4.1). Keys and values are then a rank's [pages, page size, G, D], and S
        is P * page size. Entry p of a sequence's row is the page of its positions p * page size and
        on, on the rank that has these: rank r has the entries r P/N to (r + 1) P/N - 1, and numbers
        its own pages from 0 on. -1: there is no page. Nothing here changes it: the caller gives a
        sequence its pages before its tokens come, and may give the pages that no row names to
        another one.
    """

    keys: jax.Array | Scaled
    values: jax.Array | Scaled | None
    lengths: jax.Array
    block_table: jax.Array | None = None


class Pages(NamedTuple):
    """The pages of a cache.

    Attributes:
      table: the block table, int32 [B, P].
      columns: this rank's, int32 [B, P/N].
      number: how many this rank has.
      size: positions of a page.
    """

    table: jax.Array
    columns: jax.Array
    number: int
    size: int

    def have(self, what: str, entries: jax.Array, needed: jax.Array, raises: bool) -> jax.Array:
        """Whether those `entries` [B, n] of the table that are `needed`, bool [B, n], are pages:
        bool [B, n]. All ranks see the whole table, so that all of them raise, or none."""
        page = jnp.where(needed, jnp.take_along_axis(self.table, entries, 1), 0)
        page = value_checks.in_range(page, 0, self.number - 1, what, raises=raises)
        return (page >= 0) & (page < self.number)


class Part(NamedTuple):
    """A rank's part of a cache.

    Attributes:
      rank, ranks: along the axis.
      here, capacity: positions of this rank's part, and of all parts.
      pages: None: it has rows.
    """

    rank: Any
    ranks: int
    here: int
    capacity: int
    pages: Pages | None

    @property
    def lost(self) -> int:
        """The length of a sequence that has lost a token."""
        return self.capacity + 1

    @property
    def columns(self) -> jax.Array | None:
        """The block table of this rank's part."""
        return None if self.pages is None else self.pages.columns


def capacity_of(kv_cache: KVCache) -> int:
    """How many positions of a sequence a whole cache has, one that is not a rank's part."""
    table, size = kv_cache.block_table, kv_cache.keys.shape[1]
    return size if table is None else size * table.shape[-1]


def check_known(op: str, name: str, lengths: Any, counts: Any, tokens: int, capacity: int) -> None:
    """Raises where sequences of `lengths` [B] have no room for `counts` [B] more positions, called
    `name`, of `tokens` (None: all of them), if the numbers are known when this is called: outside
    of functions that JAX traces, and in them where they are constants."""
    at = value_checks.known(lengths)
    new = np.int64(tokens) if counts is None else value_checks.known(counts)
    if at is None or new is None or at.ndim > 1 or new.ndim > 1:
        return  # not known, or an error of shapes that comes later
    if at.ndim == new.ndim and at.shape != new.shape:
        return
    at, new = np.broadcast_arrays(at.astype(np.float64), new.astype(np.float64))  # any integers
    for b in np.flatnonzero(at < 0):
        raise ValueError(f"{op}: sequence {b} has {at[b]:.0f} positions; lengths are 0 or more")
    for b in np.flatnonzero((new < 0) | (new > tokens)):
        raise ValueError(f"{op}: {name} must be from 0 to {tokens}, got {new[b]:.0f}")
    for b in np.flatnonzero((new > 0) & (at + new > capacity)):
        raise ValueError(
            f"{op}: sequence {b} has {at[b]:.0f} positions, and {new[b]:.0f} more do not fit a "
            f"cache of {capacity}: {ADVICE}"
        )


def part_of(op: str, kv_cache: KVCache, axis_name: AxisName | None) -> Part:
    """This rank's part of a cache that is split over `axis_name`."""
    rank, ranks = meshes.rank_and_size(axis_name)
    here, table = kv_cache.keys.shape[1], kv_cache.block_table
    if table is None:
        return Part(rank, ranks, here, ranks * here, None)
    each, rest = divmod(table.shape[1], ranks)
    if rest:
        raise ValueError(
            f"{op}: kv_cache.block_table must be [B, P] with P a multiple of {ranks} ranks, got "
            f"{table.shape}"
        )
    table = columns = value_checks.to_int32(table)
    if ranks > 1:
        columns = lax.dynamic_slice_in_dim(table, rank * each, each, 1)
    pages = Pages(table, columns, *kv_cache.keys.shape[:2])
    return Part(rank, ranks, here * each, ranks * here * each, pages)


def check_cache(op: str, kv_cache: Any, k: Any, v: Any, lengths: Any, name: str) -> None:
    """Raises for a cache, and keys and values that are to be written into it, that do not fit."""
    if len(kv_cache) != 4:
        raise ValueError(f"{op}: kv_cache must be a jflux.KVCache, got {len(kv_cache)} arrays")
    keys, values, _, table = kv_cache
    integers = {"kv_cache.lengths": kv_cache[2], name: lengths}
    for array in (keys, values, k, v, table, *integers.values()):
        if array is not None and not (hasattr(array, "ndim") and hasattr(array, "dtype")):
            raise TypeError(f"{op}: operands must be arrays, got {type(array).__name__}")
    if (v is None) != (values is None):
        one, other = ("v", "kv_cache.values") if v is None else ("kv_cache.values", "v")
        raise ValueError(
            f"{op}: {one} is None, but not {other}: a cache without values has keys alone"
        )
    if k.ndim != 4 or (v is not None and k.shape[:3] != v.shape[:3]):
        shapes = f"{k.shape}" if v is None else f"{k.shape} and {v.shape}"
        raise ValueError(f"{op}: k and v must be [B, tokens, G, D], got {shapes}")
    paged = table is not None
    shape = "[pages, page size, G, D] with the G" if paged else "[B, S/N, G, D] with the B and G"
    pairs = [(keys, k)] if values is None else [(keys, k), (values, v)]
    alike = all(
        cache.ndim == 4 and cache.shape[2:] == new.shape[2:] and cache.shape[:3] == keys.shape[:3]
        for cache, new in pairs
    )
    if not alike or not (paged or keys.shape[0] == k.shape[0]):
        raise ValueError(
            f"{op}: kv_cache.keys and values must be {shape} of k, {k.shape}, got "
            f"{' and '.join(str(cache.shape) for cache, _ in pairs)}"
            f"{'' if paged else '; pages need kv_cache.block_table'}"
        )
    if paged:
        if table.ndim != 2 or table.shape[0] != k.shape[0]:
            raise ValueError(
                f"{op}: kv_cache.block_table must be [B, P] with the B of k, {k.shape}, got "
                f"{table.shape}"
            )
        if not jnp.issubdtype(table.dtype, jnp.integer):
            raise TypeError(f"{op}: kv_cache.block_table must be integers, got {table.dtype}")
    caches = {"keys": keys} if values is None else {"keys": keys, "values": values}
    scaled = [isinstance(a, Scaled) for a in caches.values()]
    types = [str(a.dtype) for a in caches.values()]
    if all(scaled):
        _flash_decode_primitive.check_scales(op, caches)
    # q, k and v are cast to the cache's type.
    elif len(set(types)) > 1 or types[0] not in DTYPES or any(scaled):
        raise TypeError(
            f"{op}: kv_cache.keys and values must be of one type, one of {', '.join(DTYPES)}, or "
            f"both a jflux.Scaled, got {' and '.join(types)}"
        )
    if jnp.issubdtype(kv_cache[2].dtype, jnp.integer) and jnp.iinfo(kv_cache[2].dtype).bits < 32:
        raise TypeError(f"{op}: kv_cache.lengths must have 32 bits, got {kv_cache[2].dtype}")
    for what, array in integers.items():
        if array is None:
            continue
        if array.shape != k.shape[:1]:
            raise ValueError(f"{op}: {what} must be [B], {k.shape[:1]}, got {array.shape}")
        if not jnp.issubdtype(array.dtype, jnp.integer):
            raise TypeError(f"{op}: {what} must be integers, got {array.dtype}")
