"""Checks the kernels of moe_dispatch and moe_combine on several GPUs, on random calls against
float64; a table comes last:

python tests/dispatch_gpu.py [--calls 120] [--ranks 2] [--seed 0] [--limit 300] [--unchecked]

A call draws tokens (one, too, and some thousands), choices, experts, width, type, layout, capacity,
alignment and choices: balanced, with slots that have no expert, all for one expert, or of the first
tokens only. Each program runs five times: twice on the same operands, which must give the same
bits, then on others, with ranks that come late and workspaces full of NaN. Rows, weights and sizes
must be equal, sums within their rounding. Some calls also compare gradients with those of the form
of several ops. Before that come loops of calls, which XLA captures in graphs and replays, and calls
without waits: they must be wrong. It runs on CPUs too. --unchecked takes kernels that nobody has
checked on these GPUs.
"""

from __future__ import annotations

import functools
import os
import sys
from typing import Any

os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # no NVLink multicast

import jax
import jax.numpy as jnp
import numpy as np
import random_checks
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from routed import draw_chosen

import jflux
from jflux import testing
from jflux._ops.experts._dispatch_primitives import KernelHandle

TOKENS = (1, 2, 7, 32, 33, 100, 128, 300, 1024, 2500)
MOST_NUMBERS = 1 << 24


def per_rank(f: Any, ranks: int, **options: Any) -> Any:
    """f of [ranks, ...] arrays, jitted."""
    mesh = Mesh(np.array(jax.devices()[:ranks]), ("ep",), axis_types=(AxisType.Auto,))

    def local(*args: Any) -> Any:
        return jax.tree.map(lambda y: y[None], f(*(a[0] for a in args), **options))

    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("ep"), out_specs=P("ep")))


def there_and_back(x: Any, indices: Any, weights: Any, **options: Any) -> Any:
    d = jflux.moe_dispatch(x, indices, weights, axis_name="ep", partial_sums=True, **options)
    if jflux.config.fused and not isinstance(d.handle, KernelHandle):
        raise AssertionError("another form is taken")
    scaled = (d.rows * 2).astype(x.dtype)
    y = jflux.moe_combine(scaled, d.handle, axis_name="ep")
    weighted = jflux.moe_combine(
        scaled, d.handle, weights=weights, residual=x.astype(x.dtype), axis_name="ep"
    )
    return d.rows, d.weights, d.group_sizes, y, weighted


