"""Attention of a few new tokens a sequence to a cache of keys and values that is split over ranks
by position (flash decoding)."""

from __future__ import annotations

from typing import Any, Literal, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp

from ..._call import value_checks
from ..._ranks import meshes
from ..._ranks.meshes import AxisName
from .._scaled import Scaled
from . import _flash_decode_primitive, _sinks, decode_merge
from ._checks import DTYPES, Window, check_values, per_head, scale_of, softcap_of, window_of

_OP = "jflux.flash_decode"


class Options(TypedDict, total=False):
    """Arguments on which the type of the result does not depend."""

    axis_name: AxisName | None
    block_table: jax.Array | None
    window: Window
    sinks: jax.Array | None
    alibi_slopes: jax.Array | None
    softcap: float | None
    scale: float | None
    value_width: int | None


@overload
def flash_decode(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array | None,
    lengths: jax.Array,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[Options],
) -> jax.Array: ...
@overload
def flash_decode(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array | None,
    lengths: jax.Array,
    *,
    return_lse: Literal[True],
    **options: Unpack[Options],
) -> tuple[jax.Array, jax.Array]: ...
@overload
def flash_decode(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array | None,
    lengths: jax.Array,
    *,
    return_lse: bool,
    **options: Unpack[Options],
) -> Any: ...
@meshes.axis_by_name
def flash_decode(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array | None,
    lengths: jax.Array,
    *,
    axis_name: AxisName | None = None,
    block_table: jax.Array | None = None,
    window: Window = None,
    sinks: jax.Array | None = None,
    alibi_slopes: jax.Array | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    value_width: int | None = None,
    return_lse: bool = False,
) -> Any:
    """Exact attention of the last tokens of each sequence, one or a few, to a cache of keys and
    values that is split over ranks by position (flash decoding:
    https://pytorch.org/blog/flash-decoding).

    Inside ``jax.shard_map``, per rank of N along `axis_name`, for H heads of queries and G of keys
    and values (grouped queries, arXiv 2305.13245; head h of q belongs to head h // (H / G))::

        q [B, H, D]      k_cache, v_cache [B, S/N, G, D]   lengths [B]   ->   [B, H, D]
        q [B, T, H, D]   the same                                        ->   [B, T, H, D]

    Values may have another width than keys, E, and so has the result then.

    Rank r has the consecutive positions r S/N to (r + 1) S/N - 1. q and lengths are the same on all
    ranks, and so is the result. Token i of T is at p = length - T + i (speculative decoding, arXiv
    2211.17192, or a prompt in chunks). With s_t = scale q k_t, or softcap tanh(scale q k_t /
    softcap), its result is the sum of softmax(s)_t v_t over the positions t up to p, and with
    `window` not less than p - window. The tokens' own keys and values are in the cache already
    (:func:`jflux.update_cache`).

    A rank attends to its part of the cache, with scores and sums in float32 (float64 for float64).
    Each rank then has an output and a log-sum-exp for each head, [B, H, D + 1] in that type, and
    these are merged as by :func:`jflux.merge_attention`. One kernel does so in packets, for up to
    8 MiB of float32 numbers of a rank: all ranks merge up to 1 MiB from all of them, and beyond it
    each its share of the heads. Otherwise a :func:`jflux.all_gather` comes first. A
    rank that has no position of a sequence adds nothing to it.

    On GPUs a kernel reads a rank's part once, of whole caches and of pages, in float16 and
    bfloat16, for heads of 64, 128 or 256 elements and up to 16 tokens; it splits the positions over
    the GPU's multiprocessors too. So does another one that takes keys of 576 elements, the first
    512 of which are their values. Other calls, and derivatives, take XLA's products.

    What a cache has at positions that no token attends to reaches neither the result nor its
    derivatives, even if it is NaN.

    Differentiable in q, the caches and `sinks`, in both modes.

    A length that is not from 0 to S is an error with the value, and so is an entry of `block_table`
    that is no page and not -1 (*Raises*, below). Nothing outside of the cache is read. Where the
    call does not raise, that sequence's result is NaN; such an entry counts as -1.

    Args:
      q, k_cache, v_cache: of one type: float16, bfloat16, float32 or float64. Or both caches are
        :class:`jflux.Scaled`, of 8 bits, with a scale for each position's head, [..., G, 1], or for
        each head, [1, 1, G, 1]; the kernel takes float8_e4m3fn, and scales of v_cache less than
        2^100. They have no derivatives. v_cache is None where `value_width` says what values are.
      lengths: integers [B], how many positions of the whole sequence are valid, those of the T
        tokens among them. A token without a position, as all of a sequence of length 0, has the
        result 0, and the log-sum-exp -inf, or the sink where there is one.
      axis_name: a mesh axis, or a tuple of them. None: the cache is whole.
      block_table: integers [B, P], for a paged cache (arXiv 2309.06180, section 4.1): k_cache and
        v_cache are then this rank's [pages, page size, G, D], entry p of a sequence's row is the
        page of its positions p * page size and on in this rank's part, and S/N is P * page size.
        -1: there is no page, and nothing attends to it.
      window: that of :func:`jflux.attention`: how many positions before its own, the last one, a
        query attends to; of (left, right), left, where None leaves none out.
      sinks: [H], floating: a logit of each head of q in the denominator of its softmax, as in
        :func:`jflux.attention`; the same on all ranks. They are added after the merge.
      alibi_slopes: [H], floating: of ALiBi, as in :func:`jflux.attention`: s_t has
        ``slope_h (t - p)`` more, after the softcap. Constants, without a gradient; the same on all
        ranks. The kernel of `value_width` does not take them.
      softcap: bounds the scores.
      scale: of the scores; by default 1 / sqrt(D).
      value_width: E, where v_cache is None: the first E elements of a key are its value, as in the
        compressed cache of latent attention, which keeps 512 elements of keys and values and 64
        rotary ones for all heads (DeepSeek-V2, arXiv 2405.04434, section 2.1.2, with queries and
        results multiplied by the matrices that would expand it: G = 1, D = 576, E = 512). Its
        `scale` is that of the heads which it stands for, 1 / sqrt(192) there.
      return_lse: whether to return the log-sum-exp too.

    Returns:
      As q, with E elements; with `return_lse` also the logarithm of the sum of the exponentials of
      the scores and of the sink, [B, H] or [B, T, H], float32 or float64. They do not vary over
      `axis_name`.

    Raises:
      ValueError, TypeError: operands that do not fit, when the call is traced.
      NameError: for an `axis_name` outside ``shard_map``.
      jax.errors.JaxRuntimeError: on CPUs, for a length that is not from 0 to S. On GPUs the kernel
        reports lengths, and entries of `block_table` within a length, where the process has a
        symmetric heap (:func:`jflux.init`, or any call over ranks): the fault is printed, and what
        comes next raises it: all ops over ranks of the process, on all of its GPUs, and
        `flash_decode` on this one. A CUDA graph that is replayed goes on, and one that was captured
        before there was a heap reports nothing; nor do XLA's products, and derivatives.
      checkify.JaxRuntimeError: under ``checkify.user_checks``, for both, on any device.

    Examples:
      >>> mesh, cache = jax.sharding.Mesh(jax.devices(), "cp"), P(None, "cp")
      >>> f = functools.partial(jflux.flash_decode, axis_name="cp")
      >>> f = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=(P(), cache, cache, P()), out_specs=P()))
      >>> q, keys = jnp.ones((2, 4, 16)), jnp.ones((2, 64, 4, 16))  # two sequences
      >>> f(q, keys, keys, jnp.array([64, 10])).shape
      (2, 4, 16)
    """
    return _flash_decode(
        decode_merge.merge_over_ranks, _flash_decode_primitive.attend, q, k_cache, v_cache, lengths,
        axis_name=axis_name, block_table=block_table, window=window, sinks=sinks,
        alibi_slopes=alibi_slopes, softcap=softcap, scale=scale, value_width=value_width,
        return_lse=return_lse,
    )  # fmt: skip


