"""Attention sinks: a logit of each head of queries that is in the softmax's denominator alone
(gpt-oss: arXiv 2508.10925; after StreamingLLM, arXiv 2309.17453).

A sink is one more key, with this score and a value of zero. From o and l of a head without it::

    l' = log(exp(l) + exp(sink))    o' = exp(l - l') o

So no kernel knows of sinks. A backward pass that is given o' and l' in place of o and l computes
the gradients of attention with sinks: its weights are exp(score - l'), and its delta,
rowsum(do' o'), has no term of the sink. The sink's own gradient is :func:`gradient`.

l' counts the sink, so parts of the keys are merged before their sink is added.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def added(o: jax.Array, lse: jax.Array, sinks: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """(o, log-sum-exp) with sinks, of o [..., H, D] and log-sum-exp [..., H] without them. Of a
    query without keys o is 0 and the log-sum-exp is the sink."""
    if sinks is None:
        return o, lse
    sinks = sinks.astype(lse.dtype)
    highest = lax.stop_gradient(jnp.maximum(lse, sinks))
    base = jnp.where(jnp.isfinite(highest), highest, 0)
    own = jnp.exp(lse - base)
    total = own + jnp.exp(sinks - base)
    any_counts = total != 0  # NaN counts
    safe = jnp.where(any_counts, total, 1)
    weighted = (own / safe)[..., None] * o.astype(lse.dtype)
    return weighted.astype(o.dtype), jnp.where(any_counts, jnp.log(safe) + base, -jnp.inf)


def gradient(sinks: jax.Array, lse: jax.Array, delta: jax.Array) -> jax.Array:
    """The gradient of sinks [H], where the log-sum-exp and :func:`._blockwise.delta_of`, [..., H],
    are those with sinks."""
    weights = jnp.where(lse == -jnp.inf, 0, jnp.exp(sinks.astype(lse.dtype) - lse))
    return -jnp.sum(weights * delta, range(lse.ndim - 1)).astype(sinks.dtype)
