"""Mixtures of experts over tensor- and expert-parallel ranks, as a function of arrays."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from .. import moe
from .._call import explain, plans
from .._call.local_ops import unread_rest
from .._ops import _epilogue, _lax
from .._ops._lax import several
from .._ops._recipe import Recipe
from .._ops.collectives.all_reduce import all_reduce
from .._ops.collectives.exchange import all_gather, reduce_scatter
from .._ops.experts import (
    all_gather_grouped_matmul,
    dispatch_grouped_matmul,
    grouped_matmul_reduce_scatter,
    moe_dispatch,
    moe_gate,
)
from .._ops.experts._checks import check_mask
from .._ops.experts.losses import has_expert
from .._ops.experts.placement import check_placement, shares
from .._ops.products.grouped_matmul import Moved, grouped_matmul, of_dispatched, recipe_of
from .._ranks import global_arrays, meshes
from .._ranks.meshes import AxisName
from . import _dense, _moe_exchange

#: logits [T, E], k -> (indices i32 [T, k], weights [T, k])
Select = Callable[..., tuple[jax.Array, jax.Array]]


class MixtureOutput(NamedTuple):
    """What a mixture of experts gives.

    Attributes:
      y: as x.
      load_balancing: [], :func:`jflux.moe.load_balancing_loss` of all tokens.
      z: [], :func:`jflux.moe.z_loss` of all tokens, which are the same: those with an expert.
      tokens_per_expert: i32 [E], slots that chose each expert, of all tokens, with those dropped.
      dropped: i32 [], slots of all tokens that found no place in the `capacity` of their expert, or
        with a `placement` of their physical slot, or whose expert has no physical slot.
    """

    y: jax.Array
    load_balancing: jax.Array
    z: jax.Array
    tokens_per_expert: jax.Array
    dropped: jax.Array


@meshes.axis_by_name
def mixture(
    x: jax.Array,
    router: jax.Array,
    up: jax.Array,
    down: jax.Array,
    gate: jax.Array | None = None,
    *,
    k: int,
    axis_name: AxisName | None = None,
    expert_axis: AxisName | None = None,
    sequence_parallel: bool = True,
    loss_axis: AxisName | None = None,
    exchange: str = "auto",
    capacity: int | None = None,
    activation: str = "silu",
    select: Select = moe.top_k_softmax,
    router_bias: jax.Array | None = None,
    shared: Sequence[jax.Array] | None = None,
    mask: jax.Array | None = None,
    placement: jax.Array | None = None,
    recipe: Recipe | None = None,
    wire: str | None = None,
    grad_wire: str | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    x_spec: PartitionSpec | None = None,
) -> MixtureOutput:
    """``y = sum over the k experts e of a token: weight_e expert_e(x)``, where an expert is
    ``activation(x @ up_e) @ down_e``, or with a gate
    ``(activation(x @ gate_e) * (x @ up_e)) @ down_e``.

    Per rank of N along `axis_name` and M along `expert_axis`, inside ``jax.shard_map``::

        x [..., s/N, d]   router [d, E]   gate, up [E/M, d, F/N]   down [E/M, F/N, d]

    Every rank chooses for its own tokens. How these come to their experts is `exchange`'s to say:

    - "auto": a dispatch of up to 8192 tokens of all ranks, in one kernel, and where a token's
      experts lie on less than .9 of the ranks, on average; else a gather. :func:`jflux.explain`
      says which, and why.
    - "gather": each rank gathers the tokens and choices of all N M ranks, computes its part of its
      experts for all of them, and the sums are scattered: :func:`jflux.all_gather`, two calls of
      :func:`jflux.grouped_matmul`, :func:`jflux.reduce_scatter`.
    - "dispatch": each rank gathers those along `axis_name` alone. Along `expert_axis` a token goes
      to the ranks of its experts, and the sum of what they give back from each:
      :func:`jflux.moe_dispatch` with partial sums, the same two products,
      :func:`jflux.moe_combine`, and a reduce-scatter along `axis_name`.
    - "fused": as "gather", in :func:`jflux.moe.all_gather_grouped_matmul` and
      :func:`jflux.moe.grouped_matmul_reduce_scatter`, which are kernels for some shapes. The
      backward pass gathers again; permuted rows are not kept.

    Values, losses and gradients are the same up to rounding. The guide "Mixtures of experts" has
    the bytes and times of each. Without a `capacity` nothing is dropped. All sizes stay on the
    device. Without axes it computes on one device.

    Along `axis_name` each expert's hidden units are split (tensor parallel), along `expert_axis`
    the experts are (expert parallel), and tokens along both. With ``sequence_parallel=False`` x is
    the same on all ranks along `axis_name`, and so is y.

    Outside ``shard_map`` it takes global arrays, and wraps itself in one.

    Args:
      x: [..., s/N, d]. With `expert_axis` the ranks along it have different tokens, of the first
        dimension where x is a global array.
      router: [d, E]; logits are computed in float32.
      up, gate, down: the experts.
      k: experts of a token.
      loss_axis: further mesh axes that tokens are split over, such as that of data parallelism. The
        losses and counts are of all tokens. Of global arrays it is known. Tokens that are the same
        along one of the axes count once, which ``check_vma=True`` knows; without it they count for
        each of its ranks.
      exchange: "auto", "gather", "dispatch" or "fused". "dispatch" needs `expert_axis`; "fused"
        takes neither a `recipe` nor weights that are quantised.
      capacity: an expert takes so many slots of the tokens of all N M ranks, the first ones in the
        order of ranks along (`expert_axis`, `axis_name`), tokens and choices; others are dropped,
        and add nothing to y. It is the same for all exchanges. None: it takes all.
      activation: "gelu", "gelu_tanh", "relu" or "silu".
      select: chooses: ``select(logits, k)``, or with `router_bias` ``select(logits, k, bias=...)``;
        a function of ``jflux.moe``, perhaps with options by `functools.partial`.
      router_bias: [E], for the choice alone.
      shared: (up [d, S/N], down [S/N, d]) or (up, down, gate [d, S/N]): an expert of all tokens.
      mask: bool [..., s/N], as x; False: no token, such as padding. Its x may be NaN and reaches
        nothing: its y is zero, of `shared` too, its gradients are zeros, and neither losses, counts
        nor `capacity` know of it. `select` sees zeros in place of its logits, and what it chooses
        for them does not matter. None: all are tokens.
      placement: [S] integers, the expert that each physical slot holds, the same on all ranks. It
        may change without compiling again. `up`, `gate` and `down` are then of physical slots,
        [S/M, ...] on each rank. Tokens of an expert take its physical slots in turn, as
        :func:`jflux.moe.place` says, in the order that `capacity` has, which is a physical slot's.
        Each of these has the gradient of its own tokens: :func:`jflux.moe.sum_replicas`. An expert
        without one drops its tokens. None: one for each expert, in order.
      recipe: a :class:`jflux.Recipe`, by which the experts' products, and those of `shared`, are
        made in 8 bits. A dispatch sends tokens in 8 bits too; they are chosen for as without.
      wire: "float8_e4m3fn" or "int8": what brings sums back to tokens' ranks travels quantised, as
        in :func:`jflux.reduce_scatter`, :func:`jflux.all_reduce`, :func:`jflux.moe_combine` or
        :func:`jflux.moe.grouped_matmul_reduce_scatter`, and in `shared` as in :func:`mlp`.
      grad_wire: likewise, of their derivatives.
      mesh, x_spec: for global arrays, as in :func:`column_parallel`.

    Returns:
      y, losses and counts.

    Raises:
      ValueError, TypeError: operands that do not fit, when the call is traced.
    """
    options = _Options(
        k, axis_name, expert_axis, sequence_parallel, exchange, capacity, activation, select,
        recipe, wire, grad_wire,
    )  # fmt: skip
    options.check(x, router)
    if mask is not None:
        mask = check_mask("jflux.nn.mixture", mask, x.shape[:-1])
    if placement is not None:
        placement = check_placement("nn.mixture", placement, router.shape[1])
    operands: dict[str, Any] = {
        "x": x, "router": router, "up": up, "down": down, "gate": gate,
        "router_bias": router_bias, "shared": None if shared is None else tuple(shared),
        "mask": mask, "placement": placement,
    }  # fmt: skip
    axes = meshes.axes_of(axis_name, expert_axis)
    if not axes or meshes.is_bound(axes):
        return _mixture(options, meshes.axes_of(loss_axis), **operands)
    return _over_global_arrays(options, operands, axes, mesh, x_spec)


@dataclasses.dataclass(frozen=True)
class _Options:
    """The options of a call, as :func:`mixture` takes them."""

    k: int
    axis_name: AxisName | None
    expert_axis: AxisName | None
    sequence_parallel: bool
    exchange: str
    capacity: int | None
    activation: str
    select: Select
    recipe: Recipe | None
    wire: str | None
    grad_wire: str | None

    @property
    def wires(self) -> dict[str, Any]:
        return {"wire": self.wire, "grad_wire": self.grad_wire}

    def check(self, x: jax.Array, router: jax.Array) -> None:
        """Raises for options or operands that do not fit."""
        exchange, capacity = self.exchange, self.capacity
        if exchange not in _moe_exchange.EXCHANGES:
            known = _moe_exchange.EXCHANGES
            raise ValueError(f"jflux.nn.mixture: {exchange=} must be one of {known}")
        if exchange == "dispatch" and self.expert_axis is None:
            raise ValueError(
                "jflux.nn.mixture: exchange='dispatch' sends tokens along expert_axis, which is "
                "None; name it, or take exchange='gather'"
            )
        if capacity is not None:
            if not isinstance(capacity, int | np.integer) or isinstance(capacity, bool):
                raise TypeError(
                    f"jflux.nn.mixture: capacity must be an int or None, got {capacity!r}"
                )
            if capacity < 1:
                raise ValueError(f"jflux.nn.mixture: {capacity=} must be at least 1")
        if x.ndim < 2 or router.ndim != 2 or router.shape[0] != x.shape[-1]:
            raise ValueError(
                f"jflux.nn.mixture: x {x.shape} must be [..., s, d] and router {router.shape} "
                "[d, E]"
            )


@dataclasses.dataclass(frozen=True)
class _Experts:
    """This rank's experts, or physical slots: weights [E/M, ...], and what they do between two
    products, of `expected_rows`, about."""

    up: jax.Array
    down: jax.Array
    gate: jax.Array | None
    activation: str
    recipe: Recipe | None
    expected_rows: int

    def of_rows(self, rows: jax.Array, sizes: jax.Array) -> jax.Array:
        """What they make of rows that lie expert after expert."""
        hidden = grouped_matmul(rows, self.pair, sizes, recipe=self.recipe, **self.first)
        return self.of_hidden(hidden, sizes)

    def of_hidden(self, hidden: jax.Array, sizes: jax.Array) -> jax.Array:
        """Their second product."""
        return grouped_matmul(
            hidden, self.down, sizes, recipe=self.recipe, rest=unread_rest(),
            expected_rows=self.expected_rows,
        )  # fmt: skip

    @property
    def pair(self) -> Any:
        """The weights of the first product."""
        return self.up if self.gate is None else (self.gate, self.up)

    @property
    def first(self) -> dict[str, Any]:
        """The options of the first product."""
        return {
            "activation": self.activation,
            "gated": self.gate is not None,
            "rest": unread_rest(),
            "expected_rows": self.expected_rows,
        }


def _over_global_arrays(
    options: _Options, operands: dict[str, Any], axes: tuple[Any, ...], mesh: Any, x_spec: Any
) -> MixtureOutput:
    x = operands["x"]
    tp, ep = meshes.axes_of(options.axis_name), meshes.axes_of(options.expert_axis)
    spec: Any = global_arrays._with_axis(global_arrays._spec(x, x_spec), x.ndim, None, axes)
    if tp and options.sequence_parallel:
        spec = global_arrays._with_axis(spec, x.ndim, x.ndim - 2, tp)
    if ep:
        entries = list(spec)
        first = () if entries[0] is None else meshes.as_tuple(entries[0])
        spec = PartitionSpec((*first, *ep), *entries[1:])
    columns, rows, experts = tp or None, tp or None, ep or None
    specs = {
        "x": spec,
        "router": PartitionSpec(),
        "up": PartitionSpec(experts, None, columns),
        "gate": PartitionSpec(experts, None, columns),
        "down": PartitionSpec(experts, rows, None),
        "router_bias": PartitionSpec(),
        "mask": PartitionSpec(*list(spec)[:-1]),
        "placement": PartitionSpec(),
    }
    given = dict(operands)
    for i, one in enumerate(given.pop("shared") or ()):
        given[f"shared_{i}"] = one
        specs[f"shared_{i}"] = PartitionSpec(rows, None) if i == 1 else PartitionSpec(None, columns)
    split = tuple(a for entry in spec if entry is not None for a in meshes.as_tuple(entry))
    loss_axes = tuple(a for a in split if a not in axes)

    def call(**arrays: Any) -> MixtureOutput:
        shared = tuple(arrays.pop(f"shared_{i}") for i in range(3) if f"shared_{i}" in arrays)
        return _mixture(options, loss_axes, **arrays, shared=shared or None)

    nothing: Any = PartitionSpec()
    return global_arrays.with_specs(
        call, "nn.mixture", given, {name: specs[name] for name in given}, axis_name=axes, mesh=mesh,
        out_specs=MixtureOutput(spec, *[nothing] * 4), check_vma=True,
    )  # fmt: skip


def _mixture(
    options: _Options,
    loss_axes: tuple[Any, ...],
    x: jax.Array,
    router: jax.Array,
    up: jax.Array,
    down: jax.Array,
    gate: jax.Array | None,
    router_bias: jax.Array | None,
    shared: Sequence[jax.Array] | None,
    mask: jax.Array | None,
    placement: jax.Array | None,
) -> MixtureOutput:
    """On one rank."""
    tp, ep = meshes.axes_of(options.axis_name), meshes.axes_of(options.expert_axis)
    split = (*ep, *tp) if options.sequence_parallel else ep
    capacity = options.capacity
    _check_experts(router, up, placement, ep)
    exchange = _exchange(options, x, up, tp, ep)
    gathers = exchange != "dispatch"
    real = None if mask is None else mask.reshape(-1)
    x = _of_real_tokens(x, mask)
    tokens = x.reshape(-1, x.shape[-1])
    logits = tokens.astype(jnp.float32) @ router.astype(jnp.float32)
    logits = _of_real_tokens(logits, real)  # what `select` makes of a zero may have no gradient
    bias = {} if router_bias is None else {"bias": router_bias}
    indices, weights = options.select(logits, options.k, **bias)
    if not jnp.issubdtype(indices.dtype, jnp.integer):
        raise TypeError(
            "jflux.nn.mixture: select must return (indices, weights), got indices "
            f"{indices.dtype}; jax.lax.top_k returns (values, indices)"
        )
    indices, weights = moe_gate.of_real_tokens(indices, weights, real)
    losses = _losses(logits, indices, placement, capacity, split, loss_axes)

    # Those that see all of their group's tokens before the experts, and sum after them.
    gathered = split if gathers else tp if options.sequence_parallel else ()
    fused = exchange == "fused" and bool(gathered)
    if gathered:
        if not fused:
            tokens = all_gather(tokens, axis_name=gathered, axis=0, tiled=True)
        weights = all_gather(weights, axis_name=gathered, axis=0, tiled=True)
        indices = _lax.all_gather(indices, gathered, axis=0, tiled=True)
    if placement is not None:
        others = None if gathers else ep  # whose tokens come before the experts are not here
        indices = moe.place(indices, placement, router.shape[1], axis_name=others or None)
    ranks = meshes.axis_size(ep) if ep else 1
    choices = indices.size if gathers else ranks * indices.size  # of all ranks' tokens
    experts = _Experts(up, down, gate, options.activation, options.recipe, -(-choices // ranks))
    own = _own(indices, up.shape[0], ep)
    if fused:
        y = _of_own_experts_fused(
            tokens, own, weights, experts, gathered, ep, capacity, options.wires
        )
    elif gathers:
        y = _of_own_experts(tokens, own, weights, experts, capacity)
    else:
        y = _of_all_experts(tokens, indices, weights, experts, ep, capacity, options.wires)
    if gathered and not fused:
        y = reduce_scatter(y, axis_name=gathered, scatter_dimension=0, tiled=True, **options.wires)
    if tp and not options.sequence_parallel:
        y = all_reduce(y, axis_name=tp, **options.wires)
    y = y.reshape(x.shape)
    if shared is not None:
        y = _epilogue.add(y, [_shared(options, x, shared)])
    return MixtureOutput(_of_real_tokens(y, mask), *losses)


def _of_real_tokens(a: jax.Array, mask: jax.Array | None) -> jax.Array:
    """Zeros in place of other tokens' rows, also backward: where tokens are NaN, gradients are."""
    return a if mask is None else jnp.where(mask[..., None], a, jnp.zeros((), a.dtype))


