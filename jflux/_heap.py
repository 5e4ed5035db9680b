"""The symmetric heap of this process: the only global state."""

from __future__ import annotations

import atexit
import dataclasses
import threading
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
    deadline_seconds: float = 60.0


_lock = threading.RLock()
_settings = Settings()
_ready: set[str] = set()
_generation = 0  # of the names under which processes meet


def init(*, heap_bytes: int | None = None, deadline_seconds: float = 60.0) -> None:
    """Creates the symmetric heap with these settings, for every platform that has devices.

    Not needed: the first op creates it with the defaults. With several processes
    (``jax.distributed.initialize``), all of them must call it, or none.

    Args:
      heap_bytes: bytes per device for workspaces and signals. A call that does not fit says how
        much it needs.
      deadline_seconds: how long a rank waits for its peers before the call ends in an error that
        names op, rank and peer.

    Raises:
      ValueError: for a size or a deadline that is not positive.
      RuntimeError: if the heap exists already with other settings; call :func:`shutdown` first.
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
        platform = {"gpu": "cuda"}.get(jax.default_backend(), jax.default_backend())
        if platform in _DEFAULT_HEAP_BYTES:
            _ensure(platform)


def shutdown() -> None:
    """Frees the heap. No jflux call may be running; compiled functions that use it fail until
    the next :func:`init`."""
    from . import _jflux

    global _settings
    with _lock:
        if "cpu" in _ready:
            _jflux.cpu_heap_shutdown()
        _ready.clear()
        _settings = Settings()


def poison() -> None:
    """See :func:`jflux.testing.poison_workspaces`."""
    from . import _jflux

    with _lock:
        if "cpu" in _ready:
            _jflux.cpu_heap_poison()


def set_test_hooks(skip_waits: bool, max_delay_us: int) -> None:
    """See :func:`jflux.testing.planted_faults`."""
    from . import _jflux

    with _lock:
        if "cpu" in _ready:
            _jflux.cpu_heap_test_hooks(skip_waits, max_delay_us)


def heap_bytes(platform: str) -> int:
    """Bytes per device that the heap has, or will have, on this platform."""
    return _settings.heap_bytes or _DEFAULT_HEAP_BYTES[platform]


def deadline_seconds() -> float:
    return _settings.deadline_seconds


def why_not_usable(platform: str, mesh: Mesh) -> str | None:
    """Why calls over this mesh cannot use the heap, or None."""
    if platform == "cuda":
        return "this build has no CUDA kernels"
    return None


def reserve(
    platform: str,
    op: str,
    mesh: Mesh,
    groups: np.ndarray,
    avals_in: Any,
    avals_out: Any,
    attributes: dict[str, Any],
) -> None:
    """Makes sure that the heap exists and has room for this call."""
    if mesh.devices.flat[0].platform not in ("cpu", "gpu", "cuda"):
        return  # lowered here for devices elsewhere
    _ensure(platform)


def _ensure(platform: str) -> None:
    with _lock:
        if platform in _ready:
            return
        if platform == "cpu":
            _create_cpu_heap()
        _ready.add(platform)


def _create_cpu_heap() -> None:
    from . import _jflux

    global _generation
    devices = jax.devices("cpu")
    processes = sorted({d.process_index for d in devices})
    mine = jax.process_index() if len(processes) > 1 else processes[0]
    of_process = {p: [d.id for d in devices if d.process_index == p] for p in processes}
    handle = _jflux.cpu_heap_init(
        of_process[mine], heap_bytes("cpu"), _settings.deadline_seconds, mine == processes[0]
    )
    if len(processes) == 1:
        return
    _generation += 1
    for process, theirs in exchange(f"cpu_heap/{_generation}", handle, processes).items():
        if process != mine:
            _jflux.cpu_heap_attach(theirs, of_process[process], process == processes[0])


def exchange(name: str, value: str, processes: list[int]) -> dict[int, str]:
    """Publishes `value` under `name` and returns everybody's, through JAX's own key-value store."""
    from jax._src import distributed  # there is no public name for the store

    client = distributed.global_state.client
    if client is None:
        raise RuntimeError(
            "several processes, but jax.distributed.initialize() was not called: jflux's "
            "processes meet through its key-value store"
        )
    timeout_ms = int(max(_settings.deadline_seconds, 60.0) * 1000)
    client.key_value_set(f"jflux/{name}/{jax.process_index()}", value)
    return {p: client.blocking_key_value_get(f"jflux/{name}/{p}", timeout_ms) for p in processes}


atexit.register(shutdown)
