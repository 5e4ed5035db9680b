"""The shapes that jflux is measured on. n and k are global; each rank holds its part.

`FLUX` is table 2 of the Flux paper (arXiv 2406.06858); `LLM` and `ATTENTION` are projections of
Llama-2, Llama-3 and Qwen models.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jflux._ops._collective import Collective
from jflux._ops._spec import OpSpec, all_ops, products


@dataclasses.dataclass(frozen=True)
class Shape:
    """One product: m rows in all, n columns, k contracted."""

    op: str  # of jflux
    m: int
    n: int
    k: int

    @property
    def name(self) -> str:
        """Of its sizes."""
        return f"{self.m} x {self.n} x {self.k}"

    @property
    def spec(self) -> OpSpec:
        return all_ops()[self.op]

    @property
    def collective(self) -> Collective:
        """What travels: x, or the product, of one rank."""
        return self.spec.communication(2, **self.spec.ways[0])

    def flops(self, ranks: int) -> float:
        """Floating-point operations of one rank."""
        return 2.0 * self.m * self.n * self.k / ranks


def of_row(row: Mapping[str, Any]) -> Shape:
    """That of a result's row."""
    return Shape(row["op"], row["m"], row["n"], row["k"])


#: XLA's own sequence, launched call by call and with its collectives captured in CUDA graphs.
XLA = ("S", "S captured")


def fastest_xla(row: Mapping[str, Any]) -> str:
    """Which of them counts: the faster one, of those that were timed."""
    return min((name for name in XLA if name in row), key=lambda name: row[name]["median"])


AG, RS, AR = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"
A2A = "matmul_all_to_all"

FLUX = [
    *(Shape(AG, m, 49152, 12288) for m in (64, 512, 1024, 2048, 4096, 8192)),
    *(Shape(RS, m, 12288, 49152) for m in (64, 512, 1024, 2048, 4096, 8192)),
]

_PROJECTIONS = [(11008, 4096), (14336, 4096), (28672, 8192), (53248, 16384), (29568, 8192)]
LLM = [
    *(Shape(AG, m, n, k) for n, k in _PROJECTIONS for m in (512, 2048, 8192)),
    *(Shape(RS, m, k, n) for n, k in _PROJECTIONS for m in (512, 2048, 8192)),
    *(Shape(RS, 8192, n, k) for n, k in [(4096, 11008), (4096, 14336), (3584, 14336)]),
]

ATTENTION = [
    *(Shape(AG, m, 10240, 8192) for m in (2048, 8192)),
    *(Shape(RS, m, 8192, 8192) for m in (2048, 8192)),
    *(Shape(RS, m, 16384, 16384) for m in (2048, 8192)),
]

# FLUX's, and Llama-2 70B's queries, keys and values, and what it has behind attention and MLP.
DECODE = [
    *(Shape(AG, m, n, k) for n, k in [(49152, 12288), (10240, 8192)] for m in (16, 64, 128)),
    *(Shape(RS, m, 12288, 49152) for m in (16, 64, 128)),
    *(Shape(RS, m, 8192, k) for k in (8192, 28672) for m in (16, 64, 128)),
]

# Rows that are no whole tiles, for 2, 3 and 4 ranks.
RAGGED = [
    *(Shape(AG, m, 49152, 12288) for m in (84, 204, 336, 996, 2052, 4092)),
    *(Shape(RS, m, 12288, 49152) for m in (84, 204, 336, 996, 2052, 4092)),
]

# Rows that are more than a tile and too few to hide communication behind: Llama-2 70B's.
HUNDREDS = [
    *(Shape(AG, m, n, 8192) for n in (10240, 57344) for m in (256, 300)),
    *(Shape(op, m, 8192, k) for op in (RS, AR) for k in (8192, 28672) for m in (256, 300)),
]


def odd(ranks: int) -> list[Shape]:
    """Of so many ranks: sizes that are no multiples of any tile on any of them; n and k once of
    whole 16-byte units, and once not."""
    return [
        shape
        for rows in (1, 7, 333, 4091)
        for n, k in ((5520, 4104), (5501, 4099))
        for shape in (Shape(AG, rows * ranks, n * ranks, k), Shape(RS, rows * ranks, k, n * ranks))
    ]


def of_op(op: str) -> list[Shape]:
    """What an op's spec says is worth timing."""
    return [Shape(op, m, n, k) for m, n, k in all_ops()[op].sizes]


LISTS = {
    "flux": FLUX,
    "llm": LLM,
    "attention": ATTENTION,
    "decode": DECODE,
    "ragged": RAGGED,
    "hundreds": HUNDREDS,
    "odd": [shape for ranks in range(2, 9) for shape in odd(ranks)],
    "all_reduce": of_op(AR),
    "ulysses": of_op(A2A),
    **{spec.name: of_op(spec.name) for spec in products()},
}


def of(name: str, ranks: int) -> list[Shape]:
    """The shapes of a list for so many ranks. Rows that they do not divide are an error, in lax
    too: it has the next that they do."""
    if name == "odd":
        return odd(ranks)
    return [dataclasses.replace(s, m=-(-s.m // ranks) * ranks) for s in LISTS[name]]
