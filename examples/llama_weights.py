"""Weights for llama_model.py, random or from safetensors files, each made where it belongs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from llama_model import AXIS, Config, Weights, check, shapes, specs

Index = tuple[slice, ...]


def random(config: Config, mesh: Mesh, key: jax.Array) -> Weights:
    """Normal random numbers over the root of a product's length; norms are 1. Each device makes its
    own part, and the numbers are the same over any number of ranks, but for their last bits."""
    ranks = mesh.shape[AXIS]
    check(config, ranks)
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs(config))
    wanted = shapes(config, ranks)
    layer = _drawn(config, ranks, wanted.pop("layers")[0], shardings.pop("layers")[0])
    rest = _drawn(config, ranks, wanted, shardings)
    keys = jax.random.split(key, config.layers + 1)
    return rest(keys[0]) | {"layers": [layer(k) for k in keys[1:]]}


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
                found[name] = normal(each, shape, shape[name in ("embed", "head")])
        return found

    return jax.jit(draw, out_shardings=shardings)


NAMES = {
    "attention_norm": "input_layernorm",
    "o": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


def from_tensors(config: Config, mesh: Mesh, tensors: Mapping[str, Any]) -> Weights:
    """Weights under the names that Hugging Face gives to those of a Llama.

    Args:
      tensors: what `open_safetensors` returns, or NumPy arrays. Those of a product are [out, in].
        A rank's part alone is read of each; layers beyond `config.layers` are left out.

    Raises:
      ValueError: for a tensor that is not there or has another shape than `config` says.
    """
    ranks = mesh.shape[AXIS]
    check(config, ranks)

    def tensor(name: str, shape: tuple[int, ...]) -> Any:
        if (found := tensors.get(f"{name}.weight")) is None:
            raise ValueError(f"there is no tensor {name}.weight")
        there = tuple(found.shape if hasattr(found, "shape") else found.get_shape())
        if there != shape:
            raise ValueError(f"{name}.weight has the shape {there}, not {shape}")
        return found

    def place(shape: tuple[int, ...], spec: P, part: Any) -> jax.Array:
        def of_device(index: Index) -> np.ndarray:
            bounds = [slice(*i.indices(n)[:2]) for i, n in zip(index, shape, strict=True)]
            return np.asarray(part(*bounds)).astype(config.dtype)

        return jax.make_array_from_callback(shape, NamedSharding(mesh, spec), of_device)

    def plain(name: str, shape: tuple[int, ...], spec: P) -> jax.Array:
        found = tensor(name, shape)
        return place(shape, spec, lambda *index: found[index])

    def transposed(name: str, shape: tuple[int, ...], spec: P) -> jax.Array:
        found = tensor(name, shape[::-1])
        return place(shape, spec, lambda rows, columns: found[columns, rows].T)

    def qkv(prefix: str, shape: tuple[int, ...], spec: P) -> jax.Array:
        dim, groups, d = config.head_dim, config.groups(ranks), config.width
        queries, copies = config.heads // groups, groups // config.kv_heads
        q = tensor(f"{prefix}.q_proj", (config.heads * dim, d))
        kv = [tensor(f"{prefix}.{name}_proj", (config.kv_heads * dim, d)) for name in "kv"]

        def part(rows: slice, columns: slice) -> np.ndarray:
            width = (queries + 2) * dim  # of a group
            found = []
            for group in range(columns.start // width, columns.stop // width):
                found.append(q[group * queries * dim : (group + 1) * queries * dim, rows])
                head = group // copies
                found.extend(one[head * dim : (head + 1) * dim, rows] for one in kv)
            return np.concatenate(found).T

        return place(shape, spec, part)

    def layer(i: int, wanted: Weights, split: Weights) -> Weights:
        found = {"qkv": qkv(f"model.layers.{i}.self_attn", wanted["qkv"], split["qkv"])}
        for ours, theirs in NAMES.items():
            read = plain if len(wanted[ours]) == 1 else transposed
            found[ours] = read(f"model.layers.{i}.{theirs}", wanted[ours], split[ours])
        return found

    wanted, split = shapes(config, ranks), specs(config)
    top = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
    weights = {
        ours: plain(theirs, wanted[ours], split[ours])
        for ours, theirs in top.items()
        if ours in wanted
    }
    layers = zip(wanted["layers"], split["layers"], strict=True)
    return weights | {"layers": [layer(i, *both) for i, both in enumerate(layers)]}


def open_safetensors(paths: Sequence[Path]) -> dict[str, Any]:
    """The tensors of safetensors files, or of those that a `.index.json` lists. Nothing is read
    before a slice is taken.

    Raises:
      ModuleNotFoundError: if the package `safetensors` is not installed.
    """
    try:
        from safetensors import safe_open
    except ModuleNotFoundError as e:
        raise ModuleNotFoundError(f"{e}; to read files: pip install safetensors") from None
    files: list[Path] = []
    for path in paths:
        if path.suffix == ".json":
            listed = json.loads(path.read_text())["weight_map"].values()
            files.extend(path.parent / name for name in sorted(set(listed)))
        else:
            files.append(path)
    found = {}
    for file in files:
        opened = safe_open(file, framework="np")
        found |= {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
    return found


def config_from_json(path: Path) -> Config:
    """Of the `config.json` that Hugging Face keeps beside a Llama's weights.

    Raises:
      ValueError: for a model that differs in more than sizes from Llama 2.
    """
    said = json.loads(path.read_text())
    rope = said.get("rope_scaling") or said.get("rope_parameters") or {}
    odd = {
        "model_type": said.get("model_type", "llama") != "llama",
        "head_dim": said.get("head_dim", 0) not in (
            0, None, said["hidden_size"] // said["num_attention_heads"]
        ),
        "rope_scaling": rope.get("rope_type", rope.get("type", "default")) != "default",
        "bias": said.get("attention_bias") or said.get("mlp_bias"),
    }  # fmt: skip
    if any(odd.values()):
        raise ValueError(f"{path}: {', '.join(k for k, v in odd.items() if v)} not as in Llama 2")
    return Config(
        layers=said["num_hidden_layers"],
        width=said["hidden_size"],
        hidden=said["intermediate_size"],
        heads=said["num_attention_heads"],
        kv_heads=said.get("num_key_value_heads", said["num_attention_heads"]),
        vocab=said["vocab_size"],
        epsilon=said.get("rms_norm_eps", 1e-6),
        theta=said.get("rope_theta", rope.get("rope_theta", 10_000.0)),
        tied=said.get("tie_word_embeddings", False),
    )
