"""The primitives of grouped products, and their derivatives.

``jflux_grouped_matmul(x, *w, group_sizes[, row_scale])`` is linear in x and in w where it has no
activation, and ``jflux_grouped_matmul_dw(x, dy, group_sizes)`` in both: each is the other's
transpose. An activation's derivative is that of `_epilogue`, of the products before it, which the
primitive returns too where a derivative is taken. The gradient of the x of a gate's two products is
one product of two terms: a call with two x, each of which has its weight.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.interpreters import ad
from jax.interpreters import partial_eval as pe

from ... import _config, _native
from ..._call import derivatives, gpu_code, local_ops, tuning_tables
from ..._call.forms import Op, ShapeDtype
from ..._call.plans import Arrays, Plan
from ..._call.primitives import make_primitive
from .. import _epilogue, _lax
from .._epilogue import Epilogue
from .._scaled import Scales
from . import _activation_gradient, _product, _product_plan
from .all_gather_matmul import ACTIVATED, PREACTIVATION

OP, DW = "grouped_matmul", "grouped_matmul_dw"

#: The most groups that the tables of the GPU kernels have room for.
_MOST_GROUPS = 2047


@dataclasses.dataclass(frozen=True)
class Params:
    """A grouped product, less its operands.

    Attributes:
      scaled: there is a row_scale.
      sums: also return the products that the activation is applied to, in y's type.
      terms: y is the sum of so many products, each of an x and a weight of its own; at most two.
      fill: rows of no group are zeros, in y, in the sums and in the gradient of x; else anything.
      share: which share of x's rows the groups have, about. The GPU kernel's tile depends on it.
    """

    transpose_rhs: bool
    out_dtype: np.dtype
    activation: str | None = None
    gated: bool = False
    scaled: bool = False
    sums: bool = False
    terms: int = 1
    fill: bool = True
    share: float = 1.0

    @property
    def weights(self) -> int:
        return 2 if self.gated else self.terms

    @property
    def epilogue(self) -> Epilogue:
        return Epilogue((False,) * (1 + self.gated), self.activation, self.gated)

    def product(self, out: Any = None, *, scaled: bool = False) -> Params:
        """The product with one weight alone."""
        out = np.dtype(out or self.out_dtype)
        return Params(self.transpose_rhs, out, scaled=scaled, fill=self.fill, share=self.share)


@dataclasses.dataclass(frozen=True)
class DwParams:
    """The gradient with respect to a weight, less its operands. `share`: as in :class:`Params`."""

    out_dtype: np.dtype
    share: float = 1.0


def _unpack(operands: Sequence[Any], params: Params) -> tuple[Any, Sequence[Any], Any, Any]:
    """(x, weights, group_sizes, row_scale or None); x of the first term."""
    xs, rest = operands[: params.terms], operands[params.terms :]
    count = params.weights
    return xs[0], rest[:count], rest[count], rest[count + 1] if params.scaled else None


def _mask(rows: int, group_sizes: jax.Array) -> jax.Array:
    """bool [rows]: which rows a group has."""
    return lax.iota(jnp.int32, rows) < jnp.sum(group_sizes, dtype=jnp.int32)


def _masked(a: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """Zeros in the rows past the sum of the sizes."""
    mask = _mask(a.shape[0], group_sizes)
    return jnp.where(mask if a.ndim == 1 else mask[:, None], a, jnp.zeros((), a.dtype))


def _finish(
    sums: Sequence[jax.Array], scale: jax.Array | None, epilogue: Epilogue, out: Any
) -> jax.Array:
    """y from the products."""
    wide = _epilogue.sum_dtype(out)
    (y,) = _epilogue._activate(epilogue, [s.astype(wide) for s in sums])
    return (y if scale is None else scale.astype(wide)[:, None] * y).astype(out)


# ---- In plain lax --------------------------------------------------------------------------------


def reference(arrays: Arrays, params: Params) -> list[jax.Array]:
    """The call as `lax.ragged_dot`, and what follows it."""
    x, ws, sizes, scale = _unpack(arrays, params)
    numbers = lax.RaggedDotDimensionNumbers(
        (((1,), (2 if params.transpose_rhs else 1,)), ((), ())), [0], [0]
    )
    # Products are summed in at least float32, also if y is narrower.
    wide = jnp.promote_types(_epilogue.sum_dtype(x.dtype), params.out_dtype)
    xs = arrays[: params.terms] if params.terms > 1 else [x] * len(ws)
    sums = [
        _masked(_lax.ragged_dot_general(x, w, sizes, numbers, preferred_element_type=wide), sizes)
        for x, w in zip(xs, ws, strict=True)
    ]
    sums = [sums[0] + sums[1]] if params.terms > 1 else sums
    scale = None if scale is None else _masked(scale, sizes)
    y = _finish(sums, scale, params.epilogue, wide).astype(params.out_dtype)
    return [y, *(s.astype(params.out_dtype) for s in sums if params.sums)]


def _reference_dw(arrays: Arrays, params: DwParams) -> list[jax.Array]:
    x, dy, sizes = arrays
    numbers = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
    wide = jnp.promote_types(_epilogue.sum_dtype(x.dtype), params.out_dtype)
    dw = _lax.ragged_dot_general(
        _masked(x, sizes), _masked(dy, sizes), sizes, numbers, preferred_element_type=wide
    )
    return [dw.astype(params.out_dtype)]


# ---- What the lowering asks ----------------------------------------------------------------------


def _shapes(arrays: Arrays, params: Params) -> list[ShapeDtype]:
    x, ws, _, _ = _unpack(arrays, params)
    shape = (x.shape[0], ws[0].shape[1 if params.transpose_rhs else 2])
    return [(shape, params.out_dtype)] * (1 + (1 + params.gated if params.sums else 0))


def _shapes_dw(arrays: Arrays, params: DwParams) -> list[ShapeDtype]:
    x, dy, sizes = arrays
    return [((sizes.shape[0], x.shape[1], dy.shape[1]), params.out_dtype)]


def _why_not(arrays: Arrays, params: Params, platform: str) -> str | None:
    x, (w, *_), sizes, _ = _unpack(arrays, params)
    why = _product.kernel_takes(x, w, params.out_dtype, 1, platform)
    return why or _why_not_sizes(w.shape[1:], x.dtype, sizes, platform)


def _why_not_dw(arrays: Arrays, params: DwParams, platform: str) -> str | None:
    x, dy, sizes = arrays
    why = _product.kernel_takes(x, dy, params.out_dtype, 1, platform)
    return why or _why_not_sizes((x.shape[1], dy.shape[1]), x.dtype, sizes, platform)


def _why_not_sizes(widths: Sequence[int], dtype: np.dtype, sizes: Any, platform: str) -> str | None:
    """Why the kernel does not take these widths (k and n) or this number of groups."""
    if platform != "cuda":
        return None
    vector = _product_plan.vector(dtype)
    if any(width % vector for width in widths):
        return f"k and n are {tuple(widths)}, the kernel takes multiples of {vector}"
    if sizes.shape[0] > _MOST_GROUPS:
        return f"{sizes.shape[0]} groups, the kernel takes up to {_MOST_GROUPS}"
    return None


def forced_tile(gated: bool, scales: Scales = Scales.NONE) -> np.ndarray:
    """(columns, cluster_m) of the GPU kernel that `tuning_tables.force` asks for; empty: what C++
    takes for the fastest, also where no grouped kernel for operands with such scales has the tile,
    or none with a gate."""
    choice = _config.config.current().configuration
    if isinstance(choice, tuning_tables.Choice) and not (gated and choice.tile_n % 128):
        tile = (choice.tile_n, choice.cluster_m)
        if tile in _native.GROUPED_TILES[scales]:
            return np.array(tile, np.int64)
    return np.zeros(0, np.int64)


def forced_configuration(gated: bool) -> dict[str, int]:
    """The forced tile as fields of a native plan function's call; empty if none is forced."""
    return dict(zip(("tile_n", "cluster_m"), forced_tile(gated).tolist(), strict=False))


