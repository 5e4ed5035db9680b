"""all_gather and reduce_scatter whose data travel in 8 bits: data are quantised, values and scales
travel as the bytes of one exchange, and what has come is dequantised.

    all_gather       y_r = value * scale of each rank's x, the rank's own too: all ranks have the
                     same bits
    reduce_scatter   the others' parts as they were quantised, the rank's own as it is, added in
                     rank order, in float32, and rounded once

Blocks are of 128 elements of the flattened x, of a reduce_scatter of each rank's part of it, as
those of `_quantized_sum.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from ... import _config
from ..._call import explain, plans
from ..._call.derivatives import differentiated
from ..._ranks import meshes
from .._scaled import BLOCK, Scaled
from . import _quantized_sum, exchange, wire_report

#: With fewer bytes that reach a rank data travel as they are, as in an all_reduce of fewer
#: (kLeastWireBytes in cc/ops/all_reduce/all_reduce.h).
LEAST_BYTES = 2 << 20
#: Bytes of a block: its values, and its scale.
_BLOCK_BYTES = BLOCK + 4


@dataclasses.dataclass(frozen=True)
class Way:
    """How data of a call travel.

    Attributes:
      to: of an all_gather, as :func:`jflux.all_gather` takes it.
      wire, grad_wire: formats of data, and of those of derivatives; None: as they are.
      is_reference: in `lax`'s collectives.
    """

    axis_name: Any
    groups: Any
    to: str = "varying"
    wire: str | None = None
    grad_wire: str | None = None
    is_reference: bool = False

    def of_derivative(self, to: str = "varying") -> Way:
        return dataclasses.replace(self, wire=self.grad_wire, to=to)

    def exchange(self, op: str, x: jax.Array, **options: Any) -> jax.Array:
        name = f"{op}_reference" if self.is_reference else op
        found: jax.Array = getattr(exchange, name)(
            x, axis_name=self.axis_name, axis_index_groups=self.groups, **options
        )
        return found


def all_gather(x: jax.Array, way: Way) -> jax.Array:
    """All ranks' x: [N, *x.shape]."""
    ranks, world = meshes.ranks_of(way.axis_name, way.groups)
    return _run("all_gather", _gather, x, way, world * x.size * x.dtype.itemsize)


def reduce_scatter(x: jax.Array, way: Way) -> jax.Array:
    """This rank's part of the sum of all ranks' x [N, ...]: [...]."""
    return _run("reduce_scatter", _scatter, x, way, x.size * x.dtype.itemsize)


def _run(op: str, f: Any, x: jax.Array, way: Way, size: int) -> jax.Array:
    """A call, as it is if its data are few."""
    wire = way.wire
    small = size < LEAST_BYTES and not _config.config.always and not way.is_reference
    if way.wire is not None and (small or x.size == 0):
        why = f"exact: {size} bytes reach a rank, for which a quantised wire does not pay"
        way = dataclasses.replace(way, wire=None)
        (y,) = f(way, x)
        explain.note_once(op, (x,), (y,), plans.decomposed(why))
    else:
        (y,) = f(way, x)
    if wire is not None and wire_report.is_wanted():
        (exact,) = f(dataclasses.replace(way, wire=None, grad_wire=None), x)
        _, world = meshes.ranks_of(way.axis_name, way.groups)
        wire_report.note(op, x, wire, y, exact, world)
    return y


# ---- Bytes ---------------------------------------------------------------------------------------


def packed(rows: jax.Array, wire: str) -> jax.Array:
    """Rows [..., n] of numbers as bytes: values of their blocks, and then the blocks' scales."""
    *lead, size = rows.shape
    blocks = jnp.pad(rows, [(0, 0)] * len(lead) + [(0, -size % BLOCK)])
    quantized: Scaled = _quantized_sum.format_of(wire).quantize(blocks.reshape(*lead, -1, BLOCK))
    values = lax.bitcast_convert_type(quantized.values, jnp.uint8).reshape(*lead, -1)
    scales = lax.bitcast_convert_type(quantized.scale, jnp.uint8).reshape(*lead, -1)
    return jnp.concatenate([values, scales], -1)


def unpacked(data: jax.Array, wire: str, size: int) -> jax.Array:
    """The first `size` numbers of each row of :func:`packed`, float32."""
    *lead, count = data.shape
    blocks = count // _BLOCK_BYTES
    values = data[..., : blocks * BLOCK].reshape(*lead, blocks, BLOCK)
    scales = data[..., blocks * BLOCK :].reshape(*lead, blocks, 1, 4)
    quantized = Scaled(
        lax.bitcast_convert_type(values, jnp.dtype(wire)),
        lax.bitcast_convert_type(scales, jnp.float32),
    )
    return quantized.dequantize().reshape(*lead, -1)[..., :size]


