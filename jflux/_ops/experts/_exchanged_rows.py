"""How rows move between ranks in a dispatch and a combine: the handle, linear maps of rows, and
their derivatives."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..._call import derivatives
from ..._ranks.meshes import AxisName
from .. import _wire
from .._epilogue import sum_dtype
from ..collectives.ragged_all_to_all import ragged_all_to_all
from . import moe_rows
from ._destinations import Sizes


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Handle:
    """How a dispatch moved its rows: all that :func:`jflux.moe_combine` needs of it. Integers,
    int32.

    Attributes:
      token: [min(k, N) T], the token of each row that this rank sends; -1: none.
      out: of these rows, between ranks.
      slot: [R], which of the ``N T k`` slots of the rows that have come is an expert's row; -1:
        none. (A masked layout is [E_local C] here.)
      back: [min(k, E_local) N T], the expert's row of each row that goes back; -1: none.
      home: of these rows, between ranks.
      first: [T, k], the slot of the token whose row this slot shares; -1: it has none.
      row: [T, k], which of the rows that come back is the slot's; -1: none.
      axis_names: of the dispatch, static.
    """

    token: jax.Array
    out: Sizes
    slot: jax.Array
    back: jax.Array
    home: Sizes
    first: jax.Array
    row: jax.Array
    axis_names: tuple[Any, ...] = dataclasses.field(metadata={"static": True})

    def dispatch(self, x: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
        """For each row of an expert its row of x [T, H], and its weight of [T, k]: [R, H], [R]."""
        return spread(Way(self.axis_names), self, x, weights)

    def combine(
        self,
        y: jax.Array,
        weights: jax.Array | None,
        dtype: Any,
        wire: str | None = None,
        grad_wire: str | None = None,
    ) -> jax.Array:
        """The weighted sum of each token's rows of y [R, D], [T, D], in `dtype` or a wider type.
        Without weights each row counts once."""
        if weights is None:
            weights = one_for_each_row(self, y.dtype)
        (total,) = combined(Way(self.axis_names, wire, grad_wire), self, y, weights)
        return total


@dataclasses.dataclass(frozen=True)
class Way:
    """How rows travel, of a call or of its derivatives.

    Attributes:
      wire, grad_wire: formats of rows, and of those of derivatives: each row is quantised by itself
        (`_wire.py`), a rank's own too. None: as they are.
      dtype: of cotangents of rows, as they travel, where it is not that of the rows.
    """

    axis_name: AxisName
    wire: str | None = None
    grad_wire: str | None = None
    dtype: Any = None

    def of_derivative(self) -> Way:
        return dataclasses.replace(self, wire=self.grad_wire)

    def move(self, x: jax.Array, rows: int, sizes: Sizes) -> jax.Array:
        """Rows of x [R, D] to other ranks, in float32 where they come in a wire."""
        if self.wire is None:
            return move(self.axis_name, x, rows, sizes)
        data = move(self.axis_name, _wire.packed(x.astype(jnp.float32), self.wire), rows, sizes)
        return _wire.unpacked(data, self.wire, x.shape[1])


class LevelsHandle(NamedTuple):
    """How a dispatch over nodes moved its rows.

    Attributes:
      between: between counterparts on all nodes.
      inside: between the ranks of a node; its tokens are the rows that have come from all nodes.
    """

    between: Handle
    inside: Handle


def move(axis_name: AxisName, x: jax.Array, rows: int, sizes: Sizes, fill: int = 0) -> jax.Array:
    """Rows of x to other ranks: [rows, ...], with `fill` where none has come."""
    output = jnp.full((rows, *x.shape[1:]), fill, x.dtype)
    return ragged_all_to_all(
        x, output, sizes.starts, sizes.sent, sizes.places, sizes.received, axis_name=axis_name
    )


def one_for_each_row(handle: Handle, dtype: Any) -> jax.Array:
    """Weights that count each row of a token once, [T, k]."""
    own = jnp.arange(handle.first.shape[1])[None]
    return (handle.first == own).astype(sum_dtype(dtype))


def rows_or_zeros(x: jax.Array, index: jax.Array) -> jax.Array:
    """x[index], and zeros for -1."""
    found = jnp.take(x, jnp.maximum(index, 0), axis=0, mode="clip")
    return jnp.where((index >= 0).reshape(index.shape + (1,) * (x.ndim - 1)), found, 0)


def on_first(first: jax.Array, weights: jax.Array) -> jax.Array:
    """[T, k]: slots that share a row add their weights up on the first one."""
    j = jnp.arange(weights.shape[1])
    shared = (first[:, :, None] == j[None, None]) & (first >= 0)[:, :, None]
    return jnp.sum(jnp.where(shared, weights[:, :, None], 0), axis=1)


def came_rows(way: Way, x: jax.Array, handle: Any) -> jax.Array:
    """The rows of x [T, ...] that tokens send, as they come: handle.slot says whose they are."""
    received = handle.out.sent.shape[0] * x.shape[0]
    return way.move(rows_or_zeros(x, handle.token), received, handle.out).astype(x.dtype)


def tokens_to_experts(way: Way, handle: Handle, x: jax.Array) -> list[jax.Array]:
    """A row of x [T, H] for each row of an expert, [R, H]."""
    k = handle.first.shape[1]
    token = jnp.where(handle.slot >= 0, handle.slot // k, -1)
    return [rows_or_zeros(came_rows(way, x, handle), token)]


def _slots_to_experts(axis_name: AxisName, handle: Handle, weights: jax.Array) -> list[jax.Array]:
    """The sum of the weights [T, k] of the slots of each row of an expert, [R]."""
    weights = on_first(handle.first, weights)
    return [rows_or_zeros(came_rows(Way(axis_name), weights, handle).ravel(), handle.slot)]


def _experts_to_slots(way: Way, y: jax.Array, handle: Handle) -> jax.Array:
    """The rows of y [R, ...] that slots have, as they come back: handle.row says whose they are."""
    return way.move(rows_or_zeros(y, handle.back), handle.row.size, handle.home)


def summed(rows: jax.Array, row: jax.Array, weights: jax.Array | None = None) -> jax.Array:
    """The sum of each token's rows, which `row` [T, k] numbers (-1: none), times its weights [T, k]
    if there are any: [T, H], in float32 (float64 for float64), slot after slot."""
    dtype = sum_dtype(rows.dtype)
    if weights is None:
        weights = jnp.ones(row.shape, dtype)
    return moe_rows.combine(rows, weights.astype(dtype), row[:, 0], row, dtype)


def _rows_combined(way: Way, handle: Handle, y: jax.Array, weights: jax.Array) -> list[jax.Array]:
    """The weighted sum of each token's rows of y [R, D]: [T, D]."""
    return [summed(_experts_to_slots(way, y, handle), handle.row, weights)]


