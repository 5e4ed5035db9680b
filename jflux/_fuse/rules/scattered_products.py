"""A sum of products that is scattered: :func:`jflux.matmul_reduce_scatter`."""

from __future__ import annotations

from fractions import Fraction

import jax

from ..._ops.products.matmul_reduce_scatter import OP, matmul_reduce_scatter
from ..bodies import Body, type_of
from ..sites import Context, Declined, Site, as_names
from ..views import reshaped
from . import summands


def find(body: Body, index: int, context: Context) -> Site | Declined | None:
    equation = body.equations[index]
    names = as_names(equation.params["axis_name"])
    if why := context.why_not_tiled(equation, names):
        return Declined(OP, index, why)
    moved = (equation.params["scatter_dimension"],)
    columns = "columns of the product are scattered"
    total = summands.find(body, equation.invars[0], moved, OP, context, columns)
    if isinstance(total, str):
        return Declined(OP, index, total)
    (result,) = equation.outvars
    members = (index, *total.members)
    residual = summands.added(body, result, members, context)
    if residual is not None:
        members, result = (*members, *residual.members), residual.result
    ranks, layout = context.ranks(names), total.terms[0].layout
    factors, (dimension,) = [Fraction(1, ranks)], layout.axes

    def call(*arrays: jax.Array) -> list[jax.Array]:
        xs, ws = total.operands(arrays[: len(total.inputs)])
        added = layout.as_result(arrays[-1], factors) if residual else None
        y = matmul_reduce_scatter(
            xs, ws, axis_name=names, scatter_dimension=dimension, residual=added,
            **total.options,
        )  # fmt: skip
        return [total.named(reshaped(layout.of_result(y, factors), type_of(result).shape))]

    aval = type_of(equation.outvars[0])
    inputs = total.inputs if residual is None else (*total.inputs, residual.array)
    return Site(
        OP, index, members, inputs, (result,), call,
        hidden=(ranks - 1) * aval.size * aval.dtype.itemsize,
    )  # fmt: skip
