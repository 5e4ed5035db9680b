"""Checks the kernels of grouped_matmul for operands of 8 bits with scales, with every tile that is
compiled, on one GPU, on random calls, against float64; a table comes last:

python tests/grouped_scaled_gpu.py [--calls 150] [--seed 0] [--limit 200] [--portable]

Rows past the sum of the sizes hold NaN, and so do the rows of one group: neither may show anywhere
else. Each call runs twice, and must give the same bits. Results in float32 are quantised in the
kernel too, and must have the bits that `jflux.quantize` makes of them. A product by scales of
blocks has the same bits as the sum of those of both halves of k, in one call. Weight gradients are
those of transposes that a kernel has quantised, of dy by squares too, whose bits must be those of
plain `lax`. With --portable calls are those that portable code takes, and there are no gradients.
"""

from __future__ import annotations

import contextlib
import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import random_checks
from moe_gpu import draw_sizes

import jflux
from jflux import _config, _native
from jflux._call import gpu_code, tuning_tables
from jflux._ops import _quantize_groups, _scaled
from jflux._ops._epilogue import ACTIVATIONS
from jflux._ops._scaled import BLOCK, Scales
from jflux._ops.products import _grouped_dw_scaled, _grouped_primitives, _grouped_scaled
from jflux._stress import calls

E4M3 = jnp.float8_e4m3fn


