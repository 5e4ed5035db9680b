"""What the layers for linen and for NNX share. Imports Flax."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._ops._scaled import Scaled
from .._ops.attention.kv_cache import KVCache
from .._ops.attention.ulysses_attention import of_own_heads
from .._ranks import meshes
from .._ranks.meshes import AxisName
from ._cache import init_cache

try:
    import flax.linen as nn
    from flax import nnx as nnx
    from flax import serialization
    from flax.core import meta
    from flax.linen import fp8_ops as fp8_ops
    from flax.linen.dtypes import promote_dtype as promote_dtype
except ImportError as error:
    raise ImportError("the layers of jflux.nn need Flax: pip install flax") from error

# As ``flax.serialization.to_bytes`` writes them.
serialization.register_serialization_state(
    Scaled,
    lambda scaled: {"values": scaled.values, "scale": scaled.scale},
    lambda _, state: Scaled(state["values"], state["scale"]),
)

Initializer = Callable[..., Any]

_lecun_normal = nn.initializers.lecun_normal()
_embedding = nn.initializers.variance_scaling(1.0, "fan_in", "normal", out_axis=0)
bias_init = nn.initializers.zeros


# Functions of this module, unlike Flax's closures, can be pickled with a layer that has them.
def kernel_init(*args: Any, **kwargs: Any) -> Any:
    """``flax.linen.initializers.lecun_normal()``."""
    return _lecun_normal(*args, **kwargs)


def embedding_init(*args: Any, **kwargs: Any) -> Any:
    """As that of ``flax.linen.Embed``."""
    return _embedding(*args, **kwargs)


def of_product(init: Initializer, inputs: int) -> Initializer:
    """`init` for a kernel whose first `inputs` dimensions are contracted: called with the shape of
    the matrix that it is, as ``DenseGeneral`` calls it, so that its fan-in is right."""

    def wrapped(key: jax.Array, shape: Sequence[int], dtype: Any) -> Any:
        value = init(key, (math.prod(shape[:inputs]), math.prod(shape[inputs:])), dtype)
        if isinstance(value, meta.AxisMetadata):
            return meta.replace_boxed(value, jnp.reshape(value.unbox(), shape))
        return jnp.reshape(value, shape)

    return wrapped


def of_experts(init: Initializer, num_experts: int) -> Initializer:
    """`init` for kernels [physical slots, inputs, outputs], of which slot s holds expert
    ``s % num_experts``: each expert's is drawn by itself, so that its fan-in is right."""

    def wrapped(key: jax.Array, shape: Sequence[int], dtype: Any) -> Any:
        keys = jax.random.split(key, num_experts)[jnp.arange(shape[0]) % num_experts]
        return jax.vmap(lambda key: meta.unbox(init(key, tuple(shape[1:]), dtype)))(keys)

    return wrapped


def in_one_type(dtype: Any, *arrays: Any) -> list[Any]:
    """Arrays (None for none) in `dtype`, or in what they promote to, as Flax's own layers do."""
    return promote_dtype(*arrays, dtype=dtype)


def options_of(layer: Any) -> dict[str, Any]:
    """Those fields of a layer that the functions of jflux.nn take."""
    names = ["axis_name", "sequence_parallel", "precision", "recipe", "x_spec"]
    names += [name for name in ("wire", "grad_wire") if hasattr(layer, name)]
    return {name: getattr(layer, name) for name in names}


def sizes_of_attention(
    d: int, heads: int, kv_heads: int | None, head_dim: int | None
) -> tuple[int, int, int]:
    """(heads, heads of keys and values, elements of a head) of an `Attention`."""
    kv_heads = heads if kv_heads is None else kv_heads
    if heads % kv_heads:
        raise ValueError(f"num_heads={heads} must be a multiple of num_kv_heads={kv_heads}")
    if head_dim is None and d % heads:
        raise ValueError(f"num_heads={heads} must divide the width {d}, or head_dim be given")
    return heads, kv_heads, head_dim or d // heads


def own_slopes(slopes: Sequence[float] | None, axis_name: AxisName) -> jax.Array | None:
    """ALiBi's slopes of all heads; inside ``shard_map`` those of this rank's."""
    if slopes is None:
        return None
    whole = jnp.asarray(slopes, jnp.float32)
    return of_own_heads(whole, axis_name) if meshes.is_bound(axis_name) else whole


#: What a layer's state calls the arrays of its cache, as Flax's own attention layers do. The block
#: table of a paged cache is no state: it is one for all layers, and calls get it.
CACHED = ("cached_key", "cached_value", "cache_index")


def empty_cache(
    layer: Any,
    shape: Sequence[int],
    *heads: int,
    dtype: Any,
    x_spec: Any,
    page_size: int | None,
    pages: int | None,
) -> KVCache:
    """A cache of an attention layer, for activations of a shape, [b, S, d].

    Args:
      heads: of queries, of keys and values; elements of one.
      page_size, pages: as in :func:`jflux.nn.init_cache`.
    """
    queries, kv_heads, head_dim = heads
    return init_cache(
        shape[0], shape[1], queries, head_dim, num_kv_heads=kv_heads, dtype=dtype,
        axis_name=layer.axis_name, context_axis=layer.context_axis, x_spec=x_spec,
        page_size=page_size, pages=pages,
    )  # fmt: skip


def cache_of(kind: str, arrays: Sequence[Any], block_table: Any, paged: bool) -> KVCache | None:
    """The cache of a layer's arrays, None for none. Raises for a paged one without a block table,
    and for a block table without one."""
    paged = paged and len(arrays) > 0
    if paged and block_table is None:
        raise ValueError(f"jflux.nn.{kind}.Attention: the cache is paged; pass block_table=")
    if block_table is not None and not paged:
        raise ValueError(
            f"jflux.nn.{kind}.Attention: block_table= is for a paged cache; make one with "
            "page_size= and pages="
        )
    if not arrays:
        return None
    keys, values, lengths = arrays
    return KVCache(keys, values, lengths, block_table)
