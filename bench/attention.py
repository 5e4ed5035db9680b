"""Checks and times attention over a sequence that is split over GPUs; the table comes last.

python -m bench.attention --ranks 2 --out bench/results/2xh100_attention.json [--lists causal]
                          [--peers transformer_engine,flash_attn3]

For each shape, S positions over all ranks, forward and (f+b) forward and backward:

    J       jflux.attention, in zigzag order, keys and values gathered
    ring    the same around a ring
    G       all of it on one GPU, jax.nn.dot_product_attention by cuDNN, divided by the ranks
    A       keys and values by lax.all_gather, then cuDNN (without a mask alone: cuDNN's causal
            mask has no offset)
    U       Ulysses in plain JAX: lax.all_to_all of heads, cuDNN, lax.all_to_all back; the sequence
            in its own order
    JU      jflux.ulysses_attention, the same
    auto, JU zigzag         jflux.attention in zigzag order, in the form that it chooses, and with
            form="ulysses" (list "ulysses")
    own auto, own gather    the same in the sequence's own order, as it chooses, and keys gathered
    K       jflux.attention by its own kernels: with a window as long as the sequence, which cuDNN's
            parts do not take; K ring: the same around a ring
    TE, TE ring, FA3    Transformer Engine's and flash-attn3-jax's (bench/attention_peers.py), where
            they are asked for and installed; FA3 on one GPU, divided by the ranks

and with windows, softcaps and heads that cuDNN's parts do not take (list "masked"):

    J       jflux.attention, by its own kernels
    X       the same with jflux.config(fused=False), in XLA's operations

Values are compared to float64 before anything is timed, on positions and heads drawn at random.
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
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jflux
from jflux._tools import trials

from . import attention_peers, command, peers, rates
from .peers import Unavailable


@dataclasses.dataclass(frozen=True)
class Case:
    """`positions` over all ranks, in bfloat16, with heads of 128 elements."""

    name: str
    positions: int
    heads: int
    groups: int
    causal: bool
    batch: int = 1
    width: int = 128
    window: int | None = None  # of positions before a query's own
    softcap: float | None = None
    brief: bool = False  # no rings, no jflux's own kernels, and not on one GPU

    @property
    def masked(self) -> bool:
        return self.window is not None or self.softcap is not None or self.width > 128

    @property
    def flops(self) -> float:
        """Of the forward pass, over all ranks."""
        keys: float = self.positions
        if self.causal:
            keys = self.positions / 2
            if self.window is not None:
                keys = self.window * (1 - self.window / (2 * self.positions))
        return 4.0 * self.batch * self.heads * self.positions * keys * self.width


LISTS: dict[str, list[Case]] = {
    "causal": [
        Case("8192, causal", 8192, 32, 8, True),
        Case("16384, causal", 16384, 32, 8, True),
        Case("32768, causal", 32768, 16, 4, True),
    ],
    "ulysses": [
        Case("1 x 8192, 32 heads", 8192, 32, 8, True, brief=True),
        Case("1 x 32768, 32 heads", 32768, 32, 8, True, brief=True),
        Case("4 x 8192, 64 heads", 8192, 64, 8, True, batch=4, brief=True),
    ],
    "full": [Case("16384, full", 16384, 32, 8, False)],
    "masked": [
        Case("16384, window 4096", 16384, 32, 8, True, window=4096),
        Case("16384, softcap 50", 16384, 32, 8, True, softcap=50.0),
        Case("8192, 64 elements, window 1024", 8192, 32, 8, True, width=64, window=1024),
        Case("8192, 256 elements, softcap 50", 8192, 16, 8, True, width=256, softcap=50.0),
    ],
}
HEADS = ("U", "JU")  # contestants that exchange heads
#: Options of the forms that a call may take.
CHOICES: dict[str, dict[str, Any]] = {
    "auto": {},
    "JU zigzag": {"form": "ulysses"},
    "own auto": {"layout": "contiguous"},
    "own gather": {"layout": "contiguous", "form": "gather"},
}
SEQUENCE, PAIR = P(None, "cp"), P(None, None, "cp")


def operands(case: Case, mesh: Mesh) -> tuple[jax.Array, jax.Array]:
    """q [B, S, H, D], and keys and values [2, B, S, G, D]."""
    q = (case.batch, case.positions, case.heads, case.width)
    kv = (2, case.batch, case.positions, case.groups, case.width)
    return (
        trials.normal(mesh, SEQUENCE, q, jnp.bfloat16, seed=1),
        trials.normal(mesh, PAIR, kv, jnp.bfloat16, seed=2),
    )


# ---- What is timed -------------------------------------------------------------------------------


def split(case: Case, **options: Any) -> Callable[..., jax.Array]:
    """jflux's, of one rank's q and kv."""
    if case.masked:
        options |= {"softcap": case.softcap, "window": case.window and (case.window, 0)}
    return lambda q, kv: jflux.attention(q, *kv, axis_name="cp", causal=case.causal, **options)


def plain(case: Case) -> Callable[..., jax.Array]:
    """All of it on one device."""
    implementation: Any = "cudnn" if jax.default_backend() == "gpu" else None
    return lambda q, kv: jax.nn.dot_product_attention(
        q, *kv, is_causal=case.causal, implementation=implementation
    )


def gathered(case: Case) -> Callable[..., jax.Array]:
    def attend(q: jax.Array, kv: jax.Array) -> jax.Array:
        return plain(case)(q, lax.all_gather(kv, "cp", axis=2, tiled=True))

    return attend


def by_heads(case: Case, name: str) -> Callable[..., jax.Array]:
    """Each rank attends to all positions with its part of the heads. U: in plain JAX."""

    def attend(q: jax.Array, kv: jax.Array) -> jax.Array:
        q, kv = (lax.all_to_all(a, "cp", a.ndim - 2, a.ndim - 3, tiled=True) for a in (q, kv))
        return lax.all_to_all(plain(case)(q, kv), "cp", 1, 2, tiled=True)

    def ours(q: jax.Array, kv: jax.Array) -> jax.Array:
        return jflux.ulysses_attention(q, *kv, axis_name="cp", causal=case.causal)

    return {"U": attend, "JU": ours}[name]


def whole(f: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """`f`, with its last element added to its first, which is all that the loop hands on: XLA
    leaves out what computes the others (docs/experiments/0037)."""

    def run(q: jax.Array, kv: jax.Array) -> jax.Array:
        y = f(q, kv)
        both = y[:1, :1, :1, :1] + y[-1:, -1:, -1:, -1:]
        return lax.dynamic_update_slice(y, both, (0, 0, 0, 0))

    return run


def with_gradients(f: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Forward and backward: dq, and an element of each of the other gradients."""

    def run(q: jax.Array, kv: jax.Array) -> jax.Array:
        y, pull = jax.vjp(f, q, kv)
        dq, dkv = pull(y)
        return dq + dkv[0, 0, 0, 0, 0] + dkv[1, 0, 0, 0, 0]

    return run


