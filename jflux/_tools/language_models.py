"""Sizes of public language models, and their products under tensor parallelism: what
``python -m jflux.tune --model`` tunes.

A layer is the same in all of them: grouped-query attention and an MLP with a gate, which GPT-3's
has not. The sizes are those of the models' published configurations.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of a dense decoder.

    Attributes:
      hidden, ffn: columns of the residual stream, and hidden units of the MLP.
      heads, kv_heads: of queries, and of keys and values.
      head_dim: columns of a head; 0: hidden / heads.
      gated: the MLP has a gate beside its first product.
      tied: the head's weight is the embedding [vocabulary, hidden].
    """

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    vocabulary: int
    head_dim: int = 0
    gated: bool = True
    tied: bool = False

    @property
    def head_columns(self) -> int:
        return self.head_dim or self.hidden // self.heads


MODELS: dict[str, Sizes] = {
    "llama-2-7b": Sizes(32, 4096, 11008, 32, 32, 32000),
    "llama-2-13b": Sizes(40, 5120, 13824, 40, 40, 32000),
    "llama-2-70b": Sizes(80, 8192, 28672, 64, 8, 32000),
    "llama-3-8b": Sizes(32, 4096, 14336, 32, 8, 128256),
    "llama-3-70b": Sizes(80, 8192, 28672, 64, 8, 128256),
    "llama-3-405b": Sizes(126, 16384, 53248, 128, 8, 128256),
    "mistral-7b": Sizes(32, 4096, 14336, 32, 8, 32000),
    "mistral-nemo-12b": Sizes(40, 5120, 14336, 32, 8, 131072, head_dim=128),
    "mistral-small-24b": Sizes(40, 5120, 32768, 32, 8, 131072, head_dim=128),
    "mistral-large-123b": Sizes(88, 12288, 28672, 96, 8, 32768),
    "qwen2.5-7b": Sizes(28, 3584, 18944, 28, 4, 152064),
    "qwen2.5-14b": Sizes(48, 5120, 13824, 40, 8, 152064),
    "qwen2.5-32b": Sizes(64, 5120, 27648, 40, 8, 152064),
    "qwen2.5-72b": Sizes(80, 8192, 29568, 64, 8, 152064),
    "qwen3-8b": Sizes(36, 4096, 12288, 32, 8, 151936, head_dim=128),
    "qwen3-14b": Sizes(40, 5120, 17408, 40, 8, 151936, head_dim=128),
    "qwen3-32b": Sizes(64, 5120, 25600, 64, 8, 151936, head_dim=128),
    "gemma-7b": Sizes(28, 3072, 24576, 16, 16, 256000, head_dim=256, tied=True),
    "gemma-2-9b": Sizes(42, 3584, 14336, 16, 8, 256000, head_dim=256, tied=True),
    "gemma-2-27b": Sizes(46, 4608, 36864, 32, 16, 256000, head_dim=128, tied=True),
    "gemma-3-12b": Sizes(48, 3840, 15360, 16, 8, 262208, head_dim=256, tied=True),
    "gemma-3-27b": Sizes(62, 5376, 21504, 32, 16, 262208, head_dim=128, tied=True),
    "gpt-3-175b": Sizes(96, 12288, 49152, 96, 96, 50257, gated=False, tied=True),
}


def named(name: str) -> Sizes:
    """The model of that name.

    Raises:
      ValueError: there is no such name.
    """
    if name not in MODELS:
        raise ValueError(
            f"jflux: no model {name!r}; there are {', '.join(MODELS)}; for another one give the "
            "config.json of its Hugging Face repository with --config"
        )
    return MODELS[name]


_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_UNGATED = frozenset({"gpt_neox", "nemotron", "phi", "starcoder2"})  # the model_type of these


def of_config(path: pathlib.Path) -> Sizes:
    """The sizes in a ``config.json`` of Hugging Face transformers.

    Raises:
      ValueError: the file cannot be read, lacks a size, or is of a mixture of experts.
    """
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"jflux: {path} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"jflux: {path} must hold an object, not {type(content).__name__}")
    whole, content = content, content.get("text_config", content)  # of a model that also sees
    for name in _EXPERTS:
        if (content.get(name) or 1) > 1:
            raise ValueError(
                f"jflux: {path} is of a mixture of experts ({name}: {content[name]}), whose MLPs "
                "are no products of fixed sizes; name shapes as OP:M,N,K instead"
            )

    def size(name: str, default: int | None = None) -> int:
        value: Any = content.get(name)
        if value is None:
            value = default
        if type(value) is not int or value < 1:
            raise ValueError(f"jflux: {path}: {name!r} must be a positive number, got {value!r}")
        return value

    hidden, heads = size("hidden_size"), size("num_attention_heads")
    return Sizes(
        layers=size("num_hidden_layers"),
        hidden=hidden,
        ffn=size("intermediate_size"),
        heads=heads,
        kv_heads=size("num_key_value_heads", heads),
        vocabulary=size("vocab_size"),
        head_dim=size("head_dim", hidden // heads),
        gated=content.get("model_type") not in _UNGATED,
        tied=bool(whole.get("tie_word_embeddings", True)),  # transformers' default
    )


@dataclasses.dataclass(frozen=True)
class Product:
    """A call of an op, by its global sizes, as :func:`jflux.tune` takes them."""

    op: str
    m: int
    n: int
    k: int
    transpose_rhs: bool
    layer: str

    def __str__(self) -> str:
        stored = ", w [n, k]" if self.transpose_rhs else ""
        return f"{f'{self.op}:{self.m},{self.n},{self.k}':45} {self.layer}{stored}"


def products(
    sizes: Sizes, tokens: Sequence[int], ranks: int, *, training: bool = False
) -> list[Product]:
    """What a model multiplies over `ranks` tensor-parallel ranks, each call once.

    Rows are split over the ranks between the products (arXiv 2205.05198, section 4.2.2), so that
    each half of a layer is an all-gather and a product, and a product and a reduce-scatter. The
    last product of each half is there a second time for rows that every rank has, as in decoding.

    Args:
      tokens: rows of x, of all sequences together.
      ranks: with fewer heads of keys and values than these, each head is on several ranks.
      training: also what the gradients of x multiply.
    """
    gather, scatter, reduce = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"
    h, queries = sizes.hidden, sizes.heads * sizes.head_columns
    qkv = queries + 2 * max(sizes.kv_heads, ranks) * sizes.head_columns
    first = sizes.ffn * (2 if sizes.gated else 1)
    into = [
        (qkv, "queries, keys, values", False),
        (first, "gate and up" if sizes.gated else "up", False),
        (sizes.vocabulary, "head", sizes.tied),
    ]
    out = [(queries, "attention's output"), (sizes.ffn, "down")]
    found = []
    for m in tokens:
        found += [Product(gather, m, n, h, transposed, layer) for n, layer, transposed in into]
        found += [
            Product(op, m, h, k, False, layer) for op in (scatter, reduce) for k, layer in out
        ]
        if training:
            found += [
                Product(scatter, m, h, n, not transposed, f"gradient of {layer}")
                for n, layer, transposed in into
            ]
            found += [Product(gather, m, k, h, True, f"gradient of {layer}") for k, layer in out]
    return list(dict.fromkeys(found))