def rows_from_each_rank(call: Mapping[str, int]) -> float:
    """How many rows each rank has for an expert, on average. `call` has the fields that the native
    plan function of a kernel over ranks reads."""
    return call["tokens"] * call["choices"] / (call["groups"] * call["owners"])


def why_one_class(call: Mapping[str, int], most_spans: int) -> str:
    """Why a kernel over ranks has no order of tiles by their ranks (ChooseParts of
    cc/ops/grouped_matmul/segments.h), in words. `call`: as its native plan function reads it;
    `most_spans`: that the kernel orders tiles by."""
    groups, world = call["groups"], call["world"]
    if groups * world > most_spans:
        return (
            f"{groups} experts times {world} ranks are more than {most_spans}, which a "
            "kernel can order tiles by"
        )
    return f"experts have few rows, {rows_from_each_rank(call):.3g} of each rank"


def _attributes(arrays: Arrays, params: Params, plan: Plan) -> dict[str, Any]:
    return {
        "activation": np.int64(_native.number_of(params.activation, _native.ACTIVATIONS)),
        "fill": params.fill,
        "gated": params.gated,
        "portable": gpu_code.runs_portable(),
        "scaled": params.scaled,
        "share": np.float64(params.share),
        "sums": params.sums,
        "terms": np.int64(params.terms),
        "tile": forced_tile(params.gated),
        "transpose_rhs": params.transpose_rhs,
    }


