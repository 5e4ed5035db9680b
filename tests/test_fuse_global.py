"""jflux.fuse outside of shard_map: under Explicit sharding, and between constraints."""

import functools

import jax
import jax.numpy as jnp
import pytest
from fused import normal, ops, same
from harness import PLATFORM, make_mesh
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jflux

pytestmark = pytest.mark.skipif(PLATFORM == "gpu", reason="kernels of GPUs take no float64")


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


B, S, D, F = 4, 8, 16, 32
AXES = ("dp", "tp")


def _weights():
    shapes = {"gate": (D, F), "up": (D, F), "down": (F, D)}
    return {name: normal(*s, ranks=1, seed=i)[0] for i, (name, s) in enumerate(shapes.items())}


SPECS = {"gate": P(None, "tp"), "up": P(None, "tp"), "down": P("tp", None)}


def _loss(layer):
    return lambda x, params: jnp.sum(jnp.sin(layer(x, params)))


def _same_shardings(a, b):
    for one, other in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert one.sharding.is_equivalent_to(other.sharding, one.ndim)
    same(a, b, 1e-10)


# ---- Explicit axes -------------------------------------------------------------------------------


@pytest.fixture
def explicit():
    mesh = make_mesh((2, 2), AXES, axis_type=jax.sharding.AxisType.Explicit)
    with jax.set_mesh(mesh):
        x = jax.device_put(normal(B, S, D, ranks=1)[0], P("dp", "tp", None))
        yield x, {k: jax.device_put(w, SPECS[k]) for k, w in _weights().items()}


def _explicit_layer(x, p):
    h = jax.reshard(jnp.sin(x), P("dp", None, None))
    y = jax.nn.silu(jnp.einsum("bsd,df->bsf", h, p["gate"])) * (h @ p["up"])
    return x + jnp.einsum("bsf,fd->bsd", y, p["down"], out_sharding=P("dp", "tp", None))


def _implicit_layer(x, p):
    out = P("dp", None, "tp")
    y = jnp.einsum("bsd,df->bsf", x, p["gate"], out_sharding=out)
    y = jnp.sin(y) * jnp.einsum("bsd,df->bsf", x, p["up"], out_sharding=out)
    return x + jnp.einsum("bsf,fd->bsd", y, p["down"], out_sharding=P("dp", "tp", None))


def _summed_layer(x, p):
    h = jax.reshard(x, P("dp", None, None))
    y = jnp.einsum("bsf,fd->bsd", jnp.sin(h @ p["up"]), p["down"], out_sharding=P("dp", None, None))
    return jax.reshard(y, P("dp", "tp", None)) + x


def _scanned(x, p):
    stacked = jax.tree.map(lambda w: jnp.stack([w, w]), p)
    return lax.scan(lambda x, p: (jax.checkpoint(_explicit_layer)(x, p), None), x, stacked)[0]


@pytest.mark.parametrize("layer", [_explicit_layer, _implicit_layer, _summed_layer, _scanned])
def test_explicit_sharding(layer, explicit):
    fused = jflux.fuse(layer)
    assert ops(fused.report(*explicit)) == ["all_gather_matmul", "matmul_reduce_scatter"]
    _same_shardings(jax.jit(layer)(*explicit), jax.jit(fused)(*explicit))
    _same_shardings(layer(*explicit), fused(*explicit))
    exact = jax.jit(jax.grad(_loss(layer), (0, 1)))(*explicit)
    step = jflux.fuse(jax.grad(_loss(layer), (0, 1)))
    taken = ops(step.report(*explicit))
    assert taken.count("all_gather_matmul") >= 2 and taken.count("matmul_reduce_scatter") >= 2
    _same_shardings(exact, jax.jit(step)(*explicit))
    _same_shardings(exact, jax.jit(jax.grad(_loss(fused), (0, 1)))(*explicit))


def test_a_sum_that_all_ranks_have(explicit):
    x, p = explicit

    def f(x, p):
        y = jnp.sin(jax.reshard(x, P("dp", None, None)) @ p["up"])
        return jnp.einsum("bsf,fd->bsd", y, p["down"], out_sharding=P("dp", None, None))

    fused = jflux.fuse(f)
    assert ops(fused.report(x, p)) == ["all_gather_matmul", "matmul_all_reduce"]
    _same_shardings(jax.jit(f)(x, p), jax.jit(fused)(x, p))


