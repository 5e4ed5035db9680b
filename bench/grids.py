"""Times a stack of GPT blocks, forward and backward, on every grid of this host's GPUs.

python -m bench.grids --ranks 4 --out bench/results/4xh200_grids.json

The blocks run in `jflux.parallel.scan`, recomputed in the backward pass (arXiv 2305.13525, section
VI-A), with as many tokens a GPU as in the paper's running example (section IV). On each grid the
optimisations of section IV are added one by one:

  none      XLA's products and collectives, one after the other
  + AR      the sum of an input's gradient under the product for the weight's
  + RS      the sum of the weights' gradients under the layer before
  + AG      the next layer's weights gathered under this one
  + cache   all but one layer's gathered weights kept for the backward pass
  + fused   jflux's products in place of XLA's

All of them with XLA's latency-hiding scheduler. "none unrolled" and "unrolled" are "none" and
"+ fused" without a loop, and "default" is "+ fused" with the scheduler that XLA takes by itself.
A grid has a heap of its own.

What `jflux.plan` predicts for the grids is in the same table.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import os
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jflux
import jflux.plan
from jflux import parallel
from jflux._tools import trials
from jflux.parallel import NO_OVERLAP, Grid, Overlap, Scheme

from . import command

TOKENS_PER_GPU = 2048
DTYPE = jnp.bfloat16
SCHEDULER: dict[str, str | bool] = (
    {"xla_gpu_enable_latency_hiding_scheduler": True} if jax.default_backend() == "gpu" else {}
)
Arrays = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of a stack of GPT blocks: by default as wide as GPT-20B (table I)."""

    layers: int = 4
    width: int = 7168
    heads: int = 56
    sequence: int = 2048


def ladder(layers: int) -> dict[str, Scheme]:
    """The optimisations, one more each time."""
    steps = {
        "none": NO_OVERLAP,
        "+ AR": Overlap(True, False, False),
        "+ RS": Overlap(True, True, False),
        "+ AG": Overlap(True, True, True),
        "+ cache": Overlap(True, True, True, cached_layers=layers - 1),
    }
    schemes = {name: Scheme(overlap=overlap, fused=False) for name, overlap in steps.items()}
    return schemes | {"+ fused": dataclasses.replace(schemes["+ cache"], fused=True)}


def shapes(sizes: Sizes, scheme: Scheme) -> dict[str, tuple[tuple[int, ...], P]]:
    """Each parameter's global shape, and how it is split."""
    d, n = sizes.width, sizes.layers
    t = scheme.transposed

    def each(spec: P) -> P:
        return P(None, *spec)

    return {
        "qkv": ((n, d, 3 * d), each(scheme.weight_spec())),
        "out": ((n, d, d), each(t.weight_spec())),
        "up": ((n, d, 4 * d), each(scheme.weight_spec())),
        "down": ((n, 4 * d, d), each(t.weight_spec())),
        "qkv_bias": ((n, 3 * d), each(scheme.bias_spec())),
        "out_bias": ((n, d), each(t.bias_spec())),
        "up_bias": ((n, 4 * d), each(scheme.bias_spec())),
        "down_bias": ((n, d), each(t.bias_spec())),
        "attention_norm": ((n, d), each(scheme.scale_spec())),
        "mlp_norm": ((n, d), each(scheme.scale_spec())),
    }


def block(sizes: Sizes, scheme: Scheme, x: jax.Array, w: Arrays) -> jax.Array:
    """One block of x [sequences, positions, width/y], and its parameters."""
    head, t = sizes.width // sizes.heads, scheme.transposed
    h = parallel.layer_norm(x, w["attention_norm"], scheme=scheme)
    qkv = parallel.dense(h, w["qkv"], w["qkv_bias"], scheme=scheme)
    q, k, v = jnp.moveaxis(qkv.reshape(*qkv.shape[:2], -1, 3, head), 3, 0)
    fast = "cudnn" if jax.default_backend() == "gpu" and x.dtype.itemsize == 2 else None
    o = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=fast)
    x = x + parallel.dense(o.reshape(*o.shape[:2], -1), w["out"], w["out_bias"], scheme=t)
    h = parallel.layer_norm(x, w["mlp_norm"], scheme=scheme)
    h = jax.nn.gelu(parallel.dense(h, w["up"], w["up_bias"], scheme=scheme))
    return x + parallel.dense(h, w["down"], w["down_bias"], scheme=t)


