"""The grid of ranks: how many there are along each axis, and what the axes are called.

Tensor parallelism on an x by y by z grid beside data parallelism (arXiv 2305.13525, section III).
The ranks of a grid are numbered with x innermost, then y, z, and data outermost (section V-B), so
that the axes that talk most have neighbours.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

AXES = ("x", "y", "z", "data")


@dataclasses.dataclass(frozen=True, order=True)
class Grid:
    """How many ranks there are along each axis: G_x, G_y, G_z and G_data of the paper."""

    x: int = 1
    y: int = 1
    z: int = 1
    data: int = 1

    def __post_init__(self) -> None:
        for name, size in zip(AXES, self.sizes, strict=True):
            if not isinstance(size, int | np.integer) or size < 1:
                raise ValueError(f"jflux: {name}={size!r} of a grid must be a positive int")

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        return self.x, self.y, self.z, self.data

    @property
    def ranks(self) -> int:
        return math.prod(self.sizes)

    @property
    def tensor(self) -> int:
        """Ranks that share one copy of the weights: G_tensor."""
        return self.x * self.y * self.z

    @classmethod
    def parse(cls, text: str) -> Grid:
        """The grid of "x,y,z,data"; what is left out at the end is 1."""
        parts = text.split(",")
        if len(parts) > len(AXES) or not all(part.strip().isdecimal() for part in parts):
            raise ValueError(f'jflux: a grid is "x,y,z,data", such as 2,2,1,1; got {text!r}')
        return cls(*map(int, parts))

    def mesh(
        self, devices: Sequence[jax.Device] | None = None, axis_type: AxisType = AxisType.Auto
    ) -> Mesh:
        """A mesh with axes ("data", "z", "y", "x") over the first devices of `devices`, by default
        of `jax.devices()`, in their order.

        Raises:
          ValueError: there are too few.
        """
        devices = jax.devices() if devices is None else devices
        if len(devices) < self.ranks:
            raise ValueError(f"jflux: {self} takes {self.ranks} devices, there are {len(devices)}")
        shape = self.sizes[::-1]
        array = np.array(devices[: self.ranks], dtype=object).reshape(shape)
        return Mesh(array, AXES[::-1], axis_types=(axis_type,) * len(AXES))

    def __str__(self) -> str:
        return "x".join(map(str, self.sizes))
