"""What follows the products of groups, with derivatives: backward, a primitive of its own that
touches no row without a group. Kernel: cc/ops/activation_gradient. Parameters of a call are its
epilogue, an activation alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad

from ... import _native
from ..._call import derivatives, local_ops
from ..._call.forms import Op, ShapeDtype
from ..._call.plans import Arrays, Plan
from ..._call.primitives import make_primitive
from .. import _epilogue
from .._epilogue import Epilogue
from . import _product

OP = "activation_gradient"


def tangent(
    sums: Sequence[jax.Array],
    dsums: Sequence[jax.Array | None],
    y: jax.Array,
    sizes: jax.Array,
    params: Epilogue,
) -> jax.Array:
    """That of y, the activated sums, from those of the sums (None: zero). Transposed, it gives the
    gradients of the sums, which may be anything in rows of no group."""
    (dy,) = derivatives.tangents_of(_DERIVATIVES, [y], [*sums, sizes], [*dsums, None], params)
    return dy


def activated(sums: Sequence[jax.Array], sizes: jax.Array, params: Epilogue) -> jax.Array:
    """y, in the type of the sums, of which nothing else is kept for the backward pass."""
    (y,) = _activated(params, *sums, sizes)
    return y


def gradients(
    sums: Sequence[jax.Array], dy: jax.Array, sizes: jax.Array, params: Epilogue
) -> list[jax.Array]:
    """Those of the sums, from that of y. Rows of no group may be anything."""
    dy = dy.astype(sums[0].dtype)
    if local_ops.fills_unread():  # the kernel leaves those rows as they are
        return _reference([dy, *sums, sizes], params)
    return list(_primitive.bind(dy, *sums, sizes, params=params))


def _of_sums(params: Epilogue, *operands: Any) -> Sequence[jax.Array]:
    *sums, _ = operands
    return _epilogue.apply(params, sums, (), sums[0].dtype)[0]


def _tangents(
    kept: Sequence[Any], tangents: Sequence[jax.Array | None], params: Epilogue
) -> Sequence[jax.Array]:
    *sums, _ = kept
    pairs = zip(sums, tangents, strict=False)
    moving = [jnp.zeros_like(s) if d is None else d for s, d in pairs]
    return _epilogue.tangents(params, sums, moving)


def _gradients(
    kept: Sequence[Any], cotangents: Sequence[Any], wanted: Sequence[Any], params: Epilogue
) -> Sequence[Any]:
    (dy,) = cotangents
    if dy is None:
        return [None] * len(kept)
    *sums, sizes = kept
    return [*gradients(sums, dy, sizes, params), None]


def _all(operands: Sequence[Any], params: Epilogue) -> Sequence[Any]:
    return operands


_DERIVATIVES = derivatives.Derivatives(
    forward=lambda operands, params: ([], operands),  # products give the results
    tangents=_tangents,
    backward=_gradients,
    kept=_all,
)
_activated = derivatives.differentiated(
    _of_sums, kept=_all, tangents=_tangents, backward=_gradients, axes=lambda params: None
)


# ---- The primitive -------------------------------------------------------------------------------


def _reference(arrays: Arrays, params: Epilogue) -> list[jax.Array]:
    dy, *sums, _ = arrays
    return _epilogue.gradient(params, sums, [dy])


def _shapes(arrays: Arrays, params: Epilogue) -> Sequence[ShapeDtype]:
    return [(s.shape, s.dtype) for s in arrays[1:-1]]


def _why_not(arrays: Arrays, params: Epilogue, platform: str) -> str | None:
    dy, *_, sizes = arrays
    if why := _native.why_not_dtypes(OP, "cuda", dy.dtype):
        return why
    if why := _native.why_not_rows(dy):
        return why
    return "an operand is empty" if 0 in (*dy.shape, *sizes.shape) else None


def _attributes(arrays: Arrays, params: Epilogue, plan: Plan) -> dict[str, Any]:
    return {"activation": np.int64(params.number), "gated": params.gated}


def _batch(primitive: Any, operands: Any, dims: Any, *, params: Epilogue) -> Any:
    """Of rows alone it is one call, of all batches' rows beside each other."""
    *arrays, sizes = operands
    *of_arrays, of_sizes = dims
    if of_sizes is not None:
        return _product.bind_one_by_one(primitive, operands, dims, params=params)
    count = next(a.shape[d] for a, d in zip(arrays, of_arrays, strict=True) if d is not None)
    wide = [_product.interleaved(a, d, count) for a, d in zip(arrays, of_arrays, strict=True)]
    results = primitive.bind(*wide, sizes * count, params=params)
    return [r.reshape(-1, count, r.shape[1]) for r in results], [1] * len(results)


_primitive = make_primitive(
    Op(
        name=OP,
        result_shapes=_shapes,
        reference=_reference,
        forms=(
            local_ops.kernel(
                OP,
                why_not=_why_not,
                attributes=_attributes,
                checked_on_gpus=True,
                on_cpus=False,
                is_optional=True,
            ),
        ),
        batch=_batch,
        is_local=True,
        values=0,  # rows of no group may be anything
    )
)


def _jvp(primals: Any, tangents: Any, *, params: Epilogue) -> Any:
    """As the reference has it."""
    results = _primitive.bind(*primals, params=params)
    if not any(derivatives.none_if_zero(t) is not None for t in tangents[:-1]):
        return results, [local_ops.zero_of(r) for r in results]
    *arrays, sizes = primals
    _, moved = derivatives.jvp_of_moved(
        lambda *arrays: _reference((*arrays, sizes), params), arrays, tangents[:-1]
    )
    return results, moved


ad.primitive_jvps[_primitive] = _jvp
