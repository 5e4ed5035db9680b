"""A Llama, Mixtral or Qwen3 for decoding, tensor-parallel over the axis "tp" of a mesh, as pure
functions.

Llama 2 (arXiv 2307.09288, section 2.2): RMS norms before each half of a layer, rotary embeddings,
grouped-query attention (arXiv 2305.13245), an MLP with a SiLU gate (arXiv 2002.05202, section 2).
Mixtral (arXiv 2401.04088, section 2.1) has a mixture of such MLPs in its place, of which each rank
has a part of the hidden units of every expert. Qwen3 (arXiv 2505.09388, section 2) has RMS norms of
each head's queries and keys, and Qwen3-MoE may have layers with an MLP among those with a mixture.

`prefill`, `step`, `greedy` and `generate` are written for one rank of `jax.shard_map`; `programs`
makes functions of global arrays of them. Their first argument `ops` is where the collectives come
from: `jflux`, or `jflux.reference` for the same model in plain `lax`.

A step has one token of each sequence. Every rank has the whole residual stream x and its norm h,
and a layer is two sums over the ranks::

    h [b, d] --qkv--> attention over this rank's heads --o, sum_add_norm--> x, h
    h [b, d] --gate, up--> this rank's hidden units --down, sum_add_norm--> x, h

The prompt has many rows, [b, s] flattened, which are split over the ranks between the products
(arXiv 2205.05198, section 4.2.2), so that each half of a layer is an `all_gather_matmul` and a
`matmul_reduce_scatter`.

With `Config.context_axis` the positions of the cache are split over a second axis of the mesh, and
so is the prompt. All else is the same on the ranks of that axis: weights, tokens, and heads.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jflux

AXIS = "tp"


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of the whole model.

    Attributes:
      width, hidden: of the residual stream and of an MLP.
      heads, kv_heads: of queries, and of keys and values; each of the latter serves
        heads / kv_heads queries.
      epsilon: of the RMS norms.
      theta: base of the rotary embeddings' wave lengths.
      tied: the head is the embedding, transposed.
      head_size: elements of a head; 0: width / heads.
      head_norms: queries and keys have an RMS norm over the elements of a head, before they turn.
      experts, experts_per_token: of a mixture in place of each MLP; 0: there is none.
      expert_hidden: of an expert's MLP; 0: `hidden`.
      mixture_every: the last of so many layers has a mixture, and the others an MLP.
      mlp_layers: those that have an MLP all the same, counted from 0.
      normalized: the weights of a token's experts sum to 1. False: they are those of a softmax over
        all experts.
      dtype: of weights, activations and cache; norms, softmax and logits are float32.
      context_axis: a mesh axis that the cache's positions are split over. None: they are whole.
    """

    layers: int
    width: int
    hidden: int
    heads: int
    kv_heads: int
    vocab: int
    epsilon: float = 1e-5
    theta: float = 10_000.0
    tied: bool = False
    head_size: int = 0
    head_norms: bool = False
    experts: int = 0
    experts_per_token: int = 0
    expert_hidden: int = 0
    mixture_every: int = 1
    mlp_layers: tuple[int, ...] = ()
    normalized: bool = True
    dtype: Any = jnp.bfloat16
    context_axis: str | None = None

    @property
    def head_dim(self) -> int:
        return self.head_size or self.width // self.heads

    def units(self, layer: int) -> int:
        """Hidden units of a layer's MLP, or of each of its experts."""
        return self.hidden if not self.is_mixture(layer) else self.expert_hidden or self.hidden

    def is_mixture(self, layer: int) -> bool:
        one_of_them = (layer + 1) % self.mixture_every == 0 and layer not in self.mlp_layers
        return self.experts > 0 and one_of_them

    def groups(self, ranks: int) -> int:
        """Heads of keys and values as they are stored: with fewer of them than ranks, each is
        there several times, with a part of its queries."""
        return max(self.kv_heads, ranks)


CONFIGS = {
    "tiny": Config(2, 128, 256, 16, 8, 256, dtype=jnp.float32),
    "llama-2-7b": Config(32, 4096, 11008, 32, 32, 32000),
    "llama-2-70b": Config(80, 8192, 28672, 64, 8, 32000),
    "mixtral-8x7b": Config(
        32, 4096, 14336, 32, 8, 32000, theta=1e6, experts=8, experts_per_token=2
    ),
    "qwen3-8b": Config(36, 4096, 12288, 32, 8, 151936, epsilon=1e-6, theta=1e6, head_norms=True),
    "qwen3-30b-a3b": Config(
        48,
        2048,
        6144,
        32,
        4,
        151936,
        epsilon=1e-6,
        theta=1e6,
        head_size=128,
        head_norms=True,
        experts=128,
        experts_per_token=8,
        expert_hidden=768,
    ),  # fmt: skip
}