def _attributes_dw(arrays: Arrays, params: DwParams, plan: Plan) -> dict[str, Any]:
    return {
        "portable": gpu_code.runs_portable(),
        "share": np.float64(params.share),
        "tile": forced_tile(gated=False),
    }


# ---- Batches -------------------------------------------------------------------------------------


def _batch(primitive: Any, operands: Any, dims: Any, *, params: Params) -> Any:
    bind = functools.partial(primitive.bind, params=params)
    if params.terms > 1:
        return _batch_terms(bind, operands, dims, params)
    x, ws, sizes, scale = _unpack(operands, params)
    x_dim, w_dims, sizes_dim, scale_dim = _unpack(dims, params)
    batched_ws = [d is not None for d in w_dims]
    if sizes_dim is None and not any(batched_ws):
        count = (scale if x_dim is None else x).shape[scale_dim if x_dim is None else x_dim]
        rows = [_product.interleaved(x, x_dim, count)]
        rows += [] if scale is None else [_product.interleaved(scale, scale_dim, count)]
        results = bind(rows[0], *ws, sizes * count, *rows[1:])
        return [r.reshape(-1, count, r.shape[1]) for r in results], [1] * len(results)
    if sizes_dim is None and x_dim is None and scale_dim is None and all(batched_ws):
        columns = 1 if params.transpose_rhs else 2
        moved = [jnp.moveaxis(w, d, columns) for w, d in zip(ws, w_dims, strict=True)]
        count = moved[0].shape[columns]
        wide = [w.reshape(*w.shape[:columns], -1, *w.shape[columns + 2 :]) for w in moved]
        results = bind(x, *wide, sizes, *([] if scale is None else [scale]))
        return [r.reshape(r.shape[0], count, -1) for r in results], [1] * len(results)
    return _product.batch_one_by_one(bind, operands, dims)


def _batch_terms(bind: Any, operands: Any, dims: Any, params: Params) -> Any:
    """Of a sum of products: those of rows alone stay one call."""
    count = params.terms
    if params.scaled or dims[0] is None or any(d is not None for d in dims[count:]):
        return _product.batch_one_by_one(bind, operands, dims)
    size = operands[0].shape[dims[0]]
    rows = [
        _product.interleaved(x, d, size)
        for x, d in zip(operands[:count], dims[:count], strict=True)
    ]
    *ws, sizes = operands[count:]
    results = bind(*rows, *ws, sizes * size)
    return [r.reshape(-1, size, r.shape[1]) for r in results], [1] * len(results)


