"""grouped_matmul of operands with scales: its primitive, which has no derivatives. Kernels:
cc/ops/grouped_matmul_scaled."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._call import gpu_code, local_ops, plans
from ..._call.forms import Call, Form, Op, ShapeDtype
from ..._call.plans import Arrays, Machine, Plan
from ..._call.primitives import make_primitive
from .. import _lax, _scaled
from .._epilogue import Epilogue
from .._recipe import Format
from .._scaled import BLOCK, Scaled, Scales
from . import _grouped_primitives, _product
from ._grouped_primitives import OP

NAME = "grouped_matmul_scaled"

#: Columns of a tile of the kernels that quantise their results (cc/gpu/gemm_config.h).
_QUANTIZING_TILE = 256

#: (x, w, sizes) -> the sums of all rows' products.
Product = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class Params(_grouped_primitives.Params):
    """A call, less its operands: those of `_grouped_primitives.Params`, then the scale of x's rows,
    and that of each w's columns in all groups, as kernels take them (`_scaled.of_rows`,
    `_scaled.of_columns`). Several terms, of whole blocks of k, have one scale of rows, with the
    entries of all.

    Attributes:
      quantize: how y is quantised, if it is: by blocks of one row.
    """

    scales: Scales = Scales.OF_SUMS
    quantize: Format | None = None

    @property
    def epilogue(self) -> Epilogue:
        return dataclasses.replace(super().epilogue, scales=self.scales, quantize=self.quantize)


def check_scales(x: Scaled, ws: Sequence[Scaled], transpose_rhs: bool) -> None:
    """Raises for scales that a product of groups cannot take out of its sums."""
    k, groups = x.shape[1], ws[0].shape[0]
    blocks = -(-k // BLOCK)
    names = ["w"] if len(ws) == 1 else [f"w[{i}]" for i in range(len(ws))]
    k_of_w = 2 if transpose_rhs else 1
    each = [("x", x, 1), *((name, w, k_of_w) for name, w in zip(names, ws, strict=True))]
    for name, one, axis in each:
        shape = tuple(one.scale.shape)
        what = f"jflux.{OP}: the scale of {name} has shape {shape}, its values have {one.shape}"
        if shape[axis] not in (1, blocks):
            raise ValueError(
                f"{what}: of k it must have 1 entry or {blocks}, one for each block of {BLOCK}, "
                f"not {shape[axis]}"
            )
        if name != "x" and shape[0] not in (1, groups):
            raise ValueError(f"{what}: of groups it must have 1 entry or {groups}, not {shape[0]}")


def bind(
    x: Scaled,
    ws: Sequence[Scaled],
    sizes: jax.Array,
    row_scale: Sequence[jax.Array],
    params: _grouped_primitives.Params,
    quantize: Format | None = None,
) -> Any:
    """y, of operands that were checked. `row_scale`: it, or nothing."""
    arrays, with_scales = _arrays_and_params(x, ws, sizes, row_scale, params)
    with_scales = dataclasses.replace(with_scales, quantize=quantize)
    (y,) = with_scales.epilogue.as_scaled(primitive.bind(*arrays, params=with_scales))
    return y


def bind_terms(
    xs: Sequence[Scaled],
    ws: Sequence[Scaled],
    sizes: jax.Array,
    params: _grouped_primitives.Params,
) -> jax.Array:
    """The sum of the products of each x and its w, of operands with scales of whole blocks of k."""
    operands, call = _terms(xs, ws, sizes, params)
    return primitive.bind(*operands, params=call)[0]


def terms_in_lax(
    xs: Sequence[Scaled],
    ws: Sequence[Scaled],
    sizes: jax.Array,
    params: _grouped_primitives.Params,
) -> jax.Array:
    """:func:`bind_terms` in plain `lax`."""
    return reference(*_terms(xs, ws, sizes, params))[0]


def _terms(
    xs: Sequence[Scaled],
    ws: Sequence[Scaled],
    sizes: jax.Array,
    params: _grouped_primitives.Params,
) -> tuple[Sequence[jax.Array], Params]:
    # One block of k has one entry, and is a block nevertheless.
    of_blocks = all(w.scale.shape[1] <= -(-w.shape[1] // BLOCK) for w in ws)
    scales = Scales.OF_BLOCKS if of_blocks else Scales.OF_VECTORS
    each = [
        _arrays_and_params(x, [w], sizes, (), params, scales) for x, w in zip(xs, ws, strict=True)
    ]
    x, w, _, rows, columns = zip(*(arrays for arrays, _ in each), strict=True)
    operands = (*x, *w, sizes, jnp.concatenate(rows, 1), *columns)
    return operands, dataclasses.replace(each[0][1], terms=len(each))


def in_lax(
    x: Scaled,
    ws: Sequence[Scaled],
    sizes: jax.Array,
    row_scale: Sequence[jax.Array],
    params: _grouped_primitives.Params,
) -> jax.Array:
    """:func:`bind` in plain `lax`."""
    (y,) = reference(*_arrays_and_params(x, ws, sizes, row_scale, params))
    return y


def _arrays_and_params(
    x: Scaled,
    ws: Sequence[Scaled],
    sizes: jax.Array,
    row_scale: Sequence[jax.Array],
    params: _grouped_primitives.Params,
    scales: Scales | None = None,
) -> tuple[Sequence[jax.Array], Params]:
    """(the operands, the parameters) of a call whose scales are of this kind; None: of the one that
    they have."""
    x, *rest = _scaled.constants(x, *ws, *row_scale)
    ws, row_scale = rest[: len(ws)], rest[len(ws) :]
    if scales is None:
        of_group = [
            jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), w) for w in ws
        ]
        scales = _scaled.scales_of(x, *of_group, transpose_rhs=params.transpose_rhs)

    def of_columns(w: Scaled) -> jax.Array:
        scale = jnp.broadcast_to(w.scale, (w.shape[0], *w.scale.shape[1:]))
        of_one = functools.partial(
            _scaled.of_columns, transpose_rhs=params.transpose_rhs, scales=scales
        )
        return jax.vmap(of_one)(Scaled(w.values, scale))

    of_rows, values = _scaled.of_rows(x, scales), [w.values for w in ws]
    arrays = (x.values, *values, sizes, *row_scale, of_rows, *map(of_columns, ws))
    fields = {field.name: getattr(params, field.name) for field in dataclasses.fields(params)}
    return arrays, Params(**fields, scales=scales)


def _unpack(operands: Sequence[Any], params: Params) -> tuple[Sequence[Any], Any, Sequence[Any]]:
    """(what a call without scales has, scale of rows, scales of columns)."""
    at = len(operands) - 1 - params.weights
    return operands[:at], operands[at], operands[at + 1 :]


# ---- By products without scales ------------------------------------------------------------------


def reference(arrays: Arrays, params: Params) -> list[jax.Array]:
    """The call as `lax.ragged_dot` of values; where scales have entries of k, of each block."""
    k_of_w = 2 if params.transpose_rhs else 1
    numbers = lax.RaggedDotDimensionNumbers((((1,), (k_of_w,)), ((), ())), [0], [0])
    wanted = jnp.int32 if arrays[0].dtype == jnp.int8 else jnp.float32

    def product(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
        if x.dtype == jnp.int8:
            x, w = _scaled.in_fours(x, w, 1, k_of_w)
        return _lax.ragged_dot_general(x, w, sizes, numbers, preferred_element_type=wanted)

    return _by_products(arrays, params, product)


#: The type that holds all values of 8 bits.
_WIDE = np.dtype(jnp.bfloat16)


def _in_bfloat16(arrays: Arrays, params: Params, plan: Plan) -> list[jax.Array]:
    def product(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
        (y,) = _grouped_primitives.grouped_matmul.bind(
            x.astype(_WIDE), w.astype(_WIDE), sizes, params=_of_values(params)
        )
        return y

    return _by_products(arrays, params, product)


def _of_values(params: Params) -> _grouped_primitives.Params:
    return _grouped_primitives.Params(
        params.transpose_rhs, np.dtype(np.float32), share=params.share
    )


def _by_products(arrays: Arrays, params: Params, product: Product) -> list[jax.Array]:
    plain, of_rows, of_columns = _unpack(arrays, params)
    x, ws, sizes, scale = _grouped_primitives._unpack(plain, params)
    if params.terms > 1:
        one = dataclasses.replace(params, terms=1, out_dtype=np.dtype(np.float32))
        rows = jnp.split(of_rows, params.terms, axis=1)
        each = zip(arrays, ws, rows, of_columns, strict=False)
        terms = [_by_products((x, w, sizes, r, c), one, product)[0] for x, w, r, c in each]
        return [sum(terms[1:], terms[0]).astype(params.out_dtype)]
    ends = jnp.cumsum(sizes)
    group = jnp.searchsorted(ends, lax.iota(ends.dtype, x.shape[0]), side="right")
    group = jnp.minimum(group, sizes.shape[0] - 1)  # rows past the sum are masked
    sums = []
    for w, columns in zip(ws, of_columns, strict=True):
        total = _sums(x, w, sizes, group, of_rows, columns, params, product)
        sums.append(_grouped_primitives._masked(total, sizes))
    scale = None if scale is None else _grouped_primitives._masked(scale, sizes)
    y = _grouped_primitives._finish(sums, scale, params.epilogue, np.dtype(np.float32))
    return params.epilogue.quantized([y.astype(params.out_dtype)])


def _sums(
    x: jax.Array,
    w: jax.Array,
    sizes: jax.Array,
    group: jax.Array,
    of_rows: jax.Array,
    of_columns: jax.Array,
    params: Params,
    product: Product,
) -> jax.Array:
    """The scaled sums of all rows, in float32. `group`: of each row."""
    k_of_w = 2 if params.transpose_rhs else 1
    n = w.shape[3 - k_of_w]

    def scaled(x: jax.Array, w: jax.Array, of_rows: jax.Array, of_columns: jax.Array) -> jax.Array:
        columns = _scaled.over_elements(of_columns, 1, n)
        return product(x, w, sizes).astype(jnp.float32) * of_rows * columns[group]

    if not params.scales.has_blocks:
        return scaled(x, w, of_rows, of_columns)

    def block(i: Any, size: int = BLOCK) -> jax.Array:
        cut = functools.partial(lax.dynamic_slice_in_dim, start_index=i * BLOCK, slice_size=size)
        entry = functools.partial(lax.dynamic_slice_in_dim, start_index=i, slice_size=1)
        columns = jnp.squeeze(entry(of_columns, axis=2), 2)
        return scaled(cut(x, axis=1), cut(w, axis=k_of_w), entry(of_rows, axis=1), columns)

    # As `_scaled._matmul` does.
    k, total = x.shape[1], block(0, min(BLOCK, x.shape[1]))
    total = lax.fori_loop(1, k // BLOCK, lambda i, total: total + block(i), total)
    return total + block(k // BLOCK, k % BLOCK) if k > BLOCK and k % BLOCK else total


# ---- What the lowering asks ----------------------------------------------------------------------


def _shapes(arrays: Arrays, params: Params) -> list[ShapeDtype]:
    sums = _grouped_primitives._shapes(_unpack(arrays, params)[0], params)
    return params.epilogue.shapes(sums)


def _why_not(arrays: Arrays, params: Params, platform: str) -> str | None:
    plain, _, _ = _unpack(arrays, params)
    x, ws, sizes, _ = _grouped_primitives._unpack(plain, params)
    if why := params.epilogue.why_quantized_after(x, ws[:1], x.shape[0]):
        return why
    if params.terms > 1 and params.scales is not Scales.OF_BLOCKS:
        return "the kernel takes several terms with scales of blocks alone"
    if params.scales is Scales.OF_VECTORS:
        return f"the kernel takes blocks of {BLOCK} of k of w only for {BLOCK} columns each"
    if params.scales.has_blocks and (why := _scaled.why_no_blocks(x, *ws)):
        return why
    why = _product.kernel_takes(x, ws[0], params.out_dtype, 1, platform, NAME)
    return why or _grouped_primitives._why_not_sizes(ws[0].shape[1:], x.dtype, sizes, platform)


def _why_not_portable(arrays: Arrays, params: Params, platform: str) -> str | None:
    x, w = arrays[0], arrays[params.terms]
    arch = gpu_code.arch_wanted()
    if why := _product.why_not_portable(x.dtype, params.scales, arch):
        return why
    return params.epilogue.why_quantized_after(x, [w], x.shape[0], arch)


def _prepare(arrays: Arrays, params: Params) -> list[Any]:
    """Tensor cores take operands of 8 bits along k alone. Scales of several terms are one array."""
    xs, rest = arrays[: params.terms], arrays[params.terms :]
    ws, rest = rest[: params.weights], rest[params.weights :]
    if params.terms > 1:
        at = len(rest) - params.terms
        rest = [*rest[:at], jnp.concatenate(rest[at:], axis=2)]
    return [*xs, *(w if params.transpose_rhs else jnp.swapaxes(w, 1, 2) for w in ws), *rest]


def _attributes(arrays: Arrays, params: Params, plan: Plan) -> dict[str, Any]:
    attributes = _grouped_primitives._attributes(arrays, params, plan)
    tile = _grouped_primitives.forced_tile(params.gated, params.scales)
    if params.quantize is not None and tile.tolist()[:1] != [_QUANTIZING_TILE]:
        tile = tile[:0]
    return attributes | {
        "quantize": params.epilogue.attributes()["quantize"],
        "scales": np.int64(params.scales),
        "tile": tile,
        "transpose_rhs": True,
    }


_kernel = local_ops.kernel(
    NAME,
    why_not=_why_not,
    why_not_portable=_why_not_portable,
    attributes=_attributes,
    checked_on_gpus=True,
    on_cpus=False,
    is_optional=True,
    prepare=_prepare,
)


def _takes(call: Call, machine: Machine) -> Any:
    """As the kernel's form does, and says so if it transposes w."""
    found = _kernel.takes(call, machine)
    if isinstance(found, Plan) and not call.params.transpose_rhs:
        found = dataclasses.replace(found, reason=f"{found.reason}; w is transposed first")
    return found


