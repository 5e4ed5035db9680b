"""The product alone, of one rank's part of the shapes, in our main loop and by XLA:
python -m bench.products --out bench/results/1xh200_products.json

A call of one rank sends and waits for nothing. XLA takes cuBLAS, or a fusion of its own where that
is faster. Every time is that of a call in a loop on the GPU; a round times each contestant once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

os.environ.setdefault("NCCL_NVLS_ENABLE", "0")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jflux
from bench import command, harness, rates, shapes
from jflux._call import tuning_tables
from jflux._call.plans import Machine
from jflux._call.tuning_tables import Choice
from jflux._ops import _lax
from jflux._ops.products import _product_plan
from jflux._tools import trials
from jflux._tools.trials import Trial

LISTS = ("flux", "decode", "attention", "llm")
OF_RANKS = 4
GPU = Machine("cuda", sm_count=132)


def product_alone(
    transpose: bool, results: Sequence[str] = ("y",), out_dtype: Any = None, epilogue: Any = None
) -> Callable[..., Any]:
    """The main loop of one rank, which sends and waits for nothing: a function of (x, w), and a
    bias if there is an `epilogue`."""
    from jflux._ops.products import all_gather_matmul as op

    def f(x, *operands):
        params = op.Params(
            axis_names=("tp",), world=1, gather_dimension=x.ndim - 2, results=tuple(results),
            transpose_rhs=transpose, out_dtype=np.dtype(out_dtype or x.dtype), epilogue=epilogue,
        )  # fmt: skip
        found = op._primitive.bind(x, *operands, params=params)
        return tuple(found) if len(results) > 1 else found[0]

    return f


def of_one_rank(names: Sequence[str]) -> Iterator[tuple[int, int, int]]:
    """m, n and k of one of four ranks' part of each shape of these lists, each once, less those
    whose product is left to XLA."""
    done = set()
    for shape in itertools.chain(*(shapes.LISTS[name] for name in names)):
        x_spec, w_spec, _ = Trial(shape.spec).partition
        m, k = harness.local(x_spec, (shape.m, shape.k), OF_RANKS)
        if shape.spec.product == "after":
            m, k = shape.collective.shape((m, k), OF_RANKS)
        _, n = harness.local(w_spec, (shape.k, shape.n), OF_RANKS)
        if (m, n, k) not in done and not _product_plan.why_decomposed(m, GPU, fewest=64):
            done.add((m, n, k))
            yield m, n, k


def measure(
    m: int, n: int, k: int, dtype: Any, *, zeros: bool, rounds: int, choices: Sequence[Choice] = ()
) -> dict[str, Any]:
    """One row: the seconds of XLA's product with w [k, n] ("G") and [n, k] ("G nk"), of ours as it
    is chosen ("kn", "nk"), and with w [k, n] by each of `choices`, under its name."""
    mesh, spec = Mesh(np.array(jax.devices()[:1]), ("tp",)), P(None, None)
    iterations = int(min(1000, max(5, 0.02 / (2 * m * n * k / 600e12 + 10e-6))))
    x = jax.random.normal(jax.random.key(0), (m, k)).astype(dtype)
    w = (jax.random.normal(jax.random.key(1), (k, n)) / k**0.5).astype(dtype)
    x, w = (jnp.zeros_like(x), jnp.zeros_like(w)) if zeros else (x, w)
    turned = w.T.copy()
    contestants = [
        ("G", lambda x, w: x @ w, w, None),
        ("G nk", lambda x, w: _lax.matmul(x, w, x.dtype, None, True), turned, None),
        ("kn", product_alone(False), w, None),
        ("nk", product_alone(True), turned, None),
        *((str(choice), product_alone(False), w, choice) for choice in choices),
    ]
    runs = {}
    for name, f, b, choice in contestants:
        with tuning_tables.force(choice) if choice else contextlib.nullcontext():
            program = trials.compiled(trials.loop(f, iterations), mesh, (spec, spec), spec, x, b)
        runs[name] = trials.run_of(program, x, b)
    what = {"m": m, "n": n, "k": k, "dtype": np.dtype(dtype).name, "zeros": zeros}
    row: dict[str, Any] = dict(what)
    for name, timing in trials.interleave(runs, iterations, rounds).items():
        rates.check(f"{what}, {name}", timing.median, flops=2.0 * m * n * k)
        row[name] = dataclasses.asdict(timing)
    return row


def speeds(row: dict[str, Any]) -> tuple[float, float]:
    """Ours in XLA's, with w [k, n] and [n, k]."""
    t = {name: row[name]["median"] for name in ("G", "G nk", "kn", "nk")}
    return t["G"] / t["kn"], t["G nk"] / t["nk"]


COLUMNS = ("m", "n", "k", "G us, w [k, n]", "w [n, k]", "G / ours, w [k, n]", "w [n, k]")


def cells(row: dict[str, Any]) -> list[str]:
    """One row of the table under COLUMNS."""
    return [
        *(str(row[name]) for name in "mnk"),
        *(f"{row[name]['median'] * 1e6:.1f}" for name in ("G", "G nk")),
        *(f"{speed:.3f}" for speed in speeds(row)),
    ]


def summary(rows: Sequence[dict[str, Any]], fewest: int = 512) -> str:
    """How many products of so many rows are within 3 and 5 % of XLA's speed, or faster."""
    found = [speeds(row) for row in rows if row["m"] >= fewest]
    near = [[sum(pair[i] >= least for pair in found) for least in (0.97, 0.95)] for i in (0, 1)]
    return (
        f"Of {len(found)} products of {fewest} rows or more {near[0][0]} are within 3 % of XLA's "
        f"speed, or faster, with w [k, n], and {near[0][1]} within 5 %; with w [n, k] {near[1][0]} "
        f"and {near[1][1]}."
    )


TABLE = command.Table(
    "products", lambda row: (row["m"], row["n"], row["k"], row["dtype"]),
    lambda _: " | ".join(COLUMNS), command.joined(cells),
)  # fmt: skip


def main() -> int:
    options = command.parser(__doc__, rounds=5, ranks=1)
    options.add_argument("--lists", default=",".join(LISTS))
    options.add_argument("--dtypes", default="bfloat16,float16")
    args = options.parse_args()
    jflux.init(heap_bytes=4 << 30)
    jflux.config.update(strict=True, always=True)
    wanted = {
        (*size, dtype): functools.partial(
            measure, *size, jnp.dtype(dtype), zeros=False, rounds=args.rounds
        )
        for dtype in args.dtypes.split(",")
        for size in of_one_rank(args.lists.split(","))
    }
    rows = TABLE.measure(args, wanted)
    for dtype in args.dtypes.split(","):
        print(f"{dtype}: {summary([row for row in rows if row['dtype'] == dtype])}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
