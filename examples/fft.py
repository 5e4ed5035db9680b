"""A 3-D FFT of an array that is split into slabs, by ``jflux.all_to_all``: ``python fft.py``.

Solves the Poisson equation on a periodic grid by it, and checks the solution with the stencil that
it is for, by ``jflux.halo_exchange``. jaxDecomp does the same on global arrays:

    fft3d, ifft3d                   jaxdecomp.fft.pfft3d, pifft3d
    to_columns, to_slabs            jaxdecomp.transposeXtoZ, transposeZtoX
    frequencies                     jaxdecomp.fftfreq3d
    laplacian, its halo_exchange    jaxdecomp.halo_exchange with halo_periods=(True, True)

It names the dimensions z, y and x, and returns transforms as [y, x, z], x split over the ranks.
Here the dimensions keep their order, and the second one is split: the last one may be a half of a
transform of real numbers, which the ranks need not divide.

Takes ten seconds on two cores, and prints there::

    [32, 24, 16] on 8 cpu devices
    fft3d equals jnp.fft.fftn: True
    ifft3d gives back the array: True
    the solution of the Poisson equation is right: True
"""

from __future__ import annotations

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")  # without a GPU

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jflux

AXIS = "x"
#: How arrays are split: a rank has slabs of the array, and columns of its transform.
SLABS, COLUMNS = P(AXIS), P(None, AXIS)

# ---- Of one rank of N, inside shard_map ----------------------------------------------------------


def to_columns(x: jax.Array) -> jax.Array:
    """[X/N, Y, Z] -> [X, Y/N, Z]."""
    return jflux.all_to_all(x, axis_name=AXIS, split_axis=1, concat_axis=0, tiled=True)


def to_slabs(x: jax.Array) -> jax.Array:
    """[X, Y/N, Z] -> [X/N, Y, Z]."""
    return jflux.all_to_all(x, axis_name=AXIS, split_axis=0, concat_axis=1, tiled=True)


def fft3d(x: jax.Array) -> jax.Array:
    """The transform [X, Y/N, Z] of an array [X/N, Y, Z]. N divides X and Y."""
    return jnp.fft.fft(to_columns(jnp.fft.fft2(x, axes=(1, 2))), axis=0)


def ifft3d(k: jax.Array) -> jax.Array:
    """The array [X/N, Y, Z] of a transform [X, Y/N, Z]."""
    return jnp.fft.ifft2(to_slabs(jnp.fft.ifft(k, axis=0)), axes=(1, 2))


def frequencies(k: jax.Array) -> list[jax.Array]:
    """The angular frequencies of a transform [X, Y/N, Z] along each dimension, per element of the
    grid: [X, 1, 1], [1, Y/N, 1] and [1, 1, Z]."""
    x, y, z = k.shape
    ranks = lax.axis_size(AXIS)
    own = lax.axis_index(AXIS) * y + jnp.arange(y)
    found = jnp.fft.fftfreq(x), jnp.fft.fftfreq(ranks * y)[own], jnp.fft.fftfreq(z)
    shapes = (-1, 1, 1), (1, -1, 1), (1, 1, -1)
    return [2 * jnp.pi * f.reshape(shape) for f, shape in zip(found, shapes, strict=True)]


def laplacian(u: jax.Array) -> jax.Array:
    """The stencil of seven points on a periodic grid, u [X/N, Y, Z]. Ranks exchange halos of the
    first dimension; each has all of the others."""
    padded = jflux.halo_exchange(u, axis_name=AXIS, halo=1, mode="wrap")
    others = [jnp.roll(u, shift, axis) for axis in (1, 2) for shift in (1, -1)]
    return padded[2:] + padded[:-2] + sum(others) - 6 * u


def solve(rho: jax.Array) -> jax.Array:
    """u [X/N, Y, Z], of mean 0, whose Laplacian is rho less its mean."""
    k = fft3d(rho)
    # The transform of the stencil is 2 cos(f) - 2 for each dimension, and 0 for the mean alone.
    symbol = sum(2 * jnp.cos(f) - 2 for f in frequencies(k))
    is_mean = symbol == 0
    return ifft3d(jnp.where(is_mean, 0, k / jnp.where(is_mean, 1, symbol))).real


# ---- Of all ranks --------------------------------------------------------------------------------


def main() -> None:
    mesh = Mesh(jax.devices(), AXIS)
    shape = (4 * mesh.size, 3 * mesh.size, 16)
    rho = jax.random.normal(jax.random.key(0), shape)
    rho = jax.device_put(rho, jax.NamedSharding(mesh, SLABS))

    def on_ranks(f, in_specs, out_specs):
        return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs))

    def is_close(a, b):
        scale = float(np.max(np.abs(b)))
        return bool(np.max(np.abs(a - b)) < 1e-5 * scale)

    k = on_ranks(fft3d, SLABS, COLUMNS)(rho)
    back = on_ranks(ifft3d, COLUMNS, SLABS)(k)
    u = on_ranks(solve, SLABS, SLABS)(rho)
    found = on_ranks(laplacian, SLABS, SLABS)(u)
    print(f"{list(shape)} on {mesh.size} {jax.default_backend()} devices")
    print(f"fft3d equals jnp.fft.fftn: {is_close(k, np.fft.fftn(rho))}")
    print(f"ifft3d gives back the array: {is_close(back, rho)}")
    print(f"the solution of the Poisson equation is right: {is_close(found, rho - rho.mean())}")


if __name__ == "__main__":
    main()
