"""grouped_matmul against a dense one-hot form in float64: values, derivatives, batches, types."""

import functools
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import DTYPES, PLATFORM, examples, make_mesh
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

import jflux
import jflux.nn
from jflux import _native, testing
from jflux._call import local_ops, tuning_tables
from jflux._call.forms import Call, choose
from jflux._call.plans import Machine
from jflux._ops._epilogue import ACTIVATIONS
from jflux._ops.products import _grouped_primitives as primitives
from jflux._stress.calls import HALVES

pytestmark = pytest.mark.wide
X64 = functools.partial(jax.enable_x64, True)


def draw(seed, m, k, n, sizes, dtype, *, gated=False, transpose_rhs=False, scaled=False, past=0.0):
    """(x, w, sizes, scale or None); rows past the sum hold `past`."""
    rng = np.random.default_rng(seed)
    shape = (len(sizes), n, k) if transpose_rhs else (len(sizes), k, n)
    x = rng.normal(size=(m, k))
    x[sum(sizes) :] = past
    ws = [rng.normal(size=shape) / np.sqrt(k) for _ in range(1 + gated)]
    scale = rng.normal(size=m).astype(np.float32)
    scale[sum(sizes) :] = past
    w = tuple(w.astype(dtype) for w in ws)
    sizes = np.array(sizes, np.int32)
    return x.astype(dtype), w if gated else w[0], sizes, scale if scaled else None


def dense(x, w, sizes, scale=None, *, transpose_rhs=False, activation=None, gated=False):
    """The definition, in float64: every row times every expert, and the one of its group kept."""
    wide = functools.partial(jnp.asarray, dtype=jnp.float64)
    ends = jnp.cumsum(wide(sizes))
    group = jnp.searchsorted(ends, jnp.arange(x.shape[0]), side="right")
    one_hot = jax.nn.one_hot(group, len(sizes), dtype=jnp.float64)
    kept = (group < len(sizes))[:, None]
    x = jnp.where(kept, wide(x), 0)
    rhs = "enk" if transpose_rhs else "ekn"
    products = [
        jnp.einsum(f"me,mk,{rhs}->mn", one_hot, x, wide(one))
        for one in (w if isinstance(w, tuple) else (w,))
    ]
    y = products[0] if activation is None else ACTIVATIONS[activation](products[0])
    y = y * products[1] if gated else y
    if scale is not None:
        y = y * jnp.where(kept[:, 0], wide(scale), 0)[:, None]
    return y


def assert_close(got, want, dtype, terms, factor=4.0):
    want = np.asarray(want)
    scale = max(1.0, float(np.abs(want).max(initial=0)))
    error = np.abs(np.asarray(got).astype(np.float64) - want)
    assert error.max(initial=0) <= factor * testing.tolerance(dtype, terms) * scale


SIZES = {
    "even": (4, 4, 4, 4),
    "empty": (0, 7, 0, 9),
    "one": (0, 0, 16, 0),
    "short": (3, 0, 5, 1),
    "none": (0, 0, 0, 0),
}
WAYS = {
    "plain": {},
    "silu": {"activation": "silu"},
    "gelu": {"activation": "gelu"},
    "gated": {"activation": "gelu_tanh", "gated": True},
    "reglu": {"activation": "relu", "gated": True},
}


@pytest.mark.parametrize(("transpose_rhs", "scaled"), [(False, True), (True, False)])
@pytest.mark.parametrize("way", WAYS)
def test_equals_its_definition(way, transpose_rhs, scaled):
    options = {"transpose_rhs": transpose_rhs, **WAYS[way]}
    forms = [
        jax.jit(functools.partial(f, **options))
        for f in (jflux.grouped_matmul, jflux.reference.grouped_matmul)
    ]
    for dtype in DTYPES:
        for sizes in SIZES:
            with X64():
                x, w, s, scale = draw(
                    1, 16, 12, 20, SIZES[sizes], dtype, gated=options.get("gated", False),
                    transpose_rhs=transpose_rhs, scaled=scaled, past=np.nan,
                )  # fmt: skip
                want = dense(x, w, s, scale, **options)
                for f in forms:
                    y = f(x, w, s, row_scale=scale)
                    assert y.dtype == dtype and y.shape == (16, 20)
                    assert_close(y, want, dtype, 12)
                    assert not np.asarray(y)[sum(SIZES[sizes]) :].any()


