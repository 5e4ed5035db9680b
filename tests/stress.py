"""Random programs of products, in flight together, with late ranks: python tests/stress.py --help

Each program makes a few calls with shapes, types and meshes of its own, some in a chain and some
independent, between other collectives. Every result is compared with float64.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import random
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

if __name__ == "__main__":
    import conftest  # noqa: F401  chooses the devices, before JAX is imported

import jax
import jax.numpy as jnp
import numpy as np
from harness import (
    FUSED_DTYPES,
    PRODUCTS,
    RANKS,
    SHAPES,
    Call,
    assert_close,
    exact,
    make_mesh,
    operands,
    per_device,
    world_of,
    x64_if,
)
from jax import lax

import jflux
from jflux import testing
from jflux._ops.all_reduce import ALGORITHMS

SIZES = [1, 2, 3, 5, 8, 13, 16, 31, 64, 100, 129, 200]


@dataclasses.dataclass
class Program:
    mesh: Any
    axis_name: Any
    calls: list[Call]
    arrays: list[tuple[np.ndarray, np.ndarray]]
    run: Callable[[], Any]  # dispatches it


def draw_call(rng: random.Random) -> Call:
    lead = (*rng.choice([(), (), (2,), (1, 3)]), rng.choice(SIZES[:8]))
    op = rng.choice(PRODUCTS)
    axes = range(-len(lead) - 1, len(lead) + 1)
    return Call(
        op=op,
        lead=lead,
        dimension=rng.randrange(len(lead)),
        k=rng.choice(SIZES),
        n=rng.choice(SIZES),
        dtype=rng.choice(FUSED_DTYPES),
        out=rng.choice([None, jnp.float32]),
        transpose_rhs=rng.random() < 0.5,
        gathered=op == "all_gather_matmul" and rng.random() < 0.3,
        split=rng.choice(axes),
        concat=rng.choice(axes),
    )


# ---- What runs beside the products: is it right, as far as the types can tell? -------------------


def _near(got: jax.Array, want: jax.Array, size: jax.Array) -> jax.Array:
    return jnp.all(jnp.abs(got - want) <= 0.02 * size)


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _all_reduce(x: jax.Array, w: jax.Array, axis_name: Any, algorithm: Any = None) -> jax.Array:
    got = jflux.all_reduce(x, axis_name=axis_name, algorithm=algorithm)
    return _near(got, lax.psum(_wide(x), axis_name), lax.psum(jnp.abs(_wide(x)), axis_name))


def _spread(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """x's numbers again and again, in bfloat16 and times powers of two: so that rows differ."""
    numbers = jnp.resize(x.ravel(), shape).astype(jnp.bfloat16)
    factors = 2.0 ** (jnp.arange(numbers.size) % 7 - 3)
    return numbers * factors.astype(jnp.bfloat16).reshape(shape)


def _large_chunks(x: jax.Array, w: jax.Array, axis_name: Any) -> jax.Array:
    """More than 1 MiB for each rank to sum."""
    x = _spread(x, (lax.axis_size(axis_name) * (1 << 19) + 123,))
    return _all_reduce(x, w, axis_name, "chunked")


def _norm(x: jax.Array, w: jax.Array, axis_name: Any, layer: bool = False) -> jax.Array:
    scale, bias = jnp.ones(x.shape[-1], jnp.float32), jnp.full(x.shape[-1], 2, jnp.float32)
    norm = jflux.LayerNorm(scale, bias, 1.0) if layer else jflux.RMSNorm(scale, 1.0)
    residual = jnp.ones(x.shape, x.dtype)
    total, got = jflux.all_reduce(x, axis_name=axis_name, residual=residual, norm=norm)
    want = lax.psum(_wide(x), axis_name) + 1
    size = lax.psum(jnp.abs(_wide(x)), axis_name) + 1
    right = _near(total, want, size)
    if layer:
        want -= jnp.mean(want, -1, keepdims=True)
        size += jnp.mean(size, -1, keepdims=True)
    over = lax.rsqrt(jnp.mean(want * want, -1, keepdims=True) + 1)
    return right & _near(got, want * over + 2 * layer, size * over + 2 * layer)


def _exchange(x: jax.Array, w: jax.Array, axis_name: Any) -> jax.Array:
    """There, swapped, and back: what all_to_all moves, all_gather and reduce_scatter know too."""
    return _exchanged(x.ravel()[:1000], axis_name)


