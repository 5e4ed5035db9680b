"""Operands of 8 bits with a scale: quantising, products, and every product over ranks."""

import functools
import types
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from harness import PLATFORM, RANKS, make_mesh, run
from jax import lax
from jax.sharding import PartitionSpec as P

import jflux
from jflux._ops import _scaled
from jflux._ops._collective import Collective
from jflux._ops._scaled import Scales

E4M3, E5M2, INT8 = (np.dtype(t) for t in (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, np.int8))


@pytest.fixture(autouse=True)
def without_kernels(strict):
    """Few kernels take operands with a scale yet."""
    with jflux.config(strict=False):
        yield


#: The ops and scales that kernels take.
KERNELS = {("all_gather_matmul", scale) for scale in ("tensor", "row")}
if PLATFORM == "gpu":
    KERNELS |= {("matmul_reduce_scatter", scale) for scale in ("tensor", "row")}


LARGEST = {E4M3: 448.0, E5M2: 57344.0, INT8: 127.0}
#: Half of the distance of neighbouring values, over the largest of a block.
HALF_STEP = {E4M3: 2**-4, E5M2: 2**-3, INT8: 0.5 / 127}
BLOCKS = [(-1, -1), (1, -1), (-1, 1), (1, 128), (128, 1), (128, 128)]


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def quantized(seed, shape, block, dtype=E4M3, **options):
    return jflux.quantize(jnp.asarray(normal(seed, *shape)), dtype, block=block, **options)


def exact(operand):
    """What a scaled operand means, in float64."""
    scale = np.asarray(operand.scale, np.float64)
    for axis, size in enumerate(operand.shape):
        if scale.shape[axis] not in (1, size):
            scale = np.take(np.repeat(scale, 128, axis), range(size), axis)
    return np.asarray(operand.values).astype(np.float64) * scale


def assert_near(y, want, terms):
    """Sums in float32, rounded to y's type: relative to the sums of absolute values."""
    of_sums = 2.0**-12 if PLATFORM == "gpu" else 8 * 2.0**-24  # tensor cores keep fewer bits
    step = float(jnp.finfo(y.dtype).eps) / 2 + of_sums
    got = np.asarray(y, np.float64)
    assert got.shape == want.shape
    assert np.all(np.abs(got - want) <= step * terms + 1e-30)


def product_and_terms(x, w):
    """(x @ w, the sums of absolute values) in float64."""
    return x @ w, np.abs(x) @ np.abs(w)


# ---- quantize ------------------------------------------------------------------------------------


