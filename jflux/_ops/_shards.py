"""What the two products with an all-to-all share: how shards lie in the array that travels, x or
``x @ w``, whose rows are x's."""

from __future__ import annotations

from typing import Any, Protocol

from . import _product


class AllToAllCall(Protocol):
    """What both ops' parameters have: the ranks, and dimensions of what travels, not negative."""

    @property
    def world(self) -> int: ...
    @property
    def split(self) -> int: ...
    @property
    def concat(self) -> int: ...


def by_rows(x: Any, params: AllToAllCall) -> tuple[bool, bool]:
    """Whether shards are rows, of what is sent, and of what is put together; else columns."""
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
