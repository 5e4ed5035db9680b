"""halo_exchange: a rank's part of an array, padded with the edges of its neighbours' parts.

Dimensions are exchanged one after the other, and each sends the halos of those before it along:
so corners come from the ranks across them, without an exchange of their own. Each dimension has one
step in which data travel, between a rank and its two neighbours (`_swap`)::

    rank r       ... | to_previous |   interior   | to_next | ...
    rank r + 1                          from_previous | x | from_next

Everything else is slices and concatenations, which JAX differentiates: the transpose of a slice
adds, so gradients of halos are added to the elements that they are copies of.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ... import _config, _native
from ..._call import explain, plans
from ..._ranks import meshes
from ..._ranks.meshes import AxisName
from . import exchange

OP = "jflux.halo_exchange"

#: What stands beyond the ends of the whole array, as `jnp.pad` names it.
Mode = Literal["constant", "wrap", "edge", "reflect", "symmetric"]
MODES: tuple[Mode, ...] = get_args(Mode)

#: One for all dimensions, or one for each.
Halo = int | Sequence[int | Sequence[int]]
Values = Any

Tree = TypeVar("Tree")
#: (of each array what goes to the next rank, what goes to the previous one, the dimension) -> of
#: each array what came from the previous rank, and from the next one.
Swap = Callable[
    [list[jax.Array], list[jax.Array], "_Dimension"], tuple[list[jax.Array], list[jax.Array]]
]


@dataclasses.dataclass(frozen=True)
class _Dimension:
    """One dimension of a call.

    Attributes:
      axis: of each array, counted from the front or the end.
      axis_name: the mesh axis, or axes, that split it.
      ranks: how many ranks these have.
      before, after: widths of the halos.
      mode, values: what stands beyond both ends of the whole array.
    """

    axis: int
    axis_name: AxisName
    ranks: int
    before: int
    after: int
    mode: Mode
    values: tuple[Any, Any]

    @property
    def is_periodic(self) -> bool:
        return self.mode == "wrap"

    def pairs(self, step: int, wraps: bool) -> tuple[tuple[Any, ...], list[tuple[int, int]]]:
        """(axes, (source, destination) of each rank) of a `lax.ppermute` that goes `step` = 1 or -1
        ranks on, around a ring if `wraps`."""
        ranks = range(self.ranks)
        ring = [(r, (r + step) % self.ranks) for r in ranks if wraps or r + step in ranks]
        sizes = meshes.sizes_in_mesh_order(self.axis_name)
        pairs = meshes.renumbered(ring, meshes.as_tuple(self.axis_name), sizes)
        return tuple(name for name, _ in sizes), pairs


@meshes.axis_by_name
def halo_exchange(
    x: Tree,
    *,
    axis_name: AxisName | Sequence[AxisName],
    halo: Halo,
    axis: int | Sequence[int] = 0,
    mode: Mode | Sequence[Mode] = "constant",
    constant_values: Values = 0,
) -> Tree:
    """x padded with the edges of the neighbours' x, for stencils over arrays that are split over
    ranks: ``jnp.pad`` of the whole array, of which each rank gets its part and the halos.

    Inside ``jax.shard_map``, per rank along `axis_name`, whose ranks have consecutive parts of
    dimension `axis`::

        x [.., n, ..]   ->   [.., before + n + after, ..]

    The first `before` elements are the last ones of the rank before, the last `after` elements are
    the first ones of the rank after. Several dimensions, each split over mesh axes of its own, are
    exchanged one after the other, halos of the earlier ones included, so that corners are right
    too.

    XLA's collective-permutes move the halos, as those of ``lax.ppermute`` by hand: on GPUs each is
    a send and a receive of NCCL. What the op adds is the boundaries, the corners, and few
    transfers. A dimension takes one for each direction, for all arrays of one type together; in a
    ring of two ranks it takes one for both directions.

    ``jflux.config(unchecked_kernels=True)`` takes one :func:`jflux.all_to_all` for both directions
    instead, where all that reaches a rank fits into LL packets. A rank then sends a part to every
    rank, of which the neighbours alone need theirs. No GPU has been timed with it.

    Differentiable: a cotangent of a halo goes back to the rank that the halo came from, and is
    added there. ``jax.linear_transpose`` gives that sum alone (of constant values of 0), which
    particle-mesh codes call a halo reduction.

    Args:
      x: an array of any type, or a pytree of such.
      axis_name: the mesh axis that splits `axis`, or a tuple of axes, the first one major. Where
        `axis` is a sequence: a sequence of such, one for each dimension.
      halo: the width of the halos: an int, or (before, after); 0 is no halo. Where `axis` is a
        sequence: an int for all dimensions, or a sequence with one of these for each.
      axis: the dimension of x to pad, or a sequence of dimensions.
      mode: what stands beyond the ends of the whole array, as ``jnp.pad`` names it: "constant",
        "wrap" (the array is periodic), "edge" (the last element), "reflect" (mirrored about the
        last element) or "symmetric" (mirrored about its far side). One for all dimensions, or a
        sequence with one for each.
      constant_values: of mode "constant": a scalar, or (before, after). Where `axis` is a sequence:
        a scalar for all dimensions, or a sequence with one of these for each. Scalars may be JAX
        arrays, and have gradients.

    Returns:
      x's shape with the dimensions `axis` longer by before + after. It varies over `axis_name`.

    Raises:
      ValueError: when the call is traced, for a halo that is wider than a rank's x along the
        dimension ("reflect": than all but one element of it), since it would need data of ranks
        further away; for dimensions that x has not or that are named twice, sequences of different
        lengths, and another `mode`.
      TypeError: for options of other types, and a constant that an integer x would cut.
      NameError: outside ``shard_map``.

    Examples:
      >>> mesh = jax.sharding.Mesh(jax.devices(), "x")
      >>> def mean(u):  # of each element and its neighbours: u is split over 8 ranks
      ...     u = jflux.halo_exchange(u, axis_name="x", halo=1, mode="wrap")
      ...     return (u[:-2] + u[1:-1] + u[2:]) / 3
      >>> f = jax.jit(jax.shard_map(mean, mesh=mesh, in_specs=P("x"), out_specs=P("x")))
      >>> f(3.0 * jnp.arange(16)).tolist()[:4]
      [16.0, 3.0, 6.0, 9.0]
    """
    arrays, structure = jax.tree.flatten(x)
    arrays = [jnp.asarray(a) for a in arrays]
    dimensions = _dimensions(arrays, axis_name, halo, axis, mode, constant_values)
    ways: list[_Way] = []
    padded = _padded(arrays, dimensions, functools.partial(_swap, ways=ways))
    explain.note_once("halo_exchange", arrays, padded, _plan(ways))
    return jax.tree.unflatten(structure, padded)


def reference(
    x: Tree,
    *,
    axis_name: AxisName | Sequence[AxisName],
    halo: Halo,
    axis: int | Sequence[int] = 0,
    mode: Mode | Sequence[Mode] = "constant",
    constant_values: Values = 0,
) -> Tree:
    """:func:`jflux.halo_exchange` with a ``lax.ppermute`` for each array and direction."""
    arrays, structure = jax.tree.flatten(x)
    arrays = [jnp.asarray(a) for a in arrays]
    dimensions = _dimensions(arrays, axis_name, halo, axis, mode, constant_values)
    return jax.tree.unflatten(structure, _padded(arrays, dimensions, _swap_each))


# ---- Options -------------------------------------------------------------------------------------


def _dimensions(
    arrays: Sequence[jax.Array], axis_name: Any, halo: Any, axis: Any, mode: Any, values: Any
) -> list[_Dimension]:
    """The call's dimensions, in order. Raises for options that do not fit."""
    if isinstance(axis, int | np.integer):
        axis, axis_name, halo, mode = (axis,), (axis_name,), (halo,), (mode,)
        values = (values,)
    elif not isinstance(axis, tuple | list):
        raise TypeError(f"{OP}: {axis=} must be an int or a sequence of ints")
    count = len(axis)
    names = _for_each("axis_name", axis_name, count, shared=False)
    halos = _for_each("halo", halo, count)
    modes = _for_each("mode", mode, count)
    constants = _for_each("constant_values", values, count)
    meshes.axes_of(*names)  # raises for an axis that is named twice
    found = []
    for each in zip(axis, names, halos, modes, constants, strict=True):
        at, name, widths, one_mode, value = each
        if not isinstance(at, int | np.integer):
            raise TypeError(f"{OP}: {axis=} must be an int or a sequence of ints")
        if one_mode not in MODES:
            raise ValueError(f"{OP}: mode={one_mode!r} must be one of {', '.join(MODES)}")
        before, after = (_width(w) for w in _sides("halo", widths))
        low, high = _sides("constant_values", value)
        ranks = meshes.axis_size(name)
        found.append(_Dimension(int(at), name, ranks, before, after, one_mode, (low, high)))
    for a in arrays:
        _check(a, found)
    return found


