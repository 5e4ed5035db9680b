"""Moves rows between the order of tokens and that of experts.

Three functions are the derivatives of one sum, over the slots (t, j) that have a row r:

    S(y, w, g) = sum  w[t, j] <y[r], g[t]>        y [R, H]  w [T, k]  g [T, H]

    combine(y, w)  = dS/dg    g[t] = sum over j of w[t, j] y[r]
    spread(g, w)   = dS/dy    y[r] = w[t, j] g[t], and zeros where no slot has the row
    dots(y, g)     = dS/dw    w[t, j] = <y[r], g[t]>

Each is linear in both operands, and the transposes of each are the other two: one primitive, of
which `result` says which. All three gather, so nothing is scattered and sums have one order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from .. import _epilogue
from .._ops import _local

#: The two operands of each result, in order.
_OPERANDS = {"g": ("y", "w"), "y": ("g", "w"), "w": ("y", "g")}


@dataclasses.dataclass(frozen=True)
class Params:
    """Which derivative of the sum, and its type."""

    result: str
    dtype: np.dtype


def combine(y: jax.Array, w: jax.Array, source: jax.Array, destination: jax.Array) -> jax.Array:
    """The weighted sum of each token's rows, in the order of j: [T, H], of y's type."""
    return _bind(Params("g", y.dtype), y, w, source, destination)


def spread(g: jax.Array, w: jax.Array, source: jax.Array, destination: jax.Array) -> jax.Array:
    """Weighted copies of tokens in the order of experts: [R, H], of g's type."""
    return _bind(Params("y", g.dtype), g, w, source, destination)


def _bind(params: Params, *operands: jax.Array) -> jax.Array:
    return _primitive.bind(*_local.vary_together(*operands), params=params)


def _form(a: Any, b: Any, source: Any, destination: Any, *, params: Params) -> jax.Array:
    wide = _epilogue.sum_dtype(jnp.promote_types(a.dtype, b.dtype))
    k = destination.shape[1]
    if params.result == "y":
        g, w = a, b
        slot = jnp.maximum(source, 0)
        rows = w.reshape(-1)[slot].astype(wide)[:, None] * g[slot // k].astype(wide)
        return jnp.where((source >= 0)[:, None], rows, 0).astype(params.dtype)
    y, row = a, jnp.maximum(destination, 0)

    def of_slot(j: int) -> jax.Array:
        """The rows of each token's j-th slot: [T, H]."""
        return jnp.where((destination[:, j] >= 0)[:, None], y[row[:, j]].astype(wide), 0)

    if params.result == "w":
        dots = [jnp.sum(of_slot(j) * b.astype(wide), -1) for j in range(k)]
        return jnp.stack(dots, 1).astype(params.dtype)
    # A weight without a row may be anything.
    w = jnp.where(destination >= 0, b, 0).astype(wide)
    total = w[:, :1] * of_slot(0)
    for j in range(1, k):
        total += w[:, j : j + 1] * of_slot(j)
    return total.astype(params.dtype)


_primitive = Primitive("jflux_moe_rows")


@_primitive.def_abstract_eval
def _abstract(a: Any, b: Any, source: Any, destination: Any, *, params: Params) -> Any:
    columns = a.shape[1]
    tokens, k = destination.shape
    rows = source.shape[0]
    shape = {"g": (tokens, columns), "y": (rows, columns), "w": (tokens, k)}[params.result]
    return _local.result_type((a, b, source, destination), shape, params.dtype)


_primitive.def_impl(jax.jit(_primitive.bind, static_argnames="params"))
mlir.register_lowering(_primitive, mlir.lower_fun(_form, multiple_results=False))


def _batch(operands: Sequence[Any], dims: Sequence[Any], *, params: Params) -> Any:
    return jax.vmap(lambda *a: _form(*a, params=params), tuple(dims))(*operands), 0


def _jvp(primals: Any, tangents: Any, *, params: Params) -> Any:
    a, b, *places = primals
    y = _primitive.bind(a, b, *places, params=params)
    terms = []
    if not isinstance(tangents[0], ad.Zero):
        terms.append(_primitive.bind(tangents[0], b, *places, params=params))
    if not isinstance(tangents[1], ad.Zero):
        terms.append(_primitive.bind(a, tangents[1], *places, params=params))
    return y, sum(terms[1:], terms[0]) if terms else _local.zero_of(y)


def _transpose(cotangent: Any, *operands: Any, params: Params) -> Any:
    a, b, *places = operands
    if isinstance(cotangent, ad.Zero):
        return [None] * 4
    names = _OPERANDS[params.result]
    at = 0 if ad.is_undefined_primal(a) else 1
    given = {params.result: cotangent, names[1 - at]: (a, b)[1 - at]}
    wanted = names[at]
    pair = (given[name] for name in _OPERANDS[wanted])
    found = _primitive.bind(*pair, *places, params=Params(wanted, (a, b)[at].aval.dtype))
    return [found if i == at else None for i in range(4)]


batching.primitive_batchers[_primitive] = _batch
ad.primitive_jvps[_primitive] = _jvp
ad.primitive_transposes[_primitive] = _transpose
