"""Axes to groups of ranks (jflux/_ranks/meshes.py); and that a call runs on its mesh."""

import functools
import itertools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from harness import (
    PRODUCTS,
    RANKS,
    SHAPES,
    check_values,
    drawn_meshes,
    examples,
    fused_calls,
    make_mesh,
    of_way,
    run,
)
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import jflux
from jflux._ops._spec import all_ops
from jflux._ranks import meshes, program_devices
from jflux._stress.calls import (
    Call,
    as_tuple,
    assert_close,
    exact,
    groups_of,
    normal,
    operands,
    per_device,
)

CALLS = [of_way(op, lead=(3,), k=8, n=8, dtype=jnp.bfloat16) for op in PRODUCTS]


@examples(100)
@given(place=drawn_meshes())
def test_group_table(place):
    mesh, axis_name = place
    want = [[mesh.devices[at].id for at in group] for group in groups_of(mesh, axis_name)]
    table = meshes.group_table(mesh, axis_name)
    assert table.dtype == np.int64
    assert table.tolist() == want


@examples(30)
@given(place=drawn_meshes())
def test_group_table_is_the_order_of_lax(place):
    """The groups and ranks that lax's own collectives see."""
    mesh, axis_name = place
    ids = np.vectorize(lambda d: d.id)(mesh.devices).astype(np.int32)
    gather = functools.partial(jax.lax.all_gather, axis_name=axis_name)
    seen = np.asarray(jax.jit(per_device(mesh, gather))(ids))
    rows = {tuple(row) for row in seen.reshape(-1, seen.shape[-1]).tolist()}
    assert rows == {tuple(row) for row in meshes.group_table(mesh, axis_name).tolist()}


@examples(40)
@given(place=drawn_meshes())
def test_axis_size_is_bound_is_manual(place):
    mesh, axis_name = place
    seen = []

    def body(x):
        seen.append((meshes.is_bound(axis_name), meshes.is_manual(axis_name)))
        seen.append(meshes.axis_size(axis_name))
        seen.append(meshes.is_bound("other"))
        return x

    jax.eval_shape(per_device(mesh, body), jnp.zeros((*mesh.devices.shape, 1)))
    size = np.prod([mesh.shape[n] for n in as_tuple(axis_name)])
    assert seen == [(True, True), size, False]
    assert not meshes.is_bound(axis_name)
    assert not meshes.is_manual(axis_name)


def test_axes_of_vmap_are_bound_but_not_manual():
    seen = []

    def body(x):
        seen.append((meshes.is_bound("i"), meshes.is_manual("i"), meshes.is_bound(("i", "j"))))
        return x

    jax.vmap(body, axis_name="i")(jnp.zeros(3))
    assert seen == [(True, False, False)]


# ---- The mesh of a call --------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_mesh_shape_and_every_choice_of_axes(shape):
    names = ("a", "b", "c")[: len(shape)]
    mesh = make_mesh(shape, names, order=range(RANKS - 1, -1, -1))
    for count in range(1, len(names) + 1):
        for axes in itertools.permutations(names, count):
            for call in CALLS:
                check_values(call, mesh, axes if count > 1 else axes[0])


@examples(15)
@given(
    call=st.sampled_from(CALLS),
    world=st.integers(2, RANKS),
    orders=st.lists(st.permutations(range(RANKS)), min_size=2, max_size=4),
)
def test_one_function_on_several_meshes(call, world, orders):
    """The same function objects, inner jits too, under meshes that differ in their devices alone:
    nothing of the first mesh may stick to a trace or a lowering that the second one reuses."""
    inner = jax.jit(call.bind("tp"))

    def body(x, w):
        return inner(x, w)

    mesh = make_mesh((world,))
    x, w = operands(call, mesh, "tp")
    want = exact(call, mesh, "tp", x, w)
    scale = exact(call, mesh, "tp", abs(x), abs(w))
    for order in (*orders, orders[0]):
        y = run(jax.jit(per_device(make_mesh((world,), order=order), body)), x, w)
        assert_close(y, want, scale, call.dtype, call.terms(world))


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("op", PRODUCTS)
def test_one_jitted_function_under_several_set_mesh(op, axis_type):
    n, spec = RANKS, all_ops()[op]
    x = normal(0, (n * 3, n * 2), jnp.bfloat16)
    w = normal(1, (n * 2, n * 3), jnp.bfloat16)
    x64, w64 = x.astype(np.float64), w.astype(np.float64)
    f = jax.jit(lambda x, w: spec.function(x, w, axis_name="tp", **spec.ways[0]))
    specs = spec.partition("tp", **spec.ways[0])[:2]
    for order in (range(n), range(n - 1, -1, -1), [*range(1, n), 0], range(n)):
        mesh = make_mesh((n,), order=order, axis_type=axis_type)
        with jax.set_mesh(mesh):
            args = [
                jax.device_put(a, jax.NamedSharding(mesh, s))
                for a, s in zip((x, w), specs, strict=True)
            ]
            y = run(f, *args)
        assert_close(y, x64 @ w64, abs(x64) @ abs(w64), jnp.bfloat16, 2 * n)


