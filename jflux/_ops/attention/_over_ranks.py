"""The attention of one rank's arrays: heads along an axis of their own, then a form for the
sequence (_sequence_form.py), then passes (_forms.py)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from ..._call import derivatives, explain
from ..._call.forms import Call
from ..._call.plans import Machine, Plan
from ..._ranks import meshes
from ..._ranks.meshes import AxisName
from .._epilogue import sum_dtype
from ..collectives.exchange import (
    all_gather,
    all_gather_reference,
    all_to_all,
    all_to_all_reference,
)
from . import _alibi, _cudnn_by_chunks, _sequence_form, _sinks, ulysses_attention
from ._blockwise import Scores, default_precision
from ._checks import (
    Window,
    check_heads,
    of_one_width,
    of_width,
    scale_of,
    softcap_of,
    window_of,
)
from ._forms import one_call, passes_of
from ._passes import CUDNN, attend, attend_reference
from ._sequence_form import SequenceForm
from ._split_sequence import Params
from .sequence_layouts import Layout, check_length, in_ranks, in_sequence, own_positions

OP = "jflux.attention"


@dataclasses.dataclass(frozen=True)
class AttentionOptions:
    """The options of a call, as :func:`jflux.attention` takes them.

    Attributes:
      is_reference: whether it runs in XLA's operations alone.
    """

    axis_name: AxisName | None = None
    heads_axis: AxisName | None = None
    causal: bool = False
    layout: Layout = "zigzag"
    window: Window = None
    scale: float | None = None
    softcap: float | None = None
    return_lse: bool = False
    form: SequenceForm = "auto"
    mesh: Mesh | AbstractMesh | None = None
    q_spec: PartitionSpec | None = None
    is_reference: bool = False

    def scores(self, q: jax.Array) -> Scores:
        """Of queries with these options."""
        return Scores(
            scale_of(OP, self.scale, q.shape[3]), softcap_of(OP, self.softcap),
            bool(self.causal), window_of(OP, self.window),
        )  # fmt: skip


class Operands(NamedTuple):
    """One rank's arrays, as :func:`jflux.attention` takes them. They have been checked."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    segment_ids: jax.Array | None = None
    sinks: jax.Array | None = None
    bias: jax.Array | None = None
    alibi_slopes: jax.Array | None = None


#: Of one rank's arrays (o, log-sum-exp). The log-sum-exp is None if o is one call of cuDNN, which
#: returns none; with `return_lse` it is not that call.
_Attend = Callable[[Operands], tuple[jax.Array, Any]]


def attend_over_ranks(options: AttentionOptions, a: Operands) -> Any:
    """:func:`jflux.attention` of one rank's arrays."""
    scores = options.scores(a.q)
    over_sequence: _Attend = functools.partial(_over_sequence, options, scores)
    if options.heads_axis is None:
        o, lse = over_sequence(a)
    else:
        o, lse = _by_heads(options, options.heads_axis, over_sequence, a)
    return (o, lse) if options.return_lse else o


def _by_heads(
    options: AttentionOptions,
    axis_name: AxisName,
    attend_of_heads: _Attend,
    a: Operands,
    *,
    layout: Layout = "contiguous",
) -> tuple[jax.Array, Any]:
    """Attention by :func:`attend_of_heads`, which gets a rank's heads of what all ranks of an axis
    have.

    Args:
      layout: the order of these ranks, other than "contiguous" where `attend_of_heads` wants that
        of the sequence.
    """
    gather, exchange = (
        (all_gather_reference, all_to_all_reference)
        if options.is_reference
        else (all_gather, all_to_all)
    )
    axis = meshes.as_tuple(axis_name)
    check_heads(OP, a.q, a.k, ranks := meshes.axis_size(axis))
    rows = [*ulysses_attention.to_heads(axis, a.q, a.k, a.v, exchange)]
    if a.segment_ids is not None:
        rows.append(gather(a.segment_ids, axis_name=axis, axis=1, tiled=True))
    q, k, v, *ids = (in_sequence(one, ranks, layout) for one in rows)
    of_heads = (None if one is None else ulysses_attention.of_own_heads(one, axis) for one in a[4:])
    o, lse = attend_of_heads(Operands(q, k, v, ids[0] if ids else None, *of_heads))

    def back(one: jax.Array) -> jax.Array:
        return ulysses_attention.to_positions(axis, in_ranks(one, ranks, layout), exchange)

    return back(o), back(lse) if options.return_lse else None


def _over_sequence(options: AttentionOptions, scores: Scores, a: Operands) -> tuple[jax.Array, Any]:
    """Attention over a sequence that is split over `axis_name` alone."""
    rank, ranks = meshes.rank_and_size(options.axis_name)
    check_length(OP, options.layout, ranks, "q", a.q)
    (*rows, _), width = a.q.shape, a.v.shape[3]
    if 0 in a.q.shape or 0 in a.k.shape:
        lse = jnp.full(rows, -jnp.inf, sum_dtype(a.q.dtype))
        return _sinks.added(jnp.zeros((*rows, width), a.q.dtype), lse, a.sinks)
    if a.alibi_slopes is None:
        q, k, v = of_one_width(a.q, a.k, a.v)
    else:
        at = own_positions(rank, rows[1], ranks, options.layout)
        q, k, v = _alibi.with_bias(
            scores, a.q, a.k, a.v, at, a.alibi_slopes, ranks * rows[1],
            warns=not options.is_reference,
        )  # fmt: skip
    o, lse = _of_one_width(options, scores, ranks, a._replace(q=q, k=k, v=v, alibi_slopes=None))
    return of_width(o, width), lse


