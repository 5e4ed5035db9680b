"""Recipes in jflux.nn: functions, layers, and the dot_general of other layers."""

import dataclasses
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
optax = pytest.importorskip("optax")

from flax import nnx  # noqa: E402
from flax.training import train_state  # noqa: E402

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


@pytest.mark.parametrize("gated", [True, False])
def test_gradients_of_16_bits(gated):
    """Those of an activation are quantised as they are computed: of each rank they are what the
    products and the activation by themselves make, where dx is rounded twice."""
    shapes = ((WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH))
    weights = [draw(i, *s).astype(jnp.bfloat16) / 8 for i, s in enumerate(shapes)]
    x = draw(3, 128, WIDTH).astype(jnp.bfloat16)
    names = ("gate", "up", "down")

    def mlp(x, weights):
        f = jnn.gated_mlp if gated else jnn.mlp
        given = dict(zip(names, weights, strict=True))
        return f(x, **{n: given[n] for n in names[not gated :]}, axis_name="tp", recipe=BLOCK,
                 activation="silu")  # fmt: skip

    def by_hand(x, weights):
        gate, up, down = weights
        products = [jflux.matmul(x, w, recipe=BLOCK) for w in (gate, up)[not gated :]]
        first, *other = (one.astype(jnp.float32) for one in products)
        hidden = jax.nn.silu(first) * (other[0] if gated else 1)
        return jflux.matmul(hidden.astype(x.dtype), down, recipe=BLOCK)

    mapped = jax.shard_map(
        mlp, mesh=make_mesh((1,)), in_specs=(P("tp"), (P(None, "tp"), P(None, "tp"), P("tp"))),
        out_specs=P("tp"),
    )  # fmt: skip
    got, want = (
        run(loss_and_gradients(lambda *a, f=f: f(*a).astype(jnp.float32)), x, tuple(weights))
        for f in (mapped, by_hand)
    )
    near(*(jax.tree.map(lambda a: a.astype(jnp.float32), one) for one in (got, want)), step=2.0**-7)


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


