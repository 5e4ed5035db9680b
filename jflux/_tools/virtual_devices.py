"""Virtual devices of a CPU, for commands that try ops between several."""

from __future__ import annotations

import os

import jax

DEVICES = 8


def ask_for_devices(count: int = DEVICES) -> None:
    """Has JAX make so many devices of the CPU, unless somebody has chosen a number. To be called
    before JAX looks for devices; GPUs stay as they are."""
    chosen = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if not chosen and getattr(jax.config, "jax_num_cpu_devices", -1) < 0:
        jax.config.update("jax_num_cpu_devices", count)
