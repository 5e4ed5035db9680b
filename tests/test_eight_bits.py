"""all_gather_matmul of 8-bit operands: values, codes, types, plans, and what refuses them."""

import functools
import inspect

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from harness import PLATFORM, RANKS, make_mesh, run

import jflux
from jflux import _native
from jflux._call.explain import explain
from jflux._call.plans import Machine, Path
from jflux._ops._spec import all_ops
from jflux._ops.collectives import all_reduce
from jflux._ops.products import (
    all_gather_matmul,
    all_to_all_matmul,
    matmul_all_reduce,
    matmul_all_to_all,
    matmul_reduce_scatter,
)
from jflux._stress.calls import per_device

pytestmark = pytest.mark.wide  # GPUs have kernels for some of these alone

E4M3, E5M2, S8 = (np.dtype(t) for t in (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, np.int8))
BF16, F16, F32, S32 = (np.dtype(t) for t in (ml_dtypes.bfloat16, np.float16, np.float32, np.int32))
PAIRS = ((E4M3, E4M3), (E5M2, E4M3), (S8, S8))
EACH_PAIR = pytest.mark.parametrize(("x_dtype", "w_dtype"), PAIRS, ids=lambda d: d.name)
#: Products whose GPU kernels give float32 of 8 bits too, and others.
WIDE = (all_gather_matmul, matmul_reduce_scatter)
NARROW = (matmul_all_reduce, matmul_all_to_all, all_to_all_matmul)
GPU = Machine("cuda", sm_count=132, link_gbps=320.0, heap_bytes=2 << 30)
CPU = Machine("cpu")


def drawn(seed, shape, dtype):
    values = 4 * np.random.default_rng(seed).standard_normal(shape)
    return np.round(8 * values).astype(dtype) if dtype == S8 else values.astype(dtype)


def gathers(x, w, module=jflux, mesh=None, **options):
    """A call on all ranks: x [ranks, ..., rows, k] and w [ranks, k, n]."""
    f = functools.partial(module.all_gather_matmul, axis_name="tp", **options)
    return run(jax.jit(per_device(mesh or make_mesh((RANKS,)), f)), x, w)


def assert_rounded(y, want, dtype, scale):
    """y is the exact result, but for the sums' rounding in float32 and one to the type."""
    if dtype == S32:
        np.testing.assert_array_equal(y, want)
        return
    relative = max(float(ml_dtypes.finfo(dtype).eps) / 2, 2.0**-22)
    of_sums = 2.0**-12 if PLATFORM == "gpu" else 2e-6  # tensor cores keep fewer bits
    assert np.all(np.abs(y.astype(np.float64) - want) <= relative * np.abs(want) + of_sums * scale)


# ---- Values --------------------------------------------------------------------------------------

#: x of each rank, and columns of w: odd ones, leading dimensions, whole vectors.
SIZES = (((3, 1), 1), ((17, 51), 29), ((2, 5, 130), 33), ((8, 16), 8))


@EACH_PAIR
def test_values(x_dtype, w_dtype):
    """Odd sizes, leading dimensions, both layouts of w, and each type of results."""
    results = (BF16, F16, F32) + ((S32,) if x_dtype == S8 else ())
    for seed, (shape, n) in enumerate(
        (((3, 1), 1), ((17, 51), 29), ((2, 5, 130), 33), ((8, 16), 8))
    ):
        x = drawn(seed, (RANKS, *shape), x_dtype)
        w = drawn(seed + 9, (RANKS, shape[-1], n), w_dtype)
        gathered = np.concatenate(list(x), -2)
        wide = gathered.astype(np.float64)
        for turn, out in enumerate(results):
            transposed = bool((seed + turn) % 2)
            y, also = gathers(
                x, w.swapaxes(1, 2) if transposed else w, transpose_rhs=transposed,
                return_gathered=True, preferred_element_type=out,
            )  # fmt: skip
            assert (y.dtype, also.dtype) == (out, x_dtype)
            for rank in range(RANKS):
                of_w = w[rank].astype(np.float64)
                scale = np.max(np.abs(wide)) * np.sum(np.abs(of_w), 0, keepdims=True)
                assert_rounded(y[rank], wide @ of_w, out, scale)
                np.testing.assert_array_equal(also[rank].view(np.uint8), gathered.view(np.uint8))


@EACH_PAIR
def test_as_the_reference(x_dtype, w_dtype):
    """Several weights, a bias, an activation, a gate: in the type of the results."""
    x = drawn(0, (RANKS, 6, 24), x_dtype)
    ws = tuple(drawn(i, (RANKS, 24, 10), w_dtype) for i in (1, 2))
    bias = np.linspace(-3, 3, 10, dtype=np.float32)
    for options in (
        {},
        {"bias": (bias, None), "activation": "relu"},
        {"activation": "silu", "gated": True, "preferred_element_type": F32},
        {"bias": (bias, bias), "preferred_element_type": F16, "return_gathered": True},
    ):
        got, want = (gathers(x / 4 if x_dtype != S8 else x, ws, m, **options)
                     for m in (jflux, jflux.reference))  # fmt: skip
        for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert one.dtype == other.dtype
            # The reference rounds products before the epilogue.
            np.testing.assert_allclose(
                one.astype(np.float64), other.astype(np.float64), rtol=2e-2, atol=2e-2 * 100
            )


