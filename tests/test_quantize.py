"""The kernel of quantize (cc/ops/quantize) where there are GPUs, and `lax` elsewhere, bit for bit
against the definition in numpy."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from gpu_programs import Library
from harness import PLATFORM, fused_calls, make_mesh
from jax.sharding import PartitionSpec as P

import jflux
from jflux import _native
from jflux._call import gpu_code
from jflux._call.plans import Path
from jflux._ops import _epilogue, _quantize, _quantize_computed
from jflux._ops._epilogue import Epilogue
from jflux._ops._scaled import spread

E4M3, E5M2, INT8 = (np.dtype(t) for t in (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, np.int8))
LARGEST = {E4M3: np.float32(448), E5M2: np.float32(57344), INT8: np.float32(127)}
TINY = np.finfo(np.float32).tiny


def numbers(seed, shape, dtype):
    """Rows of all sizes, of zeros, and of what is near the middle of two values."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape).astype(np.float32)
    x[..., 1::9, :] *= 1e4
    x[..., 2::9, :] *= 1e-4 if dtype == jnp.float16 else 1e-30
    x[..., 3::9, :] = 0
    x[..., 4::9, :] = np.round(8 * x[..., 4::9, :]) / 8 * np.float32(1 + 2**-23)
    x[..., 5::9, :] = np.ldexp(np.float32(1), rng.integers(-20, 5, x[..., 5::9, :].shape))
    if PLATFORM == "gpu":  # on CPUs XLA takes such numbers for zero
        x[..., 6::9, :] *= 1e-41
    return np.where(rng.random(shape) < 0.1, np.copysign(0, x), x).astype(dtype)


