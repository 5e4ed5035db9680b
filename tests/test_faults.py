"""Faults are noticed: data that nobody waited for, ranks that never come, ranks that disagree."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import PLATFORM, PRODUCTS, RANKS, kernel_rows, make_mesh, of_way, run
from workers.common import run_alone

from jflux import testing
from jflux._ops._spec import all_ops
from jflux._stress.calls import Call, exact, operands, per_device

pytestmark = pytest.mark.usefixtures("small_sums")
CALLS = [
    Call("all_gather_matmul", lead=(5,), k=32, n=6, dtype=jnp.bfloat16, gathered=True),
    *(of_way(op, lead=(kernel_rows(op),), k=32, n=8, dtype=jnp.bfloat16) for op in PRODUCTS),
]


def _close(y, call, mesh, x, w):
    y_want, scale = exact(call, mesh, "tp", x, w), exact(call, mesh, "tp", abs(x), abs(w))
    if call.gathered:
        y, y_want, scale = y[0], y_want[0], scale[0]
    error = np.abs(np.asarray(y, np.float64) - y_want)
    return bool((error <= testing.tolerance(call.dtype, call.terms(RANKS)) * scale).all())


@pytest.mark.parametrize("call", CALLS, ids=lambda call: f"{call.op} {call}")
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


@pytest.mark.parametrize("call", CALLS, ids=lambda call: f"{call.op} {call}")
def test_late_ranks_change_nothing(call):
    mesh = make_mesh((RANKS,))
    x, w = operands(call, mesh, "tp")
    f = jax.jit(per_device(mesh, call.bind("tp")))
    before = jax.tree.leaves(run(f, x, w))
    with testing.planted_faults(max_delay_us=30_000):
        for _ in range(3):
            for a, b in zip(before, jax.tree.leaves(run(f, x, w)), strict=True):
                np.testing.assert_array_equal(a, b)


def _check_fault(scenario, *patterns):
    """The scenario ends in one error, which matches all patterns. The deadline is 2 s.

    Returns the worker's output, which is also what a failure of this function shows.
    """
    output = run_alone(scenario, platform=PLATFORM, devices=min(RANKS, 4))
    errors = re.findall(r"^error: (.*)$", output, re.M)
    assert len(errors) == 1, output
    # XLA's own error only says that a launch failed: the process has printed why before it.
    error = output if PLATFORM == "gpu" else errors[0]
    for pattern in patterns:
        assert re.search(pattern, error), f"no {pattern!r} in:\n{output}"
    # Of the call alone: compilation takes long where other processes use the machine.
    seconds = float(re.search(r"^seconds: (.*)$", output, re.M)[1])
    assert 1.5 < seconds < 30, output
    return output


@pytest.mark.parametrize(
    ("scenario", "op"),
    [
        *((op, op) for op in all_ops()),
        # Other protocols of the same ops.
        ("two_shot", "all_reduce"),
        ("chunked", "all_reduce"),
        ("norm", "all_reduce"),
        ("exchange_in_chunks", "all_to_all"),
    ],
)
def test_a_rank_that_never_calls(scenario, op):
    who = rf"jflux\.{op}: rank [0, 2-3]+ waited 2 s for rank 1\b"
    _check_fault(f"{scenario}_without_rank_1", who, "deadline_seconds")


@pytest.mark.parametrize("algorithm", ["half_butterfly", "butterfly"])
def test_a_rank_that_is_missing_from_a_butterfly(algorithm):
    """Its partners wait for it, and others for them."""
    who = r"jflux\.all_reduce: rank [0, 2-3]+ waited 2 s for rank [0-3]\b"
    _check_fault(f"{algorithm}_without_rank_1", who)


def test_a_rank_that_leaves_a_loop_early():
    last = min(RANKS, 4) - 1
    who = rf"jflux\.all_gather_matmul: rank [0-9, ]+ waited 2 s for rank {last}"
    _check_fault("one_call_too_few", who)


def test_ranks_that_disagree_on_shapes():
    """Each shape is a call of its own, which the other ranks never make."""
    who = r"jflux\.all_gather_matmul: rank [0-9, ]+ (waited 2 s for|expects call)"
    _check_fault("different_shapes", who)


@pytest.mark.skipif(PLATFORM == "gpu", reason="JAX lowers equal calls once: one site for both")
def test_ranks_that_make_equal_calls_in_different_orders():
    """Shapes and types agree, so only the call site tells one from the other."""
    who = r"jflux\.all_gather_matmul: rank [0-9, ]+ (waited 2 s for|expects call)"
    _check_fault("different_orders", who)


@pytest.mark.skipif(PLATFORM == "gpu", reason="a launch that failed ends CUDA in its process")
def test_the_process_goes_on_after_an_error():
    output = _check_fault("after_an_error")
    assert "right after the error" in output, output


@pytest.mark.skipif(PLATFORM == "gpu", reason="a failed GPU's peers hang in XLA's own psum")
def test_other_calls_in_flight_when_one_fails():
    _check_fault("others_in_flight", r"waited 2 s for rank 0\b")


def test_a_late_rank_is_named_and_waited_for():
    output = run_alone("a_late_rank", platform=PLATFORM, devices=min(RANKS, 4))
    assert "no error" in output, output
    assert re.search(
        r"^jflux: warning: jflux\.all_gather_matmul: rank [0, 2-3]+ has waited 1 s, since "
        r"\d\d:\d\d:\d\d, for rank 1\b.*After 600 s the call fails .*deadline_seconds",
        output,
        re.M,
    ), output


@pytest.mark.parametrize("of", ["length", "page"])
def test_decoding_with_a_value_that_does_not_fit(of):
    """GPUs refuse what comes next: the merge over ranks, or if that was sooner the next call. CPUs
    look at lengths alone, and go on after the error."""
    n = min(RANKS, 4)
    output = run_alone(f"wrong_{of}", platform=PLATFORM, devices=n)
    value = {
        "length": rf"lengths\[2\] = {64 * n + 1}, and the cache has {64 * n} positions",
        "page": r"block_table\[2, 3\] = 12, within the sequence's length, and the cache has 12",
    }[of]
    message = rf"jflux\.flash_decode: rank \d was given {value}"
    if PLATFORM == "gpu":
        assert re.search(message, output), output
        # A merge that gave up has ended CUDA on its GPU, which XLA may find out first.
        assert re.search(r"^(error: |finished)", output, re.M), output
        assert re.search(rf"^next error: .*({message}|CUDA_ERROR_LAUNCH_FAILED)", output, re.M), (
            output
        )
    elif of == "length":
        assert re.search(rf"^error: .*{message}.*end a sequence", output, re.M), output
        assert "the next call runs" in output and "finished" not in output, output
    else:
        assert "finished" in output and "the next call runs" in output, output


@pytest.mark.skipif(PLATFORM == "cpu" or RANKS < 2, reason="GPUs of one process")
def test_a_launch_that_fails_on_one_gpu_of_several():
    """The others do not wait for it until the deadline, which is ten minutes here, and later calls
    fail at once, with the reason."""
    output = run_alone("a_failed_launch", platform=PLATFORM, devices=min(RANKS, 4))
    assert len(re.findall(r"^error: ", output, re.M)) == 2, output
    first, second = (float(s) for s in re.findall(r"^seconds: (.*)$", output, re.M))
    assert first < 60 and second < 10, output
    why = r"jflux\.all_gather_matmul: a test has this launch fail"
    refused = rf"no call can be made: GPU \d+: {why}"
    first_error, second_error = re.findall(r"^error: .*$", output, re.M)
    # JAX reports the error of the launch, or that of a rank that gave up. A rank whose own launch
    # comes after the failed one need not wait at all.
    assert re.search(why, first_error), output
    gave_up = rf"rank \d gave up waiting for rank \d .*GPU \d+: {why}"
    assert re.search(f"{gave_up}|{refused}", output), output
    # The kernel that gave up has ended CUDA on its GPU, which XLA may find out first.
    assert re.search(f"{refused}|CUDA_ERROR_LAUNCH_FAILED", second_error), output


@pytest.mark.skipif(PLATFORM == "cpu", reason="CUDA graphs")
def test_kernels_that_a_graph_runs_at_once_give_no_wrong_numbers():
    output = run_alone("concurrent_graphs", platform=PLATFORM, devices=min(RANKS, 4))
    assert "WRONG" not in output, output
    if "error: " in output:
        assert re.search("found another of jflux's kernels|waited 2 s for|gave up", output), output
    else:
        assert re.search(r"^right$", output, re.M), output


def test_a_program_that_ends_with_calls_in_flight():
    for _ in range(3):
        output = run_alone("ends_in_flight", platform=PLATFORM, devices=min(RANKS, 8), timeout=60)
        assert "the end" in output, output
