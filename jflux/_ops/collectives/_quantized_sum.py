"""A sum over ranks whose data travel in 8 bits, in plain `lax`: what the kernel's bits are.

x is flattened, and padded with zeros to whole blocks of 128. Of N ranks each owns a shard of
S = 128 ceil(ceil(n / N) / 128) elements, and the last shards may be short or empty:

    1. A rank quantises each block of the others' shards, and sends values and scales to the owners.
    2. The owner adds all parts of its shard in rank order, in float32: ``value * scale`` of the
       others, and its own part as it is.
    3. It quantises the sums, again by blocks, and sends them to all ranks.
    4. All ranks, the owner too, take ``value * scale``: so they have the same bits.

Products are rounded before they are added: no multiply-add is fused.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._call.derivatives import differentiated
from ..._ranks import meshes
from .. import _epilogue, _lax, _scaled, _wire
from .._collective import Collective
from .._scaled import BLOCK, Scaled
from .._two_level import sum_in_order


def quantized_sum(x: jax.Array, ranks: Any, wire: str) -> jax.Array:
    """The sum of all ranks' x that travels in this format, in float32, not rounded to x's type.

    Args:
      ranks: mesh axes, or a `Subgroups` of them.
    """
    names, groups = meshes.axes_and_groups(ranks)
    of_x = jax.typeof(x)
    same_over = frozenset(names if groups is None else ())
    manual = of_x.manual_axis_type.update(varying=of_x.manual_axis_type.varying - same_over)
    result = of_x.update(dtype=np.dtype(np.float32), weak_type=False, manual_axis_type=manual)
    # Blocks are of the flattened x, and types do not say how that is split over Explicit axes.
    unsharded = meshes.unsharded_inside(lambda x: [_sum_of_blocks(x, ranks, wire)], [result])
    return unsharded(x)[0]


def _sum_of_blocks(x: jax.Array, ranks: Any, wire: str) -> jax.Array:
    names, groups = meshes.axes_and_groups(ranks)
    world = lax.axis_size(names) if groups is None else len(groups[0])
    if x.size == 0:
        return Collective("all_reduce").lax(x.astype(jnp.float32), ranks)
    form, shard = _wire.format_of(wire), _wire.shard_size(x.size, world)
    # XLA may leave out the cast that made x.
    flat = lax.optimization_barrier(x).astype(jnp.float32).ravel()
    padded = jnp.pad(flat, (0, world * shard - x.size))
    shards = padded.reshape(world, shard // BLOCK, BLOCK)

    sent: Scaled = form.quantize(shards)
    parts = Collective("all_to_all", 0, 0).lax(sent, ranks).dequantize()
    owned: Scaled = form.quantize(sum_of_parts(shards, parts, ranks))
    send = functools.partial(_gathered, ranks=ranks)
    everyones = Scaled(_scaled.sent_values(owned.values, send), send(owned.scale))
    y = lax.optimization_barrier(everyones.dequantize())
    return y.ravel()[: x.size].reshape(x.shape)


def sum_of_parts(own: jax.Array, parts: jax.Array, ranks: Any) -> jax.Array:
    """The sum of what came from each rank [N, ...] in rank order, where this rank's part is that of
    `own` [N, ...], which was not quantised."""
    ranks_in_order = jnp.arange(len(own), dtype=jnp.int32)
    is_own = (ranks_in_order == place(ranks)).reshape(-1, *[1] * (own.ndim - 1))
    # Without the barrier XLA may fuse products and sums.
    return sum_in_order(lax.optimization_barrier(jnp.where(is_own, own, parts)), 0)


def place(ranks: Any) -> jax.Array:
    """Of this rank in its group."""
    names, groups = meshes.axes_and_groups(ranks)
    at = lax.axis_index(names)
    if groups is None:
        return at
    places = np.argsort(np.ravel(groups)) % len(groups[0])
    return jnp.asarray(places.astype(np.int32))[at]


def _gathered(x: jax.Array, ranks: Any) -> jax.Array:
    """All ranks' x along the first dimension. Where they are all ranks of the axes, its type says
    that it is the same on all of them."""
    names, groups = meshes.axes_and_groups(ranks)
    if groups is not None or not meshes.tracks_vma(names):
        return Collective("all_gather", concat=0).lax(x, ranks)
    return _lax.all_gather(x, names, tiled=True, to="invarying")


def rounded(y: jax.Array, dtype: Any, residual: Sequence[jax.Array]) -> jax.Array:
    """A sum in float32, and a residual if there is one, in this type: rounded once if the residual
    has it too."""
    if all(a.dtype == dtype for a in residual):
        return _epilogue.add(y, residual).astype(dtype)
    return _epilogue.add(y.astype(dtype), residual)


# ---- With derivatives ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Sum:
    """A sum over ranks, and how its data travel, and those of its derivatives."""

    ranks: tuple[Any, ...]
    wire: str | None
    grad_wire: str | None

    def of_derivative(self) -> _Sum:
        return dataclasses.replace(self, wire=self.grad_wire)


def reference(
    x: jax.Array,
    ranks: tuple[Any, ...],
    wire: str | None,
    grad_wire: str | None,
    residual: Sequence[jax.Array],
) -> jax.Array:
    """A sum with a residual, if there is one, in x's type. The derivatives are those of an exact
    sum, in the format `grad_wire`."""
    (y,) = _differentiable(_Sum(ranks, wire, grad_wire), x)
    if wire is None:
        return _epilogue.add(y.astype(x.dtype), residual)
    return rounded(y, x.dtype, residual)


def _apply(params: _Sum, x: jax.Array) -> tuple[jax.Array]:
    if params.wire is None:
        return (Collective("all_reduce").lax(x, params.ranks).astype(jnp.float32),)
    return (quantized_sum(x, params.ranks, params.wire),)


def _tangents(kept: Any, tangents: Sequence[Any], params: _Sum) -> Sequence[jax.Array]:
    return _apply(params.of_derivative(), *tangents)


def _backward(kept: Any, cotangents: Any, wanted: Any, params: _Sum) -> Sequence[jax.Array]:
    (ct,), dtype = cotangents, wanted[0].dtype
    ct = ct.astype(dtype)
    if meshes.tracked(params.ranks) and not meshes.has_subgroups(params.ranks):
        return (ct,)  # the same on all ranks, each of which had a part
    return (_differentiable(params.of_derivative(), ct)[0].astype(dtype),)


_differentiable = differentiated(
    _apply,
    kept=lambda operands, params: (),
    tangents=_tangents,
    backward=_backward,
    axes=lambda params: params.ranks,
)
