"""The experts that tokens choose by a router's logits, and their weights: a primitive of all gates,
whose gradient is a primitive too.

With w the weights [T, k], of the chosen logits x, and d a tangent:

    normalized softmax   dw = w (d - <w, d> / scale)
    normalized sigmoid   the same of d' = sigmoid(-x) d, in place of d
    sigmoid              dw = w sigmoid(-x) d
    softmax              dw = w (d - <p, d>), where p [T, E] is the softmax of all logits

GPUs have a kernel for each (cc/ops/moe_gate). XLA makes seven of a gate and its gradient, eleven if
there are groups, of small arrays.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import ad

from ... import _native
from ..._call import derivatives, local_ops, value_checks
from ..._call.forms import Op, ShapeDtype
from ..._call.plans import Arrays, Plan
from ..._call.primitives import make_primitive
from .._epilogue import in_rows, sum_dtype
from ..products import _product

OP, GRADIENT = "moe_gate", "moe_gate_gradient"

_SCORES = ("softmax", "sigmoid")  # in the order of GateScore
#: That the kernels take: kMostGateExperts, kMostGateSlots, kMostGateGroups.
_MOST_EXPERTS, _MOST_SLOTS, _MOST_GROUPS = 1024, 32, 32


@dataclasses.dataclass(frozen=True)
class Params:
    """A gate, and the type and the columns of its logits. `biased`, `masked`: which operands it
    has, beside logits. `groups`: (how many, those that a token may use); None: no groups."""

    k: int
    score: str
    normalize: bool
    scale: float
    experts: int
    dtype: np.dtype
    biased: bool = False
    masked: bool = False
    groups: tuple[int, int] | None = None

    @property
    def needs_logits(self) -> bool:
        """Whether derivatives depend on the logits, beside the weights."""
        return self.score == "sigmoid" or not self.normalize


def choose(
    logits: jax.Array,
    k: int,
    score: str,
    *,
    bias: jax.Array | None = None,
    normalize: bool,
    scale: Any,
    mask: jax.Array | None = None,
    groups: tuple[int, int] | None = None,
) -> tuple[jax.Array, jax.Array]:
    """(indices i32 [T, k], weights [T, k]) of logits [T, E] of any floating type, with a bias [E]
    for the choice alone. Ties go to the lower index. `groups`: as `Params` has them."""
    is_constant = isinstance(scale, int | float | np.number) and scale != 0
    logits = jnp.asarray(logits)
    dtype = np.dtype(logits.dtype)
    params = Params(
        int(k), score, bool(normalize), float(scale) if is_constant else 1.0,
        experts=logits.shape[1], dtype=dtype, biased=bias is not None, masked=mask is not None,
        groups=groups,
    )  # fmt: skip
    operands = [logits]
    if bias is not None:
        operands.append(bias.astype(sum_dtype(dtype)))
    if mask is not None:
        operands.append(mask)
    indices, weights = _gate.bind(*operands, params=params)
    return indices, weights if is_constant else scale * weights


# ---- What gates are made of, in lax --------------------------------------------------------------


def scores(score: str, logits: jax.Array) -> jax.Array:
    """Of all experts: [T, E]."""
    return jax.nn.sigmoid(logits) if score == "sigmoid" else jax.nn.softmax(logits, -1)


def _choices(params: Params, logits: jax.Array, bias: jax.Array | None) -> jax.Array:
    """By which experts are chosen: [T, E]."""
    by_logits = params.score == "softmax" and params.groups is None
    choices = logits if by_logits else scores(params.score, logits)
    if bias is not None:
        choices = choices + in_rows(bias.astype(choices.dtype), choices)
    if params.groups is None:
        return choices
    count, top = params.groups
    grouped = choices.reshape(-1, count, params.experts // count)
    best, _ = lax.top_k(grouped, min(2, grouped.shape[2]) if params.score == "sigmoid" else 1)
    _, groups = lax.top_k(jnp.sum(best, -1), top)
    allowed = jnp.any(jax.nn.one_hot(groups, count, dtype=bool), 1)
    return jnp.where(allowed[:, :, None], grouped, -jnp.inf).reshape(choices.shape)


def weights_of(
    score: str, logits: jax.Array, indices: jax.Array, normalize: bool, scale: Any
) -> jax.Array:
    """Of the chosen experts: [T, k]."""
    if not normalize:
        return scale * jnp.take_along_axis(scores(score, logits), indices, -1)
    # Scores over their sum are the softmax of their logarithms, whose exponentials may all be 0 in
    # float32. That of a softmax is the logit, less what all experts have in common.
    chosen = jnp.take_along_axis(logits, indices, -1)
    return scale * jax.nn.softmax(jax.nn.log_sigmoid(chosen) if score == "sigmoid" else chosen, -1)


def of_real_tokens(
    indices: jax.Array, weights: jax.Array, mask: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """(indices i32 [T, k], weights [T, k]) without those of tokens that the mask leaves out."""
    indices = value_checks.to_int32(indices)
    if mask is None:
        return indices, weights
    real = mask[:, None]
    return jnp.where(real, indices, -1), jnp.where(real, weights, jnp.zeros((), weights.dtype))


# ---- The primitives ------------------------------------------------------------------------------


def _reference(arrays: Arrays, params: Params) -> Sequence[jax.Array]:
    logits, *rest = arrays
    mask = rest.pop() if params.masked else None
    bias = rest.pop() if params.biased else None
    wide = logits.astype(sum_dtype(params.dtype))
    if mask is not None:
        wide = jnp.where(mask[:, None], wide, 0)
    _, indices = lax.top_k(_choices(params, wide, bias), params.k)
    weights = weights_of(params.score, wide, indices, params.normalize, params.scale)
    return of_real_tokens(indices, weights, mask)


def _shapes(arrays: Arrays, params: Params) -> Sequence[ShapeDtype]:
    shape = (arrays[0].shape[0], params.k)
    return [(shape, np.dtype(np.int32)), (shape, np.dtype(sum_dtype(params.dtype)))]


def _gradient_reference(arrays: Arrays, params: Params) -> list[jax.Array]:
    """That of the logits, from that of the weights."""
    dweights, indices, weights, *logits = arrays
    chosen, real = _chosen(indices)
    own = weights * jnp.where(real, dweights, 0)
    total = jnp.sum(own, -1, keepdims=True)
    if params.normalize:
        own -= weights * total / params.scale
    if params.score == "sigmoid":
        own *= _slopes(indices, *logits).astype(own.dtype)
    tokens = lax.broadcasted_iota(jnp.int32, indices.shape, 0)
    every = jnp.zeros((indices.shape[0], params.experts), own.dtype)
    every = every.at[tokens, chosen].add(jnp.where(real, own, 0))
    if params.score == "softmax" and not params.normalize:
        every -= _probabilities(indices, *logits) * total
    return [every.astype(params.dtype)]


def _gradient_shapes(arrays: Arrays, params: Params) -> Sequence[ShapeDtype]:
    return [((arrays[0].shape[0], params.experts), params.dtype)]


def _chosen(indices: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(the columns of slots; which slots have one)."""
    return jnp.maximum(indices, 0), indices >= 0


