"""Equations 1 to 10 of AxoNN's communication model (arXiv 2305.13525, section V), as written.

Sizes of buffers are in bytes, bandwidths in bytes/s, times in seconds. Matrices are given in
elements, as in the paper, and `itemsize` says how many bytes one has: 2 unless told, since weights,
activations and gradients travel in half precision.

Every number may be a NumPy array (of many grids, say); the result then has the broadcast shape.
Nothing is checked here: :func:`jflux.plan.rank` does that.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np

Value: TypeAlias = Any  # float, int or an array of them


class Sizes(Protocol):
    """What has a number for each axis: a :class:`jflux.parallel.Grid`, or :class:`Axes`."""

    @property
    def x(self) -> Value:
        """Ranks along x."""

    @property
    def y(self) -> Value:
        """Ranks along y."""

    @property
    def z(self) -> Value:
        """Ranks along z."""

    @property
    def data(self) -> Value:
        """Ranks along data."""


class Axes(NamedTuple):
    """A number, or an array, for each axis: ranks (G in the paper) or bandwidths (beta)."""

    x: Value
    y: Value
    z: Value
    data: Value


class Breakdown(NamedTuple):
    """Seconds of the collectives of a layer or of a step, by the axis that they run along. With
    overlap credit, what of them is exposed.

    Equations 4, 5 and 8; of a step, summed over the layers. `all_reduce_y`, of the forward pass, is
    equation 6 of plain layers and 7 of transposed ones, `all_reduce_x`, of the backward pass, the
    other way round.
    """

    all_gather_z: Value
    reduce_scatter_z: Value
    all_reduce_y: Value
    all_reduce_x: Value
    all_reduce_data: Value

    def total(self) -> Value:
        """Of all collectives; equation 9, t_comm."""
        return sum(self[1:], self[0])


def swap(axes: Sizes) -> Axes:
    """x and y exchanged: sizes or bandwidths as a transposed layer sees them (section V-A)."""
    return Axes(axes.y, axes.x, axes.z, axes.data)


# One collective: G ranks in a ring, `nbytes` is what each of them puts in (m in the paper).
# `latency` is an extension: seconds of each of the ring's steps, which the paper ignores
# (assumption 3).


def all_gather(ranks: Value, nbytes: Value, bandwidth: Value, latency: Value = 0.0) -> Value:
    """Equation 1: t_AG = (G - 1) m / beta; m is one rank's shard, the result has G m bytes."""
    return (ranks - 1) * nbytes / bandwidth + (ranks - 1) * latency


def reduce_scatter(ranks: Value, nbytes: Value, bandwidth: Value, latency: Value = 0.0) -> Value:
    """Equation 2: t_RS = (G - 1)/G m / beta; m is one rank's whole addend."""
    return (ranks - 1) / ranks * nbytes / bandwidth + (ranks - 1) * latency


def all_reduce(ranks: Value, nbytes: Value, bandwidth: Value, latency: Value = 0.0) -> Value:
    """Equation 3: t_AR = 2 (G - 1)/G m / beta; m is one rank's whole addend."""
    return 2 * ((ranks - 1) / ranks) * nbytes / bandwidth + 2 * (ranks - 1) * latency


def all_reduce_two_level(
    local: Value, nodes: Value, nbytes: Value, inside: tuple[Value, Value],
    between: tuple[Value, Value],
) -> Value:  # fmt: skip
    """An extension: an all-reduce over `nodes` nodes of `local` ranks as jflux's ops do it. Ranks
    of a node scatter their sum, each sums its part with its counterparts on other nodes, and a node
    gathers.

    Args:
      nbytes: one rank's whole addend.
      inside, between: (bandwidth, latency of a step) of a ring inside a node, and of counterparts.
    """
    part = nbytes / local
    scattered = reduce_scatter(local, nbytes, *inside)
    return scattered + all_reduce(nodes, part, *between) + all_gather(local, part, *inside)


# One layer that is not transposed: y [m, n] = x [m, k] @ w [k, n]. k is split over y, n over x, the
# m rows of one data-parallel group over z, and each rank's part of w once more over z.


def all_gather_z(
    k: Value, n: Value, grid: Sizes, bandwidth: Value, *, itemsize: Value = 2
) -> Value:
    """Equation 4: t_AG,z = (G_z - 1) k n / (G_x G_y G_z) / beta: weights, line 2 of algorithm 1."""
    return (grid.z - 1) * (itemsize * k * n / (grid.x * grid.y * grid.z)) / bandwidth


def reduce_scatter_z(
    k: Value, n: Value, grid: Sizes, bandwidth: Value, *, itemsize: Value = 2
) -> Value:
    """Equation 5: t_RS,z = (G_z - 1)/G_z k n / (G_x G_y) / beta: their gradients, line 12."""
    return (grid.z - 1) / grid.z * (itemsize * k * n / (grid.x * grid.y)) / bandwidth


