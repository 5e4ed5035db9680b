"""Moves rows between the order of tokens and that of experts.

Three functions are the derivatives of one sum, over the slots (t, j) that have a row r:

    S(y, w, g) = sum  w[t, j] <y[r], g[t]>        y [R, H]  w [T, k]  g [T, H]

    combine(y, w)  = dS/dg    g[t] = sum over j of w[t, j] y[r]
    spread(g, w)   = dS/dy    y[r] = w[t, j] g[t], and zeros, or anything, where no slot has the row
    dots(y, g)     = dS/dw    w[t, j] = <y[r], g[t]>

Each is linear in both operands, and the transposes of each are the other two: one primitive, of
which `result` says which. No sum is scattered, so all have one order. source [R] and destination
[T, k] say the same, a row's slot and a slot's row. GPUs have a kernel for each (cc/ops/moe_rows),
which goes by destination, and by source to know which rows are zeros.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad

from ... import _native
from ..._call import local_ops
from ..._call.forms import Op, ShapeDtype
from ..._call.plans import Arrays
from ..._call.primitives import make_primitive
from .. import _epilogue

OP = "moe_rows"

#: The two operands of each result, in order.
_OPERANDS = {"g": ("y", "w"), "y": ("g", "w"), "w": ("y", "g")}
_FORMS = tuple(_OPERANDS)  # in the order of MoeRowsForm


@dataclasses.dataclass(frozen=True)
class Params:
    """Which derivative of the sum, and its type. `fill`: whether y has zeros in rows that no slot
    has, where it is the result, or that of a transpose; else anything."""

    result: str
    dtype: np.dtype
    fill: bool = True


def combine(
    y: jax.Array,
    w: jax.Array,
    source: jax.Array,
    destination: jax.Array,
    dtype: Any = None,
    *,
    fill: bool = True,
) -> jax.Array:
    """The weighted sum of each token's rows, in the order of j: [T, H], of y's type or `dtype`."""
    return _bind(Params("g", np.dtype(dtype or y.dtype), fill), y, w, source, destination)


def spread(
    g: jax.Array, w: jax.Array, source: jax.Array, destination: jax.Array, *, fill: bool = True
) -> jax.Array:
    """Weighted copies of tokens in the order of experts: [R, H], of g's type."""
    return _bind(Params("y", g.dtype, fill), g, w, source, destination)


def dots(y: jax.Array, g: jax.Array, source: jax.Array, destination: jax.Array) -> jax.Array:
    """The dot product of each slot's row with its token's: [T, k], in the type that y's are summed
    in; zeros where a slot has no row."""
    return _bind(Params("w", np.dtype(_epilogue.sum_dtype(y.dtype))), y, g, source, destination)


def _bind(params: Params, *operands: jax.Array) -> jax.Array:
    return _primitive.bind(*operands, params=params)[0]


def _reference(arrays: Arrays, params: Params) -> list[jax.Array]:
    a, b, source, destination = arrays
    wide = jnp.promote_types(_epilogue.sum_dtype(a.dtype), _epilogue.sum_dtype(b.dtype))
    k = destination.shape[1]
    if params.result == "y":
        g, w = a, b
        slot = jnp.maximum(source, 0)
        rows = w.reshape(-1)[slot].astype(wide)[:, None] * g[slot // k].astype(wide)
        # Where anything may be, NaN shows who reads it.
        rest = 0 if params.fill else np.nan
        return [jnp.where((source >= 0)[:, None], rows, rest).astype(params.dtype)]
    y, row = a, jnp.maximum(destination, 0)

    def of_slot(j: int) -> jax.Array:
        """The rows of each token's j-th slot: [T, H]."""
        return jnp.where((destination[:, j] >= 0)[:, None], y[row[:, j]].astype(wide), 0)

    if params.result == "w":
        dots = [jnp.sum(of_slot(j) * b.astype(wide), -1) for j in range(k)]
        return [jnp.stack(dots, 1).astype(params.dtype)]
    # A weight without a row may be anything.
    w = jnp.where(destination >= 0, b, 0).astype(wide)
    total = w[:, :1] * of_slot(0)
    for j in range(1, k):
        total += w[:, j : j + 1] * of_slot(j)
    return [total.astype(params.dtype)]


def _shapes(arrays: Arrays, params: Params) -> Sequence[ShapeDtype]:
    a, _, source, destination = arrays
    tokens, k = destination.shape
    shapes = {"g": (tokens, a.shape[1]), "y": (source.shape[0], a.shape[1]), "w": (tokens, k)}
    return [(shapes[params.result], params.dtype)]


def _why_not(arrays: Arrays, params: Params, platform: str) -> str | None:
    a, b, _, destination = arrays
    types = [d.dtype.name for d in (a, b, params)]
    first, second, out = types
    if why := _native.why_not_dtypes("moe_rows", "cuda", first):
        return why
    other = first if params.result == "w" else "float32"
    results = {"g": (first, "float32"), "y": (first,), "w": ("float32",)}[params.result]
    if second != other or out not in results:
        return f"the kernels do not take {first} and {second} with a result of {out}"
    if why := _native.why_not_rows(a):
        return why
    if 0 in (*a.shape, *b.shape, *arrays[2].shape, *destination.shape):
        return "an operand is empty"
    return None


def _batch(primitive: Any, operands: Any, dims: Any, *, params: Params) -> Any:
    results = jax.vmap(lambda *a: _reference(a, params), tuple(dims))(*operands)
    return results, [0] * len(results)


_primitive = make_primitive(
    Op(
        name=OP,
        result_shapes=_shapes,
        reference=_reference,
        forms=(
            local_ops.kernel(
                OP,
                why_not=_why_not,
                attributes=lambda arrays, params, plan: {
                    "fill": params.fill,
                    "form": np.int64(_FORMS.index(params.result)),
                },
                checked_on_gpus=True,
                on_cpus=False,
                is_optional=True,
            ),
        ),
        batch=_batch,
        is_local=True,
    )
)


def _jvp(primals: Any, tangents: Any, *, params: Params) -> Any:
    a, b, *places = primals
    results = _primitive.bind(a, b, *places, params=params)
    terms = []
    if not isinstance(tangents[0], ad.Zero):
        terms += _primitive.bind(tangents[0], b, *places, params=params)
    if not isinstance(tangents[1], ad.Zero):
        terms += _primitive.bind(a, tangents[1], *places, params=params)
    return results, [sum(terms[1:], terms[0]) if terms else local_ops.zero_of(results[0])]


def _transpose(cotangents: Any, *operands: Any, params: Params) -> Any:
    a, b, *places = operands
    (cotangent,) = cotangents
    if isinstance(cotangent, ad.Zero):
        return [None] * 4
    names = _OPERANDS[params.result]
    at = 0 if ad.is_undefined_primal(a) else 1
    given = {params.result: cotangent, names[1 - at]: (a, b)[1 - at]}
    wanted = names[at]
    pair = (given[name] for name in _OPERANDS[wanted])
    found_as = Params(wanted, (a, b)[at].aval.dtype, params.fill)
    (found,) = _primitive.bind(*pair, *places, params=found_as)
    return [found if i == at else None for i in range(4)]


ad.primitive_jvps[_primitive] = _jvp
ad.primitive_transposes[_primitive] = _transpose
