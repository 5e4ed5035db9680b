"""tests/gpu_suite.py runs every test file there is."""

import os
import pathlib

from gpu_suite import ALONE, all_files


def test_files_are_found_the_largest_first(tmp_path):
    for name, size in (("test_a.py", 1), ("test_b.py", 3), ("test_c.py", 3), ("harness.py", 9)):
        (tmp_path / name).write_text("x" * size)
    assert all_files(tmp_path) == ["b", "c", "a"]


def test_every_file_that_runs_alone_exists():
    here = pathlib.Path(__file__).parent
    found = all_files(here)
    assert len(found) == sum(name.startswith("test_") for name in os.listdir(here))
    assert set(ALONE) <= set(found)
