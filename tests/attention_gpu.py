"""Checks the kernels of attention (cc/ops/flash_attention) on one GPU, forward and backward, on
random calls against float64; a table comes last:

python tests/attention_gpu.py [--calls 200] [--seed 0] [--limit 300] [--ranks 1] [--portable]

A call draws the numbers of queries, keys, heads and elements (none of them whole tiles), positions
in any layout, windows, segments, a softcap and the type. Each program runs three times: twice on
the same operands, which must give the same bits, then on others, with results full of NaN before.
Last come longer calls, and loops of calls, which XLA captures in graphs and replays.

With --ranks 2 or more: the kernel of all_gather_attention, on so many GPUs
(tests/attention_ranks_gpu.py), in 60 seconds unless --limit says otherwise.

With --portable: the portable kernels.
"""

from __future__ import annotations

import argparse
import collections
import os
import sys
import time
from typing import Any

os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # no NVLink multicast

import jax
import jax.numpy as jnp
import numpy as np

import jflux
from jflux import _config, _native
from jflux._ops.attention import flash_attention
from jflux._ops.attention._blockwise import Positions, Scores
from jflux._ops.attention.sequence_layouts import own_positions

LAYOUTS = ("contiguous", "zigzag", "striped", "any")


def draw(rng: np.random.Generator, longest: int) -> dict[str, Any]:
    """A call, less its numbers."""
    groups, batch = int(rng.integers(1, 4)), int(rng.integers(1, 4))
    lengths = [2 * int(rng.integers(1, longest // 2)) for _ in range(2)]
    width = int(rng.choice([64, 128, 256, 8 * int(rng.integers(1, 33))]))
    causal = bool(rng.integers(2))
    window = None
    if rng.integers(2):
        window = int(rng.integers(longest)), int(rng.integers(longest))
    softcap = float(rng.uniform(1, 30)) if rng.integers(3) == 0 else None
    return {
        "batch": batch, "lengths": lengths, "groups": groups, "width": width,
        "heads": groups * int(rng.integers(1, 6)), "layout": str(rng.choice(LAYOUTS)),
        "segments": int(rng.integers(5)) * int(rng.integers(2)),
        "dtype": jnp.bfloat16 if rng.integers(2) else jnp.float16,
        "scores": Scores(float(rng.uniform(0.5, 2)) / width**0.5, softcap, causal, window),
    }  # fmt: skip


def parts(rng: np.random.Generator, call: dict[str, Any]) -> list[Positions]:
    """The positions and segments of queries and of keys."""
    found = []
    for length in call["lengths"]:
        if call["layout"] == "any":
            positions = rng.integers(0, 2 * length, (call["batch"], length)).astype(np.int32)
        else:
            ranks = int(rng.integers(1, 5))
            rank = int(rng.integers(ranks))
            positions = np.asarray(own_positions(jnp.int32(rank), length, ranks, call["layout"]))
        ids = None
        if call["segments"]:
            ids = rng.integers(0, call["segments"], (call["batch"], length)).astype(np.int32)
            ids = np.sort(ids, 1) if rng.integers(2) else ids
        found.append(Positions(positions, ids))
    return found


def operands(rng: np.random.Generator, call: dict[str, Any]) -> list[jax.Array]:
    """q, k, v and do."""
    s, t = call["lengths"]
    b, h, g, d = (call[name] for name in ("batch", "heads", "groups", "width"))
    shapes = [(b, s, h, d), (b, t, g, d), (b, t, g, d), (b, s, h, d)]
    return [jnp.asarray(rng.standard_normal(shape), call["dtype"]) for shape in shapes]


def exact(arrays: Any, queries: Positions, keys: Positions, scores: Scores) -> dict[str, Any]:
    """What comes out, in float64; and of sums the sum of their terms' sizes."""
    q, k, v, do = (np.asarray(a, np.float64).swapaxes(1, 2) for a in arrays)  # [B, heads, S, D]
    shared = q.shape[1] // k.shape[1]
    k_h, v_h = np.repeat(k, shared, 1), np.repeat(v, shared, 1)
    x = q @ k_h.mT * scores.scale
    slope: Any = scores.scale
    if scores.softcap is not None:
        bent = np.tanh(x / scores.softcap)
        x, slope = scores.softcap * bent, scores.scale * (1 - bent**2)
    i, j = (np.atleast_2d(p.positions).astype(np.int64) for p in (queries, keys))
    low, high = flash_attention.differences(scores)
    difference = j[:, None] - i[:, :, None]
    allowed = (low <= difference) & (difference <= high)
    if queries.segments is not None and keys.segments is not None:
        allowed = allowed & (queries.segments[:, :, None] == keys.segments[:, None])
    x = np.where(allowed[:, None], x, -np.inf)
    top = x.max(-1, keepdims=True)
    p = np.exp(x - np.where(np.isfinite(top), top, 0))
    total = p.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (np.log(total) + top)[..., 0]
    p = p / np.where(total > 0, total, 1)
    o, dp = p @ v_h, do @ v_h.mT
    ds = p * (dp - np.sum(p * dp, -1, keepdims=True)) * slope

    def sums(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, ...]:
        """a @ b of each head, and the same of their sizes; [B, S, heads, D]."""

        def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
            return (a @ b).swapaxes(1, 2)

        return product(a, b), product(np.abs(a), np.abs(b))

    def of_groups(both: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
        return tuple(a.reshape(*a.shape[:2], -1, shared, a.shape[3]).sum(3) for a in both)

    return {
        "lse": lse.swapaxes(1, 2),
        "o": sums(p, v_h), "delta": np.sum(o * do, -1).swapaxes(1, 2),
        "dq": sums(ds, k_h), "dk": of_groups(sums(ds.mT, q)), "dv": of_groups(sums(p.mT, do)),
    }  # fmt: skip


def off(got: Any, want: Any, roundings: float, dtype: Any) -> float:
    """The largest error, in units of what is allowed."""
    value, size = want
    unit = float(jnp.finfo(dtype).eps) / 2
    bound = roundings * unit * size + 5e-5  # and what float16 makes of tiny terms
    return float(np.max(np.abs(np.asarray(got, np.float64) - value) / bound))


def program(call: dict[str, Any], wide: bool) -> Any:
    scores = call["scores"]

    def run(
        q: Any, k: Any, v: Any, do: Any, delta: Any, queries: Positions, keys: Positions
    ) -> Any:
        dtype = jnp.float32 if wide else q.dtype
        o, lse = flash_attention.forward(q, queries, k, v, keys, scores, dtype)
        gradients = flash_attention.backward(q, queries, k, v, keys, scores, lse, do, delta)
        return {"o": o, "lse": lse} | dict(zip(("dq", "dk", "dv"), gradients, strict=True))

    return jax.jit(run)


def check(
    call: dict[str, Any], wide: bool, rng: np.random.Generator, runs: int
) -> dict[str, float]:
    """The largest errors, by result."""
    f = None
    worst: dict[str, float] = collections.defaultdict(float)
    for _ in range(runs):
        both, arrays = parts(rng, call), operands(rng, call)
        want = exact(arrays, *both, call["scores"])
        # Of o before it is rounded: its rounding is not the kernel's to answer for.
        arrays.append(jnp.asarray(want["delta"], jnp.float32))
        if f is None:
            f = program(call, wide).lower(*arrays, *both).compile()
            assert f.as_text().count('custom_call_target="jflux_flash_attention') == 2
        first, again = (jax.tree.map(np.asarray, f(*arrays, *both)) for _ in range(2))
        lse, want_lse = first.pop("lse"), want["lse"]
        bits = again.pop("lse").tobytes() == lse.tobytes()
        empty = np.isneginf(want_lse)
        assert (np.isneginf(lse) == empty).all(), "the log-sum-exp of queries without keys"
        worst["lse"] = max(
            worst["lse"], float(np.max(np.abs(lse[~empty] - want_lse[~empty]), initial=0) / 2e-5)
        )
        for name, got in first.items():
            bits &= got.tobytes() == again[name].tobytes()
            roundings = 2 if name == "o" and not wide else 1
            worst[name] = max(worst[name], off(got, want[name], 1.1 * roundings, call["dtype"]))
        assert bits, "two runs differ"
    return dict(worst)


def check_loop(rng: np.random.Generator) -> float:
    """A loop of calls, each on the result of the one before, against the same in XLA's blocks."""
    call = draw(rng, 200) | {"width": 64, "lengths": [256, 256], "layout": "zigzag"}
    both, (q, k, v, _) = parts(rng, call), operands(rng, call)
    heads = call["groups"]
    q = q[:, :, :heads]

    def step(_: int, q: jax.Array) -> jax.Array:
        return flash_attention.forward(q, both[0], k, v, both[1], call["scores"], q.dtype)[0]

    def loop(q: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 20, step, q)

    got = np.asarray(jax.jit(loop)(q), np.float64)
    with jflux.config(fused=False):
        want = np.asarray(jax.jit(loop)(q), np.float64)
    return float(np.max(np.abs(got - want)) / (16 * float(jnp.finfo(q.dtype).eps)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", 1)[0])
    for name, default in (("calls", 200), ("seed", 0), ("ranks", 1)):
        parser.add_argument(f"--{name}", type=type(default), default=default)
    parser.add_argument("--limit", type=float, help="seconds")
    parser.add_argument("--portable", action="store_true", help="by portable code")
    args = parser.parse_args()
    if args.portable:
        jflux.config.update(unchecked_kernels=True)
        _config.override_for_good(arch=_native.FLOAT8_ARCH)
    limit = args.limit or (300 if args.ranks == 1 else 60)
    if jax.default_backend() != "gpu":
        print("there is no GPU")
        return 1
    if args.ranks > 1:
        import attention_ranks_gpu

        return attention_ranks_gpu.run(args.ranks, args.calls, args.seed, limit)
    begin, done, failures = time.monotonic(), 0, []
    worst: dict[str, float] = collections.defaultdict(float)
    with jflux.config(strict=True):
        for i in range(args.calls):
            rng = np.random.default_rng([args.seed, i])
            longest = 3000 if i % 20 == 19 else 500
            call, wide = draw(rng, longest), bool(rng.integers(2))
            try:
                for name, error in check(call, wide, rng, runs=2).items():
                    worst[name] = max(worst[name], error)
                    if not error <= 1:
                        failures.append(f"{name} is off by {error:.3g} of its bound: {call}")
            except AssertionError as error:
                failures.append(f"{error}: {call}")
            done += 1
            if done % 20 == 0 or failures:
                print(f"{done} of {args.calls}, {len(failures)} wrong", flush=True)
            if len(failures) > 5 or time.monotonic() - begin > limit:
                break
        for i in range(5):
            error = check_loop(np.random.default_rng([args.seed, 1000 + i]))
            worst["loops"] = max(worst["loops"], error)
            if not error <= 1:
                failures.append(f"a loop is off by {error:.3g} of its bound")
    for failure in failures:
        print(failure)
    print("result | largest error, of what is allowed")
    for name, error in worst.items():
        print(f"{name} | {error:.3f}")
    print(f"{done} calls of attention, {len(failures)} wrong, {time.monotonic() - begin:.0f} s")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
