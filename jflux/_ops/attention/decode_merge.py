"""Attention over the keys of all ranks, from each rank's attention over its own: an exchange and a
merge, in one kernel where one takes the call (cc/ops/decode_merge)."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
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


@dataclasses.dataclass(frozen=True)
class Params:
    """A call, less its operand.

    Attributes:
      same: whether the result does not vary over the axes, to types.
    """

    axis_names: tuple[Any, ...]
    world: int
    same: bool
    prepared: str | None = None


def merge_over_ranks(pair: jax.Array, axis_name: AxisName) -> tuple[jax.Array, jax.Array]:
    """:func:`jflux.merge_attention` of the parts of all ranks, which are on all of them then.

    Args:
      pair: [..., D + 1] of each rank: an output, then its log-sum-exp.

    Returns:
      (o [..., D], log-sum-exp [...]), of pair's type. Under ``check_vma=True`` they do not vary
      over `axis_name`.
    """
    if not meshes.is_manual(axis_name) or 0 in pair.shape:
        return _gathered(exchange.all_gather, pair, axis_name)
    same = meshes.tracks_vma(axis_name)
    params = Params(meshes.as_tuple(axis_name), meshes.axis_size(axis_name), same)
    rows = pair.reshape(-1, pair.shape[-1])
    (merged,) = _primitive.bind(rows, params=params)
    merged = merged.reshape(pair.shape)
    return merged[..., :-1], merged[..., -1]


def reference(pair: jax.Array, axis_name: AxisName) -> tuple[jax.Array, jax.Array]:
    """:func:`merge_over_ranks` with `lax`'s all-gather."""
    return _gathered(exchange.all_gather_reference, pair, axis_name)


def _gathered(gather: Any, pair: jax.Array, axis_name: AxisName) -> tuple[jax.Array, jax.Array]:
    """Merges the ranks' pairs by an all-gather and :func:`merge_attention`."""
    to = "invarying" if meshes.tracks_vma(axis_name) else "varying"
    partials = gather(pair, axis_name=axis_name, to=to)
    return merge_attention(partials[..., :-1], partials[..., -1])


# ---- How a call lowers ---------------------------------------------------------------------------


def _merged(partials: jax.Array, params: Params) -> list[jax.Array]:
    """Merges the ranks' results, [N rows, D + 1], as XLA computes it."""
    partials = partials.reshape(params.world, -1, partials.shape[-1])
    o, lse = merge_attention(partials[..., :-1], partials[..., -1])
    return [jnp.concatenate([o, lse[..., None]], -1)]


def _in_two_steps(arrays: Arrays, params: Params, plan: Plan | None = None) -> list[jax.Array]:
    (x,) = arrays
    axes, world = params.axis_names, params.world
    return _merged(exchange.bind("all_gather", x, axes, world, None, 0, params.same), params)


def _in_lax(arrays: Arrays, params: Params) -> list[jax.Array]:
    (x,) = arrays
    gather = exchange.Params(params.axis_names, params.world, None, 0).collective("all_gather")
    return _merged(gather.lax(x, params.axis_names), params)


def _takes(call: Call, machine: Machine) -> Plan | WhyNot:
    (x,), world = call.arrays, call.params.world
    if why := _native.why_not_dtypes(OP, "cuda", x.dtype):
        return WhyNot(why)
    if world == 1:
        return WhyNot("there is one rank")
    received = x.size * x.dtype.itemsize * world
    if received > exchange.MOST_BYTES_IN_PACKETS and not _config.config.always:
        return WhyNot(f"{received} bytes reach a rank, for which packets are slower than chunks")
    fields = {"world": world, "rows": x.shape[0], "width": x.shape[1] - 1}
    native = forms.native_plan(OP, fields, machine)
    if isinstance(native, WhyNot):
        return native
    return plans.fused(f"{received} bytes reach a rank, in LL packets", native)


def _batch(primitive: Any, operands: Any, dims: Any, *, params: Params) -> Any:
    """One call, of more rows."""
    x = jnp.moveaxis(operands[0], dims[0], 0)
    (y,) = primitive.bind(x.reshape(-1, x.shape[-1]), params=params)
    return [y.reshape(x.shape)], [0]


_op = Op(
    name=OP,
    result_shapes=lambda arrays, params: [(arrays[0].shape, arrays[0].dtype)],
    reference=_in_lax,
    forms=(
        forms.kernel(_takes, lambda arrays, params, plan: {}),
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
