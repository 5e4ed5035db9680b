"""Seconds of a step's communication and computation, on one grid or on many at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from . import equations
from .equations import Axes, Breakdown, Value, swap
from .machine import Machine
from .model import Layer, Model
from .training import PAPER, Training


@dataclasses.dataclass(frozen=True)
class Extensions:
    """What the paper's model leaves out. All off: equations 1 to 10 exactly.

    Attributes:
      latency: each step of a ring takes the machine's latency besides (against assumption 3).
      bandwidth_by_size: bandwidths are read from the machine's tables, by the bytes of the whole
        buffer: what a rank puts in, or what it gets from an all-gather. Such tables are of whole
        collectives, latency included: do not ask for both.
      overlap: the share of a product's time behind which a collective can hide, 0 to 1 (against
        assumption 4; section IV). The gather of weights hides behind the forward product, the
        all-reduce of the input's gradient behind the product for the weight's gradient, and the
        reduce-scatter along z behind that for the input's gradient. The forward all-reduce and the
        data-parallel one do not hide.
      recompute: with checkpointing, the second forward pass repeats its all-reduces, and its
        gathers unless they are cached.
      straddling: groups that cross a node's border are between nodes, even if they would fit into
        one (:func:`jflux.plan.equations.within_node`).
      two_level: all-reduces along x and y whose groups span nodes, with more than one rank on each
        and equally many, run on two levels, as jflux's ops do
        (:func:`jflux.plan.equations.all_reduce_two_level`). All GPUs of a node then share `inter`.
    """

    latency: bool = False
    bandwidth_by_size: bool = False
    overlap: float = 0.0
    recompute: bool = False
    straddling: bool = False
    two_level: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.overlap <= 1:
            raise ValueError(f"jflux: overlap={self.overlap!r} must be from 0 to 1")
        if self.latency and self.bandwidth_by_size:
            raise ValueError("jflux: bandwidth_by_size has latency in it: ask for one of the two")


EXACT = Extensions()


def communication(
    model: Model, machine: Machine, grid: Axes, *, aware: bool = True,
    extensions: Extensions = EXACT, training: Training = PAPER,
) -> Breakdown:  # fmt: skip
    """Seconds of a step's communication: equation 9, summed over the layers.

    Args:
      grid: numbers or arrays for each axis.
      aware: with equation 10's bandwidths. Otherwise all axes have one: the machine's `inter`, or
        `intra` where all ranks fit into a node.
    """
    links = _links(machine, grid, aware, extensions)
    sums: dict[str, Value] = dict.fromkeys(Breakdown._fields, 0.0)
    for layer, count in model.counts().items():
        for name, seconds in _layer(model, layer, grid, links, machine, extensions, training):
            sums[name] = sums[name] + count * seconds
    return Breakdown(**sums)


def compute(model: Model, machine: Machine, ranks: int, training: Training = PAPER) -> float:
    """Seconds of a step's products, split evenly: the same on every grid."""
    passes = 4 / 3 if training.checkpoint else 1.0
    return passes * model.flops / (ranks * machine.flops)


Links = Callable[[str, Value], tuple[Value, Value]]  # axis, bytes -> bandwidth, latency


def _links(machine: Machine, grid: Axes, aware: bool, extensions: Extensions) -> Links:
    node = machine.gpus_per_node
    total = grid.x * grid.y * grid.z * grid.data
    within = equations.within_node(grid, node, straddling=extensions.straddling)
    if not aware:
        within = Axes(*(total <= node,) * 4)

    def bandwidths(intra: Value, inter: Value) -> Axes:
        if aware:
            return equations.aware_bandwidths(
                grid, node, intra, inter, straddling=extensions.straddling
            )
        return equations.agnostic_bandwidths(np.where(total <= node, intra, inter))

    inter = machine.inter or np.nan  # one node: nothing may ask for it
    fixed = bandwidths(machine.intra, inter)

    def of(axis: str, nbytes: Value) -> tuple[Value, Value]:
        bandwidth: Value = getattr(fixed, axis)
        latency: Value = 0.0
        if extensions.bandwidth_by_size:
            rates = (
                _rate(machine.intra_by_size, machine.intra, nbytes),
                _rate(machine.inter_by_size, inter, nbytes),
            )
            bandwidth = getattr(bandwidths(*rates), axis)
        if extensions.latency:
            inside = getattr(within, axis)
            latency = np.where(inside, machine.intra_latency, machine.inter_latency)
        return bandwidth, latency

    return of


