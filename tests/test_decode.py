"""The Llama of the examples: decoding with a cache equals a forward pass without one, on any number
of ranks, whichever ops it takes and wherever its weights come from."""

import dataclasses
import functools
import json
import re
import shutil
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import RANKS, make_mesh
from jax.sharding import PartitionSpec as P

import jflux

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples"))

import decode  # noqa: E402
import llama_model  # noqa: E402
import llama_weights  # noqa: E402
import serve  # noqa: E402
from llama_model import Config  # noqa: E402

WORLDS = [n for n in (1, 2, 4, 8) if n <= RANKS]
TINY = dataclasses.replace(llama_model.CONFIGS["tiny"], width=64, hidden=96)
CONFIGS = {
    "grouped": TINY,
    "one key for each query": dataclasses.replace(TINY, kv_heads=16),
    "fewer keys than ranks, tied": dataclasses.replace(TINY, kv_heads=2, tied=True),
    "mixture": dataclasses.replace(TINY, experts=6, experts_per_token=2),
    "qwen3": dataclasses.replace(TINY, head_size=6, head_norms=True, tied=True),
    "qwen3 mixture": dataclasses.replace(
        TINY, head_norms=True, kv_heads=2, experts=6, experts_per_token=3, expert_hidden=40
    ),
    "qwen3, an MLP, experts that do not sum to 1": dataclasses.replace(
        TINY, head_size=10, head_norms=True, experts=5, experts_per_token=2, expert_hidden=24,
        mlp_layers=(0, 7), normalized=False,
    ),
}  # fmt: skip
PROMPT, STEPS, BATCH = 5, 6, 3


@pytest.fixture(autouse=True)
def lenient():
    """GPUs have no kernels for float32."""
    with jflux.config(strict=False), jax.default_matmul_precision("highest"):
        yield


def tensors_of(config: Config, seed: int = 0) -> dict[str, np.ndarray]:
    """Weights under Hugging Face's names. The norms' scales are not 1, so that none is mixed up."""
    rng = np.random.default_rng(seed)
    d, dim = config.width, config.head_dim
    q, kv = config.heads * dim, config.kv_heads * dim

    def matrices(i):
        yield from {"self_attn.q_proj": (q, d), "self_attn.k_proj": (kv, d),
                    "self_attn.v_proj": (kv, d), "self_attn.o_proj": (d, q)}.items()  # fmt: skip
        if not config.experts or i in config.mlp_layers:
            yield from {f"mlp.{n}_proj": (config.hidden, d) for n in ("gate", "up")}.items()
            yield "mlp.down_proj", (d, config.hidden)
            return
        mixture, gate, up, down = names_of_mixture(config)
        units = config.expert_hidden or config.hidden
        yield f"{mixture}.gate", (config.experts, d)
        for at in (f"{mixture}.experts.{e}" for e in range(config.experts)):
            yield from {f"{at}.{n}": (units, d) for n in (gate, up)}.items()
            yield f"{at}.{down}", (d, units)

    def normal(*shape):
        return (rng.standard_normal(shape) * shape[-1] ** -0.5).astype(np.float32)

    def scale(size=d):
        return rng.uniform(0.5, 1.5, size).astype(np.float32)

    found = {"model.embed_tokens.weight": normal(config.vocab, d), "model.norm.weight": scale()}
    if not config.tied:
        found["lm_head.weight"] = normal(config.vocab, d)
    for i in range(config.layers):
        at = f"model.layers.{i}"
        for name, shape in matrices(i):
            found[f"{at}.{name}.weight"] = 2 * normal(*shape)
        for name in ("q_norm", "k_norm") if config.head_norms else ():
            found[f"{at}.self_attn.{name}.weight"] = scale(dim)
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"{at}.{name}.weight"] = scale()
    return found


def names_of_mixture(config: Config) -> tuple[str, ...]:
    """Its prefix, and those of an expert's gate, up and down projection."""
    if config.head_norms:
        return "mlp", "gate_proj", "up_proj", "down_proj"
    return "block_sparse_moe", "w1", "w3", "w2"