def test_disjoint_meshes_at_once():
    """Two halves of the devices, with the same axis name, in flight together."""
    half = RANKS // 2
    call = Call("all_gather_matmul", lead=(5,), k=64, n=16, dtype=jnp.bfloat16)
    places = [make_mesh((half,), order=range(i * half, (i + 1) * half)) for i in range(2)]
    arrays = [operands(call, mesh, "tp", seed=5 * i) for i, mesh in enumerate(places)]
    fs = [jax.jit(per_device(mesh, call.bind("tp"))) for mesh in places]
    results = []
    for _ in range(5):
        results += [f(*a) for f, a in zip(fs, arrays, strict=True)]
    for i, y in enumerate(results):
        mesh, (x, w) = places[i % 2], arrays[i % 2]
        scale = exact(call, mesh, "tp", abs(x), abs(w))
        assert_close(y, exact(call, mesh, "tp", x, w), scale, call.dtype, call.k)


def _over_an_abstract_mesh():
    mesh = AbstractMesh((RANKS,), ("tp",), axis_types=(AxisType.Auto,))
    return jax.jit(
        jax.shard_map(
            lambda x, w: jflux.all_gather_matmul(x, w, axis_name="tp"),
            mesh=mesh,
            in_specs=(P("tp"), P(None, "tp")),
            out_specs=P(None, "tp"),
        )  # fmt: skip
    )


def test_abstract_mesh_takes_the_devices_of_the_arguments():
    """The same traced function on devices in two orders; and on other devices after them."""
    f = _over_an_abstract_mesh()
    x, w = normal(0, (RANKS * 2, 4), jnp.bfloat16), normal(1, (4, RANKS), jnp.bfloat16)
    want, scale = (
        a.astype(np.float64) @ b.astype(np.float64) for a, b in ((x, w), (abs(x), abs(w)))
    )
    for order in (range(RANKS), (*range(1, RANKS), 0)):
        mesh = make_mesh((RANKS,), order=order)
        args = [
            jax.device_put(a, jax.NamedSharding(mesh, spec))
            for a, spec in ((x, P("tp")), (w, P(None, "tp")))
        ]
        assert fused_calls(f.lower(*args).compile().as_text()) == ["all_gather_matmul"]
        assert_close(run(f, *args), want, scale, jnp.bfloat16, 4)
        y, pull = jax.vjp(f, *args)  # the transpose is a program of its own, of the same devices
        dx, _ = pull(y)
        dy = np.asarray(y, np.float64)
        w64 = w.astype(np.float64)
        assert_close(np.asarray(dx), dy @ w64.T, abs(dy) @ abs(w64.T), jnp.bfloat16, RANKS)
    assert program_devices._devices.get() is None


def test_exporting_a_function_over_an_abstract_mesh_bakes_no_devices_in():
    x, w = jnp.zeros((RANKS * 2, 4), jnp.bfloat16), jnp.zeros((4, RANKS), jnp.bfloat16)
    mesh = make_mesh((RANKS,))
    args = [
        jax.device_put(a, jax.NamedSharding(mesh, spec))
        for a, spec in ((x, P("tp")), (w, P(None, "tp")))
    ]
    with jflux.config(strict=False):
        exported = jax.export.export(_over_an_abstract_mesh())(*args)
    assert "jflux_all_gather_matmul" not in exported.mlir_module()


@pytest.mark.parametrize(
    "op, specs, out_spec",
    [
        ("all_gather_matmul", (P("tp"), P(None, "tp")), P(None, "tp")),
        ("matmul_reduce_scatter", (P(None, "tp"), P("tp")), P("tp")),
        ("matmul_all_reduce", (P(None, "tp"), P("tp")), P()),
        ("all_reduce", (P(None, "tp"),), P()),
    ],
)
def test_exporting_symbolic_shapes_takes_the_reference(op, specs, out_spec):
    mesh = make_mesh((RANKS,))
    rows = jax.export.symbolic_shape(f"{RANKS} * b")[0]
    shapes = [(rows, 2 * RANKS), (2 * RANKS, 4 * RANKS)][: len(specs)]
    types = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    call = jax.jit(
        jax.shard_map(
            lambda *operands: getattr(jflux, op)(*operands, axis_name="tp"),
            mesh=mesh, in_specs=specs, out_specs=out_spec,
        )
    )  # fmt: skip
    with pytest.raises(NotImplementedError, match="a dimension is symbolic"):
        jax.export.export(call)(*types)
    with jflux.config(strict=False):
        exported = jax.export.export(call)(*types)
    assert exported.out_avals[0].shape[0] == rows
    if "reduce_scatter" in op or "gather" in op:  # jax.export cannot refine these, of `lax` either
        return
    pytest.importorskip("flatbuffers")
    shapes[0] = (6 * RANKS, 2 * RANKS)
    args = [normal(i, shape, jnp.float32) for i, shape in enumerate(shapes)]
    placed = [jax.device_put(a, jax.NamedSharding(mesh, P())) for a in args]
    y = jax.jit(jax.export.deserialize(exported.serialize()).call)(*placed)
    np.testing.assert_allclose(y, call(*args), rtol=1e-5)


