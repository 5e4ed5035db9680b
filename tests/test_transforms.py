"""A layer of two ops under grad, scan, while_loop, cond, checkpoint and donation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import PLATFORM, RANKS, compiled_text, dots, exact_vjp, fused_calls, make_mesh, run
from jax import lax
from jax.sharding import PartitionSpec as P
from layers import (
    LAYER_SPECS,
    VMA,
    assert_near,
    check_product,
    in_float64,
    layer_operands,
    mlp_layer,
)

from jflux._stress.calls import Call, assert_close, exact, normal, operands, per_device

GATHER = Call("all_gather_matmul", lead=(3,), k=8, n=6, dtype=jnp.bfloat16)
SCATTER = Call("matmul_reduce_scatter", lead=(3,), k=8, n=6, dtype=jnp.bfloat16)


# ---- Derivatives ---------------------------------------------------------------------------------


@VMA
@pytest.mark.parametrize("transform", ["grad", "value_and_grad", "vjp"])
def test_layer_gradients(check_vma, transform):
    mesh = make_mesh((RANKS,))
    args = layer_operands()
    f = jax.shard_map(
        mlp_layer, mesh=mesh, in_specs=LAYER_SPECS, out_specs=P("tp"), check_vma=check_vma
    )

    def loss(f, *args):
        return jnp.sum(jnp.sin(f(*args).astype(jnp.promote_types(args[0].dtype, jnp.float32))))

    def take(f, *args):
        numbers = (0, 1, 2)
        if transform == "grad":
            return jax.grad(functools.partial(loss, f), numbers)(*args)
        if transform == "value_and_grad":
            return jax.value_and_grad(functools.partial(loss, f), numbers)(*args)
        y, pull = jax.vjp(f, *args)
        return y, pull(jnp.cos(y))

    got = run(jax.jit(functools.partial(take, f)), *args)
    want = in_float64(functools.partial(take, lambda x, w1, w2: jnp.tanh(x @ w1) @ w2), *args)
    assert_near(got, want)


@pytest.mark.skipif(PLATFORM != "cpu", reason="float32 takes the reference")
def test_second_derivatives():
    """Reverse over reverse: the gradient of a squared gradient."""
    mesh = make_mesh((RANKS,))
    args = layer_operands(dtype=np.float32)
    f = jax.shard_map(mlp_layer, mesh=mesh, in_specs=LAYER_SPECS, out_specs=P("tp"))

    def outer(f, *args):
        def inner(x, w1, w2):
            return jnp.sum(jnp.sin(f(x, w1, w2)))

        return jax.grad(lambda *a: sum(jnp.sum(g**2) for g in jax.grad(inner, (0, 1, 2))(*a)))(
            *args
        )

    got = run(jax.jit(functools.partial(outer, f)), *args)
    want = in_float64(functools.partial(outer, lambda x, w1, w2: jnp.tanh(x @ w1) @ w2), *args)
    assert_near(got, want, np.float32, roundings=200)


# ---- Control flow --------------------------------------------------------------------------------


def check_scan(layer, layers, check_vma=True):
    """Values and gradients of a scan over layers."""
    x, w1, w2 = layer_operands(layers=layers)

    def model(layer, x, w1, w2):
        return lax.scan(lambda h, ws: (h + layer(h, *ws), None), x, (w1, w2))[0]

    f = jax.shard_map(
        functools.partial(model, layer),
        mesh=make_mesh((RANKS,)), in_specs=(P("tp"), P(None, None, "tp"), P(None, "tp")),
        out_specs=P("tp"), check_vma=check_vma,
    )  # fmt: skip

    def step(f, x, w1, w2):
        y, pull = jax.vjp(f, x, w1, w2)
        return y, pull(y)

    got = run(jax.jit(functools.partial(step, f)), x, w1, w2)
    plain = functools.partial(model, lambda x, w1, w2: jnp.tanh(x @ w1) @ w2)
    assert_near(got, in_float64(functools.partial(step, plain), x, w1, w2), roundings=60)


@VMA
def test_scan_over_layers_and_its_gradient(check_vma):
    check_scan(mlp_layer, layers=5, check_vma=check_vma)


@VMA
def test_while_loop_with_a_predicate_that_all_ranks_share(check_vma):
    mesh = make_mesh((RANKS,))
    args = layer_operands()

    def model(layer, total, x, w1, w2):
        def again(state):
            return (state[0] < 7) & (state[2] < 1e9)

        def body(state):
            i, x, _ = state
            x = x + layer(x, w1, w2)
            return i + 1, x, total(jnp.sum(x.astype(jnp.float32) ** 2))

        start = jnp.zeros((), jnp.float32)
        return lax.while_loop(again, body, (0, x, start))[1]

    f = jax.shard_map(
        functools.partial(model, mlp_layer, lambda s: lax.psum(s, "tp")),
        mesh=mesh, in_specs=LAYER_SPECS, out_specs=P("tp"), check_vma=check_vma,
    )  # fmt: skip
    plain = functools.partial(model, lambda x, w1, w2: jnp.tanh(x @ w1) @ w2, lambda s: s)
    assert_near(run(jax.jit(f), *args), in_float64(plain, *args), roundings=60)


@VMA
@pytest.mark.parametrize("predicate", [True, False])
def test_cond_with_a_predicate_that_all_ranks_share(check_vma, predicate):
    """Another op, and another shape, in each branch; and the gradient through it."""
    mesh = make_mesh((RANKS,))
    args = layer_operands()

    def sharded(flag, x, w1, w2):
        def no(x, w1, w2):
            return 2 * mlp_layer(x[:, ::-1], w1, w2)

        return lax.cond(flag, mlp_layer, no, x, w1, w2)

    def plain(flag, x, w1, w2):
        def layer(x, w1, w2):
            return jnp.tanh(x @ w1) @ w2

        return lax.cond(flag, layer, lambda x, *w: 2 * layer(x[:, ::-1], *w), x, w1, w2)

    f = jax.shard_map(
        sharded, mesh=mesh, in_specs=(P(), *LAYER_SPECS), out_specs=P("tp"), check_vma=check_vma
    )

    def step(f, x, w1, w2):
        y, pull = jax.vjp(functools.partial(f, jnp.asarray(predicate)), x, w1, w2)
        return y, pull(y)

    got = run(jax.jit(functools.partial(step, f)), *args)
    assert_near(got, in_float64(functools.partial(step, plain), *args))


def test_loop_with_calls_of_several_trip_counts():
    """Two loops, one inside the other, over the same inner jit: many calls of one site."""
    mesh = make_mesh((RANKS,))
    call = Call("all_gather_matmul", lead=(2,), k=4, n=4, dtype=jnp.bfloat16)
    inner = jax.jit(call.bind("tp"))

    def body(x, w):
        def outer(total, i):
            def add(j, total):
                return total + inner((x * (i + j)).astype(x.dtype), w).astype(jnp.float32)

            return lax.fori_loop(0, 3, add, total), inner(x * i.astype(x.dtype), w)

        zero = inner(x * 0, w).astype(jnp.float32)
        total, each = lax.scan(outer, zero, jnp.arange(4.0))
        return total, each, inner(x, w)

    x, w = operands(call, mesh, "tp")
    total, each, last = run(jax.jit(per_device(mesh, body)), x, w)
    check_product(last, call, mesh, x, w)
    for i in range(4):
        want = exact(call, mesh, "tp", (x * np.asarray(i, x.dtype)), w)
        scale = exact(call, mesh, "tp", abs(x * np.asarray(i, x.dtype)), abs(w))
        assert_close(each[:, i], want, scale, call.dtype, 4)
    pairs = sum(i + j for i in range(4) for j in range(3))
    want = pairs * exact(call, mesh, "tp", x, w)
    scale = pairs * exact(call, mesh, "tp", abs(x), abs(w))
    assert_close(total, want, scale, call.dtype, 4, factor=2)


# ---- checkpoint ----------------------------------------------------------------------------------

POLICIES = {
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "everything": jax.checkpoint_policies.everything_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
    "gathered": jax.checkpoint_policies.save_only_these_names("jflux_gathered"),
    "y": jax.checkpoint_policies.save_only_these_names("y"),
    "all but gathered": jax.checkpoint_policies.save_anything_except_these_names("jflux_gathered"),
}


@pytest.mark.parametrize("policy", POLICIES)
@VMA
def test_checkpoint_values(policy, check_vma):
    mesh = make_mesh((RANKS,))
    args = layer_operands()
    layer = jax.checkpoint(mlp_layer, policy=POLICIES[policy])
    f = jax.shard_map(
        lambda x, *w: layer(layer(x, *w), *w),
        mesh=mesh, in_specs=LAYER_SPECS, out_specs=P("tp"), check_vma=check_vma,
    )  # fmt: skip

    def plain(x, w1, w2):
        for _ in range(2):
            x = jnp.tanh(x @ w1) @ w2
        return x

    def step(f, *args):
        y, pull = jax.vjp(f, *args)
        return y, pull(y)

    got = run(jax.jit(functools.partial(step, f)), *args)
    assert_near(got, in_float64(functools.partial(step, plain), *args))


# y and both gradients of a y that is used linearly: what the backward pass wants again, if it was
# not kept, is the gathered x alone.
@pytest.mark.parametrize(
    "policy, gathers_again",
    [("nothing", True), ("gathered", False), ("everything", False)],
)
def test_recomputation_has_no_product(policy, gathers_again):
    mesh = make_mesh((RANKS,))
    f = per_device(mesh, jax.checkpoint(GATHER.bind("tp"), policy=POLICIES[policy]))
    x, w = operands(GATHER, mesh, "tp")
    dy = normal(5, (RANKS, *GATHER.y_shape(RANKS)), GATHER.dtype)

    def step(x, w, dy):
        y, pull = jax.vjp(f, x, w)
        return y, *pull(dy)

    text = compiled_text(step, x, w, dy)
    assert sorted(fused_calls(text)) == [GATHER.op, SCATTER.op]
    if PLATFORM == "cpu":
        assert dots(text) == 1  # dw
        assert (" all-gather(" in text) == gathers_again
    y, dx, dw = run(jax.jit(step), x, w, dy)
    check_product(y, GATHER, mesh, x, w)
    want = exact_vjp(GATHER, mesh, "tp", x, w, dy)
    scale = exact_vjp(GATHER, mesh, "tp", *map(np.abs, (x, w, dy)))
    assert_close(dx, want[0], scale[0], GATHER.dtype, 6 * RANKS)
    assert_close(dw, want[1], scale[1], GATHER.dtype, 3 * RANKS)


def test_recomputation_of_matmul_reduce_scatter_is_dropped():
    """Its gradient needs x, w and dy, not its result: nothing is computed again."""
    mesh = make_mesh((RANKS,))
    f = per_device(mesh, jax.checkpoint(SCATTER.bind("tp"), policy=POLICIES["nothing"]))
    x, w = operands(SCATTER, mesh, "tp")

    def step(x, w, dy):
        y, pull = jax.vjp(f, x, w)
        return y, *pull(dy)

    text = compiled_text(step, x, w, normal(5, (RANKS, *SCATTER.y_shape(RANKS)), SCATTER.dtype))
    assert sorted(fused_calls(text)) == [GATHER.op, SCATTER.op]


@pytest.mark.parametrize("policy", ["nothing", "gathered"])
def test_checkpoint_inside_scan(policy):
    check_scan(jax.checkpoint(mlp_layer, policy=POLICIES[policy]), layers=3)


# ---- Donation ------------------------------------------------------------------------------------


def test_donated_state_of_a_training_loop():
    mesh = make_mesh((RANKS,))
    args = layer_operands()
    f = jax.shard_map(mlp_layer, mesh=mesh, in_specs=LAYER_SPECS, out_specs=P("tp"))

    def step(f, x, w1, w2):
        g1, g2 = jax.grad(lambda *w: jnp.mean(f(x, *w).astype(jnp.float32) ** 2), (0, 1))(w1, w2)
        return w1 - g1, w2 - g2

    jitted = jax.jit(functools.partial(step, f), donate_argnums=(1, 2))
    x, *ws = (
        jax.device_put(a, jax.NamedSharding(mesh, s))
        for a, s in zip(args, LAYER_SPECS, strict=True)
    )
    for _ in range(4):
        ws = jitted(x, *ws)

    def plain(x, w1, w2):
        def layer(x, w1, w2):
            return jnp.tanh(x @ w1) @ w2

        for _ in range(4):
            g1, g2 = jax.grad(lambda *w: jnp.mean(layer(x, *w) ** 2), (0, 1))(w1, w2)
            w1, w2 = w1 - g1, w2 - g2
        return w1, w2

    assert_near(list(ws), list(in_float64(plain, *args)), roundings=60)
