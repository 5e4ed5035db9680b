"""JAX's switches for debugging: ops under them do what `lax` does."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import PRODUCTS, make_mesh, of_way
from jax.sharding import PartitionSpec as P

import jflux
import jflux.nn as jnn
from jflux._ops._spec import collectives
from jflux._stress.calls import operands, per_device
from jflux.parallel import _scheme

pytestmark = pytest.mark.wide  # see conftest.strict

SIZES = np.array([1, 3])
close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)


def _over_ranks(f):
    """f on both ranks' parts of x [8, 8]."""

    def over_ranks(x):  # the mesh is made in the test, which one GPU skips
        return jax.shard_map(f, mesh=make_mesh((2,)), in_specs=P("tp"), out_specs=P("tp"))(x)

    return over_ranks


def _grouped(x):
    return jflux.grouped_matmul(x[:4], jnp.ones((2, 8, 8)), SIZES)


def _attention(x):
    q = x[:4].reshape(1, 4, 2, 4)
    return jflux.attention(q, q, q)


def _decode(x):
    cache = jnp.ones((2, 2, 1, 8))
    return jflux.flash_decode(x[:4].reshape(2, 2, 8), cache, cache, np.array([2, 1]))


def _product(x):
    return jflux.matmul_reduce_scatter(x, jnp.exp(-x * x).T, axis_name="tp")


#: A function of x [8, 8] for each way that jflux makes primitives, and whether it has a gradient.
ONE_OF_EACH = {
    "local": (_grouped, True),
    "functions": (_attention, True),
    "no derivative": (_decode, False),
    "barrier": (lambda x: _scheme.together({"a": x, "b": 2 * x})["b"], True),
    "product": (_over_ranks(_product), True),
    "collective": (_over_ranks(functools.partial(jflux.all_gather, axis_name="tp")), True),
}


@pytest.fixture(params=ONE_OF_EACH)
def function(request):
    """A function that returns one's results and its gradient, and x."""
    f, has_gradient = ONE_OF_EACH[request.param]
    fs = [f]
    if has_gradient:
        fs.append(jax.grad(lambda x: jnp.sum(f(x) ** 2)))
    return lambda x: [f(x) for f in fs], np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8)


def test_without_jit(function):
    f, x = function
    want = jax.jit(f)(x)
    with jax.disable_jit():
        for run in (f, jax.jit(f)):
            jax.tree.map(close, run(x), want)


def test_constants_of_a_traced_function(function):
    f, x = function
    want = jax.jit(f)(x)

    def traced(y):
        with jax.ensure_compile_time_eval():
            return f(x), jax.jit(f)(x), y

    *found, _ = jax.jit(traced)(1.0)
    for some in found:
        jax.tree.map(close, some, want)


@pytest.mark.parametrize("name", ["local", "functions", "product"])
def test_a_nan_is_a_floating_point_error(name):
    """Made by the op: JAX's own shard_map recurses over operands that have one."""
    f, _ = ONE_OF_EACH[name]
    x = np.ones((8, 8), np.float32)
    infinite = x.copy()
    infinite[:, 0], infinite[:, 1] = np.inf, -np.inf
    with jax.debug_nans(True):
        for run in (f, jax.jit(f)):
            jax.block_until_ready(run(x))
            with pytest.raises(FloatingPointError):
                run(infinite)


@pytest.mark.parametrize("exchange", ["fused", "dispatch"])
def test_a_mixture_that_is_right_raises_nothing(exchange):
    """Rows that may be anything are zeros where JAX looks for NaN, call by call."""
    params = {"router": jnp.eye(8, 4), "up": jnp.ones((4, 8, 8)), "down": jnp.ones((4, 8, 8))}
    specs = {n: P() if n == "router" else P("tp") for n in params}
    options = {"k": 1, "expert_axis": "tp", "exchange": exchange}
    f = jax.shard_map(
        lambda x, params: jax.grad(lambda *a: jnp.sum(jnn.mixture(*a, **options).y), (0, 1))(
            x, params["router"], params["up"], params["down"]
        ),
        mesh=make_mesh((2,)), in_specs=(P("tp"), specs), out_specs=(P("tp"), P()),
        check_vma=False,
    )  # fmt: skip
    # What is freed here is what results that nobody writes would be made of.
    held = [jax.device_put(np.full(n, np.nan, np.float32), d) for n in range(16, 1024, 16)
            for d in jax.devices()[:2]]  # fmt: skip
    jax.block_until_ready(held)
    del held
    with jax.debug_nans(True):
        jax.block_until_ready(f(jnp.arange(32.0).reshape(4, 8), params))


