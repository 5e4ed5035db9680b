"""jflux.init, jflux.shutdown, and running out of the symmetric heap."""

import dataclasses
import functools
import gc
import json
import logging
import pickle
import re
import signal
import time
import types
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import DEVICES, OPS, PLATFORM, RANKS, check_values, make_mesh, run
from jax._src import distributed
from workers.common import free_port

import jflux
from jflux import _config, _heap, _native, testing
from jflux._heap import _making, _nodes, _rendezvous, _report, _waits
from jflux._heap._agreement import Workspace
from jflux._ops._spec import all_ops
from jflux._ops.collectives.all_reduce import ALGORITHMS
from jflux._stress.calls import Call, assert_close, exact, normal, operands, per_device

SMALL = Call("all_gather_matmul", lead=(4,), k=8, n=4, dtype=jnp.bfloat16)


def _check(f, call, mesh):
    x, w = operands(call, mesh, "tp")
    scale = exact(call, mesh, "tp", abs(x), abs(w))
    assert_close(run(f, x, w), exact(call, mesh, "tp", x, w), scale, call.dtype, call.terms(RANKS))


def test_init_twice_with_the_same_settings(own_heap):
    own_heap(heap_bytes=None, deadline_seconds=17)
    jflux.init(deadline_seconds=17)
    check_values(SMALL, make_mesh((RANKS,)), "tp")


def test_init_with_other_settings_says_what_there_is(own_heap):
    own_heap(deadline_seconds=17)
    with pytest.raises(RuntimeError, match=r"deadline_seconds=17.*shutdown"):
        jflux.init(deadline_seconds=18)
    check_values(SMALL, make_mesh((RANKS,)), "tp")


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"heap_bytes": 0}, "heap_bytes=0 must be positive"),
        ({"heap_bytes": -5}, "heap_bytes=-5 must be positive"),
        ({"deadline_seconds": 0}, "deadline_seconds=0 must be positive"),
        ({"warn_seconds": 0}, "warn_seconds=0 must be positive"),
        ({"deadline_seconds": float("nan")}, "deadline_seconds=nan must be positive"),
        (
            {"deadline_seconds": float("inf")},
            "deadline_seconds=inf must be positive, and at most 1e9",
        ),
        ({"node": ["a", "b", "c"] * 5}, "node has 15 names, and this process has"),
    ],
)
def test_settings_that_make_no_sense(settings, message, own_heap):
    jflux.shutdown()
    with pytest.raises(ValueError, match=message):
        jflux.init(**settings)
    check_values(SMALL, make_mesh((RANKS,)), "tp")  # they are forgotten


@pytest.mark.parametrize("size", [4e9, "4G"])
def test_a_size_is_a_number_of_bytes(size):
    with pytest.raises(TypeError, match="heap_bytes=.* must be an int, such as 4 << 30"):
        jflux.init(heap_bytes=size)


def test_a_size_of_numpy(own_heap):
    own_heap(heap_bytes=np.int64(64 << 20))
    assert jflux.heap_report().limit == 64 << 20
    check_values(SMALL, make_mesh((RANKS,)), "tp")


def test_settings_are_keyword_only():
    with pytest.raises(TypeError):
        jflux.init(1 << 30)


def test_the_first_call_makes_the_heap(own_heap):
    jflux.shutdown()
    check_values(SMALL, make_mesh((RANKS,)), "tp")
    with pytest.raises(RuntimeError, match="exists"):
        jflux.init(deadline_seconds=5)


def test_compiled_functions_outlive_the_heap(own_heap):
    mesh = make_mesh((RANKS,))
    f = jax.jit(per_device(mesh, SMALL.bind("tp")))
    _check(f, SMALL, mesh)
    for deadline in (20, 30, 40):
        own_heap(deadline_seconds=deadline)
        _check(f, SMALL, mesh)


