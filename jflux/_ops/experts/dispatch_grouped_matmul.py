"""Expert parallelism with its products: tokens to their experts' product, and a product's rows back
to their tokens.

There are two exchanges. A gather brings every token to every rank; it takes the kernels of
tensor-parallel experts with a routing of this rank's experts alone, which multiply rows as they
arrive and send sums as they are complete. A dispatch sends a token only to the ranks of its
experts, and multiplies afterwards.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from ... import _config, moe
from ..._call import explain, local_ops, plans
from ..._call.forms import Call, Form, WhyNot, choose, decomposed
from ..._call.plans import Arrays, Machine, Plan
from ..._ranks import meshes
from ..._ranks.meshes import AxisName
from .._lax import several
from ..collectives.exchange import all_gather
from ..products.grouped_matmul import grouped_matmul
from . import _destinations, all_gather_grouped_matmul, grouped_matmul_reduce_scatter, moe_dispatch
from ._checks import check_axes, check_tokens, check_weights
from ._dispatch_primitives import KernelHandle
from ._exchanged_rows import on_first
from ._partial_sums import PartialSumsHandle

OP, COMBINE = "dispatch_grouped_matmul", "grouped_matmul_combine"

EXCHANGES = ("gather", "dispatch")

#: All tokens go to all ranks if a token's experts lie on at least this share of the ranks. With .79
#: layers were 2 % faster by a dispatch, with 1 they were 6 to 8 % slower
#: (docs/experiments/0046-dispatch-products.md, 0057-rows-without-a-token.md).
LEAST_SHARE = 0.9
#: The same share where one kernel gathers and multiplies, and so hides the gather. An estimate.
LEAST_SHARE_HIDDEN = 0.45


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GatherHandle:
    """Where rows are whose tokens have gone to all ranks. Integers, int32. K is min(k, E / N).

    Attributes:
      group_sizes: [E / N], the rows of each of this rank's experts.
      routing: of all ranks' tokens, with K slots each: their choices among this rank's experts.
      first: [T, k], the slot of the token whose row this slot shares; -1: it has no expert.
      choice: [N T, K], which choice of the token each of its K slots holds. None if K is k: slot j
        holds choice j.
      axis_names: of the dispatch, static.
    """

    group_sizes: jax.Array
    routing: moe.Routing
    first: jax.Array
    choice: jax.Array | None
    axis_names: tuple[Any, ...] = dataclasses.field(metadata={"static": True})

    @property
    def rows(self) -> int:
        return self.routing.source.shape[0]

    def combine(
        self, h: Any, w: Any, weights: jax.Array | None, wires: dict[str, Any], **product: Any
    ) -> jax.Array:
        """The sums of h times the experts' weights, for this rank's tokens."""
        names, (_, k) = self.axis_names, self.first.shape
        owners = owners_of(meshes.axis_size(names), k, self.group_sizes.shape[0])
        everyones = _weights_at_experts(self, weights, names)
        return grouped_matmul_reduce_scatter.scattered(
            h, w, self.routing, everyones, axis_name=names, owners=owners, **product, **wires
        )


class DispatchHandle(NamedTuple):
    """Where rows are whose tokens have gone to the ranks of their experts.

    Attributes:
      group_sizes: i32 [E / N], the rows of each of this rank's experts.
      moved: the handle of the dispatch.
    """

    group_sizes: jax.Array
    moved: PartialSumsHandle | KernelHandle

    @property
    def axis_names(self) -> tuple[Any, ...]:
        return self.moved.axis_names

    @property
    def rows(self) -> int:
        return self.moved.slot.shape[0]

    @property
    def first(self) -> jax.Array:
        return self.moved.first

    def combine(
        self, h: Any, w: Any, weights: jax.Array | None, wires: dict[str, Any], **product: Any
    ) -> jax.Array:
        """The sums of h times the experts' weights, for this rank's tokens."""
        y = grouped_matmul(h, w, self.group_sizes, **product)
        return moe_dispatch.moe_combine(
            y, self.moved, weights=weights, axis_name=self.axis_names, **wires
        )


@meshes.axis_by_name
def dispatch_grouped_matmul(
    x: Any,
    w: Any,
    topk_indices: Any,
    *,
    num_experts: int,
    axis_name: AxisName,
    activation: str | None = None,
    gated: bool = False,
    transpose_rhs: bool = False,
    preferred_element_type: DTypeLike | None = None,
    exchange: str | None = None,
) -> tuple[jax.Array, GatherHandle | DispatchHandle]:
    """Sends tokens to the ranks of their experts, and multiplies them there, the first of the two
    pipelines of Comet (arXiv 2502.19811)::

        x [T, H]   w [E/N, H, F]   topk_indices [T, k]   ->   y [R, F]

    per rank of N along `axis_name`, inside ``jax.shard_map``: rank r has the experts from
    ``r E / N`` on. y has R = min(k, E / N) N T rows, expert after expert, and of an expert in the
    order of (rank, token); rows past the last one are zeros. A token that names an expert twice has
    one row there. Sizes stay on the device. No token is dropped: for a capacity of experts take
    :func:`jflux.moe_dispatch` and :func:`jflux.grouped_matmul`.

    How tokens travel is `exchange`'s to say:

    - "gather": every token goes to every rank, in :func:`jflux.moe.all_gather_grouped_matmul`, with
      the routing of this rank's experts. Where that is one kernel, tiles start as their rows
      arrive, and there is no array of rows before the product.
    - "dispatch": a token goes to the ranks of its experts, in :func:`jflux.moe_dispatch` with
      partial sums, and :func:`jflux.grouped_matmul` follows.
    - None: a gather, unless a token's k experts lie on few of the ranks, on average where all
      choices are equally likely: on less than .9 of them, or .45 where a product hides the gather,
      of weights with at most 2048 columns in all, and on GPUs from 128 rows of an expert from each
      rank on. :func:`jflux.explain` says which, and why.

    Differentiable in x and w in both modes, any number of times. The gradient of x comes back as in
    :func:`grouped_matmul_combine`, without weights.

    Args:
      x: [T, H], floating: this rank's tokens.
      w: [E / N, H, F], or [E / N, F, H] with `transpose_rhs`; or two such, with `gated`.
      topk_indices: integers [T, k], from 0 to ``num_experts - 1``. A slot with any other number,
        such as -1, has no expert.
      num_experts: E, a multiple of N.
      axis_name: a mesh axis, or a tuple of them.
      activation, gated, transpose_rhs, preferred_element_type: as in :func:`jflux.grouped_matmul`.
      exchange: "gather", "dispatch" or None; the same on all ranks.

    Returns:
      (y, handle). The handle is for :func:`grouped_matmul_combine`: a pytree of arrays, of which
      ``handle.group_sizes``, int32 [E / N], says how many rows of y each expert has.

    Raises:
      ValueError, TypeError: operands that do not fit, when the call is traced.
      NameError: outside ``shard_map``.
      jax.errors.JaxRuntimeError: a peer did not come within the deadline (see :func:`jflux.init`).

    Examples:
      >>> def up(x, w, indices):  # one rank's tokens [2, 4], and its two experts [2, 4, 8]
      ...     return jflux.dispatch_grouped_matmul(x, w, indices, num_experts=16, axis_name="ep")[0]
      >>> mesh, own = jax.sharding.Mesh(jax.devices(), "ep"), P("ep")
      >>> f = jax.jit(jax.shard_map(up, mesh=mesh, in_specs=(own, own, own), out_specs=own))
      >>> f(jnp.ones((16, 4)), jnp.ones((16, 4, 8)), jnp.arange(16)[:, None]).shape
      (128, 8)
    """
    world, ws = meshes.axis_size(axis_name), several(w)
    x, indices = check_tokens(f"jflux.{OP}", x, topk_indices, num_experts, world)
    experts = num_experts // world
    _check_experts(OP, ws, experts, f"{num_experts=} over {world} ranks")
    if exchange not in (None, *EXCHANGES):
        raise ValueError(f"jflux.{OP}: {exchange=} must be None or one of {EXCHANGES}")
    # Plain `lax` makes the handle of them.
    x, indices = meshes.vary_together(axis_name, x, indices)
    product: dict[str, Any] = {
        "transpose_rhs": transpose_rhs, "preferred_element_type": preferred_element_type,
        "activation": activation, "gated": gated,
    }  # fmt: skip
    call = Call((x, *ws, indices), _Params(num_experts, axis_name, world, exchange, product))
    plan, form = choose(_FORMS, call)
    assert form is not None
    y, handle = form.run(call.arrays, call.params, plan)
    explain.note_once(OP, call.arrays, (y,), plan)
    return y, handle


@meshes.axis_by_name
def grouped_matmul_combine(
    h: Any,
    w: Any,
    handle: GatherHandle | DispatchHandle,
    weights: Any = None,
    *,
    axis_name: AxisName,
    transpose_rhs: bool = False,
    preferred_element_type: DTypeLike | None = None,
    wire: str | None = None,
    grad_wire: str | None = None,
) -> jax.Array:
    """Multiplies experts' rows, and brings the results back to their tokens and sums them, the
    second of the two pipelines of Comet (arXiv 2502.19811)::

        h [R, F]   w [E/N, F, H]   weights [T, k]   ->   [T, H]

    per rank of N along `axis_name`, inside ``jax.shard_map``, after a
    :func:`dispatch_grouped_matmul` over the same axis. A rank rounds the rows of its product, sums
    those of a token, times their weights, in float32 (float64 for float64) in the order of top-k,
    and rounds the sum; these are added in the same type, and rounded once: after a gather in the
    order of ranks, after a dispatch in the order in which top-k names the ranks first. The bits are
    the same on every run. A slot without an expert adds nothing.

    After a gather it is :func:`jflux.moe.grouped_matmul_reduce_scatter`: where that is one kernel,
    sums leave as their tiles are finished. After a dispatch it is :func:`jflux.grouped_matmul` and
    :func:`jflux.moe_combine`.

    Differentiable in h, w and weights in both modes, any number of times.

    Args:
      h: [R, F], floating: what was made of the rows of :func:`dispatch_grouped_matmul`.
      w: [E / N, F, H], or [E / N, H, F] with `transpose_rhs`.
      handle: of the dispatch.
      weights: [T, k], floating, of this rank's tokens; None: each row counts once.
      axis_name: as in the dispatch.
      transpose_rhs, preferred_element_type: as in :func:`jflux.grouped_matmul`.
      wire, grad_wire: after a gather as in :func:`jflux.moe.grouped_matmul_reduce_scatter`, after a
        dispatch as in :func:`jflux.moe_combine`.

    Returns:
      [T, H], of the type of the product.

    Raises:
      ValueError, TypeError: operands that do not fit, when the call is traced.
      NameError: outside ``shard_map``.
      jax.errors.JaxRuntimeError: a peer did not come within the deadline (see :func:`jflux.init`).

    Examples:
      >>> def experts(x, up, down, indices, weights):
      ...     h, handle = jflux.dispatch_grouped_matmul(
      ...         x, up, indices, num_experts=16, activation="relu", axis_name="ep"
      ...     )
      ...     return jflux.grouped_matmul_combine(h, down, handle, weights, axis_name="ep")
      >>> mesh, own = jax.sharding.Mesh(jax.devices(), "ep"), P("ep")
      >>> f = jax.jit(jax.shard_map(experts, mesh=mesh, in_specs=(own,) * 5, out_specs=own))
      >>> x, up, down = jnp.ones((16, 4)), jnp.ones((16, 4, 8)), jnp.ones((16, 8, 4))
      >>> f(x, up, down, jnp.arange(16)[:, None], jnp.ones((16, 1)))[0].tolist()
      [32.0, 32.0, 32.0, 32.0]
    """
    if not isinstance(handle, GatherHandle | DispatchHandle):
        raise TypeError(
            f"jflux.{COMBINE}: handle must be what jflux.{OP} returned, got {type(handle).__name__}"
        )
    check_axes(f"jflux.{COMBINE}", axis_name, handle.axis_names)
    h = jnp.asarray(h)
    if h.ndim != 2 or h.shape[0] != handle.rows or not jnp.issubdtype(h.dtype, jnp.floating):
        raise ValueError(
            f"jflux.{COMBINE}: h must be floating [R, F] with the R={handle.rows} rows of the "
            f"dispatch, got {h.dtype} {h.shape}"
        )
    _check_experts(COMBINE, [w], handle.group_sizes.shape[0], "of the dispatch")
    if weights is not None:
        weights = check_weights(f"jflux.{COMBINE}", weights, handle.first.shape)
    return handle.combine(
        h, w, weights, {"wire": wire, "grad_wire": grad_wire}, transpose_rhs=transpose_rhs,
        preferred_element_type=preferred_element_type,
    )  # fmt: skip


# ---- Forms ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Params:
    """A call, less its operands: x, the weights and the indices.

    Attributes:
      exchange: the caller's choice; None: there is none.
      product: options of :func:`jflux.grouped_matmul`.
    """

    num_experts: int
    axis_name: AxisName
    world: int
    exchange: str | None
    product: dict[str, Any]

    def owners(self, k: int) -> int:
        return owners_of(self.world, k, self.num_experts // self.world)


def _takes_gather(call: Call, machine: Machine) -> Plan | WhyNot:
    """It takes the same calls on all ranks."""
    (x, *ws, indices), params = call.arrays, call.params
    if params.exchange is not None:
        takes, why = params.exchange == "gather", "the caller's choice"
    else:
        k, experts = indices.shape[1], params.num_experts // params.world
        columns = sum(w.shape[1 if params.product["transpose_rhs"] else 2] for w in ws)
        rows = x.shape[0] * min(k, experts) / (experts * params.owners(k))
        takes, why = pays_to_gather(params.num_experts, params.world, k, columns, rows)
    return plans.decomposed(f"gather: {why}") if takes else WhyNot(why)


def pays_to_gather(
    num_experts: int, world: int, k: int, columns: int, rows: float
) -> tuple[bool, str]:
    """(whether to gather tokens of k experts, and why).

    Args:
      columns: of all weights of an expert.
      rows: rows of an expert from each rank, on average.
    """
    share = share_of_ranks(num_experts, world, k)
    enough = rows >= all_gather_grouped_matmul.LEAST_ROWS or _config.config.always
    is_hidden = columns <= all_gather_grouped_matmul.MOST_COLUMNS and (
        meshes.platform() != "gpu" or enough
    )
    least = LEAST_SHARE_HIDDEN if is_hidden else LEAST_SHARE
    return share >= least, (
        f"the experts of a token, {k} of {num_experts}, lie on {share:.2f} of {world} ranks, and "
        f"with {columns} columns and {rows:.3g} rows of an expert from each rank a gather is worth "
        f"it from {least} on"
    )


def share_of_ranks(num_experts: int, world: int, k: int) -> float:
    """The share of the ranks that a token's experts lie on, on average, where all choices of k
    different experts are equally likely."""
    others = num_experts - num_experts // world
    return 1 - math.comb(others, k) / math.comb(num_experts, k)


def owners_of(world: int, k: int, experts: int) -> int:
    """The slots of a rank's routing divided by its rows, on average. A token has min(k, experts)
    slots on each rank, and k rows on all ranks together."""
    return max(1, world * min(k, experts) // k)


def _by_gather(arrays: Arrays, params: _Params, plan: Plan) -> tuple[jax.Array, GatherHandle]:
    x, *ws, indices = arrays
    handle = _gather_handle(indices, params.num_experts, params.axis_name)
    y = all_gather_grouped_matmul.gathered(
        x, ws, handle.routing, axis_name=params.axis_name, owners=params.owners(indices.shape[1]),
        **params.product,
    )  # fmt: skip
    return y, handle


def _by_dispatch(arrays: Arrays, params: _Params, plan: Plan) -> tuple[jax.Array, DispatchHandle]:
    x, *ws, indices = arrays
    dispatched = moe_dispatch.moe_dispatch(
        x, indices, jnp.ones(indices.shape, jnp.float32), num_experts=params.num_experts,
        partial_sums=True, rest=local_ops.unread_rest(), axis_name=params.axis_name,
    )  # fmt: skip
    y = grouped_matmul(dispatched.rows, ws, dispatched.group_sizes, **params.product)
    return y, DispatchHandle(dispatched.group_sizes, dispatched.handle)  # type: ignore[arg-type]


#: Each has a handle of its own.
_FORMS: tuple[Form[Callable[..., tuple[jax.Array, GatherHandle | DispatchHandle]]], ...] = (
    Form(_takes_gather, _by_gather),
    decomposed(_by_dispatch, "dispatch"),
)


# ---- A gather ------------------------------------------------------------------------------------


def _gather_handle(indices: jax.Array, num_experts: int, axis_name: AxisName) -> GatherHandle:
    names, k = meshes.as_tuple(axis_name), indices.shape[1]
    experts = num_experts // meshes.axis_size(axis_name)
    is_known = (indices >= 0) & (indices < num_experts)
    slots = _destinations.distinct(jnp.where(is_known, indices, -1))
    chosen = all_gather(
        jnp.where(slots.has_row, slots.expert, -1), axis_name=axis_name, axis=0, tiled=True
    )
    chosen = chosen - lax.axis_index(names) * experts
    chosen = jnp.where((chosen >= 0) & (chosen < experts), chosen, -1)
    own = None
    if k > experts:
        own = jnp.argsort(chosen < 0, axis=1, stable=True)[:, :experts].astype(jnp.int32)
        chosen = jnp.take_along_axis(chosen, own, axis=1)
    by_expert = moe.route(chosen, experts)
    return GatherHandle(by_expert.counts, by_expert, slots.first, own, names)


def _weights_at_experts(
    handle: GatherHandle, weights: jax.Array | None, axis_name: AxisName
) -> jax.Array | None:
    """The weights of all ranks' slots in the handle's routing."""
    if weights is None:
        return None
    everyone = all_gather(on_first(handle.first, weights), axis_name=axis_name, axis=0, tiled=True)
    return (
        everyone if handle.choice is None else jnp.take_along_axis(everyone, handle.choice, axis=1)
    )


def _check_experts(op: str, ws: Sequence[Any], experts: int, of: str) -> None:
    local_ops.check_arrays(op, **{f"w[{i}]" if len(ws) > 1 else "w": w for i, w in enumerate(ws)})
    for w in ws:
        if len(w.shape) != 3 or w.shape[0] != experts:
            raise ValueError(
                f"jflux.{op}: w must have three dimensions, the first of the {experts} experts of "
                f"a rank ({of}), got {tuple(w.shape)}"
            )
