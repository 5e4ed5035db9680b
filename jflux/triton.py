"""Device functions for Triton kernels that :func:`jflux.symm.call` launches.

They have OpenSHMEM's names and, for one call, its meaning; numbers in brackets are sections of the
OpenSHMEM 1.5 specification. docs/guide/python_kernels.md has a table and an example. The C++
functions of the same protocol are in cc/jflux/shmem.h.

- **ctx** is the call as one program (CTA) of one rank sees it: a kernel's first argument, and the
  first argument of every function. Its contents are no interface.
- **Symmetric pointers** are pointers into a workspace buffer of the call: a buffer's parameter of
  the kernel, plus an offset. They name this rank's copy; :func:`peer_ptr` names a peer's.
- **Signals** are numbered from 0. A signal is set once in a call, by one rank, or counts up.
  Nothing is reset: a signal carries the call's epoch, and 0 is older than any call.
- **Order.** All threads of a program make each call, with equal arguments, outside of divergent
  control flow. What any of them has stored before is ordered before the signal that the program
  sets; all of them see what the setter had stored when :func:`wait` returns.
- **Time.** Each wait has the heap's deadline. A wait that fails writes the call's fault record and
  ends the kernel.

TMA stores (``descriptor.store``) are not ordered before signals: peers are written with
:func:`put` or ``tl.store``.
"""

# The decorator gives functions a signature that type checkers do not know.
# mypy: ignore-errors

from __future__ import annotations

try:
    import triton
    import triton.language as tl
except ImportError as error:  # pragma: no cover - depends on what is installed
    raise ImportError("jflux.triton needs Triton: pip install 'triton>=3.5'") from error

__all__ = [
    "barrier_all",
    "broadcast",
    "fence",
    "get",
    "ll_get",
    "ll_put",
    "my_pe",
    "n_pes",
    "peer_ptr",
    "program_id",
    "put",
    "signal_add",
    "signal_set",
    "wait",
    "wait_count",
]

# Fields of ctx, set by `_begin`. The bases are the addresses of the workspace's copies.
_STATE = tl.constexpr(0)  # address of this device's DeviceState (cc/gpu/device_state.h)
_RANK = tl.constexpr(1)
_BASES = tl.constexpr(2)
_OWN = tl.constexpr(3)  # this rank's base
_VALUE = tl.constexpr(4)  # of a signal that is set in this call
_SIGNALS = tl.constexpr(5)  # offset of signal 0 of this call's half
_PROGRAM = tl.constexpr(6)
_OP = tl.constexpr(7)
_SKIP = tl.constexpr(8)  # TestHooks::skip_waits

# Offsets in C++ structs; cc/runtime/module_call_ffi.cc asserts them.
_STOP = tl.constexpr(16)  # WorkspaceHeader
_INSIDE = tl.constexpr(24)
_HEADER_BYTES = tl.constexpr(1024)
_HELLOS = tl.constexpr(8)  # words before signal 0
_TIMEOUT = tl.constexpr(32)  # DeviceState: hooks, timeline, limits
_WARN_LEFT = tl.constexpr(40)
_WARNED = tl.constexpr(48)
_FAULT = tl.constexpr(56)
_WARNING = tl.constexpr(64)
_ABORT = tl.constexpr(72)

# FaultKind (cc/core/signal.h).
_TIMED_OUT = tl.constexpr(1)
_MISMATCH = tl.constexpr(2)
_OVERLAP = tl.constexpr(4)
_ABORTED = tl.constexpr(5)

_SIGNATURE_BITS = tl.constexpr(24)
_SIGNATURE_MASK = tl.constexpr(0xFFFFFF)
_EPOCH_MASK = tl.constexpr((1 << 40) - 1)
_ALIGN = tl.constexpr(128)  # bytes: of workspace buffers

# ---- Instructions -------------------------------------------------------------------------------
#
# On scalars: each thread that gets there executes them. In a branch on `_tid()` they belong to some
# threads alone; nothing in such a branch may synchronise.


