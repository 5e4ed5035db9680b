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

from ..._call import explain, plans
from ..._call.forms import Call, Form, WhyNot, choose, decomposed
from ..._call.plans import Arrays, Machine, Path, Plan
from ..._ranks import meshes
from . import _cudnn, _nonfinite, _passes, flash_attention
from ._blockwise import Scores, default_precision
from ._checks import scale_of, window_of
from ._split_sequence import Params

_OP = "attention of one device"

#: JAX's own, whatever stands in its place later.
_of_jax = jax.nn.dot_product_attention


def dot_product_attention(q: jax.Array, k: jax.Array, v: jax.Array, **options: Any) -> jax.Array:
    """`jax.nn.dot_product_attention`. On CPUs float16 is computed in float32: JAX 0.10 to 0.12 asks
    for a precision of its products that no CPU has, which fails once the call is compiled. A mask
    keeps out what is not finite (_nonfinite.py)."""
    mask = options.pop("mask", None)
    if mask is not None and q.ndim == mask.ndim == 4:
        reached = _nonfinite.reached_by_mask(
            mask,
            q.shape[1],
            k.shape[1],
            options.get("is_causal", False),
            options.get("local_window_size"),
        )
        attend = functools.partial(_in_types_of_cpus, mask=mask, **options)
        return _nonfinite.kept_out(attend, reached, q, k, v)
    return _in_types_of_cpus(q, k, v, mask=mask, **options)


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
) -> jax.Array:
    """``jax.nn.dot_product_attention`` with another choice of its form on GPUs."""
    arrays, options = (q, k, v, mask), _Options(is_causal, local_window_size, scale)
    plan, form = choose(_FORMS, Call(arrays, options))
    assert form is not None
    o = form.run(arrays, options, plan)
    if meshes.platform() == "gpu" and plan.path != Path.FUSED:  # a kernel tells it itself
        explain.note_once(_OP, (q, k, v), (o,), plan)
    return o


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


def _takes_cudnn(call: Call, machine: Machine) -> Plan | WhyNot:
    (q, *_, mask), options = call.arrays, call.params
    if mask is not None:
        return WhyNot("there is a mask")
    why = _cudnn.why_not_one_call(q, options.is_causal, options.local_window_size)
    return WhyNot(why) if why else plans.decomposed("one call of cuDNN")


def _takes_kernel(call: Call, machine: Machine) -> Plan | WhyNot | None:
    *operands, mask = call.arrays
    if mask is not None or meshes.platform() != "gpu" or not _fit(*operands):
        return None
    q, k, v = _with_batch(operands)
    plan = flash_attention.plan(q, k, v, call.params.scores(q))
    return plan if plan.path == Path.FUSED else WhyNot(plan.reason)


def _in_kernel(arrays: Arrays, options: _Options, plan: Plan) -> jax.Array:
    q, k, v = _with_batch(arrays[:3])
    params = Params(None, 1, options.scores(q), "contiguous", precision=default_precision())
    o, _ = _passes.attend(params, _passes.KERNEL.gathered, q, k, v)
    return o.reshape(arrays[0].shape)


def _by_jax(
    arrays: Arrays, options: _Options, plan: Plan, *, implementation: str | None = None
) -> jax.Array:
    *operands, mask = arrays
    return dot_product_attention(
        *operands, mask=mask, **vars(options), implementation=implementation
    )


_FORMS: tuple[Form[Callable[..., jax.Array]], ...] = (
    Form(_takes_cudnn, functools.partial(_by_jax, implementation="cudnn")),
    Form(_takes_kernel, _in_kernel),
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
