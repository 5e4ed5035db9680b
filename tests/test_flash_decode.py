"""Decoding over a cache that is split over ranks, against softmax attention in float64 on one
device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from caches import draw, paged, plain, plain_tokens
from harness import PLATFORM, RANKS, examples, fused_calls, make_mesh
from hypothesis import given
from hypothesis import strategies as st
from jax.experimental import checkify
from jax.sharding import PartitionSpec as P

import jflux
from jflux._ops.attention._flash_decode_primitive import _splits

pytestmark = pytest.mark.wide
COUNTS = [n for n in (1, 2, 3, 4) if n <= RANKS]
EITHER = pytest.mark.parametrize("module", [jflux, jflux.reference], ids=["jflux", "reference"])


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        yield


def over_ranks(world, *, module=jflux, check_vma=True, **options):
    """flash_decode of whole arrays, whose cache is split over the ranks. With `check_vma` JAX
    checks that the result is the same on all of them."""
    options.setdefault("return_lse", True)

    def call(*operands):
        *operands, table = operands
        return module.flash_decode(*operands, axis_name="tp", block_table=table, **options)

    def f(q, k, v, lengths, table=None):
        cache = P("tp") if table is not None else P(None, "tp")
        return jax.shard_map(
            call, mesh=make_mesh((world,)), in_specs=(P(), cache, cache, P(), P(None, "tp")),
            out_specs=P(), check_vma=check_vma,
        )(q, k, v, lengths, table)  # fmt: skip

    return f


def check(got, want, dtype=np.float64):
    tolerance = {"float64": 1e-12, "float32": 2e-6, "float16": 2e-3, "bfloat16": 2e-2}
    assert got[0].dtype == dtype
    assert got[1].dtype == (np.float64 if dtype == np.float64 else np.float32)
    for one, other in zip(got, want, strict=True):
        close = tolerance[jnp.dtype(dtype).name]
        np.testing.assert_allclose(np.asarray(one, np.float64), other, rtol=close, atol=close)


# ---- Values --------------------------------------------------------------------------------------


@st.composite
def decodes(draw):
    """(ranks, sizes, lengths, options) of a call. With `value_width` values are those of keys."""
    world = draw(st.sampled_from(COUNTS))
    batch, here = draw(st.integers(1, 4)), draw(st.integers(1, 7))
    groups, queries = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    d, of_values = draw(st.sampled_from([1, 3, 4, 8])), draw(st.sampled_from([None, 2, 4]))
    latent = draw(st.booleans())
    lengths = draw(st.lists(st.integers(0, here * world), min_size=batch, max_size=batch))
    options = {
        "window": draw(st.one_of(st.none(), st.integers(0, here * world + 2))),
        "softcap": draw(st.sampled_from([None, 0.5, 30.0])),
        "scale": draw(st.sampled_from([None, 0.3, -2.0])),
        "alibi_slopes": draw(st.sampled_from([None, 0.3 - np.arange(groups * queries) / 4])),
        "value_width": min(d, of_values or d) if latent else None,
    }
    tokens, lead = draw(st.integers(1, 4)), (batch, here * world, groups)
    shapes = (batch, tokens, groups * queries, d), (*lead, d), (*lead, of_values or d)
    return world, shapes, np.array(lengths, np.int32), options


@given(case=decodes(), dtype=st.sampled_from(["float64", "float32", "float16", "bfloat16"]))
@examples(25)
def test_it_is_attention(case, dtype):
    world, shapes, lengths, options = case
    q, k, v = draw(*shapes, dtype=jnp.dtype(dtype))
    call = jax.jit(over_ranks(world, **options))
    cache = k, v
    if (width := options.pop("value_width")) is not None:
        cache, v = (k, None), k[..., :width]
    check(call(q, *cache, lengths), plain_tokens(q, k, v, lengths, **options), jnp.dtype(dtype))
    last = call(q[:, -1], *cache, lengths)  # of [B, H, D]
    check(last, plain(q[:, -1], k, v, lengths, **options), jnp.dtype(dtype))


@EITHER
@pytest.mark.parametrize("world", COUNTS)
@pytest.mark.parametrize("window", [None, 0, 3, (6, 0)])
def test_lengths_and_windows_across_ranks(world, window, module):
    """Every length: a rank's part is empty, partly valid, whole, or out of the window."""
    here = 3
    lengths = np.arange(here * world + 1, dtype=np.int32)
    shapes = (len(lengths), 4, 4), *[(len(lengths), here * world, 2, 4)] * 2
    operands = draw(*shapes, seed=1)
    got = jax.jit(over_ranks(world, window=window, module=module))(*operands, lengths)
    left = window[0] if isinstance(window, tuple) else window
    check(got, plain(*operands, lengths, left))
    assert not got[0][0].any() and np.isneginf(got[1][0]).all()


