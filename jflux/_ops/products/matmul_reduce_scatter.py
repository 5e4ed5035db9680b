"""matmul_reduce_scatter: wrapper, gradients, and how it lowers. Kernels:
cc/ops/matmul_reduce_scatter."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jax.typing import DTypeLike

from ... import _native
from ..._call import forms, gpu_code, plans
from ..._call.derivatives import Derivatives, differentiate, not_linear, spread
from ..._call.forms import TRACED, Call, Op, WhyNot
from ..._call.plans import Arrays, Machine, Plan
from ..._call.primitives import make_primitive
from ..._ranks import global_arrays, meshes
from ..._ranks.meshes import AxisName
from ..._ranks.node_levels import Levels
from .. import _epilogue, _lax, _recipe, _scaled, _two_level, _two_level_plan, _wire
from .._collective import Collective, axis
from .._lax import several
from .._recipe import AnyRecipe, Weight
from .._scaled import Operand, Scaled, Scales
from .._spec import Layout, OpSpec, all_ops
from ..collectives import _quantized_exchange, exchange, wire_report
from . import _by_recipe, _product, _product_plan
from .all_gather_matmul import GATHERED
from .matmul import of_kernels

OP = "matmul_reduce_scatter"

#: The fewest rows of all ranks for one kernel. With fewer, the product ends before it could hide
#: any communication.
FEWEST_ROWS = 64


@dataclasses.dataclass(frozen=True)
class Params:
    """A call, less its operands.

    Attributes:
      added: which of ("bias", "residual") are added to what is scattered, in this order.
      scales: of a rank's product: the last two operands are that of x's rows and that
        of w's columns (`_scaled.of_rows`, `_scaled.of_columns`).
      wire, grad_wire: formats that data travel in, and those of derivatives; None: as they are.
    """

    axis_names: tuple[Any, ...]
    world: int
    scatter_dimension: int
    transpose_rhs: bool
    out_dtype: np.dtype
    precision: Any = None
    added: tuple[str, ...] = ()
    scales: Scales = Scales.NONE
    prepared: str | None = None
    wire: str | None = None
    grad_wire: str | None = None

    def without_wire(self) -> Params:
        return dataclasses.replace(self, wire=None)


@meshes.axis_by_name
def matmul_reduce_scatter(
    x: Operand | Sequence[Operand],
    w: Weight | Sequence[Weight],
    *,
    axis_name: AxisName,
    scatter_dimension: int = -2,
    transpose_rhs: bool = False,
    bias: jax.Array | None = None,
    residual: jax.Array | None = None,
    preferred_element_type: DTypeLike | None = None,
    precision: lax.PrecisionLike = None,
    recipe: AnyRecipe | None = None,
    wire: str | None = None,
    grad_wire: str | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    x_spec: PartitionSpec | None = None,
) -> jax.Array:
    """``psum_scatter(x @ w, axis_name)``, with the reduction hidden in the product.

    Inside ``jax.shard_map``, per rank of N along `axis_name`::

        x [..., m, k/N]   w [k/N, n]   ->   y [..., m/N, n]

    means what :func:`jflux.reference.matmul_reduce_scatter` means. The sum of several products is
    scattered once: with x and w tuples, it is ``psum_scatter(sum_i x_i @ w_i)`` (attention and MLP
    side by side in one block). This is the second half of a
    tensor-parallel layer with sequence-parallel activations (Flux, arXiv 2406.06858, section 3:
    GEMM + ReduceScatter). Peers' partial products travel in y's type and are summed in float32
    (float64 for float64) in a fixed order, so that every run gives the same bits: in rank order on
    the CPU, a rank's own unrounded part first and then the others in rank order on GPUs. There,
    below 64 rows in all, from 129 to 511 (but for 256 on two ranks), and where a few rows beyond
    whole tiles of 256 cost more than the scatter, it is XLA's product and
    :func:`jflux.reduce_scatter`, which are faster; all parts are rounded then, and summed in rank
    order up to 64 MiB (more than two ranks: 32 MiB), and above in that of `lax.psum_scatter`. With
    ``jflux.config(always=True)`` it is the kernel.

    `bias` and `residual` are added to what has been scattered, in float32 (float64 for float64). On
    GPUs the kernel does it, before it rounds y, if the residual is of y's type; else XLA, after it.

    Outside ``shard_map`` it takes global arrays, x [..., m, k] sharded over `axis_name` in its last
    dimension and w [k, n] in its first, and wraps itself in ``shard_map``.

    Differentiable in both modes, to any order: dx is one :func:`jflux.all_gather_matmul`, which
    also gathers dy for dw.

    Args:
      x: [..., m, k/N]; float16, bfloat16, float32 or float64 (CPU), float16, bfloat16,
        float8_e4m3fn, float8_e5m2 or int8 (GPU). Other types take the reference.
        Or a tuple or list of such that differ in k only.
      w: [k/N, n], or [n, k/N] with `transpose_rhs`; of x's type. As many as x.
      axis_name: a mesh axis, or a tuple of them (the first one major).
      scatter_dimension: which of x's leading dimensions to scatter; the second to last by default.
      transpose_rhs: w holds the transposed weight. No copy is made.
      bias: [n], the same on all ranks, added once; of any type. Like every operand that ranks
        share, its gradient is the sum of theirs, which ``check_vma=True`` sees to.
      residual: [..., m/N, n], this rank's, added to y; of any type.
      preferred_element_type: the type of y; by default x's.
      precision: as in `lax.dot_general`; used where XLA multiplies, not by the kernels. Of 8-bit
        floats "highest" leaves out kernels that sum with fewer bits.
      recipe: a :class:`jflux.Recipe`, or a :class:`jflux.DelayedScaling`, by which x and w are
        quantised, and what gradients need; w may be already, by `Recipe.quantize_weight`.
      wire: "float8_e4m3fn" or "int8": what travels is quantised, as in
        :func:`jflux.reduce_scatter`; y is bfloat16, float16 or float32. Sums in float32 are
        quantised: the others' parts are added as they were quantised, the rank's own as it is, with
        `bias` and `residual`, and y is rounded once. The kernel does it where n is a multiple of
        128: on Hopper's GPUs of at least 256 rows of a rank, and operands of 16 bits or
        float8_e4m3fn, on others of any rows, and operands of 16 bits, int8 or (from 8.9 on) float8;
        else it is a product and that exchange, of which nothing is hidden. Where ranks lie on
        several nodes, nodes sum as without a wire, and what they send each other is quantised alone
        (of operands with scales all parts). In Hopper's kernel a ratio is x times the scale's
        reciprocal, and products are joined with sums: values are within a step of the definition's.
        With less than 3 MiB that reach a rank the call is as without, which :func:`jflux.explain`
        says, unless ``jflux.config(always=True)``.
      grad_wire: likewise, of what derivatives send, which is exact by default (straight through):
        of the dy that is gathered, and of tangents. By a recipe dy travels in 8 bits anyway.
      mesh: for global arrays; by default the ambient mesh (`jax.set_mesh`), or x's own.
      x_spec: for global arrays: how x is sharded, if other dimensions are sharded too; by default
        what its type says (explicit sharding), or not at all. The axis is added at the last
        dimension if it is not there. Operands that are sharded otherwise are brought into place
        first.

    Returns:
      y, this rank's rows of the sum over ranks. Differentiated, dy of another type than x's is
      rounded to it.

    Raises:
      ValueError, TypeError: operands that do not fit, when the call is traced; also for a scatter
        dimension that the ranks do not divide, as in `lax.psum_scatter`.
      NotImplementedError: when it is lowered with ``jflux.config.strict``, for one that no kernel
        takes, or that finds no room in the symmetric heap.
      jax.errors.JaxRuntimeError: a peer did not come within the deadline (see :func:`jflux.init`).

    Examples:
      >>> mesh = jax.sharding.Mesh(jax.devices(), "tp")
      >>> x, w = jnp.ones((64, 128)), jnp.ones((128, 32))
      >>> jflux.matmul_reduce_scatter(x, w, axis_name="tp", mesh=mesh).shape  # split by rows
      (64, 32)
    """
    recipe = _recipe.of_call(OP, recipe, x, w, transpose_rhs)
    x, w = _scaled.of_product(OP, x, w)
    xs, ws = several(x), several(w)
    if len(xs) != len(ws) or not xs:
        raise ValueError(
            "jflux.matmul_reduce_scatter: x and w must be equally many, got "
            f"{len(xs)} and {len(ws)}"
        )
    for one, weight in zip(xs, ws, strict=True):
        dimension = _product.check_operands(OP, one, weight, scatter_dimension, "scatter_dimension")
        _check_terms(xs[0], ws[0], one, weight, transpose_rhs)
    if not meshes.is_bound(axis_name):
        return _over_global_arrays(
            matmul_reduce_scatter, x, w, bias, residual, mesh=mesh, x_spec=x_spec,
            axis_name=axis_name, scatter_dimension=dimension, transpose_rhs=transpose_rhs,
            preferred_element_type=preferred_element_type, precision=precision, recipe=recipe,
            wire=wire, grad_wire=grad_wire,
        )  # fmt: skip
    layout = SPEC.layout(xs[0].ndim, scatter_dimension=dimension, transpose_rhs=transpose_rhs)
    for one, weight in zip(xs, ws, strict=True):
        _product.check_contraction(OP, one, weight, layout, axis_name, transpose_rhs=transpose_rhs)
    world = meshes.axis_size(axis_name)
    if xs[0].shape[dimension] % world != 0:
        raise ValueError(
            f"jflux.matmul_reduce_scatter: x has {xs[0].shape[dimension]} rows in its "
            f"scatter_dimension={dimension}, which the {world} ranks of {axis_name=} do not "
            f"divide; x has shape {xs[0].shape}"
        )
    out = _product.out_dtype(OP, (*xs, *ws), preferred_element_type, precision)
    _wire.check(OP, jax.ShapeDtypeStruct((), out), wire, grad_wire, what="y is")
    if recipe is not None:
        shape = [*xs[0].shape[:-1], _product.columns(ws[0], transpose_rhs)]
        shape[dimension] //= world
        _epilogue.check_added(OP, shape, bias, residual)
        return _by_recipe.product(
            OP, x, w, recipe=recipe, axis_name=axis_name, scatter_dimension=dimension,
            transpose_rhs=transpose_rhs, bias=bias, residual=residual, out=out, precision=precision,
            wire=wire,
        )  # fmt: skip
    no_kernel, scales = None, Scales.NONE
    if isinstance(xs[0], Scaled):
        constants = _scaled.constants(*xs, *ws)
        xs, ws = constants[: len(xs)], constants[len(xs) :]
        no_kernel, scales = _of_terms(xs, ws, transpose_rhs, precision)
    if _product.is_for_lax(OP, axis_name, *xs, *ws, bias, residual, no_kernel=no_kernel):
        return reference(
            x, w, axis_name=axis_name, scatter_dimension=dimension, transpose_rhs=transpose_rhs,
            bias=bias, residual=residual, preferred_element_type=preferred_element_type,
            precision=precision, wire=wire, grad_wire=grad_wire,
        )  # fmt: skip
    if bias is not None:  # its gradient is summed over ranks in this type
        bias = jnp.asarray(bias).astype(_epilogue.sum_dtype(out))
    given = {"bias": bias, "residual": residual}
    added = [a for a in given.values() if a is not None]
    if scales:
        of_rows = [_scaled.of_rows(one, scales) for one in xs]
        of_columns = [_scaled.of_columns(one, transpose_rhs, scales) for one in ws]
        # By blocks of k, over all terms.
        added += [jnp.concatenate(a, -1) if len(a) > 1 else a[0] for a in (of_rows, of_columns)]
        xs, ws = tuple(one.values for one in xs), tuple(one.values for one in ws)
    for one, weight in zip(xs, ws, strict=True):
        _product.warn_if_same(OP, axis_name, "x", one, weight)
    params = Params(
        added=tuple(name for name, a in given.items() if a is not None),
        scales=scales,
        axis_names=meshes.as_tuple(axis_name),
        world=world,
        scatter_dimension=dimension,
        transpose_rhs=transpose_rhs,
        out_dtype=out,
        precision=precision,
        wire=wire,
        grad_wire=grad_wire,
    )
    ((shape, _),) = _result_shapes((*xs, *ws, *added), params)
    _epilogue.check_added(OP, shape, bias, residual)
    terms = [(x, w) for x, w in zip(xs, ws, strict=True) if 0 not in x.shape and 0 not in w.shape]
    if not terms:
        zeros = _product.zeros(shape, out, *xs, *ws, over=axis_name)
        return _epilogue.add(zeros, added[: len(params.added)])
    xs, ws = zip(*terms, strict=True)
    operands = (*xs, *ws, *added)
    (y,) = _primitive.bind(*operands, params=params)
    if wire is not None and wire_report.is_wanted():
        partial = _wide_product(operands, params)
        (exact,) = _primitive.bind(*operands, params=params.without_wire())
        wire_report.note(OP, partial, wire, y, exact, world, (*xs, *ws))
    return y


def reference(
    x: Operand | Sequence[Operand],
    w: Weight | Sequence[Weight],
    *,
    axis_name: AxisName,
    scatter_dimension: int = -2,
    transpose_rhs: bool = False,
    bias: jax.Array | None = None,
    residual: jax.Array | None = None,
    preferred_element_type: DTypeLike | None = None,
    precision: lax.PrecisionLike = None,
    recipe: AnyRecipe | None = None,
    wire: str | None = None,
    grad_wire: str | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    x_spec: PartitionSpec | None = None,
) -> jax.Array:
    """``psum_scatter(x @ w)``: x [..., m, k/N], w [k/N, n] -> [..., m/N, n] per rank of N.

    Arguments, results and the use on global arrays are those of
    :func:`jflux.matmul_reduce_scatter`; any type that `lax.dot_general` takes will do, and partial
    products are rounded to y's type before they are summed. With `wire` sums in float32 are
    quantised, at any size. Errors are `lax`'s.
    """
    recipe = _recipe.of_call(f"reference.{OP}", recipe, x, w, transpose_rhs)
    x, w = _scaled.of_product(f"reference.{OP}", x, w)
    if not meshes.is_bound(axis_name):
        return _over_global_arrays(
            reference, x, w, bias, residual, mesh=mesh, x_spec=x_spec, axis_name=axis_name,
            scatter_dimension=scatter_dimension, transpose_rhs=transpose_rhs,
            preferred_element_type=preferred_element_type, precision=precision, recipe=recipe,
            wire=wire, grad_wire=grad_wire,
        )  # fmt: skip
    xs, ws = several(x), several(w)
    added = [a for a in (bias, residual) if a is not None]
    if recipe is None and wire is None and grad_wire is None:
        partial = _lax.sum_of_products(xs, ws, preferred_element_type, precision, transpose_rhs)
        y = _communication(xs[0].ndim, scatter_dimension).lax(partial, axis_name)
        return _epilogue.add(y, added)
    out = _product.out_dtype(OP, (*xs, *ws), preferred_element_type, precision)
    _wire.check(f"reference.{OP}", jax.ShapeDtypeStruct((), out), wire, grad_wire, what="y is")
    if recipe is not None:
        return _by_recipe.product(
            OP, x, w, recipe=recipe, axis_name=axis_name, bias=bias, residual=residual,
            scatter_dimension=axis(scatter_dimension, xs[0].ndim), transpose_rhs=transpose_rhs,
            out=out, precision=precision, reference=True, wire=wire,
        )  # fmt: skip
    wide = out if wire is None else _epilogue.sum_dtype(out)
    partial = _lax.sum_of_products(xs, ws, wide, precision, transpose_rhs)
    y = exchange.reduce_scatter_reference(
        partial, axis_name=axis_name, scatter_dimension=scatter_dimension, tiled=True, wire=wire,
        grad_wire=grad_wire,
    )  # fmt: skip
    return _epilogue.add(y, added).astype(out)


def _communication(ndim: int, scatter_dimension: int = -2, **_: Any) -> Collective:
    return Collective("reduce_scatter", split=axis(scatter_dimension, ndim))


def _over_global_arrays(
    op: Any,
    x: Any,
    w: Any,
    bias: Any,
    residual: Any,
    *,
    mesh: Mesh | AbstractMesh | None,
    x_spec: PartitionSpec | None,
    axis_name: AxisName,
    **options: Any,
) -> Any:
    """`op` is the public function or its reference; `options` are the rest of its own."""
    product = SPEC.layout(several(x)[0].ndim, **options)
    layout = Layout(
        {**product.rows, "residual": product.rows["y"]}, {**product.others, "bias": None}
    )
    return global_arrays.over_global_arrays(
        functools.partial(op, axis_name=axis_name, **options), OP,
        {"x": x, "w": w, "bias": bias, "residual": residual}, layout, results="y",
        axis_name=axis_name, mesh=mesh, x_spec=x_spec,
    )  # fmt: skip


def _check_terms(x: Any, w: Any, other_x: Any, other_w: Any, transpose_rhs: bool) -> None:
    """Terms of one sum must agree in everything but k."""
    n, other_n = (_product.columns(a, transpose_rhs) for a in (w, other_w))
    if x.shape[:-1] != other_x.shape[:-1] or n != other_n or x.dtype != other_x.dtype:
        raise ValueError(
            f"jflux.matmul_reduce_scatter: x {x.shape} {x.dtype} @ w {w.shape} and x "
            f"{other_x.shape} {other_x.dtype} @ w {other_w.shape} cannot be summed: all but k must "
            "be equal"
        )


def _forward(operands: Sequence[Any], params: Params) -> Any:
    xs, ws, _ = _terms(operands, params)
    (y,) = _primitive.bind(*operands, params=params)
    return [checkpoint_name(y, _product.PRODUCT)], (list(xs), list(ws))


def _tangents(kept: Any, tangents: Sequence[Any], params: Params) -> list[Any]:
    """One call: the terms of a product's tangent are terms of one sum."""
    xs, ws = kept
    dxs, dws, dadded = _terms(tangents, params)
    terms = [(dx, w) for dx, w in zip(dxs, ws, strict=True) if dx is not None]
    terms += [(x, dw) for x, dw in zip(xs, dws, strict=True) if dw is not None]
    given = {n: d for n, d in zip(params.added, dadded, strict=True) if d is not None}
    if not terms:
        ((shape, dtype),) = _result_shapes((*xs, *ws, *dadded), params)
        return [_epilogue.add(_product.zeros(shape, dtype, xs[0]), list(given.values()))]
    xs, ws = zip(*terms, strict=True)
    changed = dataclasses.replace(params, added=tuple(given), wire=params.grad_wire)
    return _primitive.bind(*xs, *ws, *given.values(), params=changed)


