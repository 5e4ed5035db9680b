"""Collectives of groups that a list of ranks' positions names, and gathers to the same everywhere:
as `lax` has them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import PLATFORM, RANKS, compiled_text, fused_calls, make_mesh, run
from jax.sharding import PartitionSpec as P

import jflux
from jflux._ops._spec import all_ops
from jflux._stress.calls import exchanged, per_device

pytestmark = pytest.mark.skipif(RANKS < 4, reason="groups of two and more")

HALF = RANKS // 2
GROUPS = {
    "blocks": [list(range(HALF)), list(range(HALF, RANKS))],
    "strides": [list(range(0, RANKS, 2)), list(range(1, RANKS, 2))],
    "orders": [[3, 0], [1, 2], *([r, r + 1] for r in range(4, RANKS, 2))],
    "alone": [[r] for r in range(RANKS)],
    "all": [list(reversed(range(RANKS)))],
}
WAYS = {
    "all_reduce": {},
    "all_gather": {"axis": 1, "tiled": True},
    "reduce_scatter": {"scatter_dimension": 1, "tiled": True},
    "all_to_all": {"split_axis": 0, "concat_axis": 1, "tiled": True},
}
EACH_GROUPS = pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
EACH_OP = pytest.mark.parametrize("op", WAYS)


def whole(*shape, ranks=RANKS):
    """Small whole numbers for each rank: sums are exact in any order."""
    return np.random.default_rng(0).integers(0, 8, (ranks, *shape)).astype(np.float32)


def of_groups(op, x, groups):
    """What each rank gets, in numpy."""
    results = [None] * len(x)
    for group in groups:
        mine = [x[rank] for rank in group]
        if op == "all_reduce":
            found = [np.sum(mine, 0)] * len(group)
        else:
            found = exchanged(op, mine, **WAYS[op])
        for rank, y in zip(group, found, strict=True):
            results[rank] = y
    return np.stack(results)


def pulled(f, dy, x):
    return jax.vjp(f, x)[1](dy)[0]


@pytest.mark.parametrize("check_vma", [True, False])
@EACH_GROUPS
@EACH_OP
def test_values_and_gradients(op, groups, check_vma):
    mesh, x = make_mesh((RANKS,)), whole(RANKS, RANKS)
    spec = all_ops()[op]
    options = {"axis_name": "tp", "axis_index_groups": groups, **WAYS[op]}
    f, reference = (functools.partial(g, **options) for g in (spec.function, spec.reference))
    got = run(jax.jit(per_device(mesh, f, check_vma=check_vma)), x)
    np.testing.assert_array_equal(got, of_groups(op, x, groups))
    np.testing.assert_array_equal(got, jax.jit(per_device(mesh, reference, check_vma=check_vma))(x))
    dys = jnp.asarray(got) % 5
    dx, want = (
        jax.jit(per_device(mesh, functools.partial(pulled, g), check_vma=check_vma))(dys, x)
        for g in (f, reference)
    )
    np.testing.assert_array_equal(dx, want)


@EACH_OP
def test_they_take_the_kernel(op):
    options = {"axis_name": "tp", "axis_index_groups": GROUPS["strides"], **WAYS[op]}
    f = functools.partial(getattr(jflux, op), **options)
    text = compiled_text(per_device(make_mesh((RANKS,)), f), whole(RANKS, RANKS))
    assert fused_calls(text) == [op]


@EACH_OP
def test_groups_of_two_axes(op):
    """Positions along them, the first one major; and groups of one of two axes."""
    mesh, x = make_mesh((2, HALF), ("a", "b")), whole(RANKS, RANKS)
    spec = all_ops()[op]
    over = x.reshape(2, HALF, RANKS, RANKS)
    groups = GROUPS["strides"]
    f = functools.partial(spec.function, axis_name=("a", "b"), axis_index_groups=groups, **WAYS[op])
    got = np.asarray(jax.jit(per_device(mesh, f))(over))
    np.testing.assert_array_equal(got.reshape(RANKS, *got.shape[2:]), of_groups(op, x, groups))
    groups = [[1, 0]] if HALF == 2 else [[0, 3], [2, 1]]
    f = functools.partial(spec.function, axis_name="b", axis_index_groups=groups, **WAYS[op])
    got = np.asarray(jax.jit(per_device(mesh, f))(over))
    for row in range(2):
        np.testing.assert_array_equal(got[row], of_groups(op, over[row], groups))


def test_untiled():
    mesh, groups = make_mesh((RANKS,)), GROUPS["blocks"]
    x = whole(HALF, 3)
    for op, options in {
        "all_gather": {"axis": 1},
        "reduce_scatter": {"scatter_dimension": 0},
        "all_to_all": {"split_axis": 0, "concat_axis": 1},
    }.items():
        spec = all_ops()[op]
        got, want = (
            jax.jit(per_device(mesh, functools.partial(
                f, axis_name="tp", axis_index_groups=groups, **options
            )))(x)
            for f in (spec.function, spec.reference)
        )  # fmt: skip
        np.testing.assert_array_equal(got, want)


def test_a_residual_and_a_norm_of_a_group():
    mesh, groups, x = make_mesh((RANKS,)), GROUPS["blocks"], whole(4, 8)
    residual = np.arange(2, dtype=np.float32)[:, None, None] + np.ones((2, 4, 8), np.float32)
    norm = jflux.RMSNorm(jnp.full(8, 0.5))

    def f(x):
        mine = jnp.asarray(residual)[jax.lax.axis_index("tp") // HALF]
        return jflux.all_reduce(
            x, axis_name="tp", axis_index_groups=groups, residual=mine, norm=norm
        )

    y, normalised = jax.jit(per_device(mesh, f))(x)
    want = of_groups("all_reduce", x, groups) + np.repeat(residual, HALF, 0)
    np.testing.assert_array_equal(y, want)
    scale = 0.5 / np.sqrt((want**2).mean(-1, keepdims=True) + norm.epsilon)
    np.testing.assert_allclose(normalised, want * scale, rtol=1e-6)


@EACH_OP
def test_groups_that_are_none(op):
    mesh, x = make_mesh((RANKS,)), whole(RANKS, RANKS)
    for groups in ([[0, 1]], [[0] * RANKS], [[0], list(range(1, RANKS))], [], "ab"):
        f = functools.partial(
            getattr(jflux, op), axis_name="tp", axis_index_groups=groups, **WAYS[op]
        )
        with pytest.raises(ValueError, match=rf"axis_index_groups=.* each of the {RANKS} ranks"):
            jax.eval_shape(per_device(mesh, f), x)


# ---- The same on all ranks, to types -------------------------------------------------------------


@pytest.mark.parametrize("tiled", [True, False])
def test_gather_to_invarying(tiled):
    """The result may leave `shard_map` as it is, and a gradient takes each rank's part."""
    mesh, x = make_mesh((RANKS,)), whole(3, 2)
    specs = {"mesh": mesh, "in_specs": P("tp"), "out_specs": P()}
    weights = jnp.arange(RANKS * 6.0).reshape((RANKS * 3, 2) if tiled else (RANKS, 3, 2))
    found = []
    for f in (jflux.all_gather, jflux.reference.all_gather):

        def body(x, f=f):
            return f(x[0], axis_name="tp", axis=0, tiled=tiled, to="invarying")

        y = jax.jit(jax.shard_map(body, **specs))(x)
        np.testing.assert_array_equal(y, np.concatenate(x) if tiled else x)

        def loss(x, body=body):
            return jax.shard_map(lambda x: (weights * body(x)).sum(), **specs)(x)

        found.append(jax.jit(jax.grad(loss))(x))
    np.testing.assert_array_equal(*found)
    np.testing.assert_array_equal(found[0], weights.reshape(x.shape))


