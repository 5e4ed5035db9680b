"""Products whose results leave them quantised: the bits of `jflux.quantize` of the same results in
float32."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from gpu_programs import Library
from harness import PLATFORM, RANKS, make_mesh
from jax.sharding import PartitionSpec as P

import jflux
from jflux import Format, _native
from jflux._call import gpu_code

E4M3, E5M2 = (np.dtype(t) for t in (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2))
BLOCK, ANY = Format(E4M3, (1, 128)), Format(E4M3, (1, 128), power_of_two=False)
#: Enough that no two CTAs share k on a GPU, and no whole tiles; a last block of 16 columns.
ROWS, K, N = 300, 272, 272


@pytest.fixture(autouse=True)
def not_strict(strict):
    with jflux.config(strict=False):
        yield


def quantized(seed, shape, block, dtype=E4M3):
    x = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return jflux.quantize(jnp.asarray(x), dtype, block=block)


def operands(scales, ranks=1, n=N):
    """x with rows of zeros, of tiny numbers and of one that is none; two weights."""
    of_x, of_w = {"row": ((1, -1), (-1, 1)), "block": ((1, 128), (128, 128))}[scales]
    x = quantized(0, (ROWS * ranks, K), of_x)
    factors = np.ones((ROWS * ranks, 1), np.float32)
    factors[[3, 70, 131]] = [[0], [1e-37], [np.nan]]
    ws = [quantized(i, (K, n * ranks), of_w) for i in (1, 2)]
    return jflux.Scaled(x.values, x.scale * factors), ws


def assert_same_bits(got, want, most=0):
    """`most`: how many elements may be neighbours, of a y that XLA rounded in two ways."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        one, other = (np.asarray(a, np.float32) for a in (one, other))
        np.testing.assert_allclose(one, other, rtol=0.13 if most else 0)
        same = np.isclose(one, other, rtol=1e-6, atol=0, equal_nan=True)
        assert np.sum(~same) <= most and (most or np.array_equal(one, other, equal_nan=True))


BIASES = tuple(np.linspace(-2, 3, N, dtype=np.float32) * sign for sign in (1, -1))
#: By name: the weights of two, and options.
CALLS = {
    "plain": (slice(1), {}),
    "several": (slice(2), {"bias": (None, BIASES[1]), "activation": "gelu_tanh"}),
    "gated": (slice(2), {"bias": BIASES, "activation": "silu", "gated": True}),
}


def both(call, x, ws, form, **options):
    """(the call that quantises, the call and then `quantize`), in programs of their own."""
    w = ws if len(ws) > 1 else ws[0]
    wide = functools.partial(call, preferred_element_type=jnp.float32, **options)
    return (
        jax.jit(functools.partial(call, quantize=form, **options))(x, w),
        jax.tree.map(jax.jit(form.quantize), jax.jit(wide)(x, w)),
    )