@pytest.mark.parametrize("dtype", [E4M3, E5M2, S8], ids=lambda d: d.name)
def test_every_code(dtype):
    """All 256 are multiplied as what ml_dtypes says that they are; NaN and infinities stay in their
    rows."""
    codes = np.arange(256, dtype=np.uint8).view(dtype)
    x = np.tile(codes[:, None], (RANKS, 1, 1))
    w = np.ones((RANKS, 1, 1), S8 if dtype == S8 else E4M3)
    want = np.tile(codes.astype(np.float32), RANKS)
    np.testing.assert_array_equal(gathers(x, w, preferred_element_type=F32)[0, :, 0], want)


def test_integers_are_summed_in_int32():
    k = 2048
    x, w = np.full((RANKS, 1, k), 127, S8), np.full((RANKS, k, 1), 127, S8)
    x[..., 0] = 126  # one more than float32 holds at this size
    exact = k * 127**2 - 127
    assert exact > 1 << 24 and int(np.float32(exact)) != exact
    for module in (jflux, jflux.reference):
        assert np.all(gathers(x, w, module) == exact)
        assert np.all(gathers(x, w, module, preferred_element_type=F32) == np.float32(exact))


def test_vmap_and_two_nodes(own_heap):
    x, w = drawn(0, (RANKS, 3, 5, 16), E5M2), drawn(1, (RANKS, 16, 8), E4M3)
    f = jax.vmap(functools.partial(jflux.all_gather_matmul, axis_name="tp"), (0, None))
    got = run(jax.jit(per_device(make_mesh((RANKS,)), f)), x, w)
    want = gathers(x, w, jflux.reference, gather_dimension=1)
    near = functools.partial(np.testing.assert_allclose, rtol=1e-2, atol=1e-2)
    # On GPUs XLA's two products add in other orders.
    (near if PLATFORM == "gpu" else np.testing.assert_array_equal)(
        got.astype(np.float32), want.astype(np.float32)
    )
    if RANKS >= 4:
        own_heap(node=["a"] * (RANKS // 2) + ["b"] * (RANKS // 2))
        y = gathers(x, w, gather_dimension=1)
        near(y.astype(np.float32), want.astype(np.float32))


def test_global_arrays():
    mesh = make_mesh((RANKS,))
    x, w = drawn(0, (3 * RANKS, 16), E4M3), drawn(1, (16, 2 * RANKS), E4M3)
    y = jax.jit(functools.partial(jflux.all_gather_matmul, axis_name="tp", mesh=mesh))(x, w)
    want = x.astype(np.float64) @ w.astype(np.float64)
    assert y.dtype == BF16
    terms = np.abs(x).astype(np.float64) @ np.abs(w).astype(np.float64)
    assert_rounded(np.asarray(y), want, BF16, terms)


# ---- Types ---------------------------------------------------------------------------------------


def test_default_types():
    for module in (jflux, jflux.reference):
        for x_dtype, w_dtype in PAIRS:
            x, w = np.ones((RANKS, 2, 8), x_dtype), np.ones((RANKS, 8, 2), w_dtype)
            assert gathers(x, w, module).dtype == (S32 if x_dtype == S8 else BF16)
            assert gathers(x, (w, w), module)[1].dtype == (S32 if x_dtype == S8 else BF16)


def test_other_pairs_and_results_are_lax():
    """Pairs that no kernel multiplies, and results that none gives, are as `lax` has them."""
    given = "float16, bfloat16, float32"
    for x_dtype, w_dtype, out, why in (
        (E5M2, E5M2, None, "x is float8_e5m2 and w is float8_e5m2, the kernels multiply "
         "float8_e5m2 by float8_e4m3fn"),
        (E4M3, E5M2, BF16, "x is float8_e4m3fn and w is float8_e5m2, the kernels multiply "
         "float8_e4m3fn by float8_e4m3fn"),
        (E4M3, E4M3, E4M3, f"results are float8_e4m3fn, the kernels give {given}"),
        (S8, S8, S8, f"results are int8, the kernels give {given}, int32"),
    ):  # fmt: skip
        x, w = np.ones((RANKS, 2, 8), x_dtype), np.ones((RANKS, 8, 2), w_dtype)
        f = functools.partial(jflux.all_gather_matmul, axis_name="tp", preferred_element_type=out)
        with jflux.config(strict=False):
            (one,) = explain(per_device(make_mesh((RANKS,)), f), x, w)
            y = gathers(x, w, preferred_element_type=out)
        assert one.plan.path == Path.REFERENCE
        if jax.default_backend() == "cpu":
            assert one.plan.reason == why
        assert y.dtype == (x_dtype if out is None else out) and np.all(y.astype(np.float32) == 8)


@EACH_PAIR
def test_gradients(x_dtype, w_dtype):
    """None of 8-bit floats, in any way of calling; of a bias as ever."""
    for ranks in (1, RANKS):
        args = (
            np.ones((ranks, 2, 8), x_dtype),
            np.ones((ranks, 8, 2), w_dtype),
            np.ones((ranks, 2), np.float32),
        )

        def loss(x, w, bias):
            y = jflux.all_gather_matmul(
                x, w, axis_name="tp", bias=bias, preferred_element_type=BF16
            )
            return y.astype(jnp.float32).sum()

        def gradient(mesh, wanted, loss=loss, args=args):
            return run(jax.jit(per_device(mesh, jax.grad(loss, wanted))), *args)

        mesh = make_mesh((ranks,))
        np.testing.assert_array_equal(gradient(mesh, 2), np.full((ranks, 2), 2 * ranks))
        if x_dtype == S8:
            continue
        for wanted in (0, 1, (0, 1)):
            with pytest.raises(TypeError, match="no gradient.*cast x and w to bfloat16 first"):
                gradient(mesh, wanted)


# ---- Plans ---------------------------------------------------------------------------------------


def _planned(x_dtype, w_dtype, out, machine, module=all_gather_matmul, precision=None):
    sizes = ((2048, 512), (2048, 512))
    shapes = [jax.ShapeDtypeStruct(s, d) for s, d in zip(sizes, (x_dtype, w_dtype), strict=True)]
    fields = {"axis_names": ("tp",), "world": 2, "out_dtype": np.dtype(out), "results": ("y",)}
    fields |= {"gather_dimension": 0, "split": 1, "concat": 0, "transpose_rhs": True}
    fields |= {"scatter_dimension": 0, "precision": precision}
    fields["sums"] = all_reduce.Params(("tp",), 2, None)
    known = inspect.signature(module.Params).parameters
    params = module.Params(**{name: value for name, value in fields.items() if name in known})
    return module._op.plan(shapes, params, machine)


@pytest.mark.parametrize("module", [*WIDE, *NARROW], ids=lambda m: m.OP)
@EACH_PAIR
def test_gpus_multiply_8_bits(x_dtype, w_dtype, module):
    """Sums of int8 are exact, so that precision="highest" wants no other kernel."""
    planned = functools.partial(_planned, x_dtype, w_dtype, machine=GPU, module=module)
    for out in (BF16, F16, F32)[: 3 if module in WIDE else 2]:
        assert planned(out).path == Path.FUSED
        assert (planned(out, precision="highest").path == Path.FUSED) == (x_dtype == S8)
    plan = planned(S32)
    sums = module is matmul_all_reduce  # which may still be in a kernel
    assert plan.path == (Path.DECOMPOSED if sums else Path.REFERENCE)
    assert plan.reason == "results are int32, the kernels give float16, bfloat16, float32"


def test_a_plan_names_all_formats():
    """The key of tuning tables: x's format alone only where it is y's too."""
    assert " bfloat16 ranks" in str(_planned(BF16, BF16, F32, CPU).key)
    for x_dtype, w_dtype, out in ((E5M2, E4M3, BF16), (E4M3, E4M3, F32), (S8, S8, S32)):
        plan = _planned(x_dtype, w_dtype, out, CPU)
        assert plan.path == Path.FUSED
        assert f" {x_dtype}.{w_dtype}.{out} ranks" in str(plan.key)
    wide, narrow = (_planned(d, d, BF16, CPU).workspace_bytes for d in (BF16, E4M3))
    assert narrow < wide  # one byte travels


@EACH_PAIR
@pytest.mark.parametrize("module", NARROW, ids=lambda m: m.OP)
def test_cpus_have_none_of_other_products(module, x_dtype, w_dtype):
    plan = _planned(x_dtype, w_dtype, BF16, CPU, module)
    kernels = "float16, bfloat16, float32, float64"
    assert plan.path != Path.FUSED
    assert plan.reason == f"operands are {x_dtype}, the kernels take {kernels}"


@pytest.mark.parametrize("dtype", [E4M3, E5M2, S8], ids=lambda d: d.name)
def test_collectives_move_them_and_sum_none(dtype):
    mesh = make_mesh((RANKS,))
    x = np.arange(RANKS * RANKS * 24, dtype=np.uint8).reshape(RANKS, RANKS * 3, 8).view(dtype)
    for op, options in {
        "all_gather": {"tiled": True},
        "all_to_all": {"split_axis": 0, "concat_axis": 0, "tiled": True},
    }.items():
        f = functools.partial(getattr(jflux, op), axis_name="tp", **options)
        y = run(jax.jit(per_device(mesh, f)), x)
        want = all_ops()[op].communication(2, **options).exact(list(x.view(np.uint8)))
        np.testing.assert_array_equal(y.view(np.uint8), np.stack(want))
    for op in ("reduce_scatter", "all_reduce"):
        assert _native.why_not_dtypes(op, "cpu", dtype) == (
            f"operands are {dtype}, the kernels take float16, bfloat16, float32, float64"
        )


def test_the_spec_names_the_types():
    spec = all_ops()["all_gather_matmul"]
    assert spec.takes("cpu", E4M3) and spec.takes("cuda", E4M3)
    assert spec.takes("cpu", S8) and spec.takes("cuda", S8)
