"""Ops of groups that lie on several nodes: XLA's collectives between nodes, jflux's ops inside.

A group has `count` nodes of `local` ranks. Between nodes a rank exchanges data with its
counterparts alone, the ranks of the same place in other nodes. Products go node by node, and in
chunks, so that one transfer between nodes is under way while the next product runs. With three
nodes and one chunk, on node 0:

    x travels (all_gather_matmul)         the product travels (matmul_reduce_scatter)

    between    inside                     inside              between
    x of 1     product of own rows        product for 2
    x of 2     product of 1's rows        product for 1       to 2
               product of 2's rows        product of own      to 1

A product waits for no transfer but the one that it multiplies. A transfer waits for the product
that it sends; where x travels, for the transfer before and one product, so that XLA, which
schedules asynchronous collectives, puts a product beside each
(docs/experiments/0052-order-between-nodes.md).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._ranks import meshes
from .._ranks.node_levels import Levels
from . import _epilogue, _lax, _node_exchange, _wire
from ._collective import Collective
from ._two_level_plan import NODE_BYTES_PER_SECOND, NODE_LATENCY
from .products import _product

# ---- Between nodes -------------------------------------------------------------------------------


def place_of(levels: Levels) -> tuple[jax.Array, jax.Array]:
    """(node, place in it) of this rank."""
    where = {rank: divmod(i, levels.local) for i, rank in enumerate(levels.order)}
    table = np.array([where[rank] for rank in range(len(where))], np.int32)
    node, place = jnp.asarray(table)[lax.axis_index(levels.axis_names)]
    return node, place


class Transfers:
    """The transfers between nodes of one call. XLA for GPUs combines small ones that could run at
    the same time, and then none of them could run beside a product: these it leaves alone.

    Args:
      wire: the format that terms of sums travel in (`_wire.py`), which
        arrive in float32; None: as they are.
    """

    def __init__(self, levels: Levels, wire: str | None = None) -> None:
        self.levels, self.wire = levels, wire
        self._shifted: dict[int, list[jax.Array]] = {}  # by steps
        self._last: jax.Array | None = None  # of them all

    def _between(self) -> tuple[tuple[Any, ...], _node_exchange.Groups]:
        between = self.levels.between
        return between.axis_names, between.groups

    def shift(self, x: jax.Array, steps: int, after: jax.Array | None = None) -> jax.Array:
        """x of the counterpart on the `steps`-th node after this one (modulo their number), sent
        when `after` is there, and what was sent before has arrived."""
        names = tuple(name for name, _ in self.levels.axis_sizes)
        pairs, before = self.levels.shift(steps), self._shifted.setdefault(steps, [])
        if self.levels.by_nvshmem:
            axes, groups = self._between()
            return _node_exchange.shift(x, axes, groups, steps, pairs, names)
        # Permutations are combined if their pairs are equal, in order too.
        if after is not None:
            x, _ = lax.optimization_barrier((x, (after, self._last)))
        first = len(before) % len(pairs)
        if len(before) >= len(pairs):
            x, _ = lax.optimization_barrier((x, before[-len(pairs)]))
        self._last = lax.ppermute(x, names, pairs[first:] + pairs[:first])
        before.append(self._last)
        return self._last

    def _chained(self, x: jax.Array, send: Callable[[jax.Array], jax.Array]) -> jax.Array:
        """A transfer that waits for the last one: barriers are there until XLA has scheduled."""
        if self._last is not None:
            x, _ = lax.optimization_barrier((x, self._last))
        self._last = send(x)
        return self._last

    def gather(self, x: jax.Array, dimension: int) -> jax.Array:
        """x of all counterparts, in a new dimension."""
        if self.levels.by_nvshmem:
            return jnp.moveaxis(_node_exchange.gather(x, *self._between()), 0, dimension)
        names, groups = meshes.axes_and_groups(self.levels.between)
        return self._chained(
            x, lambda x: _lax.all_gather(x, names, axis_index_groups=groups, axis=dimension)
        )

    def exchange(self, x: jax.Array, split: int, concat: int) -> jax.Array:
        """``all_to_all(tiled=True)`` between counterparts."""
        if self.levels.by_nvshmem:
            blocks = jnp.moveaxis(divide(x, split, self.levels.count), split, 0)
            arrived = _node_exchange.exchange(blocks, *self._between())
            return merge(jnp.moveaxis(arrived, 0, concat), concat)
        between = Collective("all_to_all", split, concat)
        return self._chained(x, lambda x: between.lax(x, self.levels.between))

    def _in_wire(self, rows: jax.Array, send: Callable[[jax.Array], jax.Array]) -> jax.Array:
        """Rows [..., n] sent in blocks of the wire."""
        assert self.wire is not None
        came = send(_wire.packed(rows.astype(jnp.float32), self.wire))
        return _wire.unpacked(came, self.wire, rows.shape[-1])

    def shift_term(self, x: jax.Array, steps: int) -> jax.Array:
        """:meth:`shift` of a term of a sum."""
        if self.wire is None:
            return self.shift(x, steps)
        return self._in_wire(x.ravel(), lambda data: self.shift(data, steps)).reshape(x.shape)

    def _sum_in_wire(self, x: jax.Array, added: Sequence[jax.Array]) -> jax.Array:
        """:meth:`sum` in a wire: each rank sums one shard, the others' parts as they were quantised
        and its own as it is, and all read the sum as it is quantised again."""
        count, size = self.levels.count, x.size
        shard = _wire.shard_size(size, count)
        padded = jnp.pad(x.astype(jnp.float32), (0, count * shard - size))
        shards = padded.reshape(count, shard)
        terms = self._in_wire(shards, lambda data: self.exchange(data, 0, 0))
        node, _ = place_of(self.levels)
        is_own = (jnp.arange(count) == node)[:, None]
        total = sum_in_order(jnp.where(is_own, shards, terms), 0)
        y = self._in_wire(total, lambda data: self.gather(data, 0)).ravel()[:size]
        return sum_of([y, *added], y.dtype).astype(x.dtype)

    def sum(self, x: jax.Array, added: Sequence[jax.Array] = ()) -> jax.Array:
        """The sum of all counterparts' vectors x, and of `added`, which are the same on all of
        them: in float32 at least, in the order of the nodes, rounded once. The same bits on all."""
        if self.wire is not None:
            return self._sum_in_wire(x, added)
        count, size = self.levels.count, x.size
        saved = (count - 1) * (1 - 2 / count) * size * x.dtype.itemsize  # bytes, by two steps
        if saved < NODE_LATENCY * NODE_BYTES_PER_SECOND:
            return sum_in_order(self.gather(x, 0), 0, added).astype(x.dtype)
        node, _ = place_of(self.levels)
        padded = [jnp.pad(a, (0, -size % count)) for a in (x, *added)]
        shard = padded[0].size // count
        terms = self.exchange(padded[0].reshape(count, shard), 0, 0)
        own = [lax.dynamic_slice_in_dim(a, node * shard, shard) for a in padded[1:]]
        total = sum_in_order(terms, 0, own).astype(x.dtype)
        return self.gather(total, 0).reshape(-1)[:size]


def sum_in_order(terms: jax.Array, dimension: int, added: Sequence[jax.Array] = ()) -> jax.Array:
    """The sum of an array's slices and of `added`, one after the other in float32 at least, not
    rounded."""
    wide = _epilogue.sum_dtype(terms.dtype)
    slices = [
        lax.index_in_dim(terms, i, dimension, keepdims=False) for i in range(terms.shape[dimension])
    ]
    return sum_of([*slices, *added], wide)


def sum_of(terms: Sequence[jax.Array], wide: Any) -> jax.Array:
    """The sum of arrays, one after the other, in this type."""
    first, *rest = (term.astype(wide) for term in terms)
    return functools.reduce(jnp.add, rest, first)


# ---- Blocks of ranks -----------------------------------------------------------------------------


def _permuted(array: Any, dimension: int, order: Sequence[int]) -> Any:
    """Reorders the equal blocks that a dimension is made of: block i is block order[i]."""
    if tuple(order) == tuple(range(len(order))):
        return array
    shape = array.shape
    blocks = array.reshape(*shape[:dimension], len(order), -1, *shape[dimension + 1 :])
    return jnp.take(blocks, np.array(order), axis=dimension, mode="clip").reshape(shape)


def in_node_order(array: Any, dimension: int, levels: Levels) -> Any:
    """An array with one block for each rank in a dimension, its blocks node by node."""
    return _permuted(array, dimension, levels.order)


def in_rank_order(array: Any, dimension: int, levels: Levels) -> Any:
    """The inverse of `in_node_order`."""
    return _permuted(array, dimension, np.argsort(levels.order).tolist())


def divide(array: Any, dimension: int, first: int) -> Any:
    """A dimension as two, the first one of this size."""
    shape = array.shape
    sizes = (first, shape[dimension] // first)
    return array.reshape(*shape[:dimension], *sizes, *shape[dimension + 1 :])


def merge(array: Any, dimension: int) -> Any:
    """A dimension and the next one as one."""
    shape = array.shape
    merged = shape[dimension] * shape[dimension + 1]
    return array.reshape(*shape[:dimension], merged, *shape[dimension + 2 :])


def of_node(array: Any, dimension: int, node: Any, levels: Levels) -> Any:
    """A node's blocks of an array whose blocks lie node by node."""
    size = array.shape[dimension] // levels.count
    return lax.dynamic_slice_in_dim(array, node * size, size, dimension)