def _check_experts(
    router: jax.Array, up: jax.Array, placement: jax.Array | None, ep: tuple[Any, ...]
) -> None:
    ranks, experts = meshes.axis_size(ep) if ep else 1, router.shape[1]
    if placement is not None and up.shape[0] * ranks != placement.shape[0]:
        raise ValueError(
            f"jflux.nn.mixture: placement {placement.shape} is of {placement.shape[0]} physical "
            f"slots, and up {up.shape} has {up.shape[0]} on each of {ranks} ranks along "
            "expert_axis; it must have S/M"
        )
    if placement is None and up.shape[0] * ranks != experts:
        raise ValueError(
            f"jflux.nn.mixture: router {router.shape} chooses among {experts} experts, and up "
            f"{up.shape} has {up.shape[0]} on each of {ranks} ranks along expert_axis; it must "
            "have E/M, or a placement say which expert is where"
        )


def _exchange(
    options: _Options, x: jax.Array, up: jax.Array, tp: tuple[Any, ...], ep: tuple[Any, ...]
) -> str:
    """How tokens travel: "gather", "dispatch" or "fused"."""
    tokens = math.prod(x.shape[:-1])
    if tp and options.sequence_parallel:
        tokens *= meshes.axis_size(tp)
    rows = jax.ShapeDtypeStruct((tokens, x.shape[-1]), x.dtype)
    slots = up.shape[0] * (meshes.axis_size(ep) if ep else 1)
    exchange, why = _moe_exchange.planned(
        options.exchange, rows, options.k, slots, ep, options.capacity
    )
    if ep:
        plan = plans.decomposed(f"{exchange}: {why}")
        explain.note_once("nn.mixture", (x, up), (x,), plan)
    return exchange


