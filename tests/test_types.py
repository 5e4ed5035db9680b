"""Types that JAX gives arrays inside shard_map: what varies over which mesh axis."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import PRODUCTS, make_mesh
from jax.sharding import PartitionSpec as P

import jflux
from jflux._ops._spec import all_ops

pytestmark = pytest.mark.wide  # see conftest.strict

close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)


def _normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


# ---- vmap of shard_map, over a mesh axis ---------------------------------------------------------


def _of_product(op):
    spec = all_ops()[op]
    options = spec.ways[0]
    x, w, y = spec.partition("tp", **options)

    def f(a, w):
        return spec.function(a, w, axis_name="tp", **options)

    return f, (_normal(0, 8, 6), _normal(1, 6, 4)), (x, w), y


def _grouped(x, w):
    return jflux.grouped_matmul(x, w, np.array([3, 5]), activation="silu")


def _attention(q, k):
    return jflux.attention(q, k, k, axis_name="tp")


#: name: (f, operands, their specs, the result's).
CALLS = {
    **{op: _of_product(op) for op in PRODUCTS},
    "grouped_matmul": (
        _grouped,
        (_normal(0, 8, 6), _normal(1, 2, 6, 4)),
        (P(), P(None, None, "tp")),
        P(None, "tp"),
    ),
    "attention": (
        _attention,
        (_normal(0, 1, 8, 2, 4), _normal(1, 1, 8, 2, 4)),
        (P(None, "tp"), P(None, "tp")),
        P(None, "tp"),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_batch_over_a_mesh_axis(name):
    """Gradients of vmap(shard_map), and vmap of gradients; of one operand all have the same."""
    f, operands, in_specs, out_specs = CALLS[name]
    one = jax.shard_map(f, mesh=make_mesh((2, 2), ("data", "tp")), in_specs=in_specs,
                        out_specs=out_specs)  # fmt: skip

    def loss(*operands):
        return jnp.sum(one(*operands) ** 2)

    gradients = jax.grad(loss, (0, 1))

    @functools.partial(jax.jit, static_argnums=0)
    def both(dims, *operands):
        batched = jax.vmap(loss, dims, spmd_axis_name="data")
        return (
            jax.grad(lambda *operands: jnp.sum(batched(*operands)), (0, 1))(*operands),
            jax.vmap(gradients, dims, spmd_axis_name="data")(*operands),
        )

    for dims in ((0, None), (None, 0))[: 1 if name == "attention" else 2]:
        given = [np.stack([a, a / 2]) if d == 0 else a for a, d in zip(operands, dims, strict=True)]
        each = [
            jax.jit(gradients)(
                *(a if d is None else a[i] for a, d in zip(given, dims, strict=True))
            )
            for i in range(2)
        ]
        stacked = [np.stack(ds) for ds in zip(*each, strict=True)]
        of_sum, of_each = both(dims, *given)
        for got, want, d in zip(of_sum, stacked, dims, strict=True):
            close(got, want if d == 0 else want.sum(0))
        jax.tree.map(close, list(of_each), stacked)
