"""The two ends of a language model, over a vocabulary that is split over the ranks."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jax.typing import DTypeLike

from .._ops._epilogue import sum_dtype
from .._ops.collectives.all_reduce import all_reduce
from .._ops.collectives.exchange import reduce_scatter
from .._ranks import global_arrays, meshes
from .._ranks.meshes import AxisName
from . import _padding


@meshes.axis_by_name
def embed(
    tokens: jax.Array,
    table: jax.Array,
    *,
    axis_name: AxisName,
    sequence_parallel: bool = True,
    dtype: DTypeLike | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    x_spec: PartitionSpec | None = None,
) -> jax.Array:
    """``table[tokens]``, with the table split by rows: each rank looks up what it has, and the sum
    over the ranks, of which all terms but one are zero, is scattered by sequence position.

    Per rank of N along `axis_name`, inside ``jax.shard_map``::

        tokens int [..., s]   table [v/N, d]   ->   [..., s/N, d]

    Outside ``shard_map`` it takes global arrays, and wraps itself in one. A sequence that the ranks
    do not divide is padded there, and the result is cut.

    Args:
      tokens: the same on all ranks of the axis. Those outside of the vocabulary give zeros.
      sequence_parallel: False: every rank gets the whole result, [..., s, d].
      dtype: of the result; by default the table's.
      mesh: for global arrays; by default the ambient mesh (`jax.set_mesh`), or an array's own.
      x_spec: for global arrays: how the tokens are sharded, such as ``P("data")``; by default what
        their type says (explicit sharding), or not at all.
    """
    body = functools.partial(
        _embed, axis_name=axis_name, sequence_parallel=sequence_parallel, dtype=dtype
    )
    if meshes.is_bound(axis_name):
        return body(tokens, table)
    names, last = meshes.as_tuple(axis_name), tokens.ndim
    padding = _padding.for_ranks(
        tokens, -1, table, axis_name=axis_name, sequence_parallel=sequence_parallel, mesh=mesh,
        x_spec=x_spec,
    )  # fmt: skip
    whole = global_arrays._with_axis(global_arrays._spec(tokens, x_spec), last + 1, last, names)
    rows = PartitionSpec(*whole[:last], None)
    y = global_arrays.with_specs(
        body, "nn.embed", {"tokens": padding.pad(tokens), "table": table},
        {"tokens": PartitionSpec(*whole[:last]), "table": PartitionSpec(names, None)},
        axis_name=axis_name, mesh=mesh,
        out_specs=global_arrays._with_axis(rows, last + 1, last - 1, names)
        if sequence_parallel
        else rows,
    )  # fmt: skip
    return padding.cut(y)


def _embed(
    tokens: jax.Array,
    table: jax.Array,
    *,
    axis_name: AxisName,
    sequence_parallel: bool,
    dtype: DTypeLike | None,
) -> jax.Array:
    own = tokens - lax.axis_index(meshes.as_tuple(axis_name)) * len(table)
    here = (own >= 0) & (own < len(table))
    rows = table[jnp.clip(own, 0, len(table) - 1)].astype(dtype or table.dtype)
    rows = jnp.where(here[..., None], rows, 0)
    if sequence_parallel:
        return reduce_scatter(
            rows, axis_name=axis_name, scatter_dimension=tokens.ndim - 1, tiled=True
        )
    return all_reduce(rows, axis_name=axis_name)


@meshes.axis_by_name
def cross_entropy(
    logits: jax.Array,
    targets: jax.Array,
    *,
    axis_name: AxisName,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    ignore_index: int | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    x_spec: PartitionSpec | None = None,
) -> jax.Array:
    """``logsumexp(logits) - logits[target]`` of each position, in nats, over a vocabulary that is
    split over the ranks. The logits are never gathered: ranks exchange the maximum, the sum of
    exponentials and the target's logit, three numbers for each position.

    Per rank of N along `axis_name`, inside ``jax.shard_map``::

        logits [..., v/N]   targets int [...]   ->   [...]

    is the same on all ranks. Outside ``shard_map`` it takes global arrays, and wraps itself in one.
    Computed in float32 (float64 for float64). The gradient needs the logits and two numbers for
    each position. It is that of `lax`'s collectives: under ``check_vma=True`` it needs no
    communication; under ``check_vma=False`` it is summed over the ranks, each of which is taken to
    have a loss of its own.

    Args:
      targets: the same on all ranks of the axis. For one that is not from 0 to v - 1 the loss is
        NaN. A position that is not to count, such as padding, may have any target; leave its loss
        out of the mean: ``jnp.where(keep, loss, 0)``, or say `ignore_index`.
      label_smoothing: this share of each target is spread evenly over the vocabulary (arXiv
        1512.00567, section 7).
      z_loss: this times the square of the logsumexp is added (arXiv 2204.02311, section 5).
      ignore_index: positions with this target, such as -100, have loss 0, whatever their logits
        are, and no gradient. Divide by the number of the others for a mean.
      mesh: for global arrays; by default the ambient mesh (`jax.set_mesh`), or an array's own.
      x_spec: for global arrays: how the logits are sharded beside `axis_name`, such as
        ``P("data")``; by default what their type says (explicit sharding), or not at all.

    Raises:
      ValueError: shapes that do not fit; logits that, as their type says under ``check_vma=True``,
        are the same on all ranks, when the call is traced.
    """
    if tuple(logits.shape[:-1]) != tuple(targets.shape):
        raise ValueError(
            f"jflux.nn.cross_entropy: logits {logits.shape} must have the shape of targets "
            f"{targets.shape} and one more dimension"
        )
    body = functools.partial(
        _cross_entropy, axis_name=axis_name, label_smoothing=label_smoothing, z_loss=z_loss,
        ignore_index=ignore_index,
    )  # fmt: skip
    if meshes.is_bound(axis_name):
        return body(logits, targets)
    names, last = meshes.as_tuple(axis_name), logits.ndim - 1
    split = global_arrays._with_axis(global_arrays._spec(logits, x_spec), logits.ndim, last, names)
    positions = PartitionSpec(*split[:last])
    return global_arrays.with_specs(
        body, "nn.cross_entropy", {"logits": logits, "targets": targets},
        {"logits": split, "targets": positions}, axis_name=axis_name, mesh=mesh,
        out_specs=positions,
    )  # fmt: skip


def _cross_entropy(
    logits: jax.Array,
    targets: jax.Array,
    *,
    axis_name: AxisName,
    label_smoothing: float,
    z_loss: float,
    ignore_index: int | None,
) -> jax.Array:
    names, size = meshes.as_tuple(axis_name), logits.shape[-1]
    ranks, wide = meshes.axis_size(axis_name), sum_dtype(logits.dtype)
    split = [name for name in names if meshes.axis_size(name) > 1]
    if set(split) - set(meshes.split_over(axis_name, logits)):
        raise ValueError(
            f"jflux.nn.cross_entropy: logits {logits.shape} must be this rank's part of the "
            f"vocabulary along {axis_name=}, but their type says that all {ranks} ranks have the "
            "same; split their last dimension by the in_specs of shard_map, or take a loss of one "
            "device for whole logits"
        )
    ignored = None if ignore_index is None else targets == ignore_index
    if ignored is not None:  # NaN there would reach a gradient, times zero
        logits = jnp.where(ignored[..., None], 0, logits)
    top = lax.pmax(lax.stop_gradient(logits).max(-1).astype(wide), names)
    own = targets - lax.axis_index(names) * size
    terms = _terms(logits, top, own, label_smoothing != 0)
    total, target, *every = all_reduce(jnp.stack(terms), axis_name=axis_name)
    log_total = jnp.log(total)
    loss = log_total - target
    if every:
        mean = every[0] / (size * ranks)
        loss = (1 - label_smoothing) * loss + label_smoothing * (log_total - mean)
    loss = loss + z_loss * (top + log_total) ** 2 if z_loss else loss
    loss = jnp.where((targets >= 0) & (targets < size * ranks), loss, jnp.nan)
    return loss if ignored is None else jnp.where(ignored, 0, loss)


# The exponentials, as large as the logits and perhaps of a wider type, are not kept for the
# gradient.
@functools.partial(jax.checkpoint, static_argnums=3)
def _terms(logits: jax.Array, top: jax.Array, own: jax.Array, smooth: bool) -> list[Any]:
    """This rank's terms, over its part of the vocabulary and less the maximum `top`: of the sum of
    exponentials, of the target's logit, and if wanted of the sum of all logits."""
    shifted = logits.astype(top.dtype) - top[..., None]
    # A comparison, and not an index, so that XLA reads the logits once for all sums.
    is_target = lax.broadcasted_iota(own.dtype, logits.shape, logits.ndim - 1) == own[..., None]
    sums = [jnp.exp(shifted).sum(-1), jnp.where(is_target, shifted, 0).sum(-1)]
    return [*sums, shifted.sum(-1)] if smooth else sums
