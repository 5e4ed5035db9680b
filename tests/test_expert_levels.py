"""jflux.moe_dispatch and moe_combine over nodes, against the same over all ranks at once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import RANKS, make_mesh, run
from jax import lax
from test_expert_parallel import KINDS, choices

import jflux
from jflux._stress.calls import per_device, x64_if

WIDTH, OUT = 6, 5
pytestmark = pytest.mark.wide
#: nodes, ranks of a node, tokens, k, experts of a rank
FOUR_RANKS = (2, 2, 5, 3, 2)
SIZES = [FOUR_RANKS, (2, 4, 3, 6, 1), (3, 2, 4, 2, 1), (2, 1, 4, 4, 3), (1, 2, 4, 2, 2)]
SIZES = [size for size in SIZES if size[0] * size[1] <= RANKS]
AXES = ("node", "ep")
LEVELS = {"axis_name": "ep", "node_axis": "node"}
FLAT = {"axis_name": AXES}


def operands(seed, kind, nodes, ranks, tokens, k, local):
    """x, choices, weights, experts, residual and a cotangent, of each rank."""
    rng = np.random.default_rng(seed)
    lead, experts = (nodes, ranks), nodes * ranks * local
    indices = choices(rng, kind, nodes * ranks, tokens, k, experts).reshape(*lead, tokens, k)
    shapes = (tokens, WIDTH), (tokens, k), (local, WIDTH, OUT), (tokens, OUT), (tokens, OUT)
    x, weights, w, residual, ct = (rng.standard_normal((*lead, *shape)) for shape in shapes)
    return x, indices, weights, w, residual, ct


def layer(axes, x, indices, weights, w, residual, scaled=False, **options):
    """Experts ``tanh(x @ w)``; scaled: they apply the weights."""
    experts = w.shape[0] * lax.axis_size(AXES)
    d = jflux.moe_dispatch(x, indices, weights, num_experts=experts, **axes, **options)
    if d.rows.ndim == 3:
        y = jnp.tanh(jnp.einsum("ech,ehf->ecf", d.rows, w))
    else:
        expert = jnp.repeat(
            jnp.arange(w.shape[0]), d.padded_sizes, total_repeat_length=d.rows.shape[0]
        )
        # The gradient of w[expert] would be a sum in no order, on GPUs.
        one_hot = jax.nn.one_hot(expert, w.shape[0], dtype=w.dtype)
        y = jnp.tanh(jnp.einsum("rh,re,ehf->rf", d.rows, one_hot, w))
    if scaled:
        y, weights = y * d.weights[..., None], None
    return jflux.moe_combine(y, d.handle, weights=weights, residual=residual, **axes)


def in_all_ways(axes, **options):
    """The layer of each rank: its value, and both modes of derivatives."""

    def call(x, indices, weights, w, residual, ct):
        def f(x, weights, w, residual):
            return layer(axes, x, indices, weights, w, residual, **options)

        given = (x, weights, w, residual)
        y, pull = jax.vjp(f, *given)
        _, tangent = jax.jvp(f, given, jax.tree.map(jnp.cos, given))
        return y, tangent, *pull(ct)

    return call


OPTIONS = ({"scaled": True}, {"alignment": 4}, {"layout": "masked"})
CASES = [(size, OPTIONS[i % 3]) for i, size in enumerate(SIZES)]


@pytest.mark.parametrize(
    "size, options",
    [*CASES, (SIZES[0], {"layout": "masked"}), (SIZES[0], {"partial_sums": True})],
    ids=str,
)
def test_it_is_the_flat_form(size, options):
    mesh = make_mesh(size[:2], AXES)
    levels = jax.jit(per_device(mesh, in_all_ways(LEVELS, **options)))
    flat = jax.jit(per_device(mesh, in_all_ways(FLAT, **options)))
    for kind in KINDS:
        arrays = operands(1, kind, *size)
        with x64_if(np.float64):
            got, want = run(levels, *arrays), run(flat, *arrays)
        for one, other in zip(got, want, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("size", SIZES[:2], ids=str)
def test_rows_and_what_crosses_between_nodes(size):
    nodes, ranks, tokens, k, local = size
    mesh, experts = make_mesh((nodes, ranks), AXES), nodes * ranks * local
    f = functools.partial(jflux.moe_dispatch, num_experts=experts, **LEVELS)
    f = jax.jit(per_device(mesh, f))
    for kind in KINDS:
        x, indices, weights, *_ = operands(2, kind, *size)
        with x64_if(np.float64):
            d = run(f, x, indices, weights)
        chosen = np.array([(indices == e).any(-1).sum() for e in range(experts)])
        np.testing.assert_array_equal(d.group_sizes.reshape(-1), chosen)
        every = np.broadcast_to(chosen, (nodes, ranks, experts))
        np.testing.assert_array_equal(d.statistics.tokens_per_expert, every)
        assert not d.statistics.dropped.any()
        # Once to a node, however many of a token's experts are there.
        nodes_of = np.where(indices >= 0, indices // (ranks * local), -1)
        goes = np.stack([(nodes_of == n).any(-1).sum(-1) for n in range(nodes)], -1)
        np.testing.assert_array_equal(d.handle.between.out.sent, goes)
        # An expert's rows: by rank along "ep", then node, token.
        for expert in range(experts):
            node, rest = divmod(expert, ranks * local)
            rank, own = divmod(rest, local)
            first = d.padded_sizes[node, rank, :own].sum()
            got = d.rows[node, rank, first : first + d.group_sizes[node, rank, own]]
            want = [
                x[n, r, t]
                for r in range(ranks)
                for n in range(nodes)
                for t in range(tokens)
                if expert in indices[n, r, t]
            ]
            np.testing.assert_array_equal(got, np.reshape(want, got.shape))


def test_a_capacity_keeps_the_first_rows_and_counts_the_others():
    size = FOUR_RANKS
    nodes, ranks, tokens, k, local = size
    mesh, experts = make_mesh((nodes, ranks), AXES), nodes * ranks * local
    f = functools.partial(jflux.moe_dispatch, num_experts=experts, capacity=3, **LEVELS)
    f = jax.jit(per_device(mesh, f))
    for kind in ("random", "one expert"):  # no token names an expert twice
        x, indices, weights, *_ = operands(3, kind, *size)
        with x64_if(np.float64):
            d = run(f, x, indices, weights)
        chosen = np.array([(indices == e).any(-1).sum() for e in range(experts)])
        np.testing.assert_array_equal(d.group_sizes.reshape(-1), np.minimum(chosen, 3))
        assert d.statistics.dropped.sum() == np.maximum(chosen - 3, 0).sum()


def test_an_index_out_of_range_is_dropped_and_counted():
    size = FOUR_RANKS
    nodes, ranks, _, _, local = size
    mesh, experts = make_mesh((nodes, ranks), AXES), nodes * ranks * local
    x, indices, weights, *_ = operands(4, "random", *size)
    indices[0, 0, 0, 0], indices[1, 1, 0, 0], indices[1, 1, 1, 0] = experts, -2, 10**6
    f = functools.partial(jflux.moe_dispatch, num_experts=experts, **LEVELS)
    with x64_if(np.float64):
        d = run(jax.jit(per_device(mesh, f)), x, indices, weights)
    np.testing.assert_array_equal(d.statistics.dropped, [[1, 0], [0, 2]])


def test_sums_are_rounded_once_on_a_node():
    size = FOUR_RANKS
    mesh = make_mesh(size[:2], AXES)
    x, indices, weights, w, residual, _ = operands(5, "random", *size)
    half = [jnp.asarray(a, jnp.bfloat16) for a in (x, w, residual)]
    f = jax.jit(per_device(mesh, functools.partial(layer, LEVELS)))
    got = run(f, half[0], indices, weights.astype("f4"), half[1], half[2])
    assert got.dtype == jnp.bfloat16
    with x64_if(np.float64):
        exact = [np.asarray(a, np.float64) for a in half]
        flat = jax.jit(per_device(mesh, functools.partial(layer, FLAT)))
        want = run(flat, exact[0], indices, weights, exact[1], exact[2])
    # The experts' rows, the sums of a node and the last one are rounded.
    scale = np.abs(weights).sum(-1, keepdims=True) + np.abs(want)
    assert (np.abs(got.astype(np.float64) - want) <= 2.0**-7 * scale).all()


def test_a_handle_of_another_kind():
    size = FOUR_RANKS
    mesh = make_mesh(size[:2], AXES)
    x, indices, weights, *_ = operands(6, "random", *size)

    def call(dispatched, combined, x, indices, weights):
        d = jflux.moe_dispatch(x, indices, weights, num_experts=8, **dispatched)
        return jflux.moe_combine(d.rows, d.handle, weights=weights, **combined)

    for pair in ((LEVELS, {"axis_name": "ep"}), ({"axis_name": "ep"}, LEVELS)):
        f = per_device(mesh, functools.partial(call, *pair))
        with pytest.raises(ValueError, match="must be that of the dispatch"):
            jax.eval_shape(f, x, indices, weights)
    with pytest.raises(ValueError, match="must be a positive multiple of the 4 ranks"):
        f = functools.partial(jflux.moe_dispatch, num_experts=6, **LEVELS)
        jax.eval_shape(per_device(mesh, f), x, indices, weights)
