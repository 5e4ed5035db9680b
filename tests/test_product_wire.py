"""Products whose sums travel in 8 bits (`wire=`): values, errors, derivatives, plans."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import make_mesh, run
from jax.sharding import PartitionSpec as P
from test_wire import _in_rows, _sum

import jflux
from jflux._call.plans import Machine, Path
from jflux._ops.products import matmul_reduce_scatter
from jflux._stress.calls import normal

SCATTER, SUM = "matmul_reduce_scatter", "matmul_all_reduce"
EACH_MODULE = pytest.mark.parametrize("module", [jflux, jflux.reference], ids=["jflux", "lax"])
each_op = pytest.mark.parametrize("op", [SCATTER, SUM])


@pytest.fixture(autouse=True)
def at_any_size():
    with jflux.config(unchecked_kernels=True, always=True):
        yield


def _product(op, module=jflux, check_vma=True, extra=(), **options):
    """A call on global arrays: x [m, k] and w [k, n] -> y of each rank, one after the other.

    Args:
      extra: (name, how it is split) of operands that follow.
    """
    options = {"axis_name": "tp", "wire": "int8"} | options
    f = functools.partial(getattr(module, op), **options)
    out = P("tp") if op == SCATTER or not check_vma else P()

    def call(x, w, *added, ranks):
        def local(x, w, *added):
            return f(x, w, **dict(zip([name for name, _ in extra], added, strict=True)))

        specs = (P(None, "tp"), P("tp"), *(spec for _, spec in extra))
        return jax.shard_map(
            local, mesh=make_mesh((ranks,)), in_specs=specs, out_specs=out, check_vma=check_vma
        )(x, w, *added)

    return call


def _partials(x, w, ranks):
    """Each rank's product, in float32."""
    xs, ws = np.split(x, ranks, 1), np.split(w, ranks, 0)
    pairs = zip(xs, ws, strict=True)
    return np.stack([a.astype(np.float32) @ b.astype(np.float32) for a, b in pairs])


def _scattered(partials, wire):
    """The specification of a sum that is scattered, in float32: [m, n]."""
    ranks = len(partials)
    parts = partials.reshape(ranks, ranks, -1)  # rank, owner, ...
    sent = _in_rows(parts, wire)
    each = [[parts[r, o] if r == o else sent[r, o] for r in range(ranks)] for o in range(ranks)]
    return np.concatenate([functools.reduce(np.add, one) for one in each]).reshape(
        partials.shape[1:]
    )


# ---- Values --------------------------------------------------------------------------------------


@EACH_MODULE
@pytest.mark.parametrize(
    ("ranks", "wire", "dtype"),
    [(3, "int8", jnp.bfloat16), (2, "float8_e4m3fn", np.float32), (3, "int8", np.float16)],
)
def test_values(module, ranks, wire, dtype):
    """Sums in float32 are quantised, with a ragged last block, and y is rounded once: to the bit,
    of whole numbers, whose products are exact in any order."""
    rng = np.random.default_rng(0)
    x = rng.integers(-4, 5, (6 * ranks, 4 * ranks)).astype(dtype)
    w = rng.integers(-4, 5, (4 * ranks, 25)).astype(dtype)
    residual = rng.integers(-9, 9, (6 * ranks, 25)).astype(dtype)
    partials = _partials(x, w, ranks)

    def f(x, w, residual):
        added = ("residual", P("tp"))
        scattered = _product(SCATTER, module, wire=wire, extra=[added])(x, w, residual, ranks=ranks)
        whole = ("residual", P())
        # Each rank's, which are the same.
        summed = jax.shard_map(
            lambda x, w: getattr(module, SUM)(x, w, axis_name="tp", wire=wire),
            mesh=make_mesh((ranks,)), in_specs=(P(None, "tp"), P("tp")), out_specs=P("tp"),
            check_vma=False,
        )(x, w)  # fmt: skip
        added = _product(SUM, module, wire=wire, extra=[whole])(x, w, residual, ranks=ranks)
        return scattered, summed, added

    scattered, summed, added = run(jax.jit(f), x, w, residual)
    assert scattered.dtype == summed.dtype == added.dtype == dtype
    want = (_scattered(partials, wire) + residual.astype(np.float32)).astype(dtype)
    np.testing.assert_array_equal(scattered, want)
    total = _sum(partials, wire)
    assert {one.tobytes() for one in np.split(summed, ranks)} == {total.astype(dtype).tobytes()}
    np.testing.assert_array_equal(added, (total + residual.astype(np.float32)).astype(dtype))


