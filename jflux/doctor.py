"""``python -m jflux.doctor``: what jflux finds on this machine, and what it will do with it.

With ``--report``, the same as a text to paste into a bug report.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import logging
import pathlib
import platform
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jflux

from . import _config, _heap, _jax_internals, _native, testing
from ._call import explain, gpu_code, selftest_record
from ._call.plans import Path, Plan
from ._heap import _nvshmem
from ._ops._spec import OpSpec, collectives, products
from ._ops.products import matmul
from ._tools import bug_reports, tuner, virtual_devices
from ._tools.trials import Trial


def _versions() -> Iterator[str]:
    build = "with CUDA kernels" if _native.lib.built_with_cuda() else "without CUDA kernels"
    try:
        from ._build_info import CUDA_DETAIL

        build += f" ({CUDA_DETAIL})"
    except ImportError:
        pass
    yield f"jflux {jflux.__version__}, built {build}"
    yield (
        f"jax {jax.__version__}, jaxlib {jaxlib.__version__}, "
        f"Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    )
    for internal in _jax_internals.ALL:
        if why := internal.why_missing():
            yield f"  {why}: {internal.without}"
    if _native.lib.built_with_cuda():
        yield f"NVSHMEM: {_nvshmem.why_not_here('cuda', 1) or _nvshmem.host_library() or 'loads'}"


def _devices() -> Iterator[str]:
    devices = jax.devices()
    kinds = sorted({d.device_kind for d in devices})
    yield (
        f"devices: {len(devices)} x {', '.join(kinds)} ({jax.default_backend()}), "
        f"{jax.process_count()} process(es)"
    )
    if jax.default_backend() == "cpu":
        yield (
            "  virtual devices of the CPU: N of them with "
            "XLA_FLAGS=--xla_force_host_platform_device_count=N"
        )
    if _heap._cuda_usable():
        yield from gpu_code.report(
            gpu_code.arch_here(), ", ".join(kinds), gpu_code.portable_ops(),
            gpu_code.is_switched_on(), selftest_record.here().why,
        )  # fmt: skip


def _heap_lines() -> Iterator[str]:
    name = _heap.default_platform()
    if name not in ("cpu", "cuda"):
        yield f"heap: none; on {name} every op takes its lax reference"
        return
    if name == "cuda" and (reason := _heap._why_no_cuda()):
        yield f"heap: none: {reason}"
        return
    try:
        with jflux.config(strict=True):
            jflux.init()
    except Exception as error:  # whatever it is, the user should read it here
        yield f"heap: FAILED: {error}"
        return
    mib = _heap.heap_bytes(name) >> 20
    yield (
        f"heap: back end {_heap.backend_in_use()}, {mib} MiB per device, "
        f"deadline {_heap.deadline_seconds():g} s"
    )
    links = _heap.links("cuda")
    for source in sorted({link[0] for link in links}):
        mine = [link for link in links if link[0] == source]
        peers = ", ".join(f"{to}: {push:.0f}/{pull:.0f}" for _, to, push, pull, _ in mine)
        slowest = max(us for *_, us in mine)
        yield (
            f"  links of device {source}, push/pull GB/s to device {peers}; "
            f"1 KiB and a flag exchanged in {slowest:.1f} us; data verified"
        )
    if links and (why := _heap.no_atomics()):
        yield (
            f"  no atomic operations on peers' memory: {why}. Kernels with signal_add take their "
            "reference; jflux's own need none"
        )


def _mesh() -> Mesh:
    return Mesh(np.array(jax.devices()[: _native.MAX_RANKS]), ("tp",))


def _program(spec: OpSpec, mesh: Mesh) -> Any:
    """One call of an op over the mesh: of global x and w, or of [ranks, ...] of all ranks' x."""
    if spec.product is None:
        return jax.jit(
            jax.shard_map(
                lambda x: spec.on(x[0], axis_name="tp", **spec.ways[0])[None],
                mesh=mesh, in_specs=P("tp"), out_specs=P("tp"), check_vma=False,
            )
        )  # fmt: skip
    trial = Trial(spec)
    x_spec, w_spec, y_spec = trial.partition
    return jax.jit(
        jax.shard_map(
            trial.function(precision="highest"), mesh=mesh, in_specs=(x_spec, w_spec),
            out_specs=y_spec, check_vma=False,
        )
    )  # fmt: skip


