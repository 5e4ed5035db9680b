"""What the documents say is so: their samples run, their links lead somewhere, and the pictures
show the orders of cc/core/tile_order.h."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])

pytestmark = pytest.mark.skipif(
    not (ROOT / "README.md").exists(), reason="the documents are not here"
)


SAMPLES = {
    "README.md": ["assert abs(y - plain).max() < 0.05", "assert jnp.isfinite(h).all()"],
    "docs/parallel.md": ["assert all(jnp.isfinite(g).all() for g in jax.tree.leaves(gradients))"],
}


@pytest.mark.parametrize("name", SAMPLES)
def test_the_samples_run(name):
    """All of them, one after the other, as one program."""
    pytest.importorskip("flax")
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / name).read_text(), re.M | re.S)
    assert blocks
    checks = SAMPLES[name]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(
        [sys.executable, "-c", "\n".join([*blocks, *checks])],
        env=env, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "takes its lax reference" not in done.stderr, done.stderr


@pytest.mark.parametrize("doc", DOCS, ids=lambda d: d.name)
def test_links_and_paths(doc):
    """Links, and what looks like a file of this repository."""
    text = doc.read_text()
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert (doc.parent / target).exists(), target
    folders = "build_backend|cc|docs|examples|jflux|tests|tools|bench"
    for path in re.findall(rf"`((?:{folders})/[\w./]+)`", text):
        if "foo_bar" not in path:  # the op that docs/adding_an_op.md adds
            assert (ROOT / path).exists(), path


ORDERS = """
#include <cstdio>
#include <initializer_list>
#include "core/tile_order.h"
int main() {
  for (int rows = 1; rows <= 12; ++rows) {
    for (int tile_m = 1; tile_m <= 5; ++tile_m) {
      const jflux::TileGrid grid{(4 * rows + tile_m - 1) / tile_m, 1, 1};
      for (int rank = 0; rank < 4; ++rank) {
        const auto gather = jflux::GatherOrder::Make(grid, rank, 4, rows, tile_m);
        const auto scatter = jflux::ScatterOrder::Make(grid, rank, 4, rows, tile_m);
        for (int t = 0; t < grid.tiles_m; ++t) std::printf("%d ", gather.At(t).m);
        std::printf("\\n");
        for (int t = 0; t < grid.tiles_m; ++t) std::printf("%d ", scatter.At(t).m);
        std::printf("\\n");
      }
    }
  }
}
"""


def test_pictures_show_the_orders_of_the_kernels(tmp_path):
    pytest.importorskip("matplotlib")
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    (tmp_path / "orders.cc").write_text(ORDERS)
    command = [compiler, "-std=c++17", f"-I{ROOT}/cc", "orders.cc", "-o", "orders"]
    subprocess.run(command, cwd=tmp_path, check=True)
    printed = subprocess.run([tmp_path / "orders"], capture_output=True, text=True, check=True)

    spec = importlib.util.spec_from_file_location("pictures", ROOT / "docs" / "make_pictures.py")
    pictures = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pictures)
    at = iter(printed.stdout.splitlines())
    for rows in range(1, 13):
        for tile_m in range(1, 6):
            for rank in range(4):
                for order in (pictures.gather_order, pictures.scatter_order):
                    want = [int(tile) for tile in next(at).split()]
                    assert order(rank, rows, tile_m) == want, (rows, tile_m, rank, order)
    assert next(at, None) is None


def test_performance_is_what_the_results_say():
    done = subprocess.run(
        [sys.executable, "-m", "bench.render", "--check"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
