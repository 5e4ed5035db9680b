"""How a figure is taken.

For one shape all contestants are timed in turn, round after round, in one process, in orders in
which each comes after each other one as often, so that clocks and temperature are the same for all;
the median over rounds counts. A contestant is a jitted loop whose iterations depend on each other
(XLA merges identical ones), so that the host calls it once. Inside, the host still launches XLA's
own collectives one by one, where it captures jflux's kernels in CUDA graphs: XLA's sequence is
timed with its collectives captured too, and the faster one of both counts. Inputs are normal random
numbers. A rate above the chip's peak is refused: the benchmark would measure something else.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jflux
from jflux._tools import trials
from jflux._tools.trials import Trial

from . import peers, rates
from .collectives import CAPTURED
from .shapes import Shape, fastest_xla, of_row


def local(spec: P, shape: tuple[int, int], ranks: int) -> tuple[int, int]:
    """One rank's part of a matrix."""
    split = [entry is not None for entry in (*spec, None, None)][:2]
    return shape[0] // (ranks if split[0] else 1), shape[1] // (ranks if split[1] else 1)


def contestants(shape: Shape) -> dict[str, Callable[[jax.Array, jax.Array], jax.Array]]:
    """Functions of one rank's (x, w): G the product alone, C the communication alone, S XLA's
    sequential op, J jflux. The operands of G and C are what they would see inside S."""
    trial = Trial(shape.spec)
    return {
        "G": lambda x, w: x @ w,
        "C": lambda x, w: shape.collective.lax(x, "tp"),
        "S": trial.function(reference=True),
        "J": trial.function(),
    }


def operands(shape: Shape, mesh: Mesh, dtype: Any = jnp.bfloat16) -> dict[str, tuple[Any, ...]]:
    """(x, w, x spec, w spec, out spec) for each contestant, made on the devices."""
    ranks, trial = mesh.devices.size, Trial(shape.spec)
    x_spec, w_spec, y_spec = trial.partition
    x, w = trial.operands(shape.m, shape.n, shape.k, mesh, dtype)
    one_x = local(x_spec, (shape.m, shape.k), ranks)
    _, one_n = local(w_spec, (shape.k, shape.n), ranks)
    stacked = P("tp", None)

    def of_each_rank(one: tuple[int, ...], seed: int) -> jax.Array:
        return trials.normal(mesh, stacked, (ranks * one[0], one[1]), dtype, seed=seed)

    if shape.spec.product == "after":
        sent, multiplied = one_x, shape.collective.shape(one_x, ranks)
    else:
        sent, multiplied = (one_x[0], one_n), one_x
    whole = (x, w, x_spec, w_spec, y_spec)
    return {
        "G": (of_each_rank(multiplied, 3), w, stacked, w_spec, stacked),
        "C": (of_each_rank(sent, 4), w, stacked, w_spec, stacked),
        "S": whole, "S captured": whole, "J": whole, "K": whole,
    }  # fmt: skip


def build(shape: Shape, mesh: Mesh, iterations: int, dtype=jnp.bfloat16):
    """{name: () -> None}: each call runs `iterations` calls and waits for them. G is the product
    alone, and "S captured" S with its collectives in CUDA graphs. Where jflux takes a product and a
    collective, K is its one kernel."""
    ops = contestants(shape)
    data = operands(shape, mesh, dtype)

    def compile_(name, op, options=None):
        x, w, x_spec, w_spec, y_spec = data[name]
        body = trials.loop(op, iterations)
        return trials.compiled(body, mesh, (x_spec, w_spec), y_spec, x, w, options=options)

    programs = {name: compile_(name, op) for name, op in ops.items()}
    programs["S captured"] = compile_("S captured", ops["S"], CAPTURED)
    if not is_one_kernel(shape.op, programs["J"]):
        with jflux.config(always=True):
            kernel = compile_("K", ops["J"])
        if is_one_kernel(shape.op, kernel):
            programs["K"] = kernel
    return {name: trials.run_of(f, *data[name][:2]) for name, f in programs.items()}


def is_one_kernel(op: str, program: Any) -> bool:
    return f'"jflux_{op}"' in program.as_text()


def check_rates(shape: Shape, ranks: int, seconds: Mapping[str, float]) -> None:
    """Raises if one of the contestants' figures says that the chip, or its links, did more than
    they can. G moves nothing to peers, and C multiplies nothing."""
    flops, links = shape.flops(ranks), rates.least_link_bytes(shape, ranks)
    for name, value in seconds.items():
        rates.check(
            f"{shape}, {name}",
            value,
            flops=0 if name == "C" else flops,
            link_bytes=0 if name == "G" else links,
        )


def measure(
    shape: Shape,
    mesh: Mesh,
    rounds: int = 7,
    target_seconds: float = 0.03,
    others: Sequence[peers.Peer] = (),
):
    """{"G": Timing, "C": ..., "S": ..., "S captured": ..., "J": ...} for one shape; "K" too where J
    is no one kernel, and those of the peers that take it."""
    ranks = mesh.devices.size
    iterations = trials.iterations_for(target_seconds, shape.flops(ranks))
    runs = build(shape, mesh, iterations)
    for peer in others:
        try:
            runs[peer.name] = peer.run_of(shape, iterations)
        except peers.Unavailable as e:
            print(f"{shape}: {e}", file=sys.stderr)
    timings = trials.interleave(runs, iterations, rounds)
    check_rates(shape, ranks, {name: timing.median for name, timing in timings.items()})
    return timings


HEADING = (
    f"{'op':22} {'m':>5} {'n':>6} {'k':>6} {'G ms':>8} {'C ms':>8} {'S ms':>8} {'J ms':>8} "
    f"{'J/S':>6} {'E':>6} {'J TF/s':>7}"
)


def line(row: Mapping[str, Any], ranks: int) -> str:
    """One row of the table under HEADING, and who else was timed. E is 1 where communication is
    wholly hidden (Flux, arXiv 2406.06858, equation 2)."""
    shape = of_row(row)
    g, c, s, j = (row[name]["median"] for name in ("G", "C", fastest_xla(row), "J"))
    efficiency = 1 - (j - g) / (s - g) if s > g else float("nan")
    return (
        f"{shape.op:22} {shape.m:5} {shape.n:6} {shape.k:6} {g * 1e3:8.3f} {c * 1e3:8.3f} "
        f"{s * 1e3:8.3f} {j * 1e3:8.3f} {j / s:6.3f} {efficiency:6.2f} "
        f"{shape.flops(ranks) / j / 1e12:7.0f}"
        + "".join(f"  {o} {row[o]['median'] * 1e3:.3f}" for o in "KPT" if o in row)
    )
