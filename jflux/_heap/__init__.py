"""The symmetric heap of this process: the only global state.

Settings and lifetime are here. _making makes a heap, _nodes says which calls can use it,
_workspaces reserves memory, _agreement has the rules by which processes agree on it, _rendezvous is
how they meet.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import itertools
import logging
import os
import threading
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from .. import _config, _version
from .._call import ffi_targets, gpu_code, selftest_record
from .._native import lib
from .._ranks import meshes
from . import _fork, _making, _nodes, _nvshmem, _rendezvous, _report, _workspaces
from ._agreement import BLOCK, Request
from ._nodes import Facts, Job
from ._rendezvous import claim as claim
from ._report import HeapReport

MiB = 1 << 20

#: What a heap has where nobody says how much: on the CPU at least, in an exported program.
_LEAST_CPU_BYTES, _USUAL_CUDA_BYTES = 512 * MiB, 2048 * MiB


@dataclasses.dataclass(frozen=True)
class Settings:
    """What :func:`init` was given."""

    heap_bytes: int | None = None
    deadline_seconds: float = 1800.0
    warn_seconds: float = 120.0
    node: str | tuple[str, ...] | None = None
    backend: str | None = None

    @property
    def patience(self) -> _rendezvous.Patience:
        return _rendezvous.Patience.of(self.warn_seconds, self.deadline_seconds)

    def beside(self, other: Settings) -> str:
        """The settings in which this differs from another, as arguments of :func:`init`."""
        fields = [field.name for field in dataclasses.fields(self)]
        different = [name for name in fields if getattr(self, name) != getattr(other, name)]
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in different)


_lock = threading.RLock()
_settings = Settings()
_attempts: dict[str, int] = {}  # by platform: that of its job
_jobs: dict[str, Job] = {}  # by platform: also where no heap could be made
_reserved: dict[str, _workspaces.Workspaces] = {}  # by platform, where workspaces are reserved
_calls = _report.Calls()


def init(
    *,
    heap_bytes: int | None = None,
    deadline_seconds: float = 1800.0,
    warn_seconds: float = 120.0,
    node: str | Sequence[str] | None = None,
    backend: str | None = None,
) -> None:
    """Creates the symmetric heap with these settings, on JAX's default platform (another one's is
    created by the first call that is lowered for it, with the same settings).

    Not needed: the first op creates it with the defaults. With several processes
    (``jax.distributed.initialize``), all of them must call it, with the same arguments, or none.

    If the heap cannot be made, a warning on the logger ``jflux`` says why, and calls run their
    `lax` reference. A GPU that cannot reach another one, a link that returns wrong data, and a
    process that does not come are such reasons. Calling it again tries again, unless other
    processes of the job have a heap: then :func:`shutdown` comes first, in all processes.

    Args:
      heap_bytes: the most that workspaces and signals may take of each device's memory, in bytes.
        Memory is taken when a call is lowered that needs it. A call for which there is no room is
        decomposed, or runs its reference. By default half of the GPU memory that is free when the
        heap is made; on the CPU half of the machine's memory. Processes that differ take the least.
      deadline_seconds: how long a rank waits for its peers before the call ends in an error that
        names op, rank and peer. On GPUs the process must be started again then.
      warn_seconds: how long a rank waits for its peers before it says so on stderr: for whom, since
        when, and what follows. No warning if this is not less than the deadline.
      node: splits a host into nodes, to try out what runs on several: the name of this process's
        node, or one name for each of its devices. By default a host is a node.
      backend: "nvshmem": GPU memory of NVSHMEM, which also reaches other nodes; for one process per
        GPU, with jflux's extra ``nvshmem``. All `heap_bytes` are then taken at once. Where it
        cannot be used a warning says why, and the heap is the usual one, which is the default:
        host memory on the CPU, and on GPUs CUDA's own.

    Raises:
      TypeError: for a size that is no int.
      ValueError: for a size or a time that is not positive, or as many names of nodes as there are
        no devices; for another `backend`.
      RuntimeError: if the heap exists already with other settings (call :func:`shutdown` first);
        with ``jflux.config.strict``, if it cannot be made, or not with `backend`; in a fork of a
        process that has one.
    """
    global _settings
    if heap_bytes is not None:
        if not isinstance(heap_bytes, int | np.integer):
            raise TypeError(f"{heap_bytes=} must be an int, such as 4 << 30")
        if heap_bytes <= 0:
            raise ValueError(f"{heap_bytes=} must be positive")
        heap_bytes = int(heap_bytes)  # NumPy's are no JSON
    for name, seconds in (("deadline_seconds", deadline_seconds), ("warn_seconds", warn_seconds)):
        if not 0 < seconds <= 1e9:  # in nanoseconds it must fit 64 bits
            raise ValueError(f"{name}={seconds} must be positive, and at most 1e9")
    if backend not in (None, _nvshmem.NAME):
        raise ValueError(f'{backend=} must be None or "{_nvshmem.NAME}"')
    names = node if node is None or isinstance(node, str) else tuple(node)
    wanted = Settings(heap_bytes, deadline_seconds, warn_seconds, names, backend)
    _fork.check()
    with _lock:
        platform = default_platform()
        if platform in ("cpu", "cuda"):
            _nodes.names_of(names, len(_making.Members.of(platform).devices))
        if wanted != _settings and any(map(_exists, _jobs)):
            raise RuntimeError(
                f"the symmetric heap exists with {_settings.beside(wanted)}; call jflux.shutdown() "
                f"before jflux.init() with {wanted.beside(_settings)}, or jflux.init() before the "
                "first op is lowered, which makes the heap"
            )
        _settings = wanted
        if platform in ("cpu", "cuda"):
            # Where other processes have a heap, they would not come to another attempt.
            if platform in _jobs and not _exists(platform) and not _jobs[platform].with_heap():
                del _jobs[platform]
            _ensure(platform, again=True)
            why, instead = _failure(platform), _jobs[platform].instead
            if why is not None and _config.config.strict:
                raise RuntimeError(f"the symmetric heap cannot be made: {why}")
            if instead and _config.config.strict:
                raise RuntimeError(f"the symmetric heap has no memory of NVSHMEM: {instead}")


def shutdown() -> None:
    """Frees the heap; what :func:`init` was given is forgotten. No jflux call may be running. With
    several processes, all of them must call it.

    Compiled functions that use the heap fail until it exists again, through :func:`init` or another
    call that is lowered. On GPUs JAX forgets what it has compiled, since XLA may have captured
    calls into CUDA graphs, with the old heap's addresses: jitted functions are lowered again, with
    a heap of the defaults unless :func:`init` comes first; what a program itself has compiled ahead
    of time must not be called again.

    Raises:
      RuntimeError: in a fork of the process that has it.
    """
    global _settings
    _fork.check()
    with _lock:
        if "cuda" in _jobs:
            jax.clear_caches()
        for platform, job in sorted(_jobs.items()):  # processes meet in this order
            if platform in _reserved:
                _reserved.pop(platform).stop(wait=True)
            if _exists(platform):
                me = _making.Members.of(platform).me
                node = _nodes.processes_of_nodes(job.facts.values())[me]
                name = _name(platform, _attempts[platform], f"left/{node[0]}")
                patience = dataclasses.replace(_settings.patience, give_up=_making.LEAVE_SECONDS)
                meet = functools.partial(_rendezvous.gather, name, "", node, patience)
                _making.leave(platform, meet)
        _jobs.clear()
        _calls.clear()
        _why_no_cuda.cache_clear()
        _settings = Settings()


@atexit.register
def _stop_threads() -> None:
    if _fork.is_fork():  # the threads are the parent's
        return
    for workspaces in _reserved.values():
        workspaces.stop(wait=False)


def existing_or_new() -> str | None:
    """The default platform, whose heap exists from now on; None where it cannot be made."""
    platform = default_platform()
    if platform not in ("cpu", "cuda"):
        return None
    _ensure(platform)
    return platform if _exists(platform) else None


def why_no_heap(platform: str) -> str | None:
    """Why this process has no heap on a platform, or None. Makes it."""
    _ensure(platform)
    return _failure(platform)


def heap_bytes(platform: str) -> int:
    """The most that workspaces may take of a device's memory, on this platform."""
    if platform in _jobs and not _jobs[platform].absent:
        return _jobs[platform].heap_bytes
    return _settings.heap_bytes or (_LEAST_CPU_BYTES if platform == "cpu" else _USUAL_CUDA_BYTES)