def of_blocks(x, block):
    """x [rows, columns] -> [blocks down, blocks across, rows, columns], filled up with zeros."""
    rows, columns = (size if b == -1 else b for b, size in zip(block, x.shape, strict=True))
    x = np.pad(x, [(0, -x.shape[0] % rows), (0, -x.shape[1] % columns)])
    x = x.reshape(x.shape[0] // rows, rows, x.shape[1] // columns, columns)
    return x.transpose(0, 2, 1, 3)


def definition(x, dtype, block, *, power_of_two=False, scale=None):
    """(values, scale, [flushed, saturated]) of a matrix."""
    x, most = x.astype(np.float32), LARGEST[dtype]
    largest = np.abs(of_blocks(x, block)).max((2, 3))
    if scale is None:
        scale = np.maximum(largest / most, TINY)
        if power_of_two:
            fraction, exponent = np.frexp(scale)
            scale = np.ldexp(np.float32(1), exponent - (fraction == 0.5))
        scale = np.where(largest == 0, np.float32(1), scale)
    scale = np.where(np.isfinite(largest), scale, np.float32(np.nan))
    ratio = x / np.asarray(spread(jnp.asarray(scale), x.shape))
    values = np.clip(ratio, -most, most)
    values = np.nan_to_num(np.round(values)) if dtype == INT8 else values
    values = values.astype(dtype)
    wide = values.astype(np.float32)
    return values, scale, [np.sum((wide == 0) & (x != 0)), np.sum(np.abs(ratio) > most)]


def assert_same(got, want):
    """Bits, but for those of a NaN."""
    got, want = np.asarray(got), np.asarray(want)
    assert got.dtype == want.dtype and got.shape == want.shape
    wide = got.astype(np.float32), want.astype(np.float32)
    bits = np.dtype(f"u{got.dtype.itemsize}")
    differ = (got.view(bits) != want.view(bits)) & ~(np.isnan(wide[0]) & np.isnan(wide[1]))
    assert not differ.any(), (differ.sum(), np.argwhere(differ)[:4], got[differ][:4])


def assert_near(got, want):
    """One step of the type apart at most."""
    step = float(jnp.finfo(want.dtype).eps)
    got, want = np.float32(got), np.float32(want)
    np.testing.assert_allclose(got, want, rtol=step, atol=step * np.abs(want).max() / 2**8)


def check(x, dtype, block, *, taken=True, transpose=False, return_losses=False, **options):
    """What quantize makes of a stack of matrices is what the definition makes of each."""
    call = functools.partial(
        jflux.quantize, dtype=dtype, block=block, transpose=transpose, return_losses=return_losses
    )
    more = {name: options.pop(name) for name in ("power_of_two",) if name in options}
    with np.errstate(all="ignore"):
        f = jax.jit(lambda x, scale: call(x, scale=scale, **more))
        scale = options.get("scale")
        program = f.lower(x, scale).compile()
        kernels = fused_calls(program.as_text())
        assert kernels == ["quantize"] * (taken and PLATFORM == "gpu")
        found = program(x, scale)
        found, losses = found if return_losses else (found, None)
        lost = np.zeros(2, int)
        for transposed, got in enumerate(found if transpose else [found]):
            for at in np.ndindex(x.shape[:-2]):
                own, given = x[at], None if scale is None else scale[at]
                if transposed:
                    own, given = own.T, None if given is None else given.T
                values, want, losses_of = definition(own, dtype, block, scale=given, **more)
                if PLATFORM == "gpu" and not taken:  # XLA's division, off by its last bit
                    assert_near(got.values[at], values)
                    assert_near(got.scale[at], want)
                    continue
                assert_same(got.values[at], values)
                assert_same(got.scale[at], want)
                lost += losses_of if not transposed else 0
        assert losses is None or (int(losses.flushed), int(losses.saturated)) == tuple(lost)


SHAPES = [(16, 16), (9, 2064), (3, 40000), (144, 272), (2, 512, 384), (1, 1040)]
if PLATFORM == "gpu":
    SHAPES += [(1024, 8192), (2, 3, 256, 1280), (8192, 128), (70000, 16)]


@pytest.mark.parametrize("dtype", LARGEST, ids=str)
@pytest.mark.parametrize("block", [(1, -1), (1, 128), (128, 128), (-1, -1), (-1, 128)], ids=str)
def test_bits(block, dtype):
    for seed, shape in enumerate(SHAPES):
        of_x = [jnp.bfloat16, jnp.float16, jnp.float32][(seed + len(dtype.name)) % 3]
        x = numbers(seed, shape, of_x)
        options = {
            "transpose": shape[-2] % 16 == 0 and seed % 2 == 0,
            "return_losses": seed % 3 == 0,
            "power_of_two": seed % 4 == 1,
        }
        check(x, dtype, block, **options)
        x[..., shape[-2] // 2, shape[-1] // 3] = np.nan
        x[..., shape[-2] - 1, shape[-1] - 1] = -np.inf
        check(x, dtype, block, **options)


@pytest.mark.parametrize("bad", [None, np.nan, np.inf])
@pytest.mark.parametrize("block", [(1, -1), (1, 128), (128, 128), (-1, -1)], ids=str)
def test_given_scales(block, bad):
    rng = np.random.default_rng(0)
    for i, dtype in enumerate(LARGEST):
        x = numbers(i, (2, 144, 272), jnp.float32)
        if bad is not None:
            x[1, 3, 5] = bad
        counts = jflux.quantize(jnp.asarray(x), dtype, block=block).scale.shape
        usual = np.exp2(rng.uniform(-10, 10, counts)).astype(np.float32)
        odd = rng.choice(np.float32([0, -3, np.nan, np.inf, 1e30, 1e-30, 2 - 2**-23]), counts)
        for scale in (usual, odd):
            for return_losses in (False, True):
                transpose = block[0] == block[1]
                check(
                    x, dtype, block, scale=scale, transpose=transpose, return_losses=return_losses
                )


def test_what_kernels_do_not_take():
    x = numbers(0, (144, 272), jnp.bfloat16)
    check(x, E4M3, (128, 1), taken=False)
    check(x[:, :250], E4M3, (1, 128), taken=False)
    check(x[:130], E4M3, (128, 128), transpose=True, taken=False)
    check(x[:130], E4M3, (128, 128))


def test_what_is_quantised_again():
    """The transpose of what 8 bits and their scales mean, in other blocks."""
    for rows, columns, of_x in (144, 272, (1, 128)), (272, 128, (1, -1)), (256, 384, (-1, -1)):
        x = numbers(0, (rows, columns), jnp.float32)
        x = jflux.quantize(jnp.asarray(x), E4M3, block=of_x, power_of_two=True)
        for block, taken in ((1, 128), True), ((128, 128), True), ((-1, -1), False):
            call = functools.partial(
                _quantize.transposed, dtype=E4M3, block=block, power_of_two=True
            )
            program = jax.jit(call).lower(x).compile()
            kernels = fused_calls(program.as_text())
            assert kernels == ["quantize"] * (taken and PLATFORM == "gpu")
            got, wide = program(x), np.asarray(x.dequantize()).T
            values, scale, _ = definition(wide, E4M3, block, power_of_two=True)
            assert_same(got.values, values)
            assert_same(got.scale, scale)


@pytest.mark.parametrize("activation", _epilogue.ACTIVATIONS)
def test_what_is_computed(activation):
    """An activation and its gradients, rounded to 16 bits and quantised; copies of two in turns.

    relu is exact. Of the others a program may round to the neighbour, first to 16 bits."""
    form = jflux.Recipe.block.x

    def check(f, arrays, wanted):
        """`wanted`: what is quantised of each result, [rows, columns], or two of them in turns."""
        program = jax.jit(f).lower(*arrays).compile()
        assert fused_calls(program.as_text()) == ["quantize"] * (PLATFORM == "gpu")
        got = program(*arrays)
        for one, each in zip(jax.tree.leaves(got, is_leaf=is_scaled), wanted, strict=True):
            copies = [definition(np.asarray(a), E4M3, form.block, power_of_two=True) for a in each]
            values, scale, _ = copies[0]
            if len(each) == 2:
                values, scale = (
                    np.stack([c[i].reshape(len(values), -1, size) for c in copies], 2)
                    .reshape(len(values), -1)
                    for i, size in ((0, 128), (1, 1))
                )  # fmt: skip
            if activation == "relu":
                assert_same(one.values, values)
                assert_same(one.scale, scale)
                continue
            exact = jflux.Scaled(jnp.asarray(values), jnp.asarray(scale)).dequantize()
            of_row = np.max(np.abs(exact), 1, keepdims=True)
            assert np.all(np.abs(one.dequantize() - exact) <= np.abs(exact) / 7 + of_row * 2**-14)

    is_scaled = lambda one: isinstance(one, jflux.Scaled)  # noqa: E731
    for dtype, shape in ((jnp.bfloat16, (144, 256)), (jnp.float16, (16, 128))):
        rng = np.random.default_rng(0)
        dy, gate, x = (jnp.asarray(2 * rng.standard_normal(shape), dtype) for _ in range(3))
        for sums in ([gate, x], [x]):
            epilogue = Epilogue((False,) * len(sums), activation, len(sums) == 2)
            h = jax.jit(lambda *a, e=epilogue: _epilogue.apply(e, a, (), a[0].dtype)[0])(*sums)
            dsums = jax.jit(lambda dy, *a, e=epilogue: _epilogue.gradient(e, a, [dy]))(dy, *sums)
            check(lambda *a, e=epilogue: _quantize_computed.activated(e, a, form), sums, [h])
            check(
                lambda dy, *a, e=epilogue: _quantize_computed.gradients(e, a, dy, form, True),
                [dy, *sums], [dsums, *([np.asarray(d).T] for d in dsums)],
            )  # fmt: skip


def test_pairs_and_transposes():
    a, b = (numbers(i, (200, 256), jnp.bfloat16) for i in (0, 1))
    form = jflux.Recipe.block.w
    with np.errstate(all="ignore"):
        program = jax.jit(lambda a, b: _quantize_computed.pair(a, b, form)).lower(a, b).compile()
        assert fused_calls(program.as_text()) == ["quantize"] * (PLATFORM == "gpu")
        copies = [definition(one, E4M3, form.block, power_of_two=True) for one in (a, b)]
        got = program(a, b)
    for i in (0, 1):
        assert_same(got.values.reshape(200, 2, 2, 128)[:, :, i].reshape(200, 256), copies[i][0])
        assert_same(got.scale.reshape(2, 2, 2)[:, :, i], copies[i][1])
    a = a[:192]
    for block in ((128, 128), (1, 128), (-1, -1)):
        got = jax.jit(lambda a, b=block: _quantize.transposed(a, E4M3, b, True))(a)
        with np.errstate(all="ignore"):
            values, scale, _ = definition(a.T, E4M3, block, power_of_two=True)
        assert_same(got.values, values)
        assert_same(got.scale, scale)


def test_batches():
    x = numbers(0, (3, 32, 160), jnp.bfloat16)
    scale = np.float32([[[1]], [[2]], [[3]]])
    for name, given in (("one", scale[0]), ("each", scale), ("none", None)):
        for losses in (False, True):

            def one(x, scale, losses=losses):
                return jflux.quantize(
                    x, E4M3, block=(-1, -1), scale=scale, transpose=True, return_losses=losses
                )

            axes = (0, 0 if name == "each" else None)
            got = jax.jit(jax.vmap(one, axes))(x, given)
            want = [one(x[i], given[i] if name == "each" else given) for i in range(3)]
            jax.tree.map(assert_same, got, jax.tree.map(lambda *a: jnp.stack(a), *want))


def test_the_plan(monkeypatch, lowered_without_gpus):
    """A kernel on one device and inside shard_map; `lax` where XLA splits the program."""
    monkeypatch.setattr(_native, "lib", Library(_native.lib))
    monkeypatch.setattr(gpu_code, "arch_here", lambda: gpu_code.HOPPER)
    x = jnp.ones((256, 512), jnp.bfloat16)
    quantize = functools.partial(jflux.quantize, dtype=E4M3, block=(1, -1), transpose=True)
    mesh = make_mesh((2,))
    inside = jax.shard_map(quantize, mesh=mesh, in_specs=P("tp"), out_specs=P("tp"))
    for f in (quantize, inside):
        (call,), text = lowered_without_gpus(f, x)
        assert call.op == "quantize" and call.plan.path == Path.FUSED
        assert "@jflux_quantize(" in text and "block = dense<[1, -1]>" in text
    monkeypatch.setattr(gpu_code, "arch_here", lambda: gpu_code.PORTABLE)
    with jflux.config(unchecked_kernels=True):
        (call,), _ = lowered_without_gpus(quantize, x)
        assert call.plan.path == Path.FUSED and "in portable code" in call.plan.reason
        once = jflux.quantize(x, E4M3, block=(1, 128))

        def again(x):
            return _quantize.transposed(x, E4M3, (1, 128), True)

        (call,), _ = lowered_without_gpus(again, once)
        assert "only Hopper's kernels quantise again" in call.plan.reason
        form = jflux.Format(E4M3, (1, 128))
        (call, *_), _ = lowered_without_gpus(
            lambda x: _quantize_computed.activated(Epilogue((False,), "relu"), [x], form), x
        )
        assert "only Hopper's kernels compute what they quantise" in call.plan.reason
    monkeypatch.setattr(gpu_code, "arch_here", lambda: gpu_code.HOPPER)
    split = jax.device_put(x, jax.NamedSharding(mesh, P("tp")))
    (call,), text = lowered_without_gpus(quantize, split)
    assert call.plan.reason == "XLA splits the program over devices"
    assert "jflux_quantize" not in text
    (call,), _ = lowered_without_gpus(quantize, x[:, :250])
    assert "x has 250 columns, the kernels take multiples of 16" in call.plan.reason
