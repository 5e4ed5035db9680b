"""How a figure is taken.

For one shape all contestants are timed in turn, round after round, in one process, in orders in
which each comes after each other one as often, so that clocks and temperature are the same for all;
the median over rounds counts. A contestant is a jitted loop whose iterations depend on each other
(XLA merges identical ones), so that host dispatch is paid once. Inputs are normal random numbers. A
rate above the chip's peak is refused: it means that the benchmark measures something else.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jflux
from jflux import _trial, reference
from jflux._trial import Timing

from . import peers, rates
from .shapes import A2A, AG, AR, Shape


def contestants(shape: Shape) -> dict[str, Callable[[jax.Array, jax.Array], jax.Array]]:
    """Functions of one rank's (x, w): C the communication alone, S XLA's sequential op, J jflux.
    C's operand is what it would see inside S."""
    if shape.op == AG:
        return {
            "C": lambda x, w: lax.all_gather(x, "tp", axis=0, tiled=True),
            "S": lambda x, w: reference.all_gather_matmul(x, w, axis_name="tp"),
            "J": lambda x, w: jflux.all_gather_matmul(x, w, axis_name="tp"),
        }
    if shape.op == AR:
        return {
            "C": lambda x, w: lax.psum(x, "tp"),
            "S": lambda x, w: reference.matmul_all_reduce(x, w, axis_name="tp"),
            "J": lambda x, w: jflux.matmul_all_reduce(x, w, axis_name="tp"),
        }
    if shape.op == A2A:
        options = _trial.options(A2A)
        return {
            "C": lambda x, w: lax.all_to_all(x, "tp", **options, tiled=True),
            "S": lambda x, w: reference.matmul_all_to_all(x, w, axis_name="tp", **options),
            "J": lambda x, w: jflux.matmul_all_to_all(x, w, axis_name="tp", **options),
        }
    return {
        "C": lambda x, w: lax.psum_scatter(x, "tp", scatter_dimension=0, tiled=True),
        "S": lambda x, w: reference.matmul_reduce_scatter(x, w, axis_name="tp"),
        "J": lambda x, w: jflux.matmul_reduce_scatter(x, w, axis_name="tp"),
    }


def operands(shape: Shape, mesh: Mesh, dtype=jnp.bfloat16) -> dict[str, tuple]:
    """(x, w, x spec, w spec, out spec) for each contestant, made on the devices."""

    def make(shape_, spec, seed):
        return _trial.normal(mesh, spec, shape_, dtype, seed=seed)

    n_ranks = mesh.devices.size
    x_spec, w_spec, y_spec = _trial.specs(shape.op, "tp")
    if shape.op == AG:
        gathered = make((shape.m, n_ranks * shape.k), P(None, "tp"), 3)
        full = (gathered, P(None, "tp"))
    else:
        full = None
    x, w = _trial.operands(shape.op, shape.m, shape.n, shape.k, mesh, "tp", dtype)
    seq = (x, w, x_spec, w_spec, y_spec)
    if full is None:
        gemm = (x, w, x_spec, w_spec, P("tp", None))
    else:
        gemm = (full[0], w, full[1], w_spec, P(None, "tp"))
    if shape.op == AG:
        comm = (x, w, x_spec, w_spec, P(None, None))
    elif shape.op == A2A:
        comm = (make((shape.m, shape.n), x_spec, 4), w, x_spec, w_spec, y_spec)
    else:
        partial = make((n_ranks * shape.m, shape.n), P("tp", None), 4)
        comm = (partial, w, P("tp", None), w_spec, y_spec)
    return {"G": gemm, "C": comm, "S": seq, "J": seq, "K": seq}


def build(shape: Shape, mesh: Mesh, iterations: int, dtype=jnp.bfloat16):
    """{name: () -> None}: each call runs `iterations` calls and waits for them. G is the product
    alone. Where jflux takes a product and a collective, K is its one kernel."""
    ops = {"G": lambda x, w: x @ w, **contestants(shape)}
    data = operands(shape, mesh, dtype)

    def compile_(name, op):
        x, w, x_spec, w_spec, y_spec = data[name]
        body = _trial.loop(op, iterations)
        return _trial.compiled(body, mesh, (x_spec, w_spec), y_spec, x, w)

    programs = {name: compile_(name, op) for name, op in ops.items()}
    if not is_one_kernel(shape.op, programs["J"]):
        with jflux.config(always=True):
            kernel = compile_("K", ops["J"])
        if is_one_kernel(shape.op, kernel):
            programs["K"] = kernel
    return {name: _trial.run_of(f, *data[name][:2]) for name, f in programs.items()}


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
    """{"G": Timing, "C": ..., "S": ..., "J": ...} for one shape; "K" too where J is no one
    kernel, and those of the peers that take it."""
    ranks = mesh.devices.size
    iterations = _trial.iterations_for(target_seconds, shape.flops(ranks))
    runs = build(shape, mesh, iterations)
    for peer in others:
        try:
            runs[peer.name] = peer.run_of(shape, iterations)
        except peers.Unavailable as e:
            print(f"{shape}: {e}", file=sys.stderr)
    timings = _trial.interleave(runs, iterations, rounds)
    check_rates(shape, ranks, {name: timing.median for name, timing in timings.items()})
    return timings


HEADING = (
    f"{'op':22} {'m':>5} {'n':>6} {'k':>6} {'G ms':>8} {'C ms':>8} {'S ms':>8} {'J ms':>8} "
    f"{'J/S':>6} {'E':>6} {'J TF/s':>7}"
)


def line(shape: Shape, ranks: int, timings: Mapping[str, Timing]) -> str:
    """One row of the table under HEADING, and who else was timed. E is 1 where communication is
    wholly hidden (Flux, arXiv 2406.06858, equation 2)."""
    g, c, s, j = (timings[name].median for name in "GCSJ")
    efficiency = 1 - (j - g) / (s - g) if s > g else float("nan")
    return (
        f"{shape.op:22} {shape.m:5} {shape.n:6} {shape.k:6} {g * 1e3:8.3f} {c * 1e3:8.3f} "
        f"{s * 1e3:8.3f} {j * 1e3:8.3f} {j / s:6.3f} {efficiency:6.2f} "
        f"{shape.flops(ranks) / j / 1e12:7.0f}"
        + "".join(f"  {o} {timings[o].median * 1e3:.3f}" for o in "KPT" if o in timings)
    )