@each_op
@pytest.mark.parametrize(("wire", "once"), [("int8", 8e-3), ("float8_e4m3fn", 2.8e-2)])
def test_errors_of_normal_data(op, wire, once):
    """Root mean square, of what is rounded once: one of two ranks' parts, and the sum where it
    travels too."""
    x, w = normal(0, (64, 128), np.float32), normal(1, (128, 256), np.float32)
    y = run(jax.jit(functools.partial(_product(op, wire=wire), ranks=2)), x, w)
    exact = x.astype(np.float64) @ w.astype(np.float64)
    error = np.sqrt(np.mean((y - exact) ** 2) / np.mean(exact**2))
    most = once * np.sqrt(1 / 2 + (op == SUM))
    assert 0.7 * most < error < most


@each_op
def test_blocks_that_are_not_finite(op):
    """A rank's NaN takes the block that it is in with it, and of a rank's own rows, which do not
    travel in a scatter, itself alone."""
    x, w = np.ones((4, 2), np.float32), np.ones((2, 320), np.float32)
    x[0, 0] = x[3, 0] = np.inf  # of rank 0, which owns rows 0 and 1
    w[0, 7:] = 0
    y = run(jax.jit(functools.partial(_product(op), ranks=2)), x, w)
    at = np.arange(4 * 320)
    if op == SUM:
        np.testing.assert_array_equal(np.isnan(y.ravel()), (at < 384) | (at >= 896))
        return
    np.testing.assert_array_equal(np.isposinf(y.ravel()), at < 7)
    own = (at >= 7) & (at < 320)  # infinity times zero
    np.testing.assert_array_equal(np.isnan(y.ravel()), own | (at >= 640 + 256))


def test_what_goes_with_it():
    """Several terms, a bias, operands in 8 bits, and a norm: as without a wire, but for the error
    of the wire."""
    x, w = normal(0, (8, 256), jnp.bfloat16), normal(1, (256, 192), jnp.bfloat16)
    bias, scale = normal(2, (192,), np.float32), normal(3, (192,), jnp.bfloat16)

    def f(x, w, bias, scale, wire):
        def local(x, w, bias, scale):
            of = {"axis_name": "tp", "wire": wire}
            scaled = [
                jflux.quantize(x, jnp.int8, block=(1, -1)),
                jflux.quantize(w, jnp.int8, block=(-1, 1)),
            ]
            several = jflux.matmul_reduce_scatter((x, x), (w, w), bias=bias, **of)
            of_scaled = jflux.matmul_reduce_scatter(*scaled, **of)
            recipe = jflux.matmul_reduce_scatter(x, w, recipe=jflux.Recipe.row, **of)
            _, normalised = jflux.matmul_all_reduce(x, w, norm=jflux.RMSNorm(scale), **of)
            summed = jflux.matmul_all_reduce(*scaled, **of)
            return several, of_scaled, recipe, normalised[None], summed[None]

        specs = (P(None, "tp"), P("tp"), P(), P())
        return jax.shard_map(
            local, mesh=make_mesh((2,)), in_specs=specs, out_specs=P("tp"), check_vma=False
        )(x, w, bias, scale)

    with jflux.config(strict=False):
        got, want = (
            run(jax.jit(functools.partial(f, wire=wire)), x, w, bias, scale)
            for wire in ("int8", None)
        )
    for one, other in zip(got, want, strict=True):
        assert one.dtype == other.dtype == jnp.bfloat16
        one, other = (a.astype(np.float64) for a in (one, other))
        assert 0 < np.sqrt(np.mean((one - other) ** 2) / np.mean(other**2)) < 1.2e-2
    np.testing.assert_array_equal(got[3][0], got[3][1])  # the same bits on both ranks


