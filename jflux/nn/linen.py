"""Tensor-parallel layers for Flax linen.

Parameters have the shapes of the whole model, and carry logical axis names
(``flax.linen.LogicallyPartitioned``; :func:`jflux.nn.logical_axis_rules` has rules for them). A
layer is initialised outside of ``shard_map``, under ``jax.set_mesh(mesh)``. It is applied there,
under ``jit``, to global arrays, or inside ``jax.shard_map`` to one rank's.

Fields that the layers have beside those of Flax's own of like names:

- ``axis_name``: the mesh axis of the ranks, or a tuple of them.
- ``sequence_parallel``: activations between layers are split over the ranks by sequence position.
  False: they are the same on all ranks, as decoding wants it.
- ``x_spec``: on global arrays, how activations are sharded beside ``axis_name``, such as
  ``P("data")``. Not needed under explicit sharding.
- ``axes``: logical names of the kernel's dimensions.
- ``recipe``: a :class:`jflux.Recipe`, by which the layer's products are made in 8 bits.
- ``wire``, ``grad_wire``: of layers that sum over ranks, "float8_e4m3fn" or "int8" for sums that
  travel quantised, and those of derivatives, as in :func:`jflux.nn.row_parallel`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from .._ops._recipe import STATE, Recipe
from .._ops.attention.kv_cache import KVCache
from .._ops.attention.sequence_layouts import Layout
from .._ranks import global_arrays, meshes
from . import _attention, _dense, _flax, _moe, _vocabulary
from ._flax import Initializer, fp8_ops, in_one_type, meta, nn, options_of
from ._vocabulary import cross_entropy as cross_entropy

if TYPE_CHECKING:
    from ._dot_general import DotGeneral

Axes = tuple[str | None, ...]


def _param(
    module: Any, name: str, init: Any, axes: Axes, shape: Sequence[int], ranks: Any = None
) -> jax.Array:
    """A parameter of the whole model; inside shard_map, this rank's part of it. `ranks` are the
    mesh axes that it may be split over, by default the module's `axis_name`."""

    def boxed(key: jax.Array, *args: Any) -> Any:
        value = init(key, *args)
        if isinstance(value, meta.AxisMetadata):
            return value
        return nn.LogicallyPartitioned(value, axes)

    # Inside shard_map, `param` would find that this rank's part has not the whole shape.
    ranks = module.axis_name if ranks is None else ranks
    if meshes.is_bound(ranks) and module.has_variable("params", name):
        value = module.get_variable("params", name)
    else:
        value = module.param(name, boxed, tuple(shape), module.param_dtype, unbox=False)
    # The ops bring parameters into place; a constraint here would fail inside shard_map.
    if isinstance(value, meta.Partitioned):
        return value.unbox(apply_constraint=False)
    return meta.unbox(value)


class _Layer(nn.Module):
    """What layers of products have in common."""

    _: dataclasses.KW_ONLY
    axis_name: meshes.AxisName = "tp"
    sequence_parallel: bool = True
    x_spec: PartitionSpec | None = None
    use_bias: bool = True
    dtype: Any = None
    param_dtype: Any = jnp.float32
    precision: Any = None
    recipe: Recipe | None = None
    kernel_init: Initializer = _flax.kernel_init
    bias_init: Initializer = _flax.bias_init

    def weights(
        self, contracted: tuple[int, ...], features: tuple[int, ...], axes: Axes
    ) -> tuple[jax.Array, jax.Array | None]:
        """This layer's kernel and bias."""
        inputs = len(contracted)
        kernel_init = _flax.of_product(self.kernel_init, inputs)
        kernel = _param(self, "kernel", kernel_init, axes, (*contracted, *features))
        if not self.use_bias:
            return kernel, None
        return kernel, _param(self, "bias", self.bias_init, axes[inputs:], features)

    def product(self, name: str, *shape: Any) -> tuple[jax.Array, jax.Array | None]:
        """The kernel and bias of a product that is a part of this layer."""
        return _Product(
            name=name, axis_name=self.axis_name, use_bias=self.use_bias,
            param_dtype=self.param_dtype, kernel_init=self.kernel_init, bias_init=self.bias_init,
        )(*shape)  # fmt: skip


