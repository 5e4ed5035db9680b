"""jflux.Recipe: products in 8 bits and their gradients, against the recipe written in NumPy."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from harness import PLATFORM, RANKS, make_mesh, run
from jax.sharding import PartitionSpec as P

import jflux
from jflux import _native
from jflux import checkpoint_policies as policies
from jflux._ops._spec import all_ops

RECIPES = {name: getattr(jflux.Recipe, name) for name in ("tensor", "row", "block")}
WORLD = min(RANKS, 4)
K, N = 128 * WORLD, 128 * WORLD
#: By op, its own options.
OPS = {
    "matmul": {},
    "all_gather_matmul": {},
    "matmul_reduce_scatter": {},
    "matmul_all_reduce": {},
    "matmul_all_to_all": {"split_axis": 1, "concat_axis": 0},
    "all_to_all_matmul": {"split_axis": 0, "concat_axis": 1},
}
each_op = pytest.mark.parametrize("op", OPS)
each_recipe = pytest.mark.parametrize("recipe", RECIPES)


@pytest.fixture(autouse=True)
def without_kernels(strict):
    """Few kernels take operands with a scale yet."""
    with jflux.config(strict=False):
        yield


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def call(op, world=WORLD, **options):
    """The op on global arrays of so many ranks."""
    function = getattr(jflux, op)
    if op == "matmul":
        return functools.partial(function, **options)
    where = {"axis_name": "tp", "mesh": make_mesh((world,))}
    return functools.partial(function, **OPS[op], **where, **options)


def operands(rows, dtype=np.float32):
    """x, w and dy of very different rows, columns and ranks."""
    x, w, dy = normal(0, rows, K), normal(1, K, N), normal(2, rows, N)
    x, dy = (a * np.exp(2 * normal(i, rows, 1)) for i, a in ((3, x), (4, dy)))
    dy = 1e-4 * dy * np.exp(normal(5, 1, N))
    return tuple(np.asarray(a, dtype) for a in (x, w * np.exp(normal(6, K, 1)), dy))


# ---- The recipe, in NumPy ------------------------------------------------------------------------


def q(a, form):
    """What a [rows, columns] quantised by a format means, in float64."""
    rows, columns = (s if b == -1 else b for s, b in zip(a.shape, form.block, strict=True))
    result = np.zeros(a.shape)
    for i in range(0, a.shape[0], rows):
        for j in range(0, a.shape[1], columns):
            block = np.asarray(a[i : i + rows, j : j + columns], np.float64)
            most = np.abs(block).max()
            largest = float(ml_dtypes.finfo(form.dtype).max)
            scale = 2.0 ** np.ceil(np.log2(most / largest)) if most else 1.0
            values = np.asarray(block / scale, np.float32).astype(form.dtype)
            result[i : i + rows, j : j + columns] = values.astype(np.float64) * scale
    return result


def products(recipe, op, xs, ws, dys):
    """y, dx and dw of each rank, from all ranks' x, w and dy."""
    bf16 = lambda a: np.asarray(a, np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)  # noqa: E731
    exchanged = lambda arrays: arrays  # noqa: E731
    back, after = exchanged, op in ("all_gather_matmul", "all_to_all_matmul")
    if op not in ("matmul", "matmul_all_reduce"):
        collective = all_ops()[op].communication(2, **OPS[op])
        exchanged, back = collective.exact, collective.transposed().exact
    qx, qdy = [q(x, recipe.x) for x in xs], [q(dy, recipe.dy) for dy in dys]
    moved, dproducts = (exchanged(qx), qdy) if after else (qx, back(qdy))
    ys = [x @ q(w.T, recipe.w).T for x, w in zip(moved, ws, strict=True)]
    dxs = [d @ q(w, recipe.w).T for d, w in zip(dproducts, ws, strict=True)]
    if not after and op not in ("matmul", "matmul_all_reduce"):
        ys = exchanged(ys)
    else:
        dproducts = [dy.astype(np.float64) for dy in dys]  # a rank has them before they are rounded
        dxs = back(dxs)
    if op == "matmul_all_reduce":
        ys = [sum(ys)] * len(ys)
    if recipe.dw is None:
        dws = [x.T @ bf16(d) for x, d in zip(moved, dproducts, strict=True)]
    else:
        of_x, of_dy = recipe.dw
        dws = [q(x.T, of_x) @ q(d.T, of_dy).T for x, d in zip(moved, dproducts, strict=True)]
    return ys, dxs, dws


