"""jflux.register: programs that another process has lowered, exported or compiled."""

import os
import subprocess
import sys

import jax
import pytest
from workers.common import xla_flags

pytestmark = pytest.mark.skipif(
    jax.default_backend() == "gpu", reason="a device of several processes"
)

HEAD = """
import pickle, sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
import jflux

def place(first):
    devices = np.array(jax.devices()[first : first + 4])
    mesh = jax.sharding.Mesh(devices, ("tp",))
    return mesh, NamedSharding(mesh, P("tp"))

mesh, split = place(0)
x = np.arange(32, dtype=np.float32).reshape(8, 4)
want = 4 * x @ np.ones((4, 4), np.float32)
shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
"""

SAVE = """
def f(x):
    y = jflux.all_gather_matmul(x, jnp.ones((4, 4)), axis_name="tp")
    return jflux.all_reduce(y, axis_name="tp")

f = jax.jit(
    jax.shard_map(f, mesh=mesh, in_specs=P("tp"), out_specs=P(), check_vma=False),
    in_shardings=split,
)
with jflux.config(strict=True, always=True):
    if sys.argv[1] == "export":
        from jax import export
        checks = [
            export.DisabledSafetyCheck.custom_call(name)
            for name in ("jflux_all_gather_matmul", "jflux_all_reduce")
        ]
        saved = export.export(f, disabled_checks=checks)(shape).serialize()
    else:
        from jax.experimental import serialize_executable
        saved = pickle.dumps(serialize_executable.serialize(f.lower(shape).compile()))
open(sys.argv[2], "wb").write(saved)
"""

LOAD = """
saved = open(sys.argv[2], "rb").read()
if "register" in sys.argv:
    jflux.register()
if "small" in sys.argv:
    jflux.shutdown()
    jflux.init(heap_bytes=4096)
if "elsewhere" in sys.argv:
    mesh, split = place(4)
if sys.argv[1] == "export":
    from jax import export
    f = jax.jit(export.deserialize(saved).call)
else:
    from jax.experimental import serialize_executable
    f = serialize_executable.deserialize_and_load(*pickle.loads(saved))
for _ in range(2):
    np.testing.assert_array_equal(f(jax.device_put(x, split)), want)
print("ran")
"""


def run(code, *argv):
    count = 8 if "elsewhere" in argv else 4
    env = os.environ | {"XLA_FLAGS": xla_flags(count)}
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", HEAD + code, *map(str, argv)],
        env=env, capture_output=True, text=True, timeout=200,
    )  # fmt: skip


@pytest.fixture(scope="module", params=["export", "executable"])
def saved(request, tmp_path_factory):
    """(kind, file) of a program that another process has lowered."""
    if request.param == "export":
        pytest.importorskip("flatbuffers")
    file = tmp_path_factory.mktemp("saved") / request.param
    done = run(SAVE, request.param, file)
    assert done.returncode == 0, done.stderr
    return request.param, file


def test_a_program_from_another_process(saved):
    done = run(LOAD, *saved, "register")
    assert done.returncode == 0 and done.stdout == "ran\n", done.stderr


def test_without_register(saved):
    """XLA's own error, which the docs explain."""
    done = run(LOAD, *saved)
    assert done.returncode != 0 and "No FFI handler registered for jflux_all_g" in done.stderr


def test_a_heap_without_room(saved):
    """The program's calls cannot take another path any more."""
    done = run(LOAD, *saved, "register", "small")
    assert done.returncode != 0
    assert "RESOURCE_EXHAUSTED" in done.stderr and "jflux.init(heap_bytes=...)" in done.stderr


def test_other_devices(saved):
    kind, _ = saved
    if kind != "export":
        pytest.skip("an executable has its devices")
    done = run(LOAD, *saved, "register", "elsewhere")
    assert done.returncode != 0
    assert "the program was lowered for other devices; lower it again for these" in done.stderr


def test_where_no_heap_can_be_made(monkeypatch):
    import jflux

    monkeypatch.setattr("jflux._heap.why_no_heap", lambda platform: "the disk is on fire")
    with pytest.raises(RuntimeError, match="register: programs that .* the disk is on fire"):
        jflux.register()
