"""Draws docs/img: what each of four ranks has of an op's arrays, which positions of a sequence, in
which order they compute their tiles, what it costs when many CTAs send, and what a profile shows:
of communication, and of the kernels of a step. Needs matplotlib.

The two orders repeat cc/core/tile_order.h for one tile column, the parts and the positions repeat
what jflux says of itself; tests/test_docs.py compares them.
"""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

matplotlib.rcParams.update({"svg.hashsalt": "jflux", "font.size": 10})

WORLD = 4
COLORS = ("#8ecae6", "#ffd166", "#95d5b2", "#f4a6a6")  # of the rank that owns a row


def tile_rows(rows_per_rank: int, tile_m: int) -> int:
    return -(-WORLD * rows_per_rank // tile_m)


def gather_order(rank: int, rows_per_rank: int, tile_m: int) -> list[int]:
    """GatherOrder: tile rows in the order in which all_gather_matmul computes them."""
    tiles = tile_rows(rows_per_rank, tile_m)
    start = -(-rank * rows_per_rank // tile_m) % tiles
    return [(start + t) % tiles for t in range(tiles)]


def scatter_order(rank: int, rows_per_rank: int, tile_m: int) -> list[int]:
    """ScatterOrder: the same for matmul_reduce_scatter."""
    tiles = tile_rows(rows_per_rank, tile_m)
    begin, end = rank * rows_per_rank, (rank + 1) * rows_per_rank
    first, last = begin // tile_m, (end - 1) // tile_m
    own = list(range(first, last + 1))
    shared = [t for t in own if len(owners(t, rows_per_rank, tile_m)) > 1]
    others = [(last + 1 + t) % tiles for t in range(tiles - len(own))]
    return others + shared + [t for t in own if t not in shared]


def owners(tile: int, rows_per_rank: int, tile_m: int) -> list[int]:
    """The ranks that own rows of a tile."""
    last_row = min((tile + 1) * tile_m, WORLD * rows_per_rank) - 1
    return list(range(tile * tile_m // rows_per_rank, last_row // rows_per_rank + 1))


def draw_tiles(axes: Axes, orders: list[list[int]], rows_per_rank: int, tile_m: int) -> None:
    """A line per rank, a box per tile, in the colours of the ranks that own its rows."""
    for rank, order in enumerate(orders):
        for t, tile in enumerate(order):
            whose = owners(tile, rows_per_rank, tile_m)
            for i, owner in enumerate(whose):
                at = (t, rank + 0.6 * i / len(whose))
                axes.add_patch(Rectangle(at, 1, 0.6 / len(whose), color=COLORS[owner], lw=0))
            heavy = rank in whose
            axes.add_patch(
                Rectangle((t, rank), 1, 0.6, fill=False, lw=2 if heavy else 0.6, zorder=3 + heavy)
            )
            axes.text(t + 0.5, rank + 0.3, str(tile), ha="center", va="center", zorder=5)
    count = len(orders[0])
    axes.set(xlim=(-0.05, count + 0.05), ylim=(WORLD - 0.05, -0.1))
    axes.set_yticks([r + 0.3 for r in range(WORLD)], [f"rank {r}" for r in range(WORLD)])
    axes.set_xticks([])
    axes.tick_params(length=0)
    axes.set_xlabel("time →")
    for spine in axes.spines.values():
        spine.set_visible(False)


def note(axes: Axes, first: int, last: int, rank: int, text: str) -> None:
    """Text below a rank's tiles first .. last."""
    axes.plot([first + 0.05, last + 0.95], [rank + 0.67] * 2, color="0.45", lw=1)
    axes.text((first + last + 1) / 2, rank + 0.82, text, ha="center", va="center", size=7.5)


def add_legend(figure: Figure, box: str) -> None:
    handles = [Rectangle((0, 0), 1, 1, color=c) for c in COLORS]
    handles.append(Rectangle((0, 0), 1, 1, fill=False, lw=2))
    names = [f"rows of rank {r}" for r in range(WORLD)] + [box]
    figure.legend(handles, names, loc="outside lower center", ncols=len(names), frameon=False)


def tile_order() -> Figure:
    """Two tile rows for each rank."""
    rows, tile_m = 2, 1
    figure = Figure(figsize=(10.5, 4.1), layout="constrained")
    gather, scatter = figure.subplots(1, 2)

    draw_tiles(gather, [gather_order(r, rows, tile_m) for r in range(WORLD)], rows, tile_m)
    gather.set_title("all_gather_matmul: own rows first")
    for rank in range(WORLD):
        note(gather, 0, 1, rank, "reads x")
        for step in range(1, WORLD):
            source = (rank + step) % WORLD
            note(gather, 2 * step, 2 * step + 1, rank, f"reads what {source} sent")

    draw_tiles(scatter, [scatter_order(r, rows, tile_m) for r in range(WORLD)], rows, tile_m)
    scatter.set_title("matmul_reduce_scatter: own rows last")
    for rank in range(WORLD):
        for step in range(1, WORLD):
            peer = (rank + step) % WORLD
            note(scatter, 2 * step - 2, 2 * step - 1, rank, f"sends to {peer}")
        note(scatter, 6, 7, rank, "adds up, writes y")
    add_legend(figure, "tile row with own rows")
    return figure


def straddling() -> Figure:
    """Tiles of three rows, five rows for each rank."""
    rows, tile_m = 5, 3
    figure = Figure(figsize=(10.5, 4.1), layout="constrained")
    axes = figure.subplots()
    orders = [scatter_order(r, rows, tile_m) for r in range(WORLD)]
    draw_tiles(axes, orders, rows, tile_m)
    axes.set_title("matmul_reduce_scatter, five rows per rank, tiles of three rows")
    for rank, order in enumerate(orders):
        kinds = [(len(owners(t, rows, tile_m)), rank in owners(t, rows, tile_m)) for t in order]
        own = [i for i, (_, mine) in enumerate(kinds) if mine]
        shared = [i for i in own if kinds[i][0] > 1]
        alone = [i for i in own if kinds[i][0] == 1]
        note(axes, 0, own[0] - 1, rank, "sends, waits for nobody")
        peers = [p for i in shared for p in owners(order[i], rows, tile_m) if p != rank]
        if shared:
            names = " and ".join(map(str, peers))
            order_of = ", ascending" if len(shared) > 1 else ""
            note(axes, shared[0], shared[-1], rank, f"shared with {names}{order_of}")
        note(axes, alone[0], alone[-1], rank, "own rows only")
    add_legend(figure, "tile row with own rows")
    return figure


# J - G on 2 x H200, us, by how many CTAs send at a time: the tables of docs/experiments/0026.
ALL = 132
BY_STORERS = {
    "2048 x 12288 x 49152": {8: 5, 12: 6, 16: 13, 24: 28, ALL: 52},
    "2048 x 4096 x 14336": {8: 28, 12: 8, 16: 6, 24: 7, ALL: 21},
    "2048 x 4096 x 11008": {8: 36, 12: 18, 16: 7, 24: 7, ALL: 20},
    "2048 x 8192 x 8192": {8: 67, 12: 38, 16: 9, 24: 10, ALL: 24},
}
BY_SENDERS = {
    "1024 x 49152 x 12288": {12: 182, 16: 121, 24: 37, 44: 8, ALL: 26},
    "2048 x 14336 x 4096": {12: 92, 16: 60, 24: 9, 44: -2, ALL: 14},
    "2048 x 10240 x 8192": {12: 249, 16: 164, 24: 92, 44: 5, ALL: 21},
    "8192 x 11008 x 4096": {12: 318, 16: 172, 24: 24, 44: -4, ALL: 32},
}


def senders() -> Figure:
    """What is not hidden of the communication."""
    figure = Figure(figsize=(10.5, 3.8), layout="constrained")
    for axes, (title, lines) in zip(
        figure.subplots(1, 2),
        {"matmul_reduce_scatter": BY_STORERS, "all_gather_matmul": BY_SENDERS}.items(),
        strict=True,
    ):
        for name, values in lines.items():
            axes.plot(list(values), list(values.values()), marker="o", ms=4, label=name)
        ticks = sorted({count for values in lines.values() for count in values})
        axes.set_xscale("log")
        axes.set_xticks(ticks, ["all" if count == ALL else str(count) for count in ticks])
        axes.minorticks_off()
        axes.axhline(0, color="black", lw=0.6)
        axes.set_ylim(-10, 80)
        axes.set_title(title)
        axes.set_xlabel("CTAs that send at a time")
        axes.set_ylabel("J - G, us")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=9)
    return figure


# By product: which dimension of x, w and y the ranks split; None: none.
PARTS = {
    "all_gather_matmul": {"x": 0, "w": 1, "y": 1},
    "matmul_reduce_scatter": {"x": 1, "w": 0, "y": 0},
    "matmul_all_reduce": {"x": 1, "w": 0, "y": None},
    "matmul_all_to_all": {"x": 0, "w": None, "y": 1},
    "all_to_all_matmul": {"x": 1, "w": None, "y": 0},
}
# By array: where its left edge is, its height and its width, for m, k and n of 1.2, 1.0 and 1.4.
ARRAYS = {"x": (0.0, 1.2, 1.0), "w": (1.35, 1.0, 1.4), "y": (3.2, 1.2, 1.4)}
SIZES = {"x": ("m", "k"), "w": ("k", "n"), "y": ("m", "n")}


def shards() -> Figure:
    """x @ w = y, each divided into the ranks' parts."""
    figure = Figure(figsize=(10.5, 4.6), layout="constrained")
    grid = figure.subplots(2, 3).flat
    for axes, (op, split) in zip(grid, PARTS.items(), strict=False):
        for name, (left, height, width) in ARRAYS.items():
            axes.text(left + width / 2, 1.36, name, ha="center", weight="bold")
            lines = [
                f"{size}/N" if split[name] == i else size for i, size in enumerate(SIZES[name])
            ]
            axes.text(left + width / 2, -0.2, f"[{', '.join(lines)}]", ha="center", size=8)
            top = 1.2 - height
            if split[name] is None:
                axes.add_patch(Rectangle((left, top), width, height, fc="0.85", ec="black", lw=0.6))
                continue
            for rank, color in enumerate(COLORS):
                size = (height, width)[split[name]] / WORLD
                at = (
                    (left, 1.2 - (rank + 1) * size)
                    if split[name] == 0
                    else (left + rank * size, top)
                )
                shape = (width, size) if split[name] == 0 else (size, height)
                axes.add_patch(Rectangle(at, *shape, fc=color, ec="black", lw=0.6))
        axes.text(1.17, 0.6, "@", ha="center", va="center")
        axes.text(2.97, 0.6, "=", ha="center", va="center")
        axes.set(xlim=(-0.35, 4.95), ylim=(-0.35, 1.6), aspect="equal", title=op)
        axes.axis("off")
    last = figure.axes[-1]
    last.axis("off")
    handles = [Rectangle((0, 0), 1, 1, fc=color, ec="black", lw=0.6) for color in (*COLORS, "0.85")]
    names = [f"rank {rank} of {WORLD}" for rank in range(WORLD)] + ["whole on every rank"]
    last.legend(handles, names, loc="center", frameon=False)
    return figure


POSITIONS = 16


def layout_order(layout: str) -> list[int]:
    """The positions of a sequence, rank after rank."""
    parts, half = POSITIONS // WORLD, POSITIONS // WORLD // 2
    if layout == "contiguous":
        return list(range(POSITIONS))
    if layout == "striped":
        return [rank + WORLD * i for rank in range(WORLD) for i in range(parts)]
    firsts = [(rank * half, POSITIONS - (rank + 1) * half) for rank in range(WORLD)]
    return [first + i for pair in firsts for first in pair for i in range(half)]


def layouts() -> Figure:
    """Which rank has which position, and how many keys its queries attend to."""
    figure = Figure(figsize=(10.5, 2.9), layout="constrained")
    axes = figure.subplots()
    for line, layout in enumerate(("zigzag", "striped", "contiguous")):
        order = layout_order(layout)
        each = POSITIONS // WORLD
        axes.text(-0.3, line + 0.35, layout, ha="right", va="center")
        for at, position in enumerate(order):
            box = (position, line)
            axes.add_patch(Rectangle(box, 1, 0.7, fc=COLORS[at // each], ec="black", lw=0.6))
            axes.text(position + 0.5, line + 0.35, str(position), ha="center", va="center", size=8)
        pairs = [sum(p + 1 for p in order[r * each : (r + 1) * each]) for r in range(WORLD)]
        text = ", ".join(map(str, pairs))
        axes.text(POSITIONS + 0.3, line + 0.35, text, ha="left", va="center")
    axes.text(POSITIONS + 0.3, -0.35, "pairs of rank 0, 1, 2, 3", ha="left", va="center", size=8)
    axes.set(xlim=(-2.2, POSITIONS + 4), ylim=(3, -0.7))
    axes.axis("off")
    handles = [Rectangle((0, 0), 1, 1, fc=color, ec="black", lw=0.6) for color in COLORS]
    names = [f"rank {rank}" for rank in range(WORLD)]
    figure.legend(handles, names, loc="outside lower center", ncols=WORLD, frameon=False)
    return figure


# Rows of bench/results/2xh200.json: an op, m, n, k.
PROFILED = (
    ("matmul_reduce_scatter", 8192, 8192, 8192),
    ("all_gather_matmul", 8192, 10240, 8192),
    ("all_gather_matmul", 14, 11002, 4099),
)


def exposed() -> Figure:
    """How long a GPU is busy with the product, and how much longer the call takes."""
    path = Path(__file__).parents[1] / "bench" / "results" / "2xh200.json"
    rows = {
        (row["op"], row["m"], row["n"], row["k"]): row
        for row in json.loads(path.read_text())["rows"]
    }
    figure = Figure(figsize=(10.5, 3.1), layout="constrained")
    axes = figure.subplots()
    lines = []
    for i, key in enumerate(PROFILED):
        product, xla, fused = (1e6 * rows[key][name]["median"] for name in "GSJ")
        for j, (who, time) in enumerate((("XLA", xla), ("jflux", fused))):
            at = 2.6 * i + j
            parts = ((product, "#5b8db8"), (time - product, "#f4a261"))
            for left, (width, color) in zip((0, product), parts, strict=True):
                axes.barh(at, width / xla, left=left / xla, color=color, height=0.85)
            axes.text(time / xla + 0.01, at, f"{time:.0f} us", va="center", size=9)
            name = f"{key[0]} {key[1]} x {key[2]} x {key[3]}: " if j == 0 else ""
            lines.append((at, name + who))
    axes.set_yticks([at for at, _ in lines], [name for _, name in lines], fontsize=9)
    axes.invert_yaxis()
    axes.set_xticks([])
    axes.set_xlim(0, 1.12)
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    handles = [Rectangle((0, 0), 1, 1, color=color) for color in ("#5b8db8", "#f4a261")]
    names = ["the product alone", "communication that is not hidden, and the rest"]
    figure.legend(handles, names, loc="outside lower center", ncols=2, frameon=False)
    return figure


# By how a kernel's name begins: a colour, and what is said of it.
KERNELS = {
    "jflux::": ("#8ecae6", "product and communication"),
    "nvjet": ("#5b8db8", "product"),
    "nccl": ("#f4a261", "communication"),
    "loop": ("0.6", "gelu (loop_multiply_fusion)"),
}
STEPS_DRAWN = 2


def profile() -> Figure:
    """Two steps by jflux and by XLA, as jax.profiler tells of their kernels."""
    trace = json.loads((Path(__file__).parent / "img" / "profile.json").read_text())["us"]
    figure = Figure(figsize=(10.5, 3.7), layout="constrained")
    axes = figure.subplots()
    lines, ends = [], []
    for i, (who, gpus) in enumerate(trace.items()):
        for j, (gpu, events) in enumerate(gpus.items()):
            at = 2.7 * i + j
            lines.append((at, f"{who}, {gpu}"))
            drawn = events[: STEPS_DRAWN * len(events) // 3]
            ends.append(sum(drawn[-1][1:]))
            for name, start, length in drawn:
                kind = next(kind for kind in KERNELS if name.startswith(kind))
                axes.barh(at, length, left=start, color=KERNELS[kind][0], ec="black", lw=0.5)
                if kind in ("jflux::", "nvjet"):
                    text = name if kind == "jflux::" else "_".join(name.split("_")[:4]) + "..."
                    axes.text(start + length / 2, at, text, ha="center", va="center", size=7.5)
                elif kind == "nccl" and j == 0:
                    text = "_".join(name.split("_")[:2])
                    first = "AllGather" in name
                    left, side = (start, "left") if first else (start + length, "right")
                    axes.text(left, at - 0.5, f" {text} ", ha=side, size=7.5)
    axes.set_yticks([at for at, _ in lines], [name for _, name in lines])
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.set_xlim(-20, 1.01 * max(ends))
    axes.set_xlabel("us since the first kernel of the program")
    axes.spines[["top", "right", "left"]].set_visible(False)
    handles = [Rectangle((0, 0), 1, 1, fc=c, ec="black", lw=0.5) for c, _ in KERNELS.values()]
    names = [name for _, name in KERNELS.values()]
    figure.legend(handles, names, loc="outside lower center", ncols=len(names), frameon=False)
    return figure


def main() -> None:
    folder = Path(__file__).parent / "img"
    for draw in (shards, layouts, tile_order, straddling, senders, exposed, profile):
        draw().savefig(folder / f"{draw.__name__}.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
