"""Faults are noticed: data that nobody waited for, ranks that never come, ranks that disagree."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import PLATFORM, RANKS, Call, exact, make_mesh, operands, per_device, run
from workers.common import run_alone

from jflux import testing

CALLS = [
    Call("all_gather_matmul", lead=(5,), k=32, n=6, dtype=jnp.bfloat16, gathered=True),
    Call("all_gather_matmul", lead=(5,), k=32, n=6, dtype=jnp.bfloat16),
    Call("matmul_reduce_scatter", lead=(5,), k=32, n=6, dtype=jnp.bfloat16),
    Call("matmul_all_to_all", lead=(5,), k=32, n=8, dtype=jnp.bfloat16),
]


def _close(y, call, mesh, x, w):
    y_want, scale = exact(call, mesh, "tp", x, w), exact(call, mesh, "tp", abs(x), abs(w))
    if call.gathered:
        y, y_want, scale = y[0], y_want[0], scale[0]
    error = np.abs(np.asarray(y, np.float64) - y_want)
    return bool((error <= testing.tolerance(call.dtype, 32 * RANKS) * scale).all())


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_a_removed_wait_is_caught(call):
    """Without waits, ranks that start early read poison or an earlier call's data."""
    mesh = make_mesh((RANKS,))
    x, w = operands(call, mesh, "tp")
    f = jax.jit(per_device(mesh, call.bind("tp")))
    assert _close(run(f, x, w), call, mesh, x, w)
    with testing.planted_faults(skip_waits=True, max_delay_us=20_000):
        right = []
        for _ in range(3):
            testing.poison_workspaces()
            right.append(_close(jax.block_until_ready(f(x, w)), call, mesh, x, w))
    assert not all(right)
    for _ in range(3):  # and the fault is gone
        assert _close(run(f, x, w), call, mesh, x, w)


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_late_ranks_change_nothing(call):
    mesh = make_mesh((RANKS,))
    x, w = operands(call, mesh, "tp")
    f = jax.jit(per_device(mesh, call.bind("tp")))
    before = jax.tree.leaves(run(f, x, w))
    with testing.planted_faults(max_delay_us=30_000):
        for _ in range(3):
            for a, b in zip(before, jax.tree.leaves(run(f, x, w)), strict=True):
                np.testing.assert_array_equal(a, b)


def _fault(scenario):
    """The error that the scenario ends in. The deadline is 2 s."""
    output = run_alone(scenario, platform=PLATFORM, devices=min(RANKS, 4))
    errors = re.findall(r"^error: (.*)$", output, re.M)
    assert len(errors) == 1, output
    assert 1.5 < float(re.search(r"^seconds: (.*)$", output, re.M)[1]) < 30, output
    # XLA's own error only says that a launch failed: the process has printed why before it.
    return output if PLATFORM == "gpu" else errors[0], output


@pytest.mark.parametrize(
    ("scenario", "op"),
    [
        ("gather", "all_gather_matmul"),
        ("product_exchange", "matmul_all_to_all"),
        ("tiles_of_a_sum", "matmul_all_reduce"),
        ("reduce", "all_reduce"),
        ("two_shot", "all_reduce"),
        ("chunked", "all_reduce"),
        ("norm", "all_reduce"),
        ("all_gather", "all_gather"),
        ("reduce_scatter", "reduce_scatter"),
        ("exchange", "all_to_all"),
        ("exchange_in_chunks", "all_to_all"),
    ],
)
def test_a_rank_that_never_calls(scenario, op):
    error, _ = _fault(f"{scenario}_without_rank_1")
    assert re.search(rf"jflux\.{op}: rank [0, 2-3]+ waited 2 s for rank 1\b", error)
    assert "deadline_seconds" in error


@pytest.mark.parametrize("algorithm", ["half_butterfly", "butterfly"])
def test_a_rank_that_is_missing_from_a_butterfly(algorithm):
    """Its partners wait for it, and others for them."""
    error, _ = _fault(f"{algorithm}_without_rank_1")
    assert re.search(r"jflux\.all_reduce: rank [0, 2-3]+ waited 2 s for rank [0-3]\b", error)


def test_a_rank_that_never_calls_matmul_reduce_scatter():
    error, _ = _fault("scatter_without_rank_0")
    assert re.search(r"jflux\.matmul_reduce_scatter: rank [1-3, ]+ waited 2 s for rank 0\b", error)


def test_a_rank_that_leaves_a_loop_early():
    error, _ = _fault("one_call_too_few")
    last = min(RANKS, 4) - 1
    assert re.search(rf"jflux\.all_gather_matmul: rank [0-9, ]+ waited 2 s for rank {last}", error)


def test_ranks_that_disagree_on_shapes():
    """Each shape is a call of its own, which the other ranks never make."""
    error, _ = _fault("different_shapes")
    assert re.search(
        r"jflux\.all_gather_matmul: rank [0-9, ]+ (waited 2 s for|expects call)", error
    )


@pytest.mark.skipif(PLATFORM == "gpu", reason="JAX lowers equal calls once: one site for both")
def test_ranks_that_make_equal_calls_in_different_orders():
    """Shapes and types agree, so only the call site tells one from the other."""
    error, _ = _fault("different_orders")
    assert re.search(
        r"jflux\.all_gather_matmul: rank [0-9, ]+ (waited 2 s for|expects call)", error
    )


@pytest.mark.skipif(PLATFORM == "gpu", reason="a launch that failed ends CUDA in its process")
def test_the_process_goes_on_after_an_error():
    _, output = _fault("after_an_error")
    assert "right after the error" in output


@pytest.mark.skipif(PLATFORM == "gpu", reason="a failed GPU's peers hang in XLA's own psum")
def test_other_calls_in_flight_when_one_fails():
    error, _ = _fault("others_in_flight")
    assert re.search(r"waited 2 s for rank 0\b", error)


def test_a_program_that_ends_with_calls_in_flight():
    for _ in range(3):
        output = run_alone("ends_in_flight", platform=PLATFORM, devices=min(RANKS, 8), timeout=60)
        assert "the end" in output