def _slopes(indices: jax.Array, logits: jax.Array) -> jax.Array:
    """d log(sigmoid(x)) / dx of the chosen logits: [T, k]."""
    chosen, real = _chosen(indices)
    x = jnp.take_along_axis(logits, chosen, -1).astype(sum_dtype(logits.dtype))
    return jax.nn.sigmoid(-jnp.where(real, x, 0))


def _probabilities(indices: jax.Array, logits: jax.Array) -> jax.Array:
    """The softmax of all logits: [T, E]."""
    wide = logits.astype(sum_dtype(logits.dtype))
    return jax.nn.softmax(jnp.where(indices[:, :1] >= 0, wide, 0), -1)


def _why_not(arrays: Arrays, params: Params, platform: str) -> str | None:
    if why := _native.why_not_dtypes(OP, "cuda", params.dtype):
        return why
    if params.experts > _MOST_EXPERTS or params.k > _MOST_SLOTS:
        return (
            f"{params.k} of {params.experts} experts, the kernels take up to {_MOST_SLOTS} of "
            f"{_MOST_EXPERTS}"
        )
    if params.groups is not None and params.groups[0] > _MOST_GROUPS:
        return f"{params.groups[0]} groups, the kernel takes up to {_MOST_GROUPS}"
    return "an operand is empty" if any(0 in a.shape for a in arrays) else None


def _gradient_attributes(arrays: Arrays, params: Params, plan: Plan) -> dict[str, Any]:
    return {
        "normalize": params.normalize,
        "scale": np.float64(params.scale),
        "score": np.int64(_SCORES.index(params.score)),
    }