def forward_and_backward(sizes: Sizes, scheme: Scheme, specs: Arrays, unroll: int = 1) -> Any:
    """(x, parameters) -> (y, dx, the parameters' gradients), of one rank."""

    def forward(x, params):
        layer = functools.partial(block, sizes, scheme)
        return parallel.scan(layer, x, params, specs=specs, scheme=scheme, unroll=unroll)

    def both(x, params):
        y, transpose = jax.vjp(forward, x, params)
        return y, *transpose(y)

    return both


def grids_of(ranks: int) -> list[Grid]:
    """Those with the most tensor parallelism first."""
    return [Grid(*sizes.tolist()) for sizes in reversed(jflux.plan.grids(ranks))]


def predicted(sizes: Sizes, grid: Grid, machine: jflux.plan.Machine) -> float:
    """Seconds of communication, by the exact equations."""
    model = jflux.plan.gpt(
        "blocks", layers=sizes.layers, hidden=sizes.width, heads=sizes.heads,
        sequence=sizes.sequence, tokens=grid.ranks * TOKENS_PER_GPU, vocabulary=0,
    )  # fmt: skip
    return jflux.plan.rank(model, grid.ranks, machine, fits=False).find(grid).communication


@dataclasses.dataclass(frozen=True)
class Contestant:
    """A program of forward and backward."""

    scheme: Scheme
    options: dict[str, str | bool]  # of XLA
    unroll: int = 1


def contestants(layers: int) -> dict[str, Contestant]:
    rungs = ladder(layers)
    found = {name: Contestant(scheme, SCHEDULER) for name, scheme in rungs.items()}
    found["none unrolled"] = Contestant(rungs["none"], SCHEDULER, layers)
    found["unrolled"] = Contestant(rungs["+ fused"], SCHEDULER, layers)
    found["default"] = Contestant(rungs["+ fused"], {})
    return found


@dataclasses.dataclass(frozen=True)
class Operand:
    """An array of all devices."""

    shape: tuple[int, ...]
    spec: P
    scale: float = 1.0


def operands(sizes: Sizes, grid: Grid) -> tuple[Operand, dict[str, Operand]]:
    """x and the parameters; their order does not depend on the optimisations."""
    scheme = Scheme()
    sequences = grid.ranks * TOKENS_PER_GPU // sizes.sequence
    x = Operand((sequences, sizes.sequence, sizes.width), scheme.input_spec(3))
    return x, {
        name: Operand(shape, spec, float(shape[1] ** -0.5))
        for name, (shape, spec) in shapes(sizes, scheme).items()
    }


def compile_one(sizes: Sizes, grid: Grid, mesh: Mesh, contestant: Contestant) -> Any:
    x, params = operands(sizes, grid)
    specs = {name: one.spec for name, one in params.items()}

    def array(one: Operand) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, one.spec)
        return jax.ShapeDtypeStruct(one.shape, DTYPE, sharding=sharding)

    both = forward_and_backward(sizes, contestant.scheme, specs, contestant.unroll)
    return trials.compiled(
        both, mesh, (x.spec, specs), (x.spec, x.spec, specs), array(x),
        {name: array(one) for name, one in params.items()}, options=contestant.options,
        check_vma=True,
    )  # fmt: skip


def compile_all(sizes: Sizes, grid: Grid, mesh: Mesh) -> dict[str, Any]:
    """A grid's programs, by name: all at once, before anything is timed."""
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        begun = {
            name: pool.submit(compile_one, sizes, grid, mesh, one)
            for name, one in contestants(sizes.layers).items()
        }
        return {name: program.result() for name, program in begun.items()}