def blocks_of(x, block):
    """(slices of each block, its place in the scale)."""
    sizes = [s if b == -1 else b for s, b in zip(x.shape, block, strict=True)]
    for i in range(-(-x.shape[0] // sizes[0])):
        for j in range(-(-x.shape[1] // sizes[1])):
            rows = slice(i * sizes[0], (i + 1) * sizes[0])
            yield (rows, slice(j * sizes[1], (j + 1) * sizes[1])), (i, j)


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("dtype", LARGEST, ids=str)
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_quantize(block, dtype, power_of_two):
    x = normal(0, 130, 257) * np.exp(3 * normal(1, 130, 1))
    x[3] = 0
    x[4:6, :2] = 1e-41  # not a normal number
    got = jax.jit(lambda x: jflux.quantize(x, dtype, block=block, power_of_two=power_of_two))(x)
    assert got.dtype == dtype and got.scale.dtype == jnp.float32
    for at, place in blocks_of(x, block):
        most = np.float32(np.abs(x[at]).max())
        scale = np.maximum(most / np.float32(LARGEST[dtype]), np.finfo(np.float32).tiny)
        if power_of_two:
            scale = np.float32(2.0 ** np.ceil(np.log2(np.float64(scale))))
        scale = np.float32(1) if most == 0 else scale
        if PLATFORM == "gpu" and not power_of_two:  # XLA's division, off by its last bit
            np.testing.assert_allclose(got.scale[place], scale, rtol=2.0**-22)
            continue
        assert got.scale[place] == scale
        values = np.clip(x[at] / scale, -LARGEST[dtype], LARGEST[dtype])
        values = np.round(values) if dtype == INT8 else values
        want = values.astype(dtype)
        # Numbers below the normal ones may count as zero.
        differ = np.asarray(got.values[at]) != want
        assert not np.any(differ & (np.abs(x[at]) >= np.finfo(np.float32).tiny))
    error = np.abs(exact(got) - x)
    most = np.abs(x).max()
    assert error.max() <= HALF_STEP[dtype] * most * (2 if power_of_two else 1)


def test_ties_go_to_even_and_all_codes_are_kept():
    for dtype in (E4M3, E5M2):
        codes = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)
        codes = np.sort(codes[np.isfinite(codes)])
        middle = (codes[1:] + codes[:-1]) / 2
        for x in (codes, middle, np.nextafter(middle, np.float32(np.inf))):
            x = np.append(x, LARGEST[dtype]).astype(np.float32)[None]  # a scale of 1
            got = jflux.quantize(jnp.asarray(x), dtype, block=(1, -1))
            assert got.scale[0, 0] == 1
            assert np.array_equal(np.asarray(got.values), x.astype(dtype))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", LARGEST, ids=str)
def test_a_block_with_what_is_no_number_is_none(dtype, bad):
    x = normal(0, 4, 256)
    x[2, 200] = bad
    means = np.asarray(jflux.quantize(jnp.asarray(x), dtype, block=(1, 128)).dequantize())
    assert np.isnan(means[2, 128:]).all()
    assert np.isfinite(np.delete(means, 2, 0)).all() and np.isfinite(means[2, :128]).all()


def test_a_nan_in_a_wide_block_is_kept():
    x = normal(0, 4, 2064)
    x[2, 700] = np.nan
    scale = jax.jit(lambda x: jflux.quantize(x, E4M3, block=(1, -1)))(x).scale
    assert np.array_equal(np.isnan(scale[:, 0]), [False, False, True, False])


@pytest.mark.skipif(PLATFORM == "gpu", reason="XLA's division may be off in its last bit there")
def test_ratios_are_divided():
    """In a program too, where XLA likes to multiply by the reciprocal. Some ratios exceed 448."""
    x = jnp.asarray(normal(0, 400, 16))
    call = jax.jit(lambda x: jflux.quantize(x, E4M3, block=(1, -1), return_losses=True))
    most = np.abs(np.asarray(x)).max(1)
    saturated = np.sum(most / (most / np.float32(448)) > 448)
    assert 0 < saturated == int(call(x)[1].saturated)


def test_quantize_transposed_too():
    x = jnp.asarray(normal(0, 130, 257))
    for block in BLOCKS:
        both = jflux.quantize(x, E4M3, block=block, transpose=True)
        for got, of in zip(both, (x, x.T), strict=True):
            want = jflux.quantize(of, E4M3, block=block)
            assert np.array_equal(got.values, want.values) and np.array_equal(got.scale, want.scale)


def test_powers_of_two_keep_bits_in_other_blocks():
    x = jnp.asarray(normal(0, 256, 256))
    rows, columns = (
        jflux.quantize(x, E4M3, block=block, power_of_two=True) for block in ((1, 128), (128, 1))
    )
    a, b = exact(rows), exact(columns)
    is_normal = np.minimum(np.abs(rows.values.astype(np.float32)),
                           np.abs(columns.values.astype(np.float32))) >= 2.0**-6  # fmt: skip
    assert is_normal.mean() > 0.9 and np.array_equal(a[is_normal], b[is_normal])


def test_powers_of_two_are_found_without_a_division():
    """XLA on GPUs may round a ratio up, and what is quantised again has one that is exact."""
    for dtype, largest in LARGEST.items():
        exact = np.float32(largest) * np.exp2(np.arange(-120, 100)).astype(np.float32)
        around = [np.nextafter(exact, np.float32(to)) for to in (0, np.inf)]
        magnitudes = np.concatenate([exact, *around, [2.0**-126]]).astype(np.float32)
        x = jnp.asarray(magnitudes)[:, None] * jnp.ones((1, 16))
        got = jax.jit(lambda x: jflux.quantize(x, dtype, block=(1, -1), power_of_two=True))(x)  # noqa: B023
        ratios = magnitudes.astype(np.float64) / largest
        want = np.maximum(np.exp2(np.ceil(np.log2(ratios))), 2.0**-126)
        assert np.array_equal(got.scale[:, 0], want)


def test_losses():
    x = jnp.asarray([[448.0, 1e-4, 0.0, 1.0], [448.0, 300.0, 1e-3, -1e-4]])
    got, losses = jflux.quantize(x, E4M3, block=(1, -1), return_losses=True)
    assert (int(losses.flushed), int(losses.saturated)) == (2, 0)
    got, losses = jflux.quantize(
        x, E4M3, block=(-1, -1), scale=jnp.full((1, 1), 0.5), return_losses=True
    )
    assert int(losses.saturated) == 3 and float(got.values[0, 0]) == 448
    both, losses = jflux.quantize(x, E4M3, block=(1, -1), transpose=True, return_losses=True)
    assert len(both) == 2 and int(losses.flushed) == 2


def test_quantize_of_a_batch():
    x = jnp.asarray(normal(0, 3, 5, 200))
    one = functools.partial(jflux.quantize, dtype=E4M3, block=(1, 128))
    got, mapped = one(x), jax.vmap(one)(x)
    assert got.scale.shape == (3, 5, 2)
    assert np.array_equal(got.values, mapped.values) and np.array_equal(got.scale, mapped.scale)
    assert np.array_equal(got.T.values[1], got.values[1].T)


# ---- Products on one rank ------------------------------------------------------------------------

X_SCALES = {"tensor": (-1, -1), "row": (1, -1), "block": (1, 128), "square": (128, 128)}
W_SCALES = {"tensor": (-1, -1), "column": (-1, 1), "block": (128, 128), "block of k": (128, 1)}


MATMULS = [
    *((E4M3, E4M3, x_scale, w_scale) for x_scale in X_SCALES for w_scale in W_SCALES),
    *((*pair, *scales) for pair in ((E5M2, E4M3), (E5M2, E5M2), (INT8, INT8))
      for scales in (("row", "column"), ("block", "block"))),
]  # fmt: skip


@pytest.mark.parametrize(("x_type", "w_type", "x_scale", "w_scale"), MATMULS)
def test_matmul(x_type, w_type, x_scale, w_scale):
    x = quantized(0, (2, 37, 300), X_SCALES[x_scale], x_type)
    w = quantized(1, (300, 140), W_SCALES[w_scale], w_type)
    want, terms = product_and_terms(exact(x), exact(w))
    y, wide = jflux.matmul(x, w), jflux.matmul(x, w, preferred_element_type=jnp.float32)
    assert y.dtype == jnp.bfloat16 and wide.dtype == jnp.float32
    assert_near(wide, want, terms)
    assert np.array_equal(y, wide.astype(jnp.bfloat16))
    transposed = jflux.matmul(x, w.T, transpose_rhs=True, preferred_element_type=jnp.float16)
    assert_near(transposed, want, terms)


def test_equal_scales_have_equal_bits():
    """Whole numbers and scales of a power of two: no sum is rounded."""
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.integers(-8, 9, s), jnp.float32) for s in ((64, 384), (384, 256)))
    scale = 2.0**-5
    ys = set()
    for x_counts, w_counts in (((1, 1), (1, 1)), ((64, 1), (1, 256)), ((64, 3), (3, 2))):
        operands = (
            jflux.Scaled(a.astype(E4M3), jnp.full(counts, scale))
            for a, counts in ((x, x_counts), (w, w_counts))
        )
        ys.add(np.asarray(jflux.matmul(*operands, preferred_element_type=jnp.float32)).tobytes())
    assert ys == {np.asarray(x @ w * scale**2).tobytes()}


def test_several_weights_with_a_gate():
    x = quantized(0, (40, 256), (1, 128))
    ws = [quantized(i, (256, 128), (128, 128)) for i in (1, 2)]
    bias = jnp.asarray(normal(3, 128))
    gate, up = (exact(x) @ exact(w) for w in ws)
    y = jflux.matmul(x, ws, bias=(bias, None), activation="relu", gated=True)
    terms = np.abs(gate + np.asarray(bias)) * np.abs(up) + 1
    assert_near(y, np.maximum(gate + np.asarray(bias), 0) * up, 40 * terms)
    a, b = jflux.matmul(x, ws)
    assert_near(a, *product_and_terms(exact(x), exact(ws[0])))
    assert_near(b, *product_and_terms(exact(x), exact(ws[1])))


def test_a_scale_of_the_neighbouring_block_is_told():
    """That the bounds here tell it."""
    x, w = quantized(0, (64, 512), (1, 128)), quantized(1, (512, 128), (128, 128))
    want, terms = product_and_terms(exact(x), exact(w))
    rolled = jflux.Scaled(x.values, jnp.roll(x.scale, 1, -1))
    with pytest.raises(AssertionError):
        assert_near(jflux.matmul(rolled, w), want, terms)


def test_a_product_of_batches():
    x = quantized(0, (3, 40, 200), (1, 128))
    w = quantized(1, (3, 200, 30), (128, 1))
    y = jax.vmap(jflux.matmul)(x, w)
    for i in range(3):
        assert_near(y[i], *product_and_terms(exact(x)[i], exact(w)[i]))


# ---- Products over ranks -------------------------------------------------------------------------

#: By op: how x [..., rows, k] and w are split over ranks, its options, and the collective before or
#: after the product.
OPS = {
    "all_gather_matmul": (P("tp"), P(None, "tp"), {}, Collective("all_gather", None, 0), None),
    "matmul_reduce_scatter": (
        P(None, "tp"), P("tp"), {}, None, Collective("reduce_scatter", 0, None),
    ),
    "matmul_all_reduce": (P(None, "tp"), P("tp"), {}, None, Collective("all_reduce")),
    "matmul_all_to_all": (
        P("tp"), P(), {"split_axis": 1, "concat_axis": 0}, None, Collective("all_to_all", 1, 0),
    ),
    "all_to_all_matmul": (
        P(None, "tp"), P(), {"split_axis": 0, "concat_axis": 1},
        Collective("all_to_all", 0, 1), None,
    ),
}  # fmt: skip
RECIPES = {
    "tensor": ((-1, -1), (-1, -1)), "row": ((1, -1), (-1, 1)), "block": ((1, 128), (128, 128)),
}  # fmt: skip


def operands_of_ranks(op, recipe, world, rows=24, k=256, n=128, dtype=E4M3):
    """Each rank quantises its own: [(x, w) of a rank]."""
    x_spec, w_spec = OPS[op][:2]
    x, w = normal(0, rows * world, k * world), normal(1, k * world, n * world)
    shards = []
    for rank in range(world):
        mine = []
        for array, spec, block in ((x, x_spec, 0), (w, w_spec, 1)):
            for axis, name in enumerate(spec):
                if name == "tp":
                    array = np.split(array, world, axis)[rank]
            options = {"dtype": dtype, "block": RECIPES[recipe][block]}
            mine.append(jflux.quantize(jnp.asarray(array) * (1 + rank), **options))
        shards.append(tuple(mine))
    return shards


@pytest.mark.parametrize("world", [n for n in (1, 3, 4) if n <= RANKS])
@pytest.mark.parametrize(("recipe", "dtype"), [*((r, E4M3) for r in RECIPES), ("row", INT8)])
@pytest.mark.parametrize("op", OPS)
def test_products_over_ranks(op, recipe, dtype, world):
    _, _, options, before, after = OPS[op]
    result = jnp.float16 if dtype == INT8 else jnp.bfloat16
    options = options | ({"preferred_element_type": result} if dtype == INT8 else {})
    shards = operands_of_ranks(op, recipe, world, dtype=dtype)
    stacked = jax.tree.map(lambda *arrays: jnp.stack(arrays), *shards)

    def local(module, operands):
        x, w = jax.tree.map(lambda a: a[0], operands)
        return getattr(module, op)(x, w, axis_name="tp", **options)[None]

    xs, ws = ([exact(shard[i]) for shard in shards] for i in range(2))
    sizes = [xs, [np.abs(x) for x in xs]]
    if before is not None:
        sizes = [before.exact(x) for x in sizes]
    pairs = [(x, w) for x, w in zip(sizes[0], ws, strict=True)]
    want = [x @ w for x, w in pairs]
    terms = [x @ np.abs(w) for x, w in zip(sizes[1], ws, strict=True)]
    if after is not None:
        want, terms = after.exact(want), after.exact(terms)
    for module in (jflux, jflux.reference):
        f = jax.shard_map(
            functools.partial(local, module), mesh=make_mesh((world,)), in_specs=P("tp"),
            out_specs=P("tp"),
        )  # fmt: skip
        with jflux.config(strict=(op, recipe) in KERNELS):
            y = run(jax.jit(f), stacked)
        assert y.dtype == result
        for rank in range(world):
            # A sum over ranks is one of y's type.
            assert_near(y[rank], want[rank], terms[rank] * (4 if op in sums() else 1))


def sums():
    return [op for op, (*_, after) in OPS.items() if after is not None and after.sums()]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("op", OPS)
def test_products_of_global_arrays(op, recipe):
    world = min(RANKS, 2)
    *_, options, before, after = OPS[op]
    x = quantized(0, (24 * world, 256 * world), RECIPES[recipe][0])
    w = quantized(1, (256 * world, 128 * world), RECIPES[recipe][1])
    y = getattr(jflux, op)(x, w, axis_name="tp", mesh=make_mesh((world,)), **options)
    want, terms = product_and_terms(exact(x), exact(w))
    assert_near(y, want, 4 * terms)


def test_the_gathered_operand_is_scaled():
    shards = operands_of_ranks("all_gather_matmul", "tensor", 2)
    stacked = jax.tree.map(lambda *arrays: jnp.stack(arrays), *shards)

    def local(operands):
        x, w = jax.tree.map(lambda a: a[0], operands)
        _, gathered = jflux.all_gather_matmul(x, w, axis_name="tp", return_gathered=True)
        return jax.tree.map(lambda a: a[None], gathered)

    f = jax.shard_map(local, mesh=make_mesh((2,)), in_specs=P("tp"), out_specs=P("tp"))
    gathered = run(jax.jit(f), stacked)
    want = np.concatenate([exact(x) for x, _ in shards])
    for rank in range(2):
        assert np.array_equal(exact(jax.tree.map(lambda a, r=rank: a[r], gathered)), want)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("ks", [(256, 384), (256, 128), (256, 200)], ids=str)
def test_several_terms_are_summed_before_they_are_rounded(ks, world):
    """By blocks; over ranks, where all have whole blocks, in a kernel."""
    if world > 1 and any(k % 128 for k in ks):
        pytest.skip("blocks of a rank are its own")
    xs = [quantized(i, (8, k * world), (1, 128)) for i, k in enumerate(ks)]
    ws = [quantized(i + 2, (k * world, 128), (128, 128)) for i, k in enumerate(ks)]
    y = jflux.matmul_reduce_scatter(
        xs, ws, axis_name="tp", mesh=make_mesh((world,)), preferred_element_type=jnp.float32
    )
    want = sum(exact(x) @ exact(w) for x, w in zip(xs, ws, strict=True))
    terms = sum(np.abs(exact(x)) @ np.abs(exact(w)) for x, w in zip(xs, ws, strict=True))
    assert_near(y, want, terms)


# ---- What stands for a scaled operand, and errors ------------------------------------------------


def test_what_stands_for_one():
    x, w = quantized(0, (16, 256), (-1, -1)), quantized(1, (256, 128), (-1, 1))
    want = np.asarray(jflux.matmul(x, w))
    qarray = types.SimpleNamespace(qvalue=w.values, scale=w.scale, zero_point=None)
    engine = types.SimpleNamespace(
        data=x.values, scale_inv=x.scale.reshape(1), is_colwise=False
    )  # fmt: skip
    for other_x in (x, (x.values, x.scale), engine):
        for other_w in (w, (w.values, w.scale), qarray):
            assert np.array_equal(jflux.matmul(other_x, other_w), want)
    assert len(jflux.matmul(x, [(w.values, w.scale), w])) == 2
    with pytest.raises(ValueError, match="w has a zero point"):
        qarray.zero_point = w.scale
        jflux.matmul(x, qarray)


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (lambda w: jflux.Scaled(w.values, w.scale[:2]), ValueError, "scale of w has shape"),
        (lambda w: jflux.Scaled(w.values, w.scale[0]), ValueError, "scale of w has shape"),
        (lambda w: jflux.Scaled(w.values, w.scale.T), ValueError, "scale of w has shape"),
        (lambda w: jflux.Scaled(w.values, w.scale.astype(jnp.bfloat16)), TypeError, "not float32"),
        (lambda w: jflux.Scaled(w.dequantize(), w.scale), TypeError, "values of w are float32"),
        (lambda w: w.dequantize(), TypeError, "all are scaled or none, got float32"),
        (lambda w: jflux.Scaled(w.values, jnp.ones((384, 1))), ValueError, "each index of k"),
        (lambda w: jflux.quantize(w.dequantize(), INT8, block=(-1, -1)), TypeError, "are int8"),
        (lambda w: w.T, ValueError, "do not contract"),
    ],
)  # fmt: skip
def test_errors_say_what_was_expected(change, kind, message):
    x, w = quantized(0, (8, 384), (1, 128)), quantized(1, (384, 150), (128, 128))
    with pytest.raises(kind, match=message):
        jflux.matmul(x, change(w))