def _backward(
    kept: Any, cotangents: Sequence[Any], wanted: Sequence[Any], params: Params
) -> list[Any]:
    (xs, ws), (own_dy,) = kept, cotangents
    x_types, w_types, added_types = _terms(wanted, params)
    dadded = [
        None
        if a is None
        else (_epilogue.sum_of_rows(own_dy) if name == "bias" else own_dy).astype(a.dtype)
        for name, a in zip(params.added, added_types, strict=True)
    ]
    dadded += [None] * len(_scales(wanted, params))
    like = next(x for x in (*xs, *x_types) if x is not None)
    multiplied = [w for w, x in zip(ws, x_types, strict=True) if x is not None]
    gathers = any(w is not None for w in w_types)
    results = (("y",) if multiplied else ()) + (("gathered",) if gathers else ())
    if not results:
        return [*x_types, *w_types, *dadded]
    own_dy = _lax.rounded(own_dy, like)
    if params.grad_wire and not _quantized_exchange.why_exact(params.world * _bytes(own_dy)):
        way = _way(params, params.grad_wire, params.grad_wire)
        dy = exchange.quantized("all_gather", own_dy, params.scatter_dimension, way)
        turned = not params.transpose_rhs
        found = [_lax.matmul(dy, w, like.dtype, params.precision, turned) for w in multiplied]
        found += [dy] if gathers else []
    else:
        found = all_ops()["all_gather_matmul"].call(
            own_dy,
            tuple(multiplied),
            axis_names=params.axis_names,
            world=params.world,
            dimension=params.scatter_dimension,
            transpose_rhs=not params.transpose_rhs,
            dtype=like.dtype,
            precision=params.precision,
            results=results,
        )
    dxs = spread(found[: len(multiplied)], [x is not None for x in x_types])
    if not gathers:
        return [*dxs, *w_types, *dadded]
    dy = checkpoint_name(found[-1], GATHERED)
    dws = [
        None
        if w is None
        else _lax.weight_gradient(x, dy, params.transpose_rhs, w.dtype, params.precision)
        for x, w in zip(xs, w_types, strict=True)
    ]
    return [*dxs, *dws, *dadded]


