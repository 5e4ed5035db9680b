"""Trains a tensor-parallel language model on jflux, and compares its first steps with plain lax.

The model (gpt_model.py) is written in Flax NNX. All its projections are fused jflux ops, its
activations are split over the ranks by sequence position, its logits by vocabulary. It learns the
source text of Python's own standard library, byte by byte. A second run on plain lax starts from
the same weights and sees the same batches, so the curves must agree up to rounding. It ends after
the first steps (--compare), which show that::

    python examples/train_gpt.py                  # all devices tensor-parallel
    python examples/train_gpt.py --data 2         # two data-parallel groups
    python examples/train_gpt.py --no-reference   # the jflux model alone
    python examples/train_gpt.py --recipe block   # in 8 bits, compared with 16 (or 32) bits

On a grid, a model of the same kind (grid_gpt_model.py) is made of jflux.parallel's layers, and
split in up to three dimensions beside the batch. It is compared with the same model in jax.numpy on
one device, as in figure 8 of arXiv 2305.13525::

    python examples/train_gpt.py --grid 2,2,2,1                # ranks along x, y, z and data
    python examples/train_gpt.py --grid 2,2,2,1 --no-overlap   # its communication hidden nowhere

Writes the curves to out/loss.png. Without a GPU it runs a small model on eight virtual devices,
which takes two minutes on two cores. Sizes come from `PRESETS`, rounded up to what the devices
divide; those of a model on a grid must divide as they are. On eight virtual devices it prints::

    0.7 M parameters, float32, 1 (data) x 8 (tp) cpu devices; 3 layers of 128, batch 16 x 128 bytes
    jflux: training loss 5.6944 -> 1.8634, validation 1.9969, median step ... ms (200 steps)
      lax: training loss 5.6944 -> 2.4117, validation 2.4855, median step ... ms (50 steps)
    largest difference between the loss curves: 1.383e-05 in 50 steps
    wrote out/loss.png
    sample:
    def __init__(self)
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

# Virtual devices where there is no GPU; has no effect where there are some.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import grid_gpt_model
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from gpt_model import GPT, Config
from grid_ops import OnGrid, Plain
from grid_training import (
    add_arguments,
    check_batch,
    grid_and_one_device,
    on_grid,
    plot,
    report,
    round_up,
    schedule_of,
    scheme_of,
)
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from tqdm import tqdm

import jflux
from jflux.parallel import Grid


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
    """A model, its optimizer, and their compiled functions over a mesh ("data", "tp").

    Attributes:
      Model: made of a config and rngs; its `loss` runs on one rank.
      rows: the mesh axes that split the batch.
    """

    Model: Any = GPT
    rows: Any = "data"

    def __init__(self, config: Any, mesh: Mesh, schedule: optax.Schedule, seed: int):
        with jax.set_mesh(mesh):
            model = self.Model(config, nnx.Rngs(seed))
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
        rows = (P(self.rows, "tp"), P(self.rows, None))
        return self._per_rank(model, self.Model.loss, rows, P())

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
        model, _ = nnx.merge(self.graph, state)
        logits_of, params = self._per_rank(
            model, self.Model.__call__, (P(None, "tp"),), P(None, None, "tp")
        )
        return continued(logits_of, params, window, start, key, count)


def continued(logits_of, params, window, start, key, count):
    """window [b, s], of equal rows, filled from position `start` on with `count` bytes drawn from
    the model."""

    def fill(i, window):
        logits = logits_of(params, window)[0, i - 1, :256]  # the rest pads the vocabulary
        drawn = jax.random.categorical(jax.random.fold_in(key, i), logits / 0.7)
        return window.at[:, i].set(drawn)

    return jax.lax.fori_loop(start, start + count, fill, window)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One model by two means, the first of them jflux.

    Attributes:
      runs: have `losses`, `seconds`, `state`, `step` and `evaluate`, as `Trainer`.
      sample: `continued`, of the first run's state.
      devices: what they are split over, in words.
      config: of the model.
      seq, batch: sizes of a batch that both can take.
      rows: how many rows `sample` must get.
    """

    runs: dict[str, Any]
    sample: Callable[..., jax.Array]
    devices: str
    config: Any
    seq: int
    batch: int
    rows: int = 1


