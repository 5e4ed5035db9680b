"""jflux.matmul_all_reduce: values, gradients, transforms, errors, whichever way it goes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import PLATFORM, RANKS, SHAPES, compiled_text, fused_calls, gpu_choices, make_mesh, run
from jax.sharding import PartitionSpec as P

import jflux
from jflux import _heap, testing
from jflux._call import explain, plans, tuning_tables
from jflux._call.plans import Machine, Path
from jflux._ops.collectives import all_reduce
from jflux._ops.products import matmul_all_reduce
from jflux._stress.calls import groups_of, normal, per_device

HALVES = (jnp.bfloat16, np.float16)
WAYS = ("summed", "fused", "scattered")


@pytest.fixture(params=WAYS)
def way(request, monkeypatch):
    """Which way small calls go: the product and an all_reduce, one kernel, or a reduce-scatter and
    an all-gather."""
    most = 1 << 40 if request.param == "summed" else 0
    monkeypatch.setattr(matmul_all_reduce, "MOST_BYTES", most)
    jax.clear_caches()
    if request.param != "scattered":
        yield request.param
        return

    def scattered(call, machine):
        divides = call.arrays[0].shape[0] % call.params.world == 0
        return plans.decomposed("this test asks for it") if divides else None

    *_, form, last = matmul_all_reduce._op.forms
    op = dataclasses.replace(
        matmul_all_reduce._op, forms=(dataclasses.replace(form, takes=scattered), last)
    )
    monkeypatch.setattr(matmul_all_reduce, "_primitive", matmul_all_reduce._make(op))
    yield request.param


def _check(mesh, axis_name, x, w, *, transpose_rhs=False, **options):
    f = functools.partial(
        jflux.matmul_all_reduce, axis_name=axis_name, transpose_rhs=transpose_rhs, **options
    )
    y = run(jax.jit(per_device(mesh, f)), x, w)
    w64 = w.astype(np.float64)
    w64 = np.swapaxes(w64, -1, -2) if transpose_rhs else w64
    x64 = x.astype(np.float64)
    for group in groups_of(mesh, axis_name):
        want = sum(x64[at] @ w64[at] for at in group)
        size = sum(abs(x64[at]) @ abs(w64[at]) for at in group)
        for at in group:
            testing.assert_close(y[at], want, size, x.dtype, x.shape[-1] * len(group))
        assert len({y[at].tobytes() for at in group}) == 1  # the same bits on all ranks


@pytest.mark.parametrize("transpose_rhs", [False, True])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_values(way, dtype, transpose_rhs):
    mesh = make_mesh((RANKS,))
    for rows, k, n in (
        ((RANKS,), 8, 8),
        ((3, 2 * RANKS), 40, 24),
        ((5,), 16, 33),
        ((130,), 64, 200),
    ):
        x = normal(0, (RANKS, *rows, k), dtype)
        w = normal(1, (RANKS, *((n, k) if transpose_rhs else (k, n))), dtype)
        _check(mesh, "tp", x, w, transpose_rhs=transpose_rhs)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_mesh(way, shape):
    names = ("a", "b", "c")[: len(shape)]
    mesh = make_mesh(shape, names)
    for axis_name in (*names, names):
        x = normal(0, (*shape, 8, 16), jnp.bfloat16)
        _check(mesh, axis_name, x, normal(1, (*shape, 16, 24), jnp.bfloat16))


def _operands(dtype, rows=2 * RANKS, k=16, n=32, ranks=RANKS):
    """x and w of each rank; residual, scale and bias of all."""
    return (
        normal(0, (ranks, rows, k), dtype),
        normal(1, (ranks, k, n), dtype),
        normal(2, (rows, n), dtype),
        normal(3, (n,), np.float32),
        normal(4, (n,), np.float32),
    )


def _program(module, mesh, after, **options):
    def f(x, w, residual, scale, bias):
        residual = None if after == "alone" else residual
        norm = {"rms": jflux.RMSNorm(scale), "layer": jflux.LayerNorm(scale, bias)}.get(after)
        results = module.matmul_all_reduce(
            x[0], w[0], axis_name="tp", residual=residual, norm=norm, precision="highest"
        )
        return jax.tree.leaves(results)

    specs = (P("tp"), P("tp"), P(), P(), P())
    return jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=P(), **options)


@pytest.mark.parametrize("after", ["alone", "residual", "rms", "layer"])
def test_what_follows(way, after):
    mesh, operands = make_mesh((RANKS,)), _operands(jnp.bfloat16)
    got, want = (
        run(jax.jit(_program(m, mesh, after)), *operands) for m in (jflux, jflux.reference)
    )
    assert len(got) == len(want)
    for g, w in zip(got, want, strict=True):
        g, w = g.astype(np.float32), w.astype(np.float32)
        assert np.abs(g - w).max() <= 0.02 * np.abs(w).max() * RANKS


@pytest.mark.parametrize("block", [(1, -1), (1, 128), (-1, -1)], ids=str)
def test_rows_are_quantised(way, block):
    """All bits of what quantising the normalised rows gives, of a batch of matrices, on each rank
    and of global arrays, whose batch is split besides."""
    x, w = normal(0, (4, 8, 32), jnp.bfloat16), normal(1, (32, 160), jnp.bfloat16)
    mesh = make_mesh((2, RANKS // 2), ("dp", "tp"))
    quantize = jflux.Format(jnp.float8_e4m3fn, block)

    def f(quantize, x, w, **options):
        return jflux.matmul_all_reduce(
            x, w, axis_name="tp", norm=jflux.RMSNorm(jnp.ones(160)), quantize=quantize, **options
        )[1]

    specs = {"in_specs": (P("dp", None, "tp"), P("tp")), "out_specs": P("dp")}
    for on_ranks in (False, True):
        normalised, got = (
            jax.jit(
                jax.shard_map(functools.partial(f, one), mesh=mesh, **specs)
                if on_ranks
                else functools.partial(f, one, mesh=mesh, x_spec=P("dp"))
            )(x, w)
            for one in (None, quantize)
        )
        want = quantize.quantize(np.asarray(normalised))
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_array_equal(*(np.asarray(one, np.float32) for one in (a, b)))


@pytest.mark.parametrize("transpose_rhs", [False, True])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_results_in_float32(way, dtype, transpose_rhs):
    """Of 16-bit operands: what travels is not rounded to them."""
    mesh = make_mesh((RANKS,))
    f = functools.partial(
        jflux.matmul_all_reduce, axis_name="tp", transpose_rhs=transpose_rhs,
        preferred_element_type=np.float32,
    )  # fmt: skip
    x = normal(0, (RANKS, 2 * RANKS, 72), dtype)
    w = normal(1, (RANKS, *((24, 72) if transpose_rhs else (72, 24))), dtype)
    y = run(jax.jit(per_device(mesh, f)), x, w)
    assert y.dtype == np.float32
    x64, w64 = (a.astype(np.float64) for a in (x, w))
    w64 = np.swapaxes(w64, -1, -2) if transpose_rhs else w64
    want = np.einsum("rmk,rkn->mn", x64, w64)
    np.testing.assert_allclose(y, np.broadcast_to(want, y.shape), rtol=1e-5, atol=1e-4)


def test_residual_of_another_type(way):
    """It is added to the rounded sum, in y's type; its gradient has its own."""
    mesh, (x, w, residual, *_) = make_mesh((RANKS,)), _operands(jnp.bfloat16)
    residual = residual.astype(np.float32)

    def f(x, w, *residual):
        added = residual[0] if residual else None
        return jflux.matmul_all_reduce(x[0], w[0], axis_name="tp", residual=added)

    specs = (P("tp"), P("tp"), P())
    mapped = jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=P())
    y, pull = jax.vjp(jax.jit(mapped), x, w, residual)
    alone = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=specs[:2], out_specs=P()))(x, w)
    want = (np.asarray(alone, np.float32) + residual).astype(jnp.bfloat16)
    np.testing.assert_array_equal(y, want)
    dx, dw, dresidual = pull(y)
    assert (dx.dtype, dw.dtype, dresidual.dtype) == (x.dtype, w.dtype, np.float32)
    np.testing.assert_array_equal(dresidual, np.asarray(y, np.float32))


