"""What a few equations compute from one array, as a term that does not depend on how it was
written: calls are inlined, and shapes and types of variation left out."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from .bodies import Atom, Body, equations_of, type_of

#: A number, "x", or (primitive, parameters, *operands).
Term = Any

#: Primitives that run a body, by the parameter that holds it.
CALLS = {"jit": "jaxpr", "closed_call": "call_jaxpr", "custom_jvp_call": "call_jaxpr"}
#: A function with a derivative of its own is another one than its equations.
OWN_DERIVATIVE = "custom_jvp_call"
#: Parameters that say nothing about what is computed.
SILENT = ("sharding", "out_sharding", "accuracy", "weak_type", "shape", "dimensions", "axes")
#: Equations with more parts are no activation.
MOST = 64


class _NoTermError(Exception):
    """It depends on something else, or is too long."""


def term(
    body: Body,
    result: Atom,
    leaf: Var,
    known: Callable[[Var], Term | None] = lambda var: None,
    *,
    casts: bool = False,
) -> Term | None:
    """What `result` is, computed from `leaf`; None: it needs something else.

    Args:
      known: the terms of other variables, or None.
      casts: leave casts between floating types out.
    """
    try:
        return _Reader(known, casts).read(body.jaxpr, body.maker, result, {leaf: "x"})
    except _NoTermError:
        return None


def is_constant(body: Body, atom: Atom) -> bool:
    """Whether it is made of numbers in the program alone."""
    index = body.made_by(atom)
    if index is None:
        return isinstance(atom, Literal)
    equation = body.equations[index]
    moves = ("pvary", "pcast", "broadcast_in_dim", "convert_element_type")
    return equation.primitive.name in moves and is_constant(body, equation.invars[0])


class _Reader:
    def __init__(self, known: Callable[[Var], Term | None], casts: bool) -> None:
        self.parts, self._known, self._casts = 0, known, casts

    def read(
        self, jaxpr: Jaxpr, maker: Mapping[Var, int], atom: Atom, known: dict[Var, Term]
    ) -> Term:
        self.parts += 1
        if self.parts > MOST:
            raise _NoTermError
        if isinstance(atom, Literal):
            return _number(atom)
        if atom in known:
            return known[atom]
        if (given := self._known(atom)) is not None:
            return given
        if atom not in maker:
            raise _NoTermError
        equation = jaxpr.eqns[maker[atom]]
        operands = [self.read(jaxpr, maker, one, known) for one in equation.invars]
        found = self._of(equation, equation.outvars.index(atom), operands)
        known[atom] = found
        return found

    def _of(self, equation: JaxprEqn, at: int, operands: list[Term]) -> Term:
        name, params = equation.primitive.name, equation.params
        if name in CALLS:
            body = params[CALLS[name]]
            if getattr(body, "consts", ()):
                raise _NoTermError
            inner = Body(equations_of(body))
            known = dict(zip(inner.jaxpr.invars, operands, strict=True))
            found = self.read(inner.jaxpr, inner.maker, inner.jaxpr.outvars[at], known)
            if name == OWN_DERIVATIVE:
                return name, inner.jaxpr.debug_info.func_src_info, found
            return found
        if name in ("pvary", "pcast", "broadcast_in_dim", "copy") or _adds_ones(equation):
            return operands[0]
        is_number = name == "convert_element_type" and isinstance(operands[0], float)
        if is_number and jnp.issubdtype(params["new_dtype"], np.floating):
            return float(np.asarray(operands[0]).astype(params["new_dtype"]))
        if len(equation.outvars) > 1:
            raise _NoTermError
        if self._casts and name == "convert_element_type":
            types = type_of(equation.invars[0]).dtype, params["new_dtype"]
            if all(jnp.issubdtype(one, jnp.floating) for one in types):
                return operands[0]
        if name == "reduce_sum":
            (axis,) = params["axes"] if len(params["axes"]) == 1 else (None,)
            name = "sum" if axis == type_of(equation.invars[0]).ndim - 1 else "other sum"
        if name in ("add", "mul", "max", "add_any"):
            operands = sorted(operands, key=repr)
        said = {k: str(v) for k, v in params.items() if k not in SILENT and v is not None}
        return name, tuple(sorted(said.items())), *operands


def _adds_ones(equation: JaxprEqn) -> bool:
    """Whether it is a reshape that adds or drops dimensions of size 1."""
    if equation.primitive.name not in ("reshape", "squeeze"):
        return False
    shapes = (type_of(a).shape for a in (equation.invars[0], equation.outvars[0]))
    one, other = ([n for n in shape if n != 1] for shape in shapes)
    return one == other


def _number(literal: Literal) -> float:
    """As its type holds it."""
    aval = type_of(literal)
    is_real = jnp.issubdtype(aval.dtype, np.floating) or jnp.issubdtype(aval.dtype, np.integer)
    if aval.shape or not is_real:
        raise _NoTermError
    return float(np.asarray(literal.val).astype(aval.dtype))


ROOT = float(np.sqrt(2))
SLOPE = float(np.sqrt(2 / np.pi))


#: Activations of the ops, as programs write them.
WRITTEN: Mapping[str, tuple[Callable[[jax.Array], jax.Array], ...]] = {
    "silu": (jax.nn.silu, lambda x: x * jax.nn.sigmoid(x), lambda x: x / (1 + jnp.exp(-x))),
    "relu": (jax.nn.relu,),  # not `jnp.maximum`, which has half a derivative at 0
    "gelu_tanh": (
        functools.partial(jax.nn.gelu, approximate=True),
        lambda x: 0.5 * x * (1 + jnp.tanh(SLOPE * (x + 0.044715 * x**3))),
        lambda x: 0.5 * x * (1 + jnp.tanh(SLOPE * (x + 0.044715 * x * x * x))),
    ),
    "gelu": (
        functools.partial(jax.nn.gelu, approximate=False),
        lambda x: 0.5 * x * (1 + jax.lax.erf(x / ROOT)),
        lambda x: x * 0.5 * (1 + jax.lax.erf(x / ROOT)),
    ),
}


@functools.lru_cache
def activations(dtype: np.dtype) -> Mapping[Term, str]:
    """The names of the ops' activations, by their terms for arrays of this type."""
    found: dict[Term, str] = {}
    if not jnp.issubdtype(dtype, np.floating):
        return found
    with jax.numpy_dtype_promotion("standard"):
        for name, ways in WRITTEN.items():
            for way in ways:
                jaxpr = jax.make_jaxpr(way)(jax.ShapeDtypeStruct((2,), dtype))
                body = Body(equations_of(jaxpr))
                (x,), (result,) = body.jaxpr.invars, body.jaxpr.outvars
                found[term(body, result, x)] = name
    found.pop(None, None)
    return found
