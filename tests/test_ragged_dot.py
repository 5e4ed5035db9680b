"""jflux.nn.ragged_dot and ragged_dot_general against lax's and a dense form in float64."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import PLATFORM, examples, make_mesh
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

import jflux
import jflux.nn
from jflux import testing
from jflux._ops import _lax

pytestmark = pytest.mark.wide
X64 = functools.partial(jax.enable_x64, True)
#: lax's own, whatever a test puts in their place.
LAX = {name: getattr(jax.lax, name) for name in ("ragged_dot", "ragged_dot_general")}
M, K, N, G = 16, 8, 24, 5


def numbers_of(lhs, rhs):
    """Dimension numbers of a product whose dimensions have these letters, of m and n rows and
    columns, k contracted and b batch dimensions, and e groups. The ragged one is upper case."""
    flat, other = lhs.lower(), rhs.lower()
    both = [c for c in flat if c in other]
    contract, batch = ([c for c in both if (c in "bc") == is_batch] for is_batch in (False, True))
    ragged = next(i for i, c in enumerate(lhs) if c.isupper())
    pairs = [([flat.index(c) for c in d], [other.index(c) for c in d]) for d in (contract, batch)]
    return jax.lax.RaggedDotDimensionNumbers(
        pairs, [ragged], [i for i, c in enumerate(other) if c == "e"]
    )


#: (lhs, rhs) of calls that jflux makes.
FORMS = [
    *itertools.product(("Mk", "kM"), map("".join, itertools.permutations("ekn"))),
    *itertools.product(("Mk", "kM"), ("mn", "nm")),
]
HANDED_BACK = [
    ("Mkl", "ekln"),
    ("bMk", "ebkn"),
    ("mMk", "ekn"),
    ("Mk", "eknp"),
    ("bMk", "bmn"),
    ("Mkl", "mln"),
    ("Bmk", "bkn"),
]
SIZES = {"b": 2, "c": 3, "m": M, "k": K, "l": 3, "n": N, "e": G, "p": 2}


def draw(seed, lhs, rhs, dtype=np.float32):
    """(operands, sizes): some are 0, and their sum is at most m."""
    rng = np.random.default_rng(seed)
    ragged = SIZES[next(c for c in lhs if c.isupper()).lower()]
    shapes = ([SIZES[c] for c in side.lower()] for side in (lhs, rhs))
    ends = np.sort(rng.integers(0, ragged + 1, G))
    operands = [rng.normal(size=shape).astype(dtype) for shape in shapes]
    return operands, np.diff(ends, prepend=0).astype(np.int32)


def dense(lhs, rhs, sizes, ragged_dot_dimension_numbers):
    """Every group's rows times everything, in float64, by `lax.dot_general`."""
    lhs, rhs = (jnp.asarray(a, jnp.float64) for a in (lhs, rhs))
    numbers = ragged_dot_dimension_numbers
    (ragged,), groups = numbers.lhs_ragged_dimensions, numbers.rhs_group_dimensions
    group = jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(lhs.shape[ragged]), side="right")
    each = []
    for e in range(len(sizes)):
        where = (group == e).reshape([-1 if i == ragged else 1 for i in range(lhs.ndim)])
        own = jnp.where(where, lhs, 0)
        (k, of_k), batch = numbers.dot_dimension_numbers
        if groups:
            w, of_k = jnp.take(rhs, e, groups[0]), [i - (i > groups[0]) for i in of_k]
        else:
            w = rhs
        each.append(jax.lax.dot_general(own, w, ((k, of_k), batch)))
    return sum(each) if groups else jnp.stack(each)


def with_gradients(f):
    """(y, gradients of both operands), of a cotangent."""

    def run(operands, sizes, ct):
        y, pull = jax.vjp(lambda lhs, rhs: f(lhs, rhs, sizes), *operands)
        return y, *pull(ct.astype(y.dtype))

    return jax.jit(run)


@functools.cache
def calls(lhs, rhs):
    """(jflux's call with gradients, lax's, the dense one)."""
    forms = jflux.nn.ragged_dot_general, LAX["ragged_dot_general"], dense
    return [with_gradients(functools.partial(f, **options_of(lhs, rhs))) for f in forms]


def options_of(lhs, rhs):
    return {"ragged_dot_dimension_numbers": numbers_of(lhs, rhs)}


def close(got, want, dtype, terms=M):
    want = np.asarray(want, np.float64)
    scale = max(1.0, np.abs(want).max(initial=0))
    error = np.abs(np.asarray(got, np.float64) - want)
    assert error.max(initial=0) <= 4 * testing.tolerance(dtype, terms) * scale


