"""What the two fused products share: checks, and the batching of their operands."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import _config, _mesh

MAX_RANKS = 8
CUDA_MAX_WEIGHTS = 4  # kMaxWeights of cc/gpu/gemm_config.h
CUDA_TILE_ROWS = 128  # kGemmTileM of cc/gpu/gemm_config.h
CPU_DTYPES = {np.dtype(d) for d in (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64)}
CUDA_DTYPES = {np.dtype(d) for d in (jnp.float16, jnp.bfloat16)}


def is_plain(op: str, axis_name: _mesh.AxisName) -> bool:
    """Whether there are no ranks to speak of: one alone, or vmap's (which is a fallback)."""
    if _mesh.axis_size(axis_name) == 1:
        return True
    if _mesh.is_manual(axis_name):
        return False
    _config.fall_back(op, f"axis {axis_name!r} is vmap's, not a mesh's")
    return True


def check_operands(op: str, x: Any, w: Any, dimension: int, dimension_name: str) -> int:
    """Raises for operands that no product can take; returns `dimension`, not negative."""
    if not isinstance(dimension, int | np.integer):
        raise TypeError(f"jflux.{op}: {dimension_name} must be an int, got {dimension!r}")
    for name, array in (("x", x), ("w", w)):
        if not hasattr(array, "ndim") or not hasattr(array, "dtype"):
            raise TypeError(f"jflux.{op}: {name} must be an array, got {type(array).__name__}")
    if x.ndim < 2:
        raise ValueError(f"jflux.{op}: x must have shape [..., rows, k], got {x.shape}")
    if w.ndim != 2:
        raise ValueError(f"jflux.{op}: w must have shape [k, n], got {w.shape}")
    if not -x.ndim <= dimension < x.ndim or dimension % x.ndim == x.ndim - 1:
        raise ValueError(
            f"jflux.{op}: {dimension_name}={dimension} must name one of x's leading dimensions, "
            f"not the contracted last one; x has shape {x.shape}"
        )
    return dimension % x.ndim


def check_contraction(op: str, x: jax.Array, w: jax.Array, transpose_rhs: bool) -> None:
    k = w.shape[1 if transpose_rhs else 0]
    if x.shape[-1] != k:
        raise ValueError(
            f"jflux.{op}: x {x.shape} and w {w.shape} do not contract: x has {x.shape[-1]} "
            f"columns, w takes {k} ({transpose_rhs=})"
        )


def outer_inner(shape: tuple[int, ...], dimension: int, blocks: int) -> tuple[int, int]:
    """(outer, inner) of cc/core/rows.h for an array whose `dimension` has `blocks` blocks."""
    return (
        math.prod(shape[:dimension]),
        math.prod(shape[dimension:-1]) // blocks,
    )


def out_dtype(op: str, operands: Any, preferred_element_type: Any) -> np.dtype:
    """The type of all results."""
    if preferred_element_type is not None:
        return np.dtype(preferred_element_type)
    dtypes = sorted({np.dtype(a.dtype).name for a in operands})
    if len(operands) > 2 and len(dtypes) > 1:
        raise TypeError(
            f"jflux.{op}: several weights or products must be of one type, got "
            f"{', '.join(dtypes)}; cast them, or pass preferred_element_type"
        )
    return jnp.result_type(*(a.dtype for a in operands))


def kernel_takes(x: Any, w: Any, out: np.dtype, world: int, platform: str) -> str | None:
    """Why no kernel on `platform` takes these operands, or None."""
    dtypes = CPU_DTYPES if platform == "cpu" else CUDA_DTYPES
    names = "/".join(sorted(d.name for d in dtypes))
    if x.dtype != w.dtype:
        return f"x is {x.dtype} and w is {w.dtype}, kernels take one type for both"
    if x.dtype not in dtypes:
        return f"{x.dtype} operands on {platform}, where the kernels take {names}"
    if out != x.dtype and out != np.float32:
        return f"a {out} result of {x.dtype} operands"
    if platform == "cuda" and total_rows(x) * world >= 1 << 31:
        return f"{total_rows(x)} rows on each of {world} ranks, kernels take fewer than 2^31 in all"
    if world > MAX_RANKS:
        return f"{world} ranks, kernels take up to {MAX_RANKS}"
    return None


def total_rows(x: Any) -> int:
    """Rows of an array [..., rows, k], leading dimensions included."""
    return math.prod(x.shape[:-1])


def zeros(shape: tuple[int, ...], dtype: Any, *like: jax.Array) -> jax.Array:
    """Zeros that vary over the mesh axes that `like` varies over, and depend on nothing."""
    out = jnp.zeros(shape, dtype)
    axes = tuple(sorted(jax.typeof(like[0]).manual_axis_type.varying, key=str))
    return jax.lax.pcast(out, axes, to="varying") if axes else out


def columns(w: Any, transpose_rhs: bool) -> int:
    """n of a w."""
    return w.shape[0 if transpose_rhs else 1]


def pad(array: Any, *dimensions: int) -> Any:
    """Pads these dimensions to multiples of 8 with zeros: rows of the CUDA kernels' operands are
    whole 16-byte units."""
    pads = [(0, -size % 8 if d in dimensions else 0) for d, size in enumerate(array.shape)]
    return jnp.pad(array, pads) if any(high for _, high in pads) else array


def widen(w: Any, batch: int, n_axis: int) -> tuple[Any, Callable[[Any], Any]]:
    """A batched w as one wider w, and how to get the batch back: y [..., b * n] -> [..., b, n]."""
    w = jnp.moveaxis(w, batch, n_axis)
    b, n = w.shape[n_axis : n_axis + 2]
    wide = w.reshape(*w.shape[:n_axis], b * n, *w.shape[n_axis + 2 :])
    return wide, lambda y: y.reshape(*y.shape[:-1], b, n)


def batch_in_turn(bind: Any, operands: Any, dims: Any) -> tuple[list[Any], list[int]]:
    """The calls of a batch, one after the other."""
    batched = [jnp.moveaxis(a, d, 0) for a, d in zip(operands, dims, strict=True) if d is not None]

    def one(batched):
        rest = iter(batched)
        return bind(*(a if d is None else next(rest) for a, d in zip(operands, dims, strict=True)))

    results = jax.lax.map(one, batched)
    return results, [0] * len(results)
