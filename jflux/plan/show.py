"""A ranking as text and as a picture. Only the picture needs matplotlib."""

from __future__ import annotations

import os

from .search import Ranking
from .training import Memory

COLUMNS = ("AG z", "RS z", "AR y", "AR x", "AR data")
_COLORS = ("#5b8db8", "#8ecae6", "#f4a6a6", "#ffd166", "#95d5b2")


def title(ranking: Ranking) -> str:
    """A line that says what was ranked."""
    machine, model = ranking.machine, ranking.model
    kind = "placement-aware" if ranking.aware else "placement-agnostic"
    nodes = -(-ranking.gpus // machine.gpus_per_node)
    return f"{model.name}, {ranking.gpus} GPUs of {machine.name} ({nodes} nodes), {kind}"


def cells(ranking: Ranking, top: int) -> list[tuple[str, ...]]:
    """A row for each of the first `top` plans."""
    found = []
    for plan in ranking[:top]:
        numbers = [f"{t:.3f}" for t in (plan.communication, *plan.times, plan.step)]
        gigabytes = f"{plan.memory.total() / 1e9:.1f}"
        found.append((str(plan.place), str(plan.grid), *numbers, gigabytes))
    return found


HEAD = ("", "x x y x z x data", "comm. s", *COLUMNS, "step s", "GB per GPU")


def table(ranking: Ranking, top: int = 10) -> str:
    """The first plans, for a terminal: seconds of a step's collectives, of the whole step with its
    products, and memory."""
    rows = [HEAD, *cells(ranking, top)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEAD))]
    lines = [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]
    return "\n".join(lines)


def draw(ranking: Ranking, path: str | os.PathLike[str], top: int = 12) -> None:
    """Bars for the first plans: seconds of each collective, and bytes per GPU.

    Raises:
      ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("the picture needs matplotlib: pip install matplotlib") from error

    plans = ranking[:top]
    figure = Figure(figsize=(9, 0.28 * len(plans) + 1.9), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    names = [f"{plan.place}.  {plan.grid}" for plan in plans]
    at = range(len(plans))
    start = [0.0] * len(plans)
    for column, (label, color) in enumerate(zip(COLUMNS, _COLORS, strict=True)):
        widths = [plan.times[column] for plan in plans]
        left.barh(at, widths, left=start, color=color, label=label)
        start = [a + b for a, b in zip(start, widths, strict=True)]
    left.set_yticks(at, names, fontsize=8)
    left.invert_yaxis()
    left.set_xlabel("seconds a step in collectives")
    left.legend(fontsize=7, ncols=len(COLUMNS), loc="lower center", bbox_to_anchor=(0.5, 1))
    start = [0.0] * len(plans)
    greys = ("0.35", "0.5", "0.65", "0.8", "#b7a7cf")
    for column, (label, color) in enumerate(zip(Memory._fields, greys, strict=True)):
        widths = [plan.memory[column] / 1e9 for plan in plans]
        right.barh(at, widths, left=start, color=color, label=label)
        start = [a + b for a, b in zip(start, widths, strict=True)]
    right.axvline(ranking.machine.memory / 1e9, color="#c44e52", linewidth=1)
    right.set_xlabel("GB per GPU (line: what it has)")
    right.legend(fontsize=7, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1))
    figure.suptitle(title(ranking), fontsize=10)
    figure.savefig(path, dpi=110, metadata={"Software": None} if _is_png(path) else None)


def _is_png(path: str | os.PathLike[str]) -> bool:
    return os.fspath(path).endswith(".png")
