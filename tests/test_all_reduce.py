"""jflux.all_reduce: values, gradients, transforms, errors."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import RANKS, SHAPES, compiled_text, fused_calls, make_mesh, run
from jax.sharding import PartitionSpec as P

import jflux
from jflux import testing
from jflux._ops.collectives.all_reduce import ALGORITHMS
from jflux._stress.calls import groups_of, normal, per_device, x64_if

DTYPES = (jnp.bfloat16, np.float16, np.float32, np.float64)
SIZES = [(1,), (3,), (5, 7), (8,), (1000, 33), (2, 3, 4001)]


def _reduce(module=jflux, axis_name="tp", **options):
    return lambda x: module.all_reduce(x, axis_name=axis_name, **options)


def _exact(mesh, axis_name, x):
    y = np.empty(x.shape, np.float64)
    for group in groups_of(mesh, axis_name):
        total = sum(x[at].astype(np.float64) for at in group)
        for at in group:
            y[at] = total
    return y


def _check(mesh, axis_name, x, **options):
    with x64_if(x.dtype):
        y = run(jax.jit(per_device(mesh, _reduce(axis_name=axis_name, **options))), x)
    want, size = _exact(mesh, axis_name, x), _exact(mesh, axis_name, abs(x))
    assert y.dtype == x.dtype
    bound = testing.tolerance(x.dtype, RANKS) * size + 1e-30
    assert (abs(y.astype(np.float64) - want) <= bound).all()
    for group in groups_of(mesh, axis_name):  # the same bits on all ranks
        assert len({y[at].tobytes() for at in group}) == 1


@pytest.mark.parametrize("shape", SIZES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("algorithm", [None, *ALGORITHMS])
def test_values(algorithm, dtype, shape):
    mesh = make_mesh((RANKS,))
    _check(mesh, "tp", normal(0, (RANKS, *shape), dtype), algorithm=algorithm)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_integers_are_exact(algorithm):
    """1 to 15 from each rank, in every type: no sum is rounded."""
    mesh = make_mesh((RANKS,))
    for dtype, count in itertools.product(DTYPES[:3], (1, 6, 4096, 100_000)):
        x = np.random.default_rng(count).integers(1, 16, (RANKS, count)).astype(dtype)
        y = run(jax.jit(per_device(mesh, _reduce(algorithm=algorithm))), x)
        np.testing.assert_array_equal(y.astype(np.int64), x.astype(np.int64).sum(0)[None] + 0 * y)


def test_algorithms_agree_to_the_bit():
    """In rank order, or in pairs."""
    mesh, x = make_mesh((RANKS,)), normal(0, (RANKS, 12345), jnp.bfloat16)
    butterflies = ("half_butterfly", "butterfly")
    for same in (set(ALGORITHMS) - set(butterflies), butterflies):
        results = {run(jax.jit(per_device(mesh, _reduce(algorithm=a))), x).tobytes() for a in same}
        assert len(results) == 1


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_mesh_and_every_choice_of_axes(shape, algorithm):
    names = ("a", "b", "c")[: len(shape)]
    mesh = make_mesh(shape, names, order=range(RANKS - 1, RANKS - 1 - np.prod(shape), -1))
    choices = [*names, *itertools.permutations(names, min(2, len(names)))]
    for seed, axis_name in enumerate(choices):
        _check(mesh, axis_name, normal(seed, (*shape, 37), np.float32), algorithm=algorithm)


def test_special_values():
    mesh = make_mesh((2,))
    values = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e30, -1e30], np.float32)
    pairs = np.array(list(itertools.product(values, values))).T
    for algorithm in ALGORITHMS:
        y = run(jax.jit(per_device(mesh, _reduce(algorithm=algorithm))), pairs)
        with np.errstate(invalid="ignore"):
            want = pairs[0] + pairs[1]
        for one in y:
            np.testing.assert_array_equal(one, want)
            numbers = ~np.isnan(want)
            np.testing.assert_array_equal(np.signbit(one)[numbers], np.signbit(want)[numbers])


@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("module", [jflux, jflux.reference], ids=["jflux", "lax"])
def test_gradients(module, check_vma):
    """Against what they are: of sum_r c_r f(all_reduce(x)), and twice."""
    mesh, n = make_mesh((RANKS,)), 5
    x, c = normal(0, (RANKS, n), np.float32), normal(1, (n,), np.float32)

    def loss(x):
        def local(x):
            return jnp.sum(c * module.all_reduce(x[0], axis_name="tp") ** 2)[None]

        out = P() if check_vma else P("tp")
        f = jax.shard_map(local, mesh=mesh, in_specs=P("tp"), out_specs=out, check_vma=check_vma)
        return jnp.sum(f(x))

    times = 1 if check_vma else RANKS  # how often the same loss is summed
    first = np.broadcast_to(times * 2 * c * x.sum(0), x.shape)
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(x), first, rtol=1e-4, atol=1e-4)
    tangent = normal(2, x.shape, np.float32)
    _, along = jax.jit(lambda x, t: jax.jvp(jax.grad(loss), (x,), (t,)))(x, tangent)
    second = np.broadcast_to(times * 2 * c * tangent.sum(0), x.shape)
    np.testing.assert_allclose(along, second, rtol=1e-4, atol=1e-4)


def test_results_are_the_same_on_all_ranks_to_types_too():
    """As those of `lax.psum`: out_specs need not name the axis, and must not claim too much."""
    mesh, x = make_mesh((RANKS,)), normal(0, (RANKS, 4), np.float32)

    def f(body, out_specs):
        return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("tp"), out_specs=out_specs))

    y = f(lambda x: jflux.all_reduce(x[0], axis_name="tp"), P())(x)
    np.testing.assert_allclose(y, x.sum(0), rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="out_specs"):
        f(lambda x: x[0], P())(x)
    # A number stays weakly typed.
    z = f(lambda x: jflux.all_reduce(2.0, axis_name="tp") * x[0].astype(jnp.bfloat16), P("tp"))(x)
    assert z.dtype == jnp.bfloat16
    # A value that ranks share is summed as often as there are ranks.
    z = f(lambda x: jflux.all_reduce(jnp.ones(3), axis_name="tp"), P())(x)
    np.testing.assert_array_equal(z, np.full(3, RANKS))


def test_transforms():
    mesh = make_mesh((RANKS,))
    x = normal(0, (RANKS, 3, 4, 5), np.float32)
    want = np.broadcast_to(x.sum(0), x.shape)
    bodies = {
        "vmap": jax.vmap(_reduce(), in_axes=1, out_axes=1),
        "nested vmap": jax.vmap(jax.vmap(_reduce())),
        "scan": lambda x: jax.lax.scan(lambda c, x: (c, _reduce()(x)), 0, x)[1],
        "checkpoint": jax.checkpoint(_reduce()),
        "pytree": lambda x: jnp.stack(_reduce()([x[0], x[1], x[2]])),
        "cond": lambda x: jax.lax.cond(True, _reduce(), lambda x: x, x),
    }
    for name, body in bodies.items():
        f = jax.jit(per_device(mesh, body, check_vma=False))
        np.testing.assert_allclose(run(f, x), want, rtol=1e-5, atol=1e-5, err_msg=name)


def test_beside_other_collectives_and_ops():
    """In one program with XLA's psum and a fused product, many calls in flight."""
    mesh, k = make_mesh((RANKS,)), 16
    x = normal(0, (RANKS, 8, k), jnp.bfloat16)
    w = (normal(1, (RANKS, k, k), np.float64) / 16).astype(jnp.bfloat16)

    def body(module):
        def step(x, w):
            y = module.all_gather_matmul(x, w, axis_name="tp")[: x.shape[0]]
            z = module.all_reduce(y, axis_name="tp") + jax.lax.psum(x, "tp")
            return (z / RANKS).astype(x.dtype) + module.all_reduce(x, axis_name="tp") / RANKS

        def f(x, w):
            for _ in range(4):
                x = step(x, w)
            return x

        return run(jax.jit(per_device(mesh, f)), x, w)

    got, want = (body(m).astype(np.float32) for m in (jflux, jflux.reference))
    assert np.abs(got - want).max() <= 0.05 * np.abs(want).max()


