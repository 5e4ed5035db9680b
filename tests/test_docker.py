"""What can be said of docker/Dockerfile without docker: what it names exists."""

import importlib.util
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "docker" / "Dockerfile"

pytestmark = pytest.mark.skipif(not FILE.exists(), reason="the Dockerfile is not here")


def _builds() -> list[dict[str, str]]:
    """The arguments of each `docker build` in its comment, after those by default."""
    text = FILE.read_text()
    default = dict(re.findall(r"^ARG (\w+)=(\S+)$", text, re.M))
    lines = re.findall(r"^#\s+docker build (.*)$", text, re.M)
    assert lines and all("-f docker/Dockerfile" in line and line.endswith(" .") for line in lines)
    return [default | dict(re.findall(r"--build-arg (\w+)=(\S+)", line)) for line in lines]


def test_each_build_takes_an_extra_of_its_cuda():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    builds = _builds()
    assert {build["EXTRA"] for build in builds} == {"cuda12", "cuda13"}
    for build in builds:
        assert set(build) == {"CUDA", "EXTRA"}
        assert f"jax[{build['EXTRA']}]" in extras[build["EXTRA"]]
        assert build["CUDA"].split(".")[0] == build["EXTRA"].removeprefix("cuda")
    (named,) = re.findall(r'pip install .*"/src\[(.*)\]"', FILE.read_text())
    assert set(named.split(",")) - {"${EXTRA}"} <= set(extras)
    python = re.search(r">=(\d+)\.(\d+)", project["requires-python"])
    assert python and tuple(map(int, python.groups())) <= (3, 12)  # Ubuntu 24.04's


def test_what_is_copied_and_run_exists():
    text = FILE.read_text()
    assert re.findall(r"^COPY (\S+) (\S+)$", text, re.M) == [(".", "/src")]
    (workdir,) = re.findall(r"^WORKDIR /src/(\S+)$", text, re.M)
    assert (ROOT / workdir).is_dir()
    (module,) = re.findall(r'^CMD \["python", "-m", "([\w.]+)"\]$', text, re.M)
    assert importlib.util.find_spec(module)
    ignored = (FILE.parent / "Dockerfile.dockerignore").read_text().split()
    needed = {"pyproject.toml", "CMakeLists.txt", "README.md", "LICENSE", "build_backend", "cc"}
    assert all((ROOT / name).exists() for name in needed) and not needed & set(ignored)
