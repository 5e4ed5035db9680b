"""What the two products share: checks, which configuration they take, and the batching of
their operands."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import _config, _ffi, _heap, _mesh, _tuning

MAX_RANKS = 8
CUDA_MAX_WEIGHTS = 4  # kMaxWeights of cc/gpu/gemm_config.h
UNIT = 8  # elements of the CUDA kernels' types in 16 bytes
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


def columns_axis(transpose_rhs: bool) -> int:
    """Which dimension of a w is n."""
    return 0 if transpose_rhs else 1


def columns(w: Any, transpose_rhs: bool) -> int:
    """n of a w."""
    return w.shape[columns_axis(transpose_rhs)]


def most_weights(platform: str) -> int:
    """How many the kernels of one call take."""
    return CUDA_MAX_WEIGHTS if platform == "cuda" else 1


def why_no_kernel(pairs: Iterable[tuple[Any, Any]], params: Any, platform: str) -> str | None:
    """Why the kernels cannot take one of these x and w, or None."""
    reasons = (kernel_takes(x, w, params.out_dtype, params.world, platform) for x, w in pairs)
    return next(filter(None, reasons), None)


#: Fewer rows than these are over before communication could be hidden in their product.
FEWEST_ROWS = {"all_gather_matmul": 64, "matmul_reduce_scatter": 64, "matmul_all_reduce": 32}


#: Of w on each rank, columns of an all-gather or rows of a reduce-scatter, for which communication
#: of a row by itself, in chunks, takes as long as its product, on H200s: 2 k bytes at 290 GB/s, and
#: 2 k n operations at 670 TFLOP/s.
AS_LONG_AS_ITS_PRODUCT = 2300


def apart_is_faster(op: str, m: int, ranks: int = 1, width: int = 0) -> bool:
    """Whether m rows of all ranks take longer on GPUs in one kernel than as XLA's product and one
    of jflux's collectives, by what docs/design/0009 and 0010 measured.

    Args:
      ranks, width: of the call, and of w (as above); or left out, if a rank's rows are whole tiles.
        Where they are not, the last row of tiles takes as long as a full one, which cuBLAS does
        better, and communication may not make up for.
    """
    if m < FEWEST_ROWS[op] or CUDA_TILE_ROWS < m < 512:
        return True
    if m <= CUDA_TILE_ROWS or width == 0 or m // ranks % CUDA_TILE_ROWS == 0:
        return False
    padding = -m % (2 * CUDA_TILE_ROWS) / m  # clusters have two tiles
    return padding > AS_LONG_AS_ITS_PRODUCT / width * (ranks - 1) / ranks


def call_rules(
    op: str,
    *,
    extent: Callable[..., tuple[int, int, int, int]],
    apart_is_faster: Callable[..., bool],
    attributes: Callable[..., dict[str, Any]],
) -> dict[str, Any]:
    """What `_ffi.make_primitive` asks of an op whose kernels have configurations to choose from.

    Args:
      op: its name.
      extent: (*avals, params=...) -> (outer, inner) of cc/core/rows.h, and k and n in all.
      apart_is_faster: (*avals, params=...) -> whether a product and a collective are on GPUs, where
        nothing was measured for the call.
      attributes: (*avals, params=..., platform=...) -> what its handler takes beside a product's.
    """

    def key_of(avals, params):
        outer, inner, k, n = extent(*avals, params=params)
        rows, dtype = outer * inner, avals[0].dtype
        return _tuning.key_of(op, params.world, rows, n, k, dtype, params.transpose_rhs)

    def known(key, platform, mesh):
        """What was measured for this call on these GPUs, if they are some and known."""
        here = platform == "cuda" and mesh is not None and _ffi.lowers_for_here(mesh)
        return _tuning.lookup(key, mesh.devices.flat[0].device_kind if here else None)

    def slower(*avals, params, platform, mesh):
        measured = known(key_of(avals, params), platform, mesh)
        if measured is None:
            return platform == "cuda" and apart_is_faster(*avals, params=params)
        return measured == _tuning.APART

    def choice_of(key, platform, mesh):
        """Empty where there is nothing to choose, and where the devices are not here to ask (then
        the handler asks the heuristic)."""
        if platform != "cuda" or not _ffi.lowers_for_here(mesh):
            return ()
        measured = known(key, platform, mesh)
        if not isinstance(measured, _tuning.Choice):
            measured = _tuning.heuristic(key, _mesh.core_count(mesh), _heap.link_gbps())
        return dataclasses.astuple(measured)

    def launch(*avals, params, platform, mesh, groups):
        outer, inner, k, n = extent(*avals, params=params)
        choice = choice_of(key_of(avals, params), platform, mesh)
        if _ffi.lowers_for_here(mesh):
            product = _heap.Product(
                op=op,
                world=params.world,
                outer=outer,
                inner=inner,
                k=k,
                n=n,
                dtype=avals[0].dtype,
                out_dtype=np.dtype(params.out_dtype),
                transpose_rhs=params.transpose_rhs,
                choice=choice,
            )
            _heap.reserve(platform, groups, op, product.workspace_bytes)
        return {
            "choice": np.array(choice, np.int64),
            "inner": np.int64(inner),
            "outer": np.int64(outer),
            "transpose_rhs": params.transpose_rhs,
            **attributes(*avals, params=params, platform=platform),
        }

    return {"lax_is_faster": slower, "launch": launch}


def in_units(xs: Sequence[Any], ws: Sequence[Any]) -> bool:
    """Whether the rows of all operands are whole 16-byte units, as the CUDA kernels need them."""
    sizes = [x.shape[-1] for x in xs] + [size for w in ws for size in w.shape]
    return all(size % UNIT == 0 for size in sizes)


def pad_last(array: Any, dimensions: int) -> Any:
    """An array whose last dimensions are padded with zeros to whole units."""
    sizes = array.shape[array.ndim - dimensions :]
    return jnp.pad(array, [(0, 0)] * (array.ndim - dimensions) + [(0, -s % UNIT) for s in sizes])


def pad_to_units(xs: Sequence[Any], ws: Sequence[Any]) -> list[Any]:
    """All of xs and of ws, k and n padded with zeros."""
    return [*(pad_last(x, 1) for x in xs), *(pad_last(w, 2) for w in ws)]


def widen(w: Any, batch: int, transpose_rhs: bool) -> tuple[Any, Callable[[Any], Any]]:
    """A batched w as one wider w, and how to get the batch back: y [..., b * n] -> [..., b, n]."""
    n_axis = columns_axis(transpose_rhs)
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
