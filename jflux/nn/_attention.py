"""Attention over this rank's heads, between two products that gather and scatter the sequence."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Required, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jax.typing import DTypeLike

from .._ops import _recipe
from .._ops._recipe import AnyRecipe
from .._ops.attention import _one_device
from .._ops.attention._checks import per_head
from .._ops.attention._kv_cache_parts import capacity_of, check_known
from .._ops.attention.attention import attention as over_ranks
from .._ops.attention.kv_cache import KVCache, attend_to_cache, fill_cache, new_positions
from .._ops.attention.sequence_layouts import Layout, check_layout, check_length, own_positions
from .._ranks import global_arrays, meshes
from .._ranks.meshes import AxisName
from . import _cache, _padding
from ._dense import column_parallel, row_parallel

_OP = "jflux.nn.attention"


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
    sinks: jax.Array | None
    alibi_slopes: jax.Array | None
    new_lengths: jax.Array | None
    prefill: bool
    cache_core: Callable[..., tuple[jax.Array, KVCache]] | None
    sequence_parallel: bool
    preferred_element_type: DTypeLike | None
    precision: lax.PrecisionLike
    recipe: AnyRecipe | None
    wire: str | None
    grad_wire: str | None
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
    sinks: jax.Array | None = None,
    alibi_slopes: jax.Array | None = None,
    cache: KVCache | None = None,
    new_lengths: jax.Array | None = None,
    prefill: bool = False,
    cache_core: Callable[..., tuple[jax.Array, KVCache]] | None = None,
    sequence_parallel: bool = True,
    preferred_element_type: DTypeLike | None = None,
    precision: lax.PrecisionLike = None,
    recipe: AnyRecipe | None = None,
    wire: str | None = None,
    grad_wire: str | None = None,
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

    With `cache`, of :func:`init_cache`, paged or not, the positions of x follow those that the
    cache has, and are added to it. Attention is causal, over both. In decoding x [b, t/N, d] has t
    new tokens of each sequence, the same along `context_axis`, which splits the cache alone. With
    `prefill` x is a prompt, split as without a cache, and what the cache had before is gone.

    Args:
      x: [b, s/N, d] or [s/N, d].
      bias: of query [h/N, c], key and value [g/N, c] and out [d]; None for none.
      residual: [b, s/N, d], added to the result.
      mask: bool [b or 1, 1, s, s], true where a query (second to last dimension) may attend. Not
        with `context_axis`.
      is_causal: no position attends to a later one.
      num_kv_heads: g. Needed inside ``shard_map`` alone, and only if N does not divide it.
      rotate: called as ``rotate(q, position)``, and with keys, for q [b, s, heads, c] and the
        positions that they have in their sequences, int32 [b, s], or [1, s] where all sequences
        have the same; such as :class:`Rotary`. With `context_axis` these are the rank's own s/C
        positions; in decoding those after what the cache has, and -1 for padding. Documents of
        `segment_ids` do not begin at 0 again: after a rotation scores depend on differences of
        positions alone.
      core: called as ``core(q, k, v, mask=..., is_causal=...)`` for q [b, s, h/N, c] and k, v
        [b, s, g/N, c], with `sinks` and `alibi_slopes` also with these; by default
        ``jax.nn.dot_product_attention``, on GPUs by cuDNN for calls that cuDNN takes (then there is
        no forward mode), or else by jflux's kernel for those that it takes; with `context_axis` or
        a cache :func:`jflux.attention`. With `context_axis` q has the rank's own s/C positions.
      context_axis: a mesh axis that the sequence is split over while attending, too.
      context_layout: which positions its ranks have, as in :func:`jflux.attention`.
      segment_ids: int [b, s/C], of documents, the same along `axis_name`; with `context_axis`.
      sinks: [h/N], floating: a logit of each head of queries in the denominator of its softmax, as
        in :func:`jflux.attention`. Differentiable.
      alibi_slopes: [h/N], floating: of ALiBi, as in :func:`jflux.attention`, constants.
      cache: keys and values of earlier tokens. Not with `mask` or `segment_ids`.
      new_lengths: int [b], how many of x's positions a sequence has, the same on all ranks. What
        follows them is padding: it is not written, and y has no meaning there. None: all.
      prefill: x is a prompt, and begins the sequences.
      cache_core: in decoding, called as ``cache_core(cache, q, k, v, new_lengths)``, with `sinks`
        and `alibi_slopes` also with these; by default :func:`jflux.attend_to_cache` along
        `context_axis`. Needed beside a `core`, which is that of prompts alone.
      sequence_parallel: False: x and the result are whole, [b, s, d], on all ranks.
      recipe: of the projections; scores and their sums are as without.
      wire, grad_wire: of the last projection, as in :func:`jflux.nn.row_parallel`.
      preferred_element_type, precision, mesh, x_spec: as in :func:`jflux.all_gather_matmul`.

    Returns:
      [b, s/N, d]; with `cache` that and the cache. A position beyond the cache is a ValueError
      where the lengths are known when this is called, as outside of ``jit``, and an error on CPUs
      and under ``checkify.user_checks``. Elsewhere its y is NaN, and the sequence's length is more
      than the cache has from then on (:func:`jflux.attend_to_cache`, :func:`jflux.fill_cache`).
    """
    if len(bias) != 4:
        raise ValueError(f"{_OP}: bias must be four arrays or None, got {len(bias)}")
    operands = _Operands(
        x, query, key, value, out, residual, mask, segment_ids, sinks, alibi_slopes,
        new_lengths, *(KVCache(*cache) if cache else (None,) * 4), *bias,
    )  # fmt: skip
    options = _Options(
        axis_name, is_causal, rotate, core, context_axis, context_layout, prefill, cache_core,
        sequence_parallel, preferred_element_type, precision, recipe, wire, grad_wire,
    )  # fmt: skip
    options.check(operands)
    if not meshes.is_bound(axis_name):
        options.check_room(operands)
        return _over_global_arrays(options, operands, mesh, x_spec)
    kv_is_whole = meshes.axis_size(axis_name) > 1 and key.shape[1] == num_kv_heads
    return _attention(options, kv_is_whole, **vars(operands))


