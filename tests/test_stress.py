"""Short runs of jflux.stress, of shared_gpu.py, and what their reports say."""

import json
import os
import pathlib
import pickle
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest
from harness import PLATFORM, RANKS
from workers.common import environment, free_port

import jflux
from jflux import _heap, testing
from jflux._ops._spec import all_ops
from jflux._stress import attention, mixtures, programs
from jflux.stress import main, stress

HERE = pathlib.Path(__file__).parent
BACKEND = _heap.default_platform()  # cuda where JAX says gpu


@pytest.mark.parametrize("seed", [1, 2])
def test_random_programs_in_flight(seed):
    report = stress(seed=seed, calls=60)
    assert report.failure is None, report.failure
    assert sum(report.calls.values()) >= 60 and report.programs == 4 * report.batches


def test_the_turn_comes_to_every_op():
    """The first cases of as many programs as there are ops."""
    specs = list(all_ops())
    place = programs._place(programs.random.Random(0), [jax.devices()], BACKEND)
    drawn = [
        programs.draw_case(programs.random.Random(i), place, spec).op
        for i, spec in enumerate(all_ops().values())
    ]
    assert drawn == specs


LONGER = {
    draw.__name__: draw
    for draw in (
        mixtures.dispatch, mixtures.experts, mixtures.merge,
        attention.attention, attention.decoding, attention.ulysses,
    )
}  # fmt: skip


@pytest.mark.parametrize("kind", LONGER)
def test_calls_of_several_steps_and_their_faults(kind, monkeypatch):
    """Random calls are right; without waits, on poisoned workspaces, some are not."""
    monkeypatch.setattr(
        programs, "draw_case", lambda rng, place, spec=None: LONGER[kind](rng, place)
    )
    # Sizes that have not come would end a dispatch, and a GPU's context, by an error.
    planted, found = kind != "dispatch" and PLATFORM == "cpu", 0
    for seed in range(4):
        rng = programs.random.Random(seed)
        program = programs.draw(rng, [jax.devices()], BACKEND, number=0, most_calls=2)

        def run(program=program):
            return [jax.block_until_ready(program.run(i)) for i in range(program.runs)]

        programs.check(program, run())
        if not planted:
            continue
        with testing.planted_faults(skip_waits=True, max_delay_us=20_000):
            testing.poison_workspaces()
            try:
                programs.check(program, run())
            except programs.Wrong:
                found += 1
        testing.poison_workspaces()
        programs.check(program, run())
    assert found > 0 or not planted


def test_many_calls_in_each_program():
    report = stress(seed=3, calls=120, most_calls=12, in_flight=2, max_delay_us=500)
    assert report.failure is None, report.failure


def test_a_planted_fault_is_found_and_reported(tmp_path, capsys):
    path = tmp_path / "stress.json"
    arguments = ["--seed", "1", "--calls", "200", "--in-flight", "2", "--report", str(path)]
    jflux.shutdown()  # the command chooses its own deadline
    try:
        assert main([*arguments, "--plant-fault"]) == 1
    finally:
        jflux.shutdown()  # ranks have gone on without each other
        jflux.init()
    said, report = capsys.readouterr().out, json.loads(path.read_text())
    failure = report["failure"]
    assert failure["what"] == "values" and failure["seed"] == 1 and "elements are off" in said
    # The shapes, where it was, and how to see it again.
    assert failure["case"].split()[0] in all_ops() and failure["case"] in failure["programs"][-1]
    assert "mesh (" in failure["programs"][-1] and failure["repeat"] in said
    assert failure["repeat"].endswith(f"--batch {failure['batch']}")
    assert report["environment"]["jax"] == jax.__version__
    assert len(report["environment"]["devices"]) == jax.device_count()
    assert report["arguments"]["seed"] == 1 and report["calls"] == {}


def test_a_batch_is_made_again():
    """From the seed and its number alone."""
    first, again = (stress(seed=4, batch=1, in_flight=2, max_delay_us=0) for _ in range(2))
    assert first.failure is None and first.calls == again.calls and first.batches == 1


@pytest.mark.parametrize("what", ["values", "bits between runs", "bits between ranks"])
def test_each_check_fails_where_it_must(what):
    """One number of one result is changed: a little, in one run or on one rank."""
    rng = programs.random.Random(6)
    specs = list(all_ops())
    program = programs.draw(
        rng, [jax.devices()], BACKEND, number=specs.index("all_reduce"), most_calls=1
    )
    with testing.planted_faults():
        results = [jax.block_until_ready(program.run(which)) for which in range(program.runs)]
    programs.check(program, results)
    assert not program.looped and program.cases[0].op == "all_reduce"
    which = {"values": 0, "bits between runs": 2, "bits between ranks": 1}[what]
    array = np.asarray(results[which][0]).copy()
    at = np.unravel_index(np.argmax(abs(array.astype(np.float64))), array.shape)
    if what == "values":
        array[at] *= 2
    else:  # the last bit
        bits = array.view({2: np.int16, 4: np.int32, 8: np.int64}[array.itemsize])
        bits[at] ^= 1
    results[which][0] = programs.put(array, program.mesh)
    with pytest.raises(programs.Wrong) as error:
        programs.check(program, results)
    assert error.value.what == what
    assert str(pickle.loads(pickle.dumps(error.value))) == str(error.value)


