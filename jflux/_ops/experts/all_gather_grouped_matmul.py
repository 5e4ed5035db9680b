"""all_gather_grouped_matmul: wrapper, gradients, and how it lowers. Kernels:
cc/ops/all_gather_grouped_matmul.

``jflux_all_gather_grouped_matmul(x, *w, offsets, destination, source)`` is linear in x and in w
where it has no activation. Nothing of the gathered x is kept for the backward pass: the gradient of
w gathers x again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from ... import _config, _native
from ..._call import derivatives, forms, local_ops, plans
from ..._call.derivatives import total
from ..._call.forms import Call, Op, ShapeDtype, WhyNot
from ..._call.plans import Arrays, Machine, Plan
from ..._call.primitives import make_primitive
from ..._ranks import meshes
from ..._ranks.meshes import AxisName
from .. import _epilogue
from .._epilogue import Epilogue
from .._lax import several
from ..collectives.exchange import all_gather, reduce_scatter
from ..products import _activation_gradient, _grouped_primitives, _product
from ..products import grouped_matmul as _grouped
from ..products.all_gather_matmul import ACTIVATED, PREACTIVATION
from . import grouped_matmul_reduce_scatter
from .routing import Routing, permute, unpermute

OP = "all_gather_grouped_matmul"

#: The most columns of all weights for which a GPU takes the kernel. It spares a permutation of the
#: tokens, and its product is some percent slower than the grouped one: of 1536 columns it is the
#: faster one, of 14336 the slower one (docs/experiments/0039-gathered-rows.md).
MOST_COLUMNS = 2048
#: Rows of an expert from each rank, on average, from which on a GPU takes a kernel whose tiles wait
#: for all tokens: the fewest that were timed, 1.75 times as fast as the two steps.
LEAST_ROWS = 128


@dataclasses.dataclass(frozen=True)
class Params:
    """A call, less its operands.

    Attributes:
      sums: also return the products that the activation is applied to, in y's type.
      owners: the slots of a rank's routing divided by its rows, on average: 1 if each rank has a
        part of every expert, more if ranks have whole experts
        (`dispatch_grouped_matmul.owners_of`).
    """

    axis_names: tuple[Any, ...]
    world: int
    transpose_rhs: bool
    out_dtype: np.dtype
    activation: str | None = None
    gated: bool = False
    sums: bool = False
    owners: int = 1
    prepared: str | None = None

    @property
    def weights(self) -> int:
        return 2 if self.gated else 1

    @property
    def epilogue(self) -> Epilogue:
        return Epilogue((False,) * self.weights, self.activation, self.gated)

    @property
    def product(self) -> _grouped_primitives.Params:
        """The grouped product that follows the gather."""
        return _grouped_primitives.Params(
            self.transpose_rhs, self.out_dtype, self.activation, self.gated, sums=self.sums
        )

    @property
    def of_one_weight(self) -> Params:
        """The product with one weight alone."""
        return Params(
            self.axis_names, self.world, self.transpose_rhs, self.out_dtype, owners=self.owners
        )


class _Operands(NamedTuple):
    x: Any
    ws: Sequence[Any]
    offsets: Any
    destination: Any
    source: Any

    @property
    def routing(self) -> Routing:
        return Routing(jnp.diff(self.offsets), self.offsets, self.destination, self.source)

    @property
    def indices(self) -> tuple[Any, ...]:
        return self.offsets, self.destination, self.source


def _unpack(operands: Sequence[Any], params: Params) -> _Operands:
    x, *rest = operands
    return _Operands(x, rest[: params.weights], *rest[params.weights :])


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
    names, world = meshes.as_tuple(axis_name), meshes.axis_size(axis_name)
    out = _grouped.check(
        x, ws, routing.counts, transpose_rhs, preferred_element_type, activation, gated
    )
    tokens = routing.destination.shape[0]
    if world * x.shape[0] != tokens:
        raise ValueError(
            f"jflux.moe.{OP}: x {x.shape} has {x.shape[0]} tokens on each of {world} "
            f"ranks, and the routing has slots {routing.destination.shape}: it must be of "
            f"{world * x.shape[0]} tokens"
        )
    common = jnp.result_type(x.dtype, *(one.dtype for one in ws))
    x, *ws = (a.astype(common) for a in (x, *ws))
    params = Params(names, world, transpose_rhs, out, activation, gated, owners=owners)
    if 0 in (tokens, *routing.destination.shape, *x.shape, *ws[0].shape):
        n = ws[0].shape[1 if transpose_rhs else 2]
        return _product.zeros((routing.source.shape[0], n), out, x, *ws, *routing, over=names)
    if not meshes.is_manual(names):  # vmap's axis, which has no ranks
        return two_steps(x, ws, routing, params)[0]
    return bind(x, ws, routing, params)


def bind(x: jax.Array, ws: Sequence[jax.Array], routing: Routing, params: Params) -> jax.Array:
    """y."""
    indices = (routing.offsets, routing.destination, routing.source)
    return _primitive.bind(x, *ws, *indices, params=params)[0]


def two_steps(
    x: jax.Array, ws: Sequence[jax.Array], routing: Routing, params: Params
) -> list[jax.Array]:
    """The results by :func:`jflux.all_gather`, :func:`permute` and :func:`jflux.grouped_matmul`."""
    rows = _rows(x, routing, params)
    return _grouped_primitives.grouped_matmul.bind(rows, *ws, routing.counts, params=params.product)


def _rows(x: jax.Array, routing: Routing, params: Params) -> jax.Array:
    """All ranks' tokens in the order of experts."""
    tokens = all_gather(x, axis_name=params.axis_names, axis=0, tiled=True)
    return permute(tokens, routing, rest=local_ops.unread_rest())  # products alone read the rows


