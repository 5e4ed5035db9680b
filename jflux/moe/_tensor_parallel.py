"""Experts' products whose operands, or results, are split over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from .. import _mesh
from .._mesh import AxisName
from .._ops import _product
from .._ops import grouped_matmul as _grouped
from .._ops._lax import several
from .._ops.all_reduce import all_reduce
from .._ops.grouped_matmul import grouped_matmul
from . import _gathered, _scattered
from ._routing import Routing, unpermute


def all_gather_grouped_matmul(
    x: jax.Array,
    w: jax.Array | Sequence[jax.Array],
    routing: Routing,
    *,
    axis_name: AxisName,
    transpose_rhs: bool = False,
    preferred_element_type: DTypeLike | None = None,
    activation: str | None = None,
    gated: bool = False,
) -> jax.Array:
    """The rows of all ranks, in the order of experts, times this rank's columns of their experts'
    weights (Flux, arXiv 2406.06858, section 4; its MoE layer 0)::

        x [T/N, K]   w [E, K, F/N]   routing of T tokens   ->   [T k, F/N]

    per rank of N along `axis_name`, inside ``jax.shard_map``. It means :func:`jflux.all_gather`,
    :func:`permute`, :func:`jflux.grouped_matmul`.

    CPUs and GPUs have one kernel that does all three: each rank sends its tokens to its peers,
    tiles of own tokens come first, and no array of permuted rows is made. GPUs take it for float16
    and bfloat16, K and F/N multiples of 8, up to 2048 columns of all weights, and where experts
    have many rows (docs/experiments/0039): else all tiles would wait for all tokens.
    `jflux.explain` says which, and why.

    Differentiable in forward and reverse mode, any number of times. Its gradients are
    :func:`grouped_matmul_reduce_scatter` with ones as weights, and the weight gradient of a grouped
    product, which gathers x again. What an activation is applied to is kept under the name
    ``"jflux_preactivation"``.

    Args:
      x: this rank's tokens.
      w: [E, K, F/N], or [E, F/N, K] with `transpose_rhs`; or two such, with `gated`.
      routing: of all ranks' tokens, in rank order. The same on all ranks, whose weights are
        columns of the same experts. (The kernel waits for tokens and not for experts, so ranks may
        also have routings of the same shape for experts of their own.)
      transpose_rhs, preferred_element_type, activation, gated: as in :func:`jflux.grouped_matmul`.

    Returns:
      [T k, F/N]; rows past ``routing.offsets[-1]`` are zeros.

    Raises:
      ValueError, TypeError: operands that do not fit, when the call is traced.
      NameError: outside ``shard_map``.
      jax.errors.JaxRuntimeError: a peer did not come within the deadline (see :func:`jflux.init`),
        or a routing of one's own making has offsets that decrease or exceed T k.
    """
    return gathered(
        x, several(w), routing, axis_name=axis_name, transpose_rhs=transpose_rhs,
        preferred_element_type=preferred_element_type, activation=activation, gated=gated,
    )  # fmt: skip


def gathered(
    x: jax.Array,
    ws: Sequence[Any],
    routing: Routing,
    *,
    axis_name: AxisName,
    transpose_rhs: bool = False,
    preferred_element_type: DTypeLike | None = None,
    activation: str | None = None,
    gated: bool = False,
    owners: int = 1,
) -> jax.Array:
    """:func:`all_gather_grouped_matmul`, perhaps of experts that are split over `owners` ranks."""
    names, world = _mesh.as_tuple(axis_name), _mesh.axis_size(axis_name)
    out = _grouped.check(
        x, ws, routing.counts, transpose_rhs, preferred_element_type, activation, gated
    )
    tokens = routing.destination.shape[0]
    if world * x.shape[0] != tokens:
        raise ValueError(
            f"jflux.moe.{_gathered.OP}: x {x.shape} has {x.shape[0]} tokens on each of {world} "
            f"ranks, and the routing has slots {routing.destination.shape}: it must be of "
            f"{world * x.shape[0]} tokens"
        )
    common = jnp.result_type(x.dtype, *(one.dtype for one in ws))
    x, *ws = (a.astype(common) for a in (x, *ws))
    params = _gathered.Params(names, world, transpose_rhs, out, activation, gated, owners=owners)
    x, *rest = _mesh.vary_together(names, x, *ws, *routing)
    ws, routing = rest[: len(ws)], Routing(*rest[len(ws) :])
    if 0 in (tokens, *routing.destination.shape, *x.shape, *ws[0].shape):
        n = ws[0].shape[1 if transpose_rhs else 2]
        return _product.zeros((routing.source.shape[0], n), out, x)
    if not _mesh.is_manual(names):  # vmap's axis, which has no ranks
        return _gathered.two_steps(x, ws, routing, params)[0]
    return _gathered.bind(x, ws, routing, params)


def grouped_matmul_reduce_scatter(
    h: jax.Array,
    w: jax.Array,
    routing: Routing,
    weights: jax.Array | None = None,
    *,
    axis_name: AxisName,
    transpose_rhs: bool = False,
    preferred_element_type: DTypeLike | None = None,
) -> jax.Array:
    """The weighted sum of each token's experts, of which each rank has a part, scattered over the
    ranks (Flux, arXiv 2406.06858, section 4; its MoE layer 1)::

        h [T k, F/N]   w [E, F/N, H]   weights [T, k]   ->   [T/N, H]

    per rank of N along `axis_name`, inside ``jax.shard_map``. It means
    :func:`jflux.grouped_matmul`, :func:`unpermute`, whose sums are in float32 and in the order of
    the k choices, and :func:`jflux.reduce_scatter`. The bits are the same on every run.

    CPUs and GPUs have one kernel that does all three: tiles of peers' tokens come first, and each
    token is summed and sent when its experts' rows are there. GPUs take it for float16 and
    bfloat16, F/N and H multiples of 8, F/N from 1024 on, and where experts have many rows
    (docs/experiments/0042): else all sums would wait for all tiles. `jflux.explain` says which, and
    why.

    Differentiable in forward and reverse mode, any number of times. It is the gradient of
    :func:`all_gather_grouped_matmul`; its own takes one all-gather of the cotangent, and two
    grouped products.

    Args:
      h: rows in the order of experts, as :func:`all_gather_grouped_matmul` gives them.
      w: [E, F/N, H], or [E, H, F/N] with `transpose_rhs`.
      routing: as :func:`all_gather_grouped_matmul` takes it.
      weights: of the tokens' choices; None: ones.
      transpose_rhs, preferred_element_type: as in :func:`jflux.grouped_matmul`.

    Returns:
      [T/N, H]: this rank's tokens.

    Raises:
      ValueError, TypeError: operands that do not fit, when the call is traced.
      NameError: outside ``shard_map``.
      jax.errors.JaxRuntimeError: a peer did not come within the deadline (see :func:`jflux.init`),
        or a routing of one's own making has offsets that decrease or exceed T k.
    """
    return scattered(
        h, w, routing, weights, axis_name=axis_name, transpose_rhs=transpose_rhs,
        preferred_element_type=preferred_element_type,
    )  # fmt: skip


def scattered(
    h: jax.Array,
    w: jax.Array,
    routing: Routing,
    weights: jax.Array | None,
    *,
    axis_name: AxisName,
    transpose_rhs: bool = False,
    preferred_element_type: DTypeLike | None = None,
    owners: int = 1,
) -> jax.Array:
    """:func:`grouped_matmul_reduce_scatter`, perhaps of experts that are split over `owners`
    ranks."""
    names, world = _mesh.as_tuple(axis_name), _mesh.axis_size(axis_name)
    out = _grouped.check(
        h, (w,), routing.counts, transpose_rhs, preferred_element_type, None, False
    )
    slots = routing.destination.shape
    if h.shape[0] != routing.destination.size or slots[0] % world:
        raise ValueError(
            f"jflux.moe.{_scattered.OP}: h {h.shape} has {h.shape[0]} rows, and the routing has "
            f"slots {slots}: it must have a row for each, and a multiple of {world} tokens"
        )
    if weights is not None and weights.shape != slots:
        raise ValueError(
            f"jflux.moe.{_scattered.OP}: weights have shape {weights.shape}, and the routing has "
            f"slots {slots}"
        )
    common = jnp.result_type(h.dtype, w.dtype)
    params = _scattered.Params(names, world, transpose_rhs, out, owners)
    if weights is None:
        weights = jnp.ones(slots, jnp.float32)
    _product.warn_if_same(f"moe.{_scattered.OP}", names, "h", h, w, weights)
    h, w, weights, *rest = _mesh.vary_together(
        names, h.astype(common), w.astype(common), weights, *routing
    )
    routing = Routing(*rest)
    n = w.shape[1 if transpose_rhs else 2]
    if 0 in (*slots, *h.shape, *w.shape):
        return _product.zeros((slots[0] // world, n), out, h)
    if not _mesh.is_manual(names):  # vmap's axis, which has no ranks
        return _scattered.two_steps(h, w, weights, routing, params)
    return _scattered.bind(h, w, weights, routing, params)


def grouped_matmul_all_reduce(
    h: jax.Array,
    w: jax.Array,
    routing: Routing,
    weights: jax.Array | None = None,
    *,
    axis_name: AxisName,
    transpose_rhs: bool = False,
    preferred_element_type: DTypeLike | None = None,
) -> jax.Array:
    """:func:`grouped_matmul_reduce_scatter` with the result whole on every rank, [T, H], for few
    tokens (decoding); the arguments are the same."""
    y = _weighted(h, w, routing, weights, transpose_rhs, preferred_element_type)
    return all_reduce(y, axis_name=axis_name)


def _weighted(
    h: jax.Array,
    w: jax.Array,
    routing: Routing,
    weights: jax.Array | None,
    transpose_rhs: bool,
    preferred_element_type: DTypeLike | None,
) -> jax.Array:
    y = grouped_matmul(
        h, w, routing.counts, transpose_rhs=transpose_rhs,
        preferred_element_type=preferred_element_type,
    )  # fmt: skip
    return unpermute(y, routing, weights)
