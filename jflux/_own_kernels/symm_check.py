"""``jflux.symm.check``: a kernel against its reference, where faults of a protocol show."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from .. import _config, _native, testing
from .._call import plans
from .._call.plans import Arrays
from .._ranks import meshes
from . import compiling
from .buffer_layout import Buffer, Workspace, data_bytes
from .symm_call import Params, _op, _primitive, compile_call

_POISON = 0xFF  # what testing.poison_workspaces fills data with
_HELLOS = 8  # words before signal 0


@dataclasses.dataclass(frozen=True)
class Report:
    """What :func:`jflux.symm.check` has done.

    Attributes:
      kernels: names of the kernels that ran; none where the reference did.
      compiled: names of those that did not run and were compiled, for an H100 if there is no GPU.
      calls: how many times the function was called, scans counted once a step.
      error: the largest difference, as a multiple of what is allowed.
      guarded_bytes: how many bytes outside of buffers were found as they were, over all calls.
    """

    kernels: tuple[str, ...]
    compiled: tuple[str, ...]
    calls: int
    error: float
    guarded_bytes: int

    def __str__(self) -> str:
        what = ", ".join(self.kernels) or "no kernel (the reference alone)"
        lines = [
            f"{what}: {self.calls} calls equal the reference; the largest difference is "
            f"{self.error:.2g} of what is allowed; {self.guarded_bytes} bytes outside of the "
            "buffers are as they were"
        ]
        if self.compiled:
            lines.append(f"compiled, and not run: {', '.join(self.compiled)}")
        return "\n".join(lines)


def check(
    f: Callable[..., Any],
    *args: Any,
    mesh: Mesh,
    times: int = 10,
    steps: int = 8,
    tolerance: float | None = None,
    max_delay_us: int = 2000,
    draw: Callable[[np.random.Generator, Any], Any] | None = None,
    seed: int = 0,
) -> Report:
    """Compares the kernels that a function calls with their references, once, and then `times`
    times each:

    - with workspaces full of NaN, so that a read of what nobody wrote shows, and a write outside
      of a workspace buffer too, or of a signal that the call does not have;
    - with ranks that begin each call up to `max_delay_us` apart;
    - in two calls in a row, which use both halves of the workspace;
    - in a ``lax.scan`` of `steps` calls, which XLA replays as a CUDA graph.

    All inputs are fresh each time. Where a kernel does not run (CPUs), the reference is compared
    with itself, and Triton, if it is installed, compiles the kernel: that checks names, types and
    shapes in it, and not its protocol. The report names such kernels apart. Writes outside
    are looked for if the function makes one call of :func:`jflux.symm.call`; those far outside of
    the workspace are not found.

    Args:
      f: (*args) -> arrays, called inside ``shard_map`` on every device of `mesh`.
      *args: a ``jax.ShapeDtypeStruct`` for each of one rank's arguments.
      mesh: of this process's devices.
      times: of each of the four.
      steps: of the scan.
      tolerance: the largest difference, relative to a result's largest magnitude. None: 8 units
        in the last place for floating point, 0 for others.
      max_delay_us: in microseconds.
      draw: (random generator, argument with the mesh's dimensions in front) -> its values. None:
        normal numbers, or integers from 0 to 99.
      seed: of the inputs.

    Raises:
      AssertionError: a result differs, or something was written outside of a buffer, which the
        message names.
      triton.CompilationError: a kernel does not compile.
    """
    check_ = _Check(f, args, mesh, tolerance, draw or _draw, np.random.default_rng(seed), steps)
    check_.compare("fresh workspaces")  # which exist from now on
    for _ in range(times):
        testing.poison_workspaces()
        check_.compare("poisoned workspaces")
        check_.look_outside()
        with testing.planted_faults(max_delay_us=max_delay_us):
            check_.compare("late ranks")
        check_.compare("the first of two calls")
        check_.compare("the second of two calls")
        check_.compare_scan()
    return check_.report()


def _draw(rng: np.random.Generator, struct: Any) -> Any:
    if jnp.issubdtype(struct.dtype, jnp.floating):
        return rng.standard_normal(struct.shape).astype(struct.dtype)
    if struct.dtype == np.bool_:
        return rng.integers(0, 2, struct.shape).astype(np.bool_)
    return rng.integers(0, 100, struct.shape).astype(struct.dtype)


class _Check:
    def __init__(
        self, f: Any, args: Any, mesh: Mesh, tolerance: Any, draw: Any, rng: Any, steps: int
    ) -> None:
        self.args, self.mesh, self.steps = args, mesh, steps
        self.tolerance, self.draw, self.rng = tolerance, draw, rng
        self.calls, self.error, self.guarded_bytes = 0, 0.0, 0

        def scanned(*stacked: Any) -> Any:
            return jax.lax.scan(lambda c, xs: (c, f(*xs)), 0, stacked)[1]

        self.kernel, self.reference = self._on_devices(f), self._on_devices(f)
        self.scan, self.reference_scan = self._on_devices(scanned), self._on_devices(scanned)
        shapes = [self._struct(a, ()) for a in args]
        found = list(_calls_in(jax.make_jaxpr(self.kernel)(*shapes).jaxpr))
        self.params = [params for _, params in found]
        self.ran = [p for p in self.params if self._is_fused(p)]
        self.compiled: list[Params] = []
        for arrays, params in found if compiling.why_no_triton() is None else []:
            if params not in self.ran:
                compile_call(arrays, params)
                self.compiled.append(params)

    def _on_devices(self, f: Any) -> Any:
        """f on each device: arrays have the mesh's dimensions in front."""
        axes = len(self.mesh.axis_names)
        spec = P(*self.mesh.axis_names)

        def body(*arrays: Any) -> Any:
            out = f(*(a.reshape(a.shape[axes:]) for a in arrays))
            return jax.tree.map(lambda y: y.reshape((1,) * axes + y.shape), out)

        return jax.jit(jax.shard_map(body, mesh=self.mesh, in_specs=spec, out_specs=spec))

    def _struct(self, a: Any, lead: tuple[int, ...]) -> Any:
        return jax.ShapeDtypeStruct((*self.mesh.devices.shape, *lead, *a.shape), a.dtype)

    def _is_fused(self, params: Params) -> bool:
        platform = self.mesh.devices.flat[0].platform
        machine = plans.machine_of("cuda" if platform == "gpu" else platform, self.mesh)
        return _config.config.fused and _op.plan([], params, machine).path == plans.Path.FUSED

    def _inputs(self, *lead: int) -> list[Any]:
        return [jnp.asarray(self.draw(self.rng, self._struct(a, lead))) for a in self.args]

    def compare(self, when: str) -> None:
        self.calls += 1
        self._compare(self.kernel, self.reference, self._inputs(), when)

    def compare_scan(self) -> None:
        self.calls += self.steps
        self._compare(self.scan, self.reference_scan, self._inputs(self.steps), "a scan")

    def _compare(self, kernel: Any, reference: Any, inputs: Any, when: str) -> None:
        got = [np.asarray(y) for y in jax.tree.leaves(jax.block_until_ready(kernel(*inputs)))]
        with _config.config(fused=False):
            want = [np.asarray(y) for y in jax.tree.leaves(reference(*inputs))]
        for i, (y, exact) in enumerate(zip(got, want, strict=True)):
            error = _error(y, exact, self.tolerance)
            self.error = max(self.error, error)
            if error <= 1:
                continue
            ranks = [
                at
                for at in np.ndindex(*self.mesh.devices.shape)
                if _error(y[at], exact[at], self.tolerance) > 1
            ]
            raise AssertionError(
                f"{self._names()}: with {when}, result {i} differs from the reference by "
                f"{error:.3g} times what is allowed, on the devices at {ranks} of the mesh "
                f"(call {self.calls})"
            )

    def look_outside(self) -> None:
        """After a call with poisoned workspaces."""
        if len(self.params) != 1 or not self.ran:
            return
        (params,) = self.ran
        table = meshes.group_table(self.mesh, params.axis_names)
        total = _native.lib.custom_workspace_bytes(data_bytes(params.buffers), params.num_signals)
        for group in table.tolist():
            for rank, device in enumerate(group):
                read = _reader(sorted(group), total, device)
                found, looked_at = written_outside(params.buffers, params.num_signals, total, read)
                self.guarded_bytes += looked_at
                if found:
                    raise AssertionError(f"{self._names()}: on rank {rank}, {found}")

    def _names(self) -> str:
        return "jflux.symm.check(" + ", ".join(sorted({p.name for p in self.params})) + ")"

    def report(self) -> Report:
        return Report(
            kernels=tuple(sorted({p.name for p in self.ran})),
            compiled=tuple(sorted({p.name for p in self.compiled})),
            calls=self.calls,
            error=self.error,
            guarded_bytes=self.guarded_bytes,
        )


def _error(got: np.ndarray, want: np.ndarray, tolerance: float | None) -> float:
    """The largest difference as a multiple of what is allowed; inf for a NaN that is not wanted."""
    if not jnp.issubdtype(want.dtype, jnp.inexact):
        return 0.0 if np.array_equal(got, want) else float("inf")
    wide = np.complex128 if jnp.issubdtype(want.dtype, jnp.complexfloating) else np.float64
    a, b = got.astype(wide), want.astype(wide)
    if tolerance is None:
        tolerance = 8 * float(jnp.finfo(want.dtype).eps)
    finite = np.isfinite(b)
    if not np.array_equal(a[~finite], b[~finite], equal_nan=True):
        return float("inf")
    allowed = tolerance * np.max(np.abs(b[finite]), initial=0.0)
    worst = np.max(np.nan_to_num(np.abs(a[finite] - b[finite]), nan=np.inf), initial=0.0)
    return float(worst / allowed) if allowed > 0 else (0.0 if worst == 0 else float("inf"))


def _calls_in(jaxpr: Any) -> Iterator[tuple[Arrays, Params]]:
    """The types of operands, and the rest, of each call."""
    for equation in jaxpr.eqns:
        if equation.primitive is _primitive:
            yield [operand.aval for operand in equation.invars], equation.params["params"]
        for value in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda v: hasattr(v, "eqns")
        ):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from _calls_in(inner)


