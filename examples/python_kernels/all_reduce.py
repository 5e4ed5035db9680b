"""One-shot all-reduce of a few KB in Triton: ``python all_reduce.py``.

Takes ten seconds on two cores, and prints there::

    all_reduce on 4 cpu devices: 121 calls are right
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax import lax
from running import AXIS, show

import jflux
import jflux.triton as jt

WORDS = 256  # of 8 bytes, a program's


@triton.jit
def all_reduce_kernel(ctx, x, y, packets, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr):
    """Each program has BLOCK words, of four values. Each rank puts its words into LL packets of all
    ranks, its own too, and adds up what arrives in the order of the ranks: all ranks get the same
    bits."""
    me = jt.my_pe(ctx)
    world: tl.constexpr = jt.n_pes(ctx)
    at = jt.program_id(ctx) * BLOCK + tl.arange(0, BLOCK)
    words = tl.load(x.to(tl.pointer_type(tl.uint64)) + at)
    for d in tl.static_range(1, world + 1):
        jt.ll_put(ctx, packets, me * (BLOCK * PROGRAMS) + at, words, (me + d) % world)
    a = tl.zeros([BLOCK], tl.float32)
    b = tl.zeros([BLOCK], tl.float32)
    c = tl.zeros([BLOCK], tl.float32)
    d = tl.zeros([BLOCK], tl.float32)
    for pe in tl.static_range(0, world):
        word = jt.ll_get(ctx, packets, pe * (BLOCK * PROGRAMS) + at, pe, tl.uint64)
        a += value(word, 0, x.dtype.element_ty)
        b += value(word, 1, x.dtype.element_ty)
        c += value(word, 2, x.dtype.element_ty)
        d += value(word, 3, x.dtype.element_ty)
    result = bits(a, 0, x.dtype.element_ty) | bits(b, 1, x.dtype.element_ty)
    result |= bits(c, 2, x.dtype.element_ty) | bits(d, 3, x.dtype.element_ty)
    tl.store(y.to(tl.pointer_type(tl.uint64)) + at, result)


@triton.jit
def value(word, i: tl.constexpr, dtype: tl.constexpr):
    """The i-th of the four values in a word, float32."""
    return (word >> (16 * i)).to(tl.uint16).to(dtype, bitcast=True).to(tl.float32)


@triton.jit
def bits(value, i: tl.constexpr, dtype: tl.constexpr):
    return value.to(dtype).to(tl.uint16, bitcast=True).to(tl.uint64) << (16 * i)


def reference(x: jax.Array, *, axis_name: Any, **_: Any) -> jax.Array:
    """The same in plain lax."""
    return lax.psum(x.astype(jnp.float32), axis_name).astype(x.dtype)


def all_reduce(x: jax.Array, *, axis_name: Any = AXIS) -> jax.Array:
    """The sum of all ranks' x, a 16-bit type of a multiple of 1024 elements. Inside shard_map."""
    programs = x.size // (4 * WORDS)
    return jflux.symm.call(
        all_reduce_kernel,
        x,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        workspace={"packets": jax.ShapeDtypeStruct((8 * x.size // 4, 2), jnp.uint64)},
        axis_name=axis_name,
        grid=programs,
        reference=reference,
        vjp=lambda args, results, cotangent, axis_name, **_: (all_reduce(cotangent),),
        num_warps=8,
        BLOCK=WORDS,
        PROGRAMS=programs,
    )


if __name__ == "__main__":
    show(
        "all_reduce",
        all_reduce,
        lambda x: lax.psum(x, AXIS),
        jax.ShapeDtypeStruct((4096,), jnp.float16),
        times=10,
    )
