"""jflux.attention as the attention of Flax's own layers."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .. import _config
from .._ops._epilogue import in_rows
from .._ops.attention._checks import Window, window_of
from .._ops.attention.attention import attention as over_ranks
from .._ops.attention.sequence_layouts import Layout, causal_positions, check_layout
from .._ranks import global_arrays, meshes
from .._ranks.meshes import AxisName

_OP = "jflux.nn.attention_fn"


def attention_fn(
    axis_name: AxisName,
    *,
    causal: bool = False,
    layout: Layout = "zigzag",
    window: Window = None,
    segment_ids: jax.Array | None = None,
    **options: Any,
) -> Callable[..., jax.Array]:
    """:func:`jflux.attention` as the ``attention_fn`` of Flax's attention layers (linen's
    ``MultiHeadDotProductAttention``, NNX's ``MultiHeadAttention``), for models whose sequence is
    split over `axis_name`.

    The layers call it with query, key and value [..., s, heads, c], global or of one rank, and with
    what they are told themselves:

    ======================================  ======================================================
    their argument                          here
    ======================================  ======================================================
    ``dtype``, ``precision``                taken
    ``force_fp32_for_softmax``              taken: it is in float32 anyway
    ``is_causal``                           taken, as `causal`
    ``mask``, ``bias``, dropout of weights  ``flax.nnx.dot_product_attention``, on global arrays
    ``sow_weights``, einsums of its own     the same
    keys of another length (``decode``)     the same; the mask says what is causal
    ======================================  ======================================================

    What falls back so is logged, one line for each reason; with ``jflux.config.strict`` it is an
    error. Inside ``jax.shard_map`` it always is: no rank has all keys, or a whole mask.

    Args:
      axis_name, causal, layout, window, segment_ids, options: of :func:`jflux.attention`.

    Returns:
      A function of (query, key, value) and what Flax passes beside.

    Raises:
      ValueError: an unknown layout, here; what does not fit, when the function is called.
    """
    check_layout(_OP, layout)

    # Linen's layers leave out what this signature does not name.
    def attend(
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        bias: Any = None,
        mask: Any = None,
        broadcast_dropout: bool = True,
        dropout_rng: Any = None,
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        dtype: Any = None,
        precision: Any = None,
        module: Any = None,
        force_fp32_for_softmax: bool = False,
        qk_attn_weights_einsum: Any = None,
        attn_weights_value_einsum: Any = None,
        is_causal: bool = False,
        **rest: Any,
    ) -> jax.Array:
        dtype = dtype or jnp.result_type(query, key, value)
        query, key, value = (jnp.asarray(a, dtype) for a in (query, key, value))
        dropout = dropout_rate if not deterministic else 0.0
        einsums = {
            "qk_attn_weights_einsum": qk_attn_weights_einsum,
            "attn_weights_value_einsum": attn_weights_value_einsum,
        }
        unknown = [name for name, given in rest.items() if given is not None]
        reason = _why_not(query, key, value, mask, bias, dropout, module, einsums, unknown)
        follows: dict[str, Any] = {
            "causal": causal or is_causal,
            "layout": layout,
            "window": window,
        }
        if reason is None:
            with _at_precision(precision):
                return _with_one_batch(
                    functools.partial(
                        over_ranks, axis_name=axis_name, segment_ids=segment_ids,
                        **(follows | options),
                    ),
                    query, key, value,
                )  # fmt: skip
        if meshes.is_bound(axis_name):
            raise ValueError(
                f"{_OP}: {reason} not supported inside shard_map, since no rank has all keys; use "
                "causal=, window= or segment_ids= of attention_fn, or call the layer on global "
                "arrays"
            )
        if unknown:
            raise TypeError(f"{_OP}: {reason} not supported")
        _config.fall_back("nn.attention_fn", f"{reason} not supported over ranks")
        may = _allowed(query, key, axis_name, segment_ids, options.get("mesh"), **follows)
        if mask is not None and may is not None:
            mask = jnp.logical_and(in_rows(mask, may), in_rows(may, mask))
        elif mask is None:
            mask = may
        given = {
            "bias": bias, "mask": mask, "broadcast_dropout": broadcast_dropout,
            "dropout_rng": dropout_rng, "dropout_rate": dropout, "deterministic": not dropout,
            "dtype": dtype, "precision": precision, "module": module,
            **{name: f for name, f in einsums.items() if f is not None},
        }  # fmt: skip
        if force_fp32_for_softmax and module is not None:
            given["force_fp32_for_softmax"] = True
        return _by_flax(_scaled(query, options), key, value, given)

    return attend


def _why_not(
    query: Any,
    key: Any,
    value: Any,
    mask: Any,
    bias: Any,
    dropout: float,
    module: Any,
    einsums: dict[str, Any],
    unknown: list[str],
) -> str | None:
    """What of a call is not for :func:`jflux.attention`, with its verb; None: nothing."""
    if unknown:
        return f"{', '.join(unknown)} of the layer is"
    if bias is not None or mask is not None:
        return "a mask or bias is"
    if dropout:
        return f"dropout_rate={dropout} of attention weights is"
    if module is not None:
        return "sow_weights is"
    if any(f is not None for f in einsums.values()):
        return "an einsum of the layer's own is"
    if query.shape[-3] != key.shape[-3] or value.shape != key.shape:
        return "attention to keys and values of other shapes is"
    return None


def _with_one_batch(f: Callable[..., jax.Array], *arrays: jax.Array) -> jax.Array:
    """f, which takes [B, s, heads, c], of [..., s, heads, c]."""
    shape = arrays[0].shape
    if len(shape) == 4:
        return f(*arrays)
    batch = math.prod(shape[:-3])
    return f(*(a.reshape(batch, *a.shape[-3:]) for a in arrays)).reshape(shape)


def _at_precision(precision: Any) -> Any:
    """A context in which products have a layer's precision."""
    if precision is None:
        return contextlib.nullcontext()
    if isinstance(precision, tuple):
        precision = precision[0]
    if isinstance(precision, lax.Precision):
        precision = precision.name.lower()
    return jax.default_matmul_precision(getattr(precision, "name", precision))


