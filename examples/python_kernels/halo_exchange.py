"""A stencil over rows that are split over ranks, in Triton: ``python halo_exchange.py``.

Each rank's edges travel while it works on its interior. Takes ten seconds on two cores, and prints
there::

    halo_exchange on 4 cpu devices: 121 calls are right
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from running import AXIS, show

import jflux
import jflux.triton as jt


@triton.jit
def mean_kernel(
    ctx,
    x,
    y,
    above,
    below,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    REACH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """y[i] = the mean of rows i - REACH to i + REACH, around the ring of ranks. Each program has
    BLOCK columns, and two signals."""
    me = jt.my_pe(ctx)
    world: tl.constexpr = jt.n_pes(ctx)
    following = (me + 1) % world
    previous = (me + world - 1) % world
    program = jt.program_id(ctx)
    at = program * BLOCK + tl.arange(0, BLOCK)
    inside = at < COLUMNS
    for i in tl.static_range(REACH):
        last = tl.load(x + (ROWS - REACH + i) * COLUMNS + at, mask=inside)
        jt.put(ctx, above + i * COLUMNS + at, last, following, mask=inside)
        first = tl.load(x + i * COLUMNS + at, mask=inside)
        jt.put(ctx, below + i * COLUMNS + at, first, previous, mask=inside)
    jt.signal_set(ctx, 2 * program, following)
    jt.signal_set(ctx, 2 * program + 1, previous)
    for i in range(REACH, ROWS - REACH):
        total = tl.zeros([BLOCK], tl.float32)
        for j in tl.static_range(-REACH, REACH + 1):
            total += tl.load(x + (i + j) * COLUMNS + at, mask=inside, other=0).to(tl.float32)
        tl.store(y + i * COLUMNS + at, total / (2 * REACH + 1), mask=inside)
    jt.wait(ctx, 2 * program, previous)
    jt.wait(ctx, 2 * program + 1, following)
    for edge in range(2 * REACH):
        i = tl.where(edge < REACH, edge, ROWS - 2 * REACH + edge)
        total = tl.zeros([BLOCK], tl.float32)
        for j in tl.static_range(-REACH, REACH + 1):
            row = i + j
            is_here = (row >= 0) & (row < ROWS)
            here = tl.load(x + row * COLUMNS + at, mask=inside & is_here, other=0)
            before = above + (row + REACH) * COLUMNS + at
            after = below + (row - ROWS) * COLUMNS + at
            here += tl.load(before, mask=inside & (row < 0), other=0)
            here += tl.load(after, mask=inside & (row >= ROWS), other=0)
            total += here.to(tl.float32)
        tl.store(y + i * COLUMNS + at, total / (2 * REACH + 1), mask=inside)


def reference(x: jax.Array, *, axis_name: Any, REACH: int, **_: Any) -> jax.Array:
    """The same in plain lax."""
    padded = jflux.reference.halo_exchange(x, axis_name=axis_name, halo=REACH, mode="wrap")
    padded = padded.astype(jnp.float32)
    total = sum(padded[i : i + len(x)] for i in range(2 * REACH + 1))
    return (total / (2 * REACH + 1)).astype(x.dtype)


def halo_mean(x: jax.Array, *, reach: int = 2, axis_name: Any = AXIS) -> jax.Array:
    """The mean of each element and its neighbours up to `reach` rows away: x [rows, columns].
    Inside shard_map."""
    rows, columns = x.shape
    block = 128
    programs = -(-columns // block)
    halo = jax.ShapeDtypeStruct((reach, columns), x.dtype)
    return jflux.symm.call(
        mean_kernel,
        x,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        workspace={"above": halo, "below": halo},
        signals=2 * programs,
        axis_name=axis_name,
        grid=programs,
        reference=reference,
        ROWS=rows,
        COLUMNS=columns,
        REACH=reach,
        BLOCK=block,
    )


if __name__ == "__main__":
    show(
        "halo_exchange",
        halo_mean,
        lambda x: reference(x, axis_name=AXIS, REACH=2),
        jax.ShapeDtypeStruct((64, 1000), jnp.float32),
        times=10,
    )
