"""all_to_all_matmul: wrapper, gradients, and how it lowers. Kernels: cc/ops/all_to_all_matmul."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, Required, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.interpreters import partial_eval as pe
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jax.typing import DTypeLike

from ..._call.derivatives import Derivatives, differentiate, not_linear, total
from ..._call.forms import Op
from ..._call.plans import Arrays, Machine, Plan
from ..._call.primitives import make_primitive
from ..._ranks import global_arrays, meshes
from ..._ranks.meshes import AxisName
from ..._ranks.node_levels import Levels
from .. import _epilogue, _lax, _recipe, _scaled, _two_level, _two_level_plan
from .._collective import Collective, axis
from .._recipe import AnyRecipe, Weight
from .._scaled import Operand, Scaled, Scales
from .._spec import Layout, OpSpec, all_ops
from . import _all_to_all_shards, _by_recipe, _product, _product_plan
from .matmul import of_kernels

OP = "all_to_all_matmul"

#: The name that `jax.checkpoint` policies know the exchanged operands by.
EXCHANGED = "jflux_exchanged"
#: Rows of a rank's product below which an exchange and XLA's product are taken instead of the
#: kernel, where nothing was measured for the call.
FEWEST_ROWS = 512
#: How much more than it has to the kernel may compute where rows are put together: each rank's
#: shard is whole tiles of 128 rows to it.
MOST_PADDED = 1.125


@dataclasses.dataclass(frozen=True)
class Params:
    """A call, less its operands: x, w, and with `scales` those of the exchanged x's rows and of w's
    columns (`_scaled.of_rows`, `_scaled.of_columns`; `_are_twice`). `split` and `concat` are
    dimensions of x, not negative; `results` are those of ("y", "exchanged") that are returned, in
    this order."""

    axis_names: tuple[Any, ...]
    world: int
    split: int
    concat: int
    results: tuple[str, ...]
    transpose_rhs: bool
    out_dtype: np.dtype
    precision: Any = None
    scales: Scales = Scales.NONE
    prepared: str | None = None

    @property
    def collective(self) -> Collective:
        return Collective("all_to_all", self.split, self.concat)


class Options(_product.Options, total=False):
    """Arguments on which the type of the result does not depend."""

    split_axis: Required[int]
    concat_axis: Required[int]


@overload
def all_to_all_matmul(
    x: Operand,
    w: Weight,
    *,
    return_exchanged: Literal[False] = ...,
    **options: Unpack[Options],
) -> jax.Array: ...
@overload
def all_to_all_matmul(
    x: jax.Array, w: jax.Array, *, return_exchanged: Literal[True], **options: Unpack[Options]
) -> tuple[jax.Array, jax.Array]: ...
@overload
def all_to_all_matmul(
    x: jax.Array, w: jax.Array, *, return_exchanged: bool, **options: Unpack[Options]
) -> Any: ...
@meshes.axis_by_name
def all_to_all_matmul(
    x: Operand,
    w: Weight,
    *,
    axis_name: AxisName,
    split_axis: int,
    concat_axis: int,
    return_exchanged: bool = False,
    transpose_rhs: bool = False,
    preferred_element_type: DTypeLike | None = None,
    precision: lax.PrecisionLike = None,
    recipe: AnyRecipe | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    x_spec: PartitionSpec | None = None,
) -> Any:
    """``all_to_all(x, axis_name, split_axis, concat_axis, tiled=True) @ w``, with the exchange
    hidden in the product.

    Inside ``jax.shard_map``, per rank of N along `axis_name`, with rows split and columns put
    together, or the other way round::

        x [..., m, k/N]   w [k, n]     ->   y [..., m/N, n]     split_axis=-2, concat_axis=-1
        x [..., m/N, k]   w [k/N, n]   ->   y [..., m, n]       split_axis=-1, concat_axis=-2

    means what :func:`jflux.reference.all_to_all_matmul` means. The first is how a model that is
    parallel over the sequence leaves its heads: each rank has the attention of its own heads for
    the whole sequence, and multiplies all heads of its part of the sequence with the output
    projection (DeepSpeed-Ulysses, arXiv 2309.14509; Flux, arXiv 2406.06858, fuses the same pair).
    It is the transpose of :func:`jflux.matmul_all_to_all`. The second gives each rank a part of a
    sum over the ranks. A tile of the product begins with the rank's own columns, or rows, and goes
    on with those of the others as they arrive.

    The two axes may be one. Where they are two different dimensions of rows, and, on GPUs, where
    there are few rows or y is of another type than x, it is :func:`jflux.all_to_all` and XLA's
    product.

    Outside ``shard_map`` it takes global arrays and wraps itself in ``shard_map``: x is sharded
    along `concat_axis`, w [k, n] not at all, and y along `split_axis`, which must be one of x's
    leading dimensions then.

    Differentiable in both modes, to any order. dx is one :func:`jflux.matmul_all_to_all`; dw
    multiplies with the exchanged x, which the kernel writes, and which is kept under the name
    ``"jflux_exchanged"`` so that a `jax.checkpoint` policy can choose to exchange it again.

    Args:
      x: [..., rows, columns]; float16, bfloat16, float32 or float64 (CPU), float16, bfloat16,
        float8_e4m3fn, float8_e5m2 or int8 (GPU). Other types take the reference.
      w: [k, n], or [n, k] with `transpose_rhs`; of x's type. k is the columns of the exchanged x.
      axis_name: a mesh axis, or a tuple of them (the first one major).
      split_axis: the dimension of x that N divides: shard r goes to rank r.
      concat_axis: the dimension in which what comes is put together, in rank order.
      return_exchanged: also return ``all_to_all(x)``.
      transpose_rhs: w holds the transposed weight. No copy is made.
      preferred_element_type: the type of y; by default x's. Sums are in float32 (float64 for
        float64) whatever it is.
      precision: as in `lax.dot_general`; used where XLA multiplies, not by the kernels.
      recipe: a :class:`jflux.Recipe`, or a :class:`jflux.DelayedScaling`, by which x and w are
        quantised, and what gradients need; w may be already, by `Recipe.quantize_weight`.
      mesh: for global arrays; by default the ambient mesh (`jax.set_mesh`), or x's own.
      x_spec: for global arrays: how x is sharded, if other dimensions are sharded too; by default
        what its type says (explicit sharding), or not at all.

    Returns:
      y, or (y, exchanged x). Differentiated, dy of another type than x's is rounded to it.

    Raises:
      ValueError, TypeError: operands that do not fit, when the call is traced; also for a dimension
        that the ranks do not divide.
      NotImplementedError: when it is lowered with ``jflux.config.strict``, for one that no kernel
        takes, or that finds no room in the symmetric heap.
      jax.errors.JaxRuntimeError: a peer did not come within the deadline (see :func:`jflux.init`).

    Examples:
      >>> mesh = jax.sharding.Mesh(jax.devices(), "tp")
      >>> def product(x, w):  # one rank's columns, and the whole w
      ...     return jflux.all_to_all_matmul(x, w, axis_name="tp", split_axis=0, concat_axis=1)
      >>> specs = {"in_specs": (P(None, "tp"), P()), "out_specs": P("tp")}
      >>> f = jax.jit(jax.shard_map(product, mesh=mesh, **specs))
      >>> f(jnp.ones((64, 128)), jnp.ones((128, 32))).shape  # was split by columns, is by rows
      (64, 32)
    """
    recipe = _recipe.of_call(OP, recipe, x, w, transpose_rhs)
    x, w = _scaled.of_product(OP, x, w)
    _product.check_operands(OP, x, w, -2, "the second to last dimension")
    split = _product.check_axis(OP, "split_axis", split_axis, x, of="x")
    concat = _product.check_axis(OP, "concat_axis", concat_axis, x, of="x")
    if not meshes.is_bound(axis_name):
        return _over_global_arrays(
            all_to_all_matmul, x, w, mesh=mesh, x_spec=x_spec, axis_name=axis_name,
            split_axis=split, concat_axis=concat, return_exchanged=return_exchanged,
            transpose_rhs=transpose_rhs, preferred_element_type=preferred_element_type,
            precision=precision, recipe=recipe,
        )  # fmt: skip
    world = meshes.axis_size(axis_name)
    if x.shape[split] % world != 0:
        raise ValueError(
            f"jflux.{OP}: x has {x.shape[split]} {'rows' if split < x.ndim - 1 else 'columns'} in "
            f"its {split_axis=}, which the {world} ranks of {axis_name=} do not divide; x has "
            f"shape {x.shape}"
        )
    shape = Collective("all_to_all", split, concat).shape(x.shape, world)
    exchanged: Any = jax.ShapeDtypeStruct(shape, x.dtype)
    layout = SPEC.layout(x.ndim, split_axis=split, concat_axis=concat, transpose_rhs=transpose_rhs)
    _product.check_contraction(OP, exchanged, w, layout, axis_name, transpose_rhs=transpose_rhs)
    out = _product.out_dtype(OP, (x, w), preferred_element_type, precision)
    if recipe is not None:
        return _with_recipe(
            x, w, recipe, return_exchanged, out, axis_name=axis_name, split_axis=split,
            concat_axis=concat, transpose_rhs=transpose_rhs, precision=precision,
        )  # fmt: skip
    no_kernel, sent = None, None
    operands: Any = (x, w)
    if isinstance(x, Scaled):
        operands = _scaled.constants(*operands)
        sent = _scaled.sent_scale(operands[0], world, split, concat)
        counts = Collective("all_to_all", split, concat).shape(sent.shape, world)
        of_seen: Any = jax.ShapeDtypeStruct(counts, sent.dtype)
        seen = Scaled(exchanged, of_seen)
        no_kernel = _scaled.why_no_kernel(seen, operands[1], transpose_rhs=transpose_rhs)
    if _product.is_for_lax(OP, axis_name, x, w, no_kernel=no_kernel):
        return reference(
            x, w, axis_name=axis_name, split_axis=split, concat_axis=concat,
            return_exchanged=return_exchanged, transpose_rhs=transpose_rhs,
            preferred_element_type=preferred_element_type, precision=precision,
        )  # fmt: skip
    params = Params(
        axis_names=meshes.as_tuple(axis_name),
        world=world,
        split=split,
        concat=concat,
        results=("y", "exchanged") if return_exchanged else ("y",),
        transpose_rhs=transpose_rhs,
        out_dtype=out,
        precision=precision,
    )
    scale, arrays = None, [*operands]
    if sent is not None:
        weight = operands[1]
        # A small collective: the kernel sends values alone.
        scale = _all_to_all_shards.exchanged(sent, params)
        seen = Scaled(exchanged, scale)
        kind = _scaled.scales_of(seen, weight, transpose_rhs=transpose_rhs)
        params = dataclasses.replace(params, scales=kind)
        of_both = [_scaled.of_rows(seen, kind), _scaled.of_columns(weight, transpose_rhs, kind)]
        if _are_twice(x, params):
            of_both = [jnp.concatenate([s, s], -1) for s in of_both]
        arrays = [operands[0].values, weight.values, *of_both]
    if 0 in x.shape or 0 in w.shape:
        shapes = _result_shapes(arrays, params)
        results = [_product.zeros(*result, *arrays[:2], over=axis_name) for result in shapes]
    else:
        results = _primitive.bind(*arrays, params=params)
    if not return_exchanged:
        return results[0]
    y, moved = results
    return y, moved if scale is None else Scaled(moved, scale)


def reference(
    x: Operand,
    w: Weight,
    *,
    axis_name: AxisName,
    split_axis: int,
    concat_axis: int,
    return_exchanged: bool = False,
    transpose_rhs: bool = False,
    preferred_element_type: DTypeLike | None = None,
    precision: lax.PrecisionLike = None,
    recipe: AnyRecipe | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    x_spec: PartitionSpec | None = None,
) -> Any:
    """``all_to_all(x) @ w``: x [..., m, k/N], w [k, n] -> [..., m/N, n] per rank of N, if rows are
    split and columns put together.

    Arguments, results and the use on global arrays are those of :func:`jflux.all_to_all_matmul`;
    any type that `lax.dot_general` takes will do. Errors are `lax`'s.
    """
    recipe = _recipe.of_call(f"reference.{OP}", recipe, x, w, transpose_rhs)
    x, w = _scaled.of_product(f"reference.{OP}", x, w)
    if not meshes.is_bound(axis_name):
        return _over_global_arrays(
            reference, x, w, mesh=mesh, x_spec=x_spec, axis_name=axis_name, split_axis=split_axis,
            concat_axis=concat_axis, return_exchanged=return_exchanged,
            transpose_rhs=transpose_rhs, preferred_element_type=preferred_element_type,
            precision=precision, recipe=recipe,
        )  # fmt: skip
    if recipe is not None:
        out = _product.out_dtype(OP, (x, w), preferred_element_type, precision)
        return _with_recipe(
            x, w, recipe, return_exchanged, out, axis_name=axis_name,
            split_axis=axis(split_axis, x.ndim), concat_axis=axis(concat_axis, x.ndim),
            transpose_rhs=transpose_rhs, precision=precision, reference=True,
        )  # fmt: skip
    exchanged = _communication(x.ndim, split_axis, concat_axis).lax(x, axis_name)
    y = _lax.matmul(exchanged, w, preferred_element_type, precision, transpose_rhs)
    return (y, exchanged) if return_exchanged else y


def _with_recipe(
    x: Any, w: Any, recipe: AnyRecipe, return_exchanged: bool, out: Any, **options: Any
) -> Any:
    if return_exchanged:
        raise ValueError(
            f"jflux.{OP}: with a recipe return_exchanged=True is not taken: x is exchanged in 8 "
            "bits"
        )
    return _by_recipe.product(OP, x, w, recipe=recipe, out=out, kept_as=EXCHANGED, **options)


def _communication(ndim: int, split_axis: int, concat_axis: int, **_: Any) -> Collective:
    return Collective("all_to_all", axis(split_axis, ndim), axis(concat_axis, ndim))


def _over_global_arrays(
    op: Any,
    x: Operand,
    w: Weight,
    *,
    mesh: Mesh | AbstractMesh | None,
    x_spec: PartitionSpec | None,
    axis_name: AxisName,
    **options: Any,
) -> Any:
    """`op` is the public function or its reference; `options` are the rest of its own."""
    product = SPEC.layout(x.ndim, **options)
    if product.rows["y"] is None:
        raise ValueError(
            f"jflux.{OP}: on global arrays split_axis={options['split_axis']} must name one of "
            f"x's leading dimensions: with columns split, a rank has a part of a sum; x has shape "
            f"{x.shape}"
        )
    layout = Layout({**product.rows, "exchanged": product.rows["y"]}, product.others)
    return global_arrays.over_global_arrays(
        functools.partial(op, axis_name=axis_name, **options), OP, {"x": x, "w": w}, layout,
        results=("y", "exchanged") if options["return_exchanged"] else "y",
        axis_name=axis_name, mesh=mesh, x_spec=x_spec,
    )  # fmt: skip


def _forward(operands: Sequence[Any], params: Params) -> Any:
    _, w = operands
    results = ("y", "exchanged") if "y" in params.results else ("exchanged",)
    every = dataclasses.replace(params, results=results)
    known = dict(zip(results, _primitive.bind(*operands, params=every), strict=True))
    known["exchanged"] = checkpoint_name(known["exchanged"], EXCHANGED)
    if "y" in known:
        known["y"] = checkpoint_name(known["y"], _product.PRODUCT)
    return [known[name] for name in params.results], (known["exchanged"], w)


def _tangents(kept: Any, tangents: Sequence[Any], params: Params) -> list[Any]:
    (exchanged, w), (dx, dw) = kept, tangents
    if dx is not None:
        found = dict(zip(params.results, _primitive.bind(dx, w, params=params), strict=True))
    else:
        found = {"exchanged": _product.zeros(exchanged.shape, exchanged.dtype, exchanged)}
    if dw is not None and "y" in params.results:
        found["y"] = total([found.get("y"), _multiply(exchanged, dw, params)])
    return [found[name] for name in params.results]


def _backward(
    kept: Any, cotangents: Sequence[Any], wanted: Sequence[Any], params: Params
) -> list[Any]:
    (exchanged, w), (x_type, w_type) = kept, wanted
    given = dict(zip(params.results, cotangents, strict=True))
    dy, back = given.get("y"), dataclasses.replace(params, split=params.concat, concat=params.split)
    dx = dw = None
    if dy is not None:
        dy = _lax.rounded(dy, exchanged if x_type is None else x_type)
    if x_type is not None and dy is not None:
        dx = all_ops()["matmul_all_to_all"].call(
            dy,
            w,
            axis_names=params.axis_names,
            world=params.world,
            split=back.split,
            concat=back.concat,
            transpose_rhs=not params.transpose_rhs,
            dtype=x_type.dtype,
            precision=params.precision,
        )
    if x_type is not None and given.get("exchanged") is not None:
        dx = total([dx, _all_to_all_shards.exchanged(given["exchanged"], back)])
    if w_type is not None and dy is not None:
        dw = _lax.weight_gradient(
            exchanged, dy, params.transpose_rhs, w_type.dtype, params.precision
        )
    return [dx, dw]


def _kept(operands: Sequence[Any], params: Params) -> Any:
    x, w = operands
    if x is None and w is None:
        raise not_linear(OP, "it is linear in x and in w, not in both at once")
    return None if x is None else _all_to_all_shards.exchanged(x, params), w


def call(
    x: Operand,
    w: Operand,
    *,
    axis_names: tuple[Any, ...],
    world: int,
    split: int,
    concat: int,
    transpose_rhs: bool,
    dtype: Any,
    precision: Any,
    results: tuple[str, ...] = ("y", "exchanged"),
) -> list[jax.Array]:
    """y and the exchanged x, of operands that were checked; for the gradients of other ops."""
    out = np.dtype(dtype)
    params = Params(axis_names, world, split, concat, results, transpose_rhs, out, precision)
    return _primitive.bind(x, w, params=params)


def _result_shapes(arrays: Arrays, params: Params) -> list[Any]:
    x, w, *_ = arrays
    exchanged = params.collective.shape(x.shape, params.world)
    y = (*exchanged[:-1], _product.columns(w, params.transpose_rhs))
    known = {"y": (y, params.out_dtype), "exchanged": (exchanged, x.dtype)}
    return [known[name] for name in params.results]


def _are_twice(x: Any, params: Params) -> bool:
    """Whether a call has the entries of k of its scales twice, one after the other: where columns
    are put together, each rank's kernel begins with its own."""
    return params.scales is Scales.OF_BLOCKS and params.concat == x.ndim - 1


