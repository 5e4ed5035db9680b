"""Random calls of the ops without w, and of XLA's own."""

from __future__ import annotations

import functools
import math
import random
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

import jflux

from .. import testing
from .._ops import _norm, _quantize
from .._ops._scaled import BLOCK, TYPES
from .._ops._spec import OpSpec, ops_with_checked_kernels
from .._ops.collectives.all_reduce import ALGORITHMS
from . import calls
from .calls import HALVES
from .cases import FLOATS, ROWS, Case, Data, Output, Place, exchanged_by, sums_of

#: Ops that take their reference on several nodes.
INSIDE_NODES = frozenset({"ragged_all_to_all"})


def collective(rng: random.Random, place: Place, *, spec: OpSpec | None = None) -> Case:
    """One of the ops without w, in one of its ways, along any dimensions."""
    specs = [s for s in ops_with_checked_kernels(place.platform) if s.product is None]
    specs = [s for s in specs if not (place.spans and s.name in INSIDE_NODES)]
    op = spec or rng.choice(specs)
    dtypes = [d for d in FLOATS if op.takes(place.platform, d)]
    if place.wide and op.takes(place.platform, jnp.float64):
        dtypes.append(jnp.float64)
    dtype = rng.choice(dtypes)
    options: dict[str, Any] = {  # dimensions, but for those that are yes or no
        name: value if isinstance(value, bool) else rng.randrange(3)
        for name, value in rng.choice(op.ways).items()
    }
    communication = op.communication(3, **options)
    while True:
        shape = [rng.choice([1, 2, 5, 24, 65, 300]) for _ in range(3)]
        if communication.split is not None:
            shape[communication.split] *= place.world
        if place.world * math.prod(shape) <= place.most_elements:
            break
    f = functools.partial(op.on, axis_name=place.axis_name, **options)

    def make(seed: int) -> Data:
        x = calls.normal(seed, (*place.mesh.devices.shape, *shape), dtype)
        want, scale = (exchanged_by(place, communication.exact, a) for a in (x, abs(x)))
        sums = communication.sums()
        scale = scale if sums else np.zeros_like(scale)
        same = communication.kind in ("all_gather", "all_reduce")
        return (x,), [Output(want, scale, dtype, place.world if sums else 1, same)]

    said = ", ".join(f"{name}={value}" for name, value in options.items())
    return place.case(op.name, f"{op.name} {shape} {np.dtype(dtype).name} {said}", f, make)


def all_reduce(rng: random.Random, place: Place) -> Case:
    """A sum by any algorithm, of any size."""
    world, dtype = place.world, rng.choice(FLOATS)
    sizes = [1, 7, 1000, 4096, 65536, 300_001]
    algorithm = rng.choice(ALGORITHMS)
    if algorithm == "chunked":  # above 1 MiB for each rank to sum chunks are larger
        sizes.append(world * (1 << 19) + 12_345)
    size = rng.choice([size for size in sizes if size <= place.most_elements])

    def make(seed: int) -> Data:
        x = calls.normal(seed, (*place.mesh.devices.shape, size), dtype)
        want, scale = sums_of(place, x, abs(x))
        return (x,), [Output(want, scale, dtype, world, same=True)]

    return place.case(
        "all_reduce",
        f"all_reduce {algorithm} {size} {np.dtype(dtype).name}",
        functools.partial(jflux.all_reduce, axis_name=place.axis_name, algorithm=algorithm),
        make,
    )


WIRES = ("int8", "float8_e4m3fn")


def half_step(rows: np.ndarray, wire: str) -> np.ndarray:
    """How far rows [..., n] are off when blocks of them are quantised, at most. Their last block
    may be short."""
    *lead, size = rows.shape
    whole = np.pad(abs(rows.astype(np.float64)), [(0, 0)] * len(lead) + [(0, -size % BLOCK)])
    blocks = whole.reshape(*lead, -1, BLOCK)
    largest = blocks.max(-1, keepdims=True)
    if wire == "int8":
        steps = np.broadcast_to(largest / 254, blocks.shape)
    else:
        steps = blocks / 16 + largest / (448 * 1024)
    return steps.reshape(whole.shape)[..., :size]