def test_scales_that_shards_do_not_have():
    x = quantized(0, (8, 256), (1, 128))
    wide = quantized(1, (256, 256), (128, 128))
    w = jflux.Scaled(wide.values[:, :192], wide.scale)
    with pytest.raises(ValueError, match="blocks of 128, which 2 shards of a dimension of 192"):
        jflux.all_gather_matmul(x, w, axis_name="tp", mesh=make_mesh((2,)))


def test_nothing_of_8_bits_is_differentiated():
    x = jnp.asarray(normal(0, 8, 128))
    w = quantized(1, (128, 128), (128, 128))

    def loss(x):
        return jnp.sum(jflux.matmul(jflux.quantize(x, E4M3, block=(1, 128)), w))

    with pytest.raises(TypeError, match="jflux.quantize has no derivative"):
        jax.grad(loss)(x)
    with pytest.raises(TypeError, match="a product of scaled operands has no derivative"):
        jax.grad(lambda scale: jnp.sum(jflux.matmul(w, jflux.Scaled(w.values, scale))))(w.scale)
    assert np.all(jax.grad(lambda x: loss(jax.lax.stop_gradient(x)) + jnp.sum(x))(x) == 1)


def test_biases_and_residuals_have_gradients():
    """Beside operands that have none."""
    x, w = quantized(0, (16, 256), (1, -1)), quantized(1, (256, 128), (-1, 1))
    call = functools.partial(jflux.all_gather_matmul, axis_name="tp", mesh=make_mesh((2,)))
    bias, residual = jnp.ones(128), jnp.ones((16, 128), jnp.bfloat16)
    got = jax.grad(lambda b: jnp.sum(call(x, w, bias=b).astype(jnp.float32)))(bias)
    assert np.all(got == 16)
    call = functools.partial(jflux.matmul_reduce_scatter, axis_name="tp", mesh=make_mesh((2,)))

    def loss(bias, residual):
        return jnp.sum(call(x, w, bias=bias, residual=residual).astype(jnp.float32))

    of_bias, of_residual = jax.grad(loss, (0, 1))(bias, residual)
    assert np.all(of_bias == 16) and np.all(of_residual == 1)


