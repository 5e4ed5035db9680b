"""What the examples on a grid share: parameters, training beside one device, and the plot."""

from __future__ import annotations

import argparse
import dataclasses
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
from matplotlib.figure import Figure

from jflux.parallel import NO_OVERLAP, Grid, Scheme


@dataclasses.dataclass(frozen=True)
class Param:
    """A parameter's global shape, how it is split, and how it starts: normally distributed."""

    shape: tuple[int, ...]
    spec: PartitionSpec
    deviation: float = 0.0
    mean: float = 0.0

    def stacked(self, layers: int) -> Param:
        """One for each layer of a loop."""
        spec = PartitionSpec(None, *self.spec)
        return dataclasses.replace(self, shape=(layers, *self.shape), spec=spec)


def specs_of(params: Any) -> Any:
    return jax.tree.map(lambda p: p.spec, params)


def initial(params: Any, seed: int, dtype: Any = np.float32) -> Any:
    """Values for a pytree of `Param`, the same for every grid."""
    rng = np.random.default_rng(seed)

    def draw(p: Param) -> np.ndarray:
        noise = rng.standard_normal(p.shape, np.float32) if p.deviation else np.zeros(p.shape)
        return (p.mean + p.deviation * noise).astype(dtype)

    return jax.tree.map(draw, params)


class Run:
    """A model's weights, its optimizer, and their compiled functions; all arrays are global.

    Args:
      loss: (params, *batch) -> the mean over the global batch.
      params: what they start from, as host arrays.
      shardings: a pytree like params; Adam's moments are split as their parameters are.
      whole: the sharding of what is not split.
    """

    def __init__(
        self,
        loss: Callable[..., jax.Array],
        params: Any,
        tx: optax.GradientTransformation,
        shardings: Any,
        whole: jax.sharding.Sharding,
    ):
        moments = optax.tree_map_params(
            tx, lambda _, sharding: sharding, jax.eval_shape(tx.init, params), shardings,
            transform_non_params=lambda _: whole,
        )  # fmt: skip
        params = jax.device_put(params, shardings)
        self.state = params, jax.jit(tx.init, out_shardings=moments)(params)
        self.losses: list[float] = []
        self.seconds: list[float] = []

        def update(state, *batch):
            params, moments = state
            value, gradients = jax.value_and_grad(loss)(params, *batch)
            updates, moments = tx.update(gradients, moments, params)
            return (optax.apply_updates(params, updates), moments), value

        self._train = jax.jit(update, donate_argnums=0, out_shardings=((shardings, moments), whole))
        self.evaluate = jax.jit(lambda state, *batch: loss(state[0], *batch))

    def step(self, *batch: np.ndarray) -> None:
        start = time.perf_counter()
        self.state, loss = self._train(self.state, *batch)
        self.losses.append(float(loss))
        self.seconds.append(time.perf_counter() - start)


def on_grid(
    f: Callable[..., Any], grid: Grid, params: Any, in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """`f(params, *data)` of each rank's parts, as a function of global arrays; params is the
    pytree of `Param`."""
    specs = (specs_of(params), *in_specs)
    return jax.shard_map(f, mesh=grid.mesh(), in_specs=specs, out_specs=out_specs)


def grid_and_one_device(
    grid: Grid,
    params: Any,
    losses: tuple[Callable[..., Any], Callable[..., Any]],
    in_specs: Any,
    tx: optax.GradientTransformation,
    seed: int,
    reference: bool = True,
) -> dict[str, Run]:
    """The same weights on a grid and, if wanted, on its first device.

    Args:
      params: a pytree of `Param`.
      losses: of ranks' parts, and of whole arrays: (params, *batch) -> scalar.
      in_specs: of the batch.
    """
    mesh, values = grid.mesh(), initial(params, seed)
    shardings = jax.tree.map(lambda p: NamedSharding(mesh, p.spec), params)
    loss = on_grid(losses[0], grid, params, in_specs, PartitionSpec())
    whole = NamedSharding(mesh, PartitionSpec())
    runs = {"grid": Run(loss, values, tx, shardings, whole)}
    if reference:
        one = SingleDeviceSharding(mesh.devices.flat[0])
        runs["one device"] = Run(losses[1], values, tx, jax.tree.map(lambda _: one, params), one)
    return runs


# ---- Arguments -----------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser, *, grid: Grid | None) -> None:
    """What both examples take; `grid` is the default one."""
    parser.add_argument(
        "--grid",
        type=grid_argument,
        default=grid,
        metavar="X,Y,Z,DATA",
        help="ranks along the axes of a grid, such as 2,2,2,1; what is left out at the end is 1; "
        f"default: {grid or 'no grid'}",
    )
    parser.add_argument(
        "--no-overlap",
        action="store_true",
        help="on a grid, communication hides behind nothing (jflux.parallel.NO_OVERLAP)",
    )
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the plot")
    parser.add_argument("--no-reference", action="store_true", help="train on jflux alone")
    parser.add_argument("--seed", type=int, default=0)


def grid_argument(text: str) -> Grid:
    try:
        grid = Grid.parse(text)
        grid.mesh()
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("jflux: ")) from None
    return grid