def wanted(recipe, op, world, x, w, dy):
    """y, dx and dw of global arrays."""
    if op == "matmul" or world == 1:
        return [one for (one,) in products(recipe, "matmul", [x], [w], [dy])]
    layout = all_ops()[op].layout(2, **OPS[op])
    at = layout.rows["x"], layout.others["w"], layout.rows["y"]

    def split(a, axis):
        return [a] * world if axis is None else np.split(a, world, axis)

    found = products(recipe, op, *(split(a, i) for a, i in zip((x, w, dy), at, strict=True)))
    # A w or y that all ranks have: gradients are the sum of theirs.
    whole = [
        one[0] if name == "y" and axis is None
        else sum(one) if axis is None
        else np.concatenate(one, axis)
        for name, axis, one in zip(("y", "x", "w"), (at[2], at[0], at[1]), found, strict=True)
    ]  # fmt: skip
    return whole


def gradients(f, x, w, dy):
    """y, dx and dw."""

    @jax.jit
    def all_of(x, w, dy):
        y, vjp = jax.vjp(f, x, w)
        # After y, as in a program: XLA's collectives and kernels on CPUs have one order then.
        return y, *vjp(dy.astype(y.dtype) + 0 * y)

    return run(all_of, x, w, dy)


#: dy's squares for dw: scales as those of a weight.
SQUARES = dataclasses.replace(jflux.Recipe.block, dw=(jflux.Recipe.block.x, jflux.Recipe.block.w))


#: What tensor cores lose of sums of 8-bit floats, of which they align 32 to the largest.
OF_TENSOR_CORES = 2.0**-9 if PLATFORM == "gpu" else 0


@pytest.mark.parametrize("recipe", [*RECIPES, "squares"])
@each_op
def test_against_the_recipe_in_numpy(op, recipe):
    recipe = (RECIPES | {"squares": SQUARES})[recipe]
    x, w, dy = operands(40 * WORLD)
    got = gradients(call(op, recipe=recipe), x, w, dy)
    want = wanted(recipe, op, WORLD, x, w, dy)
    terms = (np.abs(x) @ np.abs(w), np.abs(dy) @ np.abs(w).T, np.abs(x).T @ np.abs(dy))
    for one, exact, size in zip(got, want, terms, strict=True):
        # Of float32's sums alone: operands are the same to the last bit.
        assert np.all(np.abs(one - exact) <= (OF_TENSOR_CORES or 2.0**-20) * size)


@each_op
def test_what_8_bits_hold_is_multiplied_as_it_is(op):
    """Whole numbers up to 8 and in each block one 448: scales are 1, and nothing is rounded."""
    rng = np.random.default_rng(0)
    rows = 128 * WORLD
    arrays = []
    for shape in ((rows, K), (K, N), (rows, N)):
        a = rng.integers(-8, 9, shape).astype(np.float32)
        i = np.arange(max(shape))
        a[i % shape[0], i % shape[1]] = 448  # in each row, column and 128 of them
        for block in range(0, shape[1], 128):
            rows_of = np.arange(shape[0])
            a[rows_of, block + rows_of % 128] = 448
        arrays.append(a)
    x, w, dy = arrays
    want = gradients(call(op), x, w, dy)
    for recipe in RECIPES.values():
        e4m3 = dataclasses.replace(recipe.dy, dtype=jnp.float8_e4m3fn)
        dw = recipe.dw and (recipe.dw[0], dataclasses.replace(recipe.dw[1], dtype=e4m3.dtype))
        got = gradients(call(op, recipe=dataclasses.replace(recipe, dy=e4m3, dw=dw)), x, w, dy)
        near(got, want, step=OF_TENSOR_CORES)


# ---- Several weights, epilogues, and weights that were quantised before --------------------------


def near(got, want, step=2.0**-18):
    """Relative to the largest: sums of other orders."""
    for one, exact in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.max(np.abs(one - exact)) <= step * np.max(np.abs(exact))


