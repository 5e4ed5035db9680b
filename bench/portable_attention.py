"""Attention in portable code beside PyTorch's FlashAttention-2, which uses mma.sync too, on a GPU
that neither is for: milliseconds.

python -m bench.portable_attention --out docs/experiments/0062-portable-attention.json

J is the kernel of compute capability 8.0 (docs/decisions/0050), H Hopper's own, F PyTorch's
`scaled_dot_product_attention` by its backend FLASH_ATTENTION. Each of them forward, and (b) the
backward pass alone: jflux gets rowsum(do o) and writes float32, PyTorch computes that and writes
bfloat16.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jflux
from jflux import _config, _native
from jflux._ops.attention import flash_attention
from jflux._ops.attention._blockwise import Positions, Scores
from jflux._tools import trials

from . import command, peers


@dataclasses.dataclass(frozen=True)
class Case:
    batch: int
    length: int
    heads: int
    groups: int
    width: int
    causal: bool

    @property
    def flops(self) -> float:
        """Of the forward pass. The backward pass has 2.5 times as many."""
        pairs = self.length**2 / (2 if self.causal else 1)
        return 4.0 * self.batch * self.heads * self.width * pairs

    @property
    def name(self) -> str:
        mask = "causal" if self.causal else "full"
        shape = f"{self.batch} x {self.length}, {self.heads}/{self.groups} x {self.width}"
        return f"{shape}, {mask}"


CASES = [
    Case(1, 8192, 32, 8, 128, True),
    Case(4, 2048, 32, 8, 128, True),
    Case(1, 8192, 32, 32, 128, False),
    Case(1, 8192, 32, 8, 64, True),
    Case(1, 32768, 32, 8, 128, True),
]


def operands(case: Case, mesh: Mesh) -> tuple[jax.Array, ...]:
    """q, k, v, do, and the log-sum-exp and rowsum(do o) of a backward pass."""
    counts = (case.heads, case.groups, case.groups, case.heads)
    q, k, v, do = (
        trials.normal(mesh, P(), (case.batch, case.length, n, case.width), jnp.bfloat16, seed=i)
        for i, n in enumerate(counts)
    )
    o, lse = jax.jit(functools.partial(forward, case))(q, (k, v))
    delta = jnp.sum(o.astype(jnp.float32) * do.astype(jnp.float32), -1)
    return q, k, v, do, lse, delta


def scores(case: Case) -> Scores:
    return Scores(case.width**-0.5, None, case.causal, None)


def positions(case: Case) -> Positions:
    return Positions(jnp.arange(case.length, dtype=jnp.int32), None)


def forward(case: Case, q: jax.Array, kv: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    at = positions(case)
    return flash_attention.forward(q, at, *kv, at, scores(case), q.dtype)


def backward(case: Case, q: jax.Array, rest: tuple[jax.Array, ...]) -> jax.Array:
    k, v, do, lse, delta = rest
    at = positions(case)
    dq, dk, dv = flash_attention.backward(q, at, k, v, at, scores(case), lse, do, delta)
    return dq + jnp.sum(dk[:, :1]) + jnp.sum(dv[:, :1])  # which need both kernels


def program(
    f: Callable[..., Any], mesh: Mesh, iterations: int, q: jax.Array, rest: tuple[jax.Array, ...]
) -> Callable[[], None]:
    compiled = trials.compiled(trials.loop(f, iterations), mesh, (P(), P()), P(), q, rest)
    if "jflux_flash_attention" not in compiled.as_text():
        raise RuntimeError("no kernel of jflux is called")
    return trials.run_of(compiled, q, rest)


def measure(case: Case, mesh: Mesh, torch: peers.Torch | None, rounds: int) -> dict[str, Any]:
    """One row."""
    q, k, v, do, lse, delta = operands(case, mesh)
    passes = {
        "": (lambda q, kv: forward(case, q, kv)[0], (k, v), case.flops),
        " (b)": (functools.partial(backward, case), (k, v, do, lse, delta), 2.5 * case.flops),
    }
    row: dict[str, Any] = {"case": dataclasses.asdict(case)}
    for suffix, (f, rest, flops) in passes.items():
        iterations = trials.iterations_for(0.05, 2 * flops)
        runs = {}
        for name, arch in (("J", _native.PORTABLE_ARCH), ("H", _native.HOPPER_ARCH)):
            with _config.override(arch=arch), jflux.config(unchecked_kernels=True):
                runs[name] = program(f, mesh, iterations, q, rest)
        if torch is not None:
            told = dataclasses.asdict(case) | {"op": "attention", "backward": bool(suffix)}
            runs["F"] = torch.runs(told | {"name": suffix}, iterations)
        timings = trials.interleave(runs, iterations, rounds)
        row |= {f"{name}{suffix}": dataclasses.asdict(t) for name, t in timings.items()}
    return row


COLUMNS = [
    f"{name}{suffix}{unit}"
    for suffix in ("", " (b)")
    for unit in ("", ", TFLOP/s")
    for name in "JFH"
]


def cells(row: dict[str, Any]) -> list[str]:
    case = Case(**row["case"])
    found = [case.name]
    for suffix, flops in (("", case.flops), (" (b)", 2.5 * case.flops)):
        seconds = [row.get(f"{name}{suffix}", {}).get("median") for name in "JFH"]
        found += ["" if s is None else f"{s * 1e3:.3f}" for s in seconds]
        found += ["" if s is None else f"{flops / s / 1e12:.0f}" for s in seconds]
    return found


TABLE = command.Table(
    "portable_attention", lambda row: Case(**row["case"]),
    lambda row: " | ".join(["B x S, heads/groups x elements", *COLUMNS]), command.joined(cells),
)  # fmt: skip


def main() -> int:
    args = command.parser(__doc__, ranks=1).parse_args()
    jflux.config.update(strict=True)
    mesh = Mesh(np.array(jax.devices()[:1]), ("tp",))
    try:
        torch = peers.Torch(mesh)
    except peers.Unavailable as why:
        print(f"F is left out: {why}", file=sys.stderr)
        torch = None
    try:
        TABLE.measure(
            args,
            {case: functools.partial(measure, case, mesh, torch, args.rounds) for case in CASES},
        )
    finally:
        if torch is not None:
            torch.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
