"""A cache that grows as tokens come: each token's result is its row of causal attention over the
whole sequence, in float64 on one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from caches import allocated, draw, plain
from harness import PLATFORM, RANKS, make_mesh
from jax import lax
from jax.experimental import checkify
from jax.sharding import PartitionSpec as P

import jflux
from jflux import KVCache
from jflux._ops.attention import _flash_decode_primitive, kv_cache

pytestmark = pytest.mark.wide
COUNTS = [n for n in (1, 2, 3, 4, 8) if n <= RANKS]
EITHER = pytest.mark.parametrize("module", [jflux, jflux.reference], ids=["jflux", "reference"])
B, H, G, D = 3, 6, 2, 4
CACHE = KVCache(P(None, "tp"), P(None, "tp"), P())
PAGED = KVCache(P("tp"), P("tp"), P(), P())


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        yield


def tokens(length, seed=0, dtype=np.float64):
    """q, k, v of whole sequences."""
    return draw(*((B, length, heads, D) for heads in (H, G, G)), seed=seed, dtype=dtype)


def empty(size, dtype=np.float64, value=0.0):
    keys = jnp.full((B, size, G, D), value, dtype)
    return KVCache(keys, keys, jnp.zeros(B, jnp.int32))


def row(q, k, v, length, **options):
    """What the token at position `length` - 1 [B] gets; 0 for a length of 0."""
    at = np.maximum(length - 1, 0)
    return plain(q[np.arange(len(q)), at], k, v, length, **options)[0]


def over_ranks(f, world, in_specs, out_specs, check_vma=True):
    return jax.jit(
        jax.shard_map(
            f, mesh=make_mesh((world,)), in_specs=in_specs, out_specs=out_specs, check_vma=check_vma
        )
    )


def decoded(module, world, cache, q, k, v, starts, steps, **options):
    """`steps` tokens, one at a time in a scan, of sequences that go on from `starts` [B]."""
    at = starts[:, None] + np.arange(steps)
    parts = [np.moveaxis(np.take_along_axis(a, at[..., None, None], 1), 1, 0) for a in (q, k, v)]

    def run(cache, *parts):
        def step(cache, new):
            o, cache = module.attend_to_cache(
                cache, *(a[:, None] for a in new), axis_name="tp", **options
            )
            return cache, o[:, 0]

        return lax.scan(step, cache, parts)

    return over_ranks(run, world, (CACHE, P(), P(), P()), (CACHE, P()))(cache, *parts)


@EITHER
@pytest.mark.parametrize("world", [n for n in (3, 1) if n <= RANKS])
def test_sinks_and_slopes_of_one_token_at_a_time(world, module):
    q, k, v = tokens(4)
    options = {"sinks": np.array([0.5, -1, 2, -3, 0, 1]), "alibi_slopes": np.arange(-2, 4) / 2}
    starts = np.zeros(B, int)
    _, o = decoded(module, world, empty(6), q, k, v, starts, 4, **options)
    for i in range(4):
        want = row(q, k, v, starts + i + 1, **options)
        np.testing.assert_allclose(o[i], want, rtol=1e-12, atol=1e-12)


@EITHER
@pytest.mark.parametrize("world", [n for n in (3, 1) if n <= RANKS])
@pytest.mark.parametrize(("prompt", "new"), [(6, 2), (6, 60)])
def test_a_cache_without_values(prompt, new, world, module):
    """They are the first elements of keys; and values of another width than keys. Few new tokens,
    and as many as are multiplied in another way."""
    q, k, _ = tokens(prompt + new)
    lengths, size = np.array([prompt, 3, 1]), world * (prompt + new)

    def run(cache, v_width, q, k):
        v = None if v_width is None else k[..., :v_width]
        width = {"value_width": 3} if v is None else {}
        at = slice(0, prompt), slice(prompt, None)
        kv = [(k[:, i], None if v is None else v[:, i]) for i in at]
        cache = module.fill_cache(cache, *kv[0], lengths, axis_name=None)
        o, cache = module.attend_to_cache(cache, q[:, prompt:], *kv[1], window=7, **width)
        return o, cache

    def split(cache, q, k):
        return module.attend_to_cache(cache, q, k, None, axis_name="tp", window=7, value_width=3)

    latent = empty(size)._replace(values=None)
    o, of_latent = jax.jit(functools.partial(run, latent, None))(q, k)
    apart = latent._replace(values=latent.keys[..., :3])
    want, of_apart = jax.jit(functools.partial(run, apart, 3))(q, k)
    np.testing.assert_allclose(o, want, rtol=1e-12, atol=1e-12)
    assert of_latent.values is None and of_apart.values.shape == (B, size, G, 3)
    for i in (0, new - 1):
        keys = np.asarray(of_latent.keys)
        one, _ = plain(q[:, prompt + i], keys, keys[..., :3], lengths + i + 1, 7)
        np.testing.assert_allclose(o[:, i], one, rtol=1e-12, atol=1e-12)
    specs = KVCache(P(None, "tp"), None, P())
    filled = module.fill_cache(latent, k[:, :prompt], None, lengths)
    o, _ = over_ranks(split, world, (specs, P(), P()), (P(), specs))(
        filled, q[:, prompt:], k[:, prompt:]
    )
    np.testing.assert_allclose(o, want, rtol=1e-12, atol=1e-12)


@EITHER
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("world", COUNTS)
def test_a_prompt_then_one_token_at_a_time(world, layout, module):
    """Prompts of other lengths; ranks whose part is empty; what the cache had before is NaN."""
    prompt, steps = 2 * world, 5
    size = world * (-(-(prompt + steps) // world) + 1)
    q, k, v = tokens(prompt + steps)
    starts = np.array([prompt, 1, max(1, prompt - 1)])

    def fill(cache, k, v, lengths):
        return module.fill_cache(cache, k, v, lengths, axis_name="tp", layout=layout)

    sequence = P(None, "tp")
    in_order = [
        jflux.reorder_for_causal(a[:, :prompt], world, layout=layout) for a in (k, v)
    ]  # fmt: skip
    cache = over_ranks(fill, world, (CACHE, sequence, sequence, P()), CACHE)(
        empty(size, value=np.nan), *in_order, starts
    )
    np.testing.assert_array_equal(cache.lengths, starts)
    cache, o = decoded(module, world, cache, q, k, v, starts, steps)
    np.testing.assert_array_equal(cache.lengths, starts + steps)
    assert cache.lengths.dtype == jnp.int32
    for i in range(steps):
        np.testing.assert_allclose(o[i], row(q, k, v, starts + i + 1), rtol=1e-12, atol=1e-12)
    for b, length in enumerate(starts + steps):
        np.testing.assert_array_equal(cache.keys[b, :length], k[b, :length])
        assert np.isnan(cache.values[b, length:]).all()


OPTIONS = {
    "none": {}, "window": {"window": 3}, "softcap": {"softcap": 2.0, "scale": 0.7},
    "both": {"window": 5, "softcap": 1.5},
    "sinks": {"window": 5, "sinks": np.array([0.5, -1, 2, -np.inf, 0, 1])},
    "alibi": {"window": 5, "alibi_slopes": np.array([0.5, 0.25, 0.1, 0, -1, 2])},
    "alibi, softcap": {"softcap": 2.0, "alibi_slopes": np.array([0.5, 0.25, 0.1, 0, -1, 2])},
}  # fmt: skip


def _by_rows(monkeypatch, rows):
    """Up to so many rows of queries with the cache as it lies; others in blocks."""
    monkeypatch.setattr(kv_cache, "MOST_ROWS", rows)
    if rows == 0:
        monkeypatch.setattr(_flash_decode_primitive, "MOST_TOKENS", 0)


@pytest.mark.parametrize("rows", [256, 0], ids=["as it lies", "in blocks"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("world", COUNTS)
def test_several_tokens_at_once(world, options, rows, monkeypatch):
    """In both programs, of sequences that have some of the new tokens, all or none."""
    _by_rows(monkeypatch, rows)
    length = 9
    size = world * (-(-length // world) + 1)
    q, k, v = tokens(length, seed=1)
    f = over_ranks(
        functools.partial(jflux.attend_to_cache, axis_name="tp", **options), world,
        (CACHE, P(), P(), P(), P()), (P(), CACHE),
    )  # fmt: skip
    cache, lengths = empty(size, value=np.nan), np.zeros(B, int)
    for new in ([4, 2, 0], [1, 4, 3], [4, 3, 4]):
        new = np.array(new)
        at = np.minimum(lengths[:, None] + np.arange(4), length - 1)[..., None, None]
        o, cache = f(cache, *(np.take_along_axis(a, at, 1) for a in (q, k, v)), new)
        for j in range(4):
            there = np.where(j < new, lengths + j + 1, 0)
            want = row(q, k, v, there, **options)
            np.testing.assert_allclose(o[:, j], want, rtol=1e-12, atol=1e-12)
        lengths += new
        np.testing.assert_array_equal(cache.lengths, lengths)


@EITHER
@pytest.mark.parametrize("world", COUNTS)
@pytest.mark.parametrize("of", ["rows", "heads"])
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int8"])
def test_caches_of_8_bits(dtype, of, world, module):
    """A prompt, three tokens, then one: as attention to what the cache means."""
    prompt, length = 4 * world, 4 * world + 4
    q, k, v = tokens(length, seed=3, dtype=np.float32)
    size = world * -(-length // world)
    shape = (B, size, G, 1) if of == "rows" else (1, 1, G, 1)
    largest = 127 if dtype == "int8" else 448

    def cache_of(a):
        scale = np.abs(a).max((0, 1, 3), keepdims=True) / largest
        return jflux.Scaled(
            jnp.zeros((B, size, G, D), dtype), jnp.broadcast_to(scale, shape).astype(jnp.float32)
        )

    cache = KVCache(cache_of(k), cache_of(v), jnp.zeros(B, jnp.int32))
    part = P(None, "tp")
    spec = jflux.Scaled(part, part if of == "rows" else P())
    specs = KVCache(spec, spec, P())
    fill = functools.partial(module.fill_cache, axis_name="tp", layout="contiguous")
    cache = over_ranks(fill, world, (specs, part, part), specs)(cache, k[:, :prompt], v[:, :prompt])
    attend = functools.partial(module.attend_to_cache, axis_name="tp")
    step = over_ranks(attend, world, (specs, P(), P(), P()), (P(), specs))
    first = prompt
    for count in (3, 1):
        new = (a[:, first : first + count] for a in (q, k, v))
        o, cache = step(cache, *new)
        keys, values = (np.asarray(a.dequantize()) for a in cache[:2])
        for i in range(count):
            want = row(q, keys, values, np.full(B, first + i + 1))
            np.testing.assert_allclose(o[:, i], want, rtol=1e-5, atol=1e-5)
        first += count
    for whole, a in zip((k, v), cache[:2], strict=True):
        error = np.abs(np.asarray(a.dequantize())[:, :length] - whole)
        assert (error <= np.abs(whole) * 2.0**-4 + np.abs(whole).max() * 2.0**-7).all()
    np.testing.assert_array_equal(cache.lengths, np.full(B, length))


@EITHER
@pytest.mark.parametrize(
    ("of", "rows"),
    [("float64", 0), ("float64", 256), ("float8_e4m3fn rows", 256), ("int8 heads", 0)],
)
@pytest.mark.parametrize("world", [n for n in (1, 3) if n <= RANKS])
def test_pages(world, rows, of, module, monkeypatch):
    """The bits of the same cache without pages, for sequences that get pages as they grow, and give
    them back; what no sequence has is NaN. Other tables do not compile again."""
    _by_rows(monkeypatch, rows)
    dtype, _, scales = of.partition(" ")
    size, each, prompt, number = 2, 6, 4 * world, 14
    capacity, wide, traced = world * each * size, np.float32 if scales else np.float64, []
    q, k, v = tokens(capacity, seed=6, dtype=wide)
    bad = 0 if dtype == "int8" else np.nan

    def empty_of(first, scale, fill):
        values = jnp.full((*first, G, D), fill, dtype)
        if not scales:
            return values
        shape = (1, 1, G, 1) if scales == "heads" else (*first, G, 1)
        fill = scale if scales == "heads" else fill
        return jflux.Scaled(values, jnp.full(shape, fill, jnp.float32))

    def specs_of(paged):
        part = P("tp") if paged else P(None, "tp")
        spec = jflux.Scaled(part, part if scales == "rows" else P()) if scales else part
        return KVCache(spec, spec, P(), P() if paged else None)

    def programs(paged):
        specs, options = specs_of(paged), {"axis_name": "tp"}
        fill = functools.partial(module.fill_cache, layout="contiguous", **options)

        def attend(*operands):
            traced.append(paged)
            return module.attend_to_cache(*operands, window=6, softcap=3.0, **options)

        new, part = (P(), P(), P()), P(None, "tp")
        return (
            over_ranks(fill, world, (specs, part, part, P()), specs),
            over_ranks(attend, world, (specs, *new, P()), (P(), specs)),
        )

    free = [list(np.random.default_rng(r).permutation(number)) for r in range(world)]
    table = np.full((B, world * each), -1, np.int32)
    lengths = np.zeros(B, np.int32)
    flat = KVCache(*(empty_of((B, capacity), s, 0) for s in (0.05, 0.03)), lengths)
    paged = KVCache(*(empty_of((world * number, size), s, bad) for s in (0.05, 0.03)), lengths)
    (fill, attend), (fill_pages, attend_pages) = programs(False), programs(True)

    def grown(cache, by):
        nonlocal table
        table = allocated(table, lengths + by, size, free)
        return cache._replace(block_table=table)

    first = np.array([prompt - 1, 0, prompt], np.int32)
    flat = fill(flat, k[:, :prompt], v[:, :prompt], first)
    paged = fill_pages(grown(paged, first), k[:, :prompt], v[:, :prompt], first)
    lengths = first
    for new in ([3, 3, 0], [0, 2, 2], [1, 3, 0], [0, 3, 0]):
        new = np.array(new, np.int32)
        at = np.minimum(lengths[:, None] + np.arange(3), capacity - 1)[..., None, None]
        those = [np.take_along_axis(a, at, 1) for a in (q, k, v)]
        want, flat = attend(flat, *those, new)
        o, paged = attend_pages(grown(paged, new), *those, new)
        np.testing.assert_array_equal(o, want)
        assert np.asarray(want).any((2, 3))[:, 0].tolist() == (new > 0).tolist()
        lengths = lengths + new
        np.testing.assert_array_equal(paged.lengths, lengths)
        if lengths[0] >= prompt + 2:  # the first sequence ends, and another one takes its pages
            lengths[0] = 0
            flat, paged = (a._replace(lengths=a.lengths.at[0].set(0)) for a in (flat, paged))
    assert traced == [False, True]


@pytest.mark.parametrize("rows", [256, 0], ids=["as it lies", "in blocks"])
def test_a_token_without_a_page(rows, monkeypatch):
    """On CPUs an error with the entry; in plain lax NaN from there on, and no other sequence's."""
    _by_rows(monkeypatch, rows)
    world, size = 2, 2
    q, k, v = tokens(2)
    pages = jnp.zeros((world * 4, size, G, D))
    table = jnp.array([[0, -1, -1, -1], [1, 2, 3, 0], [-1, 2, -1, 3]])
    cache = KVCache(pages, pages, jnp.array([1, 1, 1]), table)
    specs = (PAGED, P(), P(), P(), P())
    fused, plainly = (
        over_ranks(
            functools.partial(module.attend_to_cache, axis_name="tp"), world, specs, (P(), PAGED)
        )
        for module in (jflux, jflux.reference)
    )  # fmt: skip
    new = jnp.array([2, 2, 0])
    o, after = plainly(cache, q, k, v, new)  # the first sequence's second token has none
    np.testing.assert_array_equal(np.isnan(o).all((1, 2, 3)), [True, False, False])
    after = after._replace(block_table=table.at[0].set(jnp.array([0, 3, 1, 2])))
    o, _ = plainly(after, q, k, v, jnp.ones(B, int))
    assert np.isnan(o[0, 0]).all() and not np.isnan(o[1]).any()

    def fill(module, lengths):
        f = functools.partial(module.fill_cache, axis_name="tp", layout="contiguous")
        part = P(None, "tp")
        f = over_ranks(f, world, (PAGED, part, part, P()), PAGED)
        return f(cache, *(jnp.tile(a, (1, 2, 1, 1)) for a in (k, v)), jnp.array(lengths))

    filled = fill(jflux.reference, [3, 4, 0])
    assert filled.lengths.tolist() == [9, 4, 0]
    for bad in (-1, 4):
        wrong = cache._replace(block_table=table.at[1, 0].set(bad))
        message = f"give .*: those of new tokens in block_table must be from 0 to 3, got {bad}"
        error, _ = jax.jit(checkify.checkify(fused))(wrong, q, k, v, jnp.array([1, 2, 0]))
        with pytest.raises(checkify.JaxRuntimeError, match=f"attend_to_cache: {message}"):
            error.throw()
    if PLATFORM == "cpu":
        message = "give .* those of new tokens in block_table must be from 0 to 3, got -1"
        with pytest.raises(jax.errors.JaxRuntimeError, match=f"jflux.attend_to_cache: {message}"):
            jax.block_until_ready(fused(cache, q, k, v, new))
        message = "give .* those of a prompt in block_table must be from 0 to 3, got -1"
        with pytest.raises(jax.errors.JaxRuntimeError, match=f"jflux.fill_cache: {message}"):
            jax.block_until_ready(fill(jflux, [3, 4, 0]))