def _two_levels(
    local: Value, nodes: Value, nbytes: Value, machine: Machine, extensions: Extensions
) -> Value:
    """Seconds of an all-reduce between nodes that are full: each GPU has its share of `inter`."""
    intra, inter = machine.intra, (machine.inter or np.nan) / machine.gpus_per_node
    if extensions.bandwidth_by_size:
        share = 1 / machine.gpus_per_node
        intra = _rate(machine.intra_by_size, machine.intra, nbytes)
        inter = share * _rate(machine.inter_by_size, machine.inter or np.nan, nbytes / local)
    seconds = (machine.intra_latency, machine.inter_latency) if extensions.latency else (0.0, 0.0)
    return equations.all_reduce_two_level(
        local, nodes, nbytes, (intra, seconds[0]), (inter, seconds[1])
    )


def _rate(table: tuple[tuple[float, float], ...], otherwise: float, nbytes: Value) -> Value:
    """Between two sizes of the table by their logarithms; outside it, what is at its end."""
    if not table:
        return otherwise
    sizes, rates = np.log(np.array(table)).T
    return np.exp(np.interp(np.log(np.maximum(nbytes, 1.0)), sizes, rates))


def _layer(
    model: Model, layer: Layer, grid: Axes, links: Links, machine: Machine,
    extensions: Extensions, training: Training,
) -> list[tuple[str, Value]]:  # fmt: skip
    """What equations 1 to 3 say for each collective of a layer, all of them in a step."""
    g = swap(grid) if layer.transposed else grid
    forward, backward = ("x", "y") if layer.transposed else ("y", "x")
    microbatches = training.microbatches
    again = 2 if extensions.recompute and training.checkpoint else 1
    gathers = 1 if training.cache_gathered else again
    samples = model.batch / grid.data / microbatches
    plane = grid.x * grid.y
    output = training.activation_bytes * samples * layer.rows * layer.n / (g.z * g.x)
    into = training.activation_bytes * samples * layer.input_rows * layer.k / (g.z * g.y)
    weight, gradient = (
        size * layer.weights / plane for size in (training.weight_bytes, training.gradient_bytes)
    )
    ranks = plane * grid.z * grid.data
    product = model.batch / microbatches * layer.flops / (ranks * machine.flops)
    credit = extensions.overlap * product
    local_ranks = equations.ranks_on_a_node(grid, machine.gpus_per_node)

    def seconds(
        op: Callable[..., Value], axis: str, count: int, nbytes: Value, hides: bool
    ) -> Value:
        ranks = getattr(grid, axis)
        whole = nbytes * ranks if op is equations.all_gather else nbytes
        exposed = op(ranks, nbytes, *links(axis, whole))
        if extensions.two_level and axis in ("x", "y"):
            local = getattr(local_ranks, axis)
            levels = _two_levels(local, ranks / local, nbytes, machine, extensions)
            exposed = np.where((local > 1) & (local < ranks), levels, exposed)
        if hides and extensions.overlap:
            exposed = np.maximum(exposed - credit, 0.0)
        return count * exposed

    found = [
        ("all_gather_z",
         seconds(equations.all_gather, "z", microbatches * gathers, weight / grid.z, True)),
        ("reduce_scatter_z", seconds(equations.reduce_scatter, "z", microbatches, gradient, True)),
        (f"all_reduce_{forward}",
         seconds(equations.all_reduce, forward, microbatches * again, output, False)),
        ("all_reduce_data",
         seconds(equations.all_reduce, "data", 1, gradient / grid.z, False)),
    ]  # fmt: skip
    if not layer.lookup:
        found.append(
            (
                f"all_reduce_{backward}",
                seconds(equations.all_reduce, backward, microbatches, into, True),
            )
        )
    return found
