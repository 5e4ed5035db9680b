"""How exact an all-reduce is: the mean absolute difference of its sums from float64.

python -m bench.accuracy --ranks 2 --out bench/results/2xh200_accuracy.json

Standard normal numbers, rounded to each type, which all ranks sum: by jflux's algorithms, and by
`lax.psum` (NCCL, on GPUs). `rounded` is what the exact sums differ by once they are rounded to the
type: nothing that returns it can differ by less.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jflux
from jflux._ops.collectives.all_reduce import ALGORITHMS

from . import command

DTYPES = (jnp.float16, jnp.bfloat16, jnp.float32)
SIZE = 1 << 20  # elements
NAMES = ("psum", *ALGORITHMS, "rounded")
COLUMNS = ("ranks", "type", *NAMES)


def measure(mesh: Mesh, dtype: Any, size: int = SIZE) -> dict[str, Any]:
    """One row."""
    ranks = mesh.devices.size
    x = np.random.default_rng(0).standard_normal((ranks, size)).astype(dtype)
    exact = x.astype(np.float64).sum(0)

    def difference(y: Any) -> float:
        return float(np.abs(np.asarray(y).astype(np.float64) - exact).mean())

    def by(module: Any, **options: Any) -> float:
        f = jax.shard_map(
            lambda x: module.all_reduce(x[0], axis_name="tp", **options),
            mesh=mesh, in_specs=P("tp"), out_specs=P(),
        )  # fmt: skip
        return difference(jax.jit(f)(x))

    row = {"ranks": ranks, "type": np.dtype(dtype).name, "psum": by(jflux.reference)}
    row |= {algorithm: by(jflux, algorithm=algorithm) for algorithm in ALGORITHMS}
    return row | {"rounded": difference(exact.astype(dtype))}


def cells(row: dict[str, Any]) -> list[str]:
    figures = (f"{row[name]:.3g}" if name in row else "" for name in NAMES)
    return [str(row["ranks"]), row["type"], *figures]


TABLE = command.Table(
    "accuracy", lambda row: (row["ranks"], row["type"]), lambda _: " | ".join(COLUMNS),
    command.joined(cells),
)  # fmt: skip


def main() -> int:
    args = command.parse(__doc__, lists="")
    command.initialize(args)
    jflux.config.update(strict=True)
    mesh = Mesh(np.array(jax.devices()[: args.ranks]), ("tp",))
    wanted = {
        (args.ranks, np.dtype(dtype).name): functools.partial(measure, mesh, dtype)
        for dtype in DTYPES
    }
    TABLE.measure(args, wanted)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
