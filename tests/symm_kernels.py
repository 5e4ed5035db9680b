"""Triton kernels for the tests of jflux.symm: for each device function, and some that are wrong.

Each comes with its reference in plain `lax`. Needs Triton.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax import lax

import jflux
import jflux.triton as jt

BLOCK = 256
PROGRAMS = 3  # more than one, and not as many as ranks


@triton.jit
def ring_kernel(ctx, x, y, inbox, BLOCK: tl.constexpr):
    """put, signal_set, wait: y is the x of the rank before."""
    me = jt.my_pe(ctx)
    world: tl.constexpr = jt.n_pes(ctx)
    program = jt.program_id(ctx)
    at = program * BLOCK + tl.arange(0, BLOCK)
    jt.put(ctx, inbox + at, tl.load(x + at), (me + 1) % world)
    jt.signal_set(ctx, program, (me + 1) % world)
    jt.wait(ctx, program, (me + world - 1) % world)
    tl.store(y + at, tl.load(inbox + at))


@triton.jit
def pull_kernel(ctx, x, y, outbox, BLOCK: tl.constexpr):
    """barrier_all, get: y is the sum of all ranks' x, in the order of the ranks."""
    world: tl.constexpr = jt.n_pes(ctx)
    program = jt.program_id(ctx)
    at = program * BLOCK + tl.arange(0, BLOCK)
    tl.store(outbox + at, tl.load(x + at))
    jt.barrier_all(ctx, program * world)
    total = tl.zeros([BLOCK], tl.float32)
    for pe in range(world):
        total += jt.get(ctx, outbox + at, pe).to(tl.float32)
    tl.store(y + at, total.to(y.dtype.element_ty))


@triton.jit
def count_kernel(ctx, x, y, inbox, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr):
    """signal_add, wait_count, peer_ptr: all programs of all ranks add to one signal of each rank;
    y is the sum of all programs' parts of all ranks' x."""
    me = jt.my_pe(ctx)
    world: tl.constexpr = jt.n_pes(ctx)
    program = jt.program_id(ctx)
    part = tl.arange(0, BLOCK)
    value = tl.load(x + program * BLOCK + part)
    for pe in range(world):
        to = jt.peer_ptr(ctx, inbox + (me * PROGRAMS + program) * BLOCK, pe)
        tl.store(to + part, value)
        jt.signal_add(ctx, 1, pe)
    jt.wait_count(ctx, 1, PROGRAMS * world)
    total = tl.zeros([BLOCK], tl.float32)
    for i in range(PROGRAMS * world):
        total += tl.load(inbox + i * BLOCK + part).to(tl.float32)
    tl.store(y + program * BLOCK + part, total.to(y.dtype.element_ty))


@triton.jit
def root_kernel(ctx, x, y, inbox, BLOCK: tl.constexpr, ROOT: tl.constexpr):
    """broadcast: y is the x of rank ROOT."""
    program = jt.program_id(ctx)
    at = program * BLOCK + tl.arange(0, BLOCK)
    jt.broadcast(ctx, inbox + at, tl.load(x + at), program, ROOT)
    tl.store(y + at, tl.load(inbox + at))


@triton.jit
def packets_kernel(ctx, x, y, packets, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr):
    """ll_put, ll_get, with a mask: y is the x of the rank after, and 0 in the last element."""
    me = jt.my_pe(ctx)
    world: tl.constexpr = jt.n_pes(ctx)
    at = jt.program_id(ctx) * BLOCK + tl.arange(0, BLOCK)
    inside = at < BLOCK * PROGRAMS - 1
    jt.ll_put(ctx, packets, at, tl.load(x + at), (me + world - 1) % world, mask=inside)
    got = jt.ll_get(ctx, packets, at, (me + 1) % world, x.dtype.element_ty, mask=inside)
    tl.store(y + at, got)


