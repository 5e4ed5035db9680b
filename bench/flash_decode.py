"""Checks and times decoding over caches that are split over GPUs; the table comes last.

python -m bench.flash_decode --ranks 2 --out bench/results/2xh100_flash_decode.json [--lists latent]

A row is a cache, of so many sequences of so many positions each, which all count:

    bfloat16   64 heads of queries over 8 of keys and values, of 128 elements
    e4m3       the same in float8_e4m3fn, with a float32 scale for each position's head
    latent     16 or 128 heads of queries over one of keys of 576 elements, the first 512 of which
               are its values

Milliseconds:

    1, 2, 4, 8, 16   jflux.flash_decode of so many new tokens of each sequence; queries and results
                     are the same on all ranks
    part             one token, a rank's part alone: what 1 takes beyond it is the merge
    G                one token, all of it on one GPU, divided by the ranks: in bfloat16
                     jax.nn.dot_product_attention by cuDNN, else einsums and a float32 softmax, of a
                     cache that is dequantised in the program

`read` is the time in which a copy reads a rank's part of the cache, scales too (bench/rates.py), or
in which the tensor cores multiply it by one token's queries, if that is longer. A call's queries
are the last one's results, which take the place of a latent query's first 512 elements. Values are
compared to float64 before anything is timed, on sequences, heads and tokens drawn at random.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jflux
from jflux._tools import trials

from . import attention, command, rates
from .collectives import CAPTURED


@dataclasses.dataclass(frozen=True)
class Case:
    """`positions` of each sequence over all ranks; `cache` is bfloat16, e4m3 or latent."""

    name: str
    batch: int
    positions: int
    cache: str
    heads: int = 64

    @property
    def is_latent(self) -> bool:
        return self.cache == "latent"

    @property
    def groups(self) -> int:
        return 1 if self.is_latent else 8

    @property
    def widths(self) -> tuple[int, int]:
        """Elements of a key, and of a value."""
        return (576, 512) if self.is_latent else (128, 128)

    @property
    def scale(self) -> float:
        """Of the scores. A latent head stands for one of 192 elements."""
        return float((192 if self.is_latent else self.widths[0]) ** -0.5)

    @property
    def tokens(self) -> tuple[int, ...]:
        """How many new ones of a sequence are timed."""
        return TOKENS[:3] if self.is_latent else TOKENS

    @property
    def flops(self) -> float:
        """Of one token of each sequence, over all ranks."""
        return 2.0 * self.batch * self.heads * self.positions * sum(self.widths)


TOKENS = (1, 2, 4, 8, 16)
LISTS: dict[str, list[Case]] = {
    "caches": [
        Case(f"{batch} x {positions}, {cache}", batch, positions, cache)
        for batch, positions in ((64, 8192), (24, 8192), (8, 32768), (1, 131072))
        for cache in ("bfloat16", "e4m3")
    ],
    "latent": [
        Case(f"{batch} x {positions}, latent, {heads} heads", batch, positions, "latent", heads)
        for batch, positions, every in (
            (64, 8192, (16, 128)), (8, 32768, (16, 128)), (1, 131072, (128,))
        )
        for heads in every
    ],
}  # fmt: skip

SPLIT = P(None, "cp")
E4M3 = jflux.Format(jnp.float8_e4m3fn, (1, -1))
#: Keys [B, S, G, D] and values [B, S, G, E], or None where these are elements of keys.
Cache = tuple[Any, Any]


def operands(case: Case, mesh: Mesh) -> tuple[jax.Array, Cache]:
    """q [B, T, H, D] of the most tokens, and the cache."""
    width, _ = case.widths
    q = (case.batch, case.tokens[-1], case.heads, width)
    kv = (case.batch, case.positions, case.groups, width)

    def made(seed: int) -> Any:
        a = trials.normal(mesh, SPLIT, kv, jnp.bfloat16, seed=seed)
        return trials.compiled(quantize, mesh, SPLIT, SPLIT, a)(a) if case.cache == "e4m3" else a

    def quantize(a: jax.Array) -> jflux.Scaled:
        return E4M3.of_rows(a)[0]

    cache = made(2), None if case.is_latent else made(3)
    return trials.normal(mesh, P(), q, jnp.bfloat16, seed=1), cache


def unpacked(case: Case, cache: Cache, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Keys and values, in this type if they are of 8 bits."""
    k, v = (a.dequantize(dtype) if isinstance(a, jflux.Scaled) else a for a in cache)
    return k, k[..., : case.widths[1]] if v is None else v