def deadline_seconds() -> float:
    return _settings.deadline_seconds


def backend_in_use() -> str | None:
    """ "cpu" or "cuda", or None before a heap exists. With heaps on both platforms it is "cuda"."""
    return next((platform for platform in ("cuda", "cpu") if _exists(platform)), None)


def why_no_nvshmem(mesh: Mesh, table: np.ndarray) -> str | None:
    """Why NVSHMEM does not connect these groups of ranks, or None. Makes the heap, if the mesh's
    devices belong to this program.

    Args:
      table: global device ids, [number of groups, ranks].
    """
    if not meshes.belongs_here(mesh) or _platform_of(mesh.devices.flat[0]) != "cuda":
        return "the program is for GPUs that are not here"
    job = _ensure("cuda")
    if job.backend != _nvshmem.NAME:
        return job.instead or job.absent or "jflux.init(backend=...) did not ask for it"
    return job.why_not(table)


def heap_report() -> HeapReport:
    """What the symmetric heap holds: an object that prints as a table.

    Returns:
      For each workspace its size in bytes, its devices (global ids) and the calls that use it, by
      op and operands of one rank. On the CPU a workspace is leased while a call runs.
    """
    with _lock:
        platform = backend_in_use()
        if platform is None:
            return HeapReport("", 0, 0, ())
        held = _reserved[platform].ledger.held if platform in _reserved else None
        rows = _calls.rows(platform, held)
        return HeapReport(platform, heap_bytes(platform), usage(platform), rows)


