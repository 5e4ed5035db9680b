"""Times moe.all_gather_grouped_matmul on GPUs; the table comes last.

python -m bench.gathered --ranks 2 --out bench/results/2xh100_gathered.json [--lists mixtral,qwen3]

The first product of a mixture whose experts' hidden units are split: silu with a gate, bfloat16, T
tokens over all ranks, which choose k different experts. Milliseconds:

    J     one kernel
    two   jflux.all_gather, jflux.moe.permute and jflux.grouped_matmul
    G     jflux.grouped_matmul alone, of rows that lie in the order of experts
    C     jflux.all_gather alone

F is max(G, C): F / J is 1 where the slower of communication and computation hides the other.
Before anything is timed, J is compared with the two steps, and some of its rows with float64. With
one rank nothing is gathered, and C is empty.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jflux
from jflux import moe
from jflux._ops.experts import all_gather_grouped_matmul
from jflux._tools import trials

from . import command
from .experts import Case, random_choices

LISTS: dict[str, list[Case]] = {
    "mixtral": [
        Case(f"Mixtral, {tokens} tokens", tokens, 4096, 8, 2, 14336)
        for tokens in (1024, 8192, 16384)
    ],
    "qwen3": [
        Case("Qwen3-30B-A3B, 8192 tokens", 8192, 2048, 128, 8, 768),
        Case("Qwen3-235B-A22B, 8192 tokens", 8192, 4096, 128, 8, 1536),
    ],
}  # fmt: skip


def steps_of(case: Case, routing: moe.Routing) -> dict[str, Callable[..., jax.Array]]:
    """Functions of (x, rows, gate, up) of one rank: x [T/N, d], rows [T k, d]."""

    def layer(x: Any, rows: Any, gate: Any, up: Any) -> jax.Array:
        return moe.all_gather_grouped_matmul(
            x, (gate, up), routing, axis_name="tp", activation="silu", gated=True
        )

    def product(x: Any, rows: Any, gate: Any, up: Any) -> jax.Array:
        # The first row changes from call to call, as x's does.
        rows = lax.dynamic_update_slice(rows, x[:1], (0, 0))
        return jflux.grouped_matmul(rows, (gate, up), routing.counts, activation="silu", gated=True)

    def gather(x: Any, rows: Any, gate: Any, up: Any) -> jax.Array:
        return jflux.all_gather(x, axis_name="tp", tiled=True)

    def two(x: Any, rows: Any, gate: Any, up: Any) -> jax.Array:
        rows = moe.permute(jflux.all_gather(x, axis_name="tp", tiled=True), routing)
        return jflux.grouped_matmul(rows, (gate, up), routing.counts, activation="silu", gated=True)

    return {"J": layer, "two": two, "G": product, "C": gather}


def check(case: Case, chosen: np.ndarray, y: Any, two: Any, args: Any) -> float:
    """The largest difference of J from the two steps, and of some rows from float64, in units of
    bfloat16's rounding."""
    wide, goal = y.astype(jnp.float32), two.astype(jnp.float32)
    worst = float(jnp.max(jnp.abs(wide - goal) / (2.0**-8 * (jnp.abs(goal) + 0.25))))
    slots = chosen.reshape(-1)
    order = np.argsort(slots, kind="stable")
    x, _, gate, up = args
    for row in np.random.default_rng(3).integers(len(order), size=24):
        slot = order[row]
        token = np.asarray(x[slot // case.k].astype(jnp.float32), np.float64)
        sums = [
            token @ np.asarray(w[slots[slot]].astype(jnp.float32), np.float64) for w in (gate, up)
        ]
        wanted = sums[0] / (1 + np.exp(-sums[0])) * sums[1]
        found = np.asarray(y[row].astype(jnp.float32), np.float64)
        worst = max(worst, float((np.abs(found - wanted) / (2.0**-8 * (abs(wanted) + 1))).max()))
    return worst


def measure(case: Case, ranks: int, rounds: int) -> dict[str, Any]:
    """One row of the table."""
    mesh = Mesh(np.array(jax.devices()[:ranks]), ("tp",))
    chosen = random_choices(case, case.tokens)
    routing = jax.jit(moe.route, static_argnums=1)(chosen, case.experts)
    # The same on all ranks: a constant of the programs would be folded into them.
    routing = jax.device_put(routing, jax.sharding.NamedSharding(mesh, P()))
    columns, scale = P(None, None, "tp"), case.width**-0.5
    weights = (case.experts, case.width, case.hidden)
    args = (
        trials.normal(mesh, P("tp"), (case.tokens, case.width), jnp.bfloat16, seed=1),
        trials.normal(mesh, P(), (case.tokens * case.k, case.width), jnp.bfloat16, seed=2),
        trials.normal(mesh, columns, weights, jnp.bfloat16, seed=3, scale=scale),
        trials.normal(mesh, columns, weights, jnp.bfloat16, seed=4, scale=scale),
    )
    specs = (P("tp"), P(), columns, columns, P())
    iterations = 4 * trials.CALLS_IN_A_BODY + 1
    programs: dict[str, Any] = {}
    values: dict[str, Any] = {}
    for name in ("J", "two", "G", "C"):
        if name == "C" and ranks == 1:
            continue

        def once(x: Any, rows: Any, gate: Any, up: Any, routing: Any, name: str = name) -> Any:
            return steps_of(case, routing)[name](x, rows, gate, up)

        def chain(x: Any, rows: Any, gate: Any, up: Any, routing: Any, once: Any = once) -> Any:
            # Each call's x takes an element of the last one's result.
            def some(count: int, x: Any, y: Any) -> Any:
                for _ in range(count):
                    x = lax.dynamic_update_slice(x, y[:1, :1], (0, 0))
                    y = once(x, rows, gate, up, routing)
                return x, y

            carry = x, once(x, rows, gate, up, routing)
            body = trials.CALLS_IN_A_BODY
            return lax.fori_loop(0, iterations // body, lambda _, c: some(body, *c), carry)[1]

        out = P("tp") if name == "C" else P(None, "tp")  # of C each rank has all
        with jflux.config(always=name == "J"):
            program = trials.compiled(chain, mesh, specs, out, *args, routing)
            if name in ("J", "two"):
                values[name] = trials.compiled(once, mesh, specs, out, *args, routing)(
                    *args, routing
                )
        target = f'custom_call_target="jflux_{all_gather_grouped_matmul.OP}"'
        if name == "J" and target not in program.as_text():
            raise RuntimeError(f"{case.name}: no kernel takes the call")
        programs[name] = trials.run_of(program, *args, routing)
    error = check(case, np.asarray(chosen), values["J"], values["two"], args)
    if not error <= 3:
        raise RuntimeError(f"{case.name}: an error of {error:.3g} roundings")
    del values
    timings = trials.interleave(programs, iterations, rounds)
    return {"case": dataclasses.asdict(case), "error": error} | {
        name: dataclasses.asdict(timing) for name, timing in timings.items()
    }


HEADING = "case | J ms | two ms | G ms | C ms | two / J | F / J | J TF/s | error"


def cells(row: dict[str, Any], ranks: int) -> list[str]:
    ms = {name: row[name]["median"] * 1e3 for name in ("J", "two", "G", "C") if name in row}
    case = Case(**row["case"])
    flops = 4.0 * case.tokens * case.k * case.width * case.hidden / ranks
    return [
        case.name, *(f"{ms[c]:.3f}" if c in ms else "" for c in ("J", "two", "G", "C")),
        f"{ms['two'] / ms['J']:.2f}", f"{max(ms['G'], ms.get('C', 0)) / ms['J']:.2f}",
        f"{flops / ms['J'] / 1e9:.0f}", f"{row['error']:.2f}",
    ]  # fmt: skip


def main() -> int:
    args = command.parse(__doc__, lists=",".join(LISTS))
    jflux.init(heap_bytes=4 << 30)
    jflux.config.update(strict=True)
    table = command.Table(
        "gathered", lambda row: Case(**row["case"]), lambda _: HEADING,
        command.joined(lambda row: cells(row, args.ranks)),
    )  # fmt: skip
    table.measure_cases(args, LISTS, measure)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
