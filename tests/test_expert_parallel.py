"""jflux.moe_dispatch and jflux.moe_combine, against a dense form in float64."""

import functools
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import (
    LATENCY_HIDING,
    PLATFORM,
    RANKS,
    compiled_text,
    examples,
    fused_calls,
    make_mesh,
    run,
)
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

import jflux
from jflux import testing
from jflux._stress.calls import per_device, x64_if

# ---- What should happen, in numpy ----------------------------------------------------------------


pytestmark = pytest.mark.wide


def choices(rng, kind, ranks, tokens, k, experts):
    """[ranks, T, k] of one kind."""
    shape = (ranks, tokens, k)
    indices = rng.permuted(np.broadcast_to(np.arange(experts), (*shape[:2], experts)), axis=2)
    indices = indices[:, :, :k].astype(np.int32)
    match kind:
        case "one expert":
            indices[:] = -1
            indices[:, :, k // 2] = experts - 1
        case "some without":  # experts, tokens, slots
            indices[indices % 2 == 1] = -1
            indices[:, ::2] = -1
        case "one rank":
            indices %= max(1, experts // ranks)
        case "duplicates":
            indices = rng.integers(0, min(2, experts), shape).astype(np.int32)
        case "nothing":
            indices[:] = -1
    return indices


def expected(indices, experts, capacity):
    """(for each expert its rows (rank, token) in order; slots that stay, [ranks, T, k])."""
    rows, kept = [[] for _ in range(experts)], np.zeros(indices.shape, bool)
    for at in np.ndindex(indices.shape):
        expert, token = indices[at], at[:2]
        if not 0 <= expert < experts:
            continue
        if token not in rows[expert]:
            if capacity is not None and len(rows[expert]) >= capacity:
                continue
            rows[expert].append(token)
        kept[at] = True
    return rows, kept


def operands(seed, kind, ranks, tokens, k, experts, width=6, dtype=np.float64):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((ranks, tokens, width)).astype(dtype)
    weights = rng.random((ranks, tokens, k)).astype(np.float64 if dtype == np.float64 else "f4")
    return x, choices(rng, kind, ranks, tokens, k, experts), weights


KINDS = ("random", "one expert", "some without", "one rank", "duplicates", "nothing")
# ranks, tokens, k, experts of a rank
SIZES = ((1, 5, 2, 4), (2, 7, 3, 2), (3, 5, 2, 1), (RANKS, 3, 4, 2))


def _dispatch(mesh, experts, **options):
    f = functools.partial(jflux.moe_dispatch, num_experts=experts, axis_name="tp", **options)
    return jax.jit(per_device(mesh, f))


# ---- Rows ----------------------------------------------------------------------------------------


WAYS = (
    {"capacity": None, "alignment": 1, "layout": "expert"},
    {"capacity": None, "alignment": 4, "layout": "masked"},
    {"capacity": 2, "alignment": 4, "layout": "expert"},
    {"capacity": 3, "alignment": 1, "layout": "masked"},
)


@pytest.mark.parametrize("way", range(len(WAYS)))
@pytest.mark.parametrize("size", SIZES[1:3], ids=str)
def test_rows_of_the_experts(size, way):
    mesh, experts = make_mesh(size[:1]), size[0] * size[3]
    f = _dispatch(mesh, experts, **WAYS[way])
    for kind in KINDS:
        x, indices, weights = operands(1, kind, *size[:3], experts)
        testing.poison_workspaces()
        with x64_if(np.float64):
            d = run(f, x, indices, weights)
        _check_rows(d, x, indices, weights, experts, **WAYS[way])


def _check_rows(d, x, indices, weights, experts, capacity, alignment, layout):
    ranks, tokens, k = indices.shape
    local = experts // ranks
    rows, kept = expected(indices, experts, capacity)
    counts = np.array([len(r) for r in rows]).reshape(ranks, local)
    np.testing.assert_array_equal(d.group_sizes, counts)
    everybody = indices.reshape(-1, k)
    chosen = [(everybody == e).any(1).sum() for e in range(experts)]
    np.testing.assert_array_equal(d.statistics.tokens_per_expert, [chosen] * ranks)
    np.testing.assert_array_equal(d.statistics.dropped, ((indices >= 0) & ~kept).sum((1, 2)))
    most = -(-(tokens * ranks if capacity is None else capacity) // alignment) * alignment
    if layout == "masked":
        assert d.rows.shape == (ranks, local, most, x.shape[2])
        starts = np.tile(np.arange(local) * most, (ranks, 1))
        np.testing.assert_array_equal(d.padded_sizes, np.full_like(counts, most))
    else:
        bound = min(k, local) * ranks * tokens + local * (alignment - 1)
        bound = -(-bound // alignment) * alignment
        assert d.rows.shape[1] == (bound if capacity is None else min(bound, local * most))
        padded = -(-counts // alignment) * alignment
        np.testing.assert_array_equal(d.padded_sizes, padded)
        starts = np.cumsum(padded, 1) - padded
    want = np.zeros((ranks, d.handle.slot.shape[1], x.shape[2]))
    want_weights = np.zeros(want.shape[:2])
    for expert, its in enumerate(rows):
        rank, e = divmod(expert, local)
        for i, (src, t) in enumerate(its):
            want[rank, starts[rank, e] + i] = x[src, t]
            shared = weights[src, t][indices[src, t] == expert]
            want_weights[rank, starts[rank, e] + i] = shared.sum()
    np.testing.assert_array_equal(d.rows.reshape(want.shape), want)
    np.testing.assert_allclose(d.weights.reshape(want_weights.shape), want_weights, rtol=1e-15)


# ---- A layer, and its gradients ------------------------------------------------------------------


def _expert_of_rows(d):
    """The expert of each row, or the last one for rows of none."""
    experts = jnp.arange(d.padded_sizes.shape[0])
    return jnp.repeat(experts, d.padded_sizes, total_repeat_length=d.rows.shape[0])


def layer(x, indices, weights, w, axis_name="tp", residual=None, scaled=False, **options):
    """Experts ``tanh(x @ w)``; w is [E_local, H, F]. scaled: the experts apply the weights."""
    experts = w.shape[0] * lax.axis_size(axis_name)
    d = jflux.moe_dispatch(x, indices, weights, num_experts=experts, axis_name=axis_name, **options)
    if options.get("rest") == "undefined":
        rows = d.rows.reshape(-1, d.rows.shape[-1])
        y = jnp.tanh(jflux.grouped_matmul(rows, w, d.padded_sizes, rest="undefined"))
        return jflux.moe_combine(y, d.handle, weights=weights, axis_name=axis_name)
    if d.rows.ndim == 3:
        y = jnp.tanh(jnp.einsum("ech,ehf->ecf", d.rows, w))
    else:
        # The gradient of w[expert] would be a sum in no order, on GPUs.
        one_hot = jax.nn.one_hot(_expert_of_rows(d), w.shape[0], dtype=w.dtype)
        y = jnp.tanh(jnp.einsum("rh,re,ehf->rf", d.rows, one_hot, w))
    if scaled:
        y, weights = y * d.weights[..., None], None
    return jflux.moe_combine(y, d.handle, weights=weights, residual=residual, axis_name=axis_name)


def dense(x, indices, weights, w, kept):
    """The same of all ranks' tokens, with every expert for every token."""
    y = jnp.tanh(jnp.einsum("nth,ehf->ntef", x, w))
    one_hot = jax.nn.one_hot(indices, w.shape[0], dtype=x.dtype) * kept[..., None]
    return jnp.einsum("ntk,ntke,ntef->ntf", weights, one_hot, y)


def _with_gradients(options):
    """(x, indices, weights, w, ct) -> y, and the gradients of x, weights and w."""

    def f(x, indices, weights, w, ct):
        y, pull = jax.vjp(lambda x, s, w: layer(x, indices, s, w, **options), x, weights, w)
        return y, *pull(ct)

    return f


def _weights_of(seed, experts, width=6, out=5):
    return np.random.default_rng(seed).standard_normal((experts, width, out))


@pytest.mark.parametrize(
    "size, options",
    [
        (SIZES[0], {"scaled": True}),
        (SIZES[1], {"alignment": 4}),
        (SIZES[1], {"layout": "masked", "capacity": 3, "scaled": True}),
        (SIZES[2], {"capacity": 2}),
        (SIZES[3], {}),
        (SIZES[0], {"partial_sums": True}),
        (SIZES[1], {"partial_sums": True, "rest": "undefined"}),
        (SIZES[1], {"partial_sums": True, "rest": "undefined", "alignment": 4}),
        (SIZES[1], {"partial_sums": True, "rest": "undefined", "layout": "masked", "capacity": 3}),
        (SIZES[1], {"partial_sums": True, "alignment": 4, "scaled": True}),
        (SIZES[1], {"partial_sums": True, "layout": "masked", "capacity": 3}),
        (SIZES[2], {"partial_sums": True}),
        (SIZES[3], {"partial_sums": True, "capacity": 2}),
    ],
    ids=str,
)
def test_a_layer_and_its_gradients(size, options):
    ranks, local = size[0], size[3]
    experts, mesh = ranks * local, make_mesh((ranks,))
    w = _weights_of(3, experts)
    split = w.reshape(ranks, local, *w.shape[1:])
    ct = np.random.default_rng(4).standard_normal((ranks, size[1], w.shape[2]))

    f = jax.jit(per_device(mesh, _with_gradients(options)))
    for kind in KINDS:
        x, indices, weights = operands(2, kind, *size[:3], experts)
        _, kept = expected(indices, experts, options.get("capacity"))
        with x64_if(np.float64):
            got = run(f, x, indices, weights, split, ct)
            y, pull = jax.vjp(functools.partial(_dense_of, indices, kept), x, weights, w)
            want = (y, *pull(ct))
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a.reshape(b.shape), b, rtol=1e-11, atol=1e-12)


def _dense_of(indices, kept, x, weights, w):
    return dense(x, indices, weights, w, kept)


# ---- Any shape -----------------------------------------------------------------------------------


@st.composite
def cases(draw):
    """A layer of any shape. Few of them: each is compiled."""
    ranks = draw(st.integers(1, RANKS))
    local = draw(st.integers(1, 3))
    experts = ranks * local
    options = {
        "capacity": draw(st.none() | st.integers(1, 4)),
        "alignment": draw(st.sampled_from([1, 3, 4])),
        "layout": draw(st.sampled_from(["expert", "masked"])),
        "partial_sums": draw(st.booleans()),
    }
    tokens, k = draw(st.integers(1, 9)), draw(st.integers(1, min(5, experts)))
    return (ranks, tokens, k, local), options, draw(st.integers(0, 1 << 16))


@pytest.mark.timeout(1200)  # of the nightly profile
@given(cases())
@examples(4)
def test_any_layer(case):
    """Value and gradients of T tokens, k choices, E experts on 1 to 8 ranks, for choices of all
    kinds in one program, with late ranks and workspaces full of NaN."""
    size, options, seed = case
    ranks, tokens, k, local = size
    experts = ranks * local
    w = _weights_of(seed, experts)
    ct = np.random.default_rng(seed + 1).standard_normal((ranks, tokens, w.shape[2]))
    f = jax.jit(per_device(make_mesh((ranks,)), _with_gradients(options)))
    for kind in KINDS:
        x, indices, weights = operands(seed, kind, ranks, tokens, k, experts)
        _, kept = expected(indices, experts, options["capacity"])
        testing.poison_workspaces()
        with x64_if(np.float64), testing.planted_faults(max_delay_us=500):
            got = run(f, x, indices, weights, w.reshape(ranks, local, *w.shape[1:]), ct)
            y, pull = jax.vjp(functools.partial(_dense_of, indices, kept), x, weights, w)
            want = (y, *pull(ct))
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a.reshape(b.shape), b, rtol=1e-11, atol=1e-12)
    assert f._cache_size() == 1


@pytest.mark.skipif(RANKS < 4, reason="two groups of several ranks")
def test_layers_of_different_sizes_under_remat_and_scan():
    """Two in each step, and both a mesh of two groups and a residual."""
    ranks = RANKS // 2
    mesh = make_mesh((2, ranks), ("dp", "tp"))
    sizes = {"first": (ranks * 2, 6, 6), "second": (ranks, 6, 6)}
    w = {name: _weights_of(i, *size) for i, (name, size) in enumerate(sizes.items())}
    tokens, k = 5, 2
    rng = np.random.default_rng(7)
    x = rng.standard_normal((2, ranks, tokens, 6))
    indices = {
        name: choices(rng, "random", 2 * ranks, tokens, k, size[0]).reshape(2, ranks, tokens, k)
        for name, size in sizes.items()
    }
    weights = rng.random((2, ranks, tokens, k))

    def loss(moe):
        def f(x, indices, weights, w):
            @jax.checkpoint
            def step(x, _):
                x = moe(x, indices["first"], weights, w["first"], residual=x)
                x = moe(x, indices["second"], weights, w["second"], residual=x)
                return x, jnp.sum(jnp.sin(x), -1)

            return jnp.sum(lax.scan(step, x, None, length=3)[1])

        return jax.grad(f, (0, 2, 3))

    def plain(x, indices, weights, w, residual):
        return residual + dense(x, indices, weights, w, np.ones(indices.shape))

    with x64_if(np.float64):
        split = {n: np.broadcast_to(v.reshape(ranks, -1, 6, 6), (2, ranks, len(v) // ranks, 6, 6))
                 for n, v in w.items()}  # fmt: skip
        f = jax.jit(per_device(mesh, loss(layer)), compiler_options=LATENCY_HIDING)
        dx, dweights, dw = run(f, x, indices, weights, split)
        for group in range(2):
            own = {name: i[group] for name, i in indices.items()}
            want = jax.jit(loss(plain))(x[group], own, weights[group], w)
            np.testing.assert_allclose(dx[group], want[0], rtol=1e-10, atol=1e-11)
            np.testing.assert_allclose(dweights[group], want[1], rtol=1e-10, atol=1e-11)
            for name, value in want[2].items():
                np.testing.assert_allclose(
                    dw[name][group].reshape(value.shape), value, rtol=1e-10, atol=1e-11
                )


def test_types_under_check_vma():
    """Gradients of what is the same on all ranks are summed over them."""
    mesh = make_mesh((2,))
    x, indices, weights = operands(5, "random", 2, 4, 2, 4)
    w = _weights_of(6, 4)

    def f(x, indices, weights, w, scale):
        def loss(scale):
            return jnp.sum(layer(x * scale, indices, weights, w) ** 2)

        return jax.grad(lambda s: lax.psum(loss(s), "tp"))(scale)

    with x64_if(np.float64):
        got = jax.jit(
            jax.shard_map(
                lambda x, i, s, w, scale: f(x[0], i[0], s[0], w, scale), mesh=mesh,
                in_specs=(*[P("tp")] * 4, P()), out_specs=P(),
            )
        )(x, indices, weights, w, 1.5)  # fmt: skip
        want = jax.grad(
            lambda s: jnp.sum(dense(x * s, indices, weights, w, np.ones(indices.shape)) ** 2)
        )(1.5)
    np.testing.assert_allclose(got, want, rtol=1e-11)


@pytest.mark.skipif(RANKS < 4, reason="a mesh of four ranks")
@pytest.mark.parametrize("partial_sums", [False, True])
def test_operands_that_vary_over_some_axes(partial_sums):
    """Each is the same along other axes: all ranks' dispatch is of their own tokens, and a gradient
    is the sum of those along the axes on which its operand is the same."""
    axes, tokens, k = ("a", "b"), 3, 2
    mesh, experts = make_mesh((2, 2), axes), 8
    x, indices, weights = operands(7, "some without", 2, tokens, k, experts)
    weights, w = weights[0], _weights_of(8, experts)
    ct = np.random.default_rng(9).standard_normal((2, 2, tokens, w.shape[2]))

    def per_rank(x, weights, w):
        def one(x, indices, weights, w):
            y = layer(x[0], indices[0], weights, w, axis_name=axes, partial_sums=partial_sums)
            return y[None, None]

        f = jax.shard_map(
            one, mesh=mesh, in_specs=(P("a"), P("b"), P(), P(axes)), out_specs=P("a", "b")
        )
        return jnp.sum(f(x, indices, weights, w) * ct)

    def exact(x, weights, w):
        everyones = (jnp.repeat(x, 2, 0), np.tile(indices, (2, 1, 1)), jnp.stack([weights] * 4))
        return jnp.sum(dense(*everyones, w, np.ones((4, tokens, k))).reshape(ct.shape) * ct)

    with x64_if(np.float64):
        got, want = (
            jax.jit(jax.value_and_grad(f, (0, 1, 2)))(x, weights, w) for f in (per_rank, exact)
        )
        for g, a in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(g, a, rtol=1e-11, atol=1e-11)


# ---- Forward mode, and derivatives of any order --------------------------------------------------


def _jvp(f):
    return lambda *args: jax.jvp(f, args, tuple(jnp.cos(3 * a) for a in args))


def _jvp_of_each(f):
    """With respect to one operand, the others having no tangent at all."""

    def each(*args):
        found = []
        for i, a in enumerate(args):

            def one(a, i=i):
                return f(*args[:i], a, *args[i + 1 :])

            found.append(jax.jvp(one, (a,), (jnp.cos(3 * a),))[1])
        return found

    return each


def _linearize(f):
    """Of a batch of tangents: what jacfwd does."""

    def batch(*args):
        directions = [jnp.stack([jnp.cos(3 * a), a]) for a in args]
        y, pushforward = jax.linearize(f, *args)
        return y, jnp.moveaxis(jax.vmap(pushforward)(*directions), 0, -1)

    return batch


def _gradient(f):
    return jax.grad(lambda *args: jnp.sum(jnp.sin(f(*args))), (0, 1, 2))


def _forward_over_reverse(f):
    return _jvp(_gradient(f))


def _reverse_over_forward(f):
    return _gradient(lambda *args: _jvp(f)(*args)[1])


def _third(f):
    return lambda *args: _jvp(_reverse_over_forward(f))(*args)[1]


def _scanned(f, remat):
    step = jax.checkpoint(f) if remat else f

    def steps(x, weights, w):
        def one(x, _):
            y = step(x, weights, w)
            return jnp.sin(jnp.concatenate([x[..., :1], y], -1)), None

        return lax.scan(one, x, None, length=2)[0]

    return steps


def _over_a_batch(f):
    """vmap over x and weights."""

    def batched(x, weights, w):
        xs, both = (jnp.stack([a, jnp.sin(a)]) for a in (x, weights))
        return jnp.moveaxis(jax.vmap(f, (0, 0, None))(xs, both, w), 0, -1)

    return batched


TRANSFORMS = {
    "jvp": _jvp,
    "jvp of each": _jvp_of_each,
    "linearize": _linearize,
    "forward over reverse": _forward_over_reverse,
    "reverse over forward": _reverse_over_forward,
    "third": _third,
    "scan": lambda f: _forward_over_reverse(_scanned(f, remat=False)),
    "scan of checkpoint": lambda f: _forward_over_reverse(_scanned(f, remat=True)),
    "vmap": lambda f: (
        lambda *args: [_jvp(_over_a_batch(f))(*args), _gradient(_over_a_batch(f))(*args)]
    ),
}


@pytest.mark.parametrize(
    ("transform", "check_vma"),
    [*((name, True) for name in TRANSFORMS), ("jvp", False), ("reverse over forward", False)],
)
def test_derivatives_against_the_dense_form(transform, check_vma):
    ranks, local = 3, 2
    experts = ranks * local
    w = _weights_of(3, experts)
    split = w.reshape(ranks, local, *w.shape[1:])
    mesh, of = make_mesh((ranks,)), TRANSFORMS[transform]
    for kind, options in (
        ("random", {}), ("duplicates", {"capacity": 3, "scaled": True}),
        ("duplicates", {"capacity": 3, "partial_sums": True}),
    ):  # fmt: skip
        x, indices, weights = operands(2, kind, ranks, 4, 2, experts)
        _, kept = expected(indices, experts, options.get("capacity"))

        def local_form(x, indices, weights, w, options=options):
            return of(lambda x, s, w: layer(x, indices, s, w, **options))(x, weights, w)

        f = jax.jit(per_device(mesh, local_form, check_vma=check_vma))
        with x64_if(np.float64):
            got = run(f, x, indices, weights, split)
            want = of(functools.partial(_dense_of, indices, kept))(x, weights, w)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert a.any()
            np.testing.assert_allclose(a.reshape(b.shape), b, rtol=1e-10, atol=1e-11)


def test_tangents_against_finite_differences():
    """Of the op itself, along one direction of all operands."""
    mesh, experts = make_mesh((2,)), 4
    w = _weights_of(3, experts).reshape(2, 2, 6, 5)
    x, indices, weights = operands(2, "some without", 2, 5, 3, experts)
    args, step = (x, weights, w), 1e-5
    along = tuple(np.cos(3 * a) for a in args)
    f = jax.jit(per_device(mesh, lambda x, s, w, i: layer(x, i, s, w)))
    with x64_if(np.float64):
        _, got = jax.jvp(lambda *args: f(*args, indices), args, along)
        ahead, behind = (
            np.asarray(f(*(a + s * d for a, d in zip(args, along, strict=True)), indices))
            for s in (step, -step)
        )
    assert np.abs(got).max() > 1
    np.testing.assert_allclose(got, (ahead - behind) / (2 * step), rtol=1e-7, atol=1e-8)


def test_hessian():
    """Forward over reverse, of all ranks' tokens."""
    mesh, experts = make_mesh((2,)), 4
    w = _weights_of(3, experts)
    x, indices, weights = operands(2, "random", 2, 3, 2, experts)
    f = per_device(mesh, lambda x, s, w, i: layer(x, i, s, w))

    def loss(x, weights):
        return jnp.sum(jnp.sin(f(x, weights, w.reshape(2, 2, 6, 5), indices)))

    def exact(x, weights):
        return jnp.sum(jnp.sin(dense(x, indices, weights, w, np.ones(indices.shape))))

    with x64_if(np.float64):
        got, want = (jax.jit(jax.hessian(g, (0, 1)))(x, weights) for g in (loss, exact))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-11)


def test_batches_of_choices_have_both_modes():
    """vmap over the choices too: each entry has a handle of its own."""
    mesh, experts = make_mesh((2,)), 4
    w = _weights_of(3, experts)
    drawn = [operands(seed, kind, 2, 4, 2, experts) for seed, kind in enumerate(KINDS[:3])]
    x, indices, weights = (np.stack(a, 1) for a in zip(*drawn, strict=True))

    def local(x, indices, weights, w):
        def one(x, indices, weights):
            return _jvp(lambda x, s, w: layer(x, indices, s, w))(x, weights, w)

        def loss(x, weights):
            return jnp.sum(
                jnp.sin(jax.vmap(lambda x, i, s: layer(x, i, s, w))(x, indices, weights))
            )

        return jax.vmap(one)(x, indices, weights), jax.grad(loss, (0, 1))(x, weights)

    with x64_if(np.float64):
        got = run(jax.jit(per_device(mesh, local)), x, indices, weights, w.reshape(2, 2, 6, 5))
        for i in range(x.shape[1]):
            f = functools.partial(_dense_of, indices[:, i], np.ones(indices[:, i].shape))
            args = x[:, i], weights[:, i], w
            want = _jvp(f)(*args), _gradient(f)(*args)[:2]
            for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
                np.testing.assert_allclose(a[:, i], b, rtol=1e-10, atol=1e-11)


def test_tangents_have_the_types_of_values():
    """bfloat16 rows, float32 weights and sums."""
    mesh, experts = make_mesh((2,)), 4
    w = _weights_of(3, experts).astype(jnp.bfloat16)
    x, indices, weights = operands(2, "random", 2, 5, 2, experts, dtype=jnp.bfloat16)

    def local(x, indices, weights, w):
        return _jvp(lambda x, s, w: layer(x, indices, s, w))(x, weights, w)

    f = jax.jit(per_device(mesh, local))
    y, dy = run(f, x, indices, weights, w.reshape(2, 2, 6, 5))
    assert y.dtype == dy.dtype == jnp.bfloat16 and weights.dtype == np.float32
    with x64_if(np.float64):
        wide = (a.astype(np.float64) for a in (x, weights, w))
        kept = np.ones(indices.shape)
        want = _jvp(functools.partial(_dense_of, indices, kept))(*wide)
    for a, b in zip((y, dy), want, strict=True):
        np.testing.assert_allclose(a.astype(np.float64), b, rtol=0, atol=0.03 * np.abs(b).max())


def _calls(f, policy=None):
    """Of one layer on two ranks."""
    x, indices, weights = operands(2, "random", 2, 5, 2, 4, dtype=np.float32)
    w = _weights_of(3, 4).astype(np.float32).reshape(2, 2, 6, 5)

    def one(x, indices, weights, w):
        d = jflux.moe_dispatch(x, indices, weights, num_experts=4, axis_name="tp")
        rows = checkpoint_name(d.rows, "rows")
        y = jnp.tanh(jnp.einsum("rh,rhf->rf", rows, w[_expert_of_rows(d)]))
        return jflux.moe_combine(y, d.handle, weights=weights, axis_name="tp")

    def local(x, indices, weights, w):
        g = functools.partial(lambda i, x, s, w: one(x, i, s, w), indices)
        return f(g if policy is None else jax.checkpoint(g, policy=policy))(x, weights, w)

    text = compiled_text(per_device(make_mesh((2,)), local), x, indices, weights, w)
    return Counter(fused_calls(text))["ragged_all_to_all"]


@pytest.mark.parametrize("partial_sums", [False, True])
def test_tokens_of_8_bits(partial_sums):
    """Quantized tokens there, and wider results back."""

    def f(x, indices, weights, dtype):
        d = jflux.moe_dispatch(
            x.astype(dtype), indices, weights, num_experts=RANKS, partial_sums=partial_sums,
            axis_name="tp",
        )  # fmt: skip
        assert d.rows.dtype == dtype
        return jflux.moe_combine(
            d.rows.astype(jnp.float32), d.handle, weights=weights, axis_name="tp"
        )

    rng = np.random.default_rng(3)
    x = rng.integers(-8, 9, (RANKS, 5, 4)).astype(np.float32)  # exact in 8 bits
    indices, weights = choices(rng, "duplicates", RANKS, 5, 2, RANKS), np.ones((RANKS, 5, 2))
    got, want = (
        jax.jit(per_device(make_mesh((RANKS,)), functools.partial(f, dtype=dtype)))(
            x, indices, weights.astype(np.float32)
        )
        for dtype in (jnp.float8_e4m3fn, jnp.float32)
    )
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(got, 2 * x)


@pytest.mark.parametrize(
    "options",
    [{"partial_sums": True}, {"partial_sums": False}, {"partial_sums": True, "layout": "masked"}],
    ids=str,
)
@pytest.mark.parametrize("form", ["tensor", "row", "block", "int8"])
def test_tokens_with_scales(form, options):
    """Rows come as they would in 16 bits, each with its scales, and those of no token are zeros."""
    rng = np.random.default_rng(4)
    dtype = jnp.int8 if form == "int8" else jnp.float8_e4m3fn
    block = {"tensor": (-1, -1), "row": (1, -1), "block": (1, 128), "int8": (1, -1)}[form]
    quantize = jflux.Format(dtype, block)
    x = rng.normal(size=(RANKS, 6, 272)) * 2.0 ** rng.integers(-6, 6, (RANKS, 6, 1))
    indices = choices(rng, "some without", RANKS, 6, 3, 2 * RANKS)
    weights = rng.random((RANKS, 6, 3)).astype(np.float32)

    def f(x, indices, weights):
        dispatch = functools.partial(
            jflux.moe_dispatch, num_experts=2 * RANKS, axis_name="tp", **options
        )
        scaled = quantize.quantize(x)
        both = dispatch(scaled, indices, weights), dispatch(x, indices, weights, quantize=quantize)
        wide = dispatch(scaled.dequantize(), indices, weights)
        return *(one.rows for one in both), wide.rows, *(one.weights for one in (*both, wide))

    got = jax.jit(per_device(make_mesh((RANKS,)), f))(x.astype(jnp.bfloat16), indices, weights)
    given, made, wide, *row_weights = got
    assert given.scale.shape[-1] == {"block": 3}.get(form, 1)
    for one, w in zip((given, made), row_weights, strict=False):
        assert one.values.dtype == dtype and one.values.shape == wide.shape
        np.testing.assert_array_equal(one.dequantize(), wide)
        np.testing.assert_array_equal(w, row_weights[2])


@pytest.mark.parametrize("partial_sums", [False, True])
def test_no_tokens_with_scales(partial_sums):
    def f(x, indices, weights, one):  # XLA cannot partition a program that gets no element
        d = jflux.moe_dispatch(
            x, indices, weights, num_experts=RANKS, partial_sums=partial_sums, axis_name="tp",
            quantize=jflux.Recipe.block.x,
        )  # fmt: skip
        return d.rows, one * d.group_sizes

    empty = jnp.zeros((RANKS, 0, 256)), jnp.zeros((RANKS, 0, 2), int), jnp.zeros((RANKS, 0, 2))
    one = np.ones((RANKS, 1), np.int32)
    rows, sizes = jax.jit(per_device(make_mesh((RANKS,)), f))(*empty, one)
    assert rows.shape == (RANKS, 0, 256) and rows.scale.shape == (RANKS, 0, 2)
    assert not np.asarray(sizes).any()


def test_scaled_tokens_have_no_gradient_of_their_own():
    scaled = jflux.quantize(jnp.ones((4, 128)), jnp.float8_e4m3fn, block=(1, -1))
    _refused(TypeError, "x is a jflux.Scaled already", x=scaled, quantize=jflux.Recipe.block.x)
    _refused(TypeError, "quantize must be a jflux.Format or None", quantize="block")

    def loss(scale):
        one = jflux.Scaled(scaled.values, scale)
        indices, weights = np.zeros((4, 1), np.int32), np.ones((4, 1), np.float32)
        d = jflux.moe_dispatch(one, indices, weights, num_experts=RANKS, axis_name="tp")
        return jnp.sum(d.rows.scale)

    f = per_device(make_mesh((RANKS,)), jax.grad(loss))
    with pytest.raises(TypeError, match="has no derivative"):
        jax.jit(f)(np.ones((RANKS, 1, 1), np.float32))


@pytest.mark.parametrize("partial_sums", [False, True])
def test_it_sorts_by_counting(partial_sums):
    """XLA's sorts, searches and scatters take GPUs many small kernels each."""
    args = operands(2, "random", 2, 5, 2, 4, dtype=np.float32)

    def f(x, indices, weights):
        options = {"num_experts": 4, "partial_sums": partial_sums, "axis_name": "tp"}
        d = jflux.moe_dispatch(x, indices, weights, **options)
        return jflux.moe_combine(d.rows, d.handle, weights=weights, axis_name="tp")

    text = jax.jit(per_device(make_mesh((2,)), f)).lower(*args).compile().as_text()
    assert text.count("jflux_moe_route") >= 4
    assert not re.findall(r" (sort|while|scatter)\(", text)


@pytest.mark.skipif(PLATFORM != "cpu", reason="GPUs take the reference")
def test_what_each_mode_sends():
    """A forward pass: experts, rows, and the rows back."""
    names = jax.checkpoint_policies.save_only_these_names
    assert _calls(lambda f: f) == 3
    # Back: the rows' gradient out, with its weights, and back, with those of the weights.
    assert _calls(_gradient) == 3 + 4
    assert _calls(lambda f: jax.grad(lambda *args: jnp.sum(jnp.sin(f(*args))))) == 3 + 3
    # Forward: rows; and what the tangents of the experts' rows, and of the weights, make. (For the
    # latter XLA takes the rows that came back for the values.)
    assert _calls(_jvp) <= 3 + 3
    # Under remat the experts and the rows are sent again, and the rows not where they are kept.
    # (What comes back is of no use to a gradient.)
    assert _calls(_gradient, names()) == 3 + 2 + 4
    assert _calls(_gradient, names("rows")) == 3 + 1 + 4


# ---- Bits, and programs --------------------------------------------------------------------------


def _sums(ranks, x, indices, weights):
    """Of copies, by as many ranks, of all tokens in one row."""

    def f(x, indices, weights):
        d = jflux.moe_dispatch(x, indices, weights, num_experts=8, axis_name="tp")
        return jflux.moe_combine(3 * d.rows, d.handle, weights=weights, axis_name="tp")

    parts = [a.reshape(ranks, -1, a.shape[-1]) for a in (x, indices, weights)]
    return run(jax.jit(per_device(make_mesh((ranks,)), f)), *parts).reshape(x.shape)


def test_partial_sums_are_rounded_once_on_each_rank():
    """Bit for bit the sums on ranks, in the order of top-k, and their sum, in the order in which
    top-k names the ranks. A token comes back once from a rank."""
    ranks, tokens, k, local = 2, 9, 5, 4
    mesh, experts = make_mesh((ranks,)), ranks * local
    x, indices, weights = operands(8, "random", ranks, tokens, k, experts, dtype=jnp.bfloat16)
    weights = weights.astype(np.float32)

    def f(x, indices, weights):
        options = {"num_experts": experts, "partial_sums": True, "axis_name": "tp"}
        d = jflux.moe_dispatch(x, indices, weights, **options)
        return jflux.moe_combine(3 * d.rows, d.handle, weights=weights, axis_name="tp"), d.handle

    y, handle = run(jax.jit(per_device(mesh, f)), x, indices, weights)
    for rank, t in np.ndindex(ranks, tokens):
        row, total = (3 * x[rank, t]).astype(np.float32), np.float32(0)
        homes = indices[rank, t] // local
        for home in dict.fromkeys(homes.tolist()):
            part = np.zeros_like(row)
            for w in weights[rank, t][homes == home]:
                part = part + w * row
            total = total + part.astype(jnp.bfloat16).astype(np.float32)
        np.testing.assert_array_equal(y[rank, t], total.astype(jnp.bfloat16))
    homes = [len(set(slots)) for slots in (indices // local).reshape(-1, k).tolist()]
    assert handle.out.sent.sum() == sum(homes) == (handle.sent_row >= 0).sum()


def test_the_same_bits_in_every_run_and_on_any_number_of_ranks():
    x, indices, weights = operands(8, "random", 1, 8, 5, 8, dtype=jnp.bfloat16)
    args = x[0], indices[0], weights[0]
    first = _sums(2, *args)
    for ranks in (1, 2, 4, 8) if RANKS == 8 else (1, 2):
        np.testing.assert_array_equal(_sums(ranks, *args), first)


def test_sums_are_rounded_once():
    """Numbers whose sum in bfloat16 would lose the small ones, in the order of top-k."""
    mesh = make_mesh((2,))
    indices = np.tile(np.arange(4, dtype=np.int32), (2, 3, 1))
    x = np.ones((2, 3, 2), jnp.bfloat16)

    def f(x, indices):
        d = jflux.moe_dispatch(x, indices, jnp.ones((3, 4)), num_experts=4, axis_name="tp")
        factors = jnp.array([256, 1, 1, -256]).reshape(2, 2)[lax.axis_index("tp")]
        y = d.rows * factors[_expert_of_rows(d)][:, None].astype(d.rows.dtype)
        return jflux.moe_combine(y, d.handle, residual=x, axis_name="tp")

    y = run(jax.jit(per_device(mesh, f)), x, indices)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_array_equal(y.astype(np.float32), 3)


def test_one_program_with_other_choices():
    """Choices are data: one compilation, also where ranks get no token."""
    mesh, experts = make_mesh((4,)), 8
    w = _weights_of(9, experts).astype(np.float32)
    f = jax.jit(per_device(mesh, layer))
    for seed, kind in enumerate(KINDS):
        x, indices, weights = operands(seed, kind, 4, 6, 3, experts, dtype=np.float32)
        testing.poison_workspaces()
        y = run(f, x, indices, weights, w.reshape(4, 2, 6, 5))
        with x64_if(np.float64):
            want = dense(*(a.astype(np.float64) if a.dtype != np.int32 else a
                           for a in (x, indices, weights, w)), np.ones(indices.shape))  # fmt: skip
        np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-5)
    assert f._cache_size() == 1


def test_handles_are_integers():
    x, indices, weights = operands(1, "random", 2, 4, 2, 4, dtype=np.float32)
    d = run(_dispatch(make_mesh((2,)), 4), x, indices, weights)
    assert all(leaf.dtype == np.int32 for leaf in jax.tree.leaves(d.handle))
    assert d.weights.dtype == np.float32


@pytest.mark.skipif(
    jax.__version_info__[:2] == (0, 11),  # plain lax too; on CPUs and GPUs alike, 0.12 compiles it
    reason="XLA of jaxlib 0.11 crashes when it compiles a shard_map over an empty array",
)
@pytest.mark.parametrize("layout", ["expert", "masked"])
@pytest.mark.parametrize("partial_sums", [False, True])
@pytest.mark.parametrize("shape", [(0, 6), (4, 0)])
def test_nothing_to_send(shape, partial_sums, layout):
    def f(x, indices, weights, one):  # XLA cannot partition a program that gets no element
        d = jflux.moe_dispatch(
            x, indices, weights, num_experts=4, layout=layout, partial_sums=partial_sums,
            axis_name="tp",
        )  # fmt: skip
        y = jflux.moe_combine(d.rows, d.handle, weights=weights, axis_name="tp")
        return one * d.group_sizes, y

    tokens, _ = shape
    indices = np.tile(np.arange(2, dtype=np.int32), (2, tokens, 1))
    arrays = np.zeros((2, *shape), np.float32), indices, np.ones((2, tokens, 2), np.float32)
    arrays += (np.ones((2, 1), np.int32),)
    sizes, y = run(jax.jit(per_device(make_mesh((2,)), f)), *arrays)
    assert y.shape == (2, *shape)
    np.testing.assert_array_equal(sizes, [[2 * tokens] * 2, [0, 0]])


# ---- Errors --------------------------------------------------------------------------------------


def test_an_index_out_of_range_is_dropped_and_counted():
    mesh = make_mesh((2,))
    x, indices, weights = operands(1, "random", 2, 4, 2, 4, dtype=np.float32)
    indices[0, 1, 0], indices[0, 2, 1], indices[1, 0, 0] = 4, -2, -1
    d = run(_dispatch(mesh, 4), x, indices, weights)
    np.testing.assert_array_equal(d.statistics.dropped, [2, 0])
    rows, _ = expected(indices, 4, None)
    np.testing.assert_array_equal(d.group_sizes.ravel(), [len(r) for r in rows])


@pytest.mark.skipif(PLATFORM != "cpu", reason="a fault ends a GPU's context")
def test_overflow_as_an_error():
    mesh = make_mesh((2,))
    x, indices, weights = operands(1, "one expert", 2, 4, 2, 4, dtype=np.float32)
    f = _dispatch(mesh, 4, capacity=6, on_overflow="error")
    error, message = jax.errors.JaxRuntimeError, "moe_dispatch: {} of the slots .* of rank {} have "
    with pytest.raises(error, match=message.format(2, 1) + "no place.*on_overflow"):
        run(f, x, indices, weights)
    indices[1, 1:3] = -1  # now they fit
    d = run(f, x, indices, weights)
    np.testing.assert_array_equal(d.group_sizes, [[0, 0], [0, 6]])
    indices[0, 0, 0] = 17
    with pytest.raises(error, match=message.format(1, 0) + ".*mend topk_indices"):
        run(f, x, indices, weights)


def _refused(error, match, **changes):
    arrays = {"x": np.zeros((4, 6), "f4"), "topk_indices": np.zeros((4, 2), "i4"),
              "topk_weights": np.zeros((4, 2), "f4"), "num_experts": 4}  # fmt: skip
    f = functools.partial(jflux.moe_dispatch, **(arrays | changes), axis_name="tp")
    with pytest.raises(error, match=match):
        jax.eval_shape(
            jax.shard_map(lambda: f().rows, mesh=make_mesh((2,)), in_specs=(), out_specs=P("tp"))
        )


def test_operands_and_options_that_do_not_fit():
    _refused(ValueError, r"x must be floating \[T, H\], got float32 \(4,\)", x=np.zeros(4, "f4"))
    _refused(ValueError, "x must be floating.*int32", x=np.zeros((4, 6), "i4"))
    _refused(TypeError, "topk_indices must be integers, got float32",
             topk_indices=np.zeros((4, 2), "f4"))  # fmt: skip
    _refused(ValueError, r"topk_indices must have shape \[T, k\] with the T=4",
             topk_indices=np.zeros((5, 2), "i4"))  # fmt: skip
    _refused(TypeError, "topk_weights must be floating", topk_weights=np.zeros((4, 2), "i4"))
    _refused(ValueError, r"topk_weights must have topk_indices' shape \(4, 2\)",
             topk_weights=np.zeros((4, 3), "f4"))  # fmt: skip
    _refused(ValueError, "num_experts=5 must be a positive multiple of the 2", num_experts=5)
    _refused(TypeError, "num_experts must be an int", num_experts=4.0)
    many = {"topk_indices": np.zeros((4, 5), "i4"), "topk_weights": np.zeros((4, 5), "f4")}
    _refused(ValueError, "has 5 experts for each token, which must be from 1 to", **many)
    _refused(ValueError, "capacity=0 must be at least 1", capacity=0)
    _refused(TypeError, "alignment must be an int", alignment=2.5)
    _refused(ValueError, "layout='rows' must be one of", layout="rows")
    _refused(ValueError, "on_overflow='raise' must be one of", on_overflow="raise")
    _refused(ValueError, "rest='nan' must be one of", rest="nan")


@pytest.mark.skipif(RANKS < 4, reason="two axes of two ranks")
@pytest.mark.parametrize(
    "options", [{}, {"partial_sums": True}, {"partial_sums": True, "dtype": jnp.float64}]
)
@pytest.mark.parametrize("other", ["ep", ("ep", "node")])
def test_combine_refuses_another_axis(options, other):
    """Of a divisor of the ranks: several slices to each of them would be a valid exchange. And of
    as many ranks in another order."""
    options = dict(options)
    with x64_if(dtype := options.pop("dtype", jnp.float32)):
        x, indices, weights = operands(4, "random", 4, 3, 2, 8, dtype=dtype)

        def f(x, indices, weights):
            d = jflux.moe_dispatch(
                x, indices, weights, num_experts=8, axis_name=("node", "ep"), **options
            )
            return jflux.moe_combine(d.rows, d.handle, weights=weights, axis_name=other)

        mesh = make_mesh((2, 2), ("node", "ep"))
        rows = P(("node", "ep"))
        f = jax.shard_map(f, mesh=mesh, in_specs=rows, out_specs=rows)
        with pytest.raises(ValueError, match=r"the dispatch was over \('node', 'ep'\): it must be"):
            jax.eval_shape(f, *(a.reshape(-1, a.shape[-1]) for a in (x, indices, weights)))


def test_combine_refuses_what_is_not_of_the_dispatch():
    x, indices, weights = operands(1, "random", 2, 4, 2, 4, dtype=np.float32)

    def f(match, y=None, **options):
        def local(x, indices, weights):
            d = jflux.moe_dispatch(x, indices, weights, num_experts=4, axis_name="tp")
            rows = d.rows if y is None else y(d.rows)
            return jflux.moe_combine(rows, d.handle, axis_name="tp", **options)

        with pytest.raises((ValueError, TypeError), match=match):
            jax.eval_shape(per_device(make_mesh((2,)), local), x, indices, weights)

    f(r"y must have the 16 rows of the dispatch.*got \(15, 6\)", lambda y: y[1:])
    f("y must be floating, got int32", lambda y: y.astype(jnp.int32))
    f(r"weights must be floating \(4, 2\)", weights=np.zeros((4, 3), "f4"))
    f(r"residual must be \(4, 6\), got \(4, 7\)", residual=np.zeros((4, 7), "f4"))
