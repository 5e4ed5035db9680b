"""The rules of functions with derivatives of their own, which run when a fused function is
differentiated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
from jax.extend import linear_util as lu

if TYPE_CHECKING:
    from .planning import BodyPlan

#: Primitives whose first function is a body, and whose others are its rules. Not `custom_jvp_call`:
#: its rule makes values and tangents at once, which one op may not mix.
WITH_RULES = ("custom_vjp_call",)


def fused(functions: Sequence[Any], plan: BodyPlan) -> tuple[Any, ...]:
    """The functions of such an equation, with fused rules. `plan`: of its body."""
    body, *rules = functions
    return (body, *(_fused(rule, plan) for rule in rules))


def _fused(rule: lu.WrappedFun, plan: BodyPlan) -> lu.WrappedFun:
    def call(*args: Any) -> Any:
        return _evaluated(rule.call_wrapped, args, plan)

    return lu.wrap_init(call, debug_info=rule.debug_info)


def _evaluated(f: Callable[..., Any], args: Sequence[Any], plan: BodyPlan) -> Any:
    """``f(*args)``. What is no array among its arguments and results, such as a zero that stands
    for one, is left as it is."""
    from .evaluate import evaluate
    from .planning import Planner

    given = [arg for arg in args if isinstance(arg, jax.Array)]
    results: list[Any] = []

    def of_arrays(*arrays: jax.Array) -> list[jax.Array]:
        rest = iter(arrays)
        made = f(*(next(rest) if isinstance(arg, jax.Array) else arg for arg in args))
        leaves, tree = jax.tree.flatten(made)
        results[:] = [tree, [None if isinstance(a, jax.Array) else a for a in leaves]]
        return [a for a in leaves if isinstance(a, jax.Array)]

    jaxpr = jax.make_jaxpr(of_arrays)(*given)
    tree, leaves = results
    rest = iter(evaluate(Planner().plan(jaxpr, plan.scope), jaxpr.consts, given))
    return jax.tree.unflatten(tree, [next(rest) if leaf is None else leaf for leaf in leaves])
