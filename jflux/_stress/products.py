"""Random calls of the products."""

from __future__ import annotations

import functools
import math
import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jflux

from .. import _heap, testing
from .._call import gpu_code
from .._ops import _quantize, _scaled
from .._ops._spec import OpSpec, ops_with_checked_kernels
from . import calls
from .calls import HALVES, Call
from .cases import FLOATS, ROWS, SIZES, Case, Data, K, N, Output, Place, exchanged_by, sums_of
from .collectives import WIRES, half_step

#: Ops whose portable kernels multiply float32, as TF32.
OF_TF32 = ("all_gather_matmul", "matmul_reduce_scatter")


def product(rng: random.Random, place: Place, *, spec: OpSpec | None = None, **fields: Any) -> Case:
    """One of the products, of any shape and type; with a bias and relu or a residual, at times."""
    products = [s for s in ops_with_checked_kernels(place.platform) if s.product is not None]
    while True:
        op = spec or rng.choice(products)
        small = rng.random() < 0.5
        lead = fields.get("lead") or (
            *rng.choice([(), (), (2,), (1, 3)]), rng.choice(SIZES[:8] if small else ROWS)
        )  # fmt: skip
        axes = range(-len(lead) - 1, len(lead) + 1)
        dtypes = [d for d in FLOATS if op.takes(place.platform, d)]
        if place.wide and op.takes(place.platform, jnp.float64):
            dtypes.append(jnp.float64)
        if place.platform == "cuda" and op.name in OF_TF32 and gpu_code.runs_portable():
            dtypes.append(jnp.float32)
        drawn: dict[str, Any] = {
            "op": op.name, "lead": lead, "dimension": rng.randrange(len(lead)),
            "k": rng.choice(SIZES if small else K), "n": rng.choice(SIZES if small else N),
            "dtype": rng.choice(dtypes), "out": rng.choice([None, None, jnp.float32]),
            "transpose_rhs": rng.random() < 0.5,
            "gathered": op.name == "all_gather_matmul" and rng.random() < 0.2,
            "split": rng.choice(axes), "concat": rng.choice(axes),
        }  # fmt: skip
        call = Call(**drawn | fields)
        if place.world * math.prod(call.lead) * call.n * call.k <= place.most_products:
            break
    kind = call.collective.kind
    more = kind in ("all_gather", "reduce_scatter") and not call.gathered and rng.random() < 0.3
    f = call.bind(place.axis_name)
    if more and call.is_gather:
        f = functools.partial(f, activation="relu")

    def body(x: Any, w: Any, bias: Any = None, residual: Any = None) -> Any:
        options = {"bias": bias, "residual": residual}
        return f(x, w, **{name: a for name, a in options.items() if a is not None})

    def make(seed: int) -> Data:
        x, w = calls.operands(call, place.mesh, place.axis_name, seed=seed)
        want = calls.exact(call, place.mesh, place.axis_name, x, w)
        scale = calls.exact(call, place.mesh, place.axis_name, abs(x), abs(w))
        dtype = calls.coarser(call.dtype, call.out_dtype)
        if place.platform == "cuda" and call.dtype == jnp.float32:
            dtype = np.dtype(np.float16)  # TF32 has as many bits
        same, terms = kind == "all_reduce", call.terms(place.world)
        if call.gathered:
            gathered = Output(want[1], np.zeros_like(want[1]), call.dtype, 1, same=True)
            return (x, w), [Output(want[0], scale[0], dtype, terms), gathered]
        if not more:
            return (x, w), [Output(want, scale, dtype, terms, same)]
        lead = place.mesh.devices.shape
        bias = calls.normal(seed + 2, (*lead, call.n), np.float32)
        wide = bias.reshape(*lead, *[1] * len(call.lead), call.n)
        want, scale = want + wide, scale + abs(wide)
        if call.is_gather:
            return (x, w, bias), [Output(np.maximum(want, 0), scale, dtype, terms)]
        residual = calls.normal(seed + 3, want.shape, call.out_dtype)
        want, scale = want + residual.astype(np.float64), scale + abs(residual)
        return (x, w, bias, residual), [Output(want, scale, dtype, terms)]

    return place.case(
        call.op,
        f"{call.op} {call}{' with more' if more else ''}",
        body,
        make,
        is_xlas=place.world == 1 or call.is_exchange,  # an all-to-all may be two calls as well
        most_bytes=4 * place.world * math.prod(call.lead) * max(call.n, call.k),
    )


