"""jflux.ragged_all_to_all: values, gradients, transforms, meshes, errors when it runs."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import PLATFORM, RANKS, make_mesh, run
from jax.sharding import PartitionSpec as P

import jflux
from jflux import _config, _heap, testing
from jflux._call import explain
from jflux._call.plans import Machine, Path
from jflux._ops.collectives import ragged_all_to_all as ragged
from jflux._stress.calls import groups_of, normal, per_device, x64_if

SIZES = ("input_offsets", "send_sizes", "output_offsets", "recv_sizes")


@pytest.fixture(params=["packets", "chunks"])
def travel(request):
    """How all calls travel."""
    with _config.override(chunked=request.param == "chunks"):
        yield request.param


def draw_sizes(rng, world, slices, rows, output_rows, overlap=True):
    """The four arrays of each rank, [world, K]. Slices for one rank lie in random order, with gaps;
    those of one operand may overlap, or follow each other."""
    starts, sent, places, received = np.zeros((4, world, world * slices), np.int32)
    free = np.full(world, rows)
    for to in range(world):
        next_row = 0
        for place in rng.permutation(world * slices):
            src, t = divmod(int(place), slices)
            i = to * slices + t
            most = min(output_rows - next_row, rows if overlap else free[src])
            size = int(rng.integers(0, most + 1)) if rng.random() < 0.7 else 0
            size = size // 2 if most > 3 else size
            starts[src, i] = rng.integers(0, rows - size + 1) if overlap else rows - free[src]
            free[src] -= size
            sent[src, i] = received[to, src * slices + t] = size
            places[src, i] = next_row
            next_row = min(output_rows, next_row + size + int(rng.integers(0, 2)))
    return starts, sent, places, received


def exact(operands, outputs, sizes):
    """What each rank has after it, by the definition in lax's documentation."""
    results = [output.copy() for output in outputs]
    starts, sent, places, _ = sizes
    world = len(operands)
    for src, i in itertools.product(range(world), range(starts.shape[1])):
        to, n = i // (starts.shape[1] // world), sent[src, i]
        results[to][places[src, i] :][:n] = operands[src][starts[src, i] :][:n]
    return results


def _drawn(seed, shape, dtype):
    return (10 * normal(seed, shape, np.float32)).astype(dtype)


def _check(mesh, axis_name, shape, output_rows, dtype=np.float32, slices=1, seed=0, module=jflux):
    """Each group of ranks has sizes of its own."""
    lead, rng = mesh.devices.shape, np.random.default_rng(seed)
    operand = _drawn(seed, (*lead, *shape), dtype)
    output = _drawn(seed + 1, (*lead, output_rows, *shape[1:]), dtype)
    groups, want = groups_of(mesh, axis_name), np.empty_like(output)
    sizes = np.zeros((4, *lead, len(groups[0]) * slices), np.int32)
    for group in groups:
        drawn = draw_sizes(rng, len(group), slices, shape[0], output_rows)
        results = exact([operand[at] for at in group], [output[at] for at in group], drawn)
        for rank, at in enumerate(group):
            for which in range(4):
                sizes[(which, *at)] = drawn[which][rank]
            want[at] = results[rank]
    f = functools.partial(module.ragged_all_to_all, axis_name=axis_name)
    with x64_if(dtype):
        y = run(jax.jit(per_device(mesh, f)), operand, output, *sizes)
    assert y.dtype == output.dtype
    np.testing.assert_array_equal(y, want)


# ---- Values --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", [jnp.bfloat16, np.float32, np.float64, np.int8, np.bool_, np.complex64], ids=str
)
def test_types_and_rows(dtype, travel):
    mesh = make_mesh((RANKS,))
    for seed, row in enumerate([(), (3,), (2, 5), (64,)]):
        _check(mesh, "tp", (17, *row), 23, dtype, seed=seed)


@pytest.mark.parametrize("world", range(1, RANKS + 1))
def test_every_number_of_ranks(world, travel):
    mesh = make_mesh((world,))
    for slices in (1, 3):
        _check(mesh, "tp", (9, 5), 40, slices=slices, seed=world)
        _check(mesh, "tp", (30, 5), 1, slices=slices, seed=world + 1)


def test_many_chunks(travel):
    _check(make_mesh((4,)), "tp", (700, 130), 900, slices=2)


