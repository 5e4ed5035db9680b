"""jflux.parallel: layers on a grid against the same layers on one device, in float64."""

import dataclasses
import functools
import itertools
import math
import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import DEVICES, PLATFORM, RANKS
from jax import lax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import jflux
from jflux import parallel, testing
from jflux._stress.calls import x64_if
from jflux.parallel import NO_OVERLAP, Grid, Overlap, Scheme

SCHEME = Scheme()
DEFAULT = Overlap()
GRIDS = [Grid(*sizes) for sizes in itertools.product((1, 2, 4, 8), repeat=4)]
GRIDS = [grid for grid in GRIDS if grid.ranks == RANKS]
ODD = [grid for grid in (Grid(3), Grid(1, 3, 2), Grid(1, 1, 3, 2)) if grid.ranks <= RANKS]
CUBE = {2: Grid(1, 1, 2), 4: Grid(2, 1, 2)}.get(RANKS, Grid(2, 2, 2))


FOUR = pytest.mark.skipif(RANKS < 4, reason="takes four devices")


@pytest.fixture(autouse=True)
def lenient():
    """GPUs have no product kernels for float64."""
    with jflux.config(strict=PLATFORM != "gpu", always=True), x64_if(np.float64):
        yield


def mesh_of(grid):
    return grid.mesh(DEVICES)


def random(*shape, seed=0, scale=1.0):
    return np.random.default_rng((seed, *shape)).standard_normal(shape) * scale


