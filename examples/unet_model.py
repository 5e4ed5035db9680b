"""A small U-Net that predicts the noise in an image, on a grid of ranks (arXiv 2305.13525).

After Nichol and Dhariwal (arXiv 2102.09672): residual blocks of two convolutions, levels of half
the size and twice the channels, attention at the smallest. Every convolution exchanges x and y:
what came in split over y leaves split over x. A residual block has two, and leaves its input's
split as it is. A step between levels has one, so the split alternates from level to level, and on
the way up it alternates back, to that of the level's skip connection::

    image  x --first--> y  blocks ----------- skip ----------> y  join, blocks --last--> x  noise
                        |down                              up|
                        x  blocks ------- skip ------> x  join, blocks
                        |down                       up|
                        y  blocks, attention, blocks

A skip connection is joined group by group (see `join`), and not behind the other channels: so each
rank joins what it has, and the result means the same however many there are. The residual branch
of the block after it reads both, the sum goes to what came from below.

The same functions are the model on one device: see grid_ops.py.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from grid_ops import attention
from grid_training import Param

from jflux.parallel import Grid, Scheme


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of the whole model.

    Attributes:
      channels: of the first level; each level has twice those of the one before.
      levels: of which each has half the pixels, in both directions, of the one before.
      blocks: residual blocks of a level, on the way down and on the way up.
      groups: of channels, in all norms.
      heads: of the attention.
      image_channels: of the images and the noise. Beyond three they are zeros, so that they split.
      dtype: of activations and products; parameters are float32.
    """

    channels: int
    levels: int = 3
    blocks: int = 1
    groups: int = 8
    heads: int = 8
    image_channels: int = 4
    dtype: Any = jnp.float32

    def width(self, level: int) -> int:
        return self.channels * 2**level

    def check(self, grid: Grid) -> None:
        """Raises ValueError if the model does not split over the grid."""
        xz, yz = grid.x * grid.z, grid.y * grid.z
        for what, size, axes, ranks in (
            ("channels", self.channels, "x z", xz),
            ("channels", self.channels, "y z", yz),
            ("image channels", self.image_channels, "x z", xz),
            ("groups of channels", self.groups, "x", grid.x),
            ("groups of channels", self.groups, "y", grid.y),
            ("heads", self.heads, "x", grid.x),
            ("heads", self.heads, "y", grid.y),
        ):
            if size % ranks:
                raise ValueError(f"{size} {what} do not split over {axes} = {ranks} of {grid}")
        if self.channels % self.groups or self.channels % self.heads:
            raise ValueError(
                f"{self.channels} channels are not {self.groups} groups and {self.heads} heads"
            )


def scheme_of_level(level: int, scheme: Scheme) -> Scheme:
    """Of the convolutions that read a level's residual stream."""
    return scheme.transposed if level % 2 else scheme


def parameters(config: Config, scheme: Scheme) -> dict[str, Any]:
    """A `Param` for each. The last convolution, and the second ones of residual blocks, start from
    zeros, as the paper's U-Net does; so what pads the image's channels stays zero."""

    def conv(k: int, n: int, scheme: Scheme, *, taps: int = 3, gain: float = 1.0) -> dict[str, Any]:
        deviation = gain / math.sqrt(k * taps**2)
        spec = scheme.weight_spec(4)
        return {
            "w": Param((taps, taps, k, n), spec, deviation),
            "bias": Param((n,), scheme.bias_spec()),
        }

    def dense(k: int, n: int, scheme: Scheme, gain: float = 1.0) -> dict[str, Any]:
        return {
            "w": Param((k, n), scheme.weight_spec(), gain / math.sqrt(k)),
            "bias": Param((n,), scheme.bias_spec()),
        }

    def norm(k: int, scheme: Scheme) -> dict[str, Any]:
        spec = scheme.scale_spec()
        return {"scale": Param((k,), spec, mean=1), "bias": Param((k,), spec)}

    def block(k: int, n: int, scheme: Scheme) -> dict[str, Any]:
        other = scheme.transposed
        return {
            "norm1": norm(k, scheme),
            "conv1": conv(k, n, scheme),
            "time": dense(config.channels, n, scheme),
            "norm2": norm(n, other),
            "conv2": conv(n, n, other, gain=0.0),
        }

    def level(index: int) -> dict[str, Any]:
        """The way down through a level, and up through it again, below which there are more."""
        c, s = config.width(index), scheme_of_level(index, scheme)
        return {
            "down": [block(c, c, s) for _ in range(config.blocks)],
            "strided": conv(c, 2 * c, s),
            "up": conv(2 * c, c, s.transposed),
            "joined": block(2 * c, c, s),
            "after": [block(c, c, s) for _ in range(config.blocks - 1)],
        }

    bottom = config.levels - 1
    c, s = config.width(bottom), scheme_of_level(bottom, scheme)
    return {
        "first": conv(config.image_channels, config.channels, scheme.transposed),
        "levels": [level(index) for index in range(bottom)],
        "bottom": {
            "before": block(c, c, s),
            "norm": norm(c, s),
            "qkv": dense(c, 3 * c, s),
            "out": dense(c, c, s.transposed, gain=0.0),
            "after": block(c, c, s),
        },
        "norm": norm(config.channels, scheme),
        "last": conv(config.channels, config.image_channels, scheme, gain=0.0),
    }


