"""README's tables of results."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable

from . import conclusions
from .sections import Results, plain_table, title
from .shapes import LISTS, Shape, fastest_xla, of_row

# The rows of the first table, by result, and the lists and machines of the second.
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
COLUMNS = ("4xh100", "2xh200", "2xh100")
#: Kinds of results of whole models, or large parts of them, by how the table calls them.
MODELS = {
    "blocks": "MLPs, blocks, f+b",
    "grids": "GPT on grids, f+b",
    "maxtext": "MaxText, f+b",
    "decode": "decoding, prefill",
}


def _days(days: Iterable[str]) -> str:
    found = sorted(set(days))
    return found[0] if len(found) == 1 else f"{found[0]} to {found[-1][5:]}"


def _medians(results: Results) -> str:
    """The second table: speed-ups by machine."""

    def pairs(kind: str) -> dict[str, list[conclusions.Pair]]:
        return {kind: conclusions.PAIRS[kind][:1]}

    def cell(of: list[conclusions.Compared]) -> str:
        gains = [1 / one.ratio for one in of]
        if len(gains) < 2:
            return "".join(f"{gain:.2f}" for gain in gains)
        return f"**{statistics.median(gains):.2f}** ({min(gains):.2f}-{max(gains):.2f})"

    listed = {(s.op, s.name) for name in OF_LISTS for s in LISTS[name]}
    ops = [c for c in conclusions.compared(results, pairs("rows")) if (c.what, c.row) in listed]
    kinds = {"ops": ops} | {
        what: list(conclusions.compared(results, pairs(kind))) for kind, what in MODELS.items()
    }
    lines, when = [], []
    for what, found in kinds.items():
        lines.append([what, *(cell(_of(machine, found)) for machine in COLUMNS)])
    for machine in COLUMNS:
        all_of = [c for found in kinds.values() for c in _of(machine, found)]
        versions = "/".join(sorted({c.machine["jflux"] for c in all_of}))
        when.append(f"{_days(c.day for c in all_of)}, {versions}")
    heads = [f"{machine[0]} x {machine[2:].upper()}" for machine in COLUMNS]
    return plain_table(["speed-up", *heads], [*lines, ["measured, jflux", *when]])


def _of(machine: str, found: list[conclusions.Compared]) -> list[conclusions.Compared]:
    """Those of one process for all GPUs."""
    return [c for c in found if c.result.split("_")[0] == machine and c.machine["processes"] == 1]


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
    lines += ["", f"Median of all rows (range), ops of the lists {', '.join(OF_LISTS)}:", ""]
    lines += [_medians(results), ""]
    slower = conclusions.count_of_slower(results)
    lines.append(
        "f+b: forward and backward. [All tables](docs/performance.md); NCCL had no NVLink "
        f"multicast. [In {slower}](docs/performance/slower.md) jflux is slower than something else."
    )
    return "\n".join(lines)