def compare(got, want, tolerance=1e-11):
    """All leaves of two pytrees, relative to the largest number of each."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    paths = jax.tree.leaves_with_path(got)
    for (path, a), b in zip(paths, jax.tree.leaves(want), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert a.shape == b.shape
        assert np.abs(a - b).max() <= tolerance * max(1.0, np.abs(b).max()), jax.tree_util.keystr(
            path
        )


# ---- Two models, on a grid and plain -------------------------------------------------------------


class Plain:
    """The layers on one device, by their definitions."""

    @staticmethod
    def dense(x, w, bias=None, *, scheme):
        return x @ w + (0 if bias is None else bias)

    @staticmethod
    def conv(x, w, bias=None, *, scheme, strides=1, padding="SAME", kernel_dilation=1):
        y = lax.conv_general_dilated(
            x, w, (strides,) * 2, padding, rhs_dilation=(kernel_dilation,) * 2,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )  # fmt: skip
        return y + (0 if bias is None else bias)

    @staticmethod
    def embed(tokens, table, *, scheme):
        return table[tokens]

    @staticmethod
    def rms_norm(x, scale, *, scheme):
        return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale

    @staticmethod
    def layer_norm(x, scale, bias, *, scheme):
        deviation = jnp.sqrt(x.var(-1, keepdims=True) + 1e-6)
        return (x - x.mean(-1, keepdims=True)) / deviation * scale + bias

    @staticmethod
    def group_norm(x, scale, bias, *, groups, scheme):
        b, h, w, c = x.shape
        g = x.reshape(b, h, w, groups, c // groups)
        g = (g - g.mean((1, 2, 4), keepdims=True)) / jnp.sqrt(
            g.var((1, 2, 4), keepdims=True) + 1e-6
        )
        return g.reshape(x.shape) * scale + bias


VOCABULARY, WIDTH, HIDDEN, CLASSES, BATCH = 48, 48, 96, 48, 24


def text_model(scheme):
    """(parameters, their specs, data, its specs, forward of ops, parameters and data)."""
    t = scheme.transposed
    params = {
        "table": random(VOCABULARY, WIDTH),
        "norm": (random(WIDTH, seed=1), random(WIDTH, seed=2)),
        "up": (random(WIDTH, HIDDEN, scale=0.2), random(HIDDEN)),
        "down": (random(HIDDEN, WIDTH, scale=0.2), random(WIDTH, seed=3)),
        "scale": random(WIDTH, seed=4),
        "head": random(WIDTH, CLASSES, seed=5, scale=0.2),
    }
    specs = {
        "table": t.weight_spec(),
        "norm": (scheme.scale_spec(), scheme.scale_spec()),
        "up": (scheme.weight_spec(), scheme.bias_spec()),
        "down": (t.weight_spec(), t.bias_spec()),
        "scale": scheme.scale_spec(),
        "head": scheme.weight_spec(),
    }
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (BATCH, 3))

    def forward(ops, params, tokens):
        x = ops.embed(tokens, params["table"], scheme=t)
        h = ops.layer_norm(x, *params["norm"], scheme=scheme)
        h = jax.nn.gelu(ops.dense(h, *params["up"], scheme=scheme))
        x = x + ops.dense(h, *params["down"], scheme=t)
        return ops.dense(
            ops.rms_norm(x, params["scale"], scheme=scheme), params["head"], scheme=scheme
        )

    return params, specs, tokens, scheme.rows_spec(), forward


def image_model(scheme):
    """Convolutions with strides, dilation and other padding; as `text_model`."""
    t, k = scheme.transposed, 48
    params = {
        "a": (random(3, 3, k, HIDDEN, scale=0.1), random(HIDDEN)),
        "norm": (random(HIDDEN, seed=1), random(HIDDEN, seed=2)),
        "b": (random(2, 3, HIDDEN, CLASSES, scale=0.1), random(CLASSES)),
    }
    specs = {
        "a": (scheme.weight_spec(4), scheme.bias_spec()),
        "norm": (scheme.bias_spec(), scheme.bias_spec()),
        "b": (t.weight_spec(4), t.bias_spec()),
    }
    images = random(BATCH, 5, 6, k)

    def forward(ops, params, images):
        h = ops.conv(images, *params["a"], strides=2, scheme=scheme)
        h = jax.nn.silu(ops.group_norm(h, *params["norm"], groups=HIDDEN // 2, scheme=t))
        padding = ((0, 1), (2, 1))
        return ops.conv(h, *params["b"], padding=padding, kernel_dilation=2, scheme=t)

    return params, specs, images, scheme.input_spec(4), forward


def loss_and_gradients(model, scheme, mesh, **options):
    """Of the parameters, and of the data where they are images; on the grid."""
    params, specs, data, data_spec, forward = model(scheme)
    out = {text_model: scheme.output_spec(3), image_model: scheme.input_spec(4)}[model]

    def local(params, data, weights):
        y = forward(parallel, params, data)
        roles = ("data", "z", "x") if model is text_model else ("data", "z", "y")
        names = scheme.names(*roles)
        total = (y * weights).sum()
        return lax.psum(total, names) if names else total

    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=(specs, data_spec, out), out_specs=P(), **options
    )
    return jax.jit(jax.value_and_grad(mapped, argnums=argnums(model)))(
        params, data, output_weights(model)
    )


def argnums(model):
    return (0,) if model is text_model else (0, 1)


@functools.cache
def output_weights(model):
    """What a model's results are multiplied with, for a loss that depends on all of them."""
    params, _, data, _, forward = model(SCHEME)
    shape = jax.eval_shape(functools.partial(forward, Plain), params, data).shape
    return random(*shape, seed=7)


@functools.cache
def expected(model):
    with jax.enable_x64(True):
        params, _, data, _, forward = model(SCHEME)
        weights = output_weights(model)
        loss = lambda params, data: (forward(Plain, params, data) * weights).sum()  # noqa: E731
        return jax.jit(jax.value_and_grad(loss, argnums=argnums(model)))(params, data)


@pytest.mark.parametrize("grid", GRIDS + ODD, ids=str)
@pytest.mark.parametrize("model", [text_model, image_model])
def test_gradients_on_every_grid(model, grid):
    compare(loss_and_gradients(model, SCHEME, mesh_of(grid)), expected(model))


VARIANTS = {
    "XLA's products": dataclasses.replace(SCHEME, fused=False),
    "nothing overlaps": dataclasses.replace(SCHEME, overlap=NO_OVERLAP),
    "starts transposed": SCHEME.transposed,
}


@pytest.mark.parametrize("model", [text_model, image_model])
@pytest.mark.parametrize("name", VARIANTS)
def test_variants(model, name):
    compare(loss_and_gradients(model, VARIANTS[name], mesh_of(CUBE)), expected(model))


@pytest.mark.parametrize("model", [text_model, image_model])
def test_without_varying_types(model):
    compare(loss_and_gradients(model, SCHEME, mesh_of(CUBE), check_vma=False), expected(model))


