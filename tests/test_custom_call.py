"""Kernels of one's own: examples/custom_kernel, compiled out of tree, against lax.ppermute.

JFLUX_TEST_CUSTOM_KERNEL names a library that is built already, for hosts without a compiler.
"""

import dataclasses
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import compilers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import PLATFORM, RANKS, SHAPES, compiled_text, make_mesh, run
from workers.common import environment, run_alone

import jflux
from jflux import _native, testing
from jflux._own_kernels import custom_call, nvrtc
from jflux._stress.calls import groups_of, normal, per_device, x64_if

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "custom_kernel"
DTYPES = (jnp.bfloat16, np.float32, np.float64, np.int8)

pytestmark = pytest.mark.skipif(not EXAMPLE.exists(), reason="the example is not here")


def _example():
    spec = importlib.util.spec_from_file_location("halo_exchange", EXAMPLE / "halo_exchange.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("custom_kernel")
    return compilers.library_of(EXAMPLE, "halo_exchange", folder, "JFLUX_TEST_CUSTOM_KERNEL")


@pytest.fixture(scope="module")
def halo(library):
    module = _example()
    module.load(str(library))
    return module


def _exact(mesh, axis_name, x, halo):
    shape = (*x.shape[:-2], x.shape[-2] + 2 * halo, x.shape[-1])
    y = np.zeros(shape, x.dtype)
    for group in groups_of(mesh, axis_name):
        for i, at in enumerate(group):
            above, below = x[group[i - 1]], x[group[(i + 1) % len(group)]]
            y[at] = np.concatenate([above[-halo:], x[at], below[:halo]])
    return y


def _check(halo, mesh, axis_name, x, rows, **options):
    def body(x):
        return halo.halo_exchange(x, halo=rows, axis_name=axis_name)

    with x64_if(x.dtype):
        y = run(jax.jit(per_device(mesh, body, **options)), x)  # twice, from poisoned workspaces
    np.testing.assert_array_equal(y, _exact(mesh, axis_name, x, rows))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("check_vma", [True, False])
def test_values(halo, dtype, check_vma):
    """All sizes and alignments: halos of a byte, of no whole vectors, and for several blocks."""
    mesh = make_mesh((RANKS,))
    for rows, columns, halo_rows in [
        (1, 1, 1),
        (5, 3, 2),
        (7, 37, 7),
        (64, 1000, 2),
        (333, 4001, 9),
    ]:
        x = (10 * normal(rows, (RANKS, rows, columns), np.float32)).astype(dtype)
        _check(halo, mesh, "tp", x, halo_rows, check_vma=check_vma)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_mesh(halo, shape):
    names = ("a", "b", "c")[: len(shape)]
    mesh = make_mesh(shape, names, order=range(RANKS - 1, RANKS - 1 - np.prod(shape), -1))
    x = normal(0, (*shape, 6, 5), np.float32)
    for axis_name in [*names, names, names[::-1]]:
        _check(halo, mesh, axis_name, x, 2)


def test_it_is_one_custom_call_and_equals_its_reference(halo):
    mesh, x = make_mesh((RANKS,)), normal(0, (RANKS, 8, 16), np.float32)

    def body(exchange):
        return per_device(mesh, lambda x: exchange(x, halo=3, axis_name="tp"))

    text = compiled_text(body(halo.halo_exchange), x)
    assert len(re.findall(r'custom_call_target="halo_exchange"', text)) == 1
    assert "collective-permute" not in text
    want = run(jax.jit(body(halo.reference)), x)
    np.testing.assert_array_equal(run(jax.jit(body(halo.halo_exchange)), x), want)
    with jflux.config(fused=False):
        text = compiled_text(body(halo.halo_exchange), x)
        assert "halo_exchange" not in re.findall(r'custom_call_target="(\w+)"', text)
        np.testing.assert_array_equal(run(jax.jit(body(halo.halo_exchange)), x), want)


def test_transforms(halo):
    mesh = make_mesh((RANKS,))
    x = normal(0, (RANKS, 3, 4, 5), np.float32)

    def one(x):
        return halo.halo_exchange(x, halo=1, axis_name="tp")

    bodies = {
        "vmap": jax.vmap(one),
        "scan": lambda x: jax.lax.scan(lambda c, x: (c, one(x)), 0, x)[1],
        "checkpoint": jax.checkpoint(lambda x: jnp.stack([one(x[i]) for i in range(3)])),
        "cond": lambda x: jax.lax.cond(True, jax.vmap(one), jax.vmap(one), x),
    }
    want = np.stack([_exact(mesh, "tp", x[:, i], 1) for i in range(3)], axis=1)
    for name, body in bodies.items():
        y = run(jax.jit(per_device(mesh, body)), x)
        np.testing.assert_array_equal(y, want, err_msg=name)
    y = per_device(mesh, one)(x[:, 0])  # not jitted
    np.testing.assert_array_equal(y, want[:, 0])


def test_in_a_loop_beside_other_calls(halo):
    """On GPUs XLA captures the loop's body, and replays find new data and new epochs. The other
    op's workspace is the same."""
    mesh, steps, k = make_mesh((RANKS,)), 100, 16
    x = np.round(8 * normal(0, (RANKS, steps, 8, k), np.float32)).astype(jnp.bfloat16)
    w = np.broadcast_to(np.eye(k), (RANKS, k, k)).astype(jnp.bfloat16)

    def body(exchange, gather):
        def step(count, x, w):
            ys = [2 * exchange(x * s, halo=2, axis_name="tp") for s in (2, -1, 0.5)]
            return count + 1, (ys, gather(x * 2, w, axis_name="tp") * 2)

        return lambda x, w: jax.lax.scan(lambda c, x: step(c, x, w), 0, x)[1]

    f = jax.jit(per_device(mesh, body(halo.halo_exchange, jflux.all_gather_matmul)))
    g = jax.jit(per_device(mesh, body(halo.reference, jflux.reference.all_gather_matmul)))
    run(f, x, w)
    before = _native.lib.cuda_launches()
    got, want = run(f, x, w), run(g, x, w)
    for y, z in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(y, z)
    if PLATFORM == "gpu":
        kernels = 2 * RANKS * steps * 4
        assert _native.lib.cuda_launches() - before <= kernels / 4


def test_late_ranks_and_waits_that_are_left_out(halo):
    mesh, x = make_mesh((RANKS,)), normal(0, (RANKS, 40, 300), np.float32)
    f = jax.jit(per_device(mesh, lambda x: halo.halo_exchange(x, halo=20, axis_name="tp")))
    want = _exact(mesh, "tp", x, 20)
    with testing.planted_faults(max_delay_us=3000):
        for _ in range(3):
            np.testing.assert_array_equal(run(f, x), want)

    def is_wrong():
        testing.poison_workspaces()
        return not np.array_equal(np.asarray(f(x)), want)

    # A rank that does not wait may still be late enough, above all on a GPU that others use too.
    with testing.planted_faults(skip_waits=True, max_delay_us=20_000):
        assert any(is_wrong() for _ in range(5)), "the halos came from nowhere"
    np.testing.assert_array_equal(run(f, x), want)


def test_a_rank_that_never_calls(library, monkeypatch):
    monkeypatch.setenv("JFLUX_TEST_CUSTOM_KERNEL", str(library))
    output = run_alone("custom_without_rank_1", platform=PLATFORM, devices=min(RANKS, 4))
    assert re.search(
        r"jflux\.custom_call\(halo_exchange\): rank [0, 2-3]+ waited 2 s for rank 1\b", output
    )
    assert re.search("^error: ", output, re.M), output


def _call(**changes):
    options = {
        "axis_name": "tp",
        "data_bytes": 8,
        "num_signals": 1,
        "reference": lambda x, **_: 2 * x,
    } | changes
    return jflux.custom_call("nobody_has_this", jax.ShapeDtypeStruct((3,), np.float32), **options)


def test_what_no_handler_takes(caplog):
    mesh, x = make_mesh((RANKS,)), normal(0, (RANKS, 3), np.float32)
    f = per_device(mesh, lambda x: _call()(x, scale=2))
    with pytest.raises(NotImplementedError, match=r"custom_call\(nobody_has_this\).*no handler"):
        jax.jit(f)(x)
    with jflux.config(strict=False):
        np.testing.assert_array_equal(jax.jit(f)(x), 2 * x)
        assert "custom_call(nobody_has_this) takes its lax reference: no handler" in caplog.text
        wrong = per_device(mesh, lambda x: _call(reference=lambda x, axis_name: x[:2])(x))
        with pytest.raises(ValueError, match=r"nobody_has_this\): the reference has results"):
            jax.jit(wrong)(x)


def test_errors(halo, library):
    mesh, x = make_mesh((RANKS,)), normal(0, (RANKS, 3), np.float32)
    with pytest.raises(ValueError, match="num_signals=-1"):
        _call(num_signals=-1)
    with pytest.raises(NameError, match="tp"):
        _call()(x[0])
    for call, error, text in [
        (lambda x: _call()(x, groups=1), ValueError, "'groups'"),
        (lambda x: _call()(x, scale=x), TypeError, "attribute scale="),
        (lambda x: _call()(), TypeError, "operand"),
    ]:
        with pytest.raises(error, match=text):
            jax.jit(per_device(mesh, call))(x)
    with pytest.raises(ValueError, match="load_kernels"):
        jflux.register_custom_call("half", cuda=1)
    halo.load(str(library))  # the same again
    with pytest.raises(ValueError, match="registered already"):
        jflux.register_custom_call("halo_exchange", cpu=_jflux_function())
    # The handler says what does not fit.
    f = per_device(mesh, lambda x: halo.halo_exchange(x, halo=4, axis_name="tp"))
    with pytest.raises(Exception, match="halo_exchange: x, halo and y do not fit"):
        jax.block_until_ready(jax.jit(f)(x[:, :, None]))


@pytest.mark.parametrize("fused", [False, True])
def test_derivatives(fused):
    """As those of `symm.call`: with vjp=, and an error that says so. Also on a vmap axis."""
    mesh, x = make_mesh((RANKS,)), normal(0, (RANKS, 3), np.float32)

    def vjp(operands, results, cotangents, *, axis_name, scale):
        (x,) = operands
        assert results.shape == x.shape and axis_name == "tp"
        return (10 * scale * cotangents,)

    def grad(**changes):
        reference = {"reference": lambda x, axis_name, scale: scale * x}
        return jax.grad(lambda x: _call(**reference, **changes)(x, scale=2).sum())

    with jflux.config(strict=False, fused=fused):
        message = r"custom_call\(nobody_has_this\) has no derivative: pass vjp= for reverse mode"
        with pytest.raises(NotImplementedError, match=message):
            jax.jit(per_device(mesh, grad()))(x)
        for f in (per_device(mesh, grad(vjp=vjp)), jax.vmap(grad(vjp=vjp), axis_name="tp")):
            np.testing.assert_array_equal(jax.jit(f)(x), np.full_like(x, 20))


def _jflux_function():
    import ctypes

    return ctypes.CDLL(jflux.library_path()).jflux_call_site_type_id


def test_a_heap_that_is_too_small(halo, own_heap):
    own_heap(heap_bytes=1 << 20)
    mesh, x = make_mesh((RANKS,)), np.zeros((RANKS, 512, 2048), np.float32)
    f = per_device(mesh, lambda x: halo.halo_exchange(x, halo=512, axis_name="tp"))
    with pytest.raises(Exception, match="halo_exchange.*init"):
        jax.block_until_ready(jax.jit(f)(x))


def test_paths():
    headers = Path(jflux.include_dir())
    for name in ("shmem.h", "scope.h", "call.h", "ffi.h", "kernel.cuh"):
        assert (headers / "jflux" / name).is_file()
    assert Path(jflux.library_path()).is_file()


def test_the_headers_need_nothing_else(tmp_path):
    """A folder with what is installed, and no other of the repository's."""
    compiler = compilers.cxx()
    cmake_lists = ROOT / "CMakeLists.txt"
    if compiler is None or not cmake_lists.exists():
        pytest.skip("no C++ compiler, or no build files")
    listed = re.findall(r"^ +cc/([\w/.]+\.(?:h|cuh))\b", cmake_lists.read_text(), re.M)
    assert "jflux/shmem.h" in listed and "core/signal.h" in listed
    for name in listed:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / "cc" / name, tmp_path / name)
    (tmp_path / "use.cc").write_text('#include "jflux/ffi.h"\n#include "jflux/shmem.h"\n')
    headers = [f"-I{tmp_path}", "-isystem", jax.ffi.include_dir()]
    compilers.run(compiler, "-std=c++17", "-fsyntax-only", *headers, tmp_path / "use.cc")