def _losses(
    logits: jax.Array,
    indices: jax.Array,
    placement: jax.Array | None,
    capacity: int | None,
    split: tuple[Any, ...],
    loss_axes: tuple[Any, ...],
) -> tuple[Any, ...]:
    """(load balancing, z, tokens of each expert, dropped slots), of all tokens over these axes.
    Those along `split` share each expert's capacity."""
    over = (*split, *loss_axes)
    real = has_expert(indices, logits.shape[1])
    tokens = moe.count(indices, logits.shape[1])
    own, others = (meshes.split_over(axes, tokens) for axes in (split, loss_axes))
    tokens = _lax.psum(tokens, own) if own else tokens
    # Of tokens that are the same along an axis each rank sends its copies to the experts.
    copies = math.prod(meshes.axis_size(name) for name in split if name not in own)
    counts = tokens, _dropped(copies * tokens, placement, capacity)
    return (
        moe.load_balancing_loss(logits, indices, axis_name=over or None),
        moe.z_loss(logits, mask=real, axis_name=over or None),
        *(_lax.psum(counts, others) if others else counts),
    )


def _dropped(tokens: jax.Array, placement: jax.Array | None, capacity: int | None) -> jax.Array:
    """How many slots find no place, of so many that chose each expert."""
    if placement is None:
        over = jnp.zeros_like(tokens) if capacity is None else jnp.maximum(tokens - capacity, 0)
        return jnp.sum(over, dtype=jnp.int32)
    taken = shares(tokens, placement)
    taken = taken if capacity is None else jnp.minimum(taken, capacity)
    return jnp.sum(tokens, dtype=jnp.int32) - jnp.sum(taken, dtype=jnp.int32)


