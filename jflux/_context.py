"""Attention over a sequence that is split over ranks: the pieces that need no kernel of their own.

Ulysses (arXiv 2309.14509) moves heads; what it sends are two of jflux's all_to_all before the
attention and one after it. The rest is arithmetic: which positions a rank has, so that causal
attention gives all ranks as much work; and how attention over parts of the keys becomes attention
over all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from . import _mesh
from ._mesh import AxisName
from ._ops.exchange import all_gather, all_to_all

Layout = Literal["contiguous", "zigzag", "striped"]
LAYOUTS: tuple[Layout, ...] = ("contiguous", "zigzag", "striped")


# ---- Which positions a rank has ------------------------------------------------------------------


def causal_positions(length: int, ranks: int, *, layout: Layout = "zigzag") -> np.ndarray:
    """The positions of a sequence, in the order in which ranks have them.

    In causal attention late positions attend to more keys than early ones, so ranks with equal
    consecutive parts have unequal work. For 2 ranks and 8 positions::

        contiguous   0 1 2 3 | 4 5 6 7     what an array is without reordering
        zigzag       0 1 6 7 | 2 3 4 5     rank r has parts r and 2 N - 1 - r of 2 N
        striped      0 2 4 6 | 1 3 5 7     rank r has every N-th, from r on (arXiv 2311.09431)

    Args:
      length: of the sequence, over all ranks; a multiple of `ranks`, with zigzag of twice that.
      ranks: N.
      layout: one of the three.

    Returns:
      int32 [length].

    Raises:
      ValueError: a length that does not divide so; an unknown layout.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"{layout=} must be one of {', '.join(LAYOUTS)}")
    parts = 2 * ranks if layout == "zigzag" else ranks
    if ranks < 1 or length % parts != 0:
        raise ValueError(
            f"{length=} must be a multiple of {parts}: {layout} gives each of {ranks} ranks "
            f"{parts // ranks} equal parts; pad the sequence"
        )
    positions = np.arange(length, dtype=np.int32)
    if layout == "striped":
        return positions.reshape(-1, ranks).T.reshape(-1)
    if layout == "zigzag":
        chunks = positions.reshape(2 * ranks, -1)
        return np.stack([chunks[:ranks], chunks[: ranks - 1 : -1]], 1).reshape(-1)
    return positions


def reorder_for_causal(
    x: jax.Array, ranks: int, *, axis: int = 1, layout: Layout = "zigzag"
) -> jax.Array:
    """Reorders a sequence so that causal attention gives all ranks as much work, once it is split
    evenly over them: element i of the result is element ``causal_positions(...)[i]`` of x.

    Done once for a batch (tokens, targets, segment ids, and :func:`causal_positions` for rotary
    embeddings); everything but attention does not care for the order.

    Args:
      x: the whole sequence, not one rank's part, along `axis`.
      ranks: N.
      axis: the dimension of positions.
      layout: as in :func:`causal_positions`.

    Returns:
      x's shape and type. :func:`restore_order` undoes it.

    Raises:
      ValueError: as :func:`causal_positions`.
    """
    order = causal_positions(x.shape[axis], ranks, layout=layout)
    return jnp.take(x, order, axis=axis, unique_indices=True)


def restore_order(
    x: jax.Array, ranks: int, *, axis: int = 1, layout: Layout = "zigzag"
) -> jax.Array:
    """Undoes :func:`reorder_for_causal`, with the same arguments."""
    order = np.argsort(causal_positions(x.shape[axis], ranks, layout=layout)).astype(np.int32)
    return jnp.take(x, order, axis=axis, unique_indices=True)


# ---- Attention over all keys from attention over parts of them -----------------------------------