@each_recipe
def test_a_gated_mlp(recipe):
    """In the ops, and in `jax.numpy` behind their products alone; weights are quantised in each
    call, and before them."""
    recipe = RECIPES[recipe]
    x, up, down = (normal(i, *s) / 16 for i, s in enumerate(((64, K), (K, N), (N, K))))
    gate, biases = normal(3, K, N) / 16, (normal(4, N), None, normal(5, K))
    gather, scatter = (call(op, recipe=recipe) for op in ("all_gather_matmul",
                                                           "matmul_reduce_scatter"))  # fmt: skip

    def of_ops(x, gate, up, down, bias, other):
        hidden = gather(x, (gate, up), bias=(bias, None), activation="silu", gated=True)
        return scatter(hidden, down, bias=other, residual=x)

    def quantized(x, *weights):
        return of_ops(x, *map(recipe.quantize_weight, weights[:3]), *weights[3:])

    def by_hand(x, gate, up, down, bias, other):
        hidden = jax.nn.silu(gather(x, gate) + bias) * gather(x, up)
        return scatter(hidden, down) + other + x

    given = (x, gate, up, down, biases[0], biases[2])
    results = []
    for f in (of_ops, quantized, by_hand):
        loss = lambda *a, f=f: jnp.sum(jnp.sin(f(*a)))  # noqa: E731
        results.append(run(jax.jit(jax.value_and_grad(loss, range(6))), *given))
    # Where sums differ in their last bit, a value may be rounded to its neighbour. Of a weight that
    # is quantised whole, rows have a scale over all ranks.
    near(results[1], results[0], step=0 if recipe is jflux.Recipe.block else 2.0**-6)
    near(results[2], results[0], step=2.0**-6)


@pytest.mark.parametrize("block", [(128, 128), (-1, -1), (-1, 128)], ids=str)
def test_weights_of_a_gate_in_16_bits(block):
    """One that was quantised before beside one that was not, and blocks that are no squares."""
    form = jflux.Format(jnp.float8_e4m3fn, block)
    recipe = dataclasses.replace(jflux.Recipe.block, w=form)
    x, *weights = (jnp.asarray(normal(i, *s) / 16, jnp.bfloat16)
                   for i, s in enumerate(((64, K), (K, N), (K, N))))  # fmt: skip

    def loss(before, x, gate, up):
        weights = (gate, recipe.quantize_weight(up) if before else up)
        y = jflux.matmul(x, weights, activation="silu", gated=True, recipe=recipe)
        return jnp.sum(jnp.sin(y.astype(jnp.float32)))

    got, want = (jax.jit(jax.grad(functools.partial(loss, b), (0, 1, 2)))(x, *weights)
                 for b in (True, False))  # fmt: skip
    for one, other in zip(got, want, strict=True):
        near(np.asarray(one, np.float32), np.asarray(other, np.float32), step=2.0**-7)


def test_weights_are_quantised_once_a_step():
    """Microbatches in a scan of checkpoints; layers in a scan."""
    recipe, op = jflux.Recipe.block, call("all_gather_matmul", recipe=jflux.Recipe.block)
    xs, w = normal(0, 3, 4 * WORLD, K) / 16, normal(1, K, N) / 16

    def loss(w, xs):
        w = recipe.quantize_weight(w)

        def add(total, x):
            return total + jnp.sum(jnp.sin(jax.checkpoint(op)(x, w))), None

        return jax.lax.scan(add, jnp.float32(0), xs)[0]

    got = run(jax.jit(jax.value_and_grad(loss)), w, xs)
    one = jax.jit(jax.value_and_grad(lambda w, x: jnp.sum(jnp.sin(op(x, w)))))
    each = [run(one, w, x) for x in xs]
    near(got, jax.tree.map(lambda *parts: sum(parts), *each))
    text = str(jax.make_jaxpr(jax.grad(loss))(w, xs))
    assert len(re.findall(r"block=\(128, 128\), transpose=True", text)) == 1

    def stacked(ws, x):
        ws = recipe.quantize_weight(ws)
        return jnp.sum(jax.lax.scan(lambda x, w: (jflux.matmul(jnp.sin(x), w), None), x, ws)[0])

    ws, x = np.stack([w, w.T]), xs[0]
    got = run(jax.jit(jax.grad(stacked)), ws, x)

    def unrolled(ws, x):
        for w in ws:
            x = jflux.matmul(jnp.sin(x), w, recipe=recipe)
        return jnp.sum(x)

    near(got, run(jax.jit(jax.grad(unrolled)), ws, x))


