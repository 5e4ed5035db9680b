"""matmul: a product on one rank, for operands that XLA has no product for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.typing import DTypeLike

from .. import _epilogue, _lax, _recipe, _scaled
from .._lax import several
from .._recipe import AnyRecipe, Weight
from .._scaled import Operand, Scaled
from . import _by_recipe, _product

OP = "matmul"


def matmul(
    x: Operand,
    w: Weight | Sequence[Weight],
    *,
    transpose_rhs: bool = False,
    bias: jax.Array | Sequence[jax.Array | None] | None = None,
    activation: str | None = None,
    gated: bool = False,
    preferred_element_type: DTypeLike | None = None,
    precision: lax.PrecisionLike = None,
    recipe: AnyRecipe | None = None,
) -> Any:
    """``x @ w`` on one rank, by `lax.dot_general`; operands may have scales::

        x [..., m, k]   w [k, n]   ->   y [..., m, n]

    A product of scaled operands sums their values in float32, or int8 in int32. If neither scale
    has several entries along k, the sum is multiplied by x's scale and by w's: XLA makes one
    product of 8 bits of that. Otherwise every 128 of k are summed and multiplied so by themselves,
    in a loop, and the products added in float32 (DeepSeek-V3, arXiv 2412.19437, section 3.3.2):
    what is meant, and slow, until a kernel does it.

    Args:
      x: [..., m, k]; an array or a :class:`jflux.Scaled`, or what stands for one: a pair (values,
        scale), a `qwix.QArray` without zero point, Transformer Engine's tensor with one scale.
      w: [k, n], or [n, k] with `transpose_rhs`. Or a tuple or list of such, of any n each. Operands
        with and without a scale do not mix.
      transpose_rhs: w holds the transposed weight.
      bias, activation, gated: as in :func:`jflux.all_gather_matmul`.
      preferred_element_type: the type of y; by default bfloat16 of scaled operands, and without
        scales that of :func:`jflux.all_gather_matmul`.
      precision: as in `lax.dot_general`.
      recipe: a :class:`jflux.Recipe`, or a :class:`jflux.DelayedScaling`, by which x and w are
        quantised, and what gradients need; w may be already, by `Recipe.quantize_weight`.

    Returns:
      y, or a tuple of them if w is several and not gated.

    Raises:
      ValueError, TypeError: operands that do not fit, when the call is traced; or when a product of
        scaled operands is differentiated.

    Examples:
      >>> x = jflux.quantize(jnp.ones((8, 256)), jnp.float8_e4m3fn, block=(1, 128))
      >>> w = jflux.quantize(jnp.ones((256, 128)), jnp.float8_e4m3fn, block=(128, 128))
      >>> y = jflux.matmul(x, w)
      >>> y.dtype, float(y[0, 0])
      (dtype(bfloat16), 256.0)
    """
    recipe = _recipe.of_call(OP, recipe, x, w, transpose_rhs)
    x, w = _scaled.of_product(OP, x, w)
    ws = several(w)
    if not ws:
        raise ValueError("jflux.matmul: w is an empty sequence of weights")
    biases = _epilogue.of_each(bias, len(ws))
    epilogue = _epilogue.check(OP, len(ws), biases, activation, gated)
    for one in ws:
        _product.check_operands(OP, x, one, -2, "the second to last dimension")
        if x.shape[-1] != one.shape[1 if transpose_rhs else 0]:
            raise ValueError(
                f"jflux.matmul: x {x.shape} and w {tuple(one.shape)} do not contract "
                f"({transpose_rhs=})"
            )
    columns = [_product.columns(one, transpose_rhs) for one in ws]
    _epilogue.check_shapes(OP, columns, biases, gated)
    if preferred_element_type is None and not isinstance(x, Scaled):
        preferred_element_type = _product.default_dtype("all_gather_matmul", x, ws)
    out = _product.out_dtype(OP, (x, *ws), preferred_element_type, precision)
    if recipe is not None:
        return _by_recipe.product(
            OP, x, w, recipe=recipe, transpose_rhs=transpose_rhs, out=out, precision=precision,
            bias=bias, activation=activation, gated=gated,
        )  # fmt: skip
    wide = out if epilogue is None else _epilogue.sum_dtype(out)
    ys = [_lax.matmul(x, one, wide, precision, transpose_rhs) for one in ws]
    if epilogue is not None:
        ys, _ = _epilogue.apply(epilogue, ys, [b for b in biases if b is not None], out)
    return tuple(ys) if isinstance(w, tuple | list) and not gated else ys[0]
