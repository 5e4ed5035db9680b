"""Times what moves a mixture's tokens between GPUs, and whole layers; the table comes last.

python -m bench.experts --ranks 2 --out bench/results/2xh100_experts.json [--lists dispatch,layer]

The list "dispatch": T tokens of each rank, to their experts' ranks and back. Microseconds:

    D       jflux.moe_dispatch, with partial sums, and rest="undefined" as layers call it
    D+C     the same, and jflux.moe_combine
    each    the same, with each of a token's k rows coming back by itself
    S       the same pair in plain lax
    gather  jflux.all_gather and jflux.reduce_scatter of all tokens: what a layer does otherwise
    bound   the bytes that must move, at LINK bytes a second, there and back

The list "wire": D+C as above, and with the combine's sums in 8 bits, at any size:

    float8_e4m3fn, int8

The list "layer": a layer of T tokens over all ranks, forward and backward. Milliseconds:

    TP, EP  jflux.nn.mixture: the experts' hidden units split, or the experts, tokens gathered
    disp.   EP, with tokens dispatched
    prod.   EP by jflux.dispatch_grouped_matmul and jflux.grouped_matmul_combine
    S       the faster one of TP and EP in plain lax, with jax.lax.ragged_dot

The list "capacity": a layer's forward pass, and forward and backward, in milliseconds:

    EP, disp.   as above
    einsum      GShard's form in plain JAX (bench/capacity.py): each rank gives each expert 1.25
                times its even share of slots, `lax.all_to_all` takes them to the experts' ranks,
                and the products are batched einsums. It drops what is beyond an expert's slots,
                `dropped` of all choices; jflux drops nothing

Values are compared before anything is timed: a pair gives each token back (in 8 bits nearly), and
all layers give what the plain one gives, if there is memory for it. Of "einsum" tokens are compared
that have all slots.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jflux
import jflux.nn
from jflux._ops._wire import WIRES
from jflux._tools import trials

from . import capacity, command
from .collectives import CAPTURED
from .mixtures import Case, random_choices

LINK = 360e9  # bytes a second and direction, what the links carry alone (docs/experiments/0003)


LISTS: dict[str, list[Case]] = {
    "dispatch": [
        Case(f"DeepSeek-V3, {tokens} tokens", tokens, 7168, 256, 8)
        for tokens in (32, 128, 1024, 4096)
    ],
    "wire": [
        Case(f"DeepSeek-V3 with a wire, {tokens} tokens", tokens, 7168, 256, 8)
        for tokens in (128, 1024, 4096)
    ],
    "layer": [
        Case("Mixtral", 8192, 4096, 8, 2, 14336),
        Case("Qwen3-30B-A3B", 8192, 2048, 128, 8, 768),
    ],
    "capacity": [
        Case("Qwen3-30B-A3B, 32768 tokens", 32768, 2048, 128, 8, 768),
        Case("Mixtral, 8192 tokens", 8192, 4096, 8, 2, 14336),
        Case("64 experts of 7168 x 2048, 8192 tokens", 8192, 7168, 64, 8, 2048),
        Case("Qwen3-30B-A3B, 8192 tokens", 8192, 2048, 128, 8, 768),
        *(
            Case(f"{name}, {tokens} tokens", tokens, *sizes)
            for name, sizes, all_tokens in (
                ("Mixtral", (4096, 8, 2, 14336), (512, 2048, 32768)),
                ("gpt-oss-20b", (2880, 32, 4, 2880), (512, 4096, 65536)),
                ("OLMoE", (2048, 64, 8, 1024), (512, 4096, 65536)),
                ("Qwen3-30B-A3B", (2048, 128, 8, 768), (512, 2048, 65536)),
                ("256 experts of 7168 x 2048", (7168, 256, 8, 2048), (512, 8192)),
                ("256 experts of 2048 x 512", (2048, 256, 8, 512), (8192, 65536)),
            )
            for tokens in all_tokens
        ),
    ],
}  # fmt: skip


def _timed(
    programs: dict[str, tuple[Any, tuple[Any, ...]]], iterations: int, rounds: int
) -> dict[str, Any]:
    runs = {name: trials.run_of(program, *args) for name, (program, args) in programs.items()}
    timings = trials.interleave(runs, iterations, rounds)
    return {name: dataclasses.asdict(timing) for name, timing in timings.items()}


# ---- There and back ------------------------------------------------------------------------------


def pair(
    case: Case, indices: jax.Array, x: jax.Array, sums: bool = True, wire: str | None = None
) -> jax.Array:
    """Of one rank: the mean of a token's k copies, which is the token."""
    weights = jnp.full(indices.shape, 1 / case.k, jnp.float32)
    d = jflux.moe_dispatch(
        x, indices, weights, num_experts=case.experts, axis_name="ep", partial_sums=sums,
        rest="undefined",
    )  # fmt: skip
    return jflux.moe_combine(d.rows, d.handle, weights=weights, axis_name="ep", wire=wire)


