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
collective alone. `ran` says which path each J8 took (jflux.explain), and "lax" where none did.
Results of the very programs that are timed are compared with the float32 product of the operands
dequantised; one that is wrong, or does not run, is left out and named.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jflux
from jflux._ops._quantize import largest
from jflux._tools import trials
from jflux._tools.trials import Trial

from . import command, peers, rates
from .collectives import CAPTURED
from .products import OF_RANKS
from .shapes import AG, RS, Shape, of_row

E4M3 = jnp.float8_e4m3fn
MATMUL = "matmul"  # of one rank

#: Type, and what shares a scale of x [m, k] and of w [n, k].
FORMS: dict[str, tuple[Any, tuple[int, int], tuple[int, int]]] = {
    "tensor": (E4M3, (-1, -1), (-1, -1)),
    "row": (E4M3, (1, -1), (1, -1)),
    "block": (E4M3, (1, 128), (128, 128)),
    "int8": (jnp.int8, (1, -1), (1, -1)),
}
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


# ---- What a user could write ---------------------------------------------------------------------


def by_hand(x: jax.Array, dtype: Any, rows: bool) -> jflux.Scaled:
    """x [m, k], quantised by a scale for each row, or one over all ranks."""
    wide = x.astype(jnp.float32)
    most = jnp.max(jnp.abs(wide), 1, keepdims=True) if rows else lax.pmax(_most(wide), "tp")
    scale = most / largest(np.dtype(dtype))
    return jflux.Scaled((wide / scale).astype(dtype), scale)


def _most(x: jax.Array) -> jax.Array:
    return jnp.max(jnp.abs(x), keepdims=True)


def plain(x: jflux.Scaled, w: jflux.Scaled) -> jax.Array:
    """x [m, k], w [n, k]: a product of 8 bits by 8 bits, and its scales."""
    whole = x.dtype == jnp.int8
    y = lax.dot_general(
        x.values, w.values, (((1,), (1,)), ((), ())),
        preferred_element_type=jnp.int32 if whole else jnp.bfloat16,
    )  # fmt: skip
    return (y.astype(jnp.float32) * x.scale * w.scale.T).astype(jnp.bfloat16)


def pattern(x: jflux.Scaled, w: jflux.Scaled) -> jax.Array:
    """The same by scales of tensors, written as XLA matches it."""
    wide = [a.values.astype(jnp.bfloat16) * a.scale[0, 0].astype(jnp.bfloat16) for a in (x, w)]
    return lax.dot_general(*wide, (((1,), (1,)), ((), ())))


def gathered(x: Any) -> Any:
    """All ranks' rows, and their scales if each has one."""
    if not isinstance(x, jflux.Scaled):
        return lax.all_gather(x, "tp", tiled=True)
    return jflux.Scaled(gathered(x.values), x.scale if x.scale.shape[0] == 1 else gathered(x.scale))


def scattered(y: jax.Array) -> jax.Array:
    return lax.psum_scatter(y, "tp", scatter_dimension=0, tiled=True)


def sequence(op: str, product: Callable[..., Any]) -> Callable[..., Any]:
    """The product of (x, w) of one rank, and what travels before or after it."""
    if op == AG:
        return lambda x, w: product(gathered(x), w)
    return (lambda x, w: scattered(product(x, w))) if op == RS else product


# ---- Contestants ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Contestant:
    """A function of one rank's (x, w).

    Attributes:
      form: of the operands: one of FORMS, "16" ([k, n] weights), or "alone" or "sent".
      quantizes: x is bfloat16, and w of this form.
      options: of XLA.
    """

    f: Callable[[Any, Any], jax.Array]
    form: str
    quantizes: bool = False
    options: dict[str, Any] | None = None


