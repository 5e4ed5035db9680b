"""grouped_matmul: the function, and its reference. Its primitives: _grouped_primitives.py; kernels:
cc/ops/grouped_matmul."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from ..._call import local_ops, value_checks
from .. import _epilogue, _recipe, _scaled
from .._epilogue import ACTIVATED, PREACTIVATION
from .._lax import several
from .._recipe import DelayedScaling, Format, QuantizedWeight, Recipe, Weight
from .._scaled import Operand, Scaled
from . import (
    _activation_gradient,
    _grouped_by_recipe,
    _grouped_primitives,
    _grouped_scaled,
    _product,
)
from ._grouped_by_recipe import Moved
from ._grouped_primitives import Params
from ._product import PRODUCT

OP = _grouped_primitives.OP


def grouped_matmul(
    x: Operand,
    w: Weight | Sequence[Weight],
    group_sizes: jax.Array,
    *,
    transpose_rhs: bool = False,
    preferred_element_type: DTypeLike | None = None,
    activation: str | None = None,
    gated: bool = False,
    row_scale: jax.Array | None = None,
    recipe: Recipe | None = None,
    quantize: Format | None = None,
    rest: str = "zeros",
    expected_rows: int | None = None,
) -> Any:
    """``x[r] @ w[e]`` for each row r of group e: the product of a mixture's experts.

    Rows lie group after group; group e has ``group_sizes[e]`` of them::

        x [M, K]   w [E, K, N]   group_sizes i32 [E]   ->   y [M, N]

    means what `jax.lax.ragged_dot` means, and rows past the sum of the sizes are zeros, in y and in
    the gradient of x, whatever x and dy have there; or anything, with ``rest="undefined"``. The
    sizes stay on the device. It computes on one device: there is no axis, and inside
    `jax.shard_map` each rank has its own call.

    With an activation, y is ``activation(x[r] @ w[e])``; with ``gated`` and w = (gate, up),
    ``activation(x[r] @ gate[e]) * (x[r] @ up[e])`` (GLU variants, arXiv 2002.05202). With
    `row_scale` each row of that is multiplied by its number, such as a token's routing weight. All
    is computed in float32 (float64 for float64) and rounded once.

    Differentiable in forward and reverse mode, any number of times. dx is a grouped product with w
    transposed in place, dw the primitive ``jflux_grouped_matmul_dw``, exactly zero for a group
    without rows. With an activation, the products before it are kept for the backward pass in y's
    type, under the name ``"jflux_preactivation"``, and nothing else of y's size. `vmap` folds a
    batch of x, or of w, into one call; a batch of sizes, or of both, is one call after the other.

    CPUs run it in C++, GPUs in one kernel.

    Operands of 8 bits may have scales (:class:`jflux.Scaled`): x's of rows [M, 1], of all [1, 1],
    or of blocks of 128 of k [M, K / 128]; w's of each group, with 1, N or N / 128 entries of n, and
    1 or K / 128 of k, in w's own order. The sums of values, in float32 (int32 for int8), are
    multiplied by x's scale and by w's; where one has entries of k, every 128 of k are summed by
    themselves (DeepSeek-V3, arXiv 2412.19437, section 3.3.2). Such calls have no derivatives. On
    Hopper a kernel takes float8_e4m3fn, with float8_e5m2 as x too, and int8 if no scale has entries
    of k; K and N that are multiples of 16, and entries of k of w that are for 128 columns each. On
    other GPUs one takes them if no scale has entries of k: int8, and from compute capability 8.9 on
    the others. A w [E, K, N] is transposed first, in each call. Else values of 8-bit floats are
    multiplied in bfloat16, which holds them, and int8 by the reference.

    Args:
      x: [M, K]; float16, bfloat16, float32 or float64 (CPU), float16 or bfloat16 (GPU). Other types
        take the reference. Or a :class:`jflux.Scaled`, or what stands for one.
      w: [E, K, N], or [E, N, K] with `transpose_rhs`; or two such, with `gated`. Scaled if x is.
      group_sizes: [E] integers, at least 0, whose sum is at most M.
      transpose_rhs: w holds transposed weights. No copy is made.
      preferred_element_type: of y; by default x's and w's, or bfloat16 of scaled operands. Sums
        are in float32 (float64 for float64) whatever it is.
      activation: None, "gelu", "gelu_tanh" (its approximation), "relu" or "silu".
      gated: two weights make one y: the first product, activated, times the second.
      row_scale: [M], of any floating type; used in float32.
      recipe: a :class:`jflux.Recipe`, by which x, w and dy are quantised; w may be already, by
        `Recipe.quantize_weight`. dw is made in bfloat16 (as by a recipe with ``dw=None``), and so
        is dx where `gradient_precision` asks for more than a kernel's sums of 8 bits have.
      quantize: as in :func:`jflux.all_gather_matmul`.
      rest: what rows past the sum of the sizes hold, in y and in the gradient of x: "zeros", or
        "undefined", where nothing reads them: kernels do not write them then. Expert parallelism
        has many, since a rank has room for all tokens that may come.
      expected_rows: how many of the M rows groups have, about: by it the kernel's tile is chosen,
        and nothing else. None: M.

    Returns:
      y [M, N]. Under ``check_vma=True`` it varies over every axis that an operand varies over.

    Raises:
      ValueError, TypeError: operands that do not fit, when the call is traced; or when a call of
        scaled operands is differentiated.
      NotImplementedError: when it is lowered with ``jflux.config.strict``, for a call that no
        kernel takes.
      jax.errors.JaxRuntimeError, ValueError: when it runs, for a size below 0 and for sizes that
        sum to more than M: which of them is JAX's choice.

    Examples:
      >>> x, w = jnp.ones((6, 2)), jnp.arange(1.0, 4.0)[:, None, None] * jnp.ones((3, 2, 1))
      >>> jflux.grouped_matmul(x, w, jnp.array([3, 1, 2])).ravel().tolist()
      [2.0, 2.0, 2.0, 4.0, 6.0, 6.0]
    """
    recipe = recipe_of(recipe, x, w, transpose_rhs)
    _recipe.check_quantize(OP, quantize, preferred_element_type)
    x, w = _scaled.of_product(OP, x, w)
    ws: Sequence[Any] = several(w)
    if quantize is not None:
        preferred_element_type = jnp.float32
    params, scales = _params_of(
        x, ws, group_sizes, transpose_rhs, preferred_element_type, activation, gated, row_scale,
        rest, expected_rows,
    )  # fmt: skip
    is_empty = 0 in (*x.shape, *ws[0].shape)
    if quantize is not None and (is_empty or not isinstance(x, Scaled) or quantize.block[0] != 1):
        rest = rest if quantize.block[0] == 1 else "zeros"  # rows share a scale
        y = grouped_matmul(
            x, w, group_sizes, transpose_rhs=transpose_rhs, preferred_element_type=jnp.float32,
            activation=activation, gated=gated, row_scale=row_scale, recipe=recipe, rest=rest,
            expected_rows=expected_rows,
        )  # fmt: skip
        return quantize.quantize(y)
    n, out = ws[0].shape[1 if transpose_rhs else 2], params.out_dtype
    if is_empty:  # an activation of 0 is 0
        return _product.zeros((x.shape[0], n), out, *jax.tree.leaves((x, ws, group_sizes, scales)))
    sizes = value_checks.to_int32(group_sizes)
    if recipe is not None:
        return _by_recipe(x, ws, sizes, scales, recipe, params)
    if isinstance(x, Scaled):
        return _grouped_scaled.bind(x, ws, sizes, scales, params, quantize)
    common = jnp.result_type(x.dtype, *(one.dtype for one in ws))
    x, *ws = (a.astype(common) for a in (x, *ws))
    (y,) = _grouped_primitives.grouped_matmul.bind(x, *ws, sizes, *scales, params=params)
    return y


def of_dispatched(
    x: jax.Array,
    w: Weight | Sequence[Weight],
    group_sizes: jax.Array,
    moved: Moved,
    recipe: Recipe,
    *,
    activation: str,
    gated: bool,
    rest: str,
    expected_rows: int,
) -> jax.Array:
    """:func:`grouped_matmul` by a recipe, of rows of x [T, K] that were dispatched in 8 bits. The
    gradient of x goes the way back."""
    ws: Sequence[Any] = several(w)
    params, _ = _params_of(x, ws, group_sizes, False, None, activation, gated, None, rest, None)
    share = _share(expected_rows, moved.rows.shape[0])
    params = dataclasses.replace(params, share=share)
    return _by_recipe(x, ws, group_sizes, (), recipe, params, moved=moved)


def reference(
    x: Operand,
    w: Weight | Sequence[Weight],
    group_sizes: jax.Array,
    *,
    transpose_rhs: bool = False,
    preferred_element_type: DTypeLike | None = None,
    activation: str | None = None,
    gated: bool = False,
    row_scale: jax.Array | None = None,
    recipe: Recipe | None = None,
    quantize: Format | None = None,
    rest: str = "zeros",
    expected_rows: int | None = None,
) -> Any:
    """:func:`jflux.grouped_matmul` in plain `lax`: `jax.lax.ragged_dot`, zeros past the sum of the
    sizes, and what follows."""
    recipe = recipe_of(recipe, x, w, transpose_rhs)
    _recipe.check_quantize(OP, quantize, preferred_element_type)
    if quantize is not None:
        y = reference(
            x, w, group_sizes, transpose_rhs=transpose_rhs, preferred_element_type=jnp.float32,
            activation=activation, gated=gated, row_scale=row_scale, recipe=recipe, rest=rest,
            expected_rows=expected_rows,
        )  # fmt: skip
        return quantize.quantize(y)
    x, w = _scaled.of_product(OP, x, w)
    ws: Sequence[Any] = several(w)
    params, scales = _params_of(
        x, ws, group_sizes, transpose_rhs, preferred_element_type, activation, gated, row_scale,
        rest, expected_rows,
    )  # fmt: skip
    if recipe is not None:
        return _by_recipe(x, ws, group_sizes, scales, recipe, params, reference=True)
    if isinstance(x, Scaled):
        return _grouped_scaled.in_lax(x, ws, group_sizes, scales, params)
    return _grouped_primitives.reference((x, *ws, group_sizes, *scales), params)[0]


def recipe_of(recipe: Any, x: Any, w: Any, transpose_rhs: bool) -> Recipe | None:
    """The recipe of a call, or None; raises for operands that it is not for."""
    found = _recipe.of_call(OP, recipe, x, w, transpose_rhs)
    if isinstance(found, DelayedScaling):
        raise TypeError(f"jflux.{OP} takes no scales of earlier steps (jflux.DelayedScaling)")
    return found


def _by_recipe(
    x: Any,
    ws: Sequence[Any],
    sizes: jax.Array,
    row_scale: Sequence[jax.Array],
    recipe: Recipe,
    params: Params,
    reference: bool = False,
    moved: Moved | None = None,
) -> jax.Array:
    """y. What follows the products is differentiated by JAX, which keeps them alone."""
    sums = _grouped_by_recipe.products(x, ws, sizes, recipe, params, reference, moved)
    if params.activation is None and not row_scale:
        return sums[0]
    name = PRODUCT if params.activation is None else PREACTIVATION
    if params.activation is not None and not row_scale and not reference:
        named = [checkpoint_name(s, name) for s in sums]
        return checkpoint_name(
            _activation_gradient.activated(named, sizes, params.epilogue), ACTIVATED
        )
    scales = [_grouped_primitives._masked(scale, sizes) for scale in row_scale]

    def finish(sums: Sequence[jax.Array], scales: Sequence[jax.Array]) -> jax.Array:
        scale = scales[0] if scales else None
        return _grouped_primitives._finish(sums, scale, params.epilogue, params.out_dtype)

    y = jax.checkpoint(finish, prevent_cse=False)([checkpoint_name(s, name) for s in sums], scales)
    return y if params.activation is None else checkpoint_name(y, ACTIVATED)


def _params_of(
    x: Any,
    ws: Sequence[Any],
    group_sizes: Any,
    transpose_rhs: bool,
    preferred_element_type: Any,
    activation: str | None,
    gated: bool,
    row_scale: Any,
    rest: str,
    expected_rows: int | None,
) -> tuple[Params, Sequence[jax.Array]]:
    """(a call's parameters, its row_scale if there is one); raises for operands that do not fit."""
    if isinstance(x, Scaled):
        values = [one.values for one in (x, *ws)]
        check_shapes(values[0], values[1:], group_sizes, transpose_rhs, activation, gated)
        _grouped_scaled.check_scales(x, ws, transpose_rhs)
        out = _scaled.result_dtype(preferred_element_type)
    else:
        ws = [one.w if isinstance(one, QuantizedWeight) else one for one in ws]
        out = check(x, ws, group_sizes, transpose_rhs, preferred_element_type, activation, gated)
    _check_scale(x, row_scale)
    scales = () if row_scale is None else (row_scale.astype(jnp.float32),)
    fill = local_ops.is_filled(OP, rest)
    scaled, share = row_scale is not None, _share(expected_rows, x.shape[0])
    params = Params(transpose_rhs, out, activation, gated, scaled, fill=fill, share=share)
    return params, scales


def _share(expected_rows: int | None, rows: int) -> float:
    if expected_rows is None:
        return 1.0
    if not isinstance(expected_rows, int) or expected_rows < 0:
        raise ValueError(f"jflux.{OP}: {expected_rows=} must be an int, 0 or more, or None")
    return min(1.0, expected_rows / max(1, rows))


def check(
    x: Any,
    ws: Sequence[Any],
    group_sizes: Any,
    transpose_rhs: bool,
    preferred_element_type: Any,
    activation: str | None,
    gated: bool,
) -> np.dtype:
    """Raises for operands that do not fit; returns the type of y."""
    check_shapes(x, ws, group_sizes, transpose_rhs, activation, gated)
    return _product.out_dtype(OP, (x, *ws), preferred_element_type)


def check_shapes(
    x: Any,
    ws: Sequence[Any],
    group_sizes: Any,
    transpose_rhs: bool,
    activation: str | None,
    gated: bool,
) -> None:
    """Raises for operands that do not fit."""
    if len(ws) != (2 if gated else 1):
        raise ValueError(
            f"jflux.{OP}: w must be one array, or with gated=True two (the gate's and the other's);"
            f" got {len(ws)} and {gated=}"
        )
    _epilogue.check(OP, len(ws), (None,) * len(ws), activation, gated)
    local_ops.check_arrays(
        OP, x=x, **{f"w[{i}]": w for i, w in enumerate(ws)}, group_sizes=group_sizes
    )
    if x.ndim != 2:
        raise ValueError(f"jflux.{OP}: x must have shape [M, K], got {x.shape}")
    shape = "[E, N, K] (transpose_rhs=True)" if transpose_rhs else "[E, K, N]"
    for w in ws:
        if w.ndim != 3:
            raise ValueError(f"jflux.{OP}: w must have shape {shape}, got {w.shape}")
        k = w.shape[2 if transpose_rhs else 1]
        if k != x.shape[1]:
            raise ValueError(
                f"jflux.{OP}: x {x.shape} has {x.shape[1]} columns, and w {w.shape}, which must be "
                f"{shape}, takes {k}"
            )
        if w.shape != ws[0].shape:
            raise ValueError(
                f"jflux.{OP}: gated=True needs two weights of one shape, got {ws[0].shape} and "
                f"{w.shape}"
            )
    groups = ws[0].shape[0]
    if not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        raise TypeError(
            f"jflux.{OP}: group_sizes must be integers (int32), got {group_sizes.dtype}"
        )
    if group_sizes.shape != (groups,):
        raise ValueError(
            f"jflux.{OP}: group_sizes has shape {group_sizes.shape}, and w {ws[0].shape} has "
            f"{groups} groups: it must have shape ({groups},)"
        )


def _check_scale(x: Any, row_scale: Any) -> None:
    if row_scale is None:
        return
    local_ops.check_arrays(OP, row_scale=row_scale)
    if row_scale.shape != x.shape[:1]:
        raise ValueError(
            f"jflux.{OP}: row_scale has shape {row_scale.shape}, and x {x.shape} has "
            f"{x.shape[0]} rows: it must have shape ({x.shape[0]},)"
        )
    if not jnp.issubdtype(row_scale.dtype, jnp.floating):
        raise TypeError(f"jflux.{OP}: row_scale must be floating (float32), got {row_scale.dtype}")
