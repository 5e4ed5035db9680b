"""grouped_matmul of operands with scales, against float64 of what they mean."""

import collections
import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from harness import PLATFORM, make_mesh
from jax.sharding import PartitionSpec as P

import jflux
from jflux import _native
from jflux._call import gpu_code, tuning_tables
from jflux._ops import _quantize_groups, _scaled
from jflux._ops.products import _grouped_by_recipe

E4M3, E5M2, INT8 = (np.dtype(t) for t in (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, np.int8))
SIZES = (37, 0, 1, 50)
ROWS = 100

#: Blocks of x [rows, k] and of w [n, k].
SCALES = {
    "tensor": ((-1, -1), (-1, -1)),
    "row": ((1, -1), (1, -1)),
    "block": ((1, 128), (128, 128)),
    "square": ((128, 128), (-1, -1)),
    "vector": ((1, 128), (1, 128)),
}


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def quantized(seed, shape, block, dtype=E4M3):
    return jflux.quantize(jnp.asarray(normal(seed, *shape)), dtype, block=block)


def exact(operand):
    """What it means, in float64."""
    scale = np.asarray(operand.scale, np.float64)
    for axis, size in enumerate(operand.shape):
        if scale.shape[axis] not in (1, size):
            scale = np.take(np.repeat(scale, 128, axis), range(size), axis)
    return np.asarray(operand.values).astype(np.float64) * scale


def grouped(x, w, sizes=SIZES):
    """Of each row of x by the [n, k] of its group; zeros past the last."""
    y = np.zeros((x.shape[0], w.shape[1]))
    ends = np.cumsum(sizes)
    for group, (end, size) in enumerate(zip(ends, sizes, strict=True)):
        y[end - size : end] = x[end - size : end] @ w[group].T
    return y


def assert_near(y, want, terms):
    """Sums in float32, rounded to y's type: relative to the sums of absolute values."""
    of_sums = 2.0**-12 if PLATFORM == "gpu" else 8 * 2.0**-24  # tensor cores keep fewer bits
    step = float(jnp.finfo(y.dtype).eps) / 2 + of_sums
    assert np.all(np.abs(np.asarray(y, np.float64) - want) <= step * terms + 1e-30)


def drawn(scales, k=272, n=144, dtypes=(E4M3, E4M3), seed=0):
    """x, and w [groups, n, k], of which a group is much larger than the others; rows past the last
    group are no numbers."""
    of_x, of_w = SCALES[scales]
    wide = normal(seed, ROWS, k)
    wide[sum(SIZES) :] = 1 if dtypes[0] == INT8 or of_x[0] != 1 else np.nan
    x = jflux.quantize(jnp.asarray(wide), dtypes[0], block=of_x)
    factors = np.array([1, 2, 300, 0.01], np.float32)[:, None, None]
    w = normal(seed + 1, len(SIZES), n, k) * factors
    return x, jflux.quantize(jnp.asarray(w), dtypes[1], block=of_w)


PAIRS = [(E4M3, E4M3), (E5M2, E4M3), (INT8, INT8)]


@pytest.mark.parametrize(
    ("scales", "dtypes", "k"),
    [
        *((s, PAIRS[0], 272) for s in SCALES),
        *((s, PAIRS[1], 272) for s in ("row", "block")),
        *(("row", PAIRS[2], k) for k in (272, 51)),
        ("block", PAIRS[2], 272),
    ],
)
def test_equals_its_definition(scales, dtypes, k):
    x, w = drawn(scales, k, dtypes=dtypes)
    kept = np.arange(ROWS)[:, None] < sum(SIZES)
    wide = np.where(kept, exact(x), 0), exact(w)
    want, terms = grouped(*wide), grouped(*map(np.abs, wide))
    for module in (jflux, jflux.reference):
        y = jax.jit(functools.partial(module.grouped_matmul, transpose_rhs=True))(
            x, w, jnp.array(SIZES)
        )
        assert y.dtype == jnp.bfloat16
        assert_near(y, want, terms)
        assert not np.any(y[sum(SIZES) :])
    y = jflux.grouped_matmul(
        x, w.T, jnp.array(SIZES), preferred_element_type=jnp.float32, row_scale=jnp.full(ROWS, 3.0)
    )
    assert_near(y, 3 * want, 3 * terms)


