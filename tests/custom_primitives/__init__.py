"""every_primitive.h: one call of every device primitive, by threads, warps and blocks."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from harness import groups_of
from jax import lax

import jflux

SOURCES = Path(__file__).parent
#: Of the environment: a library that is built already.
LIBRARY = "JFLUX_TEST_PRIMITIVES"

LEVELS, PIECES, AREAS = 3, 4, 8  # kLevels, kPieces, kAreas


def load(path: str) -> None:
    library = ctypes.CDLL(path)
    cuda = {}
    if hasattr(library, "EveryPrimitiveCuda"):
        cuda = {
            "cuda": library.EveryPrimitiveCuda,
            "load_kernels": library.EveryPrimitiveLoadKernels,
        }
    jflux.register_custom_call("every_primitive", cpu=library.EveryPrimitiveCpu, **cuda)


def x_shape(world: int, count: int) -> tuple[int, ...]:
    """Of one rank."""
    return LEVELS, PIECES, world, count


def reference(x: jax.Array, *, axis_name: Any) -> jax.Array:
    sent = lax.all_to_all(x, axis_name, 2, 2, tiled=True)
    everyone = lax.all_gather(x, axis_name)
    shared = jnp.stack([everyone[p % x.shape[2], :, p] for p in range(PIECES)], axis=1)
    return jnp.stack([sent] * (AREAS - 1) + [shared], axis=2)


def every_primitive(x: jax.Array, *, axis_name: Any) -> jax.Array:
    """x [level, piece, rank, count] -> [level, piece, area, rank, count], as every_primitive.h has
    them. Inside shard_map."""
    y = jax.ShapeDtypeStruct((LEVELS, PIECES, AREAS, *x.shape[2:]), np.int32)
    call = jflux.custom_call(
        "every_primitive",
        y,
        axis_name=axis_name,
        data_bytes=y.size * 4,
        num_signals=y.size // x.shape[3],
        reference=reference,
    )
    return call(x)


def exact(mesh: Any, axis_name: Any, x: np.ndarray) -> np.ndarray:
    """Of every device's x, the result."""
    lead = mesh.devices.shape
    y = np.zeros((*lead, LEVELS, PIECES, AREAS, *x.shape[-2:]), np.int32)
    for group in groups_of(mesh, axis_name):
        for q, at in enumerate(group):
            for r, sender in enumerate(group):
                y[at][:, :, :-1, r] = x[sender][:, :, None, q]
            for p in range(PIECES):
                y[at][:, p, -1] = x[group[p % len(group)]][:, p]
    return y