def contestants(op: str, ranks: int) -> dict[str, Contestant]:
    """By name, in the table's order."""
    ours = jflux.matmul if op == MATMUL else Trial(Shape(op, 0, 0, 0).spec).function()
    ours = functools.partial(ours, transpose_rhs=True)
    found = {}
    if ranks > 1:
        trial = Trial(Shape(op, 0, 0, 0).spec)
        in_order = sequence(op, plain)
        found |= {
            "S16": Contestant(trial.function(reference=True), "16"),
            "J16": Contestant(trial.function(), "16"),
            "S8": Contestant(in_order, "tensor"),
            "S8 captured": Contestant(in_order, "tensor", options=CAPTURED),
            "S8 pattern": Contestant(sequence(op, pattern), "tensor"),
            "S8q": Contestant(lambda x, w: in_order(by_hand(x, E4M3, False), w), "tensor", True),
            "S8row": Contestant(lambda x, w: in_order(by_hand(x, E4M3, True), w), "row", True),
            "S8 int8": Contestant(in_order, "int8"),
            "C8": Contestant(lambda x, w: gathered(x) if op == AG else scattered(x), "sent"),
            "C8 jflux": Contestant(lambda x, w: _sent_by_jflux(op, x), "sent"),
        }
    else:
        found["S16"] = Contestant(lambda x, w: x @ w, "16")
    found |= {
        "G8": Contestant(plain, "alone"),
        "G8 pattern": Contestant(pattern, "alone"),
        "G8 int8": Contestant(plain, "int8 alone"),
    }
    for form, (dtype, block, _) in FORMS.items():
        found[f"J8 {form}"] = Contestant(ours, form)
        if form in ("row", "block"):
            quantize = functools.partial(jflux.quantize, dtype=dtype, block=block)
            found[f"J8q {form}"] = Contestant(
                lambda x, w, quantize=quantize: ours(quantize(x), w), form, True
            )
    return found


def _sent_by_jflux(op: str, x: jax.Array) -> jax.Array:
    if op == AG:
        return jflux.all_gather(x, axis_name="tp", tiled=True)
    return jflux.reduce_scatter(x, axis_name="tp", scatter_dimension=0, tiled=True)


class Data:
    """Operands of one shape over a mesh, each made when it is asked for first."""

    def __init__(self, shape: Shape, mesh: Mesh) -> None:
        self.shape, self.mesh, self.ranks = shape, mesh, mesh.devices.size
        if shape.op == MATMUL:
            self.x_spec = self.w_spec = self.y_spec = P(None, None)
        else:
            self.x_spec, self.w_spec, self.y_spec = Trial(shape.spec, transpose_rhs=True).partition
        wide = functools.partial(trials.normal, mesh, dtype=jnp.bfloat16)
        m, n, k = shape.m, shape.n, shape.k
        self.x = wide(self.x_spec, (m, k), seed=1)
        self.w = wide(self.w_spec, (n, k), seed=2, scale=float(k**-0.5))
        self._made: dict[str, tuple[Any, Any]] = {}

    def run(self, f: Callable[..., Any], in_specs: Any, out_specs: Any, *args: Any) -> Any:
        return trials.compiled(f, self.mesh, in_specs, out_specs, *args)(*args)

    def of(self, contestant: Contestant) -> tuple[Any, Any, Any, Any, P]:
        """(x, w, x's sharding, w's, y's)."""
        form, stacked = contestant.form, P("tp", None)
        if form not in self._made:
            self._made[form] = self._make(form)
        x, w = self._made[form]
        x_spec, w_spec, y_spec = self.x_spec, self.w_spec, self.y_spec
        if form == "16":
            w_spec = P(*w_spec[::-1])
        elif self.ranks > 1 and form.endswith(("alone", "sent")):
            y_spec = stacked
            x_spec = x_spec if form != "sent" and self.shape.op == RS else stacked
        if contestant.quantizes:
            x = self.x
        return x, w, x_spec, w_spec, y_spec

    def _make(self, form: str) -> tuple[Any, Any]:
        if form == "16":
            return self.x, jnp.swapaxes(self.w, 0, 1)
        if form == "sent":
            x, w = self.scaled("tensor")
            if self.shape.op == AG:  # as bytes: not every collective has types of 8-bit floats
                return lax.bitcast_convert_type(x.values, jnp.int8), w
            size = (self.ranks * self.shape.m, self.shape.n)
            return trials.normal(self.mesh, P("tp", None), size, jnp.bfloat16, seed=3), w
        if form.endswith("alone"):
            x, w = self.scaled(form.removesuffix("alone").strip() or "tensor")
            if self.shape.op == AG:
                x = self.run(gathered, self.x_spec, P("tp", None), x)
            return x, w
        return self.scaled(form)

    def scaled(self, form: str) -> tuple[jflux.Scaled, jflux.Scaled]:
        """Each rank's part, quantised by itself; by tensor all ranks' x have one scale. A scale
        that ranks do not share has an entry for each of them in the global array."""
        if form not in self._made:
            dtype, x_block, w_block = FORMS[form]
            one_scale = form == "tensor" and self.ranks > 1

            def quantized(x: jax.Array, w: jax.Array) -> tuple[Any, Any]:
                scale = by_hand(x, dtype, False).scale if one_scale else None
                return (
                    jflux.quantize(x, dtype, block=x_block, scale=scale),
                    jflux.quantize(w, dtype, block=w_block),
                )

            specs = self.x_spec, self.w_spec
            self._made[form] = self.run(quantized, specs, specs, self.x, self.w)
        return self._made[form]

    def wanted(self, form: str) -> jax.Array:
        """The float32 product of the operands dequantised."""

        def product(x: Any, w: Any) -> jax.Array:
            wide = [a.dequantize() for a in (x, w)]
            return lax.dot_general(*wide, (((1,), (1,)), ((), ())), precision="highest")

        x, w = self.scaled(form)
        f = sequence(self.shape.op, product)
        return self.run(f, (self.x_spec, self.w_spec), self.y_spec, x, w)

    def error(self, y: jax.Array, want: jax.Array) -> float:
        """The largest, in units of bfloat16's rounding of |y| + 1. Rows that a loop has changed do
        not count: the first of each rank's x."""
        step = self.shape.m // self.ranks

        def largest_error(y: jax.Array, want: jax.Array) -> jax.Array:
            found = jnp.abs(y.astype(jnp.float32) - want) / (2.0**-8 * (jnp.abs(want) + 1))
            changed = jnp.arange(y.shape[0]) % step == 0
            return jnp.max(jnp.where(changed[:, None], 0, found)).reshape(1)

        specs = (self.y_spec, self.y_spec)
        return float(np.max(self.run(largest_error, specs, P("tp"), y, want)))


