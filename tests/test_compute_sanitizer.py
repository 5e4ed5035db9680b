"""The script around compute-sanitizer, with a program that stands in for it."""

import subprocess
import sys

import compute_sanitizer
import pytest

FAKE = """#!/bin/sh
# Runs the program, and writes a log as the real one does: with a finding under one tool.
if [ "$1" = --help ]; then echo "  --kernel-name arg  Kernels to check."; exit; fi
tool=$2 log=$(echo "${10}" | sed "s/%p/$$/")
[ "$3 $4" = "--target-processes all" ] || exit 3
shift 10
[ "$1 $2" = "--kernel-name kernel_substring=jflux" ] || exit 3
shift 2
[ $tool != memcheck ] || [ "$1 $2" = "--report-api-errors no" ] || exit 3
[ $tool != memcheck ] || shift 2
"$@" || exit
echo "========= COMPUTE-SANITIZER" > "$log"
case $tool in
  memcheck) echo "========= Invalid __global__ read of size 4 bytes" >> "$log"
            echo "========= ERROR SUMMARY: 1 error" >> "$log"; exit 99;;
  racecheck) echo "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors)" >> "$log";;
  *) echo "========= ERROR SUMMARY: 0 errors" >> "$log";;
esac
"""


@pytest.mark.slow
def test_ranks_run_under_the_tool_and_the_table_says_what_it_found(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    fake = tmp_path / "compute-sanitizer"
    fake.write_text(FAKE)
    fake.chmod(0o755)
    options = ["--sanitizer", str(fake), "--logs", str(tmp_path / "logs"), "--calls", "1"]
    options += ["--deadline", "30", "--ops", "all_gather"]
    assert compute_sanitizer.main([*options, "--tools", "synccheck", "racecheck"]) == 0
    lines = capsys.readouterr().out.splitlines()[-2:]
    assert [line.split()[:3] for line in lines] == [
        ["ok", "all_gather", "synccheck"], ["ok", "all_gather", "racecheck"]
    ]  # fmt: skip
    assert compute_sanitizer.main([*options, "--tools", "memcheck"]) == 1
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith("BAD  all_gather") and "errors: Invalid __global__ read" in line


@pytest.mark.slow
def test_what_it_runs_of_the_tests_is_there():
    """A name that has changed, or a tier without it, would leave nothing to run."""
    scripts = (compute_sanitizer.LOCAL | compute_sanitizer.TWO_GPUS).values()
    for script in (script for script in scripts if "pytest" in script):
        command = [sys.executable, *script, "--collect-only", "--no-header"]
        found = subprocess.run(
            command, cwd=compute_sanitizer.HERE, text=True, capture_output=True, timeout=120
        )
        assert found.returncode == 0 and "::test_" in found.stdout, found.stdout


@pytest.mark.parametrize(
    "log, status, verdict",
    [
        ("========= ERROR SUMMARY: 0 errors", 0, "ok"),
        ("========= Bad\n========= ERROR SUMMARY: 7 errors", 99, "7 errors: Bad"),
        ("= RACECHECK SUMMARY: 3 hazards displayed (0 errors, 3 warnings)", 0, "3 warnings"),
        ("========= RACECHECK SUMMARY: 3 hazards displayed (2 errors, 1 warning)", 99, "2 errors"),
        ("========= Error: Device not supported.", 1, "unsupported: Error: Device not supported."),
        ("========= COMPUTE-SANITIZER", 1, "ended with 1: the last line"),
    ],
)
def test_logs(log, status, verdict):
    assert compute_sanitizer.read([log], status, "out\nthe last line\n\n").startswith(verdict)


def test_no_log_is_no_success():
    assert compute_sanitizer.read([], 0, "").startswith("no log")
