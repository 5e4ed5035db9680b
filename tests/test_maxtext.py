"""MaxText's own model with jflux in its layers: loss and gradients are those of MaxText alone, or
in 8 bits those of the same recipe in jax.numpy. And its sparse mixture and its trainer, by the
lines of its page.

Needs `maxtext`, which is heavy: `tools/test_maxtext.sh` installs it and runs this file."""

import functools
import importlib.util
import os
import re
import sys
from unittest import mock

import jax
import numpy as np
import pytest
import rounded
from example_runs import ROOT
from harness import DEVICES, fused_calls

import jflux
from jflux.nn._dot_general import QUANTIZATIONS

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("maxtext") is None,
        reason="maxtext is not installed: tools/test_maxtext.sh makes an environment that has it",
    ),
    pytest.mark.skipif(jax.default_backend() == "gpu", reason="float32"),
]

#: Its lines are run.
PAGE = ROOT / "docs" / "guide" / "maxtext.md"
GATHER, SCATTER = "all_gather_matmul", "matmul_reduce_scatter"


@functools.cache
def load():
    path = ROOT / "examples" / "maxtext_llama.py"
    spec = importlib.util.spec_from_file_location("maxtext_llama", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def example():
    return load()


@pytest.fixture
def without_kernels(strict):
    """The CPU back end has none for sums of products of 8 bits."""
    with jflux.config(strict=False):
        yield


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
    mesh = example.mesh_of(config, devices)
    plain, fused = example.results(config, mesh, None, example.quantization())
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


# ---- In 8 bits -----------------------------------------------------------------------------------


class Rounded:
    """What MaxText asks of a quantization, with products by a recipe in jax.numpy."""

    quant_mode, needs_apply_rngs = "train", False

    def __init__(self, recipe, ranks):
        self.recipe, self.ranks = recipe, ranks

    def dot_general_cls(self, mesh_axes=()):
        from jflux.nn import linen

        moved = self.ranks > 1 and mesh_axes[0] in ("heads", "mlp")
        dot = rounded.dot_general(self.recipe, moved)
        return functools.partial(linen.DotGeneralModule, dot)


def apart(gradients, others):
    """The distance of all together, by the length of the others."""
    squares = [
        (np.sum(np.square(gradients[name] - other)), np.sum(np.square(other)))
        for name, other in others.items()
    ]
    one, other = np.sum(squares, 0)
    return np.sqrt(one / other)


@pytest.mark.usefixtures("without_kernels")
@pytest.mark.parametrize("devices, ranks", [(1, 1), (2, 2), (8, 4)])
@pytest.mark.parametrize("name", QUANTIZATIONS)
def test_in_8_bits(example, name, devices, ranks):
    """A quantization by its name."""
    if devices > len(DEVICES):
        pytest.skip(f"needs {devices} devices")
    batch = {"per_device_batch_size": 2 / len(DEVICES)}
    config = example.config_of(devices, ranks, scan_layers=ranks == 1, **batch)
    quants = None, Rounded(QUANTIZATIONS[name], ranks), example.quantization(name)
    plain, want, got = example.results(config, example.mesh_of(config, devices), *quants)
    error, distance = apart(got[1], want[1]), apart(got[1], plain[1])
    print(
        f"{name}, {ranks} ranks: loss {plain[0]:.6f}, by the recipe {want[0]:.6f}, with jflux "
        f"{got[0]:.6f}; gradients are {error:.1e} from the recipe's, {distance:.3f} from MaxText's"
    )
    # A value in 2^16 is rounded to its neighbour, where sums have another order, or where each rank
    # has a scale of its own, and the recipe one for all. That changes all later tokens a little.
    assert abs(got[0] - want[0]) <= 2.0**-14 * want[0]
    assert error <= 2.0**-5
    # Rounding to e4m3 is off by .024 of an array in the mean square, to e5m2 by .047. A product
    # has the errors of both operands, and the first layer's gradients are 8 products forward and 8
    # back: (8 (.024^2 + .024^2) + 8 (.024^2 + .047^2))^.5, if they are independent.
    assert 2.0**-5 <= distance <= 0.18
    assert abs(got[0] - plain[0]) <= 2.0**-8 * plain[0]
    # Each product gathers x by itself: five forward, five in jax.checkpoint's repetition; and dy of
    # two backward. In 8 bits, by the CPU back end's kernel.
    assert fused_calls(got[2]).count(GATHER) == (2 * 12 if ranks > 1 else 0)
    assert "f8e4m3fn[" in got[2] and ("f8e5m2[" in got[2]) == (name != "jflux_fp8_block")


# ---- A sparse mixture ----------------------------------------------------------------------------


#: Experts as grouped products of the tokens that chose them.
SPARSE = {
    "decoder_block": "mixtral", "num_experts": 8, "num_experts_per_tok": 2,
    "base_moe_mlp_dim": 128, "base_num_decoder_layers": 1, "sparse_matmul": True, "megablox": False,
}  # fmt: skip
#: What divides the devices beside the batch.
MIXTURES = {
    "experts": {"ici_expert_parallelism": 4},
    "experts and hidden units": {"ici_expert_parallelism": 2, "ici_tensor_parallelism": 2},
    "scan": {"ici_expert_parallelism": 2, "scan_layers": True, "base_num_decoder_layers": 2},
}


@functools.cache
def experts_on_each_device(scan):
    """Of MaxText alone, without expert parallelism."""
    return mixture(load(), {"scan_layers": True, "base_num_decoder_layers": 2} if scan else {})


def mixture(example, changes, devices=4):
    """Loss, gradients and text of MaxText with a sparse mixture."""
    ranks = changes.get("ici_expert_parallelism", 1) * changes.get("ici_tensor_parallelism", 1)
    options = SPARSE | {"per_device_batch_size": 2.0} | changes
    config = example.config_of(devices, 1, **options, ici_fsdp_parallelism=devices // ranks)
    (found,) = example.results(config, example.mesh_of(config, devices), None)
    return found


needs_4_devices = pytest.mark.skipif(len(DEVICES) < 4, reason="needs 4 devices")


@needs_4_devices
@pytest.mark.parametrize("case", MIXTURES)
def test_sparse_mixture(example, monkeypatch, case):
    """MaxText's expert parallelism, by the page's lines in the place of `jax.lax`'s functions."""
    changes = MIXTURES[case]
    want = experts_on_each_device(changes.get("scan_layers", False))
    for name in ("ragged_dot", "ragged_all_to_all"):
        monkeypatch.setattr(jax.lax, name, getattr(jax.lax, name))  # restored after the test
    (lines,) = re.findall(r"```text\n([^`]*?jax\.lax\.ragged_dot = .*?)```", PAGE.read_text(), re.S)
    exec(lines, {})
    with jflux.explaining() as calls:
        got = mixture(example, changes)
    print(f"{case}: loss {want[0]:.7f}, with jflux {got[0]:.7f}\n{calls}")
    np.testing.assert_allclose(got[0], want[0], rtol=1e-6)
    assert got[1].keys() == want[1].keys()
    for name, gradient in want[1].items():
        scale = float(abs(gradient).max())
        np.testing.assert_allclose(got[1][name], gradient, atol=2e-5 * scale, err_msg=name)
    assert {"ragged_all_to_all", "grouped_matmul", "grouped_matmul_dw"} <= {c.op for c in calls}
    assert {str(call.plan.path) for call in calls} == {"fused"}
    # MaxText itself exchanges what each expert gets, and no rows.
    assert "ragged-all-to-all" not in got[2] and not fused_calls(want[2])


@needs_4_devices
def test_sparse_mixture_without_jflux(example):
    """XLA's CPU back end has no ragged_all_to_all, as the page says."""
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"ragged-all-to-all. is not supported"):
        mixture(example, MIXTURES["experts"])


# ---- Its trainer ---------------------------------------------------------------------------------

#: What MaxText's trainer sets for the process.
SETTINGS = (
    "jax_default_prng_impl", "jax_use_shardy_partitioner",
    "jax_remove_size_one_mesh_axis_from_type",
)  # fmt: skip


@functools.cache
def trained(recipe, ranks, *changes):
    """Three steps of MaxText's trainer, by the page's lines with this recipe: of each the loss, and
    by their names the arrays after it."""
    from maxtext.layers import quantizations
    from maxtext.trainers.pre_train import train

    (lines,) = re.findall(r"```text\n([^`]*?app\.run.*?)```", PAGE.read_text(), re.S)
    assert lines.count('recipe="jflux_fp8_block"') == 1
    example, steps, iteration = load(), [], train.training_loop_iteration

    def seen(of_jax, *others):
        metrics = iteration(of_jax, *others)
        leaves, _ = jax.tree_util.tree_flatten_with_path(jax.device_get(of_jax["state"]))
        arrays = {re.sub(r"\W+", "/", jax.tree_util.keystr(path)): leaf for path, leaf in leaves}
        steps.append((float(metrics["scalar"]["learning/loss"]), arrays))
        return metrics

    changes = dict(changes) | {
        "steps": 3, "learning_rate": 1e-2, "monitor_goodput": False,
        "enable_goodput_recording": False, "enable_tensorboard": False,
    }  # fmt: skip
    said = example.options_of(len(DEVICES), ranks, **changes)
    options = [f"{name}={value}" for name, value in said.items()]
    before = {name: getattr(jax.config, name) for name in SETTINGS}
    try:
        with (
            mock.patch.dict(os.environ),
            mock.patch.object(sys, "argv", ["", example.BASE, *options]),
            mock.patch.object(train, "training_loop_iteration", seen),
            mock.patch.object(
                quantizations, "configure_quantization", quantizations.configure_quantization
            ),
            pytest.raises(SystemExit) as exit,
        ):
            exec(lines.replace('recipe="jflux_fp8_block"', recipe), {})
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
    assert exit.value.code is None
    losses = [loss for loss, _ in steps]
    print(f"{recipe}, {ranks} ranks: losses {losses}")
    return losses, [arrays for _, arrays in steps]


def near_16_bits(losses, *changes):
    """Losses of three steps are those without a recipe, but for what 8 bits lose."""
    want, _ = trained("recipe=None", 4, *changes)
    assert len(losses) == 3 and losses[2] < losses[0] - 2
    # Of the same parameters, and of those that one and two steps of Adam made others.
    for loss, other, share in zip(losses, want, (2.0**-8, 2.0**-6, 2.0**-5), strict=True):
        assert 0 < abs(loss - other) <= share * other


needs_devices = pytest.mark.skipif(len(DEVICES) < 8, reason="needs 8 devices")
SCAN = ("scan_layers", True)
#: Experts as products of dense arrays, for which MaxText asks its quantization for an einsum.
MIXTURE = (
    SCAN, ("decoder_block", "mixtral"), ("num_experts", 4), ("num_experts_per_tok", 2),
    ("base_moe_mlp_dim", 128), ("sparse_matmul", False), ("capacity_factor", 2.0),
)  # fmt: skip


@needs_devices
@pytest.mark.usefixtures("without_kernels")
@pytest.mark.parametrize(
    "name, ranks, changes",
    [
        ("jflux_fp8_tensor", 1, ()),
        ("jflux_fp8_row", 2, ()),
        ("jflux_fp8_block", 4, ()),
        ("jflux_fp8_block", 4, MIXTURE),
    ],
)
def test_training(name, ranks, changes):
    losses, _ = trained(f'recipe="{name}"', ranks, *changes)
    near_16_bits(losses, *changes)


@needs_devices
@pytest.mark.usefixtures("without_kernels")
@pytest.mark.parametrize("scan, ranks", [(True, 1), (True, 4), (False, 2)])
def test_training_by_earlier_steps(scan, ranks):
    """MaxText's step writes the state of each product, and its scan has one for each layer."""
    recipe, changes = 'recipe="jflux_fp8_tensor", amax_history_length=2', (SCAN,) * scan
    losses, (first, second, third) = trained(recipe, ranks, *changes)
    near_16_bits(losses, *changes)
    kernels = [name for name in third if name.endswith("/kernel/value")]
    found = 0
    for name in third:
        if not name.endswith("_amax_history/value"):
            continue
        product, _, history = name.removesuffix("/value").rpartition("/")
        kind = history.removesuffix("_amax_history")
        found += 1
        assert np.all(third[name] > 0) and np.isfinite(third[name]).all()
        np.testing.assert_array_equal(third[name][..., 1], second[name][..., 0])
        if (scan, ranks) == (True, 4):  # 2 x 4 devices and 8 x 1
            on_one_rank = trained(recipe, 1, *changes)[1][0]
            np.testing.assert_allclose(first[name], on_one_rank[name], rtol=2.0**-4)
        largest = 57344 if kind == "output_grad" else 448
        scale = third[f"{product}/{kind}_scale/value"][..., 0]
        most = second[name].max(-1)
        np.testing.assert_array_equal(scale, 2.0 ** np.ceil(np.log2(most / largest)))
        if kind == "kernel":
            kernel = product.rpartition("/")[0] + "/kernel/value"
            kernels.remove(kernel)
            values = np.moveaxis(second[kernel], 1, 0) if scan else second[kernel]
            most = np.abs(values).reshape(*scale.shape, -1).max(-1)
            np.testing.assert_array_equal(third[name][..., 0], most)
    assert found == 3 * (7 if scan else 14)
    assert [name for name in kernels if "optimizer" not in name] == [
        "/model/decoder/logits_dense/kernel/value"
    ]


# ---- The benchmark -------------------------------------------------------------------------------


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
