"""python -m jflux.doctor, as a user runs it."""

import re
import subprocess
import sys

import numpy as np
from harness import PLATFORM, RANKS
from workers.common import environment

from jflux._ops._spec import all_ops


def _doctor(devices: int) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "jflux.doctor"],
        env=environment(PLATFORM, devices), timeout=120, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_what_it_says():
    output = _doctor(min(RANKS, 4))
    assert re.search(r"^jflux \S+, built with", output, re.M)
    assert re.search(r"^jax \S+, jaxlib \S+, Python \S+", output, re.M)
    backend = "cuda" if PLATFORM == "gpu" else "cpu"
    assert re.search(rf"^heap: back end {backend}, \d+ MiB per device, deadline", output, re.M)
    assert float(re.search(r"the calls above took ([0-9.]+) MiB", output)[1]) > 0
    for op, spec in all_ops().items():
        unit = "rows" if spec.product else "KiB"
        sizes = rf"( for \d+ to \d+ {unit}( and for \d+ to \d+ {unit})*)?"
        for dtype in ("bfloat16", "float16"):
            assert re.search(rf"^  {op} +{dtype} +fused{sizes}: ok$", output, re.M), output
        if spec.takes("cuda" if PLATFORM == "gpu" else "cpu", np.float32):
            assert re.search(rf"^  {op} +float32 +fused{sizes}: ok$", output, re.M), output
    if PLATFORM == "gpu":
        assert re.search(r"links of device 0, .* to device \d+: \d+/\d+", output)
        assert re.search(r"float32 +reference \(float32 operands on cuda", output)


def test_one_device():
    if PLATFORM == "cpu":
        assert "reference (one device has nobody to talk to): ok" in _doctor(1)
