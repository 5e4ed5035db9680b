"""bench/products.py: the product alone against XLA's."""

import pathlib
import sys

import jax.numpy as jnp
import pytest
from harness import PLATFORM

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from bench import products, render  # noqa: E402


def test_a_product_is_timed_and_rendered():
    dtype = jnp.bfloat16 if PLATFORM == "gpu" else jnp.float32
    row = products.measure(8, 16, 24, dtype, zeros=False, rounds=2)
    assert all(row[name]["median"] > 0 for name in ("G", "G nk", "kn", "nk"))
    result = {"machine": {"gpus": "1 x X", "processes": 1, "date": "today"}, "products": [row]}
    page = render.pages([("p", result)])["performance/products.md"]
    assert f"| {' | '.join(products.cells(row))} |" in page
    assert products.cells(row)[:3] == ["8", "16", "24"]


def test_the_summary_counts_products_of_many_rows():
    def row(m, kn, nk):
        times = {"G": 1.0, "G nk": 1.0, "kn": 1 / kn, "nk": 1 / nk}
        return {"m": m, **{name: {"median": value} for name, value in times.items()}}

    rows = [row(64, 0.5, 0.5), row(512, 1.2, 0.96), row(1024, 0.96, 0.9), row(2048, 0.98, 0.5)]
    said = products.summary(rows)
    assert said.startswith("Of 3 products of 512 rows")
    assert "2 are within 3 %" in said and "and 3 within 5 %; with w [n, k] 0 and 1." in said


@pytest.mark.parametrize("names", [["flux"], ["flux", "decode"]])
def test_each_product_is_one_rank_s_and_comes_once(names):
    found = list(products.of_one_rank(names))
    assert len(found) == len(set(found)) > 0
    assert (64, 12288, 12288) in found
