"""Groups of ranks on several nodes, emulated by ``jflux.init(node=...)``: values and gradients of
every op, what takes two levels and what does not, and what waits for what."""

import dataclasses
import functools
import itertools
import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import two_level_gpu
from harness import (
    OPS,
    PLATFORM,
    check_gradients,
    check_values,
    each_call,
    fused_calls,
    make_mesh,
    of_way,
    run,
)
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from layers import assert_near, in_float64

import jflux
import jflux.nn as jnn
from jflux import _config, _heap, parallel
from jflux._call import ffi_targets, plans, primitives
from jflux._call.explain import explain
from jflux._call.plans import Machine, Path
from jflux._ops import _two_level, _two_level_plan
from jflux._ranks.node_levels import Levels
from jflux._stress.calls import Call, exchanged, groups_of, normal, operands, per_device, world_of

pytestmark = pytest.mark.skipif(PLATFORM == "gpu", reason="tests/two_level_gpu.py is for GPUs")


@dataclasses.dataclass(frozen=True)
class Place:
    """A mesh over devices whose nodes are named, one letter each."""

    nodes: str
    shape: tuple[int, ...]
    names: tuple[str, ...] = ("tp",)
    axis: object = "tp"
    order: tuple[int, ...] | None = None

    def mesh(self) -> Mesh:
        return make_mesh(self.shape, self.names, order=self.order)


NODE_TP = ("node", "tp")
PLACES = {
    "2 x 4": Place("aaaabbbb", (2, 4), NODE_TP, NODE_TP),
    "tp major": Place("aaaabbbb", (2, 4), NODE_TP, ("tp", "node")),
    "4 x 2, one axis": Place("aabbccdd", (8,)),
    "2 x 3 of 8": Place("aaabbbcc", (6,)),
    "any order": Place("abbaabba", (8,), order=(1, 0, 2, 5, 4, 3, 6, 7)),
    "beside data": Place("aabbccdd", (2, 2, 2), ("data", *NODE_TP), NODE_TP),
    "8 x 1": Place("abcdefgh", (8,)),
}
TWO, FOUR = PLACES["2 x 4"], PLACES["4 x 2, one axis"]
each_place = pytest.mark.parametrize("place", PLACES.values(), ids=PLACES.keys())
_SOME = ("2 x 4", "2 x 3 of 8", "any order", "8 x 1")
some_places = pytest.mark.parametrize("place", [PLACES[name] for name in _SOME], ids=_SOME)


@pytest.fixture
def on(own_heap):
    """A function that names the nodes of this process's devices, and cuts products in two."""
    with _config.override(node_chunks=2):
        yield lambda place: own_heap(node=list(place.nodes)) or place.mesh()


def paths(f, *args):
    """(op, path) of each call."""
    return [(c.op, c.plan.path) for c in jflux.explain(f, *args)]


# ---- Values --------------------------------------------------------------------------------------


@some_places
@each_call(lead=(4,), k=5, n=6)
def test_products(on, small_sums, place, call):
    check_values(call, on(place), place.axis)


@pytest.mark.parametrize(
    "call",
    [
        Call("all_gather_matmul", (2, 4, 3), dimension=1, gathered=True, dtype=jnp.bfloat16),
        Call("all_gather_matmul", (3,), k=7, n=5, transpose_rhs=True, out=jnp.float32),
        Call("matmul_reduce_scatter", (4, 3, 5), dimension=0, dtype=jnp.float64),
        Call("all_gather_matmul", (2, 4, 3), dimension=1, gathered=True, dtype=jnp.float64),
        Call("all_to_all_matmul", (2, 2), split=0, concat=1, dtype=jnp.float64),
        Call("matmul_all_to_all", (2, 2), split=1, concat=0, dtype=jnp.float64),
        Call("matmul_all_reduce", (16,), k=3, dtype=jnp.float64),
        Call("matmul_reduce_scatter", (1,), k=3, n=2, dtype=jnp.float16, transpose_rhs=True),
        Call("all_to_all_matmul", (2, 4), split=-1, concat=-2, k=3, dtype=jnp.bfloat16),
        Call("all_to_all_matmul", (2, 2), split=0, concat=1),
        Call("all_to_all_matmul", (2, 2), split=1, concat=1, transpose_rhs=True),
        Call("all_to_all_matmul", (3,), split=1, concat=1),
        Call("matmul_all_to_all", (2, 2), split=1, concat=0),
        Call("matmul_all_to_all", (2, 2), split=2, concat=1, transpose_rhs=True),
        Call("matmul_all_to_all", (3,), split=1, concat=1),
        Call("matmul_all_reduce", (16,), k=3, dtype=jnp.bfloat16, transpose_rhs=True),
        Call("matmul_all_reduce", (5,)),
    ],
    ids=lambda call: f"{call.op} {call}",
)
def test_dimensions_and_types(on, small_sums, call):
    place = PLACES["beside data"] if call.transpose_rhs else PLACES["tp major"]
    check_values(call, on(place), place.axis)


