"""all_gather_matmul: wrapper, gradients, and how it lowers. Kernels: cc/ops/all_gather_matmul."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.interpreters import partial_eval as pe
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jax.typing import DTypeLike

from .. import _epilogue, _ffi, _global, _mesh, reference
from .._epilogue import Epilogue
from .._global import several
from .._mesh import AxisName
from . import _product, exchange

#: The name that `jax.checkpoint` policies know the gathered operands by.
GATHERED = "jflux_gathered"
#: And what an activation is applied to, and returns.
PREACTIVATION = "jflux_preactivation"
ACTIVATED = "jflux_activated"


@dataclasses.dataclass(frozen=True)
class Params:
    """A call, less its operands.

    Attributes:
      results: which of ("y", "sums", "gathered") to return, in this order; never none. "y" is one
        for each w, or one in all if they are gated; "sums" are what the activation is applied to.
    """

    axis_names: tuple[Any, ...]
    world: int
    gather_dimension: int
    results: tuple[str, ...]
    transpose_rhs: bool
    out_dtype: np.dtype
    precision: Any = None
    epilogue: Epilogue | None = None


def all_gather_matmul(
    x: jax.Array,
    w: jax.Array | Sequence[jax.Array],
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

    Differentiable in reverse mode. dx is one :func:`jflux.matmul_reduce_scatter`; dw multiplies by
    the gathered x, which is kept under the name ``"jflux_gathered"`` so that a `jax.checkpoint`
    policy can choose to gather it again instead. What an activation is applied to is kept under
    the name ``"jflux_preactivation"``, in y's type, and y, where there is an activation, has the
    name ``"jflux_activated"``. The kernel makes both: where a later product's dw needs y, a policy
    that keeps only one of them has the product computed again.

    Args:
      x: [..., m/N, k]; float16, bfloat16, float32 or float64 (CPU), float16 or bfloat16 (GPU).
        Other types take the reference.
      w: [k, n/N], or [n/N, k] with `transpose_rhs`; of x's type. Or a tuple or list of such, of
        any n each. Under ``check_vma=True``, all results vary over every axis that x or one of the
        weights varies over.
      axis_name: a mesh axis, or a tuple of them (the first one major).
      gather_dimension: which of x's leading dimensions to gather; the second to last by default.
      return_gathered: also return the gathered x, [..., m, k].
      transpose_rhs: w holds the transposed weight. No copy is made.
      bias: [n/N], added to the product; of any type. For several weights one each, or None.
      activation: None, or "gelu", "gelu_tanh" (its approximation), "relu" or "silu".
      gated: two weights make one y: the first product, activated, times the second.
      preferred_element_type: the type of y; by default x's. Sums are in float32 (float64 for
        float64) whatever it is.
      precision: as in `lax.dot_general`; used where XLA multiplies, not by the kernels.
      mesh: for global arrays; by default the ambient mesh (`jax.set_mesh`), or x's own.
      x_spec: for global arrays: how x is sharded, if other dimensions are sharded too; by default
        what its type says (explicit sharding), or not at all. The axis is added at
        `gather_dimension` if it is not there. Operands that are sharded otherwise are brought into
        place first.

    Returns:
      y, or (y, gathered x); y is a tuple if w is several. Differentiated, dy of another type than
      x's is rounded to it.

    Raises:
      ValueError, TypeError: operands that do not fit, when the call is traced; ValueError when it
        is lowered, for one that the symmetric heap has no room for.
      NotImplementedError: when it is lowered with ``jflux.config.strict``, for one that no kernel
        takes.
      jax.errors.JaxRuntimeError: a peer did not come within the deadline (see :func:`jflux.init`).
    """
    ws = several(w)
    if not ws:
        raise ValueError("jflux.all_gather_matmul: w is an empty sequence of weights")
    bias_of = _epilogue.of_each(bias, len(ws))
    epilogue = _epilogue.check("all_gather_matmul", len(ws), bias_of, activation, gated)
    for one in ws:
        dimension = _product.check_operands(
            "all_gather_matmul", x, one, gather_dimension, "gather_dimension"
        )
    if not _mesh.is_bound(axis_name):
        return _global.all_gather_matmul(
            all_gather_matmul, x, w, mesh=mesh, x_spec=x_spec, axis_name=axis_name,
            gather_dimension=dimension, return_gathered=return_gathered,
            transpose_rhs=transpose_rhs, bias=bias, activation=activation, gated=gated,
            preferred_element_type=preferred_element_type, precision=precision,
        )  # fmt: skip
    for one in ws:
        _product.check_contraction("all_gather_matmul", x, one, transpose_rhs)
    columns = [_product.columns(one, transpose_rhs) for one in ws]
    _epilogue.check_shapes("all_gather_matmul", columns, bias_of, gated)
    world = _mesh.axis_size(axis_name)
    out = _product.out_dtype("all_gather_matmul", (x, *ws), preferred_element_type)
    if _product.is_plain("all_gather_matmul", axis_name):
        return reference.all_gather_matmul(
            x, w, axis_name=axis_name, gather_dimension=dimension, return_gathered=return_gathered,
            transpose_rhs=transpose_rhs, bias=bias, activation=activation, gated=gated,
            preferred_element_type=preferred_element_type, precision=precision,
        )  # fmt: skip
    # Their gradients are summed over ranks that share them in this type.
    wide = _epilogue.sum_dtype(out)
    biases = tuple(jnp.asarray(b).astype(wide) for b in bias_of if b is not None)
    x, *rest = _mesh.vary_together(axis_name, x, *ws, *biases)
    ws, biases = tuple(rest[: len(ws)]), tuple(rest[len(ws) :])
    params = Params(
        axis_names=_mesh.as_tuple(axis_name),
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
        ys, _, gathered = _split(differentiable(x, ws, biases, params), len(ws), params)
    else:
        ys, gathered = _with_empty_ones(x, ws, dataclasses.replace(params, epilogue=None))
        if epilogue is not None:
            ys, _ = _epilogue.apply(epilogue, ys, biases, out)
    y = tuple(ys) if isinstance(w, tuple | list) and not gated else ys[0]
    return (y, gathered) if return_gathered else y


def _with_empty_ones(
    x: jax.Array, ws: tuple[jax.Array, ...], params: Params
) -> tuple[tuple[jax.Array, ...], jax.Array | None]:
    """All y, and the gathered x if it is wanted. `lax`'s collectives take no empty operands."""
    both = dataclasses.replace(params, results=("y", "gathered"))
    *shapes, gathered_shape = _result_shapes(x, *ws, params=both)
    if 0 in x.shape:
        return tuple(_product.zeros(*s, x) for s in shapes), _product.zeros(*gathered_shape, x)
    some = tuple(w for w in ws if 0 not in w.shape)
    products = differentiable(x, some, (), params) if some else []
    gathered = None
    if "gathered" in params.results:
        *products, gathered = products or [_gather(x, params)]
    rest = iter(products)
    ys = (
        _product.zeros(*shape, x) if 0 in w.shape else next(rest)
        for w, shape in zip(ws, shapes, strict=True)
    )
    return tuple(ys), gathered


def _split(
    results: Sequence[Any], weights: int, params: Params
) -> tuple[list[Any], list[Any], Any]:
    """(all y, all sums, gathered x or None) of the primitive's results."""
    count = weights if params.epilogue is None else params.epilogue.results
    rest = list(results)
    ys = [rest.pop(0) for _ in range(count)] if "y" in params.results else []
    sums = [rest.pop(0) for _ in range(weights)] if "sums" in params.results else []
    return ys, sums, rest[0] if rest else None


def _in_order(params: Params, ys: Sequence[Any], sums: Sequence[Any], gathered: Any) -> list[Any]:
    """The primitive's results of these: what `_split` takes apart."""
    known = {"y": ys, "sums": sums, "gathered": [gathered]}
    return [result for name in params.results for result in known[name]]


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def differentiable(
    x: jax.Array, ws: tuple[jax.Array, ...], biases: tuple[jax.Array, ...], params: Params
) -> list[jax.Array]:
    return _primitive.bind(x, *ws, *biases, params=params)


def _forward(x, ws, biases, params):
    # `differentiable` and not the primitive, so that gradients have gradients.
    activated = params.epilogue is not None and params.epilogue.activation is not None
    results = ("y", "sums", "gathered") if activated else ("y", "gathered")
    every = dataclasses.replace(params, results=results)
    ys, sums, gathered = _split(differentiable(x, ws, biases, every), len(ws), every)
    gathered = checkpoint_name(gathered, GATHERED)
    if activated:
        sums = [checkpoint_name(one, PREACTIVATION) for one in sums]
        ys = [checkpoint_name(one, ACTIVATED) for one in ys]
    return _in_order(params, ys, sums, gathered), (gathered, ws, biases, sums)


def _backward(params, residuals, cotangents):
    from . import matmul_reduce_scatter as dual

    gathered, ws, biases, sums = residuals
    dys, dsums, dgathered = _split(cotangents, len(ws), params)
    if sums:
        through = _epilogue.gradient(params.epilogue, sums, dys)
        dys = [a + b for a, b in zip(through, dsums, strict=True)] if dsums else through
    dbiases = _epilogue.bias_gradients(params.epilogue, dys, biases) if biases else ()
    rounded = tuple(dy.astype(gathered.dtype) for dy in dys)
    (dx,) = dual.differentiable(
        rounded,
        ws,
        (),
        dual.Params(
            axis_names=params.axis_names,
            world=params.world,
            scatter_dimension=params.gather_dimension,
            transpose_rhs=not params.transpose_rhs,
            out_dtype=gathered.dtype,
            precision=params.precision,
        ),
    )
    if dgathered is not None:
        dx += lax.psum_scatter(
            dgathered, params.axis_names, scatter_dimension=params.gather_dimension, tiled=True
        )
    dws = tuple(
        weight_gradient(gathered, dy, params.transpose_rhs, w.dtype, params.precision)
        for dy, w in zip(rounded, ws, strict=True)
    )
    return dx, dws, dbiases


differentiable.defvjp(_forward, _backward)


def weight_gradient(
    x: jax.Array, dy: jax.Array, transpose_rhs: bool, dtype: Any, precision: Any
) -> jax.Array:
    """``x^T @ dy`` over all leading dimensions: [k, n], or [n, k] with `transpose_rhs`."""
    rows = tuple(range(x.ndim - 1))
    lhs, rhs = (dy, x) if transpose_rhs else (x, dy)
    return lax.dot_general(
        lhs, rhs, ((rows, rows), ((), ())), precision=precision, preferred_element_type=dtype
    )


def _weights(operands, params):
    """(ws, biases) of what follows x among the primitive's operands."""
    count = len(operands) if params.epilogue is None else len(params.epilogue.biased)
    return operands[:count], operands[count:]


def _result_shapes(x, *operands, params):
    ws, _ = _weights(operands, params)
    shape = list(x.shape)
    shape[params.gather_dimension] *= params.world
    sums = [
        ((*shape[:-1], _product.columns(w, params.transpose_rhs)), params.out_dtype) for w in ws
    ]
    ys = sums if params.epilogue is None else sums[: params.epilogue.results]
    return _in_order(params, ys, sums, (tuple(shape), x.dtype))


def _gather(x, params):
    return lax.all_gather(x, params.axis_names, axis=params.gather_dimension, tiled=True)


def _reference(x, *operands, params):
    return _of_gathered(_gather(x, params), *operands, params=params)


def _apart(x, *operands, params):
    """A gather, which sees for itself whether it is `lax`'s, and products."""
    names, world = params.axis_names, params.world
    gathered = exchange.bind("all_gather", x, names, world, None, params.gather_dimension)
    return _of_gathered(gathered, *operands, params=params)


def _of_gathered(gathered, *operands, params):
    if params.results == ("gathered",):
        return [gathered]
    ws, biases = _weights(operands, params)
    ys = [
        reference.matmul(gathered, w, params.out_dtype, params.precision, params.transpose_rhs)
        for w in ws
    ]
    return _finished(ys, biases, gathered, params)


def _finished(products, biases, gathered, params):
    """The results of a call, from its products."""
    ys, sums = products, products
    if params.epilogue is not None:
        ys, sums = _epilogue.apply(params.epilogue, products, biases, params.out_dtype)
    return _in_order(params, ys, sums, gathered)


def _is_reference(x, *operands, params):
    return params.results == ("gathered",)


def _not_fused(x, *operands, params, platform):
    ws, _ = _weights(operands, params)
    return _product.why_no_kernel([(x, w) for w in ws], params, platform)


def _extent(x, *operands, params):
    ws, _ = _weights(operands, params)
    outer, inner = _product.outer_inner(x.shape, params.gather_dimension, 1)
    return outer, inner, x.shape[-1], sum(_product.columns(w, params.transpose_rhs) for w in ws)


def _apart_is_faster(x, *operands, params):
    outer, inner, _, n = _extent(x, *operands, params=params)
    m = outer * inner * params.world
    return _product.apart_is_faster("all_gather_matmul", m, params.world, n)


def _after(x, *operands, params):
    """The call as one without an epilogue, which follows it."""
    ws, biases = _weights(operands, params)
    gathers = "gathered" in params.results
    plain = dataclasses.replace(
        params,
        epilogue=None,
        results=("y", "gathered") if gathers else ("y",),
        out_dtype=_epilogue.sum_dtype(params.out_dtype),
    )
    results = _primitive.bind(x, *ws, params=plain)
    products, gathered = (results[:-1], results[-1]) if gathers else (results, None)
    return _finished(products, biases, gathered, params)


def _in_kernel(x, *operands, params):
    """How a call with an epilogue becomes one that the CUDA kernel takes; None: it is one."""
    ws, _ = _weights(operands, params)
    if len(ws) > _product.CUDA_MAX_WEIGHTS:
        return functools.partial(_after, params=params)
    if "y" not in params.results:  # the sums, perhaps with the gathered x
        named = tuple("y" if name == "sums" else name for name in params.results)
        before = dataclasses.replace(params, epilogue=params.epilogue.before(), results=named)
        return functools.partial(_primitive.bind, params=before)
    if _product.in_units([x], ws):
        return None

    def padded(x, *operands):
        ws, biases = _weights(operands, params)
        wide = _product.pad_to_units([x], ws)
        biases = [_product.pad_last(b, 1) for b in biases]
        shapes = _result_shapes(x, *operands, params=params)
        return [
            r[..., : shape[-1]]
            for r, (shape, _) in zip(
                _primitive.bind(*wide, *biases, params=params), shapes, strict=True
            )
        ]

    return padded


def _attributes(x, *operands, params, platform):
    if platform != "cuda":
        return {}
    epilogue = params.epilogue or Epilogue((False,) * len(operands))
    return {
        "activation": np.int64(epilogue.number),
        "biased": np.array(epilogue.biased, np.int64),
        "gated": bool(epilogue.gated),
        "sums": "sums" in params.results,
    }


def _adapt(x, *operands, params, platform):
    if params.epilogue is not None:
        if platform == "cuda":
            return _in_kernel(x, *operands, params=params)
        return functools.partial(_after, params=params)
    ws = operands
    n = [_product.columns(w, params.transpose_rhs) for w in ws]
    bind = functools.partial(_primitive.bind, params=params)
    if len(ws) > _product.most_weights(platform):

        def side_by_side(x, *ws):
            y, *gathered = bind(x, jnp.concatenate(ws, _product.columns_axis(params.transpose_rhs)))
            ends = list(itertools.accumulate(n))
            return [*jnp.split(y, ends[:-1], -1), *gathered]

        return side_by_side
    if platform != "cuda" or _product.in_units([x], ws):
        return None

    def padded(x, *ws):
        results = bind(*_product.pad_to_units([x], ws))
        ys = [y[..., :size] for y, size in zip(results, n, strict=False)]
        return ys + [g[..., : x.shape[-1]] for g in results[len(ws) :]]

    return padded


def _batch(primitive, operands, dims, *, params):
    if params.epilogue is not None:
        after = functools.partial(_after, params=params)
        results = jax.vmap(after, in_axes=tuple(dims))(*operands)
        return results, [0] * len(results)

    def bind(x, *ws, shift=0):
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
    return _product.batch_in_turn(bind, operands, dims)


_primitive = _ffi.make_primitive(
    "all_gather_matmul",
    abstract_eval=_result_shapes,
    reference=_reference,
    apart=_apart,
    is_reference=_is_reference,
    not_fused=_not_fused,
    adapt=_adapt,
    batch=_batch,
    **_product.call_rules(
        "all_gather_matmul",
        extent=_extent,
        apart_is_faster=_apart_is_faster,
        attributes=_attributes,
    ),
)


def _drop_unused(used, *rest):
    """Recomputing under `jax.checkpoint` wants the gathered x alone: then no product is made."""
    eqn = rest[-1]  # jax 0.12 passes which inputs are live before it
    params = eqn.params["params"]
    inputs = [True] * len(eqn.invars)
    if not any(used):
        return [False] * len(inputs), None
    weights = len(_weights(inputs[1:], params)[0])
    ys, sums, gathered = _split(used, weights, params)
    # All products or none, all sums or none, and the gathered x or not.
    live = {"y": any(ys), "sums": any(sums), "gathered": gathered}
    smaller = dataclasses.replace(
        params, results=tuple(name for name in params.results if live[name])
    )
    outvars = _in_order(smaller, *_split(eqn.outvars, weights, params))
    return inputs, eqn.replace(outvars=outvars, params={"params": smaller})


pe.dce_rules[_primitive] = _drop_unused
