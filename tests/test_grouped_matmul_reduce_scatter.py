"""moe.grouped_matmul_reduce_scatter: its kernel on CPUs against each token's sum in float64; which
calls take it; its derivatives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import LATENCY_HIDING, PLATFORM, RANKS, compiled_text, fused_calls, make_mesh
from jax.sharding import PartitionSpec as P
from test_all_gather_grouped_matmul import KINDS, assert_in_steps, check_bad_offsets
from test_all_gather_grouped_matmul import draw as draw_routed

import jflux
from jflux import moe, testing
from jflux._call.plans import Machine, Path
from jflux._ops.experts import all_gather_grouped_matmul, grouped_matmul_reduce_scatter

F, H = 6, 5  # hidden units of each rank, columns of the result
HIDDEN = P(None, "tp")
WORLDS = [n for n in range(1, 9) if n <= RANKS]

pytestmark = pytest.mark.skipif(PLATFORM == "gpu", reason="float64; for GPUs: gathered_gpu.py")


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


def draw(world, tokens, choices, experts, kind="any", seed=0):
    """h, w, weights of the choices, and the experts of each token."""
    rng = np.random.default_rng(seed + 100)
    _, _, chosen = draw_routed(tokens, choices, experts, kind, seed)
    h = rng.normal(size=(tokens * choices, F * world))
    w = rng.normal(size=(experts, F * world, H))
    return h, w, rng.normal(size=(tokens, choices)), chosen


def dense(h, w, weights, chosen):
    """Each token's sum, in numpy."""
    slots = chosen.reshape(-1)
    order = np.argsort(slots, kind="stable")
    order = order[slots[order] >= 0]
    out = np.zeros((len(chosen), H))
    for row, slot in enumerate(order):
        token, j = divmod(slot, chosen.shape[1])
        out[token] += weights[token, j] * (h[row] @ w[slots[slot]])
    return out


def per_rank(world, experts, mesh=None, **options):
    """(h, w, weights, chosen) -> the sums, over so many ranks."""
    turned = options.get("transpose_rhs", False)

    def body(h, w, weights, chosen):
        routing = moe.route(chosen, experts)
        return moe.grouped_matmul_reduce_scatter(h, w, routing, weights, axis_name="tp", **options)

    return jax.shard_map(
        body, mesh=mesh or make_mesh((world,)),
        in_specs=(HIDDEN, P(None, None, "tp") if turned else HIDDEN, P(), P()),
        out_specs=P("tp"),
    )  # fmt: skip


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("kind", KINDS)
def test_values(world, kind):
    args = draw(world, 5 * world, 3, 4, kind, world)
    if kind == "dropped":  # a weight of a slot without a row does not count
        args[2][args[3] < 0] = np.nan
    f = jax.jit(per_rank(world, 4))
    np.testing.assert_allclose(f(*args), dense(*args), atol=1e-11)


@pytest.mark.parametrize("turned", [False, True])
def test_many_tokens_and_transposed_weights(turned):
    world = min(2, RANKS)
    h, w, weights, chosen = draw(world, 300 * world, 2, 3, "dropped")  # several tiles, many items
    f = jax.jit(per_rank(world, 3, transpose_rhs=turned))
    given = w.swapaxes(1, 2) if turned else w
    np.testing.assert_allclose(
        f(h, given, weights, chosen), dense(h, w, weights, chosen), atol=1e-11
    )


@pytest.mark.parametrize("dtype, out", [(jnp.bfloat16, None), (jnp.float16, jnp.float32)])
def test_half_precision_and_bits(dtype, out):
    world = min(4, RANKS)
    h, w, weights, chosen = draw(world, 8 * world, 2, 4)
    h, w = (jnp.asarray(a, dtype) for a in (h, w))
    weights = jnp.asarray(weights, jnp.float32)
    f = jax.jit(per_rank(world, 4, preferred_element_type=out))
    y = f(h, w, weights, chosen)
    assert y.dtype == (out or dtype)
    want = dense(*(np.asarray(a, np.float64) for a in (h, w, weights)), chosen)
    np.testing.assert_allclose(np.asarray(y, np.float64), want, atol=1e-4 if out else 0.15)
    with testing.planted_faults(max_delay_us=3000):
        for _ in range(4):
            assert np.asarray(f(h, w, weights, chosen)).tobytes() == np.asarray(y).tobytes()
    with jflux.config(fused=False):
        steps = jax.jit(per_rank(world, 4, preferred_element_type=out))(h, w, weights, chosen)
    bound = 1e-5 if out else 0.1
    np.testing.assert_allclose(y.astype(float), steps.astype(float), atol=bound)


