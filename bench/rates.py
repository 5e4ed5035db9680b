"""What a GPU can do at most: a figure that says more measures something else, and is refused."""

from __future__ import annotations

import functools
import sys

import jax

from .shapes import Shape

# By how a GPU's name begins ("NVIDIA H100 80GB HBM3"), from NVIDIA's data sheets: dense 16-bit
# FLOP/s, and bytes a second over all NVLinks in one direction.
PEAKS = {"NVIDIA H100": (989e12, 450e9), "NVIDIA H200": (989e12, 450e9)}
MEMORY = {"NVIDIA H100": 3.0e12, "NVIDIA H200": 4.3e12}  # bytes a second, as copies reach


@functools.cache
def peaks(kind: str) -> tuple[float, float]:
    """(FLOP/s, bytes/s) of this kind of GPU; says so if it does not know them."""
    for name, found in PEAKS.items():
        if kind.startswith(name):
            return found
    if jax.default_backend() != "cpu":
        print(f"rates are not checked: bench/rates.py does not know {kind}", file=sys.stderr)
    return float("inf"), float("inf")


def read_seconds(count: float) -> float | None:
    """The time in which a copy reads so many bytes, at MEMORY bytes a second; None if this kind of
    GPU is not in there."""
    kind = jax.devices()[0].device_kind
    memory = next((rate for name, rate in MEMORY.items() if kind.startswith(name)), None)
    return count / memory if memory else None


def least_link_bytes(shape: Shape, ranks: int) -> float:
    """What reaches a rank in a call, or leaves it, of 16-bit numbers, at least."""
    others = (ranks - 1) / ranks
    columns = shape.k if shape.spec.product == "after" else shape.n
    parts = ranks if shape.collective.kind == "all_to_all" else 1
    return 2.0 * shape.m * columns * others / parts


def check(what: object, seconds: float, *, flops: float = 0, link_bytes: float = 0) -> None:
    """Raises if so much of one GPU in so many seconds is more than it can."""
    kind = jax.devices()[0].device_kind
    for amount, peak, unit in zip((flops, link_bytes), peaks(kind), ("FLOP", "B"), strict=True):
        if amount / seconds > peak:
            raise RuntimeError(
                f"{what} at {amount / seconds / 1e12:.3g} T{unit}/s is above {kind}'s peak of "
                f"{peak / 1e12:.3g}: the benchmark is wrong"
            )
