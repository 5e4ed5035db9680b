"""The transformer of gpt_model.py on a grid of ranks: pure functions of a dict of parameters.

After arXiv 2305.13525: between two projections the activations are split over x, the residual
stream between blocks over y, and everything by batch over data and z. So the projections into a
block take `scheme`, those out of it, and the embedding, `scheme.transposed`. Per rank::

    x [b/(data z), s, d/y] --norm, qkv [d/(y z), 3 d/x]--> this rank's heads --attention-->
                             out [d/(x z), d/y] --> + x
    x [b/(data z), s, d/y] --norm, up [d/(y z), 4 d/x]--> gelu --down [4 d/(x z), d/y]--> + x

The same functions are the model on one device: see grid_ops.py.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from gpt_model import rotate
from grid_ops import attention
from grid_training import Param, specs_of

from jflux.parallel import Grid, Scheme


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of the whole model; `dtype` is that of activations and products, parameters
    are float32."""

    layers: int
    heads: int
    head_dim: int
    vocab: int = 256
    dtype: Any = jnp.float32

    @property
    def width(self) -> int:
        return self.heads * self.head_dim

    def check(self, grid: Grid) -> None:
        """Raises ValueError if the model does not split over the grid."""
        for what, size, axes, ranks in (
            ("heads", self.heads, "x", grid.x),
            ("features", self.width, "x z", grid.x * grid.z),
            ("features", self.width, "y z", grid.y * grid.z),
        ):
            if size % ranks:
                raise ValueError(f"{size} {what} do not split over {axes} = {ranks} of {grid}")


def parameters(config: Config, scheme: Scheme) -> dict[str, Any]:
    """A `Param` for each; those of the blocks are stacked, as `jflux.parallel.scan` takes them."""
    d, transposed = config.width, scheme.transposed
    # The two projections of a layer out of a block: the stream's variance should not grow.
    out = (2 * config.layers) ** -0.5
    block = {
        "attention_norm": Param((d,), scheme.scale_spec(), mean=1),
        "qkv": Param((d, 3 * d), scheme.weight_spec(), d**-0.5),
        "out": Param((d, d), transposed.weight_spec(), out * d**-0.5),
        "mlp_norm": Param((d,), scheme.scale_spec(), mean=1),
        "up": Param((d, 4 * d), scheme.weight_spec(), d**-0.5),
        "down": Param((4 * d, d), transposed.weight_spec(), out * (4 * d) ** -0.5),
    }
    return {
        "embedding": Param((config.vocab, d), transposed.weight_spec(), d**-0.5),
        "blocks": {name: param.stacked(config.layers) for name, param in block.items()},
        "norm": Param((d,), scheme.scale_spec(), mean=1),
        "head": Param((d, config.vocab), scheme.weight_spec(), d**-0.5),
    }


def logits(
    ops: Any, config: Config, scheme: Scheme, params: dict[str, Any], tokens: jax.Array
) -> jax.Array:
    """tokens [b/(data z), s] -> [b/(data z), s, vocab/x]."""
    # Before weights are gathered, so that half as many bytes travel where dtype has half as many.
    params = jax.tree.map(lambda p: p.astype(config.dtype), params)
    x = ops.embed(tokens, params["embedding"], scheme=scheme.transposed)
    x = ops.scan(
        functools.partial(block, ops, config, scheme), x, params["blocks"],
        specs=specs_of(parameters(config, scheme)["blocks"]), scheme=scheme,
    )  # fmt: skip
    return ops.dense(ops.rms_norm(x, params["norm"], scheme=scheme), params["head"], scheme=scheme)


def block(
    ops: Any, config: Config, scheme: Scheme, x: jax.Array, w: dict[str, jax.Array]
) -> jax.Array:
    """Attention, then an MLP, each behind a norm and beside a residual: [b/(data z), s, d/y]."""
    h = ops.rms_norm(x, w["attention_norm"], scheme=scheme)
    qkv = ops.dense(h, w["qkv"], scheme=scheme)
    h = attention(qkv, head_dim=config.head_dim, causal=True, rotate=rotate)
    x = x + ops.dense(h, w["out"], scheme=scheme.transposed)
    h = ops.rms_norm(x, w["mlp_norm"], scheme=scheme)
    h = jax.nn.gelu(ops.dense(h, w["up"], scheme=scheme))
    return x + ops.dense(h, w["down"], scheme=scheme.transposed)


def loss(
    ops: Any,
    config: Config,
    scheme: Scheme,
    params: dict[str, Any],
    tokens: jax.Array,
    targets: jax.Array,
) -> jax.Array:
    """Mean cross entropy over the global batch, in nats; tokens and targets [b/(data z), s]."""
    losses = ops.cross_entropy(logits(ops, config, scheme, params, tokens), targets, scheme=scheme)
    return ops.mean(losses, scheme.names("data", "z"))