def _allowed(
    query: jax.Array,
    key: jax.Array,
    axis_name: AxisName,
    segment_ids: Any,
    mesh: Any,
    *,
    causal: bool,
    layout: Layout,
    window: Any,
) -> Any:
    """The mask, bool [1 or B, 1, s, s], of whole sequences in the ranks' order; None: everything.
    With keys of another length, as in Flax's decoding, the layer's own mask says what is causal."""
    length = query.shape[-3]
    if length != key.shape[-3]:
        if window is not None or segment_ids is not None:
            raise ValueError(
                f"{_OP}: window= and segment_ids= need as many keys as queries, got "
                f"{key.shape[-3]} and {length}"
            )
        return None
    may = None
    if causal or window is not None:
        sizes = global_arrays._mesh_for(mesh, query).shape
        ranks = math.prod(sizes[name] for name in meshes.as_tuple(axis_name))
        at = causal_positions(length, ranks, layout=layout)
        i, j = at[:, None], at[None, :]
        may = np.ones((length, length), bool)
        if causal:
            may &= j <= i
        if window is not None:
            left, right = window_of(_OP, window) or (length, length)
            may &= (j >= i - left) & (j - right <= i)  # no sum beyond int32
        may = may[None, None]
    if segment_ids is not None:
        same = segment_ids[:, None, :, None] == segment_ids[:, None, None, :]
        may = same if may is None else may & same
    return may


def _scaled(query: jax.Array, options: dict[str, Any]) -> jax.Array:
    """Queries for an attention that divides scores by sqrt(c)."""
    if options.get("softcap") is not None or options.get("return_lse"):
        raise ValueError(f"{_OP}: softcap= and return_lse= are not for what falls back")
    for name in ("sinks", "bias", "alibi_slopes"):
        if options.get(name) is not None:
            raise ValueError(
                f"{_OP}: {name}= is not for what falls back, since Flax's attention has none; use "
                "causal=, window= or segment_ids= of attention_fn in place of a mask"
            )
    scale = options.get("scale")
    return query if scale is None else query * (scale * query.shape[-1] ** 0.5)


def _by_flax(
    query: jax.Array, key: jax.Array, value: jax.Array, given: dict[str, Any]
) -> jax.Array:
    """Flax's own: linen's for what that alone has, which does not share heads of keys."""
    from ._flax import nn, nnx

    ours = {"force_fp32_for_softmax", "qk_attn_weights_einsum", "attn_weights_value_einsum"}
    if isinstance(given["module"], nn.Module) or ours & set(given):
        return nn.dot_product_attention(query, key, value, **given)
    return nnx.dot_product_attention(query, key, value, **given)