def test_abstract_mesh_falls_back():
    """Devices that are not known when the op is lowered: the reference, or an error if strict."""
    f = _over_an_abstract_mesh()
    platform = jax.default_backend()
    x, w = jnp.zeros((RANKS * 2, 4), jnp.bfloat16), jnp.zeros((4, RANKS), jnp.bfloat16)
    traced = f.trace(x, w)
    with pytest.raises(NotImplementedError, match="mesh is abstract"):
        traced.lower(lowering_platforms=("cuda" if platform == "gpu" else platform,))


def test_partly_manual_mesh():
    """shard_map over one axis of two, the other one left to the partitioner."""
    mesh = make_mesh((2, RANKS // 2), ("dp", "tp"))
    n = RANKS // 2
    x, w = normal(0, (4, n * 3, 6), jnp.bfloat16), normal(1, (6, n * 2), jnp.bfloat16)
    f = jax.shard_map(
        lambda x, w: jflux.all_gather_matmul(x, w, axis_name="tp"),
        mesh=mesh, in_specs=(P(None, "tp"), P(None, "tp")), out_specs=P(None, None, "tp"),
        axis_names={"tp"},
    )  # fmt: skip
    x64, w64 = x.astype(np.float64), w.astype(np.float64)
    y = jax.jit(f)(jax.device_put(x, jax.NamedSharding(mesh, P("dp"))), w)
    assert_close(y, x64 @ w64, abs(x64) @ abs(w64), jnp.bfloat16, 6)


#: For each op that moves floats: a function, the operands, how they are split, and how shard_map
#: over "tp" sees them and its result.
ACROSS, DOWN, SPLIT = P(None, "tp"), P("tp"), P(None, ("tp", "fsdp"))
PARTLY = {
    "all_gather_matmul": ({}, (DOWN, SPLIT), (DOWN, ACROSS), ACROSS),
    "matmul_reduce_scatter": ({}, (ACROSS, P("tp", "fsdp")), (ACROSS, DOWN), DOWN),
    "matmul_all_reduce": ({}, (ACROSS, P("tp", "fsdp")), (ACROSS, DOWN), P()),
    "matmul_all_to_all": (
        {"split_axis": 1, "concat_axis": 0}, (DOWN, P(None, "fsdp")), (DOWN, P()), ACROSS,
    ),
    "all_to_all_matmul": (
        {"split_axis": 0, "concat_axis": 1}, (ACROSS, P(None, "fsdp")), (ACROSS, P()), DOWN,
    ),
    "all_gather": ({"tiled": True}, (P("tp", "fsdp"),), (DOWN,), DOWN),
    "reduce_scatter": ({"tiled": True}, (P("tp", "fsdp"),), (DOWN,), DOWN),
    "all_reduce": ({}, (P("tp", "fsdp"),), (DOWN,), P()),
    "all_to_all": (
        {"split_axis": 1, "concat_axis": 0, "tiled": True}, (P(("tp", "fsdp")),), (DOWN,), ACROSS,
    ),
}  # fmt: skip


@pytest.mark.skipif(RANKS < 4, reason="a mesh of four")
@pytest.mark.wide
@pytest.mark.parametrize("op", PARTLY)
def test_partly_manual_and_the_rest_explicit(op):
    """Types are the reference's, gradients those of an Auto axis. JAX has none of its own here: its
    transposes of all_gather and psum_scatter take shardings for those of another shape."""
    options, specs, in_specs, out_specs = PARTLY[op]
    arrays = [normal(i, (8, 8), jnp.float32) for i in range(len(specs))]

    def over(f, mesh):
        mapped = jax.shard_map(
            functools.partial(f, axis_name="tp", **options),
            mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names={"tp"},
        )  # fmt: skip
        placed = [jax.NamedSharding(mesh, s) for s in specs]
        return mapped, [jax.device_put(a, s) for a, s in zip(arrays, placed, strict=True)]

    def both(f):
        def run(*arrays):
            y, back = jax.vjp(f, *arrays)
            grads = back(jnp.sin(y))
            types[:] = map(jax.typeof, (y, *grads))
            return y, grads

        types = []
        return jax.jit(run), types

    call, placed = over(getattr(jflux, op), make_mesh((2, 2), ("tp", "fsdp")))
    want = both(call)[0](*placed)
    mesh = make_mesh((2, 2), ("tp", "fsdp"), axis_type=AxisType.Explicit)
    (call, placed), (reference, _) = (
        over(f, mesh) for f in (getattr(jflux, op), getattr(jflux.reference, op))
    )
    run, types = both(call)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), run(*placed), want)
    found = jax.eval_shape(reference, *placed)
    assert (types[0].shape, types[0].sharding) == (found.shape, found.sharding)
    assert types[1:] == [jax.typeof(a) for a in placed]