def _batch_dw(primitive: Any, operands: Any, dims: Any, *, params: DwParams) -> Any:
    bind = functools.partial(primitive.bind, params=params)
    x, dy, sizes = operands
    x_dim, dy_dim, sizes_dim = dims
    if sizes_dim is not None or (x_dim is not None and dy_dim is not None):
        return _product.batch_one_by_one(bind, operands, dims)
    moved = jnp.moveaxis(dy if x_dim is None else x, dy_dim if x_dim is None else x_dim, 1)
    wide = moved.reshape(moved.shape[0], -1)
    if x_dim is None:
        (dw,) = bind(x, wide, sizes)
        return [dw.reshape(*dw.shape[:2], *moved.shape[1:])], [2]
    (dw,) = bind(wide, dy, sizes)
    return [dw.reshape(dw.shape[0], *moved.shape[1:], dw.shape[2])], [1]


def _flops(arrays: Arrays, params: Params) -> int:
    """The FLOPs of all rows, as `lax.ragged_dot` counts them. Tracing does not know how many rows
    belong to a group."""
    x, ws, *_ = _unpack(arrays, params)
    return sum(2 * x.shape[0] * w.shape[1] * w.shape[2] for w in ws)


def _flops_dw(arrays: Arrays, params: DwParams) -> int:
    x, dy, _ = arrays
    return 2 * x.shape[0] * x.shape[1] * dy.shape[1]


kernel = local_ops.kernel(OP, why_not=_why_not, attributes=_attributes, checked_on_gpus=True)
grouped_matmul = make_primitive(
    Op(
        name=OP,
        result_shapes=_shapes,
        reference=reference,
        forms=(kernel,),
        batch=_batch,
        flops=_flops,
        is_local=True,
        values=1,
    )
)
grouped_matmul_dw = make_primitive(
    Op(
        name=DW,
        result_shapes=_shapes_dw,
        reference=_reference_dw,
        forms=(
            local_ops.kernel(
                DW,
                why_not=_why_not_dw,
                attributes=_attributes_dw,
                checked_on_gpus=True,
            ),
        ),
        batch=_batch_dw,
        flops=_flops_dw,
        is_local=True,
    )
)


# ---- Derivatives ---------------------------------------------------------------------------------


def _is_zero(tangent: Any) -> bool:
    return isinstance(tangent, ad.Zero)


def _product_of(x: Any, w: Any, sizes: Any, scale: Any, params: Params) -> Any:
    scales = () if scale is None else (scale,)
    (y,) = grouped_matmul.bind(
        x, w, sizes, *scales, params=params.product(scaled=scale is not None)
    )
    return y


def _tangent(x: Any, w: Any, dx: Any, dw: Any, sizes: Any, params: Params) -> Any:
    """The tangent of ``x @ w``. It, dx and dw are None where they are zero."""
    parts = (
        None if dx is None else _product_of(dx, w, sizes, None, params),
        None if dw is None else _product_of(x, dw, sizes, None, params),
    )
    return derivatives.total(parts)


