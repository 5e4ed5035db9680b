"""The checks of moe.grouped_matmul_reduce_scatter's kernel that tests/gathered_gpu.py runs."""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import random_checks
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from routed import TILES, draw_chosen, exact

from jflux import moe, testing
from jflux._call import tuning_tables
from jflux._ops._scaled import BLOCK
from jflux._ops._wire import WIRES
from jflux._ops.experts import grouped_matmul_reduce_scatter
from jflux._stress.collectives import half_step


def wanted(
    h: Any, w: Any, weights: Any, chosen: Any, ranks: int, wire: str | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(the sums, what their roundings are relative to, what a wire puts them off), in float64."""
    choices = chosen.shape[1]
    slots = chosen.reshape(-1)
    order = np.argsort(slots, kind="stable")
    order = order[slots[order] >= 0]
    k = h.shape[1] // ranks
    out = np.zeros((len(chosen), w.shape[2]))
    size, off = np.zeros_like(out), np.zeros_like(out)
    for rank in range(ranks):
        part = np.zeros_like(out)
        for expert in np.unique(slots[order]):
            rows = np.flatnonzero(slots[order] == expert)
            columns = slice(rank * k, (rank + 1) * k)
            y = h[rows, columns] @ w[expert, columns]
            y *= weights.reshape(-1)[order[rows], None]
            np.add.at(part, order[rows] // choices, y)
            np.add.at(size, order[rows] // choices, np.abs(y))
        out += part
        size += np.abs(part)
        if wire is not None:
            # Blocks of its own tokens are not quantised. Sums may be off by their rounding.
            step = half_step(part, wire) * (1 + 1e-3)
            step[len(chosen) // ranks * rank :][: len(chosen) // ranks] = 0
            off += step
    return out, size + np.abs(out), off


def per_rank(mesh: Mesh, experts: int, **options: Any) -> Any:
    """(h, w, weights, chosen) -> the sums of all ranks."""

    def body(h: Any, w: Any, weights: Any, chosen: Any) -> Any:
        routing = moe.route(chosen, experts)
        return moe.grouped_matmul_reduce_scatter(h, w, routing, weights, axis_name="tp", **options)

    rows = P(None, None, "tp") if options.get("transpose_rhs") else P(None, "tp")
    return jax.shard_map(
        body, mesh=mesh, in_specs=(P(None, "tp"), rows, P(), P()), out_specs=P("tp")
    )


def given(h: Any, w: Any, weights: Any, chosen: Any, dtype: Any, turned: bool) -> tuple[Any, ...]:
    """The operands on the device. Rows that no slot has, and weights without a row, are NaN."""
    rows = (chosen >= 0).sum()
    h = np.where(np.arange(len(h))[:, None] < rows, h, np.nan)
    weights = np.where(chosen >= 0, weights, np.nan)
    w = w.swapaxes(1, 2) if turned else w
    return (
        jnp.asarray(h, dtype), jnp.asarray(w, dtype), jnp.asarray(weights, jnp.float32),
        jnp.asarray(chosen),
    )  # fmt: skip


def check(seed: int, ranks: int) -> tuple[str, str, float]:
    """(tile, form, largest error in its bounds) of one random program: twice on the same operands,
    then on others, with late ranks and workspaces full of NaN."""
    rng = np.random.default_rng(seed)
    on_gpus = jax.default_backend() == "gpu"  # CPUs have no kernel for one rank
    world = 1 if on_gpus and seed % 7 == 6 else ranks
    mesh = Mesh(np.array(jax.devices()[:world]), ("tp",))
    experts = int(rng.choice([1, 2, 4, 8, 60]))
    choices = int(rng.integers(1, 9))
    each = int(rng.choice([1, 3, 17, 64, 129, 700, 1024, 2500]))
    k, n = (8 * int(rng.choice([rng.integers(1, 60), 8, 9, 32, 33])) for _ in range(2))
    turned = bool(rng.integers(2))
    dtype = (jnp.bfloat16, jnp.float16)[rng.integers(2)]
    out = jnp.float32 if rng.integers(3) == 0 else dtype
    tile = TILES[rng.integers(len(TILES))]
    wire = (*WIRES, None)[rng.integers(3)]
    if wire is not None:
        n, tile = BLOCK * int(rng.integers(1, 6)), None
    tokens = each * world

    def draw() -> tuple[Any, ...]:
        h = exact(rng, (tokens * choices, k * world), dtype)
        w = exact(rng, (experts, k * world, n), dtype, k**-0.5)
        weights = exact(rng, (tokens, choices), jnp.float32)
        return h, w, weights, draw_chosen(rng, tokens, choices, experts)

    drawn = draw()
    f = per_rank(mesh, experts, transpose_rhs=turned, preferred_element_type=out, wire=wire)
    forced = (
        tuning_tables.force(tuning_tables.Choice(*tile, 8)) if tile else contextlib.nullcontext()
    )
    with forced:
        program = jax.jit(f).lower(*given(*drawn, dtype, turned)).compile()
    if f'custom_call_target="jflux_{grouped_matmul_reduce_scatter.OP}"' not in program.as_text():
        raise AssertionError("the program does not have the kernel")
    fine = float(jnp.finfo(out).eps) + 2.0**-16
    worst, last = 0.0, None
    for i in range(5):
        if i >= 2:
            drawn = draw()
        if i == 3:
            testing.poison_workspaces()
        late = testing.planted_faults(max_delay_us=1500) if i >= 2 else contextlib.nullcontext()
        with late:
            y = np.asarray(program(*given(*drawn, dtype, turned)))
        if i == 1 and y.tobytes() != last:
            raise AssertionError("a second call gives other bits")
        last = y.tobytes()
        if i == 1:
            continue
        goal, size, off = wanted(*drawn, world, wire)
        error = np.abs(y.astype(np.float64) - goal) / (fine * (size + 0.25) + off)
        at = np.argwhere(~(error <= 1))  # not finite, too
        if len(at):
            raise AssertionError(f"run {i}: {error.max():.3g} bounds, {len(at)} places, {at[:4]}")
        worst = max(worst, float(error.max(initial=0)))
    name = "x".join(map(str, tile or ("chosen",)))
    form = f"scatter, {world} ranks" + (" f32" if out != dtype else "")
    return name, form + (f" {wire}" if wire else ""), worst


def check_graphs(ranks: int, rounds: int = 6) -> tuple[str, str, float]:
    """Loops whose bodies XLA captures: each step has other rows and another routing."""
    rng = np.random.default_rng(8)
    mesh = Mesh(np.array(jax.devices()[:ranks]), ("tp",))
    steps, experts, choices, k, n = 24, 4, 2, 64, 128
    tokens = 640 * ranks

    def body(hs: Any, w: Any, weights: Any, chosen: Any) -> Any:
        def step(count: Any, each: Any) -> Any:
            h, weights, chosen = each
            routing = moe.route(chosen, experts)
            ys = [
                moe.grouped_matmul_reduce_scatter(h * s, w, routing, weights, axis_name="tp")
                for s in (2.0, -1.0, 0.5)
            ]
            return count + 1, ys

        return jax.lax.scan(step, 0, (hs, weights, chosen))[1]

    f = jax.jit(
        jax.shard_map(
            body, mesh=mesh, in_specs=(P(None, None, "tp"), P(None, "tp"), P(), P()),
            out_specs=P(None, "tp"),
        )
    )  # fmt: skip
    worst = 0.0
    for _ in range(rounds):
        hs = exact(rng, (steps, tokens * choices, k * ranks), jnp.bfloat16)
        w = exact(rng, (experts, k * ranks, n), jnp.bfloat16, k**-0.5)
        weights = exact(rng, (steps, tokens, choices), jnp.float32)
        chosen = np.stack([draw_chosen(rng, tokens, choices, experts) for _ in range(steps)])
        ys = f(
            jnp.asarray(hs, jnp.bfloat16), jnp.asarray(w, jnp.bfloat16),
            jnp.asarray(weights, jnp.float32), chosen,
        )  # fmt: skip
        for i in range(steps):
            goal, size, _ = wanted(hs[i], w, weights[i], chosen[i], ranks)
            for s, y in zip((2.0, -1.0, 0.5), ys, strict=True):
                error = np.abs(np.asarray(y[i], np.float64) - s * goal)
                worst = max(worst, float((error / (2.0**-7 * (abs(s) * size + 0.25))).max()))
    if not worst <= 1:
        raise AssertionError(f"a replay is {worst:.3g} bounds off")
    return "graphs", f"scatter, {ranks} ranks", worst


def check_waits(ranks: int) -> tuple[str, str, float]:
    rng = np.random.default_rng(10)
    mesh = Mesh(np.array(jax.devices()[:ranks]), ("tp",))

    def draw() -> tuple[Any, ...]:
        drawn = (
            exact(rng, (2048 * ranks, 64 * ranks), jnp.bfloat16),
            exact(rng, (2, 64 * ranks, 64), jnp.bfloat16),
            exact(rng, (1024 * ranks, 2), jnp.float32),
            draw_chosen(rng, 1024 * ranks, 2, 2),
        )
        return given(*drawn, jnp.bfloat16, False)

    random_checks.check_waits(jax.jit(per_rank(mesh, 2)), draw)
    return "no waits", f"scatter, {ranks} ranks, must be wrong", 0.0
