"""jflux.nn.mixture and the MoE layers against every expert on every token, in float64."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import LATENCY_HIDING, RANKS, examples, make_mesh
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import jflux.nn
from jflux import moe
from jflux.nn import _moe_exchange

X64 = functools.partial(jax.enable_x64, True)
B, S, D, F, E, K = 4, 4, 6, 8, 4, 2

pytestmark = [
    pytest.mark.wide,
    pytest.mark.skipif(RANKS < 4, reason="meshes of four ranks"),
]


def parameters(seed=0, gated=True, shared=False, bias=False):
    rng = np.random.default_rng(seed)

    def draw(*shape):
        return rng.normal(size=shape) / np.sqrt(shape[-2] if len(shape) > 1 else 1)

    found = {"router": draw(D, E), "up": draw(E, D, F), "down": draw(E, F, D)}
    if gated:
        found["gate"] = draw(E, D, F)
    if shared:
        found["shared"] = (draw(D, F), draw(F, D), *([draw(D, F)] if gated else []))
    if bias:
        found["router_bias"] = draw(E)
    return found


def dense(
    x, router, up, down, gate=None, router_bias=None, shared=None, select=moe.top_k_softmax,
    kept=1.0, mask=None,
):  # fmt: skip
    """The definition: (y, load balancing, z, tokens of each expert, dropped slots). kept: [T, k],
    0 for slots that are dropped. mask: [..., s], numbers."""
    act = jax.nn.silu
    tokens = x.reshape(-1, D)
    experts = router.shape[1]
    real = jnp.ones(len(tokens)) if mask is None else mask.reshape(-1).astype(x.dtype)
    logits = tokens @ router
    # The layers compute them in float32.
    indices, weights = select(logits, K, **({} if router_bias is None else {"bias": router_bias}))
    hot = real[:, None, None] * jax.nn.one_hot(indices, experts)  # -1: zeros
    share = jnp.einsum("tk,tke->te", weights * kept, hot)

    def expert(x, up, down, gate):
        h = act(x @ up) if gate is None else act(x @ gate) * (x @ up)
        return h @ down

    each = jax.vmap(expert, (None, 0, 0, None if gate is None else 0))(tokens, up, down, gate)
    y = jnp.einsum("te,etd->td", share, each)
    if shared is not None:
        y += real[:, None] * expert(tokens, *shared[:2], shared[2] if len(shared) > 2 else None)
    counts = jnp.sum(hot, (0, 1))
    real = jnp.max(hot, (1, 2))  # losses leave out tokens without an expert
    number = jnp.maximum(real.sum(), 1)
    balance = experts * jnp.sum(counts / number * (real @ jax.nn.softmax(logits) / number))
    z = jnp.sum(real * jax.nn.logsumexp(logits, -1) ** 2) / number
    dropped = jnp.sum((1 - kept) * jnp.sum(hot, 2))
    return y.reshape(x.shape), balance, z, counts, dropped


def kept_slots(
    x, params, capacity, groups=1, ep=1, tp=1, select=moe.top_k_softmax, mask=None, placement=None
):
    """[T, k] for `dense`, of x [b, s, d] whose first dimension is split over so many groups and
    ranks along ep, and the second over those along tp; each group fills its own experts, or the
    physical slots of a placement, which an expert's tokens take in turn. Tokens that the mask
    leaves out take no place."""
    bias = {} if "router_bias" not in params else {"bias": params["router_bias"]}
    choose = jax.jit(select, static_argnums=1)
    indices = np.array(choose(x.reshape(-1, x.shape[-1]) @ params["router"], K, **bias)[0])
    if mask is not None:
        indices[~mask.reshape(-1)] = -1
    b, s = x.shape[:2]
    at = np.arange(b * s).reshape(groups, ep, b // groups // ep, tp, s // tp)
    kept = np.zeros(indices.shape)
    experts = params["router"].shape[1]
    placement = np.arange(experts) if placement is None else placement
    for tokens in np.moveaxis(at, 3, 2).reshape(groups, -1):
        left = np.full(len(placement), capacity)
        turns = [itertools.cycle(np.flatnonzero(placement == e)) for e in range(experts)]
        for t in tokens:
            for j, expert in enumerate(indices[t]):
                if expert >= 0 and (slot := next(turns[expert], None)) is not None:
                    kept[t, j] = left[slot] > 0
                    left[slot] -= 1
    return kept


MESHES = {
    "tp": ((4,), ("tp",), {"axis_name": "tp"}, None),
    "whole": ((4,), ("tp",), {"axis_name": "tp", "sequence_parallel": False}, None),
    "ep": ((4,), ("ep",), {"expert_axis": "ep"}, None),
    "both": ((2, 2), ("ep", "tp"), {"axis_name": "tp", "expert_axis": "ep"}, None),
    "both whole": (
        (2, 2),
        ("tp", "ep"),
        {"axis_name": "tp", "expert_axis": "ep", "sequence_parallel": False},
        None,
    ),
    "data": ((2, 2), ("data", "tp"), {"axis_name": "tp"}, P("data")),
    "data and experts": ((2, 2), ("data", "ep"), {"expert_axis": "ep"}, P("data")),
}
#: How `kept_slots` sees them.
SPLIT = {
    "ep": {"ep": 4},
    "both": {"ep": 2, "tp": 2},
    "both whole": {"ep": 2},
    "data and experts": {"groups": 2, "ep": 2},
    "tp": {"tp": 4},
}
KINDS = {
    "gated": {},
    "plain": {"gated": False, "shared": True},
    "bias": {"shared": True, "bias": True},
}


def total(out, scale=1.0):
    y, balance, z, *_ = out
    return jnp.sum(jnp.sin(y)) + balance + 0.1 * z


GATHER, DISPATCH, FUSED = ({"exchange": one} for one in ("gather", "dispatch", "fused"))
AUTO: dict = {}


@pytest.mark.parametrize(
    ("mesh", "kind", "way"),
    [
        ("tp", "bias", GATHER),
        ("tp", "gated", {"capacity": 7}),
        ("whole", "plain", GATHER),
        ("ep", "bias", GATHER),
        ("ep", "bias", FUSED),
        ("ep", "bias", DISPATCH),
        ("ep", "plain", DISPATCH | {"capacity": 6}),
        ("both", "gated", GATHER),
        ("both", "plain", GATHER),
        ("both", "gated", FUSED | {"capacity": 7}),
        ("both", "plain", DISPATCH),
        ("both", "gated", {"capacity": 7}),
        ("both", "gated", DISPATCH | {"capacity": 7}),
        ("both whole", "bias", DISPATCH | {"capacity": 8}),
        ("both whole", "gated", DISPATCH),
        ("data", "plain", GATHER),
        ("data and experts", "gated", GATHER),
        ("data and experts", "gated", DISPATCH | {"capacity": 4}),
    ],
    ids=str,
)
def test_equals_every_expert_on_every_token(mesh, kind, way):
    split = SPLIT.get(mesh)
    shape, names, options, x_spec = MESHES[mesh]
    select = moe.top_k_sigmoid if kind == "bias" else moe.top_k_softmax
    with X64():
        params = parameters(**KINDS[kind])
        x = np.random.default_rng(1).normal(size=(B, S, D))

        def layer(x, params):
            return jflux.nn.mixture(
                x, **params, k=K, select=select, x_spec=x_spec, mesh=make_mesh(shape, names),
                **options, **way,
            )  # fmt: skip

        kept = 1.0
        if "capacity" in way:
            kept = kept_slots(x, params, way["capacity"], select=select, **split)
            assert 0 < kept.sum() < kept.size

        def exact(x, params):
            return dense(x, **params, select=select, kept=kept)

        for got, want in zip(jax.jit(layer)(x, params), exact(x, params), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
        got, want = (
            jax.jit(jax.grad(lambda x, p, f=f: total(f(x, p)), (0, 1)))(x, params)
            for f in (layer, exact)
        )
        for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-5)


def normalizing(logits, k):
    """A gate that knows of no mask: of zeros it makes NaN, and so does its derivative."""
    return moe.top_k_softmax(logits / jnp.sqrt(jnp.sum(logits**2, -1, keepdims=True)), k)


def some_choose_nothing(logits, k):
    """A gate by which some real tokens have no expert, and some one."""
    indices, weights = moe.top_k_sigmoid(logits, k, normalize=False)
    return jnp.where(weights > 0.6, indices, -1), weights


SELECTS = {
    "softmax": moe.top_k_softmax,
    "sigmoid": moe.top_k_sigmoid,
    "normalizing": normalizing,
    "some nothing": some_choose_nothing,
}


def masked_total(out, x, mask, ct):
    """As a model computes it, of tokens alone: beside a residual connection that is NaN elsewhere,
    so that y's cotangent is NaN there."""
    terms = jnp.where(mask[..., None], jnp.sin(jax.lax.stop_gradient(x) + out[0]) * ct, 0)
    return jnp.sum(terms) + out[1] + 0.1 * out[2]


