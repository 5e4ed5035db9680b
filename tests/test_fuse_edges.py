"""jflux.fuse: programs that are near the edge of a rule, or of none."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fused import check, gather, normal, of_ranks, ops, same, scatter
from harness import PLATFORM, make_mesh
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jflux
from jflux._fuse.rules import summed_products

pytestmark = pytest.mark.skipif(PLATFORM == "gpu", reason="kernels of GPUs take no float64")


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


def _exchange(x, split, concat, tiled=True):
    return lax.all_to_all(x, "tp", split, concat, tiled=tiled)


def _sum(x):
    return lax.pcast(lax.psum(x, "tp"), "tp", to="varying")


def _dead(x, w):
    y = gather(x) @ w
    _ = y * 2
    return jax.nn.silu(y)


def _bias_of_gathered(x, w):
    h = gather(x)
    return h @ w + jnp.sum(h, (0, 1))[: w.shape[1]]


X, W = (2, 3, 8), (8, 6)
#: By name: the function of ranks, its shapes, and the ops that hide what they move.
PROGRAMS = {
    "one row": (lambda x, w: _sum(x @ w), [(1, 1, 8), W], ["matmul_all_reduce"]),
    "a vector": (lambda x, w: _sum(x @ w), [(8,), W], ["matmul_all_reduce"]),
    "one head for each rank": (
        lambda x, w, v: jnp.einsum("bshe,ef->bshf", _exchange(jnp.einsum("bsd,dhe->bshe", x, w),
                                                              2, 1), v),
        [(2, 4, 8), (8, 2, 3), (3, 5)], ["matmul_all_to_all"],
    ),
    "an unused equation": (_dead, [X, W], ["all_gather_matmul"]),
    "a bias of the gathered array": (_bias_of_gathered, [X, W], ["all_gather_matmul"]),
    "a product and itself": (lambda x, w: (lambda y: scatter(y + y))(x @ w), [(2, 4, 8), W], []),
    "an array gathered twice": (
        lambda x, w, v: (gather(x) @ w) * (gather(x) @ v) + jnp.sum(gather(x)),
        [X, W, W], ["all_gather_matmul"],
    ),
    "a scalar": (lambda x, w: _sum((x @ w).reshape(())), [(1, 8), (8, 1)], ["matmul_all_reduce"]),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name):
    f, shapes, wanted = PROGRAMS[name]
    check(f, [normal(*shape, seed=i) for i, shape in enumerate(shapes)], wanted)


def test_exchanges_that_are_not_tiled():  # whose derivative fails in JAX
    x = normal(2, 4, 4)
    plain = of_ranks(lambda x: _exchange(x, 0, 1, False), x)
    same(plain(x), jax.jit(jflux.fuse(plain))(x))


def test_gathers_of_fewer_bytes_stay():
    x, w = normal(*X, dtype=jnp.bfloat16), normal(*W, dtype=jnp.float32)
    fused = jflux.fuse(of_ranks(lambda x, w: gather(x).astype(jnp.float32) @ w, x, w))
    (found,) = fused.report(x, w)
    assert not found.hidden and "more bytes would travel" in found.reason


def test_other_types_stay():
    def integers(x, w):
        h = gather(x)
        return lax.dot_general(h, w, (((2,), (0,)), ((), ())), preferred_element_type=jnp.int32) * 2

    x, w = ((normal(*s) * 20).astype(jnp.int8) for s in (X, W))
    plain = of_ranks(integers, x, w)
    same(plain(x, w), jax.jit(jflux.fuse(plain))(x, w))
    args = normal(*X), normal(*W)
    plain = of_ranks(lambda x, w: gather(x).astype(complex) @ w.astype(complex), *args)
    same(plain(*args), jax.jit(jflux.fuse(plain))(*args))
    keys = jax.random.split(jax.random.key(0), (2, 4))
    plain = of_ranks(lambda k: jax.random.key_data(lax.all_gather(k, "tp", tiled=True)), keys)
    same(plain(keys), jflux.fuse(plain)(keys))


def test_other_derivatives_stay():
    @jax.custom_jvp
    def relu(x):
        return jax.nn.relu(x)

    relu.defjvp(lambda primals, tangents: (relu(*primals), 3 * tangents[0]))
    args = normal(*X), jnp.zeros_like(normal(*W))
    for activation in (relu, lambda y: jnp.maximum(y, 0)):
        plain = of_ranks(lambda x, w, f=activation: f(gather(x) @ w), *args)
        fused = jflux.fuse(plain)
        assert ops(fused.report(*args)) == ["all_gather_matmul"]
        gradient = jax.grad(lambda w, f: jnp.sum(f(args[0], w)))
        same(gradient(args[1], plain), gradient(args[1], fused))


def test_types_of_results_stay():
    def f(x):
        weak = lax.pcast(lax.broadcast(1.0, (2, 4)), "tp", to="varying")
        return lax.psum(weak @ weak.T, "tp"), lax.all_gather(weak, "tp")

    plain = jax.shard_map(f, mesh=make_mesh((2,)), in_specs=P("tp"), out_specs=(P(), P("tp")))
    wanted = jax.make_jaxpr(plain)(jnp.ones(2)).out_avals
    assert jax.make_jaxpr(jflux.fuse(plain))(jnp.ones(2)).out_avals == wanted
    constants = jflux.fuse(lambda x: (3, jnp.ones(2), np.arange(2)))(jnp.ones(1))
    assert all(isinstance(a, jax.Array) for a in constants) and constants[0].weak_type


def test_objects_and_numbers_among_the_arguments():
    class Model:
        scale = 2

        @jflux.fuse
        def __call__(self, x):
            return x * self.scale

    model = Model()
    assert model(jnp.ones(())) == 2
    model.scale = 3
    assert model(jnp.ones(())) == 3
    assert model.__call__.report(jnp.ones(())) == ()
    divide = jflux.fuse(lambda x, y: x / y)
    with np.errstate(divide="ignore"):
        assert divide(jnp.ones(()), 0.0) == jnp.inf and divide(jnp.ones(()), -0.0) == -jnp.inf


def test_arrays_are_freed_when_they_are_not_needed():
    most = []

    def f(x):
        for _ in range(12):
            x = jnp.sin(x) * 2
            jax.debug.callback(lambda: most.append(len(jax.live_arrays())))
        return x

    x = jnp.ones(8)
    f(x)
    plain, most[:] = max(most), []
    jflux.fuse(f)(x)
    jax.effects_barrier()
    assert max(most) <= plain + 2


def test_disable_jit():
    with jax.disable_jit():
        assert jflux.fuse(lambda x: x if x > 0 else -x)(jnp.asarray(-2.0)) == 2


def test_large_sums_of_several_products():
    def f(x, w, v):
        return lax.pcast(lax.psum(x @ w + jnp.sin(x) @ v, "tp"), "tp", to="varying")

    args = [normal(2, 4096, 8), normal(8, 513), normal(8, 513, seed=1)]  # 32 MiB
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(summed_products, "most_bytes", lambda ranks: 100)
        check(f, [a[..., :4, :] if a.ndim == 4 else a[..., :6] for a in args],
              ["matmul_reduce_scatter"])  # fmt: skip
    (found,) = jflux.fuse(of_ranks(f, *args)).report(*args).taken
    assert found.op == "matmul_reduce_scatter"


def test_a_sum_of_two_thousand_products():
    def f(x, w):
        return lax.psum(functools.reduce(jnp.add, [(x * i) @ w for i in range(2000)]), "tp")

    shapes = jax.ShapeDtypeStruct((2, 4, 8), float), jax.ShapeDtypeStruct((2, 8, 6), float)
    (found,) = jflux.fuse(of_ranks(f, *shapes, check_vma=False)).report(*shapes)
    assert (found.op, found.reason) == (
        "all_reduce",
        "the op sums one product over ranks, not several",
    )


def test_modules_of_nnx():
    nnx = pytest.importorskip("flax.nnx")

    class Layer(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(normal(8, 6, ranks=1)[0])
            self.calls = nnx.Variable(jnp.zeros(()))

        def __call__(self, x):
            self.calls[...] += 1
            specs = P("tp"), P(None, "tp")
            return jax.shard_map(
                lambda x, w: gather(x, 0) @ w, mesh=make_mesh((2,)), in_specs=specs,
                out_specs=P(None, "tp"),
            )(x, self.w[...])  # fmt: skip

    def step(layer, x, power):
        loss, gradient = nnx.value_and_grad(lambda m: jnp.sum(m(x) ** power))(layer)
        nnx.update(layer, jax.tree.map(lambda w, g: w - g, nnx.state(layer, nnx.Param), gradient))
        return loss

    def losses(wrap):
        layer, x = Layer(), normal(4, 8, ranks=1)[0]
        f = wrap(step)
        found = [float(f(layer, x, 2)) for _ in range(3)]
        assert float(layer.calls[...]) == 3
        return found

    exact = losses(lambda f: f)
    jit = functools.partial(nnx.jit, static_argnums=2)
    for wrap in (jflux.fuse, lambda f: jit(jflux.fuse(f)), lambda f: jflux.fuse(jit(f))):
        np.testing.assert_allclose(losses(wrap), exact)
    assert ops(jflux.fuse(step).report(Layer(), normal(4, 8, ranks=1)[0], 2))


# ---- Global arrays -------------------------------------------------------------------------------


def _sharded(mesh, *spec):
    return NamedSharding(mesh, P(*spec))


def _split_batches(c, x, w):
    x, w = c(x, "dp", None, "tp"), c(w, None, "tp", None)
    return c(jnp.einsum("bsd,bdf->bsf", x, w), "dp", None, None)


def _split_twice(c, x, w):
    return c(jnp.einsum("bds,bdf->sf", c(x, None, "tp", "dp"), c(w, None, None, "dp")), None, "dp")


def _residual_first(c, x, w):
    return c(x[..., :6] + c(x, "dp", None, "tp") @ c(w[0], "tp", None), "dp", "tp", None)


def _parts(c, x, w):
    h = jnp.concatenate([x, x], -1)  # not known
    h = c(jnp.sin(h), "dp", "tp", None)
    one, other = jnp.split(jnp.pad(h, ((0, 0), (0, 0), (0, 4))), 2, -1)  # known, [8, 8, 10]
    w = c(jnp.pad(w[0], ((0, 2), (0, 0))), None, "tp")
    scale = jnp.broadcast_to(c(jnp.sum(x, -1), "dp", "tp")[:, :, None], one.shape)
    return c((one * scale + other) @ w, "dp", None, "tp")


def _gathered_twice(c, x, w):
    x = c(x, None, "dp", None)
    one, other = (c(x, None, None, None) for _ in range(2))
    w = c(w[0], None, "tp")
    return c(one @ w, None, None, "tp") * c(jnp.sin(other @ w), None, None, "tp")


@pytest.mark.parametrize(
    ("f", "wanted"),
    [
        (_split_batches, []),
        (_split_twice, ["all_gather_matmul"]),
        (_residual_first, ["matmul_reduce_scatter"]),
        (_parts, ["all_gather_matmul"]),
        (_gathered_twice, ["all_gather_matmul"]),
    ],
)
def test_constraints(f, wanted):
    mesh = make_mesh((2, 2), ("dp", "tp"))
    c = lambda x, *spec: lax.with_sharding_constraint(x, _sharded(mesh, *spec))  # noqa: E731
    f = functools.partial(f, c)
    args = normal(8, 8, ranks=4), normal(8, 6, ranks=4)
    same(jax.jit(f)(*args), jax.jit(jflux.fuse(f))(*args))
    assert ops(jflux.fuse(f).report(*args)) == wanted


def test_arguments_and_constraints_over_two_meshes():
    one, other = make_mesh((4, 2), ("dp", "tp")), make_mesh((2, 4), ("dp", "tp"))
    x = jax.device_put(normal(8, 8)[0], _sharded(one, "dp"))
    w = jax.device_put(normal(8, 8)[1], _sharded(one, None, "tp"))

    def f(x, w):
        c = lambda a, *spec: lax.with_sharding_constraint(a, _sharded(other, *spec))  # noqa: E731
        return c(c(x, "dp"), None) @ c(w, None, "tp")

    assert jflux.fuse(f)(x, w).sharding.mesh == f(x, w).sharding.mesh
    same(f(x, w), jflux.fuse(f)(x, w))


def test_shardings_of_jit_alone():
    mesh = make_mesh((2, 2), ("dp", "tp"))
    x, w = normal(8, 8)
    shardings = _sharded(mesh, None, "tp"), _sharded(mesh, "tp")
    plain = jax.jit(lambda x, w: jnp.sin(x @ w), in_shardings=shardings)
    assert ops(jflux.fuse(plain).report(x, w)) == ["matmul_all_reduce"]
    same(plain(x, w), jax.jit(jflux.fuse(plain))(x, w))


def test_sums_that_are_scattered_together():
    mesh = make_mesh((2, 2), ("dp", "tp"), axis_type=jax.sharding.AxisType.Explicit)
    with jax.set_mesh(mesh):
        x = jax.device_put(normal(8, 8, ranks=4), P(None, None, "tp"))
        w, v = (jax.device_put(a, P("tp")) for a in normal(8, 8))

        def product(x, w):
            return jnp.einsum("bsd,df->bsf", x, w, out_sharding=P(None, "tp", None))

        def f(x, w, v):
            return product(x, w) + product(jnp.sin(x), v)

        assert ops(jflux.fuse(f).report(x, w, v)) == ["matmul_reduce_scatter"]
        same(jax.jit(f)(x, w, v), jax.jit(jflux.fuse(f))(x, w, v))
