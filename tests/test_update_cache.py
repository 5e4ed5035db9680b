"""What is written into a cache that is split over ranks by position."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from caches import draw, paged, plain, written
from harness import PLATFORM, RANKS, examples, make_mesh
from hypothesis import given
from hypothesis import strategies as st
from jax.experimental import checkify
from jax.sharding import PartitionSpec as P

import jflux

pytestmark = pytest.mark.wide
COUNTS = [n for n in (1, 2, 3, 4) if n <= RANKS]
EITHER = pytest.mark.parametrize("module", [jflux, jflux.reference], ids=["jflux", "reference"])


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


def writer(world, *, module=jflux, paged=False, split=False, check_vma=True):
    """update_cache of whole arrays, whose cache is split over the ranks."""

    def call(cache, new, positions, table):
        return module.update_cache(
            cache, new, positions, axis_name="tp", block_table=table, split=split
        )

    def f(cache, new, positions, table=None):
        parts = P("tp") if paged else P(None, "tp")
        of_new = P(None, "tp") if split else P()
        return jax.shard_map(
            call, mesh=make_mesh((world,)),
            in_specs=(parts, of_new, of_new if positions.ndim == 2 else P(), P(None, "tp")),
            out_specs=parts, check_vma=check_vma,
        )(cache, new, positions, table)  # fmt: skip

    return f


@given(
    world=st.sampled_from(COUNTS), here=st.integers(1, 5), tokens=st.integers(1, 6),
    data=st.data(), check_vma=st.booleans(),
)  # fmt: skip
@examples(15)
def test_each_rank_writes_its_own(world, here, tokens, data, check_vma):
    """Runs of tokens across ranks' borders, and before position 0; two arrays."""
    bounds = st.integers(-tokens - 1, here * world - tokens)
    positions = np.array([data.draw(bounds) for _ in range(3)], np.int32)
    k, v, new_k, new_v = draw(
        (3, here * world, 2, 4), (3, here * world), (3, tokens, 2, 4), (3, tokens)
    )
    got = jax.jit(writer(world, check_vma=check_vma))((k, v), (new_k, new_v), positions)
    assert isinstance(got, tuple)
    np.testing.assert_array_equal(got[0], written(k, new_k, positions))
    np.testing.assert_array_equal(got[1], written(v, new_v, positions))


@EITHER
@pytest.mark.parametrize("world", COUNTS)
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped", "ragged"])
def test_a_split_prompt_goes_into_a_longer_cache(world, layout, module):
    """From whichever order its positions have; where prompts are shorter, without the padding."""
    length, room = 4 * world, 6 * world
    cache, new = draw((2, room, 3), (2, length, 3))
    if layout == "ragged":
        positions = np.tile(np.arange(length), (2, 1))
        positions[1, 3:] = -1
    else:
        positions = np.tile(jflux.causal_positions(length, world, layout=layout), (2, 1))
    got = jax.jit(writer(world, split=True, module=module))(cache, new, positions)
    np.testing.assert_array_equal(got, written(cache, new, positions))
    if layout == "contiguous":
        first = np.array([0, 2 * world], np.int32)
        got = jax.jit(writer(world, split=True))(cache, new, first)
        np.testing.assert_array_equal(got, written(cache, new, first))


@pytest.mark.parametrize("world", COUNTS)
def test_pages_are_written(world):
    size, each = 2, 3
    s = world * each * size
    cache, new = draw((3, s, 2), (3, 5, 2))
    positions = np.array([s - 5, 0, -2], np.int32)
    pages, table = paged(cache, world, size)
    want, _ = paged(written(cache, new, positions), world, size)
    got = jax.jit(writer(world, paged=True))(pages, new, positions, table)
    np.testing.assert_array_equal(got, want)
    # What has no page is not written.
    got = jax.jit(writer(world, paged=True))(pages, new, positions, np.full_like(table, -1))
    np.testing.assert_array_equal(got, pages)


