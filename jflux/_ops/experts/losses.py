"""Losses that keep a router well behaved, as functions of its logits."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..._call import derivatives, value_checks
from ..._ranks import meshes
from ..._ranks.meshes import AxisName
from .. import _lax
from .._epilogue import sum_dtype
from ._checks import check_logits
from .routing import count


@functools.partial(meshes.axis_by_name, package="jflux.moe")
def load_balancing_loss(
    logits: jax.Array,
    topk_indices: jax.Array,
    *,
    mask: jax.Array | None = None,
    axis_name: AxisName | None = None,
) -> jax.Array:
    """``E sum_i f_i P_i``: Switch Transformers (arXiv 2101.03961, equations 4 to 6, without the
    factor alpha).

    f_i is the number of slots that chose expert i over the number of tokens, and P_i the mean over
    tokens of the softmax of the logits. Balanced experts give k, which is 1 in the paper, whose k
    is 1; this is Mixtral's in Hugging Face's transformers. Gradients go through P alone.

    Tokens are those that the mask takes and that have an expert. One with both experts and -1
    counts once. Others, such as padding, are in neither the number nor the mean: their logits may
    be NaN, and have gradient zero. Of no tokens the loss is 0.

    Args:
      logits: [T, E], floating.
      topk_indices: [T, k] integers; -1 counts for no expert.
      mask: bool [T]; False: not a token, such as padding. None: all are.
      axis_name: inside `jax.shard_map`, mesh axes over whose ranks tokens are split: f and P are
        then those of all tokens, of which ranks may have unequal numbers. The loss is the same on
        all of these ranks. Along some of the axes tokens may be the same.

    Returns:
      [], float32 or float64.

    Raises:
      ValueError, TypeError: operands that do not fit.
    """
    op = "load_balancing_loss"
    mask = check_logits(op, logits, mask)
    if topk_indices.ndim != 2 or topk_indices.shape[0] != logits.shape[0]:
        raise ValueError(
            f"jflux.moe.{op}: topk_indices {topk_indices.shape} must be [T, k] of "
            f"the {logits.shape[0]} tokens of logits {logits.shape}"
        )
    wide = _wide(logits)
    experts, indices = wide.shape[1], value_checks.to_int32(topk_indices)
    if mask is not None:
        indices = jnp.where(mask[:, None], indices, -1)
    real = has_expert(indices, experts)
    chosen = count(indices, experts).astype(wide.dtype)
    probability = _of_real(lambda one: jax.nn.softmax(one, -1), wide, real)
    chosen, probability, tokens = _over_ranks(axis_name, chosen, probability, _number(real, wide))
    return experts * jnp.sum(lax.stop_gradient(chosen / tokens) * (probability / tokens))


@functools.partial(meshes.axis_by_name, package="jflux.moe")
def z_loss(
    logits: jax.Array, *, mask: jax.Array | None = None, axis_name: AxisName | None = None
) -> jax.Array:
    """The mean over tokens of ``logsumexp(logits)^2``: ST-MoE (arXiv 2202.08906, equation 5).

    Args:
      logits: [T, E], floating.
      mask, axis_name: as in :func:`load_balancing_loss`.

    Returns:
      [], float32 or float64; 0 of no token.

    Raises:
      ValueError, TypeError: logits that are not floating [T, E], or a mask that is not bool [T].
    """
    mask = check_logits("z_loss", logits, mask)
    wide, real = _wide(logits), jnp.ones(logits.shape[:1], bool) if mask is None else mask
    squares = _of_real(lambda one: jnp.square(jax.nn.logsumexp(one, -1)), wide, real)
    squares, tokens = _over_ranks(axis_name, squares, _number(real, wide))
    return squares / tokens


def has_expert(topk_indices: jax.Array, num_experts: int) -> jax.Array:
    """bool [T]: which tokens have an expert. Losses leave out the others."""
    return jnp.any((topk_indices >= 0) & (topk_indices < num_experts), 1)


def _of_real(
    term: Callable[[jax.Array], jax.Array], logits: jax.Array, real: jax.Array
) -> jax.Array:
    """The sum over real tokens of what `term` makes of logits [T, E]. Those of other tokens may be
    NaN, and have gradient zero."""
    terms = term(jnp.where(real[:, None], logits, 0))
    return jnp.sum(jnp.where(real.reshape(-1, *[1] * (terms.ndim - 1)), terms, 0), 0)


def _number(real: jax.Array, like: jax.Array) -> jax.Array:
    return jnp.sum(real, dtype=like.dtype)


def _over_ranks(axis_name: AxisName | None, *parts: jax.Array) -> list[jax.Array]:
    """Sums over ranks, of which the last is a number of tokens, here at least 1. Along an axis that
    all parts are the same on, they are of the same tokens."""
    names = meshes.split_over(axis_name, *parts)
    *sums, tokens = (_sum_over(names, part) for part in parts) if names else parts
    return [*sums, jnp.maximum(tokens, 1)]


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


def _wide(logits: jax.Array) -> jax.Array:
    """In the type to compute in."""
    return logits.astype(sum_dtype(logits.dtype))
