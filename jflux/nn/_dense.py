"""Column- and row-parallel products, and MLPs of them, as functions of arrays."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Literal, Unpack, overload

import jax
from jax import lax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jax.typing import DTypeLike

from .._ops import _epilogue, _lax
from .._ops._lax import several
from .._ops._recipe import AnyRecipe, QuantizesActivation, Recipe
from .._ops._spec import Layout
from .._ops.products import _product
from .._ops.products.all_gather_matmul import all_gather_matmul
from .._ops.products.matmul import matmul
from .._ops.products.matmul_all_reduce import matmul_all_reduce
from .._ops.products.matmul_reduce_scatter import matmul_reduce_scatter
from .._ranks import global_arrays, meshes
from .._ranks.meshes import AxisName
from . import _padding


class Options(_product.Options, total=False):
    """Arguments on which the type of :func:`column_parallel`'s result does not depend."""

    sequence_parallel: bool
    bias: jax.Array | Sequence[jax.Array | None] | None
    activation: str | None


@overload
def column_parallel(
    x: jax.Array, w: jax.Array, *, gated: Literal[False] = ..., **options: Unpack[Options]
) -> jax.Array: ...
@overload
def column_parallel(
    x: jax.Array, w: Sequence[jax.Array], *, gated: Literal[True], **options: Unpack[Options]
) -> jax.Array: ...
@overload
def column_parallel(
    x: jax.Array,
    w: Sequence[jax.Array],
    *,
    gated: Literal[False] = ...,
    **options: Unpack[Options],
) -> tuple[jax.Array, ...]: ...
@overload
def column_parallel(
    x: jax.Array,
    w: jax.Array | Sequence[jax.Array],
    *,
    gated: bool = ...,
    **options: Unpack[Options],
) -> Any: ...
@meshes.axis_by_name
def column_parallel(
    x: jax.Array,
    w: jax.Array | Sequence[jax.Array],
    *,
    axis_name: AxisName,
    sequence_parallel: bool = True,
    transpose_rhs: bool = False,
    bias: jax.Array | Sequence[jax.Array | None] | None = None,
    activation: str | None = None,
    gated: bool = False,
    preferred_element_type: DTypeLike | None = None,
    precision: lax.PrecisionLike = None,
    recipe: AnyRecipe | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    x_spec: PartitionSpec | None = None,
) -> Any:
    """``x @ w`` with w split by columns: the first product of a tensor-parallel layer.

    Per rank of N along `axis_name`::

        x [..., s/N, k]   w [k, n/N]   ->   y [..., s, n/N]

    is :func:`jflux.all_gather_matmul`, whose arguments these are. With ``sequence_parallel=False``
    every rank has the whole x [..., s, k], and its product needs no communication.

    Of global arrays, a sequence that the ranks do not divide is padded with zeros, and y is cut.
    """
    options: Any = {
        "transpose_rhs": transpose_rhs, "preferred_element_type": preferred_element_type,
        "precision": precision, "activation": activation, "gated": gated, "recipe": recipe,
    }  # fmt: skip
    if sequence_parallel:
        padding = _padding.for_ranks(x, -2, w, axis_name=axis_name, mesh=mesh, x_spec=x_spec)
        y = all_gather_matmul(
            padding.pad(x), w, axis_name=axis_name, bias=bias, mesh=mesh, x_spec=x_spec, **options
        )
        return padding.cut(y)
    if meshes.is_bound(axis_name):
        return _own_columns(x, w, bias, **options)
    one_result = gated or not isinstance(w, tuple | list)
    layout = Layout(
        {"x": None, "y": x.ndim - 1}, {"w": _product.columns_axis(transpose_rhs), "bias": 0}
    )
    return global_arrays.over_global_arrays(
        functools.partial(_own_columns, **options), "nn.column_parallel",
        {"x": x, "w": w, "bias": bias}, layout, results="y" if one_result else ("y",) * len(w),
        axis_name=axis_name, mesh=mesh, x_spec=x_spec,
    )  # fmt: skip


def _own_columns(
    x: jax.Array,
    w: Any,
    bias: Any,
    *,
    activation: str | None,
    gated: bool,
    recipe: AnyRecipe | None = None,
    **options: Any,
) -> Any:
    """The product of a whole x: nothing travels."""
    if recipe is not None:
        return matmul(x, w, bias=bias, activation=activation, gated=gated, recipe=recipe, **options)
    ws = several(w)
    bias_of = _epilogue.of_each(bias, len(ws))
    epilogue = _epilogue.check("nn.column_parallel", len(ws), bias_of, activation, gated)
    ys = [_lax.matmul(x, one, **options) for one in ws]
    if epilogue is not None:
        biases = [b for b in bias_of if b is not None]
        ys, _ = _epilogue.apply(epilogue, ys, biases, ys[0].dtype)
    return tuple(ys) if isinstance(w, tuple | list) and not gated else ys[0]


