"""jflux.moe's products over ranks against every expert on every token, in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import LATENCY_HIDING, RANKS, make_mesh
from jax.sharding import PartitionSpec as P

import jflux
from jflux import moe

T, CHOICES, E, D, F, H = 12, 3, 5, 6, 8, 4

pytestmark = pytest.mark.wide
WORLDS = [n for n in (1, 2, 4) if n <= RANKS]


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


def draw(seed=0):
    rng = np.random.default_rng(seed)
    arrays = [rng.normal(size=s) for s in ((T, D), (E, D, F), (E, D, F), (E, F, H), (T, CHOICES))]
    return arrays, rng.integers(-1, E - 1, (T, CHOICES), dtype=np.int32)  # one expert has none


def dense(x, gate, up, down, weights, chosen):
    hidden = jax.nn.silu(jnp.einsum("td,edf->tef", x, gate)) * jnp.einsum("td,edf->tef", x, up)
    share = jnp.einsum("tj,tje->te", weights, jax.nn.one_hot(chosen, E, dtype=weights.dtype))
    return jnp.einsum("tef,efh,te->th", hidden, down, share)


def layer(last, x, gate, up, down, weights, chosen, transpose=False):
    """Experts with hidden units split over "tp", by the two products."""
    routing = moe.route(chosen, E)
    if transpose:
        gate, up, down = (w.swapaxes(1, 2) for w in (gate, up, down))
    hidden = moe.all_gather_grouped_matmul(
        x, (gate, up), routing, axis_name="tp", activation="silu", gated=True,
        transpose_rhs=transpose,
    )  # fmt: skip
    return last(hidden, down, routing, weights, axis_name="tp", transpose_rhs=transpose)


COLUMNS, ROWS = P(None, None, "tp"), P(None, "tp", None)
SPECS = (P("tp"), COLUMNS, COLUMNS, ROWS, P(), P())


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("way", ["reduce_scatter", "all_reduce"])
def test_a_layer_and_its_gradients(world, transpose, way):
    last = getattr(moe, f"grouped_matmul_{way}")
    f = jax.shard_map(
        functools.partial(layer, last, transpose=transpose), mesh=make_mesh((world,)),
        in_specs=SPECS, out_specs=P("tp") if way == "reduce_scatter" else P(),
    )  # fmt: skip
    arrays, chosen = draw()
    cotangent = np.random.default_rng(7).normal(size=(T, H))

    def run(f):
        y, pull = jax.vjp(lambda *a: f(*a, chosen), *arrays)
        return y, *pull(cotangent)

    for got, want in zip(jax.jit(lambda: run(f))(), run(dense), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("world", WORLDS)
def test_layers_under_remat_and_scan_with_other_routings(world):
    """Two layers a step, each with choices of its own; gradients, where XLA hides latencies."""
    arrays, _ = draw(3)
    chosen = np.random.default_rng(4).integers(-1, E, (3, 2, T, CHOICES), dtype=np.int32)
    arrays[3] = np.random.default_rng(5).normal(size=(E, F, D))  # y has x's width

    def of(one):
        def steps(x, gate, up, down, weights, chosen):
            @jax.checkpoint
            def step(x, chosen):
                for i in range(2):
                    x = x + one(jnp.sin(x), gate, up, down, weights, chosen[i])
                return x, None

            return jax.lax.scan(step, x, chosen)[0]

        return steps

    layers = functools.partial(layer, moe.grouped_matmul_reduce_scatter)
    f = jax.shard_map(
        of(layers), mesh=make_mesh((world,)), in_specs=SPECS, out_specs=P("tp")
    )  # fmt: skip

    def gradients(f):
        return jax.grad(lambda *a: jnp.sum(jnp.sin(f(*a, chosen))), range(5))

    got = jax.jit(gradients(f), compiler_options=LATENCY_HIDING)(*arrays)
    for g, w in zip(got, jax.jit(gradients(of(dense)))(*arrays), strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-8, atol=1e-9 * float(abs(w).max()))


def test_without_weights_each_choice_counts_once():
    world = WORLDS[-1]
    (_, _, _, down, _), chosen = draw(1)
    h = np.random.default_rng(2).normal(size=(T * CHOICES, F))
    routing = moe.route(chosen, E)
    f = jax.shard_map(
        functools.partial(moe.grouped_matmul_all_reduce, axis_name="tp"), mesh=make_mesh((world,)),
        in_specs=(P(None, "tp"), ROWS, P()), out_specs=P(),
    )  # fmt: skip
    want = np.zeros((T, H))
    for t, j in np.ndindex(T, CHOICES):
        if (row := int(routing.destination[t, j])) >= 0:
            want[t] += h[row] @ down[chosen[t, j]]
    np.testing.assert_allclose(jax.jit(f)(h, down, routing), want, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "dtype, out", [("int8", "int32"), ("int8", None), ("float8_e4m3fn", "bfloat16")]
)
def test_types_that_no_kernel_takes(dtype, out):
    """Small whole numbers, which every type here has exactly."""
    world = WORLDS[-1]
    rng = np.random.default_rng(8)
    x, up, down = (
        rng.integers(-1, 2, s).astype(jnp.dtype(dtype)) for s in ((T, 2), (E, 2, F), (E, F, H))
    )
    routing = moe.route(rng.integers(0, E, (T, 1), dtype=np.int32), E)
    options = {"axis_name": "tp", "preferred_element_type": out}

    def f(x, up, down):
        h = moe.all_gather_grouped_matmul(x, up, routing, **options)
        return h, moe.grouped_matmul_reduce_scatter(h.astype(dtype), down, routing, **options)

    f = jax.shard_map(
        f, mesh=make_mesh((world,)), in_specs=(P("tp"), COLUMNS, ROWS),
        out_specs=(P(None, "tp"), P("tp")),
    )  # fmt: skip
    chosen = np.repeat(np.arange(E), np.asarray(routing.counts))  # of each row
    x, wide_up, wide_down = (np.asarray(a, np.float64) for a in (x, up, down))
    h = np.einsum("rd,rdf->rf", x[np.asarray(routing.source)], wide_up[chosen])
    y = np.einsum("rf,rfh->rh", h, wide_down[chosen])[np.asarray(routing.destination)[:, 0]]
    with jflux.config(strict=False):
        got = jax.jit(f)(x.astype(jnp.dtype(dtype)), up, down)
    for a, want in zip(got, (h, y), strict=True):
        assert a.dtype == (out or dtype)
        np.testing.assert_array_equal(np.asarray(a, np.float64), want)


def test_a_routing_of_other_tokens_is_refused():
    (x, gate, up, down, weights), chosen = draw()
    f = jax.shard_map(
        functools.partial(layer, moe.grouped_matmul_all_reduce), mesh=make_mesh((WORLDS[-1],)),
        in_specs=SPECS, out_specs=P(),
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"x \(\d+, 6\) has \d+ tokens on each of \d ranks"):
        jax.eval_shape(f, x, gate, up, down, weights[:8], chosen[:8])