def _kept(operands: Sequence[Any], params: Params) -> Any:
    xs, ws, _ = _terms(operands, params)
    if any(x is None and w is None for x, w in zip(xs, ws, strict=True)):
        raise not_linear(OP, "it is linear in x and in w, not in both at once")
    return list(xs), list(ws)


def plan_with_wire(arrays: Arrays, params: Params, machine: Machine) -> Plan | WhyNot | None:
    """The plan of a call inside a node whose kernel quantises what travels, or why it has none."""
    return _takes_wire(Call(arrays, params), machine)


def bind(arrays: Arrays, params: Params) -> jax.Array:
    """y of a planned call."""
    (y,) = _primitive.bind(*arrays, params=params)
    return y


def call(
    xs: tuple[jax.Array, ...],
    ws: tuple[jax.Array, ...],
    *,
    axis_names: tuple[Any, ...],
    world: int,
    dimension: int,
    transpose_rhs: bool,
    dtype: Any,
    precision: Any,
) -> jax.Array:
    """y, of operands that were checked; for the gradients of other ops."""
    params = Params(
        axis_names=axis_names,
        world=world,
        scatter_dimension=dimension,
        transpose_rhs=transpose_rhs,
        out_dtype=np.dtype(dtype),
        precision=precision,
    )
    (y,) = _primitive.bind(*xs, *ws, params=params)
    return y