def on_one_axis(args: argparse.Namespace, size: Preset, schedule: optax.Schedule) -> Comparison:
    """jflux and plain lax, over a mesh ("data", "tp") of all devices."""
    tp = jax.device_count() // args.data
    mesh = Mesh(np.array(jax.devices()).reshape(args.data, tp), ("data", "tp"))
    config = Config(
        layers=size.layers,
        heads=round_up(-(-size.width // size.head_dim), tp),
        head_dim=size.head_dim,
        vocab=round_up(256, tp),
        dtype=size.dtype,
    )
    changes: dict[str, Any] = {"jflux": {}, "lax": {"ops": jflux.reference}}
    if args.recipe:
        in_8_bits = {"recipe": getattr(jflux.Recipe, args.recipe)}
        changes = {f"jflux {args.recipe}": in_8_bits, "jflux": {}}
    runs = {
        name: Trainer(dataclasses.replace(config, **change), mesh, schedule, args.seed)
        for name, change in list(changes.items())[: 1 if args.no_reference else None]
    }
    devices = f"{args.data} (data) x {tp} (tp)"
    seq, batch = round_up(size.seq, tp), round_up(size.batch, args.data)
    return Comparison(runs, next(iter(runs.values())).sample, devices, config, seq, batch)


def on_a_grid(args: argparse.Namespace, size: Preset, schedule: optax.Schedule) -> Comparison:
    """jflux.parallel on a grid, and jax.numpy on one device."""
    grid, scheme, config = args.grid, scheme_of(args), grid_config(args.grid, size)
    params = grid_gpt_model.parameters(config, scheme)
    losses = tuple(
        functools.partial(grid_gpt_model.loss, ops, config, scheme) for ops in (OnGrid, Plain)
    )
    rows = scheme.rows_spec()
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
    runs = grid_and_one_device(
        grid, params, losses, (rows, rows), tx, args.seed, reference=not args.no_reference
    )
    logits = functools.partial(grid_gpt_model.logits, OnGrid, config, scheme)
    logits_of = on_grid(logits, grid, params, (rows,), scheme.output_spec(3))

    @functools.partial(jax.jit, static_argnames="count")
    def sample(state, window, start, key, *, count):
        return continued(logits_of, state[0], window, start, key, count)

    devices = f"{grid} (x, y, z, data)"
    rows = grid.data * grid.z
    return Comparison(runs, sample, devices, config, size.seq, size.batch, rows)


def grid_config(grid: Grid, size: Preset) -> grid_gpt_model.Config:
    """Raises ValueError if the model does not split over the grid."""
    config = grid_gpt_model.Config(
        layers=size.layers,
        heads=-(-size.width // size.head_dim),
        head_dim=size.head_dim,
        vocab=round_up(256, grid.x * grid.z),
        dtype=size.dtype,
    )
    config.check(grid)
    check_batch(size.batch, grid)
    return config


def parse_arguments() -> tuple[argparse.Namespace, Preset]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name in SIZES:
        parser.add_argument(f"--{name}", type=int, help="default: by platform, see PRESETS")
    parser.add_argument("--data", type=int, help="data-parallel groups; default: 1")
    parser.add_argument(
        "--compare", type=int, default=50, help="steps of the model to compare with; default: 50"
    )
    recipes = ("tensor", "row", "block")
    parser.add_argument("--recipe", choices=recipes, help="products in 8 bits, by a jflux.Recipe")
    add_arguments(parser, grid=None)
    args = parser.parse_args()
    positive = (*SIZES, "compare")
    if any(v is not None and v < 1 for k, v in vars(args).items() if k in positive):
        parser.error(f"{', '.join('--' + s for s in positive)} must be positive")
    # Of what is on a grid, one device has a whole copy beside it.
    devices = 1 if args.grid else jax.device_count()
    cpu = jax.default_backend() == "cpu"
    preset = PRESETS["cpu" if cpu else "1-3 gpus" if devices < 4 else "4+ gpus"]
    given = {k: v for k, v in vars(args).items() if k in SIZES and v is not None}
    size = dataclasses.replace(preset, **given)
    if args.grid:
        if args.data is not None:
            parser.error("--data: the last number of --grid is that of its data-parallel groups")
        if args.recipe:
            parser.error("--recipe is for a model that is not on a --grid")
        try:
            grid_config(args.grid, size)
        except ValueError as error:
            parser.error(f"--grid: {error}")
    elif args.no_overlap:
        parser.error("--no-overlap is for --grid")
    else:
        args.data = 1 if args.data is None else args.data
        if args.data < 1 or devices % args.data:
            parser.error(f"--data {args.data} does not divide {devices} devices")
    return args, size


def train(
    runs: Mapping[str, Any], args: argparse.Namespace, steps: int, batch: int, seq: int, title: str
) -> None:
    """Trains the first run, and the others for the first `args.compare` steps; says and draws what
    came of it."""
    text = standard_library()
    split = len(text) * 9 // 10
    training = batches(text[:split], batch, seq, args.seed)
    first, *others = runs.values()
    for step in (bar := tqdm(range(steps), desc="train", mininterval=1.0)):
        tokens, targets = next(training)
        first.step(tokens, targets)
        for other in others if step < args.compare else []:
            other.step(tokens, targets)
        bar.set_postfix(loss=f"{first.losses[-1]:.3f}", refresh=False)
    validation = batches(text[split:], batch, seq, args.seed)
    report(runs, [next(validation) for _ in range(4)])
    plot(runs, args.out / "loss.png", title, "nats per byte")


def main() -> None:
    args, size = parse_arguments()
    schedule = schedule_of(size.steps, size.learning_rate)
    trained = (on_a_grid if args.grid else on_one_axis)(args, size, schedule)
    seq, batch, runs = trained.seq, trained.batch, trained.runs
    first = next(iter(runs.values()))
    parameters = sum(p.size for p in jax.tree.leaves(first.state[0]))
    title = (
        f"{parameters / 1e6:.1f} M parameters, {jnp.dtype(size.dtype).name}, {trained.devices} "
        f"{jax.default_backend()} devices"
    )
    print(f"{title}; {size.layers} layers of {trained.config.width}, batch {batch} x {seq} bytes")

    train(runs, args, size.steps, batch, seq, title)

    prompt = np.frombuffer(b"def __init__(self", np.uint8)[: seq // 2]
    window = np.zeros((trained.rows, seq), np.int32)
    window[:, : len(prompt)] = prompt
    end = min(seq, 512)
    key, count = jax.random.key(args.seed), end - len(prompt)
    window = trained.sample(first.state, window, len(prompt), key, count=count)
    print(
        "sample:", bytes(np.asarray(window[0, :end], np.uint8)).decode("ascii", "replace"), sep="\n"
    )


if __name__ == "__main__":
    main()