def reference(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array | None,
    lengths: jax.Array,
    *,
    axis_name: AxisName | None = None,
    block_table: jax.Array | None = None,
    window: Window = None,
    sinks: jax.Array | None = None,
    alibi_slopes: jax.Array | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    value_width: int | None = None,
    return_lse: bool = False,
) -> Any:
    """:func:`jflux.flash_decode` in plain `lax`."""
    return _flash_decode(
        decode_merge.reference, _flash_decode_primitive.attend_reference, q, k_cache, v_cache,
        lengths,
        axis_name=axis_name, block_table=block_table, window=window, sinks=sinks,
        alibi_slopes=alibi_slopes, softcap=softcap, scale=scale, value_width=value_width,
        return_lse=return_lse,
    )  # fmt: skip


def _flash_decode(
    merge: Any,
    attend: Any,
    q: Any,
    k: Any,
    v: Any,
    lengths: Any,
    *,
    axis_name: AxisName | None,
    block_table: Any,
    window: Window,
    sinks: Any,
    alibi_slopes: Any,
    softcap: float | None,
    scale: float | None,
    value_width: int | None,
    return_lse: bool,
) -> Any:
    _check(q, k, v, lengths, block_table, value_width)
    sinks = per_head(_OP, "sinks", sinks, q.shape[-2])
    slopes = per_head(_OP, "alibi_slopes", alibi_slopes, q.shape[-2])
    span = window_of(_OP, window)
    scale, softcap = scale_of(_OP, scale, q.shape[-1]), softcap_of(_OP, softcap)
    queries = q if q.ndim == 4 else jnp.expand_dims(q, 1)
    here = k.shape[1]
    if block_table is not None:
        here *= block_table.shape[1]
        pages = k.shape[0]
        block_table = value_checks.in_range(
            block_table, -1, pages - 1, "jflux.flash_decode: block_table"
        )
        block_table = value_checks.to_int32(block_table)
    rank, ranks = meshes.rank_and_size(axis_name)
    most = ranks * here
    lengths = value_checks.in_range(lengths, 0, most, "jflux.flash_decode: lengths")
    lengths = value_checks.to_int32(lengths)
    tokens = queries.shape[1]
    bounds = _flash_decode_primitive.bounds_of(lengths - tokens, lengths, span, rank * here, tokens)
    pair = attend(
        queries, k, v, bounds, block_table, slopes, capacity=most, scale=scale, softcap=softcap,
        value_width=value_width or 0,
    )  # fmt: skip
    pair = pair.reshape(*q.shape[:-1], pair.shape[-1])
    if axis_name is None:
        out, lse = pair[..., :-1], pair[..., -1]
    else:
        out, lse = merge(pair, axis_name, q.dtype if sinks is None else None)
    out, lse = _sinks.added(out, lse, sinks)  # once, not once on each rank
    out = out.astype(q.dtype)
    return (out, lse) if return_lse else out


