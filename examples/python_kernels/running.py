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
from jax import lax
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

    It is what so many more calls take, so what a program takes besides is left out. Each call takes
    the result of the one before, or if that has another shape an element of it, which XLA copies in
    a kernel of its own: so no call can be left out, and the program returns one result. Results of
    each call would be arrays that the host makes, and takes longer for than a GPU for a call.
    """
    result = jax.eval_shape(on_devices(mesh, f), *arrays)
    calls = 200 if result.size < 1 << 20 else 64

    def program(count: int) -> Callable[[], Any]:
        def body(x: Any, *others: Any) -> Any:
            y = x
            for _ in range(count):
                y = f(x, *others)
                x = _with_corner(x, y)
            return y

        compiled = on_devices(mesh, body)
        return lambda: compiled(*arrays)

    def seconds(run: Callable[[], Any]) -> float:
        jax.block_until_ready(run())
        times = []
        for _ in range(20):
            begin = time.perf_counter()
            jax.block_until_ready(run())
            times.append(time.perf_counter() - begin)
        return min(times)

    return (seconds(program(2 * calls)) - seconds(program(calls))) / calls * 1e6


def _with_corner(x: jax.Array, y: jax.Array) -> jax.Array:
    """y if it is like x, else x with the first element of y."""
    if (x.shape, x.dtype) == (y.shape, y.dtype):
        return y
    corner = y[(0,) * y.ndim].astype(x.dtype).reshape((1,) * x.ndim)
    return lax.dynamic_update_slice(x, corner, (0,) * x.ndim)


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
