"""Makes docs/performance.md, the pages of tables in docs/performance, their pictures, README's
tables, and the figures that guides quote (bench/quoted.py), from bench/results/*.json.

python -m bench.render          writes them
python -m bench.render --check  fails if they are not what the results say
"""

from __future__ import annotations

import argparse
import collections
import io
import json
import pathlib
import re
import sys

import numpy as np

from . import cards, conclusions, earlier, quoted, readme, sections
from .sections import ranks_of, title
from .shapes import LISTS, fastest_xla, of_row
from .shapes import of as shapes_of

ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
PEERS = "PT"
# The list, and n, of each op's picture: shapes of GPT-3, which are the Flux paper's.
PICTURES = {
    "all_gather_matmul": ("flux", 49152),
    "matmul_reduce_scatter": ("flux", 12288),
    "matmul_all_reduce": ("all_reduce", 12288),
    "matmul_all_to_all": ("ulysses", 36864),
}
BEGIN, END = "<!-- figures -->", "<!-- end of figures -->"
INTRODUCTION = """# Performance

Made by `python -m bench.render` from the files in [bench/results](../bench/results); do not edit.
[Reproduce our numbers](guide/reproduce.md) says how to measure them again.

jflux's time over that of what else computes the same, bf16: the median of all rows, the range in
brackets, and in how many rows jflux is slower ([all of these](performance/slower.md)). No row is left out
but those of the kernels before k-panels.

"""  # noqa: E501

MEASURED = """
![The speed-up of every row](img/every_row.png)

What follows from it:

- A product with its communication takes less time than XLA's product and collective in nearly every
  row. It gains most where communication takes as long as the product (lists llm and attention) and
  where n or k are no multiples of eight, which XLA multiplies slowly (odd); least where rows are no
  whole tiles (ragged) or the product is so long that there is little to hide (flux).
- None of XLA's other forms changes that ([table](performance/ops.md)): collectives captured in CUDA
  graphs save up to a tenth, the latency-hiding scheduler has nothing to move beside a single product, and
  windowed einsum takes longer than no overlap at all, most of all with few rows.
- Whole models gain less than single ops: they spend time in attention and norms too, and a chip that
  waits less is clocked lower ([0009](experiments/0009-power-limit.md)).
- Attention over a split sequence takes cuDNN's time on one GPU, divided by the ranks, and its
  communication on top, which short sequences and gradients show.
- A grouped product is slower than cuBLAS's batched product of equal groups, which a mixture of
  experts can only call if it pads its groups, or drops tokens. A layer that does so, in plain JAX with a
  capacity, takes longer than jflux's, which drops none. Sending tokens to their experts takes longer than
  gathering all of them, but leaves each rank only its own rows.
- Ten lines of plain JAX (Ulysses: exchange heads, attend with cuDNN, exchange back) are as fast as
  `jflux.attention` with gradients, wherever ranks divide the heads. Its forward pass takes less time.
- Collectives gain most below 128 KiB, where they are one exchange in one kernel. Large ones are XLA's
  own.

## By rows

E is the part of the communication that is hidden; F is the time of the longer one, product or
communication.

![all_gather_matmul by rows](img/all_gather_matmul.png)

![matmul_reduce_scatter by rows](img/matmul_reduce_scatter.png)

![matmul_all_reduce by rows](img/matmul_all_reduce.png)

![matmul_all_to_all by rows](img/matmul_all_to_all.png)

## How it is measured

For each shape all contestants are timed alternately, round after round, in one process (or one
process for each GPU), each as often after each other one; the median over the rounds of the slowest
rank counts. A contestant is a jitted loop whose calls depend on each other, so that the host calls it once.
Inside, the host still launches XLA's own collectives one by one, up to 20 us each, where it captures
jflux's kernels in CUDA graphs. bf16, normal random operands; n and k are global. How:
[bench/harness.py](../bench/harness.py).

NCCL, and PyTorch's symmetric memory, were timed with NVLink multicast off (`NCCL_NVLS_ENABLE=0`): the
hosts forbid it. On more than two GPUs NCCL may be faster with it, so XLA's and PyTorch's times on such
hosts may be shorter than here. jflux uses no multicast.

Lists of shapes and all symbols are in the [glossary](glossary.md).

| column | what |
|---|---|
| G | XLA's product alone, of one rank's whole input |
| C | XLA's communication alone (NCCL) |
| S | XLA's own sequence, in plain `lax`: what a JAX user would otherwise call. With c behind it, its collectives were captured in CUDA graphs by a compiler option, and that was faster; tables dated before 2026-11-28 lack that form |
| J | jflux; with K behind it, the call is decomposed, and K says what the one kernel takes |
| E | overlap efficiency, 1 - (J - G) / (S - G): 1 is communication wholly hidden, negative is worse than not overlapping (Flux, arXiv 2406.06858, equation 2) |
| J / F | over the floor max(G, C) |
| P | Pallas's `all_gather_lhs_matmul`, the faster of two configurations, where it takes the shape |
| T | PyTorch's symmetric-memory op, called from Python, one process for each GPU |
"""  # noqa: E501