def check(seed: int) -> tuple[str, str, float]:
    """(tile, form, largest error in its bounds) of one random call; some of it must be exact."""
    rng = np.random.default_rng(seed)
    sizes, m = draw_sizes(rng)
    groups, total = len(sizes), sum(sizes)
    most = 30 if groups > 100 else 70
    k, n = (16 * int(rng.choice([rng.integers(1, most), 8, 9, 16, 17])) for _ in range(2))
    portable = gpu_code.runs_portable()
    scales = Scales.OF_BLOCKS if seed % 2 and not portable else Scales.OF_SUMS
    if scales.has_blocks and not rng.integers(3):
        k = 2 * BLOCK * int(rng.integers(1, 3))
    gated, with_row_scale = bool(rng.integers(2)), bool(rng.integers(2))
    of_x = _scaled.TYPES[rng.integers(2 if scales.has_blocks else 3)]
    is_float = of_x != jnp.int8
    of_w = E4M3 if is_float else of_x
    # float16 does not hold all of the others.
    is_small = is_float and not gated and not with_row_scale
    out = (jnp.bfloat16, jnp.float32, jnp.float16 if is_small else jnp.bfloat16)[rng.integers(3)]
    tiles = [t for t in _native.GROUPED_TILES[scales] if not gated or t[0] % 128 == 0]
    tile = None if portable else (None, *tiles)[rng.integers(1 + len(tiles))]
    activation = ("silu", "relu")[rng.integers(2)] if gated else None

    def values(dtype, *shape):
        return jnp.asarray(calls.normal(int(rng.integers(1 << 32)), shape, dtype))

    def scale_of(*shape):
        return np.exp2(rng.uniform(-4, 4, shape)).astype(np.float32)

    entries = (-(-n // BLOCK), -(-k // BLOCK)) if scales.has_blocks else (n, 1)
    x_scale = scale_of(m, entries[1])
    poisoned = int(rng.integers(groups)) if rng.integers(2) else -1
    starts = np.cumsum([0, *sizes])
    spoilt = np.arange(m) >= total
    if poisoned >= 0:
        spoilt[starts[poisoned] : starts[poisoned + 1]] = True
    x_in, x_scale_in = values(of_x, m, k), x_scale.copy()
    if rng.integers(2) or not is_float:
        x_scale_in[spoilt] = np.nan
    else:
        x_in = jnp.where(spoilt[:, None], jnp.asarray(np.nan, of_x), x_in)
    x = jflux.Scaled(x_in, jnp.asarray(x_scale_in))
    ws = [
        jflux.Scaled(values(of_w, groups, n, k), jnp.asarray(scale_of(groups, *entries)))
        for _ in range(1 + gated)
    ]
    row_scale = rng.standard_normal(m).astype(np.float32)
    args = (x, ws if gated else ws[0], jnp.asarray(sizes, jnp.int32))
    args += (jnp.asarray(row_scale),) * with_row_scale

    def call(x, w, sizes, row_scale=None, **options):
        return jflux.grouped_matmul(
            x, w, sizes, transpose_rhs=True, row_scale=row_scale, preferred_element_type=out,
            activation=activation, gated=gated, **options,
        )  # fmt: skip

    def forced():
        choice = tuning_tables.Choice(*tile, 8) if tile else None
        return tuning_tables.force(choice) if choice else contextlib.nullcontext()

    with forced():
        lowered = jax.jit(call).lower(*args)
    if jax.default_backend() == "gpu" and "jflux_grouped_matmul_scaled" not in lowered.as_text():
        raise AssertionError("no kernel takes the call")
    program = lowered.compile()
    y, again = (np.asarray(program(*args)) for _ in range(2))
    if y.tobytes() != again.tobytes():
        raise AssertionError("a second call gives other bits")

    wide = [
        np.asarray(a.values, np.float64)
        * np.asarray(_scaled.spread(jnp.asarray(s), a.shape), np.float64)
        for a, s in ((x, x_scale), *((w, w.scale) for w in ws))
    ]
    wide[0][spoilt] = 0

    def products(x, w):
        found = np.zeros((m, n))
        for i, size in enumerate(sizes):
            rows = slice(starts[i], starts[i] + size)
            found[rows] = x[rows] @ w[i].T
        return found

    goal, *other = (products(wide[0], w) for w in wide[1:])
    terms, *more = (products(np.abs(wide[0]), np.abs(w)) for w in wide[1:])
    if gated:
        with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
            goal = np.asarray(ACTIVATIONS[activation](jnp.asarray(goal))) * other[0]
        terms = 3 * terms * more[0]
    if with_row_scale:
        goal, terms = (a * b[:, None] for a, b in ((goal, row_scale), (terms, np.abs(row_scale))))
    # Tensor cores keep 13 bits or so of the largest of 32 terms: of few terms up to 1.25 * 2**-12
    # of their sum has been seen to be lost.
    bound = (float(jnp.finfo(out).eps) / 2 + 2.0**-11) * terms + 1e-30
    bound += float(jnp.finfo(out).smallest_subnormal)
    error = (np.abs(y.astype(np.float64) - goal) / bound)[~spoilt]
    if not np.isfinite(error).all():
        raise AssertionError(f"not finite at {np.argwhere(~np.isfinite(error))[:4]}")
    worst = float(error.max(initial=0))
    if worst > 1:
        at = np.argwhere(error > 1)
        raise AssertionError(f"{worst:.3g} bounds off, {len(at)} places, as {at[:4]}, {tile=}")
    if np.any(y[total:] != 0):
        raise AssertionError("y past the sum is not 0")
    if out == jnp.float32 and of_x == E4M3:
        block = jflux.Format(E4M3, (1, BLOCK), power_of_two=bool(rng.integers(2)))
        with forced():
            quantized = jax.jit(functools.partial(call, quantize=block))(*args)
        pairs = zip(jax.tree.leaves(quantized), jax.tree.leaves(block.quantize(y)), strict=True)
        for one, other in pairs:
            differ = np.asarray(one).view(np.uint8) != np.asarray(other).view(np.uint8)
            if np.any(differ[~spoilt]):
                raise AssertionError(f"quantised otherwise at {np.argwhere(differ)[:4]}, {tile=}")
    in_halves = scales.has_blocks and k % (2 * BLOCK) == 0 and not gated and not with_row_scale
    in_halves &= jax.default_backend() == "gpu"  # `lax` adds blocks in another order
    if in_halves:
        with forced():
            of_terms = np.asarray(jax.jit(functools.partial(_in_halves, out=out))(*args))
        if of_terms[~spoilt].tobytes() != y[~spoilt].tobytes():
            raise AssertionError(f"two terms have other bits, {tile=}")
    form = f"{scales.name.lower()} {np.dtype(of_x).name}{' gated' if gated else ''}"
    form += " in halves" * in_halves
    return "x".join(map(str, tile or ("chosen",))), form, worst


def _in_halves(x, w, sizes, *, out):
    """The product, as the sum of those of both halves of k."""

    def halves(one):
        pairs = (jnp.split(a, 2, axis=-1) for a in (one.values, one.scale))
        return [jflux.Scaled(*both) for both in zip(*pairs, strict=True)]

    call = _grouped_primitives.Params(True, np.dtype(out))
    return _grouped_scaled.bind_terms(halves(x), halves(w), sizes, call)


def check_weight_gradient(seed: int) -> tuple[str, str, float]:
    """As :func:`check`. x is quantised again, dy beside its copy."""
    rng = np.random.default_rng(seed)
    sizes, m = draw_sizes(rng)
    groups, starts = len(sizes), np.cumsum([0, *sizes])
    most = 30 if groups > 100 else 70
    k, n = (16 * int(rng.choice([rng.integers(1, most), 8, 9, 16, 17])) for _ in range(2))
    out = (jnp.bfloat16, jnp.float32)[rng.integers(2)]
    of_dy = (jnp.bfloat16, jnp.bfloat16, jnp.float16, jnp.float32)[rng.integers(4)]
    form = (_quantize_groups.FORM, _quantize_groups.SQUARES)[rng.integers(2)]
    scales = Scales.OF_VECTORS if form == _quantize_groups.FORM else Scales.OF_BLOCKS
    tiles = (None, *_native.GROUPED_TILES[scales])
    tile = tiles[rng.integers(len(tiles))]
    poisoned = int(rng.integers(groups)) if rng.integers(2) else -1
    spoilt = np.arange(m) >= sum(sizes)
    if poisoned >= 0:
        spoilt[starts[poisoned] : starts[poisoned + 1]] = True

    def values(dtype, columns):
        drawn = calls.normal(int(rng.integers(1 << 32)), (m, columns), np.float32)
        drawn = np.asarray(drawn) * np.exp(rng.standard_normal((m, 1)))
        return jnp.asarray(np.where(spoilt[:, None], np.nan, drawn), dtype)

    own = _quantize_groups.FORM
    x, dy = own.quantize(values(jnp.bfloat16, k)), values(of_dy, n)
    of_groups = jnp.asarray(sizes, jnp.int32)

    def quantize(x, dy, sizes):
        x_turned = _quantize_groups.transposed(x, sizes)
        return x_turned, *_quantize_groups.quantized(dy, sizes, form)

    lowered = jax.jit(quantize).lower(x, dy, of_groups)
    kernels = lowered.as_text().count("@jflux_quantize(")
    if jax.default_backend() == "gpu" and kernels != 2:
        raise AssertionError(f"{kernels} kernels quantise")
    x_turned, copy, dy_turned = lowered.compile()(x, dy, of_groups)
    blocks = sum(-(-size // BLOCK) for size in sizes)
    given = {"x": (x, own, x_turned), "dy": (dy, form, dy_turned)}
    for of, (one, by, got) in given.items():
        again = isinstance(one, jflux.Scaled)
        params = _quantize_groups.Params(by, copy=False, again=again, fill=False)
        arrays = [*jax.tree.leaves(one), of_groups]
        want = jax.jit(functools.partial(_quantize_groups._in_lax, params=params))(arrays)
        entries = (slice(blocks),) if by == own else (slice(None), slice(blocks))
        columns = (slice(None), slice(BLOCK * blocks))
        for at, a, b in zip((columns, entries), got, want, strict=True):
            a, b = np.asarray(a[at]), np.asarray(b[at])
            same = (a == b) | (np.isnan(a) & np.isnan(b))
            if not same.all():
                raise AssertionError(f"the transpose of {of} differs at {np.argwhere(~same)[:4]}")
    rows = [np.asarray(one.dequantize())[: sum(sizes)] for one in (copy, own.quantize(dy))]
    if not np.array_equal(*rows, equal_nan=True):
        raise AssertionError("the copy of dy differs")

    call = functools.partial(_grouped_dw_scaled.bind, out=np.dtype(out), rows=m)
    choice = tuning_tables.Choice(*tile, 8) if tile else None
    with tuning_tables.force(choice) if choice else contextlib.nullcontext():
        lowered = jax.jit(call).lower(x_turned, dy_turned, of_groups)
    if jax.default_backend() == "gpu" and "jflux_grouped_matmul_dw_scaled" not in lowered.as_text():
        raise AssertionError("no kernel takes the call")
    program = lowered.compile()
    dw, again = (np.asarray(program(x_turned, dy_turned, of_groups)) for _ in range(2))
    if dw.tobytes() != again.tobytes():
        raise AssertionError("a second call gives other bits")
    wide = [np.asarray(one.rows(jnp.float32), np.float64) for one in (x_turned, dy_turned)]
    worst, first = 0.0, 0
    for group, size in enumerate(sizes):
        last = first + -(-size // BLOCK) * BLOCK
        a, b = (one[first:last] for one in wide)
        first = last
        if group == poisoned and size > 0:
            continue
        # As in `check`, but rows differ in size, and the small ones of 32 lose more: a model of
        # tensor cores that keep 13 bits of the largest term errs as they do, to two digits.
        bound = (float(jnp.finfo(out).eps) / 2 + 2.0**-9) * (np.abs(a).T @ np.abs(b)) + 1e-30
        error = np.abs(dw[group].astype(np.float64) - a.T @ b) / bound
        if not np.isfinite(error).all():
            raise AssertionError(f"not finite in group {group}, {tile=}")
        worst = max(worst, float(error.max()))
    if worst > 1:
        raise AssertionError(f"{worst:.3g} bounds off, {tile=}")
    words = f"dw {scales.name.lower()}, dy {np.dtype(of_dy).name}"
    return "x".join(map(str, tile or ("chosen",))), words, worst


def main() -> int:
    parser = random_checks.parser(__doc__, calls=150, limit=200)
    parser.add_argument("--portable", action="store_true", help="portable code")
    args = parser.parse_args()
    jflux.config.update(strict=True, unchecked_kernels=True)
    if args.portable:
        _config.override_for_good(arch=_native.FLOAT8_ARCH)
    checks = random_checks.Checks(args.limit)
    for seed in range(args.seed, args.seed + args.calls):
        if not checks.go_on():
            break
        checks.run(f"seed {seed}", check, seed)
        if not args.portable:
            checks.run(f"seed {seed}, weight gradient", check_weight_gradient, seed)
    return checks.report("tile", "form")


if __name__ == "__main__":
    sys.exit(main())
