"""The agreement between processes on workspaces (jflux/_heap/_agreement.py and _workspaces.Shared):
its rules, and processes in threads of one program, with random timing, against a model of their
memory."""

import dataclasses
import json
import random
import threading
import time
import types

import hypothesis
import numpy as np
import pytest
from harness import examples
from hypothesis import strategies as st

from jflux._heap import _agreement, _rendezvous, _waits, _workspaces
from jflux._heap._agreement import BLOCK, Ledger, Request, Workspace

# ---- The rules -----------------------------------------------------------------------------------


def test_which_calls_share_a_workspace():
    """Those over the same devices, in any order and in any table, of the same size."""
    two = np.array([[0, 1], [2, 3]])
    orders = [two, two[::-1], two[:, ::-1], np.array([[3, 2], [0, 1]])]
    assert len({Request.of(table, 64) for table in orders}) == 1
    workspaces = Request.of(two, 64).workspaces()
    assert workspaces == (Workspace((0, 1), 64), Workspace((2, 3), 64))
    assert Request.of(np.array([[1, 0]]), 64).workspaces() == workspaces[:1]
    assert Request.of(two, 65).workspaces() != workspaces
    assert Request.of(two.reshape(1, 4), 64) != Request.of(two, 64)


def test_all_orders_of_some_devices_take_one_workspace():
    """Of 24 orders of four devices."""
    from itertools import permutations

    ledger = Ledger(limit=BLOCK)
    for order in permutations(range(4)):
        request = Request.of(np.array([order]), 100)
        assert ledger.why_no_room(ledger.missing(request)) is None
        ledger = ledger.hold(ledger.missing(request))
    assert ledger.held == {Workspace((0, 1, 2, 3), 100)}


TABLES = st.sampled_from(
    [[[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0, 1, 2, 3]], [[3, 1]], [[0], [1], [2], [3]]]
)
REQUESTS = st.builds(
    lambda table, blocks: Request.of(np.array(table), blocks * BLOCK - 100),
    TABLES,
    st.integers(1, 6),
)


@hypothesis.given(REQUESTS)
def test_entries_are_read_as_they_were_written(request):
    assert Request.parse(request.entry()) == request


@examples(100)
@hypothesis.given(st.lists(REQUESTS, max_size=12), st.integers(0, 12))
def test_no_room_is_only_said_where_there_is_none(requests, blocks):
    """And one request that is too large takes nothing from those after it."""
    ledger = Ledger(limit=blocks * BLOCK)
    for request in requests:
        missing = ledger.missing(request)
        most = max((ledger.taken(d) + w.taken for w in missing for d in w.devices), default=0)
        why = ledger.why_no_room(missing)
        assert (why is None) == (most <= ledger.limit)
        if why is None:
            ledger = ledger.hold(missing)
        else:
            assert f"takes {missing[0].taken} bytes" in why and f"has {ledger.limit}" in why
            ledger = ledger.refuse(request, why)
    for device in range(4):
        assert ledger.taken(device) <= ledger.limit


def test_what_all_do_not_use_is_given_back():
    pair, other = Workspace((0, 1), 10), Workspace((2, 3), 10)
    ledger = Ledger(limit=BLOCK).hold([pair, other])
    process_of = {0: 0, 1: 1, 2: 1, 3: 1}

    def given(unused, asked):
        return _agreement.given_back(ledger, unused, asked, process_of)

    both, left = Request(((0, 1), (2, 3)), 10), Request(((0, 1),), 10)
    once = {0: {left: 1}, 1: {left: 1}}
    assert given({0: [pair], 1: [pair]}, once) == [pair]
    assert given({0: [pair], 1: [other]}, once) == [other]
    assert given({0: [], 1: [pair]}, once) == []
    assert given({0: [pair], 1: [pair]}, {0: {left: 2}, 1: {left: 1}}) == []
    # Process 1 is to make the request for both: it must get both.
    assert given({0: [pair], 1: [pair, other]}, {0: {both: 1}, 1: {}}) == []
    assert given({0: [pair], 1: [pair, other]}, {0: {both: 1}, 1: {both: 1}}) == [pair, other]