def _terms(
    operands: Sequence[Any], params: Params
) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
    """(xs, ws, bias and residual as far as there are) of the primitive's operands."""
    count = (len(operands) - len(params.added) - len(_scales(operands, params))) // 2
    rest = operands[2 * count :]
    return operands[:count], operands[count : 2 * count], rest[: len(params.added)]


def _scales(operands: Sequence[Any], params: Params) -> Sequence[Any]:
    """Those of rows and of columns, if there are any."""
    return operands[len(operands) - 2 :] if params.scales else []


def _of_terms(
    xs: Sequence[Scaled], ws: Sequence[Scaled], transpose_rhs: bool, precision: lax.PrecisionLike
) -> tuple[str | None, Scales]:
    """Why no kernel takes the scales of these terms, or None; and their kind."""
    pairs = list(zip(xs, ws, strict=True))
    of: Any = {"transpose_rhs": transpose_rhs}
    why = next(filter(None, (_scaled.why_no_kernel(*pair, **of) for pair in pairs)), None)
    kinds = [_scaled.scales_of(*pair, **of, precision=precision) for pair in pairs]
    if why is not None or len(xs) == 1:
        return why, kinds[0]
    # A term of one block of k has one entry.
    blocks = [
        kind is Scales.OF_BLOCKS
        or (x.shape[-1] == _scaled.BLOCK and _scaled.has_column_blocks(w, transpose_rhs))
        for kind, (x, w) in zip(kinds, pairs, strict=True)
    ]
    if all(blocks) and all(x.shape[-1] % _scaled.BLOCK == 0 for x in xs):
        return None, Scales.OF_BLOCKS
    return (
        "of several terms with scales kernels take those of blocks, of whole blocks of "
        f"{_scaled.BLOCK} of k"
    ), kinds[0]


