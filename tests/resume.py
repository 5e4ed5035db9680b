"""Resumes a run of tests, as a plugin of pytest: python -m pytest -p resume --done FILE

Leaves out the tests that FILE names, one a line, and adds those that end well. What fails is told
at once: a run that is killed has no summary. Of pytest-xdist's processes the one that prints reads
and writes FILE.
"""

from __future__ import annotations

import pathlib
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--done", type=pathlib.Path, metavar="FILE", help="of tests to leave out")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Resumed(config))


class Resumed:
    """The hooks of one run."""

    def __init__(self, config: pytest.Config) -> None:
        self.plugins = config.pluginmanager
        self.path = config.getoption("done")
        self.worker = getattr(config, "workerinput", None)
        known = self.path.read_text().splitlines() if self.path and self.path.exists() else []
        self.known: list[str] = known if self.worker is None else self.worker["done"]
        self.failed: set[str] = set()

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Workers collect the same tests, also one that takes the place of another."""
        node.workerinput["done"] = self.known

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        known = set(self.known)
        items[:] = [item for item in items if item.nodeid not in known]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self.worker is not None:
            return
        if report.failed:
            self.failed.add(report.nodeid)
            said = f"\nFAILED {report.nodeid}\n{report.longreprtext[-1500:]}"
            self.plugins.get_plugin("terminalreporter").write_line(said)
        elif self.path and report.when == "teardown" and report.nodeid not in self.failed:
            with self.path.open("a") as file:
                file.write(f"{report.nodeid}\n")

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """A run with nothing left is right."""
        if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and self.known:
            session.exitstatus = pytest.ExitCode.OK
