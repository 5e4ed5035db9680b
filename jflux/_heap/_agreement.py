"""Which place in the heap each workspace gets, the same in every process.

Processes lower programs in any order, and at any time, but a workspace must have the same place in
all of them. They share a list in a store; everything about places is a function of that list.

  list     Slots 0, 1, 2, ..., each with one workspace. The first process that writes a slot decides
           what it holds; a slot never changes.
  writers  A process that needs a workspace claims the first slot that it does not know. It learns
           what the slot holds: its own workspace, or another process's. In the second case it
           claims the next slot. So what a process knows is always a prefix of the list, and no
           workspace is in the list twice.
  waiters  Nobody waits for another process. A process claims each slot once, so it is done after at
           most as many claims as there are workspaces.
  order    The store's: a claim is one atomic write-if-absent.
  reset    Never, also not by a shutdown: functions compiled before find their workspaces again.

The module is plain data and pure functions. The caller makes the claims: it asks
:func:`next_claim`, sends the claim to the store, and gives the answer to :func:`learn`, until there
is no next claim (_backends.CudaIpc).
"""

from __future__ import annotations

import dataclasses
import hashlib

import numpy as np


@dataclasses.dataclass(frozen=True)
class Workspace:
    """What calls of the same groups of ranks and the same size share.

    Attributes:
      groups: a digest of the table of groups.
      size: in bytes.
    """

    groups: str
    size: int

    @classmethod
    def of(cls, groups: np.ndarray, size: int) -> Workspace:
        flat = groups.ravel().tolist()
        return cls(hashlib.sha256(repr((flat, f"{groups.shape}")).encode()).hexdigest()[:32], size)

    @classmethod
    def parse(cls, entry: str) -> Workspace:
        groups, size = entry.rsplit("/", 1)
        return cls(groups, int(size))

    def entry(self) -> str:
        """As the store holds it."""
        return f"{self.groups}/{self.size}"


@dataclasses.dataclass(frozen=True)
class Claim:
    """A request to the store: write `entry` into the slot unless it is taken."""

    slot: int
    entry: str


@dataclasses.dataclass(frozen=True)
class Known:
    """What one process knows: the first slots of the list."""

    workspaces: tuple[Workspace, ...] = ()


def next_claim(known: Known, wanted: Workspace) -> Claim | None:
    """What to ask the store for; None if the process knows where the workspace is in the list."""
    if wanted in known.workspaces:
        return None
    return Claim(len(known.workspaces), wanted.entry())


def learn(known: Known, claim: Claim, held: str) -> Known:
    """After the store's answer: the slot holds `held`, whoever wrote it."""
    if claim.slot != len(known.workspaces):
        raise ValueError(f"slot {claim.slot} was claimed after {len(known.workspaces)} are known")
    return Known((*known.workspaces, Workspace.parse(held)))


def places(known: Known, capacity: int) -> dict[Workspace, int]:
    """Where workspaces are, in bytes from the first: one after another, in the list's order. A
    workspace that does not fit has no place and takes none, so that smaller ones still fit.

    The place of a workspace depends on the slots before it alone. So all processes find the same,
    however much more of the list each of them knows."""
    result: dict[Workspace, int] = {}
    end = 0
    for workspace in known.workspaces:
        if end + workspace.size <= capacity:
            result[workspace] = end
            end += workspace.size
    return result
