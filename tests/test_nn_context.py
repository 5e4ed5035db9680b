"""Attention layers over a sequence that is split while attending, beside and without tensor
parallelism: values and gradients of the whole layer on one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import RANKS, make_mesh
from jax.sharding import PartitionSpec as P

import jflux
import jflux.nn as jnn
from jflux import _config
from jflux.nn import _attention_fn

flax = pytest.importorskip("flax")
from flax import linen as nn  # noqa: E402
from flax import nnx  # noqa: E402

import jflux.nn.linen as jlinen  # noqa: E402
import jflux.nn.nnx as jnnx  # noqa: E402

pytestmark = pytest.mark.wide

B, S, D, C = 2, 24, 12, 4  # sequences, positions, width, elements of a head


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


def operands(heads, groups, seed=0):
    """x, query, key, value, out."""
    rng = np.random.default_rng(seed)
    shapes = (B, S, D), (D, heads, C), (D, groups, C), (D, groups, C), (heads, C, D)
    return [rng.standard_normal(shape) / shape[0] ** 0.5 for shape in shapes]


def plain(
    x, query, key, value, out, sinks=None, slopes=None, *, ids=None, rotate=True, causal=True
):
    """With sinks the softmax has one more column, which is dropped. `rotate` may be positions."""
    q, k, v = (jnp.einsum("bsd,dhc->bshc", x, w) for w in (query, key, value))
    if rotate is not False:
        at = jnp.arange(S) if rotate is True else rotate
        q, k = jnn.Rotary()(q, at), jnn.Rotary()(k, at)
    group = q.shape[2] // k.shape[2]
    k, v = jnp.repeat(k, group, 2), jnp.repeat(v, group, 2)
    scores = jnp.einsum("bshc,bthc->bhst", q, k) / C**0.5
    if slopes is not None:
        ahead = np.arange(S) - np.arange(S)[:, None]
        scores += jax.lax.stop_gradient(slopes)[:, None, None] * ahead
    may = jnp.tri(S, dtype=bool)[None] if causal else jnp.ones((1, S, S), bool)
    if ids is not None:
        may = may & (ids[:, :, None] == ids[:, None, :])
    scores = jnp.where(may[:, None], scores, -jnp.inf)
    if sinks is not None:
        column = jnp.broadcast_to(sinks[:, None, None], (*scores.shape[:-1], 1))
        scores = jnp.concatenate([scores, column], -1)
    weights = jax.nn.softmax(scores)[..., :S]
    return x + jnp.einsum("bhst,bthc,hcd->bsd", weights, v, out)


def both(f, arrays):
    """The value and the gradients, for a cotangent."""
    cotangent = np.random.default_rng(9).standard_normal((B, S, D))

    def run(*arrays):
        y, pull = jax.vjp(f, *arrays)
        return y, *pull(cotangent)

    return jax.jit(run)(*arrays)


def same(got, want, tolerance=1e-9):
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)


def reordered(f, ranks, layout):
    """f of a sequence in its own order, where f itself takes another one."""

    def call(x, *rest):
        y = f(jflux.reorder_for_causal(x, ranks, layout=layout), *rest)
        return jflux.restore_order(y, ranks, layout=layout)

    return call


WAYS = [(1, 2), (2, 2), (3, 1), (2, 4)]  # ranks of context, of tensor parallelism
WAYS = [way for way in WAYS if way[0] * way[1] <= RANKS]


@pytest.mark.parametrize("layout", ["zigzag", "striped"])
@pytest.mark.parametrize("context, tensor", WAYS)
def test_of_global_arrays(context, tensor, layout):
    arrays = operands(4, 2)
    mesh = make_mesh((context, tensor), ("cp", "tp"))

    def layer(x, *weights):
        return jnn.attention(
            x, *weights, axis_name="tp", context_axis="cp", context_layout=layout, is_causal=True,
            rotate=jnn.Rotary(), residual=x, mesh=mesh,
        )  # fmt: skip

    same(both(reordered(layer, context, layout), arrays), both(plain, arrays))


@pytest.mark.parametrize("layout", ["zigzag", "striped", "contiguous", None])
@pytest.mark.parametrize("batched", [True, False])
def test_positions_that_a_rotation_gets(layout, batched):
    """Of each rank's queries, in the order of the layout; None: without a context axis, padded."""
    x, *weights = operands(4, 2)
    x = x if layout else x[:, :-1]
    length = x.shape[1]
    mesh = make_mesh((2, min(2, RANKS // 2)), ("cp", "tp"))

    def rotate(q, position):
        assert position.shape == ((1, q.shape[1]) if batched else q.shape[:1])
        assert position.dtype == jnp.int32
        return q.at[..., 0].set(position[..., None])  # into the head's first element

    def core(q, k, v, *, mask, is_causal):
        return jnp.broadcast_to(q[..., :1], q.shape)

    over = {"context_axis": "cp", "context_layout": layout} if layout else {}
    out = np.zeros((4, C, D))
    out[0, 0, 0] = 1
    y = jnn.attention(
        x if batched else x[0], *weights[:3], out, axis_name="tp", mesh=mesh, rotate=rotate,
        core=core, **over,
    )  # fmt: skip
    want = jflux.causal_positions(S, 2, layout=layout) if layout else np.arange(length)
    np.testing.assert_array_equal(y[..., 0], np.broadcast_to(want, y.shape[:-1]))


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("context, tensor", [(2, 2), (2, 4)])
def test_inside_shard_map_with_documents(context, tensor, sequence_parallel):
    if context * tensor > RANKS:
        pytest.skip("too few devices")
    arrays = operands(4, 2)
    ids = np.sort(np.random.default_rng(1).integers(3, size=(B, S)), 1)
    in_order = jflux.reorder_for_causal(ids, context)
    names = ("cp", "tp") if sequence_parallel else ("cp",)
    sequence, whole = P(None, names, None), tensor > 2
    heads, kv = P(None, "tp", None), P() if whole else P(None, "tp", None)

    def layer(x, *weights):
        def own(x, ids, *weights):
            return jnn.attention(
                x, *weights, axis_name="tp", context_axis="cp", is_causal=True,
                rotate=jnn.Rotary(), residual=x, segment_ids=ids,
                sequence_parallel=sequence_parallel, num_kv_heads=2,
            )  # fmt: skip

        return jax.shard_map(
            own, mesh=make_mesh((context, tensor), ("cp", "tp")),
            in_specs=(sequence, P(None, "cp"), heads, kv, kv, P("tp")), out_specs=sequence,
        )(x, in_order, *weights)  # fmt: skip

    got = both(reordered(layer, context, "zigzag"), arrays)
    # Where each document begins at 0 again, as packed batches have it, scores are the same.
    again = np.arange(S) - np.stack([np.searchsorted(row, row) for row in ids])
    same(got, both(functools.partial(plain, ids=ids, rotate=again), arrays))


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("context, tensor", [(2, 2), (1, 2), (1, 1)])
def test_sinks_and_slopes(context, tensor, inside):
    """Those of each rank's heads inside shard_map; global ones, with a core of one's own."""
    if context * tensor > RANKS:
        pytest.skip("too few devices")
    arrays = [*operands(4, 2), np.array([0.5, -1.0, 3.0, 0.0]), np.array([0.5, 0.25, -0.5, 0])]
    mesh = make_mesh((context, tensor), ("cp", "tp"))

    def core(q, k, v, *, mask, is_causal, **per_head):
        assert sorted(per_head) == ["alibi_slopes", "sinks"]
        return jflux.attention(q, k, v, axis_name="cp", causal=is_causal, **per_head)

    def layer(x, query, key, value, out, sinks, slopes, core=None, **over):
        return jnn.attention(
            x, query, key, value, out, sinks=sinks, alibi_slopes=slopes, axis_name="tp",
            context_axis="cp", core=core, is_causal=True, rotate=jnn.Rotary(), residual=x, **over,
        )  # fmt: skip

    heads, sequence = P(None, "tp", None), P(None, ("cp", "tp"))
    f = functools.partial(layer, mesh=mesh, core=core)
    if inside:
        f = jax.shard_map(
            layer, mesh=mesh, in_specs=(sequence, heads, heads, heads, *[P("tp")] * 3),
            out_specs=sequence,
        )  # fmt: skip
    same(both(reordered(f, context, "zigzag"), arrays), both(plain, arrays))


@pytest.mark.parametrize("masked", [True, False])
def test_sinks_and_slopes_without_a_context_axis(masked):
    """In JAX's attention."""
    arrays = [*operands(4, 2), np.array([0.5, -1.0, 3.0, 0.0]), np.array([0.5, 0.25, -0.5, 0])]
    ids = np.sort(np.random.default_rng(1).integers(3, size=(B, S)), 1) if masked else None
    mask = (ids[:, :, None] == ids[:, None, :])[:, None] if masked else None
    mesh = make_mesh((min(2, RANKS),))

    def layer(x, query, key, value, out, sinks, slopes):
        return jnn.attention(
            x, query, key, value, out, sinks=sinks, alibi_slopes=slopes, axis_name="tp",
            is_causal=True, mask=mask, rotate=jnn.Rotary(), residual=x, mesh=mesh,
        )  # fmt: skip

    want = both(functools.partial(plain, ids=ids), arrays)
    same(both(layer, arrays), want, 1e-5)  # its scores are float32
    with pytest.raises(ValueError, match=r"jflux.nn.attention: sinks must be \[H\].* 4 heads"):
        layer(*arrays[:5], np.zeros(2), None)


def test_a_core_of_a_window():
    arrays = operands(4, 4)
    mesh = make_mesh((2, 1), ("cp", "tp"))
    seen = []

    def core(q, k, v, *, mask, is_causal):
        seen.append(q.shape)
        return jflux.attention(q, k, v, axis_name="cp", causal=is_causal, window=S)

    def layer(x, *weights):
        return jnn.attention(
            x, *weights, axis_name="tp", context_axis="cp", is_causal=True, residual=x, mesh=mesh,
            core=core,
        )  # fmt: skip

    want = both(functools.partial(plain, rotate=False), arrays)
    same(both(reordered(layer, 2, "zigzag"), arrays), want)
    assert seen[0] == (B, S // 2, 4, C)


def test_one_sequence_without_a_batch():
    x, *weights = operands(4, 2)
    mesh = make_mesh((2, 2) if RANKS >= 4 else (2, 1), ("cp", "tp"))
    layer = functools.partial(
        jnn.attention, axis_name="tp", context_axis="cp", is_causal=True, rotate=jnn.Rotary(),
        mesh=mesh,
    )  # fmt: skip
    got = jax.jit(reordered(lambda x: layer(x[0], *weights)[None], 2, "zigzag"))(x[:1])
    same(got, plain(x[:1], *weights) - x[:1])


@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_layers(kind):
    x = operands(4, 2)[0]
    options = {
        "num_kv_heads": 2, "is_causal": True, "rotate": jnn.Rotary(), "context_axis": "cp",
        "dtype": jnp.float64, "param_dtype": jnp.float64, "use_bias": False, "head_dim": C,
        "use_sinks": True, "bias_init": nn.initializers.normal(1.0),
        "alibi_slopes": (0.5, 0.25, -0.5, 0),
    }  # fmt: skip
    ids = np.sort(np.random.default_rng(1).integers(3, size=(B, S)), 1)
    in_order = jflux.reorder_for_causal(ids, 2)
    with jax.set_mesh(make_mesh((2, 2) if RANKS >= 4 else (2, 1), ("cp", "tp"))):
        if kind == "linen":
            layer = jlinen.Attention(4, **options)
            params = nn.unbox(jax.jit(layer.init)(jax.random.key(0), x))["params"]

            def call(x, params):
                return layer.apply({"params": params}, x, residual=x, segment_ids=in_order)
        else:
            module = jnnx.Attention(4, D, rngs=nnx.Rngs(0), **options)
            graph, state = nnx.split(module)
            params = nnx.to_pure_dict(state)

            def call(x, params):
                model = nnx.merge(graph, nnx.State(params))
                return model(x, residual=x, segment_ids=in_order)

        def whole(x, params):
            names = ("query", "key", "value", "out")
            weights = (params[name]["kernel"] for name in names)
            slopes = np.array(options["alibi_slopes"])
            return plain(x, *weights, params["sinks"], slopes, ids=ids)

        params = jax.tree.map(np.asarray, params)
        assert params["sinks"].shape == (4,) and params["sinks"].any()
        got = both(reordered(call, 2, "zigzag"), (x, params))
        same(got, both(whole, (x, params)))


@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_flax_layers_take_it_as_their_attention_fn(kind):
    x = operands(4, 2)[0]
    mesh = make_mesh((2,), ("cp",))
    fn = jnn.attention_fn("cp", causal=True, mesh=mesh)
    options = {"dtype": jnp.float64, "param_dtype": jnp.float64}
    causal = nn.make_causal_mask(np.ones((B, S)))
    if kind == "linen":
        theirs = nn.MultiHeadDotProductAttention(4, **options)
        params = jax.jit(theirs.init)(jax.random.key(0), x)
        ours = nn.MultiHeadDotProductAttention(4, attention_fn=fn, **options)
        got = jax.jit(reordered(lambda x: ours.apply(params, x), 2, "zigzag"))(x)
        want = jax.jit(functools.partial(theirs.apply, params, mask=causal))(x)
    else:
        theirs = nnx.MultiHeadAttention(4, D, decode=False, rngs=nnx.Rngs(0), **options)
        ours = nnx.MultiHeadAttention(
            4, D, decode=False, rngs=nnx.Rngs(0), attention_fn=fn, **options
        )
        got = jax.jit(reordered(lambda x: ours(x), 2, "zigzag"))(x)
        want = jax.jit(lambda x: theirs(x, mask=causal))(x)
    same(got, want, 1e-6)


def test_what_no_rank_has():
    x, *weights = operands(4, 2)
    mesh = make_mesh((2, 1), ("cp", "tp"))
    options = {"axis_name": "tp", "mesh": mesh}
    with pytest.raises(ValueError, match="with context_axis no rank has a whole mask"):
        jnn.attention(x, *weights, context_axis="cp", mask=np.ones((1, 1, S, S), bool), **options)
    with pytest.raises(ValueError, match="segment_ids go with context_axis"):
        jnn.attention(x, *weights, segment_ids=np.zeros((B, S), int), **options)
    with pytest.raises(ValueError, match="do not divide its dimension 1"):
        jnn.attention(x[:, :-1], *weights, context_axis="cp", **options)


def test_layouts_that_the_ranks_do_not_have():
    """A core of one's own does not look at them."""
    x, *weights = operands(4, 2)
    options = {"axis_name": "tp", "context_axis": "cp", "mesh": make_mesh((2, 1), ("cp", "tp"))}
    options["core"] = lambda q, *_, **__: q
    with pytest.raises(ValueError, match=r"nn.attention: with layout='zigzag' .* even, got q"):
        jnn.attention(x[:, :6], *weights, **options)
    for kind in ("zig-zag", None):
        with pytest.raises(ValueError, match="nn.attention: layout=.* must be one of contiguous"):
            jnn.attention(x, *weights, context_layout=kind, **options)
        with pytest.raises(ValueError, match="attention_fn: layout=.* must be one of contiguous"):
            jnn.attention_fn("cp", layout=kind)


# ---- Flax's own layers ---------------------------------------------------------------------------


@pytest.fixture
def lenient():
    with jflux.config(strict=False):
        yield


def flax_layer(kind, x, **options):
    """x -> y of Flax's own attention layer with an attention_fn, and with its own."""
    types = {"dtype": jnp.float64, "param_dtype": jnp.float64}
    if kind == "linen":
        fn = options.pop("attention_fn")
        params = jax.jit(nn.MultiHeadDotProductAttention(4, **types).init)(jax.random.key(0), x)

        def layer(**beside):
            module = nn.MultiHeadDotProductAttention(4, **types, **options, **beside)
            return functools.partial(module.apply, params)

        return layer(attention_fn=fn), layer()
    fn = options.pop("attention_fn")
    return tuple(
        nnx.MultiHeadAttention(
            4, D, decode=False, rngs=nnx.Rngs(0, dropout=1), **types, **options, **beside
        )
        for beside in ({"attention_fn": fn}, {})
    )


@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_masks_dropout_and_weights_fall_back(kind, lenient, caplog):
    """To Flax's own attention, in the ranks' order of positions, with one line for each reason."""
    x = operands(4, 2)[0]
    mesh = make_mesh((2,), ("cp",))
    fn = jnn.attention_fn("cp", causal=True, window=7, mesh=mesh)
    ours, theirs = flax_layer(kind, x, attention_fn=fn, dropout_rate=0.5)
    i, j = np.arange(S)[:, None], np.arange(S)
    allowed = (j <= i) & (j >= i - 7)
    others = np.random.default_rng(3).random((B, 1, S, S)) < 0.8
    others |= np.eye(S, dtype=bool)
    order = jflux.causal_positions(S, 2)
    _config._said.clear()
    with caplog.at_level("WARNING", logger="jflux"):
        for _ in range(2):
            got = reordered(
                lambda x: ours(x, mask=others[:, :, order][..., order], deterministic=True),
                2, "zigzag",
            )(x)  # fmt: skip
            same(got, theirs(x, mask=others & allowed, deterministic=True), 1e-6)
    (line,) = [r.message for r in caplog.records]
    assert "jflux.nn.attention_fn takes its lax reference: a mask or bias is not supported" in line
    # Without a mask, dropout that is off is nothing.
    with jflux.config(strict=True):
        got = reordered(lambda x: ours(x, deterministic=True), 2, "zigzag")(x)
        same(got, theirs(x, mask=allowed[None, None], deterministic=True), 1e-6)
        with pytest.raises(NotImplementedError, match="a mask or bias is not supported"):
            ours(x, mask=others, deterministic=True)
        rngs = {"rngs": {"dropout": jax.random.key(1)}} if kind == "linen" else {}
        with pytest.raises(NotImplementedError, match=r"dropout_rate=0\.5 of attention weights"):
            ours(x, deterministic=False, **rngs)
    dropped = ours(x, deterministic=False, **rngs)
    assert dropped.shape == x.shape and np.abs(dropped - got).max() > 1e-3


def test_attention_fn_with_sinks(lenient):
    """Flax's own attention has none."""
    q, k, v, mask = *np.ones((3, 1, 4, 2, C)), np.ones((1, 1, 4, 4), bool)
    options = {"causal": True, "mesh": make_mesh((2,), ("cp",)), "sinks": np.array([0.5, 2.0])}
    fn = jax.jit(jnn.attention_fn("cp", layout="contiguous", **options))
    keys = np.arange(1.0, 5)[:, None]
    want = keys / (keys + np.exp(options["sinks"] - C**0.5))
    np.testing.assert_allclose(fn(q, k, v)[0, :, :, 0], want)
    for name in ("sinks", "alibi_slopes"):
        fn = jnn.attention_fn("cp", mesh=options["mesh"], **{name: options["sinks"]})
        with pytest.raises(ValueError, match=f"{name}= is not for what falls back"):
            fn(q, k, v, mask=mask)


@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_flax_layers_decode_with_it(kind, lenient):
    """Their cache is theirs: its mask falls back."""
    x = operands(4, 2)[0][:, :5]
    mesh = make_mesh((2,), ("cp",))
    fn = jnn.attention_fn("cp", causal=True, mesh=mesh)
    types = {"dtype": jnp.float64, "param_dtype": jnp.float64}
    causal = nn.make_causal_mask(np.ones((B, 5)))
    if kind == "linen":
        layer = nn.MultiHeadDotProductAttention(4, attention_fn=fn, decode=True, **types)
        init = nn.MultiHeadDotProductAttention(4, decode=True, **types).init
        made = jax.jit(init)(jax.random.key(0), x)
        want = nn.MultiHeadDotProductAttention(4, **types).apply(
            {"params": made["params"]}, x, mask=causal
        )
        for i in range(5):
            y, new = layer.apply(made, x[:, i : i + 1], mutable=["cache"])
            made = made | new
            same(y, want[:, i : i + 1], 1e-6)
    else:
        layer = nnx.MultiHeadAttention(
            4, D, attention_fn=fn, decode=True, rngs=nnx.Rngs(0), **types
        )
        layer.init_cache(x.shape, jnp.float64)
        want = nnx.MultiHeadAttention(4, D, decode=False, rngs=nnx.Rngs(0), **types)(x, mask=causal)
        for i in range(5):
            same(layer(x[:, i : i + 1]), want[:, i : i + 1], 1e-6)


def test_types_and_precision_that_flax_passes(lenient):
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 3, S, 4, C))
    mesh = make_mesh((2,), ("cp",))
    fn = jnn.attention_fn("cp", causal=True, layout="contiguous", scale=0.3, mesh=mesh)
    y = fn(q, k, v, dtype=jnp.float32, precision=jax.lax.Precision.HIGHEST)
    assert y.dtype == jnp.float32 and y.shape == q.shape  # two dimensions of batches
    i, j = np.arange(S)[:, None], np.arange(S)
    want = fn(q, k, v, mask=np.ones((1, 1, 1, S, S), bool))  # falls back
    scores = np.where(j <= i, np.einsum("abshd,abthd->abhst", q, k) * 0.3, -np.inf)
    exact = np.einsum("abhst,abthd->abshd", jax.nn.softmax(scores), v)
    for one in (want, y):  # JAX's own softmax is float32
        np.testing.assert_allclose(one, exact, rtol=1e-5, atol=1e-5)
    text = jax.jit(functools.partial(fn, precision="highest")).lower(q, k, v).as_text()
    assert "HIGHEST" in text
    with pytest.raises(TypeError, match="input_positions of the layer is not supported"):
        fn(q, k, v, input_positions=np.arange(S))


def test_inside_shard_map_nothing_falls_back():
    q = np.zeros((B, S, 4, C))
    mesh = make_mesh((2,), ("cp",))

    def run(f):
        sequence = P(None, "cp")
        return jax.shard_map(f, mesh=mesh, in_specs=sequence, out_specs=sequence)(q)

    fn = jnn.attention_fn("cp")
    with pytest.raises(ValueError, match="a mask or bias is not supported inside shard_map"):
        run(lambda q: fn(q, q, q, mask=np.ones((1, 1, S, S), bool)))
    with pytest.raises(
        ValueError, match=r"dropout_rate=0\.1 of attention weights is not supported"
    ):
        run(lambda q: fn(q, q, q, dropout_rate=0.1))


@pytest.mark.parametrize("wide", [(1 << 31) - 1, 1 << 63, (None, None)])
def test_a_mask_of_a_window_of_all_positions(wide):
    q, mesh = jnp.zeros((1, 8, 2, 4)), make_mesh((2,))
    mask = functools.partial(_attention_fn._allowed, q, q, "tp", None, mesh, layout="contiguous")
    for causal in (False, True):
        want = np.tri(8, dtype=bool) if causal else np.ones((8, 8), bool)
        np.testing.assert_array_equal(mask(causal=causal, window=wide)[0, 0], want)


def test_ranks_of_heads_and_of_context_are_others():
    x, w = jnp.zeros((1, 8, 8)), jnp.zeros((8, 4, 2))
    f = functools.partial(jnn.attention, axis_name="tp", context_axis="tp")
    with pytest.raises(ValueError, match="a mesh axis may be named once, got .'tp', 'tp'."):
        f(x, w, w, w, w.swapaxes(0, 2), mesh=make_mesh((2,)))