@pytest.mark.parametrize("place", [TWO, FOUR], ids=["2 x 4", "4 x 2"])
@each_call(OPS, lead=(2, 2), k=5, n=3)
def test_gradients(on, place, call):
    """They are other ops, which find their own two levels."""
    check_gradients(call, on(place), place.axis)


EXCHANGES = [
    ("all_gather", {"axis": 1, "tiled": True}),
    ("all_gather", {"axis": 2}),
    ("reduce_scatter", {"scatter_dimension": 1, "tiled": True}),
    ("reduce_scatter", {"scatter_dimension": 2}),
    ("all_to_all", {"split_axis": 1, "concat_axis": 0, "tiled": True}),
    ("all_to_all", {"split_axis": 1, "concat_axis": 1, "tiled": True}),
    ("all_to_all", {"split_axis": 2, "concat_axis": 0}),
    ("all_to_all", {"split_axis": 2, "concat_axis": 3, "tiled": True}),
]


@each_place
def test_exchanges(on, place):
    """All of them in one program, exactly: the numbers are small integers."""
    mesh, axis = on(place), place.axis
    ranks, lead = world_of(mesh, axis), mesh.devices.shape
    x = np.random.default_rng(0).integers(-9, 9, (*lead, 3, 2 * ranks, ranks, 2))
    x = x.astype(jnp.bfloat16)

    def body(x):
        return [getattr(jflux, op)(x, axis_name=axis, **options) for op, options in EXCHANGES]

    f = per_device(mesh, body)
    assert {path for _, path in paths(f, x)} <= {Path.TWO_LEVEL, Path.FUSED, Path.REFERENCE}
    for (op, options), y in zip(EXCHANGES, run(jax.jit(f), x), strict=True):
        for group in groups_of(mesh, axis):
            wants = exchanged(op, [x[at] for at in group], **options)
            for at, want in zip(group, wants, strict=True):
                np.testing.assert_array_equal(y[at].astype(np.float64), want.astype(np.float64))


@pytest.mark.skipif(
    jax.default_backend() == "cpu" and jax.__version_info__ < (0, 11),
    reason="with so many independent collectives, devices wait for each other in XLA's own",
)
@each_call(OPS, lead=(2, 6), k=8, n=8, dtype=jnp.float32)
def test_derivatives_in_both_modes(call, on):
    """The tangents of a call, and what is differentiated of a gradient, take two levels too."""
    mesh = on(FOUR)
    x, w = operands(call, mesh, "tp")

    def second(module):
        f = per_device(mesh, call.bind("tp", module))

        def loss(x, w):
            return jnp.sum(jnp.sin(f(x, w)))

        def both(x, w):
            tangents = jnp.cos(x), jnp.sin(w)
            of_gradient = jax.jvp(jax.grad(loss, (0, 1)), (x, w), tangents)
            return jax.jvp(f, (x, w), tangents), of_gradient

        return both

    paths = {c.plan.path for c in explain(second(jflux), x, w) if c.op == call.op}
    assert paths == {Path.TWO_LEVEL, Path.FUSED}  # inside nodes
    got = run(jax.jit(second(jflux)), x, w)
    assert_near(got, in_float64(second(jflux.reference), x, w), jnp.float32, roundings=200)