@pytest.mark.parametrize("dtype", HALVES)
def test_accumulates_in_float32(dtype):
    x, w, s, _ = draw(2, 300, 700, 33, (131, 0, 150), dtype)
    y = jflux.grouped_matmul(x, w, s, preferred_element_type=jnp.float32)
    assert y.dtype == jnp.float32
    with X64():
        assert_close(y, dense(x, w, s), jnp.float32, 700)


@given(
    sizes=st.lists(st.integers(0, 150), min_size=1, max_size=6),
    more=st.integers(0, 40),
    k=st.integers(1, 70),
    n=st.integers(1, 70),
    seed=st.integers(0, 1 << 16),
    way=st.sampled_from(sorted(WAYS)),
    transpose_rhs=st.booleans(),
)
@examples(8)
def test_any_shape(sizes, more, k, n, seed, way, transpose_rhs):
    m = sum(sizes) + more
    options = {"transpose_rhs": transpose_rhs, **WAYS[way]}
    with X64():
        x, w, s, scale = draw(
            seed, m, k, n, sizes, jnp.float64, gated=options.get("gated", False),
            transpose_rhs=transpose_rhs, scaled=True, past=np.nan,
        )  # fmt: skip
        y = jflux.grouped_matmul(x, w, s, row_scale=scale, **options)
        assert_close(y, dense(x, w, s, scale, **options), jnp.float64, k)


# ---- Derivatives ---------------------------------------------------------------------------------


def losses(options, s, dy):
    def of(f):
        def loss(x, w, scale):
            return jnp.vdot(dy, f(x, w, s, scale, **options).astype(dy.dtype))

        return loss

    def jflux_form(x, w, s, scale, **options):
        return jflux.grouped_matmul(x, w, s, row_scale=scale, **options)

    return of(jflux_form), of(dense)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("wrap", "transpose_rhs"), [("plain", False), ("plain", True), ("remat", True), ("scan", False)]
)
def test_gradients(wrap, way, transpose_rhs):
    options = {"transpose_rhs": transpose_rhs, **WAYS[way]}
    sizes = (5, 0, 7)
    with X64():
        x, w, s, scale = draw(
            3, 16, 6, 8, sizes, jnp.float64, gated=options.get("gated", False),
            transpose_rhs=transpose_rhs, scaled=True, past=np.nan,
        )  # fmt: skip
        # What lies past the end of a cotangent must not matter either.
        dy = np.random.default_rng(4).normal(size=(16, 8))
        dy[sum(sizes) :] = np.nan
        mine, exact = losses(options, s, dy)
        dy_of_exact = np.where(np.isnan(dy), 0, dy)
        _, exact = losses(options, s, dy_of_exact)
        f = {"plain": mine, "remat": jax.checkpoint(mine), "scan": mine}[wrap]
        grad = jax.grad(f, (0, 1, 2))
        if wrap == "scan":
            of = jax.grad(mine, (0, 1, 2))

            def grad(x, w, scale):
                zeros = jax.tree.map(jnp.zeros_like, (x, w, scale))

                def step(sums, factor):
                    found = of(x, w, scale * factor)
                    return jax.tree.map(jnp.add, sums, found), None

                return jax.lax.scan(step, zeros, jnp.array([1.0, 1.0], scale.dtype))[0]

        got = jax.jit(grad)(x, w, scale)
        want = jax.grad(exact, (0, 1, 2))(np.nan_to_num(x), w, np.nan_to_num(scale))
        times = 2.0 if wrap == "scan" else 1.0
        for g, e in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert g.dtype == e.dtype and g.shape == e.shape
            dtype = g.dtype
            assert_close(g, times * np.asarray(e, np.float64), dtype, 60, factor=16)
        dx, dw, dscale = got
        assert not np.asarray(dx)[12:].any() and not np.asarray(dscale)[12:].any()
        for one in jax.tree.leaves(dw):  # exactly zero
            assert not np.asarray(one)[1].any() and np.asarray(one)[0].any()