def _large_exchange(x: jax.Array, w: jax.Array, axis_name: Any) -> jax.Array:
    """More than 4 MiB from each rank: in chunks, those of 16 KiB."""
    return _exchanged(_spread(x, ((2 << 20) + 1234,)), axis_name)


def _exchanged(flat: jax.Array, axis_name: Any) -> jax.Array:
    world, rank = lax.axis_size(axis_name), lax.axis_index(axis_name)
    all_of_it = jflux.all_gather(flat, axis_name=axis_name)
    right = jnp.array_equal(all_of_it, lax.all_gather(flat, axis_name))
    # Rank r sends r's data times (s + 1) to rank s.
    factors = jnp.arange(1, world + 1, dtype=flat.dtype)[:, None]
    sent = factors * flat[None]
    got = jflux.all_to_all(sent, axis_name=axis_name, split_axis=0, concat_axis=0)
    right &= jnp.array_equal(got, all_of_it * factors[rank])
    total = jflux.reduce_scatter(sent, axis_name=axis_name)
    wide = _wide(all_of_it * factors[rank])
    return right & _near(total, wide.sum(0), jnp.abs(wide).sum(0))


def _near_sum(got: jax.Array, x: jax.Array, w: jax.Array, axis_name: Any) -> jax.Array:
    """Whether it is the sum of the ranks' x @ w."""
    x, w = _wide(x), _wide(w)
    want, size = (
        lax.psum(jnp.matmul(a, b, precision="highest"), axis_name)
        for a, b in ((x, w), (jnp.abs(x), jnp.abs(w)))
    )
    return _near(got, want, size + 1e-6)


def _matmul(x: jax.Array, w: jax.Array, axis_name: Any) -> jax.Array:
    x = x.reshape(-1, x.shape[-1])
    got = jflux.matmul_all_reduce(x, x, axis_name=axis_name, transpose_rhs=True)
    return _near_sum(got, x, x.T, axis_name)


def _few_rows(x: jax.Array, w: jax.Array, axis_name: Any) -> jax.Array:
    """Of two ranks, one kernel that multiplies and sums."""
    x, w = _spread(x, (64, 136)), _spread(w, (136, 10248))
    return _near_sum(jflux.matmul_all_reduce(x, w, axis_name=axis_name), x, w, axis_name)


