"""jflux.moe against dense one-hot forms in float64, and loops in numpy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import PLATFORM, examples, make_mesh
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

import jflux
from jflux import moe

pytestmark = pytest.mark.wide
X64 = functools.partial(jax.enable_x64, True)


@st.composite
def choices(draw):
    """(indices [T, k], E): mixed, or all on one expert; with -1 and duplicates."""
    # Few shapes: each is compiled.
    tokens, k, experts = draw(st.sampled_from([(1, 1, 1), (7, 2, 4), (40, 6, 9), (13, 3, 1)]))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 16)))
    kind = draw(st.sampled_from(["any", "one", "few", "none"]))
    low, high = {
        "any": (-1, experts),
        "one": (experts - 1, experts),
        "few": (0, max(1, experts // 3)),
        "none": (-1, 0),
    }[kind]
    return rng.integers(low, high, (tokens, k)).astype(np.int32), experts


def drawn_mask(seed, tokens):
    """bool [T], now and then all or none."""
    rng = np.random.default_rng(seed)
    return rng.random(tokens) < rng.choice([0, 0.3, 0.7, 1])


def routed(indices, experts, capacity=None):
    """The definition of a routing, by a loop."""
    rows = [[] for _ in range(experts)]
    for slot, e in enumerate(indices.reshape(-1)):
        if e >= 0 and (capacity is None or len(rows[e]) < capacity):
            rows[e].append(slot)
    counts = np.array([len(r) for r in rows], np.int32)
    source = np.full(indices.size, -1, np.int32)
    order = [slot for r in rows for slot in r]
    source[: len(order)] = order
    destination = np.full(indices.size, -1, np.int32)
    destination[order] = np.arange(len(order))
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    return moe.Routing(counts, offsets, destination.reshape(indices.shape), source)


def same(got, want):
    for g, w in zip(got, want, strict=True):
        assert g.dtype == np.int32
        np.testing.assert_array_equal(g, w)


# ---- Routing -------------------------------------------------------------------------------------


@given(choices(), st.sampled_from([None, 0, 5]))
@examples(25)
def test_route(chosen, capacity):
    indices, experts = chosen
    want = routed(indices, experts, capacity)
    same(moe.route(indices, experts, capacity=capacity), want)
    with jflux.config(fused=False):
        same(jax.jit(functools.partial(moe.route, num_experts=experts, capacity=capacity))(indices),
             want)  # fmt: skip
    stats = moe.statistics(indices, moe.route(indices, experts, capacity=capacity))
    asked = np.bincount(indices[indices >= 0], minlength=experts)
    np.testing.assert_array_equal(stats.tokens_per_expert, asked)
    assert stats.dropped == asked.sum() - want.counts.sum()
    assert stats.unassigned == (indices < 0).sum()
    assert all(a.dtype == np.int32 for a in stats)


@given(choices(), st.integers(0, 1 << 16), st.sampled_from([None, 2]))
@examples(12)
def test_statistics_of_real_tokens(chosen, seed, capacity):
    """Also where the routing has rows of the others, which then are none of the dropped."""
    indices, experts = chosen
    mask = drawn_mask(seed, len(indices))
    for routed_as in (indices, np.where(mask[:, None], indices, -1)):
        routing = moe.route(routed_as, experts, capacity=capacity)
        stats = moe.statistics(indices, routing, mask=mask)
        rows = np.asarray(routing.destination)[mask]
        real = indices[mask]
        asked = np.bincount(real[real >= 0], minlength=experts)
        np.testing.assert_array_equal(stats.tokens_per_expert, asked)
        assert stats.dropped == ((real >= 0) & (rows < 0)).sum()
        assert stats.unassigned == (real < 0).sum()


def test_route_takes_any_integers_and_no_tokens():
    indices = np.array([[3, 0], [0, -1]])
    same(moe.route(indices.astype(np.int8), 4), routed(indices, 4))
    empty = moe.route(np.zeros((0, 2), np.int32), 3)
    same(empty, routed(np.zeros((0, 2), np.int32), 3))


@pytest.mark.parametrize("fused", [True, False])
def test_route_in_batches_and_loops(fused):
    rng = np.random.default_rng(0)
    batch = rng.integers(-1, 5, (3, 7, 2)).astype(np.int32)
    with jflux.config(fused=fused):
        got = jax.jit(jax.vmap(lambda i: moe.route(i, 5), 1))(batch.swapaxes(0, 1))
        _, scanned = jax.lax.scan(lambda c, i: (c, moe.route(i, 5)), 0, batch)
    for i, indices in enumerate(batch):
        same([a[i] for a in got], routed(indices, 5))
        same([a[i] for a in scanned], routed(indices, 5))


@pytest.mark.skipif(PLATFORM != "cpu", reason="the GPU kernel leaves such slots out")
@pytest.mark.parametrize("wrong", [-2, 4])
def test_route_refuses_other_indices(wrong):
    indices = np.array([[0, 1], [3, wrong]], np.int32)
    says = f"moe_route: slot 3 of topk_indices is {wrong}, and there are 4 experts"
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match=says):
        jax.block_until_ready(moe.route(indices, 4))
    with jflux.config(fused=False):  # without an expert
        want = routed(np.array([[0, 1], [3, -1]]), 4)
        same(jax.jit(lambda i: moe.route(i, 4))(indices), want)
        stats = moe.statistics(indices, want)
        assert (stats.dropped, stats.unassigned) == (1, 0)


def test_route_checks_its_operands():
    with pytest.raises(TypeError, match=r"must be integers \(int32\), got float32"):
        moe.route(np.zeros((2, 2), np.float32), 4)
    with pytest.raises(ValueError, match=r"must have shape \[T, k\], got \(2,\)"):
        moe.route(np.zeros(2, np.int32), 4)
    with pytest.raises(ValueError, match="num_experts=0"):
        moe.route(np.zeros((2, 2), np.int32), 0)
    with pytest.raises(ValueError, match="capacity=-1"):
        moe.route(np.zeros((2, 2), np.int32), 4, capacity=-1)


# ---- Rows ----------------------------------------------------------------------------------------


def one_hot_rows(routing, dtype=np.float64):
    """[T k, T, k]: 1 where the row is the slot's."""
    source = np.asarray(routing.source)
    tokens, k = routing.destination.shape
    hot = (source[:, None] == np.arange(tokens * k)) & (source[:, None] >= 0)
    return hot.reshape(-1, tokens, k).astype(dtype)


