"""The symmetric heap of this process: the only global state."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

MiB = 1 << 20
_DEFAULT_HEAP_BYTES = {"cpu": 512 * MiB, "cuda": 2048 * MiB}


@dataclasses.dataclass(frozen=True)
class Settings:
    """What :func:`init` was given.

    Attributes:
      heap_bytes: per device, in bytes; None is 512 MiB on the CPU (untouched pages cost nothing)
        and 2 GiB on a GPU.
      deadline_seconds: how long a rank waits for its peers before the call ends in an error.
    """

    heap_bytes: int | None = None
    deadline_seconds: float = 120.0


_lock = threading.RLock()
_settings = Settings()
_ready: set[str] = set()
_generation = 0  # of the names under which processes meet


def init(*, heap_bytes: int | None = None, deadline_seconds: float = 120.0) -> None:
    """Creates the symmetric heap with these settings, on JAX's default platform (another one's is
    created by the first call that is lowered for it, with the same settings).

    Not needed: the first op creates it with the defaults. With several processes
    (``jax.distributed.initialize``), all of them must call it, with the same arguments, or none.

    Args:
      heap_bytes: bytes per device for workspaces and signals. A call that does not fit says how
        much it needs.
      deadline_seconds: how long a rank waits for its peers before the call ends in an error that
        names op, rank and peer.

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
    wanted = Settings(heap_bytes, deadline_seconds)
    with _lock:
        if _ready and wanted != _settings:
            raise RuntimeError(
                f"the symmetric heap exists with {_settings}; call jflux.shutdown() before "
                f"jflux.init() with {wanted}"
            )
        _settings = wanted
        platform = _default_platform()
        if platform == "cpu" or _cuda_usable():
            _ensure(platform)


def shutdown() -> None:
    """Frees the heap; what :func:`init` was given is forgotten. No jflux call may be running.

    Compiled functions that use the heap fail until it exists again, through :func:`init` or another
    call that is lowered. On GPUs JAX forgets what it has compiled, since XLA may have captured
    calls into CUDA graphs, with the old heap's addresses: jitted functions are lowered again, with
    a heap of the defaults unless :func:`init` comes first; what a program itself has compiled ahead
    of time must not be called again."""
    from . import _jflux

    global _settings
    with _lock:
        if "cuda" in _ready:
            jax.clear_caches()
        if "cpu" in _ready:
            _jflux.cpu_heap_shutdown()
        if "cuda" in _ready:
            _jflux.cuda_heap_shutdown()
        _ready.clear()
        _why_no_cuda.cache_clear()
        _settings = Settings()


def poison() -> None:
    """See :func:`jflux.testing.poison_workspaces`."""
    from . import _jflux

    with _lock:
        platform = _default_platform()
        if platform == "cpu":
            _ensure(platform)
            _jflux.cpu_heap_poison()
        elif _cuda_usable():
            _ensure(platform)
            _jflux.cuda_heap_poison()


def set_cuda_epochs(epoch: int) -> None:
    """As if each workspace on this process's GPUs had made so many calls. Only for tests, between
    calls: all processes do it after one barrier and before another."""
    from . import _jflux

    with _lock:
        _ensure("cuda")
        _jflux.cuda_heap_set_epochs(epoch)


def set_test_hooks(skip_waits: bool, max_delay_us: int) -> None:
    """See :func:`jflux.testing.planted_faults`."""
    from . import _jflux

    with _lock:
        platform = _default_platform()
        if platform == "cpu":
            _ensure(platform)
            _jflux.cpu_heap_test_hooks(skip_waits, max_delay_us)
        elif _cuda_usable():
            _ensure(platform)
            _jflux.cuda_heap_test_hooks(skip_waits, max_delay_us)


def heap_bytes(platform: str) -> int:
    """Bytes per device that the heap has, or will have, on this platform."""
    return _settings.heap_bytes or _DEFAULT_HEAP_BYTES[platform]


def deadline_seconds() -> float:
    return _settings.deadline_seconds


def backend_in_use() -> str | None:
    """ "cpu", "peer" or "ipc", or None before the heap exists."""
    if "cuda" in _ready:
        return "ipc" if jax.process_count() > 1 else "peer"
    return "cpu" if "cpu" in _ready else None


def usage(platform: str) -> int:
    """Bytes of each device's heap that calls have taken so far."""
    from . import _jflux

    if platform == "cuda":
        return _jflux.cuda_heap_taken()
    return _jflux.cpu_heap_usage()[1]


