"""Checks of operands that the ops of expert parallelism share, when a call is traced."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._call import local_ops, value_checks
from ..._ranks import meshes
from ..._ranks.meshes import AxisName


def check_tokens(
    op: str, x: Any, indices: Any, num_experts: int, world: int, *, scaled: bool = False
) -> tuple[jax.Array, jax.Array]:
    """A rank's tokens [T, H], or the values of scaled ones, and their choices i32 [T, k]."""
    x, indices = jnp.asarray(x), jnp.asarray(indices)
    if x.ndim != 2 or not (scaled or jnp.issubdtype(x.dtype, jnp.floating)):
        raise ValueError(
            f"{op}: x must be floating [T, H], got {x.dtype} {x.shape}; x.reshape(-1, H) puts "
            "batches and sequences into one dimension of tokens"
        )
    if not jnp.issubdtype(indices.dtype, jnp.integer):
        raise TypeError(
            f"{op}: topk_indices must be integers, got {indices.dtype}; jax.lax.top_k returns "
            "(values, indices), jflux.moe's gates (indices, weights)"
        )
    if indices.ndim != 2 or indices.shape[0] != x.shape[0]:
        raise ValueError(
            f"{op}: topk_indices must have shape [T, k] with the T={x.shape[0]} rows of x, got "
            f"{indices.shape}"
        )
    if not isinstance(num_experts, int | np.integer):
        raise TypeError(f"{op}: num_experts must be an int, got {num_experts!r}")
    if num_experts < 1 or num_experts % world:
        raise ValueError(
            f"{op}: {num_experts=} must be a positive multiple of the {world} ranks; it "
            "counts the experts of all of them"
        )
    if not 1 <= indices.shape[1] <= num_experts:
        raise ValueError(
            f"{op}: topk_indices {indices.shape} has {indices.shape[1]} experts for each token, "
            f"which must be from 1 to {num_experts=}"
        )
    return x, value_checks.to_int32(indices)


def check_weights(op: str, weights: Any, shape: tuple[int, ...]) -> jax.Array:
    """Weights of the choices, in a combine."""
    weights = jnp.asarray(weights)
    if weights.shape != shape or not jnp.issubdtype(weights.dtype, jnp.floating):
        raise ValueError(
            f"{op}: weights must be floating {shape}, as topk_indices, got {weights.dtype} "
            f"{weights.shape}"
        )
    return weights


def check_logits(op: str, logits: Any, mask: Any) -> jax.Array | None:
    """The mask of tokens, None if there is none. Raises if it does not fit a router's logits
    [T, E], or these are not floating, in an op of `jflux.moe`."""
    local_ops.check_arrays(f"moe.{op}", logits=logits)
    if logits.ndim != 2:
        raise ValueError(f"jflux.moe.{op}: logits must have shape [T, E], got {logits.shape}")
    if not jnp.issubdtype(logits.dtype, jnp.floating):
        raise TypeError(f"jflux.moe.{op}: logits must be floating, got {logits.dtype}")
    if mask is None:
        return None
    local_ops.check_arrays(f"moe.{op}", mask=mask)
    return check_mask(f"jflux.moe.{op}", mask, logits.shape[:1])


def check_mask(op: str, mask: Any, shape: tuple[int, ...]) -> jax.Array:
    """A mask of tokens, of which there are this shape; True is a real token."""
    mask = jnp.asarray(mask)
    if mask.dtype != bool:
        raise TypeError(f"{op}: mask must be bool, True for real tokens, got {mask.dtype}")
    if mask.shape != shape:
        raise ValueError(
            f"{op}: mask must have shape {shape}, one entry for each token, got {mask.shape}"
        )
    return mask


def check_axes(op: str, axis_name: AxisName, of_dispatch: tuple[Any, ...]) -> None:
    """Refuses a combine over other axes than its dispatch, or over these in another order. It could
    be a valid exchange, but it would move the wrong rows."""
    if meshes.as_tuple(axis_name) != of_dispatch:
        raise ValueError(
            f"{op}: {axis_name=}, and the dispatch was over {of_dispatch}: it must be the same, in "
            "the same order"
        )
