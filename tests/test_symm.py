"""jflux.symm without a GPU: references under transforms, what is refused, what Triton makes of the
kernels, and how writes outside of a buffer are found. tests/symm_gpu.py runs the kernels."""

import functools
import importlib
import re
import sys
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import PLATFORM, RANKS, make_mesh, run
from jax import lax

import jflux
from jflux import _config, _native
from jflux._call.plans import Machine, Path
from jflux._own_kernels import buffer_layout, compiling, symm_check
from jflux._own_kernels import symm_call as symm_call
from jflux._stress.calls import groups_of, normal, per_device

H100 = Machine("cuda", sm_count=132)
on_cpus = pytest.mark.skipif(PLATFORM == "gpu", reason="kernels run here: tests/symm_gpu.py")


@pytest.fixture(scope="module")
def kernels():
    pytest.importorskip("triton")
    import symm_kernels

    return symm_kernels


def _struct(*shape, dtype=np.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


# ---- Layout ------------------------------------------------------------------------------------


def test_buffers_have_guards_around_them():
    buffers = buffer_layout.lay_out(
        {"a": _struct(3, dtype=np.int8), "b": _struct(7, 5), "c": _struct(0)}
    )
    assert [b.name for b in buffers] == ["a", "b", "c"]
    ends = [0, *(b.end for b in buffers)]
    starts = [*(b.offset for b in buffers), buffer_layout.data_bytes(buffers)]
    assert all(s - e >= buffer_layout.GUARD_BYTES for s, e in zip(starts, ends, strict=True))
    assert all(b.offset % buffer_layout.ALIGN == 0 for b in buffers)
    assert buffer_layout.data_bytes(()) == 0


@pytest.mark.parametrize("signals", [0, 1, 505, 4000, 1 << 20])
@pytest.mark.parametrize("size", [0, 1, 65536, 65537, 1 << 24, (1 << 24) + 1])
def test_a_workspace_is_known_by_its_size(size, signals):
    total = _native.lib.custom_workspace_bytes(size, signals)
    workspace = buffer_layout.Workspace.of_total(total)
    assert workspace.data_offset(1) + workspace.half_bytes == total
    assert workspace.half_bytes >= size
    assert workspace.signal_bytes >= 8 * (8 + signals)
    assert workspace.signal_offset(1) + workspace.signal_bytes == workspace.data_offset(2)


# ---- Writes outside ----------------------------------------------------------------------------


def _workspace(epoch=6, signals=2):
    """(buffers, the workspace's bytes as a call of 2 signals leaves them, a reader)."""
    buffers = buffer_layout.lay_out({"first": _struct(64), "second": _struct(8, 2)})
    total = _native.lib.custom_workspace_bytes(buffer_layout.data_bytes(buffers), signals)
    memory = np.full(total, 0xFF, np.uint8)
    where = buffer_layout.Workspace.of_total(total)
    memory[: where.data_offset(0)] = 0
    memory[:8] = np.array([epoch << 24], np.uint64).view(np.uint8)
    for b in buffers:
        begin = where.data_offset(epoch)
        memory[begin + b.offset : begin + b.end] = 7
    words = memory[where.signal_offset(epoch) :][: where.signal_bytes].view(np.uint64)
    words[: 8 + signals] = epoch << 24 | 0xABCDEF
    words[8 + signals :] = (epoch - 2) << 24 | 0xABCDEF  # of an earlier call

    def find():
        return symm_check.written_outside(
            buffers, signals, total, lambda at, count: memory[at : at + count]
        )

    return buffers, where, memory, find


@pytest.mark.parametrize("epoch", [6, 7])
def test_nothing_is_found_where_nothing_is_written(epoch):
    buffers, where, _, find = _workspace(epoch)
    inside = sum(b.end - b.offset for b in buffers)
    assert find() == ("", where.half_bytes - inside)


@pytest.mark.parametrize(
    "buffer, by, text",
    [
        (0, 0, r"1 bytes were written outside of a buffer, 0 bytes after the end of 'first'"),
        (0, 40, "40 bytes after the end of 'first'"),
        (1, 3, "3 bytes after the end of 'second'"),
        (1, 30000, "30000 bytes after the end of 'second'"),
    ],
)
def test_a_write_after_a_buffer_is_found(buffer, by, text):
    buffers, where, memory, find = _workspace()
    memory[where.data_offset(6) + buffers[buffer].end + by] = 1
    assert text in find()[0]


@pytest.mark.parametrize("buffer, by", [(0, 1), (0, 900), (1, 4)])
def test_a_write_before_a_buffer_is_found(buffer, by):
    buffers, where, memory, find = _workspace()
    memory[where.data_offset(6) + buffers[buffer].offset - by] = 1
    assert f"{by} bytes before {buffers[buffer].name!r}" in find()[0]


def test_a_signal_that_there_is_not_is_found():
    _, where, memory, find = _workspace()
    words = memory[where.signal_offset(6) :][: where.signal_bytes].view(np.uint64)
    words[8 + 5] = 6 << 24 | 1
    assert find()[0] == "signal 5 was set, of 2 that the call has"


def test_errors_of_results():
    one = np.ones(4, np.float32)
    assert symm_check._error(one, one, None) == 0
    assert symm_check._error(one + 1e-4, one, 1e-3) == pytest.approx(0.1, rel=1e-2)
    assert symm_check._error(np.full(4, np.nan, np.float32), one, None) == np.inf
    assert symm_check._error(np.zeros(4, np.float32), np.zeros(4, np.float32), None) == 0
    assert symm_check._error(one, np.zeros(4, np.float32), None) == np.inf
    nan = np.array([1, np.nan], np.float32)
    assert symm_check._error(nan, nan, None) == 0
    assert symm_check._error(np.arange(3), np.arange(3) + 1, None) == np.inf
    half = np.ones(4, jnp.bfloat16)
    assert symm_check._error(half, half, None) == 0


# ---- Calls on CPUs -----------------------------------------------------------------------------


def _rolled(mesh, axis_name, x, by):
    y = np.empty_like(x)
    for group in groups_of(mesh, axis_name):
        for i, at in enumerate(group):
            y[at] = x[group[(i - by) % len(group)]]
    return y


@on_cpus
def test_every_mesh(kernels):
    size = kernels.BLOCK * kernels.PROGRAMS
    for shape in ((RANKS,), (2, RANKS // 2)):
        names = ("a", "b")[: len(shape)]
        mesh = make_mesh(shape, names, order=range(RANKS - 1, -1, -1))
        x = normal(0, (*shape, size), np.float32)
        for axis_name in [*names, names]:
            f = per_device(mesh, lambda x, a=axis_name: kernels.call_right("ring", x, a))
            np.testing.assert_array_equal(run(jax.jit(f), x), _rolled(mesh, axis_name, x, 1))


@on_cpus
def test_transforms(kernels):
    mesh = make_mesh((RANKS,))
    size = kernels.BLOCK * kernels.PROGRAMS
    x = normal(0, (RANKS, 3, size), np.float32)

    def one(x):
        return kernels.call_right("ring", x, "tp")

    bodies = {
        "vmap": jax.vmap(one),
        "scan": lambda x: lax.scan(lambda c, x: (c, one(x)), 0, x)[1],
        "checkpoint": jax.checkpoint(lambda x: jnp.stack([one(x[i]) for i in range(3)])),
        "cond": lambda x: lax.cond(True, jax.vmap(one), jax.vmap(one), x),
    }
    for name, body in bodies.items():
        y = run(jax.jit(per_device(mesh, body)), x)
        np.testing.assert_array_equal(y, _rolled(mesh, "tp", x, 1), err_msg=name)


@on_cpus
@pytest.mark.parametrize("check_vma", [True, False])
def test_a_derivative_of_ones_own(kernels, check_vma):
    """y = 2 x of the rank before: its cotangent goes back."""
    mesh = make_mesh((RANKS,))
    seen = []

    def reference(x, *, axis_name, BLOCK):
        return 2 * kernels._shifted(1)(x, axis_name=axis_name)

    def vjp(args, results, cotangent, *, axis_name, BLOCK):
        seen.append((args[0].shape, results.shape, axis_name, BLOCK))
        return (2 * kernels._shifted(-1)(cotangent, axis_name=axis_name),)

    def f(x):
        y = jflux.symm.call(
            kernels.ring_kernel, x, out_shape=x, workspace={"inbox": x}, signals=1,
            axis_name="tp", grid=1, reference=reference, vjp=vjp, BLOCK=4,
        )  # fmt: skip
        return jnp.sum(y * (1 + lax.axis_index("tp")))

    x = normal(0, (RANKS, 4), np.float32)
    got = run(jax.jit(per_device(mesh, jax.grad(f), check_vma=check_vma)), x)
    after = 1 + (np.arange(RANKS) + 1) % RANKS
    np.testing.assert_array_equal(got, np.broadcast_to(2.0 * after[:, None], (RANKS, 4)))
    assert set(seen) == {((4,), (4,), "tp", 4)}

    def no_vjp(x):
        return jnp.sum(kernels.call_right("ring", x, "tp"))

    message = r"symm\.call\(ring_kernel\) has no derivative: pass vjp="
    with pytest.raises(NotImplementedError, match=message):
        size = kernels.BLOCK * kernels.PROGRAMS
        jax.jit(per_device(mesh, jax.grad(no_vjp)))(normal(0, (RANKS, size), np.float32))


@on_cpus
def test_check_says_that_no_kernel_ran_and_finds_differences(kernels):
    mesh = make_mesh((2, RANKS // 2), ("a", "b"))
    size = kernels.BLOCK * kernels.PROGRAMS

    def right(x):
        return kernels.call_right("pull", x, "b")

    report = jflux.symm.check(right, _struct(size), mesh=mesh, times=2, steps=3)
    assert report.kernels == () and report.calls == 1 + 2 * (4 + 3) and report.error == 0
    assert str(report).startswith("no kernel (the reference alone): 15 calls equal the reference")
    assert report.compiled == ("pull_kernel",)
    assert str(report).endswith("\ncompiled, and not run: pull_kernel")

    def wrong(x):
        y = right(x)
        on_one = (lax.axis_index("a") == 1) & (lax.axis_index("b") == 0)
        return jnp.where(on_one & _config.config.fused, y + 1, y)

    text = r"symm\.check\(pull_kernel\): with fresh workspaces, result 0 .*\[\(1, 0\)\]"
    with pytest.raises(AssertionError, match=text):
        jflux.symm.check(wrong, _struct(size), mesh=mesh, times=1)


@on_cpus
def test_check_compiles_what_does_not_run(kernels, monkeypatch):
    from triton.compiler.errors import CompilationError

    mesh = make_mesh((RANKS,))

    def call(x, kernel=kernels.misspelt_kernel):
        return jflux.symm.call(
            kernel, x, out_shape=x, axis_name="tp", grid=1, BLOCK=4, reference=lambda x, **_: x
        )

    misnaming = functools.partial(call, kernel=kernels.misnaming_kernel)
    with pytest.raises(AttributeError, match="no attribute 'putt'"):
        jflux.symm.check(misnaming, _struct(4), mesh=mesh, times=1)
    with pytest.raises(CompilationError) as error:
        jflux.symm.check(call, _struct(4), mesh=mesh, times=1)
    assert "blokc is not defined" in str(error.value.__cause__)
    monkeypatch.setattr(compiling, "why_no_triton", lambda: "it is not installed")
    report = jflux.symm.check(call, _struct(4), mesh=mesh, times=1)
    assert report.compiled == () and "compiled" not in str(report)


@on_cpus
def test_explain(kernels):
    mesh = make_mesh((RANKS,))
    size = kernels.BLOCK * kernels.PROGRAMS
    f = per_device(mesh, lambda x: kernels.call_right("count", x, "tp"))
    (call,) = jflux.explain(jax.jit(f), normal(0, (RANKS, size), np.float32))
    assert call.op == "symm.call(count_kernel)" and call.plan.path == Path.REFERENCE


# ---- What is refused ---------------------------------------------------------------------------


def test_errors(kernels):
    mesh = make_mesh((RANKS,))
    x = normal(0, (RANKS, 4), np.float32)

    def call(*args, kernel=kernels.ring_kernel, **changes):
        options = {
            "out_shape": _struct(4), "axis_name": "tp", "grid": 1, "signals": 1, "BLOCK": 4,
            "workspace": {"inbox": _struct(4)},
        } | changes  # fmt: skip
        return lambda x: jflux.symm.call(kernel, *args or (x,), **options)

    for bad, error, text in [
        (call(backend="cuda"), ValueError, 'backend=.cuda. must be "triton"'),
        (call(kernel=lambda ctx, x, y: None), TypeError, "triton.jit"),
        (call(grid=0), ValueError, "grid=0"),
        (call(grid=(2, 2)), TypeError, r"grid=\(2, 2\) must be an int"),
        (call(out_shape=(4,)), TypeError, "out_shape must have .*ShapeDtypeStruct, got 4"),
        (call(workspace={"inbox": (4,)}), TypeError, r"workspace must have .*, got \(4,\)"),
        (call(signals=-1), ValueError, "signals=-1"),
        (call(workspace={}), ValueError, r"ring_kernel\(ctx, x, y, inbox, BLOCK\) must take"),
        (call(workspace={"outbox": _struct(4)}), ValueError, "the buffers .'outbox'."),
        (call(OTHER=1), ValueError, "the constexprs .'BLOCK', 'OTHER'."),
        (call(out_shape=[_struct(4)] * 2), ValueError, "3 pointers"),
        (call(out_shape=_struct(4, dtype=np.complex64)), TypeError, "no pointers to complex64"),
        (call(BLOCK=np.ones(2)), TypeError, "unhashable"),
    ]:
        with pytest.raises(error, match=text):
            jax.jit(per_device(mesh, bad))(x)
    with pytest.raises(TypeError, match="at least one argument"):
        jflux.symm.call(kernels.ring_kernel, out_shape=_struct(4), axis_name="tp", grid=1)
    with pytest.raises(NameError, match="tp"):
        call()(x[0])


@on_cpus
def test_a_reference_is_wanted_and_must_fit(kernels):
    mesh = make_mesh((RANKS,))
    x = normal(0, (RANKS, kernels.BLOCK), np.float32)
    stuck = per_device(mesh, lambda x: kernels.call_stuck(x, "tp", "signal"))
    with pytest.raises(NotImplementedError, match=r"symm\.call\(stuck_kernel\).*no reference="):
        jax.jit(stuck)(x)

    def wrong(x):
        return jflux.symm.call(
            kernels.copy_kernel, x, out_shape=x, axis_name="tp", grid=1, BLOCK=4,
            reference=lambda x, **_: x[:2],
        )  # fmt: skip

    with pytest.raises(ValueError, match=r"symm\.call\(copy_kernel\): the reference has results"):
        jax.jit(per_device(mesh, wrong))(x)


def test_without_triton(kernels, monkeypatch):
    assert compiling.why_no_triton() is None
    plan = symm_call._op.plan([], _params(kernels, "ring", 2), H100)
    assert plan.path == Path.FUSED
    assert plan.workspace_bytes == _native.lib.custom_workspace_bytes(
        2 * 1024 + 2 * 4 * kernels.BLOCK * kernels.PROGRAMS // 2, kernels.PROGRAMS
    )
    monkeypatch.setattr(sys.modules["triton"], "__version__", "3.4.0")
    assert compiling.why_no_triton() == "Triton 3.4.0 is too old: pip install 'triton>=3.5'"
    monkeypatch.setitem(sys.modules, "triton", None)
    assert compiling.why_no_triton() == "Triton is not installed: pip install 'triton>=3.5'"
    plan = symm_call._op.plan([], _params(kernels, "ring", 2), H100)
    assert plan.unsupported and plan.reason == compiling.why_no_triton()


def test_a_grid_must_fit_the_smallest_gpu_of_the_job(monkeypatch):
    """Whatever GPUs this process has: the others would wait for one that is refused."""
    add = types.SimpleNamespace(add_module=lambda *_: 2)  # programs on a multiprocessor
    monkeypatch.setattr(compiling._native, "lib", add)
    monkeypatch.setattr(compiling._heap, "sm_count", lambda: 114)
    compiled = compiling.Compiled("key", b"", "f", 128, 0, 0)
    compiling.load(compiled, "symm.call(f)", 228)
    with pytest.raises(ValueError, match="grid=229 programs, of which a GPU holds 228 at once"):
        compiling.load(compiled, "symm.call(f)", 229)


def test_which_calls_have_kernels(kernels):
    for world, path in ((1, Path.REFERENCE), (2, Path.FUSED), (8, Path.FUSED)):
        assert symm_call._op.plan([], _params(kernels, "ring", world), H100).path == path
    assert (
        symm_call._op.plan([], _params(kernels, "ring", 2), Machine("cpu")).path == Path.REFERENCE
    )
    many = _params(kernels, "ring", 2)
    many = type(many)(**{**vars(many), "world": 9})
    assert symm_call._op.plan([], many, H100).unsupported


# ---- What Triton makes of kernels --------------------------------------------------------------


def _params(kernels, name, world):
    """Of a call over `world` ranks; on one, of two."""
    mesh = make_mesh((max(world, 2),))
    size = kernels.BLOCK * kernels.PROGRAMS
    f = per_device(mesh, lambda x: kernels.call_right(name, x, "tp"))
    x = jax.ShapeDtypeStruct((max(world, 2), size), np.float32)
    ((_, params),) = symm_check._calls_in(jax.make_jaxpr(f)(x).jaxpr)
    return type(params)(**{**vars(params), "world": world})


def _ptx(kernels, name, world):
    """(the compiled kernel, its PTX)."""
    import triton

    kept = []
    compile_ = triton.compile

    def compile_and_keep(*args, **kwargs):
        kept.append(compile_(*args, **kwargs))
        return kept[-1]

    params = _params(kernels, name, world)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton, "compile", compile_and_keep)
        size = kernels.BLOCK * kernels.PROGRAMS
        compiled = symm_call.compile_call([_struct(size)], params)
    return compiled, kept[-1].asm["ptx"]


@pytest.mark.parametrize("world", [2, 8])
def test_parameters_are_the_handlers(kernels, world):
    """raw, with the base of each rank, the arrays, and two scratch pointers, 8 bytes each."""
    if world > RANKS:
        pytest.skip("not so many devices")
    compiled, ptx = _ptx(kernels, "ring", world)
    found = re.findall(r"\.param \.(\w+)( \.ptr)?[^,\n]*_entry_param_(\d+)", ptx)
    assert [int(number) for *_, number in found] == list(range(7 + world + 2 + 2))
    assert all(kind == "u64" for kind, *_ in found)
    assert [bool(pointer) for _, pointer, _ in found] == [False] * (7 + world) + [True] * 4
    assert compiled.function == "_entry" and compiled.threads == 128
    assert compiled.image[:4] == b"\x7fELF" and compiled.scratch_bytes == 0


@pytest.mark.parametrize(
    "name, instructions",
    [
        ("ring", ["ld.acquire.sys.global.u64", "fence.acq_rel.sys", "st.relaxed.sys.global.u64"]),
        ("count", ["red.relaxed.sys.global.max.u64", "red.relaxed.sys.global.add.u64"]),
        ("packets", ["st.relaxed.sys.global.b128", "ld.relaxed.sys.global.b128"]),
        ("pull", ["fence.proxy.async", "atom.acq_rel.sys.global.cas.b64", "trap"]),
    ],
)
def test_instructions(kernels, name, instructions):
    _, ptx = _ptx(kernels, name, 2)
    for instruction in instructions:
        assert instruction in ptx, instruction
    # No load of what peers write may go through the read-only cache.
    assert "ld.global.nc" not in ptx


def test_a_signal_is_set_after_the_data(kernels):
    """In the order of the program: data, barrier, fence, signal; poll, barrier, data."""
    _, ptx = _ptx(kernels, "ring", 2)
    lines = [line.strip() for line in ptx.splitlines()]
    fence = next(i for i, line in enumerate(lines) if line.startswith("fence.acq_rel.sys"))
    barriers = [i for i, line in enumerate(lines) if line.startswith("bar.sync")]
    stores = [i for i, line in enumerate(lines) if re.match(r"st\.global\.", line)]
    before = max(i for i in barriers if i < fence)
    assert any(i < before for i in stores)
    signal = next(
        i for i, line in enumerate(lines) if i > fence and "st.relaxed.sys.global.u64" in line
    )
    poll = next(i for i, line in enumerate(lines) if i > signal and "ld.acquire.sys" in line)
    assert any(i > signal for i in barriers) and poll > signal


def test_the_ranks_agree_on_a_signature(kernels):
    size = kernels.BLOCK * kernels.PROGRAMS
    arrays = [_struct(size)]
    params = _params(kernels, "ring", 2)
    same = symm_call._signature(arrays, _params(kernels, "ring", 2))
    assert symm_call._signature(arrays, params) == same
    for changed in (
        _params(kernels, "pull", 2),
        type(params)(**{**vars(params), "grid": 4}),
        type(params)(**{**vars(params), "num_signals": 4}),
        type(params)(**{**vars(params), "options": ()}),
    ):
        assert symm_call._signature(arrays, changed) != same
    assert symm_call._signature([_struct(size, dtype=np.int32)], params) != same


# ---- What tests/symm_gpu.py makes of errors ------------------------------------------------------


def _told(rank, own, other, seconds=0.4, call=2):
    return (
        f"jflux.symm.call(ring_kernel): rank {rank} expects call {call} with signature {own}, but "
        f"rank {1 - rank} sent call {call} with signature {other} (item 1). The ranks run "
        f"different calls: check that all of them trace the same ops.\nINTERNAL: launch failed\n"
        f"ENDED\t{seconds}\n"
    )


@pytest.fixture
def symm_gpu(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["symm_gpu.py"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("NCCL_NVLS_ENABLE", "XLA_PYTHON_CLIENT_PREALLOCATE"):
        monkeypatch.setenv(name, "0")
    return importlib.import_module("symm_gpu")


def test_ranks_that_differ_are_both_told_at_once(symm_gpu):
    right = [_told(0, "0a1b2c", "ffee00"), _told(1, "ffee00", "0a1b2c", 1.2)]
    assert symm_gpu.told(right, "ring_kernel").startswith(
        "1.2 s: jflux.symm.call(ring_kernel): rank 0 expects"
    )
    late = "jflux.symm.call(ring_kernel): rank 1 waited 60 s for rank 0\nENDED\t0.5\n"
    for wrong, why in (
        (late, "rank 1 was told"),
        ("NOT TOLD\n", "rank 1 has not ended"),
        ("\nNOT ENDED", "rank 1 has not ended"),
        (_told(1, "ffee00", "0a1b2c", 60.2), "rank 1 ended after 60.2 s"),
        (_told(1, "ffee00", "ffee00"), "rank 1 was told"),
        (_told(0, "0a1b2c", "ffee00"), "rank 1 was told"),
        (_told(1, "123456", "0a1b2c"), "rank 0 has"),
    ):
        with pytest.raises(AssertionError, match=why):
            symm_gpu.told([right[0], wrong], "ring_kernel")


@on_cpus
def test_processes_of_ranks_are_ended(symm_gpu, monkeypatch, tmp_path):
    """What they say is read, also of those that do not end."""
    script = tmp_path / "worker.py"
    script.write_text(
        "import sys, time\n"
        "rank = int(sys.argv[sys.argv.index('--rank') + 1])\n"
        "print(f'this is {rank}', flush=True)\n"
        "sys.stdin.read() if rank == 0 else time.sleep(600 * (rank == 2))\n"
    )
    monkeypatch.setattr(symm_gpu, "__file__", str(script))
    begin = time.monotonic()
    outputs = symm_gpu.together("some-rank", 3, 2, seconds=3)
    assert outputs == ["this is 0\n", "this is 1\n", "this is 2\n\nNOT ENDED"]
    assert time.monotonic() - begin < 60


def test_ranks_that_share_gpus_do_so_on_any_number_of_them(symm_gpu):
    found = [symm_gpu.sharing(gpus) for gpus in (1, 2, 3, 4, 8)]
    assert found == [(4, 1), (4, 2), (6, 3), (8, 4), (8, 4)]
    assert symm_gpu.sharing(8, 2) == (2, 1)