def _check(q: Any, k: Any, v: Any, lengths: Any, block_table: Any, value_width: int | None) -> None:
    op = _OP
    paged = block_table is not None
    cache_shape = "[pages, page size, G, D]" if paged else "[B, S/N, G, D]"
    for name, a, wanted in (
        ("q", q, "[B, H, D] or [B, T, H, D]"),
        ("k_cache", k, cache_shape),
        *([] if v is None else [("v_cache", v, cache_shape)]),
        ("lengths", lengths, "[B]"),
        *([("block_table", block_table, "[B, P]")] if paged else []),
    ):
        if not hasattr(a, "ndim") or not hasattr(a, "dtype"):
            raise TypeError(f"{op}: {name} must be an array, got {type(a).__name__}")
        if a.ndim not in [one.count(",") + 1 for one in wanted.split(" or ")]:
            raise ValueError(f"{op}: {name} must be {wanted}, got {a.shape}")
        if name in ("lengths", "block_table"):
            if not jnp.issubdtype(a.dtype, jnp.integer):
                raise TypeError(f"{op}: {name} must be integers, got {a.dtype}")
            if a.shape[0] != q.shape[0]:
                raise ValueError(
                    f"{op}: {name} must be {wanted} with q's B = {q.shape[0]}, got {a.shape}"
                )
    check_values(op, k, v, value_width)
    if k.shape[3] != q.shape[-1]:
        raise ValueError(
            f"{op}: q and the caches must have the same D, got {q.shape[-1]} and {k.shape[3]}"
        )
    if not paged and k.shape[0] != q.shape[0]:
        raise ValueError(
            f"{op}: q and the caches [B, S/N, G, D] must have the same B, got {q.shape} "
            f"and {k.shape}; a paged cache needs block_table"
        )
    if k.shape[2] == 0 or q.shape[-2] % k.shape[2] != 0:
        raise ValueError(
            f"{op}: {q.shape[-2]} heads of queries must be a multiple of {k.shape[2]} of keys and "
            "values"
        )
    caches = {"k_cache": k} if v is None else {"k_cache": k, "v_cache": v}
    if any(isinstance(a, Scaled) for a in caches.values()):
        _flash_decode_primitive.check_scales(op, caches)
    elif any(a.dtype != q.dtype for a in caches.values()):
        types = ", ".join(str(a.dtype) for a in (q, *caches.values()))
        raise TypeError(
            f"{op}: q, {' and '.join(caches)} must have one type, got {types}; cast q, or cast the "
            "cache as it is written"
        )
    if q.dtype.name not in DTYPES:
        raise TypeError(f"{op}: q must be of {', '.join(DTYPES)}, got {q.dtype}; cast it")
