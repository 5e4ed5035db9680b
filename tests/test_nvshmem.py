"""NVSHMEM as the heap's memory (jflux/_heap/_nvshmem.py), as far as it goes without GPUs: finding,
loading and starting it, and exchanges between nodes by XLA's collectives. tests/nvshmem_gpu.py has
the rest."""

import logging
import os
import pathlib
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilers import cxx, run
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jflux
from jflux._heap import _making, _nodes, _nvshmem
from jflux._heap._nodes import Facts, Job
from jflux._ops import _node_exchange as between
from jflux._ranks import meshes

HERE = pathlib.Path(__file__).resolve().parent


def facts(process, **more):
    fields = {"backend": "nvshmem"} | more
    return Facts(process, "h", (process,), ("",), 1 << 30, build="1", **fields)


# ---- Verdicts ------------------------------------------------------------------------------------


def test_settings_leave_what_the_user_has_set():
    environment = {"NVSHMEM_SYMMETRIC_SIZE": "7G"}
    _nvshmem.apply(_nvshmem.settings(1 << 30), environment)
    assert environment["NVSHMEM_SYMMETRIC_SIZE"] == "7G"
    assert environment["NVSHMEM_DISABLE_NVLS"] == "1"
    fresh: dict[str, str] = {}
    _nvshmem.apply(_nvshmem.settings(1 << 30), fresh)
    assert int(fresh["NVSHMEM_SYMMETRIC_SIZE"]) > 1 << 30


def test_all_processes_give_one_verdict():
    assert _nvshmem.why_not([facts(0), facts(1)]) is None
    assert _nvshmem.why_not([facts(0), facts(1, no_nvshmem="no plugin")]) == "process 1: no plugin"
    assert _nvshmem.why_not([facts(0), facts(1, unusable="too old")]) == "process 1: too old"
    assert "process 1 did not ask" in _nvshmem.why_not([facts(0), facts(1, backend="")])
    assert "there is one process" in _nvshmem.why_not([facts(0)])
    started = [facts(0, arena=1 << 20), facts(1, arena=1 << 20)]
    assert _nvshmem.why_not(started) is None
    assert "process 1 was not there" in _nvshmem.why_not([started[0], facts(1)])


def test_an_arena_that_is_there_limits_the_heap():
    assert _nodes.limit_of([facts(0), facts(1)]) == 1 << 30
    assert _nodes.limit_of([facts(0, arena=1 << 20), facts(1, arena=1 << 20)]) == 1 << 20
    assert _nodes.limit_of([facts(0, arena=1 << 40)]) == 1 << 30
    job = Job.of([facts(0, arena=1 << 20)], {}, backend="nvshmem")
    assert job.heap_bytes == 1 << 20 and job.backend == "nvshmem"


def test_facts_travel_with_what_they_say_of_nvshmem():
    one = facts(0, no_nvshmem="why", arena=5)
    assert Facts.load(one.dump()) == one


def test_why_a_process_cannot_use_it(monkeypatch, tmp_path):
    assert "is for GPUs" in _nvshmem.why_not_here("cpu", 1)
    assert "a process for each GPU, and this one has 2" in _nvshmem.why_not_here("cuda", 2)
    monkeypatch.setenv("JFLUX_NVSHMEM_PLUGIN", str(tmp_path / "none.so"))
    assert "no NVSHMEM plugin" in _nvshmem.why_not_here("cuda", 1)
    (tmp_path / "none.so").write_text("not a library")
    why = _nvshmem.why_not_here("cuda", 1)
    assert "plugin does not load" in why or "NVSHMEM does not load" in why


def test_the_library_is_found_where_the_user_says(monkeypatch, tmp_path):
    (tmp_path / "lib").mkdir()
    library = tmp_path / "lib" / "libnvshmem_host.so.3"
    library.touch()
    monkeypatch.setenv("NVSHMEM_HOME", str(tmp_path))
    assert _nvshmem.host_library() == str(library)


# ---- The start -----------------------------------------------------------------------------------


class Store:
    """`gather` of several threads that are processes."""

    def __init__(self, processes):
        self.barrier = threading.Barrier(processes)
        self.values: dict[str, dict[int, str]] = {}

    def gather_of(self, me):
        def gather(step, value, processes):
            self.values.setdefault(step, {})[me] = value
            self.barrier.wait(20)
            return dict(self.values[step])

        return gather


class FakeLibrary:
    """What the native module has of NVSHMEM."""

    def __init__(self, failure=None, no_id=False):
        self.failure, self.no_id, self.started = failure or {}, no_id, []

    def nvshmem_unique_id(self):
        if self.no_id:
            raise RuntimeError("no interface")
        return "a5" * 128

    def nvshmem_start(self, identity, rank, world, ordinal, arena_bytes):
        assert identity == "a5" * 128
        if rank in self.failure:
            raise RuntimeError(self.failure[rank])
        self.started.append((rank, world, ordinal, arena_bytes))


