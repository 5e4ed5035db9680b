"""quantize: an array as values of 8 bits with a scale."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from ._scaled import BLOCK, TYPES, Scaled, spread, without_derivative

#: The smallest scale: below it float32 has fewer bits, and GPUs may take it for zero.
SMALLEST = float(jnp.finfo(jnp.float32).tiny)


class Losses(NamedTuple):
    """How many elements :func:`quantize` lost, int32 each.

    Attributes:
      flushed: became zero and were not.
      saturated: were beyond the largest value of the type, and became it.
    """

    flushed: jax.Array
    saturated: jax.Array


def quantize(
    x: jax.Array,
    dtype: DTypeLike,
    *,
    block: tuple[int, int],
    transpose: bool = False,
    power_of_two: bool = False,
    scale: jax.Array | None = None,
    return_losses: bool = False,
) -> Any:
    """x as values of 8 bits with a scale: the largest of each block becomes the type's largest.

    A block's scale is ``max(|x|) / largest`` of `dtype`: 448 of float8_e4m3fn, 57344 of
    float8_e5m2, 127 of int8. It is 1 for a block of zeros, and at least 2^-126. Values are
    ``x / scale`` in float32, rounded to the nearest, ties to even. A block that holds a NaN or an
    infinity gets a NaN as its scale: nothing of it looks like a number. (Scaling by blocks:
    DeepSeek-V3, arXiv 2412.19437, section 3.3.2.)

    Args:
      x: [..., rows, columns]; a real floating type.
      dtype: of the values.
      block: how many (rows, columns) share a scale; each 1, 128, or -1 for all. (-1, -1) is a scale
        for the tensor, or for each matrix of a stack, (1, -1) for a row, (1, 128) for 128 elements
        of a row, (128, 128) for a square. Last blocks may be smaller.
      transpose: also quantise ``swapaxes(x, -1, -2)`` by the same `block`: what a backward pass
        multiplies by.
      power_of_two: round scales up to powers of two. Then a value has the same bits in whatever
        block it is quantised, unless it becomes too small.
      scale: use this one, of the shape that `block` gives, in place of x's own; elements beyond the
        largest value become it.
      return_losses: also return :class:`Losses`, of x as it is.

    Returns:
      A :class:`jflux.Scaled`, or, with `transpose`, a tuple of two; with `return_losses`, a pair of
      that and the losses.

    Raises:
      TypeError, ValueError: for arguments that do not fit.

    Examples:
      >>> x = jflux.quantize(jnp.arange(256.0).reshape(2, 128), jnp.int8, block=(1, -1))
      >>> x.values.dtype, x.scale.shape
      (dtype('int8'), (2, 1))
    """
    dtype = np.dtype(dtype)
    if dtype not in TYPES:
        raise TypeError(f"jflux.quantize: {dtype} is not one of {', '.join(t.name for t in TYPES)}")
    if not hasattr(x, "dtype") or not jnp.issubdtype(x.dtype, jnp.floating) or x.ndim < 2:
        what = f"{x.dtype}{list(x.shape)}" if hasattr(x, "dtype") else type(x).__name__
        raise TypeError(
            "jflux.quantize: x must be an array [..., rows, columns] of a real floating type, got "
            f"{what}"
        )
    if len(block) != 2 or any(size not in (-1, 1, BLOCK) for size in block):
        raise ValueError(f"jflux.quantize: {block=} must be two of -1, 1 and {BLOCK}")
    if scale is not None:
        given, wanted = jnp.shape(scale), _scale_shape(x.shape, block)
        if given != wanted:
            raise ValueError(
                f"jflux.quantize: scale has shape {given}, of x {x.shape} in blocks {block} it is "
                f"{wanted}"
            )
        if transpose and block[0] != block[1]:
            raise ValueError(
                f"jflux.quantize: a scale in {block=} does not fit x and its transpose"
            )
        scale = jnp.asarray(scale, jnp.float32)

    @without_derivative(
        "jflux.quantize has no derivative: where x is a constant, pass jax.lax.stop_gradient(x)"
    )
    def quantized(x: jax.Array, scale: jax.Array | None) -> tuple[Scaled, Losses | None]:
        wide = x.astype(jnp.float32)
        if scale is None:
            scale = _scale(wide, dtype, block, power_of_two)
        else:
            whole = jnp.isfinite(_largest_in(wide, block))
            scale = jnp.where(whole, scale, jnp.nan)
        # By a broadcast XLA would not divide either. Where x is a NaN, its scale is one.
        ratio = wide / jnp.where(jnp.isnan(wide), jnp.nan, spread(scale, x.shape))
        values = _rounded(ratio, dtype)
        if not return_losses:
            return Scaled(values, scale), None
        lost = ((values == 0) & (wide != 0), jnp.abs(ratio) > largest(dtype))
        return Scaled(values, scale), Losses(*(jnp.sum(one, dtype=jnp.int32) for one in lost))

    result, losses = quantized(x, scale)
    if transpose:
        turned = None if scale is None else jnp.swapaxes(scale, -1, -2)
        result = (result, quantized(jnp.swapaxes(x, -1, -2), turned)[0])
    return (result, losses) if return_losses else result


def largest(dtype: np.dtype) -> float:
    """The largest value that :func:`quantize` makes."""
    whole = jnp.issubdtype(dtype, jnp.integer)
    return float(jnp.iinfo(dtype).max if whole else jnp.finfo(dtype).max)


def _scale(x: jax.Array, dtype: np.dtype, block: tuple[int, int], power_of_two: bool) -> jax.Array:
    magnitudes = _largest_in(x, block)
    # By a constant XLA would not divide: it would multiply by the rounded reciprocal.
    most = jnp.where(jnp.isfinite(magnitudes), largest(dtype), jnp.nan)
    scale = jnp.maximum(magnitudes / most, SMALLEST)
    if power_of_two:
        scale = jnp.where(jnp.isnan(scale), scale, _power_of_two_above(scale))
    return jnp.where(magnitudes == 0, 1, scale)


def _scale_shape(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    counts = (1 if b == -1 else -(-size // b) for size, b in zip(shape[-2:], block, strict=True))
    return (*shape[:-2], *counts)


def _largest_in(x: jax.Array, block: tuple[int, int]) -> jax.Array:
    """The largest magnitude of each block: NaN where there is one.

    By the bits, whose order is the magnitudes': a maximum of floats in XLA for CPUs may drop a NaN.
    """
    magnitudes = lax.bitcast_convert_type(x, jnp.int32) & 0x7FFFFFFF
    for axis, size in zip((x.ndim - 2, x.ndim - 1), block, strict=True):
        magnitudes = _largest_of_blocks(magnitudes, axis, size)
    return lax.bitcast_convert_type(magnitudes, jnp.float32)


def _largest_of_blocks(x: jax.Array, axis: int, size: int) -> jax.Array:
    if size == 1:
        return x
    if size == -1 or x.shape[axis] <= size:
        return jnp.max(x, axis, keepdims=True, initial=0)
    padding = [(0, 0)] * x.ndim
    padding[axis] = (0, -x.shape[axis] % size)
    x = jnp.pad(x, padding)
    shape = (*x.shape[:axis], x.shape[axis] // size, size, *x.shape[axis + 1 :])
    return jnp.max(x.reshape(shape), axis + 1)


def _power_of_two_above(scale: jax.Array) -> jax.Array:
    """The smallest power of two that is not below a normal number, by its bits."""
    bits = lax.bitcast_convert_type(scale, jnp.int32)
    mantissa = (1 << 23) - 1
    return lax.bitcast_convert_type((bits + mantissa) & ~mantissa, jnp.float32)


def _rounded(ratio: jax.Array, dtype: np.dtype) -> jax.Array:
    """To values of `dtype`, the nearest ones; what is beyond the largest becomes it."""
    most = largest(dtype)
    ratio = jnp.clip(ratio, -most, most)
    if jnp.issubdtype(dtype, jnp.integer):
        ratio = jnp.where(jnp.isnan(ratio), 0, jnp.round(ratio))
    # XLA may leave out a cast there and back: what is behind the barrier has been rounded.
    return lax.optimization_barrier(ratio.astype(dtype))
