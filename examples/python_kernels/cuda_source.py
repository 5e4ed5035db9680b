"""A kernel in CUDA C++ without a build system: ``python cuda_source.py``.

NVRTC, which comes with JAX's CUDA wheels, compiles the source when the call is lowered.
Takes five seconds on two cores, and prints there::

    scaled_shift equals lax.ppermute on 4 cpu devices
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax import lax
from running import AXIS, make_mesh, on_devices

import jflux

SOURCE = """
#include "jflux/kernel.cuh"

namespace shmem = jflux::shmem;

// y = scale * x of the rank before, n values.
extern "C" __global__ void scaled_shift(const __grid_constant__ shmem::CallArgs args,
                                        const float* x, float* y, long n, double scale) {
  const shmem::Context ctx = shmem::begin_call(args);
  const int me = my_pe(ctx), ranks = n_pes(ctx);
  const int next = (me + 1) % ranks, previous = (me + ranks - 1) % ranks;
  const long share = (n + ctx.blocks - 1) / ctx.blocks;
  const long begin = share * ctx.block < n ? share * ctx.block : n;
  const long end = begin + share < n ? begin + share : n;
  float* inbox = ctx.data<float>();
  jflux::Signal* arrived = ctx.signal(ctx.block);
  shmem::put_signal_block(ctx, inbox + begin, x + begin, end - begin, arrived, next);
  const bool ok = shmem::signal_wait_until_block(ctx, arrived, previous);
  if (ok) {
    for (long i = begin + threadIdx.x; i < end; i += blockDim.x) {
      y[i] = static_cast<float>(scale) * inbox[i];
    }
  }
  shmem::end_call(args, ctx, ok);
}
"""
BLOCKS = 16


def reference(x: jax.Array, *, n: int, scale: float, axis_name: Any) -> jax.Array:
    """The same in plain lax."""
    ranks = lax.axis_size(axis_name)
    shifted = lax.ppermute(x, axis_name, [(i, (i + 1) % ranks) for i in range(ranks)])
    return shifted * np.float32(scale)


def scaled_shift(x: jax.Array, scale: float, *, axis_name: Any = AXIS) -> jax.Array:
    """`scale` times the float32 array of the rank before. Inside shard_map."""
    call = jflux.custom_call(
        "scaled_shift",
        jax.ShapeDtypeStruct(x.shape, x.dtype),
        axis_name=axis_name,
        data_bytes=x.size * 4,
        num_signals=BLOCKS,
        reference=reference,
        source=SOURCE,
        grid=BLOCKS,
        threads=256,
    )
    return call(x, n=x.size, scale=float(scale))  # attributes in the kernel's order


def main() -> None:
    mesh = make_mesh()
    f = on_devices(mesh, lambda x: lax.scan(lambda c, x: (c, scaled_shift(x, 1.5)), 0, x)[1])
    rng = np.random.default_rng(0)
    for size in (1, 1000, 12345):
        x = rng.standard_normal((mesh.size, 20, size)).astype(np.float32)
        np.testing.assert_array_equal(f(x), np.roll(x, 1, 0) * np.float32(1.5))
    print(f"scaled_shift equals lax.ppermute on {mesh.size} {jax.default_backend()} devices")


if __name__ == "__main__":
    main()