def start_together(monkeypatch, library, processes=(0, 2, 5)):
    """What each of these processes gets from `start`."""
    monkeypatch.setattr(_nvshmem, "lib", library)
    for name in _nvshmem.settings(0):
        monkeypatch.setenv(name, "0")
    store, all_facts = Store(len(processes)), [facts(p) for p in processes]
    results: dict[int, str] = {}

    def one(me):
        gather = store.gather_of(me)
        results[me] = _nvshmem.start(all_facts, me, me + 10, 1 << 20, gather)

    threads = [threading.Thread(target=one, args=(p,)) for p in processes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


def test_all_processes_start_with_one_id(monkeypatch):
    library = FakeLibrary()
    assert start_together(monkeypatch, library) == {0: "", 2: "", 5: ""}
    assert sorted(library.started) == [
        (0, 3, 10, 1 << 20),
        (1, 3, 12, 1 << 20),
        (2, 3, 15, 1 << 20),
    ]


def test_a_start_that_fails_is_known_to_all(monkeypatch):
    results = start_together(monkeypatch, FakeLibrary(failure={1: "no memory"}))
    assert set(results.values()) == {"process 2: no memory"}
    results = start_together(monkeypatch, FakeLibrary(no_id=True))
    assert set(results.values()) == {"process 0: no interface"}


def test_nvshmem_is_started_once(monkeypatch):
    monkeypatch.setattr(_nvshmem, "lib", None)  # nothing is called
    all_facts = [facts(p, arena=1 << 20) for p in range(2)]
    assert _nvshmem.start(all_facts, 0, 0, 1 << 20, None) == ""


def test_a_start_that_hangs_is_given_up():
    begin = time.monotonic()
    why = _nvshmem.within(0.2, lambda: time.sleep(3))
    assert "did not start within 0.2 s" in why and time.monotonic() - begin < 2


# ---- The plugin's interface, with a fake one -----------------------------------------------------


@pytest.fixture(scope="module")
def fake(tmp_path_factory):
    if cxx() is None:
        pytest.skip("no compiler")
    library = tmp_path_factory.mktemp("fake") / "libfake.so"
    include = pathlib.Path(jflux.include_dir())
    if not (include / "nvshmem" / "plugin.h").exists():
        include = HERE.parent / "cc"
    run(cxx(), "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC",
        f"-I{include}", HERE / "workers" / "fake_nvshmem_plugin.cc", "-o", library)  # fmt: skip
    return library


def in_a_process(fake, program, **environment):
    """Output of a program that has the fake plugin's path in `plugin`, and `lib`."""
    head = f"from jflux._native import lib\nplugin = {str(fake)!r}\n"
    done = subprocess.run(
        [sys.executable, "-c", head + program], capture_output=True, text=True, timeout=120,
        env=os.environ | environment, cwd=HERE.parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


START = """
lib.nvshmem_load("", plugin)
assert lib.nvshmem_arena_bytes() == 0
identity = lib.nvshmem_unique_id()
def start(identity):
    try:
        lib.nvshmem_start(identity, 0, 2, 0, 16 << 20)
    except RuntimeError as error:
        print("error:", error)
"""


def test_load_and_start(fake):
    program = START + (
        "start('xyz'); start('00' * 128); start(identity); print(lib.nvshmem_arena_bytes() >> 20)\n"
        "start(identity)"
    )
    assert in_a_process(fake, program).splitlines() == [
        "error: malformed NVSHMEM id: xyz",
        "error: another id",
        "16",
        "error: NVSHMEM has been started already",
    ]


def test_a_start_that_fails_leaves_nothing(fake):
    out = in_a_process(
        fake, START + "start(identity); print(lib.nvshmem_arena_bytes())", FAKE_FAILURE="no memory"
    )
    assert out.splitlines() == ["error: no memory", "0"]


def test_a_plugin_of_another_build_is_refused(fake):
    program = """
try:
    lib.nvshmem_load("", plugin)
except RuntimeError as error:
    print(error)
try:
    lib.nvshmem_unique_id()
except RuntimeError as error:
    print(error)
"""
    first, second = in_a_process(fake, program, FAKE_VERSION="-1").splitlines()
    assert first == f"{fake} belongs to another build of jflux: reinstall jflux"
    assert second == "NVSHMEM is not loaded"


def test_a_real_start_that_hangs_is_given_up(fake):
    program = START + (
        "from jflux._heap import _nvshmem\n"
        "print(_nvshmem.within(0.5, lambda: lib.nvshmem_start(identity, 0, 2, 0, 1 << 20)))\n"
        "import os, sys; sys.stdout.flush(); os._exit(0)"
    )
    assert "did not start within 0.5 s" in in_a_process(fake, program, FAKE_SECONDS="30")


# ---- jflux.init ----------------------------------------------------------------------------------


def test_init_says_why_the_heap_is_the_usual_one(caplog):
    jflux.shutdown()
    try:
        with caplog.at_level(logging.WARNING, "jflux"):
            with jflux.config(strict=False):
                jflux.init(backend="nvshmem")
        assert jflux.heap_report().platform == jax.default_backend().replace("gpu", "cuda")
        job = jflux._heap._jobs[jflux._heap.default_platform()]
        assert job.instead and job.backend != "nvshmem"
        jflux.shutdown()
        with jflux.config(strict=True), pytest.raises(RuntimeError, match="no memory of NVSHMEM"):
            jflux.init(backend="nvshmem")
    finally:
        jflux.shutdown()
    with pytest.raises(ValueError, match="backend='ipc' must be None or \"nvshmem\""):
        jflux.init(backend="ipc")


def test_a_start_that_fails_makes_the_usual_heap(monkeypatch):
    """_making.make, with NVSHMEM's start answered."""
    jflux.shutdown()
    members = _making.Members.of("cpu")
    one = Facts(members.me, "h", members.devices, ("",) * len(members.devices), 64 << 20,
                backend="nvshmem")  # fmt: skip
    monkeypatch.setattr(_nvshmem, "why_not", lambda facts: "process 0: no memory")
    try:
        job = _making.make(
            "cpu", members, one, 60.0, 5.0, lambda step, value, processes: {0: value}
        )
        assert (job.backend, job.instead) == ("cpu", "process 0: no memory")
        assert not job.outcomes[0].failure
    finally:
        jflux._native.lib.heap_shutdown("cpu", False)


# ---- Exchanges between nodes, by XLA's collectives -----------------------------------------------

GROUPS = {
    "whole": ((0, 1, 2, 3, 4, 5, 6, 7),),
    "halves": ((0, 4), (1, 5), (2, 6), (3, 7)),
    "reversed": ((6, 4, 2, 0), (7, 5, 3, 1)),
}


@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize("shape", [(), (3,), (5, 2)])
def test_exchanges(name, shape):
    if len(jax.devices()) < 8:
        pytest.skip("needs 8 devices")
    groups = GROUPS[name]
    mesh, world = Mesh(np.array(jax.devices()[:8]), ("tp",)), len(groups[0])
    x = np.random.default_rng(0).standard_normal((8, world, *shape)).astype(jnp.bfloat16)
    place = {rank: (group, i) for group in groups for i, rank in enumerate(group)}

    def call(f):
        body = jax.shard_map(
            lambda x: f(x[0])[None], mesh=mesh, in_specs=P("tp"), out_specs=P("tp")
        )
        return np.asarray(jax.jit(body)(x))

    got = call(lambda x: between.exchange(x, ("tp",), groups))
    gathered = call(lambda x: between.gather(x, ("tp",), groups))
    for rank, (group, i) in place.items():
        for j, peer in enumerate(group):
            np.testing.assert_array_equal(got[rank, j], x[peer, i])
            np.testing.assert_array_equal(gathered[rank, j], x[peer])
    for steps in range(1, world):
        pairs = [(group[(i + steps) % world], rank) for rank, (group, i) in place.items()]
        shifted = call(lambda x, s=steps, p=pairs: between.shift(x, ("tp",), groups, s, p))
        for rank, (group, i) in place.items():
            np.testing.assert_array_equal(shifted[rank], x[group[(i + steps) % world]])


def test_groups_as_devices():
    mesh = Mesh(np.array(jax.devices()[:8][::-1]).reshape(2, -1), ("a", "b"))
    ids = np.array([d.id for d in mesh.devices.ravel()])
    count = len(ids)
    groups = ((0, count - 1),) if count < 4 else ((0, 2), (3, 1))
    params = between.Params(between.Kind.GATHER, ("a", "b"), groups)
    np.testing.assert_array_equal(between.group_table(mesh, params), ids[np.array(groups)])
    assert meshes.group_table(mesh, ("a", "b")).tolist() == [ids.tolist()]


def test_what_the_kernel_takes():
    plan = jflux._native.lib.node_exchange_plan
    assert (
        plan(0, 2, 0, 100) == plan(0, 2, 0, 101) < plan(0, 2, 0, 1 << 20) < plan(0, 4, 0, 1 << 20)
    )
    assert plan(2, 4, 3, 1 << 20) < plan(1, 4, 0, 1 << 20)
    for bad, why in (
        ((3, 2, 0, 8), "unknown kind"),
        ((0, 1, 0, 8), "1 nodes"),
        ((0, 9, 0, 8), "9 nodes, the kernel takes 2 to 8"),
        ((2, 4, 0, 8), "steps"),
        ((2, 4, 4, 8), "steps"),
        ((1, 4, 1, 8), "steps"),
        ((1, 4, 0, 0), "0 bytes"),
    ):
        with pytest.raises(ValueError, match=why):
            plan(*bad)


def test_exchange_of_a_wrong_shape():
    mesh = Mesh(np.array(jax.devices()[:2]), ("tp",))
    f = jax.shard_map(
        lambda x: between.exchange(x, ("tp",), ((0, 1),)), mesh=mesh, in_specs=P("tp"),
        out_specs=P("tp"),
    )  # fmt: skip
    with pytest.raises(ValueError, match="its first dimension must be 2"):
        f(jnp.ones((6, 3)))