def _plan(rows, columns, k=64, dtype=jnp.bfloat16, out=None, heap=2 << 30, world=4):
    """Of a call on GPUs."""
    x, w = jax.ShapeDtypeStruct((rows, k), dtype), jax.ShapeDtypeStruct((k, columns), dtype)
    params = matmul_all_reduce.Params(
        all_reduce.Params(("tp",), world, None), False, np.dtype(out or dtype), None
    )
    with jflux.config(always=False):
        machine = Machine("cuda", sm_count=132, link_gbps=320, heap_bytes=heap)
        return matmul_all_reduce._op.plan([x, w], params, machine)


def test_what_no_products_kernel_takes_is_summed_by_all_reduces():
    """On GPUs: float32 operands of a large y, which need no reference."""
    plan = _plan(512, 4096, dtype=np.float32)
    assert plan.path == Path.DECOMPOSED and not plan.config.get("scattered")


@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("after", ["alone", "residual", "rms", "layer"])
def test_gradients(way, after, check_vma):
    """Against those of the reference, of all operands and of each alone, in both modes."""
    mesh, operands = make_mesh((RANKS,)), _operands(np.float32)

    def loss(module):
        f = _program(module, mesh, after, check_vma=check_vma)
        return lambda *args: sum(jnp.sum(jnp.sin(y * (i + 1))) for i, y in enumerate(f(*args)))

    for which in ((0, 1, 2, 3, 4), (0,), (1,)):
        with jflux.config(strict=False):
            got, want = (
                jax.jit(jax.grad(loss(m), argnums=which))(*operands)
                for m in (jflux, jflux.reference)
            )
        for g, w in zip(got, want, strict=True):
            np.testing.assert_allclose(g, w, rtol=2e-3, atol=2e-3 * max(1, np.abs(w).max()))
    tangents = [normal(20 + i, a.shape, a.dtype) for i, a in enumerate(operands)]
    with jflux.config(strict=False):
        got, want = (
            jax.jit(functools.partial(jax.jvp, loss(m)))(tuple(operands), tuple(tangents))
            for m in (jflux, jflux.reference)
        )
    np.testing.assert_allclose(got, want, rtol=2e-3, atol=2e-3)