NOTES = """
## What the figures do not say

- A call for which XLA's product and a collective are faster than one kernel is decomposed, unless
  `jflux.config(always=True)` is set ([Dispatch](guide/dispatch.md)). The collective is jflux's. In
  the tables of 3 and 4 H200s it was `lax`'s, and in the table of one process for each of 2 H200s it
  was `lax`'s above 4 MiB.
- With 3 ranks a rank's rows are never whole tiles.
- An efficiency above 1 means that jflux's product was faster than XLA's.
- n and k that are no multiples of eight (11002, 4099) cannot be read 16 bytes at a time. XLA's
  products take three to four times as long then; jflux pads w in each call.
- E of 8192 rows is a small difference of long times, which differ by the clock that each finds: the
  reduce-scatter has .71 with one process, and 1.21 with two.
- PyTorch's ops are launched from Python, which alone takes .2 to .3 ms a call; in a graph they
  failed.
- The GPUs are limited by power; times of one column in different runs differ by up to 5 %. Ratios
  within a row come from loops that alternate and are so short that all have the same clock. One
  that goes on for .1 s or more is clocked by its own power: four products at .92 to .96 of XLA's
  speed were at .94 to 1.00 then ([0024](experiments/0024-product-beside-cublas.md), "Clocks").
- Random numbers make the chip clock down. Where it does not have to, XLA's products gain more than
  jflux's ([0009](experiments/0009-power-limit.md)). With random numbers prefill of Llama-2-70B's
  layers takes <!-- bench: prefill --><!-- end --> of XLA's time. A gated product of Llama-2-70B takes .87 to
  .92 of XLA's time with random numbers, and .82 to .91 with zeros.

### Tables of earlier kernels

{earlier}

### Choices behind single rows

- Seven shapes on 2 GPUs use configurations that were measured to be faster than the heuristic's
  (`jflux/tables`). One on 4 H200s (reduce-scatter 2048 x 8192 x 28672) used one that has been taken
  out since: a single raster group, which was faster when all CTAs sent.
- On 2 GPUs chunks of sums would still be 5 % faster than XLA at 64 MiB, but take 256 MiB of the heap;
  above 16 MiB they are XLA's.
- Timed decomposed, and one kernel now, whose time is K: up to 14 rows of 4104 columns or k on 2 GPUs
  ([0020](experiments/0020-few-rows-decomposed.md)).
- Reduce-scatters of 4104 columns on 2 x H200, and of 4099 there and on 2 x H100, were timed with tiles
  of 128 columns; they take 192 now ([0053](experiments/0053-operand-rows.md)).
- matmul_all_reduce of 32 to 128 rows is one kernel on 2 GPUs, and XLA's product and all_reduce on
  more.
- On every grid it helps to have no loop over the layers: XLA copies what one iteration hands to the
  next, and slices stacked weights. "unrolled" takes less time than "+ fused",
  by <!-- bench: unrolled --><!-- end -->; "none unrolled" less than "none",
  by <!-- bench: none unrolled --><!-- end -->. Most of what "+ fused" saves on 1x2x1x1 (12 %) is
  matmul_all_reduce's. [0029](experiments/0029-grids.md) compares with the paper's grids.
- What MLPs and blocks take of memory beside their operands is "MiB" and "heap" together: Llama's
  MLP 961 MiB where XLA takes 832, its block 1090 (1025), GPT-3's 1313 (1920) and 1571 (2498). All
  layers share the heap, which is kept between steps.

[Runs on GPUs](gpu_runs.md) lists what else has run.
"""  # noqa: E501


def load() -> list[tuple[str, dict]]:
    return [(p.stem, json.loads(p.read_text())) for p in sorted(RESULTS.glob("*.json"))]


def of_ops(results: list[tuple[str, dict]]) -> list[tuple[str, dict]]:
    return [(name, result) for name, result in results if "rows" in result]


def ms(row: dict, name: str) -> float:
    return row[name]["median"] * 1e3


