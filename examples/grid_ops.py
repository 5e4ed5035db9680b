"""What a model on a grid is made of: `OnGrid`, and the same on one device, `Plain`.

A model takes one of the two as `ops`. `OnGrid` is `jflux.parallel` and what a loss needs beside it;
it works on a rank's parts of everything, inside `jax.shard_map`. `Plain` is the definitions, in
`jax.numpy` and `lax` alone; it works on whole arrays, and takes a scheme to ignore it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jflux import nn, parallel
from jflux.parallel import Scheme


class OnGrid:
    dense = staticmethod(parallel.dense)
    conv = staticmethod(parallel.conv)
    embed = staticmethod(parallel.embed)
    rms_norm = staticmethod(parallel.rms_norm)
    group_norm = staticmethod(parallel.group_norm)
    scan = staticmethod(parallel.scan)

    @staticmethod
    def cross_entropy(logits: jax.Array, targets: jax.Array, *, scheme: Scheme) -> jax.Array:
        """Of logits that are split over the scheme's x."""
        return nn.cross_entropy(logits, targets, axis_name=scheme.names("x"))

    @staticmethod
    def mean(x: jax.Array, axes: tuple[Any, ...]) -> jax.Array:
        """Over all elements, of all ranks along the mesh axes that x is split over."""
        return lax.pmean(x.mean(), axes)


class Plain:
    @staticmethod
    def dense(x: jax.Array, w: jax.Array, bias: Any = 0, *, scheme: Any) -> jax.Array:
        return x @ w + bias

    @staticmethod
    def conv(
        x: jax.Array, w: jax.Array, bias: Any = 0, *, strides: int = 1, scheme: Any
    ) -> jax.Array:
        layout = ("NHWC", "HWIO", "NHWC")
        y = lax.conv_general_dilated(x, w, (strides,) * 2, "SAME", dimension_numbers=layout)
        return y + bias

    @staticmethod
    def embed(tokens: jax.Array, table: jax.Array, *, scheme: Any) -> jax.Array:
        return table[tokens]

    @staticmethod
    def rms_norm(x: jax.Array, scale: jax.Array, *, scheme: Any) -> jax.Array:
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        square = (wide * wide).mean(-1, keepdims=True)
        return (wide / jnp.sqrt(square + 1e-6) * scale).astype(x.dtype)

    @staticmethod
    def group_norm(
        x: jax.Array, scale: jax.Array, bias: jax.Array, *, groups: int, scheme: Any
    ) -> jax.Array:
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        wide = wide.reshape(*x.shape[:-1], groups, -1)
        axes = (*range(1, x.ndim - 1), x.ndim)  # space, and the channels of a group
        mean, variance = wide.mean(axes, keepdims=True), wide.var(axes, keepdims=True)
        normal = ((wide - mean) / jnp.sqrt(variance + 1e-6)).reshape(x.shape)
        return (normal * scale + bias).astype(x.dtype)

    @staticmethod
    def scan(layer: Callable[..., Any], x: Any, params: Any, *, specs: Any, scheme: Any) -> Any:
        layer = jax.checkpoint(layer)
        return lax.scan(lambda x, w: (layer(x, w), None), x, params)[0]

    @staticmethod
    def cross_entropy(logits: jax.Array, targets: jax.Array, *, scheme: Any) -> jax.Array:
        logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1)[..., 0]

    @staticmethod
    def mean(x: jax.Array, axes: tuple[Any, ...]) -> jax.Array:
        return x.mean()


def attention(qkv: jax.Array, *, head_dim: int, causal: bool, rotate: Any = None) -> jax.Array:
    """Of whole heads, so the same on a grid: [b, s, 3 heads head_dim] -> [b, s, heads head_dim].

    Columns are [head, q/k/v, head_dim], so that a rank's columns are whole heads. The softmax is in
    float32, or float64 for float64, for which `jax.nn.dot_product_attention` has float32.

    Args:
      rotate: what is done to q and k, [b, s, heads, head_dim], for their positions.
    """
    b, s, _ = qkv.shape
    q, k, v = jnp.moveaxis(qkv.reshape(b, s, -1, 3, head_dim), 3, 0)
    q, k = (q, k) if rotate is None else (rotate(q), rotate(k))
    wide = jnp.promote_types(qkv.dtype, jnp.float32)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=wide) * head_dim**-0.5
    if causal:
        scores = jnp.where(jnp.tri(s, dtype=bool), scores, -jnp.inf)
    shares = jax.nn.softmax(scores).astype(v.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", shares, v).reshape(b, s, -1)
