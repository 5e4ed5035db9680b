"""Makes this process's part of a heap, and connects it with those of the node's other processes.

Steps, each with all processes of the job or of the node. A step that fails anywhere ends the making
in all processes of the node, with the same reason.

  facts     all   who is on which host, with which devices; how much memory workspaces may take
  nvshmem   all   where jflux.init asked for it: its start (_nvshmem)
  created   node  each process has made its part; handles of its memory
  attached  node  each has opened the others' parts
  probed    node  on GPUs: the links (cc/runtime/link_probe.h)
  outcome   all   which nodes have a heap. From here on all processes give the same verdicts
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import jax

from .._native import lib
from . import _nodes, _nvshmem, _peers, _rendezvous, _workspaces
from ._agreement import Workspace
from ._nodes import Facts, Job, Outcome
from ._waits import on_a_thread


class Gather(Protocol):
    """-> the value of each process. Waits as long as the settings say, or so many seconds."""

    def __call__(
        self, step: str, value: str, processes: Collection[int], seconds: float | None = None
    ) -> dict[int, str]: ...


#: How long a process that lets go of its part waits for the node's others, in seconds.
LEAVE_SECONDS = 10.0


class Failure(RuntimeError):
    """The heap of this node cannot be made."""


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


def make(
    platform: str,
    members: Members,
    facts: Facts,
    deadline_seconds: float,
    warn_seconds: float,
    gather: Gather,
) -> Job:
    """Makes this process's part. The heap exists afterwards if this process's outcome has no
    failure."""
    try:
        texts = gather("facts", facts.dump(), members.processes)
    except _rendezvous.Absent as absent:
        return Job.of([facts], {facts.process: Outcome(str(absent))}, absent=str(absent))
    all_facts = [Facts.load(text) for text in texts.values()]
    node = _nodes.processes_of_nodes(all_facts)[members.me]
    limit, times = _nodes.limit_of(all_facts), (deadline_seconds, warn_seconds)
    backend, instead, failure = platform, "", facts.unusable
    try:
        if any(f.backend for f in all_facts):
            arena = limit + lib.probe_bytes(sum(len(f.devices) for f in all_facts))
            instead = _nvshmem.why_not(all_facts) or _nvshmem.start(
                all_facts, members.me, members.ordinals[0], arena, gather
            )
            backend = platform if instead else _nvshmem.NAME
        if not facts.unusable:
            _make_node(platform, backend, members, all_facts, node, limit, times, gather)
    except (Failure, _rendezvous.Absent) as error:
        leave(platform, lambda: gather(f"failed/{node[0]}", "", node, LEAVE_SECONDS))
        failure = str(error)
    links = lib.heap_links(platform)
    gbps = min((push for _, _, push, _, _ in links), default=0.0)
    no_atomics = ""
    if links:
        ordinals = dict(zip(members.devices, members.ordinals, strict=True))
        no_atomics = _peers.why_no_atomics(_visible_peers(), links, ordinals)
    try:
        texts = gather("outcome", Outcome(failure, gbps, no_atomics).dump(), members.processes)
    except _rendezvous.Absent as absent:
        leave(platform, lambda: gather(f"absent/{node[0]}", "", node, LEAVE_SECONDS))
        return Job.of([facts], {facts.process: Outcome(str(absent))}, absent=str(absent))
    outcomes = {process: Outcome.load(text) for process, text in texts.items()}
    return Job.of(all_facts, outcomes, backend=backend, instead=instead)


def _visible_peers() -> list[_peers.Peer]:
    """What CUDA says of the GPUs that this process sees; nothing if it does not say."""
    try:
        return lib.cuda_peers()
    except RuntimeError:
        return []


def leave(platform: str, meet: Callable[[], object]) -> None:
    """Frees this process's part, once no other process uses it.

    Args:
      meet: waits for all processes of the node.
    """
    on_a_thread(lib.heap_close, platform)
    try:
        meet()
    except RuntimeError:  # somebody may still use it, so it is never freed
        lib.heap_shutdown(platform, True)
    else:
        on_a_thread(lib.heap_shutdown, platform, False)


def _make_node(
    platform: str,
    backend: str,
    members: Members,
    facts: Sequence[Facts],
    node: tuple[int, ...],
    limit: int,
    times: tuple[float, float],
    gather: Gather,
) -> None:
    def together(step: str, work: Callable[[], str]) -> dict[int, str]:
        """What each process of the node has to say after the step."""
        failure, value = "", ""
        try:
            value = work()
        except RuntimeError as error:
            failure = str(error)
        texts = gather(f"{step}/{node[0]}", json.dumps([failure, value]), node)
        said = {process: json.loads(text) for process, text in texts.items()}
        for process in node:
            if why := said[process][0]:
                is_named = len(node) == 1 or why.startswith("process ")
                raise Failure(why if is_named else f"process {process}: {why}")
        return {process: value for process, (_, value) in said.items()}

    def create() -> str:
        leads = members.me == node[0]
        lib.heap_create(platform, backend, members.devices, members.ordinals, limit, *times, leads)
        return lib.heap_export(platform)

    handles = together("created", create)

    def attach() -> str:
        for process, handle in handles.items():
            if process != members.me:
                lib.heap_attach(platform, handle)
        return ""

    together("attached", attach)
    devices = tuple(sorted(d for f in facts if f.process in node for d in f.devices))
    if platform == "cuda" and len(devices) > 1:
        _probe(devices, node, members.me, together)


def _probe(
    devices: tuple[int, ...],
    node: Sequence[int],
    me: int,
    together: Callable[[str, Callable[[], str]], dict[int, str]],
) -> None:
    """Probes all links of the node, in a workspace that exists as long."""
    area = Workspace(devices, lib.probe_bytes(len(devices)))
    where = "cuda", area.devices, area.size
    handles = together("probe_added", lambda: lib.heap_add_workspace(*where))

    def attach() -> str:
        for process, handle in handles.items():
            if process != me and handle:
                lib.heap_attach_workspace(*where, handle)
        lib.heap_commit_workspace(*where)
        return ""

    together("probe_attached", attach)

    def run(number: int) -> str:
        on_a_thread(lib.heap_probe, *where, number)
        return ""

    for process in node:  # in turn: processes that copy at the same time would share a GPU's links
        copies = functools.partial(run, 0) if process == me else lambda: ""
        together(f"probe_copies_{process}", copies)
    for number, name in enumerate(("check", "talk"), 1):
        together(f"probe_{name}", functools.partial(run, number))

    def close() -> str:
        _workspaces.close([area])
        return ""

    together("probe_closed", close)
    _workspaces.free([area])
