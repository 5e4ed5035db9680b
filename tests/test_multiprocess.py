"""Several processes, one or more devices each, that meet through jax.distributed on this machine.

On a host with GPUs the same programs run with one process per GPU.
"""

import re
import subprocess

import pytest
from harness import PLATFORM, RANKS
from workers.common import free_port, run_together

pytestmark = pytest.mark.multiprocess


def _run(scenarios, processes, devices=1, **options):
    if processes * devices > RANKS:
        pytest.skip(f"needs {processes * devices} devices")
    return run_together(
        scenarios, platform=PLATFORM, processes=processes, devices=devices, **options
    )


def _all_right(scenarios, processes, devices=1, **options):
    for process, (status, output) in enumerate(_run(scenarios, processes, devices, **options)):
        assert status == 0, f"process {process} ended with {status}:\n{output}"
        assert re.findall(r"^ok (\w+)$", output, re.M) == scenarios.split(","), output


@pytest.mark.parametrize("processes, devices", [(2, 1), (4, 1), (2, 2)])
def test_values(processes, devices):
    _all_right("values,loops,training", processes, devices)


@pytest.mark.parametrize("processes, devices", [(2, 2), (4, 1)])
def test_groups_within_and_across_processes(processes, devices):
    _all_right("groups,training", processes, devices)


def test_call_over_local_devices_in_one_process():
    """What one process compiles for itself does not disturb the calls that it shares."""
    # GPUs' calls have no names, and XLA tunes a program in all processes together.
    _all_right("local_calls,compiled_alone" if PLATFORM == "cpu" else "local_calls", 2, 2)


def test_shutdown_and_init_again():
    _all_right("again", 2)


@pytest.mark.skipif(PLATFORM != "cpu", reason="a GPU's process restarts with its memory taken")
def test_a_process_that_is_replaced():
    """The new one and those that begin anew meet, with another store and other counts of runs."""
    _all_right("replaced", 2, options=["--next-port", str(free_port())])


def test_processes_that_ask_for_different_heaps():
    _all_right("different_heaps", 2)


def test_processes_that_are_nodes():
    _all_right("nodes,nodes", 2, 2, options=["--nodes", "named"])


UNSHARE = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]


@pytest.mark.slow
def test_exchanges_between_processes_that_are_nodes():
    """By XLA's collectives; tests/nvshmem_gpu.py does it with NVSHMEM."""
    scenarios = "node_exchange,node_exchange_again,two_levels"
    _all_right(scenarios, 2, 1, options=["--nodes", "named"])


@pytest.mark.skipif(PLATFORM != "cpu", reason="GPU processes of one host are one node there")
@pytest.mark.skipif(
    subprocess.run([*UNSHARE, "true"], capture_output=True, check=False).returncode != 0,
    reason="needs the right to make PID namespaces",
)
def test_processes_in_pid_namespaces_of_their_own():
    """As in containers, or on several hosts: all have the same PID, and cannot map each other."""
    _all_right("nodes,nodes", 2, 2, prefix=UNSHARE)


def test_a_late_process_meets_the_others_at_the_next_attempt():
    results = _run("late", 2)
    assert "without a heap" in results[0][1] and "process 1 did not come" in results[0][1]
    for status, output in results:
        assert status == 0 and "ok late" in output, output


def test_all_run_the_reference_without_a_process():
    for status, output in _run("absent", 2):
        assert status == 0 and "ok absent" in output, output
        assert "process 1 did not come" in output, output


NODES = [("each_its_node", 2, 1), ("two_on_a_node", 4, 1)]
if PLATFORM == "cpu":
    NODES = [
        ("each_its_node", 2, 4),
        ("each_its_node", 4, 2),
        ("two_on_a_node", 4, 1),
        ("interleaved", 4, 1),
    ]


@pytest.mark.parametrize("scenario, processes, devices", NODES)
def test_emulated_nodes(scenario, processes, devices):
    _all_right(scenario, processes, devices, worker="node_worker.py")


def test_emulated_nodes_that_do_not_factor():
    for status, output in _run("uneven", 3, worker="node_worker.py"):
        assert status == 0 and "ok uneven" in output, output
        assert "has 2 ranks on node 0 and 1 rank on node 1" in output, output


def _errors(results, survivors):
    for process in survivors:
        status, output = results[process]
        assert status == 0, f"process {process} ended with {status}:\n{output}"
        errors = re.findall(r"^error: (.*)$", output, re.M)
        assert len(errors) == 1, output
        # The deadline is 5 s.
        assert float(re.search(r"^seconds: (.*)$", output, re.M)[1]) < 30, output
        # XLA's own error only says that a launch failed: the process has printed why before it.
        yield process, output if PLATFORM == "gpu" else errors[0]


@pytest.mark.parametrize("processes, devices", [(2, 2), (4, 1)])
def test_a_process_that_exits(processes, devices):
    results = _run("exit", processes, devices)
    assert results[-1][0] == 17
    dead = range((processes - 1) * devices, processes * devices)
    for process, error in _errors(results, range(processes - 1)):
        match = re.search(r"jflux\.all_gather_matmul: rank (\d+) waited 5 s for rank (\d+)", error)
        assert match, error
        assert int(match[1]) // devices == process
        assert int(match[2]) in dead


def test_a_process_that_is_killed():
    results = _run("kill", 3)
    assert results[-1][0] == -9
    for process, error in _errors(results, range(2)):
        assert re.search(
            rf"jflux\.matmul_reduce_scatter: rank {process} waited 5 s for rank 2\b", error
        ), error


def test_a_process_that_never_calls():
    results = _run("never_calls", 2)
    for _, error in _errors(results, [0]):
        assert re.search(r"jflux\.all_gather_matmul: rank 0 waited 5 s for rank 1\b", error), error
        assert "deadline_seconds" in error


def test_processes_that_disagree_on_shapes():
    """Both end in an error that names the other one."""
    for process, error in _errors(_run("different_shapes", 2), range(2)):
        assert re.search(
            rf"jflux\.all_gather_matmul: rank {process} (waited 5 s for|expects call).*"
            rf"rank {1 - process}\b",
            error,
        ), error
