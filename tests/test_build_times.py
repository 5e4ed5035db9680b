"""tools/build_times.py: what a build's files took, and whether that is over the budget."""

import importlib.util
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[1] / "tools" / "build_times.py"

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
    if not TOOL.exists():
        pytest.skip("the tools are not here")
    spec = importlib.util.spec_from_file_location("build_times", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_library_files_count_the_last_time(build_times):
    assert build_times.read(LOG) == {
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
