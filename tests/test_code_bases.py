"""Models of other libraries with jflux in their products: the samples of
docs/guide/code_bases.md run, each after the page's first block, where its library is installed."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest

PAGE = Path(__file__).resolve().parents[1] / "docs" / "guide" / "code_bases.md"
GATHER, SCATTER, SUM = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"

#: By section: what it imports, and which ops at least take its products, by how many calls. Calls
#: that are alike are one.
SECTIONS = {
    "Equinox": ("equinox", {GATHER: 2, SCATTER: 1}),
    "Haiku": ("haiku", {GATHER: 2, SCATTER: 2}),
    "Haliax": ("haliax", {GATHER: 1, SCATTER: 2}),
    "Levanter": ("levanter", {SUM: 2}),
    "gemma": ("gemma", {GATHER: 4, SCATTER: 4}),
    "EasyDeL": ("easydel", {GATHER: 2, SCATTER: 2}),
}

CHECKS = """
for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
    if isinstance(one, jax.Array):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=2e-5 * abs(other).max() + 1e-12)
np.testing.assert_allclose(found[0], want[0], rtol=2e-6)
"""


def blocks() -> dict[str, list[str]]:
    """Samples by section; "": those before the first."""
    title, *sections = re.split(r"^## ", PAGE.read_text(), flags=re.M)
    parts = {"": title} | {one.partition("\n")[0]: one for one in sections}
    return {
        name: re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)
        for name, text in parts.items()
    }


pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="the documents are not here")


def test_each_section_has_one_sample():
    assert {name: len(found) for name, found in blocks().items()} == dict.fromkeys(
        ["", *SECTIONS], 1
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", SECTIONS)
def test_losses_and_gradients(name):
    module, least = SECTIONS[name]
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed")
    if name in ("Haliax", "Levanter") and jax.__version_info__ >= (0, 11):
        pytest.skip("Haliax uses a function that newer JAX does not have")
    found = blocks()
    counted = [
        f"assert [call.op for call in calls].count({op!r}) >= {count}, calls"
        for op, count in least.items()
    ]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    env |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    done = subprocess.run(
        [sys.executable, "-c", "\n".join([*found[""], *found[name], CHECKS, *counted])],
        env=env, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)
