"""Times an MLP and a whole transformer block, forward and backward, on jflux and on XLA.

python -m bench.blocks --ranks 4 --out bench/results/4xh200_blocks.json

Tensor-parallel with sequence-parallel activations: a rank holds T/N of T tokens, and of every
weight its part. Four contestants run the same functions:

  jflux   its ops
  XLA     `jflux.reference`: all_gather, dot, dot, psum_scatter
  fused   XLA's functions through `jflux.fuse`
  alone   the same products, with copies and sums of a rank's own data instead of communication

What a contestant takes beyond "alone" is communication that is exposed. `--recipe block` adds

  8 bits  jflux's ops by this recipe, and jflux.nn's MLPs; weights are quantised in each step
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jflux
import jflux.nn as jnn
from jflux import _heap
from jflux._ops import _epilogue
from jflux._ops._lax import several
from jflux._tools import trials

from . import command

AXIS = "tp"


@dataclasses.dataclass(frozen=True)
class Model:
    """The sizes of a model's blocks. `gated` MLPs have a SiLU gate, others a GELU."""

    name: str
    width: int
    hidden: int
    heads: int
    kv_heads: int
    gated: bool
    sequence: int = 2048


MODELS = [
    Model("Llama-2-70B", 8192, 28672, 64, 8, gated=True),
    Model("GPT-3-175B", 12288, 49152, 96, 96, gated=False),
]

Arrays = dict[str, jax.Array]


class Alone:
    """The ops without communication, on a rank's own data: as many rows are multiplied, written and
    read."""

    @staticmethod
    def all_gather_matmul(x, w, *, axis_name, activation=None, gated=False):
        ws = several(w)
        whole = jnp.concatenate([x] * lax.axis_size(axis_name))
        ys = [whole @ one for one in ws]
        epilogue = _epilogue.check("", len(ws), _epilogue.of_each(None, len(ws)), activation, gated)
        if epilogue is not None:
            ys, _ = _epilogue.apply(epilogue, ys, (), x.dtype)
        return tuple(ys) if isinstance(w, tuple) and not gated else ys[0]

    @staticmethod
    def matmul_reduce_scatter(x, w, *, axis_name, residual):
        y = x @ w
        parts = y.reshape(lax.axis_size(axis_name), -1, y.shape[-1])
        return jnp.sum(parts, 0, dtype=jnp.float32).astype(x.dtype) + residual


CONTESTANTS = {"jflux": jflux, "XLA": jflux.reference, "fused": jflux.reference, "alone": Alone}

_BLOCK = jflux.Recipe.block
RECIPES = {
    "tensor": jflux.Recipe.tensor,
    "row": jflux.Recipe.row,
    "block": _BLOCK,
    "block_16": dataclasses.replace(_BLOCK, dw=None),  # dw in bfloat16
    "block_squares": dataclasses.replace(_BLOCK, dw=(_BLOCK.x, _BLOCK.w)),  # of dy for dw
}


def by_recipe(name: str) -> Any:
    ops = ("all_gather_matmul", "matmul_reduce_scatter")
    given = {op: functools.partial(getattr(jflux, op), recipe=RECIPES[name]) for op in ops}
    layers = {layer: functools.partial(getattr(jnn, layer), recipe=RECIPES[name])
              for layer in ("mlp", "gated_mlp")}  # fmt: skip
    return types.SimpleNamespace(**given, **layers)


def shapes_of(model: Model, part: str) -> dict[str, tuple[tuple[int, int], P]]:
    """Each weight's global shape, and how it is sharded."""
    d, h = model.width, model.hidden
    columns, rows = P(None, AXIS), P(AXIS, None)
    found = {"up": ((d, h), columns), "down": ((h, d), rows)}
    if model.gated:
        found["gate"] = ((d, h), columns)
    if part == "block":
        kv = d // model.heads * model.kv_heads
        found |= {
            "q": ((d, d), columns), "k": ((d, kv), columns), "v": ((d, kv), columns),
            "out": ((d, d), rows),
        }  # fmt: skip
    return found


