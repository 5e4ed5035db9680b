"""Checks the kernels of grouped_matmul, with every tile that is compiled, and of moe.route on one
GPU, on random calls, against float64 and a sort in numpy; a table comes last:

python tests/moe_gpu.py [--calls 200] [--seed 0] [--limit 300] [--portable]

Each product is compared whole: y, and the gradients of x, of the weights and of the row scale. Rows
past the sum of the sizes hold NaN, and so do the rows of one group: neither may show anywhere else.
Each call runs twice, and must give the same bits.
"""

from __future__ import annotations

import contextlib
import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import random_checks
from routed import TILES

import jflux
from jflux import _config, _native, moe
from jflux._call import tuning_tables
from jflux._ops._epilogue import ACTIVATIONS

WAYS = (
    {}, {}, {"activation": "silu"}, {"activation": "silu", "gated": True},
    {"activation": "gelu_tanh", "gated": True}, {"activation": "relu"},
)  # fmt: skip


def draw_sizes(rng: np.random.Generator) -> tuple[list[int], int]:
    """(rows of each group, rows in all)."""
    kind = rng.integers(5)
    if kind == 0:  # what has been wrong before, or could be
        sizes = [[300, 20, 0, 681], [0, 0, 5], [0, 0, 0], [1], [63, 64, 65], [100, 129, 0, 128]]
        chosen = list(sizes[rng.integers(len(sizes))])
    elif kind == 1:  # few rows of many groups
        chosen = list(rng.integers(0, 4, size=rng.integers(33, 330)))
    elif kind == 2:  # many groups of which the last are empty
        chosen = list(rng.integers(0, 60, size=40)) + [0] * int(rng.integers(1, 40))
    elif kind == 3:
        chosen = list(rng.integers(0, 1200, size=rng.integers(1, 6)))
    else:
        chosen = list(rng.integers(0, 300, size=rng.integers(1, 12)))
    chosen = [int(size) for size in chosen]
    past = int(rng.choice([0, 0, 1, 7, 130]))
    return chosen, max(1, sum(chosen) + past)


def wanted(x, ws, sizes, scale, dy, transposed, activation):
    """y, dx, dws and dscale in float64 (numpy)."""
    m, n = dy.shape
    products = [np.zeros((m, n)) for _ in ws]
    starts = np.cumsum([0, *sizes])
    turned = [w.swapaxes(1, 2) if transposed else w for w in ws]
    for i, size in enumerate(sizes):
        rows = slice(starts[i], starts[i] + size)
        for product, w in zip(products, turned, strict=True):
            product[rows] = x[rows] @ w[i]

    def epilogue(scale, *products):
        y = products[0] if activation is None else ACTIVATIONS[activation](products[0])
        y = y * products[1] if len(products) == 2 else y
        return y if scale is None else y * scale[:, None]

    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        y, pull = jax.vjp(epilogue, scale, *products)
        dscale, *dproducts = (None if d is None else np.asarray(d) for d in pull(jnp.asarray(dy)))
    dx, dws = np.zeros_like(x), [np.zeros_like(w) for w in turned]
    for i, size in enumerate(sizes):
        rows = slice(starts[i], starts[i] + size)
        for d, w, dw in zip(dproducts, turned, dws, strict=True):
            dx[rows] += d[rows] @ w[i].T
            dw[i] = x[rows].T @ d[rows]
    dws = [dw.swapaxes(1, 2) if transposed else dw for dw in dws]
    return np.asarray(y), dx, dws, dscale