def scale_of(
    draws: np.random.Generator,
    a: np.ndarray,
    mesh: Any,
    along_k: int,
    *,
    each: bool = True,
    by_block: bool = False,
    size: int = 1,
) -> tuple[np.ndarray, np.ndarray]:
    """A scale of all ranks' values, and what they mean: with an entry for `size` indices of each
    dimension other than k, or for all; and for k, or each of its blocks."""
    ndim = a.ndim - mesh.devices.ndim
    shape = [-(-n // size) for n in a.shape[-ndim:]] if each else [1] * ndim
    shape[along_k] = -(-a.shape[along_k] // _scaled.BLOCK) if by_block else 1
    full = (*mesh.devices.shape, *shape)
    scale = np.exp2(draws.uniform(-3, 3, full)).astype(np.float32)
    return scale, a.astype(np.float32) * np.asarray(_scaled.spread(jnp.asarray(scale), a.shape))


def scaled(rng: random.Random, place: Place) -> Case:
    """A product of 8 bits with scales of rows and columns, or one scale for each rank, in a kernel.
    Values that a kernel reads along another axis, or scales of other rows, are far off."""
    on_gpus = place.platform != "cpu"
    portable = on_gpus and gpu_code.runs_portable()
    if on_gpus and not portable and rng.random() < 0.2:
        return large_sum(rng, place, has_scales=True)
    ops = ["all_gather_matmul"]
    ops += ["matmul_reduce_scatter"] * on_gpus
    ops += ["matmul_all_to_all", "all_to_all_matmul"] * (on_gpus and not portable)
    lead = (*rng.choice([(), (), (2,)]), rng.choice(ROWS))
    out = rng.choice([jnp.bfloat16, jnp.bfloat16, jnp.float32])
    # An entry for each row and column; and for each block of k, then of blocks of columns.
    by_row, by_column = rng.random() < 0.7, rng.random() < 0.7
    by_block = on_gpus and not portable and rng.random() < 0.4
    k = rng.choice([520, 1040]) if by_block else rng.choice(K)
    split, concat = rng.choice([(-1, -2), (-2, -1)]) if on_gpus else (-1, -2)
    op = rng.choice(ops)
    if op == "all_to_all_matmul":  # ranks have whole blocks of scales
        k = rng.choice([128, 256, 1024])
        # Parts of k are scales of blocks, of which columns then share one too.
        by_column &= by_block or split == -1
    # Kernels take no int8 by blocks, which parts of k are too.
    takes = 2 if by_block or (op == "all_to_all_matmul" and split == -2) else 3
    types = _scaled.TYPES[:takes]
    if portable:
        arch = gpu_code.arch_wanted()
        types = tuple(t for t in types if gpu_code.why_not_multiplied(t, arch) is None)
    of_x = rng.choice(types)
    w = jnp.int8 if of_x == jnp.int8 else jnp.float8_e4m3fn
    if on_gpus and of_x != jnp.int8 and rng.random() < 0.2:  # float16 does not hold int8's sums
        out = jnp.float16
    n = rng.choice(N)
    if op in ops[2:]:  # whose kernels give 16 bits, and shards of whole vectors
        n += -n % (_scaled.BLOCK if by_block else 16)
        out = jnp.bfloat16 if out == jnp.float32 else out
    # Kernels of sums of floats do not take "highest", but for PROMOTED ones.
    precision = None if portable else rng.choice([None, None, "highest"])
    quantizes = op == ops[0] and of_x == jnp.float8_e4m3fn and rng.random() < 0.4
    out = jnp.float32 if quantizes else out
    call = Call(
        op, lead, k, n, rng.randrange(len(lead)), w, out,
        transpose_rhs=rng.random() < 0.5, split=split, concat=concat,
    )  # fmt: skip
    form = jflux.Format(w, (1, _scaled.BLOCK), power_of_two=rng.random() < 0.5)
    f = call.bind(place.axis_name, **({"quantize": form} if quantizes else {}))

    def body(x: Any, x_scale: Any, w: Any, w_scale: Any) -> Any:
        y = f(jflux.Scaled(x, x_scale), jflux.Scaled(w, w_scale), precision=precision)
        return y.dequantize() if quantizes else y

    def make(seed: int) -> Data:
        draws = np.random.default_rng(seed + 2)
        mesh, axis = place.mesh, place.axis_name
        x, w = calls.operands(call, mesh, axis, seed=seed)
        x = x.astype(of_x)

        along_k = -1 if call.transpose_rhs else -2
        scales, wide = zip(
            scale_of(draws, x, mesh, -1, each=by_row, by_block=by_block),
            scale_of(
                draws, w, mesh, along_k, each=by_column, by_block=by_block,
                size=_scaled.BLOCK if by_block else 1,
            ),
            strict=True,
        )  # fmt: skip
        want = calls.exact(call, mesh, axis, *wide)
        scale = calls.exact(call, mesh, axis, *(abs(a) for a in wide))
        terms = call.terms(place.world)
        # Tensor cores keep fewer bits of sums of 8-bit floats than float32 has.
        holds = call.dtype == jnp.int8 or out != jnp.float32 or place.platform == "cpu"
        dtype = form.dtype if quantizes else np.dtype(out if holds else jnp.bfloat16)
        return (x, scales[0], w, scales[1]), [Output(want, scale, dtype, terms)]

    return place.case(
        call.op,
        f"{call.op} {call} with scales {by_row=} {by_column=} {by_block=} {precision=}, x of "
        f"{of_x.name}, y of {np.dtype(out).name}{' and quantised' if quantizes else ''}",
        body,
        make,
        is_xlas=place.world == 1 or call.is_exchange,
        most_bytes=4 * place.world * math.prod(call.lead) * max(call.n, call.k),
        has_gradient=False,
    )


def quantized_scatter(rng: random.Random, place: Place) -> Case:
    """A matmul_reduce_scatter whose parts travel in 8 bits, in its kernel: of whole tiles or not,
    on Hopper of at least 256 rows of a rank; also of operands with scales. A part is off by half a
    step."""
    world, wire = place.world, rng.choice(WIRES)
    of_8 = place.platform == "cuda" and rng.random() < 0.4
    portable = place.platform == "cuda" and gpu_code.runs_portable()
    by_block = of_8 and not portable and rng.random() < 0.5
    rows = world * rng.choice([7, 30, 100, 300] if portable else [256, 300, 512])
    ns = [n for n in (384, 512, 896) if rows * n * 64 * world <= place.most_products]
    n, k = rng.choice(ns or [128]), rng.choice([520, 1040] if by_block else [64, 72, 256])
    dtype = jnp.float8_e4m3fn if of_8 else rng.choice(HALVES)
    if portable and of_8 and rng.random() < 0.5:
        dtype = jnp.int8
    out = rng.choice([jnp.bfloat16 if of_8 else None, jnp.float32])
    call = Call(
        "matmul_reduce_scatter", (rows,), k, n, 0, dtype, out, transpose_rhs=rng.random() < 0.5
    )
    f = call.bind(place.axis_name, wire=wire)
    along_k = -1 if call.transpose_rhs else -2

    def body(x: Any, w: Any, *scales: Any) -> Any:
        operands = [x, w]
        if of_8:
            operands = [jflux.Scaled(a, s) for a, s in zip(operands, scales, strict=True)]
        return f(*operands, precision=None)

    def make(seed: int) -> Data:
        x, w = calls.operands(call, place.mesh, place.axis_name, seed=seed)
        wide, scales = [x, w], []
        if of_8:
            draws, each = np.random.default_rng(seed + 2), {"by_block": by_block}
            size = _scaled.BLOCK if by_block else 1
            of_x = scale_of(draws, x, place.mesh, -1, **each)
            of_w = scale_of(draws, w, place.mesh, along_k, size=size, **each)
            scales, wide = [of_x[0], of_w[0]], [of_x[1], of_w[1]]
        one, other = (a.astype(np.float64) for a in wide)
        parts = one @ (np.swapaxes(other, -1, -2) if call.transpose_rhs else other)
        bound = half_step(parts, wire)

        def scatter(each: list[np.ndarray]) -> list[np.ndarray]:
            return np.split(np.sum(each, 0), world)

        want, bound = (exchanged_by(place, scatter, a) for a in (parts, bound))
        sizes = calls.exact(call, place.mesh, place.axis_name, abs(one), abs(other))
        exact = np.dtype(jnp.bfloat16) if of_8 else calls.coarser(call.dtype, call.out_dtype)
        terms = call.terms(world)
        scale = sizes + bound / testing.tolerance(exact, terms)
        return (x, w, *scales), [Output(want, scale, exact, terms)]

    return place.case(
        call.op,
        f"{call.op} {call} wire {wire}{' with scales' if of_8 else ''} {by_block=}",
        body,
        make,
        most_bytes=4 * rows * max(n, k),
        has_gradient=not of_8,
    )


def quantized_is_checked(place: Place) -> bool:
    """Whether XLA does not divide on GPUs, where the last bit of its ratios may be off."""
    if place.platform == "cpu":
        return True
    of_here = (gpu_code.arch_here(), gpu_code.gpu_here(), _heap.no_record_of_local_ops())
    return gpu_code.why_not(_quantize.OP, *of_here) is None


def quantized(rng: random.Random, place: Place) -> Case:
    """quantize, and of the transpose: all bits."""
    block = rng.choice([(1, -1), (1, 128), (128, 128), (-1, -1)])
    rows, columns = (16 * rng.choice([1, 3, 8, 9, 20, 33]) for _ in range(2))
    dtype, transpose = rng.choice(_scaled.TYPES), rng.random() < 0.7
    of_x = rng.choice([*HALVES, jnp.float32])
    most = _quantize.largest(dtype)

    def body(x: Any) -> Any:
        found = jflux.quantize(x, dtype, block=block, transpose=transpose)
        return [leaf.astype(jnp.float32) for leaf in jax.tree.leaves(found)]

    def exact(x: np.ndarray) -> list[np.ndarray]:
        """Values and scales of a matrix, in float32."""
        rows, columns = (n if b == -1 else b for n, b in zip(x.shape, block, strict=True))
        padded = np.pad(x, [(0, -x.shape[0] % rows), (0, -x.shape[1] % columns)])
        blocks = padded.reshape(padded.shape[0] // rows, rows, -1, columns)
        scale = abs(blocks).max((1, 3)) / np.float32(most)
        whole = np.repeat(np.repeat(scale, rows, 0), columns, 1)[: x.shape[0], : x.shape[1]]
        ratio = np.clip(x / whole, -most, most)
        ratio = np.round(ratio) if dtype == np.int8 else ratio
        return [ratio.astype(dtype).astype(np.float32), scale]

    def make(seed: int) -> Data:
        lead = place.mesh.devices.shape
        x = calls.normal(seed, (*lead, rows, columns), of_x)
        each = []
        for at in np.ndindex(lead):
            wide = x[at].astype(np.float32)
            each.append(exact(wide) + (exact(wide.T) if transpose else []))
        wants = [np.stack(one).reshape(*lead, *one[0].shape) for one in zip(*each, strict=True)]
        zero = [Output(want, np.zeros_like(want), np.float32, 1) for want in wants]
        return (x,), zero

    types = f"{np.dtype(of_x).name} to {dtype.name}"
    name = f"quantize {rows} x {columns} {types} {block=} {transpose=}"
    return place.case("quantize", name, body, make, has_gradient=False)


def large_sum(rng: random.Random, place: Place, *, has_scales: bool | None = None) -> Case:
    """matmul_all_reduce in one kernel: whole tiles for each rank, or, on two, few rows. On GPUs
    also of 8 bits with scales, unless `has_scales` says whether."""
    world, dtype = place.world, rng.choice(HALVES)
    slow = place.platform == "cpu"
    k = rng.choice([8, 13] if slow else [64, 136, 392])
    if has_scales is None:
        has_scales = not slow and not gpu_code.runs_portable() and rng.random() < 0.5
    by_block = has_scales and rng.random() < 0.5
    of_x = of_w = dtype
    if has_scales:
        of_x = rng.choice(_scaled.TYPES[: 2 if by_block else 3])
        k = rng.choice([64, 400, 1040, 2064])  # of the last, clusters share few rows' k
        is_whole = of_x == jnp.int8  # whose sums float16 does not hold
        dtype = jnp.bfloat16 if is_whole else rng.choice(HALVES)
        of_w = of_x if is_whole else jnp.float8_e4m3fn
    transpose_rhs, adds = rng.random() < 0.5, rng.random() < 0.5
    if world == 2 and rng.random() < 0.5:
        rows, n = rng.choice([32, 100, 128]), rng.choice([8200, 10248])
    else:  # a row of tiles for each rank, or several, and columns that make it more than 4 MiB
        rows = 128 * world * (1 if slow else rng.choice([1, 1, 2, 3]))
        n = (2 << 20) // rows // 8 * 8 + (8 if slow else rng.choice([8, 1032]))
    n += -n % 16 * has_scales
    # Of the program: the same on all ranks.
    residual: Any = calls.normal(1, (rows, n), dtype) if adds else None

    def body(x: Any, w: Any, *scales: Any) -> Any:
        if scales:
            x, w = (jflux.Scaled(a, s) for a, s in zip((x, w), scales, strict=True))
        return jflux.matmul_all_reduce(
            x, w, axis_name=place.axis_name, transpose_rhs=transpose_rhs, residual=residual,
            preferred_element_type=dtype,
        )  # fmt: skip

    def make(seed: int) -> Data:
        lead = place.mesh.devices.shape
        x = calls.normal(seed, (*lead, rows, k), of_x)
        w = calls.normal(seed + 1, (*lead, k, n), of_w)
        wide_x, wide_w, scales = x.astype(np.float32), w.astype(np.float32), []
        if has_scales:
            draws, size = np.random.default_rng(seed + 2), _scaled.BLOCK if by_block else 1
            x_scale, wide_x = scale_of(draws, x, place.mesh, -1, by_block=by_block)
            w_scale, wide_w = scale_of(draws, w, place.mesh, -2, by_block=by_block, size=size)
            scales = [x_scale, np.swapaxes(w_scale, -1, -2) if transpose_rhs else w_scale]
        pairs = ((wide_x, wide_w), (abs(wide_x), abs(wide_w)))
        want, scale = sums_of(place, *(a @ b for a, b in pairs))
        if residual is not None:
            want, scale = want + residual.astype(np.float64), scale + abs(residual)
        operand = np.ascontiguousarray(np.swapaxes(w, -1, -2)) if transpose_rhs else w
        return (x, operand, *scales), [Output(want, scale, dtype, world * k, same=True)]

    return place.case(
        "matmul_all_reduce",
        f"matmul_all_reduce {rows} x {n} x {k} {transpose_rhs=} {np.dtype(of_x).name}"
        f"{f' with scales {by_block=}, y of {np.dtype(dtype).name}' if has_scales else ''}"
        f"{' and a residual' if adds else ''}",
        body,
        make,
        is_xlas=world == 1,
        has_gradient=not has_scales,
    )