@given(choices(), st.sampled_from([None, 5]), st.sampled_from([1, 4]))
@examples(12)
def test_permute_and_unpermute(chosen, capacity, width):
    indices, experts = chosen
    rng = np.random.default_rng(1)
    with X64():
        routing = moe.route(indices, experts, capacity=capacity)
        hot = one_hot_rows(routing)
        x = rng.normal(size=(indices.shape[0], width))
        y = rng.normal(size=(indices.size, width))
        y[int(routing.offsets[-1]) :] = np.nan  # past the last row
        weights = rng.normal(size=indices.shape)
        weights[np.asarray(routing.destination) < 0] = np.nan  # of no row
        kept, w = np.nan_to_num(y), np.nan_to_num(weights)
        np.testing.assert_array_equal(moe.permute(x, routing), np.einsum("rtj,th->rh", hot, x))
        close = functools.partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-12)
        close(moe.unpermute(y, routing), np.einsum("rtj,rh->th", hot, kept))
        close(moe.unpermute(y, routing, weights), np.einsum("rtj,tj,rh->th", hot, w, kept))

        g = rng.normal(size=x.shape)
        (dx,) = jax.vjp(lambda x: moe.permute(x, routing), x)[1](jnp.asarray(y))
        close(dx, np.einsum("rtj,rh->th", hot, kept))
        dy, dw = jax.vjp(lambda y, w: moe.unpermute(y, routing, w), y, weights)[1](g)
        close(dy, np.einsum("rtj,tj,th->rh", hot, w, g))
        close(dw, np.einsum("rtj,rh,th->tj", hot, kept, g))


def test_rows_that_nobody_reads():
    """Past the last row, of x and in dy, with zeros or anything."""
    routing = moe.route(np.array([[1, -1], [0, -1], [2, 0]], np.int32), 3)
    x = np.arange(12.0, dtype=np.float32).reshape(3, 4)

    def both(rest):
        y, pull = jax.vjp(lambda y: moe.unpermute(y, routing, rest=rest), np.ones((6, 4)))
        return moe.permute(x, routing, rest=rest), *pull(jnp.asarray(y))

    for got, want in zip(both("undefined"), both("zeros"), strict=True):
        np.testing.assert_array_equal(got[:4], want[:4])
        assert not np.asarray(want)[4:].any()
    for f in (moe.permute, moe.unpermute):
        with pytest.raises(ValueError, match=f"moe.{f.__name__}: rest='nan' must be"):
            f(x if f is moe.permute else np.ones((6, 4)), routing, rest="nan")