def _try(spec: OpSpec, dtype: np.dtype) -> str:
    """Runs an op on all devices, small enough for any: "ok", or what went wrong."""
    mesh, rng = _mesh(), np.random.default_rng(0)
    ranks = mesh.size
    f = _program(spec, mesh)
    if spec.product is None:
        x = rng.standard_normal((ranks, ranks, ranks, 1000)).astype(dtype)
        collective = spec.communication(3, **spec.ways[0])
        want, size = (np.stack(collective.exact(list(a))) for a in _exact(x))
        terms, y = ranks if collective.sums() else 1, f(x)
    else:
        x = rng.standard_normal((8 * ranks, 16 * ranks)).astype(dtype)
        w = rng.standard_normal((16 * ranks, 8 * ranks)).astype(dtype)
        want, size = (a @ b for a, b in zip(_exact(x), _exact(w), strict=True))
        terms, y = 16 * ranks, f(x, w)
    testing.assert_close(np.asarray(y), want, size, dtype, terms)
    return "ok"


def _exact(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """x and its magnitudes, in float64."""
    return x.astype(np.float64), np.abs(x.astype(np.float64))


def _plan(spec: OpSpec, mesh: Mesh, dtype: Any, size: int) -> Plan:
    """What a call does of so many rows of all ranks, with 8192 columns and k, or with so many bytes
    of each rank's x."""
    ranks = mesh.size
    if spec.product is None:
        elements = max(1, size // (ranks * jnp.dtype(dtype).itemsize))
        shapes: list[tuple[tuple[int, ...], P]] = [((ranks, ranks, elements), P("tp"))]
    else:
        x_spec, w_spec, _ = Trial(spec).partition
        shapes = [((size, 8192), x_spec), ((8192, 8192), w_spec)]
    operands = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec_))
        for shape, spec_ in shapes
    ]
    with _config.override(always=False):
        (call, *_) = explain.explain(_program(spec, mesh), *operands)
    return call.plan


def _path(spec: OpSpec, mesh: Mesh, dtype: Any) -> str:
    """ "fused", and for which sizes, where it is not for others; or why it never is."""
    sizes = [mesh.size << i for i in range(17)] if spec.product else [1 << i for i in range(10, 28)]
    unit = "rows" if spec.product else "KiB"
    scale = 1 if spec.product else 1024
    plans = [(size, _plan(spec, mesh, dtype, size)) for size in sizes]
    runs = []
    for fused, group in itertools.groupby(plans, lambda one: one[1].path == Path.FUSED):
        those = [size for size, _ in group]
        if fused:
            first, last = those[0] // scale, those[-1] // scale
            runs.append("" if len(those) == len(sizes) else f" for {first} to {last} {unit}")
    if runs:
        return f"fused{' and'.join(runs)}"
    path, reason = plans[-1][1].path, plans[-1][1].reason
    return f"{path} ({reason})"


def _ops() -> Iterator[str]:
    mesh = _mesh()
    if mesh.size > 1:
        yield "ops on these devices:"
    several_processes = jax.process_count() > 1
    for spec in (*products(), *collectives()):
        for dtype in (jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64):
            if dtype == jnp.float64 and not jax.config.read("jax_enable_x64"):
                continue
            try:
                path = _path(spec, mesh, dtype) if mesh.size > 1 else "reference"
                # Other processes would have to take part in a trial.
                verdict = "not tried" if several_processes else _try(spec, np.dtype(dtype))
            except Exception as error:  # whatever it is, the user should read it here
                path, verdict = "", f"FAILED: {error}"
            if mesh.size > 1 or verdict != "ok":
                yield f"  {spec.name:22} {np.dtype(dtype).name:9} {path}: {verdict}"
    if mesh.size == 1:
        yield "ops: one device has nobody to talk to, so all ops were tried as their lax references"


#: x's types of products of 8 bits, and which of `trials.SCALES` operands have.
_EIGHT_BITS = [
    (jnp.float8_e4m3fn, "row"), (jnp.float8_e4m3fn, "block"), (jnp.float8_e5m2, "row"),
    (jnp.int8, "row"),
]  # fmt: skip


