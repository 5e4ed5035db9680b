// all_reduce's body, which the CPU back end and the kernels share, on 1 to 8 threads.
#include "ops/all_reduce/all_reduce.h"

#include <atomic>
#include <cmath>
#include <set>

#include "all_reduce_call.h"
#include "expect_right.h"
#include "ops/all_reduce/all_reduce_body.h"
#include "ops/all_reduce/butterfly_body.h"
#include "plans.h"
#include "testing.h"

namespace jflux {
namespace {

constexpr AllReduceAlgorithm kPacketAlgorithms[] = {
    AllReduceAlgorithm::kOneShot, AllReduceAlgorithm::kTwoShot, AllReduceAlgorithm::kHalfButterfly,
    AllReduceAlgorithm::kButterfly};
constexpr AllReduceAlgorithm kAlgorithms[] = {
    AllReduceAlgorithm::kOneShot, AllReduceAlgorithm::kTwoShot, AllReduceAlgorithm::kHalfButterfly,
    AllReduceAlgorithm::kButterfly, AllReduceAlgorithm::kChunked};
// Sizes: a partial last packet, fewer packets than ranks, many packets; a partial chunk, several
// chunks.
constexpr int64_t kCounts[] = {1, 3, 4, 7, 16, 37, 1000, 4099, 9001};
constexpr DType kDtypes[] = {DType::kF16, DType::kBF16, DType::kF32, DType::kF64};

PlainHeap HeapFor(const AllReduceParams& p, uint64_t first_epoch = 1) {
  if (p.algorithm == AllReduceAlgorithm::kChunked) {
    return PlainHeap(p.world, p.Chunks().Workspace(), first_epoch);
  }
  return PlainHeap(p.world, p.Workspace(), first_epoch);
}

void Check(int world, RunOptions options) {
  options.seed = 100 * world;
  for (AllReduceAlgorithm algorithm : kAlgorithms) {
    for (int64_t count : kCounts) {
      for (DType dtype : kDtypes) {
        const uint32_t seed = ++options.seed;
        const AllReduceParams p{world, count, dtype, algorithm, /*residual=*/seed % 2 == 0};
        std::vector<std::unique_ptr<AllReduceCall>> calls;
        for (uint32_t i = 0; i < 5; ++i) {
          calls.push_back(std::make_unique<AllReduceCall>(p, seed * 16 + i));
        }
        ExpectRight(calls, HeapFor(p, options.first_epoch), options);
      }
    }
  }
}

TEST(EqualsItsDefinition) { OnEverySchedule(Check); }

TEST(QuantisedWire) {
  OnEverySchedule([](int world, RunOptions options) {
    options.seed = 700 * world;
    for (DType wire : {DType::kF8E4M3FN, DType::kS8}) {
      for (int64_t count : {1, 127, 128, 129, 1000, 2500, 9001}) {
        for (DType dtype : {DType::kF16, DType::kBF16, DType::kF32}) {
          const uint32_t seed = ++options.seed;
          AllReduceParams p{world, count, dtype, AllReduceAlgorithm::kChunked, seed % 2 == 0};
          p.has_wire = true;
          p.wire = wire;
          std::vector<std::unique_ptr<WireCall>> calls;
          for (uint32_t i = 0; i < 3; ++i) {
            const int64_t nan_at = i == 1 ? count / 2 : -1;
            calls.push_back(std::make_unique<WireCall>(p, seed * 16 + i, nan_at));
          }
          ExpectRight(calls, PlainHeap(world, p.WireChunks().Workspace(), options.first_epoch),
                      options);
        }
      }
    }
  });
}

// Epoch 0 is the flag of fresh memory. No rank may take fresh memory for data.
TEST(AcrossTheWrapOnFreshMemory) {
  for (AllReduceAlgorithm algorithm : kPacketAlgorithms) {
    std::vector<std::unique_ptr<AllReduceCall>> calls;
    for (int64_t count : {8, 64, 512, 2500}) {  // each size reaches memory that was never written
      calls.push_back(std::make_unique<AllReduceCall>(
          AllReduceParams{3, count, DType::kF32, algorithm}, static_cast<uint32_t>(count)));
    }
    const PlainHeap heap(3, PacketLayout{PacketLayout::kMinHalfBytes}, /*first_epoch=*/1,
                         /*poison=*/false);
    RunOptions options;
    options.first_epoch = 0xfffffffe;
    options.poison = false;
    options.max_delay_us = 2000;
    ExpectRight(calls, heap, options);
  }
}

// Calls of all sizes and algorithms share one workspace: no call reads what another left.
TEST(CallsShareAWorkspace) {
  for (int world : {2, 3, 8}) {
    std::mt19937 random(world);
    std::vector<std::unique_ptr<AllReduceCall>> calls;
    for (int i = 0; i < 60; ++i) {
      constexpr int64_t kFit[] = {1, 3, 7, 37, 100, 500};
      const AllReduceParams p{world, kFit[random() % 6], kDtypes[random() % 4],
                              kPacketAlgorithms[random() % 4], /*residual=*/random() % 2 == 0};
      EXPECT(p.Workspace().half_bytes == PacketLayout::kMinHalfBytes);
      calls.push_back(std::make_unique<AllReduceCall>(p, 1000 * world + i));
    }
    const PlainHeap heap(world, PacketLayout{PacketLayout::kMinHalfBytes});
    RunOptions options;
    options.poison = false;
    options.max_delay_us = 100;
    ExpectRight(calls, heap, options);
  }
}

// Several threads share a rank's part.
class SharedCall : public AllReduceCall {
 public:
  SharedCall(const AllReduceParams& p, int places, int running, uint32_t seed)
      : AllReduceCall(p, seed), places_(places), running_(running) {}
  bool Run(const SymmetricView& view, uint64_t epoch, WaitContext ctx) override {
    ctx.op = static_cast<uint32_t>(kAllReduceId);
    const AllReduceArrays arrays = ArraysOf(view.rank);
    std::atomic<int> failed{0};
    if (p_.algorithm == AllReduceAlgorithm::kChunked) {
      const auto at = [&](int place) {
        return shmem::Context{view,   p_.Chunks().Workspace(), epoch, p_.Signature(), ctx, place,
                              places_};
      };
      const auto share = [&](const shmem::Context&) {
        InTurn(places_, running_, [&](int place) {
          const shmem::Context mine = at(place);
          failed += !ChunkedBody<float>{p_, arrays, mine}.Run();
        });
        return failed == 0;
      };
      return shmem::internal::RunCall(at(0), share);
    }
    const PacketCall call{view, p_.Workspace(), epoch, p_.Signature(), ctx};
    for (int peer = 0; peer < p_.world; ++peer) {
      if (peer != view.rank) call.SendHello(peer);
    }
    InTurn(places_, running_, [&](int place) {
      failed += IsButterfly(p_.algorithm)
                    ? !ButterflyBody<float, 1>{p_, arrays, call}.Run(place, places_)
                    : !AllReduceBody<float>{p_, arrays, call}.Run(place, places_);
    });
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
        const bool chunked = algorithm == AllReduceAlgorithm::kChunked;
        const int places = chunked ? 2 : 4;
        // All share one workspace. With two ranks, each CTA has two chunks.
        const int64_t most = chunked ? 8000 : 1501;
        for (int64_t count : {int64_t{5}, int64_t{1000}, int64_t{64}, most, int64_t{1}}) {
          const AllReduceParams p{world, count, DType::kF32, algorithm};
          if (chunked) {
            EXPECT_EQ(p.Chunks().Workspace().data_bytes, WorkspaceLayout::kMinDataBytes);
          } else {
            EXPECT_EQ(p.Workspace().half_bytes, PacketLayout::kMinHalfBytes);
          }
          calls.push_back(
              std::make_unique<SharedCall>(p, places, running, static_cast<uint32_t>(count)));
        }
        const PlainHeap heap = HeapFor(AllReduceParams{world, most, DType::kF32, algorithm});
        RunOptions options;
        options.max_delay_us = 200;
        options.deadline_s = 20;
        ExpectRight(calls, heap, options);
      }
    }
  }
}

