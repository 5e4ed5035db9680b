"""The passes of attention over a split sequence: what computes them, and how they are each other's
derivatives. How keys travel is in _split_sequence.py."""

from __future__ import annotations

import dataclasses
import functools
import logging
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from ... import _config
from ..._call import derivatives
from ..._ranks import meshes
from .._epilogue import sum_dtype
from ..collectives.exchange import all_gather_reference, reduce_scatter_reference
from . import (
    _blockwise,
    _chunk_calls,
    _cudnn_by_chunks,
    _nonfinite,
    _sinks,
    all_gather_attention,
    flash_attention,
)
from ._blockwise import Positions
from ._split_sequence import (
    AtStep,
    Held,
    Params,
    Pass,
    Results,
    gather_keys,
    gathered_keys,
    go_around,
    go_around_backward,
    key_positions,
    scattered,
)
from .sequence_layouts import Layout, in_ranks, in_sequence

#: The name of the result and of its log-sum-exp for
#: ``jax.checkpoint_policies.save_only_these_names``.
ATTENTION = "jflux_attention"


@dataclasses.dataclass(frozen=True)
class Passes:
    """A forward and a backward pass."""

    forward: Pass
    backward: Pass


@dataclasses.dataclass(frozen=True)
class Attends:
    """What computes a rank's attention: its passes over gathered keys, and around a ring."""

    gathered: Passes
    around: Passes

    def of(self, params: Params) -> Passes:
        """The passes of a call."""
        return self.around if params.ring else self.gathered


def _attends(
    gathered: Pass, gathered_backward: Pass, at_step: AtStep, at_step_backward: AtStep
) -> Attends:
    around = functools.partial(go_around, at_step)
    around_backward = functools.partial(go_around_backward, at_step_backward)
    return Attends(Passes(gathered, gathered_backward), Passes(around, around_backward))


def _by_positions(forward: Any, backward: Any) -> Attends:
    """By functions as `flash_attention.forward` and `backward` are."""

    def gathered(params: Params, q: Any, k: Any, v: Any, segments: Any, *_: Any) -> Results:
        queries = params.positions(params.rank, q.shape[1], segments)
        return forward(q, queries, *gathered_keys(params, k, v, segments), params.scores, q.dtype)

    def gathered_backward(
        params: Params, q: Any, k: Any, v: Any, segments: Any, *rest: Any
    ) -> Results:
        queries = params.positions(params.rank, q.shape[1], segments)
        all_keys = gathered_keys(params, k, v, segments)
        dq, *d_keys = differentiate(params, q, queries, *all_keys, *rest)
        return dq, *scattered(params, *d_keys)

    def keys_at(params: Params, rank: Any, step: Any, held: Held) -> Any:
        (k, v), segments = held
        return k, v, params.positions((rank - step) % params.ranks, k.shape[1], segments)

    def at_step(
        params: Params, rank: Any, q: Any, queries: Positions, step: Any, held: Held, *_: Any
    ) -> Results:
        keys = keys_at(params, rank, step, held)
        return forward(q, queries, *keys, params.scores, sum_dtype(q.dtype))

    def at_step_backward(
        params: Params, rank: Any, q: Any, queries: Positions, step: Any, held: Held, *rest: Any
    ) -> Results:
        return differentiate(params, q, queries, *keys_at(params, rank, step, held), *rest)

    def differentiate(
        params: Params, q: Any, queries: Any, k: Any, v: Any, keys: Any, *rest: Any
    ) -> Results:
        _, lse, do, _ = rest
        delta = _blockwise.delta_of(*rest)
        return backward(q, queries, k, v, keys, params.scores, lse, do, delta)

    return _attends(gathered, gathered_backward, at_step, at_step_backward)


def _in_blocks(*operands: Any, **bias: Any) -> tuple[jax.Array, jax.Array]:
    o, lse = _blockwise.forward(*operands[:-1], **bias)
    return o.astype(operands[-1]), lse


_OF_BLOCKS = (_in_blocks, _blockwise.backward)


def _in_sequence(params: Params, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array, Any]:
    """All keys and values in the order of the sequence, and this rank's calls."""
    calls = _chunk_calls.over_all_keys(params.layout, params.ranks, params.scores.causal)
    calls = calls.at(params.rank)
    if params.ranks > 1:
        gathered = gather_keys(params, k, v)
        k, v = (in_sequence(a, params.ranks, _order(params, calls)) for a in gathered)
    return k, v, calls


