"""Attention of new tokens to a cache of keys and values that grows with them, split over ranks by
position or whole, in rows or in pages."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ... import _config
from ..._call import value_checks
from ..._ranks import meshes
from ..._ranks.meshes import AxisName
from .._epilogue import sum_dtype
from .._recipe import Format
from .._scaled import Scaled
from . import (
    _alibi,
    _flash_decode_primitive,
    _sinks,
    decode_merge,
    flash_attention,
    update_cache,
)
from ._blockwise import NOWHERE, Positions, Scores
from ._checks import (
    Window,
    check_values,
    of_one_width,
    of_width,
    per_head,
    scale_of,
    softcap_of,
    window_of,
)
from ._kv_cache_parts import ADVICE, ADVICE_ON_PAGES, check_cache, check_known, part_of
from ._kv_cache_parts import KVCache as KVCache
from .sequence_layouts import Layout, check_length, own_positions

#: The most rows of queries, tokens times heads, that are multiplied with the cache as it lies in
#: memory (_flash_decode_primitive.py). More rows pay for a transposition of it
#: (flash_attention.py).
MOST_ROWS = 256


def _as_in(cache: jax.Array | Scaled, new: jax.Array) -> tuple[Any, Any]:
    """(what is written of a cache, what is written there): new keys or values as it has them."""
    if not isinstance(cache, Scaled):
        return cache, new
    if cache.scale.shape[:3] == cache.shape[:3]:
        return cache, Format(cache.dtype, (1, -1)).of_rows(new)[0]
    ones = jnp.ones((1, 1), jnp.float32)
    ratio = Format(cache.dtype, (-1, -1)).of_rows(new / cache.scale, scale=ones)[0]
    return cache.values, ratio.values


def _written(
    update: Callable[..., Any], kv_cache: KVCache, k: Any, v: Any, positions: Any, **options: Any
) -> tuple[Any, Any]:
    """The keys and values of a cache with new ones; values are None where it has none."""
    caches = [a for a in (kv_cache.keys, kv_cache.values) if a is not None]
    news = [a for a in (k, v) if a is not None]
    (old, new) = zip(*(_as_in(*pair) for pair in zip(caches, news, strict=True)), strict=True)
    written = [
        Scaled(now, cache.scale)
        if isinstance(cache, Scaled) and not isinstance(now, Scaled)
        else now
        for cache, now in zip(caches, update(old, new, positions, **options), strict=True)
    ]
    return written[0], written[1] if len(written) > 1 else None


@meshes.axis_by_name
def fill_cache(
    kv_cache: KVCache,
    k: jax.Array,
    v: jax.Array | None,
    lengths: jax.Array | None = None,
    *,
    axis_name: AxisName | None = None,
    layout: Layout = "zigzag",
) -> KVCache:
    """A cache with a prompt's keys and values, from position 0 on. What it had before is gone.

    Inside ``jax.shard_map``, per rank of N along `axis_name`::

        kv_cache [B, S/N, G, D]   k, v [B, s/N, G, D]   lengths [B]   ->   kv_cache

    The prompt is split over the ranks as :func:`jflux.attention` takes it. The cache may be paged.

    Args:
      lengths: integers [B], how many of the s positions are a sequence's own, the same on all
        ranks; what follows them is padding, which is not written. None: all s.
      axis_name: a mesh axis, or a tuple of them. None: prompt and cache are whole.
      layout: which positions of the prompt a rank has, as in :func:`jflux.attention`.

    Returns:
      The cache, with `lengths`. A length that is not from 0 to s, or more than the cache has, is an
      error with the value (*Raises*, below), and so is a page that a prompt needs and `block_table`
      does not have. Where the call does not raise, that sequence has the length S + 1, and what is
      decoded next is NaN.

    Raises:
      ValueError, TypeError: operands that do not fit, when the call is traced; and such lengths,
        where they are known then: outside of functions that JAX traces, or as constants in these.
      NameError: for an `axis_name` outside ``shard_map``.
      jax.errors.JaxRuntimeError: on CPUs, when it runs, for such a length or page.
      checkify.JaxRuntimeError: for one under ``checkify.user_checks``, on any device.

    Examples:
      >>> mesh, split = jax.sharding.Mesh(jax.devices(), "cp"), P(None, "cp")
      >>> cache = jflux.KVCache(*jnp.zeros((2, 1, 32, 1, 4)), jnp.zeros(1, int))
      >>> specs = jflux.KVCache(split, split, P())
      >>> f = functools.partial(jflux.fill_cache, axis_name="cp", layout="contiguous")
      >>> operands = (specs, split, split, P())
      >>> f = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=operands, out_specs=specs))
      >>> prompt = jnp.ones((1, 16, 1, 4))  # of which 10 positions are tokens
      >>> f(cache, prompt, prompt, jnp.array([10])).lengths.tolist()
      [10]
    """
    return _fill(_OPS, kv_cache, k, v, lengths, axis_name, layout)


def fill_cache_reference(
    kv_cache: KVCache,
    k: jax.Array,
    v: jax.Array | None,
    lengths: jax.Array | None = None,
    *,
    axis_name: AxisName | None = None,
    layout: Layout = "zigzag",
) -> KVCache:
    """:func:`jflux.fill_cache` in plain `lax`, which does not raise on CPUs."""
    return _fill(_REFERENCES, kv_cache, k, v, lengths, axis_name, layout)


@meshes.axis_by_name
def attend_to_cache(
    kv_cache: KVCache,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array | None,
    new_lengths: jax.Array | None = None,
    *,
    axis_name: AxisName | None = None,
    window: Window = None,
    sinks: jax.Array | None = None,
    alibi_slopes: jax.Array | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    value_width: int | None = None,
) -> tuple[jax.Array, KVCache]:
    """Adds the keys and values of T new tokens of each sequence to a cache, and attends to it: each
    token to the tokens before it and to itself.

    Inside ``jax.shard_map``, per rank of N along `axis_name`, for H heads of queries and G of keys
    and values (grouped queries, arXiv 2305.13245)::

        kv_cache [B, S/N, G, D]   q [B, T, H, D]   k, v [B, T, G, D]   ->   o [B, T, H, D], kv_cache

    Token j of a sequence of length l has position l + j (:func:`new_positions`). New tokens,
    lengths and o are the same on all ranks. The cache may be paged (:class:`KVCache`). A rank
    attends to its part of the cache, up to 16 new tokens of each sequence in the kernel of
    :func:`jflux.flash_decode`, and the ranks' outputs and log-sum-exps, [B, T, H, D + 1] float32
    (float64) numbers from each, are merged as there. A prompt of an empty cache takes less with
    :func:`jflux.attention` and :func:`fill_cache`.

    A cache that the caller gives away (donates, or carries through a loop) is written in place.
    Differentiable in both modes. With a cache of 8 bits only in q and `sinks`: derivatives in k and
    v raise.

    Args:
      new_lengths: integers [B], from 0 to T: how many of its T tokens a sequence has, the same on
        all ranks. The others are padding: they are not written, and their o is 0. None: T.
      axis_name: a mesh axis, or a tuple of them. None: the cache is whole.
      window: that of :func:`jflux.attention`: how many positions before its own a token attends
        to; of (left, right), left, where None leaves none out.
      sinks: [H], floating: a logit of each head of q in the denominator of its softmax, as in
        :func:`jflux.attention`; the same on all ranks. Differentiable.
      alibi_slopes: [H], floating: of ALiBi, as in :func:`jflux.flash_decode`.
      softcap: c: a score x becomes ``c tanh(x / c)``.
      scale: of the scores; by default 1 / sqrt(D).
      value_width: E, where the cache has no values and v is None: the first E elements of a key are
        its value, as in :func:`jflux.flash_decode`, and o is [B, T, H, E].

    Returns:
      o of q's type, and the cache, whose lengths have grown by `new_lengths`. Errors with the value
      (*Raises*, below) are a position beyond the cache, one of `new_lengths` that is not from 0 to
      T, and a new token whose page `block_table` does not have. Where the call does not raise, o of
      that sequence is NaN, and its length is S + 1 from then on, so that what follows is NaN too.
      On GPUs the kernel reports it besides, as that of :func:`jflux.flash_decode` does.

    Raises:
      ValueError, TypeError: operands that do not fit, when the call is traced; and such lengths,
        where they are known then: outside of functions that JAX traces, or as constants in these.
      NameError: for an `axis_name` outside ``shard_map``.
      jax.errors.JaxRuntimeError: on CPUs, when it runs, for such a position, number or page.
      checkify.JaxRuntimeError: for one under ``checkify.user_checks``, on any device.

    Examples:
      >>> mesh, split = jax.sharding.Mesh(jax.devices(), "cp"), P(None, "cp")
      >>> specs = jflux.KVCache(split, split, P())
      >>> f = functools.partial(jflux.attend_to_cache, axis_name="cp")
      >>> operands, results = (specs, P(), P(), P()), (P(), specs)
      >>> f = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=operands, out_specs=results))
      >>> cache = jflux.KVCache(*jnp.zeros((2, 1, 32, 1, 4)), jnp.array([10]))
      >>> q = k = v = jnp.ones((1, 1, 1, 4))  # one new token of the sequence
      >>> o, cache = f(cache, q, k, v)
      >>> o.shape, cache.lengths.tolist()
      ((1, 1, 1, 4), [11])
    """
    return _attend(
        _OPS, kv_cache, q, k, v, new_lengths, axis_name, window, sinks, alibi_slopes, softcap,
        scale, value_width,
    )  # fmt: skip


def attend_to_cache_reference(
    kv_cache: KVCache,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array | None,
    new_lengths: jax.Array | None = None,
    *,
    axis_name: AxisName | None = None,
    window: Window = None,
    sinks: jax.Array | None = None,
    alibi_slopes: jax.Array | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    value_width: int | None = None,
) -> tuple[jax.Array, KVCache]:
    """:func:`jflux.attend_to_cache` in plain `lax`, which does not raise on CPUs."""
    return _attend(
        _REFERENCES, kv_cache, q, k, v, new_lengths, axis_name, window, sinks, alibi_slopes,
        softcap, scale, value_width,
    )  # fmt: skip


def new_positions(
    lengths: jax.Array, tokens: int, new_lengths: jax.Array | None = None
) -> jax.Array:
    """Where `tokens` new tokens go in sequences of these lengths [B]: int32 [B, tokens], -1 for
    those that follow a sequence's `new_lengths`."""
    at = jnp.arange(tokens, dtype=jnp.int32)[None]
    positions = value_checks.to_int32(lengths)[:, None] + at
    if new_lengths is None:
        return positions
    return jnp.where(at < new_lengths[:, None], positions, -1)


