"""JAX's own attention of one device, where it works."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def dot_product_attention(q: jax.Array, k: jax.Array, v: jax.Array, **options: Any) -> jax.Array:
    """`jax.nn.dot_product_attention`. On CPUs float16 is computed in float32: JAX 0.10 to 0.12 asks
    for a precision of its products that no CPU has, which fails once the call is compiled."""
    if q.dtype != jnp.float16 or jax.default_backend() != "cpu":
        return jax.nn.dot_product_attention(q, k, v, **options)
    wide = (a.astype(jnp.float32) for a in (q, k, v))
    return jax.nn.dot_product_attention(*wide, **options).astype(q.dtype)