def test_without_a_heap_a_compiled_function_says_so(own_heap):
    """On GPUs, where JAX has forgotten it at the shutdown, it is lowered again, and makes one."""
    mesh = make_mesh((RANKS,))
    f = jax.jit(per_device(mesh, SMALL.bind("tp")))
    _check(f, SMALL, mesh)
    jflux.shutdown()
    if PLATFORM == "cpu":
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"jflux.init\(\)"):
            jax.block_until_ready(f(*operands(SMALL, mesh, "tp")))
        jflux.init()
    _check(f, SMALL, mesh)


def test_shutdown_twice(own_heap):
    jflux.shutdown()
    jflux.shutdown()


def _takes_the_kernel(f, *args):
    """Whether the program calls the op's own target."""
    with jflux.config(strict=False):
        return "jflux_" in jax.jit(f).lower(*args).as_text()


def _needed(op, f, *args):
    """What a call says that it needs, where there is no room for it."""
    with pytest.raises(
        NotImplementedError,
        match=rf"jflux.{op} .*it takes \d+ bytes of the symmetric heap.*heap_bytes",
    ) as caught:
        jax.jit(f).lower(*args)
    return int(re.search(r"takes (\d+) bytes", str(caught.value))[1])


@pytest.mark.parametrize("op", OPS)
def test_a_call_that_does_not_fit(op, own_heap, caplog):
    """It runs another way, with the same values, and says so once. In strict mode it is an error.
    Other calls still find room."""
    own_heap(heap_bytes=2 << 20)
    mesh = make_mesh((RANKS,))
    k, n = (3008, 8) if Call(op).multiplies_after else (8, 1504)  # what travels is large
    call = Call(op, lead=(256,), k=k, n=n, dtype=jnp.bfloat16)
    f, args = per_device(mesh, call.bind("tp")), operands(call, mesh, "tp")
    needed = _needed(op, f, *args)
    assert needed > 2 << 20
    with jflux.config(strict=False):
        for _ in range(2):
            check_values(call, mesh, "tp")
    said = [r.message for r in caplog.records if f"jflux.{op} " in r.message]
    assert len(said) == 1 and f"takes {needed} bytes" in said[0] and "heap_bytes" in said[0]
    check_values(SMALL, mesh, "tp")
    own_heap(heap_bytes=needed)  # what it asked for is enough
    check_values(call, mesh, "tp")


COLLECTIVES = {
    "all_reduce": {"algorithm": "two_shot"},
    "all_gather": {"tiled": True},
    "reduce_scatter": {"tiled": True},
    "all_to_all": {"split_axis": 0, "concat_axis": 0, "tiled": True},
    "ragged_all_to_all": {},
}


@pytest.mark.parametrize("op", COLLECTIVES)
def test_a_collective_that_does_not_fit(op, own_heap):
    own_heap(heap_bytes=2 << 20)
    options = COLLECTIVES[op]
    spec = all_ops()[op]
    f = per_device(make_mesh((RANKS,)), lambda x: spec.on(x, axis_name="tp", **options))
    columns = 1 << 15 if op == "all_gather" else 1 << 17  # its results are RANKS times as large
    x = np.random.default_rng(0).integers(1, 16, (RANKS, RANKS, columns)).astype(np.float32)
    needed = _needed(op, f, x)
    assert needed > 2 << 20
    want = spec.communication(2, **options).exact(list(x))
    with jflux.config(strict=False):
        np.testing.assert_array_equal(run(jax.jit(f), x), np.stack(want))
    check_values(SMALL, make_mesh((RANKS,)), "tp")  # the heap still works
    own_heap(heap_bytes=needed)
    np.testing.assert_array_equal(run(jax.jit(f), x), np.stack(want))


def test_a_heap_of_any_size(own_heap):
    """Sizes are no multiples of anything."""
    for size in (1, (1 << 20) + 1, int(1.1 * 2**30), (3 << 20) - 7):
        own_heap(heap_bytes=size)
        with jflux.config(strict=size > 1):
            if size == 1:
                assert not _takes_the_kernel(
                    per_device(make_mesh((RANKS,)), SMALL.bind("tp")),
                    *operands(SMALL, make_mesh((RANKS,)), "tp"),
                )
            elif PLATFORM == "cpu" or size >= 2 << 20:
                check_values(SMALL, make_mesh((RANKS,)), "tp")


