"""Mesh axes, and the groups of ranks that they make.

A rank is a device's position along the named axis (or tuple of axes, the first one major). The
devices that differ in nothing else form a group; a 2 x 4 mesh has two groups of four along its
second axis.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import jax.extend.backend
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import mlir
from jax.sharding import AbstractMesh, Mesh

from . import program_devices

AxisName = Hashable | tuple[Hashable, ...]

P = ParamSpec("P")
R = TypeVar("R")


@dataclasses.dataclass(frozen=True)
class Subgroups:
    """Groups that the ranks along some axes fall into. In an op's `axis_names` these stand
    alone, and the op then runs in each of the groups.

    Attributes:
      axis_names: the axes.
      groups: positions along them in rank order, all of them once, and equally many in each group.
    """

    axis_names: tuple[Any, ...]
    groups: tuple[tuple[int, ...], ...]

    @property
    def world(self) -> int:
        """Ranks of a group."""
        return len(self.groups[0])


def as_tuple(axis_name: AxisName) -> tuple[Any, ...]:
    """The mesh axes that an option names: one, or several in a tuple; a list will do, as in `lax`.

    Raises:
      ValueError: for an axis that is named twice.
    """
    names = tuple(axis_name) if isinstance(axis_name, tuple | list) else (axis_name,)
    if len(set(names)) < len(names):
        raise ValueError(f"a mesh axis may be named once, got {names}")
    return names


def axis_by_name(function: Callable[P, R], package: str | None = None) -> Callable[P, R]:
    """A function of arrays that takes all else by name. It says so where an axis comes by position,
    as `lax`'s collectives take it, and Python speaks of numbers of arguments.

    Args:
      package: where users find it; by default what its module's name begins with.
    """
    parameters = inspect.signature(function).parameters.values()
    arrays = [p.name for p in parameters if p.kind == p.POSITIONAL_OR_KEYWORD]
    package = package or function.__module__.split("._")[0]

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if len(args) > len(arrays):
            raise TypeError(
                f"{package}.{function.__name__} takes {', '.join(arrays)} by position, and all "
                f"else by name, such as axis_name={args[len(arrays)]!r}"
            )
        return function(*args, **kwargs)

    return call


def axes_of(*names: AxisName | None) -> tuple[Any, ...]:
    """The mesh axes of several options, in order; None is none.

    Raises:
      ValueError: for an axis that is named twice.
    """
    axes = tuple(axis for name in names if name is not None for axis in as_tuple(name))
    if len(set(axes)) < len(axes):
        raise ValueError(f"a mesh axis may be named once, got {axes}")
    return axes


def axes_and_groups(
    axis_name: AxisName,
) -> tuple[tuple[Any, ...], tuple[tuple[int, ...], ...] | None]:
    """The mesh axes, and the groups that their ranks fall into: `axis_index_groups` of `lax`."""
    match as_tuple(axis_name):
        case (Subgroups(axis_names, groups),):
            return axis_names, groups
        case names:
            return names, None


def ranks_of(
    axis_name: AxisName, axis_index_groups: Sequence[Sequence[int]] | None
) -> tuple[tuple[Any, ...], int]:
    """(the axes, or the `Subgroups` of them that the groups are; how many ranks exchange data).

    Args:
      axis_index_groups: as `lax`'s collectives take them: positions along the axis. None: all
        ranks are one group.

    Raises:
      ValueError: for groups that have not each rank once, or are not of one size.
    """
    names, size = as_tuple(axis_name), axis_size(axis_name)
    if axis_index_groups is None:
        return names, size
    groups = tuple(map(tuple, axis_index_groups))
    ranks = [rank for group in groups for rank in group]
    each_once = len(ranks) == size and set(ranks) == set(range(size))
    if not each_once or len({len(group) for group in groups}) != 1:
        raise ValueError(
            f"{axis_index_groups=} must have each of the {size} ranks of {axis_name=} once, in "
            "groups of one size"
        )
    groups = tuple(tuple(map(int, group)) for group in groups)
    return (Subgroups(names, groups),), len(groups[0])


def has_subgroups(axis_name: AxisName) -> bool:
    """Whether it names groups of ranks along axes."""
    return axes_and_groups(axis_name)[1] is not None


def is_bound(axis_name: AxisName) -> bool:
    """Whether collectives over the axis may be called here: inside shard_map, or vmap of it."""
    try:
        lax.axis_size(as_tuple(axis_name))
    except NameError:
        return False
    return True


def is_manual(axis_name: AxisName) -> bool:
    """Whether the axis is one of a mesh's, bound by shard_map (and not by vmap)."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return all(name in manual for name in as_tuple(axis_name))


