"""What the tests of jflux.fuse share: functions of ranks, and what they become."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from harness import make_mesh
from jax import lax
from jax.sharding import PartitionSpec as P

import jflux

N = 2
TP = functools.partial(make_mesh, (N,))


def of_ranks(f, *args, mesh=None, axes="tp", check_vma=True):
    """f on each rank's part [0] of arrays [ranks, ...], which every rank has of its own."""
    mesh = mesh or TP()
    specs = tuple(P(axes) for _ in args)

    def per_rank(*args):
        return jax.tree.map(lambda y: y[None], f(*(a[0] for a in args)))

    return jax.shard_map(
        per_rank, mesh=mesh, in_specs=specs, out_specs=P(axes), check_vma=check_vma
    )


def normal(*shape, ranks=N, dtype=jnp.float64, seed=0):
    """[ranks, *shape], of a size for which sums stay near 1."""
    rng = np.random.default_rng([seed, *shape])
    return jnp.asarray(rng.normal(size=(ranks, *shape)) / np.sqrt(shape[-1]), dtype)


def ops(found):
    return [one.op for one in found if one.taken and one.hidden]


def same(a, b, rtol=1e-12):
    for one, other in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol, rtol * 10)


def check(f, args, wanted, **options):
    """f on ranks: the ops that stand for its collectives, values, and gradients both ways."""
    with jax.enable_x64(True):
        plain = of_ranks(f, *args, **options)
        fused = jflux.fuse(plain)
        assert ops(fused.report(*args)) == wanted
        same(jax.jit(plain)(*args), jax.jit(fused)(*args))

        def loss(f):
            return lambda *args: sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(f(*args)))

        every = tuple(range(len(args)))
        exact = jax.jit(jax.grad(loss(plain), every))(*args)
        same(exact, jax.jit(jax.grad(loss(fused), every))(*args))
        same(exact, jax.jit(jflux.fuse(jax.grad(loss(plain), every)))(*args))


def gather(x, axis=1, name="tp"):
    return lax.all_gather(x, name, axis=axis, tiled=True)


def scatter(x, axis=1, name="tp"):
    return lax.psum_scatter(x, name, scatter_dimension=axis, tiled=True)
