"""Checks the kernels of moe.all_gather_grouped_matmul and moe.grouped_matmul_reduce_scatter, with
every tile that is compiled, on one GPU and on several, on random calls against float64, and both
in dispatch_grouped_matmul and grouped_matmul_combine; a table comes last:

python tests/gathered_gpu.py [--only gather|scatter|products] [--calls 160] [--ranks 2] [--seed 0]
    [--limit 400] [--portable]

A call draws the number of tokens (odd, too), choices, experts (some hundreds, too), widths, type,
tile, epilogue and routing: balanced, with slots that have no expert, all for one expert, or of the
first tokens only. Tokens that nobody chose are NaN. Each program runs five times: twice on the same
operands, which must give the same bits, then on other operands and routings, with ranks that come
late and workspaces full of NaN. Some calls also compare gradients with those of the two steps:
those of all_gather_grouped_matmul take the other kernel. Last come loops of calls, which XLA
captures in graphs and replays, and calls without waits: they must be wrong.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
from typing import Any

os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # no NVLink multicast

import jax
import jax.numpy as jnp
import numpy as np
import products_gpu as products
import random_checks
import scattered_gpu as scattered
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from routed import TILES, draw_chosen, draw_many, exact, rows_of_experts

import jflux
from jflux import _config, _native, moe, testing
from jflux._call import tuning_tables
from jflux._ops.experts import all_gather_grouped_matmul

WAYS = (
    {}, {}, {"activation": "silu", "gated": True}, {"activation": "silu", "gated": True},
    {"activation": "gelu_tanh"}, {"activation": "relu", "gated": True},
)  # fmt: skip


def per_rank(mesh: Mesh, experts: int, count: int, **options: Any) -> Any:
    """(x, weights, chosen) -> y, with the columns of all ranks."""

    def body(x: Any, ws: Any, chosen: Any) -> Any:
        routing = moe.route(chosen, experts)
        w = ws if count == 2 else ws[0]
        return moe.all_gather_grouped_matmul(x, w, routing, axis_name="tp", **options)

    columns = P(None, "tp") if options.get("transpose_rhs") else P(None, None, "tp")
    return jax.shard_map(
        body, mesh=mesh, in_specs=(P("tp"), [columns] * count, P()), out_specs=P(None, "tp")
    )


def check(seed: int, ranks: int) -> tuple[str, str, float]:
    """(tile, form, largest error in its bounds) of one random program."""
    rng = np.random.default_rng(seed)
    on_gpus = jax.default_backend() == "gpu"  # CPUs have no kernel for one rank
    world = 1 if on_gpus and seed % 5 == 4 else ranks
    mesh = Mesh(np.array(jax.devices()[:world]), ("tp",))
    experts = int(rng.choice([1, 2, 4, 8, 60]))
    choices = int(rng.integers(1, 5))
    each = int(rng.choice([1, 3, 17, 64, 129, 700, 1024, 2500]))
    k, n = (8 * int(rng.choice([rng.integers(1, 60), 8, 9, 32, 33])) for _ in range(2))
    if on_gpus and world > 1 and seed % 8 == 6:
        (experts, choices, each), k, n = draw_many(rng, world), 72, 32
    way = dict(WAYS[rng.integers(len(WAYS))])
    activation, gated = way.get("activation"), way.get("gated", False)
    turned = bool(rng.integers(2))
    dtype = (jnp.bfloat16, jnp.float16)[rng.integers(2)]
    out = jnp.float32 if rng.integers(3) == 0 else dtype
    tile = TILES[rng.integers(len(TILES))]
    if gated and tile == (192, 1):
        tile = None
    tokens = each * world
    with_gradients = seed % 4 == 1 and out == dtype

    def draw() -> tuple[Any, ...]:
        x = exact(rng, (tokens, k), dtype)
        ws = [exact(rng, (experts, k, n * world), dtype, k**-0.5) for _ in range(1 + gated)]
        return x, ws, draw_chosen(rng, tokens, choices, experts)

    f = per_rank(mesh, experts, 1 + gated, transpose_rhs=turned, preferred_element_type=out, **way)

    def given(x: Any, ws: Any, chosen: Any) -> tuple[Any, ...]:
        unused = (chosen < 0).all(1)
        x = np.where(unused[:, None], np.nan, x)
        ws = [jnp.asarray(w.swapaxes(1, 2) if turned else w, dtype) for w in ws]
        return jnp.asarray(x, dtype), ws, jnp.asarray(chosen)

    drawn = draw()
    forced = (
        tuning_tables.force(tuning_tables.Choice(*tile, 8)) if tile else contextlib.nullcontext()
    )
    with forced:
        program = jax.jit(f).lower(*given(*drawn)).compile()
    if f'custom_call_target="jflux_{all_gather_grouped_matmul.OP}"' not in program.as_text():
        raise AssertionError("the program does not have the kernel")
    worst = 0.0
    fine = float(jnp.finfo(out).eps) + 2.0**-16
    last = None
    for i in range(5):
        if i >= 2:
            drawn = draw()
        if i == 3:
            testing.poison_workspaces()
        late = testing.planted_faults(max_delay_us=1500) if i >= 2 else contextlib.nullcontext()
        with late:
            y = np.asarray(program(*given(*drawn)))
        if i == 1 and y.tobytes() != last:
            raise AssertionError("a second call gives other bits")
        last = y.tobytes()
        if i == 1:
            continue
        goal, rows = rows_of_experts(*drawn, activation)
        found = y.astype(np.float64)
        if not np.isfinite(found).all():
            raise AssertionError(f"run {i}: not finite at {np.argwhere(~np.isfinite(found))[:4]}")
        if (found[rows:] != 0).any():
            raise AssertionError(f"run {i}: rows past the sum are not 0")
        error = np.abs(found - goal) / (fine * (np.abs(goal) + 0.25))
        worst = max(worst, float(error.max(initial=0)))
        if worst > 1:
            at = np.argwhere(error > 1)
            raise AssertionError(f"run {i}: {worst:.3g} bounds off, {len(at)} places, {at[:4]}")
    if with_gradients:
        check_gradients(f, given(*drawn), float(jnp.finfo(dtype).eps))
    name = "x".join(map(str, tile or ("chosen",)))
    form = f"{world} ranks {activation or 'plain'}{' gated' if gated else ''}"
    return name, form + (" f32" if out != dtype else ""), worst


def check_gradients(f: Any, args: Any, eps: float) -> None:
    """Against those of `lax`. NaN is for values."""
    x, ws, chosen = args
    x = jnp.nan_to_num(x)

    def both(x: Any, ws: Any) -> Any:
        y, pull = jax.vjp(lambda x, ws: f(x, ws, chosen), x, ws)
        return pull(jnp.sin(3 * y))

    found = jax.jit(both)(x, ws)
    with jflux.config(fused=False, strict=False):
        goal = jax.jit(lambda x, ws: both(x, ws))(x, ws)
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(goal), strict=True):
        got, want = (np.asarray(a.astype(jnp.float32), np.float64) for a in (got, want))
        bound = 16 * eps * (np.abs(want) + np.abs(want).max(initial=0.25))
        if not (np.abs(got - want) <= bound).all():
            raise AssertionError(f"gradient: {np.abs(got - want).max():.3g} off")


def check_graphs(ranks: int, rounds: int = 6) -> tuple[str, str, float]:
    """Loops whose bodies XLA captures: each step has other tokens and another routing."""
    rng = np.random.default_rng(7)
    mesh = Mesh(np.array(jax.devices()[:ranks]), ("tp",))
    steps, experts, choices, k, n = 24, 4, 2, 128, 64
    tokens = 640 * ranks

    def body(xs: Any, w: Any, chosen: Any) -> Any:
        def step(count: Any, each: Any) -> Any:
            x, chosen = each
            routing = moe.route(chosen, experts)
            ys = [
                2 * moe.all_gather_grouped_matmul(x * s, w, routing, axis_name="tp")
                for s in (2.0, -1.0, 0.5)
            ]
            return count + 1, ys

        return jax.lax.scan(step, 0, (xs, chosen))[1]

    f = jax.jit(
        jax.shard_map(
            body, mesh=mesh, in_specs=(P(None, "tp"), P(None, None, "tp"), P()),
            out_specs=P(None, None, "tp"),
        )
    )  # fmt: skip
    worst = 0.0
    for _ in range(rounds):
        xs = exact(rng, (steps, tokens, k), jnp.bfloat16)
        w = exact(rng, (experts, k, n * ranks), jnp.bfloat16, k**-0.5)
        chosen = np.stack([draw_chosen(rng, tokens, choices, experts) for _ in range(steps)])
        ys = f(jnp.asarray(xs, jnp.bfloat16), jnp.asarray(w, jnp.bfloat16), chosen)
        for s, y in zip((2.0, -1.0, 0.5), ys, strict=True):
            for i in range(steps):
                goal, _ = rows_of_experts(xs[i], [w], chosen[i], None)
                error = np.abs(np.asarray(y[i], np.float64) - 2 * s * goal)
                worst = max(worst, float((error / (2.0**-7 * (np.abs(2 * s * goal) + 1))).max()))
    if not worst <= 1:
        raise AssertionError(f"a replay is {worst:.3g} bounds off")
    return "graphs", f"{ranks} ranks", worst


def check_waits(ranks: int) -> tuple[str, str, float]:
    rng = np.random.default_rng(9)
    mesh = Mesh(np.array(jax.devices()[:ranks]), ("tp",))

    def draw() -> tuple[Any, ...]:
        x = exact(rng, (1024 * ranks, 64), jnp.bfloat16)
        w = exact(rng, (2, 64, 64 * ranks), jnp.bfloat16)
        chosen = draw_chosen(rng, 1024 * ranks, 2, 2)
        return jnp.asarray(x, jnp.bfloat16), [jnp.asarray(w, jnp.bfloat16)], jnp.asarray(chosen)

    random_checks.check_waits(jax.jit(per_rank(mesh, 2, 1)), draw)
    return "no waits", f"{ranks} ranks, must be wrong", 0.0


def main() -> int:
    parser = random_checks.parser(__doc__, calls=160, limit=400)
    parser.add_argument("--only", choices=("gather", "scatter", "products"))
    parser.add_argument("--ranks", type=int, default=min(2, len(jax.devices())))
    parser.add_argument("--portable", action="store_true", help="by portable code")
    args = parser.parse_args()
    jflux.config.update(strict=True, always=True, unchecked_kernels=args.portable)
    if args.portable:
        _config.override_for_good(arch=_native.PORTABLE_ARCH)
    jflux.init(deadline_seconds=20)  # a rank that hangs is told of soon
    checks = random_checks.Checks(args.limit)
    ops = {
        "gather": (check, check_graphs, check_waits),
        "scatter": (scattered.check, scattered.check_graphs, scattered.check_waits),
        "products": (products.check, products.check_graphs, products.check_waits),
    }
    chosen = {name: of for name, of in ops.items() if args.only in (None, name)}
    # What there is once comes first, so that a short --limit leaves out random programs alone.
    for name, (_, graphs, waits) in chosen.items():
        checks.run(f"{name}, graphs", graphs, args.ranks)
        if args.ranks > 1:
            checks.run(f"{name}, waits", waits, args.ranks)
    seeds = range(args.seed, args.seed + args.calls)
    for seed, (name, (one, _, _)) in itertools.product(seeds, chosen.items()):
        if not checks.go_on():
            break
        checks.run(f"{name}, seed {seed}", one, seed, args.ranks)
    return checks.report("tile", "form")


if __name__ == "__main__":
    sys.exit(main())