def noise(
    ops: Any, config: Config, scheme: Scheme, params: dict[str, Any], image: jax.Array, times: Any
) -> jax.Array:
    """image [b/(data z), h, w, image_channels/x] -> what noise is in it, of the same shape.

    Args:
      times: features of each example's time, [b/(data z), channels/y], for levels whose stream is
        split over y; and the same features, [b/(data z), channels/x], for the others.
    """

    def conv(x, w, scheme, **options):
        return ops.conv(x, w["w"], w["bias"], scheme=scheme, **options)

    def norm(x, w, scheme):
        return ops.group_norm(x, w["scale"], w["bias"], groups=config.groups, scheme=scheme)

    def branch(x, w, scheme):
        """What a residual block adds; x and the result are split over the scheme's y."""
        time = times[0] if scheme.y == y else times[1]
        h = conv(jax.nn.silu(norm(x, w["norm1"], scheme)), w["conv1"], scheme)
        h += ops.dense(time, w["time"]["w"], w["time"]["bias"], scheme=scheme)[:, None, None]
        h = jax.nn.silu(norm(h, w["norm2"], scheme.transposed))
        return conv(h, w["conv2"], scheme.transposed)

    y = scheme.y
    # Before weights are gathered, so that half as many bytes travel where dtype has half as many.
    params, image, times = jax.tree.map(lambda a: a.astype(config.dtype), (params, image, times))
    x = conv(image, params["first"], scheme.transposed)
    skips = []
    for index, w in enumerate(params["levels"]):
        s = scheme_of_level(index, scheme)
        for block in w["down"]:
            x += branch(x, block, s)
        skips.append(x)
        x = conv(x, w["strided"], s, strides=2)

    s, w = scheme_of_level(config.levels - 1, scheme), params["bottom"]
    x += branch(x, w["before"], s)
    qkv = ops.dense(norm(x, w["norm"], s), w["qkv"]["w"], w["qkv"]["bias"], scheme=s)
    head_dim = config.width(config.levels - 1) // config.heads
    x += ops.dense(attend(qkv, head_dim), w["out"]["w"], w["out"]["bias"], scheme=s.transposed)
    x += branch(x, w["after"], s)

    for index, w in reversed(list(enumerate(params["levels"]))):
        s = scheme_of_level(index, scheme)
        x = conv(x.repeat(2, 1).repeat(2, 2), w["up"], s.transposed)
        x += branch(join(x, skips.pop(), config.width(index) // config.groups), w["joined"], s)
        for block in w["after"]:
            x += branch(x, block, s)
    return conv(jax.nn.silu(norm(x, params["norm"], scheme)), params["last"], scheme)


def join(a: jax.Array, b: jax.Array, group: int) -> jax.Array:
    """The channels of both, in turn `group` of a and `group` of b: [..., c/y] -> [..., 2 c/y]."""
    parts = (x.reshape(*x.shape[:-1], -1, group) for x in (a, b))
    return jnp.concatenate(list(parts), -1).reshape(*a.shape[:-1], -1)


def attend(qkv: jax.Array, head_dim: int) -> jax.Array:
    """Attention of this rank's heads between all pixels: [b, h, w, 3 c/x] -> [b, h, w, c/x]."""
    b, h, w, n = qkv.shape
    y = attention(qkv.reshape(b, h * w, n), head_dim=head_dim, causal=False)
    return y.reshape(b, h, w, -1)


def loss(
    ops: Any,
    config: Config,
    scheme: Scheme,
    params: dict[str, Any],
    noisy: jax.Array,
    target: jax.Array,
    *times: jax.Array,
) -> jax.Array:
    """Mean square error over the global batch and the image's three channels."""
    error = noise(ops, config, scheme, params, noisy, times).astype(target.dtype) - target
    # Of the channels beyond three, the error is zero.
    mean = ops.mean(error * error, scheme.names("data", "z", "x"))
    return mean * (config.image_channels / 3)


def batch_specs(scheme: Scheme) -> tuple[Any, ...]:
    """Of what follows params in `loss`; the last two are the same features, split over y and x."""
    image, times = scheme.output_spec(4), scheme.input_spec()
    return image, image, times, scheme.transposed.input_spec()
