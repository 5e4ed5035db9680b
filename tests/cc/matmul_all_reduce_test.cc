// matmul_all_reduce's CPU bodies, which run the protocols: the tile protocol on 1 to 8 threads, and
// that of few rows on two. Tilings are small, so that tiles straddle ranks, and several ranks own
// rows of one tile.
#include "ops/matmul_all_reduce/matmul_all_reduce.h"

#include <set>

#include "expect_right.h"
#include "matmul_all_reduce_call.h"
#include "plans.h"
#include "rank_errors.h"
#include "testing.h"

namespace jflux {
namespace {

struct Shape {
  int64_t inner, k, n;  // inner: rows that a rank owns
  ScatterTiling tiling;
};
const Shape kShapes[] = {
    {16, 8, 16, {4, 8}},    // full tiles
    {5, 7, 9, {16, 8}},     // several ranks in one tile
    {33, 15, 8, {16, 8}},   // tiles straddle
    {7, 5, 24, {4, 8}},     // tiles straddle on both sides
    {1, 3, 1, {4, 8}},      // one row per rank
    {12, 15, 33, {32, 8}},  //
};

void Check(int world, const RunOptions& options) {
  uint32_t seed = 100 * world;
  for (const Shape& s : kShapes) {
    for (const auto& [in, out] : kProductTypes) {
      ++seed;
      const bool transposed = seed % 2, residual = seed / 2 % 2;
      const MatmulAllReduceParams p{{Rows{world, 1, s.inner}, s.k, s.n, in, out, transposed}};
      ExpectRight(world, options, seed, [&](uint32_t call_seed) {
        return std::make_unique<MatmulAllReduceCall>(p, s.tiling, call_seed, residual);
      });
    }
  }
}

TEST(EqualsItsDefinition) { OnEverySchedule(Check); }

// Up to 128 rows, and columns that end within a slice. Every other shape has numbers whose sums are
// not exact.
void CheckFewRows(int world, const RunOptions& options) {
  if (world != 2) return;
  std::mt19937 random(options.max_delay_us);
  for (uint32_t seed = 0; seed < 60; ++seed) {
    const int64_t inner = seed < 4 ? std::vector<int64_t>{1, 32, 33, 64}[seed] : 1 + random() % 64;
    const int64_t k = 1 + random() % 15, n = 1 + random() % 50;
    const int32_t slice_n = 8 << random() % 3;
    const auto& types = kProductTypes[random() % std::size(kProductTypes)];
    const bool transposed = random() % 2, residual = random() % 2;
    const int bound = seed % 2 == 0 ? 2 : 50;
    const MatmulAllReduceParams p{{Rows{2, 1, inner}, k, n, types.in, types.out, transposed}};
    ExpectRight(2, options, seed, [&](uint32_t call_seed) {
      return std::make_unique<FewRowsCall>(p, slice_n, call_seed, residual, bound);
    });
  }
}

TEST(FewRowsEqualTheirDefinition) { OnEverySchedule(CheckFewRows); }

// Sums that float32 does not represent exactly.
TEST(FewRowsHaveTheSameBitsOnBothRanks) {
  const MatmulAllReduceParams p{{Rows{2, 1, 50}, 15, 40, DType::kF32, DType::kF32, false}};
  FewRowsCall call(p, 16, 1, /*residual=*/true, /*bound=*/1 << 20);
  PlainHeap heap(2, call.Workspace());
  EXPECT_EQ(Join(RunRanks(heap, {&call})), "");
  EXPECT(call.SameBits());
}

MatmulAllReduceParams Small(int world, int64_t n) {
  return {{Rows{world, 1, 8}, 8, n, DType::kF32, DType::kF32, false}};
}

TEST(AnAbsentRankIsNamed) {
  MatmulAllReduceCall call(Small(3, 8), {4, 8}, 1);
  ExpectAbsentRankIsNamed("matmul_all_reduce", call, 3, 1);
}

TEST(AnAbsentRankOfFewRowsIsNamed) {
  for (int absent : {0, 1}) {
    FewRowsCall call(Small(2, 20), 8, 1);
    ExpectAbsentRankIsNamed("matmul_all_reduce", call, 2, absent);
  }
}

TEST(RanksThatDisagreeAreTold) {
  MatmulAllReduceCall rank1s(Small(3, 8), {4, 8}, 1), others(Small(3, 7), {4, 8}, 1);
  ExpectDisagreementIsTold(rank1s, others, 3);
}

TEST(RanksThatDisagreeOnFewRowsAreTold) {
  FewRowsCall rank1s(Small(2, 8), 8, 1), others(Small(2, 7), 8, 1);
  ExpectDisagreementIsTold(rank1s, others, 2);
}

// The m64 blocks of all slices are contiguous, and so are their signals.
TEST(FewRowsHavePlacesOfTheirOwn) {
  for (int64_t rows : {1, 64, 65, 128}) {
    const auto layout = FewRowsLayout::Make(24, 32, rows, 2);
    EXPECT_EQ(layout.m64_blocks, rows > 64 ? 2 : 1);
    std::set<int64_t> signals, blocks;
    for (int32_t slice = 0; slice < layout.slices; ++slice) {
      for (int m64 = 0; m64 < layout.m64_blocks; ++m64) {
        signals.insert(layout.SignalOffset(slice, m64));
        blocks.insert(layout.M64Offset(slice, m64));
      }
    }
    const auto count = static_cast<int64_t>(blocks.size());
    EXPECT_EQ(count, layout.slices * layout.m64_blocks);
    EXPECT_EQ(static_cast<int64_t>(signals.size()), count);
    EXPECT_EQ(*blocks.rbegin(), (count - 1) * 64 * 32 * 2);
    EXPECT(layout.Workspace().data_bytes >= count * 64 * 32 * 2);
  }
}

// What calls take on H200s: their configurations, how many send, and of the heap.
TEST(Plans) {
  constexpr DType kBF16 = DType::kBF16;
  ExpectPlans("matmul_all_reduce",
              {
                  {2, 1, 32, 8192, 2560, kBF16, {}, {128, 1, 1, 2}, 0, 1057792},
                  {2, 1, 64, 8192, 14336, kBF16, {}, {128, 1, 1, 1}, 0, 8406016},
                  {2, 1, 256, 8192, 14336, kBF16, {}, {224, 2, 0, 1}, 16, 67240960},
                  {2, 1, 1024, 4096, 8192, kBF16, {}, {128, 2, 8, 1}, 28, 134480896},
                  {8, 1, 128, 12288, 24576, kBF16, {}, {192, 2, 0, 1}, 32, 268960768},
                  {8, 1, 1024, 256, 4096, kBF16, {}, {128, 2, 4, 1}, 0, 268960768},
                  {4, 1, 4096, 24576, 12288, kBF16, {}, {256, 2, 4, 1}, 16, 2151678976},
                  {2, 1, 16, 320, 4096, kBF16, {}, {128, 1, 1, 1}, 0, 1057792},
                  {3, 1, 640, 2048, 1000, kBF16, {}, {128, 2, 0, 1}, 32, 16811008},
              });
}

TEST(CallsThatHaveNoPlan) { ExpectProductRefusals("matmul_all_reduce"); }

}  // namespace
}  // namespace jflux

int main() { return jflux::RunAll(); }
