"""H100s that are not here: XLA compiles for them on a machine without a GPU, so that tests can look
at schedules and at what programs hold. Needs JAX's CUDA plugin, and Python code alone."""

from __future__ import annotations

import functools
import os
from typing import Any

import jax
from jax.experimental import topologies

# What XLA for GPUs asks a device for; of an H100 SXM, as the driver and XLA's own files have it.
_H100 = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  memory_bandwidth: 3352320000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 84942979072
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 12 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""

#: Of `jax.jit`: no kernel is tried, since none can run.
COMPILER_OPTIONS = {"xla_gpu_autotune_level": "0"}


@functools.cache
def h100s(count: int) -> list[Any]:
    """Devices of one host, to compile for.

    Raises:
      RuntimeError: JAX has no CUDA plugin here, or one that cannot.
    """
    # Versions of libraries that only running programs need.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    jax.devices()  # plugins are found
    try:
        found = topologies.get_topology_desc(
            platform="cuda", target_config=_H100, topology=f"1x1x{count}"
        )
    except (NotImplementedError, jax.errors.JaxRuntimeError) as error:
        raise RuntimeError(f"no topology of GPUs: {error}") from None
    return list(found.devices)
