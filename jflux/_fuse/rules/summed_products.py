"""A product that is summed over ranks: :func:`jflux.matmul_all_reduce`."""

from __future__ import annotations

from typing import Any

import jax
from jax.extend.core import JaxprEqn, Var

from ..._ops.collectives.all_reduce import most_bytes
from ..._ops.collectives.exchange import all_gather
from ..._ops.products.matmul_all_reduce import OP, matmul_all_reduce
from ..._ops.products.matmul_reduce_scatter import OP as SCATTERED
from ..._ops.products.matmul_reduce_scatter import matmul_reduce_scatter
from ..bodies import Body, type_of
from ..sites import Context, Declined, Site, as_names
from ..views import reshaped
from . import norms, summands


def _of_several(
    index: int, equation: JaxprEqn, total: summands.Sum, context: Context
) -> Site | Declined:
    """A sum of several products, scattered by :func:`jflux.matmul_reduce_scatter`, and gathered."""
    names, layout = as_names(equation.params["axes"]), total.terms[0].layout
    ranks, (result,) = context.ranks(names), equation.outvars
    aval = type_of(result)
    size = aval.size * aval.dtype.itemsize
    sizes = layout.row_sizes()
    dimension = max(range(len(sizes)), key=lambda i: (sizes[i] % ranks == 0, sizes[i]))
    if size <= most_bytes(ranks) or sizes[dimension] % ranks:
        return Declined(OP, index, "the op sums one product over ranks, not several")
    to: Any = "invarying" if equation.primitive.name == "psum_invariant" else "varying"

    def call(*arrays: jax.Array) -> list[jax.Array]:
        xs, ws = total.operands(arrays)
        y = matmul_reduce_scatter(
            xs, ws, axis_name=names, scatter_dimension=dimension, **total.options
        )
        y = all_gather(y, axis_name=names, axis=dimension, tiled=True, to=to)
        return [total.named(reshaped(layout.of_result(y, ()), aval.shape))]

    return Site(
        SCATTERED, index, (index, *total.members), total.inputs, (result,), call,
        hidden=(ranks - 1) * size // ranks,
    )  # fmt: skip


def find(body: Body, index: int, context: Context) -> Site | Declined | None:
    equation = body.equations[index]
    names = as_names(equation.params["axes"])
    if why := context.why_not_tiled(equation, names):
        return Declined(OP, index, why)
    if len(equation.invars) > 1:
        return Declined(OP, index, "several arrays are summed at once")
    total = summands.find(body, equation.invars[0], (), OP, context)
    if isinstance(total, str):
        return Declined(OP, index, total)
    if len(total.terms) > 1:
        return _of_several(index, equation, total, context)
    (result,) = equation.outvars
    members = (index, *total.members)
    residual = None
    if equation.primitive.name == "psum_invariant":  # else ranks may add what differs
        residual = summands.added(body, result, members, context)
    if residual is not None:
        members, result = (*members, *residual.members), residual.result
    ranks, layout = context.ranks(names), total.terms[0].layout
    are_rows = layout.taken[-1:] == (layout.columns,)
    norm = norms.find(body, result, context) if are_rows else None
    outputs: tuple[Var, ...] = (result,)
    if norm is not None:
        members = (*members, *norm.members)
        outputs = (result, norm.result)

    def call(*arrays: jax.Array) -> list[jax.Array]:
        (x,), (w,) = total.operands(arrays[:2])
        added = layout.as_result(arrays[2], ()) if residual else None
        factors = arrays[3 if residual else 2 :]
        of_rows = None if norm is None else norm.norm(factors)
        made: Any = matmul_all_reduce(
            x, w, axis_name=names, residual=added, norm=of_rows, **total.options
        )
        ys = (made,) if norm is None else made
        y, *more = (reshaped(layout.of_result(y, ()), type_of(result).shape) for y in ys)
        return [total.named(y), *more]

    aval = type_of(equation.outvars[0])
    inputs = total.inputs if residual is None else (*total.inputs, residual.array)
    inputs = inputs if norm is None else (*inputs, *norm.factors)
    return Site(
        OP, index, members, inputs, outputs, call,
        hidden=2 * (ranks - 1) * aval.size * aval.dtype.itemsize // ranks,
    )  # fmt: skip