# ---- What is timed -------------------------------------------------------------------------------


def decode(case: Case, positions: int, axis_name: str | None) -> Callable[..., jax.Array]:
    """jflux's, of one rank's q and cache."""
    lengths = jnp.full((case.batch,), positions, jnp.int32)
    value_width = case.widths[1] if case.is_latent else None

    def attend(q: jax.Array, cache: Cache) -> jax.Array:
        return jflux.flash_decode(
            q, *cache, lengths, axis_name=axis_name, scale=case.scale, value_width=value_width
        )

    return attend


def on_one(case: Case) -> Callable[..., jax.Array]:
    """What public parts give on one device."""
    lengths = jnp.full((case.batch,), case.positions, jnp.int32)
    implementation: Any = "cudnn" if jax.default_backend() == "gpu" else None

    def attend(q: jax.Array, cache: Cache) -> jax.Array:
        if case.cache == "bfloat16":
            return jax.nn.dot_product_attention(
                q, *cache, key_value_seq_lengths=lengths, implementation=implementation
            )
        # Else XLA would dequantise or copy the cache once for several calls.
        q, cache = lax.optimization_barrier((q, cache))
        k, v = unpacked(case, cache, q.dtype)
        rows = q.reshape(*q.shape[:2], case.groups, -1, q.shape[-1])
        wide: dict[str, Any] = {"preferred_element_type": jnp.float32}
        weights = jax.nn.softmax(case.scale * jnp.einsum("btghd,bsgd->btghs", rows, k, **wide))
        out = jnp.einsum("btghs,bsge->btghe", weights.astype(v.dtype), v, **wide)
        return out.reshape(*q.shape[:3], -1).astype(q.dtype)

    return attend


def handed_on(q: jax.Array, y: jax.Array) -> jax.Array:
    """The next call's q."""
    return lax.dynamic_update_slice(q, y, (0,) * q.ndim)


@dataclasses.dataclass(frozen=True)
class Contestant:
    """What is timed.

    Attributes:
      f: of one rank's q and cache.
      tokens: of each sequence in q.
      positions: how many of each sequence the first rank's result takes into account.
      mesh, out: devices, and how the result is sharded.
    """

    f: Callable[..., jax.Array]
    tokens: int
    positions: int
    mesh: Mesh
    out: P = P()


def contestants(case: Case, mesh: Mesh, one: Mesh) -> dict[str, Contestant]:
    every, part = case.positions, case.positions // mesh.size
    found = {str(n): Contestant(decode(case, every, "cp"), n, every, mesh) for n in case.tokens}
    if mesh.size > 1:  # each rank has another result
        found["part"] = Contestant(decode(case, part, None), 1, part, mesh, P("cp"))
    return found | {"G": Contestant(on_one(case), 1, every, one)}


# ---- Values --------------------------------------------------------------------------------------