# ---- What follows the sum ------------------------------------------------------------------------


NORMS = (None, "rms", "layer", "layer without bias")


def _norm(kind, scale, bias):
    if kind is None:
        return None
    if kind == "rms":
        return jflux.RMSNorm(scale, epsilon=1e-3)
    return jflux.LayerNorm(scale, bias if kind == "layer" else None, epsilon=1e-3)


def _normalised(kind, y, scale, bias):
    """In float64."""
    if kind != "rms":
        y = y - y.mean(-1, keepdims=True)
    y = y / np.sqrt((y * y).mean(-1, keepdims=True) + 1e-3) * scale
    return y + bias if kind == "layer" else y


def _after(shape, dtype, factor_dtype=np.float32):
    """x of each rank; residual, scale and bias of all."""
    width = shape[-1:]
    return (
        normal(0, (RANKS, *shape), dtype),
        normal(1, shape, dtype),
        normal(2, width, factor_dtype),
        normal(3, width, factor_dtype),
    )


def _over_ranks(mesh, f, **options):
    """f(x, residual, scale, bias) per rank, of which x alone differs."""
    specs = (P("tp"), P(), P(), P())
    return jax.shard_map(
        lambda x, *rest: f(x[0], *rest), mesh=mesh, in_specs=specs, out_specs=P(), **options
    )