def contestants(case: Case, ranks: int) -> dict[str, Callable[..., jax.Array]]:
    """Of one rank's q and kv. A ring of one rank is none, and with a window cuDNN computes it."""
    forward = {"J": split(case, form="gather")}
    if case.masked:
        forward["X"] = forward["J"]
    elif ranks > 1:
        if not case.brief:
            forward["K"] = split(case, form="gather", window=case.positions)
        if not case.causal:
            forward["A"] = gathered(case)
        if case.groups % ranks == 0:
            forward |= {name: by_heads(case, name) for name in HEADS}
            if case.brief:
                forward |= {name: split(case, **options) for name, options in CHOICES.items()}
    if ranks > 1 and not case.brief:
        forward["ring"] = split(case, form="ring")
        if not case.masked:
            forward["K ring"] = split(case, form="ring", window=case.positions)
    both = {f"{name} f+b": with_gradients(f) for name, f in forward.items()}
    return {name: whole(f) for name, f in (forward | both).items()}


# ---- Values --------------------------------------------------------------------------------------


def error_of(y: Any, scores: np.ndarray, values: np.ndarray) -> float:
    """The largest error of a query's result y [D], given its scores [S] and values [S, D] in
    float64, in units of bfloat16's rounding of the result."""
    p = np.exp(scores - scores.max())
    wanted = p @ values / p.sum()
    # Probabilities are rounded too: their errors average over the keys.
    bound = 2.0**-8 * (np.abs(wanted) + np.abs(wanted).max())
    return float((np.abs(np.asarray(y, np.float64) - wanted) / bound).max())


