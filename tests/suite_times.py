"""What the tests took, as a plugin of pytest: conftest.py registers it.

Counts processor time, the test's own and that of the processes it started and waited for. Unlike
time from start to end, it does not grow when something else runs on the machine. The summary lists
the slowest tests, and has a line that begins with NOTICE for each budget that the short tier
exceeds. With --within-budget a run with such a line fails.

Compiled programs are dropped when a worker has grown by DROP_MIB: JAX itself never drops any.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import pathlib
import re
import resource
from collections.abc import Generator, Iterable

import jax
import pytest

BUDGET_MINUTES, CORES = 15, 2  # of the short tier
TEST_SECONDS = 30  # of one test of the short tier
WORKER_MIB = 4000
DROP_MIB = 500
SLOWEST = 10

_TIME, _PEAK = "processor_seconds", "peak_mib"


def _processor_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


def _resident_mib(which: str = "VmRSS") -> float:
    """What this process has in memory, or with VmHWM the most that it has had."""
    found = re.search(rf"{which}:\s+(\d+) kB", pathlib.Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def _forget_peak() -> None:
    """Has VmHWM begin anew from what the process has now."""
    with contextlib.suppress(OSError):
        pathlib.Path("/proc/self/clear_refs").write_text("5")


def _drop_programs() -> None:
    jax.clear_caches()
    gc.collect()
    with contextlib.suppress(AttributeError, OSError):  # another C library than GNU's
        ctypes.CDLL(None).malloc_trim(0)


def notices(seconds: dict[str, float], peaks_mib: dict[str, float]) -> list[str]:
    """A line for each budget that tests of these processor times, in workers of so much memory,
    exceed."""
    lines = []
    total = sum(seconds.values())
    if total > BUDGET_MINUTES * 60 * CORES:
        minutes = f"{total / CORES / 60:.1f} minutes on {CORES} cores"
        lines.append(f"NOTICE: the tests take {minutes}; the budget is {BUDGET_MINUTES}")
    for name, taken in seconds.items():
        if taken > TEST_SECONDS:
            lines.append(f"NOTICE: {name} takes {taken:.0f} s; the budget of one is {TEST_SECONDS}")
    for name, peak in peaks_mib.items():
        if peak > WORKER_MIB:
            had = f"a worker had {peak:.0f} MiB in {name}"
            lines.append(f"NOTICE: {had}; the budget is {WORKER_MIB}")
    return lines


def table(
    seconds: dict[str, float], peaks_mib: dict[str, float], slowest: int = SLOWEST
) -> Iterable[str]:
    """The slowest tests, all of them, and the one in which a worker had most memory."""
    ordered = sorted(seconds.items(), key=lambda item: -item[1])
    for name, taken in ordered[:slowest]:
        yield f"{taken:8.1f} s  {name}"
    total = sum(seconds.values())
    largest = max(peaks_mib, key=lambda name: peaks_mib[name])
    yield f"{total:8.1f} s  all {len(seconds)} tests"
    yield f"{peaks_mib[largest]:6.0f} MiB  the largest worker, in {largest}"


class SuiteTimes:
    """The hooks of one run, to which the budgets apply or not."""

    def __init__(self, budgets: bool, within_budget: bool) -> None:
        self.budgets, self.within_budget = budgets, within_budget
        self.seconds: dict[str, float] = {}
        self.peaks_mib: dict[str, float] = {}
        self._start = 0.0
        self._kept_mib = 0.0  # after programs were dropped last

    # In the process that runs the tests.

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Generator[None, object, object]:
        """Notes when a test starts, and makes room after it."""
        self._start = _processor_seconds()
        _forget_peak()
        result = yield
        if _resident_mib() > self._kept_mib + DROP_MIB:
            _drop_programs()
            self._kept_mib = _resident_mib()
        return result

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo) -> None:
        """Puts the figures where xdist carries them to the process that prints."""
        if call.when == "teardown":
            item.user_properties.append((_TIME, _processor_seconds() - self._start))
            item.user_properties.append((_PEAK, _resident_mib("VmHWM")))

    # In the process that prints.

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Takes the figures of a test that has ended."""
        if report.when == "teardown":
            found = dict(report.user_properties)
            self.seconds[report.nodeid] = found.get(_TIME, 0.0)
            self.peaks_mib[report.nodeid] = found.get(_PEAK, 0.0)

    def _notices(self) -> list[str]:
        return notices(self.seconds, self.peaks_mib) if self.budgets else []

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Fails what exceeds a budget, if asked to."""
        if self.within_budget and exitstatus == pytest.ExitCode.OK and self._notices():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Prints the figures."""
        if not self.seconds:
            return
        terminalreporter.section("processor time")
        for line in [*table(self.seconds, self.peaks_mib), *self._notices()]:
            terminalreporter.write_line(line)
