"""The layers of jflux.nn.linen and jflux.nn.nnx: against Flax's own layers on one device, against
each other, on global arrays and inside shard_map, and what their parameters say of themselves."""

import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import DEVICES, RANKS, compiled_text, fused_calls, make_mesh
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jflux.nn as jnn
from jflux import _config

nn = pytest.importorskip("flax.linen")

from flax import nnx  # noqa: E402

from jflux.nn import linen as jlinen  # noqa: E402
from jflux.nn import nnx as jnnx  # noqa: E402

# On GPUs, float32 is for the reference.
pytestmark = pytest.mark.skipif(jax.default_backend() == "gpu", reason="float32")

WIDTH, HIDDEN, HEADS, VOCABULARY = 16, 48, 8, 64
RULES = jnn.logical_axis_rules("tp")
X = P(None, "tp", None)
HIGHEST = {"precision": "highest"}


def draw(*shape):
    return jnp.asarray(np.random.default_rng(0).standard_normal(shape), jnp.float32)


def biases_are_not_zero(params):
    """Flax initialises them with zeros, which would hide one that is lost."""
    key = jax.random.key(7)
    return jax.tree.map(lambda a: a + 0.1 * jax.random.normal(key, a.shape), params)


# ---- Flax's own, with the same parameters --------------------------------------------------------


class PlainMLP(nn.Module):
    gated: bool = False

    @nn.compact
    def __call__(self, x):
        dense = functools.partial(nn.Dense, **HIGHEST)
        h = dense(HIDDEN, name="up")(x)
        if self.gated:
            h *= nn.silu(dense(HIDDEN, name="gate")(x))
        else:
            h = nn.gelu(h)
        return dense(WIDTH, name="down")(h)


def grouped(params, x):
    """Grouped queries: Flax has only the others."""
    q, k, v = (
        jnp.einsum("bsd,dhc->bshc", x, params[n]["kernel"], **HIGHEST) + params[n]["bias"]
        for n in ("query", "key", "value")
    )
    o = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    return (
        jnp.einsum("bshc,hcd->bsd", o, params["out"]["kernel"], **HIGHEST) + params["out"]["bias"]
    )


def own(module):
    return lambda params, x: module.apply({"params": params}, x)


#: name: (linen layer, NNX layer, the same on one device, x's shape and spec, y's spec)
LAYERS = {
    "column": (
        functools.partial(jlinen.ColumnParallelDense, HIDDEN, activation="gelu_tanh"),
        functools.partial(jnnx.ColumnParallelDense, WIDTH, HIDDEN, activation="gelu_tanh"),
        lambda params, x: nn.gelu(own(nn.Dense(HIDDEN, **HIGHEST))(params, x)),
        (WIDTH, X, P(None, None, "tp")),
    ),
    "row": (
        functools.partial(jlinen.RowParallelDense, WIDTH),
        functools.partial(jnnx.RowParallelDense, HIDDEN, WIDTH),
        own(nn.Dense(WIDTH, **HIGHEST)),
        (HIDDEN, P(None, None, "tp"), X),
    ),
    "mlp": (
        functools.partial(jlinen.MLP, HIDDEN),
        functools.partial(jnnx.MLP, WIDTH, HIDDEN),
        own(PlainMLP()),
        (WIDTH, X, X),
    ),
    "gated mlp": (
        functools.partial(jlinen.MLP, HIDDEN, gated=True, activation="silu"),
        functools.partial(jnnx.MLP, WIDTH, HIDDEN, gated=True, activation="silu"),
        own(PlainMLP(gated=True)),
        (WIDTH, X, X),
    ),
    "attention": (
        functools.partial(jlinen.Attention, HEADS),
        functools.partial(jnnx.Attention, HEADS, WIDTH),
        own(nn.MultiHeadDotProductAttention(HEADS, **HIGHEST)),
        (WIDTH, X, X),
    ),
    "grouped queries": (
        functools.partial(jlinen.Attention, HEADS, num_kv_heads=4, is_causal=True),
        functools.partial(jnnx.Attention, HEADS, WIDTH, num_kv_heads=4, is_causal=True),
        grouped,
        (WIDTH, X, X),
    ),
}