# ---- What is kept --------------------------------------------------------------------------------


def kept_bytes(f, *operands):
    """Of all that the backward pass of f needs."""
    types = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in operands]
    kept = jax.eval_shape(lambda *a: jax.vjp(f, *a)[1], *types)
    return sum(math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(kept))


@each_op
def test_less_is_kept_than_in_16_bits(op):
    x, w, _ = operands(128 * WORLD, jnp.bfloat16)
    wide = kept_bytes(call(op), x, w)
    assert wide >= x.nbytes + w.nbytes
    # Of x half as much, and scales. Of w as much, on each rank where all have it whole.
    copies = WORLD if "split_axis" in OPS[op] else 1
    for recipe in RECIPES.values():
        kept = kept_bytes(call(op, recipe=recipe), x, w)
        assert kept - copies * w.nbytes <= 0.55 * (wide - w.nbytes)


def test_checkpoint_policies_know_what_is_kept():
    recipe = jflux.Recipe.row
    x, up, down = (jnp.asarray(normal(i, *s) / 16, jnp.bfloat16)
                   for i, s in enumerate(((64, K), (K, N), (N, K))))  # fmt: skip

    def block(x, up, down):
        hidden = call("all_gather_matmul", recipe=recipe)(x, up, activation="silu")
        return jnp.sum(jnp.sin(call("matmul_reduce_scatter", recipe=recipe)(hidden, down)))

    plain = jax.jit(jax.value_and_grad(block, (0, 1, 2)))(x, up, down)
    for policy in (policies.products_saveable, policies.products_saveable_gathering_again, None):
        again = jax.checkpoint(block, policy=policy)
        got = jax.jit(jax.value_and_grad(again, (0, 1, 2)))(x, up, down)
        near(jax.tree.map(lambda a: a.astype(jnp.float32), got),
             jax.tree.map(lambda a: a.astype(jnp.float32), plain), step=2.0**-6)  # fmt: skip
    kept = {
        policy: kept_bytes(jax.checkpoint(block, policy=policy), x, up, down)
        for policy in (policies.products_saveable, policies.products_saveable_gathering_again, None)
    }
    weights = x.nbytes + up.nbytes + down.nbytes
    hidden = 64 * N
    assert kept[None] == weights
    # Of the activation what it takes, 16 bits, and what it returns, quantised; scales beside; y.
    again = kept[policies.products_saveable_gathering_again] - weights
    assert again <= 3 * hidden + 2 * x.size + 4 * 64 * WORLD
    # The gathered x of 8 bits, in place of x.
    gathered = kept[policies.products_saveable] - weights - again
    assert (WORLD - 2) * x.size <= gathered <= WORLD * x.size + 4 * 64


# ---- Transformations, and mistakes ---------------------------------------------------------------


def test_transformations():
    """Several recipes in one program, vmap, and donation."""
    xs, w = normal(0, 2, 8 * WORLD, K) / 16, normal(1, K, N) / 16
    row, block = jflux.Recipe.row, jflux.Recipe.block

    def loss(x, w, recipe):
        y = call("all_gather_matmul", recipe=recipe)(x, w)
        return jnp.sum(jnp.sin(call("matmul_reduce_scatter", recipe=recipe)(y, w.T)))

    def one(recipe):
        return jax.grad(functools.partial(loss, recipe=recipe), (0, 1))

    by_row, by_block = run(jax.jit(one(row)), xs[0], w), run(jax.jit(one(block)), xs[0], w)
    batched = run(jax.jit(jax.vmap(one(block), (0, None))), xs, w)
    # A batch may take another path, and values another neighbour.
    of_paths = 2.0**-4 if PLATFORM == "gpu" else 2.0**-18
    near(jax.tree.map(lambda a: a[0], batched), by_block, step=of_paths)

    columns = jax.sharding.NamedSharding(make_mesh((WORLD,)), P(None, "tp"))
    given = jax.device_put(w, columns)
    step = jax.jit(
        lambda w, x: w - one(row)(x, w)[1] - one(block)(x, w)[1],
        donate_argnums=0, out_shardings=columns,
    )  # fmt: skip
    got = step(given, xs[0])
    assert given.is_deleted()
    near(got, w - by_row[1] - by_block[1], step=of_paths)


