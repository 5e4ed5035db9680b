"""The formats of a quantised wire, and numbers as bytes in them: blocks of 128 with a scale."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._recipe import Format
from ._scaled import BLOCK, Scaled

#: The formats that data may travel in.
WIRES = ("float8_e4m3fn", "int8")
#: The types of what travels in them.
DTYPES = (np.dtype(jnp.bfloat16), np.dtype(np.float16), np.dtype(np.float32))

#: Bytes of a block: its values, and its scale.
_BLOCK_BYTES = BLOCK + 4


def format_of(wire: str) -> Format:
    """How blocks are quantised."""
    return Format(wire, (1, BLOCK), power_of_two=False)


def check(
    op: str,
    x: Any,
    wire: Any,
    grad_wire: Any,
    algorithm: str | None = None,
    what: str = "x has an array",
) -> None:
    """Raises for formats that are none, and for what cannot travel in one.

    Args:
      x: a pytree, of arrays or types.
      what: it is, in words.
    """
    for name, value in (("wire", wire), ("grad_wire", grad_wire)):
        if value is not None and not (isinstance(value, str) and value in WIRES):
            raise ValueError(
                f"jflux.{op}: {name}={value!r} must be None or one of {', '.join(WIRES)}"
            )
    if wire is None and grad_wire is None:
        return
    if algorithm not in (None, "chunked"):
        raise ValueError(
            f"jflux.{op}: {algorithm=} sends data as they are; with wire or grad_wire it must be "
            "None or 'chunked'"
        )
    for array in jax.tree.leaves(x):
        dtype = jnp.result_type(array)
        if dtype not in DTYPES:
            names = ", ".join(t.name for t in DTYPES)
            raise TypeError(
                f"jflux.{op}: wire and grad_wire are for {names}, and {what} of {dtype}"
            )


def shard_size(size: int, world: int) -> int:
    """Elements of a rank's shard, of an array of so many."""
    return BLOCK * -(-size // (world * BLOCK))


# ---- Bytes ---------------------------------------------------------------------------------------


def in_blocks(rows: jax.Array, wire: str) -> Scaled:
    """Rows [..., n] of numbers as values of their blocks [..., blocks, 128], the last one with
    zeros behind the row, and scales [..., blocks, 1]."""
    *lead, size = rows.shape
    blocks = jnp.pad(rows, [(0, 0)] * len(lead) + [(0, -size % BLOCK)])
    quantized: Scaled = format_of(wire).quantize(blocks.reshape(*lead, -1, BLOCK))
    return quantized


def packed(rows: jax.Array, wire: str) -> jax.Array:
    """Rows [..., n] of numbers as bytes: values of their blocks, and then the blocks' scales."""
    lead = rows.shape[:-1]
    quantized = in_blocks(rows, wire)
    values = lax.bitcast_convert_type(quantized.values, jnp.uint8).reshape(*lead, -1)
    scales = lax.bitcast_convert_type(quantized.scale, jnp.uint8).reshape(*lead, -1)
    return jnp.concatenate([values, scales], -1)


def unpacked(data: jax.Array, wire: str, size: int) -> jax.Array:
    """The first `size` numbers of each row of :func:`packed`, float32."""
    *lead, count = data.shape
    blocks = count // _BLOCK_BYTES
    values = data[..., : blocks * BLOCK].reshape(*lead, blocks, BLOCK)
    scales = data[..., blocks * BLOCK :].reshape(*lead, blocks, 1, 4)
    quantized = Scaled(
        lax.bitcast_convert_type(values, jnp.dtype(wire)),
        lax.bitcast_convert_type(scales, jnp.float32),
    )
    return quantized.dequantize().reshape(*lead, -1)[..., :size]