def quantized_sum(rng: random.Random, place: Place) -> Case:
    """A sum whose data travel in 8 bits, of any size. It is off by half a step for each rank's part
    of a block, and by half a step of the sum of the block."""
    world, dtype = place.world, rng.choice(FLOATS)
    wire = rng.choice(WIRES)
    sizes = [1, 1000, 4096, 65536, 300_001, world * (1 << 19) + 12_345]
    size = rng.choice([size for size in sizes if size <= place.most_elements])

    def make(seed: int) -> Data:
        x = calls.normal(seed, (*place.mesh.devices.shape, size), dtype)
        want, sizes = sums_of(place, x, abs(x))
        first = sums_of(place, half_step(x, wire))[0]  # of each rank's part, over a group
        bound = first + half_step(abs(want) + first, wire)
        unit = testing.tolerance(dtype, world)
        return (x,), [Output(want, sizes + bound / unit, dtype, world, same=True)]

    return place.case(
        "all_reduce",
        f"all_reduce wire {wire} {size} {np.dtype(dtype).name}",
        functools.partial(
            jflux.all_reduce, axis_name=place.axis_name, algorithm="chunked", wire=wire
        ),
        make,
    )


def quantized_exchange(rng: random.Random, place: Place) -> Case:
    """One half of such a sum: an all_gather, or a reduce_scatter, of any size."""
    world, dtype, wire = place.world, rng.choice(FLOATS), rng.choice(WIRES)
    op = rng.choice(["all_gather", "reduce_scatter"])
    most = place.most_elements // world
    size = rng.choice([n for n in (1, 104, 1001, 4096, 65_544, (1 << 19) + 12_344) if n <= most])
    shape = (size,) if op == "all_gather" else (world, size)

    def make(seed: int) -> Data:
        x = calls.normal(seed, (*place.mesh.devices.shape, *shape), dtype)
        bound = half_step(x, wire)

        def moved(each: list[np.ndarray]) -> list[np.ndarray]:
            return [np.stack(each)] * world if op == "all_gather" else [*np.sum(each, 0)]

        want, sizes, bound = (exchanged_by(place, moved, a) for a in (x, abs(x), bound))
        scale = sizes + bound / testing.tolerance(dtype, world)
        return (x,), [Output(want, scale, dtype, world, same=op == "all_gather")]

    return place.case(
        op,
        f"{op} wire {wire} {size} {np.dtype(dtype).name}",
        functools.partial(getattr(jflux, op), axis_name=place.axis_name, wire=wire),
        make,
    )


def norm(rng: random.Random, place: Place) -> Case:
    """A residual and a norm after an all_reduce, in its kernel where all goes to all at once, or
    where two-shot is asked for. The rows may be quantised."""
    dtype = rng.choice(HALVES)
    rows, width = rng.choice([1, 3, 16, 33, 40]), rng.choice([64, 1000, 4096, 8192])
    algorithm = rng.choice([None, None, "one_shot", "two_shot"])
    # The same on all ranks: constants of the program.
    residual: Any = calls.normal(1, (rows, width), dtype)
    scale: Any
    bias: Any
    scale, bias = (calls.normal(seed, (width,), np.float32) for seed in (2, 3))
    norms: list[_norm.Norm] = [
        jflux.RMSNorm(scale),
        jflux.LayerNorm(scale),
        jflux.LayerNorm(scale, bias),
    ]
    after = rng.choice(norms)
    quantize: Any = None
    if rng.random() < 0.5:
        block = rng.choice([(1, -1), (1, 128), (1, 128), (-1, -1)])
        quantize = jflux.Format(rng.choice(TYPES), block, rng.random() < 0.5)

    def body(x: Any) -> Any:
        normalised = jflux.all_reduce(
            x, axis_name=place.axis_name, residual=residual, norm=after, quantize=quantize,
            algorithm=algorithm,
        )[1]  # fmt: skip
        return normalised if quantize is None else normalised.dequantize(dtype)

    def make(seed: int) -> Data:
        x = calls.normal(seed, (*place.mesh.devices.shape, rows, width), dtype)
        sums, sizes = sums_of(place, x, abs(x))
        sums, sizes = sums + residual.astype(np.float64), sizes + abs(residual).astype(np.float64)
        if after.name == "layer":
            sums = sums - np.mean(sums, -1, keepdims=True)
            sizes = sizes + np.mean(sizes, -1, keepdims=True)
        over = scale / np.sqrt(np.mean(sums**2, -1, keepdims=True) + 1e-6)
        added: Any = after.factors[1] if len(after.factors) > 1 else 0.0
        want, sizes = sums * over + added, sizes * abs(over) + abs(added)
        if quantize is not None:
            sizes = sizes + _steps(want, quantize) / testing.tolerance(dtype, place.world)
        return (x,), [Output(want, sizes, dtype, place.world, True)]

    return place.case(
        "all_reduce",
        f"all_reduce and {after.name} norm {algorithm} {rows} x {width} {np.dtype(dtype).name}"
        f"{f' as {quantize}' if quantize else ''}",
        body,
        make,
        is_xlas=place.world == 1,
        has_gradient=quantize is None,
    )


