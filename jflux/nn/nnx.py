"""Tensor-parallel layers for Flax NNX.

The same as those of :mod:`jflux.nn.linen`, with the same names for what they have; in NNX they are
made with the sizes of their inputs and with `rngs`. Parameters have the shapes of the whole model
and carry logical axis names (``out_sharding``). A layer is made outside of ``shard_map``, under
``jax.set_mesh(mesh)``, where Flax puts each parameter where its names say. It is called there,
under ``jit``, on global arrays, or inside ``jax.shard_map`` on one rank's.

Options of all layers, beside those of Flax's own of like names (`use_bias`, `dtype`, `param_dtype`,
`precision`, `kernel_init`, `bias_init`):

- `axis_name`, `sequence_parallel`, `x_spec`, `recipe`: as in :mod:`jflux.nn.linen`; so are `wire`
  and `grad_wire`, of all but :class:`ColumnParallelDense`.
- `rules`: which mesh axes the logical names stand for. By default the context's
  (``flax.nnx.logical_axis_rules``), or if there are none :func:`jflux.nn.logical_axis_rules`.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from .. import _config
from .._ops._recipe import STATE, Recipe
from .._ops.attention.kv_cache import KVCache
from .._ops.attention.sequence_layouts import Layout
from .._ranks.meshes import AxisName, axes_of
from . import _attention, _dense, _flax, _moe, _rules, _vocabulary
from ._dot_general import DotGeneral, TensorParallel
from ._flax import Initializer, in_one_type, nnx, options_of
from ._vocabulary import cross_entropy as cross_entropy

Axes = tuple[str | None, ...]

#: What can be done about a dimension that the ranks do not divide, by its logical name.
_REMEDIES = {
    "kv_heads": '; axes=("embed", "heads", None, "kv") has every rank compute all of them',
    "vocab": "; make the table larger: num_embeddings need not be the number of tokens",
}


def _param(value: jax.Array, axes: Axes, axis_name: AxisName, rules: _rules.Rules | None) -> Any:
    metadata: dict[str, Any] = {"out_sharding": axes}
    if rules is None and not _rules.ambient_rules():
        rules = _rules.logical_axis_rules(axis_name)
    if rules is not None:  # Flax adds them to the context's, and the two may not differ
        metadata["sharding_rules"] = tuple(rules)
    _warn_of_two_rules(axes, _rules.ambient_rules() if rules is None else rules)
    try:
        return nnx.Param(value, **metadata)
    except ValueError as error:
        why = _why_no_place(value.shape, axes, axis_name, rules or _rules.ambient_rules())
        if why is None:
            raise
        raise ValueError(f"jflux.nn.nnx: {why}") from error


def _warn_of_two_rules(axes: Axes, rules: _rules.Rules) -> None:
    mesh = jax.sharding.get_abstract_mesh()
    split = [axis for axis, size in mesh.shape.items() if size > 1]
    name = _rules.ambiguous(axes, rules, split)
    if name is not None:
        found = [target for logical, target in rules if logical == name]
        _config.say_once(
            logging.WARNING,
            f"jflux.nn.nnx: the rules map {name!r} to each of {found}; NNX takes the last of them, "
            f"linen the first. Give it one rule: jflux.nn.logical_axis_rules(..., {name}=...)",
        )


def _why_no_place(
    shape: tuple[int, ...], axes: Axes, axis_name: AxisName | None, rules: _rules.Rules
) -> str | None:
    """Why Flax cannot place a parameter on the context's mesh, in the layer's words; None: for
    another reason."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return "there is no mesh: make the layer under jax.set_mesh(mesh)"
    missing = [name for name in axes_of(axis_name) if name not in mesh.axis_names]
    if missing:
        return f"{axis_name=} of the layer names {missing}, but the mesh has axes {mesh.axis_names}"
    for size, name, split in zip(shape, axes, _rules.mesh_axes(axes, rules), strict=True):
        missing = [one for one in split if one not in mesh.axis_names]
        if missing:
            return (
                f"by the rules {name!r}, a dimension of a parameter {shape} with axes {axes}, is "
                f"split over {missing}, but the mesh has axes {mesh.axis_names}"
            )
        devices = math.prod(mesh.shape[one] for one in split)
        if size % devices:
            return (
                f"the {devices} ranks of mesh axes {split} do not divide the {size} of {name!r}, "
                f"a dimension of a parameter {shape} with axes {axes}{_REMEDIES.get(str(name), '')}"
            )
    return None


