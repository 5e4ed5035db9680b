"""A dispatch and a combine with partial sums, each one kernel. Kernels: cc/ops/moe_dispatch.

``jflux_moe_dispatch(x, indices, weights[, scale])`` and ``jflux_moe_combine(y, weights, ...)`` are
each other's transposes in x and y. Rows of 8 bits have scales, which travel with them, and the sums
of a combine may be quantised before they leave (`wire`). A token has a fixed place on each rank
that it is sent to, so ranks need no counts before rows leave. The choices alone say where rows lie:
the gradient of a combine is a dispatch with the same choices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ... import _config, _native, moe
from ..._call import derivatives, forms, plans
from ..._call.derivatives import total
from ..._call.forms import AttributesRule, Call, Form, Op, Run, ShapeDtype, WhyNot
from ..._call.plans import Arrays, Machine, Plan
from ..._call.primitives import make_primitive
from ..._ranks import meshes
from .. import _wire
from .._scaled import BLOCK, Scaled
from ..collectives import exchange
from ..products import _product
from . import _destinations, moe_rows
from ._exchanged_rows import on_first, rows_or_zeros, summed

OP, COMBINE = "moe_dispatch", "moe_combine"

#: The most bytes of the heap for a dispatch in one kernel: two halves of 256 MiB and their signals.
#: 16384 tokens of 14336 bytes need as much on any number of ranks. More tokens have not been timed
#: (docs/experiments/0054-dispatches-of-many-tokens.md).
MOST_WORKSPACE_BYTES = (512 << 20) * 33 // 32

#: Values of `there` for a slot without a row.
_NONE, _DROPPED = -1, -2


@dataclasses.dataclass(frozen=True)
class Params:
    """A dispatch, less its operands.

    Attributes:
      experts: of a rank.
      rows: of the result.
      capacity: most rows of an expert; -1: any number.
      alignment: of an expert's rows.
      stride: rows from one expert's first to the next one's; 0: they follow each other.
      fill: rows past the last expert's are zeros; else anything.
      scaled: x has 8 bits, and there are its scales, float32 [T, s], with s a multiple of 4. Then
        the rows' scales [R, s] are the last result.
    """

    axis_names: tuple[Any, ...]
    world: int
    experts: int
    rows: int
    capacity: int
    alignment: int
    stride: int
    fill: bool = True
    scaled: bool = False
    prepared: str | None = None


@dataclasses.dataclass(frozen=True)
class CombineParams:
    """A combine, less its operands, after a dispatch.

    Attributes:
      wire: the format that a rank's sums travel in, each by blocks of 128 elements, the rank's own
        too; None: rounded to y's type.
      grad_wire: likewise, of the rows and sums of derivatives.
    """

    dispatch: Params
    out_dtype: np.dtype
    wire: str | None = None
    grad_wire: str | None = None
    prepared: str | None = None

    @property
    def axis_names(self) -> tuple[Any, ...]:
        return self.dispatch.axis_names

    @property
    def world(self) -> int:
        return self.dispatch.world


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KernelHandle:
    """How a dispatch moved its rows. Arrays are int32.

    Attributes:
      indices: [T, k], the experts.
      slot: [R], which of the ``N T k`` slots of all ranks' tokens is an expert's row; -1: none. (A
        masked layout is [E_local C] here.)
      expert_row: [N T, k], the expert's row of each of these slots; -1: none here, -2: dropped.
      rank: [T, k], the rank of a slot's expert; -1: none, or an earlier slot of the token has it.
      first: [T, k], the slot of the token whose row this slot shares; -1: it has none.
      params: of the dispatch, static.
    """

    indices: jax.Array
    slot: jax.Array
    expert_row: jax.Array
    rank: jax.Array
    first: jax.Array
    params: Params = dataclasses.field(metadata={"static": True})

    @property
    def axis_names(self) -> tuple[Any, ...]:
        return self.params.axis_names

    def combine(
        self,
        y: jax.Array,
        weights: jax.Array | None,
        dtype: Any,
        wire: str | None = None,
        grad_wire: str | None = None,
    ) -> jax.Array:
        """The weighted sum of each token's rows of y [R, D]: [T, D]. `dtype` is y's type or the
        type in which y is summed. Without weights, the plain sum."""
        if weights is None:
            w = jnp.ones(self.expert_row.shape, np.float32)
        else:
            w = _weights_at_experts(on_first(self.first, weights.astype(np.float32)), self.params)
        params = CombineParams(self.params, np.dtype(dtype), wire, grad_wire)
        return _combine(params, y, w, self.indices, self.slot, self.expert_row, self.rank)


def why_not(x: Any, indices: Any, params: Params, scale: Any = None) -> str | None:
    """Why a dispatch that is being traced is not one kernel, or None. It depends on shapes and
    switches, which are the same on all ranks."""
    if not _config.config.fused:
        return "jflux.config(fused=False)"
    if virtual := [name for name in params.axis_names if not meshes.is_manual(name)]:
        return meshes.why_not_manual(virtual[0])
    if 0 in (*x.shape, *indices.shape):
        return "an operand is empty"
    given = () if scale is None else (_in_vectors(scale),)
    arrays = (x, indices, None, *given)
    return _why_not(_call(arrays, params), None if given else x.dtype)


def _why_not(call: dict[str, int], dtype: Any) -> str | None:
    """Why no kernel takes such a dispatch on any machine, or None."""
    if not 2 <= call["world"] <= _product.MAX_RANKS:
        return f"the kernel is for 2 to {_product.MAX_RANKS} ranks, not for {call['world']}"
    if why := _why_not_dtype(dtype):
        return why
    try:
        taken = _native.plan(OP, call, 0, 0.0)["workspace_bytes"]
    except ValueError as refused:
        return str(refused)
    if taken <= MOST_WORKSPACE_BYTES or _config.config.always:
        return None
    return (
        f"places for {call['world'] * call['tokens']} tokens take {taken} bytes of the heap on "
        f"each rank, more than {MOST_WORKSPACE_BYTES}; jflux.config(always=True) takes the kernel"
    )


def _why_not_dtype(dtype: Any) -> str | None:
    """Why no kernel takes rows of the type; None: they have 8 bits, and scales."""
    return None if dtype is None else _native.why_not_dtypes("moe_combine", "cuda", dtype)


def _in_vectors(scale: Any) -> jax.Array:
    """Scales [T, s] with zeros behind them, so that a row is whole vectors."""
    return jnp.pad(scale, ((0, 0), (0, -scale.shape[1] % (_native.VECTOR_BYTES // 4))))


def dispatched(
    params: Params,
    x: jax.Array,
    indices: jax.Array,
    weights: jax.Array,
    scale: jax.Array | None = None,
) -> tuple[Any, jax.Array, jax.Array, KernelHandle]:
    """(rows [R, H], Scaled if there is a scale; their weights f32 [R], the rows of each expert i32
    [E_local], handle); weights are float32."""
    operands = [x, indices, weights]
    if scale is not None:
        operands.append(_in_vectors(scale))
        params = dataclasses.replace(params, scaled=True)
    rows, row_weights, sizes, slot, expert_row, *row_scale = _dispatch_primitive.bind(
        *operands, params=params
    )
    if scale is not None:
        rows = Scaled(rows, row_scale[0][:, : scale.shape[1]])
        params = dataclasses.replace(params, scaled=False)  # as its derivatives dispatch
    rank, first = _rank(indices, params), _first(indices, params)
    handle = KernelHandle(indices, slot, expert_row, rank, first, params)
    return rows, row_weights, sizes, handle


def _combine(params: CombineParams, *operands: jax.Array) -> jax.Array:
    return _combine_primitive.bind(*operands, params=params)[0]


# ---- What follows from the choices ---------------------------------------------------------------


def _known(indices: jax.Array, params: Params) -> jax.Array:
    """The indices, with -1 in place of those that name no expert."""
    is_known = (indices >= 0) & (indices < params.world * params.experts)
    return jnp.where(is_known, indices, -1)


def _rank(indices: jax.Array, params: Params) -> jax.Array:
    known = _known(indices, params)
    to = jnp.where(known >= 0, known // params.experts, -1)
    return jnp.where(_destinations.distinct(to).has_row, to, -1)


def _first(indices: jax.Array, params: Params) -> jax.Array:
    return _destinations.distinct(_known(indices, params)).first


def _weights_at_experts(weights: jax.Array, params: Params) -> jax.Array:
    """The weights of all ranks' slots, [N T, k]."""
    return exchange.all_gather(weights, axis_name=params.axis_names, axis=0, tiled=True)


