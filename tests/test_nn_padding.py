"""Layers of global arrays whose sequence the ranks do not divide: values and gradients are those of
the unsharded layer, for parameters, inputs and residuals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import DEVICES, compiled_text, fused_calls
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import jflux.nn as jnn

# On GPUs, float32 is for the reference.
pytestmark = pytest.mark.skipif(jax.default_backend() == "gpu", reason="float32")

B, D, HIDDEN, HEADS, KV_HEADS, HEAD, VOCAB = 2, 16, 24, 8, 4, 4, 32
LENGTHS = pytest.mark.parametrize("length", [1, 7])
KINDS = pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])


def draw(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def mesh_of(kind=AxisType.Auto):
    return Mesh(np.array(DEVICES).reshape(2, 4), ("data", "tp"), axis_types=(kind,) * 2)


def assert_same(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        b = np.asarray(b)
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, atol=1e-5 * max(1, abs(b).max()))


def check(layer, plain, operands, mesh):
    """Values and all gradients of `layer` under jit are those of `plain`."""

    def step(f):
        floats = {k: a for k, a in operands.items() if jnp.issubdtype(a.dtype, jnp.floating)}
        rest = {k: a for k, a in operands.items() if k not in floats}

        def loss(floats):
            ys = jax.tree.leaves(f(**floats, **rest))
            weights = [np.cos(np.arange(y.size)).reshape(y.shape).astype(y.dtype) for y in ys]
            return sum((y * w).sum() for y, w in zip(ys, weights, strict=True)), ys

        # Not the loss: in the sum large terms cancel.
        (_, ys), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(floats)
        return ys, gradients

    want = step(plain)
    with jax.set_mesh(mesh):
        if AxisType.Explicit in mesh.axis_types:
            operands = jax.tree.map(
                lambda a: jax.device_put(a, jax.NamedSharding(mesh, P())), operands
            )
        assert_same(step(layer), want)
        return fused_calls(compiled_text(lambda operands: layer(**operands), operands))


# ---- Functions -----------------------------------------------------------------------------------


@KINDS
@LENGTHS
def test_products(length, kind):
    operands = {"x": draw(B, length, D), "w": draw(D, HIDDEN, seed=1), "b": draw(HIDDEN, seed=2)}
    calls = check(
        lambda x, w, b: jnn.column_parallel(x, w, bias=b, activation="silu", axis_name="tp"),
        lambda x, w, b: jax.nn.silu(x @ w + b), operands, mesh_of(kind),
    )  # fmt: skip
    assert calls == ["all_gather_matmul"]
    operands["residual"] = draw(B, length, HIDDEN, seed=3)
    calls = check(
        lambda x, w, b, residual: jnn.row_parallel(
            x, w, bias=b, residual=residual, axis_name="tp"
        ),
        lambda x, w, b, residual: x @ w + b + residual, operands, mesh_of(kind),
    )  # fmt: skip
    assert calls == ["matmul_reduce_scatter"]


@LENGTHS
def test_several_weights(length):
    operands = {"x": draw(B, length, D), "a": draw(D, 8, seed=1), "b": draw(D, 4, seed=2)}
    check(
        lambda x, a, b: jnn.column_parallel(x, (a, b), axis_name="tp", x_spec=P("data")),
        lambda x, a, b: (x @ a, x @ b), operands, mesh_of(),
    )  # fmt: skip


@KINDS
@LENGTHS
@pytest.mark.parametrize("gated", [True, False])
def test_mlp(length, kind, gated):
    x_spec = P("data") if kind == AxisType.Auto else None
    operands = {
        "x": draw(B, length, D), "up": draw(D, HIDDEN, seed=1), "down": draw(HIDDEN, D, seed=2),
        "up_bias": draw(HIDDEN, seed=3), "down_bias": draw(D, seed=4),
        "residual": draw(B, length, D, seed=5),
    }  # fmt: skip
    if gated:
        operands["gate"] = draw(D, HIDDEN, seed=6)

    def layer(x, up, down, gate=None, **others):
        options = {"axis_name": "tp", "activation": "silu", "x_spec": x_spec, **others}
        if gate is None:
            return jnn.mlp(x, up, down, **options)
        return jnn.gated_mlp(x, gate, up, down, **options)

    def plain(x, up, down, up_bias, down_bias, residual, gate=None):
        h = x @ up + up_bias
        h = jax.nn.silu(h) if gate is None else jax.nn.silu(x @ gate) * h
        return h @ down + down_bias + residual

    calls = check(layer, plain, operands, mesh_of(kind))
    assert calls == ["all_gather_matmul", "matmul_reduce_scatter"]


MASKS = {
    "none": lambda length: None,
    "shared": lambda length: np.tril(np.ones((1, 1, length, length), bool)),
    "of each": lambda length: draw(B, 1, length, length, seed=9) + 9 * np.eye(length) > 0,
}


@LENGTHS
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("is_causal", [True, False])
def test_attention(length, mask, is_causal):
    mask = MASKS[mask](length)
    operands = {
        "x": draw(B, length, D), "query": draw(D, HEADS, HEAD, seed=1),
        "key": draw(D, KV_HEADS, HEAD, seed=2), "value": draw(D, KV_HEADS, HEAD, seed=3),
        "out": draw(HEADS, HEAD, D, seed=4), "key_bias": draw(KV_HEADS, HEAD, seed=5),
        "residual": draw(B, length, D, seed=6),
    }  # fmt: skip
    seen = []

    def core(q, k, v, *, mask, is_causal):
        seen.append((q.shape[1], k.shape[1]))
        return jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=is_causal)

    def layer(x, query, key, value, out, key_bias, residual):
        return jnn.attention(
            x, query, key, value, out, bias=(None, key_bias, None, None), residual=residual,
            mask=mask, is_causal=is_causal, rotate=jnn.Rotary(), axis_name="tp", x_spec=P("data"),
            core=core,
        )  # fmt: skip

    def plain(x, query, key, value, out, key_bias, residual):
        q, k, v = (jnp.einsum("bsd,dhc->bshc", x, w) for w in (query, key, value))
        q, k = jnn.Rotary()(q), jnn.Rotary()(k + key_bias)
        o = jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=is_causal)
        return jnp.einsum("bshc,hcd->bsd", o, out) + residual

    calls = check(layer, plain, operands, mesh_of())
    assert calls == ["all_gather_matmul", "matmul_reduce_scatter"]
    assert set(seen) == {(length, length)}


def test_attention_of_one_sequence_under_explicit_sharding():
    operands = {
        "x": draw(7, D), "query": draw(D, HEADS, HEAD, seed=1), "key": draw(D, 2, HEAD, seed=2),
        "value": draw(D, 2, HEAD, seed=3), "out": draw(HEADS, HEAD, D, seed=4),
    }  # fmt: skip

    def plain(x, query, key, value, out):
        q, k, v = (jnp.einsum("sd,dhc->shc", x, w) for w in (query, key, value))
        return jnp.einsum("shc,hcd->sd", jax.nn.dot_product_attention(q, k, v), out)

    check(
        lambda **operands: jnn.attention(**operands, axis_name="tp"), plain, operands,
        mesh_of(AxisType.Explicit),
    )  # fmt: skip


@KINDS
@LENGTHS
def test_embeddings(length, kind):
    tokens = np.random.default_rng(0).integers(0, VOCAB, (B, length))
    operands = {"tokens": tokens, "table": draw(VOCAB, D)}
    calls = check(
        lambda tokens, table: jnn.embed(tokens, table, axis_name="tp"),
        lambda tokens, table: table[tokens], operands, mesh_of(kind),
    )  # fmt: skip
    assert calls == ["reduce_scatter"]


def test_a_sequence_that_more_axes_split():
    """The positions of x_spec's axes count too: 2 * 4 devices share 9 positions."""
    operands = {"x": draw(9, D), "up": draw(D, HIDDEN, seed=1), "down": draw(HIDDEN, D, seed=2)}
    check(
        lambda x, up, down: jnn.mlp(
            x, up, down, activation="relu", axis_name="tp", x_spec=P(("data", "tp"))
        ),
        lambda x, up, down: jax.nn.relu(x @ up) @ down, operands, mesh_of(),
    )  # fmt: skip