# ---- With NVSHMEM between nodes: the same calls, whose transfers here are XLA's ------------------


@pytest.fixture
def by_nvshmem(monkeypatch):
    found = primitives.levels_over

    def forced(*args):
        levels = found(*args)
        if not isinstance(levels, Levels):
            return levels
        used.append(levels)
        return dataclasses.replace(levels, by_nvshmem=True)

    used: list[Levels] = []
    monkeypatch.setattr(primitives, "levels_over", forced)
    jax.clear_caches()
    yield
    jax.clear_caches()
    assert used


@pytest.mark.parametrize("place", ["tp major", "any order"])
@each_call(lead=(4,), k=5, n=6)
def test_products_by_nvshmem(on, by_nvshmem, small_sums, place, call):
    check_values(call, on(PLACES[place]), PLACES[place].axis)


@each_place
def test_exchanges_by_nvshmem(on, by_nvshmem, place):
    test_exchanges(on, place)


def test_sums_in_two_steps_by_nvshmem(on, by_nvshmem, small_sums):
    """Exchange and gather of vectors that the nodes do not divide."""
    check_values(Call("matmul_all_reduce", (5,)), on(TWO), TWO.axis)


@each_place
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "scattered"])
def test_all_reduce(on, monkeypatch, place, whole):
    """Both ways, with what follows the sum; under ``check_vma=True``."""
    if not whole:  # of few bytes too, and in two steps between nodes
        monkeypatch.setattr(_two_level_plan, "INSIDE_LATENCY", 0)
        monkeypatch.setattr(_two_level, "NODE_LATENCY", 0)
    rows = 5
    mesh, axis = on(place), place.axis
    x = normal(0, (*mesh.devices.shape, rows, 9), jnp.bfloat16)
    residual, scale = normal(1, (rows, 9), jnp.bfloat16), normal(2, (9,), np.float32)
    lead, others = mesh.devices.ndim, [n for n in mesh.axis_names if n not in np.ravel(axis)]

    def body(x, residual, scale):
        norm = jflux.RMSNorm(scale)
        y, normed = jflux.all_reduce(
            x.reshape(x.shape[lead:]), axis_name=axis, residual=residual, norm=norm
        )
        _, scaled = jflux.all_reduce(
            x.reshape(x.shape[lead:]), axis_name=axis, residual=residual, norm=norm,
            quantize=jflux.Format(jnp.int8, (1, -1), power_of_two=False),
        )  # fmt: skip
        alone = jflux.all_reduce(x.reshape(x.shape[lead:]), axis_name=axis)
        return [a[None] for a in (alone, y, normed, scaled.dequantize())]

    specs = (P(*mesh.axis_names), P(), P())
    f = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P(*others or [None]))
    found = jflux.explain(f, x, residual, scale)
    used = [c.plan.config["whole"] for c in found if c.plan.path == Path.TWO_LEVEL]
    assert used == ([] if place is PLACES["8 x 1"] else [whole] * 3)
    alone, y, normed, scaled = run(jax.jit(f), x, residual, scale)
    for i, group in enumerate(groups_of(mesh, axis)):
        want = sum(x[at].astype(np.float64) for at in group)
        unit = float(jnp.finfo(jnp.bfloat16).eps)
        bound = 2 * unit * sum(abs(x[at].astype(np.float64)) for at in group)
        assert (abs(alone[i].astype(np.float64) - want) <= bound).all()
        want = want + residual.astype(np.float64)
        assert (abs(y[i].astype(np.float64) - want) <= bound + unit * abs(want)).all()
        wide = y[i].astype(np.float64)
        wide *= scale / np.sqrt(np.mean(wide**2, -1, keepdims=True) + 1e-6)
        np.testing.assert_allclose(normed[i].astype(np.float64), wide, rtol=2 * unit, atol=1e-6)
        wide = normed[i].astype(np.float64)
        assert (abs(scaled[i] - wide) <= abs(wide).max(-1, keepdims=True) / 253).all()