@pytest.mark.parametrize("algorithm", [None, *ALGORITHMS[1:]])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", NORMS, ids=str)
def test_residual_and_norm(kind, dtype, algorithm):
    """Few rows, many, and some that the kernels leave to XLA (13 wide)."""
    mesh = make_mesh((RANKS,))
    factors = np.float64 if dtype == np.float64 else np.float32
    for with_residual, shape, factor_dtype in (
        (True, (5, 4096), factors),
        (False, (RANKS, 20, 64), dtype),
        (True, (7, 13), factors),
    ):
        if kind in NORMS[:2] or algorithm is None or len(shape) == 3:
            operands = _after(shape, dtype, factor_dtype)

            def f(x, residual, scale, bias, with_residual=with_residual):
                residual = residual if with_residual else None
                return jax.tree.leaves(
                    jflux.all_reduce(
                        x, axis_name="tp", residual=residual, norm=_norm(kind, scale, bias),
                        algorithm=algorithm,
                    )
                )  # fmt: skip

            with x64_if(dtype):
                got = run(jax.jit(_over_ranks(mesh, f)), *operands)
            x, residual, scale, bias = (a.astype(np.float64) for a in operands)
            want = x.sum(0) + with_residual * residual
            size = abs(x).sum(0) + with_residual * abs(residual)
            testing.assert_close(got[0], want, size, dtype, RANKS)
            assert len(got) == 1 + (kind is not None)
            if kind is not None:
                # Of the sum as it was rounded.
                want = _normalised(kind, got[0].astype(np.float64), scale, bias)
                testing.assert_close(got[1], want, abs(want) + abs(scale) + 1, dtype, shape[-1])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float16], ids=str)
def test_residual_of_another_type(dtype):
    """It is added to the rounded sum, in x's type; its gradient has its own."""
    x, residual, scale, _ = _after((5, 64), dtype)
    residual = residual.astype(np.float32)

    def f(x, residual, scale, _):
        return jflux.all_reduce(
            x, axis_name="tp", residual=residual, norm=jflux.RMSNorm(scale, epsilon=1e-3)
        )

    mesh = make_mesh((RANKS,))
    (y, normalised), pull = jax.vjp(jax.jit(_over_ranks(mesh, f)), x, residual, scale, scale)
    total = _over_ranks(mesh, lambda x, *_: jflux.all_reduce(x, axis_name="tp"))
    total = np.asarray(jax.jit(total)(x, residual, scale, scale), np.float32)
    np.testing.assert_array_equal(y, (total + residual).astype(dtype))
    want = _normalised("rms", np.asarray(y, np.float64), scale.astype(np.float64), 0)
    testing.assert_close(np.asarray(normalised), want, abs(want) + abs(scale) + 1, dtype, 64)
    dx, dresidual, *_ = pull((y, jnp.zeros_like(normalised)))
    assert dx.dtype == dtype and dresidual.dtype == np.float32
    np.testing.assert_array_equal(dresidual, np.asarray(y, np.float32))