def own_block(array: Any, levels: Levels) -> Any:
    """This rank's block of an array whose first dimension has a block for each rank of a node."""
    _, place = place_of(levels)
    size = array.shape[0] // levels.local
    return lax.dynamic_slice_in_dim(array, place * size, size)


def chunk_of(array: Any, dimension: int, blocks: int, index: int, chunks: int) -> Any:
    """Chunk `index` of `chunks` of each of the equal blocks that a dimension consists of."""
    if chunks == 1:
        return array
    wide = divide(array, dimension, blocks)
    size = wide.shape[dimension + 1] // chunks
    chunk = lax.slice_in_dim(wide, index * size, (index + 1) * size, axis=dimension + 1)
    return merge(chunk, dimension)


class _Concatenated:
    """A result that is put together along a dimension: one block for each rank of each node."""

    def __init__(self, dimension: int, chunked: int | None, chunks: int, levels: Levels) -> None:
        self.dimension, self.chunked, self.chunks = dimension, chunked, chunks
        self.levels = levels
        self._whole: Any = None  # [.., nodes, ranks, block, ..]

    def add(self, block: Any, steps: int, node: Any, chunk: int) -> None:
        at = self.dimension
        block = jnp.expand_dims(divide(block, at, self.levels.local), at)
        shape, start = list(block.shape), [0] * block.ndim  # [.., 1, ranks, block, ..]
        shape[at], start[at] = self.levels.count, node
        if self.chunked is not None:
            along = self.chunked + (2 if self.chunked >= at else 0)
            start[along] = chunk * shape[along]
            shape[along] *= self.chunks
        if self._whole is None:
            self._whole = _product.zeros(tuple(shape), block.dtype, block)
        # All indices need one type. In 64-bit mode a Python int would become an int64.
        indices = [jnp.asarray(i, jnp.int32) for i in start]
        self._whole = lax.dynamic_update_slice(self._whole, block, indices)

    def result(self) -> Any:
        whole = merge(merge(self._whole, self.dimension), self.dimension)
        return in_rank_order(whole, self.dimension, self.levels)


