"""Every product: results have the types of `lax.dot_general`'s, whose operands' types all run. Of
8-bit operands that its kernels take, all_gather_matmul has types of its own: test_eight_bits.py."""

import functools
import itertools
import warnings

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from harness import PRODUCTS, RANKS, make_mesh, of_way
from jax import lax
from jax.sharding import PartitionSpec as P

import jflux
import jflux.nn as jnn
from jflux._ops._spec import all_ops
from jflux._stress.calls import per_device

EACH_OP = pytest.mark.parametrize("op", PRODUCTS)
#: Whole numbers up to this are exact in every type, and so are sums of few products of them.
MOST = 1


@pytest.fixture(autouse=True)
def not_strict():
    """Most of these types take the reference, which is what the tests are about."""
    with jflux.config(strict=False), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of float64 where JAX has none
        yield


def small(op, x_dtype, w_dtype, ranks=2):
    """x and w of each rank, of small whole numbers."""
    call, rng = of_way(op, lead=(2,), k=2, n=2), np.random.default_rng(0)
    shapes = (call.x_shape(ranks), call.w_shape(ranks))
    return tuple(
        rng.integers(-MOST, MOST + 1, (ranks, *shape)).astype(dtype)
        for shape, dtype in zip(shapes, (x_dtype, w_dtype), strict=True)
    )


def pair(op, **options):
    """The op and its reference, as functions of one rank's x and w."""
    spec = all_ops()[op]
    options = {"axis_name": "tp", **spec.ways[0]} | options
    return [functools.partial(f, **options) for f in (spec.function, spec.reference)]


def assert_same(got, want):
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        # float64 holds all of these types but complex ones.
        wide = np.complex128 if jnp.issubdtype(one.dtype, jnp.complexfloating) else np.float64
        np.testing.assert_array_equal(np.asarray(one, wide), np.asarray(other, wide))


# ---- Results -------------------------------------------------------------------------------------

PREFERRED = (float, np.float64, int, complex, "float64", jnp.float32)


@pytest.mark.parametrize("x64", [False, True], ids=["x32", "x64"])
@EACH_OP
def test_preferred_element_type_is_canonical(op, x64):
    """Python's own types, and those of 64 bits, are what `lax.dot` makes of them."""
    mesh = make_mesh((2,))
    x, w = small(op, np.float32, np.float32)
    for preferred in PREFERRED:
        both = [jax.jit(per_device(mesh, f)) for f in pair(op, preferred_element_type=preferred)]
        with jax.enable_x64(x64):
            got = jax.eval_shape(both[0], x, w)
            expected = jax.eval_shape(
                functools.partial(lax.dot, preferred_element_type=preferred),
                x[0, 0, :2],
                x[0, 0, :2],
            )
            assert got.dtype == expected.dtype
            # XLA for GPUs multiplies no real matrices to complex ones.
            if preferred is not complex or takes(x.dtype, w.dtype, preferred):
                assert_same(*(f(x, w) for f in both))


@EACH_OP
def test_preferred_element_type_of_global_arrays(op):
    spec, mesh = all_ops()[op], make_mesh((2,))
    for preferred in (float, np.float64):
        f, reference = pair(op, preferred_element_type=preferred, mesh=mesh)
        x, w = jnp.ones((4, 4), jnp.bfloat16), jnp.ones((4, 4), jnp.bfloat16)
        assert spec.layout(2, **spec.ways[0]) is not None
        got = jax.jit(f)(x, w)
        assert got.dtype == np.float32
        assert_same(got, jax.jit(reference)(x, w))


@EACH_OP
def test_a_preferred_type_of_python_takes_the_kernel(op):
    """bfloat16 operands and a `float` result: a float32 one, which kernels have."""
    mesh = make_mesh((RANKS,))
    call = of_way(op, lead=(8,), k=8, n=8)
    x, w = (jnp.ones((RANKS, *s), jnp.bfloat16) for s in (call.x_shape(RANKS), call.w_shape(RANKS)))
    calls = {}
    for preferred in (float, jnp.float32):
        f, _ = pair(op, preferred_element_type=preferred)
        explained = jflux.explain(jax.jit(per_device(mesh, f)), x, w)
        calls[preferred] = [(c.op, c.results, c.plan.path) for c in explained]
    assert calls[float] == calls[jnp.float32]


@EACH_OP
def test_types_that_lax_refuses(op):
    """With its own error, when the call is traced."""
    mesh = make_mesh((2,))
    x, w = small(op, np.int32, np.int32)
    for f in pair(op, preferred_element_type=np.int8):
        with pytest.raises(TypeError, match="must not be narrower"):
            jax.eval_shape(per_device(mesh, f), x, w)


@EACH_OP
def test_whole_results_have_no_gradient(op):
    mesh = make_mesh((2,))
    x, w = small(op, np.float32, np.float32)

    def gradients(f, x, w):
        return jax.grad(lambda x, w: f(x, w).sum() * 0.5, (0, 1))(x, w)

    for f in pair(op, preferred_element_type=int):
        dx, dw = jax.jit(per_device(mesh, functools.partial(gradients, f)))(x, w)
        assert not dx.any() and not dw.any()


