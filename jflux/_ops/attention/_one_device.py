"""Attention of one device: JAX's own, where it works, and on GPUs jflux's kernel beside it."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from ..._call import plans
from ..._ranks import meshes
from . import _cudnn, _nonfinite, flash_attention
from ._blockwise import Scores, default_precision
from ._checks import scale_of, window_of
from ._passes import KERNEL, of_split
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
    """``jax.nn.dot_product_attention`` with another choice of its form on GPUs: cuDNN if it takes
    the call, then jflux's kernel, then JAX's default, which keeps all scores."""
    by_cudnn = mask is None and _cudnn.takes_call(q, is_causal, local_window_size)
    if mask is None and not by_cudnn and meshes.platform() == "gpu" and _fit(q, k, v):
        if q.ndim == 3:  # a batch of one
            one = attend(
                q[None], k[None], v[None], is_causal=is_causal,
                local_window_size=local_window_size, scale=scale,
            )  # fmt: skip
            return one[0]
        scores = Scores(
            scale_of(_OP, scale, q.shape[3]), causal=is_causal,
            window=window_of(_OP, local_window_size),
        )  # fmt: skip
        if flash_attention.plan(q, k, v, scores).path == plans.Path.FUSED:
            precision = default_precision()
            params = Params(None, 1, scores, "contiguous", precision=precision)
            return of_split(params, KERNEL.gathered, q, k, v)[0]
    return dot_product_attention(
        q, k, v, mask=mask, is_causal=is_causal, local_window_size=local_window_size, scale=scale,
        implementation="cudnn" if by_cudnn else None,
    )  # fmt: skip


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