@dataclasses.dataclass(frozen=True)
class _Ops:
    """What a call is made of.

    Attributes:
      update, attend, merge: the ops.
      raises: whether wrong lengths are errors on CPUs.
    """

    update: Callable[..., Any]
    attend: Callable[..., Any]
    merge: Callable[..., Any]
    raises: bool


_OPS = _Ops(
    update_cache.update_cache, _flash_decode_primitive.attend, decode_merge.merge_over_ranks, True
)
_REFERENCES = _Ops(
    update_cache.reference, _flash_decode_primitive.attend_reference, decode_merge.reference, False
)


def _fill(
    ops: _Ops,
    kv_cache: KVCache,
    k: Any,
    v: Any,
    lengths: Any,
    axis_name: AxisName | None,
    layout: Layout,
) -> KVCache:
    op = "jflux.fill_cache"
    check_cache(op, kv_cache, k, v, lengths, "lengths")
    part = part_of(op, kv_cache, axis_name)
    check_length(op, layout, part.ranks, "k", k)
    batch, tokens = k.shape[0], part.ranks * k.shape[1]
    if lengths is None and tokens > part.capacity:
        raise ValueError(
            f"{op}: a prompt of {tokens} positions does not fit a cache of {part.capacity}; "
            "pass lengths if it ends with padding"
        )
    at = own_positions(part.rank, k.shape[1], part.ranks, layout)
    if lengths is None:
        lengths = jnp.full(batch, tokens, jnp.int32)
    else:
        most = min(tokens, part.capacity)
        if ops.raises:
            check_known(op, "lengths", np.int64(0), lengths, most, part.capacity)
        lengths, are_right = _counts(f"{op}: lengths", lengths, most, ops.raises)
        lengths = jnp.where(are_right, lengths, part.lost)
    fits = at[None] < jnp.minimum(lengths, part.capacity)[:, None]
    positions = jnp.where(fits, at[None], -1)
    if (pages := part.pages) is not None:
        entries = lax.broadcasted_iota(jnp.int32, pages.table.shape, 1)
        needed = entries * pages.size < lengths[:, None]
        what = f"{op}: {ADVICE_ON_PAGES}: those of a prompt in block_table"
        have = pages.have(what, entries, needed, ops.raises)
        lengths = jnp.where(jnp.all(have, 1), lengths, part.lost)
    keys, values = _written(
        ops.update, kv_cache, k, v, positions, axis_name=axis_name, block_table=part.columns,
        split=axis_name is not None,
    )  # fmt: skip
    return kv_cache._replace(
        keys=keys, values=values, lengths=lengths.astype(kv_cache.lengths.dtype)
    )