def node_of(platform: str) -> Mapping[int, int]:
    """The node of each device of the job, by global device ids. Devices of one node map each
    other's memory; nodes are numbered from 0, by their first device. Makes the heap."""
    return _ensure(platform).node


def usage(platform: str) -> int:
    """Bytes of each device's memory that calls have taken so far."""
    return lib.heap_usage(platform)[1]


def links(platform: str) -> list[tuple[int, int, float, float, float]]:
    """What the probe found when the heap was made: (from, to, push GB/s, pull GB/s, microseconds in
    which two devices exchange 1 KiB and a flag), by global device ids. None before, and none on
    the CPU."""
    return lib.heap_links(platform)


def link_gbps() -> float:
    """What the slowest link within a node carries, in 1e9 bytes a second, as the probe found it
    when the heap was made; 0 if there is none. The same in all processes: configurations depend on
    it."""
    return _ensure("cuda").link_gbps


def no_atomics() -> str:
    """Why GPUs have no atomic operations on their peers' memory; "" if they have: the same in all
    processes."""
    return _ensure("cuda").no_atomics


def sm_count() -> int:
    """Multiprocessors of the job's smallest GPU, the same in all processes; 0: it is not known."""
    return _ensure("cuda").sm_count


def kernel_arch() -> int:
    """Of the kernels' code that all GPUs of the job run (`gpu_code`)."""
    return _ensure("cuda").arch or gpu_code.HOPPER


def no_record() -> str:
    """Why records of jflux.selftest do not count for this job; "" if they do: the same in all
    processes."""
    return _ensure("cuda").no_record


def no_record_of_local_ops() -> str:
    """The same of ops of one rank, which need no heap. Processes of a job lower the same programs,
    and know each other's records from when they have made their heaps."""
    if jax.process_count() == 1:
        return selftest_record.here().why
    if (job := _jobs.get("cuda")) is None:
        return "in jobs of several processes a record counts after jflux.init()"
    return job.no_record