def test_decoding_in_a_loop():
    """Each step writes its key and value, and attends to all up to there. The cache is written in
    place, in 16 bits, from uneven lengths on."""
    world, steps = COUNTS[-1], 5
    s = 4 * world
    k, v = (a.astype(jnp.bfloat16) for a in draw((2, s, 2, 4), (2, s, 2, 4)))
    q, new_k, new_v = draw((steps, 2, 4, 4), (steps, 2, 1, 2, 4), (steps, 2, 1, 2, 4), seed=3)
    lengths = np.array([s // 2 - 1, 0], np.int32)

    def loop(k, v, lengths, *each):
        def step(carry, now):
            kv, lengths = carry
            q, *new = now
            kv = jflux.update_cache(kv, tuple(new), lengths, axis_name="tp")
            y = jflux.flash_decode(q.astype(jnp.bfloat16), *kv, lengths + 1, axis_name="tp")
            return (kv, lengths + 1), y

        (kv, _), ys = jax.lax.scan(step, ((k, v), lengths), each)
        return kv, ys

    cache = P(None, "tp")
    f = jax.jit(
        jax.shard_map(
            loop, mesh=make_mesh((world,)), in_specs=(cache, cache, *[P()] * 4),
            out_specs=(cache, P()),
        ), donate_argnums=(0, 1),
    )  # fmt: skip
    given = [jax.device_put(a, jax.NamedSharding(make_mesh((world,)), cache)) for a in (k, v)]
    (got_k, got_v), ys = f(*given, lengths, q, new_k, new_v)
    assert all(a.is_deleted() for a in given)
    for i in range(steps):
        k, v = (written(a, new[i], lengths + i) for a, new in ((k, new_k), (v, new_v)))
        want, _ = plain(q[i].astype(jnp.bfloat16), k, v, lengths + i + 1)
        np.testing.assert_allclose(np.asarray(ys[i], float), want, rtol=2e-2, atol=2e-2)
    np.testing.assert_array_equal(got_k, k)
    np.testing.assert_array_equal(got_v, v)


def test_gradients_of_a_write():
    """What was overwritten has none, and what is new has those of its position."""
    world = COUNTS[-1]
    cache, new = map(jnp.asarray, draw((2, 2 * world, 3), (2, 2, 3)))
    positions = np.array([1, -1], np.int32)  # one token is not written
    weight = draw(cache.shape, seed=4)[0]
    f = writer(world)
    got, of_new = jax.jit(
        jax.grad(lambda c, n: jnp.sum(f(c, n, positions) * weight), (0, 1))
    )(cache, new)  # fmt: skip
    np.testing.assert_array_equal(got, written(weight, np.zeros(new.shape), positions))
    want = np.stack([weight[0, 1:3], np.stack([np.zeros(3), weight[1, 0]])])
    np.testing.assert_array_equal(of_new, want)


@pytest.mark.parametrize("in_pages", [False, True])
def test_a_token_beyond_the_cache(in_pages):
    """On CPUs an error with the value; in plain lax NaN at the end of that sequence alone."""
    world, size = COUNTS[-1], 2
    s = 2 * world * size
    cache, new = draw((3, s, 2), (3, 3, 2))
    positions = np.array([[s + 1, s - 1, s], [s - 1, 0, -1], [1, 2, s]], np.int32)
    want = written(cache, new, positions)
    want[[0, 2], -1] = np.nan
    given = (cache, new, positions)
    if in_pages:
        pages, table = paged(cache, world, size)
        given, want = (pages, new, positions, table), paged(want, world, size)[0]
    got = jax.jit(writer(world, paged=in_pages, module=jflux.reference))(*given)
    np.testing.assert_array_equal(got, want)
    if PLATFORM != "cpu":
        np.testing.assert_array_equal(jax.jit(writer(world, paged=in_pages))(*given), want)
        return
    with pytest.raises(
        jax.errors.JaxRuntimeError,
        match=f"jflux.update_cache: positions must be at most {s - 1}, got {s + 1}",
    ):
        jax.block_until_ready(jax.jit(writer(world, paged=in_pages))(*given))


def test_checkify_says_which_position_is_beyond_the_cache():
    def f(positions):
        return jflux.update_cache(jnp.zeros((2, 6, 1)), jnp.ones((2, 3, 1)), positions)

    checked = jax.jit(checkify.checkify(f))
    assert checked(np.array([3, -3]))[0].get() is None
    message = "jflux.update_cache: positions must be at most 5, got 6"
    assert message in checked(np.array([0, 4]))[0].get()


@pytest.mark.parametrize(
    ("cache", "new", "positions", "options", "message"),
    [
        ((2, 6, 3), (2, 1, 4), (2,), {}, "same dimensions after the first two, got .2, 6, 3. and"),
        ((2,), (2, 1), (2,), {}, "same dimensions after the first two"),
        ((2, 6, 3), (3, 1, 3), (3,), {}, "same B, got 3 and 2"),
        (
            (2, 6, 3),
            (2, 2, 3),
            (3,),
            {},
            r"positions must be \[B\] or \[B, T\], .2,. or .2, 2., got",
        ),
        ((2, 6, 3), (2, 2, 3), (2, 3), {}, r"positions must be \[B\] or \[B, T\]"),
        ((2, 6, 3), (2, 2, 3), (2,), {"split": True}, "split=True needs the axis_name"),
        ((2, 6), (2, 2), (2,), {"block_table": np.zeros(2, int)}, r"block_table must be \[B, P\]"),
        ((2, 6), (2, 2), (2,), {"block_table": np.zeros((3, 1), int)}, "same B, got 2 and 3"),
    ],
)
def test_writes_that_do_not_fit(cache, new, positions, options, message):
    f = functools.partial(jflux.update_cache, **options)
    with pytest.raises(ValueError, match=f"jflux.update_cache: .*{message}"):
        jax.eval_shape(f, np.zeros(cache), np.zeros(new), np.zeros(positions, int))


def test_what_is_written_must_be_arrays_of_one_structure():
    one, at = np.zeros((2, 3)), np.zeros(2, int)
    with pytest.raises(ValueError, match="cache and new must be pytrees of one structure"):
        jflux.update_cache((one, one), one, at)
    with pytest.raises(ValueError, match="must have the same first two dimensions"):
        jflux.update_cache((one, one), (one, np.zeros((2, 1))), at)
    with pytest.raises(TypeError, match="positions must be integers, got float64"):
        jflux.update_cache(one, one, np.zeros(2))
    with pytest.raises(TypeError, match="new is float64, and would be cut to a cache of int8"):
        jflux.update_cache(one.astype(np.int8), one, at)
    with pytest.raises(TypeError, match="positions must be an array, got int"):
        jflux.update_cache(one, one, 3)