# ---- With derivatives ----------------------------------------------------------------------------


def _gathered(way: Way, x: jax.Array) -> tuple[jax.Array]:
    if way.wire is None:
        return (way.exchange("all_gather", x, axis=0, to=way.to),)
    wire, (ranks, world) = way.wire, meshes.ranks_of(way.axis_name, way.groups)

    def gather(x: jax.Array) -> jax.Array:
        # XLA may leave out the cast that made x.
        sent = packed(lax.optimization_barrier(x).astype(jnp.float32).ravel(), wire)
        came = way.exchange("all_gather", sent, axis=0, to=way.to)
        return unpacked(came, wire, x.size).reshape(-1, *x.shape).astype(x.dtype)

    same = way.to == "invarying" and meshes.tracks_vma(way.axis_name)
    return (_unsharded(gather, x, (world, *x.shape), lambda spec: (None, *spec), ranks, same),)


def _scattered(way: Way, x: jax.Array) -> tuple[jax.Array]:
    if way.wire is None:
        return (way.exchange("reduce_scatter", x, scatter_dimension=0),)
    wire, (ranks, world) = way.wire, meshes.ranks_of(way.axis_name, way.groups)

    def scatter(x: jax.Array) -> jax.Array:
        own = lax.optimization_barrier(x).astype(jnp.float32).reshape(world, -1)
        sent = packed(own, wire)
        came = way.exchange("all_to_all", sent, split_axis=0, concat_axis=0, tiled=True)
        parts = unpacked(came, wire, own.shape[1])
        total = _quantized_sum.sum_of_parts(own, parts, ranks)
        return total.reshape(x.shape[1:]).astype(x.dtype)

    return (_unsharded(scatter, x, x.shape[1:], lambda spec: spec[1:], ranks),)


def _unsharded(
    f: Callable[[jax.Array], jax.Array],
    x: jax.Array,
    shape: tuple[int, ...],
    spec_of: Callable[[tuple[Any, ...]], tuple[Any, ...]],
    ranks: Any,
    same: bool = False,
) -> jax.Array:
    """f(x), of this shape. Blocks are of the flattened x, and types do not say how that is split
    over Explicit axes: f does not see these. `spec_of`: of the result, from x's.
    `same`: whether the result does not vary over the ranks."""
    of_x = jax.typeof(x)
    if not meshes.is_sharded([of_x]):
        return f(x)
    names, _ = meshes.axes_and_groups(ranks)
    varying = of_x.manual_axis_type.varying
    varying = varying - {*names} if same else varying | {*names}
    spec = PartitionSpec(*spec_of(tuple(of_x.sharding.spec)))
    result = of_x.update(
        shape=shape, weak_type=False, sharding=of_x.sharding.update(spec=spec),
        manual_axis_type=of_x.manual_axis_type.update(varying=varying),
    )  # fmt: skip
    (y,) = meshes.unsharded_inside(lambda x: [f(x)], [result])(x)
    return y


def _gather_tangents(kept: Any, tangents: Sequence[Any], way: Way) -> Sequence[jax.Array]:
    return _gather(way.of_derivative(way.to), *tangents)


def _gather_backward(
    kept: Any, cotangents: Any, wanted: Any, way: Way
) -> Sequence[jax.Array | None]:
    (ct,) = cotangents
    if way.to == "invarying" and meshes.tracks_vma(way.axis_name):
        place = _quantized_sum.place(meshes.ranks_of(way.axis_name, way.groups)[0])
        return (lax.dynamic_index_in_dim(ct, place, keepdims=False),)
    return _scatter(way.of_derivative(), ct)


def _scatter_tangents(kept: Any, tangents: Sequence[Any], way: Way) -> Sequence[jax.Array]:
    return _scatter(way.of_derivative(), *tangents)


def _scatter_backward(kept: Any, cotangents: Any, wanted: Any, way: Way) -> Sequence[jax.Array]:
    return _gather(way.of_derivative(), *cotangents)


_gather, _scatter = (
    differentiated(
        apply,
        kept=lambda operands, way: (),
        tangents=tangents,
        backward=backward,
        axes=lambda way: way.axis_name,
    )
    for apply, tangents, backward in (
        (_gathered, _gather_tangents, _gather_backward),
        (_scattered, _scatter_tangents, _scatter_backward),
    )
)