@functools.cache
def masked_layer(mesh, kind, way, select, inside):
    """(values and gradients of a layer of (x, params, mask, ct), the same of `dense`)."""
    shape, names, axes, x_spec = MESHES[mesh]
    options = {"k": K, "select": SELECTS[select], **axes, **dict(way)}

    def layer(x, params, mask):
        if not inside:
            return jflux.nn.mixture(
                x, **params, mask=mask, x_spec=x_spec, mesh=make_mesh(shape, names), **options
            )
        ep = axes.get("expert_axis")
        tp = axes.get("axis_name")
        columns = P(ep, None, tp)
        specs = {"router": P(), "up": columns, "gate": columns, "down": P(ep, tp)}
        if "shared" in params:
            specs["shared"] = (P(None, tp), P(tp), P(None, tp))
        own = tuple(name for name in ("data", "ep") if name in names)
        tokens = P(own or None, tp if axes.get("sequence_parallel", True) else None)
        more = {"loss_axis": "data"} if "data" in names else {}
        return jax.shard_map(
            lambda x, params, mask: jflux.nn.mixture(x, **params, mask=mask, **more, **options),
            mesh=make_mesh(shape, names), in_specs=(tokens, specs, tokens),
            out_specs=jflux.nn.MixtureOutput(tokens, *[P()] * 4), check_vma=inside == "typed",
        )(x, params, mask)  # fmt: skip

    def of(f):
        def loss(x, params, mask, ct, *kept):
            out = f(x, params, mask, *kept)
            return masked_total(out, x, mask, ct), out

        return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))

    def exact(x, params, mask, kept):
        return dense(x, **params, select=SELECTS[select], kept=kept, mask=mask)

    return of(layer), of(exact)


