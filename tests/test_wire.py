"""Sums whose data travel in 8 bits (`wire=` of jflux.all_reduce): bits, errors, derivatives."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import make_mesh, run
from jax import lax
from jax.sharding import PartitionSpec as P

import jflux
from jflux._call.forms import Call
from jflux._call.plans import Machine
from jflux._ops.collectives import all_reduce
from jflux._stress.calls import normal, per_device
from jflux._stress.collectives import half_step

SHAPES = ((1,), (127,), (128,), (129,), (1000,), (3, 7, 50))
EACH_MODULE = pytest.mark.parametrize("module", [jflux, jflux.reference], ids=["jflux", "lax"])


@pytest.fixture(autouse=True)
def kernels():
    """Those that have not run on GPUs too."""
    with jflux.config(unchecked_kernels=True):
        yield


def _reduce(module, wire="int8", **options):
    """Asked for at any size."""
    options = {"axis_name": "tp", "wire": wire, "algorithm": "chunked"} | options
    return functools.partial(module.all_reduce, **options)


# ---- In numpy ------------------------------------------------------------------------------------


def _requantized(blocks, wire):
    """Blocks [..., 128] of float32 as they are after a transfer."""
    most = np.float32(127 if wire == "int8" else 448)
    largest = np.abs(blocks).max(-1, keepdims=True)
    scale = np.where(largest == 0, np.float32(1), np.maximum(largest / most, np.float32(2**-126)))
    ratio = np.clip(blocks / scale, -most, most)
    values = np.nan_to_num(np.round(ratio)) if wire == "int8" else ratio
    return values.astype(np.dtype(wire)).astype(np.float32) * scale


def _sum(x, wire, residual=None):
    """The specification, of all ranks' x."""
    world, size = len(x), x[0].size
    shard = 128 * math.ceil(math.ceil(size / world) / 128)
    blocks = np.zeros((world, world * shard), np.float32)
    blocks[:, :size] = x.reshape(world, size)
    blocks = blocks.reshape(world, world, -1, 128)  # rank, owner, block
    owned = []
    for owner in range(world):
        parts = [
            blocks[rank, owner] if rank == owner else _requantized(blocks[rank, owner], wire)
            for rank in range(world)
        ]
        owned.append(_requantized(functools.reduce(np.add, parts), wire))
    y = np.concatenate(owned).ravel()[:size].reshape(x.shape[1:])
    return (y if residual is None else y + residual.astype(np.float32)).astype(x.dtype)


def _bound(x, wire):
    """How far the sum may be from that in float64."""
    flat = x.astype(np.float64).reshape(len(x), -1)
    first = half_step(flat, wire).sum(0)
    bound = first + half_step(np.abs(flat.sum(0)) + first, wire)
    return bound.reshape(x.shape[1:])


# ---- Values --------------------------------------------------------------------------------------


@EACH_MODULE
@pytest.mark.parametrize("wire, ranks", [("int8", 2), ("float8_e4m3fn", 3), ("int8", 4)])
def test_bits(module, wire, ranks):
    """A pytree of every size, on all ranks, against the specification and float64."""
    dtypes = (np.float32, jnp.bfloat16, np.float16)
    xs = [normal(i, (ranks, *s), dtypes[i % 3]) for i, s in enumerate(SHAPES)]
    f = per_device(make_mesh((ranks,)), _reduce(module, wire))
    for x, y in zip(xs, run(jax.jit(f), xs), strict=True):
        want = _sum(x, wire)
        assert y.dtype == x.dtype
        assert {one.tobytes() for one in y} == {want.tobytes()}
        exact = x.astype(np.float64).sum(0)
        rounding = float(jnp.finfo(x.dtype).eps) * (abs(exact) + 1)
        assert (abs(want.astype(np.float64) - exact) <= _bound(x, wire) + rounding).all()


