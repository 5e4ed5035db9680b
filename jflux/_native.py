"""The native module, and the numbers and names that both languages use: read from C++."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

try:
    from . import _jflux as lib
except ImportError as error:  # pragma: no cover - a broken install
    raise ImportError(
        f"jflux's native library does not load ({error}); reinstall with `pip install .` in a "
        "checkout"
    ) from error

_constants: dict[str, Any] = lib.constants()

#: Ranks of a group that the kernels take.
MAX_RANKS: int = _constants["max_ranks"]
#: Weights, or terms, of one call that the GPU kernels take.
MAX_WEIGHTS: int = _constants["max_weights"]
#: Rows of a tile of the GPU kernels.
TILE_ROWS: int = _constants["tile_rows"]
#: By the scales of operands, (columns of a tile, cluster_m) of each kernel of grouped products
#: (cc/ops/grouped_matmul/grouped_matmul.h).
GROUPED_TILES: tuple[tuple[tuple[int, int], ...], ...] = tuple(
    tuple(
        (int(columns), int(cluster_m))
        for columns, cluster_m in (tile.split("/") for tile in _constants[name])
    )
    for name in (
        "grouped_tiles",
        "grouped_tiles_of_sums",
        "grouped_tiles_of_blocks",
        "grouped_tiles_of_vectors",
    )
)
#: Experts times segments of tokens that a kernel of a grouped product over ranks has a table for
#: (cc/ops/grouped_matmul/segments.h).
MOST_SPANS: int = _constants["most_spans"]
#: How many of them a scatter orders tiles by.
FEW_SPANS: int = _constants["few_spans"]
#: Bytes that the GPU kernels move together: rows are whole vectors.
VECTOR_BYTES: int = _constants["vector_bytes"]
#: Architectures that kernels are compiled for (cc/gpu/machine.h): for many GPUs, for those of them
#: that multiply float8, and for Hopper.
PORTABLE_ARCH: int = _constants["portable_arch"]
FLOAT8_ARCH: int = _constants["float8_arch"]
HOPPER_ARCH: int = _constants["hopper_arch"]
#: Activations and norms, in the order of cc/core/activation.h and cc/ops/all_reduce/all_reduce.h.
#: Number 0 is none in both.
ACTIVATIONS: tuple[str, ...] = tuple(_constants["activations"])
NORMS: tuple[str, ...] = tuple(_constants["norms"])
#: In the order of AllReduceAlgorithm (cc/ops/all_reduce/all_reduce.h).
ALL_REDUCE_ALGORITHMS: tuple[str, ...] = tuple(_constants["all_reduce_algorithms"])
#: What of a sum a call of all_reduce with a wire does.
WIRE_PARTS: tuple[str, ...] = tuple(_constants["wire_parts"])


@dataclasses.dataclass(frozen=True)
class Format:
    """A row of the table of formats (cc/core/format.h), of which calls carry the number."""

    name: str
    bits: int
    accumulator: str
    portable: str | None
    portable_from: int  # the least architecture of portable code that has the instruction; 0: none
    hopper: str | None
    k_major: bool
    scale_block: int
    stored: int  # 1 as an operand, 2 as a result, 4 on the wire

    @property
    def is_wide(self) -> bool:
        """Whether it may be stored anywhere (`kWideFormats`)."""
        return self.stored == 7


FORMATS: dict[str, Format] = {row["name"]: Format(**row) for row in lib.formats()}


def dtype_number(dtype: Any) -> int:
    """The number of a format's row."""
    return list(FORMATS).index(np.dtype(dtype).name)


@functools.cache
def dtypes(op: str, platform: str) -> frozenset[np.dtype]:
    """The types of operands that `op` takes on "cpu" or "cuda"."""
    taken = lib.operand_formats(op, platform)
    return frozenset(np.dtype(name) for i, name in enumerate(FORMATS) if taken >> i & 1)


def why_not_dtypes(
    op: str, platform: str, operands: Any, results: Any = None, *, w: Any = None
) -> str | None:
    """Why `op` does not take operands of a type there (w of another), or give results of another,
    or None."""
    names = [np.dtype(operands if d is None else d).name for d in (operands, w, results)]
    return lib.why_not_formats(op, platform, *names) or None


def why_not_rows(a: Any) -> str | None:
    """Why kernels that read whole vectors do not take the rows of a [rows, columns], or None."""
    if a.shape[1] * a.dtype.itemsize % VECTOR_BYTES == 0:
        return None
    return (
        f"rows have {a.shape[1]} {a.dtype.name}, the kernels take multiples of {VECTOR_BYTES} bytes"
    )


def result_dtype(x: Any, w: Any) -> np.dtype | None:
    """The type of a product of these types, unless its call names another; None if no kernels
    multiply them."""
    name = lib.result_format(np.dtype(x).name, np.dtype(w).name)
    return np.dtype(name) if name else None


def number_of(name: str | None, names: tuple[str, ...]) -> int:
    """0 for None, else one more than the place of `name` among `names`."""
    return 0 if name is None else 1 + names.index(name)


def plan(
    op: str,
    call: Mapping[str, int],
    sm_count: int,
    link_gbps: float,
    arch: int = HOPPER_ARCH,
) -> dict[str, int]:
    """What the kernels of `op` do for a call on such a GPU: its configuration and the bytes of its
    workspace (`Op::plan` of cc/runtime/op.h).

    Args:
      op: its name.
      call: sizes, types and options of the call, by the names that the op's plan function reads.
      sm_count: multiprocessors of the GPU; 0 is the CPU back end.
      link_gbps: what its links carry, in 1e9 bytes a second; 0: unknown.
      arch: of the kernels' code that it runs.

    Raises:
      ValueError: no kernel takes the call; says why.
    """
    fields = {name: int(value) for name, value in call.items()}
    return lib.plan(op, fields, sm_count, float(link_gbps), arch)
