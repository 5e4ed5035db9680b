"""Decoding in 16-bit types, which GPUs have a kernel for, against softmax attention in float64."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from caches import draw, paged, plain, plain_tokens
from harness import PLATFORM, RANKS, make_mesh
from jax.sharding import PartitionSpec as P

import jflux
from jflux._ops.attention import _flash_decode_primitive, decode_merge

EPS = {jnp.bfloat16: 2.0**-8, jnp.float16: 2.0**-10}


def check(got, want, dtype):
    """Probabilities are rounded to the type before they multiply values, and so is the result."""
    (out, lse), (want_out, want_lse) = got, want
    assert out.dtype == dtype and lse.dtype == jnp.float32
    np.testing.assert_allclose(
        np.asarray(out, np.float64), want_out, rtol=2 * EPS[dtype], atol=2 * EPS[dtype]
    )
    np.testing.assert_allclose(lse, want_lse, rtol=2e-5, atol=2e-5)


def run(q, k, v, lengths, *table, **options):
    f = functools.partial(jflux.flash_decode, return_lse=True, **options)
    program = jax.jit(lambda *a: f(*a[:4], block_table=a[4] if len(a) == 5 else None))
    text = program.lower(q, k, v, lengths, *table).compile().as_text()
    found = re.findall(r'custom_call_target="jflux_(\w+)"', text)
    kernel = "latent_decode" if v is None and PLATFORM == "gpu" else "flash_decode"
    assert found == [kernel], found  # on CPUs the check of the lengths
    return program(q, k, v, lengths, *table)


def spoil(lengths, window, *caches):
    """NaN where nothing is attended to."""
    for b, length in enumerate(lengths):
        for a in caches:
            a[b, length:] = np.nan
            if window is not None:
                a[b, : max(0, length - 1 - window)] = np.nan


# batch, positions, heads of the cache, heads of queries for each of these, elements
SHAPES = [
    (3, 700, 2, 4, 128),
    (1, 4100, 1, 8, 64),
    (2, 333, 2, 1, 256),
    (2, 129, 1, 20, 128),  # two blocks of 16 queries
    (5, 15, 3, 16, 64),
    (40, 70, 8, 2, 128),  # one part of a sequence
]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("window", [None, 37])
@pytest.mark.parametrize("shape", SHAPES)
def test_values(shape, window, dtype):
    batch, positions, groups, queries, width = shape
    rng = np.random.default_rng([*shape, window or 0])
    lengths = rng.integers(0, positions + 1, batch).astype(np.int32)
    lengths[0] = positions
    q, k, v = draw(
        (batch, groups * queries, width), *[(batch, positions, groups, width)] * 2, dtype=dtype,
        seed=int(rng.integers(1000)),
    )  # fmt: skip
    want = plain(q, k, v, lengths, window)
    spoil(lengths, window, k, v)
    check(run(q, k, v, lengths, window=window), want, dtype)


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("scale", [None, -0.3, 2.0])
def test_scores(softcap, scale):
    q, k, v = draw((2, 8, 64), (2, 200, 2, 64), (2, 200, 2, 64), dtype=jnp.bfloat16)
    lengths = np.array([200, 77], np.int32)
    got = run(q, k, v, lengths, softcap=softcap, scale=scale)
    check(got, plain(q, k, v, lengths, softcap=softcap, scale=scale), jnp.bfloat16)


def test_nothing_and_everything():
    """Lengths from none on, one after the other, of one program."""
    q, k, v = draw((2, 4, 128), (2, 200, 2, 128), (2, 200, 2, 128), dtype=jnp.bfloat16)
    program = jax.jit(functools.partial(jflux.flash_decode, return_lse=True))
    for lengths in ([0, 0], [1, 0], [15, 16], [17, 64], [200, 199], [0, 200]):
        lengths = np.array(lengths, np.int32)
        got = program(q, k, v, lengths)
        check(got, plain(q, k, v, lengths), jnp.bfloat16)
        for one, length in zip(np.asarray(got[0], np.float64), lengths, strict=True):
            assert length > 0 or not one.any()


@pytest.mark.parametrize("alibi", [False, True])
@pytest.mark.parametrize("tokens", [2, 5, 16])
@pytest.mark.parametrize("window", [None, 37])
def test_tokens(tokens, window, alibi):
    """Those of a sequence that is shorter have no position; NaN is behind the last one's."""
    options = {"window": window, "alibi_slopes": 2.0 ** -np.arange(1, 9) if alibi else None}
    lengths = np.array([700, 311, 3, 0, 16], np.int32)
    q, k, v = draw(
        (5, tokens, 8, 128), (5, 700, 2, 128), (5, 700, 2, 128), dtype=jnp.bfloat16, seed=tokens
    )
    want = plain_tokens(q, k, v, lengths, **options)
    spoil(lengths, None, k, v)
    check(run(q, k, v, lengths, **options), want, jnp.bfloat16)
    (k_pages, table), (v_pages, _) = (paged(a, 1, 20) for a in (k, v))
    check(run(q, k_pages, v_pages, lengths, table, **options), want, jnp.bfloat16)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(
    ("tokens", "heads", "groups", "positions", "window"),
    [(1, 70, 1, 900, None), (2, 16, 1, 700, 90), (5, 6, 2, 140, None), (16, 9, 1, 320, 37)],
)
def test_latent(tokens, heads, groups, positions, window, dtype):
    """Values that are the first 512 of 576 elements of keys, whole and in pages."""
    lengths = np.array([positions, positions // 3, 3, 0, 64], np.int32)
    q, k = draw((5, tokens, heads, 576), (5, positions, groups, 576), dtype=dtype, seed=tokens)
    options = {"window": window, "softcap": 20.0 if tokens == 5 else None, "scale": 192**-0.5}
    want = plain_tokens(q, k, k[..., :512], lengths, **options)
    spoil(lengths, None, k)
    check(run(q, k, None, lengths, value_width=512, **options), want, dtype)
    pages, table = paged(k, 1, 20)
    check(run(q, pages, None, lengths, table, value_width=512, **options), want, dtype)


def test_a_window_of_more_than_there_is():
    """Of tokens that have no position: nothing that a kernel is told overflows."""
    lengths = np.array([70, 3, 0], np.int32)
    q, k, v = draw((3, 5, 8, 64), (3, 70, 2, 64), (3, 70, 2, 64), dtype=jnp.bfloat16)
    window = (1 << 31) - 1
    got = run(q, k, v, lengths, window=window)
    check(got, plain_tokens(q, k, v, lengths), jnp.bfloat16)
    first_own = jnp.asarray(lengths - 5)
    bounds = _flash_decode_primitive.bounds_of(first_own, jnp.asarray(lengths), (window, 0), 0, 5)
    np.testing.assert_array_equal(bounds[:, 0], [-5] * 3)


@pytest.mark.parametrize("of", ["rows", "heads"])
@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_caches_of_8_bits(of, width, dtype):
    """As the caches that they mean, whole and in pages; values far below what float16 holds."""
    lengths = np.array([700, 311, 2, 0], np.int32)
    q, k, v = draw((4, 3, 8, width), (4, 700, 2, width), (4, 700, 2, width), dtype=np.float32)
    form, q = jflux.Format(jnp.float8_e4m3fn, (1, -1)), np.asarray(q, dtype)
    caches = []
    size = 1e-7 if dtype == jnp.bfloat16 else 1e-2
    for a in (k, size * v):
        rows = np.array(jflux.quantize(a, form.dtype, block=(1, -1)).scale)
        scale = rows if of == "rows" else rows.max((0, 1), keepdims=True)
        values = np.array(jnp.asarray(a / scale).astype(form.dtype))
        spoil(lengths, None, values)
        if of == "rows":
            spoil(lengths, None, scale)
        caches.append(jflux.Scaled(values, scale))
    want = plain_tokens(q, *(np.asarray(a.dequantize()) for a in caches), lengths, 37)
    want[0] = want[0] / size

    out, lse = run(q, *caches, lengths, window=37)
    check(((np.asarray(out, np.float32) / size).astype(jnp.bfloat16), lse), want, jnp.bfloat16)
    pages = []
    for a in caches:
        in_pages, table = paged(np.asarray(a.values, np.float32), 1, 20)
        scale = paged(np.asarray(a.scale), 1, 20)[0] if of == "rows" else a.scale
        pages.append(jflux.Scaled(jnp.asarray(in_pages).astype(form.dtype), scale))
    again = run(q, *pages, lengths, table, window=37)
    for one, other in zip((out, lse), again, strict=True):
        np.testing.assert_array_equal(np.asarray(one, np.float32), np.asarray(other, np.float32))


@pytest.mark.parametrize("size", [1, 16, 24])
def test_pages(size):
    q, k, v = draw((3, 8, 128), (3, 240, 2, 128), (3, 240, 2, 128), dtype=jnp.bfloat16)
    lengths = np.array([240, 100, 0], np.int32)
    (k_pages, table), (v_pages, _) = (paged(a, 1, size) for a in (k, v))
    got = run(q, k_pages, v_pages, lengths, table)
    check(got, plain(q, k, v, lengths), jnp.bfloat16)
    gone = np.arange(240 // size) * size >= lengths[:, None]
    again = run(q, k_pages, v_pages, lengths, np.where(gone, -1, table))
    for one, other in zip(got, again, strict=True):
        np.testing.assert_array_equal(one, other)
    # A page that is not there is left out.
    left_out = table.copy()
    left_out[0, 0] = -1
    (out, lse) = run(q, k_pages, v_pages, lengths, left_out)
    want = plain(q[:1], k[:1, size:], v[:1, size:], [240 - size])
    check((out[:1], lse[:1]), want, jnp.bfloat16)


def test_the_same_bits_each_time_and_in_a_loop():
    q, k, v = draw((2, 16, 128), (2, 3000, 2, 128), (2, 3000, 2, 128), dtype=jnp.bfloat16)
    factors = jnp.float32([1, 2, 0.5, 1] * 6)
    lengths = jnp.array([3000, 1717] * 12, jnp.int32).reshape(12, 2).repeat(2, 0)

    @jax.jit
    def loop(q, k, v):
        def step(_, of_step):
            factor, lengths = of_step
            return None, jflux.flash_decode(q * factor.astype(q.dtype), k, v, lengths)

        return jax.lax.scan(step, None, (factors, lengths))[1]

    first, second = np.asarray(loop(q, k, v)), np.asarray(loop(q, k, v))
    assert first.tobytes() == second.tobytes()
    for i in (0, 1, 5, 23):
        scaled = np.asarray(jnp.asarray(q) * factors[i].astype(jnp.bfloat16))
        want = plain(scaled, k, v, np.asarray(lengths[i]))[0]
        np.testing.assert_allclose(np.asarray(first[i], np.float64), want, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("by_owner", [False, True])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("world", [n for n in (2, 3, 4) if n <= RANKS])
def test_over_ranks(monkeypatch, world, sinks, by_owner):
    """Ranks whose part is empty, partly valid and whole; a head merged by all ranks or by one."""
    monkeypatch.setattr(decode_merge, "MOST_BYTES_TO_ALL", 0 if by_owner else 1 << 20)
    here = 160
    logits = np.linspace(-3, 3, 8, dtype=np.float32) if sinks else None
    q, k, v = draw((3, 8, 128), *[(3, here * world, 2, 128)] * 2, dtype=jnp.bfloat16)
    lengths = np.array([here * world, here + 7, 3], np.int32)
    f = jax.shard_map(
        functools.partial(jflux.flash_decode, axis_name="tp", return_lse=True, sinks=logits),
        mesh=make_mesh((world,)), in_specs=(P(), P(None, "tp"), P(None, "tp"), P()), out_specs=P(),
    )  # fmt: skip
    want = plain(q, k, v, lengths)
    if sinks:
        want = jflux.merge_attention([want[0]], [want[1]], sinks=logits)
    spoil(lengths, None, k, v)
    check(jax.jit(f)(q, k, v, lengths), want, jnp.bfloat16)


def test_vmap_merges_batches():
    q, k, v = draw((2, 3, 4, 64), (2, 3, 50, 2, 64), (2, 3, 50, 2, 64), dtype=jnp.bfloat16)
    lengths = np.array([[50, 1, 0], [3, 20, 33]], np.int32)
    f = jax.vmap(functools.partial(jflux.flash_decode, return_lse=True))
    got = jax.jit(f)(q, k, v, lengths)
    for i in range(2):
        check([a[i] for a in got], plain(q[i], k[i], v[i], lengths[i]), jnp.bfloat16)
    shared = jax.vmap(functools.partial(jflux.flash_decode, return_lse=True), (0, None, None, 0))
    got = jax.jit(shared)(q, k[0], v[0], lengths)
    for i in range(2):
        check([a[i] for a in got], plain(q[i], k[0], v[0], lengths[i]), jnp.bfloat16)


def test_gradients_are_of_the_plain_form():
    q, k, v = draw((1, 4, 64), (1, 40, 2, 64), (1, 40, 2, 64), dtype=jnp.float32)
    lengths = np.array([33], np.int32)

    def loss(module, q, k, v):
        return jnp.sum(module.flash_decode(q, k, v, lengths).astype(jnp.float32) ** 2)

    for dtype in (jnp.bfloat16, jnp.float32):
        operands = [jnp.asarray(a, dtype) for a in (q, k, v)]
        with jflux.config(strict=False):  # float32 takes plain lax
            got, want = (
                jax.jit(jax.grad(functools.partial(loss, m), (0, 1, 2)))(*operands)
                for m in (jflux, jflux.reference)
            )
        for one, other in zip(got, want, strict=True):
            np.testing.assert_array_equal(one, other)


def test_parts_of_a_sequence():
    """As many teams of warps as run at once, of no less than 64 positions."""
    splits = functools.partial(_flash_decode_primitive.splits_of, scaled=False)
    assert splits((8, 1, 64, 128), 8, 32768) == 792 // 64
    assert splits((1, 1, 64, 128), 8, 131072) == 95
    assert splits((1, 1, 64, 128), 8, 130) == 3
    assert splits((100, 1, 64, 128), 8, 32768) == 4  # a little more than run at once
    assert splits((64, 4, 64, 128), 8, 8192) == 3
    assert splits((400, 1, 64, 128), 8, 32768) == 1
    assert splits((1, 1, 32, 256), 1, 1 << 17) == 378
    assert splits((1, 16, 64, 128), 8, 131072) == 32  # of four warps
    in_8_bits = functools.partial(_flash_decode_primitive.splits_of, scaled=True)
    assert in_8_bits((8, 1, 64, 128), 8, 32768) == 1320 // 64
