"""python -m jflux.selftest: its report, its record, and the whole program on CPUs."""

import dataclasses
import functools
import json
import os
import pathlib
import subprocess
import sys

import jax
import pytest
from harness import PLATFORM, make_mesh
from jax.sharding import PartitionSpec as P
from workers.common import environment

from jflux import _native, doctor, selftest
from jflux._call import plans, selftest_record
from jflux._call.gpu_code import HOPPER, PORTABLE
from jflux._call.selftest_record import Key
from jflux._heap._nodes import Facts, Job
from jflux._ops._spec import all_ops
from jflux._selftest import bench, local, parts, report
from jflux._selftest.report import Done, Machine

TOOLS = pathlib.Path(__file__).resolve().parents[1] / "tools"

A100 = Machine(("jflux 1", "driver 580.1"), "cuda", ("an A100",), 4, PORTABLE, "580.1", "1")
RIGHT = [Done("machine", True, 1.0, "4 devices"), Done("random programs", True, 90.0, "9 calls")]
WRONG = [*RIGHT, Done("heap", False, 3.0, "no link")]
LEFT_OUT = [*RIGHT, Done("benchmark", None, said="no time left")]


# ---- When a run counts ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("machine", "done", "why"),
    [
        (A100, RIGHT, None),
        (A100, WRONG, "wrong: heap"),
        (A100, LEFT_OUT, "left out: benchmark"),
        (None, RIGHT, "not looked at"),
        (dataclasses.replace(A100, arch=HOPPER), RIGHT, "nothing here waits"),
        (dataclasses.replace(A100, platform="cpu", arch=0), RIGHT, "nothing here waits"),
        (dataclasses.replace(A100, kinds=("an A100", "a T4")), RIGHT, "several models"),
        (dataclasses.replace(A100, driver=""), RIGHT, "driver's version"),
    ],
)
def test_when_a_run_is_recorded(machine, done, why):
    found = report.why_no_record(machine, done)
    assert found is None if why is None else why in found


def test_the_record_is_written_and_removed(tmp_path, monkeypatch):
    monkeypatch.setenv("JFLUX_TUNING_DIR", str(tmp_path))
    path = selftest_record.path("an A100")
    assert path == tmp_path / "selftest-an_a100.json"
    for done, there, said in [
        (LEFT_OUT, False, "nothing is recorded"), (WRONG, False, "nothing is recorded"),
        (RIGHT, True, f"recorded in {path}"), (LEFT_OUT, True, "nothing is recorded"),
        (WRONG, False, "earlier run is removed"),
    ]:  # fmt: skip
        assert said in selftest.settle(A100, done)
        assert path.exists() == there
    selftest.settle(A100, RIGHT)
    # A GPU of another kind, and what nothing waits for, keeps its hands off.
    selftest.settle(dataclasses.replace(A100, kinds=("a T4",)), WRONG)
    selftest.settle(dataclasses.replace(A100, arch=HOPPER), WRONG)
    content = json.loads(path.read_text())
    assert content.pop("day")
    assert content == {"gpu": "an A100", "driver": "580.1", "jflux": "1", "arch": 80, "devices": 4}
    assert selftest_record.found(path.read_text(), A100.key) == selftest_record.Found(4)


def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JFLUX_TUNING_DIR", str(tmp_path / "file"))
    assert "JFLUX_TUNING_DIR names a folder" in selftest.settle(A100, RIGHT)


KEY = Key("an A100", "580.1", "1", PORTABLE)
RECORD = {**dataclasses.asdict(KEY), "devices": 2, "day": "2026-11-30"}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (json.dumps(RECORD), ""),
        (None, "it has not passed here"),
        ("{", "cannot be read"),
        ("[1]", "cannot be read"),
        ("[" * 100_000, "cannot be read"),
        (json.dumps(RECORD | {"devices": True}), "cannot be read"),
        (json.dumps(RECORD | {"devices": 0}), "cannot be read"),
        (json.dumps(RECORD | {"driver": "570"}), "it passed with driver 570, and this is 580.1"),
        (json.dumps(RECORD | {"jflux": "2"}), "it passed with jflux 2, and this is 1"),
        (json.dumps(RECORD | {"gpu": "a T4"}), "it passed on a T4, and this is an A100"),
        (json.dumps(RECORD | {"arch": 90}), "it passed with code for sm_90, and this is 80"),
    ],
)
def test_what_a_record_says(text, why):
    found = selftest_record.found(text, KEY)
    assert found.devices == (0 if why else 2)
    assert why in found.why and bool(found.why) == bool(why)