def by_environment(process):
    """As Open MPI's mpirun says where the others are; JAX chooses the port by the job's number."""
    return {
        "OMPI_MCA_orte_hnp_uri": f"{os.getpid()}.0;tcp://127.0.0.1:1",
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_RANK": str(process),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(process),
    }


@pytest.mark.skipif(RANKS < 4, reason="each node needs two devices")
def test_groups_lie_where_kernels_take_them(own_heap):
    """Of two nodes, inside each, in any order."""
    half = RANKS // 2
    own_heap(node=["a"] * half + ["b"] * (RANKS - half))
    calls = set()
    for batch in range(20):  # until the turn has come to every op
        if calls >= set(all_ops()):
            break
        report = stress(seed=1, batch=batch, in_flight=2)
        assert report.failure is None, report.failure
        calls |= report.calls.keys()
    assert calls >= set(all_ops())
    assert set(report.environment["nodes"].values()) == {0, 1}


@pytest.mark.multiprocess
@pytest.mark.parametrize("fault, flags", [(False, True), (True, True), (False, False)])
def test_one_process_for_each_part_of_the_devices(fault, flags, tmp_path):
    port, path = free_port(), tmp_path / "stress.json"
    gpus = PLATFORM == "gpu"
    env = environment(PLATFORM, 4)
    env["NCCL_NVLS_ENABLE"] = "0"

    def run(process):
        command = [sys.executable, "-m", "jflux.stress", "--seed", "3", "--calls", "12"]
        command += ["--in-flight", "2", "--report", str(path)] + ["--plant-fault"] * fault
        command += ["--local-devices", str(process)] * gpus
        if flags:
            command += ["--coordinator", f"127.0.0.1:{port}"]
            command += ["--processes", "2", "--process", str(process)]
        else:
            command.append("--distributed")
        own = env | ({} if flags else by_environment(process))
        return subprocess.run(command, env=own, timeout=250, text=True, capture_output=True)

    with ThreadPoolExecutor() as pool:
        done = list(pool.map(run, range(2)))
    report = json.loads(path.read_text())
    for one in done:
        assert one.returncode == int(fault), one.stderr + one.stdout
    assert report["environment"]["processes"] == 2
    assert (report["failure"] is not None) == fault
    assert ("calls right" in done[0].stdout) and "calls right" not in done[1].stdout


def test_lines_where_there_is_no_tqdm(tmp_path):
    """And nothing to run where there is one device."""
    (tmp_path / "tqdm.py").write_text("raise ImportError")
    env = environment("cpu", 8) | {"XLA_FLAGS": ""}
    env["PYTHONPATH"] = os.pathsep.join([str(tmp_path), env["PYTHONPATH"]])
    command = [sys.executable, "-m", "jflux.stress", "--calls", "3", "--in-flight", "1"]
    done = subprocess.run(command, env=env, text=True, capture_output=True, timeout=200)
    assert done.returncode == 0 and "on 8 x cpu" in done.stdout, done.stderr
    env["XLA_FLAGS"] = "--xla_force_host_platform_device_count=1"
    done = subprocess.run(command, env=env, text=True, capture_output=True, timeout=200)
    assert done.returncode == 1 and "nothing to run here: there is one device" in done.stderr


def test_a_run_that_is_killed_leaves_what_it_was_doing(tmp_path):
    path = tmp_path / "stress.json"
    command = [sys.executable, "-m", "jflux.stress", "--minutes", "9", "--report", str(path)]
    env = {**environment("cpu", 4), "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 120
        while not path.exists() and time.monotonic() < end:
            time.sleep(0.1)
    finally:
        process.kill()
        process.wait()
    report = json.loads(path.read_text())
    assert report["failure"] is None and all("mesh (" in line for line in report["running"])
    assert len(report["running"]) >= 4 and [p.name for p in tmp_path.iterdir()] == [path.name]


def test_flags_of_processes_go_together(capsys):
    with pytest.raises(SystemExit):
        main(["--processes", "2"])
    assert "--coordinator, --processes and --process go together" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.multiprocess
def test_ranks_that_share_gpus():
    command = [sys.executable, "shared_gpu.py", "--ranks", "3", "--calls", "6", "--graphs"]
    done = subprocess.run(command, cwd=HERE, timeout=150, text=True, capture_output=True)
    assert done.returncode == 0 and "6 calls right" in done.stdout, done.stderr