def scheme_of(args: argparse.Namespace) -> Scheme:
    return Scheme(overlap=NO_OVERLAP) if args.no_overlap else Scheme()


def check_batch(batch: int, grid: Grid) -> None:
    parts = grid.data * grid.z
    if batch % parts:
        raise ValueError(f"a batch of {batch} does not split over data z = {parts} of {grid}")


def round_up(value: int, multiple: int) -> int:
    return math.ceil(value / multiple) * multiple


def schedule_of(steps: int, highest: float) -> optax.Schedule:
    """A tenth of the steps up, then down along a cosine to a tenth of the highest rate."""
    return optax.warmup_cosine_decay_schedule(
        0.0,
        highest,
        warmup_steps=max(1, steps // 10),
        decay_steps=max(2, steps),
        end_value=highest / 10,
    )


# ---- Results -------------------------------------------------------------------------------------


def report(runs: Mapping[str, Any], held_out: list[Any]) -> None:
    """Prints losses and times of each run, and how far the first two are apart."""
    width = max(map(len, runs))
    for name, run in runs.items():
        loss = np.mean([run.evaluate(run.state, *batch) for batch in held_out])
        warm = run.seconds[min(5, len(run.seconds) - 1) :]  # the first step compiles
        print(
            f"{name:>{width}}: training loss {run.losses[0]:.4f} -> {run.losses[-1]:.4f}, "
            f"validation {loss:.4f}, median step {1e3 * np.median(warm):.1f} ms "
            f"({len(run.losses)} steps)"
        )
    if len(runs) == 2:
        gap = difference(runs)
        print(f"largest difference between the loss curves: {gap.max():.3e} in {len(gap)} steps")


def difference(runs: Mapping[str, Any]) -> np.ndarray:
    """How far the losses of two runs are apart, in the steps that both have made."""
    first, second = (np.asarray(run.losses) for run in runs.values())
    steps = min(len(first), len(second))
    return np.abs(first[:steps] - second[:steps])


def plot(runs: Mapping[str, Any], path: Path, title: str, unit: str) -> None:
    """Loss curves above, their difference below."""
    figure = Figure(figsize=(8, 3 + 2 * len(runs)), layout="constrained")
    ratios = [3, 1][: len(runs)]
    axes = figure.subplots(len(runs), sharex=True, squeeze=False, height_ratios=ratios)
    styles = [dict(lw=5, alpha=0.35), dict(lw=1.2, color="black")]
    for (name, run), style in zip(runs.items(), styles, strict=False):
        axes[0, 0].plot(np.arange(1, len(run.losses) + 1), run.losses, label=name, **style)
    axes[0, 0].set(ylabel=f"training loss [{unit}]", title=title)
    axes[0, 0].legend()
    if len(runs) == 2:
        gap = difference(runs)
        axes[1, 0].semilogy(np.arange(1, len(gap) + 1), np.maximum(gap, 1e-8))
        axes[1, 0].set(ylabel="|difference|\n(0 is drawn as 1e-8)")
    axes[-1, 0].set(xlabel="step")
    for axis in axes.flat:
        axis.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    print(f"wrote {path}")
