"""What part of the others' time jflux takes, over all rows of bench/results: the first table of
docs/performance.md, and its picture."""

from __future__ import annotations

import collections
import dataclasses
import io
import statistics
from collections.abc import Callable, Iterator
from typing import Any

from .sections import Results, filled_table, of_kind, ranks_of

Row = dict[str, Any]


def _op(row: Row) -> str:
    return row["op"].replace("all_gather, reduce_scatter", "all_gather and reduce_scatter")


def _attention(row: Row) -> str:
    return "flash_decode" if row["case"]["decode"] else "attention"


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two contestants of a row.

    Attributes:
      what: jflux computes; its form is added ("f+b": forward and backward).
      ours: columns, of which the shortest time counts.
      against: what else does it.
      theirs: its columns; likewise the shortest.
      form: what stands behind the columns' names.
      whole: they are times of one GPU, which are divided by the ranks.
    """

    what: str | Callable[[Row], str]
    ours: tuple[str, ...]
    against: str
    theirs: tuple[str, ...]
    form: str = ""
    whole: bool = False


XLA = "XLA's own sequence"
CAPTURED = "XLA's, in a CUDA graph or not"
#: By kind of result, in the order of the table.
PAIRS: dict[str, list[Pair]] = {
    "rows": [Pair(_op, ("J",), XLA, ("S",))],
    "blocks": [Pair("MLPs and blocks, f+b", ("jflux",), XLA, ("XLA",))],
    "grids": [Pair("GPT on every grid, f+b", ("unrolled",), XLA, ("none unrolled",))],
    "maxtext": [Pair("MaxText's Llama, f+b", ("J",), XLA, ("S",))],
    "decode": [Pair("decoding and prefill", ("jflux",), CAPTURED, ("XLA", "graphs"))],
    "attention": [
        pair
        for form in ("", " f+b")
        for pair in (
            Pair(_attention, ("J",), "cuDNN's on one GPU / N", ("G",), form, whole=True),
            Pair("attention with masks", ("J",), "its own form in XLA's operations", ("X",), form),
        )
    ],
    "moe": [
        Pair("grouped_matmul", ("J",), "`lax.ragged_dot`", ("S",)),
        Pair("grouped_matmul", ("J",), "cuBLAS, equal groups", ("G",)),
    ],
    "experts": [
        Pair("moe_dispatch and moe_combine", ("D+C",), "plain `lax`", ("S",)),
        Pair("moe_dispatch and moe_combine", ("D+C",), "gathering all tokens", ("gather",)),
        Pair("layer of experts, f+b", ("TP", "EP", "disp.", "prod."), XLA, ("S TP", "S EP")),
    ],
    "gathered": [Pair("gathered rows, grouped product", ("J",), "its two steps", ("two",))],
    "scattered": [Pair("grouped product, scattered sums", ("J",), "its two steps", ("two",))],
    "collectives": [Pair(_op, ("J",), CAPTURED, ("S", "C"))],
}


@dataclasses.dataclass(frozen=True)
class Compared:
    """jflux's time over the other's, in one row."""

    what: str
    against: str
    ranks: int
    ratio: float


def _least(row: Row, names: tuple[str, ...], form: str) -> float | None:
    times = row.get("times", row)
    return min((times[n + form]["median"] for n in names if n + form in times), default=None)


def compared(results: Results) -> Iterator[Compared]:
    """Every row, by kind."""
    for kind, pairs in PAIRS.items():
        for pair in pairs:
            for _, result in of_kind(results, kind):
                ranks = ranks_of(result)
                if "note" in result["machine"] or (pair.whole and ranks == 1):
                    continue  # of kernels that are not the present ones; nothing is split
                for row in result[kind]:
                    ours = _least(row, pair.ours, pair.form)
                    theirs = _least(row, pair.theirs, pair.form)
                    if ours and theirs:
                        what = pair.what if isinstance(pair.what, str) else pair.what(row)
                        what += pair.form.replace(" ", ", ")
                        theirs /= ranks if pair.whole else 1
                        yield Compared(what, pair.against, ranks, ours / theirs)


def _cell(ratios: list[float]) -> str:
    if not ratios:
        return ""
    if len(ratios) == 1:
        return f"{ratios[0]:.2f}"
    return f"**{statistics.median(ratios):.2f}** ({min(ratios):.2f}&nbsp;to&nbsp;{max(ratios):.2f})"


def _by_pair(results: Results) -> dict[tuple[str, str], dict[int, list[float]]]:
    """(what, against) -> ranks -> ratios."""
    found: dict[tuple[str, str], dict[int, list[float]]] = collections.defaultdict(dict)
    for c in compared(results):
        found[c.what, c.against].setdefault(c.ranks, []).append(c.ratio)
    return found


def table(results: Results) -> str:
    found = _by_pair(results)
    counts = sorted({ranks for of_ranks in found.values() for ranks in of_ranks})
    columns = ["jflux", "over", *(f"{n} GPU{'s' if n > 1 else ''}" for n in counts)]
    lines = []
    for (what, against), of_ranks in found.items():
        every = [ratio for ratios in of_ranks.values() for ratio in ratios]
        slower = sum(ratio > 1 for ratio in every)
        cells = [_cell(of_ranks.get(n, [])) for n in counts]
        lines.append([what, against, *cells, str(len(every)), str(slower or "")])
    return filled_table([*columns, "rows", "slower"], lines)


def picture(results: Results) -> bytes:
    """A dot for every row, a line for every pair; red where jflux is slower."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullFormatter

    found = _by_pair(results)
    figure = Figure(figsize=(9, 0.3 * len(found) + 1), layout="constrained")
    axis = figure.subplots()
    for i, of_ranks in enumerate(found.values()):
        gains = [1 / ratio for ratios in of_ranks.values() for ratio in ratios]
        colors = ["C0" if gain >= 1 else "C3" for gain in gains]
        axis.scatter(gains, [i] * len(gains), s=14, c=colors, alpha=0.5, linewidths=0)
        axis.plot([statistics.median(gains)], [i], "|", color="black", markersize=11)
    axis.axvline(1, color="black", linewidth=0.8)
    names = [f"{what}  /  {against}".replace("`", "") for what, against in found]
    axis.set_yticks(range(len(found)), names, fontsize=7.5)
    axis.invert_yaxis()
    ticks = [0.5, 1, 2, 5, 10, 20, 50, 100]
    axis.set(xscale="log", xlabel="speed-up: the other's time over jflux's (|: median)")
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks], fontsize=8)
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.grid(alpha=0.3, axis="x")
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=110, metadata={"Software": None})
    return out.getvalue()