def test_without_the_alias_that_xla_was_asked_for(travel, monkeypatch):
    """XLA for GPUs does not always give `output` and the result one buffer."""
    monkeypatch.delitem(ragged._op.forms[0].run.aliases, 1)
    _check(make_mesh((2,)), "tp", (19, 6), 31, slices=2)


def test_meshes_groups_and_the_order_of_devices(travel):
    mesh = make_mesh((2, 2, max(1, RANKS // 4)), ("a", "b", "c"), order=range(RANKS - 1, -1, -1))
    for seed, axis_name in enumerate(["a", "c", ("a", "b"), ("b", "a"), ("c", "a", "b")]):
        _check(mesh, axis_name, (9, 4), 21, seed=seed)


@pytest.mark.parametrize("slices", [1, 2])
def test_the_reference(slices):
    mesh = make_mesh((2, RANKS // 2), ("a", "b"))
    for axis_name in ("a", ("b", "a")):
        _check(mesh, axis_name, (9, 4), 21, slices=slices, module=jflux.reference)
    _check(make_mesh((RANKS,)), "tp", (5,), 13, np.int8, slices=slices, module=jflux.reference)


@pytest.mark.parametrize("module", [jflux, jflux.reference])
@pytest.mark.parametrize("check_vma", [True, False])
def test_axis_index_groups(module, check_vma, travel):
    """As if each group were an axis of its own."""
    groups = [[0, 3], [2, 1]] if RANKS >= 4 else [[1], [0]]
    world, size = sum(map(len, groups)), len(groups[0])
    mesh, rng = make_mesh((world,)), np.random.default_rng(1)
    operand, output = _drawn(1, (world, 9, 3), np.float32), _drawn(2, (world, 12, 3), np.float32)
    sizes, want = np.zeros((4, world, size), np.int32), np.empty_like(output)
    for group in groups:
        drawn = draw_sizes(rng, size, 1, 9, 12)
        for which in range(4):
            sizes[which, group] = drawn[which]
        want[group] = exact(operand[group], output[group], drawn)
    f = functools.partial(module.ragged_all_to_all, axis_name="tp", axis_index_groups=groups)
    y = run(jax.jit(per_device(mesh, f, check_vma=check_vma)), operand, output, *sizes)
    np.testing.assert_array_equal(y, want)


def test_offsets_and_sizes_of_other_integer_types(travel):
    mesh, rng = make_mesh((2,)), np.random.default_rng(3)
    operand, output = _drawn(1, (2, 9), np.float32), _drawn(2, (2, 12), np.float32)
    sizes = draw_sizes(rng, 2, 1, 9, 12)
    f = jax.jit(per_device(mesh, functools.partial(jflux.ragged_all_to_all, axis_name="tp")))
    for dtype in (np.int64, np.uint32, np.int8):
        with x64_if(np.float64):
            y = run(f, operand, output, *(s.astype(dtype) for s in sizes))
        np.testing.assert_array_equal(y, np.stack(exact(operand, output, sizes)))


def test_one_array_as_operand_and_output(travel):
    """The result takes output's buffer, which is still to be sent from."""
    mesh, rng = make_mesh((RANKS,)), np.random.default_rng(4)
    x = _drawn(1, (RANKS, 40, 33), np.float32)
    sizes = draw_sizes(rng, RANKS, 1, 40, 40)

    def f(x, *sizes):
        x = 2 * x
        return jflux.ragged_all_to_all(x, x, *sizes, axis_name="tp"), x

    y, twice = run(jax.jit(per_device(mesh, f)), x, *sizes)
    np.testing.assert_array_equal(twice, 2 * x)
    np.testing.assert_array_equal(y, np.stack(exact(2 * x, 2 * x, sizes)))


def test_one_program_with_other_sizes_again_and_again(travel):
    """Sizes are data: nothing is compiled again."""
    mesh = make_mesh((RANKS,))
    f = jax.jit(per_device(mesh, functools.partial(jflux.ragged_all_to_all, axis_name="tp")))
    for seed in range(8):
        operand, output = (_drawn(seed + i, (RANKS, 20, 6), np.float32) for i in range(2))
        sizes = draw_sizes(np.random.default_rng(seed), RANKS, 2, 20, 20)
        testing.poison_workspaces()
        y = run(f, operand, output, *sizes)
        np.testing.assert_array_equal(y, np.stack(exact(operand, output, sizes)))
    assert f._cache_size() == 1


# ---- Gradients and vmap --------------------------------------------------------------------------


def _call(rows=9, output_rows=14, slices=2, seed=0, overlap=False, batch=None):
    """(mesh, operands of one call) in float64."""
    rng = np.random.default_rng(seed)
    lead = (RANKS,) if batch is None else (RANKS, batch)
    operand, output = (rng.standard_normal((*lead, n, 3)) for n in (rows, output_rows))
    drawn = [draw_sizes(rng, RANKS, slices, rows, output_rows, overlap) for _ in range(batch or 1)]
    sizes = [np.stack(each, 1) if batch else each[0] for each in zip(*drawn, strict=True)]
    return make_mesh((RANKS,)), (operand, output, *sizes)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("wrt", [(0,), (1,), (0, 1)])
def test_gradients(wrt, check_vma, travel):
    """A cotangent goes to the row that was sent, or to output's where none came."""
    mesh, args = _call()
    ct = np.random.default_rng(9).standard_normal(args[1].shape)
    starts, sent, places, _ = args[2:]
    d_operand, d_output = np.zeros_like(args[0]), ct.copy()
    for src, i in itertools.product(range(RANKS), range(starts.shape[1])):
        to, n = i // 2, sent[src, i]
        d_operand[src, starts[src, i] :][:n] = ct[to, places[src, i] :][:n]
        d_output[to, places[src, i] :][:n] = 0
    want = [(d_operand, d_output)[i] for i in wrt]

    def local(*args):
        *args, ct = args

        def f(*data):
            full = list(args)
            for i, x in zip(wrt, data, strict=True):
                full[i] = x
            return jflux.ragged_all_to_all(*full, axis_name="tp")

        return jax.vjp(f, *(args[i] for i in wrt))[1](ct)

    with x64_if(np.float64):
        got = run(jax.jit(per_device(mesh, local, check_vma=check_vma)), *args, ct)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("what", ["jvp", "jvp of operand", "checkpoint", "second"])
def test_other_derivatives(what, travel):
    """As the reference's, which XLA differentiates."""
    mesh, args = _call(seed=2)

    def program(module):
        def f(operand, output, *sizes):
            call = functools.partial(module.ragged_all_to_all, axis_name="tp")
            if what == "jvp":
                return jax.jvp(
                    lambda a, b: call(jnp.sin(a), b * b, *sizes), (operand, output),
                    (operand + 1, output + 2),
                )  # fmt: skip
            if what == "jvp of operand":
                return jax.jvp(lambda a: call(a * a, output, *sizes), (operand,), (operand,))

            def loss(a):
                return jnp.sum(jnp.sin(call(a * a, output, *sizes)) ** 2)

            if what == "checkpoint":
                return jax.grad(jax.checkpoint(loss))(operand)
            return jax.grad(lambda a: jnp.sum(jax.grad(loss)(a) ** 2))(operand)

        return jax.jit(per_device(mesh, f))

    with x64_if(np.float64):
        got, want = (run(program(module), *args) for module in (jflux, jflux.reference))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-12), got, want)


@pytest.mark.parametrize("batched", ["all", "data", "operand", "sizes", "output twice"])
def test_vmap(batched, travel):
    mesh, args = _call(seed=5, batch=3)
    some = {"all": range(6), "data": (0, 1), "sizes": (2, 3, 4, 5), "operand": (0,)}
    some = some.get(batched, (1,))
    axes = [0 if i in some else None for i in range(6)]
    args = [a if i in some else a[:, 0] for i, a in enumerate(args)]

    def vmapped(module):
        f = functools.partial(module.ragged_all_to_all, axis_name="tp")
        f = jax.vmap(f, in_axes=axes)
        if batched == "output twice":
            f = jax.vmap(f, in_axes=(None, 1, *[None] * 4), out_axes=2)
        return jax.jit(per_device(mesh, f))

    if batched == "output twice":
        args[1] = np.stack([args[1], args[1] + 1], 2)
    with x64_if(np.float64):
        got, want = (run(vmapped(module), *args) for module in (jflux, jflux.reference))
        assert "jflux_ragged_all_to_all" in vmapped(jflux).lower(*args).as_text()
    np.testing.assert_array_equal(got, want)
    if batched == "all":
        for b in range(3):
            sizes = [a[:, b] for a in args[2:]]
            np.testing.assert_array_equal(got[:, b], exact(args[0][:, b], args[1][:, b], sizes))


def test_a_vmapped_axis_takes_the_reference():
    _, args = _call()
    f = functools.partial(jflux.ragged_all_to_all, axis_name="v")
    with jflux.config(strict=False), x64_if(np.float64):
        y = jax.vmap(f, axis_name="v")(*args)
    np.testing.assert_array_equal(y, exact(args[0], args[1], args[2:]))


# ---- Plans ---------------------------------------------------------------------------------------


def _planned(rows, columns, machine, batch=1, world=4):
    arrays = [jax.ShapeDtypeStruct((batch, rows, columns), jnp.bfloat16)] * 2
    arrays += [jax.ShapeDtypeStruct((world, batch), jnp.int32)] * 4
    with jflux.config(always=False):
        return ragged._op.plan(arrays, ragged.Params(("tp",), world), machine)


def test_plans():
    cpu = Machine("cpu", heap_bytes=1 << 31)
    small, large = _planned(16, 1024, cpu), _planned(4096, 1024, cpu)
    assert (small.path, small.config["chunked"]) == (Path.FUSED, 0) and "LL" in small.reason
    assert (large.path, large.config["chunked"]) == (Path.FUSED, 1) and "chunks" in large.reason
    # Two halves of the rows and their signals, and a header.
    assert large.workspace_bytes == 1024 + 2 * (4096 * 2048 + 4096 * 2048 // 512)
    # A row of four bytes takes a packet of eight.
    assert _planned(40_000, 2, cpu).config["chunked"] == 0
    assert _planned(80_000, 2, cpu).config["chunked"] == 1
    # GPUs take packets up to 4 MiB, if a third of the heap holds them.
    for heap_bytes, rows, world, chunked in (
        (1 << 31, 2048, 2, 0), (1 << 31, 2049, 2, 1), (1 << 31, 2048, 4, 1), (1 << 25, 2048, 2, 1),
    ):  # fmt: skip
        gpu = Machine("cuda", sm_count=132, link_gbps=320, heap_bytes=heap_bytes)
        assert _planned(rows, 1024, gpu, world=world).config["chunked"] == chunked


def test_gpus_take_the_reference_until_a_kernel_has_run_there(monkeypatch):
    gpu = Machine("cuda", sm_count=132, link_gbps=320)
    spec = dataclasses.replace(ragged.SPECS[0], checked_on_gpus=False)
    monkeypatch.setattr(ragged, "SPECS", (spec,))
    with jflux.config(unchecked_kernels=False):
        plan = _planned(4096, 1024, gpu)
    assert plan.path == Path.REFERENCE and plan.unsupported and "unchecked_kernels" in plan.reason
    assert _planned(4096, 1024, gpu).path == Path.FUSED


def test_rows_that_a_third_of_the_heap_does_not_hold_are_cut():
    machine = Machine("cpu", heap_bytes=1 << 26)
    plan = _planned(16384, 1024, machine)
    assert plan.path == Path.DECOMPOSED and plan.config == {"calls": 4} and "4 calls" in plan.reason
    plan = _planned(1 << 24, 1, machine)
    assert plan.path == Path.REFERENCE and plan.unsupported and "narrow" in plan.reason
    assert all(
        "jflux.init(heap_bytes=...)" in p.reason for p in (plan, _planned(16384, 1024, machine))
    )


def test_a_call_as_several(own_heap):
    mesh, rng = make_mesh((2,)), np.random.default_rng(3)
    operand, output = (_drawn(i, (2, 300, 3, 333), np.float32) for i in range(2))
    sizes = draw_sizes(rng, 2, 1, 300, 300)
    own_heap(heap_bytes=4 << 20)
    f = per_device(mesh, functools.partial(jflux.ragged_all_to_all, axis_name="tp"))
    with jflux.config(always=False):
        first, *calls = explain.explain(f, operand, output, *sizes)
        assert first.plan.path == Path.DECOMPOSED and first.plan.config["calls"] == 4
        # In chunks: LL packets would have to be cut again.
        assert all((c.plan.path, c.plan.config["chunked"]) == (Path.FUSED, 1) for c in calls)
        y = run(jax.jit(f), operand, output, *sizes)
        assert _heap.usage(_heap.default_platform()) <= 4 << 20
    np.testing.assert_array_equal(y, np.stack(exact(operand, output, sizes)))


# ---- Errors --------------------------------------------------------------------------------------


def _traced(error, match, **changes):
    arrays = {
        "operand": np.zeros((8, 3), np.float32), "output": np.zeros((9, 3), np.float32),
        **{name: np.zeros(2, np.int32) for name in SIZES},
    } | changes  # fmt: skip
    groups = arrays.pop("axis_index_groups", None)
    f = functools.partial(
        jflux.ragged_all_to_all, **arrays, axis_name="tp", axis_index_groups=groups
    )
    mesh = make_mesh((2,))
    with pytest.raises(error, match=match):
        jax.eval_shape(jax.shard_map(f, mesh=mesh, in_specs=(), out_specs=P(), check_vma=False))


def test_operands_that_do_not_fit_raise_when_traced():
    def zeros(shape, dtype=np.int32):
        return np.zeros(shape, dtype)

    _traced(ValueError, r"operand \(8, 3\) and output \(9, 4\)", output=np.zeros((9, 4)))
    _traced(ValueError, r"operand \(\) and output", operand=np.float32(1))
    _traced(TypeError, "operand is float32 and output is int32", output=zeros((9, 3)))
    for name in SIZES:
        for dtype in ("float32", "bool"):  # as lax
            _traced(ValueError, f"{name} must be integers, got {dtype}", **{name: zeros(2, dtype)})
        _traced(ValueError, rf"{name} must have shape \[K\].*got \(2, 1\)", **{name: zeros((2, 1))})
    _traced(ValueError, r"send_sizes must have shape.*got \(4,\)", send_sizes=zeros(4))
    _traced(ValueError, "3 elements, which must be a multiple of the 2 ranks",
            **{name: zeros(3) for name in SIZES})  # fmt: skip
    for groups in ([[0]], [[0, 1], [1]], [[0, 2]], [[0, 1], []], "01"):
        _traced(ValueError, "must have each of the 2 ranks", axis_index_groups=groups)
    _traced(TypeError, "", axis_index_groups=2)
    with pytest.raises(NameError):
        jflux.ragged_all_to_all(*[np.zeros(2, np.int32)] * 6, axis_name="tp")


@pytest.mark.skipif(PLATFORM != "cpu", reason="a fault ends a GPU's context")
@pytest.mark.parametrize(
    "argument, value, message",
    [
        ("input_offsets", -1, r"input_offsets\[1\] = -1"),
        ("input_offsets", 9, r"input_offsets\[1\] = 9"),
        ("send_sizes", 9, r"send_sizes\[1\] = 9"),
        ("send_sizes", -2, r"send_sizes\[1\] = -2"),
        ("output_offsets", 12, r"output_offsets\[1\] = 12"),
        ("output_offsets", 1 << 40, r"output_offsets\[1\] = 2147483647"),
        ("recv_sizes", 1, r"recv_sizes\[1\] = 1, but rank 1 sends it 2"),
    ],
)
def test_values_out_of_range_end_the_call(argument, value, message, travel):
    """Every rank's message names the rank that has them, and the next call is right."""
    mesh = make_mesh((3,))
    operand, output = np.ones((3, 8), np.float32), np.zeros((3, 12), np.float32)
    sizes = dict(zip(SIZES, np.zeros((4, 3, 3), np.int64), strict=True))
    sizes["send_sizes"][:] = sizes["recv_sizes"][:] = 2
    sizes["output_offsets"][:] = 3 * np.arange(3)[:, None]
    f = jax.jit(per_device(mesh, functools.partial(jflux.ragged_all_to_all, axis_name="tp")))
    with x64_if(np.float64):
        right = run(f, operand, output, *sizes.values())
        sizes[argument] = sizes[argument].copy()
        before, sizes[argument][0, 1] = sizes[argument][0, 1], value
        with pytest.raises(
            jax.errors.JaxRuntimeError, match=f"ragged_all_to_all.*rank 0.*{message}"
        ):
            run(f, operand, output, *sizes.values())
        sizes[argument][0, 1] = before
        np.testing.assert_array_equal(run(f, operand, output, *sizes.values()), right)