class _Summed:
    """A result that is the sum of all nodes' terms: the own one first, then in the order in which
    nodes follow. In float32 at least, not rounded."""

    def __init__(self, chunked: int | None, chunks: int, wide: Any) -> None:
        self.chunked, self.chunks, self.wide = chunked, chunks, wide
        self._terms: list[dict[int, Any]] = [{} for _ in range(chunks)]

    def add(self, term: Any, steps: int, node: Any, chunk: int) -> None:
        self._terms[chunk][steps] = term

    def result(self) -> Any:
        sums = [
            sum_of([terms[steps] for steps in sorted(terms)], self.wide) for terms in self._terms
        ]
        return sums[0] if self.chunked is None else jnp.concatenate(sums, self.chunked)


# ---- Products ------------------------------------------------------------------------------------


def chunked_dimension(collective: Collective, ndim: int) -> int | None:
    """The dimension of rows that chunks are parts of; None if there is none: of an all-to-all
    between columns."""
    rows = (d for d in (collective.split, collective.concat) if d not in (None, ndim - 1))
    return next(rows, None)


def _result(
    dimension: int | None, chunked: int | None, chunks: int, levels: Levels, wide: Any
) -> _Concatenated | _Summed:
    if dimension is None:
        return _Summed(chunked, chunks, wide)
    return _Concatenated(dimension, chunked, chunks, levels)