def why_not_usable(platform: str, mesh: Mesh, table: np.ndarray) -> str | None:
    """Why calls over these groups of ranks run no kernels, or None. Makes the heap, if the mesh's
    devices belong to this program.

    Args:
      table: global device ids, [number of groups, ranks].
    """
    device = mesh.devices.flat[0]
    if not meshes.belongs_here(mesh):  # a topology to compile for
        return _why_no_cuda() if platform == "cuda" else None
    if _platform_of(device) != platform:
        return f"it is lowered for {platform}, and the mesh's devices are {device.platform} devices"
    return _ensure(platform).why_not(table)


def reserve(
    platform: str,
    table: np.ndarray,
    label: str,
    operands: str,
    workspace_bytes: int,
    program: Any,
) -> str | None:
    """Makes sure that calls of these groups find a workspace of this size; why there is no room
    otherwise. On the CPU a call finds room when it runs.

    Args:
      table: global device ids, [number of groups, ranks].
      label: names the call: "op" or "custom_call(name)".
      operands: their types, in words.
      workspace_bytes: as the call's plan says.
      program: the module that has the call.
    """
    request = Request.of(table, workspace_bytes)
    _ensure(platform)
    why = None
    if (workspaces := _reserved.get(platform)) is not None:
        # Without the lock: it may wait for other processes.
        why = workspaces.reserve(request, program)
    elif workspace_bytes > heap_bytes(platform):
        why = (
            f"it takes {workspace_bytes} bytes of the symmetric heap, which has "
            f"{heap_bytes(platform)}; jflux.init(heap_bytes=...) gives it more"
        )
    if why is None:
        with _lock:
            _calls.note(platform, request.workspaces(), f"{label} {operands}")
    return why


# ---- Making it -----------------------------------------------------------------------------------


def default_platform() -> str:
    """JAX's, as jflux names it."""
    platform = jax.default_backend()
    return "cuda" if platform == "gpu" else platform


def _platform_of(device: jax.Device) -> str:
    return "cuda" if device.platform == "gpu" else device.platform


def _cuda_usable() -> bool:
    return default_platform() == "cuda" and _why_no_cuda() is None


@functools.cache
def _why_no_cuda() -> str | None:
    """Why this process's GPUs run no kernels."""
    if not lib.built_with_cuda():
        return "this build of jflux has no CUDA kernels (reinstall with JFLUX_CUDA=ON)"
    if flag := ffi_targets.concurrent_flag(os.environ.get("XLA_FLAGS", "")):
        return f"XLA_FLAGS has {flag}: two kernels that wait for peers could run at once on a GPU"
    try:
        gpu_code.arch_here()
    except RuntimeError as error:
        return str(error)
    return None


def _exists(platform: str) -> bool:
    return platform in _jobs and _failure(platform) is None


def _failure(platform: str) -> str | None:
    """Why this process has no heap."""
    job = _jobs[platform]
    return job.absent or job.outcomes[_making.Members.of(platform).me].failure or None


def _ensure(platform: str, *, again: bool = False) -> Job:
    """What is known of the platform's heaps; makes this process's part first.

    Args:
      again: takes part in no attempt that others have given up. Otherwise all processes stay
        without heaps, and lower the same programs.
    """
    _fork.check()  # before the lock, which another thread may have held at the fork
    with _lock:
        if platform not in _jobs:
            _jobs[platform] = _make(platform, _making.Members.of(platform), again=again)
            why = _failure(platform)
            if why is None:
                _fork.watch(platform)
            else:
                _config.say_once(
                    logging.WARNING,
                    f"jflux has no symmetric heap, and calls take their lax references: {why}",
                )
            if _jobs[platform].instead:
                _config.say_once(
                    logging.WARNING,
                    "jflux's symmetric heap has its usual memory, and not NVSHMEM's: "
                    + _jobs[platform].instead,
                )
        return _jobs[platform]


def _name(platform: str, attempt: int, step: str) -> str:
    return f"{platform}_heap/{attempt}/{step}"


def _make(platform: str, members: _making.Members, *, again: bool) -> Job:
    if len(members.processes) == 1:
        return _make_at(1, platform, members)
    while True:
        attempt = _come(platform, members.me, again=again)
        over = functools.partial(_rendezvous.key_value_set, _name(platform, attempt, "over"))
        try:
            job = _make_at(attempt, platform, members)
        except BaseException as error:
            with contextlib.suppress(Exception):
                over(f"process {members.me} stopped making the symmetric heap: {error!r}")
            lib.heap_shutdown(platform, True)  # others may have opened it
            raise
        if not job.absent or _rendezvous.look(_name(platform, attempt, "over")) is None:
            return job


