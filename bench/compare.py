"""Compares two result files: python -m bench.compare BEFORE.json AFTER.json

For each shape that both hold: J over S in each, and how J / S has changed. (Times of different runs
differ by the clock that the power limit leaves; ratios within a run do not.)
"""

from __future__ import annotations

import argparse
import json
import pathlib


def ratios(path: pathlib.Path) -> dict[tuple, float]:
    """{(op, m, n, k): J / S}"""
    rows = json.loads(path.read_text())["rows"]
    return {(r["op"], r["m"], r["n"], r["k"]): r["J"]["median"] / r["S"]["median"] for r in rows}


def compare(before: dict[tuple, float], after: dict[tuple, float]) -> list[str]:
    lines = [f"{'op':22} {'m':>5} {'n':>6} {'k':>6} {'J/S before':>10} {'after':>6} {'change':>7}"]
    for shape in before.keys() & after.keys():
        op, m, n, k = shape
        b, a = before[shape], after[shape]
        lines.append(f"{op:22} {m:5} {n:6} {k:6} {b:10.3f} {a:6.3f} {a / b - 1:+7.1%}")
    return [lines[0], *sorted(lines[1:])]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", type=pathlib.Path)
    parser.add_argument("after", type=pathlib.Path)
    args = parser.parse_args()
    print("\n".join(compare(ratios(args.before), ratios(args.after))))


if __name__ == "__main__":
    main()
