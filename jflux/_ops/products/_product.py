"""Code that the products of x and w share: checks, the forms that kernels take, and batching.
_product_plan.py plans them."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Required, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jax.typing import DTypeLike

from ... import _config, _native
from ..._call import gpu_code
from ..._call.plans import Arrays, Machine
from ..._native import MAX_RANKS, MAX_WEIGHTS
from ..._ranks import meshes
from .. import _lax, _scaled
from .._scaled import Scales
from .._spec import Layout
from ._product_plan import padded

if TYPE_CHECKING:
    from .._recipe import AnyRecipe  # which imports this module, by `quantize`

#: The name that `jax.checkpoint` policies know a product's y by, where it has no activation.
PRODUCT = "jflux_product"
#: The product whose types the others take, but for those that name their own.
USUAL = "grouped_matmul"


def dtypes(op: str = USUAL) -> dict[str, frozenset[np.dtype]]:
    """The types of operands that the kernels of products take, by platform; not float32 on GPUs,
    which few take, as TF32 (`why_not_tf32`)."""
    return {
        "cpu": _native.dtypes(op, "cpu"),
        "cuda": _native.dtypes(op, "cuda") - {np.dtype(np.float32)},
    }


DTYPES = dtypes()

#: Why `lax` takes a call of operands with scales.
NO_KERNEL_SCALES = "no kernel takes operands with a scale yet"
#: Why `lax` takes a call under ``check_vma=True``.
NO_KERNEL_REDUCES = "{}: kernels have no types of sums that are still to be made"


class Options(TypedDict, total=False):
    """Arguments of every product on which the type of its result does not depend."""

    axis_name: Required[meshes.AxisName]
    transpose_rhs: bool
    preferred_element_type: DTypeLike | None
    precision: lax.PrecisionLike
    recipe: AnyRecipe | None
    mesh: Mesh | AbstractMesh | None
    x_spec: PartitionSpec | None


def is_for_lax(
    op: str, axis_name: meshes.AxisName, *operands: Any, no_kernel: str | None = NO_KERNEL_SCALES
) -> bool:
    """Whether `lax` takes a call, which it does in four cases:

    - the axis has one rank, or is `vmap`'s;
    - operands have scales (:class:`jflux.Scaled`), and `no_kernel` says why kernels do not take
      them;
    - an operand is "unreduced": the sum over ranks is still to be made;
    - an operand is "reduced": the sum over ranks of its gradient is still to be made. Along axes
      other than the call's, along which another operand varies, it can be cast to vary instead.
    """
    if meshes.axis_size(axis_name) == 1:
        return True
    if not meshes.is_manual(axis_name):
        _config.fall_back(op, meshes.why_not_manual(axis_name))
        return True
    if no_kernel is not None and any(isinstance(a, _scaled.Scaled) for a in operands):
        _config.fall_back(op, no_kernel)
        return True
    arrays = [a for a in operands if isinstance(a, jax.Array)]
    types = [jax.typeof(a) for a in arrays]
    reduced = frozenset().union(*(t.manual_axis_type.reduced for t in types))
    kept = reduced - (meshes.varying(arrays) - frozenset(meshes.as_tuple(axis_name)))
    if not kept and not any(t.manual_axis_type.unreduced for t in types):
        return False
    _config.fall_back(op, NO_KERNEL_REDUCES.format(", ".join(t.str_short() for t in types)))
    return True


def warn_if_same(op: str, axis_name: meshes.AxisName, name: str, x: Any, *others: Any) -> None:
    """Says, once for each shape of x, that a sum over ranks has the same term N times: no factor of
    it varies over an axis, as types know under ``check_vma=True``. One factor may be the same, as
    are tokens that meet other weights on each rank."""
    axes = [axis for axis in meshes.as_tuple(axis_name) if meshes.axis_size(axis) > 1]
    same = [axis for axis in axes if axis not in meshes.varying((x, *others))]
    if same and meshes.tracks_vma(axis_name):
        what = f"{name} {x.shape} and w are" if others else f"{name} {x.shape} is"
        _config.say_once(
            logging.WARNING,
            f"jflux.{op}: {what} the same on all ranks along {', '.join(map(repr, same))}: the "
            f"sum over ranks has its term {meshes.axis_size(tuple(same))} times. Split operands by "
            "the in_specs of shard_map, or name only the axes that they are split over",
        )


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


def check_contraction(
    op: str,
    x: Any,
    w: Any,
    layout: Layout,
    axis_name: meshes.AxisName,
    *,
    transpose_rhs: bool,
) -> None:
    """Raises if x's last dimension, as it is multiplied, is not w's k.

    Args:
      layout: of the call, by which the ranks along `axis_name` split x and w.
    """
    k = w.shape[1 if transpose_rhs else 0]
    if x.shape[-1] != k:
        message = (
            f"jflux.{op}: x {x.shape} and w {w.shape} do not contract: x has {x.shape[-1]} "
            f"columns, w takes {k} ({transpose_rhs=}). Shapes are one rank's"
        )
        small, large = sorted((x.shape[-1], k))
        if small and large % small == 0:
            # One of them is whole where the op takes a part, or the other way round.
            names = meshes.as_tuple(axis_name)
            axis = names[0] if len(names) == 1 else names
            wanted = [
                f"{name} is P({', '.join(repr(axis if i == at else None) for i in range(ndim))})"
                for name, ndim, at in (
                    ("x", x.ndim, layout.rows["x"]), ("w", w.ndim, layout.others["w"])
                )
            ]  # fmt: skip
            message += f"; in in_specs, {', '.join(wanted)}, beside other axes"
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
    if _scaled.any_of(*operands):
        return _scaled.result_dtype(preferred_element_type)
    dtypes = sorted({np.dtype(a.dtype).name for a in operands})
    if preferred_element_type is None and len(operands) > 2 and len(dtypes) > 1:
        raise TypeError(
            f"jflux.{op}: several weights or products must be of one type, got "
            f"{', '.join(dtypes)}; cast them, or pass preferred_element_type"
        )
    pair = (operands[0].dtype, operands[-1].dtype)
    return _lax.dot_dtype(*pair, preferred_element_type, precision)


def default_dtype(op: str, x: Any, ws: Sequence[Any]) -> np.dtype | None:
    """The type of the results of an `op` that takes operands of 8 bits, if its call names none.
    None: that of `lax.dot_general`, or of scaled operands."""
    row = _native.FORMATS.get(x.dtype.name)
    is_wide = row is None or row.is_wide
    if is_wide or isinstance(x, _scaled.Scaled) or x.dtype not in _native.dtypes(op, "cpu"):
        return None
    found = {_native.result_dtype(x.dtype, w.dtype) for w in ws}
    return found.pop() if len(found) == 1 else None


def without_gradients(op: str, *operands: jax.Array) -> list[jax.Array]:
    """The operands, which raise where their tangents are asked for if they are floats."""
    return [_constant(op, a) if jnp.issubdtype(a.dtype, jnp.floating) else a for a in operands]


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _constant(op: str, a: jax.Array) -> jax.Array:
    return a


@_constant.defjvp
def _no_tangents(op: str, primals: Any, tangents: Any) -> Any:
    (a,) = primals
    raise TypeError(
        f"jflux.{op}: operands of {a.dtype} have no gradient, which would be rounded to 8 bits "
        "without a scale; cast x and w to bfloat16 first"
    )


def constant_if_whole(out: np.dtype, *operands: Any) -> list[Any]:
    """The operands of a call with results of this type, without gradients if that is one of whole
    numbers: `jax.custom_jvp` would ask for their tangents."""
    if jnp.issubdtype(out, jnp.inexact):
        return list(operands)
    return [jax.lax.stop_gradient(a) for a in operands]


#: Why GPU kernels of most ops do not take float32.
NO_FLOAT32 = "operands are float32, which the kernels of this op do not multiply on GPUs"


def kernel_takes(
    x: Any, w: Any, out: np.dtype, world: int, platform: str, op: str = USUAL,
    *, no_float32: str | None = NO_FLOAT32,
) -> str | None:  # fmt: skip
    """Why no kernel on `platform` takes these operands, or None.

    Args:
      no_float32: why those of GPUs do not take float32; None: they do.
    """
    if why := _native.why_not_dtypes(op, platform, x.dtype, out, w=w.dtype):
        return why
    if platform == "cuda" and x.dtype == np.float32 and no_float32 is not None:
        return no_float32
    if platform == "cuda" and x.shape[-1] * x.dtype.itemsize >= 1 << 31:
        return "a row of x has 2 GiB or more"
    if platform == "cuda" and total_rows(x) * world >= 1 << 31:
        return f"{total_rows(x)} rows on each of {world} ranks, kernels take fewer than 2^31 in all"
    if world > MAX_RANKS:
        return f"{world} ranks, kernels take up to {MAX_RANKS}"
    return None


def why_not_8_bits(arrays: Arrays, params: Any, machine: Machine) -> str | None:
    """Why kernels do not take a product of 8 bits, or None."""
    if not machine.on_gpus or arrays[0].dtype.itemsize > 1:
        return None
    if machine.arch < gpu_code.HOPPER:
        return f"operands are {arrays[0].dtype.name}, which Hopper's kernels alone take"
    return why_imprecise(params.precision, params.scales, arrays[0].dtype)


def why_not_scaled(arrays: Arrays, params: Any, machine: Machine) -> str | None:
    """The same of an op whose portable kernels take 8 bits too."""
    dtype = arrays[0].dtype
    if not machine.on_gpus or dtype.itemsize > 1 or machine.arch >= gpu_code.HOPPER:
        return why_not_8_bits(arrays, params, machine)
    if why := why_not_portable(dtype, params.scales, machine.arch):
        return why
    return why_imprecise(params.precision, params.scales, dtype)


def why_not_portable(dtype: np.dtype, scales: Scales, arch: int) -> str | None:
    """Why portable code for `arch` does not take operands of 8 bits with such scales, or None."""
    if scales.in_kernels.has_blocks:
        return "scales of blocks are for Hopper's kernels alone"
    return gpu_code.why_not_multiplied(dtype, arch)


def why_imprecise(precision: Any, scales: Scales, dtype: np.dtype) -> str | None:
    """Why kernels that multiply 8 bits do not take a call with this precision and x of `dtype`, or
    None. With scales of blocks they add in float32; they add int8 in int32."""
    exact = scales.in_kernels.has_blocks or dtype == np.int8
    if _scaled.is_highest(precision) and not exact:
        return "tensor cores keep fewer bits of sums of 8-bit floats than precision=HIGHEST wants"
    return None


def why_no_kernel(
    pairs: Iterable[tuple[Any, Any]], params: Any, platform: str, op: str = USUAL,
    *, no_float32: str | None = NO_FLOAT32,
) -> str | None:  # fmt: skip
    """Why the kernels cannot take one of these x and w, or None; as :func:`kernel_takes`."""
    of_call = (params.out_dtype, params.world, platform, op)
    reasons = (kernel_takes(x, w, *of_call, no_float32=no_float32) for x, w in pairs)
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


def zeros(shape: tuple[int, ...], dtype: Any, *like: Any, over: meshes.AxisName = ()) -> jax.Array:
    """Zeros that depend on nothing, and vary as the result of an op over these axes, of the
    operands `like`."""
    return meshes.vary(jnp.zeros(shape, dtype), meshes.varying(like) | meshes.tracked(over))


def flops(x: Any, w: Any, transpose_rhs: bool) -> int:
    """The FLOPs of ``x @ w``."""
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


# ---- Forms that the kernels take -----------------------------------------------------------------

#: How a padded call says so (`prepared`).
PADDED = "k and n are padded, to rows of whole 64 bytes"
RANK_MAJOR = "rows are put in rank order first"
SIDE_BY_SIDE = "weights are put side by side first"
END_TO_END = "terms are put end to end first"
K_MAJOR = "w is transposed first: tensor cores take operands of 8 bits along k alone"
EPILOGUE_AFTER = "XLA applies the epilogue after the kernel"


def also_prepared(params: Any, how: str) -> Any:
    """Params of a call that was prepared so, after what it was prepared by before."""
    before = [] if params.prepared is None else [params.prepared]
    return dataclasses.replace(params, prepared=", ".join([*before, how]))


def pad_last(array: Any, dimensions: int, dtype: Any) -> Any:
    """An array whose last dimensions are padded with zeros, where they are no whole vectors of
    `dtype`: that of x and w, also for a bias or another operand that has n columns."""
    sizes = array.shape[array.ndim - dimensions :]
    more = [(0, padded(size, dtype) - size) for size in sizes]
    widths = [(0, 0)] * (array.ndim - dimensions) + more
    return jnp.pad(array, widths)


def pad_to_vectors(xs: Sequence[Any], ws: Sequence[Any]) -> list[Any]:
    """[*xs, *ws], with k and n padded with zeros to whole vectors."""
    return [*(pad_last(x, 1, x.dtype) for x in xs), *(pad_last(w, 2, w.dtype) for w in ws)]


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


def interleaved(a: Any, dim: int | None, count: int) -> Any:
    """[count, M, ...] or [M, ...] -> [M count, ...]: the batch's rows beside each other, so that
    groups stay whole."""
    a = jnp.broadcast_to(a[:, None], (*a.shape[:1], count, *a.shape[1:])) if dim is None else a
    return (a if dim is None else jnp.moveaxis(a, dim, 1)).reshape(-1, *a.shape[2:])


def batch_one_by_one(bind: Any, operands: Any, dims: Any) -> tuple[list[Any], list[int]]:
    """The calls of a batch, one after the other."""
    batched = [jnp.moveaxis(a, d, 0) for a, d in zip(operands, dims, strict=True) if d is not None]

    def one(batched: Any) -> Any:
        rest = iter(batched)
        return bind(*(a if d is None else next(rest) for a, d in zip(operands, dims, strict=True)))

    results = jax.lax.map(one, batched)
    return results, [0] * len(results)