def test_the_backward_pass_needs_no_communication(way):
    """To types y is the same on all ranks, and so is its gradient."""
    mesh, operands = make_mesh((RANKS,)), _operands(jnp.bfloat16)[:2]

    def pull(x, w, dy):
        def f(x, w):
            return jflux.matmul_all_reduce(x[0], w[0], axis_name="tp")

        mapped = jax.shard_map(f, mesh=mesh, in_specs=(P("tp"), P("tp")), out_specs=P())
        return jax.vjp(mapped, x, w)[1](dy)

    dy = normal(5, (operands[0].shape[1], operands[1].shape[2]), jnp.bfloat16)
    text = compiled_text(pull, *operands, dy)
    assert fused_calls(text) == [] and "all-" not in text and "reduce-scatter" not in text


def test_which_way_by_size():
    def one(rows, columns, world, *dtypes):
        return matmul_all_reduce.is_one_call((rows, columns), dtypes or (jnp.bfloat16,) * 3, world)

    assert not one(8, 1024, 4) and one(4096, 1024, 4) and not one(4096, 1024, 3)
    assert one(64, 8192, 2) and one(34, 8192, 2) and one(128, 12288, 2)  # few rows
    assert not one(16, 28672, 2) and not one(64, 4096, 2) and not one(49, 12288, 2)
    assert not one(128, 12288, 4) and not one(64, 12288, 2, *(np.float32,) * 3)
    assert not one(64, 12288, 2, jnp.bfloat16, jnp.bfloat16, np.float32)


def test_which_calls_the_kernel_of_gpus_takes():
    def fits(*sizes, **options):
        plan = _plan(*sizes, **options)
        assert plan.path == Path.FUSED or plan.config.get("scattered", 0) in (0, 1)
        return plan.path == Path.FUSED

    assert fits(2048, 8192) and fits(512, 8192) and fits(768, 8192, world=3)
    assert not fits(2048 + 4, 8192) and not fits(256, 8192)  # whole tiles for each rank
    assert fits(128, 12288, world=2) and not fits(128, 12288) and not fits(128, 2048, world=2)
    assert not fits(2048, 8193) and not fits(2048, 8192, k=63)  # whole vectors
    assert not fits(2048, 8192, out=np.float32)
    # Data take at most half of the heap; what does not fit is scattered and gathered.
    # Here 32 MiB of data for two calls, and signals.
    assert fits(2048, 2048, heap=64 << 20) and not fits(2048, 2048, heap=60 << 20)
    assert _plan(2048, 2048, heap=60 << 20).config == {"scattered": 1}
    assert fits(8192, 12288) and fits(8192, 12288, world=2)
    assert not fits(8192, 16384) and not fits(16384, 12288, world=2)


