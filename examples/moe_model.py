"""A decoder-only transformer whose MLPs are mixtures of experts.

Written for one rank of `jax.shard_map` over a mesh with axes "data", "expert" and "tp". All but the
mixtures is as in gpt_model.py: attention is split over "tp", the batch over "data" and "expert". A
mixture's experts are split over "expert", and the hidden units of each over "tp".
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import gpt_model
import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

import jflux
import jflux.nn

#: The axes whose ranks have different tokens, inside one data-parallel group.
TOKENS = ("expert", "tp")


@dataclasses.dataclass(frozen=True)
class Config(gpt_model.Config):
    """Sizes of the whole model.

    Attributes:
      experts: divide by the ranks along "expert".
      k: experts of a token.
      hidden: units of an expert, which divide by the tp ranks.
      exchange: how jflux brings tokens to their experts, as `jflux.nn.mixture` has it.
      ops: `jflux`, or `jflux.reference`: then mixtures are `plain_mixture`.
    """

    experts: int = 8
    k: int = 2
    hidden: int = 128
    exchange: str = "auto"

    @property
    def mixture(self) -> Any:
        if self.ops is not jflux:
            return functools.partial(plain_mixture, k=self.k)
        return functools.partial(
            jflux.nn.mixture, k=self.k, axis_name="tp", expert_axis="expert", loss_axis="data",
            exchange=self.exchange,
        )  # fmt: skip


def plain_mixture(x, router, up, down, gate, *, k):
    """`jflux.nn.mixture` on one rank, as plain JAX has it: `argsort`, `lax.ragged_dot`, and a
    scatter-add.

    Returns:
      (y, load-balancing loss, z loss, tokens of each expert).
    """
    d, experts = x.shape[-1], up.shape[0]
    tokens = x.reshape(-1, d)
    logits = tokens.astype(jnp.float32) @ router.astype(jnp.float32)
    best, choices = lax.top_k(logits, k)
    everywhere = ("data", *TOKENS)
    chosen = jax.nn.one_hot(choices, logits.shape[1]).sum(1)
    fraction, mean = lax.pmean((chosen.mean(0), jax.nn.softmax(logits).mean(0)), everywhere)
    z = lax.pmean((jax.nn.logsumexp(logits, -1) ** 2).mean(), everywhere)
    balance = logits.shape[1] * (lax.stop_gradient(fraction) * mean).sum()

    gather = functools.partial(lax.all_gather, axis_name=TOKENS, tiled=True)
    tokens, weights, choices = gather(tokens), gather(jax.nn.softmax(best)), gather(choices)
    own = choices.reshape(-1) - lax.axis_index("expert") * experts
    own = jnp.where((own >= 0) & (own < experts), own, experts)  # the others', behind all
    order = jnp.argsort(own)
    sizes = jnp.bincount(own, length=experts)
    dot = functools.partial(lax.ragged_dot, group_sizes=sizes.astype(jnp.int32))
    rows = tokens[order // k]
    h = dot(jax.nn.silu(dot(rows, gate)) * dot(rows, up), down)
    # What lies past the last group counts for nothing, whatever it is.
    h = jnp.where((own[order] < experts)[:, None], h, 0)
    h = h.astype(jnp.float32) * weights.reshape(-1)[order, None]
    y = jnp.zeros(tokens.shape, jnp.float32).at[order // k].add(h).astype(x.dtype)
    y = lax.psum_scatter(y, TOKENS, scatter_dimension=0, tiled=True).reshape(x.shape)
    return y, balance, z, chosen.sum(0)


class Mixture(nnx.Module):
    """Gated experts: [b, s/tp, d] -> (same, losses)."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        d, e, f = config.width, config.experts, config.hidden
        self.config = config

        def param(shape, axes, scale):
            return nnx.Param(jax.random.normal(rngs.params(), shape) * scale, out_sharding=axes)

        self.router = param((d, e), (None, None), d**-0.5)
        self.gate = param((e, d, f), ("expert", None, "tp"), d**-0.5)
        self.up = param((e, d, f), ("expert", None, "tp"), d**-0.5)
        self.down = param((e, f, d), ("expert", "tp", None), (2 * config.layers * f) ** -0.5)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The mixture, and what training adds to its loss for it."""
        up, down, gate = (w[...].astype(x.dtype) for w in (self.up, self.down, self.gate))
        y, balance, z, *_ = self.config.mixture(x, self.router[...], up, down, gate)
        return y, 1e-2 * balance + 1e-3 * z


class Block(nnx.Module):
    """Attention, then a mixture, each behind a norm and beside a residual: [b, s/tp, d] -> (same,
    losses)."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        d = config.width
        self.head_dim = config.head_dim
        self.attention_norm = nnx.RMSNorm(d, dtype=config.dtype, rngs=rngs)
        self.qkv = gpt_model.ColumnParallel(d, 3 * d, config, rngs)
        self.attention_out = gpt_model.RowParallel(d, d, config, rngs)
        self.mlp_norm = nnx.RMSNorm(d, dtype=config.dtype, rngs=rngs)
        self.mixture = Mixture(config, rngs)

    attend = gpt_model.Block.attend

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = x + self.attention_out(self.attend(self.qkv(self.attention_norm(x))))
        y, loss = self.mixture(self.mlp_norm(x))
        return x + y, loss


class MoE(nnx.Module):
    """Byte-level language model; call and `loss` run inside `jax.shard_map`."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.embed = nnx.Embed(config.vocab, config.width, dtype=config.dtype, rngs=rngs)
        self.blocks = nnx.List([Block(config, rngs) for _ in range(config.layers)])
        self.norm = nnx.RMSNorm(config.width, dtype=config.dtype, rngs=rngs)
        self.head = gpt_model.ColumnParallel(config.width, config.vocab, config, rngs)

    def logits_and_losses(self, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        """This rank's positions in, its part of the vocabulary out: [b, s/tp] -> [b, s, v/tp], and
        the sum of the mixtures' losses."""
        x, losses = self.embed(tokens), 0.0
        for block in self.blocks:
            x, loss = block(x)
            losses += loss
        return self.head(self.norm(x)).astype(jnp.float32), losses

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.logits_and_losses(tokens)[0]

    def loss(self, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        """Mean cross entropy over the global batch, in nats, and the mixtures' losses. Arguments
        are those of `gpt_model.GPT.loss`."""
        logits, losses = self.logits_and_losses(tokens)
        return lax.pmean(gpt_model.cross_entropy(logits, targets), ("data", "expert")) + losses