def test_late_ranks_and_other_routings_of_one_program():
    world = min(4, RANKS)
    f = jax.jit(per_rank(world, 4))
    with testing.planted_faults(max_delay_us=3000):
        for seed, kind in enumerate(KINDS * 3):
            args = draw(world, 6 * world, 2, 4, kind, seed)
            testing.poison_workspaces()
            np.testing.assert_allclose(f(*args), dense(*args), atol=1e-11)


def test_waits_that_are_left_out_show():
    world = min(4, RANKS)
    if world == 1:
        pytest.skip("one rank waits for nobody")
    f = jax.jit(per_rank(world, 4))
    wrong = 0
    with testing.planted_faults(skip_waits=True, max_delay_us=20_000):
        for seed in range(6):
            args = draw(world, 6 * world, 2, 4, seed=seed)
            testing.poison_workspaces()
            wrong += not np.allclose(np.asarray(f(*args)), dense(*args), atol=1e-11)
    assert wrong > 0


def test_a_scan_has_another_routing_in_each_step():
    world = min(4, RANKS)
    steps = [draw(world, 4 * world, 2, 3, kind, seed) for seed, kind in enumerate(KINDS)]
    h, w, weights, chosen = (np.stack(each) for each in zip(*steps, strict=True))

    def body(h, w, weights, chosen):
        def step(carry, each):
            *given, chosen = each
            routing = moe.route(chosen, 3)
            h, w, weights = given
            return carry, moe.grouped_matmul_reduce_scatter(h, w, routing, weights, axis_name="tp")

        return jax.lax.scan(step, 0, (h, w, weights, chosen))[1]

    f = jax.shard_map(
        body, mesh=make_mesh((world,)),
        in_specs=(P(None, None, "tp"), P(None, None, "tp"), P(), P()), out_specs=P(None, "tp"),
    )  # fmt: skip
    out = jax.jit(f, compiler_options=LATENCY_HIDING)(h, w, weights, chosen)
    for i, step in enumerate(steps):
        np.testing.assert_allclose(out[i], dense(*step), atol=1e-11)


def test_two_groups_side_by_side():
    if RANKS < 4:
        pytest.skip("4 ranks")
    groups = [draw(2, 10, 2, 4, seed=seed) for seed in range(2)]
    args = [np.stack(each) for each in zip(*groups, strict=True)]

    def body(h, w, weights, chosen):
        routing = moe.route(chosen[0], 4)
        return moe.grouped_matmul_reduce_scatter(h[0], w[0], routing, weights[0], axis_name="tp")[
            None
        ]

    f = jax.shard_map(
        body, mesh=make_mesh((2, 2), ("dp", "tp")),
        in_specs=(P("dp", None, "tp"), P("dp", None, "tp"), P("dp"), P("dp")),
        out_specs=P("dp", "tp"),
    )  # fmt: skip
    out = jax.jit(f)(*args)
    for i in range(2):
        np.testing.assert_allclose(out[i], dense(*groups[i]), atol=1e-11)


