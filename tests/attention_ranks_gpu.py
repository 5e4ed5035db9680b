"""Checks all_gather_attention's kernel (cc/ops/all_gather_attention) on several GPUs, on random
calls of jflux.attention against float64: `python tests/attention_gpu.py --ranks 2`.

A call draws what tests/attention_gpu.py draws; masks that cuDNN's parts would take have a window as
long as the sequence. Each program runs six times: twice on the same operands, which must give the
same bits, then on others, with ranks that come late and workspaces full of NaN. Some calls compare
gradients with those of XLA's blocks. Last come loops of calls, which XLA captures in graphs and
replays, calls that need no keys of later ranks, and calls without waits: they must be wrong.
"""

from __future__ import annotations

import collections
import time
from typing import Any

import attention_gpu as one
import jax
import jax.numpy as jnp
import numpy as np
import random_checks
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jflux
from jflux import testing
from jflux._ops.attention import all_gather_attention
from jflux._ops.attention._blockwise import Positions, Scores

SEQUENCE = P(None, "cp")


def draw(rng: np.random.Generator, ranks: int, longest: int) -> dict[str, Any]:
    """A call. Both lengths are of the sequence, on all ranks."""
    own = 2 * int(rng.integers(1, longest // 2))
    call = one.draw(rng, longest)
    layout = str(rng.choice(["zigzag", "striped", "contiguous"]))
    scores: Scores = call["scores"]
    window = scores.window or (ranks * own, ranks * own)
    return call | {
        "lengths": [ranks * own] * 2, "layout": layout,
        "scores": Scores(scores.scale, scores.softcap, scores.causal, window),
    }  # fmt: skip


def part(rng: np.random.Generator, call: dict[str, Any], ranks: int) -> Positions:
    """Of all ranks, in their order."""
    length = call["lengths"][0]
    ids = None
    if call["segments"]:
        ids = rng.integers(0, call["segments"], (call["batch"], length)).astype(np.int32)
        ids = np.sort(ids, 1) if rng.integers(2) else ids
    return Positions(np.asarray(jflux.causal_positions(length, ranks, layout=call["layout"])), ids)


def attention(call: dict[str, Any], ranks: int, has_segments: bool) -> Any:
    """(q, k, v[, segments]) -> (o, log-sum-exp), of all ranks."""
    scores: Scores = call["scores"]

    def attend(q: Any, k: Any, v: Any, ids: Any = None) -> Any:
        return jflux.attention(
            q, k, v, axis_name="cp", causal=scores.causal, layout=call["layout"],
            window=scores.window, segment_ids=ids, scale=scores.scale, softcap=scores.softcap,
            return_lse=True, form="gather",
        )  # fmt: skip

    return jax.shard_map(
        attend, mesh=Mesh(np.array(jax.devices()[:ranks]), ("cp",)),
        in_specs=(SEQUENCE,) * (3 + has_segments), out_specs=(SEQUENCE, SEQUENCE),
    )  # fmt: skip


def taken(f: Any, *arrays: Any) -> Any:
    """The compiled program, which must take the kernel once."""
    program = jax.jit(f).lower(*arrays).compile()
    count = program.as_text().count(f'custom_call_target="jflux_{all_gather_attention.OP}"')
    assert count == 1, f"{count} calls of the kernel"
    return program


def check(seed: int, ranks: int, longest: int) -> dict[str, float]:
    """The largest errors of a random call, by result."""
    rng = np.random.default_rng([seed, 77])
    call = draw(rng, ranks, longest)
    f = None
    worst: dict[str, float] = collections.defaultdict(float)
    for late in (0, 0, 300):
        both, (q, k, v, do) = part(rng, call, ranks), one.operands(rng, call)
        want = one.exact((q, k, v, do), both, both, call["scores"])
        arrays = [q, k, v] + ([] if both.segments is None else [jnp.asarray(both.segments)])
        f = f or taken(attention(call, ranks, both.segments is not None), *arrays)
        testing.poison_workspaces()
        with testing.planted_faults(max_delay_us=late):
            (o, lse), again = (jax.tree.map(np.asarray, f(*arrays)) for _ in range(2))
        assert o.tobytes() == again[0].tobytes(), f"two runs differ: {call}"
        assert lse.tobytes() == again[1].tobytes(), f"two runs differ: {call}"
        empty = np.isneginf(want["lse"])
        assert (np.isneginf(lse) == empty).all(), f"queries without keys: {call}"
        of_lse = np.max(np.abs(lse[~empty] - want["lse"][~empty]), initial=0) / 2e-5
        worst["lse"] = max(worst["lse"], float(of_lse))
        worst["o"] = max(worst["o"], one.off(o, want["o"], 2.2, call["dtype"]))
    if seed % 4 == 0:
        worst["gradients"] = check_gradients(call, ranks, arrays, do)
    for name, error in worst.items():
        assert error <= 1, f"{name} is off by {error:.3g} of its bound: {call}"
    return dict(worst)


def check_gradients(call: dict[str, Any], ranks: int, arrays: Any, do: Any) -> float:
    """Those that follow the kernel's o and log-sum-exp, against those of XLA's blocks."""
    f = attention(call, ranks, len(arrays) == 4)

    def pulled(q: Any, k: Any, v: Any, *ids: Any) -> Any:
        return jax.vjp(lambda *qkv: f(*qkv, *ids)[0], q, k, v)[1](do)

    got = jax.jit(pulled)(*arrays)
    with jflux.config(fused=False):
        want = jax.jit(lambda *a: pulled(*a))(*arrays)
    worst = 0.0
    for a, b in zip(got, want, strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        bound = 16 * float(jnp.finfo(do.dtype).eps) * (np.abs(b) + np.abs(b).max(initial=0.25))
        worst = max(worst, float(np.max(np.abs(a - b) / bound)))
    return worst


def _small(ranks: int, causal: bool, layout: str) -> dict[str, Any]:
    own = 384
    return {
        "batch": 1, "lengths": [ranks * own] * 2, "groups": 2, "heads": 4, "width": 64,
        "layout": layout, "segments": 0, "dtype": jnp.bfloat16,
        "scores": Scores(0.125, None, causal, (ranks * own, ranks * own)),
    }  # fmt: skip


def check_graphs(ranks: int) -> dict[str, float]:
    """Loops whose bodies XLA captures: each step's queries are the result of the one before."""
    rng = np.random.default_rng(5)
    call = _small(ranks, True, "zigzag")
    q, k, v, _ = one.operands(rng, call)
    f = attention(call, ranks, False)

    def loop(q: Any, k: Any, v: Any) -> Any:
        def step(_: int, q: Any) -> Any:
            return f(q, k, v)[0] + f(-q, k, v)[0]

        return jax.lax.fori_loop(0, 24, step, q)

    program = jax.jit(loop)
    runs = [np.asarray(program(q, k, v)) for _ in range(4)]
    assert all(r.tobytes() == runs[0].tobytes() for r in runs), "two replays differ"
    with jflux.config(fused=False):
        want = np.asarray(jax.jit(lambda *a: loop(*a))(q, k, v), np.float64)
    error = np.max(np.abs(np.asarray(runs[0], np.float64) - want)) / (16 * 2.0**-7)
    assert error <= 1, f"a replay is {error:.3g} bounds off"
    return {"graphs": float(error)}


def check_ahead(ranks: int) -> dict[str, float]:
    """In order, a causal mask needs nothing of later ranks; still no rank may run ahead."""
    call = _small(ranks, True, "contiguous")
    f = None
    worst = 0.0
    for seed in range(12):
        rng = np.random.default_rng([seed, 6])
        both, (q, k, v, do) = part(rng, call, ranks), one.operands(rng, call)
        f = f or taken(attention(call, ranks, False), q, k, v)
        with testing.planted_faults(max_delay_us=3000):
            results = [f(q, k, v) for _ in range(4)]
        want = one.exact((q, k, v, do), both, both, call["scores"])["o"]
        for o, _ in results:
            worst = max(worst, one.off(np.asarray(o), want, 2.2, jnp.bfloat16))
    assert worst <= 1, f"{worst:.3g} bounds off"
    return {"ahead": worst}


def check_waits(ranks: int) -> dict[str, float]:
    call = _small(ranks, False, "contiguous")
    rng = np.random.default_rng(8)

    def draw() -> tuple[Any, ...]:
        return tuple(one.operands(rng, call)[:3])

    f = taken(attention(call, ranks, False), *draw())
    random_checks.check_waits(lambda *args: f(*args)[0], draw)
    return {"no waits, must be wrong": 0.0}


def longest_of(seed: int, ranks: int) -> int:
    """The most positions of a rank in a random call. The reference's scores, in float64, have the
    square of all ranks' positions: at most as many as those of two ranks."""
    return max(400, 3000 // ranks) if seed % 10 == 9 else 400


def run(ranks: int, calls: int, seed: int, limit: float) -> int:
    """All of it, in about `limit` seconds. Prints the table; 1 if anything is wrong."""
    if len(jax.devices()) < ranks:
        print(f"there are {len(jax.devices())} devices")
        return 1
    jflux.config.update(strict=True, always=True)
    jflux.init(deadline_seconds=20)  # a rank that hangs is told of soon
    begin, done, wrong = time.monotonic(), 0, []
    worst: dict[str, float] = collections.defaultdict(float)

    def attempt(what: str, of: Any, *given: Any) -> bool:
        """False: the device is lost."""
        try:
            for name, error in of(*given).items():
                worst[name] = max(worst[name], error)
        except Exception as error:
            wrong.append(f"{what}: {type(error).__name__}: {str(error)[:500]}")
            print(wrong[-1], flush=True)
            return not isinstance(error, jax.errors.JaxRuntimeError)
        return True

    alive = all(attempt(of.__name__, of, ranks) for of in (check_ahead, check_graphs, check_waits))
    for i in range(seed, seed + calls):
        if not alive or len(wrong) > 5 or time.monotonic() - begin > limit:
            break
        alive = attempt(f"seed {i}", check, i, ranks, longest_of(i, ranks))
        done += 1
    print("result | largest error, of what is allowed")
    for name, error in worst.items():
        print(f"{name} | {error:.3f}")
    print(
        f"{done} calls of all_gather_attention on {ranks} ranks, {len(wrong)} wrong, "
        f"{time.monotonic() - begin:.0f} s"
    )
    return int(bool(wrong) or not done)