@triton.jit
def flag_kernel(ctx, x, y, inbox, BLOCK: tl.constexpr):
    """fence, and both buffers' places: what a program sends in two parts, with a fence between."""
    me = jt.my_pe(ctx)
    world: tl.constexpr = jt.n_pes(ctx)
    program = jt.program_id(ctx)
    at = program * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at)
    jt.put(ctx, inbox + 2 * program * BLOCK + tl.arange(0, BLOCK), value, (me + 1) % world)
    jt.fence(ctx)
    second = inbox + (2 * program + 1) * BLOCK + tl.arange(0, BLOCK)
    jt.put(ctx, second, value + value, (me + 1) % world)
    jt.signal_set(ctx, program, (me + 1) % world)
    jt.wait(ctx, program, (me + world - 1) % world)
    one = tl.load(inbox + 2 * program * BLOCK + tl.arange(0, BLOCK))
    tl.store(y + at, one + tl.load(second))


@triton.jit
def outside_kernel(ctx, x, y, first, second, BLOCK: tl.constexpr, PLACE: tl.constexpr):
    """Writes one element to a place counted from the first element of `first`, on the next rank."""
    me = jt.my_pe(ctx)
    world: tl.constexpr = jt.n_pes(ctx)
    at = tl.arange(0, BLOCK)
    value = tl.load(x + at)
    jt.put(ctx, first + at, value, (me + 1) % world)
    jt.put(ctx, second + at, value, (me + 1) % world)
    jt.put(ctx, first + PLACE, 1.0, (me + 1) % world)
    jt.signal_set(ctx, 0, (me + 1) % world)
    jt.wait(ctx, 0, (me + world - 1) % world)
    tl.store(y + at, tl.load(second + at))


@triton.jit
def signal_outside_kernel(ctx, x, y, BLOCK: tl.constexpr):
    """Sets signal 1, of one."""
    me = jt.my_pe(ctx)
    world: tl.constexpr = jt.n_pes(ctx)
    jt.signal_set(ctx, 1, (me + 1) % world)
    jt.wait(ctx, 1, (me + world - 1) % world)
    at = tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at))


@triton.jit
def stuck_kernel(ctx, x, y, WAY: tl.constexpr, BLOCK: tl.constexpr):
    """Waits for what nobody sends."""
    me = jt.my_pe(ctx)
    world: tl.constexpr = jt.n_pes(ctx)
    at = tl.arange(0, BLOCK)
    if WAY == "signal":
        jt.wait(ctx, 3, (me + 1) % world)
    elif WAY == "count":
        jt.signal_add(ctx, 3, me)
        jt.wait_count(ctx, 3, 2)
    tl.store(y + at, tl.load(x + at))


@triton.jit
def stuck_packets_kernel(ctx, x, y, packets, BLOCK: tl.constexpr):
    """Waits for packets that nobody sends."""
    at = tl.arange(0, BLOCK)
    got = jt.ll_get(ctx, packets, at, 0, x.dtype.element_ty)
    tl.store(y + at, got)


@triton.jit
def copy_kernel(ctx, x, y, BLOCK: tl.constexpr):
    """No communication: what a call costs."""
    at = jt.program_id(ctx) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at))


def _shifted(by: int) -> Any:
    def reference(x: jax.Array, *, axis_name: Any, **_: Any) -> jax.Array:
        n = lax.axis_size(axis_name)
        return lax.ppermute(x, axis_name, [(i, (i + by) % n) for i in range(n)])

    return reference


def _sum(x: jax.Array, *, axis_name: Any, **_: Any) -> jax.Array:
    return lax.all_gather(x, axis_name).astype(jnp.float32).sum(0).astype(x.dtype)


def _sum_of_parts(x: jax.Array, *, axis_name: Any, BLOCK: int, PROGRAMS: int) -> jax.Array:
    parts = lax.all_gather(x.reshape(PROGRAMS, BLOCK), axis_name).astype(jnp.float32)
    total = parts.sum((0, 1)).astype(x.dtype)
    return jnp.concatenate([total] * PROGRAMS)


def _of_root(x: jax.Array, *, axis_name: Any, ROOT: int, **_: Any) -> jax.Array:
    return lax.all_gather(x, axis_name)[ROOT]


def _packets(x: jax.Array, *, axis_name: Any, **_: Any) -> jax.Array:
    return _shifted(-1)(x, axis_name=axis_name).at[-1].set(0)


def _thrice(x: jax.Array, *, axis_name: Any, **_: Any) -> jax.Array:
    shifted = _shifted(1)(x, axis_name=axis_name)
    return shifted + (shifted + shifted)