TEST(RowsAreNormalised) {
  std::mt19937 random(7);
  for (int world = 1; world <= kMaxRanks; ++world) {
    for (AllReduceAlgorithm algorithm :
         {AllReduceAlgorithm::kOneShot, AllReduceAlgorithm::kTwoShot}) {
      for (DType dtype : kDtypes) {
        std::vector<std::unique_ptr<NormCall>> calls;
        for (int64_t rows : {1, 2, 3, 5}) {
          const int64_t width = 8 + random() % 5 * 8;
          AllReduceParams p{world, rows * width, dtype, algorithm, random() % 2 == 0};
          p.norm = random() % 2 == 0 ? Norm::kRms : Norm::kLayer;
          p.width = width;
          p.epsilon = 0.01;
          EXPECT(p.FitsNorm());
          const bool wide = random() % 2 == 0 && dtype != DType::kF64;
          calls.push_back(std::make_unique<NormCall>(p, wide, random() % 2 == 0, random() % 1000));
          EXPECT_EQ(p.Workspace().half_bytes, PacketLayout::kMinHalfBytes);
        }
        const PlainHeap heap(world, PacketLayout{PacketLayout::kMinHalfBytes});
        RunOptions options;
        options.max_delay_us = 100;
        ExpectRight(calls, heap, options);
      }
    }
  }
}

