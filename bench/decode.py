"""Times decoding and prefill of a Llama-2-70B cut to a few layers, on jflux and on XLA.

python -m bench.decode --ranks 4 --out bench/results/4xh200_decode.json

The model is the one of examples/llama_model.py, with random weights in bf16. A decode step takes
one token of each sequence, with so many positions in the cache; STEPS of them are one loop on the
GPUs. Three contestants run the same functions:

  jflux   its ops, whose kernels XLA captures into its CUDA graphs
  XLA     `jflux.reference`: its own collectives, which it launches one by one
  graphs  the same, compiled so that XLA captures its collectives too
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

import jflux
from jflux._tools import trials

from . import command
from .collectives import CAPTURED

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "examples"))

import llama_model  # noqa: E402
import llama_weights  # noqa: E402

STEPS = 32
PREFILL = (8, 2048)

CONTESTANTS: dict[str, tuple[Any, dict[str, str | bool] | None]] = {
    "jflux": (jflux, None),
    "XLA": (jflux.reference, None),
    "graphs": (jflux.reference, CAPTURED),
}


def timings(
    run_of: Callable[[Any, dict[str, Any] | None], Callable[[], None]],
    iterations: int,
    rounds: int,
) -> dict[str, Any]:
    """Seconds of each contestant, less one whose compiler options XLA refuses, or cannot run."""
    runs = {}
    for name, (ops, options) in CONTESTANTS.items():
        try:
            run = run_of(ops, options)
            run()
        except jax.errors.JaxRuntimeError as e:
            if options is None:
                raise
            print(f"{name}: left out, {str(e).splitlines()[0]}", file=sys.stderr)
        else:
            runs[name] = run
    found = trials.interleave(runs, iterations, rounds)
    return {name: dataclasses.asdict(timing) for name, timing in found.items()}


def measure_steps(
    config: llama_model.Config, mesh: Mesh, weights: Any, batch: int, context: int, rounds: int
) -> dict[str, Any]:
    """One row: seconds a step, the last of which fills the cache's `context` positions."""
    steps = min(STEPS, context)
    token, position = np.zeros(batch, np.int32), np.int32(context - steps)
    shape = (batch, config.groups(mesh.devices.size), context, config.head_dim)
    specs = llama_model.cache_specs(config)
    empty = jax.jit(
        lambda: [tuple(jnp.zeros(shape, config.dtype) for _ in kv) for kv in specs],
        out_shardings=jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs),
    )
    cache = empty()  # which each run takes, and gives back

    def run_of(ops, options):
        _, go_on = llama_model.programs(ops, config, mesh, length=context, steps=steps)
        lowered = go_on.lower(weights, cache, token, position)
        program = lowered.compile(compiler_options=options)

        def run():
            nonlocal cache
            if jax.tree.leaves(cache)[0].is_deleted():  # by a run that failed
                cache = empty()
            *_, cache = jax.block_until_ready(program(weights, cache, token, position))

        return run

    row = {"part": "step", "layers": config.layers, "batch": batch, "positions": context}
    return row | timings(run_of, steps, rounds)


def measure_prefill(
    config: llama_model.Config, mesh: Mesh, weights: Any, batch: int, length: int, rounds: int
) -> dict[str, Any]:
    """One row: seconds from the prompt to its cache and the first token."""
    prompt = np.random.default_rng(0).integers(config.vocab, size=(batch, length), dtype=np.int32)

    def run_of(ops, options):
        start, _ = llama_model.programs(ops, config, mesh, length=length, steps=1)
        program = start.lower(weights, prompt).compile(compiler_options=options)
        return trials.run_of(program, weights, prompt)

    row = {"part": "prefill", "layers": config.layers, "batch": batch, "positions": length}
    return row | timings(run_of, 1, rounds)


COLUMNS = ("part", "layers", "batch", "positions", "XLA ms", "graphs ms", "jflux ms",
           "XLA / jflux", "graphs / jflux")  # fmt: skip


def cells(row: dict[str, Any]) -> list[str]:
    """One row of the table under COLUMNS."""
    ms = {name: row[name]["median"] * 1e3 for name in CONTESTANTS if name in row}
    others = [ms.get(name) for name in ("XLA", "graphs")]
    return [
        row["part"], *(str(row[name]) for name in ("layers", "batch", "positions")),
        *(f"{t:.3f}" if t is not None else "" for t in (*others, ms["jflux"])),
        *(f"{t / ms['jflux']:.2f}" if t is not None else "" for t in others),
    ]  # fmt: skip


TABLE = command.Table(
    "decode", lambda row: tuple(row[name] for name in ("part", "layers", "batch", "positions")),
    lambda _: " | ".join(COLUMNS), command.joined(cells),
)  # fmt: skip


def main() -> int:
    options = command.parser(__doc__, rounds=9, ranks=jax.device_count())
    options.add_argument("--layers", type=int, default=4)
    options.add_argument("--context", type=int, default=1024, help="positions in the cache")
    options.add_argument("--batches", default="1,64,512", help="of steps, comma-separated")
    options.add_argument("--heap-gib", type=int, default=8)
    args = options.parse_args()
    jflux.init(heap_bytes=args.heap_gib << 30)
    jflux.config.update(strict=True)
    mesh = Mesh(np.array(jax.devices()[: args.ranks]), (llama_model.AXIS,))
    config = dataclasses.replace(llama_model.CONFIGS["llama-2-70b"], layers=args.layers)
    weights = llama_weights.random(config, mesh, jax.random.key(0))
    steps = [("step", int(batch), args.context) for batch in args.batches.split(",")]
    measures = {"step": measure_steps, "prefill": measure_prefill}
    wanted = {
        (part, args.layers, batch, positions): functools.partial(
            measures[part], config, mesh, weights, batch, positions, args.rounds
        )
        for part, batch, positions in (*steps, ("prefill", *PREFILL))
    }
    TABLE.measure(args, wanted)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