class _Product(_Layer):
    """Parameters under a name of their own."""

    @nn.compact
    def __call__(self, *shape: Any) -> tuple[jax.Array, jax.Array | None]:
        return self.weights(*shape)


class _SummingLayer(_Layer):
    """A layer whose last product is summed over the ranks."""

    _: dataclasses.KW_ONLY
    wire: str | None = None
    grad_wire: str | None = None


class ColumnParallelDense(_Layer):
    """``activation(x @ kernel + bias)``: x [..., s/N, k] -> [..., s, features/N] per rank of N.

    Attributes:
      features: of all ranks together.
      activation: None, "gelu", "gelu_tanh", "relu" or "silu"; inside the product.
    """

    features: int
    activation: str | None = None
    axes: Axes = ("embed", "mlp")

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """x [..., s/N, in] -> y [..., s, features/N] per rank of N: see
        :func:`jflux.nn.column_parallel`."""
        kernel, bias = self.weights((x.shape[-1],), (self.features,), self.axes)
        x, kernel, bias = in_one_type(self.dtype, x, kernel, bias)
        return _dense.column_parallel(
            x, kernel, bias=bias, activation=self.activation, **options_of(self)
        )


class RowParallelDense(_SummingLayer):
    """``x @ kernel + bias``: x [..., s, k/N] -> [..., s/N, features] per rank of N."""

    features: int
    axes: Axes = ("mlp", "embed")

    @nn.compact
    def __call__(self, x: jax.Array, residual: jax.Array | None = None) -> jax.Array:
        """Adds `residual` [..., s/N, features], if there is one, to the result."""
        kernel, bias = self.weights((x.shape[-1],), (self.features,), self.axes)
        x, kernel, bias = in_one_type(self.dtype, x, kernel, bias)
        return _dense.row_parallel(x, kernel, bias=bias, residual=residual, **options_of(self))


class MLP(_SummingLayer):
    """``down(activation(up(x)))``, or gated ``down(activation(gate(x)) * up(x))``: x [..., s/N, d]
    -> same per rank of N.

    Attributes:
      hidden_features: of all ranks together.
      axes: logical names of d and of the hidden features.
    """

    hidden_features: int
    activation: str = "gelu_tanh"
    gated: bool = False
    axes: Axes = ("embed", "mlp")

    @nn.compact
    def __call__(self, x: jax.Array, residual: jax.Array | None = None) -> jax.Array:
        """Adds `residual` [..., s/N, d], if there is one, to the result."""
        d, h = (x.shape[-1],), (self.hidden_features,)
        up = self.product("up", d, h, self.axes)
        down = self.product("down", h, d, self.axes[::-1])
        gate = self.product("gate", d, h, self.axes) if self.gated else ()
        x, *weights = in_one_type(self.dtype, x, *up, *down, *gate)
        return _dense.any_mlp(
            x, *weights, activation=self.activation, residual=residual, **options_of(self)
        )