def test_derivatives_with_a_cache_of_8_bits():
    """In q, as of what the cache means; none in k and v."""
    q, k, v = tokens(2, dtype=np.float32)
    ones = jnp.ones((B, 4, G, 1), jnp.float32)
    zeros = jflux.Scaled(jnp.zeros((B, 4, G, D), jnp.float8_e4m3fn), ones)
    cache = KVCache(zeros, zeros, jnp.zeros(B, jnp.int32))

    def loss(q, k, v, cache=cache):
        return jnp.sum(jnp.sin(jflux.attend_to_cache(cache, q, k, v)[0]))

    _, after = jflux.attend_to_cache(cache, q, k, v)
    meant = [a.dequantize() for a in after[:2]]
    empty_of_32_bits = KVCache(*(jnp.zeros_like(a) for a in meant), cache.lengths)
    want = jax.grad(loss)(q, *(a[:, :2] for a in meant), empty_of_32_bits)
    np.testing.assert_allclose(jax.grad(loss)(q, k, v), want, rtol=1e-5, atol=1e-5)
    with pytest.raises(TypeError, match=r"jflux.quantize has no derivative"):
        jax.grad(loss, 1)(q, k, v)


def test_without_ranks_and_without_lengths():
    q, k, v = tokens(7)
    cache = jflux.fill_cache(empty(8), k[:, :4], v[:, :4])
    o, cache = jax.jit(jflux.attend_to_cache)(cache, q[:, 4:], k[:, 4:], v[:, 4:])
    for j in range(3):
        np.testing.assert_allclose(o[:, j], row(q, k, v, np.full(B, 5 + j)), atol=1e-12)
    np.testing.assert_array_equal(cache.lengths, [7] * B)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("world", COUNTS[-2:])
