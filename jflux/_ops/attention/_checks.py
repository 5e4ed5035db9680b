"""Checks of operands and options, with the same messages for all attention functions here."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ... import _native

#: The types that queries and a cache may have.
DTYPES = tuple(name for name, row in _native.FORMATS.items() if row.is_wide)
#: Positions are int32, and a window of so many leaves none out.
_MOST_POSITIONS = np.iinfo(np.int32).max

#: (left, right), where None leaves a side open; or one number for both; or no window.
Window = int | tuple[int | None, int | None] | None


def check(
    op: str, q: Any, k: Any, v: Any, segment_ids: Any, slopes: Any, causal: bool, window: Any
) -> None:
    """Raises ValueError or TypeError for operands that do not fit each other. What there is for
    each head is checked by :func:`per_head`."""
    for name, a in {"q": q, "k": k, "v": v}.items():
        if a.ndim != 4:
            raise ValueError(f"{op}: {name} must be [B, S/N, heads, D], got {a.shape}")
    if k.shape[:3] != v.shape[:3] or q.shape[::3] != k.shape[::3]:
        raise ValueError(
            f"{op}: q [B, S/N, H, D] and k [B, T/N, G, D] must have the same B and D, and k and v "
            f"[B, T/N, G, E] all but these, got {q.shape}, {k.shape}, {v.shape}"
        )
    options = {
        "causal": causal,
        "window": window_of(op, window) is not None,
        "segment_ids": segment_ids is not None,
        "alibi_slopes": slopes is not None,
    }
    if is_cross(q, k) and (given := [name for name, is_given in options.items() if is_given]):
        raise ValueError(
            f"{op}: {given[0]} is about the positions of one sequence, but q has {q.shape[1]} and "
            f"k {k.shape[1]} of them"
        )
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"{op}: q, k and v must have one type, got {q.dtype}, {k.dtype}, {v.dtype}")
    if not jnp.issubdtype(q.dtype, jnp.floating):
        raise TypeError(f"{op}: q, k and v must be floating, got {q.dtype}")
    heads, kv_heads = q.shape[2], k.shape[2]
    if kv_heads == 0 or heads % kv_heads != 0:
        raise ValueError(
            f"{op}: {heads} heads of queries must be a multiple of {kv_heads} of keys and values"
        )
    if segment_ids is None:
        return
    if segment_ids.shape != q.shape[:2]:
        raise ValueError(
            f"{op}: segment_ids must be [B, S/N], {q.shape[:2]}, got {segment_ids.shape}"
        )
    if not jnp.issubdtype(segment_ids.dtype, jnp.integer):
        raise TypeError(f"{op}: segment_ids must be integers, got {segment_ids.dtype}")


def per_head(op: str, name: str, a: Any, heads: int) -> jax.Array | None:
    """A number of each head as an array, for queries of so many heads.

    Raises:
      ValueError, TypeError: what does not fit.
    """
    if a is None:
        return None
    a = jnp.asarray(a)
    if a.shape != (heads,):
        raise ValueError(
            f"{op}: {name} must be [H], one number for each of the {heads} heads of queries that "
            f"the call has, got {a.shape}; the same for all heads is jnp.full({heads}, x), and "
            "where ranks have heads of their own, each passes the numbers of these"
        )
    if not jnp.issubdtype(a.dtype, jnp.floating):
        raise TypeError(f"{op}: {name} must be floating, got {a.dtype}; cast them to float32")
    return a


def check_bias(op: str, bias: Any, q: Any, k: Any, ranks: int) -> None:
    """Raises ValueError or TypeError for a bias that does not fit queries and keys of one of so
    many ranks."""
    if bias is None:
        return
    (batch, queries, heads, _), keys = q.shape, k.shape[1]
    whole = (batch, heads, ranks * queries, ranks * keys)
    fits = bias.ndim == 4 and bias.shape[2:] == whole[2:]
    if not fits or bias.shape[0] not in (1, batch) or bias.shape[1] not in (1, heads):
        raise ValueError(
            f"{op}: bias must be [1 or B, 1 or H, S, T] of whole sequences, {whole} or 1 in place "
            f"of the first two, got {bias.shape}"
        )
    if not jnp.issubdtype(bias.dtype, jnp.floating):
        raise TypeError(f"{op}: bias must be floating, got {bias.dtype}; of a mask, 0 and -inf")


def of_one_width(
    q: jax.Array, k: jax.Array, v: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """q, k and v, where keys [..., D] and values [..., E] may have different widths: the narrower
    ones are padded with zeros. A result's elements from E on are zeros then (:func:`of_width`)."""
    width = max(k.shape[-1], v.shape[-1])

    def padded(a: jax.Array) -> jax.Array:
        added = width - a.shape[-1]
        return jnp.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, added)]) if added else a

    return padded(q), padded(k), padded(v)