def _own(indices: jax.Array, experts: int, ep: tuple[Any, ...]) -> jax.Array:
    """Choices among this rank's experts, counted from 0; -1: another rank's."""
    if not ep:
        return indices
    own = indices - lax.axis_index(ep) * experts
    return jnp.where((own >= 0) & (own < experts), own, -1)


def _of_own_experts(
    tokens: jax.Array,
    indices: jax.Array,
    weights: jax.Array,
    experts: _Experts,
    capacity: int | None,
) -> jax.Array:
    """The weighted sum of each token's experts on this rank."""
    routing = moe.route(indices, experts.up.shape[0], capacity=capacity)
    y = experts.of_rows(moe.permute(tokens, routing, rest=unread_rest()), routing.counts)
    return moe.unpermute(y, routing, weights, rest=unread_rest())


def _of_own_experts_fused(
    tokens: jax.Array,
    indices: jax.Array,
    weights: jax.Array,
    experts: _Experts,
    axes: tuple[Any, ...],
    ep: tuple[Any, ...],
    capacity: int | None,
    wires: dict[str, Any],
) -> jax.Array:
    """The same of this rank's tokens, which come to the experts of all ranks along `axes`, and the
    sums from there, in the products' kernels."""
    if recipe_of(experts.recipe, tokens, (*several(experts.pair), experts.down), False) is not None:
        raise ValueError(
            "jflux.nn.mixture: exchange='fused' takes no recipe, nor weights that are quantised; "
            "take 'dispatch' or 'gather'"
        )
    routing = moe.route(indices, experts.up.shape[0], capacity=capacity)
    ranks = meshes.axis_size(ep) if ep else 1
    over: Any = {
        "axis_name": axes,
        "owners": dispatch_grouped_matmul.owners_of(ranks, indices.shape[1], experts.up.shape[0]),
    }
    hidden = all_gather_grouped_matmul.gathered(
        tokens, several(experts.pair), routing, activation=experts.activation,
        gated=experts.gate is not None, **over,
    )  # fmt: skip
    return grouped_matmul_reduce_scatter.scattered(
        hidden, experts.down, routing, weights, **over, **wires
    )


