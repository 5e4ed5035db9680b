"""README's tables of results."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Iterator

from . import conclusions
from .sections import Results, plain_table, title
from .shapes import LISTS, Shape, fastest_xla, of_row

# The rows of the first table, by result, and the lists and results of the second one's medians.
ROWS = {
    "4xh100": [
        Shape("all_gather_matmul", 8192, 49152, 12288),
        Shape("all_gather_matmul", 8192, 10240, 8192),
        Shape("matmul_reduce_scatter", 8192, 8192, 8192),
        Shape("matmul_all_to_all", 8192, 12288, 4096),
    ],
    "4xh100_all_reduce": [Shape("matmul_all_reduce", 8192, 8192, 8192)],
}
OF_LISTS = ("flux", "attention", "ulysses", "all_reduce")
MEDIANS = (
    ("4xh100", "4xh100_all_reduce"),
    ("2xh200", "2xh200_all_reduce"),
    ("2xh100", "2xh100_all_reduce"),
)
#: Kinds of results that are whole models, or large parts of them.
MODELS = ("blocks", "grids", "maxtext", "decode")


def _days(days: Iterable[str]) -> str:
    found = sorted(set(days))
    return found[0] if len(found) == 1 else f"{found[0]} to {found[-1]}"


def _medians(results: Results) -> Iterator[list[str]]:
    """Rows of the second table."""

    def line(what: str, of: list[conclusions.Compared]) -> list[str]:
        gains = [1 / one.ratio for one in of]
        span = f"{min(gains):.2f} to {max(gains):.2f}" if len(gains) > 1 else ""
        versions = sorted({one.machine["jflux"] for one in of})
        return [what, of[0].gpus, _days(one.day for one in of), " and ".join(versions),
                str(len(of)), f"{statistics.median(gains):.2f}", span]  # fmt: skip

    def pairs(kind: str) -> dict[str, list[conclusions.Pair]]:
        return {kind: conclusions.PAIRS[kind][:1]}

    listed = {(s.op, s.name) for name in OF_LISTS for s in LISTS[name]}
    of_ops = [c for c in conclusions.compared(results, pairs("rows")) if (c.what, c.row) in listed]
    for names in MEDIANS:
        if of := [c for c in of_ops if c.result in names]:
            yield line(f"single ops, lists {', '.join(OF_LISTS)}", of)
    for kind in MODELS:
        found = list(conclusions.compared(results, pairs(kind)))
        for name in sorted({c.result for c in found}, reverse=True):
            of = [c for c in found if c.result == name]
            yield line(of[0].what, of)


def table(results: Results) -> str:
    named = dict(results)
    (first, *_) = ROWS
    found = {of_row(row): row for name in ROWS for row in named[name]["rows"]}
    shown = list(itertools.chain(*ROWS.values()))
    machine = named[first]["machine"]
    days = _days(found[s].get("date", machine["date"]) for s in shown)
    lines = [
        f"{title(named[first])}, bf16, against XLA's own product and collective; {days}, jflux "
        f"{machine['jflux']}:\n",
        "| op | m | n | k | XLA ms | jflux ms | speed-up |",
        "|---|---|---|---|---|---|---|",
    ]
    for s in shown:
        xla, j = (found[s][name]["median"] * 1e3 for name in (fastest_xla(found[s]), "J"))
        lines.append(f"| {s.op} | {s.m} | {s.n} | {s.k} | {xla:.2f} | {j:.2f} | {xla / j:.2f} |")
    columns = ["all rows of", "GPUs", "measured", "jflux", "rows", "speed-up: median", "range"]
    lines += ["", plain_table(columns, _medians(results)), ""]
    slower = conclusions.count_of_slower(results)
    lines.append(
        "f+b: forward and backward. [All tables](docs/performance.md), with conditions: NCCL "
        "had no NVLink multicast. jflux is slower than something else in "
        f"{slower} ([all of these rows](docs/performance/slower.md))."
    )
    return "\n".join(lines)
