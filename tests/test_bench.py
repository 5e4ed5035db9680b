"""bench/: what it makes of results. (Timing itself needs GPUs.)"""

import collections
import contextlib
import dataclasses
import importlib.util
import itertools
import json
import re
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import PLATFORM, RANKS, make_mesh

import jflux
from jflux._tools import trials

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench import __main__ as bench_of_shapes  # noqa: E402
from bench import (  # noqa: E402
    accuracy,
    attention,
    attention_peers,
    blocks,
    cache_check,
    capacity,
    cards,
    code_bases,
    collectives,
    command,
    compare,
    conclusions,
    decode,
    earlier,
    experts,
    flash_decode,
    gathered,
    grids,
    harness,
    maxtext,
    moe,
    moe_peers,
    peers,
    products,
    quoted,
    rates,
    readme,
    render,
    renew,
    reproduce,
    scaled,
    scattered,
    sections,
    shapes,
    xla,
)


def _timing(median, spread=0.0):
    return {"median": median, "low": median * (1 - spread), "high": median * (1 + spread)}


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8, 9])
def test_each_contestant_follows_each_other_one_as_often(count):
    rounds = count if count % 2 == 0 else 2 * count
    orders = trials.balanced_orders(count, rounds)
    assert len(orders) == rounds
    assert all(sorted(order) == list(range(count)) for order in orders)
    follows = collections.Counter(pair for order in orders for pair in itertools.pairwise(order))
    assert len(follows) == count * (count - 1)
    assert set(follows.values()) <= {rounds // count}
    assert trials.balanced_orders(count, rounds + 1)[-1] == orders[0]


@pytest.mark.parametrize("size", [5, 8])
def test_weights_that_are_padded_are_others_in_each_call(size):
    """Or XLA would pad them once for all calls."""
    run = trials.loop(lambda x, w: x + jnp.sum(w), 1 + 2 * trials.CALLS_IN_A_BODY)
    y = jax.jit(run)(jnp.ones((1, 1)), jnp.zeros((size, 8)))
    assert (y.item() != 1) == (size == 5)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_odd_shapes_are_no_multiples_of_tiles_on_any_rank(ranks):
    found = shapes.of("odd", ranks)
    assert {s.m for s in found} == {rows * ranks for rows in (1, 7, 333, 4091)}
    for s in found:
        own = (s.n // ranks, s.k) if s.op == shapes.AG else (s.n, s.k // ranks)
        assert all(size % 64 for size in own)
        assert s in shapes.LISTS["odd"]
    assert {s.k % 8 == 0 for s in found} == {True, False}
    assert [s.m for s in shapes.of("ragged", 5)][:2] == [85, 205]


def test_what_was_measured_is_saved_row_by_row(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "machine", lambda ranks, processes: {"gpus": f"{ranks} x X"})
    path, rows = tmp_path / "results" / "found.json", []
    for row in ({"m": 1}, {"m": 2}):
        rows.append(row)
        command.save(path, 2, 1, sizes=[3], rows=rows)
        assert json.loads(path.read_text()) == {
            "machine": {"gpus": "2 x X"}, "sizes": [3], "rows": rows
        }  # fmt: skip
    command.save(None, 2, 1, rows=rows)


def _compared(tmp_path, capsys, *results):
    paths = [tmp_path / "before.json", tmp_path / "after.json"]
    for path, result in zip(paths, results, strict=True):
        path.write_text(json.dumps(result))
    compare.main([*map(str, paths)])
    return capsys.readouterr()


def test_compare_shows_the_change_of_the_ratio(tmp_path, capsys):
    def result(times, gpus="2 x X"):
        rows = [
            {"op": op, "m": m, "S": _timing(s, 0.01), "J": _timing(j, 0.01)}
            for (op, m), (s, j) in times.items()
        ]
        return {"machine": {"gpus": gpus}, "rows": rows}

    before = result({("f", 64): (2.0, 1.0), ("f", 128): (1.0, 1.0), ("f", 256): (1.0, 1.0)})
    # Twice as fast a machine; the same ratio, one that is slower, and one by less than the noise.
    times = {
        ("f", 64): (1.0, 0.5),
        ("f", 128): (0.5, 0.6),
        ("f", 256): (0.5, 0.505),
        ("g", 1): (1, 1),
    }
    said = _compared(tmp_path, capsys, before, result(times, "4 x X"))
    rows = [line.split() for line in said.out.splitlines()[1:-1]]
    assert rows[0] == ["f", "64", "J", "/", "S", "0.5", "0.5", "+0.0%"]
    assert rows[1] == ["f", "128", "J", "/", "S", "1", "1.2", "+20.0%"]
    assert rows[2][-2:] == ["+1.0%", "noise"]
    assert "1 more rows" in said.out and "gpus was 2 x X, is 4 x X" in said.err
    with pytest.raises(SystemExit, match="no row in common"):
        _compared(tmp_path, capsys, before, result({("g", 1): (1.0, 1.0)}))
    with pytest.raises(SystemExit, match="has rows, .* has blocks"):
        _compared(tmp_path, capsys, before, {"machine": {}, "blocks": []})


@pytest.mark.parametrize("path", sorted((ROOT / "bench" / "results").glob("*.json")), ids=str)
def test_every_result_compares_with_itself(path, capsys):
    compare.main([str(path), str(path)])
    said = capsys.readouterr()
    lines = said.out.splitlines()
    (rows,) = (value for value in json.loads(path.read_text()).values() if isinstance(value, list))
    assert len(lines) > len(rows) and not said.err
    assert all(line.endswith("+0.0%") for line in lines[1:])


@pytest.fixture
def as_fast_as_an_h200(monkeypatch):
    kind = rates.jax.devices()[0].device_kind
    monkeypatch.setitem(rates.PEAKS, kind[:3], rates.PEAKS["NVIDIA H200"])
    rates.peaks.cache_clear()
    yield
    rates.peaks.cache_clear()


def test_impossible_rates_are_refused(as_fast_as_an_h200):
    shape = shapes.Shape("all_gather_matmul", 8192, 49152, 12288)
    product = shape.flops(4) / 900e12
    gather = 3 / 4 * 8192 * 12288 * 2 / 400e9
    possible = {"G": product, "C": gather, "S": product + gather, "J": product}
    harness.check_rates(shape, 4, possible)
    too_fast = {"G": product, "C": gather, "S": product, "J": product}
    for name, seconds in too_fast.items():
        with pytest.raises(RuntimeError, match=f"{name} at .*the benchmark is wrong"):
            harness.check_rates(shape, 4, possible | {name: seconds / 1.2})


def test_no_committed_figure_is_refused(as_fast_as_an_h200):
    for _, result in render.of_ops(render.load()):
        ranks = int(result["machine"]["gpus"].split()[0])
        for row in result["rows"]:
            shape = shapes.Shape(row["op"], row["m"], row["n"], row["k"])
            seconds = {name: v["median"] for name, v in row.items() if isinstance(v, dict)}
            harness.check_rates(shape, ranks, seconds)


def test_a_picture_shows_the_kernels_of_one_day():
    def result(day, ranks):
        rows = [{"op": "all_gather_matmul", "m": 64, "n": 49152, "k": 12288}]
        machine = {"date": day, "gpus": f"{ranks} x H200", "processes": 1}
        return f"{ranks}", {"machine": machine, "rows": rows}

    results = [result("2026-01-02", 4), result("2026-01-03", 2), result("2026-01-03", 8)]
    shown = render.curves(results, "all_gather_matmul")
    assert [machine["gpus"] for machine, _ in shown.values()] == ["2 x H200", "8 x H200"]
    assert all(rows for _, rows in shown.values())

    newest = [*results, result("2026-01-04", 4)]
    assert render.curves(newest, "all_gather_matmul").keys() == shown.keys()

    # Rows that were kept when others were added are of their own day.
    added = result("2026-01-04", 2)
    added[1]["rows"] = [{"date": "2026-01-03"} | row for row in added[1]["rows"]]
    shown = render.curves([*results, added], "all_gather_matmul")
    assert {machine["date"] for machine, _ in shown.values()} == {"2026-01-03"}


def document(results):
    """All pages."""
    return "\n".join(render.pages(results).values())


def test_every_result_is_on_a_page():
    results = render.load()
    text = document(results)
    kinds = {"rows", *sections.SECTIONS}
    assert sorted(kind for _, kinds in render.TABLES.values() for kind in kinds) == sorted(
        sections.SECTIONS
    )
    for name, result in results:
        assert kinds & set(result), f"{name} is of no kind that is rendered"
        assert f"[{name}.json](../../bench/results/{name}.json)" in text
    for kind in cards.CASES:
        for _, result in sections.of_kind(results, kind):
            for row in result[kind]:
                name = row["case"]["name"] if "case" in row else f"{row['op']} | {row['m']}"
                assert f"| {name} |" in text


def test_no_page_has_a_heading_twice():
    for page in render.pages(render.load()).values():
        found, above = [], ""
        for line in page.splitlines():
            above = line if line.startswith("## ") else above
            found += [(above, line)] if line.startswith("#") else []
        assert len(found) == len(set(found))


def test_conclusions_compare_every_row():
    found = list(conclusions.compared(render.load()))
    counts = collections.Counter(c.what for c in found if c.against == conclusions.XLA)
    rows = [
        row["op"] for _, r in render.of_ops(render.load()) if "note" not in r["machine"]
        for row in r["rows"]
    ]  # fmt: skip
    assert collections.Counter(rows) == {op: counts[op] for op in set(rows)}
    assert {c.what for c in found} >= {"attention, f+b", "ragged_all_to_all"}

    one, two = shapes.LISTS["flux"][:2]
    result = _of_shapes("2 x NVIDIA H200", [one, two])  # J 2 ms, S 3 ms
    result["rows"][1]["J"] = _timing(6e-3)
    line = conclusions.table([("2xh200", result)]).splitlines()[-1]
    assert line == f"| {one.op} | XLA's own sequence | **1.33** (0.67&nbsp;to&nbsp;2.00) | 2 | 1 |"
    case = {"name": "A", "cache": "bfloat16"}
    rows = [
        {"case": case | {"cache": cache}, "1": _timing(2e-3), "G": _timing(seconds)}
        for cache, seconds in (("bfloat16", 8e-3), ("latent", 2e-2))
    ]
    result = {"machine": result["machine"], "flash_decode": rows}
    assert conclusions.table([("a", result)]).splitlines()[-2:] == [
        "| flash_decode | cuDNN's on one GPU / N | 0.50 | 1 |",
        "| flash_decode, latent cache | einsums on one GPU / N | 0.20 | 1 |",
    ]


def test_every_row_in_which_jflux_is_slower_is_listed():
    """Sorted; of every kind of contestant, and of old kernels too."""
    one, two, three = shapes.LISTS["flux"][:3]
    result = _of_shapes("2 x NVIDIA H200", [one, two, three], date="2025-01-01", jflux="9.9")
    # J 2 ms, S 3 ms
    result["rows"][0] |= {"T": _timing(1e-3), "S captured": _timing(2.5e-3), "K": _timing(1e-3)}
    result["rows"][1]["S captured"] = _timing(1.6e-3, 0.3)
    page = conclusions.slower([("2xh200", result), ("old", _noted(result))])
    others, own = page.split("## Where another way")
    lines = [line.split(" | ") for line in others.splitlines() if line.startswith("| ")][2:]
    assert [line[0] for line in lines] == ["| 2.000", "| 2.000", "| 1.250 ~", "| 1.250 ~"]
    assert lines[0][2:7] == [
        one.name,
        "PyTorch's symmetric-memory op",
        "2.000 ms",
        "1.000 ms",
        "2 x H200",
    ]
    assert [line[-1] for line in lines[:2]] == [f"before {earlier.CHANGES[0].since} |"] * 2
    assert "in 4 of 8 comparisons" in others and "in 2 of 2 comparisons" in own
    assert conclusions.count_of_slower([("2xh200", result)]) == "2 of 4 comparisons"


def test_every_committed_row_in_which_xla_is_faster_is_listed():
    page = conclusions.slower(render.load())
    for name, result in render.of_ops(render.load()):
        for row in result["rows"]:
            if row["J"]["median"] > min(row[x]["median"] for x in shapes.XLA if x in row):
                day = row.get("date", result["machine"]["date"])
                where = f"[{day}](../bench/results/{name}.json)"
                size = f"| {row['op']} | {shapes.of_row(row).name} | XLA's own sequence |"
                assert any(size in line and where in line for line in page.splitlines())


def test_rows_that_are_older_than_their_kernels_are_marked():
    change = earlier.Change("2026-01-03", ("rows",), "less", where=lambda row: row["m"] > 64)
    result = _of_shapes("2 x NVIDIA H200", shapes.LISTS["flux"][:3])  # of 64, 512 and 1024 rows
    result["rows"][2]["date"] = "2026-01-03"
    machine, rows = result["machine"], result["rows"]
    assert [change.is_after("a", "rows", row, machine) for row in rows] == [False, True, False]
    named = dataclasses.replace(change, results=("a",))
    assert [named.is_after("a", "rows", row, machine) for row in rows] == [False, True, True]
    assert not dataclasses.replace(named, least_ranks=3).is_after("a", "rows", rows[1], machine)
    assert not change.is_after("a", "grids", rows[1], machine)


def test_tables_say_that_they_are_of_earlier_kernels(monkeypatch):
    change = earlier.Change("2026-01-03", ("rows",), "was slower")
    monkeypatch.setattr(earlier, "CHANGES", (change,))
    result = _of_shapes("2 x NVIDIA H200", shapes.LISTS["flux"][:2], driver="", jax="", jflux="")
    text = document([("2xh200", result)])
    assert "All rows are of [earlier kernels]" in text and "the change of 2026-01-03." in text
    assert "| 2xh200 | 2026-01-03 | was slower |" in text
    result["rows"][0]["date"] = "2026-01-03"
    assert "1 of 2 rows are of [earlier" in earlier.mark("2xh200", "rows", result)
    assert "| 2xh200 (1 rows) |" in earlier.table([("2xh200", result)])


def test_figures_of_sentences_are_those_of_the_results():
    rows = [{"list": "dispatch", "D+C": _timing(d), "gather": _timing(1)} for d in (10.5, 0.8)]
    results = [("a", {"machine": {"gpus": "4 x NVIDIA H200"}, "experts": rows})]
    page = "took <!-- bench: dispatch over gather, 4 GPUs -->1 to 2<!-- end --> times <!-- end -->"
    filled = quoted.filled(page, results)
    assert filled == page.replace("1 to 2", ".80 to 10.50")
    assert quoted.filled(filled, results) == filled
    for name in quoted.FIGURES:
        assert re.search(r"\d", quoted.FIGURES[name](render.load())), name


def _noted(result):
    return result | {"machine": result["machine"] | {"note": "old kernels"}}


def _of_shapes(gpus, found, **machine):
    machine = {"gpus": gpus, "processes": 1, "date": "2026-01-02"} | machine
    times = {"G": _timing(1e-3), "C": _timing(1e-3), "S": _timing(3e-3), "J": _timing(2e-3)}
    return {"machine": machine, "rows": [dataclasses.asdict(s) | times for s in found]}


def test_models_of_gpu_side_by_side():
    a, b, c = shapes.LISTS["flux"][:3]
    h100, h200 = "2 x NVIDIA H100 80GB HBM3", "2 x NVIDIA H200"
    ours = ("2xh100", _of_shapes(h100, [a, b]))
    text = cards.beside([ours, ("2xh200", _of_shapes(h200, [b, c]))])
    (line,) = [line for line in text.splitlines() if line.startswith("| all_gather_matmul")]
    four = "3.000 | 2.000 | 0.667 | 0.50"
    assert line == f"| {b.op} | {b.m} | {b.n} | {b.k} | {four} | {four} |"
    assert "H100 J / S" in text and "H200 J / S" in text
    for other in (
        _of_shapes(h200, [c]),
        _of_shapes(h200, [b], processes=2),
        _of_shapes(h200, [b], note="old"),
        _of_shapes("4 x NVIDIA H200", [b]),
        _of_shapes(h100, [b]),
    ):
        assert cards.beside([ours, ("other", other)]) == ""


def test_cases_of_two_models_side_by_side():
    def result(gpus, seconds):
        row = {"case": {"name": "C"}, "error": 0.1, "J": _timing(seconds)}
        machine = {"gpus": gpus, "processes": 1, "date": "2026-01-02"}
        return {"machine": machine, "gathered": [row]}

    two = [("a", result("2 x NVIDIA H100 80GB HBM3", 1e-3)), ("b", result("2 x NVIDIA H200", 2e-3))]
    assert "| C | 1.000 (0.50) |" in cards.beside(two)


def test_what_has_not_been_measured_is_named():
    model = "NVIDIA H100 80GB HBM3"
    everything = cards.missing([], model, 2)
    assert set(everything) == set(renew.RUNS) - {"peers"}
    whole = _of_shapes(f"2 x {model}", cards.listed("ops", 2))
    assert "ops" not in cards.missing([("2xh100", whole)], model, 2)
    whole["rows"] = [row for row in whole["rows"] if shapes.of_row(row) not in shapes.LISTS["llm"]]
    count = len(dict.fromkeys(shapes.LISTS["llm"]))
    assert cards.missing([("2xh100", whole)], model, 2)["ops"] == f"lists llm ({count} of {count})"
    rows = [{"case": {"name": name}} for name in cards.CASES["gathered"][1:]]
    part = [("2xh100_gathered", {"machine": whole["machine"], "gathered": rows})]
    total, first = len(cards.CASES["gathered"]), cards.CASES["gathered"][0]
    assert cards.missing(part, model, 2)["gathered"] == f"1 of {total} rows: {first}"
    assert f"## 2 x {model}" in cards.to_do([("2xh100", whole)])
    rows = [{"grid": grid} for grid in ([2, 1, 1, 1], [1, 1, 1, 2], [1, 1, 2, 1])]
    part = [("2xh100_grids", {"machine": whole["machine"], "grids": rows})]
    assert cards.missing(part, model, 2)["grids"] == "1 of 4 rows: 1x2x1x1"
    rows = [{"op": "all_reduce", "bytes": size} for size in collectives.SIZES[1:]]
    rows += [{"op": case.op, "bytes": case.bytes} for case in collectives.LISTS["pair"](2)]
    part = [("2xh100_collectives", {"machine": whole["machine"], "collectives": rows})]
    left = "lists all_reduce (1 of 13), norm (4 of 4), all_to_all (11 of 11)"
    assert cards.missing(part, model, 2)["collectives"] == left


def test_what_has_not_been_measured_on_more_gpus_is_named():
    """Where something was measured on so many; runs of one GPU are named once."""
    model = "NVIDIA H100 80GB HBM3"
    results = [("4xh100", _of_shapes(f"4 x {model}", shapes.of("flux", 4)))]
    text = cards.to_do(results)
    two, four = text.split(f"## 4 x {model}")
    assert f"## 2 x {model}" in two and "## 8 x" not in text and "--ranks N" in two
    assert "| products |" in two and "| products |" not in four
    ops = next(line for line in four.splitlines() if line.startswith("| ops |"))
    assert "flux" not in ops and "llm (" in ops
    assert "flux" in next(line for line in two.splitlines() if line.startswith("| ops |"))


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_rows_are_under_the_list_that_was_asked_for(ranks):
    """Also where ranks do not divide its rows, and so more rows were timed (bench.shapes.of)."""
    for name in ("flux", "hundreds", "odd"):
        result = _of_shapes(f"{ranks} x NVIDIA H200", shapes.of(name, ranks))
        assert list(render.by_list(result)) == [name]


@pytest.mark.parametrize("ranks", [4, 8])
def test_results_of_more_gpus_are_rendered(ranks):
    """Copies of those of two, as if they were of more: tables say how many, and rates are of one
    GPU; nothing else changes."""
    results, kinds = [], set()
    for name, result in render.load():
        if not name.startswith("2x"):
            continue
        machine = result["machine"] | {"gpus": f"{ranks} x NVIDIA H300", "date": "2030-01-01"}
        results.append((name.replace("2x", f"{ranks}x"), result | {"machine": machine}))
        kinds |= set(result) - {"machine"}
    assert {"rows", "experts", "attention", "gathered", "scattered"} <= kinds
    text = document(results)
    headings = [
        line
        for line in text.split("# Not measured yet")[0].splitlines()
        if line.startswith("## ") and " x " in line
    ]
    assert len(headings) == len(results)
    assert all(f"{ranks} x NVIDIA H300" in line for line in headings)
    for op in render.PICTURES:
        if curves := render.curves([r for r in results if "rows" in r[1]], op):
            assert all(name.startswith(f"{ranks} x NVIDIA H300") for name in curves)
    gathered = dict(results)[f"{ranks}xh100_gathered"]["gathered"][0]
    half, whole = (sections.gathered.cells(gathered, n)[7] for n in (2, ranks))
    assert int(half) == pytest.approx(int(whole) * ranks / 2, abs=ranks)


@pytest.fixture
def benchmark_of_shapes(monkeypatch):
    """A function (arguments) -> the shapes that `python -m bench` has measured, in no time."""
    measured = []

    def measure(shape, mesh, rounds, others):
        measured.append(shape)
        return {name: trials.Timing(1e-3, 1e-3, 1e-3) for name in "GCSJ"}

    here = {"gpus": "2 x X", "processes": 1, "date": "2026-01-03"}
    monkeypatch.setattr(command, "machine", lambda ranks, processes: here)
    monkeypatch.setattr(harness, "measure", measure)
    monkeypatch.setattr(jflux, "init", lambda **_: None)
    monkeypatch.setattr(type(jflux.config), "update", lambda *_, **__: None)

    def run(*options):
        measured.clear()
        monkeypatch.setattr(sys, "argv", ["bench", "--ranks", "2", "--lists", "flux", *options])
        assert bench_of_shapes.main() == 0
        return list(measured)

    return run


def test_rows_are_added_to_a_result(benchmark_of_shapes, tmp_path, capsys):
    path, flux = tmp_path / "2xx.json", shapes.LISTS["flux"]
    path.write_text(json.dumps(_of_shapes("2 x X", flux[1:4])))
    assert benchmark_of_shapes("--add", str(path), "--limit", "0") == []
    assert f"no time for {len(flux) - 3} rows, from {flux[0]} on" in capsys.readouterr().err
    assert benchmark_of_shapes("--add", str(path)) == [flux[0], *flux[4:]]
    result = json.loads(path.read_text())
    assert {shapes.of_row(row) for row in result["rows"]} == set(flux)
    assert result["machine"]["date"] == "2026-01-03"
    days = [render.day_of(row, result["machine"]) for row in result["rows"]]
    assert days == 3 * ["2026-01-02"] + (len(flux) - 3) * ["2026-01-03"]
    assert "Measured on 2026-01-02 and 2026-01-03." in render.tables(result)
    assert benchmark_of_shapes("--add", str(path)) == []


def test_readme_is_reproduced(benchmark_of_shapes, monkeypatch, capsys):
    """The rows of its table, beside those of bench/results."""
    known = reproduce.published
    gpu = "NVIDIA H100 80GB HBM3"
    monkeypatch.setattr(reproduce, "published", lambda results, *_: known(results, gpu, 4))
    measured = {"S": _timing(3e-3), "S captured": _timing(2.5e-3), "J": _timing(2e-3)}
    timings = {name: trials.Timing(**timing) for name, timing in measured.items()}
    monkeypatch.setattr(harness, "measure", lambda *_: timings)
    monkeypatch.setattr(sys, "argv", ["reproduce", "--ranks", "2"])
    assert reproduce.main() == 0
    first, heading, *lines, last = capsys.readouterr().out.splitlines()
    assert (
        first.startswith("2 x ") and heading == reproduce.HEADING and last.startswith("5 rows in")
    )
    published = readme.table(render.load()).splitlines()[4:9]
    for line, row in zip(lines, published, strict=True):
        name, m, n, k, _, _, gain = [cell.strip() for cell in row.strip("|").split("|")]
        start = f"{name} | {m} | {n} | {k} | 2.500 | 2.000 | 1.25 | {gain} on 4 x {gpu}"
        assert line.startswith(start)
    row = dataclasses.asdict(shapes.LISTS["flux"][0]) | measured
    older = {name: value for name, value in row.items() if name != "S captured"}
    said = reproduce.line(row, older | {"J": _timing(1e-3), "gpus": "2 x X"})
    assert said.endswith("1.25 | 3.00 on 2 x X (here 1.50 without S captured)")
    for of, gpus in (("NVIDIA H200", "2 x NVIDIA H200"), ("another", f"4 x {gpu}")):
        assert {row["gpus"] for row in known(render.load(), of, 2).values()} == {gpus}


def test_rows_are_not_added_to_those_of_another_machine(benchmark_of_shapes, tmp_path):
    path = tmp_path / "found.json"
    for result, why in (
        (_of_shapes("4 x X", []), "of gpus '4 x X', not '2 x X'"),
        (_of_shapes("2 x X", [], processes=2), "of processes 2, not 1"),
        (_of_shapes("2 x X", [], note="old ones"), "of other kernels: old ones"),
        ({"machine": {}, "moe": []}, "has no rows"),
    ):
        path.write_text(json.dumps(result))
        with pytest.raises(SystemExit, match=why):
            benchmark_of_shapes("--add", str(path))


def test_collectives_are_rendered():
    row = {"bytes": 512} | {name: {"median": 2e-6} for name in ("S", "one_shot")}
    row |= {"J": {"median": 1e-6}, "op": "all_reduce"}
    captured = row | {"op": "all_to_all", "C": {"median": 4e-6}}
    result = {"machine": {"gpus": "2 x X", "processes": 1}, "collectives": [row, captured]}
    text = document([("c", result)])
    assert "| 512 | 2.0 |  | 1.0 | 2.0 |  |  | 0.50 |  |" in text
    assert "all_to_all:" in text and "| 512 | 2.0 | 4.0 | 1.0 |  |  | 0.50 | 0.25 |" in text


@pytest.mark.parametrize("name", list(collectives.LISTS))
def test_collectives_are_measured(name, monkeypatch):
    """The smallest case of each list, on whatever is here."""
    monkeypatch.setattr(collectives, "CHAIN", 2)
    mesh = make_mesh((RANKS,))
    case = next(iter(collectives.LISTS[name](RANKS)))
    row = collectives.measure(case, mesh, rounds=2)
    assert all(row[contestant]["median"] > 0 for contestant in case.steps)
    assert len(collectives.cells(row)) == len(collectives.columns(case.op))


@pytest.mark.parametrize("op", [shapes.AG, shapes.RS])
def test_forms_of_xla_are_checked_and_timed(op, monkeypatch, capsys):
    """A windowed einsum of which XLA makes no loop, as on CPUs, is left out, and that is said."""
    monkeypatch.setattr(trials, "iterations_for", lambda seconds, flops: 2)
    mesh, shape = make_mesh((RANKS,)), shapes.Shape(op, 8 * RANKS, 16 * RANKS, 32 * RANKS)
    with jflux.config(strict=False):
        with monkeypatch.context() as patch:
            if PLATFORM == "gpu":
                patch.setattr(xla, "is_windowed", lambda program: False)
            assert "W" not in xla.measure(shape, mesh, rounds=1, without="S s")
        assert f"{shape}, W: left out, XLA made no loop" in capsys.readouterr().err
        monkeypatch.setattr(xla, "is_windowed", lambda program: True)
        row = xla.measure(shape, mesh, rounds=1, without="S ")
    assert len(xla.cells(row)) == len(xla.COLUMNS)
    assert row["W"]["median"] > 0 and "S captured" not in row


def test_what_xla_takes_is_said():
    row = {"op": shapes.AG, "m": 64, "n": 8, "k": 8} | {n: _timing(1e-5) for n in xla.CONTESTANTS}
    row |= {"S captured": _timing(8e-6), "J": _timing(6e-6)}
    assert xla.cells(row)[-2:] == ["0.60", "0.75"]
    said = xla.summary([row, row | {"J": _timing(9e-6)}])
    assert said.startswith("J takes 0.60 to 0.90 of S, and 0.75 to 1.12 of the fastest")
    assert "captured collectives 0.80 to 0.80" in said
    machine = {"gpus": "2 x X", "processes": 1}
    assert "| all_gather_matmul | 64 |" in document([("x", {"machine": machine, "xla": [row]})])


def test_accuracy():
    """jflux rounds once, so it is as exact as the type allows; and the table says so."""
    rows = [accuracy.measure(make_mesh((RANKS,)), dtype, 1 << 12) for dtype in accuracy.DTYPES]
    for row in rows:
        for algorithm in accuracy.ALGORITHMS:
            # float32 sums of 8 terms are not exact themselves.
            most = 4 if row["type"] == "float32" else 1.001
            assert row[algorithm] <= most * row["rounded"]
    result = {"machine": {"gpus": "2 x X", "processes": 1}, "accuracy": rows}
    assert f"| {RANKS} | float16 |" in document([("a", result)])


def test_blocks_are_rendered():
    def timing(seconds):
        return {"median": seconds, "low": seconds, "high": seconds}

    row = {
        "model": "M", "part": "mlp", "tokens": 64, "alone": timing(1e-3), "XLA": timing(4e-3),
        "jflux": timing(2e-3), "memory": {"XLA": {"xla": 1 << 20, "heap": 0},
                                          "jflux": {"xla": 2 << 20, "heap": 3 << 20}},
    }  # fmt: skip
    machine = {"gpus": "2 x X", "processes": 1}
    text = document([("b", {"machine": machine, "blocks": [row]})])
    line = "| M | mlp | 64 | 1.000 | 4.000 | 2.000 | 0.500 | 3.000 | 1.000 | 1 | 2 | 3 |"
    assert f"{line}\n" in text
    row |= {"recipe": "block", "8 bits": timing(1e-3)}
    row["memory"]["8 bits"] = {"xla": 1 << 20, "heap": 2 << 20}
    text = document([("b", {"machine": machine, "blocks": [row]})])
    assert f"{line} block | 1.000 | 2.000 | 1 | 2 |" in text


def test_a_step_of_maxtext_is_rendered():
    """(tests/test_maxtext.py times one.)"""
    row = {"case": {"name": "layers"}, "S": _timing(8e-2), "J": _timing(6e-2), "error": 0.001}
    row |= {"MiB": {"S": 2048.0, "J": 1024.0}, "loss": {"S": 9.5, "J": 9.50001}}
    text = document([("m", {"machine": {"gpus": "2 x X", "processes": 1}, "maxtext": [row]})])
    line = "| layers | 80.00 | 60.00 | 0.750 | 2048 | 1024 | 9.50000 | 9.50001 | 1.0e-03 |"
    assert f"| {maxtext.HEADING} |" in text and line in text


def test_a_step_of_another_library_is_rendered():
    """(tests/test_code_bases.py times one.)"""
    row = {"case": {"name": "Equinox"}, "version": "1.0", "error": 0.001}
    row |= {name: _timing(ms * 1e-3) for name, ms in zip(("S", "R", "J"), (8, 7, 6), strict=True)}
    row |= {"MiB": {"S": 3.0, "R": 2.0, "J": 1.0}, "loss": {"S": 9.5, "J": 9.50001}}
    row["calls"] = [["a", "fused"], ["b", "decomposed"], ["a", "fused"]]
    text = document([("m", {"machine": {"gpus": "2 x X", "processes": 1}, "code_bases": [row]})])
    line = "| Equinox | 1.0 | 8.00 | 7.00 | 6.00 | 0.750 | 0.857 | 3 | 2 | 1 | 9.50000 | 9.50001 "
    assert f"{line}| 1.0e-03 | 2 a | 1 b |" in text


@pytest.fixture
def small_llama(monkeypatch):
    """(config, mesh, weights); GPUs have no kernels for float32."""
    monkeypatch.setattr(decode, "STEPS", 3)
    config = dataclasses.replace(decode.llama_model.CONFIGS["tiny"], layers=1)
    mesh = make_mesh((RANKS,))
    weights = decode.jax.tree.map(
        lambda shape: np.zeros(shape, np.float32),
        decode.llama_model.shapes(config, RANKS),
        is_leaf=lambda leaf: isinstance(leaf, tuple),
    )
    with jflux.config(strict=False):
        yield config, mesh, weights


def test_decoding_is_timed_and_rendered(small_llama):
    rows = [
        decode.measure_steps(*small_llama, batch=2, context=8, rounds=2),
        decode.measure_prefill(*small_llama, batch=2, length=8, rounds=2),
    ]
    result = {"machine": {"gpus": "2 x X", "processes": 1}, "decode": rows}
    text = document([("d", json.loads(json.dumps(result)))])
    for row, part in zip(rows, ("step", "prefill"), strict=True):
        cells = decode.cells(row)
        assert len(cells) == len(decode.COLUMNS) and cells[:4] == [part, "1", "2", "8"]
        assert all(float(cell) > 0 for cell in cells[4:])
        assert f"| {' | '.join(cells)} |" in text


def test_compiler_options_that_xla_refuses_leave_a_contestant_out(small_llama, monkeypatch, capsys):
    options = {"xla_gpu_enable_command_buffer": "+COLLECTIVES"}
    monkeypatch.setitem(decode.CONTESTANTS, "graphs", (jflux.reference, options))
    row = decode.measure_steps(*small_llama, batch=1, context=4, rounds=1)
    assert "graphs: left out, INVALID_ARGUMENT" in capsys.readouterr().err
    assert "graphs" not in row and decode.cells(row)[5] == ""


def test_the_faster_form_of_xla_counts():
    row = {"op": "all_gather_matmul", "m": 64, "n": 8, "k": 16}
    row |= {name: _timing(1e-3) for name in "GCJ"} | {"S": _timing(4e-3)}
    result = {"machine": {"gpus": "2 x X"}}
    for captured, said in (
        (5e-3, "| 4.000 | 1.000 | 0.250 |"),
        (2e-3, "| 2.000 c | 1.000 | 0.500 |"),
    ):
        row["S captured"] = _timing(captured)
        assert said in render.table([row], result)


def test_peers_are_columns_where_they_were_timed():
    def row(m, **others):
        times = dict.fromkeys("GCSJ", 1e-3) | others
        return {"op": "all_gather_matmul", "m": m, "n": 8, "k": 16} | {
            name: {"median": seconds} for name, seconds in times.items()
        }

    result = {"machine": {"gpus": "2 x X"}}
    assert "P ms" not in render.table([row(64)], result)
    head, _, first, second = render.table([row(64), row(128, P=2e-3)], result).splitlines()
    assert head.endswith("| P ms |") and first.endswith("| |") and second.endswith("| 2.000 |")
    assert len({line.count("|") for line in (head, first, second)}) == 1


WORKER = """
import sys
import types
print("ready", flush=True)
for line in sys.stdin:
    if "op" in line:
        print("ready" if '"m": 64' in line else "ValueError: too large", flush=True)
    elif sys.argv[1] == "1":
        sys.exit()
    else:
        print("done", flush=True)
"""


@pytest.fixture
def torch_peer(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "torch" or found(name))
    monkeypatch.setattr(peers.Torch, "worker", (sys.executable, "-c", WORKER))

    def start(ranks):
        (peer,) = peers.start(["torch"], peers.PEERS, make_mesh((ranks,)))
        return peer

    return start


def test_workers_run_what_they_are_told(torch_peer):
    peer = torch_peer(1)
    peer.run_of(shapes.Shape("all_gather_matmul", 64, 8, 16), 3)()
    with pytest.raises(peers.Unavailable, match="too large"):
        peer.run_of(shapes.Shape("all_gather_matmul", 128, 8, 16), 3)
    peer.run_of(shapes.Shape("all_gather_matmul", 64, 8, 16), 3)()
    peer.close()
    with pytest.raises(peers.Unavailable, match="have ended"):
        peer.run_of(shapes.Shape("all_gather_matmul", 64, 8, 16), 3)


def test_a_worker_that_ends_is_not_timed(torch_peer):
    run = torch_peer(2).run_of(shapes.Shape("all_gather_matmul", 64, 8, 16), 3)
    with pytest.raises(peers.Unavailable, match="worker ended"):
        run()


def test_peers_that_are_not_there_are_named(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert peers.start(["torch"], peers.PEERS, make_mesh((2,))) == []
    assert "PyTorch: not installed" in capsys.readouterr().err


def test_every_result_can_be_renewed():
    for path in (ROOT / "bench" / "results").glob("*.json"):
        ranks, gpu, name = re.fullmatch(r"(\d)x(h\d+)_?(.*)", path.stem).groups()
        name = name or "ops"
        assert name in renew.RUNS
        names = {"h200": "NVIDIA H200", "h100": "NVIDIA H100 80GB HBM3"}
        assert renew.file_name(name, int(ranks), names[gpu]) == path.name


def test_what_renews_results_knows_the_benchmarks():
    of_all = (ROOT / "bench" / "command.py").read_text()
    for name, run in renew.RUNS.items():
        module, *options = run.split()
        file = ROOT / "bench" / (module.removeprefix("bench").removeprefix(".") or "__main__")
        source = file.with_suffix(".py").read_text()
        if "mixtures.main(__doc__" in source:
            source += (ROOT / "bench" / "mixtures.py").read_text()
        flags = [option for option in options if option.startswith("--")]
        for flag in [*flags, "--out", "--add", "--limit"]:
            shared = re.search(r"command\.parser?\((__)?doc", source) and f'"{flag}"' in of_all
            takes = f'"{flag}"' in source or shared
            assert takes, f"{name}: {module} has no {flag}"
        given = dict(zip(options[::2], options[1::2], strict=True))
        lists = collectives.LISTS if module == "bench.collectives" else shapes.LISTS
        assert "--lists" not in given or set(given["--lists"].split(",")) <= set(lists)
        known = {"bench.moe": moe_peers.PEERS, "bench.attention": attention_peers.PEERS}
        if "--peers" in given:
            assert set(given["--peers"].split(",")) <= set(known.get(module, peers.PEERS))


def test_results_are_replaced_by_whole_ones_only(tmp_path, monkeypatch, capsys):
    def command_of(name, ranks, out, limit):
        assert limit is None
        program = f"open({str(out)!r}, 'w').write({name!r})\n"
        program += {"decode": "import time; time.sleep(60)", "blocks": "1 / 0"}.get(name, "")
        return [sys.executable, "-c", program]

    monkeypatch.setattr(renew, "command_of", command_of)
    monkeypatch.setattr(renew, "gpu_name", lambda: "NVIDIA H200")
    results, scratch = tmp_path / "results", tmp_path / "scratch"
    options = ["--ranks", "4", "--limit", "5", "--out", str(results), "--scratch", str(scratch)]
    names = ["accuracy", "blocks", "ops", "products", "decode", "grids"]
    monkeypatch.setattr(sys, "argv", ["renew", *names, *options])
    assert renew.main() == 1
    found = {path.name: path.read_text() for path in results.iterdir()}
    assert found == {
        "4xh200_accuracy.json": "accuracy", "4xh200.json": "ops", "1xh200_products.json": "products"
    }  # fmt: skip
    assert (scratch / "4xh200_decode.json").read_text() == "decode"
    table = capsys.readouterr().out.split("\n\n")[-1].splitlines()
    assert [line[:3] for line in table] == ["ok ", "BAD", "ok ", "ok ", "BAD", "BAD"]


def test_only_missing_rows_are_measured(tmp_path, monkeypatch, capsys):
    """And what has been measured is kept, also if the benchmark does not come to its end."""
    benchmark = """
import pathlib, sys, time
option, path, limit = sys.argv[1], pathlib.Path(sys.argv[2]), float(sys.argv[3])
path.write_text((path.read_text() if option == "--add" else "") + f"{limit > 50} ")
if path.name == "4xh200_decode.json": time.sleep(60)
"""

    def command_of(name, ranks, out, limit):
        words = _command_of(name, ranks, out, limit)
        assert words[-4:-2] == ["--limit", f"{limit:.0f}"] and words[-1] == str(out)
        return [sys.executable, "-c", benchmark, *words[-2:], f"{limit}"]

    _command_of = renew.command_of
    monkeypatch.setattr(renew, "command_of", command_of)
    monkeypatch.setattr(renew, "gpu_name", lambda: "NVIDIA H200")
    results, scratch = tmp_path / "results", tmp_path / "scratch"
    options = ["--ranks", "4", "--out", str(results), "--scratch", str(scratch), "--missing"]
    for limit in (100, 30):
        monkeypatch.setattr(sys, "argv", ["renew", "accuracy", *options, "--limit", f"{limit}"])
        assert renew.main() == 0
    monkeypatch.setattr(sys, "argv", ["renew", "decode", "blocks", *options, "--limit", "3"])
    assert renew.main() == 1
    found = {path.name: path.read_text() for path in results.iterdir()}
    assert found == {"4xh200_accuracy.json": "True False ", "4xh200_decode.json": "False "}
    table = capsys.readouterr().out.split("\n\n")[-1].splitlines()
    assert [line[:3] for line in table] == ["BAD", "BAD"]


def test_rows_that_lack_a_newer_contestant_are_measured_again(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "machine", lambda *_: {"gpus": "2 x X", "processes": 1, "date": 2})
    path = tmp_path / "found.json"
    rows = [{"name": "a"}, {"name": "b", "new": 1}, {"name": "c", "old": True}]
    path.write_text(
        json.dumps({"machine": {"gpus": "2 x X", "processes": 1, "date": 1}, "found": rows})
    )
    table = command.Table(
        "found", lambda row: row["name"], lambda _: "name", lambda row: row["name"],
        lambda row: () if "old" in row else ("new",),
    )  # fmt: skip
    options = ["bench", "--ranks", "2", "--add", str(path)]
    monkeypatch.setattr(sys, "argv", options)
    measured = [{"name": name, "new": 2} for name in "abcd"]
    found = table.measure(
        command.parse("", lists=""), {row["name"]: lambda row=row: row for row in measured}
    )
    b, c = ({"date": 1} | row for row in rows[1:])
    assert found == json.loads(path.read_text())["found"] == [b, c, measured[0], measured[3]]


TABLES = {
    "rows": bench_of_shapes, "accuracy": accuracy, "attention": attention, "blocks": blocks,
    "code_bases": code_bases, "collectives": collectives, "decode": decode, "experts": experts,
    "flash_decode": flash_decode, "gathered": gathered, "grids": grids, "maxtext": maxtext,
    "moe": moe, "products": products, "scaled": scaled, "scattered": scattered, "xla": xla,
}  # fmt: skip


@pytest.mark.parametrize("path", sorted((ROOT / "bench" / "results").glob("*.json")), ids=str)
def test_rows_of_results_are_found_again(path, monkeypatch):
    """By the key that --add compares: a row that is there must not be measured again."""
    result = json.loads(path.read_text())
    (kind,) = {name for name, value in result.items() if isinstance(value, list)}
    asked = []

    def measure(table, args, wanted):
        assert table.kind == kind
        asked.append((table.key, set(wanted)))
        return []

    monkeypatch.setattr(command.Table, "measure", measure)
    monkeypatch.setattr(jflux, "init", lambda **_: None)
    monkeypatch.setattr(type(jflux.config), "update", lambda *_, **__: None)
    monkeypatch.setattr("bench.decode.llama_weights.random", lambda *_: None)
    name = path.stem.partition("_")[2] or "ops"
    _, *options = renew.RUNS[name].format(ranks=result["machine"]["gpus"].split()[0]).split()
    if "--peers" in options:
        at = options.index("--peers")
        del options[at : at + 2]
    if "--processes" in options:
        options[options.index("--processes") + 1] = "1"
    monkeypatch.setattr(sys, "argv", ["bench", *options])
    assert TABLES[kind].main() == 0
    ((key, wanted),) = asked
    have = [key(row) for row in result[kind]]
    assert len(have) == len(set(have))
    assert wanted & set(have)


# ---- attention.py and moe.py ---------------------------------------------------------------------


@pytest.fixture
def attentions_of_others(monkeypatch):
    """Stand-ins for the packages, that compute what they are asked for."""
    asked = []

    def flash_mha(q, k, v, is_causal):
        return jax.nn.dot_product_attention(q, k, v, is_causal=is_causal)

    def fused_attn(qkv, bias, descriptor, seed, *, attn_mask_type, scaling_factor, **options):
        assert bias is None and seed is None and scaling_factor == qkv[0].shape[3] ** -0.5
        assert descriptor.shape == qkv[0].shape[:2]
        axis, mesh = options["context_parallel_axis"], asked[-1]
        causal = attn_mask_type == "causal"
        assert options["context_parallel_causal_load_balanced"] == causal
        attend = jax.shard_map(
            lambda q, k, v: jflux.attention(
                q, k, v, axis_name=axis, causal=causal,
                form=options["context_parallel_strategy"],
            ),
            mesh=mesh, in_specs=attention.SEQUENCE, out_specs=attention.SEQUENCE, check_vma=False,
        )  # fmt: skip
        return attend(*qkv)

    @contextlib.contextmanager
    def guard(resource):
        asked.append(make_mesh((min(2, RANKS),), (resource,)))
        yield

    names = types.SimpleNamespace
    modules = {
        "flash_attn3_jax": names(flash_mha=flash_mha),
        "transformer_engine.jax.attention": names(
            fused_attn=fused_attn,
            CPStrategy=names(ALL_GATHER="gather", RING="ring"),
            AttnMaskType=names(CAUSAL_MASK="causal", NO_MASK="none"),
            AttnBiasType=names(NO_BIAS=None),
            AttnSoftmaxType=names(VANILLA_SOFTMAX=None),
            QKVLayout=names(BSHD_BSHD_BSHD=None),
            SequenceDescriptor=names(from_segment_ids_and_pos=lambda ids: ids),
        ),
        "transformer_engine.jax.sharding": names(
            MeshResource=lambda cp_resource: cp_resource, global_shard_guard=guard
        ),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)


def test_the_forms_of_attention_are_timed_in_both_orders():
    case = attention.Case("tiny", 32, 4, 2, True, width=8, brief=True)
    names = {"J", *attention.HEADS, *attention.CHOICES}
    assert set(attention.contestants(case, 2)) == names | {f"{name} f+b" for name in names}
    assert "auto" not in attention.contestants(dataclasses.replace(case, brief=False), 2)


@pytest.mark.slow
@pytest.mark.parametrize("causal", [True, False])
def test_attention_is_checked_and_timed(causal, attentions_of_others, monkeypatch):
    """Also that of others, whose times are columns."""
    monkeypatch.setattr(trials, "iterations_for", lambda seconds, flops: 2)
    ranks = min(2, RANKS)
    mesh = make_mesh((ranks,), ("cp",))
    case = attention.Case("tiny", 16 * ranks, 4, 2, causal, width=8)
    others = peers.start(attention_peers.PEERS, attention_peers.PEERS, mesh)
    row = attention.measure(case, ranks, 1, others)
    assert 0 < row["error"] <= 2
    assert all(row[name]["median"] > 0 for name in ("J", "ring f+b", "G", "G f+b"))
    assert ("A" in row) == (not causal)
    columns = ("TE", "TE ring", "FA3")
    assert all(row[c + both]["median"] > 0 for c in columns for both in ("", " f+b"))
    cells = dict(zip(attention.HEADING.split(" | "), attention.cells(row, ranks), strict=True))
    assert cells["FA3/N f+b ms"] == f"{row['FA3 f+b']['median'] * 1e3 / ranks:.3f}"
    assert float(cells["TE ring ms"]) > 0


def test_attentions_of_others_that_fail(attentions_of_others):
    (flash,) = peers.start(["flash_attn3"], attention_peers.PEERS, make_mesh((1,)))
    want = jnp.ones((1, 4, 2, 8))

    def refuses(*arrays):
        raise NotImplementedError("no such heads\nat all")

    with pytest.raises(peers.Unavailable, match="^FA3: NotImplementedError: no such heads$"):
        attention_peers.program(flash, "FA3", refuses, want, refuses, want)
    with pytest.raises(RuntimeError, match="FA3 is off by 1"):
        attention_peers.program(flash, "FA3", lambda q: 2 * q, want, lambda q: q, want)

    def refuses(*args, **options):
        raise NotImplementedError("no such heads\nat all")


def test_attentions_that_are_not_installed_are_named(capsys):
    if any(importlib.util.find_spec(name) for name in ("transformer_engine", "flash_attn3_jax")):
        pytest.skip("they are")
    assert peers.start(attention_peers.PEERS, attention_peers.PEERS, make_mesh((1,))) == []
    said = capsys.readouterr().err
    assert said == "Transformer Engine: not installed\nflash-attn3-jax: not installed\n"


@pytest.fixture
def few_tokens(monkeypatch):
    monkeypatch.setattr(flash_decode, "TOKENS", (1, 4))
    monkeypatch.setattr(trials, "iterations_for", lambda seconds, flops: 2)
    monkeypatch.setattr(trials, "CALLS_IN_A_BODY", 1)


@pytest.mark.parametrize("cache", ["bfloat16", "e4m3", "latent"])
def test_decoding_is_checked_and_timed(cache, few_tokens, monkeypatch):
    monkeypatch.setattr(rates, "read_seconds", lambda count: count / 1e12)
    ranks = min(2, RANKS)
    row = flash_decode.measure(flash_decode.Case("tiny", 2, 16 * ranks, cache, 16), ranks, rounds=1)
    assert 0 < row["error"] <= 2
    assert {*row} == {"case", "error", "bound", "1", "4", "G", *(["part"] if ranks > 1 else [])}
    elements = 576 if cache == "latent" else 2 * 8 * 128
    size = {"e4m3": elements + 2 * 8 * 4}.get(cache, 2 * elements)
    assert row["bound"] == pytest.approx(2 * 16 * size / 1e12)
    cells = dict(
        zip(flash_decode.HEADING.split(" | "), flash_decode.cells(row, ranks), strict=True)
    )
    assert cells["G/N ms"] == f"{row['G']['median'] * 1e3 / ranks:.3f}" and cells["2 ms"] == ""
    machine = {"gpus": f"{ranks} x X", "processes": 1}
    text = document([("d", {"machine": machine, "flash_decode": [json.loads(json.dumps(row))]})])
    assert f"| {' | '.join(filter(None, cells.values()))} |" in text


@pytest.mark.parametrize("wrong", ["1", "G"])
def test_decoding_that_is_wrong_is_not_timed(wrong, few_tokens, monkeypatch):
    def other(*args):
        return lambda q, cache: q

    monkeypatch.setattr(flash_decode, {"1": "decode", "G": "on_one"}[wrong], other)
    with pytest.raises(RuntimeError, match=f"tiny, {wrong}: an error of .* times its bound"):
        flash_decode.measure(flash_decode.Case("tiny", 2, 32, "bfloat16", 16), min(2, RANKS), 1)


def test_every_call_of_decoding_has_another_query():
    """All of the last result, and of a latent query what it does not replace."""
    q, y = jnp.arange(6.0).reshape(1, 1, 1, 6), -jnp.ones((1, 1, 1, 4))
    assert flash_decode.handed_on(q, y)[0, 0, 0].tolist() == [-1, -1, -1, -1, 4, 5]


def test_decoding_with_a_cache_is_checked_and_timed(monkeypatch):
    ranks = min(2, RANKS)
    sizes = {"B": 3, "D": 32, "H": 4, "G": 2, "C": 64, "PROMPT": 16, "STEPS": 3}
    for name, size in sizes.items():
        monkeypatch.setattr(cache_check, name, size)
    mesh = make_mesh((ranks, 1), ("cp", "tp"))
    run = cache_check.program(mesh, ranks, jnp.float16)
    assert cache_check.trial(run, jnp.float16, 0) < cache_check.TOLERANCE["float16"]

    def without_the_last(*args):
        first, each, last, lengths = run(*args)
        return first, each.at[-1].set(each[-2]), last, lengths

    assert cache_check.trial(without_the_last, jnp.float16, 0) > 0.05
    assert all(s > 0 for s in cache_check.seconds_of_step(ranks, 64, 1).values())


def test_attention_that_is_wrong_is_not_timed(monkeypatch):
    def wrong(case, **options):
        return lambda q, kv: q

    monkeypatch.setattr(attention, "split", wrong)
    with pytest.raises(RuntimeError, match="tiny: an error of .* times its bound"):
        attention.measure(attention.Case("tiny", 32, 4, 2, True, width=8), min(2, RANKS), 1)


@pytest.mark.parametrize("kind", moe.SIZES)
def test_grouped_products_are_checked_and_timed(kind):
    row = moe.measure(moe.Case("tiny", 4, 64, 16, 24), kind, rounds=1)
    assert row["error"] <= 1 and row["S"]["median"] > 0
    assert len(moe.cells(row)) == len(moe.HEADING.split(" | "))


def test_grouped_products_of_others_are_columns(monkeypatch, capsys):
    """A stand-in for tokamax, and a worker that is told the sizes of the groups."""
    tiny = moe.Case("tiny", 4, 64, 16, 24)
    module = types.SimpleNamespace(ragged_dot=jax.lax.ragged_dot)
    monkeypatch.setitem(sys.modules, "tokamax", module)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name in ("tokamax", "torch"))
    answers = WORKER.replace('"m": 64', '"sizes": [16, 16, 16, 16], "k": 16, "n": 24')
    monkeypatch.setattr(peers.Torch, "worker", (sys.executable, "-c", answers))
    monkeypatch.setattr("bench.rates.check", lambda *args, **flops: None)  # a worker takes no time
    others = peers.start(["tokamax", "torch"], moe_peers.PEERS)
    row = moe.measure(tiny, "equal", 1, others)

    def columns(row):
        return dict(zip(moe.HEADING.split(" | "), moe.cells(row), strict=True))

    assert {"T", "T f+b", "P", "X", "X f+b"} <= row.keys()
    assert all(columns(row)[f"{name} ms"] for name in ("T", "T f+b", "P", "X"))
    row = moe.measure(tiny, "half", 1, others)  # the worker takes no other sizes
    assert "T" in row and "P" not in row and columns(row)["P ms"] == ""
    assert "tiny: PyTorch: ValueError: too large" in capsys.readouterr().err

    def refuses(x, w, sizes):
        raise NotImplementedError("no such shape")

    others[0].ragged_dot = refuses
    assert "T" not in moe.measure(tiny, "equal", 1, others[:1])
    assert "tiny, T: NotImplementedError: no such shape" in capsys.readouterr().out
    for peer in others:
        peer.close()
    module.ragged_dot = lambda x, w, sizes: 2 * jax.lax.ragged_dot(x, w, sizes)
    with pytest.raises(RuntimeError, match="tokamax.ragged_dot is off by"):
        peers.start(["tokamax"], moe_peers.PEERS)
    module.ragged_dot = refuses
    assert peers.start(["tokamax"], moe_peers.PEERS) == []
    assert "tokamax: NotImplementedError: no such shape" in capsys.readouterr().err
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert peers.start(["tokamax", "torch"], moe_peers.PEERS) == []
    assert "tokamax: not installed\nPyTorch: not installed" in capsys.readouterr().err


@pytest.mark.parametrize("op", [shapes.AG, shapes.RS, scaled.MATMUL])
def test_products_of_8_bits_are_checked_and_timed(op, torch_peer, monkeypatch, capsys):
    """Beside a worker of PyTorch that takes no blocks."""
    monkeypatch.setattr(trials, "iterations_for", lambda seconds, flops: 2)
    monkeypatch.setattr(trials, "CALLS_IN_A_BODY", 1)
    answers = WORKER.replace('"m": 64', '"scales": "row"')
    monkeypatch.setattr(peers.Torch, "worker", (sys.executable, "-c", answers))
    ranks = 1 if op == scaled.MATMUL else min(2, RANKS)
    without = ("S16", "J16", "S8q", "S8 int8", "G8 int8", "J8q block" if ranks == 1 else "J8q")
    shape = shapes.Shape(op, 16 * ranks, 128 * ranks, 512)
    peer = torch_peer(1)
    with jflux.config(strict=False):
        row = scaled.measure(shape, make_mesh((ranks,)), 1, without, [peer])
    peer.close()
    assert {"J8 tensor", "J8 row", "J8 block", "J8 int8", "G8", "P row"} <= row.keys()
    assert {"S8", "S8row", "C8", "C8 jflux", "T row"} <= row.keys() or ranks == 1
    assert not {*without, "P block", "T tensor"} & row.keys()
    assert all(0 < row["errors"][f"J8 {form}"] < 4 for form in scaled.FORMS)
    assert "P tensor: not available, PyTorch: ValueError: too large" in capsys.readouterr().err
    cells = scaled.of_columns(row)
    product = min(row[name]["median"] for name in ("G8", "G8 pattern", "P row"))
    sent = min((row[name]["median"] for name in ("C8", "C8 jflux") if name in row), default=0)
    assert cells["F us"] == f"{max(product, sent) * 1e6:.1f}"
    assert ranks > 1 or "J8q row" in row
    assert "8 row " in cells["ran"] and "J16 us" not in cells


def test_a_product_of_8_bits_that_is_wrong_is_not_timed(monkeypatch, capsys):
    def of_another_row(x, w, **options):
        return _matmul(jflux.Scaled(x.values, jnp.roll(x.scale, 1, 0)), w, **options)

    _matmul = jflux.matmul
    monkeypatch.setattr(jflux, "matmul", of_another_row)
    without = ("S", "G", "J8 block", "J8 int8", "J8q")
    shape = shapes.Shape(scaled.MATMUL, 32, 128, 256)
    row = scaled.measure(shape, make_mesh((1,)), 1, without)
    assert "J8 row" not in row and "J8 tensor" in row and row["errors"]["J8 row"] > scaled.LIMIT
    assert "J8 row: WRONG, an error of" in capsys.readouterr().err


@pytest.mark.parametrize("kind", experts.LISTS)
def test_what_moves_tokens_is_checked_and_timed(kind):
    row = experts.MEASURES[kind](experts.Case("tiny", 16, 32, 4, 2, 32), min(2, RANKS), rounds=1)
    assert len(experts.cells(row)) == len(experts.HEADINGS[kind].split(" | "))


def test_slots_of_experts():
    """In the order of tokens; what is beyond an expert's slots is nowhere."""
    indices = jnp.array([[2, 0], [2, 1], [2, 0]])
    slot, choice = capacity.slots_of(indices, experts=3, capacity=2)
    assert slot.tolist() == [4, 0, 5, 2, 6, 1]  # the third choice of expert 2 has none
    assert choice.tolist() == [1, 5, 3, 6, 0, 2]
    rows = jnp.arange(1.0, 7)[:, None]
    there, back = jax.vjp(lambda rows: capacity.moved(rows, choice, slot), rows)
    assert there[:, 0].tolist() == [2, 6, 4, 0, 1, 3]
    assert back(there)[0][:, 0].tolist() == [1, 2, 3, 4, 0, 6]


def test_tokens_that_come_back_wrong_are_not_timed(monkeypatch):
    monkeypatch.setattr(experts, "pair", lambda case, indices, x, sums=True: x * 1.1)
    with pytest.raises(RuntimeError, match="tiny: tokens come back .* off"):
        experts.measure_dispatch(experts.Case("tiny", 16, 32, 4, 2), min(2, RANKS), rounds=1)


def test_a_plain_layer_without_memory_leaves_its_column_empty():
    row = {"case": {"name": "large"}, "list": "layer", "error": 0.0}
    row |= {name: _timing(1e-3) for name in experts.OURS}
    assert experts.cells(row)[1:8] == [*["1.00"] * 4, "no memory", "no memory", ""]
    assert (
        experts.cells({k: v for k, v in row.items() if k != "prod."})[4] == ""
    )  # older than this column
    row |= {"S EP": _timing(4e-3)}
    assert experts.cells(row)[5:8] == ["no memory", "4.00", "4.0"]