def _of_one_width(
    options: AttentionOptions, scores: Scores, ranks: int, a: Operands
) -> tuple[jax.Array, Any]:
    """:func:`_over_sequence` of q, k and v of one width."""
    if ranks == 1:
        return _by_keys(options, scores, False, a)
    alone, differentiated = (
        _choose(options, scores, ranks, a, is_differentiated) for is_differentiated in (False, True)
    )
    if alone[1] == differentiated[1]:
        return _in_form(options, scores, alone, a)
    assert a.segment_ids is None and not options.return_lse  # see _sequence_form.py

    precision = default_precision()  # of the call; JAX traces derivatives later
    there = {name: one for name, one in a._asdict().items() if one is not None}

    def attend_in(chosen: tuple[Plan, SequenceForm]) -> Callable[..., tuple[jax.Array]]:
        def call(*arrays: jax.Array) -> Any:
            operands = Operands(**dict(zip(there, arrays, strict=True)))
            with jax.default_matmul_precision(precision):
                return _in_form(options, scores, chosen, operands)[:1]

        return call

    of_both = derivatives.if_differentiated(
        attend_in(alone), attend_in(differentiated), options.axis_name
    )
    (o,) = of_both(*there.values())
    return o, None


def _choose(
    options: AttentionOptions,
    scores: Scores,
    ranks: int,
    a: Operands,
    differentiated: bool,
) -> tuple[Plan, SequenceForm]:
    """The form of a call, and why."""
    q, k = a.q, a.k
    on_gpus = meshes.platform() == "gpu" and not options.is_reference
    why_no_cudnn = None
    if on_gpus and _sequence_form.splits_heads(q.shape[2], k.shape[2], ranks):
        own_q, own_k = (_of_whole_sequence(a, ranks) for a in (q, k))
        why_no_cudnn = _cudnn_by_chunks.why_not(
            own_q, own_k, scores, "contiguous", 1, a.segment_ids
        )
    call = _sequence_form.SplitCall(
        options.form, ranks, options.layout, scores, options.return_lse, differentiated,
        why_no_cudnn, options.heads_axis is not None, jax.process_count(), a.bias is not None,
    )  # fmt: skip
    machine = Machine("cuda", device_kind=meshes.device_kind()) if on_gpus else Machine("cpu")
    return _sequence_form.choose(Call((q, k), call), machine)


def _of_whole_sequence(a: jax.Array, ranks: int) -> Any:
    """The type of a rank's heads after an exchange."""
    batch, own, heads, width = a.shape
    return jax.ShapeDtypeStruct((batch, ranks * own, max(1, heads // ranks), width), a.dtype)


def _in_form(
    options: AttentionOptions, scores: Scores, chosen: tuple[Plan, SequenceForm], a: Operands
) -> tuple[jax.Array, Any]:
    """Attention over ranks, in one form."""
    plan, form = chosen
    if form == "ulysses":
        assert options.axis_name is not None
        own = dataclasses.replace(options, axis_name=None, layout="contiguous")
        in_order = scores.causal or scores.window is not None or a.bias is not None
        o, lse = _by_heads(
            options, options.axis_name, functools.partial(_of_heads, own, scores), a,
            layout=options.layout if in_order else "contiguous",
        )  # fmt: skip
    else:
        o, lse = _by_keys(options, scores, form == "ring", a)
    if not options.is_reference:
        explain.note_once("attention", a[:3], (o,), plan)
    return o, lse


def _of_heads(options: AttentionOptions, scores: Scores, a: Operands) -> tuple[jax.Array, Any]:
    """A rank's heads of a whole sequence. By itself jflux exchanges heads where cuDNN computes them
    (_sequence_form.py): by the passes that have a forward mode too."""
    if options.form == "auto" and a.bias is None:
        params = Params(None, 1, scores, "contiguous", precision=default_precision())
        return attend(params, CUDNN.gathered, *a[:5])
    return _by_keys(options, scores, False, a)


def _by_keys(
    options: AttentionOptions, scores: Scores, ring: bool, a: Operands
) -> tuple[jax.Array, Any]:
    """Attention of a rank's queries to the keys of all ranks, gathered or around a ring."""
    axis = None if options.axis_name is None else meshes.as_tuple(options.axis_name)
    _, ranks = meshes.rank_and_size(axis)
    params = Params(
        axis, ranks, scores, options.layout, ring, options.return_lse, default_precision()
    )
    arrays = a[:6]
    if options.is_reference:
        return attend_reference(params, *arrays)
    passes = passes_of(params, *arrays)
    if passes.forward is one_call:  # JAX has its derivative
        return one_call(params, *arrays)
    return attend(params, passes, *arrays)