@pytest.mark.parametrize(
    ("mesh", "kind", "way", "select", "inside"),
    [
        ("both", "shared", GATHER, "normalizing", None),
        ("both", "shared", DISPATCH | {"capacity": 4}, "softmax", None),
        ("both", "gated", DISPATCH, "normalizing", "typed"),
        ("both", "gated", {"capacity": 3}, "softmax", "typed"),
        ("both whole", "shared", DISPATCH, "some nothing", None),
        ("both whole", "shared", DISPATCH, "some nothing", "untyped"),
        ("both whole", "gated", {"capacity": 4}, "some nothing", "typed"),
        ("tp", "shared", GATHER, "some nothing", "untyped"),
        ("ep", "shared", DISPATCH | {"capacity": 3}, "sigmoid", "untyped"),
        ("both", "gated", FUSED, "some nothing", "typed"),
        ("data", "shared", GATHER, "normalizing", "typed"),
        ("data and experts", "gated", DISPATCH | {"capacity": 2}, "softmax", None),
        ("data and experts", "gated", DISPATCH, "some nothing", "typed"),
    ],
    ids=str,
)
@given(st.integers(0, 1 << 16), st.sampled_from([np.nan, np.inf]))
@examples(9)
def test_a_mask_leaves_tokens_out(mesh, kind, way, select, inside, seed, padding):
    rng = np.random.default_rng(seed)
    mask = rng.random((B, S)) < rng.choice([0, 0.4, 0.8, 1])
    real = mask[..., None]
    with X64():
        params = parameters(seed, shared=kind == "shared")
        x, ct = rng.normal(size=(2, B, S, D))
        kept = np.ones((B * S, K))
        if "capacity" in way:
            kept = kept_slots(
                x, params, way["capacity"], select=SELECTS[select], mask=mask, **SPLIT[mesh]
            )  # fmt: skip
        call, exact = masked_layer(mesh, kind, tuple(way.items()), select, inside)
        (_, want), slopes = exact(x, params, mask, ct, kept)
        given = np.where(real, x, padding)
        (_, got), gradients = call(given, params, mask, ct)
        assert not np.asarray(got.y)[~mask].any() and not np.asarray(gradients[0])[~mask].any()
        for g, w in zip(got, want, strict=True):
            np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-5)
        for g, w in zip(jax.tree.leaves(gradients), jax.tree.leaves(slopes), strict=True):
            np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("way", [GATHER, DISPATCH], ids=str)
def test_no_tracer_leaks(way):
    shape, names, options, _ = MESHES["both"]
    mesh, params = make_mesh(shape, names), parameters(shared=True)
    x = np.ones((B, S, D))

    def loss(x, params):
        return total(jflux.nn.mixture(x, **params, k=K, mesh=mesh, **options, **way))

    with jax.checking_leaks():
        jax.make_jaxpr(jax.value_and_grad(loss, (0, 1)))(x, params)


def test_tokens_that_some_ranks_have_too_count_once():
    """Along `expert_axis` they are copies, each with a slot of its own in a capacity."""
    mesh, params = make_mesh((2, 2), ("data", "ep")), parameters(3)
    x = np.random.default_rng(4).normal(size=(B, S, D)).astype(np.float32)
    experts = P("ep", None, None)
    specs = {"router": P(), "up": experts, "gate": experts, "down": experts}

    def call(spec, capacity):
        def body(x, params):
            return jflux.nn.mixture(
                x, **params, k=K, expert_axis="ep", loss_axis="data", capacity=capacity
            )

        out = jflux.nn.MixtureOutput(P(("ep", *(spec or ()))), *[P()] * 4)
        return jax.shard_map(body, mesh=mesh, in_specs=(spec, specs), out_specs=out)(x, params)

    y, *losses, counts, _ = dense(x, **params)
    split, whole = jax.jit(lambda: [call(P("data"), None), call(P(), 7)])()
    np.testing.assert_allclose(split.y, jnp.concatenate([y, y]), rtol=1e-4, atol=1e-5)
    for got in (split, whole):
        np.testing.assert_allclose(got[1:3], losses, rtol=1e-5)
        np.testing.assert_array_equal(got.tokens_per_expert, counts)
    assert (split.dropped, whole.dropped) == (0, jnp.maximum(2 * counts - 7, 0).sum())