def _default_platform() -> str:
    platform = jax.default_backend()
    return "cuda" if platform == "gpu" else platform


def _cuda_usable() -> bool:
    return _default_platform() == "cuda" and _why_no_cuda() is None


@functools.cache
def _why_no_cuda() -> str | None:
    from . import _jflux

    if not _jflux.built_with_cuda():
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


@dataclasses.dataclass(frozen=True)
class Product:
    """What the size of a call's workspace depends on: per rank, as cc/core/rows.h names it."""

    op: str
    world: int
    outer: int
    inner: int
    k: int
    n: int
    dtype: np.dtype
    out_dtype: np.dtype
    transpose_rhs: bool
    choice: tuple[int, ...]  # of the GPU kernels; nothing on CPUs

    def workspace_bytes(self) -> int:
        """Of its workspace on GPUs."""
        from . import _jflux

        total = _jflux.cuda_workspace_bytes(
            self.op, self.world, self.outer, self.inner, self.k, self.n,
            dtype_number(self.dtype), dtype_number(self.out_dtype), self.transpose_rhs, self.choice,
        )  # fmt: skip
        if total < 0:
            raise ValueError(
                f"jflux.{self.op}: no kernel takes the configuration {self.choice}, from "
                "a tuning table (see jflux.tune)"
            )
        return total


def reserve(platform: str, groups: np.ndarray, op: str, workspace_bytes: Callable[[], int]) -> None:
    """Makes sure that the heap exists and has room for a call of `op`, whose workspace on GPUs takes
    so much.

    Raises:
      ValueError: if it has not.
    """
    _ensure(platform)
    if platform == "cuda":
        with _lock:
            _reserve_cuda_workspace(groups, op, workspace_bytes())


def _ensure(platform: str) -> None:
    with _lock:
        if platform in _ready:
            return
        if platform == "cpu":
            _create_cpu_heap()
        else:
            _create_cuda_heap()
        _ready.add(platform)


_agreed_links: dict[int, float] = {}  # by generation


def link_gbps() -> float:
    """What the slowest link between two GPUs carries, in 1e9 bytes a second, as the probe found it
    when the heap was made; 0 if there is none. All processes go by what the first to ask has found:
    configurations depend on it, and ranks must take the same."""
    from . import _jflux

    _ensure("cuda")
    if _generation not in _agreed_links:
        mine = min((push for _, _, push, _, _ in _jflux.cuda_heap_links()), default=0.0)
        several = jax.process_count() > 1
        agreed = claim(f"link_gbps/{_generation}", f"{mine}") if several else mine
        _agreed_links[_generation] = float(agreed)
    return _agreed_links[_generation]


# The order of core/dtype.h.
_DTYPES = ("float16", "bfloat16", "float32", "float64")


def dtype_number(dtype: np.dtype) -> int:
    """As cc/core/dtype.h numbers them."""
    return _DTYPES.index(dtype.name)


# With several processes: the workspaces on GPUs that they have agreed on, in the order of their
# places in the heap; (groups and size) -> bytes. Kept over a shutdown, as is the agreement itself.
_agreed: dict[str, int] = {}
_agreed_groups: dict[str, list[int]] = {}  # of those entries that this process uses


def _reserve_cuda_workspace(groups: np.ndarray, op: str, total: int) -> None:
    """Makes room for the workspaces of this size of these groups."""
    from . import _jflux

    flat = groups.ravel().tolist()
    if jax.process_count() == 1:
        fits = _jflux.cuda_heap_find_workspace(flat, total)
    else:
        fits = _agree_on_workspace(flat, f"{groups.shape}", total)
    if not fits:
        taken, has = _jflux.cuda_heap_taken(), heap_bytes("cuda")
        raise ValueError(
            f"jflux.{op}: the call needs {total} bytes of the symmetric heap beside the "
            f"{taken} that other calls hold, and it has {has}; call "
            f"jflux.init(heap_bytes={max(2 * has, taken + total)}) first"
        )


def _agree_on_workspace(groups: list[int], shape: str, total: int) -> bool:
    """Finds the workspace's place, the same in every process: the sum of the sizes before it. Entry i
    of the list in the key-value store belongs to whoever writes it first."""
    digest = hashlib.sha256(repr((groups, shape)).encode()).hexdigest()[:32]
    key = f"{digest}/{total}"
    while key not in _agreed:
        entry = claim(f"cuda_workspace/{len(_agreed)}", key)
        _agreed[entry] = int(entry.rsplit("/", 1)[1])
    if key in _agreed_groups:
        return True
    _agreed_groups[key] = groups
    return _place_agreed_workspace(key)