#: The norms of a head's queries and keys, [head_dim], as weights.
HEAD_NORMS = ("q_norm", "k_norm")

Weights = dict[str, Any]
Cache = list[Any]


def check(config: Config, ranks: int, context_ranks: int = 1) -> None:
    """Raises ValueError if the model cannot be split over so many ranks, and a long prompt over so
    many ranks of `context_axis`."""
    uneven = config.width % (2 * config.heads) if not config.head_size else config.head_size % 2
    if uneven or config.heads % config.kv_heads:
        raise ValueError(
            f"{config.width=} must divide by 2 * {config.heads=}, or {config.head_size=} by 2; and "
            f"heads by {config.kv_heads=}"
        )
    split = {"heads": config.heads, "vocab": config.vocab}
    for i in range(config.layers):
        split["expert_hidden" if config.is_mixture(i) else "hidden"] = config.units(i)
    for name, size in split.items():
        if size % ranks:
            raise ValueError(f"{name}={size} must divide by {ranks=}")
    if config.experts and not 0 < config.experts_per_token <= config.experts:
        raise ValueError(f"{config.experts_per_token=} must be from 1 to {config.experts=}")
    if config.kv_heads % ranks and ranks % config.kv_heads:
        raise ValueError(f"{config.kv_heads=} must divide by {ranks=}, or {ranks=} by it")
    heads, groups = config.heads // ranks, config.groups(ranks) // ranks
    if heads % context_ranks or (groups % context_ranks and context_ranks % groups):
        raise ValueError(
            f"a rank's {heads} heads of queries must divide by {context_ranks=}, and its {groups} "
            "of keys too, or that by them"
        )


def shapes(config: Config, ranks: int) -> Weights:
    """The global shape of each weight: products are ``x @ w``, tables of the vocabulary have a row
    for each token. The columns of `qkv` are [group, its queries, key, value]."""
    d, dim, groups = config.width, config.head_dim, config.groups(ranks)

    def layer(i: int) -> Weights:
        f = config.units(i)
        found: Weights = {
            "attention_norm": (d,),
            "qkv": (d, (config.heads + 2 * groups) * dim),
            "o": (config.heads * dim, d),
            "mlp_norm": (d,),
            "gate": (d, f),
            "up": (d, f),
            "down": (f, d),
        }
        if config.is_mixture(i):
            e = config.experts
            found |= {name: (e, *found[name]) for name in ("gate", "up", "down")}
            found["router"] = (d, e)
        return found | dict.fromkeys(HEAD_NORMS if config.head_norms else (), (dim,))

    layers = [layer(i) for i in range(config.layers)]
    model = {"embed": (config.vocab, d), "layers": layers, "norm": (d,)}
    return model if config.tied else model | {"head": (config.vocab, d)}


def specs(config: Config) -> Weights:
    """How each weight is split."""
    columns, rows = P(None, AXIS), P(AXIS, None)

    def layer(i: int) -> Weights:
        found = {
            "attention_norm": P(None),
            "qkv": columns,
            "o": rows,
            "mlp_norm": P(None),
            "gate": columns,
            "up": columns,
            "down": rows,
        }
        if config.is_mixture(i):
            found |= {name: P(None, *found[name]) for name in ("gate", "up", "down")}
            found["router"] = P(None, None)
        return found | dict.fromkeys(HEAD_NORMS if config.head_norms else (), P(None))

    layers = [layer(i) for i in range(config.layers)]
    model = {"embed": rows, "layers": layers, "norm": P(None)}
    return model if config.tied else model | {"head": rows}


def cache_specs(config: Config) -> Cache:
    """Keys and values, [b, groups, length, head_dim] each, of each layer. With a context axis
    a `jflux.KVCache`, whose keys and values are [b, length, groups, head_dim]."""
    if config.context_axis is None:
        return [(P(None, AXIS), P(None, AXIS))] * config.layers
    spec = P(None, config.context_axis, AXIS)
    return [jflux.KVCache(spec, spec, P())] * config.layers


