// all_reduce's CPU body, which is also what the kernel's threads run, on 1 to 8 threads.
#include "ops/all_reduce/all_reduce.h"

#include <atomic>

#include "ops/all_reduce/all_reduce_body.h"
#include "ranks.h"
#include "testing.h"

namespace jflux {
namespace {

constexpr AllReduceAlgorithm kAlgorithms[] = {AllReduceAlgorithm::kOneShot,
                                              AllReduceAlgorithm::kTwoShot};
// Bytes that are no whole packets, fewer packets than ranks, and many.
constexpr int64_t kCounts[] = {1, 3, 4, 7, 16, 37, 1000, 4099};
constexpr DType kDtypes[] = {DType::kF16, DType::kBF16, DType::kF32, DType::kF64};

void Check(int world, uint32_t first_epoch, int calls_each, int max_delay_us) {
  uint32_t seed = 100 * world;
  for (AllReduceAlgorithm algorithm : kAlgorithms) {
    for (int64_t count : kCounts) {
      for (DType dtype : kDtypes) {
        ++seed;
        const AllReduceParams p{world, count, dtype, algorithm};
        std::vector<std::unique_ptr<AllReduceCall>> calls;
        for (int i = 0; i < calls_each; ++i) {
          calls.push_back(std::make_unique<AllReduceCall>(p, seed * 16 + i));
        }
        PlainHeap heap(world, p.Channel(), first_epoch);
        RunOptions options;
        options.first_epoch = first_epoch;
        options.max_delay_us = max_delay_us;
        options.seed = seed;
        const std::string error = Join(RunRanks(heap, Pointers(calls), options));
        EXPECT(error.empty()) << error;
        for (const auto& call : calls) {
          EXPECT_EQ(call->Wrong(), 0)
              << "world " << world << " count " << count << " algorithm "
              << static_cast<int>(algorithm) << " dtype " << dtype << " call " << &call - &calls[0];
        }
      }
    }
  }
}

TEST(EqualsItsDefinition) {
  for (int world = 1; world <= kMaxRanks; ++world) Check(world, 1, 4, 200);
}

TEST(WithoutDelays) {
  for (int world : {2, 4, 7}) Check(world, 1, 6, 0);
}

TEST(AcrossTheWrapOfEpochs) { Check(3, 0xfffffffd, 6, 100); }

// Epoch 0 would be the flag of fresh memory: nobody may take that for data.
TEST(AcrossTheWrapOnFreshMemory) {
  for (AllReduceAlgorithm algorithm : kAlgorithms) {
    std::vector<std::unique_ptr<AllReduceCall>> calls;
    for (int64_t count : {8, 64, 512, 2500}) {  // each reaches places that were never written
      calls.push_back(std::make_unique<AllReduceCall>(
          AllReduceParams{3, count, DType::kF32, algorithm}, static_cast<uint32_t>(count)));
    }
    PlainHeap heap(3, PacketLayout{PacketLayout::kMinHalfBytes}, /*first_epoch=*/1,
                   /*poison=*/false);
    RunOptions options;
    options.first_epoch = 0xfffffffe;
    options.poison = false;
    options.max_delay_us = 2000;
    const std::string error = Join(RunRanks(heap, Pointers(calls), options));
    EXPECT(error.empty()) << error;
    for (const auto& call : calls) EXPECT_EQ(call->Wrong(), 0) << "call " << &call - &calls[0];
  }
}

// Calls of all sizes and both algorithms in one channel: what one leaves is none of another's.
TEST(CallsShareAChannel) {
  for (int world : {2, 3, 8}) {
    std::mt19937 random(world);
    std::vector<std::unique_ptr<AllReduceCall>> calls;
    for (int i = 0; i < 60; ++i) {
      constexpr int64_t kFit[] = {1, 3, 7, 37, 100, 500};
      const AllReduceParams p{world, kFit[random() % 6], kDtypes[random() % 4],
                              kAlgorithms[random() % 2]};
      EXPECT(p.Channel().half_bytes == PacketLayout::kMinHalfBytes);
      calls.push_back(std::make_unique<AllReduceCall>(p, 1000 * world + i));
    }
    PlainHeap heap(world, PacketLayout{PacketLayout::kMinHalfBytes});
    RunOptions options;
    options.poison = false;
    options.max_delay_us = 100;
    const std::string error = Join(RunRanks(heap, Pointers(calls), options));
    EXPECT(error.empty()) << error;
    for (const auto& call : calls) EXPECT_EQ(call->Wrong(), 0) << "call " << &call - &calls[0];
  }
}

// As a kernel's CTAs do it: a rank's threads share its part, and take their places in the order in
// which they begin; not all of them run at once.
class SharedCall : public AllReduceCall {
 public:
  SharedCall(const AllReduceParams& p, int places, int running, uint32_t seed)
      : AllReduceCall(p, seed), places_(places), running_(running) {}
  bool Run(const SymmetricView& view, uint32_t epoch, WaitContext ctx) override {
    ctx.op = static_cast<uint32_t>(OpId::kAllReduce);
    const AllReduceArrays arrays = ArraysOf(view.rank);
    const PacketCall call{view, p_.Channel(), epoch, p_.Signature(), ctx, /*patience_ns=*/0};
    for (int peer = 0; peer < p_.world; ++peer) {
      if (peer != view.rank) call.SendHello(peer);
    }
    std::atomic<int> place{0}, failed{0};
    std::vector<std::thread> threads;
    for (int t = 0; t < running_; ++t) {
      threads.emplace_back([&] {
        for (int mine = place++; mine < places_; mine = place++) {
          failed += !AllReduceBody<float>{p_, arrays, call}.Run(mine, places_);
        }
      });
    }
    for (auto& t : threads) t.join();
    for (int peer = 0; peer < p_.world; ++peer) {
      if (peer != view.rank && !call.AwaitHello(peer)) ++failed;
    }
    return failed == 0;
  }

