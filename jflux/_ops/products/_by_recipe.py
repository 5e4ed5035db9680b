"""Products by a recipe, and their gradients, for all ops: quantised operands, and the op of scaled
operands that exists.

The gradient of a product that moves x (``f(x) @ w``) is one that moves what it has multiplied,
``f^T(dy @ w^T)``, and the other way round. So dx is a call of another op, `_DUALS`, and what moves
in either direction is multiplied for dw.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from ..._call.derivatives import differentiated, spread
from ..._ranks import meshes
from .. import _epilogue, _lax, _quantize, _quantize_computed
from .._epilogue import ACTIVATED, PREACTIVATION, Epilogue
from .._lax import several
from .._recipe import (
    QUANTIZED,
    STATE,
    WIDE,
    AnyRecipe,
    DelayedScaling,
    Format,
    QuantizedActivation,
    QuantizedWeight,
    QuantizesActivation,
    Recipe,
    in_rows,
)
from .._scaled import BLOCK, Scaled, why_no_kernel
from .._scaled import spread as spread_scale
from .._spec import all_ops
from ._product import PRODUCT
from ._product import columns as columns_of

#: By op: that of dx, and what it calls the op's own options.
_DUALS: dict[str, tuple[str, dict[str, str]]] = {
    "matmul": ("matmul", {}),
    "all_gather_matmul": ("matmul_reduce_scatter", {"gather_dimension": "scatter_dimension"}),
    "matmul_reduce_scatter": ("all_gather_matmul", {"scatter_dimension": "gather_dimension"}),
    "matmul_all_to_all": (
        "all_to_all_matmul", {"split_axis": "concat_axis", "concat_axis": "split_axis"},
    ),
    "all_to_all_matmul": (
        "matmul_all_to_all", {"split_axis": "concat_axis", "concat_axis": "split_axis"},
    ),
}  # fmt: skip

#: By op: the option that returns x as it was moved, of those that move it.
_RETURNS = {
    "all_gather_matmul": "return_gathered",
    "all_to_all_matmul": "return_exchanged",
}


@dataclasses.dataclass(frozen=True)
class _Params:
    """A call, less its operands: xs, ws, biases, perhaps the residual, perhaps the arrays of its
    delayed scaling, the quantised copy of each x, and the copies (forward, backward) of each w.

    Attributes:
      activated: the activation of the products, if there is one.
      quantizes: how the activated one is also quantised, for the product that takes it, or None.
      options: the axis and dimensions, as the op takes them.
      xs, ws: how many.
      biased: which of the results have a bias.
      kept_as: the name of what is kept of x.
      reference: in plain `lax`.
      wire: that the product travels in; None: as it is.
    """

    op: str
    recipe: Recipe
    options: tuple[tuple[str, Any], ...]
    xs: int
    ws: int
    biased: tuple[bool, ...]
    residual: bool
    delayed: bool
    activated: Epilogue | None
    quantizes: Format | None
    transpose_rhs: bool
    out: np.dtype
    precision: Any
    kept_as: str
    reference: bool
    wire: str | None = None

    @property
    def moves_product(self) -> bool:
        """Whether the op moves its product, and its gradient dy."""
        return self.op not in ("matmul", *_RETURNS)

    @property
    def dual(self) -> tuple[str, dict[str, Any]]:
        """The op of dx, and its options."""
        name, names = _DUALS[self.op]
        return name, {names.get(option, option): value for option, value in self.options}

    def split(self, operands: Sequence[Any]) -> tuple[Any, ...]:
        """(xs, ws, biases, [residual] or [], the state's arrays, copies of xs, copies of ws)."""
        sizes = (
            self.xs, self.ws, sum(self.biased), int(self.residual), len(STATE) * self.delayed,
            self.xs, self.ws,
        )  # fmt: skip
        rest = iter(operands)
        return tuple([next(rest) for _ in range(size)] for size in sizes)


def product(
    op: str,
    x: Any,
    w: Any,
    *,
    recipe: AnyRecipe | QuantizesActivation,
    transpose_rhs: bool,
    out: Any,
    precision: Any,
    bias: Any = None,
    residual: jax.Array | None = None,
    activation: str | None = None,
    gated: bool = False,
    kept_as: str = QUANTIZED,
    reference: bool = False,
    wire: str | None = None,
    **options: Any,
) -> Any:
    """y of an op, of one rank's operands that were checked.

    Args:
      x, w: arrays, or several; each may be quantised.
      out: y's type.
      bias: for each result; None for none.
      wire: of the op; gradients travel in 8 bits anyway.
      options: the op's axis and dimensions.
    """
    xs, ws = several(x), several(w)
    if _is_local(options) and len(xs) == 1 and not reference:
        # Nothing moves, and matmul has kernels for one rank.
        scatters = op == "matmul_reduce_scatter"
        y = product(
            "matmul", xs[0], ws[0] if scatters else w, recipe=recipe, transpose_rhs=transpose_rhs,
            out=out, precision=precision, bias=None if scatters else bias, activation=activation,
            gated=gated,
        )  # fmt: skip
        added = [a for a in (bias, residual) if a is not None] if scatters else []
        return _epilogue.add(y, added)
    _check_columns(op, xs[0], ws[0], transpose_rhs, options)
    quantizes: Format | None = None
    if isinstance(recipe, QuantizesActivation):
        recipe = recipe.recipe
        quantizes = recipe.x
    state: list[jax.Array] = []
    if isinstance(recipe, DelayedScaling):
        state, recipe = [getattr(recipe, name) for name in STATE], recipe.recipe
    results = 1 if op == "matmul_reduce_scatter" else len(ws)
    biases = _epilogue.of_each(bias, results)
    activated = None if activation is None else Epilogue((False,) * len(ws), activation, gated)
    params = _Params(
        op=op,
        recipe=recipe,
        options=tuple(options.items()),
        xs=len(xs),
        ws=len(ws),
        biased=tuple(b is not None for b in biases),
        residual=residual is not None,
        delayed=bool(state),
        activated=activated,
        quantizes=quantizes if activated is not None and activated.results == 1 else None,
        transpose_rhs=transpose_rhs,
        out=np.dtype(out),
        precision=recipe.precision if precision is None else precision,
        kept_as=kept_as,
        reference=reference,
        wire=wire,
    )
    # Their gradients are summed over ranks that share them in this type.
    wide = _epilogue.sum_dtype(params.out)
    added = [jnp.asarray(b).astype(wide) for b in biases if b is not None]
    added += [] if residual is None else [residual]
    copies = [
        (one.forward, one.backward) if isinstance(one, QuantizedWeight) else None for one in ws
    ]
    arrays = [one.w if isinstance(one, QuantizedWeight) else one for one in ws]
    of_xs = [one.copy if isinstance(one, QuantizedActivation) else None for one in xs]
    x_arrays = [one.x if isinstance(one, QuantizedActivation) else one for one in xs]
    given = lax.stop_gradient([*of_xs, *copies])
    ys = _product(params, *x_arrays, *arrays, *added, *state, *given)
    if params.quantizes is not None:
        y, *copy = ys
        return QuantizedActivation(y, Scaled(*lax.stop_gradient(copy)))
    is_several = isinstance(w, tuple | list) and op != "matmul_reduce_scatter"
    return tuple(ys) if is_several and not gated else ys[0]


def _is_local(options: Mapping[str, Any]) -> bool:
    """Whether an op's axis has one rank."""
    return "axis_name" in options and meshes.axis_size(options["axis_name"]) == 1


def _check_columns(
    op: str, x: Any, w: Any, transpose_rhs: bool, options: Mapping[str, Any]
) -> None:
    """Raises for columns that an exchange puts together, or splits, within blocks of a scale: they
    are summed over, one way or back."""
    if "split_axis" not in options:
        return
    moves_x = op in _RETURNS
    columns = x.shape[-1] if moves_x else columns_of(w, transpose_rhs)
    if options["split_axis"] == x.ndim - 1:
        columns //= meshes.axis_size(options["axis_name"])
    elif options["concat_axis"] != x.ndim - 1:
        return
    if columns % BLOCK != 0:
        raise ValueError(
            f"jflux.{op}: with a recipe each rank has whole blocks of {BLOCK} of the columns that "
            f"are exchanged, whose scales are its own; here it has {columns}"
        )


def _multiply(
    op: str, xs: Sequence[Any], ws: Sequence[Any], reference: bool, **options: Any
) -> tuple[Sequence[jax.Array], Sequence[Any]]:
    """(the products, x as it was moved) of an op; each w is [n, k]."""
    options["transpose_rhs"] = True
    # A kernel that scatters takes several terms.
    terms = (xs, ws) if op == "matmul_reduce_scatter" else one_term(xs, ws)
    if op == "matmul" and len(terms[0]) > 1:
        wanted = (options["preferred_element_type"], options["precision"])
        return [_lax.sum_of_products(*terms, *wanted, transpose_rhs=True)], xs
    if op == "matmul":
        (x,), each = terms
        return _matmul(x, each, **options), xs
    spec = all_ops()[op]
    function = spec.reference if reference else spec.function
    if op in _RETURNS:
        w = ws[0] if "split_axis" in options else ws
        y, moved = function(xs[0], w, **{_RETURNS[op]: True}, **options)
        return several(y), [moved]
    if op == "matmul_all_to_all":
        return [function(xs[0], ws[0], **options)], xs
    return [function(*terms, **options)], xs


def _made(operands: Sequence[Any], params: _Params) -> tuple[Sequence[Any], Any]:
    """(products, what is kept of their operands)."""
    xs, ws, biases, residual, state, of_xs, copies = params.split(operands)
    recipe = params.recipe
    of_x, of_w = _Delayed.of(0, recipe.x, state), _Delayed.of(1, recipe.w, state)
    forward, for_dx = [], []
    for w, copy in zip(ws, copies, strict=True):
        # The weight itself is a parameter, or its cast, and there anyway. A copy of it for dx would
        # be more than bfloat16 keeps.
        for_dx.append(w if copy is None else copy[1])
        turned = not params.transpose_rhs  # to [n, k]
        forward.append(quantized_copy(w, turned, recipe, of_w.scale) if copy is None else copy[0])
    options = dict(params.options)
    if any(params.biased):
        each = spread(biases, params.biased)
        options["bias"] = each[0] if params.op == "matmul_reduce_scatter" else each
    if residual:
        options["residual"] = residual[0]
    if params.wire is not None:
        options["wire"] = params.wire
    ys, moved = _multiply(
        params.op,
        [
            recipe.x.of_rows(x, scale=of_x.scale)[0] if copy is None else copy
            for x, copy in zip(xs, of_xs, strict=True)
        ],
        forward,
        params.reference,
        preferred_element_type=params.out,
        precision=params.precision,
        **options,
    )
    kept = [of_x.of_all_ranks(one) for one in moved]
    return ys, (kept, for_dx, state, [of_x.largest(xs), of_w.largest(ws)] if state else [])


def _results(sums: Sequence[jax.Array], params: _Params) -> Sequence[jax.Array]:
    """Of products."""
    if params.activated is None:
        return sums
    ys, _ = _epilogue.apply(params.activated, sums, (), sums[0].dtype)
    if params.quantizes is None:
        return ys
    form = params.quantizes
    if _quantize_computed.is_taken(form, *sums):
        copy = _quantize_computed.activated(params.activated, sums, form)
    else:
        copy, _ = form.of_rows(ys[0])
    return [*ys, copy.values, copy.scale]


def _forward(call: Any, operands: Sequence[Any], params: _Params) -> tuple[Sequence[Any], Any]:
    sums, (xs, *rest) = _made(operands, params)
    xs = jax.tree.map(lambda a: checkpoint_name(a, params.kept_as), xs)
    sums = [checkpoint_name(one, PRODUCT) for one in sums]
    if params.activated is None:
        return sums, ([], xs, *rest)
    sums = [checkpoint_name(one, PREACTIVATION) for one in sums]
    ys, copy = _results(sums, params), []
    if params.quantizes is not None:
        *ys, values, scale = ys
        copy = [values, scale]
    return [*(checkpoint_name(y, ACTIVATED) for y in ys), *copy], (sums, xs, *rest)


def _tangents(kept: Any, tangents: Sequence[Any], params: _Params) -> Any:
    raise NotImplementedError(
        f"jflux.{params.op}: with a recipe there is reverse mode alone (jax.grad, jax.vjp): a "
        "recipe does not say how tangents are quantised"
    )


def _backward(
    kept: Any, cotangents: Sequence[Any], wanted: Sequence[Any], params: _Params
) -> list[Any]:
    (sums, xs, ws, state, magnitudes), recipe = kept, params.recipe
    x_types, w_types, bias_types, residual, states, *_ = params.split(wanted)
    results = cotangents
    if params.activated is not None:
        dys = cotangents[: params.activated.results]
        cotangents = [None] * params.ws
        if any(dy is not None for dy in dys):
            cotangents = _epilogue.gradient(params.activated, sums, dys)
    of_dy = _Delayed.of(2, recipe.dy, state)
    biased = [dy for dy, b in zip(cotangents, params.biased, strict=True) if b]
    dadded = [
        None if dy is None or b is None else _epilogue.sum_of_rows(dy).astype(b.dtype)
        for dy, b in zip(biased, bias_types, strict=True)
    ]
    for like in residual:
        dy = cotangents[0]
        dadded.append(None if dy is None or like is None else dy.astype(like.dtype))
    given = [i for i, dy in enumerate(cotangents) if dy is not None]
    dws: list[Any] = [None] * params.ws
    dxs: list[Any] = [None] * params.xs
    copies = [None] * (params.xs + params.ws)
    if not given:
        return [*dxs, *dws, *dadded, *[None] * len(states), *copies]
    dys = [cotangents[i] for i in given]
    dstate = _next_state(state, [*magnitudes, of_dy.largest(dys)], states, recipe) if state else []
    turns = recipe.dw is not None and recipe.dw[1] == recipe.dy and not params.moves_product
    turns = turns and any(w is not None for w in w_types)
    moved: Sequence[Any]
    in_turns = False
    if _computes(params, sums, turns, of_dy):
        assert params.activated is not None
        in_turns = len(sums) == 2
        one, turned = _quantize_computed.gradients(
            params.activated, sums, results[0], recipe.dy, turns
        )
        moved = [one]
    else:
        quantized = [recipe.dy.of_rows(dy, turns, of_dy.scale) for dy in dys]
        moved, turned = [one for one, _ in quantized], [other for _, other in quantized]
    if any(x is not None for x in x_types):
        op, options = params.dual
        scale = _Delayed.of(1, recipe.w, state).scale
        ws = ws if params.moves_product else [ws[i] for i in given]
        if in_turns and not (params.transpose_rhs or any(isinstance(w, Scaled) for w in ws)):
            ws = [_quantize_computed.pair(ws[0], ws[1], recipe.w)]
        else:
            ws = [
                w if isinstance(w, Scaled)
                else quantized_copy(w, params.transpose_rhs, recipe, scale)
                for w in ws
            ]  # fmt: skip
            ws = [_quantize_computed.in_turns(*ws)] if in_turns else ws
        like = next(x for x in x_types if x is not None)
        found, moved = _multiply(
            op,
            moved,
            ws,
            params.reference,
            preferred_element_type=like.dtype,
            precision=recipe.gradient_precision,
            **options,
        )
        if in_turns:
            # Before dw, which is in the way of both operands: in its place there is room for one.
            found, turned = lax.optimization_barrier((list(found), turned))
        dxs = [None if x is None else dx for x, dx in zip(x_types, found, strict=True)]
    elif params.moves_product:
        moved = [_moved(one, params) for one in moved]
    moved = [of_dy.of_all_ranks(one) for one in moved]
    for i, w in enumerate(w_types):
        at = 0 if params.moves_product else i
        if w is None or at not in given:
            continue
        x = xs[i if params.xs > 1 else 0]
        at = given.index(at)
        dy, of_dw = (moved[at], None) if params.moves_product else (dys[at], turned[at])
        dws[i] = _weight_gradient(x, dy, of_dw, params, w.dtype)
    return [*dxs, *dws, *dadded, *dstate, *copies]


def _computes(params: _Params, sums: Sequence[jax.Array], turns: bool, of_dy: _Delayed) -> bool:
    """Whether the gradients of an activation are computed as they are quantised: nothing else needs
    them, but sums for biases."""
    if params.activated is None or len(sums) != 1 + params.activated.gated:
        return False
    if of_dy.scale is not None or params.recipe.dw is None or not turns:
        return False
    in_squares = params.recipe.w.block == (BLOCK, BLOCK)  # those of two weights are put in turns
    whole = len(sums) == 1 or (sums[0].shape[-1] % BLOCK == 0 and in_squares)
    return whole and _quantize_computed.is_taken(params.recipe.dy, *sums)


def quantized_copy(w: jax.Array, turned: bool, recipe: Recipe, scale: jax.Array | None) -> Scaled:
    """w quantised as it is, or its transpose."""
    if not turned:
        return recipe.w.quantize(w, scale=scale)
    form = recipe.w
    return _quantize.transposed(w, form.dtype, form.block, form.power_of_two, scale)


def have_whole_blocks(*operands: Scaled) -> bool:
    """Whether their scales are of whole blocks of k, which is last."""
    return all(one.shape[-1] == BLOCK * one.scale.shape[-1] for one in operands)


def one_term(xs: Sequence[Scaled], ws: Sequence[Scaled]) -> tuple[Sequence[Any], Sequence[Any]]:
    """Several terms as one over all of their k, where their scales are of whole blocks of k:
    kernels take one."""
    if len(xs) == 1 or not have_whole_blocks(*xs, *ws):
        return xs, ws
    join = lambda *arrays: jnp.concatenate(arrays, -1)  # noqa: E731
    return [jax.tree.map(join, *xs)], [jax.tree.map(join, *ws)]


def _matmul(x: Scaled, w: Any, **options: Any) -> Any:
    from .matmul import matmul  # which takes recipes, and so imports this module

    return matmul(x, w, **options)


def _moved(dy: Scaled, params: _Params) -> Scaled:
    """dy, as the product of dx would have moved it."""
    options: Mapping[str, Any] = dict(params.options)
    collective = all_ops()[params.op].communication(dy.ndim, **options).transposed()
    return collective.lax(dy, options["axis_name"])


def _weight_gradient(
    x: Scaled, dy: jax.Array | Scaled, turned: Scaled | None, params: _Params, dtype: Any
) -> jax.Array:
    """x^T @ dy over all leading dimensions: [k, n], or [n, k] with ``transpose_rhs``.

    Args:
      turned: dy^T [n, rows] quantised, if that was made.
    """
    recipe = params.recipe
    if recipe.dw is None:
        wide = dy.dequantize(WIDE) if isinstance(dy, Scaled) else dy.astype(WIDE)
        return _lax.weight_gradient(x.dequantize(WIDE), wide, params.transpose_rhs, dtype, None)
    of_x, of_dy = recipe.dw
    lhs, rhs = _along_rows(x, of_x), _along_rows(dy, of_dy) if turned is None else turned
    if params.transpose_rhs:
        lhs, rhs = rhs, lhs
    no_kernel = why_no_kernel(lhs, rhs, transpose_rhs=True, takes_vectors=True)
    if no_kernel and of_x.power_of_two and of_dy.power_of_two:
        # bfloat16 holds values times powers of two, so this is their product too, and no loop.
        return _lax.matmul(lhs.dequantize(WIDE), rhs.dequantize(WIDE), dtype, None, True)
    return _matmul(
        lhs, rhs, transpose_rhs=True, preferred_element_type=dtype,
        precision=recipe.gradient_precision,
    )  # fmt: skip


def _along_rows(a: jax.Array | Scaled, form: Format) -> Scaled:
    """a [..., columns] as [columns, rows], for a sum over its rows."""
    if isinstance(a, Scaled):
        if a.scale.size == 1 and form.block == (-1, -1) and a.dtype == form.dtype:
            return Scaled(in_rows(a.values).T, a.scale.reshape(1, 1))
        scale = a.scale
        if a.ndim > 2:
            of_rows = spread_scale(scale, a.shape[:-1])
            scale = in_rows(jnp.broadcast_to(of_rows, (*a.shape[:-1], scale.shape[-1])))
        matrix = Scaled(in_rows(a.values), scale)
        return _quantize.transposed(matrix, form.dtype, form.block, form.power_of_two)
    return form.quantize(in_rows(a).T)


_product = differentiated(
    lambda params, *operands: _results(_made(operands, params)[0], params),
    kept=lambda operands, params: _forward(None, operands, params)[1],
    tangents=_tangents,
    backward=_backward,
    forward=_forward,
    axes=lambda params: dict(params.options).get("axis_name"),
)


# ---- Delayed scaling -----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Delayed:
    """The scale [1, 1] of x, of w or of dy in this step, by the largest values of earlier ones.
    None: by its own."""

    scale: jax.Array | None

    @classmethod
    def of(cls, which: int, form: Format, state: Sequence[jax.Array]) -> _Delayed:
        if not state:
            return cls(None)
        return cls(_scale(form, state[which], state[which + 3]).reshape(1, 1))

    def of_all_ranks(self, one: Scaled) -> Scaled:
        """An operand that was moved, with the scale that it has on all ranks."""
        if self.scale is None:
            return one
        return Scaled(one.values, self.scale.reshape((1,) * one.ndim))

    def largest(self, arrays: Sequence[jax.Array]) -> jax.Array:
        """Of all their magnitudes, [1]."""
        each = [jnp.max(jnp.abs(a), initial=0).astype(jnp.float32) for a in arrays]
        return jnp.max(jnp.stack(each), keepdims=True)


def _scale(form: Format, before: jax.Array, history: jax.Array) -> jax.Array:
    """[1], of this step."""
    most = jnp.max(history)
    # A product that was not used has zero as the gradient of its state.
    before = jnp.where(before > 0, before, 1)
    is_known, largest = (most > 0) & jnp.isfinite(most), _quantize.largest(np.dtype(form.dtype))
    if form.power_of_two:
        above = _quantize.power_of_two_for
        return jnp.where(is_known, above(most, largest), above(before, 1.0))
    return jnp.maximum(jnp.where(is_known, most / largest, before), _quantize.SMALLEST)


def _next_state(
    state: Sequence[jax.Array], magnitudes: Sequence[jax.Array], wanted: Sequence[Any], recipe: Any
) -> list[Any]:
    """The gradients of the state's arrays: what they are in the next step."""
    if all(one is None for one in wanted):
        return [None] * len(wanted)
    axes = sorted(jax.sharding.get_abstract_mesh().manual_axes)
    if axes and meshes.tracks_vma(tuple(axes)):
        axes = sorted(next(one for one in wanted if one is not None).manual_axis_type.varying)
    found, first = jnp.stack(list(magnitudes)), jnp.bool_(True)
    if axes:
        found = lax.pmax(meshes.vary(found, meshes.tracked(tuple(axes))), tuple(axes))
    for axis in axes:
        first = first & (lax.axis_index(axis) == 0)
    forms = (recipe.x, recipe.w, recipe.dy)
    scales = [_scale(form, *state[i::3]) for i, form in enumerate(forms)]
    histories = [jnp.roll(state[i + 3], -1).at[0].set(found[i, 0]) for i in range(3)]
    return [
        None if like is None else jnp.where(first, one, 0)
        for one, like in zip((*scales, *histories), wanted, strict=True)
    ]