def there(case: Case, indices: jax.Array, x: jax.Array) -> jax.Array:
    """Of one rank: as many of its experts' rows as it has tokens, which even choices fill."""
    weights = jnp.full(indices.shape, 1 / case.k, jnp.float32)
    d = jflux.moe_dispatch(
        x, indices, weights, num_experts=case.experts, axis_name="ep", partial_sums=True,
        rest="undefined",
    )  # fmt: skip
    return d.rows[: x.shape[0]]


def gathered(x: jax.Array) -> jax.Array:
    everything = jflux.all_gather(x, axis_name="ep", tiled=True)
    return jflux.reduce_scatter(everything, axis_name="ep", tiled=True) / lax.axis_size("ep")


def measure_dispatch(case: Case, ranks: int, rounds: int) -> dict[str, Any]:
    """One row of "dispatch"."""
    steps: dict[str, Callable[..., jax.Array]] = {
        "D": functools.partial(there, case),
        "D+C": functools.partial(pair, case),
        "each": functools.partial(pair, case, sums=False),
        "S": functools.partial(pair, case),
        "gather": lambda indices, x: gathered(x),
    }
    return measure_steps(case, ranks, rounds, steps) | {"list": "dispatch"}


def measure_wire(case: Case, ranks: int, rounds: int) -> dict[str, Any]:
    """One row of "wire"."""
    steps = {wire or "D+C": functools.partial(pair, case, wire=wire) for wire in (None, *WIRES)}
    with jflux.config(always=True):
        return measure_steps(case, ranks, rounds, steps) | {"list": "wire"}