def _reader(devices: list[int], total: int, device: int) -> Callable[[int, int], np.ndarray]:
    def read(offset: int, count: int) -> np.ndarray:
        data = _native.lib.heap_read("cuda", devices, total, device, offset, count)
        return np.frombuffer(data, np.uint8)

    return read


def written_outside(
    buffers: tuple[Buffer, ...],
    num_signals: int,
    total: int,
    read: Callable[[int, int], np.ndarray],
) -> tuple[str, int]:
    """What the last call has written outside of its buffers and signals, in words, or ""; and how
    many bytes were looked at.

    Args:
      buffers, num_signals: of the call, before which the workspace's data was poisoned.
      total: bytes of the workspace.
      read: (offset, bytes) -> uint8, of one rank's copy.
    """
    workspace = Workspace.of_total(total)
    epoch = int(read(0, 8).view(np.uint64)[0]) >> 24
    words = read(workspace.signal_offset(epoch), workspace.signal_bytes).view(np.uint64)
    beyond = words[_HELLOS + num_signals :]
    strange = np.flatnonzero(beyond >> np.uint64(24) == epoch)
    if strange.size:
        index = num_signals + int(strange[0])
        return f"signal {index} was set, of {num_signals} that the call has", 0
    data = read(workspace.data_offset(epoch), workspace.half_bytes)
    ends = [0, *(b.end for b in buffers)]
    starts = [*(b.offset for b in buffers), workspace.half_bytes]
    looked_at = 0
    for i, (start, end) in enumerate(zip(ends, starts, strict=True)):
        touched = np.flatnonzero(data[start:end] != _POISON)
        looked_at += end - start
        if not touched.size:
            continue
        first, last = int(touched[0]), int(touched[-1])
        if i > 0 and (i == len(buffers) or first < end - start - last):
            where = f"{first} bytes after the end of {buffers[i - 1].name!r}"
        elif i < len(buffers):
            where = f"{end - start - last} bytes before {buffers[i].name!r}"
        else:
            where = "a workspace without buffers"
        return f"{touched.size} bytes were written outside of a buffer, {where}", looked_at
    return "", looked_at