def test_rows_under_transforms():
    with X64():
        rng = np.random.default_rng(2)
        indices = np.array([[1, 1], [0, -1], [2, 0]], np.int32)
        x, w = rng.normal(size=(3, 4)), rng.normal(size=(3, 2))
        routing = moe.route(indices, 3)

        def f(x, w, routing=routing):
            return moe.unpermute(jnp.sin(moe.permute(x, routing)), routing, w)

        check_grads(jax.jit(f), (x, w), 2, ["fwd", "rev"], rtol=1e-4)
        batch = rng.integers(-1, 3, (4, 3, 2)).astype(np.int32)
        xs = rng.normal(size=(4, 3, 4))

        def loss(x, w, indices):
            return jnp.sum(f(x, w, moe.route(indices, 3)) ** 2)

        got = jax.jit(jax.vmap(jax.grad(loss, (0, 1)), (0, None, 0)))(xs, w, batch)
        each = [jax.grad(loss, (0, 1))(a, w, b) for a, b in zip(xs, batch, strict=True)]
        for i in range(2):
            np.testing.assert_allclose(got[i], np.stack([e[i] for e in each]), rtol=1e-6)


def test_rows_of_halves_are_summed_in_float32():
    ones = np.full((1, 4), 0, np.int32)
    routing = moe.route(ones, 1)
    y = np.array([[256.0], [1.0], [1.0], [-256.0]], np.float32).astype(jnp.bfloat16)
    assert np.asarray(moe.unpermute(y, routing))[0, 0] == 2.0
    text = jax.jit(jax.grad(lambda x: jnp.sum(moe.permute(x, routing)))).lower(y[:1]).as_text()
    assert "scatter" not in text


def test_rows_check_their_operands():
    routing = moe.route(np.zeros((3, 2), np.int32), 2)
    with pytest.raises(ValueError, match=r"permute: x must have shape \[T, H\], with 3 rows"):
        moe.permute(np.zeros((2, 4), np.float32), routing)
    with pytest.raises(ValueError, match=r"unpermute: y must have shape \[T k, H\], with 6 rows"):
        moe.unpermute(np.zeros((3, 4), np.float32), routing)
    with pytest.raises(ValueError, match=r"weights have shape \(2, 3\)"):
        moe.unpermute(np.zeros((6, 4), np.float32), routing, np.zeros((2, 3), np.float32))


# ---- The layer's path ----------------------------------------------------------------------------


def layer(x, router, w, down, k, experts):
    indices, weights = moe.top_k_softmax(x @ router, k)
    routing = moe.route(indices, experts)
    rows = moe.permute(x, routing)
    h = jflux.grouped_matmul(rows, w, routing.counts, activation="silu", gated=True)
    return moe.unpermute(jflux.grouped_matmul(h, down, routing.counts), routing, weights)


def dense_layer(x, router, w, down, k, experts):
    """Every expert on every token, and the k best of them."""
    logits = x @ router
    best, indices = jax.lax.top_k(logits, k)
    mask = jnp.sum(jax.nn.one_hot(indices, experts) * jax.nn.softmax(best)[..., None], 1)
    h = jax.nn.silu(jnp.einsum("td,edf->tef", x, w[0])) * jnp.einsum("td,edf->tef", x, w[1])
    return jnp.einsum("te,tef,efd->td", mask, h, down)


@pytest.mark.parametrize("wrap", ["plain", "remat", "scan"])
def test_a_layer_is_the_dense_one(wrap):
    with X64():
        rng = np.random.default_rng(3)
        t, d, f, e, k = 12, 6, 5, 4, 2
        x, router = rng.normal(size=(t, d)), rng.normal(size=(d, e))
        gate, up = rng.normal(size=(2, e, d, f))
        args = (x, router, (gate, up), rng.normal(size=(e, f, d)))

        def loss(of):
            of = functools.partial(of, k=k, experts=e)
            if wrap == "remat":
                of = jax.checkpoint(of)

            def total(x, *weights):
                if wrap == "scan":
                    step = lambda x, _: (x + 0.1 * of(x, *weights), None)  # noqa: E731
                    x, _ = jax.lax.scan(step, x, None, 3)
                else:
                    x = of(x, *weights)
                return jnp.sum(jnp.sin(x))

            return jax.jit(jax.value_and_grad(total, (0, 1, 2, 3)))

        got, want = loss(layer)(*args), loss(dense_layer)(*args)
        for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(g, w, rtol=1e-6, atol=1e-6)


