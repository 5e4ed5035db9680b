"""Tensors of a checkpoint, and arrays made of them, of which nothing is read before a part is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

#: A slice without a step of each dimension.
Index = tuple[slice, ...]


@dataclasses.dataclass(frozen=True)
class Lazy:
    """An array that is not there yet.

    Attributes:
      read: makes the part of an index.
    """

    shape: tuple[int, ...]
    read: Callable[[Index], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Source:
    """Where a :class:`Tensor` finds the tensors that it is made of.

    Attributes:
      open: a tensor by its name.
      block: rows and columns for which its scales have one element; 1: it is the tensor itself.
    """

    open: Callable[[str], Lazy]
    block: int = 1


Places = Mapping[str, str]


class Tensor:
    """A tensor of a checkpoint by its name, as :func:`jflux.nn.load` takes it, or an array that is
    made of several.

    Methods describe arrays; nothing is read before `load` reads a rank's part::

        q, k, v = (Tensor(f"model.layers.{{i}}.self_attn.{x}_proj.weight") for x in "qkv")
        qkv = Tensor.concatenate([q, k, v]).T  # [d, (h + 2 g) c] of [h c, d] and [g c, d] twice
        query = q.T.split(1, h)                # [d, h, c]
        up = Tensor("model.layers.{i}.mlp.experts.{e}.up_proj.weight").T.stack(e=64)  # [64, d, f]
        gate = Tensor("model.layers.{i}.mlp.gate_up_proj.weight")[:f].T

    `{i}` stands for what it is in the path of the leaf, `{e}` for what `stack` counts. Dimensions
    are counted from 0.
    """

    def __init__(self, name: str) -> None:
        self._bind: Callable[[Source, Places], Lazy] = lambda source, places: source.open(
            name.format_map(places)
        )

    @staticmethod
    def concatenate(tensors: Sequence[Tensor | str], axis: int = 0) -> Tensor:
        """One after the other along a dimension."""
        given = [as_tensor(one) for one in tensors]
        return _made(lambda s, p: _concatenate([one._bind(s, p) for one in given], axis))

    @property
    def T(self) -> Tensor:
        """All dimensions the other way round."""
        return self.transpose()

    def transpose(self, *axes: int) -> Tensor:
        """As `numpy.transpose`."""
        return _made(lambda s, p: _transpose(self._bind(s, p), axes))

    def split(self, axis: int, count: int) -> Tensor:
        """A dimension of n as two, [count, n / count]."""
        return _made(lambda s, p: _split(self._bind(s, p), axis, count))

    def merge(self, axis: int) -> Tensor:
        """A dimension and the next one as one."""
        return _made(lambda s, p: _merge(self._bind(s, p), axis))

    def repeat(self, axis: int, count: int) -> Tensor:
        """As `numpy.repeat`: heads of keys and values that several ranks have."""
        return _made(lambda s, p: _repeat(self._bind(s, p), axis, count))

    def stack(self, **count: int) -> Tensor:
        """Along a new first dimension so many tensors, in whose names ``{e}`` is 0, 1, ... for
        ``stack(e=count)``: experts, or layers that are scanned."""
        ((name, n),) = count.items()
        return _made(lambda s, p: _stack([self._bind(s, {**p, name: str(i)}) for i in range(n)]))

    def within(self, prefix: str) -> Tensor:
        """Of tensors whose names begin so."""

        def bind(source: Source, places: Places) -> Lazy:
            inner = Source(lambda name: source.open(prefix + name), source.block)
            return self._bind(inner, places)

        return _made(bind)

    def apply(self, f: Callable[[np.ndarray], np.ndarray]) -> Tensor:
        """``f`` of the array, elementwise: it gets parts."""
        return _made(lambda s, p: _apply(self._bind(s, p), f))

    def __getitem__(self, rows: slice) -> Tensor:
        """A part along the first dimension."""
        return _made(lambda s, p: _part(self._bind(s, p), rows, s.block))


def as_tensor(given: Tensor | str) -> Tensor:
    return Tensor(given) if isinstance(given, str) else given


def bind(tensor: Tensor, source: Source, places: Places) -> Lazy:
    """Raises ValueError if the tensors of the source do not fit each other."""
    return tensor._bind(source, places)


def of_array(array: Any) -> Lazy:
    """Of a NumPy array, or of a tensor that a file has opened."""
    shape = array.shape if hasattr(array, "shape") else array.get_shape()
    return Lazy(tuple(shape), lambda index: np.asarray(array[index] if index else array[...]))


def dequantized(values: Lazy, scale: Lazy, block: int) -> Lazy:
    """Of values [m, n] and their scales, one for each square of `block`: in float32."""

    def read(index: Index) -> np.ndarray:
        blocks = tuple(slice(i.start // block, -(-i.stop // block)) for i in index)
        places = [
            np.arange(i.start, i.stop) // block - b.start
            for i, b in zip(index, blocks, strict=True)
        ]
        scales = scale.read(blocks).astype(np.float32)
        return values.read(index).astype(np.float32) * scales[np.ix_(*places)]

    return Lazy(values.shape, read)


def _made(bind: Callable[[Source, Places], Lazy]) -> Tensor:
    made = Tensor("")
    made._bind = bind
    return made


def _with(index: Index, axis: int, *parts: slice) -> Index:
    """The index with other parts in the place of one of a dimension."""
    return (*index[:axis], *parts, *index[axis + 1 :])


def _concatenate(given: Sequence[Lazy], axis: int) -> Lazy:
    others = {_without(one.shape, axis) for one in given}
    if len(others) > 1:
        shapes = ", ".join(str(one.shape) for one in given)
        raise ValueError(f"arrays {shapes} cannot be concatenated along dimension {axis}")
    starts = np.cumsum([0, *(one.shape[axis] for one in given)]).tolist()

    def read(index: Index) -> np.ndarray:
        at, found = index[axis], []
        for one, start, stop in zip(given, starts, starts[1:], strict=False):
            first, last = max(at.start, start), min(at.stop, stop)
            if first < last:
                found.append(one.read(_with(index, axis, slice(first - start, last - start))))
        return np.concatenate(found, axis)

    first = given[0].shape
    return Lazy((*first[:axis], starts[-1], *first[axis + 1 :]), read)


def _without(shape: Sequence[int], axis: int) -> tuple[int, ...]:
    return (*shape[:axis], *shape[axis + 1 :])


def _transpose(of: Lazy, axes: Sequence[int]) -> Lazy:
    order = tuple(axes) or tuple(reversed(range(len(of.shape))))
    if sorted(order) != list(range(len(of.shape))):
        raise ValueError(f"transpose{order} of an array of shape {of.shape}")

    def read(index: Index) -> np.ndarray:
        before = tuple(index[order.index(i)] for i in range(len(order)))
        return of.read(before).transpose(order)

    return Lazy(tuple(of.shape[i] for i in order), read)


def _split(of: Lazy, axis: int, count: int) -> Lazy:
    size = of.shape[axis]
    if size % count:
        raise ValueError(f"dimension {axis} of an array of shape {of.shape} as {count} equal parts")
    rest = size // count

    def read(index: Index) -> np.ndarray:
        outer, inner = index[axis : axis + 2]
        before = (*index[:axis], slice(outer.start * rest, outer.stop * rest), *index[axis + 2 :])
        read = of.read(before)
        parts = (*read.shape[:axis], outer.stop - outer.start, rest, *read.shape[axis + 1 :])
        return read.reshape(parts)[(slice(None),) * (axis + 1) + (inner,)]

    return Lazy((*of.shape[:axis], count, rest, *of.shape[axis + 1 :]), read)


def _merge(of: Lazy, axis: int) -> Lazy:
    count, rest = of.shape[axis : axis + 2]

    def read(index: Index) -> np.ndarray:
        at = index[axis]
        outer = slice(at.start // rest, -(-at.stop // rest))
        read = of.read(_with(index, axis, outer, slice(0, rest)))
        read = read.reshape(*read.shape[:axis], -1, *read.shape[axis + 2 :])
        first = at.start - outer.start * rest
        return read[(slice(None),) * axis + (slice(first, first + at.stop - at.start),)]

    return Lazy((*of.shape[:axis], count * rest, *of.shape[axis + 2 :]), read)


def _repeat(of: Lazy, axis: int, count: int) -> Lazy:
    def read(index: Index) -> np.ndarray:
        at = index[axis]
        outer = slice(at.start // count, -(-at.stop // count))
        read = np.repeat(of.read(_with(index, axis, outer)), count, axis)
        first = at.start - outer.start * count
        return read[(slice(None),) * axis + (slice(first, first + at.stop - at.start),)]

    return Lazy((*of.shape[:axis], of.shape[axis] * count, *of.shape[axis + 1 :]), read)


def _stack(given: Sequence[Lazy]) -> Lazy:
    if len({one.shape for one in given}) != 1:
        raise ValueError(f"arrays {', '.join(str(one.shape) for one in given)} cannot be stacked")

    def read(index: Index) -> np.ndarray:
        return np.stack([one.read(index[1:]) for one in given[index[0]]])

    return Lazy((len(given), *given[0].shape), read)


def _apply(of: Lazy, f: Callable[[np.ndarray], np.ndarray]) -> Lazy:
    return Lazy(of.shape, lambda index: f(of.read(index)))


def _part(of: Lazy, rows: slice, block: int) -> Lazy:
    first, last, step = rows.indices(of.shape[0] * block)
    if step != 1 or first % block or last % block:
        raise ValueError(f"a part {rows} of an array of shape {of.shape}")
    first, last = first // block, last // block

    def read(index: Index) -> np.ndarray:
        return of.read(_with(index, 0, slice(index[0].start + first, index[0].stop + first)))

    return Lazy((max(last - first, 0), *of.shape[1:]), read)
