"""The symmetric heap of this process: the only global state.

Settings and lifetime are here; how processes meet in _rendezvous, where workspaces are in
_agreement, what differs between platforms in _backends.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from .._native import lib
from . import _backends, _rendezvous
from ._rendezvous import claim as claim

MiB = 1 << 20
_DEFAULT_HEAP_BYTES = {"cpu": 512 * MiB, "cuda": 2048 * MiB}


@dataclasses.dataclass(frozen=True)
class Settings:
    """What :func:`init` was given.

    Attributes:
      heap_bytes: per device, in bytes; None is 512 MiB on the CPU (untouched pages cost nothing)
        and 2 GiB on a GPU.
      deadline_seconds: how long a rank waits for its peers before the call ends in an error.
      node: names of this process's nodes, beside what tells hosts apart.
    """

    heap_bytes: int | None = None
    deadline_seconds: float = 120.0
    node: str | tuple[str, ...] | None = None


_lock = threading.RLock()
_settings = Settings()
_generation = 0  # of the names under which processes meet
# By name. They outlive a heap: see _backends.CudaIpc.
_BACKENDS: dict[str, _backends.Backend] = {
    backend.name: backend
    for backend in (_backends.Cpu(), _backends.CudaPeer(), _backends.CudaIpc(claim))
}
_ready: dict[str, _backends.Backend] = {}  # by platform: the heaps that exist


def init(
    *,
    heap_bytes: int | None = None,
    deadline_seconds: float = 120.0,
    node: str | Sequence[str] | None = None,
) -> None:
    """Creates the symmetric heap with these settings, on JAX's default platform (another one's is
    created by the first call that is lowered for it, with the same settings).

    Not needed: the first op creates it with the defaults. With several processes
    (``jax.distributed.initialize``), all of them must call it, with the same arguments, or none.

    Args:
      heap_bytes: bytes per device for workspaces and signals. A call that does not fit says how
        much it needs.
      deadline_seconds: how long a rank waits for its peers before the call ends in an error that
        names op, rank and peer.
      node: splits a host into nodes, to try out what runs on several: the name of this process's
        node, or one name for each of its devices. By default a host is a node.

    Raises:
      ValueError: for a size or a deadline that is not positive, or if processes ask for different
        sizes.
      RuntimeError: if the heap exists already with other settings (call :func:`shutdown` first),
        cannot be allocated, if a GPU cannot reach another one or the link between them gives wrong
        data, or if another process does not come.
    """
    global _settings
    if heap_bytes is not None and heap_bytes <= 0:
        raise ValueError(f"{heap_bytes=} must be positive")
    if not deadline_seconds > 0:
        raise ValueError(f"{deadline_seconds=} must be positive")
    names = node if node is None or isinstance(node, str) else tuple(node)
    wanted = Settings(heap_bytes, deadline_seconds, names)
    with _lock:
        if _ready and wanted != _settings:
            raise RuntimeError(
                f"the symmetric heap exists with {_settings}; call jflux.shutdown() before "
                f"jflux.init() with {wanted}"
            )
        _settings = wanted
        existing_or_new()


def shutdown() -> None:
    """Frees the heap; what :func:`init` was given is forgotten. No jflux call may be running.

    Compiled functions that use the heap fail until it exists again, through :func:`init` or another
    call that is lowered. On GPUs JAX forgets what it has compiled, since XLA may have captured
    calls into CUDA graphs, with the old heap's addresses: jitted functions are lowered again, with
    a heap of the defaults unless :func:`init` comes first; what a program itself has compiled ahead
    of time must not be called again."""
    global _settings
    with _lock:
        if "cuda" in _ready:
            jax.clear_caches()
        for platform in _ready:
            lib.heap_shutdown(platform)
        _ready.clear()
        _why_no_cuda.cache_clear()
        _settings = Settings()


def existing_or_new() -> str | None:
    """The default platform, whose heap exists from now on; None where there are no kernels for
    it."""
    platform = _default_platform()
    if platform != "cpu" and not _cuda_usable():
        return None
    _ensure(platform)
    return platform


def heap_bytes(platform: str) -> int:
    """Bytes per device that the heap has, or will have, on this platform."""
    return _settings.heap_bytes or _DEFAULT_HEAP_BYTES[platform]


def deadline_seconds() -> float:
    return _settings.deadline_seconds


def backend_in_use() -> str | None:
    """ "cpu", "cuda_peer" or "cuda_ipc", or None before the heap exists. With heaps on both
    platforms it is the GPUs'."""
    backend = _ready.get("cuda") or _ready.get("cpu")
    return None if backend is None else backend.name


