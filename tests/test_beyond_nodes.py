"""Ops whose kernels reach the ranks of one node, on ranks of several nodes: they take other paths,
with the values that they have on one node."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import PLATFORM, RANKS, make_mesh, run
from test_expert_parallel import choices
from test_ragged_all_to_all import draw_sizes, exact

import jflux
from jflux import moe
from jflux._call.plans import Path
from jflux._stress.calls import per_device

pytestmark = [
    pytest.mark.wide,
    pytest.mark.skipif(PLATFORM == "gpu" or RANKS < 4, reason="two nodes of two ranks, emulated"),
]
WORLD, T, K, H, F = 4, 6, 2, 8, 5
EXPERTS = 2 * WORLD


def ragged(seed):
    rng = np.random.default_rng(seed)
    sizes = draw_sizes(rng, WORLD, 1, T, 2 * T)
    operand, output = rng.normal(size=(WORLD, T, H)), rng.normal(size=(WORLD, 2 * T, H))
    return operand.astype("f4"), output.astype("f4"), *sizes


def drawn(*shapes):
    """Operands of these shapes, and choices of experts, of each rank."""

    def draw(seed):
        rng = np.random.default_rng(seed)
        indices = choices(rng, "random", WORLD, T, K, EXPERTS)
        return indices, *(rng.normal(size=(WORLD, *shape)).astype("f4") for shape in shapes)

    return draw


def _everyones(indices):
    """The routing of all ranks' tokens."""
    return moe.route(jax.lax.all_gather(indices, "tp", tiled=True), EXPERTS)


def gathered(indices, x, w):
    return moe.all_gather_grouped_matmul(x, w, _everyones(indices), axis_name="tp")


def scattered(indices, h, w, weights):
    weights = jax.lax.all_gather(weights, "tp", tiled=True)
    return moe.grouped_matmul_reduce_scatter(h, w, _everyones(indices), weights, axis_name="tp")


def reduced(indices, h, w, weights):
    weights = jax.lax.all_gather(weights, "tp", tiled=True)
    return moe.grouped_matmul_all_reduce(h, w, _everyones(indices), weights, axis_name="tp")


def dispatched(indices, x, w, weights, partial_sums=True):
    options = {"num_experts": EXPERTS, "axis_name": "tp", "layout": "masked"}
    d = jflux.moe_dispatch(x, indices, weights, partial_sums=partial_sums, **options)
    y = jnp.einsum("ech,ehf->ecf", d.rows, w)
    return jflux.moe_combine(y, d.handle, weights=weights, axis_name="tp")


def products(indices, x, up, down, weights, exchange):
    h, handle = jflux.dispatch_grouped_matmul(
        x, up, indices, num_experts=EXPERTS, exchange=exchange, axis_name="tp"
    )
    return jflux.grouped_matmul_combine(h, down, handle, weights, axis_name="tp")


def attended(q, k, v, form):
    return jflux.attention(q, k, v, axis_name="tp", causal=True, layout="contiguous", form=form)


def decoded(q, k, v, lengths):
    return jflux.flash_decode(q[0], k, v, lengths[0].astype(jnp.int32), axis_name="tp")


def of_attention(seed):
    rng = np.random.default_rng(seed)
    q, k, v = (rng.normal(size=(WORLD, 2, T, heads, H)).astype("f4") for heads in (4, 2, 2))
    return q, k, v


def of_decoding(seed):
    rng = np.random.default_rng(seed)
    q = np.broadcast_to(rng.normal(size=(1, 1, 2, 4, H)), (WORLD, 1, 2, 4, H)).astype("f4")
    k, v = (rng.normal(size=(WORLD, 2, T, 2, H)).astype("f4") for _ in range(2))
    return q, k, v, np.broadcast_to([[T, 3 * T + 1]], (WORLD, 1, 2)).copy()


local = EXPERTS // WORLD
EXPERT_ROWS = WORLD * T * K
CASES = {
    "ragged_all_to_all": (
        lambda *args: jflux.ragged_all_to_all(*args, axis_name="tp"), ragged, Path.REFERENCE,
    ),
    "all_gather_grouped_matmul": (
        gathered, drawn((T, H), (EXPERTS, H, F)), Path.DECOMPOSED,
    ),
    "grouped_matmul_reduce_scatter": (
        scattered, drawn((EXPERT_ROWS, F), (EXPERTS, F, H), (T, K)), Path.DECOMPOSED,
    ),
    "grouped_matmul_all_reduce": (
        reduced, drawn((EXPERT_ROWS, F), (EXPERTS, F, H), (T, K)), None,
    ),
    "moe_dispatch": (dispatched, drawn((T, H), (local, H, F), (T, K)), Path.DECOMPOSED),
    "moe_dispatch, each row": (
        functools.partial(dispatched, partial_sums=False),
        drawn((T, H), (local, H, F), (T, K)), None,
    ),
    "dispatch_grouped_matmul, gather": (
        functools.partial(products, exchange="gather"),
        drawn((T, H), (local, H, F), (local, F, H), (T, K)), None,
    ),
    "dispatch_grouped_matmul, dispatch": (
        functools.partial(products, exchange="dispatch"),
        drawn((T, H), (local, H, F), (local, F, H), (T, K)), None,
    ),
    "attention, gather": (functools.partial(attended, form="gather"), of_attention, None),
    "attention, ring": (functools.partial(attended, form="ring"), of_attention, None),
    "decode_merge": (decoded, of_decoding, Path.DECOMPOSED),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_values_are_those_of_one_node(name, own_heap):
    f, draw, path = CASES[name]
    args = draw(1)
    others = RANKS - WORLD
    got = []
    for nodes in (["a"] * RANKS, ["a", "a", "b", "b"] + ["c"] * others):
        own_heap(node=nodes)
        with jflux.config(strict=False):
            program = per_device(make_mesh((WORLD,)), f)
            calls = {c.op: c.plan for c in jflux.explain(program, *args)}
            got.append(run(jax.jit(program), *args))
    assert np.abs(np.asarray(got[0], np.float64)).max() > 0.1
    np.testing.assert_allclose(got[0], got[1], rtol=2e-5, atol=2e-5)
    if path is not None:
        plan = calls[name]
        assert plan.path == path
        assert "2 nodes of 2 ranks, and " in plan.reason and "one node" in plan.reason


def test_ragged_rows_by_definition(own_heap):
    own_heap(node=["a", "a", "b", "b"] + ["c"] * (RANKS - WORLD))
    operand, output, *sizes = ragged(2)
    f = per_device(make_mesh((WORLD,)), CASES["ragged_all_to_all"][0])
    with jflux.config(strict=False):
        y = run(jax.jit(f), operand, output, *sizes)
    np.testing.assert_array_equal(y, np.stack(exact(operand, output, sizes)))