@pytest.mark.parametrize("axes", ["a", "b", ("a", "b"), ("b", "a")])
@pytest.mark.skipif(RANKS < 4, reason="four ranks")
def test_groups_and_two_axes(axes):
    """Along one axis of two each group has sequences of its own; along both, the first is major."""
    mesh = make_mesh((2, 2), ("a", "b"))
    batch = None if isinstance(axes, tuple) else {"a": "b", "b": "a"}[axes]
    q, k, v = draw((4, 6, 4), (4, 12, 3, 4), (4, 12, 3, 4))
    lengths = np.array([12, 0, 7, 1], np.int32)
    f = jax.shard_map(
        functools.partial(jflux.flash_decode, axis_name=axes, return_lse=True), mesh=mesh,
        in_specs=(P(batch), P(batch, axes), P(batch, axes), P(batch)), out_specs=P(batch),
    )  # fmt: skip
    check(jax.jit(f)(q, k, v, lengths), plain(q, k, v, lengths))


@EITHER
@pytest.mark.parametrize(("batch", "positions"), [(0, 4), (2, 0), (0, 0)])
def test_an_empty_batch_or_cache(batch, positions, module):
    operands = draw((batch, 4, 8), *[(batch, positions, 2, 8)] * 2)
    f = jax.jit(functools.partial(module.flash_decode, axis_name=None, return_lse=True))
    o, lse = f(*operands, np.zeros(batch, np.int32))
    assert o.shape == (batch, 4, 8) and lse.shape == (batch, 4)
    assert not o.any() and np.isneginf(lse).all()


@EITHER
def test_no_tokens(module):
    operands = draw((2, 0, 4, 8), *[(2, 6, 2, 8)] * 2)
    f = functools.partial(module.flash_decode, axis_name=None, return_lse=True)
    o, lse = f(*operands, np.array([6, 2]))
    assert o.shape == (2, 0, 4, 8) and lse.shape == (2, 0, 4)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_large_scores_do_not_overflow(dtype):
    q, k, v = draw((2, 4, 16), (2, 12, 2, 16), (2, 12, 2, 16), dtype=jnp.dtype(dtype))
    q *= 200  # scores of some thousands, of which float16's exponential is infinite from 11 on
    world = COUNTS[-1]
    k, v = (np.repeat(a, world, 1) for a in (k, v))
    lengths = np.array([12 * world - 1, 5], np.int32)
    got, lse = jax.jit(over_ranks(world))(q, k, v, lengths)
    want, want_lse = plain(q, k, v, lengths)
    assert want_lse.max() > 200
    np.testing.assert_allclose(lse, want_lse, rtol=1e-2)
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=2e-2, atol=2e-2)


def test_without_an_axis_the_cache_is_whole():
    operands = draw((2, 6, 4), (2, 9, 3, 4), (2, 9, 3, 4))
    lengths = np.array([9, 4], np.int32)
    got = jflux.flash_decode(*operands, lengths, return_lse=True)
    check(got, plain(*operands, lengths))
    alone = jflux.flash_decode(*operands, lengths)
    np.testing.assert_array_equal(alone, got[0])


