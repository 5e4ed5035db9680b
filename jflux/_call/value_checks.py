"""Checks of values that only a running program knows, for `jax.experimental.checkify`, and for CPUs
(cc/runtime/in_range_ffi.cc)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import source_info_util
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir, xla

from .. import _config, _jax_internals
from . import ffi_targets

_primitive = Primitive("jflux_in_range")
_checkify = _jax_internals.CHECKIFY.get()


def to_int32(x: jax.Array) -> jax.Array:
    """The integers x as int32. What does not fit becomes the nearest that does."""
    x, wide, given = jnp.asarray(x), jnp.iinfo(jnp.int32), jnp.iinfo(x.dtype)
    if given.max > wide.max:
        x = jnp.clip(x, max(given.min, wide.min), wide.max)
    return x.astype(jnp.int32)


def known(x: Any) -> np.ndarray | None:
    """The values of an array where they are known: outside of functions that JAX traces. None in
    these, and for an array of which this process has a part. It waits for them."""
    if isinstance(x, jax.core.Tracer):
        return None
    if isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated):
        return None
    return np.asarray(x)


def in_range(
    x: jax.Array, low: int | None, high: int, what: str, *, raises: bool = False
) -> jax.Array:
    """The integers x. Under ``checkify.user_checks`` one that is not from `low` (None: any) to
    `high` is an error, and becomes `low` (0 of an unsigned type; for None `high`), so that nothing
    else reports it.
    With `raises` it is an error on CPUs too, less in exported programs, which have no handlers of
    jflux's. Elsewhere this is nothing at all.

    `checkify.debug_check` means the same, but it is an effect, and a jitted function with effects
    leaves JAX's fast dispatch.

    Args:
      what: names x in the message, which also has the first value that is out of range.
      raises: x is int32 then.
    """
    return _primitive.bind(jnp.asarray(x), low=low, high=high, what=what, raises=raises)


def _check(*given: Any, low: int | None, high: int, what: str, raises: bool) -> Any:
    *context, error, enabled, x = given  # the oldest releases pass no context
    x = jnp.asarray(x)
    if _checkify.FailedCheckError in enabled and x.size:
        type_ = jnp.iinfo(x.dtype)  # a bound that it does not hold would wrap in it
        wrong = jnp.zeros(x.shape, bool) if high >= type_.max else x > high
        if low is not None and low > type_.min:
            wrong |= x < low
        first = x.reshape(-1)[jnp.argmax(wrong.reshape(-1))]
        allowed = f"at most {high}" if low is None else f"from {low} to {high}"
        failed = _checkify.FailedCheckError(
            source_info_util.current().traceback, f"{what} must be {allowed}, got {{}}", first
        )
        error = _checkify.assert_func(*context, error, jnp.any(wrong), failed)
        right = high if low is None else max(low, type_.min)
        x = jnp.where(wrong, jnp.asarray(right, x.dtype), x)
        raises = False
    return error, _primitive.bind(x, low=low, high=high, what=what, raises=raises)


def _lower_on_cpus(
    ctx: mlir.LoweringRuleContext, x: Any, *, low: int | None, high: int, what: str, raises: bool
) -> Any:
    aval: Any = ctx.avals_in[0]
    exported = ctx.module_context.lowering_parameters.for_export
    if not raises or exported or not _config.config.fused or 0 in aval.shape:
        return [x]
    ffi_targets.register_targets("cpu")
    least = np.int64(np.iinfo(np.int32).min if low is None else low)
    call = jax.ffi.ffi_lowering("jflux_in_range")
    return call(ctx, x, low=least, high=np.int64(high), what=what)


def _batch(operands: Any, dims: Any, **params: Any) -> Any:
    return _primitive.bind(*operands, **params), dims[0]


def _impl(x: jax.Array, **params: Any) -> Any:
    return xla.apply_primitive(_primitive, x, **params) if params["raises"] else x


_primitive.def_impl(_impl)
_primitive.def_abstract_eval(lambda x, **_: x)
mlir.register_lowering(_primitive, lambda _, x, **__: [x])
mlir.register_lowering(_primitive, _lower_on_cpus, platform="cpu")
batching.primitive_batchers[_primitive] = _batch
if _checkify is not None:
    _checkify.error_checks[_primitive] = _check