def _to_slots(axis_name: AxisName, numbers: jax.Array, handle: Handle) -> jax.Array:
    """numbers[row] for the row of each slot, [T, k]; `numbers` is [R]."""
    return rows_or_zeros(_experts_to_slots(Way(axis_name), numbers, handle), handle.row)


# ---- Derivatives ---------------------------------------------------------------------------------
#
# Each of the three functions takes a handle, and then arrays in which it is linear. The backward
# pass of each calls the others, so there are derivatives of any order.


def spread(
    way: Way, handle: Handle, x: jax.Array, weights: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """For each row of an expert its row of x, and its weight."""
    (rows,), (row_weights,) = (
        rows_of_tokens(way, handle, x),
        _weights(way.axis_name, handle, weights),
    )
    return rows, row_weights


def axes_of(way: Way) -> AxisName:
    return way.axis_name


def handle_of(operands: Any, params: Any) -> Any:
    """The handle, which is all that the derivatives keep of a function that is linear in its other
    operands."""
    return operands[0]


def _rows_tangents(handle: Handle, tangents: Any, way: Way) -> Sequence[Any]:
    return rows_of_tokens(way.of_derivative(), handle, tangents[1])


def _rows_backward(handle: Handle, cts: Any, wanted: Any, way: Way) -> Sequence[Any]:
    (ct,) = cts
    (dx,) = combined(way.of_derivative(), handle, ct, one_for_each_row(handle, ct.dtype))
    return None, dx.astype(ct.dtype)


def _weights_tangents(handle: Handle, tangents: Any, axis_name: AxisName) -> Sequence[Any]:
    return _weights(axis_name, handle, tangents[1])


def _weights_backward(handle: Handle, cts: Any, wanted: Any, axis_name: AxisName) -> Sequence[Any]:
    return None, _to_slots(axis_name, cts[0], handle)


def _combine_tangents(kept: Any, tangents: Any, way: Way) -> Sequence[Any]:
    handle, y, weights = kept
    _, dy, dweights = tangents
    way = way.of_derivative()
    terms = [] if dy is None else [*combined(way, handle, dy, weights)]
    terms += [] if dweights is None else [*combined(way, handle, y, dweights)]
    return [derivatives.total(terms)]


def _combine_backward(kept: Any, cts: Any, wanted: Any, way: Way) -> Sequence[Any]:
    handle, y, weights = kept
    (ct,) = cts
    # The result is rounded to y's type, so its cotangent loses nothing by it.
    rows, row_weights = spread(way.of_derivative(), handle, ct.astype(y.dtype), weights)
    wide = rows.astype(ct.dtype)
    dy = (row_weights[:, None] * wide).astype(y.dtype)
    if wanted[2] is None:
        return None, dy, None
    products = jnp.sum(wide * y.astype(ct.dtype), axis=1)
    return None, dy, _to_slots(way.axis_name, products.astype(weights.dtype), handle)


rows_of_tokens = derivatives.differentiated(
    tokens_to_experts,
    kept=handle_of,
    tangents=_rows_tangents,
    backward=_rows_backward,
    axes=axes_of,
)
_weights = derivatives.differentiated(
    _slots_to_experts, kept=handle_of, tangents=_weights_tangents, backward=_weights_backward
)
combined = derivatives.differentiated(
    _rows_combined,
    kept=lambda operands, way: tuple(operands),
    tangents=_combine_tangents,
    backward=_combine_backward,
    axes=axes_of,
)
