"""Code that both products with an all-to-all share: how shards lie in the array that the
all-to-all moves. That array is x or ``x @ w``; both have x's rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from ..._call.plans import Plan
from .._scaled import Scales
from ..collectives import exchange
from . import _product, _product_plan


class AllToAllCall(Protocol):
    """The parameters that both ops have: the ranks, and dimensions of the array that the all-to-all
    moves. Dimensions are not negative."""

    @property
    def axis_names(self) -> tuple[Any, ...]: ...
    @property
    def world(self) -> int: ...
    @property
    def split(self) -> int: ...
    @property
    def concat(self) -> int: ...
    @property
    def transpose_rhs(self) -> bool: ...
    @property
    def out_dtype(self) -> np.dtype: ...


def exchanged(x: jax.Array, params: AllToAllCall) -> jax.Array:
    """x after the all-to-all of a call, by :func:`jflux.all_to_all`."""
    names, world = params.axis_names, params.world
    return exchange.bind("all_to_all", x, names, world, params.split, params.concat)


def shifted(params: Any, count: int) -> Any:
    """The parameters of a call with so many more leading dimensions."""
    return dataclasses.replace(params, split=params.split + count, concat=params.concat + count)


def by_rows(x: Any, params: AllToAllCall) -> tuple[bool, bool]:
    """Whether the all-to-all splits rows, and whether it concatenates rows. Otherwise columns."""
    return params.split != x.ndim - 1, params.concat != x.ndim - 1


def rows_of_shard(x: Any, params: AllToAllCall) -> tuple[int, int]:
    """(outer, inner) rows of a shard, as cc/core/rows.h numbers them."""
    split_rows, concat_rows = by_rows(x, params)
    if not split_rows and not concat_rows:
        return 1, _product.total_rows(x)
    dimension = params.split if split_rows else params.concat
    return _product.outer_inner(x.shape, dimension, params.world if split_rows else 1)


def divided(x: Any, params: AllToAllCall) -> int:
    """Rows of a shard in the dimension that chunks over two levels are parts of; 1 if there is
    none."""
    split_rows, concat_rows = by_rows(x, params)
    if split_rows:
        return x.shape[params.split] // params.world
    return x.shape[params.concat] if concat_rows else 1


def why_no_way(x: Any, params: AllToAllCall) -> str | None:
    """Why no kernel moves shards this way, or None."""
    if all(by_rows(x, params)) and params.split != params.concat:
        return "rows of one dimension become rows of another, which no kernel does"
    return None


# ---- What the kernels are told, and the form that they take --------------------------------------


def sizes_of(op: str, x: Any, params: AllToAllCall, *, k: int, n: int) -> _product_plan.Sizes:
    """The sizes of one shard's product, of k and n as given."""
    split_rows, concat_rows = by_rows(x, params)
    outer, inner = rows_of_shard(x, params)
    return _product_plan.Sizes(
        op=op,
        world=params.world,
        outer=outer,
        inner=inner,
        k=k,
        n=n,
        dtype=x.dtype,
        out_dtype=params.out_dtype,
        transpose_rhs=params.transpose_rhs,
        split_rows=split_rows,
        concat_rows=concat_rows,
    )


def attributes(
    sizes: _product_plan.Sizes, plan: Plan, scales: Scales = Scales.NONE
) -> dict[str, Any]:
    """The FFI attributes of both ops."""
    shards = {"concat_rows": sizes.concat_rows, "split_rows": sizes.split_rows}
    return {"scales": np.int64(scales), **shards, **_product_plan.attributes(sizes, plan)}


def in_rank_order(
    bind: Callable[..., Sequence[Any]],
    sizes: _product_plan.Sizes,
    shapes: Sequence[tuple[int, ...]],
    scales_of_results: bool = False,
) -> Callable[..., list[Any]] | None:
    """(x, w, scales) -> the results, by a call with the ranks in front of leading rows, where a
    tile's rows would straddle leading indices; None where they do not.

    Args:
      bind: (why, x, w, scales, split=, concat=) -> the results of such a call.
      shapes: of the results.
      scales_of_results: whether the scales of rows lie as the rows of the results, not of x.
    """
    outer, inner, world = sizes.outer, sizes.inner, sizes.world
    if outer == 1 or inner % _product_plan.TILE_ROWS == 0:
        return None

    def rank_major(x: Any, w: Any, *scales: Any) -> list[Any]:
        def in_order(a: Any, has_ranks: bool) -> Any:
            if has_ranks:
                a = a.reshape(outer, world, inner, a.shape[-1]).swapaxes(0, 1)
            return a.reshape(-1, a.shape[-1])

        x = in_order(x, sizes.split_rows)
        have_ranks = sizes.concat_rows if scales_of_results else sizes.split_rows
        of_rows = [in_order(a, have_ranks) for a in scales[:1]]
        split, concat = int(not sizes.split_rows), int(not sizes.concat_rows)
        scales = (*of_rows, *scales[1:])
        results = bind(_product.RANK_MAJOR, x, w, *scales, split=split, concat=concat)
        if sizes.concat_rows:
            results = [r.reshape(world, outer, inner, -1).swapaxes(0, 1) for r in results]
        return [r.reshape(shape) for r, shape in zip(results, shapes, strict=True)]

    return rank_major
