"""Weight gradients of mixtures in 8 bits on one GPU, beside those of bfloat16, in milliseconds:

python -m bench.weight_gradients [--cases mixtral-16384,qwen3-8192] [--parts kernels,layer]

One line for each contestant, all in turns. `kernels`:

    dw 16             grouped_matmul_dw of rows of bfloat16
    dw 8, TILE        grouped_matmul_dw_scaled, by each tile that is compiled, and by the chosen one
    dw 8 sq, TILE     the same of a dy^T by squares of 128 x 128
    turn x            the transpose of x's copy in 8 bits
    copy, turn dy     dy's copy and its transpose, in one pass
    copy, turn dy sq  the same with a transpose by squares
    copy dy           the copy alone
    dense dy          the copy and the transpose of rows without groups
    widen x           x's copy in bfloat16, which dw 16 needs by a recipe

`layer`, forward and backward, of jflux.nn.mixture:

    bfloat16               without a recipe
    block, dw 16           Recipe.block, whose dw is a product in bfloat16
    block, block sq        Recipe.block, and with squares of dy for dw
    block once, sq once    the same, with weights that were quantised before the step
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jflux
import jflux.nn
from jflux import _native
from jflux._call import tuning_tables
from jflux._ops import _quantize_groups
from jflux._ops._scaled import Scales
from jflux._ops.products import _grouped_by_recipe, _grouped_dw_scaled, _grouped_primitives
from jflux._tools import trials

#: (tokens, width, experts, choices, hidden).
CASES = {
    "mixtral-16384": (16384, 4096, 8, 2, 14336),
    "mixtral-4096": (4096, 4096, 8, 2, 14336),
    "qwen3-8192": (8192, 2048, 128, 8, 768),
    "qwen3-32768": (32768, 2048, 128, 8, 768),
}
CALLS = 8


def normal(seed: int, *shape: int, scale: float = 1) -> jax.Array:
    wide = jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)
    return wide * jnp.bfloat16(scale)


def repeated(f: Callable[..., Any], *args: Any) -> Callable[[], None]:
    program = jax.jit(f).lower(*args).compile()

    def run() -> None:
        for _ in range(CALLS):
            results = program(*args)
        jax.block_until_ready(results)

    return run


def kernels(case: tuple[int, ...]) -> dict[str, Callable[[], None]]:
    """Of gate's and up's weight gradient."""
    tokens, width, experts, k, hidden = case
    rows, form = tokens * k, _quantize_groups.FORM
    chosen = np.random.default_rng(0).integers(0, experts, rows)
    sizes = jnp.asarray(np.bincount(chosen, minlength=experts), jnp.int32)
    x, dy = normal(0, rows, width), normal(1, rows, hidden, scale=1e-4)
    kept = form.quantize(x)
    x_turned = _quantize_groups.transposed(kept, sizes)
    dw = functools.partial(_grouped_dw_scaled.bind, out=np.dtype(jnp.bfloat16), rows=rows)
    wide = _grouped_primitives.DwParams(np.dtype(jnp.bfloat16))
    dw_16 = functools.partial(_grouped_primitives.grouped_matmul_dw.bind, params=wide)
    runs = {"dw 16": repeated(dw_16, x, dy, sizes)}
    squares = functools.partial(_quantize_groups.quantized, form=_quantize_groups.SQUARES)
    forms = (
        ("dw 8", Scales.OF_VECTORS, _quantize_groups.quantized(dy, sizes)[1]),
        ("dw 8 sq", Scales.OF_BLOCKS, squares(dy, sizes)[1]),
    )
    for form_of_dy, scales, turned in forms:
        for tile in (None, *_native.GROUPED_TILES[scales]):
            forced = tuning_tables.force(tuning_tables.Choice(*tile, 8)) if tile else None
            with forced or contextlib.nullcontext():
                name = "chosen" if tile is None else "x".join(map(str, tile))
                runs[f"{form_of_dy}, {name}"] = repeated(dw, x_turned, turned, sizes)
    return runs | {
        "turn x": repeated(_quantize_groups.transposed, kept, sizes),
        "copy, turn dy": repeated(_quantize_groups.quantized, dy, sizes),
        "copy, turn dy sq": repeated(squares, dy, sizes),
        "copy dy": repeated(form.quantize, dy),
        "dense dy": repeated(functools.partial(form.quantize, transpose=True), dy),
        "widen x": repeated(lambda x: x.dequantize(jnp.bfloat16), kept),
    }


def layer(case: tuple[int, ...]) -> dict[str, Callable[[], None]]:
    tokens, width, experts, k, hidden = case
    x, router = normal(0, tokens, width), normal(1, width, experts, scale=width**-0.5)
    gate, up = (normal(i, experts, width, hidden, scale=width**-0.5) for i in (2, 3))
    down = normal(4, experts, hidden, width, scale=hidden**-0.5)
    block = jflux.Recipe.block
    dw = (_quantize_groups.FORM, _quantize_groups.SQUARES)
    squares = dataclasses.replace(block, dw=dw)

    def step(recipe: Any, x: Any, router: Any, *ws: Any) -> Any:
        def forward(x: Any, *ws: Any) -> Any:
            gate, up, down = ws
            return jflux.nn.mixture(x, router, up, down, gate, k=k, recipe=recipe).y

        y, pull = jax.vjp(forward, x, *ws)
        dx, *dws = pull(y)
        return dx, [dw.w if isinstance(dw, jflux.QuantizedWeight) else dw for dw in dws]

    plain = (x, router, gate, up, down)

    def once(recipe: Any) -> tuple[Any, ...]:
        return x, router, *(jax.jit(recipe.quantize_weight)(w) for w in (gate, up, down))

    contestants = {
        "bfloat16": (None, plain), "block, dw 16": (dataclasses.replace(block, dw=None), plain),
        "block": (block, plain), "block sq": (squares, plain),
        "block once": (block, once(block)), "sq once": (squares, once(squares)),
    }  # fmt: skip
    return {
        name: repeated(functools.partial(step, recipe), *args)
        for name, (recipe, args) in contestants.items()
    }


def main() -> int:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--cases", default="mixtral-16384,qwen3-8192,mixtral-4096")
    options.add_argument("--parts", default="kernels,layer")
    options.add_argument("--rounds", type=int, default=7)
    args = options.parse_args()
    _grouped_by_recipe._LEAST_ROWS = 1  # which this is to find
    parts = {"kernels": kernels, "layer": layer}
    for case in args.cases.split(","):
        for part in args.parts.split(","):
            runs = parts[part](CASES[case])
            for name, timing in trials.interleave(runs, CALLS, args.rounds).items():
                ms = [f"{1e3 * t:8.3f}" for t in (timing.median, timing.low, timing.high)]
                print(f"{case:14} {part:8} {name:18} {'  '.join(ms)}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
