"""What `python -m jflux.selftest` prints, and when a run counts: pure functions of its parts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from .._call import gpu_code, selftest_record

#: The heading of the benchmark's rows.
BENCH = ("call", "lax us", "jflux us", "lax / jflux")


@dataclasses.dataclass(frozen=True)
class Done:
    """What became of a part.

    Attributes:
      name: of the part.
      right: whether it did what it must; None: it was left out.
      seconds: that it took.
      said: in one line, what it found, or what went wrong.
    """

    name: str
    right: bool | None
    seconds: float = 0.0
    said: str = ""

    def __str__(self) -> str:
        verdict = {True: "right", False: "WRONG", None: "left out"}[self.right]
        return f"{self.name:18} {verdict:8} {self.seconds:5.0f} s  {self.said}".rstrip()


@dataclasses.dataclass(frozen=True)
class Machine:
    """What the first part finds out, in a process of its own.

    Attributes:
      versions: lines on jflux, JAX, GPUs, the driver and CUDA.
      platform: "cpu" or "cuda".
      kinds: the models of GPU.
      devices: how many there are.
      arch: of the kernels' code that they run; 0 on CPUs.
      driver: its version; "" if it is not known.
      jflux: the version.
    """

    versions: tuple[str, ...]
    platform: str
    kinds: tuple[str, ...]
    devices: int
    arch: int
    driver: str
    jflux: str

    @classmethod
    def of(cls, fields: dict[str, Any]) -> Machine:
        """From JSON."""
        lists = {name: tuple(fields[name]) for name in ("versions", "kinds")}
        return cls(**{**fields, **lists})

    @property
    def is_portable(self) -> bool:
        """Whether the GPUs run portable code."""
        return self.platform == "cuda" and self.arch < gpu_code.HOPPER

    @property
    def key(self) -> selftest_record.Key:
        """Of the record."""
        return selftest_record.Key(self.kinds[0], self.driver, self.jflux, self.arch)


def why_no_record(machine: Machine | None, parts: Sequence[Done]) -> str | None:
    """Why a run writes no record, or None."""
    if machine is None:
        return "the machine was not looked at"
    if not machine.is_portable:
        return "nothing here waits for a check of portable code"
    if len(machine.kinds) != 1:
        return f"there are GPUs of several models ({', '.join(machine.kinds)})"
    if not machine.driver:
        return "the driver's version is not known"
    if wrong := [part.name for part in parts if part.right is False]:
        return f"wrong: {', '.join(wrong)}"
    if left_out := [part.name for part in parts if part.right is None]:
        return f"left out: {', '.join(left_out)}"
    return None


def removes_record(machine: Machine | None, parts: Sequence[Done]) -> bool:
    """Whether a run takes back what an earlier one has found: a part was wrong on GPUs that need a
    record."""
    is_wrong = any(part.right is False for part in parts)
    return machine is not None and machine.is_portable and is_wrong


def text(
    machine: Machine | None,
    parts: Sequence[Done],
    lines: Sequence[str],
    rows: Sequence[tuple[str, float, float]],
    ending: str,
) -> list[str]:
    """The report's lines, which can be pasted as they are.

    Args:
      lines: on the heap and the links.
      rows: of the benchmark: the call, and microseconds of `lax` and of jflux.
      ending: what became of the record.
    """
    found = ["python -m jflux.selftest"]
    if machine is not None:
        found += machine.versions
    found += [*lines, "", *map(str, parts)]
    if rows:
        width = max(len(BENCH[0]), *(len(call) for call, *_ in rows))
        found += ["", f"{BENCH[0]:{width}} {BENCH[1]:>9} {BENCH[2]:>9} {BENCH[3]:>12}"]
        found += [
            f"{call:{width}} {lax:9.1f} {own:9.1f} {lax / own:12.2f}" for call, lax, own in rows
        ]
    wrong = sum(part.right is False for part in parts)
    verdict = f"WRONG: {wrong} of {len(parts)} parts" if wrong else "all that ran is right"
    return [*found, "", f"{verdict}; {ending}"]
