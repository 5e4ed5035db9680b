"""jflux.flops: the operations of products, whoever multiplies."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import PLATFORM, PRODUCTS, RANKS, each_call, make_mesh
from jax import lax
from jax.sharding import PartitionSpec as P

import jflux
from jflux._stress.calls import operands, per_device

X, W = jax.ShapeDtypeStruct((6, 4), jnp.float32), jax.ShapeDtypeStruct((4, 4), jnp.float32)
ONE = 2 * 6 * 4 * 4


def _dot(x, w):
    return x @ w


def _xla(f, *args):
    return jax.jit(f).lower(*args).cost_analysis()["flops"]


# A GPU's program has no costs before it is compiled, and calls libraries after.
XLA_COUNTS = pytest.mark.skipif(PLATFORM == "gpu", reason="XLA counts no flops for GPUs")


# ---- Plain products ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "f, want",
    [
        (_dot, 1),
        (jax.jit(_dot), 1),
        (lambda x, w: jnp.tanh(x @ w) @ w, 2),
        (jax.checkpoint(_dot), 1),
        (lambda x, w: lax.scan(lambda x, _: (x @ w, None), x, None, length=5), 5),
        (lambda x, w: lax.fori_loop(0, 7, lambda _, x: x @ w, x), 7),
        (lambda x, w: lax.cond(x[0, 0] > 0, lambda x: x @ w @ w, lambda x: x @ w, x), 2),
        (lambda x, w: lax.while_loop(lambda x: x[0, 0] < 9, lambda x: x + 1, x) @ w, 1),
        (lambda x, w: jax.vmap(_dot, (0, None))(jnp.stack([x] * 3), w), 3),
        (lambda x, w: jax.nn.gelu(x) @ w, 1),
        (lambda x, w: jax.grad(lambda x: jnp.sum(jnp.sin(x @ w)))(x), 2),
        (lambda x, w: jax.grad(lambda x, w: jnp.sum(jnp.sin(x @ w)), (0, 1))(x, w), 3),
        (lambda x, w: jax.jvp(_dot, (x, w), (x, w)), 3),
        (lambda x, w: jax.vjp(_dot, x, w)[0], 1),  # nobody wants the rest
        (lambda x, w: jnp.einsum("bik,bkj->bij", x.reshape(2, 3, 4), jnp.stack([w] * 2)), 1),
    ],
)
def test_products_of_a_function(f, want):
    assert jflux.flops(f, X, W) == want * ONE


@XLA_COUNTS
def test_as_xla_counts():
    """Where XLA multiplies, and nothing else is computed."""
    image, taps = jnp.ones((2, 9, 9, 4)), jnp.ones((3, 3, 4, 5))
    dims = ("NHWC", "HWIO", "NHWC")

    def convolve(x, w, **options):
        return lax.conv_general_dilated(x, w, (2, 2), "VALID", dimension_numbers=dims, **options)

    assert jflux.flops(_dot, X, W) == _xla(_dot, X, W)
    assert jflux.flops(convolve, image, taps) == _xla(convolve, image, taps)
    grouped = functools.partial(convolve, feature_group_count=2)
    assert jflux.flops(grouped, image, taps[:, :, :2, :4]) == 2 * 2 * 4 * 4 * 9 * 2 * 4
    # Of both gradients: as many as of the convolution, but for its borders.
    both = jax.grad(lambda x, w: jnp.sum(jnp.sin(convolve(x, w))), (0, 1))
    ratio = jflux.flops(both, image, taps) / jflux.flops(convolve, image, taps)
    assert 2.8 < ratio < 3.6


@pytest.mark.skipif(not hasattr(lax, "ragged_dot"), reason="no ragged_dot")
def test_ragged_products():
    w, sizes = jax.ShapeDtypeStruct((3, 4, 4), jnp.float32), jnp.array([1, 2, 3])

    def loss(x, w):
        return jnp.sum(jnp.sin(lax.ragged_dot(x, w, sizes)))

    assert jflux.flops(lambda x, w: lax.ragged_dot(x, w, sizes), X, w) == ONE
    assert jflux.flops(jax.grad(loss, (0, 1)), X, w) == 3 * ONE


def test_a_loop_of_unknown_length():
    def f(x, w):
        return lax.while_loop(lambda x: x[0, 0] < 9, lambda x: x @ w, x)

    with pytest.raises(ValueError, match="while_loop multiplies.*lax.scan"):
        jflux.flops(f, X, W)


def test_kernels_of_pallas():
    pallas = pytest.importorskip("jax.experimental.pallas")

    def kernel(x, y):
        y[...] = x[...]

    call = functools.partial(
        pallas.pallas_call, kernel, out_shape=jax.ShapeDtypeStruct((6, 4), jnp.float32)
    )
    estimate = pallas.CostEstimate(flops=11, transcendentals=0, bytes_accessed=0)
    assert jflux.flops(call(cost_estimate=estimate), X) == 11
    with pytest.raises(ValueError, match="cost_estimate"):
        jflux.flops(call(), X)


# ---- jflux's -------------------------------------------------------------------------------------

EACH = each_call(PRODUCTS, lead=(3,), k=8, n=8, dtype=jnp.bfloat16)


def _gradients(f):
    return jax.grad(lambda x, w: jnp.sum(jnp.sin(f(x, w))), (0, 1))


@EACH
@pytest.mark.parametrize(
    "transform",
    [lambda f: f, _gradients, lambda f: lambda x, w: jax.jvp(f, (x, w), (x, w)), jax.checkpoint],
    ids=["plain", "gradients", "jvp", "checkpoint"],
)
def test_ops_count_as_their_references(call, transform):
    """On all ranks together."""
    mesh = make_mesh((RANKS,))
    x, w = operands(call, mesh, "tp")
    numbers = [
        jflux.flops(transform(per_device(mesh, call.bind("tp", module))), x, w)
        for module in (jflux, jflux.reference)
    ]
    assert numbers[0] == numbers[1] > 0
    # One rank's x @ w, of x as it is multiplied.
    k = w.shape[-2]
    rows = call.multiplied_rows(RANKS)
    if transform is jax.checkpoint:
        assert numbers[0] == RANKS * 2 * rows * k * w.shape[-1]


def test_several_weights_and_an_activation():
    mesh = make_mesh((RANKS,))
    x, w = np.ones((RANKS * 2, 4), np.float32), np.ones((4, RANKS), np.float32)

    def f(x, w):
        y = jflux.all_gather_matmul(
            x, (w, w), axis_name="tp", activation="silu", gated=True, mesh=mesh
        )
        return jflux.matmul_reduce_scatter(y, w.T, axis_name="tp", mesh=mesh)

    assert jflux.flops(f, x, w) == 3 * 2 * (RANKS * 2) * 4 * RANKS
    gather = jax.checkpoint_policies.save_anything_except_these_names("jflux_gathered")

    def step(policy):
        def loss(x, w):
            return jnp.sum(jnp.sin(f(x, w)))

        return jax.value_and_grad(jax.checkpoint(loss, policy=policy), (0, 1))

    for policy, times in (
        (jax.checkpoint_policies.everything_saveable, 9),
        (jax.checkpoint_policies.nothing_saveable, 12),
        (gather, 9),  # gathering again is no product
    ):
        assert jflux.flops(step(policy), x, w) == times * 2 * (RANKS * 2) * 4 * RANKS


def test_each_rank_counts_inside_shard_map():
    mesh = make_mesh((2, RANKS // 2), ("dp", "tp"))
    f = jax.shard_map(_dot, mesh=mesh, in_specs=(P("dp"), P()), out_specs=P("dp"))
    assert jflux.flops(f, X, W) == ONE * (RANKS // 2)


def test_forward_mode_of_expert_parallelism():
    """Whose tangents are programs that ask for the sizes of axes. Nothing but the experts
    multiplies."""
    mesh, tokens = make_mesh((RANKS,)), 3
    x, w = jnp.ones((RANKS, tokens, 4)), jnp.ones((RANKS, 4, 4))
    choices = jnp.zeros((RANKS, tokens, 1), jnp.int32)

    def layer(x, w, choices):
        weights = jnp.ones((tokens, 1))
        d = jflux.moe_dispatch(x, choices, weights, num_experts=RANKS, axis_name="tp")
        return jflux.moe_combine(d.rows @ w, d.handle, weights=weights, axis_name="tp")

    f = per_device(mesh, layer)
    one = RANKS * 2 * (RANKS * tokens) * 4 * 4  # any rank may get all tokens
    assert jflux.flops(f, x, w, choices) == one
    for check_vma in (True, False):
        f = per_device(mesh, layer, check_vma=check_vma)
        both = lambda x, w, f=f: jax.jvp(lambda x, w: f(x, w, choices), (x, w), (x, w))  # noqa: E731
        assert jflux.flops(both, x, w) == 3 * one


@pytest.mark.parametrize("gated", [False, True])
def test_grouped_products(gated):
    """Of all rows, as `lax.ragged_dot` has them."""
    x, w = jnp.ones((6, 4)), jnp.ones((3, 4, 4))
    ws, sizes = (w, w) if gated else w, jnp.array([1, 2, 0])

    def f(x, ws):
        return jflux.grouped_matmul(x, ws, sizes, activation="silu", gated=gated)

    def gradients(x, ws):
        return jax.grad(lambda x, ws: jnp.sum(jnp.sin(f(x, ws))), (0, 1))(x, ws)

    assert jflux.flops(f, x, ws) == (1 + gated) * ONE
    assert jflux.flops(gradients, x, ws) == 3 * (1 + gated) * ONE
    batch = jax.vmap(f, (0, None))
    assert jflux.flops(batch, jnp.stack([x] * 5), ws) == 5 * (1 + gated) * ONE


@pytest.mark.parametrize("options", [{"form": "gather"}, {"form": "ring"}, {"layout": "striped"}])
def test_attention_counts_all_pairs(options):
    """Forward two products of each pair, backward five."""
    q, k = jnp.ones((2, 4 * RANKS, 4, 8)), jnp.ones((2, 4 * RANKS, 2, 8))
    sequence = P(None, "tp")
    f = jax.shard_map(
        functools.partial(jflux.attention, axis_name="tp", causal=True, **options),
        mesh=make_mesh((RANKS,)), in_specs=(sequence,) * 3, out_specs=sequence,
    )  # fmt: skip
    product = 2 * 2 * 4 * (4 * RANKS) ** 2 * 8
    assert jflux.flops(f, q, k, k) == 2 * product
    assert jflux.flops(functools.partial(jflux.attention, causal=True), q, k, k) == 2 * product
    gradients = jax.grad(lambda *a: jnp.sum(jnp.sin(f(*a))), (0, 1, 2))
    assert jflux.flops(gradients, q, k, k) == 7 * product


@pytest.mark.parametrize("layout, axes", [(0, (0, 1, 2, 3)), (1, (0, 2, 1, 3))])
def test_attention_of_cudnn(layout, axes):
    """As its primitives are in a program; nothing runs."""
    cudnn = pytest.importorskip("jax._src.cudnn.fused_attention_stablehlo")
    rules = jflux._call.flops._RULES
    q, k = (np.empty(np.array(shape)[[*axes]]) for shape in ((2, 6, 4, 8), (2, 10, 2, 8)))
    for name, products in (("fwd", 2), ("bwd", 5)):
        primitive = getattr(cudnn, f"_dot_product_attention_{name}_p_wrapper")
        rule = rules[primitive.name]
        assert rule([q, k, k], [], {"layout": layout}) == products * 2 * 2 * 6 * 10 * 4 * 8


def test_decoding_counts_the_whole_cache():
    q, cache, lengths = jnp.ones((3, 4, 8)), jnp.ones((3, 2 * RANKS, 2, 8)), jnp.ones(3, int)
    want = 4 * 3 * 4 * 2 * RANKS * 8
    assert jflux.flops(jflux.flash_decode, q, cache, cache, lengths) == want
    own = P(None, "tp")
    f = jax.shard_map(
        functools.partial(jflux.flash_decode, axis_name="tp"), mesh=make_mesh((RANKS,)),
        in_specs=(P(), own, own, P()), out_specs=P(),
    )  # fmt: skip
    assert jflux.flops(f, q, cache, cache, lengths) == want
    pages = cache.reshape(-1, 2, 2, 8)
    table = jnp.arange(3 * RANKS).reshape(3, -1)
    paged = functools.partial(jflux.flash_decode, block_table=table)
    assert jflux.flops(paged, q, pages, pages, lengths) == want


@XLA_COUNTS
def test_tables_of_flax():
    """They ask XLA, which counts references alone, on one device."""
    linen = pytest.importorskip("flax.linen")
    from jflux.nn.linen import MLP

    dtypes = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}
    mlp, x = MLP(hidden_features=8 * RANKS, **dtypes), np.ones((2, 2 * RANKS, 32), jnp.bfloat16)
    table = linen.summary._get_module_table(
        mlp, depth=0, show_repeated=False, compute_flops=True, compute_vjp_flops=False
    )
    with jax.set_mesh(make_mesh((RANKS,))):
        params = mlp.init(jax.random.key(0), x)
        work = jflux.flops(mlp.apply, params, x)
        assert table(jax.random.key(0), x)[0].flops * RANKS < work
        with jflux.config(fused=False):
            plain = table(jax.random.key(0), x)[0].flops
    assert work == 2 * 2 * (2 * 2 * RANKS) * 32 * 8 * RANKS
    assert work <= plain * RANKS < 2 * work


@XLA_COUNTS
def test_what_xla_says_of_a_kernel():
    """Why there is jflux.flops, and what counts in its place in Flax's tables."""
    mesh = make_mesh((RANKS,))
    x, w = np.ones((RANKS * 2, 64), jnp.bfloat16), np.ones((64, RANKS), jnp.bfloat16)
    f = functools.partial(jflux.all_gather_matmul, axis_name="tp", mesh=mesh)
    lowered = jax.jit(f).lower(x, w)
    assert (lowered.cost_analysis() or {}).get("flops", -1) <= 0
    with jflux.config(fused=False):
        plain = jax.jit(lambda x, w: f(x, w)).lower(x, w)
    # One device's, less one for each custom call of XLA's own.
    assert plain.cost_analysis()["flops"] * RANKS == pytest.approx(jflux.flops(f, x, w), rel=0.05)
