"""Attention of one rank, composed of cuDNN's: a causal call for its own chunks, and calls
without a mask for the other keys (_chunk_calls.py). Outputs are merged by their log-sum-exps.

Each call's results are rounded to the operands' type. Merging, and sums of gradients over calls,
are in float32.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..._ranks import meshes
from .._epilogue import sum_dtype
from . import _cudnn
from ._blockwise import Scores
from ._chunk_calls import ChunkCalls, UnmaskedCall, chunks_of, takes
from .merge_attention import merge_attention
from .sequence_layouts import Layout


def why_not(
    q: jax.Array, k: jax.Array, scores: Scores, layout: Layout, ranks: int, segment_ids: Any
) -> str | None:
    """Why cuDNN does not compute this call, or None: it does."""
    if scores.window is not None or scores.softcap is not None or segment_ids is not None:
        return "cuDNN's parts have no window, softcap or segments"
    if not takes(layout, ranks, scores.causal):
        return f"causal attention in {layout} order does not consist of whole chunks"
    return _cudnn.why_not(q, k, chunks_of(layout, ranks, scores.causal))


def forward(
    q: jax.Array, own: Any, k: jax.Array, v: jax.Array, calls: ChunkCalls, scale: float
) -> tuple[jax.Array, jax.Array]:
    """Attention of q [B, s, H, D] over its own keys and values, a pair of [B, u, G, D], as
    ``calls.causal`` says, and over k, v [B, t, G, D] as ``calls.unmasked`` say. u is s unless the
    keys are of another sequence, which no causal call has.

    Args:
      calls: those of this rank.

    Returns:
      (o [B, s, H, D] of q's type, log-sum-exp [B, s, H], float32).
    """
    results: list[list[Any]] = [[] for _ in range(calls.chunks)]
    if calls.causal:
        chunks = [_folded(a, calls.chunks) for a in (q, *own)]
        both = _cudnn.forward(*chunks, scale=scale, causal=True)
        o, lse = (_unfolded(a, calls.chunks) for a in both)
        for i, of_chunk in enumerate(results):
            of_chunk.append((_chunk(o, i, calls), _chunk(lse, i, calls)))
    size = own[0].shape[1] // calls.chunks
    for call in calls.unmasked:
        keys = (_keys(a, call, size) for a in (k, v))
        o, lse = _cudnn.forward(_chunk(q, call.chunk, calls), *keys, scale=scale, causal=False)
        for i, of_chunk in enumerate(results):
            counts = _counts(call, i)
            if counts is not False:
                of_chunk.append((o, lse if counts is True else jnp.where(counts, lse, -jnp.inf)))
    merged = [_merged(of_chunk) for of_chunk in results]
    o, lse = (jnp.concatenate(a, 1) for a in zip(*merged, strict=True))
    return o, lse


def backward(
    q: jax.Array,
    own: Any,
    k: jax.Array,
    v: jax.Array,
    calls: ChunkCalls,
    scale: float,
    o: jax.Array,
    lse: jax.Array,
    do: jax.Array,
) -> tuple[jax.Array, Any, jax.Array, jax.Array]:
    """Gradients of :func:`forward` with these arguments, where o and lse are those over *all* keys
    that the queries attend to.

    Returns:
      (dq, (dk, dv) of the own keys or None, dk, dv of the others), float32.
    """
    wide = sum_dtype(q.dtype)
    axes = meshes.varying((q, own, k, v, o, lse, do))
    rows = (o, lse, do)
    of_own = None
    dq: list[list[jax.Array]] = [[] for _ in range(calls.chunks)]
    if calls.causal:
        chunks = [_folded(a, calls.chunks) for a in (q, *own, *rows)]
        all_own = _cudnn.backward(*chunks, scale=scale, causal=True)
        own_dq, *of_own = (_unfolded(a, calls.chunks).astype(wide) for a in all_own)
        for i, terms in enumerate(dq):
            terms.append(_chunk(own_dq, i, calls))
    size = own[0].shape[1] // calls.chunks
    dk, dv = (meshes.vary(jnp.zeros(a.shape, wide), axes) for a in (k, v))
    for call in calls.unmasked:
        keys = [_keys(a, call, size) for a in (k, v)]
        q_i, *rows_i = (_chunk(a, call.chunk, calls) for a in (q, *rows))
        both = _cudnn.backward(q_i, *keys, *rows_i, scale=scale, causal=False)
        # An unused call may have any gradients, even inf: lse was not summed over its scores.
        call_dq, call_dk, call_dv = (_if(call.used, a.astype(wide)) for a in both)
        dk, dv = (_added(a, b, call, size) for a, b in ((dk, call_dk), (dv, call_dv)))
        for i, terms in enumerate(dq):
            counts = _counts(call, i)
            if counts is not False:
                terms.append(_if(counts, call_dq))
    sums = [sum(terms[1:], terms[0]) for terms in dq]
    return jnp.concatenate(sums, 1), of_own, dk, dv


# ---- Chunks --------------------------------------------------------------------------------------


def _folded(a: jax.Array, chunks: int) -> jax.Array:
    """[B, s, ...] as [B chunks, s / chunks, ...]: each attends by itself."""
    return a.reshape(a.shape[0] * chunks, a.shape[1] // chunks, *a.shape[2:])


def _unfolded(a: jax.Array, chunks: int) -> jax.Array:
    return a.reshape(a.shape[0] // chunks, a.shape[1] * chunks, *a.shape[2:])


def _chunk(a: jax.Array, chunk: Any, calls: ChunkCalls) -> jax.Array:
    """One of a rank's chunks."""
    size = a.shape[1] // calls.chunks
    return a if calls.chunks == 1 else _slice(a, chunk * size, size)


def _keys(a: jax.Array, call: UnmaskedCall, size: int) -> jax.Array:
    return _slice(a, call.start * size, call.width * size)


def _slice(a: jax.Array, start: Any, size: int) -> jax.Array:
    if isinstance(start, int):
        return lax.slice_in_dim(a, start, start + size, axis=1)
    return lax.dynamic_slice_in_dim(a, start, size, axis=1)


def _added(total: jax.Array, own: jax.Array, call: UnmaskedCall, size: int) -> jax.Array:
    """`total`, the gradients of all keys, with the gradients `own` of one call's keys added."""
    if own.shape == total.shape:
        return total + own
    start = call.start * size
    own = own + _slice(total, start, own.shape[1])
    return lax.dynamic_update_slice_in_dim(total, own, start, axis=1)


def _counts(call: UnmaskedCall, chunk: int) -> Any:
    """Whether the result of a call counts for this chunk of queries: bool, or bool []."""
    is_its = call.chunk == chunk
    if is_its is True or call.used is False:
        return call.used
    return is_its if is_its is False or call.used is True else is_its & call.used


def _if(counts: Any, a: jax.Array) -> jax.Array:
    return a if counts is True else jnp.where(counts, a, 0)


def _merged(results: list[Any]) -> Any:
    if len(results) == 1:
        return results[0]
    outputs, log_sum_exps = zip(*results, strict=True)
    return merge_attention(outputs, log_sum_exps)
