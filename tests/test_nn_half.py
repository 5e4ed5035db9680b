"""jflux.nn in bfloat16, for which GPUs have kernels too: a language model, forward and backward."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import RANKS, compiled_text, fused_calls, make_mesh

import jflux
import jflux.nn as jnn

nn = pytest.importorskip("flax.linen")

from flax import nnx  # noqa: E402

from jflux.nn import linen as jlinen  # noqa: E402
from jflux.nn import nnx as jnnx  # noqa: E402

WIDTH, HIDDEN, HEADS, VOCABULARY, LENGTH = 384, 768, 24, 528, 48
AXES = ("embed", "heads", None, "kv")


class LinenModel(nn.Module):
    dtype: np.dtype

    @nn.compact
    def __call__(self, tokens, targets):
        embed = jlinen.Embed(VOCABULARY, WIDTH, dtype=self.dtype)
        attention = jlinen.Attention(
            HEADS, num_kv_heads=HEADS, is_causal=True, rotate=jnn.Rotary(), axes=AXES,
            dtype=self.dtype,
        )  # fmt: skip
        mlp = jlinen.MLP(HIDDEN, gated=True, activation="silu", dtype=self.dtype)
        x = embed(tokens)
        x = attention(nn.RMSNorm(dtype=self.dtype)(x), residual=x)
        x = mlp(nn.RMSNorm(dtype=self.dtype)(x), residual=x)
        return jlinen.cross_entropy(embed.attend(x), targets, axis_name="tp").mean()


class NNXModel(nnx.Module):
    def __init__(self, dtype, rngs):
        own = {"dtype": dtype, "rngs": rngs}
        self.embed = jnnx.Embed(VOCABULARY, WIDTH, **own)
        self.norms = nnx.List([nnx.RMSNorm(WIDTH, **own) for _ in range(2)])
        self.attention = jnnx.Attention(
            HEADS, WIDTH, num_kv_heads=HEADS, is_causal=True, rotate=jnn.Rotary(), axes=AXES, **own
        )
        self.mlp = jnnx.MLP(WIDTH, HIDDEN, gated=True, activation="silu", **own)

    def __call__(self, tokens, targets):
        x = self.embed(tokens)
        x = self.attention(self.norms[0](x), residual=x)
        x = self.mlp(self.norms[1](x), residual=x)
        return jnnx.cross_entropy(self.embed.attend(x), targets, axis_name="tp").mean()


def in_linen(dtype, data):
    model = LinenModel(dtype)
    variables = jax.jit(model.init)(jax.random.key(0), *data)
    return lambda params: model.apply({"params": params}, *data), nn.unbox(variables)["params"]


def in_nnx(dtype, data):
    graph, params = nnx.split(NNXModel(dtype, nnx.Rngs(0)))
    return lambda params: nnx.merge(graph, params)(*data), params


@pytest.mark.parametrize("make", [in_linen, in_nnx])
def test_a_language_model(make):
    """The loss and all gradients are as near to float32's as those of plain `lax` are."""
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (4, LENGTH + 1))
    data = tokens[:, :-1], tokens[:, 1:]
    with jax.set_mesh(make_mesh((RANKS,))):
        loss, params = make(jnp.bfloat16, data)
        text = compiled_text(jax.value_and_grad(loss), params)
        got = jax.jit(jax.value_and_grad(loss))(params)
        with jflux.config(fused=False):
            plain = jax.jit(jax.value_and_grad(loss))(params)
            want = jax.jit(jax.value_and_grad(make(jnp.float32, data)[0]))(params)
    calls = fused_calls(text)
    # Attention, MLP and the head; each one's gradient is the other. And weights' gradients.
    assert calls.count("all_gather_matmul") >= 5 and calls.count("matmul_reduce_scatter") >= 5
    assert "all_reduce" in calls
    leaves = zip(*(jax.tree.leaves_with_path(a) for a in (got, plain, want)), strict=True)
    for (path, g), (_, p), (_, w) in leaves:
        g, p, w = (np.asarray(a, np.float64) for a in (g, p, w))
        size = np.sqrt((w * w).mean())
        error, usual = (np.sqrt(((a - w) ** 2).mean()) / size for a in (g, p))
        assert size > 0 and error <= 1.5 * usual + 2e-3, (jax.tree_util.keystr(path), error, usual)
        assert error < 0.05, (jax.tree_util.keystr(path), error)
