"""Attention over this rank's heads, between two products that gather and scatter the sequence."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Required, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jax.typing import DTypeLike

from .._ops._epilogue import in_rows, sum_dtype
from .._ops.attention import _one_device
from .._ops.attention.attention import attention as over_ranks
from .._ops.attention.kv_cache import KVCache, attend_to_cache, fill_cache, new_positions
from .._ops.attention.sequence_layouts import Layout, check_layout, check_length, own_positions
from .._ranks import global_arrays, meshes
from .._ranks.meshes import AxisName
from . import _cache, _padding
from ._dense import column_parallel, row_parallel

_OP = "jflux.nn.attention"
#: Names of a cache's arrays, as operands.
CACHE = ("cache_keys", "cache_values", "cache_lengths")


class Options(TypedDict, total=False):
    """Arguments on which the type of :func:`attention`'s result does not depend."""

    axis_name: Required[AxisName]
    bias: Sequence[jax.Array | None]
    residual: jax.Array | None
    mask: jax.Array | None
    is_causal: bool
    num_kv_heads: int | None
    rotate: Callable[..., jax.Array] | None
    core: Callable[..., jax.Array] | None
    context_axis: AxisName | None
    context_layout: Layout
    segment_ids: jax.Array | None
    new_lengths: jax.Array | None
    prefill: bool
    cache_core: Callable[..., tuple[jax.Array, KVCache]] | None
    sequence_parallel: bool
    preferred_element_type: DTypeLike | None
    precision: lax.PrecisionLike
    mesh: Mesh | AbstractMesh | None
    x_spec: PartitionSpec | None


