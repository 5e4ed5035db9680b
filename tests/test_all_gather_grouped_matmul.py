"""moe.all_gather_grouped_matmul: its kernel on CPUs against each row's product in float64; which
calls take it; its derivatives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import PLATFORM, RANKS, compiled_text, fused_calls, make_mesh
from jax.sharding import PartitionSpec as P

import jflux
from jflux import moe, testing
from jflux._call.plans import Machine, Path
from jflux._ops._epilogue import ACTIVATIONS
from jflux._ops.experts import all_gather_grouped_matmul

D, F = 6, 8
COLUMNS = P(None, None, "tp")
WORLDS = [n for n in range(1, 9) if n <= RANKS]

pytestmark = pytest.mark.skipif(PLATFORM == "gpu", reason="float64; for GPUs: gathered_gpu.py")


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


def draw(tokens, choices, experts, kind="any", seed=0):
    """x, two weights and the experts of each token."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(tokens, D))
    ws = [rng.normal(size=(experts, D, F)) for _ in range(2)]
    chosen = rng.integers(0, experts, (tokens, choices), dtype=np.int32)
    if kind == "dropped":
        chosen[rng.random(chosen.shape) < 0.4] = -1
    elif kind == "one":
        chosen[:] = experts - 1
    elif kind == "none":
        chosen[:] = -1
    elif kind == "first rank":
        chosen[tokens // 2 :] = -1
    elif kind == "few":
        chosen %= 2
    return x, ws, chosen


KINDS = ("any", "dropped", "one", "none", "first rank", "few")


def dense(x, ws, chosen, activation=None):
    """Rows in the order of experts, in numpy; rows that no slot has are zeros."""
    slots = chosen.reshape(-1)
    order = np.argsort(slots, kind="stable")
    order = order[slots[order] >= 0]
    y = np.zeros((slots.size, F))
    for row, slot in enumerate(order):
        products = [x[slot // chosen.shape[1]] @ w[slots[slot]] for w in ws]
        y[row] = products[0] if activation is None else ACTIVATIONS[activation](products[0])
        if len(products) == 2:
            y[row] *= products[1]
    return y


def per_rank(world, experts, count, mesh=None, **options):
    """(x, weights, chosen) -> y, over so many ranks."""

    def body(x, ws, chosen):
        routing = moe.route(chosen, experts)
        w = ws if count == 2 else ws[0]
        return moe.all_gather_grouped_matmul(x, w, routing, axis_name="tp", **options)

    turned = options.get("transpose_rhs", False)
    return jax.shard_map(
        body, mesh=mesh or make_mesh((world,)),
        in_specs=(P("tp"), [P(None, "tp") if turned else COLUMNS] * count, P()),
        out_specs=P(None, "tp"),
    )  # fmt: skip


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("kind", KINDS)
def test_values(world, kind):
    # F / N columns of each rank: 8 ranks have one each. An odd number of tokens on each.
    if F % world:
        pytest.skip(f"{F} columns over {world} ranks")
    x, ws, chosen = draw(5 * world, 2, 4, kind, world)
    f = jax.jit(per_rank(world, 4, 1))
    np.testing.assert_allclose(f(x, ws[:1], chosen), dense(x, ws[:1], chosen), atol=1e-12)


@pytest.mark.parametrize("world", [n for n in (3, 5, 6, 7) if n <= RANKS])
def test_numbers_of_ranks_that_are_no_powers_of_two(world):
    x, ws, chosen = draw(3 * world, 3, 5, "dropped", world)
    wide = [np.concatenate([w] * world, -1) for w in ws[:1]]
    f = jax.jit(per_rank(world, 5, 1))
    want = np.concatenate([dense(x, ws[:1], chosen)] * world, -1)
    np.testing.assert_allclose(f(x, wide, chosen), want, atol=1e-12)


@pytest.mark.parametrize("activation, gated", [("silu", True), ("gelu_tanh", False), (None, False)])
@pytest.mark.parametrize("turned", [False, True])
def test_epilogues_and_transposed_weights(activation, gated, turned):
    world, count = min(2, RANKS), 1 + gated
    x, ws, chosen = draw(300 * world, 2, 3, "dropped")  # several tiles of each expert
    options = dict(activation=activation, gated=gated, transpose_rhs=turned)
    f = jax.jit(per_rank(world, 3, count, **options))
    given = [w.swapaxes(1, 2) if turned else w for w in ws[:count]]
    want = dense(x, ws[:count], chosen, activation)
    np.testing.assert_allclose(f(x, given, chosen), want, atol=1e-12)


@pytest.mark.parametrize("dtype, out", [(jnp.bfloat16, None), (jnp.float16, jnp.float32)])
def test_half_precision(dtype, out):
    world = min(4, RANKS)
    x, ws, chosen = draw(8 * world, 2, 4)
    x, w = (jnp.asarray(a, dtype) for a in (x, ws[0]))
    y = jax.jit(per_rank(world, 4, 1, preferred_element_type=out))(x, [w], chosen)
    assert y.dtype == (out or dtype)
    want = dense(np.asarray(x, np.float64), [np.asarray(w, np.float64)], chosen)
    np.testing.assert_allclose(np.asarray(y, np.float64), want, atol=1e-5 if out else 0.05)


def test_late_ranks_and_other_routings_of_one_program():
    world = min(4, RANKS)
    f = jax.jit(per_rank(world, 4, 1))
    with testing.planted_faults(max_delay_us=3000):
        for seed, kind in enumerate(KINDS * 3):
            x, ws, chosen = draw(6 * world, 2, 4, kind, seed)
            np.testing.assert_allclose(f(x, ws[:1], chosen), dense(x, ws[:1], chosen), atol=1e-12)


def test_waits_that_are_left_out_show():
    world = min(4, RANKS)
    if world == 1:
        pytest.skip("one rank waits for nobody")
    f = jax.jit(per_rank(world, 4, 1))
    wrong = 0
    with testing.planted_faults(skip_waits=True, max_delay_us=20_000):
        for seed in range(6):
            x, ws, chosen = draw(6 * world, 2, 4, seed=seed)
            testing.poison_workspaces()
            y = np.asarray(f(x, ws[:1], chosen))
            wrong += not np.allclose(y, dense(x, ws[:1], chosen), atol=1e-12)
    assert wrong > 0


def test_two_groups_side_by_side():
    if RANKS < 4:
        pytest.skip("4 ranks")
    mesh = make_mesh((2, 2), ("dp", "tp"))

    def body(x, w, chosen):
        routing = moe.route(chosen[0], 4)
        return moe.all_gather_grouped_matmul(x[0], w, routing, axis_name="tp")[None]

    f = jax.shard_map(
        body, mesh=mesh, in_specs=(P("dp", "tp"), COLUMNS, P("dp")), out_specs=P("dp", None, "tp")
    )
    groups = [draw(10, 2, 4, seed=seed) for seed in range(2)]
    x, chosen = (np.stack([group[i] for group in groups]) for i in (0, 2))
    w = groups[0][1][0]
    y = jax.jit(f)(x, w, chosen)
    for i in range(2):
        np.testing.assert_allclose(y[i], dense(x[i], [w], chosen[i]), atol=1e-12)


@pytest.mark.parametrize("activation, gated", [(None, False), ("silu", True), ("relu", False)])
def test_derivatives_are_those_of_the_two_steps(activation, gated):
    world, count = min(4, RANKS), 1 + gated
    x, ws, chosen = draw(6 * world, 2, 4, "dropped")
    ws = ws[:count]
    f = per_rank(world, 4, count, activation=activation, gated=gated)
    rng = np.random.default_rng(5)
    dy = rng.normal(size=(chosen.size, F))
    moved = jax.tree.map(lambda a: jnp.asarray(rng.normal(size=a.shape)), (x, ws))

    def everything(x, ws):
        y, pull = jax.vjp(lambda x, ws: f(x, ws, chosen), x, ws)
        _, tangent = jax.jvp(lambda x, ws: f(x, ws, chosen), (x, ws), moved)

        def norm(x, ws):
            grads = jax.grad(lambda x, ws: jnp.sum(jnp.sin(f(x, ws, chosen))), (0, 1))(x, ws)
            return sum(jnp.sum(g**2) for g in jax.tree.leaves(grads))

        return y, pull(dy), tangent, jax.grad(norm, (0, 1))(x, ws)

    found = jax.jit(everything)(x, ws)
    with jflux.config(fused=False):
        wanted = jax.jit(everything)(x, ws)
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-9)


def test_batches_and_remat():
    world = min(2, RANKS)
    x, ws, chosen = draw(6 * world, 2, 4)
    xs = np.stack([x, 2 * x, -x])

    def body(xs, w, chosen):
        routing = moe.route(chosen, 4)

        @jax.checkpoint
        def one(x):
            return moe.all_gather_grouped_matmul(x, w, routing, axis_name="tp", activation="silu")

        return jax.vmap(one)(xs)

    f = jax.shard_map(
        body, mesh=make_mesh((world,)), in_specs=(P(None, "tp"), COLUMNS, P()),
        out_specs=P(None, None, "tp"),
    )  # fmt: skip
    y, pull = jax.vjp(jax.jit(lambda xs: f(xs, ws[0], chosen)), xs)
    for i in range(3):
        np.testing.assert_allclose(y[i], dense(xs[i], ws[:1], chosen, "silu"), atol=1e-12)
    (dxs,) = pull(y)
    token = np.asarray(moe.route(chosen, 4).source) // 2
    w = ws[0][np.sort(chosen.reshape(-1))]  # of each row

    def plain(xs):
        return ACTIVATIONS["silu"](jnp.einsum("brd,rdf->brf", xs[:, token], w))

    np.testing.assert_allclose(dxs, jax.vjp(plain, xs)[1](y)[0], atol=1e-11)


def test_one_kernel_and_what_explain_says():
    world = min(2, RANKS)
    x, ws, chosen = draw(6 * world, 2, 4)
    f = per_rank(world, 4, 1)
    assert all_gather_grouped_matmul.OP in fused_calls(compiled_text(f, x, ws[:1], chosen))
    report = jflux.explain(f, x, ws[:1], chosen)
    assert all_gather_grouped_matmul.OP in str(report)
    assert "one kernel gathers and multiplies" in str(report)
    with jflux.config(fused=False):
        assert all_gather_grouped_matmul.OP not in fused_calls(compiled_text(f, x, ws[:1], chosen))


def plan_on_gpus(tokens, experts, choices=2, k=512, n=1024, world=2, gated=False, dtype="bfloat16",
                 out=None, always=False):  # fmt: skip
    """The plan of a call on H200s."""
    dtype = jnp.dtype(dtype)
    params = all_gather_grouped_matmul.Params(
        ("tp",), world, False, jnp.dtype(out or dtype), "silu" if gated else None, gated
    )
    arrays = [
        jax.ShapeDtypeStruct(shape, kind)
        for shape, kind in (
            ((tokens, k), dtype), *[((experts, k, n), dtype)] * params.weights,
            ((experts + 1,), jnp.int32), ((world * tokens, choices), jnp.int32),
            ((world * tokens * choices,), jnp.int32),
        )
    ]  # fmt: skip
    with jflux.config(always=always):
        return all_gather_grouped_matmul._op.plan(
            arrays, params, Machine("cuda", 132, 320.0, 1 << 32)
        )


def assert_in_steps(*plans):
    """Pairs of a plan and what its reason says."""
    for plan, why in plans:
        assert plan.path == Path.DECOMPOSED and not plan.unsupported, plan
        assert why in plan.reason, plan


def test_plans_on_gpus():
    many = plan_on_gpus(4096, 8)
    assert many.path == Path.FUSED and many.config["parts"] == 4
    assert "own tokens first" in many.reason
    assert plan_on_gpus(4096, 8, gated=True).config["tile_n"] in (128, 256)
    assert plan_on_gpus(4096, 8, world=1).path == Path.FUSED
    assert_in_steps(
        (plan_on_gpus(4096, 8, n=2056), "of 2056 columns"),
        (plan_on_gpus(4096, 8, n=1032, gated=True), "of 2064 columns"),
        (plan_on_gpus(64, 8), "few rows, 16 of each rank"),
        (plan_on_gpus(480, 8), "few rows, 120 of each rank"),
        (plan_on_gpus(4096, 8, k=516), "multiples of 8"),
        (plan_on_gpus(4096, 8, dtype="float32"), "float32"),
        (plan_on_gpus(4096, 3000), "groups"),
        (plan_on_gpus(1 << 18, 8, k=8192), "more than a third; jflux.init(heap_bytes=...)"),
    )
    assert plan_on_gpus(64, 8, always=True).path == Path.FUSED
    waits = plan_on_gpus(512, 8)
    assert waits.path == Path.FUSED and waits.config["parts"] == 0
    assert "in the order of experts, since experts have few rows, 128 of each" in waits.reason
    waits = plan_on_gpus(16384, 512, 8, k=2048, n=192, world=8)  # 256 rows of each
    assert waits.path == Path.FUSED and waits.config["parts"] == 0
    assert "512 experts times 8 ranks are more than 2048" in waits.reason
    # Qwen3-235B-A22B on eight GPUs, and as many experts as DeepSeek-V3's: 512 rows from each.
    for tokens, experts, k, n in ((8192, 128, 4096, 192), (16384, 256, 2048, 256)):
        many = plan_on_gpus(tokens, experts, 8, k=k, n=n, world=8, gated=True)
        assert many.path == Path.FUSED and many.config["parts"] == 1
    few = plan_on_gpus(8184, 128, 8, k=4096, n=192, world=8, gated=True)
    assert few.path == Path.FUSED and few.config["parts"] == 0
    # Qwen3-30B-A3B on four GPUs.
    assert plan_on_gpus(2048, 128, 8, k=2048, n=192, world=4, gated=True).path == Path.FUSED
    assert plan_on_gpus(4096, 8, n=4096, always=True).path == Path.FUSED


def test_wrong_operands_are_refused():
    x, ws, chosen = draw(8, 2, 4)
    f = per_rank(min(2, RANKS), 4, 1)
    with pytest.raises(ValueError, match="has 5 columns"):
        jax.eval_shape(f, x[:, :5], ws[:1], chosen)
    with pytest.raises(ValueError, match="it must be of 8 tokens"):
        jax.eval_shape(f, x, ws[:1], chosen[:6])
    with pytest.raises(NameError):
        moe.all_gather_grouped_matmul(x, ws[0], moe.route(chosen, 4), axis_name="tp")


def check_bad_offsets(f, x, w, chosen):
    """f(x, w, routing, offsets) refuses offsets that make no sense."""
    bad = np.array([0, 5, 3, 9, 16], np.int32)
    with pytest.raises(Exception, match=r"group_sizes\[1\] is -2"):
        jax.block_until_ready(jax.jit(f)(x, w, moe.route(chosen, 4), bad))


def test_offsets_that_make_no_sense_are_an_error():
    world = min(2, RANKS)
    if world == 1:
        pytest.skip("one rank takes two steps")
    x, ws, chosen = draw(4 * world, 2, 4)

    def body(x, w, routing, bad):
        routing = routing._replace(offsets=bad)
        return moe.all_gather_grouped_matmul(x, w, routing, axis_name="tp")

    f = jax.shard_map(
        body, mesh=make_mesh((world,)), in_specs=(P("tp"), COLUMNS, P(), P()),
        out_specs=P(None, "tp"),
    )  # fmt: skip
    check_bad_offsets(f, x, ws[0], chosen)


def test_no_tokens_and_no_columns():
    world = min(2, RANKS)
    x, ws, chosen = draw(4 * world, 2, 4)
    f = jax.jit(per_rank(world, 4, 1))
    assert f(x[:0], ws[:1], chosen[:0]).shape == (0, F)
    assert f(x[:, :0], [ws[0][:, :0]], chosen).shape == (chosen.size, F)
