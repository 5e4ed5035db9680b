"""All-to-all of rows in Triton: ``python all_to_all.py``.

Takes ten seconds on two cores, and prints there::

    all_to_all on 4 cpu devices: 121 calls are right
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax import lax
from running import AXIS, make_mesh, show

import jflux
import jflux.triton as jt


@triton.jit
def all_to_all_kernel(
    ctx, x, y, arrived, SIZE: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr
):
    """x[pe] of each rank, SIZE elements, goes to y[me] of rank pe. A program has one share of each
    of these parts, and a signal from each peer."""
    me = jt.my_pe(ctx)
    world: tl.constexpr = jt.n_pes(ctx)
    program = jt.program_id(ctx)
    share: tl.constexpr = (SIZE + PROGRAMS - 1) // PROGRAMS
    for d in tl.static_range(1, world):
        pe = (me + d) % world
        for begin in range(0, share, BLOCK):
            at = program * share + begin + tl.arange(0, BLOCK)
            inside = (at < SIZE) & (at < (program + 1) * share)
            part = tl.load(x + pe * SIZE + at, mask=inside)
            jt.put(ctx, arrived + me * SIZE + at, part, pe, mask=inside)
        jt.signal_set(ctx, me * PROGRAMS + program, pe)
    for begin in range(0, share, BLOCK):
        at = program * share + begin + tl.arange(0, BLOCK)
        inside = (at < SIZE) & (at < (program + 1) * share)
        tl.store(y + me * SIZE + at, tl.load(x + me * SIZE + at, mask=inside), mask=inside)
    for d in tl.static_range(1, world):
        pe = (me + world - d) % world
        jt.wait(ctx, pe * PROGRAMS + program, pe)
        for begin in range(0, share, BLOCK):
            at = program * share + begin + tl.arange(0, BLOCK)
            inside = (at < SIZE) & (at < (program + 1) * share)
            tl.store(
                y + pe * SIZE + at, tl.load(arrived + pe * SIZE + at, mask=inside), mask=inside
            )


def reference(x: jax.Array, *, axis_name: Any, **_: Any) -> jax.Array:
    """The same in plain lax."""
    return lax.all_to_all(x, axis_name, 0, 0)


def all_to_all(x: jax.Array, *, axis_name: Any = AXIS) -> jax.Array:
    """y[pe] is rank pe's x[me]: x [ranks, ...]. Inside shard_map."""
    size = math.prod(x.shape[1:])
    programs = min(64, -(-size // 2048))
    return jflux.symm.call(
        all_to_all_kernel,
        x,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        workspace={"arrived": jax.ShapeDtypeStruct(x.shape, x.dtype)},
        signals=x.shape[0] * programs,
        axis_name=axis_name,
        grid=programs,
        reference=reference,
        vjp=lambda args, results, cotangent, axis_name, **_: (all_to_all(cotangent),),
        SIZE=size,
        PROGRAMS=programs,
        BLOCK=2048,
    )


if __name__ == "__main__":
    show(
        "all_to_all",
        all_to_all,
        lambda x: reference(x, axis_name=AXIS),
        jax.ShapeDtypeStruct((make_mesh().size, 100, 300), jnp.bfloat16),
        times=10,
        tolerance=0,
    )
