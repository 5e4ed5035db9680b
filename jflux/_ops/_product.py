"""What products of x and w share: checks, plans, and the batching of their operands."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .. import _config, _dispatch, _mesh, _native, _tuning
from .._dispatch import Arrays, Machine, Plan
from .._native import MAX_RANKS, MAX_WEIGHTS, TILE_ROWS, UNIT
from . import _lax

CPU_DTYPES = frozenset(np.dtype(d) for d in (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64))
CUDA_DTYPES = frozenset(np.dtype(d) for d in (jnp.float16, jnp.bfloat16))
#: The name that `jax.checkpoint` policies know a product's y by, where it has no activation.
PRODUCT = "jflux_product"
#: By platform: the operands' types that the kernels of products take.
DTYPES = {"cpu": CPU_DTYPES, "cuda": CUDA_DTYPES}


def is_single(op: str, axis_name: _mesh.AxisName) -> bool:
    """Whether there are no ranks to speak of: one alone, or vmap's (which is a fallback)."""
    if _mesh.axis_size(axis_name) == 1:
        return True
    if _mesh.is_manual(axis_name):
        return False
    _config.fall_back(op, f"axis {axis_name!r} is vmap's, not a mesh's")
    return True


# ---- Checks --------------------------------------------------------------------------------------


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
    """Raises if x's last dimension is not w's k."""
    k = w.shape[1 if transpose_rhs else 0]
    if x.shape[-1] != k:
        message = (
            f"jflux.{op}: x {x.shape} and w {w.shape} do not contract: x has {x.shape[-1]} "
            f"columns, w takes {k} ({transpose_rhs=}). Shapes are one rank's"
        )
        small, large = sorted((x.shape[-1], k))
        if small and large % small == 0:
            message += "; are both split along k, or neither, as the op takes them?"
        raise ValueError(message)


def check_axis(op: str, name: str, axis: Any, x: Any, of: str = "the product x @ w") -> int:
    """`axis` of an array with as many dimensions as x, not negative; raises for one that it has
    not."""
    if not isinstance(axis, int | np.integer):
        raise TypeError(f"jflux.{op}: {name} must be an int, got {axis!r}")
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(
            f"jflux.{op}: {name}={axis} must name a dimension of {of}, which has "
            f"{x.ndim}; x has shape {x.shape}"
        )
    return int(axis) % x.ndim


def out_dtype(
    op: str, operands: Any, preferred_element_type: Any, precision: lax.PrecisionLike = None
) -> np.dtype:
    """The type of all results: that of `lax.dot_general`, which the reference calls and which
    checks `precision`."""
    dtypes = sorted({np.dtype(a.dtype).name for a in operands})
    if preferred_element_type is None and len(operands) > 2 and len(dtypes) > 1:
        raise TypeError(
            f"jflux.{op}: several weights or products must be of one type, got "
            f"{', '.join(dtypes)}; cast them, or pass preferred_element_type"
        )
    pair = (operands[0].dtype, operands[-1].dtype)
    return _lax.dot_dtype(*pair, preferred_element_type, precision)


def constant_if_whole(out: np.dtype, *operands: jax.Array) -> list[jax.Array]:
    """The operands of a call with results of this type, without gradients if that is one of whole
    numbers: `jax.custom_jvp` would ask for their tangents."""
    if jnp.issubdtype(out, jnp.inexact):
        return list(operands)
    return [jax.lax.stop_gradient(a) for a in operands]


def kernel_takes(x: Any, w: Any, out: np.dtype, world: int, platform: str) -> str | None:
    """Why no kernel on `platform` takes these operands, or None."""
    dtypes = DTYPES[platform]
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


def why_no_kernel(pairs: Iterable[tuple[Any, Any]], params: Any, platform: str) -> str | None:
    """Why the kernels cannot take one of these x and w, or None."""
    reasons = (kernel_takes(x, w, params.out_dtype, params.world, platform) for x, w in pairs)
    return next(filter(None, reasons), None)


# ---- Sizes ---------------------------------------------------------------------------------------


def outer_inner(shape: tuple[int, ...], dimension: int, shards: int) -> tuple[int, int]:
    """(outer, inner) of cc/core/rows.h for an array whose `dimension` has `shards` shards."""
    return (
        math.prod(shape[:dimension]),
        math.prod(shape[dimension:-1]) // shards,
    )


def total_rows(x: Any) -> int:
    """Rows of an array [..., rows, k], leading dimensions included."""
    return math.prod(x.shape[:-1])


