"""Attention over a split sequence, in float64, against attention over all of it on one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import PLATFORM, RANKS, make_mesh
from jax.sharding import PartitionSpec as P

import jflux

pytestmark = pytest.mark.wide

SEQUENCE = P(None, "tp")
COUNTS = [n for n in (1, 2, 3, 8) if n <= RANKS]


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


def draw(*shapes, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape) for shape in shapes]


def plain(q, k, v, mask=None, sinks=None, bias=0):
    """(attention, log-sum-exp [B, S, H]) with grouped heads, by the definition. With sinks [H] the
    softmax has one more column, which is dropped."""
    group = q.shape[2] // k.shape[2]
    k, v = jnp.repeat(k, group, 2), jnp.repeat(v, group, 2)
    scores = jnp.einsum("bshd,bthd->bhst", q, k) / q.shape[3] ** 0.5 + bias
    if mask is not None:
        scores = jnp.where(mask, scores, -jnp.inf)
    columns = [scores]
    if sinks is not None:
        columns.append(jnp.broadcast_to(sinks[:, None, None], (*scores.shape[:-1], 1)))
    lse = jax.scipy.special.logsumexp(jnp.concatenate(columns, -1), -1)
    return jnp.einsum("bhst,bthd->bshd", jnp.exp(scores - lse[..., None]), v), lse.swapaxes(1, 2)


def causal(length, window=None):
    i, j = np.arange(length)[:, None], np.arange(length)[None]
    mask = j <= i
    if window is None:
        return mask
    left, right = (length if w is None else w for w in window)
    return mask & (j >= i - left) & (j <= i + right)


# ---- Orders --------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_an_order_has_every_position_once_and_can_be_undone(layout, ranks):
    length = 12 * ranks
    order = jflux.causal_positions(length, ranks, layout=layout)
    assert order.dtype == np.int32
    np.testing.assert_array_equal(np.sort(order), np.arange(length))
    x = np.arange(2 * length * 3).reshape(2, length, 3)
    there = jflux.reorder_for_causal(x, ranks, layout=layout)
    np.testing.assert_array_equal(there, x[:, order])
    np.testing.assert_array_equal(jflux.restore_order(there, ranks, layout=layout), x)
    assert (there == x).all() == (layout == "contiguous" or ranks == 1)


def test_orders_as_documented():
    assert list(jflux.causal_positions(8, 2)) == [0, 1, 6, 7, 2, 3, 4, 5]
    assert list(jflux.causal_positions(8, 2, layout="striped")) == [0, 2, 4, 6, 1, 3, 5, 7]
    tokens = [[3, 1, 4, 1, 5, 9, 2, 6]]
    assert jflux.reorder_for_causal(tokens, 2).tolist() == [[3, 1, 2, 6, 4, 1, 5, 9]]
    assert jflux.restore_order([[3, 1, 2, 6, 4, 1, 5, 9]], 2).tolist() == tokens


@pytest.mark.parametrize("layout", ["zigzag", "striped"])
def test_orders_balance_causal_work(layout):
    length, ranks = 240, 4
    parts = jflux.causal_positions(length, ranks, layout=layout).reshape(ranks, -1)
    work = (parts + 1).sum(1)  # keys that the rank's queries attend to
    assert work.max() - work.min() <= length
    uneven = (np.arange(length).reshape(ranks, -1) + 1).sum(1)
    assert uneven.max() > 5 * uneven.min()


@pytest.mark.parametrize(
    ("length", "ranks", "layout", "message"),
    [
        (12, 4, "zigzag", "length=12 must be a multiple of 8"),
        (10, 4, "striped", "length=10 must be a multiple of 4"),
        (8, 2, "snake", "layout='snake' must be one of contiguous, zigzag, striped"),
    ],
)
def test_orders_that_cannot_be(length, ranks, layout, message):
    with pytest.raises(ValueError, match=message):
        jflux.causal_positions(length, ranks, layout=layout)


# ---- Merging -------------------------------------------------------------------------------------


def parts_of(q, k, v, bounds):
    mask = causal(q.shape[1])
    pairs = [
        plain(q, k[:, a:b], v[:, a:b], mask[:, a:b])
        for a, b in zip(bounds[:-1], bounds[1:], strict=True)
    ]
    # What a kernel leaves where no key is attended to: anything.
    return [(jnp.where(jnp.isfinite(lse)[..., None], out, 7.0), lse) for out, lse in pairs]


@pytest.mark.parametrize("stacked", [False, True])
def test_parts_merge_to_the_whole(stacked):
    q, k, v = draw((2, 12, 6, 8), (2, 12, 2, 8), (2, 12, 2, 8))
    want, lse = plain(q, k, v, causal(12))
    outs, lses = zip(*parts_of(q, k, v, [0, 3, 9, 12]), strict=True)
    if stacked:
        outs, lses = jnp.stack(outs), jnp.stack(lses)
    got, got_lse = jax.jit(jflux.merge_attention)(outs, lses)
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(got_lse, lse, rtol=1e-12)


def test_gradients_of_a_merge_are_the_whole_ones():
    q, k, v = draw((1, 10, 4, 4), (1, 10, 2, 4), (1, 10, 2, 4))
    weight, lse_weight = draw((1, 10, 4, 4), (1, 10, 4), seed=1)

    def loss(pair):
        return jnp.sum(pair[0] * weight) + jnp.sum(pair[1] * lse_weight)

    def merged(q, k, v):
        outs, lses = zip(*parts_of(q, k, v, [0, 2, 7, 10]), strict=True)
        return loss(jflux.merge_attention(outs, lses))

    whole = jax.grad(lambda *a: loss(plain(*a, causal(10))), (0, 1, 2))(q, k, v)

    # Parts without keys have -inf in `plain` itself, whose gradient is NaN: cut them off there.
    def safe(q, k, v):
        mask, outs, lses = causal(10), [], []
        for a, b in ((0, 2), (2, 7), (7, 10)):
            part = mask[:, a:b]
            has = part.any(1)
            out, lse = plain(q, k[:, a:b], v[:, a:b], part | ~has[:, None])
            outs.append(jnp.where(has[None, :, None, None], out, jnp.nan))
            lses.append(jnp.where(has[None, :, None], lse, -jnp.inf))
        return loss(jflux.merge_attention(outs, lses))

    np.testing.assert_allclose(safe(q, k, v), merged(q, k, v), rtol=1e-12)
    got = jax.grad(safe, (0, 1, 2))(q, k, v)
    for one, other in zip(got, whole, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-12)


def test_sinks_of_a_merge():
    q, k, v, sinks = draw((1, 10, 4, 4), (1, 10, 2, 4), (1, 10, 2, 4), (4,))
    weights = draw((1, 10, 4, 4), (1, 10, 4), seed=1)

    def loss(f):
        def of(*arrays):
            results = f(*arrays)
            return sum(map(jnp.vdot, results, weights)), results

        return jax.jit(jax.value_and_grad(of, (0, 1, 2, 3), has_aux=True))

    def merged(q, k, v, sinks):
        parts = [plain(q, k[:, a:b], v[:, a:b]) for a, b in ((0, 3), (3, 10))]
        return jflux.merge_attention(*zip(*parts, strict=True), sinks=sinks)

    got = loss(merged)(q, k, v, sinks)
    want = loss(lambda *a: plain(*a[:3], sinks=a[3]))(q, k, v, sinks)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-12)
    with pytest.raises(ValueError, match=r"merge_attention: sinks must be \[H\].* 4 heads"):
        jflux.merge_attention([q], [q[..., 0]], sinks=sinks[:3])


def test_nothing_to_merge_is_zero():
    out, lse = jflux.merge_attention(
        jnp.full((3, 2, 4), jnp.nan, jnp.bfloat16), jnp.full((3, 2), -jnp.inf, jnp.float32)
    )
    assert out.dtype == jnp.bfloat16 and lse.dtype == jnp.float32
    assert not out.any() and np.isneginf(lse).all()
    gradient = jax.grad(
        lambda *parts: jnp.sum(jflux.merge_attention(*parts)[0].astype(jnp.float32)), (0, 1)
    )(jnp.full((3, 2, 4), jnp.nan), jnp.full((3, 2), -jnp.inf))
    assert all(np.isfinite(g).all() and not g.any() for g in gradient)


@pytest.mark.parametrize(
    "outputs, log_sum_exps",
    [
        ([], []),
        (np.zeros((0, 2, 3)), np.zeros((0, 2))),
        (np.zeros(()), np.zeros(())),
        ([np.zeros((2, 3)), np.zeros((2, 4))], [np.zeros(2)] * 2),
    ],
)
def test_parts_of_a_merge_that_do_not_fit_each_other(outputs, log_sum_exps):
    with pytest.raises(ValueError, match="jflux.merge_attention: outputs must be .* one shape"):
        jflux.merge_attention(outputs, log_sum_exps)


def test_a_merge_of_lists():
    o, lse = jflux.merge_attention([[[1.0, 3.0]], [[3.0, 1.0]]], [[0.0], [0.0]])
    np.testing.assert_allclose(o, [[2.0, 2.0]])
    np.testing.assert_allclose(lse, [np.log(2)])


def test_a_merge_that_does_not_fit():
    with pytest.raises(ValueError, match=r"log_sum_exps must have shape \(2, 3, 4\), got \(2, 3\)"):
        jflux.merge_attention(jnp.zeros((2, 3, 4, 5)), jnp.zeros((2, 3)))


# ---- Ulysses -------------------------------------------------------------------------------------


def exact(q, k, v, *, is_causal, scale, mask, local_window_size):
    """A core in float64: that of `jax.nn` computes scores in float32."""
    assert scale == q.shape[3] ** -0.5
    may = causal(q.shape[1], local_window_size) if is_causal else np.ones((q.shape[1],) * 2, bool)
    return plain(q, k, v, may if mask is None else mask & may)[0]


def over_ranks(world, ids=False, core=exact, module=jflux, **options):
    def call(q, k, v, *ids):
        return module.ulysses_attention(
            q, k, v, axis_name="tp", segment_ids=ids[0] if ids else None, core=core, **options
        )

    return jax.shard_map(
        call, mesh=make_mesh((world,)), in_specs=(SEQUENCE,) * (4 if ids else 3), out_specs=SEQUENCE
    )


@pytest.mark.parametrize("world", [n for n in (1, 2) if n <= RANKS])
def test_ulysses_of_values_of_another_width(world):
    """Columns of values are independent: with half of them, and with twice as many, for the same
    scores."""
    sizes = (2, 3 * world, 2 * world, 4)
    q, k, v, more = draw(*[sizes] * 4)
    whole = jax.jit(over_ranks(world, core=None, causal=True))
    want = np.concatenate([whole(q, k, v), whole(q, k, more)], -1)
    got = whole(q, k, np.concatenate([v, more], -1))
    np.testing.assert_allclose(got, want, rtol=1e-12)
    np.testing.assert_allclose(whole(q, k, v[..., :3]), want[..., :3], rtol=1e-12)


def check(f, want, operands):
    """Values and gradients."""
    cotangent = draw(operands[0].shape, seed=5)[0]

    def run(f):
        y, pull = jax.vjp(f, *operands)
        return y, *pull(cotangent)

    for one, other in zip(jax.jit(lambda: run(f))(), run(want), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("world", COUNTS)
@pytest.mark.parametrize("kv_heads", ["as queries", "as ranks", "one"])
@pytest.mark.parametrize("window", [None, (2, 0), (None, 0)])
def test_ulysses_is_attention(world, kv_heads, window):
    heads = 2 * world
    groups = {"as queries": heads, "as ranks": world, "one": 1}[kv_heads]
    length = 3 * world
    shapes = (2, length, heads, 4), (2, length, groups, 4), (2, length, groups, 4)
    f = over_ranks(world, causal=True, window=window)
    want = functools.partial(plain, mask=causal(length, window))
    check(f, lambda *a: want(*a)[0], draw(*shapes))


@pytest.mark.parametrize("kv_heads", ["as queries", "one"])
def test_the_reference_of_ulysses(kv_heads):
    """With a core in float64, and with its own, whose scores are float32."""
    world = COUNTS[-1]
    groups, length = {"as queries": 2 * world, "one": 1}[kv_heads], 3 * world
    shapes = (2, length, 2 * world, 4), (2, length, groups, 4), (2, length, groups, 4)
    operands = draw(*shapes)
    ids = np.sort(np.random.default_rng(3).integers(0, 3, (2, length)), 1)
    mask = causal(length)[None, None] & (ids[:, None, :, None] == ids[:, None, None, :])
    f = over_ranks(world, ids=True, module=jflux.reference, causal=True)
    want = functools.partial(plain, mask=mask)
    check(lambda *a: f(*a, ids), lambda *a: want(*a)[0], operands)
    f = over_ranks(world, ids=True, module=jflux.reference, causal=True, core=None)
    np.testing.assert_allclose(jax.jit(f)(*operands, ids), want(*operands)[0], rtol=1e-4, atol=1e-5)
    assert "jflux_" not in str(jax.make_jaxpr(f)(*operands, ids))


def test_ulysses_without_a_mask_and_with_segments():
    world = COUNTS[-1]
    operands = draw((2, 2 * world, world, 4), (2, 2 * world, world, 4), (2, 2 * world, world, 4))
    check(over_ranks(world), lambda *a: plain(*a)[0], operands)
    ids = np.sort(np.random.default_rng(3).integers(0, 3, (2, 2 * world)), 1)
    same = (ids[:, None, :, None] == ids[:, None, None, :]) & causal(2 * world)
    got = jax.jit(over_ranks(world, ids=True, causal=True))(*operands, ids)
    np.testing.assert_allclose(got, plain(*operands, same)[0], rtol=1e-9, atol=1e-11)


def test_the_core_of_ulysses_is_that_of_jax_nn():
    world = COUNTS[-1]
    operands = draw((2, 2 * world, world, 8), (2, 2 * world, 1, 8), (2, 2 * world, 1, 8))
    got = jax.jit(over_ranks(world, core=None, causal=True, window=(5, 0)))(*operands)
    want, _ = plain(*operands, causal(2 * world, (5, 0)))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    want, _ = plain(*operands, causal(2 * world))
    for wide in (1 << 31, 1 << 63, (None, None), (None, 0)):  # jax.nn's masks add them to positions
        got = jax.jit(over_ranks(world, core=None, causal=True, window=wide))(*operands)
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("module", [jflux, jflux.reference], ids=["jflux", "reference"])
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_halves_with_the_core_of_jax_nn(module, dtype):
    """And their gradients. JAX's own fails for float16 on CPUs."""
    world = COUNTS[-1]
    operands = draw((2, 2 * world, world, 8), (2, 2 * world, 1, 8), (2, 2 * world, 1, 8))
    operands = [jnp.asarray(a, dtype) for a in operands]
    f = jax.jit(over_ranks(world, core=None, module=module, causal=True))
    wide = [np.asarray(a, np.float64) for a in operands]
    bound = 8 * float(jnp.finfo(dtype).eps)

    def close(got, want):
        assert got.dtype == dtype
        np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=bound, atol=bound)

    close(f(*operands), plain(*wide, causal(2 * world))[0])
    got = jax.grad(lambda *a: f(*a).astype(jnp.float32).sum(), (0, 1, 2))(*operands)
    want = jax.grad(lambda *a: plain(*a, causal(2 * world))[0].sum(), (0, 1, 2))(
        *map(jnp.asarray, wide)
    )
    for one, other in zip(got, want, strict=True):
        assert one.dtype == dtype
        np.testing.assert_allclose(
            np.asarray(one, np.float64), other, rtol=4 * bound, atol=8 * bound
        )


