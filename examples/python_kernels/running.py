"""What the examples of this folder share: a mesh, one array for each device, times."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")  # without a GPU

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jflux

AXIS = "x"
STEPS = 50


def make_mesh() -> Mesh:
    """Up to 8 devices along one axis."""
    return Mesh(jax.devices()[:8], AXIS)


def on_devices(mesh: Mesh, f: Callable[..., Any]) -> Callable[..., Any]:
    """f on each device; arrays have a dimension in front, of the mesh's size."""

    def body(*arrays: Any) -> Any:
        return jax.tree.map(lambda y: y[None], f(*(a[0] for a in arrays)))

    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS)))


def microseconds(mesh: Mesh, f: Callable[..., Any], arrays: list[Any]) -> float:
    """Of one call, in a loop of STEPS, which XLA replays as a CUDA graph: the best of 10 loops. The
    first array of each step depends on the step before."""

    def loop(first: Any, *rest: Any) -> Any:
        def step(_: Any, x: Any) -> Any:
            y = jax.tree.leaves(f(x, *rest))[0]
            return x + (y.ravel()[0] * 0).astype(x.dtype)

        return jax.lax.fori_loop(0, STEPS, step, first)

    program = on_devices(mesh, loop)
    jax.block_until_ready(program(*arrays))
    times = []
    for _ in range(10):
        begin = time.perf_counter()
        jax.block_until_ready(program(*arrays))
        times.append(time.perf_counter() - begin)
    return min(times) / STEPS * 1e6


def show(
    name: str, kernel: Any, reference: Any, *args: jax.ShapeDtypeStruct, **options: Any
) -> None:
    """Checks the kernel, and prints its time beside the reference's on GPUs."""
    mesh = make_mesh()
    report = jflux.symm.check(kernel, *args, mesh=mesh, **options)
    print(f"{name} on {mesh.size} {jax.default_backend()} devices: {report.calls} calls are right")
    if not report.kernels:
        return
    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(rng.standard_normal((mesh.size, *a.shape)), a.dtype) for a in args]
    ours, theirs = (microseconds(mesh, f, arrays) for f in (kernel, reference))
    print(f"  kernel {ours:.1f} us, lax {theirs:.1f} us")
