"""jflux._global: calls on global arrays. The ops' own test files check their values."""

import inspect
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import DEVICES, RANKS, Call, as_tuple, assert_close, make_mesh, normal, run
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jflux
from jflux import _global

OPS = ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_to_all", "matmul_all_reduce"]


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
    got = _global._with_axis(spec, ndim, dimension, names)
    normal_form = [as_tuple(e) if e is not None else None for e in got]
    assert normal_form == [as_tuple(e) if e is not None else None for e in want]


def test_mesh_for():
    given_mesh, context = make_mesh((2,)), make_mesh((RANKS,))
    assert _global._mesh_for(given_mesh) is given_mesh
    with jax.set_mesh(context):
        assert _global._mesh_for(given_mesh) is given_mesh
        assert _global._mesh_for(None).axis_sizes == (RANKS,)
    x = jax.device_put(np.zeros((RANKS, 2)), jax.NamedSharding(context, P("tp")))
    assert _global._mesh_for(None, x) == context
    with pytest.raises(ValueError, match="no mesh"):
        _global._mesh_for(None, np.zeros((2, 2)))


@pytest.mark.parametrize("op", OPS)
def test_reference_has_the_signature_of_its_op(op):
    mine, theirs = inspect.signature(getattr(jflux, op)), getattr(jflux.reference, op)
    assert mine == inspect.signature(theirs)


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
    f = Call(op).bind("tp", module, mesh=mesh, x_spec=P("dp"), preferred_element_type=None)
    x, w = _operands(op)
    x64, w64 = x.astype(np.float64), w.astype(np.float64)
    with jax.set_mesh(mesh):
        sharded_w = jax.device_put(w, jax.NamedSharding(mesh, P("dp", "tp")))
        for weights in (w, jnp.asarray(w), sharded_w):
            y = run(jax.jit(f), x, weights)
            assert_close(y, x64 @ w64, abs(x64) @ abs(w64), jnp.bfloat16, x.shape[-1])
        want = {"matmul_reduce_scatter": P("dp", "tp"), "matmul_all_reduce": P("dp")}.get(
            op, P("dp", None, "tp")
        )
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
        Call(op).bind("tq", mesh=make_mesh((RANKS,)))(*_operands(op))


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