constexpr DType kValues[] = {DType::kF8E4M3FN, DType::kF8E5M2, DType::kS8};

// Rows of whole and of partial blocks.
TEST(RowsAreQuantised) {
  std::mt19937 random(8);
  for (int world : {1, 2, 3}) {
    for (AllReduceAlgorithm algorithm :
         {AllReduceAlgorithm::kOneShot, AllReduceAlgorithm::kTwoShot}) {
      std::vector<std::unique_ptr<NormCall>> calls;
      for (DType values : kValues) {
        for (int64_t width : {40, 128, 296}) {
          AllReduceParams p{world, 3 * width, kDtypes[random() % 2], algorithm};
          p.norm = random() % 2 == 0 ? Norm::kRms : Norm::kLayer;
          p.width = width;
          p.epsilon = 0.01;
          QuantizedRows quantized;
          quantized.values = values;
          quantized.block = random() % 3 == 0 ? -1 : kQuantizedBlock;
          quantized.power_of_two = random() % 2 == 0;
          calls.push_back(std::make_unique<NormCall>(p, /*wide_scale=*/true, random() % 2 == 0,
                                                     random() % 1000, &quantized));
        }
      }
      ExpectRight(calls, PlainHeap(world, PacketLayout{PacketLayout::kMinHalfBytes}), RunOptions{});
    }
  }
}

TEST(WhichRowsFit) {
  AllReduceParams p{4, 6, DType::kBF16, AllReduceAlgorithm::kOneShot};
  p.width = 6;  // not a multiple of a unit
  EXPECT(!p.FitsNorm());
  p.width = 4;  // count is not a multiple of the width
  EXPECT(!p.FitsNorm());
  p.count = p.width = 16384;
  EXPECT(p.FitsNorm());
  p.count = p.width = 65536;
  EXPECT(!p.FitsNorm());
}

TEST(AnAbsentRankIsNamed) {
  for (AllReduceAlgorithm algorithm : kAlgorithms) {
    const AllReduceParams p{3, 100, DType::kF32, algorithm};
    AllReduceCall call(p, 1);
    PlainHeap heap = HeapFor(p);
    RunOptions options;
    options.absent = 1;
    options.deadline_s = 0.05;
    const auto errors = RunRanks(heap, {&call}, options);
    for (int rank : {0, 2}) {  // either may only miss the other, which waits for rank 1
      EXPECT(errors[rank].find("all_reduce: rank " + std::to_string(rank)) != std::string::npos &&
             errors[rank].find("for rank ") != std::string::npos)
          << errors[rank];
    }
  }
}

