"""Calls on global arrays: outside shard_map, an op and its reference wrap themselves in one."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from .. import _config
from .._ops import _recipe
from .._ops._spec import Layout
from .meshes import AxisName, as_tuple


def over_global_arrays(
    op: Callable[..., Any],
    name: str,
    operands: Mapping[str, Any],
    layout: Layout,
    *,
    results: Any,
    axis_name: AxisName,
    mesh: Mesh | AbstractMesh | None,
    x_spec: PartitionSpec | None,
    check_vma: bool = False,
) -> Any:
    """Runs `op` inside a shard_map of its own over all axes of the mesh.

    Args:
      op: takes the operands by name, as one rank's.
      name: of the op, for messages.
      operands: global arrays, sequences or pytrees of such, or None. "x" is one of them.
      layout: which dimension of each operand and result the ranks split. Operands that are several
        arrays have one entry for all.
      results: what `op` returns, with the results' names in place of arrays.
      axis_name: the ranks' axis, or a tuple of them.
      mesh: by default the ambient one, or the operands' own.
      x_spec: how x is sharded besides; by default as its type says.
      check_vma: whether that can know what is the same on all ranks, which a gathered array is not
        known to be.
    """
    recipe = getattr(op, "keywords", {}).get("recipe")
    if isinstance(recipe, _recipe.DelayedScaling):
        # An operand, which goes before the option: shard_map closes over no array on Explicit axes.
        operands = {**operands, "recipe": recipe}
        layout = Layout(layout.rows, {**layout.others, "recipe": None})
    names, x = as_tuple(axis_name), jax.tree.leaves(operands["x"])[0]
    base = _spec(x, x_spec)

    def spec_of(array: str) -> PartitionSpec:
        if array in layout.rows:
            return _with_axis(base, x.ndim, layout.rows[array], names)
        dimension = layout.others[array]
        if dimension is None:
            return PartitionSpec()
        return PartitionSpec(*([None] * dimension), names)

    specs = {array: spec_of(array) for array in operands}
    mesh = _mesh_for(mesh, *jax.tree.leaves(dict(operands)))
    _say_what_is_repeated(name, x, specs, mesh)
    return with_specs(
        op,
        name,
        operands,
        specs,
        axis_name=axis_name,
        mesh=mesh,
        out_specs=jax.tree.map(spec_of, results),
        check_vma=check_vma,
    )


def with_specs(
    op: Callable[..., Any],
    name: str,
    operands: Mapping[str, Any],
    specs: Mapping[str, PartitionSpec],
    *,
    axis_name: AxisName,
    mesh: Mesh | AbstractMesh | None,
    out_specs: Any,
    check_vma: bool = False,
) -> Any:
    """:func:`over_global_arrays` with the operands' and results' shardings as such. Operands that
    are sequences or pytrees have one spec for all, which is that of values where there are scales;
    None is none."""
    arrays = {argument: jax.tree.leaves(operand) for argument, operand in operands.items()}
    mesh = _mesh_for(mesh, *itertools.chain(*arrays.values()))
    missing = [n for n in as_tuple(axis_name) if n not in mesh.axis_names]
    if missing:
        raise ValueError(f"{axis_name=} names {missing}, but the mesh has axes {mesh.axis_names}")
    of_leaves: dict[str, Any] = {}
    for argument, operand in operands.items():
        what = f"jflux.{name}: {argument}"
        for one in jax.tree.leaves(operand, is_leaf=_recipe.is_operand):
            _check_divides(what, one, specs[argument], mesh)
        of_leaves[argument] = _recipe.specs(what, operand, specs[argument], mesh)
    if AxisType.Explicit in mesh.axis_types:  # else shard_map brings them into place
        operands = {
            argument: jax.tree.map(
                lambda array, spec: _reshard(array, mesh=mesh, spec=spec),
                operand,
                of_leaves[argument],
            )
            for argument, operand in operands.items()
        }
    mapped = jax.shard_map(
        lambda operands: op(**operands), mesh=mesh, in_specs=(of_leaves,), out_specs=out_specs,
        check_vma=check_vma,
    )  # fmt: skip
    if all(0 in array.shape for those in arrays.values() for array in those):
        # XLA cannot partition a program that gets no element. Sums of no terms are zeros.
        results = jax.eval_shape(mapped, dict(operands))
        zeros = jax.tree.map(lambda result: jnp.zeros(result.shape, result.dtype), results)
        if AxisType.Explicit in mesh.axis_types:
            return jax.tree.map(
                lambda array, spec: _reshard(array, mesh=mesh, spec=spec), zeros, out_specs
            )
        return zeros
    return mapped(dict(operands))


def split_first(
    op: Callable[..., list[jax.Array]],
    what: str,
    arrays: Sequence[jax.Array],
    whole: Sequence[jax.Array],
    *,
    axis_name: AxisName,
    mesh: Mesh | AbstractMesh | None,
) -> list[jax.Array]:
    """Runs `op` inside a shard_map over these axes, which split the first dimension of arrays and
    of their results. Other axes split them as they do.

    Args:
      op: (one rank's arrays, *whole) -> as many arrays.
      what: what the arrays are, for messages.
      whole: arrays that are the same on all ranks.
    """
    names, mesh = as_tuple(axis_name), _mesh_for(mesh, *arrays)
    missing = [n for n in names if n not in mesh.axis_names]
    if missing:
        raise ValueError(f"{axis_name=} names {missing}, but the mesh has axes {mesh.axis_names}")
    # What an Explicit axis splits is in types, which operations inside would have to agree with.
    explicit = {n for n, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
                if kind == AxisType.Explicit}  # fmt: skip
    specs = [_with_axis(_spec(array, None), array.ndim, 0, names) for array in arrays]
    for array, spec in zip(arrays, specs, strict=True):
        _check_divides(f"jflux.{what}", array, spec, mesh)
    placed, nothing = list(arrays), [PartitionSpec()] * len(whole)
    if explicit:
        placed = [_reshard(a, mesh=mesh, spec=s) for a, s in zip(arrays, specs, strict=True)]
        whole = [_reshard(a, mesh=mesh, spec=s) for a, s in zip(whole, nothing, strict=True)]
    return jax.shard_map(
        op, mesh=mesh, in_specs=(specs, *nothing), out_specs=specs, axis_names={*names, *explicit}
    )(placed, *whole)


def _reshard(array: jax.Array, *, mesh: Any, spec: PartitionSpec) -> jax.Array:
    """Brings an array into place on the explicit axes; shard_map does the rest."""
    explicit = {
        name
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind == AxisType.Explicit
    }
    entries = [() if e is None else tuple(n for n in as_tuple(e) if n in explicit) for e in spec]
    return jax.sharding.reshard(
        array, NamedSharding(mesh, PartitionSpec(*(e if e else None for e in entries)))
    )


def _mesh_for(mesh: Mesh | AbstractMesh | None, *arrays: jax.Array) -> Mesh | AbstractMesh:
    """The given mesh, the context's, or the arrays' own."""
    if mesh is not None:
        return mesh
    context = jax.sharding.get_abstract_mesh()
    if not context.empty:
        return context
    for array in arrays:
        sharding = getattr(array, "sharding", None) or getattr(jax.typeof(array), "sharding", None)
        if isinstance(sharding, NamedSharding) and not sharding.mesh.empty:
            return sharding.mesh
    raise ValueError(
        "jflux was called outside shard_map and there is no mesh: pass mesh=..., call it under "
        "jax.set_mesh(mesh), on arrays that lie on a mesh (jax.device_put with a NamedSharding), "
        "or inside jax.shard_map"
    )


def _say_what_is_repeated(
    name: str, x: jax.Array, specs: Mapping[str, PartitionSpec], mesh: Any
) -> None:
    """Logs the mesh axes along which all devices do the same, if they could share x's rows. A type
    under automatic sharding does not say how x is split, so it may be meant so."""
    named = {n for spec in specs.values() for e in spec if e is not None for n in as_tuple(e)}
    lead = (*specs["x"], *[None] * x.ndim)[: x.ndim - 1]
    free = [
        size // math.prod(mesh.shape.get(n, 1) for n in as_tuple(entry or ()))
        for size, entry in zip(x.shape, lead, strict=False)
        if not entry or len(lead) == 1  # rows of a matrix; a sequence beside a batch stays as it is
    ]
    repeated = [
        axis
        for axis, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind == AxisType.Auto and axis not in named and mesh.shape[axis] > 1
        if any(size > 0 and size % mesh.shape[axis] == 0 for size in free)
    ]
    if repeated and _config.config.fused:
        _config.say_once(
            logging.INFO,
            f"jflux.{name}: x is taken to be whole along mesh axes {repeated}, whose devices then "
            f"repeat each other's work; if it is split there, say so: x_spec=P({repeated[0]!r})",
        )


def _check_divides(what: str, array: Any, spec: PartitionSpec, mesh: Any) -> None:
    unknown = [n for e in spec if e is not None for n in as_tuple(e) if n not in mesh.axis_names]
    if unknown:
        raise ValueError(
            f"{what} is sharded as {spec}, but the mesh's axes are {mesh.axis_names}: no {unknown}"
        )
    if len(spec) > array.ndim:
        raise ValueError(f"{what} has shape {tuple(array.shape)}, too few dimensions for {spec}")
    for dimension, entry in enumerate(spec):
        if entry is None:
            continue
        devices = math.prod(mesh.shape[n] for n in as_tuple(entry))
        if array.shape[dimension] % devices != 0:
            raise ValueError(
                f"{what} has shape {tuple(array.shape)}, and the {devices} devices of mesh axes "
                f"{as_tuple(entry)} do not divide its dimension {dimension}, which they share"
            )


def _spec(x: jax.Array, given: PartitionSpec | None) -> PartitionSpec:
    """How x is sharded: as given, or as its type says (explicit sharding)."""
    if given is not None:
        if not isinstance(given, PartitionSpec):
            raise TypeError(
                f'x_spec={given!r} must be a jax.sharding.PartitionSpec, such as P("data")'
            )
        return given
    sharding = getattr(jax.typeof(x), "sharding", None)
    if sharding is None or AxisType.Explicit not in sharding.mesh.axis_types:
        return PartitionSpec()
    return sharding.spec


def _with_axis(
    spec: PartitionSpec, ndim: int, dimension: int | None, names: tuple[Any, ...]
) -> PartitionSpec:
    """`spec` with `names` as the minor-most sharding of `dimension` (None: of none), and nowhere
    else."""
    entries: list[tuple[Any, ...]] = []
    for entry in (*spec, *([None] * (ndim - len(spec)))):
        present = () if entry is None else as_tuple(entry)
        entries.append(tuple(n for n in present if n not in names))
    if dimension is not None:
        entries[dimension] = (*entries[dimension], *names)
    return PartitionSpec(*(e if e else None for e in entries))
