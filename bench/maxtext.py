"""Times MaxText's own layers with jflux and without it; the table comes last.

python -m bench.maxtext --ranks 2 --out bench/results/2xh100_maxtext.json [--lists layers,scan]

The model is that of examples/maxtext_llama.py, as wide as Llama-2-70B, in bfloat16: loss and
gradients of 4 sequences of 2048 tokens, split over MaxText's axis "tensor_sequence".

    layers  two decoder layers, one after the other
    scan    the same in MaxText's scan, with its remat_policy "full"
    tiny    a small one in float32, for a machine without GPUs

    S       MaxText alone: XLA splits its products
    J       with `jflux.nn.TensorParallel` in place of its quantization

MiB are what a step takes beside weights, gradients and the heap. Both have the same parameters;
losses and norms of gradients are compared before anything is timed. Needs the package `maxtext`
(docs/guide/maxtext.md). The list "layers" takes a minute.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import pathlib
import sys
import types
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

import jflux
import jflux.nn
from jflux._tools import trials

from . import command


@dataclasses.dataclass(frozen=True)
class Case:
    """A Llama of two layers.

    Attributes:
      batch: sequences of all ranks.
      changes: of MaxText's configuration.
      tolerance: between the losses, and the norms of gradients, relative.
    """

    name: str
    batch: int
    length: int
    width: int
    hidden: int
    heads: int
    kv_heads: int
    vocabulary: int
    dtype: str = "bfloat16"
    tolerance: float = 2e-2
    changes: tuple[tuple[str, Any], ...] = ()

    def options(self) -> dict[str, Any]:
        """Of MaxText's configuration, as `maxtext_llama.config_of` takes them."""
        return {
            "base_emb_dim": self.width, "base_mlp_dim": self.hidden,
            "base_num_query_heads": self.heads, "base_num_kv_heads": self.kv_heads,
            "head_dim": self.width // self.heads, "vocab_size": self.vocabulary,
            "max_target_length": self.length,
            "per_device_batch_size": self.batch / jax.device_count(),
            "dtype": self.dtype, "weight_dtype": self.dtype,
            "matmul_precision": "default" if self.dtype == "bfloat16" else "highest",
            **dict(self.changes),
        }  # fmt: skip


_WIDE = (4, 2048, 8192, 28672, 64, 8, 32000)
_SCAN = (("scan_layers", True), ("remat_policy", "full"))
LISTS: dict[str, list[Case]] = {
    "layers": [Case("layers", *_WIDE)],
    "scan": [Case("scan, full remat", *_WIDE, changes=_SCAN)],
    "tiny": [Case("tiny", 2, 32, 64, 128, 8, 4, 256, dtype="float32", tolerance=1e-5)],
}


def example() -> Any:
    """examples/maxtext_llama.py, which imports MaxText."""
    folder = str(pathlib.Path(__file__).resolve().parents[1] / "examples")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    if importlib.util.find_spec("xprof") is None:
        # 32 MB, and tokamax imports it to read profiles of its own benchmarks.
        tools = types.ModuleType("xprof.cli.tools")
        tools.get_kernel_stats_tool = None  # type: ignore[attr-defined]
        modules = {name: types.ModuleType(name) for name in ("xprof", "xprof.cli")}
        sys.modules.update(modules | {tools.__name__: tools})
    import maxtext_llama

    return maxtext_llama


def model_and_parameters(llama: Any, config: Any, mesh: Any, quant: Any) -> tuple[Any, Any]:
    """MaxText's model without parameters, and the shapes and shardings of these by its rules."""
    abstract = llama.nnx.eval_shape(lambda: llama.model_of(config, mesh, quant))
    graph, params, rest = llama.nnx.split(abstract, llama.nnx.Param, ...)
    specs = llama.nnx.get_partition_spec(params)
    structs = jax.tree.map(
        lambda p, spec: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=NamedSharding(mesh, spec)),
        params,
        specs,
    )

    def concrete(leaf: Any) -> jax.Array:  # the state of random generators
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.split(jax.random.key(0), leaf.shape)
        return jnp.zeros(leaf.shape, leaf.dtype)

    return llama.nnx.merge(graph, structs, jax.tree.map(concrete, rest)), structs


