"""Attention over all ranks' keys from each rank's over its own, in one kernel, against the merge of
what an all-gather brings."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import RANKS, compiled_text, fused_calls, make_mesh, run
from jax.sharding import PartitionSpec as P

import jflux
from jflux import testing
from jflux._call.plans import Machine, Path
from jflux._ops.attention import decode_merge

COUNTS = [n for n in (1, 2, 3, 4, 8) if n <= RANKS]


def over_ranks(world, merge=decode_merge.merge_over_ranks, check_vma=True):
    """Of the parts of all ranks, [N, ..., D + 1]; on all ranks the same."""

    def local(x):
        o, lse = merge(x[0], "tp")
        return jnp.concatenate([o, lse[..., None]], -1)

    return jax.shard_map(
        local, mesh=make_mesh((world,)), in_specs=P("tp"), out_specs=P(), check_vma=check_vma
    )


def parts(world, *shape, seed=0):
    """Of which some have no keys."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((world, *shape)).astype(np.float32)
    x[..., -1] *= 50
    x[..., -1][rng.random(x.shape[:-1]) < 0.3] = -np.inf
    return x


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("shape", [(1, 3, 2), (2, 3, 65), (5, 8)])
@pytest.mark.parametrize("world", COUNTS)
def test_values(world, shape, check_vma):
    f = jax.jit(over_ranks(world, check_vma=check_vma))
    taken = "all_gather" if world == 1 else "decode_merge"
    assert fused_calls(compiled_text(f, parts(world, *shape))) == [taken]
    for seed in range(3):
        x = parts(world, *shape, seed=seed)
        with testing.planted_faults(max_delay_us=300 * seed):
            got = run(f, x)
        o, lse = jflux.merge_attention(x[..., :-1], x[..., -1])
        np.testing.assert_allclose(got[..., :-1], o, rtol=2e-6, atol=2e-6)
        np.testing.assert_allclose(got[..., -1], lse, rtol=2e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("by_owner", [False, True])
@pytest.mark.parametrize("world", COUNTS[1:])
def test_outputs_of_another_type(monkeypatch, world, by_owner, dtype):
    """On all ranks the same bits, whoever merges a row."""
    monkeypatch.setattr(decode_merge, "MOST_BYTES_TO_ALL", 0 if by_owner else 1 << 20)
    x = parts(world, 3, 7, 66, seed=world)
    x[:, 1, 2, -1] = -np.inf  # of no rank

    def merged(x):
        o, lse = decode_merge.merge_over_ranks(x[0], "tp", dtype)
        assert o.dtype == dtype and lse.dtype == jnp.float32
        return o[None], lse[None]

    f = jax.jit(jax.shard_map(merged, mesh=make_mesh((world,)), in_specs=P("tp"),
                              out_specs=P("tp"), check_vma=False))  # fmt: skip
    (call,) = jflux.explain(f, x)
    assert ("owners" in str(call)) == by_owner and call.plan.path == Path.FUSED
    o, lse = run(f, x)
    want, want_lse = jflux.merge_attention(x[..., :-1], x[..., -1])
    unit = max(2e-6, float(jnp.finfo(dtype).eps))
    for rank in range(world):
        np.testing.assert_array_equal(o[rank], o[0])
        np.testing.assert_array_equal(lse[rank], lse[0])
    np.testing.assert_allclose(np.float32(o[0]), want, rtol=unit, atol=unit)
    np.testing.assert_allclose(lse[0], want_lse, rtol=2e-6)


def test_rows_without_keys_anywhere():
    x = parts(2, 4, 3)
    x[:, 2] = np.nan, np.nan, -np.inf
    got = run(jax.jit(over_ranks(2)), x)
    assert got[2].tolist() == [0, 0, -np.inf] and not np.isnan(got).any()


@pytest.mark.parametrize("merge", [decode_merge.merge_over_ranks, decode_merge.reference])
def test_a_nan_shows(merge):
    """A part whose log-sum-exp is NaN has keys: it must not be left out."""
    x = np.zeros((2, 2, 3), np.float32)
    x[1, 0, -1] = np.nan
    got = run(jax.jit(over_ranks(2, merge)), x)
    assert np.isnan(got[0]).all() and not np.isnan(got[1]).any()


@pytest.mark.parametrize("check_vma", [True, False])
def test_derivatives(check_vma):
    x, t = (parts(2, 6, 5, seed=seed) for seed in (1, 2))
    t[..., -1] = np.where(np.isfinite(t[..., -1]), t[..., -1], 0)

    def both(merge):
        f = over_ranks(2, merge, check_vma)

        def loss(x):
            y = f(x)
            return jnp.sum(jnp.where(jnp.isfinite(y), jnp.sin(y), 0))

        return run(jax.jit(lambda x, t: (jax.grad(loss)(x), jax.jvp(f, (x,), (t,)))), x, t)

    got, want = both(decode_merge.merge_over_ranks), both(decode_merge.reference)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_vmap_is_one_call():
    x = parts(2, 3, 4, 5)
    f = jax.jit(jax.vmap(over_ranks(2), in_axes=1))
    assert fused_calls(compiled_text(f, x)) == ["decode_merge"]
    np.testing.assert_allclose(run(f, x), run(jax.jit(over_ranks(2)), x), rtol=1e-6)


def test_an_axis_of_vmap():
    x = parts(2, 4, 3)
    with jflux.config(strict=False):
        got = jax.vmap(lambda x: decode_merge.merge_over_ranks(x, "v")[0], axis_name="v")(x)
    want, _ = jflux.merge_attention(x[..., :-1], x[..., -1])
    np.testing.assert_allclose(got[0], want, rtol=1e-6)


def test_plans():
    def plan(rows, width=128, world=2, dtype="float32", platform="cuda", **switches):
        x = jax.ShapeDtypeStruct((rows, width + 1), jnp.dtype(dtype))
        with jflux.config(always=False, **switches):
            return decode_merge._op.plan(
                (x,), decode_merge.Params(("tp",), world, False, x.dtype),
                Machine(platform, 132, 320.0, 1 << 32),
            )  # fmt: skip

    assert [plan(rows).config["by_owner"] for rows in (512, 2048)] == [0, 1]
    assert plan(512).path == plan(2048).path == Path.FUSED
    for other, why in (
        (plan(512, dtype="float64"), "float64"),
        (plan(32768), "packets would double"),
        (plan(512, world=1), "one rank"),
        (plan(8, world=9), "world"),
    ):
        assert other.path == Path.DECOMPOSED and why in other.reason, other
