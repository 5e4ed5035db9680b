"""The forms of attention over a split sequence, of which :func:`passes_of` chooses.

They are chosen when a call is traced, each pass by itself: JAX differentiates cuDNN's one call, and
others keep what their backward pass takes. What a form says of a call goes by shapes, types,
options and the platform of the mesh.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import jax

from ... import _config
from ..._call import plans
from ..._call.forms import TRACED, Call, Form, Takes, WhyNot, choose, takes_all
from ..._call.plans import Machine, Path, Plan
from ..._ranks import meshes
from . import _cudnn, _cudnn_by_chunks, all_gather_attention, flash_attention
from ._blockwise import Scores
from ._checks import within
from ._one_device import attend
from ._passes import BLOCKS, CUDNN, KERNEL, Passes, over_ranks_in_one_kernel
from ._split_sequence import Params, Pass, gather_keys


def _takes_one_call(call: Call, machine: Machine) -> Plan | None:
    """cuDNN's attention, by one call that computes all that is asked for."""
    (q, k, _, segments, sinks), params = call.arrays, call.params
    scores = params.scores
    no_mask = not scores.causal and scores.window is None and not params.ring
    nothing_else = not params.return_lse and all(
        a is None for a in (segments, sinks, scores.softcap)
    )
    takes = (
        nothing_else
        and (params.ranks == 1 or no_mask)
        and _cudnn.why_not_one_call(q, k, scores.causal, scores.window) is None
    )
    return plans.decomposed("one call of cuDNN") if takes else None


def one_call(
    params: Params,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: Any,
    sinks: Any = None,
    bias: Any = None,
) -> Any:
    if params.ranks > 1:
        k, v = gather_keys(params, k, v)
    scores = params.scores
    return attend(
        q, k, v, is_causal=scores.causal, scale=scores.scale, mask=None,
        local_window_size=within(scores.window, k.shape[1]), bias=bias,
    ), None  # fmt: skip


def _takes_kernel_over_ranks(call: Call, machine: Machine) -> Plan | WhyNot | None:
    (q, k, v, segments, _), params = call.arrays, call.params
    if params.ring or not all_gather_attention.takes(params.axis_name, params.ranks, segments):
        return None
    if isinstance(why_no_cudnn := _takes_cudnn(call, machine), WhyNot):
        return plans.decomposed(why_no_cudnn.reason)
    if all_gather_attention.beats_cudnn(q, k, v, params.scores):
        return plans.decomposed("jflux's kernel is faster than cuDNN's calls")
    return None


def _takes_cudnn(call: Call, machine: Machine) -> Plan | WhyNot:
    (q, k, _, segments, _), params = call.arrays, call.params
    why = _cudnn_by_chunks.why_not(q, k, params.scores, params.layout, params.ranks, segments)
    return WhyNot(why) if why else plans.decomposed("cuDNN's calls by chunks")


def _takes_cudnn_backward(call: Call, machine: Machine) -> Plan | WhyNot:
    """cuDNN's backward pass takes no cotangent of the log-sum-exp."""
    if call.params.return_lse:
        return WhyNot("the log-sum-exp is a result")
    by_kernel = isinstance(_takes_kernel_over_ranks(call, machine), Plan)
    if by_kernel and call.arrays[0].shape[1] <= all_gather_attention.MOST_POSITIONS_FOR_GRADIENTS:
        return WhyNot("jflux's kernel is faster than cuDNN's calls")
    return _takes_cudnn(call, machine)


def _if_ring(ring: bool, takes: Takes) -> Takes:
    """Of a form whose keys go around a ring, or are gathered."""
    return lambda call, machine: takes(call, machine) if call.params.ring == ring else None


_FORWARD: tuple[Form[Pass], ...] = (
    Form(_takes_one_call, one_call),
    Form(_takes_kernel_over_ranks, over_ranks_in_one_kernel),
    Form(_if_ring(False, _takes_cudnn), CUDNN.gathered.forward),
    Form(_if_ring(True, _takes_cudnn), CUDNN.around.forward),
    Form(_if_ring(False, takes_all), KERNEL.gathered.forward),
    Form(_if_ring(True, takes_all), KERNEL.around.forward),
)
_BACKWARD: tuple[Form[Pass], ...] = (
    Form(_if_ring(False, _takes_cudnn_backward), CUDNN.gathered.backward),
    Form(_if_ring(True, _takes_cudnn_backward), CUDNN.around.backward),
    Form(_if_ring(False, takes_all), KERNEL.gathered.backward),
    Form(_if_ring(True, takes_all), KERNEL.around.backward),
)


def passes_of(
    params: Params, q: Any, k: Any, v: Any, segment_ids: Any, sinks: Any = None, bias: Any = None
) -> Passes:
    """The passes of a call."""
    call = Call((q, k, v, segment_ids, sinks), params)
    (plan, forward), (_, backward) = choose(_FORWARD, call), choose(_BACKWARD, call)
    assert forward is not None and backward is not None
    by_cudnn = forward.run in (one_call, CUDNN.gathered.forward, CUDNN.around.forward)
    if bias is not None:
        return _passes_with_bias(call, bias, by_cudnn)
    if not by_cudnn:
        without_sinks = dataclasses.replace(call, arrays=(*call.arrays[:-1], None))
        by_sinks = sinks is not None and _takes_one_call(without_sinks, TRACED) is not None
        _say_if_no_kernel(plan.reason, q, k, v, params.scores, by_sinks)
    return Passes(forward.run, backward.run)


def _passes_with_bias(call: Call, bias: Any, by_cudnn: bool) -> Passes:
    """One call of cuDNN, or blocks, with a warning where something else takes the call without its
    bias: cuDNN, as `by_cudnn` says, or jflux's kernel."""
    (q, k, v, *_), params = call.arrays, call.params
    scores, blocks = params.scores, BLOCKS.of(params)
    if meshes.platform() != "gpu":
        return blocks
    if params.ranks > 1:
        why: str | None = "cuDNN has one of a rank's heads alone (form='ulysses')"
    elif _takes_one_call(call, TRACED) is None:
        why = _cudnn.why_not_one_call(q, k, scores.causal, scores.window) or (
            "one call of cuDNN has no log-sum-exp, segments, sinks and softcap"
        )
    else:
        why = _cudnn.why_not_bias(q, bias)
    if why is None:
        return Passes(one_call, blocks.backward)
    if by_cudnn or flash_attention.plan(q, k, v, scores).path != Path.REFERENCE:
        _config.fall_back("attention", f"no kernel takes a bias; {why}")
    return blocks


def _say_if_no_kernel(
    why_no_cudnn: str, q: jax.Array, k: jax.Array, v: jax.Array, scores: Scores, by_sinks: bool
) -> None:
    """Says once if nothing but XLA's operations takes a call on GPUs. It is a warning where one
    call of cuDNN would take it without its sinks."""
    if meshes.platform() != "gpu":
        return
    plan = flash_attention.plan(q, k, v, scores)
    if plan.path != Path.REFERENCE:
        return
    if by_sinks:
        _config.fall_back(
            "attention",
            f"one call of cuDNN takes no sinks; {why_no_cudnn}; no kernel: {plan.reason}",
        )
    else:
        _config.say_once(
            logging.INFO,
            f"jflux.attention runs in XLA's operations: {why_no_cudnn}; no kernel: {plan.reason}",
        )
