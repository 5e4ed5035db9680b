"""Makes docs/performance.md, its pictures and README's table from bench/results/*.json.

python -m bench.render          writes them
python -m bench.render --check  fails if they are not what the results say
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import pathlib
import sys
from collections.abc import Iterable, Sequence

import numpy as np

from . import accuracy, blocks, collectives, decode, grids, products
from .shapes import LISTS, Shape

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
README_HAS = "2xh200"  # of the present kernels

INTRODUCTION = """# Performance

Made by `python -m bench.render` from the files in [bench/results](../bench/results); do not edit.
`python -m bench.renew` measures them again.

For each shape all contestants are timed in turn, round after round, in one process (or one process
for each GPU), each as often after each other one; the median over the rounds of the slowest rank
counts. A contestant is a jitted loop whose calls depend on each other, so that host dispatch is paid
once. bf16, normal random operands; n and k are global. How: [bench/harness.py](../bench/harness.py).

| column | what |
|---|---|
| G | XLA's product alone, of one rank's whole input |
| C | XLA's communication alone (NCCL) |
| S | XLA's own sequence, in plain `lax`: what a JAX user would otherwise call |
| J | jflux; with K behind it, jflux has chosen XLA's product and a collective, and K says what its one kernel takes |
| E | overlap efficiency, 1 - (J - G) / (S - G): 1 is communication wholly hidden, negative is worse than not overlapping (Flux, arXiv 2406.06858, equation 2) |
| J / F | over the floor max(G, C) |
| P | Pallas's `all_gather_lhs_matmul`, the faster of two configurations, where it takes the shape |
| T | PyTorch's symmetric-memory op, called from Python, one process for each GPU |

![all_gather_matmul by rows](img/all_gather_matmul.png)

![matmul_reduce_scatter by rows](img/matmul_reduce_scatter.png)

![matmul_all_reduce by rows](img/matmul_all_reduce.png)

![matmul_all_to_all by rows](img/matmul_all_to_all.png)
"""  # noqa: E501

NOTES = """
## What the figures do not say

- Where XLA's product and a collective are faster than one kernel jflux takes them, unless
  `jflux.config(always=True)` is set. Which calls those are is decided by rows (`apart_is_faster` in
  `jflux/_ops/_product.py`), and for matmul_all_to_all also by what it would multiply for nothing.
  It is jflux's collective; in the tables of 3 and 4 GPUs it was `lax`'s everywhere, and in that of
  one process for each of 2 GPUs above 4 MiB.
- With 3 ranks a rank's rows are never whole tiles.
- An efficiency above 1 means that jflux's product was faster than XLA's.
- Tables dated before 2026-11-25 (3 and 4 GPUs, grids, peers) are of earlier kernels, and of random
  orders, in which some contestants came more often than others after one that takes little power,
  such as C: 2 % that are nobody's ([0010](design/0010-who-sends.md), "Who runs after whom"). All
  CTAs sent at once then; since only some do at a time J - G on 2 GPUs is half of what it was, or
  less (there, "What it brought").
- The kernels of 4 GPUs had no tiles of 224 or 256 columns either, and began and ended
  later ([0009](design/0009-the-product.md)); on 2 GPUs that took 1 to 8 % of most calls' time,
  and up to 10 % more where tiles of 224 fit. With one process for each of 4 GPUs and with 3 GPUs
  they are older still: all-gathers did not travel in panels, few rows were not one sweep, and
  matmul_all_reduce was two calls. So are those with Pallas and PyTorch beside.
- n and k that are no multiples of eight (11002, 4099) cannot be read 16 bytes at a time. XLA's
  products take three to four times as long then; jflux pads w in each call.
- E of 8192 rows is a small difference of long times, which differ by the clock that each finds: the
  reduce-scatter has .71 with one process, and 1.21 with two.
- Four shapes on 2 GPUs use configurations that were measured to be faster than the heuristic's
  (`jflux/tables`). One on 4 (reduce-scatter 2048 x 8192 x 28672) used one that has been taken out
  since: all rows in one sweep, which was faster when all CTAs sent.
- By the table of small collectives on 4 GPUs, all_to_all of 4 MiB took 1.17 of XLA's time, in
  packets, and the norm was in the kernel after sums of 256 KiB and more (now as "apart"). Sums
  above 1 MiB have since gone in chunks up to 8 MiB, and exchanges up to 64 MiB
  ([0006](design/0006-small-collectives.md)). On 2 GPUs chunks of sums would still be 5 % faster
  than XLA at 64 MiB, but take 256 MiB of the heap; above 16 MiB they are XLA's.