def value_and_gradients(f, params, x):
    def run(params, x):
        y, pull = jax.vjp(f, params, x)
        return y, *pull(jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape))

    return jax.jit(run)(params, x)


def assert_same(got, want):
    for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(
            a, b, atol=2e-5 * max(1, abs(np.asarray(b)).max()), err_msg=jax.tree_util.keystr(path)
        )


def specs_of(variables):
    return nn.logical_to_mesh(nn.get_partition_spec(variables), RULES)


def in_numpy(tree):
    """Without the devices that they were on."""
    return jax.tree.map(np.asarray, tree)


@pytest.mark.parametrize(
    "name, world", [*((name, 4) for name in LAYERS), ("attention", 2), ("gated mlp", 3)]
)
def test_layer(name, world):
    make_linen, make_nnx, plain, (k, x_spec, y_spec) = LAYERS[name]
    x = np.asarray(draw(2, 24, k))
    devices = np.array(DEVICES[: min(2, RANKS // world) * world]).reshape(-1, world)
    mesh = Mesh(devices, ("data", "tp"))
    layer = make_linen(x_spec=P("data"), **HIGHEST)
    with jax.set_mesh(mesh):
        boxed = jax.jit(layer.init)(jax.random.key(1), x)
        params = in_numpy(biases_are_not_zero(nn.unbox(boxed)["params"]))
        want = value_and_gradients(plain, params, x)
        got = value_and_gradients(lambda p, x: layer.apply({"params": p}, x), params, x)
        assert_same(got, want)
        assert got[0].sharding.spec[0] == "data"

        module = make_nnx(rngs=nnx.Rngs(0), x_spec=P("data"), **HIGHEST)
        graph, state = nnx.split(module)
        assert jax.tree.structure(nnx.to_pure_dict(state)) == jax.tree.structure(params)

        def call(params, x):
            nnx.replace_by_pure_dict(state, params)
            return nnx.merge(graph, state)(x)

        assert_same(value_and_gradients(call, params, x), want)

    mesh = make_mesh((world,))
    layer = make_linen(**HIGHEST)
    for check_vma in (True, False) if name == "gated mlp" else (True,):
        mapped = jax.shard_map(
            lambda params, x: layer.apply({"params": params}, x),
            mesh=mesh, in_specs=(specs_of(boxed)["params"], x_spec), out_specs=y_spec,
            check_vma=check_vma,
        )  # fmt: skip
        assert_same(value_and_gradients(mapped, params, x), want)


def test_nnx_inside_shard_map():
    mesh = make_mesh((4,))
    x = draw(2, 24, WIDTH)
    with jax.set_mesh(mesh):
        module = jnnx.MLP(WIDTH, HIDDEN, rngs=nnx.Rngs(0))
        graph, state = nnx.split(module)
        mapped = jax.shard_map(
            lambda state, x: nnx.merge(graph, state)(x),
            mesh=mesh, in_specs=(nnx.get_partition_spec(state), X), out_specs=X,
        )  # fmt: skip
        y, want = jax.jit(mapped)(state, x), nnx.jit(lambda m, x: m(x))(module, x)
    np.testing.assert_allclose(y, want, atol=1e-6)


@pytest.mark.parametrize("gated", [False, True])
def test_whole_activations(gated):
    """As decoding has them: one token of each sequence."""
    layer = jlinen.MLP(
        HIDDEN, gated=gated, activation="silu" if gated else "gelu_tanh",
        sequence_parallel=False, **HIGHEST,
    )  # fmt: skip
    x = draw(3, 1, WIDTH)
    with jax.set_mesh(make_mesh((4,))):
        params = nn.unbox(jax.jit(layer.init)(jax.random.key(0), x))["params"]
        got = value_and_gradients(lambda p, x: layer.apply({"params": p}, x), params, x)
        assert_same(got, value_and_gradients(own(PlainMLP(gated=gated)), params, x))


# ---- A language model ----------------------------------------------------------------------------


class LinenModel(nn.Module):
    @nn.compact
    def __call__(self, tokens, targets):
        embed = jlinen.Embed(VOCABULARY, WIDTH)
        x = embed(tokens)
        x = jlinen.Attention(HEADS, num_kv_heads=2, is_causal=True, rotate=jnn.Rotary(), axes=(
            "embed", "heads", None, "kv"), **HIGHEST)(nn.RMSNorm()(x), residual=x)  # fmt: skip
        x = jlinen.MLP(HIDDEN, gated=True, activation="silu", **HIGHEST)(
            nn.RMSNorm()(x), residual=x
        )
        return jlinen.cross_entropy(embed.attend(x), targets, axis_name="tp").mean()


class NNXModel(nnx.Module):
    def __init__(self, rngs):
        self.embed = jnnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.norms = nnx.List([nnx.RMSNorm(WIDTH, rngs=rngs) for _ in range(2)])
        self.attention = jnnx.Attention(
            HEADS, WIDTH, num_kv_heads=2, is_causal=True, rotate=jnn.Rotary(),
            axes=("embed", "heads", None, "kv"), rngs=rngs, **HIGHEST,
        )  # fmt: skip
        self.mlp = jnnx.MLP(WIDTH, HIDDEN, gated=True, activation="silu", rngs=rngs, **HIGHEST)

    def __call__(self, tokens, targets):
        x = self.embed(tokens)
        x = self.attention(self.norms[0](x), residual=x)
        x = self.mlp(self.norms[1](x), residual=x)
        return jnnx.cross_entropy(self.embed.attend(x), targets, axis_name="tp").mean()


def test_a_language_model():
    """Over one rank and four, in linen and in NNX, on global arrays and inside shard_map."""
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (2, 25))
    data = tokens[:, :-1], tokens[:, 1:]
    model = LinenModel()

    def loss(params):
        return model.apply({"params": params}, *data)

    with jax.set_mesh(make_mesh((1,))):
        boxed = jax.jit(model.init)(jax.random.key(0), *data)
        params = in_numpy(nn.unbox(boxed)["params"])
        want = in_numpy(jax.jit(jax.value_and_grad(loss))(params))
    mesh = make_mesh((4,))
    with jax.set_mesh(mesh):
        assert_same(jax.jit(jax.value_and_grad(loss))(params), want)
        graph, state = nnx.split(NNXModel(nnx.Rngs(0)))
        renamed = {
            "embed": params["Embed_0"], "attention": params["Attention_0"], "mlp": params["MLP_0"],
            "norms": {0: params["RMSNorm_0"], 1: params["RMSNorm_1"]},
        }  # fmt: skip
        nnx.replace_by_pure_dict(state, renamed)
        np.testing.assert_allclose(nnx.jit(nnx.merge(graph, state))(*data), want[0], rtol=1e-5)

    mapped = jax.shard_map(loss, mesh=mesh, in_specs=(specs_of(boxed)["params"],), out_specs=P())
    assert_same(jax.jit(jax.value_and_grad(mapped))(params), want)
    assert fused_calls(compiled_text(mapped, params)) == [
        "reduce_scatter",  # the embedding
        *["all_gather_matmul", "matmul_reduce_scatter"] * 2,
        "all_gather_matmul",  # the head
        "all_reduce",  # the loss
    ]


# ---- Metadata ------------------------------------------------------------------------------------


def test_linen_parameters_have_logical_axes():
    with jax.set_mesh(make_mesh((4,))) as _:
        x, key = jnp.zeros((2, 8, WIDTH)), jax.random.key(0)
        attention = jlinen.Attention(HEADS, use_sinks=True)
        attention = jax.eval_shape(attention.init, key, x)["params"]
        mlp = jax.eval_shape(jlinen.MLP(HIDDEN).init, key, x)["params"]
        tokens = jnp.zeros((2, 8), int)
        embed = jax.eval_shape(jlinen.Embed(VOCABULARY, WIDTH).init, key, tokens)["params"]
    names = jax.tree.map(
        lambda a: a.names, [attention, mlp, embed], is_leaf=lambda a: hasattr(a, "names")
    )
    assert names == [
        {
            "query": {"kernel": ("embed", "heads", "kv"), "bias": ("heads", "kv")},
            "key": {"kernel": ("embed", "kv_heads", "kv"), "bias": ("kv_heads", "kv")},
            "value": {"kernel": ("embed", "kv_heads", "kv"), "bias": ("kv_heads", "kv")},
            "out": {"kernel": ("heads", "kv", "embed"), "bias": ("embed",)},
            "sinks": ("heads",),
        },
        {
            "up": {"kernel": ("embed", "mlp"), "bias": ("mlp",)},
            "down": {"kernel": ("mlp", "embed"), "bias": ("embed",)},
        },
        {"embedding": ("vocab", "embed")},
    ]
    assert specs_of(mlp)["up"]["kernel"] == P(None, "tp")
    rules = jnn.logical_axis_rules("tp", embed="data")
    specs = nn.logical_to_mesh(nn.get_partition_spec(mlp), rules)
    assert specs["down"] == {"kernel": P("tp", "data"), "bias": P("data")}


def test_linen_parameters_are_made_in_place():
    """Flax's usual recipe, with `jax.eval_shape` and `out_shardings`."""
    mesh = make_mesh((4,))
    layer, x = jlinen.MLP(HIDDEN), jnp.zeros((2, 8, WIDTH))
    with jax.set_mesh(mesh), nn.logical_axis_rules(RULES):
        init = functools.partial(layer.init, jax.random.key(0))
        shardings = nn.logical_to_mesh_sharding(
            nn.get_partition_spec(jax.eval_shape(init, x)), mesh
        )
        variables = jax.jit(init, out_shardings=shardings)(x)
        kernel = nn.unbox(variables)["params"]["up"]["kernel"]
        assert kernel.sharding.is_equivalent_to(NamedSharding(mesh, P(None, "tp")), 2)
        assert jax.jit(layer.apply)(variables, x).shape == x.shape


def test_rules_name_each_axis_once():
    """Of two rules for one name Flax takes the first in linen, and the last in NNX."""
    rules = jnn.logical_axis_rules("tp", embed=("data", "pod"), expert_axis="ep", layers="stage")
    assert dict(rules) == {
        "mlp": "tp", "heads": "tp", "kv_heads": "tp", "vocab": "tp", "expert": "ep",
        "embed": ("data", "pod"), "kv": None, "layers": "stage",
    }  # fmt: skip
    assert len(dict(rules)) == len(rules)
    assert jnn.logical_axis_rules("tp") == RULES and dict(RULES)["embed"] is None
    with pytest.raises(ValueError, match=r"embed='tp' must have no mesh axis of axis_name='tp'"):
        jnn.logical_axis_rules("tp", embed="tp")
    with pytest.raises(ValueError, match=r"no mesh axis of expert_axis=\('ep',\)"):
        jnn.logical_axis_rules("tp", embed=("data", "ep"), expert_axis=("ep",))


def test_two_rules_for_one_name_in_nnx(caplog, monkeypatch):
    monkeypatch.setattr(_config, "_said", set())
    with jax.set_mesh(make_mesh((2, 2), ("data", "tp"))):
        two_of_another = (*RULES, ("kv", "data"))
        jnnx.MLP(WIDTH, HIDDEN, rngs=nnx.Rngs(0), rules=two_of_another)
        assert not caplog.records
        with nnx.logical_axis_rules((("embed", "data"), *RULES)):
            module = jnnx.MLP(WIDTH, HIDDEN, rngs=nnx.Rngs(0))
    assert module.up.kernel[...].sharding.spec == P(None, "tp")
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "map 'embed' to each of ['data', None]; NNX takes the last" in record.message


def test_nnx_parameters_are_put_in_place():
    mesh = Mesh(np.array(DEVICES[:4]).reshape(2, 2), ("data", "tp"))

    def specs(module):
        return jax.tree.map(lambda a: a.sharding.spec, nnx.to_pure_dict(nnx.state(module)))

    with jax.set_mesh(mesh):
        module = jnnx.MLP(WIDTH, HIDDEN, rngs=nnx.Rngs(0))
        assert module.up.kernel.get_metadata()["out_sharding"] == ("embed", "mlp")
        assert specs(module)["up"] == {"kernel": P(None, "tp"), "bias": P("tp")}
        own_rules = jnn.logical_axis_rules("tp", embed="data")
        module = jnnx.MLP(WIDTH, HIDDEN, rngs=nnx.Rngs(0), rules=own_rules)
        assert specs(module)["up"]["kernel"] == P("data", "tp")
        with nnx.logical_axis_rules(own_rules):
            module = jnnx.MLP(WIDTH, HIDDEN, rngs=nnx.Rngs(0))
            assert specs(module)["down"]["kernel"] == P("tp", "data")
        x = draw(2, 8, WIDTH)
        assert nnx.jit(lambda m, x: m(x))(module, x).shape == x.shape


def test_own_initialisers_and_names():
    """An initialiser that says itself what its dimensions are called is heard."""
    init = nn.with_logical_partitioning(nn.initializers.ones, ("in", "out"))
    layer = jlinen.ColumnParallelDense(HIDDEN, kernel_init=init, use_bias=False)
    with jax.set_mesh(make_mesh((4,))):
        params = layer.init(jax.random.key(0), jnp.ones((2, 8, WIDTH)))["params"]
        y = layer.apply({"params": params}, jnp.ones((2, 8, WIDTH)))
    assert params["kernel"].names == ("in", "out") and list(params) == ["kernel"]
    np.testing.assert_array_equal(y, np.full((2, 8, HIDDEN), WIDTH))


def test_types():
    """`dtype` and `param_dtype` mean what they mean to Flax's layers."""
    x = draw(2, 8, WIDTH)
    with jax.set_mesh(make_mesh((4,))):
        layer = jlinen.MLP(HIDDEN, dtype=jnp.bfloat16)
        params = jax.jit(layer.init)(jax.random.key(0), x)
        assert nn.unbox(params)["params"]["up"]["kernel"].dtype == jnp.float32
        assert jax.eval_shape(layer.apply, params, x).dtype == jnp.bfloat16
        module = jnnx.MLP(WIDTH, HIDDEN, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
        assert module.up.kernel[...].dtype == jnp.bfloat16
        assert nnx.eval_shape(module, x).dtype == jnp.float32


def test_without_flax():
    code = """
import sys
sys.modules["flax"] = None
import jflux.nn
assert isinstance(jflux.nn.TensorParallel().dot_general_cls(("a", "b"))(), jflux.nn.DotGeneral)
for name in ("linen", "nnx"):
    try:
        __import__(f"jflux.nn.{name}")
    except ImportError as error:
        assert "the layers of jflux.nn need Flax" in str(error)
    else:
        raise AssertionError
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_heads_that_do_not_fit():
    with pytest.raises(ValueError, match="must be a multiple of num_kv_heads=3"):
        jnnx.Attention(8, WIDTH, num_kv_heads=3, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="num_heads=5 must divide the width 16"):
        jnnx.Attention(5, WIDTH, rngs=nnx.Rngs(0))


def test_the_initialisers_are_those_of_flax():
    """The fan-in of a kernel of several dimensions is that of its matrix."""
    with jax.set_mesh(make_mesh((4,))):
        x, key = jnp.zeros((2, 8, 64)), jax.random.key(0)
        mine = nn.unbox(jax.jit(jlinen.Attention(HEADS).init)(key, x))["params"]
        theirs = nn.MultiHeadDotProductAttention(HEADS).init(key, x)["params"]
    assert jax.tree.structure(mine) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b)
