"""Attention whose masks keep out what is not finite. A weight of zero does not keep a NaN out of a
product, so rows with one are zeros while attending, forward and backward, and the queries that
attend to such a row get NaN afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def kept_out(
    attend: Callable[..., Any],
    reached: Callable[[jax.Array], jax.Array],
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
) -> Any:
    """``attend(q, k, v)``, a result [B, s, H, ...] or several.

    Args:
      q, k, v: [B, s or t, heads, D].
      reached: bool [B, t], of keys -> [B, s], the queries that attend to one of them.
    """
    of_q, of_k, of_v = (~jnp.all(jnp.isfinite(lax.stop_gradient(a)), (2, 3)) for a in (q, k, v))
    clean = (jnp.where(bad[..., None, None], 0, a) for a, bad in ((q, of_q), (k, of_k), (v, of_v)))
    spoilt = of_q | reached(of_k | of_v)

    def spoil(a: jax.Array) -> jax.Array:
        return jnp.where(spoilt.reshape(*spoilt.shape, *(1,) * (a.ndim - 2)), jnp.nan, a)

    return jax.tree.map(spoil, attend(*clean))


def reached_by_mask(
    mask: jax.Array,
    queries: int,
    keys: int,
    is_causal: bool,
    window: int | tuple[int, int] | None,
) -> Callable[[jax.Array], jax.Array]:
    """`reached` of ``jax.nn.dot_product_attention``'s mask, bool [B, heads, s, t], of which each
    may be 1."""

    def reached(bad: jax.Array) -> jax.Array:
        i, j = (lax.broadcasted_iota(jnp.int32, (queries, keys), d) for d in (0, 1))
        may = jnp.any(mask, 1)
        if is_causal:
            may &= j <= i
        if window is not None:
            left, right = window if isinstance(window, tuple) else (window, window)
            may &= (j >= i - left) & (j - right <= i)
        return jnp.any(may & bad[:, None], -1)

    return reached
