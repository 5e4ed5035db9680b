"""tests/gpu_suite.py runs every test file there is."""

import ast
import importlib
import os
import pathlib
import subprocess
import sys
import time
import types

import pytest
from gpu_suite import ALONE, all_files, command_of, run, scripts


def test_files_are_found_the_largest_first(tmp_path):
    for name, size in (("test_a.py", 1), ("test_b.py", 3), ("test_c.py", 3), ("harness.py", 9)):
        (tmp_path / name).write_text("x" * size)
    assert all_files(tmp_path) == ["b", "c", "a"]


def test_every_file_that_runs_alone_exists():
    here = pathlib.Path(__file__).resolve().parent
    found = all_files(here)
    assert len(found) == sum(name.startswith("test_") for name in os.listdir(here))
    assert set(ALONE) <= set(found)


def test_every_script_exists():
    here = pathlib.Path(__file__).resolve().parent
    for gpus in (1, 2, 4):
        for name, commands in scripts(gpus, 1.0).items():
            assert len(commands) == (gpus if name == "stress_processes" else 1)
            for _, first, *_ in commands:
                assert first == "-m" or (here / first).exists(), name


HERE = pathlib.Path(__file__).resolve().parent
PROGRAMS = [*HERE.glob("*_gpu.py"), *HERE.parent.glob("bench/*.py")]


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_programs_for_gpus_use_names_that_exist(path):
    """They reach into jflux, and most do not run without GPUs."""
    tree, modules = ast.parse(path.read_text()), {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or node.level or "jflux" not in node.module:
            continue
        for alias in node.names:
            module = importlib.import_module(node.module)
            if not hasattr(module, alias.name):  # of jflux, only what has been used is imported
                importlib.import_module(f"{node.module}.{alias.name}")
            value = getattr(module, alias.name)
            if isinstance(value, types.ModuleType):
                modules[alias.asname or alias.name] = value
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module = modules.get(node.value.id)
            assert module is None or hasattr(module, node.attr), (node.lineno, node.attr)


@pytest.mark.parametrize("at_once", [1, 2])
def test_a_suite_resumes(at_once, tmp_path, monkeypatch):
    """What has passed is not run again, and what fails is told and stays."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    done, file = tmp_path / "done", tmp_path / "test_four.py"
    (tmp_path / "conftest.py").write_text(
        "def pytest_addoption(parser): parser.addoption('--full', action='store_true')"
    )

    def status(text):
        file.write_text(
            f"import pytest\ndef test_a(): pass\ndef test_b(): {text}\n"
            "@pytest.mark.skip\ndef test_c(): pass\ndef test_d(): pass\n"
        )
        command = command_of(["four"], at_once, done)
        ended = subprocess.run([*command, "--rootdir=."], capture_output=True, text=True)
        return ended.returncode, ended.stdout

    code, said = status("assert 1 == 2")
    assert code == 1 and said.count("FAILED test_four.py::test_b\n") == 1 == said.count("E  "), said
    assert said.splitlines()[-1].startswith("1 failed, 2 passed, 1 skipped"), said
    assert sorted(done.read_text().split()) == [f"test_four.py::test_{name}" for name in "acd"]
    code, said = status("pass")
    assert code == 0 and said.splitlines()[-1].startswith("1 passed in"), said
    assert len(done.read_text().split()) == 4
    if at_once == 1:
        assert status("pass")[0] == 0  # nothing is left


def test_one_bad_process_of_several_is_told(tmp_path):
    good, bad = (
        [sys.executable, "-c", f"print('seed 3: {word}'); raise SystemExit({status})"]
        for word, status in (("fine", 0), ("wrong", 3))
    )
    until = time.monotonic() + 60
    assert run("good", [good, good], tmp_path, 0.1, until).right
    outcome = run("bad", [bad, good], tmp_path, 0.1, until)
    assert not outcome.right and outcome.details == ["seed 3: wrong"]
    assert not run("other", [good, bad], tmp_path, 0.1, until).right


def test_what_does_not_end_is_killed(tmp_path):
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    start = time.monotonic()
    outcome = run("sleep", [sleep, sleep], tmp_path, 0.1, start + 1)
    assert not outcome.right and "not ended" in outcome.summary
    assert time.monotonic() - start < 30
