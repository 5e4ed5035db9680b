"""Times moe.grouped_matmul_reduce_scatter on GPUs; the table comes last.

python -m bench.scattered --ranks 2 --out bench/results/2xh100_scattered.json [--lists mixtral]

The last product of the mixtures of :mod:`bench.mixtures`: hidden units that are split over ranks,
bfloat16, T tokens over all ranks, which choose k different experts, with weights. Milliseconds:

    J     one kernel
    two   jflux.grouped_matmul, jflux.moe.unpermute and jflux.reduce_scatter
    G     jflux.grouped_matmul alone
    C     jflux.reduce_scatter alone
    J8    J with wire="float8_e4m3fn"
    two8  two, whose reduce_scatter has that wire

F is max(G, C): F / J is 1 where the slower of communication and computation hides the other.
Before anything is timed, J is compared with the two steps, and some of its tokens with float64.
"""

from __future__ import annotations

import functools
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

from . import mixtures
from .mixtures import Case

#: With a wire of 8 bits. Rows of earlier runs have none.
IN_8_BITS = ("J8", "two8")
HEADING = " | ".join([mixtures.HEADING, *(f"{name} ms" for name in IN_8_BITS)])


def steps_of(routing: moe.Routing) -> dict[str, Callable[..., jax.Array]]:
    """Functions of (h, part, w, weights) of one rank: h [T k, f/N], part [T, d]."""

    def layer(h: Any, part: Any, w: Any, weights: Any, wire: str | None = None) -> jax.Array:
        return moe.grouped_matmul_reduce_scatter(h, w, routing, weights, axis_name="tp", wire=wire)

    def product(h: Any, part: Any, w: Any, weights: Any) -> jax.Array:
        return jflux.grouped_matmul(h, w, routing.counts)

    def scatter(h: Any, part: Any, w: Any, weights: Any) -> jax.Array:
        # An element changes from call to call, as h's does.
        part = lax.dynamic_update_slice(part, h[:1, :1], (0, 0))
        return jflux.reduce_scatter(part, axis_name="tp", scatter_dimension=0, tiled=True)

    def two(h: Any, part: Any, w: Any, weights: Any, wire: str | None = None) -> jax.Array:
        sums = moe.unpermute(jflux.grouped_matmul(h, w, routing.counts), routing, weights)
        return jflux.reduce_scatter(
            sums, axis_name="tp", scatter_dimension=0, tiled=True, wire=wire
        )

    in_8_bits = {
        f"{name}8": functools.partial(f, wire="float8_e4m3fn")
        for name, f in (("J", layer), ("two", two))
    }
    return {"J": layer, "two": two, "G": product, "C": scatter, **in_8_bits}


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
    mesh, hidden = Mesh(np.array(jax.devices()[:ranks]), ("tp",)), P(None, "tp")
    args = (
        trials.normal(mesh, hidden, (case.tokens * case.k, case.hidden), jnp.bfloat16, seed=1),
        trials.normal(mesh, P(), (case.tokens, case.width), jnp.bfloat16, seed=2),
        trials.normal(
            mesh, hidden, (case.experts, case.hidden, case.width), jnp.bfloat16, seed=3,
            scale=case.hidden**-0.5,
        ),
        trials.normal(mesh, P(), (case.tokens, case.k), jnp.float32, seed=4),
    )  # fmt: skip
    return mixtures.measure(
        case, mesh, rounds, grouped_matmul_reduce_scatter.OP, steps_of, args,
        (hidden, P(), hidden, P()), dict.fromkeys((*mixtures.NAMES, *IN_8_BITS), P("tp")),
        lambda chosen, out, two: check(case, chosen, out, two, args),
    )  # fmt: skip


def cells(row: dict[str, Any], ranks: int) -> list[str]:
    return mixtures.cells(row, ranks, products=1) + mixtures.times(row, IN_8_BITS)


def main() -> int:
    return mixtures.main(__doc__, "scattered", measure, cells, HEADING)


if __name__ == "__main__":
    raise SystemExit(main())