def random_parameters(structs: Any) -> Any:
    """Weights of the usual size, made where they belong; scales of norms are 1."""
    leaves, tree = jax.tree.flatten(structs)

    def make(key: jax.Array) -> list[jax.Array]:
        return [
            0.02 * jax.random.normal(jax.random.fold_in(key, i), s.shape, s.dtype)
            if len(s.shape) > 1
            else jnp.ones(s.shape, s.dtype)
            for i, s in enumerate(leaves)
        ]

    out = [s.sharding for s in leaves]
    return jax.tree.unflatten(tree, jax.jit(make, out_shardings=out)(jax.random.key(1)))


def measure(case: Case, ranks: int, rounds: int) -> dict[str, Any]:
    """One row of the table.

    Raises:
      RuntimeError: MaxText with jflux computes something else, or calls no op.
    """
    llama = example()
    config = llama.config_of(ranks, ranks, **case.options())
    mesh = llama.mesh_of(config, ranks)
    tokens = jax.random.randint(
        jax.random.key(2), (case.batch, case.length + 1), 0, case.vocabulary
    )
    row: dict[str, Any] = {"case": dataclasses.asdict(case), "MiB": {}, "loss": {}, "norm": {}}
    runs, parameters = {}, None
    with jax.set_mesh(mesh), llama.nn.logical_axis_rules(config.logical_axis_rules):
        for name in ("S", "J"):
            quant = None if name == "S" else jflux.nn.TensorParallel(
                llama.AXIS, x_spec=llama.P(("data", "fsdp"))
            )  # fmt: skip
            model, structs = model_and_parameters(llama, config, mesh, quant)
            _, step = llama.step_of(model)
            if parameters is None:
                parameters = random_parameters(structs)
            program = jax.jit(step).lower(parameters, tokens).compile()
            loss, gradients = program(parameters, tokens)
            squares = (
                jnp.sum(jnp.square(g.astype(jnp.float32))) for g in jax.tree.leaves(gradients)
            )
            row["loss"][name] = float(loss)
            row["norm"][name] = float(jnp.sqrt(sum(squares)))
            row["MiB"][name] = program.memory_analysis().temp_size_in_bytes / 2**20
            row[f"calls of {name}"] = program.as_text().count('custom_call_target="jflux_')
            del gradients
            runs[name] = trials.run_of(_repeated(program), parameters, tokens)
        error = max(abs(row[what]["J"] / row[what]["S"] - 1) for what in ("loss", "norm"))
        if not error <= case.tolerance:
            raise RuntimeError(f"{case.name}: {row['loss']}, norms {row['norm']}: {error:.2g} off")
        if row["calls of S"] or not row["calls of J"]:
            raise RuntimeError(f"{case.name}: {row['calls of J']} calls of jflux's ops")
        timings = trials.interleave(runs, STEPS, rounds)
    return row | {"error": error} | {n: dataclasses.asdict(t) for n, t in timings.items()}


STEPS = 3  # in a row; the host is ahead of the GPUs


def _repeated(program: Any) -> Any:
    def run(*args: Any) -> Any:
        for _ in range(STEPS):
            out = program(*args)
        return out

    return run


HEADING = "case | S ms | J ms | J / S | MiB, S | MiB, J | loss, S | loss, J | difference"


def cells(row: dict[str, Any]) -> list[str]:
    s, j = (row[name]["median"] * 1e3 for name in "SJ")
    return [
        row["case"]["name"], f"{s:.2f}", f"{j:.2f}", f"{j / s:.3f}",
        *(f"{row['MiB'][name]:.0f}" for name in "SJ"),
        *(f"{row['loss'][name]:.5f}" for name in "SJ"), f"{row['error']:.1e}",
    ]  # fmt: skip


TABLE = command.Table(
    "maxtext", lambda row: row["case"]["name"], lambda _: HEADING, command.joined(cells)
)


def main() -> int:
    args = command.parse(__doc__, lists="layers")
    if jax.default_backend() == "gpu":
        jflux.init(heap_bytes=4 << 30)
    cases = [case for name in args.lists.split(",") for case in LISTS[name]]
    TABLE.measure(
        args,
        {case.name: functools.partial(measure, case, args.ranks, args.rounds) for case in cases},
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
