"""Losses that keep a router well behaved, as functions of its logits."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .. import _mesh
from .._epilogue import sum_dtype
from .._mesh import AxisName
from .._ops import _local
from ._routing import count


@_mesh.axis_by_name
def load_balancing_loss(
    logits: jax.Array, topk_indices: jax.Array, *, axis_name: AxisName | None = None
) -> jax.Array:
    """``E sum_i f_i P_i``: Switch Transformers (arXiv 2101.03961, equations 4 to 6, without the
    factor alpha).

    f_i is the number of slots that chose expert i over the number of tokens, and P_i the mean over
    tokens of the softmax of the logits. Balanced experts give k, which is 1 in the paper, whose k
    is 1; this is Mixtral's in Hugging Face's transformers. Gradients go through P alone.

    Args:
      logits: [T, E], floating.
      topk_indices: [T, k] integers; -1 counts for no expert.
      axis_name: inside `jax.shard_map`, mesh axes over whose ranks tokens are split: f and P are
        then those of all tokens. The loss is the same on all of these ranks.

    Returns:
      [], float32 or float64.

    Raises:
      ValueError, TypeError: operands that do not fit.
    """
    wide = _checked("load_balancing_loss", logits)
    if topk_indices.ndim != 2 or topk_indices.shape[0] != logits.shape[0]:
        raise ValueError(
            f"jflux.moe.load_balancing_loss: topk_indices {topk_indices.shape} must be [T, k] of "
            f"the {logits.shape[0]} tokens of logits {logits.shape}"
        )
    tokens, experts = wide.shape
    fraction = count(topk_indices, experts).astype(wide.dtype) / max(tokens, 1)
    probability = jnp.sum(jax.nn.softmax(wide, -1), 0) / max(tokens, 1)
    if axis_name is not None:
        fraction, probability = lax.pmean((fraction, probability), _mesh.as_tuple(axis_name))
    return experts * jnp.sum(lax.stop_gradient(fraction) * probability)


@_mesh.axis_by_name
def z_loss(logits: jax.Array, *, axis_name: AxisName | None = None) -> jax.Array:
    """The mean over tokens of ``logsumexp(logits)^2``: ST-MoE (arXiv 2202.08906, equation 5).

    Args:
      logits: [T, E], floating.
      axis_name: as in :func:`load_balancing_loss`.

    Returns:
      [], float32 or float64.

    Raises:
      ValueError, TypeError: logits that are not floating [T, E].
    """
    wide = _checked("z_loss", logits)
    z = jax.nn.logsumexp(wide, -1)
    loss = jnp.sum(z * z) / max(wide.shape[0], 1)
    return loss if axis_name is None else lax.pmean(loss, _mesh.as_tuple(axis_name))


def _checked(op: str, logits: Any) -> jax.Array:
    _local.check_arrays(f"moe.{op}", logits=logits)
    if logits.ndim != 2:
        raise ValueError(f"jflux.moe.{op}: logits must have shape [T, E], got {logits.shape}")
    if not jnp.issubdtype(logits.dtype, jnp.floating):
        raise TypeError(f"jflux.moe.{op}: logits must be floating, got {logits.dtype}")
    return logits.astype(sum_dtype(logits.dtype))
