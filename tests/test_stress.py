"""Short runs of stress.py and shared_gpu.py."""

import pathlib
import subprocess
import sys

import pytest
from stress import stress


@pytest.mark.parametrize("seed", [1, 2])
def test_random_programs_in_flight(seed):
    assert "calls right" in stress(60, seed=seed)


@pytest.mark.slow
def test_many_calls_in_each_program():
    assert "calls right" in stress(300, seed=3, most_calls=12, in_flight=2, max_delay_us=500)


@pytest.mark.multiprocess
def test_ranks_that_share_gpus():
    here = pathlib.Path(__file__).parent
    command = [sys.executable, "shared_gpu.py", "--ranks", "3", "--calls", "6", "--graphs"]
    done = subprocess.run(command, cwd=here, timeout=150, text=True, capture_output=True)
    assert done.returncode == 0 and "6 calls right" in done.stdout, done.stderr