def _of_all_experts(
    tokens: jax.Array,
    indices: jax.Array,
    weights: jax.Array,
    experts: _Experts,
    ep: tuple[Any, ...],
    capacity: int | None,
    wires: dict[str, Any],
) -> jax.Array:
    """The weighted sum of each token's experts, to whose ranks it goes and from which it comes: in
    8 bits, if the experts multiply so."""
    recipe = recipe_of(experts.recipe, tokens, experts.pair, False)
    dispatched = moe_dispatch.moe_dispatch(
        lax.stop_gradient(tokens) if recipe else tokens, indices, weights, capacity=capacity,
        axis_name=ep, partial_sums=True, quantize=recipe.x if recipe else None, rest=unread_rest(),
        num_experts=experts.up.shape[0] * meshes.axis_size(ep),
    )  # fmt: skip
    sizes = dispatched.padded_sizes
    if recipe is None:
        y = experts.of_rows(dispatched.rows, sizes)
    else:
        moved = Moved(dispatched.rows, dispatched.handle)
        hidden = of_dispatched(tokens, experts.pair, sizes, moved, recipe, **experts.first)
        y = experts.of_hidden(hidden, sizes)
    return moe_dispatch.moe_combine(y, dispatched.handle, weights=weights, axis_name=ep, **wires)


