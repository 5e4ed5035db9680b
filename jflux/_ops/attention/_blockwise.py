"""Attention of one device in blocks of queries and keys, forward and backward, in XLA's operations:
no array is as large as the scores. What a pair of positions may do is decided from the positions
themselves, so queries and keys may be any parts of a sequence, in any order.

The arithmetic is FlashAttention's (arXiv 2205.14135, algorithm 1; backward: arXiv 2307.08691,
algorithm 2): a running maximum and sum, and scores computed again in the backward pass. Scores,
sums and log-sum-exps are in float32 (float64 for float64). Blocks whose pairs are all masked are
skipped.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..._ranks.meshes import vary, varying
from .._epilogue import sum_dtype

_MOST = 1024  # queries, or keys, of a block
_MOST_SCORES = 1 << 26  # of a block, over all sequences and heads
NOWHERE = jnp.iinfo(jnp.int32).max  # the position of what fills up a block


@dataclasses.dataclass(frozen=True)
class Scores:
    """How a score is computed, and which pairs of a query and a key have one.

    Attributes:
      scale: of the products.
      softcap: c: a score x becomes ``c tanh(x / c)`` (arXiv 2408.00118, section 2).
      causal: no position attends to a later one.
      window: position i attends to i - left to i + right.
    """

    scale: float
    softcap: float | None = None
    causal: bool = False
    window: tuple[int, int] | None = None


class Positions(NamedTuple):
    """Positions of a sequence.

    Attributes:
      positions: int32 [s], or [B, s] where those of each sequence are others.
      segments: int [B, s]; None: all are of one.
    """

    positions: jax.Array
    segments: jax.Array | None


class _Block(NamedTuple):
    """One block of queries or keys, or all blocks along a leading dimension.

    Attributes:
      rows: [B, G, b, R, D] of queries, [B, G, b, D] of keys.
      positions: [b] or [B, b].
      segments: [B, b] or None.
      first, last: [], of the positions that are somewhere.
    """

    rows: Any
    positions: jax.Array
    segments: jax.Array | None
    first: jax.Array
    last: jax.Array


def pairs_flops(q: Any, keys: int, products: int = 2) -> int:
    """Operations of the products of queries [..., H, D] with so many keys each: all pairs, also
    those that a mask leaves out. A forward pass has two products for each pair, q k and p v."""
    return 2 * products * math.prod(q.shape) * keys


#: Products for each pair of a backward pass: the scores again, dp, dv, dk and dq.
BACKWARD_PRODUCTS = 5


def default_precision() -> str | None:
    """JAX's default for products where this is called."""
    config: Any = jax.config  # the attribute has no type in every JAX
    return config.jax_default_matmul_precision


