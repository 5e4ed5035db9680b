"""Compares two result files of one benchmark: python -m bench.compare BEFORE.json AFTER.json

For each row that both hold, each contestant's time over that of the row's base, which ran in turn
with it, and how that has changed. (Times of different runs differ by the clock that the power limit
leaves; ratios within a run do not.) A change is noise if the ratios' quartiles overlap.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

# What ran beside the others, by how rows name it: XLA's sequence, or its product. Where there is
# none the figures themselves are compared.
BASES = ("S", "XLA", "times none", "G", "psum", "S8", "G8")

Figure = tuple[float, float, float]  # a quartile, the median, the other quartile
Row = dict[str, Figure]  # by contestant


def _kind(result: dict[str, Any], path: pathlib.Path) -> str:
    """The name of its rows."""
    lists = [name for name, value in result.items() if isinstance(value, list)]
    if len(lists) != 1:
        raise SystemExit(f"{path} is no result of a benchmark: it has {len(lists)} lists of rows")
    return lists[0]


def _timings(row: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Figure]]:
    for name, value in row.items():
        if isinstance(value, dict) and "median" in value:
            yield prefix + name, (value["low"], value["median"], value["high"])
        elif isinstance(value, dict):
            yield from _timings(value, f"{prefix}{name} ")


def _figures(row: dict[str, Any]) -> Row:
    """Its times; of a row that has none, its numbers."""
    numbers = {name: (v, v, v) for name, v in row.items() if isinstance(v, float)}
    return dict(_timings(row)) or numbers


def rows_of(result: dict[str, Any], kind: str) -> dict[str, Row]:
    """By what identifies a row: the name of its case, and its fields that are no figures."""

    def name_of(row: dict[str, Any]) -> str:
        fields = (value for field, value in row.items() if field != "date")
        names = (row.get("case", {}).get("name"), *fields)
        return " ".join(str(v) for v in names if not isinstance(v, dict | float | None))

    return {name_of(row): _figures(row) for row in result[kind]}


def _over(figure: Figure, base: Figure) -> Figure:
    return figure[0] / base[2], figure[1] / base[1], figure[2] / base[0]


def compare(before: dict[str, Row], after: dict[str, Row]) -> list[str]:
    """The table's lines; the first one is its heading."""
    shared = [name for name in before if name in after]
    width = max(map(len, shared), default=0)
    lines = [f"{'row':{width}} {'what':24} {'before':>9} {'after':>9} {'change':>8}"]
    for name in shared:
        rows = before[name], after[name]
        base = next((b for b in BASES if all(b in row for row in rows)), None)
        for what in rows[0]:
            if what == base or what not in rows[1]:
                continue
            b, a = (_over(row[what], row[base]) if base else row[what] for row in rows)
            change = a[1] / b[1] - 1 if b[1] else 0.0
            noise = " noise" if change and b[0] <= a[2] and a[0] <= b[2] else ""
            said = f"{what} / {base}" if base else what
            lines.append(f"{name:{width}} {said:24} {b[1]:9.4g} {a[1]:9.4g} {change:+8.1%}{noise}")
    return lines


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", type=pathlib.Path)
    parser.add_argument("after", type=pathlib.Path)
    args = parser.parse_args(argv)
    paths = args.before, args.after
    results = [json.loads(path.read_text()) for path in paths]
    kinds = [_kind(result, path) for result, path in zip(results, paths, strict=True)]
    if kinds[0] != kinds[1]:
        raise SystemExit(f"{args.before} has {kinds[0]}, {args.after} has {kinds[1]}")
    for what in ("gpus", "processes", "driver", "jax"):
        values = [result["machine"].get(what) for result in results]
        if values[0] != values[1]:
            print(f"not alike: {what} was {values[0]}, is {values[1]}", file=sys.stderr)
    before, after = (rows_of(result, kinds[0]) for result in results)
    if not before.keys() & after.keys():
        raise SystemExit(f"{args.before} and {args.after} have no row in common")
    print("\n".join(compare(before, after)))
    for path, mine, others in ((args.before, before, after), (args.after, after, before)):
        if only := len(mine.keys() - others.keys()):
            print(f"only {path} has {only} more rows")


if __name__ == "__main__":
    main()
