// Signals: how a rank learns that a peer's data has arrived in its memory.
//
//   memory   A signal is one 64-bit word, (epoch << 24 | signature), in the reader's part of the
//            symmetric heap, so that polling stays local.
//   writer   One writer per word and call: the peer whose data it announces. The writer stores the
//            data, makes those stores complete, and stores the word with release at system scope.
//   reader   Polls with acquire at system scope until the word's epoch is the call's. The data is
//            then visible. TMA reads also need a proxy fence (gpu/ptx.cuh).
//   payload  A signal that announces no data may carry 24 bits in place of the signature
//            (MakeSignal(epoch, bits), AwaitPayload). Its reader learns from another signal of the
//            same peer that both run the same call.
//   reset    Never. A workspace's epochs only grow: on a GPU they count its calls. So a captured
//            CUDA graph replays without clearing anything, and 0 (fresh memory) is older than any
//            call. A word may stay for as long as nobody sends its item again, so epochs must not
//            repeat: they have 40 bits, 63 days of calls that take 5 us.
//   reuse    A workspace has two halves; call e uses half e % 2. Before call e overwrites a half,
//            all readers of call e-2 are done: a rank in call e has received every peer's data of
//            call e-1, and a peer sends those after it finished call e-2. So no closing barrier is
//            needed. This requires that in every call every rank hears from every peer.
//   mismatch The signature hashes op, shapes and options, and on GPUs also the call site and the
//            tile configuration. If a word has the call's epoch and another signature, or a later
//            epoch, the ranks run different programs: the reader reports both words and stops
//            waiting.
#ifndef JFLUX_CORE_SIGNAL_H_
#define JFLUX_CORE_SIGNAL_H_

#include <cstdint>

#include "atomic.h"
#include "platform.h"

