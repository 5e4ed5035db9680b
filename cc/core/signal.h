// Signals: how a rank learns that a peer's data has arrived in its memory.
//
//   memory   A signal is one 64-bit word, (epoch << 24 | signature), in the reader's part of the
//            symmetric heap, so that polling stays local.
//   writer   One writer per word and call: the peer whose data it announces. The writer stores the
//            data, makes those stores complete, and stores the word with release at system scope.
//   reader   Polls with acquire at system scope until the word's epoch is the call's. The data is
//            then visible. TMA reads also need a proxy fence (gpu/ptx.cuh).
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

// Of a signature, only the low kSignatureBits travel.
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

enum class FaultKind : uint32_t { kNone = 0, kTimeout = 1, kMismatch = 2 };

// The wait that failed. One record per rank, in memory that the host can read while a kernel runs.
// Only the first fault is recorded; `kind` is written last, with release.
struct Fault {
  uint64_t kind;  // FaultKind
  uint32_t op;    // OpId
  int32_t rank;   // the waiting rank
  int32_t peer;   // the rank that it waited for
  int32_t pad;
  int64_t tile;  // item of the op's schedule: a tile, chunk, packet or signal; -1: the whole call
  uint64_t expected;
  uint64_t seen;
};

// Faults that tests inject, to check that they are detected. All zero in normal use.
struct TestHooks {
  uint32_t skip_waits;    // waits return at once
  uint32_t max_delay_us;  // each rank delays its part of a call by up to this much
};

// Everything that a wait needs besides the word it polls.
struct WaitContext {
  Fault* fault;
  uint64_t* stop;        // set by the rank's first fault, which ends all its other waits. It is in
                         // the waiter's own memory: polling host memory costs far more
                         // (docs/internals/gemm.md)
  uint64_t deadline_ns;  // on the clock of NowNs()
  uint32_t op;
  int32_t rank;
  bool skip;  // TestHooks::skip_waits
};

JFLUX_HD bool Faulted(const WaitContext& ctx) { return LoadRelaxed(ctx.stop) != 0; }

JFLUX_HD void ReportFault(const WaitContext& ctx, FaultKind kind, int32_t peer, int64_t tile,
                          Signal expected, Signal seen) {
  if (!CompareExchange(ctx.stop, 0, 1)) return;
  ctx.fault->op = ctx.op;
  ctx.fault->rank = ctx.rank;
  ctx.fault->peer = peer;
  ctx.fault->tile = tile;
  ctx.fault->expected = expected;
  ctx.fault->seen = seen;
  StoreRelease(&ctx.fault->kind, static_cast<uint64_t>(kind));
}

// Polls `word` until it equals `expected`. False if the timeout passed, the ranks disagree, or
// another wait of this rank failed; ctx.fault has the reason.
JFLUX_HD bool WaitSignal(const Signal* word, Signal expected, int32_t peer, int64_t tile,
                         const WaitContext& ctx) {
  if (ctx.skip) return true;
  for (uint32_t attempt = 0;; ++attempt) {
    const Signal seen = LoadAcquire(word);
    const SignalState state = Classify(seen, expected);
    if (state == SignalState::kReady) return true;
    if (state == SignalState::kMismatch) {
      ReportFault(ctx, FaultKind::kMismatch, peer, tile, expected, seen);
      return false;
    }
    if ((attempt & 63) == 63) {
      if (Faulted(ctx)) return false;
      if (NowNs() > ctx.deadline_ns) {
        ReportFault(ctx, FaultKind::kTimeout, peer, tile, expected, seen);
        return false;
      }
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
