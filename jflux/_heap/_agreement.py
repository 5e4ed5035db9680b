"""Which workspaces GPUs have, the same in every process.

Processes lower programs in any order, and at any time, but a workspace must exist on all of its
devices, and whether there is room must be answered alike. They share a log in a store. Everything
about workspaces is a function of that log and of the answers that processes gave to its entries.

  log      Slots 0, 1, 2, ..., each with a request for a workspace of each group of a table. The
           first process that writes a slot decides what it holds; a slot never changes.
  writers  A process that needs workspaces claims the first slot that it does not know. It learns
           what the slot holds: its own request, or another process's. In the second case it claims
           the next slot.
  waiters  All processes carry out a slot together, in the log's order: if there is no room, they
           give back workspaces that no executable uses; they add their copies, and publish whether
           they could. A process that lowers nothing does so on a thread of its own
           (_workspaces.Shared), so nobody waits for a program of another process.
  order    The store's: a claim is one atomic write-if-absent.
  reset    Never. Another heap has another log.

The module is plain data and pure functions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping

import numpy as np

#: A copy of a workspace takes whole blocks of GPU memory.
BLOCK = 2 << 20


@dataclasses.dataclass(frozen=True, order=True)
class Workspace:
    """What calls over the same devices whose needs round up to the same size share.

    Attributes:
      devices: global ids, ascending.
      size: in bytes.
    """

    devices: tuple[int, ...]
    size: int

    @property
    def taken(self) -> int:
        """Bytes of each device's memory."""
        return -(-self.size // BLOCK) * BLOCK


@dataclasses.dataclass(frozen=True)
class Request:
    """A workspace of one size for each group of a table.

    Attributes:
      groups: sets of devices, each ascending, in order.
      size: in bytes.
    """

    groups: tuple[tuple[int, ...], ...]
    size: int

    @classmethod
    def of(cls, table: np.ndarray, size: int) -> Request:
        return cls(tuple(sorted({tuple(sorted(group)) for group in table.tolist()})), size)

    @classmethod
    def parse(cls, entry: str) -> Request:
        size, groups = entry.split(":", 1)
        parsed = (tuple(map(int, group.split(","))) for group in groups.split(";"))
        return cls(tuple(parsed), int(size))

    def entry(self) -> str:
        """As the store holds it."""
        return f"{self.size}:{';'.join(','.join(map(str, group)) for group in self.groups)}"

    def workspaces(self) -> tuple[Workspace, ...]:
        return tuple(Workspace(group, self.size) for group in self.groups)


@dataclasses.dataclass(frozen=True)
class Ledger:
    """What is held, after the first slots of the log.

    Attributes:
      limit: the most that workspaces may take of a device's memory, in bytes.
      slots: how many slots have been carried out.
      held: the workspaces that exist.
      refused: requests that found no room, and why. They find none as long as the heap lives: a
        process that asks later must lower the program that the others have.
      ended: why no slot is carried out any more; "" if they are. What is missing is refused.
    """

    limit: int
    slots: int = 0
    held: frozenset[Workspace] = frozenset()
    refused: Mapping[Request, str] = dataclasses.field(default_factory=dict)
    ended: str = ""

    def is_decided(self, request: Request) -> bool:
        """Whether a request needs no slot."""
        return bool(self.ended) or request in self.refused or not self.missing(request)

    def why_refused(self, request: Request) -> str | None:
        """Of a request that is decided; None if it is granted."""
        return self.refused.get(request) or (self.ended if self.missing(request) else None)

    def missing(self, request: Request) -> tuple[Workspace, ...]:
        return tuple(w for w in request.workspaces() if w not in self.held)

    def taken(self, device: int) -> int:
        """Bytes of a device's memory."""
        return sum(w.taken for w in self.held if device in w.devices)

    def why_no_room(self, workspaces: Iterable[Workspace]) -> str | None:
        """None if the limit has room for these, too."""
        for workspace in workspaces:
            for device in workspace.devices:
                taken = self.taken(device)
                if taken + workspace.taken > self.limit:
                    return (
                        f"it takes {workspace.taken} bytes of the symmetric heap beside the "
                        f"{taken} that other programs hold, and it has {self.limit}; "
                        "jflux.init(heap_bytes=...) gives it more"
                    )
        return None

    def hold(self, workspaces: Iterable[Workspace]) -> Ledger:
        return dataclasses.replace(self, held=self.held.union(workspaces))

    def give_back(self, workspaces: Iterable[Workspace]) -> Ledger:
        return dataclasses.replace(self, held=self.held.difference(workspaces))

    def refuse(self, request: Request, why: str) -> Ledger:
        return dataclasses.replace(self, refused={**self.refused, request: why})

    def end(self, why: str) -> Ledger:
        return dataclasses.replace(self, ended=why)

    def next_slot(self) -> Ledger:
        return dataclasses.replace(self, slots=self.slots + 1)


def given_back(
    ledger: Ledger,
    unused: Mapping[int, Collection[Workspace]],
    asked: Mapping[int, Mapping[Request, int]],
    process_of: Mapping[int, int],
) -> list[Workspace]:
    """What no executable uses, in an order that is the same everywhere.

    Processes that lower the same programs make the same requests equally often. If one has made a
    request more often than another one whose devices are in any of its groups, then that will make
    it, and must get the same answer: all workspaces of the request stay.

    Args:
      unused: by process, what it does not use of the workspaces on its devices.
      asked: by process, how often each request was granted to it.
      process_of: by device.
    """
    pending: set[Workspace] = set()
    for request in {request for counts in asked.values() for request in counts}:
        processes = {process_of[d] for group in request.groups for d in group}
        if len({asked[process].get(request, 0) for process in processes}) > 1:
            pending.update(request.workspaces())

    def is_given_back(workspace: Workspace) -> bool:
        return all(workspace in unused[process_of[d]] for d in workspace.devices)

    return sorted(w for w in ledger.held if w not in pending and is_given_back(w))
