"""Trains a tensor-parallel language model, once on jflux and once on plain lax, and compares them.

The model (gpt_model.py) is written in Flax NNX. All its projections are fused jflux ops, its
activations are split over the ranks by sequence position, its logits by vocabulary. It learns the
source text of Python's own standard library, byte by byte. Both runs start from the same weights
and see the same batches, one step in turn, so the curves must agree up to rounding::

    python examples/train_gpt.py                  # all devices tensor-parallel
    python examples/train_gpt.py --data 2         # two data-parallel groups
    python examples/train_gpt.py --no-reference   # the jflux model alone

Prints the largest difference between the loss curves, the time of a step of each, and a text
sampled from the model; writes the curves to out/loss.png. Without a GPU it runs a small model on
eight virtual devices, in about two minutes on two cores. Sizes come from `PRESETS`, rounded up to
what the devices divide.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Virtual devices where there is no GPU; has no effect where there are some.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from gpt_model import GPT, Config
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from matplotlib.figure import Figure
from tqdm import tqdm

import jflux


@dataclasses.dataclass(frozen=True)
class Preset:
    """What to train where; `width` is d_model, `learning_rate` the highest one."""

    layers: int
    width: int
    head_dim: int
    seq: int
    batch: int
    steps: int
    learning_rate: float
    dtype: Any


PRESETS = {
    "cpu": Preset(3, 128, 16, 128, 16, 200, 3e-3, jnp.float32),
    "1-3 gpus": Preset(12, 2048, 128, 2048, 8, 300, 4e-4, jnp.bfloat16),
    "4+ gpus": Preset(12, 4096, 128, 2048, 8, 300, 3e-4, jnp.bfloat16),
}
SIZES = ("steps", "batch", "seq", "layers", "width")  # what the command line can change


def standard_library() -> np.ndarray:
    """Bytes of the top-level modules of Python's standard library, in alphabetical order."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return np.frombuffer(b"\n".join(f.read_bytes() for f in files), np.uint8)


def batches(text: np.ndarray, batch: int, seq: int, seed: int) -> Iterator[tuple[Any, Any]]:
    """Endless (tokens, targets), int32 [batch, seq] each, from random places."""
    rng = np.random.default_rng(seed)
    while True:
        starts = rng.integers(len(text) - seq, size=batch)
        window = text[starts[:, None] + np.arange(seq + 1)].astype(np.int32)
        yield window[:, :-1], window[:, 1:]


class Trainer:
    """A model, its optimizer, and their compiled functions over a mesh ("data", "tp")."""

    def __init__(self, config: Config, mesh: Mesh, schedule: optax.Schedule, seed: int):
        with jax.set_mesh(mesh):
            model = GPT(config, nnx.Rngs(seed))
            tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
            optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
            self.graph, state = nnx.split((model, optimizer))
        # Adam's moments are split as their parameters are.
        shardings = nnx.get_named_sharding(state, mesh)
        self.state = jax.device_put(state, shardings)
        self.mesh = mesh
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self._train = jax.jit(self._update, donate_argnums=0, out_shardings=(shardings, None))
        self.evaluate = jax.jit(self._evaluate)
        self.sample = jax.jit(self._sample, static_argnames="count")

    def step(self, tokens: jax.Array, targets: jax.Array) -> None:
        start = time.perf_counter()
        self.state, loss = self._train(self.state, tokens, targets)
        self.losses.append(float(loss))
        self.seconds.append(time.perf_counter() - start)

    def _per_rank(self, model: GPT, method: Callable[..., Any], in_specs: Any, out_specs: Any):
        """`(parameters, *args) -> method(model, *args)` on every rank, with its part of each."""
        graph, params = nnx.split(model)

        def call(params, *args):
            return method(nnx.merge(graph, params), *args)

        in_specs = (nnx.get_partition_spec(params), *in_specs)
        call = jax.shard_map(call, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs)
        return call, params

    def _loss(self, model: GPT):
        return self._per_rank(model, GPT.loss, (P("data", "tp"), P("data", None)), P())

    def _update(self, state, tokens, targets):
        model, optimizer = nnx.merge(self.graph, state)
        loss_of, params = self._loss(model)
        # shard_map's transpose sums the gradients of what is replicated (norms, embedding) over
        # the ranks; the optimizer works on global arrays, so the norm it clips by is global too.
        loss, grads = jax.value_and_grad(loss_of)(params, tokens, targets)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer)), loss

    def _evaluate(self, state, tokens, targets):
        model, _ = nnx.merge(self.graph, state)
        loss_of, params = self._loss(model)
        return loss_of(params, tokens, targets)

    def _sample(self, state, window, start, key, *, count):
        """Fills window [1, s] from position `start` on with `count` bytes drawn from the model."""
        model, _ = nnx.merge(self.graph, state)
        logits_of, params = self._per_rank(
            model, GPT.__call__, (P(None, "tp"),), P(None, None, "tp")
        )

        def fill(i, window):
            logits = logits_of(params, window)[0, i - 1, :256]  # the rest pads the vocabulary
            drawn = jax.random.categorical(jax.random.fold_in(key, i), logits / 0.7)
            return window.at[0, i].set(drawn)

        return jax.lax.fori_loop(start, start + count, fill, window)