@each_op
def test_batches_and_loops(op):
    """No block has elements of two calls, and a scan has the same bits."""
    xs, w = normal(0, (3, 4, 8), np.float32), normal(1, (8, 25), np.float32)
    one = functools.partial(getattr(jflux, op), axis_name="tp", wire="int8")

    def local(xs, w):
        mapped = jax.vmap(lambda x: one(x, w))(xs)
        weights = jax.vmap(lambda w: one(xs[0], w), in_axes=1)(jnp.stack([w, 2 * w], 1))
        looped = jax.lax.scan(lambda _, x: (None, one(x, w)), None, xs)[1]
        each = jnp.stack([one(x, w) for x in xs])
        return mapped, looped, each, weights, jnp.stack([each[0], one(xs[0], 2 * w)])

    out = P(None, "tp") if op == SCATTER else P()
    f = jax.shard_map(
        local, mesh=make_mesh((2,)), in_specs=(P(None, None, "tp"), P("tp")), out_specs=out
    )
    mapped, looped, each, *weights = run(jax.jit(f), xs, w)
    np.testing.assert_array_equal(mapped, each)
    np.testing.assert_array_equal(looped, each)
    np.testing.assert_array_equal(*weights)


# ---- Derivatives ---------------------------------------------------------------------------------


@each_op
@pytest.mark.parametrize(
    ("module", "grad_wire", "check_vma"),
    [(jflux, None, True), (jflux, "int8", False), (jflux, "int8", True),
     (jflux.reference, "int8", False)],
)  # fmt: skip
def test_derivatives(op, module, grad_wire, check_vma):
    """Those of the exact product, or such as `grad_wire` sends: a dy that is gathered, and sums of
    cotangents and tangents."""
    ranks, shape = 2, (6, 25)
    x, w = normal(0, (6, 8), np.float32), normal(1, (8, 25), np.float32)
    dx, ct = normal(2, x.shape, np.float32), normal(3, shape, np.float32)
    f = functools.partial(_product(op, module, check_vma, grad_wire=grad_wire), ranks=ranks)
    same = op == SUM and not check_vma
    ct = np.concatenate([ct, ct]) if same else ct

    def both(x, w, dx, ct):
        tangent = jax.jvp(lambda x: f(x, w), (x,), (dx,))[1]
        y, pull = jax.vjp(f, x, w)
        return tangent, *pull(ct), y

    tangent, of_x, of_w, _ = run(jax.jit(both), x, w, dx, ct)
    dy = ct  # that ranks multiply
    partials = _partials(dx, w, ranks)
    want = partials.sum(0)
    if grad_wire and op == SCATTER:
        dy = _in_rows(ct.reshape(ranks, -1), grad_wire).reshape(shape)
        want = _scattered(partials, grad_wire)
    elif grad_wire:
        want = _sum(partials, grad_wire)
    if same:  # each rank's cotangent counts
        halves = np.stack(np.split(ct, 2))
        dy = halves.sum(0) if grad_wire is None else _sum(halves, grad_wire)
        want = np.concatenate([want, want])
    np.testing.assert_allclose(tangent, want, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(of_x, dy @ w.T, rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(of_w, x.T @ dy, rtol=1e-5, atol=1e-4)


# ---- Plans, reports ------------------------------------------------------------------------------


def _explained(op, x, w, **options):
    return str(jflux.explain(functools.partial(_product(op, **options), ranks=2), x, w))


def test_plans():
    """Small calls are exact, and their gradients one call."""
    x, w = np.zeros((8, 8), np.float32), np.zeros((8, 16), np.float32)
    large = jax.ShapeDtypeStruct((2048, 8), np.float32), jax.ShapeDtypeStruct((8, 512), np.float32)
    with jflux.config(always=False):
        small = _explained(SCATTER, x, w)
        assert "exact: 512 bytes reach a rank, for which a quantised wire does not pay" in small
        assert small.count("matmul_reduce_scatter") == 2 and "reduce_scatter  " in small
        assert "exact: 512 bytes, for which" in _explained(SUM, x, w)
        found = _explained(SCATTER, *large)
        assert "reason  a product in float32, and a reduce-scatter in int8" in found
        assert "exact" not in found
        found = _explained(SUM, *large)
        assert "reason  a product in float32, and an all_reduce in int8" in found
        assert "chunked in int8, chosen for 4194304 bytes" in found

        def loss(x, w):
            return jnp.sum(_product(SCATTER, grad_wire="int8")(x, w, ranks=2) ** 2)

        assert "all_gather_matmul  " in str(jflux.explain(jax.grad(loss), x, w))
        of_large = str(jflux.explain(jax.grad(loss), *large))
        assert "all_gather_matmul  " not in of_large and "chunked in int8" in of_large


def _gpu_plan(wire="int8", n=384, rows=512, k=256, dtype=jnp.bfloat16, out=jnp.bfloat16, arch=90):
    """The plan of a call of 2 ranks on Hopper, or on GPUs of another architecture."""
    x, w = jax.ShapeDtypeStruct((rows, k), dtype), jax.ShapeDtypeStruct((n, k), dtype)
    params = matmul_reduce_scatter.Params(("tp",), 2, 0, True, np.dtype(out), wire=wire)
    machine = Machine("cuda", sm_count=132, link_gbps=320, heap_bytes=1 << 30, arch=arch)
    return matmul_reduce_scatter._op.plan((x, w), params, machine)


def test_kernel():
    """On Hopper parts are quantised in the kernel, in tiles of whole blocks; other calls are made
    of two."""
    plan = _gpu_plan()
    assert plan.reason == "parts travel in int8; jflux.config(always=True)"
    assert (plan.config["tile_n"], plan.config["cluster_m"]) == (256, 2)
    # An element takes a byte, and a 32nd for its scale. (Workspaces are powers of two.)
    large = _gpu_plan(n=768)
    assert _gpu_plan(wire=None, n=768).workspace_bytes > 1.9 * large.workspace_bytes
    assert _gpu_plan(n=768, out=np.float32).workspace_bytes == large.workspace_bytes
    assert _gpu_plan(dtype=jnp.float8_e4m3fn).path == Path.FUSED
    for no_kernel, why in (
        ({"n": 320}, "n must be a multiple of 128"), ({"rows": 500}, "have at least 256 rows"),
        ({"dtype": np.float32}, "float32"), ({"dtype": jnp.int8}, "int8"),
    ):  # fmt: skip
        plan = _gpu_plan(**no_kernel)
        assert plan.path == Path.DECOMPOSED, no_kernel
        assert plan.reason.startswith("a product in float32, and a reduce-scatter in int8: ")
        assert why in plan.reason
    with jflux.config(always=False, unchecked_kernels=False):
        assert _gpu_plan(rows=8192).reason == "parts travel in int8"
        assert _gpu_plan().reason.startswith("exact: ")


def test_portable_kernel():
    """In portable code of any rows, and of int8; of float8 where there are instructions."""
    with jflux.config(unchecked_kernels=True):
        for taken in (
            {"rows": 30}, {"arch": 89, "dtype": jnp.float8_e4m3fn}, {"dtype": jnp.int8},
            {"dtype": np.float16, "out": np.float32},
        ):  # fmt: skip
            plan = _gpu_plan(**({"arch": 80} | taken))
            assert plan.path == Path.FUSED and plan.reason.startswith("parts travel in int8"), taken
        for no_kernel, why in (
            ({"n": 320}, "n must be a multiple of 128"), ({"dtype": np.float32}, "float32"),
            ({"dtype": jnp.float8_e4m3fn}, "float8_e4m3fn"),
        ):  # fmt: skip
            plan = _gpu_plan(arch=80, **no_kernel)
            assert plan.path == Path.DECOMPOSED and why in plan.reason, no_kernel


def test_large_calls():
    """As :func:`test_errors_of_normal_data`, of a call that a kernel takes on GPUs: rows of two
    ranks in a tile, a tile of which half is beyond the last column, a bias and a residual."""
    ranks, shape = 2, (600, 384)
    x, w = normal(0, (600, 256), jnp.bfloat16), normal(1, (256, 384), jnp.bfloat16)
    bias, residual = normal(2, (384,), np.float32), normal(3, shape, np.float32)
    extra = [("bias", P()), ("residual", P("tp"))]
    f = _product(SCATTER, wire="int8", extra=extra, preferred_element_type=jnp.float32)
    y = run(jax.jit(functools.partial(f, ranks=ranks)), x, w, bias, residual)
    partials = _partials(x, w, ranks)
    exact = partials.astype(np.float64).sum(0) + bias + residual
    error = np.sqrt(np.mean((y - exact) ** 2) / np.mean(partials.astype(np.float64).sum(0) ** 2))
    once = 8e-3 * np.sqrt(1 / 2)
    assert 0.7 * once < error < once


@pytest.mark.parametrize("check_vma", [False, True])
def test_sums_in_halves(monkeypatch, check_vma):
    """Where the kernel scatters, sums are scattered and gathered: the same bits, of whole numbers,
    as of a product and an all_reduce."""
    rng = np.random.default_rng(0)
    x, w = (rng.integers(-4, 5, shape).astype(np.float32) for shape in ((12, 8), (8, 256)))
    residual = rng.integers(-9, 9, (12, 256)).astype(np.float32)
    added = [("residual", P())]
    f = functools.partial(_product(SUM, check_vma=check_vma, extra=added), ranks=2)
    want = run(jax.jit(f), x, w, residual)
    monkeypatch.setattr(matmul_reduce_scatter, "plan_with_wire", lambda *_: _gpu_plan())
    assert "scattered in the product, and gathered, in int8" in str(
        jflux.explain(f, x, w, residual)
    )
    np.testing.assert_array_equal(run(jax.jit(f), x, w, residual), want)


def test_wrong_arguments():
    x, w = np.zeros((8, 8), np.int32), np.zeros((8, 16), np.int32)
    for module in (jflux, jflux.reference):
        for op in (SCATTER, SUM):
            with pytest.raises(ValueError, match="wire='e4m3' must be None or one of float8_e4m3"):
                jax.eval_shape(functools.partial(_product(op, module, wire="e4m3"), ranks=2), x, w)
            with pytest.raises(TypeError, match="and y is of int32"):
                jax.eval_shape(functools.partial(_product(op, module), ranks=2), x, w)


def test_report():
    x, w = normal(0, (8, 64), jnp.bfloat16), normal(1, (64, 128), jnp.bfloat16)

    def f(x, w):
        a = _product(SCATTER, wire="float8_e4m3fn")(x, w, ranks=2)
        return a, _product(SUM)(x, w, ranks=2)

    scattered, summed = jflux.wire_report(f, x, w)
    assert (scattered.op, scattered.wire, scattered.times) == (SCATTER, "float8_e4m3fn", 1)
    assert scattered.operand == "bfloat16[8, 32], bfloat16[32, 128]"
    assert 5e-3 < scattered.error < 2.8e-2 and "test_product_wire.py" in scattered.line
    assert summed.op == SUM and 1e-3 < summed.error < 1e-2 and summed.not_finite == 0


# ---- Between nodes -------------------------------------------------------------------------------


@each_op
def test_between_nodes(op, own_heap):
    """Two nodes of two ranks: each sums its own as it is, and what they send each other is
    quantised. All ranks have the same bits of an all_reduce."""
    own_heap(node=list("aabbccdd"))
    x = normal(0, (2048, 16), jnp.float32)
    w = normal(1, (16, 640 if op == SUM else 64), jnp.float32)

    def f(x, w):
        return _product(op, check_vma=False)(x, w, ranks=4)

    found = jflux.explain(f, x, w)
    assert [str(c.plan.path) for c in found if c.op == op][0] == "two-level"
    y = run(jax.jit(f), x, w)
    y = np.split(y, 4) if op == SUM else [y]
    assert len({one.tobytes() for one in y}) == 1
    partials = _partials(x, w, 4)
    nodes = [partials[:2].sum(0), partials[2:].sum(0)]
    exact = nodes[0] + nodes[1]
    error = np.sqrt(np.mean((y[0] - exact) ** 2) / np.mean(exact**2))
    once = 8e-3 * np.sqrt(1 / 2 + (op == SUM))
    assert 0.7 * once < error < once


def test_sums_between_nodes(own_heap):
    """all_reduce, of few elements, whose nodes send each other all."""
    own_heap(node=list("aabbccdd"))
    x = normal(0, (4, 300), jnp.float32)
    f = jax.shard_map(
        lambda x: jflux.all_reduce(x[0], axis_name="tp", wire="int8")[None],
        mesh=make_mesh((4,)), in_specs=P("tp"), out_specs=P("tp"), check_vma=False,
    )  # fmt: skip
    y = run(jax.jit(f), x)
    nodes = np.stack([x[:2].sum(0), x[2:].sum(0)])
    np.testing.assert_allclose(y, np.tile(_sum(nodes, "int8"), (4, 1)), rtol=1e-6, atol=1e-6)
    with jflux.config(always=False):
        assert "exact: 1200 bytes reach a rank" in str(jflux.explain(f, x))
        np.testing.assert_allclose(run(jax.jit(f), x)[3], x.sum(0), rtol=1e-6, atol=1e-6)
