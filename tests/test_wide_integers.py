"""Integers that int32 does not hold, which is what kernels take: they are out of range, and do not
become others by losing their upper half."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import PLATFORM, make_mesh, run
from jax.sharding import PartitionSpec as P

import jflux
from jflux import moe
from jflux._stress.calls import per_device

pytestmark = pytest.mark.wide
on_cpus = pytest.mark.skipif(PLATFORM != "cpu", reason="the CPU's handlers raise")
#: Of both signs, and with small numbers in their lower halves.
WIDE = [(1 << 32) + 1, 1 - (1 << 32)]


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize("wide", WIDE)
@pytest.mark.parametrize("partial_sums", [False, True])
def test_dispatch_drops_them(wide, partial_sums):
    indices = np.array([[[0, 1], [wide, 3]], [[2, 3], [0, 1]]])
    x = np.ones((2, 2, 4), np.float32)
    options = {"num_experts": 4, "partial_sums": partial_sums, "axis_name": "tp"}

    def f(x, indices):
        d = jflux.moe_dispatch(x, indices, jnp.ones(indices.shape), **options)
        return d.group_sizes, d.statistics.dropped

    sizes, dropped = run(jax.jit(per_device(make_mesh((2,)), f)), x, indices)
    np.testing.assert_array_equal(sizes, [[2, 2], [1, 2]])
    np.testing.assert_array_equal(dropped, [1, 0])


@on_cpus
@pytest.mark.parametrize("wide", WIDE)
def test_route_refuses_them(wide):
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match="slot 1 of topk_indices is"):
        jax.block_until_ready(moe.route(np.array([[0, wide]]), 4))


@pytest.mark.parametrize("wide", WIDE)
def test_statistics_count_them_as_dropped(wide):
    indices = np.array([[0, wide], [-1, 3]])
    with jflux.config(fused=False):
        found = moe.statistics(indices, jax.jit(lambda i: moe.route(i, 4))(indices))
    np.testing.assert_array_equal(found.tokens_per_expert, [1, 0, 0, 1])
    assert (found.dropped, found.unassigned) == (1, 1)


@pytest.mark.parametrize("type_", ["uint8", "int8", "uint16", "uint32", "uint64"])
def test_statistics_of_types_that_do_not_hold_the_bounds(type_):
    indices = jnp.array([[0, 1], [5, 1]], type_)
    found = moe.statistics(indices, moe.route(indices, 300))
    np.testing.assert_array_equal(found.tokens_per_expert[:7], [1, 2, 0, 0, 0, 1, 0])
    assert (found.dropped, found.unassigned) == (0, 0)


@on_cpus
@pytest.mark.parametrize("wide", WIDE)
def test_sizes_of_groups_that_do_not_fit(wide):
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match="jflux: grouped_matmul: gr"):
        jax.block_until_ready(
            jflux.grouped_matmul(np.ones((4, 8)), np.ones((2, 8, 8)), np.array([1, wide]))
        )


@pytest.mark.parametrize("wide", WIDE)
def test_a_cache_does_not_take_them(wide):
    """As positions, and as lengths."""
    mesh, cache = make_mesh((2,)), np.zeros((2, 4, 1))
    own = P(None, "tp")
    update = functools.partial(jflux.update_cache, axis_name="tp")
    f = jax.jit(jax.shard_map(update, mesh=mesh, in_specs=(own, P(), P()), out_specs=own))
    beyond = wide > 0
    if beyond and PLATFORM == "cpu":  # which raises; GPUs write NaN at the end
        with pytest.raises(jax.errors.JaxRuntimeError, match="positions must be at most 3"):
            jax.block_until_ready(f(cache, np.ones((2, 1, 1)), np.array([wide, 2])))
        return
    none = [0, 0, 0, np.nan if beyond else 0]
    written = f(cache, np.ones((2, 1, 1)), np.array([wide, 2]))
    np.testing.assert_array_equal(np.asarray(written)[..., 0], [none, [0, 0, 1, 0]])
    whole = np.zeros((2, 4, 1, 8))
    new = [np.ones((2, 1, heads, 8)) for heads in (2, 1, 1)]
    kv_cache = jflux.KVCache(whole, whole, np.array([wide, 2]))
    _, grown = jax.jit(jflux.attend_to_cache)(kv_cache, *new)
    np.testing.assert_array_equal(np.asarray(grown.keys)[..., 0, 0], [none, [0, 0, 1, 0]])
