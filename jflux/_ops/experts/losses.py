"""Losses that keep a router well behaved, as functions of its logits."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..._call import derivatives, local_ops
from ..._ranks import meshes
from ..._ranks.meshes import AxisName
from .. import _lax
from .._epilogue import sum_dtype
from .routing import count


@functools.partial(meshes.axis_by_name, package="jflux.moe")
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
        then those of all tokens. The loss is the same on all of these ranks. Along some of the axes
        tokens may be the same.

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
    fraction, probability = _mean_over((fraction, probability), axis_name)
    return experts * jnp.sum(lax.stop_gradient(fraction) * probability)


@functools.partial(meshes.axis_by_name, package="jflux.moe")
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
    return _mean_over(jnp.sum(z * z) / max(wide.shape[0], 1), axis_name)


def _mean_over(parts: Any, axis_name: AxisName | None) -> Any:
    """The mean over ranks: along an axis that all of `parts` are the same on they are that
    already."""
    names = meshes.split_over(axis_name, *jax.tree.leaves(parts))
    if not names:
        return parts
    size = meshes.axis_size(names)
    return jax.tree.map(lambda a: _sum_over(names, a) / size, parts)


def _sum_over(names: tuple[Any, ...], part: jax.Array) -> jax.Array:
    (total,) = (_sum if meshes.is_manual(names) else _psum)(names, part)
    return total


def _psum(names: tuple[Any, ...], part: jax.Array) -> Sequence[jax.Array]:
    return [_lax.psum(part, names)]


def _sum_backward(
    kept: Any, cts: Sequence[Any], wanted: Sequence[Any], names: tuple[Any, ...]
) -> Sequence[jax.Array]:
    return [cts[0] if meshes.tracks_vma(names) else _lax.psum(cts[0], names)]


#: `lax.psum`, whose tangents are one equation. JAX's own holds on to what the trace of a
#: `shard_map` has kept for the gradient, which `jax.checking_leaks` takes for leaked.
_sum: Callable[..., Sequence[Any]] = derivatives.differentiated(
    _psum,
    kept=lambda operands, names: (),
    tangents=lambda kept, tangents, names: _sum(names, tangents[0]),
    backward=_sum_backward,
)


def _checked(op: str, logits: Any) -> jax.Array:
    local_ops.check_arrays(f"moe.{op}", logits=logits)
    if logits.ndim != 2:
        raise ValueError(f"jflux.moe.{op}: logits must have shape [T, E], got {logits.shape}")
    if not jnp.issubdtype(logits.dtype, jnp.floating):
        raise TypeError(f"jflux.moe.{op}: logits must be floating, got {logits.dtype}")
    return logits.astype(sum_dtype(logits.dtype))
