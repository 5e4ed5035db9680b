"""Collectives that no product is beside, of sizes for which jflux's kernels were measured to be the
faster ones; and what has the same meaning in `lax` and in jflux."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.extend.core import JaxprEqn

from ..._ops._spec import all_ops
from ..._ops.collectives import exchange
from ..._ops.collectives.all_reduce import all_reduce
from ..._ops.collectives.ragged_all_to_all import ragged_all_to_all
from ..._ops.products.ragged_dot import ragged_dot_general
from ..bodies import Body, type_of
from ..sites import Context, Declined, Rule, Site, as_names

Params = Mapping[str, Any]


def _exchange(op: Callable[..., Any], **arguments: str) -> Callable[..., list[jax.Array]]:
    """A call of the op. `arguments`: the equation's parameters that are other arguments of it."""

    def call(params: Params, x: jax.Array) -> list[jax.Array]:
        # Of an all_to_all the equation is tiled, whatever its parameter says.
        tiled = params["tiled"] or op is exchange.all_to_all
        given = {name: params[parameter] for name, parameter in arguments.items()}
        groups = params["axis_index_groups"]
        names = params["axis_name"]
        return [op(x, axis_name=names, tiled=tiled, axis_index_groups=groups, **given)]

    return call


def _psum(params: Params, *xs: jax.Array) -> list[jax.Array]:
    groups = params.get("axis_index_groups")
    return [all_reduce(x, axis_name=params["axes"], axis_index_groups=groups) for x in xs]


def _ragged_all_to_all(params: Params, *operands: jax.Array) -> list[jax.Array]:
    names, groups = params["axis_name"], params["axis_index_groups"]
    return [ragged_all_to_all(*operands, axis_name=names, axis_index_groups=groups)]


def _rule(op: str, call: Callable[..., list[jax.Array]]) -> Rule:
    """Takes an equation as it is."""

    def find(body: Body, index: int, context: Context) -> Site | Declined | None:
        equation = body.equations[index]
        params = equation.params
        names = as_names(params["axes"] if "axes" in params else params["axis_name"])
        if why := _why_not(equation, op, names, context):
            return Declined(op, index, why)
        return Site(
            op, index, (index,), tuple(equation.invars), tuple(equation.outvars),
            lambda *arrays: call(params, *arrays), hidden=0,
        )  # fmt: skip

    return find


def _why_not(equation: JaxprEqn, op: str, names: Any, context: Context) -> str | None:
    if why := context.why_not(equation, names):
        return why
    for atom in equation.invars:
        if why := context.why_not_of(op, type_of(atom).dtype):
            return why
    varying = [type_of(a).manual_axis_type.varying for a in (*equation.invars, *equation.outvars)]
    if op == "ragged_all_to_all" and not frozenset().union(*varying[:-1]) <= varying[-1]:
        return "its type does not say that it differs between ranks"  # JAX's has that of `output`
    most = all_ops()[op].most_bytes if op in all_ops() else None
    moved = max(type_of(var).size * type_of(var).dtype.itemsize for var in equation.outvars)
    if op == "reduce_scatter":
        moved *= context.ranks(names)
    if most is not None and moved > most(context.ranks(names)):
        return f"of {moved} bytes lax is the faster one"
    return None


def _ragged_dot(body: Body, index: int, context: Context) -> Site | Declined | None:
    equation = body.equations[index]
    params = equation.params
    if any(type_of(var).size == 0 for var in equation.invars):
        return Declined("grouped_matmul", index, "an operand is empty")

    def call(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> list[jax.Array]:
        return [
            ragged_dot_general(
                lhs, rhs, sizes, params["ragged_dot_dimension_numbers"],
                precision=params["precision"],
                preferred_element_type=params["preferred_element_type"],
            )
        ]  # fmt: skip

    if params.get("group_offset") is not None or len(equation.invars) != 3:
        return Declined("grouped_matmul", index, "the product has a group_offset")
    return Site(
        "grouped_matmul", index, (index,), tuple(equation.invars), tuple(equation.outvars), call,
        hidden=0,
    )  # fmt: skip


RULES: Mapping[str, Rule] = {
    "all_gather": _rule("all_gather", _exchange(exchange.all_gather, axis="all_gather_dimension")),
    "reduce_scatter": _rule(
        "reduce_scatter",
        _exchange(exchange.reduce_scatter, scatter_dimension="scatter_dimension"),
    ),
    "psum": _rule("all_reduce", _psum),
    "psum_invariant": _rule("all_reduce", _psum),
    "all_to_all": _rule(
        "all_to_all",
        _exchange(exchange.all_to_all, split_axis="split_axis", concat_axis="concat_axis"),
    ),
    "ragged_all_to_all": _rule("ragged_all_to_all", _ragged_all_to_all),
    "ragged_dot_general": _ragged_dot,
}
OPS = (
    "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "ragged_all_to_all",
    "grouped_matmul",
)  # fmt: skip