@pytest.mark.parametrize("way", [GATHER, DISPATCH], ids=str)
@pytest.mark.parametrize("split", [("ep",), ("tp",), ()], ids=str)
def test_tokens_that_vary_over_some_axes(way, split):
    """Each rank has a y of its own of tokens that others have too, and gradients of all of them.
    The mask varies over one axis."""
    mesh, own = make_mesh((2, 2), ("ep", "tp")), P(("ep", "tp"))
    columns = P("ep", None, "tp")
    specs = {"router": P(), "up": columns, "gate": columns, "down": P("ep", "tp")}
    axes = {"expert_axis": "ep", "axis_name": "tp"}
    rng = np.random.default_rng(7)
    tokens = 3 * 2 ** len(split)
    x, ct = rng.normal(size=(tokens, D)), rng.normal(size=(12, D))
    mask = rng.random(6) < 0.6  # of each rank along ep

    def per_rank(x, params, mask):
        def one(x, params, mask):
            out = jflux.nn.mixture(x, **params, k=K, mask=mask, **axes, **way)
            return out[:4]

        return jax.shard_map(
            one, mesh=mesh, in_specs=(P(split or None), specs, P("ep")),
            out_specs=(own, P(), P(), P()),
        )(x, params, mask)  # fmt: skip

    def exact(x, params, mask):
        """All ranks' tokens; losses are of those that differ in x or in the mask."""
        sizes = [2 if name in split else 1 for name in ("ep", "tp")]
        everyones = jnp.broadcast_to(x.reshape(*sizes, 3, D), (2, 2, 3, D))
        masks = jnp.broadcast_to(mask.reshape(2, 1, 3), (2, 2, 3))
        y = dense(everyones, **params, mask=masks)[0].reshape(-1, D)
        apart = slice(None) if "tp" in split else slice(1)
        return y, *dense(everyones[:, apart], **params, mask=masks[:, apart])[1:4]

    def with_gradients(f):
        def loss(x, params):
            y, balance, z, counts = f(x, params, mask)
            return jnp.sum(jnp.sin(y) * ct) + balance + z, (y, balance, z, counts)

        return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))

    with X64():
        params = parameters(8)
        got, want = (with_gradients(f)(x, params) for f in (per_rank, exact))
        for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("way", [GATHER, DISPATCH], ids=str)
def test_inside_shard_map_with_remat_and_scan(way):
    """Two data-parallel groups of two ranks; each has its own losses without `loss_axis`. And other
    choices in the same program."""
    other = "ep" if way is DISPATCH else "tp"
    mesh = make_mesh((2, 2), ("data", other))
    columns = P("ep", None, None) if way is DISPATCH else P(None, None, "tp")
    specs = {"router": P(), "up": columns, "gate": columns,
             "down": columns if way is DISPATCH else P(None, "tp", None)}  # fmt: skip
    axes = {"expert_axis" if way is DISPATCH else "axis_name": other, "loss_axis": "data"}
    x_spec = P(("data", "ep")) if way is DISPATCH else P("data", "tp")

    def body(x, params):
        one = jax.checkpoint(lambda x: jflux.nn.mixture(x, **params, k=K, **axes, **way))

        def step(carry, _):
            x, loss = carry
            out = one(x)
            return (x + out.y, loss + out.load_balancing + 0.1 * out.z), out.tokens_per_expert

        (x, loss), counts = jax.lax.scan(step, (x, jnp.zeros(())), None, 2)
        return x, loss, counts

    f = jax.shard_map(
        body, mesh=mesh, in_specs=(x_spec, specs), out_specs=(x_spec, P(), P())
    )  # fmt: skip

    def exact(x, params):
        loss, counts = 0.0, []
        for _ in range(2):
            y, balance, z, count, _ = dense(x, **params)
            x, loss, counts = x + y, loss + balance + 0.1 * z, [*counts, count]
        return x, loss, jnp.stack(counts)

    def grad(f):
        def loss(x, params):
            y, balance, _ = f(x, params)
            return jnp.sum(jnp.sin(y)) + balance

        return jax.jit(jax.grad(loss, (0, 1)), compiler_options=LATENCY_HIDING)

    with X64():
        both, wanted = (jax.jit(f), grad(f)), (exact, grad(exact))
        for seed in (0, 5):
            params = parameters(seed)
            x = np.random.default_rng(seed + 2).normal(size=(B, S, D))
            for g, w in zip(both[0](x, params), wanted[0](x, params), strict=True):
                np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-5)
            got, want = (jax.tree.leaves(each[1](x, params)) for each in (both, wanted))
            for g, w in zip(got, want, strict=True):
                np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-5)
        assert all(g._cache_size() == 1 for g in both)


