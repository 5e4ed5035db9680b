"""docs/support.md says what the code plans."""

import pathlib

import jax
import numpy as np
import pytest
from harness import PLATFORM
from jax.sharding import Mesh

from jflux import _native
from jflux._ops._spec import all_ops

ROOT = pathlib.Path(__file__).resolve().parents[1]
pytestmark = [
    pytest.mark.skipif(not (ROOT / "docs").is_dir(), reason="not in a checkout"),
    pytest.mark.skipif(PLATFORM == "gpu" or jax.device_count() < 4, reason="for four CPU devices"),
]


@pytest.fixture
def tool(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    import support_page

    return support_page


def test_the_page_is_what_the_code_plans(tool):
    text = tool.page()
    assert text == tool.PAGE.read_text(), "run python tools/support_page.py"
    for op in all_ops():
        assert f"\n| `{op}` | " in text


def test_each_word_of_a_cell_follows_from_the_plans(tool, monkeypatch):
    mesh = Mesh(np.array(jax.devices()[: tool.RANKS]), ("tp",))
    spec = all_ops()["all_gather_matmul"]
    of_16_bits = {"16 bits": tool.FORMATS["16 bits"]}
    monkeypatch.setattr(tool, "FORMATS", of_16_bits)
    assert tool.cells(spec, mesh)["8.0 and later"] == "kernel: all"
    # A library without portable products would have them in lax.
    hopper = (_native.HOPPER_ARCH, _native.HOPPER_ARCH)
    monkeypatch.setattr(tool.gpu_code, "why_not", lambda *_: tool.gpu_code.why_not_of(
        hopper, _native.PORTABLE_ARCH, "a GPU", unchecked=True))  # fmt: skip
    cells = tool.cells(spec, mesh)
    assert cells["8.0 and later"] == cells["9.0"] == "XLA's product and a collective: all"
    assert cells["CPU"] == "kernel: all"


def test_a_kernel_that_the_page_does_not_know(tool, monkeypatch):
    monkeypatch.delitem(tool.OTHERS, "moe_route")
    with pytest.raises(AssertionError, match=r"OTHERS of tools/support_page.py lacks .*moe_route"):
        tool.page()


def test_what_has_been_checked_is_read_from_the_log(tool, tmp_path, monkeypatch):
    page = tmp_path / "verified.md"
    page.write_text(
        "## What has run\n\n| | one process | two |\n|---|---|---|\n"
        "| collectives | H200: 11-30, H100: 11-27 | A100: 12-02, H100: 12-01 |\n"
        "\n## More\n\n| a |\n"
    )
    monkeypatch.setattr(tool, "CHECKED", page)
    assert tool.checked("all_reduce") == "H200 11-30, H100 12-01, A100 12-02"
