"""A kernel of one's own, called from JAX: ``python halo_exchange.py build/libhalo_exchange.so``.

README.md says how to build it, which takes half a minute without the CUDA kernel. It then takes
five seconds on two cores, and prints there::

    halo_exchange equals lax.ppermute on 8 cpu devices
"""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")  # without a GPU

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jflux

MOST_BLOCKS = 64  # kMostBlocks in halo_exchange.h


def load(path: str) -> None:
    """Registers the handlers of the library, which has those for CUDA if it was built with it."""
    library = ctypes.CDLL(path)
    cuda = {}
    if hasattr(library, "HaloExchangeCuda"):
        cuda = {"cuda": library.HaloExchangeCuda, "load_kernels": library.HaloExchangeLoadKernels}
    jflux.register_custom_call("halo_exchange", cpu=library.HaloExchangeCpu, **cuda)


def reference(x: jax.Array, *, halo: int, axis_name: Any) -> jax.Array:
    """The same in plain lax."""
    return jflux.reference.halo_exchange(x, axis_name=axis_name, halo=halo, mode="wrap")


def halo_exchange(x: jax.Array, *, halo: int, axis_name: Any) -> jax.Array:
    """x [rows, columns] between the last `halo` rows of the rank before and the first of the one
    after, around the ring of ranks along `axis_name`. Inside shard_map."""
    rows, columns = x.shape
    call = jflux.custom_call(
        "halo_exchange",
        jax.ShapeDtypeStruct((rows + 2 * halo, columns), x.dtype),
        axis_name=axis_name,
        data_bytes=2 * halo * columns * x.dtype.itemsize,
        num_signals=2 * MOST_BLOCKS,
        reference=reference,
    )
    return call(x, halo=halo)


def main() -> None:
    load(sys.argv[1])
    mesh = Mesh(jax.devices(), "x")
    x = jax.random.normal(jax.random.key(0), (64 * mesh.size, 1000), jnp.bfloat16)

    def smooth(x, exchange):  # three steps of a stencil that reaches two rows up and down
        def step(x, _):
            padded = exchange(x, halo=2, axis_name="x").astype(jnp.float32)
            return (sum(padded[i : i + len(x)] for i in range(5)) / 5).astype(x.dtype), None

        return lax.scan(step, x, length=3)[0]

    def parallel(exchange):
        f = jax.shard_map(
            lambda x: smooth(x, exchange), mesh=mesh, in_specs=P("x"), out_specs=P("x")
        )
        return np.asarray(jax.jit(f)(x), np.float32)

    np.testing.assert_array_equal(parallel(halo_exchange), parallel(reference))
    print(f"halo_exchange equals lax.ppermute on {mesh.size} {jax.default_backend()} devices")


if __name__ == "__main__":
    main()