def test_ulysses_takes_a_core():
    world = COUNTS[-1]
    seen = []

    def core(q, k, v, *, is_causal, scale, mask, local_window_size):
        seen.append((q.shape, k.shape, is_causal, scale, mask, local_window_size))
        return q + v

    operands = draw((1, world, world, 4), (1, world, world, 4), (1, world, world, 4))
    got = over_ranks(world, core=core, causal=True, scale=0.25)(*operands)
    np.testing.assert_allclose(got, operands[0] + operands[2])
    assert seen[0] == ((1, world, 1, 4), (1, world, 1, 4), True, 0.25, None, None)


@pytest.mark.parametrize("ids", [False, True])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("module", [jflux, jflux.reference], ids=["jflux", "reference"])
def test_sinks_slopes_and_bias_of_ulysses(module, dtype, ids):
    """Each rank has those of its heads, their slopes, and their bias."""
    world = min(3, RANKS)
    slopes = np.arange(-1, 2 * world - 1) / 4
    length = 2 * world
    shapes = (2, length, 2 * world, 8), *[(2, length, 1, 8)] * 2, (2 * world,)
    *operands, sinks, table = draw(*shapes, (1, 2 * world, length, length))
    operands = [jnp.asarray(a, dtype) for a in operands]
    segments = np.sort(np.random.default_rng(3).integers(0, 2, (2, length)), 1) if ids else None

    def call(sinks, table, *operands):
        *operands, segments = operands
        return module.ulysses_attention(
            *operands, axis_name="tp", segment_ids=segments, sinks=sinks, causal=True,
            alibi_slopes=slopes, bias=table,
        )  # fmt: skip

    split = jax.shard_map(
        call, mesh=make_mesh((world,)), in_specs=(P(), P(), *[SEQUENCE] * 4), out_specs=SEQUENCE
    )
    mask = causal(length)
    if ids:
        mask = mask & (segments[:, None, :, None] == segments[:, None, None, :])

    def both(f, *operands):
        def loss(*operands):
            o = f(*operands).astype(jnp.float32)
            return jnp.sum(jnp.sin(o)), o

        gradients, o = jax.jit(jax.grad(loss, range(5), has_aux=True))(*operands)
        return [np.asarray(a, np.float64) for a in (o, *gradients)]

    got = both(lambda q, k, v, s, t: split(s, t, q, k, v, segments), *operands, sinks, table)
    wide = [a.astype(jnp.float64) for a in operands]
    i, j = np.arange(length)[:, None], np.arange(length)
    bias = slopes[:, None, None] * (j - i)
    want = both(lambda q, k, v, s, t: plain(q, k, v, mask, s, bias + t)[0], *wide, sinks, table)
    bound = 16 * max(float(jnp.finfo(dtype).eps), 1e-6)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=bound, atol=bound * np.abs(other).max())


