"""Caches of keys and values for decoding with the attention layers."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from .._ops import _scaled
from .._ops._scaled import Scaled
from .._ops.attention.kv_cache import KVCache
from .._ranks import global_arrays, meshes
from .._ranks.meshes import AxisName


def init_cache(
    batch: int,
    length: int,
    num_heads: int,
    head_dim: int,
    *,
    num_kv_heads: int | None = None,
    dtype: DTypeLike = jnp.float32,
    axis_name: AxisName | None = None,
    context_axis: AxisName | None = None,
    page_size: int | None = None,
    pages: int | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    x_spec: PartitionSpec | None = None,
) -> KVCache:
    """An empty cache for :func:`attention`, in zeros.

    With N ranks along `axis_name` and C along `context_axis`, keys and values are
    [batch, S, g, head_dim], split by heads over N and by positions over C. S is `length`, rounded
    up to a multiple of C. g is `num_kv_heads`; where N does not divide it, each rank has the heads
    that its queries belong to, and g is N times their number.

    A paged cache has as many pages as there is room for, and sequences of different lengths share
    them. Keys and values are then [C pages, page_size, g, head_dim], S is a multiple of
    C page_size, and ``block_table`` is [batch, S / page_size], of -1: before its tokens come, a
    sequence gets its pages by ``cache._replace(block_table=...)``, which compiles nothing again.

    Args:
      batch: sequences; inside ``jax.shard_map`` those of this rank.
      length: positions, of all ranks together.
      num_heads, num_kv_heads: of queries, and of keys and values, of all ranks together; the second
        is the first by default.
      dtype: of the layer's computation; or of 8 bits, such as ``jnp.float8_e4m3fn``, for a cache
        with a scale for each position's head (:class:`jflux.KVCache`).
      axis_name, context_axis: as in :func:`attention`; None: no such axis.
      page_size: positions of a page.
      pages: of each rank along `context_axis`, which numbers them from 0 on. With `x_spec`
        outside ``shard_map``: of each part of the batch, too, whose sequences share them.
      mesh: outside ``shard_map``: by default the ambient one.
      x_spec: outside ``shard_map``: how the layer's activations are sharded besides, such as
        ``P("data")``.

    Returns:
      A :class:`jflux.KVCache`: outside ``shard_map`` global arrays, inside this rank's part.
    """
    kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    names, context = meshes.axes_of(axis_name), meshes.axes_of(context_axis)
    axes = (*context, *names)
    paged = page_size is not None
    if paged != (pages is not None):
        raise ValueError(
            f"jflux.nn.init_cache: {page_size=} and {pages=} go together: a paged cache has both"
        )
    for what, number in (("page_size", page_size), ("pages", pages)):
        if number is not None and number < 1:
            raise ValueError(f"jflux.nn.init_cache: {what}={number} must be at least 1")
    if axes and not meshes.is_bound(axes):
        mesh = global_arrays._mesh_for(mesh)
        missing = [name for name in axes if name not in mesh.axis_names]
        if missing:
            raise ValueError(
                f"jflux.nn.init_cache: the mesh has axes {mesh.axis_names}: no {missing}"
            )
        ranks, parts = _size(mesh, names), _size(mesh, context)
        heads = cached_heads(num_heads, kv_heads, ranks)
        specs = cache_specs(axis_name, context_axis=context_axis, x_spec=x_spec, paged=paged)
        rows, entries = _rows(batch, length, parts, page_size, pages)
        copies = _size(mesh, meshes.axes_of(*specs.lengths)) if paged else 1
        rows = (parts * copies * rows[0], rows[1]) if paged else (rows[0], parts * rows[1])
        return _placed((*rows, heads, head_dim), dtype, batch, entries, mesh, specs)
    ranks = meshes.axis_size(names) if names else 1
    parts = meshes.axis_size(context) if context else 1
    heads = cached_heads(num_heads, kv_heads, ranks) // ranks
    rows, entries = _rows(batch, length, parts, page_size, pages)
    cache = _zeros((*rows, heads, head_dim), dtype, batch, entries)
    if axes and meshes.tracks_vma(axes):
        vary = functools.partial(meshes.vary, names=axes)
        keys, values = (jax.tree.map(vary, a) for a in cache[:2])
        return cache._replace(keys=keys, values=values)
    return cache


def cache_specs(
    axis_name: AxisName | None = None,
    *,
    context_axis: AxisName | None = None,
    x_spec: PartitionSpec | None = None,
    paged: bool = False,
) -> Any:
    """How a cache of :func:`init_cache` is split, for ``jax.shard_map`` and ``jax.jit``: a
    :class:`jflux.KVCache` of ``PartitionSpec``. Arguments are as there; a `paged` cache has a
    ``block_table``, and its pages are split over all axes that its batch and positions are."""
    names, context = meshes.axes_of(axis_name), meshes.axes_of(context_axis)
    batch = without(PartitionSpec() if x_spec is None else x_spec, (*context, *names))[:1]
    batch = batch or (None,)
    of_batch: Any = PartitionSpec(*batch)
    rows = (*batch, context or None)
    if paged:
        rows = (meshes.axes_of(*rows) or None, None)
    kv: Any = PartitionSpec(*rows, names or None, None)
    return KVCache(kv, kv, of_batch, of_batch if paged else None)


def cached_heads(num_heads: int, num_kv_heads: int, ranks: int) -> int:
    """Heads of keys and values as they are kept, of all ranks together."""
    if num_kv_heads % ranks == 0:
        return num_kv_heads
    return ranks * own_heads(num_heads // ranks, num_heads // num_kv_heads)


def own_heads(heads: int, group: int) -> int:
    """How many heads of keys a rank needs for its `heads` of queries, of which `group` share one:
    as many as there are, or one for each query where groups do not end between ranks."""
    if heads % group == 0:
        return heads // group
    return 1 if group % heads == 0 else heads


def without(spec: PartitionSpec, names: tuple[Any, ...]) -> tuple[Any, ...]:
    """The entries of `spec` less some mesh axes."""
    entries = [() if e is None else meshes.as_tuple(e) for e in spec]
    kept = [tuple(n for n in entry if n not in names) for entry in entries]
    return tuple(entry or None for entry in kept)


def _size(mesh: Any, names: tuple[Any, ...]) -> int:
    size = 1
    for name in names:
        size *= mesh.shape[name]
    return size


def _rows(
    batch: int, length: int, parts: int, page_size: int | None, pages: int | None
) -> tuple[tuple[int, int], int | None]:
    """(the first two dimensions of a rank's part of a cache, the entries of a sequence's row of the
    block table, if there is one)."""
    if page_size is None or pages is None:
        return (batch, -(-length // parts)), None
    return (pages, page_size), -(-length // (parts * page_size)) * parts


def _zeros(shape: tuple[int, ...], dtype: DTypeLike, batch: int, entries: int | None) -> KVCache:
    def zeros() -> Any:
        values = jnp.zeros(shape, dtype)
        is_scaled = values.dtype in _scaled.TYPES
        return Scaled(values, jnp.ones((*shape[:3], 1), np.float32)) if is_scaled else values

    table = None if entries is None else jnp.full((batch, entries), -1, jnp.int32)
    return KVCache(zeros(), zeros(), jnp.zeros(batch, jnp.int32), table)


def _placed(
    shape: tuple[int, ...],
    dtype: DTypeLike,
    batch: int,
    entries: int | None,
    mesh: Any,
    specs: KVCache,
) -> KVCache:
    """Zeros that no device has whole."""

    def place(array: jax.Array, spec: Any) -> jax.Array:
        if AxisType.Explicit in mesh.axis_types:
            return global_arrays._reshard(array, mesh=mesh, spec=spec)
        return lax.with_sharding_constraint(array, NamedSharding(mesh, spec))

    def placed() -> KVCache:
        pairs = zip(_zeros(shape, dtype, batch, entries), specs, strict=True)
        return KVCache(
            *(jax.tree.map(functools.partial(place, spec=spec), one) for one, spec in pairs)
        )

    return jax.jit(placed)()
