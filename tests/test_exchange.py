"""jflux.all_gather, all_to_all and reduce_scatter: values, gradients, transforms, errors."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import RANKS, SHAPES, make_mesh, run
from jax.sharding import PartitionSpec as P

import jflux
from jflux import _config, _heap, testing
from jflux._ops.collectives import exchange
from jflux._stress.calls import exchanged, groups_of, normal, per_device, x64_if

OPS = ("all_gather", "all_to_all", "reduce_scatter")
FLOATS = (jnp.bfloat16, np.float16, np.float32, np.float64)
BYTES = (np.int8, np.bool_, np.complex64)  # moved, not summed


@pytest.fixture(params=["packets", "chunks"])
def travel(request):
    """How all calls travel."""
    with _config.override(chunked=request.param == "chunks"):
        yield request.param


def _choices(op, shape, world):
    """The ways of calling it on an x of this shape: every axis, tiled and not."""
    dimensions = range(-1, len(shape))
    for tiled in (False, True):
        fits = [d for d in dimensions if (shape[d] % world == 0 if tiled else shape[d] == world)]
        if op == "all_gather":
            new = range(-1, len(shape) + (not tiled))
            yield from ({"axis": a, "tiled": tiled} for a in new)
        elif op == "reduce_scatter":
            yield from ({"scatter_dimension": a, "tiled": tiled} for a in fits)
        else:
            pairs = itertools.product(fits, dimensions)
            yield from ({"split_axis": s, "concat_axis": c, "tiled": tiled} for s, c in pairs)


def _call(op, module=jflux, axis_name="tp", **options):
    return lambda x: getattr(module, op)(x, axis_name=axis_name, **options)


def _check(op, mesh, axis_name, x, module=jflux, **options):
    lead = mesh.devices.ndim
    with x64_if(x.dtype):
        y = run(jax.jit(per_device(mesh, _call(op, module, axis_name, **options))), x)
    assert y.dtype == x.dtype
    for group in groups_of(mesh, axis_name):
        wants = exchanged(op, [x[at] for at in group], **options)
        for at, want in zip(group, wants, strict=True):
            assert y[at].shape == want.shape
            if op == "reduce_scatter":
                bound = testing.tolerance(x.dtype, len(group)) * 8 * len(group)
                assert np.abs(y[at].astype(np.float64) - want).max() <= bound
            else:
                np.testing.assert_array_equal(y[at], want)
    assert y.shape[:lead] == mesh.devices.shape


def _drawn(seed, shape, dtype):
    return (10 * normal(seed, shape, np.float32)).astype(dtype)


@pytest.mark.parametrize("op", OPS)
def test_every_axis(op, travel):
    _check_every_axis(op, jflux)


@pytest.mark.parametrize("op", OPS)
def test_every_axis_of_the_reference(op):
    _check_every_axis(op, jflux.reference)


def _check_every_axis(op, module):
    """Rows of whole units, and of one, two and four bytes more."""
    mesh = make_mesh((RANKS,))
    for seed, (shape, dtype) in enumerate(
        [
            ((RANKS, 2 * RANKS, 8), np.float32),
            ((2 * RANKS, RANKS, 3), jnp.bfloat16),
            ((RANKS, RANKS, RANKS), np.float32 if op == "reduce_scatter" else np.int8),
        ]
    ):
        x = np.clip(normal(seed, (RANKS, *shape), np.float32), -4, 4).astype(dtype)
        for options in _choices(op, shape, RANKS):
            _check(op, mesh, "tp", x, module, **options)


@pytest.mark.parametrize("dtype", [*FLOATS, *BYTES], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_types_and_sizes(op, dtype, travel):
    if op == "reduce_scatter" and dtype in BYTES:
        pytest.skip("not summed")
    mesh = make_mesh((RANKS,))
    for count in (1, 3, 1000, 40_001):
        x = np.clip(normal(count, (RANKS, RANKS * count), np.float32), -4, 4).astype(dtype)
        options = next(o for o in _choices(op, x.shape[1:], RANKS) if o["tiled"])
        _check(op, mesh, "tp", x, **options)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_mesh_and_every_choice_of_axes(shape, op, travel):
    names = ("a", "b", "c")[: len(shape)]
    mesh = make_mesh(shape, names, order=range(RANKS - 1, RANKS - 1 - np.prod(shape), -1))
    choices = [*names, *itertools.permutations(names, min(2, len(names)))]
    for seed, axis_name in enumerate(choices):
        x = np.clip(normal(seed, (*shape, 3, 2 * 840), np.float32), -4, 4)
        which = {"all_gather": "axis", "reduce_scatter": "scatter_dimension"}
        options = {which[op]: 1} if op in which else {"split_axis": 1, "concat_axis": 0}
        _check(op, mesh, axis_name, x, tiled=True, **options)


def test_integers_are_summed_exactly(travel):
    mesh = make_mesh((RANKS,))
    for dtype, count in itertools.product(FLOATS[:3], (1, 6, 4096)):
        x = np.random.default_rng(count).integers(1, 16, (RANKS, RANKS * count)).astype(dtype)
        y = run(jax.jit(per_device(mesh, _call("reduce_scatter", tiled=True))), x)
        want = x.astype(np.int64).sum(0).reshape(RANKS, count)
        np.testing.assert_array_equal(y.astype(np.int64), want)


@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("op", OPS)
def test_gradients(op, check_vma):
    """Linear, so <ct, f(t)> = <vjp(ct), t>, by sums in float64; and of second order none."""
    mesh, shape = make_mesh((RANKS,)), (RANKS, 3, 2 * RANKS)
    x, tangent = normal(0, (RANKS, *shape), np.float32), normal(1, (RANKS, *shape), np.float32)
    for options in _choices(op, shape, RANKS):
        f = per_device(mesh, _call(op, **options), check_vma=check_vma)
        y, along = jax.jit(lambda x, t, f=f: jax.jvp(f, (x,), (t,)))(x, tangent)
        ct = normal(2, y.shape, np.float32)
        np.testing.assert_allclose(along, jax.jit(f)(tangent), rtol=1e-5, atol=1e-5)
        (back,) = jax.jit(lambda x, ct, f=f: jax.vjp(f, x)[1](ct))(x, ct)
        forward = np.sum(ct.astype(np.float64) * np.asarray(along, np.float64))
        np.testing.assert_allclose(
            np.sum(np.asarray(back, np.float64) * tangent), forward, rtol=1e-3, atol=1e-3
        )
        lax_f = per_device(mesh, _call(op, jflux.reference, **options), check_vma=check_vma)
        (lax_back,) = jax.jit(lambda x, ct, f=lax_f: jax.vjp(f, x)[1](ct))(x, ct)
        np.testing.assert_allclose(back, lax_back, rtol=1e-4, atol=1e-4)


def test_transforms(travel):
    mesh, shape = make_mesh((RANKS,)), (3, 4, 2 * RANKS)
    x = normal(0, (RANKS, *shape), np.float32)

    def gathered(x, module=jflux):
        return module.all_gather(x, axis_name="tp", axis=-1, tiled=True)

    def swapped(x, module=jflux):
        return module.all_to_all(x, axis_name="tp", split_axis=1, concat_axis=0, tiled=True)

    def summed(x, module=jflux):
        return module.reduce_scatter(x, axis_name="tp", scatter_dimension=1, tiled=True)

    bodies = {
        "vmap 0": lambda m: jax.vmap(lambda x: gathered(x, m)),
        "vmap 1": lambda m: jax.vmap(lambda x: swapped(x, m), in_axes=1, out_axes=1),
        "vmap of the scattered": lambda m: jax.vmap(lambda x: summed(x, m), in_axes=0, out_axes=2),
        "scan": lambda m: lambda x: jax.lax.scan(lambda c, x: (c, swapped(x, m)), 0, x)[1],
        "cond": lambda m: (
            lambda x: jax.lax.cond(x.size > 1, lambda x: summed(x[0], m), lambda x: x[0, :, :2], x)
        ),
        "pytree": lambda m: lambda x: m.all_gather({"a": x, "b": [x[0]]}, axis_name="tp"),
    }
    for name, body in bodies.items():
        results = [
            jax.tree.leaves(run(jax.jit(per_device(mesh, body(m), check_vma=False)), x))
            for m in (jflux, jflux.reference)
        ]
        for got, want in zip(*results, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5, err_msg=name)


def test_a_loop_with_new_inputs(travel):
    """On GPUs XLA captures it, and replays find new data and new epochs."""
    mesh, steps = make_mesh((RANKS,)), 200
    x = normal(0, (RANKS, 16 * RANKS), np.float32)

    def body(module):
        def step(i, x):
            y = module.all_to_all(x, axis_name="tp", split_axis=0, concat_axis=0, tiled=True)
            z = module.reduce_scatter(y, axis_name="tp", tiled=True) / RANKS
            g = module.all_gather(z, axis_name="tp", tiled=True)
            return jnp.cos((g + x) / 4 + i)  # forgets in which order sums were rounded

        return lambda x: jax.lax.fori_loop(0, steps, step, x)

    y, want = (run(jax.jit(per_device(mesh, body(m))), x) for m in (jflux, jflux.reference))
    assert np.isfinite(y).all()
    np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-5)


def test_with_late_ranks(travel):
    mesh = make_mesh((RANKS,))
    x = normal(0, (RANKS, 20, RANKS, 111), np.float32)

    def body(module):
        def each(x):
            y = module.all_gather(x, axis_name="tp", axis=1, tiled=True)
            z = module.all_to_all(y, axis_name="tp", split_axis=0, concat_axis=1, tiled=True)
            return z[:, :111], module.reduce_scatter(x, axis_name="tp", tiled=False)

        return lambda x: jax.lax.scan(lambda c, x: (c, each(x)), 0, x)[1]

    with testing.planted_faults(max_delay_us=300):
        got = run(jax.jit(per_device(mesh, body(jflux))), x)
    want = run(jax.jit(per_device(mesh, body(jflux.reference))), x)
    np.testing.assert_array_equal(got[0], want[0])
    np.testing.assert_allclose(got[1], want[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("op", OPS)
def test_without_waits_it_is_wrong(op, travel):
    """The values above do come from the peers."""
    mesh = make_mesh((RANKS,))
    x = normal(0, (RANKS, 256 * RANKS), np.float32)
    options = next(o for o in _choices(op, x.shape[1:], RANKS) if o["tiled"])
    f = jax.jit(per_device(mesh, _call(op, **options)))
    right = run(f, x)
    testing.poison_workspaces()
    with testing.planted_faults(skip_waits=True, max_delay_us=3000):
        y = np.asarray(f(x))
    assert not np.allclose(y, right)


def _how(op, x, **options):
    """How a call on all ranks would travel."""
    f = jax.jit(per_device(make_mesh((RANKS,)), _call(op, **options)))
    with jflux.config(always=False):
        text = f.lower(x).as_text()
    if f"@jflux_{op}" not in text:
        return "lax"
    return "chunks" if "chunked = true" in text else "packets"


@pytest.mark.parametrize("op", OPS)
def test_large_ones_travel_in_chunks_and_larger_ones_are_lax(op, monkeypatch):
    monkeypatch.setattr(exchange, "MOST_BYTES", 8 << 20)
    per_rank = 1 if op == "all_gather" else RANKS  # of x, for a byte that all ranks send to one

    def how(bytes_that_reach_a_rank):
        elements = bytes_that_reach_a_rank // RANKS // 2
        x = np.zeros((RANKS, elements * per_rank), jnp.bfloat16)
        options = next(o for o in _choices(op, x.shape[1:], RANKS) if o["tiled"])
        return _how(op, x, **options)

    few = 1 << (19 if op == "all_to_all" and RANKS > 2 else 20)
    assert how(few) == "packets" and how(few + 2 * RANKS) == "chunks"
    most = exchange.most_bytes(RANKS)
    assert most == (8 << 20 if RANKS <= 2 else 4 << 20)
    assert how(most) == "chunks" and how(most + 2 * RANKS) == "lax"
    # Not what would take more than a third of the heap.
    monkeypatch.setattr(_heap, "heap_bytes", lambda platform: 3 * most)
    assert how(few) == "packets" and how(most) == "lax"


def test_what_no_kernel_takes():
    mesh = make_mesh((RANKS,))
    integers = np.arange(RANKS * RANKS, dtype=np.int32).reshape(RANKS, RANKS)
    f = jax.jit(per_device(mesh, _call("reduce_scatter")))
    with pytest.raises(NotImplementedError, match="reduce_scatter.*int32"):
        f(integers)
    with jflux.config(strict=False):
        np.testing.assert_array_equal(run(f, integers), integers.sum(0))
    empty = np.zeros((RANKS, 0), np.float32)
    assert run(jax.jit(per_device(mesh, _call("all_gather"))), empty).shape == (RANKS, RANKS, 0)


def test_one_rank_and_errors():
    x = np.ones((1, 1, 3), np.float32)
    for op, options in (
        ("all_gather", {}),
        ("reduce_scatter", {}),
        ("all_to_all", {"split_axis": 0, "concat_axis": 1}),
    ):
        _check(
            op,
            make_mesh((1,)),
            "tp",
            x,
            tiled=True,
            **options or {"axis" if op == "all_gather" else "scatter_dimension": 0},
        )
        with pytest.raises(NameError, match="tp"):
            getattr(jflux, op)(x, axis_name="tp", **options)
    mesh = make_mesh((RANKS,))
    wrong = np.ones((RANKS, RANKS + 1, RANKS), np.float32)

    def raises(match, op, module=jflux, **options):
        with pytest.raises(ValueError, match=match):
            jax.jit(per_device(mesh, _call(op, module, **options)))(wrong)

    raises("axis=3 of 3 dimensions", "all_gather", axis=3)
    raises("scatter_dimension=-3 of 2", "reduce_scatter", scatter_dimension=-3)
    for dimension in (-3, 2):  # neither is another dimension's number
        match = f"axis {dimension} is out of bounds"
        raises(match, "reduce_scatter", jflux.reference, scatter_dimension=dimension)
        raises(match, "all_to_all", jflux.reference, split_axis=0, concat_axis=dimension)
    if RANKS > 1:
        raises("dimension 0 must be the", "reduce_scatter")
        raises("dimension 0 must be a multiple", "reduce_scatter", tiled=True)
        raises("must be a multiple", "all_to_all", split_axis=0, concat_axis=1, tiled=True)


def test_scalars():
    x = np.arange(1.0, RANKS + 1, dtype=np.float32)
    y = run(jax.jit(per_device(make_mesh((RANKS,)), _call("all_gather"))), x)
    np.testing.assert_array_equal(y, np.tile(x, (RANKS, 1)))


@pytest.mark.parametrize("wrong", [1.0, "0", None])
def test_dimensions_are_ints(wrong):
    mesh, x = make_mesh((RANKS,)), np.ones((RANKS, RANKS, 2), np.float32)
    for op, options in {
        "all_gather": {"axis": wrong},
        "reduce_scatter": {"scatter_dimension": wrong},
        "all_to_all": {"split_axis": 0, "concat_axis": wrong},
    }.items():
        with pytest.raises(TypeError, match=f"{[*options][-1]}.*int"):
            jax.jit(per_device(mesh, _call(op, **options)))(x)


def test_wrong_calls_raise_under_vmap_too():
    x = jnp.ones((2, 4, 6))
    with jflux.config(strict=False), pytest.raises(ValueError, match="dimension 1 must be the"):
        jax.vmap(_call("reduce_scatter", axis_name="a", scatter_dimension=-1), axis_name="a")(x)


def test_types_of_results():
    """They vary over the axis, as those of `lax`."""
    mesh, x = make_mesh((RANKS,)), np.ones((RANKS, RANKS), np.float32)

    def f(out_specs):
        return jax.jit(
            jax.shard_map(
                lambda x: jflux.all_gather(x[0], axis_name="tp", tiled=True),
                mesh=mesh, in_specs=P("tp"), out_specs=out_specs,
            )
        )  # fmt: skip

    np.testing.assert_array_equal(f(P("tp"))(x), np.ones(RANKS**3))
    with pytest.raises(ValueError, match="out_specs"):
        f(P())(x)