def plot(runs: dict[str, Trainer], path: Path, title: str) -> None:
    """Loss curves above, their difference below."""
    figure = Figure(figsize=(8, 3 + 2 * len(runs)), layout="constrained")
    ratios = [3, 1][: len(runs)]
    axes = figure.subplots(len(runs), sharex=True, squeeze=False, height_ratios=ratios)
    styles = {"jflux": dict(lw=5, alpha=0.35), "lax": dict(lw=1.2, color="black")}
    for name, run in runs.items():
        axes[0, 0].plot(np.arange(1, len(run.losses) + 1), run.losses, label=name, **styles[name])
    axes[0, 0].set(ylabel="training loss [nats per byte]", title=title)
    axes[0, 0].legend()
    if len(runs) == 2:
        gap = np.abs(np.subtract(*(run.losses for run in runs.values())))
        axes[1, 0].semilogy(np.arange(1, len(gap) + 1), np.maximum(gap, 1e-8))
        axes[1, 0].set(ylabel="|difference|\n(0 is drawn as 1e-8)")
    axes[-1, 0].set(xlabel="step")
    for axis in axes.flat:
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name in SIZES:
        parser.add_argument(f"--{name}", type=int, help="default: by platform, see PRESETS")
    parser.add_argument("--data", type=int, default=1, help="data-parallel groups")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for loss.png")
    parser.add_argument("--no-reference", action="store_true", help="train on jflux alone")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if any(v is not None and v < 1 for k, v in vars(args).items() if k in SIZES):
        parser.error(f"{', '.join('--' + s for s in SIZES)} must be positive")
    devices = jax.device_count()
    if args.data < 1 or devices % args.data:
        parser.error(f"--data {args.data} does not divide {devices} devices")
    return args


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def main() -> None:
    args = parse_arguments()
    devices, backend = jax.device_count(), jax.default_backend()
    preset = PRESETS["cpu" if backend == "cpu" else "1-3 gpus" if devices < 4 else "4+ gpus"]
    given = {k: v for k, v in vars(args).items() if k in SIZES and v is not None}
    size = dataclasses.replace(preset, **given)
    tp = devices // args.data
    mesh = Mesh(np.array(jax.devices()).reshape(args.data, tp), ("data", "tp"))
    seq, batch = round_up(size.seq, tp), round_up(size.batch, args.data)
    config = Config(
        layers=size.layers,
        heads=round_up(-(-size.width // size.head_dim), tp),
        head_dim=size.head_dim,
        vocab=round_up(256, tp),
        dtype=size.dtype,
    )
    schedule = optax.warmup_cosine_decay_schedule(
        0.0,
        size.learning_rate,
        warmup_steps=max(1, size.steps // 10),
        decay_steps=max(2, size.steps),
        end_value=size.learning_rate / 10,
    )
    ops = {"jflux": jflux} if args.no_reference else {"jflux": jflux, "lax": jflux.reference}
    runs = {
        name: Trainer(dataclasses.replace(config, ops=module), mesh, schedule, args.seed)
        for name, module in ops.items()
    }
    parameters = sum(p.size for p in jax.tree.leaves(runs["jflux"].state[0]))
    title = (
        f"{parameters / 1e6:.1f} M parameters, {jnp.dtype(size.dtype).name}, "
        f"{args.data} (data) x {tp} (tp) {backend} devices"
    )
    print(f"{title}; {config.layers} layers of {config.width}, batch {batch} x {seq} bytes")

    text = standard_library()
    split = len(text) * 9 // 10
    training = batches(text[:split], batch, seq, args.seed)
    for _ in (bar := tqdm(range(size.steps), desc="train", mininterval=1.0)):
        tokens, targets = next(training)
        for run in runs.values():
            run.step(tokens, targets)
        bar.set_postfix(loss=f"{runs['jflux'].losses[-1]:.3f}", refresh=False)

    validation = batches(text[split:], batch, seq, args.seed)
    held_out = [next(validation) for _ in range(4)]
    for name, run in runs.items():
        loss = np.mean([run.evaluate(run.state, *pair) for pair in held_out])
        warm = run.seconds[min(5, len(run.seconds) - 1) :]  # the first step compiles
        print(
            f"{name:>5}: training loss {run.losses[0]:.4f} -> {run.losses[-1]:.4f}, validation "
            f"{loss:.4f}, median step {1e3 * np.median(warm):.1f} ms"
        )
    if len(runs) == 2:
        gap = np.abs(np.subtract(*(run.losses for run in runs.values()))).max()
        print(f"largest difference between the loss curves: {gap:.3e}")

    args.out.mkdir(parents=True, exist_ok=True)
    plot(runs, args.out / "loss.png", title)
    print(f"wrote {args.out / 'loss.png'}")

    prompt = np.frombuffer(b"def __init__(self", np.uint8)[: seq // 2]
    window = np.zeros((1, seq), np.int32)
    window[0, : len(prompt)] = prompt
    end = min(seq, 512)
    run, key = runs["jflux"], jax.random.key(args.seed)
    window = run.sample(run.state, window, len(prompt), key, count=end - len(prompt))
    print(
        "sample:", bytes(np.asarray(window[0, :end], np.uint8)).decode("ascii", "replace"), sep="\n"
    )


if __name__ == "__main__":
    main()