@dataclasses.dataclass(frozen=True)
class _New:
    """How parameters of a layer are drawn. The layer does not keep it: initializers are closures,
    which cannot be pickled."""

    rngs: nnx.Rngs
    kernel_init: Initializer
    bias_init: Initializer


class _Layer(nnx.Module):
    """What layers of products have in common."""

    def __init__(
        self,
        *,
        axis_name: AxisName = "tp",
        sequence_parallel: bool = True,
        x_spec: PartitionSpec | None = None,
        use_bias: bool = True,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        precision: Any = None,
        recipe: Recipe | None = None,
        rules: _rules.Rules | None = None,
    ):
        self.axis_name = axis_name
        self.sequence_parallel = sequence_parallel
        self.x_spec = x_spec
        self.use_bias = use_bias
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.precision = precision
        self.recipe = recipe
        self.rules = None if rules is None else tuple(rules)

    def make(
        self,
        new: _New,
        contracted: tuple[int, ...],
        features: tuple[int, ...],
        axes: Axes,
    ) -> None:
        """This layer's kernel and bias, as ``flax.nnx.LinearGeneral`` has them: `contracted` and
        `features` are the kernel's dimensions, `axes` their logical names."""
        inputs = len(contracted)
        init = _flax.of_product(new.kernel_init, inputs)
        kernel = init(new.rngs.params(), (*contracted, *features), self.param_dtype)
        self.kernel = _param(kernel, axes, self.axis_name, self.rules)
        if self.use_bias:
            bias = new.bias_init(new.rngs.params(), features, self.param_dtype)
            self.bias = _param(bias, axes[inputs:], self.axis_name, self.rules)

    def product(self, new: _New, *shape: Any) -> _Layer:
        """The kernel and bias of a product that is a part of this layer."""
        product = _Layer(
            axis_name=self.axis_name, use_bias=self.use_bias, param_dtype=self.param_dtype,
            rules=self.rules,
        )  # fmt: skip
        product.make(new, *shape)
        return product

    def weights(self) -> tuple[jax.Array, jax.Array | None]:
        return self.kernel[...], self.bias[...] if self.use_bias else None


class _SummingLayer(_Layer):
    """A layer whose last product is summed over the ranks."""

    def __init__(self, *, wire: str | None = None, grad_wire: str | None = None, **options: Any):
        super().__init__(**options)
        self.wire, self.grad_wire = wire, grad_wire


class ColumnParallelDense(_Layer):
    """``activation(x @ kernel + bias)``: x [..., s/N, in_features] -> [..., s, out_features/N] per
    rank of N.

    Args:
      in_features, out_features: of all ranks together.
      activation: None, "gelu", "gelu_tanh", "relu" or "silu"; inside the product.
      axes: logical names of the kernel's dimensions.
      options: of all layers; see :mod:`jflux.nn.nnx`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        rngs: nnx.Rngs,
        activation: str | None = None,
        axes: Axes = ("embed", "mlp"),
        kernel_init: Initializer = _flax.kernel_init,
        bias_init: Initializer = _flax.bias_init,
        **options: Any,
    ):
        super().__init__(**options)
        new = _New(rngs, kernel_init, bias_init)
        self.activation = activation
        self.make(new, (in_features,), (out_features,), axes)

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [..., s/N, in_features] -> y [..., s, out_features/N] per rank of N: see
        :func:`jflux.nn.column_parallel`."""
        x, kernel, bias = in_one_type(self.dtype, x, *self.weights())
        return _dense.column_parallel(
            x, kernel, bias=bias, activation=self.activation, **options_of(self)
        )