def linked(x: Any, y: jax.Array) -> Any:
    """x, whose first value is y's, and whose scale comes after y: neither can be used earlier."""
    if not isinstance(x, jflux.Scaled):
        return trials.with_corner(x, y)
    first = x.scale[:1, :1] + 0 * y[:1, :1].astype(jnp.float32)
    return jflux.Scaled(trials.with_corner(x.values, y), trials.with_corner(x.scale, first))


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
                trials.loop(one.f, iterations, linked), mesh, tuple(in_specs), y_spec, x, w,
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
    row = dataclasses.asdict(shape) | {"paths": paths, "errors": errors}
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


FLOATS = ("tensor", "row", "block")
TIMED = (
    "S16", "J16", "S8", "S8q", "S8row", "G8", "C8", *(f"J8 {form}" for form in FLOATS),
    "J8q row", "J8q block", *(f"T {form}" for form in OF_TORCH["T"]),
    *(f"P {form}" for form in OF_TORCH["P"]), "S8 int8", "G8 int8", "J8 int8",
)  # fmt: skip
#: Other forms of a column: the fastest counts.
SAME = {
    "S8": ("S8", "S8 captured", "S8 pattern"),
    "G8": ("G8", "G8 pattern"),
    "C8": ("C8", "C8 jflux"),
}
RATIOS = ("tensor / F", "row / F", "block / F", "tensor / S8", "q row / S8row", "J16 / tensor")
COLUMNS = ("op", "m", "n", "k", *(f"{name} us" for name in TIMED), "F us", *RATIOS, "ran", "error")


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
    seconds = {name: seconds_of(row, name) for name in TIMED} | {"F": floor(row)}

    def over(name: str, base: str) -> str:
        a, b = seconds[name], seconds[base]
        return f"{a / b:.3f}" if a and b else ""

    ran = ", ".join(f"{name.removeprefix('J')} {path}" for name, path in row["paths"].items())
    return [
        *(str(row[field]) for field in ("op", "m", "n", "k")),
        *(f"{one * 1e6:.1f}" if one else "" for one in seconds.values()),
        *(over(f"J8 {form}", "F") for form in FLOATS),
        over("J8 tensor", "S8"), over("J8q row", "S8row"), over("J16", "J8 tensor"),
        ran, f"{max((e for n, e in row['errors'].items() if n[0] == 'J'), default=0):.1f}",
    ]  # fmt: skip


TABLE = command.Table("scaled", of_row, lambda _: " | ".join(COLUMNS), command.joined(cells))


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
    if args.quick:
        args.lists, args.rounds, args.limit = "quick", 4, min(args.limit, 50)
    without = [name for name in args.without.split(",") if name]
    if not args.int8:
        without += [name for name in contestants(AG, 2) if name.endswith("int8")]
    jflux.init(heap_bytes=8 << 30)
    jflux.config.update(unchecked_kernels=args.unchecked)
    mesh = Mesh(np.array(jax.devices()[: args.ranks]), ("tp",))
    others = peers.start(filter(None, args.peers.split(",")), {"torch": peers.Torch}, mesh)
    wanted = {
        shape: functools.partial(measure, shape, mesh, args.rounds, without, others)
        for name in args.lists.split(",")
        for shape in on_ranks(LISTS[name], args.ranks)
    }
    TABLE.measure(args, wanted)
    for peer in others:
        peer.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
