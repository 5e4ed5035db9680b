"""quantize of rows that belong to groups, for products that sum over the rows of each group: of
their transpose, in which each group begins a block. Kernels: cc/ops/quantize."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._call import local_ops
from .._call.forms import Op, ShapeDtype
from .._call.plans import Arrays, Plan
from .._call.primitives import make_primitive
from . import _quantize
from ._recipe import Format
from ._scaled import BLOCK, Scaled
from .products import _product

#: What kernels make of rows of groups, and of their transpose alone.
FORM, SQUARES = (Format(jnp.float8_e4m3fn, (rows, BLOCK)) for rows in (1, BLOCK))
#: The most groups that kernels take (cc/core/group_tiles.h).
MOST_GROUPS = 2047


class Transposed(NamedTuple):
    """The transpose of rows of groups: each group begins a block of 128, and zeros fill up its last
    one. Blocks of no group hold anything.

    Attributes:
      values: [columns, 128 * blocks].
      scale: by `FORM` [blocks, columns], by `SQUARES` [blocks of columns, blocks], as kernels read
        it.
    """

    values: jax.Array
    scale: jax.Array

    @property
    def has_squares(self) -> bool:
        """Whether it is by `SQUARES`."""
        columns, rows = self.values.shape
        return self.scale.shape != (rows // BLOCK, columns)

    def vectors(self) -> jax.Array:
        """The scale, as by `FORM`."""
        if not self.has_squares:
            return self.scale
        return jnp.repeat(self.scale, BLOCK, axis=0)[: self.values.shape[0]].T

    def rows(self, dtype: Any) -> jax.Array:
        """What it means, [128 * blocks, columns]."""
        scale = jnp.repeat(self.vectors(), BLOCK, axis=0)
        return (self.values.T.astype(jnp.float32) * scale).astype(dtype)


@dataclasses.dataclass(frozen=True)
class Params:
    """A call, less its operands: x [rows, columns][, its scale], group_sizes.

    Attributes:
      form: of the transpose.
      copy: x's own copy by `FORM` is a result, too. Rows of no group are not written.
      again: x has a scale.
      fill: blocks of no group are zeros.
    """

    form: Format
    copy: bool
    again: bool
    fill: bool

    @property
    def plain(self) -> _quantize.Params:
        """The call on rows without groups."""
        dtype, block, rounds = np.dtype(FORM.dtype), self.form.block, FORM.power_of_two
        return _quantize.Params(dtype, block, True, rounds, False, self.copy, self.again)


def most_blocks(rows: int, groups: int) -> int:
    """The blocks that groups of so many rows have at most (MostGroupBlocks of
    cc/core/group_tiles.h)."""
    return min(rows, (rows + groups * (BLOCK - 1)) // BLOCK)


def padded_sizes(sizes: jax.Array) -> jax.Array:
    """Those of groups of whole blocks."""
    return (jnp.maximum(sizes, 0) + BLOCK - 1) // BLOCK * BLOCK


def transposed(x: jax.Array | Scaled, sizes: jax.Array, form: Format = FORM) -> Transposed:
    """The transpose of x [rows, columns] by `FORM` or `SQUARES`. Rows of no group are not read."""
    return _bound(x, sizes, form, copy=False)[1]


def quantized(x: jax.Array, sizes: jax.Array, form: Format = FORM) -> tuple[Scaled, Transposed]:
    """(x by `FORM`, of which rows of no group may be anything; its transpose by `form`), x being
    read once."""
    # Where JAX looks for NaN, somebody has to write the copy's last rows.
    if local_ops.fills_unread():
        return FORM.quantize(x), transposed(x, sizes, form)
    copy, turned = _bound(x, sizes, form, copy=True)
    assert copy is not None
    return copy, turned


def _bound(
    x: jax.Array | Scaled, sizes: jax.Array, form: Format, copy: bool
) -> tuple[Scaled | None, Transposed]:
    params = Params(form, copy, isinstance(x, Scaled), fill=local_ops.fills_unread())
    arrays = [x.values, x.scale] if isinstance(x, Scaled) else [x]
    *own, values, scale = _primitive.bind(*arrays, sizes, params=params)
    return Scaled(*own) if copy else None, Transposed(values, scale)


def _rows_of_blocks(rows: int, sizes: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(the row of each column of the transpose, whether there is one)."""
    ends = jnp.minimum(jnp.cumsum(jnp.maximum(sizes, 0)), rows)
    begins = jnp.concatenate([jnp.zeros(1, ends.dtype), ends[:-1]])
    ends_of_blocks = jnp.cumsum(padded_sizes(ends - begins))
    at = lax.iota(ends.dtype, BLOCK * most_blocks(rows, sizes.shape[0]))
    group = jnp.searchsorted(ends_of_blocks, at, side="right")
    group = jnp.minimum(group, sizes.shape[0] - 1)
    first = ends_of_blocks[group] - padded_sizes(ends - begins)[group]
    row = begins[group] + at - first
    return row, row < ends[group]


