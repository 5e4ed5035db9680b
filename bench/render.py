"""Makes docs/performance.md, its picture and README's table from bench/results/*.json.

python -m bench.render          writes them
python -m bench.render --check  fails if they are not what the results say
"""

from __future__ import annotations

import argparse
import io
import json
import pathlib
import sys

from .shapes import Shape

ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
BEGIN, END = "<!-- figures -->", "<!-- end of figures -->"

INTRODUCTION = """# Performance

Made by `python -m bench.render` from the files in [bench/results](../bench/results); do not edit.

For each shape all contestants are timed in turn, round after round, in one process (or one process
for each GPU); the median over the rounds of the slowest rank counts. A contestant is a jitted loop
whose calls depend on each other, so that host dispatch is paid once. bf16, normal random operands;
n and k are global. How: [bench/harness.py](../bench/harness.py).

| column | what |
|---|---|
| G | XLA's product alone, of one rank's whole input |
| C | XLA's communication alone (NCCL) |
| S | XLA's own sequence, in plain `lax`: what a JAX user would otherwise call |
| J | jflux |
| E | overlap efficiency, 1 - (J - G) / (S - G): 1 is communication wholly hidden, negative is worse than not overlapping (Flux, arXiv 2406.06858, equation 2) |
| J / F | over the floor max(G, C) |

![J / S by rows](img/performance.png)
"""  # noqa: E501

NOTES = """
## What the figures do not say

- Where `lax` is faster jflux takes it, unless `jflux.config(always=True)` is set. Which calls those
  are is decided by rows alone, from these figures (`_lax_is_faster` in `jflux/_ops`). The rule for
  512 rows on 4 GPUs, and the one for rows that are not whole tiles (3 GPUs), were set after these
  runs: where J / S is above 1.02 in a table, today's jflux takes `lax` and its time is S's.
- With 3 ranks the rows are the next multiple of 3, so that a rank's are never whole tiles.
- An efficiency above 1 means that jflux's product was faster than XLA's.
- The GPUs are limited by power; times of one column in different runs differ by up to 5 %. Ratios
  within a row were taken in turn.
"""


def load() -> list[tuple[str, dict]]:
    return [(p.stem, json.loads(p.read_text())) for p in sorted(RESULTS.glob("*.json"))]


def ms(row: dict, name: str) -> float:
    return row[name]["median"] * 1e3


def table(result: dict) -> str:
    ranks = int(result["machine"]["gpus"].split()[0])
    lines = [
        "| op | m | n | k | G ms | C ms | S ms | J ms | J / S | E | J / F | J TFLOP/s per GPU |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        g, c, s, j = (ms(row, name) for name in "GCSJ")
        efficiency = f"{1 - (j - g) / (s - g):.2f}" if s > g else ""
        rate = Shape(row["op"], row["m"], row["n"], row["k"]).flops(ranks) / j / 1e9
        lines.append(
            f"| {row['op']} | {row['m']} | {row['n']} | {row['k']} | {g:.3f} | {c:.3f} | {s:.3f} "
            f"| {j:.3f} | {j / s:.3f} | {efficiency} | {j / max(g, c):.2f} | {rate:.0f} |"
        )
    return "\n".join(lines)


def title(result: dict) -> str:
    machine = result["machine"]
    how = "one process" if machine["processes"] == 1 else "one process for each GPU"
    return f"{machine['gpus']}, {how}"


def document(results: list[tuple[str, dict]]) -> str:
    parts = [INTRODUCTION]
    for name, result in results:
        m = result["machine"]
        parts.append(
            f"## {title(result)}\n\n{m['date']}, driver {m['driver']}, jax {m['jax']}, "
            f"jflux {m['jflux']} ([{name}.json](../bench/results/{name}.json)).\n\n"
            f"{table(result)}\n"
        )
    return "\n".join(parts) + NOTES


def readme_table(results: list[tuple[str, dict]]) -> str:
    result = dict(results)["4xh200"]
    lines = [
        f"{title(result)}, bf16, against XLA's own sequence ([all tables](docs/performance.md)):\n",
        "| op | m | n | k | XLA ms | jflux ms | speed-up |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        if row["m"] < 1024:
            continue
        s, j = ms(row, "S"), ms(row, "J")
        lines.append(
            f"| {row['op']} | {row['m']} | {row['n']} | {row['k']} | {s:.2f} | {j:.2f} "
            f"| {s / j:.2f} |"
        )
    few = [ms(r, "J") / ms(r, "S") for r in result["rows"] if r["m"] < 1024]
    lines.append(
        f"\nWith fewer rows jflux takes {min(few):.2f} to {max(few):.2f} of XLA's time, and mostly "
        "runs XLA's sequence itself."
    )
    return "\n".join(lines)


def picture(results: list[tuple[str, dict]]) -> bytes:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for axis, op in zip(axes, ("all_gather_matmul", "matmul_reduce_scatter"), strict=True):
        for _, result in results:
            rows = [r for r in result["rows"] if r["op"] == op and 49152 in (r["n"], r["k"])]
            style = "-" if result["machine"]["processes"] == 1 else "--"
            color = f"C{result['machine']['gpus'].split()[0]}"
            ratio = [ms(r, "J") / ms(r, "S") for r in rows]
            axis.plot([r["m"] for r in rows], ratio, style, color=color, label=title(result))
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set(title=op, xlabel="m (rows)", xscale="log")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("time over XLA's (lower is better)")
    axes[1].legend(fontsize=7)
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
    (ROOT / "docs" / "img" / "performance.png").write_bytes(picture(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
