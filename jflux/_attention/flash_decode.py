"""Attention of one new query a sequence to a cache of keys and values that is split over ranks by
position (flash decoding)."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .. import _checks, _mesh
from .._epilogue import sum_dtype
from .._mesh import AxisName
from .._ops.exchange import all_gather, all_gather_reference
from . import cache
from .merging import merge_attention

#: The values' product is split over positions into up to so many parts for all sequences, of no
#: fewer positions than that.
MOST_PARTS = 64
FEWEST_POSITIONS = 512


def flash_decode(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    lengths: jax.Array,
    *,
    axis_name: AxisName | None = None,
    block_table: jax.Array | None = None,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    return_lse: bool = False,
) -> Any:
    """Exact attention of one new query a sequence to a cache of keys and values that is split over
    ranks by position (flash decoding: https://pytorch.org/blog/flash-decoding).

    Inside ``jax.shard_map``, per rank of N along `axis_name`, for H heads of queries and G of keys
    and values (grouped queries, arXiv 2305.13245; head h of q belongs to head h // (H / G))::

        q [B, H, D]   k_cache, v_cache [B, S/N, G, D]   lengths [B]   ->   [B, H, D]

    Rank r has the consecutive positions r S/N to (r + 1) S/N - 1. q and lengths are the same on all
    ranks, and so is the result. With s_t = scale q k_t, or softcap tanh(scale q k_t / softcap), it
    is the sum of softmax(s)_t v_t over the positions t less than the sequence's length, and with
    `window` not less than length - window. The query's own key and value are in the cache already
    (:func:`jflux.update_cache`).

    A rank attends to its part of the cache, with scores and sums in float32 (float64 for float64).
    One :func:`jflux.all_gather` then brings all ranks' outputs and log-sum-exps, [B, H, D + 1] of
    such numbers from each, and :func:`jflux.merge_attention` merges them. A rank that has no
    position of a sequence adds nothing to it.

    There is no GPU kernel yet: products are XLA's. They take all heads of the cache at once, so
    that it is neither transposed nor repeated, for G times as many operations as needed, which
    reading the cache hides up to about 200 heads of queries in 16-bit types.

    What a cache has at positions that the query does not attend to does not reach the result, even
    if it is NaN. Derivatives take it times zero, so there it must be finite.

    Differentiable in q and the caches, in both modes. Under ``checkify.user_checks`` a length that
    is not from 0 to S is an error with the value. Without, it counts as 0 or S: compiled code
    cannot raise. So does an entry of `block_table` that is no page, which then counts as -1.

    Args:
      q, k_cache, v_cache: of one type: float16, bfloat16, float32 or float64.
      lengths: integers [B], how many positions of the whole sequence are valid. One of length 0 has
        the result 0, and the log-sum-exp -inf.
      axis_name: a mesh axis, or a tuple of them. None: the cache is whole.
      block_table: integers [B, P], for a paged cache (arXiv 2309.06180, section 4.1): k_cache and
        v_cache are then this rank's [pages, page size, G, D], entry p of a sequence's row is the
        page of its positions p * page size and on in this rank's part, and S/N is P * page size.
        -1: there is no page, and nothing attends to it.
      window: how many of the last positions are attended to.
      softcap: bounds the scores.
      scale: of the scores; by default 1 / sqrt(D).
      return_lse: whether to return the log-sum-exp too.

    Returns:
      [B, H, D] of q's type; with `return_lse` also the logarithm of the sum of the exponentials of
      the scores, [B, H], float32 or float64. They do not vary over `axis_name`.

    Raises:
      ValueError, TypeError: operands that do not fit, when the call is traced.
      NameError: for an `axis_name` outside ``shard_map``.
    """
    return _flash_decode(
        all_gather, q, k_cache, v_cache, lengths, axis_name, block_table, window, softcap, scale,
        return_lse,
    )  # fmt: skip


def reference(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    lengths: jax.Array,
    *,
    axis_name: AxisName | None = None,
    block_table: jax.Array | None = None,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    return_lse: bool = False,
) -> Any:
    """:func:`jflux.flash_decode` with `lax`'s all-gather."""
    return _flash_decode(
        all_gather_reference, q, k_cache, v_cache, lengths, axis_name, block_table, window, softcap,
        scale, return_lse,
    )  # fmt: skip


def _flash_decode(
    gather: Any,
    q: Any,
    k: Any,
    v: Any,
    lengths: Any,
    axis_name: AxisName | None,
    block_table: Any,
    window: int | None,
    softcap: float | None,
    scale: float | None,
    return_lse: bool,
) -> Any:
    _check(q, k, v, lengths, block_table, window, softcap)
    may_be_read = None
    if block_table is not None:
        (k, v), may_be_read = cache.read_pages((k, v), block_table, "flash_decode")
    here = k.shape[1]
    rank, ranks = _mesh.rank_and_size(axis_name)
    first = rank * here
    most = ranks * here
    lengths = _checks.in_range(lengths, 0, most, "jflux.flash_decode: lengths")
    lengths = jnp.clip(lengths, 0, most).astype(jnp.int32)[:, None]
    position = first + jnp.arange(here, dtype=jnp.int32)
    attended = position < lengths
    if window is not None:
        attended &= position >= lengths - window
    if may_be_read is not None:
        attended &= may_be_read
    scale = 1 / math.sqrt(q.shape[2]) if scale is None else scale
    out, lse = attend_to_part(q, k, v, attended, scale=scale, softcap=softcap)
    if axis_name is not None:
        pair = jnp.concatenate([out, lse[..., None]], -1)
        to = "invarying" if _mesh.tracks_vma(axis_name) else "varying"
        pairs = gather(pair, axis_name=axis_name, to=to)
        out, lse = merge_attention(pairs[..., :-1], pairs[..., -1])
    out = out.astype(q.dtype)
    return (out, lse) if return_lse else out


def attend_to_part(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    attended: jax.Array,
    *,
    scale: float,
    softcap: float | None,
) -> tuple[jax.Array, jax.Array]:
    """Attention of q [B, H, D] to the positions of k and v [B, S, G, D] where `attended` [B, S]:
    the output [B, H, D] and the log-sum-exp [B, H], both in float32 or float64."""
    scores = _scores(q, k) * scale
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    scores = jnp.where(attended[:, None], scores, -jnp.inf)
    highest = lax.stop_gradient(jnp.max(scores, -1, initial=-jnp.inf))
    base = jnp.where(highest > -jnp.inf, highest, 0)
    weights = jnp.exp(scores - base[..., None])
    total = jnp.sum(weights, -1)
    any_counts = total > 0
    safe = jnp.where(any_counts, total, 1)
    # A weight of zero does not keep a NaN out.
    out = _weighted_sum(weights, jnp.where(attended[..., None, None], v, 0))
    lse = jnp.where(any_counts, jnp.log(safe) + base, -jnp.inf)
    return out / safe[..., None], lse


# Products with the cache as it lies in memory, [B, S, G D]. With G as a batch dimension between S
# and D, XLA would transpose the cache first: that reads and writes as much again. Here each head of
# queries is multiplied with the keys of all G heads, of which its row has zeros for all but its
# own. That is H operations for each byte of a cache of 16-bit numbers.


def _scores(q: jax.Array, k: jax.Array) -> jax.Array:
    """q k, [B, H, S], of q [B, H, D] and k [B, S, G, D]."""
    (b, h, d), (s, g) = q.shape, k.shape[1:3]
    rows = jnp.where(_own_group(h, g), q[:, :, None], 0).reshape(b, h, g * d)
    wide = sum_dtype(q.dtype)
    return jnp.einsum("bhx,bsx->bhs", rows, k.reshape(b, s, g * d), preferred_element_type=wide)


def _weighted_sum(weights: jax.Array, v: jax.Array) -> jax.Array:
    """[B, H, D], of weights [B, H, S] and v [B, S, G, D]. In parts, since one sequence's long sum
    would keep few of a GPU's multiprocessors busy."""
    (b, h, s), (g, d) = weights.shape, v.shape[2:]
    parts = _parts(b, s)
    weights = weights.astype(v.dtype).reshape(b, h, parts, s // parts)
    v = v.reshape(b, parts, s // parts, g * d)
    wide = sum_dtype(v.dtype)
    all_groups = jnp.einsum("bhps,bpsx->bphx", weights, v, preferred_element_type=wide)
    all_groups = jnp.sum(all_groups, 1).reshape(b, h, g, d)
    return jnp.sum(jnp.where(_own_group(h, g), all_groups, 0), 2)


def _own_group(heads: int, groups: int) -> np.ndarray:
    """Whether a head of queries belongs to a head of keys: bool [H, G, 1]."""
    own = np.arange(heads)[:, None] // (heads // groups) == np.arange(groups)
    return own[..., None]


@functools.cache
def _parts(batch: int, length: int) -> int:
    """How many equal parts `length` positions are summed in."""
    parts = 1
    while (
        2 * parts * batch <= MOST_PARTS
        and length % (2 * parts) == 0
        and length >= 2 * parts * FEWEST_POSITIONS
    ):
        parts *= 2
    return parts


def _check(
    q: Any, k: Any, v: Any, lengths: Any, block_table: Any, window: Any, softcap: Any
) -> None:
    op = "jflux.flash_decode"
    paged = block_table is not None
    cache_shape = "[pages, page size, G, D]" if paged else "[B, S/N, G, D]"
    for name, a, wanted in (
        ("q", q, "[B, H, D]"),
        ("k_cache", k, cache_shape),
        ("v_cache", v, cache_shape),
        ("lengths", lengths, "[B]"),
        *([("block_table", block_table, "[B, P]")] if paged else []),
    ):
        if not hasattr(a, "ndim") or not hasattr(a, "dtype"):
            raise TypeError(f"{op}: {name} must be an array, got {type(a).__name__}")
        if a.ndim != wanted.count(",") + 1:
            raise ValueError(f"{op}: {name} must be {wanted}, got {a.shape}")
        if name in ("lengths", "block_table"):
            if not jnp.issubdtype(a.dtype, jnp.integer):
                raise TypeError(f"{op}: {name} must be integers, got {a.dtype}")
            if a.shape[0] != q.shape[0]:
                raise ValueError(
                    f"{op}: {name} must be {wanted} with q's B = {q.shape[0]}, got {a.shape}"
                )
    if k.shape != v.shape:
        raise ValueError(f"{op}: k_cache and v_cache must have one shape, got {k.shape}, {v.shape}")
    if k.shape[3] != q.shape[2]:
        raise ValueError(
            f"{op}: q and the caches must have the same D, got {q.shape[2]} and {k.shape[3]}"
        )
    if not paged and k.shape[0] != q.shape[0]:
        raise ValueError(
            f"{op}: q [B, H, D] and the caches [B, S/N, G, D] must have the same B, got {q.shape} "
            f"and {k.shape}; a paged cache needs block_table"
        )
    if k.shape[2] == 0 or q.shape[1] % k.shape[2] != 0:
        raise ValueError(
            f"{op}: {q.shape[1]} heads of queries must be a multiple of {k.shape[2]} of keys and "
            "values"
        )
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(
            f"{op}: q, k_cache and v_cache must have one type, got {q.dtype}, {k.dtype}, {v.dtype};"
            " cast q, or cast the cache as it is written"
        )
    if q.dtype.name not in ("float16", "bfloat16", "float32", "float64"):
        raise TypeError(
            f"{op}: q must be of float16, bfloat16, float32 or float64, got {q.dtype}; cast it"
        )
    if window is not None and (not isinstance(window, int | np.integer) or window < 1):
        raise ValueError(f"{op}: {window=} must be an int of at least 1; None: no window")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"{op}: {softcap=} must be greater than 0; None: none")
