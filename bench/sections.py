"""Sections of the pages in docs/performance, one for each result but those of the ops' shapes. A
result's kind is the name of its rows."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence

from . import (
    accuracy,
    attention,
    blocks,
    code_bases,
    collectives,
    decode,
    experts,
    flash_decode,
    gathered,
    grids,
    maxtext,
    mixtures,
    moe,
    products,
    scaled,
    scattered,
    xla,
)

Results = list[tuple[str, dict]]


def of_kind(results: Results, kind: str) -> Results:
    """Those of another benchmark, by the name of its rows."""
    return [(name, result) for name, result in results if kind in result]


def ranks_of(result: dict) -> int:
    return int(result["machine"]["gpus"].split()[0])


def short_gpus(machine: dict) -> str:
    """Such as "2 x H100"."""
    count, _, model = machine["gpus"].partition(" x ")
    return f"{count} x {model.removeprefix('NVIDIA ').split()[0]}"


def title(result: dict) -> str:
    machine = result["machine"]
    how = "one process" if machine["processes"] == 1 else "one process for each GPU"
    note = f"; {machine['note']}" if "note" in machine else ""
    return f"{machine['gpus']}, {how}{note}"


def plain_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def filled_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table without the columns that no row has."""
    rows = list(rows)
    kept = [i for i in range(len(columns)) if any(row[i] for row in rows)]
    return plain_table([columns[i] for i in kept], ([row[i] for i in kept] for row in rows))


def collective_tables(rows: list[dict]) -> str:
    """One for each op."""
    ops = dict.fromkeys(row["op"] for row in rows)
    return "\n\n".join(
        f"{op}:\n\n"
        + plain_table(
            collectives.columns(op), [collectives.cells(row) for row in rows if row["op"] == op]
        )
        for op in ops
    )


def product_tables(rows: list[dict]) -> str:
    """One for each type."""
    of_type = itertools.groupby(rows, key=lambda row: row["dtype"])
    return "\n\n".join(
        f"{dtype}. {products.summary(same)}\n\n"
        + plain_table(products.COLUMNS, map(products.cells, same))
        for dtype, same in ((dtype, list(found)) for dtype, found in of_type)
    )


def expert_tables(rows: list[dict]) -> str:
    """One for each list."""
    lists = dict.fromkeys(row["list"] for row in rows)
    return "\n\n".join(
        filled_table(
            experts.HEADINGS[name].split(" | "),
            [experts.cells(row) for row in rows if row["list"] == name],
        )
        for name in lists
    )


def xla_table(rows: list[dict]) -> str:
    """By shape; rows are in the order of their measurement."""
    rows = sorted(rows, key=lambda row: (row["op"], row["n"], row["m"]))
    return filled_table(xla.COLUMNS, map(xla.cells, rows))


@dataclasses.dataclass(frozen=True)
class Section:
    """Of one kind.

    Attributes:
      heading: of one result.
      module: in bench/; its head says what is timed.
      legend: what a reader must know to read the table.
      table: of one result.
    """

    heading: Callable[[dict], str]
    module: str
    legend: Callable[[dict], str]
    table: Callable[[dict], str]


def _of(text: str) -> Callable[[dict], str]:
    return lambda result: f"{text}: {title(result)}"


def _always(text: str) -> Callable[[dict], str]:
    return lambda result: text


def _grids_legend(result: dict) -> str:
    sizes = result["grids"][0]["sizes"]
    return (
        f"{sizes['layers']} blocks of width {sizes['width']}, 2048 tokens a GPU, x by y by z by "
        "data. What each optimisation saves is in % of the step before it; the sums over data are "
        "in all of them. Predicted is the communication by the paper's equations, none of it "
        "hidden ([The planner](guide/plan.md))."
    )


def _rows(
    kind: str, heading: str, cells: Callable[[dict, int], list[str]]
) -> Callable[[dict], str]:
    """A table of results of a kind, whose cells also depend on how many ranks there were."""
    return lambda result: filled_table(
        heading.split(" | "), [cells(row, ranks_of(result)) for row in result[kind]]
    )


def _of_split_mixtures(
    heading: str,
    kind: str,
    cells: Callable[[dict, int], list[str]],
    columns: str = mixtures.HEADING,
) -> Section:
    def what(result: dict) -> str:
        in_8_bits = any(name in row for row in result[kind] for name in scattered.IN_8_BITS)
        return (
            "The experts' hidden units are split over the ranks. J is one kernel, `two` the two "
            "steps of jflux, G and C their product and their collective alone; F is max(G, C)."
            + " J8 and two8 are J and `two` with a wire of float8_e4m3fn."
            * in_8_bits
        )

    return Section(_of(heading), kind, what, _rows(kind, columns, cells))