class RowParallelDense(_SummingLayer):
    """``x @ kernel + bias``: x [..., s, in_features/N] -> [..., s/N, out_features] per rank of N.

    Arguments are those of :class:`ColumnParallelDense`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        rngs: nnx.Rngs,
        axes: Axes = ("mlp", "embed"),
        kernel_init: Initializer = _flax.kernel_init,
        bias_init: Initializer = _flax.bias_init,
        **options: Any,
    ):
        super().__init__(**options)
        new = _New(rngs, kernel_init, bias_init)
        self.make(new, (in_features,), (out_features,), axes)

    def __call__(self, x: jax.Array, residual: jax.Array | None = None) -> jax.Array:
        """Adds `residual` [..., s/N, out_features], if there is one, to the result."""
        x, kernel, bias = in_one_type(self.dtype, x, *self.weights())
        return _dense.row_parallel(x, kernel, bias=bias, residual=residual, **options_of(self))


class MLP(_SummingLayer):
    """``down(activation(up(x)))``, or gated ``down(activation(gate(x)) * up(x))``: x [..., s/N,
    features] -> same per rank of N.

    Args:
      features: of x and of the result.
      hidden_features: of all ranks together.
      axes: logical names of the two.
      options: of all layers; see :mod:`jflux.nn.nnx`.
    """

    def __init__(
        self,
        features: int,
        hidden_features: int,
        *,
        rngs: nnx.Rngs,
        activation: str = "gelu_tanh",
        gated: bool = False,
        axes: Axes = ("embed", "mlp"),
        kernel_init: Initializer = _flax.kernel_init,
        bias_init: Initializer = _flax.bias_init,
        **options: Any,
    ):
        super().__init__(**options)
        new = _New(rngs, kernel_init, bias_init)
        self.activation, self.gated = activation, gated
        d, h = (features,), (hidden_features,)
        self.up = self.product(new, d, h, axes)
        self.down = self.product(new, h, d, axes[::-1])
        if gated:
            self.gate = self.product(new, d, h, axes)

    def __call__(self, x: jax.Array, residual: jax.Array | None = None) -> jax.Array:
        """Adds `residual` [..., s/N, features], if there is one, to the result."""
        products = (self.up, self.down, self.gate) if self.gated else (self.up, self.down)
        x, *weights = in_one_type(self.dtype, x, *(a for one in products for a in one.weights()))
        return _dense.any_mlp(
            x, *weights, activation=self.activation, residual=residual, **options_of(self)
        )


class Attention(_SummingLayer):
    """Self-attention: x [b, s/N, in_features] -> same per rank of N, each with num_heads/N heads.

    Its parameters have the names and shapes of ``flax.nnx.MultiHeadAttention``'s: query, key, value
    [in_features, heads, head_dim] and out [heads, head_dim, in_features], each with a bias.

    Args:
      num_heads: of all ranks together; N divides it.
      num_kv_heads: heads of keys and values, a divisor of num_heads, which is the default. If N
        does not divide it, every rank computes all of them; name their axis None then, in `axes`.
      head_dim: in_features / num_heads by default.
      is_causal, rotate, core, context_axis, context_layout: as in :func:`jflux.nn.attention`.
      decode: calls take the tokens that follow those in the layer's cache, which
        :meth:`init_cache` makes. ``model.set_attributes(decode=True)`` sets it later.
      cache_core: as in :func:`jflux.nn.attention`.
      use_sinks: there is a parameter ``sinks`` [heads], a logit of each head in the denominator of
        its softmax (:func:`jflux.attention`). `bias_init` draws it.
      alibi_slopes: of all heads, numbers: ALiBi's (:func:`jflux.attention`), no parameters.
      axes: logical names of the width, of heads, of heads of keys and values, and of a head's
        elements.
      options: of all layers; see :mod:`jflux.nn.nnx`.
    """

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        *,
        rngs: nnx.Rngs,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        is_causal: bool = False,
        rotate: Callable[..., jax.Array] | None = None,
        core: Callable[..., jax.Array] | None = None,
        context_axis: AxisName | None = None,
        context_layout: Layout = "zigzag",
        decode: bool = False,
        cache_core: Callable[..., tuple[jax.Array, KVCache]] | None = None,
        use_sinks: bool = False,
        alibi_slopes: Sequence[float] | None = None,
        axes: Axes = ("embed", "heads", "kv_heads", "kv"),
        kernel_init: Initializer = _flax.kernel_init,
        bias_init: Initializer = _flax.bias_init,
        **options: Any,
    ):
        super().__init__(**options)
        new = _New(rngs, kernel_init, bias_init)
        self.is_causal, self.rotate, self.core = is_causal, rotate, core
        self.context_axis, self.context_layout = context_axis, context_layout
        self.decode, self.cache_core, self.paged = decode, cache_core, False
        heads, self.num_kv_heads, c = _flax.sizes_of_attention(
            in_features, num_heads, num_kv_heads, head_dim
        )
        self.num_heads, self.head_dim = heads, c
        embed, heads_axis, kv_axis, c_axis = axes
        d = (in_features,)
        self.query = self.product(new, d, (heads, c), (embed, heads_axis, c_axis))
        self.key = self.product(new, d, (self.num_kv_heads, c), (embed, kv_axis, c_axis))
        self.value = self.product(new, d, (self.num_kv_heads, c), (embed, kv_axis, c_axis))
        self.out = self.product(new, (heads, c), d, (heads_axis, c_axis, embed))
        self.alibi_slopes = None if alibi_slopes is None else tuple(alibi_slopes)
        self.use_sinks = use_sinks
        if use_sinks:
            sinks = bias_init(rngs.params(), (heads,), self.param_dtype)
            self.sinks = _param(sinks, (heads_axis,), self.axis_name, self.rules)

    def __call__(
        self,
        x: jax.Array,
        mask: jax.Array | None = None,
        residual: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        *,
        new_lengths: jax.Array | None = None,
        prefill: bool = False,
        decode: bool | None = None,
        block_table: jax.Array | None = None,
    ) -> jax.Array:
        """`mask`, `segment_ids`, and with a cache `new_lengths` and `prefill`, are as in
        :func:`jflux.nn.attention`; `residual` [b, s/N, in_features] is added to the result.
        `decode` is for this call, in place of the layer's. `block_table`, integers [b, P], says
        which pages of a paged cache the sequences have (:class:`jflux.KVCache`), one table for all
        layers."""
        products = (self.query, self.key, self.value, self.out)
        x, *weights = in_one_type(self.dtype, x, *(a for one in products for a in one.weights()))
        cached: list[Any] = []
        if self.decode if decode is None else decode:
            cached = [getattr(self, name, None) for name in _flax.CACHED]
            if any(variable is None for variable in cached):
                raise ValueError(
                    "jflux.nn.nnx.Attention: there is no cache; call init_cache of the layer first"
                )
        found = _attention.attention(
            x, *weights[::2], bias=weights[1::2], mask=mask, residual=residual,
            is_causal=self.is_causal, num_kv_heads=self.num_kv_heads, rotate=self.rotate,
            core=self.core, context_axis=self.context_axis, context_layout=self.context_layout,
            segment_ids=segment_ids, sinks=self.sinks[...] if self.use_sinks else None,
            alibi_slopes=_flax.own_slopes(self.alibi_slopes, self.axis_name),
            new_lengths=new_lengths, prefill=prefill,
            cache=_flax.cache_of("nnx", [a.get_value() for a in cached], block_table, self.paged),
            cache_core=self.cache_core, **options_of(self),
        )  # fmt: skip
        if not cached:
            return found
        for variable, array in zip(cached, found[1][: len(cached)], strict=True):
            variable.set_value(array)  # keys and values may be pairs, of 8 bits and scales
        return found[0]

    def init_cache(
        self,
        input_shape: tuple[int, ...],
        dtype: Any = None,
        *,
        page_size: int | None = None,
        pages: int | None = None,
    ) -> None:
        """Makes the cache, empty, or empties it: ``cached_key`` and ``cached_value``
        [b, S, g, head_dim] and ``cache_index``, the lengths, int32 [b], as ``nnx.Cache``. They are
        split as :func:`jflux.nn.cache_specs` says.

        Args:
          input_shape: (b, S, in_features), S for the longest sequence.
          dtype: by default that of the layer's computation; of 8 bits, keys and values are a
            :class:`jflux.Scaled` each.
          page_size, pages: of a paged cache, as in :func:`jflux.nn.init_cache`; keys and values are
            then [pages of all ranks, page_size, g, head_dim], and calls need `block_table`.
        """
        dtype = dtype or self.dtype or self.param_dtype
        heads = (self.num_heads, self.num_kv_heads, self.head_dim)
        cache = _flax.empty_cache(
            self, input_shape, *heads, dtype=dtype, x_spec=self.x_spec, page_size=page_size,
            pages=pages,
        )  # fmt: skip
        self.paged = page_size is not None
        for name, array in zip(_flax.CACHED, cache[: len(_flax.CACHED)], strict=True):
            setattr(self, name, nnx.Cache(array))


class Loss(nnx.Variable):
    """A term that training adds to its loss: ``nnx.pop(model, Loss)`` has them after a call."""


class OverwriteWithGradient(nnx.Variable):
    """An array whose gradient is its next value::

    wrt = nnx.DiffState(0, nnx.Any(nnx.Param, OverwriteWithGradient))
    loss, grads = nnx.value_and_grad(loss_of, argnums=wrt)(model, x)
    state, grads = grads.split(OverwriteWithGradient, ...)
    nnx.update(model, state)
    """


class DelayedDotGeneral(nnx.Module):
    """A :class:`jflux.nn.DotGeneral` with a :class:`jflux.DelayedScaling`, for
    ``nnx.Linear(dot_general=...)``. Each layer has one of its own.

    Its state has the names that :class:`jflux.nn.linen.Fp8DirectDotGeneralOp`'s has.

    Args:
      of: has a recipe and an `amax_history_length`.
      mesh_axes: as in :meth:`jflux.nn.TensorParallel.dot_general`.
    """

    def __init__(self, of: TensorParallel, mesh_axes: Sequence[Any] = ()):
        if not isinstance(of.recipe, Recipe) or of.amax_history_length is None:
            raise ValueError(
                "jflux.nn.nnx.DelayedDotGeneral: the TensorParallel has a recipe and an "
                "amax_history_length"
            )
        self.dot = DotGeneral(of, tuple(mesh_axes))
        state = of.recipe.delayed(of.amax_history_length)
        for name in STATE:
            setattr(self, name, OverwriteWithGradient(getattr(state, name)))

    def __call__(self, *args: Any, **kwargs: Any) -> jax.Array:
        """As `lax.dot_general`."""
        arrays = {name: getattr(self, name)[...] for name in STATE}
        return self.dot.with_state(arrays)(*args, **kwargs)


class MoE(nnx.Module):
    """A mixture of experts: x [..., s/N, d] -> same per rank of N along `axis_name`. See
    :func:`jflux.nn.mixture`.

    It sows ``load_balancing`` and ``z``, each times its weight, as :class:`Loss`, and
    ``tokens_per_expert`` and ``dropped`` as ``nnx.Intermediate``; `sows=False` leaves that out,
    where nobody takes them. Its parameters and options are those of :class:`jflux.nn.linen.MoE`.

    Args:
      features: d.
      num_experts, hidden_features, k: as in linen.
      rules: as in all layers; by default "expert" stands for `expert_axis`.
    """

    def __init__(
        self,
        features: int,
        num_experts: int,
        hidden_features: int,
        k: int,
        *,
        rngs: nnx.Rngs,
        axis_name: AxisName | None = "tp",
        expert_axis: AxisName | None = None,
        loss_axis: AxisName | None = None,
        sequence_parallel: bool = True,
        x_spec: PartitionSpec | None = None,
        exchange: str = "auto",
        capacity: int | None = None,
        physical_slots: int | None = None,
        activation: str = "silu",
        gated: bool = True,
        shared_features: int = 0,
        select: _moe.Select = _moe.moe.top_k_softmax,
        use_router_bias: bool = False,
        recipe: Recipe | None = None,
        wire: str | None = None,
        grad_wire: str | None = None,
        load_balancing_weight: float = 1e-2,
        z_weight: float = 1e-3,
        sows: bool = True,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: Initializer = _flax.kernel_init,
        axes: Axes = ("expert", "embed", "mlp"),
        rules: _rules.Rules | None = None,
    ):
        self.num_experts, self.hidden_features, self.k = num_experts, hidden_features, k
        self.axis_name, self.expert_axis, self.loss_axis = axis_name, expert_axis, loss_axis
        self.sequence_parallel, self.x_spec = sequence_parallel, x_spec
        self.exchange, self.capacity, self.physical_slots = exchange, capacity, physical_slots
        self.activation, self.gated, self.shared_features = activation, gated, shared_features
        self.select, self.use_router_bias, self.recipe = select, use_router_bias, recipe
        self.wire, self.grad_wire = wire, grad_wire
        self.load_balancing_weight, self.z_weight, self.sows = load_balancing_weight, z_weight, sows
        self.dtype, self.axes = dtype, axes
        if rules is None and not _rules.ambient_rules():
            rules = _rules.logical_axis_rules(axis_name, expert_axis=expert_axis)
        init: dict[int, Initializer] = {
            3: _flax.of_experts(kernel_init, num_experts), 2: kernel_init, 1: _flax.bias_init,
        }  # fmt: skip
        shapes = _moe.shapes_of(self, features)
        for name, (shape, names) in shapes.items():
            value = init[len(shape)](rngs.params(), shape, param_dtype)
            setattr(self, name, _param(value, names, axis_name, rules))
        self.names = tuple(shapes)

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
        params = {name: getattr(self, name)[...] for name in self.names}
        out = _moe.of_layer(self, x, params, mask, placement)
        if self.sows:
            self.sow(Loss, "load_balancing", self.load_balancing_weight * out.load_balancing)
            self.sow(Loss, "z", self.z_weight * out.z)
            self.sow(nnx.Intermediate, "tokens_per_expert", out.tokens_per_expert)
            self.sow(nnx.Intermediate, "dropped", out.dropped)
        return out.y


class Embed(nnx.Module):
    """A table of the vocabulary: tokens [..., s] -> [..., s/N, features] per rank of N, each with
    num_embeddings/N rows. The tokens are the same on all ranks.

    Args:
      num_embeddings: of all ranks together; N divides it.
    """

    def __init__(
        self,
        num_embeddings: int,
        features: int,
        *,
        rngs: nnx.Rngs,
        axis_name: AxisName = "tp",
        sequence_parallel: bool = True,
        x_spec: PartitionSpec | None = None,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        embedding_init: Initializer = _flax.embedding_init,
        axes: Axes = ("vocab", "embed"),
        rules: _rules.Rules | None = None,
    ):
        self.axis_name, self.sequence_parallel, self.x_spec = axis_name, sequence_parallel, x_spec
        self.dtype = dtype
        table = embedding_init(rngs.params(), (num_embeddings, features), param_dtype)
        self.embedding = _param(table, axes, axis_name, rules)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Rows of the table: tokens [..., s] -> [..., s/N, features] per rank of N with
        `sequence_parallel`, else [..., s, features]."""
        return _vocabulary.embed(
            tokens, self.embedding[...], axis_name=self.axis_name, dtype=self.dtype,
            sequence_parallel=self.sequence_parallel, x_spec=self.x_spec,
        )  # fmt: skip

    def attend(self, x: jax.Array) -> jax.Array:
        """Logits ``x @ embedding.T`` of a head that shares the table: x [..., s/N, features] ->
        [..., s, num_embeddings/N], for :func:`jflux.nn.cross_entropy`."""
        x, table = in_one_type(self.dtype, x, self.embedding[...])
        return _dense.column_parallel(
            x, table, axis_name=self.axis_name, sequence_parallel=self.sequence_parallel,
            transpose_rhs=True, x_spec=self.x_spec,
        )  # fmt: skip
