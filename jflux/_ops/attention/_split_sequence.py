"""Attention over a split sequence: how keys and values travel, and where their gradients are
summed. What one rank computes is in _passes.py."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..._ranks import meshes
from ..._ranks.meshes import AxisName
from ..collectives.exchange import all_gather, reduce_scatter
from ._blockwise import Positions, Scores
from .merge_attention import merge_attention
from .sequence_layouts import Layout, own_positions


@dataclasses.dataclass(frozen=True)
class Params:
    """The parameters of a call, which are the same on all ranks.

    Attributes:
      axis_name, ranks, scores, layout: as given.
      ring: whether keys go around a ring; otherwise they are gathered.
      return_lse: whether the log-sum-exp is a result.
      precision: JAX's default for products where the call was made. Gradients are traced later,
        where another one may hold.
      gather, scatter: :func:`jflux.all_gather` and :func:`jflux.reduce_scatter`, or their
        references.
    """

    axis_name: AxisName | None
    ranks: int
    scores: Scores
    layout: Layout
    ring: bool = False
    return_lse: bool = False
    precision: str | None = None
    gather: Callable[..., jax.Array] = all_gather
    scatter: Callable[..., jax.Array] = reduce_scatter

    def positions(self, rank: Any, length: int, segments: jax.Array | None) -> Positions:
        """The positions of a rank."""
        return Positions(own_positions(rank, length, self.ranks, self.layout), segments)

    @property
    def rank(self) -> Any:
        return meshes.rank_and_size(self.axis_name)[0]


#: Of a forward pass (o, log-sum-exp), of a backward pass the gradients of q, k and v; with a bias,
#: (the gradient of q, that of the bias) in place of the first.
Results = tuple[Any, ...]
#: (parameters, q, k, v, segments, *rest) -> the results of a pass. Of a backward pass, `rest` are
#: o, the log-sum-exp, and the cotangents of both.
Pass = Callable[..., Results]


# ---- Gathered ------------------------------------------------------------------------------------


def gather_keys(params: Params, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    """All ranks' keys and values, in the order of ranks."""
    gather = functools.partial(params.gather, axis_name=params.axis_name, axis=1, tiled=True)
    return gather(k), gather(v)  # as one array they would be copied twice


def key_positions(params: Params, length: int, segments: jax.Array | None) -> Positions:
    """The positions of all ranks, in the order of ranks."""
    if params.ranks == 1:
        return params.positions(jnp.int32(0), length, segments)
    if segments is not None:
        segments = params.gather(segments, axis_name=params.axis_name, axis=1, tiled=True)
    # Not a vmap over ranks: inside a vmap with spmd_axis_name, JAX would let the constants of an
    # inner vmap vary over that axis.
    ranks = (jnp.int32(rank) for rank in range(params.ranks))
    positions = jnp.concatenate([params.positions(rank, length, None).positions for rank in ranks])
    return Positions(positions, segments)


def gathered_keys(
    params: Params, k: jax.Array, v: jax.Array, segments: jax.Array | None
) -> tuple[jax.Array, jax.Array, Positions]:
    keys = key_positions(params, k.shape[1], segments)
    return (k, v, keys) if params.ranks == 1 else (*gather_keys(params, k, v), keys)


def scattered(params: Params, *gradients: jax.Array) -> list[jax.Array]:
    """The sums over ranks of the gradients of all keys, on the keys' owners."""
    if params.ranks == 1:
        return list(gradients)
    return [
        params.scatter(d, axis_name=params.axis_name, scatter_dimension=1, tiled=True)
        for d in gradients
    ]


# ---- Around a ring -------------------------------------------------------------------------------


def _pass_on(params: Params, arrays: Any) -> Any:
    """Sends arrays to the next rank, and returns those of the rank before. XLA has one transfer
    under way at a time, and computing beside it hides one large transfer. So keys and values travel
    as one array, and so do their gradients."""
    sizes = meshes.sizes_in_mesh_order(params.axis_name)
    ring = [(rank, (rank + 1) % params.ranks) for rank in range(params.ranks)]
    pairs = meshes.renumbered(ring, meshes.as_tuple(params.axis_name), sizes)
    names = tuple(name for name, _ in sizes)
    return jax.tree.map(lambda a: lax.ppermute(a, names, pairs), arrays)


#: Keys and values, and their segments, that a rank holds.
Held = tuple[Any, Any]


#: (parameters, rank, q, positions of queries, step, the keys that the rank holds then, *rest) ->
#: the results of a pass over these keys.
AtStep = Callable[..., Results]


def go_around(
    at_step: AtStep,
    params: Params,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """The forward pass around a ring. A rank attends to the keys and values that it holds while
    these travel on to the next rank."""
    queries = params.positions(rank := params.rank, q.shape[1], segments)
    attend = functools.partial(at_step, params, rank, q, queries)

    def go_on(state: Any, step: Any) -> tuple[Any, None]:
        held, o, lse = state
        coming = _pass_on(params, held)
        own_o, own_lse = attend(step, held)
        return (coming, *merge_attention([o, own_o], [lse, own_lse])), None

    coming = _pass_on(params, (jnp.stack([k, v]), segments))
    o, lse = attend(0, ((k, v), segments))
    held = coming
    if params.ranks > 2:  # without jit, JAX has no scan of no steps
        steps = jnp.arange(1, params.ranks - 1, dtype=jnp.int32)
        (held, o, lse), _ = lax.scan(go_on, (coming, o, lse), steps)
    last_o, last_lse = attend(jnp.int32(params.ranks - 1), held)
    return merge_attention([o, last_o], [lse, last_lse])


def go_around_backward(
    at_step: AtStep,
    params: Params,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: Any,
    *rest: jax.Array,
) -> Results:
    """The backward pass around a ring. The gradients of keys travel with the keys, and each rank
    adds its part to them. A sum begins with the part of the keys' owner, and ends with the part of
    the rank before the owner."""
    queries = params.positions(rank := params.rank, q.shape[1], segments)

    def differentiate(step: Any, held: Held) -> Any:
        return at_step(params, rank, q, queries, step, held, *rest)

    def go_on(state: Any, step: Any) -> tuple[Any, None]:
        held, sums, dq = state
        coming = _pass_on(params, held)
        # XLA puts the products beside the last transfer, so the larger of the two comes last.
        sums, _ = lax.optimization_barrier((sums, coming))
        sums = _pass_on(params, sums)
        own_dq, *own = differentiate(step, held)
        return (coming, sums + jnp.stack(own), jax.tree.map(jnp.add, dq, own_dq)), None

    coming = _pass_on(params, (jnp.stack([k, v]), segments))
    dq, *own = differentiate(0, ((k, v), segments))
    held, sums = coming, jnp.stack(own)
    if params.ranks > 2:
        steps = jnp.arange(1, params.ranks - 1, dtype=jnp.int32)
        (held, sums, dq), _ = lax.scan(go_on, (coming, sums, dq), steps)
    sums = _pass_on(params, sums)
    own_dq, *own = differentiate(jnp.int32(params.ranks - 1), held)
    dk, dv = _pass_on(params, (sums + jnp.stack(own)).astype(k.dtype))
    return jax.tree.map(jnp.add, dq, own_dq), dk, dv
