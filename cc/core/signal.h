// Signals: how a rank learns that a peer's data has landed in its memory.
//
//   memory   A signal is one 64-bit word in the *reader's* part of the symmetric heap, so polling
//            stays local. The word is (epoch << 32 | signature).
//   writer   Exactly one writer per word and call: the peer whose data it announces. It writes the
//            data, makes those writes complete, then stores the word with release at system scope.
//   reader   Polls with acquire at system scope until the word's epoch is the call's. What the
//            writer wrote before its store is then visible. (TMA reads need a proxy fence on top;
//            see gpu/ptx.cuh.)
//   reset    Never. Epochs of a workspace only grow (on a GPU they count its calls), so a captured
//            CUDA graph replays without clearing anything, and 0 (fresh memory) is older than any
//            call.
//   reuse    Workspaces are doubled; call e uses half e % 2. A rank that is in call e has every
//            peer's data of call e-1, which the peer sent after it finished call e-2. So nobody
//            still reads the half that call e overwrites, and no closing barrier is needed. This
//            holds because in every call every rank hears from every peer.
//   mismatch The signature hashes op, shapes and options, and on GPUs the call site and the tile
//            configuration. A word with the call's epoch but another
//            signature, or with a later epoch, means that the ranks run different programs: the
//            reader reports what it saw and what it expected and stops waiting.
#ifndef JFLUX_CORE_SIGNAL_H_
#define JFLUX_CORE_SIGNAL_H_

#include <cstdint>

#include "atomic.h"
#include "platform.h"

namespace jflux {

using Signal = uint64_t;

JFLUX_HD constexpr Signal MakeSignal(uint32_t epoch, uint32_t signature) {
  return (static_cast<Signal>(epoch) << 32) | signature;
}
JFLUX_HD constexpr uint32_t EpochOf(Signal s) { return static_cast<uint32_t>(s >> 32); }
JFLUX_HD constexpr uint32_t SignatureOf(Signal s) { return static_cast<uint32_t>(s); }

// The epoch of the call after. 0 is left to fresh memory; a workspace's halves go on in turn.
JFLUX_HD constexpr uint32_t NextEpoch(uint32_t epoch) {
  return epoch == 0xffffffff ? 2 : epoch + 1;
}

enum class SignalState { kPending, kReady, kMismatch };

// Compares what was read with what the call expects. Epochs wrap; nobody can be many calls ahead,
// so whatever is not a little ahead is behind, and fresh memory is behind everything.
JFLUX_HD constexpr SignalState Classify(Signal seen, Signal expected) {
  if (seen == expected) return SignalState::kReady;
  if (seen == 0) return SignalState::kPending;
  const uint32_t ahead = EpochOf(seen) - EpochOf(expected);
  return ahead < (1u << 16) ? SignalState::kMismatch : SignalState::kPending;
}

enum class FaultKind : uint32_t { kNone = 0, kTimeout = 1, kMismatch = 2 };

// Which wait went wrong, as plain data. One per rank, in memory that the host can read while a
// kernel runs; only the first fault is written, and `kind` last.
struct Fault {
  uint64_t kind;  // FaultKind
  uint32_t op;    // OpId
  int32_t rank;   // who waited
  int32_t peer;   // for whom
  int32_t pad;
  int64_t tile;  // which unit of the op's schedule (a chunk or a tile; -1: the whole call)
  uint64_t expected;
  uint64_t seen;
};

// Faults that tests plant, to show that they are caught. All zero in normal use.
struct TestHooks {
  uint32_t skip_waits;    // waits return at once
  uint32_t max_delay_us;  // each rank starts its part of a call up to this much later
};

// What a wait needs to know beyond the word it polls.
struct WaitContext {
  Fault* fault;
  uint64_t* stop;        // set by the first fault of this rank, and ends all its other waits. In
                         // the waiter's own memory: polling the host's would cost far more than
                         // the wait (docs/design/0003)
  uint64_t deadline_ns;  // on NowNs()'s clock
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

// Polls `word` until it holds `expected`. False: the deadline passed, the ranks disagree, or
// another waiter of this rank already failed; the reason is in ctx.fault.
JFLUX_HD bool WaitSignal(const Signal* word, Signal expected, int32_t peer, int64_t tile,
                         const WaitContext& ctx) {
  if (ctx.skip) return true;
  for (uint32_t turn = 0;; ++turn) {
    const Signal seen = LoadAcquire(word);
    const SignalState state = Classify(seen, expected);
    if (state == SignalState::kReady) return true;
    if (state == SignalState::kMismatch) {
      ReportFault(ctx, FaultKind::kMismatch, peer, tile, expected, seen);
      return false;
    }
    if ((turn & 63) == 63) {
      if (Faulted(ctx)) return false;
      if (NowNs() > ctx.deadline_ns) {
        ReportFault(ctx, FaultKind::kTimeout, peer, tile, expected, seen);
        return false;
      }
    }
    PollPause(turn);
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
