"""One process calls ops with ever more rows, as a server does with prompts of several lengths, and
the heap grows with the default settings; a table comes last:

python tests/growth_gpu.py [--most-rows 131072] [--width 8192]

Rows of each result, drawn at random, are compared with float64. A call that finds no room must be
right too: it takes another path, and the table says so.
"""

from __future__ import annotations

import argparse
import functools
import re
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jflux


def call(op: str, rows: int, width: int, mesh: Mesh) -> tuple[str, float]:
    """(kernels, largest error in its bounds) of x [rows, width] @ w [width, 1024]."""
    splits = {
        "all_gather_matmul": (P("tp", None), P(None, "tp"), P(None, "tp")),
        "matmul_all_reduce": (P(None, "tp"), P("tp", None), P(None, None)),
    }
    *operands, result = splits[op]
    keys = jax.random.split(jax.random.key(rows))
    sizes = (rows, width), (width, 1024)

    def draw(key: jax.Array, shape: tuple[int, ...], spec: P) -> Any:
        make = functools.partial(jax.random.normal, shape=shape, dtype=jnp.bfloat16)
        return jax.jit(make, out_shardings=NamedSharding(mesh, spec))(key)

    x, w = (draw(*one) for one in zip(keys, sizes, operands, strict=True))
    f = functools.partial(getattr(jflux, op), axis_name="tp")
    program = jax.jit(
        jax.shard_map(f, mesh=mesh, in_specs=tuple(operands), out_specs=result, check_vma=False)
    )
    compiled = program.lower(x, w).compile()
    kernels = re.findall(r'custom_call_target="jflux_(\w+)"', compiled.as_text())
    y = compiled(x, w)
    some = np.unique(np.random.default_rng(rows).integers(rows, size=32))
    found, given = (np.asarray(a[some].astype(jnp.float32), np.float64) for a in (y, x))
    wide = np.asarray(w.astype(jnp.float32), np.float64)
    # Each rank's part of a sum may be rounded to bfloat16.
    deviation = np.sqrt((given * given) @ (wide * wide))
    bound = 2.0**-7 * np.abs(given @ wide) + 2.0**-6 * deviation
    return "+".join(kernels) or "plain lax", float((np.abs(found - given @ wide) / bound).max())


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--most-rows", type=int, default=131072)
    parser.add_argument("--width", type=int, default=8192)
    args = parser.parse_args()
    mesh = Mesh(np.array(jax.devices()), ("tp",))
    rows, calls = 1024, []
    while rows <= args.most_rows:
        calls.append(("all_gather_matmul", rows))
        rows *= 2
    calls += [("matmul_all_reduce", n) for n in (2048, 8192) if n <= args.most_rows]
    wrong = False
    lines = []
    for op, n in calls:
        kernels, error = call(op, n, args.width, mesh)
        wrong |= not error <= 1
        lines.append(f"{op:20} {n:8} rows  {kernels:20} largest error {error:.2f} of its bound")
    print(jflux.heap_report())
    print("\n".join(lines))
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