def test_a_long_cache_is_summed_in_splits():
    assert _splits(1, 2048) == 4 and _splits(8, 2048) == 4 and _splits(64, 4096) == 1
    assert _splits(1, 2047) == 1 and _splits(1, 1 << 17) == 64
    operands = draw((2, 4, 8), (2, 2048, 2, 8), (2, 2048, 2, 8))
    lengths = np.array([1500, 2048], np.int32)
    got = jax.jit(functools.partial(jflux.flash_decode, return_lse=True))(*operands, lengths)
    check(got, plain(*operands, lengths))


def test_what_is_not_attended_to_does_not_matter():
    world, lengths = COUNTS[-1], np.array([4, 3], np.int32)
    q, k, v = draw((2, 4, 4), (2, 4 * world, 2, 4), (2, 4 * world, 2, 4))
    want = plain(q, k, v, lengths, window=2)
    for b, length in enumerate(lengths):
        for a in (k, v):
            a[b, length:], a[b, : length - 3] = np.nan, np.inf
    got = jax.jit(over_ranks(world, window=2))(q, k, v, lengths)
    check(got, want)


@EITHER
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_nan_reaches_those_that_attend_to_it(module, dtype):
    """Also where another rank's part has none."""
    world, lengths = COUNTS[-1], np.array([3 * COUNTS[-1], 2], np.int32)
    for operand in range(3):
        arrays = draw((2, 4, 4), (2, 3 * world, 2, 4), (2, 3 * world, 2, 4))
        arrays[operand][0, 0 if operand == 0 else 2, ..., 0] = np.nan
        arrays = [a.astype(dtype) for a in arrays]
        o, lse = jax.jit(over_ranks(world, module=module))(*arrays, lengths)
        heads = [0] if operand == 0 else range(4)
        nan = np.zeros((2, 4), bool)
        nan[0, heads] = True
        np.testing.assert_array_equal(np.isnan(o).any(-1), nan)
        np.testing.assert_array_equal(np.isnan(lse), nan & (operand < 2))


@pytest.mark.skipif(RANKS < 2, reason="two ranks")
def test_a_window_of_numpy():
    operands, lengths = draw((2, 4, 4), (2, 6, 2, 4), (2, 6, 2, 4)), np.array([5, 3], np.int32)
    got = jax.jit(over_ranks(2, window=np.int64(2)))(*operands, lengths)
    check(got, plain(*operands, lengths, window=2))
    for wide in ((1 << 31) - 1, 1 << 31, 1 << 63, (None, 3)):
        got = jax.jit(over_ranks(2, window=wide))(*operands, lengths)
        check(got, plain(*operands, lengths))


@EITHER
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("world", COUNTS)
def test_sinks(world, dtype, module):
    """They count once, also where a rank or a sequence has no position."""
    here = 3
    lengths = np.arange(here * world + 1, dtype=np.int32)
    shapes = (len(lengths), 4, 4), *[(len(lengths), here * world, 2, 4)] * 2
    operands = draw(*shapes, seed=1, dtype=jnp.dtype(dtype))
    options = {"window": 4, "softcap": 2.0, "sinks": np.array([0.5, -np.inf, 3, -2], np.float32)}
    options["alibi_slopes"] = np.array([0.5, 0.25, 0, -0.125], np.float32)
    got = jax.jit(over_ranks(world, module=module, **options))(*operands, lengths)
    check(got, plain(*operands, lengths, **options), jnp.dtype(dtype))


