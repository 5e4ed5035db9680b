"""What part of the others' time jflux takes, over all rows of bench/results: the first table of
docs/performance.md, its picture, and the page of all rows in which jflux is slower."""

from __future__ import annotations

import collections
import dataclasses
import io
import statistics
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jflux._ops._wire import WIRES
from jflux._ops.collectives._quantized_exchange import LEAST_BYTES

from . import code_bases, grids, xla
from .earlier import changes_after
from .sections import Results, filled_table, of_kind, plain_table, ranks_of, short_gpus
from .shapes import XLA as FORMS_OF_XLA
from .shapes import Shape

Row = dict[str, Any]


def _op(row: Row) -> str:
    return row["op"].replace("all_gather, reduce_scatter", "all_gather and reduce_scatter")


def _decoding(row: Row) -> str:
    cache = row["case"]["cache"]
    return "flash_decode" if cache == "bfloat16" else f"flash_decode, {cache} cache"


def _decoding_on_one(row: Row) -> str:
    what = "cuDNN's" if row["case"]["cache"] == "bfloat16" else "einsums"
    return f"{what} on one GPU / N"


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
      rows: those that count.
    """

    what: str | Callable[[Row], str]
    ours: tuple[str, ...]
    against: str | Callable[[Row], str]
    theirs: tuple[str, ...]
    form: str = ""
    whole: bool = False
    rows: Callable[[Row], bool] = lambda row: True


def _has_wire(row: Row) -> bool:
    return "wire=" in row["op"]


def _takes_wire(row: Row) -> bool:
    return _has_wire(row) and row["bytes"] >= LEAST_BYTES


XLA = "XLA's own sequence"
CAPTURED = "XLA's, in a CUDA graph or not"
#: By kind of result, in the order of the table.
PAIRS: dict[str, list[Pair]] = {
    "rows": [
        Pair(_op, ("J",), XLA, FORMS_OF_XLA),
        Pair(_op, ("J",), "Pallas's kernel", ("P",)),
        Pair(_op, ("J",), "PyTorch's symmetric-memory op", ("T",)),
    ],
    "xla": [Pair(_op, ("J",), "the fastest of XLA's forms", xla.THEIRS)],
    "blocks": [Pair("MLPs and blocks, f+b", ("jflux",), XLA, ("XLA",))],
    "grids": [Pair("GPT on every grid, f+b", ("unrolled",), XLA, ("none unrolled",))],
    "maxtext": [Pair("MaxText's Llama, f+b", ("J",), XLA, ("S",))],
    "code_bases": [Pair("other libraries' models, f+b", ("J",), XLA, code_bases.XLA)],
    "decode": [Pair("decoding and prefill", ("jflux",), CAPTURED, ("XLA", "graphs"))],
    "attention": [
        pair
        for form in ("", " f+b")
        for pair in (
            Pair("attention", ("J",), "cuDNN's on one GPU / N", ("G",), form, whole=True),
            Pair("attention with masks", ("J",), "its own form in XLA's operations", ("X",), form),
            Pair("attention", ("J",), "an all-gather and cuDNN", ("A",), form),
            Pair("attention", ("J",), "Ulysses in plain JAX", ("U",), form),
            Pair("ulysses_attention", ("JU",), "Ulysses in plain JAX", ("U",), form),
            Pair("attention", ("J",), "Transformer Engine's", ("TE", "TE ring"), form),
            Pair(
                "attention", ("J",), "FlashAttention-3 on one GPU / N", ("FA3",), form, whole=True
            ),
        )
    ],
    "flash_decode": [Pair(_decoding, ("1",), _decoding_on_one, ("G",), whole=True)],
    "moe": [
        Pair("grouped_matmul", ("J",), "`lax.ragged_dot`", ("S",)),
        Pair("grouped_matmul", ("J",), "`lax.ragged_dot`", ("S",), " f+b"),
        Pair("grouped_matmul", ("J",), "cuBLAS, equal groups", ("G",)),
        Pair("grouped_matmul", ("J",), "PyTorch's grouped_mm", ("P",)),
        Pair("grouped_matmul", ("J",), "tokamax's ragged_dot", ("T",)),
        Pair("grouped_matmul", ("J",), "tokamax's ragged_dot", ("T",), " f+b"),
    ],
    "experts": [
        Pair("moe_dispatch and moe_combine", ("D+C",), "plain `lax`", ("S",)),
        Pair("moe_dispatch and moe_combine", ("D+C",), "gathering all tokens", ("gather",)),
        Pair("layer of experts, f+b", ("TP", "EP", "disp.", "prod."), XLA, ("S TP", "S EP")),
        *(
            Pair(
                f"layer of experts, {what}",
                (name,),
                "a capacity einsum in plain JAX",
                ("einsum",),
                form,
            )
            for form in ("", " f+b")
            for what, name in (("gathered", "EP"), ("dispatched", "disp."))
        ),
    ],
    "gathered": [Pair("gathered rows, grouped product", ("J",), "its two steps", ("two",))],
    "scattered": [Pair("grouped product, scattered sums", ("J",), "its two steps", ("two",))],
    "collectives": [
        Pair(_op, ("J",), CAPTURED, ("S", "C"), rows=lambda row: not _has_wire(row)),
        Pair(_op, WIRES, "exact data, by jflux or XLA", ("J", "S", "C"), rows=_takes_wire),
    ],
    "products": [
        Pair("product alone, w [k, n]", ("kn",), "XLA's", ("G",)),
        Pair("product alone, w [n, k]", ("nk",), "XLA's", ("G nk",)),
    ],
}

#: Likewise, what jflux takes by default against another of its own ways.
OWN_PAIRS: dict[str, list[Pair]] = {
    "rows": [Pair(_op, ("J",), "its one kernel (`always=True`)", ("K",))],
    "attention": [
        pair
        for form in ("", " f+b")
        for pair in (
            Pair("attention", ("J",), "the same around a ring", ("ring",), form),
            Pair("attention", ("J",), "its own kernels", ("K", "K ring"), form),
            Pair("attention", ("J",), "`ulysses_attention`", ("JU",), form),
        )
    ],
    "experts": [
        Pair("layer of experts, gathered, f+b", ("EP",), "tokens dispatched", ("disp.",)),
        Pair("layer of experts, gathered", ("EP",), "tokens dispatched", ("disp.",), " f+b"),
    ],
    "collectives": [
        Pair("ragged_all_to_all", ("J",), "an all_to_all of as many bytes", ("dense",)),
        Pair(_op, ("J",), "all_reduce, and XLA's norm", ("apart",)),
    ],
}


@dataclasses.dataclass(frozen=True)
class Compared:
    """jflux's time over the other's, in one row.

    Attributes:
      row: which, within its table.
      seconds, other: both times.
      noise: the quartiles of the two overlap.
      result: the file's name.
      day, machine: when and where.
      before: the day of the first change of its kernels since (bench/earlier.py).
    """

    what: str
    against: str
    ranks: int
    ratio: float
    row: str
    seconds: float
    other: float
    noise: bool
    result: str
    day: str
    machine: dict[str, Any]
    before: str

    @property
    def gpus(self) -> str:
        """Such as "2 x H100, a process each"."""
        each = ", a process each" if self.machine["processes"] > 1 else ""
        return short_gpus(self.machine) + each


def _least(row: Row, names: tuple[str, ...], form: str) -> dict[str, float] | None:
    times = row.get("times", row)
    found = (times[n + form] for n in names if n + form in times)
    return min(found, key=lambda timing: timing["median"], default=None)


def _row_name(kind: str, row: Row) -> str:
    if kind == "grids":
        return grids.name_of(row)
    if "case" in row:
        return ", ".join([row["case"]["name"], *([row["sizes"]] if "sizes" in row else [])])
    if "bytes" in row:
        return f"{row['bytes'] / 1024:g} KiB"
    if "m" in row:
        dtype = f", {row['dtype']}" if row.get("dtype", "bfloat16") != "bfloat16" else ""
        return f"{Shape('', row['m'], row['n'], row['k']).name}{dtype}"
    names = ("model", "part", "batch", "tokens", "positions")
    return " ".join(f"{row[name]}" for name in names if name in row)


def compared(
    results: Results, every: Mapping[str, list[Pair]] = PAIRS, noted: bool = False
) -> Iterator[Compared]:
    """Every row, by kind; with `noted` also those of kernels that are not the present ones."""
    for kind, pairs in every.items():
        for pair in pairs:
            for name, result in of_kind(results, kind):
                ranks, machine = ranks_of(result), result["machine"]
                if ("note" in machine and not noted) or (pair.whole and ranks == 1):
                    continue  # nothing is split on one GPU
                for row in filter(pair.rows, result[kind]):
                    ours = _least(row, pair.ours, pair.form)
                    theirs = _least(row, pair.theirs, pair.form)
                    if ours and theirs:
                        what, against = (
                            name if isinstance(name, str) else name(row)
                            for name in (pair.what, pair.against)
                        )
                        what += pair.form.replace(" ", ", ")
                        part = ranks if pair.whole else 1
                        other = theirs["median"] / part
                        days = (c.since for c in changes_after(name, kind, row, machine))
                        yield Compared(
                            what, against, ranks, ours["median"] / other, _row_name(kind, row),
                            ours["median"], other,
                            ours.get("low", 0) <= theirs.get("high", other) / part,
                            name, row.get("date", machine.get("date", "")), machine,
                            min(days, default=""),
                        )  # fmt: skip


SLOWER = """jflux takes longer than something else that computes the same in {slower} of {total} comparisons. All of
them are here, sorted by how much: also those of [earlier kernels](performance.md#tables-of-earlier-kernels),
and those that differ by less than the noise (~: the quartiles of both times overlap). "cuDNN's on one GPU / N" is a floor more than a
choice: that GPU holds all positions, and its time is divided by the ranks.

"""  # noqa: E501
OWN = """
## Where another way of jflux's own is faster

What jflux takes by default was slower than another of its ways in {slower} of {total} comparisons.
(An all_to_all of as many bytes does less than ragged_all_to_all: its slices are of one size.)

"""


def _slower_table(found: list[Compared]) -> str:
    def time_of(seconds: float) -> str:
        return f"{seconds * 1e6:.1f} us" if seconds < 1e-3 else f"{seconds * 1e3:.3f} ms"

    lines = []
    for c in sorted(found, key=lambda c: -c.ratio):
        link = f"[{c.day}](../bench/results/{c.result}.json)"
        lines.append([
            f"{c.ratio:.3f}{' ~' if c.noise else ''}", c.what, c.row, c.against, time_of(c.seconds),
            time_of(c.other), c.gpus, link, c.machine.get("jflux", ""),
            c.before and f"before {c.before}",
        ])  # fmt: skip
    columns = ["jflux / other", "jflux", "row", "other", "jflux's time", "other's", "GPUs",
               "measured", "version", "kernels"]  # fmt: skip
    return plain_table(columns, lines)


def count_of_slower(results: Results) -> str:
    ratios = [c.ratio for c in compared(results, noted=True)]
    return f"{sum(ratio > 1 for ratio in ratios)} of {len(ratios)} comparisons"


def slower(results: Results) -> str:
    """The page of all rows in which jflux is slower than something."""
    parts = []
    for head, pairs in ((SLOWER, PAIRS), (OWN, OWN_PAIRS)):
        every = list(compared(results, pairs, noted=True))
        found = [c for c in every if c.ratio > 1]
        parts.append(head.format(slower=len(found), total=len(every)) + _slower_table(found) + "\n")
    return "".join(parts)


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