@pytest.mark.skipif(PLATFORM != "gpu", reason="the CPU back end reserves nothing")
def test_growing_calls(own_heap):
    """A server with prefills of many lengths: nothing ends it, whatever the heap has."""
    mesh = make_mesh((RANKS,))
    for limit in (None, 40 << 20):
        own_heap(heap_bytes=limit)
        with jflux.config(strict=limit is None):
            for rows in (64, 256, 1024, 4096, 64):
                call = Call("all_gather_matmul", lead=(rows,), k=512, n=64, dtype=jnp.bfloat16)
                check_values(call, mesh, "tp")


@pytest.mark.skipif(PLATFORM != "gpu", reason="takes gigabytes")
def test_prefills_of_all_lengths(own_heap):
    """In one process, with the default heap, and with one that has room for the shorter ones. Of
    small integers, whose products float32 sums exactly, in any order."""
    mesh = make_mesh((RANKS,))
    rng = np.random.default_rng(0)
    block = jnp.asarray(rng.integers(-2, 3, (RANKS, 64, 4096)), jnp.bfloat16)
    w = jnp.asarray(rng.integers(-2, 3, (RANKS, 4096, 512)), jnp.bfloat16)
    f, plain = (
        jax.jit(per_device(mesh, functools.partial(module.all_gather_matmul, axis_name="tp")))
        for module in (jflux, jflux.reference)
    )
    with jflux.config(strict=False):
        for limit in (None, 1 << 30):
            own_heap(heap_bytes=limit)
            for rows in (1024 << i for i in range(8)):
                x = jnp.tile(block, (1, rows // RANKS // 64, 1))
                assert jnp.array_equal(f(x, w), plain(x, w)), rows
            taken = jflux.heap_report().taken
            assert taken >= 2 << 30 if limit is None else taken <= limit


@pytest.mark.skipif(PLATFORM != "gpu", reason="the CPU back end reserves nothing")
def test_workspaces_of_dead_programs_are_given_back(own_heap):
    own_heap(heap_bytes=RANKS * 6 << 20)
    mesh = make_mesh((RANKS,))
    for k in (512, 640, 1536, 512, 3000):  # no two of the larger ones fit together
        call = Call("all_gather_matmul", lead=(256,), k=k, n=64, dtype=jnp.bfloat16)
        check_values(call, mesh, "tp")
        jax.clear_caches()
        gc.collect()


@pytest.mark.skipif(PLATFORM != "cpu", reason="takes the place of what GPUs reserve")
def test_a_program_reserves_as_long_as_it_may_be_compiled(monkeypatch):
    """By its module, which JAX keeps while the lowered program, or the jitted function, lives."""
    programs = []

    class Noting:
        def reserve(self, request, program):
            programs.append(weakref.ref(program))

    monkeypatch.setitem(_heap._reserved, PLATFORM, Noting())
    mesh = make_mesh((RANKS,))
    op, args = SMALL.bind("tp"), operands(SMALL, mesh, "tp")
    f = jax.jit(per_device(mesh, lambda x, w: (op(x, w), op(x[1:], w))))
    lowered = f.lower(*args)
    assert len(programs) == 2 and len({id(program()) for program in programs}) == 1
    jax.clear_caches()
    gc.collect()
    assert programs[0]() is not None
    del lowered, f
    jax.clear_caches()
    gc.collect()
    assert programs[0]() is None


def test_what_grows_with_every_shape_has_an_end(monkeypatch):
    calls, workspace = _report.Calls(), Workspace((0, 1), 1 << 20)
    for rows in range(5000):
        calls.note("cpu", [workspace], f"op float32[{rows}, 8]")
    (held,) = calls.rows("cpu")
    assert held.calls[0] == "op float32[0, 8]" and len(held.calls) + held.more == 1000
    monkeypatch.setattr(_config, "_said", set())
    for rows in range(5000):
        _config.say_once(logging.DEBUG, f"{rows} rows")
    assert len(_config._said) <= 1000


def test_the_report_lists_calls_by_workspace(own_heap):
    own_heap()
    assert jflux.heap_report().workspaces == ()
    check_values(SMALL, make_mesh((RANKS,)), "tp")
    check_values(SMALL, make_mesh((RANKS,), order=range(RANKS - 1, -1, -1)), "tp")
    report = jflux.heap_report()
    (held,) = report.workspaces  # both orders of the devices share it
    assert held.devices == tuple(sorted(d.id for d in DEVICES[:RANKS]))
    (call,) = held.calls
    assert call.startswith("all_gather_matmul bfloat16[4, 8], bfloat16[8, ") and held.more == 0
    assert 0 < held.bytes <= report.taken <= report.limit
    assert "all_gather_matmul" in str(report) and "MiB per device" in str(report)
    jflux.shutdown()
    assert "no symmetric heap" in str(jflux.heap_report())


def test_calls_of_different_sizes_share_a_heap_that_holds_one_of_them(own_heap):
    """What one call leaves behind is of use to the next one, whatever its size."""
    mesh = make_mesh((RANKS,))
    calls = [
        Call("all_gather_matmul", lead=(4,), k=k, n=3, dtype=jnp.bfloat16)
        for k in (16, 3200, 16, 6400, 3200)
    ]
    # On GPUs each size keeps its own, in whole blocks.
    own_heap(heap_bytes=(1200 if PLATFORM == "cpu" else 8000) << 10, deadline_seconds=10)
    for call in calls:
        check_values(call, mesh, "tp")


def test_more_calls_in_flight_than_the_heap_holds(own_heap):
    """Calls wait for each other's workspaces."""
    own_heap(heap_bytes=300 << 10 if PLATFORM == "cpu" else 2 << 20, deadline_seconds=60)
    mesh = make_mesh((RANKS,))
    op = SMALL.bind("tp")
    x, w = operands(SMALL, mesh, "tp")
    f = jax.jit(per_device(mesh, lambda x, w: [op(x * s, w) for s in (1, 2, 4, 8, 16, 32)]))
    pending = [f(x, w) for _ in range(8)]
    want, scale = (exact(SMALL, mesh, "tp", a, b) for a, b in ((x, w), (abs(x), abs(w))))
    for ys in pending:
        for power, y in enumerate(ys):
            assert_close(y, want * 2**power, scale * 2**power, SMALL.dtype, SMALL.k)


def test_many_calls_do_not_use_up_the_heap(own_heap):
    """Workspaces are reused: 60 programs of different shapes in a heap of a few of them."""
    own_heap(heap_bytes=4 << 20, deadline_seconds=10)
    mesh = make_mesh((RANKS,))
    for n in range(1, 31):
        check_values(Call("all_gather_matmul", lead=(n,), k=7, n=n, dtype=jnp.bfloat16), mesh, "tp")


@pytest.mark.skipif(PLATFORM != "cpu", reason="the CPU back end's table")
def test_usage():
    """Nothing is in use between calls."""
    check_values(SMALL, make_mesh((RANKS,)), "tp")
    for _ in range(100):  # the last rank gives its workspace back after the result is there
        in_use, touched = _native.lib.heap_usage("cpu")
        if in_use == 0:
            break
        time.sleep(0.01)
    assert in_use == 0 < touched


def test_poison_reaches_a_free_workspace(own_heap):
    """Reading what nobody wrote gives NaN: waits are skipped, so it is read before it arrives."""
    own_heap(deadline_seconds=10)
    mesh = make_mesh((RANKS,))
    f = jax.jit(per_device(mesh, SMALL.bind("tp")))
    args = operands(SMALL, mesh, "tp")
    jax.block_until_ready(f(*args))
    for _ in range(2):  # again after calls that overwrote it
        testing.poison_workspaces()
        testing.poison_workspaces()
        with testing.planted_faults(skip_waits=True, max_delay_us=50_000):
            y = np.asarray(f(*args))
        assert np.isnan(y.astype(np.float32)).any()
        _check(f, SMALL, mesh)


def test_epochs_wrap():
    """The flags of LL packets repeat after 2^32 calls, which a server has made in days. Nobody
    clears the workspaces from outside: what large calls have left where small ones have nothing is
    there when its flags come again, unless the small calls after 2^31 or 2^32 have cleared it."""

    def body(module, x):
        def step(_, x):
            w, ranks = x.T / 16, (RANKS, x.shape[0] // RANKS, -1)
            pieces = {"split_axis": 0, "concat_axis": 1}
            ys = [module.all_reduce(x, axis_name="tp", algorithm=a) for a in ALGORITHMS]
            return None, ys + [
                module.all_gather(x, axis_name="tp"),
                module.reduce_scatter(x.reshape(ranks), axis_name="tp"),
                module.all_to_all(x.reshape(ranks), axis_name="tp", **pieces),
                module.all_gather_matmul(x, w, axis_name="tp"),
                module.matmul_reduce_scatter(x, w, axis_name="tp"),
                module.matmul_all_to_all(x, w, axis_name="tp", **pieces),
                module.matmul_all_reduce(x, w, axis_name="tp"),
                module.matmul_all_reduce(jnp.tile(x, (20, 1)), w, axis_name="tp"),
            ]

        return jax.lax.scan(step, None, x)[1]

    mesh = make_mesh((RANKS,))
    f, plain = (
        jax.jit(per_device(mesh, functools.partial(body, m), check_vma=False))
        for m in (jflux, jflux.reference)
    )

    def operand(seed, rows):  # ten steps
        return normal(seed, (RANKS, 10, RANKS * rows, 16), jnp.bfloat16)

    def check(x, epochs):
        want = plain(x)
        testing.set_epochs(epochs)
        with testing.planted_faults(max_delay_us=500):
            for y, w in zip(f(x), want, strict=True):
                y, w = np.asarray(y, np.float32), np.asarray(w, np.float32)
                np.testing.assert_allclose(y, w, rtol=0.05, atol=0.05)

    for x in (operand(0, 8), operand(1, 1)):
        jax.block_until_ready(f(x))  # from now on there are all workspaces
    for wraps, before in ((1, 5), (2, 6)):  # a wrap falls on an even or odd step
        # Epochs are never set back, so a flag comes again after a wrap alone.
        first, large = (wraps - 1) * 2**32, 2000 * wraps
        check(operand(2 * wraps, 8), first + large)
        check(operand(0, 1), first + 2**31 - before)
        check(operand(1, 1), first + 2**32 - before)
        check(operand(2 * wraps + 1, 8), first + 2**32 + large)


def test_planted_faults_before_the_first_call(own_heap):
    """They take effect though there is no heap yet."""
    jflux.shutdown()
    mesh = make_mesh((RANKS,))
    f = jax.jit(per_device(mesh, SMALL.bind("tp")))
    args = operands(SMALL, mesh, "tp")
    with testing.planted_faults(skip_waits=True, max_delay_us=50_000):
        wrong = [np.asarray(f(*args), np.float32) for _ in range(3)]
    want = exact(SMALL, mesh, "tp", *args)
    assert any(not np.allclose(y, want, rtol=0.1, atol=0.1) for y in wrong)
    _check(f, SMALL, mesh)


def test_every_device_has_a_segment():
    """Meshes over any subset of the devices, last ones first."""
    for count in range(2, RANKS + 1):
        mesh = make_mesh((count,), order=range(RANKS - 1, -1, -1))
        check_values(SMALL, mesh, "tp")
    assert len(DEVICES) == RANKS


class _Store:
    """JAX's key-value store, where some entries exist already and nobody else comes."""

    def __init__(self, **entries):
        self.entries = entries

    def key_value_set(self, key, value):
        if key in self.entries:
            raise jax.errors.JaxRuntimeError(f"ALREADY_EXISTS: key {key}")
        if key.endswith("/broken"):
            raise jax.errors.JaxRuntimeError("UNAVAILABLE: no connection")
        self.entries[key] = value

    def key_value_try_get(self, key):
        if key not in self.entries:
            raise jax.errors.JaxRuntimeError(f"NOT_FOUND: {key}")
        return self.entries[key]

    def blocking_key_value_get(self, key, timeout_ms):
        if key not in self.entries:
            time.sleep(timeout_ms / 1000)
            raise jax.errors.JaxRuntimeError(f"DEADLINE_EXCEEDED: {timeout_ms}")
        return self.entries[key]


SOON = _rendezvous.Patience(warn=0.05, give_up=0.2)


def test_a_process_that_does_not_come(monkeypatch, caplog):
    """All learn the same: from the first process."""
    store = _Store(**{"jflux/heap/1": "one", "jflux/other/1": "one"})
    monkeypatch.setattr(_rendezvous, "_store", lambda: store)
    monkeypatch.setattr(jax, "process_index", lambda: 0)
    assert _rendezvous.gather("heap", "mine", [0, 1], SOON) == {0: "mine", 1: "one"}
    assert json.loads(store.entries["jflux/heap/all"]) == {"0": "mine", "1": "one"}
    with pytest.raises(RuntimeError, match="process 2 did not come .*deadline_seconds") as caught:
        _rendezvous.gather("other", "mine", [0, 1, 2], SOON)
    assert caught.value.processes == (2,)
    again = pickle.loads(pickle.dumps(caught.value))  # as pools of processes pass errors on
    assert again.processes == (2,) and str(again) == str(caught.value)
    assert "has waited 0.05 s for process 2" in caplog.text
    for late in (1, 2):  # who reads the first one's answer
        monkeypatch.setattr(jax, "process_index", lambda late=late: late)
        monkeypatch.setattr(_rendezvous, "key_value_set", lambda name, value: True)
        with pytest.raises(_rendezvous.Absent, match="process 2 did not come"):
            _rendezvous.gather("other", "mine", [0, 1, 2], SOON)
    with pytest.raises(_rendezvous.Absent, match="process 0 did not come"):
        _rendezvous.gather("nobody", "mine", [0, 1, 2], SOON)


def test_a_first_process_that_comes_too_late(monkeypatch):
    """It learns that the others have given up, though all have come by then."""
    store = _Store()
    monkeypatch.setattr(_rendezvous, "_store", lambda: store)
    for process in (1, 2, 0):
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        with pytest.raises(_rendezvous.Absent, match="process 0 did not come"):
            _rendezvous.gather("late", "here", [0, 1, 2], SOON)


def test_several_processes_that_do_not_come(monkeypatch):
    """They are waited for together: those that have come wait no longer than for one."""
    store = _Store()
    monkeypatch.setattr(_rendezvous, "_store", lambda: store)
    monkeypatch.setattr(jax, "process_index", lambda: 0)
    start = time.monotonic()
    with pytest.raises(_rendezvous.Absent, match="processes 1, 2, 3, 4, 5, 6 did not come"):
        _rendezvous.gather("alone", "here", range(7), SOON)
    assert time.monotonic() - start < 3 * SOON.give_up


def test_signals_are_handled_while_processes_meet(monkeypatch):
    """A preempted process ends at once, also with a real store."""
    state = distributed.State()
    state.initialize(f"127.0.0.1:{free_port()}", 1, 0)
    monkeypatch.setattr(_rendezvous, "_store", lambda: state.client)
    monkeypatch.setattr(jax, "process_index", lambda: 0)

    class Preempted(Exception):
        pass

    def preempt(signum, frame):
        raise Preempted

    before = signal.signal(signal.SIGALRM, preempt)
    start = time.monotonic()
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(Preempted):
            _rendezvous.gather("nobody", "here", [0, 1], _rendezvous.Patience(20, 40))
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(Preempted):
            _waits.on_a_thread(time.sleep, 5)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        state.shutdown()
    assert time.monotonic() - start < 4


def test_the_store_knows_the_attempt(monkeypatch):
    """Processes of which one is new, or all with a new store, meet at one attempt."""
    came = functools.partial(_heap._come, "cpu", again=False)
    for store in (_Store(), _Store()):
        monkeypatch.setattr(_rendezvous, "_store", lambda store=store: store)
        assert [came(0), came(1)] == [1, 1]
        assert [came(0), came(1), came(1), came(1)] == [2, 2, 3, 4]  # 1 is replaced twice
        assert "process 1 has begun anew" in store.entries["jflux/cpu_heap/3/over"]
        assert came(0) == 4
        # Others have given up, and process 2 is late.
        store.entries["jflux/cpu_heap/4/failed"] = "process 2 did not come"
        assert [came(2), _heap._come("cpu", 3, again=True)] == [4, 5]


@pytest.mark.parametrize("where", [0, 1])
def test_an_attempt_that_a_process_leaves(monkeypatch, where):
    """Who waits there learns it, and goes to the next one."""
    store = _Store(**{"jflux/cpu_heap/1/over": "process 2 has begun anew"})
    monkeypatch.setattr(_rendezvous, "_store", lambda: store)
    monkeypatch.setattr(jax, "process_index", lambda: where)
    monkeypatch.setattr(_rendezvous, "TURN_SECONDS", 0.05)
    slowly = _rendezvous.Patience(20, 40)
    over = "cpu_heap/1/over"
    with pytest.raises(_rendezvous.Abandoned, match="process 2 has begun anew") as caught:
        _rendezvous.gather("cpu_heap/1/facts", "here", [0, 1, 2], slowly, over)
    assert str(pickle.loads(pickle.dumps(caught.value))) == "process 2 has begun anew"
    members = _making.Members((0, 1, 2), where, (where,), ())
    outcomes = iter([KeyboardInterrupt(), "process 2 has begun anew", ""])

    def make(attempt, platform, members):
        made.append(attempt)
        outcome = next(outcomes)
        if not isinstance(outcome, str):
            raise outcome
        if outcome:
            store.entries[f"jflux/cpu_heap/{attempt}/over"] = outcome
        return types.SimpleNamespace(absent=outcome)

    made: list[int] = []
    monkeypatch.setattr(_heap, "_make_at", make)
    monkeypatch.setattr(_heap.lib, "heap_shutdown", lambda platform, keep: None)
    with pytest.raises(KeyboardInterrupt):
        _heap._make("cpu", members, again=False)
    assert "KeyboardInterrupt" in store.entries["jflux/cpu_heap/2/over"]
    assert _heap._make("cpu", members, again=False).absent == ""
    assert made == [2, 3, 4]


def test_claims(monkeypatch):
    store = _Store()
    monkeypatch.setattr(_rendezvous, "_store", lambda: store)
    assert _rendezvous.look("entry") is None
    assert _rendezvous.claim("entry", "first") == "first"
    assert _rendezvous.claim("entry", "second") == "first" == _rendezvous.look("entry")
    with pytest.raises(jax.errors.JaxRuntimeError, match="UNAVAILABLE"):
        _rendezvous.claim("broken", "x")


def test_who_makes_a_heap():
    members = _making.Members.of("cpu" if PLATFORM == "cpu" else "cuda")
    assert members.devices == tuple(d.id for d in jax.devices())
    assert members.processes == (members.me,)
    assert (members.ordinals == ()) == (PLATFORM == "cpu")


class _Native:
    """Of the native module: what the making of a heap calls.

    Args:
      fails: the call that fails.
      links: what the probe finds.
    """

    def __init__(self, fails=None, links=()):
        self.calls, self.fails, self.links = [], fails, links

    def __getattr__(self, name):
        def call(*args):
            self.calls.append((name, *args))
            if name == self.fails:
                raise RuntimeError(f"{name} does not work")
            if name in ("heap_export", "heap_add_workspace"):
                return "mine"
            return {"heap_links": self.links, "probe_bytes": 999, "cuda_peers": []}.get(name)

        return call

    @property
    def names(self):
        return [name for name, *_ in self.calls]


def _make_among(monkeypatch, native, processes, unusable=""):
    """Process 3 makes a heap on GPUs, with others that do as it does."""
    monkeypatch.setattr(_making, "lib", native)
    monkeypatch.setattr(_making._workspaces, "lib", native)

    def of(process):
        return _nodes.Facts(process, "host", (2 * process, 2 * process + 1), ("", ""), 1 << 20)

    def gather(step, value, among, seconds=None):
        gathered.append((step, native.names.count("heap_probe")))
        if step == "facts":
            return {p: value if p == 3 else of(p).dump() for p in among}
        return {p: value.replace("mine", f"of process {p}") for p in among}

    gathered = []
    members = _making.Members(processes, 3, (6, 7), (0, 1))
    facts = dataclasses.replace(of(3), unusable=unusable)
    return _making.make("cuda", members, facts, 5.0, 1.0, gather), gathered


@pytest.mark.parametrize("processes", [(3,), (2, 3, 5)])
def test_a_heap_is_made_in_order(monkeypatch, processes):
    """Handles are attached after all processes have made their parts, and before the links are
    probed. Processes copy in turn: the links' rates are those of one process."""
    native = _Native()
    job, gathered = _make_among(monkeypatch, native, processes)
    devices = tuple(d for p in processes for d in (2 * p, 2 * p + 1))
    others = [p for p in processes if p != 3]
    area = "cuda", devices, 999
    assert native.calls == [
        ("heap_create", "cuda", "cuda", (6, 7), (0, 1), 1 << 20, 5.0, 1.0, processes[0] == 3),
        ("heap_export", "cuda"),
        *(("heap_attach", "cuda", f"of process {p}") for p in others),
        ("probe_bytes", len(devices)),
        ("heap_add_workspace", *area),
        *(("heap_attach_workspace", *area, f"of process {p}") for p in others),
        ("heap_commit_workspace", *area),
        *(("heap_probe", *area, step) for step in range(3)),
        ("heap_close_workspace", *area),
        ("heap_free_workspace", *area),
        ("heap_links", "cuda"),
    ]
    copies = [f"probe_copies_{p}" for p in processes]
    steps = ["created", "attached", "probe_added", "probe_attached", *copies]
    steps += ["probe_check", "probe_talk", "probe_closed"]
    node = [f"{step}/{processes[0]}" for step in steps]
    assert [step for step, _ in gathered] == ["facts", *node, "outcome"]
    copied = [probes for step, probes in gathered if step.startswith("probe_copies")]
    assert copied == [int(p >= 3) for p in processes]
    assert job.why_not(np.array([devices])) is None
    assert job.heap_bytes == 1 << 20


@pytest.mark.parametrize(
    "fails", ["heap_create", "heap_attach", "heap_add_workspace", "heap_probe"]
)
def test_a_heap_that_cannot_be_made(monkeypatch, fails):
    """It is let go of and freed, and calls on its devices know why."""
    native = _Native(fails)
    job, _ = _make_among(monkeypatch, native, (2, 3))
    assert native.names[-3:] == ["heap_close", "heap_shutdown", "heap_links"]
    why = job.why_not(np.array([[4, 6]]))
    assert why == f"process 2: {fails} does not work", why


@pytest.mark.parametrize("fails", [None, "cuda_peers"])
def test_a_heap_over_slow_links(monkeypatch, fails):
    """Nothing is known of GPUs that other processes have."""
    native = _Native(fails, links=[(6, 4, 22.0, 22.0, 3.0)])
    job, _ = _make_among(monkeypatch, native, (2, 3))
    assert job.why_not(np.array([[4, 6]])) is None and job.link_gbps == 22
    assert job.no_atomics.startswith("process 2: GPU 0 may have none on device 4's")


def test_a_process_without_kernels(monkeypatch):
    """It comes, makes nothing, and calls that include its devices know why."""
    native = _Native()
    job, _ = _make_among(monkeypatch, native, (2, 3), unusable="no kernels here")
    assert "heap_create" not in native.names
    assert job.why_not(np.array([[4, 6]])).endswith("no kernels here")


def test_processes_that_never_come(monkeypatch):
    def gather(step, value, among, seconds=None):
        raise _rendezvous.Absent([5], 60)

    monkeypatch.setattr(_making, "lib", native := _Native())
    members = _making.Members((3, 5), 3, (6, 7), (0, 1))
    facts = _nodes.Facts(3, "host", (6, 7), ("", ""), 1 << 20)
    job = _making.make("cuda", members, facts, 5.0, 1.0, gather)
    assert native.calls == [] and job.absent
    assert "process 5 did not come" in job.why_not(np.array([[6, 7]]))
