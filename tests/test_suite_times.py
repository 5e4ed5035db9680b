"""tests/suite_times.py: what tests took, and what they may take."""

import pathlib
import re
import subprocess
import sys

import pytest
import suite_times

CONFTEST = """
import sys
sys.path.insert(0, {tests!r})
import suite_times

def pytest_configure(config):
    suite_times.{change}
    config.pluginmanager.register(suite_times.SuiteTimes(budgets=True, within_budget=True))
"""

TESTS = r"""
import subprocess, sys
BUSY = "import time; end = time.process_time() + .3\nwhile time.process_time() < end: pass"

def test_idle():
    import time
    time.sleep(.3)

def test_busy():
    exec(BUSY)

def test_in_a_process():
    subprocess.run([sys.executable, "-c", BUSY], check=True)
"""


def run(folder: pathlib.Path, change: str) -> tuple[int, str]:
    """A run of three tests: its status, and what it prints."""
    tests = str(pathlib.Path(__file__).parent)
    (folder / "conftest.py").write_text(CONFTEST.format(tests=tests, change=change))
    (folder / "test_three.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir=."]
    done = subprocess.run([*command, "."], cwd=folder, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout + done.stderr


def test_what_tests_take(tmp_path):
    """Their own processor time and that of their processes, not the time that they wait."""
    status, said = run(tmp_path, "SLOWEST = 3")
    assert status == 0, said
    found = re.findall(r"([\d.]+) s  \S+::(\w+)", said)
    taken = {name: float(seconds) for seconds, name in found}
    assert taken["test_idle"] < 0.2 <= taken["test_busy"] and taken["test_in_a_process"] >= 0.2
    assert "all 3 tests" in said and "NOTICE" not in said


def test_the_memory_of_a_test_is_its_own():
    """And not that of a test before it in the same process."""
    bytearray(256 << 20)
    if suite_times._resident_mib("VmHWM") < suite_times._resident_mib() + 200:
        pytest.skip("memory is not given back at once here")
    suite_times._forget_peak()
    assert suite_times._resident_mib("VmHWM") < suite_times._resident_mib() + 64


def test_a_run_that_exceeds_a_budget_fails(tmp_path):
    status, said = run(tmp_path, "TEST_SECONDS = .25")
    assert status == 1
    assert said.count("NOTICE") == 2 and "NOTICE: test_three.py::test_busy takes" in said


def test_budgets():
    one = suite_times.TEST_SECONDS
    total = suite_times.BUDGET_MINUTES * 60 * suite_times.CORES
    many = {str(i): one for i in range(total // one)}
    assert suite_times.notices(many, {"0": suite_times.WORKER_MIB}) == []
    (line,) = suite_times.notices(many | {"more": 1.0}, {})
    assert line.startswith("NOTICE: the tests take 15.0 minutes on 2 cores; the budget is 15")
    (line,) = suite_times.notices({}, {"a": 0, "b": suite_times.WORKER_MIB + 1})
    assert line.startswith(f"NOTICE: a worker had {suite_times.WORKER_MIB + 1} MiB in b;")