def _scaled_product(operands: Sequence[Any], params: Params) -> Any:
    """A rank's product, in y's type."""
    xs, ws, _ = _terms(operands, params)
    x, w = _lax.end_to_end(xs, ws, params.transpose_rhs)
    return _lax.product(x, w, _scales(operands, params), params)


def _wide_product(operands: Sequence[Any], params: Params) -> jax.Array:
    """A rank's product for a wire, in the type that it is summed in."""
    xs, ws, _ = _terms(operands, params)
    x, w = _lax.end_to_end(xs, ws, params.transpose_rhs)
    wide = dataclasses.replace(params, out_dtype=_epilogue.sum_dtype(params.out_dtype))
    return of_kernels(x, w, _scales(operands, params), wide)


def _way(
    params: Params, wire: str | None, grad_wire: str | None = None, is_reference: bool = False
) -> _quantized_exchange.Way:
    return _quantized_exchange.Way(
        params.axis_names, None, wire=wire, grad_wire=grad_wire, is_reference=is_reference
    )


def _quantized(arrays: Arrays, params: Params, is_reference: bool = False) -> list[Any]:
    """A product, and its sum over the ranks in a wire."""
    _, _, added = _terms(arrays, params)
    partial = _wide_product(arrays, params)
    way = _way(params, params.wire, is_reference=is_reference)
    y = exchange.quantized("reduce_scatter", partial, params.scatter_dimension, way)
    return [_epilogue.add(y, added).astype(params.out_dtype)]


