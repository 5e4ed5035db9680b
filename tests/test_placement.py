"""Placements of experts in physical slots, against loops in numpy."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import RANKS, drawn_meshes, examples, make_mesh
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import jflux
from jflux import moe

pytestmark = pytest.mark.wide
X64 = functools.partial(jax.enable_x64, True)
SEEDS = st.integers(0, 1 << 16)


def drawn_placement(rng, experts, slots, most=None):
    """i32 [slots]: each expert once, and replicas of any, in any order."""
    more = rng.choice(experts if most is None else rng.permutation(experts)[:most], slots - experts)
    return rng.permutation(np.concatenate([np.arange(experts), more])).astype(np.int32)


# ---- Choices -------------------------------------------------------------------------------------


def placed(indices, placement, experts):
    """The definition, by a loop."""
    slots_of = [np.flatnonzero(placement == e) for e in range(experts)]
    given = np.zeros(experts, int)
    want = np.full(indices.shape, -1, np.int32)
    for at in np.ndindex(indices.shape):
        e = indices[at]
        if not 0 <= e < experts:
            want[at] = -1 if e == -1 else len(placement)
        elif len(slots_of[e]):
            want[at] = slots_of[e][given[e] % len(slots_of[e])]
            given[e] += 1
    return want


place = jax.jit(moe.place, static_argnums=2)


@given(SEEDS, st.sampled_from([(7, 2, 4, 6), (40, 6, 9, 16), (1, 1, 1, 3)]))
@examples(30)
def test_choices_take_turns(seed, size):
    """Also of experts that have no slot, and of numbers that are no expert's."""
    tokens, k, experts, slots = size
    rng = np.random.default_rng(seed)
    indices = rng.integers(-1, experts, (tokens, k)).astype(np.int32)
    indices[rng.random(indices.shape) < 0.05] = experts + rng.integers(3)
    indices[rng.random(indices.shape) < 0.05] = -2
    placement = drawn_placement(rng, experts, slots)
    placement[rng.random(slots) < rng.choice([0, 0.3])] = rng.choice([-1, experts])
    got, want = place(indices, placement, experts), placed(indices, placement, experts)
    assert got.dtype == np.int32
    np.testing.assert_array_equal(got, want)


@given(SEEDS, st.data())
@examples(12)
def test_any_number_of_ranks_gives_the_same_slots(seed, data):
    """In the order of ranks; and each rank's choices are spread evenly too."""
    mesh, axis_name = data.draw(drawn_meshes())
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    ranks = math.prod(mesh.shape[name] for name in names)
    rng = np.random.default_rng(seed)
    indices = rng.integers(-1, 4, (ranks * 5, 2)).astype(np.int32)
    placement = drawn_placement(rng, 4, 11, most=2)

    def one(indices, placement):
        return moe.place(indices, placement, 4, axis_name=axis_name)

    f = jax.shard_map(one, mesh=mesh, in_specs=(P(names), P()), out_specs=P(names))
    got = np.asarray(jax.jit(f)(indices, placement))
    np.testing.assert_array_equal(got, placed(indices, placement, 4))
    for own in got.reshape(ranks, 10):
        counts = np.bincount(own[own >= 0], minlength=11)
        for e in range(4):
            assert np.ptp(counts[placement == e]) <= 1


def test_place_in_batches_and_loops():
    """Each with choices and a placement of its own."""
    rng = np.random.default_rng(0)
    indices = rng.integers(-1, 3, (4, 6, 2)).astype(np.int32)
    each = np.stack([drawn_placement(rng, 3, 5) for _ in range(4)])
    place = functools.partial(moe.place, num_experts=3)
    _, scanned = jax.lax.scan(lambda c, xs: (c, place(*xs)), 0, (indices, each))
    batch = jax.jit(jax.vmap(place))(indices, each)
    for i in range(4):
        want = placed(indices[i], each[i], 3)
        np.testing.assert_array_equal(scanned[i], want)
        np.testing.assert_array_equal(batch[i], want)


def test_an_expert_without_a_slot_is_unassigned():
    indices = np.array([[0, 1], [2, 1], [1, -1]], np.int8)
    found = moe.place(indices, np.array([0, 2, 2, 0]), 3)
    stats = moe.statistics(found, moe.route(found, 4))
    assert (stats.unassigned, stats.dropped) == (4, 0)
    np.testing.assert_array_equal(stats.tokens_per_expert, [1, 1, 0, 0])


def test_place_checks_its_operands():
    indices, placement = np.zeros((3, 2), np.int32), np.arange(4, dtype=np.int32)
    with pytest.raises(TypeError, match=r"topk_indices must be integers \[T, k\], got float32"):
        moe.place(indices.astype(np.float32), placement, 4)
    with pytest.raises(ValueError, match=r"topk_indices must be integers \[T, k\], got .* \(3,\)"):
        moe.place(indices[:, 0], placement, 4)
    with pytest.raises(TypeError, match=r"moe.place: placement must be integers \[S\], got float"):
        moe.place(indices, placement.astype(np.float32), 4)
    with pytest.raises(TypeError, match="placement must be an array, got list"):
        moe.place(indices, [0, 1, 2, 3], 4)
    with pytest.raises(
        ValueError, match=r"placement \(4,\) has fewer physical slots .* experts, 5"
    ):
        moe.place(indices, placement, 5)
    with pytest.raises(NameError, match="needs a jax.shard_map around the call"):
        moe.place(indices, placement, 4, axis_name="ep")
    with pytest.raises(TypeError, match="by position"):
        moe.place(indices, placement, 4, "ep")


@pytest.mark.parametrize("op", ["moe_dispatch", "dispatch_grouped_matmul"])
def test_dispatches_of_placed_choices(op):
    """What tokens get from replicas is what they get from their experts."""
    ranks, experts, slots, k = min(4, RANKS), 5, 8, 3
    mesh, rng = make_mesh((ranks,), ("ep",)), np.random.default_rng(2)
    x, w = rng.normal(size=(ranks * 6, 4)), rng.normal(size=(experts, 4, 4))
    indices = rng.permuted(np.tile(np.arange(experts), (len(x), 1)), axis=1)[:, :k]
    weights = rng.random(indices.shape)
    want = np.einsum("tk,td,tkdf->tf", weights, x, w[indices])

    def one(x, indices, weights, w, placement):
        found = moe.place(indices, placement, experts, axis_name="ep")
        if op == "moe_dispatch":
            d = jflux.moe_dispatch(x, found, weights, num_experts=slots, axis_name="ep")
            y = jflux.grouped_matmul(d.rows, w, d.padded_sizes)
            return jflux.moe_combine(y, d.handle, weights=weights, axis_name="ep"), d.group_sizes
        y, handle = jflux.dispatch_grouped_matmul(
            x, w, found, num_experts=slots, axis_name="ep", exchange="dispatch"
        )
        whole = jnp.tile(jnp.eye(4), (slots // ranks, 1, 1))
        y = jflux.grouped_matmul_combine(y, whole, handle, weights, axis_name="ep")
        return y, handle.group_sizes

    own = P("ep")
    f = jax.jit(jax.shard_map(one, mesh=mesh, in_specs=(*[own] * 4, P()), out_specs=own))
    with X64():
        for placement in (drawn_placement(rng, experts, slots) for _ in range(3)):
            y, sizes = f(x, indices, weights, w[placement], placement)
            np.testing.assert_allclose(y, want, rtol=1e-12, atol=1e-12)
            counts = np.bincount(placed(indices, placement, experts).ravel(), minlength=slots)
            np.testing.assert_array_equal(sizes, counts)
    assert f._cache_size() == 1
