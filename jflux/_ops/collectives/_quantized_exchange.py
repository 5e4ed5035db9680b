"""all_gather and reduce_scatter whose data travel in 8 bits: halves of the kernel of an all_reduce
(cc/ops/all_reduce/wire_body.h); or data are quantised, values and scales travel as the bytes of one
exchange, and what has come is dequantised.

    all_gather       y_r = value * scale of each rank's x, the rank's own too: all ranks have the
                     same bits
    reduce_scatter   the others' parts as they were quantised, the rank's own as it is, added in
                     rank order, in float32, and rounded once

Blocks are of 128 elements of the flattened x, of a reduce_scatter of each rank's part of it, as
those of `_quantized_sum.py`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from ... import _config, _native
from ..._call import explain, forms, plans
from ..._call.derivatives import differentiated
from ..._call.forms import Call, Form, Op, Run, Takes, WhyNot
from ..._call.plans import Arrays, Machine, Plan
from ..._call.primitives import make_primitive
from ..._ranks import meshes
from .. import _wire
from .._scaled import BLOCK
from ..products import _product
from . import _quantized_sum, exchange, wire_report

#: With fewer bytes that reach a rank data travel as they are, as in an all_reduce of fewer
#: (kLeastWireBytes in cc/ops/all_reduce/all_reduce.h, docs/experiments/0061).
LEAST_BYTES = 3 << 20


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


def form(
    why: Callable[[Call, Machine], str | None],
    words: str,
    exact: Run,
    run: Run,
    kernel_takes: Takes = lambda call, machine: None,
) -> Form[Run]:
    """The form of an op that takes the calls with a wire: their parameters have `wire`. Where ranks
    lie on several nodes it takes small ones alone.

    Args:
      why: a call is to travel as it is, or None.
      words: what `run` does.
      exact: (operands, params, plan) -> the results, without a wire.
      run: the same with one.
      kernel_takes: why a kernel does not take what `run` does.
    """

    def takes(call: Call, machine: Machine) -> Plan | None:
        if call.params.wire is None:
            return None
        if reason := why(call, machine):
            return dataclasses.replace(plans.decomposed(reason), config={"exact": 1})
        if call.levels is not None:
            return None
        kernel = kernel_takes(call, machine)
        more = f": {kernel.reason}" if isinstance(kernel, WhyNot) else ""
        return plans.decomposed(f"{words} in {call.params.wire}{more}")

    def either(arrays: Arrays, params: Any, plan: Plan) -> Sequence[Any]:
        return (exact if plan.config else run)(arrays, params, plan)

    return Form(takes, either)


# ---- The kernel, and its two other forms --------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Params:
    """A call, less its operand: of "scatter" x [N, ...] -> [...], of "gather" x [...] -> [N, ...].

    Attributes:
      part: which half of a sum.
      to: of a gather, as :func:`jflux.all_gather` takes it.
    """

    axis_names: tuple[Any, ...]
    world: int
    part: str
    wire: str
    to: str = "varying"
    prepared: str | None = None

    @property
    def same(self) -> bool:
        """Whether types say that the results are the same on all ranks."""
        return self.to == "invarying" and meshes.tracks_vma(self.axis_names)


def _shapes(arrays: Arrays, params: Params) -> list[Any]:
    (x,) = arrays
    shape = x.shape[1:] if params.part == "scatter" else (params.world, *x.shape)
    return [(shape, x.dtype)]


def _by_exchange(arrays: Arrays, params: Params, is_reference: bool) -> list[jax.Array]:
    """The call as bytes of one exchange, or of lax's."""
    (x,), wire, ranks = arrays, params.wire, params.axis_names
    names, groups = meshes.axes_and_groups(ranks)
    way = Way(names, groups, params.to, is_reference=is_reference)
    # XLA may leave out the cast that made x.
    wide = lax.optimization_barrier(x).astype(jnp.float32)
    if params.part == "gather":
        came = way.exchange("all_gather", _wire.packed(wide.ravel(), wire), axis=0, to=params.to)
        return [_wire.unpacked(came, wire, x.size).reshape(-1, *x.shape).astype(x.dtype)]
    own = wide.reshape(params.world, -1)
    sent = _wire.packed(own, wire)
    came = way.exchange("all_to_all", sent, split_axis=0, concat_axis=0, tiled=True)
    total = _quantized_sum.sum_of_parts(own, _wire.unpacked(came, wire, own.shape[1]), ranks)
    return [total.reshape(x.shape[1:]).astype(x.dtype)]