def test_gather_to_invarying_takes_the_kernel():
    mesh = make_mesh((RANKS,))
    f = jax.shard_map(
        lambda x: jflux.all_gather(x, axis_name="tp", tiled=True, to="invarying"),
        mesh=mesh, in_specs=P("tp"), out_specs=P(),
    )  # fmt: skip
    assert fused_calls(compiled_text(f, whole(2)[:, 0])) == ["all_gather"]
    empty = jax.shard_map(
        lambda x: jflux.all_gather(x[:0], axis_name="tp", tiled=True, to="invarying"),
        mesh=mesh, in_specs=P("tp"), out_specs=P(),
    )  # fmt: skip
    assert jax.jit(empty)(whole(2)).shape == (0, 2)


def test_what_a_gather_does_not_take():
    x = whole(2)
    groups = {"axis_index_groups": GROUPS["all"]}
    for options in ({"to": "nothing"}, {"to": "invarying"} | groups, {"to": "reduced"} | groups):
        f = functools.partial(jflux.all_gather, axis_name="tp", **options)
        with pytest.raises(ValueError, match=r"jflux\.all_gather: to="):
            jax.eval_shape(per_device(make_mesh((RANKS,)), f), x)


def cast(x, to, axis="tp"):
    return jax.lax.pcast(x, axis, to=to)


