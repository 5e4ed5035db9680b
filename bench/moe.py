"""Checks and times the products of a mixture of experts on one GPU; the table comes last.

python -m bench.moe --ranks 1 --out bench/results/1xh100_moe.json [--lists mixtral,qwen3]
                    [--peers tokamax,torch]

For each shape, with sizes that are equal, drawn from a Dirichlet distribution, and with half of the
rows in one group:

    J       jflux.grouped_matmul
    S       jax.lax.ragged_dot, where there is room for what XLA makes of it
    X       the same with XLA's flag for grouped products (FLAGS), which is off by default
    G       as many rows in equal groups, as one batched product of XLA: what the chip can do
    J f+b   J forward and backward (x's and w's gradients); S f+b and X f+b likewise
    T, P    tokamax's and PyTorch's (bench/moe_peers.py), where they are asked for and installed

`read` is the time in which a copy reads the weights of the groups with rows (bench/rates.py); what
only reads may be a few per cent faster. Values are compared to float64 before anything is timed, on
rows and groups drawn at random.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jflux
from jflux._tools import trials

from . import command, moe_peers, peers, rates
from .peers import Unavailable


@dataclasses.dataclass(frozen=True)
class Case:
    """E groups of `rows` rows in all: x [rows, k] and w [E, k, n], in bfloat16."""

    name: str
    groups: int
    rows: int
    k: int
    n: int

    @property
    def flops(self) -> float:
        return 2.0 * self.rows * self.k * self.n

    @property
    def ragged_bytes(self) -> float:
        """Of the array that XLA makes of x for ragged_dot: [E, rows, k], with zeros."""
        return 2.0 * self.groups * self.rows * self.k


LISTS: dict[str, Case] = {
    "mixtral": Case("Mixtral, TP 2", 8, 8192, 4096, 7168),
    "qwen3": Case("Qwen3-30B-A3B", 128, 65536, 2048, 768),
    "deepseek": Case("DeepSeek-V3, EP 32", 8, 8192, 7168, 2048),
    "decode": Case("decode", 128, 512, 7168, 2048),
    "large": Case("64 experts of 7168 x 2048", 64, 65536, 7168, 2048),
}


def sizes_of(case: Case, kind: str, seed: int) -> np.ndarray:
    """Rows of each group; they sum to all rows."""
    rng = np.random.default_rng(seed)
    share = np.full(case.groups, 1.0)
    if kind == "dirichlet":
        share = rng.dirichlet(share)
    elif kind == "half":
        share[rng.integers(case.groups)] = case.groups - 1
    counts = np.floor(share / share.sum() * case.rows).astype(np.int32)
    counts[: case.rows - counts.sum()] += 1
    return counts


# They take up to 200 times as long as the others: timed on their own, in a few calls. So are those
# of FLAGS, which take as long where XLA has no grouped product.
SLOW = frozenset({"S", "S f+b"})
FLAGGED = frozenset({"X", "X f+b"})
FLAGS = {"xla_gpu_experimental_use_ragged_dot_grouped_gemm": True}
ROOM = 40e9  # bytes for ragged_bytes
OWN = frozenset("JSG")  # those that must not fail
SIZES = ("equal", "dirichlet", "half")


def operands(case: Case, seed: int = 0) -> tuple[jax.Array, jax.Array]:
    x, w = jax.random.split(jax.random.key(seed))
    scale = case.k**-0.5
    make = jax.jit(
        lambda: (
            jax.random.normal(x, (case.rows, case.k), jnp.bfloat16),
            jax.random.normal(w, (case.groups, case.k, case.n), jnp.bfloat16) * scale,
        )
    )
    return make()


def check(case: Case, counts: np.ndarray, x: jax.Array, w: jax.Array) -> float:
    """The largest error of y, dx and dw over rows and groups drawn at random, in units of what
    rounding to bfloat16 and sums in float32 allow: 2^-8 of the result and 2^-19 of the sum of its
    terms' sizes."""
    dy = jax.random.normal(jax.random.key(9), (case.rows, case.n), jnp.bfloat16)
    sizes = jnp.asarray(counts)

    @jax.jit
    def all_three(x: jax.Array, w: jax.Array, dy: jax.Array) -> Any:
        y, pull = jax.vjp(lambda x, w: jflux.grouped_matmul(x, w, sizes), x, w)
        return y, *pull(dy)

    y, dx, dw = all_three(x, w, dy)
    ends = np.cumsum(counts)
    rng = np.random.default_rng(1)
    worst = 0.0

    def compare(found: jax.Array, a: np.ndarray, b: np.ndarray) -> None:
        nonlocal worst
        wanted = a @ b
        error = np.abs(exact(found) - wanted)
        bound = 2.0**-8 * np.abs(wanted) + 2.0**-19 * (np.abs(a) @ np.abs(b)) + 1e-30
        worst = max(worst, float((error / bound).max()))

    def exact(a: jax.Array) -> np.ndarray:
        return np.asarray(a.astype(jnp.float32), np.float64)

    for row in rng.integers(case.rows, size=16):
        group = int(np.searchsorted(ends, row, side="right"))
        one = exact(w[group])
        compare(y[row], exact(x[row]), one)
        compare(dx[row], one, exact(dy[row]))
    for group in {int(np.argmax(counts)), int(np.argmin(counts)), int(rng.integers(case.groups))}:
        rows = slice(int(ends[group] - counts[group]), int(ends[group]))
        columns = rng.integers(case.k, size=8)
        compare(dw[group][columns], exact(x[rows][:, columns]).T, exact(dy[rows]))
    return worst


