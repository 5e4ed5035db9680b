"""One gather for the products of one x that a model makes one by one: queries, keys and values.

The first product gathers x, and the gathered array is remembered. A later product of the same x
multiplies it, with no communication. The gradient of each product with respect to x is still a
:func:`jflux.matmul_reduce_scatter` of its own.

What is remembered belongs to one trace:

- The same x is the same tracer, or in a trace of jit an equal cast or sharding constraint of it,
  while the same trace is being built. The body of a scan, a branch
  of a cond and a `jax.checkpoint` are traces of their own, which neither see an outer trace's
  arrays, nor leave theirs to it.
- An entry refers to tracers, and these to their trace and to all that they were made of. A trace of
  grad or vmap has its entries as an attribute, and is freed with them. A trace of jit takes no
  attribute. Its entries are a thread's, and each is dropped with the first product's result y:
  equations refer to y until the trace ends, and neither x nor the gathered array does.
- A trace of jit that an exception ends may keep its y. So a thread has `MOST` entries at most.

A miss costs a second gather, and no more: values and gradients do not depend on a hit.

None of this is promised by JAX. :func:`is_safe` tries it out in each process before the first
gather is shared, and shares none where JAX does otherwise.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import gc
import itertools
import logging
import threading
import weakref
from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import get_opaque_trace_state

from .. import _config
from .._ops import _lax
from .._ops._spec import all_ops
from .._ops.products import _product
from .._ops.products.all_gather_matmul import GATHERED, all_gather_matmul
from .._ranks import meshes
from .._ranks.meshes import AxisName

#: Entries of a thread. Layers use x at once, so a few are enough.
MOST = 8

# ---- Products ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Params:
    """The options of :func:`jflux.all_gather_matmul` that both kinds of products have."""

    axis_name: AxisName
    gather_dimension: int
    transpose_rhs: bool
    preferred_element_type: Any = None
    precision: Any = None


def first(x: jax.Array, w: jax.Array, **options: Any) -> tuple[jax.Array, jax.Array]:
    """(y, gathered x): per rank of N, x [..., s/N, k] and w [k, n/N] -> [..., s, n/N] and
    [..., s, k]."""
    # Around a custom_vjp, as in `next_one`: the primitive is inside it.
    x, w = meshes.vary_together(options["axis_name"], x, w)
    return _first(Params(**options), x, w)


def next_one(x: jax.Array, gathered: jax.Array, w: jax.Array, **options: Any) -> jax.Array:
    """y of an x that :func:`first` has gathered: the same values as its y."""
    x, gathered, w = meshes.vary_together(options["axis_name"], x, gathered, w)
    return _next(Params(**options), x, gathered, w)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _first(params: Params, x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
    return all_gather_matmul(x, w, return_gathered=True, **vars(params))


def _first_forward(params: Params, x: Any, w: Any) -> Any:
    x, w = x.value, w.value
    y, gathered = all_gather_matmul(x, w, return_gathered=True, **vars(params))
    gathered = checkpoint_name(gathered, GATHERED)
    return (y, gathered), (gathered, w)


def _first_backward(params: Params, residuals: Any, cotangents: Any) -> Any:
    dy, dgathered = cotangents
    gathered, w = residuals
    if isinstance(dy, SymbolicZero):  # zeros that vary as the product does
        dy = _product.zeros(dy.shape, dy.dtype, gathered, w)
    dx, dw = _gradients(params, (gathered, w), dy)
    # Of `_next` there is none. There is one where a gradient of `_next`'s is differentiated.
    if not isinstance(dgathered, SymbolicZero):
        dx += _lax.psum_scatter(
            dgathered, meshes.as_tuple(params.axis_name),
            scatter_dimension=params.gather_dimension, tiled=True,
        )  # fmt: skip
    return dx, dw


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _next(params: Params, x: jax.Array, gathered: jax.Array, w: jax.Array) -> jax.Array:
    return _lax.matmul(
        gathered, w, params.preferred_element_type, params.precision, params.transpose_rhs
    )


def _next_forward(params: Params, x: jax.Array, gathered: jax.Array, w: jax.Array) -> Any:
    return _next(params, x, gathered, w), (gathered, w)


def _next_backward(params: Params, residuals: Any, dy: jax.Array) -> Any:
    # To x and not to the gathered x, so that the scatter is hidden in a product.
    dx, dw = _gradients(params, residuals, dy)
    return dx, None, dw


def _gradients(params: Params, residuals: Any, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    gathered, w = residuals
    dy = dy.astype(gathered.dtype)
    dx = all_ops()["matmul_reduce_scatter"].call(
        (dy,),
        (w,),
        axis_names=meshes.as_tuple(params.axis_name),
        world=meshes.axis_size(params.axis_name),
        dimension=params.gather_dimension,
        transpose_rhs=not params.transpose_rhs,
        dtype=gathered.dtype,
        precision=params.precision,
    )
    dw = _lax.weight_gradient(gathered, dy, params.transpose_rhs, w.dtype, params.precision)
    return dx, dw


_first.defvjp(_first_forward, _first_backward, symbolic_zeros=True)
_next.defvjp(_next_forward, _next_backward)

# ---- What is remembered --------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Entry:
    trace: Any
    x: Any
    how: Hashable
    gathered: Any


class _Entries(threading.local):
    """Those of jit's traces."""

    def __init__(self) -> None:
        self.of: dict[int, _Entry] = {}
        self.numbers = itertools.count()