@pytest.mark.parametrize("scales", ["row", "block"])
def test_a_gate(scales):
    x, gate = drawn(scales)
    _, up = drawn(scales, seed=5)
    row_scale = jnp.asarray(np.abs(normal(9, ROWS)))
    call = functools.partial(
        jflux.grouped_matmul, transpose_rhs=True, activation="relu", gated=True,
        row_scale=row_scale, preferred_element_type=jnp.float32,
    )  # fmt: skip
    y = call(x, (gate, up), jnp.array(SIZES))
    x = np.where(np.arange(ROWS)[:, None] < sum(SIZES), exact(x), 0)
    a, b = (grouped(x, exact(w)) for w in (gate, up))
    terms = [grouped(np.abs(x), np.abs(exact(w))) for w in (gate, up)]
    factors = np.asarray(row_scale, np.float64)[:, None]
    assert_near(y, factors * np.maximum(a, 0) * b, 3 * factors * terms[0] * terms[1])


def test_equal_scales_have_equal_bits():
    """Whole numbers and scales of a power of two: no sum is rounded."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.integers(-8, 9, (ROWS, 384)), jnp.float32).astype(E4M3)
    w = jnp.asarray(rng.integers(-8, 9, (4, 256, 384)), jnp.float32).astype(E4M3)
    bits = set()
    for of_x, of_w in (((1, 1), (1, 1, 1)), ((ROWS, 1), (4, 256, 1)), ((ROWS, 3), (4, 2, 3))):
        operands = (jflux.Scaled(a, jnp.full(s, 2.0**-5)) for a, s in ((x, of_x), (w, of_w)))
        y = jflux.grouped_matmul(
            *operands, jnp.array(SIZES), transpose_rhs=True, preferred_element_type=jnp.float32
        )
        bits.add(np.asarray(y).tobytes())
    wide = grouped(np.asarray(x, np.float64), np.asarray(w, np.float64)) * 2.0**-10
    assert bits == {wide.astype(np.float32).tobytes()}


@pytest.mark.parametrize("of", ["block of x", "block of w", "group"])
def test_a_scale_of_a_neighbour_is_told(of):
    """That the bounds here tell it."""
    x, w = drawn("block")
    kept = np.where(np.arange(ROWS)[:, None] < sum(SIZES), exact(x), 0)
    want, terms = grouped(kept, exact(w)), grouped(np.abs(kept), np.abs(exact(w)))
    if of == "block of x":
        x = jflux.Scaled(x.values, jnp.roll(x.scale, 1, 1))
    else:
        w = jflux.Scaled(w.values, jnp.roll(w.scale, 1, 0 if of == "group" else 1))
    with pytest.raises(AssertionError):
        assert_near(jflux.grouped_matmul(x, w, jnp.array(SIZES), transpose_rhs=True), want, terms)


@pytest.mark.parametrize("scales", ["row", "block"])
@pytest.mark.parametrize("batched", [(0, None, None), (0, 0, 0)])
def test_a_batch(scales, batched):
    each = [drawn(scales, seed=seed) for seed in (0, 10)]
    xs, ws = (jax.tree.map(lambda *a: jnp.stack(a), *one) for one in zip(*each, strict=True))
    sizes = jnp.array([SIZES, SIZES[::-1]])
    call = functools.partial(jflux.grouped_matmul, transpose_rhs=True)
    w, s = (each[0][1], sizes[0]) if batched[1] is None else (ws, sizes)
    got = jax.vmap(call, batched)(xs, w, s)
    for i in range(2):
        w, s = (each[0][1], sizes[0]) if batched[1] is None else (each[i][1], sizes[i])
        assert np.array_equal(got[i], call(each[i][0], w, s))


def test_empty_operands():
    for m, k, n in ((0, 16, 16), (8, 0, 16)):
        x, w = quantized(0, (m, k), (-1, -1)), quantized(1, (2, k, n), (-1, -1))
        y = jflux.grouped_matmul(x, w, jnp.zeros(2, jnp.int32))
        assert y.shape == (m, n) and y.dtype == jnp.bfloat16 and not y.any()


@pytest.mark.parametrize(
    ("x_scale", "w_scale", "says"),
    [
        ((7, 1), (3, 1, 1), r"the scale of x has shape \(7, 1\), its values have \(8, 384\)"),
        ((8, 384), (3, 1, 1), r"scale of x .*\(8, 384\).* of k it must have 1 entry or 3"),
        ((8, 1), (3, 2, 1), r"scale of w has shape \(3, 2, 1\), its values have \(3, 384, 16\)"),
        ((8, 1), (3, 384, 1), r"scale of w .*\(3, 384, 1\).* of k it must have 1 entry or 3"),
        ((8, 1), (3, 1), r"the scale of w has shape \(3, 1\)"),
    ],
)
def test_scales_that_do_not_fit(x_scale, w_scale, says):
    x = jflux.Scaled(jnp.ones((8, 384), E4M3), jnp.ones(x_scale))
    w = jflux.Scaled(jnp.ones((3, 384, 16), E4M3), jnp.ones(w_scale))
    for f in (jflux.grouped_matmul, jflux.reference.grouped_matmul):
        with pytest.raises(ValueError, match=f"jflux.grouped_matmul: .*{says}"):
            jax.eval_shape(f, x, w, jnp.array([3, 3, 2]))


def test_other_errors():
    x, w, s = quantized(0, (8, 16), (1, -1)), quantized(1, (2, 16, 32), (-1, 1)), jnp.array([3, 3])
    with pytest.raises(ValueError, match=r"scale of w .*\(2, 1, 1\).* groups .* 1 entry or 200"):
        many = jflux.Scaled(jnp.ones((200, 16, 16), E4M3), jnp.ones((2, 1, 1)))
        jax.eval_shape(jflux.grouped_matmul, x, many, jnp.ones(200, jnp.int32))
    with pytest.raises(TypeError, match="all are scaled or none"):
        jflux.grouped_matmul(x, w.dequantize(), s)
    with pytest.raises(TypeError, match="both are int8 or none"):
        jflux.grouped_matmul(quantized(0, (8, 16), (1, -1), INT8), w, s)
    with pytest.raises(TypeError, match="of 16 bits at least"):
        jflux.grouped_matmul(x, w, s, preferred_element_type=E4M3)
    with pytest.raises(ValueError, match=r"x \(8, 16\) has 16 columns.* takes 32"):
        jflux.grouped_matmul(x, w.T, s)
    loss = lambda scale: jnp.sum(jflux.grouped_matmul(x, w, s, row_scale=scale))  # noqa: E731
    with pytest.raises(TypeError, match="a product of scaled operands has no derivative"):
        jax.grad(loss)(jnp.ones(8))


def test_gpus_take_the_kernels(lowered_without_gpus, monkeypatch):
    monkeypatch.setattr(_native.lib, "built_with_cuda", lambda: True)
    monkeypatch.setattr(gpu_code, "arch_here", lambda: gpu_code.HOPPER)
    s = jnp.array(SIZES)
    for scales, number, attributes, dtypes, types in (
        ("row", 1, (256, 2), PAIRS[0], ("f8E4M3FN", "bf16")),
        ("row", 1, (128, 1), PAIRS[2], ("i8", "f16")),
        ("block", 2, (192, 2), PAIRS[1], ("f8E4M3FN", "f16")),
        ("block", 2, (192, 2), PAIRS[0], ("f8E4M3FN", "bf16")),
    ):
        x, w = drawn(scales, dtypes=dtypes)
        choice = tuning_tables.Choice(*attributes, 8, 1)
        out = jnp.float16 if types[1] == "f16" else None
        for transpose_rhs in (True, False):
            call = functools.partial(
                jflux.grouped_matmul, transpose_rhs=transpose_rhs, preferred_element_type=out
            )
            with tuning_tables.force(choice):
                (found,), text = lowered_without_gpus(call, x, w if transpose_rhs else w.T, s)
            assert found.op == "grouped_matmul" and found.plan.path == "fused"
            assert ("w is transposed first" in found.plan.reason) != transpose_rhs
            (line,) = (a for a in text.splitlines() if "@jflux_grouped_matmul_scaled(" in a)
            assert f"scales = {number}" in line and "transpose_rhs = true" in line
            assert f"tile = dense<[{attributes[0]}, {attributes[1]}]>" in line
            assert f"tensor<4x144x272x{types[0]}>" in line and f"tensor<100x144x{types[1]}>" in line
    for why, (x, w) in {
        "only for 128 columns each": drawn("vector"),
        "of 8-bit floats, x is int8": drawn("block", dtypes=PAIRS[2]),
        r"k and n are \(136, 272\), the kernel takes multiples of 16": drawn("row", n=136),
    }.items():
        call = functools.partial(jflux.grouped_matmul, transpose_rhs=True)
        (found, *_), _ = lowered_without_gpus(call, x, w, s)
        assert found.plan.path == ("reference" if "int8" in why else "decomposed")
        assert re.search(why, found.plan.reason), found.plan.reason


def test_scales_are_those_of_a_dense_product():
    """Of one group."""
    x, w = drawn("block")
    one = jax.tree.map(lambda a: a[:1], w)
    y = jflux.grouped_matmul(x, one, jnp.array([ROWS]), transpose_rhs=True)
    dense = jflux.matmul(x, jax.tree.map(lambda a: a[0], w), transpose_rhs=True)
    terms = np.abs(exact(x)) @ np.abs(exact(one)[0]).T
    kept = slice(sum(SIZES))
    assert_near(y[kept], np.asarray(dense, np.float64)[kept], 2 * terms[kept])
    assert _scaled.scales_of(x, jax.tree.map(lambda a: a[0], w), transpose_rhs=True) == 2


# ---- By a recipe ---------------------------------------------------------------------------------


def q(a, form):
    """What a [rows, columns] quantised by a format means, in float64."""
    a = jnp.asarray(np.asarray(a, np.float32))
    return exact(jflux.quantize(a, form.dtype, block=form.block, power_of_two=form.power_of_two))


def bf16(a):
    return np.asarray(a, np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)


def in_blocks(rows):
    """The rows of a group, and zeros that fill up its last block."""
    return np.pad(rows, ((0, -len(rows) % 128), (0, 0)))


def by_recipe(recipe, x, w, dy, in_8_bits=False):
    """y, dx and dw of a w [groups, n, k], in float64."""
    kept = np.arange(ROWS)[:, None] < sum(SIZES)
    x, dy = (np.where(kept, a, 0) for a in (x, dy))
    qx, qdy = q(x, recipe.x), q(dy, recipe.dy)
    turned = np.stack([q(one.T, recipe.w) for one in w])
    dw, end = np.zeros(w.shape), 0
    for group, size in enumerate(SIZES):
        mine = slice(end, end + size)
        of_x, of_dy = qx[mine], bf16(dy[mine])
        if in_8_bits and size > 0:
            of_x, of_dy = (
                q(in_blocks(a).T, form).T
                for a, form in zip((of_x, dy[mine]), recipe.dw, strict=True)
            )
        dw[group], end = of_dy.T @ of_x, end + size
    return grouped(qx, np.stack([q(one, recipe.w) for one in w])), grouped(qdy, turned), dw


def near(got, want):
    got, want = np.asarray(got, np.float64), np.asarray(want)
    assert got.shape == want.shape
    of_sums = 2.0**-9 if PLATFORM == "gpu" else 1e-4
    assert np.abs(got - want).max() <= of_sums * np.abs(want).max()


def of_recipe(k=272, n=144):
    x, dy = normal(0, ROWS, k), normal(2, ROWS, n) * np.float32(1e-4)
    x[sum(SIZES) :] = dy[sum(SIZES) :] = np.nan
    return x, normal(1, 4, n, k) * np.exp(normal(3, 4, 1, 1)), dy


@pytest.mark.parametrize("module", [jflux, jflux.reference], ids=lambda m: m.__name__)
@pytest.mark.parametrize("name", ["block", "tensor", "row"])
def test_a_recipe(name, module):
    """Also of a weight that was quantised before, and stored the other way round."""
    recipe, (x, w, dy) = getattr(jflux.Recipe, name), of_recipe()
    sizes, want = jnp.array(SIZES), by_recipe(recipe, x, w, dy)

    def call(x, w):
        return module.grouped_matmul(x, w, sizes, transpose_rhs=True, recipe=recipe)

    def of_quantized(x, w):
        return module.grouped_matmul(x, recipe.quantize_weight(w), sizes)

    y, pull = jax.vjp(call, jnp.asarray(x), jnp.asarray(w))
    for got, wanted in zip((y, *pull(jnp.asarray(dy))), want, strict=True):
        near(got, wanted)
    y, pull = jax.vjp(of_quantized, jnp.asarray(x), jnp.asarray(w.swapaxes(1, 2)))
    dx, dw = pull(jnp.asarray(dy))
    for got, wanted in zip((y, dx, dw.swapaxes(1, 2)), want, strict=True):
        near(got, wanted)


@pytest.mark.parametrize("form", [_quantize_groups.FORM, _quantize_groups.SQUARES])
@pytest.mark.parametrize("again", [False, True])
def test_the_transpose_of_rows_of_groups(again, form):
    """Each group is quantised as if it were alone."""
    sizes = (130, 0, 1, 128)
    x = jnp.asarray(normal(0, 300, 144) * np.exp(normal(1, 300, 1)), jnp.bfloat16)
    x = x.at[sum(sizes) :].set(jnp.nan)
    own = _quantize_groups.FORM.quantize(x)
    if again:
        of_rows, turned = own, _quantize_groups.transposed(own, jnp.array(sizes), form)
    else:
        of_rows, turned = _quantize_groups.quantized(x, jnp.array(sizes), form)
        want = own.dequantize()[: sum(sizes)]
        assert np.array_equal(of_rows.dequantize()[: sum(sizes)], want)
    is_square = form == _quantize_groups.SQUARES
    assert turned.values.shape == (144, 128 * 6) and turned.has_squares == is_square
    # Scales are powers of two: rounded twice is rounded once, but for the smallest.
    of_rows = own.dequantize() if again else x.astype(jnp.float32)
    row, column = 0, 0
    for size in sizes:
        if size == 0:
            continue
        want = form.quantize(jnp.asarray(in_blocks(of_rows[row : row + size]).T))
        mine = slice(column, column + want.shape[1])
        assert np.array_equal(turned.values[:, mine].view(np.uint8), want.values.view(np.uint8))
        blocks = slice(column // 128, mine.stop // 128)
        scale = turned.scale[:, blocks] if is_square else turned.scale[blocks].T
        assert np.array_equal(scale, want.scale)
        row, column = row + size, mine.stop


@pytest.mark.parametrize("module", [jflux, jflux.reference], ids=lambda m: m.__name__)
@pytest.mark.parametrize("transpose_rhs", [True, False])
@pytest.mark.parametrize("squares", ["of no operand", "of x", "of dy"])
def test_a_weight_gradient_in_8_bits(module, transpose_rhs, squares, monkeypatch):
    monkeypatch.setattr(_grouped_by_recipe, "_LEAST_ROWS", 1)
    recipe, (x, w, dy) = jflux.Recipe.block, of_recipe()
    if squares != "of no operand":
        dw = (_quantize_groups.SQUARES, _quantize_groups.FORM)
        recipe = dataclasses.replace(recipe, dw=dw if squares == "of x" else dw[::-1])
    want = by_recipe(recipe, x, w, dy, in_8_bits=True)
    turned = lambda w: w if transpose_rhs else w.swapaxes(1, 2)  # noqa: E731

    @functools.partial(jax.jit, static_argnames="recipe")
    def step(x, w, dy, recipe):
        call = functools.partial(
            module.grouped_matmul, group_sizes=jnp.array(SIZES), transpose_rhs=transpose_rhs,
            recipe=recipe,
        )  # fmt: skip
        y, pull = jax.vjp(call, x, w)
        return y, *pull(dy)

    operands = (jnp.asarray(x), jnp.asarray(turned(w)), jnp.asarray(dy))
    y, dx, dw = step(*operands, recipe)
    for got, wanted in zip((y, dx, turned(dw)), want, strict=True):
        near(got, wanted)
    assert not np.any(dw[1])  # of no rows
    *_, dw = step(*operands, dataclasses.replace(recipe, dw=None))  # a product of bfloat16
    near(turned(dw), by_recipe(recipe, x, w, dy)[2])


@pytest.mark.parametrize("block", [(-1, -1), (128, 128), (1, 128)])
def test_a_scale_that_rows_share_knows_no_row_of_no_group(block):
    x, w, _ = (jnp.asarray(a, jnp.bfloat16) for a in of_recipe(256, 128))
    call = functools.partial(
        jflux.grouped_matmul, x, w, jnp.array(SIZES), transpose_rhs=True,
        quantize=jflux.Format(jnp.float8_e4m3fn, block),
    )  # fmt: skip
    got, want = (call(rest=rest).dequantize()[: sum(SIZES)] for rest in ("undefined", "zeros"))
    np.testing.assert_array_equal(got, want)


def test_a_gate_by_a_recipe():
    """Its derivative is that of the same function of the products."""
    x, gate, dy = of_recipe(256, 128)
    up, scale = normal(7, *gate.shape), np.abs(normal(8, ROWS))
    recipe, sizes = jflux.Recipe.block, jnp.array(SIZES)
    grouped_matmul = functools.partial(
        jflux.grouped_matmul, group_sizes=sizes, transpose_rhs=True, recipe=recipe
    )

    def whole(x, gate, up, scale):
        return grouped_matmul(x, (gate, up), activation="silu", gated=True, row_scale=scale)

    def steps(x, gate, up, scale):
        a, b = (grouped_matmul(x, w) for w in (gate, up))
        kept = jnp.arange(ROWS) < sum(SIZES)
        return jax.nn.silu(a) * b * jnp.where(kept, scale, 0)[:, None]

    operands = tuple(map(jnp.asarray, (x, gate, up, scale)))
    (y, pull), (want, wanted) = (jax.vjp(jax.jit(f), *operands) for f in (whole, steps))
    near(y, want)
    # The gradient of x is one product of two terms, whose values nothing copies.
    text = str(jax.make_jaxpr(pull)(jnp.zeros_like(y)))
    (out,) = {m for m in re.findall(r"terms=(\d)", text) if m != "1"}
    assert out == "2" and not re.search(r"f8_e4m3fn\[\S* = concatenate", text)
    dy = jnp.asarray(np.where(np.isnan(dy), 0, dy))
    for got, one in zip(pull(dy), wanted(dy), strict=True):
        near(got, one)


def test_a_weight_of_all_ranks():
    """Its gradient is summed over them."""
    x, w, dy = map(jnp.asarray, of_recipe())
    sizes = jnp.array(SIZES)

    def call(x, w):
        return jflux.grouped_matmul(x, w, sizes, transpose_rhs=True, recipe=jflux.Recipe.block)

    spec = P("ep")
    over_ranks = jax.shard_map(
        call, mesh=make_mesh((2,), ("ep",)), in_specs=(spec, P()), out_specs=spec
    )
    _, pull = jax.vjp(call, x, w)
    both = [jnp.concatenate([a, -2 * a]) for a in (x, dy)]
    y, pull_both = jax.vjp(jax.jit(over_ranks), both[0], w)
    dx, dw = pull_both(both[1])
    near(dw, 5 * np.asarray(pull(dy)[1], np.float64))
    near(dx[:ROWS], pull(dy)[0])
    near(y[ROWS:], -2 * call(x, w))


def test_what_a_recipe_keeps():
    """x in 8 bits, by name, and the weight."""
    x, w, _ = (jnp.asarray(a, jnp.bfloat16) for a in of_recipe())
    sizes, recipe = jnp.array(SIZES), jflux.Recipe.block

    def loss(x, w):
        y = jflux.grouped_matmul(x, w, sizes, transpose_rhs=True, recipe=recipe)
        return jnp.sum(y.astype(jnp.float32))

    policy = jax.checkpoint_policies.save_only_these_names("jflux_quantized")
    text = str(jax.make_jaxpr(jax.grad(jax.checkpoint(loss, policy=policy), (0, 1)))(x, w))
    assert "jflux_quantized" in text
    dtypes = [a.dtype for a in jax.tree.leaves(jax.vjp(loss, x, w)[1]) if a.shape == x.shape]
    assert dtypes == [E4M3]
    with pytest.raises(NotImplementedError, match="reverse mode alone"):
        jax.jvp(loss, (x, w), (x, w))
    with pytest.raises(TypeError, match="takes no scales of earlier steps"):
        jflux.grouped_matmul(x, w, sizes, recipe=jflux.Recipe.tensor.delayed())
    with pytest.raises(TypeError, match="with a recipe x is of a real floating type"):
        jflux.grouped_matmul(x.astype(E4M3), w, sizes, recipe=recipe)


@pytest.mark.parametrize("name", ["block", "tensor"])
def test_gpus_take_the_products_of_a_recipe(name, lowered_without_gpus, monkeypatch):
    """Of a gated MLP's step; those of e5m2 by e4m3, which would have fewer bits, in bfloat16."""
    monkeypatch.setattr(_native.lib, "built_with_cuda", lambda: True)
    monkeypatch.setattr(gpu_code, "arch_here", lambda: gpu_code.HOPPER)
    types = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((256, 512), (4, 512, 256))]
    sizes, recipe = jnp.array([100, 0, 50, 100]), getattr(jflux.Recipe, name)

    def loss(x, gate, up):
        y = jflux.grouped_matmul(x, (gate, up), sizes, activation="silu", gated=True, recipe=recipe)
        return jnp.sum(jnp.sin(y.astype(jnp.float32)))

    calls, text = lowered_without_gpus(jax.grad(loss, (0, 1, 2)), *types, types[1])
    assert all(call.plan.path == "fused" for call in calls), calls
    lines = [line for line in text.splitlines() if "stablehlo.custom_call @jflux_grouped" in line]
    found = collections.Counter(re.search(r"@(\w+)\(", line)[1] for line in lines)
    # Forward and backward; dx of two weights of whole blocks is one product.
    eight, wide = (3, 0) if name == "block" else (2, 2)
    assert found == +collections.Counter(
        jflux_grouped_matmul_scaled=eight, jflux_grouped_matmul=wide, jflux_grouped_matmul_dw=2
    )
    if name != "block":
        return
    monkeypatch.setattr(_grouped_by_recipe, "_LEAST_ROWS", 1)
    calls, text = lowered_without_gpus(jax.grad(loss, (0, 1, 2)), *types, types[1])
    assert all(call.plan.path == "fused" for call in calls), calls
    found = collections.Counter(re.findall(r"stablehlo.custom_call @(jflux_grouped\w+)\(", text))
    assert found == dict(jflux_grouped_matmul_scaled=3, jflux_grouped_matmul_dw_scaled=2)
    # x^T once for both; dy^T beside dy.
    lines = [line for line in text.splitlines() if "@jflux_quantize(" in line]
    of_groups = [line for line in lines if "grouped = true" in line]
    assert sorted("copy = true" in line for line in of_groups) == [False, True, True]