@pytest.mark.parametrize("recipe", [None, "block"])
def test_rows_of_no_group_that_nobody_reads(recipe):
    """Two products, as a mixture has them: with rows that may be anything the others have the same
    bits, and so have the gradients of the weights."""
    sizes, m = np.array([40, 0, 65], np.int32), 160
    rng = np.random.default_rng(7)
    x, dy = (rng.normal(size=(m, 128)).astype(jnp.bfloat16) for _ in range(2))
    x[105:], dy[105:] = np.nan, np.nan
    pair = tuple((rng.normal(size=(3, 128, 256)) / 11).astype(jnp.bfloat16) for _ in range(2))
    down = (rng.normal(size=(3, 256, 128)) / 16).astype(jnp.bfloat16)

    def layer(x, pair, down, rest):
        made = None if recipe is None else getattr(jflux.Recipe, recipe)
        product = functools.partial(jflux.grouped_matmul, group_sizes=sizes, recipe=made, rest=rest)
        return product(product(x, pair, activation="silu", gated=True), down)

    def all_of(rest):
        y, pull = jax.vjp(lambda *a: layer(*a, rest), x, pair, down)
        return y, *pull(dy)

    got, want = (jax.jit(all_of, static_argnums=0)(rest) for rest in ("undefined", "zeros"))
    rows = 2  # the first results
    for i, (a, b) in enumerate(zip(*map(jax.tree.leaves, (got, want)), strict=True)):
        end = 105 if i < rows else None
        assert np.asarray(a[:end]).tobytes() == np.asarray(b[:end]).tobytes()
        assert not np.isnan(np.asarray(b, np.float32)).any()


@pytest.mark.parametrize("way", WAYS)
def test_forward_and_reverse_twice(way):
    options = WAYS[way]
    if options.get("activation") == "relu":
        pytest.skip("the second derivative of relu is no number at 0, and 0 elsewhere")
    with X64():
        x, w, s, scale = draw(
            5, 9, 4, 5, (3, 0, 4), jnp.float64, gated=options.get("gated", False), scaled=True
        )

        def f(x, w, scale):
            return jflux.grouped_matmul(x, w, s, row_scale=scale, **options)

        # In numbers that differ by little, scales in float32 would not.
        check_grads(lambda x, w: f(x, w, scale), (x, w), 2, ["fwd", "rev"], rtol=1e-4, atol=1e-5)
        operands = (x, w, scale)
        tangents = jax.tree.map(np.cos, operands)

        def twice(f):
            return jax.jvp(lambda *a: jax.jvp(f, a, tangents), operands, tangents)

        want = twice(lambda x, w, scale: dense(x, w, s, scale, **options))
        for g, e in zip(jax.tree.leaves(twice(f)), jax.tree.leaves(want), strict=True):
            assert_close(g, e, jnp.float32, 10)


def test_hessian():
    with X64():
        x, w, s, _ = draw(6, 5, 2, 3, (2, 0, 2), jnp.float64, gated=True)

        def loss(f):
            return lambda x, w: jnp.sum(f(x, w, s, activation="silu", gated=True) ** 2)

        got = jax.jit(jax.hessian(loss(jflux.grouped_matmul), (0, 1)))(x, w)
        want = jax.jit(jax.hessian(loss(dense), (0, 1)))(x, w)
        for g, e in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert_close(g, e, jnp.float64, 100)


@pytest.mark.parametrize("dtype", HALVES)
def test_gradients_of_halves(dtype):
    x, w, s, scale = draw(7, 40, 24, 16, (11, 0, 20), dtype, gated=True, scaled=True)
    options = {"activation": "silu", "gated": True}
    dy = np.random.default_rng(8).normal(size=(40, 16)).astype(dtype)
    mine, exact = losses(options, s, dy.astype(np.float32))
    got = jax.grad(mine, (0, 1, 2))(x, w, scale)
    with X64():
        _, exact = losses(options, s, dy.astype(np.float64))
        want = jax.grad(exact, (0, 1, 2))(*(jax.tree.map(np.float64, a) for a in (x, w, scale)))
    for g, e in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert_close(g, e, dtype, 24, factor=16)


def test_keeps_only_the_products():
    """Between forward and backward, of arrays as large as y."""
    from jax._src.ad_checkpoint import saved_residuals

    x, w, s, scale = draw(9, 64, 8, 32, (30, 34), jnp.bfloat16, gated=True, scaled=True)

    def f(x, w, scale):
        y = jflux.grouped_matmul(x, w, s, activation="silu", gated=True, row_scale=scale)
        return jnp.sum(y.astype(jnp.float32))

    kept = [aval for aval, _ in saved_residuals(f, x, w, scale) if aval.size >= 64 * 32]
    assert [(a.shape, a.dtype) for a in kept] == [((64, 32), jnp.bfloat16)] * 2


