"""Rotary position embeddings."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

from .._ops._epilogue import in_rows, sum_dtype


@dataclasses.dataclass(frozen=True)
class RotaryScaling:
    """How :class:`Rotary` turns long waves more slowly, so that a model takes longer sequences than
    those that it was trained with: Llama 3.1's way, whose numbers are the defaults. A checkpoint's
    ``config.json`` has them under ``rope_scaling``.

    Waves of which at least `high_freq_factor` fit into `original_max_position_embeddings` stay as
    they are. Waves of which at most `low_freq_factor` fit become `factor` times as long. Between
    the two the speed changes linearly with that number.

    Attributes:
      factor: 8 in Llama 3.1, 32 in Llama 3.2.
      original_max_position_embeddings: how long the sequences were, in positions. 0: all waves
        become `factor` times as long, which is linear interpolation (arXiv 2306.15595).
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def __post_init__(self) -> None:
        if not self.factor > 0:
            raise ValueError(f"jflux.nn.RotaryScaling: {self.factor=} must be greater than 0")
        if not self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"jflux.nn.RotaryScaling: {self.low_freq_factor=} must be less than "
                f"{self.high_freq_factor=}"
            )

    def of(self, turns: jax.Array) -> jax.Array:
        """Scaled angles for each position, from those of the model's training."""
        waves = turns * (self.original_max_position_embeddings / (2 * math.pi))
        kept = (waves - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        kept = jnp.clip(kept, 0, 1)
        return turns * (kept + (1 - kept) / self.factor)


@dataclasses.dataclass(frozen=True)
class Rotary:
    """Rotary position embedding (arXiv 2104.09864, equation 34): a `rotate` of :func:`attention`
    and of the attention layers.

    Element i of a head turns with element i + c/2, as in Llama's published weights; the paper pairs
    neighbours.

    Attributes:
      theta: the base of the wave lengths.
      scaling: of the wave lengths, for longer sequences than those of a model's training.
      width: how many elements of a head are turned, an even number; those after them stay. None:
        all c.

    Examples:
      >>> rotate = jflux.nn.Rotary(theta=500_000.0, scaling=jflux.nn.RotaryScaling())  # Llama 3.1
      >>> q = jnp.ones((1, 4, 2, 8))
      >>> jnp.array_equal(rotate(q)[:, 2:], rotate(q[:, 2:], jnp.arange(2, 4))).item()
      True
    """

    theta: float = 10_000.0
    scaling: RotaryScaling | None = None
    width: int | None = None

    def __post_init__(self) -> None:
        if not self.theta > 0:
            raise ValueError(f"jflux.nn.Rotary: {self.theta=} must be greater than 0")

    def __call__(self, x: jax.Array, position: jax.Array | None = None) -> jax.Array:
        """x [..., s, heads, c], turned by `position`: [s], or [b, s] where those of each sequence
        are others; 0 to s - 1 by default."""
        c = x.shape[-1]
        width = c if self.width is None else self.width
        if width % 2 or not 0 <= width <= c:
            raise ValueError(
                f"jflux.nn.Rotary: {width=} must be even, and at most the {c} elements of a head"
            )
        wide, half = sum_dtype(x.dtype), width // 2
        position = jnp.arange(x.shape[-3]) if position is None else position
        turns = float(self.theta) ** (-jnp.arange(half, dtype=wide) / half)
        turns = turns if self.scaling is None else self.scaling.of(turns)
        if jnp.issubdtype(position.dtype, jnp.integer):
            position = position.astype(wide)
        angle = position[..., None] * in_rows(turns, position[..., None])
        a, b = jnp.split(x[..., :width].astype(wide), 2, axis=-1)
        sin, cos = (in_rows(f(angle)[..., None, :], a) for f in (jnp.sin, jnp.cos))
        turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)
        return turned if width == c else jnp.concatenate([turned, x[..., width:]], -1)