namespace jflux {

using Signal = uint64_t;

inline constexpr int kSignatureBits = 24, kEpochBits = 40;
static_assert(kSignatureBits + kEpochBits == 64);
inline constexpr uint64_t kEpochMask = (uint64_t{1} << kEpochBits) - 1;
inline constexpr uint32_t kSignatureMask = (1u << kSignatureBits) - 1;

// Only the low kSignatureBits of a signature travel.
JFLUX_HD constexpr Signal MakeSignal(uint64_t epoch, uint32_t signature) {
  return (epoch << kSignatureBits) | (signature & kSignatureMask);
}
JFLUX_HD constexpr uint64_t EpochOf(Signal s) { return s >> kSignatureBits; }
JFLUX_HD constexpr uint32_t SignatureOf(Signal s) {
  return static_cast<uint32_t>(s) & kSignatureMask;
}

// The epoch of the next call. Skips those whose low 32 bits are 0, fresh memory in the flags of
// core/packet.h, and one more, which keeps the halves alternating.
JFLUX_HD constexpr uint64_t NextEpoch(uint64_t epoch) {
  return (epoch + (static_cast<uint32_t>(epoch) == 0xffffffff ? 3 : 1)) & kEpochMask;
}

enum class SignalState { kPending, kReady, kMismatch };

// Compares the word that was read with the word that the call expects. No rank is ever many calls
// ahead, so an epoch that is not slightly ahead is behind.
JFLUX_HD constexpr SignalState Classify(Signal seen, Signal expected) {
  if (seen == expected) return SignalState::kReady;
  if (seen == 0) return SignalState::kPending;
  const uint64_t ahead = (EpochOf(seen) - EpochOf(expected)) & kEpochMask;
  return ahead < (1u << 16) ? SignalState::kMismatch : SignalState::kPending;
}

// Identifies an op in signatures and fault records. Each op defines its id in its header, above 0
// and below kFirstCustomOp, and never changes it: `inline constexpr OpId kFooBarId{12};`.
// tests/cc/ops_test.cc checks that ids are unique.
enum class OpId : uint32_t {};

// Custom calls get ids from here on. The ids are local to the process (runtime/fault.h), so they
// appear in fault records and not in signatures.
inline constexpr uint32_t kFirstCustomOp = 1 << 16;

enum class FaultKind : uint32_t {
  kNone = 0,
  kTimeout = 1,     // the peer's signal or packet did not come
  kMismatch = 2,    // the peer makes another call
  kNoTicket = 3,    // core/ticket_semaphore.h: expected is the ticket, seen how many were returned
  kOverlap = 4,     // another kernel is in the workspace (gpu/call.cuh): expected is this launch
  kAborted = 5,     // this process has failed on another device
  kBadValue = 6,    // an argument's element is out of range: `argument`, element `tile`, of rank
                    // `peer`. seen is its value; expected, on that rank, the most that it may be
  kUnequal = 7,     // likewise, but it must be `expected`, as rank `peer` says
  kGroupSizes = 8,  // grouped_matmul: expected is the number of rows, seen the sum of the sizes, or
                    // the negative size of group `tile`
  kUnfinished = 9,  // core/tile_counts.h: class `tile` has `seen` of `expected` blocks
  kLength = 10,     // flash_decode: sequence `tile` has the length `seen`, and the cache `expected`
                    // positions on all ranks. The kernel ends as always
  kPage = 11,       // flash_decode: sequence `tile` needs entry `peer` of its row of block_table,
                    // which is `seen`, and the rank has `expected` pages. It ends as always
};

// The wait that failed. One record per rank, in memory that the host can read while a kernel runs.
// Only the first fault is recorded; `kind` is written last, with release.
struct Fault {
  uint64_t kind;     // FaultKind
  uint32_t op;       // OpId
  int32_t rank;      // the waiting rank
  int32_t peer;      // the rank that it waited for
  int32_t argument;  // which of Op::arguments, from 1 on; 0: the fault is not about one
  int64_t tile;  // item of the op's schedule: a tile, chunk, packet or signal; -1: the whole call
  uint64_t expected;
  uint64_t seen;
};

// Limits that a long wait reads: one object for each device, in memory near the waiter. A wait that
// succeeds soon does not read them, and keeps none of them in registers.
//
//   writers  the host, before calls run; `warned`: the device's waits
struct WaitLimits {
  uint64_t timeout_ns;  // of a wait, from its start; 0: WaitContext::deadline_ns is the end
  // A wait warns once less than this is left of its time. 0: never.
  uint64_t warn_left_ns;
  uint64_t warned;  // what the last wait that has warned expected: a call warns once. All bits: one
                    // is writing the record
  Fault* fault;     // where WaitContext has none
  Fault* warning;   // record of the wait that warns, in host memory. The host takes it by clearing
                    // `kind`
  uint64_t* abort;  // in host memory. Not 0: waits end (FaultKind::kAborted)
};

// Faults that tests inject, to check that they are detected. All zero in normal use.
struct TestHooks {
  uint32_t skip_waits;    // waits return at once
  uint32_t max_delay_us;  // each rank delays its part of a call by up to this much
};

// Everything that a wait needs besides the word it polls.
struct WaitContext {
  Fault* fault;          // null: limits->fault
  uint64_t* stop;        // set by the rank's first fault, which ends all its other waits. It is in
                         // the waiter's own memory: polling host memory costs far more
                         // (docs/internals/gemm.md)
  uint64_t deadline_ns;  // on the clock of NowNs(), unless limits->timeout_ns says it
  uint32_t op;
  int32_t rank;
  bool skip;                     // TestHooks::skip_waits
  WaitLimits* limits = nullptr;  // null: no warnings, and nobody aborts the wait
};

JFLUX_HD bool Faulted(const WaitContext& ctx) { return LoadRelaxed(ctx.stop) != 0; }

JFLUX_HD void WriteRecord(Fault* record, const WaitContext& ctx, FaultKind kind, int32_t peer,
                          int64_t tile, Signal expected, Signal seen, int32_t argument = 0) {
  record->op = ctx.op;
  record->rank = ctx.rank;
  record->peer = peer;
  if (argument != 0) record->argument = argument;  // which other kinds do not read
  record->tile = tile;
  record->expected = expected;
  record->seen = seen;
  StoreRelease(&record->kind, static_cast<uint64_t>(kind));
}

JFLUX_HD void ReportFault(const WaitContext& ctx, FaultKind kind, int32_t peer, int64_t tile,
                          Signal expected, Signal seen, int32_t argument = 0) {
  if (!CompareExchange(ctx.stop, 0, 1)) return;
  Fault* fault = ctx.fault != nullptr ? ctx.fault : ctx.limits->fault;
  WriteRecord(fault, ctx, kind, peer, tile, expected, seen, argument);
}

// A polling loop looks at the stop flag and the clock after every kPollsPerLook attempts, and at
// WaitLimits::abort after every kPollsPerHostLook. `abort` is in host memory, where a load takes
// microseconds: a wait first reads it when it has lasted about half a millisecond.
inline constexpr uint32_t kPollsPerLook = 64, kPollsPerHostLook = 4096;

// Decides for a polling loop whether it goes on after an attempt.
class Patience {
 public:
  JFLUX_HD explicit Patience(const WaitContext& ctx) : deadline_ns_(ctx.deadline_ns & ~kFlags) {}

