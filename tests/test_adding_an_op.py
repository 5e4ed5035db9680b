"""docs/adding_an_op.md is true of the ops that there are: their files lie where it says, its names
exist, and Python and C++ name each other."""

import inspect
import re
from pathlib import Path

import pytest

import jflux
from jflux import reference
from jflux._ops._spec import all_ops

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "adding_an_op.md"
FOLDERS = sorted(path.parent for path in ROOT.glob("cc/ops/*/*_ffi.cc"))

pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="the documents are not here")


def _section(title):
    return PAGE.read_text().split(f"\n## {title}\n")[1].split("\n## ")[0]


def _rows(title):
    """What a section's table of files names in its rows, but for what not every op has."""
    rows = re.findall(r"^\| ([^|]+) \| (.+) \|$", _section(title), re.M)
    return [files for files, what in rows if "`" in files and "if anything" not in what]


def _files(row, op):
    """What a row names, for this op: the others of a row lie in the folder of its first one."""
    first, *others = (name.replace("foo_bar", op) for name in re.findall(r"`([\w./]+)`", row))
    return [Path(first), *(Path(first).parent / other for other in others)]


def _camel(op):
    return "".join(word.capitalize() for word in op.split("_"))


def _registered():
    """The names of all ops in C++."""
    rows = re.findall(r"^  FOLDER\(.*", (ROOT / "cc/ops/registry.cc").read_text(), re.M)
    names = re.findall(r"\bOP\((\w+)\)", "".join(rows))
    return [re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower() for name in names]


def _module_of(folder):
    """The Python module that a header of an op's folder names."""
    text = "".join(path.read_text().replace("\n//", "") for path in sorted(folder.glob("*.h")))
    (module,) = set(re.findall(r"Python: (jflux/[\w/]+\.py)", text))
    return module


@pytest.mark.parametrize("op", [name for name, spec in all_ops().items() if spec.product])
def test_files_of_a_product(op):
    rows = [row for row in _rows("Files to create") if "foo_bar" in row]
    assert len(rows) == 7
    for file in (file for row in rows for file in _files(row, op)):
        assert (ROOT / file).exists(), file


@pytest.mark.parametrize("op", all_ops())
def test_lines_of_an_op(op):
    lines = {row.strip("` "): (ROOT / row.strip("` ")).read_text() for row in _rows("Lines to add")}
    assert f"OP({_camel(op)})" in lines.pop("cc/ops/registry.cc")
    for file in ("jflux/__init__.py", "jflux/reference.py"):
        assert re.search(rf"^from \._ops\.\w+\.\w+ import .* as {op}$", lines.pop(file), re.M), file
    for file, text in lines.items():
        assert op in text, file


def test_names_of_the_page():
    """Names of functions, types and constants are of jflux's sources."""
    names = {
        name.split(".")[-1].split("::")[-1]
        for name in re.findall(r"`([A-Za-z_][\w.:]*)(?:\(\))?`", PAGE.read_text())
        if not re.search(r"foo_?bar|\.(md|py|cc|h|cu|cuh|txt)$", name, re.I)
    }
    assert {"RunGemm", "SPECS", "JoinFfiCall", "is_local"} <= names
    patterns = ("jflux/**/*.py", "tests/*.py", "cc/**/*.[ch]*", "tests/cc/**/*.[ch]*")
    text = "\n".join(p.read_text() for pattern in patterns for p in ROOT.glob(pattern))
    said = set(re.findall(r"\w+", text))
    others = {"numpy", "lax", "custom_vjp"}
    assert names - said - others == set()


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda f: f.name)
def test_python_and_kernels_name_each_other(folder):
    """A header says which module makes the primitive, and its docstring where the kernels are."""
    module = _module_of(folder)
    docstring = (ROOT / module).read_text().split('"""')[1]
    assert f"cc/ops/{folder.name}" in docstring, module


def test_python_names_every_op_of_cpp():
    modules = "\n".join(path.read_text() for path in ROOT.glob("jflux/**/*.py"))
    ops = _registered()
    assert len(ops) > 20 and set(all_ops()) <= set(ops)
    for op in ops:
        assert f'"{op}"' in modules, op


def test_a_reference_has_the_signature_of_its_op():
    names = [name for name in vars(reference) if not name.startswith("_")]
    assert len(names) > 15
    for name in names:
        mine, theirs = getattr(jflux, name), getattr(reference, name)
        assert inspect.signature(mine) == inspect.signature(theirs), name