def _what_collectives(result: dict) -> str:
    common = (
        "S is XLA's own, C the same with XLA told to put its collectives into CUDA graphs, J what "
        "jflux chooses."
    )
    if any("wire=" in row["op"] for row in result["collectives"]):
        exact = "S, C and J send exact data; below 3 MiB so does a call with a wire, unless "
        return f"{exact}`always=True`. {common}"
    return (
        f"{common} With a norm, `apart` is jflux's sum with XLA's norm after it, and `alone` the "
        "sum. J and the algorithm that it chooses are one program: what they differ by is noise. "
        "Empty fields were not timed: LL packets of more than 16 MiB, and algorithms newer than "
        "the run."
    )


#: In the order of the page.
SECTIONS: dict[str, Section] = {
    "xla": Section(
        _of("XLA at its best, bf16, microseconds a call"),
        "xla",
        lambda result: (
            "S is a collective and a product by XLA's defaults. `captured`: its collectives in "
            "CUDA graphs. `scheduled`: with the latency-hiding scheduler, which is off by default "
            "(jaxlib 0.10 to 0.12). W is windowed einsum (collective matmul), of global arrays "
            f"under jit. {xla.summary(result['xla'])}"
        ),
        lambda result: xla_table(result["xla"]),
    ),
    "blocks": Section(
        _of("MLPs and transformer blocks, forward and backward"),
        "blocks",
        _always(""),
        lambda result: filled_table(blocks.COLUMNS, map(blocks.cells, result["blocks"])),
    ),
    "grids": Section(
        lambda result: f"Every grid of {title(result)}: GPT blocks, forward and backward",
        "grids",
        _grids_legend,
        lambda result: plain_table(grids.COLUMNS, map(grids.cells, result["grids"])),
    ),
    "decode": Section(
        _of("Decoding with layers of Llama-2-70B, bf16"),
        "decode",
        _always(
            "A step is one token of each sequence, with so many positions in the cache. XLA "
            "launches its own collectives one by one; under `graphs` it was told to capture them "
            "into its CUDA graphs, as it does by default with jflux's kernels."
        ),
        lambda result: plain_table(decode.COLUMNS, map(decode.cells, result["decode"])),
    ),
    "maxtext": Section(
        _of("MaxText's own layers, as wide as Llama-2-70B"),
        "maxtext",
        _always(
            "Loss and gradients of two layers. S is MaxText alone, J with a "
            "`jflux.nn.TensorParallel` in place of its quantization ([MaxText](guide/maxtext.md))."
        ),
        lambda result: plain_table(
            maxtext.HEADING.split(" | "), map(maxtext.cells, result["maxtext"])
        ),
    ),
    "code_bases": Section(
        _of("Models of other libraries, as wide as Llama-3-8B"),
        "code_bases",
        _always(
            "Loss and gradients of 8192 tokens. S is the library alone, `scheduled` with XLA's "
            "latency-hiding scheduler, R the program of J with XLA's collectives, and J with jflux "
            "([other code bases](guide/code_bases.md)). MiB are temporary memory. Gradients are "
            "J's apart from S's, relative to their length. Of calls that are alike one is counted."
        ),
        lambda result: filled_table(
            code_bases.HEADING.split(" | "), map(code_bases.cells, result["code_bases"])
        ),
    ),
    "attention": Section(
        _of("Attention over a split sequence, bf16, milliseconds"),
        "attention",
        _always(
            "f+b is forward and backward. J is `jflux.attention`, keys and values gathered, and "
            "`ring` the same around a ring; K forces its own kernels where cuDNN computes J. A is "
            "an all-gather and cuDNN, X is J in XLA's operations, G / N cuDNN on one GPU, divided "
            "by the ranks. `error` is in multiples of its bound. U is Ulysses in plain JAX "
            "(`lax.all_to_all` of heads, cuDNN, and back), JU `jflux.ulysses_attention`. `auto` is "
            'the form that `jflux.attention` chooses, and `JU zigzag` `form="ulysses"`, both in '
            "zigzag order; `own auto` and `own gather` are in the sequence's own order. Empty "
            "fields do not apply or were not timed."
        ),
        _rows("attention", attention.HEADING, attention.cells),
    ),
    "flash_decode": Section(
        _of("Decoding over a split cache, milliseconds"),
        "flash_decode",
        _always(
            "Sequences x positions of all ranks: 64 heads of queries over 8 of 128 elements, in "
            "bfloat16 and in e4m3 with a float32 scale for each position's head; `latent` has keys "
            "of 576 elements, whose first 512 are values, for all heads. 1 to 16 are new tokens of "
            "each sequence, by `jflux.flash_decode`. `part` is one token and a rank's part alone, "
            "not merged. G / N is one token on one GPU, divided by the ranks: cuDNN in bfloat16, "
            "else einsums, of a cache dequantised in the program. `G / 1` is that over the first "
            "column. `read` is the time in which a copy reads a rank's part of the cache, or in "
            "which the tensor cores multiply it, if that is longer; `error` is in multiples of its "
            "bound."
        ),
        _rows("flash_decode", flash_decode.HEADING, flash_decode.cells),
    ),
    "moe": Section(
        _of("Grouped products, bf16, milliseconds"),
        "moe",
        _always(
            "J is `jflux.grouped_matmul`, S `lax.ragged_dot`, X the same with XLA's flag for "
            "grouped products, G one batched product of XLA with as "
            "many rows in equal groups, T tokamax's, P PyTorch's `grouped_mm`; `read` is the time "
            "in which a copy reads the weights (3.0 TB/s on H100, 4.3 on H200): what only reads "
            "may be a few per cent faster."
        ),
        lambda result: filled_table(
            moe.HEADING.split(" | "), map(moe.cells, moe.in_order(result["moe"]))
        ),
    ),
    "experts": Section(
        _of("Mixtures of experts, bf16"),
        "experts",
        _always(
            "D is `moe_dispatch`, D+C the way back too, `each` without partial sums, S the pair in "
            "plain `lax`, `gather` an all-gather and a reduce-scatter of all tokens; before "
            "2026-11-30 D and D+C wrote zeros to the rows of no token. Of layers, forward and "
            "backward: TP and EP gather all tokens, `disp.` dispatches them, `prod.` is "
            "`dispatch_grouped_matmul`, and S plain `lax` with `ragged_dot`. `einsum` is GShard's "
            "form in plain JAX, with slots for 1.25 times an expert's even share: it drops the "
            "rest, `dropped` of all choices, and jflux nothing."
        ),
        lambda result: expert_tables(result["experts"]),
    ),
    "gathered": _of_split_mixtures(
        "Gathered rows and a grouped product, bf16", "gathered", gathered.cells
    ),
    "scattered": _of_split_mixtures(
        "A grouped product and scattered sums, bf16",
        "scattered",
        scattered.cells,
        scattered.HEADING,
    ),
    "collectives": Section(
        lambda result: _of(
            "Ragged exchanges, bf16, microseconds a call"
            if all(row["op"] == "ragged_all_to_all" for row in result["collectives"])
            else "Collectives with a wire of 8 bits, bf16, microseconds a call"
            if all("wire=" in row["op"] for row in result["collectives"])
            else "Small collectives, bf16, microseconds a call"
        )(result),
        "collectives",
        _what_collectives,
        lambda result: collective_tables(result["collectives"]),
    ),
    "accuracy": Section(
        _of("How exact an all-reduce is"),
        "accuracy",
        _always(
            "The mean absolute difference from sums in float64, of standard normal numbers; "
            "`rounded` is that of the exact sums, rounded."
        ),
        lambda result: plain_table(accuracy.COLUMNS, map(accuracy.cells, result["accuracy"])),
    ),
    "scaled": Section(
        _of("Operands of 8 bits, microseconds a call"),
        "scaled",
        _always(
            "S16 and J16 are of bfloat16. S8 is a collective and XLA's product of float8_e4m3fn "
            "with one scale, S8q the same with x quantised by one scale over all ranks, S8row by "
            "row; G8 and C8 its product and its collective alone. J8 is jflux, by form of the "
            "scales, J8q with quantising. T is PyTorch's fused op, P its product alone. F is "
            "max(G8, C8), of G8 and P the faster one; `read` is the time in which a copy reads a "
            "rank's weights. `ran` is the path that each J8 took, `error` the largest of a J8, in "
            "roundings of bfloat16. Not measured here: for DeepGEMM's product by blocks on one "
            "H800 SXM 1377 TFLOP/s (4096 x 4096 x 7168) and 1500 (4096 x 7168 x 16384) are "
            "reported."
        ),
        lambda result: filled_table(scaled.COLUMNS, map(scaled.cells, result["scaled"])),
    ),
    "products": Section(
        _of("The product alone"),
        "products",
        _always(
            "One of four ranks' part of each shape, normal numbers; G is XLA's time: cuBLAS, or a "
            "fusion where that is faster."
        ),
        lambda result: product_tables(result["products"]),
    ),
}


#: Of a result's name, kind and content: what else its head says.
Mark = Callable[[str, str, dict], str]


def _text(name: str, kind: str, result: dict, mark: Mark) -> str:
    section = SECTIONS[kind]
    day = result["machine"].get("date")
    where = f"[{name}.json](../bench/results/{name}.json){f', {day}' if day else ''}"
    what = f"what is timed: [bench/{section.module}.py](../bench/{section.module}.py)."
    said = " ".join(s for s in (what, section.legend(result), mark(name, kind, result)) if s)
    return f"## {section.heading(result)}\n\n{where}; {said}\n\n{section.table(result)}\n"


def all_of(
    results: Results, kinds: Iterable[str], mark: Mark = lambda name, kind, result: ""
) -> list[str]:
    """Every section of these kinds; within a kind by machine."""
    return [
        _text(name, kind, result, mark) for kind in kinds for name, result in of_kind(results, kind)
    ]