@pytest.mark.parametrize("form", [BLOCK, ANY, Format(E5M2, (1, -1)), Format(np.int8, (128, 128))])
@pytest.mark.parametrize("scales", ["row", "block"])
@pytest.mark.parametrize("name", CALLS)
def test_matmul(name, scales, form):
    some, options = CALLS[name]
    x, ws = operands(scales)
    got, want = both(jflux.matmul, x, ws[some], form, **options)
    assert_same_bits(got, want)
    one = got[0] if isinstance(got, tuple) else got
    assert np.isnan(one.scale[131 // form.block[0], 0])
    if form is BLOCK:
        # Of the next block, where that one is a number.
        shifted = jflux.Scaled(one.values, jnp.roll(one.scale, 1, 1)).dequantize()
        assert np.any(np.abs(shifted - one.dequantize())[:131] > 0.1)


@pytest.mark.parametrize("scales", ["row", "block"])
@pytest.mark.parametrize("name", CALLS)
def test_all_gather_matmul(name, scales):
    some, options = CALLS[name]
    x, ws = operands(scales, RANKS, 384)  # ranks have whole blocks of scales
    options = options | {"axis_name": "tp", "bias": None}
    x_scale = P("tp")
    w_scale = P(None, "tp")
    specs = (
        jflux.Scaled(P("tp"), x_scale),
        [jflux.Scaled(w_scale, w_scale)] * len(ws[some]),
    )

    def local(x, ws):
        w = tuple(ws) if len(ws) > 1 else ws[0]
        got = jflux.all_gather_matmul(x, w, quantize=BLOCK, **options)
        wide = jflux.all_gather_matmul(x, w, preferred_element_type=jnp.float32, **options)
        also = jflux.reference.all_gather_matmul(
            x, w, quantize=BLOCK, return_gathered=True, **options
        )
        return jax.tree.map(lambda a: a[None], (got, jax.tree.map(BLOCK.quantize, wide), also[0]))

    f = jax.shard_map(
        local, mesh=make_mesh((RANKS,)), in_specs=specs, out_specs=P("tp"), check_vma=False
    )
    got, want, reference = jax.jit(f)(x, ws[some])
    assert_same_bits(got, want)
    assert jax.tree.structure(got) == jax.tree.structure(reference)
    if PLATFORM == "cpu":
        for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(reference), strict=True):
            near = np.isclose(np.asarray(one, np.float32), np.asarray(other, np.float32), 0.13)
            assert np.mean(near | np.isnan(np.asarray(other, np.float32))) > 0.99


@pytest.mark.parametrize("scales", ["row", "block"])
@pytest.mark.parametrize("gated", [False, True])
def test_grouped_matmul(gated, scales):
    """Rows past the last group are zeros, whose scales are 1."""
    x, _ = operands(scales)
    of_w = {"row": (1, -1), "block": (128, 128)}[scales]
    ws = [quantized(i, (4, N, K), of_w) for i in range(1 + gated)]
    sizes = jnp.array([140, 0, 129, 20])
    options = {"activation": "silu", "gated": True} if gated else {}

    def call(x, w, **options):
        row_scale = jnp.linspace(-1, 2, ROWS)
        return jflux.grouped_matmul(x, w, sizes, transpose_rhs=True, row_scale=row_scale, **options)

    for form in (BLOCK, ANY):
        got, want = both(call, x, ws, form, **options)
        assert_same_bits(got, want, most=0 if PLATFORM == "gpu" else 8)
        assert np.all(got.scale[289:] == 1)
    reference = jflux.reference.grouped_matmul(
        x, ws if gated else ws[0], sizes, transpose_rhs=True, quantize=BLOCK, **options
    )
    assert jax.tree.structure(reference) == jax.tree.structure(got)


def test_other_operands():
    """Of 16 bits, batches, none; and global arrays."""
    x, (w, _) = operands("block")
    wide = x.dequantize(jnp.bfloat16)[:32], w.dequantize(jnp.bfloat16)
    got, want = both(jflux.matmul, wide[0], [wide[1]], BLOCK)
    assert_same_bits(got, want)
    empty = jflux.matmul(jax.tree.map(lambda a: a[:0], x), w, quantize=BLOCK)
    assert (empty.shape, empty.scale.shape) == ((0, N), (0, 3))
    stack = jax.tree.map(lambda a: a.reshape(3, 100, -1), x)
    one = jflux.matmul(x, w, quantize=BLOCK)
    for batch in (jax.vmap(lambda x: jflux.matmul(x, w, quantize=BLOCK))(stack),
                  jflux.matmul(stack, w, quantize=BLOCK)):  # fmt: skip
        assert_same_bits(jax.tree.map(lambda a: a.reshape(ROWS, -1), batch), one)
    x, (w, _) = operands("row", 2)
    got, want = both(
        functools.partial(jflux.all_gather_matmul, axis_name="tp", mesh=make_mesh((2,))),
        x, [w], BLOCK,
    )  # fmt: skip
    assert_same_bits(got, want)


def test_errors():
    x, (w, _) = operands("block")
    with pytest.raises(TypeError, match=r"quantize must be a jflux.Format, got dtype"):
        jflux.matmul(x, w, quantize=E4M3)
    with pytest.raises(ValueError, match="y is computed in float32, not bfloat16"):
        jflux.matmul(x, w, quantize=BLOCK, preferred_element_type=jnp.bfloat16)

    def loss(bias):
        return jnp.sum(jflux.matmul(x, w, bias=bias, quantize=BLOCK).scale)

    with pytest.raises(TypeError, match="a result that is quantised has no derivative"):
        jax.grad(loss)(BIASES[0])


@pytest.mark.parametrize("op", ["matmul", "all_gather_matmul"])
def test_gpus_quantize(op, monkeypatch, lowered_without_gpus):
    monkeypatch.setattr(_native, "lib", Library(_native.lib))
    monkeypatch.setattr(gpu_code, "arch_here", lambda: gpu_code.HOPPER)
    x, ws = operands("row", 2)
    options = {"activation": "silu", "gated": True, "quantize": BLOCK}

    def local(x, *ws):
        if op == "matmul":
            return jflux.matmul(x, ws, **options)
        return jflux.all_gather_matmul(x, ws, axis_name="tp", **options)

    columns = jflux.Scaled(P(None, "tp"), P(None, "tp"))
    f = jax.shard_map(local, mesh=make_mesh((2,)), in_specs=(P("tp"), columns, columns),
                      out_specs=P("tp"), check_vma=False)  # fmt: skip
    calls, text = lowered_without_gpus(f, x, *ws)
    (line,) = (one for one in text.splitlines() if f"@jflux_{op}(" in one)
    assert "quantize = 2 " in line
    results = line.split("->")[-1]
    ops = [call.op for call in calls if call.op != "all_gather"]
    assert ops == [op] and "f8E4M3FN" in results and "x3xf32" in results
    assert op == "matmul" or calls[-1].plan.config["tile_n"] == 256
