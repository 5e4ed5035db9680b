"""Tunix's Llama with jflux in its products. Its MLPs are of `nnx.Linear`, which has a dot_general.
Its projections are an Einsum module of its own, which has none, and is replaced.

Needs `google-tunix`; `tools/test_maxtext.sh` installs it too, and runs this file."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import compiled_text, fused_calls, make_mesh
from jax.sharding import PartitionSpec as P

import jflux.nn

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("tunix") is None,
        reason="google-tunix is not installed: tools/test_maxtext.sh makes an environment with it",
    ),
    pytest.mark.skipif(jax.default_backend() == "gpu", reason="float32"),
]


def with_jflux(model, nnx, tp):
    """The same model, whose layers call the ops."""

    class Projection(nnx.Module):
        def __init__(self, einsum, axes, contracted):
            self.w, self.shape = einsum.w, einsum.shape
            self.dot, self.contracted = tp.dot_general(axes), contracted

        def __call__(self, x):
            k = self.contracted
            numbers = ((tuple(range(x.ndim - k, x.ndim)), tuple(range(k))), ((), ()))
            return self.dot(x, self.w[...], numbers)

    for layer in model.layers:
        attention, mlp = layer.attn, layer.mlp
        attention.q_proj = Projection(attention.q_proj, ("embed", "heads", "kv"), 1)
        attention.k_proj = Projection(attention.k_proj, ("embed", "kv_heads", "kv"), 1)
        attention.v_proj = Projection(attention.v_proj, ("embed", "kv_heads", "kv"), 1)
        attention.o_proj = Projection(attention.o_proj, ("heads", "kv", "embed"), 2)
        mlp.gate_proj.dot_general = tp.dot_general(("embed", "mlp"))
        mlp.up_proj.dot_general = tp.dot_general(("embed", "mlp"))
        mlp.down_proj.dot_general = tp.dot_general(("mlp", "embed"))
    return model


def test_loss_and_gradients():
    nnx = pytest.importorskip("flax.nnx")
    from tunix.models.llama3 import model as tunix

    config = tunix.ModelConfig(
        num_layers=2, vocab_size=256, embed_dim=64, hidden_dim=128, num_heads=8, head_dim=8,
        num_kv_heads=4, rope_theta=10_000, norm_eps=1e-5,
    )  # fmt: skip
    tokens = np.random.default_rng(0).integers(0, 256, (2, 33))
    tp = jflux.nn.TensorParallel("tp", x_spec=P("fsdp"))

    def step_of(model):
        graph, params = nnx.split(model)

        def loss(params, tokens):
            x = tokens[:, :-1]
            positions = jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape)
            mask = jnp.broadcast_to(
                jnp.tril(jnp.ones((x.shape[1],) * 2, bool)), (len(x), *[x.shape[1]] * 2)
            )
            logits, _ = nnx.merge(graph, params)(x, positions, None, mask)
            chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], -1)
            return -chosen.mean()

        return params, jax.value_and_grad(loss)

    def drawn(params):  # Tunix's MLPs begin with zeros
        keys = iter(jax.random.split(jax.random.key(0), len(jax.tree.leaves(params))))
        return jax.tree.map(lambda a: 0.2 * jax.random.normal(next(keys), a.shape, a.dtype), params)

    with jax.set_mesh(make_mesh((2, 4), ("fsdp", "tp"))):
        params, plain = step_of(tunix.Llama3(config, rngs=nnx.Rngs(0)))
        params = drawn(params)
        _, fused = step_of(with_jflux(tunix.Llama3(config, rngs=nnx.Rngs(0)), nnx, tp))
        want, got = jax.jit(plain)(params, tokens), jax.jit(fused)(params, tokens)
        calls = fused_calls(compiled_text(fused, params, tokens))
    print(f"loss {want[0]:.7f}, with jflux {got[0]:.7f}")
    np.testing.assert_allclose(got[0], want[0], rtol=1e-6)
    for a, b in zip(jax.tree.leaves(got[1]), jax.tree.leaves(want[1]), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5 * float(abs(b).max()))
    # Of each layer: two gathers of x, and two of dy; two scatters, and one for each product of x.
    assert calls.count("all_gather_matmul") == 2 * (2 + 2)
    assert calls.count("matmul_reduce_scatter") == 2 * (2 + 5)
