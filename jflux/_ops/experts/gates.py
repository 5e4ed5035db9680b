"""Gates: which experts a token takes, and with which weights, as functions of the router's logits.

All compute in float32 (float64 for float64). Ties go to the lower index, so that every rank chooses
the same. Weights are differentiable; choices are not. Tokens that a mask leaves out, such as
padding, choose no expert: -1, with the weight 0. Their logits may be NaN, and have gradient zero.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..._call import value_checks
from .._epilogue import in_rows
from ._checks import check_logits


def top_k_softmax(
    logits: jax.Array,
    k: int,
    *,
    normalize: bool = True,
    scale: float = 1.0,
    mask: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The k largest logits, and their softmax: Mixtral (arXiv 2401.04088, section 2.1), and with
    ``normalize=False`` Switch Transformers (arXiv 2101.03961, equation 2).

    Args:
      logits: [T, E], floating.
      k: experts of a token, at most E.
      normalize: the weights of a token sum to 1: the softmax is over its k logits. False: over all
        E. (Qwen3-MoE calls it ``norm_topk_prob``.)
      scale: multiplies the weights.
      mask: bool [T]; False: the token chooses -1 with the weight 0. None: all are real.

    Returns:
      (indices i32 [T, k], best first; weights [T, k], float32 or float64).

    Raises:
      ValueError, TypeError: logits that are not floating [T, E], or a k or mask that does not fit.
    """
    logits, mask = _checked("top_k_softmax", logits, k, mask)
    _, indices = lax.top_k(logits, k)
    return of_real_tokens(indices, _weights("softmax", logits, indices, normalize, scale), mask)


def top_k_sigmoid(
    logits: jax.Array,
    k: int,
    *,
    bias: jax.Array | None = None,
    normalize: bool = True,
    scale: float = 1.0,
    mask: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The k experts with the largest ``sigmoid(logits) + bias``, weighted by the sigmoids without
    the bias: DeepSeek-V3 (arXiv 2412.19437, equations 13 to 16).

    Args:
      logits: [T, E], floating.
      k: experts of a token, at most E.
      bias: [E], for the choice alone: it has gradient zero, and balances experts without a loss.
      normalize: the weights of a token sum to `scale`.
      scale: multiplies the weights.
      mask: bool [T]; False: the token chooses -1 with the weight 0. None: all are real.

    Returns:
      (indices i32 [T, k], best first; weights [T, k], float32 or float64).

    Raises:
      ValueError, TypeError: operands that do not fit.
    """
    logits, mask = _checked("top_k_sigmoid", logits, k, mask)
    _, indices = lax.top_k(_biased("top_k_sigmoid", jax.nn.sigmoid(logits), bias), k)
    return of_real_tokens(indices, _weights("sigmoid", logits, indices, normalize, scale), mask)


def group_limited_top_k(
    logits: jax.Array,
    k: int,
    *,
    num_groups: int,
    top_groups: int,
    score: str = "sigmoid",
    bias: jax.Array | None = None,
    normalize: bool = True,
    scale: float = 1.0,
    mask: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The k best experts of the `top_groups` best groups, so that a token's experts are on few
    ranks. Groups are E / num_groups experts that follow each other.

    With ``score="softmax"`` it is DeepSeek-V2 (arXiv 2405.04434, section 2.2.2: device-limited
    routing): scores are the softmax over all experts, and a group is as good as its best expert.
    With "sigmoid" it is DeepSeek-V3 (arXiv 2412.19437, section 2.1.2: node-limited routing): a
    group is as good as the sum of its two best experts, with the bias.

    Args:
      logits: [T, E], floating.
      k: experts of a token, at most those of `top_groups` groups.
      num_groups: a divisor of E.
      top_groups: groups that a token may use, at most num_groups.
      score: "sigmoid" or "softmax".
      bias, normalize, scale, mask: as in :func:`top_k_sigmoid`.

    Returns:
      (indices i32 [T, k], best first; weights [T, k], float32 or float64).

    Raises:
      ValueError, TypeError: operands that do not fit.
    """
    op = "group_limited_top_k"
    logits, mask = _checked(op, logits, k, mask)
    tokens, experts = logits.shape
    if score not in ("sigmoid", "softmax"):
        raise ValueError(f"jflux.moe.{op}: {score=} must be 'sigmoid' or 'softmax'")
    if num_groups < 1 or experts % num_groups:
        raise ValueError(f"jflux.moe.{op}: {num_groups=} must divide the {experts} experts")
    size = experts // num_groups
    if not 1 <= top_groups <= num_groups or k > top_groups * size:
        raise ValueError(
            f"jflux.moe.{op}: {top_groups=} must be from 1 to {num_groups=}, and its groups of "
            f"{size} experts must have the {k=} of a token"
        )
    choice = _biased(op, _scores(score, logits), bias)
    grouped = choice.reshape(tokens, num_groups, size)
    best, _ = lax.top_k(grouped, min(2, size) if score == "sigmoid" else 1)
    _, groups = lax.top_k(jnp.sum(best, -1), top_groups)
    allowed = jnp.any(jax.nn.one_hot(groups, num_groups, dtype=bool), 1)
    grouped = jnp.where(allowed[:, :, None], grouped, -jnp.inf)
    _, indices = lax.top_k(grouped.reshape(tokens, experts), k)
    return of_real_tokens(indices, _weights(score, logits, indices, normalize, scale), mask)


def of_real_tokens(
    indices: jax.Array, weights: jax.Array, mask: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """(indices i32 [T, k], weights [T, k]) without those of tokens that the mask leaves out."""
    indices = value_checks.to_int32(indices)
    if mask is None:
        return indices, weights
    real = mask[:, None]
    return jnp.where(real, indices, -1), jnp.where(real, weights, jnp.zeros((), weights.dtype))


def _checked(op: str, logits: Any, k: int, mask: Any) -> tuple[jax.Array, jax.Array | None]:
    """(the logits in the type to compute in, zeros where the mask leaves a token out; the mask)."""
    wide, mask = check_logits(op, logits, mask)
    if not 1 <= k <= logits.shape[1]:
        raise ValueError(
            f"jflux.moe.{op}: {k=} must be from 1 to the {logits.shape[1]} experts of logits "
            f"{logits.shape}"
        )
    return wide if mask is None else jnp.where(mask[:, None], wide, 0), mask


def _biased(op: str, scores: jax.Array, bias: Any) -> jax.Array:
    """The scores by which experts are chosen: with the bias, and without a gradient."""
    if bias is None:
        return lax.stop_gradient(scores)
    if tuple(bias.shape) != scores.shape[1:]:
        raise ValueError(
            f"jflux.moe.{op}: bias has shape {tuple(bias.shape)}, and there are "
            f"{scores.shape[1]} experts"
        )
    return lax.stop_gradient(scores + in_rows(bias.astype(scores.dtype), scores))


def _scores(score: str, logits: jax.Array) -> jax.Array:
    return jax.nn.sigmoid(logits) if score == "sigmoid" else jax.nn.softmax(logits, -1)


def _weights(
    score: str, logits: jax.Array, indices: jax.Array, normalize: bool, scale: float
) -> jax.Array:
    if not normalize:
        return scale * jnp.take_along_axis(_scores(score, logits), indices, -1)
    # Scores over their sum are the softmax of their logarithms, whose exponentials may all be 0 in
    # float32. That of a softmax is the logit, less what all experts have in common.
    chosen = jnp.take_along_axis(logits, indices, -1)
    return scale * jax.nn.softmax(jax.nn.log_sigmoid(chosen) if score == "sigmoid" else chosen, -1)
