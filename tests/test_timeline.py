"""jflux.timeline: what it records on GPUs, and what it makes of it anywhere."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from harness import OPS, PLATFORM, RANKS, make_mesh, run

from jflux import timeline
from jflux._stress.calls import Call, operands, per_device

WAIT, MULTIPLY, EPILOGUE, PARTS, SEND, STORE, COPY = range(7)


def _made_up() -> timeline.Timeline:
    def event(begin, end, kind, sm, a, b):
        return (1_000_000 + begin, 1_000_000 + end, 7, kind, sm, a, b)

    def array(*events):
        return np.array(list(events), timeline._EVENT)

    return timeline.Timeline(
        {
            0: array(event(0, 500, WAIT, 0, 0, 0), event(500, 4500, MULTIPLY, 0, 0, 0)),
            3: array(event(1000, 3000, SEND, 5, 1, 9), event(2000, 5000, MULTIPLY, 6, 2, 1)),
        }
    )


def test_saved_for_perfetto(tmp_path):
    _made_up().save(tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    work = [e for e in events if e["ph"] == "X"]
    assert [(e["pid"], e["name"], e["ts"], e["dur"]) for e in work] == [
        (0, "wait for rows", 0.0, 0.5),
        (0, "multiply", 0.5, 4.0),
        (3, "send", 1.0, 2.0),
        (3, "multiply", 2.0, 3.0),
    ]
    assert work[2]["args"] == {"call": 7, "peer": 1, "chunk or tile row": 9}
    assert work[3]["args"] == {"call": 7, "tile row": 2, "tile column": 1}
    # Every thread of every process has a name.
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert {(e["pid"], e["tid"]) for e in work} <= named
    assert {e["pid"] for e in events if e["name"] == "process_name"} == {0, 3}


def test_nothing_recorded(tmp_path):
    empty = timeline.Timeline({0: np.array([], timeline._EVENT)})
    for use in (empty.summary, lambda: empty.save(tmp_path / "t.json")):
        with pytest.raises(ValueError, match="no jflux kernel ran"):
            use()


def test_plotted(tmp_path):
    pytest.importorskip("matplotlib")
    _made_up().plot(tmp_path / "t.png")
    assert (tmp_path / "t.png").stat().st_size > 1000


def test_summary():
    lines = _made_up().summary().split("\n")
    assert lines[0].startswith("GPU 0: 0.0 to 4.5 us; wait for rows 11.1%")
    assert "multiply 44.4% (1 of 4.00 us, last at 4.5)" in lines[0]  # of two consumers' time
    assert lines[1].startswith("GPU 3: 1.0 to 5.0 us;")


@pytest.mark.skipif(PLATFORM == "gpu", reason="there are GPUs")
def test_says_that_it_needs_gpus():
    with pytest.raises(RuntimeError, match="there are none here"), timeline.record():
        pass


@pytest.mark.skipif(PLATFORM == "gpu", reason="there are GPUs")
def test_the_command_says_so_before_it_multiplies(monkeypatch):
    monkeypatch.setattr("sys.argv", ["jflux.timeline"])
    monkeypatch.setattr(timeline.Trial, "operands", lambda *_: pytest.fail("made operands"))
    with pytest.raises(SystemExit, match="there are none here"):
        timeline.main()


@pytest.mark.gpu
@pytest.mark.parametrize("op", OPS)
def test_records_every_tile(op):
    call = Call(op, lead=(512,), k=256, n=768, dtype=jnp.bfloat16)
    mesh = make_mesh((RANKS,))
    f, (x, w) = per_device(mesh, call.bind("tp")), operands(call, mesh, "tp")
    run(f, x, w)
    with timeline.record() as t:
        run(f, x, w)
    assert len(t.events) == RANKS and t.missed == 0
    for rank, events in enumerate(t.events.values()):
        events = events[events["call"] == events["call"].max()]  # `run` makes several
        assert (events["end_ns"] >= events["begin_ns"]).all()
        tiles = events[events["kind"] == MULTIPLY]
        # Each tile once; all tile rows, each with the same columns.
        seen, counts = np.unique(np.stack([tiles["a"], tiles["b"]]), axis=1, return_counts=True)
        assert (counts == 1).all()
        assert set(seen[0]) == set(range(call.multiplied_rows(RANKS) // 128))
        assert len(seen[0]) == len(set(seen[0])) * len(set(seen[1]))
        sends = events[events["kind"] == SEND]
        if op != "matmul_reduce_scatter":
            assert set(sends["a"]) == set(range(RANKS)) - {rank}
        parts = events[events["kind"] == PARTS]
        assert (len(parts) > 0) == (not call.multiplies_after)
        copies = events[events["kind"] == COPY]
        assert set(copies["a"]) == (set(sends["a"]) if op == "matmul_all_to_all" else set())
    with timeline.record(max_events=3) as t:
        run(f, x, w)
    assert t.missed > 0 and "found no room" in t.summary()
