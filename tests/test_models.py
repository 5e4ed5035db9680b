"""The products of public models, which python -m jflux.tune --model tunes."""

import dataclasses
import importlib
import itertools
import json
from types import SimpleNamespace

import pytest
from harness import PLATFORM, RANKS

import jflux
from jflux._call import tuning_tables
from jflux._ops._spec import all_ops
from jflux._tools import language_models, tuner
from jflux._tools.language_models import MODELS, Product, Sizes
from jflux.plan import models as plan_models

tune = importlib.import_module("jflux.tune")
jflux.tune = tune.tune  # which the import has replaced by the module


def lines(capsys, *args):
    assert tune.main([*args, "--dry-run"]) == 0
    return capsys.readouterr().out.splitlines()


def weights(sizes):
    """Of the whole model, in 1e9: the products of one token, each layer's once."""
    found = language_models.products(sizes, [1], 1)
    of_layers = sum(
        p.n * p.k for p in found if p.op != "matmul_all_reduce" and p.layer != "head"
    ) * (sizes.layers)
    tables = sizes.vocabulary * sizes.hidden * (1 if sizes.tied else 2)
    return (of_layers + tables) / 1e9


# Billions of weights, as their publishers count them.
PUBLISHED = {
    "llama-2-7b": 6.74, "llama-2-13b": 13.0, "llama-2-70b": 69.0, "llama-3-8b": 8.03,
    "llama-3-70b": 70.6, "llama-3-405b": 406, "mistral-7b": 7.24, "mistral-nemo-12b": 12.2,
    "mistral-small-24b": 23.6, "mistral-large-123b": 123, "qwen2.5-7b": 7.62, "qwen2.5-14b": 14.8,
    "qwen2.5-32b": 32.8, "qwen2.5-72b": 72.7, "qwen3-8b": 8.19, "qwen3-14b": 14.8,
    "qwen3-32b": 32.8, "gemma-7b": 8.54, "gemma-2-9b": 9.24, "gemma-2-27b": 27.2,
    "gemma-3-12b": 11.8, "gemma-3-27b": 27.0, "gpt-3-175b": 175,
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_sizes_add_up_to_the_published_number_of_weights(name):
    assert weights(MODELS[name]) == pytest.approx(PUBLISHED[name], rel=0.01)


def test_dry_run_lists_the_products_of_a_model(capsys):
    found = lines(capsys, "--model", "llama-2-70b", "--tokens", "512,2048", "--ranks", "4")
    assert [line.split()[0] for line in found] == [
        f"{op}:{m},{n},{k}"
        for m in (512, 2048)
        for op, n, k in [
            ("all_gather_matmul", 10240, 8192),
            ("all_gather_matmul", 57344, 8192),
            ("all_gather_matmul", 32000, 8192),
            ("matmul_reduce_scatter", 8192, 8192),
            ("matmul_reduce_scatter", 8192, 28672),
            ("matmul_all_reduce", 8192, 8192),
            ("matmul_all_reduce", 8192, 28672),
        ]
    ]
    # What is listed are shapes that the command takes.
    shapes = [line.split()[0] for line in found]
    assert [line.strip() for line in lines(capsys, *shapes, "--ranks", "4")] == shapes


def test_several_models_by_tokens_and_each_product_once(capsys):
    """Llama 2 and 3 of 70 billion weights differ in their heads alone."""
    args = ["--model", "llama-2-70b,llama-3-70b", "--tokens", "2048,512", "--ranks", "2"]
    found = [line.split()[0] for line in lines(capsys, *args)]
    assert len(found) == len(set(found)) == 2 * (7 + 1)
    assert [line.split(":")[1].split(",")[0] for line in found] == 8 * ["2048"] + 8 * ["512"]
    layers = [line.split()[0] for line in lines(capsys, *args, "--layers-only")]
    heads = {f"all_gather_matmul:{m},{n},8192" for m in (512, 2048) for n in (32000, 128256)}
    assert set(found) - set(layers) == heads and len(layers) == 2 * 6


@pytest.fixture
def tuned(monkeypatch):
    """What the command has tuned, in no time."""
    seen = []

    def fake(op, *, m, n, k, mesh, dtype, transpose_rhs, **options):
        seen.append((op, m, n, k, options))
        trial = tuner.trial_of(all_ops()[op], "tp", dtype, options["scales"], transpose_rhs)
        key = tuner.plan_of(trial, m, n, k, mesh, dtype).key
        return tuner.Result(
            key, {tuning_tables.Choice(128, 2, 4): 1e-3}, tuning_tables.Choice(128, 2, 4)
        )

    monkeypatch.setattr(tune, "tune", fake)
    return seen


@pytest.mark.skipif(RANKS < 2, reason="one rank has nothing to tune")
def test_a_table_of_8_bits(tuned, tmp_path):
    """Calls by tensor and by row are one entry."""
    path = tmp_path / "table.json"
    shape = "all_gather_matmul:2048,2048,2048"
    args = ["--dtype", "float8_e4m3fn", "--ranks", "2", "--unchecked", "--out", str(path)]
    for scales in ("row", "row", "tensor"):
        assert tune.main([shape, *args, "--scales", scales]) == 0
    (key,) = json.loads(path.read_text())["choices"]
    assert key.startswith("all_gather_matmul float8_e4m3fn.float8_e4m3fn.")
    assert key.endswith(" scales=of_sums") or PLATFORM == "cpu"  # which scales y after its kernel
    assert [o["scales"] for *_, o in tuned] == ["row"]


@pytest.mark.skipif(PLATFORM == "gpu", reason="chooses the number of virtual devices")
@pytest.mark.skipif(RANKS < 2, reason="one rank has nothing to tune")
def test_a_table_grows_call_by_call(tuned, tmp_path, capsys, monkeypatch):
    """As for the one that ships: what does not fit into the limit is left to the next call."""
    path = tmp_path / "nvidia_h100_80gb_hbm3.json"
    assert path.stem == tuning_tables.slug("NVIDIA H100 80GB HBM3")  # where a call looks for it
    args = ["--model", "llama-2-70b", "--layers-only", "--tokens", "2048", "--ranks", "2"]
    args += ["--least-gain", ".01", "--threads", "4", "--out", str(path)]
    products = [line.split()[0] for line in lines(capsys, *args)]
    ticks = itertools.count(0, 10)
    with monkeypatch.context() as patch:
        patch.setattr(tune, "time", SimpleNamespace(monotonic=lambda: next(ticks)))
        assert tune.main([*args, "--limit", "45"]) == 0

    def taken():
        found = [f"{op}:{m},{n},{k}" for op, m, n, k, _ in tuned]
        assert all(o["least_gain"] == 0.01 and o["threads"] == 4 for *_, o in tuned)
        assert not any(o["save"] for *_, o in tuned)
        tuned.clear()
        return found

    begun = taken()
    assert 1 < len(begun) < len(products) == 6
    said = capsys.readouterr().err
    left = len(products) - len(begun)
    assert f"no time for {left} products, from {products[len(begun)]} " in said
    assert len(json.loads(path.read_text())["choices"]) == len(begun)
    assert tune.main(args) == 0
    assert [*begun, *taken()] == products
    assert tune.main(args) == 0 and taken() == []
    assert len(tuning_tables.load(path)) == len(products)


def test_every_product_is_of_a_tuned_op():
    for sizes in MODELS.values():
        for product in language_models.products(sizes, [512, 8192], 8, training=True):
            assert all_ops()[product.op].tuned, product


def test_gradients_are_the_transposes():
    """dx of an all-gather's product is a product with the same w, transposed, and a
    reduce-scatter; and the other way round."""
    plain = language_models.products(MODELS["llama-3-8b"], [2048], 4)
    found = set(language_models.products(MODELS["llama-3-8b"], [2048], 4, training=True)) - set(
        plain
    )
    other = {"all_gather_matmul": "matmul_reduce_scatter"}
    other |= {op: name for name, op in other.items()}
    want = {(other[p.op], p.m, p.k, p.n, True) for p in plain if p.op in other}
    assert {dataclasses.astuple(p)[:5] for p in found} == want


def test_few_heads_of_keys_and_values_are_on_several_ranks():
    """8 heads of 128 columns serve 8 ranks; 16 ranks need 16."""

    def columns(ranks):
        return language_models.products(MODELS["llama-2-70b"], [512], ranks)[0].n

    assert columns(2) == columns(8) == 8192 + 2 * 8 * 128
    assert columns(16) == 8192 + 2 * 16 * 128


def test_what_the_ranks_do_not_divide_is_skipped(capsys):
    found = lines(capsys, "--model", "llama-2-7b", "--tokens", "510", "--ranks", "4")
    assert len(found) == 7
    for line in found:  # every rank has all rows of an all-reduce's x
        why = "; skipped: jflux.tune: m=510 is not a multiple of the 4 ranks"
        assert line.endswith(why) != line.startswith("matmul_all_reduce"), line


CONFIG = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 32,
    "vocab_size": 128256, "tie_word_embeddings": False,
}  # fmt: skip


