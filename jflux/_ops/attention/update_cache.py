"""Caches of keys and values that are split over ranks by position, whole or in pages."""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from ..._call import value_checks
from ..._ranks import meshes
from ..._ranks.meshes import AxisName
from ..collectives.exchange import all_gather, all_gather_reference

Tree = TypeVar("Tree")


@meshes.axis_by_name
def update_cache(
    cache: Tree,
    new: Any,
    positions: jax.Array,
    *,
    axis_name: AxisName | None = None,
    block_table: jax.Array | None = None,
    split: bool = False,
) -> Tree:
    """Writes new keys and values into a cache that is split over ranks by position, as
    :func:`jflux.flash_decode` reads it.

    Inside ``jax.shard_map``, per rank of N along `axis_name`::

        cache [B, S/N, ...]   new [B, T, ...]   positions [B] or [B, T]   ->   cache

    Rank r has the positions r S/N to (r + 1) S/N - 1. A rank writes what belongs to these, and
    leaves the others'. A cache that the caller gives away (donates, or carries through a loop) is
    written in place.

    Differentiable in cache and new, in both modes.

    A position beyond the cache is an error with the value (*Raises*, below). Where the call does
    not raise, that token is lost, and NaN is written at the cache's last position of its sequence:
    what attends to it is NaN too. (Under ``checkify.index_checks`` all that a rank does not write
    is an error.)

    Args:
      cache: an array, or a pytree of such, e.g. (k_cache, v_cache), with any dimensions after the
        first two.
      new: the same of new tokens, the same on all ranks; it is cast to the cache's type. Floating
        ones do not go into a cache of integers: they would be cut.
      positions: integers, the same on all ranks: [B], of each sequence's first new token, whose
        others follow; or [B, T], of each token. No sequence has a position twice. What has a
        negative one is not written, such as the padding of a shorter prompt.
      axis_name: a mesh axis, or a tuple of them. None: the cache is whole.
      block_table: integers [B, P], as in :func:`jflux.flash_decode`; each cache is then this rank's
        [pages, page size, ...]. What has no page is not written.
      split: whether `new`, and positions [B, T], are split over the ranks too, into consecutive
        parts of T/N tokens each. They are gathered first.

    Returns:
      What `cache` is.

    Raises:
      ValueError, TypeError: operands that do not fit, when the call is traced.
      NameError: for an `axis_name` outside ``shard_map``.
      jax.errors.JaxRuntimeError: on CPUs, when it runs, for a position beyond the cache.
      checkify.JaxRuntimeError: for one under ``checkify.user_checks``, on any device.

    Examples:
      >>> mesh, split = jax.sharding.Mesh(jax.devices(), "cp"), P(None, "cp")
      >>> f = functools.partial(jflux.update_cache, axis_name="cp")
      >>> f = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=(split, P(), P()), out_specs=split))
      >>> cache = f(jnp.zeros((1, 16, 1, 1)), jnp.ones((1, 2, 1, 1)), jnp.array([5]))
      >>> cache.ravel().tolist()  # positions 5 and 6
      [0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    """
    return _update(all_gather, cache, new, positions, axis_name, block_table, split, raises=True)


def reference(
    cache: Tree,
    new: Any,
    positions: jax.Array,
    *,
    axis_name: AxisName | None = None,
    block_table: jax.Array | None = None,
    split: bool = False,
) -> Tree:
    """:func:`jflux.update_cache` in plain `lax`, which does not raise on CPUs."""
    return _update(
        all_gather_reference, cache, new, positions, axis_name, block_table, split, raises=False
    )