@pytest.mark.parametrize("exchange", ["gather", "dispatch"])
def test_mixtures(exchange):
    """Near those in 16 bits; routing is the same."""
    axes = ("ep", "tp")
    mesh = make_mesh((2, WORLD // 2), axes) if WORLD == 4 else make_mesh((WORLD, 1), axes)
    experts, x = 2 * mesh.shape["ep"], draw(0, mesh.shape["ep"], 16 * WORLD, WIDTH)
    layer = functools.partial(
        jlinen.MoE, experts, HIDDEN, 2, axis_name="tp", expert_axis="ep", exchange=exchange,
        shared_features=HIDDEN,
    )  # fmt: skip
    with jax.set_mesh(mesh):
        params = nn.unbox(jax.jit(layer().init)(jax.random.key(0), x))

        one, other = (
            np.concatenate([np.ravel(a) for a in jax.tree.leaves(gradients)])
            for _, gradients in (
                run(loss_and_gradients(layer(recipe=recipe).apply), params, x)
                for recipe in (BLOCK, None)
            )
        )
        assert 0.01 < np.linalg.norm(one - other) / np.linalg.norm(other) < 0.15


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


def delayed_in_linen(tp, x, kernels):
    """(losses and states, kernels) of some steps, by Flax's TrainState."""
    dense = functools.partial(nn.Dense, use_bias=False)

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            of = tp.dot_general_cls
            x = jnp.sin(dense(HIDDEN, dot_general_cls=of(("embed", "mlp")))(x))
            return dense(WIDTH, dot_general_cls=of(("mlp", "embed")))(x)

    variables = jax.jit(Model().init)(jax.random.key(0), x)
    variables |= {"params": {f"Dense_{i}": {"kernel": w} for i, w in enumerate(kernels)}}
    state = train_state.TrainState.create(
        apply_fn=Model().apply, params=variables, tx=optax.sgd(1e-3)
    )

    @jax.jit
    def step(state, x):
        grads = jax.grad(lambda v: jnp.sum(jnp.sin(state.apply_fn(v, x))))(state.params)
        return state.apply_gradients(grads=grads)

    for i in range(3):
        state = step(state, x * 2.0**i)
    scaling = state.params["_overwrite_with_gradient"]
    return (
        [dict(scaling[f"Dense_{i}"]["Fp8DirectDotGeneralOp_0"]) for i in range(2)],
        [state.params["params"][f"Dense_{i}"]["kernel"] for i in range(2)],
    )


def delayed_in_nnx(tp, x, kernels):
    linear = functools.partial(nnx.Linear, use_bias=False, rngs=nnx.Rngs(0))

    class Model(nnx.Module):
        def __init__(self):
            of = functools.partial(jnnx.DelayedDotGeneral, tp)
            self.up = linear(WIDTH, HIDDEN, dot_general=of(("embed", "mlp")))
            self.down = linear(HIDDEN, WIDTH, dot_general=of(("mlp", "embed")))

        def __call__(self, x):
            return self.down(jnp.sin(self.up(x)))

    model = Model()
    for layer, kernel in ((model.up, kernels[0]), (model.down, kernels[1])):
        layer.kernel[...] = kernel
    optimizer = nnx.Optimizer(model, optax.sgd(1e-3), wrt=nnx.Param)
    wrt = nnx.DiffState(0, nnx.Any(nnx.Param, jnnx.OverwriteWithGradient))

    @nnx.jit
    def step(model, optimizer, x):
        grads = nnx.grad(lambda model: jnp.sum(jnp.sin(model(x))), argnums=wrt)(model)
        state, grads = nnx.split_state(grads, jnnx.OverwriteWithGradient, ...)
        nnx.update(model, state)
        optimizer.update(model, grads)

    for i in range(3):
        step(model, optimizer, x * 2.0**i)
    names = [f.name for f in dataclasses.fields(jflux.DelayedScaling) if f.name != "recipe"]
    return (
        [
            {n: getattr(layer.dot_general, n)[...] for n in names}
            for layer in (model.up, model.down)
        ],
        [layer.kernel[...] for layer in (model.up, model.down)],
    )


def test_delayed_scaling():
    """In linen and in NNX the same, and with the state of Flax's own module."""
    x = draw(0, 2, 4 * WORLD, WIDTH) / 4
    kernels = draw(1, WIDTH, HIDDEN) / 12, draw(2, HIDDEN, WIDTH) / 24
    tp = jnn.TensorParallel(recipe="jflux_fp8_tensor", amax_history_length=4)
    with jax.set_mesh(make_mesh((WORLD,))):
        in_linen, in_nnx = delayed_in_linen(tp, x, kernels), delayed_in_nnx(tp, x, kernels)
    near(in_nnx, in_linen, step=2.0**-10)
    of_flax = nn.fp8_ops.Fp8DirectDotGeneralOp(amax_history_length=4)
    numbers = (((1,), (0,)), ((), ()))
    theirs = jax.eval_shape(
        lambda *a: of_flax.init(jax.random.key(0), *a, numbers), x[0], kernels[0]
    )
    assert jax.tree.map(jnp.shape, theirs["_overwrite_with_gradient"]) == jax.tree.map(
        jnp.shape, in_linen[0][0]
    )
    first = in_linen[0][0]
    most = np.abs(np.asarray(x)).max()
    assert np.array_equal(np.sort(first["input_amax_history"])[1:], most * np.float32([1, 2, 4]))
    assert first["output_grad_scale"] < 1
    assert all(
        np.any(np.asarray(a) != np.asarray(b)) for a, b in zip(in_linen[1], kernels, strict=True)
    )
    with pytest.raises(ValueError, match="has state: pass dot_general_cls"):
        tp.dot_general()
    with pytest.raises(ValueError, match="scales of tensors alone"):
        jnn.TensorParallel(recipe=BLOCK, amax_history_length=4)