def check_route(seed: int) -> tuple[str, str, float]:
    """(what, how many slots, 0) of one random routing, which must be exact."""
    rng = np.random.default_rng(seed)
    experts, k = int(rng.choice([1, 4, 8, 60, 128, 256, 1000])), int(rng.integers(1, 9))
    tokens = int(rng.choice([1, 31, 128, 1025, 4096, 20000]))
    few = max(1, experts // int(rng.choice([1, 1, 3, 1000])))
    indices = rng.integers(-int(rng.integers(2)), few, size=(tokens, k)).astype(np.int32)
    capacity = None if rng.integers(2) else int(rng.choice([0, 5, tokens * k // experts + 1]))
    program = jax.jit(functools.partial(moe.route, num_experts=experts, capacity=capacity))
    slots = indices.reshape(-1)
    order = np.argsort(slots, kind="stable")
    order = order[slots[order] >= 0]
    asked = np.bincount(slots[order], minlength=experts)
    place = np.arange(len(order)) - np.concatenate([[0], np.cumsum(asked)])[slots[order]]
    order = order if capacity is None else order[place < capacity]
    counts = np.bincount(slots[order], minlength=experts)
    source, destination = (np.full(slots.size, -1) for _ in range(2))
    source[: len(order)] = order
    destination[order] = np.arange(len(order))
    offsets = np.concatenate([[0], np.cumsum(counts)])
    goal = (counts, offsets, destination.reshape(indices.shape), source)
    for _ in range(2):
        for name, found, right in zip(moe.Routing._fields, program(indices), goal, strict=True):
            if not np.array_equal(np.asarray(found), right):
                raise AssertionError(f"route: {name}, {tokens=} {k=} {experts=} {capacity=}")
    return "route", f"{len(str(slots.size))} digits of slots", 0.0


def check_product(seed: int) -> tuple[str, str, float]:
    """(tile, form, largest error in its bounds) of one random call; some of it must be exact."""
    rng = np.random.default_rng(seed)
    sizes, m = draw_sizes(rng)
    groups = len(sizes)
    most = 40 if groups > 100 else 90
    k, n = (8 * int(rng.choice([rng.integers(1, most), 8, 9, 16, 17])) for _ in range(2))
    way = dict(WAYS[rng.integers(len(WAYS))])
    activation, gated = way.get("activation"), way.get("gated", False)
    transposed, scaled = bool(rng.integers(2)), bool(rng.integers(2))
    dtype = (jnp.bfloat16, jnp.float16)[rng.integers(2)]
    out = jnp.float32 if rng.integers(3) == 0 else dtype
    tile = TILES[rng.integers(len(TILES))]
    if gated and tile == (192, 1):
        tile = None
    eps = float(jnp.finfo(dtype).eps)

    def normal(*shape, scale=1.0):
        return np.asarray(jnp.asarray(rng.normal(size=shape) * scale, dtype).astype(jnp.float32),
                          np.float64)  # fmt: skip

    total = sum(sizes)
    x, dy = normal(m, k), normal(m, n)
    w_shape = (groups, n, k) if transposed else (groups, k, n)
    ws = [normal(*w_shape, scale=k**-0.5) for _ in range(1 + gated)]
    scale = rng.normal(size=m).astype(np.float32).astype(np.float64) if scaled else None
    x[total:], dy[total:] = 0, 0
    goal = wanted(x, ws, sizes, scale, dy, transposed, activation)

    poisoned = int(rng.integers(groups)) if rng.integers(2) else -1
    starts = np.cumsum([0, *sizes])
    spoilt = np.zeros(m, bool)
    if poisoned >= 0:
        spoilt[starts[poisoned] : starts[poisoned + 1]] = True
    x_in, dy_in = x.copy(), dy.copy()
    x_in[spoilt] = np.nan
    x_in[total:], dy_in[total:] = np.nan, np.nan
    scale_in = None if scale is None else np.where(np.arange(m) < total, scale, np.nan)

    def both(x, ws, scale, dy, sizes):
        def call(x, ws, scale):
            return jflux.grouped_matmul(
                x, ws if gated else ws[0], sizes, transpose_rhs=transposed, row_scale=scale,
                preferred_element_type=out, activation=activation, gated=gated,
            )  # fmt: skip

        y, pull = jax.vjp(call, x, ws, scale)
        return y, *pull(dy)

    cast = lambda a, t: None if a is None else jnp.asarray(a, t)  # noqa: E731
    args = (
        cast(x_in, dtype), [cast(w, dtype) for w in ws], cast(scale_in, jnp.float32),
        cast(dy_in, out), jnp.asarray(sizes, jnp.int32),
    )  # fmt: skip
    forced = (
        tuning_tables.force(tuning_tables.Choice(*tile, 8)) if tile else contextlib.nullcontext()
    )
    with forced:
        program = jax.jit(both).lower(*args).compile()
    first, again = (jax.tree.map(np.asarray, program(*args)) for _ in range(2))
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(again), strict=True):
        if a.tobytes() != b.tobytes():
            raise AssertionError("a second call gives other bits")
    y, dx, dws, dscale = first
    worst = 0.0

    def compare(what, found, goal, bound, keep=None):
        nonlocal worst
        found = np.asarray(found.astype(np.float32), np.float64)
        if keep is not None:
            found, goal = found[keep], goal[keep]
        error = np.abs(found - goal)
        if not np.isfinite(found).all():
            raise AssertionError(f"{what}: not finite at {np.argwhere(~np.isfinite(found))[:4]}")
        if error.size:
            worst = max(worst, float((error / bound(goal)).max()))
        if worst > 1:
            at = np.argwhere(error / bound(goal) > 1)
            raise AssertionError(f"{what}: {worst:.3g} bounds off, {len(at)} places, as {at[:4]}")

    def exactly_zero(what, found):
        if found.size and (np.asarray(found.astype(np.float32)) != 0).any():
            raise AssertionError(f"{what} is not 0")

    # Products are of order 1, or of their square root of terms; what is kept of an activation's
    # operand is rounded too.
    fine = float(jnp.finfo(out).eps) + 2.0**-16
    rough = 8 * eps if activation else 2 * eps
    kept = ~spoilt
    compare("y", y, goal[0], lambda g: fine * (np.abs(g) + 0.25), kept)
    exactly_zero("y past the sum", y[total:])
    # dx takes nothing of x without an activation.
    size_of = np.abs(goal[1]).max(initial=0.25)
    compare("dx", dx, goal[1], lambda g: rough * (np.abs(g) + size_of),
            kept if activation or poisoned < 0 else None)  # fmt: skip
    exactly_zero("dx past the sum", dx[total:])
    for dw, goal_dw in zip(dws, goal[2], strict=True):
        groups_kept = np.arange(groups) != poisoned
        largest = np.abs(goal_dw).max(initial=0.25)
        compare("dw", dw, goal_dw, lambda g, most=largest: rough * (np.abs(g) + most), groups_kept)
        exactly_zero("dw of empty groups", dw[np.array(sizes) == 0])
    if dscale is not None:
        size_of = np.abs(goal[3]).max(initial=0.25)
        compare("dscale", dscale, goal[3], lambda g: 8 * eps * (np.abs(g) + size_of), kept)
        exactly_zero("dscale past the sum", dscale[total:])
    form = f"{activation or 'plain'}{' gated' if gated else ''}{' f32' if out != dtype else ''}"
    return "x".join(map(str, tile or ("chosen",))), form, worst


def main() -> int:
    parser = random_checks.parser(__doc__, calls=200, limit=300)
    parser.add_argument("--portable", action="store_true", help="products by portable code")
    args = parser.parse_args()
    jflux.config.update(strict=True, unchecked_kernels=args.portable)
    if args.portable:
        _config.override_for_good(arch=_native.FLOAT8_ARCH)
    checks = random_checks.Checks(args.limit)
    for seed in range(args.seed, args.seed + args.calls):
        if not checks.go_on():
            break
        routes = seed % 4 == 3 and not args.portable
        checks.run(f"seed {seed}", check_route if routes else check_product, seed)
    return checks.report("tile", "form")


if __name__ == "__main__":
    sys.exit(main())