def test_a_layer_inside_shard_map():
    mesh = make_mesh((2,), ("dp",))
    with X64():
        rng = np.random.default_rng(4)
        t, d, f, e = 8, 4, 3, 3
        x, router = rng.normal(size=(t, d)), rng.normal(size=(d, e))
        weights = (router, tuple(rng.normal(size=(2, e, d, f))), rng.normal(size=(e, f, d)))
        body = functools.partial(layer, k=2, experts=e)
        split = jax.shard_map(body, mesh=mesh, in_specs=(P("dp"), P(), P(), P()), out_specs=P("dp"))

        def grad(f):
            return jax.jit(jax.grad(lambda x, *w: jnp.sum(jnp.sin(f(x, *w))), (0, 1, 2, 3)))

        got = grad(split)(x, *weights)
        want = grad(functools.partial(dense_layer, k=2, experts=e))(x, *weights)
        for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(g, w, rtol=1e-6, atol=1e-6)


# ---- Gates ---------------------------------------------------------------------------------------


def logits_of(seed, tokens=7, experts=12):
    return np.random.default_rng(seed).normal(size=(tokens, experts))


def best(values, k):
    return np.argsort(-values, axis=-1, kind="stable")[:, :k]


def test_top_k_softmax():
    with X64():
        logits = logits_of(5)
        full = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
        want = best(logits, 3)
        chosen = np.take_along_axis(full, want, -1)
        indices, weights = moe.top_k_softmax(logits, 3)
        np.testing.assert_array_equal(indices, want)
        assert indices.dtype == np.int32
        np.testing.assert_allclose(weights, chosen / chosen.sum(-1, keepdims=True))
        _, weights = moe.top_k_softmax(logits, 3, normalize=False, scale=2.0)
        np.testing.assert_allclose(weights, 2 * chosen)
        for normalize in (True, False):
            f = functools.partial(moe.top_k_softmax, k=3, normalize=normalize)
            check_grads(jax.jit(lambda x, f=f: f(x)[1]), (logits,), 1, ["fwd", "rev"])


