"""What the two fused products share: checks, and the batching of their operands."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import _config, _mesh

MAX_RANKS = 8
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


def out_dtype(x: Any, w: Any, preferred_element_type: Any) -> np.dtype:
    if preferred_element_type is not None:
        return np.dtype(preferred_element_type)
    return jnp.result_type(x.dtype, w.dtype)


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


def is_empty(x: Any, w: Any) -> bool:
    """Whether there is nothing to compute: `lax`'s collectives do not take empty operands."""
    return 0 in x.shape or 0 in w.shape


def zeros(shape: tuple[int, ...], dtype: Any, *like: jax.Array) -> jax.Array:
    """Zeros that vary over the mesh axes that `like` varies over, and depend on nothing."""
    out = jnp.zeros(shape, dtype)
    axes = tuple(sorted(jax.typeof(like[0]).manual_axis_type.varying, key=str))
    return jax.lax.pcast(out, axes, to="varying") if axes else out


def pad_to_units(x: Any, w: Any, params: Any, bind: Any) -> Any:
    """For the CUDA kernels, whose rows are whole 16-byte units: a function (x, w) -> results that
    pads k and n to multiples of 8 with zeros, or None if they are."""
    k, n = x.shape[-1], w.shape[0 if params.transpose_rhs else 1]
    pad_k, pad_n = -k % 8, -n % 8
    if pad_k == 0 and pad_n == 0:
        return None

    def padded(x, w):
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, pad_k)])
        pads = [(0, pad_k), (0, pad_n)]
        w = jnp.pad(w, pads[::-1] if params.transpose_rhs else pads)
        y, *gathered = bind(x, w, params=params)
        return [y[..., :n], *(g[..., :k] for g in gathered)]

    return padded


def batch_operands(bind: Any, x: Any, w: Any, bx: Any, bw: Any, *, transpose_rhs: bool) -> Any:
    """vmap of ``bind(x, w, shift)``, whose results keep x's leading dimensions and have w's
    columns last. `shift` is how many dimensions were put in front of x.

    A batched x has one more leading dimension; a batched w is one wider w; if both are, the calls
    run one after the other.

    Returns:
      The results and where their batch dimension is (None: the result is not batched).
    """
    if bw is None:
        results = bind(jnp.moveaxis(x, bx, 0), w, 1)
        return results, [0] * len(results)
    if bx is None:
        w = jnp.moveaxis(w, bw, 0 if transpose_rhs else 1)
        b, n = (w.shape[0], w.shape[1]) if transpose_rhs else (w.shape[1], w.shape[2])
        k = w.shape[2] if transpose_rhs else w.shape[0]
        wide = w.reshape(b * n, k) if transpose_rhs else w.reshape(k, b * n)
        y, *rest = bind(x, wide, 0)
        y = y.reshape(*y.shape[:-1], b, n)
        return [y, *rest], [y.ndim - 2, *([None] * len(rest))]
    xs, ws = jnp.moveaxis(x, bx, 0), jnp.moveaxis(w, bw, 0)
    results = jax.lax.map(lambda operands: bind(*operands, 0), (xs, ws))
    return results, [0] * len(results)