def test_rows_are_normalised_in_the_kernel_where_that_is_faster():
    """One-shot, and two-shot if it is asked for."""
    mesh = make_mesh((2,))
    few, many = (8, 128), (4096, 512)  # of bfloat16: 2 KiB, 4 MiB

    def norm_of_the_call(shape, **options):
        def f(x):
            scale = jnp.ones(shape[1], x.dtype)
            norm = jflux.RMSNorm(scale)
            return jflux.all_reduce(x[0], axis_name="tp", norm=norm, **options)

        x = jax.ShapeDtypeStruct((2, *shape), jnp.bfloat16)
        g = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P("tp"), out_specs=P()))
        (number,) = re.findall(r"norm = (\d)", g.lower(x).as_text())
        return int(number)

    assert norm_of_the_call(few) == 1
    assert norm_of_the_call(many) == 0
    assert norm_of_the_call(many, algorithm="two_shot") == 1
    assert norm_of_the_call(few, algorithm="chunked") == 0


@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("kind", NORMS, ids=str)
def test_gradients_of_residual_and_norm(kind, check_vma):
    """Against those of the reference, in float64, in both modes; and of each operand alone."""
    mesh, shape = make_mesh((RANKS,)), (3, 16)
    with jax.enable_x64(True):
        operands = [a.astype(np.float64) for a in _after(shape, np.float64)]
        weights = [normal(10 + i, shape, np.float64) for i in range(2)]

        def loss(module):
            def f(x, residual, scale, bias):
                results = module.all_reduce(
                    x, axis_name="tp", residual=residual, norm=_norm(kind, scale, bias)
                )
                leaves = jax.tree.leaves(results)
                return sum(jnp.sum(w * y * y) for w, y in zip(weights, leaves, strict=False))

            return _over_ranks(mesh, f, check_vma=check_vma)

        tangents = [normal(20 + i, a.shape, np.float64) for i, a in enumerate(operands)]
        for which in ((0, 1, 2, 3), (0,), (1,), (2,)):
            got, want = (
                jax.jit(jax.grad(loss(m), argnums=which))(*operands)
                for m in (jflux, jflux.reference)
            )
            for g, w in zip(got, want, strict=True):
                np.testing.assert_allclose(g, w, rtol=1e-9, atol=1e-9)
        got, want = (
            jax.jit(functools.partial(jax.jvp, loss(m)))(tuple(operands), tuple(tangents))
            for m in (jflux, jflux.reference)
        )
        np.testing.assert_allclose(got, want, rtol=1e-9)


def test_transforms_of_residual_and_norm():
    mesh, shape = make_mesh((RANKS,)), (4, 3, 32)
    operands = _after(shape, np.float32)
    for name, in_axes, out_axes in (
        ("all", (0, 0, None, None), 0),
        ("the middle", (1, 1, None, None), 1),
        ("x alone", (0, None, None, None), 0),
        ("residual alone", (None, 0, None, None), 0),
        ("factors too", (0, 0, 0, 0), 0),
    ):

        def f(module, in_axes=in_axes, out_axes=out_axes):
            def one(x, residual, scale, bias):
                norm = _norm("layer", scale, bias)
                return module.all_reduce(x, axis_name="tp", residual=residual, norm=norm)

            def all_of_them(*args):
                args = [
                    a if d is not None else a[0] if a.ndim > 2 else a
                    for a, d in zip(args, in_axes, strict=True)
                ]
                if in_axes[2] == 0:
                    args[2:] = (jnp.stack([a * i for i in range(1, 5)]) for a in args[2:])
                return jax.vmap(one, in_axes, out_axes)(*args)

            return jax.jit(_over_ranks(mesh, all_of_them))

        for got, want in zip(
            *(run(f(m), *operands) for m in (jflux, jflux.reference)), strict=True
        ):
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4, err_msg=name)