# ---- Operands ------------------------------------------------------------------------------------

FLOAT8 = [
    t for name in dir(ml_dtypes) if name.startswith("float8") for t in [getattr(ml_dtypes, name)]
]
LESS = [ml_dtypes.float4_e2m1fn, ml_dtypes.int4, ml_dtypes.uint4]


def takes(x_dtype, w_dtype, preferred=None):
    """Whether `lax` multiplies such operands here."""
    dot = functools.partial(lax.dot, preferred_element_type=preferred)
    try:
        jax.jit(dot)(jnp.ones((2, 2), x_dtype), jnp.ones((2, 2), w_dtype))
    except (TypeError, NotImplementedError, jax.errors.JaxRuntimeError):
        return False
    return True


def pulled(f, x, w):
    """y, dx and dw."""
    y, pull = jax.vjp(f, x, w)
    return y, pull(jnp.ones_like(y))


@pytest.mark.parametrize("dtype", [*FLOAT8, *LESS], ids=lambda d: np.dtype(d).name)
@EACH_OP
def test_narrow_operands(op, dtype):
    """No preferred type: the result has theirs, and derivatives are `lax`'s."""
    if dtype == ml_dtypes.float8_e4m3fn and op == "all_gather_matmul":
        pytest.skip("it has a type of its own, and no derivatives")
    if not takes(dtype, dtype):
        pytest.skip("lax does not take it")
    mesh, is_float = make_mesh((2,)), np.dtype(dtype) in map(np.dtype, [*FLOAT8, *LESS[:1]])
    x, w = small(op, dtype, dtype)
    f, reference = (
        jax.jit(per_device(mesh, functools.partial(pulled, f) if is_float else f)) for f in pair(op)
    )
    try:
        want = reference(x, w)
    except jax.errors.JaxRuntimeError as error:
        if "not supported by NCCL" not in str(error):
            raise
        pytest.skip("lax does not send it")
    got = f(x, w)
    assert jax.tree.leaves(got)[0].dtype == dtype
    assert_same(got, want)


MIXED = [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, np.float16, ml_dtypes.bfloat16, np.int8]


@EACH_OP
def test_mixed_operands(op):
    """Of which `lax` chooses the wider one, by rules of its own."""
    mesh = make_mesh((2,))
    for x_dtype, w_dtype in itertools.permutations(MIXED, 2):
        if takes(x_dtype, w_dtype):
            x, w = small(op, x_dtype, w_dtype)
            got, want = (jax.eval_shape(per_device(mesh, f), x, w) for f in pair(op))
            assert got.dtype == want.dtype, (x_dtype, w_dtype)
    x, w = small(op, ml_dtypes.float8_e4m3fn, ml_dtypes.bfloat16)
    assert_same(*(jax.jit(per_device(mesh, functools.partial(pulled, f)))(x, w) for f in pair(op)))


def test_narrow_operands_with_an_epilogue():
    """Bias, activation, residual and norm, in float32."""
    mesh, dtype = make_mesh((2,)), ml_dtypes.float8_e4m3fn
    bias, residual = jnp.ones(4, dtype), jnp.ones((4, 4), dtype)
    norm = jflux.RMSNorm(jnp.ones(4, dtype))
    for op, options in {
        "all_gather_matmul": {"bias": bias, "activation": "relu"},
        "matmul_reduce_scatter": {"bias": bias, "residual": residual[:2]},
        "matmul_all_reduce": {"residual": residual, "norm": norm},
    }.items():
        x = jnp.ones((2, 2 if op == "all_gather_matmul" else 4, 4), dtype)
        w = jnp.ones((2, 4, 4), dtype)
        got, want = (jax.jit(per_device(mesh, f))(x, w) for f in pair(op, **options))
        of_kernels = op == "all_gather_matmul"  # which take 8 bits
        assert jax.tree.leaves(got)[0].dtype == (ml_dtypes.bfloat16 if of_kernels else dtype)
        assert_same(got, want)


def test_narrow_operands_of_layers():
    """What jflux.nn makes of the products, in the types that it computes in."""
    dtype, mesh = ml_dtypes.float8_e4m3fn, make_mesh((2,))

    def losses(logits, targets):
        return jnn.cross_entropy(logits, targets, axis_name="tp")

    logits = jax.random.normal(jax.random.key(0), (3, 8)).astype(dtype)
    specs = {"in_specs": (P(None, "tp"), P()), "out_specs": P(), "check_vma": False}
    got = jax.jit(jax.shard_map(losses, mesh=mesh, **specs))(logits, jnp.arange(3))
    wide = jax.nn.log_softmax(logits.astype(np.float32))
    np.testing.assert_allclose(got, -wide[jnp.arange(3), jnp.arange(3)], rtol=1e-6)

    x = jax.random.normal(jax.random.key(1), (2, 5, 3, 4)).astype(dtype)
    turned = jnn.Rotary()(x.astype(np.float32)).astype(dtype)
    assert_same(jnn.Rotary()(x), turned)