def _takes(call: Call, machine: Machine) -> Plan | WhyNot | None:
    (x,), params = call.arrays, call.params
    if params.world > _native.MAX_RANKS:
        return WhyNot(f"{params.world} ranks, the kernels take up to {_native.MAX_RANKS}")
    native = forms.native_plan(
        SUM,
        {
            "world": params.world,
            "count": x.size * (params.world if params.part == "gather" else 1),
            "dtype": _native.dtype_number(x.dtype),
            "width": 0,
            "algorithm": _native.ALL_REDUCE_ALGORITHMS.index("chunked"),
            "wire": _native.dtype_number(params.wire),
            "part": _native.WIRE_PARTS.index(params.part),
        },
        machine,
        fills="parts that travel",
    )
    if isinstance(native, WhyNot):
        return native
    return plans.fused(f"chunked in {params.wire}", native)


def _attributes(arrays: Arrays, params: Params, plan: Plan) -> dict[str, Any]:
    return {
        "algorithm": np.int64(plan.config["algorithm"]),
        "epsilon": np.float64(0),
        "norm": np.int64(0),
        "residual": False,
        "quantize_block": np.int64(0),
        "power_of_two": False,
        "wire": np.int64(_native.dtype_number(params.wire)),
        "part": np.int64(_native.WIRE_PARTS.index(params.part)),
    }


def _batch(primitive: Any, operands: Any, dims: Any, *, params: Params) -> Any:
    (x,), (dim,) = operands, dims
    bind = functools.partial(primitive.bind, params=params)
    scatters = params.part == "scatter"
    # A block has elements of one call of the batch only.
    if x.size // x.shape[dim] // (params.world if scatters else 1) % BLOCK != 0:
        return _product.batch_one_by_one(bind, operands, dims)
    # Ranks stay in front of the batch.
    at = 1 if scatters else 0
    return bind(jnp.moveaxis(x, dim, at)), [1 - at]


#: The kernel that both are halves of.
SUM = "all_reduce"

_op = Op(
    name=SUM,
    result_shapes=_shapes,
    reference=lambda arrays, params: _by_exchange(arrays, params, is_reference=True),
    forms=(
        forms.kernel(_takes, _attributes),
        forms.decomposed(
            lambda arrays, params, plan: _by_exchange(arrays, params, is_reference=False),
            "the bytes of one exchange",
        ),
    ),
    batch=_batch,
    same_over=lambda params: params.axis_names if params.same else (),
    title=lambda params: "reduce_scatter" if params.part == "scatter" else "all_gather",
)
_primitive = make_primitive(_op)


# ---- With derivatives ----------------------------------------------------------------------------


def _gathered(way: Way, x: jax.Array) -> tuple[jax.Array]:
    if way.wire is None:
        return (way.exchange("all_gather", x, axis=0, to=way.to),)
    return _half("gather", way, x)


def _scattered(way: Way, x: jax.Array) -> tuple[jax.Array]:
    if way.wire is None:
        return (way.exchange("reduce_scatter", x, scatter_dimension=0),)
    return _half("scatter", way, x)


def _half(part: str, way: Way, x: jax.Array) -> tuple[jax.Array]:
    assert way.wire is not None
    ranks, world = meshes.ranks_of(way.axis_name, way.groups)
    params = Params(ranks, world, part, way.wire, way.to)

    def f(x: jax.Array) -> jax.Array:
        if way.is_reference:
            (y,) = _by_exchange((x,), params, is_reference=True)
        else:
            (y,) = _primitive.bind(x, params=params)
        return y

    ((shape, _),) = _shapes((x,), params)
    if part == "gather":
        return (_unsharded(f, x, shape, lambda spec: (None, *spec), ranks, params.same),)
    return (_unsharded(f, x, shape, lambda spec: spec[1:], ranks),)


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
