"""A decoder-only transformer whose every projection is one fused jflux op.

Written for one rank of `jax.shard_map` over a mesh with axes "data" and "tp". Between the
projections the activations are split over "tp" by sequence position, so that layer norms and
residual sums do no work twice; inside attention and the MLP they are split by head and by hidden
unit::

    x [b, s/tp, d] --norm--> all_gather_matmul(w [d, n/tp]) --> [b, s, n/tp] --attention or gelu-->
                             matmul_reduce_scatter(w [n/tp, d]) --> [b, s/tp, d] --> + x

A parameter says in its `out_sharding` how it is split. The module is built once with the shapes of
the whole model, and called with the shapes of one rank.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

import jflux


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of the whole model. `heads`, `vocab` and the sequence must divide by the tp ranks.

    Attributes:
      dtype: of activations and products; parameters are float32.
      ops: where `all_gather_matmul` and `matmul_reduce_scatter` come from: `jflux`, or
        `jflux.reference` for the same model in plain `lax`.
      recipe: a `jflux.Recipe`, by which the products of the blocks are made in 8 bits. That of the
        logits is not: it is small, and errors of it are errors of the loss.
    """

    layers: int
    heads: int
    head_dim: int
    vocab: int = 256
    dtype: Any = jnp.float32
    ops: Any = jflux
    recipe: jflux.Recipe | None = None

    @property
    def width(self) -> int:
        return self.heads * self.head_dim


class ColumnParallel(nnx.Module):
    """[b, s/tp, k] -> [b, s, n/tp]: gathers the sequence, multiplies by this rank's columns."""

    def __init__(self, k: int, n: int, config: Config, rngs: nnx.Rngs):
        kernel = jax.random.normal(rngs.params(), (k, n)) * k**-0.5
        self.kernel = nnx.Param(kernel, out_sharding=(None, "tp"))
        self.matmul = functools.partial(config.ops.all_gather_matmul, recipe=config.recipe)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.matmul(x, self.kernel[...].astype(x.dtype), axis_name="tp")


class RowParallel(nnx.Module):
    """[b, s, k/tp] -> [b, s/tp, n]: multiplies by this rank's rows, sums over ranks, scatters."""

    def __init__(self, k: int, n: int, config: Config, rngs: nnx.Rngs):
        # These two per layer write to the residual stream, whose variance should not grow.
        kernel = jax.random.normal(rngs.params(), (k, n)) * (2 * config.layers * k) ** -0.5
        self.kernel = nnx.Param(kernel, out_sharding=("tp", None))
        self.matmul = functools.partial(config.ops.matmul_reduce_scatter, recipe=config.recipe)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.matmul(x, self.kernel[...].astype(x.dtype), axis_name="tp")


class Block(nnx.Module):
    """Attention, then an MLP, each behind a norm and beside a residual: [b, s/tp, d] -> same."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        d = config.width
        self.head_dim = config.head_dim
        self.attention_norm = nnx.RMSNorm(d, dtype=config.dtype, rngs=rngs)
        self.qkv = ColumnParallel(d, 3 * d, config, rngs)
        self.attention_out = RowParallel(d, d, config, rngs)
        self.mlp_norm = nnx.RMSNorm(d, dtype=config.dtype, rngs=rngs)
        self.up = ColumnParallel(d, 4 * d, config, rngs)
        self.down = RowParallel(4 * d, d, config, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention_out(self.attend(self.qkv(self.attention_norm(x))))
        return x + self.down(nnx.gelu(self.up(self.mlp_norm(x))))

    def attend(self, qkv: jax.Array) -> jax.Array:
        """Causal attention of this rank's heads: [b, s, 3 d/tp] -> [b, s, d/tp]."""
        b, s, _ = qkv.shape
        # Columns are [head, q/k/v, head_dim], so that a rank's columns are whole heads.
        q, k, v = jnp.moveaxis(qkv.reshape(b, s, -1, 3, self.head_dim), 3, 0)
        # The [s, s] weights are recomputed in the backward pass; no communication is.
        attention = jax.checkpoint(functools.partial(jax.nn.dot_product_attention, is_causal=True))
        return attention(rotate(q), rotate(k), v).reshape(b, s, -1)


def rotate(x: jax.Array) -> jax.Array:
    """Rotary position embedding (arXiv 2104.09864) of [b, s, heads, head_dim]."""
    s, half = x.shape[1], x.shape[3] // 2
    angle = jnp.arange(s)[:, None] * 10_000.0 ** (-jnp.arange(half) / half)
    sin, cos = (f(angle)[:, None, :].astype(x.dtype) for f in (jnp.sin, jnp.cos))
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


class GPT(nnx.Module):
    """Byte-level language model; call and `loss` run inside `jax.shard_map`."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.embed = nnx.Embed(config.vocab, config.width, dtype=config.dtype, rngs=rngs)
        self.blocks = nnx.List([Block(config, rngs) for _ in range(config.layers)])
        self.norm = nnx.RMSNorm(config.width, dtype=config.dtype, rngs=rngs)
        in_16_bits = dataclasses.replace(config, recipe=None)
        self.head = ColumnParallel(config.width, config.vocab, in_16_bits, rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """This rank's positions in, its part of the vocabulary out: [b, s/tp] -> [b, s, v/tp]."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).astype(jnp.float32)

    def loss(self, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        """Mean cross entropy over the global batch, in nats.

        The logits are never gathered: ranks exchange the maximum, the sum of exponentials and the
        target's logit, three numbers per position.

        Args:
          tokens: [b, s/tp], this rank's positions.
          targets: [b, s], of all positions, the same on all tp ranks.
        """
        return lax.pmean(cross_entropy(self(tokens), targets), "data")


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """The mean over positions, in nats, of logits [b, s, v/tp] that are split over "tp"."""
    part = logits.shape[-1]
    top = lax.pmax(lax.stop_gradient(logits.max(-1)), "tp")
    total = lax.psum(jnp.exp(logits - top[..., None]).sum(-1), "tp")
    # Targets in another rank's part of the vocabulary give a row of zeros.
    own = jax.nn.one_hot(targets - lax.axis_index("tp") * part, part)
    target_logit = lax.psum((own * logits).sum(-1), "tp")
    return (top + jnp.log(total) - target_logit).mean()
