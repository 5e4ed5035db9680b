"""What the planner knows of a network: its layers, in the order in which they run."""

from __future__ import annotations

import dataclasses
from collections import Counter


@dataclasses.dataclass(frozen=True)
class Layer:
    """A product of activations [rows, k] with a weight [k, n], or a convolution.

    Attributes:
      k, n: rows and columns of the weight; input and output workspaces of a convolution (section
        III-B, "Extension to convolution layers").
      rows: output rows of one sample: positions of a sequence, pixels of an image.
      transposed: k is split over x and n over y, not k over y and n over x.
      rows_in: input rows of a sample, if a convolution has other ones than `rows`.
      taps: positions of a convolution's window: the weight has taps * k * n elements.
      lookup: an embedding: a row of the table for each input. It has no product, and no gradient
        of its input.
      name: for people.
    """

    k: int
    n: int
    rows: int = 1
    transposed: bool = False
    rows_in: int | None = None
    taps: int = 1
    lookup: bool = False
    name: str = ""

    def __post_init__(self) -> None:
        for field in ("k", "n", "rows", "taps"):
            value = getattr(self, field)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"jflux: {field}={value!r} of a layer must be a positive int")

    @property
    def weights(self) -> int:
        """Elements of the weight."""
        return self.taps * self.k * self.n

    @property
    def input_rows(self) -> int:
        """Rows of the input, of one sample."""
        return self.rows if self.rows_in is None else self.rows_in

    @property
    def flops(self) -> int:
        """Floating-point operations of one sample, forward."""
        return 0 if self.lookup else 2 * self.rows * self.weights

    def anonymous(self) -> Layer:
        """The layer without its name: equal for layers of equal sizes."""
        return dataclasses.replace(self, name="")


@dataclasses.dataclass(frozen=True)
class Model:
    """Layers, and the batch that they are trained with.

    Attributes:
      layers: in the order in which they run.
      batch: samples (sequences, images) of one step, over all ranks.
      name: for people.
      splits_x: what has to divide by the ranks along x besides the layers' sizes, each with its
        name, such as (("heads", 56),).
      checkpoint: under activation checkpointing the input of every so many layers is kept: the
        layers of a transformer block.
    """

    layers: tuple[Layer, ...]
    batch: int
    name: str = "model"
    splits_x: tuple[tuple[str, int], ...] = ()
    checkpoint: int = 1

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError(f"jflux: {self.name} has no layers")
        if not isinstance(self.batch, int) or self.batch < 1:
            raise ValueError(f"jflux: batch={self.batch!r} must be a positive int")
        if self.checkpoint < 1:
            raise ValueError(f"jflux: checkpoint={self.checkpoint!r} must be positive")

    @property
    def weights(self) -> int:
        """Elements of all weights; biases and norms are left out."""
        return sum(layer.weights for layer in self.layers)

    @property
    def flops(self) -> int:
        """Floating-point operations of a step's products: forward, and twice that backward."""
        return 3 * self.batch * sum(layer.flops for layer in self.layers)

    def counts(self) -> Counter[Layer]:
        """The different layers, and how often each occurs."""
        return Counter(layer.anonymous() for layer in self.layers)

    def with_batch(self, batch: int) -> Model:
        """The same model for another global batch, in samples."""
        return dataclasses.replace(self, batch=batch)

    def describe(self) -> str:
        """Name, layers, weights and batch in one line."""
        kinds = f"{len(self.layers)} layers, {self.weights / 1e9:.2f} G weights"
        return f"{self.name}: {kinds}, batch {self.batch}"


def alternate(layers: list[Layer]) -> tuple[Layer, ...]:
    """The layers with every second one transposed, the first one not: the output of one is then
    split as the next one's input is (section III-B, "Parallelizing an entire network")."""
    return tuple(dataclasses.replace(a, transposed=bool(i % 2)) for i, a in enumerate(layers))