HEADINGS = {
    "flux": "Shapes of the Flux paper",
    "decode": "Few rows",
    "llm": "Projections of language models",
    "attention": "Projections whose communication is as long as the product",
    "ragged": "Rows that are no whole tiles",
    "hundreds": "A few hundred rows",
    "odd": "Sizes that are no multiples of any tile",
    "all_reduce": "Products whose sums every rank gets",
    "ulysses": "Rows of a sequence that become heads",
}


def _heading(name: str) -> str:
    return HEADINGS.get(name, f"Sizes of {name}")


def by_list(result: dict) -> dict[str, list[dict]]:
    """The rows of each list of bench/shapes.py, each once."""
    left, found, ranks = list(result["rows"]), {}, ranks_of(result)
    for name in (*HEADINGS, *(name for name in LISTS if name not in HEADINGS)):
        listed = {*LISTS[name], *shapes_of(name, ranks)}
        rows = [r for r in left if of_row(r) in listed]
        if rows:
            found[name] = rows
        left = [r for r in left if r not in rows]
    if left:  # of no list any more
        found["ragged"] = found.get("ragged", []) + left
    return found


def day_of(row: dict, machine: dict) -> str:
    """A row that was kept when others were added (python -m bench --add) has its own."""
    return row.get("date", machine["date"])


def tables(result: dict) -> str:
    machine, parts = result["machine"], []
    for name, rows in by_list(result).items():
        days = sorted({day_of(row, machine) for row in rows})
        note = "" if days == [machine["date"]] else f"Measured on {' and '.join(days)}.\n\n"
        parts.append(f"### {_heading(name)}\n\n{note}{table(rows, result)}")
    return "\n\n".join(parts)


def table(rows: list[dict], result: dict) -> str:
    ranks = ranks_of(result)
    others = [name for name in PEERS if any(name in row for row in rows)]
    head = ["op", "m", "n", "k", "G ms", "C ms", "S ms", "J ms", "J / S", "E", "J / F",
            "J TFLOP/s per GPU", *(f"{name} ms" for name in others)]  # fmt: skip
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in rows:
        xla = fastest_xla(row)
        g, c, s, j = (ms(row, name) for name in ("G", "C", xla, "J"))
        captured = "" if xla == "S" else " c"
        efficiency = f"{1 - (j - g) / (s - g):.2f}" if s > g else ""
        rate = of_row(row).flops(ranks) / j / 1e9
        choice = f" (K {ms(row, 'K'):.3f})" if "K" in row else ""
        lines.append(
            f"| {row['op']} | {row['m']} | {row['n']} | {row['k']} | {g:.3f} | {c:.3f} "
            f"| {s:.3f}{captured} | {j:.3f}{choice} | {j / s:.3f} "
            f"| {efficiency} | {j / max(g, c):.2f} | {rate:.0f} |"
            + "".join(f" {ms(row, name):.3f} |" if name in row else " |" for name in others)
        )
    return "\n".join(lines)


def _op_tables(name: str, result: dict) -> str:
    m = result["machine"]
    ops = {row["op"] for row in result["rows"]}
    what = f": {_heading('all_reduce')}" if ops == {"matmul_all_reduce"} else ""
    mark = earlier.mark(name, "rows", result)
    return (
        f"## {title(result)}{what}\n\n{m['date']}, driver {m['driver']}, jax {m['jax']}, "
        f"jflux {m['jflux']} ([{name}.json](../bench/results/{name}.json)).{mark and ' '}{mark}\n\n"
        f"{tables(result)}\n"
    )


#: Pages of tables in docs/performance: the heading, and the kinds of results.
TABLES = {
    "slower": ("Where jflux is slower", ()),
    "ops": ("Ops", ("xla", "scaled")),
    "models": ("Models", ("blocks", "grids", "decode", "maxtext", "code_bases")),
    "attention": ("Attention", ("attention", "flash_decode")),
    "experts": ("Mixtures of experts", ("moe", "experts", "gathered", "scattered")),
    "collectives": ("Collectives", ("collectives", "accuracy")),
    "products": ("Products alone", ("products",)),
    "gpus": ("Models of GPU side by side", ()),
    "missing": ("Not measured yet", ()),
}
TABLES_HEAD = """Made by `python -m bench.render`; columns and conditions are explained in
[Performance](performance.md). NVLink multicast was off: with it NCCL may be faster on more than two GPUs.
"""  # noqa: E501