def config(tmp_path, **changes):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({k: v for k, v in (CONFIG | changes).items() if v is not None}))
    return path


def test_config_of_hugging_face(tmp_path, capsys):
    path = config(tmp_path)
    assert language_models.products(
        language_models.of_config(path), [512], 2
    ) == language_models.products(MODELS["llama-3-8b"], [512], 2)
    by_file = lines(capsys, "--config", str(path), "--tokens", "512", "--ranks", "2")
    by_name = lines(capsys, "--model", "llama-3-8b", "--tokens", "512", "--ranks", "2")
    assert by_file == by_name
    assert language_models.of_config(config(tmp_path, num_key_value_heads=None)).kv_heads == 32
    assert language_models.of_config(config(tmp_path, head_dim=256)).head_columns == 256
    assert language_models.of_config(config(tmp_path, tie_word_embeddings=None)).tied
    assert not language_models.of_config(config(tmp_path, model_type="starcoder2")).gated
    nested = tmp_path / "nested.json"
    nested.write_text(json.dumps({"text_config": CONFIG, "tie_word_embeddings": False}))
    assert language_models.of_config(nested) == language_models.of_config(config(tmp_path))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"hidden_size": None}, "'hidden_size' must be a positive number, got None"),
        ({"vocab_size": "many"}, "'vocab_size' must be a positive number, got 'many'"),
        ({"num_local_experts": 8}, "is of a mixture of experts (num_local_experts: 8)"),
    ],
)
def test_a_config_that_is_not_of_a_dense_decoder(tmp_path, changes, message):
    with pytest.raises(ValueError) as error:
        language_models.of_config(config(tmp_path, **changes))
    assert message in str(error.value)


