"""Trains a U-Net on a grid of ranks and on one device, and compares them.

The second workload of arXiv 2305.13525. The model (unet_model.py) is made of jflux.parallel's
layers, split in up to three dimensions beside the batch; on one device the same model is made of
`jax.numpy` and `lax` alone. It learns to tell the noise in generated images of discs and boxes
(arXiv 2006.11239). Both runs start from the same weights and see the same batches, one step in
turn, so the curves must agree up to rounding, as in the paper's figure 8::

    python examples/train_unet.py                  # a grid 2,2,2,1, if there are eight devices
    python examples/train_unet.py --grid 1,2,2,2   # ranks along x, y, z and data
    python examples/train_unet.py --no-overlap     # its communication hidden nowhere
    python examples/train_unet.py --no-reference   # the grid alone

Writes the curves to out/unet_loss.png. Without a GPU it runs a small model on eight virtual
devices, which takes two minutes on two cores, and prints, after a line about its sizes::

          grid: training loss 0.9854 -> 0.1680, validation 0.2073, median step ... ms (150 steps)
    one device: training loss 0.9854 -> 0.1680, validation 0.2073, median step ... ms (150 steps)
    largest difference between the loss curves: 8.345e-07 in 150 steps
    wrote out/unet_loss.png
"""

from __future__ import annotations

import argparse
import functools
import os
from collections.abc import Iterator

# Virtual devices where there is no GPU; has no effect where there are some.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np
import optax
import unet_model
from grid_ops import OnGrid, Plain
from grid_training import (
    add_arguments,
    check_batch,
    grid_and_one_device,
    plot,
    report,
    round_up,
    schedule_of,
    scheme_of,
)
from tqdm import tqdm

from jflux.parallel import Grid

SIZES = {"steps": 150, "batch": 16, "image": 16, "channels": 32, "levels": 3, "blocks": 1}


def images(rng: np.random.Generator, count: int, size: int) -> np.ndarray:
    """Discs and boxes of any colour on any other: float32 [count, size, size, 3] in [-1, 1]."""
    x, y = np.meshgrid(*2 * [np.linspace(-1, 1, size, dtype=np.float32)])
    drawn = np.broadcast_to(rng.uniform(-1, 1, (count, 1, 1, 3)), (count, size, size, 3))
    for _ in range(3):
        left, top = rng.uniform(-0.8, 0.8, (2, count, 1, 1))
        radius = rng.uniform(0.2, 0.6, (count, 1, 1))
        disc, box = np.hypot(x - left, y - top), np.maximum(abs(x - left), abs(y - top))
        inside = np.where(rng.random((count, 1, 1)) < 0.5, disc, box) < radius
        drawn = np.where(inside[..., None], rng.uniform(-1, 1, (count, 1, 1, 3)), drawn)
    return drawn.astype(np.float32)


def batches(config: unet_model.Config, batch: int, size: int, seed: int) -> Iterator[tuple]:
    """Endless (noisy images, their noise, features of their times, the same), as
    `unet_model.loss` takes them."""
    rng = np.random.default_rng(seed)
    frequencies = 1000 * 10_000.0 ** (-np.arange(config.channels // 2) / (config.channels // 2))
    more = ((0, 0), (0, 0), (0, 0), (0, config.image_channels - 3))
    while True:
        clean = images(rng, batch, size)
        noise = rng.standard_normal(clean.shape, np.float32)
        time = rng.random((batch, 1, 1, 1), np.float32)
        # The share of noise grows along a quarter of a circle (arXiv 2102.09672, section 3.2).
        noisy = np.cos(time * np.pi / 2) * clean + np.sin(time * np.pi / 2) * noise
        angle = time[:, 0, 0] * frequencies
        features = np.concatenate([np.sin(angle), np.cos(angle)], 1).astype(np.float32)
        yield np.pad(noisy, more), np.pad(noise, more), features, features


def config_of(args: argparse.Namespace) -> unet_model.Config:
    """Raises ValueError if the model does not split over the grid."""
    config = unet_model.Config(
        args.channels, args.levels, args.blocks,
        image_channels=round_up(3, args.grid.x * args.grid.z),
        dtype=jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16,
    )  # fmt: skip
    config.check(args.grid)
    check_batch(args.batch, args.grid)
    if args.image % 2 ** (args.levels - 1):
        raise ValueError(f"an image of {args.image} pixels has no {args.levels} levels")
    return config


def parse_arguments() -> tuple[argparse.Namespace, unet_model.Config]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, default in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default: {default}")
    grids = (Grid(2, 2, 2), Grid(2, 2), Grid(2), Grid())
    add_arguments(parser, grid=next(g for g in grids if g.ranks <= jax.device_count()))
    args = parser.parse_args()
    if any(getattr(args, name) < 1 for name in SIZES):
        parser.error(f"{', '.join('--' + s for s in SIZES)} must be positive")
    try:
        return args, config_of(args)
    except ValueError as error:
        parser.error(str(error))


def main() -> None:
    args, config = parse_arguments()
    scheme = scheme_of(args)
    params = unet_model.parameters(config, scheme)
    losses = tuple(
        functools.partial(unet_model.loss, ops, config, scheme) for ops in (OnGrid, Plain)
    )
    tx = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adam(schedule_of(args.steps, highest=2e-3))
    )
    runs = grid_and_one_device(
        args.grid, params, losses, unet_model.batch_specs(scheme), tx, args.seed,
        reference=not args.no_reference,
    )  # fmt: skip
    parameters = sum(p.size for p in jax.tree.leaves(runs["grid"].state[0]))
    title = (
        f"U-Net of {parameters / 1e6:.1f} M parameters, {jnp.dtype(config.dtype).name}, "
        f"{args.grid} (x, y, z, data) {jax.default_backend()} devices"
    )
    print(
        f"{title}; {config.levels} levels from {config.channels} channels, batch {args.batch} of "
        f"{args.image} x {args.image} pixels"
    )
    training = batches(config, args.batch, args.image, args.seed)
    for _ in (bar := tqdm(range(args.steps), desc="train", mininterval=1.0)):
        batch = next(training)
        for run in runs.values():
            run.step(*batch)
        bar.set_postfix(loss=f"{runs['grid'].losses[-1]:.3f}", refresh=False)

    validation = batches(config, args.batch, args.image, args.seed + 1)
    report(runs, [next(validation) for _ in range(8)])
    plot(runs, args.out / "unet_loss.png", title, "mean square error of the noise")


if __name__ == "__main__":
    main()
