"""Attention of one device, as :mod:`._blockwise` has it, by a GPU kernel where one takes the call
(cc/ops/flash_attention): two primitives, the forward and the backward pass."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad

from ... import _native
from ..._call import derivatives, gpu_code, local_ops
from ..._call.forms import Op, ShapeDtype
from ..._call.plans import Arrays, Plan
from ..._call.primitives import make_primitive, plan_call
from .._epilogue import sum_dtype
from . import _blockwise
from ._blockwise import NOWHERE, Positions, Scores

OP, BACKWARD = "flash_attention", "flash_attention_backward"

# These constants have the same names and values in cc/ops/flash_attention/flash_attention.h.
_PADDING = 128
_FURTHEST = (1 << 30) - 1
_SOME, _ALL = 1, 2
_MOST_WIDTH = 256


@dataclasses.dataclass(frozen=True)
class Params:
    """A call, less its operands.

    Attributes:
      scores: what a score is, and which pairs have one.
      dtype: of the output, in the forward pass.
      precision: JAX's default for products where the call was traced. The reference is traced when
        the program is lowered, where another one may hold.
    """

    scores: Scores
    dtype: np.dtype
    precision: str | None

    @classmethod
    def of(cls, scores: Scores, dtype: Any) -> Params:
        """The parameters of a call that is being traced."""
        return cls(scores, np.dtype(dtype), _blockwise.default_precision())


def forward(
    q: jax.Array,
    queries: Positions,
    k: jax.Array,
    v: jax.Array,
    keys: Positions,
    scores: Scores,
    dtype: Any,
) -> tuple[jax.Array, jax.Array]:
    """:func:`.blocks.forward`, with an output of `dtype`."""
    operands = (q, k, v, *_numbers(q.shape[0], queries, keys))
    params = Params.of(scores, dtype)
    return tuple(_forward.bind(*operands, params=params))


def backward(
    q: jax.Array,
    queries: Positions,
    k: jax.Array,
    v: jax.Array,
    keys: Positions,
    scores: Scores,
    lse: jax.Array,
    do: jax.Array,
    delta: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """:func:`.blocks.backward`."""
    operands = (q, k, v, do, lse, delta, *_numbers(q.shape[0], queries, keys))
    params = Params.of(scores, lse.dtype)
    return tuple(_backward.bind(*operands, params=params))


def plan(q: jax.Array, k: jax.Array, v: jax.Array, scores: Scores) -> Plan:
    """How a GPU would run the forward pass of these operands."""
    return plan_call(_FORWARD, (q, k, v), (), Params.of(scores, q.dtype), "cuda").plan


# ---- Operands ------------------------------------------------------------------------------------

# The operands are q, k, v[, do, lse, delta], positions of queries [1 or B, s] and of keys [1 or B,
# t][, segments of queries [B, s] and of keys [B, t]]. Both arrays of positions have one row, or
# both have B.


def _numbers(batch: int, queries: Positions, keys: Positions) -> list[jax.Array]:
    positions = [p if p.ndim == 2 else p[None] for p in (queries.positions, keys.positions)]
    if any(len(p) != 1 for p in positions):
        positions = [jnp.broadcast_to(p, (batch, p.shape[1])) for p in positions]
    if queries.segments is None or keys.segments is None:
        return positions
    return [*positions, queries.segments, keys.segments]


def _positions_of(numbers: Sequence[jax.Array]) -> tuple[Positions, Positions]:
    positions = [p[0] if len(p) == 1 else p for p in numbers[:2]]
    segments = numbers[2:] or (None, None)
    return Positions(positions[0], segments[0]), Positions(positions[1], segments[1])


def _forward_reference(arrays: Arrays, params: Params) -> list[jax.Array]:
    q, k, v, *numbers = arrays
    queries, keys = _positions_of(numbers)
    with jax.default_matmul_precision(params.precision):
        o, lse = _blockwise.forward(q, queries, k, v, keys, params.scores)
    return [o.astype(params.dtype), lse]


def _backward_reference(arrays: Arrays, params: Params) -> list[jax.Array]:
    q, k, v, do, lse, delta, *numbers = arrays
    queries, keys = _positions_of(numbers)
    with jax.default_matmul_precision(params.precision):
        return list(_blockwise.backward(q, queries, k, v, keys, params.scores, lse, do, delta))


def _forward_shapes(arrays: Arrays, params: Params) -> Sequence[ShapeDtype]:
    q = arrays[0]
    return [(q.shape, params.dtype), (q.shape[:3], sum_dtype(q.dtype))]


def _backward_shapes(arrays: Arrays, params: Params) -> Sequence[ShapeDtype]:
    return [(a.shape, params.dtype) for a in arrays[:3]]


# ---- What the kernels take -----------------------------------------------------------------------


def why_not(arrays: Arrays, params: Any, platform: str) -> str | None:
    q, k, scores = arrays[0], arrays[1], params.scores
    if why := _native.why_not_dtypes("flash_attention", "cuda", q.dtype):
        return why
    if q.shape[3] % 8 or q.shape[3] > _MOST_WIDTH:
        return (
            f"heads have {q.shape[3]} elements, the kernel takes a multiple of 8, up to "
            f"{_MOST_WIDTH}"
        )
    if 0 in q.shape or 0 in k.shape:
        return "an operand is empty"
    if not scores.scale > 0:
        return f"the scale is {scores.scale}, the kernel takes a positive one"
    if any(jnp.iinfo(a.dtype).bits > 32 for a in arrays if jnp.issubdtype(a.dtype, jnp.integer)):
        return "segments have 64 bits, the kernel takes up to 32"
    return None


def differences(scores: Scores) -> tuple[int, int]:
    """(least, most) that a key's position may be above its query's."""
    left, right = (_FURTHEST, _FURTHEST) if scores.window is None else scores.window
    most = min(right, 0) if scores.causal else right
    return -min(left, _FURTHEST), min(most, _FURTHEST)


def attributes(params: Any) -> dict[str, Any]:
    low, high = differences(params.scores)
    return {
        "scale": np.float64(params.scores.scale),
        "softcap": np.float64(params.scores.softcap or 0),
        "low": np.int64(low),
        "span": np.int64(high - low),
        "portable": gpu_code.runs_portable(),
    }


def block_sizes(kind: str, width: int) -> tuple[int, int]:
    """Queries and keys of a block of a kernel: "forward", "dkv" or "dq"."""
    most_keys = 128 if width <= 128 else 64
    return {"forward": (128, most_keys), "dkv": (64, most_keys), "dq": (128, 64)}[kind]


def block_kinds(
    queries: Positions, keys: Positions, scores: Scores, sizes: tuple[int, int]
) -> jax.Array:
    """Which pairs of a block of queries and a block of keys have scores: int8 [1 or B, blocks of
    queries, blocks of keys], 0: none, 2: all, 1: some, or it is not known.

    Padding of the queries does not count: their results are not kept.
    """
    low, high = differences(scores)
    (q_first, q_last, _), (k_first, k_last, whole) = (
        _bounds(part.positions, size) for part, size in zip((queries, keys), sizes, strict=True)
    )
    q_first, q_last = q_first[:, :, None], q_last[:, :, None]
    k_first, k_last, whole = k_first[:, None], k_last[:, None], whole[:, None]
    some = (k_last >= 0) & (q_last >= 0) & (k_last - q_first >= low) & (k_first - q_last <= high)
    every = whole & (k_first - q_last >= low) & (k_last - q_first <= high)
    if queries.segments is not None and keys.segments is not None:
        (q_least, q_most), (k_least, k_most) = (
            _segment_bounds(part, size) for part, size in zip((queries, keys), sizes, strict=True)
        )
        q_least, q_most = q_least[:, :, None], q_most[:, :, None]
        k_least, k_most = k_least[:, None], k_most[:, None]
        some &= (k_least <= q_most) & (q_least <= k_most)
        every &= (q_least == k_most) & (q_most == k_least)
    return jnp.where(some, jnp.where(every, _ALL, _SOME), 0).astype(jnp.int8)


def _in_blocks(a: jax.Array, size: int, fill: Any) -> jax.Array:
    """[B, s] as [B, blocks, size]."""
    return _padded(a, size, fill).reshape(a.shape[0], -1, size)


def by_cost(kinds: jax.Array, own: jax.Array | None = None) -> list[jax.Array]:
    """[`kinds`, order]. `kinds` [1 or B, rows, columns] is as given. `order`, i32 [1 or B times
    rows], has the numbers of its rows, rows with the most blocks first. Kernels take rows in this
    order, so that their CTAs end at about the same time. Among rows with as many blocks, those with
    the most blocks in `own` come first, which has some of the columns of `kinds`."""

    def count(some: jax.Array) -> jax.Array:
        return -jnp.sum(some != 0, axis=-1, dtype=jnp.int32).reshape(-1)

    keys = [count(kinds)] if own is None else [count(own), count(kinds)]
    return [kinds, jnp.lexsort(keys).astype(jnp.int32)]


def _bounds(positions: jax.Array, size: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(first position, last position, whether it has no padding) of each block. The last position
    of a block of padding alone is -1."""
    positions = positions if positions.ndim == 2 else positions[None]
    rows = _in_blocks(positions, size, NOWHERE)
    last = jnp.max(jnp.where(rows == NOWHERE, -1, rows), -1)
    first = jnp.min(rows, -1)
    return jnp.where(last < 0, 0, first), last, jnp.all(rows != NOWHERE, -1)


