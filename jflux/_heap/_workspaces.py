"""Reserved workspaces: the GPUs' (the CPU back end leases them per call, cc/runtime/heap.h).

A workspace is reserved when a call is lowered, and given back when no program uses it and another
one needs the room. One process decides by itself (:class:`Alone`); several agree
(:class:`Shared`).
"""

from __future__ import annotations

import collections
import json
import logging
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Protocol

from .. import _config
from .._native import lib
from . import _rendezvous
from ._agreement import Ledger, Request, Workspace, given_back
from ._waits import on_a_thread

PLATFORM = "cuda"


class Workspaces(Protocol):
    """Who reserves workspaces."""

    ledger: Ledger

    def reserve(self, request: Request, program: Any) -> str | None:
        """Makes sure that the workspaces exist, as long as `program` does, the module that is
        lowered; why there is no room otherwise."""

    def stop(self, *, wait: bool) -> None:
        """Nothing is reserved any more. `wait`: nor is anything on its way."""


class Programs:
    """Which lowered programs use which workspaces: while one exists it may be compiled, however
    long that takes. What it is compiled to says so itself (cc/runtime/workspace_use.h)."""

    def __init__(self) -> None:
        self._of: dict[Workspace, list[weakref.ref[Any]]] = {}

    def expect(self, workspaces: Iterable[Workspace], program: Any) -> None:
        for workspace in workspaces:
            programs = [known for known in self._of.get(workspace, ()) if known() is not None]
            if not any(known() is program for known in programs):
                programs.append(weakref.ref(program))
            self._of[workspace] = programs

    def unused(self) -> list[Workspace]:
        """Those that neither an executable of this process uses nor a program will."""
        return [
            workspace
            for workspace in unused_here()
            if all(known() is None for known in self._of.get(workspace, ()))
        ]


class Alone:
    """One process has all devices.

    Args:
      limit: the most that workspaces take of a device's memory, in bytes.
    """

    def __init__(self, limit: int) -> None:
        self.ledger = Ledger(limit)
        self._programs = Programs()
        self._lock = threading.Lock()

    def reserve(self, request: Request, program: Any) -> str | None:
        with self._lock:
            why = self._reserve(request)
            if why is None:
                self._programs.expect(request.workspaces(), program)
            return why

    def _reserve(self, request: Request) -> str | None:
        wanted, missing = request.workspaces(), self.ledger.missing(request)
        why = self._add(missing)
        if why is not None:
            others = self.ledger.held.difference(wanted)
            unused = [w for w in self._programs.unused() if w in others]
            if unused:
                # A signal's handler may raise meanwhile: both halves are done all the same.
                self.ledger = self.ledger.give_back(unused)
                on_a_thread(close_and_free, unused)
                why = self._add(missing)
        return why

    def _add(self, missing: Sequence[Workspace]) -> str | None:
        if why := self.ledger.why_no_room(missing):
            return why
        added: list[Workspace] = []
        try:
            for workspace in missing:
                where = workspace.devices, workspace.size
                # An executable from a cache may have made it (cc/runtime/workspace_use.h).
                if not lib.heap_has_workspace(PLATFORM, *where):
                    lib.heap_add_workspace(PLATFORM, *where)
                    added.append(workspace)
                    lib.heap_commit_workspace(PLATFORM, *where)
        except RuntimeError as error:
            free(added)
            return no_memory(missing, error)
        self.ledger = self.ledger.hold(missing)
        return None

    def stop(self, *, wait: bool) -> None:
        pass


#: ``gather(name, value, processes)`` -> the value of each process (`_rendezvous.gather`).
Gather = Callable[[str, str, Collection[int]], dict[int, str]]


