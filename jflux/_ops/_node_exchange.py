"""Exchanges between counterparts: ranks on different nodes. NVSHMEM moves the data where it is the
heap's memory (cc/nvshmem/node_exchange.h), XLA's collectives elsewhere.

Groups are positions along mesh axes, as `axis_index_groups` of `lax` has them. All ranks of a group
make the call. The functions are for the two-level ops: they have no gradients and no batching, and
may be called in a lowering.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir, xla
from jax.sharding import Mesh

from .. import _config, _heap, _jax_internals, _native
from .._call import explain, ffi_targets
from .._ranks import meshes
from . import _lax

#: Positions along the axes in rank order; all groups are equally large.
Groups = tuple[tuple[int, ...], ...]


class Kind(enum.IntEnum):
    """The kinds of exchange, numbered as in cc/nvshmem/node_exchange.h."""

    EXCHANGE = 0
    GATHER = 1
    SHIFT = 2


@dataclasses.dataclass(frozen=True)
class Params:
    """A call, less its operand.

    Attributes:
      kind: what goes where.
      axis_names: the mesh axes.
      groups: along them.
      steps: of a shift; else 0.
      pairs, pair_names: what `lax.ppermute` takes for a shift; else ().
    """

    kind: Kind
    axis_names: tuple[Any, ...]
    groups: Groups
    steps: int = 0
    pairs: tuple[tuple[int, int], ...] = ()
    pair_names: tuple[Any, ...] = ()

    @property
    def world(self) -> int:
        return len(self.groups[0])


def exchange(x: jax.Array, axis_names: tuple[Any, ...], groups: Groups) -> jax.Array:
    """x[r] goes to rank r of the group; y[r] is from rank r.

    Args:
      x: [ranks of a group, ...], of any type of whole bytes.
      axis_names: mesh axes.
      groups: along them.

    Returns:
      An array like x.
    """
    return _bind(x, Params(Kind.EXCHANGE, axis_names, groups))


def gather(x: jax.Array, axis_names: tuple[Any, ...], groups: Groups) -> jax.Array:
    """All ranks' x, in a new first dimension. x may have any shape; the other arguments are those
    of `exchange`.

    Returns:
      [ranks of a group, *x.shape].
    """
    return _bind(x, Params(Kind.GATHER, axis_names, groups))


def shift(
    x: jax.Array,
    axis_names: tuple[Any, ...],
    groups: Groups,
    steps: int,
    pairs: Sequence[tuple[int, int]],
    pair_names: tuple[Any, ...] | None = None,
) -> jax.Array:
    """x of the `steps`-th rank after this one in its group, modulo the group's size.

    Args:
      x: an array of any shape and type.
      axis_names: mesh axes.
      groups: along them.
      steps: from 1 to one less than the ranks of a group.
      pairs: the same as (source, destination), numbered as `lax.ppermute` wants them.
      pair_names: the axes in the order of these numbers; None: `axis_names`.

    Returns:
      An array like x.
    """
    names = axis_names if pair_names is None else pair_names
    return _bind(x, Params(Kind.SHIFT, axis_names, groups, steps, tuple(pairs), names))


def _bind(x: jax.Array, params: Params) -> jax.Array:
    (y,) = _primitive.bind(x, params=params)
    return y


def reference(x: jax.Array, params: Params) -> jax.Array:
    """The call by XLA's collectives."""
    names, groups = params.axis_names, params.groups
    match params.kind:
        case Kind.EXCHANGE:
            return _lax.all_to_all(x, names, 0, 0, axis_index_groups=groups, tiled=True)
        case Kind.GATHER:
            return _lax.all_gather(x, names, axis_index_groups=groups)
        case Kind.SHIFT:
            return lax.ppermute(x, params.pair_names, params.pairs)


def _block_bytes(x: Any, params: Params) -> int:
    """The bytes that one rank sends to another."""
    size = math.prod(x.shape) * x.dtype.itemsize
    return size // params.world if params.kind == Kind.EXCHANGE else size


def group_table(mesh: Mesh, params: Params) -> np.ndarray:
    """Global device ids, int64 [number of groups, ranks], in rank order."""
    table = meshes.group_table(mesh, params.axis_names)
    return table[:, np.array(params.groups)].reshape(-1, params.world)


def why_not(x: Any, params: Params, mesh: Mesh | None) -> str | None:
    """Why NVSHMEM does not make the call, or None."""
    if not _config.config.fused or mesh is None:
        return "jflux.config(fused=False)" if mesh is not None else "the mesh is abstract"
    if why := _heap.why_no_nvshmem(mesh, group_table(mesh, params)):
        return why
    if x.dtype.name.startswith(("int2", "int4", "uint2", "uint4", "float4")):
        return f"{x.dtype} is no whole number of bytes"
    try:
        _native.lib.node_exchange_plan(
            params.kind, params.world, params.steps, _block_bytes(x, params)
        )
    except ValueError as error:
        return str(error)
    return None


_primitive = Primitive("jflux_node_exchange")
_primitive.multiple_results = True
_jax_internals.lower_for_its_devices(_primitive)


@_primitive.def_abstract_eval
def _abstract(x: Any, *, params: Params) -> list[Any]:
    shape = (params.world, *x.shape) if params.kind == Kind.GATHER else x.shape
    if params.kind == Kind.EXCHANGE and (not shape or shape[0] != params.world):
        raise ValueError(f"x has shape {x.shape}, and its first dimension must be {params.world}")
    return [x.update(shape=shape, weak_type=False)]


_primitive.def_impl(functools.partial(xla.apply_primitive, _primitive))


def _lower_reference(ctx: Any, x: Any, *, params: Params) -> Any:
    return mlir.lower_fun(lambda x: [reference(x, params)], multiple_results=True)(ctx, x)


def _lower_cuda(ctx: Any, x: Any, *, params: Params) -> Any:
    (aval,) = ctx.avals_in
    mesh = meshes.concrete_mesh_of(ctx.module_context, params.axis_names)
    why = why_not(aval, params, mesh)
    if why is not None:
        return _lower_reference(ctx, x, params=params)
    assert mesh is not None
    table, block_bytes = group_table(mesh, params), _block_bytes(aval, params)
    bytes_ = _native.lib.node_exchange_plan(params.kind, params.world, params.steps, block_bytes)
    if (recorder := _config.config.current().recorder) is None or recorder.runs:
        operands = explain.describe(ctx.avals_in)
        program = ctx.module_context.module
        why = _heap.reserve("cuda", table, "node_exchange", operands, bytes_, program)
        if why is not None:
            _config.fall_back("node_exchange", f"{operands}: {why}")
            return _lower_reference(ctx, x, params=params)
    ffi_targets.register_targets("cuda")
    return jax.ffi.ffi_lowering("jflux_node_exchange")(
        ctx,
        x,
        block_bytes=np.int64(block_bytes),
        groups=table.ravel(),
        kind=np.int64(params.kind),
        site=np.int64(ctx.module_context.new_channel()),
        sm_count=np.int64(0),  # its kernel has a CTA for each slice
        steps=np.int64(params.steps),
        workspace_bytes=np.int64(bytes_),
        world=np.int64(params.world),
    )


mlir.register_lowering(_primitive, _lower_reference)
mlir.register_lowering(_primitive, _lower_cuda, platform="cuda")