def _of_slots(numbers: jax.Array, expert_row: jax.Array) -> jax.Array:
    """numbers[row] for the row of each slot, [N T, k]; 0 for slots without a row here."""
    return rows_or_zeros(numbers, expert_row)


# ---- How a dispatch lowers -----------------------------------------------------------------------


def _call(arrays: Arrays, params: Params) -> dict[str, int]:
    """A dispatch as the native plan function reads it."""
    x, indices, *rest = arrays
    return {
        "world": params.world,
        "tokens": x.shape[0],
        "slots": indices.shape[1],
        "row_bytes": sum(a.shape[1] * a.dtype.itemsize for a in (x, *rest[1:])),
        "experts": params.experts,
        "rows": params.rows,
        "capacity": params.capacity,
        "alignment": params.alignment,
        "stride": params.stride,
    }


#: A call -> (its fields as the native plan function reads them, the type of rows; None: 8 bits with
#: scales).
_Fields = Callable[[Call], tuple[dict[str, int], Any]]


def _forms(
    op: str, fields_of: _Fields, attributes: AttributesRule, in_calls: Run, *steps: Form
) -> tuple[Form, ...]:
    """The forms of a dispatch, or a combine: one kernel; several calls of it, each of a part of
    every row; and steps."""

    def native_plan(fields: dict[str, int], machine: Machine, places: str) -> Any:
        return forms.native_plan(op, fields, machine, fills=places)

    def takes(call: Call, machine: Machine) -> Plan | WhyNot:
        fields, dtype = fields_of(call)
        if why := _why_not_dtype(dtype):
            return WhyNot(why)
        # A dispatch sends a row in up to 8 parts, each with a signal. If the workspace does not
        # fit, try fewer parts, which take fewer signals.
        for most_parts in (8, 4, 2, 1):
            fields |= {"most_parts": most_parts}
            native = native_plan(fields, machine, "places of tokens")
            if not isinstance(native, WhyNot):
                rows = fields["world"] * fields["tokens"]
                words = f"one kernel, with places for {rows} tokens on each rank"
                wire: str | None = getattr(call.params, "wire", None)
                words += "" if wire is None else f", sums in {wire}"
                return plans.fused(words, native)
        return native

    def takes_in_calls(call: Call, machine: Machine) -> Plan | None:
        fields, dtype = fields_of(call)
        if call.levels is not None or dtype is None or _why_not_dtype(dtype):
            return None
        if not isinstance(no_room := takes(call, machine), WhyNot):
            return None
        for calls in (2, 4, 8):
            # A block of a wire has elements of one call only.
            unit = 16 if "wire" not in fields else BLOCK * dtype.itemsize
            if fields["row_bytes"] % (unit * calls) == 0:
                narrow = fields | {"most_parts": 1, "row_bytes": fields["row_bytes"] // calls}
                if not isinstance(native_plan(narrow, machine, "places"), WhyNot):
                    why = f"{calls} calls of a part of each row, since {no_room.reason}"
                    return dataclasses.replace(plans.decomposed(why), config={"calls": calls})
        return None

    return forms.kernel(takes, attributes), Form(takes_in_calls, in_calls), *steps


def _columns_of_calls(rows: jax.Array, plan: Plan) -> list[jax.Array]:
    """The columns that each of the plan's calls moves."""
    return jnp.split(rows, plan.config["calls"], axis=1)


def _dispatch_in_calls(arrays: Arrays, params: Params, plan: Plan) -> list[Any]:
    x, *choices = arrays
    found = [
        _dispatch_primitive.bind(columns, *choices, params=params)
        for columns in _columns_of_calls(x, plan)
    ]
    return [jnp.concatenate([rows for rows, *_ in found], axis=1), *found[0][1:]]


def _combine_in_calls(arrays: Arrays, params: CombineParams, plan: Plan) -> list[Any]:
    y, *places = arrays
    found = [
        _combine_primitive.bind(columns, *places, params=params)[0]
        for columns in _columns_of_calls(y, plan)
    ]
    return [jnp.concatenate(found, axis=1)]


def _dispatch_shapes(arrays: Arrays, params: Params) -> list[ShapeDtype]:
    x, indices, _, *scale = arrays
    return [
        ((params.rows, x.shape[1]), x.dtype),
        ((params.rows,), np.dtype(np.float32)),
        ((params.experts,), np.dtype(np.int32)),
        ((params.rows,), np.dtype(np.int32)),
        ((params.world * x.shape[0], indices.shape[1]), np.dtype(np.int32)),
        *(((params.rows, one.shape[1]), one.dtype) for one in scale),
    ]


def _dispatch_by_gathers(arrays: Arrays, params: Params, plan: Plan | None = None) -> list[Any]:
    """A dispatch in which each rank gathers all tokens and keeps the rows of its experts."""
    x, indices, weights, *scale = (
        exchange.all_gather(a, axis_name=params.axis_names, axis=0, tiled=True) for a in arrays
    )
    experts, k = params.experts, indices.shape[1]
    local = indices - lax.axis_index(params.axis_names) * experts
    slots = _destinations.distinct(jnp.where((local >= 0) & (local < experts), local, -1))
    own = jnp.where(slots.has_row, slots.expert, -1)
    by_expert = moe.route(own, experts)
    sizes = by_expert.counts
    if params.capacity >= 0:
        sizes = jnp.minimum(sizes, params.capacity)
    padded = -(-sizes // params.alignment) * params.alignment
    starts = jnp.cumsum(padded) - padded
    if params.stride:
        starts = jnp.arange(experts, dtype=jnp.int32) * params.stride
    kept = by_expert._replace(counts=sizes)
    slot, expert_row = _destinations.expert_rows(own, kept, starts, params.rows)
    number = _destinations.number_among_equals(own, by_expert)
    expert_row = jnp.where((own >= 0) & (number >= sizes[own]), _DROPPED, expert_row)
    token = jnp.where(slot >= 0, slot // k, -1)
    rows, *row_scale = (rows_or_zeros(a, token) for a in (x, *scale))
    row_weights = rows_or_zeros(on_first(slots.first, weights).ravel(), slot)
    return [rows, row_weights, sizes, slot, expert_row, *row_scale]


def _dispatch_attributes(arrays: Arrays, params: Params, plan: Plan) -> dict[str, Any]:
    return {
        "alignment": np.int64(params.alignment),
        "capacity": np.int64(params.capacity),
        "fill": params.fill,
        "parts": np.int64(plan.config["parts"]),
        "stride": np.int64(params.stride),
    }


_dispatch_op = Op(
    name=OP,
    result_shapes=_dispatch_shapes,
    reference=_dispatch_by_gathers,
    forms=_forms(
        OP,
        lambda call: (
            _call(call.arrays, call.params),
            None if call.params.scaled else call.arrays[0].dtype,
        ),
        _dispatch_attributes,
        _dispatch_in_calls,
        forms.decomposed(_dispatch_by_gathers, "all tokens to all ranks"),
    ),
    batch=_product.bind_one_by_one,
)
_dispatch_primitive = make_primitive(_dispatch_op)


# ---- How a combine lowers ------------------------------------------------------------------------


def _combine_fields(call: Call) -> tuple[dict[str, int], Any]:
    y, *_, rank = call.arrays
    fields = {
        "world": call.params.world,
        "tokens": rank.shape[0],
        "slots": rank.shape[1],
        "row_bytes": y.shape[1] * y.dtype.itemsize,
        "rows": y.shape[0],
    }
    if call.params.wire is not None:
        fields |= {
            "wire": _native.dtype_number(call.params.wire),
            "dtype": _native.dtype_number(y.dtype),
        }
    return fields, y.dtype


def _combine_shapes(arrays: Arrays, params: CombineParams) -> list[ShapeDtype]:
    y, *_, rank = arrays
    return [((rank.shape[0], y.shape[1]), params.out_dtype)]


def _combine_by_all_to_all(
    arrays: Arrays, params: CombineParams, plan: Plan | None = None
) -> list[Any]:
    """A combine in which every rank sends back a row for each token, of zeros if it has none."""
    y, w, _, slot, expert_row, rank = arrays
    wire = params.wire
    sums = moe_rows.combine(y, w, slot, expert_row, None if wire is None else np.float32)
    sent = sums if wire is None else _wire.packed(sums, wire)
    back = exchange.bind("all_to_all", sent, params.axis_names, params.world, 0, 0)
    if wire is not None:
        back = _wire.unpacked(back, wire, y.shape[1])
    tokens = rank.shape[0]
    row = jnp.where(rank >= 0, rank * tokens + jnp.arange(tokens)[:, None], -1)
    return [summed(back, row).astype(params.out_dtype)]


def _combine_attributes(arrays: Arrays, params: CombineParams, plan: Plan) -> dict[str, Any]:
    wire = -1 if params.wire is None else _native.dtype_number(params.wire)
    return {"parts": np.int64(plan.config["parts"]), "wire": np.int64(wire)}


def _takes_wire(call: Call, machine: Machine) -> Plan | None:
    return None if call.params.wire is None else plans.decomposed("")


_combine_op = Op(
    name=COMBINE,
    result_shapes=_combine_shapes,
    reference=_combine_by_all_to_all,
    forms=_forms(
        COMBINE,
        _combine_fields,
        _combine_attributes,
        _combine_in_calls,
        Form(_takes_wire, _combine_by_all_to_all, "an all-to-all of quantised sums"),
        forms.decomposed(_combine_by_all_to_all, "an all-to-all of sums"),
    ),
    batch=_product.bind_one_by_one,
)
_combine_primitive = make_primitive(_combine_op)


# ---- Derivatives ---------------------------------------------------------------------------------


def _dispatch_forward(operands: Sequence[Any], params: Params) -> tuple[Sequence[Any], Any]:
    results = _dispatch_primitive.bind(*operands, params=params)
    slot, expert_row = results[3:5]
    return results, (operands[1], slot, expert_row)


def _dispatch_tangents(kept: Any, tangents: Sequence[Any], params: Params) -> list[Any]:
    indices, slot, _ = kept
    dx, _, dw, *of_scale = tangents
    if dx is not None:
        given = jnp.zeros(indices.shape, np.float32) if dw is None else dw
        return list(_dispatch_primitive.bind(dx, indices, given, params=params))
    of_slots = _weights_at_experts(on_first(_first(indices, params), dw), params)
    return [None, rows_or_zeros(of_slots.ravel(), slot), None, None, None, *of_scale]


def _dispatch_backward(
    kept: Any, cotangents: Sequence[Any], wanted: Sequence[Any], params: Params
) -> list[Any]:
    indices, slot, expert_row = kept
    d_rows, d_weights, *_ = cotangents
    dx, dw = None, None
    if wanted[0] is not None and d_rows is not None:
        ones = jnp.ones(expert_row.shape, np.float32)
        combine = CombineParams(params, np.dtype(wanted[0].dtype))
        dx = _combine(combine, d_rows, ones, indices, slot, expert_row, _rank(indices, params))
    if wanted[2] is not None and d_weights is not None:
        # A slot has a row on one rank at most. The other terms are zeros, so the sum is exact.
        back = exchange.reduce_scatter(
            _of_slots(d_weights, expert_row),
            axis_name=params.axis_names, scatter_dimension=0, tiled=True,
        )  # fmt: skip
        first = _first(indices, params)
        shared = jnp.take_along_axis(back, jnp.maximum(first, 0), axis=1)
        dw = jnp.where(first >= 0, shared, 0)
    return [dx, None, dw, *([None] if params.scaled else [])]


def _dispatch_kept(operands: Sequence[Any], params: Params) -> Any:
    raise derivatives.not_linear(OP, "its choices say where rows lie")


derivatives.differentiate(
    _dispatch_primitive,
    derivatives.Derivatives(
        _dispatch_forward, _dispatch_tangents, _dispatch_backward, _dispatch_kept
    ),
)


def _dispatched_in_wire(params: CombineParams, places: Any, ct: jax.Array) -> list[jax.Array]:
    """The rows [R, D] of ct [T, D], which travel in the `grad_wire`. `places`: of the combine."""
    sent = _wire.in_blocks(ct, str(params.grad_wire))
    values, scale = (a.reshape(len(ct), -1) for a in (sent.values, sent.scale))
    indices = places[0]
    zeros = jnp.zeros(indices.shape, np.float32)
    rows, *_ = dispatched(params.dispatch, values, indices, zeros, scale)
    return [rows.dequantize()[:, : ct.shape[1]].astype(ct.dtype)]


def _in_wire_backward(
    places: Any, cotangents: Sequence[Any], wanted: Sequence[Any], params: CombineParams
) -> Sequence[Any]:
    (d_rows,) = cotangents
    dtype = np.dtype(wanted[1].dtype)
    params = dataclasses.replace(params, out_dtype=dtype, wire=params.grad_wire)
    ones = jnp.ones(places[2].shape, np.float32)
    return None, _combine(params, d_rows, ones, *places)


#: Linear, as without a wire: derivatives of derivatives pass straight through the rounding.
_rows_in_wire: Callable[..., Sequence[Any]] = derivatives.differentiated(
    _dispatched_in_wire,
    kept=lambda operands, params: operands[0],
    tangents=lambda places, tangents, params: _rows_in_wire(params, places, tangents[1]),
    backward=_in_wire_backward,
    axes=lambda params: params.axis_names,
)


def _combine_forward(operands: Sequence[Any], params: CombineParams) -> tuple[Sequence[Any], Any]:
    return _combine_primitive.bind(*operands, params=params), tuple(operands)


def _combine_tangents(kept: Any, tangents: Sequence[Any], params: CombineParams) -> list[Any]:
    y, w, *places = kept
    dy, dw, *_ = tangents
    params = dataclasses.replace(params, wire=params.grad_wire)
    of_y = None if dy is None else _combine(params, dy, w, *places)
    of_w = None if dw is None else _combine(params, y, dw, *places)
    return [total([of_y, of_w])]


def _combine_backward(
    kept: Any, cotangents: Sequence[Any], wanted: Sequence[Any], params: CombineParams
) -> list[Any]:
    y, w, indices, slot, expert_row, rank = kept
    (ct,) = cotangents
    y_type = wanted[0] if y is None else y
    zeros = jnp.zeros(indices.shape, np.float32)
    # The cotangent travels in y's type, as in _partial_sums.py.
    ct = ct.astype(y_type.dtype)
    if params.grad_wire is None:
        rows, *_ = _dispatch_primitive.bind(ct, indices, zeros, params=params.dispatch)
    else:
        (rows,) = _rows_in_wire(params, (indices, slot, expert_row, rank), ct)
    # Row after row, as if each were a token with one slot. Rows that fill an expert up are read.
    dispatch = params.dispatch
    fill = dispatch.fill or dispatch.alignment > 1 or dispatch.stride > 0
    place = jnp.where(slot >= 0, lax.iota(jnp.int32, slot.shape[0]), -1)
    places = place, place[:, None]
    dy, dw = None, None
    if wanted[0] is not None:
        row_weights = rows_or_zeros(w.ravel(), slot)[:, None]
        dy = moe_rows.spread(rows, row_weights, *places, fill=fill)
    if wanted[1] is not None:
        dots = moe_rows.dots(y, rows, *places)[:, 0].astype(np.float32)
        dw = _of_slots(dots, expert_row)
    return [dy, dw, None, None, None, None]


def _combine_kept(operands: Sequence[Any], params: CombineParams) -> Any:
    if operands[0] is None and operands[1] is None:
        raise derivatives.not_linear(COMBINE, "it is linear in y and in weights, not in both")
    return tuple(operands)


derivatives.differentiate(
    _combine_primitive,
    derivatives.Derivatives(_combine_forward, _combine_tangents, _combine_backward, _combine_kept),
)