def _shared(options: _Options, x: jax.Array, shared: Sequence[jax.Array]) -> jax.Array:
    up, down, *gate = shared
    if options.axis_name is not None:
        return _dense.any_mlp(
            x, up, None, down, None, *gate, activation=options.activation,
            axis_name=options.axis_name, sequence_parallel=options.sequence_parallel,
            recipe=options.recipe, **options.wires,
        )  # fmt: skip
    product: Any = {
        "preferred_element_type": None, "precision": None, "transpose_rhs": False,
        "recipe": options.recipe,
    }  # fmt: skip
    pair = (*gate, up) if gate else up
    hidden = _dense._own_columns(
        x, pair, None, activation=options.activation, gated=bool(gate), **product
    )
    return _dense._own_columns(hidden, down, None, activation=None, gated=False, **product)


# ---- What the layers for linen and for NNX share -------------------------------------------------


def shapes_of(layer: Any, d: int) -> dict[str, tuple[tuple[int, ...], tuple[Any, ...]]]:
    """(shape, logical axes) of each parameter of a layer, for x of this width."""
    e, f, s = layer.num_experts, layer.hidden_features, layer.shared_features
    expert, embed, hidden = layer.axes
    p = physical_slots(layer)
    inner, outer = ((p, d, f), (expert, embed, hidden)), ((p, f, d), (expert, hidden, embed))
    found = {"router": ((d, e), (embed, None)), "up": inner, "down": outer}
    if layer.gated:
        found["gate"] = inner
    if layer.use_router_bias:
        found["router_bias"] = ((e,), (None,))
    if s:
        found |= {"shared_up": ((d, s), (embed, hidden)), "shared_down": ((s, d), (hidden, embed))}
        if layer.gated:
            found["shared_gate"] = ((d, s), (embed, hidden))
    return found


