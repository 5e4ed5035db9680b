"""Collectives as plain data, and what they mean, in numpy: the judge of every test."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Literal, assert_never

import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.lib.array_utils import normalize_axis_index

from .._ranks.meshes import axes_and_groups
from . import _lax, _scaled

#: (dimension, ndim) -> the dimension, not negative; raises for one that there is not.
axis = normalize_axis_index

Kind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]


@dataclasses.dataclass(frozen=True)
class Collective:
    """One exchange between the ranks of a group, as `lax` names them (``tiled=True``).

    Attributes:
      kind: which.
      split: the dimension whose shards go to different ranks; None: all ranks get all.
      concat: the dimension in which shards are put together in rank order; None: they are summed,
        or there is one.
    """

    kind: Kind
    split: int | None = None
    concat: int | None = None

    def transposed(self) -> Collective:
        """The one that a cotangent takes."""
        kinds: dict[str, Kind] = {"all_gather": "reduce_scatter", "reduce_scatter": "all_gather"}
        return Collective(kinds.get(self.kind, self.kind), self.concat, self.split)

    def shape(self, shape: Sequence[int], world: int) -> tuple[int, ...]:
        """The shape of each rank's result, for operands of the given shape."""
        result = list(shape)
        if self.split is not None:
            result[self.split] //= world
        if self.concat is not None:
            result[self.concat] *= world
        return tuple(result)

    def exact(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The ranks' results in NumPy. `arrays` has each rank's operand."""
        world = len(arrays)
        if self.kind == "all_gather":
            return [np.concatenate(arrays, self.concat or 0)] * world
        if self.kind == "all_to_all":
            sent = [np.split(a, world, self.split or 0) for a in arrays]
            return [np.concatenate([s[r] for s in sent], self.concat or 0) for r in range(world)]
        total = sum(arrays[1:], arrays[0])
        if self.kind == "all_reduce":
            return [total] * world
        if self.kind == "reduce_scatter":
            return np.split(total, world, self.split or 0)
        assert_never(self.kind)

    def lax(self, x: Any, axis_name: Any) -> Any:
        """The collective in plain `lax`. `axis_name` may be a `Subgroups` too."""
        names, groups = axes_and_groups(axis_name)
        if groups is not None and len(groups[0]) == 1:
            return x
        world = lax.axis_size(names) if groups is None else len(groups[0])
        if isinstance(x, _scaled.Scaled):
            send = functools.partial(self.lax, axis_name=axis_name)
            return _scaled.exchange(x, world, self.split, self.concat, send)
        if self.is_of_nothing(x):
            return self.of_nothing(x, world)
        over: dict[str, Any] = {"axis_name": names, "axis_index_groups": groups}
        if self.kind == "all_gather":
            return _lax.all_gather(x, axis=self.concat or 0, tiled=True, **over)
        if self.kind == "all_to_all":
            split, concat = self.split or 0, self.concat or 0
            return _lax.all_to_all(x, split_axis=split, concat_axis=concat, tiled=True, **over)
        if self.kind == "all_reduce":
            return _lax.psum(x, names) if groups is None else _sum_in_groups(x, over)
        if self.kind == "reduce_scatter":
            return _lax.psum_scatter(x, scatter_dimension=self.split or 0, tiled=True, **over)
        assert_never(self.kind)

    def is_of_nothing(self, x: Any) -> bool:
        """Whether x is empty and its dimensions change. `lax` refuses shards without elements."""
        return 0 in x.shape and (self.split is not None or self.concat is not None)

    def of_nothing(self, x: Any, world: int) -> Any:
        """The result for an empty x, which is empty too."""
        return x.reshape(self.shape(x.shape, world))

    def sums(self) -> bool:
        """Whether ranks' data are added."""
        return self.kind in ("reduce_scatter", "all_reduce")


def _sum_in_groups(x: Any, over: dict[str, Any]) -> Any:
    """An all_reduce: `lax.psum` takes no groups under ``check_vma=True``."""
    world = len(over["axis_index_groups"][0])
    flat = jnp.pad(x.ravel(), (0, -x.size % world))
    shards = _lax.psum_scatter(flat, tiled=True, **over)
    return _lax.all_gather(shards, tiled=True, **over)[: x.size].reshape(x.shape)
