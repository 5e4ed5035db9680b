"""Attention over all keys from attention over parts of them."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from . import _sinks
from ._checks import per_head


def merge_attention(
    outputs: Sequence[jax.Array] | jax.Array,
    log_sum_exps: Sequence[jax.Array] | jax.Array,
    *,
    sinks: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attention over all keys, from attention over disjoint parts of them.

    With o_p the softmax-weighted sum of part p's values, and l_p the logarithm of the sum of the
    exponentials of its scores (arXiv 2205.14135, section 3.1; arXiv 2311.01282, section 3)::

        l = log(sum_p exp(l_p))        o = sum_p exp(l_p - l) o_p

    in float32 (float64 for float64). A part without keys has l_p = -inf, and does not count,
    whatever its output is; if no part has any, o is 0 and l is -inf. Differentiable in both modes,
    in the log-sum-exps and `sinks` too.

    Args:
      outputs: P arrays [..., H, D], or one [P, ..., H, D].
      log_sum_exps: P arrays [..., H], or one [P, ..., H].
      sinks: [H], floating: a logit of each head in the denominator of its softmax, as in
        :func:`jflux.attention`, which no part has counted. The sum in l has one term more,
        exp(sinks_h), for which o has none.

    Returns:
      (o [..., H, D] of the outputs' type, l [..., H] in float32 or float64).

    Raises:
      ValueError, TypeError: operands that do not fit.

    Examples:
      >>> q, k1, v1, k2, v2 = jax.random.normal(jax.random.key(0), (5, 1, 8, 2, 4))
      >>> parts = [jflux.attention(q, k, v, return_lse=True) for k, v in ((k1, v1), (k2, v2))]
      >>> o, lse = jflux.merge_attention(*zip(*parts))
      >>> whole = jnp.concatenate([k1, k2], 1), jnp.concatenate([v1, v2], 1)
      >>> bool(jnp.allclose(o, jax.nn.dot_product_attention(q, *whole), atol=1e-5))
      True
    """
    out, lse = _stacked("outputs", outputs), _stacked("log_sum_exps", log_sum_exps)
    if out.shape[:-1] != lse.shape:
        raise ValueError(
            f"jflux.merge_attention: outputs [P, ..., H, D] have shape {out.shape}, so "
            f"log_sum_exps must have shape {out.shape[:-1]}, got {lse.shape}"
        )
    heads = lse.shape[-1] if lse.ndim > 1 else 0
    sinks = per_head("jflux.merge_attention", "sinks", sinks, heads)
    wide = jnp.promote_types(jnp.promote_types(out.dtype, lse.dtype), jnp.float32)
    lse = lse.astype(wide)
    counts = lse != -jnp.inf  # NaN counts
    # A part without keys must not reach a derivative: inf - inf and 0 times NaN would be NaN there.
    highest = lax.stop_gradient(jnp.max(lse, 0))
    base = jnp.where(jnp.isfinite(highest), highest, 0)
    weights = jnp.where(counts, jnp.exp(jnp.where(counts, lse - base[None], 0)), 0)
    total = jnp.sum(weights, 0)
    any_counts = total != 0
    safe = jnp.where(any_counts, total, 1)
    terms = jnp.where(counts[..., None], weights[..., None] * out.astype(wide), 0)
    merged = jnp.sum(terms, 0) / safe[..., None]
    lse = jnp.where(any_counts, jnp.log(safe) + base, -jnp.inf)
    merged, lse = _sinks.added(merged, lse, sinks)
    return merged.astype(out.dtype), lse


def _stacked(name: str, parts: Sequence[jax.Array] | jax.Array) -> jax.Array:
    """[P, ...]."""
    one = isinstance(parts, jax.Array | np.ndarray)
    shapes = [np.shape(part) for part in parts] if not one else [np.shape(parts)[1:]]
    if len(set(shapes)) != 1 or (one and not np.shape(parts)[:1] > (0,)):
        raise ValueError(
            f"jflux.merge_attention: {name} must be those of one part or more, all of one shape; "
            f"got {np.shape(parts) if one else shapes}"
        )
    return jnp.asarray(parts) if one else jnp.stack([jnp.asarray(part) for part in parts])