def why_not_manual(axis_name: AxisName) -> str:
    """Why a call over an axis that is bound, and not manual, has no ranks. JAX binds axes of vmap
    and of custom_partitioning alike, so that they cannot be told apart."""
    return (
        f"axis {axis_name!r} is not a mesh's here: vmap named it, or the call is in a function of "
        "custom_partitioning, which needs a jax.sharding.use_abstract_mesh "
        "(docs/guide/calling.md, JAX's transformations)"
    )


def axis_size(axis_name: AxisName) -> int:
    """How many ranks there are along the axis.

    Raises:
      NameError: outside of a ``shard_map`` over it; the message says where to call.
    """
    try:
        return lax.axis_size(as_tuple(axis_name))
    except NameError:
        raise NameError(_not_bound(as_tuple(axis_name))) from None


def _not_bound(names: tuple[Any, ...]) -> str:
    """What an op that needs ``shard_map`` says where the axes are not bound."""
    wanted = repr(names[0] if len(names) == 1 else names)
    manual = jax.sharding.get_abstract_mesh().manual_axes
    if manual:
        here = ", ".join(sorted(map(repr, manual)))
        return f"axis_name={wanted} must be an axis of the jax.shard_map around the call: {here}"
    return (
        f"axis_name={wanted} needs a jax.shard_map around the call, over a mesh with that axis: "
        "this op takes one rank's arrays, not global ones"
    )


def renumbered(
    pairs: Iterable[tuple[int, int]], names: Sequence[Any], sizes: Sequence[tuple[Any, int]]
) -> list[tuple[int, int]]:
    """Pairs of ranks along the axes `names`, numbered along the same axes in the order of `sizes`:
    the mesh's, as ``lax.ppermute`` wants them."""
    size_of = dict(sizes)
    own, mesh = [size_of[name] for name in names], [size for _, size in sizes]

    def in_mesh(rank: int) -> int:
        at = dict(zip(names, np.unravel_index(rank, own), strict=True))
        return int(np.ravel_multi_index([at[name] for name, _ in sizes], mesh))

    return [(in_mesh(source), in_mesh(destination)) for source, destination in pairs]


def sizes_in_mesh_order(axis_name: AxisName) -> tuple[tuple[Any, int], ...]:
    """(name, size) of axes that shard_map has bound; of others in the order of their names."""
    names = as_tuple(axis_name)
    if not is_manual(axis_name):
        return tuple((name, axis_size(name)) for name in names)
    shape = jax.sharding.get_abstract_mesh().shape
    return tuple((name, size) for name, size in shape.items() if name in names)


def rank_and_size(axis_name: AxisName | None) -> tuple[Any, int]:
    """This rank's place, int32 [], and how many ranks there are; (0, 1) for no axis."""
    if axis_name is None:
        return jnp.int32(0), 1
    size = axis_size(axis_name)
    return lax.axis_index(as_tuple(axis_name)), size


def vary_together(axis_name: AxisName, *arrays: jax.Array) -> list[jax.Array]:
    """All arrays, varying over `axis_name` and the axes that any of them varies over. Operands of
    an op's primitive need no such call: it casts them (`primitives.OpPrimitive`)."""
    union = tracked(axis_name) | varying(arrays)
    return [vary(a, union) for a in arrays]


def varying(arrays: Any) -> frozenset[Any]:
    """The mesh axes that any array of a pytree varies over."""
    types = (jax.typeof(a).manual_axis_type for a in jax.tree.leaves(arrays))
    return frozenset().union(*(t.varying for t in types))


def split_over(axis_name: AxisName | None, *arrays: jax.Array) -> tuple[Any, ...]:
    """Those of the axes over which any of these arrays varies: sums of them take each part once.
    An axis of which types say nothing counts as one that they vary over: one of ``vmap``, or all
    under ``check_vma=False``."""
    known = varying(arrays)
    return tuple(name for name in axes_of(axis_name) if name in known or not tracks_vma(name))


def vary(array: jax.Array, names: Iterable[Any]) -> jax.Array:
    """An array that varies over these axes too, under ``check_vma=True``. Its gradient is then
    summed over those that it did not vary over."""
    missing = sorted(set(names) - varying(array), key=str)
    reduced = jax.typeof(array).manual_axis_type.reduced
    for is_reduced in (False, True):  # one cast has one type to cast from
        axes = tuple(name for name in missing if (name in reduced) is is_reduced)
        array = lax.pcast(array, axes, to="varying") if axes else array
    return array


def vary_alike(*arrays: jax.Array) -> list[jax.Array]:
    """All arrays, varying over the axes that any of them varies over."""
    union = varying(arrays)
    return [vary(a, union) for a in arrays]