def check(
    case: Case, f: Any, mesh: Mesh, q: jax.Array, kv: jax.Array, zigzag: bool = True
) -> float:
    """A contestant's largest error (`error_of`) over positions and heads drawn at random."""
    ranks = mesh.size
    arrays = q, kv
    if zigzag:
        arrays = jflux.reorder_for_causal(q, ranks), jflux.reorder_for_causal(kv, ranks, axis=2)
    program = jax.shard_map(
        f, mesh=mesh, in_specs=(SEQUENCE, PAIR), out_specs=SEQUENCE, check_vma=False
    )
    y = jax.jit(program)(*arrays)
    y = jflux.restore_order(y, ranks) if zigzag else y
    rng = np.random.default_rng(0)
    worst = 0.0
    for _ in range(12):
        b, head = int(rng.integers(case.batch)), int(rng.integers(case.heads))
        at = int(rng.integers(case.positions))
        group = head * case.groups // case.heads
        keys, values = (np.asarray(kv[i, b, :, group], np.float64) for i in range(2))
        scores = keys @ np.asarray(q[b, at, head], np.float64) / case.width**0.5
        if case.softcap is not None:
            scores = case.softcap * np.tanh(scores / case.softcap)
        if case.causal:
            first = 0 if case.window is None else max(0, at - case.window)
            scores, values = scores[first : at + 1], values[first : at + 1]
        worst = max(worst, error_of(y[b, at, head], scores, values))
    return worst


def _others(
    case: Case,
    others: Sequence[attention_peers.Peer],
    mesh: Mesh,
    iterations: int,
    split_arrays: tuple[jax.Array, ...],
    whole_arrays: tuple[jax.Array, ...],
) -> dict[str, Callable[[], None]]:
    """What peers run; says why one cannot."""
    found = {}
    call = attention_peers.Call(case.batch, case.positions, case.width, case.causal)
    own = jax.shard_map(
        split(case, form="gather"), mesh=mesh, in_specs=(SEQUENCE, PAIR), out_specs=SEQUENCE,
        check_vma=False,
    )  # fmt: skip
    for peer in others:
        arrays = whole_arrays if peer.on_one else split_arrays
        want = jax.jit(plain(case) if peer.on_one else own)(*arrays)
        for name, f in peer.forms(call).items():
            for column, timed in {name: f, f"{name} f+b": with_gradients(f)}.items():
                loop = trials.loop(whole(timed), iterations)
                try:
                    program = attention_peers.program(peer, column, f, want, loop, *arrays)
                except Unavailable as e:
                    print(f"{case.name}: {e}", file=sys.stderr)
                else:
                    found[column] = trials.run_of(program, *arrays)
    return found