def _for_each(name: str, option: Any, count: int, shared: bool = True) -> tuple[Any, ...]:
    """An option of each dimension."""
    if isinstance(option, tuple | list):
        if len(option) != count:
            raise ValueError(
                f"{OP}: {name}={option!r} must have an entry for each of the {count} dimensions "
                "in axis"
            )
        return tuple(option)
    if not shared:
        raise ValueError(
            f"{OP}: {name}={option!r} must be a sequence with the mesh axis of each of the {count} "
            "dimensions in axis"
        )
    return (option,) * count


def _sides(name: str, option: Any) -> tuple[Any, Any]:
    """(before, after)."""
    if not isinstance(option, tuple | list):
        return option, option
    if len(option) != 2:
        raise ValueError(f"{OP}: {name} has {option!r}, which must be one or (before, after)")
    return option[0], option[1]


def _width(width: Any) -> int:
    if not isinstance(width, int | np.integer) or isinstance(width, bool | np.bool_):
        raise TypeError(f"{OP}: halo has {width!r}, and widths must be ints")
    if width < 0:
        raise ValueError(f"{OP}: halo has {width}, and widths must be 0 or more")
    return int(width)


def _check(a: jax.Array, dimensions: Sequence[_Dimension]) -> None:
    """Raises for an array that the call does not fit."""
    places = []
    for one in dimensions:
        if not -a.ndim <= one.axis < a.ndim:
            raise ValueError(f"{OP}: axis={one.axis} of an x with shape {a.shape}")
        places.append(one.axis % a.ndim)
        size, widest = a.shape[places[-1]], max(one.before, one.after)
        most = size - 1 if one.mode == "reflect" else size
        if widest and widest > most:
            of = f"mode='reflect' takes up to {max(most, 0)}" if most < size else f"it has {size}"
            raise ValueError(
                f"{OP}: a halo of {widest} along axis={one.axis} needs as many elements of each "
                f"rank's x, whose shape is {a.shape}: {of}. Split it over fewer ranks"
            )
        for value in one.values if one.mode == "constant" else ():
            _check_value(a, value)
    if len(set(places)) < len(places):
        raise ValueError(f"{OP}: axis={tuple(d.axis for d in dimensions)} has a dimension twice")


