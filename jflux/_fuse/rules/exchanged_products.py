"""An `all_to_all` beside a product: :func:`jflux.all_to_all_matmul` and
:func:`jflux.matmul_all_to_all`."""

from __future__ import annotations

from fractions import Fraction

import jax

from ..._ops.products import all_to_all_matmul as after
from ..._ops.products import matmul_all_to_all as before
from ..bodies import Body, type_of
from ..products import Product
from ..sites import Context, Declined, Site, as_names
from ..views import cast, reshaped
from . import summands
from .consumers import Consumers, Form, result_of

BOTH_ROWS = "both of its dimensions are rows of the product"


def find_before(body: Body, index: int, context: Context) -> Site | Declined | None:
    """Of a product that is exchanged."""
    equation = body.equations[index]
    names, moved = as_names(equation.params["axis_name"]), _moved(body, index)
    if why := _why_not(body, index, context):
        return Declined(before.OP, index, why)
    total = summands.find(body, equation.invars[0], moved, before.OP, context)
    if isinstance(total, str):
        return Declined(before.OP, index, total)
    layout = total.terms[0].layout
    if len(total.terms) > 1:
        return Declined(before.OP, index, "the op exchanges one product, not a sum of several")
    split, concat = layout.axes
    if len(layout.rows) not in (split, concat):
        return Declined(before.OP, index, BOTH_ROWS)
    ranks = context.ranks(names)
    (result,) = equation.outvars

    def call(*arrays: jax.Array) -> list[jax.Array]:
        (x,), (w,) = total.operands(arrays)
        y = before.matmul_all_to_all(
            x, w, axis_name=names, split_axis=split, concat_axis=concat, **total.options
        )
        y = layout.of_result(y, (Fraction(1, ranks), Fraction(ranks)))
        return [total.named(reshaped(y, type_of(result).shape))]

    return Site(
        before.OP, index, (index, *total.members), total.inputs, (result,), call,
        hidden=_bytes(body, index, ranks),
    )  # fmt: skip


def find_after(body: Body, index: int, context: Context) -> Site | Declined | None:
    """Of what is exchanged and multiplied."""
    moved = _moved(body, index)
    if why := _why_not(body, index, context):
        return Declined(after.OP, index, why)
    consumers = Consumers.of(body, index, moved, context)
    reasons: list[str] = []
    found: list[tuple[Product, Form]] = []
    for one in consumers.products(context):
        form = one if isinstance(one, str) else consumers.form(*one, after.OP, context)
        if isinstance(form, Form) and all(unit in form.rows for unit in consumers.units):
            form = BOTH_ROWS
        if isinstance(form, Form):
            found.append((one[0], form))  # type: ignore[arg-type]
        else:
            reasons.append(form)
    for product, form in sorted(found, key=lambda one: one[0].w.columns, reverse=True):
        site = _site(index, consumers, product, form, context)
        if isinstance(site, Site):
            return site
        reasons.append(site)
    return Declined(after.OP, index, reasons[-1] if reasons else "no product multiplies its result")


def _site(
    index: int, consumers: Consumers, product: Product, form: Form, context: Context
) -> Site | str:
    body = consumers.body
    equation = body.equations[index]
    names, moved = as_names(equation.params["axis_name"]), _moved(body, index)
    members = [*consumers.members, product.index]
    kept = consumers.kept(form, members)
    if isinstance(kept, str):
        return kept
    members += consumers.casts_to(kept)
    if context.depend_on([product.w.atom], members):
        return "the weight is computed from its result"
    rows = list(form.rows)
    split, concat = (rows.index(unit) if unit in rows else len(rows) for unit in consumers.units)
    outputs = (product.equation.outvars[0], *kept)

    def call(x: jax.Array, w: jax.Array) -> list[jax.Array]:
        x = consumers.operand(cast(x, form.casts), form, moved)
        results = after.all_to_all_matmul(
            x, product.w.made_of(w), axis_name=names, split_axis=split, concat_axis=concat,
            transpose_rhs=form.transposed, return_exchanged=bool(kept),
            preferred_element_type=form.dtype, precision=form.precision,
        )  # fmt: skip
        y, again = results if kept else (results, None)
        made = [result_of(product, y), *(consumers.view_of(var, again, form) for var in kept)]
        return [reshaped(a, type_of(var).shape) for a, var in zip(made, outputs, strict=True)]

    return Site(
        after.OP, index, tuple(members), (equation.invars[0], product.w.atom), outputs, call,
        hidden=_bytes(body, index, context.ranks(names)),
    )  # fmt: skip


def _moved(body: Body, index: int) -> tuple[int, int]:
    """The dimensions that are split and put together."""
    params = body.equations[index].params
    return params["split_axis"], params["concat_axis"]


def _why_not(body: Body, index: int, context: Context) -> str | None:
    equation = body.equations[index]
    names = as_names(equation.params["axis_name"])
    if why := context.why_no_groups(equation, names):  # tiled, whatever its parameter says
        return why
    split, concat = _moved(body, index)
    return "its two dimensions are one" if split == concat else None


def _bytes(body: Body, index: int, ranks: int) -> int:
    aval = type_of(body.equations[index].invars[0])
    return (ranks - 1) * aval.size * aval.dtype.itemsize // ranks