# ---- What the lowering asks ----------------------------------------------------------------------


def _sizes(arrays: Arrays, params: Params) -> dict[str, int]:
    operands = _unpack(arrays, params)
    x, w = operands.x, operands.ws[0]
    return {
        "world": params.world,
        "tokens": x.shape[0],
        "choices": operands.destination.shape[1],
        "k": x.shape[1],
        "n": w.shape[1 if params.transpose_rhs else 2],
        "groups": w.shape[0],
        "transpose_rhs": int(params.transpose_rhs),
        "gated": int(params.gated),
        "owners": params.owners,
    }


def _call(arrays: Arrays, params: Params) -> dict[str, int]:
    """A call of types that kernels take, as the native plan function reads it, but for a tile that
    a test forces."""
    return _sizes(arrays, params) | {
        "dtype": _native.dtype_number(arrays[0].dtype),
        "out_dtype": _native.dtype_number(params.out_dtype),
    }


def _shapes(arrays: Arrays, params: Params) -> list[ShapeDtype]:
    sizes = _sizes(arrays, params)
    shape = (sizes["world"] * sizes["tokens"] * sizes["choices"], sizes["n"])
    return [(shape, params.out_dtype)] * (1 + (params.weights if params.sums else 0))


def _in_two_steps(arrays: Arrays, params: Params, plan: Plan | None = None) -> list[Any]:
    operands = _unpack(arrays, params)
    return two_steps(operands.x, operands.ws, operands.routing, params)


def _takes(call: Call, machine: Machine) -> Plan | WhyNot:
    params, operands = call.params, _unpack(call.arrays, call.params)
    x, w = operands.x, operands.ws[0]
    if why := _product.kernel_takes(x, w, params.out_dtype, params.world, machine.platform):
        return WhyNot(why)
    if params.world == 1 and not machine.on_gpus:
        return WhyNot("there is one rank, and nothing to gather")
    fields = _call(call.arrays, params)
    columns = fields["n"] * params.weights
    if machine.on_gpus and columns > MOST_COLUMNS and not _config.config.always:
        return WhyNot(f"of {columns} columns the grouped product is faster")
    if machine.on_gpus:
        fields |= _grouped_primitives.forced_configuration(params.gated)
    native = forms.native_plan(OP, fields, machine, fills="tokens")
    if isinstance(native, WhyNot):
        return native
    waits_for_all = machine.on_gpus and params.world > 1 and native["parts"] == 0
    rows = _grouped_primitives.rows_from_each_rank(fields)
    if not _config.config.always and waits_for_all and rows < LEAST_ROWS:
        why = f"experts have few rows, {rows:.3g} of each rank, and all tiles would wait for them"
        return WhyNot(why)
    way = "tiles of own tokens first" if native["parts"] else "tiles in the order of experts"
    if waits_for_all:
        way += f", since {_grouped_primitives.why_one_class(fields, _native.MOST_SPANS)}"
    return plans.fused(f"one kernel gathers and multiplies, {way}", native)


def _attributes(arrays: Arrays, params: Params, plan: Plan) -> dict[str, Any]:
    return {
        "activation": np.int64(_native.number_of(params.activation, _native.ACTIVATIONS)),
        "choice": plan.choice,
        "gated": params.gated,
        "parts": np.int64(plan.config["parts"]),
        "senders": np.int64(plan.senders),
        "sums": params.sums,
        "transpose_rhs": params.transpose_rhs,
    }


def _flops(arrays: Arrays, params: Params) -> int:
    sizes = _sizes(arrays, params)
    rows = sizes["world"] * sizes["tokens"] * sizes["choices"]
    return 2 * rows * sizes["k"] * sizes["n"] * params.weights


_op = Op(
    name=OP,
    result_shapes=_shapes,
    # Where no kernel can reach the peers, the grouped product's own kernel is still of use.
    reference=_in_two_steps,
    forms=(
        forms.kernel(_takes, _attributes),
        forms.decomposed(_in_two_steps, "an all-gather, then a grouped product"),
    ),
    batch=_product.bind_one_by_one,
    flops=_flops,
)
_primitive = make_primitive(_op)