def test_the_gradient_of_a_gates_x_is_one_product():
    """A sum of two products in one call, rounded once; so are those of a batch."""
    x, w, s, _ = draw(11, 40, 24, 16, (11, 0, 20), jnp.bfloat16, gated=True)

    def dx(x, w, s):
        def loss(x):
            y = jflux.grouped_matmul(x, w, s, activation="silu", gated=True)
            return jnp.sum(y.astype(jnp.float32))

        return jax.grad(loss)(x)

    for f, operands in ((dx, (x, w, s)), (jax.vmap(dx, (0, None, None)), (x[None], w, s))):
        text = str(jax.make_jaxpr(f)(*operands))
        assert re.findall(r"jflux_grouped_matmul\[.*?\bterms=(\d)", text, re.S) == ["1", "2"]


def test_a_call_without_derivatives_writes_no_sums():
    x, w, s, _ = draw(10, 16, 8, 8, (8, 8), jnp.float32, gated=True)

    def f(x, w):
        y, pull = jax.vjp(lambda x: jflux.grouped_matmul(x, w, s, activation="silu", gated=True), x)
        del pull
        return y

    jaxpr = jax.make_jaxpr(jax.jit(f))(x, w)
    closed = jax.jit(f).trace(x, w).jaxpr
    text = str(closed) + str(jaxpr)
    assert "sums=True" in text  # as traced
    from jax.interpreters import partial_eval as pe

    smaller, _ = pe.dce_jaxpr(closed.jaxpr, [True])
    assert "sums=True" not in str(smaller) and "jflux_grouped_matmul" in str(smaller)


# ---- Batches and types ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("axes", "way", "transpose_rhs"),
    [
        ((0, None, None, None), "plain", False),
        ((1, None, None, 0), "gated", False),
        ((None, 0, None, None), "plain", True),
        ((None, 3, None, None), "gated", False),
        ((None, 1, None, None), "gated", True),
        ((None, None, None, 0), "plain", False),
        ((0, 1, None, None), "plain", True),
        ((0, 0, 0, 1), "gated", False),
        ((None, None, 0, None), "plain", False),
    ],
)
def test_vmap(axes, way, transpose_rhs):
    options = {"transpose_rhs": transpose_rhs, **WAYS[way]}
    with X64():
        each = [
            draw(seed, 9, 3, 4, sizes, jnp.float64, gated=options.get("gated", False),
                 transpose_rhs=transpose_rhs, scaled=True)
            for seed, sizes in ((11, (2, 0, 4)), (12, (0, 5, 1)))
        ]  # fmt: skip

        def stacked(i):
            if axes[i] is None:
                return each[0][i]
            return jax.tree.map(lambda *a: np.stack(a, axes[i]), *(one[i] for one in each))

        operands = [stacked(i) for i in range(4)]

        def mine(x, w, s, scale):
            return jflux.grouped_matmul(x, w, s, row_scale=scale, **options)

        got = jax.jit(jax.vmap(mine, axes))(*operands)
        of_each = functools.partial(dense, **options)
        assert_close(got, jax.vmap(of_each, axes)(*operands), jnp.float64, 3)

        if options.get("gated"):
            return

        def grad(f):
            def loss(x, w, s, scale):
                return jnp.sum(jnp.sin(f(x, w, s, scale)))

            return jax.jit(jax.vmap(jax.grad(loss, (0, 1, 3)), axes))

        want = grad(of_each)(*operands)
        for g, e in zip(grad(mine)(*operands), want, strict=True):
            assert_close(g, e, g.dtype, 30, factor=16)


def test_batches_are_one_call_where_they_can_be():
    x, w, s, _ = draw(13, 8, 4, 4, (3, 5), jnp.float32)
    f = jax.vmap(lambda x, w: jflux.grouped_matmul(x, w, s), (0, None))
    g = jax.vmap(lambda x, w: jflux.grouped_matmul(x, w, s), (None, 0))
    for text in (str(jax.make_jaxpr(f)(x[None], w)), str(jax.make_jaxpr(g)(x, w[None]))):
        assert text.count("jflux_grouped_matmul") == 1 and "scan" not in text