# ---- Strict switches -----------------------------------------------------------------------------


def _normal(*shape):
    return np.random.default_rng(len(shape)).standard_normal(shape, np.float32)


def _over(f, in_specs, out_specs):
    return jax.shard_map(f, mesh=make_mesh((2,)), in_specs=in_specs, out_specs=out_specs)


COLUMNS, ROWS = P(None, "tp"), P("tp")
#: A function of each kind of op, with what has fewer dimensions than x, and its operands.
BASIC = {
    "bias": (
        lambda x, w, b: jflux.all_gather_matmul(x, w, axis_name="tp", bias=b, activation="gelu"),
        (ROWS, COLUMNS, ROWS),
        COLUMNS,
        (_normal(8, 6), _normal(6, 4), _normal(4)),
    ),
    "scattered": (
        lambda x, w, b: jflux.matmul_reduce_scatter(x, w, axis_name="tp", bias=b),
        (COLUMNS, ROWS, P()),
        ROWS,
        (_normal(8, 6), _normal(6, 4), _normal(4)),
    ),
    "norm": (
        lambda x, s: jflux.all_reduce(x, axis_name="tp", norm=jflux.LayerNorm(s, s)),
        (P(), P()),
        P(),
        (_normal(8, 6), _normal(6)),
    ),
    "ring with a window": (
        lambda q: jflux.attention(q, q, q, axis_name="tp", causal=True, form="ring", window=3),
        (COLUMNS,),
        COLUMNS,
        (_normal(1, 8, 2, 4),),
    ),
    "grouped": (
        lambda x, w: jflux.grouped_matmul(x, w, SIZES, activation="silu"),
        (P(), P(None, None, "tp")),
        COLUMNS,
        (_normal(4, 6), _normal(2, 6, 4)),
    ),
    "decoding": (
        lambda q, k: q + _decoded(jax.lax.stop_gradient(q), jax.lax.stop_gradient(k)),
        (P(), COLUMNS),
        P(),
        (_normal(2, 2, 8), _normal(2, 4, 1, 8)),
    ),
    "cache": (
        lambda q, k: _with_cache(q, k),
        (P(), COLUMNS),
        P(),
        (_normal(2, 2, 2, 8), _normal(2, 4, 1, 8)),
    ),
    "dispatch": (
        lambda x, logits: _through_experts(x, logits),
        (ROWS, ROWS),
        ROWS,
        (_normal(8, 6), _normal(8, 4)),
    ),
    "ragged": (
        lambda x, y: jflux.ragged_all_to_all(x, y, *RAGGED, axis_name="tp"),
        (ROWS, ROWS),
        ROWS,
        (_normal(8, 6), _normal(6, 6)),
    ),
    "cross entropy": (
        lambda logits: jnn.cross_entropy(
            logits, np.array([1, 0, 6]), axis_name="tp", label_smoothing=0.1, z_loss=0.1
        ),
        (COLUMNS,),
        P(),
        (_normal(3, 8),),
    ),
    "positions": (jnn.Rotary(), (COLUMNS,), COLUMNS, (_normal(1, 8, 2, 4),)),
    "on a grid": (
        lambda x, w, s: _on_a_grid(x, w, s),
        (P(None, None, "tp"), ROWS, ROWS),
        P(None, None, "tp"),
        (_normal(2, 3, 8), _normal(8, 8), _normal(8)),
    ),
    "rows of experts": (
        lambda x: jflux.moe.unpermute(jflux.moe.permute(x, _routing()), _routing()),
        (COLUMNS,),
        COLUMNS,
        (_normal(4, 8),),
    ),
}


def _routing():
    return jflux.moe.route(np.array([[0, 1], [1, 1], [0, 0], [1, 0]]), 2)


#: Of two ranks: each one's first row to each of them.
RAGGED = (np.array([0, 1]), np.array([1, 1]), np.array([0, 1]), np.array([1, 1]))


def _decoded(q, k):
    return jflux.flash_decode(q, k, k, np.array([3, 2]), axis_name="tp", window=2, softcap=3.0)