def test_what_follows_is_in_the_kernel():
    mesh = make_mesh((RANKS,))
    x, residual, scale, bias = _after((4, 64), jnp.bfloat16, jnp.bfloat16)

    def f(norm):
        def body(x, residual, scale, bias):
            norm_ = _norm(norm, scale, bias)
            return jflux.all_reduce(x, axis_name="tp", residual=residual, norm=norm_)

        return compiled_text(_over_ranks(mesh, body), x, residual, scale, bias)

    for kind in NORMS[:3]:
        text = f(kind)
        assert fused_calls(text) == ["all_reduce"] and "rsqrt" not in text


def test_a_loop_of_norms():
    """On GPUs XLA captures it, and replays find new data and new epochs."""
    mesh, rows, width = make_mesh((RANKS,)), 2 * RANKS + 1, 1024
    operands = _after((rows, width), jnp.bfloat16)

    def program(module, **options):
        def f(x, residual, scale, bias):
            def step(i, carry):
                x, residual = carry
                # Each rank's own part, or the result would be the same without the others.
                part = x * (jax.lax.axis_index("tp") + i % 3).astype(x.dtype)
                total, x = module.all_reduce(
                    part, axis_name="tp", residual=residual, norm=jflux.RMSNorm(scale), **options
                )
                return x, total * 0.5

            return jax.lax.fori_loop(1, 50, step, (jax.lax.psum(x, "tp"), residual))

        return run(jax.jit(_over_ranks(mesh, f)), *operands)

    wants = program(jflux.reference)
    for algorithm in ALGORITHMS[:2]:
        for got, want in zip(program(jflux, algorithm=algorithm), wants, strict=True):
            got, want = got.astype(np.float32), want.astype(np.float32)
            assert np.abs(got - want).max() <= 0.05 * np.abs(want).max()


def test_flags_are_counted_with_a_residual_too():
    mesh, flags = make_mesh((RANKS,)), np.arange(RANKS)[:, None] % 2 == 0

    def f(x):
        return jflux.all_reduce(x[0], axis_name="tp", residual=jnp.ones(1, jnp.int32))

    with jflux.config(strict=False):
        y = run(jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P("tp"), out_specs=P())), flags)
    np.testing.assert_array_equal(y, [flags.sum() + 1])


def _same_bits(got, want):
    """Of two that are scaled, and NaNs are alike."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(*(np.asarray(one, np.float32) for one in (a, b)))


def _quantised(x, quantize, **options):
    """The normalised rows of each rank's x, quantised."""

    def f(x):
        norm = jflux.RMSNorm(jnp.ones(x.shape[-1]))
        return jflux.all_reduce(x[0], axis_name="tp", norm=norm, quantize=quantize, **options)[1]

    return jax.shard_map(f, mesh=make_mesh((RANKS,)), in_specs=P("tp"), out_specs=P())


FORMATS = [
    jflux.Format(dtype, (1, block), power)
    for dtype in (jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.int8)
    for block, power in ((-1, False), (128, True), (128, False))
]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float16], ids=str)
@pytest.mark.parametrize("algorithm", ALGORITHMS[:2])
def test_rows_are_quantised_in_the_kernel(algorithm, dtype):
    """All bits of what quantising the normalised rows gives, of those that are no numbers too. The
    last block of 128 is not full."""
    x = normal(0, (RANKS, 2 * RANKS + 1, 304), dtype)
    x[:, 0], x[:, 1, 3], x[:, 2, 200], x[:, 3, 150:] = 0, np.nan, np.inf, 0
    x[:, -1] *= 100 * (np.arange(304) % 128 == 5)
    normalised = run(jax.jit(_quantised(x, None, algorithm=algorithm)), x)

    def every(x):
        return [_quantised(x, one, algorithm=algorithm)(x) for one in FORMATS]

    assert fused_calls(text := compiled_text(every, x)) == ["all_reduce"] * len(FORMATS)
    assert "divide" not in text
    for got, one in zip(jax.jit(every)(x), FORMATS, strict=True):
        _same_bits(got, one.quantize(normalised))
        assert got.scale.shape == (len(normalised), 1 if one.block[1] == -1 else 3)