def merge_attention(
    outputs: Sequence[jax.Array] | jax.Array, log_sum_exps: Sequence[jax.Array] | jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Attention over all keys, from attention over disjoint parts of them.

    With o_p the softmax-weighted sum of part p's values, and l_p the logarithm of the sum of the
    exponentials of its scores (arXiv 2205.14135, section 3.1; arXiv 2311.01282, section 3)::

        l = log(sum_p exp(l_p))        o = sum_p exp(l_p - l) o_p

    in float32 (float64 for float64). A part without keys has l_p = -inf, and does not count,
    whatever its output is; if no part has any, o is 0 and l is -inf. Differentiable in both modes,
    in the log-sum-exps too.

    Args:
      outputs: P arrays [..., H, D], or one [P, ..., H, D].
      log_sum_exps: P arrays [..., H], or one [P, ..., H].

    Returns:
      (o [..., H, D] of the outputs' type, l [..., H] in float32 or float64).

    Raises:
      ValueError: shapes that do not fit.
    """
    out = outputs if isinstance(outputs, jax.Array | np.ndarray) else jnp.stack(list(outputs))
    if isinstance(log_sum_exps, jax.Array | np.ndarray):
        lse = log_sum_exps
    else:
        lse = jnp.stack(list(log_sum_exps))
    if out.shape[:-1] != lse.shape:
        raise ValueError(
            f"jflux.merge_attention: outputs [P, ..., H, D] have shape {out.shape}, so "
            f"log_sum_exps must have shape {out.shape[:-1]}, got {lse.shape}"
        )
    wide = jnp.promote_types(jnp.promote_types(out.dtype, lse.dtype), jnp.float32)
    lse = lse.astype(wide)
    counts = lse > -jnp.inf
    # Of a part without keys nothing may reach a derivative: inf - inf, or 0 times its output.
    highest = lax.stop_gradient(jnp.max(lse, 0))
    base = jnp.where(jnp.isfinite(highest), highest, 0)
    weights = jnp.where(counts, jnp.exp(jnp.where(counts, lse - base, 0)), 0)
    total = jnp.sum(weights, 0)
    any_counts = total > 0
    safe = jnp.where(any_counts, total, 1)
    terms = jnp.where(counts[..., None], weights[..., None] * out.astype(wide), 0)
    merged = (jnp.sum(terms, 0) / safe[..., None]).astype(out.dtype)
    return merged, jnp.where(any_counts, jnp.log(safe) + base, -jnp.inf)


# ---- Ulysses -------------------------------------------------------------------------------------


def ulysses_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    axis_name: AxisName,
    causal: bool = False,
    window: int | tuple[int, int] | None = None,
    segment_ids: jax.Array | None = None,
    scale: float | None = None,
    core: Callable[..., jax.Array] | None = None,
) -> jax.Array:
    """Exact attention over a sequence that is split over ranks: each rank gets all positions of its
    share of the heads, attends, and gives back its positions of all heads (DeepSpeed-Ulysses, arXiv
    2309.14509, section 3.1).

    Inside ``jax.shard_map``, per rank of N along `axis_name`, for H heads of queries and G of keys
    and values (grouped queries, arXiv 2305.13245)::

        q [B, S/N, H, D]   k, v [B, S/N, G, D]   ->   [B, S/N, H, D]

    N must divide H, and divide G or be a multiple of it: where there are fewer heads of keys than
    ranks, each rank gets the one that its queries belong to. A rank sends
    ``2 (H + max(G, N)) B S D (N - 1) / N^2`` elements and receives as many; the largest array that
    it holds has ``B S H/N D``. The parts of the sequence are consecutive ("contiguous"), which is
    balanced here, since every rank has all positions.

    To fuse the transfers with the projections around attention, see `jflux.matmul_all_to_all` and
    `jflux.all_to_all_matmul`.

    Args:
      q, k, v: of one type.
      causal: no position attends to a later one.
      window: position i attends to i - left to i + right: (left, right), or one number for both.
      segment_ids: int [B, S/N]; positions attend to those of the same segment alone. Makes a mask
        [B, 1, S, S].
      scale: of the scores; by default 1 / sqrt(D).
      core: what attends, called as ``core(q, k, v, is_causal=..., scale=..., mask=...,
        local_window_size=...)`` for q [B, S, H/N, D] and k, v [B, S, heads, D]. By default
        ``jax.nn.dot_product_attention``; on GPUs its cuDNN form, where that takes such a call.

    Returns:
      [B, S/N, H, D], which varies over `axis_name`.

    Raises:
      ValueError, TypeError: operands that do not fit, when the call is traced.
    """
    ranks = _mesh.axis_size(axis_name)
    _check(q, k, v, segment_ids, ranks)
    heads = k.shape[2]
    if heads % ranks != 0:  # fewer than ranks: every rank needs one of them
        k, v = (jnp.repeat(a, ranks // heads, axis=2) for a in (k, v))

    def to_heads(a: jax.Array) -> jax.Array:
        return all_to_all(a, axis_name=axis_name, split_axis=2, concat_axis=1, tiled=True)

    q, k, v = to_heads(q), to_heads(k), to_heads(v)
    mask = None
    if segment_ids is not None:
        ids = all_gather(segment_ids, axis_name=axis_name, axis=1, tiled=True)
        mask = ids[:, None, :, None] == ids[:, None, None, :]
    scale = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    y = (core or _attend)(
        q, k, v, is_causal=causal, scale=scale, mask=mask, local_window_size=window
    )
    return all_to_all(y, axis_name=axis_name, split_axis=1, concat_axis=2, tiled=True)


def _check(q: Any, k: Any, v: Any, segment_ids: Any, ranks: int) -> None:
    for name, a in {"q": q, "k": k, "v": v}.items():
        if a.ndim != 4:
            raise ValueError(
                f"jflux.ulysses_attention: {name} must be [B, S/N, heads, D], got {a.shape}"
            )
    if k.shape != v.shape or q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3]:
        raise ValueError(
            "jflux.ulysses_attention: q [B, S/N, H, D] and k, v [B, S/N, G, D] must have the same "
            f"B, S/N and D, got {q.shape}, {k.shape}, {v.shape}"
        )
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(
            "jflux.ulysses_attention: q, k and v must have one type, got "
            f"{q.dtype}, {k.dtype}, {v.dtype}"
        )
    heads, kv_heads = q.shape[2], k.shape[2]
    if heads % ranks != 0:
        raise ValueError(
            f"jflux.ulysses_attention: {heads} heads cannot be split over {ranks} ranks; use fewer "
            "ranks along this axis, or pad the heads"
        )
    if kv_heads % ranks != 0 and ranks % kv_heads != 0:
        raise ValueError(
            f"jflux.ulysses_attention: {kv_heads} heads of keys and values must be a multiple of "
            f"the {ranks} ranks, or divide them; repeat them to a multiple"
        )
    if heads % kv_heads != 0:
        raise ValueError(
            f"jflux.ulysses_attention: {heads} heads of queries must be a multiple of {kv_heads} "
            "of keys and values"
        )
    if segment_ids is not None and segment_ids.shape != q.shape[:2]:
        raise ValueError(
            f"jflux.ulysses_attention: segment_ids must be [B, S/N], {q.shape[:2]}, got "
            f"{segment_ids.shape}"
        )


def _attend(q: jax.Array, k: jax.Array, v: jax.Array, **options: Any) -> jax.Array:
    """`jax.nn.dot_product_attention`, which does not take cuDNN by itself."""
    fits = (
        jax.default_backend() == "gpu"
        and q.dtype in (jnp.bfloat16, jnp.float16)
        and q.shape[1] % 64 == 0
        and q.shape[3] % 8 == 0
        and q.shape[3] <= 128
        and options["mask"] is None
    )
    return jax.nn.dot_product_attention(
        q, k, v, implementation="cudnn" if fits else None, **options
    )