def plain_llama(config: Config, tensors: dict[str, np.ndarray], tokens: np.ndarray) -> np.ndarray:
    """Logits [b, s, vocab] of all positions: one device, no cache, float64, nothing of jflux."""
    w = {name.removesuffix(".weight"): t.astype(np.float64) for name, t in tensors.items()}
    b, s = tokens.shape
    half = config.head_dim // 2

    def norm(x, scale):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + config.epsilon) * scale

    def turned(x):  # [b, heads, s, head_dim], each pair as one complex number
        turn = np.exp(1j * np.outer(np.arange(s), config.theta ** (-np.arange(half) / half)))
        z = (x[..., :half] + 1j * x[..., half:]) * turn
        return np.concatenate([z.real, z.imag], -1)

    def heads(x):
        return x.reshape(b, s, -1, config.head_dim).swapaxes(1, 2)

    x = w["model.embed_tokens"][tokens]
    for i in range(config.layers):
        layer = {k.split(f"layers.{i}.")[1]: v for k, v in w.items() if f"layers.{i}." in k}
        h = norm(x, layer["input_layernorm"])
        q, k, v = (heads(h @ layer[f"self_attn.{name}_proj"].T) for name in "qkv")
        if config.head_norms:
            q, k = (norm(a, layer[f"self_attn.{name}_norm"]) for a, name in ((q, "q"), (k, "k")))
        q, k, v = turned(q), *(np.repeat(a, config.heads // config.kv_heads, 1)
                               for a in (turned(k), v))  # fmt: skip
        scores = q @ k.swapaxes(2, 3) / np.sqrt(config.head_dim)
        weights = np.exp(scores - scores.max(-1, keepdims=True)) * np.tri(s)
        o = (weights / weights.sum(-1, keepdims=True)) @ v
        x = x + o.swapaxes(1, 2).reshape(b, s, -1) @ layer["self_attn.o_proj"].T
        h = norm(x, layer["post_attention_layernorm"])
        if config.experts and i not in config.mlp_layers:
            x = x + plain_mixture(config, layer, h)
        else:
            x = x + plain_mlp(h, *(layer[f"mlp.{name}_proj"] for name in ("gate", "up", "down")))
    return norm(x, w["model.norm"]) @ w["model.embed_tokens" if config.tied else "lm_head"].T


def plain_mlp(h: np.ndarray, gate: np.ndarray, up: np.ndarray, down: np.ndarray) -> np.ndarray:
    gated = h @ gate.T
    return (gated / (1 + np.exp(-gated)) * (h @ up.T)) @ down.T


def plain_mixture(config: Config, layer: dict[str, np.ndarray], h: np.ndarray) -> np.ndarray:
    """Every expert on every token, and the best of them."""
    mixture, *parts = names_of_mixture(config)
    logits = h @ layer[f"{mixture}.gate"].T
    shares = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    shares *= logits >= np.sort(logits, -1)[..., -config.experts_per_token, None]
    if config.normalized:
        shares /= shares.sum(-1, keepdims=True)
    each = [
        plain_mlp(h, *(layer[f"{mixture}.experts.{e}.{w}"] for w in parts))
        for e in range(config.experts)
    ]
    return sum(shares[..., e, None] * y for e, y in enumerate(each))


def tokens_of(config: Config, length: int) -> np.ndarray:
    return np.random.default_rng(1).integers(config.vocab, size=(BATCH, length), dtype=np.int32)


def check_logits(config, mesh, ops=jflux, prompt=PROMPT, length=PROMPT + STEPS):
    """That those of a prompt and of each later token are those of a forward pass over all."""
    tensors = tensors_of(config)
    tokens = tokens_of(config, prompt + STEPS)
    weights = llama_weights.from_tensors(config, mesh, tensors)
    program = llama_model.logits_program(ops, config, mesh, prompt=prompt, length=length)
    got = np.asarray(program(weights, tokens))
    want = plain_llama(config, tensors, tokens)[:, prompt - 1 :]
    assert want.std() > 0.1 and np.abs(np.diff(want, axis=1)).max() > 1  # positions differ
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize("ops", [jflux, jflux.reference], ids=["jflux", "reference"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_decoding_equals_a_forward_pass(config, ops):
    check_logits(config, make_mesh((RANKS,)), ops)


SPLITS = [s for s in ((2, 1), (1, 2), (4, 1), (2, 2), (2, 4), (4, 2)) if s[0] * s[1] <= RANKS]


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_a_split_cache_decodes_as_a_whole_one(split):
    """(context ranks, tensor ranks); ranks whose part of the prompt or of the cache is empty, and
    steps that cross from one rank's part into the next."""
    config = dataclasses.replace(TINY, context_axis="cp", layers=1)
    mesh = make_mesh(split, ("cp", "tp"))
    check_logits(config, mesh, prompt=5, length=11)
    check_logits(config, mesh, prompt=1, length=17)


@pytest.mark.parametrize("ops", [jflux, jflux.reference], ids=["jflux", "reference"])
@pytest.mark.parametrize("config", ["fewer keys than ranks, tied", "mixture"])
@pytest.mark.skipif(RANKS < 4, reason="four ranks")
def test_other_models_with_a_split_cache(config, ops):
    config = dataclasses.replace(CONFIGS[config], context_axis="cp")
    if not config.experts:  # one head of keys, and so a copy of it on each context rank
        config = dataclasses.replace(config, kv_heads=1)
    check_logits(config, make_mesh((4, RANKS // 4), ("cp", "tp")), ops)


@pytest.mark.skipif(RANKS < 4, reason="four ranks")
def test_a_split_cache_gives_the_same_tokens():
    prompt = tokens_of(TINY, PROMPT)
    want, _ = decoder(TINY, 2, 9)(prompt)
    config = dataclasses.replace(TINY, context_axis="cp")
    mesh = make_mesh((2, 2), ("cp", "tp"))
    weights = llama_weights.from_tensors(config, mesh, tensors_of(config))
    runs = decode.decode(config, mesh, weights, prompt, steps=10, length=PROMPT + 10)
    for run in runs.values():
        np.testing.assert_array_equal(run.tokens, want)
    start, go_on = llama_model.programs(jflux, config, mesh, length=PROMPT + 10, steps=9)
    token, cache = start(weights, prompt)
    shape = (BATCH, 16, TINY.kv_heads, TINY.head_dim)  # 15 positions, rounded up
    assert {a.shape for layer in cache for a in layer[:2]} == {shape}
    assert {a.addressable_shards[0].data.shape[1] for layer in cache for a in layer[:2]} == {8}
    for layer in cache:
        np.testing.assert_array_equal(layer.lengths, [PROMPT] * BATCH)
    go_on(weights, cache, token, np.int32(PROMPT))
    # JAX 0.11 does not donate lengths, which all ranks have.
    assert all(a.is_deleted() for layer in cache for a in layer[:2])


def decoder(config: Config, world: int, steps: int, end: int | None = None):
    """prompt -> what follows it, [BATCH, 1 + steps], and the steps that it took; on jflux."""
    mesh = make_mesh((world,))
    weights = llama_weights.from_tensors(config, mesh, tensors_of(config))
    start, go_on = llama_model.programs(
        jflux, config, mesh, length=PROMPT + steps, steps=steps, end=end
    )

    def run(prompt):
        token, cache = start(weights, prompt)
        rest, taken, _ = go_on(weights, cache, token, np.int32(PROMPT))
        return np.concatenate([np.asarray(token)[:, None], np.asarray(rest)], 1), int(taken)

    return run


def test_any_number_of_ranks_gives_the_same_tokens():
    """And they are the most likely ones of a forward pass over all of them."""
    config = dataclasses.replace(CONFIGS["fewer keys than ranks, tied"], layers=1)
    prompt = tokens_of(config, PROMPT)
    first, *others = (decoder(config, world, 9)(prompt)[0] for world in WORLDS)
    for tokens in others:
        np.testing.assert_array_equal(tokens, first)
    text = np.concatenate([prompt, first], axis=1)
    logits = plain_llama(config, tensors_of(config), text[:, :-1])[:, PROMPT - 1 :]
    np.testing.assert_array_equal(logits.argmax(-1), first)
    assert len({tuple(row) for row in first}) == BATCH  # each prompt has its own


def test_an_end_token_stops():
    """Each sequence at its own, which it then repeats; the loop when all have."""
    prompt = tokens_of(TINY, PROMPT)
    free, taken = decoder(TINY, RANKS, 10)(prompt)
    assert taken == 10
    # A token that only one sequence has, once, so that the others go on.
    values, counts = np.unique(free[:, 2:8], return_counts=True)
    end = next(int(v) for v, c in zip(values, counts, strict=True) if c == (free == v).sum() == 1)
    (row,), (at,) = np.nonzero(free == end)
    want = free.copy()
    want[row, at:] = end
    run = decoder(TINY, RANKS, 10, end)
    stopped, taken = run(prompt)
    np.testing.assert_array_equal(stopped, want)
    assert taken == 10
    stopped, taken = run(np.tile(prompt[row], (BATCH, 1)))
    np.testing.assert_array_equal(stopped, np.tile(want[row], (BATCH, 1)))
    assert taken == at


def test_contestants_of_the_example_agree():
    mesh = make_mesh((RANKS,))
    weights = llama_weights.from_tensors(TINY, mesh, tensors_of(TINY))
    prompt = tokens_of(TINY, PROMPT)
    runs = decode.decode(TINY, mesh, weights, prompt, steps=6, rounds=2)
    assert list(runs) == ["jflux", "XLA"]
    np.testing.assert_array_equal(*(run.tokens for run in runs.values()))
    for run, line in zip(runs.values(), decode.table(runs).splitlines()[1:], strict=True):
        assert run.tokens.shape == (BATCH, 6) and len(run.prefill) == len(run.decode) == 2
        name, *numbers = line.split()
        prefill, each, rate = map(float, numbers)
        assert prefill > 0 and rate == pytest.approx(1e3 * BATCH / each, rel=0.01)


class Wrong:
    """Ops that sum one rank's part of a decoded token's products with another weight than 1."""

    def __init__(self, factor):
        self.factor = factor

    def __getattr__(self, name):
        f = getattr(jflux.reference, name)
        if name != "matmul_all_reduce":
            return f

        def off(x, w, **options):
            factor = jnp.where(jax.lax.axis_index("tp") == 0, self.factor, 1)
            return f((factor * x).astype(x.dtype), w, **options)

        return off


@pytest.mark.parametrize("config", ["grouped", "mixture"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_logits_are_compared(config, dtype, monkeypatch):
    """Rounding is within the tolerance, and a wrong op is not. Of the model with experts some
    tokens can get others of them, in either type."""
    config = dataclasses.replace(CONFIGS[config], dtype=dtype)
    mesh = make_mesh((RANKS,))
    weights = llama_weights.from_tensors(config, mesh, tensors_of(config))
    args = config, mesh, weights, tokens_of(config, PROMPT), tokens_of(config, 8)
    found = decode.compare(*args)
    assert found.judged <= found.tolerance and found.judged <= found.largest
    factor = 1.01 if dtype == jnp.float32 else 2
    monkeypatch.setitem(decode.CONTESTANTS, "XLA", Wrong(factor))
    found = decode.compare(*args)
    assert found.judged > 2 * found.tolerance


@pytest.mark.parametrize("ops", [jflux, jflux.reference], ids=["jflux", "reference"])
def test_of_equal_logits_the_first_is_taken(ops):
    logits = np.zeros((4, 4 * RANKS), np.float32)
    logits[1, [RANKS - 1, 2 * RANKS, 3 * RANKS]] = 1
    logits[2] = -np.inf
    logits[3] = -np.arange(4 * RANKS)[::-1]
    f = jax.shard_map(
        functools.partial(llama_model.greedy, ops), mesh=make_mesh((RANKS,)),
        in_specs=P(None, "tp"), out_specs=P(), check_vma=False,
    )  # fmt: skip
    np.testing.assert_array_equal(jax.jit(f)(logits), logits.argmax(-1))


def test_a_layer_is_two_all_reduces():
    """Beside them a step has the embedding's, and the choice of a token."""
    mesh = make_mesh((RANKS,))
    weights = llama_weights.from_tensors(TINY, mesh, tensors_of(TINY))
    start, go_on = llama_model.programs(jflux.reference, TINY, mesh, length=9, steps=4)
    token, cache = start(weights, tokens_of(TINY, PROMPT))
    text = go_on.lower(weights, cache, token, np.int32(PROMPT)).as_text()
    assert text.count("stablehlo.all_reduce") == 2 * TINY.layers + 1
    assert text.count("stablehlo.all_gather") == 1
    for other in ("reduce_scatter", "all_to_all", "collective"):
        assert f"stablehlo.{other}" not in text


def test_the_cache_is_given_away():
    mesh = make_mesh((RANKS,))
    weights = llama_weights.from_tensors(TINY, mesh, tensors_of(TINY))
    start, go_on = llama_model.programs(jflux, TINY, mesh, length=9, steps=4)
    token, cache = start(weights, tokens_of(TINY, PROMPT))
    assert {a.shape for a in jax.tree.leaves(cache)} == {(BATCH, TINY.kv_heads, 9, TINY.head_dim)}
    go_on(weights, cache, token, np.int32(PROMPT))
    assert all(a.is_deleted() for a in jax.tree.leaves(cache))


def test_random_weights_do_not_depend_on_ranks():
    config = dataclasses.replace(CONFIGS["fewer keys than ranks, tied"], layers=1)

    def drawn(world):
        weights = llama_weights.random(config, make_mesh((world,)), jax.random.key(3))
        weights |= weights.pop("layers")[0]
        heads = np.asarray(weights.pop("qkv"))
        heads = heads.reshape(config.width, config.groups(world), -1, config.head_dim)
        copies = config.groups(world) // config.kv_heads
        for i, name in enumerate("kv", -2):
            found = heads[:, :, i].reshape(config.width, config.kv_heads, copies, -1)
            assert (found == found[:, :, :1]).all()
            weights[name] = found[:, :, 0]
        weights["q"] = heads[:, :, :-2].reshape(config.width, -1)
        return jax.tree.map(np.asarray, weights)

    one, all_ = drawn(1), drawn(RANKS)
    assert one.keys() == all_.keys()
    for name, w in one.items():
        np.testing.assert_allclose(w, all_[name], rtol=1e-6, atol=1e-7, err_msg=name)
        if w.ndim > 1:
            fan_in = w.shape[name == "embed"]
            assert abs(w.mean()) < 0.02 and abs(w.std() * fan_in**0.5 - 1) < 0.1, name


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ("fewer keys than ranks, tied", jnp.float32),
        ("fewer keys than ranks, tied", jnp.bfloat16),
        ("mixture", jnp.bfloat16),
        ("qwen3, an MLP, experts that do not sum to 1", jnp.bfloat16),
    ],
)
def test_weights_from_safetensors(config, dtype, tmp_path):
    """In one file, or in several that an index lists, they are what they were; of each rank."""
    save_file = pytest.importorskip("safetensors.numpy").save_file
    config = dataclasses.replace(CONFIGS[config], dtype=dtype)
    tensors = {k: np.asarray(v, dtype) for k, v in tensors_of(config).items()}
    mesh = make_mesh((RANKS,))
    want = llama_weights.from_tensors(config, mesh, tensors)
    save_file(tensors, tmp_path / "all.safetensors")
    files = {"a.safetensors": list(tensors)[::2], "b.safetensors": list(tensors)[1::2]}
    for file, names in files.items():
        save_file({name: tensors[name] for name in names}, tmp_path / file)
    listed = {"weight_map": {name: file for file, names in files.items() for name in names}}
    (tmp_path / "index.json").write_text(json.dumps(listed))
    alone, several = tmp_path / "alone", tmp_path / "several"
    for folder, names in ((alone, ["all"]), (several, ["a", "b"])):
        folder.mkdir()
        for name in names:
            shutil.copy(tmp_path / f"{name}.safetensors", folder)
    (several / "model.safetensors.index.json").write_text(json.dumps(listed))
    (several / "of_another_model.safetensors").write_text("")  # which the index does not list
    for given in (["all.safetensors"], ["a.safetensors", "b.safetensors"], ["index.json"],
                  ["alone"], ["several"]):  # fmt: skip
        opened = jflux.nn.open_safetensors([tmp_path / name for name in given])
        got = llama_weights.from_tensors(config, mesh, opened)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert a.dtype == dtype and a.sharding == b.sharding
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def in_8_bits(tensors):
    """A file's tensors, of which those of layers' products are in 8 bits, as DeepSeek-V3's and
    Qwen3's are; and the same in float32."""
    stored, meant = {}, {}
    for name, tensor in tensors.items():
        stored[name] = meant[name] = tensor
        if "_proj" in name:
            scaled = jflux.quantize(jnp.asarray(tensor), llama_weights.EIGHT_BITS,
                                    block=(128, 128), power_of_two=True)  # fmt: skip
            dtype = np.float32 if "mlp" in name else jnp.bfloat16  # powers of two are the same
            stored[name] = np.asarray(scaled.values)
            stored[f"{name}_scale_inv"] = np.asarray(scaled.scale).astype(dtype)
            meant[name] = np.asarray(scaled.dequantize())
    return stored, meant


EIGHT_BITS = dataclasses.replace(
    TINY, layers=1, width=256, hidden=512, heads=4, kv_heads=2, head_size=128, head_norms=True
)


@pytest.mark.parametrize("ranks", [2, 4])
def test_weights_in_8_bits_from_safetensors(ranks, tmp_path):
    """They stay so, as the config of such a model says, and products quantise activations."""
    save_file = pytest.importorskip("safetensors.numpy").save_file
    stored, meant = in_8_bits(tensors_of(EIGHT_BITS))
    save_file(stored, tmp_path / "all.safetensors")
    said = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json_of_qwen3(EIGHT_BITS) | {"quantization_config": said}))
    read = llama_weights.config_from_json(file)
    assert dataclasses.replace(read, dtype=EIGHT_BITS.dtype) == EIGHT_BITS
    mesh = make_mesh((ranks,))
    opened = jflux.nn.open_safetensors([tmp_path / "all.safetensors"])
    got = llama_weights.from_tensors(EIGHT_BITS, mesh, opened)
    want = llama_weights.from_tensors(EIGHT_BITS, mesh, meant)
    (layer,), (plain,) = got["layers"], want["layers"]
    for name in ("qkv", "o", "gate", "up", "down"):
        assert isinstance(layer[name], jflux.Scaled)
        assert layer[name].values.sharding == plain[name].sharding
        np.testing.assert_array_equal(layer[name].dequantize(), plain[name])

    text = np.random.default_rng(1).integers(0, EIGHT_BITS.vocab, (BATCH, PROMPT))
    logits = decode.logits_program(jflux, EIGHT_BITS, mesh, prompt=3, length=PROMPT)
    one, other = (np.asarray(logits(weights, jnp.asarray(text))) for weights in (got, want))
    error = np.linalg.norm(one - other) / np.linalg.norm(other)
    assert 1e-4 < error < 0.1  # activations are in 8 bits too


def test_weights_in_8_bits_that_ranks_split_otherwise():
    """Where a rank has a part of a square, weights are what they mean."""
    config = dataclasses.replace(EIGHT_BITS, hidden=384)
    stored, meant = in_8_bits(tensors_of(config))
    mesh = make_mesh((2,))
    got, want = (llama_weights.from_tensors(config, mesh, t) for t in (stored, meant))
    for name in ("gate", "up", "down"):
        np.testing.assert_array_equal(got["layers"][0][name], want["layers"][0][name])
    assert isinstance(got["layers"][0]["qkv"], jflux.Scaled)
    name = "model.layers.0.mlp.down_proj.weight"
    wrong = {f"{name}_scale_inv": np.ones((1, 1), np.float32)}
    with pytest.raises(ValueError, match=r"down_proj.weight_scale_inv has the shape \(1, 1\)"):
        llama_weights.from_tensors(config, mesh, stored | wrong)
    del stored[f"{name}_scale_inv"]
    with pytest.raises(ValueError, match="is in 8 bits, and there is no"):
        llama_weights.from_tensors(config, mesh, stored)


def test_tensors_that_do_not_fit_are_named():
    tensors, mesh = tensors_of(TINY), make_mesh((1,))
    with pytest.raises(
        ValueError, match=r"layers/1/up has .* model.layers.1.mlp.up_proj.weight \(2, 3\)"
    ):
        wrong = {"model.layers.1.mlp.up_proj.weight": np.zeros((2, 3))}
        llama_weights.from_tensors(TINY, mesh, tensors | wrong)
    del tensors["lm_head.weight"]
    with pytest.raises(ValueError, match="has no tensor lm_head.weight"):
        llama_weights.from_tensors(TINY, mesh, tensors)


def test_without_safetensors_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ModuleNotFoundError, match="pip install safetensors"):
        jflux.nn.open_safetensors([Path("x.safetensors")])


@pytest.mark.parametrize(
    "changes, ranks, error",
    [
        ({"heads": 12, "kv_heads": 4, "width": 48}, 8, "heads=12 must divide by ranks=8"),
        ({"heads": 24, "kv_heads": 6, "width": 48}, 4, "kv_heads=6 must divide by ranks=4, or"),
        ({"hidden": 100}, 8, "hidden=100 must divide"),
        ({"vocab": 250}, 8, "vocab=250 must divide"),
        ({"kv_heads": 3}, 1, "config.kv_heads=3"),
        ({"head_size": 5}, 1, "config.head_size=5 by 2"),
        ({"experts": 4, "experts_per_token": 2, "expert_hidden": 20}, 8, "expert_hidden=20 must"),
        ({"experts": 4, "experts_per_token": 5}, 1, "config.experts_per_token=5 must be from 1"),
    ],
)
def test_models_that_cannot_be_split(changes, ranks, error):
    with pytest.raises(ValueError, match=error):
        llama_model.check(dataclasses.replace(TINY, **changes), ranks)


def test_prompts_that_cannot_be_split():
    llama_model.check(TINY, 2, 4)
    with pytest.raises(ValueError, match="a rank's 8 heads of queries must divide by context_rank"):
        llama_model.check(TINY, 2, 3)
    with pytest.raises(ValueError, match="and its 3 of keys too, or that by them"):
        llama_model.check(dataclasses.replace(TINY, heads=12, kv_heads=3, width=48), 1, 4)


def test_sizes_of_the_published_models():
    """Parameters as the papers' models have them, in thousand million: 6.74, 68.98, 46.70, 8.19 and
    30.53."""
    for name, want in (
        ("llama-2-7b", 6_738_415_616),
        ("llama-2-70b", 68_976_648_192),
        ("mixtral-8x7b", 46_702_792_704),
        ("qwen3-8b", 8_190_735_360),
        ("qwen3-30b-a3b", 30_532_122_624),
    ):
        wanted = llama_model.shapes(llama_model.CONFIGS[name], 4)
        sizes = jax.tree.leaves(wanted, is_leaf=lambda s: isinstance(s, tuple))
        assert sum(int(np.prod(shape)) for shape in sizes) == want


def json_of(config: Config) -> dict:
    """As in the `config.json` beside published weights."""
    return {
        "model_type": "llama", "num_hidden_layers": config.layers, "hidden_size": config.width,
        "intermediate_size": config.hidden, "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads, "vocab_size": config.vocab,
        "rms_norm_eps": config.epsilon, "rope_scaling": None,
    }  # fmt: skip


def test_a_config_json(tmp_path):
    config, file = llama_model.CONFIGS["llama-2-70b"], tmp_path / "config.json"
    file.write_text(json.dumps(json_of(config)))
    assert llama_weights.config_from_json(file) == config
    file.write_text(json.dumps(json_of(config) | {"rope_scaling": {"rope_type": "llama3"}}))
    with pytest.raises(ValueError, match="rope_scaling not as in Llama 2"):
        llama_weights.config_from_json(file)
    config = llama_model.CONFIGS["mixtral-8x7b"]
    said = json_of(config) | {
        "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2,
        "rope_theta": 1e6, "sliding_window": None,
    }  # fmt: skip
    file.write_text(json.dumps(said))
    assert llama_weights.config_from_json(file) == config
    del said["num_local_experts"]
    file.write_text(json.dumps(said))
    with pytest.raises(ValueError, match="has no 'num_local_experts'"):
        llama_weights.config_from_json(file)


def json_of_qwen3(config: Config, **changes) -> dict:
    """As in the `config.json` beside a Qwen3, dense or MoE."""
    said = json_of(config) | {
        "model_type": "qwen3_moe" if config.experts else "qwen3", "attention_bias": False,
        "head_dim": config.head_dim, "hidden_act": "silu", "max_window_layers": config.layers,
        "rope_theta": config.theta, "sliding_window": 4096, "use_sliding_window": False,
        "tie_word_embeddings": config.tied,
    }  # fmt: skip
    if config.experts:
        said |= {
            "num_experts": config.experts, "num_experts_per_tok": config.experts_per_token,
            "moe_intermediate_size": config.expert_hidden, "norm_topk_prob": config.normalized,
            "decoder_sparse_step": 1, "mlp_only_layers": list(config.mlp_layers),
        }  # fmt: skip
    return said | changes


def test_config_jsons_of_qwen3(tmp_path):
    file = tmp_path / "config.json"

    def read(config, **changes):
        said = json_of_qwen3(config, **changes)
        file.write_text(json.dumps({k: v for k, v in said.items() if v != "left out"}))
        return llama_weights.config_from_json(file)

    dense, mixture = (llama_model.CONFIGS[name] for name in ("qwen3-8b", "qwen3-30b-a3b"))
    assert read(dense) == dense
    assert read(mixture) == mixture
    # What a config says of the widths of heads, by saying nothing, depends on its kind.
    assert read(dense, hidden_size=2048, head_dim="left out").head_dim == 128
    assert read(mixture, head_dim="left out").head_dim == 64
    # Which layers have a mixture: the last of every three, but for the sixth.
    some = read(mixture, num_hidden_layers=7, decoder_sparse_step=3, mlp_only_layers=[5])
    assert [i for i in range(7) if some.is_mixture(i)] == [2]
    assert (some.units(2), some.units(5)) == (768, 6144)
    assert not read(mixture, norm_topk_prob="left out").normalized
    named_anew = {"num_experts": "left out", "num_local_experts": 128}
    assert read(mixture, **named_anew) == mixture
    for config, changes, error in (
        (dense, {"use_sliding_window": True}, "sliding_window not as in .* Qwen3"),
        (dense, {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types not as"),
        (dense, {"attention_bias": True}, "attention_bias not as"),
        (dense, {"head_dim": 0.5}, "no number of head_dim"),
        (mixture, {"num_experts": "left out"}, "has no 'num_local_experts'"),
        (mixture, {"moe_intermediate_size": "left out"}, "has no 'moe_intermediate_size'"),
        (mixture, {"moe_intermediate_size": 0}, "no number of expert_hidden"),
        (mixture, {"decoder_sparse_step": 0}, "no number of mixture_every"),
        (mixture, {"mlp_only_layers": 3}, "is no config of a Llama"),
        (mixture, {"mlp_only_layers": [0, "1"]}, "'1' is no number of a layer"),
    ):
        with pytest.raises(ValueError, match=error):
            read(config, **changes)


@pytest.mark.parametrize(
    "changes, error",
    [
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_scaling not as in Llama 2"),
        ({"model_type": "mistral", "sliding_window": 4096}, "model_type, sliding_window not as"),
        ({"attention_bias": True}, "attention_bias not as"),
        ({"quantization_config": {"bits": 4}}, "quantization_config not as"),
        ({"hidden_size": None}, "has no 'hidden_size'"),
    ],
)
def test_models_that_are_not_computed(changes, error, tmp_path):
    said = json_of(TINY) | changes
    file = tmp_path / "config.json"
    file.write_text(json.dumps({key: value for key, value in said.items() if value is not None}))
    with pytest.raises(ValueError, match=error):
        llama_weights.config_from_json(file)


@pytest.fixture
def folder(tmp_path):
    """A model's files, as they are published."""
    save_file = pytest.importorskip("safetensors.numpy").save_file
    save_file(tensors_of(TINY), tmp_path / "x.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(json_of(TINY)))
    return tmp_path


@pytest.fixture
def script(monkeypatch):
    """Runs the example with such arguments."""
    monkeypatch.setattr(jax, "devices", lambda *_: list(make_mesh((RANKS,)).devices.flat))

    def run(arguments):
        monkeypatch.setattr(sys, "argv", ["decode.py", *arguments.split()])
        decode.main()

    return run


@pytest.mark.parametrize(
    "arguments, error",
    [
        ("--weights {0}/y.safetensors", "no file .*y.safetensors; give all of the model's"),
        ("--weights {0}/empty --model {0}/config.json", "no [*].safetensors in .*empty; give the"),
        ("--weights {0}/empty", "no .*empty/config.json; download it, or say what --model"),
        ("--weights {0} --model llama-2-7b", "is not of --model llama-2-7b; leave --model out"),
        ("--weights {0}/config.json", "lists no files; give a [*].safetensors.index.json"),
        (
            "--weights {0}/text --model {0}/config.json",
            "no safetensors file .*download it again",
        ),
        ("--weights {0} --layers 3", "the checkpoint has no tensor model.layers.2"),
        ("--model {0}/text", "is no JSON file .*download it again"),
        ("--model llama-9", "no file llama-9; --model is one of"),
        ("--weights {0} --prompt 1,x", "give comma-separated tokens less than"),
        ("--weights {0} --prompt 1,-2", "give comma-separated tokens less than"),
        ("--weights {0} --prompt 99999", "give comma-separated tokens less than"),
        ("--weights {0} --prompt 1,2 --steps 7 --positions 8", "no room for 2 tokens .* 7 steps"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(arguments, error, folder, script):
    (folder / "empty").mkdir()
    (folder / "text").write_text("not what it should be")
    with pytest.raises(SystemExit, match=f"^decode.py: .*{error}") as raised:
        script(arguments.format(folder))
    assert "\n" not in str(raised.value)


def test_the_script_fails_if_logits_differ(folder, script, capsys, monkeypatch):
    monkeypatch.setitem(decode.CONTESTANTS, "XLA", Wrong(float("nan")))
    with pytest.raises(SystemExit, match="^jflux and XLA disagree$"):
        script(f"--weights {folder} --layers 1 --dtype float32 --steps 2 --rounds 1")
    assert "tokens: " in capsys.readouterr().out


@pytest.mark.skipif(RANKS < 4, reason="four ranks")
def test_the_script_splits_the_cache(folder, script, capsys, monkeypatch):
    """And the prompt fills it, but for the steps."""
    monkeypatch.setattr(jax, "devices", lambda *_: list(make_mesh((4,)).devices.flat))
    monkeypatch.setattr(jax, "device_count", lambda *_: 4)
    args = f"--weights {folder} --layers 1 --dtype float32 --steps 3 --rounds 1 --positions 14"
    last = []
    for more in ("", " --context-parallel 2"):
        script(args + more)
        out = capsys.readouterr().out
        assert "batch 1, prompt 11, 3 tokens, 14 positions" in out
        last.append(out.splitlines()[-1])
    assert "float32, 2 (cp) x 2 (tp)" in out
    assert last[0] == last[1]


@pytest.mark.skipif(RANKS < 3, reason="any model can be split so")
def test_how_many_ranks_would_do_is_said(folder, script, monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda *_: list(make_mesh((3,)).devices.flat))
    with pytest.raises(SystemExit, match="must divide.*; --ranks 2 would do"):
        script(f"--weights {folder}")


@pytest.mark.parametrize(
    "arguments, error",
    [
        ("--context-parallel 5 --ranks 1", "--context-parallel 5 must divide 1 ranks"),
        ("--positions 64", "--prompt-length must be at least 1, and --positions more than --steps"),
    ],
)
def test_arguments_that_do_not_fit(arguments, error, script, capsys):
    with pytest.raises(SystemExit):
        script(arguments)
    assert error in capsys.readouterr().err


def test_tensors_of_another_kind_of_model_are_named():
    tensors = tensors_of(TINY)
    mesh = make_mesh((1,))
    llama_weights.from_tensors(TINY, mesh, tensors | {"model.rotary_emb.inv_freq": np.zeros(4)})
    odd = {"model.layers.0.self_attn.q_norm.weight": np.zeros(4)}
    with pytest.raises(ValueError, match="nothing is made of .* model.layers.0.self_attn.q_norm"):
        llama_weights.from_tensors(TINY, mesh, tensors | odd)


def test_the_script_decodes_with_weights_from_files(folder, script, capsys):
    config = dataclasses.replace(TINY, layers=1)
    tensors, prompt = tensors_of(TINY), [1, 50, 99, 7]  # it has another layer, to leave out
    tokens = ",".join(map(str, prompt))
    script(f"--weights {folder} --layers 1 --dtype float32 --steps 3 --prompt {tokens} --rounds 1")
    out = capsys.readouterr().out
    line = r"logits on the same tokens: at most (\S+) standard deviations apart, tolerance (\S+)$"
    difference, tolerance = re.search(line, out, re.M).groups()
    assert float(difference) < float(tolerance) < 1e-3
    for _ in range(3):
        logits = plain_llama(config, tensors, np.array([prompt]))
        prompt.append(int(logits[0, -1].argmax()))
    assert out.splitlines()[-1] == f"tokens: {','.join(map(str, prompt[4:]))}"


@pytest.mark.parametrize("name", ["qwen3", "qwen3, an MLP, experts that do not sum to 1"])
def test_the_script_decodes_with_qwen3_from_a_folder(name, script, tmp_path, capsys):
    save_file = pytest.importorskip("safetensors.numpy").save_file
    config, prompt = CONFIGS[name], [1, 50, 99, 7]
    tensors = tensors_of(config)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(json_of_qwen3(config)))
    tokens = ",".join(map(str, prompt))
    script(f"--weights {tmp_path} --dtype float32 --steps 3 --prompt {tokens} --rounds 1")
    for _ in range(3):
        logits = plain_llama(config, tensors, np.array([prompt]))
        prompt.append(int(logits[0, -1].argmax()))
    assert capsys.readouterr().out.splitlines()[-1] == f"tokens: {','.join(map(str, prompt[4:]))}"


def test_a_qwen3_is_not_taken_for_another_model():
    """Its tensors have names that the others' do not."""
    config = CONFIGS["qwen3 mixture"]
    tensors, mesh = tensors_of(config), make_mesh((1,))
    with pytest.raises(ValueError, match="no tensor model.layers.0.block_sparse_moe"):
        other = dataclasses.replace(config, head_norms=False)
        llama_weights.from_tensors(other, mesh, tensors)
    odd = {"model.layers.0.mlp.shared_expert_gate.weight": np.zeros((1, 64))}
    with pytest.raises(ValueError, match="nothing is made of .*shared_expert_gate"):
        llama_weights.from_tensors(config, mesh, tensors | odd)
    wrong = {"model.layers.1.self_attn.k_norm.weight": np.zeros(config.head_dim + 1)}
    with pytest.raises(ValueError, match="layers/1/k_norm has the shape"):
        llama_weights.from_tensors(config, mesh, tensors | wrong)


# ---- The service ---------------------------------------------------------------------------------


def requests(config, count, seed=0):
    """Prompts of 1 to 20 tokens, and answers of 1 to 9."""
    rng = np.random.default_rng(seed)
    return [
        serve.Request(rng.integers(config.vocab, size=rng.integers(1, 21)).tolist(), most)
        for most in rng.integers(1, 10, count).tolist()
    ]


@pytest.mark.parametrize("config", ["grouped", "fewer keys than ranks, tied", "qwen3 mixture"])
@pytest.mark.parametrize("ops", [jflux, jflux.reference], ids=["jflux", "reference"])
def test_requests_are_answered_as_each_alone(config, ops):
    """Whoever is beside them, in whichever pages: more requests than slots, and than have pages."""
    config = CONFIGS[config]
    mesh = make_mesh((min(4, RANKS),))
    weights = llama_weights.from_tensors(config, mesh, tensors_of(config))
    shape = serve.Shape(slots=3, chunk=8, page=4, pages=14, positions=30)
    service = serve.Service(ops, config, mesh, weights, shape)
    given = requests(config, 7)
    for request in given:
        service.add(request)
    service.run()
    assert [len(r.answer) for r in given] == [r.most for r in given]
    assert service.read == sum(len(r.prompt) for r in given)
    assert service.written == sum(r.most for r in given)
    assert sorted(service._free) == list(range(shape.pages)) and not any(service._slots)
    for request in given:
        text = np.array([request.prompt + request.answer[:-1]])
        logits = plain_llama(config, tensors_of(config), text)[0, len(request.prompt) - 1 :]
        np.testing.assert_array_equal(logits.argmax(-1), request.answer)


def test_an_answer_ends_at_its_token_and_what_has_no_room_is_refused():
    config, mesh = CONFIGS["grouped"], make_mesh((min(2, RANKS),))
    weights = llama_weights.from_tensors(config, mesh, tensors_of(config))
    shape = serve.Shape(slots=2, chunk=16, page=8, pages=8, positions=32)
    whole, ended = ([r] for r in (serve.Request([3, 1, 4], 8), serve.Request([3, 1, 4], 8)))
    for requests_, end in ((whole, None), (ended, "second")):
        end = whole[0].answer[2] if end else None
        service = serve.Service(jflux, config, mesh, weights, shape, end=end)
        service.add(requests_[0])
        service.run()
    until = whole[0].answer.index(whole[0].answer[2]) + 1
    assert len(whole[0].answer) == 8 and ended[0].answer == whole[0].answer[:until]
    ended[0].answer[-1] = (ended[0].answer[-1] + 1) % config.vocab
    with pytest.raises(SystemExit, match="standard deviations below the best"):
        serve.check_alone(config, mesh, weights, ended)
    for prompt, most in (([], 3), ([1] * 30, 3), ([1], 0)):
        with pytest.raises(ValueError, match="do not fit 32 positions"):
            service.add(serve.Request(prompt, most))


def test_samples_are_of_the_softmax():
    """Of logits that are split over ranks: frequencies, the most likely ones alone, and none."""
    world, draws = min(2, RANKS), 4000
    logits = jnp.log(jnp.array([0.4, 0.05, 0.25, 0.1, 0.15, 0.05]))

    def drawn(temperature, top_k):
        def f(logits):
            rows = jnp.broadcast_to(logits, (draws, *logits.shape))
            t = jnp.full(draws, temperature)
            return serve.sample(jflux.reference, rows, t, jax.random.key(3), top_k)

        run = llama_model.per_rank(f, make_mesh((world,)), P("tp"), P())
        return np.bincount(np.asarray(jax.jit(run)(logits)), minlength=6) / draws

    np.testing.assert_allclose(drawn(1.0, 0), np.exp(logits), atol=0.03)
    squares = np.exp(2 * logits)
    np.testing.assert_allclose(drawn(0.5, 0), squares / squares.sum(), atol=0.03)
    np.testing.assert_allclose(drawn(1.0, 2), np.array([0.4, 0, 0.25, 0, 0, 0]) / 0.65, atol=0.03)
    np.testing.assert_array_equal(drawn(0.0, 0), [1, 0, 0, 0, 0, 0])


@pytest.mark.parametrize("sampled", [False, True])
def test_the_script_serves(sampled, monkeypatch, capsys):
    more = ["--temperature", "0.8", "--top-k", "5"] if sampled else ["--checked", "1"]
    sizes = ["--layers", "1", "--requests", "4", "--prompt", "20", "--answer", "6", "--pages", "4"]
    monkeypatch.setattr(sys, "argv", ["serve.py", *sizes, *more])
    serve.main()
    lines = capsys.readouterr().out.splitlines()[1:]
    assert lines[0] == "4 requests; 4 slots, 4 pages of 16 positions"
    steps = [line.split()[1] for line in lines[2:4]]
    assert [line.split()[0] for line in lines[2:4]] == ["jflux", "XLA"] and len(set(steps)) == 1
    assert lines[4:] == ([] if sampled else ["the answers to 1 requests are those of each alone"])
