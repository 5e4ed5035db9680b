"""JAX's own attention of one device, where it works."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from .. import _mesh
from . import cudnn


def dot_product_attention(q: jax.Array, k: jax.Array, v: jax.Array, **options: Any) -> jax.Array:
    """`jax.nn.dot_product_attention`. On CPUs float16 is computed in float32: JAX 0.10 to 0.12 asks
    for a precision of its products that no CPU has, which fails once the call is compiled."""
    if q.dtype != jnp.float16 or _mesh.platform() != "cpu":
        return jax.nn.dot_product_attention(q, k, v, **options)
    wide = (a.astype(jnp.float32) for a in (q, k, v))
    return jax.nn.dot_product_attention(*wide, **options).astype(q.dtype)


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    mask: jax.Array | None = None,
    is_causal: bool = False,
    local_window_size: int | tuple[int, int] | None = None,
    **options: Any,
) -> jax.Array:
    """The same by cuDNN on GPUs, where that takes the call: JAX does not choose it by itself, and
    the other form keeps all scores."""
    fits = mask is None and cudnn.takes_call(q, is_causal, local_window_size)
    return dot_product_attention(
        q, k, v, mask=mask, is_causal=is_causal, local_window_size=local_window_size,
        implementation="cudnn" if fits else None, **options,
    )  # fmt: skip