def _place_agreed_workspace(key: str) -> bool:
    from . import _jflux

    place = _jflux.cuda_first_workspace()
    for entry, total in _agreed.items():
        if entry == key:
            break
        place += total
    if place + _agreed[key] > _jflux.cuda_first_workspace() + heap_bytes("cuda"):
        return False
    _jflux.cuda_heap_add_workspace(_agreed_groups[key], _agreed[key], place)
    return True


def _create_cuda_heap() -> None:
    from . import _jflux

    local = jax.local_devices(backend="cuda")
    devices = jax.devices("cuda")
    processes = sorted({d.process_index for d in devices})
    _meet("cuda", processes)
    _jflux.cuda_heap_init(
        [d.local_hardware_id for d in local],
        [d.id for d in local],
        heap_bytes("cuda"),
        _settings.deadline_seconds,
    )
    if len(processes) > 1:
        mine = ",".join(f"{d.id}={_jflux.cuda_heap_export(d.id)}" for d in local)
        for process, theirs in exchange(f"cuda_heap/{_generation}", mine, processes).items():
            if process != jax.process_index():
                for item in theirs.split(","):
                    device_id, handle = item.split("=")
                    _jflux.cuda_heap_attach(int(device_id), handle)
    _jflux.cuda_heap_probe()
    # Functions compiled before a shutdown find their workspaces again, as far as the heap goes.
    for key in _agreed_groups:
        _place_agreed_workspace(key)


def _create_cpu_heap() -> None:
    from . import _jflux

    devices = jax.devices("cpu")
    processes = sorted({d.process_index for d in devices})
    _meet("cpu", processes)
    mine = jax.process_index() if len(processes) > 1 else processes[0]
    of_process = {p: [d.id for d in devices if d.process_index == p] for p in processes}
    handle = _jflux.cpu_heap_init(
        of_process[mine], heap_bytes("cpu"), _settings.deadline_seconds, mine == processes[0]
    )
    if len(processes) == 1:
        return
    for process, theirs in exchange(f"cpu_heap/{_generation}", handle, processes).items():
        if process != mine:
            _jflux.cpu_heap_attach(theirs, of_process[process], process == processes[0])


def _meet(platform: str, processes: list[int]) -> None:
    """Before a heap is made: under new names, and for the same size. What has room decides which
    program a process lowers, and processes with different programs would wait for each other."""
    global _generation
    _generation += 1
    if len(processes) == 1:
        return
    sizes = exchange(f"{platform}_heap_bytes/{_generation}", f"{heap_bytes(platform)}", processes)
    if len(set(sizes.values())) > 1:
        asked = ", ".join(f"process {p}: {size}" for p, size in sorted(sizes.items()))
        raise ValueError(
            f"processes ask for symmetric heaps of different sizes, in bytes ({asked}); call "
            "jflux.init with the same heap_bytes in all of them"
        )


def exchange(name: str, value: str, processes: list[int]) -> dict[int, str]:
    """Publishes `value` under `name` and returns everybody's, through JAX's own key-value store."""
    client = _store()
    timeout_ms = int(max(_settings.deadline_seconds, 60.0) * 1000)
    client.key_value_set(f"jflux/{name}/{jax.process_index()}", value)
    theirs = {}
    for process in processes:
        try:
            theirs[process] = client.blocking_key_value_get(f"jflux/{name}/{process}", timeout_ms)
        except jax.errors.JaxRuntimeError as error:
            raise RuntimeError(
                f"process {process} did not come to make the symmetric heap within "
                f"{timeout_ms / 1000:g} s: every process must lower the call, or call "
                "jflux.init(); jflux.init(deadline_seconds=...) gives it longer"
            ) from error
    return theirs


def claim(name: str, value: str) -> str:
    """Writes `value` under `name` unless another process has; returns what is there."""
    client = _store()
    try:
        client.key_value_set(f"jflux/{name}", value)
    except jax.errors.JaxRuntimeError as error:
        if "ALREADY_EXISTS" not in str(error):
            raise
        return client.blocking_key_value_get(f"jflux/{name}", 60_000)
    return value


def _store() -> Any:
    from jax._src import distributed  # there is no public name for the store

    client = distributed.global_state.client
    if client is None:
        raise RuntimeError(
            "several processes, but jax.distributed.initialize() was not called: jflux's "
            "processes meet through its key-value store"
        )
    return client
