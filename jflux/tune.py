"""``python -m jflux.tune``: :func:`jflux.tune` for a list of shapes.

(``jflux.tune`` itself is the function, from jflux/_tuner.py.)
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from . import _tuning
from ._tuner import tune


def _bar(title: str) -> Callable[[int, int], None]:
    def show(done: int, total: int) -> None:
        filled = 30 * done // total
        end = "\n" if done == total else ""
        bar = "#" * filled + "." * (30 - filled)
        print(f"\r{title} [{bar}] {done}/{total}", end=end, file=sys.stderr, flush=True)

    return show


def main(argv: list[str] | None = None) -> int:
    """Tunes the calls that the arguments name; 1 where there is nothing to choose."""
    parser = argparse.ArgumentParser(
        prog="python -m jflux.tune",
        description="Measures which configuration is the fastest, and remembers it.",
    )
    parser.add_argument(
        "shapes", nargs="+", metavar="OP:M,N,K",
        help="global sizes, such as all_gather_matmul:8192,49152,12288",
    )  # fmt: skip
    parser.add_argument("--ranks", type=int, default=0, help="the first so many devices; all")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16"])
    parser.add_argument("--transpose-rhs", action="store_true", help="w is stored [n, k]")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=pathlib.Path, help="writes here, not to the user's table")
    args = parser.parse_args(argv)
    parsed = []
    for shape in args.shapes:
        op, _, sizes = shape.partition(":")
        try:
            m, n, k = map(int, sizes.split(","))
        except ValueError:
            parser.error(f"{shape!r} is not OP:M,N,K")
        parsed.append((op, m, n, k))
    devices = jax.devices()[: args.ranks or None]
    mesh = Mesh(np.array(devices), ("tp",))
    for op, m, n, k in parsed:
        try:
            result = tune(
                op, m=m, n=n, k=k, mesh=mesh, dtype=jnp.dtype(args.dtype),
                transpose_rhs=args.transpose_rhs, rounds=args.rounds, save=args.out is None,
                progress=_bar(f"{op} {m} x {n} x {k}"),
            )  # fmt: skip
        except (ValueError, RuntimeError) as error:
            print(error, file=sys.stderr)
            return 1
        print(result, flush=True)
        if args.out is not None and jax.process_index() == 0:
            _tuning.store(args.out, {str(result.key): _tuning.as_json(result.best)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
