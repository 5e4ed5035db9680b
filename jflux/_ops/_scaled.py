"""Operands of 8 bits with a scale: the type, what stands for it, and what products and collectives
do with it in plain `lax`."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

#: `lax`'s own, whatever stands in its place later (`_lax`).
dot_general = lax.dot_general

#: Elements of a dimension that share an entry of a block's scale.
BLOCK = 128

#: The types of values.
TYPES = tuple(np.dtype(t) for t in (jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.int8))

#: The type of a product of scaled operands, unless the call says otherwise.
RESULT = np.dtype(jnp.bfloat16)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scaled:
    """An array of 8 bits and its scale: it means ``values.astype(float32) * scale``.

    A pytree of two leaves, so that it goes through `jax.jit`, `jax.vmap` and `shard_map`, and into
    checkpoints. Every product of jflux takes one in place of x and of w; the terms are those of
    DeepSeek-V3 (arXiv 2412.19437, section 3.3).

    Attributes:
      values: [..., rows, columns]; float8_e4m3fn, float8_e5m2 or int8.
      scale: float32, with as many dimensions. Each of its sizes is 1 (one entry for the whole
        dimension), that of the values (one for each index), or that divided by 128, rounded up (one
        for each block of 128).

    Examples:
      >>> x = jflux.quantize(jnp.full((4, 256), 3.0), jnp.float8_e4m3fn, block=(1, 128))
      >>> x.shape, x.scale.shape
      ((4, 256), (4, 2))
      >>> float(x.dequantize()[0, 0])
      3.0
    """

    values: jax.Array
    scale: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        """The values' shape."""
        return tuple(self.values.shape)

    @property
    def ndim(self) -> int:
        """How many dimensions the values have, and the scale."""
        return self.values.ndim

    @property
    def dtype(self) -> np.dtype:
        """The values' type."""
        return np.dtype(self.values.dtype)

    @property
    def size(self) -> int:
        """How many values there are."""
        return math.prod(self.shape)

    @property
    def T(self) -> Scaled:  # noqa: N802, as jax.Array's
        """Both with their last two dimensions exchanged."""
        return Scaled(jnp.swapaxes(self.values, -1, -2), jnp.swapaxes(self.scale, -1, -2))

    def dequantize(self, dtype: DTypeLike = jnp.float32) -> jax.Array:
        """``values * scale`` in float32, rounded to `dtype`."""
        scale = spread(self.scale, self.shape)
        return (self.values.astype(jnp.float32) * scale).astype(dtype)


#: An operand of a product.
Operand = jax.Array | Scaled


# ---- What stands for one -------------------------------------------------------------------------


def of(op: str, name: str, operand: Any) -> Any:
    """An operand, as a :class:`Scaled` if it stands for one: one, a pair (values, scale), a
    `qwix.QArray`, or Transformer Engine's tensor with one scale.

    Raises:
      TypeError, ValueError: for one whose values or scale do not fit.
    """
    found = _as_scaled(op, name, operand)
    if found is not None:
        _check(op, name, found)
    return operand if found is None else found


def of_each(op: str, name: str, operand: Any) -> Any:
    """:func:`of` for an operand that may be a sequence of such."""
    if not isinstance(operand, tuple | list) or _as_scaled(op, name, operand) is not None:
        return of(op, name, operand)
    each = [of(op, f"{name}[{i}]", one) for i, one in enumerate(operand)]
    return each if any(isinstance(one, Scaled) for one in each) else operand


def of_product(op: str, x: Any, w: Any) -> tuple[Any, Any]:
    """x and w of a product, each of which may be several."""
    x, w = of_each(op, "x", x), of_each(op, "w", w)
    if any_of(x, w):
        whole = {one.dtype == jnp.int8 for each in (x, w) for one in _several(each)}
        if len(whole) > 1:
            raise TypeError(f"jflux.{op}: one of x and w is int8; both are int8 or none")
    return x, w


def _several(operand: Any) -> Sequence[Any]:
    return operand if isinstance(operand, tuple | list) else [operand]