def _attributes(arrays: Arrays, params: Params, plan: Plan) -> dict[str, Any]:
    groups, top_groups = params.groups or (0, 0)
    return _gradient_attributes(arrays, params, plan) | {
        "biased": params.biased,
        "masked": params.masked,
        "groups": np.int64(groups),
        "top_groups": np.int64(top_groups),
    }


def _batch(primitive: Any, operands: Any, dims: Any, *, params: Params) -> Any:
    """One call of all batches' tokens, unless each has a bias of its own."""
    at = 1 if params.biased else None
    if at is not None and dims[at] is not None:
        return _product.bind_one_by_one(primitive, operands, dims, params=params)
    count = next(a.shape[d] for a, d in zip(operands, dims, strict=True) if d is not None)
    wide = [
        a if i == at else _product.interleaved(a, d, count)
        for i, (a, d) in enumerate(zip(operands, dims, strict=True))
    ]
    results = primitive.bind(*wide, params=params)
    return [r.reshape(-1, count, r.shape[1]) for r in results], [1] * len(results)


def _op(name: str, shapes: Any, reference: Any, attributes: Any) -> Any:
    return make_primitive(
        Op(
            name=name,
            result_shapes=shapes,
            reference=reference,
            forms=(
                local_ops.kernel(
                    name,
                    why_not=_why_not,
                    attributes=attributes,
                    checked_on_gpus=True,
                    on_cpus=False,
                    is_optional=True,
                ),
            ),
            batch=_batch,
            is_local=True,
            is_split_by_xla=True,
        )
    )


_gate = _op(OP, _shapes, _reference, _attributes)
_gradient = _op(GRADIENT, _gradient_shapes, _gradient_reference, _gradient_attributes)


# ---- Derivatives ---------------------------------------------------------------------------------


def _tangents(kept: Sequence[Any], tangents: Sequence[Any], params: Params) -> Sequence[jax.Array]:
    indices, weights, *logits = kept
    (every,) = tangents
    every = every.astype(weights.dtype)
    chosen, real = _chosen(indices)
    own = jnp.take_along_axis(every, chosen, -1)
    if params.score == "sigmoid":
        own *= _slopes(indices, *logits)
    if params.normalize:
        own -= jnp.sum(weights * own, -1, keepdims=True) / params.scale
    elif params.score == "softmax":
        own -= jnp.sum(_probabilities(indices, *logits) * every, -1, keepdims=True)
    return [jnp.where(real, weights * own, 0)]


def _backward(
    kept: Sequence[Any], cotangents: Sequence[Any], wanted: Sequence[Any], params: Params
) -> Sequence[Any]:
    (dweights,) = cotangents
    return [None] if dweights is None else _gradient.bind(dweights, *kept, params=params)


_DERIVATIVES = derivatives.Derivatives(
    forward=lambda operands, params: ([], operands),  # the primitive gives the results
    tangents=_tangents,
    backward=_backward,
    kept=lambda operands, params: operands,
)


def _jvp(primals: Any, tangents: Any, *, params: Params) -> Any:
    indices, weights = _gate.bind(*primals, params=params)
    dlogits = derivatives.none_if_zero(tangents[0])
    if dlogits is None:
        return [indices, weights], [local_ops.zero_of(indices), local_ops.zero_of(weights)]
    kept = [indices, weights, *primals[: params.needs_logits]]
    # Derivatives are at the choices, which know of the rest.
    params = dataclasses.replace(params, biased=False, masked=False, groups=None)
    (dweights,) = derivatives.tangents_of(_DERIVATIVES, [weights], kept, [dlogits], params)
    return [indices, weights], [local_ops.zero_of(indices), dweights]


def _gradient_jvp(primals: Any, tangents: Any, *, params: Params) -> Any:
    """As the reference has it."""
    results = _gradient.bind(*primals, params=params)
    if all(derivatives.none_if_zero(t) is None for t in tangents):
        return results, [local_ops.zero_of(r) for r in results]
    _, moved = derivatives.jvp_of_moved(
        lambda *arrays: _gradient_reference(arrays, params), primals, tangents
    )
    return results, moved


ad.primitive_jvps[_gate] = _jvp
ad.primitive_jvps[_gradient] = _gradient_jvp
