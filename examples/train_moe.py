"""Trains a language model of mixtures of experts on jflux, and compares its first steps with plain
JAX.

The model (moe_model.py) is that of train_gpt.py, with a mixture of gated experts in place of each
MLP. It learns the same text, over a mesh of any sizes along three axes: "data" splits the batch,
"expert" the batch and the experts, "tp" sequences, heads and each expert's hidden units::

    python examples/train_moe.py                           # 2 x 2 x what is left
    python examples/train_moe.py --data 1 --expert 8       # expert parallel alone
    python examples/train_moe.py --data 1 --expert 1       # tensor parallel alone
    python examples/train_moe.py --exchange dispatch       # a token goes to its experts alone

The second run, on `lax.ragged_dot`, `lax`'s collectives and products, starts from the same weights
and sees the same batches. Its curve agrees up to rounding as long as no token's choice hangs by a
rounding: then one token has another expert.

Writes the curves to out/loss.png. Without a GPU it runs a small model on eight virtual devices,
which takes three minutes on two cores. There it prints::

    2.6 M parameters, float32, 2 (data) x 2 (expert) x 2 (tp) cpu devices; 3 layers of 128,
    2 of 8 experts of 256, batch 16 x 128 bytes
    jflux: training loss 6.2832 -> 1.8901, validation 2.0251, median step ... ms (200 steps)
      lax: training loss 6.2832 -> 2.5642, validation 2.5726, median step ... ms (50 steps)
    largest difference between the loss curves: 4.768e-07 in 50 steps
    wrote out/loss.png
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
from pathlib import Path

# Virtual devices where there is no GPU; has no effect where there are some.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import moe_model
import numpy as np
from grid_training import round_up, schedule_of
from jax.sharding import Mesh
from train_gpt import PRESETS, SIZES, Preset, Trainer, train

import jflux


class MoETrainer(Trainer):
    """A `Trainer` over a mesh ("data", "expert", "tp")."""

    Model = moe_model.MoE
    rows = ("data", "expert")


def parse_arguments() -> tuple[argparse.Namespace, Preset, tuple[int, int, int]]:
    """The arguments, sizes to train at, and those of the mesh."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name in SIZES:
        parser.add_argument(f"--{name}", type=int, help="default: by platform, as in train_gpt.py")
    parser.add_argument("--experts", type=int, default=8, help="of a mixture; default: 8")
    parser.add_argument("--k", type=int, default=2, help="experts of a token; default: 2")
    parser.add_argument(
        "--exchange", choices=("auto", "gather", "dispatch", "fused"), default="auto",
        help="how tokens come to the ranks of their experts; default: a dispatch where it pays",
    )  # fmt: skip
    for name in ("data", "expert"):
        parser.add_argument(f"--{name}", type=int, help="ranks along this axis; default: 2, or 1")
    parser.add_argument("--compare", type=int, default=50, help="steps of the plain form")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the plot")
    parser.add_argument("--no-reference", action="store_true", help="train on jflux alone")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    cpu, left = jax.default_backend() == "cpu", jax.device_count()
    given = {k: v for k, v in vars(args).items() if k in SIZES and v is not None}
    preset = PRESETS["cpu" if cpu else "1-3 gpus" if left < 4 else "4+ gpus"]
    size = dataclasses.replace(preset, **given)
    shape = []
    for ranks, name in ((args.data, "data"), (args.expert, "expert")):
        ranks = (2 if left % 2 == 0 else 1) if ranks is None else ranks
        if ranks < 1 or left % ranks:
            parser.error(f"--{name} {ranks} does not divide {left} devices")
        shape.append(ranks)
        left //= ranks
    if args.experts % shape[1] or not 1 <= args.k <= args.experts:
        parser.error(
            f"--experts {args.experts} must divide by --expert {shape[1]}, and be at least --k"
        )
    return args, size, (shape[0], shape[1], left)


def main() -> None:
    args, size, shape = parse_arguments()
    data, expert, tp = shape
    mesh = Mesh(np.array(jax.devices()).reshape(shape), ("data", "expert", "tp"))
    config = moe_model.Config(
        layers=size.layers,
        heads=round_up(-(-size.width // size.head_dim), tp),
        head_dim=size.head_dim,
        vocab=round_up(256, tp),
        dtype=size.dtype,
        experts=args.experts,
        k=args.k,
        hidden=round_up(2 * size.width, tp),
        exchange=args.exchange,
    )
    schedule = schedule_of(size.steps, size.learning_rate)
    ops = {"jflux": jflux} if args.no_reference else {"jflux": jflux, "lax": jflux.reference}
    runs = {
        name: MoETrainer(dataclasses.replace(config, ops=module), mesh, schedule, args.seed)
        for name, module in ops.items()
    }
    first = next(iter(runs.values()))
    seq, batch = round_up(size.seq, tp), round_up(size.batch, data * expert)
    parameters = sum(math.prod(p.shape) for p in jax.tree.leaves(first.state[0]))
    title = (
        f"{parameters / 1e6:.1f} M parameters, {jnp.dtype(size.dtype).name}, "
        f"{data} (data) x {expert} (expert) x {tp} (tp) {jax.default_backend()} devices"
    )
    print(
        f"{title}; {size.layers} layers of {config.width}, {args.k} of {args.experts} experts of "
        f"{config.hidden}, batch {batch} x {seq} bytes"
    )

    train(runs, args, size.steps, batch, seq, title)


if __name__ == "__main__":
    main()