def test_a_core_of_ulysses_gets_the_sinks_and_the_bias_of_its_heads():
    world = COUNTS[-1]
    operands = draw((1, world, 2 * world, 4), *[(1, world, world, 4)] * 2)

    def core(q, k, v, *, sinks, bias, **options):
        np.testing.assert_array_equal(bias.shape, (1, 2, world, world))
        return jnp.broadcast_to((sinks + bias[0, :, 0, 0])[:, None], q.shape)

    sinks = np.arange(2.0 * world)
    bias = np.broadcast_to(sinks[:, None, None] / 2, (1, 2 * world, world, world))
    got = over_ranks(world, core=core, sinks=sinks / 2, bias=bias)(*operands)
    np.testing.assert_array_equal(got, np.broadcast_to(sinks[:, None], got.shape))
    with pytest.raises(ValueError, match="bias must be .* of whole sequences"):
        over_ranks(world, bias=np.zeros((1, 1, 1, 1 + world)))(*operands)
    for name in ("sinks", "alibi_slopes"):
        with pytest.raises(ValueError, match=rf"jflux.ulysses_attention: {name} must be \[H\]"):
            over_ranks(world, **{name: sinks[:1]})(*operands)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((1, 4, 3, 4), (1, 4, 1, 4), (1, 4, 1, 4)), "3 heads cannot be split over 2 ranks"),
        (((1, 4, 6, 4), (1, 4, 3, 4), (1, 4, 3, 4)), "3 heads of keys and values must be"),
        (
            ((1, 4, 4, 4), (1, 4, 4, 4), (1, 4, 2, 4)),
            "must have the same B and D, and k",
        ),
        (((4, 4, 4), (1, 4, 4, 4), (1, 4, 4, 4)), r"q must be \[B, S/N, heads, D\]"),
        (((1, 4, 2, 4), (1, 4, 4, 4), (1, 4, 4, 4)), "2 heads of queries must be a multiple of 4"),
    ],
)
def test_ulysses_refuses(shapes, message):
    if RANKS < 2:
        pytest.skip("two ranks")
    mesh = make_mesh((2,))
    specs = tuple(P(None, "tp") if len(s) == 4 else P("tp") for s in shapes)
    f = jax.shard_map(
        functools.partial(jflux.ulysses_attention, axis_name="tp"),
        mesh=mesh, in_specs=specs, out_specs=SEQUENCE,
    )  # fmt: skip
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(f, *(jnp.zeros(s) for s in shapes))