def x_travels(
    x: jax.Array,
    call: Callable[[jax.Array, Any], Sequence[jax.Array]],
    collective: Collective,
    results: Sequence[int | None],
    levels: Levels,
    chunks: int,
    wide: Any,
) -> list[jax.Array]:
    """The results of ``collective(x) @ w``.

    Args:
      x: this rank's operand.
      call: (shard, node) -> the results of the op inside the node, for what ranks of another node,
        or this one, put in.
      collective: an all_gather or all_to_all.
      results: for each result the dimension in which what comes from nodes is put together; None:
        it is summed, and in the type `wide`.
      levels: of the group.
      chunks: of each step.
    """
    node, _ = place_of(levels)
    chunked = chunked_dimension(collective, x.ndim)
    transfers = Transfers(levels)
    made = [_result(d, chunked, chunks, levels, wide) for d in results]
    products: list[jax.Array] = []
    if collective.split is not None:
        x = in_node_order(x, collective.split, levels)
    for steps in range(levels.count):
        sent_x = x
        if collective.split is not None:  # x goes `steps` nodes back
            to = (node - steps) % levels.count
            sent_x = of_node(x, collective.split, to, levels)
        # The split dimension of `sent_x` has a block for each rank of the receiving node.
        blocks = levels.local if chunked == collective.split else 1
        for chunk in range(chunks):
            shard = sent_x
            if chunked is not None:
                shard = chunk_of(sent_x, chunked, blocks, chunk, chunks)
            source = (node + steps) % levels.count
            if steps:
                # One product for each transfer: XLA has one under way at a time, and puts all
                # products beside the last one, unless the next waits for the product before.
                sent = len(products) - chunks
                shard = transfers.shift(shard, steps, products[sent - 1] if sent else None)
            found = call(shard, source)
            products.append(found[0])
            for one, result in zip(made, found, strict=True):
                one.add(result, steps, source, chunk)
    return [one.result() for one in made]


def product_travels(
    xs: Sequence[jax.Array],
    ws: Sequence[jax.Array],
    call: Callable[[Sequence[jax.Array], Sequence[jax.Array]], jax.Array],
    collective: Collective,
    levels: Levels,
    chunks: int,
    *,
    columns_axis: int,
    wide: Any,
    wire: str | None = None,
) -> jax.Array:
    """The result of ``collective(sum_i x_i @ w_i)``; for reduce_scatter in the type `wide`, not
    rounded.

    Args:
      xs, ws: this rank's operands.
      call: (xs, ws) -> the result of the op inside the node, for what goes to the ranks of one
        node.
      collective: a reduce_scatter or all_to_all.
      levels: of the group.
      chunks: of each step.
      columns_axis: which dimension of a w is the product's last one.
      wire: of a reduce_scatter, the format that products travel in; None: as they are.
    """
    node, _ = place_of(levels)
    last = xs[0].ndim - 1
    split, chunked = collective.split, chunked_dimension(collective, xs[0].ndim)
    assert split is not None
    transfers = Transfers(levels, wire)
    made = _result(collective.concat, chunked, chunks, levels, wide)
    axis, by_rows = (split, True) if split != last else (columns_axis, False)
    sent = [in_node_order(a, axis, levels) for a in (xs if by_rows else ws)]
    for steps in (*range(1, levels.count), 0):  # the own node's is last: it hides a transfer
        # In each step a node sends its product `steps` nodes back, and receives one from `steps`
        # nodes ahead.
        to = (node - steps) % levels.count
        of_to = [of_node(a, axis, to, levels) for a in sent]
        sent_xs, sent_ws = (of_to, ws) if by_rows else (xs, of_to)
        for chunk in range(chunks):
            rows = sent_xs
            if chunked is not None:
                blocks = levels.local if chunked == split else 1
                rows = [chunk_of(x, chunked, blocks, chunk, chunks) for x in sent_xs]
            y = call(rows, sent_ws)
            if steps:
                y = transfers.shift_term(y, steps)
            made.add(y, steps, (node + steps) % levels.count, chunk)
    return made.result()
