"""Which rows of bench/results are older than their kernels, or than the choice between them: what
marks tables, and the table of docs/performance.md that says what changed.

A change that changes times adds an entry here, unless the rows are measured again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from .sections import Results, plain_table

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Change:
    """What is different since.

    Attributes:
      since: rows of an earlier day are of earlier kernels.
      kinds: of results.
      text: what they differ by.
      where: which rows of those kinds.
      least_ranks: of which it is true.
      results: files that were measured before, on that day too.
    """

    since: str
    kinds: tuple[str, ...]
    text: str
    where: Callable[[Row], bool] = lambda row: True
    least_ranks: int = 1
    results: tuple[str, ...] = ()

    def is_after(self, name: str, kind: str, row: Row, machine: dict[str, Any]) -> bool:
        """Whether a row was measured before it."""
        if kind not in self.kinds or int(machine["gpus"].split()[0]) < self.least_ranks:
            return False
        return self.where(row) and (
            row.get("date", machine.get("date", "")) < self.since or name in self.results
        )


CHANGES = (
    Change(
        "2026-11-22", ("rows",),
        "no k-panels, no single raster group of few rows, and matmul_all_reduce was two calls",
        results=("2xh200_peers", "4xh200_peers"),
    ),
    Change(
        "2026-11-24", ("rows", "grids"),
        "no tiles of 224 or 256 columns; the kernels began and ended later. On 2 GPUs that took 1 "
        "to 8 % of most calls' time, and up to 10 % more where tiles of 224 fit "
        "([0016](experiments/0016-kernel-start-and-end.md))",
    ),
    Change(
        "2026-11-25", ("rows", "grids"),
        "all CTAs sent at once: J - G on 2 GPUs is half or less since "
        "([0026](experiments/0026-limited-senders.md)). Contestants came in random orders, some of "
        "them more often after one that takes little power: 2 % "
        "([0028](experiments/0028-contestant-order.md))",
    ),
    Change(
        "2026-11-25", ("collectives",),
        "all_to_all of 4 MiB took 1.17 of XLA's time, in LL packets, and the norm was in the "
        "kernel after sums of 256 KiB and more. Sums above 1 MiB travel in chunks since, up to 16 "
        "MiB, and exchanges up to 32 MiB ([0030](experiments/0030-chunked-exchanges.md))",
        where=lambda row: row["op"] != "ragged_all_to_all",
    ),
    Change(
        "2026-11-26", ("experts",),
        "on 2 x H100 a dispatch of 4096 tokens took 978 us, 511 since; a combine 427, 329 since "
        "([0038](experiments/0038-dispatch.md))",
        where=lambda row: "einsum" not in row, results=("2xh200_experts",),
    ),
    Change(
        "2026-11-26", ("collectives",),
        "a rank's own rows were copied with the others, and chunks began at other sizes "
        "([0049](experiments/0049-ragged-chunks.md))",
        where=lambda row: row["op"] == "ragged_all_to_all", results=("2xh200_ragged",),
    ),
    Change(
        "2026-11-26", ("rows",),
        "matmul_all_reduce of 1024 rows or more had other raster groups "
        "([0051](experiments/0051-groups-of-all-reduce.md))",
        where=lambda row: row["op"] == "matmul_all_reduce" and row["m"] >= 1024,
    ),
    Change(
        "2026-11-27", ("rows",),
        "on more than two GPUs shared tiles were in more than one raster group "
        "([0027](experiments/0027-raster-groups.md))",
        least_ranks=3,
    ),
    Change(
        "2026-11-27", ("rows",),
        "n or k that are no multiples of 64 had other tiles, or other padding "
        "([0053](experiments/0053-operand-rows.md))",
        where=lambda row: bool(row["n"] % 64 or row["k"] % 64),
    ),
)  # fmt: skip


def changes_after(name: str, kind: str, row: Row, machine: dict[str, Any]) -> list[Change]:
    """Those of which a row shows nothing."""
    return [change for change in CHANGES if change.is_after(name, kind, row, machine)]


def mark(name: str, kind: str, result: dict[str, Any]) -> str:
    """A sentence for the head of a table with such rows; "" if there are none."""
    every = [changes_after(name, kind, row, result["machine"]) for row in result[kind]]
    old = [found for found in every if found]
    if not old:
        return ""
    days = sorted({change.since for found in old for change in found})
    which = "All" if len(old) == len(every) else f"{len(old)} of {len(every)}"
    return (
        f"{which} rows are of [earlier kernels](performance.md#tables-of-earlier-kernels), older "
        f"than the change{'s' if len(days) > 1 else ''} of {', '.join(days)}."
    )


def table(results: Results) -> str:
    """What changed, and which results show nothing of it."""
    lines = []
    for change in CHANGES:
        names = []
        for name, result in results:
            for kind in set(change.kinds) & result.keys():
                machine, every = result["machine"], result[kind]
                count = sum(change.is_after(name, kind, row, machine) for row in every)
                if count:
                    names.append(f"{name}{'' if count == len(every) else f' ({count} rows)'}")
        if names:
            lines.append([", ".join(names), change.since, change.text])
    return plain_table(["results", "before", "differ in"], lines)