_entries = _Entries()


def may_share(x: Any) -> bool:
    """Whether x is an array under jit (what is computed at once would be kept for too long), and
    JAX's traces are as :func:`is_safe` wants them."""
    while isinstance(x, jax.core.Tracer):
        inner = _inner(x)
        if inner is None:
            return is_safe()
        x = inner
    return False


def recall(x: Any, w: Any, how: Hashable) -> Any:
    """The gathered x, if a product of this trace has gathered it in the same way, or None."""
    now = get_opaque_trace_state()
    for entry in itertools.chain(list(_entries.of.values()), _own(x) or (), _own(w) or ()):
        if entry.how == how and entry.trace == now and _same(entry.x, x):
            return entry.gathered
    return None


def remember(x: Any, how: Hashable, gathered: Any, y: Any) -> None:
    """Keeps the gathered x for other products of this trace.

    Args:
      how: axes and shardings; what a product must agree on to use it.
      y: the product that came with it.
    """
    entry = _Entry(get_opaque_trace_state(), x, how, gathered)
    own, entries = _own(y), _entries.of
    if own is not None:
        # `jax.checking_leaks` takes for leaked whatever a trace refers to when its function ends.
        if not getattr(jax.config, "jax_check_tracer_leaks", False):
            own.append(entry)
    elif isinstance(y, jax.core.Tracer) and _inner(y) is None:
        while len(entries) >= MOST:
            entries.pop(next(iter(entries)), None)
        number = next(_entries.numbers)
        entries[number] = entry
        weakref.finalize(y, entries.pop, number, None).atexit = False


def _same(a: Any, b: Any) -> bool:
    """Whether two arrays of a trace are one, or two equal casts or sharding constraints of one: a
    layer may make its own of what it is called with."""
    a, b = _unconstrained(a), _unconstrained(b)
    if a is b:
        return True
    one, other = _equation(a), _equation(b)
    casts = {getattr(e and e.primitive, "name", None) for e in (one, other)}
    if casts != {"convert_element_type"} or one.params != other.params:
        return False
    return _same(one.in_tracers[0], other.in_tracers[0])


def _unconstrained(x: Any) -> Any:
    equation = _equation(x)
    if equation is not None and equation.primitive.name == "sharding_constraint":
        return _unconstrained(equation.in_tracers[0])
    return x


def _equation(tracer: Any) -> Any:
    """What made one of jit's tracers, if that is known."""
    parent = getattr(tracer, "parent", None)
    return parent if hasattr(parent, "in_tracers") else None


