"""all_gather_matmul: wrapper, gradients, and how it lowers. Kernels: cc/ops/all_gather_matmul."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any, Literal, Unpack, overload

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
from .._epilogue import ACTIVATED as ACTIVATED
from .._epilogue import PREACTIVATION as PREACTIVATION
from .._epilogue import Epilogue
from .._lax import several
from .._recipe import AnyRecipe, Format, Weight
from .._scaled import Operand, Scaled, Scales
from .._spec import Layout, OpSpec, all_ops
from ..collectives import exchange
from . import _by_recipe, _product, _product_plan

OP = "all_gather_matmul"

#: The fewest rows of all ranks for one kernel. With fewer, the product ends before it could hide
#: any communication.
FEWEST_ROWS = 64

#: The name that `jax.checkpoint` policies know the gathered operands by.
GATHERED = "jflux_gathered"


@dataclasses.dataclass(frozen=True)
class Params:
    """A call, less its operands.

    Attributes:
      results: which of ("y", "sums", "gathered") to return, in this order; never none. "y" is one
        for each w, or one in all if they are gated; "sums" are what the activation is applied to;
        "gathered" is two, the values and the scale of rows, if x has a scale.
    """

    axis_names: tuple[Any, ...]
    world: int
    gather_dimension: int
    results: tuple[str, ...]
    transpose_rhs: bool
    out_dtype: np.dtype
    precision: Any = None
    epilogue: Epilogue | None = None
    prepared: str | None = None

    @property
    def scales(self) -> Scales:
        """Of the operands."""
        return Scales.NONE if self.epilogue is None else self.epilogue.scales


class Options(_product.Options, total=False):
    """Arguments on which the type of the result does not depend."""

    gather_dimension: int
    bias: jax.Array | Sequence[jax.Array | None] | None
    activation: str | None


@overload
def all_gather_matmul(
    x: Operand,
    w: Weight,
    *,
    return_gathered: Literal[False] = ...,
    gated: Literal[False] = ...,
    quantize: None = ...,
    **options: Unpack[Options],
) -> jax.Array: ...
@overload
def all_gather_matmul(
    x: Operand,
    w: Weight,
    *,
    return_gathered: Literal[True],
    gated: Literal[False] = ...,
    quantize: None = ...,
    **options: Unpack[Options],
) -> tuple[jax.Array, jax.Array]: ...
@overload
def all_gather_matmul(
    x: Operand,
    w: Sequence[Weight],
    *,
    return_gathered: Literal[False] = ...,
    gated: Literal[True],
    quantize: None = ...,
    **options: Unpack[Options],
) -> jax.Array: ...
@overload
def all_gather_matmul(
    x: Operand,
    w: Sequence[Weight],
    *,
    return_gathered: Literal[True],
    gated: Literal[True],
    quantize: None = ...,
    **options: Unpack[Options],
) -> tuple[jax.Array, jax.Array]: ...
@overload
def all_gather_matmul(
    x: Operand,
    w: Sequence[Weight],
    *,
    return_gathered: Literal[False] = ...,
    gated: Literal[False] = ...,
    quantize: None = ...,
    **options: Unpack[Options],
) -> tuple[jax.Array, ...]: ...
@overload
def all_gather_matmul(
    x: Operand,
    w: Sequence[Weight],
    *,
    return_gathered: Literal[True],
    gated: Literal[False] = ...,
    quantize: None = ...,
    **options: Unpack[Options],
) -> tuple[tuple[jax.Array, ...], jax.Array]: ...
@overload
def all_gather_matmul(
    x: Operand,
    w: Weight | Sequence[Weight],
    *,
    return_gathered: bool = ...,
    gated: bool = ...,
    quantize: Format | None = ...,
    **options: Unpack[Options],
) -> Any: ...
@meshes.axis_by_name
def all_gather_matmul(
    x: Operand,
    w: Weight | Sequence[Weight],
    *,
    axis_name: AxisName,
    gather_dimension: int = -2,
    return_gathered: bool = False,
    transpose_rhs: bool = False,
    bias: jax.Array | Sequence[jax.Array | None] | None = None,
    activation: str | None = None,
    gated: bool = False,
    preferred_element_type: DTypeLike | None = None,
    precision: lax.PrecisionLike = None,
    recipe: AnyRecipe | None = None,
    quantize: Format | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    x_spec: PartitionSpec | None = None,
) -> Any:
    """``all_gather(x, axis_name) @ w``, with the gather hidden in the product.

    Inside ``jax.shard_map``, per rank of N along `axis_name`::

        x [..., m/N, k]   w [k, n/N]   ->   y [..., m, n/N]

    means what :func:`jflux.reference.all_gather_matmul` means. Several weights share one gather:
    with w a tuple, y is a tuple, of ``all_gather(x) @ w_i`` (queries, keys and values; the two
    halves of a gated MLP). This is the first half of a
    tensor-parallel layer with sequence-parallel activations (Flux, arXiv 2406.06858, section 3:
    AllGather + GEMM).

    With a bias or an activation, y is ``activation(all_gather(x) @ w + bias)``. With ``gated`` and
    w = (gate, up) there is one y, ``activation(all_gather(x) @ gate) * (all_gather(x) @ up)``, each
    product with its bias (GLU variants, arXiv 2002.05202). That is computed in float32 (float64 for
    float64), and rounded once.

    On GPUs, below 64 rows in all, from 129 to 511, and where a few rows beyond whole tiles of 256
    cost more than the gather, it is :func:`jflux.all_gather` and XLA's product, which are faster
    there; a product is then rounded to y's type before a bias or an activation too, as the
    reference's is.

    Outside ``shard_map`` it takes global arrays, x [..., m, k] sharded over `axis_name` in its
    gather dimension and w [k, n] in its last one, and wraps itself in ``shard_map``.

    Differentiable in both modes, to any order. dx is one :func:`jflux.matmul_reduce_scatter`; dw
    multiplies by the gathered x, which is kept under the name ``"jflux_gathered"`` so that a
    `jax.checkpoint` policy can choose to gather it again instead. What an activation is applied to
    is kept under the name ``"jflux_preactivation"``, in y's type, and y, where there is an
    activation, has the name ``"jflux_activated"``. The kernel makes both: where a later product's
    dw needs y, a policy that keeps only one of them has the product computed again.

    Args:
      x: [..., m/N, k]; float16, bfloat16, float32, float64, float8_e4m3fn, float8_e5m2 or int8
        (CPU), all of these but float32 and float64 (GPU). Other types take the reference.
      w: [k, n/N], or [n/N, k] with `transpose_rhs`; of x's type, or float8_e4m3fn for an x of
        float8_e5m2. Or a tuple or list of such, of any n each. Under ``check_vma=True``, all
        results vary over every axis that x or one of the weights varies over.
      axis_name: a mesh axis, or a tuple of them (the first one major).
      gather_dimension: which of x's leading dimensions to gather; the second to last by default.
      return_gathered: also return the gathered x, [..., m, k].
      transpose_rhs: w holds the transposed weight. No copy is made.
      bias: [n/N], added to the product; of any type. For several weights one each, or None.
      activation: None, or "gelu", "gelu_tanh" (its approximation, `jax.nn.gelu`'s default),
        "relu" or "silu".
      gated: two weights make one y: the first product, activated, times the second.
      preferred_element_type: the type of y; by default x's, for operands of 8 bits bfloat16, for
        int8 int32. Sums are in float32 (float64 for float64, int32 for int8) whatever it is. For
        8 bits kernels give bfloat16, float16 and float32 (on CPUs, for int8, int32 too).
      precision: as in `lax.dot_general`; used where XLA multiplies, not by the kernels. Of 8-bit
        floats "highest" leaves out kernels that sum with fewer bits.
      recipe: a :class:`jflux.Recipe`, or a :class:`jflux.DelayedScaling`, by which x and w are
        quantised, and what gradients need; w may be already, by `Recipe.quantize_weight`.
      quantize: a :class:`jflux.Format`: y is ``quantize.quantize(y)`` of the y in float32, a
        :class:`jflux.Scaled`, which the next product takes. Of scaled operands of float8_e4m3fn,
        Hopper's kernels round to that type in blocks of (1, 128) before they store y; else
        :func:`jflux.quantize` follows, as it does for global arrays. It has no derivative.
      mesh: for global arrays; by default the ambient mesh (`jax.set_mesh`), or x's own.
      x_spec: for global arrays: how x is sharded, if other dimensions are sharded too; by default
        what its type says (explicit sharding), or not at all. The axis is added at
        `gather_dimension` if it is not there. Operands that are sharded otherwise are brought into
        place first.

    Returns:
      y, or (y, gathered x); y is a tuple if w is several. Differentiated, dy of another type than
      x's is rounded to it.

    Raises:
      ValueError, TypeError: operands that do not fit, and gradients of 8-bit floats, when the call
        is traced.
      NotImplementedError: when it is lowered with ``jflux.config.strict``, for one that no kernel
        takes, or that finds no room in the symmetric heap.
      jax.errors.JaxRuntimeError: a peer did not come within the deadline (see :func:`jflux.init`).

    Examples:
      >>> mesh = jax.sharding.Mesh(jax.devices(), "tp")
      >>> x, w = jnp.ones((64, 32)), jnp.ones((32, 128))
      >>> jflux.all_gather_matmul(x, w, axis_name="tp", mesh=mesh).shape  # split by columns
      (64, 128)
    """
    recipe = _recipe.of_call(OP, recipe, x, w, transpose_rhs)
    x, w = _scaled.of_product(OP, x, w)
    _recipe.check_quantize(OP, quantize, preferred_element_type)
    if quantize is not None and not (isinstance(x, Scaled) and meshes.is_bound(axis_name)):
        y = all_gather_matmul(
            x, w, axis_name=axis_name, gather_dimension=gather_dimension,
            return_gathered=return_gathered, transpose_rhs=transpose_rhs, bias=bias,
            activation=activation, gated=gated, preferred_element_type=jnp.float32,
            precision=precision, recipe=recipe, mesh=mesh, x_spec=x_spec,
        )  # fmt: skip
        return _recipe.quantized(quantize, y, return_gathered)
    ws = several(w)
    if not ws:
        raise ValueError("jflux.all_gather_matmul: w is an empty sequence of weights")
    bias_of = _epilogue.of_each(bias, len(ws))
    epilogue = _epilogue.check(OP, len(ws), bias_of, activation, gated)
    for one in ws:
        dimension = _product.check_operands(OP, x, one, gather_dimension, "gather_dimension")
    if not meshes.is_bound(axis_name):
        return _over_global_arrays(
            all_gather_matmul, x, w, bias, mesh=mesh, x_spec=x_spec, axis_name=axis_name,
            gather_dimension=dimension, return_gathered=return_gathered,
            transpose_rhs=transpose_rhs, activation=activation, gated=gated,
            preferred_element_type=preferred_element_type, precision=precision, recipe=recipe,
        )  # fmt: skip
    layout = SPEC.layout(x.ndim, gather_dimension=dimension, transpose_rhs=transpose_rhs)
    for one in ws:
        _product.check_contraction(OP, x, one, layout, axis_name, transpose_rhs=transpose_rhs)
    columns = [_product.columns(one, transpose_rhs) for one in ws]
    _epilogue.check_shapes(OP, columns, bias_of, gated)
    if recipe is not None:
        return _with_recipe(
            x, w, recipe, axis_name=axis_name, gather_dimension=dimension,
            return_gathered=return_gathered, transpose_rhs=transpose_rhs, bias=bias,
            activation=activation, gated=gated, precision=precision,
            preferred_element_type=preferred_element_type,
        )  # fmt: skip
    world = meshes.axis_size(axis_name)
    no_kernel = None
    if isinstance(x, Scaled):
        constants = _scaled.constants(x, *ws)
        x, *rest = constants
        no_kernel = _scaled.why_no_kernel(*constants, transpose_rhs=transpose_rhs)
    elif (narrow := _product.default_dtype(OP, x, ws)) is not None:
        if preferred_element_type is None:
            preferred_element_type = narrow
        x, *rest = _product.without_gradients(OP, x, *ws)
    else:
        rest = list(ws)
    ws = tuple(rest)
    w = ws if isinstance(w, tuple | list) else ws[0]
    if quantize is not None:
        preferred_element_type = jnp.float32
        epilogue = dataclasses.replace(epilogue or Epilogue((False,) * len(ws)), quantize=quantize)
        bias_of = _epilogue.constants(bias_of)
    out = _product.out_dtype(OP, (x, *ws), preferred_element_type, precision)
    # Weights beside an empty one are multiplied first, which scales of blocks cannot wait for.
    by_block = isinstance(x, Scaled) and x.scale.shape[-1] > 1
    is_empty = by_block and any(0 in a.shape for a in (x, *ws))
    if is_empty or _product.is_for_lax(OP, axis_name, x, *ws, *bias_of, no_kernel=no_kernel):
        return reference(
            x, w, axis_name=axis_name, gather_dimension=dimension, return_gathered=return_gathered,
            transpose_rhs=transpose_rhs, bias=bias, activation=activation, gated=gated,
            preferred_element_type=preferred_element_type, precision=precision, quantize=quantize,
        )  # fmt: skip
    # Their gradients are summed over ranks that share them in this type.
    wide = _epilogue.sum_dtype(out)
    after = [jnp.asarray(b).astype(wide) for b in bias_of if b is not None]
    if isinstance(x, Scaled):
        epilogue = epilogue or Epilogue((False,) * len(ws))
        scales = _scaled.scales_of(x, *ws, transpose_rhs=transpose_rhs, precision=precision)
        epilogue = dataclasses.replace(epilogue, scales=scales)
        of_columns = [_scaled.of_columns(one, transpose_rhs, scales) for one in ws]
        after += [_scaled.of_rows(x, scales), *of_columns]
        x, ws = x.values, tuple(one.values for one in ws)
    params = Params(
        axis_names=meshes.as_tuple(axis_name),
        world=world,
        gather_dimension=dimension,
        results=("y", "gathered") if return_gathered else ("y",),
        transpose_rhs=transpose_rhs,
        out_dtype=out,
        precision=precision,
        epilogue=epilogue,
    )
    if epilogue is not None and not any(0 in a.shape for a in (x, *ws)):
        ys: Sequence[jax.Array]
        ys, _, gathered = _unpack(bind(params, x, ws, after), len(ws), params)
    else:
        exact = out if epilogue is None else epilogue.exact(out)
        alone = dataclasses.replace(params, epilogue=None, out_dtype=exact)
        ys, gathered = _with_empty_ones(x, ws, alone)
        if epilogue is not None:
            after = _with_gathered_scale(after, params)
            ys, _ = _epilogue.apply(epilogue, ys, after, out)
            if epilogue.scales and gathered is not None:
                gathered = _with_scale(gathered, after, params)
    if epilogue is not None:
        ys = epilogue.as_scaled(ys)
    y = tuple(ys) if isinstance(w, tuple | list) and not gated else ys[0]
    return (y, gathered) if return_gathered else y


def reference(
    x: Operand,
    w: Weight | Sequence[Weight],
    *,
    axis_name: AxisName,
    gather_dimension: int = -2,
    return_gathered: bool = False,
    transpose_rhs: bool = False,
    bias: jax.Array | Sequence[jax.Array | None] | None = None,
    activation: str | None = None,
    gated: bool = False,
    preferred_element_type: DTypeLike | None = None,
    precision: lax.PrecisionLike = None,
    recipe: AnyRecipe | None = None,
    quantize: Format | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    x_spec: PartitionSpec | None = None,
) -> Any:
    """``all_gather(x) @ w``: x [..., m/N, k], w [k, n/N] -> [..., m, n/N] per rank of N.

    Arguments, results and the use on global arrays are those of :func:`jflux.all_gather_matmul`;
    any type that `lax.dot_general` takes will do, and products are rounded to y's type before a
    bias or an activation. Errors are `lax`'s.
    """
    recipe = _recipe.of_call(f"reference.{OP}", recipe, x, w, transpose_rhs)
    x, w = _scaled.of_product(f"reference.{OP}", x, w)
    _recipe.check_quantize(f"reference.{OP}", quantize, preferred_element_type)
    if quantize is not None:
        y = reference(
            x, w, axis_name=axis_name, gather_dimension=gather_dimension,
            return_gathered=return_gathered, transpose_rhs=transpose_rhs, bias=bias,
            activation=activation, gated=gated, preferred_element_type=jnp.float32,
            precision=precision, recipe=recipe, mesh=mesh, x_spec=x_spec,
        )  # fmt: skip
        return _recipe.quantized(quantize, y, return_gathered)
    if not meshes.is_bound(axis_name):
        return _over_global_arrays(
            reference, x, w, bias, mesh=mesh, x_spec=x_spec, axis_name=axis_name,
            gather_dimension=gather_dimension, return_gathered=return_gathered,
            transpose_rhs=transpose_rhs, activation=activation, gated=gated,
            preferred_element_type=preferred_element_type, precision=precision, recipe=recipe,
        )  # fmt: skip
    if recipe is not None:
        return _with_recipe(
            x, w, recipe, axis_name=axis_name, gather_dimension=axis(gather_dimension, x.ndim),
            return_gathered=return_gathered, transpose_rhs=transpose_rhs, bias=bias,
            activation=activation, gated=gated, precision=precision,
            preferred_element_type=preferred_element_type, reference=True,
        )  # fmt: skip
    ws = several(w)
    bias_of = _epilogue.of_each(bias, len(ws))
    epilogue = _epilogue.check(f"reference.{OP}", len(ws), bias_of, activation, gated)
    if preferred_element_type is None:
        preferred_element_type = _product.default_dtype(OP, x, ws)
    gathered = _communication(x.ndim, gather_dimension).lax(x, axis_name)

    ys = [
        _lax.matmul(gathered, one, preferred_element_type, precision, transpose_rhs) for one in ws
    ]
    if epilogue is not None:
        biases = [b for b in bias_of if b is not None]
        ys, _ = _epilogue.apply(epilogue, ys, biases, np.dtype(ys[0].dtype))
    y = tuple(ys) if isinstance(w, tuple | list) and not gated else ys[0]
    return (y, gathered) if return_gathered else y


def with_products(
    x: jax.Array,
    ws: Sequence[jax.Array],
    *,
    axis_name: AxisName,
    gather_dimension: int,
    activation: str,
    gated: bool,
    return_gathered: bool,
    transpose_rhs: bool,
    preferred_element_type: DTypeLike | None,
    precision: lax.PrecisionLike,
) -> tuple[jax.Array, Sequence[jax.Array], jax.Array | None]:
    """(y, the products, the gathered x) of an :func:`all_gather_matmul` with an activation, of one
    weight or gated, by one kernel: for a program that needs the products too, as what `jax.grad`
    makes does."""
    products: Sequence[jax.Array]
    epilogue = Epilogue((False,) * len(ws), activation, gated)
    if _product.is_for_lax(OP, axis_name, x, *ws):
        products, gathered = all_gather_matmul(
            x, ws, axis_name=axis_name, gather_dimension=gather_dimension, return_gathered=True,
            transpose_rhs=transpose_rhs, preferred_element_type=preferred_element_type,
            precision=precision,
        )  # fmt: skip
        (y,), _ = _epilogue.apply(epilogue, products, (), np.dtype(products[0].dtype))
        return y, products, gathered if return_gathered else None
    params = Params(
        axis_names=meshes.as_tuple(axis_name),
        world=meshes.axis_size(axis_name),
        gather_dimension=gather_dimension,
        results=("y", "sums", "gathered") if return_gathered else ("y", "sums"),
        transpose_rhs=transpose_rhs,
        out_dtype=_product.out_dtype(OP, (x, *ws), preferred_element_type, precision),
        precision=precision,
        epilogue=epilogue,
    )
    (y,), products, gathered = _unpack(bind(params, x, ws), len(ws), params)
    return y, products, gathered


def _with_recipe(
    x: Any,
    w: Any,
    recipe: AnyRecipe,
    *,
    return_gathered: bool,
    preferred_element_type: DTypeLike | None,
    **options: Any,
) -> Any:
    if return_gathered:
        raise ValueError(
            f"jflux.{OP}: with a recipe return_gathered=True is not taken: x is gathered in 8 bits"
        )
    out = _product.out_dtype(OP, (x, *several(w)), preferred_element_type, options["precision"])
    return _by_recipe.product(OP, x, w, recipe=recipe, out=out, kept_as=GATHERED, **options)


def _communication(ndim: int, gather_dimension: int = -2, **_: Any) -> Collective:
    return Collective("all_gather", concat=axis(gather_dimension, ndim))


def _over_global_arrays(
    op: Any,
    x: Any,
    w: Any,
    bias: Any,
    *,
    mesh: Mesh | AbstractMesh | None,
    x_spec: PartitionSpec | None,
    axis_name: AxisName,
    **options: Any,
) -> Any:
    """`op` is the public function or its reference; `options` are the rest of its own."""
    product = SPEC.layout(x.ndim, **options)
    layout = Layout({**product.rows, "gathered": None}, {**product.others, "bias": 0})
    several_ys = isinstance(w, tuple | list) and not options["gated"]
    y = ("y",) * len(w) if several_ys else "y"
    return global_arrays.over_global_arrays(
        functools.partial(op, axis_name=axis_name, **options), OP,
        {"x": x, "w": w, "bias": bias}, layout,
        results=(y, "gathered") if options["return_gathered"] else y,
        axis_name=axis_name, mesh=mesh, x_spec=x_spec,
    )  # fmt: skip


def _with_empty_ones(
    x: jax.Array, ws: tuple[jax.Array, ...], params: Params
) -> tuple[tuple[jax.Array, ...], jax.Array | None]:
    """(the products, the gathered x or None) of a call with empty operands, which the collectives
    of `lax` refuse. Empty results are made here, and the others by a call without empty
    operands."""
    both = dataclasses.replace(params, results=("y", "gathered"))
    *shapes, gathered_shape = _result_shapes((x, *ws), both)

    def zeros(shape: tuple[int, ...], dtype: Any) -> jax.Array:
        return _product.zeros(shape, dtype, x, *ws, over=params.axis_names)

    if 0 in x.shape:
        ys = tuple(zeros(*s) for s in shapes)
        return ys, zeros(*gathered_shape)
    some = tuple(w for w in ws if 0 not in w.shape)
    products: Sequence[Any] = bind(params, x, some) if some else []
    gathered = None
    if "gathered" in params.results:
        *products, gathered = products or [_gather(x, params)]
    rest = iter(products)
    ys = tuple(
        zeros(*shape) if 0 in w.shape else next(rest) for w, shape in zip(ws, shapes, strict=True)
    )
    return ys, gathered


def _unpack(
    results: Sequence[Any], weights: int, params: Params
) -> tuple[list[Any], list[Any], Any]:
    """(all y, all sums, gathered x or None) of the primitive's results. A gathered x that has a
    scale is a `Scaled`."""
    count = weights if params.epilogue is None else params.epilogue.results
    rest = list(results)
    ys = [rest.pop(0) for _ in range(count)] if "y" in params.results else []
    sums = [rest.pop(0) for _ in range(weights)] if "sums" in params.results else []
    return ys, sums, Scaled(*rest) if len(rest) > 1 else rest[0] if rest else None


def _in_order(params: Params, ys: Sequence[Any], sums: Sequence[Any], gathered: Any) -> list[Any]:
    """The primitive's results of these: what `_split` takes apart."""
    both = [gathered.values, gathered.scale] if isinstance(gathered, Scaled) else [gathered]
    known = {"y": ys, "sums": sums, "gathered": both}
    return [result for name in params.results for result in known[name]]


def _forward(operands: Sequence[Any], params: Params) -> Any:
    x, *others = operands
    ws, _ = _weights(others, params)
    names = set(params.results) | {"gathered"}
    if "y" in names and _is_activated(params):
        names.add("sums")
    every = dataclasses.replace(
        params, results=tuple(name for name in ("y", "sums", "gathered") if name in names)
    )
    ys, sums, gathered = _unpack(_primitive.bind(*operands, params=every), len(ws), every)
    gathered = jax.tree.map(lambda a: checkpoint_name(a, GATHERED), gathered)
    if _is_activated(params):
        sums = [checkpoint_name(one, PREACTIVATION) for one in sums]
    name = ACTIVATED if _is_activated(params) else _product.PRODUCT
    ys = [checkpoint_name(one, name) for one in ys]
    return _in_order(params, ys, sums, gathered), (gathered, list(ws), sums)


def _tangents(kept: Any, tangents: Sequence[Any], params: Params) -> list[Any]:
    gathered, ws, sums = kept  # of an x with a scale, biases alone have tangents
    dx, *others = tangents
    dws, dbiases = _weights(others, params)
    products, dgathered = [None] * len(ws), None
    if dx is not None:
        names = ["y"] if {"y", "sums"} & set(params.results) else []
        names += ["gathered"] if "gathered" in params.results else []
        linear = dataclasses.replace(params, epilogue=None, results=tuple(names))
        found, _, dgathered = _unpack(_primitive.bind(dx, *ws, params=linear), len(ws), linear)
        products = found or products
    products = [
        total([product, None if dw is None else _multiply(gathered, dw, params)])
        for product, dw in zip(products, dws, strict=True)
    ]
    if "gathered" in params.results and dgathered is None:
        dgathered = jax.tree.map(lambda a: _product.zeros(a.shape, a.dtype, a), gathered)
    like = gathered.values if isinstance(gathered, Scaled) else gathered
    rest = iter(dbiases)
    shapes = [(*gathered.shape[:-1], _product.columns(w, params.transpose_rhs)) for w in ws]
    dsums = []
    for i, product in enumerate(products):
        dbias = next(rest) if params.epilogue and params.epilogue.biased[i] else None
        if product is None:
            product = _product.zeros(shapes[i], params.out_dtype, like)
        dsums.append(_epilogue.add(product, [] if dbias is None else [dbias]))
    dys = dsums
    if sums and "y" in params.results:
        assert params.epilogue is not None
        dys = _epilogue.tangents(params.epilogue, sums, dsums)
    return _in_order(params, dys, dsums, dgathered)


def _backward(
    kept: Any, cotangents: Sequence[Any], wanted: Sequence[Any], params: Params
) -> list[Any]:
    gathered, ws, sums = kept
    x, *others = wanted
    w_types, bias_types = _weights(others, params)
    dys, own, dgathered = _unpack(cotangents, len(ws), params)
    own = own or [None] * len(ws)
    if all(dy is None for dy in dys):  # gated, that is one for several weights
        dys = [None] * len(ws)
    elif sums:
        assert params.epilogue is not None
        dys = _epilogue.gradient(params.epilogue, sums, dys)
    dsums = [total(pair) for pair in zip(dys, own, strict=True)]
    like = gathered if x is None else x
    rounded = [_lax.rounded(d, like) for d in dsums]
    dx = None
    terms = [(d, w) for d, w in zip(rounded, ws, strict=True) if d is not None]
    if x is not None and terms:
        dx = all_ops()["matmul_reduce_scatter"].call(
            *(tuple(each) for each in zip(*terms, strict=True)),
            axis_names=params.axis_names,
            world=params.world,
            dimension=params.gather_dimension,
            transpose_rhs=not params.transpose_rhs,
            dtype=x.dtype,
            precision=params.precision,
        )
    if x is not None and dgathered is not None:
        scattered = _lax.psum_scatter(
            dgathered, params.axis_names, scatter_dimension=params.gather_dimension, tiled=True
        )
        dx = total([dx, scattered])
    dws = [
        None
        if w is None or d is None
        else _lax.weight_gradient(gathered, d, params.transpose_rhs, w.dtype, params.precision)
        for d, w in zip(rounded, w_types, strict=True)
    ]
    return [dx, *dws, *_epilogue.bias_gradients(params.epilogue, dsums, bias_types)]


def _kept(operands: Sequence[Any], params: Params) -> Any:
    x, *others = operands
    ws, _ = _weights(others, params)
    if _is_activated(params):
        raise not_linear(OP, "it has an activation")
    if not any(w is None for w in ws):
        return None, list(ws), []
    if x is None:
        raise not_linear(OP, "it is linear in x and in w, not in both at once")
    alone = dataclasses.replace(params, epilogue=None, results=("gathered",))
    return _primitive.bind(x, params=alone)[0], list(ws), []


def _is_activated(params: Params) -> bool:
    return params.epilogue is not None and params.epilogue.activation is not None


def call(
    x: jax.Array,
    ws: tuple[jax.Array, ...],
    *,
    axis_names: tuple[Any, ...],
    world: int,
    dimension: int,
    transpose_rhs: bool,
    dtype: Any,
    precision: Any,
    results: tuple[str, ...] = ("y", "gathered"),
) -> list[jax.Array]:
    """The products and the gathered x of operands that were checked. Gradients of other ops call
    it."""
    params = Params(
        axis_names=axis_names,
        world=world,
        gather_dimension=dimension,
        results=results,
        transpose_rhs=transpose_rhs,
        out_dtype=np.dtype(dtype),
        precision=precision,
    )
    return bind(params, x, ws)


def bind(
    params: Params, x: jax.Array, ws: Sequence[jax.Array], after: Sequence[jax.Array] = ()
) -> list[jax.Array]:
    """The results of a call. `after`: the operands of its epilogue."""
    return _primitive.bind(x, *ws, *after, params=params)


def _weights(operands: Sequence[Any], params: Params) -> tuple[Sequence[Any], Sequence[Any]]:
    """(ws, operands of the epilogue) of what follows x among the primitive's operands."""
    count = len(operands) if params.epilogue is None else len(params.epilogue.biased)
    return operands[:count], operands[count:]


def _result_shapes(arrays: Arrays, params: Params) -> list[Any]:
    x, *operands = arrays
    ws, _ = _weights(operands, params)
    shape = list(x.shape)
    shape[params.gather_dimension] *= params.world
    sums = [
        ((*shape[:-1], _product.columns(w, params.transpose_rhs)), params.out_dtype) for w in ws
    ]
    ys = sums if params.epilogue is None else params.epilogue.shapes(sums)
    gathered: Any = (tuple(shape), x.dtype)
    if params.scales:
        _, after = _weights(operands, params)
        entries = _of_rows(after, params).shape[-1]
        scale: Any = ((*shape[:-1], entries), np.dtype(np.float32))
        gathered = Scaled(gathered, scale)
    return _in_order(params, ys, sums, gathered)


def _gather(x: Any, params: Params) -> Any:
    return _communication(x.ndim, params.gather_dimension).lax(x, params.axis_names)


def _gather_by_op(x: Any, params: Params) -> Any:
    """The same by the collective's own op, which has a plan of its own."""
    names, dimension = params.axis_names, params.gather_dimension
    return exchange.bind("all_gather", x, names, params.world, None, dimension)


def _of_rows(after: Sequence[Any], params: Params) -> Any:
    """The scale of rows among the operands of an epilogue that has one."""
    assert params.epilogue is not None
    return params.epilogue.split(after)[1]


def _with_gathered_scale(
    after: Sequence[Any], params: Params, gather: Any = _gather_by_op
) -> list[Any]:
    """The operands of an epilogue, with the scale of all ranks' rows in place of this rank's."""
    if params.epilogue is None or not params.scales:
        return list(after)
    biases, own, of_columns = params.epilogue.split(after)
    return [*biases, gather(own, params), *of_columns]


def _with_scale(gathered: Any, after: Sequence[Any], params: Params) -> Any:
    """The gathered x, with the gathered scale if there is one."""
    return Scaled(gathered, _of_rows(after, params)) if params.scales else gathered


def _reference(arrays: Arrays, params: Params) -> list[Any]:
    x, *operands = arrays
    return _of_gathered(x, *operands, params=params, gather=_gather)


def _decomposed(arrays: Arrays, params: Params, plan: Plan) -> list[Any]:
    """A gather and products."""
    x, *operands = arrays
    return _of_gathered(x, *operands, params=params, gather=_gather_by_op)


def _step(arrays: Arrays, params: Params, levels: Levels) -> _two_level_plan.Step:
    """Rows of one node are multiplied, and a rank's are sent."""
    x, *operands = arrays
    ws, _ = _weights(operands, params)
    rows = levels.local * _product.total_rows(x)
    n = sum(_product.columns(w, params.transpose_rhs) for w in ws)
    return _two_level_plan.Step(
        rows=rows,
        flops=2.0 * rows * x.shape[-1] * n,
        nbytes=x.size * x.dtype.itemsize,
        divided=x.shape[params.gather_dimension],
    )


def _two_level_form(arrays: Arrays, params: Params, plan: Plan) -> list[Any]:
    """A call over two levels. A rank receives the x of the ranks with its place on other nodes. For
    each node, the ranks of a node gather these x among themselves and multiply them."""
    x, *operands = arrays
    if params.scales:  # of rows of all nodes
        return _with_epilogue_after(x, *operands, params=params)
    levels = _two_level_plan.levels_of(plan)
    inside = dataclasses.replace(params, axis_names=(levels.inside,), world=levels.local)

    def call(shard: Any, node: Any) -> list[Any]:
        return _primitive.bind(shard, *operands, params=inside)

    return _two_level.x_travels(
        x,
        call,
        _communication(x.ndim, params.gather_dimension),
        [params.gather_dimension] * len(_result_shapes(arrays, params)),
        levels,
        plan.config["chunks"],
        params.out_dtype,
    )


def _of_gathered(x: Any, *operands: Any, params: Params, gather: Any) -> list[Any]:
    ws, after = _weights(operands, params)
    x, after = gather(x, params), _with_gathered_scale(after, params, gather)
    gathered = _with_scale(x, after, params)
    if params.results == ("gathered",):
        return _in_order(params, [], [], gathered)
    ys, sums = _epilogue.of_products(
        x, ws, after, params.epilogue, params.out_dtype, params.precision, params.transpose_rhs
    )
    return _in_order(params, ys, sums, gathered)


def _multiply(gathered: Any, w: Any, params: Params) -> Any:
    return _lax.matmul(gathered, w, params.out_dtype, params.precision, params.transpose_rhs)


def _finished(
    products: Sequence[Any], after: Sequence[Any], gathered: Any, params: Params
) -> list[Any]:
    """The results of a call, from its products."""
    ys, sums = products, products
    if params.epilogue is not None:
        ys, sums = _epilogue.apply(params.epilogue, products, after, params.out_dtype)
    return _in_order(params, ys, sums, gathered)


def _unsupported(arrays: Arrays, params: Params, platform: str) -> str | None:
    if params.scales is Scales.OF_BLOCKS and platform == "cpu":
        return "kernels take scales of blocks on GPUs alone"
    x, *operands = arrays
    ws, _ = _weights(operands, params)
    pairs = [(x, w) for w in ws]
    return _product.why_no_kernel(pairs, params, platform, OP, no_float32=None)


def _sizes(arrays: Arrays, params: Params) -> _product_plan.Sizes:
    x, *operands = arrays
    ws, _ = _weights(operands, params)
    outer, inner = _product.outer_inner(x.shape, params.gather_dimension, 1)
    return _product_plan.Sizes(
        op=OP,
        world=params.world,
        outer=outer,
        inner=inner,
        k=x.shape[-1],
        n=sum(_product.columns(w, params.transpose_rhs) for w in ws),
        dtype=x.dtype,
        out_dtype=params.out_dtype,
        transpose_rhs=params.transpose_rhs,
        gated=params.epilogue is not None and params.epilogue.gated,
        scales=params.scales.in_kernels,
        quantizes=params.epilogue is not None and params.epilogue.quantize is not None,
        w_dtype=None if ws[0].dtype == x.dtype else ws[0].dtype,
    )


def _why_decomposed(arrays: Arrays, params: Params, machine: Machine) -> str | None:
    x, *operands = arrays
    sizes = _sizes((x, *operands), params)
    ws, _ = _weights(operands, params)
    return _product_plan.why_decomposed(
        sizes.rows,
        machine,
        fewest=FEWEST_ROWS,
        ranks=params.world,
        width=sizes.n,
        alignment=_product_plan.alignment([x], ws),
        gathers=True,
    )


def _why_lax(params: Params) -> str | None:
    if params.results == ("gathered",):
        return "only the gathered x is used, which lax.all_gather makes"
    return None


_forms = _product_plan.Product(
    _sizes,
    _unsupported,
    _why_decomposed,
    why_lax=_why_lax,
    why_no_kernel=_product.why_not_scaled,
    why_not_float32=_product_plan.why_not_tf32,
)


def _with_epilogue_after(
    x: Any, *operands: Any, params: Params, prepared: str | None = None
) -> list[Any]:
    """The call as one without an epilogue, which follows it."""
    if params.scales is Scales.OF_BLOCKS:  # no sums over all of k
        return _reference((x, *operands), params)
    ws, after = _weights(operands, params)
    gathers = "gathered" in params.results
    without = dataclasses.replace(
        params,
        epilogue=None,
        results=("y", "gathered") if gathers else ("y",),
        out_dtype=_epilogue.sum_dtype(params.out_dtype),
        prepared=params.prepared if prepared is None else prepared,
    )
    results = _primitive.bind(x, *ws, params=without)
    products, gathered = (results[:-1], results[-1]) if gathers else (results, None)
    after = _with_gathered_scale(after, params)
    return _finished(products, after, _with_scale(gathered, after, params), params)


def _quantized_after(x: Any, *operands: Any, params: Params, prepared: str) -> list[Any]:
    """The call as one in float32, which `quantize` follows."""
    assert params.epilogue is not None
    ws, _ = _weights(operands, params)
    epilogue = dataclasses.replace(params.epilogue, quantize=None)
    wide = _product.also_prepared(dataclasses.replace(params, epilogue=epilogue), prepared)
    ys, sums, gathered = _unpack(_primitive.bind(x, *operands, params=wide), len(ws), wide)
    return _in_order(params, params.epilogue.quantized(ys), sums, gathered)


def _with_w_transposed(x: Any, *operands: Any, params: Params) -> list[Any]:
    """The call with each w as tensor cores take operands of 8 bits."""
    ws, after = _weights(operands, params)
    transposed = dataclasses.replace(params, transpose_rhs=True, prepared=_product.K_MAJOR)
    return bind(transposed, x, [w.T for w in ws], after)


def _canonical(arrays: Arrays, params: Params, machine: Machine) -> Any:
    x, *operands = arrays
    if machine.on_gpus and not params.transpose_rhs and _product_plan.is_k_major(x.dtype):
        return functools.partial(_with_w_transposed, params=params)
    if params.epilogue is not None:
        return _canonical_epilogue((x, *operands), params, machine)
    ws = operands
    n = [_product.columns(w, params.transpose_rhs) for w in ws]

    def bind(prepared: str, *operands: Any) -> Any:
        return _primitive.bind(*operands, params=_product.also_prepared(params, prepared))

    if len(ws) > _product.most_weights(machine.platform):

        def side_by_side(x: Any, *ws: Any) -> list[Any]:
            w = jnp.concatenate(ws, _product.columns_axis(params.transpose_rhs))
            y, *gathered = bind(_product.SIDE_BY_SIDE, x, w)
            ends = list(itertools.accumulate(n))
            return [*jnp.split(y, ends[:-1], -1), *gathered]

        return side_by_side
    if not machine.on_gpus or _product_plan.in_vectors([x], ws):
        return None

    def padded(x: Any, *ws: Any) -> list[Any]:
        results = bind(_product.PADDED, *_product.pad_to_vectors([x], ws))
        ys = [y[..., :size] for y, size in zip(results, n, strict=False)]
        return ys + [g[..., : x.shape[-1]] for g in results[len(ws) :]]

    return padded


def _canonical_epilogue(arrays: Arrays, params: Params, machine: Machine) -> Any:
    """How a call with an epilogue becomes one that a kernel takes; None: it is one."""
    x, *operands = arrays
    assert params.epilogue is not None
    own = params.epilogue
    ws, _ = _weights(operands, params)
    if not machine.on_gpus and params.scales is Scales.OF_BLOCKS:
        return None
    rows = params.world * _product.total_rows(x)
    if machine.on_gpus and (why := own.why_quantized_after(x, ws, rows, machine.arch)):
        return functools.partial(
            _quantized_after, params=params, prepared=f"quantised after: {why}"
        )
    if params.scales is Scales.PROMOTED:

        def as_kernels(x: Any, *operands: Any) -> list[Any]:
            ws, after = _weights(operands, params)
            kind, count = Scales.OF_SUMS, len(ws) + 1
            biases, (of_rows, *of_columns) = after[:-count], after[-count:]
            if machine.on_gpus:
                kind = Scales.OF_BLOCKS
                of_rows, of_columns = _scaled.repeated(of_rows, of_columns, x.shape[-1])
            epilogue = dataclasses.replace(own, scales=kind)
            changed = dataclasses.replace(params, epilogue=epilogue)
            results = _primitive.bind(x, *ws, *biases, of_rows, *of_columns, params=changed)
            if "gathered" in params.results:
                *results, scale = results
                results.append(scale[..., :1])
            return results

        return as_kernels
    if not machine.on_gpus or len(ws) > _product.MAX_WEIGHTS:
        return functools.partial(
            _with_epilogue_after, params=params, prepared=_product.EPILOGUE_AFTER
        )
    if "y" not in params.results:  # the sums, perhaps with the gathered x
        named = tuple("y" if name == "sums" else name for name in params.results)
        before = dataclasses.replace(
            params,
            epilogue=params.epilogue.before(),
            results=named,
            prepared="what the activation is applied to is used alone",
        )
        return functools.partial(_primitive.bind, params=before)
    if _product_plan.in_vectors([x], ws):
        return None

    def padded(x: Any, *operands: Any) -> list[Any]:
        ws, after = _weights(operands, params)
        wide = _product.pad_to_vectors([x], ws)
        # Those of columns; the scale of rows has more dimensions.
        after = [_product.pad_last(a, 1, x.dtype) if a.ndim == 1 else a for a in after]
        shapes = _result_shapes((x, *operands), params)
        results = _primitive.bind(
            *wide, *after, params=_product.also_prepared(params, _product.PADDED)
        )
        return [r[..., : shape[-1]] for r, (shape, _) in zip(results, shapes, strict=True)]

    return padded


def _attributes(arrays: Arrays, params: Params, plan: Plan) -> dict[str, Any]:
    x, *operands = arrays
    epilogue = params.epilogue or Epilogue((False,) * len(operands))
    return {
        **epilogue.attributes("sums" in params.results),
        **_product_plan.attributes(_sizes((x, *operands), params), plan),
    }


def _flops(arrays: Arrays, params: Params) -> int:
    x, *operands = arrays
    if params.results == ("gathered",):
        return 0
    ws, _ = _weights(operands, params)
    return params.world * sum(_product.flops(x, w, params.transpose_rhs) for w in ws)


def _batch(primitive: Any, operands: Any, dims: Any, *, params: Params) -> Any:
    if params.epilogue is not None:
        after = functools.partial(_with_epilogue_after, params=params)
        results = jax.vmap(after, in_axes=tuple(dims))(*operands)
        return results, [0] * len(results)

    def bind(x: Any, *ws: Any, shift: int = 0) -> Any:
        moved = dataclasses.replace(params, gather_dimension=params.gather_dimension + shift)
        return primitive.bind(x, *ws, params=moved)

    x, *ws = operands
    if params.results == ("gathered",):  # whatever the weights are
        ws = [
            w if d is None else lax.index_in_dim(w, 0, d, keepdims=False)
            for w, d in zip(ws, dims[1:], strict=True)
        ]
        dims = (dims[0], *([None] * len(ws)))
    if all(d is None for d in dims):
        return bind(x, *ws), [None]
    if all(d is None for d in dims[1:]):
        results = bind(jnp.moveaxis(x, dims[0], 0), *ws, shift=1)
        return results, [0] * len(results)
    if dims[0] is None and len(ws) == 1:
        wide, narrow = _product.widen(ws[0], dims[1], params.transpose_rhs)
        y, *gathered = bind(x, wide)
        return [narrow(y), *gathered], [y.ndim - 1, *([None] * len(gathered))]
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
    """Recomputing under `jax.checkpoint` wants the gathered x alone: then no product is made."""
    eqn = rest[-1]  # jax 0.12 passes which inputs are live before it
    params = eqn.params["params"]
    inputs = [True] * len(eqn.invars)
    if not any(used):
        return [False] * len(inputs), None
    weights = len(_weights(inputs[1:], params)[0])
    ys, sums, gathered = _unpack(used, weights, params)
    # All products or none, all sums or none, and the gathered x or not.
    live = {"y": any(ys), "sums": any(sums), "gathered": any(jax.tree.leaves(gathered))}
    smaller = dataclasses.replace(
        params, results=tuple(name for name in params.results if live[name])
    )
    outvars = _in_order(smaller, *_unpack(eqn.outvars, weights, params))
    return inputs, eqn.replace(outvars=outvars, params={"params": smaller})


pe.dce_rules[_primitive] = _drop_unused
differentiate(_primitive, Derivatives(_forward, _tangents, _backward, _kept))


SPEC = OpSpec(
    name=OP,
    function=all_gather_matmul,
    reference=reference,
    communication=_communication,
    product="after",
    dimension="gather_dimension",
    dtypes=_product.dtypes(OP),
    call=call,
    gradient=("matmul_reduce_scatter",),
    tuned=True,
    sizes=((512, 49152, 12288), (8192, 49152, 12288), (2048, 10240, 8192), (2048, 28672, 8192)),
)
SPECS = (SPEC,)
