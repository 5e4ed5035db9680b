"""Recipes in jflux.nn: functions, layers, and the dot_general of other layers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import RANKS, make_mesh, run
from jax.sharding import PartitionSpec as P

import jflux
import jflux.nn as jnn

nn = pytest.importorskip("flax.linen")

from flax import nnx  # noqa: E402

from jflux.nn import linen as jlinen  # noqa: E402
from jflux.nn import nnx as jnnx  # noqa: E402

WORLD = min(RANKS, 4)
WIDTH, HIDDEN, HEADS = 128, 128 * WORLD, WORLD
BLOCK = jflux.Recipe.block


@pytest.fixture(autouse=True)
def without_kernels(strict):
    """Few kernels take operands with a scale yet."""
    with jflux.config(strict=False):
        yield


def draw(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def loss_and_gradients(f):
    return jax.jit(jax.value_and_grad(lambda *a: jnp.sum(jnp.sin(f(*a))), (0, 1)))


def near(got, want, step):
    """Relative to the largest."""
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        one, other = np.asarray(one), np.asarray(other)
        assert one.shape == other.shape
        assert np.max(np.abs(one - other)) <= step * np.max(np.abs(other))


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_an_mlp(sequence_parallel):
    """With what every rank has whole it is the same products, of whole arrays."""
    x, up, down = draw(0, 8 * WORLD, WIDTH) / 8, draw(1, WIDTH, HIDDEN) / 8, draw(2, HIDDEN, WIDTH)
    mlp = functools.partial(jnn.mlp, axis_name="tp", mesh=make_mesh((WORLD,)), recipe=BLOCK,
                            sequence_parallel=sequence_parallel)  # fmt: skip

    def by_hand(x, weights):
        up, down = weights
        hidden = jflux.matmul(x, up, activation="gelu_tanh", recipe=BLOCK)
        return jflux.matmul(hidden, down, recipe=BLOCK)

    got = run(loss_and_gradients(lambda x, weights: mlp(x, *weights)), x, (up, down / 8))
    want = run(loss_and_gradients(by_hand), x, (up, down / 8))
    near(got, want, step=2.0**-5)  # where sums differ a value may be rounded to its neighbour


class Block(nn.Module):
    """Attention and an MLP, in linen."""

    recipe: jflux.Recipe | None

    @nn.compact
    def __call__(self, x):
        x = jlinen.Attention(HEADS, is_causal=True, recipe=self.recipe)(x, residual=x)
        return jlinen.MLP(HIDDEN, gated=True, recipe=self.recipe)(x, residual=x)


def test_layers():
    """Near those in 16 bits, and the same in linen and NNX."""
    x = draw(0, 2, 4 * WORLD, WIDTH)
    with jax.set_mesh(make_mesh((WORLD,))):
        params = nn.unbox(jax.jit(Block(None).init)(jax.random.key(0), x))
        one, other = (
            np.concatenate([np.ravel(a) for a in jax.tree.leaves(gradients)])
            for _, gradients in (
                run(loss_and_gradients(Block(recipe).apply), params, x) for recipe in (BLOCK, None)
            )
        )
        error = np.linalg.norm(one - other) / np.linalg.norm(other)
        assert 0.01 < error < 0.15  # e4m3 has steps of 1/8

        layer = jnnx.MLP(WIDTH, HIDDEN, recipe=BLOCK, rngs=nnx.Rngs(0))
        graph, state = nnx.split(layer)
        kernels = {name: {k: jnp.asarray(getattr(getattr(layer, name), k)[...])
                          for k in ("kernel", "bias")} for name in ("up", "down")}  # fmt: skip
        of_linen = functools.partial(jlinen.MLP(HIDDEN, recipe=BLOCK).apply, {"params": kernels})
        got = jax.jit(lambda state, x: nnx.merge(graph, state)(x))(state, x)
        assert np.array_equal(got, jax.jit(of_linen)(x))


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_dense_layers_of_flax(sequence_parallel):
    """Their products are jflux.matmul's by the recipe, also on one rank."""
    x, up, down = draw(0, 2, 4 * WORLD, WIDTH), draw(1, WIDTH, HIDDEN) / 8, draw(2, HIDDEN, WIDTH)
    numbers = (((2,), (0,)), ((), ()))

    def by_hand(x, weights):
        up, down = weights
        return jflux.matmul(jflux.matmul(x, up, recipe=BLOCK), down, recipe=BLOCK)

    want = run(loss_and_gradients(by_hand), x, (up, down / 16))
    for world in (1, WORLD):
        tp = jnn.TensorParallel(sequence_parallel=sequence_parallel, recipe="jflux_fp8_block")
        first, second = (tp.dot_general(axes) for axes in (("embed", "mlp"), ("mlp", "embed")))

        def f(x, weights, first=first, second=second):
            return second(first(x, weights[0], numbers), weights[1], numbers)

        with jax.set_mesh(make_mesh((world,))):
            near(run(loss_and_gradients(f), x, (up, down / 16)), want, step=2.0**-5)


def test_as_maxtext_calls_it():
    """Inside a scan of checkpoints, as its decoder layers are; the kernel's axes by name."""
    x, kernels = draw(0, 2, 4 * WORLD, WIDTH) / 4, draw(1, 3, WIDTH, HIDDEN) / 24
    rules = (("embed", ["fsdp"]), ("mlp", ["tensor_sequence"]))

    def model(quant, x, kernels):
        def layer(x, kernel):
            dots = [jax.lax.dot_general, jax.lax.dot_general]
            if quant is not None:
                dots = [quant.dot_general_cls(mesh_axes=axes)()
                        for axes in (("embed", "mlp"), ("mlp", "embed"))]  # fmt: skip
            numbers = (((2,), (0,)), ((), ()))
            hidden = dots[0](x, kernel, numbers, precision=None)
            return x + dots[1](jnp.sin(hidden), kernel.T, numbers, precision=None), None

        return jax.lax.scan(jax.checkpoint(layer), x, kernels)[0]

    want = run(loss_and_gradients(functools.partial(model, None)), x, kernels)
    mesh = make_mesh((1, WORLD), ("fsdp", "tensor_sequence"))
    with jax.set_mesh(mesh), nn.logical_axis_rules(rules):
        for name in ("jflux_fp8_tensor", "jflux_fp8_row", "jflux_fp8_block"):
            quant = jnn.TensorParallel("tensor_sequence", x_spec=P("fsdp"), recipe=name)
            got = run(loss_and_gradients(functools.partial(model, quant)), x, kernels)
            for one, other in zip(got[1], want[1], strict=True):
                assert 0.01 < np.linalg.norm(one - other) / np.linalg.norm(other) < 0.2
    with pytest.raises(ValueError, match="must be a jflux.Recipe, or one of jflux_fp8_tensor"):
        jnn.TensorParallel(recipe="fp8")
