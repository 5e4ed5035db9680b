"""Bars and lines of commands that take long."""

import sys

from jflux._tools import progress
from jflux._tools.progress import Progress


def test_a_line_now_and_then_without_tqdm(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", None)  # an import of it fails
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    bar = Progress(8, "calls", "stress")
    bar.at(4, "4 calls right")
    bar.at(8)
    bar.close()
    assert capsys.readouterr().err == "stress: 4 of 8 calls, 4 calls right\nstress: 8 of 8 calls\n"
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 1000.0)
    bar.at(8)
    assert capsys.readouterr().err == ""


def test_the_last_step_fills_the_bar(capsys):
    bar = Progress(8, "calls", "stress")
    bar.at(4)
    bar.at(9.5, "10 calls right")  # a batch may pass the total
    bar.close()
    last = capsys.readouterr().err.split("\r")[-1]
    assert "stress 100%" in last and "8/8 calls" in last and "10 calls right" in last


def test_one_process_speaks(capsys):
    bar = Progress(8, "calls", show=False)
    bar.at(8)
    bar.close()
    assert capsys.readouterr().err == ""
