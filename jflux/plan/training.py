"""How a model is trained, and what of it a GPU keeps in memory."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import NamedTuple

import numpy as np

from .equations import Axes, Value, swap
from .model import Layer, Model


@dataclasses.dataclass(frozen=True)
class Training:
    """What decides about memory, and how often weights are gathered. As in the paper: bf16 and
    fp32 mixed, Adam, activation checkpointing (section VI-A), a batch at once.

    Attributes:
      checkpoint: a block keeps its input only, and runs forward again for the backward pass.
      cache_gathered: all gathered weights are kept for the backward pass (section IV-D), not one
        layer's at a time.
      microbatches: the batch goes through in so many parts. Weights are gathered, and gradients
        along z scattered, for each.
      weight_bytes, gradient_bytes, activation_bytes: of an element, also on the links.
      optimizer_bytes: of a weight: fp32 master weight and Adam's two moments.
    """

    checkpoint: bool = True
    cache_gathered: bool = False
    microbatches: int = 1
    weight_bytes: int = 2
    gradient_bytes: int = 2
    activation_bytes: int = 2
    optimizer_bytes: int = 12

    def __post_init__(self) -> None:
        if not isinstance(self.microbatches, int) or self.microbatches < 1:
            raise ValueError(f"jflux: microbatches={self.microbatches!r} must be a positive int")


PAPER = Training()


class Memory(NamedTuple):
    """Bytes per GPU.

    `gathered`: weights along z while they are used, and one layer's gradient before it is
    scattered. `activations`: what is kept for the backward pass and, under checkpointing, what the
    block at work has. Attention scores, norms, dropout masks, biases, and what libraries take, are
    not counted.
    """

    weights: Value
    gradients: Value
    optimizer: Value
    gathered: Value
    activations: Value

    def total(self) -> Value:
        """Of all parts."""
        return sum(self[1:], self[0])


def memory(model: Model, grid: Axes, training: Training) -> Memory:
    """Bytes per GPU of a model on a grid, or on many: numbers or arrays for each axis."""
    plane = grid.x * grid.y
    tensor = plane * grid.z
    largest = max(layer.weights for layer in model.layers)
    kept = model.weights if training.cache_gathered else largest
    gathered = (training.weight_bytes * kept + training.gradient_bytes * largest) / plane
    return Memory(
        weights=training.weight_bytes * model.weights / tensor,
        gradients=training.gradient_bytes * model.weights / tensor,
        optimizer=training.optimizer_bytes * model.weights / tensor,
        gathered=np.where(grid.z > 1, gathered, 0.0),
        activations=_activations(model, grid, training),
    )


def _activations(model: Model, grid: Axes, training: Training) -> Value:
    per_block = model.checkpoint if training.checkpoint else 1
    layers = [layer.anonymous() for layer in model.layers]
    blocks = Counter(tuple(layers[at : at + per_block]) for at in range(0, len(layers), per_block))
    samples = model.batch / grid.data / training.microbatches
    kept: Value = 0.0
    working: Value = 0.0
    for block, count in blocks.items():
        sizes = [_in_and_out(layer, grid, samples, training) for layer in block]
        inner = sum(a + b for a, b in sizes)
        if training.checkpoint:
            kept = kept + count * sizes[0][0]
            working = np.maximum(working, inner)
        else:
            kept = kept + count * inner
    return kept + working


def _in_and_out(
    layer: Layer, grid: Axes, samples: Value, training: Training
) -> tuple[Value, Value]:
    """Bytes of a rank's input and output: rows over z, the input's columns over y, the output's
    over x."""
    grid = swap(grid) if layer.transposed else grid
    bytes_each = training.activation_bytes * samples
    into = 0.0 if layer.lookup else bytes_each * layer.input_rows * layer.k / (grid.z * grid.y)
    return into, bytes_each * layer.rows * layer.n / (grid.z * grid.x)
