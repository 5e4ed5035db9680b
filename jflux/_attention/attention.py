"""Exact attention over a sequence that is split over ranks, by gathering keys and values or by
passing them around a ring."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from .. import _global, _mesh
from .._epilogue import sum_dtype
from .._mesh import AxisName
from .._ops.exchange import all_gather, reduce_scatter
from . import blocks, ulysses
from .blocks import Part, Scores
from .layouts import LAYOUTS, Layout, own_positions
from .merging import merge_attention
from .operands import check, check_heads, window_of

_OP = "jflux.attention"
#: What ``jax.checkpoint_policies.save_only_these_names`` calls the result and its log-sum-exp.
ATTENTION = "jflux_attention"
#: Bytes of gathered keys and values from which on they are passed around a ring instead.
MOST_GATHERED = 1 << 30


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    axis_name: AxisName | None = None,
    heads_axis: AxisName | None = None,
    causal: bool = False,
    layout: Layout = "zigzag",
    window: int | tuple[int, int] | None = None,
    segment_ids: Any = None,
    scale: float | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
    ring: bool | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    q_spec: PartitionSpec | None = None,
) -> Any:
    """Exact attention over a sequence that is split over ranks.

    Inside ``jax.shard_map``, per rank of N along `axis_name`, for H heads of queries and G of keys
    and values (grouped queries, arXiv 2305.13245)::

        q [B, S/N, H, D]   k, v [B, S/N, G, D]   ->   o [B, S/N, H, D]  (log-sum-exp [B, S/N, H])

        s_ij = scale q_i . k_j            (with a softcap c: c tanh(s_ij / c))
        o_i  = sum_j exp(s_ij - l_i) v_j     l_i = log sum_j exp(s_ij)

    over the j that i attends to. A query that attends to no position has o = 0 and l = -inf.

    Keys and values are gathered once, with all of their G heads; or, if that needs more than
    1 GiB on a rank, or `ring` says so, they go around a ring while a rank computes with those that
    it has (Ring Attention, arXiv 2310.01889). The backward pass gathers them again (or sends them
    around again), and sums their gradients on their owner in a fixed order, in float32. Between the
    passes a rank keeps its own parts alone, o and l.

    With `heads_axis` the sequence is split over both, `axis_name` first: heads move along
    `heads_axis` as in :func:`jflux.ulysses_attention`, and keys and values along `axis_name` (a
    fast axis inside, a slow one outside: arXiv 2405.07719).

    Differentiable in reverse mode alone.

    There is no kernel for this yet: it runs as XLA's products, in blocks, and on GPUs through cuDNN
    where one call of ``jax.nn.dot_product_attention`` is the same: one rank, or no mask at all.

    Args:
      q, k, v: of one floating type. Scores and sums are in float32 (float64 for float64).
      axis_name: None: the sequence is not split (or over `heads_axis` alone).
      heads_axis: a mesh axis that heads are split over while attending. Its ranks must divide H,
        and divide G or be a multiple of it.
      causal: no position attends to a later one.
      layout: which positions a rank has: "zigzag", "striped" or "contiguous", as
        :func:`jflux.reorder_for_causal` orders them. All are exact; with `causal` the first two
        give all ranks as much work. "zigzag" wants an even S/N.
      window: position i attends to i - left to i + right: (left, right), or one number for both.
      segment_ids: int [B, S/N], of documents in one sequence: positions attend to those of the same
        segment alone.
      scale: by default 1 / sqrt(D).
      softcap: c, as above (arXiv 2408.00118, section 2).
      return_lse: return l too, float32 (float64 for float64). Both are differentiable.
      ring: True: around a ring; False: gather; None: by size.
      mesh: outside ``shard_map``, with global arrays: by default the ambient one, or the operands'.
      q_spec: how global q, k and v are sharded besides, such as ``P("data")``; by default as q's
        type says.

    Returns:
      o of q's type, or (o, l).

    Raises:
      ValueError, TypeError: operands that do not fit, when the call is traced.
    """
    q, k, v = jnp.asarray(q), jnp.asarray(k), jnp.asarray(v)
    segment_ids = None if segment_ids is None else jnp.asarray(segment_ids)
    check(_OP, q, k, v, segment_ids)
    if layout not in LAYOUTS:
        raise ValueError(f"{_OP}: {layout=} must be one of {', '.join(LAYOUTS)}")
    if softcap is not None and softcap <= 0:
        raise ValueError(f"{_OP}: {softcap=} must be positive, or None for no cap")
    scores = Scores(
        1 / math.sqrt(max(1, q.shape[3])) if scale is None else float(scale),
        None if softcap is None else float(softcap), bool(causal), window_of(_OP, window),
    )  # fmt: skip
    axes: dict[str, Any] = {"axis_name": axis_name, "heads_axis": heads_axis}
    body = functools.partial(
        _attention, scores=scores, layout=layout, return_lse=return_lse, ring=ring, **axes
    )
    operands = {"q": q, "k": k, "v": v, "segment_ids": segment_ids}
    names = _mesh.axes_of(axis_name, heads_axis)
    if not names or _mesh.is_bound(names):
        return body(**operands)
    spec = _global._with_axis(_global._spec(q, q_spec), 4, 1, names)
    rows, numbers = PartitionSpec(*spec[:3]), PartitionSpec(*spec[:2])
    return _global.with_specs(
        body, "attention", operands, {"q": spec, "k": spec, "v": spec, "segment_ids": numbers},
        axis_name=names, mesh=mesh, out_specs=(spec, rows) if return_lse else spec,
    )  # fmt: skip


def _attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array | None,
    *,
    axis_name: AxisName | None,
    heads_axis: AxisName | None,
    scores: Scores,
    layout: Layout,
    return_lse: bool,
    ring: bool | None,
) -> Any:
    """On one rank."""
    if heads_axis is not None:
        check_heads(_OP, q, k, _mesh.axis_size(heads_axis))
        q, k, v = ulysses.to_heads(heads_axis, q, k, v)
        if segment_ids is not None:
            segment_ids = all_gather(segment_ids, axis_name=heads_axis, axis=1, tiled=True)
    o, lse = _split(q, k, v, segment_ids, axis_name, scores, layout, return_lse, ring)
    if heads_axis is not None:
        o = ulysses.to_positions(heads_axis, o)
        if return_lse:
            lse = ulysses.to_positions(heads_axis, lse)
    return (o, lse) if return_lse else o


def _split(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array | None,
    axis_name: AxisName | None,
    scores: Scores,
    layout: Layout,
    return_lse: bool,
    ring: bool | None,
) -> tuple[jax.Array, Any]:
    """(o, log-sum-exp) of a sequence that is split over `axis_name` alone. The second is None where
    nobody asks for it and it takes a detour."""
    _, ranks = _mesh.rank_and_size(axis_name)
    if layout == "zigzag" and ranks > 1 and q.shape[1] % 2:
        raise ValueError(
            f"{_OP}: with layout='zigzag' a rank has two equal parts of the sequence, so S/N must "
            f"be even, got q {q.shape}; pad the sequence, or use layout='striped'"
        )
    if 0 in q.shape or 0 in k.shape:
        return jnp.zeros_like(q), jnp.full(q.shape[:3], -jnp.inf, sum_dtype(q.dtype))
    call = _Call(axis_name, ranks, scores, layout, _goes_around(ring, k, v, ranks))
    if _is_plain(call, q, return_lse, segment_ids):
        if ranks > 1:
            k, v = _gather(axis_name, k, v)
        return ulysses.attend(
            q, k, v, is_causal=scores.causal, scale=scores.scale, mask=None,
            local_window_size=scores.window,
        ), None  # fmt: skip
    if axis_name is not None:
        q, k, v = _mesh.vary_together(axis_name, q, k, v)
        if segment_ids is not None and _mesh.tracks_vma(axis_name):
            segment_ids = _mesh.vary(segment_ids, _mesh.as_tuple(axis_name))
    return _blockwise(call, q, k, v, segment_ids)


@dataclasses.dataclass(frozen=True)
class _Call:
    """What is the same on all ranks."""

    axis_name: AxisName | None
    ranks: int
    scores: Scores
    layout: Layout
    ring: bool

    def part(self, rank: Any, length: int, segments: jax.Array | None) -> Part:
        """The positions of a rank."""
        return Part(own_positions(rank, length, self.ranks, self.layout), segments)

    @property
    def rank(self) -> Any:
        return _mesh.rank_and_size(self.axis_name)[0]


def _goes_around(ring: bool | None, k: jax.Array, v: jax.Array, ranks: int) -> bool:
    if ring is None:
        return ranks * (k.size * k.dtype.itemsize + v.size * v.dtype.itemsize) > MOST_GATHERED
    return ring and ranks > 1


def _is_plain(call: _Call, q: jax.Array, return_lse: bool, segment_ids: Any) -> bool:
    """Whether one call of cuDNN's attention has the same meaning."""
    scores = call.scores
    no_mask = not scores.causal and scores.window is None and not call.ring
    nothing_else = not return_lse and segment_ids is None and scores.softcap is None
    return nothing_else and (call.ranks == 1 or no_mask) and ulysses.cudnn_takes(q)