def measure(
    case: Case, ranks: int, rounds: int, others: Sequence[attention_peers.Peer] = ()
) -> dict[str, Any]:
    """One row of the table."""
    mesh, one = (Mesh(np.array(jax.devices()[:n]), ("cp",)) for n in (ranks, 1))
    q, kv = operands(case, mesh)
    error = check(case, split(case), mesh, q, kv)
    forms = contestants(case, ranks)
    for name in (name for name in HEADS if name in forms):
        error = max(error, check(case, by_heads(case, name), mesh, q, kv, zigzag=False))
    for options in (CHOICES[name] for name in CHOICES if name in forms):
        in_zigzag = "layout" not in options
        error = max(error, check(case, split(case, **options), mesh, q, kv, zigzag=in_zigzag))
    if ranks > 1 and not case.brief:
        window = {} if case.masked else {"window": case.positions}
        error = max(error, check(case, split(case, form="gather", **window), mesh, q, kv))
    if not error <= 2:
        raise RuntimeError(f"{case.name}: an error of {error:.3g} times its bound")
    iterations = trials.iterations_for(0.05, case.flops / ranks)
    programs = {}
    for name, f in forms.items():
        with jflux.config(fused=not name.startswith("X")):
            loop = trials.loop(f, iterations)
            programs[name] = trials.lowered(loop, mesh, (SEQUENCE, PAIR), SEQUENCE, q, kv)
    whole_q, whole_kv = operands(case, one)
    on_one = {}
    if not (case.masked or case.brief):
        on_one = {"G": whole(plain(case)), "G f+b": whole(with_gradients(plain(case)))}
    for name, f in on_one.items():
        programs[name] = jax.jit(trials.loop(f, iterations)).lower(whole_q, whole_kv)
    products = {name: p.compile() for name, p in programs.items() if name.startswith("X")}
    kernels = {name: p for name, p in programs.items() if name not in products}
    compiled = trials.compile_at_once(kernels) | products
    runs = {
        name: trials.run_of(compiled[name], *((whole_q, whole_kv) if name in on_one else (q, kv)))
        for name in programs
    }
    if not case.masked:
        runs |= _others(case, others, mesh, iterations, (q, kv), (whole_q, whole_kv))
    timings = trials.interleave(runs, iterations, rounds)
    for name, timing in timings.items():
        flops = case.flops * (3.5 if "f+b" in name else 1)
        share = 1 if name.startswith(ON_ONE) else ranks
        rates.check((case.name, name), timing.median, flops=flops / share)
    return {"case": dataclasses.asdict(case), "error": error} | {
        name: dataclasses.asdict(timing) for name, timing in timings.items()
    }


# ---- The table -----------------------------------------------------------------------------------

FORMS = ("J", "ring", "A", "U", "JU", *CHOICES, "K", "K ring", "X", "TE", "TE ring")
COLUMNS = tuple(c + both for both in ("", " f+b") for c in FORMS)
ON_ONE = ("G", "FA3")
DIVIDED = tuple(c + both for c in ON_ONE for both in ("", " f+b"))
HEADING = " | ".join(
    (
        "shape",
        *(f"{c} ms" for c in COLUMNS),
        *(f"{c.replace(c.split()[0], c.split()[0] + '/N', 1)} ms" for c in DIVIDED),
        "best / J",
        "error",
    )
)


def cells(row: dict[str, Any], ranks: int) -> list[str]:
    ms = {c: row[c]["median"] * 1e3 for c in (*COLUMNS, *DIVIDED) if c in row}
    whole = {c: ms[c] / ranks for c in DIVIDED if c in ms}
    others = [whole[c] for c in ON_ONE if c in whole]
    others += [ms[c] for c in FORMS[1:] if c in ms]
    return [
        row["case"]["name"], *(f"{ms[c]:.3f}" if c in ms else "" for c in COLUMNS),
        *(f"{whole[c]:.3f}" if c in whole else "" for c in DIVIDED),
        f"{min(others) / ms['J']:.2f}" if "J" in ms and others else "",
        f"{row['error']:.2f}",
    ]  # fmt: skip


def table(ranks: int) -> command.Table:
    return command.Table(
        "attention", lambda row: Case(**row["case"]), lambda _: HEADING,
        command.joined(lambda row: cells(row, ranks)),
        lambda row: ("J f+b",),
    )  # fmt: skip


def main() -> int:
    args = command.parse(__doc__, lists=",".join(LISTS))
    mesh = Mesh(np.array(jax.devices()[: args.ranks]), ("cp",))
    others = peers.start(filter(None, args.peers.split(",")), attention_peers.PEERS, mesh)
    one = functools.partial(measure, others=others)
    table(args.ranks).measure_cases(args, LISTS, one)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
