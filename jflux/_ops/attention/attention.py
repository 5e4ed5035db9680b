"""Exact attention over a sequence that is split over ranks: keys and values are gathered, or go
around a ring, or heads are exchanged."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from ..._ranks import global_arrays, meshes
from ..._ranks.meshes import AxisName
from . import _alibi, _sequence_form
from ._checks import Window, check, check_bias, is_cross, per_head
from ._over_ranks import OP as _OP
from ._over_ranks import AttentionOptions, Operands, attend_over_ranks
from ._sequence_form import SequenceForm
from .sequence_layouts import Layout, check_layout


class Options(TypedDict, total=False):
    """Arguments on which the type of the result does not depend."""

    axis_name: AxisName | None
    heads_axis: AxisName | None
    causal: bool
    layout: Layout
    window: Window
    segment_ids: Any
    sinks: Any
    bias: Any
    alibi_slopes: Any
    scale: float | None
    softcap: float | None
    form: SequenceForm
    mesh: Mesh | AbstractMesh | None
    q_spec: PartitionSpec | None


@overload
def attention(
    q: Any, k: Any, v: Any, *, return_lse: Literal[False] = ..., **options: Unpack[Options]
) -> jax.Array: ...
@overload
def attention(
    q: Any, k: Any, v: Any, *, return_lse: Literal[True], **options: Unpack[Options]
) -> tuple[jax.Array, jax.Array]: ...
@overload
def attention(q: Any, k: Any, v: Any, *, return_lse: bool, **options: Unpack[Options]) -> Any: ...
@meshes.axis_by_name
def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    axis_name: AxisName | None = None,
    heads_axis: AxisName | None = None,
    causal: bool = False,
    layout: Layout = "zigzag",
    window: Window = None,
    segment_ids: Any = None,
    sinks: Any = None,
    bias: Any = None,
    alibi_slopes: Any = None,
    scale: float | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
    form: SequenceForm = "auto",
    mesh: Mesh | AbstractMesh | None = None,
    q_spec: PartitionSpec | None = None,
) -> Any:
    """Exact attention over a sequence that is split over ranks.

    Inside ``jax.shard_map``, per rank of N along `axis_name`, for H heads of queries and G of keys
    and values (grouped queries, arXiv 2305.13245)::

        q [B, S/N, H, D]   k, v [B, T/N, G, D]   ->   o [B, S/N, H, D]  (log-sum-exp [B, S/N, H])

        s_ij = scale q_i . k_j            (with a softcap c: c tanh(s_ij / c))
        o_i  = sum_j exp(s_ij - l_i) v_j     l_i = log sum_j exp(s_ij)

    over the j that i attends to. T is S, but where queries attend to all keys of another sequence
    (cross-attention): without `causal`, `window` and `segment_ids`. A query that attends to no
    position has o = 0 and l = -inf. With `sinks` the sum in l_i has one term more, exp(sinks_h),
    for which o_i has none.

    `form` says what travels:

    - "gather": keys and values, once, with all of their G heads.
    - "ring": keys and values around a ring, where a rank computes with one part while the next one
      arrives (Ring Attention, arXiv 2310.01889). A rank holds one peer's keys at a time.
    - "ulysses": heads, as in :func:`jflux.ulysses_attention`: each rank attends with its share of
      them to the whole sequence, which is put in order first, and o travels back. The ranks must
      divide H, and divide G or be a multiple of it.
    - "auto": a ring if gathered keys and values take more than 1 GiB on a rank. Otherwise heads,
      where that has been timed to take less: causal, by cuDNN, on 2 to 4 H100 or H200 of one
      process, with heads of 128 elements; in "contiguous" order, and in the other orders where the
      call is differentiated, from 4 ranks and 8192 positions on. Otherwise keys and values are
      gathered. :func:`jflux.explain` says which, and why; docs/experiments/0058 has the times.

    The backward pass moves in the same way as the forward pass. Gradients of keys that travel are
    summed on their owner in a fixed order, in float32. Between the passes a rank keeps only its own
    parts of q, k and v, o and l; of exchanged heads, the whole sequence of its heads of these.

    With `heads_axis` the sequence is split over both, `axis_name` first: heads move along
    `heads_axis` as in :func:`jflux.ulysses_attention`, and `form` is about `axis_name` (a fast axis
    inside, a slow one outside: arXiv 2405.07719).

    Reverse mode works everywhere. Forward mode computes the result a second time, with its
    tangents, in XLA's operations. A call that is one call of cuDNN (below) has no forward mode,
    since JAX defines none for cuDNN's attention; with `return_lse` the call is not that one call.

    GPUs compute float16 and bfloat16 attention in the first of these ways that takes the call:

    - jflux's kernels, on Hopper GPUs, for causal forward passes over ranks that gather; for their
      gradients too with up to 4096 positions of a rank.
    - cuDNN, without `window`, `segment_ids`, `softcap` and causal "striped" order, for heads of a
      multiple of 8 elements, up to 128, and parts of a multiple of 64 positions; gradients only
      without `return_lse`. It is one call where ``jax.nn.dot_product_attention`` means the same
      (one rank, or no mask at all, and no `sinks`), or where jflux chooses to exchange heads, and
      otherwise a few calls whose results are merged.
    - jflux's kernels, for heads of up to 256 elements; on GPUs other than Hopper where
      ``python -m jflux.selftest`` has passed, or with ``unchecked_kernels``. Gathered keys arrive
      while the kernel computes.
    - XLA's products, in blocks, which take several times as long (docs/experiments/0037, 0045, 0047
      and 0050).

    Args:
      q, k, v: of one floating type. Scores and sums are in float32 (float64 for float64). Values
        may have another width than keys, [B, T/N, G, E], as DeepSeek-V3's 128 for 192 (arXiv
        2412.19437, section 2.1.1), and o is [B, S/N, H, E] then. The narrower ones are padded with
        zeros.
      axis_name: the axis that the sequence is split over. None: it is whole, or split over
        `heads_axis` alone.
      heads_axis: a mesh axis that heads are split over while attending. Its ranks must divide H,
        and divide G or be a multiple of it.
      causal: no position attends to a later one.
      layout: which positions a rank has: "zigzag", "striped" or "contiguous", as
        :func:`jflux.reorder_for_causal` orders them. All are exact; with `causal` the first two
        give all ranks as much work. "zigzag" wants an even S/N.
      window: position i attends to i - left to i + right: (left, right), of which None leaves a
        side open, or one number for both. Models that count i too, as Mistral's `sliding_window`,
        give that less one.
      segment_ids: int [B, S/N], of documents in one sequence: positions attend to those of the same
        segment alone. A value that is not finite, such as NaN in padding that is a segment of its
        own, reaches the queries that attend to it, the gradients of these queries, and the
        gradients of the keys and values that these queries attend to. It reaches nothing else.
      sinks: [H], floating: a logit of each head of q in the denominator of its softmax, as in
        gpt-oss (arXiv 2508.10925; StreamingLLM, arXiv 2309.17453). Neither `scale` nor `softcap`
        changes it. Differentiable, and the same on all ranks of `axis_name` and `heads_axis`; where
        another axis splits heads, those of the rank's own. A sink of -inf is none.
      bias: [1 or B, 1 or H, S, T], floating, of whole sequences in order of positions, not of
        `layout`: added to the scores, after the softcap, such as T5's relative positions (arXiv
        1910.10683, section 2.1). It should be small, since it is whole on all ranks of `axis_name`
        and `heads_axis`. Differentiable. With a bias "auto" exchanges heads wherever the ranks
        divide them. On GPUs what one rank then computes, or one rank alone, is one call of cuDNN
        for calls that are that (above), if the bias is [1, 1 or H, S, T] and of q's type. All else
        is XLA's blocks, with a warning.
      alibi_slopes: [H], floating: of ALiBi (arXiv 2108.12409, section 3), where the score s_ij of
        head h has ``slope_h (j - i)`` more, for positions i and j of the whole sequence. Without
        `causal` that is what later positions have too, not ``-slope_h |i - j|``. The log-sum-exp
        counts it. Constants, without a gradient; the same on all ranks, or the rank's own, as
        `sinks` are. Not with `softcap`, which would bend it, nor with keys of another sequence.
        Heads get 16 elements more, 8 for up to 256 positions, which hold the bias, travel and are
        multiplied: cuDNN takes up to 128 in all, jflux's kernels up to 256. An error of the bias is
        a few times 2^-24 of the largest one of the sequence.
      scale: by default 1 / sqrt(D).
      softcap: c, as above (arXiv 2408.00118, section 2).
      return_lse: return l too, float32 (float64 for float64). Both are differentiable. l counts the
        sinks: before :func:`jflux.merge_attention` give them to one part alone, or to the merge.
      form: "auto", "gather", "ring" or "ulysses", as above.
      mesh: outside ``shard_map``, with global arrays: by default the ambient one, or the operands'.
      q_spec: how global q, k and v are sharded besides, such as ``P("data")``; by default as q's
        type says.

    Returns:
      o of q's type, or (o, l).

    Raises:
      ValueError, TypeError: operands that do not fit, when the call is traced.

    Examples:
      >>> mesh = jax.sharding.Mesh(jax.devices(), "cp")
      >>> q = k = v = jnp.ones((1, 64, 4, 16))  # [batch, positions, heads, elements]
      >>> f = functools.partial(jflux.attention, axis_name="cp", causal=True, mesh=mesh)
      >>> jax.jit(f)(q, k, v).shape  # in zigzag order: see reorder_for_causal
      (1, 64, 4, 16)
    """
    options = AttentionOptions(
        axis_name, heads_axis, causal, layout, window, scale, softcap, return_lse, form, mesh,
        q_spec,
    )  # fmt: skip
    return _global_attention(options, Operands(q, k, v, segment_ids, sinks, bias, alibi_slopes))


@functools.wraps(attention, assigned=())
def reference(
    q: Any,
    k: Any,
    v: Any,
    *,
    segment_ids: Any = None,
    sinks: Any = None,
    bias: Any = None,
    alibi_slopes: Any = None,
    **options: Any,
) -> Any:
    """:func:`jflux.attention` in plain `lax`, on every platform: in blocks, with `lax`'s exchanges,
    and differentiated as it is written, less with `segment_ids`: then in blocks too."""
    return _global_attention(
        AttentionOptions(**options, is_reference=True),
        Operands(q, k, v, segment_ids, sinks, bias, alibi_slopes),
    )


def _global_attention(options: AttentionOptions, a: Operands) -> Any:
    """Checks the operands of a call, global arrays or one rank's, and computes it."""
    a = Operands(*jax.tree.map(jnp.asarray, tuple(a)))
    check(_OP, *a[:4], a.alibi_slopes, options.causal, options.window)
    if is_cross(a.q, a.k):  # without positions any layout will do
        options = dataclasses.replace(options, layout="contiguous")
    heads = a.q.shape[2]
    per_head(_OP, "sinks", a.sinks, heads)
    _alibi.check(_OP, a.alibi_slopes, heads, options.scale, options.softcap)
    check_layout(_OP, options.layout)
    _sequence_form.check_form(_OP, options.form)

    names = meshes.axes_of(options.axis_name, options.heads_axis)
    is_bound = len(names) > 0 and meshes.is_bound(names)
    check_bias(_OP, a.bias, a.q, a.k, meshes.axis_size(names) if is_bound else 1)
    if is_bound or not names:
        return attend_over_ranks(options, a)

    def body(**operands: Any) -> Any:
        return attend_over_ranks(options, Operands(**operands))

    spec = global_arrays._with_axis(global_arrays._spec(a.q, options.q_spec), 4, 1, names)
    rows, numbers = PartitionSpec(*spec[:3]), PartitionSpec(*spec[:2])
    of_heads, of_bias = PartitionSpec(*spec[2:3]), PartitionSpec()
    if a.bias is not None:
        split = (spec[0], (*spec, None, None)[2])  # of B and H
        of_bias = PartitionSpec(
            *(None if one == 1 else s for one, s in zip(a.bias.shape, split, strict=False))
        )
    specs = (spec, spec, spec, numbers, of_heads, of_bias, of_heads)
    return global_arrays.with_specs(
        body, "attention", a._asdict(), dict(zip(a._fields, specs, strict=True)),
        axis_name=names, mesh=options.mesh,
        out_specs=(spec, rows) if options.return_lse else spec,
    )  # fmt: skip
