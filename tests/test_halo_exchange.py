"""jflux.halo_exchange: values, gradients, transforms and errors, against `pad` of whole arrays."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import make_mesh, run
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jflux
from jflux import _config
from jflux._ops.collectives._halo_transfers import MODES
from jflux._stress.calls import x64_if

OPS = {"permutes": jflux, "all_to_all": jflux, "reference": jflux.reference}


@pytest.fixture(params=OPS)
def exchange(request):
    """The op, its halos in collective-permutes or in an all-to-all; and the reference."""
    with _config.override(unchecked_kernels=request.param == "all_to_all"):
        yield OPS[request.param].halo_exchange


def _want(x, *dimensions, xp=np):
    """What all ranks have, one after the other, from the whole array. `dimensions`: (axis, ranks,
    (before, after), mode, the constants at both ends)."""
    for axis, ranks, (before, after), mode, values in dimensions:
        widths = [(0, 0)] * x.ndim
        widths[axis] = before, after
        constants = {"constant_values": values} if mode == "constant" else {}
        whole = xp.pad(x, [tuple(w) for w in widths], mode=mode, **constants)
        n = x.shape[axis] // ranks
        ranges = [np.arange(r * n, (r + 1) * n + before + after) for r in range(ranks)]
        x = xp.take(whole, np.concatenate(ranges), axis)
    return x


def _on(mesh, f, spec, **options):
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec, **options))


def _whole(*shape):
    """Numbers that float32 adds exactly."""
    return np.random.default_rng(sum(shape)).integers(-99, 99, shape).astype(np.float32)


# ---- Values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [3, 2, 1, 8])
def test_every_mode_and_width(ranks, exchange):
    x = _whole(5 * ranks, 3)
    halos = [2, (1, 3), (0, 4), (4, 0), (0, 0)]

    def every(x):
        return [
            exchange(x, axis_name="x", halo=h, mode=m, constant_values=(7, -2))
            for m in MODES
            for h in halos
        ]

    found = run(_on(make_mesh((ranks,), ("x",)), every, P("x")), x)
    sides = [(h, h) if isinstance(h, int) else h for h in halos]
    wants = [_want(x, (0, ranks, s, m, (7, -2))) for m in MODES for s in sides]
    for y, want in zip(found, wants, strict=True):
        np.testing.assert_array_equal(y, want)


def test_as_wide_as_the_shard(exchange):
    x = _whole(2, 9)
    f = functools.partial(exchange, axis_name="x", axis=-1, halo=3)
    widest = [{"mode": "wrap"}, {}, {"mode": "symmetric"}, {"mode": "reflect", "halo": 2}]
    mesh = make_mesh((3,), ("x",))
    found = run(_on(mesh, lambda x: [f(x, **w) for w in widest], P(None, "x")), x)
    for y, options in zip(found, widest, strict=True):
        halo, mode = options.get("halo", 3), options.get("mode", "constant")
        np.testing.assert_array_equal(y, _want(x, (1, 3, (halo, halo), mode, (0, 0))))


def test_corners_and_a_dimension_that_two_axes_split(exchange):
    """Two dimensions, each with its own options; and one that two axes split, the second major."""
    mesh = make_mesh((2, 3), ("a", "b"), order=[5, 2, 0, 3, 1, 4])
    x = _whole(2 * 3, 3 * 5, 2)
    both = functools.partial(
        exchange, axis=(0, -2), axis_name=("a", "b"), halo=((1, 2), 4), mode=("wrap", "constant"),
        constant_values=(0, (5, 6)),
    )  # fmt: skip
    want = _want(x, (0, 2, (1, 2), "wrap", None), (1, 3, (4, 4), "constant", (5, 6)))
    np.testing.assert_array_equal(run(_on(mesh, both, P("a", "b")), x), want)

    mesh = make_mesh((2, 3, 1), ("a", "b", "c"))
    x = _whole(2, 4, 6 * 2)
    want = _want(x, (2, 6, (1, 1), "edge", None), (1, 1, (1, 1), "edge", None))
    for joint in [("a", "b"), ("b", "a")]:
        f = functools.partial(exchange, axis=(2, 1), axis_name=(joint, "c"), halo=1, mode="edge")
        np.testing.assert_array_equal(run(_on(mesh, f, P(None, "c", joint)), x), want)


TYPES = (
    jnp.bfloat16, np.float16, np.float32, np.float64, np.int8, np.uint32, np.bool_, np.complex64,
    jnp.float8_e4m3fn,
)  # fmt: skip


def test_types_and_trees(exchange):
    """Arrays of all types and of several shapes in one call."""
    ranks = 3
    with x64_if(np.float64):
        tree = {str(np.dtype(t)): (_whole(4 * ranks, 3) % 5).astype(t) for t in TYPES}
        tree |= {"small": _whole(2 * ranks), "empty": np.zeros((3 * ranks, 0), np.float32)}
        f = functools.partial(exchange, axis_name="x", halo=(2, 1), mode="wrap")
        found = run(_on(make_mesh((ranks,), ("x",)), f, P("x")), tree)
    for name, x in tree.items():
        assert found[name].dtype == x.dtype
        want = _want(x, (0, ranks, (2, 1), "wrap", None))
        np.testing.assert_array_equal(found[name], want, err_msg=name)


def test_nothing_else_is_looked_at(exchange):
    """NaN that is in no halo reaches none: of the interior, and of both ends of an array that is
    not periodic. Nor does the cotangent of what stands beyond the ends reach x."""
    ranks, n, halo = 3, 5, 2
    x = _whole(ranks * n)
    seen = np.r_[n - halo : n + halo, 2 * n - halo : 2 * n + halo]
    poisoned = np.full_like(x, np.nan)
    poisoned[seen] = x[seen]
    ct = np.ones((ranks, n + 2 * halo), np.float32)
    ct[0, :halo] = ct[-1, -halo:] = np.nan
    f = _on(make_mesh((ranks,), ("x",)), lambda x: exchange(x, axis_name="x", halo=halo), P("x"))
    y, (back,) = jax.jit(lambda x: (f(x), jax.vjp(f, x)[1](ct.ravel())))(poisoned)
    np.testing.assert_array_equal(y, _want(poisoned, (0, ranks, (halo, halo), "constant", (0, 0))))
    want = np.ones(ranks * n)
    want[seen] = 2
    np.testing.assert_array_equal(back, want)


def test_it_means_what_jaxdecomps_means(exchange):
    """Where jaxDecomp is installed. It fills halos for which the parts of x have room."""
    jaxdecomp = pytest.importorskip("jaxdecomp")
    mesh, x = make_mesh((2, 3), ("z", "y")), _whole(2 * 4, 3 * 3, 2)
    split = P("z", "y")
    room = _on(mesh, lambda x: jnp.pad(x, ((1, 1), (2, 2), (0, 0))), split)
    padded = room(jax.device_put(x, jax.NamedSharding(mesh, split)))
    for periods in [(True, True), (False, True)]:
        theirs = jaxdecomp.halo_exchange(padded, halo_extents=(1, 2), halo_periods=periods)
        f = functools.partial(
            exchange, axis=(0, 1), axis_name=("z", "y"), halo=(1, 2),
            mode=["wrap" if periodic else "constant" for periodic in periods],
        )  # fmt: skip
        np.testing.assert_array_equal(_on(mesh, f, split)(x), theirs)


# ---- Derivatives and transforms ------------------------------------------------------------------

GRID = {
    "axis": (0, 1), "axis_name": ("a", "b"), "halo": ((2, 1), 1), "mode": ("wrap", "constant"),
}  # fmt: skip


@pytest.mark.parametrize("check_vma", [True, False])
def test_gradients(check_vma, exchange):
    """Exactly those of the definition: in x, and in the constant that stands at the ends."""
    mesh = make_mesh((2, 3), ("a", "b"))
    x, tangent, wall = _whole(2 * 3, 3 * 2), _whole(6, 6, 1)[..., 0], np.float32(3)
    weights = _whole(2 * 6, 3 * 4)

    def split(x, wall):
        def body(x, wall):
            return exchange(x, constant_values=(0, (wall, 1)), **GRID)

        specs = {"in_specs": (P("a", "b"), P()), "out_specs": P("a", "b")}
        return jax.shard_map(body, mesh=mesh, check_vma=check_vma, **specs)(x, wall)

    def whole(x, wall):
        rows = (0, 2, (2, 1), "wrap", None)
        return _want(x, rows, (1, 3, (1, 1), "constant", (wall, 1)), xp=jnp)

    def all_of(f):
        def loss(x, wall):
            return (weights * f(x, wall) ** 2).sum()

        return jax.jit(
            lambda *given: (
                jax.grad(loss, (0, 1))(*given[:2]),
                jax.jvp(f, given[:2], given[2:]),
                jax.jvp(jax.grad(loss), given[:2], given[2:])[1],
            )
        )(x, wall, tangent, np.float32(1))

    for found, want in zip(*map(jax.tree.leaves, map(all_of, (split, whole))), strict=True):
        np.testing.assert_array_equal(found, want)


def test_the_transpose_adds_halos_to_their_owners(exchange):
    """Integers too large for rounding errors to hide; the call is linear in x."""
    ranks, n = 3, 4
    f = functools.partial(exchange, axis_name="x", halo=(2, 1), mode="wrap")
    struct = jax.ShapeDtypeStruct((n,), np.float32)

    def add(padded):
        return jax.linear_transpose(f, struct)(padded)[0]

    y = _whole(ranks * (n + 3))
    found = _on(make_mesh((ranks,), ("x",)), add, P("x"), check_vma=False)(y)
    want = np.zeros(ranks * n, np.float32)
    at = _want(np.arange(ranks * n), (0, ranks, (2, 1), "wrap", None))
    np.add.at(want, at, y)
    np.testing.assert_array_equal(found, want)


def test_transforms(exchange):
    """A stencil in a scan, with checkpoints, over a batch; and its gradient."""
    mesh, ranks, steps = make_mesh((3,), ("x",)), 3, 3
    x = _whole(2, 4 * ranks)

    def stencil(padded):
        return padded[:-3] + 2 * padded[1:-2] - padded[3:]

    def smooth(pad, x):
        step = jax.checkpoint(lambda x, _: (stencil(pad(x)), None))
        return jax.lax.scan(step, x, length=steps)[0]

    def loss(pad, x):
        return (jax.vmap(functools.partial(smooth, pad))(x) ** 2).sum()

    one = functools.partial(exchange, axis_name="x", halo=(1, 2), mode="symmetric")
    specs = {"in_specs": P(None, "x"), "out_specs": (P(), P(None, "x"))}

    def of_rank(x):
        value, gradient = jax.value_and_grad(functools.partial(loss, one))(x)
        return jax.lax.psum(value, "x"), gradient

    found = jax.jit(jax.shard_map(of_rank, mesh=mesh, **specs))(x)
    pad = functools.partial(jnp.pad, pad_width=(1, 2), mode="symmetric")
    want = jax.jit(jax.value_and_grad(functools.partial(loss, pad)))(x)
    for a, b in zip(found, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_an_axis_of_vmap(exchange):
    """`lax.ppermute` takes axes of vmap, and so does the op, without a warning."""
    x, modes = _whole(3, 4), ("edge", "constant", "wrap")
    f = functools.partial(exchange, axis_name="x", halo=1)
    found = jax.jit(jax.vmap(lambda x: [f(x, mode=m) for m in modes], axis_name="x"))(x)
    for y, mode in zip(found, modes, strict=True):
        want = _want(x.ravel(), (0, 3, (1, 1), mode, (0, 0)))
        np.testing.assert_array_equal(np.ravel(y), want)


def test_what_types_say(exchange):
    """The result varies over the axis, whatever its size and the halo's. Arrays of a tree vary over
    no axis that only others vary over, which `out_specs` would not allow."""
    mesh = make_mesh((3, 1, 2), ("a", "one", "b"))

    def f(x, y):
        with_none = exchange(x, axis=1, axis_name="one", halo=0)
        with_one = exchange(x, axis=1, axis_name="one", halo=1)
        vary = [jax.typeof(a).manual_axis_type.varying for a in (with_none, with_one)]
        assert vary == [{"a", "one"}] * 2
        return exchange((x, y), axis_name="a", halo=1)

    specs = P("a"), P("a", "b")
    mapped = jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=specs)
    x, y = _whole(6, 2), _whole(9, 4)
    for found, whole in zip(jax.jit(mapped)(x, y), (x, y), strict=True):
        want = _want(whole, (0, 3, (1, 1), "constant", (0, 0)))
        np.testing.assert_array_equal(found, want)


@pytest.mark.parametrize("ranks", [3, 2])
def test_no_promotion(ranks, exchange):
    """Of ranks and types, also where integers have 64 bits."""
    x = _whole(4 * ranks).astype(jnp.bfloat16)
    f = functools.partial(exchange, axis_name="x", halo=(1, 2), constant_values=(1, np.float32(2)))
    strict = jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict")
    with x64_if(np.float64), strict[0], strict[1]:
        y = np.asarray(_on(make_mesh((ranks,), ("x",)), f, P("x"))(x))
    want = _want(x.astype(np.float32), (0, ranks, (1, 2), "constant", (1, 2)))
    np.testing.assert_array_equal(y.astype(np.float32), want)


def test_a_dimension_that_is_not_known_yet(exchange):
    """`jax.export` leaves a dimension open: halos of it are moved, and not along it."""
    f = functools.partial(exchange, axis_name="x", halo=1, mode="wrap")
    mapped = _on(make_mesh((2,), ("x",)), lambda x: f((x, x[:, :1])), P("x"))
    (batch,) = jax.export.symbolic_shape("batch", constraints=["batch >= 1"])
    exported = jax.export.export(mapped)(jax.ShapeDtypeStruct((4, batch), np.float32))
    assert [str(y.shape) for y in exported.out_avals] == ["(8, batch)", "(8, 1)"]


@pytest.mark.parametrize("mode", ["wrap", "constant", "reflect"])
def test_over_some_axes_of_an_explicit_mesh(mode, exchange):
    """Types keep saying how the others split x."""
    mesh = make_mesh((2, 3), ("x", "other"), axis_type=AxisType.Explicit)
    x, y = _whole(2 * 4, 3 * 2), _whole(2 * 4, 3)
    split = jax.device_put((x, y), jax.NamedSharding(mesh, P("x", "other")))
    f = functools.partial(exchange, axis_name="x", halo=(2, 1), mode=mode, constant_values=(4, 0))
    mapped = jax.shard_map(f, mesh=mesh, in_specs=P("x"), out_specs=P("x"), axis_names={"x"})
    for found, whole in zip(jax.jit(mapped)(split), (x, y), strict=True):
        assert jax.typeof(found).sharding.spec == P("x", "other")
        np.testing.assert_array_equal(found, _want(whole, (0, 2, (2, 1), mode, (4, 0))))


# ---- What travels --------------------------------------------------------------------------------


def _transfers(op, ranks, unchecked, mode="wrap"):
    """The transfers in a program that exchanges three arrays of one type."""

    def f(tree):
        return op(tree, axis_name="x", halo=1, mode=mode)

    with jflux.config(unchecked_kernels=unchecked):
        mapped = _on(make_mesh((ranks,), ("x",)), f, P("x"))
        text = mapped.lower([_whole(2 * ranks), _whole(4 * ranks), _whole(2 * ranks, 3)]).as_text()
    return re.findall(r"stablehlo\.(collective_permute)|custom_call @jflux_(\w+)", text)


def test_arrays_travel_together():
    one = functools.partial(_transfers, jflux.halo_exchange)
    assert one(3, False) == [("collective_permute", "")] * 2
    assert one(2, False) == [("collective_permute", "")]
    assert one(2, False, "constant") == [("collective_permute", "")] * 2
    assert one(3, True) == one(2, True) == [("", "all_to_all")]
    assert _transfers(jflux.reference.halo_exchange, 2, True) == [("collective_permute", "")] * 6


def test_explain_says_what_moves_the_halos():
    f = _on(
        make_mesh((3,), ("x",)), lambda x: jflux.halo_exchange(x, axis_name="x", halo=1), P("x")
    )
    x = _whole(3 * 4)
    with jflux.config(unchecked_kernels=False, always=False):
        (call,) = jflux.explain(f, x)
    assert (call.op, str(call.plan.path)) == ("halo_exchange", "reference")
    assert call.operands == ("float32[4]",) and call.results == ("float32[6]",)
    assert call.plan.reason.startswith("collective-permutes along 'x'")
    with jflux.config(unchecked_kernels=True, always=False):
        call, moved = jflux.explain(f, x)
        assert str(call.plan.path) == "decomposed" and moved.op == "all_to_all"
        wide = _on(make_mesh((3,), ("x",)), functools.partial(
            jflux.halo_exchange, axis_name="x", halo=1 << 17), P("x"))  # fmt: skip
        (call,) = jflux.explain(wide, jnp.zeros(3 << 17))
    assert "LL packets take up to 524288" in call.plan.reason


# ---- Errors --------------------------------------------------------------------------------------


ERRORS = [
    ({"halo": 5}, ValueError, r"a halo of 5 along axis=0 needs .*shape is \(4, 6\): it has 4"),
    ({"halo": (0, 7), "axis": -1}, ValueError, "a halo of 7 along axis=-1"),
    ({"halo": 4, "mode": "reflect"}, ValueError, "mode='reflect' takes up to 3"),
    ({"halo": -1}, ValueError, "halo has -1, and widths must be 0 or more"),
    ({"halo": 1.0}, TypeError, "halo has 1.0, and widths must be ints"),
    ({"halo": True}, TypeError, "halo has True, and widths must be ints"),
    ({"halo": (1, 2, 3)}, ValueError, r"halo has \(1, 2, 3\), which must be one or"),
    ({"axis": 2}, ValueError, r"axis=2 of an x with shape \(4, 6\)"),
    ({"axis": "rows"}, TypeError, "axis='rows' must be an int or a sequence of ints"),
    ({"axis": (0, 1)}, ValueError, "axis_name='a' must be a sequence with the mesh axis of ea"),
    ({"axis": (0, 1), "axis_name": ("a",)}, ValueError, "an entry for each of the 2 dimen"),
    ({"axis": (0, 1), "axis_name": ("a", "a")}, ValueError, "a mesh axis may be named once"),
    ({"axis": (0, -2), "axis_name": ("a", "b")}, ValueError, "has a dimension twice"),
    ({"axis": (0, 1), "axis_name": "ab", "halo": (1, 2, 1)}, ValueError, "axis_name='ab' must"),
    ({"mode": "periodic"}, ValueError, "mode='periodic' must be one of constant, wrap, edge"),
    ({"constant_values": np.ones(2)}, ValueError, r"must be scalars, got shape \(2,\)"),
    ({"constant_values": 1j}, TypeError, "a constant of complex64 does not fit .* float32"),
    ({"axis_name": "tp"}, NameError, "axis_name='tp' must be an axis of the jax.shard_map"),
]  # fmt: skip


@pytest.mark.parametrize("module", [jflux, jflux.reference], ids=["jflux", "reference"])
def test_errors(module):
    mesh = make_mesh((2, 1), ("a", "b"))
    for options, error, message in ERRORS:
        f = functools.partial(module.halo_exchange, **({"axis_name": "a", "halo": 1} | options))
        mapped = jax.shard_map(f, mesh=mesh, in_specs=P("a"), out_specs=P("a"), check_vma=False)
        with pytest.raises(error, match=message):
            jax.eval_shape(mapped, jax.ShapeDtypeStruct((8, 6), np.float32))


def test_an_array_of_integers_takes_no_fraction():
    f = functools.partial(jflux.halo_exchange, axis_name="x", halo=1, constant_values=0.5)
    mapped = jax.shard_map(f, mesh=make_mesh((2,), ("x",)), in_specs=P("x"), out_specs=P("x"))
    with pytest.raises(TypeError, match="a constant of float32 does not fit an x of int32"):
        jax.eval_shape(mapped, jax.ShapeDtypeStruct((8,), np.int32))


def test_outside_of_shard_map():
    with pytest.raises(NameError, match="needs a jax.shard_map around the call"):
        jflux.halo_exchange(np.zeros(4), axis_name="x", halo=1)
    with pytest.raises(TypeError, match="takes x by position, and all else by name"):
        jflux.halo_exchange(np.zeros(4), "x", halo=1)