# ---- The gradient of both forms ------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _blockwise(
    call: _Call, q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """(o, log-sum-exp)."""
    o, lse = (_around if call.ring else _gathered)(call, q, k, v, segments)
    return o.astype(q.dtype), lse


def _blockwise_fwd(call: _Call, q: Any, k: Any, v: Any, segments: Any) -> Any:
    o, lse = (checkpoint_name(a, ATTENTION) for a in _blockwise(call, q, k, v, segments))
    return (o, lse), (q, k, v, segments, o, lse)


def _blockwise_bwd(call: _Call, kept: Any, cotangents: Any) -> Any:
    q, k, v, *_ = kept
    backward = _around_backward if call.ring else _gathered_backward
    dq, dk, dv = backward(call, *kept, *cotangents)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None


_blockwise.defvjp(_blockwise_fwd, _blockwise_bwd)


# ---- Gathered ------------------------------------------------------------------------------------


def _gather(axis_name: AxisName | None, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    """All ranks' keys and values, in the order of ranks."""
    both = all_gather(jnp.concatenate([k, v], -1), axis_name=axis_name, axis=1, tiled=True)
    return both[..., : k.shape[-1]], both[..., k.shape[-1] :]


def _all_keys(
    call: _Call, k: jax.Array, v: jax.Array, segments: jax.Array | None
) -> tuple[jax.Array, jax.Array, Part]:
    if call.ranks == 1:
        return k, v, call.part(jnp.int32(0), k.shape[1], segments)
    if segments is not None:
        segments = all_gather(segments, axis_name=call.axis_name, axis=1, tiled=True)
    ranks = jnp.arange(call.ranks, dtype=jnp.int32)
    positions = jax.vmap(lambda r: call.part(r, k.shape[1], None).positions)(ranks).reshape(-1)
    return *_gather(call.axis_name, k, v), Part(positions, segments)


def _gathered(
    call: _Call, q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    queries = call.part(call.rank, q.shape[1], segments)
    return blocks.forward(q, queries, *_all_keys(call, k, v, segments), call.scores)


def _gathered_backward(
    call: _Call, q: jax.Array, k: jax.Array, v: jax.Array, segments: Any, *rest: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    queries = call.part(call.rank, q.shape[1], segments)
    keys = _all_keys(call, k, v, segments)
    dq, dk, dv = blocks.backward(q, queries, *keys, call.scores, *rest)
    if call.ranks == 1:
        return dq, dk, dv
    both = reduce_scatter(
        jnp.concatenate([dk, dv], -1), axis_name=call.axis_name, scatter_dimension=1, tiled=True
    )
    return dq, both[..., : k.shape[-1]], both[..., k.shape[-1] :]


# ---- Around a ring -------------------------------------------------------------------------------


def _pass_on(call: _Call, arrays: Any) -> Any:
    """To the next rank, from the one before."""
    sizes = _mesh.sizes_in_mesh_order(call.axis_name)
    ring = [(rank, (rank + 1) % call.ranks) for rank in range(call.ranks)]
    pairs = _mesh.renumbered(ring, _mesh.as_tuple(call.axis_name), sizes)
    names = tuple(name for name, _ in sizes)
    return jax.tree.map(lambda a: lax.ppermute(a, names, pairs), arrays)


def _around(
    call: _Call, q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """A rank computes with what it has while that goes on to the next one."""
    rank = call.rank
    queries = call.part(rank, q.shape[1], segments)

    def attend(step: Any, held: Any) -> tuple[jax.Array, jax.Array]:
        k, v, segments = held
        keys = call.part((rank - step) % call.ranks, k.shape[1], segments)
        return blocks.forward(q, queries, k, v, keys, call.scores)

    def go_on(state: Any, step: Any) -> tuple[Any, None]:
        held, o, lse = state
        coming = _pass_on(call, held)
        own_o, own_lse = attend(step, held)
        return (coming, *merge_attention([o, own_o], [lse, own_lse])), None

    own = (k, v, segments)
    coming = _pass_on(call, own)
    o, lse = attend(jnp.int32(0), own)
    steps = jnp.arange(1, call.ranks - 1, dtype=jnp.int32)
    (held, o, lse), _ = lax.scan(go_on, (coming, o, lse), steps)
    last_o, last_lse = attend(jnp.int32(call.ranks - 1), held)
    return merge_attention([o, last_o], [lse, last_lse])


def _around_backward(
    call: _Call, q: jax.Array, k: jax.Array, v: jax.Array, segments: Any, *rest: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Each rank adds its part to the gradients of the keys that it holds, which go around with
    them: so their sum begins with their owner's part, and ends with that of the rank before it."""
    rank = call.rank
    queries = call.part(rank, q.shape[1], segments)

    def differentiate(step: Any, held: Any) -> Any:
        k, v, segments = held
        keys = call.part((rank - step) % call.ranks, k.shape[1], segments)
        return blocks.backward(q, queries, k, v, keys, call.scores, *rest)

    def go_on(state: Any, step: Any) -> tuple[Any, None]:
        held, sums, dq = state
        coming = _pass_on(call, held)
        own_dq, *own = differentiate(step, held)
        sums = _pass_on(call, [a + b for a, b in zip(sums, own, strict=True)])
        return (coming, sums, dq + own_dq), None

    held = (k, v, segments)
    coming = _pass_on(call, held)
    dq, *sums = differentiate(jnp.int32(0), held)
    state = (coming, _pass_on(call, sums), dq)
    (held, sums, dq), _ = lax.scan(go_on, state, jnp.arange(1, call.ranks - 1, dtype=jnp.int32))
    own_dq, *own = differentiate(jnp.int32(call.ranks - 1), held)
    dk, dv = _pass_on(call, [a + b for a, b in zip(sums, own, strict=True)])
    return dq + own_dq, dk, dv
