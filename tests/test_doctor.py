"""python -m jflux.doctor, as a user runs it."""

import dataclasses
import functools
import getpass
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from harness import PLATFORM, RANKS, make_mesh
from workers.common import environment

import jflux
from jflux import _native, doctor
from jflux._call import gpu_code
from jflux._ops._spec import all_ops
from jflux._tools import bug_reports, trials


def _doctor(devices: int, *args: str, **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "jflux.doctor", *args],
        env=environment(PLATFORM, devices) | variables, timeout=120, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.skipif(RANKS < 2, reason="of one rank ops are JAX's")
def test_what_it_says():
    """Of eight devices of the CPU, where XLA_FLAGS do not say how many."""
    flags = [f for f in os.environ["XLA_FLAGS"].split() if "device_count" not in f]
    output = _doctor(RANKS, XLA_FLAGS=" ".join(flags))
    if PLATFORM == "cpu":
        assert "\ndevices: 8 x cpu (cpu)" in output and "\n  virtual devices of the CPU" in output
    assert re.search(r"^jflux \S+, built with", output, re.M)
    assert re.search(r"^jax \S+, jaxlib \S+, Python \S+", output, re.M)
    backend = "cuda" if PLATFORM == "gpu" else "cpu"
    assert re.search(rf"^heap: back end {backend}, \d+ MiB per device, deadline", output, re.M)
    assert float(re.search(r"the calls above took ([0-9.]+) MiB", output)[1]) > 0
    for op, spec in all_ops().items():
        if PLATFORM == "gpu" and not spec.checked_on_gpus:
            assert re.search(rf"^  {op} .*reference .*unchecked_kernels.*: ok$", output, re.M)
            continue
        unit = "rows" if spec.product else "KiB"
        sizes = rf"( for \d+ to \d+ {unit}( and for \d+ to \d+ {unit})*)?"
        for dtype in ("bfloat16", "float16"):
            assert re.search(rf"^  {op} +{dtype} +fused{sizes}: ok$", output, re.M), output
        if spec.takes("cuda" if PLATFORM == "gpu" else "cpu", np.float32):
            assert re.search(rf"^  {op} +float32 +fused{sizes}: ok$", output, re.M), output
    for operands in ("float8_e4m3fn by row", "float8_e5m2   by row", "int8          by row"):
        assert re.search(rf"^  {operands}    .*: ok$", output, re.M), output
    assert re.search(r"^  float8_e4m3fn by row    kernel of all_gather_matmul: ok", output, re.M)
    block = r"^  float8_e4m3fn by block  (no kernel \(.*\)|kernel of .*): ok$"
    of_blocks = re.search(block, output, re.M)
    assert of_blocks and (PLATFORM == "gpu" or of_blocks[1].endswith("on GPUs alone)"))
    if PLATFORM == "gpu":
        assert re.search(r"links of device 0, .* to device \d+: \d+/\d+", output)
        assert re.search(r"float32 +reference \(operands are float32", output)


def test_one_device():
    if PLATFORM == "cpu":
        output = _doctor(1)
        assert "\ndevices: 1 x cpu" in output and "\nops: one device has nobody to talk" in output
        assert "all_reduce" not in output


@pytest.mark.parametrize("scales, axis", [("row", 0), ("block", 0), ("block", 1)])
def test_scales_of_another_row_or_block_are_found(scales, axis):
    def wrong(x, w, **options):
        turned = jflux.Scaled(x.values, jnp.roll(x.scale, 1, axis))
        return jflux.reference.all_gather_matmul(turned, w, **options)

    spec = dataclasses.replace(all_ops()["all_gather_matmul"], function=wrong)
    for one in (spec, dataclasses.replace(spec, function=spec.reference)):
        trial = trials.Trial(one, transpose_rhs=True, scales=scales)
        mesh = make_mesh((RANKS,))
        try_it = functools.partial(doctor._try_scaled, trial, mesh, jnp.float8_e4m3fn)
        if one is spec:
            with pytest.raises(AssertionError, match="the largest error is"):
                try_it()
        else:
            assert try_it() == "ok"


LOG = """I0000 00:00:00 host-7.example:4242] starting
Traceback (most recent call last):
  File "/home/someone/model.py", line 3, in <module>
jax.errors.JaxRuntimeError: INTERNAL: jflux.all_gather: rank 1 waited 5 s for rank 0 (10.0.0.7:1234)
    jflux.all_gather takes its lax reference: one device
    jflux.all_gather takes its lax reference: one device
bye
"""


