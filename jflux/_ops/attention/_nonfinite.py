"""Masks that keep values that are not finite away from queries that do not attend to them.

A weight of zero does not keep a NaN out of a product, so zeros take the place of such rows. A
masked score is replaced, so it may be NaN. Scores therefore carry a NaN to the queries that attend
to it.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax


def in_keys(k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    """k and v [B, t, G, D] for a forward pass that masks scores: values are finite, and a key is
    NaN where it or its value is not. Element by element, so that XLA computes it with what makes k
    and v."""
    right = jnp.isfinite(k) & jnp.isfinite(v)
    return jnp.where(right, k, jnp.asarray(jnp.nan, k.dtype)), jnp.where(right, v, 0)


def in_log_sum_exps(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    o: jax.Array,
    lse: jax.Array,
    do: jax.Array,
    dlse: jax.Array,
) -> tuple[jax.Array, ...]:
    """The same arrays for a backward pass that masks its weights, exp(score - lse). All but lse are
    finite. For a query whose result or cotangent is not finite, lse is one of two values:

    - NaN, which reaches the query's gradient and those of the keys and values it attends to;
    - infinity, which reaches nothing, if all cotangents of the query are zero. Padding is such a
      case, where the caller leaves it out of the loss.
    """
    of_row = jnp.all(jnp.isfinite(o) & jnp.isfinite(do), -1)
    right = of_row & jnp.isfinite(lse) & jnp.isfinite(dlse)
    counts = jnp.any(do != 0, -1) | (dlse != 0)
    lse = jnp.where(right, lse, jnp.where(counts, jnp.nan, jnp.inf).astype(lse.dtype))
    q, k, v, o, do, dlse = (jnp.where(jnp.isfinite(a), a, 0) for a in (q, k, v, o, do, dlse))
    return q, k, v, o, lse, do, dlse


# ---- Around attention that is not jflux's --------------------------------------------------------


def kept_out(
    attend: Callable[..., jax.Array],
    reached: Callable[[jax.Array], jax.Array],
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
) -> jax.Array:
    """``attend(q, k, v)``, [B, s, H, D], without the rows that are not finite; NaN for the queries
    that attend to one, which then have no part in the gradients.

    Args:
      q, k, v: [B, s or t, heads, D].
      reached: bool [B, t], of keys -> [B, s, H or 1], the queries that attend to one of them.
    """
    of_q, of_k, of_v = (~jnp.all(jnp.isfinite(lax.stop_gradient(a)), (2, 3)) for a in (q, k, v))
    clean = (jnp.where(bad[..., None, None], 0, a) for a, bad in ((q, of_q), (k, of_k), (v, of_v)))
    spoilt = of_q[..., None] | reached(of_k | of_v)

    return jnp.where(spoilt[..., None], jnp.nan, attend(*clean))


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
        may = whole_mask(mask, queries, keys, is_causal, window)
        return jnp.any(may & bad[:, None, None], -1).swapaxes(1, 2)

    return reached


def whole_mask(
    mask: jax.Array,
    queries: int,
    keys: int,
    is_causal: bool,
    window: int | tuple[int, int] | None,
) -> jax.Array:
    """The mask, bool [B, heads, s, t], of which each may be 1, with what these options mask."""
    i, j = (lax.broadcasted_iota(jnp.int32, (queries, keys), d) for d in (0, 1))
    if is_causal:
        mask = mask & (j <= i)
    if window is not None:
        left, right = window if isinstance(window, tuple) else (window, window)
        mask = mask & (j >= i - left) & (j - right <= i)
    return mask
