"""all_gather, all_to_all and reduce_scatter: wrappers, gradients, and how they lower. Kernels:
cc/ops/exchange."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import ad

from .. import _ffi, _heap, _jflux, _mesh, reference
from .._mesh import AxisName
from . import _product

#: Up to so many bytes that reach a rank they travel in packets: for an all-to-all of more than two
#: ranks, half of that. Up to MOST_BYTES they travel in chunks, and above it is `lax`
#: (docs/design/0006).
MOST_BYTES_IN_PACKETS = 1 << 20
MOST_BYTES = 64 << 20

_forced: list[bool] = []


@contextlib.contextmanager
def force(chunked: bool) -> Iterator[None]:
    """Calls that are lowered inside travel in chunks, or in packets, whatever their size. What JAX
    has lowered before it does not lower again."""
    _forced.append(chunked)
    try:
        yield
    finally:
        _forced.pop()


_LESS_THAN_BYTES = ("int2", "int4", "uint2", "uint4", "float4")


@dataclasses.dataclass(frozen=True)
class Params:
    """A call, less its operand. In the primitives pieces are always parts of a dimension (lax's
    ``tiled=True``)."""

    axis_names: tuple[Any, ...]
    world: int
    split: int | None  # the dimension of x that pieces are parts of; None: x is one piece
    concat: int | None  # likewise of y
    same: bool = False  # whether y does not vary over the axes, to types; it has no gradient then

    def y_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        y = list(shape)
        if self.split is not None:
            y[self.split] //= self.world
        if self.concat is not None:
            y[self.concat] *= self.world
        return tuple(y)


def all_gather(x: Any, *, axis_name: AxisName, axis: int = 0, tiled: bool = False) -> Any:
    """``lax.all_gather(x, axis_name, axis=axis, tiled=tiled)``, with the latency of one exchange
    where x is small.

    Inside ``jax.shard_map``, per rank along `axis_name`: all ranks' x, in rank order, in packets as
    :func:`jflux.all_reduce` sends them. Where more than 1 MiB reaches a rank data travel in chunks
    that signals announce; above 64 MiB, or where that takes more than a third of the heap, it is
    `lax`'s. Differentiable like `lax`'s: the gradient is reduce-scattered.

    Args:
      x: an array of any shape and type, or a pytree of such, each of which is one call.
      axis_name: a mesh axis, or a tuple of them.
      axis: the dimension of the result that the ranks make.
      tiled: whether that is x's own, N times as long, and not a new one of size N.

    Returns:
      [.., N, ..], or x's shape with dimension `axis` N times as long. It varies over `axis_name`
      as far as ``check_vma=True`` can tell, as lax.all_gather's does.

    Raises:
      ValueError, TypeError: for a dimension that x has not or that is no int, when the call is
        traced; ValueError on GPUs, when it is lowered, for one that the symmetric heap has no room
        for.
      NameError: outside ``shard_map``.
      NotImplementedError: when it is lowered with ``jflux.config.strict``, for one that no kernel
        takes.
      jax.errors.JaxRuntimeError: a peer did not come within the deadline (see :func:`jflux.init`).
    """

    plain = _product.is_plain("all_gather", axis_name)

    def one(x: jax.Array) -> jax.Array:
        at = _dimension("all_gather", "axis", axis, x.ndim + (not tiled))
        if plain:
            return reference.all_gather(x, axis_name=axis_name, axis=at, tiled=tiled)
        return _bind("all_gather", x if tiled else jnp.expand_dims(x, at), axis_name, None, at)

    return _each(one, x)


def reduce_scatter(
    x: Any, *, axis_name: AxisName, scatter_dimension: int = 0, tiled: bool = False
) -> Any:
    """``lax.psum_scatter(x, axis_name, scatter_dimension=..., tiled=...)``, with the latency of one
    exchange where x is small.

    Inside ``jax.shard_map``, per rank along `axis_name`: the rank's piece of the sum of all ranks'
    x, in float32 (float64 for float64), in rank order, rounded once. Sizes, errors and gradients
    are as for :func:`jflux.all_gather`, which is its transpose.

    Args:
      x: an array of float16, bfloat16, float32 or float64 (other types take the reference), or a
        pytree of such, each of which is one call.
      axis_name: a mesh axis, or a tuple of them.
      scatter_dimension: the dimension of x that the pieces are parts of.
      tiled: whether N divides that dimension, and not is it: then the result has no such one.

    Returns:
      x's shape with that dimension divided by N, or without it.

    Raises:
      As :func:`jflux.all_gather`; ValueError also for pieces that the ranks do not divide.
    """

    plain = _product.is_plain("reduce_scatter", axis_name)

    def one(x: jax.Array) -> jax.Array:
        at = _dimension("reduce_scatter", "scatter_dimension", scatter_dimension, x.ndim)
        _check_pieces("reduce_scatter", x, at, _mesh.axis_size(axis_name), tiled)
        if plain:
            return reference.reduce_scatter(
                x, axis_name=axis_name, scatter_dimension=at, tiled=tiled
            )
        y = _bind("reduce_scatter", x, axis_name, at, None)
        return y if tiled else jnp.squeeze(y, at)

    return _each(one, x)


def all_to_all(
    x: Any, *, axis_name: AxisName, split_axis: int, concat_axis: int, tiled: bool = False
) -> Any:
    """``lax.all_to_all(x, axis_name, split_axis, concat_axis, tiled=tiled)``, with the latency of
    one exchange where x is small.

    Inside ``jax.shard_map``, per rank along `axis_name`: x is split into N pieces along
    `split_axis`, piece r goes to rank r, and what has come is put together along `concat_axis` in
    rank order. Sizes, errors and gradients are as for :func:`jflux.all_gather`, but between more
    than two ranks packets go up to 2 MiB; it is its own transpose, with the axes swapped.

    Args:
      x: an array of any type, or a pytree of such, each of which is one call.
      axis_name: a mesh axis, or a tuple of them.
      split_axis: the dimension of x that the pieces are parts of.
      concat_axis: the dimension of the result that they make.
      tiled: whether N divides the one dimension and multiplies the other. If not, x[split_axis] has
        size N and goes, and `concat_axis` is a new dimension of size N.

    Returns:
      x's shape with N pieces moved from the one dimension to the other. It varies over `axis_name`.

    Raises:
      As :func:`jflux.reduce_scatter`.
    """

    plain = _product.is_plain("all_to_all", axis_name)

    def by_tiles(x: jax.Array, split: int, concat: int) -> jax.Array:
        return _bind("all_to_all", x, axis_name, split, concat)

    def one(x: jax.Array) -> jax.Array:
        split = _dimension("all_to_all", "split_axis", split_axis, x.ndim)
        concat = _dimension("all_to_all", "concat_axis", concat_axis, x.ndim)
        _check_pieces("all_to_all", x, split, _mesh.axis_size(axis_name), tiled)
        if plain:
            return reference.all_to_all(
                x, axis_name=axis_name, split_axis=split, concat_axis=concat, tiled=tiled
            )
        if tiled:
            return by_tiles(x, split, concat)
        return reference.untiled(by_tiles, x, split, concat)

    return _each(one, x)


def _each(one: Callable[[jax.Array], jax.Array], x: Any) -> Any:
    return jax.tree.map(lambda array: one(jnp.asarray(array)), x)


def _dimension(op: str, name: str, dimension: int, ndim: int) -> int:
    """Not negative."""
    if not isinstance(dimension, int | np.integer):
        raise TypeError(f"jflux.{op}: {name} must be an int, got {dimension!r}")
    if not -ndim <= dimension < ndim:
        raise ValueError(f"jflux.{op}: {name}={dimension} of {ndim} dimensions")
    return dimension % ndim


def _check_pieces(op: str, x: Any, dimension: int, world: int, tiled: bool) -> None:
    size = x.shape[dimension]
    if size % world if tiled else size != world:
        expected = f"a multiple of the {world} ranks" if tiled else f"the {world} ranks, untiled"
        raise ValueError(
            f"jflux.{op}: x has shape {tuple(x.shape)}, and its dimension {dimension} must be "
            f"{expected}"
        )


def _bind(
    op: str, x: jax.Array, axis_name: AxisName, split: int | None, concat: int | None
) -> jax.Array:
    (x,) = _mesh.vary_together(axis_name, x)
    return bind(op, x, _mesh.as_tuple(axis_name), _mesh.axis_size(axis_name), split, concat)


def bind(
    op: str,
    x: jax.Array,
    axis_names: tuple[Any, ...],
    world: int,
    split: int | None,
    concat: int | None,
) -> jax.Array:
    """The op with ``tiled=True``, of an x that varies over the axes already; also in a lowering,
    where axes are not bound any more. split, concat: as `Params` has them."""
    (y,) = _primitives[op].bind(x, params=Params(axis_names, world, split, concat))
    return y


def gather_for_all(x: jax.Array, axis_names: tuple[Any, ...]) -> jax.Array:
    """All ranks' x, one after the other along the first dimension; to types too it is the same on
    all of them. It has no gradient."""
    params = Params(axis_names, _mesh.axis_size(axis_names), None, 0, same=True)
    (x,) = _mesh.vary_together(axis_names, x)
    (y,) = _primitives["all_gather"].bind(x, params=params)
    return y


def _in_bytes(x: Any, params: Params) -> dict[str, np.int64]:
    """How one piece lies in x and in y: [outer][world][inner bytes] (cc/core/units.h)."""
    piece = list(x.shape)
    if params.split is not None:
        piece[params.split] //= params.world
    sides = {}
    for name, dimension in (("x", params.split), ("y", params.concat)):
        at = 0 if dimension is None else dimension
        sides[f"{name}_outer"] = np.int64(math.prod(piece[:at]))
        sides[f"{name}_inner"] = np.int64(math.prod(piece[at:]) * x.dtype.itemsize)
    return sides


def _result(x, params):
    return [(params.y_shape(x.shape), x.dtype)]


def _bytes_that_reach_a_rank(x: Any, params: Params) -> int:
    pieces = x.size * x.dtype.itemsize
    return pieces * params.world if params.split is None else pieces


def _is_chunked(x: Any, params: Params) -> bool:
    if _forced:
        return _forced[-1]
    to_all = params.split is not None and params.concat is not None
    most_in_packets = MOST_BYTES_IN_PACKETS // (2 if to_all and params.world > 2 else 1)
    return _bytes_that_reach_a_rank(x, params) > most_in_packets


def _lax_is_faster(x, params, platform, mesh):
    if _forced or not _is_chunked(x, params):
        return False
    # Other calls should not find the heap full of what `lax` can move as well.
    most_of_the_heap = _heap.heap_bytes(platform) // 3
    return (
        _bytes_that_reach_a_rank(x, params) > MOST_BYTES
        or _workspace_bytes(x, params) > most_of_the_heap
    )


def _workspace_bytes(x: Any, params: Params) -> int:
    piece = x.size * x.dtype.itemsize // (1 if params.split is None else params.world)
    return _jflux.exchange_workspace_bytes(params.world, piece, _is_chunked(x, params))


def _not_fused(x, params, platform, sums):
    if params.world > _product.MAX_RANKS:
        return f"{params.world} ranks, the kernels take up to {_product.MAX_RANKS}"
    if x.size * x.dtype.itemsize >= 1 << 31:
        return "x has 2 GiB or more, the kernels take less"
    if sums and x.dtype not in _product.CPU_DTYPES:
        return f"{x.dtype} operands, the kernels take {', '.join(_heap._DTYPES)}"
    if x.dtype.name.startswith(_LESS_THAN_BYTES):
        return f"{x.dtype} operands, the kernels take whole bytes"
    return None


def _launch(x, params, platform, mesh, groups, op):
    if _ffi.lowers_for_here(mesh):
        _heap.reserve(platform, groups, op, lambda: _workspace_bytes(x, params))
    return {"chunked": _is_chunked(x, params), **_in_bytes(x, params)}


def _batch(primitive, operands, dims, *, params):
    x = jnp.moveaxis(operands[0], dims[0], 0)
    split, concat = (None if d is None else d + 1 for d in (params.split, params.concat))
    params = dataclasses.replace(params, split=split, concat=concat)
    return primitive.bind(x, params=params), [0]


def _transpose(cotangents, x, *, params, transposed):
    assert not params.same
    (ct,) = cotangents
    if type(ct) is ad.Zero:
        return [ad.Zero(x.aval)]
    params = dataclasses.replace(params, split=params.concat, concat=params.split)
    return _primitives[transposed].bind(ct, params=params)


def _make(op: str, transposed: str, plain: Callable[[Any, Params], jax.Array]) -> Any:
    primitive = _ffi.make_primitive(
        op,
        abstract_eval=_result,
        reference=lambda x, params: [plain(x, params)],
        not_fused=functools.partial(_not_fused, sums=op == "reduce_scatter"),
        lax_is_faster=_lax_is_faster,
        launch=functools.partial(_launch, op=op),
        batch=_batch,
        same_over=lambda params: params.axis_names if params.same else (),
    )
    ad.deflinear2(primitive, functools.partial(_transpose, transposed=transposed))
    return primitive


_primitives = {
    "all_gather": _make(
        "all_gather",
        "reduce_scatter",
        lambda x, p: lax.all_gather(x, p.axis_names, axis=p.concat, tiled=True),
    ),
    "reduce_scatter": _make(
        "reduce_scatter",
        "all_gather",
        lambda x, p: lax.psum_scatter(x, p.axis_names, scatter_dimension=p.split, tiled=True),
    ),
    "all_to_all": _make(
        "all_to_all",
        "all_to_all",
        lambda x, p: lax.all_to_all(x, p.axis_names, p.split, p.concat, tiled=True),
    ),
}
