"""grouped_matmul by a recipe, and its gradients: quantised operands, and the products of groups
that exist."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from ..._call.derivatives import differentiated
from .. import _quantize_groups, _scaled
from .._quantize_groups import Transposed
from .._recipe import QUANTIZED, WIDE, Format, QuantizedWeight, Recipe
from .._scaled import Scaled
from . import _by_recipe, _grouped_dw_scaled, _grouped_primitives, _grouped_scaled
from ._product import PRODUCT

#: The rows of a group, on average, from which a weight gradient is a product of 8 bits: layers gain
#: with 1024, and lose with 512 (docs/experiments/0056-eight-bits.md). Of few k-blocks the end of a
#: tile takes what they gain, and half a block of zeros is multiplied with each group's rows.
_LEAST_ROWS = 1024


@dataclasses.dataclass(frozen=True)
class _Params:
    """The products of a call, less their operands: x, each w, and a list of the sizes, of the
    quantised copies (forward, backward) of each w, and of what has `Moved` x, or None.

    Attributes:
      fill: as in `_grouped_primitives.Params`.
      reference: in plain `lax`.
    """

    recipe: Recipe
    weights: int
    transpose_rhs: bool
    out: np.dtype
    fill: bool
    share: float
    reference: bool


class Moved(NamedTuple):
    """Rows of x that other ranks sent, quantised.

    Attributes:
      rows: [M, K].
      handle: of the dispatch; its `combine` brings the gradients of the rows back.
    """

    rows: Scaled
    handle: Any


def products(
    x: jax.Array,
    ws: Sequence[jax.Array | QuantizedWeight],
    sizes: jax.Array,
    recipe: Recipe,
    of: _grouped_primitives.Params,
    reference: bool = False,
    moved: Moved | None = None,
) -> Sequence[jax.Array]:
    """That of each w, of operands that were checked. `of`: the call without a recipe. With `moved`,
    of its rows in place of x, of which nothing but the gradient is needed."""
    params = _Params(recipe, len(ws), of.transpose_rhs, of.out_dtype, of.fill, of.share, reference)
    copies = [
        (one.forward, one.backward) if isinstance(one, QuantizedWeight) else None for one in ws
    ]
    arrays = [one.w if isinstance(one, QuantizedWeight) else one for one in ws]
    return _products(params, x, *arrays, lax.stop_gradient([sizes, copies, moved]))


def _split(operands: Sequence[Any], params: _Params) -> tuple[Any, Sequence[Any], Any]:
    """(x, ws, [sizes, copies, moved])."""
    return operands[0], operands[1 : 1 + params.weights], operands[-1]


def _quantized(a: jax.Array, form: Format, sizes: jax.Array) -> Scaled:
    """a [rows, columns]. Rows past the last group, which may be anything, are no part of a scale
    that rows share."""
    rows = a if form.block[0] == 1 else _grouped_primitives._masked(a, sizes)
    return form.of_rows(rows)[0]


def _sum_of_products(
    xs: Sequence[Scaled],
    ws: Sequence[Scaled],
    sizes: jax.Array,
    out: np.dtype,
    precision: Any,
    params: _Params,
) -> jax.Array:
    """Each w is [groups, n, k]."""
    whole = _by_recipe.have_whole_blocks(*xs, *ws)
    # What kernels give; others are rounded once more.
    direct = (len(xs) == 1 or whole) and out in (WIDE, np.dtype(np.float32))
    wanted = out if direct else np.dtype(np.float32)
    if len(xs) > 1 and whole:
        call = _grouped_primitives.Params(True, wanted, fill=params.fill, share=params.share)
        f = _grouped_scaled.terms_in_lax if params.reference else _grouped_scaled.bind_terms
        return f(xs, ws, sizes, call).astype(out)
    terms = [_multiply(x, w, sizes, wanted, precision, params) for x, w in zip(xs, ws, strict=True)]
    return sum(terms[1:], terms[0]).astype(out)


def _multiply(
    x: Scaled, w: Scaled, sizes: jax.Array, out: np.dtype, precision: Any, params: _Params
) -> jax.Array:
    call = _grouped_primitives.Params(True, out, fill=params.fill, share=params.share)
    has_blocks = max(x.scale.shape[-1], w.scale.shape[-1]) > 1
    if _scaled.is_highest(precision) and not has_blocks:
        # Tensor cores keep fewer bits of sums of 8-bit floats. bfloat16 holds values times powers
        # of two, so this is their product too.
        arrays = (x.dequantize(WIDE), w.dequantize(WIDE), sizes)
        if params.reference:
            return _grouped_primitives.reference(arrays, call)[0]
        return _grouped_primitives.grouped_matmul.bind(*arrays, params=call)[0]
    f = _grouped_scaled.in_lax if params.reference else _grouped_scaled.bind
    return f(x, [w], sizes, (), call)


def _made(operands: Sequence[Any], params: _Params) -> tuple[Sequence[jax.Array], Any]:
    """(the products, what is kept)."""
    x, ws, (sizes, copies, moved) = _split(operands, params)
    recipe, forward, for_dx = params.recipe, [], []
    for w, copy in zip(ws, copies, strict=True):
        # As `_by_recipe` keeps them.
        for_dx.append(w if copy is None else copy[1])
        turned = not params.transpose_rhs  # to [n, k]
        forward.append(
            _by_recipe.quantized_copy(w, turned, recipe, None) if copy is None else copy[0]
        )
    kept = _quantized(x, recipe.x, sizes) if moved is None else moved.rows
    ys = [
        _sum_of_products([kept], [w], sizes, params.out, recipe.precision, params) for w in forward
    ]
    return ys, (kept, for_dx, sizes, None if moved is None else moved.handle)


def _forward(call: Any, operands: Sequence[Any], params: _Params) -> tuple[Sequence[Any], Any]:
    ys, (x, *rest) = _made(operands, params)
    x = jax.tree.map(lambda a: checkpoint_name(a, QUANTIZED), x)
    return [checkpoint_name(y, PRODUCT) for y in ys], (x, *rest)


def _tangents(kept: Any, tangents: Sequence[Any], params: _Params) -> Any:
    raise NotImplementedError(
        "jflux.grouped_matmul: with a recipe there is reverse mode alone (jax.grad, jax.vjp): a "
        "recipe does not say how tangents are quantised"
    )


def _backward(
    kept: Any, cotangents: Sequence[Any], wanted: Sequence[Any], params: _Params
) -> list[Any]:
    (x, ws, sizes, handle), recipe = kept, params.recipe
    x_type, w_types, _ = _split(wanted, params)
    dx, dws = None, [None] * params.weights
    given = [i for i, dy in enumerate(cotangents) if dy is not None]
    has_dx, turned = x_type is not None and bool(given), {}
    quantized: list[Scaled] = []
    for i in given:
        dy, copy = cotangents[i], None
        if w_types[i] is not None and _sums_rows_in_8_bits(x, dy, sizes, params):
            assert recipe.dw is not None
            if has_dx:
                copy, turned[i] = _quantize_groups.quantized(dy, sizes, recipe.dw[1])
            else:
                turned[i] = _quantize_groups.transposed(dy, sizes, recipe.dw[1])
        elif has_dx:
            copy = _quantized(dy, recipe.dy, sizes)
        quantized += [] if copy is None else [copy]
    if has_dx:
        copies = [
            ws[i]
            if isinstance(ws[i], Scaled)
            else _by_recipe.quantized_copy(ws[i], params.transpose_rhs, recipe, None)
            for i in given
        ]
        out = np.dtype(x_type.dtype)
        dx = _sum_of_products(quantized, copies, sizes, out, recipe.gradient_precision, params)
        dx = dx if handle is None else handle.combine(dx, None, out).astype(out)
    if turned:
        assert recipe.dw is not None
        x_turned = _quantize_groups.transposed(x, sizes, recipe.dw[0])
    for i in given:
        if w_types[i] is None:
            continue
        dtype = w_types[i].dtype
        if i in turned:
            pair = (x_turned, turned[i])
            dws[i] = _weight_gradient_in_8_bits(pair, x.shape[0], sizes, dtype, params)
        else:
            dws[i] = _weight_gradient(x, cotangents[i], sizes, dtype, params)
    return [dx, *dws, None]


def _sums_rows_in_8_bits(x: Scaled, dy: jax.Array, sizes: jax.Array, params: _Params) -> bool:
    """Whether the weight gradient of x and dy is a product of 8 bits."""
    recipe = params.recipe
    form, forms = _quantize_groups.FORM, (_quantize_groups.FORM, _quantize_groups.SQUARES)
    if recipe.dw is None or any(one not in forms for one in recipe.dw):
        return False
    if recipe.dy != form or x.dtype != form.dtype:
        return False
    vectors = (x.shape[1] % 16, dy.shape[1] % 16) == (0, 0)  # what kernels take
    few = sizes.shape[0] <= _quantize_groups.MOST_GROUPS
    return vectors and few and params.share * x.shape[0] >= _LEAST_ROWS * sizes.shape[0]


def _weight_gradient_in_8_bits(
    pair: tuple[Transposed, Transposed], rows: int, sizes: jax.Array, dtype: Any, params: _Params
) -> Any:
    """`pair`: of x and of dy."""
    out = dtype if dtype == WIDE else np.dtype(np.float32)
    f = _grouped_dw_scaled.in_lax if params.reference else _grouped_dw_scaled.bind
    x, dy = pair[::-1] if params.transpose_rhs else pair
    return f(x, dy, sizes, out, rows).astype(dtype)


def _weight_gradient(
    x: Scaled, dy: jax.Array, sizes: jax.Array, dtype: Any, params: _Params
) -> Any:
    out = dtype if dtype == WIDE else np.dtype(np.float32)
    pair = [x.dequantize(WIDE), dy.astype(WIDE)]
    arrays = (*(pair[::-1] if params.transpose_rhs else pair), sizes)
    call = _grouped_primitives.DwParams(np.dtype(out), params.share)
    if params.reference:
        (dw,) = _grouped_primitives._reference_dw(arrays, call)
    else:
        (dw,) = _grouped_primitives.grouped_matmul_dw.bind(*arrays, params=call)
    return dw.astype(dtype)


_products = differentiated(
    lambda params, *operands: _made(operands, params)[0],
    kept=lambda operands, params: _made(operands, params)[1],
    tangents=_tangents,
    backward=_backward,
    forward=_forward,
    axes=lambda params: None,
)