def _check_value(a: jax.Array, value: Any) -> None:
    if jnp.ndim(value) != 0:
        raise ValueError(f"{OP}: constant_values must be scalars, got shape {jnp.shape(value)}")
    given = jnp.result_type(value)
    for kind in (jnp.complexfloating, jnp.inexact):
        if jnp.issubdtype(given, kind) and not jnp.issubdtype(a.dtype, kind):
            raise TypeError(f"{OP}: a constant of {given} does not fit an x of {a.dtype}")


# ---- Padding -------------------------------------------------------------------------------------


def _padded(
    arrays: Sequence[jax.Array], dimensions: Sequence[_Dimension], swap: Swap
) -> list[jax.Array]:
    names = meshes.axes_of(*(one.axis_name for one in dimensions))
    # Of one rank, or with a halo of 0, too: types do not depend on sizes.
    padded = [meshes.vary(a, meshes.tracked(names)) for a in arrays]
    for one in dimensions:
        ends = [_slice(a, one.axis, a.shape[one.axis] - one.before, None) for a in padded]
        starts = [_slice(a, one.axis, 0, one.after) for a in padded]
        came = (ends, starts) if one.ranks == 1 else swap(ends, starts, one)
        padded = [_joined(one, *parts) for parts in zip(came[0], padded, came[1], strict=True)]
    return padded


def _slice(a: jax.Array, axis: int, start: int, stop: int | None) -> jax.Array:
    return lax.slice_in_dim(a, start, stop, axis=axis % a.ndim)


def _joined(one: _Dimension, before: jax.Array, a: jax.Array, after: jax.Array) -> jax.Array:
    """x between its halos, of which those of the first and the last rank are still to be made if
    the array is not periodic."""
    if not one.is_periodic:
        rank = lax.axis_index(meshes.as_tuple(one.axis_name)) if one.ranks > 1 else 0
        before = _at_end(before, rank == 0, _beyond(a, one, 0), one)
        after = _at_end(after, rank == one.ranks - 1, _beyond(a, one, 1), one)
    parts = [part for part in (before, a, after) if part is a or part.shape[one.axis]]
    return jnp.concatenate(parts, one.axis) if len(parts) > 1 else a