def test_explicit_products_that_exchange_nothing_stay(explicit):
    x, p = explicit

    def f(x, w):
        return jnp.einsum("bsd,df->bsf", x, jax.reshard(w, P(None, None)))

    assert str(jax.make_jaxpr(f)(x, p["up"])) == str(jax.make_jaxpr(jflux.fuse(f))(x, p["up"]))


# ---- Auto axes -----------------------------------------------------------------------------------


def _constrained(mesh, x, *spec):
    return lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))


def _auto_layer(mesh, x, p):
    c = functools.partial(_constrained, mesh)
    h = c(jnp.sin(x), "dp", "tp", None)
    y = jax.nn.silu(c(jnp.einsum("bsd,df->bsf", h, p["gate"]), "dp", None, "tp")) * (h @ p["up"])
    return x + c(jnp.einsum("bsf,fd->bsd", y, p["down"]), "dp", "tp", None)


def _gathered_layer(mesh, x, p):
    c = functools.partial(_constrained, mesh)
    h = c(c(jnp.sin(x), "dp", "tp", None), "dp", None, None)
    y = jnp.sin(c(h @ p["up"], "dp", None, "tp"))
    return x + c(y @ p["down"], "dp", "tp", None)


def _auto_scanned(mesh, x, p):
    stacked = jax.tree.map(lambda w: jnp.stack([w, w]), p)
    stacked = {k: _constrained(mesh, w, None, *SPECS[k]) for k, w in stacked.items()}
    layer = functools.partial(_auto_layer, mesh)
    return lax.scan(lambda x, p: (jax.checkpoint(layer)(x, p), None), x, stacked)[0]


@pytest.mark.parametrize("layer", [_auto_layer, _gathered_layer, _auto_scanned])
def test_constraints(layer):
    mesh = make_mesh((2, 2), AXES)
    layer = functools.partial(layer, mesh)
    shardings = {k: NamedSharding(mesh, spec) for k, spec in SPECS.items()}
    shardings = (NamedSharding(mesh, P("dp", "tp", None)), shardings)
    x, params = jax.device_put((normal(B, S, D, ranks=1)[0], _weights()), shardings)
    for f in (layer, jax.grad(_loss(layer), (0, 1))):
        plain = jax.jit(f, in_shardings=shardings)
        fused = jflux.fuse(plain)
        taken = ops(fused.report(x, params))
        assert "all_gather_matmul" in taken and "matmul_reduce_scatter" in taken
        same(plain(x, params), jax.jit(fused)(x, params), 1e-10)
    fused = jflux.fuse(jax.jit(layer, in_shardings=shardings))
    exact = jax.jit(jax.grad(_loss(layer), (0, 1)))(x, params)
    same(exact, jax.jit(jax.grad(_loss(fused), (0, 1)))(x, params), 1e-10)


@pytest.mark.parametrize("has_bias", [True, False])
def test_weights_first_as_equinox_multiplies(has_bias):
    """``vmap(vmap(w @ x))``, whose result is transposed, as its cotangent is before a product; and
    the bias of each product says nothing about the dimensions that it is broadcast along."""
    mesh = make_mesh((2, 2), AXES)
    c = functools.partial(_constrained, mesh)

    def layer(x, p):
        def linear(w, b, x):
            return jax.vmap(jax.vmap(lambda x: w.T @ x + b if has_bias else w.T @ x))(x)

        h = c(jnp.sin(x), "dp", "tp", None)
        h = c(jnp.sin(linear(p["up"], p["gate"][0], h)), "dp", None, "tp")
        return c(x + linear(p["down"], p["down"][0], h), "dp", "tp", None)

    shardings = {k: NamedSharding(mesh, spec) for k, spec in SPECS.items()}
    shardings = (NamedSharding(mesh, P("dp", "tp", None)), shardings)
    x, params = jax.device_put((normal(B, S, D, ranks=1)[0], _weights()), shardings)
    plain = jax.jit(layer, in_shardings=shardings)
    fused = jflux.fuse(plain)
    assert ops(fused.report(x, params)) == ["all_gather_matmul", "matmul_reduce_scatter"]
    same(plain(x, params), jax.jit(fused)(x, params), 1e-10)
    exact = jax.jit(jax.grad(_loss(layer), (0, 1)))(x, params)
    step = jflux.fuse(jax.jit(jax.grad(_loss(layer), (0, 1)), in_shardings=shardings))
    taken = ops(step.report(x, params))
    assert taken == ["all_gather_matmul", "matmul_reduce_scatter"] * 2
    same(exact, jax.jit(step)(x, params), 1e-10)