@pytest.mark.parametrize("dtype, transpose_rhs", [(jnp.bfloat16, False), (np.float16, True)])
@pytest.mark.parametrize("rows", [32, 64, 100, 128])
def test_few_rows(rows, dtype, transpose_rhs):
    """One call of two ranks: more tiles than a GPU has SMs, and fewer; with k for both CTAs of a
    cluster, and not; rows that fill no tile."""
    mesh = make_mesh((2,))
    f = functools.partial(jflux.matmul_all_reduce, axis_name="tp", transpose_rhs=transpose_rhs)
    for k, n in ((56, 10248), (136, 26008), (328, 10248)):
        x = normal(0, (2, rows, k), dtype)
        w = normal(1, (2, *((n, k) if transpose_rhs else (k, n))), dtype)
        assert fused_calls(compiled_text(per_device(mesh, f), x, w)) == ["matmul_all_reduce"]
        for splits in gpu_choices(1, 2):
            with tuning_tables.force(tuning_tables.Choice(128, 1, 1, splits)):
                _check(mesh, "tp", x, w, transpose_rhs=transpose_rhs)
    x, w, residual, *_ = operands = _operands(dtype, rows, 72, 10248, ranks=2)
    (y,) = run(jax.jit(_program(jflux, mesh, "residual")), *operands)
    x, w, residual = (a.astype(np.float64) for a in (x, w, residual))
    want = np.einsum("rmk,rkn->mn", x, w) + residual
    size = np.einsum("rmk,rkn->mn", abs(x), abs(w)) + abs(residual)
    testing.assert_close(y, want, size, dtype, 2 * 72)


