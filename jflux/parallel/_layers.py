"""Layers on a grid: what a rank calls inside `jax.shard_map`, with its parts of everything."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from .._ops._epilogue import in_rows, sum_dtype
from ._product import Convolution, Dense, Local, check_same, gather, product
from ._scheme import DEFAULT, Scheme, all_reduce


def dense(
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None = None,
    *,
    scheme: Scheme = DEFAULT,
    precision: lax.PrecisionLike = None,
) -> jax.Array:
    """``x @ w + bias`` on a grid (arXiv 2305.13525, algorithm 1). Per rank::

        x [m/(data z), ..., k/y]   w [k/(y z), n/x]   bias [n/x]   ->   [m/(data z), ..., n/x]

    x is the same on all ranks along the grid's x axis, the result along y: the weight's blocks are
    gathered over z, the products summed over y. Backward, dx is summed over x, and dw scattered
    over z. The next layer takes ``scheme.transposed``.

    Args:
      x: of any floating type, with at least one leading dimension.
      w: of x's type; or gathered over z already, [k/y, n/x] (see :func:`gather`).
      bias: of any type; added in the result's.
      scheme: the mesh axes, and which communication is hidden.
      precision: as in `lax.dot_general`; used by XLA's products only.

    Raises:
      ValueError, TypeError: operands that do not fit, when the call is traced.
      NameError: outside ``shard_map``.
    """
    if x.ndim < 2 or w.ndim != 2:
        raise ValueError(
            f"jflux.parallel.dense: x must be [m, ..., k] and w [k, n], got {x.shape}, {w.shape}"
        )
    return _with_bias(_apply("dense", Dense(precision), scheme, x, w), bias)


def conv(
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None = None,
    *,
    strides: int | Sequence[int] = 1,
    padding: str | Sequence[tuple[int, int]] = "SAME",
    input_dilation: int | Sequence[int] = 1,
    kernel_dilation: int | Sequence[int] = 1,
    scheme: Scheme = DEFAULT,
    precision: lax.PrecisionLike = None,
) -> jax.Array:
    """A convolution on a grid: :func:`dense` with the channels as k and n (section III-B). Per
    rank, with any number of spatial dimensions::

        x [batch/(data z), *space, k/y]   w [*taps, k/(y z), n/x]   bias [n/x]
        -> [batch/(data z), *space', n/x]

    Args:
      x, w, bias, scheme: as in :func:`dense`.
      strides, padding, input_dilation, kernel_dilation, precision: as in
        `lax.conv_general_dilated`, where dilations are `lhs_dilation` and `rhs_dilation`; one int
        is for all spatial dimensions.

    Raises:
      ValueError, TypeError: operands that do not fit, when the call is traced.
      NameError: outside ``shard_map``.
    """
    if x.ndim < 3 or w.ndim != x.ndim:
        raise ValueError(
            "jflux.parallel.conv: x must be [batch, *space, k] and w [*taps, k, n] with as many "
            f"dimensions, got {x.shape}, {w.shape}"
        )
    space = x.ndim - 2

    def each(value: int | Sequence[int]) -> tuple[int, ...]:
        return tuple(value) if isinstance(value, Sequence) else (operator.index(value),) * space

    local = Convolution(
        each(strides),
        padding if isinstance(padding, str) else tuple(map(tuple, padding)),
        each(input_dilation),
        each(kernel_dilation),
        precision,
    )
    return _with_bias(_apply("conv", local, scheme, x, w), bias)


def embed(
    tokens: jax.Array, table: jax.Array, *, gathered: bool = False, scheme: Scheme = DEFAULT
) -> jax.Array:
    """Rows of a table, ``table[tokens]``, on a grid. Per rank::

        tokens [m/(data z), ...]   table [vocabulary/(y z), n/x]   ->   [m/(data z), ..., n/x]

    It is :func:`dense` of one-hot rows: each rank looks up what its part of the vocabulary has,
    and the rows are summed over y. With a head that has the same weights::

        whole = gather(head, scheme=scheme)
        x = embed(tokens, whole.T, gathered=True, scheme=scheme.transposed)
        ...
        logits = dense(h, whole, scheme=scheme)

    Args:
      tokens: integers from 0 to the vocabulary's size, the same along x and y. Others give zeros.
      table: of any floating type.
      gathered: the table is gathered over z already, [vocabulary/y, n/x].
      scheme: the mesh axes.

    Raises:
      ValueError, TypeError: operands that do not fit, when the call is traced.
      NameError: outside ``shard_map``.
    """
    if not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise TypeError(f"jflux.parallel.embed: tokens must be integers, got {tokens.dtype}")
    if table.ndim != 2:
        raise ValueError(f"jflux.parallel.embed: table must be [vocabulary, n], got {table.shape}")
    check_same("embed", scheme, ("x", "y"), tokens)
    table = table if gathered else gather(table, scheme=scheme)
    names = scheme.names("y")
    tokens = tokens.astype(jnp.promote_types(tokens.dtype, jnp.int32))
    own = tokens - (lax.axis_index(names) * len(table) if names else 0)
    rows = table[jnp.clip(own, 0, len(table) - 1)]
    inside = (own >= 0) & (own < len(table))
    return all_reduce(scheme, jnp.where(inside[..., None], rows, 0), "y")


def rms_norm(
    x: jax.Array, scale: jax.Array, *, epsilon: float = 1e-6, scheme: Scheme = DEFAULT
) -> jax.Array:
    """x over the root mean square of its features, times scale (arXiv 1910.07467, equation 4). Per
    rank x [..., k/y], scale [k/y]; sums are in float32, or float64 for float64.

    Of a layer's input, so `scheme` is the one of the layer that follows.
    """
    wide = x.astype(sum_dtype(x.dtype))
    square = _mean(wide * wide, scheme)
    return (wide * lax.rsqrt(square + epsilon) * in_rows(scale, wide)).astype(x.dtype)


def layer_norm(
    x: jax.Array,
    scale: jax.Array | None = None,
    bias: jax.Array | None = None,
    *,
    epsilon: float = 1e-6,
    scheme: Scheme = DEFAULT,
) -> jax.Array:
    """x less the mean of its features, over their deviation, times scale, plus bias (arXiv
    1607.06450, equation 4). Per rank x [..., k/y], scale and bias [k/y]; sums are in float32, or
    float64 for float64.

    Of a layer's input, so `scheme` is the one of the layer that follows.
    """
    wide = x.astype(sum_dtype(x.dtype))
    wide -= _mean(wide, scheme)
    wide *= lax.rsqrt(_mean(wide * wide, scheme) + epsilon)
    return _affine(wide, scale, bias).astype(x.dtype)


def group_norm(
    x: jax.Array,
    scale: jax.Array | None = None,
    bias: jax.Array | None = None,
    *,
    groups: int,
    epsilon: float = 1e-6,
    scheme: Scheme = DEFAULT,
) -> jax.Array:
    """Each example's groups of channels, normalised over group and space (arXiv 1803.08494,
    equation 7). Per rank x [batch, *space, k/y], scale and bias [k/y]; sums are in float32, or
    float64 for float64. Groups are whole on a rank: nothing is communicated.

    Args:
      groups: how many there are over all ranks; y divides them, and they divide k.
      scheme: that of the layer that follows.

    Raises:
      ValueError: groups that do not divide so.
    """
    ranks, channels = scheme.size("y"), x.shape[-1]
    if groups % ranks or channels % (groups // ranks):
        raise ValueError(
            f"jflux.parallel.group_norm: {groups=} must divide by {ranks} ranks along y, and "
            f"{channels} channels of a rank by what is left"
        )
    wide = x.astype(sum_dtype(x.dtype))
    space, own = math.prod(x.shape[1:-1]), groups // ranks
    wide = wide.reshape(len(x), space, own, channels // own)
    wide -= wide.mean((1, 3), keepdims=True)
    variance = (wide * wide).mean((1, 3), keepdims=True)
    wide = (wide * lax.rsqrt(variance + epsilon)).reshape(x.shape)
    return _affine(wide, scale, bias).astype(x.dtype)


def _mean(x: jax.Array, scheme: Scheme) -> jax.Array:
    """Over the features, of all ranks along y."""
    return all_reduce(scheme, x.mean(-1, keepdims=True), "y") / scheme.size("y")


def _affine(x: jax.Array, scale: jax.Array | None, bias: jax.Array | None) -> jax.Array:
    x = x if scale is None else x * in_rows(scale, x)
    return x if bias is None else x + in_rows(bias, x)


def _apply(op: str, local: Local, scheme: Scheme, x: jax.Array, w: jax.Array) -> jax.Array:
    k, rows, depth = x.shape[-1], w.shape[-2], scheme.size("z")
    if k not in (rows, rows * depth):
        raise ValueError(
            f"jflux.parallel.{op}: x {x.shape} and w {w.shape} do not contract: of x's {k} columns "
            f"a rank along z has {k}/{depth} rows of w, or all of them if w is gathered"
        )
    if x.dtype != w.dtype:
        raise TypeError(
            f"jflux.parallel.{op}: x is {x.dtype} and w is {w.dtype}; cast w, before it is gathered"
        )
    return product(local, scheme, x, w, gathered=k == rows)


def _with_bias(y: jax.Array, bias: jax.Array | None) -> jax.Array:
    if bias is None:
        return y
    if bias.shape != y.shape[-1:]:
        raise ValueError(f"jflux.parallel: bias must be {y.shape[-1:]}, got {bias.shape}")
    # Its gradient is summed over rows, and over ranks, in the wide type.
    wide = sum_dtype(y.dtype)
    return (y.astype(wide) + in_rows(bias.astype(wide), y)).astype(y.dtype)