@pytest.mark.parametrize(("lhs", "rhs"), FORMS)
@given(st.integers(0, 1 << 16), st.sampled_from([np.float32, np.float64, jnp.bfloat16]))
@examples(9)
def test_any_order_of_dimensions(lhs, rhs, seed, dtype):
    """Values and gradients."""
    with X64():
        operands, sizes = draw(seed, lhs, rhs, dtype)
        call, laxs, exact = calls(lhs, rhs)
        ct = np.random.default_rng(seed + 1).normal(size=(M, N) if "e" in rhs else (G, K, N))
        found, wanted = call(operands, sizes, ct), exact(operands, sizes, ct)
        for got, want in zip(found, wanted, strict=True):
            assert got.dtype == dtype and got.shape == want.shape
            close(got, want, dtype)
        if "e" in rhs:
            same = laxs(operands, sizes, ct)
        else:  # lax has no gradients
            same = [LAX["ragged_dot_general"](*operands, sizes, numbers_of(lhs, rhs))]
        for got, want in zip(found, same, strict=False):
            assert got.dtype == want.dtype
            close(got, want, dtype)
        if PLATFORM == "cpu":
            assert "jflux_grouped_matmul" in call.lower(operands, sizes, ct).as_text()


@pytest.mark.parametrize("rhs", ["ekn", "enk", "mn"])
def test_what_lies_past_the_sum_counts_for_nothing(rhs):
    (x, w), sizes = draw(2, "Mk", rhs)
    past = sizes.sum()
    assert past < M
    call, _, _ = calls("Mk", rhs)
    shape = (M, N) if "e" in rhs else (G, K, N)
    ct = np.random.default_rng(3).normal(size=shape).astype(np.float32)
    want = call((x, w), sizes, ct)
    x[past:] = np.nan
    (w if rhs == "mn" else ct)[past:] = np.nan
    found = call((x, w), sizes, ct)
    for got, same in zip(found, want, strict=True):
        np.testing.assert_array_equal(got, same)
    if rhs != "mn":
        assert not np.asarray(found[0])[past:].any()


