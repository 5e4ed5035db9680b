"""jflux._ranks.global_arrays: calls of every product on global arrays."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import DEVICES, PRODUCTS, RANKS, make_mesh, of_way, run
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jflux
from jflux import _config
from jflux._ops._spec import all_ops
from jflux._ranks import global_arrays
from jflux._stress.calls import Call, as_tuple, assert_close, normal

OPS = PRODUCTS
EACH_WAY = pytest.mark.parametrize(
    "op, way", [(op, way) for op in PRODUCTS for way in range(len(all_ops()[op].ways))]
)


@pytest.mark.parametrize(
    "spec, ndim, dimension, names, want",
    [
        (P(), 2, 0, ("tp",), P("tp", None)),
        (P(), 3, 2, ("a", "b"), P(None, None, ("a", "b"))),
        (P("dp"), 3, 1, ("tp",), P("dp", "tp", None)),
        (P("dp"), 2, 0, ("tp",), P(("dp", "tp"), None)),
        (P("dp", "tp"), 3, 2, ("tp",), P("dp", None, "tp")),
        (P(("dp", "tp"), None), 2, 1, ("tp",), P("dp", "tp")),
        (P("tp"), 2, 0, ("tp",), P("tp", None)),
    ],
)
def test_with_axis(spec, ndim, dimension, names, want):
    got = global_arrays._with_axis(spec, ndim, dimension, names)
    normal_form = [as_tuple(e) if e is not None else None for e in got]
    assert normal_form == [as_tuple(e) if e is not None else None for e in want]


def test_mesh_for():
    given_mesh, context = make_mesh((2,)), make_mesh((RANKS,))
    assert global_arrays._mesh_for(given_mesh) is given_mesh
    with jax.set_mesh(context):
        assert global_arrays._mesh_for(given_mesh) is given_mesh
        assert global_arrays._mesh_for(None).axis_sizes == (RANKS,)
    x = jax.device_put(np.zeros((RANKS, 2)), jax.NamedSharding(context, P("tp")))
    assert global_arrays._mesh_for(None, x) == context
    with pytest.raises(ValueError, match="no mesh"):
        global_arrays._mesh_for(None, np.zeros((2, 2)))


# ---- Values and shardings ------------------------------------------------------------------------


def _check(f, x, w, y_spec):
    """y is the global product, sharded like this."""
    y = jax.jit(f)(x, w)
    x64, w64 = np.asarray(x, np.float64), np.asarray(w, np.float64)
    assert_close(y, x64 @ w64, abs(x64) @ abs(w64), jnp.bfloat16, x.shape[-1])
    want = jax.sharding.NamedSharding(y.sharding.mesh, y_spec)
    assert y.sharding.is_equivalent_to(want, y.ndim), y.sharding


def _sharded(dimension, ndim, batch=None):
    """A spec with "tp" at a dimension, or nowhere."""
    entries = [batch, *([None] * (ndim - 1))]
    if dimension is not None:
        entries[dimension] = "tp" if entries[dimension] is None else (entries[dimension], "tp")
    return P(*entries)


def _bound(op, way, **options):
    """The op, and how x, w and y of three, two and three dimensions are sharded."""
    call = of_way(op, way)
    layout = call.spec.layout(3, **call.options)
    sides = layout.rows["x"], layout.others["w"], layout.rows["y"]
    return functools.partial(getattr(jflux, op), axis_name="tp", **call.options, **options), sides


def _arrays(transpose_rhs=False):
    x = normal(0, (4, RANKS * 3, RANKS * 4), jnp.bfloat16)
    w = normal(1, (RANKS * 4, RANKS * 2), jnp.bfloat16)
    return x, np.ascontiguousarray(w.T) if transpose_rhs else w


@EACH_WAY
def test_a_given_mesh(op, way):
    x, w = _arrays()
    for order in (range(RANKS), range(RANKS - 1, -1, -1)):
        f, (_, _, y) = _bound(op, way, mesh=make_mesh((RANKS,), order=order))
        _check(f, x, w, _sharded(y, 3))


@EACH_WAY
def test_the_ambient_mesh(op, way):
    f, (_, _, y) = _bound(op, way)
    with jax.set_mesh(make_mesh((RANKS,))):
        _check(f, *_arrays(), _sharded(y, 3))


@pytest.mark.parametrize("axis_type", [AxisType.Explicit, AxisType.Auto])
@EACH_WAY
def test_arrays_that_know_their_mesh(op, way, axis_type):
    mesh = make_mesh((2, RANKS // 2), ("dp", "tp"), axis_type=axis_type)
    x_spec = None if axis_type == AxisType.Explicit else P("dp")
    f, (x_at, w_at, y_at) = _bound(op, way, x_spec=x_spec)
    x, w = _arrays()
    with jax.set_mesh(mesh):
        x = jax.device_put(x, jax.NamedSharding(mesh, _sharded(x_at, 3, "dp")))
        w = jax.device_put(w, jax.NamedSharding(mesh, _sharded(w_at, 2)))
        _check(f, x, w, _sharded(y_at, 3, "dp"))


@EACH_WAY
def test_arrays_that_lie_on_devices_and_no_mesh(op, way):
    """One traced function on devices in two orders: types know no devices, the lowering does."""
    f, (x_at, w_at, y_at) = _bound(op, way)
    f = jax.jit(f)
    for order in (range(RANKS), (*range(1, RANKS), 0)):
        mesh = make_mesh((RANKS,), order=order)
        x, w = (
            jax.device_put(a, jax.NamedSharding(mesh, _sharded(at, a.ndim)))
            for a, at in zip(_arrays(), (x_at, w_at), strict=True)
        )
        _check(f, x, w, _sharded(y_at, 3))


def test_a_call_inside_a_shard_map_over_other_axes():
    mesh = make_mesh((2, RANKS // 2), ("dp", "tp"), order=(*range(1, RANKS), 0))
    x, w = _arrays()
    inner = functools.partial(jflux.all_gather_matmul, axis_name="tp")
    f = jax.shard_map(
        inner, mesh=mesh, in_specs=(P("dp"), P()), out_specs=P("dp"), axis_names={"dp"}
    )
    _check(f, x, w, P("dp", None, "tp"))


@EACH_WAY
def test_gradient_with_a_transposed_weight_and_results_in_float32(op, way):
    mesh, (x, w) = make_mesh((2, RANKS // 2), ("dp", "tp")), _arrays(transpose_rhs=True)
    f, _ = _bound(
        op, way, mesh=mesh, x_spec=P("dp"), transpose_rhs=True, preferred_element_type=jnp.float32
    )
    y = run(jax.jit(f), x, w)
    x64, w64 = x.astype(np.float64), w.astype(np.float64)
    assert y.dtype == np.float32
    assert_close(y, x64 @ w64.T, abs(x64) @ abs(w64).T, np.float32, x.shape[-1])
    dy = normal(2, y.shape, np.float32)
    dx, dw = run(jax.jit(lambda x, w: jax.vjp(f, x, w)[1](dy)), x, w)
    assert_close(dx, dy @ w64, abs(dy) @ abs(w64), x.dtype, w.shape[0])
    rows = ((0, 1), (0, 1))
    scale = np.tensordot(abs(dy), abs(x64), rows)
    assert_close(dw, np.tensordot(dy, x64, rows), scale, x.dtype, 4 * RANKS * 3)


@pytest.mark.parametrize("op", [op for op in OPS if all_ops()[op].dimension is not None])
def test_the_first_of_several_dimensions(op):
    dimension = all_ops()[op].dimension
    x = normal(0, (RANKS * 2, 3, RANKS * 2), jnp.bfloat16)
    w = normal(1, (RANKS * 2, RANKS * 2), jnp.bfloat16)
    options = {dimension: 0}
    f = functools.partial(getattr(jflux, op), axis_name="tp", mesh=make_mesh((RANKS,)), **options)
    _check(f, x, w, _sharded(all_ops()[op].layout(3, **options).rows["y"], 3))


def _operands(op):
    x = normal(0, (2, RANKS * 3, RANKS * 4), jnp.bfloat16)
    return x, normal(1, (RANKS * 4, RANKS * 2), jnp.bfloat16)


@pytest.mark.parametrize(
    "axis_types", list(itertools.product([AxisType.Explicit, AxisType.Auto], repeat=2)), ids=str
)
@pytest.mark.parametrize("module", [jflux, jflux.reference])
@pytest.mark.parametrize("op", OPS)
def test_operands_that_are_sharded_otherwise(op, module, axis_types):
    """Nowhere, or over other axes too (weights of fully sharded data parallelism), on a mesh whose
    axes are explicit or not."""
    devices = np.array(DEVICES[: RANKS // 2 * 2]).reshape(2, -1)
    mesh = jax.sharding.Mesh(devices, ("dp", "tp"), axis_types=axis_types)
    call = of_way(op)
    f = call.bind("tp", module, mesh=mesh, x_spec=P("dp"), preferred_element_type=None)
    x, w = _operands(op)
    x64, w64 = x.astype(np.float64), w.astype(np.float64)
    with jax.set_mesh(mesh):
        sharded_w = jax.device_put(w, jax.NamedSharding(mesh, P("dp", "tp")))
        for weights in (w, jnp.asarray(w), sharded_w):
            y = run(jax.jit(f), x, weights)
            assert_close(y, x64 @ w64, abs(x64) @ abs(w64), jnp.bfloat16, x.shape[-1])
        want = _sharded(call.spec.layout(3, **call.options).rows["y"], 3, "dp")
        y = jax.jit(f)(x, w)
        assert y.sharding.is_equivalent_to(jax.NamedSharding(mesh, want), y.ndim)
        dw = jax.jit(jax.grad(lambda w: f(x, w).astype(jnp.float32).sum()))(sharded_w)
        ones = np.ones(x.shape[:2] + w.shape[1:])
        rows = ((0, 1), (0, 1))
        scale = np.tensordot(abs(x64), ones, rows)
        assert_close(dw, np.tensordot(x64, ones, rows), scale, jnp.bfloat16, 2 * RANKS * 3)


def test_sizes_that_the_mesh_does_not_divide():
    mesh = make_mesh((RANKS,))
    x, w = np.ones((RANKS + 1, RANKS), np.float32), np.ones((RANKS, RANKS), np.float32)
    gather = Call("all_gather_matmul").bind("tp", mesh=mesh)
    scatter = Call("matmul_reduce_scatter").bind("tp", mesh=mesh)
    what = rf"the {RANKS} devices of mesh axes \('tp',\) do not divide its dimension"
    with pytest.raises(ValueError, match=rf"jflux.all_gather_matmul: x has .*{what} 0"):
        gather(x, w)
    with pytest.raises(ValueError, match=rf"jflux.all_gather_matmul: w has .*{what} 1"):
        gather(x[:RANKS], np.ones((RANKS, RANKS + 1), np.float32))
    with pytest.raises(ValueError, match=rf"jflux.matmul_reduce_scatter: x has .*{what} 1"):
        scatter(np.ones((RANKS, RANKS + 1), np.float32), w)
    with pytest.raises(ValueError, match=rf"x has {RANKS + 1} rows in its scatter_dimension=0"):
        scatter(x, w)


@pytest.mark.parametrize("op", OPS)
def test_an_axis_that_the_mesh_lacks(op):
    with pytest.raises(ValueError, match=r"names \['tq'\], but the mesh has axes"):
        of_way(op).bind("tq", mesh=make_mesh((RANKS,)))(*_operands(op))


def test_specs_that_do_not_fit():
    x, w = _operands("all_gather_matmul")
    f = Call("all_gather_matmul").bind
    mesh = make_mesh((RANKS,))
    with pytest.raises(
        ValueError, match=r"x is sharded as .*'data'.*mesh's axes are \('tp',\): no"
    ):
        f("tp", mesh=mesh, x_spec=P("data"))(x, w)
    with pytest.raises(ValueError, match=r"w has shape \(4,\), too few dimensions"):
        f("tp", jflux.reference, mesh=mesh)(x, np.ones(4, x.dtype))


@pytest.mark.parametrize("module", [jflux, jflux.reference])
def test_what_follows_a_sum(module):
    """A residual that is sharded as y, and a norm's factors; values and gradients."""
    mesh = jax.sharding.Mesh(np.array(DEVICES[: RANKS // 2 * 2]).reshape(2, -1), ("dp", "tp"))
    x, w = (a.astype(np.float32) for a in _operands("matmul_all_reduce"))
    residual, scale = (
        normal(2, (*x.shape[:-1], w.shape[1]), np.float32),
        normal(3, (w.shape[1],), np.float32),
    )

    def f(x, w, residual, scale):
        return module.matmul_all_reduce(
            x, w, axis_name="tp", residual=residual, norm=jflux.RMSNorm(scale), mesh=mesh,
            x_spec=P("dp"), precision="highest",
        )  # fmt: skip

    def plain(x, w, residual, scale):
        y = jnp.matmul(x, w, precision="highest") + residual
        return y, y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-6) * scale

    def loss(f):
        return lambda *args: sum(jnp.sum(jnp.sin(y)) for y in f(*args))

    operands = (x, w, residual, scale)
    for got, want in zip(jax.jit(f)(*operands), plain(*operands), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
    gradients = (jax.jit(jax.grad(loss(g), argnums=range(4)))(*operands) for g in (f, plain))
    for got, want in zip(*gradients, strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("ranks", sorted({2, RANKS}))
def test_axes_along_which_work_is_repeated_are_named(ranks, caplog, monkeypatch):
    """A batch that the call does not know to be split: both devices compute it whole."""
    monkeypatch.setattr(_config, "_said", set())
    mesh = make_mesh((2, ranks // 2), ("dp", "tp"))
    x, w = jnp.zeros((2, ranks, 4), jnp.bfloat16), jnp.zeros((4, ranks), jnp.bfloat16)
    gathered = functools.partial(jflux.all_gather_matmul, axis_name="tp", mesh=mesh)
    with caplog.at_level("INFO", "jflux"):
        gathered(x, w, x_spec=P("dp"))
        gathered(x[:1], w)  # what 2 devices cannot share
        gathered(x, jnp.zeros((8, ranks), jnp.bfloat16)[:4], x_spec=P(None, ("dp", "tp")))
        jflux.all_gather_matmul(x, w, axis_name=("dp", "tp"), mesh=mesh)
        with jflux.config(fused=False):
            gathered(x, w)
        assert "repeat" not in caplog.text
        jax.jit(gathered)(x, w)
        gathered(x, w)
    assert caplog.text.count("whole along mesh axes ['dp'], whose devices then repeat") == 1
    assert "x_spec=P('dp')" in caplog.text
    for rows in (ranks, ranks // 2):  # of a matrix: 2 devices cannot share the latter
        monkeypatch.setattr(_config, "_said", set())
        caplog.clear()
        with caplog.at_level("INFO", "jflux"):
            gathered(x[0, :rows], w)
        assert ("repeat" in caplog.text) == (rows == ranks)