def test_top_k_sigmoid():
    with X64():
        logits, bias = logits_of(6), np.linspace(-1, 1, 12)
        scores = 1 / (1 + np.exp(-logits))
        want = best(scores + bias, 4)
        assert (want != best(scores, 4)).any()
        chosen = np.take_along_axis(scores, want, -1)
        indices, weights = moe.top_k_sigmoid(logits, 4, bias=bias, scale=2.5)
        np.testing.assert_array_equal(indices, want)
        np.testing.assert_allclose(weights, 2.5 * chosen / chosen.sum(-1, keepdims=True))
        _, weights = moe.top_k_sigmoid(logits, 4, bias=bias, normalize=False)
        np.testing.assert_allclose(weights, chosen)

        def loss(logits, bias):
            return jnp.sum(jnp.sin(moe.top_k_sigmoid(logits, 4, bias=bias)[1]))

        assert not np.asarray(jax.grad(loss, 1)(logits, bias)).any()
        check_grads(lambda x: loss(x, bias), (logits,), 1, ["fwd", "rev"])


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_group_limited_top_k(score):
    with X64():
        logits, bias = logits_of(7, tokens=20), np.linspace(0.2, -0.2, 12)
        groups, top, k = 4, 2, 4
        indices, weights = moe.group_limited_top_k(
            logits, k, num_groups=groups, top_groups=top, score=score, bias=bias, normalize=False
        )
        for t, row in enumerate(logits):
            scores = (
                np.exp(row) / np.exp(row).sum() if score == "softmax" else 1 / (1 + np.exp(-row))
            )
            choice = (scores + bias).reshape(groups, -1)
            kept = np.sort(choice, -1)[:, -(1 if score == "softmax" else 2) :].sum(-1)
            limited = np.full(choice.shape, -np.inf)
            for g in best(kept[None], top)[0]:
                limited[g] = choice[g]
            want = best(limited.reshape(1, -1), k)[0]
            np.testing.assert_array_equal(indices[t], want)
            np.testing.assert_allclose(weights[t], scores[want])
            assert len({int(i) // 3 for i in np.asarray(indices[t])}) <= top
        everything = moe.group_limited_top_k(logits, k, num_groups=4, top_groups=4, score="sigmoid")
        for a, b in zip(everything, moe.top_k_sigmoid(logits, k), strict=True):
            np.testing.assert_array_equal(a, b)


def test_gates_compute_in_float32():
    logits = logits_of(8).astype(jnp.bfloat16)
    for gate in (moe.top_k_softmax, moe.top_k_sigmoid):
        indices, weights = gate(logits, 2)
        assert weights.dtype == np.float32 and indices.dtype == np.int32
        np.testing.assert_array_equal(weights, gate(logits.astype(np.float32), 2)[1])


def test_scores_that_vanish():
    """Of experts that a bias chooses: their weights are those of scores in real numbers."""
    logits = np.array([[-46, -46, 9], [-88, -88, 9], [-200, -200, 9]], np.float32)
    limited = functools.partial(moe.group_limited_top_k, num_groups=1, top_groups=1)
    gates = {
        "top_k": moe.top_k_sigmoid, "sigmoid": functools.partial(limited, score="sigmoid"),
        "softmax": functools.partial(limited, score="softmax"),
    }  # fmt: skip

    def both(logits):
        def run(gate):
            def weights(logits):
                indices, weights = gate(logits, 2, bias=jnp.array([2.0, 2.0, 0.0]))
                return weights[:, 0].sum(), (indices, weights)

            return jax.grad(weights, has_aux=True)(logits)

        return {name: run(gate) for name, gate in gates.items()}

    for name, (gradient, (indices, weights)) in jax.jit(both)(logits).items():
        np.testing.assert_array_equal(indices, [[0, 1]] * 3, name)
        np.testing.assert_array_equal(weights, np.full((3, 2), 0.5), name)
        np.testing.assert_allclose(gradient, [[0.25, -0.25, 0]] * 3, err_msg=name)


def of_gates(logits, mask):
    """(indices, weights) of every gate, and weights of another scale, by name."""
    limited = functools.partial(
        moe.group_limited_top_k, logits, 3, num_groups=4, top_groups=2, mask=mask
    )
    bias = jnp.linspace(-1.0, 1.0, 12)
    return {
        "softmax": moe.top_k_softmax(logits, 3, mask=mask),
        "of all": moe.top_k_softmax(logits, 3, normalize=False, scale=2.0, mask=mask),
        "sigmoid": moe.top_k_sigmoid(logits, 3, bias=bias, mask=mask),
        "groups": limited(score="sigmoid", bias=bias),
        "groups softmax": limited(score="softmax", normalize=False),
    }


@jax.jit
def gates_and_gradients(logits, mask, ct):
    def weights(logits):
        found = of_gates(logits, mask)
        return {name: w for name, (_, w) in found.items()}, found

    _, pull, found = jax.vjp(weights, logits, has_aux=True)
    return found, pull(dict.fromkeys(found, ct))[0]


@given(st.integers(0, 1 << 16), st.sampled_from([np.nan, np.inf, -np.inf]))
@examples(12)
def test_gates_of_real_tokens(seed, padding):
    mask = drawn_mask(seed, 7)
    with X64():
        logits = logits_of(seed)
        ct = np.random.default_rng(seed + 1).normal(size=(7, 3))
        want, slope = gates_and_gradients(logits, None, np.where(mask[:, None], ct, 0))
        given, ct = (np.where(mask[:, None], a, padding) for a in (logits, ct))
        found, gradient = gates_and_gradients(given, mask, ct)
        for name, (indices, weights) in found.items():
            assert (indices.dtype, weights.dtype) == (np.int32, np.float64), name
            np.testing.assert_array_equal(indices[mask], want[name][0][mask], name)
            np.testing.assert_array_equal(weights[mask], want[name][1][mask], name)
            assert (indices[~mask] == -1).all() and (weights[~mask] == 0).all(), name
        np.testing.assert_allclose(gradient[mask], slope[mask], rtol=1e-12, atol=1e-12)
        assert not np.asarray(gradient)[~mask].any()


def test_gates_check_their_operands():
    logits = np.zeros((3, 8), np.float32)
    with pytest.raises(ValueError, match="k=9 must be from 1 to the 8 experts"):
        moe.top_k_softmax(logits, 9)
    with pytest.raises(ValueError, match=r"must have shape \[T, E\], got \(8,\)"):
        moe.top_k_sigmoid(logits[0], 1)
    with pytest.raises(TypeError, match="must be floating, got int32"):
        moe.top_k_softmax(logits.astype(np.int32), 1)
    with pytest.raises(ValueError, match=r"bias has shape \(7,\), and there are 8 experts"):
        moe.top_k_sigmoid(logits, 1, bias=np.zeros(7))
    limited = functools.partial(moe.group_limited_top_k, logits, 2)
    with pytest.raises(ValueError, match="num_groups=3 must divide the 8 experts"):
        limited(num_groups=3, top_groups=1)
    with pytest.raises(ValueError, match="top_groups=5 must be from 1 to num_groups=4"):
        limited(num_groups=4, top_groups=5)
    with pytest.raises(ValueError, match="must have the k=2 of a token"):
        limited(num_groups=8, top_groups=1)
    with pytest.raises(ValueError, match="score='tanh'"):
        limited(num_groups=2, top_groups=1, score="tanh")
    with pytest.raises(TypeError, match="top_k_softmax: mask must be bool, .*, got float32"):
        moe.top_k_softmax(logits, 2, mask=np.ones(3, np.float32))
    with pytest.raises(ValueError, match=r"mask must have shape \(3,\), .*, got \(3, 8\)"):
        limited(num_groups=2, top_groups=1, mask=np.ones((3, 8), bool))


# ---- Losses --------------------------------------------------------------------------------------


def test_load_balancing_loss():
    with X64():
        logits = logits_of(9, tokens=11, experts=5)
        indices = best(logits, 2)
        indices[3, 1] = -1
        p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
        f = np.array([(indices == e).sum() for e in range(5)]) / 11
        want = 5 * (f * p.mean(0)).sum()
        np.testing.assert_allclose(moe.load_balancing_loss(logits, indices), want)
        # f is a constant: the gradient is that of the mean softmax.
        got = jax.grad(moe.load_balancing_loss)(logits, indices)
        exact = jax.grad(lambda x: 5 * jnp.sum(f * jnp.mean(jax.nn.softmax(x), 0)))(logits)
        np.testing.assert_allclose(got, exact, atol=1e-12)
        # Balanced: k.
        even = np.arange(10)[:, None] % 5 + np.arange(2)
        np.testing.assert_allclose(moe.load_balancing_loss(np.zeros((10, 5)), even % 5), 2.0)


def test_z_loss():
    with X64():
        logits = logits_of(10)
        want = np.mean(np.log(np.exp(logits).sum(-1)) ** 2)
        np.testing.assert_allclose(moe.z_loss(logits), want)
        check_grads(jax.jit(moe.z_loss), (logits,), 1, ["fwd", "rev"])


def losses(logits, indices, axis_name=None, mask=None):
    balance = moe.load_balancing_loss(logits, indices, axis_name=axis_name, mask=mask)
    return balance + moe.z_loss(logits, axis_name=axis_name, mask=mask)


def dense_losses(logits, indices, mask):
    """Both by the definition: a one-hot form of all tokens, of which numbers say which count."""
    hot = jax.nn.one_hot(indices, logits.shape[1], dtype=logits.dtype)  # -1: zeros
    real = mask.astype(logits.dtype)
    chooses = real * jnp.max(hot, (1, 2))
    tokens, choosing = jnp.maximum(real.sum(), 1), jnp.maximum(chooses.sum(), 1)
    f = jnp.einsum("t,tke->e", real, hot) / choosing
    p = chooses @ jax.nn.softmax(logits) / choosing
    z = jnp.log(jnp.sum(jnp.exp(logits), -1))
    return logits.shape[1] * jnp.sum(f * p) + jnp.sum(real * z**2) / tokens


def drawn_tokens(seed, tokens=8):
    """(logits, indices with -1 and with tokens of nothing else, mask), 3 choices of 5 experts."""
    rng = np.random.default_rng(seed)
    indices = rng.integers(-1, 5, (tokens, 3)).astype(np.int32)
    indices[rng.random(tokens) < 0.3] = -1
    return rng.normal(size=(tokens, 5)), indices, drawn_mask(seed + 1, tokens)


with_gradient = jax.jit(jax.value_and_grad(losses), static_argnums=2)
dense_with_gradient = jax.jit(jax.value_and_grad(dense_losses))


@given(st.integers(0, 1 << 16), st.sampled_from([np.nan, np.inf, -np.inf]))
@examples(25)
def test_losses_of_real_tokens(seed, padding):
    with X64():
        logits, indices, mask = drawn_tokens(seed)
        want, slope = dense_with_gradient(logits, indices, mask)
        given = np.where(mask[:, None], logits, padding)
        loss, gradient = with_gradient(given, indices, None, mask)
        np.testing.assert_allclose(loss, want, rtol=1e-12)
        np.testing.assert_allclose(gradient, slope, rtol=1e-12, atol=1e-12)
        assert not np.asarray(gradient)[~mask].any()


def test_choices_of_no_expert_are_no_tokens():
    """Whether a mask says so too or not."""
    with X64():
        logits = logits_of(13, tokens=6, experts=4)
        indices = best(logits, 2).astype(np.int32)
        want = moe.load_balancing_loss(logits[:4], indices[:4])
        logits[4:], indices[4:] = np.nan, -1
        for mask in (None, np.arange(6) < 4):
            loss, slope = jax.value_and_grad(moe.load_balancing_loss)(logits, indices, mask=mask)
            np.testing.assert_allclose(loss, want, rtol=1e-12)
            assert np.asarray(slope[:4]).all() and not np.asarray(slope[4:]).any()
        none = functools.partial(losses, mask=np.zeros(6, bool))
        loss, slope = jax.value_and_grad(none)(logits, indices)
        assert loss == 0 and not np.asarray(slope).any()


@functools.cache
def losses_over_ranks():
    """Tokens are split over "dp"; along "ep" they are the same, the mask too or not."""
    mesh = make_mesh((2, 2), ("dp", "ep"))

    def over(mask_spec, check_vma):
        def call(logits, indices, mask):
            return losses(logits, indices, ("dp", "ep"), mask.reshape(-1))

        specs = (P("dp"), P("dp"), mask_spec)
        f = jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=check_vma)
        return jax.value_and_grad(f)

    @jax.jit
    def all_ways(logits, indices, mask, own):
        return [
            over(P("dp"), True)(logits, indices, mask),
            over(P("dp"), False)(logits, indices, mask),
            over(P("dp", "ep"), True)(logits, indices, own),
        ]

    return all_ways


@given(st.integers(0, 1 << 16))
@examples(12)
def test_losses_of_real_tokens_over_ranks(seed):
    """A mean over all real tokens, of which ranks have different numbers, or none."""
    with X64():
        logits, indices, mask = drawn_tokens(seed)
        own = np.random.default_rng(seed + 2).random((8, 2)) < 0.5
        given = np.where((mask | own.any(1))[:, None], logits, np.nan)
        found = losses_over_ranks()(given, indices, mask, own)
        want = dense_with_gradient(logits, indices, mask)
        twice = (np.concatenate([a, a]) for a in (logits, indices))
        loss, slope = dense_with_gradient(*twice, own.T.reshape(-1))
        apart = loss, slope[:8] + slope[8:]
        for got, exact in zip(found, (want, want, apart), strict=True):
            np.testing.assert_allclose(got[0], exact[0], rtol=1e-12)
            np.testing.assert_allclose(got[1], exact[1], rtol=1e-12, atol=1e-12)


def test_losses_check_their_operands():
    logits = np.zeros((3, 8), np.float32)
    with pytest.raises(ValueError, match=r"must be \[T, k\] of the 3 tokens"):
        moe.load_balancing_loss(logits, np.zeros((4, 2), np.int32))
    with pytest.raises(ValueError, match=r"z_loss: logits must have shape \[T, E\], got \(8,\)"):
        moe.z_loss(logits[0])
    with pytest.raises(TypeError, match="z_loss: mask must be bool, True for .*, got int32"):
        moe.z_loss(logits, mask=np.ones(3, np.int32))
    indices = np.zeros((3, 2), np.int32)
    with pytest.raises(ValueError, match=r"load_balancing_loss: mask must have shape \(3,\)"):
        moe.load_balancing_loss(logits, indices, mask=np.ones(4, bool))
    with pytest.raises(ValueError, match=r"statistics: mask must have shape \(3,\)"):
        moe.statistics(indices, moe.route(indices, 8), mask=np.ones((3, 2), bool))
