"""Expert parallelism: tokens to the ranks of their experts, and back."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ... import _config
from ..._call import explain, local_ops, plans
from ..._call.forms import Call, Form, WhyNot, choose
from ..._call.plans import Machine, Plan
from ..._ranks import meshes
from ..._ranks.meshes import AxisName
from .. import _scaled, _wire
from .._epilogue import sum_dtype
from .._recipe import Format
from .._scaled import Operand, Scaled
from ..collectives import _quantized_exchange, wire_report
from ..collectives.exchange import all_gather
from . import _destinations, _dispatch_primitives, _ragged_dispatch
from ._checks import check_axes, check_tokens, check_weights
from ._dispatch_primitives import KernelHandle
from ._exchanged_rows import Handle, LevelsHandle, Way, rows_of_tokens, tokens_to_experts
from ._partial_sums import PartialSumsHandle

LAYOUTS = ("expert", "masked")
OVERFLOWS = ("drop", "error")


class DispatchStatistics(NamedTuple):
    """How many choices each expert got, and how many were dropped; int32.

    Attributes:
      tokens_per_expert: [E], tokens of all ranks that chose each expert, with those dropped.
      dropped: [], slots of this rank that found no place, or whose index is out of range. With a
        `node_axis`, slots that this rank passed on to its node and that found no place there.
    """

    tokens_per_expert: jax.Array
    dropped: jax.Array


class Dispatched(NamedTuple):
    """Rows of this rank's experts.

    Attributes:
      rows: [R, H], expert after expert, or [E_local, C, H]. Rows of no token are zeros, but for
        those that `rest` leaves undefined.
      group_sizes: i32 [E_local], the tokens of each expert.
      padded_sizes: i32 [E_local], its rows with those that fill it up to `alignment`: what
        :func:`jflux.grouped_matmul` takes as ``group_sizes`` of `rows`.
      weights: f32 [R] or [E_local, C], the routing weight of each row; 0 for rows of no token.
      handle: for :func:`jflux.moe_combine`.
      statistics: see :class:`DispatchStatistics`.
    """

    rows: Any
    group_sizes: jax.Array
    padded_sizes: jax.Array
    weights: jax.Array
    handle: Handle | PartialSumsHandle | KernelHandle | LevelsHandle
    statistics: DispatchStatistics


@meshes.axis_by_name
def moe_dispatch(
    x: Any,
    topk_indices: Any,
    topk_weights: Any,
    *,
    num_experts: int,
    capacity: int | None = None,
    alignment: int = 1,
    layout: str = "expert",
    on_overflow: str = "drop",
    partial_sums: bool = False,
    rest: str = "zeros",
    quantize: Format | None = None,
    axis_name: AxisName,
    node_axis: AxisName | None = None,
) -> Dispatched:
    """Sends each token's row to the ranks of its experts, and sorts what comes by expert.

    Inside ``jax.shard_map``, per rank along `axis_name`, of N ranks: rank r has the experts from
    ``r E / N`` on. A token travels once to a rank, however many of its experts are there. An
    expert's rows are in the order of (rank, token, slot). Sizes stay on the device; where rows of
    static arrays have no token they are zeros, forward and backward.

    Without a capacity no token is dropped: ``min(k, N) T`` rows are sent at most and ``N T`` come,
    and ``R = min(k, E / N) N T + (E / N) (alignment - 1)``, rounded up to `alignment`. With one it
    is ``E / N`` times the rounded capacity, if that is less. A token that names an expert twice has
    one row there, with the sum of both weights.

    With `node_axis`, of M ranks, there are N M ranks, and that along (`node_axis`, `axis_name`) has
    its E / (N M) experts in this order. A token travels once to a node: to the rank there with its
    own place along `axis_name`, which passes it on to the node's ranks (arXiv 2412.19437, section
    3.2.2). An expert's rows are then in the order of (rank along `axis_name`, node, token, slot),
    and sizes are those of N M ranks.

    With `partial_sums` a rank sums what a token's experts there give, rounds it to its type and
    sends it once: at most ``min(k, N)`` rows of a token in place of k come back, in the combine and
    in the gradient of `x`, which are rounded once more for each rank. The dispatch is one kernel
    then, and its combine another one, which keep in the symmetric heap, in each of two halves,
    ``N T`` rows of x or y and ``8 N T k`` bytes for the slots, rounded up to a power of two.

    Differentiable in `x` and `topk_weights`, in both modes; the gradient comes back as in
    :func:`jflux.moe_combine`, and is summed over a token's copies in float32, in the order of
    top-k.

    Rows of 8 bits travel with their scales, in the same kernel: x may be a :class:`jflux.Scaled`,
    or be quantised by `quantize`, and the experts' rows are one then, which
    :func:`jflux.grouped_matmul` takes. It has no gradient in x; :func:`jflux.nn.mixture` by a
    recipe dispatches so and has all gradients.

    Args:
      x: [T, H], floating; or a :class:`jflux.Scaled`, or what stands for one.
      topk_indices: integers [T, k], from 0 to ``num_experts - 1``; -1: the slot has no expert.
      topk_weights: [T, k], floating.
      num_experts: E, a multiple of N.
      capacity: of an expert, in rows: the first ones in the order of rows stay, and others are
        dropped. None: no limit.
      alignment: each expert's rows begin at a multiple of it.
      layout: "expert", rows [R, H]; "masked", [E / N, C, H] with C the capacity, or N T, rounded up
        to `alignment`.
      on_overflow: what a slot without a place does, or one whose index is out of range: "drop",
        it is counted in the statistics and moves nothing; "error", the call fails,
        and says how many such slots which rank has. (Its `lax` form does not look, and drops.)
      partial_sums: whether ranks sum first, here and in the combine.
      rest: what rows past those of the last expert hold, here and in the gradient of what
        :func:`jflux.moe_combine` takes: "zeros", or "undefined", where nothing reads them, as in
        :func:`jflux.grouped_matmul`.
      quantize: a :class:`jflux.Format`, by which x is quantised before it leaves. A scale that
        ranks' rows share is that of a rank's own.
      axis_name: a mesh axis, or a tuple of them.
      node_axis: the mesh axis of nodes, if ranks of one node alone are joined by fast links.

    Returns:
      The rows and the rest, see :class:`Dispatched`. Rows have x's type, weights are float32
      (float64 for a float64 x). Scaled rows have a scale each, or one for each 128 elements.

    Raises:
      ValueError, TypeError: for operands and options that do not fit, when the call is traced.
      jax.errors.JaxRuntimeError: when it runs, as :func:`jflux.ragged_all_to_all`.

    Examples:
      >>> def rows_of_experts(x, indices):  # 2 tokens of a rank, 16 experts, each token has one
      ...     weights = jnp.ones(indices.shape)
      ...     d = jflux.moe_dispatch(x, indices, weights, num_experts=16, axis_name="ep")
      ...     return d.rows, d.group_sizes
      >>> mesh, own = jax.sharding.Mesh(jax.devices(), "ep"), P("ep")
      >>> f = jax.jit(jax.shard_map(rows_of_experts, mesh=mesh, in_specs=(own, own), out_specs=own))
      >>> rows, sizes = f(jnp.ones((16, 4)), jnp.arange(16)[:, None] // 4)
      >>> rows.shape, sizes.tolist()
      ((128, 4), [4, 4, 4, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0])
    """
    axes = meshes.axes_of(node_axis, axis_name)
    x, indices, weights = _checked(
        x, topk_indices, topk_weights, num_experts, meshes.axis_size(axes), quantize
    )
    _check_options(capacity, alignment, layout, on_overflow)
    fill = local_ops.is_filled("moe_dispatch", rest)
    # Plain `lax` makes places, statistics and handles of them, which have one type.
    leaves, structure = jax.tree.flatten((x, indices, weights))
    x, indices, weights = jax.tree.unflatten(structure, meshes.vary_together(axes, *leaves))
    options = _destinations.Options(on_overflow, capacity, alignment, layout, partial_sums, fill)
    if node_axis is None:
        return _dispatch(x, indices, weights, _Params(num_experts, options, axis_name))
    # First to nodes, as if each were a rank with one expert.
    nodes, node = meshes.axis_size(node_axis), lax.axis_index(meshes.as_tuple(node_axis))
    experts = num_experts // nodes
    is_known = (indices >= 0) & (indices < num_experts)
    node_of = jnp.where(is_known, indices // experts, jnp.where(indices == -1, -1, nodes))
    to_nodes = _Params(nodes, _destinations.Options(on_overflow), node_axis)
    come = _dispatch(x, node_of, weights, to_nodes)
    between: Any = come.handle
    (chosen,) = tokens_to_experts(Way(node_axis), between, indices + 1)  # 0 where no row has come
    chosen = chosen - 1 - node * experts
    chosen = jnp.where((chosen >= 0) & (chosen < experts), chosen, -1)
    (row_weights,) = rows_of_tokens(Way(node_axis), between, weights.astype(sum_dtype(x.dtype)))
    own = _dispatch(come.rows, chosen, row_weights, _Params(experts, options, axis_name))
    inside: Any = own.handle
    statistics = DispatchStatistics(
        all_gather(own.statistics.tokens_per_expert, axis_name=node_axis, tiled=True),
        come.statistics.dropped + own.statistics.dropped,
    )
    return own._replace(handle=LevelsHandle(between, inside), statistics=statistics)


@dataclasses.dataclass(frozen=True)
class _Params:
    """A dispatch between the ranks along one axis, less its operands. k may exceed the number of
    experts."""

    num_experts: int
    options: _destinations.Options
    axis_name: AxisName


def _dispatch(x: Operand, indices: jax.Array, weights: jax.Array, params: _Params) -> Dispatched:
    """Of a Scaled x, each of whose rows has scales of its own."""
    arrays: Sequence[Any] = (x, indices, weights)
    if isinstance(x, Scaled):
        arrays = x.values, indices, weights, x.scale
    plan, form = choose(_FORMS, Call(arrays, params))
    assert form is not None
    return form.run(arrays, params, plan)


def _by_ragged_exchange(arrays: Sequence[jax.Array], params: _Params, plan: Plan) -> Dispatched:
    """A dispatch whose handle is for slots, or for partial sums."""
    x, indices, weights, *scale = arrays
    handle, sizes, padded, chosen, dropped = _ragged_dispatch.route(
        indices, params.num_experts, params.options, params.axis_name
    )
    weights = weights.astype(sum_dtype(x.dtype))
    rows: Any
    if scale:
        rows, row_weights = handle.dispatch(_in_bytes(x, *scale), weights)
        rows = _of_bytes(rows, x)
    else:
        rows, row_weights = handle.dispatch(x, weights)
    if params.options.partial_sums and _config.config.fused:  # else nobody expects a kernel
        op = _dispatch_primitives.OP
        explain.note_once(op, arrays, jax.tree.leaves((rows, row_weights)), plan)
        _config.say_once(logging.INFO, f"jflux.{op} is {plan.path}: {plan.reason}")
    statistics = DispatchStatistics(jnp.sum(chosen, 0, dtype=jnp.int32), dropped)
    return _dispatched(rows, sizes, padded, row_weights, handle, statistics, params.options)


def _in_bytes(values: jax.Array, scale: jax.Array) -> jax.Array:
    """uint8 [T, ...]: each row of values [T, H] of 8 bits, and behind it its scales [T, s]."""
    of_scale = lax.bitcast_convert_type(scale, jnp.uint8)
    of_scale = of_scale.reshape(scale.shape[0], 4 * scale.shape[1])
    return jnp.concatenate([lax.bitcast_convert_type(values, jnp.uint8), of_scale], axis=1)


def _of_bytes(rows: jax.Array, x: jax.Array) -> Scaled:
    """What these bytes are, of values as x."""
    columns = x.shape[1]
    scale = rows[:, columns:].reshape(rows.shape[0], (rows.shape[1] - columns) // 4, 4)
    return Scaled(
        lax.bitcast_convert_type(rows[:, :columns], x.dtype),
        lax.bitcast_convert_type(scale, np.float32),
    )


def _dispatched(
    rows: Operand,
    sizes: jax.Array,
    padded: jax.Array,
    row_weights: jax.Array,
    handle: Handle | PartialSumsHandle | KernelHandle,
    statistics: DispatchStatistics,
    options: _destinations.Options,
) -> Dispatched:
    """The result of a dispatch, with rows in the layout that the options name."""
    if options.layout == "masked":
        experts = sizes.shape[0]
        count = row_weights.shape[0] // experts
        rows = jax.tree.map(lambda a: a.reshape(experts, count, a.shape[1]), rows)
        row_weights = row_weights.reshape(rows.shape[:2])
    return Dispatched(rows, sizes, padded, row_weights, handle, statistics)


def _kernel_params(indices: Any, params: _Params) -> _dispatch_primitives.Params:
    """The parameters of a dispatch in one kernel."""
    options, names = params.options, meshes.as_tuple(params.axis_name)
    world, (tokens, k) = meshes.axis_size(names), indices.shape
    experts = params.num_experts // world
    rows = _destinations.rows_of_experts(world * tokens, k, experts, options)
    return _dispatch_primitives.Params(
        names, world, experts, rows,
        capacity=-1 if options.capacity is None else int(options.capacity),
        alignment=int(options.alignment),
        stride=rows // experts if options.layout == "masked" else 0,
        fill=options.fill,
    )  # fmt: skip


def _by_kernel(arrays: Sequence[jax.Array], params: _Params, plan: Plan) -> Dispatched:
    """A dispatch in one kernel. The statistics are computed beside it, and XLA removes those that
    the program does not read."""
    (x, indices, weights, *scale), options, axis_name = arrays, params.options, params.axis_name
    slots, wrong, by_expert = _destinations.choices_of(indices, params.num_experts)
    chosen = all_gather(by_expert.counts, axis_name=axis_name)
    kept = slots
    if options.capacity is not None:
        rank = lax.axis_index(meshes.as_tuple(axis_name))
        places = _destinations.places_of(chosen, rank, options.capacity)
        kept = _destinations.keep(slots, by_expert, places)
    dropped = _destinations.dropped_of(slots, kept, wrong)
    if options.on_overflow == "error":
        indices = _ragged_dispatch.fail_if(dropped, indices, axis_name)
    weights = weights.astype(sum_dtype(x.dtype))
    of_kernel = _kernel_params(indices, params)
    rows, row_weights, sizes, handle = _dispatch_primitives.dispatched(
        of_kernel, x, indices, weights, *scale
    )
    padded = -(-sizes // options.alignment) * options.alignment
    if options.layout == "masked":
        padded = jnp.full_like(sizes, of_kernel.stride)
    statistics = DispatchStatistics(jnp.sum(chosen, 0, dtype=jnp.int32), dropped)
    return _dispatched(rows, sizes, padded, row_weights, handle, statistics, options)


def why_no_kernel(
    x: jax.ShapeDtypeStruct,
    k: int,
    *,
    num_experts: int,
    capacity: int | None,
    axis_name: AxisName,
) -> str | None:
    """Why a dispatch with partial sums, of such tokens with k experts each, is not one kernel."""
    indices = jax.ShapeDtypeStruct((x.shape[0], k), np.int32)
    options = _destinations.Options("drop", capacity, partial_sums=True)
    of_kernel = _kernel_params(indices, _Params(num_experts, options, axis_name))
    return _dispatch_primitives.why_not(x, indices, of_kernel)


def _takes_kernel(call: Call, machine: Machine) -> Plan | WhyNot | None:
    if not call.params.options.partial_sums:
        return None
    x, indices, _, *scale = call.arrays
    why = _dispatch_primitives.why_not(x, indices, _kernel_params(indices, call.params), *scale)
    return WhyNot(why) if why else plans.decomposed("a kernel for the dispatch, and one to combine")


def _takes_partial_sums(call: Call, machine: Machine) -> Plan | None:
    return plans.decomposed("") if call.params.options.partial_sums else None


#: Each has a handle of its own.
_FORMS = (
    Form(_takes_kernel, _by_kernel),
    Form(
        _takes_partial_sums,
        _by_ragged_exchange,
        "counting sorts, a ragged_all_to_all and gathers",
    ),
    Form(lambda call, machine: plans.decomposed("rows of slots"), _by_ragged_exchange),
)


@meshes.axis_by_name
def moe_combine(
    y: Any,
    handle: Handle | PartialSumsHandle | KernelHandle | LevelsHandle,
    *,
    weights: Any = None,
    residual: Any = None,
    axis_name: AxisName,
    node_axis: AxisName | None = None,
    wire: str | None = None,
    grad_wire: str | None = None,
) -> jax.Array:
    """Brings the experts' rows back to their tokens, and sums them.

    Inside ``jax.shard_map``, per rank along `axis_name`. Each slot's row comes back by itself, and
    a token's are multiplied by their weights and added in float32, in the order of top-k, and
    rounded once: the bits depend neither on the run nor on the number of ranks. A slot without a
    row, since it has no expert or was dropped, adds nothing.

    After a dispatch with `partial_sums` a token's rows on a rank are summed so first, rounded to
    y's type and sent once; then the ranks' sums, in the order in which top-k names the ranks first.
    After a dispatch with `node_axis`, a token's rows on a node are summed so first, rounded to y's
    type and sent once; then the nodes' sums, in the order in which top-k names the nodes first.

    Differentiable in `y`, `weights` and `residual`, in both modes: the gradient is dispatched with
    the handle, a row once to a rank.

    Args:
      y: [R, D] or [E / N, C, D], floating: the experts' results for the rows of the dispatch.
      handle: of the dispatch.
      weights: [T, k]. None: rows are added as they are, for experts that have applied
        ``Dispatched.weights``; two slots that share a row add it once.
      residual: [T, D], added last, before rounding. None: none.
      axis_name, node_axis: as in the dispatch.
      wire: "float8_e4m3fn" or "int8": rows come back quantised, each in blocks of 128 elements with
        a float32 scale, those of the rank itself too, so that bits do not depend on the number of
        ranks. After a dispatch with `partial_sums` a rank's sums are quantised, in float32; where
        that was one kernel, so is the combine. With a `node_axis` it is for what travels between
        nodes alone. y is bfloat16, float16 or float32, and a block with a NaN or an infinity
        becomes NaN. With less than 3 MiB of rows for a rank's tokens the call is as without, which
        :func:`jflux.explain` says, unless ``jflux.config(always=True)``.
      grad_wire: likewise, of the cotangent's rows that are dispatched, and of tangents' rows, which
        are exact by default (straight through).

    Returns:
      [T, D], of y's type.

    Raises:
      ValueError, TypeError: for operands that do not fit, when the call is traced.
      jax.errors.JaxRuntimeError: when it runs, as :func:`jflux.ragged_all_to_all`.

    Examples:
      >>> def layer(x, indices):  # each expert multiplies by 3
      ...     weights = jnp.ones(indices.shape)
      ...     d = jflux.moe_dispatch(x, indices, weights, num_experts=16, axis_name="ep")
      ...     return jflux.moe_combine(3 * d.rows, d.handle, weights=weights, axis_name="ep")
      >>> mesh, own = jax.sharding.Mesh(jax.devices(), "ep"), P("ep")
      >>> f = jax.jit(jax.shard_map(layer, mesh=mesh, in_specs=(own, own), out_specs=own))
      >>> f(jnp.arange(16.0)[:, None], jnp.arange(16)[:, None] // 4).ravel().tolist()
      [0.0, 3.0, 6.0, 9.0, 12.0, 15.0, 18.0, 21.0, 24.0, 27.0, 30.0, 33.0, 36.0, 39.0, 42.0, 45.0]
    """
    if (node_axis is not None) != isinstance(handle, LevelsHandle):
        raise ValueError(
            f"jflux.moe_combine: {node_axis=} must be that of the dispatch, whose handle is "
            f"{'not ' if node_axis is not None else ''}of one with a node_axis"
        )
    if isinstance(handle, LevelsHandle):
        between, inside = handle
        if weights is not None:
            weights = check_weights("jflux.moe_combine", weights, between.first.shape)
            (weights,) = rows_of_tokens(
                Way(node_axis), between, weights.astype(sum_dtype(weights.dtype))
            )
        sums = moe_combine(y, inside, weights=weights, axis_name=axis_name)
        return moe_combine(
            sums, between, residual=residual, axis_name=node_axis, wire=wire, grad_wire=grad_wire
        )
    check_axes("jflux.moe_combine", axis_name, handle.axis_names)
    y = jnp.asarray(y)
    rows = handle.slot.shape[0]
    if y.ndim == 3 and y.shape[0] * y.shape[1] == rows:
        y = y.reshape(rows, y.shape[2])
    if y.ndim != 2 or y.shape[0] != rows:
        raise ValueError(
            f"jflux.moe_combine: y must have the {rows} rows of the dispatch, [R, D] or "
            f"[E_local, C, D]; got {y.shape}"
        )
    if not jnp.issubdtype(y.dtype, jnp.floating):
        raise TypeError(f"jflux.moe_combine: y must be floating, got {y.dtype}")
    if weights is not None:
        weights = check_weights("jflux.moe_combine", weights, handle.first.shape)
        weights = weights.astype(sum_dtype(y.dtype))
    total = _combined(
        y, handle, weights, y.dtype if residual is None else sum_dtype(y.dtype), wire, grad_wire
    )
    if residual is not None:
        residual = jnp.asarray(residual)
        if residual.shape != total.shape:
            raise ValueError(
                f"jflux.moe_combine: residual must be {total.shape}, got {residual.shape}"
            )
        total = total + residual.astype(total.dtype)
    return total.astype(y.dtype)


def _combined(
    y: jax.Array,
    handle: Handle | PartialSumsHandle | KernelHandle,
    weights: jax.Array | None,
    dtype: Any,
    wire: str | None,
    grad_wire: str | None,
) -> jax.Array:
    """The sum of a combine, whose rows may travel in a wire."""
    op = _dispatch_primitives.COMBINE
    _wire.check(op, jax.ShapeDtypeStruct((), y.dtype), wire, grad_wire, what="y is")
    if wire is None and grad_wire is None:
        return handle.combine(y, weights, dtype)
    (tokens, k), world = handle.first.shape, meshes.axis_size(handle.axis_names)
    rows = tokens * (k if isinstance(handle, Handle) else min(k, world))
    why = _quantized_exchange.why_exact(rows * y.shape[1] * y.dtype.itemsize)
    if why:
        total = handle.combine(y, weights, dtype)
    else:
        total = handle.combine(y, weights, dtype, wire, grad_wire)
    if wire is not None:
        if why or not isinstance(handle, KernelHandle):  # which says how itself
            how = plans.decomposed(why or f"rows in {wire}, in a ragged_all_to_all")
            explain.note_once(op, (y,), (total,), how)
        if wire_report.is_wanted():
            exact = total if why else handle.combine(y, weights, dtype)
            wire_report.note(op, y, wire, total, exact, world)
    return total


# ---- Checks --------------------------------------------------------------------------------------


def _checked(
    x: Any, indices: Any, weights: Any, num_experts: int, world: int, quantize: Format | None
) -> tuple[Operand, jax.Array, jax.Array]:
    op = "jflux.moe_dispatch"
    x = _scaled.of("moe_dispatch", "x", x)
    if quantize is not None:
        _check_quantize(op, x, quantize)
        x = quantize.quantize(jnp.asarray(x))
    if isinstance(x, Scaled):
        (x,) = _scaled.constants(x)
        values, indices = check_tokens(op, x.values, indices, num_experts, world, scaled=True)
        scale = _scaled.over_elements(x.scale, 0, values.shape[0])
        x = Scaled(values, jnp.broadcast_to(scale, (values.shape[0], scale.shape[1])))
    else:
        x, indices = check_tokens(op, x, indices, num_experts, world)
    weights = jnp.asarray(weights)
    if not jnp.issubdtype(weights.dtype, jnp.floating):
        raise TypeError(f"{op}: topk_weights must be floating, got {weights.dtype}")
    if weights.shape != indices.shape:
        raise ValueError(
            f"{op}: topk_weights must have topk_indices' shape {indices.shape}, got {weights.shape}"
        )
    return x, indices, weights


def _check_quantize(op: str, x: Any, quantize: Any) -> None:
    if not isinstance(quantize, Format):
        raise TypeError(f"{op}: quantize must be a jflux.Format or None, got {quantize!r}")
    if isinstance(x, Scaled):
        raise TypeError(f"{op}: x is a jflux.Scaled already, and the call has {quantize=}")


def _check_options(capacity: Any, alignment: Any, layout: str, on_overflow: str) -> None:
    op = "jflux.moe_dispatch"
    for name, value in (("capacity", capacity), ("alignment", alignment)):
        if value is None and name == "capacity":
            continue
        if not isinstance(value, int | np.integer):
            raise TypeError(f"{op}: {name} must be an int, got {value!r}")
        if value < 1:
            raise ValueError(f"{op}: {name}={value} must be at least 1")
    for name, value, known in (
        ("layout", layout, LAYOUTS),
        ("on_overflow", on_overflow, OVERFLOWS),
    ):
        if value not in known:
            raise ValueError(f"{op}: {name}={value!r} must be one of {known}")