class Attention(_SummingLayer):
    """Self-attention: x [b, s/N, d] -> same per rank of N, each with num_heads/N heads.

    Its parameters are those of ``flax.linen.MultiHeadDotProductAttention``: query, key, value
    [d, heads, head_dim] and out [heads, head_dim, d], each with a bias.

    Attributes:
      num_heads: of all ranks together; N divides it.
      num_kv_heads: heads of keys and values, a divisor of num_heads, which is the default. If N
        does not divide it, every rank computes all of them; name their axis None then, in `axes`.
      head_dim: d / num_heads by default.
      is_causal, rotate, core, context_axis, context_layout: as in :func:`jflux.nn.attention`.
      decode: the layer has a cache, and takes the tokens that follow those in it. As in Flax's own
        layer, ``init`` with a whole [b, S, d] makes the collection "cache", empty, and ``apply``
        wants it with ``mutable=["cache"]``: ``cached_key`` and ``cached_value`` [b, S, g, head_dim]
        and ``cache_index``, the lengths, int32 [b]. They are split as
        :func:`jflux.nn.cache_specs` says.
      cache_core: as in :func:`jflux.nn.attention`.
      cache_dtype: by default that of the layer's computation; of 8 bits, ``cached_key`` and
        ``cached_value`` are a :class:`jflux.Scaled` each.
      page_size, pages: of a paged cache, as in :func:`jflux.nn.init_cache`; ``cached_key`` and
        ``cached_value`` are then [pages of all ranks, page_size, g, head_dim].
      use_sinks: there is a parameter ``sinks`` [heads], a logit of each head in the denominator of
        its softmax (:func:`jflux.attention`). `bias_init` draws it.
      alibi_slopes: of all heads, numbers: ALiBi's (:func:`jflux.attention`), no parameters.
      axes: logical names of d, of heads, of heads of keys and values, and of a head's elements.
    """

    num_heads: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    is_causal: bool = False
    rotate: Callable[..., jax.Array] | None = None
    core: Callable[..., jax.Array] | None = None
    context_axis: meshes.AxisName | None = None
    context_layout: Layout = "zigzag"
    axes: Axes = ("embed", "heads", "kv_heads", "kv")
    _: dataclasses.KW_ONLY
    decode: bool = False
    cache_core: Callable[..., tuple[jax.Array, KVCache]] | None = None
    cache_dtype: Any = None
    page_size: int | None = None
    pages: int | None = None
    use_sinks: bool = False
    alibi_slopes: Sequence[float] | None = None

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        mask: jax.Array | None = None,
        residual: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        *,
        new_lengths: jax.Array | None = None,
        prefill: bool = False,
        block_table: jax.Array | None = None,
    ) -> jax.Array:
        """`mask`, `segment_ids`, and with `decode` `new_lengths` and `prefill`, are as in
        :func:`jflux.nn.attention`; `residual` [b, s/N, d] is added to the result. `block_table`,
        integers [b, P], says which pages of a paged cache the sequences have
        (:class:`jflux.KVCache`), one table for all layers; ``init`` needs none."""
        d = x.shape[-1]
        heads, kv_heads, c = _flax.sizes_of_attention(
            d, self.num_heads, self.num_kv_heads, self.head_dim
        )
        embed, heads_axis, kv_axis, c_axis = self.axes
        query = self.product("query", (d,), (heads, c), (embed, heads_axis, c_axis))
        key, value = (
            self.product(name, (d,), (kv_heads, c), (embed, kv_axis, c_axis))
            for name in ("key", "value")
        )
        out = self.product("out", (heads, c), (d,), (heads_axis, c_axis, embed))
        sinks = None
        if self.use_sinks:
            sinks = _param(self, "sinks", self.bias_init, (heads_axis,), (heads,))
        x, *weights = in_one_type(self.dtype, x, *query, *key, *value, *out)
        options: Any = {
            "bias": weights[1::2], "mask": mask, "residual": residual, "is_causal": self.is_causal,
            "num_kv_heads": kv_heads, "rotate": self.rotate, "core": self.core,
            "context_axis": self.context_axis, "context_layout": self.context_layout,
            "segment_ids": segment_ids, "sinks": sinks,
            "alibi_slopes": _flax.own_slopes(self.alibi_slopes, self.axis_name), **options_of(self),
        }  # fmt: skip
        if not self.decode:
            _flax.cache_of("linen", (), block_table, False)
            return _attention.attention(
                x, *weights[::2], new_lengths=new_lengths, prefill=prefill, **options
            )
        there = self.has_variable("cache", _flax.CACHED[0])

        def empty(field: int) -> Any:
            spec = global_arrays._spec(x, self.x_spec)
            cache = _flax.empty_cache(
                self, x.shape, heads, kv_heads, c, dtype=self.cache_dtype or x.dtype, x_spec=spec,
                page_size=self.page_size, pages=self.pages,
            )  # fmt: skip
            return cache[field]

        if not there and self.page_size is not None and block_table is None:
            block_table = jnp.zeros_like(empty(3))  # any page: the result is nobody's
        cached = [self.variable("cache", name, empty, i) for i, name in enumerate(_flax.CACHED)]
        y, cache = _attention.attention(
            x, *weights[::2],
            cache=_flax.cache_of(
                "linen", [variable.value for variable in cached], block_table,
                self.page_size is not None,
            ),
            new_lengths=new_lengths, prefill=prefill, cache_core=self.cache_core, **options,
        )  # fmt: skip
        if there:  # `init` leaves it empty
            for variable, array in zip(cached, cache[: len(cached)], strict=True):
                variable.value = array
        return y