def check(
    case: Case, q: jax.Array, cache: Cache, results: Mapping[str, tuple[jax.Array, int]]
) -> float:
    """The largest error (`attention.error_of`) of the results y [B, T, H, E] over so many
    positions.

    Raises:
      RuntimeError: one is too large.
    """
    rng, worst = np.random.default_rng(0), 0.0
    for _ in range(12):
        b, head = int(rng.integers(case.batch)), int(rng.integers(case.heads))
        group = head * case.groups // case.heads
        own = jax.tree.map(lambda a, b=b, group=group: a[b, :, group], cache)
        keys, values = (np.asarray(a, np.float64) for a in unpacked(case, own, jnp.float32))
        for name, (y, positions) in results.items():
            at = int(rng.integers(y.shape[1]))
            seen = positions - y.shape[1] + at + 1
            scores = keys[:seen] @ np.asarray(q[b, at, head], np.float64) * case.scale
            error = attention.error_of(y[b, at, head], scores, values[:seen])
            if not error <= 2:
                raise RuntimeError(f"{case.name}, {name}: an error of {error:.3g} times its bound")
            worst = max(worst, error)
    return worst


def measure(case: Case, ranks: int, rounds: int) -> command.Row:
    """One row of the table."""
    mesh, one = (Mesh(np.array(jax.devices()[:n]), ("cp",)) for n in (ranks, 1))
    q, cache = operands(case, mesh)
    given = {one: jax.device_put((q, cache), NamedSharding(one, P())), mesh: (q, cache)}
    iterations = trials.iterations_for(0.05, case.tokens[-1] * case.flops / ranks)
    found = contestants(case, mesh, one)
    results, programs, args = {}, {}, {}
    for name, c in found.items():
        args[name] = given[c.mesh][0][:, : c.tokens], given[c.mesh][1]
        lower = (c.mesh, (P(), SPLIT), c.out, *args[name])
        results[name] = trials.compiled(c.f, *lower)(*args[name]), c.positions
        programs[name] = trials.lowered(trials.loop(c.f, iterations, handed_on), *lower)
    error = check(case, q, cache, results)
    del results
    whole = programs.pop("G").compile(compiler_options=CAPTURED)
    compiled = trials.compile_at_once(programs, options=CAPTURED) | {"G": whole}
    runs = {name: trials.run_of(program, *args[name]) for name, program in compiled.items()}
    timings = trials.interleave(runs, iterations, rounds)
    for name, timing in timings.items():
        flops = found[name].tokens * case.flops / found[name].mesh.size
        rates.check((case.name, name), timing.median, flops=flops)
    bound = rates.read_seconds(sum(a.nbytes for a in jax.tree.leaves(cache)) / ranks)
    if bound is not None:
        bound = max(bound, case.flops / ranks / rates.peaks(jax.devices()[0].device_kind)[0])
    return {"case": dataclasses.asdict(case), "error": error, "bound": bound} | {
        name: dataclasses.asdict(timing) for name, timing in timings.items()
    }


# ---- The table -----------------------------------------------------------------------------------

COLUMNS = (*map(str, TOKENS), "part")
HEADING = " | ".join(
    ("cache", *(f"{c} ms" for c in COLUMNS), "G/N ms", "G / 1", "read ms", "error")
)


def cells(row: command.Row, ranks: int) -> list[str]:
    ms = {c: row[c]["median"] * 1e3 for c in (*COLUMNS, "G") if c in row}
    whole = ms["G"] / ranks if "G" in ms else None
    return [
        row["case"]["name"], *(f"{ms[c]:.3f}" if c in ms else "" for c in COLUMNS),
        *([f"{whole:.3f}", f"{whole / ms['1']:.2f}"] if whole else ["", ""]),
        f"{row['bound'] * 1e3:.3f}" if row["bound"] else "", f"{row['error']:.2f}",
    ]  # fmt: skip


def main() -> int:
    args = command.parse(__doc__, lists=",".join(LISTS))
    jflux.init(heap_bytes=1 << 30)
    jflux.config.update(strict=True)
    table = command.Table(
        "flash_decode", lambda row: Case(**row["case"]), lambda _: HEADING,
        command.joined(lambda row: cells(row, args.ranks)),
    )  # fmt: skip
    table.measure_cases(args, LISTS, measure)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
