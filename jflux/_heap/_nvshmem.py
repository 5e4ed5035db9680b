"""NVSHMEM as the memory of the heap on GPUs: finding it, and starting it in all processes.

NVSHMEM reaches GPUs of other nodes, which CUDA IPC cannot. jflux links to it in a library of its
own (cc/nvshmem/plugin.h), loaded when a process asks for it, so jflux imports without it.

The start, by all processes of the job, in this order:

  facts     each says why it cannot use NVSHMEM, if it cannot. All give the same verdict on that
  id        the first process makes NVSHMEM's unique id. Everyone gets it from the store: no MPI
  start     each starts NVSHMEM on a thread: its start waits for all processes, and has no timeout.
            A process that waits longer than START_SECONDS gives up, and says so
  started   each says whether it could. If one could not, all take the usual heap

NVSHMEM's state is global to a process and is never ended: a later heap uses what is there.
"""

from __future__ import annotations

import importlib.util
import os
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from .._call import gpu_code
from .._native import lib
from ._nodes import Facts

NAME = "nvshmem"
#: In which NVSHMEM must have started in all processes: it takes a second or two.
START_SECONDS = 120.0
#: What NVSHMEM itself takes of its heap, beside the arena.
_OWN_BYTES = 256 << 20

#: ``gather(step, value, processes)`` -> the value of each process.
Gather = Callable[[str, str, Collection[int]], dict[int, str]]


def settings(arena_bytes: int) -> dict[str, str]:
    """NVSHMEM's settings that jflux needs, by the names of their environment variables."""
    return {
        # A heap of one piece by cudaMalloc, mapped by CUDA IPC as jflux's own: it is exactly as
        # large as the arena, and network cards can register it.
        "NVSHMEM_DISABLE_CUDA_VMM": "1",
        "NVSHMEM_SYMMETRIC_SIZE": str(arena_bytes + _OWN_BYTES),
        # No NVLink multicast: jflux does without it.
        "NVSHMEM_DISABLE_NVLS": "1",
        # jflux calls none of NVSHMEM's collectives that would use NCCL.
        "NVSHMEM_DISABLE_NCCL": "1",
    }


def apply(wanted: Mapping[str, str], environment: dict[str, str] | os._Environ[str]) -> None:
    """Sets what the user has not set."""
    for name, value in wanted.items():
        environment.setdefault(name, value)


def host_library() -> str:
    """libnvshmem_host.so.3 of NVIDIA's wheel, or of NVSHMEM_HOME; "" if it is in neither."""
    folders = [Path(home) for home in [os.environ.get("NVSHMEM_HOME", "")] if home]
    try:
        nvidia = importlib.util.find_spec("nvidia")
    except (ImportError, ValueError):
        nvidia = None
    places = (nvidia.submodule_search_locations if nvidia else None) or ()
    folders += [Path(place) / "nvshmem" for place in places]
    libraries = (folder / "lib" / "libnvshmem_host.so.3" for folder in folders)
    return next((str(library) for library in libraries if library.exists()), "")


def plugin() -> str:
    """jflux's plugin: beside the native library, or where JFLUX_NVSHMEM_PLUGIN says."""
    named = os.environ.get("JFLUX_NVSHMEM_PLUGIN")
    return named or str(Path(lib.__file__).absolute().with_name("libjflux_nvshmem.so"))


def why_not_here(platform: str, devices: int, arch: int = gpu_code.HOPPER) -> str:
    """Why this process cannot use NVSHMEM; "" if it can. Loads it.

    Args:
      arch: of the kernels' code that its GPUs run.
    """
    if platform != "cuda":
        return f"NVSHMEM is for GPUs, and this process has the platform {platform}"
    if arch < gpu_code.HOPPER:
        return "jflux's NVSHMEM plugin is for compute capability 9.0"
    if devices != 1:
        return (
            f"NVSHMEM needs a process for each GPU, and this one has {devices}: start one each, "
            "with jax.distributed.initialize(local_device_ids=...)"
        )
    if not Path(plugin()).exists():
        return (
            f"this build of jflux has no NVSHMEM plugin ({plugin()}): install nvidia-nvshmem-cu12 "
            "or -cu13 first, or set NVSHMEM_HOME, and then reinstall jflux"
        )
    found = host_library()
    try:
        lib.nvshmem_load(found, plugin())
    except RuntimeError as error:
        return str(error) if found else f"{error}; pip install nvidia-nvshmem-cu13 or -cu12"
    return ""


def why_not(facts: Sequence[Facts]) -> str | None:
    """Why the job cannot use NVSHMEM, or None: the same in all processes."""
    for one in facts:
        if one.no_nvshmem:
            return f"process {one.process}: {one.no_nvshmem}"
    if len(facts) == 1:
        return "there is one process, which reaches all its memory by itself"
    others = [one.process for one in facts if one.backend != NAME]
    if others:
        return (
            f"process {others[0]} did not ask for it: jflux.init(backend=...) must be equal in all"
        )
    if any(one.unusable for one in facts):
        return next(f"process {f.process}: {f.unusable}" for f in facts if f.unusable)
    if len({one.arena for one in facts}) > 1:
        late = next(one.process for one in facts if not one.arena)
        return f"process {late} was not there when NVSHMEM started: restart all processes"
    return None


def start(facts: Sequence[Facts], me: int, ordinal: int, arena_bytes: int, gather: Gather) -> str:
    """Starts NVSHMEM in all processes, unless it is; "" or why it does not start, the same
    everywhere.

    Args:
      facts: of all processes, for which `why_not` is None.
      me: this process.
      ordinal: CUDA's number of its GPU.
      arena_bytes: what workspaces may take.
      gather: of the store.

    Raises:
      Absent: a process did not come.
    """
    if facts[0].arena:
        return ""
    processes = sorted(one.process for one in facts)
    identity = failure = ""
    if me == processes[0]:
        apply(settings(arena_bytes), os.environ)
        try:
            identity = lib.nvshmem_unique_id()
        except RuntimeError as error:
            failure = str(error)
    identity = gather("nvshmem_id", identity, processes)[processes[0]]
    if identity:
        apply(settings(arena_bytes), os.environ)
        failure = within(
            START_SECONDS,
            lambda: lib.nvshmem_start(
                identity, processes.index(me), len(processes), ordinal, arena_bytes
            ),
        )
    failures = gather("nvshmem_started", failure, processes)
    return next((f"process {p}: {failures[p]}" for p in processes if failures[p]), "")


def within(seconds: float, work: Callable[[], object]) -> str:
    """Does work that may hang on a thread; why it failed, or "". A thread that hangs is left."""
    failure: list[str] = []

    def run() -> None:
        try:
            work()
            failure.append("")
        except RuntimeError as error:
            failure.append(str(error))

    thread = threading.Thread(target=run, name="jflux-nvshmem", daemon=True)
    thread.start()
    thread.join(seconds)
    if not failure:
        return (
            f"NVSHMEM did not start within {seconds:g} s: a process did not come, or its network "
            "interface is not reachable (NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME; NVSHMEM_DEBUG=INFO "
            "says more)"
        )
    return failure[0]
