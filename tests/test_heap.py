"""jflux.init, jflux.shutdown, and running out of the symmetric heap."""

import functools
import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import (
    DEVICES,
    OPS,
    PLATFORM,
    RANKS,
    Call,
    assert_close,
    check_values,
    exact,
    exchanged,
    make_mesh,
    normal,
    operands,
    per_device,
    run,
)

import jflux
from jflux import _native, testing
from jflux._heap import _backends, _rendezvous
from jflux._ops.all_reduce import ALGORITHMS

SMALL = Call("all_gather_matmul", lead=(4,), k=8, n=4, dtype=jnp.bfloat16)


def _check(f, call, mesh):
    x, w = operands(call, mesh, "tp")
    scale = exact(call, mesh, "tp", abs(x), abs(w))
    assert_close(run(f, x, w), exact(call, mesh, "tp", x, w), scale, call.dtype, call.terms(RANKS))


def test_init_twice_with_the_same_settings(own_heap):
    own_heap(deadline_seconds=17)
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
        ({"deadline_seconds": float("nan")}, "deadline_seconds=nan must be positive"),
    ],
)
def test_settings_that_make_no_sense(settings, message):
    with pytest.raises(ValueError, match=message):
        jflux.init(**settings)


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


def _needed(op, call):
    """What a call says that it needs, that does not fit a heap of 1 MiB."""
    with pytest.raises(
        (jax.errors.JaxRuntimeError, ValueError, RuntimeError),
        match=rf"jflux.{op}.*needs \d+ bytes.*has 1048576; call jflux.init\(heap_bytes=",
    ) as caught:
        call()
    return int(re.search(r"needs (\d+) bytes", str(caught.value))[1])


@pytest.mark.parametrize("op", OPS)
def test_a_call_that_never_fits_says_how_much_it_needs(op, own_heap):
    """At once, and the heap still works."""
    own_heap(heap_bytes=1 << 20, deadline_seconds=30)
    mesh = make_mesh((RANKS,))
    k, n = (3008, 8) if Call(op).multiplies_after else (8, 1504)  # what travels is large
    call = Call(op, lead=(64,), k=k, n=n, dtype=jnp.bfloat16)
    start = time.monotonic()
    needed = _needed(op, lambda: check_values(call, mesh, "tp"))
    assert time.monotonic() - start < 20
    assert needed > RANKS * 64 * 1500 * 2  # a workspace holds as much as all ranks send
    check_values(SMALL, mesh, "tp")
    own_heap(heap_bytes=needed)  # what it asked for is enough
    check_values(call, mesh, "tp")


COLLECTIVES = {
    "all_reduce": {"algorithm": "two_shot"},
    "all_gather": {"tiled": True},
    "reduce_scatter": {"tiled": True},
    "all_to_all": {"split_axis": 0, "concat_axis": 0, "tiled": True},
}


@pytest.mark.parametrize("op", COLLECTIVES)
def test_a_collective_that_never_fits_says_how_much_it_needs(op, own_heap):
    own_heap(heap_bytes=1 << 20, deadline_seconds=30)
    options = COLLECTIVES[op]
    f = per_device(make_mesh((RANKS,)), lambda x: getattr(jflux, op)(x, axis_name="tp", **options))
    x = np.random.default_rng(0).integers(1, 16, (RANKS, RANKS, 1 << 17)).astype(np.float32)
    needed = _needed(op, lambda: run(jax.jit(f), x))
    check_values(SMALL, make_mesh((RANKS,)), "tp")  # the heap still works
    own_heap(heap_bytes=needed)
    sums = [x.sum(0)] * RANKS
    want = sums if op == "all_reduce" else exchanged(op, list(x), **options)
    np.testing.assert_array_equal(run(jax.jit(f), x), np.stack(want))


def test_calls_of_different_sizes_share_a_heap_that_holds_one_of_them(own_heap):
    """What one call leaves behind is of use to the next one, whatever its size."""
    mesh = make_mesh((RANKS,))
    calls = [
        Call("all_gather_matmul", lead=(4,), k=k, n=3, dtype=jnp.bfloat16)
        for k in (16, 3200, 16, 6400, 3200)
    ]
    # On GPUs each size keeps its own.
    own_heap(heap_bytes=(1200 if PLATFORM == "cpu" else 2400) << 10, deadline_seconds=10)
    for call in calls:
        check_values(call, mesh, "tp")


def test_more_calls_in_flight_than_the_heap_holds(own_heap):
    """Calls wait for each other's workspaces."""
    own_heap(heap_bytes=300 << 10, deadline_seconds=60)
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
    own_heap(heap_bytes=2 << 20, deadline_seconds=10)
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


@pytest.mark.skipif(PLATFORM != "gpu", reason="tests/cc wraps the CPU back end's")
def test_epochs_wrap():
    """A workspace's calls are counted in 32 bits, which a server has used up in days."""
    x = normal(0, (RANKS, 10, RANKS * 4, 16), jnp.bfloat16)  # ten steps

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
    want = [np.asarray(y, np.float32) for y in plain(x)]
    jax.block_until_ready(f(x))  # from now on there are all workspaces
    for before in (5, 6):  # the wrap falls on an even or odd step
        testing.set_epochs(2**32 - before)
        for _ in range(2):
            for y, w in zip(f(x), want, strict=True):
                np.testing.assert_allclose(np.asarray(y, np.float32), w, rtol=0.05, atol=0.05)


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

    def blocking_key_value_get(self, key, timeout_ms):
        if key not in self.entries:
            raise jax.errors.JaxRuntimeError(f"DEADLINE_EXCEEDED: {timeout_ms}")
        return self.entries[key]