def test_half_types(world, dtype):
    """The cache's type is that of the products; the result has the queries'."""
    tolerance = {"float16": 2e-3, "bfloat16": 2e-2, "float32": 2e-6}[jnp.dtype(dtype).name]
    q, k, v = (np.asarray(jnp.asarray(a, dtype)) for a in tokens(5, seed=2))
    cache = empty(2 * world + 6 - (2 * world + 6) % world, dtype)
    cache, o = decoded(jflux, world, cache, q, k, v, np.zeros(B, int), 5)
    assert o.dtype == dtype and cache.keys.dtype == dtype
    for i in range(5):
        want = row(q, k, v, np.full(B, i + 1))
        np.testing.assert_allclose(np.asarray(o[i], np.float64), want, atol=tolerance)
    wide, _ = jflux.attend_to_cache(
        empty(4, dtype), *(np.asarray(a[:, :1], np.float32) for a in (q, k, v))
    )
    assert wide.dtype == np.float32


def test_groups_side_by_side_and_no_vma():
    """Two groups of ranks, each with sequences of its own."""
    if RANKS < 4:
        pytest.skip("four ranks")
    q, k, v = tokens(2, seed=3)
    mesh, specs = make_mesh((2, 2), ("dp", "tp")), KVCache(P("dp", "tp"), P("dp", "tp"), P("dp"))
    f = jax.shard_map(
        functools.partial(jflux.attend_to_cache, axis_name="tp"), mesh=mesh,
        in_specs=(specs, P("dp"), P("dp"), P("dp")), out_specs=(P("dp"), specs), check_vma=False,
    )  # fmt: skip
    cache = jax.tree.map(lambda a: a[:2], empty(4))
    o, cache = jax.jit(f)(cache, q[:2], k[:2], v[:2])
    for j in range(2):
        np.testing.assert_allclose(o[:, j], row(q, k, v, np.full(B, j + 1))[:2], atol=1e-12)


