"""How a product of x and w is planned: its sizes, when the decomposed form is faster, and which
form takes a call.

A new reason to be decomposed goes to :func:`why_decomposed`, or to the op's own function that calls
it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from ... import _config, _native
from ..._call import gpu_code, plans, tuning_tables
from ..._call.forms import Call, WhyNot
from ..._call.plans import Arrays, Machine, Plan
from ..._native import TILE_ROWS, VECTOR_BYTES
from .._scaled import Scales


@dataclasses.dataclass(frozen=True)
class Sizes:
    """A product as its kernel sees it, on one rank: rows are [outer, world, inner] or
    [outer, inner], as cc/core/rows.h numbers them; k and n are of all terms and all weights.

    Attributes:
      dtype, w_dtype, out_dtype: of x, of w (None: x's), and of y.
      first_k: of the first term alone, if there are several.
      gated: whether two weights make one result.
      scales: of the operands.
      quantizes: whether results are quantised.
      wire: the format of partial products that travel; None: y's.
      split_rows, concat_rows: of an all-to-all: whether shards are rows of what is sent, and of
        what is put together.
    """

    op: str
    world: int
    outer: int
    inner: int
    k: int
    n: int
    dtype: np.dtype
    out_dtype: np.dtype
    transpose_rhs: bool
    first_k: int = 0
    gated: bool = False
    split_rows: bool = False
    concat_rows: bool = False
    w_dtype: np.dtype | None = None
    scales: Scales = Scales.NONE
    quantizes: bool = False
    wire: str | None = None

    @property
    def rows(self) -> int:
        """The rows of all ranks."""
        return self.world * self.outer * self.inner

    @property
    def key(self) -> tuning_tables.Key:
        """The key of the call in tuning tables."""
        formats = self.dtype.name
        row = _native.FORMATS.get(formats)
        if row is not None and not row.is_wide:  # y has another format, and perhaps w
            w = self.dtype if self.w_dtype is None else self.w_dtype
            formats = f"{formats}.{w.name}.{self.out_dtype.name}"
        return tuning_tables.Key(
            self.op, self.world, self.rows, self.n, self.k, formats, self.transpose_rhs,
            self.scales.name.lower() if self.scales else "",
        )  # fmt: skip

    def native(self) -> dict[str, int]:
        """The arguments of the native plan function, with only the options that the op has."""
        options = {
            "first_k": self.first_k,
            "gated": self.gated,
            "scales": self.scales,
            "quantizes": self.quantizes,
            "split_rows": self.split_rows,
            "concat_rows": self.concat_rows,
        }
        return {
            "world": self.world,
            "outer": self.outer,
            "inner": self.inner,
            "k": self.k,
            "n": self.n,
            "dtype": _native.dtype_number(self.dtype),
            "out_dtype": _native.dtype_number(self.out_dtype),
            "transpose_rhs": self.transpose_rhs,
            **({} if self.w_dtype is None else {"w_dtype": _native.dtype_number(self.w_dtype)}),
            **({} if self.wire is None else {"wire": _native.dtype_number(self.wire)}),
            **{name: int(value) for name, value in options.items() if value},
        }


#: Bytes, the most that :func:`alignment` looks for.
MOST_ALIGNMENT = 8 * VECTOR_BYTES


def alignment(xs: Sequence[Any], ws: Sequence[Any]) -> int:
    """The largest power of two of bytes, up to 128, whose multiples rows of all operands are: those
    of x, and those of w as it is and transposed."""
    sizes = [x.shape[-1] * x.dtype.itemsize for x in xs]
    sizes += [size * w.dtype.itemsize for w in ws for size in w.shape]
    return math.gcd(MOST_ALIGNMENT, *sizes)


def in_vectors(xs: Sequence[Any], ws: Sequence[Any]) -> bool:
    """Whether the rows of all operands are whole 16-byte vectors, as the CUDA kernels need them."""
    return alignment(xs, ws) >= VECTOR_BYTES


#: If ranks share tiles, an all_gather_matmul on full links has all rows in one raster group for up
#: to so many rows of all peers (InOneRasterGroup of cc/gpu/gemm_choice.h). The first tiles then
#: wait for all rows, and one kernel hides no communication. It only saves the start of a second
#: kernel, which takes this share of the product's time (docs/experiments/0033).
MOST_IN_ONE_GROUP = 1600
SAVED_IN_ONE_GROUP = 1 / 16


def why_decomposed(
    m: int,
    machine: Machine,
    *,
    fewest: int,
    ranks: int = 1,
    width: int = 0,
    alignment: int = MOST_ALIGNMENT,
    gathers: bool = False,
) -> str | None:
    """Why m rows of all ranks take longer on GPUs in one kernel than as XLA's product and one of
    jflux's collectives, in words; None if they do not. By docs/experiments/0020 and 0033.

    Args:
      m: rows of all ranks.
      machine: its links.
      fewest: the fewest rows for one kernel. With fewer, the product ends before it could hide any
        communication.
      ranks: the number of ranks.
      width: the columns of w on each rank for an all-gather, its rows for a reduce-scatter; 0
        skips the test for padding. If a rank's rows are not whole tiles, the kernel multiplies a
        partly empty row of tiles. cuBLAS does not, and this may cost more than the overlap saves.
      alignment: :func:`alignment` of the operands. Below one vector cuBLAS takes 4 times as long,
        and the kernel is faster with any padding. Where rows are an odd number of vectors and few,
        cuBLAS takes 1.8 times as long, and the kernel does not.
      gathers: whether the call gathers rows, so that tiles wait for rows of peers.
    """
    if m < fewest and alignment != VECTOR_BYTES:
        return f"{m} rows are fewer than {fewest}: there is no time to hide communication in"
    if TILE_ROWS < m < 512:
        return f"{m} rows: from {TILE_ROWS + 1} to 511 the decomposed form was measured faster"
    if m <= TILE_ROWS or width == 0 or alignment < VECTOR_BYTES or m // ranks % TILE_ROWS == 0:
        return None
    padding = -m % (2 * TILE_ROWS) / m  # clusters have two tiles
    saved = machine.balanced_columns / width * (ranks - 1) / ranks
    peers = m * (ranks - 1) // ranks
    if gathers and ranks > 2 and peers <= MOST_IN_ONE_GROUP * machine.links:
        saved = min(saved, SAVED_IN_ONE_GROUP)
    if padding > saved:
        return (
            f"{m} rows leave {-m % (2 * TILE_ROWS)} rows of padding in tiles of "
            f"{2 * TILE_ROWS}, which would cost more than the overlap saves"
        )
    return None


#: Rows that must be padded become multiples of so many bytes. The kernels take up to 1.5 times as
#: long to load rows of an odd number of vectors (docs/experiments/0053).
PADDED_TO = 4 * VECTOR_BYTES


def why_not_tf32(params: Any, machine: Machine) -> str | None:
    """Why GPUs do not multiply float32 as TF32, as XLA does there by default, or None."""
    if machine.arch >= gpu_code.HOPPER:
        return (
            "operands are float32, which Hopper's kernels do not take: portable code multiplies "
            "TF32 at half of the rate of XLA's product (docs/experiments/0060)"
        )
    precision, default = params.precision, getattr(jax.config, "jax_default_matmul_precision", None)
    wanted = precision if isinstance(precision, tuple) else (precision,)
    names = {str(default if one is None else one).lower() for one in wanted}
    if names <= {"none", "default", "fastest", "bfloat16", "tensorfloat32", "tf32_tf32_f32"}:
        return None
    return f"kernels multiply float32 as TF32, which precision={', '.join(sorted(names))} forbids"


def is_k_major(dtype: np.dtype) -> bool:
    """Whether tensor cores take operands of this type along k alone, so that w is [n, k]."""
    return dtype.name in _native.FORMATS and _native.FORMATS[dtype.name].k_major


def vector(dtype: np.dtype) -> int:
    """Elements of a vector."""
    return VECTOR_BYTES // dtype.itemsize


def padded(size: int, dtype: np.dtype) -> int:
    """k or n as the GPU kernels take it: whole vectors, and if there is padding, whole 64 bytes."""
    whole = size % vector(dtype) == 0
    return size if whole else size + -size % (PADDED_TO // dtype.itemsize)


def in_whole_vectors(sizes: Sizes) -> Sizes:
    """The sizes of a call whose k and n are padded, as the GPU kernels take it."""

    def pad(size: int) -> int:
        return padded(size, sizes.dtype)

    first_k = pad(sizes.first_k)
    k = first_k + pad(sizes.k - sizes.first_k)
    n = 2 * pad(sizes.n // 2) if sizes.gated else pad(sizes.n)
    transposed = sizes.transpose_rhs or is_k_major(sizes.dtype)
    return dataclasses.replace(sizes, first_k=first_k, k=k, n=n, transpose_rhs=transposed)


def in_rank_order(sizes: Sizes) -> Sizes:
    """The sizes of a padded call whose ranks are brought in front of leading rows, where a tile's
    rows would straddle leading indices."""
    sizes = in_whole_vectors(sizes)
    if sizes.outer == 1 or sizes.inner % TILE_ROWS == 0:
        return sizes
    return dataclasses.replace(sizes, outer=1, inner=sizes.outer * sizes.inner)


#: (operands' types, params) -> the product as its kernel sees it.
SizesRule = Callable[[Arrays, Any], Sizes]
#: (operands' types, params, machine) -> why another form takes the call, or None.
WhyRule = Callable[[Arrays, Any, Machine], str | None]
#: (operands' types, params, platform) -> why no kernel takes the call, or None.
UnsupportedRule = Callable[[Arrays, Any, str], str | None]


def why_slower(
    machine: Machine,
    why: Callable[[], str | None],
    tuned: tuning_tables.Choice | str | None,
    kernel: str | None,
) -> WhyNot | None:
    """Why a product that a kernel takes is faster in other forms, or None.

    Args:
      why: () -> the same, by the heuristic for GPUs.
      tuned: what was measured for the call: a configuration, or "decomposed", or nothing.
      kernel: why the call takes the kernel whatever is faster, in words, or None.
    """
    if kernel is None and tuned == tuning_tables.DECOMPOSED:
        return WhyNot("measured to be faster: in a tuning table")
    if machine.on_gpus and kernel is None and tuned is None and (reason := why()):
        return WhyNot(reason)
    return None


def plan_kernel(
    sizes: Sizes,
    machine: Machine,
    tuned: tuning_tables.Choice | str | None,
    kernel: str | None,
) -> Plan:
    """The plan of a product that the kernel takes: a pure function. Arguments as in
    :func:`why_slower`."""
    if not machine.on_gpus:
        words = kernel or "the CPU back end runs every call that it takes"
        native = machine.native_plan(sizes.op, sizes.native())
        return plans.fused(words, native, key=sizes.key)
    call = sizes.native()
    if isinstance(tuned, tuning_tables.Choice):
        call |= dataclasses.asdict(tuned)
        reason = f"configuration of the tuning table for {machine.device_kind or 'this GPU'}"
    else:
        reason = "configuration of the heuristic"
    native = machine.native_plan(sizes.op, call)
    return plans.fused(f"{kernel}; {reason}" if kernel else reason, native, key=sizes.key)


def tuned_for(sizes: Sizes, machine: Machine) -> tuning_tables.Choice | str | None:
    """What was measured for a product on this machine."""
    return tuning_tables.lookup(sizes.key, machine.device_kind if machine.on_gpus else "")


def why_kernel(params: Any) -> str | None:
    """Why a call takes the kernel whatever is faster: it was planned before, or the user asks."""
    if params.prepared is not None:
        return params.prepared
    return "jflux.config(always=True)" if _config.config.always else None


@dataclasses.dataclass(frozen=True)
class Product:
    """What the forms of a product ask of its op.

    Attributes:
      sizes: of a call.
      unsupported: why neither the kernel nor other ops take it.
      why_decomposed: why the decomposed form is faster.
      on_gpus: the sizes of the call in the form that the op's `canonical` gives it on GPUs.
      why_lax: why plain `lax` takes a call, as is expected.
      why_no_kernel: why the kernel does not take a call that other ops take.
      why_not_float32: why GPUs do not multiply float32, or None.
    """

    sizes: SizesRule
    unsupported: UnsupportedRule
    why_decomposed: WhyRule
    on_gpus: Callable[[Sizes], Sizes] = in_whole_vectors
    why_lax: Callable[[Any], str | None] = lambda params: None
    why_no_kernel: WhyRule = lambda arrays, params, machine: None
    why_not_float32: Callable[[Any, Machine], str | None] = lambda params, machine: None

    def kernel(self, call: Call, machine: Machine) -> Plan | WhyNot:
        """Whether the kernel takes a call by ranks of one node."""
        if not_ours := self.reference(call, machine):
            return not_ours
        arrays, params = call.arrays, call.params
        if other := self.why_no_kernel(arrays, params, machine):
            return WhyNot(other)
        sizes, tuned, kernel = self._found(call, machine)
        why = functools.partial(self.why_decomposed, arrays, params, machine)
        return why_slower(machine, why, tuned, kernel) or plan_kernel(sizes, machine, tuned, kernel)

    def decomposed(self, call: Call, machine: Machine) -> Plan | WhyNot:
        """Whether XLA's product and others of jflux's ops take what the kernel does not."""
        return self.reference(call, machine) or plans.decomposed("")

    def reference(self, call: Call, machine: Machine) -> WhyNot | None:
        """Why plain `lax` takes a call, or None. If it takes it inside nodes, it takes all of
        it."""
        if call.levels is not None and call.levels.local == 1:
            return None
        call = call.inside
        if why := self.why_lax(call.params):
            return WhyNot(why)
        why = self.unsupported(call.arrays, call.params, machine.platform)
        if not why and machine.on_gpus and call.arrays[0].dtype == np.float32:
            why = self.why_not_float32(call.params, machine)
        if not why:
            return None
        _, tuned, kernel = self._found(call, machine)
        by_heuristic = (
            machine.on_gpus
            and tuned is None
            and self.why_decomposed(call.arrays, call.params, machine) is not None
        )
        nobody_expects_it = tuned == tuning_tables.DECOMPOSED or by_heuristic
        return WhyNot(why, unsupported=kernel is not None or not nobody_expects_it)

    def _found(self, call: Call, machine: Machine) -> tuple[Sizes, Any, str | None]:
        """(sizes, what was measured for them, why the call takes the kernel)."""
        sizes = self.sizes(call.arrays, call.params)
        if machine.on_gpus:
            sizes = self.on_gpus(sizes)
        return sizes, tuned_for(sizes, machine), why_kernel(call.params)


def attributes(sizes: Sizes, plan: Plan) -> dict[str, Any]:
    """The FFI attributes that all products have."""
    return {
        "choice": plan.choice,
        "inner": np.int64(sizes.inner),
        "outer": np.int64(sizes.outer),
        "senders": np.int64(plan.senders),
        "transpose_rhs": sizes.transpose_rhs,
    }