# ---- Jobs of several processes -------------------------------------------------------------------


def facts(process, host="h", devices=1, checked=0, no_record="it has not passed here"):
    first = 8 * process
    return Facts(
        process, host, tuple(range(first, first + devices)), ("",) * devices, 1 << 20,
        arch=PORTABLE, checked=checked, no_record="" if checked else no_record,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("processes", "why"),
    [
        ([facts(0, devices=4, checked=4)], ""),
        ([facts(0, devices=2, checked=4)], ""),
        ([facts(0, devices=4, checked=2)], "it passed on 2 GPUs, and here are 4"),
        ([facts(0)], "it has not passed here"),
        ([facts(0, checked=2), facts(1, checked=2)], ""),
        ([facts(0, checked=1), facts(1, checked=1)], "process 0: it passed on 1 GPUs, and here"),
        ([facts(0, "a", checked=1), facts(1, "b", checked=1)], ""),
        ([facts(0, "a", checked=1), facts(1, "b")], "process 1: it has not passed here"),
    ],
)
def test_all_processes_give_the_same_answer(processes, why):
    """From the facts of all of them, as these are exchanged."""
    exchanged = [Facts.load(one.dump()) for one in processes]
    assert exchanged == processes
    assert Job.of(exchanged, {}).no_record.startswith(why)
    assert Job.of(exchanged, {}).no_record == "" or why
    assert Job.of([], {}, absent="process 1 did not come").no_record == "process 1 did not come"


# ---- The report ----------------------------------------------------------------------------------


def test_the_report():
    rows = [("all_reduce, 8 KB of a rank", 20.0, 5.0)]
    lines = report.text(A100, LEFT_OUT, ["heap: 4 links"], rows, "nothing is recorded")
    assert lines[:4] == ["python -m jflux.selftest", "jflux 1", "driver 580.1", "heap: 4 links"]
    assert "random programs    right       90 s  9 calls" in lines
    assert "benchmark          left out     0 s  no time left" in lines
    assert lines[-3].split() == "all_reduce, 8 KB of a rank 20.0 5.0 4.00".split()
    assert lines[-1] == "all that ran is right; nothing is recorded"
    lines = report.text(None, WRONG, [], [], "gone")
    assert "heap               WRONG        3 s  no link" in lines
    assert lines[-1] == "WRONG: 1 of 3 parts; gone"


PART = parts.Part("a part", dict, 10)
NAMED = dataclasses.replace(PART, says="waited 2 s for rank 1")


@pytest.mark.parametrize(
    ("part", "status", "output", "found", "right", "said"),
    [
        (PART, 0, "", {"said": "all"}, True, "all"),
        (PART, 1, "", {"error": "ValueError: no"}, False, "ValueError: no"),
        (PART, None, "", {}, False, "not ended after 10 s"),
        (PART, -6, "", {}, False, "its process ended with signal 6"),
        (PART, -11, "", {"said": "all"}, False, "its process ended with signal 11"),
        (PART, 3, "", {}, False, "its process ended with status 3"),
        (PART, 0, "", {}, False, "its process ended with status 0"),
        (NAMED, 0, "rank 0 waited 2 s for rank 1", {"said": "an error"}, True, "an error"),
        (NAMED, 0, "out of memory", {"said": "an error"}, False, "does not name the rank"),
    ],
)
def test_what_becomes_of_a_part(part, status, output, found, right, said):
    done = selftest.verdict(part, status, output, found, 1.0, 10.0)
    assert done.right is right and said in done.said


def test_a_process_that_hangs_is_ended():
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    status, output = selftest.run([sys.executable, "-c", code], 1.0)
    assert status is None
    with pytest.raises(ProcessLookupError):
        os.kill(int(output), 0)


def test_each_machine_has_its_parts():
    def names(**changes):
        return [part.name for part in parts.for_machine(dataclasses.replace(A100, **changes))]

    assert names() == [part.name for part in parts.OTHERS]
    assert names(devices=1) == ["heap", "local ops", "benchmark"]
    of_cpus = names(platform="cpu", arch=0)
    assert "benchmark" not in of_cpus and {"random programs", "a planted fault"} <= set(of_cpus)