def _in_lax(arrays: Arrays, params: Params) -> list[jax.Array]:
    x, *scale, sizes = arrays
    x = lax.optimization_barrier(x)  # as `_quantize.in_lax`
    wide = Scaled(x, *scale).dequantize() if params.again else x.astype(jnp.float32)
    row, is_there = _rows_of_blocks(x.shape[0], sizes)
    taken = jnp.take(wide, row, axis=0, mode="clip")
    taken = jnp.where(is_there[:, None], taken, 0)
    values, of_blocks, _ = _quantize._of_one(taken.T, None, params.plain)
    of_rows = dataclasses.replace(params.plain, block=FORM.block)
    copy = _quantize._of_one(wide, None, of_rows)[:2] if params.copy else ()
    return [*copy, values, of_blocks.T if params.form == FORM else of_blocks]


def _shapes(arrays: Arrays, params: Params) -> Sequence[ShapeDtype]:
    x, sizes = arrays[0], arrays[-1]
    rows, columns = x.shape
    blocks, dtype = most_blocks(rows, sizes.shape[0]), np.dtype(FORM.dtype)
    own = FORM.shapes(x.shape) if params.copy else ()
    scale = (blocks, columns) if params.form == FORM else (-(-columns // BLOCK), blocks)
    return [*own, ((columns, BLOCK * blocks), dtype), (scale, np.dtype(np.float32))]


def _why_not(arrays: Arrays, params: Params, platform: str) -> str | None:
    x, *scale, sizes = arrays
    if sizes.shape[0] > MOST_GROUPS:
        return f"{sizes.shape[0]} groups, the kernel takes up to {MOST_GROUPS}"
    # A group's blocks are whole, whatever the number of rows.
    rows = BLOCK if x.shape[0] > 0 else 0
    of_block = [jax.ShapeDtypeStruct((rows, x.shape[1]), x.dtype)]
    of_block += [jax.ShapeDtypeStruct((1, one.shape[1]), one.dtype) for one in scale]
    return _quantize.why_not(of_block, params.plain, platform)


def _attributes(arrays: Arrays, params: Params, plan: Plan) -> dict[str, Any]:
    return _quantize.attributes(params.plain, grouped=True, fill=params.fill)


def _batch(primitive: Any, operands: Any, dims: Any, *, params: Params) -> Any:
    bind = functools.partial(primitive.bind, params=params)
    return _product.batch_one_by_one(bind, operands, dims)


_primitive = make_primitive(
    Op(
        name=_quantize.OP,
        result_shapes=_shapes,
        reference=_in_lax,
        forms=(
            local_ops.kernel(
                _quantize.OP,
                why_not=_why_not,
                attributes=_attributes,
                why_not_portable=_quantize.why_not_portable,
                checked_on_gpus=True,
                on_cpus=False,
                is_optional=True,
            ),
        ),
        batch=_batch,
        is_local=True,
    )
)
