"""Experts' products whose operands, or results, are split over ranks: two steps each, a collective
of jflux's and a grouped product."""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax.typing import DTypeLike

from .._mesh import AxisName
from .._ops.all_reduce import all_reduce
from .._ops.exchange import all_gather, reduce_scatter
from .._ops.grouped_matmul import grouped_matmul
from ._routing import Routing, permute, unpermute


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

    per rank of N along `axis_name`, inside ``jax.shard_map``: :func:`jflux.all_gather`,
    :func:`permute`, :func:`jflux.grouped_matmul`. There is no kernel that does it in one.

    Its gradients are :func:`grouped_matmul_reduce_scatter` with ones as weights, and the weight
    gradient of a grouped product.

    Args:
      x: this rank's tokens.
      w: [E, K, F/N], or [E, F/N, K] with `transpose_rhs`; or two such, with `gated`.
      routing: of all ranks' tokens, in rank order; the same on all ranks.
      transpose_rhs, preferred_element_type, activation, gated: as in :func:`jflux.grouped_matmul`.

    Returns:
      [T k, F/N]; rows past ``routing.offsets[-1]`` are zeros.

    Raises:
      ValueError, TypeError: operands that do not fit, when the call is traced.
    """
    tokens = all_gather(x, axis_name=axis_name, axis=0, tiled=True)
    return grouped_matmul(
        permute(tokens, routing), w, routing.counts, transpose_rhs=transpose_rhs,
        preferred_element_type=preferred_element_type, activation=activation, gated=gated,
    )  # fmt: skip


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

    per rank of N along `axis_name`, inside ``jax.shard_map``: :func:`jflux.grouped_matmul`,
    :func:`unpermute`, whose sums are in float32 and in the order of the k choices, and
    :func:`jflux.reduce_scatter`. There is no kernel that does it in one.

    Args:
      h: rows in the order of experts, as :func:`all_gather_grouped_matmul` gives them.
      w: [E, F/N, H], or [E, H, F/N] with `transpose_rhs`.
      routing: of all ranks' tokens, the same on all ranks.
      weights: of the tokens' choices, the same on all ranks; None: ones.
      transpose_rhs, preferred_element_type: as in :func:`jflux.grouped_matmul`.

    Returns:
      [T/N, H]: this rank's tokens.

    Raises:
      ValueError, TypeError: operands that do not fit, when the call is traced.
    """
    y = _weighted(h, w, routing, weights, transpose_rhs, preferred_element_type)
    return reduce_scatter(y, axis_name=axis_name, scatter_dimension=0, tiled=True)


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
