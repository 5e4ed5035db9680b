"""What the heap holds, for which calls: what `jflux.heap_report` returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from ._agreement import Workspace

#: So many calls of a workspace are listed, and so many are told apart.
MOST_CALLS, MOST_KNOWN = 8, 1000


@dataclasses.dataclass(frozen=True)
class Held:
    """One workspace.

    Attributes:
      bytes: on each device.
      devices: global ids.
      calls: those that use it, by op and types of the operands; only the first few.
      more: how many calls are not listed. At most 1000 calls of a workspace are told apart.
    """

    bytes: int
    devices: tuple[int, ...]
    calls: tuple[str, ...]
    more: int = 0

    def __str__(self) -> str:
        devices = ", ".join(map(str, self.devices))
        lines = [f"{self.bytes / (1 << 20):10.2f} MiB on devices {devices}"]
        lines += [f"{'':15}{call}" for call in self.calls]
        if self.more:
            lines.append(f"{'':15}and {self.more} more")
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class HeapReport:
    """What the symmetric heap holds.

    Attributes:
      platform: "cpu" or "cuda"; "" if there is no heap.
      limit: the most that workspaces may take of a device's memory, in bytes.
      taken: what they take, in bytes. On the CPU the most that was taken at once.
      workspaces: each of them, the largest first.
    """

    platform: str
    limit: int
    taken: int
    workspaces: tuple[Held, ...]

    def __str__(self) -> str:
        if not self.platform:
            return "no symmetric heap exists"
        mib = 1 << 20
        first = (
            f"symmetric heap ({self.platform}): {self.taken / mib:.2f} of at most "
            f"{self.limit / mib:.2f} MiB per device"
        )
        return "\n".join([first, *map(str, self.workspaces)])


class Calls:
    """Which calls were lowered with which workspaces."""

    def __init__(self) -> None:
        self._calls: dict[tuple[str, Workspace], dict[str, None]] = {}

    def note(self, platform: str, workspaces: Iterable[Workspace], call: str) -> None:
        for workspace in workspaces:
            calls = self._calls.setdefault((platform, workspace), {})
            if len(calls) < MOST_KNOWN:
                calls[call] = None

    def clear(self) -> None:
        self._calls.clear()

    def rows(self, platform: str, held: Iterable[Workspace] | None = None) -> tuple[Held, ...]:
        """The largest first.

        Args:
          held: those that exist; None: all that calls were lowered with.
        """
        known = {w: tuple(calls) for (p, w), calls in self._calls.items() if p == platform}
        those = known.keys() if held is None else held
        rows = []
        for workspace in sorted(those, key=lambda w: (-w.size, w.devices)):
            calls = known.get(workspace, ())
            more = max(0, len(calls) - MOST_CALLS)
            rows.append(Held(workspace.size, workspace.devices, calls[:MOST_CALLS], more))
        return tuple(rows)