def wanted(
    x: np.ndarray, indices: np.ndarray, weights: np.ndarray, rows: int, options: dict[str, Any]
) -> list[np.ndarray]:
    """The same in float64, by the definition."""
    ranks, experts = len(x), options["num_experts"] // len(x)
    capacity, alignment = options.get("capacity"), options.get("alignment", 1)
    out = np.zeros((ranks, rows, x.shape[2]))
    row_weights, sizes = np.zeros((ranks, rows)), np.zeros((ranks, experts), np.int64)
    y, weighted = np.zeros(x.shape), x.copy()
    for rank in range(ranks):
        start = 0
        for e in range(experts):
            chose = indices == rank * experts + e
            src, token = np.nonzero(chose.any(2))
            src, token = src[:capacity], token[:capacity]
            sizes[rank, e] = count = len(src)
            weight = (weights * chose).sum(2)[src, token]
            out[rank, start : start + count] = x[src, token]
            row_weights[rank, start : start + count] = weight
            y[src, token] += 2 * x[src, token]
            weighted[src, token] += weight[:, None] * 2 * x[src, token]
            padded = -(-count // alignment) * alignment
            start += rows // experts if options.get("layout") == "masked" else padded
    return [out, row_weights, sizes, y, weighted]


def draw(
    rng: np.random.Generator, ranks: int, tokens: int, k: int, experts: int, shape: Any
) -> Any:
    """x, indices and weights; x are whole numbers, which no sum of two rounds."""
    indices = draw_chosen(rng, ranks * tokens, k, experts).reshape(ranks, tokens, k)
    x = rng.integers(-8, 9, (ranks, tokens, *shape)).astype(np.float64)
    weights = rng.integers(1, 5, indices.shape) / 4
    return x, indices, weights


def check(seed: int, ranks: int) -> tuple[str, str, float]:
    rng = np.random.default_rng(seed)
    tokens = int(TOKENS[rng.integers(len(TOKENS) if jax.default_backend() == "gpu" else 5)])
    k, local = int(rng.integers(1, 9)), int(rng.choice([1, 3, 8, 64, 128]))
    dtype = (jnp.bfloat16, jnp.float16, jnp.float32)[int(rng.integers(3))]
    width = 8 * int(rng.integers(1, 1025)) if tokens <= 300 else 8 * int(rng.integers(1, 65))
    k = min(k, ranks * local)
    if jax.default_backend() == "gpu":  # of float64 numbers of the rows of all ranks, on the host
        width = min(width, max(8, 8 * (MOST_NUMBERS // (8 * ranks**2 * tokens * min(k, local)))))
    options: dict[str, Any] = {"num_experts": ranks * local}
    if rng.random() < 0.4:
        options["capacity"] = int(rng.integers(1, tokens + 2))
    if rng.random() < 0.5:
        options["alignment"] = int(rng.choice([4, 8, 128]))
    if rng.random() < 0.4:
        options["layout"] = "masked"
    f = per_rank(there_and_back, ranks, **options)
    worst, last = 0.0, b""
    for i in range(5):
        if i != 1:
            drawn = draw(rng, ranks, tokens, k, ranks * local, (width,))
        args = [jnp.asarray(a, t) for a, t in zip(drawn, (dtype, "i4", "f4"), strict=True)]
        testing.poison_workspaces()
        with testing.planted_faults(max_delay_us=0 if i < 2 else 300 * i):
            found = [np.asarray(a, np.float64) for a in f(*args)]
        bits = b"".join(a.tobytes() for a in found)
        if i == 1 and bits != last:
            raise AssertionError("a second call gives other bits")
        last = bits
        found[:2] = [found[0].reshape(ranks, -1, width), found[1].reshape(ranks, -1)]
        goal = wanted(*drawn, found[1].shape[1], options)
        for name, a, b in zip(("rows", "weights", "sizes"), found, goal, strict=False):
            if not np.array_equal(a, b):
                raise AssertionError(f"run {i}: {name} differ at {np.argwhere(a != b)[:3]}")
        eps = float(jnp.finfo(dtype).eps)
        for a, b in zip(found[3:], goal[3:], strict=True):
            # Of each rank's sum, and of the result.
            error = np.abs(a - b) / (2 * eps * (np.abs(b) + 2 * 8 * 4 * k))
            worst = max(worst, float(np.nan_to_num(error, nan=np.inf).max()))
        if worst > 1:
            raise AssertionError(f"run {i}: sums are {worst:.3g} bounds off")
    if seed % 4 == 0 and tokens <= 128:
        check_gradients(ranks, options, args, eps)
    return np.dtype(dtype).name, options.get("layout", "expert"), worst


def check_gradients(ranks: int, options: dict[str, Any], args: Any, eps: float) -> None:
    """Against those of the form of several ops, which has been checked."""
    x, indices, weights = args

    def gradients(x: Any, indices: Any, weights: Any) -> Any:
        def loss(x: Any, weights: Any) -> Any:
            *_, y, weighted = there_and_back(x, indices, weights, **options)
            return jnp.sum(jnp.sin((y + weighted).astype(jnp.float32)))

        return jax.grad(loss, (0, 1))(x, weights)

    found = per_rank(gradients, ranks)(x, indices, weights)
    with jflux.config(fused=False, strict=False):
        goal = per_rank(functools.partial(gradients), ranks)(x, indices, weights)
    for got, want in zip(found, goal, strict=True):
        got, want = (np.asarray(a, np.float64) for a in (got, want))
        bound = 16 * eps * (np.abs(want) + np.abs(want).max(initial=0.25))
        if not (np.abs(got - want) <= bound).all():
            raise AssertionError(f"gradient: {np.abs(got - want).max():.3g} off")


def check_graphs(ranks: int, rounds: int = 4) -> tuple[str, str, float]:
    """Loops whose bodies XLA captures: each step has other tokens and other choices."""
    rng = np.random.default_rng(7)
    steps, tokens, k, experts, width = 24, 96, 4, 8 * ranks, 512

    def body(xs: Any, chosen: Any) -> Any:
        def step(count: Any, each: Any) -> Any:
            x, indices = each
            weights = jnp.ones(indices.shape, jnp.float32)
            return count + 1, there_and_back(x, indices, weights, num_experts=experts)[3]

        return jax.lax.scan(step, 0, (xs, chosen))[1]

    f = per_rank(body, ranks)
    for _ in range(rounds):
        xs = rng.integers(-8, 9, (ranks, steps, tokens, width)).astype(np.float64)
        chosen = np.stack(
            [draw_chosen(rng, steps * tokens, k, experts).reshape(steps, tokens, k)] * ranks
        )
        ys = np.asarray(f(jnp.asarray(xs, jnp.bfloat16), jnp.asarray(chosen)), np.float64)
        different = np.array(
            [len({e for e in slots if e >= 0}) for slots in chosen.reshape(-1, k).tolist()]
        ).reshape(chosen.shape[:3])
        if not np.array_equal(ys, 2 * xs * different[..., None]):
            raise AssertionError("a replay gives other sums")
    return "graphs", "bfloat16, exact", 0.0


def check_waits(ranks: int) -> tuple[str, str, float]:
    rng = np.random.default_rng(9)
    f = per_rank(there_and_back, ranks, num_experts=4 * ranks)

    def draw_args() -> tuple[Any, ...]:
        drawn = draw(rng, ranks, 200, 3, 4 * ranks, (1024,))
        types = ("bfloat16", "i4", "f4")
        return tuple(jnp.asarray(a, t) for a, t in zip(drawn, types, strict=True))

    random_checks.check_waits(lambda *args: f(*args)[3], draw_args)
    return "no waits", "must be wrong", 0.0


def main() -> int:
    parser = random_checks.parser(__doc__, calls=120, limit=300)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--unchecked", action="store_true")
    args = parser.parse_args()
    jflux.config.update(strict=True, always=True, unchecked_kernels=args.unchecked)
    jflux.init(deadline_seconds=20)  # a rank that hangs is told of soon
    checks = random_checks.Checks(args.limit)
    checks.run("graphs", check_graphs, args.ranks)
    checks.run("waits", check_waits, args.ranks)
    for seed in range(args.seed, args.seed + args.calls):
        if not checks.go_on():
            break
        checks.run(f"seed {seed}", check, seed, args.ranks)
    return checks.report("type", "layout")


if __name__ == "__main__":
    sys.exit(main())