def _with_cache(q, k):
    """A prompt, one token, and two tokens."""
    cache = jflux.KVCache(*(jnp.zeros((2, 4, 1, 8)) for _ in range(2)), np.zeros(2, np.int32))
    cache = jflux.fill_cache(cache, k, k, np.array([3, 2]), axis_name="tp")
    options = {"axis_name": "tp", "window": 2}
    new = q[:, :, :1]
    o, cache = jflux.attend_to_cache(cache, q[:, :1], new[:, :1], new[:, :1], **options)
    return jflux.attend_to_cache(cache, q, new, new, **options)[0] + o


def _on_a_grid(x, w, s):
    scheme = jflux.parallel.Scheme(x=None, y="tp", z=None, data=None)
    x = jflux.parallel.rms_norm(x, s, scheme=scheme)
    x = jflux.parallel.group_norm(x, s, s, groups=2, scheme=scheme)
    back = scheme.transposed
    y = jflux.parallel.dense(x, w, jnp.ones(8), scheme=scheme)
    return jflux.parallel.dense(y, w.T, s, scheme=back)


def _through_experts(x, logits):
    choices, weights = jflux.moe.top_k_sigmoid(logits, 2, bias=jnp.arange(4.0))
    options = {"num_experts": 4, "axis_name": "tp", "on_overflow": "error"}
    d = jflux.moe_dispatch(x, choices, weights, **options)
    return jflux.moe_combine(jnp.sin(d.rows), d.handle, weights=weights, axis_name="tp")


def _values_and_gradients(name):
    f, in_specs, out_specs, operands = BASIC[name]
    mapped = _over(f, in_specs, out_specs)

    def both(*operands):
        ys = mapped(*operands)
        return ys, jax.vjp(mapped, *operands)[1](jax.tree.map(jnp.sin, ys))

    mesh = make_mesh((2,))
    placed = [jax.NamedSharding(mesh, spec) for spec in in_specs]
    return jax.jit(both), [jax.device_put(a, s) for a, s in zip(operands, placed, strict=True)]


@pytest.mark.parametrize("name", BASIC)
def test_no_rank_is_promoted(name):
    f, operands = _values_and_gradients(name)
    with jax.numpy_rank_promotion("raise"):
        f.lower(*operands)


STRICT = {
    "rank promotion": lambda: jax.numpy_rank_promotion("raise"),
    "type promotion": lambda: jax.numpy_dtype_promotion("strict"),
    "leaks": jax.checking_leaks,
    "transfers": lambda: jax.transfer_guard("disallow"),
    "nans": lambda: jax.debug_nans(True),
    "infs": lambda: jax.debug_infs(True),
    "without jit": jax.disable_jit,
}


@pytest.mark.slow
@pytest.mark.parametrize("switch", STRICT)
def test_under_a_strict_switch(switch):
    # Each operation of these by itself takes up to 50 s.
    left_out = ("cache", "dispatch") if switch == "without jit" else ()
    for name in (name for name in BASIC if name not in left_out):
        f, operands = _values_and_gradients(name)
        want = f(*operands)
        jax.clear_caches()
        with STRICT[switch]():
            found = f(*operands)
        jax.tree.map(close, found, want)


def test_lax_is_bound_when_jflux_is_imported(monkeypatch):
    """A program may put jflux's functions in the place of lax's, to which references lead."""

    def fails(*_, **__):
        raise AssertionError("looked up when called")

    for name in ("all_gather", "all_to_all", "dot_general", "psum", "psum_scatter", "ragged_dot",
                 "ragged_dot_general", "ragged_all_to_all"):  # fmt: skip
        monkeypatch.setattr(jax.lax, name, fails)
    monkeypatch.setattr(jax.nn, "dot_product_attention", fails)
    mesh = make_mesh((2,))
    jax.clear_caches()
    with jflux.config(fused=False):
        for op in PRODUCTS:
            call = of_way(op, lead=(4,), k=8, n=8)
            x, w = operands(call, mesh, "tp")
            bound = call.bind("tp")

            def gradients(x, w, f=bound):
                return jax.vjp(f, x, w)[1](f(x, w))

            jax.jit(per_device(mesh, gradients)).lower(x, w)
        for spec in collectives():
            for reference in (False, True):
                options = {"axis_name": "tp", "reference": reference} | dict(spec.ways[0])
                f = functools.partial(spec.on, **options)
                jax.jit(per_device(mesh, f, check_vma=False)).lower(np.ones((2, 2, 4), np.float32))
        for f in (_grouped, _attention, _decode):
            jax.jit(f).lower(np.ones((8, 8), np.float32))