def _jvp(primals: Any, tangents: Any, *, params: Params) -> Any:
    if params.terms > 1:
        return _jvp_terms(primals, tangents, params)
    x, ws, sizes, scale = _unpack(primals, params)
    dx, dws, _, dscale = _unpack(tangents, params)
    if scale is not None:
        scale = _masked(scale, sizes)
        if not _is_zero(dscale):
            dscale = _masked(dscale, sizes)
    if params.activation is None:
        results = grouped_matmul.bind(*primals, params=params)
        terms = []
        if scale is not None and not _is_zero(dscale):
            # (s x)' @ w: transposed, one product gives the gradients of both.
            wide = _epilogue.sum_dtype(x.dtype)
            moved = dscale[:, None] * x.astype(wide)
            if not _is_zero(dx):
                moved += scale[:, None] * dx.astype(wide)
            terms.append(_product_of(moved.astype(x.dtype), ws[0], sizes, None, params))
        elif not _is_zero(dx):
            terms.append(_product_of(dx, ws[0], sizes, scale, params))
        if not _is_zero(dws[0]):
            terms.append(_product_of(x, dws[0], sizes, scale, params))
        return results, [sum(terms[1:], terms[0]) if terms else local_ops.zero_of(results[0])]

    y, *sums = grouped_matmul.bind(*primals, params=dataclasses.replace(params, sums=True))
    y, sums = checkpoint_name(y, ACTIVATED), [checkpoint_name(s, PREACTIVATION) for s in sums]
    moved = [derivatives.none_if_zero(t) for t in (dx, *dws)]
    dsums = derivatives.tangents_of(_SUMS, sums, (x, tuple(ws), sizes), moved, params)
    # Recomputed from the sums in the backward pass: nothing else is kept.
    if scale is None:
        dy = _activation_gradient.tangent(sums, dsums, y, sizes, params.epilogue)
        return [y, *(sums if params.sums else ())], [dy, *(dsums if params.sums else ())]
    finish = jax.checkpoint(
        functools.partial(_finish, epilogue=params.epilogue, out=params.out_dtype),
        prevent_cse=False,
    )
    if _is_zero(dscale):
        _, dy = jax.jvp(lambda sums: finish(sums, scale), (sums,), (dsums,))
    else:
        _, dy = jax.jvp(finish, (sums, scale), (dsums, dscale))
    return [y, *(sums if params.sums else ())], [dy, *(dsums if params.sums else ())]


def _sums_tangents(kept: Any, tangents: Sequence[Any], params: Params) -> list[Any]:
    """Those of the products before an activation: x's, and of each weight."""
    x, ws, sizes = kept
    dx, *dws = tangents
    found = []
    for w, dw in zip(ws, dws, strict=True):
        d = _tangent(x, w, dx, dw, sizes, params)
        shape = (x.shape[0], w.shape[1 if params.transpose_rhs else 2])
        found.append(jnp.zeros(shape, params.out_dtype) if d is None else d)
    return found


def _sums_backward(
    kept: Any, cotangents: Sequence[Any], wanted: Sequence[Any], params: Params
) -> list[Any]:
    x, ws, sizes = kept
    dx, given = None, [i for i, dy in enumerate(cotangents) if dy is not None]
    if wanted[0] is not None and given:
        out = np.dtype(wanted[0].dtype)
        back = Params(
            not params.transpose_rhs, out, terms=len(given), fill=params.fill, share=params.share
        )
        dys = [cotangents[i].astype(x.dtype) for i in given]
        (dx,) = grouped_matmul.bind(*dys, *(ws[i] for i in given), sizes, params=back)
    dws = [
        None
        if dy is None or aval is None
        else weight_gradient(x, dy, sizes, aval.dtype, params.transpose_rhs, params.share)
        for dy, aval in zip(cotangents, wanted[1:], strict=True)
    ]
    return [dx, *dws]


_SUMS = derivatives.Derivatives(
    forward=lambda operands, params: ([], None),  # the primitive's own results
    tangents=_sums_tangents,
    backward=_sums_backward,
    kept=lambda operands, params: None,
)


def _jvp_terms(primals: Any, tangents: Any, params: Params) -> Any:
    """Of a sum of products, which is linear in the x and in the weights."""
    results = grouped_matmul.bind(*primals, params=params)
    count, sizes = params.terms, primals[2 * params.terms]
    moved = [derivatives.none_if_zero(t) for t in tangents]
    pairs = zip(primals[:count], primals[count:], moved[:count], moved[count:], strict=False)
    dy = derivatives.total([_tangent(x, w, dx, dw, sizes, params) for x, w, dx, dw in pairs])
    return results, [local_ops.zero_of(results[0]) if dy is None else dy]


