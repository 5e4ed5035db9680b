"""bench/: what it makes of results. (Timing itself needs GPUs.)"""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench import compare, harness, render, shapes  # noqa: E402


def _result(path, times):
    def timing(seconds):
        return {"median": seconds, "low": seconds, "high": seconds}

    rows = [
        {"op": op, "m": m, "n": 8, "k": 16, "S": timing(s), "J": timing(j)}
        for (op, m), (s, j) in times.items()
    ]
    path.write_text(json.dumps({"machine": {}, "rows": rows}))
    return compare.ratios(path)


def test_compare_shows_the_change_of_the_ratio(tmp_path):
    before = _result(tmp_path / "a", {("f", 64): (2.0, 1.0), ("f", 128): (1.0, 1.0)})
    # Twice as fast a machine, and the same ratio.
    after = _result(tmp_path / "b", {("f", 64): (1.0, 0.5), ("g", 128): (1.0, 1.0)})
    lines = compare.compare(before, after)
    assert len(lines) == 2 and lines[1].split() == ["f", "64", "8", "16", "0.500", "0.500", "+0.0%"]
    assert compare.compare(before, {("f", 64, 8, 16): 0.75})[1].split()[-1] == "+50.0%"


def test_impossible_rates_are_refused(monkeypatch):
    shape = shapes.Shape("all_gather_matmul", 8192, 49152, 12288)
    kind = harness.jax.devices()[0].device_kind
    monkeypatch.setitem(harness.PEAK_FLOPS, kind, 989e12)
    possible = shape.flops(4) / 900e12
    harness.check_rate(shape, 4, possible)
    with pytest.raises(RuntimeError, match="the benchmark is wrong"):
        harness.check_rate(shape, 4, possible / 1.2)


def test_blocks_are_rendered():
    def timing(seconds):
        return {"median": seconds, "low": seconds, "high": seconds}

    row = {
        "model": "M", "part": "mlp", "tokens": 64, "alone": timing(1e-3), "XLA": timing(4e-3),
        "jflux": timing(2e-3), "memory": {"XLA": {"xla": 1 << 20, "heap": 0},
                                          "jflux": {"xla": 2 << 20, "heap": 3 << 20}},
    }  # fmt: skip
    machine = {"gpus": "2 x X", "processes": 1}
    text = render.document([("b", {"machine": machine, "blocks": [row]})])
    assert "| M | mlp | 64 | 1.000 | 4.000 | 2.000 | 0.500 | 3.000 | 1.000 | 1 | 2 | 3 |" in text