@pytest.mark.parametrize("world", COUNTS)
@pytest.mark.parametrize("kv_heads", ["as queries", "as ranks", "one"])
def test_projections_exchange_as_they_multiply(world, kv_heads):
    """Ulysses from x to y: queries, keys and values go to the ranks of their heads, and the result
    back to those of its positions, inside the products around attention. Fewer heads of keys than
    ranks: each column of the weight as often as its head is needed."""
    width, d, own = 6, 4, 3
    heads, groups = 2 * world, {"as queries": 2 * world, "as ranks": world, "one": 1}[kv_heads]
    x, wq, wk, wv, wo = draw(
        (2, own * world, width), (width, heads * d), *[(width, groups * d)] * 2, (heads * d, width)
    )

    def layer(x, wq, wk, wv, wo):
        def heads_of(w, count):
            if count % world != 0:
                w = jnp.repeat(w.reshape(width, count, d), world // count, 1).reshape(width, -1)
            y = jflux.matmul_all_to_all(x, w, axis_name="tp", split_axis=-1, concat_axis=-2)
            return y.reshape(*y.shape[:2], -1, d)

        o = exact(
            heads_of(wq, heads), heads_of(wk, groups), heads_of(wv, groups),
            is_causal=True, scale=d**-0.5, mask=None, local_window_size=None,
        )  # fmt: skip
        o = o.reshape(*o.shape[:2], -1)
        return jflux.all_to_all_matmul(o, wo, axis_name="tp", split_axis=-2, concat_axis=-1)

    split = jax.shard_map(
        layer, mesh=make_mesh((world,)), in_specs=(SEQUENCE, *[P()] * 4), out_specs=SEQUENCE
    )

    def whole(x, wq, wk, wv, wo):
        q, k, v = ((x @ w).reshape(*x.shape[:2], -1, d) for w in (wq, wk, wv))
        return plain(q, k, v, causal(own * world))[0].reshape(*x.shape[:2], -1) @ wo

    check(split, whole, (x, wq, wk, wv, wo))
    if world > 1 and PLATFORM == "cpu":  # GPUs have no kernels of float64
        text = jax.jit(split).lower(x, wq, wk, wv, wo).as_text()
        calls = [text.count(f"jflux_{op}(") for op in ("matmul_all_to_all", "all_to_all_matmul")]
        assert calls == [3, 1]


def test_padding_that_is_not_a_number():
    """A mask keeps it out, forward and backward."""
    operands = draw((2, 8, 4, 4), (2, 8, 2, 4), (2, 8, 2, 4))
    ids = np.repeat([[0, 1], [0, 0]], [5, 3], axis=1)
    padding = (ids == 1)[..., None, None]

    def gradients(*operands):
        def loss(*operands):
            f = over_ranks(2, ids=True, core=None, causal=True)
            o = f(*operands, ids)
            return jnp.sum(jnp.sin(jnp.where(padding, 0, o))), o

        return jax.grad(loss, (0, 1, 2), has_aux=True)(*operands)

    f = jax.jit(gradients)
    want, _ = f(*operands)
    got, o = f(*(np.where(padding, np.nan, a) for a in operands))
    np.testing.assert_array_equal(np.isnan(o), np.broadcast_to(padding, o.shape))
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-12)