def test_mistakes_are_told():
    x, w = normal(0, 8 * WORLD, K), normal(1, K, N)
    recipe = jflux.Recipe.block
    gather = call("all_gather_matmul", recipe=recipe)
    quantized = jax.jit(recipe.quantize_weight)(w)
    row = jflux.Recipe.row

    def told(kind, message, f, *args, **options):
        with pytest.raises(kind, match=message):
            jax.eval_shape(functools.partial(f, **options), *args)

    with pytest.raises(NotImplementedError, match="reverse mode alone"):
        jax.jit(lambda x: jax.jvp(lambda x: gather(x, w), (x,), (x,))).lower(x)
    told(ValueError, "return_gathered=True is not taken", gather, x, w, return_gathered=True)
    told(TypeError, "recipe must be a jflux.Recipe", jflux.matmul, x, w, recipe="block")
    told(TypeError, "of 16 bits at least", gather, x.astype(ml_dtypes.float8_e4m3fn), w)
    told(TypeError, "of 16 bits at least", gather, x, quantized.backward)
    told(ValueError, "w was quantised by", jflux.matmul, x, quantized, recipe=row)
    told(ValueError, "w was quantised with transpose_rhs=False", jflux.matmul, x, quantized,
         transpose_rhs=True)  # fmt: skip
    with pytest.raises(ValueError, match="takes a scale out of the sum"):
        jflux.Format(jnp.int8, (1, 1))
    with pytest.raises(TypeError, match="is not one of"):
        jflux.Format(jnp.bfloat16, (1, -1))
    with pytest.raises(ValueError, match="must have 1 or -1 rows"):
        dataclasses.replace(recipe, x=recipe.w)
    exchange = call("matmul_all_to_all", recipe=recipe)
    if WORLD > 1:
        told(ValueError, "whole blocks of 128", exchange, x, w[:, : 64 * WORLD])


@pytest.mark.skipif(WORLD == 1, reason="one rank sends nothing")
def test_explain_shows_the_products():
    x, w = normal(0, 8 * WORLD, K), normal(1, K, N)

    def loss(x, w):
        return jnp.sum(jnp.sin(call("all_gather_matmul", recipe=jflux.Recipe.block)(x, w)))

    calls = jflux.explain(jax.grad(loss, (0, 1)), x, w)
    products = [one for one in calls if one.op in OPS]
    assert [one.op for one in products] == ["all_gather_matmul", "matmul_reduce_scatter", "matmul"]
    assert all("float8" in one.operands[0] for one in products)


@each_recipe
def test_several_terms(recipe):
    """One scatter of their sum, and one dx of several products: they are those of each."""
    recipe = RECIPES[recipe]
    xs = tuple(normal(i, 8 * WORLD, K) / 16 for i in (0, 1))
    ws = tuple(normal(i, K, N) / 16 for i in (2, 3))
    scatter = call("matmul_reduce_scatter", recipe=recipe)

    def together(xs, ws):
        return scatter(xs, ws) + sum(jflux.matmul(xs[0], ws, recipe=recipe))

    def apart(xs, ws):
        own = [jflux.matmul(xs[0], w, recipe=recipe) for w in ws]
        return sum([scatter(x, w) for x, w in zip(xs, ws, strict=True)], sum(own))

    got, want = (
        run(jax.jit(jax.value_and_grad(lambda *a, f=f: jnp.sum(jnp.sin(f(*a))), (0, 1))), xs, ws)
        for f in (together, apart)
    )
    near(got, want, step=OF_TENSOR_CORES * 16 or 2.0**-6)


@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_reduce_scatter", "all_to_all_matmul"])
def test_one_gradient_alone(op):
    """What dw needs of dy travels without dx too."""
    x, w, dy = operands(8 * WORLD)
    f = lambda x, w: jnp.sum(call(op, recipe=jflux.Recipe.block)(x, w) * dy)  # noqa: E731
    both = jax.jit(jax.grad(f, (0, 1)))(x, w)
    near([jax.jit(jax.grad(f, i))(x, w) for i in (0, 1)], both)


def test_one_rank_multiplies_as_matmul_does():
    x, w, dy = operands(8 * WORLD)
    recipe = jflux.Recipe.block
    bias, residual = normal(7, N), normal(8, *dy.shape)
    want = gradients(functools.partial(jflux.matmul, recipe=recipe), x, w, dy)
    added = {"matmul_reduce_scatter": {"bias": bias, "residual": residual}}
    for op in set(OPS) - {"matmul", "matmul_all_reduce"}:
        more = added.get(op, {})
        got = gradients(call(op, 1, recipe=recipe, **more), x, w, dy)
        near(got[0], want[0] + (bias + residual if more else 0))
        near(got[1:], want[1:])