@pytest.mark.parametrize(
    ("shape", "tp", "capacity", "dtype"),
    [((3,), 1, None, np.float64), ((2, 3), 3, 5, np.float64), ((3, 2), 2, None, jnp.bfloat16)],
)
def test_all_exchanges_are_one_function(shape, tp, capacity, dtype):
    """With sizes that nothing divides: 5 tokens of a rank, 6 experts of 7 units of a rank."""
    if np.prod(shape) > RANKS:
        pytest.skip("more ranks than devices")
    names = ("ep", "tp")[: len(shape)]
    axes = {"expert_axis": "ep", "axis_name": "tp" if tp > 1 else None}
    rng = np.random.default_rng(6)
    params = {
        "router": rng.normal(size=(D, 6)),
        **{n: rng.normal(size=(6, D, 7 * tp)) for n in ("up", "gate")},
        "down": rng.normal(size=(6, 7 * tp, D)),
    }
    columns = P("ep", None, "tp") if tp > 1 else P("ep")
    specs = {"router": P(), "up": columns, "gate": columns,
             "down": P("ep", "tp") if tp > 1 else P("ep")}  # fmt: skip
    x, ct = rng.normal(size=(2, 5 * int(np.prod(shape)), D))
    tokens = P(names)

    def with_gradients(way):
        def f(x, params, ct):
            def one(x, params):
                out = jflux.nn.mixture(x, **params, k=4, capacity=capacity, **axes, exchange=way)
                return out.y, out[1:]

            y, pull, rest = jax.vjp(one, x, params, has_aux=True)
            directions = jax.tree.map(jnp.cos, (x, params))
            dy = jax.jvp(lambda *args: one(*args)[0], (x, params), directions)[1]
            return (y, dy), pull(ct), rest

        return jax.jit(
            jax.shard_map(
                f, mesh=make_mesh(shape, names), in_specs=(tokens, specs, tokens),
                out_specs=((tokens, tokens), (tokens, specs), P()),
            )
        )  # fmt: skip

    with X64():
        args = jax.tree.map(lambda a: jnp.asarray(a, dtype), (x, params, ct))
        args[1]["router"] = jnp.asarray(params["router"], np.float32)
        gather, *others = (with_gradients(way)(*args) for way in ("gather", "dispatch", "fused"))
        for other in others:
            assert int(other[2][3]) == (0 if capacity is None else int(gather[2][3]))
            assert (int(other[2][3]) > 0) == (capacity is not None)
            for g, d in zip(jax.tree.leaves(gather), jax.tree.leaves(other), strict=True):
                assert g.dtype == d.dtype
                wide = np.asarray(g, np.float64)
                loose = {"rtol": 0, "atol": 0.02 * np.abs(wide).max()}
                close = {"rtol": 1e-6, "atol": 1e-6} if dtype == np.float64 else loose
                np.testing.assert_allclose(np.asarray(d, np.float64), wide, **close)


@pytest.mark.parametrize("recipe", ["tensor", "row", "block"])
def test_a_dispatch_in_8_bits(recipe):
    """By a recipe tokens travel in 8 bits, to the same experts; by row and block with the same
    scales as after a gather."""
    rng, width, experts = np.random.default_rng(8), 128, 2 * RANKS
    shapes = {"router": (width, experts), "up": (experts, width, 128),
              "gate": (experts, width, 128), "down": (experts, 128, width)}  # fmt: skip
    params = {
        n: jnp.asarray(rng.normal(size=s) * s[-2] ** -0.5, jnp.bfloat16) for n, s in shapes.items()
    }
    specs = {n: P() if n == "router" else P("ep") for n in params}
    x, ct = (jnp.asarray(rng.normal(size=(RANKS, 6, width)), jnp.bfloat16) for _ in range(2))
    options = {"k": 2, "expert_axis": "ep", "recipe": getattr(jflux.Recipe, recipe)}

    def with_gradients(x, params, ct, exchange):
        f = functools.partial(jflux.nn.mixture, **options, exchange=exchange)
        y, pull = jax.vjp(lambda x, params: f(x, **params).y, x, params)
        return y, *pull(ct)

    def run(exchange):
        return jax.jit(
            jax.shard_map(
                functools.partial(with_gradients, exchange=exchange),
                mesh=make_mesh((RANKS,), ("ep",)), in_specs=(P("ep"), specs, P("ep")),
                out_specs=(P("ep"), P("ep"), specs),
            )
        )  # fmt: skip

    f = run("dispatch")
    text = str(jax.make_jaxpr(f)(x, params, ct))
    assert "f8_e4m3fn[" in text[text.index("jflux_moe_dispatch") - 400 :][:800]
    got, want = (jax.tree.leaves(g(x, params, ct)) for g in (f, run("gather")))
    for g, w in zip(got, want, strict=True):
        wide = np.asarray(w, np.float64)
        room = 0.2 if recipe == "tensor" else 0.03  # scales of other rows
        np.testing.assert_allclose(
            np.asarray(g, np.float64), wide, rtol=0, atol=room * np.abs(wide).max()
        )


