"""jflux.nn.mixture and the MoE layers against every expert on every token, in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import RANKS, make_mesh
from jax.sharding import PartitionSpec as P

import jflux.nn
from jflux import moe

X64 = functools.partial(jax.enable_x64, True)
B, S, D, F, E, K = 4, 4, 6, 8, 4, 2

pytestmark = pytest.mark.skipif(RANKS < 4, reason="meshes of four ranks")


def parameters(seed=0, gated=True, shared=False, bias=False):
    rng = np.random.default_rng(seed)

    def draw(*shape):
        return rng.normal(size=shape) / np.sqrt(shape[-2] if len(shape) > 1 else 1)

    found = {"router": draw(D, E), "up": draw(E, D, F), "down": draw(E, F, D)}
    if gated:
        found["gate"] = draw(E, D, F)
    if shared:
        found["shared"] = (draw(D, F), draw(F, D), *([draw(D, F)] if gated else []))
    if bias:
        found["router_bias"] = draw(E)
    return found


def dense(x, router, up, down, gate=None, router_bias=None, shared=None, select=moe.top_k_softmax):
    """The definition: (y, load balancing, z, tokens of each expert)."""
    act = jax.nn.silu
    tokens = x.reshape(-1, D)
    logits = tokens @ router
    # The layers compute them in float32.
    indices, weights = select(logits, K, **({} if router_bias is None else {"bias": router_bias}))
    mask = jnp.einsum("tk,tke->te", weights, jax.nn.one_hot(indices, E))

    def expert(x, up, down, gate):
        h = act(x @ up) if gate is None else act(x @ gate) * (x @ up)
        return h @ down

    each = jax.vmap(expert, (None, 0, 0, None if gate is None else 0))(tokens, up, down, gate)
    y = jnp.einsum("te,etd->td", mask, each).reshape(x.shape)
    if shared is not None:
        y += expert(x, shared[0], shared[1], shared[2] if len(shared) > 2 else None)
    counts = jnp.sum(jax.nn.one_hot(indices, E), (0, 1))
    balance = E * jnp.sum(counts / len(tokens) * jnp.mean(jax.nn.softmax(logits), 0))
    return y, balance, jnp.mean(jax.nn.logsumexp(logits, -1) ** 2), counts


MESHES = {
    "tp": ((4,), ("tp",), {"axis_name": "tp"}, None),
    "whole": ((4,), ("tp",), {"axis_name": "tp", "sequence_parallel": False}, None),
    "ep": ((4,), ("ep",), {"expert_axis": "ep"}, None),
    "both": ((2, 2), ("ep", "tp"), {"axis_name": "tp", "expert_axis": "ep"}, None),
    "data": ((2, 2), ("data", "tp"), {"axis_name": "tp"}, P("data")),
    "data and experts": ((2, 2), ("data", "ep"), {"expert_axis": "ep"}, P("data")),
}
KINDS = {
    "gated": {},
    "plain": {"gated": False, "shared": True},
    "bias": {"shared": True, "bias": True},
}


def total(out, scale=1.0):
    y, balance, z, _ = out
    return jnp.sum(jnp.sin(y)) + balance + 0.1 * z


@pytest.mark.parametrize(
    ("mesh", "kind"),
    [
        ("tp", "bias"),
        ("whole", "plain"),
        ("ep", "bias"),
        ("both", "gated"),
        ("both", "plain"),
        ("data", "plain"),
        ("data and experts", "gated"),
    ],
)
def test_equals_every_expert_on_every_token(mesh, kind):
    shape, names, options, x_spec = MESHES[mesh]
    select = moe.top_k_sigmoid if kind == "bias" else moe.top_k_softmax
    with X64():
        params = parameters(**KINDS[kind])
        x = np.random.default_rng(1).normal(size=(B, S, D))

        def layer(x, params):
            return jflux.nn.mixture(
                x, **params, k=K, select=select, x_spec=x_spec, mesh=make_mesh(shape, names),
                **options,
            )  # fmt: skip

        def exact(x, params):
            return dense(x, **params, select=select)

        for got, want in zip(jax.jit(layer)(x, params), exact(x, params), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
        got, want = (
            jax.jit(jax.grad(lambda x, p, f=f: total(f(x, p)), (0, 1)))(x, params)
            for f in (layer, exact)
        )
        for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-5)


def test_inside_shard_map_with_remat_and_scan():
    """Two data-parallel groups of two ranks; each has its own losses without `loss_axis`."""
    mesh = make_mesh((2, 2), ("data", "tp"))
    specs = {"router": P(), "up": P(None, None, "tp"), "gate": P(None, None, "tp"),
             "down": P(None, "tp", None)}  # fmt: skip
    with X64():
        params = parameters()
        x = np.random.default_rng(2).normal(size=(B, S, D))

        def body(x, params):
            one = jax.checkpoint(
                lambda x: jflux.nn.mixture(x, **params, k=K, axis_name="tp", loss_axis="data")
            )

            def step(carry, _):
                x, loss = carry
                out = one(x)
                return (x + out.y, loss + out.load_balancing + 0.1 * out.z), out.tokens_per_expert

            (x, loss), counts = jax.lax.scan(step, (x, jnp.zeros(())), None, 2)
            return x, loss, counts

        f = jax.shard_map(
            body,
            mesh=mesh,
            in_specs=(P("data", "tp"), specs),
            out_specs=(P("data", "tp"), P(), P()),
        )

        def exact(x, params):
            loss, counts = 0.0, []
            for _ in range(2):
                y, balance, z, count = dense(x, **params)
                x, loss, counts = x + y, loss + balance + 0.1 * z, [*counts, count]
            return x, loss, jnp.stack(counts)

        for got, want in zip(jax.jit(f)(x, params), exact(x, params), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)

        def grad(f):
            def loss(x, params):
                y, balance, _ = f(x, params)
                return jnp.sum(jnp.sin(y)) + balance

            return jax.jit(jax.grad(loss, (0, 1)))(x, params)

        for g, w in zip(jax.tree.leaves(grad(f)), jax.tree.leaves(grad(exact)), strict=True):
            np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-5)


def test_one_device_needs_no_mesh():
    with X64():
        params = parameters(shared=True)
        x = np.random.default_rng(3).normal(size=(B, S, D))
        got = jflux.nn.mixture(x, **params, k=K)
        for g, w in zip(got, dense(x, **params), strict=True):
            np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-5)


def test_wrong_operands():
    params = {name: a.astype(np.float32) for name, a in parameters().items()}
    x = np.zeros((B, S, D + 1), np.float32)
    with pytest.raises(
        ValueError, match=r"x \(4, 4, 7\) must be \[..., s, d\] and router \(6, 4\)"
    ):
        jflux.nn.mixture(x, **params, k=K)
    with pytest.raises(ValueError, match="devices of mesh axes .* do not divide its dimension 0"):
        jflux.nn.mixture(
            x[..., :D], **{**params, "up": params["up"][:3]}, k=K, expert_axis="ep",
            mesh=make_mesh((2,), ("ep",)),
        )  # fmt: skip


# ---- Layers --------------------------------------------------------------------------------------

AXES = {
    "router": ("embed", None),
    "up": ("expert", "embed", "mlp"),
    "gate": ("expert", "embed", "mlp"),
    "down": ("expert", "mlp", "embed"),
    "shared_up": ("embed", "mlp"),
    "shared_down": ("mlp", "embed"),
    "shared_gate": ("embed", "mlp"),
}
WEIGHTS = {"load_balancing_weight": 0.5, "z_weight": 0.25}


def of_layer(params):
    shared = tuple(params.pop(f"shared_{name}") for name in ("up", "down", "gate"))
    return {**params, "shared": shared}


def test_linen():
    pytest.importorskip("flax")
    from jflux.nn import linen

    mesh = make_mesh((2, 2), ("ep", "tp"))
    layer = linen.MoE(E, F, K, expert_axis="ep", shared_features=F, **WEIGHTS)
    x = np.random.default_rng(4).normal(size=(B, S, D)).astype(np.float32)
    with jax.set_mesh(mesh):
        variables = jax.jit(layer.init)(jax.random.key(0), x)
        boxed = variables["params"]
        assert {name: box.names for name, box in boxed.items()} == AXES
        params = {name: box.unbox() for name, box in boxed.items()}
        # Each expert is drawn by itself, with its own fan-in.
        assert 0.5 < float(jnp.std(params["down"]) * np.sqrt(F)) < 1.5
        y, sown = jax.jit(functools.partial(layer.apply, mutable=["losses", "intermediates"]))(
            {"params": boxed}, x
        )
    want = dense(x, **of_layer(dict(params)))
    np.testing.assert_allclose(y, want[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(sown["losses"]["load_balancing"][0], 0.5 * want[1], rtol=1e-5)
    np.testing.assert_allclose(sown["losses"]["z"][0], 0.25 * want[2], rtol=1e-5)
    np.testing.assert_array_equal(sown["intermediates"]["tokens_per_expert"][0], want[3])

    # Inside shard_map, one rank's parameters.
    rules = jflux.nn.logical_axis_rules("tp", expert_axis="ep")
    specs = {name: P(*(dict(rules).get(a) for a in axes)) for name, axes in AXES.items()}
    per_rank = jax.shard_map(
        lambda params, x: layer.apply({"params": params}, x),
        mesh=mesh, in_specs=(specs, P("ep", "tp")), out_specs=P("ep", "tp"),
    )  # fmt: skip
    np.testing.assert_allclose(jax.jit(per_rank)(params, x), want[0], rtol=1e-4, atol=1e-5)


def test_nnx():
    pytest.importorskip("flax")
    from flax import nnx

    from jflux.nn import nnx as layers

    mesh = make_mesh((2, 2), ("ep", "tp"))
    x = np.random.default_rng(5).normal(size=(B, S, D)).astype(np.float32)
    with jax.set_mesh(mesh):
        layer = layers.MoE(
            D, E, F, K, expert_axis="ep", shared_features=F, rngs=nnx.Rngs(0), **WEIGHTS
        )
        assert {name: getattr(layer, name).out_sharding for name in layer.names} == AXES
        assert layer.up[...].sharding.spec == P("ep", None, "tp")

        @nnx.jit
        def call(layer, x):
            y = layer(x)
            return y, nnx.pop(layer, layers.Loss), nnx.pop(layer, nnx.Intermediate)

        y, losses, seen = call(layer, x)
    want = dense(
        x, **of_layer({name: np.asarray(getattr(layer, name)[...]) for name in layer.names})
    )
    np.testing.assert_allclose(y, want[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(
        jax.tree.leaves(losses["load_balancing"])[0], 0.5 * want[1], rtol=1e-5
    )
    np.testing.assert_allclose(jax.tree.leaves(losses["z"])[0], 0.25 * want[2], rtol=1e-5)
    np.testing.assert_array_equal(jax.tree.leaves(seen["tokens_per_expert"])[0], want[3])


def test_a_bias_for_the_choice_alone():
    pytest.importorskip("flax")
    from jflux.nn import linen

    layer = linen.MoE(
        E, F, K, axis_name=None, gated=False, use_router_bias=True, select=moe.top_k_sigmoid
    )
    x = np.random.default_rng(6).normal(size=(B, S, D)).astype(np.float32)
    params = layer.init(jax.random.key(0), x)["params"]
    params = {name: box.unbox() for name, box in params.items()}
    assert set(params) == {"router", "router_bias", "up", "down"}
    assert params["router_bias"].shape == (E,)
    grads = jax.grad(lambda p: jnp.sum(layer.apply({"params": p}, x) ** 2))(params)
    assert not np.asarray(grads["router_bias"]).any()
    assert np.asarray(grads["router"]).any()