def physical_slots(layer: Any) -> int:
    """How many experts' weights a layer has."""
    return int(layer.num_experts if layer.physical_slots is None else layer.physical_slots)


def of_layer(
    layer: Any,
    x: jax.Array,
    params: dict[str, jax.Array],
    mask: jax.Array | None,
    placement: jax.Array | None,
) -> MixtureOutput:
    """The mixture of a layer with these parameters."""
    from ._flax import in_one_type

    if placement is None and physical_slots(layer) != layer.num_experts:
        placement = jnp.arange(physical_slots(layer), dtype=jnp.int32) % layer.num_experts

    kept = ("router", "router_bias")  # in the type that they have
    own: dict[str, Any] = {name: params[name] for name in kept if name in params}
    rest: dict[str, Any] = {name: a for name, a in params.items() if name not in own}
    x, *wide = in_one_type(layer.dtype, x, *rest.values())
    rest = dict(zip(rest, wide, strict=True))
    names = ("shared_up", "shared_down", "shared_gate")
    shared = tuple(rest.pop(name) for name in names if name in rest)
    options: dict[str, Any] = {
        name: getattr(layer, name)
        for name in (*(field.name for field in dataclasses.fields(_Options)), "loss_axis", "x_spec")
    }
    return mixture(
        x, shared=shared or None, mask=mask, placement=placement, **options, **own, **rest
    )
