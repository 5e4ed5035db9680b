"""all_gather, all_to_all and reduce_scatter: wrappers, gradients, and how they lower. Kernels:
cc/ops/exchange."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import ad

from ... import _config, _native
from ..._call import forms, plans
from ..._call.forms import Call, Form, Op, WhyNot
from ..._call.plans import Arrays, Machine, Plan
from ..._call.primitives import make_primitive
from ..._ranks import meshes
from ..._ranks.meshes import AxisName
from .. import _lax, _two_level, _two_level_plan, _wire
from .._collective import Collective, Kind
from .._collective import axis as normalize
from .._spec import OpSpec
from ..products import _product, _product_plan
from . import _quantized_exchange

#: Up to so many bytes that reach a rank travel in LL packets: for an all-to-all of more than two
#: ranks, half of that. Up to MOST_BYTES they travel in chunks (more than two ranks: half of that),
#: and above it `lax` moves them (docs/experiments/0030).
MOST_BYTES_IN_PACKETS = 1 << 20
MOST_BYTES = 64 << 20

#: How the names of types begin that have no whole bytes.
LESS_THAN_BYTES = ("int2", "int4", "uint2", "uint4", "float4")


#: Positions along the axes, as `lax` takes `axis_index_groups`.
Groups = Sequence[Sequence[int]] | None

Tree = TypeVar("Tree")


@dataclasses.dataclass(frozen=True)
class Params:
    """A call, less its operand. In the primitives shards are always parts of a dimension (lax's
    ``tiled=True``)."""

    axis_names: tuple[Any, ...]
    world: int
    split: int | None  # the dimension of x that shards are parts of; None: x is one shard
    concat: int | None  # likewise of y
    same: bool = False  # of an all_gather: whether y does not vary over the axes, to types
    prepared: str | None = None

    def collective(self, kind: Kind) -> Collective:
        """The exchange as data."""
        return Collective(kind, self.split, self.concat)


@meshes.axis_by_name
def all_gather(
    x: Tree,
    *,
    axis_name: AxisName,
    axis: int = 0,
    tiled: bool = False,
    axis_index_groups: Groups = None,
    to: str = "varying",
    wire: str | None = None,
    grad_wire: str | None = None,
) -> Tree:
    """``lax.all_gather(x, axis_name, axis=axis, tiled=tiled)``, with the latency of one exchange
    where x is small.

    Inside ``jax.shard_map``, per rank along `axis_name`: all ranks' x, in rank order, in packets as
    :func:`jflux.all_reduce` sends them. Where more than 1 MiB reaches a rank data travel in chunks
    that signals announce; above 64 MiB (more than two ranks: 32 MiB), or where that takes more than
    a third of the heap, it is `lax`'s. Differentiable like `lax`'s: the gradient is
    reduce-scattered.

    Args:
      x: an array of any shape and type, or a pytree of such, each of which is one call.
      axis_name: a mesh axis, or a tuple of them.
      axis: the dimension of the result that the ranks make.
      tiled: whether that is x's own, N times as long, and not a new one of size N.
      axis_index_groups: groups of the ranks, as positions along `axis_name`, each rank once and all
        groups of one size. Each of them exchanges its own data, and N is the ranks of a group.
      to: what ``check_vma=True`` knows of the result: "varying"; "invarying" (not with groups),
        whose gradient needs no communication: a rank takes its part; or "reduced" (`lax`'s, not
        with groups), whose gradient is "unreduced": a sum over the ranks that is still to be made.
      wire: "float8_e4m3fn" or "int8": data travel quantised, in blocks of 128 elements of the
        flattened x, each with a float32 scale
        (ZeRO++'s gathers of weights, arXiv 2306.10209, section 3.1). x is bfloat16, float16 or
        float32. All ranks have the same bits, of their own x too, and a block with a NaN or an
        infinity becomes NaN. With less than 3 MiB that reach a rank data travel as they are, which
        :func:`jflux.explain` says, unless ``jflux.config(always=True)``. Not with to="reduced".
      grad_wire: likewise, of the exchanges of derivatives, which are exact by default (straight
        through).

    Returns:
      [.., N, ..], or x's shape with dimension `axis` N times as long. It varies over `axis_name`
      as far as ``check_vma=True`` can tell, unless `to` says otherwise.

    Raises:
      ValueError, TypeError: for a dimension that x has not or that is no int, for groups that are
        none, and for another `to`, when the call is traced.
      NameError: outside ``shard_map``.
      NotImplementedError: when it is lowered with ``jflux.config.strict``, for one that no kernel
        takes, or that finds no room in the symmetric heap.
      jax.errors.JaxRuntimeError: a peer did not come within the deadline (see :func:`jflux.init`).

    Examples:
      >>> mesh = jax.sharding.Mesh(jax.devices(), "tp")
      >>> f = functools.partial(jflux.all_gather, axis_name="tp", tiled=True, to="invarying")
      >>> f = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P("tp"), out_specs=P()))
      >>> f(jnp.arange(8)).tolist()
      [0, 1, 2, 3, 4, 5, 6, 7]
    """

    if to not in ("varying", "invarying", "reduced"):
        raise ValueError(f'jflux.all_gather: {to=} must be "varying", "invarying" or "reduced"')
    if to != "varying" and axis_index_groups is not None:
        raise ValueError(
            f"jflux.all_gather: {to=} takes no axis_index_groups, which have different results"
        )
    for_lax = _product.is_for_lax("all_gather", axis_name, *jax.tree.leaves(x))
    way = _way("all_gather", x, axis_name, axis_index_groups, wire, grad_wire, for_lax, to)
    if to == "reduced" and not for_lax and meshes.tracks_vma(axis_name):
        _config.fall_back("all_gather", _product.NO_KERNEL_REDUCES.format('to="reduced"'))
        for_lax = True
    same = to == "invarying" and meshes.is_bound(axis_name) and meshes.tracks_vma(axis_name)

    def one(x: jax.Array) -> jax.Array:
        at = _dimension("all_gather", "axis", axis, x.ndim + (not tiled))
        if way is not None:
            return _along(at, tiled, _quantized_exchange.all_gather(x, way))
        if for_lax:
            return all_gather_reference(
                x, axis_name=axis_name, axis=at, tiled=tiled, axis_index_groups=axis_index_groups,
                to=to,
            )  # fmt: skip
        x = x if tiled else jnp.expand_dims(x, at)
        return _bind("all_gather", x, axis_name, axis_index_groups, None, at, same=same)

    return _each(one, x)


@meshes.axis_by_name
def reduce_scatter(
    x: Tree,
    *,
    axis_name: AxisName,
    scatter_dimension: int = 0,
    tiled: bool = False,
    axis_index_groups: Groups = None,
    wire: str | None = None,
    grad_wire: str | None = None,
) -> Tree:
    """``lax.psum_scatter(x, axis_name, scatter_dimension=..., tiled=...)``, with the latency of one
    exchange where x is small.

    Inside ``jax.shard_map``, per rank along `axis_name`: the rank's shard of the sum of all ranks'
    x, in float32 (float64 for float64), in rank order, rounded once. Sizes, errors and gradients
    are as for :func:`jflux.all_gather`, which is its transpose.

    Args:
      x: an array of float16, bfloat16, float32 or float64 (other types take the reference), or a
        pytree of such, each of which is one call.
      axis_name: a mesh axis, or a tuple of them.
      scatter_dimension: the dimension of x that the shards are parts of.
      tiled: whether N divides that dimension, and not is it: then the result has no such one.
      axis_index_groups: as in :func:`jflux.all_gather`.
      wire, grad_wire: as in :func:`jflux.all_gather`; blocks are of a rank's part of x. The others'
        parts are added as they were quantised, the rank's own as it is.

    Returns:
      x's shape with that dimension divided by N, or without it.

    Raises:
      As :func:`jflux.all_gather`; ValueError also for shards that the ranks do not divide.

    Examples:
      >>> mesh = jax.sharding.Mesh(jax.devices(), "tp")
      >>> f = functools.partial(jflux.reduce_scatter, axis_name="tp", tiled=True)
      >>> f = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P(), out_specs=P("tp")))
      >>> f(jnp.arange(8.0)).tolist()
      [0.0, 8.0, 16.0, 24.0, 32.0, 40.0, 48.0, 56.0]
    """

    for_lax = _product.is_for_lax("reduce_scatter", axis_name, *jax.tree.leaves(x))
    way = _way("reduce_scatter", x, axis_name, axis_index_groups, wire, grad_wire, for_lax)

    def one(x: jax.Array) -> jax.Array:
        at = _dimension("reduce_scatter", "scatter_dimension", scatter_dimension, x.ndim)
        _, world = meshes.ranks_of(axis_name, axis_index_groups)
        _check_shards("reduce_scatter", x, at, world, tiled)
        if way is not None:
            return _quantized_exchange.reduce_scatter(_parts(at, tiled, x, world), way)
        if for_lax:
            return reduce_scatter_reference(
                x, axis_name=axis_name, scatter_dimension=at, tiled=tiled,
                axis_index_groups=axis_index_groups,
            )  # fmt: skip
        y = _bind("reduce_scatter", x, axis_name, axis_index_groups, at, None)
        return y if tiled else jnp.squeeze(y, at)

    return _each(one, x)


@meshes.axis_by_name
def all_to_all(
    x: Tree,
    *,
    axis_name: AxisName,
    split_axis: int,
    concat_axis: int,
    tiled: bool = False,
    axis_index_groups: Groups = None,
) -> Tree:
    """``lax.all_to_all(x, axis_name, split_axis, concat_axis, tiled=tiled)``, with the latency of
    one exchange where x is small.

    Inside ``jax.shard_map``, per rank along `axis_name`: x is split into N shards along
    `split_axis`, shard r goes to rank r, and what has come is put together along `concat_axis` in
    rank order. Sizes, errors and gradients are as for :func:`jflux.all_gather`, but between more
    than two ranks packets go up to 512 KiB; it is its own transpose, with the axes swapped.

    Args:
      x: an array of any type, or a pytree of such, each of which is one call.
      axis_name: a mesh axis, or a tuple of them.
      split_axis: the dimension of x that the shards are parts of.
      concat_axis: the dimension of the result that they make.
      tiled: whether N divides the one dimension and multiplies the other. If not, x[split_axis] has
        size N and goes, and `concat_axis` is a new dimension of size N.
      axis_index_groups: as in :func:`jflux.all_gather`.

    Returns:
      x's shape with N shards moved from the one dimension to the other. It varies over `axis_name`.

    Raises:
      As :func:`jflux.reduce_scatter`.

    Examples:
      >>> mesh = jax.sharding.Mesh(jax.devices(), "tp")
      >>> def exchange(x):  # one rank's [64, 2] becomes [8, 16]
      ...     return jflux.all_to_all(x, axis_name="tp", split_axis=0, concat_axis=1, tiled=True)
      >>> specs = {"in_specs": P(None, "tp"), "out_specs": P("tp")}
      >>> f = jax.jit(jax.shard_map(exchange, mesh=mesh, **specs))
      >>> f(jnp.ones((64, 16))).shape
      (64, 16)
    """

    for_lax = _product.is_for_lax("all_to_all", axis_name, *jax.tree.leaves(x))

    def by_tiles(x: jax.Array, split: int, concat: int) -> jax.Array:
        return _bind("all_to_all", x, axis_name, axis_index_groups, split, concat)

    def one(x: jax.Array) -> jax.Array:
        split = _dimension("all_to_all", "split_axis", split_axis, x.ndim)
        concat = _dimension("all_to_all", "concat_axis", concat_axis, x.ndim)
        _, world = meshes.ranks_of(axis_name, axis_index_groups)
        _check_shards("all_to_all", x, split, world, tiled)
        if for_lax:
            return all_to_all_reference(
                x, axis_name=axis_name, split_axis=split, concat_axis=concat, tiled=tiled,
                axis_index_groups=axis_index_groups,
            )  # fmt: skip
        if tiled:
            return by_tiles(x, split, concat)
        return untiled(by_tiles, x, split, concat)

    return _each(one, x)


def _way(
    op: str,
    x: Any,
    axis_name: AxisName,
    groups: Groups,
    wire: str | None,
    grad_wire: str | None,
    is_reference: bool,
    to: str = "varying",
) -> _quantized_exchange.Way | None:
    """How data of a call travel, if any are quantised."""
    _wire.check(op, x, wire, grad_wire, None)
    if wire is None and grad_wire is None:
        return None
    if to == "reduced":
        raise ValueError(f'jflux.{op}: to="reduced" takes no wire')
    named = meshes.as_tuple(axis_name)
    of = None if groups is None else tuple(map(tuple, groups))
    return _quantized_exchange.Way(named, of, to, wire, grad_wire, is_reference)


def quantized(op: Kind, x: jax.Array, at: int, way: _quantized_exchange.Way) -> jax.Array:
    """An all_gather or reduce_scatter along a dimension (``tiled=True``) as a step of another op,
    whose data travel as `way` says, of any size."""
    if op == "all_gather":
        return _along(at, True, _quantized_exchange.gathered(x, way))
    _, world = meshes.ranks_of(way.axis_name, way.groups)
    return _quantized_exchange.scattered(_parts(at, True, x, world), way)


def _along(at: int, tiled: bool, y: jax.Array) -> jax.Array:
    """Parts [N, ...] along a dimension, their own or a new one."""
    y = jnp.moveaxis(y, 0, at)
    return y.reshape(*y.shape[:at], -1, *y.shape[at + 2 :]) if tiled else y


def _parts(at: int, tiled: bool, x: jax.Array, world: int) -> jax.Array:
    """The parts [N, ...] of a dimension."""
    if tiled:
        x = x.reshape(*x.shape[:at], world, x.shape[at] // world, *x.shape[at + 1 :])
    return jnp.moveaxis(x, at, 0)


def _each(one: Callable[[jax.Array], jax.Array], x: Any) -> Any:
    return jax.tree.map(lambda array: one(jnp.asarray(array)), x)


def _dimension(op: str, name: str, dimension: int, ndim: int) -> int:
    """The dimension, counted from the front."""
    if not isinstance(dimension, int | np.integer):
        raise TypeError(f"jflux.{op}: {name} must be an int, got {dimension!r}")
    if not -ndim <= dimension < ndim:
        raise ValueError(f"jflux.{op}: {name}={dimension} of {ndim} dimensions")
    return dimension % ndim


def _check_shards(op: str, x: Any, dimension: int, world: int, tiled: bool) -> None:
    size = x.shape[dimension]
    if size % world if tiled else size != world:
        expected = f"a multiple of the {world} ranks" if tiled else f"the {world} ranks, untiled"
        raise ValueError(
            f"jflux.{op}: x has shape {tuple(x.shape)}, and its dimension {dimension} must be "
            f"{expected}"
        )


def _bind(
    op: Kind,
    x: jax.Array,
    axis_name: AxisName,
    axis_index_groups: Groups,
    split: int | None,
    concat: int | None,
    same: bool = False,
) -> jax.Array:
    names, world = meshes.ranks_of(axis_name, axis_index_groups)
    params = Params(names, world, split, concat, same)
    collective = params.collective(op)
    if not collective.is_of_nothing(x):
        (y,) = _primitives[op].bind(x, params=params)
        return y
    (x,) = meshes.vary_together(axis_name, x)  # no primitive does
    if not same:
        return collective.of_nothing(x, world)
    others = jax.typeof(x).manual_axis_type.varying.difference(names)
    return meshes.vary(jnp.zeros(collective.shape(x.shape, world), x.dtype), others)


def bind(
    op: str,
    x: jax.Array,
    axis_names: tuple[Any, ...],
    world: int,
    split: int | None,
    concat: int | None,
    same: bool = False,
) -> jax.Array:
    """The op with ``tiled=True``; also in a lowering, where axes are not bound any more. split,
    concat, same: as `Params` has them."""
    (y,) = _primitives[op].bind(x, params=Params(axis_names, world, split, concat, same))
    return y


def gather_for_all(x: jax.Array, axis_names: tuple[Any, ...]) -> jax.Array:
    """All ranks' x, one after the other along the first dimension. The type of the result says that
    it is the same on all ranks."""
    return _bind("all_gather", x, axis_names, None, None, 0, same=True)


def all_gather_reference(
    x: Tree,
    *,
    axis_name: AxisName,
    axis: int = 0,
    tiled: bool = False,
    axis_index_groups: Groups = None,
    to: str = "varying",
    wire: str | None = None,
    grad_wire: str | None = None,
) -> Tree:
    """``lax.all_gather(x)``: arguments and results are those of :func:`jflux.all_gather`. With
    `wire` data are quantised at any size."""
    op = "reference.all_gather"
    way = _way(op, x, axis_name, axis_index_groups, wire, grad_wire, True, to)

    def one(x: jax.Array) -> jax.Array:
        at = normalize(axis, x.ndim + (not tiled))
        if way is not None:
            return _along(at, tiled, _quantized_exchange.all_gather(x, way))
        gather = Collective("all_gather", concat=at)
        if gather.is_of_nothing(x):
            x = x if tiled else jnp.expand_dims(x, at)
            return gather.of_nothing(x, meshes.ranks_of(axis_name, axis_index_groups)[1])
        return _lax.all_gather(
            x, axis_name, axis=at, tiled=tiled, axis_index_groups=axis_index_groups, to=to
        )

    return _each(one, x)


def all_to_all_reference(
    x: Tree,
    *,
    axis_name: AxisName,
    split_axis: int,
    concat_axis: int,
    tiled: bool = False,
    axis_index_groups: Groups = None,
) -> Tree:
    """``lax.all_to_all(x)``: arguments and results are those of :func:`jflux.all_to_all`."""

    def by_tiles(x: jax.Array, split: int, concat: int) -> jax.Array:
        return _lax.all_to_all(
            x, axis_name, split, concat, tiled=True, axis_index_groups=axis_index_groups
        )

    def one(x: jax.Array) -> jax.Array:
        split, concat = normalize(split_axis, x.ndim), normalize(concat_axis, x.ndim)
        return by_tiles(x, split, concat) if tiled else untiled(by_tiles, x, split, concat)

    return _each(one, x)


def reduce_scatter_reference(
    x: Tree,
    *,
    axis_name: AxisName,
    scatter_dimension: int = 0,
    tiled: bool = False,
    axis_index_groups: Groups = None,
    wire: str | None = None,
    grad_wire: str | None = None,
) -> Tree:
    """``lax.psum_scatter(x)``: arguments and results are those of :func:`jflux.reduce_scatter`.
    With `wire` data are quantised at any size."""
    op = "reference.reduce_scatter"
    way = _way(op, x, axis_name, axis_index_groups, wire, grad_wire, True)

    def one(x: jax.Array) -> jax.Array:
        at = normalize(scatter_dimension, x.ndim)  # the oldest JAX takes no negative one
        if way is not None:
            _, world = meshes.ranks_of(axis_name, axis_index_groups)
            return _quantized_exchange.reduce_scatter(_parts(at, tiled, x, world), way)
        scatter = Collective("reduce_scatter", split=at)
        if scatter.is_of_nothing(x):
            y = scatter.of_nothing(x, meshes.ranks_of(axis_name, axis_index_groups)[1])
            return y if tiled else jnp.squeeze(y, at)
        return _lax.psum_scatter(
            x, axis_name, scatter_dimension=at, tiled=tiled, axis_index_groups=axis_index_groups
        )

    return _each(one, x)


def untiled(
    by_tiles: Callable[[jax.Array, int, int], jax.Array], x: jax.Array, split: int, concat: int
) -> jax.Array:
    """all_to_all with ``tiled=False`` by `by_tiles`, which is the tiled form. A new dimension of
    size one becomes the dimension of ranks, and the split dimension, then of size one, goes. (lax's
    own untiled form has no gradient if both dimensions differ.)"""
    at = concat if concat <= split else concat + 1
    split += at <= split
    return jnp.squeeze(by_tiles(jnp.expand_dims(x, at), split, at), split)


def _layout_in_bytes(x: Any, params: Params) -> dict[str, np.int64]:
    """How one shard lies in x and in y: [outer][world][inner bytes] (cc/core/units.h)."""
    shard = list(x.shape)
    if params.split is not None:
        shard[params.split] //= params.world
    sides = {}
    for name, dimension in (("x", params.split), ("y", params.concat)):
        at = 0 if dimension is None else dimension
        sides[f"{name}_outer"] = np.int64(math.prod(shard[:at]))
        sides[f"{name}_inner"] = np.int64(math.prod(shard[at:]) * x.dtype.itemsize)
    return sides


def bytes_received(x: Any, params: Params) -> int:
    """The bytes that reach a rank, its own shard included."""
    size = x.size * x.dtype.itemsize
    return size * params.world if params.split is None else size


def most_bytes(ranks: int) -> int:
    """The most bytes that may reach a rank for GPUs to take the kernels."""
    return MOST_BYTES // (2 if ranks > 2 else 1)


def _is_chunked(x: Any, params: Params) -> bool:
    if (forced := _config.config.current().chunked) is not None:
        return forced
    to_all = params.split is not None and params.concat is not None
    most_in_packets = MOST_BYTES_IN_PACKETS // (2 if to_all and params.world > 2 else 1)
    return bytes_received(x, params) > most_in_packets


def _unsupported(x: Any, params: Params, kind: Kind) -> str | None:
    if params.world > _product.MAX_RANKS:
        return f"{params.world} ranks, the kernels take up to {_product.MAX_RANKS}"
    if x.size * x.dtype.itemsize >= 1 << 31:
        return "x has 2 GiB or more, the kernels take less"
    if kind == "reduce_scatter" and (why := _native.why_not_dtypes(kind, "cuda", x.dtype)):
        return why
    if x.dtype.name.startswith(LESS_THAN_BYTES):
        return f"{x.dtype} operands, the kernels take whole bytes"
    return None


def _takes(call: Call, machine: Machine, kind: Kind) -> Plan | WhyNot:
    (x,), params = call.arrays, call.params
    received, chunked = bytes_received(x, params), _is_chunked(x, params)
    if _config.config.current().chunked is not None:
        kernel: str | None = "asked for"
    else:
        kernel = _product_plan.why_kernel(params)
    if kernel is None and chunked and received > most_bytes(params.world):
        return WhyNot(f"{received} bytes reach a rank, for which lax is faster")
    if why := _unsupported(x, params, kind):
        return WhyNot(why, unsupported=True)
    shard_bytes = x.size * x.dtype.itemsize // (1 if params.split is None else params.world)
    fields = {"world": params.world, "shard_bytes": shard_bytes, "chunked": chunked}
    native = machine.native_plan(kind, fields)
    # Other calls should not find the heap full of what `lax` can move as well.
    if kernel is None and chunked and native["workspace_bytes"] > machine.heap_bytes // 3:
        return WhyNot(
            machine.why_no_room("chunks would take", native["workspace_bytes"], "a third")
        )
    way = "chunks that signals announce" if chunked else "LL packets"
    words = f"{received} bytes reach a rank, in {way}"
    return plans.fused(
        f"{words}; {kernel}" if kernel else words, {**native, "chunked": int(chunked)}
    )


def _plan_two_level(call: Call, kind: Kind) -> Plan:
    assert call.levels is not None
    order = "between nodes, then inside" if kind == "all_gather" else "inside nodes, then between"
    return _two_level_plan.two_level(call.levels, f"{order}: two latencies")


def _two_level_form(arrays: Arrays, params: Params, plan: Plan, kind: Kind) -> list[Any]:
    """An exchange over two levels. Ranks of one node exchange the data of all nodes at once. Ranks
    with the same place in their nodes exchange the data of one rank."""
    (x,) = arrays
    split, concat = params.split, params.concat
    levels = _two_level_plan.levels_of(plan)
    transfers, names = _two_level.Transfers(levels), (levels.inside,)
    if kind == "all_gather":
        assert concat is not None
        x = transfers.gather(x, concat)
        y = bind(kind, x, names, levels.local, None, concat + 1)
        return [_two_level.in_rank_order(_two_level.merge(y, concat), concat, levels)]
    assert split is not None
    x = _two_level.divide(_two_level.in_node_order(x, split, levels), split, levels.count)
    # x has the nodes that data are for in dimension `split` now, and their ranks behind it.
    if kind == "reduce_scatter":
        y = bind(kind, x, names, levels.local, split + 1, None)
        parts = transfers.exchange(y, split, split)
        return [_two_level.sum_in_order(parts, split).astype(x.dtype)]
    assert concat is not None
    behind = concat + (concat >= split)
    y = bind(kind, x, names, levels.local, split + 1, behind)
    y = jnp.squeeze(transfers.exchange(y, split, behind), split)
    return [_two_level.in_rank_order(y, concat, levels)]


def _attributes(arrays: Arrays, params: Params, plan: Plan) -> dict[str, Any]:
    (x,) = arrays
    return {"chunked": bool(plan.config["chunked"]), **_layout_in_bytes(x, params)}


def _result(arrays: Arrays, params: Params, kind: Kind) -> list[Any]:
    (x,) = arrays
    return [(params.collective(kind).shape(x.shape, params.world), x.dtype)]


def _reference(arrays: Arrays, params: Params, kind: Kind) -> list[Any]:
    (x,) = arrays
    return [params.collective(kind).lax(x, params.axis_names)]


def _batch(primitive: Any, operands: Any, dims: Any, *, params: Params) -> Any:
    x = jnp.moveaxis(operands[0], dims[0], 0)
    split, concat = (None if d is None else d + 1 for d in (params.split, params.concat))
    params = dataclasses.replace(params, split=split, concat=concat)
    return primitive.bind(x, params=params), [0]


def _transpose(cotangents: Any, x: Any, *, params: Params, kind: Kind) -> Any:
    (ct,) = cotangents
    if type(ct) is ad.Zero:
        return [ad.Zero(x.aval)]
    if params.same:  # ct is the same on all ranks, each of which had a part
        assert params.concat is not None
        size = ct.shape[params.concat] // params.world
        ct = meshes.vary(ct, params.axis_names)
        at = lax.axis_index(params.axis_names) * size
        return [lax.dynamic_slice_in_dim(ct, at, size, params.concat)]
    params = dataclasses.replace(params, split=params.concat, concat=params.split)
    return _primitives[Collective(kind).transposed().kind].bind(ct, params=params)


def _op_of(kind: Kind) -> Op:
    takes = functools.partial(_takes, kind=kind)
    plan_two_level = functools.partial(_plan_two_level, kind=kind)
    return Op(
        name=kind,
        result_shapes=functools.partial(_result, kind=kind),
        reference=functools.partial(_reference, kind=kind),
        forms=(
            forms.kernel(takes, _attributes),
            Form(
                _two_level_plan.collective(takes, plan_two_level),
                functools.partial(_two_level_form, kind=kind),
            ),
        ),
        batch=_batch,
        same_over=lambda params: params.axis_names if params.same else (),
    )


_KINDS: tuple[Kind, ...] = ("all_gather", "reduce_scatter", "all_to_all")
_ops: dict[str, Op] = {kind: _op_of(kind) for kind in _KINDS}
_primitives: dict[str, Any] = {kind: make_primitive(op) for kind, op in _ops.items()}
for _kind in _KINDS:
    ad.deflinear2(_primitives[_kind], functools.partial(_transpose, kind=_kind))


def _spec(
    kind: Kind,
    function: Callable[..., Any],
    reference: Callable[..., Any],
    communication: Callable[..., Collective],
    *ways: dict[str, Any],
) -> OpSpec:
    types = _native.dtypes(kind, "cuda")  # empty: whatever they are
    return OpSpec(
        name=kind,
        function=function,
        reference=reference,
        communication=communication,
        dtypes={"cpu": types, "cuda": types},
        ways=ways,
        gradient=(Collective(kind).transposed().kind,),
        most_bytes=most_bytes,
    )


SPECS = (
    _spec(
        "all_gather", all_gather, all_gather_reference,
        lambda ndim, axis=0, **_: Collective("all_gather", concat=normalize(axis, ndim)),
        {"tiled": True},
    ),
    _spec(
        "reduce_scatter", reduce_scatter, reduce_scatter_reference,
        lambda ndim, scatter_dimension=0, **_: Collective(
            "reduce_scatter", split=normalize(scatter_dimension, ndim)
        ),
        {"tiled": True},
    ),
    _spec(
        "all_to_all", all_to_all, all_to_all_reference,
        lambda ndim, split_axis=0, concat_axis=0, **_: Collective(
            "all_to_all", normalize(split_axis, ndim), normalize(concat_axis, ndim)
        ),
        {"tiled": True, "split_axis": 0, "concat_axis": 0},
        {"tiled": True, "split_axis": 1, "concat_axis": 0},
    ),
)  # fmt: skip
