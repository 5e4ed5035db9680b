"""All-gather and product in one Triton kernel: ``python all_gather_matmul.py``.

Takes five seconds on two cores, and prints there::

    all_gather_matmul on 4 cpu devices: 37 calls are right
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


@triton.jit
def all_gather_matmul_kernel(
    ctx,
    x,
    w,
    y,
    gathered,
    ROWS: tl.constexpr,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SENDERS: tl.constexpr,
    CHUNK: tl.constexpr,
    TMA: tl.constexpr,
):
    """y [world ROWS, COLUMNS] = the rows x [ROWS, K] of all ranks times w [K, COLUMNS].

    The first SENDERS programs put x into `gathered` of the peers, CHUNK elements at a time, block
    of BM rows by block, and add 1 to the block's signal. The others have one tile of each rank's
    rows: first its own, which waits for nothing, then the next rank's, as soon as its block has
    arrived. With TMA, tiles are loaded by tensor descriptors, else by pointers.
    """
    me = jt.my_pe(ctx)
    world: tl.constexpr = jt.n_pes(ctx)
    program = jt.program_id(ctx)
    blocks: tl.constexpr = ROWS // BM
    if program < SENDERS:
        share: tl.constexpr = BM * K // SENDERS
        for d in tl.static_range(1, world):
            pe = (me + world - d) % world
            for block in range(blocks):
                for begin in range(0, share, CHUNK):
                    at = block * BM * K + program * share + begin + tl.arange(0, CHUNK)
                    jt.put(ctx, gathered + me * ROWS * K + at, tl.load(x + at), pe)
                jt.signal_add(ctx, me * blocks + block, pe)
    else:
        tile = program - SENDERS
        block = tile % blocks
        first = (tile // blocks) * BN
        rows = block * BM + tl.arange(0, BM)
        columns = first + tl.arange(0, BN)
        depth = tl.arange(0, BK)
        if TMA:
            w_tiles = tl.make_tensor_descriptor(w, [K, COLUMNS], [COLUMNS, 1], [BK, BN])
        for d in tl.static_range(0, world):
            pe = (me + d) % world
            if d == 0:
                source = x
            else:
                source = gathered + pe * ROWS * K
                jt.wait_count(ctx, pe * blocks + block, SENDERS)
            total = tl.zeros([BM, BN], tl.float32)
            if TMA:
                x_tiles = tl.make_tensor_descriptor(source, [ROWS, K], [K, 1], [BM, BK])
                for k in range(0, K, BK):
                    a = x_tiles.load([block * BM, k])
                    total = tl.dot(a, w_tiles.load([k, first]), total)
            else:
                a_at = source + rows[:, None] * K + depth[None, :]
                b_at = w + depth[:, None] * COLUMNS + columns[None, :]
                for _ in range(0, K, BK):
                    total = tl.dot(tl.load(a_at), tl.load(b_at), total)
                    a_at += BK
                    b_at += BK * COLUMNS
            out = y + (pe * ROWS + rows)[:, None] * COLUMNS + columns[None, :]
            tl.store(out, total.to(y.dtype.element_ty))


def reference(x: jax.Array, w: jax.Array, *, axis_name: Any, **_: Any) -> jax.Array:
    """The same in plain lax."""
    return lax.all_gather(x, axis_name, tiled=True) @ w


def all_gather_matmul(
    x: jax.Array,
    w: jax.Array,
    *,
    axis_name: Any = AXIS,
    tile: tuple[int, int, int] = (128, 256, 64),
    tma: bool = True,
    num_stages: int = 4,
    senders: int = 4,
) -> jax.Array:
    """The rows x [rows, k] of all ranks times w [k, columns], which are whole tiles of `tile`
    (rows, columns, k). Inside shard_map."""
    bm, bn, bk = tile
    (rows, k), columns = x.shape, w.shape[1]
    world = lax.axis_size(axis_name)
    blocks = rows // bm
    return jflux.symm.call(
        all_gather_matmul_kernel,
        x,
        w,
        out_shape=jax.ShapeDtypeStruct((world * rows, columns), x.dtype),
        workspace={"gathered": jax.ShapeDtypeStruct((world, rows, k), x.dtype)},
        signals=world * blocks,
        axis_name=axis_name,
        grid=senders + blocks * (columns // bn),
        reference=reference,
        num_warps=8,
        num_stages=num_stages,
        ROWS=rows,
        K=k,
        COLUMNS=columns,
        BM=bm,
        BN=bn,
        BK=bk,
        SENDERS=senders,
        CHUNK=min(32768, bm * k // senders),
        TMA=tma,
    )


if __name__ == "__main__":
    on_gpus = jax.default_backend() == "gpu"
    rows, k, columns = (1024, 4096, 4096) if on_gpus else (128, 512, 256)
    show(
        "all_gather_matmul",
        all_gather_matmul,
        lambda x, w: reference(x, w, axis_name=AXIS),
        jax.ShapeDtypeStruct((rows, k), jnp.float16),
        jax.ShapeDtypeStruct((k, columns), jnp.float16),
        times=3,
        tolerance=2e-3,
    )
