"""Random calls of what mixtures of experts and decoding are made of."""

from __future__ import annotations

import functools
import random
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

import jflux

from .. import moe, testing
from .._call import gpu_code
from .._ops import _scaled
from .._ops.attention import decode_merge
from .._ranks import meshes
from . import calls
from .cases import FLOATS, Case, Data, Output, Place, exchanged_by
from .collectives import WIRES, half_step


def _choices(rng: np.random.Generator, shape: tuple[int, ...], experts: int) -> np.ndarray:
    """[..., T, k]: experts that are all different, at times few, with slots without one."""
    most = experts if rng.random() < 0.7 else min(experts, shape[-1])
    order = rng.random((*shape[:-1], most)).argsort(-1)[..., : shape[-1]]
    return np.where(rng.random(shape) < 0.1, -1, order).astype(np.int32)


def _per_group(place: Place, *arrays: np.ndarray) -> list[np.ndarray]:
    """Each array [*mesh, n, ...] as the group's ranks have it together, [*mesh, N n, ...]."""
    return [exchanged_by(place, lambda xs: [np.concatenate(xs)] * len(xs), a) for a in arrays]


def quantized_combine(rng: random.Random, place: Place) -> Case:
    """A dispatch with partial sums, which come back in 8 bits: each rank's is off by half a step of
    its block."""
    return dispatch(rng, place, wire=rng.choice(WIRES))