@overload
def attention(
    x: jax.Array,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    out: jax.Array,
    *,
    cache: None = ...,
    **options: Unpack[Options],
) -> jax.Array: ...
@overload
def attention(
    x: jax.Array,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    out: jax.Array,
    *,
    cache: KVCache,
    **options: Unpack[Options],
) -> tuple[jax.Array, KVCache]: ...
@overload
def attention(
    x: jax.Array,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    out: jax.Array,
    *,
    cache: KVCache | None,
    **options: Unpack[Options],
) -> Any: ...
@meshes.axis_by_name
def attention(
    x: jax.Array,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    out: jax.Array,
    *,
    axis_name: AxisName,
    bias: Sequence[jax.Array | None] = (None, None, None, None),
    residual: jax.Array | None = None,
    mask: jax.Array | None = None,
    is_causal: bool = False,
    num_kv_heads: int | None = None,
    rotate: Callable[..., jax.Array] | None = None,
    core: Callable[..., jax.Array] | None = None,
    context_axis: AxisName | None = None,
    context_layout: Layout = "zigzag",
    segment_ids: jax.Array | None = None,
    cache: KVCache | None = None,
    new_lengths: jax.Array | None = None,
    prefill: bool = False,
    cache_core: Callable[..., tuple[jax.Array, KVCache]] | None = None,
    sequence_parallel: bool = True,
    preferred_element_type: DTypeLike | None = None,
    precision: lax.PrecisionLike = None,
    mesh: Mesh | AbstractMesh | None = None,
    x_spec: PartitionSpec | None = None,
) -> Any:
    """Self-attention with heads split over the ranks, and activations between layers split by
    sequence position (arXiv 2205.05198, section 4.2.2).

    Per rank of N along `axis_name`, inside ``jax.shard_map``, for h heads of c elements and g heads
    of keys and values (h of them, or a divisor: grouped queries, arXiv 2305.13245)::

        x [b, s/N, d]   query [d, h/N, c]   key, value [d, g/N, c]   out [h/N, c, d]
          ->  [b, s/N, d]

    The three projections share one gather. Weights and biases have the shapes of
    ``flax.linen.MultiHeadDotProductAttention``'s. Outside ``shard_map`` it takes global arrays, and
    wraps itself in one. A sequence that the ranks do not divide is padded there, and the result is
    cut; `rotate`, `core` and `mask` see its s positions alone.

    If N does not divide g, every rank has all of key and value, [d, g, c], computes all g heads,
    and uses those that its queries belong to; inside ``shard_map`` say so with `num_kv_heads`.

    With `context_axis`, of C ranks, the sequence is split over both axes, `context_axis` first:
    x is [b, s/(C N), d]. Its order is that of :func:`jflux.reorder_for_causal` for C ranks, and
    :func:`jflux.attention` attends. A model without tensor parallelism has an `axis_name` of one
    rank. N and C must divide s.

    With `cache`, of :func:`init_cache`, the positions of x follow those that the cache has, and are
    added to it. Attention is causal, over both. In decoding x [b, t/N, d] has t new tokens of each
    sequence, the same along `context_axis`, which splits the cache alone. With `prefill` x is a
    prompt, split as without a cache, and what the cache had before is gone.

    Args:
      x: [b, s/N, d] or [s/N, d].
      bias: of query [h/N, c], key and value [g/N, c] and out [d]; None for none.
      residual: [b, s/N, d], added to the result.
      mask: bool [b or 1, 1, s, s], true where a query (second to last dimension) may attend. Not
        with `context_axis`.
      is_causal: no position attends to a later one.
      num_kv_heads: g. Needed inside ``shard_map`` alone, and only if N does not divide it.
      rotate: applied to queries and keys, [b, s, heads, c], of all positions; such as
        :func:`rotary`. With `context_axis` it is called as ``rotate(q, position)``, with q
        [b, s/C, heads, c] and its positions int32 [s/C]; in decoding, with positions [b, t].
      core: called as ``core(q, k, v, mask=..., is_causal=...)`` for q [b, s, h/N, c] and k, v
        [b, s, g/N, c]; by default ``jax.nn.dot_product_attention``, on GPUs by cuDNN for
        calls that cuDNN takes (then there is no forward mode), or else by jflux's kernel for those
        that it takes; with `context_axis` or a cache :func:`jflux.attention`. With `context_axis` q
        has the rank's own s/C positions.
      context_axis: a mesh axis that the sequence is split over while attending, too.
      context_layout: which positions its ranks have, as in :func:`jflux.attention`.
      segment_ids: int [b, s/C], of documents, the same along `axis_name`; with `context_axis`.
      cache: keys and values of earlier tokens. Not with `mask` or `segment_ids`.
      new_lengths: int [b], how many of x's positions a sequence has, the same on all ranks. What
        follows them is padding: it is not written, and y has no meaning there. None: all.
      prefill: x is a prompt, and begins the sequences.
      cache_core: in decoding, called as ``cache_core(cache, q, k, v, new_lengths)``; by default
        :func:`jflux.attend_to_cache` along `context_axis`. Needed beside a `core`, which is that of
        prompts alone.
      sequence_parallel: False: x and the result are whole, [b, s, d], on all ranks.
      preferred_element_type, precision, mesh, x_spec: as in :func:`jflux.all_gather_matmul`.

    Returns:
      [b, s/N, d]; with `cache` that and the cache. A position beyond the cache is an error on CPUs,
      and under ``checkify.user_checks``; elsewhere its y is NaN (:func:`jflux.attend_to_cache`,
      :func:`jflux.fill_cache`).
    """
    if x.ndim not in (2, 3):
        raise ValueError(f"jflux.nn.attention: x must be [b, s, d] or [s, d], got {x.shape}")
    for name, w in {"query": query, "key": key, "value": value, "out": out}.items():
        if w.ndim != 3:
            shape = "[heads, c, d]" if name == "out" else "[d, heads, c]"
            raise ValueError(
                f"jflux.nn.attention: {name} must be {shape}, got {w.shape}; reshape a matrix to it"
            )
    meshes.axes_of(context_axis, axis_name)  # which are different ones
    check_layout(_OP, context_layout)
    if len(bias) != 4:
        raise ValueError(f"jflux.nn.attention: bias must be four arrays or None, got {len(bias)}")
    options: Any = {
        "axis_name": axis_name, "sequence_parallel": sequence_parallel, "precision": precision,
        "preferred_element_type": preferred_element_type,
    }  # fmt: skip
    if context_axis is None and segment_ids is not None:
        raise ValueError("jflux.nn.attention: segment_ids go with context_axis; pass a mask")
    if context_axis is not None and mask is not None:
        raise ValueError(
            "jflux.nn.attention: with context_axis no rank has a whole mask; use is_causal, "
            "segment_ids, or a core of jflux.attention with a window"
        )
    _check_cache(x, cache, new_lengths, prefill, mask, segment_ids, core, cache_core)
    decodes = cache is not None and not prefill
    body = functools.partial(
        _attention, is_causal=is_causal or cache is not None, rotate=rotate, core=core,
        prefill=prefill, cache_core=cache_core, context_axis=context_axis,
        context_layout=context_layout, **options,
    )  # fmt: skip
    operands: dict[str, Any] = {
        "x": x, "query": query, "key": key, "value": value, "out": out, "query_bias": bias[0],
        "key_bias": bias[1], "value_bias": bias[2], "out_bias": bias[3], "residual": residual,
        "mask": mask, "segment_ids": segment_ids, "new_lengths": new_lengths,
        **dict(zip(CACHE, cache or (None,) * 3, strict=True)),
    }  # fmt: skip
    if meshes.is_bound(axis_name):
        world = meshes.axis_size(axis_name)
        whole = world > 1 and num_kv_heads is not None and key.shape[1] == num_kv_heads
        return body(**operands, kv_is_whole=whole)
    mesh = global_arrays._mesh_for(mesh, x, query)
    padding = _padding.Padding()
    if context_axis is None or decodes:
        padding = _padding.for_ranks(
            x, -2, axis_name=axis_name, sequence_parallel=sequence_parallel, mesh=mesh,
            x_spec=x_spec,
        )  # fmt: skip
    operands |= {"x": padding.pad(x), "residual": padding.pad(residual)}
    names = meshes.as_tuple(axis_name)
    context = meshes.axes_of(context_axis)
    world = 1
    for name in names:
        world *= mesh.shape.get(name, 1)
    whole = key.shape[1] % world != 0
    batch = _cache.without(global_arrays._spec(x, x_spec), (*context, *names))[: x.ndim - 2]
    batch = (*batch, *([None] * (x.ndim - 2 - len(batch))))
    of_positions = () if decodes else context
    split = (*of_positions, *names) if sequence_parallel else of_positions
    sequence = PartitionSpec(*batch, split or None, None)
    of_cache = _cache.cache_specs(
        axis_name, context_axis=context_axis, x_spec=PartitionSpec(*batch)
    )
    kv, kv_bias = PartitionSpec(None, names, None), PartitionSpec(names, None)
    if whole:
        kv, kv_bias = PartitionSpec(), PartitionSpec()
    mask_batch = batch if mask is None or mask.shape[0] > 1 else [None] * len(batch)
    y = global_arrays.with_specs(
        functools.partial(body, kv_is_whole=whole, added=padding.added), "nn.attention", operands,
        {
            "x": sequence, "query": PartitionSpec(None, names, None), "key": kv, "value": kv,
            "out": PartitionSpec(names, None, None), "query_bias": PartitionSpec(names, None),
            "key_bias": kv_bias, "value_bias": kv_bias, "out_bias": PartitionSpec(),
            "residual": sequence, "mask": PartitionSpec(*mask_batch),
            "segment_ids": PartitionSpec(*batch, context or None),
            "new_lengths": of_cache.lengths, **dict(zip(CACHE, of_cache, strict=True)),
        },
        axis_name=(*context, *names), mesh=mesh,
        out_specs=sequence if cache is None else (sequence, of_cache),
    )  # fmt: skip
    return padding.cut(y) if cache is None else (padding.cut(y[0]), y[1])


