"""The checks of dispatch_grouped_matmul and grouped_matmul_combine that tests/gathered_gpu.py
runs: by a gather, whose kernels get another routing on each rank, and by a dispatch."""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import random_checks
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from routed import draw_chosen, exact, rows_of_experts

import jflux
from jflux import testing

KERNELS = {
    "gather": ("all_gather_grouped_matmul", "grouped_matmul_reduce_scatter"),
    "dispatch": ("moe_dispatch", "moe_combine"),
}


def per_rank(mesh: Mesh, experts: int, exchange: str, gated: bool, out: Any = None) -> Any:
    """(x, ws, down, weights, chosen) -> all ranks' rows, and their tokens' sums."""

    def body(x: Any, ws: Any, down: Any, weights: Any, chosen: Any) -> Any:
        h, handle = jflux.dispatch_grouped_matmul(
            x, ws if gated else ws[0], chosen, num_experts=experts, axis_name="ep", gated=gated,
            activation="silu", exchange=exchange,
        )  # fmt: skip
        y = jflux.grouped_matmul_combine(
            h, down, handle, weights, axis_name="ep", preferred_element_type=out
        )
        return h, y

    return jax.shard_map(body, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))


def draw(
    rng: np.random.Generator, ranks: int, each: int, experts: int, choices: int, k: int, n: int,
    gated: bool, dtype: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """(x, ws, down, weights, chosen), exact in float64."""
    tokens = each * ranks
    x = exact(rng, (tokens, k), dtype)
    ws = [exact(rng, (experts, k, n), dtype, k**-0.5) for _ in range(1 + gated)]
    down = exact(rng, (experts, n, k), dtype, n**-0.5)
    weights = exact(rng, (tokens, choices), jnp.float32)
    return x, ws, down, weights, draw_chosen(rng, tokens, choices, experts)


def given(x: Any, ws: Any, down: Any, weights: Any, chosen: Any, dtype: Any) -> tuple[Any, ...]:
    """The operands on the device. Tokens without an expert, and weights of none, are NaN."""
    x = np.where((chosen < 0).all(1)[:, None], np.nan, x)
    weights = np.where(chosen < 0, np.nan, weights)
    narrow = jnp.asarray(x, dtype), [jnp.asarray(w, dtype) for w in ws], jnp.asarray(down, dtype)
    return *narrow, jnp.asarray(weights, jnp.float32), jnp.asarray(chosen)


def largest_error(drawn: tuple[Any, ...], ranks: int, h: Any, y: Any) -> float:
    """Of the rows, and of the sums of these rows, in the bounds of their types' roundings."""
    x, ws, down, weights, chosen = drawn
    experts, choices = down.shape[0] // ranks, chosen.shape[1]
    same = chosen[:, :, None] == chosen[:, None, :]
    repeated = (same & np.tril(np.ones((choices, choices), bool), -1)).any(2)
    weights = np.where(same & (chosen >= 0)[:, None, :], weights[:, None, :], 0).sum(2)
    total, size = np.zeros((len(x), down.shape[2])), np.zeros((len(x), down.shape[2]))
    worst = 0.0

    def in_bounds(found: Any, goal: Any, size: Any) -> float:
        bound = float(jnp.finfo(found.dtype).eps) + 2.0**-16
        error = np.abs(np.asarray(found, np.float64) - goal) / (bound * (size + 0.25))
        if not np.isfinite(error).all():
            raise AssertionError(f"not finite at {np.argwhere(~np.isfinite(error))[:4]}")
        return float(error.max(initial=0))

    for rank, rows in enumerate(np.split(np.asarray(h), ranks)):
        own = chosen - rank * experts
        own = np.where((own >= 0) & (own < experts) & ~repeated, own, -1)
        here = slice(rank * experts, (rank + 1) * experts)
        goal, count = rows_of_experts(x, [w[here] for w in ws], own, "silu")
        if (rows[count:] != 0).any():
            raise AssertionError("rows past the last one are not 0")
        worst = max(worst, in_bounds(rows[:count], goal[:count], np.abs(goal[:count])))
        order = np.argsort(own.reshape(-1), kind="stable")[own.size - count :]
        part = np.zeros_like(total)
        for expert in range(experts):
            its = np.flatnonzero(own.reshape(-1)[order] == expert)
            product = rows[its].astype(np.float64) @ down[rank * experts + expert]
            product *= weights.reshape(-1)[order[its], None]
            np.add.at(part, order[its] // choices, product)
            np.add.at(size, order[its] // choices, np.abs(product))
        total += part
        size += np.abs(part)
    return max(worst, in_bounds(y, total, size + np.abs(total)))


def check(seed: int, ranks: int) -> tuple[str, str, float]:
    """(what, form, largest error in its bounds) of one random program: twice on the same operands,
    then on others, with late ranks and workspaces full of NaN."""
    rng = np.random.default_rng(seed)
    mesh = Mesh(np.array(jax.devices()[:ranks]), ("ep",))
    exchange = ("gather", "gather", "dispatch")[rng.integers(3)]
    experts = ranks * int(rng.choice([1, 2, 4, 8, 30]))
    choices = int(rng.integers(1, min(8, experts) + 1))
    each = int(rng.choice([1, 3, 17, 64, 129, 700, 1024, 2500]))
    k, n = (8 * int(rng.choice([rng.integers(1, 60), 8, 9, 32, 33])) for _ in range(2))
    gated = bool(rng.integers(2))
    dtype = (jnp.bfloat16, jnp.float16)[rng.integers(2)]
    out = jnp.float32 if rng.integers(3) == 0 else None
    sizes: Any = (ranks, each, experts, choices, k, n, gated, dtype)
    drawn = draw(rng, *sizes)
    f = per_rank(mesh, experts, exchange, gated, out)
    program = jax.jit(f).lower(*given(*drawn, dtype)).compile()
    for kernel in KERNELS[exchange]:
        if f'custom_call_target="jflux_{kernel}"' not in program.as_text():
            raise AssertionError(f"the program does not have the kernel of {kernel}")
    worst, last = 0.0, None
    for i in range(5):
        if i >= 2:
            drawn = draw(rng, *sizes)
        if i == 3:
            testing.poison_workspaces()
        late = testing.planted_faults(max_delay_us=1500) if i >= 2 else contextlib.nullcontext()
        with late:
            h, y = jax.tree.map(np.asarray, program(*given(*drawn, dtype)))
        bits = h.tobytes(), y.tobytes()
        if i == 1 and bits != last:
            raise AssertionError("a second call gives other bits")
        last = bits
        if i != 1:
            worst = max(worst, largest_error(drawn, ranks, h, y))
        if worst > 1:
            raise AssertionError(f"run {i}: {worst:.3g} bounds off")
    form = f"{ranks} ranks{' gated' if gated else ''}{' f32' if out else ''}"
    return exchange, f"products, {form}", worst


def check_graphs(ranks: int, rounds: int = 4) -> tuple[str, str, float]:
    """Loops whose bodies XLA captures: each step has other tokens and other choices."""
    rng = np.random.default_rng(11)
    mesh = Mesh(np.array(jax.devices()[:ranks]), ("ep",))
    steps, experts, choices, k, n, each = 12, 4 * ranks, 2, 128, 64, 640
    one = {exchange: per_rank(mesh, experts, exchange, True) for exchange in KERNELS}

    def loop(xs: Any, ws: Any, down: Any, weights: Any, chosen: Any) -> Any:
        def step(count: Any, of_step: Any) -> Any:
            x, weights, chosen = of_step
            return count + 1, [f(x, ws, down, weights, chosen) for f in one.values()]

        return jax.lax.scan(step, 0, (xs, weights, chosen))[1]

    f, worst = jax.jit(loop), 0.0
    for _ in range(rounds):
        drawn = [
            draw(rng, ranks, each, experts, choices, k, n, True, jnp.bfloat16) for _ in range(steps)
        ]
        drawn = [(x, *drawn[0][1:3], weights, chosen) for x, _, _, weights, chosen in drawn]
        on_device = [given(*d, jnp.bfloat16) for d in drawn]
        xs, weights, chosen = (jnp.stack([d[i] for d in on_device]) for i in (0, 3, 4))
        for hs, ys in f(xs, *on_device[0][1:3], weights, chosen):
            for i in range(steps):
                worst = max(worst, largest_error(drawn[i], ranks, hs[i], ys[i]))
    if not worst <= 1:
        raise AssertionError(f"a replay is {worst:.3g} bounds off")
    return "graphs", f"products, {ranks} ranks", worst


def check_waits(ranks: int) -> tuple[str, str, float]:
    rng = np.random.default_rng(12)
    mesh = Mesh(np.array(jax.devices()[:ranks]), ("ep",))
    f = jax.jit(per_rank(mesh, 2 * ranks, "gather", True))

    def draw_args() -> tuple[Any, ...]:
        drawn = draw(rng, ranks, 1024, 2 * ranks, 2, 64, 64, True, jnp.bfloat16)
        return given(*drawn, jnp.bfloat16)

    random_checks.check_waits(lambda *args: f(*args)[1], draw_args)
    return "no waits", f"products, {ranks} ranks, must be wrong", 0.0
