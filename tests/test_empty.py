"""Ops and layers of nothing: any dimension may be 0, forward and in the gradient."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import make_mesh

import jflux
import jflux.nn as jnn
from jflux import parallel
from jflux._ops._spec import all_ops
from jflux._stress.calls import per_device

RANKS = 2
#: Sizes by the letter that stands for a dimension in the cases below.
SIZES = {"b": 2, "m": 4, "k": 4, "n": 4, "s": 4, "h": 2, "c": 4, "r": 2, "l": 3, "q": 2}


@pytest.fixture(autouse=True)
def not_strict():
    with jflux.config(strict=False):
        yield


def vjp_of(f, *args):
    """f's results, and the gradients for a cotangent of ones."""
    y, pull = jax.vjp(f, *args)
    return y, pull(jax.tree.map(jnp.ones_like, y))


def shapes(dimensions, empty):
    """Of arrays whose dimensions are named by letters; an upper-case one has twice the size."""
    return [
        tuple(
            0 if d.lower() in empty else SIZES[d.lower()] * (2 if d.isupper() else 1) for d in array
        )
        for array in dimensions.split()
    ]


def check(f, dimensions, empty, result=None, mesh=None, check_vma=True):
    """Runs f and its gradient on one rank's arrays, which are made inside: shard_map takes no empty
    ones from outside. Gradients have the shapes of the arrays, and are zero where the result is
    empty."""
    mesh = mesh or make_mesh((RANKS,))

    def body(_):
        arrays = [jnp.ones(s) for s in shapes(dimensions, empty)]
        if check_vma:
            arrays = [jax.lax.pcast(a, mesh.axis_names, to="varying") for a in arrays]
        return vjp_of(f, *arrays)

    run = jax.jit(per_device(mesh, body, check_vma=check_vma))
    y, gradients = run(jnp.zeros(mesh.devices.shape))
    ranks = mesh.devices.shape
    for gradient, shape in zip(gradients, shapes(dimensions, empty), strict=True):
        assert gradient.shape == (*ranks, *shape)
        if all(a.size == 0 for a in jax.tree.leaves(y)):
            assert not np.any(gradient)
    if result is not None:
        wanted = shapes(result, empty)
        assert [a.shape for a in jax.tree.leaves(y)] == [(*ranks, *shape) for shape in wanted]


# ---- Ops -----------------------------------------------------------------------------------------

COLLECTIVES = {
    "all_gather": ({"axis": 0, "tiled": True}, "Mn"),
    "reduce_scatter": ({"scatter_dimension": 0, "tiled": True}, "qn"),
    "all_reduce": ({}, "mn"),
    "all_to_all": ({"split_axis": 0, "concat_axis": 1, "tiled": True}, None),
}


@pytest.mark.parametrize("which", ["function", "reference"])
@pytest.mark.parametrize("op", COLLECTIVES)
def test_collectives(op, which):
    options, result = COLLECTIVES[op]
    f = getattr(all_ops()[op], which)
    for empty in ("m", "n") if op != "reduce_scatter" else ("n",):
        check(lambda x: f(x, axis_name="tp", **options), "mn", empty, result)
    if op == "reduce_scatter":
        check(lambda x: f(x[:0], axis_name="tp", **options), "mn", "")
        check(lambda x: f(x[:, None, :0], axis_name="tp"), "qn", "", None)
    if op == "all_gather":
        check(lambda x: f(x, axis_name="tp", axis=1), "mn", "m", "mqn")


PRODUCTS = {
    "all_gather_matmul": ("bmk kn", {}, "bMn"),
    "matmul_reduce_scatter": ("bmk kn", {}, "bqn"),
    "matmul_all_reduce": ("bmk kn", {}, "bmn"),
    "matmul_all_to_all": ("bmk kn", {"split_axis": 2, "concat_axis": 1}, "bMq"),
    "all_to_all_matmul": ("bmk Kn", {"split_axis": 1, "concat_axis": 2}, "bqn"),
}


@pytest.mark.parametrize("which", ["function", "reference"])
@pytest.mark.parametrize("op", PRODUCTS)
def test_products(op, which):
    dimensions, options, result = PRODUCTS[op]
    f = getattr(all_ops()[op], which)
    for empty in "bk" if which == "reference" else "bkn":
        if op == "matmul_all_to_all" and empty == "n":
            result = None
        check(lambda x, w: f(x, w, axis_name="tp", **options), dimensions, empty, result)
    check(lambda x, w: f(x[:, :0], w, axis_name="tp", **options), dimensions, "")


def test_products_with_an_epilogue():
    def gathered(x, w, b):
        return jflux.all_gather_matmul(x, w, axis_name="tp", bias=b, activation="gelu")

    def scattered(x, w, b, r):
        return jflux.matmul_reduce_scatter(x, w, axis_name="tp", bias=b, residual=r)

    for empty in "mkn":
        check(gathered, "mk kn n", empty, "Mn")
    for empty in "kn":
        check(scattered, "mk kn n qn", empty, "qn")


def test_a_batch_of_nothing_in_vmap():
    """Rows of the batch are rows of a larger call."""
    f = jax.vmap(lambda x, w: jflux.matmul_all_reduce(x, w, axis_name="tp"), (0, None))
    check(f, "bmk kn", "k", "bmn")