@pytest.mark.parametrize("turned", [False, True])
def test_derivatives_are_those_of_the_two_steps(turned):
    world = min(4, RANKS)
    h, w, weights, chosen = draw(world, 6 * world, 2, 4, "dropped")
    w = w.swapaxes(1, 2) if turned else w
    f = per_rank(world, 4, transpose_rhs=turned)
    rng = np.random.default_rng(5)
    dout = rng.normal(size=(len(chosen), H))
    primals = tuple(map(jnp.asarray, (h, w, weights)))
    moved = tuple(jnp.asarray(rng.normal(size=a.shape)) for a in primals)

    def everything(*primals):
        out, pull = jax.vjp(lambda *a: f(*a, chosen), *primals)
        _, tangent = jax.jvp(lambda *a: f(*a, chosen), primals, moved)
        _, of_weights = jax.jvp(lambda a: f(*primals[:2], a, chosen), primals[2:], moved[2:])

        def norm(*primals):
            grads = jax.grad(lambda *a: jnp.sum(jnp.sin(f(*a, chosen))), (0, 1, 2))(*primals)
            return sum(jnp.sum(g**2) for g in grads)

        return out, pull(dout), tangent, of_weights, jax.grad(norm, (0, 1, 2))(*primals)

    found = jax.jit(everything)(*primals)
    with jflux.config(fused=False):
        wanted = jax.jit(everything)(*primals)
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("at", [0, 1, 2])
def test_it_is_linear_in_each_operand(at):
    world = min(2, RANKS)
    h, w, weights, chosen = draw(world, 4 * world, 2, 3)
    primals = list(map(jnp.asarray, (h, w, weights)))
    f = per_rank(world, 3)

    def of_one(a):
        return f(*primals[:at], a, *primals[at + 1 :], chosen)

    dout = jnp.asarray(np.random.default_rng(2).normal(size=(len(chosen), H)))
    (found,) = jax.linear_transpose(of_one, primals[at])(dout)
    (wanted,) = jax.vjp(of_one, primals[at])[1](dout)
    np.testing.assert_allclose(found, wanted, atol=1e-12)


def test_batches_and_remat():
    world = min(2, RANKS)
    h, w, weights, chosen = draw(world, 6 * world, 2, 4)
    hs = np.stack([h, 2 * h, -h])

    def body(hs, w, weights, chosen):
        routing = moe.route(chosen, 4)

        @jax.checkpoint
        def one(h):
            return moe.grouped_matmul_reduce_scatter(h, w, routing, weights, axis_name="tp")

        return jax.vmap(one)(hs)

    f = jax.shard_map(
        body, mesh=make_mesh((world,)), in_specs=(P(None, None, "tp"), HIDDEN, P(), P()),
        out_specs=P(None, "tp"),
    )  # fmt: skip
    out, pull = jax.vjp(jax.jit(lambda hs: f(hs, w, weights, chosen)), hs)
    for i in range(3):
        np.testing.assert_allclose(out[i], dense(hs[i], w, weights, chosen), atol=1e-11)
    (dhs,) = pull(out)
    assert dhs.shape == hs.shape and np.isfinite(dhs).all()


def test_one_kernel_and_what_explain_says():
    world = min(2, RANKS)
    if world == 1:
        pytest.skip("one rank takes two steps")
    args = draw(world, 6 * world, 2, 4)
    f = per_rank(world, 4)
    assert grouped_matmul_reduce_scatter.OP in fused_calls(compiled_text(f, *args))
    report = str(jflux.explain(f, *args))
    assert (
        grouped_matmul_reduce_scatter.OP in report
        and "one kernel multiplies, sums and scatters" in report
    )
    with jflux.config(fused=False):
        assert grouped_matmul_reduce_scatter.OP not in fused_calls(compiled_text(f, *args))


def test_it_is_the_gradient_of_its_mirror():
    world = min(2, RANKS)
    if world == 1:
        pytest.skip("one rank takes two steps")
    x = np.random.default_rng(3).normal(size=(6 * world, 4))
    _, w, _, chosen = draw(world, 6 * world, 2, 4)

    def body(x, w, chosen):
        routing = moe.route(chosen, 4)
        return moe.all_gather_grouped_matmul(x, w, routing, axis_name="tp", transpose_rhs=True)

    def gradient(x, w):
        f = jax.shard_map(
            body, mesh=make_mesh((world,)), in_specs=(P("tp"), HIDDEN, P()), out_specs=HIDDEN
        )
        return jax.grad(lambda x: jnp.sum(f(x, w, chosen) ** 2))(x)

    w = np.random.default_rng(4).normal(size=(4, F * world, 4))
    assert {all_gather_grouped_matmul.OP, grouped_matmul_reduce_scatter.OP} <= set(
        fused_calls(compiled_text(gradient, x, w))
    )


