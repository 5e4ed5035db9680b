"""Models of other libraries with jflux in their products: the samples of
docs/guide/code_bases.md run, each after the page's first block, where its library is installed."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from harness import RANKS

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import code_bases  # noqa: E402
from bench.code_bases import PAGE, blocks  # noqa: E402

GATHER, SCATTER, SUM = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"

#: By section: what it imports, and which ops at least take its products, by how many calls. Calls
#: that are alike are one.
SECTIONS = {
    "Equinox": ("equinox", {GATHER: 2, SCATTER: 2}),
    "Haiku": ("haiku", {GATHER: 2, SCATTER: 2}),
    "Haliax": ("haliax", {GATHER: 1, SCATTER: 2}),
    "Levanter": ("levanter", {SUM: 3}),
    "gemma": ("gemma", {GATHER: 4, SCATTER: 4}),
    "EasyDeL": ("easydel", {GATHER: 2, SCATTER: 2}),
}

CHECKS = """
for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
    if isinstance(one, jax.Array):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=2e-5 * abs(other).max() + 1e-12)
np.testing.assert_allclose(found[0], want[0], rtol=2e-6)
"""


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
    if name in code_bases.OLDER_JAX and jax.__version_info__ >= (0, 11):
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


# ---- The benchmark -------------------------------------------------------------------------------

#: A library of its own: JAX.
SAMPLE = """
def loss(w, x):
    y = split(x, BETWEEN) @ split(w, P(None, "tp"))
    return (jnp.sin(split(y, INSIDE)) ** 2).mean()


w = jax.random.normal(jax.random.key(1), (WIDTH, HIDDEN), DTYPE) / WIDTH**0.5
w = split(w, P(None, "tp"))
step = jax.value_and_grad(loss)
want = jax.jit(step)(w, x)
with jflux.explaining() as calls:
    found = jax.jit(jflux.fuse(step))(w, x)
"""


@pytest.fixture
def jax_alone(monkeypatch):
    """(texts, a function that times a step of them)."""
    texts = blocks() | {"JAX": [SAMPLE]}
    monkeypatch.setattr(code_bases, "blocks", lambda: texts)
    monkeypatch.setitem(code_bases.LIBRARIES, "JAX", ("jax", "jax"))
    sizes = code_bases.LISTS["tiny"]
    return texts, lambda: code_bases.measure("JAX", sizes, min(RANKS, 4), rounds=1)


@pytest.mark.parametrize("name", SECTIONS)
def test_samples_are_read(name):
    """Each has two steps, and the first block its sizes."""
    first, sample = (blocks()[section][0] for section in ("", name))
    assert code_bases.with_steps(sample).count("= measured(") == 2
    sizes = code_bases.LISTS["llama"]
    assert "= 1, 4, 2048, 4096, 14336, 32, 8, jnp.bfloat16\n" in code_bases.with_sizes(
        first, sizes, 2
    )
    assert {*SECTIONS} == {*code_bases.LIBRARIES}


def test_a_step_is_checked_and_timed(jax_alone):
    _, measure = jax_alone
    row = measure()
    assert row["error"] <= 2e-5 and row["loss"]["S"] > 0
    assert (GATHER, "fused") in row["calls"]
    assert all(row[name]["median"] > 0 for name in "SRJ")
    assert len(code_bases.cells(row)) == len(code_bases.HEADING.split(" | "))


@pytest.mark.parametrize(
    "line, other, message",
    [
        ("(jflux.fuse(step))", "(lambda *a: jax.tree.map(jnp.sqrt, step(*a)))", "losses are"),
        ("(jflux.fuse(step))", "(step)", "no op of jflux is taken"),
    ],
)
def test_a_step_that_is_wrong_is_not_timed(jax_alone, monkeypatch, line, other, message):
    texts, measure = jax_alone
    assert SAMPLE.count(line) == 1
    monkeypatch.setitem(texts, "JAX", [SAMPLE.replace(line, other)])
    with pytest.raises(RuntimeError, match=f"JAX: {message}"):
        measure()
