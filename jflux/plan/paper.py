"""The paper's own case (section V-C): GPT-20B on 32 GPUs of Perlmutter, by both models.

``python -m jflux.plan.paper docs/guide/plan.md`` writes the tables between the markers and
draws its pictures; with ``--check`` it only says whether the tables are what they should be.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import pathlib
import sys
from collections.abc import Iterable, Sequence

import numpy as np

from ..parallel import Grid
from . import models, show
from .machine import MACHINES, Machine
from .predict import Extensions
from .search import Ranking, rank

# The paper names neither the batch nor the bandwidths of its figure 7. Its running example has 2048
# tokens for each of 16 GPUs (section IV).
TOKENS = 32 * 2048
PERLMUTTER = MACHINES["perlmutter"]


def section_v_c(
    tokens: int = TOKENS, machine: Machine = PERLMUTTER, *, fits: bool = True
) -> tuple[Ranking, Ranking]:
    """GPT-20B on 32 GPUs: the rankings by the placement-aware and the placement-agnostic model."""
    model = models.named("gpt-20b", tokens=tokens)
    aware = rank(model, 32, machine, fits=fits)
    return aware, rank(model, 32, machine, aware=False, fits=fits)


def places(ranking: Ranking, grid: Grid) -> tuple[int, int]:
    """The first and the last place among grids with the same predicted time."""
    times = ranking.communication()
    own = ranking.find(grid).communication
    return 1 + int((times < own * (1 - 1e-9)).sum()), int((times <= own * (1 + 1e-9)).sum())


def shared(a: Ranking, b: Ranking, top: int = 5) -> int:
    """How many grids are in the first places of both."""
    return len({plan.grid for plan in a[:top]} & {plan.grid for plan in b[:top]})


def _span(places: tuple[int, int]) -> str:
    first, last = places
    return str(first) if first == last else f"{first} to {last}"


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in lines)


def ranking_table() -> str:
    """All grids of section V-C, by the placement-aware model."""
    aware, agnostic = section_v_c()
    rows = []
    for plan in aware:
        other = agnostic.find(plan.grid)
        rows.append(
            (_span(places(aware, plan.grid)), _span(places(agnostic, plan.grid)), plan.grid,
             f"{plan.communication:.3f}", f"{other.communication:.3f}",
             *(f"{seconds:.3f}" for seconds in plan.times), f"{plan.memory.total() / 1e9:.1f}")
        )  # fmt: skip
    head = ("aware", "agnostic", "x, y, z, data", "aware s", "agnostic s", *show.COLUMNS, "GB")
    return _table(head, rows)


def assumptions_table() -> str:
    """What section V-C's statements become for other batches and bandwidths inside a node."""
    rows = []
    for tokens in (1 << 15, 1 << 16, 1 << 17, 1 << 18):
        for intra in (50e9, 100e9, 200e9, 300e9):
            machine = dataclasses.replace(PERLMUTTER, intra=intra)
            aware, agnostic = section_v_c(tokens, machine)
            best = aware.best.grid
            where = _span(places(agnostic, best))
            among = _span(places(section_v_c(tokens, machine, fits=False)[1], best))
            both = shared(aware, agnostic)
            rows.append((tokens, f"{intra / 1e9:.0f}", best, where, among, both))
    head = ("tokens", "inside a node, GB/s", "first of the aware model", "its agnostic place",
            "if memory were no limit", "of the first five, in both")  # fmt: skip
    return _table(head, rows)


def models_table() -> str:
    """The paper's weak scaling (table III) with 4 Mi tokens: the first grid of each, by its own
    equations, and with what they leave out."""
    more = Extensions(latency=True, recompute=True, overlap=0.5)
    rows = []
    for name, gpus in (
        ("gpt-5b", 64), ("gpt-10b", 128), ("gpt-20b", 256), ("gpt-40b", 512), ("gpt-80b", 1024)
    ):  # fmt: skip
        exact, full = rank(name, gpus), rank(name, gpus, extensions=more)
        rows.append(
            (name, gpus, f"{len(exact)} of {len(exact) + exact.refusals}", exact.best.grid,
             f"{exact.best.communication:.2f}", full.best.grid, f"{full.best.communication:.2f}",
             f"{full.best.compute:.2f}")
        )  # fmt: skip
    head = ("model", "GPUs", "grids that divide and fit", "first", "s", "first, with extensions",
            "exposed s", "products s")  # fmt: skip
    return _table(head, rows)


def example_table() -> str:
    """The running example of section IV: GPT-20B, 32 Ki tokens, 16 GPUs, 2 x 2 x 4 x 1."""
    model = models.named("gpt-20b", tokens=1 << 15)
    rows = []
    for kind, aware in (("aware", True), ("agnostic", False)):
        ranking = rank(model, 16, aware=aware)
        plan = ranking.find(Grid(2, 2, 4, 1))
        best = ranking.best
        rows.append(
            (kind, _span(places(ranking, plan.grid)), len(ranking), f"{plan.communication:.3f}",
             best.grid, f"{best.communication:.3f}")
        )  # fmt: skip
    return _table(("model", "place of 2x2x4x1", "of", "s", "first", "s"), rows)


TABLES = {
    "ranking": ranking_table,
    "assumptions": assumptions_table,
    "models": models_table,
    "example": example_table,
}


def fill(text: str) -> str:
    """The document with each table between its markers."""
    for name, table in TABLES.items():
        begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        if begin not in text or end not in text:
            raise ValueError(f"jflux: the document has no {begin} or no {end}")
        head, rest = text.split(begin, 1)
        text = f"{head}{begin}\n{table()}\n{end}{rest.split(end, 1)[1]}"
    return text


def draw_section_v_c(path: str | os.PathLike[str]) -> None:
    """After figure 7, with predicted seconds where the paper has measured ones: the grids by their
    places in either model, and what the placement-aware one predicts for them."""
    from matplotlib.figure import Figure

    aware, agnostic = section_v_c()
    five = {plan.grid for plan in aware[:5]}
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, ranking, name in zip(panels, (agnostic, aware), ("agnostic", "aware"), strict=True):
        times = np.array([aware.find(plan.grid).communication for plan in ranking])
        colors = ["#5b8db8" if plan.grid in five else "0.75" for plan in ranking]
        axes.bar(np.arange(1, len(times) + 1), times, color=colors)
        axes.set(title=f"placement-{name}", xlabel="place")
        axes.title.set_fontsize(10)
    panels[0].set_ylabel("s, by the aware model")
    figure.suptitle("GPT-20B on 32 GPUs; blue: the aware model's first five", fontsize=10)
    figure.savefig(path, dpi=110, metadata={"Software": None})


def main(argv: list[str] | None = None) -> int:
    """Writes the comparison into a document, or checks that it is there; 1 if it is not."""
    parser = argparse.ArgumentParser(prog="python -m jflux.plan.paper", description=__doc__)
    parser.add_argument("document", type=pathlib.Path)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args(argv)
    text = args.document.read_text()
    wanted = fill(text)
    if args.check:
        print("up to date" if text == wanted else f"{args.document}: not what the code says")
        return int(text != wanted)
    args.document.write_text(wanted)
    images = args.document.parent / "img"
    draw_section_v_c(images / "plan_gpt20b_32.png")
    show.draw(rank("gpt-80b", 1024), images / "plan_gpt80b_1024.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