def test_quantised_after_the_kernel():
    """Blocks of several rows, other types, more than the kernel normalises."""
    e4m3 = functools.partial(jflux.Format, jnp.float8_e4m3fn)
    for quantize, shape, dtype, algorithm in (
        (e4m3((-1, -1)), (2, 5, 64), jnp.bfloat16, None),
        (e4m3((128, 128)), (130, 160), jnp.bfloat16, None),
        (e4m3((1, 128)), (5, 160), np.float32, "one_shot"),
        (e4m3((1, -1)), (5, 160), jnp.bfloat16, "chunked"),
        (e4m3((1, -1)), (5, 13), jnp.bfloat16, "one_shot"),
    ):
        x = normal(0, (RANKS, *shape), dtype)
        normalised, got = (
            run(jax.jit(_quantised(x, one, algorithm=algorithm)), x) for one in (None, quantize)
        )
        want = quantize.quantize(jnp.asarray(normalised))
        assert got.scale.shape == want.scale.shape
        spread = abs(want.dequantize()) / 8 + want.scale.max()  # XLA may normalise otherwise
        assert (abs(got.dequantize() - want.dequantize()) <= spread).all()


def test_transforms_of_quantised_rows():
    x = normal(0, (RANKS, 3, 4, 256), jnp.bfloat16)
    for quantize in (FORMATS[1], jflux.Format(jnp.int8, (-1, -1))):

        def one(x, quantize=quantize):
            return _quantised(x, quantize)(x)

        want = [jax.jit(one)(x[:, i]) for i in range(3)]
        want = jax.tree.map(lambda *all_of_them: np.stack(all_of_them), *want)
        _same_bits(jax.jit(jax.vmap(one, in_axes=1))(x), want)
        looped = jax.jit(lambda x, one=one: jax.lax.scan(lambda c, x: (c, one(x)), 0, x)[1])
        _same_bits(looped(np.moveaxis(x, 1, 0)), want)
        with pytest.raises(TypeError, match="no derivative.*stop_gradient"):
            jax.grad(lambda x, one=one: one(x).scale.sum())(x[:, 0])
        one(jax.lax.stop_gradient(x[:, 0]))


def test_what_cannot_follow():
    mesh = make_mesh((RANKS,))
    x, residual, scale, _ = _after((4, 8), np.float32)

    def raises(error, match, **options):
        with pytest.raises(error, match=match):
            jax.shard_map(
                lambda x: jflux.all_reduce(x[0], axis_name="tp", **options),
                mesh=mesh, in_specs=P("tp"), out_specs=P(),
            )(x)  # fmt: skip

    raises(ValueError, "residual has shape", residual=residual[:2])
    raises(ValueError, "has 8 elements, but.*shape \\(4,\\)", norm=jflux.RMSNorm(scale[:4]))
    raises(TypeError, "must be jflux.RMSNorm or jflux.LayerNorm, got str", norm="rms")
    norm = jflux.RMSNorm(scale)
    raises(TypeError, "quantize must be a jflux.Format, got str", norm=norm, quantize="float8")
    raises(ValueError, "there is no norm", quantize=FORMATS[0])
    with pytest.raises(ValueError, match="the same on all ranks"):
        jax.shard_map(
            lambda x: jflux.all_reduce(x[0], axis_name="tp", residual=x[0]),
            mesh=mesh, in_specs=P("tp"), out_specs=P(),
        )(x)  # fmt: skip
    if RANKS > 1:
        with pytest.raises(ValueError, match="a norm needs rows"):
            jax.shard_map(
                lambda x: jflux.all_reduce(x[0, 0, 0], axis_name="tp", norm=jflux.RMSNorm(scale)),
                mesh=mesh, in_specs=P("tp"), out_specs=P(),
            )(x)  # fmt: skip


