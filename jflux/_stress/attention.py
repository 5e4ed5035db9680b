"""Random calls of attention over ranks, and of decoding with a cache that is split over them."""

from __future__ import annotations

import math
import random
from typing import Any

import jax.numpy as jnp
import numpy as np

import jflux

from .._ops.attention._sequence_form import splits_heads
from . import calls
from .cases import Case, Data, Output, Place, exchanged_by

EMPTY = 1e4  # what stands for the log-sum-exp of a query that attends to nothing


def _softmax(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, allowed: np.ndarray, softcap: float | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """o [B, S, H, D], the same of absolute values, and the log-sum-exp [B, S, H], in float64.

    Args:
      q: [B, S, H, D]; k, v: [B, T, G, D]; allowed: [B, S, T].
    """
    shared = q.shape[2] // k.shape[2]
    k, v = (np.repeat(a, shared, 2) for a in (k, v))
    s = np.einsum("bshd,bthd->bhst", q, k) / math.sqrt(q.shape[-1])
    if softcap is not None:
        s = softcap * np.tanh(s / softcap)
    s = np.where(allowed[:, None], s, -np.inf)
    top = np.where(np.isfinite(peak := s.max(-1, keepdims=True)), peak, 0)
    p = np.exp(s - top)
    total = p.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (np.log(total) + top)[..., 0].swapaxes(1, 2)
    p /= np.where(total > 0, total, 1)
    o, size = (np.einsum("bhst,bthd->bshd", p, a) for a in (v, abs(v)))
    return o, size, lse


def _outputs(o: Any, size: Any, lse: Any, dtype: Any, same: bool) -> list[Output]:
    """Scores and sums are in float32; the exponentials are rounded to the operands' type before
    they are multiplied, and tiny terms of float16 vanish."""
    shifted = np.where(np.isneginf(lse), EMPTY, lse)
    return [
        Output(o, 2 * size + 0.03, dtype, o.shape[-1], same),
        Output(shifted, np.full(lse.shape, 8.0), np.float32, 4096, same),
    ]


def _finite(result: tuple[Any, Any]) -> tuple[Any, Any]:
    o, lse = result
    return o, jnp.where(jnp.isneginf(lse), EMPTY, lse).astype(jnp.float32)


def _heads(rng: random.Random, place: Place) -> tuple[int, int, int, Any]:
    """Heads of queries, of keys, elements of each, and their type."""
    groups = rng.choice([1, 2, 3])
    gpu = place.platform == "cuda"
    width = rng.choice([64, 128, 256] if gpu else [8, 16, 64])  # what flash_decode's kernel takes
    return groups * rng.choice([1, 2, 4]), groups, width, place.draw_type(rng)


def attention(rng: random.Random, place: Place, gathers: bool = False) -> Case:
    """Over a sequence in any layout, with any mask, in any form. `gathers`: by gathering keys, with
    what cuDNN does not take."""
    heads, groups, width, dtype = _heads(rng, place)
    width += rng.choice([0, 0, 8]) if width < 256 else 0
    batch, world, name = rng.choice([1, 2]), place.world, place.axis_name
    own = rng.choice([2, 16, 64, 130, 256] if place.platform == "cuda" else [2, 6, 16, 40])
    layout: Any = rng.choice(["zigzag", "striped", "contiguous"])
    causal, softcap = rng.random() < 0.6, rng.choice([None, None, 5.0])
    window = rng.choice([None, None, (rng.randrange(2 * own), rng.randrange(2 * own))])
    documents = rng.choice([0, 0, 3])
    form: Any = rng.choice(["auto", "auto", "gather", "ring"])
    if splits_heads(heads, groups, world) and rng.random() < 0.25:
        form = "ulysses"
    if gathers:
        form, softcap = "gather", 5.0

    def body(q: Any, k: Any, v: Any, *ids: Any) -> Any:
        return _finite(
            jflux.attention(
                q, k, v, axis_name=name, causal=causal, layout=layout, window=window,
                segment_ids=ids[0] if ids else None, softcap=softcap, return_lse=True, form=form,
            )
        )  # fmt: skip

    def make(seed: int) -> Data:
        lead, drawn = place.mesh.devices.shape, np.random.default_rng(seed)
        shapes = [(*lead, batch, own, one, width) for one in (heads, groups, groups)]
        q, k, v = (calls.normal(seed + i, shape, dtype) for i, shape in enumerate(shapes))
        ids = drawn.integers(0, max(1, documents), (*lead, batch, own)).astype(np.int32)
        positions = np.asarray(jflux.causal_positions(world * own, world, layout=layout), np.int64)
        ahead = positions - positions[:, None]
        allowed = np.ones(ahead.shape, bool)
        if causal:
            allowed &= ahead <= 0
        if window is not None:
            allowed &= (-window[0] <= ahead) & (ahead <= window[1])

        def of_group(together: list[np.ndarray]) -> list[np.ndarray]:
            """Of each rank, o, its size and the log-sum-exp, in one array."""
            parts = [np.split(a, np.cumsum([heads, groups, groups]), -2) for a in together]
            q, k, v, last = (np.concatenate([part[i] for part in parts], 1) for i in range(4))
            same = last[:, :, 0, 0]
            mask = allowed & (same[:, :, None] == same[:, None])
            o, size, lse = _softmax(q, k, v, mask, softcap)
            return np.split(np.concatenate([o, size, lse[..., None]], -1), world, 1)

        segments = np.broadcast_to(ids[..., None, None], (*ids.shape, 1, width))
        wide = [a.astype(np.float64) for a in (q, k, v, segments)]
        found = exchanged_by(place, of_group, np.concatenate(wide, -2))
        o, size, lse = found[..., :width], found[..., width:-1], found[..., -1]
        operands = (q, k, v, ids) if documents else (q, k, v)
        return operands, _outputs(o, size, lse, dtype, same=False)

    return place.case(
        "attention",
        f"attention [{batch}, {own}, {heads}, {width}] on {groups} {np.dtype(dtype).name} "
        f"{layout} {causal=} {window=} {softcap=} {documents} documents, {form=}",
        body,
        make,
    )


def decoding(rng: random.Random, place: Place) -> Case:
    """A few tokens a sequence, to caches of any lengths; what nobody attends to is NaN."""
    heads, groups, width, dtype = _heads(rng, place)
    batch, world, name = rng.choice([1, 3, 8]), place.world, place.axis_name
    own = rng.choice([1, 16, 129, 1000] if place.platform == "cuda" else [1, 5, 32])
    window, softcap = rng.choice([None, None, own + 1]), rng.choice([None, None, 5.0])
    tokens, in_8_bits = rng.choice([1, 1, 2, 16]), rng.random() < 0.4

    def body(q: Any, k: Any, v: Any, lengths: Any, *scales: Any) -> Any:
        if scales:
            k, v = (jflux.Scaled(a, scale) for a, scale in zip((k, v), scales, strict=True))
        return _finite(
            jflux.flash_decode(
                q, k, v, lengths, axis_name=name, window=window, softcap=softcap, return_lse=True
            )
        )

    def make(seed: int) -> Data:
        lead, drawn = place.mesh.devices.shape, np.random.default_rng(seed)

        def alike(a: np.ndarray) -> np.ndarray:
            first = exchanged_by(place, lambda xs: [xs[0]] * world, a)
            return first.astype(a.dtype)

        q = alike(calls.normal(seed, (*lead, batch, tokens, heads, width), dtype))
        lengths = drawn.integers(0, world * own + 1, (*lead, batch)).astype(np.int32)
        lengths = alike(np.where(drawn.random(lengths.shape) < 0.2, 0, lengths).astype(np.int32))
        k, v = (calls.normal(seed + i, (*lead, batch, own, groups, width), dtype) for i in (1, 2))
        scales: tuple[np.ndarray, ...] = ()
        if in_8_bits:
            k, v = (np.asarray(a.astype(np.float32), jnp.float8_e4m3fn) for a in (k, v))
            scales = tuple(drawn.choice([0.5, 1, 1.5], (*a.shape[:-1], 1)) for a in (k, v))
            scales = tuple(a.astype(np.float32) for a in scales)
        meant = [a.astype(np.float64) for a in (k, v)]
        meant = [a * scale for a, scale in zip(meant, scales, strict=True)] if scales else meant
        o, size = (np.empty(q.shape) for _ in range(2))
        lse = np.empty(q.shape[:-1])
        for group in calls.groups_of(place.mesh, name):
            ends = lengths[group[0]][:, None, None] - np.arange(tokens)[::-1, None]
            at = np.arange(world * own)
            valid = (at < ends) & (at >= ends - 1 - (world * own if window is None else window))
            whole = [np.concatenate([a[one] for one in group], 1) for a in meant]
            query, keys, values = (a.astype(np.float64) for a in (q[group[0]], *whole))
            found = _softmax(query, keys, values, valid, softcap)
            for rank, one in enumerate(group):
                o[one], size[one], lse[one] = found
                unread = ~valid.any(1)[:, rank * own : (rank + 1) * own]
                for cache in scales or (k, v):
                    cache[one][unread] = np.nan
        return (q, k, v, lengths, *scales), _outputs(o, size, lse, dtype, same=True)

    return place.case(
        "flash_decode",
        f"flash_decode [{batch}, {tokens}, {heads}, {width}] on {groups} {np.dtype(dtype).name}, "
        f"{'8 bits, ' if in_8_bits else ''}"
        f"caches of {own} positions, {window=} {softcap=}",
        body,
        make,
    )


def ulysses(rng: random.Random, place: Place) -> Case:
    """Over a sequence in parts, by heads."""
    world, name = place.world, place.axis_name
    groups = rng.choice([one for one in range(1, world + 1) if world % one == 0] + [2 * world])
    heads = groups * (max(1, world // groups)) * rng.choice([1, 2])
    width = rng.choice([64, 128] if place.platform == "cuda" else [8, 16])
    dtype = place.draw_type(rng)
    batch, own, causal = rng.choice([1, 2]), rng.choice([1, 16, 65]), rng.random() < 0.5

    def body(q: Any, k: Any, v: Any) -> Any:
        return jflux.ulysses_attention(q, k, v, axis_name=name, causal=causal)

    def make(seed: int) -> Data:
        shape = (*place.mesh.devices.shape, batch, own)
        q, k, v = (
            calls.normal(seed + i, (*shape, one, width), dtype)
            for i, one in enumerate((heads, groups, groups))
        )

        def of_group(together: list[np.ndarray]) -> list[np.ndarray]:
            whole = np.concatenate(together, 1)
            q, k, v = np.split(whole, [heads, heads + groups], 2)
            at = np.arange(world * own)
            allowed = (at <= at[:, None]) | (not causal)
            o, size, _ = _softmax(q, k, v, allowed[None], None)
            return np.split(np.concatenate([o, size], -1), world, 1)

        wide = np.concatenate([a.astype(np.float64) for a in (q, k, v)], -2)
        found = exchanged_by(place, of_group, wide)
        # JAX's own attention may round the scores too.
        o, size = found[..., :width], found[..., width:]
        return (q, k, v), [Output(o, 8 * size + 0.03, dtype, width)]

    return place.case(
        "ulysses_attention",
        f"ulysses_attention [{batch}, {own}, {heads}, {width}] on {groups} "
        f"{np.dtype(dtype).name} {causal=}",
        body,
        make,
    )