def any_of(*operands: Any) -> bool:
    """Whether one of these, or of the sequences among these, is scaled.

    Raises:
      TypeError: where only some are.
    """
    each = [one for operand in operands for one in _several(operand)]
    scaled = [isinstance(one, Scaled) for one in each]
    if any(scaled) and not all(scaled):
        other = each[scaled.index(False)]
        raise TypeError(
            "jflux: of a product's operands all are scaled or none, got "
            f"{getattr(other, 'dtype', type(other).__name__)} beside a jflux.Scaled; "
            "jflux.quantize makes one. In a pair (values, scale), scale is a float32 array"
        )
    return any(scaled)


def _as_scaled(op: str, name: str, operand: Any) -> Scaled | None:
    if isinstance(operand, Scaled):
        return operand
    if isinstance(operand, tuple | list):
        if len(operand) != 2 or any(
            isinstance(one, Scaled) or not hasattr(one, "dtype") for one in operand
        ):
            return None
        # Two weights have one type, so that nothing else has a type of 8 bits beside float32.
        values, scale = operand
        is_pair = np.dtype(values.dtype) in TYPES and scale.dtype == jnp.float32
        return Scaled(values, scale) if is_pair else None
    if hasattr(operand, "qvalue") and hasattr(operand, "scale"):  # qwix.QArray
        if getattr(operand, "zero_point", None) is not None:
            raise ValueError(f"jflux.{op}: {name} has a zero point; quantise it symmetrically")
        found = Scaled(operand.qvalue, operand.scale.astype(jnp.float32))
        sizes = zip(found.shape, found.scale.shape, strict=True)
        if any(count not in (1, size) and size % BLOCK != 0 for size, count in sizes):
            # Tiles are of one size, and 128 does not divide the dimension.
            raise ValueError(f"jflux.{op}: the scale of {name} is not one of blocks of {BLOCK}")
        return found
    if hasattr(operand, "scale_inv") and hasattr(operand, "data"):  # ScaledTensor1x
        if getattr(operand, "is_colwise", False) or operand.scale_inv.size != 1:
            raise ValueError(
                f"jflux.{op}: {name} is one of Transformer Engine's tensors that jflux does not "
                "read: it takes one scale, of rows"
            )
        scale = operand.scale_inv.astype(jnp.float32).reshape((1,) * operand.data.ndim)
        return Scaled(operand.data, scale)
    return None


