"""jflux.nn.qwix: layers of Flax that Qwix's rules match. `tools/test_maxtext.sh` installs Qwix, and
runs this file too."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import RANKS, make_mesh

import jflux
import jflux.nn as jnn

qwix = pytest.importorskip("qwix")
nn = pytest.importorskip("flax.linen")

from flax import nnx  # noqa: E402

from jflux.nn.qwix import Provider, Rule  # noqa: E402

WORLD = min(RANKS, 4)
WIDTH, HIDDEN = 128, 128 * WORLD
RULES = [
    Rule(module_path=".*up", recipe=jflux.Recipe.row, mesh_axes=("embed", "mlp")),
    Rule(module_path=".*down", recipe="jflux_fp8_block", mesh_axes=("mlp", "embed")),
]


@pytest.fixture(autouse=True)
def without_kernels(strict):
    """Few kernels take operands with a scale yet."""
    with jflux.config(strict=False):
        yield


class Linen(nn.Module):
    up: object = None
    down: object = None

    @nn.compact
    def __call__(self, x):
        dense = functools.partial(nn.Dense, use_bias=False)
        x = jnp.sin(dense(HIDDEN, dot_general=self.up, name="up")(x))
        x = dense(WIDTH, dot_general=self.down, name="down")(x)
        return dense(WIDTH, name="head")(x)  # which no rule matches


class Nnx(nnx.Module):
    def __init__(self, kernels):
        linear = functools.partial(nnx.Linear, use_bias=False, rngs=nnx.Rngs(0))
        self.up, self.down = linear(WIDTH, HIDDEN), linear(HIDDEN, WIDTH)
        self.head = linear(WIDTH, WIDTH)
        for name, kernel in kernels.items():
            getattr(self, name).kernel[...] = kernel["kernel"]

    def __call__(self, x):
        return self.head(self.down(jnp.sin(self.up(x))))


def test_layers_that_rules_match():
    """Their values and gradients are those with the same dot_general in each layer."""
    x = np.random.default_rng(0).standard_normal((2, 4 * WORLD, WIDTH)).astype(np.float32)
    with jax.set_mesh(make_mesh((WORLD,))):
        dots = [
            jnn.TensorParallel(recipe=rule.recipe).dot_general(rule.mesh_axes) for rule in RULES
        ]
        params = jax.jit(Linen().init)(jax.random.key(0), x)
        loss = lambda model: lambda p, x: jnp.sum(jnp.sin(model.apply(p, x)))  # noqa: E731
        want = jax.jit(jax.value_and_grad(loss(Linen(*dots))))(params, x)
        quantized = qwix.quantize_model(Linen(), Provider(RULES))
        got = jax.jit(jax.value_and_grad(loss(quantized)))(params, x)
        for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_array_equal(one, other)
        plain = jax.jit(jax.value_and_grad(loss(Linen())))(params, x)
        assert np.any(np.asarray(plain[0]) != np.asarray(want[0]))

        model = qwix.quantize_model(Nnx(params["params"]), Provider(RULES), x)
        loss_of = nnx.jit(nnx.value_and_grad(lambda model, x: jnp.sum(jnp.sin(model(x)))))
        value, grads = loss_of(model, x)
        assert value == want[0]
        for name, kernel in want[1]["params"].items():
            np.testing.assert_array_equal(grads[name].kernel[...], kernel["kernel"])
