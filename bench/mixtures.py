"""What the benchmarks of mixtures share: their cases, and the comparison of one kernel with the two
steps that it does, of mixtures whose experts' hidden units are split over ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jflux
from jflux import moe
from jflux._tools import trials

from . import command


@dataclasses.dataclass(frozen=True)
class Case:
    """A layer: `tokens` of each rank (dispatch) or of all (layer), experts of `hidden` units."""

    name: str
    tokens: int
    width: int
    experts: int
    k: int
    hidden: int = 0


def random_choices(case: Case, tokens: int) -> jax.Array:
    """[tokens, k], experts that are all different."""
    rng = np.random.default_rng(5)
    return jnp.asarray(rng.random((tokens, case.experts)).argsort(1)[:, : case.k], jnp.int32)


#: Mixtures whose hidden units are split.
LISTS: dict[str, list[Case]] = {
    "mixtral": [
        Case(f"Mixtral, {tokens} tokens", tokens, 4096, 8, 2, 14336)
        for tokens in (1024, 8192, 16384)
    ],
    "qwen3": [
        Case("Qwen3-30B-A3B, 8192 tokens", 8192, 2048, 128, 8, 768),
        Case("Qwen3-235B-A22B, 8192 tokens", 8192, 4096, 128, 8, 1536),
    ],
}  # fmt: skip

NAMES = ("J", "two", "G", "C")
HEADING = "case | J ms | two ms | G ms | C ms | two / J | F / J | J TF/s | error"


def measure(
    case: Case,
    mesh: Mesh,
    rounds: int,
    op: str,
    steps_of: Callable[[moe.Routing], dict[str, Callable[..., jax.Array]]],
    args: Sequence[jax.Array],
    specs: Sequence[P],
    outs: dict[str, P],
    error_of: Callable[[np.ndarray, jax.Array, jax.Array], float],
) -> command.Row:
    """One row of the table: the steps that `outs` names, of `args`. J must run the kernel of `op`,
    and error_of(experts chosen, J's values, those of "two") be small."""
    chosen = random_choices(case, case.tokens)
    routing = jax.jit(moe.route, static_argnums=1)(chosen, case.experts)
    # The same on all ranks: a constant of the programs would be folded into them.
    args = (*args, jax.device_put(routing, NamedSharding(mesh, P())))
    specs = (*specs, P())
    iterations = 4 * trials.CALLS_IN_A_BODY + 1
    programs: dict[str, Any] = {}
    values: dict[str, Any] = {}
    for name, out in outs.items():

        def once(*args: Any, name: str = name) -> Any:
            return steps_of(args[-1])[name](*args[:-1])

        def chain(x: Any, *rest: Any, once: Any = once) -> Any:
            # Each call's x takes an element of the last one's result.
            def some(count: int, x: Any, y: Any) -> Any:
                for _ in range(count):
                    x = lax.dynamic_update_slice(x, y[:1, :1], (0, 0))
                    y = once(x, *rest)
                return x, y

            carry = x, once(x, *rest)
            body = trials.CALLS_IN_A_BODY
            return lax.fori_loop(0, iterations // body, lambda _, c: some(body, *c), carry)[1]

        in_one = name in ("J", "J8")
        with jflux.config(always=in_one):
            program = trials.compiled(chain, mesh, specs, out, *args)
            if name in ("J", "two"):
                values[name] = trials.compiled(once, mesh, specs, out, *args)(*args)
        if in_one and f'custom_call_target="jflux_{op}"' not in program.as_text():
            raise RuntimeError(f"{case.name}: no kernel takes the call")
        programs[name] = trials.run_of(program, *args)
    error = error_of(np.asarray(chosen), values["J"], values["two"])
    if not error <= 3:
        raise RuntimeError(f"{case.name}: an error of {error:.3g} roundings")
    del values
    timings = trials.interleave(programs, iterations, rounds)
    return {"case": dataclasses.asdict(case), "error": error} | {
        name: dataclasses.asdict(timing) for name, timing in timings.items()
    }


def times(row: command.Row, names: Sequence[str]) -> list[str]:
    """Milliseconds; "" of what a row lacks."""
    return [f"{row[name]['median'] * 1e3:.3f}" if name in row else "" for name in names]


def cells(row: command.Row, ranks: int, products: int) -> list[str]:
    """`products`: of a row of a token, with hidden units."""
    ms = {name: row[name]["median"] * 1e3 for name in NAMES if name in row}
    case = Case(**row["case"])
    flops = 2.0 * products * case.tokens * case.k * case.width * case.hidden / ranks
    return [
        case.name, *times(row, NAMES),
        f"{ms['two'] / ms['J']:.2f}", f"{max(ms['G'], ms.get('C', 0)) / ms['J']:.2f}",
        f"{flops / ms['J'] / 1e9:.0f}", f"{row['error']:.2f}",
    ]  # fmt: skip


def main(
    doc: str | None,
    kind: str,
    measure: Callable[[Case, int, int], command.Row],
    cells: Callable[[command.Row, int], list[str]],
    heading: str = HEADING,
) -> int:
    args = command.parse(doc, lists=",".join(LISTS))
    jflux.init(heap_bytes=4 << 30)
    jflux.config.update(strict=True)
    table = command.Table(
        kind, lambda row: Case(**row["case"]), lambda _: heading,
        command.joined(lambda row: cells(row, args.ranks)),
    )  # fmt: skip
    table.measure_cases(args, LISTS, measure)
    return 0