@EACH_MODULE
def test_blocks_that_are_not_finite(module):
    """A NaN or an infinity on one rank takes its block with it, on all ranks, and no other; zeros
    are exact."""
    mesh, x = make_mesh((2,)), normal(0, (2, 1000), np.float32)
    x[:, 128:256] = 0
    want = _sum(x, "int8")
    x[0, 300], x[1, 600], x[1, 999] = np.nan, np.inf, -np.inf
    for block in (2, 4, 7):
        want[128 * block : 128 * (block + 1)] = np.nan
    y = run(jax.jit(per_device(mesh, _reduce(module))), x)
    np.testing.assert_array_equal(y, np.stack([want, want]))
    assert not y[:, 128:256].any()


@EACH_MODULE
def test_residual_norm_and_quantize(module):
    """A residual of x's type is added before the sum is rounded. The norm is that of the sum."""
    mesh, shape = make_mesh((4,)), (5, 96)
    x, residual = normal(0, (4, *shape), jnp.bfloat16), normal(1, shape, jnp.bfloat16)
    scale = normal(2, shape[1:], np.float32)
    form = jflux.Format(jnp.int8, (1, -1))

    def f(x, residual, scale):
        norm, wide = jflux.RMSNorm(scale, epsilon=1e-3), residual.astype(jnp.float32)
        call = _reduce(module)
        return (
            call(x[0], residual=residual, norm=norm),
            call(x[0], residual=wide),
            call(x[0], residual=residual, norm=norm, quantize=form),
        )

    f = jax.shard_map(f, mesh=mesh, in_specs=(P("tp"), P(), P()), out_specs=P())
    (y, normalised), of_wide, (_, quantized) = run(jax.jit(f), x, residual, scale)
    assert y.tobytes() == _sum(x, "int8", residual).tobytes()
    exact = y.astype(np.float64)
    exact = exact / np.sqrt((exact * exact).mean(-1, keepdims=True) + 1e-3) * scale
    np.testing.assert_allclose(normalised.astype(np.float64), exact, rtol=2**-7, atol=1e-6)
    rounded = _sum(x, "int8").astype(np.float32) + residual.astype(np.float32)
    np.testing.assert_array_equal(of_wide, rounded.astype(x.dtype))
    np.testing.assert_array_equal(quantized.values, form.quantize(jnp.asarray(normalised)).values)


@EACH_MODULE
def test_groups_of_ranks(module):
    """Each is summed by itself, in the order of its ranks."""
    groups, x = [[2, 0], [1, 3]], normal(0, (4, 300), np.float32)
    y = run(jax.jit(per_device(make_mesh((4,)), _reduce(module, axis_index_groups=groups))), x)
    for group in groups:
        want = _sum(x[np.array(group)], "int8")
        assert {y[rank].tobytes() for rank in group} == {want.tobytes()}


@EACH_MODULE
@pytest.mark.parametrize("width", [50, 128])
def test_batches(module, width):
    """No block has elements of two calls of a batch."""
    x = normal(0, (2, 3, width), np.float32)
    x[0, 1, 3] = np.nan
    one = _reduce(module)
    residual = normal(1, (3, width), np.float32)

    def f(x):
        added = jax.vmap(lambda x, r: one(x, residual=r), in_axes=(1, 0))(x.T, residual)
        return jax.vmap(one)(x), jax.vmap(one, in_axes=1, out_axes=1)(x.T).T, added

    results = run(jax.jit(per_device(make_mesh((2,)), f)), x)
    for y, more in zip(results, (0 * residual, 0 * residual, residual), strict=True):
        assert np.isnan(y[:, 1]).all()
        for i in (0, 2):
            exact = x[:, i].astype(np.float64).sum(0) + more[i]
            assert (abs(y[:, i] - exact) <= 1.01 * _bound(x[:, i], "int8")).all()


def test_an_axis_of_vmap():
    x = normal(0, (3, 300), np.float32)
    y = np.asarray(jax.jit(jax.vmap(_reduce(jflux.reference), axis_name="tp"))(x))
    assert {one.tobytes() for one in y} == {_sum(x, "int8").tobytes()}


