"""Runs an example as a script, and reads what it prints."""

import os
import re
import subprocess
import sys
from pathlib import Path

import jax
from workers.common import xla_flags

ROOT = Path(__file__).resolve().parents[1]
ON_GPU = jax.default_backend() == "gpu"


def run_example(
    name: str, *args: str, devices: int | None = None, cwd: Path, in_kernels: bool = True
) -> str:
    """What the script prints; `devices` virtual ones, or what there is. All its ops have kernels,
    unless `in_kernels` is False."""
    env = dict(os.environ)
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH")]))
    if devices is not None:
        env["XLA_FLAGS"] = xla_flags(devices)
    script = [sys.executable, str(ROOT / "examples" / name), *args]
    done = subprocess.run(script, env=env, cwd=cwd, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert not in_kernels or "takes its lax reference" not in done.stderr, done.stderr
    return done.stdout


def losses(name: str, out: str) -> tuple[float, ...]:
    """First and last training loss, and the validation loss."""
    found = re.search(rf"{name}: training loss (\S+) -> (\S+), validation (\S+), median step", out)
    assert found, out
    return tuple(map(float, found.groups()))