def test_a_bias_says_nothing_about_other_dimensions():
    mesh = make_mesh((2,))
    shardings = [NamedSharding(mesh, spec) for spec in (P(None, "tp"), P("tp"), P())]
    shapes = ((S, F), (F, D), (D,))
    x, w, bias = jax.device_put([normal(*s, ranks=1)[0] for s in shapes], shardings)

    def f(x, w, bias):
        y = x @ w
        return _constrained(mesh, y + jnp.broadcast_to(bias, y.shape), "tp", None)

    plain = jax.jit(f, in_shardings=tuple(shardings))
    assert ops(jflux.fuse(plain).report(x, w, bias)) == ["matmul_reduce_scatter"]
    same(plain(x, w, bias), jflux.fuse(plain)(x, w, bias))


def test_weights_that_are_split_over_data_ranks_too():
    """They are gathered before the calls (FSDP). What silu takes is split as what it makes."""
    mesh = make_mesh((2, 2), AXES)
    c = functools.partial(_constrained, mesh)

    def layer(x, p):
        h = c(jnp.sin(x), "dp", "tp", None)
        y = c(jax.nn.silu(h @ p["gate"]) * (h @ p["up"]), "dp", None, "tp")
        return x + c(checkpoint_name(y @ p["down"], "down"), "dp", "tp", None)

    for both in (("tp", "dp"), "tp"):
        k = "dp" if both == "tp" else None
        specs = {"gate": P(k, both), "up": P(k, both), "down": P(both, k)}
        shardings = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
        shardings = (NamedSharding(mesh, P("dp", "tp", None)), shardings)
        x, params = jax.device_put((normal(B, S, D, ranks=1)[0], _weights()), shardings)
        plain = jax.jit(jax.grad(_loss(layer), (0, 1)), in_shardings=shardings)
        fused = jflux.fuse(plain)
        taken = [site for site in fused.report(x, params) if site.taken]
        assert ops(taken) == ["all_gather_matmul", "matmul_reduce_scatter"] * 2
        assert taken[0].before == ("dot_general", "dot_general")  # gate and up
        same(plain(x, params), jax.jit(fused)(x, params), 1e-10)


def test_what_is_not_known_is_said():
    mesh = make_mesh((2, 2), AXES)

    def f(x, w):
        return _constrained(mesh, _constrained(mesh, x, "dp", "tp", None) @ w, "dp", None, "tp")

    x, w = normal(B, S, D, ranks=1)[0], normal(D, F, ranks=1)[0]
    (found,) = jflux.fuse(f).report(x, w)
    assert (found.taken, found.reason) == (False, "how its second operand is split is not known")
    odd = jax.jit(f, in_shardings=(None, NamedSharding(mesh, P(None, "tp"))))
    (found,) = jflux.fuse(odd).report(normal(B, 7, D, ranks=1)[0], w)
    assert (found.taken, "does not divide" in found.reason) == (False, True)


def test_calls_without_results_and_with_functions_of_their_own_derivative():
    mesh = make_mesh((2,))
    shardings = NamedSharding(mesh, P("tp", None)), NamedSharding(mesh, P(None, "tp"))
    x, w = jax.device_put((normal(S, D, ranks=1)[0], normal(D, F, ranks=1)[0]), shardings)

    @jax.jit
    def nothing(x):
        return ()

    def f(x, w):
        nothing(x)
        return _constrained(mesh, jax.nn.relu(x @ w), None, "tp")

    plain = jax.jit(f, in_shardings=shardings)
    assert ops(jflux.fuse(plain).report(x, w)) == ["all_gather_matmul"]
    same(plain(x, w), jflux.fuse(plain)(x, w))


def test_arguments_of_an_eager_call_are_known():
    mesh = make_mesh((2,))
    x = jax.device_put(normal(S, D, ranks=1)[0], NamedSharding(mesh, P("tp", None)))
    w = jax.device_put(normal(D, F, ranks=1)[0], NamedSharding(mesh, P(None, "tp")))

    def f(x, w):
        return _constrained(mesh, x @ w, None, "tp")

    fused = jflux.fuse(f)
    assert ops(fused.report(x, w)) == ["all_gather_matmul"]
    same(f(x, w), fused(x, w))