def test_all_ranks_have_the_same_sums(on, small_sums):
    """What a node rounds, and in which order nodes are summed, does not depend on who sums."""
    mesh = on(FOUR)

    def body(x, w):
        return jflux.matmul_all_reduce(x, w, axis_name="tp"), jflux.all_reduce(x, axis_name="tp")

    x, w = normal(0, (8, 16, 40), jnp.bfloat16), normal(1, (8, 40, 24), jnp.bfloat16)
    for y in run(jax.jit(per_device(mesh, body)), x, w):
        for rank in range(1, 8):
            assert y[rank].tobytes() == y[0].tobytes()


def test_several_operands_and_epilogues(on):
    """Against the reference: queries, keys and values; a gated pair; two terms, bias, residual."""
    place = PLACES["2 x 3 of 8"]
    mesh, axis = on(place), place.axis
    shapes = [(4, 8), (8, 6), (8, 6), (6,), (12 * world_of(mesh, axis), 3), (3, 5), (5,), (12, 5)]
    arrays = [normal(i, (*mesh.devices.shape, *s), np.float32) for i, s in enumerate(shapes)]

    def body(module, x, w1, w2, b, x2, w3, bias, residual):
        gather = functools.partial(module.all_gather_matmul, x, axis_name=axis)
        qkv = gather((w1, w2, w1), bias=(b, None, b), return_gathered=True)
        gated = gather((w1, w2), gated=True, activation="silu", bias=(b, None))
        scattered = module.matmul_reduce_scatter(
            (x2, x2), (w3, 2 * w3), axis_name=axis, bias=bias, residual=residual
        )
        return qkv, gated, scattered

    def results_and_gradients(module):
        f = per_device(mesh, functools.partial(body, module))
        y, pull = jax.vjp(f, *arrays)
        return y, pull(jax.tree.map(jnp.sin, y))

    got, want = (
        jax.jit(functools.partial(results_and_gradients, m))() for m in (jflux, jflux.reference)
    )
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(g, w, rtol=2e-4, atol=2e-4 * float(abs(w).max()))


def test_transformations(on):
    """scan over layers, checkpoint, vmap and gradients of gradients, against the reference."""
    mesh, axis = on(TWO), TWO.axis

    def loss(module, x, ws):
        @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.nothing_saveable)
        def layer(x, w):
            h = module.all_gather_matmul(x, w[0], axis_name=axis, activation="relu")
            return x + module.matmul_reduce_scatter(h, w[1].T, axis_name=axis), ()

        y, _ = lax.scan(layer, x, ws)
        batched = jax.vmap(lambda x: module.all_gather_matmul(x, ws[0, 0], axis_name=axis))(
            jnp.stack([x, 2 * x])
        )
        return jnp.sum(jnp.sin(y)) + jnp.sum(batched**2)

    def body(module, x, ws):
        return jax.grad(functools.partial(loss, module), argnums=(0, 1))(x, ws)

    x, ws = normal(0, (2, 4, 4, 8), np.float32), normal(1, (2, 4, 3, 2, 8, 4), np.float32) / 3
    got, want = (
        jax.jit(per_device(mesh, functools.partial(body, m)))(x, ws)
        for m in (jflux, jflux.reference)
    )
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-4 * float(abs(w).max()))


def test_layers(on):
    """jflux.nn and jflux.parallel take an axis of two levels as any other."""
    mesh = on(TWO)
    x, w = normal(0, (2, 16, 8), np.float32), normal(1, (8, 16), np.float32)
    f = functools.partial(jnn.column_parallel, axis_name=NODE_TP, mesh=mesh)
    found = jflux.explain(jax.jit(f), x, w)
    assert ("all_gather_matmul", Path.TWO_LEVEL) in [(c.op, c.plan.path) for c in found]
    np.testing.assert_allclose(jax.jit(f)(x, w), x @ w, rtol=1e-4, atol=1e-4)
    scheme, grid = parallel.Scheme(), parallel.Grid(y=8).mesh()  # k is split over two nodes
    f = jax.shard_map(
        lambda x, w: parallel.dense(x, w, scheme=scheme), mesh=grid,
        in_specs=(P(None, None, "y"), P(("y", "z"), "x")), out_specs=P(("data", "z"), None, "x"),
    )  # fmt: skip
    called = [(c.op, c.plan.path) for c in jflux.explain(f, x, w)]
    assert {op for op, path in called if path == Path.TWO_LEVEL} & {
        "matmul_all_reduce",
        "all_reduce",
    }
    np.testing.assert_allclose(jax.jit(f)(x, w), x @ w, rtol=1e-4, atol=1e-4)