def _segment_bounds(part: Positions, size: int) -> tuple[jax.Array, jax.Array]:
    segments = part.segments
    assert segments is not None
    extremes = jnp.iinfo(segments.dtype)
    least = jnp.min(_in_blocks(segments, size, extremes.max), -1)
    return least, jnp.max(_in_blocks(segments, size, extremes.min), -1)


def _padded(a: jax.Array, size: int, fill: Any) -> jax.Array:
    """`a` with its last dimension padded to a multiple of `size`."""
    pad = [(0, 0)] * (a.ndim - 1) + [(0, -a.shape[-1] % size)]
    return jnp.pad(a, pad, constant_values=np.asarray(fill, a.dtype))


def padded(a: jax.Array, fill: int) -> jax.Array:
    """Positions or segments, with as many rows as kernels read."""
    return _padded(a, _PADDING, fill)


def _prepared_numbers(numbers: Sequence[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
    """(positions, segments) as the handlers take them."""
    positions = [_padded(p.astype(jnp.int32), _PADDING, NOWHERE) for p in numbers[:2]]
    segments = [_padded(s.astype(jnp.int32), _PADDING, 0) for s in numbers[2:]]
    return positions, segments


def _prepare_forward(arrays: Arrays, params: Params) -> list[jax.Array]:
    q, k, v, *numbers = arrays
    parts = _positions_of(numbers)
    positions, segments = _prepared_numbers(numbers)
    kinds = block_kinds(*parts, params.scores, block_sizes("forward", q.shape[3]))
    return [q, k, v, *positions, *by_cost(kinds), *segments]


def _prepare_backward(arrays: Arrays, params: Params) -> list[jax.Array]:
    q, k, v, do, lse, delta, *numbers = arrays
    parts = _positions_of(numbers)
    positions, segments = _prepared_numbers(numbers)
    base = jnp.where(lse == -jnp.inf, jnp.inf, lse * math.log2(math.e)).swapaxes(1, 2)
    base = _padded(base, _PADDING, jnp.inf)
    delta = _padded(delta.swapaxes(1, 2), _PADDING, 0)
    for_dkv, for_dq = (
        block_kinds(*parts, params.scores, block_sizes(kind, q.shape[3])) for kind in ("dkv", "dq")
    )
    kinds = [*by_cost(for_dkv.swapaxes(1, 2)), *by_cost(for_dq)]
    return [q, k, v, do, base, delta, *positions, *kinds, *segments]


# ---- The primitives ------------------------------------------------------------------------------


def folding(operands: Any, dims: Any) -> tuple[int, Callable[[jax.Array, int | None], jax.Array]]:
    """Under vmap of operands with q [B, ...] as the first: how many there are, and a function that
    makes so many times B sequences of an operand, given its batched dimension."""
    size = next(a.shape[d] for a, d in zip(operands, dims, strict=True) if d is not None)
    q, q_dim = operands[0], dims[0]
    batch = q.shape[0] if q_dim is None else np.delete(q.shape, q_dim)[0]

    def fold(a: jax.Array, dim: int | None) -> jax.Array:
        a = jnp.broadcast_to(a, (size, *a.shape)) if dim is None else jnp.moveaxis(a, dim, 0)
        a = jnp.broadcast_to(a, (size, batch, *a.shape[2:]))
        return a.reshape(size * batch, *a.shape[2:])

    return size, fold


def _batch(primitive: Primitive, operands: Any, dims: Any, *, params: Params) -> Any:
    """One call, of as many times B sequences."""
    size, fold = folding(operands, dims)
    of_positions = (3, 4) if primitive is _forward else (6, 7)
    are_shared = all(dims[i] is None and len(operands[i]) == 1 for i in of_positions)
    merged = [
        a if are_shared and i in of_positions else fold(a, d)
        for i, (a, d) in enumerate(zip(operands, dims, strict=True))
    ]
    results = primitive.bind(*merged, params=params)
    return [a.reshape(size, -1, *a.shape[1:]) for a in results], [0] * len(results)


def _op(name: str, prepare: Any, **others: Any) -> Op:
    form = local_ops.kernel(
        name,
        why_not=why_not,
        attributes=lambda arrays, params, plan: attributes(params),
        checked_on_gpus=True,
        on_cpus=False,
        is_optional=True,
        prepare=prepare,
    )
    return Op(name=name, forms=(form,), batch=_batch, is_local=True, **others)


_FORWARD = _op(
    OP, _prepare_forward, result_shapes=_forward_shapes, reference=_forward_reference,
    flops=lambda arrays, params: _blockwise.pairs_flops(arrays[0], arrays[1].shape[1]),
)  # fmt: skip
_BACKWARD = _op(
    BACKWARD, _prepare_backward, result_shapes=_backward_shapes, reference=_backward_reference,
    flops=lambda arrays, params: _blockwise.pairs_flops(
        arrays[0], arrays[1].shape[1], _blockwise.BACKWARD_PRODUCTS
    ),
)  # fmt: skip
_forward, _backward = make_primitive(_FORWARD), make_primitive(_BACKWARD)


def _differentiate_reference(primitive: Primitive, op: Op) -> None:
    """Derivatives by those of _blockwise.py. First gradients in reverse mode do not come here, as
    _passes.py defines both passes."""

    def jvp(primals: Any, tangents: Any, *, params: Params) -> Any:
        def f(*arrays: jax.Array) -> list[jax.Array]:
            return list(op.reference(arrays, params))

        return derivatives.jvp_of_moved(f, primals, tangents)

    ad.primitive_jvps[primitive] = jvp


_differentiate_reference(_forward, _FORWARD)
_differentiate_reference(_backward, _BACKWARD)