def pages(results: list[tuple[str, dict]]) -> dict[str, str]:
    """Text by file in docs/."""
    of_page = {
        name: sections.all_of(results, kinds, earlier.mark)
        for name, (_, kinds) in TABLES.items()
        if kinds
    }
    of_page["ops"] += [_op_tables(name, result) for name, result in of_ops(results)]
    of_page["slower"] = [conclusions.slower(results)]
    of_page["gpus"] = [cards.beside(results)]
    of_page["missing"] = [cards.to_do(results)]
    found, lines = {}, []
    for name, (heading, _) in TABLES.items():
        text = "\n".join([f"# {heading}\n", TABLES_HEAD, *of_page[name]])
        found[f"performance/{name}.md"] = re.sub(r"\]\((?!\w+:|#)", "](../", text)
        lines.append(f"| [{heading}](performance/{name}.md) |")
    listed = "\n## All tables\n\n| |\n|---|\n" + "\n".join(lines) + "\n"
    notes = NOTES.replace("{earlier}", earlier.table(results))
    parts = [INTRODUCTION, conclusions.table(results), "\n", MEASURED, listed, notes]
    return {"performance.md": quoted.filled("".join(parts), results), **found}


def curves(results: list[tuple[str, dict]], op: str) -> dict[str, tuple[dict, list[dict]]]:
    """The rows that the picture of an op shows, and their machine, by title: at the shapes of
    `PICTURES` (3 ranks: at ragged ones). Only those of one day, and so of the same kernels: the day
    on which most machines were measured, the newest if there are several."""
    found = []
    for _, result in of_ops(results):
        machine = result["machine"]
        if "note" in machine:  # of kernels that are not the present ones
            continue
        lists = by_list(result)
        listed, n = PICTURES[op]
        rows = lists.get(listed, lists.get("ragged", ()))
        rows = [r for r in rows if r["op"] == op and r["n"] == n]
        for day in {day_of(r, machine) for r in rows}:
            of_day = [r for r in rows if day_of(r, machine) == day]
            found.append((title(result), machine | {"date": day}, of_day))
    days = collections.Counter(machine["date"] for _, machine, _ in found)
    shown = max(days, key=lambda day: (days[day], day))
    return {name: (machine, rows) for name, machine, rows in found if machine["date"] == shown}


def picture(results: list[tuple[str, dict]], op: str) -> bytes:
    """E, and J over the floor, by rows."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullFormatter

    shown = curves(results, op)
    figure = Figure(figsize=(9, 3.9), layout="constrained")
    efficiency, floor = figure.subplots(1, 2)
    ticks = sorted({r["m"] for _, rows in shown.values() for r in rows})
    for i, (name, (machine, rows)) in enumerate(shown.items()):
        m = [r["m"] for r in rows]
        g, c, j = (np.array([ms(r, contestant) for r in rows]) for contestant in "GCJ")
        s = np.array([ms(r, fastest_xla(r)) for r in rows])
        style = "-" if machine["processes"] == 1 else "--"
        line = {"linestyle": style, "color": f"C{i}", "marker": "o", "markersize": 3}
        efficiency.plot(m, 1 - (j - g) / (s - g), label=name, **line)
        floor.plot(m, j / np.maximum(g, c), **line)
    for axis, what in ((efficiency, "overlap efficiency E"), (floor, "time over the floor, J / F")):
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set(title=f"{op}: {what}", xlabel="m (rows)", xscale="log")
        axis.set_xticks(ticks, [str(m) for m in ticks], fontsize=8)
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.title.set_fontsize(10)
        axis.grid(alpha=0.3)
    (day,) = {machine["date"] for machine, _ in shown.values()}
    figure.legend(
        loc="outside lower center", ncols=min(3, len(shown)), fontsize=8, frameon=False,
        title=f"measured on {day}", title_fontsize=8,
    )  # fmt: skip
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=110, metadata={"Software": None})
    return out.getvalue()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    results = load()
    readme_path = ROOT / "README.md"
    text = readme_path.read_text()
    head, rest = text.split(BEGIN, 1)
    tail = rest.split(END, 1)[1]
    wanted = {
        readme_path: f"{head}{BEGIN}\n{readme.table(results)}\n{END}{tail}",
    } | {ROOT / "docs" / name: page for name, page in pages(results).items()}
    for path in (ROOT / "docs").glob("guide/*.md"):
        if quoted.QUOTE.search(page := path.read_text()):
            wanted[path] = quoted.filled(page, results)
    if args.check:
        stale = [
            str(p.relative_to(ROOT))
            for p, want in wanted.items()
            if not p.exists() or p.read_text() != want
        ]
        print(f"not what bench/results says: {stale}" if stale else "up to date")
        return bool(stale)
    (ROOT / "docs" / "performance").mkdir(exist_ok=True)
    for path, want in wanted.items():
        path.write_text(want)
    for op in PICTURES:
        (ROOT / "docs" / "img" / f"{op}.png").write_bytes(picture(results, op))
    (ROOT / "docs" / "img" / "every_row.png").write_bytes(conclusions.picture(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