@meshes.axis_by_name
def row_parallel(
    x: jax.Array,
    w: jax.Array,
    *,
    axis_name: AxisName,
    sequence_parallel: bool = True,
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
    """``x @ w`` with w split by rows: the second product of a tensor-parallel layer.

    Per rank of N along `axis_name`::

        x [..., s, k/N]   w [k/N, n]   ->   y [..., s/N, n]

    is :func:`jflux.matmul_reduce_scatter`, whose arguments these are. With
    ``sequence_parallel=False`` it is :func:`jflux.matmul_all_reduce`: every rank has the whole y
    [..., s, n].

    Of global arrays, a sequence that the ranks do not divide is padded with zeros, and y is cut.
    """
    options: Any = {
        "axis_name": axis_name, "transpose_rhs": transpose_rhs, "precision": precision,
        "preferred_element_type": preferred_element_type, "recipe": recipe, "wire": wire,
        "grad_wire": grad_wire,
    }  # fmt: skip
    if sequence_parallel:
        padding = _padding.for_ranks(x, -2, w, axis_name=axis_name, mesh=mesh, x_spec=x_spec)
        y = matmul_reduce_scatter(
            padding.pad(x), w, bias=bias, residual=padding.pad(residual), mesh=mesh, x_spec=x_spec,
            **options,
        )  # fmt: skip
        return padding.cut(y)
    sums = functools.partial(_all_reduce, **options)
    if meshes.is_bound(axis_name):
        return sums(x=x, w=w, bias=bias, residual=residual)
    rows = {"x": x.ndim - 1, "residual": None, "y": None}
    layout = Layout(rows, {"w": 1 - _product.columns_axis(transpose_rhs), "bias": None})
    return global_arrays.over_global_arrays(
        sums, "nn.row_parallel", {"x": x, "w": w, "bias": bias, "residual": residual}, layout,
        results="y", axis_name=axis_name, mesh=mesh, x_spec=x_spec,
    )  # fmt: skip


def _all_reduce(x: jax.Array, w: jax.Array, bias: Any, residual: Any, **options: Any) -> jax.Array:
    y = matmul_all_reduce(x, w, residual=residual, **options)
    return y if bias is None else _epilogue.add(y, [bias])


def _for_hidden(options: dict[str, Any]) -> dict[str, Any]:
    """The options of an MLP's first product, which by a recipe quantises what the second one takes:
    where a rank calls both, the activated array is in no memory then."""
    recipe = options.get("recipe")
    if isinstance(recipe, Recipe) and meshes.is_bound(options["axis_name"]):
        return options | {"recipe": QuantizesActivation(recipe)}
    return options


@meshes.axis_by_name
def mlp(
    x: jax.Array,
    up: jax.Array,
    down: jax.Array,
    *,
    axis_name: AxisName,
    activation: str = "gelu_tanh",
    up_bias: jax.Array | None = None,
    down_bias: jax.Array | None = None,
    residual: jax.Array | None = None,
    wire: str | None = None,
    grad_wire: str | None = None,
    **options: Any,
) -> jax.Array:
    """``activation(x @ up + up_bias) @ down + down_bias + residual``.

    Per rank of N along `axis_name`, inside ``jax.shard_map``::

        x [..., s/N, d]   up [d, h/N]   down [h/N, d]   ->   [..., s/N, d]

    One gather and one scatter of the sequence, each inside a product. Outside ``shard_map`` it
    takes global arrays, as the products do; a sequence that the ranks do not divide is padded with
    zeros there, and the result is cut.

    Args:
      activation: "gelu", "gelu_tanh", "relu" or "silu".
      up_bias: [h/N].
      down_bias: [d], the same on all ranks.
      residual: [..., s/N, d], added to the result.
      wire, grad_wire: of the second product, as in :func:`row_parallel`.
      options: `sequence_parallel`, `preferred_element_type`, `precision`, `recipe`, `mesh` and
        `x_spec`, as in :func:`column_parallel`.
    """
    if isinstance(up, tuple | list):
        raise TypeError("jflux.nn.mlp: up is one weight; jflux.nn.gated_mlp takes a gate and an up")
    options["axis_name"] = axis_name
    padding = _padding.for_ranks(x, -2, up, **options)
    hidden = column_parallel(
        padding.pad(x), up, bias=up_bias, activation=activation, **_for_hidden(options)
    )
    y = row_parallel(
        hidden, down, bias=down_bias, residual=padding.pad(residual), wire=wire,
        grad_wire=grad_wire, **options,
    )  # fmt: skip
    return padding.cut(y)


@meshes.axis_by_name
def gated_mlp(
    x: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    down: jax.Array,
    *,
    axis_name: AxisName,
    activation: str = "silu",
    gate_bias: jax.Array | None = None,
    up_bias: jax.Array | None = None,
    down_bias: jax.Array | None = None,
    residual: jax.Array | None = None,
    wire: str | None = None,
    grad_wire: str | None = None,
    **options: Any,
) -> jax.Array:
    """``(activation(x @ gate + gate_bias) * (x @ up + up_bias)) @ down + down_bias + residual``
    (GLU variants, arXiv 2002.05202).

    Shapes and arguments are those of :func:`mlp`; gate is [d, h/N] and gate_bias [h/N]. Both
    products share one gather.
    """
    options["axis_name"] = axis_name
    padding = _padding.for_ranks(x, -2, up, **options)
    hidden = column_parallel(
        padding.pad(x), (gate, up), bias=(gate_bias, up_bias), activation=activation, gated=True,
        **_for_hidden(options),
    )  # fmt: skip
    y = row_parallel(
        hidden, down, bias=down_bias, residual=padding.pad(residual), wire=wire,
        grad_wire=grad_wire, **options,
    )  # fmt: skip
    return padding.cut(y)


def any_mlp(
    x: jax.Array,
    up: jax.Array,
    up_bias: jax.Array | None,
    down: jax.Array,
    down_bias: jax.Array | None,
    gate: jax.Array | None = None,
    gate_bias: jax.Array | None = None,
    **options: Any,
) -> jax.Array:
    """:func:`mlp`, or with a gate :func:`gated_mlp`."""
    options |= {"up_bias": up_bias, "down_bias": down_bias}
    if gate is None:
        return mlp(x, up, down, **options)
    return gated_mlp(x, gate, up, down, gate_bias=gate_bias, **options)
