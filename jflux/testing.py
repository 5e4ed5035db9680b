"""Tools for tests of code that uses jflux: tolerances, poisoned workspaces, planted faults."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import _heap
from ._native import lib


def poison_workspaces() -> None:
    """Fills every workspace that no call holds with NaN, so that a read of what nobody wrote in
    this call shows. Only between calls: wait for results first. With several GPU processes it is
    half of each workspace, the one of the last call: a peer may have begun with the other."""
    if platform := _heap.existing_or_new():
        lib.heap_poison(platform)


def set_epochs(epoch: int) -> None:
    """As if each workspace had made so many calls, up to 2^40; on the CPU, as if there had been so
    many calls in all. Only between calls: all processes do it after one barrier and before
    another."""
    if platform := _heap.existing_or_new():
        lib.heap_set_epochs(platform, epoch)


@contextlib.contextmanager
def failing_launches(device: jax.Device) -> Iterator[None]:
    """The handlers on this GPU of this process fail before they launch. A call that others of its
    group have launched ends in errors there too, and no call can be made after it."""
    lib.cuda_fail_launches(device.local_hardware_id)
    try:
        yield
    finally:
        lib.cuda_fail_launches(-1)


@contextlib.contextmanager
def planted_faults(*, skip_waits: bool = False, max_delay_us: int = 0) -> Iterator[None]:
    """Misbehaves on purpose, on all ranks of this process, to show that a test would notice.

    Args:
      skip_waits: no rank waits for its peers' data.
      max_delay_us: each rank starts its part of each call at a random time up to this much later.
    """
    _set_hooks(skip_waits, max_delay_us)
    try:
        yield
    finally:
        _set_hooks(False, 0)


def _set_hooks(skip_waits: bool, max_delay_us: int) -> None:
    if platform := _heap.existing_or_new():
        lib.heap_test_hooks(platform, skip_waits, max_delay_us)


def assert_close(y: Any, exact: np.ndarray, magnitude: np.ndarray, dtype: Any, k: int) -> None:
    """Asserts ``|y - exact| <= tolerance(dtype, k) * magnitude`` for every element, and no NaN.

    Args:
      y: the result.
      exact: the same in float64.
      magnitude: ``|x| @ |w|`` in float64: what the terms of each sum add up to without their signs.
      dtype: of y.
      k: how many terms each sum has in all.
    """
    error = error_in_bounds(y, exact, magnitude, dtype, k)
    if not error <= 1:
        raise AssertionError(f"the largest error is {error:.3g} times what {dtype} sums may have")


def error_in_bounds(y: Any, exact: Any, magnitude: Any, dtype: Any, k: int) -> float:
    """The largest error as a multiple of what :func:`assert_close` allows; inf for NaN."""
    # Below the smallest normal number rounding is absolute.
    floor = 8 * float(jnp.finfo(dtype).smallest_subnormal)
    bound = tolerance(dtype, k) * np.asarray(magnitude) + floor
    error = np.abs(np.asarray(y, np.float64) - np.asarray(exact)) / bound
    return float(np.max(np.nan_to_num(error, nan=np.inf), initial=0.0))


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