def _steps(want: np.ndarray, quantize: jflux.Format) -> np.ndarray:
    """The steps between the values around `want`, as it is quantised: rounding costs a half."""
    relative, least = 0.0, 1.0
    if jnp.issubdtype(quantize.dtype, jnp.floating):
        of_type = jnp.finfo(quantize.dtype)
        relative, least = float(of_type.eps), float(of_type.smallest_subnormal)
    of_row = quantize.block[0] == 1
    largest = np.max(abs(want), -1 if of_row else (-2, -1), keepdims=True)
    scale = largest / _quantize.largest(np.dtype(quantize.dtype)) * (1 + quantize.power_of_two)
    return abs(want) * relative + scale * least


def there_and_back(rng: random.Random, place: Place, most: int = 20_000) -> Case:
    """Rank r sends its shard s to rank s, which sends it back doubled; and what all ranks have,
    gathered, scattered and summed again, is so many times as much."""
    size = rng.choice([s for s in (1, 5, 64, 1000, 20_000, 700_001) if s <= most])
    name = place.axis_name

    def body(x: Any) -> Any:
        there = jflux.all_to_all(x, axis_name=name, split_axis=0, concat_axis=0)
        back = jflux.all_to_all(2 * there, axis_name=name, split_axis=0, concat_axis=0)
        all_of_it = jflux.all_gather(x[0], axis_name=name)
        return back + jflux.reduce_scatter(all_of_it, axis_name=name)

    def make(seed: int) -> Data:
        x = calls.normal(seed, (*place.mesh.devices.shape, place.world, size), jnp.bfloat16)
        first = np.broadcast_to(x[..., :1, :], x.shape).astype(np.float64)
        wide = x.astype(np.float64)
        want = 2 * wide + place.world * first
        scale = 2 * abs(wide) + place.world * abs(first)
        return (x,), [Output(want, scale, jnp.bfloat16, place.world)]

    return place.case("all_to_all", f"exchanges there and back {size}", body, make)


def one_exchange(rng: random.Random, place: Place) -> Case:
    """One exchange, along any dimensions that shards are parts of, or make."""
    world = place.world
    dtype = rng.choice(FLOATS)
    op, tiled = rng.choice(["all_gather", "reduce_scatter", "all_to_all"]), rng.random() < 0.5
    shape = [rng.choice([1, 2, 5, 24, 65]) for _ in range(3)]
    split, concat = rng.randrange(3), rng.randrange(3 + (op == "all_gather" and not tiled))
    if op != "all_gather":
        shape[split] = world * shape[split] if tiled else world
    options: dict[str, Any] = {"tiled": tiled}
    if op == "all_gather":
        options["axis"] = concat
    elif op == "reduce_scatter":
        options["scatter_dimension"] = split
    else:
        options |= {"split_axis": split, "concat_axis": concat}

    def make(seed: int) -> Data:
        x = calls.normal(seed, (*place.mesh.devices.shape, *shape), dtype)
        f = functools.partial(calls.exchanged, op, **options)
        want, scale = (exchanged_by(place, f, a) for a in (x, abs(x)))
        return (x,), [Output(want, scale, dtype, world, same=op == "all_gather")]

    said = ", ".join(f"{name}={value}" for name, value in options.items())
    return place.case(
        op,
        f"{op} {shape} {np.dtype(dtype).name} {said}",
        functools.partial(getattr(jflux, op), axis_name=place.axis_name, **options),
        make,
    )


# ---- XLA's own, beside ---------------------------------------------------------------------------


def xla(rng: random.Random, place: Place) -> Case:
    """A collective or a product of XLA's."""
    kind = rng.choice(["psum", "all_gather", "product"])
    shape = (rng.choice(ROWS), rng.choice([8, 64, 200]))

    def body(x: Any) -> Any:
        if kind == "psum":
            return lax.psum(x, place.axis_name)
        if kind == "all_gather":
            return lax.all_gather(x, place.axis_name)
        return jnp.matmul(x, x.T, precision="highest")

    def make(seed: int) -> Data:
        x = calls.normal(seed, (*place.mesh.devices.shape, *shape), np.float32)
        if kind == "psum":
            want, scale = sums_of(place, x, abs(x))
            return (x,), [Output(want, scale, np.float32, place.world)]
        if kind == "all_gather":
            want = exchanged_by(place, lambda xs: [np.stack(xs)] * len(xs), x)
            return (x,), [Output(want, np.zeros_like(want), np.float32, 1)]
        a = x.astype(np.float64)
        want, scale = (b @ np.swapaxes(b, -1, -2) for b in (a, abs(a)))
        return (x,), [Output(want, scale, np.float32, shape[1])]

    return place.case("xla", f"XLA's {kind} of {shape}", body, make, is_xlas=True)