// Rank 1 makes another call: the same number of bytes of another type, fewer bytes, or another
// algorithm.
class Disagreeing : public AnyCall {
 public:
  Disagreeing(const AllReduceParams& p, const AllReduceParams& other)
      : calls_{{p, 1}, {other, 1}} {}
  bool Run(const SymmetricView& view, uint64_t epoch, WaitContext ctx) override {
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
    PlainHeap heap(3, p.Workspace());
    RunOptions options;
    options.deadline_s = 20;
    const uint64_t start = NowNs();
    const auto errors = RunRanks(heap, {&call}, options);
    EXPECT(NowNs() - start < 10'000'000'000) << "told by the deadline";
    for (int rank = 0; rank < 3; ++rank) {
      // Ranks 0 and 2 agree, but also wait for rank 1.
      EXPECT(errors[rank].find("The ranks run different calls") != std::string::npos)
          << rank << errors[rank];
    }
  }
}

TEST(WorkspacesOfPacketsAreKnownByTheirSize) {
  for (int64_t size = PacketLayout::kMinHalfBytes; size <= 1ll << 32; size *= 2) {
    const PacketLayout packets{size};
    EXPECT(PacketLayout::OfTotal(packets.TotalBytes()).has_value());
    EXPECT(!PacketLayout::OfTotal(WorkspaceLayout{size}.TotalBytes()).has_value());
    EXPECT(packets.HelloOffset(1, kMaxRanks) <= kHeapAlign);
  }
}

// Every byte of x is in exactly one chunk of one shard, and no two slots or signals overlap.
TEST(ChunksCoverTheData) {
  for (int32_t world = 1; world <= kMaxRanks; ++world) {
    for (int64_t bytes : {1, 17, 4096, 4097, 100'000, 3 << 20, (16 << 20) + 6}) {
      const ChunkedLayout layout = ChunkedLayout::For(world, bytes);
      EXPECT_EQ(layout.chunk_bytes, bytes > world * int64_t{1 << 20} ? 16384 : 4096);
      int64_t next = 0;
      for (int owner = 0; owner < world; ++owner) {
        for (int64_t c = 0; c < layout.Chunks(); ++c) {
          const ChunkedLayout::ByteRange part = layout.RangeOf(owner, c);
          EXPECT(part.bytes <= layout.chunk_bytes);
          if (part.bytes == 0) continue;
          EXPECT_EQ(part.first, next);
          next += part.bytes;
          EXPECT(part.first % 16 == 0);
          for (int to = 0; to < world; ++to) {
            if (to == owner) continue;
            // A chunk's slot ends before the next chunk's; the last one ends inside the half.
            const int64_t slot = layout.SlotOffset(1, owner, to, c);
            EXPECT(slot % 16 == 0 && slot + part.bytes <= layout.SlotOffset(1, owner, to, c + 1));
            EXPECT(slot + part.bytes <= layout.Workspace().data_bytes);
          }
        }
      }
      EXPECT_EQ(next, bytes);
      if (world == 1) continue;
      // One sender's slots and signals begin where another's end.
      std::set<int64_t> slots, signals;
      for (int what : {0, 1}) {
        for (int from = 1; from < world; ++from) {
          slots.insert(layout.SlotOffset(what, from, 0, 0));
          signals.insert(layout.SignalIndex(what, from, 0, 0));
        }
      }
      EXPECT_EQ(static_cast<int>(slots.size()), 2 * (world - 1));
      EXPECT_EQ(*slots.rbegin(), (2 * world - 3) * layout.shard_bytes);
      EXPECT_EQ(*signals.rbegin(), (2 * world - 3) * layout.Chunks());
      EXPECT_EQ(static_cast<int>(signals.size()), 2 * (world - 1));
    }
  }
}

TEST(TheRightAlgorithm) {
  EXPECT(ChooseAllReduce(2, 1 << 20) == AllReduceAlgorithm::kOneShot);
  EXPECT(ChooseAllReduce(2, 2 << 20) == AllReduceAlgorithm::kChunked);
  EXPECT(ChooseAllReduce(4, MostAllReduceBytes(4)) == AllReduceAlgorithm::kChunked);
  EXPECT(ChooseAllReduce(4, 128 << 10) == AllReduceAlgorithm::kOneShot);
  EXPECT(ChooseAllReduce(4, 1 << 20) == AllReduceAlgorithm::kTwoShot);
  EXPECT(ChooseAllReduce(8, 128 << 10) == AllReduceAlgorithm::kTwoShot);
}

// The algorithm, and what it takes of the heap.
TEST(Plans) {
  const Op& op = *FindOp("all_reduce");
  const auto call = [](int64_t world, int64_t count, int64_t algorithm, int64_t width) {
    return Fields{{"world", world},
                  {"count", count},
                  {"dtype", static_cast<int64_t>(DType::kBF16)},
                  {"width", width},
                  {"algorithm", algorithm}};
  };
  const struct {
    int64_t world, count, asked, algorithm, workspace_bytes;
  } table[] = {
      {2, 100, -1, 0, 132096},      {2, 8192, -1, 0, 132096},      {2, 8192, 1, 1, 132096},
      {2, 8192, 2, 2, 263168},      {2, 8192, 3, 3, 263168},       {2, 8192, 4, 4, 140288},
      {2, 65536, -1, 0, 1049600},   {2, 262144, -1, 0, 4195328},   {2, 1048576, -1, 4, 8406016},
      {2, 1048576, 1, 1, 16778240}, {2, 1048576, 2, 2, 33555456},  {2, 1048576, 3, 3, 33555456},
      {2, 1048576, 4, 4, 8406016},  {2, 5242880, -1, 4, 33620992}, {2, 16777216, -1, -1, 0},
      {4, 100, -1, 0, 132096},      {4, 8192, -1, 0, 263168},      {4, 8192, 1, 1, 132096},
      {4, 8192, 2, 2, 525312},      {4, 8192, 3, 3, 525312},       {4, 8192, 4, 4, 140288},
      {4, 65536, -1, 0, 2098176},   {4, 262144, -1, 1, 4195328},   {4, 1048576, -1, 4, 8406016},
      {4, 1048576, 1, 1, 16778240}, {4, 1048576, 2, 2, 67109888},  {4, 1048576, 3, 3, 67109888},
      {4, 1048576, 4, 4, 8406016},  {4, 5242880, -1, 4, 33620992}, {4, 16777216, -1, -1, 0},
      {8, 100, -1, 0, 132096},      {8, 8192, -1, 0, 525312},      {8, 8192, 1, 1, 132096},
      {8, 8192, 2, 2, 525312},      {8, 8192, 3, 3, 525312},       {8, 8192, 4, 4, 140288},
      {8, 65536, -1, 1, 1049600},   {8, 262144, -1, 1, 4195328},   {8, 1048576, -1, 4, 8406016},
      {8, 1048576, 1, 1, 16778240}, {8, 1048576, 2, 2, 67109888},  {8, 1048576, 3, 3, 67109888},
      {8, 1048576, 4, 4, 8406016},  {8, 5242880, -1, -1, 0},       {8, 16777216, -1, -1, 0},
  };
  for (const auto& row : table) {
    const Fields expected{
        {"algorithm", row.algorithm}, {"workspace_bytes", row.workspace_bytes}, {"fits_norm", 0}};
    for (const Machine& machine : {Machine{0}, Machine{132}}) {
      const Fields plan = PlanOf(op, call(row.world, row.count, row.asked, 0), machine);
      EXPECT(plan == expected) << row.world << " " << row.count << ": " << InWords(plan);
    }
  }
  // Rows of 1024 that are normalised.
  const struct {
    int64_t world, asked, algorithm, workspace_bytes;
  } with_norm[] = {
      {2, -1, 0, 132096}, {2, 1, 1, 132096},  {4, -1, 0, 263168},
      {4, 1, 1, 132096},  {8, -1, 0, 525312}, {8, 1, 1, 132096},
  };
  for (const auto& row : with_norm) {
    const Fields plan = PlanOf(op, call(row.world, 8192, row.asked, 1024), Machine{132});
    const Fields expected{
        {"algorithm", row.algorithm}, {"workspace_bytes", row.workspace_bytes}, {"fits_norm", 1}};
    EXPECT(plan == expected) << InWords(plan);
    // Portable code has no clusters, and leaves the norm to XLA. CPUs need none.
    Machine portable{132};
    portable.arch = kPortableArch;
    EXPECT(PlanOf(op, call(row.world, 8192, row.asked, 1024), portable) ==
           PlanOf(op, call(row.world, 8192, row.asked, 0), portable));
    portable.sm_count = 0;
    EXPECT(PlanOf(op, call(row.world, 8192, row.asked, 1024), portable) == expected);
  }
  // Rows that no kernel normalises: an algorithm that does not, rows that are no whole units, rows
  // that have no room. Then the plan is the sum's.
  const auto not_normalised = [&](int64_t count, int64_t algorithm, int64_t width) {
    Fields sum = PlanOf(op, call(2, count, algorithm, 0), Machine{132});
    EXPECT(PlanOf(op, call(2, count, algorithm, width), Machine{132}) == sum) << count;
  };
  for (auto a : {AllReduceAlgorithm::kHalfButterfly, AllReduceAlgorithm::kButterfly,
                 AllReduceAlgorithm::kChunked}) {
    not_normalised(8192, static_cast<int64_t>(a), 1024);
  }
  not_normalised(8190, 0, 10);
  not_normalised(8192, 0, 1000);
  not_normalised(kMostNormUnits * 8, 0, kMostNormUnits * 8);
}

TEST(CallsThatHaveNoPlan) {
  ExpectRefusals("all_reduce",
                 {{"world", 2}, {"count", 64}, {"dtype", 1}, {"width", 0}, {"algorithm", -1}});
}

}  // namespace
}  // namespace jflux

int main() { return jflux::RunAll(); }