def _attend(
    ops: _Ops,
    kv_cache: KVCache,
    q: Any,
    k: Any,
    v: Any,
    new_lengths: Any,
    axis_name: AxisName | None,
    window: Window,
    sinks: Any,
    slopes: Any,
    softcap: float | None,
    scale: float | None,
    value_width: int | None,
) -> tuple[jax.Array, KVCache]:
    op = "jflux.attend_to_cache"
    check_cache(op, kv_cache, k, v, new_lengths, "new_lengths")
    check_values(op, k, v, value_width)
    _check_queries(op, q, k)
    sinks = per_head(op, "sinks", sinks, q.shape[2])
    slopes = per_head(op, "alibi_slopes", slopes, q.shape[2])
    span, softcap = window_of(op, window), softcap_of(op, softcap)
    part = part_of(op, kv_cache, axis_name)
    tokens, capacity = q.shape[1], part.capacity
    if tokens > capacity:
        raise ValueError(f"{op}: {tokens} new tokens do not fit a cache of {capacity}")
    lengths = kv_cache.lengths
    if ops.raises:
        check_known(op, "new_lengths", lengths, new_lengths, tokens, capacity)
    if new_lengths is None:
        positions, grown = new_positions(lengths, tokens), lengths + tokens
    else:
        new_lengths, are_right = _counts(f"{op}: new_lengths", new_lengths, tokens, ops.raises)
        positions = new_positions(lengths, tokens, new_lengths)
        positions = jnp.where(are_right[:, None], positions, capacity)
        grown = lengths + new_lengths.astype(lengths.dtype)
    if (pages := part.pages) is not None:
        needed = (positions >= 0) & (positions < capacity)
        entries = jnp.where(needed, positions // pages.size, 0)
        what = f"{op}: {ADVICE_ON_PAGES}: those of new tokens in block_table"
        have = pages.have(what, entries, needed, ops.raises)
        positions = jnp.where(have, positions, capacity)
    grown = jnp.where(jnp.any(positions >= capacity, 1), part.lost, grown)
    positions = value_checks.in_range(
        positions, None, capacity - 1, f"{op}: {ADVICE}: positions", raises=ops.raises
    )  # before another op says it in its own words
    # What does not fit is not written: its page may be another sequence's too.
    written = jnp.where(jnp.all(positions < capacity, 1, keepdims=True), positions, -1)
    keys, values = _written(
        ops.update, kv_cache, k, v, written, axis_name=axis_name, block_table=part.columns
    )
    scores = Scores(scale_of(op, scale, q.shape[3]), softcap, causal=True, window=span)
    is_scaled = isinstance(keys, Scaled)
    q_here = q if is_scaled else q.astype(keys.dtype)
    if tokens <= _flash_decode_primitive.MOST_TOKENS and q.size and keys.size:
        # A sequence with a token beyond the cache gets an end beyond it, for which decoding gives
        # NaN. A token at a negative position attends to nothing.
        ends = jnp.clip(jnp.max(positions, 1), -1, capacity) + 1
        first = positions[:, 0] if tokens == 1 else value_checks.to_int32(lengths)
        bounds = _flash_decode_primitive.bounds_of(first, ends, span, part.rank * part.here, tokens)
        pair = ops.attend(
            q_here, keys, values, bounds, part.columns, slopes, capacity=capacity,
            scale=scores.scale, softcap=softcap, value_width=value_width or 0,
        )  # fmt: skip
    else:
        caches = [
            _flash_decode_primitive.dequantized(a, q.dtype) for a in (keys, values) if a is not None
        ]
        own = own_positions(part.rank, part.here, part.ranks, "contiguous")[None]
        if pages is not None:
            caches, there = update_cache.read_pages(caches, pages.columns, "attend_to_cache")
            own = jnp.where(there, own, NOWHERE)
        keys_here, values_here = caches if values is not None else caches * 2
        values_here = values_here[..., :value_width]
        o, lse = _attend_to_local_keys(
            q_here, keys_here, values_here, positions, own, scores, slopes, capacity
        )
        pair = jnp.concatenate([o, lse[..., None]], -1)
        fits = jnp.all(positions < capacity, 1)[:, None, None, None]
        pair = jnp.where(fits, pair, jnp.nan)
    if axis_name is None:
        o, lse = pair[..., :-1], pair[..., -1]
    else:
        o, lse = ops.merge(pair, axis_name, q.dtype if sinks is None else None)
    o, _ = _sinks.added(o, lse, sinks)  # once, not once on each rank
    return o.astype(q.dtype), kv_cache._replace(keys=keys, values=values, lengths=grown)


def _attend_to_local_keys(
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    positions: jax.Array,
    own: jax.Array,
    scores: Scores,
    slopes: jax.Array | None,
    capacity: int,
) -> tuple[jax.Array, jax.Array]:
    """Attention of q [B, T, H, D] at `positions` [B, T] to a rank's part of the cache, [B, s, G, D]
    at the positions `own` [B or 1, s], with ALiBi's `slopes` [H].

    Returns:
      (o [B, T, H, D], log-sum-exp [B, T, H]), float32 or float64.
    """
    batch, tokens, heads, width = q.shape
    of_values = values.shape[3]
    if 0 in q.shape or 0 in keys.shape:
        wide = sum_dtype(q.dtype)
        return jnp.zeros((*q.shape[:3], of_values), wide), jnp.full(q.shape[:3], -jnp.inf, wide)
    why_not = None if slopes is None else _alibi.why_not(scores.scale, scores.softcap)
    if tokens > 1 and tokens * heads > MOST_ROWS and why_not is None:
        # Positions that no token attends to may hold NaN. Zeros take their place: a weight of zero
        # would not keep the NaN out of the product.
        read = (own <= jnp.max(positions, 1)[:, None])[..., None, None]
        keys, values = jnp.where(read, keys, 0), jnp.where(read, values, 0)
        if slopes is not None:
            q, keys = _alibi.extended(q, positions, keys, own, slopes, scores.scale, capacity)
        q, keys, values = of_one_width(q, keys, values)
        o, lse = flash_attention.forward(
            q, Positions(positions, None), keys, values, Positions(own, None), scores,
            sum_dtype(q.dtype),
        )  # fmt: skip
        return of_width(o, of_values), lse
    if why_not is not None and meshes.platform() == "gpu":
        _config.fall_back("attend_to_cache", f"alibi_slopes {why_not} in a kernel")
    own = own[:, None]
    attended = own <= positions[..., None]  # [B, T, s]
    if scores.window is not None:
        attended &= own >= positions[..., None] - scores.window[0]
    rows = q.swapaxes(1, 2).reshape(batch, heads * tokens, width)  # the tokens of a head together
    o, lse = _flash_decode_primitive.attend_to_local_keys(
        rows, keys, values, attended, slopes, own - positions[..., None], scale=scores.scale,
        softcap=scores.softcap,
    )  # fmt: skip
    o = o.reshape(batch, heads, tokens, of_values).swapaxes(1, 2)
    return o, lse.reshape(batch, heads, tokens).swapaxes(1, 2)


def _counts(what: str, given: jax.Array, most: int, raises: bool) -> tuple[jax.Array, jax.Array]:
    """Numbers of positions, int32 [B], and whether they are from 0 to `most`."""
    counts = value_checks.in_range(value_checks.to_int32(given), 0, most, what, raises=raises)
    return counts, (counts >= 0) & (counts <= most)


def _check_queries(op: str, q: Any, k: Any) -> None:
    if q.ndim != 4 or q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3]:
        raise ValueError(
            f"{op}: q must be [B, T, H, D] with the B, T and D of k, {k.shape}, got {q.shape}"
        )
    if k.shape[2] == 0 or q.shape[2] % k.shape[2]:
        raise ValueError(
            f"{op}: {q.shape[2]} heads of queries must be a multiple of {k.shape[2]} of keys and "
            "values"
        )
    if not jnp.issubdtype(q.dtype, jnp.floating):
        raise TypeError(f"{op}: q must be floating, got {q.dtype}")