def test_references_take_recipes():
    x, w, dy = operands(8 * WORLD)
    # References send dy on one rank too: its copy for dw is rounded.
    ops = ("all_gather_matmul", "matmul_all_reduce", "matmul_all_to_all")
    for op in ops[: 3 if WORLD > 1 else 2]:
        where = {"axis_name": "tp", "mesh": make_mesh((WORLD,))}
        f = functools.partial(
            getattr(jflux.reference, op), recipe=jflux.Recipe.row, **OPS[op], **where
        )
        got = jax.jit(jax.grad(lambda x, w, f=f: jnp.sum(f(x, w) * dy), (0, 1)))(x, w)
        near(got, wanted(jflux.Recipe.row, op, WORLD, x, w, dy)[1:])


def test_gpus_take_all_products(lowered_without_gpus, monkeypatch):
    """Of a gated MLP's step; dx of two weights is one product."""
    monkeypatch.setattr(_native.lib, "built_with_cuda", lambda: True)

    def local(x, gate, up, down):
        options = {"axis_name": "tp", "recipe": jflux.Recipe.block}
        y = jflux.all_gather_matmul(x, (gate, up), activation="silu", gated=True, **options)
        return jflux.matmul_reduce_scatter(y, down, **options)

    f = jax.shard_map(
        local, mesh=make_mesh((2,)), out_specs=P("tp"),
        in_specs=(P("tp"), P(None, "tp"), P(None, "tp"), P("tp")),
    )  # fmt: skip
    types = [
        jax.ShapeDtypeStruct(s, jnp.bfloat16)
        for s in ((4096, 512), (512, 1280), (512, 1280), (1280, 512))
    ]
    step = jax.grad(lambda *args: jnp.sum(jnp.sin(f(*args))), range(4))
    calls, _ = lowered_without_gpus(step, *types)
    assert all(call.plan.path == "fused" for call in calls)
    # Forward and backward; a product for two equal ones is listed once.
    assert [call.op for call in calls if call.op in OPS] == [
        "all_gather_matmul", "matmul_reduce_scatter",
        "all_gather_matmul", "matmul", "matmul_reduce_scatter", "matmul",
    ]  # fmt: skip