def _check_cache(
    x: Any,
    cache: Any,
    new_lengths: Any,
    prefill: bool,
    mask: Any,
    segment_ids: Any,
    core: Any,
    cache_core: Any,
) -> None:
    op = _OP
    if cache is None:
        if new_lengths is not None or prefill:
            raise ValueError(f"{op}: new_lengths and prefill go with a cache")
        return
    if x.ndim != 3:
        raise ValueError(f"{op}: with a cache x must be [b, s, d], got {x.shape}")
    if mask is not None or segment_ids is not None:
        raise ValueError(
            f"{op}: a cache takes no mask and no segment_ids; say with new_lengths what is padding"
        )
    if core is not None and cache_core is None and not prefill:
        raise ValueError(
            f"{op}: core is not told about the cache; pass cache_core= too, such as "
            "functools.partial(jflux.attend_to_cache, axis_name=context_axis, window=...)"
        )


def _attention(
    x: jax.Array,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    out: jax.Array,
    query_bias: Any,
    key_bias: Any,
    value_bias: Any,
    out_bias: Any,
    residual: Any,
    mask: Any,
    segment_ids: Any,
    new_lengths: Any,
    cache_keys: Any,
    cache_values: Any,
    cache_lengths: Any,
    *,
    is_causal: bool,
    rotate: Callable[..., jax.Array] | None,
    core: Callable[..., jax.Array] | None,
    prefill: bool,
    cache_core: Callable[..., tuple[jax.Array, KVCache]] | None,
    context_axis: AxisName | None,
    context_layout: Layout,
    kv_is_whole: bool,
    added: int = 0,
    **options: Any,
) -> Any:
    """`added`: of the positions of all ranks, how many at the end are padding."""
    heads, head_dim = query.shape[1:]
    biases = (query_bias, key_bias, value_bias)
    weights = (query, key, value)
    flat = [w.reshape(w.shape[0], math.prod(w.shape[1:])) for w in weights]
    products = column_parallel(
        x, flat, bias=[b if b is None else b.reshape(-1) for b in biases], **options
    )
    length = products[0].shape[-2] - added
    q, k, v = (
        y[..., :length, :].reshape(*y.shape[:-2], length, w.shape[1], head_dim)
        for y, w in zip(products, weights, strict=True)
    )
    cache = None if cache_keys is None else KVCache(cache_keys, cache_values, cache_lengths)
    decodes = cache is not None and not prefill
    if context_axis is not None and not decodes:  # a core of one's own does not look
        check_length(_OP, context_layout, meshes.axis_size(context_axis), "q", q)
    if rotate is not None and decodes:
        positions = new_positions(cache_lengths, length, new_lengths)
        rotate = functools.partial(_at, rotate, positions)
    elif rotate is not None and context_axis is not None:
        rotate = functools.partial(
            _at_own_positions, rotate, axis_name=context_axis, layout=context_layout
        )
    if rotate is not None:
        q, k = rotate(q), rotate(k)
    if kv_is_whole:
        k, v = _own_heads(heads, options["axis_name"], k, v)
    if core is None and (context_axis is not None or cache is not None):
        core = functools.partial(
            _over_ranks, axis_name=context_axis, layout=context_layout, segment_ids=segment_ids
        )
    core = core or _one_device.attend
    if cache is not None and prefill:
        cache = fill_cache(cache, k, v, new_lengths, axis_name=context_axis, layout=context_layout)
    if cache is not None and decodes:
        attend = cache_core or functools.partial(attend_to_cache, axis_name=context_axis)
        o, cache = attend(cache, q, k, v, new_lengths)
    else:
        # JAX's own divides by the number of heads.
        o = q if 0 in q.shape else core(q, k, v, mask=mask, is_causal=is_causal)
    o = _padding.Padding(o.ndim - 3, length, added).pad(o)
    y = row_parallel(
        o.reshape(*o.shape[:-2], math.prod(o.shape[-2:])),
        out.reshape(math.prod(out.shape[:2]), out.shape[2]), bias=out_bias, residual=residual,
        **options,
    )  # fmt: skip
    return y if cache is None else (y, cache)