@EACH_MODULE
def test_an_explicit_axis_beside(module):
    """x is split over it, as its type says."""
    explicit = jax.sharding.AxisType.Explicit
    mesh, x = make_mesh((2, 2), ("tp", "d"), axis_type=explicit), normal(0, (2, 6, 64), np.float32)
    f = jax.shard_map(
        _reduce(module), mesh=mesh, in_specs=P("tp"), out_specs=P(), axis_names={"tp"}
    )
    with jax.set_mesh(mesh):
        y = jax.jit(f)(jax.device_put(x, jax.NamedSharding(mesh, P("tp", None, "d"))))
    assert jax.typeof(y).sharding.spec[-1] == "d"
    assert np.asarray(y)[0].tobytes() == _sum(x, "int8").tobytes()


# ---- Derivatives ---------------------------------------------------------------------------------


@EACH_MODULE
@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("grad_wire", [None, "int8"])
def test_derivatives(module, grad_wire, check_vma):
    """Those of a sum, exact or in `grad_wire`. A cotangent is summed where types do not say that it
    is the same on all ranks."""
    ranks, size = 2, 300
    x, dx, dy = (normal(i, (ranks, size), np.float32) for i in range(3))
    dy = np.broadcast_to(dy[0], dy.shape) if check_vma else dy
    mesh = make_mesh((ranks,))
    call = _reduce(module, grad_wire=grad_wire)

    def total(x):
        return x.sum(0) if grad_wire is None else _sum(x, grad_wire)

    def f(x, dx, dy):
        y, tangent = jax.jvp(call, (x,), (dx,))
        _, pull = jax.vjp(call, x)
        second = jax.jvp(lambda dy: pull(dy)[0], (dy,), (dy,))[1]
        return y, tangent, pull(dy)[0], second

    specs = (P("tp"), P("tp"), P() if check_vma else P("tp"))
    out = P() if check_vma else P("tp")

    def local(x, dx, dy):
        y, tangent, *pulled = f(x[0], dx[0], dy if check_vma else dy[0])
        same = [y, tangent] if check_vma else [y[None], tangent[None]]
        return *same, *(a[None] for a in pulled)

    outs = (out, out, P("tp"), P("tp"))
    g = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=outs, check_vma=check_vma)
    y, tangent, pulled, second = run(jax.jit(g), x, dx, dy[0] if check_vma else dy)
    np.testing.assert_array_equal(y, np.broadcast_to(_sum(x, "int8"), y.shape))
    np.testing.assert_array_equal(tangent, np.broadcast_to(total(dx), y.shape))
    want = dy if check_vma else np.broadcast_to(total(dy), dy.shape)
    np.testing.assert_array_equal(pulled, want)
    np.testing.assert_array_equal(second, want)


def test_derivatives_of_residual_and_norm():
    """As those of the reference, from the same sum."""
    x, residual = normal(0, (2, 3, 32), np.float32), normal(1, (3, 32), np.float32)
    scale = normal(2, (32,), np.float32)

    def loss(module):
        def f(x, residual, scale):
            norm = jflux.RMSNorm(scale)
            y, normalised = _reduce(module)(x[0], residual=residual, norm=norm)
            return jnp.sum(y**2 + normalised**3)

        specs = (P("tp"), P(), P())
        return jax.shard_map(f, mesh=make_mesh((2,)), in_specs=specs, out_specs=P())

    got, want = (
        jax.jit(jax.grad(loss(m), argnums=(0, 1, 2)))(x, residual, scale)
        for m in (jflux, jflux.reference)
    )
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-5)


# ---- What is refused, and how it is planned ------------------------------------------------------


@EACH_MODULE
def test_wrong_arguments(module):
    def call(dtype=np.float32, **options):
        f = functools.partial(module.all_reduce, axis_name="tp", **options)
        x = jax.ShapeDtypeStruct((2, 8), dtype)
        jax.eval_shape(per_device(make_mesh((2,)), f), x)

    for name in ("wire", "grad_wire"):
        for wrong in ("e4m3", "float8_e5m2", np.dtype("int8"), 8):
            with pytest.raises(ValueError, match=f"{name}=.* must be None or one of float8_e4m3fn"):
                call(**{name: wrong})
        for dtype in (np.int32, np.complex64, bool):
            with pytest.raises(TypeError, match=f"x has an array of {np.dtype(dtype)}"):
                call(dtype, **{name: "int8"})
    if module is jflux:
        with pytest.raises(ValueError, match="'one_shot' sends data as they are"):
            call(wire="int8", algorithm="one_shot")