def plan_on_gpus(tokens, experts, choices=2, k=1024, n=1024, world=2, dtype="bfloat16",
                 always=False):  # fmt: skip
    """The plan of a call on H200s."""
    dtype = jnp.dtype(dtype)
    params = grouped_matmul_reduce_scatter.Params(("tp",), world, False, dtype)
    slots = (world * tokens, choices)
    arrays = [
        jax.ShapeDtypeStruct(shape, kind)
        for shape, kind in (
            ((world * tokens * choices, k), dtype), ((experts, k, n), dtype),
            (slots, jnp.float32), ((experts + 1,), jnp.int32), (slots, jnp.int32),
            ((world * tokens * choices,), jnp.int32),
        )
    ]  # fmt: skip
    with jflux.config(always=always):
        return grouped_matmul_reduce_scatter._op.plan(
            arrays, params, Machine("cuda", 132, 320.0, 1 << 32)
        )


def test_plans_on_gpus():
    many = plan_on_gpus(4096, 8)
    assert many.path == Path.FUSED
    assert many.config["parts"] == 2 and many.config["item_tokens"] == 4
    assert "peers' tokens first" in many.reason
    assert_in_steps(
        (plan_on_gpus(4096, 8, k=760), "760 units"),
        (plan_on_gpus(64, 8), "few rows, 16 of each rank"),
        (plan_on_gpus(16384, 128, 8, world=8), "128 experts times 8 ranks are more than 767"),
        (plan_on_gpus(4096, 8, world=1), "one rank"),
        (plan_on_gpus(4096, 8, n=516), "multiples of 8"),
        (plan_on_gpus(4096, 8, dtype="float32"), "float32"),
        (plan_on_gpus(4096, 3000), "groups"),
        (plan_on_gpus(1 << 18, 8, n=8192), "more than a third"),
    )
    assert plan_on_gpus(64, 8, always=True).path == Path.FUSED
    assert plan_on_gpus(4096, 8, k=64, always=True).path == Path.FUSED
    assert plan_on_gpus(4096, 8, world=1, always=True).path == Path.FUSED


def test_wrong_operands_are_refused():
    world = min(2, RANKS)
    h, w, weights, chosen = draw(world, 4 * world, 2, 4)
    f = per_rank(world, 4)
    with pytest.raises(ValueError, match="must have a row for each"):
        jax.eval_shape(f, h[:-1], w, weights, chosen)
    with pytest.raises(ValueError, match="weights have shape"):
        jax.eval_shape(f, h, w, weights[:, :1], chosen)
    with pytest.raises(ValueError, match="columns"):
        jax.eval_shape(f, h, w[:, : F * world - world], weights, chosen)
    if world > 1:
        with pytest.raises(ValueError, match="a multiple of 2 tokens"):
            jax.eval_shape(f, h[:6], w, weights[:3], chosen[:3])
    with pytest.raises(NameError):
        moe.grouped_matmul_reduce_scatter(h, w, moe.route(chosen, 4), axis_name="tp")


def test_offsets_that_make_no_sense_are_an_error():
    world = min(2, RANKS)
    if world == 1:
        pytest.skip("one rank takes two steps")
    h, w, weights, chosen = draw(world, 4 * world, 2, 4)

    def body(h, w, routing, bad):
        routing = routing._replace(offsets=bad)
        return moe.grouped_matmul_reduce_scatter(h, w, routing, axis_name="tp")

    f = jax.shard_map(
        body, mesh=make_mesh((world,)), in_specs=(HIDDEN, HIDDEN, P(), P()), out_specs=P("tp")
    )
    check_bad_offsets(f, h, w, chosen)


def test_no_tokens_and_no_columns():
    world = min(2, RANKS)
    h, w, weights, chosen = draw(world, 4 * world, 2, 4)
    f = jax.jit(per_rank(world, 4))
    assert f(h[:0], w, weights[:0], chosen[:0]).shape == (0, H)
    assert f(h, w[:, :, :0], weights, chosen).shape == (4 * world, 0)