def zeros(shape: tuple[int, ...], dtype: Any, *like: jax.Array) -> jax.Array:
    """Zeros that vary over the mesh axes that `like` varies over, and depend on nothing."""
    return _mesh.vary(jnp.zeros(shape, dtype), _mesh.varying(like))


def flops(x: Any, w: Any, transpose_rhs: bool) -> int:
    """Of ``x @ w``."""
    return 2 * math.prod(x.shape) * columns(w, transpose_rhs)


def columns_axis(transpose_rhs: bool) -> int:
    """Which dimension of a w is n."""
    return 0 if transpose_rhs else 1


def columns(w: Any, transpose_rhs: bool) -> int:
    """n of a w."""
    return w.shape[columns_axis(transpose_rhs)]


def most_weights(platform: str) -> int:
    """How many the kernels of one call take."""
    return MAX_WEIGHTS if platform == "cuda" else 1


# ---- Plans ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Sizes:
    """A product as its kernel sees it, on one rank: rows are [outer, world, inner] or
    [outer, inner], as cc/core/rows.h numbers them; k and n are of all terms and all weights.

    Attributes:
      first_k: of the first term alone, if there are several.
      gated: whether two weights make one result.
      split_rows, concat_rows: of an all-to-all: whether shards are rows of what is sent, and of
        what is put together.
    """

    op: str
    world: int
    outer: int
    inner: int
    k: int
    n: int
    dtype: np.dtype
    out_dtype: np.dtype
    transpose_rhs: bool
    first_k: int = 0
    gated: bool = False
    split_rows: bool = False
    concat_rows: bool = False

    @property
    def rows(self) -> int:
        """Of all ranks."""
        return self.world * self.outer * self.inner

    @property
    def key(self) -> _tuning.Key:
        """By which tuning tables know the call."""
        return _tuning.Key(
            self.op, self.world, self.rows, self.n, self.k, self.dtype.name, self.transpose_rhs
        )

    def native(self) -> dict[str, int]:
        """What the native plan function reads. Options that an op has not are not among them."""
        options = {
            "first_k": self.first_k,
            "gated": self.gated,
            "split_rows": self.split_rows,
            "concat_rows": self.concat_rows,
        }
        return {
            "world": self.world,
            "outer": self.outer,
            "inner": self.inner,
            "k": self.k,
            "n": self.n,
            "dtype": _native.dtype_number(self.dtype),
            "out_dtype": _native.dtype_number(self.out_dtype),
            "transpose_rhs": self.transpose_rhs,
            **{name: int(value) for name, value in options.items() if value},
        }


#: Elements of 128 bytes, the most that :func:`alignment` looks for.
MOST_ALIGNMENT = 8 * UNIT


def alignment(xs: Sequence[Any], ws: Sequence[Any]) -> int:
    """The largest power of two of elements, up to 128 bytes, whose multiples k and n of all
    operands are: how the rows of x, and those of w as it is and transposed, are aligned."""
    sizes = [x.shape[-1] for x in xs] + [size for w in ws for size in w.shape]
    return math.gcd(MOST_ALIGNMENT, *sizes)


#: Rows of all peers up to which an all_gather_matmul on full links has all rows in one raster
#: group, if ranks share tiles (InOneRasterGroup of cc/gpu/gemm_choice.h). Its first tiles wait for
#: all rows, so all that one kernel saves is the start of another, such a part of the product
#: (docs/experiments/0033).
MOST_IN_ONE_GROUP = 1600
SAVED_IN_ONE_GROUP = 1 / 16


def why_decomposed(
    m: int,
    machine: Machine,
    *,
    fewest: int,
    ranks: int = 1,
    width: int = 0,
    alignment: int = MOST_ALIGNMENT,
    gathers: bool = False,
) -> str | None:
    """Why m rows of all ranks take longer on GPUs in one kernel than as XLA's product and one of
    jflux's collectives, in words; None if they do not. By docs/experiments/0020 and 0033.

    Args:
      m: rows of all ranks.
      machine: its links.
      fewest: of rows; with fewer the product is over before communication could be hidden in it.
      ranks: how many there are.
      width: of w on each rank, columns of an all-gather or rows of a reduce-scatter. 0: a rank's
        rows are whole tiles. Where they are not, the last row of tiles takes as long as a full one,
        which cuBLAS does better, and communication may not make up for.
      alignment: :func:`alignment` of the operands. cuBLAS takes 4 times as long below a unit, and
        then does not do the last row of tiles better; few rows take it 1.8 times as long where
        operands' rows are odd units, and the kernel as long as any others.
      gathers: whether rows are gathered, and tiles wait for theirs.
    """
    if m < fewest and alignment != UNIT:
        return f"{m} rows are fewer than {fewest}: there is no time to hide communication in"
    if TILE_ROWS < m < 512:
        return f"{m} rows: from {TILE_ROWS + 1} to 511 the decomposed form was measured faster"
    if m <= TILE_ROWS or width == 0 or alignment < UNIT or m // ranks % TILE_ROWS == 0:
        return None
    padding = -m % (2 * TILE_ROWS) / m  # clusters have two tiles
    saved = machine.balanced_columns / width * (ranks - 1) / ranks
    peers = m * (ranks - 1) // ranks
    if gathers and ranks > 2 and peers <= MOST_IN_ONE_GROUP * machine.links:
        saved = min(saved, SAVED_IN_ONE_GROUP)
    if padding > saved:
        return (
            f"{m} rows leave {-m % (2 * TILE_ROWS)} rows of padding in tiles of "
            f"{2 * TILE_ROWS}, which would cost more than the overlap saves"
        )
    return None