class MoE(nn.Module):
    """A mixture of experts: x [..., s/N, d] -> same per rank of N along `axis_name`. See
    :func:`jflux.nn.mixture`.

    It sows into the collection "losses" ``load_balancing`` and ``z``, each times its weight, so
    that training adds their sum; and into "intermediates" ``tokens_per_expert`` and ``dropped``.

    Parameters: router [d, E], up and gate [E, d, F], down [E, F, d], and with `shared_features`
    shared_up, shared_gate [d, S] and shared_down [S, d]; with `use_router_bias` router_bias [E],
    which has gradient zero. With `physical_slots` up, gate and down have S in place of E, and are
    drawn for the placement ``np.arange(S) % E``.

    Attributes:
      num_experts: E, of all ranks together.
      hidden_features: F of an expert, of all ranks together.
      k: experts of a token.
      axis_name: the mesh axis that experts' hidden units are split over; None: none.
      expert_axis: the mesh axis that experts, and tokens, are split over; None: none.
      loss_axis: further mesh axes that tokens are split over, inside ``shard_map``.
      exchange: how tokens come to their experts' ranks, as :func:`jflux.nn.mixture` has it.
      capacity: how many slots an expert takes, or with a placement a physical slot; None: all.
      physical_slots: S, how many experts' weights there are, of all ranks together, for a
        `placement` with replicas; None: E.
      gated: experts have a gate.
      shared_features: S, the hidden units of an expert of all tokens; 0: there is none.
      select: a function of ``jflux.moe`` that chooses.
      recipe: a :class:`jflux.Recipe`, by which the experts' products are made in 8 bits.
      wire, grad_wire: how sums travel, as :func:`jflux.nn.mixture` has it.
      load_balancing_weight, z_weight: of the losses.
      axes: logical names of the experts, of d, and of the hidden units.
    """

    num_experts: int
    hidden_features: int
    k: int
    _: dataclasses.KW_ONLY
    axis_name: meshes.AxisName | None = "tp"
    expert_axis: meshes.AxisName | None = None
    loss_axis: meshes.AxisName | None = None
    sequence_parallel: bool = True
    x_spec: PartitionSpec | None = None
    exchange: str = "auto"
    capacity: int | None = None
    physical_slots: int | None = None
    activation: str = "silu"
    gated: bool = True
    shared_features: int = 0
    select: _moe.Select = _moe.moe.top_k_softmax
    use_router_bias: bool = False
    recipe: Recipe | None = None
    wire: str | None = None
    grad_wire: str | None = None
    load_balancing_weight: float = 1e-2
    z_weight: float = 1e-3
    dtype: Any = None
    param_dtype: Any = jnp.float32
    kernel_init: Initializer = _flax.kernel_init
    axes: Axes = ("expert", "embed", "mlp")

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        mask: jax.Array | None = None,
        placement: jax.Array | None = None,
    ) -> jax.Array:
        """The mixture of x [..., s/N, d]; with `expert_axis`, of each rank's own tokens. `mask`,
        bool [..., s/N], says which of them are tokens, and `placement`, integers [S], which expert
        each physical slot holds, as in :func:`jflux.nn.mixture`. Without one it is the placement
        that weights are drawn for."""
        ranks = meshes.axes_of(self.axis_name, self.expert_axis)

        def param(name: str, init: Any, axes: Axes, *shape: int) -> jax.Array:
            return _param(self, name, init, axes, shape, ranks=ranks)

        shapes = _moe.shapes_of(self, x.shape[-1])
        experts = _flax.of_experts(self.kernel_init, self.num_experts)
        inits = {3: experts, 2: self.kernel_init, 1: nn.initializers.zeros_init()}
        params = {
            name: param(name, inits[len(shape)], axes, *shape)
            for name, (shape, axes) in shapes.items()
        }
        out = _moe.of_layer(self, x, params, mask, placement)
        self.sow("losses", "load_balancing", self.load_balancing_weight * out.load_balancing)
        self.sow("losses", "z", self.z_weight * out.z)
        self.sow("intermediates", "tokens_per_expert", out.tokens_per_expert)
        self.sow("intermediates", "dropped", out.dropped)
        return out.y


