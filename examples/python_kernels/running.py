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


def make_mesh() -> Mesh:
    """Up to 8 devices along one axis."""
    return Mesh(jax.devices()[:8], AXIS)


def on_devices(mesh: Mesh, f: Callable[..., Any]) -> Callable[..., Any]:
    """f on each device; arrays have a dimension in front, of the mesh's size."""

    def body(*arrays: Any) -> Any:
        return jax.tree.map(lambda y: y[None], f(*(a[0] for a in arrays)))

    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS)))


def microseconds(mesh: Mesh, f: Callable[..., Any], arrays: list[Any]) -> float:
    """Of one call among others in one program, which XLA captures as a CUDA graph.

    It is what so many more calls take, so what a program takes besides is left out. If a call's
    result is like its first array, each call takes the one before's; else each has its own.
    """
    first, *rest = arrays
    result = jax.eval_shape(on_devices(mesh, f), *arrays)
    is_chain = (result.shape, result.dtype) == (first.shape, first.dtype)
    calls = 200 if is_chain else 32

    def program(count: int) -> Callable[[], Any]:
        firsts_ = [first] if is_chain else [first + 0 for _ in range(count)]

        def body(*arrays: Any) -> Any:
            firsts, others = arrays[: len(firsts_)], arrays[len(firsts_) :]
            if not is_chain:
                return [f(x, *others) for x in firsts]
            (x,) = firsts
            for _ in range(count):
                x = f(x, *others)
            return x

        compiled = on_devices(mesh, body)
        return lambda: compiled(*firsts_, *rest)

    def seconds(run: Callable[[], Any]) -> float:
        jax.block_until_ready(run())
        times = []
        for _ in range(20):
            begin = time.perf_counter()
            jax.block_until_ready(run())
            times.append(time.perf_counter() - begin)
        return min(times)

    return (seconds(program(2 * calls)) - seconds(program(calls))) / calls * 1e6


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
