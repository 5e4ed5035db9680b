"""An `all_gather` that products multiply: :func:`jflux.all_gather_matmul`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from ..._ops.products.all_gather_matmul import OP, all_gather_matmul, with_products
from ..bodies import Body, type_of
from ..products import Product
from ..sites import Context, Declined, Site, as_names
from ..views import cast, reshaped
from . import epilogues
from .consumers import Consumers, Form, result_of

CONTRACTED = "the gathered dimension is contracted"


def find(body: Body, index: int, context: Context) -> Site | Declined | None:
    equation = body.equations[index]
    if why := context.why_not_tiled(equation, as_names(equation.params["axis_name"])):
        return Declined(OP, index, why)
    moved = (equation.params["all_gather_dimension"],)
    consumers = Consumers.of(body, index, moved, context)
    forms: dict[Form, list[Product]] = {}
    reasons: list[str] = []
    for found in consumers.products(context):
        form = found if isinstance(found, str) else consumers.form(*found, OP, context, CONTRACTED)
        if isinstance(form, Form):
            forms.setdefault(form, []).append(found[0])  # type: ignore[arg-type]
        else:
            reasons.append(form)

    def columns(form: Form) -> int:
        return sum(product.w.columns for product in forms[form])

    for form in sorted(forms, key=columns, reverse=True):
        site = _site(index, consumers, form, forms[form], context)
        if isinstance(site, Site):
            return site
        reasons.append(site)
    return Declined(OP, index, reasons[-1] if reasons else "no product multiplies its result")


def _site(
    index: int, consumers: Consumers, form: Form, products: Sequence[Product], context: Context
) -> Site | str:
    body = consumers.body
    equation = body.equations[index]
    names = as_names(equation.params["axis_name"])
    dimension = equation.params["all_gather_dimension"]
    taken: list[Product] = []
    for product in products:  # in which no weight is computed from another one's result
        members = [*consumers.members, *(one.index for one in (*taken, product))]
        if not context.depend_on([one.w.atom for one in (*taken, product)], members):
            taken.append(product)
    # A gate comes first.
    both = [epilogues.find(body, order, context) for order in (taken, taken[::-1])]
    taken, epilogue = (taken[::-1], both[1]) if both[1].gated else (taken, both[0])
    weights = [product.w.atom for product in taken]
    members = [*consumers.members, *(product.index for product in taken)]
    if epilogue.members and context.depend_on(epilogue.inputs, [*members, *epilogue.members]):
        epilogue = epilogues.none(taken)
    needed = [*weights, *epilogue.inputs]
    members += epilogue.members
    kept = consumers.kept(form, members)
    if isinstance(kept, str):
        return kept
    members += consumers.casts_to(kept)
    if not taken or context.depend_on(needed, members):
        return "the weight is computed from its result"

    def call(x: jax.Array, *arrays: jax.Array) -> list[jax.Array]:
        ws, biases = arrays[: len(taken)], arrays[len(taken) :]
        x = consumers.operand(cast(x, form.casts), form, (dimension,))
        matrices = [product.w.made_of(w) for product, w in zip(taken, ws, strict=True)]
        options: dict[str, Any] = {
            "axis_name": names, "gather_dimension": form.rows.index(consumers.units[0]),
            "transpose_rhs": form.transposed, "return_gathered": bool(kept),
            "preferred_element_type": form.dtype, "precision": form.precision,
        }  # fmt: skip
        if epilogue.products:
            assert epilogue.activation is not None
            y, both, again = with_products(
                x, matrices, activation=epilogue.activation, gated=epilogue.gated, **options
            )
            ys = [y, *both]
        else:
            results = all_gather_matmul(
                x, matrices, bias=epilogue.bias(biases), activation=epilogue.activation,
                gated=epilogue.gated, **options,
            )  # fmt: skip
            ys, again = results if kept else (results, None)
            ys = [ys] if epilogue.gated else ys
        made = [result_of(taken[i % len(taken)], y) for i, y in enumerate(ys)]
        made += [consumers.view_of(var, again, form) for var in kept]
        return [reshaped(a, type_of(var).shape) for a, var in zip(made, outputs, strict=True)]

    outputs = (*epilogue.results, *epilogue.products, *kept)
    inputs = (equation.invars[0], *needed)
    aval = type_of(equation.invars[0])
    moved = (context.ranks(names) - 1) * aval.size * aval.dtype.itemsize
    return Site(OP, index, tuple(members), inputs, outputs, call, hidden=moved)