@pytest.mark.parametrize(
    ("experts", "k", "options", "says"),
    [
        (2, 2, {"few": 12}, "dispatch: 12 tokens are few"),
        (8, 1, {"few": 12, "fused": False}, "gather: .* several ops"),
        (2, 2, {}, r"gather: .* 2 of 2, lie on 1.00 of 2 ranks, and a dispatch \(one kernel each"),
        (2, 1, {}, "dispatch: .* 1 of 2, lie on 0.50 of 2 ranks"),
        (8, 1, {"fused": False}, r"gather: .* \(several ops, since .*\) is worth it below 0.5"),
        (2, 2, {"exchange": "dispatch"}, "dispatch: the caller's choice"),
        (2, 1, {"exchange": "fused"}, "fused: the caller's choice"),
    ],
)
def test_says_how_tokens_travel(experts, k, options, says, monkeypatch):
    options = dict(options)
    monkeypatch.setattr(_moe_exchange, "FEW_TOKENS", options.pop("few", 11))
    fused = options.pop("fused", True)
    params = {"router": jnp.ones((8, experts)), "up": jnp.ones((experts, 8, 8)),
              "down": jnp.ones((experts, 8, 8))}  # fmt: skip
    specs = {n: P() if n == "router" else P("ep") for n in params}
    f = jax.shard_map(
        lambda x, params: jflux.nn.mixture(x, **params, k=k, expert_axis="ep", **options).y,
        mesh=make_mesh((2,), ("ep",)), in_specs=(P("ep"), specs), out_specs=P("ep"),
    )  # fmt: skip
    with jflux.config(fused=fused):
        found = jflux.explain(f, jnp.ones((4, 3, 8)), params)
    (one,) = [call for call in found if call.op == "nn.mixture"]
    assert re.fullmatch(says + ".*", one.plan.reason), one.plan.reason


@pytest.mark.parametrize("quantized", [False, True])
def test_fused_takes_no_8_bits(quantized):
    params = {"router": jnp.ones((128, 2)), "up": jnp.ones((2, 128, 128)),
              "down": jnp.ones((2, 128, 128))}  # fmt: skip
    block, options = jflux.Recipe.block, {"k": 1, "expert_axis": "ep", "exchange": "fused"}

    def call(x, params):
        if quantized:
            params |= {n: block.quantize_weight(params[n]) for n in ("up", "down")}
        return jflux.nn.mixture(x, **params, **options, recipe=None if quantized else block).y

    specs = {n: P() if n == "router" else P("ep") for n in params}
    f = jax.shard_map(
        call, mesh=make_mesh((2,), ("ep",)), in_specs=(P("ep"), specs), out_specs=P("ep")
    )
    with pytest.raises(ValueError, match="exchange='fused' takes no recipe, nor weights"):
        jax.eval_shape(f, jnp.ones((4, 128)), params)


def test_one_device_needs_no_mesh():
    with X64():
        params = parameters(shared=True)
        x = np.random.default_rng(3).normal(size=(B, S, D))
        got = jflux.nn.mixture(x, **params, k=K)
        for g, w in zip(got, dense(x, **params), strict=True):
            np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-5)


def test_wrong_operands():
    params = {name: a.astype(np.float32) for name, a in parameters().items()}
    x = np.zeros((B, S, D + 1), np.float32)
    with pytest.raises(
        ValueError, match=r"x \(4, 4, 7\) must be \[..., s, d\] and router \(6, 4\)"
    ):
        jflux.nn.mixture(x, **params, k=K)
    with pytest.raises(ValueError, match="devices of mesh axes .* do not divide its dimension 0"):
        jflux.nn.mixture(
            x[..., :D], **{**params, "up": params["up"][:3]}, k=K, expert_axis="ep",
            mesh=make_mesh((2,), ("ep",)),
        )  # fmt: skip