def _at(rotate: Callable[..., jax.Array], positions: jax.Array, x: jax.Array) -> jax.Array:
    return rotate(x, positions)


def _at_own_positions(
    rotate: Callable[..., jax.Array], x: jax.Array, *, axis_name: AxisName, layout: Layout
) -> jax.Array:
    names = meshes.as_tuple(axis_name)
    length, ranks = x.shape[-3], meshes.axis_size(names)
    return rotate(x, own_positions(lax.axis_index(names), length, ranks, layout))


def _over_ranks(
    q: jax.Array, k: jax.Array, v: jax.Array, *, mask: None, is_causal: bool, **options: Any
) -> jax.Array:
    """A core for a sequence that is split while attending."""
    if q.ndim == 4:
        return over_ranks(q, k, v, causal=is_causal, **options)
    ids = options.pop("segment_ids")
    options["segment_ids"] = None if ids is None else ids[None]
    return over_ranks(q[None], k[None], v[None], causal=is_causal, **options)[0]


def _own_heads(heads: int, axis_name: AxisName, *all_heads: jax.Array) -> list[jax.Array]:
    """Of all heads of keys or values [..., g, c], those that this rank's `heads` queries belong
    to."""
    group = heads * meshes.axis_size(axis_name) // all_heads[0].shape[-2]
    count = _cache.own_heads(heads, group)
    first = lax.axis_index(meshes.as_tuple(axis_name)) * heads
    index = (first + jnp.arange(count) * (heads // count)) // group
    return [jnp.take(a, index, axis=-2) for a in all_heads]


def rotary(
    x: jax.Array, position: jax.Array | None = None, *, theta: float = 10_000.0
) -> jax.Array:
    """Rotary position embedding (arXiv 2104.09864, equation 34) of x [..., s, heads, c].

    Element i of a head turns with element i + c/2, as in Llama's published weights; the paper pairs
    neighbours.

    Args:
      position: [s], or [b, s] where those of each sequence are others; 0 to s - 1 by default.
      theta: the base of the wave lengths.
    """
    wide = sum_dtype(x.dtype)
    half = x.shape[-1] // 2
    position = jnp.arange(x.shape[-3]) if position is None else position
    turns = theta ** (-jnp.arange(half, dtype=wide) / half)
    if jnp.issubdtype(position.dtype, jnp.integer):
        position = position.astype(wide)
    angle = position[..., None] * in_rows(turns, position[..., None])
    a, b = jnp.split(x.astype(wide), 2, axis=-1)
    sin, cos = (in_rows(f(angle)[..., None, :], a) for f in (jnp.sin, jnp.cos))
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)