def _update(
    gather: Any,
    cache: Any,
    new: Any,
    positions: Any,
    axis_name: AxisName | None,
    block_table: Any,
    split: bool,
    *,
    raises: bool,
) -> Any:
    _check(cache, new, positions, axis_name, block_table, split)
    if split:

        def whole(a: jax.Array) -> jax.Array:
            return gather(a, axis_name=axis_name, axis=1, tiled=True)

        new = jax.tree.map(whole, new)
        positions = whole(positions) if positions.ndim == 2 else positions
    token = jnp.arange(jax.tree.leaves(new)[0].shape[1], dtype=jnp.int32)[None]
    if not token.size:
        return cache
    size = jax.tree.leaves(cache)[0].shape[1]
    here = size if block_table is None else size * block_table.shape[1]
    rank, ranks = meshes.rank_and_size(axis_name)
    first, last = rank * here, ranks * here - 1
    positions = value_checks.to_int32(positions)
    if positions.ndim == 1:
        positions = positions[:, None] + token
    positions = value_checks.in_range(
        positions, None, last, "jflux.update_cache: positions", raises=raises
    )
    # A sequence with tokens beyond the cache gets NaN at the last position. Only the first token
    # that belongs there or beyond writes it: indices must not repeat.
    at_end = jnp.any(positions > last, 1, keepdims=True) & (positions >= last)
    spoils = at_end & (token == jnp.argmax(at_end, 1)[:, None])
    local = jnp.minimum(positions, last) - first
    own = (positions >= 0) & (local >= 0) & (local < here) & (spoils | ~at_end)
    if block_table is None:
        # Tokens of other ranks get an index out of range, which drops them. Indices are unique.
        at = jnp.where(own, local, here + token)
        index: Any = (jnp.arange(len(at), dtype=jnp.int32)[:, None], at)
    else:
        page, there = page_of(block_table, jnp.where(own, local // size, 0), cache, "update_cache")
        pages = jax.tree.leaves(cache)[0].shape[0]
        index = (jnp.where(own & there, page, pages), local % size)

    def write(a: jax.Array, tokens: jax.Array) -> jax.Array:
        written = tokens.astype(a.dtype)
        if jnp.issubdtype(a.dtype, jnp.inexact):
            there = spoils.reshape(*spoils.shape, *(1,) * (tokens.ndim - 2))
            written = jnp.where(there, jnp.asarray(jnp.nan, a.dtype), written)
        index_is_unique = block_table is None
        return jnp.asarray(a).at[index].set(written, mode="drop", unique_indices=index_is_unique)

    return jax.tree.map(write, cache, new)


def page_of(
    block_table: jax.Array, entry: jax.Array, caches: Any, op: str
) -> tuple[jax.Array, jax.Array]:
    """The pages [B, T] at these entries of the table's rows, and whether the cache has them. Where
    it does not, the page is some other one."""
    pages = jax.tree.leaves(caches)[0].shape[0]
    table = value_checks.in_range(block_table, -1, pages - 1, f"jflux.{op}: block_table")
    page = jnp.take_along_axis(table, entry, 1)
    return jnp.clip(page, 0, pages - 1), (page >= 0) & (page < pages)


def read_pages(caches: Any, block_table: jax.Array, op: str) -> tuple[Any, jax.Array]:
    """The caches [pages, page size, ...] as [B, P * page size, ...], and whether there is a page,
    bool [B, P * page size]. Where there is none they have those of another page."""
    size = jax.tree.leaves(caches)[0].shape[1]
    entries = jnp.broadcast_to(jnp.arange(block_table.shape[1]), block_table.shape)
    page, there = page_of(block_table, entries, caches, op)
    there = jnp.repeat(there, size, axis=1, total_repeat_length=page.shape[1] * size)

    def read(cache: jax.Array) -> jax.Array:
        found = jnp.take(cache, page, axis=0, mode="clip")
        return found.reshape(*there.shape, *cache.shape[2:])

    return jax.tree.map(read, caches), there


def _check(
    cache: Any, new: Any, positions: Any, axis_name: Any, block_table: Any, split: bool
) -> None:
    op = "jflux.update_cache"
    structure: Any
    given: Any
    caches, structure = jax.tree.flatten(cache)
    tokens, given = jax.tree.flatten(new)
    if structure != given or not caches:
        raise ValueError(
            f"{op}: cache and new must be pytrees of one structure, got {structure} and {given}"
        )
    if split and axis_name is None:
        raise ValueError(f"{op}: split=True needs the axis_name that new is split over")
    paged = block_table is not None
    arrays = [("cache", a) for a in caches] + [("new", a) for a in tokens]
    integers = [("positions", positions)] + ([("block_table", block_table)] if paged else [])
    for name, a in arrays + integers:
        if not hasattr(a, "ndim") or not hasattr(a, "dtype"):
            raise TypeError(f"{op}: {name} must be an array, got {type(a).__name__}")
    for name, a in integers:
        if not jnp.issubdtype(a.dtype, jnp.integer):
            raise TypeError(f"{op}: {name} must be integers, got {a.dtype}")
    if paged and block_table.ndim != 2:
        raise ValueError(f"{op}: block_table must be [B, P], got {block_table.shape}")
    shape = "[pages, page size, ...]" if paged else "[B, S/N, ...]"
    for a, t in zip(caches, tokens, strict=True):
        if a.ndim < 2 or t.ndim < 2 or a.shape[2:] != t.shape[2:]:
            raise ValueError(
                f"{op}: cache {shape} and new [B, T, ...] must have the same dimensions after the "
                f"first two, got {a.shape} and {t.shape}"
            )
        if jnp.issubdtype(t.dtype, jnp.inexact) and not jnp.issubdtype(a.dtype, jnp.inexact):
            raise TypeError(
                f"{op}: new is {t.dtype}, and would be cut to a cache of {a.dtype}; scale and "
                "round it first, and scale what is read"
            )
        if a.shape[:2] != caches[0].shape[:2] or t.shape[:2] != tokens[0].shape[:2]:
            raise ValueError(
                f"{op}: all arrays of cache, and all of new, must have the same first two "
                f"dimensions, got {[a.shape for a in caches]} and {[t.shape for t in tokens]}"
            )
    batch, count = tokens[0].shape[:2]
    rows = block_table.shape[0] if paged else caches[0].shape[0]
    if rows != batch:
        of = "block_table [B, P]" if paged else f"cache {shape}"
        raise ValueError(
            f"{op}: new [B, T, ...] and {of} must have the same B, got {batch} and {rows}"
        )
    if positions.shape not in ((batch,), (batch, count)):
        raise ValueError(
            f"{op}: positions must be [B] or [B, T], ({batch},) or ({batch}, {count}), got "
            f"{positions.shape}"
        )
