"""halo_exchange: a rank's part of an array, padded with the edges of its neighbours' parts.

Dimensions are exchanged one after the other, and each sends the halos of those before it along:
so corners come from the ranks across them, without an exchange of their own. Each dimension has one
step in which data travel, between a rank and its two neighbours (_halo_transfers.py)::

    rank r       ... | to_previous |   interior   | to_next | ...
    rank r + 1                          from_previous | x | from_next

Everything else is slices and concatenations, which JAX differentiates: the transpose of a slice
adds, so gradients of halos are added to the elements that they are copies of.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._call import explain
from ..._ranks import meshes
from ..._ranks.meshes import AxisName
from . import _halo_transfers
from ._halo_transfers import MODES, Dimension, Mode

OP = "jflux.halo_exchange"

#: One for all dimensions, or one for each.
Halo = int | Sequence[int | Sequence[int]]
Values = Any

Tree = TypeVar("Tree")
#: (of each array what goes to the next rank, what goes to the previous one, the dimension) -> of
#: each array what came from the previous rank, and from the next one.
Swap = Callable[
    [list[jax.Array], list[jax.Array], Dimension], tuple[list[jax.Array], list[jax.Array]]
]


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
    ways: list[_halo_transfers.Way] = []
    padded = _padded(arrays, dimensions, functools.partial(_halo_transfers.swap, ways=ways))
    explain.note_once("halo_exchange", arrays, padded, _halo_transfers.plan(ways))
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
    return jax.tree.unflatten(structure, _padded(arrays, dimensions, _halo_transfers.swap_each))


# ---- Options -------------------------------------------------------------------------------------


def _dimensions(
    arrays: Sequence[jax.Array], axis_name: Any, halo: Any, axis: Any, mode: Any, values: Any
) -> list[Dimension]:
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
        found.append(Dimension(int(at), name, ranks, before, after, one_mode, (low, high)))
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


def _check(a: jax.Array, dimensions: Sequence[Dimension]) -> None:
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
    arrays: Sequence[jax.Array], dimensions: Sequence[Dimension], swap: Swap
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


def _joined(one: Dimension, before: jax.Array, a: jax.Array, after: jax.Array) -> jax.Array:
    """x between its halos, of which those of the first and the last rank are still to be made if
    the array is not periodic."""
    if not one.is_periodic:
        rank = lax.axis_index(meshes.as_tuple(one.axis_name)) if one.ranks > 1 else 0
        before = _at_end(before, rank == 0, _beyond(a, one, 0), one)
        after = _at_end(after, rank == one.ranks - 1, _beyond(a, one, 1), one)
    parts = [part for part in (before, a, after) if part is a or part.shape[one.axis]]
    return jnp.concatenate(parts, one.axis) if len(parts) > 1 else a


def _at_end(halo: jax.Array, is_end: Any, beyond: jax.Array | None, one: Dimension) -> jax.Array:
    if not halo.shape[one.axis] or (beyond is None and one.ranks > 1):
        return halo  # zeros are there
    beyond = jnp.zeros_like(halo) if beyond is None else beyond
    return beyond if one.ranks == 1 else jnp.where(is_end, beyond, halo)


def _beyond(a: jax.Array, one: Dimension, side: int) -> jax.Array | None:
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