 private:
  int places_, running_;
};

TEST(ThreadsShareARanksPart) {
  for (int world : {2, 3, 5}) {
    for (AllReduceAlgorithm algorithm : kAlgorithms) {
      for (int running : {1, 2, 4}) {
        std::vector<std::unique_ptr<SharedCall>> calls;
        for (int64_t count : {5, 1000, 64, 1501, 1}) {
          const AllReduceParams p{world, count, DType::kF32, algorithm};
          EXPECT(p.Channel().half_bytes == PacketLayout::kMinHalfBytes);
          calls.push_back(
              std::make_unique<SharedCall>(p, /*places=*/4, running, static_cast<uint32_t>(count)));
        }
        PlainHeap heap(world, PacketLayout{PacketLayout::kMinHalfBytes});
        RunOptions options;
        options.max_delay_us = 200;
        options.deadline_s = 20;
        const std::string error = Join(RunRanks(heap, Pointers(calls), options));
        EXPECT(error.empty()) << error;
        for (const auto& call : calls) {
          EXPECT_EQ(call->Wrong(), 0)
              << "world " << world << " running " << running << " call " << &call - &calls[0];
        }
      }
    }
  }
}

TEST(AnAbsentRankIsNamed) {
  for (AllReduceAlgorithm algorithm : kAlgorithms) {
    const AllReduceParams p{3, 100, DType::kF32, algorithm};
    AllReduceCall call(p, 1);
    PlainHeap heap(3, p.Channel());
    RunOptions options;
    options.absent = 1;
    options.deadline_s = 0.05;
    const auto errors = RunRanks(heap, {&call}, options);
    for (int rank : {0, 2}) {
      EXPECT(errors[rank].find("all_reduce: rank " + std::to_string(rank)) != std::string::npos &&
             errors[rank].find("for rank ") != std::string::npos)
          << errors[rank];
    }
  }
}

// Rank 1 makes another call: as many bytes of another type, fewer, or by the other algorithm.
class Disagreeing : public AnyCall {
 public:
  Disagreeing(const AllReduceParams& p, const AllReduceParams& other)
      : calls_{{p, 1}, {other, 1}} {}
  bool Run(const SymmetricView& view, uint32_t epoch, WaitContext ctx) override {
    return calls_[view.rank == 1].Run(view, epoch, ctx);
  }
  int64_t Wrong() const override { return 0; }

 private:
  AllReduceCall calls_[2];
};

TEST(RanksThatDisagreeAreTold) {
  const AllReduceParams p{3, 64, DType::kBF16, AllReduceAlgorithm::kOneShot};
  for (const AllReduceParams& other : {
           AllReduceParams{3, 64, DType::kF16, AllReduceAlgorithm::kOneShot},
           AllReduceParams{3, 20, DType::kBF16, AllReduceAlgorithm::kOneShot},
           AllReduceParams{3, 64, DType::kBF16, AllReduceAlgorithm::kTwoShot},
       }) {
    Disagreeing call(p, other);
    PlainHeap heap(3, p.Channel());
    RunOptions options;
    options.deadline_s = 20;
    const uint64_t start = NowNs();
    const auto errors = RunRanks(heap, {&call}, options);
    EXPECT(NowNs() - start < 10'000'000'000) << "told by the deadline";
    for (int rank = 0; rank < 3; ++rank) {
      // Ranks 0 and 2 agree with each other, but wait for rank 1 too.
      EXPECT(errors[rank].find("The ranks run different calls") != std::string::npos)
          << rank << errors[rank];
    }
  }
}

TEST(ChannelsOfPacketsAreKnownByTheirSize) {
  for (int64_t size = PacketLayout::kMinHalfBytes; size <= 1ll << 32; size *= 2) {
    const PacketLayout packets{size};
    EXPECT(PacketLayout::OfTotal(packets.TotalBytes()).has_value());
    EXPECT(!PacketLayout::OfTotal(ChannelLayout{size}.TotalBytes()).has_value());
    EXPECT(packets.HelloOffset(1, kMaxRanks) <= kHeapAlign);
  }
}

TEST(TheRightAlgorithm) {
  EXPECT(ChooseAllReduce(2, 2 << 20) == AllReduceAlgorithm::kOneShot);
  EXPECT(ChooseAllReduce(2, kMostAllReduceBytes) == AllReduceAlgorithm::kTwoShot);
  EXPECT(ChooseAllReduce(4, 128 << 10) == AllReduceAlgorithm::kOneShot);
  EXPECT(ChooseAllReduce(4, 1 << 20) == AllReduceAlgorithm::kTwoShot);
  EXPECT(ChooseAllReduce(8, 128 << 10) == AllReduceAlgorithm::kTwoShot);
}

}  // namespace
}  // namespace jflux

int main() { return jflux::RunAll(); }
