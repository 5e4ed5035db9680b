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
