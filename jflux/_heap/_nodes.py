"""Which devices can map each other's memory, and which calls can run kernels: pure functions of
what all processes have published.

A node is the devices of processes that can map each other's memory: they run on one host, in one
PID namespace (a handle of memory names a process), and were given the same name. Every process
knows the facts of all processes, so all of them give the same verdict on a call, and lower the same
program.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Facts:
    """What a process says of itself before it makes its part of the heap.

    Attributes:
      process: its number.
      host: what tells hosts, and PID namespaces of a host, apart.
      devices: global ids.
      nodes: the name of each device's node, as jflux.init was given.
      heap_bytes: the most that workspaces may take, per device.
      unusable: why its devices run no kernels; "" if they do.
      build: the version of jflux.
      sm_count: multiprocessors of its smallest GPU; 0 on CPUs.
      arch: of the kernels' code that its GPUs run (`gpu_code`); 0 on CPUs.
      checked: on how many GPUs jflux.selftest has passed on its machine (`selftest_record`); 0: no
        record counts.
      no_record: why no record counts.
      backend: what jflux.init was asked for: "nvshmem", or "" for the usual one.
      no_nvshmem: why it cannot use NVSHMEM; "" if it can, or was not asked to.
      arena: bytes that it has had of NVSHMEM since an earlier heap; 0 if NVSHMEM has not started.
    """

    process: int
    host: str
    devices: tuple[int, ...]
    nodes: tuple[str, ...]
    heap_bytes: int
    unusable: str = ""
    build: str = ""
    sm_count: int = 0
    arch: int = 0
    checked: int = 0
    no_record: str = ""
    backend: str = ""
    no_nvshmem: str = ""
    arena: int = 0

    def dump(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def load(cls, text: str) -> Facts:
        fields = _known_fields(cls, json.loads(text))
        fields |= {name: tuple(fields[name]) for name in ("devices", "nodes")}
        return cls(**fields)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a process says of its part of the heap when that is made.

    Attributes:
      failure: why it could not be made; "" if it was.
      link_gbps: what its slowest link to a peer carries, in 1e9 bytes a second; 0 if it has none.
      no_atomics: why its GPUs have no atomic operations on peers' memory (`_peers`); "" if they
        have.
    """

    failure: str = ""
    link_gbps: float = 0.0
    no_atomics: str = ""

    def dump(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def load(cls, text: str) -> Outcome:
        return cls(**_known_fields(cls, json.loads(text)))


def _known_fields(kind: type[Any], fields: dict[str, Any]) -> dict[str, Any]:
    """Another version of jflux may say more."""
    known = {field.name for field in dataclasses.fields(kind)}
    return {name: value for name, value in fields.items() if name in known}


def limit_of(facts: Iterable[Facts]) -> int:
    """The most that workspaces take on any device: the least that a process has."""
    return min((min(f.heap_bytes, f.arena or f.heap_bytes) for f in facts), default=0)


def this_host() -> str:
    """What tells hosts, and PID namespaces of a host, apart."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
    except OSError:  # some sandboxes hide it
        boot = platform.node()
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    return f"{boot} {namespace}"


def names_of(node: str | Sequence[str] | None, devices: int) -> tuple[str, ...]:
    """One name for each device of this process.

    Raises:
      ValueError: a sequence of another length.
    """
    if node is None or isinstance(node, str):
        return (node or "",) * devices
    if len(node) != devices:
        raise ValueError(
            f"jflux.init: node has {len(node)} names, and this process has {devices} devices"
        )
    return tuple(node)


def processes_of_nodes(facts: Iterable[Facts]) -> dict[int, tuple[int, ...]]:
    """The processes that make one heap together with each process: on its host, with the same
    names. A process whose devices run no kernels is alone."""
    together: dict[tuple[str, frozenset[str], int | None], list[int]] = {}
    for one in sorted(facts, key=lambda f: f.process):
        alone = one.process if one.unusable else None
        together.setdefault((one.host, frozenset(one.nodes), alone), []).append(one.process)
    return {process: tuple(group) for group in together.values() for process in group}


def node_of(facts: Iterable[Facts]) -> dict[int, int]:
    """The node of each device, by global id. Nodes are numbered from 0, by their first device."""
    named: dict[int, tuple[str, frozenset[str], str]] = {}
    for one in facts:
        for device, name in zip(one.devices, one.nodes, strict=True):
            named[device] = (one.host, frozenset(one.nodes), name)
    numbers: dict[tuple[str, frozenset[str], str], int] = {}
    return {device: numbers.setdefault(named[device], len(numbers)) for device in sorted(named)}


@dataclasses.dataclass(frozen=True)
class Job:
    """What all processes know of the job's heaps on one platform.

    Attributes:
      facts: of each process.
      outcomes: of each process.
      node: of each device.
      absent: why there are no heaps, if processes did not come; "" otherwise.
      backend: of the heaps: the platform's name, or "nvshmem".
      instead: why that is not what jflux.init was asked for; "" if it is.
    """

    facts: Mapping[int, Facts]
    outcomes: Mapping[int, Outcome]
    node: Mapping[int, int]
    absent: str = ""
    backend: str = ""
    instead: str = ""

    @classmethod
    def of(
        cls,
        facts: Iterable[Facts],
        outcomes: Mapping[int, Outcome],
        absent: str = "",
        backend: str = "",
        instead: str = "",
    ) -> Job:
        facts = list(facts)
        by_process = {f.process: f for f in facts}
        return cls(by_process, outcomes, node_of(facts), absent, backend, instead)

    @property
    def heap_bytes(self) -> int:
        """The most that workspaces take on any device: the least that a process has."""
        return limit_of(self.facts.values())

    @property
    def link_gbps(self) -> float:
        """What the slowest link within a node carries; 0 if there is none."""
        return min((o.link_gbps for o in self.outcomes.values() if o.link_gbps > 0), default=0.0)

    @property
    def no_atomics(self) -> str:
        """Why GPUs of a node have no atomic operations on each other's memory; "" if they have."""
        for process, outcome in sorted(self.outcomes.items()):
            if outcome.no_atomics:
                whose = "" if len(self.facts) == 1 else f"process {process}: "
                return whose + outcome.no_atomics
        return ""

    @property
    def sm_count(self) -> int:
        """Of the smallest GPU."""
        return min((f.sm_count for f in self.facts.values() if f.sm_count), default=0)

    @property
    def arch(self) -> int:
        """Of the code that all GPUs run; 0 without GPUs."""
        return min((f.arch for f in self.facts.values() if f.arch), default=0)

    @property
    def no_record(self) -> str:
        """Why records of jflux.selftest do not count for the job; "" if they do. Each process's
        machine has one, of as many GPUs as its node has."""
        if self.absent:
            return self.absent
        together = processes_of_nodes(self.facts.values())
        for process, facts in sorted(self.facts.items()):
            whose = "" if len(self.facts) == 1 else f"process {process}: "
            if not facts.checked:
                return whose + facts.no_record
            there = sum(len(self.facts[p].devices) for p in together[process])
            if facts.checked < there:
                return f"{whose}it passed on {facts.checked} GPUs, and here are {there}"
        return ""

    def process_of(self) -> dict[int, int]:
        """By device."""
        return {d: process for process, f in self.facts.items() for d in f.devices}

    def with_heap(self) -> dict[int, int]:
        """`process_of` the processes that have a part of a heap."""
        return {d: p for d, p in self.process_of().items() if not self.outcomes[p].failure}

    def why_not(self, table: np.ndarray) -> str | None:
        """Why no kernels run on the devices of these groups, or None. Whether a group's devices
        share a node is another question."""
        if self.absent:
            return self.absent
        process_of = self.process_of()
        processes = sorted({process_of[d] for d in table.ravel().tolist() if d in process_of})
        unknown = [d for d in table.ravel().tolist() if d not in process_of]
        if unknown:
            return f"device {unknown[0]} was not there when the symmetric heap was made"
        for process in processes:
            why = self.facts[process].unusable or self.outcomes[process].failure
            if why:
                is_named = len(self.facts) == 1 or why.startswith("process ")
                return why if is_named else f"process {process}: {why}"
        builds = {self.facts[process].build for process in processes}
        if len(builds) > 1:
            return f"processes have different versions of jflux ({', '.join(sorted(builds))})"
        return None
