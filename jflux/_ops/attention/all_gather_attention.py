"""Attention to the keys of all ranks, which arrive while the kernel computes
(cc/ops/all_gather_attention); else an all-gather, and the attention of one device
(flash_attention.py).

``jflux_all_gather_attention(q, k, v, positions of queries, of keys, kinds of blocks, order[,
segments of queries, of keys])``: operands as the handlers take them. Keys are numbered by rank,
each rank's from a multiple of 128 on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import ad

from ... import _config, _native
from ..._call import derivatives, forms, gpu_code, plans
from ..._call.forms import Call, Op, ShapeDtype, WhyNot
from ..._call.plans import Arrays, Machine, Plan
from ..._call.primitives import make_primitive
from ..._ranks import meshes
from ..._ranks.meshes import AxisName
from .._epilogue import sum_dtype
from ..collectives import exchange
from . import _blockwise, flash_attention
from ._blockwise import Positions, Scores

OP = "all_gather_attention"


@dataclasses.dataclass(frozen=True)
class Params:
    """A call, less its operands.

    Attributes:
      scores, dtype, precision: as :class:`.flash_attention.Params` has them.
    """

    axis_names: tuple[Any, ...]
    world: int
    scores: Scores
    dtype: np.dtype
    precision: str | None
    prepared: str | None = None


def takes(axis_name: AxisName | None, ranks: int, segments: jax.Array | None) -> bool:
    """Whether a kernel may take attention over these ranks."""
    narrow = segments is None or jnp.iinfo(segments.dtype).bits <= 32
    return ranks > 1 and axis_name is not None and meshes.is_manual(axis_name) and narrow


def beats_cudnn(q: jax.Array, k: jax.Array, v: jax.Array, scores: Scores) -> bool:
    """Whether the kernel's forward pass takes less time than cuDNN's parts, which it does with a
    causal mask. Without a mask both take as long (docs/experiments/0047). Portable code has not
    been timed beside cuDNN."""
    if not scores.causal or meshes.platform() != "gpu" or gpu_code.runs_portable():
        return False
    return flash_attention.plan(q, k, v, scores).path == plans.Path.FUSED


#: The most positions of a rank for which gradients by jflux's kernels take no more time than by
#: cuDNN's parts. Each of cuDNN's calls has little to compute then (docs/experiments/0050).
MOST_POSITIONS_FOR_GRADIENTS = 4096


def forward(
    axis_name: AxisName,
    q: jax.Array,
    queries: Positions,
    k: jax.Array,
    v: jax.Array,
    keys: Positions,
    scores: Scores,
    dtype: Any,
) -> tuple[jax.Array, jax.Array]:
    """:func:`.flash_attention.forward` over the keys of all ranks.

    Args:
      k, v: [B, t, G, D] of this rank.
      keys: of all ranks, one after the other: positions [N t], segments [B, N t].
    """
    rank, world = meshes.rank_and_size(axis_name)
    params = Params(
        meshes.as_tuple(axis_name), world, scores, np.dtype(dtype), _blockwise.default_precision()
    )
    operands = [q, k, v, *_numbers(q, queries, keys, rank, world, scores)]
    o, lse = _primitive.bind(*operands, params=params)
    return o, lse


def _numbers(
    q: jax.Array, queries: Positions, keys: Positions, rank: Any, world: int, scores: Scores
) -> list[jax.Array]:
    """The kernel's operands after q, k and v: positions, kinds and order of blocks, segments."""

    def by_rank(a: jax.Array, fill: int) -> jax.Array:
        return flash_attention.padded(a.reshape(-1, world, a.shape[-1] // world), fill).reshape(
            len(a), -1
        )

    segments = []
    if queries.segments is not None and keys.segments is not None:
        segments = [flash_attention.padded(queries.segments, 0), by_rank(keys.segments, 0)]
    positions = [
        flash_attention.padded(queries.positions[None], _blockwise.NOWHERE),
        by_rank(keys.positions[None], _blockwise.NOWHERE),
    ]
    parts = (
        Positions(queries.positions, queries.segments),
        Positions(positions[1][0], segments[1] if segments else None),
    )
    kinds = flash_attention.block_kinds(
        *parts, scores, flash_attention.block_sizes("forward", q.shape[3])
    )
    # Keys of peers arrive while the first items attend to this rank's own keys.
    blocks_of_rank = kinds.shape[2] // world
    own = lax.dynamic_slice_in_dim(kinds, rank * blocks_of_rank, blocks_of_rank, 2)
    return [
        *positions,
        *flash_attention.by_cost(kinds, own),
        *(s.astype(jnp.int32) for s in segments),
    ]


# ---- In two steps --------------------------------------------------------------------------------


def _positions_of(arrays: Arrays, params: Params) -> tuple[Positions, Positions]:
    """Positions and segments of the queries and of all ranks' keys, without padding."""
    q, k, _, of_queries, of_keys, _, _, *segments = arrays

    def unpadded(queries: jax.Array, keys: jax.Array) -> tuple[jax.Array, jax.Array]:
        by_rank = keys.reshape(len(keys), params.world, -1)[:, :, : k.shape[1]]
        return queries[:, : q.shape[1]], by_rank.reshape(len(keys), -1)

    positions = unpadded(of_queries, of_keys)
    rows = [p[0] if len(p) == 1 else p for p in positions]
    found = unpadded(*segments) if segments else (None, None)
    return Positions(rows[0], found[0]), Positions(rows[1], found[1])


def _two_steps(
    arrays: Arrays, params: Params, gather: Callable[[jax.Array], jax.Array]
) -> list[jax.Array]:
    q, k, v = arrays[0], gather(arrays[1]), gather(arrays[2])
    queries, keys = _positions_of(arrays, params)
    with jax.default_matmul_precision(params.precision):
        return [*flash_attention.forward(q, queries, k, v, keys, params.scores, params.dtype)]


def _decomposed(arrays: Arrays, params: Params, plan: Plan | None = None) -> list[jax.Array]:
    def gather(a: jax.Array) -> jax.Array:
        return exchange.bind("all_gather", a, params.axis_names, params.world, None, 1)

    return _two_steps(arrays, params, gather)


def _in_lax(arrays: Arrays, params: Params) -> list[jax.Array]:
    gather = exchange.Params(params.axis_names, params.world, None, 1).collective("all_gather")
    return _two_steps(arrays, params, lambda a: gather.lax(a, params.axis_names))


# ---- How a call lowers ---------------------------------------------------------------------------


def _shapes(arrays: Arrays, params: Params) -> Sequence[ShapeDtype]:
    q = arrays[0]
    return [(q.shape, params.dtype), (q.shape[:3], sum_dtype(q.dtype))]


def _why_not(arrays: Arrays, params: Params, machine: Machine) -> str | None:
    q = arrays[0]
    if machine.on_gpus:
        return flash_attention.why_not(arrays, params, machine.platform)
    if not _config.config.always:
        return "on CPUs XLA's blocks are faster"
    if why := _native.why_not_dtypes(OP, "cpu", q.dtype):
        return why
    return None if params.scores.scale > 0 else f"the scale is {params.scores.scale}"


def _takes(call: Call, machine: Machine) -> Plan | WhyNot:
    arrays, params = call.arrays, call.params
    if why := _why_not(arrays, params, machine):
        return WhyNot(why)
    q, k = arrays[:2]
    fields = {
        "world": params.world, "batch": q.shape[0], "queries": q.shape[1], "keys": k.shape[1],
        "heads": q.shape[2], "groups": k.shape[2], "width": q.shape[3],
        "dtype": _native.dtype_number(q.dtype),
    }  # fmt: skip
    native = forms.native_plan(OP, fields, machine, fills="keys")
    if isinstance(native, WhyNot):
        return native
    if machine.arch < gpu_code.HOPPER:  # which may be a topology's, not of this process's GPUs
        native = {**native, "portable": 1}
    return plans.fused("one kernel: keys and values arrive while it computes", native)


def _attributes(arrays: Arrays, params: Params, plan: Plan) -> dict[str, Any]:
    return flash_attention.attributes(params) | {
        "portable": "portable" in plan.config,
        "senders": np.int64(plan.senders),
    }


def _flops(arrays: Arrays, params: Params) -> int:
    q, k, *_ = arrays
    return _blockwise.pairs_flops(q, params.world * k.shape[1])


def _batch(primitive: Any, operands: Any, dims: Any, *, params: Params) -> Any:
    """One call, of as many times B sequences."""
    size, fold = flash_attention.folding(operands, dims)

    def are_shared(*which: int) -> bool:
        return all(dims[i] is None and len(operands[i]) == 1 for i in which)

    shared = {3: are_shared(3, 4), 4: are_shared(3, 4), 5: are_shared(5)}
    merged = [
        a if shared.get(i, False) else fold(a, d)
        for i, (a, d) in enumerate(zip(operands, dims, strict=True))
        if i != 6
    ]
    merged[5:6] = flash_attention.by_cost(merged[5])
    results = primitive.bind(*merged, params=params)
    return [a.reshape(size, -1, *a.shape[1:]) for a in results], [0] * len(results)


_op = Op(
    name=OP,
    result_shapes=_shapes,
    reference=_in_lax,
    forms=(
        forms.kernel(_takes, _attributes),
        forms.decomposed(_decomposed, "an all-gather, then the attention of one device"),
    ),
    batch=_batch,
    flops=_flops,
)
_primitive = make_primitive(_op)


def _jvp(primals: Any, tangents: Any, *, params: Params) -> Any:
    """Derivatives by those of the two steps. First gradients in reverse mode do not come here,
    since _passes.py defines both passes."""
    return derivatives.jvp_of_moved(lambda *arrays: _decomposed(arrays, params), primals, tangents)


ad.primitive_jvps[_primitive] = _jvp