# ---- Plans, and what takes none ------------------------------------------------------------------


def _gather(mesh, axis, **options):
    call = Call("all_gather_matmul", (4,), k=8, n=8)
    f = per_device(mesh, call.bind(axis), **options)
    return (lambda *args: f(*args)), operands(call, mesh, axis)  # a new function: lowered anew


def test_explain_tells_both_levels(on):
    f, args = _gather(on(TWO), TWO.axis)
    whole, inside = jflux.explain(f, *args)
    assert whole.plan.path == Path.TWO_LEVEL and "  path    two-level" in str(whole).splitlines()
    assert whole.plan.config == {"nodes": 2, "ranks": 4, "chunks": 2}
    assert whole.plan.reason.startswith("2 nodes of 4 ranks; the product for each in 2 chunks")
    assert (inside.op, inside.plan.path) == ("all_gather_matmul", Path.FUSED)
    assert inside.operands[0] == "float32[2, 8]"  # a chunk of a rank's four rows


@pytest.mark.parametrize(
    "call, kernels",
    [
        (Call("all_gather_matmul", (512,), k=4096, n=4096), ["all_gather_matmul"] * 2),
        (Call("matmul_reduce_scatter", (512,), k=4096, n=4096), ["matmul_reduce_scatter"] * 2),
        # The network is slower than the product: in chunks.
        (Call("all_gather_matmul", (4096,), k=4096, n=512), ["all_gather_matmul"] * 4),
        (
            Call("matmul_all_reduce", (4096,), k=4096, n=8192),
            ["matmul_reduce_scatter", "all_gather"] * 4,
        ),
        (Call("matmul_all_reduce", (64,), k=512, n=4096), ["reduce_scatter", "all_gather"]),
    ],
    ids=str,
)
def test_lowered_for_gpus(monkeypatch, call, kernels):
    """On two nodes of four that are not here: which kernels run inside them."""
    call = dataclasses.replace(call, dtype=jnp.bfloat16)
    machine = Machine("cuda", sm_count=132, link_gbps=320.0, is_here=False)
    monkeypatch.setattr(_heap, "why_not_usable", lambda platform, mesh, table: None)
    monkeypatch.setattr(_heap, "node_of", lambda platform: {d: d // 4 for d in range(8)})
    monkeypatch.setattr(plans, "machine_of", lambda platform, mesh: machine)
    monkeypatch.setattr(ffi_targets, "register_targets", lambda platform: None)
    mesh = make_mesh((8,))
    arrays = [
        jax.ShapeDtypeStruct((8, *shape), call.dtype)
        for shape in (call.x_shape(8), call.w_shape(8))
    ]
    f = jax.jit(per_device(mesh, call.bind("tp")))
    with jflux.config(strict=True, always=False):
        text = f.trace(*arrays).lower(lowering_platforms=("cuda",)).as_text("hlo")
    assert sorted(fused_calls(text)) == sorted(kernels)
    assert re.search(r"collective-permute|all-gather|all-to-all", text)


def test_the_switch_for_the_reference_holds(on):
    f, args = _gather(on(TWO), TWO.axis)
    with jflux.config(fused=False):
        assert paths(f, *args) == [("all_gather_matmul", Path.REFERENCE)]


def test_groups_inside_nodes_run_kernels_as_ever(on):
    f, args = _gather(on(TWO), "tp")
    assert paths(f, *args) == [("all_gather_matmul", Path.FUSED)]


@pytest.mark.parametrize(
    "place, why",
    [
        (
            Place("aaabbbbb", (8,)),
            r"devices \[0, .*, 7\] has 3 ranks on node 0 and 5 ranks on node 1",
        ),
        (
            Place("aaabaabb", (2, 4), NODE_TP),
            r"\[0, 1, 2, 3\] has 3 ranks on node 0 and 1 rank on node 1",
        ),
        (
            Place("aabbabab", (2, 4), NODE_TP),
            r"\[0, 1, 2, 3\] has 2 ranks on node 0 and 2 .*, but .*\[4, 5, 6, 7\] has .* alike",
        ),
    ],
)
def test_groups_that_do_not_factor_take_the_reference(on, caplog, place, why):
    mesh = on(place)
    f, args = _gather(mesh, place.axis)
    with pytest.raises(NotImplementedError, match=why):
        jax.jit(f)(*args)
    with jflux.config(strict=False), caplog.at_level(logging.WARNING, "jflux"):
        (call,) = jflux.explain(f, *args)
        assert call.plan.path == Path.REFERENCE and re.search(why, call.plan.reason)
        assert re.search(why, caplog.text)
        check_values(Call("all_gather_matmul", (4,), k=8, n=8), mesh, place.axis)


def test_a_custom_call_stays_on_its_node(on):
    mesh = on(TWO)
    call = jflux.custom_call(
        "nobody_registers_it", jax.ShapeDtypeStruct((3,), np.float32), axis_name=TWO.axis,
        data_bytes=8, num_signals=1, reference=lambda x, axis_name: lax.psum(x, axis_name),
    )  # fmt: skip
    x = normal(0, (2, 4, 3), np.float32)
    with pytest.raises(NotImplementedError, match="2 nodes of 4 ranks, and its kernel reaches"):
        per_device(mesh, call)(x)
    with jflux.config(strict=False):
        y = jax.jit(per_device(mesh, call))(x)
    np.testing.assert_allclose(y, np.broadcast_to(x.sum((0, 1)), y.shape), rtol=1e-5, atol=1e-5)


def test_what_no_kernel_takes_inside_takes_the_reference(on):
    """As on one node, and for the same reason."""
    mesh = on(TWO)
    f = per_device(mesh, lambda x: jflux.reduce_scatter(x, axis_name=TWO.axis, tiled=True))
    x = np.arange(64, dtype=np.int32).reshape(2, 4, 8)
    with pytest.raises(NotImplementedError, match="operands are int32, the kernels take"):
        f(x)
    with jflux.config(strict=False):
        np.testing.assert_array_equal(jax.jit(f)(x).ravel(), x.sum((0, 1)))


# ---- What waits for what -------------------------------------------------------------------------


def _ancestors(text):
    """For each instruction of a lowered program the instructions that it depends on, of its own
    computation; and what each is."""
    found, kinds = {}, {}
    pattern = r"^\s*(?:ROOT )?%?([\w.-]+) = .*? ([\w-]+)\((.*)$"
    for name, kind, rest in re.findall(pattern, text, re.M):
        target = re.search(r'custom_call_target="jflux_(\w+)"', rest)
        kinds[name] = target[1] if target else kind
        direct = [n for n in re.findall(r"[\w.-]+", rest.partition("), ")[0]) if n in found]
        found[name] = set(direct).union(*(found[n] for n in direct))
    return found, kinds


@pytest.mark.parametrize("op", OPS)
def test_transfers_run_beside_products(on, op):
    """Between nodes, transfer i waits for no product but its own, and the product of chunk i for no
    later transfer: so one can be under way while the other runs. Where x travels, the order is
    given to XLA's scheduler by barriers, which the compiled program no longer has: the second
    transfer after the first, and after one of the products that need none."""
    mesh, call = on(TWO), of_way(op, lead=(4,), k=8, n=8)
    f = per_device(mesh, call.bind(TWO.axis))
    lowered = jax.jit(f).lower(*operands(call, mesh, TWO.axis))
    for ordered, text in ((1, lowered.as_text("hlo")), (0, lowered.compile().as_text())):
        ancestors, kinds = _ancestors(text)
        products = [n for n, kind in kinds.items() if kind == op]
        transfers = [n for n, kind in kinds.items() if kind == "collective-permute"]
        assert len(products) == 4 and len(transfers) == 2, text
        if call.multiplies_after:
            waits = {p: len(ancestors[p] & set(transfers)) for p in products}
            assert sorted(waits.values()) == [0, 0, 1, 1 + ordered]
            before = [p for t in transfers for p in ancestors[t] & set(products)]
            assert [waits[p] for p in before] == [0] * ordered
        else:
            assert [len(ancestors[t] & set(products)) for t in transfers] == [1, 1]
            assert not any(ancestors[p] & set(transfers) for p in products)


def test_the_gpu_script_reads_schedules():
    """In CUDA graphs and fusions too. A product after the end of a transfer is not beside it."""
    text = """HloModule m, is_scheduled=true

%graph (p: bf16[8]) -> bf16[8] {
  %p = bf16[8]{0} parameter(0)
  ROOT %c = bf16[8]{0} custom-call(%p), custom_call_target="jflux_all_gather_matmul"
}

%of-slice (q: bf16[16]) -> bf16[8] {
  %q = bf16[16]{0} parameter(0)
  %s = bf16[8]{0} slice(%q), slice={[0:8]}
  ROOT %d = bf16[8]{0} custom-call(%s), custom_call_target="jflux_matmul_all_to_all"
}

ENTRY %main (x: bf16[8], y: bf16[16]) -> bf16[8] {
  %x = bf16[8]{0} parameter(0)
  %start = (bf16[8]{0}, bf16[8]{0}) collective-permute-start(%x), source_target_pairs={{0,1}}
  %a = bf16[8]{0} call(%x), to_apply=%graph
  %y = bf16[16]{0} parameter(1)
  %e = bf16[8]{0} fusion(%y), kind=kCustom, calls=%of-slice
  %done = bf16[8]{0} collective-permute-done((bf16[8]{0}, bf16[8]{0}) %start)
  %late = (bf16[8]{0}, bf16[8]{0}) all-gather-start(%done), dimensions={0}
  %end = bf16[8]{0} all-gather-done(%late)
  ROOT %b = bf16[8]{0} custom-call(%end), custom_call_target="__cublas$gemm"
}
"""
    assert two_level_gpu.overlapped(text) == [("%start", 2), ("%late", 0)]


@pytest.mark.parametrize("place", [TWO, Place("ab" + 6 * "c", (2,))], ids=["2 x 4", "2 x 1"])
def test_xla_combines_no_transfers(on, place):
    """On GPUs it combines permutations of equal pairs in equal order, unless one waits for the
    other."""
    mesh = on(place)
    call = of_way("all_gather_matmul", lead=(4,), k=8, n=8)
    f = per_device(mesh, call.bind(place.axis))
    with _config.override(node_chunks=4):
        text = jax.jit(f).lower(*operands(call, mesh, place.axis)).as_text("hlo")
    ancestors, kinds = _ancestors(text)
    transfers = [n for n, kind in kinds.items() if kind == "collective-permute"]
    pairs = dict(re.findall(r"([\w.-]+) = .*collective-permute\(.*source_target_pairs=(\S+)", text))
    assert len(transfers) == 4 and set(transfers) == set(pairs)
    for one, other in itertools.combinations(transfers, 2):
        assert pairs[one] != pairs[other] or one in ancestors[other], (one, other)


def test_sums_between_nodes_form_a_chain(on, small_sums):
    mesh, call = on(TWO), of_way("matmul_all_reduce", lead=(8,), k=8, n=8)
    f = per_device(mesh, call.bind(TWO.axis))
    text = jax.jit(f).lower(*operands(call, mesh, TWO.axis)).as_text("hlo")
    ancestors, kinds = _ancestors(text)
    products = [n for n, kind in kinds.items() if kind == "matmul_reduce_scatter"]
    first, second = (n for n, kind in kinds.items() if kind == "all-gather")
    assert first in ancestors[second] and not ancestors[first] >= set(products)
    assert not any(first in ancestors[p] for p in products)