  // Whether the loop looks at the stop flag and the clock after this attempt (Lasts). The number of
  // the attempt wraps after 2^32.
  static JFLUX_HD bool Looks(uint32_t attempt) {
    return attempt % kPollsPerLook == kPollsPerLook - 1;
  }
  // The look itself, after an attempt for which Looks is true. False if the wait has to end; the
  // fault's record then has the reason.
  JFLUX_HD bool Lasts(const WaitContext& ctx, uint32_t attempt, FaultKind on_timeout, int32_t peer,
                      int64_t tile, Signal expected, Signal seen) {
    if (Faulted(ctx)) return false;
    const uint64_t now = NowNs();
    // The deadline is set at the first look: reading the clock is slow.
    if ((deadline_ns_ & kSet) == 0 && ctx.limits != nullptr && ctx.limits->timeout_ns != 0) {
      deadline_ns_ = ((now + ctx.limits->timeout_ns) & ~kFlags) | kSet;
    }
    FaultKind failure = FaultKind::kNone;
    if (now > deadline_ns_) {
      failure = on_timeout;
    } else if (ctx.limits != nullptr) {
      if (on_timeout == FaultKind::kTimeout && (deadline_ns_ & kWarned) == 0 &&
          deadline_ns_ - now < ctx.limits->warn_left_ns) {
        Warn(ctx, peer, tile, expected, seen);
      }
      if (attempt % kPollsPerHostLook == kPollsPerHostLook - 1 &&
          LoadRelaxed(ctx.limits->abort) != 0) {
        failure = FaultKind::kAborted;
      }
    }
    if (failure == FaultKind::kNone) return true;
    ReportFault(ctx, failure, peer, tile, expected, seen);
    return false;
  }

 private:
  // Writes the warning's record, unless another wait of this call has written it. While the record
  // holds another call's warning, this one is not written, and the next look tries again.
  JFLUX_HD void Warn(const WaitContext& ctx, int32_t peer, int64_t tile, Signal expected,
                     Signal seen) {
    WaitLimits* limits = ctx.limits;
    const uint64_t last = LoadRelaxed(&limits->warned);
    if (last == expected) deadline_ns_ |= kWarned;
    if (last == expected || last == kWriting) return;
    if (!CompareExchange(&limits->warned, last, kWriting)) return;
    const bool is_free = LoadAcquire(&limits->warning->kind) == 0;
    if (is_free) {
      WriteRecord(limits->warning, ctx, FaultKind::kTimeout, peer, tile, expected, seen);
      deadline_ns_ |= kWarned;
    }
    StoreRelease(&limits->warned, is_free ? expected : last);
  }

  static constexpr uint64_t kWriting = ~uint64_t{0};  // in WaitLimits::warned
  // In the deadline: this wait has warned; the limits have set it.
  static constexpr uint64_t kWarned = 1, kSet = 2, kFlags = kWarned | kSet;

  uint64_t deadline_ns_;
};

// Polls `word` until it equals `expected`. False if the timeout passed, the ranks disagree, or
// another wait of this rank failed; the fault's record has the reason.
JFLUX_HD bool WaitSignal(const Signal* word, Signal expected, int32_t peer, int64_t tile,
                         const WaitContext& ctx) {
  if (ctx.skip) return true;
  Patience patience(ctx);
  for (uint32_t attempt = 0;; ++attempt) {
    const Signal seen = LoadAcquire(word);
    const SignalState state = Classify(seen, expected);
    if (state == SignalState::kReady) return true;
    if (state == SignalState::kMismatch) {
      ReportFault(ctx, FaultKind::kMismatch, peer, tile, expected, seen);
      return false;
    }
    if (Patience::Looks(attempt) &&
        !patience.Lasts(ctx, attempt, FaultKind::kTimeout, peer, tile, expected, seen)) {
      return false;
    }
    PollPause(attempt);
  }
}

// Waits for a word with the epoch of `expected`, and takes its payload in place of a signature.
// False if the wait failed. Relaxed: the word announces nothing but itself.
JFLUX_HD bool AwaitPayload(const Signal* word, Signal expected, int32_t peer, int64_t tile,
                           const WaitContext& ctx, uint32_t* payload) {
  Patience patience(ctx);
  for (uint32_t attempt = 0;; ++attempt) {
    const Signal seen = LoadRelaxed(word);
    *payload = SignatureOf(seen);
    if (EpochOf(seen) == EpochOf(expected) || ctx.skip) return true;
    if (Classify(seen, expected) == SignalState::kMismatch) {
      ReportFault(ctx, FaultKind::kMismatch, peer, tile, expected, seen);
      return false;
    }
    if (Patience::Looks(attempt) &&
        !patience.Lasts(ctx, attempt, FaultKind::kTimeout, peer, tile, expected, seen)) {
      return false;
    }
    PollPause(attempt);
  }
}

// FNV-1a over the fields that all ranks of a call must agree on.
class SignatureBuilder {
 public:
  JFLUX_HD SignatureBuilder& Add(int64_t value) {
    for (int i = 0; i < 8; ++i) {
      hash_ = (hash_ ^ ((static_cast<uint64_t>(value) >> (8 * i)) & 0xff)) * 1099511628211ull;
    }
    return *this;
  }
  JFLUX_HD uint32_t Get() const { return static_cast<uint32_t>(hash_ ^ (hash_ >> 32)); }

 private:
  uint64_t hash_ = 14695981039346656037ull;
};

}  // namespace jflux

#endif  // JFLUX_CORE_SIGNAL_H_