def forward(
    q: jax.Array,
    queries: Positions,
    k: jax.Array,
    v: jax.Array,
    keys: Positions,
    scores: Scores,
    bias: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attention of q [B, s, H, D] over k, v [B, t, G, D].

    Args:
      bias: [1 or B, 1 or H, S, T], added to the scores, of whole sequences; all of them have the
        same positions then.

    Returns:
      (o [B, s, H, D], log-sum-exp [B, s, H]), both float32 or float64; 0 and -inf for queries that
      attend to no key.
    """
    wide = sum_dtype(q.dtype)
    groups = k.shape[2]
    axes = varying((q, k, v, queries, keys, bias))
    size_q, size_k = _block_sizes(q, k.shape[1])
    q_blocks = _blocks(_grouped(q, groups), queries, size_q)
    k_blocks = _blocks((k, v), keys, size_k)
    masks = _masks(scores, queries, keys, k.shape[1] % size_k)

    def of_queries(_: None, block: _Block) -> tuple[None, tuple[jax.Array, jax.Array]]:
        shape = block.rows.shape[:-1]  # [B, G, b, R]
        start = (
            vary(jnp.zeros(block.rows.shape, wide), axes),
            vary(jnp.full(shape, -jnp.inf, wide), axes),
            vary(jnp.zeros(shape, wide), axes),
        )

        def attend(state: Any, other: _Block) -> Any:
            o, top, total = state
            s, _ = _scores(block, other, scores, masks, wide, bias)
            # No result depends on it. XLA may compute s twice, in other roundings, and a derivative
            # looks for the largest one in the other.
            higher = jnp.maximum(top, lax.stop_gradient(jnp.max(s, -1)))
            base = jnp.where(jnp.isfinite(higher), higher, 0)
            p = jnp.exp(s - base[..., None])
            before = jnp.exp(top - base)
            value = other.rows[1]
            own = jnp.einsum(
                "bgirj,bgjd->bgird", p.astype(value.dtype), value, preferred_element_type=wide
            )
            return o * before[..., None] + own, higher, total * before + jnp.sum(p, -1)

        def step(state: Any, other: _Block) -> tuple[Any, None]:
            return _if_any(scores, block, other, attend, lambda state, _: state, state, other), None

        (o, top, total), _ = lax.scan(step, start, k_blocks)
        found = total != 0  # NaN is found
        o = o / jnp.where(found, total, 1)[..., None]
        lse = jnp.where(found, jnp.log(jnp.where(found, total, 1)) + top, -jnp.inf)
        return None, (o, lse)

    _, (o, lse) = lax.scan(of_queries, None, q_blocks)
    return _ungrouped(o, q.shape[1]), _ungrouped(lse[..., None], q.shape[1])[..., 0]


def delta_of(o: jax.Array, lse: jax.Array, do: jax.Array, dlse: jax.Array) -> jax.Array:
    """delta [B, s, H], which all keys of a query share: a score's cotangent is p (dp - delta)."""
    wide = lse.dtype
    delta = jnp.sum(do.astype(wide) * o.astype(wide), -1) - dlse.astype(wide)
    return jnp.where(lse == -jnp.inf, 0, delta)


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
    bias: jax.Array | None = None,
) -> tuple[Any, jax.Array, jax.Array]:
    """Gradients of :func:`forward` over these keys, where lse and :func:`delta_of` are those over
    *all* keys that the queries attend to: so the keys may be a part of them.

    Returns:
      (dq [B, s, H, D], dk, dv [B, t, G, D]), float32 or float64. Over several parts of the keys,
      dq is the sum. With a bias the first is (dq, the bias's gradient), of which both are.
    """
    wide = sum_dtype(q.dtype)
    groups = k.shape[2]
    axes = varying((q, k, v, queries, keys, lse, do, delta, bias))
    size_q, size_k = _block_sizes(q, k.shape[1])
    q_blocks = _blocks(_grouped(q, groups), queries, size_q)
    rows = [_grouped(a, groups) for a in (do, delta[..., None], lse[..., None])]
    do_b, delta_b, lse_b = (_in_blocks(a, size_q, 0) for a in rows)
    k_blocks = _blocks((k, v), keys, size_k)
    masks = _masks(scores, queries, keys, k.shape[1] % size_k, q.shape[1] % size_q)

    def zeros(shape: Any) -> jax.Array:
        return vary(jnp.zeros(shape, wide), axes)

    def of_keys(sums: Any, other: _Block) -> tuple[Any, Any]:
        dq, d_bias = sums
        key, value = other.rows
        start = (zeros(key.shape), zeros(value.shape), d_bias)

        def differentiate(state: Any, block: _Block, do: Any, delta: Any, lse: Any) -> Any:
            dk, dv, d_bias = state
            s, slope = _scores(block, other, scores, masks, wide, bias)
            p = jnp.where(s == -jnp.inf, 0, jnp.exp(s - lse))  # NaN stays
            dv = dv + jnp.einsum(
                "bgirj,bgird->bgjd", p.astype(do.dtype), do, preferred_element_type=wide
            )
            dp = jnp.einsum("bgird,bgjd->bgirj", do, value, preferred_element_type=wide)
            ds = p * (dp - delta)
            d_bias = None if bias is None else _with_block(d_bias, ds, block, other)
            ds = (ds * slope).astype(block.rows.dtype)
            dk = dk + jnp.einsum("bgirj,bgird->bgjd", ds, block.rows, preferred_element_type=wide)
            own = jnp.einsum("bgirj,bgjd->bgird", ds, key, preferred_element_type=wide)
            return (dk, dv, d_bias), own

        def nothing(state: Any, block: _Block, *_: Any) -> Any:
            return state, zeros(block.rows.shape)

        def step(state: Any, of_queries: Any) -> tuple[Any, jax.Array]:
            block = of_queries[0]
            return _if_any(scores, block, other, differentiate, nothing, state, *of_queries)

        (dk, dv, d_bias), own = lax.scan(step, start, (q_blocks, do_b, delta_b, lse_b))
        return (dq + own, d_bias), (dk, dv)

    sums = zeros(q_blocks.rows.shape), None if bias is None else zeros(bias.shape)
    (dq, d_bias), (dk, dv) = lax.scan(of_keys, sums, k_blocks)
    dq = _ungrouped(dq, q.shape[1])
    dk, dv = (_ungrouped(a[:, :, :, :, None], k.shape[1]) for a in (dk, dv))
    return (dq if bias is None else (dq, d_bias)), dk, dv


# ---- Scores --------------------------------------------------------------------------------------


def _scores(
    block: _Block, other: _Block, scores: Scores, masks: bool, wide: Any, bias: jax.Array | None
) -> tuple[jax.Array, Any]:
    """(scores [B, G, i, R, j], -inf where a pair has none; their derivative by q k^T)."""
    products = jnp.einsum(
        "bgird,bgjd->bgirj", block.rows, other.rows[0], preferred_element_type=wide
    )
    s, slope = products * scores.scale, jnp.asarray(scores.scale, wide)
    if scores.softcap is not None:
        bent = jnp.tanh(s / scores.softcap)
        s, slope = bent * scores.softcap, (1 - bent * bent) * slope
    if bias is not None:
        s += _of_block(bias, block, other).astype(wide)
    if masks:
        s = jnp.where(_allowed(block, other, scores), s, -jnp.inf)
    return s, slope