- matmul_all_reduce of 32 to 128 rows is one kernel on 2 GPUs, and XLA's product and all_reduce on
  more.
- On every grid it helps most to have no loop over the layers ("unrolled", 10 to 17 % less time
  than "+ fused"; "none unrolled" takes 4 to 9 % less than "none"): XLA copies what one iteration
  hands to the next, and slices stacked weights. Most of what "+ fused" saves on 1x2x1x1 (12 %) is
  matmul_all_reduce's. The planner's order of the four grids of 2 GPUs, 2x1x1x1, 1x2x1x1, and then
  the other two alike, is the measured one with all optimisations. The paper's steps gained 5, 8,
  19 and 9 % on 16 GPUs of four nodes, whose links are ten times slower than NVLink; here all of a
  grid's communication is 3 to 16 % of a step to begin with, and products run slower beside it.
- What MLPs and blocks take of memory beside their operands is "MiB" and "heap" together: Llama's
  MLP 961 MiB where XLA takes 832, its block 1090 (1025), GPT-3's 1313 (1920) and 1571 (2498). All
  layers share the heap, which is kept between steps.
- PyTorch's ops are launched from Python, which alone takes .2 to .3 ms a call; in a graph they
  failed.
- Random numbers make the chip clock down. Where it does not have to, XLA's products gain more than
  jflux's ([0009](design/0009-the-product.md), "Where power is no limit"): prefill of Llama-2-70B's
  layers takes .97 of XLA's time, though each op by itself takes .70 to .90. A gated product of
  Llama-2-70B takes .87 to .92 of XLA's time with random numbers, and .82 to .91 with zeros.
- What else has run on GPUs: [verified.md](verified.md).
- The GPUs are limited by power; times of one column in different runs differ by up to 5 %. Ratios
  within a row were taken in turn, in loops so short that all have the same clock. One that goes on
  by itself for .1 s or more is clocked by its own power: four products at .92 to .96 of XLA's speed
  were at .94 to 1.00 then ([0009](design/0009-the-product.md), "Clocks").
