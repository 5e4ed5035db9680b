"""A dispatch and a combine that send one row of a token to a rank, and one row back: the rank sums
the results of the token's experts before it sends them.

Two linear maps connect a rank's tokens [T, ...] with the tokens that have come to a rank
[N T, ...]: `came` and `returned`, each the transpose of the other. The maps of
:mod:`.moe_rows` connect the tokens that have come with the rows of experts [R, ...]. A dispatch is
`came` and then `spread`, a combine is `combine` and then `returned`, and their derivatives consist
of the same maps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..._call import derivatives
from ..._ranks.meshes import AxisName
from .._epilogue import sum_dtype
from . import moe_rows
from ._destinations import Sizes
from ._exchanged_rows import Way, axes_of, came_rows, handle_of, on_first, summed


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PartialSumsHandle:
    """How a dispatch with partial sums moved its rows. Integers, int32.

    Attributes:
      token: [min(k, N) T], the token of each row that this rank sends; -1: none.
      out: the sizes and places of these rows between ranks.
      sent_row: [T, k], which of these rows went to the rank of a slot's expert; -1: none, or an
        earlier slot of the token has it.
      slot: [R], which of the ``N T k`` slots of the rows that have come is an expert's row; -1:
        none. (A masked layout is [E_local C] here.)
      expert_row: [N T, k], the expert's row of each of these slots; -1: none.
      first: [T, k], the slot of the token whose row this slot shares; -1: it has none.
      axis_names: of the dispatch, static.
    """

    token: jax.Array
    out: Sizes
    sent_row: jax.Array
    slot: jax.Array
    expert_row: jax.Array
    first: jax.Array
    axis_names: tuple[Any, ...] = dataclasses.field(metadata={"static": True})

    def dispatch(self, x: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
        """For each row of an expert its row of x [T, H], and its weight of [T, k]: [R, H], [R]."""
        (tokens,) = came(Way(self.axis_names), self, x)
        ones = jnp.ones(self.expert_row.shape, sum_dtype(x.dtype))
        rows = moe_rows.spread(tokens, ones, self.slot, self.expert_row)
        return rows, _weights_at_experts(self.axis_names, self, weights)[1]

    def combine(
        self,
        y: jax.Array,
        weights: jax.Array | None,
        dtype: Any,
        wire: str | None = None,
        grad_wire: str | None = None,
    ) -> jax.Array:
        """The weighted sum of each token's rows of y [R, D], [T, D], in float32 (float64 for
        float64). Without weights, the plain sum. A wire quantises a rank's sums as they are
        summed."""
        if weights is None:
            w = jnp.ones(self.expert_row.shape, sum_dtype(y.dtype))
        else:
            w, _ = _weights_at_experts(self.axis_names, self, weights)
        wide = None if wire is None else sum_dtype(y.dtype)
        sums = moe_rows.combine(y, w, self.slot, self.expert_row, wide)
        (total,) = returned(Way(self.axis_names, wire, grad_wire, y.dtype), self, sums)
        return total


def _weights_at_experts(
    axis_name: AxisName, handle: PartialSumsHandle, weights: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Weights [T, k] at the experts: of the slots that have come [N T, k], and of the rows [R]."""
    (w,) = came(Way(axis_name), handle, on_first(handle.first, weights))
    one = jnp.ones((w.size, 1), w.dtype)
    # Each slot is spread by itself (k = 1), so that the transpose gathers and does not scatter.
    row = moe_rows.spread(w.reshape(-1, 1), one, handle.slot, handle.expert_row.reshape(-1, 1))
    return w, row[:, 0]


# ---- Between ranks -------------------------------------------------------------------------------


def _came(way: Way, handle: PartialSumsHandle, x: jax.Array) -> Sequence[jax.Array]:
    """The rows of x [T, ...] at the ranks that they were sent to: [N T, ...]."""
    return [came_rows(way, x, handle)]


def _returned(way: Way, handle: PartialSumsHandle, rows: jax.Array) -> Sequence[jax.Array]:
    """For each token the sum of its rows [N T, ...] on all ranks, in the order in which top-k names
    the ranks first: [T, ...], in float32 (float64 for float64)."""
    back = way.move(rows, handle.token.shape[0], handle.out.back())
    return [summed(back, handle.sent_row)]


def _came_backward(handle: PartialSumsHandle, cts: Any, wanted: Any, way: Way) -> Sequence[Any]:
    (dx,) = returned(way.of_derivative(), handle, cts[0])
    return None, dx.astype(wanted[1].dtype)


def _returned_backward(handle: PartialSumsHandle, cts: Any, wanted: Any, way: Way) -> Sequence[Any]:
    # The gradient has the type of the rows, or of what they are sums of. Moving rows keeps their
    # values, so rounding before the transfer gives the same bits as rounding after it.
    of_rows = wanted[1].dtype
    (dx,) = came(way.of_derivative(), handle, cts[0].astype(way.dtype or of_rows))
    return None, dx.astype(of_rows)


came: Callable[..., Sequence[Any]] = derivatives.differentiated(
    _came,
    kept=handle_of,
    tangents=lambda handle, tangents, way: came(way.of_derivative(), handle, tangents[1]),
    backward=_came_backward,
    axes=axes_of,
)
returned: Callable[..., Sequence[Any]] = derivatives.differentiated(
    _returned,
    kept=handle_of,
    tangents=lambda handle, tangents, way: returned(way.of_derivative(), handle, tangents[1]),
    backward=_returned_backward,
    axes=axes_of,
)
