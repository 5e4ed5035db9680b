"""Which positions of a split sequence each rank has."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

Layout = Literal["contiguous", "zigzag", "striped"]
LAYOUTS: tuple[Layout, ...] = ("contiguous", "zigzag", "striped")


def check_layout(op: str, layout: Layout) -> None:
    """Raises ValueError for a layout that is not one of `LAYOUTS`."""
    if layout not in LAYOUTS:
        raise ValueError(f"{op}: {layout=} must be one of {', '.join(LAYOUTS)}")


def check_length(op: str, layout: Layout, ranks: int, name: str, rows: jax.Array) -> None:
    """Raises ValueError for a rank's part of a sequence, [..., S/N, heads, D], that the layout does
    not give N ranks."""
    check_layout(op, layout)
    if layout == "zigzag" and ranks > 1 and rows.shape[-3] % 2:
        raise ValueError(
            f"{op}: with layout='zigzag' a rank has two equal parts of the sequence, so S/N must "
            f"be even, got {name} {rows.shape}; pad the sequence, or use layout='striped'"
        )


def causal_positions(length: int, ranks: int, *, layout: Layout = "zigzag") -> np.ndarray:
    """The positions of a sequence, in the order in which ranks have them.

    In causal attention late positions attend to more keys than early ones, so ranks with equal
    consecutive parts have unequal work. For 2 ranks and 8 positions::

        contiguous   0 1 2 3 | 4 5 6 7     what an array is without reordering
        zigzag       0 1 6 7 | 2 3 4 5     rank r has parts r and 2 N - 1 - r of 2 N
        striped      0 2 4 6 | 1 3 5 7     rank r has every N-th, from r on (arXiv 2311.09431)

    Args:
      length: of the sequence, over all ranks; a multiple of `ranks`, with zigzag of twice that.
      ranks: N.
      layout: one of the three.

    Returns:
      int32 [length].

    Raises:
      ValueError: a length that does not divide so; an unknown layout.

    Examples:
      >>> jflux.causal_positions(8, ranks=2).tolist()
      [0, 1, 6, 7, 2, 3, 4, 5]
    """
    check_layout("jflux.causal_positions", layout)
    parts = 2 * ranks if layout == "zigzag" else ranks
    if ranks < 1 or length % parts != 0:
        raise ValueError(
            f"{length=} must be a multiple of {parts}: {layout} gives each of {ranks} ranks "
            f"{parts // ranks} equal parts; pad the sequence"
        )
    positions = np.arange(length, dtype=np.int32)
    if layout == "striped":
        return positions.reshape(-1, ranks).T.reshape(-1)
    if layout == "zigzag":
        chunks = positions.reshape(2 * ranks, -1)
        return np.stack([chunks[:ranks], chunks[: ranks - 1 : -1]], 1).reshape(-1)
    return positions


def reorder_for_causal(
    x: jax.Array, ranks: int, *, axis: int = 1, layout: Layout = "zigzag"
) -> jax.Array:
    """Reorders a sequence so that causal attention gives all ranks as much work, once it is split
    evenly over them: element i of the result is element ``causal_positions(...)[i]`` of x.

    Done once for a batch (tokens, targets, segment ids, and :func:`causal_positions` for rotary
    embeddings); everything but attention does not care for the order.

    Args:
      x: the whole sequence, not one rank's part, along `axis`.
      ranks: N.
      axis: the dimension of positions.
      layout: as in :func:`causal_positions`.

    Returns:
      x's shape and type. :func:`restore_order` undoes it.

    Raises:
      ValueError: as :func:`causal_positions`.

    Examples:
      >>> tokens = jnp.array([[10, 11, 12, 13, 14, 15, 16, 17]])
      >>> jflux.reorder_for_causal(tokens, ranks=2).tolist()
      [[10, 11, 16, 17, 12, 13, 14, 15]]
    """
    order = causal_positions(_length(x, axis), ranks, layout=layout)
    return jnp.take(jnp.asarray(x), order, axis=axis, unique_indices=True)


def restore_order(
    x: jax.Array, ranks: int, *, axis: int = 1, layout: Layout = "zigzag"
) -> jax.Array:
    """Undoes :func:`reorder_for_causal`, with the same arguments.

    Examples:
      >>> tokens = jnp.array([[10, 11, 16, 17, 12, 13, 14, 15]])
      >>> jflux.restore_order(tokens, ranks=2).tolist()
      [[10, 11, 12, 13, 14, 15, 16, 17]]
    """
    order = np.argsort(causal_positions(_length(x, axis), ranks, layout=layout)).astype(np.int32)
    return jnp.take(jnp.asarray(x), order, axis=axis, unique_indices=True)


def _length(x: jax.Array, axis: int) -> int:
    shape = np.shape(x)
    if not -len(shape) <= axis < len(shape):
        raise ValueError(f"x has shape {shape}, and no dimension {axis=} of positions")
    return shape[axis]


def own_positions(rank: jax.Array, length: int, ranks: int, layout: Layout) -> jax.Array:
    """The positions of one rank's `length` of ``ranks * length``, int32 [length], computed on the
    device: :func:`causal_positions` of them all would be a constant of the program."""
    at = jnp.arange(length, dtype=jnp.int32)
    if layout == "striped":
        return at * ranks + rank
    if layout == "zigzag":
        half = length // 2
        return jnp.where(at < half, rank * half + at, (2 * ranks - 2 - rank) * half + at)
    return rank * length + at


def in_sequence(a: jax.Array, ranks: int, layout: Layout) -> jax.Array:
    """[B, S, ...] in the order of the sequence, for an array in the order of ranks."""
    if ranks == 1 or layout == "contiguous":
        return a
    if layout == "striped":
        return a.reshape(a.shape[0], ranks, -1, *a.shape[2:]).swapaxes(1, 2).reshape(a.shape)
    pairs = a.reshape(a.shape[0], ranks, 2, -1, *a.shape[2:])
    return jnp.concatenate([pairs[:, :, 0], pairs[:, ::-1, 1]], 1).reshape(a.shape)


def in_ranks(a: jax.Array, ranks: int, layout: Layout) -> jax.Array:
    """Undoes :func:`in_sequence`."""
    if ranks == 1 or layout == "contiguous":
        return a
    if layout == "striped":
        return a.reshape(a.shape[0], -1, ranks, *a.shape[2:]).swapaxes(1, 2).reshape(a.shape)
    halves = a.reshape(a.shape[0], 2, ranks, -1, *a.shape[2:])
    return jnp.stack([halves[:, 0], halves[:, 1, ::-1]], 2).reshape(a.shape)
