"""Weights for llama_model.py, random or from safetensors files, each made where it belongs."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from llama_model import AXIS, HEAD_NORMS, Config, Weights, check, shapes, specs
from tqdm import tqdm

import jflux.nn
from jflux.nn import Tensor

EIGHT_BITS, SCALES, BLOCK = jnp.float8_e4m3fn, "_scale_inv", 128


def random(config: Config, mesh: Mesh, key: jax.Array) -> Weights:
    """Normal random numbers over the root of a product's length; norms are 1. Each device makes its
    own part, and the numbers are the same over any number of ranks, but for their last bits."""
    ranks = mesh.shape[AXIS]
    check(config, ranks)
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs(config))
    wanted = shapes(config, ranks)
    layers = list(zip(wanted.pop("layers"), shardings.pop("layers"), strict=True))
    # One program for all layers of a kind.
    kinds = {config.is_mixture(i): _drawn(config, ranks, *layers[i]) for i in range(config.layers)}
    rest = _drawn(config, ranks, wanted, shardings)
    keys = jax.random.split(key, config.layers + 1)
    drawn = [kinds[config.is_mixture(i)](k) for i, k in enumerate(keys[1:])]
    return rest(keys[0]) | {"layers": drawn}


def _drawn(config: Config, ranks: int, wanted: Weights, shardings: Weights) -> Any:
    def normal(key, shape, length):
        return (jax.random.normal(key, shape) * length**-0.5).astype(config.dtype)

    def draw(key):
        found = {}
        for i, (name, shape) in enumerate(wanted.items()):
            each = jax.random.fold_in(key, i)
            if len(shape) == 1:
                found[name] = jnp.ones(shape, config.dtype)
            elif name == "qkv":
                d, dim, groups = config.width, config.head_dim, config.groups(ranks)
                for_q, for_kv = jax.random.split(each)
                q = normal(for_q, (d, config.heads * dim), d).reshape(d, groups, -1, dim)
                kv = normal(for_kv, (d, config.kv_heads * 2 * dim), d).reshape(d, -1, 2, dim)
                kv = jnp.repeat(kv, groups // config.kv_heads, axis=1)
                found[name] = jnp.concatenate([q, kv], axis=2).reshape(shape)
            else:
                found[name] = normal(each, shape, shape[-1 if name in ("embed", "head") else -2])
        return found

    return jax.jit(draw, out_shardings=shardings)


# Of a layer, in the files; q_proj, k_proj and v_proj of them make `qkv`.
NORMS = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
MLP = {"gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj"}
#: Of an expert of a Mixtral; one of a Qwen3 has the names of an MLP.
EXPERT = {"gate": "w1", "up": "w3", "down": "w2"}


def names_of(config: Config, ranks: int) -> dict[str, Tensor]:
    """What each weight is made of. Tensors of products are [out, in]."""
    groups = config.groups(ranks)
    found = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
    names = {ours: Tensor(f"{theirs}.weight") for ours, theirs in found.items()}
    for i in range(config.layers):
        layer = {ours: Tensor(f"{theirs}.weight") for ours, theirs in NORMS.items()}
        layer |= {n: Tensor(f"self_attn.{n}.weight") for n in HEAD_NORMS}
        q, k, v = (Tensor(f"self_attn.{x}_proj.weight") for x in "qkv")
        kv = (one.split(0, config.kv_heads).repeat(0, groups // config.kv_heads) for one in (k, v))
        parts = [q.split(0, groups), *kv]
        layer["qkv"] = Tensor.concatenate(parts, axis=1).merge(0).T
        layer["o"] = Tensor("self_attn.o_proj.weight").T
        mixture = "mlp" if config.head_norms else "block_sparse_moe"
        layer["router"] = Tensor(f"{mixture}.gate.weight").T
        for ours, theirs in MLP.items():
            layer[ours] = Tensor(f"{theirs}.weight").T
            if config.is_mixture(i):
                of_expert = f"{ours}_proj" if config.head_norms else EXPERT[ours]
                each = Tensor(f"{mixture}.experts.{{e}}.{of_expert}.weight")
                layer[ours] = each.T.stack(e=config.experts)
        within = f"model.layers.{i}."
        names |= {f"layers/{i}/{ours}": one.within(within) for ours, one in layer.items()}
    return names


def like(config: Config, mesh: Mesh, tensors: Mapping[str, Any]) -> Weights:
    """Shapes, types and shardings. Products whose tensors have scales, and of which each rank has
    whole squares, stay in 8 bits, as `jflux.Scaled`; those of experts become `config.dtype`."""
    ranks = mesh.shape[AXIS]

    def leaf(path: Any, shape: tuple[int, ...], spec: P) -> Any:
        def array(shape: Sequence[int], dtype: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

        keys = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
        if keys[0] != "layers" or len(shape) != 2 or keys[-1] == "router":
            return array(shape, config.dtype)
        of_attention = {"o": ["self_attn.o_proj"], "qkv": [f"self_attn.{x}_proj" for x in "qkv"]}
        names = of_attention.get(keys[-1]) or [MLP[keys[-1]]]
        parts = [n // (ranks if axis else 1) for n, axis in zip(shape, spec, strict=True)]
        parts += [config.head_dim] if keys[-1] == "qkv" else []
        stored = [f"model.layers.{keys[1]}.{name}.weight{SCALES}" in tensors for name in names]
        if not all(stored) or any(n % BLOCK for n in parts):
            return array(shape, config.dtype)
        scales = [n // BLOCK for n in shape]
        return jflux.Scaled(array(shape, EIGHT_BITS), array(scales, jnp.float32))

    is_shape = lambda one: isinstance(one, tuple)  # noqa: E731
    return jax.tree_util.tree_map_with_path(
        leaf, shapes(config, ranks), specs(config), is_leaf=is_shape
    )


def from_tensors(config: Config, mesh: Mesh, tensors: Mapping[str, Any]) -> Weights:
    """Weights under the names that Hugging Face gives to those of a Llama, Mixtral or Qwen3. A
    rank's part alone is read of each; layers beyond `config.layers` are left out.

    Args:
      tensors: what `jflux.nn.open_safetensors` returns, or NumPy arrays.

    Raises:
      ValueError: as `check` and `jflux.nn.load` do, before any is read.
    """
    check(config, mesh.shape[AXIS])
    unused = ["*.rotary_emb.inv_freq", *["lm_head.weight"] * config.tied]
    for name in tensors:
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        unused += [name] * (layer is not None and int(layer[1]) >= config.layers)
    bar = functools.partial(tqdm, desc="reading weights", delay=2)
    names = names_of(config, mesh.shape[AXIS])
    return jflux.nn.load(tensors, like(config, mesh, tensors), names, unused=unused, progress=bar)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        read = json.loads(path.read_text())
    except (ValueError, RecursionError) as e:  # not UTF-8, or not JSON
        raise ValueError(f"{path} is no JSON file ({e}); download it again") from None
    if not isinstance(read, dict):
        raise ValueError(f"{path} is no config or index of Hugging Face's")
    return read


def config_from_json(path: Path) -> Config:
    """Of the `config.json` that Hugging Face keeps beside the weights of a Llama, Mixtral or Qwen3.

    Raises:
      ValueError: for a model that differs in more than sizes from Llama 2, Mixtral, Qwen3 or
        Qwen3-MoE.
    """
    said = _read_json(path)
    try:
        return _config_of(said, path)
    except KeyError as e:
        raise ValueError(f"{path} has no {e}; give the config.json of a Llama") from None
    except (AttributeError, TypeError, ZeroDivisionError, OverflowError) as e:
        raise ValueError(f"{path} is no config of a Llama ({e}); download it again") from None


_MIXTURES = ("mixtral", "qwen3_moe")


def _is_of_other_scales(said: Any) -> bool:
    """Whether weights are quantised in another way than by a scale for each square."""
    if not said:
        return False
    kind, blocks = said.get("quant_method"), said.get("weight_block_size")
    return (kind, blocks) != ("fp8", [BLOCK, BLOCK])


def _config_of(said: dict[str, Any], path: Path) -> Config:
    rope = said.get("rope_scaling") or said.get("rope_parameters") or {}
    width, heads = said["hidden_size"], said["num_attention_heads"]
    kind = said.get("model_type", "llama")
    qwen = kind in ("qwen3", "qwen3_moe")
    # What a config of each kind means where it says nothing.
    head_dim = said.get("head_dim") or (128 if kind == "qwen3" else width // heads)
    slides = said.get("use_sliding_window") if qwen else said.get("sliding_window")
    odd = {
        "model_type": kind not in ("llama", *_MIXTURES, "qwen3"),
        "head_dim": not qwen and head_dim != width // heads,
        "hidden_act": said.get("hidden_act", "silu") != "silu",
        "rope_scaling": rope.get("rope_type", rope.get("type", "default")) != "default",
        "partial_rotary_factor": said.get("partial_rotary_factor", 1) != 1,
        "attention_bias": said.get("attention_bias"),
        "mlp_bias": said.get("mlp_bias"),
        "sliding_window": slides,
        "layer_types": not set(said.get("layer_types") or ()) <= {"full_attention"},
        "quantization_config": _is_of_other_scales(said.get("quantization_config")),
    }
    if any(odd.values()):
        raise ValueError(
            f"{path}: {', '.join(k for k, v in odd.items() if v)} not as in Llama 2, Mixtral or "
            "Qwen3, which are all that llama_model.py computes; take such a model"
        )
    config = Config(
        layers=said["num_hidden_layers"],
        width=width,
        hidden=said["intermediate_size"],
        heads=heads,
        kv_heads=said.get("num_key_value_heads") or heads,
        vocab=said["vocab_size"],
        epsilon=said.get("rms_norm_eps", 1e-6),
        theta=said.get("rope_theta", rope.get("rope_theta", 10_000.0)),
        tied=said.get("tie_word_embeddings", False),
        head_size=0 if head_dim == width // heads else head_dim,
        head_norms=qwen,
    )
    if kind in _MIXTURES:
        config = dataclasses.replace(config, **_mixture_of(said))
    sizes = ["layers", "width", "hidden", "heads", "kv_heads", "vocab", "head_dim"]
    sizes += ["experts", "experts_per_token"] if kind in _MIXTURES else []
    sizes += ["expert_hidden", "mixture_every"] if kind == "qwen3_moe" else []
    for name in sizes:
        size = getattr(config, name)
        if type(size) is not int or not 0 < size < 1 << 31:
            raise ValueError(f"{path}: {str(size)[:50]!r} is no number of {name}")
    if (width % heads and not config.head_size) or heads % config.kv_heads:
        raise ValueError(f"{path}: {width=}, {heads=} and {config.kv_heads=} do not divide")
    if odd := [i for i in config.mlp_layers if type(i) is not int]:
        raise ValueError(f"{path}: {str(odd[0])[:50]!r} is no number of a layer")
    for number in (config.epsilon, config.theta):
        if not isinstance(number, int | float) or not 0 < number < float("inf"):
            raise ValueError(f"{path}: {number!r} is no epsilon or theta")
    return config


def _mixture_of(said: dict[str, Any]) -> dict[str, Any]:
    """Fields of the config of a mixture."""
    k = {"experts_per_token": said["num_experts_per_tok"]}
    if said["model_type"] == "mixtral":
        return k | {"experts": said["num_local_experts"]}
    # Newer files have Mixtral's name for it.
    experts = said["num_experts"] if "num_experts" in said else said["num_local_experts"]
    return k | {
        "experts": experts,
        "expert_hidden": said["moe_intermediate_size"],
        "normalized": bool(said.get("norm_topk_prob", False)),
        "mixture_every": said.get("decoder_sparse_step", 1),
        "mlp_layers": tuple(said.get("mlp_only_layers") or ()),
    }