#: Elements that rows which must be padded become whole multiples of: 64 bytes, for rows of odd
#: units take the kernels up to 1.5 times as long to load (docs/experiments/0053).
PADDED_TO = 4 * UNIT


def padded(size: int) -> int:
    """k or n as the GPU kernels take it: whole units, and if there is padding, whole 64 bytes."""
    return size if size % UNIT == 0 else size + -size % PADDED_TO


def in_whole_units(sizes: Sizes) -> Sizes:
    """The sizes of a call whose k and n are padded, as the GPU kernels take it."""
    first_k = padded(sizes.first_k)
    k = first_k + padded(sizes.k - sizes.first_k)
    n = 2 * padded(sizes.n // 2) if sizes.gated else padded(sizes.n)
    return dataclasses.replace(sizes, first_k=first_k, k=k, n=n)


def in_rank_order(sizes: Sizes) -> Sizes:
    """The sizes of a padded call whose ranks are brought in front of leading rows, where a tile's
    rows would straddle leading indices."""
    sizes = in_whole_units(sizes)
    if sizes.outer == 1 or sizes.inner % TILE_ROWS == 0:
        return sizes
    return dataclasses.replace(sizes, outer=1, inner=sizes.outer * sizes.inner)


class PlanFunction(Protocol):
    """As `_lowering.PlanRule`, which this module cannot import."""

    def __call__(self, arrays: Arrays, params: Any, machine: Machine) -> Plan: ...


class SizesRule(Protocol):
    """(operands' types, params) -> the product as its kernel sees it."""

    def __call__(self, arrays: Arrays, params: Any) -> Sizes: ...


class DecomposedRule(Protocol):
    """(operands' types, params, machine) -> why the decomposed form is faster on GPUs, or None."""

    def __call__(self, arrays: Arrays, params: Any, machine: Machine) -> str | None: ...


class UnsupportedRule(Protocol):
    """(operands' types, params, platform) -> why no kernel takes the call, or None."""

    def __call__(self, arrays: Arrays, params: Any, platform: str) -> str | None: ...


def plan_product(
    sizes: Sizes,
    machine: Machine,
    *,
    why_slower: Callable[[], str | None],
    tuned: _tuning.Choice | str | None,
    kernel: str | None,
    why_not: Callable[[], Plan | None] = lambda: None,
) -> Plan:
    """The plan of a product that kernels take: a pure function.

    Args:
      sizes: of the call.
      machine: what it runs on.
      why_slower: () -> why the decomposed form is faster, by the heuristic; None if it is not.
      tuned: what was measured for the call: a configuration, or "decomposed", or nothing.
      kernel: why the call takes the kernel whatever is faster, in words, or None.
      why_not: () -> the plan of a call that the GPU kernel does not take, or None.
    """
    if kernel is None and tuned == _tuning.DECOMPOSED:
        return _dispatch.decomposed("measured to be faster: in a tuning table")
    if not machine.on_gpus:
        words = kernel or "the CPU back end runs every call that it takes"
        native = machine.native_plan(sizes.op, sizes.native())
        return _dispatch.fused(words, native, key=sizes.key)
    if kernel is None and tuned is None and (why := why_slower()):
        return _dispatch.decomposed(why)
    if (other := why_not()) is not None:
        return other
    call = sizes.native()
    if isinstance(tuned, _tuning.Choice):
        call |= dataclasses.asdict(tuned)
        reason = f"configuration of the tuning table for {machine.device_kind or 'this GPU'}"
    else:
        reason = "configuration of the heuristic"
    native = machine.native_plan(sizes.op, call)
    return _dispatch.fused(f"{kernel}; {reason}" if kernel else reason, native, key=sizes.key)


def why_kernel(params: Any) -> str | None:
    """Why a call takes the kernel whatever is faster: it was planned before, or the user asks."""
    if params.prepared is not None:
        return params.prepared
    return "jflux.config(always=True)" if _config.config.always else None


def plan_rule(
    *,
    sizes: SizesRule,
    unsupported: UnsupportedRule,
    why_decomposed: DecomposedRule,
    on_gpus: Callable[[Sizes], Sizes] = in_whole_units,
) -> PlanFunction:
    """The plan rule of a product, for `_lowering.Rules`.

    Args:
      sizes: of a call.
      unsupported: why no kernel takes it.
      why_decomposed: why the decomposed form is faster.
      on_gpus: the sizes of the call in the form that the op's `canonical` gives it on GPUs.
    """

    def plan(arrays: Arrays, params: Any, machine: Machine) -> Plan:
        call = sizes(arrays, params)
        if machine.on_gpus:
            call = on_gpus(call)

        def why_slower() -> str | None:
            return why_decomposed(arrays, params, machine)

        tuned = _tuning.lookup(call.key, machine.device_kind if machine.on_gpus else "")
        kernel = why_kernel(params)
        if why := unsupported(arrays, params, machine.platform):
            by_heuristic = machine.on_gpus and tuned is None and why_slower() is not None
            if kernel is None and (tuned == _tuning.DECOMPOSED or by_heuristic):
                return _dispatch.reference(why)  # nobody would expect the kernel
            return _dispatch.unsupported(why)
        return plan_product(call, machine, why_slower=why_slower, tuned=tuned, kernel=kernel)

    return plan


def attributes(sizes: Sizes, plan: Plan) -> dict[str, Any]:
    """The FFI attributes that all products have."""
    return {
        "choice": plan.choice,
        "inner": np.int64(sizes.inner),
        "outer": np.int64(sizes.outer),
        "senders": np.int64(plan.senders),
        "transpose_rhs": sizes.transpose_rhs,
    }


# ---- Forms that the kernels take -----------------------------------------------------------------

#: How a padded call says so (`prepared`).
PADDED = "k and n are padded, to rows of whole 64 bytes"
RANK_MAJOR = "rows are put in rank order first"
SIDE_BY_SIDE = "weights are put side by side first"
END_TO_END = "terms are put end to end first"
EPILOGUE_AFTER = "XLA applies the epilogue after the kernel"


def in_units(xs: Sequence[Any], ws: Sequence[Any]) -> bool:
    """Whether the rows of all operands are whole 16-byte units, as the CUDA kernels need them."""
    return alignment(xs, ws) >= UNIT


def pad_last(array: Any, dimensions: int) -> Any:
    """An array whose last dimensions are padded with zeros, where they are no whole units."""
    sizes = array.shape[array.ndim - dimensions :]
    widths = [(0, 0)] * (array.ndim - dimensions) + [(0, padded(s) - s) for s in sizes]
    return jnp.pad(array, widths)


def pad_to_units(xs: Sequence[Any], ws: Sequence[Any]) -> list[Any]:
    """All of xs and of ws, k and n padded with zeros."""
    return [*(pad_last(x, 1) for x in xs), *(pad_last(w, 2) for w in ws)]


# ---- Batching ------------------------------------------------------------------------------------


def widen(w: Any, batch: int, transpose_rhs: bool) -> tuple[Any, Callable[[Any], Any]]:
    """A batched w as one wider w, and how to get the batch back: y [..., b * n] -> [..., b, n]."""
    n_axis = columns_axis(transpose_rhs)
    w = jnp.moveaxis(w, batch, n_axis)
    b, n = w.shape[n_axis : n_axis + 2]
    wide = w.reshape(*w.shape[:n_axis], b * n, *w.shape[n_axis + 2 :])
    return wide, lambda y: y.reshape(*y.shape[:-1], b, n)


def bind_one_by_one(primitive: Any, operands: Any, dims: Any, *, params: Any) -> Any:
    """The batching rule of a primitive whose calls nothing puts together."""
    bind = functools.partial(primitive.bind, params=params)
    return batch_one_by_one(bind, operands, dims)


def batch_one_by_one(bind: Any, operands: Any, dims: Any) -> tuple[list[Any], list[int]]:
    """The calls of a batch, one after the other."""
    batched = [jnp.moveaxis(a, d, 0) for a, d in zip(operands, dims, strict=True) if d is not None]

    def one(batched: Any) -> Any:
        rest = iter(batched)
        return bind(*(a if d is None else next(rest) for a, d in zip(operands, dims, strict=True)))

    results = jax.lax.map(one, batched)
    return results, [0] * len(results)