# ---- Derivatives ---------------------------------------------------------------------------------


def _products(x: Any, ws: Sequence[Any], kept: _Operands, params: Params) -> list[Any]:
    """``x @ w`` for each weight that is not None; x is gathered once."""
    routing = kept.routing
    if sum(w is not None for w in ws) == 1:
        return [None if w is None else bind(x, [w], routing, params.of_one_weight) for w in ws]
    rows = _rows(x, routing, params)
    product = params.of_one_weight.product
    return [
        _grouped_primitives.grouped_matmul.bind(rows, w, routing.counts, params=product)[0]
        for w in ws
    ]


def _forward(operands: Sequence[Any], params: Params) -> tuple[Sequence[Any], Any]:
    kept = _unpack(operands, params)
    if params.activation is None:
        results = _primitive.bind(*operands, params=params)
        return results, (kept, [])
    y, *sums = _primitive.bind(*operands, params=dataclasses.replace(params, sums=True))
    y, sums = checkpoint_name(y, ACTIVATED), [checkpoint_name(s, PREACTIVATION) for s in sums]
    return [y, *(sums if params.sums else ())], (kept, sums)


def _tangents(kept: Any, tangents: Sequence[Any], params: Params) -> list[Any]:
    operands, sums = kept
    dx, dws, *_ = _unpack(tangents, params)
    of_x: list[Any] = [None] * params.weights
    of_w: list[Any] = [None] * params.weights
    if dx is not None:
        of_x = _products(dx, operands.ws, operands, params)
    if any(dw is not None for dw in dws):
        of_w = _products(operands.x, dws, operands, params)
    dsums = [total(pair) for pair in zip(of_x, of_w, strict=True)]
    if params.activation is None:
        return dsums * (2 if params.sums else 1)
    dsums = [jnp.zeros_like(s) if d is None else d for s, d in zip(sums, dsums, strict=True)]
    dys = _epilogue.tangents(params.epilogue, sums, dsums)
    return [*dys, *(dsums if params.sums else ())]


def _backward(
    kept: Any, cotangents: Sequence[Any], wanted: Sequence[Any], params: Params
) -> list[Any]:
    operands, sums = kept
    x, w_types, *_ = _unpack(wanted, params)
    dy, *own = cotangents
    dsums: list[Any] = [dy] if params.activation is None else [None] * params.weights
    if params.activation is not None and dy is not None:
        counts = operands.routing.counts
        dsums = _activation_gradient.gradients(sums, dy, counts, params.epilogue)
    dsums = [total(pair) for pair in zip(dsums, own or [None] * len(dsums), strict=True)]
    routing = operands.routing
    dx = None
    terms = [
        (d, w) for d, w in zip(dsums, operands.ws, strict=True) if d is not None and w is not None
    ]
    if x is not None and len(terms) == 1:
        ((d, w),) = terms
        back = grouped_matmul_reduce_scatter.Params(
            params.axis_names, params.world, not params.transpose_rhs, np.dtype(x.dtype),
            params.owners,
        )  # fmt: skip
        dx = grouped_matmul_reduce_scatter.bind(d.astype(w.dtype), w, None, routing, back)
    elif x is not None and terms:
        dys, ws = zip(*((d.astype(w.dtype), w) for d, w in terms), strict=True)
        product = _grouped_primitives.Params(
            not params.transpose_rhs, np.dtype(x.dtype), terms=len(terms),
            fill=local_ops.fills_unread(),
        )  # fmt: skip
        (rows,) = _grouped_primitives.grouped_matmul.bind(*dys, *ws, routing.counts, params=product)
        summed = unpermute(rows, routing)
        dx = reduce_scatter(summed, axis_name=params.axis_names, scatter_dimension=0, tiled=True)
    dws: list[Any] = [None] * params.weights
    if any(w is not None and d is not None for w, d in zip(w_types, dsums, strict=True)):
        gathered = _rows(operands.x, routing, params)
        dws = [
            None
            if w is None or d is None
            else _grouped_primitives.weight_gradient(
                gathered, d, routing.counts, w.dtype, params.transpose_rhs
            )
            for w, d in zip(w_types, dsums, strict=True)
        ]
    return [dx, *dws, None, None, None]


def _kept(operands: Sequence[Any], params: Params) -> Any:
    kept = _unpack(operands, params)
    if params.activation is not None:
        raise derivatives.not_linear(OP, "it has an activation")
    if kept.x is None and any(w is None for w in kept.ws):
        raise derivatives.not_linear(OP, "it is linear in x and in w, not in both at once")
    return kept, []


derivatives.differentiate(
    _primitive, derivatives.Derivatives(_forward, _tangents, _backward, _kept)
)
