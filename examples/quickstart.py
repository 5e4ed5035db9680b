"""One fused op on all devices, y = all_gather(x) @ w, checked against plain lax.

Takes five seconds on two cores, and prints there::

    y (1024, 2048) from 8 cpu devices equals plain lax
"""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")  # without a GPU

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import jflux

mesh = jax.sharding.Mesh(jax.devices(), "tp")
x = jax.random.normal(jax.random.key(0), (128 * mesh.size, 512), jnp.bfloat16)  # rows are split
w = jax.random.normal(jax.random.key(1), (512, 256 * mesh.size), jnp.bfloat16)  # columns are


def on_all_devices(op):
    def one_rank(x, w):  # x [128, 512], w [512, 256] -> y [128 * ranks, 256]
        return op(x, w, axis_name="tp", preferred_element_type=jnp.float32)

    in_specs = (P("tp", None), P(None, "tp"))
    return jax.jit(jax.shard_map(one_rank, mesh=mesh, in_specs=in_specs, out_specs=P(None, "tp")))


fused = on_all_devices(jflux.all_gather_matmul)(x, w)
plain = on_all_devices(jflux.reference.all_gather_matmul)(x, w)
assert jnp.allclose(fused, plain, rtol=1e-4, atol=1e-3), f"off by {abs(fused - plain).max()}"
print(f"y {fused.shape} from {mesh.size} {jax.default_backend()} devices equals plain lax")
