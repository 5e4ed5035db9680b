// matmul_all_to_all's CPU body, which runs the tile protocol, on 1 to 8 threads, with shards along
// rows and along columns on either side. Tilings are small, so that a shard is several tiles and
// its last tiles are partial.
#include "ops/matmul_all_to_all/matmul_all_to_all.h"

#include <vector>

#include "expect_right.h"
#include "matmul_all_to_all_call.h"
#include "plans.h"
#include "rank_errors.h"
#include "testing.h"

namespace jflux {
namespace {

struct Shape {
  int64_t outer, inner, k, n;
  ShardTiling tiling;
};
const Shape kShapes[] = {
    {1, 16, 8, 16, {4, 8}},   // full tiles
    {1, 5, 7, 9, {16, 8}},    // fewer rows than a tile, a partial tile column
    {1, 33, 16, 8, {16, 8}},  // partial tile row
    {1, 1, 3, 1, {4, 8}},     // one element
    {3, 7, 16, 5, {8, 4}},    // outer > 1: a tile has rows of several outer indices
    {2, 16, 12, 17, {32, 16}},
};

void Check(int world, const RunOptions& options) {
  uint32_t seed = 100 * world;
  for (const Shape& s : kShapes) {
    for (const auto& [in, out] : kProductTypes) {
      for (int way = 0; way < 4; ++way) {
        ++seed;
        const bool transposed = seed % 3 == 0;
        const MatmulAllToAllParams p{Rows{world, s.outer, s.inner},
                                     s.k,
                                     s.n,
                                     in,
                                     out,
                                     transposed,
                                     (way & 1) != 0,
                                     (way & 2) != 0};
        ExpectRight(world, options, seed, [&](uint32_t call_seed) {
          return std::make_unique<MatmulAllToAllCall>(p, s.tiling, call_seed);
        });
      }
    }
  }
}

TEST(EqualsItsDefinition) { OnEverySchedule(Check); }

TEST(EverySlotIsOneTilesOfOnePeer) {
  for (int world = 1; world <= kMaxRanks; ++world) {
    const AllToAllLayout layout{world, 3, 2, 64};
    for (int dst = 0; dst < world; ++dst) {
      std::vector<char> seen(layout.Slots());
      for (int src = 0; src < world; ++src) {
        for (int i = 0; i < 6 && src != dst; ++i) {
          const int64_t slot = layout.SlotOf(dst, src, i / 2, i % 2);
          EXPECT(0 <= slot && slot < layout.Slots() && !seen[slot])
              << "world " << world << " dst " << dst << " src " << src << " tile " << i;
          if (0 <= slot && slot < layout.Slots()) seen[slot] = 1;
        }
      }
    }
  }
}

// The configuration with the fewest waves of tiles, counting partial tiles.
TEST(ShardsThatAreNoWholeTilesCost) {
  constexpr Machine kH200{132};
  EXPECT_EQ(ChooseAllToAll(4, 2048, 3072, 8192, DType::kBF16, kH200).tile_n, 256);
  EXPECT_EQ(ChooseAllToAll(4, 2048, 3072, 8192, DType::kBF16, kH200).cluster_m, 2);
  EXPECT_EQ(ChooseAllToAll(4, 2048, 128, 8192, DType::kBF16, kH200).tile_n,
            128);  // with 192 columns, a third would be wasted
  EXPECT_EQ(ChooseAllToAll(4, 128, 3072, 8192, DType::kBF16, kH200).cluster_m, 1);
  for (int world : {2, 3, 4, 8}) {
    for (int64_t rows : {1, 128, 300, 2048, 8192}) {
      for (int64_t n : {8, 128, 1000, 2048, 4096}) {
        EXPECT(IsPossible(ChooseAllToAll(world, rows, n, 8192, DType::kBF16, kH200)))
            << world << " " << rows << " " << n;
      }
    }
  }
}

MatmulAllToAllParams Small(int64_t n) {
  return {Rows{3, 1, 8}, 8, n, DType::kF32, DType::kF32, false, false, true};
}

TEST(AnAbsentRankIsNamed) {
  MatmulAllToAllCall call(Small(8), {4, 8}, 1);
  ExpectAbsentRankIsNamed("matmul_all_to_all", call, 3, 1);
}

TEST(RanksThatDisagreeAreTold) {
  MatmulAllToAllCall rank1s(Small(8), {4, 8}, 1), others(Small(7), {4, 8}, 1);
  ExpectDisagreementIsTold(rank1s, others, 3);
}

// What calls take on H200s: their configurations, how many send, and of the heap.
TEST(Plans) {
  constexpr DType kBF16 = DType::kBF16;
  ExpectPlans("matmul_all_to_all",
              {
                  {2, 1, 32, 8192, 2560, kBF16, {}, {128, 2, 8, 1}, 0, 2106368},
                  {2, 1, 64, 8192, 14336, kBF16, {}, {128, 1, 16, 1}, 14, 8406016},
                  {2, 1, 256, 8192, 14336, kBF16, {}, {224, 2, 8, 1}, 14, 16811008},
                  {2, 1, 333, 4104, 5520, kBF16, {}, {192, 2, 8, 1}, 28, 16811008},
                  {2, 1, 1024, 4096, 8192, kBF16, {}, {128, 2, 8, 1}, 28, 33620992},
                  {4, 2, 512, 8192, 12288, kBF16, {}, {256, 2, 8, 1}, 14, 268960768},
                  {4,
                   2,
                   512,
                   8192,
                   12288,
                   kBF16,
                   {{"split_rows", 1}, {"concat_rows", 0}},
                   {256, 2, 8, 1},
                   14,
                   268960768},
                  {4,
                   2,
                   512,
                   8192,
                   12288,
                   kBF16,
                   {{"split_rows", 0}, {"concat_rows", 1}},
                   {256, 2, 8, 1},
                   14,
                   268960768},
                  {4,
                   2,
                   512,
                   8192,
                   12288,
                   kBF16,
                   {{"split_rows", 1}, {"concat_rows", 1}},
                   {256, 2, 8, 1},
                   14,
                   268960768},
                  {8, 1, 128, 12288, 24576, kBF16, {}, {192, 1, 16, 1}, 9, 134480896},
                  {8, 1, 1024, 256, 4096, kBF16, {}, {128, 2, 8, 1}, 0, 134480896},
                  {4, 1, 4096, 24576, 12288, kBF16, {}, {256, 2, 4, 1}, 8, 1075840000},
                  {2, 1, 16, 320, 4096, kBF16, {}, {128, 2, 8, 1}, 0, 2106368},
                  {3, 1, 640, 2048, 1000, kBF16, {}, {160, 2, 8, 1}, 0, 8406016},
              });
}

TEST(CallsThatHaveNoPlan) { ExpectProductRefusals("matmul_all_to_all"); }

}  // namespace
}  // namespace jflux

int main() { return jflux::RunAll(); }
