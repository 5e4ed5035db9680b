"""jflux.nn.mixture and the MoE layers with a placement of experts in physical slots, against every
expert on every token, in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import RANKS, examples, make_mesh
from hypothesis import given
from jax.sharding import PartitionSpec as P
from test_nn_moe import (
    DISPATCH,
    GATHER,
    MESHES,
    SELECTS,
    SPLIT,
    B,
    D,
    E,
    F,
    K,
    S,
    dense,
    kept_slots,
    masked_total,
    parameters,
)
from test_placement import SEEDS, X64, drawn_placement

import jflux.nn
from jflux import moe

pytestmark = [
    pytest.mark.wide,
    pytest.mark.skipif(RANKS < 4, reason="meshes of four ranks"),
]

SLOTS = 8
EXPERTS = ("up", "gate", "down")
exact = jax.jit(dense)


def in_slots(params, placement):
    """The parameters with the weights of physical slots."""
    held = np.maximum(placement, 0)
    return params | {name: params[name][held] for name in EXPERTS if name in params}


@functools.cache
def placed_layer(mesh, way, select, inside):
    """Values and gradients of a layer of (x, params, mask, placement, ct), and those of `up` summed
    over replicas."""
    shape, names, axes, x_spec = MESHES[mesh]
    mesh = make_mesh(shape, names)
    options = {"k": K, "select": SELECTS[select], **axes, **dict(way)}
    ep, tp = axes.get("expert_axis"), axes.get("axis_name")
    columns = P(ep, None, tp)
    specs = {"router": P(), "up": columns, "gate": columns, "down": P(ep, tp)}
    specs["shared"] = (P(None, tp), P(tp), P(None, tp))

    def layer(x, params, mask, placement):
        if not inside:
            return jflux.nn.mixture(
                x, **params, mask=mask, placement=placement, x_spec=x_spec, mesh=mesh, **options
            )
        own = tuple(name for name in ("data", "ep") if name in names)
        tokens = P(own or None, tp if axes.get("sequence_parallel", True) else None)
        more = {"loss_axis": "data"} if "data" in names else {}
        return jax.shard_map(
            lambda x, params, mask, placement: jflux.nn.mixture(
                x, **params, mask=mask, placement=placement, **more, **options
            ),
            mesh=mesh, in_specs=(tokens, specs, tokens, P()),
            out_specs=jflux.nn.MixtureOutput(tokens, *[P()] * 4), check_vma=inside == "typed",
        )(x, params, mask, placement)  # fmt: skip

    def loss(x, params, mask, placement, ct):
        out = layer(x, params, mask, placement)
        return masked_total(out, x, mask, ct), out

    def summed(gradient, placement):
        if not inside or ep is None:
            return moe.sum_replicas(gradient, placement, axis_name=ep, mesh=mesh)
        return jax.shard_map(
            functools.partial(moe.sum_replicas, axis_name=ep), mesh=mesh, in_specs=(columns, P()),
            out_specs=columns, check_vma=inside == "typed",
        )(gradient, placement)  # fmt: skip

    def call(x, params, mask, placement, ct):
        (_, out), (dx, slopes) = jax.value_and_grad(loss, (0, 1), has_aux=True)(
            x, params, mask, placement, ct
        )
        return out, dx, slopes, summed(slopes["up"], placement)

    return jax.jit(call)


@functools.cache
def exact_layer(select):
    def loss(x, params, mask, ct, kept):
        out = dense(x, **params, select=SELECTS[select], kept=kept, mask=mask)
        return masked_total(out, x, mask, ct), out

    return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))


@pytest.mark.parametrize(
    ("mesh", "capacity", "select", "inside"),
    [
        ("both", 3, "softmax", None),
        ("both whole", 3, "softmax", "untyped"),
        ("ep", None, "sigmoid", None),
        ("tp", 3, "softmax", None),
        ("data and experts", 1, "some nothing", "typed"),
    ],
)
@given(SEEDS)
@examples(9)
def test_gathered(mesh, capacity, select, inside, seed):
    check(mesh, {} if capacity is None else {"capacity": capacity}, select, inside, seed)


@pytest.mark.parametrize(
    ("mesh", "capacity", "select", "inside"),
    [
        ("both", 3, "softmax", "typed"),
        ("both", None, "some nothing", "untyped"),
        ("both whole", 2, "some nothing", "typed"),
        ("ep", 3, "softmax", None),
        ("data and experts", 2, "softmax", None),
    ],
)
@given(SEEDS)
@examples(9)
def test_dispatched(mesh, capacity, select, inside, seed):
    way = {} if capacity is None else {"capacity": capacity}
    check(mesh, DISPATCH | way, select, inside, seed)


def check(mesh, way, select, inside, seed):
    """A mixture equals the one without a placement, but for the slots that a `capacity` drops, and
    no placement compiles it again."""
    rng = np.random.default_rng(seed)
    mask = rng.random((B, S)) < rng.choice([0.4, 0.8, 1])
    placement = drawn_placement(rng, E, SLOTS, most=rng.integers(1, E + 1))
    if rng.random() < 0.3:  # an expert without a physical slot
        placement[placement == rng.integers(E)] = rng.choice([-1, E])
    empty = (placement < 0) | (placement >= E)
    held = np.where(empty, 0, placement)
    with X64():
        params = parameters(seed, shared=True)
        x, ct = rng.normal(size=(2, B, S, D))
        kept = kept_slots(
            x, params, way.get("capacity", B * S * K), select=SELECTS[select], mask=mask,
            placement=placement, **SPLIT[mesh],
        )  # fmt: skip
        (_, want), (dx_want, slopes) = exact_layer(select)(x, params, mask, ct, kept)
        call = placed_layer(mesh, tuple(way.items()), select, inside)
        given = np.where(mask[..., None], x, np.nan)
        got, dx, gradients, summed = call(given, in_slots(params, held), mask, placement, ct)
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-5)
    up = np.where(empty[:, None, None], 0, np.asarray(slopes["up"])[held])
    for name in EXPERTS:
        of_slots = np.asarray(gradients[name])
        assert not of_slots[empty].any()
        gradients[name] = np.stack([of_slots[placement == e].sum(0) for e in range(E)])
        slopes[name] = np.where(np.isin(np.arange(E), placement)[:, None, None], slopes[name], 0)
    got, want = (jax.tree.leaves(all) for all in ((dx, gradients, summed), (dx_want, slopes, up)))
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-5)
    assert call._cache_size() == 1


@pytest.mark.parametrize("way", [GATHER, DISPATCH], ids=str)
def test_tokens_that_ranks_share(way):
    """Along `expert_axis` they are copies, each with a turn and a place of its own."""
    mesh, params = make_mesh((2,), ("ep",)), parameters(3)
    x = np.random.default_rng(4).normal(size=(B, S, D))
    placement = np.array([0, 1, 2, 3, 0, 0, 1, 0], np.int32)
    specs = {"router": P(), "up": P("ep"), "gate": P("ep"), "down": P("ep")}

    def layer(x, params, placement):
        return jflux.nn.mixture(
            x, **params, k=K, expert_axis="ep", capacity=3, placement=placement, **way
        )

    f = jax.shard_map(
        layer, mesh=mesh, in_specs=(P(), specs, P()),
        out_specs=jflux.nn.MixtureOutput(P("ep"), *[P()] * 4),
    )  # fmt: skip
    with X64():
        got = jax.jit(f)(x, in_slots(params, placement), placement)
        copies = np.concatenate([x, x])
        kept = kept_slots(copies, params, 3, ep=2, placement=placement)
        y, *_, dropped = exact(copies, **params, kept=kept)
        _, *losses, counts, _ = exact(x, **params)
    np.testing.assert_allclose(got.y, y, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(got[1:3], losses, rtol=1e-5)
    np.testing.assert_array_equal(got.tokens_per_expert, counts)
    assert int(got.dropped) == int(dropped) > 0


@pytest.mark.parametrize("way", [GATHER, DISPATCH], ids=str)
def test_a_placement_of_each_layer(way):
    """Of a scan with remat, and their gradients."""
    mesh, params = make_mesh((2,), ("ep",)), parameters(5)
    rng = np.random.default_rng(6)
    x, ct = rng.normal(size=(2, B, S, D))
    placements = np.stack([drawn_placement(rng, E, SLOTS) for _ in range(2)])
    own = P(None, "ep")

    def layers(x, router, each, placements):
        @jax.checkpoint
        def one(x, layer):
            weights, placement = layer
            out = jflux.nn.mixture(
                x, router, **weights, k=K, expert_axis="ep", placement=placement, **way
            )
            return x + out.y, out.tokens_per_expert

        return jax.lax.scan(one, x, (each, placements))

    f = jax.shard_map(
        layers, mesh=mesh, in_specs=(P("ep"), P(), own, P()), out_specs=(P("ep"), P())
    )

    def with_gradients(x, params, placements):
        """Of the weights of experts, which each layer places."""

        def loss(params):
            each = {name: params[name][placements] for name in EXPERTS}
            y, counts = f(x, params["router"], each, placements)
            return jnp.sum(y * ct), (y, counts)

        return jax.value_and_grad(loss, has_aux=True)(params)

    def by_experts(x, params):
        def loss(params):
            y, counts = x, []
            for _ in range(2):
                dy, *_, count, _ = dense(y, **params)
                y, counts = y + dy, [*counts, count]
            return jnp.sum(y * ct), (y, jnp.stack(counts))

        return jax.value_and_grad(loss, has_aux=True)(params)

    with X64():
        got = jax.jit(with_gradients)(x, params, placements)
        want = jax.jit(by_experts)(x, params)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-5)


def test_no_tracer_leaks():
    shape, names, options, _ = MESHES["both"]
    mesh, params = make_mesh(shape, names), in_slots(parameters(), np.arange(SLOTS) % E)

    def loss(x, params, placement):
        out = jflux.nn.mixture(
            x, **params, k=K, mesh=mesh, placement=placement, **options, **DISPATCH
        )
        return jnp.sum(out.y) + out.load_balancing

    def step(x, params, placement):
        gradients = jax.grad(loss, 1)(x, params, placement)
        return moe.sum_replicas(gradients["up"], placement, axis_name="ep", mesh=mesh)

    with jax.checking_leaks():
        jax.make_jaxpr(step)(np.ones((B, S, D)), params, np.arange(SLOTS) % E)


def test_wrong_placements():
    params = {name: a.astype(np.float32) for name, a in parameters().items()}
    x = np.zeros((B, S, D), np.float32)
    refused = functools.partial(jflux.nn.mixture, x, **params, k=K)
    with pytest.raises(TypeError, match=r"nn.mixture: placement must be integers \[S\], got float"):
        refused(placement=np.ones(4))
    with pytest.raises(
        ValueError, match=r"placement \(3,\) has fewer physical slots .* experts, 4"
    ):
        refused(placement=np.arange(3))
    with pytest.raises(
        ValueError, match=r"placement \(6,\) is of 6 .*, and up .* has 4 on each of"
    ):
        refused(placement=np.arange(6) % 4)
    more = in_slots(params, np.arange(6) % 4)
    with pytest.raises(ValueError, match="must have E/M, or a placement say which expert is where"):
        jflux.nn.mixture(x, **more, k=K)


# ---- Layers --------------------------------------------------------------------------------------

LOGICAL = {"router": "embed", "up": "expert", "gate": "expert", "down": "expert"}


@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_layers_take_a_placement(kind):
    """On global arrays, and then another one. Replicas are equal at first."""
    pytest.importorskip("flax")
    from flax import nnx

    from jflux.nn import linen
    from jflux.nn import nnx as layers

    rng = np.random.default_rng(9)
    x = rng.normal(size=(B, S, D)).astype(np.float32)
    options = {"expert_axis": "ep", "physical_slots": SLOTS, "capacity": 4}
    first, other = np.arange(SLOTS) % E, drawn_placement(rng, E, SLOTS)
    mesh = make_mesh((2, 2), ("ep", "tp"))

    @jax.jit
    def moved(arrays, placement, previous):
        held = {name: arrays[name] for name in EXPERTS}
        return arrays | moe.place_weights(held, placement, previous=previous, axis_name="ep")

    with jax.set_mesh(mesh):
        if kind == "linen":
            layer = linen.MoE(E, F, K, **options)
            params = jax.jit(layer.init)(jax.random.key(0), x)["params"]
            assert {n: box.names[0] for n, box in params.items()} == LOGICAL
            arrays = {name: box.unbox() for name, box in params.items()}
            apply = jax.jit(functools.partial(layer.apply, mutable=["intermediates"]))

            def call(arrays, placement):
                y, sown = apply({"params": arrays}, x, None, placement)
                return y, sown["intermediates"]

        else:
            layer = layers.MoE(D, E, F, K, rngs=nnx.Rngs(0), **options)
            assert {n: getattr(layer, n).out_sharding[0] for n in layer.names} == LOGICAL
            arrays = {name: getattr(layer, name)[...] for name in layer.names}

            @nnx.jit
            def apply(layer, x, placement):
                y = layer(x, placement=placement)
                return y, nnx.pop(layer, (layers.Loss, nnx.Intermediate))

            def call(arrays, placement):
                for name, array in arrays.items():
                    getattr(layer, name)[...] = array
                return apply(layer, x, placement)

        for name in EXPERTS:
            held = np.asarray(arrays[name])
            np.testing.assert_array_equal(held, held[first])
            assert len({one.tobytes() for one in held}) == E
        got = [call(arrays, first), call(moved(arrays, other, first), other)]
    of_experts = {name: np.asarray(array) for name, array in arrays.items()}
    of_experts |= {name: of_experts[name][:E] for name in EXPERTS}
    for (y, sown), placement in zip(got, (first, other), strict=True):
        kept = kept_slots(x, of_experts, 4, ep=2, tp=2, placement=placement)
        y_want, *_, counts, dropped = exact(x, **of_experts, kept=kept)
        np.testing.assert_allclose(y, y_want, rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(jax.tree.leaves(sown["tokens_per_expert"])[0], counts)
        assert jax.tree.leaves(sown["dropped"])[0] == dropped > 0


@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_layers_have_a_placement(kind):
    """That of a call without one."""
    pytest.importorskip("flax")
    from flax import nnx

    from jflux.nn import linen
    from jflux.nn import nnx as layers

    x = np.random.default_rng(10).normal(size=(B, S, D)).astype(np.float32)
    options = {"axis_name": None, "physical_slots": 6, "capacity": 4}
    if kind == "linen":
        layer = linen.MoE(E, F, K, **options)
        params = jax.jit(layer.init)(jax.random.key(0), x)["params"]
        arrays = {name: box.unbox() for name, box in params.items()}
        y = jax.jit(layer.apply)({"params": arrays}, x)
    else:
        with jax.set_mesh(make_mesh((1,))):
            layer = layers.MoE(D, E, F, K, rngs=nnx.Rngs(0), sows=False, **options)
            arrays = {name: getattr(layer, name)[...] for name in layer.names}
            y = nnx.jit(lambda layer, x: layer(x))(layer, x)
    arrays = {name: np.asarray(array) for name, array in arrays.items()}
    arrays |= {name: arrays[name][:E] for name in EXPERTS}
    kept = kept_slots(x, arrays, 4, placement=np.arange(6) % E)
    assert kept.sum() < kept.size
    np.testing.assert_allclose(y, exact(x, **arrays, kept=kept)[0], rtol=1e-4, atol=1e-5)


def test_layers_want_a_slot_for_each_expert():
    pytest.importorskip("flax")
    from jflux.nn import linen

    layer = linen.MoE(E, F, K, axis_name=None, physical_slots=3)
    with pytest.raises(ValueError, match=r"placement \(3,\) has fewer physical slots"):
        layer.init(jax.random.key(0), np.ones((B, S, D), np.float32))
