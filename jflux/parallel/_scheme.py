"""Which mesh axes a layer is split over, and which communication is hidden."""

from __future__ import annotations

import dataclasses
import functools
import math
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, xla
from jax.sharding import PartitionSpec

from .. import reference
from .._ranks import meshes
from .._ranks.meshes import AxisName


@dataclasses.dataclass(frozen=True)
class Overlap:
    """The four optimisations of arXiv 2305.13525, section IV. None changes a result.

    They say what may run at the same time; what then does is up to XLA's scheduler, which starts
    collectives asynchronously on GPUs. Turned off, the program has a dependence that forbids it.
    Under ``shard_map(check_vma=False)`` JAX differentiates the layers by itself, and only
    `all_gather` has an effect.

    Attributes:
      all_reduce: the sum of an input's gradient runs under the product for the weight's (IV-A).
      reduce_scatter: nothing waits for the sum of a weight's gradient before the backward pass has
        ended (IV-B); in :func:`scan`, before the layer before this one has.
      all_gather: in :func:`scan`, the next layer's weights are gathered while this one runs (IV-C),
        forward and backward. Elsewhere XLA may gather them early as it is.
      cached_layers: in :func:`scan` with ``remat``, for how many layers, from the last, the
        gathered weights are kept for the backward pass, and not gathered again (IV-D). Outside of
        it, see :func:`save_gathered`.
    """

    all_reduce: bool = True
    reduce_scatter: bool = True
    all_gather: bool = True
    cached_layers: int = 0

    def __post_init__(self) -> None:
        if self.cached_layers < 0:
            raise ValueError(f"jflux.parallel: {self.cached_layers=} must not be negative")


#: Everything one after the other, as a baseline.
NO_OVERLAP = Overlap(all_reduce=False, reduce_scatter=False, all_gather=False)


@dataclasses.dataclass(frozen=True)
class Scheme:
    """The mesh axes of a grid, as one layer uses them (arXiv 2305.13525, algorithm 1).

    A weight W [k, n] is split by rows over y, by columns over x, and each of these blocks by rows
    over z. The input is split by rows over data and z, and by columns over y; the output by columns
    over x. So a layer's output fits the input of a layer whose x and y are exchanged: of two layers
    in a row one takes `scheme`, the other `scheme.transposed`.

    Attributes:
      x, y, z, data: a mesh axis, a tuple of them (the first one major), or None for one rank.
      overlap: which communication is hidden behind what.
      fused: products and their sums are jflux's ops. Otherwise they are XLA's.
    """

    x: AxisName | None = "x"
    y: AxisName | None = "y"
    z: AxisName | None = "z"
    data: AxisName | None = "data"
    overlap: Overlap = Overlap()
    fused: bool = True

    def __post_init__(self) -> None:
        names = self.names("data", "z", "y", "x")
        if len(set(names)) < len(names):
            raise ValueError(f"jflux.parallel: the axes of a scheme must differ, got {names}")

    @property
    def transposed(self) -> Scheme:
        """What the next layer takes: x and y have changed places."""
        return dataclasses.replace(self, x=self.y, y=self.x)

    def names(self, *roles: str) -> tuple[Any, ...]:
        """The mesh axes of these roles, in this order."""
        axes = (getattr(self, role) for role in roles)
        return tuple(name for axis in axes if axis is not None for name in meshes.as_tuple(axis))

    def size(self, *roles: str) -> int:
        """How many ranks there are along these axes; inside ``jax.shard_map``."""
        return math.prod(lax.axis_size(name) for name in self.names(*roles))

    def weight_spec(self, ndim: int = 2) -> PartitionSpec:
        """Of a Dense's [k, n], a convolution's [..., k, n], or an embedding's [vocabulary, n]."""
        entries = [None] * (ndim - 2)
        return PartitionSpec(*entries, self._entry("y", "z"), self._entry("x"))

    def bias_spec(self) -> PartitionSpec:
        """Of a bias [n], and of whatever else there is one of for each output feature."""
        return PartitionSpec(self._entry("x"))

    def scale_spec(self) -> PartitionSpec:
        """Of a norm's scale [k], and of whatever else there is one of for each input feature."""
        return PartitionSpec(self._entry("y"))

    def rows_spec(self) -> PartitionSpec:
        """Of what has a batch dimension and no features, such as tokens."""
        return PartitionSpec(self._entry("data", "z"))

    def input_spec(self, ndim: int = 2) -> PartitionSpec:
        """Of a layer's input [batch, ..., k]."""
        middle = [None] * (ndim - 2)
        return PartitionSpec(self._entry("data", "z"), *middle, self._entry("y"))

    def output_spec(self, ndim: int = 2) -> PartitionSpec:
        """Of a layer's output [batch, ..., n]."""
        return self.transposed.input_spec(ndim)

    def _entry(self, *roles: str) -> Any:
        names = self.names(*roles)
        return names[0] if len(names) == 1 else names or None

    @property
    def ops(self) -> ModuleType:
        import jflux

        return jflux if self.fused else reference


DEFAULT = Scheme()


def all_reduce(scheme: Scheme, x: jax.Array, role: str) -> jax.Array:
    """The sum of all ranks' x along x, y or z."""
    names = scheme.names(role)
    return scheme.ops.all_reduce(x, axis_name=names) if names else x


#: `lax.optimization_barrier`, but each result varies over the axes that its operand varies over. In
#: jax 0.10 all results vary over all of them.
_barrier = Primitive("jflux_barrier")
_barrier.multiple_results = True
_barrier.def_abstract_eval(lambda *avals: list(avals))
_barrier.def_impl(functools.partial(xla.apply_primitive, _barrier))
mlir.register_lowering(
    _barrier, mlir.lower_fun(lambda *xs: lax.optimization_barrier(xs), multiple_results=True)
)
ad.deflinear2(_barrier, lambda cts, *_: _barrier.bind(*map(ad.instantiate_zeros, cts)))
batching.primitive_batchers[_barrier] = lambda xs, dims: (_barrier.bind(*xs), list(dims))


def together(tree: Any) -> Any:
    """The same arrays, none of which XLA uses before it has all of them."""
    leaves, structure = jax.tree.flatten(tree)
    inexact = [i for i, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    for i, leaf in zip(inexact, _barrier.bind(*(leaves[i] for i in inexact)), strict=True):
        leaves[i] = leaf
    return jax.tree.unflatten(structure, leaves)


def tracks_vma(scheme: Scheme) -> bool:
    """Whether ``shard_map(check_vma=True)`` knows what varies over which axis."""
    names = scheme.names("data", "z", "y", "x")
    return bool(names) and meshes.tracks_vma(names)
