"""Weights for llama_model.py, random or from safetensors files, each made where it belongs."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from llama_model import AXIS, HEAD_NORMS, Config, Weights, check, shapes, specs
from tqdm import tqdm

import jflux

Index = tuple[slice, ...]

#: Of files in 8 bits: the type of weights, whose name with this ending is that of their scales, one
#: for each square of so many rows and columns. DeepSeek-V3's and Qwen3's are so.
EIGHT_BITS = np.dtype(jnp.float8_e4m3fn)
SCALES, BLOCK = "_scale_inv", 128


@dataclasses.dataclass(frozen=True)
class Quantized:
    """A tensor [out, in] in 8 bits and its scales, of which nothing is read before a slice is
    taken: in float32."""

    values: Any
    scale: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return shape_of(self.values)

    def __getitem__(self, index: Any) -> np.ndarray:
        index = index if isinstance(index, tuple) else (index, slice(None))
        at = [range(*i.indices(n)) for i, n in zip(index, self.shape, strict=True)]
        blocks = tuple(slice(a.start // BLOCK, -(-a.stop // BLOCK)) for a in at)
        scale = np.asarray(self.scale[blocks]).astype(np.float32)
        places = [np.asarray(a) // BLOCK - b.start for a, b in zip(at, blocks, strict=True)]
        return np.asarray(self.values[index]).astype(np.float32) * scale[np.ix_(*places)]


def shape_of(tensor: Any) -> tuple[int, ...]:
    """Of an array, or of what `open_safetensors` returns."""
    return tuple(tensor.shape if hasattr(tensor, "shape") else tensor.get_shape())


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
NAMES = {
    "attention_norm": "input_layernorm",
    "o": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
MLP = ("gate", "up", "down")


def names_of_layer(config: Config, i: int) -> dict[str, str]:
    """Of layer i, but for what makes `qkv`, and for its experts."""
    if not config.is_mixture(i):
        found = NAMES
    else:
        found = {ours: theirs for ours, theirs in NAMES.items() if ours not in MLP}
        found |= {"router": "mlp.gate" if config.head_norms else "block_sparse_moe.gate"}
    return found | {n: f"self_attn.{n}" for n in (HEAD_NORMS if config.head_norms else ())}


def expert_name(config: Config, expert: int, ours: str) -> str:
    """Of a part of an expert: a model whose heads have norms is a Qwen3, and another one a
    Mixtral."""
    if config.head_norms:
        return f"mlp.experts.{expert}.{ours}_proj"
    theirs = {"gate": "w1", "up": "w3", "down": "w2"}[ours]
    return f"block_sparse_moe.experts.{expert}.{theirs}"


def model_of(config: Config) -> str:
    """What such a model is called."""
    if config.head_norms:
        return "Qwen3-MoE" if config.experts else "Qwen3"
    return "Mixtral" if config.experts else "Llama 2"


def check_tensors(config: Config, tensors: Mapping[str, Any]) -> None:
    """Raises ValueError unless the tensors are those of such a model, which may have more layers:
    one that is missing, of another shape, or of no use here means that it is another model."""
    d, q, kv = config.width, *(n * config.head_dim for n in (config.heads, config.kv_heads))

    def layer(i: int) -> dict[str, tuple[int, ...]]:
        f = config.units(i)
        ours = {
            "attention_norm": (d,), "mlp_norm": (d,), "o": (d, q), "router": (config.experts, d),
            "gate": (f, d), "up": (f, d), "down": (d, f),
        } | dict.fromkeys(HEAD_NORMS, (config.head_dim,))  # fmt: skip
        found = {theirs: ours[name] for name, theirs in names_of_layer(config, i).items()}
        found |= {"self_attn.q_proj": (q, d)}
        found |= {f"self_attn.{name}_proj": (kv, d) for name in "kv"}
        for e in range(config.experts if config.is_mixture(i) else 0):
            found |= {expert_name(config, e, name): ours[name] for name in MLP}
        return found

    wanted = {"model.embed_tokens": (config.vocab, d), "model.norm": (d,)}
    if not config.tied:
        wanted["lm_head"] = (config.vocab, d)
    for i in range(config.layers):
        wanted |= {f"model.layers.{i}.{name}": shape for name, shape in layer(i).items()}
    wanted = {f"{name}.weight": shape for name, shape in wanted.items()}
    if missing := [name for name in wanted if name not in tensors]:
        raise ValueError(
            f"there is no tensor {_first(missing)}; give all files of the model, and no more "
            "--layers than it has"
        )
    for name, shape in wanted.items():
        there = shape_of(tensors[name])
        if there != shape:
            raise ValueError(
                f"{name} has the shape {there}, not {shape}; give the config.json that belongs to "
                "these weights"
            )
    scales = {}
    for name, shape in wanted.items():
        if name + SCALES in tensors and len(shape) == 2:
            scales[name + SCALES] = tuple(-(-size // BLOCK) for size in shape)
        elif getattr(tensors[name], "dtype", None) == EIGHT_BITS:
            raise ValueError(f"{name} is in 8 bits, and there is no {name + SCALES}")
    for name, shape in scales.items():
        if shape_of(tensors[name]) != shape:
            raise ValueError(
                f"{name} has the shape {shape_of(tensors[name])}, not {shape}: one scale for each "
                f"{BLOCK} x {BLOCK}"
            )
    wanted |= scales
    if odd := [name for name in tensors if name not in wanted and not _unused(config, name)]:
        raise ValueError(
            f"a {model_of(config)} has no tensor {_first(odd)}; give the weights of one, without "
            "adapters, and without quantization but for scales of squares"
        )


def _first(names: Sequence[str]) -> str:
    return names[0] + (f" (nor {len(names) - 1} more)" if len(names) > 1 else "")


def _unused(config: Config, name: str) -> bool:
    """Whether a tensor that nothing reads belongs to a Llama all the same."""
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    return (
        name.endswith(".rotary_emb.inv_freq")
        or (config.tied and name == "lm_head.weight")
        or (layer is not None and int(layer[1]) >= config.layers)
    )


def from_tensors(config: Config, mesh: Mesh, tensors: Mapping[str, Any]) -> Weights:
    """Weights under the names that Hugging Face gives to those of a Llama, Mixtral or Qwen3.

    Args:
      tensors: what `open_safetensors` returns, or NumPy arrays. Those of a product are [out, in].
        A rank's part alone is read of each; layers beyond `config.layers` are left out. Weights
        that have scales, of which each rank has whole squares, stay in 8 bits, as `jflux.Scaled`;
        others, and those of experts, become `config.dtype`.

    Raises:
      ValueError: as `check` and `check_tensors` do, before any is read.
    """
    ranks = mesh.shape[AXIS]
    check(config, ranks)
    check_tensors(config, tensors)
    tensors = {
        name: Quantized(found, tensors[name + SCALES]) if name + SCALES in tensors else found
        for name, found in tensors.items()
    }

    def place(shape: tuple[int, ...], spec: P, part: Any, dtype: Any = config.dtype) -> jax.Array:
        def of_device(index: Index) -> np.ndarray:
            bounds = [slice(*i.indices(n)[:2]) for i, n in zip(index, shape, strict=True)]
            return np.asarray(part(*bounds)).astype(dtype)

        return jax.make_array_from_callback(shape, NamedSharding(mesh, spec), of_device)

    def plain(name: str, shape: tuple[int, ...], spec: P) -> jax.Array:
        found = tensors[f"{name}.weight"]
        return place(shape, spec, lambda *index: found[index])

    def product(names: Sequence[str], shape: tuple[int, ...], spec: P, part_of: Any) -> Any:
        """A weight of these tensors, whose part [rows, columns] is ``part_of(tensors, rows,
        columns, block)``: of tensors of which each element is one, or a block of so many."""
        found = [tensors[f"{name}.weight"] for name in names]

        def made(of: Any, dtype: Any, block: int = 1) -> jax.Array:
            each = [of(one) for one in found]
            size = tuple(n // block for n in shape)
            return place(size, spec, lambda *at: part_of(each, *at, block), dtype)

        parts = [n // (ranks if axis else 1) for n, axis in zip(shape, spec, strict=True)]
        parts += [config.head_dim] if len(found) > 1 else []
        if any(n % BLOCK for n in parts) or not all(isinstance(one, Quantized) for one in found):
            return made(lambda one: one, config.dtype)
        scale = made(lambda one: one.scale, jnp.float32, BLOCK)
        return jflux.Scaled(made(lambda one: one.values, EIGHT_BITS), scale)

    def transposed(found: Sequence[Any], rows: slice, columns: slice, block: int) -> np.ndarray:
        return found[0][columns, rows].T

    def of_experts(prefix: str, ours: str, shape: tuple[int, ...], spec: P) -> jax.Array:
        """[experts, in, out] of so many tensors [out, in]."""
        names = (expert_name(config, e, ours) for e in range(shape[0]))
        found = [tensors[f"{prefix}.{name}.weight"] for name in names]

        def part(experts: slice, rows: slice, columns: slice) -> np.ndarray:
            return np.stack([one[columns, rows].T for one in found[experts]])

        return place(shape, spec, part)

    def qkv(given: Sequence[Any], rows: slice, columns: slice, block: int) -> np.ndarray:
        dim, groups = config.head_dim // block, config.groups(ranks)
        queries, copies = config.heads // groups, groups // config.kv_heads
        q, *kv = given
        width = (queries + 2) * dim  # of a group
        found = []
        for group in range(columns.start // width, columns.stop // width):
            found.append(q[group * queries * dim : (group + 1) * queries * dim, rows])
            head = group // copies
            found.extend(one[head * dim : (head + 1) * dim, rows] for one in kv)
        return np.concatenate(found).T

    def layer(i: int, wanted: Weights, split: Weights) -> Weights:
        names = [f"model.layers.{i}.self_attn.{name}_proj" for name in "qkv"]
        found = {"qkv": product(names, wanted["qkv"], split["qkv"], qkv)}
        for ours in MLP if config.is_mixture(i) else ():
            found[ours] = of_experts(f"model.layers.{i}", ours, wanted[ours], split[ours])
        for ours, theirs in names_of_layer(config, i).items():
            name, where = f"model.layers.{i}.{theirs}", (wanted[ours], split[ours])
            is_vector = len(wanted[ours]) == 1
            found[ours] = plain(name, *where) if is_vector else product([name], *where, transposed)
        return found

    wanted, split = shapes(config, ranks), specs(config)
    top = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
    weights = {
        ours: plain(theirs, wanted[ours], split[ours])
        for ours, theirs in top.items()
        if ours in wanted
    }
    layers = list(zip(wanted["layers"], split["layers"], strict=True))
    bar = tqdm(layers, desc="reading layers", delay=2)  # nothing for a model that is read at once
    return weights | {"layers": [layer(i, *both) for i, both in enumerate(bar)]}


def files_of(paths: Sequence[Path]) -> list[Path]:
    """The safetensors files that are meant: those given, those that a `.index.json` lists, and of a
    directory those that its index lists or, without one, all.

    Raises:
      FileNotFoundError: if one of them is not there.
    """
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            found = sorted(path.glob("*.safetensors.index.json"))
            found = found or sorted(path.glob("*.safetensors"))
            if not found:
                raise FileNotFoundError(f"no *.safetensors in {path}; give the directory with them")
            files.extend(files_of(found))
        elif path.suffix == ".json":
            listed = _read_json(path).get("weight_map")
            if not isinstance(listed, dict) or not listed:
                raise ValueError(f"{path} lists no files; give a *.safetensors.index.json")
            if odd := [n for n in listed.values() if not isinstance(n, str) or Path(n).name != n]:
                raise ValueError(f"{path} lists {str(odd[0])[:200]!r}, which is no file beside it")
            files.extend(path.parent / name for name in sorted(set(listed.values())))
        else:
            files.append(path)
    for file in files:
        if not file.is_file():
            raise FileNotFoundError(f"no file {file}; give all of the model's, or their directory")
    return files


def open_safetensors(paths: Sequence[Path]) -> dict[str, Any]:
    """The tensors of the files that `files_of` finds. Nothing is read before a slice is taken.

    Raises:
      FileNotFoundError: if one of them is not there.
      ModuleNotFoundError: if the package `safetensors` is not installed.
      ValueError: if one is no safetensors file.
    """
    try:
        from safetensors import SafetensorError, safe_open
    except ModuleNotFoundError as e:
        raise ModuleNotFoundError(f"{e}; to read files: pip install safetensors") from None
    found = {}
    for file in files_of(paths):
        try:
            opened = safe_open(file, framework="np")
        except SafetensorError as e:
            raise ValueError(f"{file} is no safetensors file ({e}); download it again") from None
        found |= {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
        found |= _in_8_bits(file)
    return found


def _in_8_bits(file: Path) -> dict[str, np.ndarray]:
    """The float8_e4m3fn tensors of a file, which its NumPy reader has no type for."""
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(size))
    return {
        name: np.memmap(
            file, EIGHT_BITS, "r", 8 + size + said["data_offsets"][0], tuple(said["shape"])
        )
        for name, said in header.items()
        if said.get("dtype") == "F8_E4M3"
    }


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
