"""Attention of one device: JAX's own, where it works, and on GPUs jflux's kernel beside it.

Its forms are asked when a call is traced, as those of _forms.py are.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ... import _config
from ..._call import explain, plans
from ..._call.forms import TRACED, Call, Form, WhyNot, choose, decomposed
from ..._call.plans import Arrays, Machine, Path, Plan
from ..._ranks import meshes
from . import _alibi, _cudnn, _cudnn_by_chunks, _nonfinite, _passes, flash_attention
from ._blockwise import Scores, default_precision
from ._checks import of_width, scale_of, window_of
from ._split_sequence import Params

_OP = "attention of one device"

#: JAX's own, whatever stands in its place later.
_of_jax = jax.nn.dot_product_attention


def dot_product_attention(q: jax.Array, k: jax.Array, v: jax.Array, **options: Any) -> jax.Array:
    """`jax.nn.dot_product_attention`. On CPUs float16 is computed in float32: JAX 0.10 to 0.12 asks
    for a precision of its products that no CPU has, which fails once the call is compiled. A mask
    keeps out what is not finite (_nonfinite.py). `sinks` [H] are those of :func:`attend`."""
    mask, sinks = options.pop("mask", None), options.pop("sinks", None)
    if options.get("bias") is not None:  # JAX's derivatives vary as their operands do
        options["bias"] = meshes.vary(options["bias"], meshes.varying((q, k, v)))
    of_jax: Callable[..., jax.Array] = _in_types_of_cpus
    if sinks is not None:
        of_jax = functools.partial(_with_sinks, sinks)
    if mask is not None and q.ndim == mask.ndim == 4:
        reached = _nonfinite.reached_by_mask(
            mask,
            q.shape[1],
            k.shape[1],
            options.get("is_causal", False),
            options.get("local_window_size"),
        )
        attend = functools.partial(of_jax, mask=mask, **options)
        return _nonfinite.kept_out(attend, reached, q, k, v)
    return of_jax(q, k, v, mask=mask, **options)


def _with_sinks(
    sinks: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    mask: jax.Array | None = None,
    bias: jax.Array | None = None,
    is_causal: bool = False,
    local_window_size: int | tuple[int, int] | None = None,
    **options: Any,
) -> jax.Array:
    """JAX's attention to one key more, which is zero and has a value of zero. Its score is a bias,
    the sink."""
    shape = q.shape
    q, k, v = _with_batch((q, k, v))
    length, keys = q.shape[1], k.shape[1]
    if mask is not None or is_causal or local_window_size is not None:
        every = jnp.ones((1, 1, length, keys), bool)
        mask = every if mask is None else every & mask
        mask = _nonfinite.whole_mask(mask, length, keys, is_causal, local_window_size)
        mask = jnp.pad(mask, [(0, 0)] * 3 + [(0, 1)], constant_values=True)
    of_sinks = jnp.pad(sinks[:, None], [(0, 0), (keys, 0)])[None, :, None]  # [1, H, 1, t + 1]
    of_sinks = of_sinks.astype(jnp.promote_types(q.dtype, jnp.float32))
    bias = of_sinks if bias is None else of_sinks + jnp.pad(bias, [(0, 0)] * 3 + [(0, 1)])
    k, v = (jnp.pad(a, [(0, 0), (0, 1), (0, 0), (0, 0)]) for a in (k, v))
    return _in_types_of_cpus(q, k, v, mask=mask, bias=bias, **options).reshape(shape)


def _in_types_of_cpus(q: jax.Array, k: jax.Array, v: jax.Array, **options: Any) -> jax.Array:
    if q.dtype != jnp.float16 or meshes.platform() != "cpu":
        return _of_jax(q, k, v, **options)
    wide = (a.astype(jnp.float32) for a in (q, k, v))
    return _of_jax(*wide, **options).astype(q.dtype)


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    mask: jax.Array | None = None,
    is_causal: bool = False,
    local_window_size: int | tuple[int, int] | None = None,
    scale: float | None = None,
    sinks: jax.Array | None = None,
    bias: jax.Array | None = None,
    alibi_slopes: jax.Array | None = None,
) -> jax.Array:
    """``jax.nn.dot_product_attention`` with another choice of its form on GPUs, with a logit of
    each head of queries in the denominator, `sinks` [H] (_sinks.py), and with linear biases of
    `alibi_slopes` [H] (_alibi.py)."""
    width, options = v.shape[-1], _Options(is_causal, local_window_size, scale)
    if alibi_slopes is not None:
        scores, length = options.scores(q), q.shape[-3]
        at = jnp.arange(length, dtype=jnp.int32)
        q, k, v = _alibi.with_bias(scores, q, k, v, at, alibi_slopes, length, warns=True)
        options = dataclasses.replace(options, scale=scores.scale)
    arrays = (q, k, v, mask, sinks, bias)
    plan, form = choose(_FORMS, Call(arrays, options))
    assert form is not None
    if form is _FORMS[-1]:
        _warn_if_slow(arrays, options, plan)
    o = form.run(arrays, options, plan)
    if meshes.platform() == "gpu" and plan.path != Path.FUSED:  # a kernel tells it itself
        explain.note_once(_OP, (q, k, v), (o,), plan)
    return of_width(o, width)


@dataclasses.dataclass(frozen=True)
class _Options:
    """Options of ``jax.nn.dot_product_attention``."""

    is_causal: bool
    local_window_size: int | tuple[int, int] | None
    scale: float | None

    def scores(self, q: jax.Array) -> Scores:
        """Of queries with these options."""
        scale, window = scale_of(_OP, self.scale, q.shape[-1]), self.local_window_size
        return Scores(scale, causal=self.is_causal, window=window_of(_OP, window))


def _takes_cudnn(call: Call, machine: Machine) -> Plan | WhyNot | None:
    (q, k, _, mask, sinks, bias), options = call.arrays, call.params
    if mask is not None:
        return WhyNot("there is a mask")
    if sinks is not None:
        return None
    why = _cudnn.why_not_one_call(q, k, options.is_causal, options.local_window_size)
    if why is None and bias is not None:
        why = _cudnn.why_not_bias(q, bias)
    return WhyNot(why) if why else plans.decomposed("one call of cuDNN")


def _takes_cudnn_with_sinks(call: Call, machine: Machine) -> Plan | WhyNot | None:
    """cuDNN by calls that give the log-sum-exp, to which sinks are added."""
    *operands, mask, sinks, bias = call.arrays
    if sinks is None or mask is not None or bias is not None or not _fit(*operands):
        return None
    q, k, _ = _with_batch(operands)
    why = _cudnn_by_chunks.why_not(q, k, call.params.scores(q), "contiguous", 1, None)
    return WhyNot(why) if why else plans.decomposed("cuDNN's call, then the sinks")


def _takes_kernel(call: Call, machine: Machine) -> Plan | WhyNot | None:
    *operands, mask, _, bias = call.arrays
    if mask is not None or bias is not None:
        return None
    if meshes.platform() != "gpu" or not _fit(*operands):
        return None
    q, k, v = _with_batch(operands)
    plan = flash_attention.plan(q, k, v, call.params.scores(q))
    return plan if plan.path == Path.FUSED else WhyNot(plan.reason)


def _by_passes(
    arrays: Arrays, options: _Options, plan: Plan, *, passes: _passes.Passes
) -> jax.Array:
    *operands, _, sinks, _ = arrays
    q, k, v = _with_batch(operands)
    params = Params(None, 1, options.scores(q), "contiguous", precision=default_precision())
    o, _ = _passes.attend(params, passes, q, k, v, sinks=sinks)
    return o.reshape(arrays[0].shape)


def _by_jax(
    arrays: Arrays, options: _Options, plan: Plan, *, implementation: str | None = None
) -> jax.Array:
    *operands, mask, sinks, bias = arrays
    if bias is not None and implementation == "cudnn":  # see _cudnn.why_not_bias
        bias = jnp.broadcast_to(bias, (1, operands[0].shape[-2], *bias.shape[2:]))
    return dot_product_attention(
        *operands, mask=mask, sinks=sinks, bias=bias, **vars(options), implementation=implementation
    )


def _warn_if_slow(arrays: Arrays, options: _Options, plan: Plan) -> None:
    """Warns where cuDNN or a kernel would take a call without its sinks and its bias."""
    *others, sinks, bias = arrays
    if meshes.platform() != "gpu" or (sinks is None and bias is None):
        return
    without = Call((*others, None, None), options)
    if any(isinstance(takes(without, TRACED), Plan) for takes in (_takes_cudnn, _takes_kernel)):
        what = "sinks" if bias is None else "such bias"
        _config.fall_back("attention", f"one call of cuDNN takes no {what}; {plan.reason}")


_FORMS: tuple[Form[Callable[..., jax.Array]], ...] = (
    Form(_takes_cudnn, functools.partial(_by_jax, implementation="cudnn")),
    Form(_takes_cudnn_with_sinks, functools.partial(_by_passes, passes=_passes.CUDNN.gathered)),
    Form(_takes_kernel, functools.partial(_by_passes, passes=_passes.KERNEL.gathered)),
    decomposed(_by_jax, "JAX's attention, which keeps all scores"),
)


def _with_batch(operands: Sequence[jax.Array]) -> list[jax.Array]:
    """q, k and v [B, S, heads, D]."""
    return [a if a.ndim == 4 else a[None] for a in operands]


def _fit(q: jax.Array, k: jax.Array, v: jax.Array) -> bool:
    """Whether these operands fit each other, as the kernel needs them. JAX takes the others, and
    refuses what does not fit."""
    if q.ndim not in (3, 4) or k.ndim != q.ndim or k.shape != v.shape:
        return False
    (*lead, heads, width), (*lead_of_keys, kv_heads, width_of_keys) = q.shape, k.shape
    return (
        q.dtype == k.dtype == v.dtype
        and (lead, width) == (lead_of_keys, width_of_keys)
        and kv_heads > 0
        and heads % kv_heads == 0
    )