@pytest.mark.skipif(WORLD < 2, reason="two axes")
def test_shard_map_knows_what_varies():
    """Over two axes: gradients of weights that data-parallel groups share are summed."""
    mesh = make_mesh((2, WORLD // 2), ("data", "tp"))
    x, w = normal(0, 64, K) / 16, normal(1, K, N) / 16

    def loss(x, w):
        y = jflux.all_gather_matmul(x, w, axis_name="tp", recipe=jflux.Recipe.block)
        y = jflux.matmul_all_reduce(y, w.T, axis_name="tp", recipe=jflux.Recipe.block)
        return jax.lax.psum(jnp.sum(jnp.sin(y)), "data")

    specs = {"in_specs": (P(("data", "tp")), P(None, "tp")), "out_specs": P()}
    mapped = jax.shard_map(loss, mesh=mesh, **specs)

    def plain(x, w):
        y = jflux.matmul(x, w, recipe=jflux.Recipe.block)
        return jnp.sum(jnp.sin(jflux.matmul(y, w.T, recipe=jflux.Recipe.block)))

    got, want = (run(jax.jit(jax.grad(f, (0, 1))), x, w) for f in (mapped, plain))
    near(got, want, step=2.0**-6)


# ---- Delayed scaling -----------------------------------------------------------------------------

each_way = pytest.mark.parametrize("way", ["global", "shard_map", "check_vma=False"])


@each_way
def test_delayed_scaling_over_ranks(way):
    """Three steps of an MLP on one rank and on several: y, gradients and states are the same."""
    recipe = jflux.Recipe.tensor
    x, up, down = normal(0, 64, K) / 4, normal(1, K, N) / 16, normal(2, N, K) / 16
    ops = ("all_gather_matmul", "matmul_reduce_scatter")

    def loss(gather, scatter, x, up, down, states):
        hidden = gather(x, up, activation="silu", recipe=states[0])
        return jnp.sum(jnp.sin(scatter(hidden, down, recipe=states[1])))

    def on_one_rank(*args):
        return loss(jflux.matmul, jflux.matmul, *args)

    def on_ranks(*args):
        if way == "global":
            return loss(*map(call, ops), *args)
        bound = [functools.partial(getattr(jflux, op), axis_name="tp") for op in ops]
        return jax.shard_map(
            lambda *args: jax.lax.psum(loss(*bound, *args), "tp"), mesh=make_mesh((WORLD,)),
            in_specs=(P("tp"), P(None, "tp"), P("tp"), P()), out_specs=P(),
            check_vma=way == "shard_map",
        )(*args)  # fmt: skip

    states = [(recipe.delayed(2),) * 2] * 2
    steps = [jax.jit(jax.value_and_grad(f, range(4))) for f in (on_one_rank, on_ranks)]
    for i in range(3):
        scaled = x * 2.0**i
        one, other = (run(step, scaled, up, down, s) for step, s in zip(steps, states, strict=True))
        near(other[0], one[0], step=2.0**-6)
        near(other[1][:3], one[1][:3], step=2.0**-4)
        near(other[1][3], one[1][3], step=2.0**-6)
        states = [one[1][3], other[1][3]]
    # Histories of two steps: the third one's scale is of the second one's x.
    most = np.abs(x).max()
    state = states[1][0]
    assert np.array_equal(np.sort(state.input_amax_history), np.float32([2 * most, 4 * most]))
    assert state.input_scale == 2.0 ** np.ceil(np.log2(2 * most / 448))
    assert state.output_grad_scale < 1 and state.kernel_scale < 1


def test_delayed_scaling_is_that_of_flax():
    fp8_ops = pytest.importorskip("flax.linen.fp8_ops")
    recipe = jflux.Recipe.tensor
    x, dy = (dataclasses.replace(form, power_of_two=False) for form in (recipe.x, recipe.dy))
    recipe = dataclasses.replace(recipe, x=x, w=x, dy=dy, dw=(x, dy))
    x, w, dy = operands(64)
    flax = fp8_ops.Fp8DirectDotGeneralOp(amax_history_length=4)
    numbers = (((1,), (0,)), ((), ()))
    name = "_overwrite_with_gradient"
    theirs = jax.jit(flax.init, static_argnums=3)(jax.random.key(0), x, w, numbers)[name]
    ours = recipe.delayed(4)

    @jax.jit
    def step(x, w, dy, theirs, ours):
        by_flax = lambda x, w, s: jnp.sum(flax.apply({name: s}, x, w, numbers) * dy)  # noqa: E731
        by_jflux = lambda x, w, s: jnp.sum(jflux.matmul(x, w, recipe=s) * dy)  # noqa: E731
        return jax.grad(by_flax, (0, 1, 2))(x, w, theirs), jax.grad(by_jflux, (0, 1, 2))(x, w, ours)

    for i in range(4):
        want, got = run(step, x * 1.5**i, w, dy, theirs, ours)
        near(got[:2], want[:2], step=2.0**-4)
        theirs, ours = want[2], got[2]
        for field, value in theirs.items():
            np.testing.assert_allclose(getattr(ours, field), value, rtol=1e-6)
    told = pytest.raises(ValueError, match="scales of tensors alone")
    with told:
        jflux.Recipe.block.delayed()


def test_delayed_scaling_under_explicit_sharding():
    """The state's arrays are operands of the shard_map that a call makes."""
    mesh = make_mesh((WORLD,), axis_type=jax.sharding.AxisType.Explicit)
    x, w = normal(0, 8 * WORLD, K), normal(1, K, N)
    state = jflux.Recipe.tensor.delayed(2)

    def loss(x, w, state):
        return jnp.sum(jnp.sin(jflux.all_gather_matmul(x, w, axis_name="tp", recipe=state)))

    with jax.set_mesh(mesh):
        placed = jax.device_put(x, P("tp")), jax.device_put(w, P(None, "tp"))
        found = jax.jit(jax.grad(loss, 2))(*placed, state)
    assert np.array_equal(np.sort(found.input_amax_history), [0, np.abs(x).max()])
    assert np.array_equal(np.sort(found.kernel_amax_history), [0, np.abs(w).max()])