def _of_block(bias: jax.Array, block: _Block, other: _Block) -> jax.Array:
    """The bias of a block's pairs, [B or 1, G or 1, i, R or 1, j]."""
    at = bias.at[:, :, block.positions[:, None], other.positions]
    some = at.get(mode="clip")  # what is nowhere is masked
    groups, rows = (block.rows.shape[1], block.rows.shape[3]) if bias.shape[1] > 1 else (1, 1)
    return some.reshape(len(bias), groups, rows, *some.shape[2:]).swapaxes(2, 3)


def _with_block(d_bias: jax.Array, ds: jax.Array, block: _Block, other: _Block) -> jax.Array:
    """The gradient of a bias [1 or B, 1 or H, S, T] with that of a block's scores,
    [B, G, i, R, j]."""
    batch, _, i, _, j = ds.shape
    ds = ds.swapaxes(2, 3).reshape(batch, -1, i, j)
    ones = tuple(d for d in (0, 1) if d_bias.shape[d] == 1)
    at = d_bias.at[:, :, block.positions[:, None], other.positions]
    return at.add(jnp.sum(ds, ones, keepdims=True), mode="drop")


def _masks(scores: Scores, queries: Positions, keys: Positions, *fill: int) -> bool:
    """Whether any pair may have no score."""
    return scores.causal or scores.window is not None or queries.segments is not None or any(fill)


def _allowed(block: _Block, other: _Block, scores: Scores) -> jax.Array:
    """bool [B or 1, 1, i, 1, j]."""
    i, j = block.positions[..., :, None], other.positions[..., None, :]
    allowed = (i != NOWHERE) & (j != NOWHERE)
    if scores.causal:
        allowed &= j <= i
    if scores.window is not None:
        left, right = scores.window
        allowed &= (j >= i - left) & (j - right <= i)
    if allowed.ndim == 2:
        allowed = allowed[None]
    if block.segments is not None and other.segments is not None:
        allowed = allowed & (block.segments[:, :, None] == other.segments[:, None, :])
    return allowed[:, None, :, None, :]


def _if_any(scores: Scores, block: _Block, other: _Block, yes: Any, no: Any, *args: Any) -> Any:
    """``yes(*args)``, or ``no(*args)`` if the positions of the two blocks mask all their pairs."""
    if not scores.causal and scores.window is None:
        return yes(*args)
    any_pair = jnp.asarray(True)
    if scores.causal:
        any_pair &= other.first <= block.last
    if scores.window is not None:
        left, right = scores.window
        any_pair &= (other.last >= block.first - left) & (other.first - right <= block.last)
    return lax.cond(any_pair, yes, no, *args)


# ---- Blocks --------------------------------------------------------------------------------------


def _block_sizes(q: jax.Array, keys: int) -> tuple[int, int]:
    """Queries and keys of a block."""
    batch, length, heads, _ = q.shape
    size = _MOST
    while size > 64 and batch * heads * size * size > _MOST_SCORES:
        size //= 2
    return min(size, length), min(size, keys)


def _grouped(a: jax.Array, groups: int) -> jax.Array:
    """[B, s, H, D] as [B, s, G, R, D]: the queries of a head of keys side by side."""
    return a.reshape(*a.shape[:2], groups, a.shape[2] // groups, a.shape[3])


def _ungrouped(a: jax.Array, length: int) -> jax.Array:
    """Blocks [blocks, B, G, b, R, D] as [B, s, H, D]."""
    blocks, batch, groups, size, rows, width = a.shape
    a = a.transpose(1, 0, 3, 2, 4, 5).reshape(batch, blocks * size, groups * rows, width)
    return a[:, :length]


def _in_blocks(a: jax.Array, size: int, fill: Any) -> jax.Array:
    """[B, s, G, ...] as [blocks, B, G, b, ...]."""
    a = jnp.pad(
        a, [(0, 0), (0, -a.shape[1] % size), *[(0, 0)] * (a.ndim - 2)], constant_values=fill
    )
    a = a.reshape(a.shape[0], -1, size, *a.shape[2:])
    return a.transpose(1, 0, 3, 2, *range(4, a.ndim))


def _blocks(rows: Any, part: Positions, size: int) -> _Block:
    """All blocks of [B, s, G, ...]."""
    fill = -part.positions.shape[-1] % size

    def split(a: jax.Array, value: int) -> jax.Array:
        """[..., s] as [blocks, ..., size]."""
        a = jnp.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, fill)], constant_values=value)
        return jnp.moveaxis(a.reshape(*a.shape[:-1], -1, size), -2, 0)

    positions = split(part.positions, NOWHERE)
    segments = None if part.segments is None else split(part.segments, 0)
    one = tuple(range(1, positions.ndim))  # block
    last = jnp.max(jnp.where(positions != NOWHERE, positions, -1), one)
    rows = jax.tree.map(lambda a: _in_blocks(a, size, 0), rows)
    return _Block(rows, positions, segments, jnp.min(positions, one), last)