def _order(params: Params, calls: _chunk_calls.ChunkCalls) -> Layout:
    """In which gathered keys come. Where calls are over all of them that is as good as any."""
    return "contiguous" if calls.chunks == 1 else params.layout


def _cudnn_gathered(params: Params, q: Any, k: Any, v: Any, segments: Any, *_: Any) -> Results:
    all_keys = _in_sequence(params, k, v)
    return _cudnn_by_chunks.forward(q, (k, v), *all_keys, params.scores.scale)


def _cudnn_gathered_backward(
    params: Params, q: Any, k: Any, v: Any, segments: Any, *rest: Any
) -> Results:
    o, lse, do, _ = rest
    all_k, all_v, calls = _in_sequence(params, k, v)
    dq, of_own, *d_keys = _cudnn_by_chunks.backward(
        q, (k, v), all_k, all_v, calls, params.scores.scale, o, lse, do
    )
    if of_own is not None and not calls.unmasked:  # one rank's
        return dq, *of_own
    d_keys = [in_ranks(a, params.ranks, _order(params, calls)) for a in d_keys]
    d_keys = scattered(params, *d_keys)
    return dq, *(d_keys if of_own is None else (d + o for d, o in zip(d_keys, of_own, strict=True)))


def _calls_at(params: Params, step: Any) -> _chunk_calls.ChunkCalls:
    """This rank's calls over the keys that it holds at this step."""
    if isinstance(step, int):  # the first: its own
        return _chunk_calls.over_own_keys(params.scores.causal)
    calls = _chunk_calls.over_peer_keys(params.layout, params.ranks, params.scores.causal)
    return calls.at(params.rank, (params.rank - step) % params.ranks)


def _cudnn_at_step(
    params: Params, rank: Any, q: Any, queries: Positions, step: Any, held: Held, *_: Any
) -> Results:
    (k, v), _segments = held
    calls = _calls_at(params, step)
    o, lse = _cudnn_by_chunks.forward(q, (k, v), k, v, calls, params.scores.scale)
    return o.astype(lse.dtype), lse


def _cudnn_at_step_backward(
    params: Params, rank: Any, q: Any, queries: Positions, step: Any, held: Held, *rest: Any
) -> Results:
    ((k, v), _), (o, lse, do, _) = held, rest
    calls = _calls_at(params, step)
    dq, own, *others = _cudnn_by_chunks.backward(
        q, (k, v), k, v, calls, params.scores.scale, o, lse, do
    )
    return dq, *(others if own is None else own)


#: cuDNN's calls by chunks; jflux's kernel, where one takes the call; XLA's operations.
CUDNN = _attends(_cudnn_gathered, _cudnn_gathered_backward, _cudnn_at_step, _cudnn_at_step_backward)
KERNEL = _by_positions(flash_attention.forward, flash_attention.backward)
BLOCKS = _by_positions(*_OF_BLOCKS)


