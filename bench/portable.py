"""How much communication the portable main loop hides, on a GPU that it is not for: milliseconds.

python -m bench.portable --ranks 4 --out docs/experiments/0060-portable-products.json

Kernels are those of compute capability 8.0 (docs/decisions/0050). G is the portable loop's product
alone, as `grouped_matmul` of one group, C jflux's collective alone, which is portable too, S one
after the other, and J the fused kernel. E is Flux's overlap efficiency (arXiv 2406.06858, equation
2): 1 where communication is wholly hidden.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import jflux
from jflux import _config, _native
from jflux._tools import trials

from . import command, harness
from .shapes import AG, RS, Shape

SHAPES = [
    Shape(op, m, n, k)
    for m in (8192, 2048)
    for op, n, k in ((AG, 28672, 8192), (RS, 8192, 28672), (AG, 49152, 12288), (RS, 12288, 49152))
]


def product(x: jax.Array, w: jax.Array) -> jax.Array:
    """x @ w by the loop that grouped products share with the fused ones."""
    return jflux.grouped_matmul(x, w[None], jnp.array([x.shape[0]], jnp.int32))


def contestants(shape: Shape) -> dict[str, Callable[[jax.Array, jax.Array], jax.Array]]:
    """Functions of one rank's (x, w)."""
    gathers = shape.op == AG
    one = jflux.all_gather if gathers else jflux.reduce_scatter
    collective = functools.partial(one, axis_name="tp", tiled=True)

    def in_turn(x: jax.Array, w: jax.Array) -> jax.Array:
        return product(collective(x), w) if gathers else collective(product(x, w))

    return {
        "G": product,
        "C": lambda x, w: collective(x),
        "S": in_turn,
        "J": functools.partial(getattr(jflux, shape.op), axis_name="tp"),
    }


def measure(shape: Shape, mesh: Mesh, rounds: int) -> dict[str, Any]:
    """One row."""
    ranks = mesh.devices.size
    iterations = trials.iterations_for(0.05, shape.flops(ranks))
    data = harness.operands(shape, mesh)
    runs = {}
    for name, op in contestants(shape).items():
        x, w, x_spec, w_spec, y_spec = data[name]
        program = trials.compiled(trials.loop(op, iterations), mesh, (x_spec, w_spec), y_spec, x, w)
        if name == "J" and not harness.is_one_kernel(shape.op, program):
            raise RuntimeError(f"{shape} is no fused kernel")
        runs[name] = trials.run_of(program, x, w)
    timings = trials.interleave(runs, iterations, rounds)
    harness.check_rates(shape, ranks, {name: timing.median for name, timing in timings.items()})
    return dataclasses.asdict(shape) | {
        name: dataclasses.asdict(timing) for name, timing in timings.items()
    }


def cells(row: dict[str, Any]) -> list[str]:
    g, c, s, j = (row[name]["median"] for name in "GCSJ")
    efficiency = 1 - (j - g) / (s - g) if s > g else float("nan")
    return [
        row["op"], f"{row['m']} x {row['n']} x {row['k']}",
        *(f"{seconds * 1e3:.3f}" for seconds in (g, c, s, j)), f"{j / s:.2f}", f"{efficiency:.2f}",
    ]  # fmt: skip


COLUMNS = ["op", "m x n x k", "G", "C", "S", "J", "J / S", "E"]
TABLE = command.Table(
    "portable", lambda row: (row["op"], row["m"], row["n"], row["k"]),
    lambda row: " | ".join(COLUMNS), command.joined(cells),
)  # fmt: skip


def main() -> int:
    options = command.parser(__doc__)
    args = options.parse_args()
    _config.override_for_good(arch=_native.PORTABLE_ARCH, unchecked_kernels=True)
    jflux.init(heap_bytes=2 << 30)
    jflux.config.update(strict=True)
    mesh = Mesh(np.array(jax.devices()[: args.ranks]), ("tp",))
    TABLE.measure(
        args,
        {(s.op, s.m, s.n, s.k): functools.partial(measure, s, mesh, args.rounds) for s in SHAPES},
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
