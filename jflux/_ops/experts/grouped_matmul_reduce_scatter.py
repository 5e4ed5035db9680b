"""grouped_matmul_reduce_scatter: wrapper, gradients, and how it lowers; and the all-reduce for few
tokens. Kernels: cc/ops/grouped_matmul_reduce_scatter.

``jflux_grouped_matmul_reduce_scatter(h, w, weights, offsets, destination, source)`` is linear in h,
in w and in weights. It returns the experts' rows too, ``y = h @ w``: the kernel stores them anyway,
and the gradient of weights takes them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from ... import _config, _native
from ..._call import derivatives, forms, local_ops, plans
from ..._call.derivatives import total
from ..._call.forms import Call, Op, ShapeDtype, WhyNot
from ..._call.plans import Arrays, Machine, Plan
from ..._call.primitives import make_primitive
from ..._ranks import meshes
from ..._ranks.meshes import AxisName
from .. import _epilogue, _wire
from ..collectives import _quantized_exchange, exchange, wire_report
from ..collectives.all_reduce import all_reduce
from ..collectives.exchange import all_gather, reduce_scatter
from ..products import _grouped_primitives, _product
from ..products import grouped_matmul as _grouped
from ..products.grouped_matmul import grouped_matmul
from . import moe_rows
from .routing import Routing, unpermute

OP = "grouped_matmul_reduce_scatter"

#: The least hidden units of a rank for which a GPU takes the kernel: with 384 of them its sums take
#: longer than its product hides, with 768 too on an H200, and with 3584 they do not
#: (docs/experiments/0042-scattered-sums.md).
LEAST_UNITS = 1024


@dataclasses.dataclass(frozen=True)
class Params:
    """A call, less its operands.

    Attributes:
      owners: ranks that the experts are split over, as of a gather
        (`all_gather_grouped_matmul.Params`).
      wire, grad_wire: formats that data travel in, and those of derivatives; None: as they are.
    """

    axis_names: tuple[Any, ...]
    world: int
    transpose_rhs: bool
    out_dtype: np.dtype
    owners: int = 1
    prepared: str | None = None
    wire: str | None = None
    grad_wire: str | None = None

    def way(self, wire: str | None) -> _quantized_exchange.Way:
        """How data of a step travel; those of its derivatives as those of the call."""
        return _quantized_exchange.Way(self.axis_names, None, wire=wire, grad_wire=self.grad_wire)

    @property
    def product(self) -> _grouped_primitives.Params:
        """The grouped product alone, of whose rows the tokens' are read alone."""
        fill = local_ops.fills_unread()
        return _grouped_primitives.Params(self.transpose_rhs, self.out_dtype, fill=fill)


class _Operands(NamedTuple):
    h: Any
    w: Any
    weights: Any
    offsets: Any
    destination: Any
    source: Any

    @property
    def counts(self) -> Any:
        return jnp.diff(self.offsets)