def _bytes(y: Any) -> int:
    return math.prod(y.shape) * y.dtype.itemsize


def _why_exact(call: Call, machine: Machine) -> str | None:
    ((shape, dtype),) = _result_shapes(call.arrays, call.params)
    nbytes = call.params.world * _bytes(jax.ShapeDtypeStruct(shape, dtype))
    return _quantized_exchange.why_exact(nbytes)


def _in_batch(params: Params) -> Callable[..., list[Any]]:
    """One call with a wire of a batch, whose size decides."""

    def one(*operands: Any) -> list[Any]:
        if _why_exact(Call(operands, params), TRACED):
            return _without_wire(operands, params)
        return _quantized(operands, params)

    return one


def _without_wire(arrays: Arrays, params: Params, plan: Plan | None = None) -> list[Any]:
    return _primitive.bind(*arrays, params=params.without_wire())


def _result_shapes(arrays: Arrays, params: Params) -> list[Any]:
    operands = arrays
    (x, *_), (w, *_), _ = _terms(operands, params)
    shape = list(x.shape)
    shape[params.scatter_dimension] //= params.world
    return [((*shape[:-1], _product.columns(w, params.transpose_rhs)), params.out_dtype)]


def _reference(arrays: Arrays, params: Params) -> list[Any]:
    operands = arrays
    if params.wire is not None:
        return _quantized(arrays, params, is_reference=True)
    xs, ws, added = _terms(operands, params)
    if params.scales:
        partial = _scaled_product(operands, params)
    else:
        partial = _lax.sum_of_products(
            xs, ws, params.out_dtype, params.precision, params.transpose_rhs
        )
    y = _communication(partial.ndim, params.scatter_dimension).lax(partial, params.axis_names)
    return [_epilogue.add(y, added)]


def _decomposed(arrays: Arrays, params: Params, plan: Plan) -> list[Any]:
    """Products, and their sum over the ranks, which has a plan of its own."""
    if params.wire is not None:
        return _quantized(arrays, params)
    operands = arrays
    xs, ws, added = _terms(operands, params)
    if params.scales:
        partial = _scaled_product(operands, params)
    else:
        partial = _sum_of_products(xs, ws, params)
    names, world = params.axis_names, params.world
    y = exchange.bind("reduce_scatter", partial, names, world, params.scatter_dimension, None)
    return [_epilogue.add(y, added)]


def _sum_of_products(xs: Sequence[Any], ws: Sequence[Any], params: Params) -> Any:
    # Several are not put end to end: where rows are few, a copy of w takes longer than the product.
    dtype = params.out_dtype if len(xs) == 1 else _epilogue.sum_dtype(params.out_dtype)
    products = [
        _lax.matmul(x, w, dtype, params.precision, params.transpose_rhs)
        for x, w in zip(xs, ws, strict=True)
    ]
    return sum(products[1:], products[0]).astype(params.out_dtype)


def _step(arrays: Arrays, params: Params, levels: Levels) -> _two_level_plan.Step:
    """Rows for one node are multiplied, and a rank's are sent."""
    xs, ws, _ = _terms(arrays, params)
    ((shape, dtype),) = _result_shapes(arrays, params)
    rows = _product.total_rows(xs[0]) // levels.count
    return _two_level_plan.Step(
        rows=rows,
        flops=2.0 * rows * sum(x.shape[-1] for x in xs) * shape[-1],
        nbytes=math.prod(shape) * dtype.itemsize,
        divided=shape[params.scatter_dimension],
    )


def _two_level_form(arrays: Arrays, params: Params, plan: Plan) -> list[Any]:
    """A call over two levels. Each node sums its own products. Then each rank sums the results of
    the ranks with its place on all nodes."""
    if params.scales:
        return _reference(arrays, params)
    xs, ws, added = _terms(arrays, params)
    levels = _two_level_plan.levels_of(plan)
    inside = dataclasses.replace(
        params.without_wire(), axis_names=(levels.inside,), world=levels.local, added=()
    )

    def call(xs: Sequence[Any], ws: Sequence[Any]) -> Any:
        (y,) = _primitive.bind(*xs, *ws, params=inside)
        return y

    total = _two_level.product_travels(
        xs,
        ws,
        call,
        _communication(xs[0].ndim, params.scatter_dimension),
        levels,
        plan.config["chunks"],
        columns_axis=_product.columns_axis(params.transpose_rhs),
        wide=_epilogue.sum_dtype(params.out_dtype),
        wire=params.wire,
    )
    return [_epilogue.add(total, added).astype(params.out_dtype)]


def _unsupported(arrays: Arrays, params: Params, platform: str) -> str | None:
    operands = arrays
    xs, ws, _ = _terms(operands, params)
    pairs = zip(xs, ws, strict=True)
    return _product.why_no_kernel(pairs, params, platform, OP, no_float32=None)


