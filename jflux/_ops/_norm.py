"""Normalisation of rows, as ops do it after they have summed them."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from . import _epilogue


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RMSNorm:
    """``y / sqrt(mean(y^2) + epsilon) * scale`` of each row y [..., width] (Zhang and Sennrich,
    arXiv 1910.07467, equation 4), in float32 (float64 for float64), rounded once.

    Attributes:
      scale: [width].
      epsilon: added to the mean of squares.
    """

    scale: jax.Array
    epsilon: float = dataclasses.field(default=1e-6, metadata={"static": True})

    name: ClassVar[str] = "rms"

    @property
    def factors(self) -> tuple[jax.Array, ...]:
        return (self.scale,)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerNorm:
    """``(y - mean(y)) / sqrt(variance(y) + epsilon) * scale + bias`` of each row y [..., width]
    (Ba, Kiros and Hinton, arXiv 1607.06450, equation 3), in float32 (float64 for float64), rounded
    once.

    Attributes:
      scale: [width].
      bias: [width], or None for none.
      epsilon: added to the variance.
    """

    scale: jax.Array
    bias: jax.Array | None = None
    epsilon: float = dataclasses.field(default=1e-6, metadata={"static": True})

    name: ClassVar[str] = "layer"

    @property
    def factors(self) -> tuple[jax.Array, ...]:
        return (self.scale,) if self.bias is None else (self.scale, self.bias)


Norm = RMSNorm | LayerNorm


def check(op: str, norm: Any, width: int) -> None:
    """Raises for one that rows of `width` cannot take."""
    if not isinstance(norm, RMSNorm | LayerNorm):
        raise TypeError(
            f"jflux.{op}: norm must be jflux.RMSNorm or jflux.LayerNorm, got {type(norm).__name__}"
        )
    for factor in norm.factors:
        if tuple(factor.shape) != (width,):
            raise ValueError(
                f"jflux.{op}: a row to be normalised has {width} elements, but the norm's scale or "
                f"bias has shape {tuple(factor.shape)}"
            )


def apply(name: str, epsilon: float, y: jax.Array, *factors: jax.Array) -> jax.Array:
    """The rows of y, normalised, in its type."""
    wide = _epilogue.sum_dtype(y.dtype)
    v = y.astype(wide)
    if name == LayerNorm.name:
        v -= jnp.mean(v, -1, keepdims=True)
    v *= lax.rsqrt(jnp.mean(v * v, -1, keepdims=True) + epsilon)
    scale, *bias = (_epilogue.in_rows(a.astype(wide), v) for a in factors)
    v *= scale
    if bias:
        v += bias[0]
    return v.astype(y.dtype)
