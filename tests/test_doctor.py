"""python -m jflux.doctor, as a user runs it."""

import re
import subprocess
import sys

from harness import OPS, PLATFORM, RANKS
from workers.common import environment


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
    backend = "peer" if PLATFORM == "gpu" else "cpu"
    assert re.search(rf"^heap: back end {backend}, \d+ MiB per device, deadline", output, re.M)
    assert float(re.search(r"the calls above took ([0-9.]+) MiB", output)[1]) > 0
    for op in OPS:
        for dtype in ("bfloat16", "float16"):
            fused = r"fused( (for \d+ to \d+ and )?from \d+ rows on)?"
            assert re.search(rf"^  {op} +{dtype} +{fused}: ok$", output, re.M), output
    for op in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        for dtype in ("bfloat16", "float16", "float32"):
            kernels = rf"^  {op} +{dtype} +kernels up to (4|8|16|64) MiB: ok$"
            assert re.search(kernels, output, re.M), output
    if PLATFORM == "gpu":
        assert re.search(r"links of device 0, .* to device \d+: \d+/\d+", output)
        assert re.search(r"float32 +reference \(float32 operands on cuda", output)


def test_one_device():
    if PLATFORM == "cpu":
        assert "reference (one device: a plain product): ok" in _doctor(1)