def context_ranks(config: Config) -> int:
    return 1 if config.context_axis is None else lax.axis_size(config.context_axis)


def context_rank(config: Config) -> jax.Array | int:
    return 0 if config.context_axis is None else lax.axis_index(config.context_axis)


def operands(x: jax.Array, w: Any) -> tuple[Any, Any]:
    """x and w of a product. Where w has scales, x has its own in 8 bits: one for each 128 elements
    of a token."""
    if isinstance(w[0] if isinstance(w, tuple) else w, jflux.Scaled):
        return jflux.quantize(x, jnp.float8_e4m3fn, block=(1, 128)), w
    return x, w


def sum_add_norm(
    ops: Any, part: jax.Array, w: jax.Array, x: jax.Array, scale: jax.Array, epsilon: float
) -> tuple[jax.Array, jax.Array]:
    """Adds ``part @ w``, summed over ranks, to the residual stream x: the new x, and its norm."""
    norm = jflux.RMSNorm(scale, epsilon)
    return ops.matmul_all_reduce(
        *operands(part, w), axis_name=AXIS, residual=x, norm=norm, preferred_element_type=x.dtype
    )


def mixture(ops: Any, config: Config, w: Weights, h: jax.Array, *, split: bool) -> jax.Array:
    """This rank's part of a mixture of h [rows, d], to be summed over the ranks: its hidden units
    of each token's experts. With `split` the ranks have different rows, which are gathered first.
    """
    logits = jnp.einsum("md,de->me", h, w["router"], preferred_element_type=jnp.float32)
    found = jflux.moe.top_k_softmax(logits, config.experts_per_token, normalize=config.normalized)
    if split:
        h, *found = (ops.all_gather(a, axis_name=AXIS, tiled=True) for a in (h, *found))
    indices, shares = found
    routing = jflux.moe.route(indices, config.experts)
    rows, gate_up = jflux.moe.permute(h, routing), (w["gate"], w["up"])
    y = ops.grouped_matmul(rows, gate_up, routing.counts, activation="silu", gated=True)
    y = ops.grouped_matmul(y, w["down"], routing.counts)
    return jflux.moe.unpermute(y, routing, shares)


def rms_norm(x: jax.Array, scale: jax.Array, epsilon: float) -> jax.Array:
    """x over its root mean square, times scale (arXiv 1910.07467, equation 4)."""
    wide = x.astype(jnp.float32)
    mean = jnp.mean(wide * wide, -1, keepdims=True)
    return (wide * lax.rsqrt(mean + epsilon) * scale).astype(x.dtype)


def rotate(x: jax.Array, position: jax.Array, theta: float) -> jax.Array:
    """Rotary embedding (arXiv 2104.09864, equation 34) of x [b, s, ..., head_dim] at position [s].

    Element i of a head turns with element i + head_dim / 2, as in Llama's published weights; the
    paper pairs neighbours.
    """
    half = x.shape[-1] // 2
    angle = position[:, None] * theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = angle.reshape(-1, *(1,) * (x.ndim - 3), half)
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


