"""Trains a language model on sequences that are split over all devices, attention included.

Each device has a part of every sequence in all layers. Between the attentions nothing travels; in
them `jflux.attention` brings keys and values to the queries. The model is made of jflux.nn's NNX
layers with `context_axis`, and learns the text of train_gpt.py.

First it trains at a length that one device can have, beside the same model on one device, from the
same weights and with the same batches: the curves must agree up to rounding. Then it goes on at the
full length, and says what a step needs there of a device's memory, and what it would need of one::

    python examples/long_context.py                              # all devices
    python examples/long_context.py --length 131072 --tp 2       # and heads over two of them

In the zigzag order each device has an early and a late part of the sequence, so that causal
attention gives all of them as much work.

Writes the curves of the comparison to out/loss.png. Without a GPU it trains a small model on eight
virtual devices, which takes three minutes on two cores. There it prints::

    float32, 8 (cp) x 1 (tp) cpu devices; 2 layers of 128
         split: training loss 5.5790 -> 2.3611, validation 2.5559, median step ... ms (60 steps)
    one device: training loss 5.5790 -> 2.3611, validation 2.5559, median step ... ms (60 steps)
    largest difference between the loss curves: 9.537e-07 in 60 steps
    wrote out/loss.png
    a step on 4096 positions needs 98 MiB of a device; of one alone 2085 MiB
    10 steps on them: validation 2.8064 -> 2.7100
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import time
from pathlib import Path
from typing import Any

# Virtual devices where there is no GPU; has no effect where there are some.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from grid_training import plot, report, round_up, schedule_of
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from tqdm import tqdm
from train_gpt import batches, standard_library

import jflux
import jflux.nn
import jflux.nn.nnx


@dataclasses.dataclass(frozen=True)
class Size:
    """What to train where. `length` is that of the long sequences, `short` that of the comparison;
    there are `batch` short ones in a step, and one long one."""

    layers: int
    heads: int
    head_dim: int
    length: int
    short: int
    batch: int
    steps: int
    learning_rate: float
    dtype: Any


CPU = Size(2, 8, 16, 4096, 256, 8, 60, 3e-3, jnp.float32)
GPU = Size(8, 16, 128, 131072, 8192, 2, 60, 3e-4, jnp.bfloat16)


class Block(nnx.Module):
    """Attention, then an MLP, each behind a norm and beside a residual: [1, s, d] -> same."""

    def __init__(self, size: Size, context_axis: str | None, rngs: nnx.Rngs):
        d = size.heads * size.head_dim
        options: dict[str, Any] = {
            "x_spec": P(None, context_axis), "use_bias": False, "dtype": size.dtype, "rngs": rngs,
        }  # fmt: skip
        self.attention_norm = nnx.RMSNorm(d, dtype=size.dtype, rngs=rngs)
        self.attention = jflux.nn.nnx.Attention(
            size.heads, d, is_causal=True, rotate=jflux.nn.Rotary(), context_axis=context_axis,
            **options,
        )  # fmt: skip
        self.mlp_norm = nnx.RMSNorm(d, dtype=size.dtype, rngs=rngs)
        self.mlp = jflux.nn.nnx.MLP(d, 4 * d, **options)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.attention(self.attention_norm(x), residual=x)
        return self.mlp(self.mlp_norm(x), residual=x)


class Model(nnx.Module):
    """Byte-level language model."""

    def __init__(self, size: Size, context_axis: str | None, rngs: nnx.Rngs):
        d = size.heads * size.head_dim
        self.x_spec = P(None, context_axis)
        self.embed = jflux.nn.nnx.Embed(256, d, dtype=size.dtype, x_spec=self.x_spec, rngs=rngs)
        self.blocks = nnx.List([Block(size, context_axis, rngs) for _ in range(size.layers)])
        self.norm = nnx.RMSNorm(d, dtype=size.dtype, rngs=rngs)

    def loss(self, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        """The mean cross entropy, in nats, of tokens and targets [b, s]."""
        x = self.embed(tokens)
        for block in self.blocks:  # the backward pass computes each again, from its input
            graph, params = nnx.split(block)
            x = jax.checkpoint(lambda params, x, graph=graph: nnx.merge(graph, params)(x))(
                params, x
            )
        logits = self.embed.attend(self.norm(x))
        return jflux.nn.cross_entropy(logits, targets, axis_name="tp", x_spec=self.x_spec).mean()


class Trainer:
    """A model and its optimizer on a mesh ("cp", "tp"): sequences are split over "cp" if that has
    more than one device. Batches have a sequence's own order.

    Attributes:
      losses, seconds: of each step.
    """

    def __init__(self, size: Size, mesh: Mesh, schedule: optax.Schedule, seed: int):
        self.mesh, self.ranks = mesh, mesh.shape["cp"]
        with jax.set_mesh(mesh):
            model = Model(size, "cp" if self.ranks > 1 else None, nnx.Rngs(seed))
            tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
            optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
            self.graph, state = nnx.split((model, optimizer))
        shardings = nnx.get_named_sharding(state, mesh)
        self.state = jax.device_put(state, shardings)
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self._train = jax.jit(self._update, donate_argnums=0, out_shardings=(shardings, None))
        self._evaluate = jax.jit(self._loss)

    def _loss(self, state, tokens, targets):
        return nnx.merge(self.graph, state)[0].loss(*self._in_order(tokens, targets))

    def _in_order(self, *arrays: jax.Array) -> list[jax.Array]:
        return [jflux.reorder_for_causal(a, self.ranks) for a in arrays]

    def _update(self, state, tokens, targets):
        model, optimizer = nnx.merge(self.graph, state)
        batch = self._in_order(tokens, targets)
        loss, grads = nnx.value_and_grad(lambda model: model.loss(*batch))(model)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer)), loss

    def step(self, tokens: np.ndarray, targets: np.ndarray) -> None:
        start = time.perf_counter()
        with jax.set_mesh(self.mesh):
            self.state, loss = self._train(self.state, tokens, targets)
        self.losses.append(float(loss))
        self.seconds.append(time.perf_counter() - start)

    def evaluate(self, state: Any, tokens: np.ndarray, targets: np.ndarray) -> float:
        with jax.set_mesh(self.mesh):
            return float(self._evaluate(state, tokens, targets))

    def mean_loss(self, held_out: list[Any]) -> float:
        return float(np.mean([self.evaluate(self.state, *batch) for batch in held_out]))

    def temporary_bytes(self, length: int) -> int:
        """What a step on one sequence of this length needs of a device, beside parameters."""
        batch = jax.ShapeDtypeStruct((1, length), jnp.int32)
        with jax.set_mesh(self.mesh):
            compiled = self._train.lower(self.state, batch, batch).compile()
        return compiled.memory_analysis().temp_size_in_bytes


def parse_arguments() -> tuple[argparse.Namespace, Size]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name in ("layers", "heads", "length", "short", "batch", "steps"):
        parser.add_argument(f"--{name}", type=int, help="default: by platform, see CPU and GPU")
    parser.add_argument("--tp", type=int, default=1, help="devices that heads are split over")
    parser.add_argument("--long-steps", type=int, default=10, help="at the full length")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the plot")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    names = {field.name for field in dataclasses.fields(Size)}
    given = {k: v for k, v in vars(args).items() if k in names and v is not None}
    size = dataclasses.replace(CPU if jax.default_backend() == "cpu" else GPU, **given)
    if any(v < 1 for v in (*given.values(), args.tp, args.long_steps)):
        parser.error("sizes must be positive")
    if jax.device_count() % args.tp or size.heads % args.tp:
        parser.error(f"--tp {args.tp} must divide {jax.device_count()} devices, {size.heads} heads")
    # Two equal parts of the sequence for each device.
    step = 2 * jax.device_count()
    return args, dataclasses.replace(
        size, length=round_up(size.length, step), short=round_up(size.short, step)
    )


def main() -> None:
    args, size = parse_arguments()
    devices = np.array(jax.devices())
    schedule = schedule_of(size.steps + args.long_steps, size.learning_rate)
    make = functools.partial(Trainer, size, schedule=schedule, seed=args.seed)
    split = make(mesh=Mesh(devices.reshape(-1, args.tp), ("cp", "tp")))
    whole = make(mesh=Mesh(devices[:1].reshape(1, 1), ("cp", "tp")))
    runs = {"split": split, "one device": whole}
    title = (
        f"{jnp.dtype(size.dtype).name}, {split.ranks} (cp) x {args.tp} (tp) "
        f"{jax.default_backend()} devices"
    )
    print(f"{title}; {size.layers} layers of {size.heads * size.head_dim}")

    text = standard_library()
    cut = len(text) * 9 // 10
    training = batches(text[:cut], size.batch, size.short, args.seed)
    for _ in tqdm(range(size.steps), desc=f"{size.short} positions", mininterval=1.0):
        batch = next(training)
        for run in runs.values():
            run.step(*batch)
    validation = batches(text[cut:], size.batch, size.short, args.seed)
    report(runs, [next(validation) for _ in range(4)])
    plot(runs, args.out / "loss.png", title, "nats per byte")

    needs = {name: run.temporary_bytes(size.length) for name, run in runs.items()}
    print(
        f"a step on {size.length} positions needs {needs['split'] / 2**20:.0f} MiB of a device; of "
        f"one alone {needs['one device'] / 2**20:.0f} MiB"
    )
    validation = batches(text[cut:], 1, size.length, args.seed)
    held_out = [next(validation) for _ in range(4)]
    before = split.mean_loss(held_out)
    training = batches(text[:cut], 1, size.length, args.seed)
    for _ in tqdm(range(args.long_steps), desc=f"{size.length} positions", mininterval=1.0):
        split.step(*next(training))
    after = split.mean_loss(held_out)
    print(f"{args.long_steps} steps on them: validation {before:.4f} -> {after:.4f}")


if __name__ == "__main__":
    main()
