"""Which grid: all of them, what does not divide or fit refused, the rest by predicted time."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any, overload

import jax
import numpy as np
from jax.sharding import Mesh

from ..parallel import Grid
from . import machine as machines
from . import models, predict
from .equations import Axes, Breakdown
from .machine import Machine
from .model import Model
from .predict import Extensions
from .training import PAPER, Memory, Training
from .training import memory as _memory


def grids(ranks: int) -> np.ndarray:
    """All grids of so many ranks: int64 [grids, 4], columns x, y, z, data, in ascending order.

    Raises:
      ValueError: `ranks` is not positive.
    """
    if ranks < 1:
        raise ValueError(f"jflux: {ranks=} must be positive")
    low = [d for d in range(1, math.isqrt(ranks) + 1) if ranks % d == 0]
    divisors = sorted({*low, *(ranks // d for d in low)})
    of = {d: [e for e in divisors if e <= d and d % e == 0] for d in divisors}
    found = [
        (x, y, z, ranks // (x * y * z))
        for x in divisors
        for y in of[ranks // x]
        for z in of[ranks // (x * y)]
    ]
    return np.array(found, dtype=np.int64)


@dataclasses.dataclass(frozen=True)
class Rule:
    """`amount` of something has to divide by the ranks along some axes together."""

    what: str
    amount: int
    axes: tuple[str, ...]

    def ranks(self, grid: Axes) -> Any:
        """Ranks of the grid along the axes together."""
        product: Any = 1
        for axis in self.axes:
            product = product * getattr(grid, axis)
        return product

    def reason(self, grid: Axes) -> str:
        """Why the grid breaks the rule, in words."""
        along = " * ".join(self.axes)
        return f"{self.what} {self.amount} does not divide by {along} = {self.ranks(grid)}"


def rules(model: Model, training: Training) -> list[Rule]:
    """What has to divide: samples by z and data, a weight's rows by y and z, its columns by x (a
    transposed one's by x and z, and y), and what the model says besides by x."""
    microbatches = training.microbatches
    if model.batch % microbatches:
        raise ValueError(
            f"jflux: the batch {model.batch} does not divide by {microbatches} microbatches"
        )
    samples = "the batch" if microbatches == 1 else "a microbatch"
    found = [Rule(f"{samples} of", model.batch // microbatches, ("z", "data"))]
    found += [Rule(f"{what}:", amount, ("x",)) for what, amount in model.splits_x]
    seen = set()
    for layer in model.layers:
        rows, columns = (("x", "z"), ("y",)) if layer.transposed else (("y", "z"), ("x",))
        for what, amount, axes in (("rows", layer.k, rows), ("columns", layer.n, columns)):
            if (amount, axes) not in seen:
                seen.add((amount, axes))
                name = layer.name or f"[{layer.k}, {layer.n}]"
                found.append(Rule(f"{what} of {name}:", amount, axes))
    return found


@dataclasses.dataclass(frozen=True)
class Plan:
    """A grid, and what the model predicts for it.

    Attributes:
      place: 1 is the fastest.
      grid: ranks along each axis.
      times: seconds of a step's collectives.
      compute: seconds of a step's products, on every grid the same.
      memory: bytes per GPU.
    """

    place: int
    grid: Grid
    times: Breakdown
    compute: float
    memory: Memory

    @property
    def communication(self) -> float:
        """Seconds: what grids are ranked by."""
        return float(self.times.total())

    @property
    def step(self) -> float:
        """Seconds of computation and exposed communication."""
        return self.compute + self.communication

    def mesh(self, devices: Sequence[jax.Device] | None = None) -> Mesh:
        """See :meth:`jflux.parallel.Grid.mesh`."""
        return self.grid.mesh(devices)

    def as_json(self) -> dict[str, Any]:
        """Numbers in seconds and bytes, by name."""
        return {
            "place": self.place,
            "grid": dict(zip(("x", "y", "z", "data"), self.grid.sizes, strict=True)),
            "communication_s": self.communication,
            "compute_s": self.compute,
            "times_s": self.times._asdict(),
            "memory_bytes": {**self.memory._asdict(), "total": self.memory.total()},
        }


class NoGrid(ValueError):
    """No grid divides and fits. The text says what the nearest one lacks."""


@dataclasses.dataclass(frozen=True, eq=False)
class Ranking(Sequence[Plan]):
    """Plans, the fastest first, and the grids that were refused.

    Plans are made when asked for: there may be tens of thousands.
    """

    model: Model
    machine: Machine
    gpus: int
    aware: bool
    extensions: Extensions
    training: Training
    compute: float
    _sizes: np.ndarray  # [grids, 4], those that remain, in their order
    _times: np.ndarray  # [grids, 5]
    _memory: np.ndarray  # [grids, 5]
    _refused: np.ndarray  # [grids, 4]

    @property
    def best(self) -> Plan:
        """The first of the ranking."""
        return self[0]

    @property
    def refusals(self) -> int:
        """How many grids were refused."""
        return len(self._refused)

    def __len__(self) -> int:
        return len(self._sizes)

    @overload
    def __getitem__(self, index: int) -> Plan: ...
    @overload
    def __getitem__(self, index: slice) -> list[Plan]: ...
    def __getitem__(self, index: int | slice) -> Plan | list[Plan]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        at = range(len(self))[index]
        return Plan(
            at + 1,
            Grid(*self._sizes[at].tolist()),
            Breakdown(*self._times[at].tolist()),
            self.compute,
            Memory(*self._memory[at].tolist()),
        )

    def find(self, grid: Grid) -> Plan:
        """The plan of a grid.

        Raises:
          KeyError: it is not among them; :meth:`why_not` may know why.
        """
        at = np.flatnonzero((self._sizes == np.array(grid.sizes)).all(axis=1))
        if not len(at):
            raise KeyError(f"jflux: {grid} is not in the ranking")
        return self[int(at[0])]

    def why_not(self, grid: Grid) -> str | None:
        """Why a grid was refused, or None."""
        if grid.ranks != self.gpus:
            return f"{grid} has {grid.ranks} ranks, not {self.gpus}"
        return _why_not(self.model, self.machine, Axes(*grid.sizes), self.training)

    def refused(self) -> Iterator[tuple[Grid, str]]:
        """The grids that were refused, and why."""
        for sizes in self._refused.tolist():
            grid = Grid(*sizes)
            yield grid, self.why_not(grid) or ""

    def communication(self) -> np.ndarray:
        """Seconds of each plan, float64 [plans]."""
        return self._times.sum(axis=1)


def rank(
    model: Model | str,
    gpus: int,
    machine: Machine | str = "perlmutter",
    *,
    aware: bool = True,
    extensions: Extensions = predict.EXACT,
    training: Training = PAPER,
    fits: bool = True,
) -> Ranking:
    """Ranks the grids of so many GPUs by the time that a step's communication is predicted to take.

    Grids with equal times (to nine digits) are ordered by memory, then by data, z, y and x.

    Args:
      model: or its name (:data:`jflux.plan.MODELS`).
      gpus: how many ranks a grid has.
      machine: or its name (:data:`jflux.plan.MACHINES`).
      aware: the placement-aware model; otherwise the placement-agnostic one.
      extensions: what to count that the paper does not.
      training: precision, checkpointing, microbatches.
      fits: False keeps grids that need more memory than a GPU has.

    Raises:
      NoGrid: no grid divides and fits.
      ValueError: an unknown name, a machine without bandwidth between nodes for more than one.
    """
    model = models.named(model) if isinstance(model, str) else model
    machine = machines.named(machine) if isinstance(machine, str) else machine
    if gpus > machine.gpus_per_node and not machine.inter:
        raise ValueError(
            f"jflux: {gpus} GPUs are several nodes of {machine.gpus_per_node}, and machine "
            f"{machine.name!r} has no bandwidth between nodes (inter)"
        )
    sizes = grids(gpus)
    grid = Axes(*sizes.T)
    keep = np.ones(len(sizes), bool)
    for rule in rules(model, training):
        keep &= rule.amount % rule.ranks(grid) == 0
    if fits:
        keep &= _memory(model, grid, training).total() <= machine.memory
    if not keep.any():
        raise NoGrid(_nearest(model, machine, sizes, training))
    refused, sizes = sizes[~keep], sizes[keep]
    grid = Axes(*sizes.T)
    times = predict.communication(
        model, machine, grid, aware=aware, extensions=extensions, training=training
    )
    # Zeros of axes that do nothing are plain numbers.
    columns = np.stack(np.broadcast_arrays(*times, np.zeros(len(sizes)))[:-1], axis=1)
    used = np.stack(np.broadcast_arrays(*_memory(model, grid, training), grid.x)[:-1], axis=1)
    order = np.lexsort((grid.x, grid.y, grid.z, grid.data, _round(used), _round(columns)))
    return Ranking(
        model=model, machine=machine, gpus=gpus, aware=aware, extensions=extensions,
        training=training, compute=predict.compute(model, machine, gpus, training),
        _sizes=sizes[order], _times=columns[order], _memory=used[order], _refused=refused,
    )  # fmt: skip


def _round(parts: np.ndarray) -> np.ndarray:
    """Sums of rows to nine digits, so that what is equal on paper is equal here."""
    total = parts.sum(axis=1)
    unit = 10.0 ** (np.floor(np.log10(np.maximum(total, 1e-300))) - 8)
    return np.where(total > 0, np.round(total / unit) * unit, 0.0)


def _why_not(model: Model, machine: Machine, grid: Axes, training: Training) -> str | None:
    broken = [r for r in rules(model, training) if r.amount % r.ranks(grid)]
    if broken:
        return "; ".join(rule.reason(grid) for rule in broken)
    need = _memory(model, grid, training)
    if need.total() <= machine.memory:
        return None
    terms = ", ".join(f"{name} {float(size) / 1e9:.1f}" for name, size in need._asdict().items())
    return f"it needs {need.total() / 1e9:.1f} GB of {machine.memory / 1e9:.1f} per GPU ({terms})"


def _nearest(model: Model, machine: Machine, sizes: np.ndarray, training: Training) -> str:
    """What a refusal of all grids says: the one that divides and needs the least memory, or the
    one with the fewest things that do not divide."""
    grid = Axes(*sizes.T)
    broken = sum((r.amount % r.ranks(grid) != 0).astype(int) for r in rules(model, training))
    divides = np.flatnonzero(broken == 0)
    if len(divides):
        need = _memory(model, grid, training).total()
        at = divides[np.argmin(need[divides])]
        what = f"{len(divides)} of {len(sizes)} grids divide, and none fits"
    else:
        at = np.argmin(broken)
        what = f"none of {len(sizes)} grids divides"
    nearest = Grid(*sizes[at].tolist())
    reason = _why_not(model, machine, Axes(*nearest.sizes), training)
    need = _memory(model, Axes(*nearest.sizes), training)
    if len(divides) and need.activations > need.total() / 2:
        reason = f"{reason}; more microbatches would need less"
    return (
        f"jflux: no grid of {nearest.ranks} GPUs for {model.name} on "
        f"{machine.name}: {what}. The nearest, {nearest}: {reason}"
    )
