"""jflux.attention in float32 and in the half types, on any platform, against float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import RANKS, make_mesh
from jax.sharding import PartitionSpec as P

import jflux

B, S, H, G, D = 1, 96, 4, 2, 32
SEQUENCE = P(None, "tp")


def exact(q, k, v):
    """(o, l) of causal attention, and the gradients of o's sum, in float64."""
    q, k, v = (np.asarray(a, np.float64) for a in (q, k, v))
    k, v = np.repeat(k, H // G, 2), np.repeat(v, H // G, 2)
    s = np.einsum("bshd,bthd->bhst", q, k) / D**0.5
    s = np.where(np.tri(S, dtype=bool), s, -np.inf)
    lse = np.log(np.exp(s).sum(-1))
    p = np.exp(s - lse[..., None])
    o = np.einsum("bhst,bthd->bshd", p, v)
    dp = np.broadcast_to(v.sum(-1).transpose(0, 2, 1)[:, :, None], p.shape)
    ds = p * (dp - np.sum(p * dp, -1, keepdims=True)) / D**0.5
    dq, dk = np.einsum("bhst,bthd->bshd", ds, k), np.einsum("bhst,bshd->bthd", ds, q)
    dv = np.repeat(p.sum(2).transpose(0, 2, 1)[..., None], D, 3)
    dk, dv = (a.reshape(B, S, G, H // G, D).sum(3) for a in (dk, dv))
    return (o, lse.swapaxes(1, 2)), (dq, dk, dv)


@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("world", [n for n in (1, 2, 3) if n <= RANKS])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_sums_are_in_float32(dtype, world, ring):
    rng = np.random.default_rng(world)
    operands = [jnp.asarray(rng.standard_normal((B, S, h, D)), dtype) for h in (H, G, G)]
    f = jax.shard_map(
        functools.partial(
            jflux.attention, axis_name="tp", causal=True, return_lse=True, ring=ring
        ),
        mesh=make_mesh((world,)), in_specs=(SEQUENCE,) * 3, out_specs=(SEQUENCE, SEQUENCE),
    )  # fmt: skip

    def loss(*arrays):
        arrays = [jflux.reorder_for_causal(a, world) for a in arrays]
        o, lse = (jflux.restore_order(a, world) for a in f(*arrays))
        return jnp.sum(o.astype(jnp.float32)), (o, lse)

    with jax.default_matmul_precision("float32"):
        gradients, (o, lse) = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(*operands)
    (want, want_lse), want_gradients = exact(*operands)
    assert o.dtype == dtype and lse.dtype == jnp.float32
    # Probabilities are rounded to the type before they multiply values, and so is the result.
    unit = max(float(jnp.finfo(dtype).eps), 1e-6)
    np.testing.assert_allclose(np.asarray(o, np.float64), want, rtol=2 * unit, atol=2 * unit)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-5, atol=1e-5)
    for one, other in zip(gradients, want_gradients, strict=True):
        assert one.dtype == dtype
        atol = 8 * unit * np.abs(other).max()
        np.testing.assert_allclose(np.asarray(one, np.float64), other, rtol=0, atol=atol)
