"""Gates: which experts a token takes, and with which weights, as functions of the router's logits.

All compute in float32 (float64 for float64), on GPUs in one kernel, and one for the gradient. Ties
go to the lower index, so that every rank chooses the same. Weights are differentiable; choices are
not. Tokens that a mask leaves out, such as padding, choose no expert: -1, with the weight 0. Their
logits may be NaN, and have gradient zero.
"""

from __future__ import annotations

from typing import Any

import jax

from . import moe_gate
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
    mask = _check("top_k_softmax", logits, k, mask)
    return moe_gate.choose(logits, k, "softmax", normalize=normalize, scale=scale, mask=mask)


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
    mask = _check("top_k_sigmoid", logits, k, mask)
    _check_bias("top_k_sigmoid", bias, logits)
    return moe_gate.choose(
        logits, k, "sigmoid", bias=bias, normalize=normalize, scale=scale, mask=mask
    )


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
    mask = _check(op, logits, k, mask)
    experts = logits.shape[1]
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
    _check_bias(op, bias, logits)
    return moe_gate.choose(
        logits, k, score, bias=bias, normalize=normalize, scale=scale, mask=mask,
        groups=(int(num_groups), int(top_groups)),
    )  # fmt: skip


def _check(op: str, logits: Any, k: int, mask: Any) -> jax.Array | None:
    """The mask."""
    mask = check_logits(op, logits, mask)
    if not 1 <= k <= logits.shape[1]:
        raise ValueError(
            f"jflux.moe.{op}: {k=} must be from 1 to the {logits.shape[1]} experts of logits "
            f"{logits.shape}"
        )
    return mask


def _check_bias(op: str, bias: Any, logits: jax.Array) -> None:
    if bias is not None and tuple(bias.shape) != logits.shape[1:]:
        raise ValueError(
            f"jflux.moe.{op}: bias has shape {tuple(bias.shape)}, and there are "
            f"{logits.shape[1]} experts"
        )