@pytest.mark.parametrize("check_vma", [True, False])
def test_inside_shard_map(check_vma):
    """Each rank has its own call; the gradient of what ranks share is summed over them."""
    mesh = make_mesh((2,), ("ep",))
    with X64():
        a, b = (draw(seed, 8, 4, 6, (3, 4), jnp.float64) for seed in (14, 15))
        x, w, s = np.concatenate([a[0], b[0]]), a[1], a[2]

        def body(x, w, s):
            y = jflux.grouped_matmul(x, w, s, activation="silu")
            if check_vma:
                assert jax.typeof(y).manual_axis_type.varying == {"ep"}
            return y

        f = jax.shard_map(
            body, mesh=mesh, in_specs=(P("ep"), P(), P()), out_specs=P("ep"), check_vma=check_vma
        )
        want = jnp.concatenate([dense(one, w, s, activation="silu") for one in (a[0], b[0])])
        assert_close(jax.jit(f)(x, w, s), want, jnp.float64, 4)
        dw = jax.jit(jax.grad(lambda w: jnp.sum(jnp.sin(f(x, w, s)))))(w)
        one = jax.grad(
            lambda w, x: jnp.sum(jnp.sin(dense(x, w, s, activation="silu"))),
        )
        assert_close(dw, one(w, a[0]) + one(w, b[0]), jnp.float64, 30)


def test_wrong_out_specs_are_found():
    """Results vary over the axes that any operand varies over."""
    mesh = make_mesh((2,), ("ep",))
    x, w, s, _ = draw(16, 8, 4, 6, (3, 4), jnp.float32)
    f = jax.shard_map(jflux.grouped_matmul, mesh=mesh, in_specs=(P(), P(), P("ep")), out_specs=P())
    with pytest.raises(ValueError, match="out_specs"):
        jax.eval_shape(f, x, np.concatenate([w, w])[: w.shape[0]], np.concatenate([s, s]))


def test_empty_operands():
    for m, k, n, sizes in ((0, 4, 4, (0, 0)), (4, 0, 4, (2, 1)), (4, 4, 0, (2, 1)), (4, 4, 4, ())):
        x, w, s, _ = draw(17, m, max(k, 1), n, sizes, jnp.float32)
        x, w = x[:, :k], w[:, :k]
        y, pull = jax.vjp(lambda x, w, s=s: jflux.grouped_matmul(x, w, s), x, w)
        assert y.shape == (m, n) and not np.asarray(y).any()
        dx, dw = pull(jnp.ones_like(y))
        assert dx.shape == x.shape and dw.shape == w.shape
        assert not np.asarray(dx).any() and not np.asarray(dw).any()


# ---- Which path ----------------------------------------------------------------------------------


def test_explains_its_path():
    x, w, s, _ = draw(18, 8, 8, 8, (3, 5), jnp.bfloat16)
    f = jax.jit(jax.grad(lambda x, w: jnp.sum(jflux.grouped_matmul(x, w, s)), (0, 1)))
    assert {c.op for c in jflux.explain(f, x, w)} == {primitives.OP, primitives.DW}
    assert all(c.plan.path == "fused" for c in jflux.explain(f, x, w))
    text = jax.jit(jflux.grouped_matmul).lower(x, w, s).as_text()
    assert "jflux_grouped_matmul" in text
    with jflux.config(fused=False):
        assert "jflux_" not in jax.jit(jflux.grouped_matmul).lower(x, w, s).as_text()


@pytest.mark.parametrize("checked", [False, True])
def test_gpus_take_the_reference_until_a_kernel_is_checked(checked, monkeypatch):
    monkeypatch.setattr(_native, "lib", types.SimpleNamespace(built_with_cuda=lambda: True))
    form = local_ops.kernel(
        "an_op", why_not=lambda *_: None, attributes=None, checked_on_gpus=checked
    )

    def plan_on(platform):
        return choose([form], Call([], None), Machine(platform))[0]

    for switch in (False, True):
        with jflux.config(unchecked_kernels=switch):
            plan = plan_on("cuda")
            assert plan_on("cpu").path == "fused"
        assert (plan.path == "fused") == (checked or switch)
        assert checked or switch or "unchecked_kernels=True" in plan.reason


def test_gpus_take_the_kernels():
    """Or say that this build has none."""
    x, w, s, _ = draw(19, 8, 8, 8, (3, 5), jnp.bfloat16)
    traced = jax.jit(jflux.grouped_matmul).trace(x, w, s)
    with jflux.config(unchecked_kernels=False, strict=True):
        if jflux._native.lib.built_with_cuda():
            text = traced.lower(lowering_platforms=("cuda",)).as_text()
            assert "jflux_grouped_matmul" in text
        else:
            with pytest.raises(NotImplementedError, match="has no GPU kernels"):
                traced.lower(lowering_platforms=("cuda",))