# ---- Processes -----------------------------------------------------------------------------------


class Machine:
    """The GPUs' memory, as the native heaps of all processes have it, and the store.

    Checks that nobody opens memory that is not there, or frees what somebody else has open.
    """

    def __init__(self, process_of, memory, rng):
        self.process_of, self.memory, self.rng = process_of, memory, rng
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.store = {}
        self.me = threading.local()
        self.copies = {p: {} for p in set(process_of.values())}  # Workspace -> Copy
        self.mistakes = []

    def pause(self):
        if self.rng.random() < 0.3:
            time.sleep(self.rng.random() * 0.002)

    def expect(self, condition, what):
        if not condition:
            self.mistakes.append(what)

    # What Shared asks of the store.
    def claim(self, name, value):
        self.pause()
        with self.lock:
            held = self.store.setdefault(name, value)
            self.changed.notify_all()
        self.pause()
        return held

    def look(self, name):
        with self.lock:
            return self.store.get(name)

    def gather(self, name, value, processes):
        self.pause()
        with self.lock:
            self.store[f"{name}/{self.me.process}"] = value
            self.changed.notify_all()
            there = lambda: all(f"{name}/{p}" in self.store for p in processes)  # noqa: E731
            assert self.changed.wait_for(there, 20), f"{name}: nobody comes"
            return {p: self.store[f"{name}/{p}"] for p in processes}

    # What Shared asks of the native module.
    def heap_add_workspace(self, platform, devices, size):
        self.pause()
        workspace = Workspace(tuple(devices), size)
        mine = [d for d in devices if self.process_of[d] == self.me.process]
        with self.lock:
            for device in mine:
                taken = sum(w.taken for w in self.copies[self.me.process] if device in w.devices)
                if taken + workspace.taken > self.memory:
                    raise RuntimeError(f"GPU {device} is full")
            self.copies[self.me.process][workspace] = Copy()
        others = {self.process_of[d] for d in devices} - {self.me.process}
        return f"{self.me.process}" if others else ""

    def heap_has_workspace(self, platform, devices, size):
        copy = self.copies[self.me.process].get(Workspace(tuple(devices), size))
        return copy is not None and copy.committed

    def heap_attach_workspace(self, platform, devices, size, handle):
        workspace, owner = Workspace(tuple(devices), size), int(handle)
        with self.lock:
            self.expect(workspace in self.copies[owner], f"{workspace} is not at process {owner}")
            self.copies[self.me.process][workspace].opened.add(owner)

    def heap_commit_workspace(self, platform, devices, size):
        copy = self.copies[self.me.process][Workspace(tuple(devices), size)]
        others = {self.process_of[d] for d in devices} - {self.me.process}
        self.expect(copy.opened == others, "a copy is missing")
        copy.committed = True

    # What XLA does with a program.
    def compile(self, request):
        self.pause()
        with self.lock:
            for workspace in self.mine(request):
                copy = self.copies[self.me.process].get(workspace)
                self.expect(copy is not None and copy.committed, f"{workspace} was promised")
                if copy is not None:
                    copy.users += 1

    def destroy(self, request):
        with self.lock:
            for workspace in self.mine(request):
                self.copies[self.me.process][workspace].users -= 1

    def mine(self, request):
        here = self.me.process
        return [w for w in request.workspaces() if here in map(self.process_of.get, w.devices)]

    def heap_close_workspace(self, platform, devices, size):
        copy = self.copies[self.me.process][Workspace(tuple(devices), size)]
        copy.opened.clear()
        copy.committed = False

    def heap_free_workspace(self, platform, devices, size):
        workspace = Workspace(tuple(devices), size)
        with self.lock:
            for process, copies in self.copies.items():
                opened = copies[workspace].opened if workspace in copies else ()
                self.expect(
                    self.me.process not in opened, f"process {process} still uses {workspace}"
                )
            copy = self.copies[self.me.process].pop(workspace)
            self.expect(copy.users == 0, f"an executable uses {workspace}")

    def heap_unused_workspaces(self, platform):
        with self.lock:
            unused = [w for w, c in self.copies[self.me.process].items() if c.users == 0]
        return ";".join(f"{w.size}:{','.join(map(str, w.devices))}" for w in unused)