def measure_steps(
    case: Case, ranks: int, rounds: int, steps: dict[str, Callable[..., jax.Array]]
) -> dict[str, Any]:
    """Times of steps of (a rank's indices, x)."""
    mesh = Mesh(np.array(jax.devices()[:ranks]), ("ep",))
    everyones = random_choices(case, ranks * case.tokens)
    x = trials.normal(mesh, P("ep"), (ranks * case.tokens, case.width), jnp.bfloat16, seed=1)
    indices = jax.device_put(everyones, jax.sharding.NamedSharding(mesh, P("ep")))
    specs = (P("ep"), P("ep"))
    for name in {"D+C", *WIRES} & {*steps}:
        once = trials.compiled(steps[name], mesh, specs, P("ep"), indices, x)
        error = float(jnp.abs(once(indices, x).astype(jnp.float32) - x.astype(jnp.float32)).max())
        if not error <= 2.0 ** (-3 if name in WIRES else -7) * float(jnp.abs(x).max()):
            raise RuntimeError(f"{case.name}: tokens come back {error:.3g} off by {name}")
    iterations = 16
    programs = {}
    for name, step in steps.items():

        def chain(indices: Any, x: Any, step: Callable[..., Any] = step) -> Any:
            def some(_: Any, x: Any) -> Any:
                for _ in range(trials.CALLS_IN_A_BODY):
                    # No token is so large, but XLA cannot know: else it would route once for all.
                    x = step(indices + (x[0, 0] > 1e30).astype(jnp.int32), x)
                return x

            return lax.fori_loop(0, iterations // trials.CALLS_IN_A_BODY, some, x)

        with jflux.config(fused=False, strict=False) if name == "S" else contextlib.nullcontext():
            program = trials.compiled(chain, mesh, specs, P("ep"), indices, x, options=CAPTURED)
        programs[name] = (program, (indices, x))
    experts_of_a_rank = case.experts // ranks
    homes = np.asarray(everyones).reshape(ranks, case.tokens, case.k) // experts_of_a_rank
    leaves = max(
        sum(len(set(slots) - {rank}) for slots in homes[rank].tolist()) for rank in range(ranks)
    )
    bound = 2 * leaves * case.width * 2 / LINK
    timed = _timed(programs, iterations, rounds)
    return {"case": dataclasses.asdict(case), "bound": bound} | timed


# ---- Layers --------------------------------------------------------------------------------------

Layer = Callable[..., jax.Array]  # of (case, x, router, up, down, gate)


def products(case: Case, x: Any, router: Any, up: Any, down: Any, gate: Any) -> jax.Array:
    """A mixture with the experts' products as ops of expert parallelism."""
    logits = x.astype(jnp.float32) @ router.astype(jnp.float32)
    indices, weights = jflux.moe.top_k_softmax(logits, case.k)
    h, handle = jflux.dispatch_grouped_matmul(
        x, (gate, up), indices, num_experts=case.experts, axis_name="x", activation="silu",
        gated=True,
    )  # fmt: skip
    return jflux.grouped_matmul_combine(h, down, handle, weights, axis_name="x")


def mixture(**options: Any) -> Layer:
    """jflux's layer."""

    def forward(case: Case, x: Any, router: Any, up: Any, down: Any, gate: Any) -> jax.Array:
        return jflux.nn.mixture(x, router, up, down, gate, k=case.k, **options).y

    return forward


#: How weights [E, ...] are split, and what computes.
WAYS: dict[str, tuple[P, P, Layer]] = {
    "TP": (P(None, None, "x"), P(None, "x"), mixture(axis_name="x")),
    "EP": (P("x"), P("x"), mixture(expert_axis="x")),
    "disp.": (P("x"), P("x"), mixture(expert_axis="x", exchange="dispatch")),
    "fused": (P("x"), P("x"), mixture(expert_axis="x", exchange="fused")),
    "prod.": (P("x"), P("x"), products),
    "einsum": (P("x"), P("x"), capacity.einsum),
}
OURS = ("TP", "EP", "disp.", "prod.")


def layer(case: Case, way: Layer) -> Callable[..., Any]:
    """Forward and backward, of one rank."""

    def run(
        x: jax.Array, router: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array
    ) -> Any:
        def forward(x: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
            return way(case, x, router, up, down, gate)

        y, pull = jax.vjp(forward, x, gate, up, down)
        dx, *rest = pull(y)
        # Too little to be seen: a rank's part of a weight is another one in each way.
        return (dx + 1e-20 * sum(d[0, 0, 0] for d in rest)).astype(x.dtype)

    return run


def operands(case: Case, mesh: Mesh, name: str) -> tuple[tuple[P, ...], tuple[jax.Array, ...]]:
    """Specs and arrays of x, router, gate, up and down, as a way of WAYS has them."""
    spec, down_spec, _ = WAYS[name]
    specs = (P("x"), P(), spec, spec, down_spec)
    shapes = (
        (case.tokens, case.width), (case.width, case.experts),
        (case.experts, case.width, case.hidden), (case.experts, case.width, case.hidden),
        (case.experts, case.hidden, case.width),
    )  # fmt: skip
    scales = (1.0, case.width**-0.5, case.width**-0.5, case.width**-0.5, case.hidden**-0.5)
    return specs, tuple(
        trials.normal(mesh, spec, shape, jnp.bfloat16, seed=i, scale=scale)
        for i, (spec, shape, scale) in enumerate(zip(specs, shapes, scales, strict=True))
    )


def measure_capacity(case: Case, ranks: int, rounds: int) -> dict[str, Any]:
    """One row of "capacity". The host is ahead of the GPUs, which run one program after another."""
    mesh = Mesh(np.array(jax.devices()[:ranks]), ("x",))
    specs, args = operands(case, mesh, "EP")
    split = specs[0]
    has_slot = trials.compiled(
        functools.partial(capacity.kept, case), mesh, specs[:2], split, *args[:2]
    )(*args[:2])
    whole = np.asarray(has_slot.all(1))
    runs, values = {}, {}
    for name in ("EP", "disp.", "einsum"):
        way = WAYS[name][2]

        def forward(x: Any, router: Any, gate: Any, up: Any, down: Any, way: Any = way) -> Any:
            return way(case, x, router, up, down, gate)

        for column, f in {name: forward, f"{name} f+b": layer(case, way)}.items():
            program = trials.compiled(f, mesh, specs, split, *args)
            values[column] = np.asarray(program(*args), np.float32)[whole]
            runs[column] = _repeated(program, args)
    worst = {}
    for name, y in values.items():
        wanted = values["EP f+b" if "f+b" in name else "EP"]
        # Of nearly all tokens: one on the edge of two experts may choose the other one, and moves
        # those behind it to other slots.
        off = np.quantile(np.abs(y - wanted).max(1), 0.999)
        worst[name] = float(off / np.abs(wanted).max())
    if not max(worst.values()) <= 0.05:
        raise RuntimeError(f"{case.name}: the forms differ by {worst} of the largest value")
    timings = trials.interleave(runs, REPEATED, rounds)
    row = {"case": dataclasses.asdict(case), "list": "capacity", "error": max(worst.values())}
    row["dropped"] = float(1 - has_slot.mean())
    return row | {name: dataclasses.asdict(timing) for name, timing in timings.items()}


REPEATED = 6


def _repeated(program: Any, args: tuple[jax.Array, ...]) -> Callable[[], None]:
    def run() -> None:
        for _ in range(REPEATED):
            y = program(*args)
        jax.block_until_ready(y)

    return run


def measure_layer(case: Case, ranks: int, rounds: int) -> dict[str, Any]:
    """One row of "layer"."""
    mesh = Mesh(np.array(jax.devices()[:ranks]), ("x",))
    programs: dict[str, dict[str, tuple[Any, tuple[Any, ...]]]] = {"fast": {}, "slow": {}}
    values: dict[str, np.ndarray] = {}
    for name in OURS:
        specs, args = operands(case, mesh, name)
        f = layer(case, WAYS[name][2])
        for form, iterations in (("fast", 6), ("slow", 1)):
            if form == "slow" and name in ("disp.", "prod."):
                continue

            def chain(x: Any, *weights: Any, f: Any = f, iterations: int = iterations) -> Any:
                for _ in range(iterations):
                    x = f(x, *weights)
                return x

            plain = form == "slow"
            with jflux.config(fused=False, strict=False) if plain else contextlib.nullcontext():
                once = trials.compiled(f, mesh, specs, P("x"), *args)
                program = trials.compiled(chain, mesh, specs, P("x"), *args)
            try:
                values[f"{form} {name}"] = np.asarray(once(*args), np.float32)
            except jax.errors.JaxRuntimeError as error:
                if not plain or "RESOURCE_EXHAUSTED" not in str(error):
                    raise
                continue  # its column is empty
            programs[form][f"S {name}" if plain else name] = (program, args)
    wanted = values.get("slow TP", values["fast TP"])
    largest = np.abs(wanted).max()
    error = max(float(np.abs(y - wanted).max() / largest) for y in values.values())
    if not error <= 0.05:  # a token on the edge of two experts may choose the other one
        raise RuntimeError(f"{case.name}: the forms differ by {error:.3g} of the largest value")
    timings = _timed(programs["fast"], 6, rounds)
    if programs["slow"]:
        timings |= _timed(programs["slow"], 1, min(3, rounds))
    return {"case": dataclasses.asdict(case), "list": "layer", "error": error} | timings


MEASURES = {
    "dispatch": measure_dispatch, "wire": measure_wire, "layer": measure_layer,
    "capacity": measure_capacity,
}  # fmt: skip

# ---- The table -----------------------------------------------------------------------------------

HEADINGS = {
    "dispatch": "case | D us | D+C us | each us | S us | gather us | bound us | bound / D+C",
    "wire": "case | D+C us | float8_e4m3fn us | int8 us",
    "layer": "case | TP ms | EP ms | disp. ms | prod. ms | S TP ms | S EP ms | S / J | difference",
    "capacity": "case | EP ms | disp. ms | einsum ms | einsum / J | EP f+b ms | disp. f+b ms "
    "| einsum f+b ms | einsum / J f+b | dropped | difference",
}


def cells(row: dict[str, Any]) -> list[str]:
    name = row["case"]["name"]
    if row["list"] == "dispatch":
        us = [row[c]["median"] * 1e6 for c in ("D", "D+C", "each", "S", "gather")]
        bound = row["bound"] * 1e6
        return [name, *(f"{t:.1f}" for t in us), f"{bound:.1f}", f"{bound / us[1]:.2f}"]
    if row["list"] == "wire":
        return [name, *(f"{row[c]['median'] * 1e6:.1f}" for c in ("D+C", *WIRES))]
    if row["list"] == "capacity":
        times = []
        for both in ("", " f+b"):
            ep, dispatched, other = (
                row[c + both]["median"] * 1e3 for c in ("EP", "disp.", "einsum")
            )
            times += [f"{t:.2f}" for t in (ep, dispatched, other, other / min(ep, dispatched))]
        return [name, *times, f"{100 * row['dropped']:.2f} %", f"{row['error']:.4f}"]
    ms = {c: row[c]["median"] * 1e3 for c in (*OURS, "S TP", "S EP") if c in row}
    plain = [t for c, t in ms.items() if c.startswith("S")]
    ours = [ms[c] for c in OURS if c in ms]
    ratio = f"{min(plain) / min(ours):.1f}" if plain else ""
    times = [f"{ms[c]:.2f}" if c in ms else "" for c in OURS]
    times += [f"{ms[c]:.2f}" if c in ms else "no memory" for c in ("S TP", "S EP")]
    return [name, *times, ratio, f"{row['error']:.4f}"]


TABLE = command.Table(
    "experts", lambda row: (row["list"], Case(**row["case"])), lambda row: HEADINGS[row["list"]],
    command.joined(cells), lambda row: ("prod.",) if row["list"] == "layer" else (),
)  # fmt: skip


def main() -> int:
    args = command.parse(__doc__, lists=",".join(LISTS))
    jflux.init(heap_bytes=8 << 30)
    jflux.config.update(strict=True)
    wanted = {
        (name, case): functools.partial(MEASURES[name], case, args.ranks, args.rounds)
        for name in args.lists.split(",")
        for case in LISTS[name]
    }
    TABLE.measure(args, wanted)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
