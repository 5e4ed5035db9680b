"""How the halos of `halo_exchange` travel: between a rank and its two neighbours, along one
dimension at a time, in collective-permutes or in an all-to-all."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ... import _config, _native
from ..._call import plans
from ..._ranks import meshes
from ..._ranks.meshes import AxisName
from . import exchange

#: What stands beyond the ends of the whole array, as `jnp.pad` names it.
Mode = Literal["constant", "wrap", "edge", "reflect", "symmetric"]
MODES: tuple[Mode, ...] = get_args(Mode)


@dataclasses.dataclass(frozen=True)
class Dimension:
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


def swap_each(
    to_next: list[jax.Array], to_previous: list[jax.Array], one: Dimension
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Each array by a `lax.ppermute` of its own. A rank without a sender gets zeros."""
    return [_permuted(a, one, 1) for a in to_next], [_permuted(a, one, -1) for a in to_previous]


def _permuted(a: jax.Array, one: Dimension, step: int) -> jax.Array:
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
class Way:
    """How halos of one dimension and type travel."""

    words: str
    in_kernel: bool


def plan(ways: Sequence[Way]) -> plans.Plan:
    """What :func:`jflux.explain` says of a call."""
    words = dict.fromkeys(way.words for way in ways)
    reason = "; ".join(words) or "no halo comes from another rank"
    in_kernel = any(way.in_kernel for way in ways)
    return plans.decomposed(reason) if in_kernel else plans.reference(reason)


def swap(
    to_next: list[jax.Array],
    to_previous: list[jax.Array],
    one: Dimension,
    ways: list[Way],
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
    to_next: list[jax.Array], to_previous: list[jax.Array], one: Dimension
) -> tuple[tuple[list[jax.Array], list[jax.Array]], Way]:
    both, along = [*to_next, *to_previous], f"along {one.axis_name!r}"
    why = _why_no_kernel(to_next, to_previous, one)
    if why is None:
        from_previous, from_next = _by_all_to_all(_flat(to_next), _flat(to_previous), one)
        halos = _split(from_previous, to_next), _split(from_next, to_previous)
        return halos, Way(f"one all_to_all {along}", in_kernel=True)
    way = Way(f"collective-permutes {along}: {why}", in_kernel=False)
    is_sharded = meshes.is_sharded(map(jax.typeof, both))
    if one.ranks == 2 and one.is_periodic and one.before and one.after and not is_sharded:
        flat = _permuted(_flat(both), one, 1)  # the next rank is the previous one
        parts, count = _split(flat, both), len(to_next)
        return (parts[:count], parts[count:]), way
    if len(to_next) == 1:
        return swap_each(to_next, to_previous, one), way
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
    to_next: jax.Array, to_previous: jax.Array, one: Dimension
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
    to_next: Sequence[jax.Array], to_previous: Sequence[jax.Array], one: Dimension
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