def split_heads(
    config: Config, w: Weights, qkv: jax.Array, position: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """This rank's columns [b, s, n] of x @ qkv, as queries [b, s, groups, queries, head_dim] and
    keys and values [b, groups, s, head_dim]; the first two are normed, if the model does so, and
    rotated."""
    queries = config.heads // config.groups(lax.axis_size(AXIS))
    heads = qkv.reshape(*qkv.shape[:2], -1, queries + 2, config.head_dim)
    turned = heads[..., :-1, :]
    if config.head_norms:
        scale = jnp.stack([w["q_norm"]] * queries + [w["k_norm"]])
        turned = rms_norm(turned, scale, config.epsilon)
    turned = rotate(turned, position, config.theta)
    k, v = (jnp.moveaxis(a, 1, 2) for a in (turned[..., -1, :], heads[..., -1, :]))
    return turned[..., :-1, :], k, v


def attend_prompt(ops: Any, config: Config, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention of the prompt to itself: [b, s, n]. Over a context axis, by Ulysses: a rank
    attends with its share of the heads to all positions (arXiv 2309.14509, section 3.1)."""
    b, s, _, _, head_dim = q.shape
    k, v = (jnp.moveaxis(a, 1, 2) for a in (k, v))
    q = q.reshape(b, s, -1, head_dim)
    if (ranks := context_ranks(config)) > 1:
        copies = ranks // k.shape[2] if k.shape[2] % ranks else 1
        q, k, v = (
            ops.all_to_all(
                a, axis_name=config.context_axis, split_axis=2, concat_axis=1, tiled=True
            )
            for a in (q, jnp.repeat(k, copies, 2), jnp.repeat(v, copies, 2))
        )
    # cuDNN's does not write the [s, s] weights, which only long prompts have many of.
    on_gpu = jax.default_backend() == "gpu" and q.dtype.itemsize == 2
    fast = "cudnn" if on_gpu and q.shape[1] >= 1024 else None
    o = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=fast)
    if ranks > 1:
        o = ops.all_to_all(
            o, axis_name=config.context_axis, split_axis=1, concat_axis=2, tiled=True
        )
    return o.reshape(b, s, -1)


def make_cache(
    ops: Any, config: Config, k: jax.Array, v: jax.Array, *, tokens: int, length: int
) -> Any:
    """A layer's cache with room for `length` positions, and in it the keys and values [b, groups,
    s, head_dim] of a prompt of `tokens`, as split over the context axis."""
    if config.context_axis is None:
        room = ((0, 0), (0, 0), (0, length - tokens), (0, 0))
        return jnp.pad(k[:, :, :tokens], room), jnp.pad(v[:, :, :tokens], room)
    k, v = (jnp.moveaxis(a, 1, 2) for a in (k, v))
    b, _, *heads = k.shape
    empty = jnp.zeros((b, -(-length // context_ranks(config)), *heads), k.dtype)
    cache = jflux.KVCache(empty, empty, jnp.zeros(b, jnp.int32))
    lengths = jnp.full(b, tokens, jnp.int32)  # padding is not written
    return ops.fill_cache(cache, k, v, lengths, axis_name=config.context_axis, layout="contiguous")


def attend_cache(
    ops: Any, config: Config, cache: Any, q: jax.Array, new: Any, position: jax.Array
) -> tuple[jax.Array, Any]:
    """Adds the keys and values `new` [b, groups, 1, head_dim] of the token at `position` to a
    layer's cache, and attends to it with one query a sequence, q [b, 1, ...]: [b, n], the cache."""
    if config.context_axis is not None:
        k, v = (jnp.moveaxis(a, 1, 2) for a in new)
        heads = q.reshape(len(q), 1, -1, q.shape[-1])
        o, cache = ops.attend_to_cache(cache, heads, k, v, axis_name=config.context_axis)
        return o.reshape(len(q), -1), cache
    k, v = (
        lax.dynamic_update_slice_in_dim(old, one, position, axis=2)
        for old, one in zip(cache, new, strict=True)
    )
    wide = {"preferred_element_type": jnp.float32}
    scores = jnp.einsum("bgqh,bgth->bgqt", q[:, 0], k, **wide) * q.shape[-1] ** -0.5
    scores = jnp.where(jnp.arange(k.shape[2]) <= position, scores, -jnp.inf)
    weights = jax.nn.softmax(scores).astype(v.dtype)
    return jnp.einsum("bgqt,bgth->bgqh", weights, v).reshape(q.shape[0], -1), (k, v)


def own_rows(table: jax.Array, index: jax.Array) -> jax.Array:
    """Rows of a table that is split by rows over the ranks; zeros for those of another rank, so
    that the sum over the ranks is ``table[index]``."""
    local = index - lax.axis_index(AXIS) * len(table)
    own = (local >= 0) & (local < len(table))
    return jnp.where(own[..., None], table[jnp.clip(local, 0, len(table) - 1)], 0)


def scales_of(weights: Weights) -> list[jax.Array]:
    """Of the norm that follows each layer: the next one's first, and at last the model's own."""
    return [layer["attention_norm"] for layer in weights["layers"][1:]] + [weights["norm"]]


def logits_of(weights: Weights, h: jax.Array) -> jax.Array:
    """h [b, d] to this rank's part of the vocabulary, float32 [b, v/ranks]."""
    head = weights.get("head", weights["embed"])
    return jnp.einsum("bd,vd->bv", h, head, preferred_element_type=jnp.float32)


def prefill(
    ops: Any, config: Config, weights: Weights, tokens: jax.Array, *, length: int
) -> tuple[jax.Array, Cache]:
    """Runs the prompt.

    Args:
      tokens: int32 [b, s], the same on all ranks.
      length: how many positions the cache has room for, s at least.

    Returns:
      Logits of the token that follows, float32 [b, v/ranks], and the cache.
    """
    b, s = tokens.shape
    # Up to a whole number of rows for each rank. Nothing attends to what follows it.
    parts = context_ranks(config)
    tokens = jnp.pad(tokens, ((0, 0), (0, -s % (lax.axis_size(AXIS) * parts))))
    padded = tokens.shape[1] // parts
    first = context_rank(config) * padded
    tokens = lax.dynamic_slice_in_dim(tokens, first, padded, 1)
    x = lax.psum_scatter(own_rows(weights["embed"], tokens.reshape(-1)), AXIS, tiled=True)
    h = rms_norm(x, weights["layers"][0]["attention_norm"], config.epsilon)
    cache = []
    for w, scale in zip(weights["layers"], scales_of(weights), strict=True):
        to: Any = {"axis_name": AXIS, "preferred_element_type": h.dtype}
        qkv = ops.all_gather_matmul(*operands(h, w["qkv"]), **to).reshape(b, padded, -1)
        q, k, v = split_heads(config, w, qkv, first + jnp.arange(padded))
        o = attend_prompt(ops, config, q, k, v).reshape(b * padded, -1)
        x = ops.matmul_reduce_scatter(*operands(o, w["o"]), residual=x, **to)
        h = rms_norm(x, w["mlp_norm"], config.epsilon)
        if "router" in w:
            y = mixture(ops, config, w, h, split=True)
            x += ops.reduce_scatter(y, axis_name=AXIS, tiled=True)
        else:
            gate_up = operands(h, (w["gate"], w["up"]))
            y = ops.all_gather_matmul(*gate_up, activation="silu", gated=True, **to)
            x = ops.matmul_reduce_scatter(*operands(y, w["down"]), residual=x, **to)
        h = rms_norm(x, scale, config.epsilon)
        cache.append(make_cache(ops, config, k, v, tokens=s, length=length))
    axes = AXIS if config.context_axis is None else (config.context_axis, AXIS)
    at = s - 1 - first
    last = own_rows(h, jnp.arange(b) * padded + at)
    last = jnp.where((at >= 0) & (at < padded), last, 0)  # on the others of the context axis
    return logits_of(weights, ops.all_reduce(last, axis_name=axes)), cache


def step(
    ops: Any,
    config: Config,
    weights: Weights,
    cache: Cache,
    token: jax.Array,
    position: jax.Array,
) -> tuple[jax.Array, Cache]:
    """Runs one token of each sequence, int32 [b], which is at `position` in all of them.

    Returns:
      Logits of the token that follows, float32 [b, v/ranks], and the cache with this one's keys and
      values.
    """
    norm = jflux.RMSNorm(weights["layers"][0]["attention_norm"], config.epsilon)
    x, h = ops.all_reduce(own_rows(weights["embed"], token), axis_name=AXIS, norm=norm)
    new_cache = []
    for w, scale, kv in zip(weights["layers"], scales_of(weights), cache, strict=True):
        to: Any = {"preferred_element_type": h.dtype}
        qkv = jflux.matmul(*operands(h, w["qkv"]), **to)
        q, *kv_of_token = split_heads(config, w, qkv[:, None], position[None])
        o, kv = attend_cache(ops, config, kv, q, kv_of_token, position)
        x, h = after_attention(ops, config, w, o, x, scale)
        new_cache.append(kv)
    return logits_of(weights, h), new_cache


def after_attention(
    ops: Any, config: Config, w: Weights, o: jax.Array, x: jax.Array, scale: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The rest of a layer of rows that all ranks have, from this rank's o [rows, n]: the residual
    stream x, and its norm by `scale`."""
    x, h = sum_add_norm(ops, o, w["o"], x, w["mlp_norm"], config.epsilon)
    if "router" in w:
        y = mixture(ops, config, w, h, split=False)
        norm = jflux.RMSNorm(scale, config.epsilon)
        return ops.all_reduce(y, axis_name=AXIS, residual=x, norm=norm)
    gate_up = operands(h, (w["gate"], w["up"]))
    gate, up = jflux.matmul(*gate_up, preferred_element_type=h.dtype)
    return sum_add_norm(ops, jax.nn.silu(gate) * up, w["down"], x, scale, config.epsilon)


def greedy(ops: Any, logits: jax.Array) -> jax.Array:
    """The most likely token, int32 [b], of logits [b, v/ranks]; of equals the first one.

    The logits are not gathered: a rank sends its best token and that one's logit. (A token is exact
    in float32 up to 2**24.)
    """
    token = logits.argmax(-1) + lax.axis_index(AXIS) * logits.shape[-1]
    best = jnp.stack([logits.max(-1), token.astype(jnp.float32)])
    values, tokens = jnp.moveaxis(ops.all_gather(best, axis_name=AXIS), 1, 0)
    winner = values.argmax(0)[None]
    return jnp.take_along_axis(tokens, winner, 0)[0].astype(jnp.int32)


def generate(
    ops: Any,
    config: Config,
    weights: Weights,
    cache: Cache,
    token: jax.Array,
    position: jax.Array,
    *,
    steps: int,
    end: int | None = None,
) -> tuple[jax.Array, jax.Array, Cache]:
    """Greedy decoding on the devices, in one loop.

    Args:
      token: int32 [b], what follows the positions that the cache has.
      position: its position; the cache must have room for `steps` more from there.
      end: a sequence ends at this token, and has only this one after it; the loop ends when all
        sequences have. None: nothing ends before `steps`.

    Returns:
      What follows `token`, int32 [b, steps]; how many steps it took; the cache.
    """

    def one(i, state):
        token, cache, tokens = state
        logits, cache = step(ops, config, weights, cache, token, position + i)
        chosen = greedy(ops, logits)
        if end is not None:
            chosen = jnp.where(token == end, end, chosen)
        return chosen, cache, tokens.at[:, i].set(chosen)

    tokens = jnp.full((len(token), steps), 0 if end is None else end, jnp.int32)
    state = (token, cache, tokens)
    if end is None:  # a loop whose length XLA knows: the host need not ask the devices each time
        taken = jnp.int32(steps)
        _, cache, tokens = lax.fori_loop(0, steps, one, state)
    else:
        taken, (_, cache, tokens) = lax.while_loop(
            lambda carry: (carry[0] < steps) & (carry[1][0] != end).any(),
            lambda carry: (carry[0] + 1, one(*carry)),
            (jnp.int32(0), state),
        )
    return tokens, taken, cache


def teacher_forced(
    ops: Any, config: Config, weights: Weights, tokens: jax.Array, *, prompt: int, length: int
) -> jax.Array:
    """Logits that follow the prompt, and each later token, float32 [b, s - prompt + 1, v/ranks].

    Args:
      tokens: int32 [b, s], of which the first `prompt` are run in one go.
    """
    first, cache = prefill(ops, config, weights, tokens[:, :prompt], length=length)

    def one(carry, token):
        position, cache = carry
        logits, cache = step(ops, config, weights, cache, token, position)
        return (position + 1, cache), logits

    _, others = lax.scan(one, (jnp.int32(prompt), cache), tokens[:, prompt:].T)
    return jnp.concatenate([first[None], others]).swapaxes(0, 1)


def programs(
    ops: Any, config: Config, mesh: Mesh, *, length: int, steps: int, end: int | None = None
) -> tuple[Any, Any]:
    """Two jitted functions of global arrays: what the prompt is run with, ``(weights, tokens) ->
    (token, cache)``, and `generate`: ``(weights, cache, token, position) -> (tokens, taken,
    cache)``, to which the cache is given away."""

    def start(weights, tokens):
        logits, cache = prefill(ops, config, weights, tokens, length=length)
        return greedy(ops, logits), cache

    def go_on(*args):
        return generate(ops, config, *args, steps=steps, end=end)

    check(config, mesh.shape[AXIS], mesh.shape.get(config.context_axis, 1))
    w, cache = specs(config), cache_specs(config)
    step_specs = (w, cache, P(), P()), (P(), P(), cache)
    return (
        jax.jit(per_rank(start, mesh, (w, P()), (P(), cache))),
        jax.jit(per_rank(go_on, mesh, *step_specs), donate_argnums=1),
    )


def logits_program(ops: Any, config: Config, mesh: Mesh, *, prompt: int, length: int) -> Any:
    """`teacher_forced` as a jitted function of global arrays: (weights, tokens) -> logits."""

    def run(weights, tokens):
        return teacher_forced(ops, config, weights, tokens, prompt=prompt, length=length)

    return jax.jit(per_rank(run, mesh, (specs(config), P()), P(None, None, AXIS)))


def per_rank(f: Any, mesh: Mesh, in_specs: Any, out_specs: Any) -> Any:
    return jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
