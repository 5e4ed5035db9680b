"""Attention over the keys of all ranks, from each rank's attention over its own: an exchange and a
merge, in one kernel where one takes the call (cc/ops/decode_merge)."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad

from ... import _config, _native
from ..._call import forms, plans
from ..._call.forms import Call, Op, WhyNot
from ..._call.plans import Arrays, Machine, Plan
from ..._call.primitives import make_primitive
from ..._ranks import meshes
from ..._ranks.meshes import AxisName
from ..collectives import exchange
from .merge_attention import merge_attention

OP = "decode_merge"


#: Up to so many bytes of float32 numbers that reach a rank, all ranks merge all rows. Beyond it
#: each row is merged by its owner, of up to MOST_BYTES_OF_A_RANK of each rank's rows.
MOST_BYTES_TO_ALL = 1 << 20
MOST_BYTES_OF_A_RANK = 8 << 20


@dataclasses.dataclass(frozen=True)
class Params:
    """A call, less its operand.

    Attributes:
      same: whether the results do not vary over the axes, to types.
      dtype: of the outputs.
    """

    axis_names: tuple[Any, ...]
    world: int
    same: bool
    dtype: np.dtype
    prepared: str | None = None


def merge_over_ranks(
    pair: jax.Array, axis_name: AxisName, dtype: Any = None
) -> tuple[jax.Array, jax.Array]:
    """:func:`jflux.merge_attention` of the parts of all ranks, which are on all of them then.

    Args:
      pair: [..., D + 1] of each rank: an output, then its log-sum-exp.
      dtype: of the merged output; by default that of `pair`.

    Returns:
      (o [..., D], log-sum-exp [...] of the type of `pair`). Under ``check_vma=True`` they do not
      vary over `axis_name`.
    """
    dtype = np.dtype(pair.dtype if dtype is None else dtype)
    if not meshes.is_manual(axis_name) or 0 in pair.shape:
        return _gathered(exchange.all_gather, pair, axis_name, dtype)
    same = meshes.tracks_vma(axis_name)
    params = Params(meshes.as_tuple(axis_name), meshes.axis_size(axis_name), same, dtype)
    o, lse = _primitive.bind(pair.reshape(-1, pair.shape[-1]), params=params)
    return o.reshape(*pair.shape[:-1], -1), lse.reshape(pair.shape[:-1])


def reference(
    pair: jax.Array, axis_name: AxisName, dtype: Any = None
) -> tuple[jax.Array, jax.Array]:
    """:func:`merge_over_ranks` with `lax`'s all-gather."""
    dtype = np.dtype(pair.dtype if dtype is None else dtype)
    return _gathered(exchange.all_gather_reference, pair, axis_name, dtype)


def _gathered(
    gather: Any, pair: jax.Array, axis_name: AxisName, dtype: np.dtype
) -> tuple[jax.Array, jax.Array]:
    """Merges the ranks' pairs by an all-gather and :func:`merge_attention`."""
    to = "invarying" if meshes.tracks_vma(axis_name) else "varying"
    return _merged(gather(pair, axis_name=axis_name, to=to), dtype)


# ---- How a call lowers ---------------------------------------------------------------------------


def _merged(parts: jax.Array, dtype: np.dtype) -> tuple[jax.Array, jax.Array]:
    """(o, log-sum-exp) of all ranks' [N, ..., D + 1], as XLA computes them."""
    o, lse = merge_attention(parts[..., :-1], parts[..., -1])
    return o.astype(dtype), lse


def _of_ranks(rows: jax.Array, params: Params) -> list[jax.Array]:
    """The results, from all ranks' rows [N rows, D + 1]."""
    return list(_merged(rows.reshape(params.world, -1, rows.shape[-1]), params.dtype))


def _in_two_steps(arrays: Arrays, params: Params, plan: Plan | None = None) -> list[jax.Array]:
    (x,) = arrays
    axes, world = params.axis_names, params.world
    return _of_ranks(exchange.bind("all_gather", x, axes, world, None, 0, params.same), params)


def _in_lax(arrays: Arrays, params: Params) -> list[jax.Array]:
    (x,) = arrays
    gather = exchange.Params(params.axis_names, params.world, None, 0).collective("all_gather")
    return _of_ranks(gather.lax(x, params.axis_names), params)


def _takes(call: Call, machine: Machine) -> Plan | WhyNot:
    (x,), params = call.arrays, call.params
    world, (rows, columns) = params.world, x.shape
    if why := _native.why_not_dtypes(OP, "cuda", x.dtype):
        return WhyNot(why)
    if world == 1:
        return WhyNot("there is one rank")
    of_rank = rows * columns * x.dtype.itemsize
    by_owner = of_rank * world > MOST_BYTES_TO_ALL
    if of_rank > MOST_BYTES_OF_A_RANK and not _config.config.always:
        return WhyNot(f"each rank has {of_rank} bytes, which packets would double")
    fields = {
        "world": world, "rows": rows, "width": columns - 1, "by_owner": by_owner,
        "out_dtype": _native.dtype_number(params.dtype),
    }  # fmt: skip
    native = forms.native_plan(OP, fields, machine, fills="packets of the ranks' parts")
    if isinstance(native, WhyNot):
        return native
    ways = "to all ranks" if not by_owner else "to the rows' owners, which send results to all"
    return plans.fused(f"{of_rank} bytes of each rank, in LL packets {ways}", native)


def _attributes(arrays: Arrays, params: Params, plan: Plan) -> dict[str, Any]:
    return {"by_owner": bool(plan.config["by_owner"])}


def _batch(primitive: Any, operands: Any, dims: Any, *, params: Params) -> Any:
    """One call, of more rows."""
    x = jnp.moveaxis(operands[0], dims[0], 0)
    o, lse = primitive.bind(x.reshape(-1, x.shape[-1]), params=params)
    return [o.reshape(*x.shape[:-1], -1), lse.reshape(x.shape[:-1])], [0, 0]


def _shapes(arrays: Arrays, params: Params) -> list[Any]:
    (x,) = arrays
    rows, columns = x.shape
    return [((rows, columns - 1), params.dtype), ((rows,), x.dtype)]


_op = Op(
    name=OP,
    result_shapes=_shapes,
    reference=_in_lax,
    forms=(
        forms.kernel(_takes, _attributes),
        forms.decomposed(_in_two_steps, "an all-gather and a merge"),
    ),
    batch=_batch,
    same_over=lambda params: params.axis_names if params.same else (),
)
_primitive = make_primitive(_op)


def _jvp(primals: Any, tangents: Any, *, params: Params) -> Any:
    """Derivatives by those of the two steps."""
    moved = tuple(ad.instantiate_zeros(t) for t in tangents)
    return jax.jvp(lambda x: _in_two_steps((x,), params), tuple(primals), moved)


ad.primitive_jvps[_primitive] = _jvp
