"""``jflux.flops``: how many operations the products of a function are, which XLA cannot say of
kernels."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend import core
from jax.interpreters import partial_eval as pe

from .._ops.attention._blockwise import BACKWARD_PRODUCTS, pairs_flops
from . import derivatives, primitives


def flops(f: Callable[..., Any], *args: Any, **kwargs: Any) -> int:
    """The floating-point operations of all products in ``f(*args, **kwargs)``, on all devices
    together. Nothing runs.

    A product of [m, k] and [k, n] is 2 m k n of them, an addition and a multiplication for each
    element that is read. Products are those of jflux's ops, `dot_general`, `ragged_dot` and
    convolutions, also in gradients and under transformations; elementwise operations are not
    counted. Grouped products count all rows, whatever the groups' sizes, and attention all pairs of
    queries and keys, whatever is masked or how long the sequences in a cache are. That is
    what model-flops utilisation divides (PaLM, arXiv 2204.02311, appendix B)::

        jflux.flops(train_step, state, batch) / seconds / (devices * peak)

    XLA's ``compiled.cost_analysis()["flops"]`` knows nothing of what a custom call does, and counts
    elementwise operations, on one device. What `jax.checkpoint` has computed again counts again;
    for the utilisation by a model's own operations, leave it out of `f`.

    - Inside ``shard_map`` each rank's work counts, also where ranks do the same.
    - Outside it arrays are global, and a product counts once, on however many devices.
    - ``lax.scan`` and ``fori_loop`` with constant bounds count each step, ``lax.cond`` its branch
      with the most operations.
    - A Pallas kernel counts as its ``cost_estimate`` says.
    - :func:`jflux.custom_call`, ``jax.ffi.ffi_call``, callbacks and solvers of `jax.numpy.linalg`
      count nothing: add theirs.

    Args:
      f: a function that `jax.jit` takes, jitted or not.
      *args, **kwargs: its arguments: arrays, or `jax.ShapeDtypeStruct`.

    Returns:
      The number.

    Raises:
      ValueError: products in a ``while_loop``, whose steps nobody knows before it runs, or in a
        Pallas kernel without a ``cost_estimate``.

    Examples:
      >>> jflux.flops(lambda x, w: x @ w, jnp.ones((2, 3)), jnp.ones((3, 5)))
      60
    """
    closed = jax.make_jaxpr(f)(*args, **kwargs)
    # Tracing leaves behind what no result needs, such as gradients that nobody has asked for.
    jaxpr, _ = pe.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars))
    return count(jaxpr)


def count(jaxpr: Any) -> int:
    """Of a jaxpr, closed or not."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    return sum(_of_equation(eqn) for eqn in jaxpr.eqns)


def _of_equation(eqn: Any) -> int:
    rule = primitives.flops_of.get(eqn.primitive) or _RULES.get(eqn.primitive.name)
    if rule is not None:
        return rule([v.aval for v in eqn.invars], [v.aval for v in eqn.outvars], eqn.params)
    return sum(map(count, _inner(eqn.params.values())))


def _inner(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, core.Jaxpr | core.ClosedJaxpr):
            yield value
        elif isinstance(value, tuple | list):
            yield from _inner(value)


def _dot(operands: Any, results: Any, params: Any, skipped: tuple[int, ...] = ()) -> int:
    x, w = operands[:2]
    (_, contracted), (_, batch) = params["dimension_numbers"]
    free = [n for i, n in enumerate(w.shape) if i not in (*contracted, *batch, *skipped)]
    return 2 * math.prod(x.shape) * math.prod(free)


def _ragged_dot(operands: Any, results: Any, params: Any) -> int:
    """Each row meets one of the groups' matrices."""
    numbers = params["ragged_dot_dimension_numbers"]
    dims = {"dimension_numbers": numbers.dot_dimension_numbers}
    return _dot(operands, results, dims, tuple(numbers.rhs_group_dimensions))


def _convolution(operands: Any, results: Any, params: Any) -> int:
    """A dilated operand is mostly zeros, which nobody multiplies."""
    _, w = operands
    (y,) = results
    taps = math.prod(w.shape) // max(1, w.shape[params["dimension_numbers"].rhs_spec[0]])
    return 2 * math.prod(y.shape) * taps // math.prod(params["lhs_dilation"])


def _scan(operands: Any, results: Any, params: Any) -> int:
    return params["length"] * count(params["jaxpr"])


def _while(operands: Any, results: Any, params: Any) -> int:
    if count(params["cond_jaxpr"]) + count(params["body_jaxpr"]) == 0:
        return 0
    raise ValueError(
        "jflux.flops: a while_loop multiplies, and how many steps it takes is not known before it "
        "runs: give jflux.flops one step's function and multiply, or write the loop as lax.scan, "
        "or as fori_loop with bounds that are Python numbers"
    )


def _cond(operands: Any, results: Any, params: Any) -> int:
    return max(map(count, params["branches"]))


def _shard_map(operands: Any, results: Any, params: Any) -> int:
    ranks = math.prod(params["mesh"].shape[name] for name in params["newly_manual_axes"])
    return ranks * count(params["jaxpr"])


def _pmap(operands: Any, results: Any, params: Any) -> int:
    return params["global_axis_size"] * count(params["call_jaxpr"])


def _pallas(operands: Any, results: Any, params: Any) -> int:
    if params["cost_estimate"] is None:
        raise ValueError(
            "jflux.flops: a Pallas kernel does not say what it computes: give its pallas_call a "
            "cost_estimate"
        )
    return int(params["cost_estimate"].flops)


def _cudnn(operands: Any, results: Any, params: Any, products: int = 2) -> int:
    """`jax.nn.dot_product_attention`'s: heads before positions in layout 1."""
    q, k = operands[:2]
    keys = k.shape[2 if params["layout"] == 1 else 1]
    return pairs_flops(q, keys, products)


def _cudnn_backward(operands: Any, results: Any, params: Any) -> int:
    return _cudnn(operands, results, params, BACKWARD_PRODUCTS)


def _solve(operands: Any, results: Any, params: Any) -> int:
    return count(params["jaxprs"].solve)


def _tangents(operands: Any, results: Any, params: Any) -> int:
    types = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in operands]
    leaves = params["linear"].leaves
    # As inside the shard_map where the types were traced: programs ask for the sizes of its axes.
    mesh = operands[0].sharding.mesh
    axes = [(name, mesh.shape[name]) for name in mesh.manual_axes]
    with jax.sharding.use_abstract_mesh(mesh):
        trace = jax.make_jaxpr(params["linear"].forward, axis_env=axes)
        return count(trace(types[:leaves], types[leaves:]))


#: By the primitive's name: (operands' types, results' types, parameters) -> the number. Equations
#: of other primitives count as what is inside them.
_RULES: dict[str, Callable[[Any, Any, Any], int]] = {
    "cond": _cond,
    "conv_general_dilated": _convolution,
    "custom_linear_solve": _solve,
    "dot_general": _dot,
    "dot_product_attention_bwd_wrapper": _cudnn_backward,
    "dot_product_attention_fwd_wrapper": _cudnn,
    "pallas_call": _pallas,
    "ragged_dot_general": _ragged_dot,
    "scan": _scan,
    "shard_map": _shard_map,
    "while": _while,
    "xla_pmap": _pmap,
    derivatives.NAME: _tangents,
}