def all_reduce_y(
    m: Value, n: Value, grid: Sizes, bandwidth: Value, *, itemsize: Value = 2
) -> Value:
    """Equation 6: t_AR,y = 2 (G_y - 1)/G_y m n / (G_z G_x) / beta: the output, line 4.

    m: the rows of one data-parallel group, so the batch's rows over G_data.
    """
    return 2 * ((grid.y - 1) / grid.y) * (itemsize * m * n / (grid.z * grid.x)) / bandwidth


def all_reduce_x(
    m: Value, k: Value, grid: Sizes, bandwidth: Value, *, itemsize: Value = 2
) -> Value:
    """Equation 7: t_AR,x = 2 (G_x - 1)/G_x m k / (G_z G_y) / beta: the input's gradient, line 11.

    m: as in equation 6.
    """
    return 2 * ((grid.x - 1) / grid.x) * (itemsize * m * k / (grid.z * grid.y)) / bandwidth


def all_reduce_data(
    k: Value, n: Value, grid: Sizes, bandwidth: Value, *, itemsize: Value = 2
) -> Value:
    """Equation 8: t_AR,data = 2 (G_data - 1)/G_data k n / (G_x G_y G_z) / beta: gradients, once a
    batch."""
    shard = itemsize * k * n / (grid.x * grid.y * grid.z)
    return 2 * ((grid.data - 1) / grid.data) * shard / bandwidth


def layer_times(
    m: Value, k: Value, n: Value, grid: Sizes, bandwidths: Sizes, *,
    transposed: bool = False, itemsize: Value = 2, gradient_itemsize: Value = 2,
) -> Breakdown:  # fmt: skip
    """Equations 4 to 8 of one layer; ``.total()`` is equation 9.

    Args:
      m: rows of one data-parallel group.
      k, n: the weight is [k, n].
      grid: ranks along each axis.
      bandwidths: of the collectives along each axis.
      transposed: w's rows are split over x and its columns over y: sizes and bandwidths of x and
        y swap (the end of section V-A).
      itemsize: bytes of an element of weights and activations, and of gradients along z.
      gradient_itemsize: bytes of an element of the data-parallel all-reduce.
    """
    if transposed:
        grid, bandwidths = swap(grid), swap(bandwidths)
    return Breakdown(
        all_gather_z(k, n, grid, bandwidths.z, itemsize=itemsize),
        reduce_scatter_z(k, n, grid, bandwidths.z, itemsize=itemsize),
        all_reduce_y(m, n, grid, bandwidths.y, itemsize=itemsize),
        all_reduce_x(m, k, grid, bandwidths.x, itemsize=itemsize),
        all_reduce_data(k, n, grid, bandwidths.data, itemsize=gradient_itemsize),
    )


def agnostic_bandwidths(bandwidth: Value) -> Axes:
    """The placement-agnostic model (section V-A): one bandwidth for every axis."""
    return Axes(bandwidth, bandwidth, bandwidth, bandwidth)


def within_node(grid: Sizes, gpus_per_node: int, *, straddling: bool = False) -> Axes:
    """Case 1 of section V-B, for each axis: does a group, with all axes inside it, fill at most a
    node?

    Args:
      straddling: an extension. Ranks fill nodes in their order, so that groups of 3 on nodes of 4
        cross from node to node though each would fit into one; True says no for those.
    """
    inside: Value = 1
    found = []
    total = grid.x * grid.y * grid.z * grid.data
    for ranks in (grid.x, grid.y, grid.z, grid.data):
        inside = inside * ranks
        fits = inside <= gpus_per_node
        if straddling:
            fits = fits & ((gpus_per_node % inside == 0) | (total <= gpus_per_node))
        found.append(fits)
    return Axes(*found)


def ranks_on_a_node(grid: Sizes, gpus_per_node: int) -> Axes:
    """An extension: how many ranks of a group along each axis are on one node, with all axes inside
    it; 1 if nodes would have different numbers of them. Ranks fill nodes in their order."""
    inside: Value = 1
    found = []
    for ranks in (grid.x, grid.y, grid.z, grid.data):
        local = np.minimum(ranks, np.maximum(gpus_per_node // inside, 1))
        factors = (ranks % local == 0) & ((gpus_per_node % inside == 0) | (local == 1))
        found.append(np.where(factors, local, 1))
        inside = inside * ranks
    return Axes(*found)


def aware_bandwidths(
    grid: Sizes, gpus_per_node: int, intra: Value, inter: Value, *, straddling: bool = False
) -> Axes:
    """The placement-aware model (section V-B): equation 10, for x innermost, then y, z, data.

    An axis whose groups lie within a node (:func:`within_node`) has `intra` (case 1). Any other
    shares `inter`, the bandwidth between two nodes, with as many rings as there are ranks inside
    it, at most those of a node (case 2): inter / min(G_node, prod_{j<i} G_j).
    """
    inside: Value = 1
    found = []
    within = within_node(grid, gpus_per_node, straddling=straddling)
    for ranks, fits in zip((grid.x, grid.y, grid.z, grid.data), within, strict=True):
        rings = np.minimum(gpus_per_node, inside)
        bandwidth = np.where(fits, intra, inter / rings)
        found.append(bandwidth if bandwidth.ndim else float(bandwidth))
        inside = inside * ranks
    return Axes(*found)