# ---- Layers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("kv_heads", [None, 1])
def test_attention(kv_heads, sequence_parallel):
    def f(x, q, k, v, o):
        if kv_heads is not None:
            k, v = k[:, :1], v[:, :1]
        return jnn.attention(
            x, q, k, v, o, axis_name="tp", rotate=jnn.Rotary(), is_causal=True,
            num_kv_heads=kv_heads, sequence_parallel=sequence_parallel,
        )  # fmt: skip

    for empty in "bskhc" if kv_heads is None else "bs":
        check(f, "bsk khc khc khc hck", empty, "bsk", check_vma=False)


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_mlp_and_vocabulary(sequence_parallel):
    options = {"axis_name": "tp", "sequence_parallel": sequence_parallel}
    for empty in "bskn":
        check(lambda x, u, d: jnn.mlp(x, u, d, **options), "bsk kn nk", empty, check_vma=False)

    for shape in ((0, 4), (2, 0)):
        check(
            lambda t, shape=shape: jnn.embed(jnp.zeros(shape, jnp.int32), t, **options),
            "kn", "", check_vma=False,
        )  # fmt: skip
    check(lambda t: jnn.embed(jnp.zeros((2, 4), jnp.int32), t, **options), "kn", "n")

    def loss(logits):
        targets = jnp.zeros(logits.shape[:-1], jnp.int32)
        return jnn.cross_entropy(logits, targets, axis_name="tp", label_smoothing=0.1, z_loss=0.1)

    for empty in "bs":
        check(loss, "bsk", empty, "bs", check_vma=False)


GRIDS = {
    "dense": (parallel.dense, "bsk kn n", "bskn", "bsn"),
    "conv": (parallel.conv, "bsmk rrkn n", "bsmkn", "bsmn"),
    "rms_norm": (parallel.rms_norm, "bsk k", "bsk", "bsk"),
    "layer_norm": (parallel.layer_norm, "bsk k k", "bsk", "bsk"),
    "group_norm": (functools.partial(parallel.group_norm, groups=2), "bsk k k", "bsk", "bsk"),
    "gather": (parallel.gather, "kn", "kn", None),
}


@pytest.mark.parametrize("name", [*GRIDS, "embed"])
def test_layers_on_a_grid(name):
    """Along y, which sums, and along z, which gathers weights."""

    def embed(table, scheme):
        return parallel.embed(jnp.zeros((0, 3), jnp.int32), table, scheme=scheme)

    f, dimensions, letters, result = GRIDS.get(name, (embed, "kn", "n", None))
    for sizes in ((1, 2, 1), (1, 1, 2)):
        mesh = make_mesh(sizes, ("x", "y", "z"))
        on_grid = functools.partial(f, scheme=parallel.Scheme(data=None))
        for empty in letters:
            check(on_grid, dimensions, empty, result, mesh=mesh, check_vma=False)


# ---- Global arrays -------------------------------------------------------------------------------


def test_flax_layers_of_an_empty_batch():
    """As Flax's own: an empty result."""
    nnx = pytest.importorskip("flax.nnx")
    from flax import linen

    import jflux.nn.linen as jlinen
    import jflux.nn.nnx as jnnx

    mesh, x = make_mesh((RANKS,)), jnp.zeros((0, 4, 8))
    own = nnx.MultiHeadAttention(2, 8, decode=False, rngs=nnx.Rngs(0))(x)
    with jax.set_mesh(mesh):
        layers = [
            jnnx.Attention(2, 8, rngs=nnx.Rngs(0)),
            jnnx.MLP(8, 16, rngs=nnx.Rngs(0)),
            jnnx.ColumnParallelDense(8, 8, rngs=nnx.Rngs(0)),
            jnnx.RowParallelDense(8, 8, rngs=nnx.Rngs(0)),
        ]
        for layer in layers:

            def loss(layer, x):
                y = layer(x)
                return y.sum(), y

            f = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))
            (total, y), (dlayer, dx) = f(layer, x)
            assert y.shape == own.shape == dx.shape and total == 0
            assert not any(np.any(leaf) for leaf in jax.tree.leaves(dlayer))
        for module in (jlinen.Attention(2), jlinen.MLP(16), jlinen.RowParallelDense(8)):
            y, _ = jax.jit(module.init_with_output)(jax.random.key(0), x)
            assert y.shape == own.shape
        tp = jnn.TensorParallel("tp")
        dense = linen.Dense(8, dot_general=tp.dot_general(("embed", "mlp")))
        y, _ = jax.jit(dense.init_with_output)(jax.random.key(0), x)
        assert y.shape == own.shape


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("op", PRODUCTS)
def test_global_arrays(op, kind):
    axis_type = getattr(jax.sharding.AxisType, kind)
    spec, mesh = all_ops()[op], make_mesh((RANKS,), axis_type=axis_type)
    f = jax.jit(functools.partial(spec.function, axis_name="tp", **spec.ways[0]))
    for x, w in (((0, 4), (4, 4)), ((4, 0), (0, 4)), ((4, 4), (4, 0))):
        with jax.set_mesh(mesh):
            y = f(jnp.ones(x), jnp.ones(w))
        assert y.shape == (x[0], w[1]) and not y.any()


def test_an_empty_weight_beside_one_with_scales_of_blocks():
    """The other one's product has its scales."""
    e4m3, mesh = jnp.float8_e4m3fn, make_mesh((RANKS,))
    x = jflux.quantize(jax.random.normal(jax.random.key(0), (32, 256)), e4m3, block=(1, 128))
    w = jflux.quantize(8 * jax.random.normal(jax.random.key(1), (256, 256)), e4m3, block=(128, 128))
    none = jflux.Scaled(w.values[:, :0], w.scale[:, :0])
    gather = functools.partial(jflux.all_gather_matmul, axis_name="tp", mesh=mesh)
    y, other = jax.jit(lambda x, *ws: gather(x, ws))(x, none, w)
    assert y.shape == (32, 0)
    np.testing.assert_allclose(other, gather(x, w), rtol=0.02, atol=0.5)
