"""Three ranks, a process each, of which one comes late: who has given up passes nothing on, and who
waits says so. Where there are fewer GPUs than ranks, ranks share them."""

import glob
import re
import subprocess
import sys

import pytest
from harness import PLATFORM
from workers.common import HERE, environment, free_port

pytestmark = pytest.mark.multiprocess
RANKS = 3


def _run(op, deadlines, late, warn=120.0):
    """Output of each rank; the last one is `late` seconds late."""
    gpus = len(glob.glob("/dev/nvidia[0-9]*")) if PLATFORM == "gpu" else 0
    env = environment(PLATFORM, 1)
    env["NCCL_NVLS_ENABLE"] = "0"
    command = [sys.executable, "-m", "workers.staggered_worker", "--op", op, "--late", f"{late}"]
    command += ["--warn", f"{warn}", "--ranks", f"{RANKS}", "--gpus", f"{gpus}"]
    command += ["--port", f"{free_port()}"]
    running = [
        subprocess.Popen(
            [*command, "--rank", f"{rank}", "--deadline", f"{deadlines[rank]}"],
            env=env, cwd=HERE.parent, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for rank in range(RANKS)
    ]  # fmt: skip
    try:
        # The last one first: see leave_last.
        outputs = [process.communicate(timeout=150)[0] for process in reversed(running)][::-1]
    finally:
        for process in running:
            process.kill()
    for process, output in zip(running, outputs, strict=True):
        assert process.returncode == 0, output
    return outputs


@pytest.mark.parametrize("op", ["matmul_all_reduce", "two_shot", "half_butterfly", "chunked"])
def test_a_rank_that_has_given_up_passes_nothing_on(op):
    """Rank 0's deadline passes before rank 2 comes, rank 1's after."""
    outputs = _run(op, deadlines=(2, 8, 8), late=4)
    assert re.search(r"^error: ", outputs[0], re.M), outputs[0]
    assert re.search(r"rank 0 waited 2 s for rank [12]\b", outputs[0]), outputs[0]
    for output in outputs:
        assert "WRONG" not in output, output
        assert re.search(r"^(right$|error: )", output, re.M), output


def test_a_late_rank_is_named_and_waited_for():
    outputs = _run("matmul_all_reduce", deadlines=(60, 60, 60), late=3, warn=1)
    for output in outputs:
        assert re.search(r"^right$", output, re.M), output
    for rank in (0, 1):
        warnings = re.findall(
            rf"^jflux: warning: jflux\.matmul_all_reduce: rank {rank} has waited 1 s, since "
            r"\d\d:\d\d:\d\d, for rank 2 \(.*After 60 s the call fails .*deadline_seconds.*$",
            outputs[rank],
            re.M,
        )
        assert len(warnings) == 1, outputs[rank]
    assert "warning: jflux" not in outputs[2], outputs[2]


def test_no_warning_that_would_come_after_the_deadline():
    outputs = _run("two_shot", deadlines=(60, 60, 60), late=2, warn=60)
    for output in outputs:
        assert "warning: jflux" not in output and re.search(r"^right$", output, re.M), output
