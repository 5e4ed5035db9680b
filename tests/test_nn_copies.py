"""Copies of layers: pickled, deep, of NNX's own making. They compute what the layer does."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import make_mesh

import jflux.nn as jnn

nnx = pytest.importorskip("flax.nnx")

from jflux.nn import linen as jlinen  # noqa: E402
from jflux.nn import nnx as jnnx  # noqa: E402

# On GPUs, float32 is for the reference.
pytestmark = pytest.mark.skipif(jax.default_backend() == "gpu", reason="float32")

DRAWN = nnx.initializers.normal(0.1)  # a closure
LAYERS = {
    "column": lambda rngs: jnnx.ColumnParallelDense(8, 8, activation="gelu", rngs=rngs),
    "row": lambda rngs: jnnx.RowParallelDense(8, 8, rngs=rngs, kernel_init=DRAWN, bias_init=DRAWN),
    "mlp": lambda rngs: jnnx.MLP(8, 16, gated=True, rngs=rngs, kernel_init=DRAWN),
    "attention": lambda rngs: jnnx.Attention(
        2, 8, rotate=jnn.Rotary(5e5, jnn.RotaryScaling()), is_causal=True, rngs=rngs
    ),
    "embed": lambda rngs: jnnx.Embed(8, 8, rngs=rngs, embedding_init=DRAWN),
    "dot_general": lambda rngs: nnx.Linear(
        8, 8, rngs=rngs, dot_general=jnn.TensorParallel("tp").dot_general(("embed", "mlp"))
    ),
}
COPIES = {
    "pickle": lambda layer: pickle.loads(pickle.dumps(layer)),
    "deepcopy": copy.deepcopy,
    "clone": nnx.clone,
    "merge": lambda layer: nnx.merge(*nnx.split(layer)),
    "pickled_graph": lambda layer: nnx.merge(*pickle.loads(pickle.dumps(nnx.split(layer)))),
}


@pytest.mark.parametrize("name", LAYERS)
def test_copies(name):
    x = jax.random.normal(jax.random.key(1), (1, 4, 8))
    x = jnp.arange(4)[None] if name == "embed" else x
    with jax.set_mesh(make_mesh((2,))):
        layer = LAYERS[name](nnx.Rngs(0))
        run = jax.jit(lambda layer, x: layer(x))
        want, graph = run(layer, x), nnx.graphdef(layer)
        assert np.any(want)
        for way, make in COPIES.items():
            other = make(layer)
            assert nnx.graphdef(other) == graph, way
            np.testing.assert_array_equal(run(other, x), want, err_msg=way)


@pytest.mark.parametrize("name", LAYERS)
def test_cloudpickle(name):
    cloudpickle = pytest.importorskip("cloudpickle")
    with jax.set_mesh(make_mesh((2,))):
        layer = LAYERS[name](nnx.Rngs(0))
        other = cloudpickle.loads(cloudpickle.dumps(layer))
    assert nnx.graphdef(other) == nnx.graphdef(layer)
    for one, two in zip(*map(jax.tree.leaves, (layer, other)), strict=True):
        np.testing.assert_array_equal(one, two)


def test_linen_modules():
    """With the initializers that they have by default."""
    for module in (
        jlinen.ColumnParallelDense(8),
        jlinen.RowParallelDense(8),
        jlinen.MLP(8, gated=True),
        jlinen.Attention(2),
        jlinen.Embed(8, 8),
    ):
        assert pickle.loads(pickle.dumps(module)) == module
        assert copy.deepcopy(module) == module
