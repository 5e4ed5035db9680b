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

from . import mixtures
from .mixtures import Case


def steps_of(routing: moe.Routing) -> dict[str, Callable[..., jax.Array]]:
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
    columns, scale = P(None, None, "tp"), case.width**-0.5
    weights = (case.experts, case.width, case.hidden)
    args = (
        trials.normal(mesh, P("tp"), (case.tokens, case.width), jnp.bfloat16, seed=1),
        trials.normal(mesh, P(), (case.tokens * case.k, case.width), jnp.bfloat16, seed=2),
        trials.normal(mesh, columns, weights, jnp.bfloat16, seed=3, scale=scale),
        trials.normal(mesh, columns, weights, jnp.bfloat16, seed=4, scale=scale),
    )
    outs = {name: P(None, "tp") for name in ("J", "two", "G")}
    if ranks > 1:
        outs["C"] = P("tp")  # each rank has all
    return mixtures.measure(
        case, mesh, rounds, all_gather_grouped_matmul.OP, steps_of, args,
        (P("tp"), P(), columns, columns), outs,
        lambda chosen, y, two: check(case, chosen, y, two, args),
    )  # fmt: skip


def cells(row: dict[str, Any], ranks: int) -> list[str]:
    return mixtures.cells(row, ranks, products=2)


def main() -> int:
    return mixtures.main(__doc__, "gathered", measure, cells)


if __name__ == "__main__":
    raise SystemExit(main())