def flops(model: Model, part: str, tokens: int, ranks: int) -> float:
    """Of one rank's weights, forward and backward."""
    weights = sum(a * b for (a, b), _ in shapes_of(model, part).values())
    return 6.0 * tokens * weights / ranks


def mlp(ops: Any, model: Model, x: jax.Array, w: Arrays, residual: jax.Array) -> jax.Array:
    layer = getattr(ops, "gated_mlp" if model.gated else "mlp", None)
    if layer is not None:
        given = {name: w[name] for name in ("gate", "up", "down") if name in w}
        return layer(x, **given, axis_name=AXIS, residual=residual)
    if model.gated:
        up = (w["gate"], w["up"])
        h = ops.all_gather_matmul(x, up, axis_name=AXIS, activation="silu", gated=True)
    else:
        h = ops.all_gather_matmul(x, w["up"], axis_name=AXIS, activation="gelu_tanh")
    return ops.matmul_reduce_scatter(h, w["down"], axis_name=AXIS, residual=residual)


def block(ops: Any, model: Model, x: jax.Array, w: Arrays) -> jax.Array:
    head = model.width // model.heads
    q, k, v = (
        a.reshape(-1, model.sequence, a.shape[-1] // head, head)
        for a in ops.all_gather_matmul(norm(x), (w["q"], w["k"], w["v"]), axis_name=AXIS)
    )
    fast = "cudnn" if jax.default_backend() == "gpu" and x.dtype.itemsize == 2 else None
    o = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=fast)
    o = o.reshape(-1, o.shape[2] * head)
    x = ops.matmul_reduce_scatter(o, w["out"], axis_name=AXIS, residual=x)
    return mlp(ops, model, norm(x), w, x)


def norm(x: jax.Array) -> jax.Array:
    """RMSNorm (arXiv 1910.07467), without a learned scale."""
    wide = x.astype(jnp.float32)
    return (wide * lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)).astype(x.dtype)


def forward_and_backward(ops: Any, model: Model, part: str) -> Callable[..., Any]:
    """(x, w) -> (y, dx, dw), of one rank."""

    def forward(x, w):
        return block(ops, model, x, w) if part == "block" else mlp(ops, model, x, w, x)

    def both(x, w):
        y, vjp = jax.vjp(forward, x, w)
        return y, *vjp(y)

    return both


def step_of(name: str, ops: Any, model: Model, part: str) -> Callable[..., Any]:
    """That of a contestant."""
    both = forward_and_backward(ops, model, part)
    return jflux.fuse(both) if name == "fused" else both


def loop(both: Callable[..., Any], iterations: int) -> Callable[..., Any]:
    """So many steps, each of which depends on all that the last one computed."""

    def step(_, carry):
        x, w = carry
        y, dx, dw = both(x, w)
        corners = [a[:1, :1].astype(jnp.float32) for a in (y, dx, *dw.values())]
        corner = jnp.tanh(sum(corners)).astype(x.dtype)
        return lax.dynamic_update_slice(x, corner, (0, 0)), w

    return lambda x, w: lax.fori_loop(0, iterations, step, (x, w))[0]


def heap_used() -> int:
    """Bytes of each GPU's heap that calls have taken when they were compiled."""
    return _heap.usage("cuda") if jax.default_backend() == "gpu" else 0


