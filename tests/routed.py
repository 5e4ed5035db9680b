"""Random operands and routings of the scripts that check experts' products on GPUs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jflux import _native
from jflux._ops._epilogue import ACTIVATIONS

#: Columns and CTAs of a cluster of the tiles that are compiled; None: the chosen one.
TILES = (None, *_native.GROUPED_TILES[0])
KINDS = ("balanced", "dropped", "one expert", "first tokens", "skewed")


def draw_many(rng: np.random.Generator, world: int) -> tuple[int, int, int]:
    """(experts, choices, tokens of a rank) of a kernel with more spans than FEW_SPANS, and tiles in
    the order of ranks: 512 rows of an expert from each."""
    experts = int(rng.integers(_native.FEW_SPANS // world + 1, 1100 // world))
    return experts, 8, 64 * experts


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


def rows_of_experts(x: Any, ws: Any, chosen: Any, activation: str | None) -> tuple[np.ndarray, int]:
    """(rows in the order of experts, how many rows there are), in float64."""
    slots = chosen.reshape(-1)
    order = np.argsort(slots, kind="stable")
    order = order[slots[order] >= 0]
    products = [np.zeros((slots.size, w.shape[2])) for w in ws]
    for expert in np.unique(slots[order]):
        rows = np.flatnonzero(slots[order] == expert)
        tokens = order[rows] // chosen.shape[1]
        for product, w in zip(products, ws, strict=True):
            product[rows] = x[tokens] @ w[expert]
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        y = products[0]
        y = y if activation is None else np.asarray(ACTIVATIONS[activation](jnp.asarray(y)))
    return (y * products[1] if len(ws) == 2 else y), len(order)
