"""`jax.lax`'s collectives and ragged products, by jflux's ops: the same names, arguments and
results, for programs that call those.

    from jflux import lax                  # in place of: from jax import lax, for these names
    jax.lax.all_to_all = jflux.lax.all_to_all    # for a program that is not yours, before it runs

The collectives hand what jflux has no kernel for to `lax`'s own, which are those that were there
when jflux was imported: types without one, numbers of Python and numpy, axes of `jax.vmap`, more
than 8 ranks, and sizes for which XLA was measured to be the faster one. Nothing is logged then, and
``jflux.config.strict`` raises nothing. :func:`jflux.explain` says what was taken.

:func:`jflux.fuse` looks for `lax`'s collectives: a program that it is for keeps these.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import _native
from ._ops import _lax
from ._ops._spec import all_ops
from ._ops.collectives import all_reduce as _all_reduce
from ._ops.collectives import exchange as _exchange
from ._ops.collectives.exchange import Groups
from ._ops.collectives.ragged_all_to_all import ragged_all_to_all as ragged_all_to_all
from ._ops.products.ragged_dot import ragged_dot as ragged_dot
from ._ops.products.ragged_dot import ragged_dot_general as ragged_dot_general
from ._ranks import meshes

__all__ = [
    "all_gather", "all_to_all", "psum", "psum_scatter", "ragged_all_to_all", "ragged_dot",
    "ragged_dot_general",
]  # fmt: skip


def all_to_all(
    x: Any,
    axis_name: Any,
    split_axis: int,
    concat_axis: int,
    *,
    axis_index_groups: Groups = None,
    tiled: bool = False,
) -> Any:
    """`jax.lax.all_to_all` by :func:`jflux.all_to_all`."""
    options: dict[str, Any] = {"axis_index_groups": axis_index_groups, "tiled": tiled}
    return _each(
        "all_to_all", axis_name, axis_index_groups, x,
        lambda a: _exchange.all_to_all(
            a, axis_name=axis_name, split_axis=split_axis, concat_axis=concat_axis, **options
        ),
        lambda a: _lax.all_to_all(a, axis_name, split_axis, concat_axis, **options),
    )  # fmt: skip


def all_gather(
    x: Any,
    axis_name: Any,
    *,
    axis_index_groups: Groups = None,
    axis: int = 0,
    tiled: bool = False,
    to: str = "varying",
) -> Any:
    """`jax.lax.all_gather` by :func:`jflux.all_gather`; with ``to="reduced"`` `lax`'s."""
    options: dict[str, Any] = {
        "axis_index_groups": axis_index_groups,
        "axis": axis,
        "tiled": tiled,
        "to": to,
    }

    def in_lax(a: Any) -> Any:
        return _lax.all_gather(a, axis_name, **options)

    if to != "varying" and (to != "invarying" or axis_index_groups is not None):
        return jax.tree.map(in_lax, x)
    return _each(
        "all_gather", axis_name, axis_index_groups, x,
        lambda a: _exchange.all_gather(a, axis_name=axis_name, **options), in_lax,
    )  # fmt: skip


def psum_scatter(
    x: Any,
    axis_name: Any,
    *,
    scatter_dimension: int = 0,
    axis_index_groups: Groups = None,
    tiled: bool = False,
) -> Any:
    """`jax.lax.psum_scatter` by :func:`jflux.reduce_scatter`, which adds numbers of 16 bits in
    float32."""
    options: dict[str, Any] = {
        "scatter_dimension": scatter_dimension, "axis_index_groups": axis_index_groups,
        "tiled": tiled,
    }  # fmt: skip
    return _each(
        "reduce_scatter", axis_name, axis_index_groups, x,
        lambda a: _exchange.reduce_scatter(a, axis_name=axis_name, **options),
        lambda a: _lax.psum_scatter(a, axis_name, **options),
    )  # fmt: skip


def psum(x: Any, axis_name: Any, *, axis_index_groups: Groups = None) -> Any:
    """`jax.lax.psum` by :func:`jflux.all_reduce`, which adds numbers of 16 bits in float32."""
    groups = axis_index_groups
    return _each(
        "all_reduce", axis_name, groups, x,
        lambda a: _all_reduce.all_reduce(a, axis_name=axis_name, axis_index_groups=groups),
        lambda a: _lax.psum(a, axis_name, axis_index_groups=groups),
    )  # fmt: skip


def _each(
    op: str,
    axis_name: Any,
    groups: Groups,
    x: Any,
    by_op: Callable[[Any], Any],
    in_lax: Callable[[Any], Any],
) -> Any:
    """Of each array of a tree, as the op takes it."""
    takes_axis = meshes.is_manual(axis_name) and _takes_ranks(axis_name, groups)
    return jax.tree.map(lambda a: by_op(a) if takes_axis and _takes(op, a) else in_lax(a), x)


def _takes_ranks(axis_name: Any, groups: Groups) -> bool:
    sizes = {len(group) for group in groups or ()} or {meshes.axis_size(axis_name)}
    return len(sizes) == 1 and max(sizes) <= _native.MAX_RANKS


def _takes(op: str, a: Any) -> bool:
    if not isinstance(a, jax.Array):  # of a constant `lax` makes one
        return False
    aval = jax.typeof(a)
    if aval.weak_type or jnp.issubdtype(a.dtype, jax.dtypes.extended):
        return False
    if jnp.issubdtype(a.dtype, jnp.complexfloating) or _is_of_bits(a.dtype):
        return False  # the sums of gradients, and numbers that have no bytes of their own
    if not all(isinstance(size, int) for size in a.shape):
        return False
    manual = aval.manual_axis_type
    is_plain = not manual.reduced and not manual.unreduced
    return is_plain and all_ops()[op].takes(meshes.platform(), a.dtype)


def _is_of_bits(dtype: Any) -> bool:
    return np.dtype(dtype).name.startswith(_exchange.LESS_THAN_BYTES)
