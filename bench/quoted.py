"""Figures that sentences of the docs quote, from bench/results. In a guide one stands between
`<!-- bench: NAME -->` and `<!-- end -->`; `python -m bench.render` fills it in, and its check fails
where a page says something else.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from .sections import Results, of_kind, ranks_of, short_gpus

Row = dict[str, Any]


def _rows(results: Results, kind: str, ranks: int | None = None) -> Iterator[Row]:
    for _, result in of_kind(results, kind):
        if ranks is None or ranks_of(result) == ranks:
            yield from result[kind]


def _span(values: list[float], digits: int = 2) -> str:
    low, high = (f"{value:.{digits}f}" for value in (min(values), max(values)))
    return re.sub(r"\b0\.", ".", low if low == high else f"{low} to {high}")


def _ratios(rows: Iterator[Row], over: str, under: str) -> list[float]:
    return [
        row[over]["median"] / row[under]["median"] for row in rows if {over, under} <= row.keys()
    ]


def _saved(results: Results, name: str, base: str) -> str:
    """Per cent, by machine."""
    parts = []
    for _, result in of_kind(results, "grids"):
        saved = [
            100 - 100 * r for r in _ratios((row["times"] for row in result["grids"]), name, base)
        ]
        parts.append(f"{_span(saved, 0)} % on {short_gpus(result['machine'])}")
    return ", ".join(parts)


def _prefill(results: Results) -> str:
    parts = []
    for _, result in of_kind(results, "decode"):
        for row in result["decode"]:
            if row["part"] == "prefill":
                xla = min(row[name]["median"] for name in ("XLA", "graphs") if name in row)
                parts.append(
                    f"{row['jflux']['median'] / xla:.2f}"[1:]
                    + f" on {short_gpus(result['machine'])}"
                )
    return ", ".join(parts)


def _dispatched(results: Results) -> str:
    """Layers, forward and backward, on four GPUs."""
    layers = [row for row in _rows(results, "experts", 4) if row["list"] == "layer"]
    found = _ratios(iter(layers), "disp.", "EP")
    return _span(found + _ratios(_rows(results, "experts", 4), "disp. f+b", "EP f+b"))


#: Each a function of the results.
FIGURES: dict[str, Callable[[Results], str]] = {
    "dispatch over gather, 2 GPUs": lambda r: _span(
        _ratios(_rows(r, "experts", 2), "D+C", "gather")
    ),
    "dispatch over gather, 4 GPUs": lambda r: _span(
        _ratios(_rows(r, "experts", 4), "D+C", "gather")
    ),
    "layers dispatched, 4 GPUs": _dispatched,
    "grouped f+b over forward": lambda r: _span(_ratios(_rows(r, "moe"), "J f+b", "J"), 1),
    "ragged_dot f+b over jflux": lambda r: _span(_ratios(_rows(r, "moe"), "S f+b", "J f+b"), 1),
    "unrolled": lambda r: _saved(r, "unrolled", "+ fused"),
    "none unrolled": lambda r: _saved(r, "none unrolled", "none"),
    "prefill": _prefill,
}
QUOTE = re.compile(r"(<!-- bench: ([^>]+?) -->).*?(<!-- end -->)", re.DOTALL)


def filled(text: str, results: Results) -> str:
    """A page with its figures."""
    return QUOTE.sub(lambda m: f"{m[1]}{FIGURES[m[2]](results)}{m[3]}", text)
