"""JAX's private names: docs/internals/jax.md lists all that jflux uses, and jflux can do without
them."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from harness import PLATFORM, make_mesh
from jax.sharding import PartitionSpec as P

import jflux
from jflux import _jax_internals
from jflux._call import call_names
from jflux._heap import _rendezvous

PACKAGE = Path(jflux.__file__).parent
PAGE = Path(__file__).resolve().parents[1] / "docs" / "internals" / "jax.md"


def _private_names(source):
    """The private names of JAX and Flax in a file: of imports, of attributes of what is imported,
    and of strings that are such a name."""
    tree = ast.parse(source)
    modules, found = {}, set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = {a.asname or a.name.split(".")[0]: a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
        else:
            continue
        ours = {k: v for k, v in names.items() if v.split(".")[0] in ("jax", "jaxlib", "flax")}
        modules |= ours
        found |= {name for name in ours.values() if "._" in name}
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=value, attr=attr) if re.match("_(?!_)", attr):
                owner = ast.unparse(value)
                if owner.split(".")[0] in modules:
                    found.add(f"{owner}.{attr}")
            case ast.Constant(value=str(text)) if re.fullmatch(r"jax\._src(\.\w+)*", text):
                found.add(text)
            case ast.Call(
                func=ast.Name("getattr" | "hasattr"), args=[_, ast.Constant(str(text)), *_]
            ):
                if re.match("_(?!_)", text):
                    found.add(text)
    return found


def test_private_names_are_found():
    source = """
import jax
from jax._src import core as c
from jax.interpreters import mlir
mlir._lowerings, jax.core.Tracer._x, c.a, getattr(c, "_trace"), load("jax._src.dispatch"), self._y
"""
    assert _private_names(source) == {
        "jax._src.core", "mlir._lowerings", "jax.core.Tracer._x", "_trace", "jax._src.dispatch",
    }  # fmt: skip


def test_the_table_has_each_private_name():
    if not PAGE.exists():
        pytest.skip("the documents are not here")
    listed = {f"{i.module}.{name}" for i in _jax_internals.ALL for name in i.names}
    modules = {i.module for i in _jax_internals.ALL}
    for file in sorted(PACKAGE.rglob("*.py")):
        listed |= _private_names(file.read_text()) - modules
    section = PAGE.read_text().split("## Private names\n")[1].split("\n## ")[0]
    rows = [line.split("|")[1:3] for line in section.splitlines() if line.startswith("| `")]
    assert {name for names, _ in rows for name in re.findall("`([^`]+)`", names)} == listed
    for place in re.findall(r"`(\S+\.py)`", " ".join(places for _, places in rows)):
        assert (PACKAGE / place).exists(), place


def test_this_jax_has_each_private_name():
    assert [i.why_missing() for i in _jax_internals.ALL] == [None] * len(_jax_internals.ALL)


# JAX's own code has the modules as they are. Those that are found by name lack these names.
WITHOUT = """
import logging, sys, types
import jax
jax.config.update("jax_num_cpu_devices", 2)
import jax.experimental.checkify
for name in sys.argv[1:]:
    module, _, name = name.rpartition(".")
    __import__(module)
    rest = {k: v for k, v in vars(sys.modules[module]).items() if k != name}
    sys.modules[module] = types.ModuleType(module)
    vars(sys.modules[module]).update(rest)
logging.basicConfig(stream=sys.stdout, format="%(message)s")
import numpy as np
from jax.sharding import PartitionSpec as P
import jflux
mesh = jax.make_mesh((2,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,))
x, w = np.arange(8.0, dtype=np.float32).reshape(4, 2), np.ones((2, 2), np.float32)
op = jax.shard_map(
    lambda x, w: jflux.all_gather_matmul(x, w, axis_name="tp"),
    mesh=mesh, in_specs=(P("tp"), P(None, "tp")), out_specs=P(None, "tp"),
)
error, y = jax.jit(jax.experimental.checkify.checkify(op))(x, w)
assert error.get() is None and (y == x @ w).all()
"""


@pytest.mark.skipif(PLATFORM != "cpu", reason="virtual devices")
def test_without_private_names_calls_take_the_reference():
    names = [f"{i.module}.{name}" for i in _jax_internals.ALL for name in i.names]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, *names],
        cwd=PACKAGE.parent, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    at_import = set(_jax_internals.ALL) - {_jax_internals.THREADS, _jax_internals.STORE}
    for internal in at_import:
        missing = f"no {internal.module}.{internal.names[0]}: {internal.without}"
        assert done.stdout.count(missing) == 1, done.stdout
    assert "jflux.all_gather_matmul takes its lax reference: JAX" in done.stdout


def test_without_a_store_the_error_says_so(monkeypatch):
    monkeypatch.setattr(
        _jax_internals, "STORE", _jax_internals.Internal("jax._src.no", ("x",), "not")
    )
    with pytest.raises(RuntimeError, match=r"has no jax\._src\.no: .*through its store"):
        _rendezvous._store()


@pytest.mark.skipif(PLATFORM != "cpu", reason="GPUs' calls need no names")
def test_processes_whose_programs_are_lowered_otherwise(monkeypatch):
    """As if there were several, and JAX wrote calls otherwise, or did not call the function that
    jflux has replaced."""
    mlir = _jax_internals.LOWERING.get()
    monkeypatch.setattr(call_names, "_has_peers", lambda: True)

    def plan():
        op = jax.shard_map(
            lambda x, w: jflux.all_gather_matmul(x, w, axis_name="tp"),
            mesh=make_mesh((2,)), in_specs=(P("tp"), P(None, "tp")), out_specs=P(None, "tp"),
        )  # fmt: skip
        x, w = np.zeros((4, 2), np.float32), np.zeros((2, 2), np.float32)
        return str(jflux.explain(op, x, w))

    assert "cannot name" not in plan()  # strict: it would be an error
    with monkeypatch.context() as otherwise:
        otherwise.setattr(call_names, "_CONFIG", "another.config")
        with pytest.raises(RuntimeError, match="its calls of jflux_all_gather_matmul"):
            plan()
    monkeypatch.setattr(mlir, "lower_jaxpr_to_module", mlir.lower_jaxpr_to_module.__wrapped__)
    with pytest.raises(NotImplementedError, match="in which jflux cannot name their calls"):
        plan()
