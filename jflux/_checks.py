"""Checks of values that only a running program knows, for `jax.experimental.checkify`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax._src import checkify, source_info_util
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

_primitive = Primitive("jflux_in_range")
_add_error: Any = checkify.assert_func  # its signature depends on the release of JAX


def to_int32(x: jax.Array) -> jax.Array:
    """The integers x as int32. What does not fit becomes the nearest that does."""
    x, wide, given = jnp.asarray(x), jnp.iinfo(jnp.int32), jnp.iinfo(x.dtype)
    if given.max > wide.max:
        x = jnp.clip(x, max(given.min, wide.min), wide.max)
    return x.astype(jnp.int32)


def in_range(x: jax.Array, low: int | None, high: int, what: str) -> jax.Array:
    """The integers x. Under ``checkify.user_checks`` one that is not from `low` (None: any) to
    `high` is an error, and becomes `low` (0 of an unsigned type), so that nothing else reports it.
    Elsewhere this is nothing at all.

    `checkify.debug_check` means the same, but it is an effect, and a jitted function with effects
    leaves JAX's fast dispatch.

    Args:
      what: names x in the message, which also has the first value that is out of range.
    """
    return _primitive.bind(jnp.asarray(x), low=low, high=high, what=what)


def _check(*given: Any, low: int | None, high: int, what: str) -> Any:
    *context, error, enabled, x = given  # the oldest releases pass no context
    x = jnp.asarray(x)
    if checkify.FailedCheckError in enabled and x.size:
        type_ = jnp.iinfo(x.dtype)  # a bound that it does not hold would wrap in it
        wrong = jnp.zeros(x.shape, bool) if high >= type_.max else x > high
        if low is not None and low > type_.min:
            wrong |= x < low
        first = x.reshape(-1)[jnp.argmax(wrong.reshape(-1))]
        allowed = f"at most {high}" if low is None else f"from {low} to {high}"
        failed = checkify.FailedCheckError(
            source_info_util.current().traceback, f"{what} must be {allowed}, got {{}}", first
        )
        error = _add_error(*context, error, jnp.any(wrong), failed)
        if low is not None:
            x = jnp.where(wrong, jnp.asarray(max(low, type_.min), x.dtype), x)
    return error, _primitive.bind(x, low=low, high=high, what=what)


def _batch(operands: Any, dims: Any, **params: Any) -> Any:
    return _primitive.bind(*operands, **params), dims[0]


_primitive.def_impl(lambda x, **_: x)
_primitive.def_abstract_eval(lambda x, **_: x)
mlir.register_lowering(_primitive, lambda _, x, **__: [x])
batching.primitive_batchers[_primitive] = _batch
checkify.error_checks[_primitive] = _check
