"""What travels between the ranks of a split sequence: keys and values, gathered or around a ring,
or heads (Ulysses). :func:`choose` says which, and why.

    contiguous order, causal    Ulysses: its ranks have equally much to do, and those that gather
                                have not: the last one has 2 - 1 / N times the mean
    zigzag, striped, gradients  Ulysses on four ranks: fewer calls of cuDNN, mostly fewer bytes. On
                                two both take the same time
    zigzag, striped, forward    gathering: keys arrive while the kernel computes
    many keys                   a ring, which holds one peer's keys at a time
    a bias                      Ulysses, where ranks divide the heads: cuDNN has one of whole
                                sequences, and what goes by positions computes in blocks

Times: docs/experiments/0058. Ulysses is taken where they say so, and for nothing else.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

from ..._call import forms, plans
from ..._call.forms import Call, Form, Takes, WhyNot, takes_all
from ..._call.plans import Machine, Plan
from ._blockwise import Scores
from .sequence_layouts import Layout

SequenceForm = Literal["auto", "gather", "ring", "ulysses"]
SEQUENCE_FORMS: tuple[SequenceForm, ...] = get_args(SequenceForm)

#: Bytes of gathered keys and values from which on they are passed around a ring instead.
MOST_GATHERED = 1 << 30

#: What Ulysses has been timed for: up to so many ranks; heads of so many elements; and, of what
#: gathering moves with gradients, up to so much (64 heads over 8, two ranks).
_MOST_RANKS = 4
_WIDTH = 128
_MOST_TRAFFIC = 2.25
#: Rows of queries, B S H, from which on Ulysses has been timed in contiguous order (8192 positions
#: of 32 heads).
_LEAST_ROWS = 8192 * 32
#: Ranks, and positions of the sequence, from which on it does with gradients in other orders; and
#: the most traffic (64 heads over 8, four ranks).
_LEAST_RANKS_IN_ORDER = 4
_LEAST_POSITIONS_IN_ORDER = 8192
_MOST_TRAFFIC_IN_ORDER = 1.125


@dataclasses.dataclass(frozen=True)
class SplitCall:
    """A call, as far as its form depends on it.

    Attributes:
      form: what the caller asks for.
      ranks, layout, scores, return_lse: as :class:`._split_sequence.Params` has them.
      differentiated: whether the call is differentiated.
      why_no_cudnn: why cuDNN does not compute the heads that a rank has after an exchange, or None.
      along_heads: whether heads are split over an axis of their own too.
      processes: of the program.
      has_bias: whether there is a bias, of whole sequences.
    """

    form: SequenceForm
    ranks: int
    layout: Layout
    scores: Scores
    return_lse: bool = False
    differentiated: bool = False
    why_no_cudnn: str | None = None
    along_heads: bool = False
    processes: int = 1
    has_bias: bool = False


def check_form(op: str, form: str) -> None:
    """Raises ValueError for a form that is not one of `SEQUENCE_FORMS`."""
    if form not in SEQUENCE_FORMS:
        raise ValueError(f"{op}: {form=} must be one of {', '.join(SEQUENCE_FORMS)}")


def choose(call: Call, machine: Machine) -> tuple[Plan, SequenceForm]:
    """The form of a call of (q, k), one rank's or their types, with the reason. A pure function.

    Args:
      call: its `params` are a :class:`SplitCall`.
    """
    plan, form = forms.choose(_FORMS, call, machine)
    assert form is not None
    return plan, form.run


def traffic(heads: int, kv_heads: int, ranks: int) -> float:
    """The elements that Ulysses moves, in those that gathering moves, with gradients: q, k, v and o
    forward and their gradients back, a rank's heads of each; and k and v twice, and their gradients
    in twice as many bytes, all heads of each."""
    return (heads + max(kv_heads, ranks)) / (2 * kv_heads * ranks)


def splits_heads(heads: int, kv_heads: int, ranks: int) -> bool:
    """Whether Ulysses takes so many heads."""
    return heads % ranks == 0 and (kv_heads % ranks == 0 or ranks % kv_heads == 0)


def _takes_ring(call: Call, machine: Machine) -> Plan | None:
    _, k = call.arrays
    gathered = 2 * call.params.ranks * k.size * k.dtype.itemsize
    if gathered <= MOST_GATHERED or _takes_bias(call):
        return None
    return plans.decomposed(
        f"keys and values go around a ring: gathered they have {gathered} bytes, more than "
        f"{MOST_GATHERED}"
    )


def _takes_ulysses(call: Call, machine: Machine) -> Plan | WhyNot:
    params: SplitCall = call.params
    if _takes_bias(call):
        return plans.decomposed("heads are exchanged (Ulysses): cuDNN has a bias of them")
    if why := _why_not_ulysses(call, machine):
        return WhyNot(why)
    if params.layout == "contiguous":
        why = "in contiguous order the last of the ranks that gather keys takes longer"
    else:
        why = f"with gradients that takes less time, on {params.ranks} ranks"
    return plans.decomposed(f"heads are exchanged (Ulysses): {why}")


def _takes_bias(call: Call) -> bool:
    """Whether a call has a bias, and heads that Ulysses takes."""
    (q, k), params = call.arrays, call.params
    return params.has_bias and splits_heads(q.shape[2], k.shape[2], params.ranks)


def _why_not_ulysses(call: Call, machine: Machine) -> str | None:
    """Why a call does not take Ulysses by itself, or None."""
    (q, k), params = call.arrays, call.params
    batch, own, heads, width = q.shape
    ranks, kv_heads, length = params.ranks, k.shape[2], params.ranks * own
    if not splits_heads(heads, kv_heads, ranks):
        return f"{ranks} ranks do not split {heads} heads over {kv_heads}"
    if machine.device_kind not in plans.MEASURED_GPUS:
        return "an exchange of heads has been timed on H100 and H200 alone"
    if not params.scores.causal:
        return "an exchange of heads has been timed with a causal mask alone"
    if params.why_no_cudnn is not None:
        return params.why_no_cudnn
    if params.return_lse or params.along_heads or params.processes > 1:
        return (
            "an exchange of heads has been timed in one process, without `heads_axis` and "
            "`return_lse`"
        )
    if ranks > _MOST_RANKS or width != _WIDTH:
        return (
            f"an exchange of heads has been timed for {_WIDTH} elements of a head and up to "
            f"{_MOST_RANKS} ranks"
        )
    moved = traffic(heads, kv_heads, ranks)
    if params.layout == "contiguous":
        rows = batch * length * heads
        if rows < _LEAST_ROWS:
            return f"an exchange of heads has been timed from {_LEAST_ROWS} queries of all heads on"
        return _if_more(moved, _MOST_TRAFFIC)
    if not params.differentiated:
        return "without gradients that takes less time"
    if ranks < _LEAST_RANKS_IN_ORDER or length < _LEAST_POSITIONS_IN_ORDER:
        return (
            f"exchanged heads have to be put in order, which is worth it from "
            f"{_LEAST_RANKS_IN_ORDER} ranks and {_LEAST_POSITIONS_IN_ORDER} positions on"
        )
    return _if_more(moved, _MOST_TRAFFIC_IN_ORDER)


def _if_more(moved: float, most: float) -> str | None:
    if moved <= most:
        return None
    return f"an exchange of heads moves {moved:.3g} times as much, and is taken up to {most:.3g}"


def _or_asked_for(name: SequenceForm, takes: Takes) -> Takes:
    """Of a form that takes what its caller asks for, and of calls that leave it open, some."""

    def asked(call: Call, machine: Machine) -> Plan | WhyNot | None:
        if call.params.form == "auto":
            return takes(call, machine)
        return plans.decomposed(f"{name} is asked for") if call.params.form == name else None

    return asked


_FORMS: tuple[Form[SequenceForm], ...] = (
    Form(_or_asked_for("ring", _takes_ring), "ring"),
    Form(_or_asked_for("ulysses", _takes_ulysses), "ulysses"),
    Form(_or_asked_for("gather", takes_all), "gather", "keys and values are gathered"),
)