@pytest.mark.slow
def test_the_example_with_cmake(tmp_path):
    cmake = shutil.which("cmake", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if cmake is None or (PLATFORM == "gpu" and compilers.nvcc() is None):
        pytest.skip("no cmake, or no nvcc")
    env = environment(PLATFORM, RANKS)
    options = [f"-DPython_EXECUTABLE={sys.executable}"]
    options += [] if PLATFORM == "gpu" else ["-DCMAKE_CUDA_COMPILER=NOTFOUND"]
    for command in (
        [cmake, "-S", EXAMPLE, "-B", tmp_path, *options],
        [cmake, "--build", tmp_path],
        [sys.executable, EXAMPLE / "halo_exchange.py", tmp_path / "libhalo_exchange.so"],
    ):
        done = subprocess.run(
            [str(c) for c in command], env=env, capture_output=True, text=True, timeout=280
        )
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "halo_exchange equals lax.ppermute" in done.stdout


def _kind(x, axis_name, value):
    """Adds what tells 1, 1.0, True, 0.0 and -0.0 apart."""
    return x + {bool: 1, int: 2, float: 3}[type(value)] + 10 * (str(value)[0] == "-")


def test_attributes_that_compare_equal_are_not_the_same():
    call = jflux.custom_call(
        "kinds", jax.ShapeDtypeStruct((1,), np.float32), axis_name="tp", reference=_kind,
        data_bytes=0, num_signals=0,
    )  # fmt: skip
    values = (True, 1, 1.0, 0.0, -0.0, np.float64(0.0))
    mesh = make_mesh((RANKS,))
    f = jax.jit(per_device(mesh, lambda x: [call(x, value=v) for v in values]))
    with jflux.config(strict=False):
        ys = f(np.zeros((RANKS, 1), np.float32))
    assert [float(y[0, 0]) for y in ys] == [1, 2, 3, 3, 13, 3]


# ---- Sources -----------------------------------------------------------------------------------


def _source_call(source, **changes):
    options = {
        "axis_name": "tp", "data_bytes": 64, "num_signals": 2, "source": source, "grid": 2,
        "reference": lambda x, *, axis_name, n, scale: jnp.roll(x, n) * scale,
    } | changes  # fmt: skip
    return jflux.custom_call("scaled", jax.ShapeDtypeStruct((3,), np.float32), **options)


SOURCE = """
#include "jflux/kernel.cuh"
extern "C" __global__ void scaled(const __grid_constant__ jflux::shmem::CallArgs args,
                                  const float* x, float* y, long n, double scale) {
  const jflux::shmem::Context ctx = jflux::shmem::begin_call(args);
  const bool ok = jflux::shmem::barrier_all_block(ctx, ctx.signal());
  y[threadIdx.x] = static_cast<float>(scale) * x[n];
  jflux::shmem::end_call(args, ctx, ok);
}
"""


@pytest.mark.skipif(PLATFORM == "gpu", reason="the kernel runs here")
def test_the_reference_of_a_source_runs_on_cpus(tmp_path):
    mesh, x = make_mesh((RANKS,)), normal(0, (RANKS, 3), np.float32)
    path = tmp_path / "scaled.cu"
    path.write_text(SOURCE)
    for source in (SOURCE, path, str(path)):
        f = per_device(mesh, lambda x, s=source: _source_call(s)(x, n=1, scale=2.0))
        np.testing.assert_array_equal(jax.jit(f)(x), 2 * np.roll(x, 1, 1))
        (call,) = jflux.explain(jax.jit(f), x)
        assert (call.op, call.plan.reason) == ("custom_call(scaled)", "its source is for GPUs")


def test_what_is_refused_of_a_source():
    mesh, x = make_mesh((RANKS,)), normal(0, (RANKS, 3), np.float32)
    for changes, text in [
        ({"grid": 0}, "grid=0"),
        ({"threads": 1025}, "threads=1025"),
        ({"shared_bytes": -1}, "shared_bytes=-1"),
    ]:
        with pytest.raises(ValueError, match=text):
            _source_call(SOURCE, **changes)
    for source, error, text in [
        ("nowhere.cu", FileNotFoundError, "'nowhere.cu' is no file"),
        ("", FileNotFoundError, "source='' is no file, and no CUDA"),
        ("nonsense " * 100, FileNotFoundError, "is no file"),
        ("non\nsense", ValueError, r'must have extern "C" __global__ void scaled\('),
        (SOURCE.replace("scaled", "other"), ValueError, r"void scaled\("),
        (3, TypeError, "source=3 must be CUDA"),
    ]:
        with pytest.raises(error, match=text):
            _source_call(source)
    with pytest.raises(TypeError, match="attribute n='1'"):
        jax.jit(per_device(mesh, lambda x: _source_call(SOURCE)(x, n="1", scale=2.0)))(x)


def test_a_source_is_compiled_against_the_headers():
    try:
        nvrtc._library()
    except ImportError as error:
        pytest.skip(str(error))
    call = custom_call.Source(SOURCE, "scaled.cu", 2, 64, 16)
    compiled = custom_call.compile_source(call, "scaled")
    assert compiled.image[:4] == b"\x7fELF" and b"scaled" in compiled.image
    assert (compiled.function, compiled.threads, compiled.shared_bytes) == ("scaled", 64, 16)
    other = custom_call.compile_source(dataclasses.replace(call, threads=32), "scaled")
    assert other.image == compiled.image and other.key != compiled.key
    with pytest.raises(ValueError, match=r"scaled.cu does not compile:\n.*nobody"):
        wrong = SOURCE.replace("barrier_all_block", "nobody")
        custom_call.compile_source(dataclasses.replace(call, text=wrong), "scaled")


def test_the_source_of_the_example_compiles():
    try:
        nvrtc._library()
    except ImportError as error:
        pytest.skip(str(error))
    folder = str(ROOT / "examples" / "python_kernels")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        import cuda_source
    call = custom_call.Source(cuda_source.SOURCE, "cuda_source", cuda_source.BLOCKS, 256, 0)
    assert b"scaled_shift" in custom_call.compile_source(call, "scaled_shift").image


def test_a_source_is_text_or_a_path(tmp_path):
    line = 'extern "C" __global__ void nothing() {}'
    path = tmp_path / "nothing.cu"
    path.write_text(line)
    assert nvrtc.source_of(line, "nothing") == (line, "source")
    assert nvrtc.source_of(f"// A comment.\n{line}", "nothing")[1] == "source"
    for source in (path, str(path)):
        assert nvrtc.source_of(source, "nothing") == (line, str(path))
    with pytest.raises(FileNotFoundError, match=r"nothing\.cuh"):
        nvrtc.source_of("nothing.cuh", "nothing")


def test_bits_of_parameters():
    assert [custom_call._bits(v) for v in (True, -3, 0.0, 1.0)] == [1, -3, 0, 0x3FF0000000000000]
    assert custom_call._bits(-0.0) == -(1 << 63)