@pytest.mark.parametrize("rows", [256, 0], ids=["as it lies", "in blocks"])
@pytest.mark.parametrize("paged", [False, True])
def test_derivatives_of_both_modes(paged, rows, monkeypatch):
    _by_rows(monkeypatch, rows)
    q, k, v = tokens(4, seed=4)
    sinks, cache = np.array([0.5, -1, 2, -3, 0, 1]), empty(6)
    if paged:
        pages = jnp.full((8, 2, G, D), np.nan)
        table = np.array([[5, 0, -1], [3, 7, -1], [1, 6, -1]])
        cache = KVCache(pages, pages, cache.lengths, table)

    def f(q, k, v, sinks):
        o, _ = jflux.attend_to_cache(cache, q, k, v, sinks=sinks)
        return jnp.sum(jnp.sin(o))

    def plainly(q, k, v, sinks):
        k, v = (jnp.repeat(a, H // G, 2) for a in (k, v))
        s = jnp.einsum("bihd,bjhd->bhij", q, k) / D**0.5
        s = jnp.where(jnp.tri(4, dtype=bool), s, -jnp.inf)
        column = jnp.broadcast_to(sinks[:, None, None], (*s.shape[:-1], 1))
        weights = jax.nn.softmax(jnp.concatenate([s, column], -1))[..., :-1]
        return jnp.sum(jnp.sin(jnp.einsum("bhij,bjhd->bihd", weights, v)))

    gradients = (jax.jit(jax.grad(g, (0, 1, 2, 3)))(q, k, v, sinks) for g in (f, plainly))
    for one, other in zip(*gradients, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-10)
    moved = *tokens(4, seed=5), -sinks

    def slope(g):
        return jax.jit(lambda *a: jax.jvp(g, a, moved)[1])(q, k, v, sinks)

    np.testing.assert_allclose(slope(f), slope(plainly))


# ---- Positions beyond the cache, and operands that do not fit ------------------------------------


@pytest.mark.parametrize("rows", [0, kv_cache.MOST_ROWS])
@pytest.mark.parametrize("count", [1, 3])
def test_a_nan_reaches_those_that_attend_to_it(count, rows, monkeypatch):
    """Also where another rank's part of the cache has none."""
    _by_rows(monkeypatch, rows)
    world = COUNTS[-1]
    new = [a[:, :count] for a in tokens(count)]
    keys = np.zeros((B, 6 * world, G, D))
    keys[1, 2, :, 0] = np.nan
    cache = KVCache(keys, np.ones_like(keys), np.full(B, 3, np.int32))
    step = over_ranks(
        functools.partial(jflux.attend_to_cache, axis_name="tp"), world, (CACHE, P(), P(), P()),
        (P(), CACHE),
    )  # fmt: skip
    o, _ = step(cache, *new)
    nan = np.zeros((B, count, H), bool)
    nan[1] = True
    np.testing.assert_array_equal(np.isnan(o).any(-1), nan)


@pytest.mark.parametrize("rows", [0, kv_cache.MOST_ROWS])
@pytest.mark.parametrize("count", [1, 2])
def test_no_nan_of_unfilled_positions_reaches_a_gradient(count, rows, monkeypatch):
    _by_rows(monkeypatch, rows)
    new = [a[:, :count] for a in tokens(count)]

    def gradients(cache):
        def loss(*new):
            o, _ = jflux.attend_to_cache(cache, *new, softcap=2.0)
            return jnp.sum(jnp.sin(o))

        return jax.grad(loss, (0, 1, 2))(*new)

    f = jax.jit(gradients)
    for one, other in zip(f(empty(4, value=np.nan)), f(empty(4)), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_window_of_numpy():
    q, k, v = tokens(2)
    _, cache = jflux.attend_to_cache(empty(4), q, k, v, window=1)
    options = {"window": np.int64(2), "softcap": np.float32(3), "scale": np.float64(0.5)}
    got, _ = jflux.attend_to_cache(cache, q, k, v, **options)
    want, _ = jflux.attend_to_cache(cache, q, k, v, window=2, softcap=3.0, scale=0.5)
    np.testing.assert_array_equal(got, want)
    for count in (1, 2):
        new = [a[:, :count] for a in (q, k, v)]
        want, _ = jflux.attend_to_cache(cache, *new)
        for wide in ((1 << 31) - 1, 1 << 31, 1 << 63, (None, 3)):
            got, _ = jflux.attend_to_cache(cache, *new, window=wide)
            np.testing.assert_array_equal(got, want)


def test_positions_beyond_the_cache():
    q, k, v = (a[:, :1] for a in tokens(1))
    full = empty(4)._replace(lengths=jnp.array([2, 4, 3]))
    step = jax.jit(checkify.checkify(jflux.attend_to_cache))
    error, _ = step(full, q, k, v)
    message = "jflux.attend_to_cache: end a sequence .*: positions must be at most 3, got 4"
    with pytest.raises(checkify.JaxRuntimeError, match=message):
        error.throw()
    error, _ = step(full._replace(lengths=jnp.array([0, 3, 2])), q, k, v)
    error.throw()
    # A sequence without a new token may be full.
    error, _ = step(full, q, k, v, jnp.array([1, 0, 1]))
    error.throw()


def test_errors_where_lengths_are_known():
    """Outside of jit, on any device, before anything runs; in plain lax not."""
    q, k, v = (a[:, :2] for a in tokens(2))
    full = empty(4)._replace(lengths=jnp.array([1, 3, 4], jnp.int32))
    message = "sequence 1 has 3 positions, and 2 more do not fit a cache of 4: end a sequence"
    with pytest.raises(ValueError, match=f"jflux.attend_to_cache: {message}"):
        jflux.attend_to_cache(full, q, k, v)
    with pytest.raises(ValueError, match="attend_to_cache: new_lengths must be from 0 to 2, got 3"):
        jflux.attend_to_cache(full, q, k, v, np.array([0, 3, 0]))
    _, after = jflux.attend_to_cache(full, q, k, v, np.array([2, 1, 0], np.uint8))
    assert after.lengths.tolist() == [3, 4, 4]
    for wrong in (5, -1):
        with pytest.raises(
            ValueError, match=f"fill_cache: lengths must be from 0 to 4, got {wrong}"
        ):
            jflux.fill_cache(empty(4), *tokens(5)[1:], np.array([4, 0, wrong]))
    assert np.isnan(jflux.reference.attend_to_cache(full, q, k, v)[0][1:]).all()
    paged = KVCache(*jnp.zeros((2, 6, 2, G, D)), full.lengths, np.arange(6).reshape(B, 2))
    with pytest.raises(ValueError, match=message):
        jflux.attend_to_cache(paged, q, k, v)


def test_shapes_and_lengths_that_are_known_to_be_wrong():
    q, k, v = (a[:, :2] for a in tokens(2))
    with pytest.raises(ValueError, match=r"new_lengths must be \[B\], \(3,\), got \(3, 1\)"):
        jflux.attend_to_cache(empty(4), q, k, v, np.ones((B, 1), np.int32))
    below = empty(4)._replace(lengths=jnp.array([0, -3, 1], jnp.int32))
    with pytest.raises(ValueError, match="sequence 1 has -3 positions; lengths are 0 or more"):
        jflux.attend_to_cache(below, q, k, v)


def test_no_tokens():
    q, k, v = (a[:, :0] for a in tokens(1))
    o, after = jflux.attend_to_cache(empty(4), q, k, v)
    assert o.shape == q.shape and after.lengths.tolist() == [0] * B


def test_a_lost_token_is_not_written():
    """Two sequences share their pages; one goes past the end."""
    q, k, v = (a[:2, :1] for a in tokens(1))
    pages = jnp.asarray(np.random.default_rng(0).normal(size=(2, 2, 4, G, D)))
    table = jnp.array([[0, 1], [0, 1]])
    cache = KVCache(*pages, jnp.array([8, 8]), table)
    step = jax.jit(jflux.reference.attend_to_cache)
    o, after = step(cache, q, k, v, jnp.array([0, 1]))
    assert after.lengths.tolist() == [8, 9] and np.isnan(o[1]).all()
    for now, before in zip(after[:2], pages, strict=True):
        np.testing.assert_array_equal(now, before)


@pytest.mark.skipif(RANKS < 2, reason="two ranks")
@pytest.mark.parametrize("count", [1, 2])
def test_a_sequence_that_goes_on_beyond_the_cache(count):
    """On CPUs an error with the value; in plain lax its tokens are NaN from there on, and no
    other's. Its length says so, and stays."""
    q, k, v = (a[:, :count] for a in tokens(2))
    full = empty(4)._replace(lengths=jnp.array([1, 4, 0], jnp.int32))
    new = jnp.array([count, count, 0])

    fused, plainly = (
        over_ranks(
            functools.partial(module.attend_to_cache, axis_name="tp"), 2, (CACHE, *[P()] * 4),
            (P(), CACHE),
        )
        for module in (jflux, jflux.reference)
    )  # fmt: skip
    nan = np.zeros((B, count, H, D), bool)
    nan[1] = True
    o, cache = plainly(full, q, k, v, new)
    np.testing.assert_array_equal(np.isnan(o), nan)
    np.testing.assert_array_equal(cache.lengths, [1 + count, 5, 0])
    _, again = plainly(cache, q, k, v, np.array([0, 1, 1]))
    np.testing.assert_array_equal(again.lengths, [1 + count, 5, 1])
    o, cache = plainly(cache._replace(lengths=full.lengths), q, k, v, new)
    np.testing.assert_array_equal(np.isnan(o), nan)
    # Another number of tokens than there are.
    o, cache = plainly(empty(4), q, k, v, jnp.array([0, count + 1, -1]))
    np.testing.assert_array_equal(np.isnan(o).any((1, 2, 3)), [False, True, True])
    np.testing.assert_array_equal(cache.lengths, [0, 5, 5])
    last = jnp.full(B, np.iinfo(np.int32).max, jnp.int32)  # what follows is no int32
    assert np.isnan(plainly(full._replace(lengths=last), q, k, v, jnp.full(B, count))[0]).all()
    if PLATFORM != "cpu":
        np.testing.assert_array_equal(np.isnan(fused(full, q, k, v, new)[0]), nan)
        return
    for wrong, message in (
        (new, "end a sequence .*: positions must be at most 3, got 4"),
        (jnp.array([1, 0, -1]), f"new_lengths must be from 0 to {count}, got -1"),
    ):
        with pytest.raises(jax.errors.JaxRuntimeError, match=f"jflux.attend_to_cache: {message}"):
            jax.block_until_ready(fused(full, q, k, v, wrong))


def test_a_prompt_that_is_shorter_than_its_length():
    k, v = tokens(2)[1:]
    lengths = jnp.array([2, 3, -1])
    cache = jflux.reference.fill_cache(empty(4), k, v, lengths)
    np.testing.assert_array_equal(cache.lengths, [2, 5, 5])
    o, cache = jflux.reference.attend_to_cache(cache, *(a[:, :1] for a in tokens(2)))
    assert np.isnan(o[1:]).all() and not np.isnan(o[0]).any()
    np.testing.assert_array_equal(cache.lengths, [3, 5, 5])
    k, v = tokens(5)[1:]  # longer than the cache
    cache = jflux.reference.fill_cache(empty(4), k, v, np.array([5, 4, 0]))
    np.testing.assert_array_equal(cache.lengths, [5, 4, 0])
    if PLATFORM == "cpu":
        message = "fill_cache: lengths must be from 0 to 4, got 5"
        with pytest.raises(jax.errors.JaxRuntimeError, match=message):
            jax.block_until_ready(jax.jit(jflux.fill_cache)(empty(4), k, v, jnp.array([5, 4, 0])))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": (B, 1, G)}, r"k and v must be \[B, tokens, G, D\]"),
        ({"v": (B, 1, 3, D)}, r"k and v must be \[B, tokens, G, D\]"),
        ({"v": (B, 1, G, 3)}, "keys and values must be .* of k"),
        ({"k": (B, 1, 3, D), "v": (B, 1, 3, D)}, "with the B and G of k"),
        ({"q": (B, 2, H, D)}, "q must be .B, T, H, D. with the B, T and D of k"),
        ({"q": (B, 1, 5, D)}, "5 heads of queries must be a multiple of 2"),
        ({"q": (B, 9, H, D), "k": (B, 9, G, D), "v": (B, 9, G, D)}, "9 new tokens do not fit"),
        ({"k": (4, 1, G, D), "v": (4, 1, G, D)}, "with the B and G of k.*; pages need kv_cache.bl"),
    ],
)
def test_operands_that_do_not_fit(change, message):
    shapes = {"q": (B, 1, H, D), "k": (B, 1, G, D), "v": (B, 1, G, D)} | change
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(jflux.attend_to_cache, empty(8), *map(np.zeros, shapes.values()))


@pytest.mark.skipif(RANKS < 2, reason="two ranks")
def test_other_errors():
    q, k, v = tokens(1)
    with pytest.raises(ValueError, match=r"new_lengths must be \[B\], \(3,\), got \(2,\)"):
        jflux.attend_to_cache(empty(4), q, k, v, np.zeros(2, int))
    with pytest.raises(TypeError, match="new_lengths must be integers, got float64"):
        jflux.attend_to_cache(empty(4), q, k, v, np.zeros(B))
    with pytest.raises(ValueError, match="window=-1 must be a number of positions, 0 or more"):
        jflux.attend_to_cache(empty(4), q, k, v, window=-1)
    with pytest.raises(ValueError, match="softcap=0 must be greater than 0"):
        jflux.attend_to_cache(empty(4), q, k, v, softcap=0)
    with pytest.raises(ValueError, match=r"attend_to_cache: sinks must be \[H\].* 6 heads"):
        jflux.attend_to_cache(empty(4), q, k, v, sinks=np.zeros(G))
    with pytest.raises(TypeError, match="q must be floating"):
        jflux.attend_to_cache(empty(4), q.astype(int), k, v)
    for dtype in (np.int8, jnp.float8_e4m3fn):
        for f, given in ((jflux.attend_to_cache, (q, k, v)), (jflux.fill_cache, (k, v))):
            with pytest.raises(TypeError, match="kv_cache.keys and values must be of one type"):
                f(empty(4, dtype), *given)
    with pytest.raises(TypeError, match="got float64 and float32"):
        jflux.attend_to_cache(empty(4)._replace(values=empty(4, np.float32).values), q, k, v)
    with pytest.raises(TypeError, match="kv_cache.lengths must have 32 bits, got int8"):
        jflux.attend_to_cache(empty(4)._replace(lengths=np.zeros(B, np.int8)), q, k, v)
    with pytest.raises(TypeError, match="operands must be arrays, got list"):
        jflux.attend_to_cache(empty(4), q, k.tolist(), v)
    with pytest.raises(ValueError, match="a prompt of 5 positions does not fit a cache of 4"):
        jflux.fill_cache(empty(4), *tokens(5)[1:])
    for layout, what in (("zigzag", "S/N must be even, got k"), ("zig-zag", "must be one of")):
        fill = functools.partial(jflux.fill_cache, axis_name="tp", layout=layout)
        whole = P(None, "tp")
        with pytest.raises(ValueError, match=f"jflux.fill_cache: .*{what}"):
            over_ranks(fill, 2, (CACHE, whole, whole), CACHE)(empty(4), *tokens(2)[1:])
    of_pages = empty(4)._replace(block_table=np.zeros((2, 1), int))
    with pytest.raises(ValueError, match=r"block_table must be \[B, P\] with the B of k.*\(2, 1\)"):
        jflux.attend_to_cache(of_pages, q, k, v)
    with pytest.raises(TypeError, match="block_table must be integers, got float64"):
        jflux.attend_to_cache(of_pages._replace(block_table=np.zeros((B, 1))), q, k, v)
    with pytest.raises(ValueError, match="P a multiple of 2 ranks, got"):
        attend = functools.partial(jflux.attend_to_cache, axis_name="tp")
        odd = KVCache(*(np.zeros((2, 2, G, D)),) * 2, np.zeros(B, int), np.zeros((B, 3), int))
        over_ranks(attend, 2, (PAGED, P(), P(), P()), (P(), PAGED))(odd, q, k, v)
    cache = jflux.fill_cache(empty(4), *tokens(5)[1:], np.array([4, 0, 1]))  # it ends with padding
    np.testing.assert_array_equal(cache.lengths, [4, 0, 1])


@pytest.mark.parametrize("window", [0, (3, 0), 20])
def test_a_window_is_that_of_attention(window):
    q, k, v = tokens(8)
    o, _ = jax.jit(functools.partial(jflux.attend_to_cache, window=window))(empty(8), q, k, v)
    whole = jax.jit(
        functools.partial(
            jflux.attention, axis_name="tp", causal=True, layout="contiguous", window=window,
            mesh=make_mesh((RANKS,)),
        )
    )(q, k, v)  # fmt: skip
    np.testing.assert_allclose(o, whole, atol=1e-12)