def measure(sizes: Sizes, grid: Grid, rounds: int, heap_bytes: int) -> command.Row:
    """One grid's row: seconds of a step, and the bytes that it needs, for each program."""
    jflux.shutdown()
    jflux.init(heap_bytes=heap_bytes)
    mesh = grid.mesh()
    programs = compile_all(sizes, grid, mesh)
    node = dataclasses.replace(jflux.plan.MACHINES["h200"], gpus_per_node=grid.ranks)
    of_x, of_params = operands(sizes, grid)

    def make(one: Operand, seed: int) -> jax.Array:
        return trials.normal(mesh, one.spec, one.shape, DTYPE, seed=seed, scale=one.scale)

    x = make(of_x, 0)
    params = {name: make(one, seed) for seed, (name, one) in enumerate(of_params.items(), 1)}
    runs = {name: trials.run_of(program, x, params) for name, program in programs.items()}
    row: command.Row = {
        "grid": list(grid.sizes),
        "sizes": dataclasses.asdict(sizes),
        "tokens": grid.ranks * TOKENS_PER_GPU,
        "predicted": predicted(sizes, grid, node),
        "memory": {n: p.memory_analysis().temp_size_in_bytes for n, p in programs.items()},
        "times": {},
    }
    for name, timing in trials.interleave(runs, 1, rounds).items():
        row["times"][name] = dataclasses.asdict(timing)
    return row


BESIDE = ("none unrolled", "unrolled", "default")  # the ladder
COLUMNS = ("grid", "predicted ms", "none ms", "+ AR", "+ RS", "+ AG", "+ cache", "+ fused ms",
           *(f"{name} ms" for name in BESIDE),
           "none / best", "MiB, none", "+ AG", "+ cache")  # fmt: skip


def name_of(row: command.Row) -> str:
    """Of its grid, such as "2x1x2x1"."""
    return str(Grid(*row["grid"]))


def cells(row: dict[str, Any]) -> list[str]:
    """One row of the table under COLUMNS; between the first and the last time, what a rung saves of
    the one before."""
    times = {name: 1e3 * timing["median"] for name, timing in row["times"].items()}
    best = min(times.values())
    others = [times.pop(name) for name in BESIDE]
    names = list(times)
    saved = [
        f"{100 * (times[before] - times[name]) / times[before]:+.1f} %"
        for before, name in zip(names[:-2], names[1:-1], strict=True)
    ]
    memory = [f"{row['memory'][name] / 2**20:.0f}" for name in ("none", "+ AG", "+ cache")]
    first, last = times[names[0]], times[names[-1]]
    return [
        name_of(row), f"{1e3 * row['predicted']:.1f}", f"{first:.1f}", *saved, f"{last:.1f}",
        *(f"{other:.1f}" for other in others), f"{first / best:.2f}", *memory,
    ]  # fmt: skip


TABLE = command.Table(
    "grids", lambda row: (tuple(row["grid"]), *row["sizes"].values()),
    lambda _: " | ".join(COLUMNS), command.joined(cells),
)  # fmt: skip


def main() -> int:
    options = command.parser(__doc__, rounds=5, ranks=jax.device_count())
    options.add_argument("--grids", help='some grids only, such as "2,1,1,1 1,1,2,1"')
    options.add_argument("--heap-gib", type=int, default=8)
    for field in dataclasses.fields(Sizes):
        options.add_argument(f"--{field.name}", type=int, default=field.default)
    args = options.parse_args()
    sizes = Sizes(args.layers, args.width, args.heads, args.sequence)
    grids = [Grid.parse(g) for g in args.grids.split()] if args.grids else grids_of(args.ranks)
    wanted = {
        (grid.sizes, *dataclasses.astuple(sizes)): functools.partial(
            measure, sizes, grid, args.rounds, args.heap_gib << 30
        )
        for grid in grids
    }
    TABLE.measure(args, wanted)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
