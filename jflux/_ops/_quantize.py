"""quantize: an array as values of 8 bits with a scale. Kernel: cc/ops/quantize."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from .. import _native
from .._call import local_ops
from .._call.forms import Op, ShapeDtype
from .._call.plans import Arrays
from .._call.primitives import make_primitive
from ._scaled import BLOCK, TYPES, Scaled, spread, without_derivative
from .products import _product

OP = "quantize"

#: The kernels' rows are whole vectors.
_MULTIPLE = _native.VECTOR_BYTES

#: The smallest scale: below it float32 has fewer bits, and GPUs may take it for zero.
SMALLEST = float(jnp.finfo(jnp.float32).tiny)


@dataclasses.dataclass(frozen=True)
class Params:
    """A call, less its arrays.

    Attributes:
      copy, transpose: of what there are results: of x, and of its transpose.
      again: x has a scale.
    """

    dtype: np.dtype
    block: tuple[int, int]
    transpose: bool
    power_of_two: bool
    return_losses: bool
    copy: bool = True
    again: bool = False

    @property
    def sides(self) -> slice:
        """Which of x and its transpose are results."""
        return slice(int(not self.copy), 1 + self.transpose)

    @property
    def has_maxima(self) -> bool:
        """Whether the kernels pass over x twice (QuantizeParams::HasMaxima)."""
        return -1 in self.block and (self.transpose or self.block[0] != 1)


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

    GPUs have a kernel for blocks of 128 or all columns, of a float16, bfloat16 or float32 x whose
    columns, and with `transpose` rows, are a multiple of 16. It reads x once, and writes the copy
    and its transpose. Where a block is larger than a tile of 128 x 128 it reads x twice, since the
    largest comes first: (-1, -1) without `scale` or with `return_losses`, and (1, -1) with
    `transpose`, whose columns have scales too. Elsewhere, and where XLA splits the program over
    devices outside of `jax.shard_map`, it is plain `lax`. There XLA's division on GPUs may be off
    in its last bit; that of the kernel is exact.

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
        given, wanted = jnp.shape(scale), scale_shape(x.shape, block)
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

    params = Params(dtype, (block[0], block[1]), transpose, power_of_two, return_losses)
    results = iter(_quantized(params, x) if scale is None else _quantized(params, x, scale))
    copies = tuple(Scaled(next(results), next(results)) for _ in range(1 + transpose))
    result = copies if transpose else copies[0]
    return (result, Losses(*next(results))) if return_losses else result


def transposed(
    x: jax.Array | Scaled,
    dtype: DTypeLike,
    block: tuple[int, int],
    power_of_two: bool,
    scale: jax.Array | None = None,
) -> Scaled:
    """``quantize(x.T, ...)``, in one pass over x on GPUs; of a Scaled matrix, what it means."""
    again = isinstance(x, Scaled)
    params = Params(np.dtype(dtype), block, True, power_of_two, False, copy=False, again=again)
    given = [] if scale is None else [scale]
    arrays = [x.values, x.scale] if isinstance(x, Scaled) else [x, *given]
    return Scaled(*_quantized(params, *arrays)[:2])


def _quantized(params: Params, *arrays: jax.Array) -> Sequence[jax.Array]:
    @without_derivative(
        "jflux.quantize has no derivative: where x is a constant, pass jax.lax.stop_gradient(x)"
    )
    def bound(*arrays: jax.Array) -> Sequence[jax.Array]:
        return _primitive.bind(*arrays, params=params)

    return bound(*arrays)


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
        scale = jnp.where(jnp.isnan(scale), scale, power_of_two_for(magnitudes, largest(dtype)))
    return jnp.where(magnitudes == 0, 1, scale)


def scale_shape(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    """Of the scale of an array of this shape."""
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


def power_of_two_for(magnitudes: jax.Array, most: float) -> jax.Array:
    """The smallest power of two, from 2^-126 on, of which `most` is not below a magnitude.

    Without a division, which XLA on GPUs may round up: what has been quantised has a magnitude of
    `most` times a power of two, which has to be found again."""
    exponents = jnp.int32(0xFF << 23)
    bits = lax.bitcast_convert_type(magnitudes, jnp.int32) & exponents
    # most is in [2^e, 2^(e + 1)): the ratio is in (2^(n - e - 1), 2^(n - e + 1)).
    below = bits - ((math.frexp(most)[1] - 1) << 23)
    low = lax.bitcast_convert_type(jnp.maximum(below, 1 << 23), jnp.float32)
    return jnp.where(magnitudes <= most * low, low, 2 * low)


def _rounded(ratio: jax.Array, dtype: np.dtype) -> jax.Array:
    """To values of `dtype`, the nearest ones; what is beyond the largest becomes it."""
    most = largest(dtype)
    ratio = jnp.clip(ratio, -most, most)
    if jnp.issubdtype(dtype, jnp.integer):
        ratio = jnp.where(jnp.isnan(ratio), 0, jnp.round(ratio))
    # XLA may leave out a cast there and back: what is behind the barrier has been rounded.
    return lax.optimization_barrier(ratio.astype(dtype))


# ---- The primitive -------------------------------------------------------------------------------


def in_lax(arrays: Arrays, params: Params) -> list[jax.Array]:
    x, *given = arrays
    # XLA may leave out the cast that made it.
    x = lax.optimization_barrier(x)
    scale = given[0] if given else None
    if params.again:
        x, scale = Scaled(x, given[0]).dequantize(), None
    *results, losses = _of_one(x, scale, params)
    if params.transpose:
        turned = None if scale is None else jnp.swapaxes(scale, -1, -2)
        results += _of_one(jnp.swapaxes(x, -1, -2), turned, params)[:2]
    results = results[0 if params.copy else 2 :] + [losses] * params.return_losses
    return results + [jnp.zeros(*_maxima(x, params))] * params.has_maxima


def _of_one(
    x: jax.Array, scale: jax.Array | None, params: Params
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Values, their scale, and losses."""
    wide = x.astype(jnp.float32)
    if scale is None:
        scale = _scale(wide, params.dtype, params.block, params.power_of_two)
    else:
        whole = jnp.isfinite(_largest_in(wide, params.block))
        scale = jnp.where(whole, scale, jnp.nan)
    # By a broadcast XLA would not divide either. Where x is a NaN, its scale is one.
    ratio = wide / jnp.where(jnp.isnan(wide), jnp.nan, spread(scale, x.shape))
    values = _rounded(ratio, params.dtype)
    lost = ((values == 0) & (wide != 0), jnp.abs(ratio) > largest(params.dtype))
    return values, scale, jnp.stack([jnp.sum(one, dtype=jnp.int32) for one in lost])