class Shared:
    """Several processes have the devices, on one node or on several.

    Args:
      limit: the most that workspaces take of a device's memory, in bytes.
      process_of: by device.
      me: this process.
      reached: the processes whose memory this one can reach: of its node; all with NVSHMEM.
      gather, claim, look: of the store.

    Two locks, taken in this order, and neither while the heap's own is wanted:

      turn   held while a slot is carried out. That may wait for kernels (to give memory back), and
             these for programs that peers have yet to lower.
      state  held for moments: while it is looked up whether a request needs a slot at all, and
             from the moment when a process says what it does not use until it is known what is
             given back. So a program whose workspaces exist is lowered while a slot is carried out.
    """

    #: Seconds between two looks at the log: at first, and at most.
    SOON, SELDOM = 0.05, 1.0
    #: Looks in a row that may fail, as when the store is restarted.
    MOST_FAILURES = 30

    def __init__(
        self,
        limit: int,
        *,
        process_of: dict[int, int],
        me: int,
        reached: Collection[int],
        gather: Gather,
        claim: Callable[[str, str], str],
        look: Callable[[str], str | None],
    ) -> None:
        self.ledger = Ledger(limit)
        self._process_of, self._me, self._reached = process_of, me, tuple(reached)
        self._all = tuple(sorted(set(process_of.values())))
        self._gather, self._claim, self._look = gather, claim, look
        self._asked: collections.Counter[Request] = collections.Counter()
        self._programs = Programs()
        self._turn, self._state = threading.Lock(), threading.Lock()
        self._stopped = threading.Event()
        self._is_cut_off = False  # from the store
        self._thread = threading.Thread(target=self._follow, name="jflux-heap", daemon=True)

    def start(self) -> None:
        """Begins to carry out what other processes request."""
        self._thread.start()

    def stop(self, *, wait: bool) -> None:
        self._stopped.set()
        if wait:
            with self._turn:
                pass

    def reserve(self, request: Request, program: Any) -> str | None:
        while not self._decides(request, program):
            with self._turn:
                if self._is_cut_off:
                    return "jax.distributed has been shut down, through which processes agree"
                if not self.ledger.is_decided(request):
                    held = self._claim(f"slot/{self.ledger.slots}", request.entry())
                    self._carry_out(Request.parse(held))
        return self.ledger.why_refused(request)

    def _decides(self, request: Request, program: Any) -> bool:
        """Whether the request needs no slot. If it is granted, its workspaces stay from now on."""
        with self._state:
            decided = self.ledger.is_decided(request)
            if decided and self.ledger.why_refused(request) is None:
                self._asked[request] += 1
                self._programs.expect(request.workspaces(), program)
            return decided

    def _follow(self) -> None:
        pause, failures = self.SOON, 0
        while not self._stopped.wait(pause):
            held = None
            with self._turn:
                if self._stopped.is_set() or self.ledger.ended:
                    return
                try:
                    held = self._look(f"slot/{self.ledger.slots}")
                    if held is not None:
                        self._carry_out(Request.parse(held))
                    failures = 0
                except Exception as error:  # a thread has nobody to raise it to
                    failures += 1
                    if not _rendezvous.is_connected():
                        self._is_cut_off = True
                        return
                    if failures == self.MOST_FAILURES:
                        _config.say_once(
                            logging.WARNING,
                            f"jflux cannot reserve workspaces any more: {error}",
                        )
                        return
            pause = self.SOON if held is not None else min(2 * pause, self.SELDOM)

    # ---- One slot of the log, by all processes together ------------------------------------------

    def _carry_out(self, request: Request) -> None:
        try:
            self._try_to_carry_out(request)
        except _rendezvous.Absent as absent:  # in all processes, since none goes on without one
            why = (
                f"no more memory of the symmetric heap is reserved, since {absent}; "
                "jflux.shutdown() and jflux.init() in all processes make another heap"
            )
            self.ledger = self.ledger.end(why)
            _config.say_once(logging.WARNING, f"jflux: {why}")

    def _try_to_carry_out(self, request: Request) -> None:
        missing = self.ledger.missing(request)
        if missing:
            why = self.ledger.why_no_room(missing) or self._add(missing, "added")
            if why is not None:
                self._give_back()
                why = self.ledger.why_no_room(missing) or self._add(missing, "added_then")
            if why is None:
                self.ledger = self.ledger.hold(missing)
            else:
                self.ledger = self.ledger.refuse(request, why)
        self.ledger = self.ledger.next_slot()

    def _give_back(self) -> None:
        with self._state:
            given = self._to_give_back()
            self.ledger = self.ledger.give_back(given)
        if given:
            self._free_together([w for w in given if self._is_mine(w)], "given_back")

    def _to_give_back(self) -> list[Workspace]:
        unused = [(w.devices, w.size) for w in self._programs.unused()]
        asked = {request.entry(): count for request, count in self._asked.items()}
        texts = self._agree("unused", json.dumps([unused, asked]), self._all)
        said = {process: json.loads(text) for process, text in texts.items()}
        return given_back(
            self.ledger,
            {p: {Workspace(tuple(d), size) for d, size in u} for p, (u, _) in said.items()},
            {p: {Request.parse(e): n for e, n in a.items()} for p, (_, a) in said.items()},
            self._process_of,
        )

    def _free_together(self, copies: Collection[Workspace], why: str) -> None:
        """Both halves wait for kernels, so no process goes on before all are done: `state` is held
        while processes meet, and must not be held for them."""
        close(copies)
        self._agree(f"{why}/closed", "", self._all)
        free(copies)
        self._agree(f"{why}/freed", "", self._all)

    def _add(self, missing: Sequence[Workspace], step: str) -> str | None:
        failure, handles, added = "", {}, []
        try:
            for i, workspace in enumerate(missing):
                if self._is_mine(workspace):
                    where = workspace.devices, workspace.size
                    handles[i] = lib.heap_add_workspace(PLATFORM, *where)
                    added.append(workspace)
        except RuntimeError as error:
            failure = no_memory(missing, error)
        answers = self._agree(f"{step}/handles", json.dumps([failure, handles]), self._reached)
        others = {p: json.loads(text) for p, text in answers.items() if p != self._me}
        failure = failure or next((why for why, _ in others.values() if why), "")
        if not failure:
            failure = _attach(missing, added, [theirs for _, theirs in others.values()])
        failures = self._agree(step, failure, self._all)
        why = next((failures[process] for process in self._all if failures[process]), None)
        if why is not None:
            self._free_together(added, f"{step}/undone")
        return why

    def _is_mine(self, workspace: Workspace) -> bool:
        return any(self._process_of[device] == self._me for device in workspace.devices)

    def _agree(self, step: str, value: str, processes: Collection[int]) -> dict[int, str]:
        return self._gather(f"slot/{self.ledger.slots}/{step}/{min(processes)}", value, processes)


