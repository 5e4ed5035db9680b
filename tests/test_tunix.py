"""Tunix's Llama with jflux in its products. Its MLPs are of `nnx.Linear`, which has a dot_general.
Its projections are an Einsum module of its own, which has none, and is replaced.

Needs `google-tunix`; `tools/test_maxtext.sh` installs it too, and runs this file."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rounded
from harness import compiled_text, fused_calls, make_mesh
from jax.sharding import PartitionSpec as P

import jflux
import jflux.nn
from jflux.nn._dot_general import QUANTIZATIONS

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


def results(*quants):
    """Of Tunix's model with each of these in its products, None for none: the loss and gradients,
    and the calls of jflux's ops in the compiled program."""
    nnx = pytest.importorskip("flax.nnx")
    from tunix.models.llama3 import model as tunix

    config = tunix.ModelConfig(
        num_layers=2, vocab_size=256, embed_dim=64, hidden_dim=128, num_heads=8, head_dim=8,
        num_kv_heads=4, rope_theta=10_000, norm_eps=1e-5,
    )  # fmt: skip
    tokens = np.random.default_rng(0).integers(0, 256, (2, 33))

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

    found = []
    with jax.set_mesh(make_mesh((2, 4), ("fsdp", "tp"))):
        for quant in quants:
            model = tunix.Llama3(config, rngs=nnx.Rngs(0))
            params, step = step_of(model if quant is None else with_jflux(model, nnx, quant))
            params = drawn(params)
            calls = fused_calls(compiled_text(step, params, tokens))
            found.append((*jax.jit(step)(params, tokens), calls))
    return found


def test_loss_and_gradients():
    want, got = results(None, jflux.nn.TensorParallel("tp", x_spec=P("fsdp")))
    print(f"loss {want[0]:.7f}, with jflux {got[0]:.7f}")
    np.testing.assert_allclose(got[0], want[0], rtol=1e-6)
    for a, b in zip(jax.tree.leaves(got[1]), jax.tree.leaves(want[1]), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5 * float(abs(b).max()))
    # Of each layer: two gathers of x, and two of dy; two scatters, and one for each product of x.
    assert got[2].count("all_gather_matmul") == 2 * (2 + 2)
    assert got[2].count("matmul_reduce_scatter") == 2 * (2 + 5)


class Rounded:
    """A recipe's products in jax.numpy, in place of a `jflux.nn.TensorParallel`."""

    def __init__(self, recipe):
        self.recipe = recipe

    def dot_general(self, axes):
        return rounded.dot_general(self.recipe, moved=axes[0] in ("heads", "mlp"))


@pytest.mark.parametrize("name", QUANTIZATIONS)
def test_in_8_bits(strict, name):
    with jflux.config(strict=False):  # sums of products of 8 bits have no kernel on CPUs
        tp = jflux.nn.TensorParallel("tp", x_spec=P("fsdp"), recipe=name)
        plain, want, got = results(None, Rounded(QUANTIZATIONS[name]), tp)

    def apart(one, other):
        one, other = (np.concatenate([*map(np.ravel, jax.tree.leaves(a[1]))]) for a in (one, other))
        return np.linalg.norm(one - other) / np.linalg.norm(other)

    error, distance = apart(got, want), apart(got, plain)
    print(f"{name}: loss {want[0]:.7f}, with jflux {got[0]:.7f}, {error:.1e}, {distance:.3f}")
    # As in test_maxtext.py.
    assert abs(got[0] - want[0]) <= 2.0**-14 * want[0] and error <= 2.0**-5
    assert 2.0**-5 <= distance <= 0.18 and abs(got[0] - plain[0]) <= 2.0**-8 * plain[0]
    # Each product of x gathers it by itself.
    assert got[2].count("all_gather_matmul") == 2 * (5 + 2)