def test_options_that_do_not_fit():
    params = {name: a.astype(np.float32) for name, a in parameters().items()}
    x = np.zeros((B, S, D), np.float32)
    refused = functools.partial(jflux.nn.mixture, x, **params, k=K)
    with pytest.raises(ValueError, match="exchange='sent' must be one of .*'dispatch'"):
        refused(exchange="sent")
    with pytest.raises(
        ValueError, match="'dispatch' sends tokens along expert_axis, which is None"
    ):
        refused(exchange="dispatch", axis_name="tp")
    with pytest.raises(TypeError, match=r"capacity must be an int or None, got 1\.5"):
        refused(capacity=1.5)
    with pytest.raises(ValueError, match="capacity=0 must be at least 1"):
        refused(capacity=0)
    with pytest.raises(ValueError, match="chooses among 4 experts, and up .* has 3 on each of 1"):
        jflux.nn.mixture(x, **{**params, "up": params["up"][:3]}, k=K)
    with pytest.raises(TypeError, match="mixture: mask must be bool, .*, got float32"):
        refused(mask=x[..., 0])
    with pytest.raises(ValueError, match=r"mask must have shape \(4, 4\), .*, got \(4,\)"):
        refused(mask=np.ones(4, bool))
    with pytest.raises(TypeError, match=r"select must return \(indices, weights\), got .* float32"):
        refused(select=jax.lax.top_k)


# ---- Layers --------------------------------------------------------------------------------------

AXES = {
    "router": ("embed", None),
    "up": ("expert", "embed", "mlp"),
    "gate": ("expert", "embed", "mlp"),
    "down": ("expert", "mlp", "embed"),
    "shared_up": ("embed", "mlp"),
    "shared_down": ("mlp", "embed"),
    "shared_gate": ("embed", "mlp"),
}
WEIGHTS = {"load_balancing_weight": 0.5, "z_weight": 0.25}


def of_layer(params):
    shared = tuple(params.pop(f"shared_{name}") for name in ("up", "down", "gate"))
    return {**params, "shared": shared}