def test_sizes_that_no_gpu_kernel_takes():
    for shape, groups, says in (
        ((16, 12, 16), 2, r"k and n are \(12, 16\), the kernel takes multiples of 8"),
        ((16, 16, 20), 2, r"k and n are \(16, 20\)"),
        ((16, 8, 8), 2048, "2048 groups, the kernel takes up to 2047"),
    ):
        m, k, n = shape
        x, w, s, _ = draw(25, m, k, n, (0,) * groups, jnp.bfloat16)
        traced = jax.jit(jflux.grouped_matmul).trace(x, w, s)
        with jflux.config(strict=True), pytest.raises(NotImplementedError, match=says):
            traced.lower(lowering_platforms=("cuda",))


def test_types_that_no_kernel_takes():
    x, w, s, _ = draw(20, 8, 4, 4, (3, 5), jnp.float32)
    x, w = (np.round(4 * a).astype(np.int32) for a in (x, w))
    with jflux.config(strict=True), pytest.raises(NotImplementedError, match="operands are int32"):
        jflux.grouped_matmul(x, w, s)
    if PLATFORM == "gpu":
        return  # XLA does not compile lax.ragged_dot of integers there
    with jflux.config(strict=False):
        y = np.asarray(jflux.grouped_matmul(x, w, s))
    with X64():
        np.testing.assert_array_equal(y, dense(x, w, s))


# ---- Errors --------------------------------------------------------------------------------------

GOOD = {"x": (8, 4), "w": (3, 4, 5), "group_sizes": (3,)}


@pytest.mark.parametrize(
    ("changes", "options", "error", "says"),
    [
        ({"x": (2, 8, 4)}, {}, ValueError, r"x must have shape \[M, K\], got \(2, 8, 4\)"),
        ({"w": (4, 5)}, {}, ValueError, r"w must have shape \[E, K, N\], got \(4, 5\)"),
        ({"w": (3, 5, 4)}, {}, ValueError, r"x \(8, 4\) has 4 columns, and w \(3, 5, 4\).*takes 5"),
        ({}, {"transpose_rhs": True}, ValueError, r"which must be \[E, N, K\].*takes 5"),
        ({"group_sizes": (4,)}, {}, ValueError, r"must have shape \(3,\)"),
        ({"group_sizes": (3, 1)}, {}, ValueError, r"shape \(3, 1\)"),
        ({}, {"activation": "tanh"}, ValueError, "activation='tanh' must be None or one of gelu"),
        ({}, {"gated": True}, ValueError, "two .*; got 1 and gated=True"),
        ({}, {"row_scale": jnp.ones(7)}, ValueError, r"row_scale has shape \(7,\).*\(8,\)"),
        ({}, {"row_scale": jnp.ones(8, int)}, TypeError, "row_scale must be floating"),
        ({}, {"row_scale": 2.0}, TypeError, "row_scale must be an array, got float"),
    ],
)
def test_wrong_operands(changes, options, error, says):
    arrays = {
        name: jnp.zeros(shape, jnp.int32 if name == "group_sizes" else jnp.float32)
        for name, shape in (GOOD | changes).items()
    }
    for f in (jflux.grouped_matmul, jflux.reference.grouped_matmul):
        with pytest.raises(error, match=f"jflux.grouped_matmul: .*{says}"):
            jax.eval_shape(functools.partial(f, **options), *arrays.values())


def test_a_rest_that_is_not_known():
    x, w, s, _ = draw(1, 8, 4, 4, (3, 5), np.float32)
    with pytest.raises(ValueError, match=r"grouped_matmul: rest='nan' must be one of \('zeros', "):
        jflux.grouped_matmul(x, w, s, rest="nan")