class Weights(NamedTuple):
    gate: Any
    up: Any


def test_weights_in_a_named_tuple():
    x = jnp.asarray(normal(0, 8, 16), jnp.bfloat16)
    ws = Weights(*(jnp.asarray(normal(i, 16, 8), jnp.bfloat16) for i in (1, 2)))
    call = functools.partial(jflux.all_gather_matmul, axis_name="tp", mesh=make_mesh((2,)))
    assert len(call(x, ws)) == 2
    scaled = [jflux.quantize(a, E4M3, block=(-1, -1)) for a in (x, *ws)]
    assert len(call(scaled[0], Weights(*scaled[1:]))) == 2


def test_an_exchanged_operand_is_scaled():
    """Also one of a single scale, on global arrays, and in one dimension."""
    x, w = quantized(0, (16, 512), (-1, -1)), quantized(1, (512, 128), (-1, -1))
    options = {"axis_name": "tp", "mesh": make_mesh((2,)), "return_exchanged": True}
    _, exchanged = jflux.all_to_all_matmul(x, w, split_axis=0, concat_axis=1, **options)
    assert np.array_equal(exact(exchanged), exact(x))  # as global arrays they are the same
    sent = _scaled.exchange(x, 2, 0, 0, lambda a: a)
    assert sent.scale.shape == (16, 1)


