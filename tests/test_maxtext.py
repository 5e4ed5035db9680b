"""MaxText's own model with jflux in its layers: loss and gradients are those of MaxText alone.

Needs `maxtext`, which is heavy: `tools/test_maxtext.sh` installs it and runs this file."""

import importlib.util
import sys

import jax
import numpy as np
import pytest
from example_runs import ROOT
from harness import DEVICES, fused_calls

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("maxtext") is None,
        reason="maxtext is not installed: tools/test_maxtext.sh makes an environment that has it",
    ),
    pytest.mark.skipif(jax.default_backend() == "gpu", reason="float32"),
]

GATHER, SCATTER = "all_gather_matmul", "matmul_reduce_scatter"


@pytest.fixture(scope="module")
def example():
    path = ROOT / "examples" / "maxtext_llama.py"
    spec = importlib.util.spec_from_file_location("maxtext_llama", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# What MaxText is told; devices and ranks; gathers and scatters in the text, of two layers or of a
# scan's body. MaxText puts each layer into a jax.checkpoint, which by default ("none" and "full")
# saves nothing. So x is gathered twice in the forward pass and twice in its repetition, and dy of
# each scatter once. There are two scatters, one in the repetition, whose last result nothing needs,
# and one for each of the five products of x.
GATHERS, SCATTERS = 2 + 2 + 2, 2 + 1 + 5
CASES = {
    "layers": ({}, 8, 4, 2 * GATHERS, 2 * SCATTERS),
    "4 devices": ({}, 4, 2, 2 * GATHERS, 2 * SCATTERS),
    "scan": ({"scan_layers": True}, 8, 4, GATHERS, SCATTERS),
    "full": ({"scan_layers": True, "remat_policy": "full"}, 8, 4, GATHERS, SCATTERS),
    "minimal": ({"scan_layers": True, "remat_policy": "minimal"}, 8, 4, None, None),
    "save_qkv_proj": ({"scan_layers": True, "remat_policy": "save_qkv_proj"}, 8, 4, None, None),
    "context": ({"context": 2, "scan_layers": True}, 8, 2, None, None),
    "context, not balanced": (
        {"context": 4, "context_parallel_load_balance": False}, 8, 2, None, None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients(example, case):
    changes, devices, ranks, gathers, scatters = CASES[case]
    if devices > len(DEVICES):
        pytest.skip(f"needs {devices} devices")
    config = example.config_of(devices, ranks, **changes)
    plain, fused = example.both(config, example.mesh_of(config, devices))
    print(f"{case}: loss {plain[0]:.7f}, with jflux {fused[0]:.7f}")
    np.testing.assert_allclose(fused[0], plain[0], rtol=1e-6)
    assert plain[1].keys() == fused[1].keys()
    for name, want in plain[1].items():
        scale = float(abs(want).max())
        np.testing.assert_allclose(fused[1][name], want, atol=2e-5 * scale, err_msg=name)
    assert not fused_calls(plain[2])
    calls = fused_calls(fused[2])
    assert calls.count(GATHER) >= 2 and calls.count(SCATTER) >= 2
    # Keys and values are gathered by jflux.attention.
    assert ("all_gather" in calls) == ("context" in changes)
    if gathers is not None:
        assert (calls.count(GATHER), calls.count(SCATTER)) == (gathers, scatters)


@pytest.fixture
def benchmark():
    """bench.maxtext, and its small case."""
    sys.path.insert(0, str(ROOT))
    from bench import maxtext

    return maxtext, *maxtext.LISTS["tiny"]


def test_a_step_is_checked_and_timed(benchmark):
    maxtext, case = benchmark
    row = maxtext.measure(case, 2, rounds=1)
    assert row["error"] <= case.tolerance and row["loss"]["S"] > 4
    assert not row["calls of S"] and row["calls of J"]
    assert all(row[name]["median"] > 0 for name in "SJ")
    assert len(maxtext.cells(row)) == len(maxtext.HEADING.split(" | "))


def test_a_step_that_is_wrong_is_not_timed(benchmark, monkeypatch):
    maxtext, case = benchmark
    llama, steps = maxtext.example(), []
    right = llama.step_of

    def wrong(model):
        params, step = right(model)
        steps.append(step)
        if len(steps) == 1:
            return params, step
        return params, lambda *args: jax.tree.map(lambda a: a * 1.001, step(*args))

    monkeypatch.setattr(llama, "step_of", wrong)
    with pytest.raises(RuntimeError, match="tiny: .* 0.001 off"):
        maxtext.measure(case, 2, rounds=1)
    assert len(steps) == 2


def test_a_step_that_calls_no_op_is_not_timed(benchmark, monkeypatch):
    maxtext, case = benchmark
    llama = maxtext.example()
    right = llama.model_of
    monkeypatch.setattr(llama, "model_of", lambda config, mesh, quant: right(config, mesh, None))
    with pytest.raises(RuntimeError, match="tiny: 0 calls of jflux's ops"):
        maxtext.measure(case, 2, rounds=1)