def _plan(size, takes=all_reduce._takes, **options):
    params = all_reduce.Params(("tp",), 2, **({"algorithm": None, "wire": "int8"} | options))
    x = jax.ShapeDtypeStruct((size,), np.float32)
    return takes(Call((x,), params), Machine("cpu"))


def test_plans():
    with jflux.config(always=False):
        small = _plan(1000)
        assert "exact: 4000 bytes, for which a quantised wire does not pay" in small.reason
        assert small.config["algorithm"] != all_reduce.ALGORITHMS.index("chunked")
        assert _plan(1 << 20).reason == "chunked in int8, chosen for 4194304 bytes"
        assert _plan(1000, algorithm="chunked").reason == "chunked in int8, as asked for"
    with jflux.config(always=True):
        assert _plan(1000).reason.startswith("chunked in int8")
    inside = _plan(1 << 20, takes=all_reduce._takes_in_nodes)
    assert inside.reason == "chunked, chosen for 4194304 bytes"


def test_small_sums_are_exact():
    """Unless they are asked for; numbers always are."""
    x = np.random.default_rng(0).integers(0, 99, (2, 5, 64)).astype(np.float32)
    f = per_device(make_mesh((2,)), _reduce(jflux, algorithm=None))
    with jflux.config(always=False):
        y = np.asarray(jax.jit(f)(x))
    np.testing.assert_array_equal(y, np.broadcast_to(x.sum(0), x.shape))


def test_report():
    """Calls in a loop, of both kinds, one that travels as it is, and one with a NaN."""
    x = normal(0, (2, 4, 300), np.float32)
    x[:, :, 0] = 1e4  # most of its block is flushed in int8
    x[1, 0, 5] = np.nan

    def f(x):
        def step(y, _):
            return jflux.all_reduce(x[0, 1:], axis_name="tp", wire="int8"), None

        y, _ = jax.lax.scan(step, x[0, 1:], None, 3)
        gathered = jflux.all_gather(x[0], axis_name="tp", wire="float8_e4m3fn")
        with_nan = jflux.reduce_scatter(
            gathered * jnp.where(jnp.arange(2) == 1, 1, 0)[:, None, None], axis_name="tp",
            wire="int8",
        )  # fmt: skip
        return y, jnp.sum(with_nan)[None]

    specs = {"in_specs": P("tp"), "out_specs": (P("tp"), P("tp"))}
    mapped = jax.shard_map(f, mesh=make_mesh((2,)), **specs, check_vma=False)
    with jflux.config(always=True):
        report = jflux.wire_report(jax.jit(mapped), x)
        looped, gather, scatter = report
    assert (looped.op, looped.operand, looped.wire, looped.times) == (
        "all_reduce", "float32[3, 300]", "int8", 3,
    )  # fmt: skip
    assert "test_wire.py" in looped.line and 0 < looped.error < 1e-2 and looped.flushed > 0.3
    assert gather.op == "all_gather" and gather.error < 0.04 and gather.not_finite == 2 * 127
    assert scatter.op == "reduce_scatter" and scatter.times == 1
    assert str(report).splitlines()[0].startswith("all_reduce  float32[3, 300] in int8, 3 times")
    with jflux.config(always=False):
        small = jflux.wire_report(mapped, x)
    assert [(one.op, one.error) for one in small][:2] == [("all_reduce", 0), ("all_gather", 0)]
    assert str(jflux.wire_report(jnp.sum, x)) == "no call with a wire"
    with pytest.raises(RuntimeError, match="no effect inside a function that JAX traces"):
        jax.jit(lambda x: jflux.wire_report(mapped, x))(x)


# ---- all_gather and reduce_scatter ---------------------------------------------------------------


