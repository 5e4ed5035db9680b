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
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jflux
from jflux import moe
from jflux._ops.experts import placement as placements

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
shares = jax.jit(placements.shares)


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
    counts = np.bincount(want[(want >= 0) & (want < slots)], minlength=slots)
    asked = np.bincount(indices[(indices >= 0) & (indices < experts)], minlength=experts)
    np.testing.assert_array_equal(shares(asked.astype(np.int32), placement), counts)


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


# ---- Weights -------------------------------------------------------------------------------------


def sums_of(gradients, placement):
    """The definition."""
    return np.stack([gradients[placement == e].sum(0) for e in placement])


#: Meshes, and the axes that slots are split over.
SPLITS = [((4,), "a"), ((2, 2), ("b", "a")), ((3, 2), "b"), ((1, 2), "a")]
SPLITS = [split for split in SPLITS if math.prod(split[0]) <= RANKS]


@functools.cache
def over(shape, axis_name, f, *shared, check_vma=True):
    """(how many ranks, f of arrays whose first dimension is split over axes, but those that are
    `shared`, which are given by these positions)."""
    mesh = make_mesh(shape, ("a", "b")[: len(shape)])
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)

    def call(*arrays):
        specs = tuple(P() if i in shared else P(names) for i in range(len(arrays)))
        one = functools.partial(f, axis_name=axis_name)
        return jax.shard_map(
            one, mesh=mesh, in_specs=specs, out_specs=P(names), check_vma=check_vma
        )(*arrays)

    return math.prod(mesh.shape[name] for name in names), jax.jit(call)


whole_sums = jax.jit(moe.sum_replicas)