@pytest.mark.skipif(RANKS < 2, reason="of one rank ops are JAX's")
def test_report_for_a_bug(tmp_path):
    log = tmp_path / "run.log"
    log.write_text(LOG)
    # None of the variables may change what GPUs' libraries do, or say.
    output = _doctor(
        2, "--log", str(log), JFLUX_TUNING_DIR="/home/someone/tables", NCCL_DEBUG="NONE",
        JAX_COORDINATOR_ADDRESS="", NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME="secret0",
    )  # fmt: skip
    lines = output.splitlines()
    assert lines[0] == "```text" and lines[-1] == "```"
    assert re.search(r"^jflux \S+, built with", output, re.M)
    assert re.search(r"^heap: back end \w+, \d+ MiB per device", output, re.M)
    assert re.search(r"^  all_reduce +bfloat16 +fused.*: ok$", output, re.M)
    assert re.search(r"^  packages: .*numpy \d", output, re.M)
    assert re.search(r"^  driver: (none|\d+\.\d+).*; GPUs of this process: ", output, re.M)
    assert "\n  switches: strict False, always False, fused True\n" in output
    assert "\n  variable: NCCL_DEBUG=NONE\n" in output
    assert "\n  variable: JFLUX_TUNING_DIR=<path>/tables\n" in output
    assert lines[-4:-1] == [
        "last fault:",
        "  jax.errors.JaxRuntimeError: INTERNAL: jflux.all_gather: rank 1 waited 5 s for rank 0 "
        "(<address>)",
        "  jflux.all_gather takes its lax reference: one device",
    ]
    for private in ("someone", "secret0", str(tmp_path), socket.gethostname()):
        assert not re.search(rf"\b{re.escape(private)}\b", output)


def test_scrub():
    scrub = bug_reports.scrub
    assert scrub("--xla_dump_to=/data/me/dumps x") == "--xla_dump_to=<path>/dumps x"
    assert scrub("/usr/lib/a.so: bad, ~/b/c.txt too") == "<path>/a.so: bad, <path>/c.txt too"
    assert scrub("push/pull GB/s, jax 0.12.0.1, w [n/N, k]") == (
        "push/pull GB/s, jax 0.12.0.1, w [n/N, k]"
    )
    host, user = socket.gethostname(), getpass.getuser()
    assert scrub(f"{user}@{host}: x{user}x") == f"<user>@<host>: x{user}x"


def test_last_fault_is_the_end_of_the_log():
    log = "\n".join(f"jflux.all_gather: fault {i}" for i in (1, 2, 3, 3, 1))
    assert [line[-1] for line in bug_reports.last_fault(log, most=2)] == ["3", "1"]
    assert bug_reports.last_fault("nothing of the library's name: jfluxes") == []


def test_a_log_that_is_not_there():
    done = subprocess.run(
        [sys.executable, "-m", "jflux.doctor", "--log", "nowhere.log"],
        env=environment(PLATFORM, 1), timeout=120, text=True, capture_output=True,
    )  # fmt: skip
    assert done.returncode == 2 and "--log nowhere.log is no file" in done.stderr


def test_driver(tmp_path, monkeypatch):
    path = tmp_path / "version"
    monkeypatch.setattr(gpu_code, "_DRIVER", path)
    assert gpu_code.driver() is None
    path.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release")
    assert gpu_code.driver() == "580.159.04"


PACKAGE = Path(jflux.__file__).parent
# Takes away the finder of an editable installation, which comes before the current folder.
NOT_EDITABLE = PACKAGE.parent / "tools" / "bazel_site"


@pytest.mark.skipif(not NOT_EDITABLE.exists(), reason="not in a checkout")
def test_in_a_checkout_it_is_the_installed_one(tmp_path):
    """What README's install block leaves behind: the sources here, and a copy of them beside the
    native library elsewhere."""

    def not_sources(folder, names):
        return [n for n in names if not (n.endswith(".py") or Path(folder, n).is_dir())]

    checkout, installed = tmp_path / "checkout" / "jflux", tmp_path / "installed" / "jflux"
    for folder in (checkout, installed):
        shutil.copytree(PACKAGE, folder, ignore=not_sources)
    for library in Path(_native.lib.__file__).parent.glob("*.so"):
        (installed / library.name).symlink_to(library)

    def python(*args, program=""):
        paths = os.pathsep.join(map(str, (NOT_EDITABLE, installed.parent)))
        return subprocess.run(
            [sys.executable, *args], cwd=checkout.parent, input=program, text=True, timeout=120,
            env=environment(PLATFORM, 1) | {"PYTHONPATH": paths}, capture_output=True,
        )  # fmt: skip

    # As -m finds a module.
    program = """
import runpy, sys, jflux, jflux.plan
print(jflux.__file__, jflux.plan.__file__, flush=True)
sys.argv = ["doctor", "--help"]
runpy.run_module("jflux.doctor", run_name="__main__")
"""
    done = python("-", program=program)
    files, usage = done.stdout.splitlines()[:2]
    assert files == f"{installed / '__init__.py'} {installed / 'plan' / '__init__.py'}"
    assert done.returncode == 0 and usage.startswith("usage: python -m jflux.doctor"), done.stderr

    with (checkout / "_config.py").open("a") as file:
        file.write("# Another version.\n")
    done = python("-m", "jflux.plan", "--help")
    assert done.returncode == 1
    assert re.search("^ImportError: .*another _config.py: leave", done.stderr.splitlines()[-1])