def _exchanged(op, module, dtype=np.float32, check_vma=True, **options):
    """(a call on global arrays [N, ...], one rank's x as the test has it, along dimension 1)."""
    dimension = {"all_gather": "axis", "reduce_scatter": "scatter_dimension"}[op]
    options = {dimension: 1, "tiled": True, "wire": "int8"} | options
    f = functools.partial(getattr(module, op), axis_name="tp", **options)

    def call(x):
        return jax.shard_map(
            lambda x: f(x[0])[None], mesh=make_mesh((len(x),)), in_specs=P("tp"),
            out_specs=P("tp"), check_vma=check_vma,
        )(x)  # fmt: skip

    return call


def _in_rows(a, wire):
    """Rows [..., n] as they are after a transfer."""
    n = a.shape[-1]
    blocks = np.zeros((*a.shape[:-1], -(-n // 128) * 128), np.float32)
    blocks[..., :n] = a
    shape = blocks.shape
    return _requantized(blocks.reshape(*shape[:-1], -1, 128), wire).reshape(shape)[..., :n]


@EACH_MODULE
@pytest.mark.parametrize(
    ("ranks", "wire", "dtype"),
    [(3, "int8", jnp.bfloat16), (2, "float8_e4m3fn", np.float32), (3, "int8", np.float16)],
)
def test_gathers_and_scatters_are_their_specification(module, ranks, wire, dtype):
    """To the bit; a rank's own part of a sum is exact, and its own part of a gather is not."""
    x = np.array(normal(0, (ranks, 5, 2 * ranks, 9), np.float32).astype(dtype))
    x[0, 0, 0, 0] = np.nan
    wide = x.astype(np.float32)
    with jflux.config(always=True):
        gathered = run(jax.jit(_exchanged("all_gather", module, wire=wire)), x)
        scattered = run(jax.jit(_exchanged("reduce_scatter", module, wire=wire)), x)
    sent = _in_rows(wide.reshape(ranks, -1), wire).astype(dtype).reshape(x.shape)
    assert gathered.dtype == scattered.dtype == dtype
    gathered, scattered = (a.astype(np.float32) for a in (gathered, scattered))
    for one in gathered:
        np.testing.assert_array_equal(one, np.concatenate(list(sent), 1).astype(np.float32))
    parts = np.moveaxis(wide.reshape(ranks, 5, ranks, 2, 9), 2, 1)  # rank, owner, ...
    sent = _in_rows(parts.reshape(ranks, ranks, -1), wire).reshape(parts.shape)
    for owner in range(ranks):
        each = [parts[r, owner] if r == owner else sent[r, owner] for r in range(ranks)]
        total = functools.reduce(np.add, each)
        want = total.astype(dtype).astype(np.float32)
        np.testing.assert_array_equal(scattered[owner], want)


@pytest.mark.parametrize(
    ("module", "grad_wire", "check_vma"),
    [(jflux, "int8", True), (jflux, None, False), (jflux.reference, "int8", False)],
    ids=["int8", "exact", "lax"],
)
@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter"])
def test_derivatives_of_gathers_and_scatters(op, grad_wire, check_vma, module):
    """Each other's, exact or in `grad_wire`, forward and backward."""
    x, dx = (normal(i, (2, 6, 4), np.float32) for i in range(2))
    call = _exchanged(op, module, check_vma=check_vma, grad_wire=grad_wire, wire="float8_e4m3fn")
    exact, other = (
        _exchanged(name, jflux.reference, check_vma=check_vma, wire=grad_wire)
        for name in (op, {"all_gather": "reduce_scatter", "reduce_scatter": "all_gather"}[op])
    )

    def f(x, dx):
        y, tangent = jax.jvp(call, (x,), (dx,))
        return tangent, jax.vjp(call, x)[1](jnp.cos(y))[0], y

    with jflux.config(always=True):
        tangent, pulled, y = run(jax.jit(f), x, dx)
        np.testing.assert_allclose(tangent, jax.jit(exact)(dx), rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(pulled, jax.jit(other)(np.cos(y)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter"])
def test_gathers_and_scatters_inside_explicit_axes(op):
    """As they are without such an axis, and forward and backward in a wire."""
    types = (jax.sharding.AxisType.Explicit,) * 2
    mesh = jax.make_mesh((2, 2), ("tp", "dp"), axis_types=types, devices=jax.devices()[:4])
    x = normal(0, (2, 6, 300), np.float32)
    options = {"axis_name": "tp", "wire": "int8", "grad_wire": "int8"}

    def call(x):
        f = functools.partial(getattr(jflux, op), **options, tiled=True)
        return jax.shard_map(
            lambda x: f(x[0])[None], in_specs=P("tp"), out_specs=P("tp"), axis_names={"tp"}
        )(x)  # fmt: skip

    def both(x):
        y, pull = jax.vjp(call, x)
        return y, pull(jnp.cos(y))[0]

    plain = make_mesh((2,))
    with jflux.config(always=True):
        with jax.set_mesh(plain):
            want = jax.jit(both)(x)
        with jax.set_mesh(mesh):
            got = jax.jit(both)(jax.device_put(x, jax.NamedSharding(mesh, P("tp", None, "dp"))))
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def test_groups_untiled_invarying_and_small():
    x = normal(0, (4, 4, 130), np.float32)
    groups = [[0, 2], [1, 3]]
    options = {"axis_index_groups": groups, "tiled": False, "check_vma": False}
    with jflux.config(always=True):
        y = run(jax.jit(_exchanged("all_gather", jflux, axis=0, **options)), x)
    sent = _in_rows(x.reshape(4, -1), "int8").reshape(x.shape)
    np.testing.assert_array_equal(y[3], sent[[1, 3]])
    mesh = make_mesh((2,))
    gather = functools.partial(jflux.all_gather, axis_name="tp", to="invarying", wire="int8")
    specs = {"in_specs": P("tp"), "out_specs": P()}
    f = jax.shard_map(lambda x: gather(x[0]), mesh=mesh, **specs)
    with jflux.config(always=True):
        np.testing.assert_array_equal(run(jax.jit(f), x[:2]), sent[:2])
        np.testing.assert_array_equal(jax.jit(jax.grad(lambda x: jnp.sum(f(x))))(x[:2]), 1)
    with jflux.config(always=False):
        found = str(jflux.explain(f, x[:2]))
        assert "exact: 4160 bytes reach a rank, for which a quantised wire does not pay" in found
        np.testing.assert_array_equal(run(jax.jit(f), x[:2]), x[:2])
    with pytest.raises(ValueError, match='to="reduced" takes no wire'):
        jax.eval_shape(_exchanged("all_gather", jflux, to="reduced"), x)
    with pytest.raises(ValueError, match="wire='fp8' must be None or one of"):
        jax.eval_shape(_exchanged("reduce_scatter", jflux, wire="fp8"), x)
    with pytest.raises(TypeError, match="x has an array of int32"):
        jax.eval_shape(_exchanged("reduce_scatter", jflux), x.astype(np.int32))


@pytest.mark.parametrize("size", [128, 130])
@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter"])
def test_batches_of_gathers_and_scatters(op, size):
    """No block has elements of two calls: the bits of one call after the other. Calls of whole
    blocks are one kernel."""
    lead = (2,) if op == "reduce_scatter" else ()
    x = normal(0, (2, *lead, 3, size), np.float32)  # of a rank, with a batch in its middle
    at = len(lead)
    one = functools.partial(getattr(jflux, op), axis_name="tp", wire="int8")

    def local(x):
        each = [one(lax.index_in_dim(x[0], i, at, keepdims=False)) for i in range(3)]
        return jax.vmap(one, in_axes=at)(x[0])[None], jnp.stack(each)[None]

    specs = {"in_specs": P("tp"), "out_specs": P("tp"), "check_vma": False}
    f = jax.shard_map(local, mesh=make_mesh((2,)), **specs)
    with jflux.config(always=True):
        mapped, each = run(jax.jit(f), x)
        np.testing.assert_array_equal(mapped, each)
        found = [c for c in jflux.explain(f, x) if c.op == op]
    times = sum(c.times for c in found)
    assert times == 4 if size == 128 else times >= 6