def _attach(
    missing: Sequence[Workspace], added: Collection[Workspace], others: Iterable[dict[str, str]]
) -> str:
    """Opens the other processes' copies; why it failed, or ""."""
    try:
        for handles in others:
            for i, handle in handles.items():
                workspace = missing[int(i)]
                if handle and workspace in added:
                    where = workspace.devices, workspace.size
                    lib.heap_attach_workspace(PLATFORM, *where, handle)
        for workspace in added:
            lib.heap_commit_workspace(PLATFORM, workspace.devices, workspace.size)
    except RuntimeError as error:
        return str(error)
    return ""


# ---- Of the native heap --------------------------------------------------------------------------


def no_memory(missing: Iterable[Workspace], error: RuntimeError) -> str:
    return (
        f"a workspace of {max(w.taken for w in missing)} bytes cannot be allocated ({error}); "
        "XLA_PYTHON_CLIENT_MEM_FRACTION leaves more beside JAX's pool"
    )


def unused_here() -> list[Workspace]:
    """What no executable of this process uses."""
    text = lib.heap_unused_workspaces(PLATFORM)
    found = []
    for item in text.split(";") if text else []:
        size, devices = item.split(":")
        found.append(Workspace(tuple(map(int, devices.split(","))), int(size)))
    return found


def close(workspaces: Iterable[Workspace]) -> None:
    """Before other processes free their copies."""
    for workspace in workspaces:
        on_a_thread(lib.heap_close_workspace, PLATFORM, workspace.devices, workspace.size)


def free(workspaces: Iterable[Workspace]) -> None:
    for workspace in workspaces:
        on_a_thread(lib.heap_free_workspace, PLATFORM, workspace.devices, workspace.size)


def close_and_free(workspaces: Collection[Workspace]) -> None:
    close(workspaces)
    free(workspaces)
