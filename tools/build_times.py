"""What a build's files took to compile: python tools/build_times.py BUILD_FOLDER [--slowest 12].

Counts what the library needs, not the tests. Says so in a line that begins with NOTICE where all of
it takes longer than the budget of CONTRIBUTING.md: 8 minutes on two cores.

Reads the processor time that tools/compiler_seconds.py has noted; in a build without it ninja's
log, whose times are longer the busier the machine was. A file from ccache's store counts as what it
took to fetch.
"""

import argparse
import pathlib
import re

BUDGET_MINUTES, CORES = 8, 2
NOTED = "compiler_seconds.tsv"  # by tools/compiler_seconds.py
_LIBRARY = re.compile(r"CMakeFiles/(jflux_\w+|_jflux|nanobind[\w-]*)\.dir/(.*)\.o$")


def read_log(log: str) -> dict[str, float]:
    """Seconds from start to end by source file, of the last time that each was compiled."""
    seconds = {}
    for line in log.splitlines():
        if line.startswith("#"):
            continue
        start, end, _, output, _ = line.split("\t")
        if found := _LIBRARY.match(output):
            seconds[found[2]] = (int(end) - int(start)) / 1000
    return seconds


def read_noted(noted: str) -> dict[str, float]:
    """Seconds of processor time by source file, of the last time that each was compiled."""
    seconds = {}
    for line in noted.splitlines():
        taken, output = line.split("\t")
        if found := _LIBRARY.match(output):
            seconds[found[2]] = float(taken)
    return seconds


def report(seconds: dict[str, float], slowest: int, elapsed: bool = False) -> list[str]:
    """The lines to print: the slowest files, the total, and a NOTICE if that is over the budget."""
    ordered = sorted(seconds.items(), key=lambda item: -item[1])
    total = sum(seconds.values())
    lines = [f"{taken:8.1f} s  {name}" for name, taken in ordered[:slowest]]
    lines.append(f"{total:8.1f} s  all {len(seconds)} files, one after the other")
    if total > BUDGET_MINUTES * 60 * CORES:
        minutes = f"{total / CORES / 60:.1f} minutes on {CORES} cores"
        lines.append(f"NOTICE: the library compiles in {minutes}; the budget is {BUDGET_MINUTES}")
        if elapsed:
            lines.append("These are times from start to end, of a machine that may have been busy")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--slowest", type=int, default=12)
    args = parser.parse_args()
    noted = args.folder / NOTED
    elapsed = not noted.exists()
    seconds = (
        read_log((args.folder / ".ninja_log").read_text())
        if elapsed
        else read_noted(noted.read_text())
    )
    print("\n".join(report(seconds, args.slowest, elapsed)))


if __name__ == "__main__":
    main()