def _transpose_terms(dy: Any, operands: Sequence[Any], params: Params) -> list[Any]:
    count, found = params.terms, []
    sizes, one = operands[2 * count], params.product()
    for x, w in zip(operands[:count], operands[count : 2 * count], strict=True):
        dx, dw, _ = _transpose([dy], x, w, sizes, params=one)
        found.append((dx, dw))
    dxs, dws = zip(*found, strict=True)
    return [*dxs, *dws, None]


def _transpose(cotangents: Any, *operands: Any, params: Params) -> Any:
    """The transpose rule. JAX transposes linear calls only, so there is no activation."""
    (dy,) = cotangents
    if _is_zero(dy):
        return [None] * len(operands)
    if params.terms > 1:
        return _transpose_terms(dy, operands, params)
    x, (w,), sizes, scale = _unpack(operands, params)
    nothing = [None] * (len(operands) - 2)
    if ad.is_undefined_primal(x):
        back = dataclasses.replace(
            params, transpose_rhs=not params.transpose_rhs, out_dtype=x.aval.dtype
        )
        scales = () if scale is None else (scale,)
        (dx,) = grouped_matmul.bind(dy.astype(w.dtype), w, sizes, *scales, params=back)
        return [dx, None, *nothing]
    if scale is not None:
        dy = scale[:, None] * dy.astype(_epilogue.sum_dtype(dy.dtype))
    dw = weight_gradient(x, dy, sizes, w.aval.dtype, params.transpose_rhs, params.share)
    return [None, dw, *nothing]


def weight_gradient(
    x: Any, dy: Any, sizes: Any, out: Any, transpose_rhs: bool, share: float = 1.0
) -> Any:
    pair = (dy.astype(x.dtype), x) if transpose_rhs else (x, dy.astype(x.dtype))
    (dw,) = grouped_matmul_dw.bind(*pair, sizes, params=DwParams(np.dtype(out), share))
    return dw


def _jvp_dw(primals: Any, tangents: Any, *, params: DwParams) -> Any:
    x, dy, sizes = primals
    results = grouped_matmul_dw.bind(*primals, params=params)
    terms = []
    for i, tangent in enumerate(tangents[:2]):
        if not _is_zero(tangent):
            pair = (tangent, dy) if i == 0 else (x, tangent)
            terms += grouped_matmul_dw.bind(*pair, sizes, params=params)
    return results, [sum(terms[1:], terms[0]) if terms else local_ops.zero_of(results[0])]


def _transpose_dw(cotangents: Any, x: Any, dy: Any, sizes: Any, *, params: DwParams) -> Any:
    (dw,) = cotangents
    if _is_zero(dw):
        return [None, None, None]
    wants_x = ad.is_undefined_primal(x)
    aval, other = (x.aval, dy) if wants_x else (dy.aval, x)
    back = Params(transpose_rhs=wants_x, out_dtype=aval.dtype, share=params.share)
    (d,) = grouped_matmul.bind(other, dw.astype(other.dtype), sizes, params=back)
    return [d, None, None] if wants_x else [None, d, None]


def _drop_unused(used: Sequence[bool], *rest: Any) -> Any:
    """Sums that nobody uses are not written."""
    eqn = rest[-1]  # jax 0.12 passes which inputs are live before it
    params = eqn.params["params"]
    inputs = [True] * len(eqn.invars)
    if not any(used):
        return [False] * len(inputs), None
    if not params.sums or any(used[1:]):
        return inputs, eqn
    smaller = dataclasses.replace(params, sums=False)
    return inputs, eqn.replace(outvars=eqn.outvars[:1], params={"params": smaller})


ad.primitive_jvps[grouped_matmul] = _jvp
ad.primitive_transposes[grouped_matmul] = _transpose
pe.dce_rules[grouped_matmul] = _drop_unused
ad.primitive_jvps[grouped_matmul_dw] = _jvp_dw
ad.primitive_transposes[grouped_matmul_dw] = _transpose_dw