def over_ranks_in_one_kernel(
    params: Params, q: jax.Array, k: jax.Array, v: jax.Array, segments: Any, *_: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """A forward pass whose keys arrive while it computes."""
    assert params.axis_name is not None
    queries = params.positions(params.rank, q.shape[1], segments)
    keys = key_positions(params, k.shape[1], segments)
    return all_gather_attention.forward(
        params.axis_name, q, queries, k, v, keys, params.scores, q.dtype
    )


# ---- Derivatives ---------------------------------------------------------------------------------


#: A call: its parameters and passes. Those of a bias are in blocks, whichever are given.
_Call = tuple[Params, Passes]


def _or_none(a: Any) -> Any:
    """Sinks or a bias, of which () is none: None would be an operand without a type."""
    return None if isinstance(a, tuple) else a


def _operands(q: Any, k: Any, v: Any, segments: Any, *others: Any) -> tuple[Any, ...]:
    """As :func:`_run` takes them. `others`: sinks and bias."""
    return (q, k, v, (segments,), *(() if a is None else a for a in others))


def _run(
    call: _Call, q: jax.Array, k: jax.Array, v: jax.Array, segments: Any, sinks: Any, bias: Any
) -> tuple[jax.Array, jax.Array]:
    if segments[0] is not None:
        k, v = _nonfinite.in_keys(k, v)
    o, lse = _passes_of(call, _or_none(bias)).forward(call[0], q, k, v, *segments)
    o, lse = _sinks.added(o, lse, _or_none(sinks))
    return o.astype(q.dtype), lse


def _passes_of(call: _Call, bias: jax.Array | None) -> Passes:
    params, passes = call
    if bias is None:
        return passes
    forward, backward = (functools.partial(f, bias=bias) for f in _OF_BLOCKS)
    return _by_positions(forward, backward).of(params)


def _forward(run: Any, operands: Any, call: _Call) -> Any:
    o, lse = (checkpoint_name(a, ATTENTION) for a in run(call, *operands))
    return (o, lse), (operands, o, lse)


def _tangents(kept: Any, tangents: Any, call: _Call) -> Any:
    """The tangents, by JAX's derivatives of _blockwise.py. Neither cuDNN nor the kernels have
    any."""
    _config.say_once(
        logging.INFO,
        "jflux.attention in forward mode computes its result again with the tangents, in XLA's "
        "operations",
    )
    (params, _), (operands, *_) = call, kept
    with jax.default_matmul_precision(params.precision):
        run = functools.partial(_run, (params, BLOCKS.of(params)))
        return derivatives.jvp_of_moved(run, operands, tangents)[1]


def _backward(kept: Any, cotangents: Any, wanted: Any, call: _Call) -> Any:
    (params, _), ((q, k, v, segments, *others), o, lse) = call, kept
    sinks, bias = map(_or_none, others)
    do, dlse = (
        jnp.zeros_like(a) if ct is None else ct for a, ct in zip((o, lse), cotangents, strict=True)
    )
    arrays: tuple[Any, ...] = (q, k, v, o, lse, do, dlse)
    if segments[0] is not None:
        arrays = _nonfinite.in_log_sum_exps(*arrays)
    with jax.default_matmul_precision(params.precision):
        dq, *d_keys = _passes_of(call, bias).backward(params, *arrays[:3], *segments, *arrays[3:])
    d_sinks = d_bias = None
    if bias is not None:
        dq, d_bias = dq
        d_bias = d_bias.astype(bias.dtype)
    if sinks is not None:
        _, lse, *_ = results = arrays[3:]
        d_sinks = _sinks.gradient(sinks, lse, _blockwise.delta_of(*results))
    d_rows = (d.astype(a.dtype) for d, a in zip((dq, *d_keys), (q, k, v), strict=True))
    gradients = (*d_rows, None, d_sinks, d_bias)
    return [None if w is None else d for w, d in zip(wanted, gradients, strict=True)]


def _not_linear(*_: Any) -> Any:
    raise derivatives.not_linear("attention", "it is linear in v alone")


_differentiable = derivatives.differentiated(
    _run,
    kept=_not_linear,
    tangents=_tangents,
    backward=_backward,
    forward=_forward,
    axes=lambda given: given[0].axis_name,
)


def attend(
    params: Params,
    passes: Passes,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array | None = None,
    sinks: jax.Array | None = None,
    bias: jax.Array | None = None,
) -> Any:
    """(o, log-sum-exp)."""
    return _differentiable((params, passes), *_operands(q, k, v, segments, sinks, bias))


def attend_reference(
    params: Params,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array | None,
    sinks: jax.Array | None,
    bias: jax.Array | None,
) -> Any:
    """:func:`attend` in XLA's operations, differentiated as they are written. With segments by
    :func:`_backward`: a derivative of what is written multiplies weights of zero with NaN."""
    params = dataclasses.replace(
        params, gather=all_gather_reference, scatter=reduce_scatter_reference
    )
    passes = BLOCKS.of(params)
    if segments is not None:
        return attend(params, passes, q, k, v, segments, sinks, bias)
    # Its loops are plain `lax`, whose carries have one type.
    leaves, structure = jax.tree.flatten(_operands(q, k, v, None, sinks, bias))
    leaves = meshes.vary_together(meshes.axes_of(params.axis_name), *leaves)
    return _run((params, passes), *jax.tree.unflatten(structure, leaves))
