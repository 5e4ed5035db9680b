"""Attention with linear biases (ALiBi: arXiv 2108.12409, section 3): the score of query i of head h
and key j has slope_h (j - i) more.

No kernel knows of it. The bias is a product of elements behind those of queries and keys::

    scale q'_i . k'_j = scale q_i . k_j + slope (j - i)

Products are of numbers of the operands' type, and their sums are in float32. So a number is cut
into pieces of 8 bits, whose products are exact in bfloat16, float16 and TF32:

    slope / scale      a_0 + 2^-8 a_1 + 2^-16 a_2: 24 bits
    j                  j_0 + 2^8 j_1 + ...: as many digits as the sequence needs
    slope i / scale    2^12 (c_0 + 2^-8 c_1 + 2^-16 c_2)

    behind q_i         a_p, for each p and b    c_p
    behind k_j         2^(8 (b - p)) j_b        -2^(12 - 8 p)

float16 ends at 65504, so part of a power of two goes to q where it is more than 2^8. float64 has
one piece of each. What remains of an error is that of sums in float32: a few times 2^-24 of the
largest bias of the sequence.

What was not taken:

- Without the term of i the softmax is the same, and the log-sum-exp another one. Sinks and merges
  of parts need the right one.
- Positions relative to a block of queries have fewer digits, but each block has keys of its own
  then.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ... import _config
from ..._call.plans import Path
from ..._ranks import meshes
from . import _cudnn, flash_attention
from ._blockwise import Scores
from ._checks import of_one_width, per_head, scale_of

_BITS = 8  # of a piece
_PIECES = 3
_FIRST = 12  # the power of two of c_0
_MULTIPLE = 8  # of elements, which kernels take


def check(op: str, slopes: Any, heads: int, scale: float | None, softcap: float | None) -> None:
    """Raises ValueError or TypeError for slopes that do not fit, or options that do not go with
    them."""
    if per_head(op, "alibi_slopes", slopes, heads) is None:
        return
    if why := why_not(scale_of(op, scale, heads), softcap):
        raise ValueError(f"{op}: alibi_slopes {why}; jflux.flash_decode takes them")


def why_not(scale: float, softcap: float | None) -> str | None:
    """Why longer heads do not hold the bias with these options, after "alibi_slopes"; None: they
    do."""
    if softcap is not None:
        return f"do not go with {softcap=}, which would bend them too"
    return "do not go with a scale of 0" if scale == 0 else None


def with_bias(
    scores: Scores,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    positions: jax.Array,
    slopes: jax.Array,
    length: int,
    *,
    warns: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """q', k' and v of one width, of queries and keys at the same positions.

    Args:
      positions, slopes, length: as :func:`extended` takes them.
      warns: whether to warn where cuDNN takes q, but not q', and no kernel takes them.
    """
    longer, k = extended(q, positions, k, positions, slopes, scores.scale, length)
    longer, k, v = of_one_width(longer, k, v)
    why = _cudnn.why_not_operands(longer)
    if warns and meshes.platform() == "gpu" and why and not _cudnn.why_not_operands(q):
        batched = [a.reshape(-1, *a.shape[-3:]) for a in (longer, k, v)]
        plan = flash_attention.plan(batched[0], batched[1], batched[2], scores)
        if plan.path == Path.REFERENCE:
            _config.fall_back("attention", f"with alibi_slopes {why}; no kernel: {plan.reason}")
    return longer, k, v


def extended(
    q: jax.Array,
    queries: jax.Array,
    k: jax.Array,
    keys: jax.Array,
    slopes: jax.Array,
    scale: float,
    length: int,
) -> tuple[jax.Array, jax.Array]:
    """q' and k', of q [..., s, H, D] and k [..., t, G, D].

    Args:
      queries, keys: positions, int32 [..., s] and [..., t], without leading dimensions if all
        sequences have the same ones.
      slopes: [H], which are constants.
      scale: of the scores.
      length: of the whole sequence: positions are less.
    """
    wide = jnp.promote_types(q.dtype, jnp.float32)
    slopes = lax.stop_gradient(slopes).astype(wide) / scale
    of_slopes = _pieces(slopes, q.dtype)  # [H, p]
    of_queries = _pieces(slopes * queries[..., None] * 2.0**-_FIRST, q.dtype)  # [..., s, H, p]
    digits = _digits(keys, wide, length)[..., None, None, :]  # [..., t, 1, 1, b]
    p, b = np.ogrid[: of_slopes.shape[-1], : digits.shape[-1]]
    powers = _BITS * (b - p)
    with_keys = np.clip(powers, -_BITS, _BITS)
    behind_q = [_rows(of_slopes[..., None] * _power(powers - with_keys)), of_queries]
    behind_k = [_rows(digits * _power(with_keys)), -_power(_FIRST - _BITS * p[:, 0])]
    return _behind(q, *behind_q), _behind(k, *behind_k)


def _pieces(x: jax.Array, dtype: np.dtype) -> jax.Array:
    """x [...] = the sum over p of 2^(-8 p) pieces [..., p], which numbers of this type hold.

    Not by conversions: XLA may leave out one to a narrower type and back.
    """
    if dtype == jnp.float64:
        return x[..., None]
    pieces = []
    for _ in range(_PIECES):
        pieces.append(lax.reduce_precision(x, jnp.finfo(dtype).nexp, _BITS - 1))
        x = (x - pieces[-1]) * 2.0**_BITS
    return jnp.stack(pieces, -1)


def _digits(positions: jax.Array, wide: np.dtype, length: int) -> jax.Array:
    """positions [...] = the sum over b of 2^(8 b) digits [..., b]."""
    if wide == jnp.float64:
        return positions[..., None].astype(wide)
    count = max(1, -(-(length - 1).bit_length() // _BITS))
    shifts = _BITS * np.arange(count, dtype=np.int32)
    return ((positions[..., None] >> shifts) & (2**_BITS - 1)).astype(wide)


def _power(exponents: np.ndarray) -> np.ndarray:
    return 2.0**exponents


def _rows(a: jax.Array) -> jax.Array:
    """[..., p, b] as [..., p b]."""
    return a.reshape(*a.shape[:-2], -1)


def _behind(a: jax.Array, *parts: Any) -> jax.Array:
    """a [..., s, heads, D] with parts [..., n] behind its elements, and zeros up to a multiple."""
    every = [jnp.broadcast_to(part, (*a.shape[:-1], part.shape[-1])) for part in parts]
    added = sum(part.shape[-1] for part in every)
    zeros = jnp.zeros((*a.shape[:-1], -added % _MULTIPLE), a.dtype)
    return jnp.concatenate([a, *(part.astype(a.dtype) for part in every), zeros], -1)
