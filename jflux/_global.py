"""Calls on global arrays: outside shard_map, an op and its reference wrap themselves in one."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from ._mesh import AxisName, as_tuple


def several(operand: Any) -> tuple[Any, ...]:
    """An operand that may be a sequence, as one."""
    return tuple(operand) if isinstance(operand, tuple | list) else (operand,)


def all_gather_matmul(
    op: Callable[..., Any],
    x: jax.Array,
    w: jax.Array | Sequence[jax.Array],
    *,
    mesh: Mesh | AbstractMesh | None,
    x_spec: PartitionSpec | None,
    axis_name: AxisName,
    gather_dimension: int,
    return_gathered: bool,
    transpose_rhs: bool,
    bias: Any,
    gated: bool,
    **options: Any,
) -> Any:
    """`op` is jflux.all_gather_matmul or its reference; `options` are the rest of its own."""
    names, last = as_tuple(axis_name), x.ndim - 1
    x_in = _with_axis(_spec(x, x_spec), x.ndim, gather_dimension % x.ndim, names)
    y_out = _with_axis(x_in, x.ndim, last, names)
    gathered_out = PartitionSpec(*y_out[:last], None)
    w_in = PartitionSpec(*((names, None) if transpose_rhs else (None, names)))
    y_outs = tuple(y_out for _ in w) if isinstance(w, tuple | list) and not gated else y_out
    return _over_global_arrays(
        functools.partial(
            op, axis_name=axis_name, gather_dimension=gather_dimension,
            return_gathered=return_gathered, transpose_rhs=transpose_rhs, gated=gated, **options
        ),
        "all_gather_matmul", {"x": x, "w": w, "bias": bias},
        {"x": x_in, "w": w_in, "bias": PartitionSpec(names)}, axis_name=axis_name, mesh=mesh,
        out_specs=(y_outs, gathered_out) if return_gathered else y_outs,
    )  # fmt: skip


def matmul_reduce_scatter(
    op: Callable[..., Any],
    x: jax.Array | Sequence[jax.Array],
    w: jax.Array | Sequence[jax.Array],
    *,
    mesh: Mesh | AbstractMesh | None,
    x_spec: PartitionSpec | None,
    axis_name: AxisName,
    scatter_dimension: int,
    transpose_rhs: bool,
    bias: Any,
    residual: Any,
    **options: Any,
) -> Any:
    """`op` is jflux.matmul_reduce_scatter or its reference; `options` are the rest of its own."""
    names, x_0 = as_tuple(axis_name), several(x)[0]
    x_in = _with_axis(_spec(x_0, x_spec), x_0.ndim, x_0.ndim - 1, names)
    y_out = _with_axis(x_in, x_0.ndim, scatter_dimension % x_0.ndim, names)
    w_in = PartitionSpec(*((None, names) if transpose_rhs else (names, None)))
    return _over_global_arrays(
        functools.partial(
            op, axis_name=axis_name, scatter_dimension=scatter_dimension,
            transpose_rhs=transpose_rhs, **options
        ),
        "matmul_reduce_scatter", {"x": x, "w": w, "bias": bias, "residual": residual},
        {"x": x_in, "w": w_in, "bias": PartitionSpec(), "residual": y_out},
        axis_name=axis_name, mesh=mesh, out_specs=y_out,
    )  # fmt: skip


def matmul_all_reduce(
    op: Callable[..., Any],
    x: jax.Array,
    w: jax.Array,
    *,
    mesh: Mesh | AbstractMesh | None,
    x_spec: PartitionSpec | None,
    axis_name: AxisName,
    transpose_rhs: bool,
    residual: Any,
    norm: Any,
    **options: Any,
) -> Any:
    """`op` is jflux.matmul_all_reduce or its reference; `options` are the rest of its own."""
    names, last = as_tuple(axis_name), x.ndim - 1
    x_in = _with_axis(_spec(x, x_spec), x.ndim, last, names)
    y_out = _with_axis(x_in, x.ndim, None, names)
    w_in = PartitionSpec(*((None, names) if transpose_rhs else (names, None)))
    return _over_global_arrays(
        functools.partial(op, axis_name=axis_name, transpose_rhs=transpose_rhs, **options),
        "matmul_all_reduce", {"x": x, "w": w, "residual": residual, "norm": norm},
        {"x": x_in, "w": w_in, "residual": y_out, "norm": PartitionSpec()},
        axis_name=axis_name, mesh=mesh, out_specs=y_out if norm is None else (y_out, y_out),
        check_vma=True,
    )  # fmt: skip


def matmul_all_to_all(
    op: Callable[..., Any],
    x: jax.Array,
    w: jax.Array,
    *,
    mesh: Mesh | AbstractMesh | None,
    x_spec: PartitionSpec | None,
    axis_name: AxisName,
    split_axis: int,
    concat_axis: int,
    transpose_rhs: bool,
    **options: Any,
) -> Any:
    """`op` is jflux.matmul_all_to_all or its reference; `options` are the rest of its own."""
    names, last = as_tuple(axis_name), x.ndim - 1
    split, concat = split_axis % x.ndim, concat_axis % x.ndim
    x_in = _with_axis(_spec(x, x_spec), x.ndim, None if concat == last else concat, names)
    w_columns = names if concat == last else None
    w_in = PartitionSpec(*((w_columns, None) if transpose_rhs else (None, w_columns)))
    return _over_global_arrays(
        functools.partial(
            op, axis_name=axis_name, split_axis=split, concat_axis=concat,
            transpose_rhs=transpose_rhs, **options
        ),
        "matmul_all_to_all", {"x": x, "w": w}, {"x": x_in, "w": w_in}, axis_name=axis_name,
        mesh=mesh, out_specs=_with_axis(x_in, x.ndim, split, names),
    )  # fmt: skip


def _over_global_arrays(
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
    """Runs `op` inside a shard_map of its own over all axes of the mesh. Operands that are
    sequences or pytrees have one spec for all; None is none. `check_vma`: whether that can know
    what is the same on all ranks, which a gathered array is not known to be."""
    arrays = {argument: jax.tree.leaves(operand) for argument, operand in operands.items()}
    mesh = _mesh_for(mesh, *itertools.chain(*arrays.values()))
    missing = [n for n in as_tuple(axis_name) if n not in mesh.axis_names]
    if missing:
        raise ValueError(f"{axis_name=} names {missing}, but the mesh has axes {mesh.axis_names}")
    for argument, those in arrays.items():
        for array in those:
            _check_divides(f"jflux.{name}: {argument}", array, specs[argument], mesh)
    if AxisType.Explicit in mesh.axis_types:  # else shard_map brings them into place
        operands = {
            argument: jax.tree.map(
                functools.partial(_reshard, mesh=mesh, spec=specs[argument]), operand
            )
            for argument, operand in operands.items()
        }
    mapped = jax.shard_map(
        lambda operands: op(**operands), mesh=mesh, in_specs=(dict(specs),), out_specs=out_specs,
        check_vma=check_vma,
    )  # fmt: skip
    return mapped(dict(operands))


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
        "jax.set_mesh(mesh), or call it inside jax.shard_map"
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