def _at_end(halo: jax.Array, is_end: Any, beyond: jax.Array | None, one: _Dimension) -> jax.Array:
    if not halo.shape[one.axis] or (beyond is None and one.ranks > 1):
        return halo  # zeros are there
    beyond = jnp.zeros_like(halo) if beyond is None else beyond
    return beyond if one.ranks == 1 else jnp.where(is_end, beyond, halo)


def _beyond(a: jax.Array, one: _Dimension, side: int) -> jax.Array | None:
    """What stands before x (side 0) or after it (side 1) if no rank does; None: zeros."""
    width, size = (one.before, one.after)[side], a.shape[one.axis]
    match one.mode:
        case "constant":
            value = one.values[side]
            if isinstance(value, int | float | np.number | np.bool_) and value == 0:
                return None
            return jnp.full_like(_slice(a, one.axis, 0, width), value)
        case "edge":
            if not width:
                return None
            last = _slice(a, one.axis, side * (size - 1), side * (size - 1) + 1)
            return jnp.concatenate([last] * width, one.axis)
        case "reflect" | "symmetric":
            skipped = int(one.mode == "reflect")
            start = size - skipped - width if side else skipped
            return jnp.flip(_slice(a, one.axis, start, start + width), one.axis)
    return None


# ---- What travels --------------------------------------------------------------------------------


