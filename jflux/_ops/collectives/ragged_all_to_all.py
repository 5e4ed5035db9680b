"""ragged_all_to_all: wrapper, reference, gradient, and how it lowers. Kernels:
cc/ops/ragged_all_to_all."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import ad

from ... import _config
from ..._call import forms, plans, value_checks
from ..._call.forms import Call, Form, Op, WhyNot
from ..._call.plans import Arrays, Machine, Plan
from ..._call.primitives import make_primitive
from ..._ranks import meshes
from ..._ranks.meshes import AxisName
from .._collective import Collective
from .._spec import OpSpec
from ..products import _product
from . import exchange

OP = "ragged_all_to_all"

_SIZES = ("input_offsets", "send_sizes", "output_offsets", "recv_sizes")


@dataclasses.dataclass(frozen=True)
class Params:
    """A call, less its operands. In the primitive operand is [batch, rows, ...], output too, and
    sizes are [K, batch]."""

    axis_names: tuple[Any, ...]
    world: int
    prepared: str | None = None


@meshes.axis_by_name
def ragged_all_to_all(
    operand: Any,
    output: Any,
    input_offsets: Any,
    send_sizes: Any,
    output_offsets: Any,
    recv_sizes: Any,
    *,
    axis_name: AxisName,
    axis_index_groups: Sequence[Sequence[int]] | None = None,
) -> jax.Array:
    """``lax.ragged_all_to_all`` with the same arguments: slices of rows from every rank to every
    rank, whose sizes lie on the device.

    Inside ``jax.shard_map``, per rank along `axis_name`. Slice i of the K that a rank sends goes to
    rank ``i // (K / N)`` and is ``operand[input_offsets[i]:][:send_sizes[i]]``. It lands in that
    rank's result at row ``output_offsets[i]``: offsets are the receiver's. Slice i that a rank
    receives comes from rank ``i // (K / N)`` and has ``recv_sizes[i]`` rows. Rows of the result
    that nobody writes are those of `output`. Slices must not land on the same row.

    A rank keeps its result's rows a second time in the symmetric heap, in two halves: 2 M rows, and
    in LL packets, up to 1 MiB, twice that. Where this is more than a third of the heap, the call is
    cut into calls of a part of each row, which use it one after the other.

    Differentiable in `operand` and `output`, as `lax`'s is: a cotangent goes back the same way, and
    rows that were written have none for `output`. Slices of one operand must not overlap then: the
    last one's cotangent would win.

    Args:
      operand: [R, ...], of any type of whole bytes.
      output: [M, ...], with operand's type and other dimensions.
      input_offsets: integers [K], K a multiple of the N ranks: from 0 to R.
      send_sizes: [K], from 0 to what operand has from there, and output.
      output_offsets: [K], from 0 to M less the slice's rows.
      recv_sizes: [K]: what ``lax.all_to_all(send_sizes, axis_name, 0, 0, tiled=True)`` is.
      axis_name: a mesh axis, or a tuple of them.
      axis_index_groups: positions along the axis, which fall into groups of equal size; the call
        then runs inside each. None: all ranks are one group.

    Returns:
      [M, ...]. It varies over `axis_name`.

    Raises:
      ValueError, TypeError: for operands that do not fit, when the call is traced. Of each kind
        that `lax` refuses, with `lax`'s type of error.
      NameError: outside ``shard_map``.
      NotImplementedError: when it is lowered with ``jflux.config.strict``, for one that no kernel
        takes, or that finds no room in the symmetric heap.
      jax.errors.JaxRuntimeError: offsets or sizes that are out of range, or sizes that two ranks
        do not agree on. The message names rank, argument, element and value. (The `lax` form does
        not look.) Or a peer did not come within the deadline (see :func:`jflux.init`).

    Examples:
      >>> def rotate(x):  # each rank's two rows go to the next rank
      ...     rank, i = jax.lax.axis_index("tp"), jnp.arange(8)
      ...     sizes = jnp.where(i == (rank + 1) % 8, 2, 0), jnp.where(i == (rank - 1) % 8, 2, 0)
      ...     return jflux.ragged_all_to_all(x, x, 0 * i, sizes[0], 0 * i, sizes[1], axis_name="tp")
      >>> mesh = jax.sharding.Mesh(jax.devices(), "tp")
      >>> f = jax.jit(jax.shard_map(rotate, mesh=mesh, in_specs=P("tp"), out_specs=P("tp")))
      >>> f(jnp.arange(16)).tolist()
      [14, 15, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]
    """
    arrays = _checked(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes)
    names, world = meshes.ranks_of(axis_name, axis_index_groups)
    if arrays[2].shape[0] % world:
        raise ValueError(
            f"jflux.ragged_all_to_all: input_offsets has {arrays[2].shape[0]} elements, which must "
            f"be a multiple of the {world} ranks"
        )
    if world == 1 or _product.is_for_lax(OP, axis_name, *arrays):
        return reference(*arrays, axis_name=axis_name, axis_index_groups=axis_index_groups)
    operand, output, *sizes = arrays
    batched = (operand[None], output[None], *(size[:, None] for size in sizes))
    return _bind(*batched, params=Params(names, world))[0]


def _checked(operand: Any, output: Any, *sizes: Any) -> list[jax.Array]:
    """The operands as arrays, sizes as int32."""
    op = "jflux.ragged_all_to_all"
    operand, output = jnp.asarray(operand), jnp.asarray(output)
    if operand.ndim < 1 or operand.shape[1:] != output.shape[1:] or output.ndim < 1:
        raise ValueError(
            f"{op}: operand {operand.shape} and output {output.shape} must be [rows, ...] and have "
            "the same dimensions after the first"
        )
    if operand.dtype != output.dtype:
        raise TypeError(f"{op}: operand is {operand.dtype} and output is {output.dtype}; cast one")
    arrays = []
    for name, size in zip(_SIZES, sizes, strict=True):
        size = jnp.asarray(size)
        if not jnp.issubdtype(size.dtype, jnp.integer):
            raise ValueError(f"{op}: {name} must be integers, got {size.dtype}")
        if size.ndim != 1 or size.shape != jnp.shape(sizes[0]) or not size.size:
            raise ValueError(
                f"{op}: {name} must have shape [K], as the other sizes and offsets, with K >= 1; "
                f"got {size.shape}, and input_offsets has {jnp.shape(sizes[0])}"
            )
        arrays.append(value_checks.to_int32(size))
    return [operand, output, *arrays]


def _bind(*operands: Any, params: Params) -> jax.Array:
    (y,) = _primitive.bind(*operands, params=params)
    return y


def reference(
    operand: Any,
    output: Any,
    input_offsets: Any,
    send_sizes: Any,
    output_offsets: Any,
    recv_sizes: Any,
    *,
    axis_name: AxisName,
    axis_index_groups: Sequence[Sequence[int]] | None = None,
) -> jax.Array:
    """:func:`jflux.ragged_all_to_all` in `lax`, with its arguments and results. It gathers all
    operands, [N R, ...], and each rank takes its rows: XLA's CPU back end has no
    ``lax.ragged_all_to_all``."""
    operand, output = jnp.asarray(operand), jnp.asarray(output)
    names, world = meshes.ranks_of(axis_name, axis_index_groups)
    del send_sizes  # a receiver goes by recv_sizes
    starts, places = (
        Collective("all_to_all", 0, 0).lax(jnp.asarray(a), names)
        for a in (input_offsets, output_offsets)
    )
    everything = Collective("all_gather", concat=0).lax(operand, names)
    rows, count = jnp.arange(output.shape[0]), starts.shape[0]
    # [M, K]: whether row m is in slice i that came. The last one that has it counts.
    first, last = places[None], (places + jnp.asarray(recv_sizes))[None]
    inside = (first <= rows[:, None]) & (rows[:, None] < last)
    which = count - 1 - jnp.argmax(inside[:, ::-1], axis=1)
    source = which // (count // world)
    from_row = source * operand.shape[0] + starts[which] + rows - places[which]
    came = jnp.take(everything, from_row, axis=0, mode="clip") if everything.size else output
    written = jnp.any(inside, axis=1)
    return jnp.where(written.reshape(-1, *[1] * (output.ndim - 1)), came, output)


# ---- How it lowers -------------------------------------------------------------------------------


def _row_elements(x: Any) -> int:
    return math.prod(x.shape[2:])


def _call(arrays: Arrays, params: Params) -> dict[str, int]:
    """The arguments of the native plan function, without `chunked`."""
    _, output, sizes, *_ = arrays
    batch, rows = output.shape[:2]
    return {
        "world": params.world,
        "slices": sizes.shape[0] // params.world,
        "batch": batch,
        "output_rows": rows,
        "row_bytes": _row_elements(output) * output.dtype.itemsize,
    }


#: The most bytes that reach a rank in LL packets on two GPUs; with more, rows travel in chunks. On
#: 2 x H100, where two thirds of a rank's rows stayed with it, 4 MiB took 22 us in packets and 27 in
#: chunks, 8 MiB 36 and 32.
MOST_BYTES_IN_PACKETS = 4 << 20


def _is_chunked(call: dict[str, int], on_gpus: bool) -> bool:
    """Whether rows travel in chunks. An LL packet has 8 bytes of one row: rows are rounded up."""
    if (forced := _config.config.current().chunked) is not None:
        return forced
    payload = call["batch"] * call["output_rows"] * 8 * -(-call["row_bytes"] // 8)
    most = MOST_BYTES_IN_PACKETS if on_gpus else exchange.MOST_BYTES_IN_PACKETS
    return payload > most // (2 if call["world"] > 2 else 1)


def _unsupported(arrays: Arrays, params: Params, machine: Machine) -> str | None:
    operand, output, sizes, *_ = arrays
    if params.world > _product.MAX_RANKS:
        return f"{params.world} ranks, the kernels take up to {_product.MAX_RANKS}"
    if operand.dtype.name.startswith(exchange.LESS_THAN_BYTES):
        return f"{operand.dtype} operands, the kernels take whole bytes"
    if max(math.prod(x.shape[:2]) for x in (operand, output)) >= 1 << 31:
        return "2^31 rows or more"
    if sizes.size > 1 << 20:
        return f"{sizes.size} slices, the kernels take up to 2^20"
    return plans.why_unchecked(SPECS[0].checked_on_gpus) if machine.on_gpus else None


def _takes(call: Call, machine: Machine) -> Plan | WhyNot:
    if why := _unsupported(call.arrays, call.params, machine):
        return WhyNot(why, unsupported=True)
    fields = _call(call.arrays, call.params)
    chunked = _is_chunked(fields, machine.on_gpus)
    native = machine.native_plan(OP, {**fields, "chunked": chunked})
    too_large = native["workspace_bytes"] > machine.heap_bytes // 3 and not _config.config.always
    if too_large and not chunked:  # packets take twice as much
        chunked = True
        native = machine.native_plan(OP, {**fields, "chunked": True})
        too_large = native["workspace_bytes"] > machine.heap_bytes // 3
    if too_large:
        return WhyNot(_TOO_LARGE)
    way = "chunks that signals announce" if chunked else "LL packets"
    received = fields["batch"] * fields["output_rows"] * fields["row_bytes"]
    reason = f"at most {received} bytes reach a rank, in {way}"
    return plans.fused(reason, {**native, "chunked": int(chunked)})


#: Why the kernel does not take a call that it may take as several.
_TOO_LARGE = "the workspace takes more than a third of the heap"


def _takes_in_calls(call: Call, machine: Machine) -> Plan | WhyNot | None:
    """Other calls should not find the heap full: rows are cut, as far as they can be."""
    if call.levels is not None or _takes(call, machine) != WhyNot(_TOO_LARGE):
        return None
    fields, (_, output, *_) = _call(call.arrays, call.params), call.arrays
    for calls in (2 << i for i in range(16)):
        columns = -(-_row_elements(output) // calls)
        narrow = {**fields, "row_bytes": columns * output.dtype.itemsize, "chunked": True}
        taken = machine.native_plan(OP, narrow)["workspace_bytes"]
        if taken <= machine.heap_bytes // 3:
            reason = (
                f"{calls} calls of a part of each row, since a third of a heap of "
                f"{machine.heap_bytes} holds one; {plans.MORE_HEAP}"
            )
            return dataclasses.replace(plans.decomposed(reason), config={"calls": calls})
        if columns == 1:
            break
    return WhyNot(
        f"{fields['batch'] * fields['output_rows']} rows of the result take more than a third of a "
        f"heap of {machine.heap_bytes} bytes, however narrow they are cut; {plans.MORE_HEAP}",
        unsupported=True,
    )


def _in_calls(arrays: Arrays, params: Params, plan: Plan) -> list[Any]:
    operand, output, *sizes = arrays
    width = _row_elements(output)
    step = -(-width // plan.config["calls"])

    def columns(x: Any, first: int) -> Any:
        return x.reshape(*x.shape[:2], width)[:, :, first : first + step]

    results = [
        _bind(columns(operand, i), columns(output, i), *sizes, params=params)
        for i in range(0, width, step)
    ]
    return [jnp.concatenate(results, -1).reshape(output.shape)]


def _attributes(arrays: Arrays, params: Params, plan: Plan) -> dict[str, Any]:
    call = _call(arrays, params)
    return {
        "batch": np.int64(call["batch"]),
        "chunked": bool(plan.config["chunked"]),
        "row_bytes": np.int64(call["row_bytes"]),
    }


def _result(arrays: Arrays, params: Params) -> list[Any]:
    _, output, *_ = arrays
    return [(output.shape, output.dtype)]


def _reference(arrays: Arrays, params: Params) -> list[Any]:
    names, groups = meshes.axes_and_groups(params.axis_names)

    def one(*arrays: Any) -> Any:
        return reference(*arrays, axis_name=names, axis_index_groups=groups)

    return [jax.vmap(one, in_axes=(0, 0, 1, 1, 1, 1))(*arrays)]


def _batch(primitive: Any, operands: Any, dims: Any, *, params: Params) -> Any:
    """More entries of the batch."""
    size = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)

    def merged(x: Any, d: int | None, to: int) -> Any:
        x = jnp.expand_dims(x, to) if d is None else jnp.moveaxis(x, d, to)
        x = jnp.broadcast_to(x, (*x.shape[:to], size, *x.shape[to + 1 :]))
        return x.reshape(*x.shape[:to], size * x.shape[to + 1], *x.shape[to + 2 :])

    places = (0, 0, 1, 1, 1, 1)
    arrays = [merged(*each) for each in zip(operands, dims, places, strict=True)]
    (y,) = primitive.bind(*arrays, params=params)
    return [y.reshape(size, arrays[1].shape[0] // max(1, size), *y.shape[1:])], [0]


def _jvp(primals: Any, tangents: Any, *, params: Params) -> Any:
    y = _bind(*primals, params=params)
    data = tangents[:2]
    if all(type(t) is ad.Zero for t in data):
        return [y], [ad.Zero(jax.typeof(y).to_tangent_aval())]
    data = [
        _product.zeros(x.shape, x.dtype, x) if type(t) is ad.Zero else t
        for x, t in zip(primals, data, strict=False)
    ]
    return [y], [_bind(*data, *primals[2:], params=params)]


def _transpose(cotangents: Any, *operands: Any, params: Params) -> Any:
    (ct,) = cotangents
    of_operand, of_output = (ad.is_undefined_primal(x) for x in operands[:2])
    if type(ct) is ad.Zero:
        none = [ad.Zero(x.aval) if ad.is_undefined_primal(x) else None for x in operands[:2]]
        return [*none, None, None, None, None]
    starts, sent, places, received = operands[2:]
    both = jnp.concatenate([starts, places], axis=1)
    both = exchange.bind("all_to_all", both, params.axis_names, params.world, 0, 0)
    starts, places = jnp.split(both, 2, axis=1)
    d_operand, d_output = None, None
    if of_operand:
        aval = operands[0].aval
        zeros = _product.zeros(aval.shape, aval.dtype, ct)
        d_operand = _bind(ct, zeros, places, received, starts, sent, params=params)
    if of_output:
        written = jax.vmap(_written, (None, 1, 1))(ct.shape[1], places, received)
        d_output = jnp.where(written.reshape(*ct.shape[:2], *[1] * (ct.ndim - 2)), 0, ct)
        d_output = d_output.astype(ct.dtype)
    return [d_operand, d_output, None, None, None, None]


def _written(rows: int, places: jax.Array, sizes: jax.Array) -> jax.Array:
    """bool [rows]: which rows lie in a slice."""
    edges = jnp.zeros(rows + 1, jnp.int32).at[places].add(1).at[places + sizes].add(-1)
    return jnp.cumsum(edges)[:-1] > 0


_op = Op(
    name=OP,
    result_shapes=_result,
    reference=_reference,
    forms=(
        forms.kernel(_takes, _attributes, aliases={1: 0}),
        Form(_takes_in_calls, _in_calls),
    ),
    batch=_batch,
)
_primitive = make_primitive(_op)
ad.primitive_jvps[_primitive] = _jvp
ad.primitive_transposes[_primitive] = _transpose


def _equal_slices(x: jax.Array, axis_name: AxisName) -> tuple[jax.Array, ...]:
    """The operands of a ragged_all_to_all that does the same as an all_to_all of x."""
    world = meshes.axis_size(axis_name)
    size = x.shape[0] // world
    starts = jnp.arange(world, dtype=jnp.int32) * size
    sizes = jnp.full(world, size, jnp.int32)
    places = sizes * lax.axis_index(meshes.as_tuple(axis_name)).astype(jnp.int32)
    return x, jnp.zeros_like(x), starts, sizes, places, sizes


SPECS = (
    OpSpec(
        name=OP,
        function=ragged_all_to_all,
        reference=reference,
        communication=lambda ndim, **_: Collective("all_to_all", 0, 0),
        operands=_equal_slices,
        dtypes={"cpu": frozenset(), "cuda": frozenset()},
        gradient=(OP, "all_to_all"),
    ),
)