@triton.jit
def _do(text: tl.constexpr, constraints: tl.constexpr, args):
    """An instruction for its effects; it sets $0, which nobody reads."""
    return tl.inline_asm_elementwise(text, constraints, args, dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _get_u64(text: tl.constexpr, constraints: tl.constexpr, args):
    """An instruction with a result, which memory or time may change."""
    return tl.inline_asm_elementwise(
        text, constraints, args, dtype=tl.uint64, is_pure=False, pack=1
    )


@triton.jit
def _tid():
    return tl.inline_asm_elementwise(
        "mov.u32 $0, %tid.x;", "=r", [], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def _load_acquire(address):
    return _get_u64("ld.acquire.sys.global.u64 $0, [$1];", "=l,l,~{memory}", [address])


@triton.jit
def _load_relaxed(address):
    return _get_u64("ld.relaxed.sys.global.u64 $0, [$1];", "=l,l,~{memory}", [address])


@triton.jit
def _store_relaxed(address, value):
    _do("st.relaxed.sys.global.u64 [$1], $2; mov.u32 $0, 0;", "=r,l,l,~{memory}", [address, value])


@triton.jit
def _store_release(address, value):
    _do("st.release.sys.global.u64 [$1], $2; mov.u32 $0, 0;", "=r,l,l,~{memory}", [address, value])


@triton.jit
def _compare_exchange(address, expected, desired):
    seen = _get_u64(
        "atom.acq_rel.sys.global.cas.b64 $0, [$1], $2, $3;",
        "=l,l,l,l,~{memory}",
        [address, expected, desired],
    )
    return seen == expected


@triton.jit
def _add_here(address, value):
    """Adds to this rank's own memory; the value before."""
    return _get_u64(
        "atom.relaxed.gpu.global.add.u64 $0, [$1], $2;", "=l,l,l,~{memory}", [address, value]
    )


@triton.jit
def _exchange_here(address, value):
    _do(
        "{ .reg .b64 was; atom.relaxed.gpu.global.exch.b64 was, [$1], $2; mov.u32 $0, 0; }",
        "=r,l,l,~{memory}",
        [address, value],
    )


@triton.jit
def _fence_system():
    _do("fence.acq_rel.sys; mov.u32 $0, 0;", "=r,~{memory}", [])


@triton.jit
def _fence_proxy():
    """What this thread sees, TMA sees too."""
    _do("fence.proxy.async; mov.u32 $0, 0;", "=r,~{memory}", [])


@triton.jit
def _now():
    return _get_u64("mov.u64 $0, %globaltimer;", "=l,~{memory}", [])


@triton.jit
def _sleep(ns: tl.constexpr):
    _do("nanosleep.u32 $1; mov.u32 $0, 0;", "=r,r,~{memory}", [tl.full([], ns, tl.int32)])


@triton.jit
def _trap():
    """After a pause, in which the host prints the reason: XLA only reports a failed launch."""
    start = _now()
    while _now() - start < 300000000:
        _sleep(1000)
    _do("trap; mov.u32 $0, 0;", "=r,~{memory}", [])


# ---- Waiting ------------------------------------------------------------------------------------
#
# As Patience and WaitSignal of cc/core/signal.h, on those threads for which `active`.


@triton.jit
def _write_record(record, ctx, kind: tl.constexpr, peer, item, expected, seen):
    _store_relaxed(record + 8, ctx[_OP] | (ctx[_RANK].to(tl.uint64) << 32))
    _store_relaxed(record + 16, peer.to(tl.uint64))
    _store_relaxed(record + 24, item.to(tl.int64).to(tl.uint64, bitcast=True))
    _store_relaxed(record + 32, expected)
    _store_relaxed(record + 40, seen)
    _store_release(record, tl.full([], kind, tl.uint64))


@triton.jit
def _fail(ctx, kind: tl.constexpr, peer, item, expected, seen):
    """The rank's first failure writes the fault record."""
    zero = tl.full([], 0, tl.uint64)
    if _compare_exchange(ctx[_OWN] + _STOP, zero, zero + 1):
        _write_record(_load_relaxed(ctx[_STATE] + _FAULT), ctx, kind, peer, item, expected, seen)
    _trap()


@triton.jit
def _warn(ctx, peer, item, expected, seen):
    """Whether this wait's warning is out: its record is written, or another wait of the call has
    written one. Another call's record may still be there: the next look tries again."""
    warned = ctx[_STATE] + _WARNED
    writing = tl.full([], 0xFFFFFFFFFFFFFFFF, tl.uint64)
    last = _load_relaxed(warned)
    done = last == expected
    if (last != expected) & (last != writing):
        if _compare_exchange(warned, last, writing):
            record = _load_relaxed(ctx[_STATE] + _WARNING)
            if _load_acquire(record) == 0:
                _write_record(record, ctx, _TIMED_OUT, peer, item, expected, seen)
                _store_release(warned, expected)
                done = expected == expected
            else:
                _store_release(warned, last)
    return done


@triton.jit
def _is_another_call(seen, expected):
    """Whether a word is that of this call with another signature, or of a later one."""
    ahead = ((seen >> _SIGNATURE_BITS) - (expected >> _SIGNATURE_BITS)) & _EPOCH_MASK
    return (seen != expected) & (ahead < 65536) & (seen != 0)


@triton.jit
def _poll(ctx, word, expected, peer, item, active, COUNTS: tl.constexpr):
    """Until `word` is `expected`; with COUNTS, until it has this call's epoch and at least the
    count of `expected`."""
    attempt = tl.full([], 0, tl.int32)
    deadline = tl.full([], 0, tl.uint64)
    warned = attempt != 0
    waiting = active & (ctx[_SKIP] == 0)
    while waiting:
        seen = _load_acquire(word)
        if COUNTS:
            ahead = ((seen >> _SIGNATURE_BITS) - (expected >> _SIGNATURE_BITS)) & _EPOCH_MASK
            ready = (ahead == 0) & ((seen & _SIGNATURE_MASK) >= (expected & _SIGNATURE_MASK))
            mismatch = (ahead != 0) & (ahead < 65536) & (seen != 0)
        else:
            ready = seen == expected
            mismatch = _is_another_call(seen, expected)
        waiting = ready == 0
        if waiting:
            if mismatch:
                _fail(ctx, _MISMATCH, peer, item, expected, seen)
            if attempt % 64 == 63:
                if _load_relaxed(ctx[_OWN] + _STOP) != 0:
                    _trap()
                now = _now()
                if deadline == 0:  # at the first look: reading the clock is slow
                    deadline = now + _load_relaxed(ctx[_STATE] + _TIMEOUT)
                if now > deadline:
                    _fail(ctx, _TIMED_OUT, peer, item, expected, seen)
                if (warned == 0) & (deadline - now < _load_relaxed(ctx[_STATE] + _WARN_LEFT)):
                    warned = _warn(ctx, peer, item, expected, seen)
                if attempt % 4096 == 4095:
                    if _load_relaxed(_load_relaxed(ctx[_STATE] + _ABORT)) != 0:
                        _fail(ctx, _ABORTED, peer, item, expected, seen)
            if attempt > 64:
                if attempt > 4096:
                    _sleep(500)
                else:
                    _sleep(40)
        attempt = (attempt + 1) & 0x3FFFFFFF


@triton.jit
def _int32(value):
    """A value for a number that may be a constexpr."""
    return value + tl.full([], 0, tl.int32)


@triton.jit
def _select(bases, pe):
    """bases[pe]."""
    chosen = bases[0]
    for i in tl.static_range(1, len(bases)):
        chosen = tl.where(pe == i, bases[i], chosen)
    return chosen


@triton.jit
def _word(ctx, index):
    """Offset of a signal; hellos are -8 to -1."""
    return ctx[_SIGNALS] + 8 * index.to(tl.uint64)


# ---- Begin and end ------------------------------------------------------------------------------
#
# As begin_call and end_call of cc/jflux/kernel.cuh; raw is what the handler passes.


@triton.jit
def _begin(raw, WORLD: tl.constexpr):
    state, launch, op, signature, signal_bytes, rank64 = raw[:6]
    bases = raw[7:]
    rank = rank64.to(tl.int32)
    own = _select(bases, rank)
    hooks = _load_relaxed(state)
    leader = _tid() == 0
    inside = tl.full([], 0, tl.uint64)
    if leader:
        inside = _add_here(own + _INSIDE, (launch << 16) | 1)
    taken = tl.atomic_add(
        own.to(tl.pointer_type(tl.uint64)), tl.full([], 1, tl.uint64), sem="relaxed", scope="gpu"
    )
    program = (taken & 0xFFFFFF).to(tl.int32)
    last = taken >> 24
    low = last & 0xFFFFFFFF
    epoch = (last + tl.where(low == 0xFFFFFFFF, 3, 1).to(tl.uint64)) & _EPOCH_MASK
    value = (epoch << _SIGNATURE_BITS) | (signature & _SIGNATURE_MASK)
    half = epoch & 1
    skip = hooks & 0xFFFFFFFF
    signals = _HEADER_BYTES + half * signal_bytes + 8 * _HELLOS
    ctx = (state, rank, bases, own, value, signals, program, op, skip)
    if leader:
        if program == tl.num_programs(0) - 1:
            _exchange_here(own, epoch << 24)
        if (inside >> 16) != (inside & 0xFFFF) * launch:
            _fail(ctx, _OVERLAP, rank, tl.full([], -1, tl.int32), launch, inside * 0)
    most_us = (hooks >> 32).to(tl.uint32)
    if most_us != 0:  # TestHooks::max_delay_us
        mixed = (epoch.to(tl.uint32) * 8 + rank.to(tl.uint32)) * 2654435761
        mixed = (mixed ^ (mixed >> 15)) * 2246822519
        delay = ((mixed >> 8) % most_us).to(tl.uint64) * 1000
        start = _now()
        while _now() - start < delay:
            _sleep(100)
    if program == 0:
        # The end of the kernel before orders what it has read before this.
        thread = _tid()
        if thread < WORLD - 1:
            pe = (rank + 1 + thread) % WORLD
            _store_relaxed(_select(bases, pe) + _word(ctx, rank - _HELLOS), value)
    return ctx


@triton.jit
def _end(ctx, launch):
    world: tl.constexpr = n_pes(ctx)
    if ctx[_PROGRAM] == 0:
        thread = _tid()
        pe = (ctx[_RANK] + 1 + thread) % world
        word = ctx[_OWN] + _word(ctx, pe - _HELLOS)
        item = tl.full([], -1, tl.int32)
        _poll(ctx, word, ctx[_VALUE], pe, item, thread < world - 1, False)
    tl.debug_barrier()
    if _tid() == 0:
        _add_here(ctx[_OWN] + _INSIDE, 0 - ((launch << 16) | 1))


@triton.jit
def _buffer(ctx, layout, data):
    """This rank's copy of a buffer; layout: its offset in the data of a half, and its type."""
    pointer = (ctx[_OWN] + data + layout[0]).to(tl.pointer_type(layout[1]))
    return tl.multiple_of(pointer, _ALIGN)


@triton.jit
def _entry(raw, arrays, kernel: tl.constexpr, buffers, options):
    """The kernel that the handler launches: `kernel` between the begin and the end of a call."""
    ctx = _begin(raw, len(raw) - 7)
    epoch = ctx[_VALUE] >> _SIGNATURE_BITS
    data = _HEADER_BYTES + 2 * raw[4] + (epoch & 1) * raw[6]
    pointers = [_buffer(ctx, layout, data) for layout in buffers]
    kernel(ctx, *arrays, *pointers, *options)
    _end(ctx, raw[1])


# ---- Who and where ------------------------------------------------------------------------------


@triton.jit
def my_pe(ctx):
    """[9.1.2] This rank's number in its group, int32."""
    return ctx[_RANK]


@tl.core.builtin  # of a function with triton.jit a constexpr comes back as a value
def n_pes(ctx, _semantic=None):
    """[9.1.3] The number of ranks, a constexpr."""
    return tl.constexpr(len(ctx[_BASES]))


@triton.jit
def program_id(ctx):
    """This program's number, int32, in the order in which the rank's programs start. Work by it: a
    program that waits for the one with its number on another rank waits for one that runs."""
    return ctx[_PROGRAM]


@triton.jit
def peer_ptr(ctx, pointer, pe):
    """[9.1.8] Where rank `pe` has what `pointer` names here, for loads and stores.

    Args:
      pointer (pointers): symmetric, a scalar or a tensor.
      pe (int32): a scalar.
    """
    itemsize: tl.constexpr = pointer.dtype.scalar.element_ty.primitive_bitwidth // 8
    delta = (_select(ctx[_BASES], pe) - ctx[_OWN]).to(tl.int64, bitcast=True)
    return pointer + tl.multiple_of(delta // itemsize, 16)


# ---- Data ---------------------------------------------------------------------------------------


@triton.jit
def put(ctx, dest, value, pe, mask=None):
    """[9.6.1.1] Stores `value` at the symmetric pointers `dest` of rank `pe`, which learns of it
    through a signal."""
    tl.store(peer_ptr(ctx, dest, pe), value, mask=mask)


@triton.jit
def get(ctx, source, pe, mask=None, other=None):
    """[9.6.1.4] What is at the symmetric pointers `source` of rank `pe`. A signal must have
    announced that it is written."""
    return tl.load(peer_ptr(ctx, source, pe), mask=mask, other=other)


# ---- Order and signals --------------------------------------------------------------------------


@triton.jit
def fence(ctx):
    """[9.11.1] Orders what the program has stored, on any rank, before what it stores later. For
    flags of one's own: signals and barriers need none."""
    _fence_system()
    tl.debug_barrier()


@triton.jit
def signal_set(ctx, signal, pe):
    """[9.8.2] Sets rank `pe`'s signal, after everything that the program has stored anywhere.

    After a failed wait of this rank it sets nothing. A signal is set at most once in a call.
    """
    tl.debug_barrier()
    if _tid() == 0:
        stopped = _load_relaxed(ctx[_OWN] + _STOP)
        _fence_system()
        if stopped == 0:
            word = _word(ctx, _int32(signal))
            _store_relaxed(_select(ctx[_BASES], pe) + word, ctx[_VALUE])


@triton.jit
def signal_add(ctx, signal, pe, count=1):
    """[9.8.2, SIGNAL_ADD] Adds `count` to rank `pe`'s signal, which begins each call at 0, after
    everything that the program has stored anywhere.

    Any programs of any ranks may add to one signal, up to 2^24 - 1 in all; the same call must not
    also set it. ``wait_count`` waits for it. Peers' memory must have native atomics: over NVLink it
    has, over PCIe most GPUs have none, and then calls take their reference.
    """
    tl.debug_barrier()
    if _tid() == 0:
        stopped = _load_relaxed(ctx[_OWN] + _STOP)
        _fence_system()
        if stopped == 0:
            # What earlier calls have left is less than any word of this epoch. The two are by one
            # thread and to one word, so the maximum comes first.
            word = _word(ctx, _int32(signal))
            epoch = (ctx[_VALUE] >> _SIGNATURE_BITS) << _SIGNATURE_BITS
            tl.inline_asm_elementwise(
                "red.relaxed.sys.global.max.u64 [$1], $2;"
                "red.relaxed.sys.global.add.u64 [$1], $3; mov.u32 $0, 0;",
                "=r,l,l,l,~{memory}",
                [
                    _select(ctx[_BASES], pe) + word,
                    epoch,
                    _int32(count).to(tl.uint64),
                ],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )


@triton.jit
def wait(ctx, signal, pe):
    """[9.10.15] Until rank `pe` has set this rank's signal in this call. The program then sees what
    `pe`'s program had stored. `pe` is for the message if it does not come."""
    thread = _tid()
    number = _int32(signal)
    word = ctx[_OWN] + _word(ctx, number)
    _poll(ctx, word, ctx[_VALUE], _int32(pe), number, thread == 0, False)
    tl.debug_barrier()
    _fence_proxy()


@triton.jit
def wait_count(ctx, signal, count):
    """Until ``signal_add`` has brought this rank's signal to `count` in this call. The program then
    sees what all who have added had stored."""
    thread = _tid()
    number = _int32(signal)
    word = ctx[_OWN] + _word(ctx, number)
    epoch = (ctx[_VALUE] >> _SIGNATURE_BITS) << _SIGNATURE_BITS
    expected = epoch | _int32(count).to(tl.uint64)
    _poll(ctx, word, expected, ctx[_RANK], number, thread == 0, True)
    tl.debug_barrier()
    _fence_proxy()


# ---- All ranks ----------------------------------------------------------------------------------


@triton.jit
def barrier_all(ctx, signal):
    """[9.9.1] Barrier of this program and those of the other ranks that call it with the same
    `signal`: the first of n_pes signals that nothing else in the call uses. What these programs
    have stored before it, all of them see after it."""
    world: tl.constexpr = n_pes(ctx)
    thread = _tid()
    pe = (ctx[_RANK] + 1 + thread) % world
    number = _int32(signal)
    tl.debug_barrier()
    if thread < world - 1:
        stopped = _load_relaxed(ctx[_OWN] + _STOP)
        _fence_system()
        if stopped == 0:
            _store_relaxed(_select(ctx[_BASES], pe) + _word(ctx, number + ctx[_RANK]), ctx[_VALUE])
    word = ctx[_OWN] + _word(ctx, number + pe)
    _poll(ctx, word, ctx[_VALUE], pe, number + pe, thread < world - 1, False)
    tl.debug_barrier()
    _fence_proxy()


@triton.jit
def broadcast(ctx, dest, value, signal, root, mask=None):
    """[9.9.7] `value` of rank `root` goes to the symmetric pointers `dest` of all ranks. Returns
    when it is in this rank's; uses one signal. Other ranks' `value` is ignored."""
    if ctx[_RANK] == root:
        for d in tl.static_range(0, n_pes(ctx)):
            put(ctx, dest, value, (ctx[_RANK] + d) % n_pes(ctx), mask=mask)
        for d in tl.static_range(1, n_pes(ctx)):
            signal_set(ctx, signal, (ctx[_RANK] + d) % n_pes(ctx))
        tl.debug_barrier()
    else:
        wait(ctx, signal, root)


# ---- LL packets ---------------------------------------------------------------------------------
#
# Data and signal in one 16-byte store, atomic as a whole: no fence, no signal of its own. A packet
# is valid if its second word is the call's signal value, 64 bits that data of an earlier call has
# by chance alone (cc/core/packet.h has a form without that chance, in workspaces of its own).


@triton.jit
def ll_put(ctx, packets, index, value, pe, mask=None):
    """Puts values into packets of rank `pe`, and announces them.

    Args:
      packets (uint64 pointer): a workspace buffer, two words for each packet.
      index (int tensor): which packets.
      value (tensor): up to 8 bytes an element, one packet each. Eight bytes cost as much as one.
      mask (bool tensor): which elements; None: all.
    """
    bits: tl.constexpr = value.dtype.primitive_bitwidth
    raw = value.to(tl.core.get_int_dtype(bits, False), bitcast=True).to(tl.uint64)
    address = (peer_ptr(ctx, packets, pe) + 2 * index).to(tl.uint64)
    if mask is None:
        wanted = tl.full(index.shape, 1, tl.int32)
    else:
        wanted = mask.to(tl.int32)
    tl.inline_asm_elementwise(
        "{ .reg .pred wanted; .reg .b128 packet; setp.ne.s32 wanted, $4, 0;"
        " mov.b128 packet, {$2, $3};"
        " @wanted st.relaxed.sys.global.b128 [$1], packet; mov.u32 $0, 0; }",
        "=r,l,l,l,r,~{memory}",
        [address, raw, ctx[_VALUE], wanted],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _ll_poll(address, expected, wanted):
    """(the data, whether it has come) after up to 2048 looks at each packet."""
    return tl.inline_asm_elementwise(
        "{ .reg .pred again, more; .reg .b128 packet; .reg .b64 flag; .reg .b32 left;"
        " mov.u64 $0, 0; mov.u32 $1, 1; mov.u32 left, 2048;"
        " setp.eq.s32 again, $4, 0; @again bra DONE;"
        "POLL: ld.relaxed.sys.global.b128 packet, [$2]; mov.b128 {$0, flag}, packet;"
        " sub.u32 left, left, 1;"
        " setp.ne.u64 again, flag, $3; setp.ne.and.u32 more, left, 0, again; @more bra POLL;"
        " selp.u32 $1, 0, 1, again;"
        "DONE: }",
        "=&l,=&r,l,l,r,~{memory}",
        [address, expected, wanted],
        dtype=(tl.uint64, tl.int32),
        is_pure=False,
        pack=1,
    )


@triton.jit
def ll_get(ctx, packets, index, pe, dtype: tl.constexpr, mask=None):
    """Waits for packets that rank `pe` puts into this rank's `packets`, and takes their values.

    Args:
      packets (uint64 pointer): as for :func:`ll_put`.
      index (int tensor): likewise.
      mask (bool tensor): likewise. Elements outside it are 0.
      pe (int32): the sender. If it makes another call than this one, both ranks are told at once;
        and it is named if the packets do not come.
      dtype: of the values.
    """
    address = (packets + 2 * index).to(tl.uint64)
    if mask is None:
        wanted = tl.full(index.shape, 1, tl.int32)
    else:
        wanted = mask.to(tl.int32)
    if ctx[_SKIP] != 0:
        wanted = wanted * 0
    raw, came = _ll_poll(address, ctx[_VALUE], wanted)
    deadline = tl.full([], 0, tl.uint64)
    missing = tl.min(came) == 0
    while missing:
        now = _now()
        state = ctx[_STATE]
        if deadline == 0:
            deadline = now + _load_relaxed(state + _TIMEOUT)
        if _tid() == 0:
            item = tl.full([], -1, tl.int32)
            seen = tl.full([], 0, tl.uint64)
            if _load_relaxed(ctx[_OWN] + _STOP) != 0:
                _trap()
            # The packets of another call never are this one's: the hello of their sender tells.
            hello = _load_acquire(ctx[_OWN] + _word(ctx, _int32(pe) - _HELLOS))
            if _is_another_call(hello, ctx[_VALUE]):
                _fail(ctx, _MISMATCH, _int32(pe), item, ctx[_VALUE], hello)
            if now > deadline:
                _fail(ctx, _TIMED_OUT, _int32(pe), item, ctx[_VALUE], seen)
            if _load_relaxed(_load_relaxed(state + _ABORT)) != 0:
                _fail(ctx, _ABORTED, _int32(pe), item, ctx[_VALUE], seen)
        raw, came = _ll_poll(address, ctx[_VALUE], wanted)
        missing = tl.min(came) == 0
    bits: tl.constexpr = dtype.primitive_bitwidth
    return raw.to(tl.core.get_int_dtype(bits, False)).to(dtype, bitcast=True)
