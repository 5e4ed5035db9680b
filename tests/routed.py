"""Random operands and routings of the scripts that check experts' products on GPUs."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

#: Columns and CTAs of a cluster of the tiles that are compiled; None: the chosen one.
TILES = (None, (256, 2), (256, 1), (192, 1), (128, 1))
KINDS = ("balanced", "dropped", "one expert", "first tokens", "skewed")


def draw_chosen(rng: np.random.Generator, tokens: int, choices: int, experts: int) -> np.ndarray:
    """The experts of each token; -1: none."""
    kind = KINDS[rng.integers(len(KINDS))]
    chosen = rng.integers(0, experts, (tokens, choices)).astype(np.int32)
    if kind == "dropped":
        chosen[rng.random(chosen.shape) < 0.3] = -1
        chosen[rng.random(tokens) < 0.2] = -1
    elif kind == "one expert":
        chosen[:] = rng.integers(experts)
    elif kind == "first tokens":
        first = int(rng.integers(tokens))
        chosen[first:] = -1
    elif kind == "skewed":
        chosen = np.minimum(rng.geometric(0.5, chosen.shape) - 1, experts - 1).astype(np.int32)
    return chosen


def exact(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any, scale: float = 1.0) -> Any:
    """Normal numbers of the type, in float64."""
    drawn = jnp.asarray(rng.normal(size=shape) * scale, dtype)
    return np.asarray(drawn.astype(jnp.float32), np.float64)