TILED = {"axis_name": "tp", "tiled": True}


def _gathered(m, x):
    return cast(m.all_gather(x, to="reduced", **TILED), "varying")


def _scattered(m, x):
    return m.reduce_scatter(cast(x, "unreduced"), **TILED)


def _summed(m, x):
    return m.all_reduce(cast(x, "unreduced"), axis_name="tp")


def _over_another_axis(m, x):
    parts = m.reduce_scatter(cast(x, "unreduced", "data"), **TILED)
    return m.all_reduce(parts, axis_name="data")


#: A function of a module, jflux or its references, and an array; and how shard_map over
#: ("data", "tp") splits the array and its result.
REDUCED = {
    "to reduced": (_gathered, P("tp"), P("tp")),
    "scatter": (_scattered, P("tp"), P("tp")),
    "sum": (_summed, P("tp"), P()),
    "another axis": (_over_another_axis, P(("tp", "data")), P("tp")),
}


@pytest.mark.parametrize("name", REDUCED)
def test_sums_that_are_still_to_be_made(name):
    """Results, types and gradients are lax's, which takes the call."""
    body, in_specs, out_specs = REDUCED[name]
    mesh = make_mesh((2, 2), ("data", "tp"))
    x = whole(16, 4, ranks=1)[0]

    def both(m):
        f = jax.shard_map(
            functools.partial(body, m), mesh=mesh, in_specs=in_specs, out_specs=out_specs
        )

        def run(x):
            y, back = jax.vjp(f, x)
            return y, back(y)

        return jax.jit(run)

    with pytest.raises(NotImplementedError, match="sums that are still to be made"):
        both(jflux).lower(x)
    with jflux.config(strict=False):
        jax.tree.map(np.testing.assert_array_equal, both(jflux)(x), both(jflux.reference)(x))


@pytest.mark.skipif(PLATFORM == "gpu", reason="float32")
def test_weights_whose_gradient_is_still_to_be_summed():
    """Gathered over another axis than the product's, they take the kernel."""
    mesh, x, w = make_mesh((2, 2), ("data", "tp")), whole(2, 4, 4, ranks=1)[0], whole(4, ranks=4)

    def both(m):
        def body(x, w):
            w = jax.lax.all_gather(w, "data", axis=0, tiled=True, to="reduced")
            return m.all_gather_matmul(x, w, axis_name="tp")

        spec = P("data", "tp")
        f = jax.shard_map(body, mesh=mesh, in_specs=(spec, spec), out_specs=P("data", None, "tp"))

        def run(x, w):
            y, back = jax.vjp(f, x, w)
            return y, back(y)

        return jax.jit(run)

    assert "all_gather_matmul" in fused_calls(compiled_text(both(jflux), x, w))
    jax.tree.map(np.testing.assert_array_equal, both(jflux)(x, w), both(jflux.reference)(x, w))


@pytest.mark.skipif(PLATFORM == "gpu", reason="another heap takes time")
def test_groups_that_span_nodes(own_heap):
    """Take `lax`; groups of a node take the kernel."""
    own_heap(node=["one"] * HALF + ["two"] * (len(jax.devices()) - HALF))
    mesh, x = make_mesh((RANKS,)), whole(RANKS, RANKS)
    for name, kernels in {"blocks": ["all_gather"], "strides": []}.items():
        f = functools.partial(
            jflux.all_gather, axis_name="tp", axis_index_groups=GROUPS[name], axis=1, tiled=True
        )
        with jflux.config(strict=False):
            compiled = jax.jit(per_device(mesh, f)).lower(x).compile()
            assert fused_calls(compiled.as_text()) == kernels
            np.testing.assert_array_equal(compiled(x), of_groups("all_gather", x, GROUPS[name]))
    with pytest.raises(NotImplementedError, match="2 nodes of .*, and the call has axis_index_"):
        jax.jit(per_device(mesh, f)).lower(x)