"""


def load() -> list[tuple[str, dict]]:
    return [(p.stem, json.loads(p.read_text())) for p in sorted(RESULTS.glob("*.json"))]


def of_ops(results: list[tuple[str, dict]]) -> list[tuple[str, dict]]:
    return [(name, result) for name, result in results if "rows" in result]


def of_kind(results: list[tuple[str, dict]], kind: str) -> list[tuple[str, dict]]:
    """Those of another benchmark, by the name of its rows."""
    return [(name, result) for name, result in results if kind in result]


def ms(row: dict, name: str) -> float:
    return row[name]["median"] * 1e3


HEADINGS = {
    "flux": "Shapes of the Flux paper",
    "decode": "Few rows",
    "llm": "Projections of language models",
    "attention": "Projections whose communication is as long as the product",
    "ragged": "Rows that are no whole tiles",
    "odd": "Sizes that are no multiples of any tile",
    "all_reduce": "Products whose sums every rank gets",
    "ulysses": "Rows of a sequence that become heads",
}


def shape(row: dict) -> Shape:
    return Shape(row["op"], row["m"], row["n"], row["k"])


def by_list(result: dict) -> dict[str, list[dict]]:
    """The rows of each list of bench/shapes.py, each once."""
    left, found = list(result["rows"]), {}
    for name in HEADINGS:
        rows = [r for r in left if shape(r) in LISTS[name]]
        if rows:
            found[name] = rows
        left = [r for r in left if r not in rows]
    if left:  # of 3 ranks, which do not divide the lists' rows
        found["ragged"] = found.get("ragged", []) + left
    return found


def tables(result: dict) -> str:
    return "\n\n".join(
        f"### {HEADINGS[name]}\n\n{table(rows, result)}" for name, rows in by_list(result).items()
    )


def table(rows: list[dict], result: dict) -> str:
    ranks = int(result["machine"]["gpus"].split()[0])
    others = [name for name in PEERS if any(name in row for row in rows)]
    head = ["op", "m", "n", "k", "G ms", "C ms", "S ms", "J ms", "J / S", "E", "J / F",
            "J TFLOP/s per GPU", *(f"{name} ms" for name in others)]  # fmt: skip
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in rows:
        g, c, s, j = (ms(row, name) for name in "GCSJ")
        efficiency = f"{1 - (j - g) / (s - g):.2f}" if s > g else ""
        rate = shape(row).flops(ranks) / j / 1e9
        choice = f" (K {ms(row, 'K'):.3f})" if "K" in row else ""
        lines.append(
            f"| {row['op']} | {row['m']} | {row['n']} | {row['k']} | {g:.3f} | {c:.3f} | {s:.3f} "
            f"| {j:.3f}{choice} | {j / s:.3f} | {efficiency} | {j / max(g, c):.2f} | {rate:.0f} |"
            + "".join(f" {ms(row, name):.3f} |" if name in row else " |" for name in others)
        )
    return "\n".join(lines)


def title(result: dict) -> str:
    machine = result["machine"]
    how = "one process" if machine["processes"] == 1 else "one process for each GPU"
    note = f"; {machine['note']}" if "note" in machine else ""
    return f"{machine['gpus']}, {how}{note}"


def plain_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def collective_tables(rows: list[dict]) -> str:
    """One for each op."""
    ops = dict.fromkeys(row["op"] for row in rows)
    return "\n\n".join(
        f"{op}:\n\n"
        + plain_table(
            collectives.columns(op), [collectives.cells(row) for row in rows if row["op"] == op]
        )
        for op in ops
    )


def product_tables(rows: list[dict]) -> str:
    """One for each type."""
    of_type = itertools.groupby(rows, key=lambda row: row["dtype"])
    return "\n\n".join(
        f"{dtype}. {products.summary(same)}\n\n"
        + plain_table(products.COLUMNS, map(products.cells, same))
        for dtype, same in ((dtype, list(found)) for dtype, found in of_type)
    )


def document(results: list[tuple[str, dict]]) -> str:
    parts = [INTRODUCTION]
    for name, result in of_kind(results, "blocks"):
        parts.append(
            f"## MLPs and transformer blocks, forward and backward: {title(result)}\n\n"
            f"[{name}.json](../bench/results/{name}.json); what is timed: "
            "[bench/blocks.py](../bench/blocks.py).\n\n"
            f"{plain_table(blocks.COLUMNS, map(blocks.cells, result['blocks']))}\n"
        )
    for name, result in of_kind(results, "grids"):
        sizes = result["sizes"]
        parts.append(
            f"## Every grid of {title(result)}: GPT blocks, forward and backward\n\n"
            f"[{name}.json](../bench/results/{name}.json); what is timed: "
            f"[bench/grids.py](../bench/grids.py). {sizes['layers']} blocks of width "
            f"{sizes['width']}, 2048 tokens a GPU, x by y by z by data. What each optimisation "
            "saves is in % of the step before it; the sums over data are in all of them. Predicted "
            "is the communication by the paper's equations, none of it hidden "
            "([plan.md](plan.md)).\n\n"
            f"{plain_table(grids.COLUMNS, map(grids.cells, result['grids']))}\n"
        )
    for name, result in of_kind(results, "decode"):
        parts.append(
            f"## Decoding with layers of Llama-2-70B, bf16: {title(result)}\n\n"
            f"[{name}.json](../bench/results/{name}.json); what is timed: "
            "[bench/decode.py](../bench/decode.py). A step is one token of each sequence, with so "
            "many positions in the cache. XLA launches its own collectives one by one; under "
            "`graphs` it was told to capture them into its CUDA graphs, as it does by default with "
            "jflux's kernels.\n\n"
            f"{plain_table(decode.COLUMNS, map(decode.cells, result['decode']))}\n"
        )
    for name, result in of_kind(results, "collectives"):
        parts.append(
            f"## Small collectives, bf16, microseconds a call: {title(result)}\n\n"
            f"[{name}.json](../bench/results/{name}.json); what is timed: "
            "[bench/collectives.py](../bench/collectives.py). S is XLA's own, C the same with XLA "
            "told to put its collectives into CUDA graphs, J what jflux chooses. J and the "
            "algorithm that it chooses are one program: what they differ by is noise. Empty fields "
            "were not timed: packets of more than 16 MiB, and algorithms newer than the run.\n\n"
            f"{collective_tables(result['collectives'])}\n"
        )
    for name, result in of_kind(results, "accuracy"):
        parts.append(
            f"## How exact an all-reduce is: {title(result)}\n\n"
            f"[{name}.json](../bench/results/{name}.json): the mean absolute difference from sums "
            "in float64, of standard normal numbers; `rounded` is that of the exact sums, rounded "
            "([bench/accuracy.py](../bench/accuracy.py)).\n\n"
            f"{plain_table(accuracy.COLUMNS, map(accuracy.cells, result['accuracy']))}\n"
        )
    for name, result in of_kind(results, "products"):
        parts.append(
            f"## The product alone: {title(result)}\n\n"
            f"[{name}.json](../bench/results/{name}.json), {result['machine']['date']}; what is "
            "timed: [bench/products.py](../bench/products.py). One of four ranks' part of each "
            "shape, normal numbers; G is XLA's time: cuBLAS, or a fusion where that is faster.\n\n"
            f"{product_tables(result['products'])}\n"
        )
    for name, result in of_ops(results):
        m = result["machine"]
        parts.append(
            f"## {title(result)}\n\n{m['date']}, driver {m['driver']}, jax {m['jax']}, "
            f"jflux {m['jflux']} ([{name}.json](../bench/results/{name}.json)).\n\n"
            f"{tables(result)}\n"
        )
    return "\n".join(parts) + NOTES


def readme_table(results: list[tuple[str, dict]]) -> str:
    result = dict(results)[README_HAS]
    lines = [
        f"{title(result)}, bf16, against XLA's own sequence ([all tables](docs/performance.md)):\n",
        "| op | m | n | k | XLA ms | jflux ms | speed-up |",
        "|---|---|---|---|---|---|---|",
    ]
    found = by_list(result)
    for row in itertools.chain(*(found.get(name, ()) for name in ("flux", "attention", "ulysses"))):
        s, j = ms(row, "S"), ms(row, "J")
        lines.append(
            f"| {row['op']} | {row['m']} | {row['n']} | {row['k']} | {s:.2f} | {j:.2f} "
            f"| {s / j:.2f} |"
        )
    return "\n".join(lines)


def picture(results: list[tuple[str, dict]], op: str) -> bytes:
    """E, and J over the floor, by rows, at the shapes of `PICTURES` (3 ranks: at ragged ones)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    efficiency, floor = figure.subplots(1, 2)
    for _, result in of_ops(results):
        if "note" in result["machine"]:  # of kernels that are not the present ones
            continue
        found = by_list(result)
        listed, n = PICTURES[op]
        rows = found.get(listed, found.get("ragged", ()))
        rows = [r for r in rows if r["op"] == op and r["n"] == n]
        if not rows:
            continue
        m = [r["m"] for r in rows]
        g, c, s, j = (np.array([ms(r, name) for r in rows]) for name in "GCSJ")
        machine = result["machine"]
        style = "-" if machine["processes"] == 1 else "--"
        color, label = f"C{machine['gpus'].split()[0]}", f"{title(result)}, {machine['date']}"
        line = {"linestyle": style, "color": color, "label": label}
        efficiency.plot(m, 1 - (j - g) / (s - g), **line)
        floor.plot(m, j / np.maximum(g, c), **line)
    for axis, what in ((efficiency, "overlap efficiency E"), (floor, "time over the floor, J / F")):
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set(title=f"{op}: {what}", xlabel="m (rows)", xscale="log")
        axis.title.set_fontsize(10)
        axis.grid(alpha=0.3)
    floor.legend(fontsize=7)
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=110, metadata={"Software": None})
    return out.getvalue()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    results = load()
    readme = ROOT / "README.md"
    text = readme.read_text()
    head, rest = text.split(BEGIN, 1)
    tail = rest.split(END, 1)[1]
    wanted = {
        readme: f"{head}{BEGIN}\n{readme_table(results)}\n{END}{tail}",
        ROOT / "docs" / "performance.md": document(results),
    }
    if args.check:
        stale = [str(p.relative_to(ROOT)) for p, want in wanted.items() if p.read_text() != want]
        print(f"not what bench/results says: {stale}" if stale else "up to date")
        return bool(stale)
    for path, want in wanted.items():
        path.write_text(want)
    for op in PICTURES:
        (ROOT / "docs" / "img" / f"{op}.png").write_bytes(picture(results, op))
    return 0


if __name__ == "__main__":
    sys.exit(main())