@FOUR
def test_other_axes_and_none():
    """Axes of other names, a tuple of them, and roles that no axis has."""
    devices = np.array(DEVICES[: RANKS // 4 * 4]).reshape(2, 2, -1)
    mesh = Mesh(devices, ("a", "b", "c"), axis_types=(AxisType.Auto,) * 3)
    scheme = Scheme(x=("b", "a"), y=None, z="c", data=None)
    compare(loss_and_gradients(text_model, scheme, mesh), expected(text_model))
    scheme = Scheme(x=None, y="b", z=None, data=("c", "a"))
    compare(loss_and_gradients(text_model, scheme, mesh), expected(text_model))


def test_more_axes_than_the_grid_has():
    """Two copies of a grid, each with a batch of its own, as in a pipeline's stages."""
    copies, grid = 2, Grid(min(2, RANKS // 2), max(1, RANKS // 4))
    devices = np.array(DEVICES[: copies * grid.ranks]).reshape(copies, *grid.sizes[::-1])
    mesh = Mesh(devices, ("copy", "data", "z", "y", "x"), axis_types=(AxisType.Auto,) * 5)
    x, w = random(copies, 4, 8), random(8, 8)
    weight = random(copies, 4, 8, seed=1)

    def local(x, w, weight):
        y = parallel.dense(x[0], w)
        return lax.psum((y * weight[0]).sum(), ("copy", "data", "z", "x"))

    spec = P("copy", *SCHEME.input_spec())
    out = P("copy", *SCHEME.output_spec())
    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=(spec, SCHEME.weight_spec(), out), out_specs=P()
    )
    got = jax.jit(jax.value_and_grad(mapped, argnums=(0, 1)))(x, w, weight)
    plain = jax.value_and_grad(lambda x, w: (x @ w * weight).sum(), argnums=(0, 1))
    compare(got, plain(x, w))


def test_tied_head():
    """The head's weight, gathered and transposed, is the embedding's table."""
    head = random(WIDTH, VOCABULARY)
    tokens = np.arange(BATCH) % VOCABULARY
    weight = random(BATCH, VOCABULARY)

    def local(tokens, head, weight):
        whole = parallel.gather(head)
        x = parallel.embed(tokens, whole.T, gathered=True, scheme=SCHEME.transposed)
        return lax.psum((parallel.dense(x, whole) * weight).sum(), ("data", "z", "x"))

    specs = (SCHEME.rows_spec(), SCHEME.weight_spec(), SCHEME.output_spec())
    mapped = jax.shard_map(local, mesh=mesh_of(CUBE), in_specs=specs, out_specs=P())
    got = jax.jit(jax.value_and_grad(mapped, argnums=1))(tokens, head, weight)
    want = jax.value_and_grad(lambda w: (w.T[tokens] @ w * weight).sum())(head)
    compare(got, want)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.uint32])
@pytest.mark.parametrize("scheme", [SCHEME, Scheme(y=None)], ids=["y", "no y"])
def test_tokens_of_other_types(dtype, scheme):
    """Their type may not hold the vocabulary's size."""
    table = random(256, 8)
    tokens = np.linspace(0, min(255, np.iinfo(dtype).max), BATCH).astype(dtype)
    f = jax.shard_map(
        functools.partial(parallel.embed, scheme=scheme), mesh=mesh_of(CUBE),
        in_specs=(scheme.rows_spec(), scheme.weight_spec()), out_specs=scheme.output_spec(),
    )  # fmt: skip
    compare(jax.jit(f)(tokens, table), table[tokens])


def test_halves():
    """bfloat16, where partial sums are rounded: near what one device gives."""
    x, w, bias = random(8, 16), random(16, 16, scale=0.25), random(16)
    x, w = (jnp.asarray(a, jnp.bfloat16) for a in (x, w))
    specs = (SCHEME.input_spec(), SCHEME.weight_spec(), SCHEME.bias_spec())
    f = jax.shard_map(
        parallel.dense, mesh=mesh_of(CUBE), in_specs=specs, out_specs=SCHEME.output_spec()
    )
    y = jax.jit(f)(x, w, bias)
    assert y.dtype == jnp.bfloat16
    want = np.asarray(x, np.float64) @ np.asarray(w, np.float64) + bias
    compare(y, want, tolerance=2**-7)


# ---- Errors --------------------------------------------------------------------------------------


def call(f, specs, *args):
    return jax.eval_shape(
        jax.shard_map(f, mesh=mesh_of(Grid(2, 1, RANKS // 2)), in_specs=specs, out_specs=P()), *args
    )


@pytest.mark.parametrize(
    "x, w, specs, error, message",
    [
        ((8, 8), (40, 8), (SCHEME.input_spec(), SCHEME.weight_spec()), ValueError, "contract"),
        ((8, 8), (4, 8), (SCHEME.output_spec(), SCHEME.weight_spec()), ValueError, "same on all"),
        ((8, 8), (8,), (SCHEME.input_spec(), P()), ValueError, r"must be \[m"),
    ],
)
def test_operands_that_do_not_fit(x, w, specs, error, message):
    with pytest.raises(error, match=message):
        call(lambda x, w: parallel.dense(x, w).sum(), specs, np.zeros(x), np.zeros(w))


def test_other_errors():
    x, w = np.zeros((8, 8)), np.zeros((8, 8))
    specs = (SCHEME.input_spec(), SCHEME.weight_spec())
    with pytest.raises(TypeError, match="cast w"):
        call(lambda x, w: parallel.dense(x, w.astype(np.float32)), specs, x, w)
    with pytest.raises(ValueError, match="bias must be"):
        call(lambda x, w: parallel.dense(x, w, w), specs, x, w)
    with pytest.raises(ValueError, match="as many"):
        call(parallel.conv, specs, x, w)
    with pytest.raises(ValueError, match="embed must be the same"):
        call(parallel.embed, (P("x"), SCHEME.weight_spec()), np.zeros(16, np.int32), w)
    with pytest.raises(TypeError, match="integers"):
        call(parallel.embed, specs, x, w)
    with pytest.raises(ValueError, match="groups=3"):
        call(lambda x, _: parallel.group_norm(x[:, None], groups=3), specs, x, w)
    with pytest.raises(ValueError, match="must differ"):
        Scheme(x="a", y=("b", "a"))
    with pytest.raises(ValueError, match="cached_layers"):
        Overlap(cached_layers=-1)


def test_grid():
    assert Grid.parse("2, 3").sizes == (2, 3, 1, 1) and str(Grid(2, 3)) == "2x3x1x1"
    assert Grid(2, 3, 4, 5).ranks == 120 and Grid(2, 3, 4, 5).tensor == 24
    for text in ("2,x", "", "1,1,1,1,1", "-1"):
        with pytest.raises(ValueError, match="a grid is"):
            Grid.parse(text)
    with pytest.raises(ValueError, match="y=0"):
        Grid(1, 0)
    with pytest.raises(ValueError, match="takes 999 devices"):
        Grid(999).mesh()
    mesh = Grid(2, RANKS // 2).mesh(DEVICES)
    assert mesh.axis_names == ("data", "z", "y", "x") and mesh.size == RANKS
    # x is innermost: its ranks are neighbours (section V-B).
    assert mesh.devices[0, 0, 0].tolist() == DEVICES[:2]


# ---- What may run at the same time ---------------------------------------------------------------


def ancestors(jaxpr):
    """For each variable of a jaxpr: the indices of the equations that it depends on."""
    of = {}
    for index, eqn in enumerate(jaxpr.eqns):
        before = set().union(*(of.get(v, set()) for v in eqn.invars if not hasattr(v, "val")))
        for out in eqn.outvars:
            of[out] = before | {index}
    return of


def jaxprs_of(eqn):
    for value in eqn.params.values():
        for one in value if isinstance(value, tuple | list) else (value,):
            one = getattr(one, "jaxpr", one)
            if hasattr(one, "eqns"):
                yield one


def inner(jaxpr, name):
    """The jaxprs of all equations of that name, at any depth."""
    found = []
    for eqn in jaxpr.eqns:
        for one in jaxprs_of(eqn):
            found += [one] if eqn.primitive.name == name else []
            found += inner(one, name)
    return found


def holds(eqn, part):
    """Whether an equation, or one inside of it, has a name with this part."""
    if part in eqn.primitive.name:
        return True
    return any(holds(e, part) for one in jaxprs_of(eqn) for e in one.eqns)


def named(jaxpr, part):
    return {i for i, eqn in enumerate(jaxpr.eqns) if holds(eqn, part)}


@FOUR
@pytest.mark.parametrize("all_reduce", [True, False])
@pytest.mark.parametrize("reduce_scatter", [True, False])
def test_what_a_gradient_waits_for(all_reduce, reduce_scatter):
    overlap = Overlap(all_reduce=all_reduce, reduce_scatter=reduce_scatter)
    scheme = Scheme(overlap=overlap, fused=False)

    def local(x, w, dy):
        _, transpose = jax.vjp(lambda x, w: parallel.dense(x, w, scheme=scheme), x, w)
        return transpose(dy)

    specs = (scheme.input_spec(), scheme.weight_spec(), scheme.output_spec())
    f = jax.shard_map(
        local, mesh=mesh_of(Grid(2, 1, 2)), in_specs=specs,
        out_specs=(scheme.input_spec(), scheme.weight_spec()),
    )  # fmt: skip
    (body,) = inner(
        jax.make_jaxpr(f)(np.ones((8, 4)), np.ones((4, 6)), np.ones((8, 6))).jaxpr, "shard_map"
    )
    of = ancestors(body)
    dx, dw = (of[v] for v in body.outvars)
    (scatter,) = named(body, "reduce_scatter")
    (sum_of_dx,) = {i for i in named(body, "psum") if body.eqns[i].outvars[0].aval.shape == (4, 4)}
    assert sum_of_dx in dx and scatter in dw
    assert (sum_of_dx not in of[body.eqns[scatter].invars[0]]) == all_reduce
    assert (scatter not in dx) == reduce_scatter


# ---- A loop over layers --------------------------------------------------------------------------


def stack_of(layers, scheme):
    t = scheme.transposed
    params = {
        "scale": random(layers, WIDTH),
        "up": (random(layers, WIDTH, HIDDEN, scale=0.2), random(layers, HIDDEN)),
        "down": (random(layers, HIDDEN, WIDTH, scale=0.2), random(layers, WIDTH)),
    }
    specs = {
        "scale": scheme.scale_spec(),
        "up": (scheme.weight_spec(), scheme.bias_spec()),
        "down": (t.weight_spec(), t.bias_spec()),
    }
    is_spec = lambda s: isinstance(s, P)  # noqa: E731
    return params, jax.tree.map(lambda s: P(None, *s), specs, is_leaf=is_spec)


def one_layer(ops, scheme, x, w, shift, gain):
    h = ops.rms_norm(x, w["scale"], scheme=scheme)
    h = jax.nn.gelu(ops.dense(h, *w["up"], scheme=scheme))
    return x + gain * ops.dense(h, *w["down"], scheme=scheme.transposed) + shift


@functools.cache
def expected_scan(layers):
    with jax.enable_x64(True):
        params, _ = stack_of(layers, SCHEME)
        x, weights = random(BATCH, 3, WIDTH), random(BATCH, 3, WIDTH, seed=1)

        def loss(params, x, gain):
            for i in range(layers):
                w = jax.tree.map(lambda a, i=i: a[i], params)
                x = one_layer(Plain, SCHEME, x, w, np.arange(3)[:, None], gain)
            return (x * weights).sum()

        return jax.value_and_grad(loss, argnums=(0, 1, 2))(params, x, 0.7)


def scanned(layers, grid, overlap=DEFAULT, remat=True, unroll=1, **options):
    """The loss over a loop of layers, as a function of global arrays, and its arguments."""
    scheme = Scheme(overlap=overlap)
    params, specs = stack_of(layers, scheme)

    def local(params, x, gain, shift, weights):
        y = parallel.scan(
            functools.partial(one_layer, parallel, scheme), x, params, shift, gain,
            specs=specs, scheme=scheme, remat=remat, unroll=unroll,
        )  # fmt: skip
        return lax.psum((y * weights).sum(), scheme.names("data", "z", "y"))

    rows = scheme.input_spec(3)
    mapped = jax.shard_map(
        local, mesh=mesh_of(grid), in_specs=(specs, rows, P(), P(), rows), out_specs=P(), **options
    )
    x, weights = random(BATCH, 3, WIDTH), random(BATCH, 3, WIDTH, seed=1)
    return mapped, (params, x, 0.7, np.arange(3)[:, None], weights)


def check_scan(layers, grid, overlap=DEFAULT, remat=True, **options):
    f, args = scanned(layers, grid, overlap, remat, **options)
    got = jax.jit(jax.value_and_grad(f, argnums=(0, 1, 2)))(*args)
    compare(got, expected_scan(layers))


@pytest.mark.parametrize("all_gather", [True, False])
@pytest.mark.parametrize("reduce_scatter", [True, False])
@pytest.mark.parametrize("cached", [0, 2, 9])
def test_scan_overlaps(all_gather, reduce_scatter, cached):
    check_scan(4, CUBE, Overlap(True, reduce_scatter, all_gather, cached))


@pytest.mark.parametrize("all_gather", [True, False])
def test_scan_without_remat(all_gather):
    check_scan(4, CUBE, Overlap(all_gather=all_gather), remat=False)


@pytest.mark.parametrize("remat", [True, False])
@pytest.mark.parametrize("all_gather", [True, False])
def test_scan_without_varying_types(remat, all_gather):
    check_scan(3, CUBE, Overlap(all_gather=all_gather), remat, check_vma=False)


@FOUR
@pytest.mark.parametrize("check_vma", [True, False])
def test_scan_keeps_inputs_alone(check_vma):
    """No layer's gathered weights outlive the layer."""
    f, args = scanned(5, Grid(1, 1, 4), check_vma=check_vma)
    text = str(jax.make_jaxpr(jax.grad(f))(*args))
    whole = re.findall(rf"f64\[[345],(?:{WIDTH},{HIDDEN}|{HIDDEN},{WIDTH})\]", text)
    assert set(whole) <= {f"f64[5,{WIDTH},{HIDDEN}]", f"f64[5,{HIDDEN},{WIDTH}]"}


def test_scan_carries():
    """A pytree, of which one leaf comes to vary through another; and an argument of Python's."""

    def layer(carry, w, double):
        x, total, before = carry
        y = jnp.where(double, 2, 1) * jnp.tanh(x * w)
        return y, x.sum(), total + before

    def local(x, w):
        zero = jnp.zeros((), x.dtype)
        spec = P(None, *SCHEME.scale_spec())
        y, _, before = parallel.scan(layer, (x, zero, zero), w, True, specs=spec)
        return lax.psum(y.sum() + before, ("data", "z", "y"))

    x, w = random(BATCH, WIDTH), random(4, WIDTH)
    specs = (SCHEME.input_spec(), P(None, *SCHEME.scale_spec()))
    f = jax.shard_map(local, mesh=mesh_of(CUBE), in_specs=specs, out_specs=P())
    got = jax.jit(jax.value_and_grad(f, argnums=(0, 1)))(x, w)

    def plain(x, w):
        carry = (x, 0.0, 0.0)
        for one in w:
            carry = layer(carry, one, True)
        return carry[0].sum() + carry[2]

    compare(got, jax.value_and_grad(plain, argnums=(0, 1))(x, w))


def test_scan_unrolled():
    for unroll in (2, 9):
        check_scan(4, CUBE, unroll=unroll)


@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("cached", [0, 2])
def test_scan_lengths(layers, cached):
    check_scan(layers, CUBE, Overlap(cached_layers=cached))


@pytest.mark.parametrize(
    "grid", [Grid(RANKS), Grid(1, RANKS), Grid(1, 1, RANKS // 2, 2), Grid(1, 1, 1, RANKS)], ids=str
)
def test_scan_grids(grid):
    if BATCH % (grid.z * grid.data) or WIDTH % (grid.y * grid.z) or HIDDEN % (grid.x * grid.z):
        pytest.skip("does not divide")
    check_scan(3, grid)


def gathers_and_scatters(layers, **options):
    """Of each loop of forward and backward: its jaxpr, and (gathers, scatters) in it."""
    f, args = scanned(layers, Grid(1, 1, 2, 2), **options)
    jaxpr = jax.make_jaxpr(jax.grad(f))(*args).jaxpr
    loops = inner(jaxpr, "scan")
    return [(body, named(body, "all_gather"), named(body, "reduce_scatter")) for body in loops]


@FOUR
@pytest.mark.parametrize("ahead", [True, False])
def test_scan_collectives_are_beside_the_layer(ahead):
    """What is gathered or scattered in an iteration depends on nothing that is computed there, and
    nothing that is computed there on it."""
    (forward, gathers, none), (backward, again, scatters) = gathers_and_scatters(
        4, overlap=Overlap(True, ahead, ahead)
    )
    assert gathers and again and scatters and not none
    for body, collectives in ((forward, gathers), (backward, again | scatters)):
        of, products = ancestors(body), named(body, "dot_general")
        assert products and not products & collectives
        fed = {i for i in collectives for v in body.eqns[i].invars if of.get(v, set()) & products}
        feed = {
            c for i in products for v in body.eqns[i].invars for c in of.get(v, set()) & collectives
        }
        assert bool(fed or feed) != ahead, (fed, feed)


@FOUR
def test_scan_keeps_gathered_weights():
    """Layers whose gathered weights are kept gather nothing in the backward pass."""
    loops = gathers_and_scatters(6, overlap=Overlap(cached_layers=4))
    counts = [(len(gathers), len(scatters)) for _, gathers, scatters in loops]
    # Forward: layers 0 and 1, then those that keep; backward: those that kept, then the others.
    assert counts == [(2, 0), (2, 0), (0, 2), (2, 2)]


def test_policy_keeps_gathered_weights():
    """`jax.checkpoint` gathers again in the backward pass, unless told not to."""
    counts = []
    for policy in (None, parallel.save_gathered):

        def local(x, w, policy=policy):
            layer = jax.checkpoint(lambda x, w: jnp.tanh(parallel.dense(x, w)), policy=policy)
            return lax.psum(layer(x, w).sum(), ("data", "z", "x"))

        specs = (SCHEME.input_spec(), SCHEME.weight_spec())
        f = jax.shard_map(local, mesh=mesh_of(Grid(1, 1, 2)), in_specs=specs, out_specs=P())
        text = str(jax.make_jaxpr(jax.grad(f, argnums=(0, 1)))(np.ones((4, 4)), np.ones((4, 4))))
        counts.append(text.count("all_gather["))
    assert counts == [2, 1]


def test_scan_errors():
    scheme = SCHEME

    def go(params, spec, entry=None):
        def local(params):
            return parallel.scan(lambda x, w: x, jnp.ones(()), params, specs=entry or spec)

        return jax.eval_shape(
            jax.shard_map(local, mesh=mesh_of(CUBE), in_specs=(spec,), out_specs=P()), params
        )

    lead = P(None, *scheme.weight_spec())
    with pytest.raises(ValueError, match="of one length"):
        go((np.ones((2, 8, 8)), np.ones((3, 8, 8))), (lead, lead))
    with pytest.raises(ValueError, match="1 PartitionSpecs"):
        go((np.ones((2, 8, 8)), np.ones((2, 8, 8))), (lead, lead), (lead,))
    with pytest.raises(ValueError, match="come last"):
        go(np.ones((2, 8, 8)), P(None, ("z", "y"), "x"))


def test_number_of_grids():
    """Every way to split eight ranks is tested."""
    assert len(GRIDS) == math.comb(int(math.log2(RANKS)) + 3, 3) or RANKS not in (2, 4, 8)


@pytest.mark.skipif(PLATFORM != "cpu", reason="on GPUs a stream keeps the order")
def test_scan_after_a_late_rank():
    """A rank that is late by seconds, once: neither that step nor a later one has other numbers.

    Handlers that return before their call is complete make XLA start the collectives that follow
    the loop beside those of the loop (docs/internals/cpu.md).
    """
    f, args = scanned(4, CUBE, Overlap(True, True, False, 0))
    step = jax.jit(jax.value_and_grad(f, argnums=(0, 1, 2)))
    jax.block_until_ready(step(*args))
    with testing.planted_faults(max_delay_us=1_300_000):
        late = step(*args)
        time.sleep(1.3)
    compare(late, expected_scan(4))
    for _ in range(5):
        compare(step(*args), expected_scan(4))