def of_width(o: jax.Array, width: int) -> jax.Array:
    """A result [..., D] without the elements that padding has added."""
    return o if o.shape[-1] == width else o[..., :width]


def check_values(op: str, k: Any, v: Any, value_width: int | None) -> None:
    """Raises unless v [..., E] goes with k [..., D], or is None and `value_width` is E."""
    if v is not None and value_width is not None:
        raise ValueError(f"{op}: value_width is for a cache without values; pass None for them")
    if v is None:
        width = k.shape[-1]
        is_width = isinstance(value_width, int | np.integer) and 0 < value_width <= width
        if not is_width or isinstance(value_width, bool):
            raise ValueError(
                f"{op}: without values value_width must be an int from 1 to the keys' {width}, got "
                f"{value_width!r}"
            )
    elif k.shape[:3] != v.shape[:3]:
        raise ValueError(
            f"{op}: keys and values must have one shape but for the last dimension, got {k.shape}, "
            f"{v.shape}"
        )


def is_cross(q: Any, k: Any) -> bool:
    """Whether queries and keys are of two sequences, which have no positions in common."""
    return bool(q.shape[1] != k.shape[1])


def check_heads(op: str, q: Any, k: Any, ranks: int) -> None:
    """Raises ValueError if the heads cannot be split over this many ranks."""
    heads, kv_heads = q.shape[2], k.shape[2]
    if heads % ranks != 0:
        raise ValueError(
            f"{op}: {heads} heads cannot be split over {ranks} ranks; use fewer ranks along this "
            "axis, or pad the heads"
        )
    if kv_heads % ranks != 0 and ranks % kv_heads != 0:
        raise ValueError(
            f"{op}: {kv_heads} heads of keys and values must be a multiple of the {ranks} ranks, "
            "or divide them; repeat them to a multiple"
        )


def window_of(op: str, window: Any) -> tuple[int, int] | None:
    """(left, right), of a :data:`Window`; None if both sides are open."""
    pair = window if isinstance(window, tuple) else (window, window)
    if len(pair) != 2 or not all(
        w is None or (isinstance(w, int | np.integer) and w >= 0) for w in pair
    ):
        raise ValueError(
            f"{op}: {window=} must be a number of positions, 0 or more, or two: (left, right), of "
            "which None leaves a side open"
        )
    if pair == (None, None):
        return None
    left, right = (_MOST_POSITIONS if w is None else min(int(w), _MOST_POSITIONS) for w in pair)
    return left, right


def within(window: tuple[int, int] | None, length: int) -> tuple[int, int] | None:
    """A window of no more positions than there are, for what adds them to positions."""
    return None if window is None else (min(window[0], length), min(window[1], length))


def scale_of(op: str, scale: Any, width: int) -> float:
    """The factor of the scores: `scale` as given, by default 1 / sqrt(D)."""
    return 1 / math.sqrt(max(1, width)) if scale is None else _number(op, "scale", scale)


def softcap_of(op: str, softcap: Any) -> float | None:
    """The softcap as given, which must be positive; None for none."""
    if softcap is None:
        return None
    cap = _number(op, "softcap", softcap)
    if not cap > 0:
        raise ValueError(f"{op}: {softcap=} must be greater than 0; None: none")
    return cap


def _number(op: str, name: str, value: Any) -> float:
    """A kernel has it as an attribute."""
    if isinstance(value, jax.core.Tracer):
        raise TypeError(
            f"{op}: {name} must be known when the call is traced, got {value.aval.str_short()}"
            + ("; multiply q by a scale that is computed" if name == "scale" else "")
        )
    return float(value)
