"""matmul_all_reduce: one kernel for large sums, and else made of the other ops. Kernels:
cc/ops/matmul_all_reduce."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.interpreters import ad
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jax.typing import DTypeLike

from ... import _native
from ..._call import forms, plans
from ..._call.derivatives import none_if_zero, not_linear, total
from ..._call.forms import Call, Form, Op, WhyNot
from ..._call.plans import Arrays, Machine, Plan
from ..._call.primitives import make_primitive
from ..._ranks import global_arrays, meshes
from ..._ranks.meshes import AxisName
from .. import _epilogue, _lax, _norm, _recipe, _scaled, _two_level, _two_level_plan, _wire
from .._collective import Collective
from .._recipe import AnyRecipe, Format, Weight
from .._scaled import Operand, Scaled, Scales
from .._spec import Layout, OpSpec, all_ops
from ..collectives import (
    _quantized_exchange,
    _quantized_sum,
    _sum_epilogue,
    all_reduce,
    exchange,
    wire_report,
)
from . import _product, _product_plan, matmul_reduce_scatter
from .matmul import matmul, of_kernels

OP = "matmul_all_reduce"
#: The op that takes large sums that the kernel does not take.
SCATTER = "matmul_reduce_scatter"

#: The bytes of y above which the kernel sums finished tiles while it multiplies others.
MOST_BYTES = 4 << 20
#: The fewest rows for one kernel. With fewer, the product ends before it could hide any
#: communication.
FEWEST_ROWS = 32
#: On two ranks one kernel multiplies and sums FEW_ROWS rows of more than FEW_ROWS_BYTES. It sends
#: every tile to every rank; on more ranks that is more bytes than an all_reduce sends
#: (docs/experiments/0018).
FEW_ROWS = range(32, _product_plan.TILE_ROWS + 1)
FEW_ROWS_BYTES = 512 << 10
FEW_ROWS_RANKS = 2
#: The share of the heap that a call may take: half of the heap for data, whose size is a power of
#: two, and a little for their signals.
MOST_OF_HEAP = 0.51


@dataclasses.dataclass(frozen=True)
class Params:
    """A call, less its operands: x, w, with `scales` those of x's rows and of w's columns
    (`_scaled.of_rows`, `_scaled.of_columns`), the residual if there is one, and the norm's
    factors."""

    sums: all_reduce.Params
    transpose_rhs: bool
    out_dtype: np.dtype
    precision: Any
    scales: Scales = Scales.NONE
    prepared: str | None = None

    def without_wire(self) -> Params:
        return dataclasses.replace(self, sums=dataclasses.replace(self.sums, wire=None))

    def wide(self) -> Params:
        """The product whose sums are quantised."""
        return dataclasses.replace(self, out_dtype=np.dtype(_epilogue.sum_dtype(self.out_dtype)))

    @property
    def wire(self) -> str | None:
        return self.sums.wire

    @property
    def axis_names(self) -> tuple[Any, ...]:
        return self.sums.axis_names

    @property
    def world(self) -> int:
        return self.sums.world


class Options(_product.Options, total=False):
    """Arguments on which the type of the result does not depend."""

    residual: jax.Array | None
    wire: str | None
    grad_wire: str | None


@overload
def matmul_all_reduce(
    x: jax.Array,
    w: jax.Array,
    *,
    norm: None = ...,
    quantize: None = ...,
    **options: Unpack[Options],
) -> jax.Array: ...
@overload
def matmul_all_reduce(
    x: jax.Array,
    w: jax.Array,
    *,
    norm: _norm.Norm,
    quantize: None = ...,
    **options: Unpack[Options],
) -> tuple[jax.Array, jax.Array]: ...
@overload
def matmul_all_reduce(
    x: jax.Array, w: jax.Array, *, norm: _norm.Norm, quantize: Format, **options: Unpack[Options]
) -> tuple[jax.Array, Scaled]: ...
@overload
def matmul_all_reduce(
    x: jax.Array,
    w: jax.Array,
    *,
    norm: _norm.Norm | None,
    quantize: Format | None = ...,
    **options: Unpack[Options],
) -> Any: ...
@meshes.axis_by_name
def matmul_all_reduce(
    x: Operand,
    w: Weight,
    *,
    axis_name: AxisName,
    transpose_rhs: bool = False,
    residual: jax.Array | None = None,
    norm: _norm.Norm | None = None,
    quantize: Format | None = None,
    preferred_element_type: DTypeLike | None = None,
    precision: lax.PrecisionLike = None,
    recipe: AnyRecipe | None = None,
    wire: str | None = None,
    grad_wire: str | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    x_spec: PartitionSpec | None = None,
) -> Any:
    """``psum(x @ w, axis_name)``: a row-parallel layer whose result every rank has, and what
    follows it in a transformer.

    Inside ``jax.shard_map``, per rank of N along `axis_name`::

        x [..., m, k/N]   w [k/N, n]   ->   y [..., m, n]

    Outside it, x, w and y are the global arrays [..., m, k], [k, n] and [..., m, n], and the op
    wraps itself in a ``shard_map``.

    Up to 4 MiB of y, as in decoding, it is XLA's product and :func:`jflux.all_reduce`, with the
    residual and the norm. Above, each rank sums as many rows, tile by tile while it multiplies, and
    sends every tile that is summed to all others. On GPUs that takes whole tiles of 128 rows for
    each rank, and four times y of the symmetric heap, rounded up to a power of two, which may be
    half of it (see :func:`jflux.init`). What does not fit is two calls:
    :func:`jflux.matmul_reduce_scatter`, which hides half of the communication in the product, and
    an all-gather of y's rows, which is not hidden. (If N does not divide the rows: the product and
    :func:`jflux.all_reduce`.) Where N is 2, 32 to 128 rows with more than 512 KiB of y are one
    kernel of their own, in which both ranks send each other their tiles and sum them.

    Differentiable in both modes like ``lax.psum`` of the product: under ``check_vma=True`` y does
    not vary over `axis_name`, and its gradient needs no communication.

    Args:
      x: [..., m, k/N], of any floating type.
      w: [k/N, n], or [n, k/N] with `transpose_rhs`; of x's type.
      axis_name: a mesh axis, or a tuple of them (the first one major).
      transpose_rhs: w holds the transposed weight. No copy is made.
      residual: [..., m, n] of any type, the same on all ranks of the axis: added to the sum. Of y's
        type the kernels add it before the sum is rounded; of another one XLA adds it to the rounded
        sum. y's type stays.
      norm: a :class:`jflux.RMSNorm` or :class:`jflux.LayerNorm` of y's rows, whose scale and bias
        are [n], of any type. With a product in the same kernel, rows are normalised by XLA.
      quantize: a :class:`jflux.Format`, by which the normalised rows, as y's type holds them, are
        quantised, as :func:`jflux.all_reduce` does it. There is no derivative then.
      preferred_element_type: the type of y, and of the partial products that travel; by default
        x's.
      precision: as in `lax.dot_general`; used where XLA multiplies, not by the kernels.
      recipe: a :class:`jflux.Recipe`, or a :class:`jflux.DelayedScaling`, by which x and w are
        quantised, and what gradients need; w may be already, by `Recipe.quantize_weight`.
      wire: "float8_e4m3fn" or "int8": what travels is quantised, as in :func:`jflux.all_reduce`; y
        is bfloat16, float16 or float32. It is a product, whose sums in float32 are quantised (by a
        recipe those in y's type), and that sum over ranks, or where :func:`matmul_reduce_scatter`
        has a kernel for it that and an all-gather: all have the same bits of y, which is
        rounded once, after a residual of its type. Where ranks lie on several nodes, only what
        these send each other is quantised. Below the size from which it pays the call is as
        without, which :func:`jflux.explain` says, unless ``jflux.config(always=True)``.
      grad_wire: likewise, of the sums of tangents and cotangents, which are exact by default
        (straight through).
      mesh: for global arrays; by default the ambient mesh (`jax.set_mesh`), or x's own.
      x_spec: for global arrays: how x is sharded, if other dimensions are sharded too; by default
        what its type says (explicit sharding), or not at all. The axis is added at the last
        dimension if it is not there. Operands that are sharded otherwise are brought into place
        first.

    Returns:
      y; with `norm` a pair: y, and its rows normalised, with `quantize` as a
      :class:`jflux.Scaled`.

    Raises:
      ValueError, TypeError: operands that do not fit, when the call is traced.
      NotImplementedError: when it is lowered with ``jflux.config.strict``, for one that no kernel
        takes, or that finds no room in the symmetric heap.
      jax.errors.JaxRuntimeError: a peer did not come within the deadline (see :func:`jflux.init`).

    Examples:
      >>> mesh = jax.sharding.Mesh(jax.devices(), "tp")
      >>> x, w = jnp.ones((64, 128)), jnp.ones((128, 32))
      >>> jflux.matmul_all_reduce(x, w, axis_name="tp", mesh=mesh).shape  # whole on every rank
      (64, 32)
    """
    recipe = _recipe.of_call(OP, recipe, x, w, transpose_rhs)
    x, w = _scaled.of_product(OP, x, w)
    _product.check_operands(OP, x, w, -2, "the second to last dimension")
    shape = (*x.shape[:-1], _product.columns(w, transpose_rhs))
    _sum_epilogue.check(OP, shape, residual, norm, quantize)
    if results := _sum_epilogue.quantized_after(
        matmul_all_reduce, quantize, x, w, axis_name=axis_name, transpose_rhs=transpose_rhs,
        residual=residual, norm=norm, preferred_element_type=preferred_element_type,
        precision=precision, recipe=recipe, wire=wire, grad_wire=grad_wire, mesh=mesh,
        x_spec=x_spec,
    ):  # fmt: skip
        return results
    if not meshes.is_bound(axis_name):
        return _over_global_arrays(
            matmul_all_reduce, x, w, residual, norm, quantize, mesh=mesh, x_spec=x_spec,
            axis_name=axis_name, transpose_rhs=transpose_rhs,
            preferred_element_type=preferred_element_type, precision=precision, recipe=recipe,
            wire=wire, grad_wire=grad_wire,
        )  # fmt: skip
    layout = SPEC.layout(x.ndim, transpose_rhs=transpose_rhs)
    _product.check_contraction(OP, x, w, layout, axis_name, transpose_rhs=transpose_rhs)
    out = _product.out_dtype(OP, (x, w), preferred_element_type, precision)
    _wire.check(OP, jax.ShapeDtypeStruct((), out), wire, grad_wire, what="y is")
    if recipe is not None:
        partial = matmul(
            x, w, transpose_rhs=transpose_rhs, preferred_element_type=preferred_element_type,
            precision=precision, recipe=recipe,
        )  # fmt: skip
        return all_reduce.all_reduce(
            partial, axis_name=axis_name, residual=residual, norm=norm, quantize=quantize,
            wire=wire, grad_wire=grad_wire,
        )  # fmt: skip
    no_kernel, scales, arrays = _scaled.for_kernel(x, w, transpose_rhs)
    if _product.is_for_lax(OP, axis_name, x, w, residual, no_kernel=no_kernel):
        return reference(
            x, w, axis_name=axis_name, transpose_rhs=transpose_rhs, residual=residual, norm=norm,
            quantize=quantize, preferred_element_type=preferred_element_type, precision=precision,
            wire=wire, grad_wire=grad_wire,
        )  # fmt: skip
    names = meshes.as_tuple(axis_name)
    epilogue, added = _sum_epilogue.operands(OP, names, residual, norm, quantize)
    world = meshes.axis_size(names)
    params = Params(
        sums=all_reduce.Params(names, world, None, epilogue, wire=wire, grad_wire=grad_wire),
        transpose_rhs=transpose_rhs,
        out_dtype=out,
        precision=precision,
        scales=scales,
    )
    _product.warn_if_same(OP, axis_name, "x", *arrays[:2])
    operands = _product.constant_if_whole(params.out_dtype, *arrays, *added)
    results = _over_rows(params, operands)
    if wire is not None and wire_report.is_wanted():
        exact, *_ = _over_rows(params.without_wire(), operands)
        one, weight, of_scales, _ = _split(operands, params)
        partial = of_kernels(one, weight, of_scales, params.wide())
        wire_report.note(OP, partial, wire, results[0], exact, world, (one, weight))
    return epilogue.of_call(results)


def reference(
    x: Operand,
    w: Weight,
    *,
    axis_name: AxisName,
    transpose_rhs: bool = False,
    residual: jax.Array | None = None,
    norm: _norm.Norm | None = None,
    quantize: Format | None = None,
    preferred_element_type: DTypeLike | None = None,
    precision: lax.PrecisionLike = None,
    recipe: AnyRecipe | None = None,
    wire: str | None = None,
    grad_wire: str | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    x_spec: PartitionSpec | None = None,
) -> Any:
    """``psum(x @ w)``: x [..., m, k/N], w [k/N, n] -> [..., m, n] per rank of N.

    Arguments, results and the use on global arrays are those of
    :func:`jflux.matmul_all_reduce`; partial products are rounded
    to y's type before they are summed, and the sum before a residual is added. With `wire` sums in
    float32 are quantised, at any size, and y is rounded as in :func:`jflux.matmul_all_reduce`."""
    if results := _sum_epilogue.quantized_after(
        reference, quantize, x, w, axis_name=axis_name, transpose_rhs=transpose_rhs,
        residual=residual, norm=norm, preferred_element_type=preferred_element_type,
        precision=precision, recipe=recipe, wire=wire, grad_wire=grad_wire, mesh=mesh,
        x_spec=x_spec,
    ):  # fmt: skip
        return results
    recipe = _recipe.of_call(f"reference.{OP}", recipe, x, w, transpose_rhs)
    x, w = _scaled.of_product(f"reference.{OP}", x, w)
    if not meshes.is_bound(axis_name):
        return _over_global_arrays(
            reference, x, w, residual, norm, quantize, mesh=mesh, x_spec=x_spec,
            axis_name=axis_name, transpose_rhs=transpose_rhs,
            preferred_element_type=preferred_element_type, precision=precision, recipe=recipe,
            wire=wire, grad_wire=grad_wire,
        )  # fmt: skip
    out = _product.out_dtype(OP, (x, w), preferred_element_type, precision)
    _wire.check(f"reference.{OP}", jax.ShapeDtypeStruct((), out), wire, grad_wire, what="y is")
    if recipe is not None:
        partial = matmul(
            x, w, transpose_rhs=transpose_rhs, preferred_element_type=preferred_element_type,
            precision=precision, recipe=recipe,
        )  # fmt: skip
        wide = None
    else:
        wide = None if wire is None else _epilogue.sum_dtype(out)
        of = preferred_element_type if wide is None else wide
        partial = _lax.matmul(x, w, of, precision, transpose_rhs)
    sums: dict[str, Any] = {"axis_name": axis_name, "wire": wire, "grad_wire": grad_wire}
    if wide is None:
        return all_reduce.reference(
            partial, residual=residual, norm=norm, quantize=quantize, **sums
        )
    y = all_reduce.reference(partial, **sums)
    y = _quantized_sum.rounded(y, out, [] if residual is None else [residual])
    if norm is None:
        return y
    normalised = _norm.apply(norm.name, norm.epsilon, y, *norm.factors)
    return y, normalised if quantize is None else quantize.quantize(normalised)


def _communication(ndim: int, **_: Any) -> Collective:
    return Collective("all_reduce")


def _over_global_arrays(
    op: Any,
    x: Any,
    w: Any,
    residual: Any,
    norm: Any,
    quantize: Format | None,
    *,
    mesh: Mesh | AbstractMesh | None,
    x_spec: PartitionSpec | None,
    axis_name: AxisName,
    **options: Any,
) -> Any:
    """`op` is the public function or its reference; `options` are the rest of its own."""
    product = SPEC.layout(x.ndim, **options)
    rows = {**product.rows, "residual": None, "normalised": None}
    normalised: Any = "normalised"
    if quantize is not None:
        normalised = Scaled(normalised, normalised)
    return global_arrays.over_global_arrays(
        functools.partial(op, axis_name=axis_name, quantize=quantize, **options), OP,
        {"x": x, "w": w, "residual": residual, "norm": norm},
        Layout(rows, {**product.others, "norm": None}),
        results="y" if norm is None else ("y", normalised),
        axis_name=axis_name, mesh=mesh, x_spec=x_spec, check_vma=True,
    )  # fmt: skip


def _partial(params: Params, x: jax.Array, w: jax.Array) -> jax.Array:
    return _lax.matmul(x, w, params.out_dtype, params.precision, params.transpose_rhs)


def _over_rows(params: Params, operands: Sequence[Any]) -> list[jax.Array]:
    """The primitive, of an x with any leading dimensions."""
    x, w, scales, added = _split(operands, params)
    shape = (*x.shape[:-1], _product.columns(w, params.transpose_rhs))
    count, rows = int(params.sums.epilogue.residual), _product.total_rows(x)
    x, *of_rows = (a.reshape(rows, a.shape[-1]) for a in (x, *scales[:1]))
    residual = [a.reshape(rows, shape[-1]) for a in added[:count]]
    results = _primitive.bind(x, w, *of_rows, *scales[1:], *residual, *added[count:], params=params)
    return [y.reshape(*shape[:-1], y.shape[-1]) for y in results]


def _jvp(primals: Any, tangents: Any, *, params: Params) -> Any:
    x, w, _, added = _split(primals, params)
    dx, dw, _, dadded = _split([none_if_zero(t) for t in tangents], params)
    y, *normalised = _primitive.bind(*primals, params=params)
    results = [checkpoint_name(y, _product.PRODUCT), *normalised]
    dpartial = total(
        [
            None if dx is None else _partial(params, dx, w),
            None if dw is None else _partial(params, x, dw),
        ]
    )
    of_sum = params.sums.of_derivative()
    dy = None if dpartial is None else all_reduce.bind(of_sum, dpartial)[0]
    return results, _sum_epilogue.tangents(OP, params.sums.epilogue, results[0], dy, added, dadded)


def _transpose(cotangents: Any, *operands: Any, params: Params) -> list[Any]:
    x, w, scales, added = _split(operands, params)
    ct, dadded = _sum_epilogue.transpose(OP, params.sums.epilogue, cotangents, added)
    dadded = [*(None for _ in scales), *dadded]
    wanted = [ad.is_undefined_primal(a) for a in (x, w)]
    if all(wanted):
        raise not_linear(OP, "it is linear in x and in w, not in both at once")
    if not any(wanted):
        return [None, None, *dadded]
    aval = (x if wanted[0] else w).aval
    if ct is None:
        return [*(ad.Zero(aval) if is_ else None for is_ in wanted), *dadded]
    dpartial = _lax.rounded(all_reduce.of_each(params.sums, ct, aval), aval)
    if wanted[0]:
        transposed = not params.transpose_rhs
        dx = _lax.matmul(dpartial, w, aval.dtype, params.precision, transposed)
        return [dx, None, *dadded]
    dw = _lax.weight_gradient(x, dpartial, params.transpose_rhs, aval.dtype, params.precision)
    return [None, dw, *dadded]


# ---- The primitive: x [rows, k], w, perhaps scales, and the residual [rows, n], and the norm's ---
# ---- factors -------------------------------------------------------------------------------------


def _split(operands: Sequence[Any], params: Params) -> tuple[Any, Any, list[Any], list[Any]]:
    """(x, w, scales, what is added to their sum)."""
    x, w, *rest = operands
    count = 2 if params.scales else 0
    return x, w, rest[:count], rest[count:]


def _result(arrays: Arrays, params: Params) -> list[Any]:
    x, w, *_ = arrays
    shape = (x.shape[0], _product.columns(w, params.transpose_rhs))
    return params.sums.epilogue.shapes(shape, params.out_dtype)


def _reference(arrays: Arrays, params: Params) -> list[Any]:
    x, w, scales, added = _split(arrays, params)
    if params.wire is not None:
        partial = _lax.product(x, w, scales, params.wide())
        y = _quantized_sum.quantized_sum(partial, params.axis_names, params.wire)
        return _rounded(params, y, added)
    partial = _lax.product(x, w, scales, params)
    y = Collective("all_reduce").lax(partial, params.axis_names)
    return _sum_epilogue.apply(params.sums.epilogue, y, added)


def _rounded(params: Params, y: jax.Array, added: Sequence[jax.Array]) -> list[Any]:
    """The results, of a sum in float32."""
    epilogue = params.sums.epilogue
    y = _quantized_sum.rounded(y, params.out_dtype, added[: epilogue.residual])
    rest = dataclasses.replace(epilogue, residual=False)
    return _sum_epilogue.apply(rest, y, epilogue.factors(added))


def _product_and_sum(arrays: Arrays, params: Params, plan: Plan | None = None) -> list[Any]:
    """The product, and its sum over the ranks, which has a plan of its own."""
    x, w, scales, added = _split(arrays, params)
    if params.wire is not None:
        (y,) = all_reduce.bind(
            params.sums.without_epilogue(), of_kernels(x, w, scales, params.wide())
        )
        return _rounded(params, y, added)
    return all_reduce.bind(params.sums, of_kernels(x, w, scales, params), added)


def _why_exact(call: Call, machine: Machine) -> str | None:
    ((shape, dtype), *_) = _result(call.arrays, call.params)
    y = jax.ShapeDtypeStruct(shape, dtype)
    return all_reduce.why_exact(y, call.params.sums, machine)


def _without_wire(arrays: Arrays, params: Params, plan: Plan) -> list[Any]:
    return _primitive.bind(*arrays, params=params.without_wire())


def _scattered_and_gathered(arrays: Arrays, params: Params, plan: Plan) -> list[Any]:
    """The sum scattered, with the residual's rows, and gathered again."""
    x, w, scales, added = _split(arrays, params)
    if scales:
        of_rows, of_columns = scales
        x, w = _scaled.as_operands(x, w, of_rows, of_columns, params.transpose_rhs)
    names, rows = params.axis_names, x.shape[0] // params.world
    epilogue = params.sums.epilogue
    own = None
    if epilogue.residual:
        own = lax.dynamic_slice_in_dim(added[0], lax.axis_index(names) * rows, rows)
    scatter = all_ops()[SCATTER].function
    y = scatter(
        x, w, axis_name=names, residual=own, transpose_rhs=params.transpose_rhs,
        preferred_element_type=params.out_dtype, precision=params.precision,
    )  # fmt: skip
    rest = dataclasses.replace(epilogue, residual=False)
    return _sum_epilogue.apply(rest, exchange.gather_for_all(y, names), epilogue.factors(added))


def _scatter_of(arrays: Arrays, params: Params) -> tuple[Arrays, matmul_reduce_scatter.Params]:
    """The scatter of a sum that travels in a wire, in float32."""
    x, w, scales, _ = _split(arrays, params)
    return (x, w, *scales), matmul_reduce_scatter.Params(
        axis_names=params.axis_names,
        world=params.world,
        scatter_dimension=0,
        transpose_rhs=params.transpose_rhs,
        out_dtype=np.dtype(np.float32),
        precision=params.precision,
        scales=params.scales,
        wire=params.wire,
    )


def _takes_quantized(call: Call, machine: Machine) -> Plan | WhyNot | None:
    """A large sum with a wire is scattered in the product, which hides half of it."""
    arrays, params = call.arrays, call.params
    if params.wire is None or call.levels is not None or _why_exact(call, machine):
        return None
    rows, world = arrays[0].shape[0], params.world
    if rows % world != 0:
        return WhyNot(f"the {world} ranks do not divide {rows} rows")
    found = matmul_reduce_scatter.plan_with_wire(*_scatter_of(arrays, params), machine)
    if not isinstance(found, Plan):
        return found
    return plans.decomposed(f"scattered in the product, and gathered, in {params.wire}")


def _quantized_halves(arrays: Arrays, params: Params, plan: Plan) -> list[Any]:
    *_, added = _split(arrays, params)
    y = matmul_reduce_scatter.bind(*_scatter_of(arrays, params))
    names = params.axis_names
    to = "invarying" if meshes.tracks_vma(names) else "varying"
    way = _quantized_exchange.Way(names, None, to, params.wire)
    gathered = _quantized_exchange.gathered(y, way)
    return _rounded(params, gathered.reshape(-1, y.shape[-1]), added)


def _plan_two_level(call: Call, machine: Machine) -> Plan | WhyNot:
    (x, w, *_), params, levels = call.arrays, call.params, call.levels
    assert levels is not None
    if params.scales:
        return WhyNot(f"{levels}; with scales a product and an all_reduce take it")
    rows, columns = x.shape[0], _product.columns(w, params.transpose_rhs)
    nbytes = rows * columns * params.out_dtype.itemsize
    if nbytes <= MOST_BYTES:
        return WhyNot(
            f"{levels}; y has {nbytes} bytes: up to {MOST_BYTES} a product and an all_reduce are "
            "faster"
        )
    if rows % levels.local != 0:
        return WhyNot(f"{levels}; the ranks of one do not divide {rows} rows")
    why = _product.kernel_takes(x, w, params.out_dtype, levels.local, machine.platform)
    if why and levels.local > 1:
        return WhyNot(why)  # the sum may still be a kernel's
    step = _two_level_plan.Step(
        rows=rows,
        flops=2.0 * rows * x.shape[1] * columns,
        nbytes=2 * (levels.count - 1) / levels.count * nbytes / levels.local,
        divided=rows // levels.local,
        own=False,
    )
    return _two_level_plan.plan_product(step, params, levels)


def _two_level_form(arrays: Arrays, params: Params, plan: Plan) -> list[Any]:
    """A call over two levels, in three steps for each chunk of rows. Each node reduce-scatters its
    product, ranks with the same place on all nodes sum their rows, and each node gathers the sums.
    While one chunk travels between nodes, the next one is multiplied."""
    x, w, *added = arrays
    levels = _two_level_plan.levels_of(plan)
    epilogue, names, local = params.sums.epilogue, (levels.inside,), levels.local
    chunks, transfers = plan.config["chunks"], _two_level.Transfers(levels, params.wire)
    scatter = all_ops()[SCATTER].call
    gathered = []
    for chunk in range(chunks):
        rows = _two_level.chunk_of(x, 0, local, chunk, chunks)
        part = scatter(
            (rows,), (w,), axis_names=names, world=local, dimension=0,
            transpose_rhs=params.transpose_rhs, dtype=params.out_dtype, precision=params.precision,
        )  # fmt: skip
        residual = [
            _two_level.own_block(_two_level.chunk_of(a, 0, local, chunk, chunks), levels).ravel()
            for a in added[: epilogue.residual]
        ]
        total = transfers.sum(part.ravel(), residual).reshape(part.shape)
        y = exchange.bind("all_gather", total, names, local, None, 0)
        gathered.append(_two_level.divide(y, 0, local))
    y = _two_level.merge(jnp.concatenate(gathered, 1), 0)
    rest = dataclasses.replace(epilogue, residual=False)
    return _sum_epilogue.apply(rest, y, epilogue.factors(added))


def are_few_rows(rows: int, columns: int, world: int) -> bool:
    """Whether one kernel multiplies and sums a y of a 16-bit type (see `FEW_ROWS`)."""
    return rows in FEW_ROWS and rows * columns * 2 > FEW_ROWS_BYTES and world == FEW_ROWS_RANKS


def _is_large(rows: int, columns: int, dtype: np.dtype) -> bool:
    return rows * columns * dtype.itemsize > MOST_BYTES


def is_one_call(shape: tuple[int, ...], dtypes: Sequence[Any], world: int) -> bool:
    """Whether one call can multiply and sum a y of this shape. `dtypes` are those of x, w and y."""
    rows, columns = int(np.prod(shape[:-1])), shape[-1]
    of_x, of_w, of_y = (np.dtype(d) for d in dtypes)
    large = _is_large(rows, columns, of_y)
    fits = _native.why_not_dtypes(OP, "cuda", of_x, of_y, w=of_w) is None
    return (large or fits and are_few_rows(rows, columns, world)) and rows % world == 0


def _sizes(arrays: Arrays, params: Params) -> _product_plan.Sizes:
    x, w, *_ = arrays
    return _product_plan.Sizes(
        op=OP,
        world=params.world,
        outer=1,
        inner=x.shape[0] // params.world,
        k=x.shape[1],
        n=_product.columns(w, params.transpose_rhs),
        dtype=x.dtype,
        out_dtype=params.out_dtype,
        transpose_rhs=params.transpose_rhs or _product_plan.is_k_major(x.dtype),  # `_canonical`
        w_dtype=None if w.dtype == x.dtype else w.dtype,
        scales=params.scales,
    )


def _why_two_ops(call: Call, machine: Machine) -> WhyNot | None:
    """Why a product and an all_reduce take the call, whatever the kernel takes; or None."""
    (x, w, *_), params = call.arrays, call.params
    rows, columns = x.shape[0], _product.columns(w, params.transpose_rhs)
    out, world = params.out_dtype, params.world
    if why := _product.kernel_takes(x, w, out, world, machine.platform, SCATTER):
        return WhyNot(why)  # the sum may still be a kernel's
    if not is_one_call((rows, columns), (x.dtype, w.dtype, out), world):
        size = rows * columns * out.itemsize
        if size <= MOST_BYTES:
            return WhyNot(
                f"y has {size} bytes; up to {MOST_BYTES} a product and an all_reduce are faster"
            )
        return WhyNot(
            f"the {world} ranks do not divide {rows} rows; each sums as many in the kernel"
        )
    return _product_plan.why_slower(
        machine,
        lambda: _product_plan.why_decomposed(rows, machine, fewest=FEWEST_ROWS),
        _product_plan.tuned_for(_sizes(call.arrays, params), machine),
        _product_plan.why_kernel(params),
    )


def _plan_kernel(call: Call, machine: Machine) -> Plan | WhyNot:
    """The kernel's plan of a call that is no two ops. The GPU kernel takes whole vectors, one tile
    of rows or whole ones for each rank."""
    (x, w, *_), params = call.arrays, call.params
    sizes = _sizes(call.arrays, params)
    rows, vector = sizes.rows, _product_plan.vector(sizes.dtype)
    if machine.on_gpus:
        out, world = params.out_dtype, params.world
        why = _product.kernel_takes(x, w, out, world, machine.platform, OP)
        if why := why or _product.why_not_8_bits(call.arrays, params, machine):
            return WhyNot(why)
        if sizes.k % vector or sizes.n % vector:
            return WhyNot(
                f"k={sizes.k} and n={sizes.n} must be multiples of {vector} for the GPU kernel"
            )
        if not are_few_rows(rows, sizes.n, sizes.world) and sizes.inner % _product_plan.TILE_ROWS:
            return WhyNot(
                f"{sizes.inner} rows of a rank are no whole tiles of {_product_plan.TILE_ROWS}"
            )
    plan = _product_plan.plan_kernel(
        sizes,
        machine,
        _product_plan.tuned_for(sizes, machine),
        _product_plan.why_kernel(call.params),
    )
    if machine.on_gpus and plan.workspace_bytes > machine.heap_bytes * MOST_OF_HEAP:
        return WhyNot(machine.why_no_room("the kernel would take", plan.workspace_bytes, "half"))
    return plan


def _takes(call: Call, machine: Machine) -> Plan | WhyNot:
    return _why_two_ops(call, machine) or _plan_kernel(call, machine)


def _takes_scattered(call: Call, machine: Machine) -> Plan | None:
    """A large sum that only the kernel does not take is scattered in the product and then gathered,
    which hides half of it."""
    if call.levels is not None or _why_two_ops(call, machine):
        return None
    sizes = _sizes(call.arrays, call.params)
    if not _is_large(sizes.rows, sizes.n, sizes.out_dtype):
        return None
    if _product.why_not_scaled(call.arrays, call.params, machine):
        return None
    if isinstance(_plan_kernel(call, machine), Plan):
        return None
    return dataclasses.replace(plans.decomposed(""), config={"scattered": 1})


def _canonical(arrays: Arrays, params: Params, machine: Machine) -> Any:
    x, _, _, added = _split(arrays, params)
    epilogue = params.sums.epilogue
    if machine.on_gpus and not params.transpose_rhs and _product_plan.is_k_major(x.dtype):

        def transposed(x: Any, w: Any, *rest: Any) -> list[Any]:
            turned = dataclasses.replace(params, transpose_rhs=True)
            turned = _product.also_prepared(turned, _product.K_MAJOR)
            return _primitive.bind(x, w.T, *rest, params=turned)

        return transposed
    foreign = epilogue.residual and added[0].dtype != params.out_dtype
    if epilogue.norm is None and not foreign:
        return None

    def after_the_kernel(*operands: Any) -> list[Any]:
        x, w, scales, added = _split(operands, params)
        in_kernel = _sum_epilogue.SumEpilogue(residual=epilogue.residual and not foreign)
        simple = _product.also_prepared(
            dataclasses.replace(params, sums=dataclasses.replace(params.sums, epilogue=in_kernel)),
            "XLA normalises the rows, or adds a residual of another type, after it",
        )
        (y,) = _primitive.bind(x, w, *scales, *added[: in_kernel.residual], params=simple)
        rest = dataclasses.replace(epilogue, residual=foreign)
        return _sum_epilogue.apply(rest, y, added if foreign else epilogue.factors(added))

    return after_the_kernel


def _attributes(arrays: Arrays, params: Params, plan: Plan) -> dict[str, Any]:
    scales = np.int64(params.scales)
    return {"scales": scales, **_product_plan.attributes(_sizes(arrays, params), plan)}


def _flops(arrays: Arrays, params: Params) -> int:
    x, w, *_ = arrays
    return _product.flops(x, w, params.transpose_rhs)


def _batch(primitive: Any, operands: Any, dims: Any, *, params: Params) -> Any:
    results = len(params.sums.epilogue.shapes((1, 1), params.out_dtype))

    def together(*operands: Any) -> list[Any]:
        return _product_and_sum(operands, params)

    # A block of a wire has elements of one call of the batch only.
    if params.scales or not params.sums.is_exact:
        return jax.vmap(together, in_axes=tuple(dims))(*operands), [0] * results
    bind = functools.partial(primitive.bind, params=params)
    x, w, *added = operands
    count = int(params.sums.epilogue.residual)
    rows_dims, factor_dims = (dims[0], *dims[2 : 2 + count]), dims[2 + count :]
    if dims[1] is not None or any(d is not None for d in factor_dims):
        # One sum of a whole batch is better than many, where tiles are not summed one by one.
        shapes = [
            tuple(size for i, size in enumerate(a.shape) if i != d)
            for a, d in zip((x, w), dims, strict=False)
        ]
        columns = shapes[1][_product.columns_axis(params.transpose_rhs)]
        types = (x.dtype, w.dtype, params.out_dtype)
        if is_one_call((shapes[0][0], columns), types, params.world):
            return _product.batch_one_by_one(bind, operands, dims)
        return jax.vmap(together, in_axes=tuple(dims))(*operands), [0] * results
    # Rows of the batch are rows of one larger call.
    rows = [x, *added[:count]]
    size = next(a.shape[d] for a, d in zip(rows, rows_dims, strict=True) if d is not None)
    rows = [
        jnp.broadcast_to(a, (size, *a.shape)) if d is None else jnp.moveaxis(a, d, 0)
        for a, d in zip(rows, rows_dims, strict=True)
    ]
    lead = rows[0].shape[:-1]
    x, *residual = (a.reshape(_product.total_rows(a), a.shape[-1]) for a in rows)
    ys = bind(x, w, *residual, *added[count:])
    return [y.reshape(*lead, y.shape[-1]) for y in ys], [0] * results


_op = Op(
    name=OP,
    result_shapes=_result,
    reference=_reference,
    forms=(
        Form(_takes_quantized, _quantized_halves),
        _quantized_exchange.form(
            _why_exact,
            "a product in float32, and an all_reduce",
            _without_wire,
            _product_and_sum,
            _takes_quantized,
        ),  # fmt: skip
        forms.kernel(_takes, _attributes, canonical=_canonical),
        Form(_two_level_plan.over_nodes(_plan_two_level), _two_level_form),
        Form(_takes_scattered, _scattered_and_gathered),
        forms.decomposed(_product_and_sum),
    ),
    batch=_batch,
    flops=_flops,
    varying=lambda params: 4 if params.scales else 2,
    same_over=lambda params: params.axis_names,
)


def _make(op: Op) -> Any:
    primitive = make_primitive(op)
    ad.primitive_jvps[primitive] = _jvp
    ad.primitive_transposes[primitive] = _transpose
    return primitive


_primitive = _make(_op)

SPEC = OpSpec(
    name=OP,
    function=matmul_all_reduce,
    reference=reference,
    communication=_communication,
    product="before",
    dtypes=_product.DTYPES,
    gradient=("all_reduce",),
    tuned=True,
    # Table 2 of the Flux paper, and what Llama-2 70B and Llama-3 8B have behind attention and MLP.
    sizes=(
        *((m, 12288, 49152) for m in (16, 64, 128, 512, 1024, 2048, 4096, 8192)),
        *((m, 8192, k) for k in (8192, 28672) for m in (64, 128, 512, 2048, 8192)),
        *((m, 4096, k) for k in (4096, 14336) for m in (2048, 8192)),
    ),
)
SPECS = (SPEC,)
