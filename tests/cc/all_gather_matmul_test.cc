// all_gather_matmul's CPU body, which is the tile protocol itself, on 1 to 8 threads. Tilings are
// small, so that tiles straddle ranks and chunks straddle rows.
#include "ops/all_gather_matmul/all_gather_matmul.h"

#include "ranks.h"
#include "testing.h"

namespace jflux {
namespace {

struct Shape {
  int64_t outer, inner, k, n;
  CpuTiling tiling;
};
const Shape kShapes[] = {
    {1, 16, 8, 16, {64, 4, 8}},      // whole tiles
    {1, 5, 7, 9, {64, 16, 8}},       // several ranks in one tile
    {1, 33, 16, 8, {4096, 16, 8}},   // tiles straddle; one chunk
    {1, 1, 3, 1, {64, 4, 8}},        // one row per rank
    {3, 7, 16, 20, {100, 8, 16}},    // outer rows; chunks end within elements
    {2, 16, 12, 33, {256, 32, 16}},  //
    {4, 3, 16, 17, {72, 32, 8}},     //
};
const struct {
  DType in, out;
} kDtypes[] = {{DType::kF32, DType::kF32},   {DType::kF64, DType::kF64},
               {DType::kBF16, DType::kBF16}, {DType::kBF16, DType::kF32},
               {DType::kF16, DType::kF16},   {DType::kF32, DType::kBF16}};

void Check(int world, uint32_t first_epoch, int calls_each, int max_delay_us) {
  uint32_t seed = 100 * world;
  for (const Shape& s : kShapes) {
    for (const auto& dtypes : kDtypes) {
      ++seed;
      const bool transposed = seed % 2, gathered = seed % 3 != 0;
      const AllGatherMatmulParams p{
          Rows{world, s.outer, s.inner}, s.k, s.n, dtypes.in, dtypes.out, transposed, gathered};
      std::vector<std::unique_ptr<Call>> calls;
      for (int i = 0; i < calls_each; ++i) {
        calls.push_back(std::make_unique<AllGatherMatmulCall>(p, s.tiling, seed * 16 + i));
      }
      PlainHeap heap(world, calls[0]->Workspace(), first_epoch);
      RunOptions options;
      options.first_epoch = first_epoch;
      options.max_delay_us = max_delay_us;
      options.seed = seed;
      const std::string error = Join(RunRanks(heap, Pointers(calls), options));
      EXPECT(error.empty()) << error;
      for (const auto& call : calls) {
        EXPECT_EQ(call->Wrong(), 0)
            << "world " << world << " outer " << s.outer << " inner " << s.inner << " tile_m "
            << s.tiling.tile_m << " dtype " << dtypes.in << " call " << &call - &calls[0];
      }
    }
  }
}

TEST(EqualsItsDefinition) {
  for (int world = 1; world <= kMaxRanks; ++world) Check(world, 1, 4, 300);
}

TEST(WithoutDelays) {
  for (int world : {2, 4, 7}) Check(world, 1, 6, 0);
}

TEST(AcrossTheWrapOfEpochs) { Check(3, 0xfffffffd, 6, 100); }

AllGatherMatmulParams Small(int64_t inner, int64_t k) {
  return {Rows{3, 1, inner}, k, 8, DType::kF32, DType::kF32, false, false};
}

TEST(AnAbsentRankIsNamed) {
  AllGatherMatmulCall call(Small(8, 8), {64, 4, 8}, 1);
  PlainHeap heap(3, call.Workspace());
  RunOptions options;
  options.absent = 1;
  options.deadline_s = 0.05;
  const auto errors = RunRanks(heap, {&call}, options);
  for (int rank : {0, 2}) {
    EXPECT(errors[rank].find("all_gather_matmul: rank " + std::to_string(rank)) !=
               std::string::npos &&
           errors[rank].find("for rank 1 ") != std::string::npos)
        << errors[rank];
  }
}

// Rank 1 makes a call of another shape, which takes as much room: shards do not overlap.
class Disagreeing : public Call {
 public:
  WorkspaceLayout Workspace() const override { return calls_[0].Workspace(); }
  bool Run(const SymmetricView& view, uint32_t epoch, WaitContext ctx) override {
    return calls_[view.rank == 1].Run(view, epoch, ctx);
  }
  int64_t Wrong() const override { return 0; }

 private:
  AllGatherMatmulCall calls_[2] = {{Small(8, 8), {64, 4, 8}, 1}, {Small(4, 16), {64, 4, 8}, 1}};
};

TEST(RanksThatDisagreeAreTold) {
  Disagreeing call;
  PlainHeap heap(3, call.Workspace());
  const auto errors = RunRanks(heap, {&call});
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT(errors[rank].find("The ranks run different calls") != std::string::npos) << errors[rank];
  }
}

}  // namespace
}  // namespace jflux

int main() { return jflux::RunAll(); }
