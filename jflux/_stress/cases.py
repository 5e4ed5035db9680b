"""A call over the groups of a mesh, and what it must give, in float64."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from . import calls
from .calls import HALVES

SIZES = (1, 2, 3, 5, 8, 13, 16, 31, 64, 100, 129, 200)
ROWS = (1, 3, 16, 31, 64, 100, 129, 200, 256)
K = (8, 13, 64, 72, 136, 200, 264, 520, 1000)
N = (8, 31, 64, 136, 264, 520, 1032, 2056)
FLOATS = (*HALVES, jnp.float32)


@dataclasses.dataclass(frozen=True)
class Output:
    """What one result must be: arrays are [*mesh, ...].

    Attributes:
      want: in float64.
      scale: the same of absolute values.
      dtype: what says how exact it is.
      terms: how many terms each sum has.
      same: whether all ranks of a group have the same bits.
    """

    want: np.ndarray
    scale: np.ndarray
    dtype: Any
    terms: int
    same: bool = False


Data = tuple[tuple[np.ndarray, ...], list[Output]]


@dataclasses.dataclass(frozen=True)
class Case:
    """A call over the groups of a mesh.

    Attributes:
      op: whose calls it makes; "xla" for none of jflux's.
      name: op, shapes and types, for people.
      body: of one device's operands; its results, in the order of the outputs.
      make: (seed) -> the operands [*mesh, ...], and what must come out.
      is_xlas: whether XLA computes it, at least in part: its bits may differ in another program.
      most_bytes: of a product, what a rank sends or gets, in float32.
      has_gradient: whether its first operand has one.
    """

    op: str
    name: str
    mesh: Mesh
    axis_name: Any
    body: Callable[..., Any]
    make: Callable[[int], Data]
    is_xlas: bool = False
    most_bytes: int = 0
    has_gradient: bool = True


@dataclasses.dataclass(frozen=True)
class Place:
    """Where calls are drawn for.

    Attributes:
      platform: "cpu" or "cuda".
      most_products: of one rank and call: the host computes them in float64.
      most_elements: of one rank's operand of a collective.
      wide: whether float64 may be drawn (JAX's 64-bit mode).
      spans: whether a group has ranks on several nodes.
    """

    mesh: Mesh
    axis_name: Any
    platform: str
    most_products: int = 1 << 24
    most_elements: int = 1 << 23
    wide: bool = False
    spans: bool = False

    @property
    def world(self) -> int:
        """Ranks of a group."""
        return calls.world_of(self.mesh, self.axis_name)

    def case(
        self,
        op: str,
        name: str,
        body: Callable[..., Any],
        make: Callable[[int], Data],
        **more: Any,
    ) -> Case:
        """A call that is drawn for here."""
        name = f"{name} over {self.axis_name}"
        return Case(op, name, self.mesh, self.axis_name, body, make, **more)

    def draw_type(self, rng: random.Random) -> Any:
        """Of operands: the GPU kernels of experts and attention take 16-bit floats alone."""
        return rng.choice(HALVES if self.platform == "cuda" else FLOATS)


def sums_of(place: Place, *arrays: np.ndarray) -> list[np.ndarray]:
    """Of each array [*mesh, ...], for each device, the sum over its group, in float64."""
    sums = [np.empty(a.shape) for a in arrays]
    for group in calls.groups_of(place.mesh, place.axis_name):
        for one, a in zip(sums, arrays, strict=True):
            total = np.sum([a[at].astype(np.float64) for at in group], axis=0)
            for at in group:
                one[at] = total
    return sums


def exchanged_by(place: Place, f: Callable[[list[np.ndarray]], list[np.ndarray]], x: Any) -> Any:
    """f of the arrays of each group's ranks, put together as [*mesh, ...]."""
    found: dict[tuple[int, ...], np.ndarray] = {}
    for group in calls.groups_of(place.mesh, place.axis_name):
        found |= dict(zip(group, f([x[at].astype(np.float64) for at in group]), strict=True))
    shape = place.mesh.devices.shape
    first = next(iter(found.values()))
    return np.stack([found[at] for at in np.ndindex(shape)]).reshape(*shape, *first.shape)