def measure(
    model: Model, part: str, mesh: Mesh, tokens: int, rounds: int, recipe: str | None = None
) -> dict[str, Any]:
    """One row: seconds of each contestant, and the memory that it takes beside its operands. The
    heap has to be new: what an earlier row's calls took would not be counted."""
    if heap_used():
        raise RuntimeError("calls have taken some of the heap before: jflux.shutdown() first")
    ranks = mesh.devices.size
    shapes = shapes_of(model, part)
    x = trials.normal(mesh, P(AXIS, None), (tokens, model.width), jnp.bfloat16, seed=0)
    w = {
        name: trials.normal(mesh, spec, shape, jnp.bfloat16, seed=i, scale=float(shape[0] ** -0.5))
        for i, (name, (shape, spec)) in enumerate(shapes.items(), 1)
    }
    specs = (P(AXIS, None), {name: spec for name, (_, spec) in shapes.items()})
    iterations = trials.iterations_for(0.05, flops(model, part, tokens, ranks))
    row: dict[str, Any] = {"model": model.name, "part": part, "tokens": tokens, "memory": {}}
    contestants, runs = dict(CONTESTANTS), {}
    if recipe is not None:
        row["recipe"], contestants["8 bits"] = recipe, by_recipe(recipe)
    for name, ops in contestants.items():
        both = step_of(name, ops, model, part)
        before = heap_used()
        once = trials.compiled(both, mesh, specs, (specs[0], *specs), x, w)
        analysis = once.memory_analysis()
        row["memory"][name] = {
            "xla": analysis.temp_size_in_bytes,
            "heap": heap_used() - before,
        }
        program = trials.compiled(loop(both, iterations), mesh, specs, specs[0], x, w)
        runs[name] = trials.run_of(program, x, w)
    for name, timing in trials.interleave(runs, iterations, rounds).items():
        row[name] = dataclasses.asdict(timing)
    return row


COLUMNS = ("model", "part", "tokens", "alone ms", "XLA ms", "jflux ms", "jflux / XLA", "fused ms",
           "exposed ms, XLA", "jflux", "MiB, XLA", "jflux", "heap", "recipe", "8 bits ms",
           "jflux / 8 bits", "MiB, 8 bits", "heap, 8 bits")  # fmt: skip


def cells(row: dict[str, Any]) -> list[str]:
    """One row of the table under COLUMNS. Memory is what a step needs beside its operands."""
    alone, xla, ours = (row[name]["median"] * 1e3 for name in ("alone", "XLA", "jflux"))
    memory = [row["memory"][name]["xla"] / 2**20 for name in ("XLA", "jflux")]
    heap = row["memory"]["jflux"]["heap"] / 2**20
    return [
        row["model"], row["part"], str(row["tokens"]), f"{alone:.3f}", f"{xla:.3f}", f"{ours:.3f}",
        f"{ours / xla:.3f}", f"{row['fused']['median'] * 1e3:.3f}" if "fused" in row else "",
        f"{xla - alone:.3f}", f"{ours - alone:.3f}",
        *(f"{one:.0f}" for one in (*memory, heap)), *_of_recipe(row),
    ]  # fmt: skip


def _of_recipe(row: dict[str, Any]) -> list[str]:
    if "recipe" not in row:
        return [""] * 5
    time, memory = row["8 bits"]["median"] * 1e3, row["memory"]["8 bits"]
    ratio = row["jflux"]["median"] * 1e3 / time
    mib = [f"{memory[name] / 2**20:.0f}" for name in ("xla", "heap")]
    return [row["recipe"], f"{time:.3f}", f"{ratio:.3f}", *mib]


def key_of(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("model", "part", "tokens", "recipe") if name in row)


TABLE = command.Table(
    "blocks", key_of,
    lambda _: " | ".join(COLUMNS), command.joined(cells),
)  # fmt: skip


def main() -> int:
    options = command.parser(__doc__, rounds=5, ranks=jax.device_count())
    options.add_argument("--tokens", type=int, default=8192)
    options.add_argument("--heap-gib", type=int, default=8)
    options.add_argument("--recipe", choices=RECIPES, help="a contestant in 8 bits")
    args = options.parse_args()
    mesh = Mesh(np.array(jax.devices()[: args.ranks]), (AXIS,))

    def row_of(model: Model, part: str) -> command.Row:
        jflux.shutdown()
        jflux.init(heap_bytes=args.heap_gib << 30)
        return measure(model, part, mesh, args.tokens, args.rounds, args.recipe)

    by = [] if args.recipe is None else [args.recipe]
    wanted = {
        (model.name, part, args.tokens, *by): functools.partial(row_of, model, part)
        for model in MODELS
        for part in ("mlp", "block")
    }
    TABLE.measure(args, wanted)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