@pytest.mark.parametrize(("lhs", "rhs"), HANDED_BACK)
def test_other_dimensions_are_laxs(lhs, rhs):
    operands, sizes = draw(1, lhs, rhs)
    f = functools.partial(jflux.nn.ragged_dot_general, **options_of(lhs, rhs))
    assert "jflux_" not in jax.jit(f).lower(*operands, sizes).as_text()
    want = LAX["ragged_dot_general"](*operands, sizes, **options_of(lhs, rhs))
    np.testing.assert_allclose(f(*operands, sizes), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", LAX)
def test_calls_that_are_laxs(name, monkeypatch):
    """Of a precision, types and options that no kernel takes."""
    (x, w), sizes = draw(4, "Mk", "ekn")
    numbers = options_of("Mk", "ekn") if name == "ragged_dot_general" else {}
    f = functools.partial(getattr(jflux.nn, name), **numbers)
    want = LAX[name](x, w, sizes, **numbers)
    if PLATFORM == "cpu":
        assert "jflux_grouped_matmul" in jax.jit(f).lower(x, w, sizes).as_text()
    for operands, options in (
        ((x, w), {"precision": "highest"}),
        ((x, w.astype(jnp.bfloat16)), {"preferred_element_type": jnp.float32}),
        ((x.astype(jnp.int32), w.astype(jnp.int32)), {}),
        ((x, w), {"preferred_element_type": jnp.float32}),
    ):
        got = f(*operands, sizes, **options)
        same = LAX[name](*operands, sizes, **numbers, **options)
        assert got.dtype == same.dtype
        np.testing.assert_allclose(got, same, rtol=1e-5, atol=1e-5)
    text = jax.jit(functools.partial(f, precision="highest")).lower(x, w, sizes).as_text()
    assert "jflux_" not in text
    halves = [a.astype(jnp.bfloat16) for a in (x, w)]
    text = jax.jit(functools.partial(f, precision="highest")).lower(*halves, sizes).as_text()
    assert "jflux_grouped_matmul" in text
    np.testing.assert_allclose(f(x, w, sizes), want, rtol=1e-5, atol=1e-5)
    # lax refuses an offset too, for now: what it says is its own.
    monkeypatch.setattr(_lax, "ragged_dot_general", lambda *_, **options: options["group_offset"])
    assert f(x, w, sizes, group_offset=7) == 7


@pytest.mark.parametrize("name", LAX)
def test_in_the_place_of_laxs(name, monkeypatch):
    """Whether jflux makes a call or hands it back, and where it takes its reference, which is
    lax's: values and gradients."""
    numbers = options_of("Mk", "ekn") if name == "ragged_dot_general" else {}
    (x, w), sizes = draw(5, "Mk", "ekn")
    ct = np.ones((M, N), np.float32)
    want = with_gradients(functools.partial(LAX[name], **numbers))((x, w), sizes, ct)
    for each in LAX:
        monkeypatch.setattr(jax.lax, each, getattr(jflux.nn, each))
    tp = jflux.nn.TensorParallel("tp")
    monkeypatch.setattr(jax.lax, "dot_general", tp.dot_general(("embed", "mlp")))
    jax.clear_caches()

    def call(lhs, rhs, sizes, **options):
        return getattr(jax.lax, name)(lhs, rhs, sizes, **numbers, **options)

    ways = [({}, True), ({"precision": "highest"}, True), ({}, False)]
    for options, fused in ways:
        with jflux.config(fused=fused):
            f = with_gradients(functools.partial(call, **options))
            for got, same in zip(f((x, w), sizes, ct), want, strict=True):
                np.testing.assert_allclose(got, same, rtol=1e-4, atol=1e-5)
    mixed = call(x, w.astype(jnp.bfloat16), sizes)  # eagerly
    np.testing.assert_allclose(mixed, want[0], rtol=0.1, atol=0.1)
    product = jax.lax.dot_general(x, w[0], (((1,), (0,)), ((), ())))
    np.testing.assert_allclose(product, x @ w[0], rtol=1e-5, atol=1e-5)


def test_as_others_call_it():
    """Haliax's MoELinear by name, with weights in either order, and tokamax, which passes an
    activation."""
    (x, w), sizes = draw(6, "Mk", "enk")
    want = LAX["ragged_dot_general"](x, w, sizes, **options_of("Mk", "enk"))
    f = jflux.nn.ragged_dot_general
    got = f(lhs=x, rhs=w, group_sizes=sizes, **options_of("Mk", "enk"))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    halves = [a.astype(jnp.bfloat16) for a in (x, w)]
    for operands, types, dtype in (
        ((x, w), np.float32, None), (halves, jnp.bfloat16, None), (halves, np.float32, np.float32),
    ):  # fmt: skip
        seen = []

        def activation(a, seen=seen):
            seen.append(a.dtype)
            return jnp.sin(a)

        options = {"precision": None, "preferred_element_type": dtype}
        plain, active = (
            f(*operands, group_sizes=sizes, activation=one, **options_of("Mk", "enk"), **options)
            for one in (None, activation)
        )
        assert plain.dtype == active.dtype == types and seen == [np.float32]
        tolerance = 1e-5 if operands[0].dtype == np.float32 else 0.05
        np.testing.assert_allclose(
            np.asarray(active, np.float32), np.sin(want), rtol=0, atol=tolerance
        )


def test_gradients_of_gradients():
    with X64():
        (x, dy), sizes = draw(7, "Mk", "mn", np.float64)
        f = functools.partial(jflux.nn.ragged_dot_general, **options_of("Mk", "mn"))
        call = jax.jit(lambda x, dy: jnp.sin(f(x, dy, sizes)))
        check_grads(call, (x, dy), 2, ["fwd", "rev"], rtol=1e-4)


@pytest.mark.parametrize(("lhs", "rhs"), [("Mk", "enk"), ("kM", "nm")])
def test_in_batches_and_inside_shard_map(lhs, rhs):
    pairs = [draw(seed, lhs, rhs) for seed in range(2)]
    a, b, sizes = (
        np.stack(each)
        for each in zip(*((*operands, sizes) for operands, sizes in pairs), strict=True)
    )
    f = functools.partial(jflux.nn.ragged_dot_general, **options_of(lhs, rhs))
    want = np.stack([f(*operands, sizes) for operands, sizes in pairs])
    mesh = make_mesh((2,), ("dp",))
    each = jax.shard_map(
        lambda a, b, sizes: f(a[0], b[0], sizes[0])[None],
        mesh=mesh, in_specs=P("dp"), out_specs=P("dp"),
    )  # fmt: skip
    for call in (jax.vmap(f), each):
        np.testing.assert_allclose(jax.jit(call)(a, b, sizes), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("m", "k", "groups"), [(0, 4, 2), (3, 0, 2), (3, 4, 0)])
def test_empty_operands(m, k, groups):
    sizes = np.zeros(groups, np.int32)
    x, w, dy = (np.ones(s, np.float32) for s in ((m, k), (groups, k, 5), (m, 5)))
    y = jflux.nn.ragged_dot(x, w, sizes)
    assert y.shape == (m, 5) and not y.any()
    dw = jflux.nn.ragged_dot_general(x, dy, sizes, **options_of("Mk", "mn"))
    assert dw.shape == (groups, k, 5) and not dw.any()


def test_operands_that_do_not_fit():
    (x, w), sizes = draw(8, "Mk", "ekn")
    with pytest.raises(ValueError, match="x .* has 8 columns, and w .* takes 24"):
        jflux.nn.ragged_dot(x, w.swapaxes(1, 2), sizes)
    f = functools.partial(jflux.nn.ragged_dot_general, **options_of("Mk", "mn"))
    with pytest.raises(TypeError, match="contracting dimensions"):
        f(x, x[1:], sizes)
    with pytest.raises(TypeError, match=r"group_sizes\.dtype is subtype of np\.integer"):
        f(x, x, sizes.astype(np.float32))
    numbers = jax.lax.RaggedDotDimensionNumbers((((-1,), (1,)), ((), ())), (0,), (0,))
    with pytest.raises(TypeError):
        jflux.nn.ragged_dot_general(x, w, sizes, numbers)