def _sizes(arrays: Arrays, params: Params) -> _product_plan.Sizes:
    operands = arrays
    xs, ws, _ = _terms(operands, params)
    outer, inner = _product.outer_inner(xs[0].shape, params.scatter_dimension, params.world)
    return _product_plan.Sizes(
        op=OP,
        world=params.world,
        outer=outer,
        inner=inner,
        k=sum(x.shape[-1] for x in xs),
        n=_product.columns(ws[0], params.transpose_rhs),
        dtype=xs[0].dtype,
        out_dtype=params.out_dtype,
        transpose_rhs=params.transpose_rhs,
        first_k=xs[0].shape[-1],
        w_dtype=None if ws[0].dtype == xs[0].dtype else ws[0].dtype,
        scales=params.scales.in_kernels,
        wire=params.wire,
    )


def _why_decomposed(arrays: Arrays, params: Params, machine: Machine) -> str | None:
    xs, ws, _ = _terms(arrays, params)
    sizes = _sizes(arrays, params)
    if sizes.outer == 1 and sizes.rows == 2 * _product_plan.TILE_ROWS and params.world in (2, 4):
        return None  # two whole tiles: docs/experiments/0020
    return _product_plan.why_decomposed(
        sizes.rows, machine, fewest=FEWEST_ROWS, ranks=params.world, width=sizes.k,
        alignment=_product_plan.alignment(xs, ws),
    )  # fmt: skip


_forms = _product_plan.Product(
    _sizes,
    _unsupported,
    _why_decomposed,
    on_gpus=_product_plan.in_rank_order,
    why_no_kernel=_product.why_not_scaled,
    why_not_float32=_product_plan.why_not_tf32,
)


def _takes_wire(call: Call, machine: Machine) -> Plan | WhyNot | None:
    """Of the kernel whose partial products are quantised before they leave it."""
    arrays, params = call.arrays, call.params
    if params.wire is None or machine.platform != "cuda" or _why_exact(call, machine):
        return None
    _, _, added = _terms(arrays, params)
    if any(a.dtype != params.out_dtype for a in added[params.added.count("bias") :]):
        return WhyNot("the residual has another type than y")
    kernel = _product_plan.why_kernel(params)
    why_not: str | None = _unsupported(arrays, params, machine.platform)
    why_not = why_not or _product.why_not_scaled(arrays, params, machine)
    if kernel is None:
        why_not = why_not or _why_decomposed(arrays, params, machine)
    if why_not:
        return WhyNot(why_not)
    sizes = _product_plan.in_rank_order(_sizes(arrays, params))
    native = forms.native_plan(OP, sizes.native(), machine)
    if isinstance(native, WhyNot):
        return native
    words = f"parts travel in {params.wire}"
    return plans.fused(f"{words}; {kernel}" if kernel else words, native)


def _with_sums_after(*operands: Any, params: Params, prepared: str | None = None) -> list[Any]:
    """The call as one that adds nothing; that follows it."""
    xs, ws, added = _terms(operands, params)
    without = dataclasses.replace(params, added=(), prepared=prepared)
    (y,) = _primitive.bind(*xs, *ws, *_scales(operands, params), params=without)
    return [_epilogue.add(y, added)]


def _canonical(arrays: Arrays, params: Params, machine: Machine) -> Any:
    operands = arrays
    xs, ws, added = _terms(operands, params)
    n = _product.columns(ws[0], params.transpose_rhs)

    scales = _scales(operands, params)

    def bind(prepared: str, *operands: Any, **changes: Any) -> Any:
        changed = dataclasses.replace(params, **changes)
        return _primitive.bind(*operands, params=_product.also_prepared(changed, prepared))

    if params.scales is Scales.PROMOTED:
        kind = Scales.OF_BLOCKS if machine.on_gpus else Scales.OF_SUMS

        def as_kernels(*operands: Any) -> list[Any]:
            xs, ws, rest = _terms(operands, params)
            of_rows, of_columns = _scales(operands, params)
            if machine.on_gpus:
                of_rows, (of_columns,) = _scaled.repeated(of_rows, [of_columns], xs[0].shape[-1])
            changed = dataclasses.replace(params, scales=kind)
            return _primitive.bind(*xs, *ws, *rest, of_rows, of_columns, params=changed)

        return as_kernels
    if machine.on_gpus and not params.transpose_rhs and _product_plan.is_k_major(xs[0].dtype):

        def transposed(*operands: Any) -> Any:
            xs, ws, rest = _terms(operands, params)
            turned = [w.T for w in ws]
            every = (*xs, *turned, *rest, *_scales(operands, params))
            return bind(_product.K_MAJOR, *every, transpose_rhs=True)

        return transposed
    residual = dict(zip(params.added, added, strict=True)).get("residual")
    foreign = residual is not None and residual.dtype != params.out_dtype
    if added and (not machine.on_gpus or foreign):
        return functools.partial(_with_sums_after, params=params, prepared=_product.EPILOGUE_AFTER)
    portable = machine.on_gpus and machine.arch < gpu_code.HOPPER
    one_term = portable and (xs[0].dtype.itemsize == 1 or params.wire is not None)
    if len(xs) > (1 if one_term else _product.most_weights(machine.platform)):

        def end_to_end(*operands: Any) -> Any:
            xs, ws, added = _terms(operands, params)
            one_term = _lax.end_to_end(xs, ws, params.transpose_rhs)
            return bind(_product.END_TO_END, *one_term, *added, *_scales(operands, params))

        return end_to_end
    if not machine.on_gpus:
        return None
    if not _product_plan.in_vectors(xs, ws):

        def padded(*operands: Any) -> list[Any]:
            xs, ws, added = _terms(operands, params)
            wide = [_product.pad_last(a, 1, xs[0].dtype) for a in added]
            if scales:
                of_rows, of_columns = _scales(operands, params)
                if params.scales is Scales.OF_SUMS:
                    of_columns = _product.pad_last(of_columns, 1, xs[0].dtype)
                wide += [of_rows, of_columns]
            (y,) = bind(_product.PADDED, *_product.pad_to_vectors(xs, ws), *wide)
            return [y[..., :n]]

        return padded
    sizes = _sizes(operands, params)
    outer, inner = sizes.outer, sizes.inner
    if outer == 1 or inner % _product_plan.TILE_ROWS == 0:
        return None

    # A tile's rows would straddle leading indices: bring the ranks to the front.
    def rank_major(*operands: Any) -> list[Any]:
        xs, ws, added = _terms(operands, params)
        of_rows = _scales(operands, params)[:1]
        shards = [
            x.reshape(outer, params.world, inner, -1).swapaxes(0, 1).reshape(-1, x.shape[-1])
            for x in (*xs, *of_rows)
        ]
        rows = [a if a.ndim == 1 else a.reshape(-1, n) for a in added]
        shards, of_rows = shards[: len(xs)], shards[len(xs) :]
        scaled = (*of_rows, *_scales(operands, params)[1:])
        (y,) = bind(_product.RANK_MAJOR, *shards, *ws, *rows, *scaled, scatter_dimension=0)
        return [y.reshape(_result_shapes(operands, params)[0][0])]

    return rank_major


