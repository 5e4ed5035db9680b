"""The weight gradient of grouped_matmul in 8 bits: its primitive, which has no derivatives.
Kernels: cc/ops/grouped_matmul_dw_scaled/grouped_matmul_dw_scaled_sm90.cu."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._call import local_ops, plans
from ..._call.forms import Call, Form, Op, ShapeDtype
from ..._call.plans import Arrays, Machine, Plan
from ..._call.primitives import make_primitive
from .. import _quantize_groups
from .._quantize_groups import Transposed
from .._scaled import Scales
from . import _grouped_primitives, _product
from ._grouped_primitives import DW

NAME = "grouped_matmul_dw_scaled"


@dataclasses.dataclass(frozen=True)
class Params:
    """A call, less its operands: the values of both transposes, group_sizes, and their scales.

    Attributes:
      rows: of which the operands are transposes.
      scales: OF_VECTORS, or OF_BLOCKS, if dy is by squares; x has vectors.
    """

    out_dtype: np.dtype
    rows: int
    scales: Scales


def _call(
    x: Transposed, dy: Transposed, sizes: jax.Array, out: np.dtype, rows: int
) -> tuple[Arrays, Params]:
    scales = Scales.OF_BLOCKS if dy.has_squares else Scales.OF_VECTORS
    arrays = [x.values, dy.values, sizes, x.vectors(), dy.scale]
    return arrays, Params(np.dtype(out), rows, scales)


def bind(x: Transposed, dy: Transposed, sizes: jax.Array, out: Any, rows: int) -> jax.Array:
    """dw [groups, k, n] in this type, of transposes of so many rows."""
    arrays, params = _call(x, dy, sizes, out, rows)
    return _primitive.bind(*arrays, params=params)[0]


def in_lax(x: Transposed, dy: Transposed, sizes: jax.Array, out: Any, rows: int) -> jax.Array:
    """:func:`bind` in plain `lax`."""
    return _reference(*_call(x, dy, sizes, out, rows))[0]


def _wide(arrays: Arrays, dtype: Any) -> Arrays:
    """The operands of the same gradient without scales: rows of groups of whole blocks."""
    x, dy, sizes, x_scale, dy_scale = arrays
    rows = [Transposed(*pair).rows(dtype) for pair in ((x, x_scale), (dy, dy_scale))]
    return [*rows, _quantize_groups.padded_sizes(sizes)]


def _reference(arrays: Arrays, params: Params) -> list[jax.Array]:
    call = _grouped_primitives.DwParams(params.out_dtype)
    return _grouped_primitives._reference_dw(_wide(arrays, jnp.float32), call)


def _in_bfloat16(arrays: Arrays, params: Params, plan: Plan) -> list[jax.Array]:
    """bfloat16 holds values times powers of two."""
    call = _grouped_primitives.DwParams(params.out_dtype)
    wide = _wide(arrays, jnp.bfloat16)
    return _grouped_primitives.grouped_matmul_dw.bind(*wide, params=call)


def _shapes(arrays: Arrays, params: Params) -> list[ShapeDtype]:
    x, dy, sizes, *_ = arrays
    return [((sizes.shape[0], x.shape[0], dy.shape[0]), params.out_dtype)]


def _why_not(arrays: Arrays, params: Params, platform: str) -> str | None:
    x, dy, sizes, *_ = arrays
    why = _product.kernel_takes(x, dy, params.out_dtype, 1, platform, NAME)
    widths = (x.shape[0], dy.shape[0])
    return why or _grouped_primitives._why_not_sizes(widths, x.dtype, sizes, platform)


def _attributes(arrays: Arrays, params: Params, plan: Plan) -> dict[str, Any]:
    tile = _grouped_primitives.forced_tile(gated=False, scales=params.scales)
    return {"rows": np.int64(params.rows), "scales": np.int64(params.scales), "tile": tile}


def _takes_in_bfloat16(call: Call, machine: Machine) -> Plan | None:
    return None if machine.platform == "cpu" else plans.decomposed("")


def _batch(primitive: Any, operands: Any, dims: Any, *, params: Params) -> Any:
    bind = functools.partial(primitive.bind, params=params)
    return _product.batch_one_by_one(bind, operands, dims)


def _flops(arrays: Arrays, params: Params) -> int:
    x, dy, *_ = arrays
    return 2 * params.rows * x.shape[0] * dy.shape[0]


_primitive = make_primitive(
    Op(
        name=NAME,
        result_shapes=_shapes,
        reference=_reference,
        forms=(
            local_ops.kernel(
                NAME,
                why_not=_why_not,
                attributes=_attributes,
                checked_on_gpus=True,
                on_cpus=False,
                is_optional=True,
            ),
            Form(_takes_in_bfloat16, _in_bfloat16, "a product of values in bfloat16"),
        ),
        batch=_batch,
        flops=_flops,
        title=lambda params: DW,
        is_local=True,
    )
)