def grouped_matmul_reduce_scatter(
    h: jax.Array,
    w: jax.Array,
    routing: Routing,
    weights: jax.Array | None = None,
    *,
    axis_name: AxisName,
    transpose_rhs: bool = False,
    preferred_element_type: DTypeLike | None = None,
    wire: str | None = None,
    grad_wire: str | None = None,
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
      wire: as in :func:`jflux.matmul_reduce_scatter`, of the tokens' sums, which are quantised as
        they are in float32: in the kernel for H a multiple of 128, else after a grouped product.
      grad_wire: likewise, of the cotangent that is gathered, and of the tangents' sums.

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
        preferred_element_type=preferred_element_type, wire=wire, grad_wire=grad_wire,
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
    wire: str | None = None,
    grad_wire: str | None = None,
    owners: int = 1,
) -> jax.Array:
    """:func:`grouped_matmul_reduce_scatter`, perhaps of experts that are split over `owners`
    ranks."""
    names, world = meshes.as_tuple(axis_name), meshes.axis_size(axis_name)
    out = _grouped.check(
        h, (w,), routing.counts, transpose_rhs, preferred_element_type, None, False
    )
    slots = routing.destination.shape
    if h.shape[0] != routing.destination.size or slots[0] % world:
        raise ValueError(
            f"jflux.moe.{OP}: h {h.shape} has {h.shape[0]} rows, and the routing has "
            f"slots {slots}: it must have a row for each, and a multiple of {world} tokens"
        )
    if weights is not None and weights.shape != slots:
        raise ValueError(
            f"jflux.moe.{OP}: weights have shape {weights.shape}, and the routing has slots {slots}"
        )
    common = jnp.result_type(h.dtype, w.dtype)
    _wire.check(f"moe.{OP}", jax.ShapeDtypeStruct((), out), wire, grad_wire, what="y is")
    params = Params(names, world, transpose_rhs, out, owners, wire=wire, grad_wire=grad_wire)
    if weights is None:
        weights = jnp.ones(slots, jnp.float32)
    _product.warn_if_same(f"moe.{OP}", names, "h", h, w, weights)
    h, w = h.astype(common), w.astype(common)
    n = w.shape[1 if transpose_rhs else 2]
    if 0 in (*slots, *h.shape, *w.shape):
        like = (h, w, weights, *routing)
        return _product.zeros((slots[0] // world, n), out, *like, over=names)
    if not meshes.is_manual(names):  # vmap's axis, which has no ranks
        return two_steps(h, w, weights, routing, params)
    y = bind(h, w, weights, routing, params)
    if wire is not None and wire_report.is_wanted():
        exact = bind(h, w, weights, routing, dataclasses.replace(params, wire=None))
        kept = _operands(h, w, weights, routing, params)
        part = _part(_product_of(h, w, kept, params), kept.weights, kept, params)
        wire_report.note(f"moe.{OP}", part, wire, y, exact, world, (h, w))
    return y


def grouped_matmul_all_reduce(
    h: jax.Array,
    w: jax.Array,
    routing: Routing,
    weights: jax.Array | None = None,
    *,
    axis_name: AxisName,
    transpose_rhs: bool = False,
    preferred_element_type: DTypeLike | None = None,
    wire: str | None = None,
    grad_wire: str | None = None,
) -> jax.Array:
    """:func:`grouped_matmul_reduce_scatter` with the result whole on every rank, [T, H], for few
    tokens (decoding); the arguments are the same."""
    y = grouped_matmul(
        h, w, routing.counts, transpose_rhs=transpose_rhs,
        preferred_element_type=preferred_element_type,
    )  # fmt: skip
    total = unpermute(y, routing, weights)
    return all_reduce(total, axis_name=axis_name, wire=wire, grad_wire=grad_wire)


def bind(
    h: jax.Array, w: jax.Array, weights: jax.Array | None, routing: Routing, params: Params
) -> jax.Array:
    """The sums."""
    return _primitive.bind(*_operands(h, w, weights, routing, params), params=params)[0]


def two_steps(
    h: jax.Array, w: jax.Array, weights: jax.Array | None, routing: Routing, params: Params
) -> jax.Array:
    """The sums by :func:`jflux.grouped_matmul`, :func:`unpermute`, :func:`jflux.reduce_scatter`."""
    return _in_two_steps(_operands(h, w, weights, routing, params), params)[0]


def _operands(h: Any, w: Any, weights: Any | None, routing: Routing, params: Params) -> _Operands:
    wide = _epilogue.sum_dtype(params.out_dtype)
    if weights is None:
        weights = jnp.ones_like(routing.destination, dtype=wide)
    indices = (routing.offsets, routing.destination, routing.source)
    return _Operands(h, w, weights.astype(wide), *indices)


def _in_two_steps(arrays: Arrays, params: Params, plan: Plan | None = None) -> list[Any]:
    kept = _Operands(*arrays)
    y = _product_of(kept.h, kept.w, kept, params)
    return [_scattered_sums(y, kept.weights, kept, params), y]


def _product_of(h: Any, w: Any, kept: _Operands, params: Params) -> Any:
    return _grouped_primitives.grouped_matmul.bind(h, w, kept.counts, params=params.product)[0]


def _part(y: Any, weights: Any, kept: _Operands, params: Params) -> Any:
    """The sums of all tokens' rows on this rank: those for a wire as they are summed."""
    wide = None if params.wire is None else _epilogue.sum_dtype(params.out_dtype)
    return moe_rows.combine(y, weights, kept.source, kept.destination, wide)


def _scattered_sums(y: Any, weights: Any, kept: _Operands, params: Params) -> Any:
    part = _part(y, weights, kept, params)
    if params.wire is not None:
        way = params.way(params.wire)
        return exchange.quantized("reduce_scatter", part, 0, way).astype(params.out_dtype)
    return reduce_scatter(part, axis_name=params.axis_names, scatter_dimension=0, tiled=True)


def _why_exact(call: Call, machine: Machine) -> str | None:
    return _why_exact_of(_shapes(call.arrays, call.params)[0], call.params)


def _why_exact_of(result: ShapeDtype, params: Params) -> str | None:
    shape, dtype = result
    nbytes = params.world * math.prod(shape) * np.dtype(dtype).itemsize
    return _quantized_exchange.why_exact(nbytes)


def _without_wire(arrays: Arrays, params: Params, plan: Plan) -> list[Any]:
    return _primitive.bind(*arrays, params=dataclasses.replace(params, wire=None))


# ---- What the lowering asks ----------------------------------------------------------------------


def _call(arrays: Arrays, params: Params) -> dict[str, int]:
    """A call of types that kernels take, as the native plan function reads it, but for a tile that
    a test forces."""
    kept = _Operands(*arrays)
    return {
        "world": params.world,
        "tokens": kept.destination.shape[0] // params.world,
        "choices": kept.destination.shape[1],
        "k": kept.h.shape[1],
        "n": kept.w.shape[1 if params.transpose_rhs else 2],
        "groups": kept.w.shape[0],
        "dtype": _native.dtype_number(kept.h.dtype),
        "out_dtype": _native.dtype_number(params.out_dtype),
        "transpose_rhs": int(params.transpose_rhs),
        "owners": params.owners,
        **({} if params.wire is None else {"wire": _native.dtype_number(params.wire)}),
    }


def _shapes(arrays: Arrays, params: Params) -> list[ShapeDtype]:
    kept = _Operands(*arrays)
    tokens, columns = kept.destination.shape[0], kept.w.shape[1 if params.transpose_rhs else 2]
    shapes = (tokens // params.world, columns), (kept.h.shape[0], columns)
    return [(shape, params.out_dtype) for shape in shapes]


def _takes(call: Call, machine: Machine) -> Plan | WhyNot | None:
    params, kept = call.params, _Operands(*call.arrays)
    if params.wire is not None and _why_exact(call, machine):
        return None
    if why := _product.kernel_takes(
        kept.h, kept.w, params.out_dtype, params.world, machine.platform
    ):
        return WhyNot(why)
    if params.world == 1 and not (machine.on_gpus and _config.config.always):
        return WhyNot("there is one rank, and nothing to scatter")
    fields = _call(call.arrays, params)
    if machine.on_gpus and fields["k"] < LEAST_UNITS and not _config.config.always:
        return WhyNot(f"a product of {fields['k']} units does not hide the sums")
    if machine.on_gpus:
        fields |= _grouped_primitives.forced_configuration(False)
    native = forms.native_plan(OP, fields, machine, fills="sums")
    if isinstance(native, WhyNot):
        return native
    if not _config.config.always and machine.on_gpus and native["parts"] == 0:
        why = _grouped_primitives.why_one_class(fields, _native.FEW_SPANS)
        return WhyNot(f"{why}, and all sums would wait for all tiles")
    way = "tiles of peers' tokens first" if native["parts"] else "tiles in the order of experts"
    how = "" if params.wire is None else f", sums in {params.wire}"
    return plans.fused(f"one kernel multiplies, sums and scatters{how}, {way}", native)


def _attributes(arrays: Arrays, params: Params, plan: Plan) -> dict[str, Any]:
    return {
        "choice": plan.choice,
        "item_tokens": np.int64(plan.config["item_tokens"]),
        "parts": np.int64(plan.config["parts"]),
        "transpose_rhs": params.transpose_rhs,
        "wire": np.int64(-1 if params.wire is None else _native.dtype_number(params.wire)),
    }


def _flops(arrays: Arrays, params: Params) -> int:
    h, w, *_ = arrays
    return 2 * h.shape[0] * w.shape[1] * w.shape[2]


_op = Op(
    name=OP,
    result_shapes=_shapes,
    # Where no kernel can reach the peers, the grouped product's own kernel is still of use.
    reference=_in_two_steps,
    forms=(
        forms.kernel(_takes, _attributes),
        _quantized_exchange.form(
            _why_exact,
            "a grouped product, and a reduce-scatter",
            _without_wire,
            _in_two_steps,
            _takes,
        ),  # fmt: skip
        forms.decomposed(_in_two_steps, "a grouped product, then a reduce-scatter"),
    ),
    batch=_product.bind_one_by_one,
    flops=_flops,
    values=1,
)
_primitive = make_primitive(_op)


# ---- Derivatives ---------------------------------------------------------------------------------


def _forward(operands: Sequence[Any], params: Params) -> tuple[Sequence[Any], Any]:
    out, y = _primitive.bind(*operands, params=params)
    return [out, y], (_Operands(*operands), y)


def _tangents(kept: Any, tangents: Sequence[Any], params: Params) -> list[Any]:
    operands, y = kept
    params = dataclasses.replace(params, wire=params.grad_wire)
    if params.wire and _why_exact_of(_shapes(operands, params)[0], params):
        params = dataclasses.replace(params, wire=None)
    dh, dw, dweights, *_ = tangents
    sums, rows = [], []
    for moved in (
        None if dh is None else (dh, operands.w),
        None if dw is None else (operands.h, dw),
    ):
        if moved is None:
            continue
        of_sums, of_rows = _primitive.bind(*moved, *operands[2:], params=params)
        sums.append(of_sums)
        rows.append(of_rows)
    if dweights is not None:
        sums.append(_scattered_sums(y, dweights, operands, params))
    return [total(sums), total(rows) if rows else jnp.zeros_like(y)]


def _backward(
    kept: Any, cotangents: Sequence[Any], wanted: Sequence[Any], params: Params
) -> list[Any]:
    operands, y = kept
    h, w, weights, *_ = wanted
    dout, dy = cotangents
    dweights = None
    if dout is not None:
        if params.grad_wire and not _why_exact_of((dout.shape, dout.dtype), params):
            gathered = exchange.quantized("all_gather", dout, 0, params.way(params.grad_wire))
        else:
            gathered = all_gather(dout, axis_name=params.axis_names, axis=0, tiled=True)
        if weights is not None:
            dweights = moe_rows.dots(y, gathered, operands.source, operands.destination)
        if h is not None or w is not None:
            spread = moe_rows.spread(
                gathered, operands.weights, operands.source, operands.destination,
                fill=local_ops.fills_unread(),
            )  # fmt: skip
            dy = total([spread, dy])
    dh = dw = None
    if h is not None and dy is not None:
        back = _grouped_primitives.Params(not params.transpose_rhs, np.dtype(h.dtype))
        (dh,) = _grouped_primitives.grouped_matmul.bind(
            dy.astype(operands.w.dtype), operands.w, operands.counts, params=back
        )
    if w is not None and dy is not None:
        dw = _grouped_primitives.weight_gradient(
            operands.h, dy, operands.counts, w.dtype, params.transpose_rhs
        )
    return [dh, dw, dweights, None, None, None]


def _kept(operands: Sequence[Any], params: Params) -> Any:
    kept = _Operands(*operands)
    if sum(a is None for a in kept[:3]) > 1:
        raise derivatives.not_linear(OP, "it is linear in h, w and weights, one at a time")
    y = _product_of(kept.h, kept.w, kept, params) if kept.weights is None else None
    return kept, y


derivatives.differentiate(
    _primitive, derivatives.Derivatives(_forward, _tangents, _backward, _kept)
)
