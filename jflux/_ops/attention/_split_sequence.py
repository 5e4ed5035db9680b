"""Attention over a split sequence: how keys and values travel, and where their gradients are
summed. What one rank computes is in flash_attention.py, _blockwise.py and
_cudnn_by_chunks.py."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from ... import _config
from ..._call import derivatives
from ..._ranks import meshes
from ..._ranks.meshes import AxisName
from .._epilogue import sum_dtype
from ..collectives.exchange import (
    all_gather,
    all_gather_reference,
    reduce_scatter,
    reduce_scatter_reference,
)
from . import (
    _blockwise,
    _chunk_calls,
    _cudnn_by_chunks,
    _nonfinite,
    all_gather_attention,
    flash_attention,
)
from ._blockwise import Positions, Scores
from .merge_attention import merge_attention
from .sequence_layouts import Layout, own_positions

#: The name of the result and of its log-sum-exp for
#: ``jax.checkpoint_policies.save_only_these_names``.
ATTENTION = "jflux_attention"


@dataclasses.dataclass(frozen=True)
class Call:
    """The parameters of a call, which are the same on all ranks.

    Attributes:
      axis_name, ranks, scores, layout: as given.
      ring: whether keys go around a ring; otherwise they are gathered.
      cudnn: whether cuDNN computes the result (_cudnn_by_chunks.py).
      cudnn_backward: whether cuDNN computes the gradients. False if the log-sum-exp is returned:
        cuDNN's backward pass takes no cotangent of it.
      kernel: whether a kernel (flash_attention.py) may compute what cuDNN does not. If not, XLA's
        operations (_blockwise.py) do on every platform.
      precision: JAX's default for products where the call was made. Gradients are traced later,
        where another one may hold.
      gather, scatter: :func:`jflux.all_gather` and :func:`jflux.reduce_scatter`, or their
        references.
    """

    axis_name: AxisName | None
    ranks: int
    scores: Scores
    layout: Layout
    ring: bool
    cudnn: bool = False
    cudnn_backward: bool = False
    kernel: bool = True
    precision: str | None = None
    gather: Callable[..., jax.Array] = all_gather
    scatter: Callable[..., jax.Array] = reduce_scatter

    def positions(self, rank: Any, length: int, segments: jax.Array | None) -> Positions:
        """The positions of a rank."""
        return Positions(own_positions(rank, length, self.ranks, self.layout), segments)

    @property
    def rank(self) -> Any:
        return meshes.rank_and_size(self.axis_name)[0]

    def attend(
        self,
        q: jax.Array,
        queries: Positions,
        k: jax.Array,
        v: jax.Array,
        keys: Positions,
        dtype: Any,
    ) -> tuple[jax.Array, jax.Array]:
        """One rank's forward pass without cuDNN: `blocks.forward`, with an output of `dtype`."""
        if self.kernel:
            return flash_attention.forward(q, queries, k, v, keys, self.scores, dtype)
        o, lse = _blockwise.forward(q, queries, k, v, keys, self.scores)
        return o.astype(dtype), lse

    def differentiate(
        self,
        q: jax.Array,
        queries: Positions,
        k: jax.Array,
        v: jax.Array,
        keys: Positions,
        *rest: jax.Array,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """One rank's backward pass without cuDNN: `blocks.backward`. `rest`: o, lse, do, dlse."""
        backward = flash_attention.backward if self.kernel else _blockwise.backward
        _, lse, do, _ = rest
        return backward(q, queries, k, v, keys, self.scores, lse, do, _blockwise.delta_of(*rest))


# ---- The derivatives of both forms ---------------------------------------------------------------


def _run(
    call: Call, q: jax.Array, k: jax.Array, v: jax.Array, segments: Any
) -> tuple[jax.Array, jax.Array]:
    if segments[0] is not None:
        k, v = _nonfinite.in_keys(k, v)
    o, lse = (_around if call.ring else _gathered)(call, q, k, v, *segments)
    return o.astype(q.dtype), lse


def _forward(run: Any, operands: Any, call: Call) -> Any:
    o, lse = (checkpoint_name(a, ATTENTION) for a in run(call, *operands))
    return (o, lse), (*operands, o, lse)


def _tangents(kept: Any, tangents: Any, call: Call) -> Any:
    """The tangents, by JAX's derivatives of _blockwise.py. Neither cuDNN nor the kernels have
    any."""
    _config.say_once(
        logging.INFO,
        "jflux.attention in forward mode computes its result again with the tangents, in XLA's "
        "operations",
    )
    operands, segments = kept[:3], kept[3]
    plainly = dataclasses.replace(call, cudnn=False, cudnn_backward=False, kernel=False)

    def run(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        return _run(plainly, q, k, v, segments)

    with jax.default_matmul_precision(call.precision):
        return derivatives.jvp_of_moved(run, operands, tangents[:3])[1]


def _backward(kept: Any, cotangents: Any, wanted: Any, call: Call) -> Any:
    q, k, v, segments, o, lse = kept
    do, dlse = (
        jnp.zeros_like(a) if ct is None else ct for a, ct in zip((o, lse), cotangents, strict=True)
    )
    arrays: tuple[Any, ...] = (q, k, v, o, lse, do, dlse)
    if segments[0] is not None:
        arrays = _nonfinite.in_log_sum_exps(*arrays)
    backward = _around_backward if call.ring else _gathered_backward
    with jax.default_matmul_precision(call.precision):
        found = backward(call, *arrays[:3], *segments, *arrays[3:])
    own = [d.astype(a.dtype) for d, a in zip(found, (q, k, v), strict=True)]
    return *(None if w is None else d for w, d in zip(wanted, own, strict=False)), None


def _not_linear(*_: Any) -> Any:
    raise derivatives.not_linear("attention", "it is linear in v alone")


_differentiable = derivatives.differentiated(
    _run, kept=_not_linear, tangents=_tangents, backward=_backward, forward=_forward
)


def of_split(
    call: Call, q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None
) -> Any:
    """(o, log-sum-exp)."""
    return _differentiable(call, q, k, v, (segments,))


def of_split_reference(
    call: Call, q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None
) -> Any:
    """:func:`of_split` of a call that takes no cuDNN, in XLA's operations, differentiated as they
    are written. With segments by :func:`_backward`: a derivative of what is written multiplies
    weights of zero with NaN."""
    call = dataclasses.replace(
        call, kernel=False, gather=all_gather_reference, scatter=reduce_scatter_reference
    )
    run = _run if segments is None else _differentiable
    return run(call, q, k, v, (segments,))


# ---- Gathered ------------------------------------------------------------------------------------


def gather_keys(call: Call, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    """All ranks' keys and values, in the order of ranks."""
    gather = functools.partial(call.gather, axis_name=call.axis_name, axis=1, tiled=True)
    return gather(k), gather(v)  # as one array they would be copied twice


def _key_positions(call: Call, length: int, segments: jax.Array | None) -> Positions:
    """The positions of all ranks, in the order of ranks."""
    if call.ranks == 1:
        return call.positions(jnp.int32(0), length, segments)
    if segments is not None:
        segments = call.gather(segments, axis_name=call.axis_name, axis=1, tiled=True)
    # Not a vmap over ranks: inside a vmap with spmd_axis_name, JAX would let the constants of an
    # inner vmap vary over that axis.
    ranks = (jnp.int32(rank) for rank in range(call.ranks))
    positions = jnp.concatenate([call.positions(rank, length, None).positions for rank in ranks])
    return Positions(positions, segments)


def _all_keys(
    call: Call, k: jax.Array, v: jax.Array, segments: jax.Array | None
) -> tuple[jax.Array, jax.Array, Positions]:
    keys = _key_positions(call, k.shape[1], segments)
    return (k, v, keys) if call.ranks == 1 else (*gather_keys(call, k, v), keys)


def _in_sequence(call: Call, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array, Any]:
    """All keys and values in the order of the sequence, and this rank's calls."""
    calls = _chunk_calls.over_all_keys(call.layout, call.ranks, call.scores.causal).at(call.rank)
    if call.ranks > 1:
        gathered = gather_keys(call, k, v)
        k, v = (_cudnn_by_chunks.in_sequence(a, call.ranks, calls.chunks) for a in gathered)
    return k, v, calls


def _gathered(
    call: Call, q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    if call.cudnn:
        return _cudnn_by_chunks.forward(q, (k, v), *_in_sequence(call, k, v), call.scores.scale)
    queries = call.positions(call.rank, q.shape[1], segments)
    if call.kernel and all_gather_attention.takes(call.axis_name, call.ranks, segments):
        assert call.axis_name is not None
        keys = _key_positions(call, k.shape[1], segments)
        return all_gather_attention.forward(
            call.axis_name, q, queries, k, v, keys, call.scores, q.dtype
        )
    return call.attend(q, queries, *_all_keys(call, k, v, segments), q.dtype)


def _gathered_backward(
    call: Call, q: jax.Array, k: jax.Array, v: jax.Array, segments: Any, *rest: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    of_own = None
    if call.cudnn_backward:
        o, lse, do, _ = rest
        all_k, all_v, calls = _in_sequence(call, k, v)
        dq, of_own, dk, dv = _cudnn_by_chunks.backward(
            q, (k, v), all_k, all_v, calls, call.scores.scale, o, lse, do
        )
        dk, dv = (_cudnn_by_chunks.in_ranks(a, call.ranks, calls.chunks) for a in (dk, dv))
    else:
        queries = call.positions(call.rank, q.shape[1], segments)
        all_keys = _all_keys(call, k, v, segments)
        dq, dk, dv = call.differentiate(q, queries, *all_keys, *rest)
    if call.ranks > 1:
        dk, dv = (
            call.scatter(d, axis_name=call.axis_name, scatter_dimension=1, tiled=True)
            for d in (dk, dv)
        )
    if of_own is not None:
        dk, dv = dk + of_own[0], dv + of_own[1]
    return dq, dk, dv


# ---- Around a ring -------------------------------------------------------------------------------


def _pass_on(call: Call, arrays: Any) -> Any:
    """Sends arrays to the next rank, and returns those of the rank before. XLA has one transfer
    under way at a time, and computing beside it hides one large transfer. So keys and values travel
    as one array, and so do their gradients."""
    sizes = meshes.sizes_in_mesh_order(call.axis_name)
    ring = [(rank, (rank + 1) % call.ranks) for rank in range(call.ranks)]
    pairs = meshes.renumbered(ring, meshes.as_tuple(call.axis_name), sizes)
    names = tuple(name for name, _ in sizes)
    return jax.tree.map(lambda a: lax.ppermute(a, names, pairs), arrays)


def _held(call: Call, step: Any) -> _chunk_calls.ChunkCalls:
    """This rank's parts of the attention to the keys that it holds at this step."""
    if isinstance(step, int):  # the first: its own
        return _chunk_calls.over_own_keys(call.scores.causal)
    calls = _chunk_calls.over_peer_keys(call.layout, call.ranks, call.scores.causal)
    return calls.at(call.rank, (call.rank - step) % call.ranks)


def _around(
    call: Call, q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """The forward pass around a ring. A rank attends to the keys and values that it holds while
    these travel on to the next rank."""
    rank = call.rank
    queries = call.positions(rank, q.shape[1], segments)

    def attend(step: Any, held: Any) -> tuple[jax.Array, jax.Array]:
        (k, v), segments = held
        if call.cudnn:
            o, lse = _cudnn_by_chunks.forward(q, (k, v), k, v, _held(call, step), call.scores.scale)
            return o.astype(lse.dtype), lse
        keys = call.positions((rank - step) % call.ranks, k.shape[1], segments)
        return call.attend(q, queries, k, v, keys, sum_dtype(q.dtype))

    def go_on(state: Any, step: Any) -> tuple[Any, None]:
        held, o, lse = state
        coming = _pass_on(call, held)
        own_o, own_lse = attend(step, held)
        return (coming, *merge_attention([o, own_o], [lse, own_lse])), None

    coming = _pass_on(call, (jnp.stack([k, v]), segments))
    o, lse = attend(0, ((k, v), segments))
    held = coming
    if call.ranks > 2:  # without jit, JAX has no scan of no steps
        steps = jnp.arange(1, call.ranks - 1, dtype=jnp.int32)
        (held, o, lse), _ = lax.scan(go_on, (coming, o, lse), steps)
    last_o, last_lse = attend(jnp.int32(call.ranks - 1), held)
    return merge_attention([o, last_o], [lse, last_lse])


def _around_backward(
    call: Call, q: jax.Array, k: jax.Array, v: jax.Array, segments: Any, *rest: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The backward pass around a ring. The gradients of keys travel with the keys, and each rank
    adds its part to them. A sum begins with the part of the keys' owner, and ends with the part of
    the rank before the owner."""
    rank = call.rank
    queries = call.positions(rank, q.shape[1], segments)

    def differentiate(step: Any, held: Any) -> Any:
        (k, v), segments = held
        if call.cudnn_backward:
            parts, (o, lse, do, _) = _held(call, step), rest
            dq, own, *others = _cudnn_by_chunks.backward(
                q, (k, v), k, v, parts, call.scores.scale, o, lse, do
            )
            return dq, *(others if own is None else own)
        keys = call.positions((rank - step) % call.ranks, k.shape[1], segments)
        return call.differentiate(q, queries, k, v, keys, *rest)

    def go_on(state: Any, step: Any) -> tuple[Any, None]:
        held, sums, dq = state
        coming = _pass_on(call, held)
        # XLA puts the products beside the last transfer, so the larger of the two comes last.
        sums, _ = lax.optimization_barrier((sums, coming))
        sums = _pass_on(call, sums)
        own_dq, *own = differentiate(step, held)
        return (coming, sums + jnp.stack(own), dq + own_dq), None

    coming = _pass_on(call, (jnp.stack([k, v]), segments))
    dq, *own = differentiate(0, ((k, v), segments))
    held, sums = coming, jnp.stack(own)
    if call.ranks > 2:
        steps = jnp.arange(1, call.ranks - 1, dtype=jnp.int32)
        (held, sums, dq), _ = lax.scan(go_on, (coming, sums, dq), steps)
    sums = _pass_on(call, sums)
    own_dq, *own = differentiate(jnp.int32(call.ranks - 1), held)
    dk, dv = _pass_on(call, (sums + jnp.stack(own)).astype(k.dtype))
    return dq + own_dq, dk, dv