def _same(x: jax.Array, **_: Any) -> jax.Array:
    return x


def _call(
    kernel: Any, x: jax.Array, axis_name: Any, grid: int = 1, BLOCK: int = BLOCK, **options: Any
) -> jax.Array:
    """A kernel whose result is like x."""
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jflux.symm.call(
        kernel, x, out_shape=like, axis_name=axis_name, grid=grid, BLOCK=BLOCK, **options
    )


# name -> (kernel, workspace of x's elements per rank, signals per rank, reference, constexprs).
RIGHT: dict[str, tuple[Any, Any, Any, Any, dict[str, Any]]] = {
    "ring": (ring_kernel, lambda n: 1, lambda n: PROGRAMS, _shifted(1), {}),
    "pull": (pull_kernel, lambda n: 1, lambda n: PROGRAMS * n, _sum, {}),
    "count": (count_kernel, lambda n: n, lambda n: 2, _sum_of_parts, {"PROGRAMS": PROGRAMS}),
    "root": (root_kernel, lambda n: 1, lambda n: PROGRAMS, _of_root, {"ROOT": 1}),
    "flag": (flag_kernel, lambda n: 2, lambda n: PROGRAMS, _thrice, {}),
}


def call_right(name: str, x: jax.Array, axis_name: Any) -> jax.Array:
    """Calls a kernel of RIGHT, or "packets", on x [PROGRAMS BLOCK]. Inside shard_map."""
    n = lax.axis_size(axis_name)
    if name == "packets":
        return _call(
            packets_kernel,
            x,
            axis_name,
            workspace={"packets": jax.ShapeDtypeStruct((x.size, 2), jnp.uint64)},
            grid=PROGRAMS,
            reference=_packets,
            PROGRAMS=PROGRAMS,
        )
    kernel, parts, signals, reference, constexprs = RIGHT[name]
    buffer = "outbox" if name == "pull" else "inbox"
    return _call(
        kernel,
        x,
        axis_name,
        workspace={buffer: jax.ShapeDtypeStruct((parts(n), x.size), x.dtype)},
        signals=signals(n),
        grid=PROGRAMS,
        reference=reference,
        **constexprs,
    )


NAMES = (*RIGHT, "packets")


def call_outside(x: jax.Array, axis_name: Any, place: int) -> jax.Array:
    """x [BLOCK]: the kernel writes to `place` of `first`, whose end is BLOCK."""
    buffer = jax.ShapeDtypeStruct((BLOCK,), x.dtype)
    return _call(
        outside_kernel,
        x,
        axis_name,
        workspace={"first": buffer, "second": buffer},
        signals=1,
        reference=_shifted(1),
        PLACE=place,
    )


def call_signal_outside(x: jax.Array, axis_name: Any) -> jax.Array:
    return _call(
        signal_outside_kernel,
        x,
        axis_name,
        signals=1,
        reference=_same,
    )


def call_stuck(x: jax.Array, axis_name: Any, way: str) -> jax.Array:
    """x [BLOCK]; way: "signal", "count" or "packets"."""
    if way == "packets":
        return _call(
            stuck_packets_kernel,
            x,
            axis_name,
            workspace={"packets": jax.ShapeDtypeStruct((BLOCK, 2), jnp.uint64)},
        )
    return _call(
        stuck_kernel,
        x,
        axis_name,
        signals=4,
        WAY=way,
    )


@triton.jit
def misspelt_kernel(ctx, x, y, BLOCK: tl.constexpr):
    """Does not compile."""
    at = tl.arange(0, blokc)  # noqa: F821
    tl.store(y + at, tl.load(x + at))


@triton.jit
def misnaming_kernel(ctx, x, y, BLOCK: tl.constexpr):
    """Calls a function that jflux.triton does not have."""
    jt.putt(ctx, y, tl.load(x), 0)


def call_copy(x: jax.Array, axis_name: Any, grid: int = 4, block: int = 1024) -> jax.Array:
    return _call(
        copy_kernel,
        x,
        axis_name,
        grid=grid,
        reference=_same,
        BLOCK=block,
    )