def test_a_process_that_does_not_come(monkeypatch):
    store = _Store(**{"jflux/heap/1": "one"})
    monkeypatch.setattr(_rendezvous, "_store", lambda: store)
    me = jax.process_index()
    assert _rendezvous.exchange("heap", "mine", [me, 1], 5) == {me: "mine", 1: "one"}
    with pytest.raises(RuntimeError, match="process 2 did not come .*deadline_seconds"):
        _rendezvous.exchange("other", "mine", [me, 2], 5)


def test_claims(monkeypatch):
    store = _Store()
    monkeypatch.setattr(_rendezvous, "_store", lambda: store)
    assert _rendezvous.claim("entry", "first") == "first"
    assert _rendezvous.claim("entry", "second") == "first"
    with pytest.raises(jax.errors.JaxRuntimeError, match="UNAVAILABLE"):
        _rendezvous.claim("broken", "x")


def test_who_makes_a_heap():
    members = _backends.Members.of("cpu" if PLATFORM == "cpu" else "cuda")
    assert members.devices == tuple(d.id for d in jax.devices())
    assert members.processes == (members.me,) and members.lead
    assert (members.ordinals == ()) == (PLATFORM == "cpu")


@pytest.mark.parametrize(
    "platform, processes, name",
    [
        ("cpu", (0,), "cpu"),
        ("cpu", (0, 1), "cpu"),
        ("cuda", (0,), "cuda_peer"),
        ("cuda", (0, 1), "cuda_ipc"),
    ],
)
def test_which_back_end(platform, processes, name):
    members = _backends.Members(processes, 0, (0,), ())
    assert _backends.name_for(platform, members) == name


class _Native:
    """Of the native module: what the back ends call."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        def call(*args):
            self.calls.append((name, *args))
            return f"handle of {args[0]}" if name == "heap_export" else None

        return call


@pytest.mark.parametrize("processes", [(3,), (2, 3, 5)])
def test_a_heap_is_made_in_order(monkeypatch, processes):
    """Each other process's handle is attached after all are there, and before the links are
    probed."""
    native = _Native()
    monkeypatch.setattr(_backends, "lib", native)
    published = []

    def exchange(handle):
        published.append(handle)
        return {p: f"handle of process {p}" for p in processes}

    members = _backends.Members(processes, 3, (6, 7), (0, 1))
    _backends.create(_backends.CudaPeer(), members, 1 << 20, 5.0, exchange)
    leads = processes[0] == 3
    created = ("heap_create", "cuda", "cuda_peer", [6, 7], [0, 1], 1 << 20, 5.0, leads)
    others = [("heap_attach", "cuda", f"handle of process {p}") for p in processes if p != 3]
    exported = [("heap_export", "cuda")] if others else []
    assert native.calls == [created, *exported, *others, ("heap_probe", "cuda")]
    assert published == (["handle of cuda"] if others else [])


def test_workspaces_of_several_processes(monkeypatch):
    """They are added once, where the list in the store says, and again in the next heap."""
    native = _Native()
    monkeypatch.setattr(_backends, "lib", native)
    held = {}
    ipc, other = (_backends.CudaIpc(lambda name, entry: held.setdefault(name, entry)) for _ in "12")
    pair, four = np.array([[0, 1], [2, 3]]), np.array([[0, 1, 2, 3]])
    ipc.created(1000)
    other.created(1000)
    assert other.reserve(four, 600) and ipc.reserve(pair, 300)
    assert not ipc.reserve(four, 800) and not ipc.reserve(four, 800)  # and it takes no room
    assert ipc.reserve(pair, 100) and ipc.reserve(pair, 300) and ipc.reserve(four, 600)

    def added(groups, size, place):
        return ("heap_add_workspace", "cuda", groups.ravel().tolist(), size, place)

    assert native.calls == [
        added(four, 600, 0),
        added(pair, 300, 600),
        added(pair, 100, 900),
        added(four, 600, 0),
    ]
    native.calls.clear()
    ipc.created(2000)  # after a shutdown, with more room
    assert native.calls == [
        added(pair, 300, 600),
        added(four, 800, 900),
        added(pair, 100, 1700),
        added(four, 600, 0),
    ]
    assert len(held) == 4
    native.calls.clear()
    ipc.created(500)
    assert native.calls == [added(pair, 300, 0), added(pair, 100, 300)]


def test_a_claim_that_fails_is_made_again(monkeypatch):
    monkeypatch.setattr(_backends, "lib", _Native())
    held = {"cuda_workspace/0": "other/100"}
    answers = iter([held["cuda_workspace/0"], RuntimeError("UNAVAILABLE"), None])
    claimed = []

    def claim(name, entry):
        claimed.append(name)
        answer = next(answers)
        if isinstance(answer, RuntimeError):
            raise answer
        return answer or entry

    ipc = _backends.CudaIpc(claim)
    ipc.created(1000)
    pair = np.array([[0, 1]])
    with pytest.raises(RuntimeError, match="UNAVAILABLE"):
        ipc.reserve(pair, 100)
    assert ipc.reserve(pair, 100)
    assert claimed == ["cuda_workspace/0", "cuda_workspace/1", "cuda_workspace/1"]
