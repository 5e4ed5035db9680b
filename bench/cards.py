"""Models of GPU side by side, and what of bench/results each of them lacks: pages in
docs/performance."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from . import (
    attention,
    code_bases,
    collectives,
    compare,
    experts,
    flash_decode,
    grids,
    mixtures,
    moe,
    renew,
    shapes,
    xla,
)
from .sections import SECTIONS, Results, filled_table, of_kind, plain_table, ranks_of
from .shapes import Shape

#: The kinds of results whose rows are cases by name, with the cases that a whole run has.
CASES = {
    "attention": [case.name for cases in attention.LISTS.values() for case in cases],
    "flash_decode": [case.name for cases in flash_decode.LISTS.values() for case in cases],
    "experts": [case.name for cases in experts.LISTS.values() for case in cases],
    "gathered": [case.name for cases in mixtures.LISTS.values() for case in cases],
    "scattered": [case.name for cases in mixtures.LISTS.values() for case in cases],
    "xla": [xla.name_of(shape) for listed in xla.LISTS.values() for shape in listed],
    "code_bases": [*code_bases.LIBRARIES],
    "moe": [f"{case.name}, {kind}" for case in moe.LISTS.values() for kind in moe.SIZES],
}


def model_of(result: dict) -> str:
    """Such as "NVIDIA H200"."""
    return result["machine"]["gpus"].split(" ", 2)[2]


def listed(name: str, ranks: int) -> list[Shape]:
    """The shapes of a run of `renew.RUNS`; none if its rows are no shapes."""
    module, *options = renew.RUNS[name].format(ranks=ranks).split()
    given = dict(zip(options[::2], options[1::2], strict=True))
    if module != "bench":
        return []
    return list(
        dict.fromkeys(s for one in given["--lists"].split(",") for s in shapes.of(one, ranks))
    )


def _wanted(name: str, ranks: int) -> list[str]:
    """The rows of a run of `renew.RUNS`, by name; none if they have no names."""
    if name == "grids":
        return [str(grid) for grid in grids.grids_of(ranks)]
    return CASES.get(name, [])


def _case_names(kind: str, rows: list[dict]) -> list[str]:
    if kind == "grids":
        return [grids.name_of(row) for row in rows]
    if kind == "xla":
        return [xla.name_of(shapes.of_row(row)) for row in rows]
    if kind == "moe":
        return [f"{row['case']['name']}, {row['sizes']}" for row in rows]
    return [row["case"]["name"] for row in rows]


# ---- Side by side --------------------------------------------------------------------------------


def _present(results: Results, kind: str) -> list[dict]:
    """Of the present kernels, with one process for all GPUs."""
    machines = [(result, result["machine"]) for _, result in of_kind(results, kind)]
    return [r for r, m in machines if m["processes"] == 1 and "note" not in m]


def _pairs(found: list[dict]) -> Iterator[tuple[dict, dict]]:
    """Results of two models, and as many GPUs."""
    for a, b in itertools.combinations(found, 2):
        if ranks_of(a) == ranks_of(b) and model_of(a) != model_of(b):
            yield a, b


def _op_table(a: dict, b: dict) -> str | None:
    rows = [{shapes.of_row(row): row for row in result["rows"]} for result in (a, b)]
    common = [s for s in rows[0] if s in rows[1]]
    if not common:
        return None
    columns = ["op", "m", "n", "k"]
    for result in (a, b):
        columns += [
            f"{renew.short(model_of(result))} {name}" for name in ("S ms", "J ms", "J / S", "E")
        ]
    lines = []
    for s in common:
        cells = [s.op, str(s.m), str(s.n), str(s.k)]
        for of in rows:
            fastest = shapes.fastest_xla(of[s])
            g, x, j = (of[s][c]["median"] * 1e3 for c in ("G", fastest, "J"))
            cells += [f"{x:.3f}", f"{j:.3f}", f"{j / x:.3f}"]
            cells.append(f"{1 - (j - g) / (x - g):.2f}" if x > g else "")
        lines.append(cells)
    return plain_table(columns, lines)


def _case_table(kind: str, a: dict, b: dict) -> str | None:
    """Milliseconds of what both have timed."""
    rows = [compare.rows_of(result, kind) for result in (a, b)]
    names = dict(zip(rows[0], _case_names(kind, a[kind]), strict=True))
    contestants = list(dict.fromkeys(c for figures in rows[0].values() for c in figures))
    lines = []
    for key in (key for key in rows[0] if key in rows[1]):
        cells = [names[key]]
        for c in contestants:
            pair = [of[key][c][1] * 1e3 for of in rows if c in of[key]]
            cells.append(f"{pair[0]:.3f} ({pair[0] / pair[1]:.2f})" if len(pair) == 2 else "")
        lines.append(cells)
    return filled_table(["case", *(f"{c} ms" for c in contestants)], lines) if lines else None


def beside(results: Results) -> str:
    """What was timed on two models of GPU, in one table for each kind; "" if there is nothing."""
    parts, ops = [], {}
    for a, b in _pairs(_present(results, "rows")):
        if table := _op_table(a, b):
            ops.setdefault(ranks_of(a), []).append(table)
    for ranks, found in ops.items():
        parts.append("\n\n".join([f"## The ops on {ranks} GPUs", *found]) + "\n")
    for kind in CASES:
        for a, b in _pairs(_present(results, kind)):
            if table := _case_table(kind, a, b):
                heading = SECTIONS[kind].heading(a).split(":")[0]
                one, two = renew.short(model_of(a)), renew.short(model_of(b))
                parts.append(
                    f"## {heading}, on {ranks_of(a)} GPU{'s' if ranks_of(a) > 1 else ''}\n\n"
                    f"Times on {one}; in brackets, over those on {two}.\n\n{table}\n"
                )
    if not parts:
        return ""
    head = (
        "All GPUs in one process. Some tables are of [earlier kernels]"
        "(performance.md#tables-of-earlier-kernels).\n"
    )
    return "\n".join([head, *parts])


# ---- What is missing -----------------------------------------------------------------------------


def _some(names: list[str], total: int) -> str:
    if len(names) == total:
        return f"all {total} rows"
    return f"{len(names)} of {total} rows: {'; '.join(names)}"


#: Whose rows may lack contestants, by kind.
TABLES = {"attention": attention.table(ranks=1), "experts": experts.TABLE}


def _newer(kind: str, rows: list[dict]) -> list[str]:
    if kind not in TABLES:
        return []
    of: dict[str, list[str]] = {}
    for row in rows:
        for contestant in TABLES[kind].lacks(row):
            of.setdefault(contestant, []).append(row["case"]["name"])
    return [f"{contestant} of {'; '.join(names)}" for contestant, names in of.items()]


def _sizes(name: str, ranks: int) -> list[tuple[str, int]]:
    """(op, bytes) of a list of bench.collectives."""
    return [(case.op, case.bytes) for case in collectives.LISTS[name](ranks)]


def _lists_of(
    name: str, ranks: int, cases_of: Callable[[str, int], Iterable[Any]], have: set[Any]
) -> str:
    """By list of a run, how many of its cases are missing."""
    given = renew.RUNS[name].split("--lists ")[1].split()[0].split(",")
    parts = []
    for one in given:
        wanted = set(cases_of(one, ranks))
        if left := wanted - have:
            parts.append(f"{one} ({len(left)} of {len(wanted)})")
    return f"lists {', '.join(parts)}" if parts else ""


def missing(results: Results, model: str, ranks: int) -> dict[str, str]:
    """Run of `renew.RUNS` -> what it has not measured on so many GPUs of a model; whole runs are
    left out."""
    named = dict(results)
    lacks = {}
    for name in renew.RUNS:
        if name == "peers":  # of earlier kernels alone
            continue
        result = named.get(renew.file_name(name, ranks, model).removesuffix(".json"))
        if listed(name, ranks):
            have = {shapes.of_row(row) for row in result["rows"]} if result else set()
            text = _lists_of(name, ranks, shapes.of, have)
        elif result and collectives.TABLE.kind in result:
            rows = result[collectives.TABLE.kind]
            text = _lists_of(name, ranks, _sizes, set(map(collectives.TABLE.key, rows)))
        elif result is None:
            text = _some(CASES[name], len(CASES[name])) if name in CASES else "all"
        elif wanted := _wanted(name, ranks):
            have = _case_names(name, result[name])
            left = [case for case in wanted if case not in have]
            lines = [_some(left, len(wanted))] if left else []
            text = "; and ".join([*lines, *_newer(name, result[name])])
        else:
            text = ""
        if text:
            lacks[name] = text
    return lacks


def to_do(results: Results) -> str:
    """A table for two GPUs of each model that some result is of, and for four or eight of them if
    a result is of so many."""
    models = dict.fromkeys(model_of(result) for _, result in results)
    counts = {(model_of(result), ranks_of(result)) for _, result in results}
    parts = []
    for model, ranks in itertools.product(models, (2, 4, 8)):
        if ranks > 2 and (model, ranks) not in counts:
            continue
        lacks = missing(results, model, ranks)
        if ranks > 2:  # those of one GPU are in the table of two
            lacks = {name: text for name, text in lacks.items() if name not in renew.ONE_GPU}
        if lacks:
            table = plain_table(["run", "missing"], lacks.items())
            parts.append(f"## {ranks} x {model}\n\n{table}\n")
    if not parts:
        return ""
    head = (
        "`python -m bench.renew --ranks N RUN... --missing --limit SECONDS` "
        "measures the rows that these runs lack on N GPUs, as far as the time goes, and adds them "
        "to bench/results.\n"
    )
    return "\n".join([head, *parts])
