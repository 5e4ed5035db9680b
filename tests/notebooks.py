"""Runs the code cells of a notebook in a process of their own, without Jupyter.

python tests/notebooks.py examples/quickstart.ipynb     writes what the cells print into the file
"""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
import tempfile

# Reads the cells from stdin; writes what each printed to the file that it is given.
_RUN = """
import contextlib, io, json, sys
printed, names = [], {"__name__": "__main__"}
for source in json.load(sys.stdin):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(source, f"cell {len(printed)}", "exec"), names)
    printed.append(out.getvalue())
json.dump(printed, open(sys.argv[1], "w"))
"""


def code_cells(path: pathlib.Path) -> list[dict]:
    """Those of nbformat 4."""
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


def shown(cell: dict) -> str:
    """What the file says that a cell prints."""
    return "".join("".join(output["text"]) for output in cell["outputs"])


def run(path: pathlib.Path, folder: pathlib.Path, env: dict[str, str] | None = None) -> list[str]:
    """What each code cell prints; `folder` is where they run.

    Raises:
      RuntimeError: a cell failed; has its traceback.
    """
    sources = ["".join(cell["source"]) for cell in code_cells(path)]
    out = folder / "printed.json"
    done = subprocess.run(
        [sys.executable, "-c", _RUN, str(out)], input=json.dumps(sources), cwd=folder, env=env,
        text=True, stderr=subprocess.PIPE, timeout=280,
    )  # fmt: skip
    if done.returncode != 0:
        raise RuntimeError(f"{path} failed:\n{done.stderr}")
    return json.loads(out.read_text())


def write(path: pathlib.Path) -> None:
    """Puts what the cells print into the file."""
    content = json.loads(path.read_text())
    with tempfile.TemporaryDirectory() as folder:
        printed = run(path, pathlib.Path(folder))
    code = [cell for cell in content["cells"] if cell["cell_type"] == "code"]
    for count, (cell, text) in enumerate(zip(code, printed, strict=True), 1):
        lines = text.splitlines(keepends=True)
        cell["execution_count"] = count
        cell["outputs"] = (
            [{"name": "stdout", "output_type": "stream", "text": lines}] if lines else []
        )
    path.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    write(pathlib.Path(sys.argv[1]))
