"""The heap's back ends: who makes a heap, and when a workspace gets its place.

Memory, handles, probes and faults are the native module's, behind one set of functions for all
back ends (cc/runtime/heap.h). What is left to Python differs in one point:

  cpu        Each call leases its workspace when it runs. Nothing is reserved.
  cuda_peer  One process: the native module gives a workspace the next free place.
  cuda_ipc   Several processes agree on the place first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol

import jax
import numpy as np

from .._native import lib
from . import _agreement


@dataclasses.dataclass(frozen=True)
class Members:
    """Who makes a heap.

    Attributes:
      processes: those with a device of the platform.
      me: this one.
      devices: global ids of this process's devices.
      ordinals: CUDA's number of each of them; empty on the CPU.
    """

    processes: tuple[int, ...]
    me: int
    devices: tuple[int, ...]
    ordinals: tuple[int, ...]

    @classmethod
    def of(cls, platform: str) -> Members:
        devices = jax.devices(platform)
        processes = tuple(sorted({d.process_index for d in devices}))
        # A job on GPUs has one CPU client per process, each with process index 0.
        me = jax.process_index() if len(processes) > 1 else processes[0]
        mine = [d for d in devices if d.process_index == me]
        return cls(
            processes,
            me,
            tuple(d.id for d in mine),
            tuple(d.local_hardware_id for d in mine) if platform == "cuda" else (),
        )

    @property
    def lead(self) -> bool:
        """Whether this process owns what a heap has once."""
        return self.me == self.processes[0]


class Backend(Protocol):
    """What the heap asks of a back end."""

    @property
    def name(self) -> str:
        """As cc/runtime/heap.h names it."""

    @property
    def platform(self) -> str:
        """ "cpu" or "cuda"."""

    def created(self, heap_bytes: int) -> None:
        """There is a new heap of this size."""

    def reserve(self, groups: np.ndarray, workspace_bytes: int) -> bool:
        """Makes sure that these groups have such a workspace; False if there is no room."""


class Cpu:
    """Back end `cpu`."""

    name = "cpu"
    platform = "cpu"

    def created(self, heap_bytes: int) -> None:
        pass

    def reserve(self, groups: np.ndarray, workspace_bytes: int) -> bool:
        return True  # a call that finds no room when it runs waits, and then says so


class CudaPeer:
    """Back end `cuda_peer`."""

    name = "cuda_peer"
    platform = "cuda"

    def created(self, heap_bytes: int) -> None:
        pass

    def reserve(self, groups: np.ndarray, workspace_bytes: int) -> bool:
        return lib.heap_find_workspace(self.platform, groups.ravel().tolist(), workspace_bytes)


class CudaIpc:
    """Back end `cuda_ipc`.

    Args:
      claim: ``claim(name, value)`` writes a key of the store unless it is there, and returns what
        is there.
    """

    name = "cuda_ipc"
    platform = "cuda"

    def __init__(self, claim: Callable[[str, str], str]) -> None:
        self._claim = claim
        # Both outlive a heap, as the list in the store does.
        self._known = _agreement.Known()
        self._wanted: dict[_agreement.Workspace, list[int]] = {}  # by this process: their groups
        self._heap_bytes = 0
        self._added: set[_agreement.Workspace] = set()

    def created(self, heap_bytes: int) -> None:
        """Functions compiled before a shutdown find their workspaces again, as far as there is
        room."""
        self._heap_bytes = heap_bytes
        self._added.clear()
        for workspace in self._wanted:
            self._add(workspace)

    def reserve(self, groups: np.ndarray, workspace_bytes: int) -> bool:
        workspace = _agreement.Workspace.of(groups, workspace_bytes)
        request = _agreement.next_claim(self._known, workspace)
        while request is not None:  # one at a time: what is known stays, should a claim fail
            held = self._claim(f"cuda_workspace/{request.slot}", request.entry)
            self._known = _agreement.learn(self._known, request, held)
            request = _agreement.next_claim(self._known, workspace)
        self._wanted[workspace] = groups.ravel().tolist()
        return self._add(workspace)

    def _add(self, workspace: _agreement.Workspace) -> bool:
        if workspace in self._added:
            return True
        place = _agreement.places(self._known, self._heap_bytes).get(workspace)
        if place is None:
            return False
        lib.heap_add_workspace(self.platform, self._wanted[workspace], workspace.size, place)
        self._added.add(workspace)
        return True


def name_for(platform: str, members: Members) -> str:
    """Which back end suits a platform and its processes."""
    if platform == "cpu":
        return "cpu"
    return "cuda_ipc" if len(members.processes) > 1 else "cuda_peer"


def create(
    backend: Backend,
    members: Members,
    heap_bytes: int,
    deadline_seconds: float,
    exchange: Callable[[str], dict[int, str]],
) -> None:
    """Makes this process's part of the heap and connects it with the other processes' parts.

    Args:
      exchange: publishes this process's handle and returns the handle of each process.
    """
    platform = backend.platform
    lib.heap_create(
        platform,
        backend.name,
        list(members.devices),
        list(members.ordinals),
        heap_bytes,
        deadline_seconds,
        members.lead,
    )
    if len(members.processes) > 1:
        for process, handle in exchange(lib.heap_export(platform)).items():
            if process != members.me:
                lib.heap_attach(platform, handle)
    lib.heap_probe(platform)
    backend.created(heap_bytes)
