"""How groups of ranks factor into nodes, and plans of calls over two levels: pure functions."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import make_mesh

import jflux
from jflux._call.plans import Machine, Path
from jflux._ops import _two_level_plan
from jflux._ops._two_level_plan import Step, chunks_of
from jflux._ops.collectives import all_reduce, exchange
from jflux._ops.products import all_gather_matmul, matmul_all_reduce
from jflux._ranks import meshes
from jflux._ranks.node_levels import Levels, levels_of

TP = {"tp": 8}


def _levels(nodes, table=None, names=("tp",), shape=TP):
    table = np.arange(len(nodes))[None] if table is None else np.array(table)
    return levels_of(table, {d: "abcdefgh".index(n) for d, n in enumerate(nodes)}, names, shape)


# ---- Factoring -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "nodes, found",
    [
        ("aaaabbbb", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("abababab", ((0, 2, 4, 6), (1, 3, 5, 7))),
        ("bbaabbaa", ((0, 1, 4, 5), (2, 3, 6, 7))),  # the node of the first rank is first
        ("aabbccdd", ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("abcdefgh", tuple((i,) for i in range(8))),
    ],
)
def test_equally_many_ranks_on_each_node(nodes, found):
    levels = _levels(nodes)
    assert levels.nodes == found
    assert (levels.count, levels.local) == (len(found), len(found[0]))
    assert levels.order == tuple(rank for node in found for rank in node)
    assert levels.inside.groups == found
    assert levels.between.groups == tuple(zip(*found, strict=True))


def test_groups_inside_nodes():
    assert _levels("aaaabbbb", [[0, 1, 2, 3], [4, 5, 6, 7]]) is None
    assert _levels("aaaaaaaa") is None


@pytest.mark.parametrize(
    "nodes, table, words",
    [
        (
            "aaabbbbb", None,
            "the group of devices [0, 1, 2, 3, 4, 5, 6, 7] has 3 ranks on node 0 and 5 ranks on "
            "node 1; two levels need equally many on each",
        ),
        ("aaaabbcc", [[0, 1, 4, 5], [2, 3, 6, 7]], None),  # alike, though on other nodes
        (
            "aaaabbcc", [[0, 1, 2, 3], [4, 5, 6, 7]],
            "the group of devices [0, 1, 2, 3] has 4 ranks on node 0, but the group of devices "
            "[4, 5, 6, 7] has 2 ranks on node 1 and 2 ranks on node 2, or in another order; two "
            "levels need all groups alike",
        ),
        (
            "aabbabab", [[0, 1, 2, 3], [4, 5, 6, 7]],
            "the group of devices [0, 1, 2, 3] has 2 ranks on node 0 and 2 ranks on node 1, but "
            "the group of devices [4, 5, 6, 7] has 2 ranks on node 0 and 2 ranks on node 1, or in "
            "another order; two levels need all groups alike",
        ),
    ],
)  # fmt: skip
def test_verdicts_in_words(nodes, table, words):
    found = _levels(nodes, table)
    assert isinstance(found, Levels) if words is None else found == words


@pytest.mark.parametrize("names", [("node", "tp"), ("tp", "node")])
def test_shifts_name_ranks_in_the_order_of_the_mesh(names):
    """Whatever the order of the axes, data go to the counterpart on another node."""
    shape = {"node": 2, "data": 3, "tp": 4}
    order = np.arange(8).reshape(2, 4)
    ranks = order if names[0] == "node" else order.T
    found = _levels("aaaabbbb", [ranks.ravel()], names, shape)
    assert found.axis_sizes == (("node", 2), ("tp", 4))
    assert sorted(found.shift(1)) == [(r, (r + 4) % 8) for r in range(8)]
    assert sorted(found.shift(0)) == [(r, r) for r in range(8)]


def test_parts_of_a_group_are_groups():
    mesh = make_mesh((2, 4), ("a", "b")) if len(jax.devices()) >= 8 else None
    if mesh is None:
        pytest.skip("takes eight devices")
    part = meshes.Subgroups(("a", "b"), ((0, 3, 5, 6), (1, 2, 4, 7)))
    assert meshes.group_table(mesh, (part,)).tolist() == [[0, 3, 5, 6], [1, 2, 4, 7]]
    part = meshes.Subgroups(("b",), ((0, 2), (1, 3)))
    assert meshes.group_table(mesh, part).tolist() == [[0, 2], [1, 3], [4, 6], [5, 7]]


# ---- Chunks --------------------------------------------------------------------------------------


def _step(product_us, transfer_us, rows=1 << 16, divided=5040, own=True):
    return Step(
        rows=rows,
        flops=product_us * 1e-6 * _two_level_plan.MEASURED_TFLOPS * 1e12,
        nbytes=transfer_us * 1e-6 * _two_level_plan.NODE_BYTES_PER_SECOND,
        divided=divided,
        own=own,
    )


def test_what_hides_anyway_is_not_cut():
    assert chunks_of(_step(1000, 999)) == 1
    assert chunks_of(_step(1000, 999, own=False)) > 1
    assert chunks_of(_step(1000, 1001)) > 1


def test_chunks_follow_what_is_left_to_hide():
    """More of them for longer products, until one more costs as much as it saves."""
    counts = [chunks_of(_step(us, 1e6)) for us in (10, 80, 320, 1280, 1e5)]
    assert counts == sorted(counts) and counts[0] == 1 and counts[-1] == _two_level_plan.MOST_CHUNKS


def test_chunks_divide_and_keep_rows_for_a_kernel():
    for divided, rows in itertools.product((1, 2, 6, 7, 128, 4098), (100, 512, 1500, 1 << 16)):
        count = chunks_of(_step(1e5, 1e6, rows, divided))
        assert divided % count == 0 and (count == 1 or rows / count >= _two_level_plan.FEWEST_ROWS)
    assert chunks_of(_step(1e5, 1e6, divided=5 * 128)) == 5  # not 8: a tile would be cut


# ---- Plans ---------------------------------------------------------------------------------------

LEVELS = _levels("aaaabbbb")
CUDA = Machine("cuda", sm_count=132, link_gbps=320)


def _gather_plan(rows, n, dtype=jnp.bfloat16, levels=LEVELS, **options):
    x = jax.ShapeDtypeStruct((rows, 8192), dtype)
    w = jax.ShapeDtypeStruct((8192, n), dtype)
    params = all_gather_matmul.Params(("tp",), 8, 0, ("y",), False, np.dtype(dtype), **options)
    with jflux.config(always=False):
        return all_gather_matmul._op.plan([x, w], params, CUDA, levels)


def test_products_with_few_rows_are_decomposed():
    """Then one all_gather of two levels and one product are the fewest latencies."""
    plan = _gather_plan(64, 1024)
    assert plan.path == Path.DECOMPOSED and "256 rows of the product for each" in plan.reason
    plan = _gather_plan(1024, 4096)
    assert plan.path == Path.TWO_LEVEL
    assert plan.config == {"nodes": 2, "ranks": 4, "chunks": 1}
    assert _gather_plan(4096, 1280).config["chunks"] > 1  # the network is slower than the product


def test_what_takes_the_reference_inside_takes_it_whole():
    plan = _gather_plan(1024, 4096, np.float32)
    assert plan.path == Path.REFERENCE and plan.unsupported
    assert "operands are float32" in plan.reason
    plan = _gather_plan(1024, 4096, levels=_levels("abcdefgh"), dtype=np.float32)
    assert plan.path == Path.TWO_LEVEL  # one rank on a node: XLA multiplies whatever it is


def test_more_nodes_than_a_kernel_has_ranks():
    """The limit of ranks is one of those inside a node."""
    table = np.arange(64)[None]
    found = levels_of(table, {d: d // 8 for d in range(64)}, ("tp",), {"tp": 64})
    assert _gather_plan(1024, 4096, levels=found).path == Path.TWO_LEVEL
    found = levels_of(table, {d: d // 16 for d in range(64)}, ("tp",), {"tp": 64})
    plan = _gather_plan(1024, 4096, levels=found)
    assert plan.path == Path.REFERENCE and "16 ranks, kernels take up to 8" in plan.reason


def test_sums_for_all_ranks():
    def plan(rows, columns):
        x = jax.ShapeDtypeStruct((rows, 1024), jnp.bfloat16)
        w = jax.ShapeDtypeStruct((1024, columns), jnp.bfloat16)
        params = matmul_all_reduce.Params(
            all_reduce.Params(("tp",), 8, None), False, np.dtype(jnp.bfloat16), None
        )
        return matmul_all_reduce._op.plan([x, w], params, CUDA, LEVELS)

    with jflux.config(always=False):
        assert plan(64, 4096).path == Path.DECOMPOSED  # small: the sum has its own two levels
        assert "do not divide 4098 rows" in plan(4098, 4096).reason
        large = plan(8192, 8192)
        assert large.path == Path.TWO_LEVEL and large.config["chunks"] > 1


def test_large_collectives_are_lax_s():
    x = jax.ShapeDtypeStruct((1 << 28,), np.uint8)
    params = exchange.Params(("tp",), 8, None, 0)
    with jflux.config(always=False):
        plan = exchange._ops["all_gather"].plan([x], params, CUDA, LEVELS)
        assert plan.path == Path.REFERENCE and not plan.unsupported
        small = jax.ShapeDtypeStruct((1 << 10,), np.uint8)
        plan = exchange._ops["all_gather"].plan([small], params, CUDA, LEVELS)
        assert plan.path == Path.TWO_LEVEL


def test_collectives_of_one_rank_on_each_node_are_lax_s():
    """Of any size: there is nothing for jflux to do."""
    alone, x = _levels("abcdefgh"), jax.ShapeDtypeStruct((1 << 10,), np.float32)
    exchanged = exchange.Params(("tp",), 8, None, 0)
    plans = (
        exchange._ops["all_gather"].plan([x], exchanged, CUDA, alone),
        all_reduce._op.plan([x], all_reduce.Params(("tp",), 8, None), CUDA, alone),
    )
    for plan in plans:
        assert plan.path == Path.REFERENCE and not plan.unsupported
        assert "8 nodes of 1 rank" in plan.reason


def test_an_algorithm_that_is_asked_for_runs_inside_nodes():
    x = jax.ShapeDtypeStruct((1 << 20,), np.float32)
    for algorithm, whole in ((None, 0), ("two_shot", 1)):
        params = all_reduce.Params(("tp",), 8, algorithm)
        plan = all_reduce._op.plan([x], params, CUDA, LEVELS)
        assert plan.config["whole"] == whole