def _scales(arrays: Arrays, params: Params) -> list[Any]:
    """Those of rows and of columns, with each entry once."""
    x, _, *scales = arrays
    twice = _are_twice(x, params)
    return [s[..., : s.shape[-1] // 2] if twice else s for s in scales]


def _of_exchanged(exchanged: Any, params: Params, product: Callable[[], Any]) -> list[Any]:
    results = {"exchanged": exchanged}
    if "y" in params.results:
        results["y"] = product()
    return [results[name] for name in params.results]


def _multiply(exchanged: Any, w: Any, params: Params) -> Any:
    return _lax.matmul(exchanged, w, params.out_dtype, params.precision, params.transpose_rhs)


def _reference(arrays: Arrays, params: Params) -> list[Any]:
    x, w, *_ = arrays
    scales = _scales(arrays, params)
    collective = functools.partial(params.collective.lax, axis_name=params.axis_names)
    exchanged = _scaled.sent_values(x, collective)
    return _of_exchanged(exchanged, params, lambda: _lax.product(exchanged, w, scales, params))


def _decomposed(arrays: Arrays, params: Params, plan: Plan) -> list[Any]:
    """An exchange, which has a plan of its own, and a product."""
    x, w, *_ = arrays
    scales = _scales(arrays, params)
    send = functools.partial(_all_to_all_shards.exchanged, params=params)
    exchanged = _scaled.sent_values(x, send)
    return _of_exchanged(exchanged, params, lambda: of_kernels(exchanged, w, scales, params))


def _step(arrays: Arrays, params: Params, levels: Levels) -> _two_level_plan.Step:
    """One step of a call over two levels: a transfer of x from one node, and its product."""
    x, w, *_ = arrays
    shape = params.collective.shape(x.shape, params.world)
    rows = math.prod(shape[:-1])
    return _two_level_plan.Step(
        rows=rows // (levels.count if params.concat < x.ndim - 1 else 1),
        flops=2.0 * x.size / levels.count * _product.columns(w, params.transpose_rhs),
        nbytes=x.size / levels.count * x.dtype.itemsize,
        divided=_all_to_all_shards.divided(x, params),
    )


def _two_level_form(arrays: Arrays, params: Params, plan: Plan) -> list[Any]:
    """Counterparts get what they have for each other's nodes; ranks of a node then exchange it
    inside, and multiply."""
    if params.scales:
        return _reference(arrays, params)
    x, w = arrays
    levels = _two_level_plan.levels_of(plan)
    inside = dataclasses.replace(params, axis_names=(levels.inside,), world=levels.local)
    by_columns = params.concat == x.ndim - 1
    k_axis = 1 - _product.columns_axis(params.transpose_rhs)
    if by_columns:
        w = _two_level.in_node_order(w, k_axis, levels)

    def call(shard: Any, node: Any) -> list[Any]:
        part = _two_level.of_node(w, k_axis, node, levels) if by_columns else w
        return _primitive.bind(shard, part, params=inside)

    placed = {"y": None if by_columns else params.concat, "exchanged": params.concat}
    results = _two_level.x_travels(
        x,
        call,
        params.collective,
        [placed[name] for name in params.results],
        levels,
        plan.config["chunks"],
        _epilogue.sum_dtype(params.out_dtype),
    )
    shapes = _result_shapes(arrays, params)
    return [r.astype(dtype) for r, (_, dtype) in zip(results, shapes, strict=True)]


def _unsupported(arrays: Arrays, params: Params, platform: str) -> str | None:
    pairs = [(arrays[0], arrays[1])]
    return _product.why_no_kernel(pairs, params, platform, "matmul_reduce_scatter")


def _sizes(arrays: Arrays, params: Params) -> _product_plan.Sizes:
    """The sizes of the product of one shard of x, with rows as cc/core/rows.h numbers them."""
    x, w, *_ = arrays
    split_rows, _ = _all_to_all_shards.by_rows(x, params)
    k = x.shape[-1] if split_rows else x.shape[-1] // params.world
    sizes = _all_to_all_shards.sizes_of(
        OP, x, params, k=k, n=_product.columns(w, params.transpose_rhs)
    )
    return dataclasses.replace(
        sizes,
        w_dtype=None if w.dtype == x.dtype else w.dtype,
        scales=params.scales,
    )


def why_decomposed(shard_rows: int, shards: int) -> str | None:
    """Why the decomposed form is faster on GPUs, for the rows of so many shards below each other,
    where nothing was measured for the call; None if it is not."""
    rows = shard_rows * shards
    if rows < FEWEST_ROWS:
        return f"a rank's product has {rows} rows, fewer than {FEWEST_ROWS}"
    computed = -(-shard_rows // _product_plan.TILE_ROWS) * _product_plan.TILE_ROWS
    if computed > MOST_PADDED * shard_rows:
        return f"shards of {shard_rows} rows in whole tiles are more than an eighth larger"
    return None


def _why_decomposed(arrays: Arrays, params: Params, machine: Machine) -> str | None:
    sizes = _sizes(arrays, params)
    return why_decomposed(sizes.outer * sizes.inner, sizes.world if sizes.concat_rows else 1)


def _why_no_kernel(arrays: Arrays, params: Params, machine: Machine) -> str | None:
    x, w, *_ = arrays
    if "y" not in params.results:
        return "only the exchanged x is used"
    if machine.on_gpus:
        out, world = params.out_dtype, params.world
        if why := _product.kernel_takes(x, w, out, world, machine.platform, OP):
            return why
        if why := _product.why_not_8_bits(arrays, params, machine):
            return why
        sizes = _sizes(arrays, params)
        if sizes.scales.has_blocks and not sizes.concat_rows and sizes.k % _scaled.BLOCK != 0:
            return f"a shard has {sizes.k} columns, which are no whole blocks of scales"
    return _all_to_all_shards.why_no_way(x, params)


_forms = _product_plan.Product(
    _sizes,
    _unsupported,
    _why_decomposed,
    on_gpus=_product_plan.in_rank_order,
    why_no_kernel=_why_no_kernel,
)


def _pad_shards(a: Any, dimension: int, shards: int) -> Any:
    """Pads each shard of a dimension with zeros, if shards are no whole vectors."""
    shape = a.shape
    size = shape[dimension] // shards
    a = a.reshape(*shape[:dimension], shards, size, *shape[dimension + 1 :])
    padding = [(0, 0)] * a.ndim
    padding[dimension + 1] = (0, _product_plan.padded(size, a.dtype) - size)
    return jnp.pad(a, padding).reshape(*shape[:dimension], -1, *shape[dimension + 1 :])


def _canonical(arrays: Arrays, params: Params, machine: Machine) -> Any:
    if not machine.on_gpus:
        return None
    x, *_ = arrays
    sizes, world = _sizes(arrays, params), params.world
    k_shards = 1 if sizes.concat_rows else world  # of what is multiplied

    def bind(prepared: str, *operands: Any, **changes: Any) -> Any:
        changed = dataclasses.replace(params, **changes)
        return _primitive.bind(*operands, params=_product.also_prepared(changed, prepared))

    if not params.transpose_rhs and _product_plan.is_k_major(x.dtype):
        return lambda x, w, *scales: bind(_product.K_MAJOR, x, w.T, *scales, transpose_rhs=True)
    vector = _product_plan.vector(sizes.dtype)
    if sizes.k % vector != 0 or sizes.n % vector != 0:

        def padded(x: Any, w: Any, *scales: Any) -> list[Any]:
            wide = _pad_shards(x, x.ndim - 1, 1 if sizes.split_rows else world)
            n_axis = _product.columns_axis(params.transpose_rhs)
            w = _pad_shards(_pad_shards(w, 1 - n_axis, k_shards), n_axis, 1)
            if params.scales is Scales.OF_SUMS:
                scales = (scales[0], _product.pad_last(scales[1], 1, x.dtype))
            y, *exchanged = bind(_product.PADDED, wide, w, *scales)
            results = [y[..., : sizes.n]]
            for one in exchanged:
                shards = one.reshape(*one.shape[:-1], k_shards, -1)[..., : sizes.k]
                results.append(shards.reshape(*one.shape[:-1], -1))
            return results

        return padded
    shapes = [shape for shape, _ in _result_shapes(arrays, params)]
    return _all_to_all_shards.in_rank_order(bind, sizes, shapes, scales_of_results=True)


def _attributes(arrays: Arrays, params: Params, plan: Plan) -> dict[str, Any]:
    return _all_to_all_shards.attributes(_sizes(arrays, params), plan, params.scales)


def _flops(arrays: Arrays, params: Params) -> int:
    x, w, *_ = arrays  # an exchange moves as many elements as x has
    return _product.flops(x, w, params.transpose_rhs) if "y" in params.results else 0


def _batch(primitive: Any, operands: Any, dims: Any, *, params: Params) -> Any:
    if params.scales:
        reference = functools.partial(_reference, params=params)
        results = jax.vmap(lambda *a: reference(a), in_axes=tuple(dims))(*operands)
        return results, [0] * len(results)

    def bind(x: Any, w: Any, shift: int = 0) -> Any:
        return primitive.bind(x, w, params=_all_to_all_shards.shifted(params, shift))

    (x, w), (x_dim, w_dim) = operands, dims
    if w_dim is None:
        results = bind(jnp.moveaxis(x, x_dim, 0), w, shift=1)
        return results, [0] * len(results)
    if x_dim is None:
        wide, narrow = _product.widen(w, w_dim, params.transpose_rhs)
        known = dict(zip(params.results, bind(x, wide), strict=True))
        dims = {"y": x.ndim - 1, "exchanged": None}
        if "y" in known:
            known["y"] = narrow(known["y"])
        return [known[name] for name in params.results], [dims[name] for name in params.results]
    return _product.batch_one_by_one(bind, operands, dims)


_op = Op(
    name=OP,
    result_shapes=_result_shapes,
    reference=_reference,
    forms=_two_level_plan.forms_of_product(
        _forms,
        _step,
        attributes=_attributes,
        canonical=_canonical,
        two_level=_two_level_form,
        decomposed=_decomposed,
    ),
    batch=_batch,
    flops=_flops,
)
_primitive = make_primitive(_op)


def _drop_unused(used: Sequence[bool], *rest: Any) -> Any:
    """Recomputing under `jax.checkpoint` wants the exchanged x alone: then no product is made."""
    eqn = rest[-1]  # jax 0.12 passes which inputs are live before it
    params = eqn.params["params"]
    inputs = [True] * len(eqn.invars)
    if not any(used):
        return [False] * len(inputs), None
    kept = [i for i, is_used in enumerate(used) if is_used]
    smaller = dataclasses.replace(params, results=tuple(params.results[i] for i in kept))
    outvars = [eqn.outvars[i] for i in kept]
    return inputs, eqn.replace(outvars=outvars, params={"params": smaller})


pe.dce_rules[_primitive] = _drop_unused
differentiate(_primitive, Derivatives(_forward, _tangents, _backward, _kept))

SPEC = OpSpec(
    name=OP,
    function=all_to_all_matmul,
    reference=reference,
    communication=_communication,
    product="after",
    dtypes=_product.DTYPES,
    # The second way gives parts of a sum, so it has no global form.
    ways=({"split_axis": 0, "concat_axis": 1},),
    call=call,
    gradient=("matmul_all_to_all",),
    tuned=True,
    # Output projections behind attention that is split over heads (DeepSpeed-Ulysses): GPT-3,
    # Llama-2 7B and 70B.
    sizes=tuple((m, k, k) for k in (12288, 4096, 8192) for m in (2048, 8192, 32768)),
)
SPECS = (SPEC,)