def contestants(
    case: Case, counts: np.ndarray, others: Sequence[moe_peers.Peer] = ()
) -> dict[str, Callable[..., Any]]:
    """Functions of (x, w), which return something of x's shape or less."""
    sizes = jnp.asarray(counts)

    def batched(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.einsum("erk,ekn->ern", x.reshape(case.groups, -1, case.k), w)

    def both_ways(product: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        def run(x: jax.Array, w: jax.Array) -> jax.Array:
            y, pull = jax.vjp(lambda x, w: product(x, w, sizes), x, w)
            dx, dw = pull(y)
            return dx + dw[0, 0, 0]

        return run

    found: dict[str, Callable[..., Any]] = {
        "J": lambda x, w: jflux.grouped_matmul(x, w, sizes),
        "J f+b": both_ways(jflux.grouped_matmul),
    }
    if case.ragged_bytes < ROOM:
        found["S"] = lambda x, w: lax.ragged_dot(x, w, sizes)
        found["S f+b"] = both_ways(lax.ragged_dot)
        found |= {"X": found["S"], "X f+b": found["S f+b"]}
    if case.rows % case.groups == 0:
        found["G"] = batched
    for peer in others:
        for name, product in peer.products().items():
            found[name] = functools.partial(lambda product, x, w: product(x, w, sizes), product)
            found[f"{name} f+b"] = both_ways(product)
    return found


def measure(
    case: Case, kind: str, rounds: int, others: Sequence[moe_peers.Peer] = ()
) -> dict[str, Any]:
    """One row of the table."""
    counts = sizes_of(case, kind, seed=3)
    x, w = operands(case)
    error = check(case, counts, x, w)
    if not error <= 1:
        raise RuntimeError(f"{case.name}, {kind}: an error of {error:.3g} times its bound")
    timings: dict[str, trials.Timing] = {}
    ops = contestants(case, counts, others)
    fast = ops.keys() - SLOW - FLAGGED
    for names, most in ((fast, 200), (ops.keys() & SLOW, 2), (ops.keys() & FLAGGED, 10)):
        iterations = min(most, trials.iterations_for(0.03, case.flops))
        runs = {}
        for name in sorted(names):
            try:
                lowered = jax.jit(trials.loop(ops[name], iterations)).lower(x, w)
                program = lowered.compile(FLAGS if name in FLAGGED else None)
                run = trials.run_of(program, x, w)
                run()
            except Exception as e:  # a peer's kernels may refuse a shape, each in its own way
                if name.split()[0] in OWN:
                    raise
                print(f"{case.name}, {name}: {type(e).__name__}: {e}".splitlines()[0])
            else:
                runs[name] = run
        if names == fast:
            runs |= _others(others, counts, case, iterations)
        if runs:
            timings |= trials.interleave(runs, iterations, min(most + 1, rounds))
    for name, timing in timings.items():
        rates.check(
            (case.name, name), timing.median, flops=case.flops * (3 if "f+b" in name else 1)
        )
    bound = rates.read_seconds(2.0 * case.k * case.n * int((counts > 0).sum()))
    return {
        "case": dataclasses.asdict(case), "sizes": kind, "error": error, "bound": bound,
    } | {name: dataclasses.asdict(t) for name, t in timings.items()}  # fmt: skip


def _others(
    others: Sequence[moe_peers.Peer], counts: np.ndarray, case: Case, iterations: int
) -> dict[str, Callable[[], None]]:
    """What peers run by themselves; says why one cannot."""
    found = {}
    for peer in others:
        try:
            found |= peer.runs(counts, case.k, case.n, iterations)
        except Unavailable as e:
            print(f"{case.name}: {e}", file=sys.stderr)
    return found


COLUMNS = ("J", "S", "X", "G", "J f+b", "S f+b", "X f+b", "T", "T f+b", "P")
HEADING = " | ".join(
    (
        "shape",
        "sizes",
        *(f"{c} ms" for c in COLUMNS),
        "G / J",
        "S / J",
        "J TF/s",
        "read ms",
        "error",
    )
)


def cells(row: dict[str, Any]) -> list[str]:
    ms = {c: row[c]["median"] * 1e3 for c in COLUMNS if c in row}
    flops = Case(**row["case"]).flops
    ratios = [
        f"{ms[c] / ms['J']:.{digits}f}" if c in ms else "" for c, digits in (("G", 2), ("S", 1))
    ]
    return [
        row["case"]["name"], row["sizes"], *(f"{ms[c]:.3f}" if c in ms else "" for c in COLUMNS),
        *ratios,
        f"{flops / ms['J'] / 1e9:.0f}",
        f"{row['bound'] * 1e3:.3f}" if row["bound"] else "", f"{row['error']:.2f}",
    ]  # fmt: skip


def in_order(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """By shape: a run has all shapes of one kind of sizes before the next kind."""
    names = list(dict.fromkeys(row["case"]["name"] for row in rows))
    return sorted(rows, key=lambda r: (names.index(r["case"]["name"]), SIZES.index(r["sizes"])))


TABLE = command.Table(
    "moe", lambda row: (row["case"]["name"], row["sizes"]), lambda _: HEADING,
    command.joined(cells),
)  # fmt: skip


def main() -> int:
    args = command.parse(__doc__, lists=",".join(LISTS))
    jflux.config.update(strict=True)
    others = peers.start(filter(None, args.peers.split(",")), moe_peers.PEERS)

    def row_of(case: Case, kind: str) -> command.Row:
        try:
            return measure(case, kind, args.rounds, others)
        except Unavailable as e:  # a worker that has begun, and then broke off
            print(f"{case.name}, {kind}: {e}; again, without peers", file=sys.stderr)
            return measure(case, kind, args.rounds)

    cases = [(LISTS[name], kind) for kind in SIZES for name in args.lists.split(",")]
    TABLE.measure(
        args, {(case.name, kind): functools.partial(row_of, case, kind) for case, kind in cases}
    )
    for peer in others:
        peer.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