@pytest.mark.parametrize("way", [AUTO, DISPATCH | {"capacity": 6}], ids=str)
def test_linen(way):
    pytest.importorskip("flax")
    from jflux.nn import linen

    mesh = make_mesh((2, 2), ("ep", "tp"))
    layer = linen.MoE(E, F, K, expert_axis="ep", shared_features=F, **WEIGHTS, **way)
    x = np.random.default_rng(4).normal(size=(B, S, D)).astype(np.float32)
    with jax.set_mesh(mesh):
        variables = jax.jit(layer.init)(jax.random.key(0), x)
        boxed = variables["params"]
        assert {name: box.names for name, box in boxed.items()} == AXES
        params = {name: box.unbox() for name, box in boxed.items()}
        # Each expert is drawn by itself, with its own fan-in.
        assert 0.5 < float(jnp.std(params["down"]) * np.sqrt(F)) < 1.5
        y, sown = jax.jit(functools.partial(layer.apply, mutable=["losses", "intermediates"]))(
            {"params": boxed}, x
        )
    params = {name: np.asarray(a) for name, a in params.items()}
    kept = kept_slots(x, params, way.get("capacity", B * S), ep=2, tp=2)
    assert (kept.sum() < kept.size) == bool(way)
    want = dense(x, **of_layer(dict(params)), kept=kept)
    np.testing.assert_allclose(y, want[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(sown["losses"]["load_balancing"][0], 0.5 * want[1], rtol=1e-5)
    np.testing.assert_allclose(sown["losses"]["z"][0], 0.25 * want[2], rtol=1e-5)
    np.testing.assert_array_equal(sown["intermediates"]["tokens_per_expert"][0], want[3])
    np.testing.assert_array_equal(sown["intermediates"]["dropped"][0], want[4])

    # Inside shard_map, one rank's parameters.
    rules = jflux.nn.logical_axis_rules("tp", expert_axis="ep")
    specs = {name: P(*(dict(rules).get(a) for a in axes)) for name, axes in AXES.items()}
    per_rank = jax.shard_map(
        lambda params, x: layer.apply({"params": params}, x),
        mesh=mesh, in_specs=(specs, P("ep", "tp")), out_specs=P("ep", "tp"),
    )  # fmt: skip
    np.testing.assert_allclose(jax.jit(per_rank)(params, x), want[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("way", [AUTO, DISPATCH | {"capacity": 6}], ids=str)
def test_nnx(way):
    pytest.importorskip("flax")
    from flax import nnx

    from jflux.nn import nnx as layers

    mesh = make_mesh((2, 2), ("ep", "tp"))
    x = np.random.default_rng(5).normal(size=(B, S, D)).astype(np.float32)
    with jax.set_mesh(mesh):
        layer = layers.MoE(
            D, E, F, K, expert_axis="ep", shared_features=F, rngs=nnx.Rngs(0), **WEIGHTS, **way
        )
        assert {name: getattr(layer, name).out_sharding for name in layer.names} == AXES
        assert layer.up[...].sharding.spec == P("ep", None, "tp")

        @nnx.jit
        def call(layer, x):
            y = layer(x)
            return y, nnx.pop(layer, layers.Loss), nnx.pop(layer, nnx.Intermediate)

        y, losses, seen = call(layer, x)
    params = {name: np.asarray(getattr(layer, name)[...]) for name in layer.names}
    kept = kept_slots(x, params, way.get("capacity", B * S), ep=2, tp=2)
    assert (kept.sum() < kept.size) == bool(way)
    want = dense(x, **of_layer(params), kept=kept)
    np.testing.assert_allclose(y, want[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(
        jax.tree.leaves(losses["load_balancing"])[0], 0.5 * want[1], rtol=1e-5
    )
    np.testing.assert_allclose(jax.tree.leaves(losses["z"])[0], 0.25 * want[2], rtol=1e-5)
    np.testing.assert_array_equal(jax.tree.leaves(seen["tokens_per_expert"])[0], want[3])
    np.testing.assert_array_equal(jax.tree.leaves(seen["dropped"])[0], want[4])


@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_layers_take_a_mask(kind):
    """On global arrays; what pads is NaN."""
    pytest.importorskip("flax")
    from flax import nnx

    from jflux.nn import linen
    from jflux.nn import nnx as layers

    rng = np.random.default_rng(9)
    x, mask = rng.normal(size=(B, S, D)).astype(np.float32), rng.random((B, S)) < 0.6
    given = np.where(mask[..., None], x, np.nan)
    options = {"expert_axis": "ep", "shared_features": F, "capacity": 4, **WEIGHTS}
    with jax.set_mesh(make_mesh((2, 2), ("ep", "tp"))):
        if kind == "linen":
            layer = linen.MoE(E, F, K, **options)
            params = jax.jit(layer.init)(jax.random.key(0), x)["params"]
            apply = functools.partial(layer.apply, mutable=["losses", "intermediates"])
            y, sown = jax.jit(apply)({"params": params}, given, mask)
            params = {name: np.asarray(box.unbox()) for name, box in params.items()}
            sown = sown["losses"] | sown["intermediates"]
        else:
            layer = layers.MoE(D, E, F, K, rngs=nnx.Rngs(0), **options)
            params = {name: np.asarray(getattr(layer, name)[...]) for name in layer.names}

            @nnx.jit
            def call(layer, x, mask):
                return layer(x, mask), nnx.pop(layer, (layers.Loss, nnx.Intermediate))

            y, sown = call(layer, given, mask)
    kept = kept_slots(x, params, 4, ep=2, tp=2, mask=mask)
    y_want, balance, z, *counts = dense(x, **of_layer(params), kept=kept, mask=mask)
    assert counts[1] > 0
    np.testing.assert_allclose(y, y_want, rtol=1e-4, atol=1e-5)
    wanted = {"load_balancing": 0.5 * balance, "z": 0.25 * z}
    wanted |= dict(zip(("tokens_per_expert", "dropped"), counts, strict=True))
    for name, want in wanted.items():
        np.testing.assert_allclose(jax.tree.leaves(sown[name])[0], want, rtol=1e-5)


def test_a_bias_for_the_choice_alone():
    pytest.importorskip("flax")
    from jflux.nn import linen

    layer = linen.MoE(
        E, F, K, axis_name=None, gated=False, use_router_bias=True, select=moe.top_k_sigmoid
    )
    x = np.random.default_rng(6).normal(size=(B, S, D)).astype(np.float32)
    params = jax.jit(layer.init)(jax.random.key(0), x)["params"]
    params = {name: box.unbox() for name, box in params.items()}
    assert set(params) == {"router", "router_bias", "up", "down"}
    assert params["router_bias"].shape == (E,)
    grads = jax.grad(lambda p: jnp.sum(layer.apply({"params": p}, x) ** 2))(params)
    assert not np.asarray(grads["router_bias"]).any()
    assert np.asarray(grads["router"]).any()


@pytest.mark.parametrize("exchange", ["gather", "dispatch"])
def test_products_expect_a_rank_s_share_of_rows(exchange):
    """Of the rows that all tokens would take."""
    params = {"router": jnp.ones((8, 4)), "up": jnp.ones((4, 8, 8)), "down": jnp.ones((4, 8, 8))}
    specs = {n: P() if n == "router" else P("ep") for n in params}
    f = jax.shard_map(
        lambda x, params: jflux.nn.mixture(
            x, **params, k=2, expert_axis="ep", exchange=exchange
        ).y,
        mesh=make_mesh((2,), ("ep",)), in_specs=(P("ep"), specs), out_specs=P("ep"),
    )  # fmt: skip
    text = jax.jit(f).lower(jnp.ones((4, 3, 8)), params).as_text()
    assert {float(a) for a in re.findall(r"share = ([0-9.e+-]+) : f64", text)} == {0.5}