def _attributes(arrays: Arrays, params: Params, plan: Plan) -> dict[str, Any]:
    operands = arrays
    return {
        "adds_bias": "bias" in params.added,
        "adds_residual": "residual" in params.added,
        "scales": np.int64(params.scales.in_kernels),
        "wire": np.int64(-1 if params.wire is None else _native.dtype_number(params.wire)),
        **_product_plan.attributes(_sizes(operands, params), plan),
    }


def _flops(arrays: Arrays, params: Params) -> int:
    xs, ws, _ = _terms(arrays, params)
    return sum(_product.flops(x, w, params.transpose_rhs) for x, w in zip(xs, ws, strict=True))


def _batch(primitive: Any, operands: Any, dims: Any, *, params: Params) -> Any:
    if params.wire is not None:
        # A block has elements of one call of the batch only.
        return jax.vmap(_in_batch(params), in_axes=tuple(dims))(*operands), [0]
    if params.scales:
        reference = lambda *operands: _reference(operands, params)  # noqa: E731
        return jax.vmap(reference, in_axes=tuple(dims))(*operands), [0]
    if params.added:
        after = functools.partial(_with_sums_after, params=params)
        return jax.vmap(after, in_axes=tuple(dims))(*operands), [0]

    def bind(*operands: Any, shift: int = 0) -> Any:
        moved = dataclasses.replace(params, scatter_dimension=params.scatter_dimension + shift)
        return primitive.bind(*operands, params=moved)

    (xs, ws, _), (x_dims, w_dims, _) = _terms(operands, params), _terms(dims, params)
    if all(d is None for d in w_dims) and all(d is not None for d in x_dims):
        moved = [jnp.moveaxis(x, d, 0) for x, d in zip(xs, x_dims, strict=True)]
        return bind(*moved, *ws, shift=1), [0]
    if len(xs) == 1 and x_dims[0] is None:
        wide, narrow = _product.widen(ws[0], w_dims[0], params.transpose_rhs)
        (y,) = bind(xs[0], wide)
        return [narrow(y)], [y.ndim - 1]
    return _product.batch_one_by_one(bind, operands, dims)


_op = Op(
    name=OP,
    result_shapes=_result_shapes,
    reference=_reference,
    forms=(
        forms.kernel(_takes_wire, _attributes, canonical=_canonical),
        _quantized_exchange.form(
            _why_exact,
            "a product in float32, and a reduce-scatter",
            _without_wire,
            _decomposed,
            _takes_wire,
        ),  # fmt: skip
        *_two_level_plan.forms_of_product(
            _forms,
            _step,
            attributes=_attributes,
            canonical=_canonical,
            two_level=_two_level_form,
            decomposed=_decomposed,
        ),
    ),
    batch=_batch,
    flops=_flops,
)
_primitive = make_primitive(_op)
differentiate(_primitive, Derivatives(_forward, _tangents, _backward, _kept))

SPEC = OpSpec(
    name=OP,
    function=matmul_reduce_scatter,
    reference=reference,
    communication=_communication,
    product="before",
    dimension="scatter_dimension",
    dtypes=_product.dtypes(OP),
    call=call,
    gradient=("all_gather_matmul",),
    tuned=True,
    sizes=((512, 12288, 49152), (8192, 12288, 49152), (2048, 8192, 8192), (2048, 8192, 28672)),
)
SPECS = (SPEC,)
