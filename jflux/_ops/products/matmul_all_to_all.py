"""matmul_all_to_all: wrapper, gradients, and how it lowers. Kernels: cc/ops/matmul_all_to_all."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jax.typing import DTypeLike

from ..._call.derivatives import Derivatives, differentiate, not_linear
from ..._call.forms import Op
from ..._call.plans import Arrays, Machine, Plan
from ..._call.primitives import make_primitive
from ..._ranks import global_arrays, meshes
from ..._ranks.meshes import AxisName
from ..._ranks.node_levels import Levels
from .. import _lax, _recipe, _scaled, _two_level, _two_level_plan
from .._collective import Collective, axis
from .._recipe import AnyRecipe, Weight
from .._scaled import Operand, Scales
from .._spec import OpSpec, all_ops
from . import _all_to_all_shards, _by_recipe, _product, _product_plan
from .matmul import of_kernels

OP = "matmul_all_to_all"


@dataclasses.dataclass(frozen=True)
class Params:
    """A call, less its operands: x, w, and with `scales` those of x's rows and of w's columns
    (`_scaled.of_rows`, `_scaled.of_columns`). `split` and `concat` are dimensions of the product,
    not negative."""

    axis_names: tuple[Any, ...]
    world: int
    split: int
    concat: int
    transpose_rhs: bool
    out_dtype: np.dtype
    precision: Any = None
    scales: Scales = Scales.NONE
    prepared: str | None = None


@meshes.axis_by_name
def matmul_all_to_all(
    x: Operand,
    w: Weight,
    *,
    axis_name: AxisName,
    split_axis: int,
    concat_axis: int,
    transpose_rhs: bool = False,
    preferred_element_type: DTypeLike | None = None,
    precision: lax.PrecisionLike = None,
    recipe: AnyRecipe | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    x_spec: PartitionSpec | None = None,
) -> jax.Array:
    """``all_to_all(x @ w, axis_name, split_axis, concat_axis, tiled=True)``, with the exchange
    hidden in the product.

    Inside ``jax.shard_map``, per rank of N along `axis_name`, with columns split and rows put
    together, or the other way round::

        x [..., m/N, k]   w [k, n]     ->   y [..., m, n/N]     split_axis=-1, concat_axis=-2
        x [..., m, k]     w [k, n/N]   ->   y [..., m/N, n]     split_axis=-2, concat_axis=-1

    means what :func:`jflux.reference.matmul_all_to_all` means. The first is how a model that is
    parallel over the sequence comes to its heads (DeepSpeed-Ulysses, arXiv 2309.14509): a rank
    computes all heads of its part of the sequence, and gets its own heads of all of it. A tile of
    the product goes to its owner as soon as it is computed, and is not summed with anything: the
    other write branch of Flux's epilogue (arXiv 2406.06858, section 3).

    The two axes may be one. Where they are two different dimensions of rows, where a piece's rows
    are no whole 16-byte vectors, and, on GPUs, where there are few rows or y is of another type
    than x, it is the product, and :func:`jflux.all_to_all` of it.

    Outside ``shard_map`` it takes global arrays and wraps itself in ``shard_map``: the product is
    sharded along `concat_axis`, so x is (or w is, in its columns, if that is the last one), and y
    is sharded along `split_axis`.

    Differentiable in both modes, to any order: dx is one :func:`jflux.all_to_all_matmul`, whose
    exchanged dy is multiplied with x for dw.

    Args:
      x: [..., rows, k]; float16, bfloat16, float32 or float64 (CPU), float16, bfloat16,
        float8_e4m3fn, float8_e5m2 or int8 (GPU). Other types take the reference.
      w: [k, n], or [n, k] with `transpose_rhs`; of x's type.
      axis_name: a mesh axis, or a tuple of them (the first one major).
      split_axis: the dimension of the product ``x @ w`` that N divides: piece r goes to rank r.
      concat_axis: the dimension in which what comes is put together, in rank order.
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
      y, the product's shape with dimension `split_axis` divided by N and `concat_axis` N times as
      long. Differentiated, dy of another type than x's is rounded to it.

    Raises:
      ValueError, TypeError: operands that do not fit, when the call is traced; also for a dimension
        that the ranks do not divide.
      NotImplementedError: when it is lowered with ``jflux.config.strict``, for one that no kernel
        takes, or that finds no room in the symmetric heap.
      jax.errors.JaxRuntimeError: a peer did not come within the deadline (see :func:`jflux.init`).

    Examples:
      >>> mesh = jax.sharding.Mesh(jax.devices(), "tp")
      >>> def product(x, w):  # one rank's rows, and the whole w
      ...     return jflux.matmul_all_to_all(x, w, axis_name="tp", split_axis=1, concat_axis=0)
      >>> specs = {"in_specs": (P("tp"), P()), "out_specs": P(None, "tp")}
      >>> f = jax.jit(jax.shard_map(product, mesh=mesh, **specs))
      >>> f(jnp.ones((64, 32)), jnp.ones((32, 128))).shape  # was split by rows, is by columns
      (64, 128)
    """
    recipe = _recipe.of_call(OP, recipe, x, w, transpose_rhs)
    x, w = _scaled.of_product(OP, x, w)
    _product.check_operands(OP, x, w, -2, "the second to last dimension")
    split = _product.check_axis(OP, "split_axis", split_axis, x)
    concat = _product.check_axis(OP, "concat_axis", concat_axis, x)
    layout = SPEC.layout(x.ndim, split_axis=split, concat_axis=concat, transpose_rhs=transpose_rhs)
    _product.check_contraction(OP, x, w, layout, axis_name, transpose_rhs=transpose_rhs)
    if not meshes.is_bound(axis_name):
        return _over_global_arrays(
            matmul_all_to_all, x, w, mesh=mesh, x_spec=x_spec, axis_name=axis_name,
            split_axis=split, concat_axis=concat, transpose_rhs=transpose_rhs,
            preferred_element_type=preferred_element_type, precision=precision, recipe=recipe,
        )  # fmt: skip
    world = meshes.axis_size(axis_name)
    shape = (*x.shape[:-1], _product.columns(w, transpose_rhs))
    if shape[split] % world != 0:
        raise ValueError(
            f"jflux.{OP}: the product has {shape[split]} "
            f"{'rows' if split < x.ndim - 1 else 'columns'} in its {split_axis=}, which the "
            f"{world} ranks of {axis_name=} do not divide; x has shape {x.shape}, w {w.shape}"
        )
    out = _product.out_dtype(OP, (x, w), preferred_element_type, precision)
    if recipe is not None:
        return _by_recipe.product(
            OP, x, w, recipe=recipe, axis_name=axis_name, split_axis=split, concat_axis=concat,
            transpose_rhs=transpose_rhs, out=out, precision=precision,
        )  # fmt: skip
    no_kernel, scales, arrays = _scaled.for_kernel(x, w, transpose_rhs)
    if _product.is_for_lax(OP, axis_name, x, w, no_kernel=no_kernel):
        return reference(
            x, w, axis_name=axis_name, split_axis=split, concat_axis=concat,
            transpose_rhs=transpose_rhs, preferred_element_type=preferred_element_type,
            precision=precision,
        )  # fmt: skip
    params = Params(
        axis_names=meshes.as_tuple(axis_name),
        world=world,
        split=split,
        concat=concat,
        transpose_rhs=transpose_rhs,
        out_dtype=out,
        precision=precision,
        scales=scales,
    )
    if 0 in x.shape or 0 in w.shape:
        ((y_shape, _),) = _result_shapes(arrays, params)
        return _product.zeros(y_shape, out, *arrays[:2], over=axis_name)
    (y,) = _primitive.bind(*arrays, params=params)
    return y


def reference(
    x: Operand,
    w: Weight,
    *,
    axis_name: AxisName,
    split_axis: int,
    concat_axis: int,
    transpose_rhs: bool = False,
    preferred_element_type: DTypeLike | None = None,
    precision: lax.PrecisionLike = None,
    recipe: AnyRecipe | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    x_spec: PartitionSpec | None = None,
) -> jax.Array:
    """``all_to_all(x @ w)``: x [..., m/N, k], w [k, n] -> [..., m, n/N] per rank of N, if columns
    are split and rows put together.

    Arguments, results and the use on global arrays are those of :func:`jflux.matmul_all_to_all`;
    any type that `lax.dot_general` takes will do. Errors are `lax`'s.
    """
    recipe = _recipe.of_call(f"reference.{OP}", recipe, x, w, transpose_rhs)
    x, w = _scaled.of_product(f"reference.{OP}", x, w)
    if not meshes.is_bound(axis_name):
        return _over_global_arrays(
            reference, x, w, mesh=mesh, x_spec=x_spec, axis_name=axis_name,
            split_axis=split_axis, concat_axis=concat_axis, transpose_rhs=transpose_rhs,
            preferred_element_type=preferred_element_type, precision=precision, recipe=recipe,
        )  # fmt: skip
    if recipe is not None:
        return _by_recipe.product(
            OP, x, w, recipe=recipe, axis_name=axis_name, split_axis=axis(split_axis, x.ndim),
            concat_axis=axis(concat_axis, x.ndim), transpose_rhs=transpose_rhs,
            out=_product.out_dtype(OP, (x, w), preferred_element_type, precision),
            precision=precision, reference=True,
        )  # fmt: skip
    product = _lax.matmul(x, w, preferred_element_type, precision, transpose_rhs)
    return _communication(x.ndim, split_axis, concat_axis).lax(product, axis_name)


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
    return global_arrays.over_global_arrays(
        functools.partial(op, axis_name=axis_name, **options), OP, {"x": x, "w": w},
        SPEC.layout(x.ndim, **options), results="y", axis_name=axis_name, mesh=mesh, x_spec=x_spec,
    )  # fmt: skip


def _forward(operands: Sequence[Any], params: Params) -> Any:
    (y,) = _primitive.bind(*operands, params=params)
    return [checkpoint_name(y, _product.PRODUCT)], tuple(operands)


def _tangents(kept: Any, tangents: Sequence[Any], params: Params) -> list[Any]:
    """One exchange: both products of the tangent are one, over twice as many columns."""
    (x, w), (dx, dw) = kept, tangents
    terms = [(a, b) for a, b in ((dx, w), (x, dw)) if a is not None and b is not None]
    xs, ws = zip(*terms, strict=True)
    return _primitive.bind(*_lax.end_to_end(xs, ws, params.transpose_rhs), params=params)


def _backward(
    kept: Any, cotangents: Sequence[Any], wanted: Sequence[Any], params: Params
) -> list[Any]:
    (x, w), (dy,), (x_type, w_type) = kept, cotangents, wanted
    like = x if x_type is None else x_type
    dy = _lax.rounded(dy, like)
    back = dataclasses.replace(params, split=params.concat, concat=params.split)
    dx = dproduct = None
    if x_type is None:
        dproduct = _all_to_all_shards.exchanged(dy, back)
    else:
        names = ("y",) if w_type is None else ("y", "exchanged")
        dx, *others = all_ops()["all_to_all_matmul"].call(
            dy,
            w,
            axis_names=params.axis_names,
            world=params.world,
            split=back.split,
            concat=back.concat,
            transpose_rhs=not params.transpose_rhs,
            dtype=like.dtype,
            precision=params.precision,
            results=names,
        )
        dproduct = others[0] if others else None
    if w_type is None or dproduct is None:
        return [dx, None]
    dw = _lax.weight_gradient(x, dproduct, params.transpose_rhs, w_type.dtype, params.precision)
    return [dx, dw]


def _kept(operands: Sequence[Any], params: Params) -> Any:
    x, w = operands
    if x is None and w is None:
        raise not_linear(OP, "it is linear in x and in w, not in both at once")
    return x, w


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
) -> jax.Array:
    """y, of operands that were checked; for the gradients of other ops."""
    params = Params(axis_names, world, split, concat, transpose_rhs, np.dtype(dtype), precision)
    (y,) = _primitive.bind(x, w, params=params)
    return y


def _result_shapes(arrays: Arrays, params: Params) -> list[Any]:
    x, w, *_ = arrays
    shape = (*x.shape[:-1], _product.columns(w, params.transpose_rhs))
    collective = Collective("all_to_all", params.split, params.concat)
    return [(collective.shape(shape, params.world), params.out_dtype)]


def _reference(arrays: Arrays, params: Params) -> list[Any]:
    x, w, *scales = arrays
    product = _lax.product(x, w, scales, params)
    collective = Collective("all_to_all", params.split, params.concat)
    return [collective.lax(product, params.axis_names)]


def _decomposed(arrays: Arrays, params: Params, plan: Plan) -> list[Any]:
    """A product, and an exchange, which has a plan of its own."""
    x, w, *scales = arrays
    return [_all_to_all_shards.exchanged(of_kernels(x, w, scales, params), params)]


def _step(arrays: Arrays, params: Params, levels: Levels) -> _two_level_plan.Step:
    """One step of a call over two levels: the product for one node, and its transfer there."""
    x, *_ = arrays
    ((shape, dtype),) = _result_shapes(arrays, params)
    rows = _product.total_rows(x)
    return _two_level_plan.Step(
        rows=rows // (levels.count if params.split < x.ndim - 1 else 1),
        flops=2.0 * math.prod(shape) / levels.count * x.shape[-1],
        nbytes=math.prod(shape) / levels.count * dtype.itemsize,
        divided=_all_to_all_shards.divided(x, params),
    )


def _two_level_form(arrays: Arrays, params: Params, plan: Plan) -> list[Any]:
    """A call over two levels. For each receiving node, the ranks of a node multiply and exchange so
    that each has the data for the rank with its place on that node. Then it sends them there."""
    if params.scales:
        return _reference(arrays, params)
    x, w = arrays
    levels = _two_level_plan.levels_of(plan)
    inside = dataclasses.replace(params, axis_names=(levels.inside,), world=levels.local)

    def call(xs: Sequence[Any], ws: Sequence[Any]) -> Any:
        (y,) = _primitive.bind(*xs, *ws, params=inside)
        return y

    y = _two_level.product_travels(
        [x],
        [w],
        call,
        Collective("all_to_all", params.split, params.concat),
        levels,
        plan.config["chunks"],
        columns_axis=_product.columns_axis(params.transpose_rhs),
        wide=params.out_dtype,
    )
    return [y]


def _unsupported(arrays: Arrays, params: Params, platform: str) -> str | None:
    x, w, *_ = arrays
    return _product.why_no_kernel([(x, w)], params, platform, "matmul_reduce_scatter")


def _sizes(arrays: Arrays, params: Params) -> _product_plan.Sizes:
    """The sizes of the product of one shard, with rows as cc/core/rows.h numbers them."""
    x, w, *_ = arrays
    split_rows, _ = _all_to_all_shards.by_rows(x, params)
    n = _product.columns(w, params.transpose_rhs)
    n = n if split_rows else n // params.world
    sizes = _all_to_all_shards.sizes_of(OP, x, params, k=x.shape[-1], n=n)
    return dataclasses.replace(
        sizes,
        w_dtype=None if w.dtype == x.dtype else w.dtype,
        scales=params.scales,
    )


#: Rows of a rank's product below which XLA's product and an exchange are taken instead of the
#: kernel: an estimate, as the next figure is.
FEWEST_ROWS = 512
#: How much more than it has to the kernel may compute: a shard is whole tiles to it, of 128 columns
#: at least.
MOST_PADDED = 1.125


def why_decomposed(shard_rows: int, shard_columns: int, product_rows: int) -> str | None:
    """Why the decomposed form is faster on GPUs, where nothing was measured for the call; None if
    it is not."""
    if product_rows < FEWEST_ROWS:
        return f"a rank's product has {product_rows} rows, fewer than {FEWEST_ROWS}"
    tile = _product_plan.TILE_ROWS
    computed = -(-shard_rows // tile) * tile * -(-shard_columns // tile) * tile
    if computed > MOST_PADDED * shard_rows * shard_columns:
        return (
            f"shards of {shard_rows} x {shard_columns} in whole tiles of {tile} x {tile} are more "
            "than an eighth larger"
        )
    return None


def _why_decomposed(arrays: Arrays, params: Params, machine: Machine) -> str | None:
    sizes = _sizes(arrays, params)
    rows = _product.total_rows(arrays[0])
    return why_decomposed(sizes.outer * sizes.inner, sizes.n, rows)


def _why_no_kernel(arrays: Arrays, params: Params, machine: Machine) -> str | None:
    (x, w, *_), sizes = arrays, _sizes(arrays, params)
    if machine.on_gpus:
        out, world = params.out_dtype, params.world
        if why := _product.kernel_takes(x, w, out, world, machine.platform, OP):
            return why
        if why := _product.why_not_8_bits(arrays, params, machine):
            return why
        if sizes.n % _product_plan.vector(x.dtype) != 0:
            return f"a shard's rows have {sizes.n} columns, which are no whole 16-byte vectors"
        if sizes.scales.has_blocks and not sizes.split_rows and sizes.n % _scaled.BLOCK != 0:
            return f"a shard has {sizes.n} columns, which are no whole blocks of scales"
    return _all_to_all_shards.why_no_way(x, params)


_forms = _product_plan.Product(
    _sizes,
    _unsupported,
    _why_decomposed,
    on_gpus=_product_plan.in_rank_order,
    why_no_kernel=_why_no_kernel,
)


def _canonical(arrays: Arrays, params: Params, machine: Machine) -> Any:
    x, w, *_ = arrays
    if not machine.on_gpus:
        return None

    def bind(prepared: str, *operands: Any, **changes: Any) -> Any:
        changed = dataclasses.replace(params, **changes)
        return _primitive.bind(*operands, params=_product.also_prepared(changed, prepared))

    if not params.transpose_rhs and _product_plan.is_k_major(x.dtype):
        return lambda x, w, *scales: bind(_product.K_MAJOR, x, w.T, *scales, transpose_rhs=True)
    if not _product_plan.in_vectors([x], [w]):
        return lambda x, w, *scales: bind(
            _product.PADDED, *_product.pad_to_vectors([x], [w]), *scales
        )
    ((shape, _),) = _result_shapes(arrays, params)
    return _all_to_all_shards.in_rank_order(bind, _sizes(arrays, params), [shape])


def _attributes(arrays: Arrays, params: Params, plan: Plan) -> dict[str, Any]:
    return _all_to_all_shards.attributes(_sizes(arrays, params), plan, params.scales)


def _flops(arrays: Arrays, params: Params) -> int:
    x, w, *_ = arrays
    return _product.flops(x, w, params.transpose_rhs)


def _batch(primitive: Any, operands: Any, dims: Any, *, params: Params) -> Any:
    if params.scales:
        reference = functools.partial(_reference, params=params)
        return jax.vmap(lambda *a: reference(a), in_axes=tuple(dims))(*operands), [0]

    def bind(x: Any, w: Any, shift: int = 0) -> Any:
        return primitive.bind(x, w, params=_all_to_all_shards.shifted(params, shift))

    (x, w), (x_dim, w_dim) = operands, dims
    if w_dim is None:
        return bind(jnp.moveaxis(x, x_dim, 0), w, shift=1), [0]
    if x_dim is None:
        # The batch is the minor part of a wider w's columns, so that shards of them stay together.
        n_axis = _product.columns_axis(params.transpose_rhs)
        w = jnp.moveaxis(w, w_dim, n_axis + 1)
        n, b = w.shape[n_axis : n_axis + 2]
        (y,) = bind(x, w.reshape(*w.shape[:n_axis], n * b, *w.shape[n_axis + 2 :]))
        split_rows, concat_rows = _all_to_all_shards.by_rows(x, params)
        n = n if split_rows else n // params.world
        n = n if concat_rows else n * params.world
        return [y.reshape(*y.shape[:-1], n, b)], [y.ndim]
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
differentiate(_primitive, Derivatives(_forward, _tangents, _backward, _kept))

SPEC = OpSpec(
    name=OP,
    function=matmul_all_to_all,
    reference=reference,
    communication=_communication,
    product="before",
    dtypes=_product.DTYPES,
    ways=({"split_axis": 1, "concat_axis": 0}, {"split_axis": 0, "concat_axis": 1}),
    call=call,
    gradient=("all_to_all_matmul",),
    tuned=True,
    # Queries, keys and values of a sequence that is split over the ranks (DeepSpeed-Ulysses, arXiv
    # 2309.14509): GPT-3, Llama-2 7B and 70B.
    sizes=tuple(
        (m, n, k)
        for n, k in ((36864, 12288), (12288, 4096), (10240, 8192))
        for m in (2048, 8192, 32768)
    ),
)
SPECS = (SPEC,)