def _maxima(x: Any, params: Params) -> ShapeDtype:
    """The largest magnitudes of blocks, which the kernels keep there between two passes."""
    *stack, rows, columns = x.shape
    shapes = [(rows, columns), (columns, rows)][params.sides]
    counts = (math.prod(scale_shape(shape, params.block)) for shape in shapes)
    return (*stack, sum(counts)), np.dtype(np.uint32)


def result_shapes(arrays: Arrays, params: Params) -> Sequence[ShapeDtype]:
    x = arrays[0]
    *stack, rows, columns = x.shape
    shapes: list[ShapeDtype] = []
    for shape in ((*stack, rows, columns), (*stack, columns, rows))[params.sides]:
        scale = scale_shape(shape, params.block)
        shapes += [(shape, params.dtype), (scale, np.dtype(np.float32))]
    shapes += [((2,), np.dtype(np.int32))] * params.return_losses
    return shapes + [_maxima(x, params)] * params.has_maxima


def why_not(arrays: Arrays, params: Params, platform: str) -> str | None:
    x = arrays[0]
    *stack, rows, columns = x.shape
    if params.again:
        counts = zip(arrays[1].shape, (rows, -(-columns // BLOCK)), strict=False)
        fits = not stack and all(count in (1, most) for count, most in counts)
        if x.dtype != jnp.float8_e4m3fn or not fits or -1 in params.block:
            return "kernels quantise a matrix of e4m3 again, in blocks of 128"
    elif why := _native.why_not_dtypes(OP, "cuda", x.dtype):
        return why
    if 0 in x.shape:
        return "x is empty"
    if params.block[1] == 1:
        return f"blocks are {params.block}, the kernels take blocks of several columns"
    if columns % _MULTIPLE:
        return f"x has {columns} columns, the kernels take multiples of {_MULTIPLE}"
    if params.transpose and rows % _MULTIPLE:
        return f"x has {rows} rows, the kernels transpose multiples of {_MULTIPLE}"
    return None


def why_not_portable(arrays: Arrays, params: Any, platform: str) -> str | None:
    """The same of code for other GPUs than Hopper's. `params`: or those of a call for groups."""
    return "only Hopper's kernels quantise again" if params.again else None


def attributes(
    params: Params,
    source: int = 0,
    activation: int = 0,
    grouped: bool = False,
    fill: bool = False,
) -> dict[str, Any]:
    """Of the handler (cc/ops/quantize/quantize_ffi.cc)."""
    return {
        "block": np.array(params.block, np.int64),
        "copy": params.copy,
        "transpose": params.transpose,
        "power_of_two": params.power_of_two,
        "losses": params.return_losses,
        "again": params.again,
        "grouped": grouped,
        "fill": fill,
        "source": np.int64(source),
        "activation": np.int64(activation),
    }


def bind(arrays: Arrays, params: Params) -> Sequence[jax.Array]:
    """The primitive's results."""
    return _primitive.bind(*arrays, params=params)


def _batch(primitive: Any, operands: Any, dims: Any, *, params: Params) -> Any:
    if params.return_losses:  # each has its own
        bind = functools.partial(primitive.bind, params=params)
        return _product.batch_one_by_one(bind, operands, dims)
    size = next(a.shape[d] for a, d in zip(operands, dims, strict=True) if d is not None)
    stacks = [
        jnp.broadcast_to(a, (size, *a.shape)) if d is None else jnp.moveaxis(a, d, 0)
        for a, d in zip(operands, dims, strict=True)
    ]
    results = primitive.bind(*stacks, params=params)
    return results, [0] * len(results)


_primitive = make_primitive(
    Op(
        name=OP,
        result_shapes=result_shapes,
        reference=in_lax,
        forms=(
            local_ops.kernel(
                OP,
                why_not=why_not,
                attributes=lambda arrays, params, plan: attributes(params),
                why_not_portable=why_not_portable,
                checked_on_gpus=True,
                on_cpus=False,
                is_optional=True,
            ),
        ),
        batch=_batch,
        is_local=True,
        is_split_by_xla=True,
    )
)