def test_wrong_types_and_numbers_of_weights():
    x, w, s, _ = draw(22, 8, 4, 5, (3, 3), jnp.float32)
    with pytest.raises(TypeError, match=r"group_sizes must be integers \(int32\), got float32"):
        jflux.grouped_matmul(x, w, s.astype(np.float32))
    with pytest.raises(TypeError, match="group_sizes must be an array, got tuple"):
        jflux.grouped_matmul(x, w, (3, 3))
    with pytest.raises(ValueError, match="got 2 and gated=False"):
        jflux.grouped_matmul(x, (w, w), s)
    with pytest.raises(ValueError, match="two weights of one shape"):
        jflux.grouped_matmul(x, (w, w[:, :, :4]), s, activation="silu", gated=True)
    with pytest.raises(ValueError, match="needs an activation"):
        jflux.grouped_matmul(x, (w, w), s, gated=True)


def test_sharded_operands_are_refused():
    mesh = make_mesh((2,), ("ep",), axis_type=jax.sharding.AxisType.Explicit)
    x, w, s, _ = draw(23, 8, 4, 5, (3, 3), jnp.float32)
    with jax.set_mesh(mesh):
        x = jax.device_put(x, jax.NamedSharding(mesh, P("ep")))
        with pytest.raises(
            ValueError, match=r"x \(8, 4\) is sharded.*call it inside jax.shard_map"
        ):
            jax.jit(jflux.grouped_matmul)(x, w, s)


@pytest.mark.skipif(PLATFORM != "cpu", reason="on GPUs a fault ends the process's calls")
@pytest.mark.parametrize(
    ("sizes", "says"),
    [((5, 4), "group_sizes sum to 9, and x has 8 rows"), ((9, -1), r"group_sizes\[1\] is -1")],
)
def test_sizes_that_do_not_fit(sizes, says):
    x, w, _, _ = draw(24, 8, 4, 5, (3, 3), jnp.float32)
    s = jnp.array(sizes, jnp.int32)
    with pytest.raises(
        (jax.errors.JaxRuntimeError, ValueError), match=f"jflux: grouped_matmul: {says}"
    ):
        jax.block_until_ready(jflux.grouped_matmul(x, w, s))
    with pytest.raises(
        (jax.errors.JaxRuntimeError, ValueError), match=f"jflux: grouped_matmul_dw: {says}"
    ):
        jax.block_until_ready(
            primitives.grouped_matmul_dw.bind(
                jnp.asarray(x), jnp.asarray(x), s, params=primitives.DwParams(np.dtype("float32"))
            )
        )


# ---- A forced configuration ----------------------------------------------------------------------


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("choice", tuning_tables.compiled(), ids=str)
def test_a_configuration_that_is_forced_on_all_products_is_for_those_that_have_it(choice, gated):
    """jflux.stress forces configurations of dense products, of which grouped ones have fewer."""
    with tuning_tables.force(choice):
        forced = primitives.forced_tile(gated)
    tile = (choice.tile_n, choice.cluster_m)
    has_it = tile in _native.GROUPED_TILES[0] and not (gated and choice.tile_n % 128)
    assert tuple(forced) == (tile if has_it else ())
    half = _native.dtype_number("bfloat16")
    call = {
        "world": 2, "tokens": 64, "choices": 1, "k": 64, "n": 64, "groups": 2, "dtype": half,
        "out_dtype": half, "transpose_rhs": 0, "gated": int(gated),
    } | dict(zip(("tile_n", "cluster_m"), map(int, forced), strict=False))  # fmt: skip
    plan = _native.lib.plan("all_gather_grouped_matmul", call, 132, 400.0, _native.HOPPER_ARCH)
    assert not has_it or (plan["tile_n"], plan["cluster_m"]) == tile


def test_expected_rows_reach_the_kernels():
    """In all of a call's kernels, with gradients; more than there are is all."""
    x, w = jnp.ones((16, 8), jnp.bfloat16), jnp.ones((2, 8, 8), jnp.bfloat16)
    sizes = jnp.array([3, 5])

    def shares(expected):
        def loss(x, w):
            y = jflux.grouped_matmul(x, (w, w), sizes, activation="silu", gated=True,
                                     expected_rows=expected)  # fmt: skip
            return jnp.sum(y)

        text = jax.jit(jax.grad(loss, (0, 1))).lower(x, w).as_text()
        return re.findall(r"share = ([0-9.e+-]+) : f64", text)

    assert {float(share) for share in shares(8)} == {0.5} and len(shares(8)) == 4
    assert {float(share) for share in (*shares(None), *shares(99))} == {1.0}
    with pytest.raises(ValueError, match="expected_rows=-1 must be an int, 0 or more"):
        jflux.grouped_matmul(x, w, sizes, expected_rows=-1)