@dataclasses.dataclass(frozen=True)
class _Operands:
    """The arrays of a call, global ones or one rank's; or how each is sharded."""

    x: Any
    query: Any
    key: Any
    value: Any
    out: Any
    residual: Any
    mask: Any
    segment_ids: Any
    sinks: Any
    alibi_slopes: Any
    new_lengths: Any
    cache_keys: Any
    cache_values: Any
    cache_lengths: Any
    cache_block_table: Any
    query_bias: Any
    key_bias: Any
    value_bias: Any
    out_bias: Any

    @property
    def cache(self) -> KVCache | None:
        if self.cache_keys is None:
            return None
        return KVCache(
            self.cache_keys, self.cache_values, self.cache_lengths, self.cache_block_table
        )


@dataclasses.dataclass(frozen=True)
class _Options:
    """The options of a call, as :func:`attention` takes them."""

    axis_name: AxisName
    is_causal: bool
    rotate: Callable[..., jax.Array] | None
    core: Callable[..., jax.Array] | None
    context_axis: AxisName | None
    context_layout: Layout
    prefill: bool
    cache_core: Callable[..., tuple[jax.Array, KVCache]] | None
    sequence_parallel: bool
    preferred_element_type: DTypeLike | None
    precision: lax.PrecisionLike
    recipe: AnyRecipe | None
    wire: str | None
    grad_wire: str | None

    def check(self, a: _Operands) -> None:
        """Raises for options that do not fit each other, or operands that do not fit them."""
        if a.x.ndim not in (2, 3):
            raise ValueError(f"{_OP}: x must be [b, s, d] or [s, d], got {a.x.shape}")
        for name in ("query", "key", "value", "out"):
            if (w := getattr(a, name)).ndim != 3:
                shape = "[heads, c, d]" if name == "out" else "[d, heads, c]"
                raise ValueError(
                    f"{_OP}: {name} must be {shape}, got {w.shape}; reshape a matrix to it"
                )
        for name in ("sinks", "alibi_slopes"):
            per_head(_OP, name, getattr(a, name), a.query.shape[1])
        meshes.axes_of(self.context_axis, self.axis_name)  # which are different ones
        check_layout(_OP, self.context_layout)
        if self.context_axis is None and a.segment_ids is not None:
            raise ValueError(f"{_OP}: segment_ids go with context_axis; pass a mask")
        if self.context_axis is not None and a.mask is not None:
            raise ValueError(
                f"{_OP}: with context_axis no rank has a whole mask; use is_causal, segment_ids, "
                "or a core of jflux.attention with a window"
            )
        if a.cache is None:
            if a.new_lengths is not None or self.prefill:
                raise ValueError(f"{_OP}: new_lengths and prefill go with a cache")
            return
        if a.x.ndim != 3:
            raise ValueError(f"{_OP}: with a cache x must be [b, s, d], got {a.x.shape}")
        if a.mask is not None or a.segment_ids is not None:
            raise ValueError(
                f"{_OP}: a cache takes no mask and no segment_ids; say with new_lengths what is "
                "padding"
            )
        if self.core is not None and self.cache_core is None and not self.prefill:
            raise ValueError(
                f"{_OP}: core is not told about the cache; pass cache_core= too, such as "
                "functools.partial(jflux.attend_to_cache, axis_name=context_axis, window=...)"
            )

    def check_room(self, a: _Operands) -> None:
        """Raises for sequences that go on beyond a whole cache, if their lengths are known."""
        if (cache := a.cache) is None or (self.cache_core is not None and not self.prefill):
            return  # a core of one's own may begin again
        tokens, most = a.x.shape[1], capacity_of(cache)
        if self.prefill and a.new_lengths is None:  # an error of shapes
            return
        if self.prefill:
            check_known(_OP, "new_lengths", np.int64(0), a.new_lengths, min(tokens, most), most)
        else:
            check_known(_OP, "new_lengths", cache.lengths, a.new_lengths, tokens, most)

    @property
    def of_products(self) -> dict[str, Any]:
        """Those that the products of a layer take."""
        names = (
            "axis_name", "sequence_parallel", "precision", "preferred_element_type", "recipe"
        )  # fmt: skip
        return {name: getattr(self, name) for name in names}

    def decodes(self, a: _Operands) -> bool:
        return a.cache is not None and not self.prefill

    def rotated(self, a: _Operands, q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Queries and keys, turned by their positions."""
        if self.rotate is None:
            return q, k
        length = q.shape[-3]
        if self.decodes(a):
            positions = new_positions(a.cache_lengths, length, a.new_lengths)
        else:
            rank, ranks = meshes.rank_and_size(self.context_axis)
            positions = own_positions(rank, length, ranks, self.context_layout)
            positions = positions.reshape(*(1,) * (q.ndim - 3), length)
        return self.rotate(q, positions), self.rotate(k, positions)

    def attend(
        self, a: _Operands, q: jax.Array, k: jax.Array, v: jax.Array
    ) -> tuple[jax.Array, KVCache | None]:
        """(o, the cache with k and v)."""
        axis, core, cache = self.context_axis, self.core, a.cache
        given = {"sinks": a.sinks, "alibi_slopes": a.alibi_slopes}
        more = {name: one for name, one in given.items() if one is not None}
        if cache is not None and not self.prefill:
            attend = self.cache_core or functools.partial(attend_to_cache, axis_name=axis)
            return attend(cache, q, k, v, a.new_lengths, **more)
        if core is None and (axis is not None or cache is not None):
            core = functools.partial(
                _over_ranks, axis_name=axis, layout=self.context_layout, segment_ids=a.segment_ids
            )
        if cache is not None:
            cache = fill_cache(
                cache, k, v, a.new_lengths, axis_name=axis, layout=self.context_layout
            )
        if 0 in q.shape:  # JAX's own divides by the number of heads
            return q, cache
        is_causal = self.is_causal or cache is not None
        core = core or _one_device.attend
        return core(q, k, v, mask=a.mask, is_causal=is_causal, **more), cache


def _over_global_arrays(options: _Options, a: _Operands, mesh: Any, x_spec: Any) -> Any:
    axis_name, x = options.axis_name, a.x
    mesh = global_arrays._mesh_for(mesh, x, a.query)
    padding = _padding.Padding()
    if options.context_axis is None or options.decodes(a):
        padding = _padding.for_ranks(
            x, -2, axis_name=axis_name, sequence_parallel=options.sequence_parallel, mesh=mesh,
            x_spec=x_spec,
        )  # fmt: skip
    a = dataclasses.replace(a, x=padding.pad(x), residual=padding.pad(a.residual))
    names, context = meshes.as_tuple(axis_name), meshes.axes_of(options.context_axis)
    batch = _cache.without(global_arrays._spec(x, x_spec), (*context, *names))[: x.ndim - 2]
    batch = (*batch, *([None] * (x.ndim - 2 - len(batch))))
    of_positions = () if options.decodes(a) else context
    split = (*of_positions, *names) if options.sequence_parallel else of_positions
    sequence = PartitionSpec(*batch, split or None, None)
    of_cache = _cache.cache_specs(
        axis_name, context_axis=options.context_axis, x_spec=PartitionSpec(*batch),
        paged=a.cache_block_table is not None,
    )  # fmt: skip
    kv_is_whole = a.key.shape[1] % math.prod(mesh.shape.get(name, 1) for name in names) != 0
    kv_names = None if kv_is_whole else names
    kv, kv_bias = PartitionSpec(None, kv_names, None), PartitionSpec(kv_names, None)
    mask_batch = batch if a.mask is None or a.mask.shape[0] > 1 else [None] * len(batch)
    specs = _Operands(
        sequence, PartitionSpec(None, names, None), kv, kv, PartitionSpec(names, None, None),
        sequence, PartitionSpec(*mask_batch), PartitionSpec(*batch, context or None),
        PartitionSpec(names), PartitionSpec(names), of_cache.lengths, of_cache.keys,
        of_cache.values, of_cache.lengths, of_cache.lengths, PartitionSpec(names, None), kv_bias,
        kv_bias, PartitionSpec(),
    )  # fmt: skip
    y = global_arrays.with_specs(
        functools.partial(_attention, options, kv_is_whole, added=padding.added), "nn.attention",
        vars(a), vars(specs), axis_name=(*context, *names), mesh=mesh,
        out_specs=sequence if a.cache is None else (sequence, _of_leaves(a.cache, of_cache, mesh)),
    )  # fmt: skip
    return padding.cut(y) if a.cache is None else (padding.cut(y[0]), y[1])


def _of_leaves(cache: KVCache, specs: KVCache, mesh: Any) -> KVCache:
    """The specs of a cache's arrays: a scale of heads is split by heads alone."""

    def of(name: str, array: Any, spec: Any) -> Any:
        return _recipe.specs(f"{_OP}: cache.{name}", array, spec, mesh)

    return specs._replace(
        keys=of("keys", cache.keys, specs.keys), values=of("values", cache.values, specs.values)
    )


def _attention(options: _Options, kv_is_whole: bool, *, added: int = 0, **operands: Any) -> Any:
    """The attention of one rank's arrays.

    Args:
      kv_is_whole: each rank has all heads of keys and values.
      added: of the positions of all ranks, how many at the end are padding.
    """
    a = _Operands(**operands)
    heads, head_dim = a.query.shape[1:]
    weights, biases = (a.query, a.key, a.value), (a.query_bias, a.key_bias, a.value_bias)
    flat = [w.reshape(w.shape[0], math.prod(w.shape[1:])) for w in weights]
    products = column_parallel(
        a.x, flat, bias=[b if b is None else b.reshape(-1) for b in biases], **options.of_products
    )
    length = products[0].shape[-2] - added
    q, k, v = (
        y[..., :length, :].reshape(*y.shape[:-2], length, w.shape[1], head_dim)
        for y, w in zip(products, weights, strict=True)
    )
    axis = options.context_axis
    if axis is not None and not options.decodes(a):  # a core of one's own does not look
        check_length(_OP, options.context_layout, meshes.axis_size(axis), "q", q)
    q, k = options.rotated(a, q, k)
    if kv_is_whole:
        k, v = _own_heads(heads, options.axis_name, k, v)
    o, cache = options.attend(a, q, k, v)
    o = _padding.Padding(o.ndim - 3, length, added).pad(o)
    y = row_parallel(
        o.reshape(*o.shape[:-2], math.prod(o.shape[-2:])),
        a.out.reshape(math.prod(a.out.shape[:2]), a.out.shape[2]), bias=a.out_bias,
        residual=a.residual, wire=options.wire, grad_wire=options.grad_wire, **options.of_products,
    )  # fmt: skip
    return y if cache is None else (y, cache)


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
