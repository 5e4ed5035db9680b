// Signals between threads, following the header comment of core/signal.h. Under ThreadSanitizer the
// ping-pong also shows that release and acquire order the data.
#include "core/signal.h"

#include <atomic>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "core/layout.h"
#include "gpu/device_state.h"
#include "ops/all_gather_matmul/all_gather_matmul.h"
#include "ops/flash_decode/flash_decode.h"
#include "ops/matmul_reduce_scatter/matmul_reduce_scatter.h"
#include "runtime/fault.h"
#include "testing.h"

namespace jflux {
namespace {

constexpr uint32_t kOp = static_cast<uint32_t>(kMatmulReduceScatterId);

// State that the waiters of one rank share.
struct RankFault : Fault {
  uint64_t stop = 0;
};

WaitContext Context(RankFault* fault, int32_t rank, double seconds) {
  return WaitContext{fault,         &fault->stop, NowNs() + static_cast<uint64_t>(seconds * 1e9),
                     kOp,           rank,
                     /*skip=*/false};
}

FaultKind FaultKindOf(const Fault& fault) { return static_cast<FaultKind>(fault.kind); }

bool Contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST(SignalHoldsEpochAndSignature) {
  const Signal s = MakeSignal(0x12deadbeef, 0x345678);
  EXPECT_EQ(EpochOf(s), 0x12deadbeef);
  EXPECT_EQ(SignatureOf(s), 0x345678u);
  // Of a longer signature the low bits travel.
  EXPECT_EQ(MakeSignal(0x12deadbeef, 0xab345678), s);
}

TEST(EpochsSkipFreshMemorysFlagAndAlternate) {
  for (uint64_t epoch : {uint64_t{0}, uint64_t{1}, uint64_t{0xfffffffe}, uint64_t{0xffffffff},
                         uint64_t{0x5ffffffff}, kEpochMask - 1, kEpochMask}) {
    const uint64_t next = NextEpoch(epoch);
    EXPECT((next & 1) != (epoch & 1)) << epoch;
    EXPECT(static_cast<uint32_t>(next) != 0) << epoch;
    EXPECT(next <= kEpochMask && (next > epoch || epoch == kEpochMask)) << epoch;
  }
  EXPECT_EQ(NextEpoch(0xffffffff), 0x100000002u);
  EXPECT_EQ(NextEpoch(kEpochMask), 2u);
}

// A word that nobody has sent again for 2^32 calls and more is still an old one.
TEST(OldWordsStayOld) {
  for (uint64_t old : {uint64_t{5}, uint64_t{0xfffffff0}, uint64_t{0x7fffffff00}}) {
    for (uint64_t later : {uint64_t{1} << 16, uint64_t{1} << 32, (uint64_t{1} << 32) + 1,
                           (uint64_t{1} << 32) - 3, uint64_t{1} << 38}) {
      EXPECT_EQ(Classify(MakeSignal(old, 7), MakeSignal(old + later, 7)), SignalState::kPending)
          << old << " + " << later;
    }
  }
}

TEST(ClassifyComparesEpochsAcrossTheWrap) {
  for (uint64_t epoch : {uint64_t{1}, uint64_t{2}, uint64_t{3}, uint64_t{1000},
                         uint64_t{0x7fffffff}, uint64_t{0x80000000}, uint64_t{0xffffffff},
                         uint64_t{0x100000002}, kEpochMask - 1, kEpochMask, uint64_t{0}}) {
    const Signal expected = MakeSignal(epoch, 7);
    EXPECT_EQ(Classify(expected, expected), SignalState::kReady);
    EXPECT_EQ(Classify(MakeSignal(epoch, 8), expected), SignalState::kMismatch);
    for (uint64_t d : {1u, 2u, 3u, 100u}) {
      for (uint32_t signature : {7u, 8u}) {  // an older call may have any signature
        EXPECT_EQ(Classify(MakeSignal(epoch - d, signature), expected), SignalState::kPending)
            << epoch << " - " << d;
        EXPECT_EQ(Classify(MakeSignal(epoch + d, signature), expected), SignalState::kMismatch)
            << epoch << " + " << d;
      }
    }
  }
}

TEST(FreshMemoryIsOlderThanAnyCall) {
  for (uint64_t epoch : {1u, 2u, 1000u, 0x7fffffffu, 0x80000001u, 0xfffffff0u}) {
    EXPECT_EQ(Classify(0, MakeSignal(epoch, 7)), SignalState::kPending) << epoch;
  }
}

TEST(WaitReturnsWhenTheSignalIsThere) {
  RankFault fault{};
  const Signal word = MakeSignal(3, 7);
  // Even past the deadline: data that has arrived is not a timeout.
  EXPECT(WaitSignal(&word, word, 1, 0, Context(&fault, 0, -1)));
  EXPECT_EQ(FaultKindOf(fault), FaultKind::kNone);
}

TEST(WaitTimesOutAndSaysForWhom) {
  RankFault fault{};
  const Signal word = MakeSignal(4, 9);
  const uint64_t begin = NowNs();
  EXPECT(!WaitSignal(&word, MakeSignal(5, 7), /*peer=*/3, /*tile=*/17, Context(&fault, 2, 0.05)));
  EXPECT(NowNs() - begin >= 50'000'000);
  EXPECT_EQ(FaultKindOf(fault), FaultKind::kTimeout);
  EXPECT_EQ(fault.op, kOp);
  EXPECT_EQ(fault.rank, 2);
  EXPECT_EQ(fault.peer, 3);
  EXPECT_EQ(fault.tile, 17);
  EXPECT_EQ(fault.expected, MakeSignal(5, 7));
  EXPECT_EQ(fault.seen, word);
  const std::string text = Describe(fault, 0.05);
  for (const char* part : {"matmul_reduce_scatter", "rank 2 waited 0.05 s for rank 3", "item 17",
                           "call 5", "call 4"}) {
    EXPECT(Contains(text, part)) << part << " in: " << text;
  }
}

TEST(APayloadIsTakenFromAnyWordOfTheCall) {
  const Signal expected = MakeSignal(5, 7);
  uint32_t payload = 0;
  for (uint32_t bits : {0u, 7u, 0xabcdefu}) {
    RankFault fault{};
    const Signal word = MakeSignal(5, bits);
    EXPECT(AwaitPayload(&word, expected, 1, 0, Context(&fault, 0, -1), &payload));
    EXPECT_EQ(payload, bits);
  }
  // Words of an earlier call are none, and of a later one the ranks run different calls.
  for (const Signal word : {Signal{0}, MakeSignal(3, 7), MakeSignal(6, 7)}) {
    RankFault fault{};
    EXPECT(!AwaitPayload(&word, expected, 3, 17, Context(&fault, 2, 0.05), &payload));
    EXPECT_EQ(FaultKindOf(fault), EpochOf(word) > 5 ? FaultKind::kMismatch : FaultKind::kTimeout);
    EXPECT(fault.peer == 3 && fault.tile == 17 && fault.seen == word);
  }
}

TEST(WaitReportsAMismatchAtOnce) {
  for (const Signal seen : {MakeSignal(5, 8), MakeSignal(7, 7)}) {  // another call, a later call
    RankFault fault{};
    const uint64_t begin = NowNs();
    EXPECT(!WaitSignal(&seen, MakeSignal(5, 7), 1, 2, Context(&fault, 0, 60)));
    EXPECT(NowNs() - begin < 30'000'000'000);
    EXPECT_EQ(FaultKindOf(fault), FaultKind::kMismatch);
    EXPECT_EQ(fault.seen, seen);
    const std::string text = Describe(fault, 60);
    EXPECT(Contains(text, "rank 0 expects call 5 with signature 000007")) << text;
    EXPECT(Contains(text, "rank 1 sent call " + std::to_string(EpochOf(seen)))) << text;
  }
}

TEST(TheTestHookSkipsWaits) {
  RankFault fault{};
  const Signal word = 0;
  WaitContext ctx = Context(&fault, 0, 60);
  ctx.skip = true;
  EXPECT(WaitSignal(&word, MakeSignal(1, 7), 1, 0, ctx));
}

TEST(AFaultEndsAllWaitsOfTheRank) {
  RankFault fault{};
  const WaitContext ctx = Context(&fault, 0, 60);
  const Signal words[3] = {};
  std::atomic<int> ended{0};
  std::vector<std::thread> waiters;
  for (int i = 0; i < 3; ++i) {
    waiters.emplace_back([&, i] {
      EXPECT(!WaitSignal(&words[i], MakeSignal(1, 7), i, i, ctx));
      ++ended;
    });
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(10));
  EXPECT_EQ(ended.load(), 0);
  ReportFault(ctx, FaultKind::kMismatch, 5, 55, 1, 2);
  for (auto& w : waiters) w.join();
  EXPECT(NowNs() + 30'000'000'000 < ctx.deadline_ns);
  EXPECT_EQ(fault.peer, 5);
  EXPECT_EQ(FaultKindOf(fault), FaultKind::kMismatch);
}

// What a wait that lasts looks at.
struct Limits {
  Fault warning{};
  uint64_t abort = 0;
  WaitLimits Of(double warn_left_s) {
    return WaitLimits{0, static_cast<uint64_t>(warn_left_s * 1e9), 0, nullptr, &warning, &abort};
  }
};

TEST(AWaitThatLastsWarnsOnce) {
  RankFault fault{};
  Limits host;
  WaitLimits limits = host.Of(/*warn_left_s=*/0.25);
  WaitContext ctx = Context(&fault, 2, 0.3);
  ctx.limits = &limits;
  const Signal word = MakeSignal(4, 9);
  std::thread waiter([&] { EXPECT(!WaitSignal(&word, MakeSignal(5, 7), 3, 17, ctx)); });
  while (LoadAcquire(&host.warning.kind) == 0) std::this_thread::yield();
  EXPECT(NowNs() + 260'000'000 > ctx.deadline_ns && NowNs() < ctx.deadline_ns);
  EXPECT_EQ(LoadAcquire(&fault.kind), 0u);
  EXPECT_EQ(host.warning.op, kOp);
  EXPECT_EQ(host.warning.rank, 2);
  EXPECT_EQ(host.warning.peer, 3);
  EXPECT_EQ(host.warning.tile, 17);
  const std::string text = DescribeWarning(host.warning, 0.05, 0.3);
  for (const char* part : {"warning: jflux.matmul_reduce_scatter: rank 2 has waited 0.05 s, since ",
                           ", for rank 3 (item 17 of call 5; last heard of in call 4)",
                           "After 0.3 s the call fails", "deadline_seconds"}) {
    EXPECT(Contains(text, part)) << part << " in: " << text;
  }
  StoreRelease(&host.warning.kind, 0);  // the host has told it
  waiter.join();
  EXPECT_EQ(host.warning.kind, 0u);  // not again
  EXPECT_EQ(FaultKindOf(fault), FaultKind::kTimeout);
}

TEST(ADevicesLimitsSetTheDeadlineAndHaveTheRecord) {
  Fault recorded{};
  uint64_t stop = 0, abort = 0;
  WaitLimits limits{50'000'000, 0, 0, &recorded, nullptr, &abort};
  const WaitContext ctx{nullptr, &stop, 0, kOp, 2, false, &limits};
  const Signal word = 0;
  const uint64_t begin = NowNs();
  EXPECT(!WaitSignal(&word, MakeSignal(5, 7), 3, 17, ctx));
  EXPECT(NowNs() - begin >= 50'000'000);
  EXPECT_EQ(FaultKindOf(recorded), FaultKind::kTimeout);
  EXPECT_EQ(recorded.peer, 3);
}

// A loop that polls fast gets there in about an hour.
TEST(TheDeadlineStaysWhenAttemptsCountFromZeroAgain) {
  Fault recorded{};
  uint64_t stop = 0, abort = 0;
  WaitLimits limits{50'000'000, 0, 0, &recorded, nullptr, &abort};
  const WaitContext ctx{nullptr, &stop, NowNs() + 60'000'000'000, kOp, 2, false, &limits};
  Patience patience(ctx);
  uint32_t attempt = 0u - kPollsPerLook;
  int looks = 0;
  for (bool lasts = true; lasts && looks < 10; ++attempt) {
    if (!Patience::Looks(attempt)) continue;
    lasts = patience.Lasts(ctx, attempt, FaultKind::kTimeout, 3, 17, MakeSignal(5, 7), 0);
    ++looks;
    std::this_thread::sleep_for(std::chrono::milliseconds(60));
  }
  EXPECT_EQ(looks, 2);
  EXPECT_EQ(FaultKindOf(recorded), FaultKind::kTimeout);
}

TEST(NoWarningIfItShouldComeAfterTheDeadline) {
  RankFault fault{};
  Limits host;
  WaitLimits limits = host.Of(/*warn_left_s=*/0);
  WaitContext ctx = Context(&fault, 2, 0.05);
  ctx.limits = &limits;
  const Signal word = 0;
  EXPECT(!WaitSignal(&word, MakeSignal(5, 7), 3, 17, ctx));
  EXPECT_EQ(host.warning.kind, 0u);
}

TEST(AnAbortEndsWaits) {
  RankFault fault{};
  Limits host;
  WaitLimits limits = host.Of(0);
  WaitContext ctx = Context(&fault, 2, 60);
  ctx.limits = &limits;
  const Signal word = 0;
  std::thread waiter([&] { EXPECT(!WaitSignal(&word, MakeSignal(5, 7), 3, 17, ctx)); });
  std::this_thread::sleep_for(std::chrono::milliseconds(10));
  EXPECT_EQ(LoadAcquire(&fault.kind), 0u);
  const uint64_t begin = NowNs();
  StoreRelease(&host.abort, 1);
  waiter.join();
  EXPECT(NowNs() - begin < 30'000'000'000);
  EXPECT_EQ(FaultKindOf(fault), FaultKind::kAborted);
  const std::string text = Describe(fault, 60);
  EXPECT(Contains(text, "rank 2 gave up waiting for rank 3") &&
         Contains(text, "has failed on another device"))
      << text;
}

TEST(AnOverlapSaysWhatToDo) {
  RankFault fault{};
  ReportFault(Context(&fault, 1, 60), FaultKind::kOverlap, 1, -1, 12, Presence(7));
  const std::string text = Describe(fault, 60);
  for (const char* part : {"rank 1 found another", "scheduling_mode=CONCURRENT", "one stream"}) {
    EXPECT(Contains(text, part)) << part << " in: " << text;
  }
}

TEST(AValueOutOfRangeIsNamedAndSaysWhatToDo) {
  constexpr auto kDecode = static_cast<uint32_t>(kFlashDecodeId);
  const auto text_of = [](FaultKind kind, int32_t peer, int64_t expected, int64_t seen) {
    Fault fault{};
    DeviceState state{};
    state.limits.fault = &fault;
    ReportValue(nullptr, kDecode, 2, kind, peer, 5, expected, seen);  // without a heap
    ReportValue(&state, kDecode, 2, kind, peer, 5, expected, seen);
    ReportValue(&state, kDecode, 3, kind, peer, 6, expected, seen);  // not the first
    EXPECT_EQ(FaultKindOf(fault), kind);
    EXPECT(KindOf(fault) == ErrorKind::kInvalidArgument);
    return Describe(fault, 60);
  };
  const std::string length = text_of(FaultKind::kLength, 0, 4096, -3);
  for (const char* part : {"jflux.flash_decode: rank 2 was given lengths[5] = -3", "4096 positions",
                           "end a sequence that has filled its cache"}) {
    EXPECT(Contains(length, part)) << part << " in: " << length;
  }
  const std::string page = text_of(FaultKind::kPage, 7, 64, 70);
  for (const char* part : {"rank 2 was given block_table[5, 7] = 70", "64 pages", "allocate"}) {
    EXPECT(Contains(page, part)) << part << " in: " << page;
  }
  // A fault that came before it stays.
  Fault fault{};
  DeviceState state{};
  state.limits.fault = &fault;
  fault.kind = static_cast<uint64_t>(FaultKind::kTimeout);
  ReportValue(&state, kDecode, 2, FaultKind::kLength, 0, 5, 8, 9);
  EXPECT(FaultKindOf(fault) == FaultKind::kTimeout && fault.seen == 0);
}

TEST(TheFirstFaultWinsAndIsWhole) {
  for (int round = 0; round < 200; ++round) {
    RankFault fault{};
    std::atomic<bool> go{false};
    std::vector<std::thread> threads;
    for (int i = 1; i <= 4; ++i) {
      threads.emplace_back([&, i] {
        while (!go) std::this_thread::yield();
        ReportFault(Context(&fault, i, 1), i % 2 ? FaultKind::kTimeout : FaultKind::kMismatch, i,
                    10 * i, 100 * i, 1000 * i);
      });
    }
    // Like the host, which reads it while the kernel runs.
    go = true;
    uint64_t kind = 0;
    while (kind == 0) kind = LoadAcquire(&fault.kind);
    const int i = fault.peer;
    const auto whole = [&] {
      EXPECT(i >= 1 && i <= 4);
      EXPECT_EQ(fault.rank, i);
      EXPECT_EQ(fault.peer, i);
      EXPECT_EQ(fault.tile, 10 * i);
      EXPECT_EQ(fault.expected, 100ull * i);
      EXPECT_EQ(fault.seen, 1000ull * i);
    };
    whole();
    EXPECT_EQ(kind, static_cast<uint64_t>(i % 2 ? FaultKind::kTimeout : FaultKind::kMismatch));
    for (auto& t : threads) t.join();
    whole();
    EXPECT_EQ(fault.kind, kind);
  }
}

TEST(SignaturesDifferWhenAFieldDiffers) {
  std::set<uint32_t> seen;
  int count = 0;
  for (int byte = 0; byte < 8; ++byte) {
    for (int field = 0; field < 3; ++field, ++count) {
      int64_t v[3] = {5, 5, 5};
      v[field] ^= 1ll << (8 * byte + 3);
      seen.insert(SignatureBuilder().Add(v[0]).Add(v[1]).Add(v[2]).Get());
    }
  }
  EXPECT_EQ(static_cast<int>(seen.size()), count);
  EXPECT(SignatureBuilder().Add(1).Add(2).Get() != SignatureBuilder().Add(2).Add(1).Get());
}

TEST(OpsSignaturesNameWhatRanksMustAgreeOn) {
  std::set<uint32_t> seen;
  const AllGatherMatmulParams ag{Rows{4, 2, 16}, 32, 24, DType::kF32, DType::kF32, false, false};
  const auto add = [&](auto p, auto change) {
    change(p);
    seen.insert(p.Signature());
  };
  add(ag, [](auto&) {});
  add(ag, [](auto& p) { p.rows.world = 2; });
  add(ag, [](auto& p) { p.rows.outer = 4; });
  add(ag, [](auto& p) { p.rows.inner = 8; });
  add(ag, [](auto& p) { p.k = 64; });
  add(ag, [](auto& p) { p.dtype = DType::kBF16; });
  EXPECT_EQ(seen.size(), 6u);
  const MatmulReduceScatterParams rs{Rows{4, 2, 16}, 24, 32, DType::kF32, DType::kF32, false};
  add(rs, [](auto&) {});
  add(rs, [](auto& p) { p.rows.world = 2; });
  add(rs, [](auto& p) { p.rows.outer = 4; });
  add(rs, [](auto& p) { p.rows.inner = 8; });
  add(rs, [](auto& p) { p.n = 64; });
  add(rs, [](auto& p) { p.out_dtype = DType::kBF16; });
  EXPECT_EQ(seen.size(), 12u);
}

// Two ranks send each other a buffer per call. As in the ops, call e uses half e % 2.
TEST(PingPongOfManyEpochs) {
  constexpr int kWords = 16;
  constexpr uint32_t kEpochs = 20000;
  struct Mailbox {  // in the reader's memory
    Signal signal[2] = {};
    uint32_t data[2][kWords] = {};
  } box[2];
  const auto rank = [&](int me) {
    RankFault fault{};
    const int peer = 1 - me;
    for (uint64_t epoch = 1; epoch <= kEpochs; ++epoch) {
      const uint32_t half = epoch & 1;
      for (int i = 0; i < kWords; ++i) box[peer].data[half][i] = epoch * 31 + i + me;
      StoreRelease(&box[peer].signal[half], MakeSignal(epoch, 7));
      const WaitContext ctx = Context(&fault, me, 60);
      const bool heard = WaitSignal(&box[me].signal[half], MakeSignal(epoch, 7), peer, 0, ctx);
      EXPECT(heard) << Describe(fault, 60);
      if (!heard) return;
      for (int i = 0; i < kWords; ++i) {
        EXPECT_EQ(box[me].data[half][i], epoch * 31 + i + peer) << "epoch " << epoch;
      }
    }
  };
  std::thread other(rank, 1);
  rank(0);
  other.join();
}

}  // namespace
}  // namespace jflux

int main() { return jflux::RunAll(); }