def _come(platform: str, me: int, *, again: bool) -> int:
    """The attempt at which this process meets the others: the first one to which no process of its
    number has come. The store knows it, and this process may not: it may replace another one, or
    the store may be another one than at its last attempt."""
    for attempt in itertools.count(1):
        name = functools.partial(_name, platform, attempt)
        if not _rendezvous.key_value_set(name(f"came/{me}"), ""):
            # Whoever waits there for this process comes to the next attempt.
            _rendezvous.key_value_set(name("over"), f"process {me} has begun anew")
        elif _rendezvous.look(name("over")) is None and not (
            again and _rendezvous.look(name("failed")) is not None
        ):
            return attempt
    raise AssertionError


def _make_at(attempt: int, platform: str, members: _making.Members) -> Job:
    _attempts[platform] = attempt
    patience = _settings.patience
    over = _name(platform, attempt, "over")

    def gather(
        step: str, value: str, processes: Collection[int], seconds: float | None = None
    ) -> dict[int, str]:
        within = patience if seconds is None else dataclasses.replace(patience, give_up=seconds)
        return _rendezvous.gather(_name(platform, attempt, step), value, processes, within, over)

    facts = _facts(platform, members)
    times = _settings.deadline_seconds, _settings.warn_seconds
    job = _making.make(platform, members, facts, *times, gather)
    if job.absent:
        _rendezvous.key_value_set(_name(platform, attempt, "failed"), job.absent)
    elif platform == "cuda" and not job.outcomes[members.me].failure:
        if len(members.processes) == 1:
            _reserved[platform] = _workspaces.Alone(job.heap_bytes)
        else:
            process_of = job.with_heap()
            node = _nodes.processes_of_nodes(job.facts.values())[members.me]
            shared = _workspaces.Shared(
                job.heap_bytes,
                process_of=process_of,
                me=members.me,
                reached=set(process_of.values()) if job.backend == _nvshmem.NAME else node,
                gather=gather,
                claim=lambda name, value: claim(_name(platform, attempt, name), value),
                look=lambda name: _rendezvous.look(_name(platform, attempt, name)),
            )
            shared.start()
            _reserved[platform] = shared
    return job


def _facts(platform: str, members: _making.Members) -> Facts:
    """What this process says of itself."""
    why_no_cuda = _why_no_cuda() if platform == "cuda" else None
    backend = _settings.backend
    arch = gpu_code.arch_here() if platform == "cuda" and not why_no_cuda else 0
    record = selftest_record.here() if arch else selftest_record.Found()
    sizes = [getattr(d, "core_count", None) for d in jax.local_devices(backend=platform)]
    return Facts(
        process=members.me,
        host=_nodes.this_host(),
        devices=members.devices,
        nodes=_nodes.names_of(_settings.node, len(members.devices)),
        heap_bytes=_settings.heap_bytes or _usual_heap_bytes(platform, members),
        unusable=why_no_cuda or "",
        build=_version.__version__,
        sm_count=min((int(size) for size in sizes if size), default=0),
        arch=arch,
        checked=record.devices,
        no_record=record.why,
        backend=backend or "",
        no_nvshmem=_nvshmem.why_not_here(platform, len(members.devices), arch) if backend else "",
        arena=lib.nvshmem_arena_bytes() if backend else 0,
    )


def _usual_heap_bytes(platform: str, members: _making.Members) -> int:
    """Half of what there is, in whole blocks."""
    if platform == "cuda":
        free = lib.cuda_free_bytes(members.ordinals)  # 0: it cannot be asked
        least, half = BLOCK, free // 2 if free else _USUAL_CUDA_BYTES
    else:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        least, half = _LEAST_CPU_BYTES, memory // 2 // len(members.devices)
    return max(least, half // BLOCK * BLOCK)