def is_sharded(types: Iterable[Any]) -> bool:
    """Whether the type of any of these says that it is split over a mesh axis: an Explicit one,
    along which a partly manual ``shard_map`` has left arrays whole."""
    specs = (getattr(getattr(t, "sharding", None), "spec", None) or () for t in types)
    return any(axes is not None for spec in specs for axes in spec)


def unsharded_inside(
    f: Callable[..., Sequence[Any]], results: Sequence[Any]
) -> Callable[..., list[Any]]:
    """f, which sees no Explicit axes: they are Auto inside it, where XLA chooses how arrays are
    split.

    Args:
      f: (*operands, pytrees of arrays) -> the results: None is zero.
      results: their types, with their shardings; None: such a result is not wanted.
    """

    @functools.wraps(f)
    def call(*operands: Any) -> list[Any]:
        arrays = map(jax.typeof, jax.tree.leaves(operands))
        if not is_sharded([*arrays, *results]):
            return list(f(*operands))
        wanted = [t for t in results if t is not None]

        def dense(*operands: Any) -> list[Any]:
            found = [y for y, t in zip(f(*operands), results, strict=True) if t is not None]
            return [
                vary(jnp.zeros(t.shape, t.dtype), t.manual_axis_type.varying) if y is None else y
                for y, t in zip(found, wanted, strict=True)
            ]

        axes = jax.sharding.get_abstract_mesh().explicit_axes
        shardings = [t.sharding for t in wanted]
        rest = iter(jax.sharding.auto_axes(dense, axes=axes, out_sharding=shardings)(*operands))
        return [None if t is None else next(rest) for t in results]

    return call


def tracked(axis_name: AxisName) -> frozenset[Any]:
    """The mesh axes along which types say here what varies: all of these, or none."""
    names, _ = axes_and_groups(axis_name)
    return frozenset(names if names and is_bound(names) and tracks_vma(names) else ())


def tracks_vma(axis_name: AxisName) -> bool:
    axis_size(axis_name)  # its message, if the axis is not bound
    # axis_index always varies over its axis; where types are not tracked it does not say so. Its
    # type alone: under `jax.ensure_compile_time_eval` JAX would run what has no operands, outside
    # of the shard_map.
    aval, _ = lax.axis_index_p.abstract_eval(axis_name=as_tuple(axis_name))
    return bool(aval.manual_axis_type.varying)


def platform() -> str:
    """Of the devices that the code being traced is for: those of its mesh, which may be the CPUs of
    a host with GPUs, or else JAX's default ones."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def device_kind() -> str:
    """The name of these devices' model, such as "NVIDIA H200"."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return str((jax.devices()[0] if device is None else device).device_kind)


def belongs_here(mesh: Mesh) -> bool:
    """Whether the mesh's devices belong to this program, and not to a topology
    (``jax.experimental.topologies``) that it compiles or exports for."""
    client = mesh.devices.flat[0].client
    return any(client is own for own in jax.extend.backend.backends().values())


def group_table(mesh: Mesh, axis_name: AxisName) -> np.ndarray:
    """Global device ids, int64 [number of groups, ranks], in rank order."""
    names, groups = axes_and_groups(axis_name)
    ids = np.vectorize(lambda d: d.id, otypes=[np.int64])(mesh.devices)
    positions = [mesh.axis_names.index(n) for n in names]
    others = [i for i in range(ids.ndim) if i not in positions]
    world = math.prod(mesh.devices.shape[i] for i in positions)
    table = ids.transpose(*others, *positions).reshape(-1, world)
    return table if groups is None else table[:, groups].reshape(-1, len(groups[0]))


def is_split_by_xla(context: mlir.ModuleContext) -> bool:
    """Whether XLA splits arrays over devices where an op is lowered: over all of a program's,
    outside of ``shard_map``, or over those of axes that it is not manual in."""
    around: Any = getattr(context, "axis_context", None)
    if (devices := getattr(around, "num_devices", None)) is not None:
        return devices > 1
    mesh, manual = (getattr(around, name, None) for name in ("mesh", "manual_axes"))
    if mesh is None or manual is None:
        return False
    return any(size > 1 and name not in manual for name, size in mesh.shape.items())


def concrete_mesh_of(context: mlir.ModuleContext, axis_name: AxisName) -> Mesh | None:
    """The mesh that a lowering runs on, or None where it is not known (an abstract mesh, and a
    program without devices).

    Read when the op is lowered and never earlier: a traced function may be reused for another mesh
    with the same axis names and sizes, but other devices.
    """
    mesh = getattr(getattr(context, "axis_context", None), "mesh", None)
    if isinstance(mesh, AbstractMesh):
        mesh = program_devices.concrete(mesh, context)
    names, _ = axes_and_groups(axis_name)
    if isinstance(mesh, Mesh) and all(n in mesh.axis_names for n in names):
        return mesh
    return None
