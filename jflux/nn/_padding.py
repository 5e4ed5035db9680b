"""Sequences that the ranks do not divide, of global arrays.

A layer pads them with zeros to a multiple of the ranks, and cuts its result. Products, biases and
activations work on each position alone, so the added positions change no other one; their
gradients are zero, since the cut drops them. Attention cuts queries, keys and values, which are
whole on every rank, so that no position attends to an added one.

Inside ``shard_map`` every rank's part is equally long, and there is nothing to pad.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from .._ranks import global_arrays, meshes
from .._ranks.meshes import AxisName


@dataclasses.dataclass(frozen=True)
class Padding:
    """Positions to add to a sequence.

    Attributes:
      dimension: which one the sequence is.
      length: before they are added.
      added: how many.
    """

    dimension: int = 0
    length: int = 0
    added: int = 0

    def pad(self, array: jax.Array | None) -> Any:
        """An array of so long a sequence, with the positions (None stays None)."""
        if array is None or not self.added:
            return array
        widths = [(0, self.added if i == self.dimension else 0) for i in range(array.ndim)]
        return jnp.pad(array, widths)

    def cut(self, arrays: Any) -> Any:
        """Arrays (a pytree) of the padded sequence, without the positions."""
        return jax.tree.map(self._cut, arrays) if self.added else arrays

    def _cut(self, array: jax.Array) -> jax.Array:
        sharding = getattr(jax.typeof(array), "sharding", None)
        if sharding is not None and AxisType.Explicit in sharding.mesh.axis_types:
            # No type says that an array is split unevenly.
            whole = [None if i == self.dimension else e for i, e in enumerate(sharding.spec)]
            spec = NamedSharding(sharding.mesh, PartitionSpec(*whole))
            array = jax.sharding.reshard(array, spec)
        return lax.slice_in_dim(array, 0, self.length, axis=self.dimension)


def for_ranks(
    x: jax.Array,
    dimension: int,
    *weights: Any,
    axis_name: AxisName,
    sequence_parallel: bool = True,
    mesh: Mesh | AbstractMesh | None = None,
    x_spec: PartitionSpec | None = None,
    **_: Any,
) -> Padding:
    """What x lacks for the ranks to divide its sequence.

    Args:
      dimension: which one the sequence is, counted from the end if negative.
      weights: arrays that may tell the mesh too.
      axis_name, sequence_parallel, mesh, x_spec: the layer's options.
    """
    dimension += x.ndim if dimension < 0 else 0
    if dimension < 0 or not sequence_parallel or meshes.is_bound(axis_name):
        return Padding()
    devices = global_arrays._mesh_for(mesh, x, *jax.tree.leaves(weights)).shape
    names = meshes.as_tuple(axis_name)
    spec = global_arrays._with_axis(global_arrays._spec(x, x_spec), x.ndim, dimension, names)
    parts = math.prod(devices.get(name, 1) for name in meshes.as_tuple(spec[dimension]))
    length = x.shape[dimension]
    return Padding(dimension, length, -length % parts)
