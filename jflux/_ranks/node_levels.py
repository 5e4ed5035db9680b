"""Groups of ranks that lie on several nodes, and how they factor into two levels: ranks inside a
node, which map each other's memory, and counterparts between nodes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from . import meshes
from .meshes import Subgroups


@dataclasses.dataclass(frozen=True)
class Levels:
    """A group with equally many ranks on each of its nodes.

    Attributes:
      axis_names: the mesh axes whose ranks it has.
      axis_sizes: of these, by name, in the mesh's order of axes.
      nodes: for each node, the positions of its ranks in the group, growing; nodes by their first
        rank. Ranks with one place in their nodes are counterparts.
      by_nvshmem: whether NVSHMEM moves data between nodes, and not XLA's collectives.
    """

    axis_names: tuple[Any, ...]
    axis_sizes: tuple[tuple[Any, int], ...]
    nodes: tuple[tuple[int, ...], ...]
    by_nvshmem: bool = False

    @property
    def count(self) -> int:
        """How many nodes."""
        return len(self.nodes)

    @property
    def local(self) -> int:
        """Ranks on each node."""
        return len(self.nodes[0])

    @property
    def inside(self) -> Subgroups:
        """The ranks of each node."""
        return Subgroups(self.axis_names, self.nodes)

    @property
    def between(self) -> Subgroups:
        """Counterparts, in the order of their nodes."""
        return Subgroups(self.axis_names, tuple(zip(*self.nodes, strict=True)))

    @property
    def order(self) -> tuple[int, ...]:
        """Positions of all ranks, node by node."""
        return tuple(rank for node in self.nodes for rank in node)

    def shift(self, steps: int) -> list[tuple[int, int]]:
        """(source, destination) of each rank's data, which go so many nodes back, to a counterpart:
        what arrives at a rank is from the `steps`-th node after its own. Ranks are numbered in the
        mesh's order of axes, as `lax.ppermute` wants them."""
        pairs = [
            (source, destination)
            for node, destinations in enumerate(self.nodes)
            for source, destination in zip(
                self.nodes[(node + steps) % self.count], destinations, strict=True
            )
        ]
        return meshes.renumbered(pairs, self.axis_names, self.axis_sizes)

    def __str__(self) -> str:
        ranks = "1 rank" if self.local == 1 else f"{self.local} ranks"
        return f"{self.count} nodes of {ranks}"


def levels_of(
    table: np.ndarray,
    node_of: Mapping[int, int],
    axis_names: tuple[Any, ...],
    mesh_shape: Mapping[Any, int],
) -> Levels | str | None:
    """How the groups of a call factor: a pure function, the same in all processes.

    Args:
      table: device ids, [number of groups, ranks].
      node_of: the node of each device.
      axis_names: the groups' mesh axes.
      mesh_shape: sizes of all axes of the mesh, in its order.

    Returns:
      None if each group lies on one node; the levels that all groups have; or why there are none,
      in words.
    """
    rows: list[dict[int, list[int]]] = []
    for group in table.tolist():
        ranks_on: dict[int, list[int]] = {}
        for rank, device in enumerate(group):
            ranks_on.setdefault(node_of[device], []).append(rank)
        rows.append(ranks_on)
    if all(len(ranks_on) == 1 for ranks_on in rows):
        return None
    for group, ranks_on in zip(table.tolist(), rows, strict=True):
        if len({len(ranks) for ranks in ranks_on.values()}) > 1:
            return f"{_where(group, ranks_on)}; two levels need equally many on each"
    factored = [tuple(sorted(map(tuple, ranks_on.values()))) for ranks_on in rows]
    for group, ranks_on, nodes in zip(table.tolist(), rows, factored, strict=True):
        if nodes != factored[0]:
            return (
                f"{_where(table[0].tolist(), rows[0])}, but {_where(group, ranks_on)}, or in "
                "another order; two levels need all groups alike"
            )
    sizes = tuple((name, size) for name, size in mesh_shape.items() if name in axis_names)
    return Levels(axis_names, sizes, factored[0])


def _where(group: Sequence[int], ranks_on: Mapping[int, Sequence[int]]) -> str:
    places = " and ".join(
        f"{len(ranks)} rank{'s' if len(ranks) > 1 else ''} on node {node}"
        for node, ranks in sorted(ranks_on.items())
    )
    return f"the group of devices {list(group)} has {places}"