@pytest.mark.parametrize("text, message", [("{", "cannot be read as JSON"), ("[]", "an object")])
def test_a_file_that_is_no_config(tmp_path, text, message):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        language_models.of_config(path)


@pytest.mark.parametrize(
    "args, message",
    [
        ([], "one of the three"),
        (["all_gather_matmul:8,8,8", "--model", "llama-2-7b"], "one of the three"),
        (["--model", "llama-9"], "no model 'llama-9'; there are llama-2-7b"),
        (["--model", "llama-2-7b", "--tokens", "x"], "'x' is no list of numbers"),
        (["--config", "nowhere.json"], "nowhere.json cannot be read"),
        (["all_gather_matmul:8"], "'all_gather_matmul:8' is not OP:M,N,K"),
    ],
)
def test_arguments_that_are_wrong(args, message, capsys):
    with pytest.raises(SystemExit):
        tune.main(args)
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.skipif(PLATFORM == "gpu", reason="there is something to tune")
def test_without_a_gpu(capsys):
    assert tune.main(["--model", "llama-2-7b", "--tokens", "512"]) == 1
    assert "there is no GPU" in capsys.readouterr().err


def test_the_planner_has_the_same_sizes():
    planned = plan_models.named("llama-2-70b")
    of_layer = {
        (p.k, p.n) for p in language_models.products(MODELS["llama-2-70b"], [4096], 1)
        if p.op != "matmul_all_reduce"
    }  # fmt: skip
    assert {(layer.k, layer.n) for layer in planned.layers if not layer.lookup} == of_layer


def test_ungated():
    sizes = Sizes(1, 64, 256, 4, 4, 1000, gated=False)
    assert Product("all_gather_matmul", 8, 256, 64, False, "up") in language_models.products(
        sizes, [8], 1
    )
