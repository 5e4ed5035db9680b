"""Checks decoding with a cache on this host's GPUs against float64, and times a step; the tables
come last.

python -m bench.cache_check [--ranks 2] [--trials 5]

A trial has fresh random operands: prompts of ragged lengths, tokens one at a time in a captured
loop, several at once, ranks that come late. A compiled program runs in all trials. The result of a
token is compared with its row of causal attention over the whole sequence, as the layer
`jflux.nn.attention` has it, of the operands as they are rounded to the type.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

os.environ.setdefault("NCCL_NVLS_ENABLE", "0")

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jflux
import jflux.nn
import jflux.testing

B, D, H, G, C = 3, 512, 8, 4, 64  # sequences, width, heads of queries and of keys, their elements
PROMPT, STEPS, MORE = 512, 16, 3
#: Of the largest element: queries, keys, values and results are rounded, and products of them.
TOLERANCE = {"bfloat16": 1.5e-2, "float16": 2e-3}
#: Positions, and new tokens of each sequence, of what is timed.
TIMED = [(4096, 1), (131072, 1), (131072, 4), (131072, 64)]


def exact(x: np.ndarray, *weights: np.ndarray) -> np.ndarray:
    """The layer's causal attention [B, s, D], float64."""
    q, k, v = (np.einsum("bsd,dhc->bshc", x, w) for w in weights[:3])
    half, length = C // 2, x.shape[1]
    turn = np.exp(1j * np.outer(np.arange(length), 10_000.0 ** (-np.arange(half) / half)))

    def turned(a: np.ndarray) -> np.ndarray:
        z = (a[..., :half] + 1j * a[..., half:]) * turn[:, None]
        return np.concatenate([z.real, z.imag], -1)

    q, k, v = turned(q), np.repeat(turned(k), H // G, 2), np.repeat(v, H // G, 2)
    scores = np.einsum("bshc,bthc->bhst", q, k, optimize=True) / C**0.5
    scores = np.where(np.tri(length, dtype=bool), scores, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    o = np.einsum("bhst,bthc->bshc", p / p.sum(-1, keepdims=True), v, optimize=True)
    return np.einsum("bshc,hcd->bsd", o, weights[3], optimize=True)


def program(mesh: Mesh, context: int, dtype: Any) -> Any:
    """(x of the prompt, of the steps [STEPS, B, D], of what comes at once, lengths, weights) ->
    (results of the three, the cache's lengths), compiled once."""
    axes: dict[str, Any] = {"axis_name": "tp", "context_axis": "cp", "mesh": mesh}
    layer: dict[str, Any] = {"rotate": jflux.nn.Rotary(), **axes}

    def run(prompt: Any, steps: Any, at_once: Any, lengths: Any, weights: Any) -> Any:
        cache = jflux.nn.init_cache(
            B, PROMPT + STEPS + MORE, H, C, num_kv_heads=G, dtype=dtype, **axes
        )
        first, cache = jflux.nn.attention(
            jflux.reorder_for_causal(prompt, context), *weights, cache=cache, prefill=True,
            new_lengths=lengths, **layer,
        )  # fmt: skip

        def step(cache: Any, x: Any) -> Any:
            y, cache = jflux.nn.attention(
                x[:, None], *weights, cache=cache, sequence_parallel=False, **layer
            )
            return cache, y[:, 0]

        cache, each = lax.scan(step, cache, steps)
        last, cache = jflux.nn.attention(
            at_once, *weights, cache=cache, sequence_parallel=False, **layer
        )
        return jflux.restore_order(first, context), each, last, cache.lengths

    return jax.jit(run)


def trial(run: Any, dtype: Any, seed: int) -> float:
    """The largest error of a token, relative to the largest element."""
    rng = np.random.default_rng(seed)
    shapes = (B, PROMPT + STEPS + MORE, D), (D, H, C), (D, G, C), (D, G, C), (H, C, D)
    scales = 1.0, D**-0.5, D**-0.5, D**-0.5, (H * C) ** -0.5
    x, *weights = (
        np.asarray(jnp.asarray(rng.standard_normal(shape) * scale, dtype))
        for shape, scale in zip(shapes, scales, strict=True)
    )
    lengths = np.array([PROMPT, 1, rng.integers(2, PROMPT)])

    def at(a: np.ndarray, first: Any, count: int) -> np.ndarray:
        positions = np.asarray(first)[:, None] + np.arange(count)
        return np.take_along_axis(a, positions[..., None], 1)

    steps = at(x, lengths, STEPS).swapaxes(0, 1)
    at_once = at(x, lengths + STEPS, MORE)
    results = run(x[:, :PROMPT], steps, at_once, lengths, weights)
    first, each, last, grown = (np.asarray(a, np.float64) for a in results)
    want = exact(*(a.astype(np.float64) for a in (x, *weights)))
    if not np.array_equal(grown, lengths + STEPS + MORE):
        return np.inf
    differences = [first[b, :n] - want[b, :n] for b, n in enumerate(lengths)]
    differences += [each.swapaxes(0, 1) - at(want, lengths, STEPS)]
    differences += [last - at(want, lengths + STEPS, MORE)]
    worst = max(float(np.abs(d).max()) for d in differences)
    return worst / float(np.abs(want).max()) if np.isfinite(worst) else np.inf


def seconds_of_step(ranks: int, positions: int, tokens: int) -> dict[str, float]:
    """Of a step of one sequence over a cache split over the ranks: 32 heads of queries, 8 of keys,
    of 128 elements, bfloat16. The least of five loops."""
    mesh = Mesh(np.array(jax.devices()[:ranks]), ("cp",))
    heads, kv_heads, width, loops = 32, 8, 128, 16
    split = jflux.KVCache(P(None, "cp"), P(None, "cp"), P())  # type: ignore[arg-type]

    def both(cache: Any, q: Any, k: Any, v: Any) -> Any:
        at = cache.lengths
        kv = jflux.update_cache(cache[:2], (k, v), at, axis_name="cp")
        o = jflux.flash_decode(q[:, 0], *kv, at + 1, axis_name="cp")
        return o[:, None], jflux.KVCache(*kv, at + 1)

    def attend(cache: Any, q: Any, k: Any, v: Any) -> Any:
        return jflux.attend_to_cache(cache, q, k, v, axis_name="cp")

    def seconds(f: Any) -> float:
        def loop(cache: Any, q: Any, k: Any, v: Any) -> Any:
            def step(cache: Any, _: Any) -> Any:
                o, cache = f(cache, q, k, v)
                # The lengths stay, so that all steps cost the same.
                return cache._replace(lengths=cache.lengths - tokens), o[0, 0, 0, 0]

            return lax.scan(step, cache, None, length=loops)

        run = jax.jit(
            jax.shard_map(
                loop, mesh=mesh, in_specs=(split, P(), P(), P()), out_specs=(split, P()),
                check_vma=False,
            ),
            donate_argnums=0,
        )  # fmt: skip
        where = NamedSharding(mesh, P(None, "cp"))
        kv = [jnp.ones((1, positions, kv_heads, width), jnp.bfloat16, device=where) for _ in "kv"]
        cache: Any = jflux.KVCache(*kv, jnp.full(1, positions - tokens, jnp.int32))
        q = jnp.ones((1, tokens, heads, width), jnp.bfloat16)
        k = jnp.ones((1, tokens, kv_heads, width), jnp.bfloat16)
        taken = []
        for turn in range(7):
            begin = time.perf_counter()
            cache, o = run(cache, q, k, k)
            jax.block_until_ready(o)
            if turn >= 2:  # the first compiles, the second may be captured
                taken.append(time.perf_counter() - begin)
        return min(taken) / loops

    found = {"attend_to_cache": seconds(attend)}
    if tokens == 1:
        found["update_cache, flash_decode"] = seconds(both)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--no-times", action="store_true")
    args = parser.parse_args()
    lines, wrong = [], 0
    splits = [(c, args.ranks // c) for c in range(1, args.ranks + 1) if args.ranks % c == 0]
    for context, tensor in splits:
        devices = np.array(jax.devices()[: args.ranks]).reshape(context, tensor)
        for dtype in (jnp.bfloat16, jnp.float16):
            run = program(Mesh(devices, ("cp", "tp")), context, dtype)
            errors = []
            for seed in range(args.trials):
                jflux.testing.poison_workspaces()
                with jflux.testing.planted_faults(max_delay_us=2000 if seed % 2 else 0):
                    errors.append(trial(run, dtype, seed))
                print(f"{context} x {tensor} {dtype.__name__} trial {seed}: {errors[-1]:.1e}")
            most = TOLERANCE[jnp.dtype(dtype).name]
            right = max(errors) <= most
            wrong += not right
            lines.append(
                f"{context} (cp) x {tensor} (tp) {dtype.__name__:>9}: {len(errors)} trials, "
                f"largest error {max(errors):.1e} of {most:.0e}: {'right' if right else 'WRONG'}"
            )
    if not args.no_times:
        for positions, tokens in TIMED:
            found = seconds_of_step(args.ranks, positions, tokens)
            of_cache = 2 * positions // args.ranks * 8 * 128 * 2
            times = ", ".join(
                f"{name} {1e6 * s:.0f} us ({1e-9 * of_cache / s:.0f} GB/s)"
                for name, s in found.items()
            )
            lines.append(f"{positions} positions, {tokens} new tokens: {times}")
    print("\n".join(lines))
    if wrong:
        raise SystemExit(f"{wrong} of {2 * len(splits)} are wrong")


if __name__ == "__main__":
    main()
