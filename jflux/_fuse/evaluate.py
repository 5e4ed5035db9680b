"""A body with its sites, evaluated: other equations are bound as they were, with their names and
lines."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var

from .. import checkpoint_policies
from .._ranks import meshes
from . import derivative_rules
from .bodies import Atom, type_of, where
from .sites import Site

if TYPE_CHECKING:
    from .planning import BodyPlan


def evaluate(plan: BodyPlan, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """The body's results.

    Args:
      consts: of `plan.jaxpr.constvars`.
      args: of `plan.jaxpr.invars`.
    """
    jaxpr = plan.jaxpr
    values: dict[Var, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    values |= zip(jaxpr.invars, args, strict=True)

    def read(atom: Atom) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    for step, unused in zip(plan.steps, plan.last_uses, strict=True):
        if isinstance(step, Site):
            made = _call(step, jaxpr.eqns[step.at], [read(atom) for atom in step.inputs])
            values |= zip(step.outputs, made, strict=True)
        else:
            equation = jaxpr.eqns[step]
            with as_in(equation):
                operands = [read(atom) for atom in equation.invars]
                inner = plan.inner[step] if plan.changed(step) else None
                results = _bind(equation, operands, inner)
            values |= zip(equation.outvars, results, strict=True)
            del operands, results
        for var in unused:
            del values[var]
    return [read(atom) for atom in jaxpr.outvars]


@contextlib.contextmanager
def as_in(equation: JaxprEqn) -> Iterator[None]:
    """Equations that are made have the names and the line of this one."""
    info = equation.source_info
    names = source_info_util.current_name_stack() + info.name_stack
    with source_info_util.user_context(info.traceback, name_stack=names), equation.ctx.manager:
        yield


def _call(site: Site, equation: JaxprEqn, operands: Sequence[Any]) -> Sequence[Any]:
    """The results of a site, with the types of the equations that it stands for."""
    with as_in(equation), _naming(equation, site.op):
        results = site.call(*operands)
        return [_of_type(a, type_of(var)) for a, var in zip(results, site.outputs, strict=True)]


@contextlib.contextmanager
def _naming(equation: JaxprEqn, op: str) -> Iterator[None]:
    """An error names the line that the op stands for."""
    try:
        yield
    except Exception as error:
        error.add_note(f"jflux.fuse took jflux.{op} for the collective at {where(equation)}")
        raise


def _of_type(array: Any, aval: Any) -> Any:
    return meshes.vary(array, aval.manual_axis_type.varying)


def _bind(
    equation: JaxprEqn, operands: Sequence[Any], inner: Mapping[str, Sequence[BodyPlan]] | None
) -> Sequence[Any]:
    if inner is None:
        params = equation.primitive.get_bind_params(equation.params)
        results = equation.primitive.bind(*operands, **params)
        return results if equation.primitive.multiple_results else [results]
    if equation.primitive.name == "shard_map":
        (plan,) = inner["jaxpr"]
        return _shard_map(equation, operands, plan)
    params = dict(equation.params)
    for name, plans in inner.items():
        old = equation.params[name]
        bodies = old if isinstance(old, tuple | list) else (old,)
        new = [_rewritten(one, plan) for one, plan in zip(bodies, plans, strict=True)]
        params[name] = type(old)(new) if isinstance(old, tuple | list) else new[0]
    if params.get("policy") is not None:
        params["policy"] = functools.partial(checkpoint_policies.of_fused, params["policy"])
    params = equation.primitive.get_bind_params(params)
    if equation.primitive.name in derivative_rules.WITH_RULES:
        (plan,) = inner["call_jaxpr"]
        params["subfuns"] = derivative_rules.fused(params["subfuns"], plan)
    return equation.primitive.bind(*operands, **params)


def _shard_map(equation: JaxprEqn, operands: Sequence[Any], plan: BodyPlan) -> Sequence[Any]:
    params = equation.params

    def body(*args: Any) -> tuple[Any, ...]:
        return tuple(evaluate(plan, (), args))

    return jax.shard_map(
        body, mesh=params["mesh"], in_specs=tuple(params["in_specs"]),
        out_specs=tuple(params["out_specs"]), axis_names=set(params["newly_manual_axes"]),
        check_vma=params["check_vma"],
    )(*operands)  # fmt: skip


def _rewritten(body: Any, plan: BodyPlan) -> Any:
    """The body as a jaxpr with its sites."""
    if plan.is_same:
        return body
    new = jax.make_jaxpr(_as_function(body, plan))(*(type_of(var) for var in plan.jaxpr.invars))
    if isinstance(body, ClosedJaxpr):
        return new
    return body if new.consts else new.jaxpr  # such a body has no place for constants


def _as_function(body: Any, plan: BodyPlan) -> Callable[..., Any]:
    if id(body) not in plan.functions:
        consts = tuple(getattr(body, "consts", ()))
        plan.functions[id(body)] = body, functools.partial(evaluate_flat, plan, consts)
    return plan.functions[id(body)][1]


def evaluate_flat(plan: BodyPlan, consts: Sequence[Any], *args: Any) -> list[Any]:
    """:func:`evaluate` as a function of the body's arguments."""
    return evaluate(plan, consts, args)