@pytest.mark.parametrize("split", SPLITS, ids=str)
@given(SEEDS)
@examples(15)
def test_sum_replicas(split, seed):
    rng = np.random.default_rng(seed)
    ranks, f = over(*split, moe.sum_replicas, 1)
    slots = ranks * 3
    placement = drawn_placement(rng, rng.integers(1, slots + 1), slots)
    gradients = {"up": rng.normal(size=(slots, 3)), "scale": rng.normal(size=slots)}
    with X64():
        got, whole = f(gradients, placement), whole_sums(gradients, placement)
    for name, array in gradients.items():
        want = sums_of(array, placement)
        np.testing.assert_allclose(got[name], want, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(whole[name], want, rtol=1e-12, atol=1e-12)
    assert f._cache_size() == 1


def test_replicas_stay_equal():
    """In every bit, where sums in another order are others; and sums are made in float32."""
    ranks = min(4, RANKS)
    rng = np.random.default_rng(3)
    placement = rng.permutation(np.arange(2 * ranks) % 2).astype(np.int32)
    exact = rng.normal(size=(2 * ranks, 50)) * 2.0 ** rng.integers(-8, 8, (2 * ranks, 50))
    _, f = over((ranks,), "a", moe.sum_replicas, 1)
    for dtype in (np.float32, jnp.bfloat16):
        gradients = exact.astype(dtype)
        got = np.asarray(f(gradients, placement))
        assert got.dtype == dtype
        wide = gradients.astype(np.float64)
        want, size = sums_of(wide, placement), sums_of(abs(wide), placement)
        limit = 1e-6 * size + float(jnp.finfo(dtype).eps) / 2 * abs(want)
        np.testing.assert_array_less(abs(got - want), limit)
        for expert in (0, 1):
            assert len({row.tobytes() for row in got[placement == expert]}) == 1


def moved(weights, placement, previous, ct, axis_name=None):
    """(the weights by a placement, the same by way of another, the gradient for a cotangent)."""
    y, pull = jax.vjp(lambda w: moe.place_weights(w, placement, axis_name=axis_name), weights)
    older = moe.place_weights(weights, previous, axis_name=axis_name)
    again = moe.place_weights(older, placement, previous=previous, axis_name=axis_name)
    return y, again, *pull(ct)


whole_moved = jax.jit(moved)


@pytest.mark.parametrize("split", SPLITS, ids=str)
@given(SEEDS)
@examples(15)
def test_place_weights(split, seed):
    """Of experts and of slots, with zeros for what is nowhere. What experts' weights get as a
    gradient is the sum over slots."""
    rng = np.random.default_rng(seed)
    ranks, f = over(*split, moved, 1, 2)
    experts, slots, before = ranks, 3 * ranks, 2 * ranks
    weights, ct = rng.normal(size=(experts, 2)), rng.normal(size=(slots, 2))
    placement = drawn_placement(rng, experts, slots)
    placement[rng.integers(slots)] = -1
    previous = drawn_placement(rng, experts, before)
    previous[rng.integers(before)] = -1
    with X64():
        found = [one(weights, placement, previous, ct) for one in (f, whole_moved)]
    want = np.where((placement >= 0)[:, None], weights[placement], 0)
    there = np.isin(placement, previous)[:, None]
    slopes = np.array([ct[placement == e].sum(0) for e in range(experts)])
    for y, again, gradient in found:
        np.testing.assert_array_equal(y, want)
        np.testing.assert_array_equal(again, np.where(there, want, 0))
        np.testing.assert_allclose(gradient, slopes, rtol=1e-12, atol=1e-12)
    assert f._cache_size() == 1


def test_weights_without_types_of_variation():
    rng = np.random.default_rng(6)
    placement = drawn_placement(rng, 4, 8)
    _, f = over((4,), "a", moved, 1, 2, check_vma=False)
    weights, ct = rng.normal(size=(4, 2)), rng.normal(size=(8, 2))
    with X64():
        y, again, gradient = f(weights, placement, placement[::-1].copy(), ct)
    np.testing.assert_array_equal(y, weights[placement])
    np.testing.assert_array_equal(again, weights[placement])
    slopes = [ct[placement == e].sum(0) for e in range(4)]
    np.testing.assert_allclose(gradient, slopes, rtol=1e-12, atol=1e-12)


@pytest.mark.skipif(RANKS < 4, reason="a mesh of four ranks")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_weights_of_global_arrays(kind):
    """They stay split as they are along another axis, and nothing is compiled again."""
    mesh = make_mesh((2, 2), ("ep", "tp"), axis_type=kind)
    rng = np.random.default_rng(4)
    weights = rng.normal(size=(6, 3, 4)).astype(np.float32)
    there = jax.device_put(weights, NamedSharding(mesh, P("ep", None, "tp")))
    older, newer = (drawn_placement(rng, 3, 6) for _ in range(2))

    @jax.jit
    def f(weights, placement, previous):
        sums = moe.sum_replicas({"up": weights}, previous, axis_name="ep", mesh=mesh)["up"]
        return sums, moe.place_weights(
            sums, placement, previous=previous, axis_name="ep", mesh=mesh
        )

    for previous, placement in ((older, newer), (newer, older)):
        sums, moved = f(there, placement, previous)
        want = sums_of(weights, previous)
        np.testing.assert_allclose(sums, want, rtol=1e-5, atol=1e-6)
        at = [list(previous).index(e) for e in placement]
        np.testing.assert_array_equal(moved, np.asarray(sums)[at])
        assert sums.sharding.spec == moved.sharding.spec == P("ep", None, "tp")
    assert f._cache_size() == 1
    # Nothing is larger than two slots of both ranks, in parts along tp.
    text = f.lower(there, newer, older).compile().as_text()
    assert "collective-permute" in text and "all-gather" not in text
    # Outside of jit, on the mesh that the array lies on.
    sums = moe.sum_replicas(there, older, axis_name="ep")
    np.testing.assert_allclose(sums, sums_of(weights, older), rtol=1e-5, atol=1e-6)


def test_weights_of_many_types():
    """In place of layers that are scanned over, and quantised."""
    rng = np.random.default_rng(5)
    mesh = make_mesh((2,), ("ep",))
    layers = {
        "float8": rng.normal(size=(3, 4, 2)).astype(jnp.float8_e4m3fn),
        "int8": rng.integers(-128, 128, (3, 4, 2)).astype(np.int8),
    }
    placement = np.stack([drawn_placement(rng, 4, 6) for _ in range(3)])
    place = functools.partial(moe.place_weights, axis_name="ep")
    f = jax.shard_map(
        jax.vmap(place), mesh=mesh, in_specs=(P(None, "ep"), P()), out_specs=P(None, "ep")
    )
    for name, array in jax.jit(f)(layers, placement).items():
        assert array.dtype == layers[name].dtype
        want = np.stack([a[p] for a, p in zip(layers[name], placement, strict=True)])
        np.testing.assert_array_equal(np.asarray(array), want)


def test_weights_check_their_operands():
    w, placement = np.zeros((4, 2), np.float32), np.arange(6) % 4
    with pytest.raises(ValueError, match=r"gradients \(4, 2\) have 4 physical slots on each of 1"):
        moe.sum_replicas(w, placement)
    with pytest.raises(ValueError, match=r"weights \(4, 2\) have 4 .*, and previous \(6,\) has 6"):
        moe.place_weights(w, placement, previous=placement)
    with pytest.raises(TypeError, match="gradients must be floating, got int32"):
        moe.sum_replicas(np.zeros((6, 2), np.int32), placement)
    with pytest.raises(TypeError, match=r"place_weights: placement must be integers \[S\]"):
        moe.place_weights(w, placement.astype(np.float32))
    with pytest.raises(TypeError, match=r"weights must be arrays \[slots, ...\], got float"):
        moe.place_weights([w, 1.0], placement)
    with pytest.raises(ValueError, match="outside shard_map and there is no mesh"):
        moe.sum_replicas(w, np.arange(4), axis_name="ep")
    mesh = make_mesh((4,), ("ep",))
    place = functools.partial(moe.place_weights, axis_name="ep", mesh=mesh)
    with pytest.raises(ValueError, match=r"the 4 ranks along .* do not divide .* \(6,\)"):
        place(w, placement)
    with pytest.raises(ValueError, match="weights has shape .* do not divide its dimension 0"):
        place(w[:3], placement)
    with pytest.raises(ValueError, match=r"names \['ep'\], but the mesh has axes \('tp',\)"):
        moe.place_weights(w, placement, axis_name="ep", mesh=make_mesh((4,)))


# ---- The choice of a placement -------------------------------------------------------------------


def largest(loads, placement, ranks):
    """The load of the fullest rank, by a loop."""
    total = [0.0] * ranks
    for slot, e in enumerate(placement):
        total[slot * ranks // len(placement)] += loads[e] / list(placement).count(e)
    return max(total)


@st.composite
def drawn_loads(draw):
    """(loads [E], slots, ranks)."""
    ranks = draw(st.integers(1, 6))
    slots = ranks * draw(st.integers(1, 6))
    experts = draw(st.one_of(st.just(slots), st.integers(1, slots)))
    sizes = st.sampled_from([st.integers(0, 3), st.integers(0, 1000), st.just(7)])
    loads = draw(st.lists(draw(sizes), min_size=experts, max_size=experts))
    return np.array(loads), slots, ranks


@given(drawn_loads())
@examples(300)
def test_choose_placement(drawn):
    loads, slots, ranks = drawn
    experts = len(loads)
    placement = moe.choose_placement(loads, slots, ranks)
    assert placement.dtype == np.int32 and placement.shape == (slots,)
    replicas = np.bincount(placement, minlength=experts)
    assert len(replicas) == experts and replicas.min() >= 1
    assert all((np.diff(own) >= 0).all() for own in placement.reshape(ranks, -1))
    np.testing.assert_array_equal(
        moe.choose_placement(loads.astype(float), slots, ranks), placement
    )
    most = largest(loads, placement, ranks)
    np.testing.assert_allclose(moe.rank_loads(loads, placement, ranks).max(), most)
    np.testing.assert_allclose(moe.rank_loads(loads, placement, ranks).sum(), loads.sum())
    if experts % ranks == 0:
        assert most <= largest(loads, np.arange(experts), ranks) * (1 + 1e-12)
    if slots == experts:
        assert (replicas == 1).all()
        if np.ptp(loads) == 0 or ranks == 1:
            np.testing.assert_array_equal(placement, np.arange(experts))


@given(drawn_loads())
@examples(100)
def test_replicas_are_of_the_experts_that_need_them(drawn):
    """No other numbers of replicas would make the largest load of a slot smaller."""
    loads, slots, _ = drawn
    share = loads / np.bincount(moe.choose_placement(loads, slots, 1))
    low = 0.0  # the smallest limit that so many slots can keep: one of loads / replicas
    for limit in np.unique(np.concatenate([loads / r for r in range(1, slots + 1)])):
        with np.errstate(divide="ignore", invalid="ignore"):
            needed = np.where(loads > 0, np.ceil(loads / limit - 1e-9), 1)
        if limit > 0 and np.maximum(needed, 1).sum() <= slots:
            low = limit
            break
    assert share.max() <= low * (1 + 1e-9)


def test_experts_stay_where_no_placement_is_better():
    """Here the greedy one has ranks of 7 and 5."""
    np.testing.assert_array_equal(moe.choose_placement([3, 3, 0, 2, 2, 2], 6, 2), np.arange(6))
    found = moe.choose_placement([3, 3, 0, 2, 2, 2], 8, 2)
    assert moe.rank_loads([3, 3, 0, 2, 2, 2], found, 2).max() == 6


def test_a_placement_of_skewed_loads():
    """That of one expert with half of the tokens, by which ranks have equal loads."""
    loads = np.array([700, 100, 100, 100, 100, 100, 100, 100])
    placement = moe.choose_placement(loads, 16, 4)
    assert moe.rank_loads(loads, np.arange(8), 4).max() == 800
    assert moe.rank_loads(loads, placement, 4).max() < 1.02 * loads.sum() / 4
    layers = np.stack([loads, loads[::-1]])
    each = moe.choose_placement(layers, 16, 4)
    assert each.shape == (2, 16)
    np.testing.assert_array_equal(each[0], placement)
    of_each = [moe.rank_loads(one, p, 4) for one, p in zip(layers, each, strict=True)]
    np.testing.assert_array_equal(moe.rank_loads(layers, each, 4), of_each)


def test_loads_of_placements_with_gaps():
    """A slot without an expert gets nothing, and the tokens of an expert without a slot go
    nowhere."""
    found = moe.rank_loads([6, 5, 4], [0, -1, 0, 2, 7, 0], 3)
    np.testing.assert_array_equal(found, [2, 6, 2])


def test_choices_of_placements_check_their_arguments():
    with pytest.raises(ValueError, match="slots=3 must be at least the 4 experts"):
        moe.choose_placement(np.ones(4), 3, 1)
    with pytest.raises(ValueError, match="ranks=3 must divide slots=4"):
        moe.choose_placement(np.ones(4), 4, 3)
    for wrong in (np.array(3.0), np.array([1, -1]), np.array([1, np.nan])):
        with pytest.raises(ValueError, match=r"must be \[..., E\], finite and not negative"):
            moe.choose_placement(wrong, 2, 1)
    with pytest.raises(ValueError, match=r"placement must be integers \['S'\].* got float64"):
        moe.rank_loads(np.ones(2), np.ones(2), 1)
    with pytest.raises(ValueError, match="ranks=3 must divide the slots"):
        moe.rank_loads(np.ones(2), np.arange(2), 3)