def dispatch(rng: random.Random, place: Place, wire: str | None = None) -> Case:
    """Tokens to their experts' ranks, each row times its expert's number, and back."""
    tokens, local = rng.choice([1, 5, 16, 40]), rng.choice([1, 2, 5])
    experts, width = place.world * local, rng.choice([8, 64, 264, 272])
    k = rng.randint(1, min(4, experts))
    dtype = place.draw_type(rng) if wire is None else rng.choice(FLOATS)
    layout, sums = rng.choice(["expert", "masked"]), wire is not None or rng.random() < 0.7
    rest = rng.choice(["zeros", "undefined"])
    block = rng.choice([None, None, (1, -1), (1, 128)])  # of 8 bits, which hold small integers
    quantize = None if block is None else jflux.Format(jnp.float8_e4m3fn, block)
    name = place.axis_name

    def body(x: Any, indices: Any, weights: Any) -> Any:
        d = jflux.moe_dispatch(
            x, indices, weights, num_experts=experts, axis_name=name, layout=layout,
            partial_sums=sums, rest=rest, quantize=quantize,
        )  # fmt: skip
        rows = d.rows if quantize is None else d.rows.dequantize(x.dtype)
        rank = lax.axis_index(meshes.as_tuple(name))
        numbers = (rank * local + jnp.arange(local) + 1).astype(x.dtype)
        if layout == "masked":
            y = rows * numbers[:, None, None]
        else:
            of_rows = jnp.repeat(numbers, d.padded_sizes, total_repeat_length=rows.shape[0])
            y = rows * of_rows[:, None]
        return jflux.moe_combine(y, d.handle, weights=weights, wire=wire, axis_name=name)

    def make(seed: int) -> Data:
        lead, drawn = place.mesh.devices.shape, np.random.default_rng(seed)
        x = calls.normal(seed, (*lead, tokens, width), dtype)
        if quantize is not None:
            x = drawn.integers(-15, 16, x.shape).astype(dtype)
        indices = _choices(drawn, (*lead, tokens, k), experts)
        weights = drawn.random((*lead, tokens, k), np.float32)
        of_slots = np.where(indices >= 0, weights * (indices + 1.0), 0)
        factors = of_slots.sum(-1)[..., None]
        wide = x.astype(np.float64)
        # The rows are rounded when they are multiplied, and so is each rank's sum.
        scale = 2 * abs(wide) * factors
        for rank in range(0 if wire is None else place.world):
            of_rank = np.where(indices // local == rank, of_slots, 0).sum(-1)[..., None]
            scale += half_step(wide * of_rank, str(wire)) / testing.tolerance(dtype, k)
        want = Output(wide * factors, scale, dtype, k)
        return (x, indices, weights), [want]

    return place.case(
        "moe_dispatch",
        f"moe_dispatch and moe_combine of {tokens} tokens x {width} {np.dtype(dtype).name}, "
        f"{k} of {experts} experts, {layout}, partial_sums={sums}, rest={rest}, {block=}, {wire=}",
        body,
        make,
    )


def _scattered(ys: list[np.ndarray]) -> list[np.ndarray]:
    """What ranks have of the sum of their rows."""
    return np.split(np.sum(ys, axis=0), len(ys))


def _half_steps(ys: list[np.ndarray], wire: str) -> list[np.ndarray]:
    """How far those are off whose parts travel in 8 bits: all but the rank's own."""
    each = [half_step(y, wire) for y in ys]
    own = [np.split(step, len(ys))[rank] for rank, step in enumerate(each)]
    return [total - step for total, step in zip(_scattered(each), own, strict=True)]


def quantized_experts(rng: random.Random, place: Place) -> Case:
    """Experts whose hidden units are split, and whose sums travel in 8 bits: each rank's part but
    the owner's is off by half a step of its block."""
    return experts(rng, place, wire=rng.choice(WIRES))


def experts(rng: random.Random, place: Place, wire: str | None = None) -> Case:
    """Two products, by experts whose hidden units are split, or that are split themselves."""
    tokens, width, hidden = rng.choice([1, 4, 16]), rng.choice([8, 64]), rng.choice([8, 72])
    split = rng.choice(["units", "gather", *["dispatch"] * (not place.spans)])
    if wire is not None:
        split, width = "units", rng.choice([128, 256])  # whole blocks
    count = place.world * rng.choice([1, 2])
    k, dtype, name = rng.randint(1, min(3, count)), place.draw_type(rng), place.axis_name
    dtype = dtype if wire is None or dtype in FLOATS else jnp.float32
    held = count if split == "units" else count // place.world

    def body(x: Any, indices: Any, weights: Any, up: Any, down: Any) -> Any:
        if split != "units":
            h, handle = jflux.dispatch_grouped_matmul(
                x, up, indices, num_experts=count, exchange=split, axis_name=name
            )
            return jflux.grouped_matmul_combine(h, down, handle, weights, axis_name=name)
        everyones = [jflux.all_gather(a, axis_name=name, tiled=True) for a in (indices, weights)]
        routing = moe.route(everyones[0], count)
        h = moe.all_gather_grouped_matmul(x, up, routing, axis_name=name)
        return moe.grouped_matmul_reduce_scatter(
            h, down, routing, everyones[1], axis_name=name, wire=wire
        )

    def make(seed: int) -> Data:
        lead, drawn = place.mesh.devices.shape, np.random.default_rng(seed)
        x = calls.normal(seed, (*lead, tokens, width), dtype)
        up = calls.normal(seed + 1, (*lead, held, width, hidden), dtype)
        down = calls.normal(seed + 2, (*lead, held, hidden, width), dtype)
        indices = _choices(drawn, (*lead, tokens, k), count)
        weights = drawn.random((*lead, tokens, k), np.float32)
        one_hot = (indices[..., None] == np.arange(count)) * weights[..., None].astype(np.float64)
        axis = "...tke,...tef->...tf"

        def exact(
            x: np.ndarray, up: np.ndarray, down: np.ndarray, *, scatter: Any = _scattered
        ) -> np.ndarray:
            if split == "units":  # the sum over ranks of what each one's units give all tokens
                everyone, chosen = _per_group(place, x, one_hot)
                y = np.einsum("...td,...edf,...efh->...teh", everyone, up, down)
                return exchanged_by(place, scatter, np.einsum(axis, chosen, y))
            all_up, all_down = _per_group(place, up, down)
            y = np.einsum("...td,...edf,...efh->...teh", x, all_up, all_down)
            return np.einsum(axis, one_hot, y)

        wide = [a.astype(np.float64) for a in (x, up, down)]
        # What is between the products is rounded, and so are partial sums.
        scale: np.ndarray = 2 * exact(*(abs(a) for a in wide))
        terms = place.world * hidden * width
        if wire is not None:
            steps = functools.partial(_half_steps, wire=wire)
            scale = scale + 1.02 * exact(*wide, scatter=steps) / testing.tolerance(dtype, terms)
        want = Output(exact(*wide), scale, dtype, terms)
        return (x, indices, weights, up, down), [want]

    return place.case(
        "grouped_matmul",
        f"experts split by {split}: {tokens} tokens x {width} x {hidden} "
        f"{np.dtype(dtype).name}, {k} of {count}, {wire=}",
        body,
        make,
    )


def scaled_groups(rng: random.Random, place: Place) -> Case:
    """A grouped product of 8 bits with scales of rows and columns, or of blocks, perhaps gated.
    Those of other groups are far off, and rows past the last group are no numbers."""
    rows, groups = rng.choice([1, 40, 130, 300]), rng.choice([1, 3, 8])
    k, n = rng.choice([144, 272, 520, 1040]), rng.choice([16, 144, 272, 528])
    by_block, gated = rng.random() < 0.5, rng.random() < 0.4
    of_x = rng.choice(_scaled.TYPES[: 2 if by_block else 3])
    of_w = jnp.int8 if of_x == jnp.int8 else jnp.float8_e4m3fn
    out, transpose_rhs = rng.choice([jnp.bfloat16, jnp.float32]), rng.random() < 0.7
    if of_x != jnp.int8 and not gated and rng.random() < 0.3:  # float16 holds no larger sums
        out = jnp.float16
    blocks_of = [-(-k // _scaled.BLOCK), -(-n // _scaled.BLOCK)] if by_block else [1, n]

    def body(x: Any, x_scale: Any, sizes: Any, *weights: Any) -> Any:
        ws = [jflux.Scaled(w, scale) for w, scale in zip(weights[::2], weights[1::2], strict=True)]
        ws = ws if transpose_rhs else [w.T for w in ws]
        return jflux.grouped_matmul(
            jflux.Scaled(x, x_scale), ws if gated else ws[0], sizes, transpose_rhs=transpose_rhs,
            preferred_element_type=out, activation="relu" if gated else None, gated=gated,
        )  # fmt: skip

    def make(seed: int) -> Data:
        lead, draws = place.mesh.devices.shape, np.random.default_rng(seed)

        def scale_of(*shape: int) -> np.ndarray:
            return np.exp2(draws.uniform(-4, 4, (*lead, *shape))).astype(np.float32)

        ends = np.sort(draws.integers(0, rows + 1, (*lead, groups)), -1).astype(np.int32)
        sizes = np.diff(ends, axis=-1, prepend=0)
        x = calls.normal(seed, (*lead, rows, k), of_x)
        x_scale, weights = scale_of(rows, blocks_of[0]), []
        (x_scale if of_x == jnp.int8 else x)[np.arange(rows) >= ends[..., -1:]] = np.nan
        for i in range(1 + gated):
            w = calls.normal(seed + 1 + i, (*lead, groups, n, k), of_w)
            weights += [w, scale_of(groups, *blocks_of[::-1])]

        def exact(i: int, size: Any) -> np.ndarray:
            y = np.zeros((*lead, rows, n))
            wide = [
                size(a.astype(np.float64) * np.asarray(_scaled.spread(jnp.asarray(s), a.shape)))
                for a, s in ((x, x_scale), weights[2 * i : 2 * i + 2])
            ]
            for at in np.ndindex(*lead):
                for group, end in enumerate(ends[at]):
                    mine = slice(end - sizes[at][group], end)
                    y[at][mine] = wide[0][at][mine] @ wide[1][at][group].T
            return y

        want, scale = exact(0, lambda a: a), exact(0, abs)
        if gated:
            want = np.maximum(want, 0) * exact(1, lambda a: a)
            scale = 2 * scale * exact(1, abs)
        # Tensor cores keep fewer bits of sums of 8-bit floats than float32 has.
        holds = of_x == jnp.int8 or out != jnp.float32 or place.platform == "cpu"
        dtype = np.dtype(out if holds else jnp.bfloat16)
        return (x, x_scale, sizes, *weights), [Output(want, scale, dtype, k)]

    return place.case(
        "grouped_matmul",
        f"grouped_matmul of {rows} rows x {k} x {n}, {groups} groups, with scales, x of "
        f"{np.dtype(of_x).name}, {by_block=} {gated=} {transpose_rhs=}, y of {np.dtype(out).name}",
        body,
        make,
        is_xlas=place.platform == "cpu" or (by_block and gpu_code.runs_portable()),
        has_gradient=False,
    )


def merge(rng: random.Random, place: Place) -> Case:
    """Parts of attention of all ranks, merged on all of them, by the rows' owners if many."""
    rows, width = rng.choice([1, 7, 64, 2048]), rng.choice([1, 65, 128])

    def body(pair: Any) -> Any:
        return decode_merge.merge_over_ranks(pair, place.axis_name)[0]

    def make(seed: int) -> Data:
        pair = calls.normal(seed, (*place.mesh.devices.shape, rows, width + 1), np.float32)
        pair[..., -1] *= 4

        def merged(size: Any) -> Any:
            def of_group(parts: list[np.ndarray]) -> list[np.ndarray]:
                lse = np.stack([p[..., -1] for p in parts])
                shares = np.exp(lse - lse.max(0))
                shares /= shares.sum(0)
                o = sum(s[:, None] * size(p[..., :-1]) for s, p in zip(shares, parts, strict=True))
                return [o] * len(parts)

            return exchanged_by(place, of_group, pair)

        # The exponentials have errors too.
        want = Output(merged(lambda o: o), 16 * merged(abs), np.float32, place.world, same=True)
        return (pair,), [want]

    return place.case("decode_merge", f"decode_merge of {rows} rows x {width}", body, make)