@EITHER
@pytest.mark.parametrize("world", COUNTS)
def test_values_that_are_elements_of_keys(world, module):
    """In pages, under vmap, and their gradients: as a cache of their own."""
    s = 4 * world
    q, k, cotangent = draw((2, 3, 4, 6), (2, s, 1, 6), (2, 3, 4, 4))
    lengths = np.array([s, s // 2 + 1], np.int32)
    latent = over_ranks(world, module=module, value_width=4, window=5)
    apart = over_ranks(world, module=module, window=5)

    def loss(f):
        return lambda q, k: jnp.sum(f(q, k) * cotangent)

    got = jax.jit(jax.grad(loss(lambda q, k: latent(q, k, None, lengths)[0]), (0, 1)))(q, k)
    want = jax.jit(jax.grad(loss(lambda q, k: apart(q, k, k[..., :4], lengths)[0]), (0, 1)))(q, k)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)
    want = plain_tokens(q, k, k[..., :4], lengths, 5)
    pages, table = paged(k, world, 2)
    check(jax.jit(latent)(q, pages, None, lengths, table), want)
    both = jax.jit(jax.vmap(lambda q, k: latent(q, k, None, lengths)))
    check([a[1] for a in both(np.stack([q, q]), np.stack([k + 1, k]))], want)


# ---- Pages ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", COUNTS)
@pytest.mark.parametrize("window", [None, 5])
def test_pages(world, window):
    size, each = 2, 3
    s = world * each * size
    q, k, v = draw((3, 4, 4), (3, s, 2, 4), (3, s, 2, 4))
    lengths = np.array([s, s // 2 + 1, 0], np.int32)
    (k_pages, table), (v_pages, _) = (paged(a, world, size) for a in (k, v))
    (sinks,) = draw((4,), seed=2)
    for options in ({"window": window}, {"sinks": sinks, "alibi_slopes": sinks}):
        options["window"] = window
        got = jax.jit(over_ranks(world, **options))(q, k_pages, v_pages, lengths, table)
        check(got, plain(q, k, v, lengths, **options))
    # Pages that nothing is in, or that the window has left behind, need not be there.
    start = np.arange(world * each) * size
    gone = start >= lengths[:, None]
    if window is not None:
        gone |= start + size <= lengths[:, None] - 1 - window
    assert gone.any()
    table = np.where(gone, -1, table)
    again = jax.jit(over_ranks(world, window=window))(q, k_pages, v_pages, lengths, table)
    check(again, plain(q, k, v, lengths, window))


def test_positions_without_a_page_are_left_out():
    q, k, v = draw((1, 2, 4), (1, 8, 2, 4), (1, 8, 2, 4))
    table = np.array([[0, -1, 99, 3]], np.int32)  # 99 is no page either
    k_pages, v_pages = (a.reshape(4, 2, 2, 4) for a in (k, v))
    got = jflux.flash_decode(
        q, k_pages, v_pages, np.array([8], np.int32), block_table=table, return_lse=True
    )
    k, v = (a[:, [0, 1, 6, 7]] for a in (k, v))
    check(got, plain(q, k, v, [4]))


# ---- Transforms ----------------------------------------------------------------------------------


def test_other_lengths_do_not_compile_again():
    world = COUNTS[-1]
    operands = draw((2, 4, 4), (2, 3 * world, 2, 4), (2, 3 * world, 2, 4))
    f = jax.jit(over_ranks(world))
    for lengths in ([1, 2], [3 * world, 0]):
        lengths = np.array(lengths, np.int32)
        check(f(*operands, lengths), plain(*operands, lengths))
    assert f._cache_size() == 1
    # Effects, such as those of checkify.debug_check, would keep calls from JAX's fast dispatch.
    assert not jax.make_jaxpr(f)(*operands, lengths).effects


@pytest.mark.skipif(RANKS < 2, reason="two ranks")
def test_the_ranks_exchange_once():
    """One float32 array [B, H, D + 1]."""
    world = COUNTS[-1]
    operands = draw((2, 4, 4), (2, 3 * world, 2, 4), (2, 3 * world, 2, 4), dtype=np.float32)
    f = over_ranks(world, return_lse=False, module=jflux.reference)
    text = jax.jit(f).lower(*operands, np.array([3, 2], np.int32)).as_text()
    assert text.count('"stablehlo.all_gather"') == 1 and "1x2x4x5xf32" in text
    for other in ("all_reduce", "reduce_scatter", "all_to_all", "collective_permute", "transpose"):
        assert f"stablehlo.{other}" not in text, other
    text = jax.jit(over_ranks(world, return_lse=False)).lower(
        *operands, np.array([3, 2], np.int32)
    ).compile().as_text()  # fmt: skip
    check_of_lengths = ["flash_decode"] * (PLATFORM == "cpu")
    assert fused_calls(text) == [*check_of_lengths, "decode_merge"]


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("world", COUNTS)
def test_gradients(world, check_vma):
    """Of both results, forward and backward, where ranks have nothing too."""
    s = 3 * world
    q, k, v = map(jnp.asarray, draw((4, 6, 4), (4, s, 3, 4), (4, s, 3, 4)))
    lengths = np.array([s, 0, 1, s // 2 + 1], np.int32)
    weights, slopes = draw((4, 6, 4), (4, 6), seed=7), np.arange(-2, 4) / 4
    tangents = tuple(map(jnp.asarray, draw(q.shape, k.shape, v.shape, seed=8)))

    def loss(pair):
        lse = jnp.where(jnp.isfinite(pair[1]), pair[1], 0)
        return jnp.sum(pair[0] * weights[0]) + jnp.sum(lse * weights[1])

    def whole(q, k, v):  # in JAX, with double `where`s
        scores = jnp.einsum("bgrd,bsgd->bgrs", q.reshape(4, 3, 2, 4), k) / 2
        ahead = np.arange(s) - (lengths[:, None] - 1)
        scores = 5 * jnp.tanh(scores / 5) + slopes.reshape(3, 2, 1) * ahead[:, None, None]
        may = (np.arange(s) < lengths[:, None]) & (np.arange(s) >= lengths[:, None] - 5)
        scores = jnp.where(may[:, None, None], scores, -1e30)
        lse = jax.scipy.special.logsumexp(scores, -1)
        p = jnp.where(may[:, None, None], jnp.exp(scores - lse[..., None]), 0)
        lse = jnp.where(may.any(1)[:, None, None], lse, 0).reshape(4, 6)
        return jnp.einsum("bgrs,bsgd->bgrd", p, v).reshape(4, 6, 4), lse

    options = {"window": 4, "softcap": 5.0, "alibi_slopes": slopes}
    split = over_ranks(world, check_vma=check_vma, **options)

    def run(f):
        def g(q, k, v):
            return loss(f(q, k, v))

        return jax.grad(g, (0, 1, 2))(q, k, v), jax.jvp(g, (q, k, v), tangents)

    got = jax.jit(lambda: run(lambda *a: split(*a, lengths)))()
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(run(whole)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("world", [n for n in (2, 1, 3) if n <= RANKS])
def test_gradients_of_sinks(world, check_vma):
    """And of the rest beside them, forward and backward; of a batch of sinks, under remat."""
    s = 3 * world
    operands = [*map(jnp.asarray, draw((3, 4, 4), (3, s, 2, 4), (3, s, 2, 4), (2, 4)))]
    tangents = [*map(jnp.asarray, draw(*(a.shape for a in operands), seed=8))]
    lengths = np.array([s, 0, s // 2 + 1], np.int32)
    weights = draw((3, 4, 4), (3, 4), seed=7)
    cache = P(None, "tp")
    split = jax.shard_map(
        lambda q, k, v, sinks: jflux.flash_decode(
            q, k, v, lengths, axis_name="tp", sinks=sinks, return_lse=True
        ),
        mesh=make_mesh((world,)), in_specs=(P(), cache, cache, P()), out_specs=P(),
        check_vma=check_vma,
    )  # fmt: skip

    def whole(q, k, v, sinks):
        scores = jnp.einsum("bgrd,bsgd->bgrs", q.reshape(3, 2, 2, 4), k) / 2
        scores = jnp.where((np.arange(s) < lengths[:, None])[:, None, None], scores, -1e30)
        column = jnp.broadcast_to(sinks.reshape(2, 2, 1), (3, 2, 2, 1))
        scores = jnp.concatenate([scores, column], -1)
        p = jax.nn.softmax(scores)[..., :-1]
        lse = jax.nn.logsumexp(scores, -1).reshape(3, 4)
        return jnp.einsum("bgrs,bsgd->bgrd", p, v).reshape(3, 4, 4), lse

    def run(f):
        def g(q, k, v, sinks):
            o, lse = jax.vmap(jax.checkpoint(f), (None, None, None, 0))(q, k, v, sinks)
            return jnp.sum(o * weights[0]) + jnp.sum(lse * weights[1])

        return jax.grad(g, (0, 1, 2, 3))(*operands), jax.jvp(g, operands, tangents)

    got, want = (jax.jit(functools.partial(run, f))() for f in (split, whole))
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("check_vma", [True, False])
def test_vmap_and_remat(check_vma):
    world = COUNTS[-1]
    q, k, v = draw((2, 3, 4, 4), (2, 3, 3 * world, 2, 4), (2, 3, 3 * world, 2, 4))
    lengths = np.array([[3 * world, 1, 0], [3, 2, 2]], np.int32)
    slopes = np.array([0.5, 0, -0.5, 1])
    f = functools.partial(jflux.flash_decode, axis_name="tp", return_lse=True, alibi_slopes=slopes)
    cache = P(None, None, "tp")
    mapped = jax.shard_map(
        jax.vmap(jax.checkpoint(f)), mesh=make_mesh((world,)), in_specs=(P(), cache, cache, P()),
        out_specs=P(), check_vma=check_vma,
    )  # fmt: skip
    got = jax.jit(mapped)(q, k, v, lengths)
    for i in range(2):
        check([a[i] for a in got], plain(q[i], k[i], v[i], lengths[i], alibi_slopes=slopes))
    gradient = jax.jit(jax.grad(lambda v: jnp.sum(mapped(q, k, v, lengths)[0])))(v)
    # The weights of a query sum to 1, of each of 4 heads, for each of 4 elements.
    np.testing.assert_allclose(gradient.sum((2, 3, 4)), 16.0 * (lengths > 0), rtol=1e-12)


# ---- Checks --------------------------------------------------------------------------------------


@pytest.mark.parametrize("check_vma", [True, False])
def test_checkify_says_which_length_is_beyond_the_cache(check_vma):
    world = COUNTS[-1]
    s = 2 * world
    operands = draw((2, 2, 4), (2, s, 2, 4), (2, s, 2, 4))
    f = over_ranks(world, check_vma=check_vma)
    checked = jax.jit(checkify.checkify(f, errors=checkify.all_checks))
    error, _ = checked(*operands, np.array([0, s], np.int32))
    assert error.get() is None
    for bad in (s + 1, -1):
        error, got = checked(*operands, np.array([1, bad], np.int32))
        message = f"jflux.flash_decode: lengths must be from 0 to {s}, got {bad}"
        assert message in error.get()
        check(got, plain(*operands, [1, 0]))  # and nothing else is said of it


def assert_only_the_last_is_nan(got, want):
    for one in got:
        assert np.isnan(one[-1]).all()
    check([one[:-1] for one in got], [one[:-1] for one in want])


@pytest.mark.parametrize("world", COUNTS)
def test_a_length_beyond_the_cache_is_nan_in_plain_lax(world):
    s = 2 * world
    operands = draw((2, 2, 4), (2, s, 2, 4), (2, s, 2, 4))
    f = jax.jit(over_ranks(world, module=jflux.reference))
    with jflux.config(fused=False):
        unfused = jax.jit(over_ranks(world))
        for bad in (s + 1, -1, 2**31 + s, -(2**40)):  # also what int32 would wrap into the cache
            lengths = np.array([1, bad], np.int64)
            for g in (f, unfused):
                assert_only_the_last_is_nan(g(*operands, lengths), plain(*operands, [1, 0]))


@pytest.mark.parametrize("type_", [np.int8, np.uint8, np.uint32])
def test_checkify_of_types_that_do_not_hold_the_bounds(type_):
    """200 positions wrap in int8, and -1 is no number of an unsigned type."""
    q, k, v = draw((2, 2, 4), (2, 200, 2, 4), (2, 200, 2, 4))
    (k_pages, table), (v_pages, _) = (paged(a, 1, 50) for a in (k, v))

    def f(lengths, table):
        return jflux.flash_decode(q, k_pages, v_pages, lengths, block_table=table, axis_name=None)

    lengths = np.array([100, 5], type_)
    checked = jax.jit(checkify.checkify(f, errors=checkify.all_checks))
    error, got = checked(lengths, np.asarray(table, type_))
    assert error.get() is None
    want, _ = plain(q, k, v, lengths.astype(np.int32))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    wrong = np.asarray(table, type_)
    wrong[0, 0] = 100
    error, _ = checked(lengths, wrong)
    assert "100" in error.get()


@pytest.mark.skipif(PLATFORM != "cpu", reason="GPUs report it: test_faults.py")
@pytest.mark.parametrize("world", COUNTS)
def test_a_length_beyond_the_cache_is_an_error(world):
    """With the value, and later calls are right."""
    s = 2 * world
    operands = draw((3, 2, 4), (3, s, 2, 4), (3, s, 2, 4))
    f = jax.jit(over_ranks(world))
    for bad in (s + 1, -1):
        message = (
            rf"jflux.flash_decode: rank \d was given lengths\[1\] = {bad}, and the cache has {s}"
        )
        with pytest.raises(jax.errors.JaxRuntimeError, match=message) as raised:
            jax.block_until_ready(f(*operands, np.array([s, bad, 1])))
        assert "INVALID_ARGUMENT" in str(raised.value) and "make the cache" in str(raised.value)
    lengths = np.array([s, 0, 1])
    check(f(*operands, lengths), plain(*operands, lengths))


@pytest.mark.skipif(PLATFORM != "cpu", reason="GPUs report it: test_faults.py")
def test_a_length_of_many_calls_is_an_error():
    """Under vmap, in a loop, in pages."""
    q, k, v = draw((2, 2, 4), (2, 6, 2, 4), (2, 6, 2, 4))
    (k_pages, table), (v_pages, _) = (paged(a, 1, 2) for a in (k, v))

    def f(lengths):
        return jflux.flash_decode(q, k, v, lengths)

    def by_pages(lengths):
        return jflux.flash_decode(q, k_pages, v_pages, lengths, block_table=table)

    many = np.array([[1, 2], [3, 7]])
    loop = jax.jit(functools.partial(jax.lax.map, f))
    for g, lengths in ((jax.jit(jax.vmap(f)), many), (loop, many), (jax.jit(by_pages), many[1])):
        with pytest.raises(jax.errors.JaxRuntimeError, match="= 7, and the cache has 6 positions"):
            jax.block_until_ready(g(lengths))
        lengths = np.minimum(lengths, 6)
        got, want = (
            g(lengths).reshape(-1, 2, 4),
            [plain(q, k, v, n)[0] for n in lengths.reshape(-1, 2)],
        )
        np.testing.assert_allclose(got, np.concatenate(want), rtol=1e-12)


def test_checkify_says_what_is_no_page():
    q, k, v = draw((1, 2, 4), (3, 2, 2, 4), (3, 2, 2, 4))
    lengths = np.array([4], np.int32)

    def f(table):
        return jflux.flash_decode(q, k, v, lengths, block_table=table)

    checked = jax.jit(checkify.checkify(f, errors=checkify.all_checks))
    assert checked(np.array([[2, -1]]))[0].get() is None
    message = "jflux.flash_decode: block_table must be from -1 to 2, got 3"
    assert message in checked(np.array([[2, 3]]))[0].get()


Q, K, N = (2, 4, 8), (2, 6, 2, 8), (2,)


@pytest.mark.parametrize(
    ("shapes", "options", "message"),
    [
        ([Q[1:], K, K, N], {}, r"q must be \[B, H, D\] or .*, got \(4, 8\)"),
        ([Q, K[1:], K, N], {}, r"k_cache must be \[B, S/N, G, D\], got \(6, 2, 8\)"),
        ([Q, K, (2, 5, 2, 8), N], {}, "keys and values must have one shape"),
        ([Q, K, K, N], {"value_width": 4}, "value_width is for a cache without values"),
        ([Q, K, None, N], {}, "without values .* from 1 to the keys' 8, got None"),
        (
            [Q, K, None, N],
            {"value_width": 9},
            "without values value_width must be an int from 1 to",
        ),
        ([Q, (2, 6, 3, 8), (2, 6, 3, 8), N], {}, "4 heads of queries must be a multiple of 3"),
        ([Q, (2, 6, 0, 8), (2, 6, 0, 8), N], {}, "4 heads of queries must be a multiple of 0"),
        (
            [Q, (2, 6, 2, 4), (2, 6, 2, 4), N],
            {},
            "q and the caches must have the same D",
        ),
        ([Q, (3, 6, 2, 8), (3, 6, 2, 8), N], {}, "q .* same B, .* needs block_table"),
        ([Q, K, K, (3,)], {}, r"lengths must be \[B\] with q's B = 2, got \(3,\)"),
        ([Q, K, K, ()], {}, r"lengths must be \[B\], got \(\)"),
        ([Q, K, K, N], {"window": -1}, "window=-1 must be a number of positions, 0 or more"),
        ([Q, K, K, N], {"window": 2.5}, "window=2.5 must be a number of positions, 0 or more"),
        ([Q, K, K, N], {"softcap": -1.0}, "softcap=-1.0 must be greater than 0"),
        ([Q, K, K, N], {"sinks": np.zeros(8)}, r"sinks must be \[H\].* 4 heads .*got \(8,\)"),
        ([Q, K, K, N], {"alibi_slopes": np.zeros(2)}, r"alibi_slopes must be \[H\].* 4 heads"),
        ([Q, K, K, N], {"block_table": np.zeros((3, 1), int)}, r"block_table must be \[B, P\] wit"),
        ([Q, K, K, N], {"block_table": np.zeros(2, int)}, r"block_table must be \[B, P\], got"),
    ],
)
def test_shapes_that_do_not_fit(shapes, options, message):
    operands = [
        None if s is None else np.zeros(s, np.int32 if i == 3 else np.float32)
        for i, s in enumerate(shapes)
    ]
    with pytest.raises(ValueError, match=f"jflux.flash_decode: {message}"):
        jax.eval_shape(functools.partial(jflux.flash_decode, **options), *operands)


@pytest.mark.parametrize(
    ("types", "message"),
    [
        (["float32", "float32", "float16", "int32"], "one type, got float32, float32, float16"),
        (["int8", "int8", "int8", "int32"], "q must be of float16, .* got int8"),
        (["float32", "float32", "float32", "float32"], "lengths must be integers, got float32"),
    ],
)
def test_types_that_do_not_fit(types, message):
    operands = [np.zeros(s, t) for s, t in zip((Q, K, K, N), types, strict=True)]
    with pytest.raises(TypeError, match=f"jflux.flash_decode: .*{message}"):
        jax.eval_shape(jflux.flash_decode, *operands)
    with pytest.raises(TypeError, match="lengths must be an array, got list"):
        jflux.flash_decode(*operands[:3], [1, 2])


@pytest.mark.parametrize(
    ("types", "scale", "message"),
    [
        (["int8", "float8_e4m3fn"], "float32", "k_cache and v_cache must have one type, got int8"),
        (["float32", "float32"], "float32", "the values of k_cache are float32"),
        (["int8", "int8"], "bfloat16", "the scale of k_cache is bfloat16, not float32"),
        ([None, "int8"], "float32", "k_cache must be a jflux.Scaled, as the other cache is"),
    ],
)
def test_types_of_8_bits_that_do_not_fit(types, scale, message):
    of_rows = np.ones((*K[:3], 1), jnp.dtype(scale))
    caches = [
        np.zeros(K) if one is None else jflux.Scaled(np.zeros(K, jnp.dtype(one)), of_rows)
        for one in types
    ]
    with pytest.raises(TypeError, match=f"jflux.flash_decode: {message}"):
        jflux.flash_decode(np.zeros(Q), *caches, np.zeros(2, int))


def test_an_axis_needs_a_mesh():
    with pytest.raises(NameError, match="tp"):
        jflux.flash_decode(*(np.zeros(s) for s in (Q, K, K)), np.zeros(2, int), axis_name="tp")