def _takes_quantized(call: Call, machine: Machine) -> Plan | None:
    """Where what takes the call in float32 does not quantise."""
    if call.params.quantize is None or machine.platform == "cpu":
        return None
    return plans.decomposed("")


def _quantized_after(arrays: Arrays, params: Params, plan: Plan) -> list[jax.Array]:
    ys = primitive.bind(*arrays, params=dataclasses.replace(params, quantize=None))
    return params.epilogue.quantized(ys)


def _takes_in_bfloat16(call: Call, machine: Machine) -> Plan | None:
    """Where the kernel for operands without scales takes the values in bfloat16. int8 may have sums
    that float32 does not hold."""
    plain, _, _ = _unpack(call.arrays, call.params)
    x, ws, sizes, _ = _grouped_primitives._unpack(plain, call.params)
    if x.dtype == jnp.int8:
        return None
    types = [jax.ShapeDtypeStruct(a.shape, _WIDE) for a in (x, ws[0])]
    found = _grouped_primitives.kernel.takes(
        Call([*types, sizes], _of_values(call.params)), machine
    )
    return plans.decomposed("") if isinstance(found, Plan) else None


def _batch(primitive: Any, operands: Any, dims: Any, *, params: Params) -> Any:
    plain, _, _ = _unpack(operands, params)
    of_rows, sizes_at = len(plain), params.terms + params.weights
    in_rows = {*range(params.terms), of_rows, *([sizes_at + 1] if params.scaled else [])}
    batched = {i for i, d in enumerate(dims) if d is not None}
    if not batched <= in_rows:
        return _product.bind_one_by_one(primitive, operands, dims, params=params)
    # The batch's rows beside each other, as without scales.
    count = next(operands[i].shape[dims[i]] for i in batched)
    wide = [
        _product.interleaved(a, d, count) if i in in_rows else a
        for i, (a, d) in enumerate(zip(operands, dims, strict=True))
    ]
    wide[sizes_at] = wide[sizes_at] * count
    results = primitive.bind(*wide, params=params)
    return [r.reshape(-1, count, r.shape[1]) for r in results], [1] * len(results)


def _flops(arrays: Arrays, params: Params) -> int:
    return _grouped_primitives._flops(_unpack(arrays, params)[0], params)


primitive = make_primitive(
    Op(
        name=NAME,
        result_shapes=_shapes,
        reference=reference,
        forms=(
            dataclasses.replace(_kernel, takes=_takes),
            Form(_takes_quantized, _quantized_after, "quantised after"),
            Form(_takes_in_bfloat16, _in_bfloat16, "a product of values in bfloat16"),
        ),
        batch=_batch,
        flops=_flops,
        title=lambda params: OP,
        is_local=True,
    )
)
