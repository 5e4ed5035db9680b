"""Times moe.grouped_matmul_reduce_scatter on GPUs; the table comes last.

python -m bench.scattered --ranks 2 --out bench/results/2xh100_scattered.json [--lists mixtral]

The last product of the mixtures of :mod:`bench.gathered`: hidden units that are split over ranks,
bfloat16, T tokens over all ranks, which choose k different experts, with weights. Milliseconds:

    J     one kernel
    two   jflux.grouped_matmul, jflux.moe.unpermute and jflux.reduce_scatter
    G     jflux.grouped_matmul alone
    C     jflux.reduce_scatter alone

F is max(G, C): F / J is 1 where the slower of communication and computation hides the other.
Before anything is timed, J is compared with the two steps, and some of its tokens with float64.
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
from jflux._ops.experts import grouped_matmul_reduce_scatter
from jflux._tools import trials

from . import command
from .experts import Case, random_choices
from .gathered import LISTS

NAMES = ("J", "two", "G", "C")


def steps_of(routing: moe.Routing) -> dict[str, Callable[..., jax.Array]]:
    """Functions of (h, part, w, weights) of one rank: h [T k, f/N], part [T, d]."""

    def layer(h: Any, part: Any, w: Any, weights: Any) -> jax.Array:
        return moe.grouped_matmul_reduce_scatter(h, w, routing, weights, axis_name="tp")

    def product(h: Any, part: Any, w: Any, weights: Any) -> jax.Array:
        return jflux.grouped_matmul(h, w, routing.counts)

    def scatter(h: Any, part: Any, w: Any, weights: Any) -> jax.Array:
        # An element changes from call to call, as h's does.
        part = lax.dynamic_update_slice(part, h[:1, :1], (0, 0))
        return jflux.reduce_scatter(part, axis_name="tp", scatter_dimension=0, tiled=True)

    def two(h: Any, part: Any, w: Any, weights: Any) -> jax.Array:
        sums = moe.unpermute(jflux.grouped_matmul(h, w, routing.counts), routing, weights)
        return jflux.reduce_scatter(sums, axis_name="tp", scatter_dimension=0, tiled=True)

    return {"J": layer, "two": two, "G": product, "C": scatter}


def check(case: Case, chosen: np.ndarray, out: Any, two: Any, args: Any) -> float:
    """The largest difference of J from the two steps, and of some tokens from float64, in units of
    bfloat16's rounding of the largest sums: those of ranks are rounded, and may cancel."""
    most = 4 * case.k**0.5
    wide, goal = out.astype(jnp.float32), two.astype(jnp.float32)
    worst = float(jnp.max(jnp.abs(wide - goal) / (2.0**-8 * (jnp.abs(goal) + most))))
    slots = chosen.reshape(-1)
    order = np.argsort(slots, kind="stable")
    row_of = np.empty_like(order)
    row_of[order] = np.arange(len(order))
    h, _, w, weights = args
    for token in np.random.default_rng(3).integers(case.tokens, size=24):
        wanted = np.zeros(case.width)
        for j in range(case.k):
            slot = token * case.k + j
            row = np.asarray(h[row_of[slot]].astype(jnp.float32), np.float64)
            expert = np.asarray(w[slots[slot]].astype(jnp.float32), np.float64)
            wanted += float(weights[token, j]) * (row @ expert)
        found = np.asarray(out[token].astype(jnp.float32), np.float64)
        worst = max(worst, float((np.abs(found - wanted) / (2.0**-8 * (abs(wanted) + most))).max()))
    return worst


def measure(case: Case, ranks: int, rounds: int) -> dict[str, Any]:
    """One row of the table."""
    mesh = Mesh(np.array(jax.devices()[:ranks]), ("tp",))
    chosen = random_choices(case, case.tokens)
    routing = jax.jit(moe.route, static_argnums=1)(chosen, case.experts)
    # The same on all ranks: a constant of the programs would be folded into them.
    routing = jax.device_put(routing, jax.sharding.NamedSharding(mesh, P()))
    hidden = P(None, "tp")
    args = (
        trials.normal(mesh, hidden, (case.tokens * case.k, case.hidden), jnp.bfloat16, seed=1),
        trials.normal(mesh, P(), (case.tokens, case.width), jnp.bfloat16, seed=2),
        trials.normal(
            mesh, hidden, (case.experts, case.hidden, case.width), jnp.bfloat16, seed=3,
            scale=case.hidden**-0.5,
        ),
        trials.normal(mesh, P(), (case.tokens, case.k), jnp.float32, seed=4),
    )  # fmt: skip
    specs = (hidden, P(), hidden, P(), P())
    iterations = 4 * trials.CALLS_IN_A_BODY + 1
    programs: dict[str, Any] = {}
    values: dict[str, Any] = {}
    for name in NAMES:

        def once(h: Any, part: Any, w: Any, weights: Any, routing: Any, name: str = name) -> Any:
            return steps_of(routing)[name](h, part, w, weights)

        def chain(h: Any, part: Any, w: Any, weights: Any, routing: Any, once: Any = once) -> Any:
            # Each call's h takes an element of the last one's result.
            def some(count: int, h: Any, y: Any) -> Any:
                for _ in range(count):
                    h = lax.dynamic_update_slice(h, y[:1, :1], (0, 0))
                    y = once(h, part, w, weights, routing)
                return h, y

            carry = h, once(h, part, w, weights, routing)
            body = trials.CALLS_IN_A_BODY
            return lax.fori_loop(0, iterations // body, lambda _, c: some(body, *c), carry)[1]

        with jflux.config(always=name == "J"):
            program = trials.compiled(chain, mesh, specs, P("tp"), *args, routing)
            if name in ("J", "two"):
                values[name] = trials.compiled(once, mesh, specs, P("tp"), *args, routing)(
                    *args, routing
                )
        target = f'custom_call_target="jflux_{grouped_matmul_reduce_scatter.OP}"'
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
    ms = {name: row[name]["median"] * 1e3 for name in NAMES}
    case = Case(**row["case"])
    flops = 2.0 * case.tokens * case.k * case.width * case.hidden / ranks
    return [
        case.name, *(f"{ms[name]:.3f}" for name in NAMES),
        f"{ms['two'] / ms['J']:.2f}", f"{max(ms['G'], ms['C']) / ms['J']:.2f}",
        f"{flops / ms['J'] / 1e9:.0f}", f"{row['error']:.2f}",
    ]  # fmt: skip


def main() -> int:
    args = command.parse(__doc__, lists=",".join(LISTS))
    jflux.init(heap_bytes=4 << 30)
    jflux.config.update(strict=True)
    table = command.Table(
        "scattered", lambda row: Case(**row["case"]), lambda _: HEADING,
        command.joined(lambda row: cells(row, args.ranks)),
    )  # fmt: skip
    table.measure_cases(args, LISTS, measure)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
