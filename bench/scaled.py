"""Products of 8-bit operands beside what a careful user could write; the table comes last.

python -m bench.scaled --ranks 4 --peers torch --out bench/results/4xh100_scaled.json [--quick]
python -m bench.scaled --ranks 1 --peers torch     the product of one of four ranks alone

Weights are stored [n, k], results are bfloat16, and 8 bits are float8_e4m3fn. Microseconds a call:

    S16, J16     XLA's sequence and jflux, of bfloat16
    S8           lax.all_gather of 8 bits and a product, or a product and lax.psum_scatter of
                 bfloat16; one scale for each operand. `S8 captured`: with XLA's collectives in CUDA
                 graphs. `S8 pattern`: operands that are scaled before the product, which XLA
                 matches and multiplies as 8 bits
    S8q, S8row   the same from an x of bfloat16, quantised by one scale over all ranks, and by row
    G8           XLA's product of S8 alone; `G8 pattern` that of `S8 pattern`
    C8           lax's collective of S8 alone, `C8 jflux` jflux's
    J8 FORM      jflux of operands with scales by tensor, row or block; `J8 int8` of int8 by row,
                 `S8 int8` XLA's sequence of the same, `G8 int8` its product
    J8q FORM     jflux.quantize of an x of bfloat16, and J8
    T FORM       PyTorch's fused op with these scales (fused_all_gather_scaled_matmul,
                 fused_scaled_matmul_reduce_scatter), called from Python, one process for each GPU
    P FORM       PyTorch's scaled product alone: cuBLASLt's, or CUTLASS's by row

The floor F is max(G8, C8): the fastest product alone (G8 or P by tensor or row), and the fastest
collective alone. `read` is the time in which a copy reads a rank's weights. `ran` says which path
each J8 took (jflux.explain), and "lax" where none did. Results of the very programs that are timed
are compared with the float32 product of the operands dequantised; one that is wrong, or does not
run, is left out and named.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

import jflux
from jflux._tools import trials

from . import command, peers, rates
from .products import OF_RANKS
from .scaled_calls import FORMS, MATMUL, Data, contestants
from .shapes import AG, RS, Shape, of_row

#: Those that PyTorch's fused ops take, and its product.
OF_TORCH = {"T": ("tensor", "row"), "P": ("tensor", "row", "block")}

#: In units of bfloat16's rounding of |y| + 1, where y is of order 1. Tensor cores sum 8-bit floats
#: with 13 bits of mantissa; a scale of another row or block is off by more.
LIMIT = 16

# GPT-3's (the Flux paper's) and Llama-2 70B's MLP, up and down. The most telling rows come first.
WIDTHS = ((49152, 12288), (28672, 8192))


def _of_rows(rows: Sequence[int]) -> list[Shape]:
    both = [(Shape(AG, m, n, k), Shape(RS, m, k, n)) for n, k in WIDTHS for m in rows]
    return [shape for pair in both for shape in pair]


LISTS: dict[str, list[Shape]] = {
    "quick": [
        Shape(AG, 8192, 49152, 12288), Shape(RS, 2048, 8192, 28672), Shape(AG, 64, 28672, 8192),
    ],
    "large": _of_rows((8192, 2048, 4096)),
    "small": _of_rows((64, 16, 128)),
}  # fmt: skip


def on_ranks(shapes: Sequence[Shape], ranks: int) -> list[Shape]:
    """On one rank, the products that one of four multiplies."""
    if ranks > 1:
        return list(shapes)
    alone = (_part(shape, OF_RANKS) for shape in shapes)
    return list(dict.fromkeys(alone))


def _part(shape: Shape, ranks: int) -> Shape:
    """The product of one rank."""
    if shape.op == AG:
        return Shape(MATMUL, shape.m, shape.n // ranks, shape.k)
    return Shape(MATMUL, shape.m, shape.n, shape.k // (ranks if shape.op == RS else 1))


def path_of(op: str, f: Callable[..., Any], mesh: Mesh, specs: Any, *args: Any) -> str:
    """Which path a call of the op takes."""
    in_specs, out_specs = specs
    mapped = jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    calls = [c for c in jflux.explain(jax.jit(mapped), *args) if c.op == op]
    return str(calls[0].plan.path) if calls else "lax"


# ---- Rows ----------------------------------------------------------------------------------------


def measure(
    shape: Shape,
    mesh: Mesh,
    rounds: int,
    without: Sequence[str] = (),
    others: Sequence[peers.Torch] = (),
) -> command.Row:
    """One row. `without`: contestants that begin so are left out."""
    ranks, data = mesh.devices.size, Data(shape, mesh)
    iterations = trials.iterations_for(0.03, shape.flops(ranks) / 2)
    runs: dict[str, Callable[[], None]] = {}
    paths, errors = {}, {}
    results: dict[str, dict[str, Any]] = {form: {} for form in FORMS}

    def is_wanted(name: str) -> bool:
        return not name.startswith(tuple(without))

    for name, one in contestants(shape.op, ranks).items():
        if not is_wanted(name) or (one.options and jax.default_backend() == "cpu"):
            continue
        x, w, *in_specs, y_spec = data.of(one)
        try:
            program = trials.compiled(
                trials.loop(one.f, iterations), mesh, tuple(in_specs), y_spec, x, w,
                options=one.options,
            )  # fmt: skip
            y = jax.block_until_ready(program(x, w))
        except (jax.errors.JaxRuntimeError, NotImplementedError) as e:
            print(f"{shape}, {name}: not available, {str(e).splitlines()[0]}", file=sys.stderr)
            continue
        runs[name] = trials.run_of(program, x, w)
        if one.form in FORMS:
            results[one.form][name] = y
        if name.startswith("J8"):
            paths[name] = path_of(shape.op, one.f, mesh, (tuple(in_specs), y_spec), x, w)
    for form, found in results.items():
        want = data.wanted(form) if found else None
        for name in list(found):
            errors[name] = data.error(found.pop(name), want)
            if not errors[name] <= LIMIT:
                print(f"{shape}, {name}: WRONG, an error of {errors[name]:.3g}", file=sys.stderr)
                del runs[name]
    for peer in others:
        for name, wish in of_torch(shape, ranks).items():
            try:
                if is_wanted(name):
                    runs[name] = peer.runs(wish, iterations)
            except peers.Unavailable as e:
                print(f"{shape}, {name}: not available, {e}", file=sys.stderr)
    row = dataclasses.asdict(shape) | {
        "paths": paths, "errors": errors, "flops": shape.flops(ranks),
        "read": rates.read_seconds(shape.n * shape.k / ranks),
    }  # fmt: skip
    for name, timing in trials.interleave(runs, iterations, rounds).items():
        check_rate(shape, ranks, name, timing.median)
        row[name] = dataclasses.asdict(timing)
    return row


def of_torch(shape: Shape, ranks: int) -> dict[str, dict[str, Any]]:
    """By name, what its workers are told (bench/peer_torch.py)."""
    names = ("P",) if ranks == 1 else ("T", "P")
    return {
        f"{name} {form}": dataclasses.asdict(_part(shape, ranks) if name == "P" else shape)
        | {"scales": form, "name": f"{name} {form}"}
        for name in names
        for form in OF_TORCH[name]
    }


def check_rate(shape: Shape, ranks: int, name: str, seconds: float) -> None:
    """Raises if a figure says that the chip, or its links, did more than they can."""
    flops = 0 if name.startswith("C8") else shape.flops(ranks)
    links = 0.0 if ranks == 1 or name[0] in "GP" else rates.least_link_bytes(shape, ranks)
    if not name.endswith("16"):  # twice the operations, and half of the bytes that are gathered
        flops, links = flops / 2, links / (2 if shape.op == AG else 1)
    rates.check(f"{shape}, {name}", seconds, flops=flops, link_bytes=links)


TIMED = (
    "S16", "J16", "S8", "S8q", "S8row", "G8", "C8", "J8 tensor", "J8 row", "J8 block", "J8q row",
    "J8q block", *(f"{name} {form}" for name, forms in OF_TORCH.items() for form in forms),
    "S8 int8", "G8 int8", "J8 int8",
)  # fmt: skip
#: Other forms of a column: the fastest counts.
SAME = {
    "S8": ("S8", "S8 captured", "S8 pattern"),
    "G8": ("G8", "G8 pattern"),
    "C8": ("C8", "C8 jflux"),
}
#: What of the columns, F and `read` is divided by what.
RATIOS = (
    *((f"J8 {form}", "F") for form in ("tensor", "row", "block")),
    ("J8 block", "P block"), ("J8 tensor", "read"), ("J8 tensor", "S8"), ("J8q row", "S8row"),
    ("J8 tensor", "T tensor"), ("J8 row", "T row"), ("J8q row", "J8 row"),
    ("J8q block", "J8 block"), ("J16", "J8 tensor"), ("J8 int8", "S8 int8"),
    ("J8 int8", "G8 int8"),
)  # fmt: skip
COLUMNS = (
    "op", "m", "n", "k", *(f"{name} us" for name in (*TIMED, "F", "read")),
    *(f"{a} / {b}" for a, b in RATIOS), "J8 TF/s", "ran", "error",
)  # fmt: skip


def seconds_of(row: command.Row, name: str) -> float | None:
    """That of the fastest form, if one was timed."""
    found = [row[one]["median"] for one in SAME.get(name, (name,)) if one in row]
    return min(found, default=None)


def floor(row: command.Row) -> float | None:
    """The longer one of the fastest product alone and the fastest collective alone."""
    products = [seconds_of(row, name) for name in ("G8", "P tensor", "P row")]
    found = [min((s for s in products if s), default=None), seconds_of(row, "C8")]
    return max((s for s in found if s), default=None)


def cells(row: command.Row) -> list[str]:
    """One row of the table under COLUMNS."""
    seconds = {name: seconds_of(row, name) for name in TIMED}
    seconds |= {"F": floor(row), "read": row.get("read")}

    def over(name: str, base: str) -> str:
        a, b = seconds[name], seconds[base]
        return f"{a / b:.3f}" if a and b else ""

    ours = [name for name in seconds if name.startswith("J8 ") and seconds[name]]
    fastest = min((seconds[name] or 0 for name in ours), default=None)
    ran = ", ".join(f"{name.removeprefix('J')} {path}" for name, path in row["paths"].items())
    error = max((e for name, e in row["errors"].items() if name.startswith("J8")), default=0)
    return [
        *(str(row[field]) for field in ("op", "m", "n", "k")),
        *(f"{one * 1e6:.1f}" if one else "" for one in seconds.values()),
        *(over(*pair) for pair in RATIOS),
        f"{row['flops'] / fastest / 1e12:.0f}" if fastest else "", ran, f"{error:.1f}",
    ]  # fmt: skip


def of_columns(row: command.Row, wanted: Sequence[str] = COLUMNS) -> dict[str, str]:
    """Those of the columns that the row has."""
    found = zip(COLUMNS, cells(row), strict=True)
    return {name: cell for name, cell in found if cell and name in wanted}


TABLE = command.Table(
    "scaled", of_row, lambda row: " | ".join(of_columns(row)),
    command.joined(lambda row: [*of_columns(row).values()]),
)  # fmt: skip
#: What a run ends with.
SHORT = ("op", "m", "n", "k", "F us", *(f"{a} / {b}" for a, b in RATIOS), "J8 TF/s", "ran", "error")


def main() -> int:
    options = command.parser(__doc__)
    add = options.add_argument
    add("--lists", default="large,small", help=f"which shapes: {', '.join(LISTS)}")
    add("--peers", default="", help="torch")
    add("--without", default="", help="contestants that begin so are left out, comma-separated")
    add("--int8", action="store_true", help="int8 too")
    add("--quick", action="store_true", help="the list quick, fewer rounds, at most 50 seconds")
    add("--unchecked", action="store_true", help="kernels that have not been checked on GPUs too")
    args = options.parse_args()
    without = [name for name in args.without.split(",") if name]
    if args.quick:
        args.lists, args.rounds, args.limit = "quick", 4, min(args.limit, 50)
        without += ["S8 captured", "S8 pattern", "G8 pattern", "S16", "S8q"]
    if not args.int8:
        without += [name for name in contestants(AG, 2) if name.endswith("int8")]
    jflux.config.update(unchecked_kernels=args.unchecked)
    mesh = Mesh(np.array(jax.devices()[: args.ranks]), ("tp",))
    others = peers.start(filter(None, args.peers.split(",")), {"torch": peers.Torch}, mesh)

    def row_of(shape: Shape) -> command.Row:
        jflux.shutdown()  # a heap without what the last row's programs took
        jflux.init(heap_bytes=8 << 30)
        return measure(shape, mesh, args.rounds, without, others)

    wanted = {
        shape: functools.partial(row_of, shape)
        for name in args.lists.split(",")
        for shape in on_ranks(LISTS[name], args.ranks)
    }
    rows = TABLE.measure(args, wanted)
    for peer in others:
        peer.close()
    print()
    for row in rows:
        print(", ".join(f"{name} {cell}" for name, cell in of_columns(row, SHORT).items()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