def test_nothing_to_sum():
    x, w = quantized(0, (16, 0), (-1, -1)), quantized(1, (0, 128), (-1, -1))
    options = {"axis_name": "tp", "mesh": make_mesh((2,))}
    for op in ("matmul_all_reduce", "matmul_reduce_scatter", "all_gather_matmul"):
        assert np.all(getattr(jflux, op)(x, w, **options) == 0)
    assert jflux.matmul(x, w).shape == (16, 128)


@pytest.mark.skipif(RANKS < 4, reason="needs four devices")
def test_explicit_sharding():
    mesh = jax.make_mesh((2, 2), ("data", "tp"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.asarray(normal(0, 256, 512)), P("data", "tp"))
        for block in BLOCKS:
            got = jflux.quantize(x, E4M3, block=block)
            want = jflux.quantize(jnp.asarray(normal(0, 256, 512)), E4M3, block=block)
            assert np.array_equal(got.values, want.values)
            assert np.array_equal(got.dequantize(), want.dequantize())


def test_types_without_scales_are_those_of_the_gather():
    x, w = jnp.ones((16, 256), INT8), jnp.ones((256, 16), INT8)
    assert jflux.matmul(x, w).dtype == jnp.int32 and np.all(jflux.matmul(x, w) == 256)
    assert jflux.matmul(x.astype(E4M3), w.astype(E4M3)).dtype == jnp.bfloat16


def test_arguments_of_quantize():
    x = jnp.ones((4, 256))
    with pytest.raises(ValueError, match=r"scale has shape \(3, 2\), .* it is \(4, 2\)"):
        jflux.quantize(x, E4M3, block=(1, 128), scale=jnp.ones((3, 2)))
    with pytest.raises(ValueError, match="does not fit x and its transpose"):
        jflux.quantize(x, E4M3, block=(1, 128), scale=jnp.ones((4, 2)), transpose=True)
    with pytest.raises(ValueError, match="block=.* must be two of"):
        jflux.quantize(x, E4M3, block=(1, 64))
    with pytest.raises(TypeError, match="bfloat16 is not one of"):
        jflux.quantize(x, jnp.bfloat16, block=(1, 128))
    with pytest.raises(TypeError, match="an array .* got list"):
        jflux.quantize([[1.0]], E4M3, block=(1, 128))
    bad = jflux.quantize(x.at[1, 1].set(jnp.inf), INT8, block=(-1, -1), scale=jnp.ones((1, 1)))
    assert np.isnan(bad.dequantize()).all()
    w = quantized(1, (256, 128), (-1, -1))
    for dtype in (jnp.int32, E4M3, bool):
        with pytest.raises(TypeError, match="real floating type, of 16 bits at least"):
            jflux.matmul(jflux.quantize(x, E4M3, block=(1, -1)), w, preferred_element_type=dtype)
    tiles = types.SimpleNamespace(
        qvalue=jnp.ones((192, 128), INT8), scale=jnp.ones((2, 1)), zero_point=None
    )
    with pytest.raises(ValueError, match="not one of blocks of 128"):
        jflux.matmul(jflux.quantize(jnp.ones((4, 192)), INT8, block=(1, -1)), tiles)


def test_the_call_says_that_no_kernel_takes_it():
    x, by_column = quantized(0, (64, 256), (1, 128)), quantized(1, (256, 256), (128, 1))
    call = functools.partial(
        jflux.all_gather_matmul, axis_name="tp", mesh=make_mesh((min(RANKS, 2),))
    )
    reasons = {"only for 128 columns each": by_column}
    if PLATFORM == "cpu":
        reasons["on GPUs alone"] = quantized(1, (256, 256), (128, 128))
    for reason, w in reasons.items():
        with jflux.config(strict=True), pytest.raises(NotImplementedError, match=reason):
            call(x, w)


@pytest.mark.parametrize(
    ("dtype", "transpose_rhs", "of_x", "of_w", "scales"),
    [
        (E4M3, False, (1, -1), (-1, 1), 1),
        (E4M3, True, (1, -1), (-1, 1), 1),
        (E4M3, True, (1, 128), (128, 128), 2),
        (INT8, False, (1, -1), (-1, 1), 1),
    ],
)
def test_gpus_take_scales(dtype, transpose_rhs, of_x, of_w, scales, lowered_without_gpus):
    """Also of weights that have to be transposed and padded."""

    def local(x, gate, up, down):
        options = {"axis_name": "tp", "transpose_rhs": transpose_rhs}
        y = jflux.all_gather_matmul(x, (gate, up), activation="silu", gated=True, **options)
        y = jflux.quantize(y, dtype, block=of_x)
        return jflux.matmul_reduce_scatter(y, down, **options)

    columns, rows = (P("tp"), P(None, "tp"))[:: 1 if transpose_rhs else -1]
    x = quantized(0, (4096, 520), of_x, dtype)
    shapes = ((520, 1040), (520, 1040), (1040, 500))
    ws = [quantized(i, shape, of_w, dtype) for i, shape in enumerate(shapes)]
    # One scale of columns for both ranks' k, or one of each rank's blocks.
    of_down = jflux.Scaled(rows, P() if scales == 1 else rows)
    if scales == 2:
        entries = ((5, 10), (5, 10), (10, 4))
        ws = [jflux.Scaled(w.values, jnp.ones(n)) for w, n in zip(ws, entries, strict=True)]
    ws = [w.T if transpose_rhs else w for w in ws]
    f = jax.shard_map(
        local,
        mesh=make_mesh((2,)),
        out_specs=P("tp"),
        in_specs=(P("tp"), columns, columns, of_down),
    )
    calls, text = lowered_without_gpus(f, x, *ws)
    assert [call.op for call in calls] == [
        "all_gather_matmul", "quantize", "matmul_reduce_scatter"
    ]  # fmt: skip
    for call in calls[::2]:
        assert ("w is transposed first" in call.plan.reason) == (not transpose_rhs)
        assert "padded" in call.plan.reason
        (line,) = (one for one in text.splitlines() if f"@jflux_{call.op}(" in one)
        of_values = "xi8>" if dtype == INT8 else "xf8E4M3FN>"
        assert f"scales = {scales}" in line and "transpose_rhs = true" in line and of_values in line


#: Operands of kernels that give 16 bits, their scales, and the result.
OF_KERNELS = [(E4M3, False, jnp.bfloat16), (E4M3, True, jnp.float16), (INT8, False, jnp.float16)]
EACH_OF_KERNELS = pytest.mark.parametrize(("dtype", "by_block", "out"), OF_KERNELS)


@EACH_OF_KERNELS
def test_gpus_sum_scaled_products(dtype, by_block, out, lowered_without_gpus):
    """In one kernel for few rows, of which two CTAs share k, and one for whole tiles."""
    of_x, of_w = ((1, 128), (128, -1)) if by_block else RECIPES["row"]
    x_spec, w_spec = P(None, "tp"), P("tp")
    specs = (x_spec, w_spec) if by_block else (P(), P())

    def local(x, w, residual):
        norm = jflux.RMSNorm(jnp.ones(4112))
        return jflux.matmul_all_reduce(
            x, w, axis_name="tp", residual=residual, norm=norm, preferred_element_type=out
        )

    f = jax.shard_map(
        local, mesh=make_mesh((2,)), out_specs=P(),
        in_specs=(jflux.Scaled(x_spec, specs[0]), jflux.Scaled(w_spec, specs[1]), P()),
    )  # fmt: skip
    shape = jax.ShapeDtypeStruct

    def scaled(rows, columns, block):
        counts = (1 if b == -1 else n // b for n, b in zip((rows, columns), block, strict=True))
        return jflux.Scaled(shape((rows, columns), dtype), shape((*counts,), jnp.float32))

    w = scaled(16384, 4112, of_w)
    for rows in (64, 4096):
        x, residual = scaled(rows, 16384, of_x), shape((rows, 4112), out)
        calls, text = lowered_without_gpus(f, x, w, residual)
        (call,) = calls
        assert "w is transposed first" in call.plan.reason and "XLA normalises" in call.plan.reason
        assert call.plan.config["splits"] == (1 if by_block or rows > 128 else 2)
        (line,) = (one for one in text.splitlines() if "@jflux_matmul_all_reduce(" in one)
        assert f"scales = {1 + by_block}" in line and "transpose_rhs = true" in line
        assert ("xi8>" if dtype == INT8 else "xf8E4M3FN>") in line
        assert ("xf16>" if out == jnp.float16 else "xbf16>") in line


@EACH_OF_KERNELS
@pytest.mark.parametrize(
    ("op", "rows", "split", "concat"),
    [
        ("matmul_all_to_all", (1024,), 1, 0),
        ("matmul_all_to_all", (2, 520), 1, 2),
        ("all_to_all_matmul", (1024,), 0, 1),
        ("all_to_all_matmul", (2, 520), 2, 1),
    ],
)
def test_gpus_exchange_and_scale(
    op, rows, split, concat, dtype, by_block, out, lowered_without_gpus
):
    """Also with leading rows, which are put in rank order. Where ranks have parts of k, each with a
    scale of its own, these are scales of blocks, which int8 has not."""
    before = op == "all_to_all_matmul"
    joins_k = before and concat == len(rows)

    def local(x, x_scale, w, w_scale):
        x, w = jflux.Scaled(x, x_scale), jflux.Scaled(w, w_scale)
        axes = {"split_axis": split, "concat_axis": concat}
        return getattr(jflux, op)(x, w, axis_name="tp", preferred_element_type=out, **axes)

    shape = jax.ShapeDtypeStruct
    k = 1024 if before else 1040
    k_of_w = {0: k, 1: k // 2, -1: 2 * k}[before * (split == len(rows)) - joins_k]
    entries = [-(-size // 128) if by_block else 1 for size in (k, k_of_w)]
    x = (shape((*rows, k), dtype), shape((*rows, entries[0]), jnp.float32))
    columns = 32 if by_block else 1 if joins_k else 4096
    w = (shape((k_of_w, 4096), dtype), shape((entries[1], columns), jnp.float32))
    f = jax.shard_map(local, mesh=make_mesh((2,)), in_specs=P(), out_specs=P("tp"), check_vma=False)
    if joins_k and dtype == INT8:
        with pytest.raises(NotImplementedError, match="x is int8"):
            lowered_without_gpus(f, *x, *w)
        return
    (*sent, call), text = lowered_without_gpus(f, *x, *w)
    assert [one.op for one in sent] == ["all_to_all"] * before
    assert "w is transposed first" in call.plan.reason
    assert ("rank order" in call.plan.reason) == (len(rows) > 1)
    (line,) = (one for one in text.splitlines() if f"@jflux_{op}(" in one)
    scales = 2 if by_block or joins_k else 1
    assert f"scales = {scales}" in line and "transpose_rhs = true" in line
    assert ("xi8>" if dtype == INT8 else "xf8E4M3FN>") in line
    assert ("xf16>" if out == jnp.float16 else "xbf16>") in line


def test_a_split_x_stays_split():
    """Of explicit axes y has x's, and nothing is gathered; "highest" is known by its name."""
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
    w = quantized(1, (256, 128), (128, 128))
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.asarray(normal(0, 32, 256)), P("d"))
        f = jax.jit(lambda x: jflux.matmul(jflux.quantize(x, E4M3, block=(1, 128)), w))
        assert jax.typeof(f(x)).sharding.spec == P("d", None)
        assert "all-gather" not in f.lower(x).compile().as_text()
    assert _scaled.is_highest("highest") and _scaled.is_highest((None, "float32"))
    assert not _scaled.is_highest("default") and not _scaled.is_highest(None)


def test_kinds_of_scales():
    """What a kernel of one rank takes, and one over ranks."""
    x_blocks, w_blocks = ((1, -1), (1, 128), (1, 128)), ((-1, 1), (128, 128), (128, 1))
    kinds = (Scales.OF_SUMS, Scales.OF_BLOCKS, Scales.OF_VECTORS)
    shapes = ((144,), (2, 3), (144, 3))
    for kind, shape, of_x, of_w in zip(kinds, shapes, x_blocks, w_blocks, strict=True):
        x, w = quantized(0, (64, 272), of_x), quantized(1, (272, 144), of_w)
        assert _scaled.scales_of(x, w, transpose_rhs=False) is kind
        assert _scaled.of_rows(x, kind).shape == (64, 3 if kind.has_blocks else 1)
        assert _scaled.of_columns(w, False, kind).shape == shape
        for takes in (False, True):
            why = _scaled.why_no_kernel(x, w, transpose_rhs=False, takes_vectors=takes)
            assert (why is None) == (takes or kind is not Scales.OF_VECTORS)
        precise = _scaled.scales_of(x, w, transpose_rhs=False, precision=lax.Precision.HIGHEST)
        assert precise is kind  # a scale for each column is not one of a block of columns
    x, one = quantized(0, (64, 272), (1, -1)), quantized(1, (272, 144), (-1, -1))
    precise = _scaled.scales_of(x, one, transpose_rhs=False, precision=lax.Precision.HIGHEST)
    assert precise is Scales.PROMOTED and precise.in_kernels is Scales.OF_BLOCKS
    of_rows, of_columns = _scaled.of_rows(x, precise), _scaled.of_columns(one, False, precise)
    of_rows, (of_columns,) = _scaled.repeated(of_rows, [of_columns], 272)
    assert of_rows.shape == (64, 3) and of_columns.shape == (2, 3)
    wide, whole = (quantized(0, (64, 272), (1, 128), dtype) for dtype in (E5M2, INT8))
    assert _scaled.why_no_kernel(wide, one, transpose_rhs=False) is None
    assert "int8" in _scaled.why_no_kernel(whole, one, transpose_rhs=False)
    wide = quantized(1, (272, 144), (128, 128), E5M2)
    assert "e4m3" in _scaled.why_no_kernel(x, wide, transpose_rhs=False)


@pytest.mark.parametrize(
    ("of_x", "of_w", "precision", "entries"),
    [
        ((1, -1), (-1, 1), None, 1),
        ((1, 128), (128, 128), None, 4),
        ((1, -1), (-1, -1), "highest", 4),
    ],
)
def test_the_kernel_gathers_scales(of_x, of_w, precision, entries, lowered_without_gpus):
    def local(x, w):
        return jflux.all_gather_matmul(
            x, w, axis_name="tp", return_gathered=True, precision=precision
        )

    f = jax.shard_map(local, mesh=make_mesh((2,)), in_specs=(P("tp"), P()), out_specs=P("tp"))
    x, w = quantized(0, (4096, 512), of_x), quantized(1, (512, 1024), of_w)
    _, gathered = jax.eval_shape(f, x, w)
    assert gathered.scale.shape == (2 * 4096, x.scale.shape[1])
    calls, text = lowered_without_gpus(f, x, w)
    assert [call.op for call in calls] == ["all_gather_matmul"]
    (line,) = (one for one in text.splitlines() if "@jflux_all_gather_matmul(" in one)
    operands, results = line.split(" -> ")
    assert f"tensor<2048x{entries}xf32>" in operands.rsplit("(", 1)[1]
    assert f"tensor<4096x{entries}xf32>" in results


def test_scales_are_exchanged_where_shards_have_no_whole_blocks():
    """Rows in blocks that a rank's shard does not fill become rows with an entry each."""
    values = jnp.zeros((192, 256), E4M3)
    scale = jnp.arange(4.0).reshape(2, 2) + 1
    sent = _scaled.exchange(
        jflux.Scaled(values, scale), 2, None, 0, lambda a: jnp.concatenate([a, a])
    )
    assert sent.scale.shape == (384, 2)
    assert np.array_equal(sent.scale[:, 0], np.repeat([1, 3, 1, 3], [128, 64, 128, 64]))
    with pytest.raises(ValueError, match="whole blocks of 128"):
        _scaled.exchange(
            jflux.Scaled(values[:, :192], scale), 2, None, 1, lambda a: jnp.concatenate([a, a], 1)
        )
