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
from ..._call.forms import Call, Form, Run
from ..._call.plans import Arrays, Machine, Plan
from ..._ranks import meshes
from .. import _wire
from . import _quantized_sum, exchange, wire_report

#: With fewer bytes that reach a rank data travel as they are, as in an all_reduce of fewer
#: (kLeastWireBytes in cc/ops/all_reduce/all_reduce.h).
LEAST_BYTES = 2 << 20


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


def why_exact(nbytes: int) -> str | None:
    """Why data of which so many bytes reach a rank travel as they are, or None."""
    if nbytes >= LEAST_BYTES or _config.config.always:
        return None
    return f"exact: {nbytes} bytes reach a rank, for which a quantised wire does not pay"


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
    why = "exact: there are no data" if x.size == 0 else None
    if not way.is_reference:
        why = why or why_exact(size)
    if wire is not None and why:
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


def gathered(x: jax.Array, way: Way) -> jax.Array:
    """:func:`all_gather` as a step of another op: of any size, and in no report."""
    (y,) = _gather(way if x.size else dataclasses.replace(way, wire=None), x)
    return y


def scattered(x: jax.Array, way: Way) -> jax.Array:
    """:func:`reduce_scatter` as a step of another op: of any size, and in no report."""
    (y,) = _scatter(way if x.size else dataclasses.replace(way, wire=None), x)
    return y


def form(why: Callable[[Call, Machine], str | None], words: str, exact: Run, run: Run) -> Form[Run]:
    """The form of an op that takes the calls with a wire: their parameters have `wire`. Where ranks
    lie on several nodes it takes small ones alone.

    Args:
      why: a call is to travel as it is, or None.
      words: what `run` does.
      exact: (operands, params, plan) -> the results, without a wire.
      run: the same with one.
    """

    def takes(call: Call, machine: Machine) -> Plan | None:
        if call.params.wire is None:
            return None
        if reason := why(call, machine):
            return dataclasses.replace(plans.decomposed(reason), config={"exact": 1})
        if call.levels is not None:
            return None
        return plans.decomposed(f"{words} in {call.params.wire}")

    def either(arrays: Arrays, params: Any, plan: Plan) -> Sequence[Any]:
        return (exact if plan.config else run)(arrays, params, plan)

    return Form(takes, either)


# ---- With derivatives ----------------------------------------------------------------------------


def _gathered(way: Way, x: jax.Array) -> tuple[jax.Array]:
    if way.wire is None:
        return (way.exchange("all_gather", x, axis=0, to=way.to),)
    wire, (ranks, world) = way.wire, meshes.ranks_of(way.axis_name, way.groups)

    def gather(x: jax.Array) -> jax.Array:
        # XLA may leave out the cast that made x.
        sent = _wire.packed(lax.optimization_barrier(x).astype(jnp.float32).ravel(), wire)
        came = way.exchange("all_gather", sent, axis=0, to=way.to)
        return _wire.unpacked(came, wire, x.size).reshape(-1, *x.shape).astype(x.dtype)

    same = way.to == "invarying" and meshes.tracks_vma(way.axis_name)
    return (_unsharded(gather, x, (world, *x.shape), lambda spec: (None, *spec), ranks, same),)


def _scattered(way: Way, x: jax.Array) -> tuple[jax.Array]:
    if way.wire is None:
        return (way.exchange("reduce_scatter", x, scatter_dimension=0),)
    wire, (ranks, world) = way.wire, meshes.ranks_of(way.axis_name, way.groups)

    def scatter(x: jax.Array) -> jax.Array:
        own = lax.optimization_barrier(x).astype(jnp.float32).reshape(world, -1)
        sent = _wire.packed(own, wire)
        came = way.exchange("all_to_all", sent, split_axis=0, concat_axis=0, tiled=True)
        parts = _wire.unpacked(came, wire, own.shape[1])
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