def _own(array: Any) -> collections.deque[_Entry] | None:
    """The entries that an array's trace has as an attribute, if it takes any."""
    attributes = getattr(getattr(array, "_trace", None), "__dict__", None)
    if attributes is None:
        return None
    return attributes.setdefault("_jflux_gathered", collections.deque(maxlen=MOST))


def _inner(tracer: Any) -> Any:
    """What a tracer of grad ("primal") or of vmap or shard_map ("val") wraps; None of jit's, whose
    "val" is a variable."""
    inner = getattr(tracer, "primal", None)
    if inner is None:
        inner = getattr(tracer, "val", None)
    return inner if isinstance(inner, jax.Array) else None


# ---- Whether JAX traces as all this takes it to --------------------------------------------------


class _OtherTracesError(Exception):
    """JAX does something otherwise."""


def _expect(is_so: Any, what: str) -> None:
    if not is_so:
        raise _OtherTracesError(what)


@functools.cache
def is_safe() -> bool:
    """Whether gathers can be shared with the installed JAX. A line in the log says why not."""
    try:
        with jax.check_tracer_leaks(False), jax.disable_jit(False):
            _try_out()
    except Exception as error:  # a JAX to come may raise anything
        _entries.of.clear()
        _config.say_once(
            logging.WARNING,
            "jflux.nn: products of one x do not share its gather, since JAX "
            f"{jax.__version__} has other traces: {type(error).__name__}: {error}",
        )
        return False
    return True


def _try_out() -> None:
    """Traces small programs, in which an array must be found again in its trace, in no other one,
    and not be kept when the trace ends.

    Raises:
      Exception: JAX does otherwise.
    """
    how = object()
    number = jax.ShapeDtypeStruct((), jnp.float32)
    numbers = jax.ShapeDtypeStruct((2,), jnp.float32)

    def product(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        y, gathered = jnp.sin(x), jnp.cos(x)
        remember(x, how, gathered, y)
        return y, gathered

    def inner(x: jax.Array) -> jax.Array:
        _expect(recall(x, x, how) is None, "a trace finds an outer one's array")
        y, gathered = product(x)
        _expect(recall(x, x, how) is gathered, "an inner trace does not find its own array")
        return y

    def program(x: jax.Array, is_jit: bool) -> jax.Array:
        _expect((_inner(x) is None) is is_jit, "a tracer's array is elsewhere")
        _expect(recall(x, x, how) is None, "a trace finds an earlier one's array")
        z = jax.jit(lambda: inner(x))() + jax.checkpoint(lambda x: inner(x))(x)
        _expect(recall(x, x, how) is None, "a trace finds an inner one's array")
        y, gathered = product(x)
        z += jax.jit(lambda: inner(x))() + y
        _expect(recall(x, x, how) is gathered, "a trace does not find its own array")
        _expect(recall(x, x, object()) is None, "an array is found by the wrong name")
        return z

    def casts(x: jax.Array) -> jax.Array:
        one, other, third = (x.astype(t) for t in (jnp.bfloat16, jnp.bfloat16, jnp.float16))
        y, gathered = product(one)
        _expect(recall(other, x, how) is gathered, "equal casts are not found")
        _expect(recall(third, x, how) is None, "other casts are found")
        _expect(recall(x + 1, x, how) is None, "other arrays are found")
        return y

    for _ in range(2):  # the second one must find nothing of the first one
        jax.make_jaxpr(lambda x: program(x, True))(number)
        jax.make_jaxpr(jax.grad(lambda x: program(x, False)))(number)
        jax.make_jaxpr(jax.vmap(lambda x: program(x, False)))(numbers)
        jax.make_jaxpr(casts)(number)
    if any(entry.how is how for entry in list(_entries.of.values())):
        gc.collect()  # a debugger may hold on to frames
    kept = any(entry.how is how for entry in list(_entries.of.values()))
    _expect(not kept, "an array is kept when its trace has ended")