def _tiles(x: jax.Array, w: jax.Array, axis_name: Any) -> jax.Array:
    """More than 4 MiB, whose tiles are summed while others are multiplied."""
    rows = 128 * lax.axis_size(axis_name)
    x, w = _spread(x, (rows, 72)), _spread(w, (72, (2 << 20) // rows // 8 * 8 + 8))
    return _near_sum(jflux.matmul_all_reduce(x, w, axis_name=axis_name), x, w, axis_name)


def _psum(x: jax.Array, w: jax.Array, axis_name: Any) -> jax.Array:
    """XLA's own, beside ours."""
    return jnp.isfinite(lax.psum(_wide(x).ravel()[0], axis_name))


def _all_gather(x: jax.Array, w: jax.Array, axis_name: Any) -> jax.Array:
    return jnp.all(jnp.isfinite(lax.all_gather(_wide(w).ravel()[0], axis_name)))


MIXES = {
    "psum": _psum, "all_gather": _all_gather, "all_reduce": _all_reduce, "norm": _norm,
    "layer_norm": functools.partial(_norm, layer=True), "large_chunks": _large_chunks,
    "exchange": _exchange, "large_exchange": _large_exchange, "matmul": _matmul,
    "few_rows": _few_rows, "tiles": _tiles,
    **{name: functools.partial(_all_reduce, algorithm=name) for name in ALGORITHMS},
}  # fmt: skip


def draw_program(rng: random.Random, orders: list[list[int]], most_calls: int) -> Program:
    shape = rng.choice([s for s in SHAPES if np.prod(s) > 1])
    names = ("a", "b", "c")[: len(shape)]
    mesh = make_mesh(shape, names, order=rng.choice(orders))
    axis_name = rng.choice([*names, tuple(rng.sample(names, len(names)))])
    calls = [draw_call(rng) for _ in range(rng.randint(1, most_calls))]
    if any(c.dtype == jnp.float64 for c in calls):  # the whole program is in 64-bit mode or not
        calls = [dataclasses.replace(c, dtype=jnp.float64) for c in calls]
    ops = [call.bind(axis_name) for call in calls]
    mixed = [rng.choice([*MIXES, "chain", "chain", None, None]) for _ in calls]
    arrays = [operands(c, mesh, axis_name, seed=rng.randrange(1 << 30)) for c in calls]

    def body(arrays):
        results, sums = [], []
        previous = None
        for op, (x, w), mix in zip(ops, arrays, mixed, strict=True):
            if mix == "chain" and previous is not None:
                # Zero, but XLA cannot know: this call comes after the previous one.
                x = x + jnp.where(previous.ravel()[0] > 1e30, 1, 0).astype(x.dtype)
            results.append(op(x, w))
            previous = jax.tree.leaves(results[-1])[0]
            if mix in MIXES:
                sums.append(MIXES[mix](x, w, axis_name))
        return results, sums

    jitted = jax.jit(per_device(mesh, body))

    def run():
        with x64_if(*(c.dtype for c in calls)):
            return jitted(arrays)

    return Program(mesh, axis_name, calls, arrays, run)


def check(program: Program, outputs: Any) -> None:
    results, sums = outputs
    assert all(np.all(one) for one in sums), (
        f"over {program.axis_name}: a collective beside the products is wrong"
    )
    for call, (x, w), got in zip(program.calls, program.arrays, results, strict=True):
        place = (program.mesh, program.axis_name)
        want, scale = exact(call, *place, x, w), exact(call, *place, abs(x), abs(w))
        if call.gathered:
            np.testing.assert_array_equal(np.asarray(got[1], np.float64), want[1])
            got, want, scale = got[0], want[0], scale[0]
        kind = call.out_dtype if call.out_dtype == np.float32 else call.dtype
        assert_close(got, want, scale, kind, call.terms(world_of(*place)))


def stress(
    calls: int,
    *,
    seed: int = 0,
    max_delay_us: int = 2000,
    in_flight: int = 4,
    most_calls: int = 4,
    repeats: int = 3,
    progress: Callable[[int], None] = lambda done: None,
) -> str:
    """Makes at least `calls` calls and checks each; returns a line that says what was done."""
    rng = random.Random(seed)
    # Of the devices, a few: the heap has workspaces for each order's groups.
    orders = [rng.sample(range(RANKS), RANKS) for _ in range(4)]
    done = programs = 0
    start = time.monotonic()
    while done < calls:
        batch = [draw_program(rng, orders, most_calls) for _ in range(in_flight)]
        with testing.planted_faults(max_delay_us=max_delay_us):
            pending = [(p, p.run()) for _ in range(repeats) for p in batch]
            jax.block_until_ready([r for _, r in pending])
        testing.poison_workspaces()
        for program, results in pending:
            check(program, results)
        made = repeats * sum(len(p.calls) for p in batch)
        done, programs = done + made, programs + len(batch)
        progress(made)
        jax.clear_caches()  # thousands of compiled programs would fill the memory
    seconds = time.monotonic() - start
    return (
        f"{done} calls right, in {programs} programs of which {in_flight} x {repeats} were in "
        f"flight, on {RANKS} {jax.default_backend()} devices: {seconds:.0f} s ({seed=})"
    )


def main(argv: Iterable[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--max-delay-us", type=int, default=2000, help="of a rank, in each call")
    parser.add_argument("--in-flight", type=int, default=4, help="programs at once")
    parser.add_argument("--most-calls", type=int, default=4, help="in one program")
    args = parser.parse_args(argv)
    jflux.config.update(strict=True, always=True)
    jflux.init()
    try:
        from tqdm import tqdm

        bar = tqdm(total=args.calls, unit="call", file=sys.stderr)
        progress = bar.update
    except ImportError:
        made = 0

        def progress(count: int) -> None:
            nonlocal made
            made += count
            print(f"\r{made}/{args.calls} calls", end="", file=sys.stderr, flush=True)

    print(f"seed {args.seed}", file=sys.stderr)
    summary = stress(
        args.calls,
        seed=args.seed,
        max_delay_us=args.max_delay_us,
        in_flight=args.in_flight,
        most_calls=args.most_calls,
        progress=progress,
    )
    print(f"\n{summary}")


if __name__ == "__main__":
    main()
