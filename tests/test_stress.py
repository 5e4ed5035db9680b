"""A short run of stress.py."""

import pytest
from stress import stress


@pytest.mark.parametrize("seed", [1, 2])
def test_random_programs_in_flight(seed):
    assert "calls right" in stress(60, seed=seed)


@pytest.mark.slow
def test_many_calls_in_each_program():
    assert "calls right" in stress(300, seed=3, most_calls=12, in_flight=2, max_delay_us=500)
