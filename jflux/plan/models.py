"""Networks by name: those of the paper (arXiv 2305.13525, tables I and II), GPT-3, and the models
of `language_models` that are built as a Llama is."""

from __future__ import annotations

from collections.abc import Callable

from .._tools import language_models
from .model import Layer, Model


def gpt(
    name: str, *, layers: int, hidden: int, heads: int, sequence: int = 2048, tokens: int = 1 << 22,
    vocabulary: int = 51200,
) -> Model:  # fmt: skip
    """A GPT as Megatron-LM builds it: four products a block, and the output head, whose weight is
    the embedding's.

    Args:
      tokens: of one step. The paper's runs have 4 million, sequences of 2048 (figure 11).
      vocabulary: rows of the embedding; Megatron-LM pads GPT-2's 50257. 0 leaves the head out.

    Raises:
      ValueError: the tokens are not whole sequences.
    """
    batch = _sequences(tokens, sequence)
    h, s = hidden, sequence
    block = [
        Layer(h, 3 * h, s, name="qkv"),
        Layer(h, h, s, transposed=True, name="projection"),
        Layer(h, 4 * h, s, name="mlp in"),
        Layer(4 * h, h, s, transposed=True, name="mlp out"),
    ]
    head = [Layer(h, vocabulary, s, name="head")] if vocabulary else []
    return Model((*block * layers, *head), batch, name, (("heads", heads),), checkpoint=4)


def llama(
    name: str, *, layers: int, hidden: int, heads: int, kv_heads: int, ffn: int,
    vocabulary: int = 32000, sequence: int = 4096, tokens: int = 1 << 22,
) -> Model:  # fmt: skip
    """A Llama: grouped queries, a gated MLP, an embedding and a head of their own."""
    batch = _sequences(tokens, sequence)
    h, s, head_dim = hidden, sequence, hidden // heads
    block = [
        Layer(h, (heads + 2 * kv_heads) * head_dim, s, name="qkv"),
        Layer(h, h, s, transposed=True, name="projection"),
        Layer(h, 2 * ffn, s, name="gate and up"),
        Layer(ffn, h, s, transposed=True, name="down"),
    ]
    table = Layer(vocabulary, h, s, transposed=True, lookup=True, name="embedding")
    head = Layer(h, vocabulary, s, name="head")
    splits = (("heads", heads), ("kv heads", kv_heads))
    return Model((*block * layers, head, table), batch, name, splits, checkpoint=4)


def unet(
    name: str, *, workspaces: int, image: int = 32, batch: int = 2048,
    multipliers: tuple[int, ...] = (1, 2, 2, 2), blocks: int = 3,
    attention: tuple[int, ...] = (16, 8),
) -> Model:  # fmt: skip
    """A U-Net after Nichol and Dhariwal: four levels of three residual blocks, 32 x 32 images.

    The paper names workspaces, levels and blocks (table II). The multipliers of the levels and the
    sizes with attention are those of Nichol and Dhariwal's CIFAR-10 model, an assumption that meets
    the paper's 250 M to 4 B weights within 25 %. The first convolution of a residual block is
    plain, the second transposed.
    """
    found: list[Layer] = []
    embedding = 4 * workspaces

    def residual(c_in: int, c_out: int, size: int) -> None:
        pixels = size * size
        found.append(Layer(c_in, c_out, pixels, taps=9, name=f"conv {size}"))
        found.append(Layer(embedding, c_out, 1, name="time"))
        found.append(Layer(c_out, c_out, pixels, transposed=True, taps=9, name=f"conv {size}"))
        if c_in != c_out:
            found.append(Layer(c_in, c_out, pixels, name=f"skip {size}"))
        if size in attention:
            found.append(Layer(c_out, 3 * c_out, pixels, name="qkv"))
            found.append(Layer(c_out, c_out, pixels, transposed=True, name="projection"))

    found.append(Layer(workspaces, embedding, 1, name="time"))
    found.append(Layer(embedding, embedding, 1, transposed=True, name="time"))
    found.append(Layer(3, workspaces, image * image, taps=9, name="first"))
    skips, now, size = [workspaces], workspaces, image
    for level, factor in enumerate(multipliers):
        for _ in range(blocks):
            residual(now, workspaces * factor, size)
            now = workspaces * factor
            skips.append(now)
        if level < len(multipliers) - 1:
            half = size // 2
            found.append(Layer(now, now, half**2, rows_in=size**2, taps=9, name="down"))
            size = half
            skips.append(now)
    for _ in range(2):
        residual(now, now, size)
    for level, factor in reversed(list(enumerate(multipliers))):
        for _ in range(blocks + 1):
            residual(now + skips.pop(), workspaces * factor, size)
            now = workspaces * factor
        if level:
            size *= 2
            found.append(Layer(now, now, size**2, taps=9, name="up"))
    # Three workspaces cannot be split: the convolutions from and to the image run whole everywhere.
    found = [layer for layer in found if layer.k > 3]
    return Model(tuple(found), batch, name)


def _sequences(tokens: int, sequence: int) -> int:
    if tokens % sequence:
        raise ValueError(f"jflux: {tokens=} must be whole sequences of {sequence}")
    return tokens // sequence


def _gpt(name: str, layers: int, hidden: int, heads: int) -> Callable[..., Model]:
    return lambda **given: gpt(name, layers=layers, hidden=hidden, heads=heads, **given)


def _unet(name: str, workspaces: int) -> Callable[..., Model]:
    return lambda **given: unet(name, workspaces=workspaces, **given)


def _llama(name: str, sizes: language_models.Sizes) -> Callable[..., Model]:
    return lambda **given: llama(
        name, layers=sizes.layers, hidden=sizes.hidden, heads=sizes.heads,
        kv_heads=sizes.kv_heads, ffn=sizes.ffn, **{"vocabulary": sizes.vocabulary, **given},
    )  # fmt: skip


MODELS: dict[str, Callable[..., Model]] = {
    "gpt-5b": _gpt("gpt-5b", 24, 4096, 32),
    "gpt-10b": _gpt("gpt-10b", 32, 5120, 40),
    "gpt-20b": _gpt("gpt-20b", 32, 7168, 56),
    "gpt-40b": _gpt("gpt-40b", 38, 9216, 72),
    "gpt-80b": _gpt("gpt-80b", 42, 12288, 96),
    "gpt-3-175b": _gpt("gpt-3-175b", 96, 12288, 96),
    **{
        name: _llama(name, sizes)
        for name, sizes in language_models.MODELS.items()
        if sizes.gated and not sizes.tied and not sizes.head_dim  # as `llama` has them
    },
    "unet-250m": _unet("unet-250m", 256),
    "unet-500m": _unet("unet-500m", 416),
    "unet-1b": _unet("unet-1b", 512),
    "unet-2b": _unet("unet-2b", 768),
    "unet-4b": _unet("unet-4b", 1024),
}


def named(name: str, **given: int) -> Model:
    """The model of that name; `given` goes to :func:`gpt`, :func:`llama` or :func:`unet`.

    Raises:
      ValueError: there is no such name.
    """
    if name not in MODELS:
        raise ValueError(f"jflux: no model {name!r}; there are {', '.join(MODELS)}")
    return MODELS[name](**given)