class Program:
    """A lowered module."""


@dataclasses.dataclass
class Copy:
    opened: set = dataclasses.field(default_factory=set)
    committed: bool = False
    users: int = 0


def run(seed, shared=_workspaces.Shared, monkeypatch=None):
    """Processes that lower programs in orders of their own, and forget some of them. Returns the
    mistakes that the model of the memory has found."""
    rng = random.Random(seed)
    processes = rng.randint(2, 4)
    each = rng.randint(1, 2)
    process_of = {d: d // each for d in range(processes * each)}
    blocks = rng.randint(2, 8)
    machine = Machine(process_of, (blocks + rng.choice([-1, 0, 5])) * BLOCK, rng)
    monkeypatch.setattr(_workspaces, "lib", machine)
    node = {p: [q for q in range(processes) if nodes == 1 or q % 2 == p % 2]
            for nodes in [rng.randint(1, 2)] for p in range(processes)}  # fmt: skip
    devices = {p: [d for d in process_of if process_of[d] in node[p]] for p in range(processes)}
    tables = []
    for p in range(processes):
        if len(devices[p]) > 1:
            tables += [[devices[p]], [devices[p][:2]], [rng.sample(devices[p], len(devices[p]))]]
            half = len(devices[p]) // 2  # two groups, which may have other processes
            tables.append([devices[p][:half], devices[p][half : 2 * half]])
    if not tables:
        return []
    requests = [
        Request.of(np.array(rng.choice(tables)), rng.randint(1, 5) * BLOCK - 8) for _ in range(8)
    ]
    answers, known = [{} for _ in range(processes)], []

    def live(process):
        machine.me.process = process
        order = list(range(len(requests)))
        random.Random(seed * 10 + process).shuffle(order)
        one = Process(machine, shared, process, node[process], blocks * BLOCK)
        known.append(one)
        for i in order:
            request = requests[i]
            if not any(process_of[d] == process for group in request.groups for d in group):
                continue
            program = Program()
            granted = one.shared.reserve(request, program) is None
            answers[process].setdefault(request, []).append(granted)
            if granted:
                machine.compile(request)
                if rng.random() < 0.5:
                    machine.destroy(request)
            del program

    threads = [threading.Thread(target=_noting(live, machine), args=(p,)) for p in range(processes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "no progress"
    for one in known:
        one.shared.stop(wait=False)
    for one in known:
        one.shared._thread.join(5)
    # All know a beginning of the same log, and say the same of it.
    longest = max((one.shared.ledger for one in known), key=lambda ledger: ledger.slots)
    for one in known:
        ledger = one.shared.ledger
        for request, why in ledger.refused.items():
            machine.expect((why is None) == (longest.refused.get(request) is None), "two verdicts")
        if ledger.slots == longest.slots:
            machine.expect(ledger.held == longest.held, "two ledgers")
    for request in requests:
        said = {tuple(answer[request]) for answer in answers if request in answer}
        machine.expect(len(said) < 2, f"two answers to {request}: {said}")
    return machine.mistakes


def _noting(function, machine):
    def call(*args):
        try:
            function(*args)
        except Exception as error:
            machine.mistakes.append(repr(error))

    return call


class Process:
    def __init__(self, machine, shared, me, node, limit):
        def as_me(function):
            def call(*args):
                machine.me.process = me  # also on the thread that follows the log
                return function(*args)

            return call

        self.shared = shared(
            limit, process_of=machine.process_of, me=me, reached=node,
            gather=as_me(machine.gather), claim=as_me(machine.claim), look=as_me(machine.look),
        )  # fmt: skip
        self.shared.SOON = self.shared.SELDOM = 0.001
        self.shared.start()


@pytest.mark.parametrize("first", range(0, 100, 20))
def test_any_timing(first, monkeypatch):
    for seed in range(first, first + 20):
        assert run(seed, monkeypatch=monkeypatch) == [], seed


class FreesAtOnce(_workspaces.Shared):
    """Frees before the others have let go."""

    def _agree(self, step, value, processes):
        if step.endswith("/closed"):
            return {}
        return super()._agree(step, value, processes)


class OwnOpinion(_workspaces.Shared):
    """Gives back what this process does not use, whatever the others say."""

    def _agree(self, step, value, processes):
        texts = super()._agree(step, value, processes)
        return dict.fromkeys(texts, value) if step == "unused" else texts


class ForgetsWhoAsked(_workspaces.Shared):
    """Gives back what another process will ask for."""

    def _agree(self, step, value, processes):
        texts = super()._agree(step, value, processes)
        if step == "unused":
            for process, text in texts.items():
                texts[process] = json.dumps([json.loads(text)[0], {}])
        return texts


class OwnVerdict(_workspaces.Shared):
    """Does not listen whether the others had memory."""

    def _agree(self, step, value, processes):
        texts = super()._agree(step, value, processes)
        return dict.fromkeys(texts, value) if step == "added" else texts


@pytest.mark.parametrize("wrong", [FreesAtOnce, OwnOpinion, ForgetsWhoAsked, OwnVerdict])
def test_mistakes_would_be_found(wrong, monkeypatch):
    monkeypatch.setattr(Machine, "gather", _impatient(Machine.gather))
    assert any(run(seed, wrong, monkeypatch) for seed in range(60))


def _impatient(gather):
    """Processes that disagree may wait for each other."""

    def call(self, name, value, processes):
        with self.lock:
            self.store[f"{name}/{self.me.process}"] = value
            self.changed.notify_all()
            there = lambda: all(f"{name}/{p}" in self.store for p in processes)  # noqa: E731
            if not self.changed.wait_for(there, 0.5):
                raise RuntimeError(f"{name}: nobody comes")
            return {p: self.store[f"{name}/{p}"] for p in processes}

    return call


def test_a_refused_request_is_refused_for_good(monkeypatch):
    """Also when there is room later: other processes may have lowered the reference by then."""
    machine = Machine({0: 0, 1: 1}, 100 * BLOCK, random.Random(0))
    monkeypatch.setattr(_workspaces, "lib", machine)
    machine.gather = lambda name, value, processes: dict.fromkeys(processes, _answer(name, value))
    machine.me = types.SimpleNamespace(process=0)  # of all threads: the main one has others wait
    one = Process(machine, _workspaces.Shared, 0, [0], 2 * BLOCK)
    one.shared.stop(wait=True)
    pair = np.array([[0, 1]])
    too_large = Request.of(pair, 3 * BLOCK)
    assert "it has" in one.shared.reserve(too_large, Program())
    one.shared.ledger = dataclasses.replace(one.shared.ledger, limit=10 * BLOCK)
    assert "it has" in one.shared.reserve(too_large, Program())
    assert one.shared.ledger.slots == 1


def _answer(name, value):
    return json.dumps([[], {}]) if "unused" in name else value


def test_one_process_keeps_what_it_asks_for(monkeypatch):
    """Also what no executable uses yet, while others make room for another group's; and as long as
    a program is compiled, while another one finds no room."""
    machine = Machine(dict.fromkeys(range(4), 0), 100 * BLOCK, random.Random(0))
    monkeypatch.setattr(_workspaces, "lib", machine)
    machine.me = types.SimpleNamespace(process=0)  # of all threads: the main one has others wait
    alone = _workspaces.Alone(2 * BLOCK)
    left, large = Request.of(np.array([[0, 1]]), BLOCK), Request.of(np.array([[2, 3]]), 2 * BLOCK)
    for request in (left, large):
        assert alone.reserve(request, Program()) is None
    both = Request.of(np.array([[0, 1], [2, 3]]), BLOCK)
    program = Program()
    for _ in range(2):  # two calls of one program
        assert alone.reserve(both, program) is None
        assert "it has" in alone.reserve(large, Program())
    machine.compile(both)
    del program
    assert "it has" in alone.reserve(large, Program())
    assert alone.ledger.held == set(both.workspaces()) == set(machine.copies[0])
    machine.destroy(both)
    assert alone.reserve(large, Program()) is None
    assert machine.mistakes == []


def test_an_interrupt_while_memory_is_given_back(monkeypatch):
    """What the ledger holds is there: the next program finds its room."""
    machine = Machine(dict.fromkeys(range(4), 0), 100 * BLOCK, random.Random(0))
    monkeypatch.setattr(_workspaces, "lib", machine)
    machine.me = types.SimpleNamespace(process=0)
    alone = _workspaces.Alone(2 * BLOCK)
    small, large = (Request.of(np.array([[0, 1], [2, 3]]), n * BLOCK) for n in (1, 2))
    assert alone.reserve(small, Program()) is None

    def interrupted(work, *args):
        _waits.on_a_thread(work, *args)
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(_workspaces, "on_a_thread", interrupted)
        alone.reserve(large, Program())
    assert alone.ledger.held == set(machine.copies[0])
    assert alone.reserve(small, Program()) is None
    machine.compile(small)
    machine.destroy(small)
    assert alone.reserve(large, Program()) is None
    assert alone.ledger.held == set(large.workspaces()) == set(machine.copies[0])
    assert machine.mistakes == []


def test_a_kernel_that_waits_while_memory_is_given_back(monkeypatch):
    """Process 0 has called a program, and lowers one that needs room. To free memory it waits for
    its kernel, which waits for process 1, which has yet to lower the program: its workspace is
    there, so it can."""
    machine = Machine({0: 0, 1: 1}, 100 * BLOCK, random.Random(0))
    monkeypatch.setattr(_workspaces, "lib", machine)
    pair = np.array([[0, 1]])
    first, called, large = (Request.of(pair, blocks * BLOCK) for blocks in (1, 2, 3))
    called_by_both, closing = threading.Event(), threading.Event()
    met = threading.Barrier(2, timeout=5)

    def close(platform, devices, size):
        closing.set()
        if machine.me.process == 0:
            machine.expect(
                called_by_both.wait(5), "process 1 cannot lower what process 0 waits for"
            )
        Machine.heap_close_workspace(machine, platform, devices, size)

    machine.heap_close_workspace = close
    answers = {}

    def live(process):
        machine.me.process = process
        one = Process(machine, _workspaces.Shared, process, [0, 1], 5 * BLOCK)
        answers[process] = [one.shared.reserve(first, Program())]
        program = Program()
        met.wait()
        if process == 1:
            assert closing.wait(5)
        answers[process].append(one.shared.reserve(called, program))
        if process == 1:
            called_by_both.set()
        answers[process].append(one.shared.reserve(large, program))

    threads = [threading.Thread(target=_noting(live, machine), args=(p,)) for p in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert machine.mistakes == []
    assert answers == {0: [None] * 3, 1: [None] * 3}


@pytest.mark.parametrize("step", ["unused", "closed", "freed", "handles", "added"])
def test_a_process_that_answers_no_more(step, monkeypatch):
    """Programs are lowered without it: with the workspaces that there are, and no others."""
    machine = Machine({0: 0, 1: 1}, 100 * BLOCK, random.Random(0))
    monkeypatch.setattr(_workspaces, "lib", machine)
    machine.me = types.SimpleNamespace(process=0)  # of all threads: the main one has others wait

    def commit(platform, devices, size):
        machine.copies[0][Workspace(devices, size)].committed = True

    machine.heap_attach_workspace, machine.heap_commit_workspace = lambda *args: None, commit
    machine.gather = lambda name, value, processes: dict.fromkeys(processes, value)
    one = Process(machine, _workspaces.Shared, 0, [0, 1], 6 * BLOCK).shared
    one.stop(wait=True)
    unused, used, large = (Request.of(np.array([[0, 1]]), size * BLOCK) for size in (1, 2, 4))
    program = Program()
    assert one.reserve(unused, Program()) is None and one.reserve(used, program) is None
    asked = []

    def gather(name, value, processes):
        asked.append(name)
        if step in name:
            raise _rendezvous.Absent([1], 60)
        return dict.fromkeys(processes, value)

    one._gather = gather
    for _ in range(2):
        why = one.reserve(large, program)
        assert "process 1 did not come" in why and "jflux.shutdown()" in why
        assert one.reserve(used, program) is None
    assert len([name for name in asked if step in name]) == 1
