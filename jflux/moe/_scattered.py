"""The primitive of :func:`grouped_matmul_reduce_scatter`: how it lowers, and its derivatives.
Kernels: cc/ops/grouped_matmul_reduce_scatter.

``jflux_grouped_matmul_reduce_scatter(h, w, weights, offsets, destination, source)`` is linear in h,
in w and in weights. It returns the experts' rows too, ``y = h @ w``: the kernel stores them anyway,
and the gradient of weights takes them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .. import _config, _derivatives, _dispatch, _epilogue, _lowering, _native
from .._derivatives import total
from .._dispatch import Arrays, Machine, Plan
from .._ops import _grouped_primitives, _product
from .._ops._steps import Steps
from .._ops.exchange import all_gather, reduce_scatter
from . import _rows
from ._routing import Routing

OP = "grouped_matmul_reduce_scatter"

#: The least hidden units of a rank for which a GPU takes the kernel: with 384 of them its sums take
#: longer than its product hides, with 768 too on an H200, and with 3584 they do not
#: (docs/experiments/0042-scattered-sums.md).
LEAST_UNITS = 1024


@dataclasses.dataclass(frozen=True)
class Params:
    """A call, less its operands.

    Attributes:
      owners: ranks that the experts are split over, as of a gather (`_gathered.Params`).
    """

    axis_names: tuple[Any, ...]
    world: int
    transpose_rhs: bool
    out_dtype: np.dtype
    owners: int = 1
    prepared: str | None = None

    @property
    def product(self) -> _grouped_primitives.Params:
        """The grouped product alone."""
        return _grouped_primitives.Params(self.transpose_rhs, self.out_dtype)


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


def bind(
    h: jax.Array, w: jax.Array, weights: jax.Array | None, routing: Routing, params: Params
) -> jax.Array:
    """The sums. Operands vary over the axes."""
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
    return [_scattered(y, kept.weights, kept, params), y]


def _product_of(h: Any, w: Any, kept: _Operands, params: Params) -> Any:
    return _grouped_primitives.grouped_matmul.bind(h, w, kept.counts, params=params.product)[0]


def _scattered(y: Any, weights: Any, kept: _Operands, params: Params) -> Any:
    part = _rows.combine(y, weights, kept.source, kept.destination)
    return reduce_scatter(part, axis_name=params.axis_names, scatter_dimension=0, tiled=True)


# ---- What the lowering asks ----------------------------------------------------------------------

_STEPS = Steps("a grouped product, then a reduce-scatter")


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
        "dtype": _native.DTYPES.index(kept.h.dtype.name),
        "out_dtype": _native.DTYPES.index(params.out_dtype.name),
        "transpose_rhs": int(params.transpose_rhs),
        "owners": params.owners,
    }


def _shapes(arrays: Arrays, params: Params) -> list[_lowering.ShapeDtype]:
    kept = _Operands(*arrays)
    tokens, columns = kept.destination.shape[0], kept.w.shape[1 if params.transpose_rhs else 2]
    shapes = (tokens // params.world, columns), (kept.h.shape[0], columns)
    return [(shape, params.out_dtype) for shape in shapes]


def _plan(arrays: Arrays, params: Params, machine: Machine) -> Plan:
    kept = _Operands(*arrays)
    if why := _product.kernel_takes(
        kept.h, kept.w, params.out_dtype, params.world, machine.platform
    ):
        return _STEPS.plan(why)
    if params.world == 1 and not (machine.on_gpus and _config.config.always):
        return _STEPS.plan("there is one rank, and nothing to scatter")
    call = _call(arrays, params)
    if machine.on_gpus and call["k"] < LEAST_UNITS and not _config.config.always:
        return _STEPS.plan(f"a product of {call['k']} units does not hide the sums")
    if machine.on_gpus:
        call |= _grouped_primitives.forced_configuration(False)
    native = _STEPS.native_plan(OP, call, machine, fills="sums")
    if isinstance(native, Plan):
        return native
    if not _config.config.always and machine.on_gpus and native["parts"] == 0:
        why = _grouped_primitives.why_one_class(call, _native.FEW_SPANS)
        return _STEPS.plan(f"{why}, and all sums would wait for all tiles")
    way = "tiles of peers' tokens first" if native["parts"] else "tiles in the order of experts"
    return _dispatch.fused(f"one kernel multiplies, sums and scatters, {way}", native)


def _attributes(arrays: Arrays, params: Params, plan: Plan) -> dict[str, Any]:
    return {
        "choice": plan.choice,
        "item_tokens": np.int64(plan.config["item_tokens"]),
        "parts": np.int64(plan.config["parts"]),
        "transpose_rhs": params.transpose_rhs,
    }


def _flops(arrays: Arrays, params: Params) -> int:
    h, w, *_ = arrays
    return 2 * h.shape[0] * w.shape[1] * w.shape[2]


RULES = _lowering.Rules(
    name=OP,
    result_shapes=_shapes,
    # Where no kernel can reach the peers, the grouped product's own kernel is still of use.
    reference=_in_two_steps,
    plan=_plan,
    plan_two_level=_STEPS.plan_two_level,
    attributes=_attributes,
    batch=_product.bind_one_by_one,
    decomposed=_in_two_steps,
    flops=_flops,
)
_primitive = _lowering.make_primitive(RULES)


# ---- Derivatives ---------------------------------------------------------------------------------


def _forward(operands: Sequence[Any], params: Params) -> tuple[Sequence[Any], Any]:
    out, y = _primitive.bind(*operands, params=params)
    return [out, y], (_Operands(*operands), y)


def _tangents(kept: Any, tangents: Sequence[Any], params: Params) -> list[Any]:
    operands, y = kept
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
        sums.append(_scattered(y, dweights, operands, params))
    return [total(sums), total(rows) if rows else jnp.zeros_like(y)]


def _backward(
    kept: Any, cotangents: Sequence[Any], wanted: Sequence[Any], params: Params
) -> list[Any]:
    operands, y = kept
    h, w, weights, *_ = wanted
    dout, dy = cotangents
    dweights = None
    if dout is not None:
        gathered = all_gather(dout, axis_name=params.axis_names, axis=0, tiled=True)
        if weights is not None:
            dweights = _rows.dots(y, gathered, operands.source, operands.destination)
        if h is not None or w is not None:
            spread = _rows.spread(gathered, operands.weights, operands.source, operands.destination)
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
        raise _derivatives.not_linear(OP, "it is linear in h, w and weights, one at a time")
    y = _product_of(kept.h, kept.w, kept, params) if kept.weights is None else None
    return kept, y


_derivatives.differentiate(
    _primitive, _derivatives.Derivatives(_forward, _tangents, _backward, _kept)
)