# ---- Faults and limits ---------------------------------------------------------------------------


@pytest.mark.parametrize("max_delay_us", [300])
def test_with_late_ranks(max_delay_us):
    mesh = make_mesh((RANKS,))
    x = normal(0, (RANKS, 20, 1111), np.float32)

    def body(x):
        return jax.lax.scan(lambda c, x: (c, [_reduce(algorithm=a)(x) for a in ALGORITHMS]), 0, x)[
            1
        ]

    with testing.planted_faults(max_delay_us=max_delay_us):
        ys = run(jax.jit(per_device(mesh, body)), x)
    for y in ys:
        np.testing.assert_allclose(y, np.broadcast_to(x.sum(0), x.shape), rtol=1e-4, atol=1e-4)


def test_without_waits_it_is_wrong():
    """The values above do come from the peers."""
    mesh = make_mesh((RANKS,))
    x = normal(0, (RANKS, 4096), np.float32)
    f = jax.jit(per_device(mesh, _reduce()))
    run(f, x)
    testing.poison_workspaces()
    with testing.planted_faults(skip_waits=True, max_delay_us=3000):
        y = np.asarray(f(x))
    assert not np.allclose(y, np.broadcast_to(x.sum(0), x.shape))


def test_what_no_kernel_takes(caplog):
    mesh = make_mesh((RANKS,))
    integers = np.arange(RANKS * 3, dtype=np.int32).reshape(RANKS, 3)
    f = jax.jit(per_device(mesh, _reduce()))
    with pytest.raises(NotImplementedError, match="all_reduce.*int32"):
        f(integers)
    with jflux.config(strict=False):
        np.testing.assert_array_equal(run(f, integers)[0], integers.sum(0))
        flags = np.arange(RANKS) % 2 == 0
        np.testing.assert_array_equal(run(f, flags), np.full(RANKS, flags.sum()))
    empty = np.zeros((RANKS, 0), np.float32)
    assert run(f, empty).shape == empty.shape


def test_large_ones_are_lax():
    mesh = make_mesh((RANKS,))
    f = per_device(mesh, _reduce())
    most = (4 if RANKS == 2 else 2) << 20  # elements
    small, large = (np.zeros((RANKS, size), np.float32) for size in (most, most + 1))
    with jflux.config(always=False):
        assert fused_calls(compiled_text(f, small)) == ["all_reduce"]
        assert fused_calls(compiled_text(f, large)) == []


def test_one_rank_and_errors():
    x = np.ones((1, 3), np.float32)
    np.testing.assert_array_equal(run(jax.jit(per_device(make_mesh((1,)), _reduce())), x), x)
    with pytest.raises(ValueError, match="algorithm='ring' must be None or one of one_shot"):
        jflux.all_reduce(x, axis_name="tp", algorithm="ring")
    with pytest.raises(NameError, match="tp"):
        jflux.all_reduce(x, axis_name="tp")


def test_what_a_small_heap_does_not_hold_is_lax(own_heap):
    """If nobody has asked for the kernel."""
    own_heap(heap_bytes=8 << 20)
    x = np.zeros((RANKS, 1 << 20), np.float32)
    with jflux.config(always=False):
        assert fused_calls(compiled_text(per_device(make_mesh((RANKS,)), _reduce()), x)) == []


def test_a_heap_that_is_too_small(own_heap):
    own_heap(heap_bytes=1 << 20)
    mesh = make_mesh((RANKS,))
    x = np.zeros((RANKS, 1 << 20), np.float32)
    with pytest.raises(Exception, match="all_reduce.*init"):
        jax.block_until_ready(jax.jit(per_device(mesh, _reduce(algorithm="two_shot")))(x))