def test_few_rows_round_parts_and_then_their_sum_once():
    """Each part as it travels, and the sum with the residual in it. float32 holds all of these."""
    random, shapes = np.random.default_rng(0), ((2, 64, 72), (2, 72, 10248), (64, 10248))
    operands = [random.integers(-50, 51, shape).astype(jnp.bfloat16) for shape in shapes]
    norm = np.ones(10248, np.float32)  # not used
    (y,) = run(jax.jit(_program(jflux, make_mesh((2,)), "residual")), *operands, norm, norm)
    x, w, residual = (a.astype(np.float32) for a in operands)
    parts = np.einsum("rmk,rkn->rmn", x, w).astype(jnp.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(y, (parts[0] + parts[1] + residual).astype(jnp.bfloat16))


def test_few_rows_without_waits_are_wrong():
    mesh = make_mesh((2,))
    x, w = normal(0, (2, 64, 8), jnp.bfloat16), normal(1, (2, 8, 8192), jnp.bfloat16)
    f = jax.jit(per_device(mesh, functools.partial(jflux.matmul_all_reduce, axis_name="tp")))
    want = run(f, x, w)
    with testing.planted_faults(skip_waits=True, max_delay_us=50_000):
        right = []
        for _ in range(5):
            testing.poison_workspaces()
            right.append(np.array_equal(want, jax.block_until_ready(f(x, w))))
    assert not all(right)
    np.testing.assert_array_equal(want, run(f, x, w))


@pytest.mark.skipif(PLATFORM != "cpu", reason="other calls of this process use the heap")
def test_few_rows_take_room_for_the_peers_tiles_alone(own_heap):
    own_heap()
    x, w, *_ = _operands(jnp.bfloat16, 128, 8, 10248, ranks=2)
    _check(make_mesh((2,)), "tp", x, w)
    f = per_device(make_mesh((2,)), functools.partial(jflux.matmul_all_reduce, axis_name="tp"))
    (call,) = explain.explain(f, x, w)
    assert 0 < _heap.usage("cpu") <= call.plan.workspace_bytes
    assert _plan(128, 10248, k=8, world=2).workspace_bytes < 4 * 2 * 128 * 10496  # of two calls


def test_few_rows_of_other_types_are_decomposed():
    mesh = make_mesh((2,))
    x, w = normal(0, (2, 64, 8), np.float32), normal(1, (2, 8, 10240), np.float32)
    f = functools.partial(jflux.matmul_all_reduce, axis_name="tp")
    assert fused_calls(compiled_text(per_device(mesh, f), x, w)) == ["all_reduce"]
    _check(mesh, "tp", x, w, precision="highest")


@pytest.mark.parametrize(
    "most_bytes, op", [(4 << 20, "all_reduce"), (2 << 20, "matmul_all_reduce")]
)
def test_a_batch_of_few_rows(monkeypatch, most_bytes, op):
    """One sum, or, if that is large, one call of all rows."""
    monkeypatch.setattr(matmul_all_reduce, "MOST_BYTES", most_bytes)
    mesh = make_mesh((2,))
    x, w = normal(0, (2, 4, 64, 8), jnp.bfloat16), normal(1, (2, 8, 8192), jnp.bfloat16)
    one = functools.partial(jflux.matmul_all_reduce, axis_name="tp")
    f = jax.vmap(one, in_axes=(0, None))
    assert fused_calls(compiled_text(per_device(mesh, f), x, w)) == [op]
    y = run(jax.jit(per_device(mesh, f)), x, w)
    x, w = x.astype(np.float64), w.astype(np.float64)
    for rank in y:
        testing.assert_close(
            rank, np.einsum("rbmk,rkn->bmn", x, w), np.einsum("rbmk,rkn->bmn", abs(x), abs(w)),
            jnp.bfloat16, 16,
        )  # fmt: skip


def test_transforms(way):
    mesh = make_mesh((RANKS,))
    x, w = normal(0, (RANKS, 3, RANKS, 16), jnp.bfloat16), normal(1, (RANKS, 16, 8), jnp.bfloat16)
    want = np.einsum("ribk,rkn->ibn", x.astype(np.float64), w.astype(np.float64))

    def one(x, w):
        return jflux.matmul_all_reduce(x, w, axis_name="tp")

    for name, body in {
        "vmap": jax.vmap(one, in_axes=(0, None)),
        "scan": lambda x, w: jax.lax.scan(lambda c, x: (c, one(x, w)), 0, x)[1],
        "checkpoint": jax.checkpoint(one),
    }.items():
        y = run(jax.jit(per_device(mesh, body, check_vma=False)), x, w)
        for rank in y:
            error = np.abs(rank.astype(np.float64) - want).max()
            assert error <= 0.02 * np.abs(want).max(), name


@pytest.mark.parametrize("batched", [(0,), (1,), (2,), (0, 2), (0, 1, 2)], ids=str)
def test_vmap_with_a_residual(way, batched):
    """Of each operand alone, and of several."""
    mesh, (x, w, residual, _, _) = make_mesh((RANKS,)), _operands(np.float32)
    more = [np.stack([a, -a, a + 1], 1) if i in batched else a for i, a in enumerate((x, w))]
    residual = np.stack([residual, -residual, 2 * residual]) if 2 in batched else residual
    dims = tuple(0 if i in batched else None for i in range(3))

    def program(module):
        def f(x, w, residual):
            def one(x, w, residual):
                return module.matmul_all_reduce(
                    x, w, axis_name="tp", residual=residual, precision="highest"
                )

            return jax.vmap(one, in_axes=dims)(x[0], w[0], residual)

        return jax.shard_map(f, mesh=mesh, in_specs=(P("tp"), P("tp"), P()), out_specs=P())

    with jflux.config(strict=False):
        got, want = (run(jax.jit(program(m)), *more, residual) for m in (jflux, jflux.reference))
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-4)


def test_one_rank_and_errors():
    x, w = np.ones((1, 2, 8), np.float32), np.ones((1, 8, 8), np.float32)
    f = functools.partial(jflux.matmul_all_reduce, axis_name="tp")
    np.testing.assert_array_equal(run(jax.jit(per_device(make_mesh((1,)), f)), x, w), 8 * w[:, :2])
    with pytest.raises(ValueError, match="do not contract"):
        jax.jit(per_device(make_mesh((1,)), f))(x, w[:, :4])
    with pytest.raises(ValueError, match="the residual has shape"):
        jax.jit(per_device(make_mesh((1,)), lambda x, w: f(x, w, residual=x[:1])))(x, w)
    with pytest.raises(ValueError, match="outside shard_map and there is no mesh"):
        f(x[0], w[0])