def test_what_stays_an_error():
    """Inside shard_map a sum cannot be scattered unevenly, and a width has to be divided."""
    mesh = mesh_of()
    x, w = draw(B, 7, D), draw(D, HIDDEN)
    mapped = jax.shard_map(
        lambda x, w: jnn.row_parallel(x, w, axis_name="tp"), mesh=mesh,
        in_specs=(P(None, None, "tp"), P("tp")), out_specs=P(None, "tp"),
    )  # fmt: skip
    with pytest.raises(ValueError, match="7 rows in its scatter_dimension=1"):
        mapped(x, w)
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="do not divide its dimension 1"):
        jnn.column_parallel(x, w[:, :6], axis_name="tp")


# ---- Layers --------------------------------------------------------------------------------------


def test_linen_layers():
    """A model, made and applied with such a sequence: the same parameters, loss and gradients."""
    nn = pytest.importorskip("flax.linen")
    from jflux.nn import linen

    class Model(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            options = {"x_spec": P("data")}
            embed = linen.Embed(VOCAB, D, **options)
            x = embed(tokens)
            attention = linen.Attention(HEADS, is_causal=True, rotate=jnn.Rotary(), **options)
            x = attention(nn.LayerNorm()(x), residual=x)
            x = linen.MLP(HIDDEN, gated=True, **options)(nn.LayerNorm()(x), residual=x)
            h = linen.ColumnParallelDense(HIDDEN, activation="relu", **options)(x)
            x = linen.RowParallelDense(D, **options)(h, residual=x)
            logits = embed.attend(nn.LayerNorm()(x))
            return jnn.cross_entropy(logits, tokens, axis_name="tp", **options).mean()

    tokens = np.random.default_rng(0).integers(0, VOCAB, (B, 7))
    step = jax.jit(jax.value_and_grad(Model().apply))
    with jax.set_mesh(Mesh(np.array(DEVICES[:1]).reshape(1, 1), ("data", "tp"))):
        init = jax.jit(Model().init)
        params = jax.tree.map(np.asarray, init(jax.random.key(0), tokens))
        want = step(params, tokens)
    with jax.set_mesh(mesh_of()):
        assert_same(init(jax.random.key(0), tokens[:, :1]), params)
        assert_same(step(params, tokens), want)


def test_nnx_layers():
    pytest.importorskip("flax")
    from flax import nnx as flax_nnx

    from jflux.nn import nnx

    class Block(flax_nnx.Module):
        def __init__(self):
            options = {"x_spec": P("data"), "rngs": flax_nnx.Rngs(0)}
            self.attention = nnx.Attention(HEADS, D, is_causal=True, **options)
            self.mlp = nnx.MLP(D, HIDDEN, **options)

        def __call__(self, x):
            x = self.attention(x, residual=x)
            return self.mlp(x, residual=x)

    def step_of(mesh, x):
        with jax.set_mesh(mesh):
            graph, state = flax_nnx.split(Block())

            def loss(state, x):
                y = flax_nnx.merge(graph, state)(x)
                return jnp.vdot(y, jnp.cos(jnp.arange(y.size, dtype=y.dtype)))

            return jax.jit(jax.value_and_grad(loss, (0, 1)))(state, x)

    x = draw(B, 7, D)
    want = step_of(Mesh(np.array(DEVICES[:1]).reshape(1, 1), ("data", "tp")), x)
    assert_same(step_of(mesh_of(), x), want)
