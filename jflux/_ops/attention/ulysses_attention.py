"""Attention over a split sequence that moves heads (Ulysses), by exchanges before and after it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..._ranks import meshes
from ..._ranks.meshes import AxisName
from ..collectives.exchange import (
    all_gather,
    all_gather_reference,
    all_to_all,
    all_to_all_reference,
)
from . import _alibi
from ._blockwise import Scores
from ._checks import (
    Window,
    check,
    check_bias,
    check_heads,
    of_one_width,
    of_width,
    per_head,
    scale_of,
    window_of,
    within,
)
from ._one_device import attend, dot_product_attention


@meshes.axis_by_name
def ulysses_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    axis_name: AxisName,
    causal: bool = False,
    window: Window = None,
    segment_ids: jax.Array | None = None,
    sinks: jax.Array | None = None,
    bias: jax.Array | None = None,
    alibi_slopes: jax.Array | None = None,
    scale: float | None = None,
    core: Callable[..., jax.Array] | None = None,
) -> jax.Array:
    """Exact attention over a sequence that is split over ranks: each rank gets all positions of its
    share of the heads, attends, and gives back its positions of all heads (DeepSpeed-Ulysses, arXiv
    2309.14509, section 3.1).

    Inside ``jax.shard_map``, per rank of N along `axis_name`, for H heads of queries and G of keys
    and values (grouped queries, arXiv 2305.13245)::

        q [B, S/N, H, D]   k, v [B, T/N, G, D]   ->   [B, S/N, H, D]

    T is S, or another sequence's, as in :func:`jflux.attention`. N must divide H, and divide G or
    be a multiple of it: where there are fewer heads of keys than ranks, each rank gets the one that
    its queries belong to. A rank sends ``2 (H + max(G, N)) B S D (N - 1) / N^2`` elements, if T is
    S, and receives as many; the largest array that it holds has ``B S H/N D``. The parts of the
    sequence are consecutive ("contiguous"), which is balanced here, since every rank has all
    positions.

    To fuse the transfers with the projections around attention, see `jflux.matmul_all_to_all` and
    `jflux.all_to_all_matmul`.

    Args:
      q, k, v: of one type; values may have another width than keys, as in
        :func:`jflux.attention`, and so has the result.
      causal: no position attends to a later one.
      window: position i attends to i - left to i + right, as in :func:`jflux.attention`.
      segment_ids: int [B, S/N]; positions attend to those of the same segment alone. Makes a mask
        [B, 1, S, S].
      sinks: [H], floating: a logit of each head of q in the denominator of its softmax, as in
        :func:`jflux.attention`; the same on all ranks of `axis_name`. Differentiable.
      bias: [1 or B, 1 or H, S, T], floating, of whole sequences, added to the scores, as in
        :func:`jflux.attention`; the same on all ranks of `axis_name`. Differentiable.
      alibi_slopes: [H], floating: of ALiBi, as in :func:`jflux.attention`; the same on all ranks of
        `axis_name`. Constants, without a gradient.
      scale: of the scores; by default 1 / sqrt(D).
      core: what attends, called as ``core(q, k, v, is_causal=..., scale=..., mask=...,
        local_window_size=...)`` for q [B, S, H/N, D] and k, v [B, S, heads, D], and with `sinks`
        with ``sinks=``, [H/N], with `bias` with ``bias=``, [1 or B, 1 or H/N, S, T]. With
        `alibi_slopes` q, k and v have more elements, which hold these biases, and `scale` is that
        of the D given ones. By default ``jax.nn.dot_product_attention``; on GPUs its cuDNN form,
        where that takes such a call, or else jflux's kernel, where that does. (Its other form keeps
        all scores.)

    Returns:
      [B, S/N, H, D], which varies over `axis_name`.

    Raises:
      ValueError, TypeError: operands that do not fit, when the call is traced.

    Examples:
      >>> mesh, parts = jax.sharding.Mesh(jax.devices(), "cp"), P(None, "cp")
      >>> f = functools.partial(jflux.ulysses_attention, axis_name="cp", causal=True)
      >>> f = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=(parts,) * 3, out_specs=parts))
      >>> q = k = v = jnp.ones((1, 64, 8, 16))  # [batch, positions, heads, elements]
      >>> f(q, k, v).shape
      (1, 64, 8, 16)
    """
    return _ulysses(
        (all_gather, all_to_all), core or attend, q, k, v, axis_name, causal, window, segment_ids,
        sinks, bias, alibi_slopes, scale,
    )  # fmt: skip


def reference(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    axis_name: AxisName,
    causal: bool = False,
    window: Window = None,
    segment_ids: jax.Array | None = None,
    sinks: jax.Array | None = None,
    bias: jax.Array | None = None,
    alibi_slopes: jax.Array | None = None,
    scale: float | None = None,
    core: Callable[..., jax.Array] | None = None,
) -> jax.Array:
    """:func:`jflux.ulysses_attention` with `lax`'s exchanges, and by default XLA's form of
    ``jax.nn.dot_product_attention``."""
    xla = functools.partial(dot_product_attention, implementation="xla")
    return _ulysses(
        (all_gather_reference, all_to_all_reference), core or xla, q, k, v, axis_name, causal,
        window, segment_ids, sinks, bias, alibi_slopes, scale,
    )  # fmt: skip


def _ulysses(
    exchanges: tuple[Any, Any],
    core: Callable[..., jax.Array],
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    axis_name: AxisName,
    causal: bool,
    window: Window,
    segment_ids: jax.Array | None,
    sinks: jax.Array | None,
    bias: jax.Array | None,
    slopes: jax.Array | None,
    scale: float | None,
) -> jax.Array:
    op = "jflux.ulysses_attention"
    q, k, v = jnp.asarray(q), jnp.asarray(k), jnp.asarray(v)
    segment_ids = None if segment_ids is None else jnp.asarray(segment_ids)
    check(op, q, k, v, segment_ids, slopes, causal, window)
    sinks = per_head(op, "sinks", sinks, q.shape[2])
    _alibi.check(op, slopes, q.shape[2], scale, None)
    pair = window_of(op, window)
    check_heads(op, q, k, ranks := meshes.axis_size(axis_name))
    bias = None if bias is None else jnp.asarray(bias)
    check_bias(op, bias, q, k, ranks)
    scale, width = scale_of(op, scale, q.shape[3]), v.shape[3]
    gather, exchange = exchanges
    q, k, v = to_heads(axis_name, q, k, v, exchange)
    if slopes is None:
        q, k, v = of_one_width(q, k, v)
    else:
        scores, length = Scores(scale, None, causal, pair), q.shape[1]
        own = of_own_heads(jnp.asarray(slopes), axis_name)
        at = jnp.arange(length, dtype=jnp.int32)
        q, k, v = _alibi.with_bias(scores, q, k, v, at, own, length, warns=core is attend)
    mask = None
    if segment_ids is not None:
        ids = gather(segment_ids, axis_name=axis_name, axis=1, tiled=True)
        mask = ids[:, None, :, None] == ids[:, None, None, :]
    pair = within(pair, q.shape[1])
    given = {"sinks": sinks, "bias": bias}
    more = {name: of_own_heads(a, axis_name) for name, a in given.items() if a is not None}
    y = core(q, k, v, is_causal=causal, scale=scale, mask=mask, local_window_size=pair, **more)
    return to_positions(axis_name, of_width(y, width), exchange)


def to_heads(
    axis_name: AxisName, q: jax.Array, k: jax.Array, v: jax.Array, all_to_all: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """This rank's heads of all positions of the ranks, from all heads of its positions."""
    ranks, heads = meshes.axis_size(axis_name), k.shape[2]
    if heads % ranks != 0:  # fewer than ranks: every rank needs one of them
        k, v = (jnp.repeat(a, ranks // heads, axis=2) for a in (k, v))

    def exchange(a: jax.Array) -> jax.Array:
        return all_to_all(a, axis_name=axis_name, split_axis=2, concat_axis=1, tiled=True)

    return exchange(q), exchange(k), exchange(v)


def of_own_heads(a: jax.Array, axis_name: AxisName) -> jax.Array:
    """What this rank's heads have of the numbers of all heads, [H], or of a bias [1 or B, 1 or H,
    S, T], of which one of all heads is theirs too."""
    rank, ranks = meshes.rank_and_size(axis_name)
    dimension = 1 if a.ndim == 4 else 0
    if a.ndim == 4 and a.shape[dimension] == 1:
        return a
    own = a.shape[dimension] // ranks
    return lax.dynamic_slice_in_dim(a, rank * own, own, dimension)


def to_positions(axis_name: AxisName, y: jax.Array, all_to_all: Any) -> jax.Array:
    """Undoes :func:`to_heads` for a result [B, S, H/N, ...]."""
    return all_to_all(y, axis_name=axis_name, split_axis=1, concat_axis=2, tiled=True)