def test_parts_for_which_no_time_is_left(monkeypatch):
    found = {"said": "4 devices", "machine": dataclasses.asdict(A100)}
    found = json.loads(json.dumps(found))
    monkeypatch.setattr(selftest, "do", lambda part, seconds: (Done(part.name, True, 1.0), found))
    machine, done, _ = selftest.selftest(limit=0.5)
    assert machine == A100
    assert [one.right for one in done] == [True] + [None] * len(parts.OTHERS)
    assert "left out" in report.why_no_record(machine, done)


def test_local_ops_are_checked(monkeypatch):
    """A call of each kind is right, and one with a number that is off is found."""
    assert local.check(seed=1, calls=1) == len(local.KINDS)
    run = local._run

    def off(op, f, *args):
        found = run(op, f, *args)
        return found._replace(counts=found.counts + 1) if op == "moe_route" else found

    monkeypatch.setattr(local, "_run", off)
    with pytest.raises(AssertionError, match="route, call 0: moe.route: counts: wrong"):
        local.check(seed=1, calls=1)


@pytest.mark.skipif(PLATFORM == "gpu" or jax.device_count() < 4, reason="for four CPU devices")
def test_the_benchmark(monkeypatch):
    """With calls of a size for CPUs."""
    small = {
        "ITERATIONS": 2, "ROUNDS": 2, "COLLECTIVES": (("all_reduce", 512), ("all_gather", 256)),
        "PRODUCTS": (("all_gather_matmul", 64, 64, 32),), "ROUTE": (64, 2, 8),
        "DECODE": (2, 64, 4, 2, 64),
    }  # fmt: skip
    for name, value in small.items():
        monkeypatch.setattr(bench, name, value)
    rows = [*bench.over_ranks(make_mesh((4,))), *bench.of_one_rank()]
    assert [call.split(",")[0] for call, *_ in rows] == [
        "all_reduce", "all_gather", "all_gather_matmul", "moe.route", "flash_decode"
    ]  # fmt: skip
    assert all(lax > 0 and own > 0 for _, lax, own in rows)


@pytest.mark.skipif(PLATFORM == "gpu" or jax.device_count() < 4, reason="for four CPU devices")
@pytest.mark.parametrize("name", ["HOPPER", "PORTABLE"])
def test_the_calls_take_kernels_on_gpus(name, monkeypatch):
    """What the parts demand of GPUs is what these plan."""
    if not TOOLS.is_dir():
        pytest.skip("the tools are not here")
    monkeypatch.syspath_prepend(TOOLS)
    import support_page

    machine, mesh = getattr(support_page, name), make_mesh((4,))
    for op, spec in all_ops().items():
        first, last = _native.lib.gpus(op)
        shapes = [(4, 4, 4, 1000)] if spec.product is None else [(32, 64), (64, 32)]
        operands = [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in shapes]
        with support_page.planned_on({"here": (machine, None)}) as calls:
            doctor._program(spec, mesh).lower(*operands)
        assert parts.runs_kernels(op, calls["here"]) or not first <= machine.arch <= last, op
    assert not parts.runs_kernels("all_reduce", [("all_reduce", plans.reference("none"))])
    for op in ("all_reduce", "all_gather_matmul"):  # without rank 1
        call = functools.partial(parts._call, all_ops()[op])
        mapped = jax.shard_map(
            call, mesh=mesh, in_specs=(P("tp"), P()), out_specs=P("tp"), check_vma=False
        )
        x, w = (jax.ShapeDtypeStruct(shape, "bfloat16") for shape in [(2048, 64), (64, 64)])
        with support_page.planned_on({"here": (machine, None)}) as calls:
            jax.jit(mapped).lower(x, w)
        assert [(name, plan.path) for name, plan in calls["here"]] == [(op, "fused")]


@pytest.mark.slow
def test_the_whole_program(tmp_path):
    variables = environment(PLATFORM, 4) | {"JFLUX_TUNING_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "jflux.selftest"], env=variables, timeout=900, text=True,
        capture_output=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "python -m jflux.selftest" and lines[1].startswith("jflux ")
    for name in ("machine", "heap", "local ops", "random programs", "a planted fault"):
        assert any(line.startswith(f"{name} ") and " right " in line for line in lines), name
    assert "WRONG" not in done.stdout and not list(tmp_path.glob("selftest-*"))
    assert "nothing is recorded (nothing here waits" in lines[-1]