def _swap_each(
    to_next: list[jax.Array], to_previous: list[jax.Array], one: _Dimension
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Each array by a `lax.ppermute` of its own. A rank without a sender gets zeros."""
    return [_permuted(a, one, 1) for a in to_next], [_permuted(a, one, -1) for a in to_previous]


def _permuted(a: jax.Array, one: _Dimension, step: int) -> jax.Array:
    """What comes from the rank before (`step` = 1) or after (-1), and zeros where none is."""
    if 0 in a.shape:
        return a
    if one.is_periodic or meshes.is_manual(one.axis_name):
        return lax.ppermute(a, *one.pairs(step, one.is_periodic))
    # Along an axis of vmap JAX takes whole permutations alone.
    came = lax.ppermute(a, *one.pairs(step, True))
    is_end = lax.axis_index(meshes.as_tuple(one.axis_name)) == (0 if step == 1 else one.ranks - 1)
    return jnp.where(is_end, jnp.zeros_like(came), came)


@dataclasses.dataclass(frozen=True)
class _Way:
    """How halos of one dimension and type travel."""

    words: str
    in_kernel: bool


def _plan(ways: Sequence[_Way]) -> plans.Plan:
    """What :func:`jflux.explain` says of a call."""
    words = dict.fromkeys(way.words for way in ways)
    reason = "; ".join(words) or "no halo comes from another rank"
    in_kernel = any(way.in_kernel for way in ways)
    return plans.decomposed(reason) if in_kernel else plans.reference(reason)


def _swap(
    to_next: list[jax.Array],
    to_previous: list[jax.Array],
    one: _Dimension,
    ways: list[_Way],
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Arrays of one type together, in as few transfers as there may be. `ways`: where it is noted
    how they travel."""
    groups: dict[Any, list[int]] = collections.defaultdict(list)
    for i, a in enumerate(to_next):
        # Arrays in one transfer would vary over all axes that any of them varies over. Of types
        # that say how XLA splits an array, each travels by itself.
        of = jax.typeof(a)
        alone = i if meshes.is_sharded([of]) else None
        groups[a.dtype, of.manual_axis_type, alone].append(i)
    before, after = list(to_next), list(to_previous)
    for group in groups.values():
        nexts, previous = [to_next[i] for i in group], [to_previous[i] for i in group]
        came, way = _swap_group(nexts, previous, one)
        ways.append(way)
        for i, from_previous, from_next in zip(group, *came, strict=True):
            before[i], after[i] = from_previous, from_next
    return before, after


def _swap_group(
    to_next: list[jax.Array], to_previous: list[jax.Array], one: _Dimension
) -> tuple[tuple[list[jax.Array], list[jax.Array]], _Way]:
    both, along = [*to_next, *to_previous], f"along {one.axis_name!r}"
    why = _why_no_kernel(to_next, to_previous, one)
    if why is None:
        from_previous, from_next = _by_all_to_all(_flat(to_next), _flat(to_previous), one)
        halos = _split(from_previous, to_next), _split(from_next, to_previous)
        return halos, _Way(f"one all_to_all {along}", in_kernel=True)
    way = _Way(f"collective-permutes {along}: {why}", in_kernel=False)
    is_sharded = meshes.is_sharded(map(jax.typeof, both))
    if one.ranks == 2 and one.is_periodic and one.before and one.after and not is_sharded:
        flat = _permuted(_flat(both), one, 1)  # the next rank is the previous one
        parts, count = _split(flat, both), len(to_next)
        return (parts[:count], parts[count:]), way
    if len(to_next) == 1:
        return _swap_each(to_next, to_previous, one), way
    came = _permuted(_flat(to_next), one, 1), _permuted(_flat(to_previous), one, -1)
    return (_split(came[0], to_next), _split(came[1], to_previous)), way


def _flat(arrays: Sequence[jax.Array]) -> jax.Array:
    return jnp.concatenate([a.ravel() for a in arrays])


def _split(flat: jax.Array, like: Sequence[jax.Array]) -> list[jax.Array]:
    """Undoes :func:`_flat` for arrays of these shapes."""
    ends = np.cumsum([a.size for a in like]).tolist()
    starts = [0, *ends[:-1]]
    return [
        lax.slice_in_dim(flat, start, end).reshape(a.shape)
        for a, start, end in zip(like, starts, ends, strict=True)
    ]


def _by_all_to_all(
    to_next: jax.Array, to_previous: jax.Array, one: _Dimension
) -> tuple[jax.Array, jax.Array]:
    """(what came from the previous rank, from the next one), flat, by one exchange. Others than the
    neighbours get a part that they do not read."""
    names, ranks = meshes.as_tuple(one.axis_name), one.ranks
    rank = lax.axis_index(names)
    if not one.is_periodic:  # ranks at the ends send zeros to those at the other end
        to_next = jnp.where(rank == ranks - 1, jnp.zeros_like(to_next), to_next)
        to_previous = jnp.where(rank == 0, jnp.zeros_like(to_previous), to_previous)
    width, rows = max(to_next.size, to_previous.size), jnp.arange(ranks, dtype=jnp.int32)[:, None]
    following, preceding = (rank + 1) % ranks, (rank - 1) % ranks
    if ranks == 2:
        sent = jnp.concatenate([to_next, to_previous])[None]
        parts = jnp.where(rows == following, sent, jnp.zeros_like(sent))
    else:
        ahead, back = (jnp.pad(a, (0, width - a.size))[None] for a in (to_next, to_previous))
        parts = jnp.where(rows == following, ahead, back)
    came = exchange.all_to_all(parts, axis_name=names, split_axis=0, concat_axis=0, tiled=True)
    if ranks == 2:
        both = lax.dynamic_index_in_dim(came, following, keepdims=False)
        return both[: to_next.size], both[to_next.size :]
    from_previous, from_next = (
        lax.dynamic_index_in_dim(came, at, keepdims=False) for at in (preceding, following)
    )
    return from_previous[: to_next.size], from_next[: to_previous.size]


def _why_no_kernel(
    to_next: Sequence[jax.Array], to_previous: Sequence[jax.Array], one: _Dimension
) -> str | None:
    """Why halos do not travel by :func:`jflux.all_to_all`, or None. Known when the call is
    traced."""
    switches, types = _config.config.current(), [*map(jax.typeof, to_next)]
    if not switches.fused:
        return "jflux.config(fused=False)"
    if not switches.unchecked_kernels:
        return "not timed beside all_to_all, which jflux.config(unchecked_kernels=True) takes"
    if meshes.platform() not in ("cpu", "gpu"):
        return plans.NO_KERNELS
    if not meshes.is_manual(one.axis_name):
        return meshes.why_not_manual(one.axis_name)
    if one.ranks > _native.MAX_RANKS:
        return f"{one.ranks} ranks, the kernels take up to {_native.MAX_RANKS}"
    if any(t.manual_axis_type.reduced or t.manual_axis_type.unreduced for t in types):
        return "types say that a sum over ranks is still to be made"
    if meshes.is_sharded(types):
        return "types say how XLA splits x"
    if why := plans.why_symbolic([*to_next, *to_previous]):
        return why
    dtype = types[0].dtype
    if jnp.issubdtype(dtype, jax.dtypes.extended) or dtype.name.startswith(
        exchange.LESS_THAN_BYTES
    ):
        return f"{dtype} operands, the kernels take whole bytes"
    ahead, back = (sum(math.prod(a.shape) for a in some) for some in (to_next, to_previous))
    part = ahead + back if one.ranks == 2 else max(ahead, back)
    received = one.ranks * part * dtype.itemsize
    most = exchange.MOST_BYTES_IN_PACKETS // (2 if one.ranks > 2 else 1)
    if received > most and not switches.always:
        return f"{received} bytes would reach a rank, and LL packets take up to {most}"
    return "no halo" if not received else None
