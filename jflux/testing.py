"""Tools for tests of code that uses jflux: tolerances, poisoned workspaces, planted faults."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np

from . import _heap


def poison_workspaces() -> None:
    """Fills every workspace that no call holds with NaN, so that a read of what nobody wrote in
    this call shows. Only between calls: wait for results first."""
    _heap.poison()


@contextlib.contextmanager
def planted_faults(*, skip_waits: bool = False, max_delay_us: int = 0) -> Iterator[None]:
    """Misbehaves on purpose, on all ranks of this process, to show that a test would notice.

    Args:
      skip_waits: no rank waits for its peers' data.
      max_delay_us: each rank starts its part of each call at a random time up to this much later.
    """
    _heap.set_test_hooks(skip_waits, max_delay_us)
    try:
        yield
    finally:
        _heap.set_test_hooks(False, 0)


def tolerance(dtype: jnp.dtype, k: int) -> float:
    """A bound on ``|y - exact| / (|x| @ |w|)`` for a product over `k` terms in all.

    One rounding of the result in `dtype`, one of each partial product that travels, and sums in
    float32 (float64) whose error grows as the square root of `k` (Higham, Accuracy and Stability
    of Numerical Algorithms, section 3.1: the bound is linear, the typical error is not).
    """
    dtype = np.dtype(dtype)
    accumulator = np.float64 if dtype == np.float64 else np.float32
    unit = float(jnp.finfo(dtype).eps)
    return 2 * unit + 4 * float(np.finfo(accumulator).eps) * float(np.sqrt(k))