def _check(op: str, name: str, operand: Scaled) -> None:
    values, scale = operand.values, operand.scale
    if np.dtype(values.dtype) not in TYPES:
        raise TypeError(
            f"jflux.{op}: the values of {name} are {values.dtype}, "
            f"not {', '.join(t.name for t in TYPES)}"
        )
    if scale.dtype != jnp.float32:
        raise TypeError(f"jflux.{op}: the scale of {name} is {scale.dtype}, not float32")
    fits = scale.ndim == values.ndim and all(
        count in (1, size, -(-size // BLOCK))
        for count, size in zip(scale.shape, values.shape, strict=True)
    )
    if not fits:
        raise ValueError(
            f"jflux.{op}: the scale of {name} has shape {tuple(scale.shape)}, its values have "
            f"{tuple(values.shape)}: each of the scale's sizes is 1, that of the values, or that "
            f"divided by {BLOCK}, rounded up"
        )


# ---- Products ------------------------------------------------------------------------------------


def without_derivative(what: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator of functions of arrays alone: to differentiate one raises, and says `what` to do
    instead. Values of 8 bits would round a gradient to 8 bits."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        inner = jax.custom_jvp(function)

        @inner.defjvp
        def _(primals: Any, tangents: Any) -> Any:
            raise TypeError(what)

        return inner

    return decorate


@without_derivative(
    "jflux: a product of scaled operands has no derivative, since it would be rounded to 8 bits: "
    "where they are constants, pass jax.lax.stop_gradient of them"
)
def constants(*operands: Scaled) -> tuple[Scaled, ...]:
    """The operands, which raise where they are differentiated."""
    return operands


class Scales(enum.IntEnum):
    """What the scales of a product's operands are to a kernel (cc/gpu/gemm_config.h)."""

    NONE = 0
    #: Of x's rows and w's columns: all of a sum over k shares them.
    OF_SUMS = 1
    #: With an entry for each block of k: of x's rows, and of blocks of w's columns.
    OF_BLOCKS = 2
    #: The same, of x's rows and w's columns.
    OF_VECTORS = 3
    #: OF_SUMS that kernels take as OF_BLOCKS (`repeated`): the call wants all bits of its sums.
    PROMOTED = 4

    @property
    def has_blocks(self) -> bool:
        """Whether there is an entry for each block of k."""
        return self in (Scales.OF_BLOCKS, Scales.OF_VECTORS)

    @property
    def in_kernels(self) -> Scales:
        """What they are to a kernel."""
        return Scales.OF_BLOCKS if self is Scales.PROMOTED else self


def is_highest(precision: lax.PrecisionLike) -> bool:
    """Whether a call itself asks for all bits of its sums."""
    wanted = precision if isinstance(precision, tuple) else (precision,)
    return any(str(one).lower() in _HIGHEST for one in wanted)


#: As `lax` names it.
_HIGHEST = ("highest", "float32")


def scales_of(
    x: Scaled, *ws: Scaled, transpose_rhs: bool, precision: lax.PrecisionLike = None
) -> Scales:
    """The kind of these scales. `precision`: of a call whose op takes PROMOTED."""
    k_of_w = 1 if transpose_rhs else 0
    of_blocks = all(has_column_blocks(w, transpose_rhs) for w in ws)
    if x.scale.shape[-1] > 1 or any(w.scale.shape[k_of_w] > 1 for w in ws):
        return Scales.OF_BLOCKS if of_blocks else Scales.OF_VECTORS
    promotes = is_highest(precision) and why_no_blocks(x, *ws) is None
    return Scales.PROMOTED if promotes and of_blocks else Scales.OF_SUMS


def has_column_blocks(w: Scaled, transpose_rhs: bool) -> bool:
    """Whether blocks of columns share entries of the scale."""
    n_of_w = 0 if transpose_rhs else 1
    return w.scale.shape[n_of_w] <= -(-w.shape[n_of_w] // BLOCK)


def repeated(
    of_rows: jax.Array, of_columns: Sequence[jax.Array], k: int
) -> tuple[jax.Array, list[jax.Array]]:
    """Scales that are PROMOTED, as OF_BLOCKS: each for all blocks of k."""
    blocks = -(-k // BLOCK)
    columns = [scale[::BLOCK, None] for scale in of_columns]
    return (
        jnp.broadcast_to(of_rows, (*of_rows.shape[:-1], blocks)),
        [jnp.broadcast_to(scale, (scale.shape[0], blocks)) for scale in columns],
    )


def why_no_blocks(x: Scaled, *ws: Scaled) -> str | None:
    """Why no kernel takes scales of blocks of these types, or None."""
    if x.dtype == jnp.int8:
        return "kernels take scales of blocks of 8-bit floats, x is int8"
    for w in ws:
        if w.dtype != jnp.float8_e4m3fn:
            return f"kernels take scales of blocks of a w of float8_e4m3fn, w is {w.dtype}"
    return None


def why_no_kernel(
    x: Scaled, *ws: Scaled, transpose_rhs: bool, takes_vectors: bool = False
) -> str | None:
    """Why no kernel takes these scales, or None. `takes_vectors`: of an op that has kernels for
    `Scales.OF_VECTORS`."""
    scales = scales_of(x, *ws, transpose_rhs=transpose_rhs)
    if not scales.has_blocks:
        return None
    entries = [x.scale.shape[-1], *(w.scale.shape[1 if transpose_rhs else 0] for w in ws)]
    if max(entries) > -(-x.shape[-1] // BLOCK):
        return "a scale has an entry for each index of k"
    if why := why_no_blocks(x, *ws):
        return why
    if scales is Scales.OF_BLOCKS or (takes_vectors and x.dtype == jnp.float8_e4m3fn):
        return None
    return f"kernels take blocks of {BLOCK} of k of w only for {BLOCK} columns each"


def for_kernel(x: Any, w: Any, transpose_rhs: bool) -> tuple[str | None, Scales, list[jax.Array]]:
    """(why no kernel takes the scales of two operands, or None; the kind of these; x and w, and the
    scales of x's rows and of w's columns, if there are any)."""
    if not isinstance(x, Scaled):
        return None, Scales.NONE, [x, w]
    x, w = constants(x, w)
    if why := why_no_kernel(x, w, transpose_rhs=transpose_rhs):
        return why, Scales.NONE, []
    scales = scales_of(x, w, transpose_rhs=transpose_rhs)
    scaled_by = [of_rows(x, scales), of_columns(w, transpose_rhs, scales)]
    return None, scales, [x.values, w.values, *scaled_by]


def of_rows(x: Scaled, scales: Scales) -> jax.Array:
    """The scale of x's rows, [..., rows, 1], or [..., rows, blocks of k]."""
    entries = -(-x.shape[-1] // BLOCK) if scales.has_blocks else 1
    return jnp.broadcast_to(spread(x.scale, x.shape[:-1]), (*x.shape[:-1], entries))


def of_columns(w: Scaled, transpose_rhs: bool, scales: Scales) -> jax.Array:
    """The scale of w's columns, [n], of its blocks, [blocks of n, blocks of k], or of its vectors,
    [n, blocks of k]."""
    scale = w.scale if transpose_rhs else w.scale.T
    n, k = w.shape if transpose_rhs else w.shape[::-1]
    if scales is Scales.OF_BLOCKS:
        return jnp.broadcast_to(scale, (-(-n // BLOCK), -(-k // BLOCK)))
    if scales is Scales.OF_VECTORS:
        return jnp.broadcast_to(over_elements(scale, 0, n), (n, -(-k // BLOCK)))
    return jnp.broadcast_to(over_elements(scale, 0, n).reshape(-1), (n,))


def product(
    x: jax.Array,
    w: jax.Array,
    of_rows: jax.Array,
    of_columns: jax.Array,
    precision: lax.PrecisionLike,
    transpose_rhs: bool,
) -> jax.Array:
    """The product of values and scales as kernels take them, in float32."""
    operands = as_operands(x, w, of_rows, of_columns, transpose_rhs)
    return _matmul(*operands, precision, transpose_rhs)


def as_operands(
    x: jax.Array, w: jax.Array, of_rows: jax.Array, of_columns: jax.Array, transpose_rhs: bool
) -> tuple[Scaled, Scaled]:
    """Operands of which kernels take these values and scales."""
    scale = of_columns if of_columns.ndim == 2 else of_columns[:, None]
    return Scaled(x, of_rows), Scaled(w, scale if transpose_rhs else scale.T)


def result_dtype(preferred_element_type: DTypeLike | None) -> np.dtype:
    """The type of a product of scaled operands."""
    if preferred_element_type is None:
        return RESULT
    dtype = np.dtype(jax.dtypes.canonicalize_dtype(preferred_element_type))
    if not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize < 2:
        raise TypeError(
            f"jflux: a product of scaled operands is of a real floating type, of 16 bits at least, "
            f"not {dtype}"
        )
    return dtype


def matmul(x: Scaled, w: Scaled, precision: lax.PrecisionLike, transpose_rhs: bool) -> jax.Array:
    """``x @ w`` in float32: x [..., k], w [k, n] or, with `transpose_rhs`, [n, k].

    Values are multiplied and summed as they are, over all of k, or over its blocks where a scale
    has several entries along k. Each sum is multiplied by x's scale, and then by w's.
    """
    x, w = constants(x, w)
    return _matmul(x, w, precision, transpose_rhs)


def _matmul(x: Scaled, w: Scaled, precision: lax.PrecisionLike, transpose_rhs: bool) -> Any:
    k_of_w = 1 if transpose_rhs else 0
    # Scales as [..., rows, k] and [k, n].
    x_scale = spread(x.scale, x.shape[:-1])
    w_scale = w.scale.T if transpose_rhs else w.scale
    w_scale = over_elements(w_scale, 1, w.shape[1 - k_of_w])

    def product(x_values: jax.Array, w_values: jax.Array, sx: jax.Array, sw: jax.Array) -> Any:
        contract = (((x.ndim - 1,), (k_of_w,)), ((), ()))
        sums = _dot(x_values, w_values, contract, precision)
        return sums * sx * jnp.expand_dims(sw, tuple(range(x.ndim - 1)))

    k = x.shape[-1]
    if k == 0:
        return jnp.zeros((*x.shape[:-1], w.shape[1 - k_of_w]), jnp.float32)
    blocks = max(x_scale.shape[-1], w_scale.shape[0])
    if blocks == 1:
        return product(x.values, w.values, x_scale, w_scale[0])
    if k in (x_scale.shape[-1], w_scale.shape[0]):
        raise ValueError(
            "jflux: a scale has an entry for each index of k, which a product cannot take out of "
            f"its sum; it may have one for each block of {BLOCK}"
        )

    def block(i: Any, size: int = BLOCK) -> jax.Array:
        def cut(a: jax.Array, axis: int) -> jax.Array:
            return lax.dynamic_slice_in_dim(a, i * BLOCK, size, axis)

        def entry(scale: jax.Array, axis: int) -> jax.Array:
            at = 0 if scale.shape[axis] == 1 else i
            return lax.dynamic_slice_in_dim(scale, at, 1, axis)

        sx, sw = entry(x_scale, x_scale.ndim - 1), entry(w_scale, 0)[0]
        return product(cut(x.values, x.ndim - 1), cut(w.values, k_of_w), sx, sw)

    # The first block is not in the loop: its sum varies over the mesh axes that all of them do.
    total = block(0)
    total = lax.fori_loop(1, k // BLOCK, lambda i, total: total + block(i), total)
    return total + block(k // BLOCK, k % BLOCK) if k % BLOCK else total


def _dot(x: jax.Array, w: jax.Array, dimensions: Any, precision: lax.PrecisionLike) -> jax.Array:
    """Sums in float32, those of whole numbers in int32."""
    if x.dtype != w.dtype and jnp.int8 in (x.dtype, w.dtype):
        raise TypeError(f"jflux: x is {x.dtype} and w is {w.dtype}; both are int8 or none")
    if x.dtype == jnp.int8:
        return whole_sums(x, w, dimensions).astype(jnp.float32)
    return dot_general(x, w, dimensions, precision=precision, preferred_element_type=jnp.float32)


def whole_sums(x: jax.Array, w: jax.Array, dimensions: Any) -> jax.Array:
    """The product of int8 by int8 over one dimension of each, in int32."""
    ((x_axis,), (w_axis,)), _ = dimensions
    x, w = in_fours(x, w, x_axis, w_axis)
    return dot_general(x, w, dimensions, preferred_element_type=jnp.int32)


def in_fours(x: jax.Array, w: jax.Array, x_axis: int, w_axis: int) -> Sequence[jax.Array]:
    """Operands of int8 whose k, their axes of these numbers, is padded to a multiple of four. On
    GPUs XLA's product adds the last k % 4 terms several times (jaxlib 0.11.2, k < 64)."""
    short = -x.shape[x_axis] % 4
    if short == 0:
        return x, w
    return [
        jnp.pad(a, [(0, short if i == axis else 0) for i in range(a.ndim)])
        for a, axis in ((x, x_axis), (w, w_axis))
    ]


# ---- Collectives ---------------------------------------------------------------------------------


def exchange(
    operand: Scaled, world: int, split: int | None, concat: int | None, send: Callable[..., Any]
) -> Scaled:
    """What a collective that moves data does to a scaled operand.

    Args:
      split, concat: of the collective (`Collective`).
      send: the collective of an array.
    """
    scale = sent_scale(operand, world, split, concat)
    return Scaled(sent_values(operand.values, send), send(scale))


def sent_values(values: jax.Array, send: Callable[..., Any]) -> jax.Array:
    """``send(values)``, of 8 bits as bytes: not every collective has types of 8-bit floats."""
    if values.dtype.itemsize > 1:
        return send(values)
    sent = send(lax.bitcast_convert_type(values, jnp.int8))
    return lax.bitcast_convert_type(sent, values.dtype)


def sent_scale(operand: Scaled, world: int, split: int | None, concat: int | None) -> jax.Array:
    """An operand's scale, as the collective sends it."""
    last = operand.ndim - 1
    scale = operand.scale
    if split is not None:
        size = operand.shape[split]
        if scale.shape[split] == 1:  # each rank gets it
            scale = _repeated(scale, split, world)
        elif size > 0 and scale.shape[split] != size and size // world % BLOCK != 0:
            _check_whole(split == last, size // world)
            scale = over_elements(scale, split, size)
    if concat is not None:
        size = operand.shape[concat] // (world if concat == split else 1)
        count = scale.shape[concat] // (world if concat == split else 1)
        if count == 1 and concat == last and size > 1:
            _check_whole(True, size)
            scale = jnp.repeat(scale, size // BLOCK, concat)
        elif count == 1 and size > 0:
            scale = jnp.repeat(scale, size, concat)
        elif size > 0 and count != size and size % BLOCK != 0:
            _check_whole(concat == last, size)
            scale = over_elements(scale, concat, operand.shape[concat])
    for dimension in range(last):  # so that a result can be split in any of them
        if scale.shape[dimension] == 1 and dimension not in (split, concat):
            scale = _repeated(scale, dimension, operand.shape[dimension])
    return scale


def _check_whole(is_k: bool, size: int) -> None:
    if is_k and size % BLOCK != 0:
        raise ValueError(
            f"jflux: each rank has {size} of k, and scales of its own: that must be whole blocks "
            f"of {BLOCK}"
        )


def _repeated(scale: jax.Array, dimension: int, times: int) -> jax.Array:
    """A scale of size 1 in this dimension, as one of `times`."""
    shape = [*scale.shape[:dimension], times, *scale.shape[dimension + 1 :]]
    return jnp.broadcast_to(scale, shape)


def spread(scale: jax.Array, sizes: tuple[int, ...]) -> jax.Array:
    """:func:`over_elements` in each of the first dimensions, of these sizes."""
    for dimension, size in enumerate(sizes):
        scale = over_elements(scale, dimension, size)
    return scale


def over_elements(scale: jax.Array, dimension: int, size: int) -> jax.Array:
    """A scale with an entry for each of `size` indices where it had one for each block; one of size
    1 is left as it is."""
    if scale.shape[dimension] in (1, size):
        return scale
    # jnp.repeat would ask how the result is sharded.
    wide = jnp.expand_dims(scale, dimension + 1)
    shape = [*scale.shape[: dimension + 1], BLOCK, *scale.shape[dimension + 1 :]]
    blocks = jnp.broadcast_to(wide, shape)
    count = scale.shape[dimension] * BLOCK
    repeated = blocks.reshape(*scale.shape[:dimension], count, *scale.shape[dimension + 1 :])
    return lax.slice_in_dim(repeated, 0, size, axis=dimension)


# ---- Shardings -----------------------------------------------------------------------------------


def specs(name: str, operand: Any, spec: PartitionSpec, mesh: Any) -> Any:
    """The shardings of an operand whose values have this one: a pytree with the operand's
    structure.

    Raises:
      ValueError: where a shard has no whole blocks of a scale.
    """

    def of_one(one: Any) -> Any:
        if not isinstance(one, Scaled):
            return spec
        entries: Sequence[Any] = (*spec, *[None] * (one.ndim - len(spec)))
        kept = []
        for size, count, entry in zip(one.shape, one.scale.shape, entries, strict=True):
            names = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
            shards = math.prod(mesh.shape[n] for n in names)
            if count not in (1, size) and shards > 1 and size % (shards * BLOCK) != 0:
                raise ValueError(
                    f"{name} has a scale for blocks of {BLOCK}, which {shards} shards of a "
                    f"dimension of {size} do not divide; its shape is {one.shape}"
                )
            kept.append(None if count == 1 else entry)
        return Scaled(spec, PartitionSpec(*kept))  # type: ignore[arg-type]

    return jax.tree.map(of_one, operand, is_leaf=lambda one: isinstance(one, Scaled))
