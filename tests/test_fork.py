"""os.fork after jflux has run: the child exits as it should, is told that it can run no jflux call,
and leaves the parent alone."""

import os
import subprocess
import sys

import jax
import pytest
from workers.common import xla_flags

pytestmark = [
    pytest.mark.skipif(jax.default_backend() == "gpu", reason="forks of the CPU back end"),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork"),
]

HEAD = """
import concurrent.futures, multiprocessing, os, sys, time
import jax, numpy as np
from jax.sharding import PartitionSpec as P
import jflux

mesh = jax.make_mesh((4,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,))

def summed(x):
    return jflux.all_reduce(x, axis_name="tp")

def make(f):
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P("tp"), out_specs=P()))

f, x = make(summed), np.ones(4, np.float32)

def wait(pid):
    end = time.monotonic() + 60
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    return "hangs"

assert f(x).sum() == 4
"""


def run(body):
    """Runs it in a process of its own, which it ends by printing "done"."""
    env = os.environ | {"XLA_FLAGS": xla_flags(4)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", HEAD + body],
        env=env, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("done\n")
    return done.stdout


def test_a_child_exits():
    """Also one that has imported what runs at exit; the parent runs on, and exits as well."""
    run("""
pids = []
for code in (0, 7):
    pid = os.fork()
    if pid == 0:
        sys.exit(code)
    pids.append(pid)
assert [wait(pid) for pid in pids] == [0, 7]
assert f(x).sum() == 4
assert make(lambda x: summed(x) * 2)(x).sum() == 8
print("done")
""")


def test_children_of_multiprocessing():
    """With the start method "fork", for work in numpy."""
    run("""
def norm(n):
    return float(np.linalg.norm(np.full((n, n), 2.0)))

with multiprocessing.get_context("fork").Pool(2) as pool:
    assert pool.map(norm, [1, 2, 3]) == [2.0, 4.0, 6.0]
process = multiprocessing.get_context("fork").Process(target=norm, args=(3,))
process.start()
process.join(60)
assert process.exitcode == 0 and f(x).sum() == 4
print("done")
""")


def test_a_child_that_uses_jflux():
    """Gets an error, and no hang: from a new call, from one that was compiled before, also in a
    thread, from init and shutdown. It was forked inside of blocks of switches, and leaves one. The
    parent's heap stays as it is."""
    text = run("""
def in_a_thread():
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(f, x).result()

def tries():
    calls = {
        "lower": lambda: make(lambda x: summed(x) + 1).lower(x),
        "compiled": lambda: f(x),
        "thread": in_a_thread,
        "init": jflux.init,
        "shutdown": jflux.shutdown,
    }
    for name, call in calls.items():
        try:
            call()
        except RuntimeError as error:
            print(name, error, flush=True)
        else:
            sys.exit(1)
    sys.exit(0)

with jflux.config(always=True):
    assert f(x).sum() == 4
    with jflux.config(strict=True):
        pid = os.fork()
    if pid == 0:
        tries()
    print("child", wait(pid))
    assert f(x).sum() == 4
print("done")
""")
    lines = text.splitlines()
    assert "child 0" in lines
    names = "lower compiled thread init shutdown".split()
    for name, line in zip(names, lines, strict=False):
        assert line.startswith(f"{name} this process was forked from process "), text
        assert "before the first jflux call" in line and "spawn" in line


def test_a_fork_before_the_first_call():
    """Of a process that has imported jflux alone: both can use it."""
    env = os.environ | {"XLA_FLAGS": xla_flags(4)}
    early = HEAD.replace("mesh =", "pid = os.fork()\nmesh =")
    code = early + "\nif pid == 0:\n    sys.exit(3)\nprint(wait(pid))"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env=env, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout == "3\n", done.stdout + done.stderr


def test_clear_backends_frees_the_client():
    """Which jflux knows, for the sake of forks; a child is told of the heap all the same."""
    run("""
import gc, weakref
import jax.extend.backend

client = weakref.ref(jax.devices()[0].client)
del f, mesh
jax.extend.backend.clear_backends()
gc.collect()
assert client() is None
pid = os.fork()
if pid == 0:
    try:
        jflux.init()
    except RuntimeError:
        sys.exit(5)
    sys.exit(0)
assert wait(pid) == 5
print("done")
""")