def _try_scaled(trial: Trial, mesh: Mesh, dtype: Any) -> str:
    """Runs a product of 8 bits with scales: "ok", or what went wrong."""
    x_spec, w_spec, y_spec = trial.partition
    m, n, k = 16 * mesh.size, 128 * mesh.size, 256 * mesh.size

    def run(x: jax.Array, w: jax.Array) -> Any:
        xq, wq = trial.quantize(x, w, dtype=dtype)
        return trial.function()(xq, wq), xq.dequantize(), wq.dequantize()

    f = jax.shard_map(
        run, mesh=mesh, in_specs=(x_spec, w_spec), out_specs=(y_spec, x_spec, w_spec),
        check_vma=False,
    )  # fmt: skip
    rng = np.random.default_rng(0)

    def drawn(rows: int) -> np.ndarray:
        """[rows, k]; scales of other rows, or of another 128 of k, are far off."""
        of_blocks = np.repeat(rng.integers(-3, 4, k // 128), 128)
        sizes = np.exp2(rng.integers(-3, 4, (rows, 1)) + of_blocks)
        return (rng.standard_normal((rows, k)) * sizes).astype(np.float32)

    y, *wide = map(np.asarray, jax.jit(f)(drawn(m), drawn(n)))
    want, size = (a @ b.T for a, b in zip(*map(_exact, wide), strict=True))
    testing.assert_close(y, want, size, y.dtype, k)
    return "ok"


@contextlib.contextmanager
def _unlogged() -> Iterator[None]:
    """Inside, nothing is logged: the report says it."""
    logger = logging.getLogger("jflux")
    logger.disabled, before = True, logger.disabled
    try:
        yield
    finally:
        logger.disabled = before


def _of_format(dtype: Any, scales: str) -> Iterator[str]:
    """Of each product that has a kernel for these operands, which one it is, and how it fares; if
    none has, why the first has none, and how its reference fares."""
    trials = []
    for name, spec in tuner.tuned_ops().items():
        mesh = tuner.mesh_of(name, _mesh())
        if mesh.size > 1 or name == matmul.OP:
            trial = tuner.trial_of(spec, "tp", dtype, scales, transpose_rhs=True)
            size = 512 * mesh.size
            with _unlogged():
                plan = tuner.plan_of(trial, size, size, size, mesh, dtype)
            trials.append((trial, mesh, plan))
    kernels = [one for one in trials if one[2].path == Path.FUSED]
    for trial, mesh, plan in kernels or trials[:1]:
        what = f"kernel of {trial.spec.name}" if kernels else f"no kernel ({plan.reason})"
        # Other processes would have to take part in a trial.
        several_processes = jax.process_count() > 1
        try:
            verdict = "not tried" if several_processes else _try_scaled(trial, mesh, dtype)
        except Exception as error:  # the other kernels are tried all the same
            verdict = f"FAILED: {error}"
        yield f"{what}: {verdict}"


def _eight_bits() -> Iterator[str]:
    yield "products of 8 bits with scales:"
    for dtype, scales in _EIGHT_BITS:
        try:
            found = "; ".join(_of_format(dtype, scales))
        except Exception as error:  # whatever it is, the user should read it here
            found = f"FAILED: {error}"
        yield f"  {np.dtype(dtype).name:13} by {scales:6} {found}"


def report() -> Iterator[str]:
    """The lines that the command prints."""
    yield from _versions()
    yield from _devices()
    yield from _heap_lines()
    yield from _ops()
    yield from _eight_bits()
    if _heap.backend_in_use():
        taken = _heap.usage(_heap.default_platform())
        yield f"heap: the calls above took {taken / (1 << 20):.1f} MiB per device"


def bug_report(settings: Sequence[str], log: pathlib.Path | None = None) -> Iterator[str]:
    """The lines of a text to paste: what :func:`report` says, settings, and what the program said
    that wrote `log`. No name of a host, a user or a folder is among them."""
    yield "```text"
    for line in itertools.chain(report(), ["settings:"], (f"  {line}" for line in settings)):
        yield bug_reports.scrub(line)
    yield "last fault:"
    if log is None:
        yield "  (give the program's output with --log FILE, or paste the error here)"
    else:
        found = bug_reports.last_fault(log.read_text(errors="replace"))
        yield from (f"  {line}" for line in found or ["the program's output does not name jflux"])
    yield "```"


def main(argv: list[str] | None = None) -> int:
    """Prints the report; 1 if an op failed, else 0. Without GPUs it makes eight devices of the
    CPU, unless XLA_FLAGS say how many."""
    parser = argparse.ArgumentParser(
        prog="python -m jflux.doctor",
        description="What jflux finds on this machine, and whether its ops work.",
    )
    parser.add_argument(
        "--report", action="store_true",
        help="a text to paste into a bug report, without names of hosts, users or folders",
    )  # fmt: skip
    parser.add_argument(
        "--unchecked", action="store_true",
        help="also kernels that have not been checked on GPUs of this kind "
        "(jflux.config.unchecked_kernels)",
    )  # fmt: skip
    parser.add_argument("--log", type=pathlib.Path, help="what the program printed that failed")
    args = parser.parse_args(argv)
    if args.log is not None and not args.log.is_file():
        parser.error(f"--log {args.log} is no file")
    virtual_devices.ask_for_devices()
    whole = args.report or args.log is not None
    lines = bug_report(bug_reports.settings(), args.log) if whole else report()
    # Tiny operands would take lax.
    jflux.config.update(always=True, unchecked_kernels=args.unchecked)
    failed = False
    for line in lines:
        print(line, flush=True)
        failed |= "FAILED" in line
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