def node_of(platform: str) -> Mapping[int, int]:
    """The node of each device of the job, by global device ids. Devices of one node map each
    other's memory; nodes are numbered from 0, by their first device."""
    _ensure(platform)
    devices = sorted(jax.devices(platform), key=lambda d: d.id)
    names = _settings.node
    if names is None or isinstance(names, str):
        return {d.id: 0 for d in devices}
    numbers: dict[str, int] = {}
    return {
        d.id: numbers.setdefault(name, len(numbers))
        for d, name in zip(devices, names, strict=True)
    }


def usage(platform: str) -> int:
    """Bytes of each device's heap that calls have taken so far."""
    return lib.heap_usage(platform)[1]


def links(platform: str) -> list[tuple[int, int, float, float, float]]:
    """What the probe found when the heap was made: (from, to, push GB/s, pull GB/s, microseconds
    for a signal and back), by global device ids. None before, and none on the CPU."""
    return lib.heap_links(platform)


def _default_platform() -> str:
    platform = jax.default_backend()
    return "cuda" if platform == "gpu" else platform


def _cuda_usable() -> bool:
    return _default_platform() == "cuda" and _why_no_cuda() is None


@functools.cache
def _why_no_cuda() -> str | None:
    if not lib.built_with_cuda():
        return "this build of jflux has no CUDA kernels (reinstall with JFLUX_CUDA=ON)"
    for device in jax.local_devices(backend="cuda"):
        capability = str(getattr(device, "compute_capability", "unknown"))
        if capability != "9.0":
            return f"{device.device_kind} has compute capability {capability}, kernels need 9.0"
    return None


def why_not_usable(platform: str, mesh: Mesh) -> str | None:
    """Why calls over this mesh cannot use the heap, or None."""
    if platform == "cuda" and mesh.devices.flat[0].platform in ("gpu", "cuda"):
        return _why_no_cuda()
    return None


def reserve(platform: str, groups: np.ndarray, label: str, workspace_bytes: int) -> None:
    """Makes sure that the heap exists, and on GPUs that it has a workspace of this size for calls
    of these groups. On the CPU a call finds room when it runs.

    Args:
      groups: global device ids, [number of groups, ranks].
      label: names the call in an error: "op" or "custom_call(name)".
      workspace_bytes: as the call's plan says.

    Raises:
      ValueError: if the heap has no room.
    """
    with _lock:
        _ensure(platform)
        backend = _ready[platform]
        if not backend.reserve(groups, workspace_bytes):
            taken, has = usage(platform), heap_bytes(platform)
            raise ValueError(
                f"jflux.{label}: the call needs {workspace_bytes} bytes of the symmetric heap "
                f"beside the {taken} that other calls hold, and it has {has}; call "
                f"jflux.init(heap_bytes={max(2 * has, taken + workspace_bytes)}) first"
            )


def _ensure(platform: str) -> None:
    with _lock:
        if platform not in _ready:
            _ready[platform] = _create(platform)


def _create(platform: str) -> _backends.Backend:
    members = _backends.Members.of(platform)
    backend = _BACKENDS[_backends.name_for(platform, members)]
    _meet(platform, members.processes)
    name = f"{platform}_heap/{_generation}"
    _backends.create(
        backend,
        members,
        heap_bytes(platform),
        _settings.deadline_seconds,
        lambda handle: _exchange(name, handle, members.processes),
    )
    return backend


def _meet(platform: str, processes: tuple[int, ...]) -> None:
    """Before a heap is made: under new names, and for the same size. What has room decides which
    program a process lowers, and processes with different programs would wait for each other."""
    global _generation
    _generation += 1
    if len(processes) == 1:
        return
    sizes = _exchange(f"{platform}_heap_bytes/{_generation}", f"{heap_bytes(platform)}", processes)
    if len(set(sizes.values())) > 1:
        asked = ", ".join(f"process {p}: {size}" for p, size in sorted(sizes.items()))
        raise ValueError(
            f"processes ask for symmetric heaps of different sizes, in bytes ({asked}); call "
            "jflux.init with the same heap_bytes in all of them"
        )


def _exchange(name: str, value: str, processes: tuple[int, ...]) -> dict[int, str]:
    return _rendezvous.exchange(name, value, processes, _settings.deadline_seconds)


_agreed_links: dict[int, float] = {}  # by generation


def link_gbps() -> float:
    """What the slowest link between two GPUs carries, in 1e9 bytes a second, as the probe found it
    when the heap was made; 0 if there is none. All processes go by what the first to ask has found:
    configurations depend on it, and ranks must take the same."""
    _ensure("cuda")
    if _generation not in _agreed_links:
        mine = min((push for _, _, push, _, _ in links("cuda")), default=0.0)
        several = jax.process_count() > 1
        agreed = claim(f"link_gbps/{_generation}", f"{mine}") if several else mine
        _agreed_links[_generation] = float(agreed)
    return _agreed_links[_generation]
