"""The agreement between processes on where workspaces are (jflux/_heap/_agreement.py), against a
fake store and random interleavings: no process, no clock, no thread."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import hypothesis
import numpy as np
import pytest
from harness import examples
from hypothesis import strategies as st

from jflux._heap import _agreement
from jflux._heap._agreement import Claim, Known, Workspace


@dataclasses.dataclass(frozen=True)
class Rules:
    """The transitions of a process; tests of the tests replace one of them by a wrong one."""

    next_claim: Callable[[Known, Workspace], Claim | None] = _agreement.next_claim
    learn: Callable[[Known, Claim, str], Known] = _agreement.learn
    # Of what is known, what this process has asked for, in its own order, and the heap's bytes.
    places: Callable[[Known, list[Workspace], int], dict[Workspace, int]] = (
        lambda known, asked, capacity: _agreement.places(known, capacity)
    )


class Store:
    """A list of slots; the first writer wins."""

    def __init__(self) -> None:
        self.slots: dict[int, str] = {}

    def claim(self, claim: Claim) -> str:
        return self.slots.setdefault(claim.slot, claim.entry)


@dataclasses.dataclass
class Process:
    """One process: what it still has to place, and its message on the way, if there is one."""

    requests: list[Workspace]
    rules: Rules
    capacity: int
    asked: list[Workspace] = dataclasses.field(default_factory=list)
    known: Known = Known()
    claim: Claim | None = None  # on its way to the store
    answer: str | None = None  # on its way back
    claims: int = 0
    placed: dict[Workspace, int | None] = dataclasses.field(default_factory=dict)

    def idle(self) -> bool:
        return not self.requests and self.claim is None

    def step(self, store: Store) -> None:
        """One event: a claim leaves, arrives at the store, or is answered; or a place is found."""
        if self.answer is not None:
            assert self.claim is not None
            self.known = self.rules.learn(self.known, self.claim, self.answer)
            self.claim = self.answer = None
        elif self.claim is not None:
            self.answer = store.claim(self.claim)
        else:
            wanted = self.requests[0]
            self.claim = self.rules.next_claim(self.known, wanted)
            if self.claim is not None:
                self.claims += 1
                return
            self.asked.append(wanted)
            place = self.rules.places(self.known, self.asked, self.capacity).get(wanted)
            assert self.placed.setdefault(wanted, place) == place, "an answer changed"
            self.requests.pop(0)

    def resend(self, store: Store) -> None:
        """The answer is lost after the store took the claim, and the claim is sent again."""
        if self.answer is not None:
            self.answer = store.claim(self.claim)


def run(
    orders: list[list[Workspace]],
    schedule: list[int],
    capacity: int,
    *,
    dead: frozenset[int] = frozenset(),
    rules: Rules = Rules(),  # noqa: B008 (frozen)
) -> list[Process]:
    """Runs processes with these requests, one event at a time.

    Args:
      schedule: whose event is next, and whether its answer is lost. After its end the processes
        that live go on one after another, so each is done or stuck.
      dead: these stop for good when the schedule ends, whatever they were doing.
    """
    store = Store()
    processes = [Process(list(order), rules, capacity) for order in orders]
    for choice in schedule:
        process = processes[choice // 2 % len(processes)]
        if choice % 2 == 1:
            process.resend(store)
        if not process.idle():
            process.step(store)
    # Three events for each claim, one for each request; a list is no longer than all requests.
    requests = sum(len(order) for order in orders)
    limit = 3 * (requests + 1) + requests
    for index, process in enumerate(processes):
        for _ in range(limit):
            if process.idle() or index in dead:
                break
            process.step(store)
        assert process.idle() or index in dead, "no progress"
    check(processes, store)
    return processes


def check(processes: list[Process], store: Store) -> None:
    # Everybody has the same answer: the same place, or no room.
    answers: dict[Workspace, int | None] = {}
    for process in processes:
        for workspace, place in process.placed.items():
            assert answers.setdefault(workspace, place) == place, f"two answers for {workspace}"
    # Places are within the heap, and do not overlap.
    ranges = sorted((p, p + w.size) for w, p in answers.items() if p is not None)
    assert all(0 <= begin and end <= processes[0].capacity for begin, end in ranges)
    for (_, end), (begin, _) in zip(ranges, ranges[1:], strict=False):
        assert end <= begin, f"workspaces overlap: {ranges}"
    # What a process knows is the list's beginning, without repetitions, and it took one claim for
    # each slot.
    held = [Workspace.parse(store.slots[i]) for i in range(len(store.slots))]
    assert len(set(held)) == len(held)
    for process in processes:
        assert list(process.known.workspaces) == held[: len(process.known.workspaces)]
        assert process.claims == len(process.known.workspaces) + (process.claim is not None)


WORKSPACES = st.builds(
    Workspace, groups=st.sampled_from(["a", "b", "c"]), size=st.sampled_from([1, 2, 3, 5, 8])
)
ORDERS = st.lists(st.lists(WORKSPACES, max_size=8), min_size=1, max_size=4)
SCHEDULES = st.lists(st.integers(0, 7), max_size=120)


@examples(300)
@hypothesis.given(ORDERS, SCHEDULES, st.integers(0, 40), st.frozensets(st.integers(0, 3)))
def test_any_interleaving(orders, schedule, capacity, dead):
    """Processes with requests of their own, in orders of their own; answers may be lost, and
    processes may stop for good."""
    run(orders, schedule, capacity, dead=dead)


@examples(100)
@hypothesis.given(ORDERS, SCHEDULES, st.integers(0, 40), st.integers(0, 40))
def test_another_heap_has_the_same_places_everywhere(orders, schedule, capacity, other):
    """After a shutdown the list is the same and the heap may have another size. Processes know
    more or less of the list, and place what they want of it."""
    processes = run(orders, schedule, capacity)
    full = max((p.known for p in processes), key=lambda known: len(known.workspaces))
    everywhere = _agreement.places(full, other)
    for process in processes:
        places = _agreement.places(process.known, other)
        assert places == {w: everywhere[w] for w in process.known.workspaces if w in everywhere}


@examples(100)
@hypothesis.given(st.lists(WORKSPACES, unique=True, max_size=10), st.integers(0, 40))
def test_no_room_is_only_said_where_there_is_none(workspaces, capacity):
    places = _agreement.places(Known(tuple(workspaces)), capacity)
    for i, workspace in enumerate(workspaces):
        before = sum(w.size for w in workspaces[:i] if w in places)
        assert (workspace in places) == (before + workspace.size <= capacity)


def _local_order(known: Known, asked: list[Workspace], capacity: int) -> dict[Workspace, int]:
    """A process places workspaces in the order in which it asked for them."""
    return _agreement.places(Known(tuple(dict.fromkeys(asked))), capacity)


def _smallest_first(known: Known, asked: list[Workspace], capacity: int) -> dict[Workspace, int]:
    """A place depends on what comes later in the list."""
    order = sorted(known.workspaces, key=lambda workspace: workspace.size)
    return _agreement.places(Known(tuple(order)), capacity)


def _own_entry(known: Known, claim: Claim, held: str) -> Known:
    """A process believes that it always wins."""
    return _agreement.learn(known, claim, claim.entry)


@pytest.mark.parametrize(
    "wrong",
    [Rules(places=_local_order), Rules(places=_smallest_first), Rules(learn=_own_entry)],
    ids=["local_order", "smallest_first", "own_entry"],
)
def test_mistakes_would_be_found(wrong):
    @hypothesis.settings(
        max_examples=300, phases=[hypothesis.Phase.generate], report_multiple_bugs=False
    )
    @hypothesis.given(ORDERS, SCHEDULES, st.integers(0, 40))
    def interleavings(orders, schedule, capacity):
        run(orders, schedule, capacity, rules=wrong)

    with pytest.raises(AssertionError):
        interleavings()


def test_a_lost_race():
    """Two processes want different workspaces at the same time."""
    a, b = Workspace("a", 2), Workspace("b", 3)
    first, second = Known(), Known()
    claims = [_agreement.next_claim(first, a), _agreement.next_claim(second, b)]
    assert claims == [Claim(0, "a/2"), Claim(0, "b/3")]
    first = _agreement.learn(first, claims[0], "b/3")
    second = _agreement.learn(second, claims[1], "b/3")
    assert first == second == Known((b,))
    assert _agreement.next_claim(second, b) is None
    claim = _agreement.next_claim(first, a)
    assert claim == Claim(1, "a/2")
    first = _agreement.learn(first, claim, "a/2")
    assert _agreement.places(first, 5) == {b: 0, a: 3}
    assert _agreement.places(first, 4) == {b: 0}
    assert _agreement.places(second, 4) == {b: 0}
    with pytest.raises(ValueError, match="slot 1 was claimed after 2 are known"):
        _agreement.learn(first, claim, "a/2")


def test_which_calls_share_a_workspace():
    """Those with the same table of groups and the same size; the table's shape counts."""
    two = np.array([[0, 1], [2, 3]])
    assert Workspace.of(two, 64) == Workspace.of(two.copy(), 64)
    others = [(two.reshape(1, 4), 64), (two.reshape(4, 1), 64), (two[:, ::-1], 64), (two, 65)]
    assert len({Workspace.of(*other) for other in others} | {Workspace.of(two, 64)}) == 5
    assert Workspace.parse(Workspace.of(two, 64).entry()) == Workspace.of(two, 64)
