"""A layer of two ops, and how near chains of products should come to float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import RANKS
from jax.sharding import PartitionSpec as P

import jflux
from jflux._stress.calls import assert_close, exact, normal

VMA = pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "no_vma"])


def check_product(y, call, mesh, x, w, factor=1.0):
    world = mesh.devices.size
    scale = exact(call, mesh, "tp", np.abs(x), np.abs(w))
    assert_close(
        y, exact(call, mesh, "tp", x, w), scale, call.dtype, call.terms(world), factor=factor
    )


# A layer over global arrays: y = tanh(x @ w1) @ w2, x and y [m, d] sharded by rows over "tp".
def mlp_layer(x, w1, w2):
    h = jnp.tanh(jflux.all_gather_matmul(x, w1, axis_name="tp"))
    return jflux.matmul_reduce_scatter(h, w2, axis_name="tp")


LAYER_SPECS = (P("tp"), P(None, "tp"), P("tp"))


def layer_operands(m=3 * RANKS, d=8, f=2 * RANKS, dtype=jnp.bfloat16, layers=None):
    lead = () if layers is None else (layers,)
    return (
        normal(0, (m, d), dtype),
        (normal(1, (*lead, d, f), np.float64) / np.sqrt(d)).astype(dtype),
        (normal(2, (*lead, f, d), np.float64) / np.sqrt(f)).astype(dtype),
    )


def in_float64(f, *args):
    """`f` of the operands in float64, on global arrays: what the sharded program should give."""
    with jax.enable_x64(True):
        args = [jnp.asarray(np.asarray(a, np.float64)) for a in args]
        return jax.tree.map(np.asarray, jax.jit(f)(*args))


def assert_near(got, want, dtype=jnp.bfloat16, roundings=30, rounded=None):
    """For chains of products: relative to the largest element, allowing for several roundings.

    Args:
      rounded: results of the reference in this type. Where terms cancel they are far from `want`,
        and `got` may be so far too, and half again.
    """
    unit = float(jnp.finfo(dtype).eps)
    want = [np.asarray(w, np.float64) for w in jax.tree.leaves(want)]
    rounded = want if rounded is None else jax.tree.leaves(rounded)
    for g, w, r in zip(jax.tree.leaves(got), want, rounded, strict=True):
        g = np.asarray(g, np.float64)
        assert g.shape == w.shape
        cancelled = 1.5 * np.abs(np.asarray(r, np.float64) - w).max()
        allowed = max(roundings * unit * max(np.abs(w).max(), unit), cancelled)
        assert np.abs(g - w).max() <= allowed


def op_call(name, **options):
    """(module, *operands) -> the op of jflux, or of its reference."""
    return lambda module, *args: getattr(module, name)(*args, axis_name="tp", **options)


def norm_call(name, norm, operands):
    """The op of so many operands; a residual and the norm's factors come after them."""

    def op(module, *args):
        residual, *factors = args[operands:]
        options = {"residual": residual, "norm": norm(*factors)}
        return getattr(module, name)(*args[:operands], axis_name="tp", **options)

    return op


def over_a_batch(f):
    """vmap over the first operand, in another order for each example."""

    def batched(x, *rest):
        xs = jnp.stack([jnp.roll(x, i) for i in range(3)])
        return jax.vmap(f, in_axes=(0,) + (None,) * len(rest))(xs, *rest)

    return batched
