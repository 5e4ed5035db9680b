"""tools/build_times.py: what a build's files took, and whether that is over the budget."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[1] / "tools"

LOG = """# ninja log v5
0\t30000\t1\tCMakeFiles/jflux_objects.dir/cc/ops/all_reduce/all_reduce.cu.o\ta
5\t2005\t1\tCMakeFiles/jflux_objects.dir/cc/runtime/heap.cc.o\tb
0\t90000\t1\tCMakeFiles/heap_test.dir/tests/cc/heap_test.cc.o\tc
0\t500\t1\tlibjflux_core.so\td
0\t1000\t1\tCMakeFiles/_jflux.dir/cc/python/module.cc.o\te
10\t40010\t2\tCMakeFiles/jflux_objects.dir/cc/ops/all_reduce/all_reduce.cu.o\tf
"""


@pytest.fixture
def build_times():
    if not TOOLS.exists():
        pytest.skip("the tools are not here")
    spec = importlib.util.spec_from_file_location("build_times", TOOLS / "build_times.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_library_files_count_the_last_time(build_times):
    assert build_times.read_log(LOG) == {
        "cc/ops/all_reduce/all_reduce.cu": 40.0,
        "cc/runtime/heap.cc": 2.0,
        "cc/python/module.cc": 1.0,
    }


def test_over_the_budget_is_a_notice(build_times):
    under = build_times.report({"a.cu": 500.0, "b.cu": 459.0, "c.cu": 1.0}, 2)
    assert under == [
        "   500.0 s  a.cu",
        "   459.0 s  b.cu",
        "   960.0 s  all 3 files, one after the other",
    ]
    over = build_times.report({"a.cu": 961.0}, 2)
    assert over[-1].startswith("NOTICE: the library compiles in 8.0 minutes on 2 cores")
    elapsed = build_times.report({"a.cu": 961.0}, 2, elapsed=True)
    assert elapsed[:-1] == over and "busy" in elapsed[-1]


# Uses the processor for .3 s in a child, and nothing for another .3 s.
COMPILER = r"""
import subprocess, sys, time
time.sleep(2)
spin = "import time\nwhile time.process_time() < 0.3: pass"
subprocess.run([sys.executable, "-S", "-c", spin], check=True)
sys.exit(int(sys.argv[1]))
"""


def test_the_launcher_notes_processor_time(build_times, tmp_path):
    def compile_one(output, status):
        launcher = [sys.executable, TOOLS / "compiler_seconds.py"]
        compiler = [sys.executable, "-S", "-c", COMPILER, str(status), "-o", output]
        return subprocess.run([*launcher, *compiler], cwd=tmp_path, check=False).returncode

    folder = "CMakeFiles/jflux_objects.dir/cc/runtime"
    assert compile_one(f"{folder}/heap.cc.o", 0) == 0
    assert compile_one(f"{folder}/heap.cc.o", 3) == 3
    assert compile_one("CMakeFiles/heap_test.dir/tests/cc/heap_test.cc.o", 0) == 0
    noted = (tmp_path / build_times.NOTED).read_text()
    assert len(re.findall(r"^\d+\.\d\d\t.*heap\.cc\.o$", noted, re.MULTILINE)) == 2
    seconds = build_times.read_noted(noted)
    assert list(seconds) == ["cc/runtime/heap.cc"]
    # The time of the child, not that of sleep.
    assert 0.3 <= seconds["cc/runtime/heap.cc"] < 1.5


def test_what_a_build_has_noted_comes_before_the_log(build_times, tmp_path, monkeypatch, capsys):
    (tmp_path / ".ninja_log").write_text(LOG)
    monkeypatch.setattr(sys, "argv", ["build_times", str(tmp_path)])
    build_times.main()
    assert "43.0 s  all 3 files" in capsys.readouterr().out
    noted = "2.50\tCMakeFiles/jflux_objects.dir/cc/runtime/heap.cc.o\n" * 2
    (tmp_path / build_times.NOTED).write_text(noted)
    build_times.main()
    assert "2.5 s  all 1 files" in capsys.readouterr().out