class Embed(nn.Module):
    """A table of the vocabulary: tokens [..., s] -> [..., s/N, features] per rank of N, each with
    num_embeddings/N rows. The tokens are the same on all ranks.

    Attributes:
      num_embeddings: of all ranks together; N divides it.
    """

    num_embeddings: int
    features: int
    axis_name: meshes.AxisName = "tp"
    sequence_parallel: bool = True
    x_spec: PartitionSpec | None = None
    dtype: Any = None
    param_dtype: Any = jnp.float32
    embedding_init: Initializer = _flax.embedding_init
    axes: Axes = ("vocab", "embed")

    def setup(self) -> None:
        """Makes the table [num_embeddings, features], or this rank's rows of it."""
        shape = (self.num_embeddings, self.features)
        self.embedding = _param(self, "embedding", self.embedding_init, self.axes, shape)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Rows of the table: tokens [..., s] -> [..., s/N, features] per rank of N with
        `sequence_parallel`, else [..., s, features]."""
        return _vocabulary.embed(
            tokens, self.embedding, axis_name=self.axis_name, dtype=self.dtype,
            sequence_parallel=self.sequence_parallel, x_spec=self.x_spec,
        )  # fmt: skip

    def attend(self, x: jax.Array) -> jax.Array:
        """Logits ``x @ embedding.T`` of a head that shares the table: x [..., s/N, features] ->
        [..., s, num_embeddings/N], for :func:`jflux.nn.cross_entropy`."""
        x, table = in_one_type(self.dtype, x, self.embedding)
        return _dense.column_parallel(
            x, table, axis_name=self.axis_name, sequence_parallel=self.sequence_parallel,
            transpose_rhs=True, x_spec=self.x_spec,
        )  # fmt: skip


class DotGeneralModule(nn.Module):
    """A :class:`jflux.nn.DotGeneral` as a module without parameters, for those who want one. See
    :meth:`jflux.nn.TensorParallel.dot_general_cls`."""

    dot: Callable[..., Any]  # a DotGeneral

    def __call__(self, *args: Any, **kwargs: Any) -> jax.Array:
        """As `lax.dot_general`, and as the wrapped function takes and returns them."""
        return self.dot(*args, **kwargs)


class Fp8DirectDotGeneralOp(fp8_ops.Fp8DirectDotGeneralOp):
    """A :class:`jflux.nn.DotGeneral` with a :class:`jflux.DelayedScaling`, which has the name and
    the state of Flax's own module, in the collection "_overwrite_with_gradient": its checkpoints
    are those of this one, and ``flax.training.train_state.TrainState`` updates it. See
    :meth:`jflux.nn.TensorParallel.dot_general_cls`."""

    dot: DotGeneral | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> jax.Array:
        """As `lax.dot_general`."""
        assert self.dot is not None
        arrays = {name: getattr(self, name).value for name in STATE}
        return self.dot.with_state(arrays)(*args, **kwargs)
