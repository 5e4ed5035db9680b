// all_to_all_matmul's CPU body on 1 to 8 ranks, with shards along rows and along columns on either
// side, and the plans for GPUs. shard_panels_test.cc tests the GPU's layout and schedule.
#include "ops/all_to_all_matmul/all_to_all_matmul.h"

#include <vector>

#include "all_to_all_matmul_call.h"
#include "expect_right.h"
#include "plans.h"
#include "rank_errors.h"
#include "testing.h"

namespace jflux {
namespace {

struct Shape {
  int64_t outer, inner, k, n;
  AllToAllMatmulTiling tiling;
};
// k: of a shard. With concatenated columns, sums of 8 * 5 products of at most 2 are exact in
// float16 and bfloat16.
const Shape kShapes[] = {
    {1, 16, 4, 16, {32, 4, 8}},      // full tiles, several chunks
    {1, 5, 5, 9, {1 << 10, 16, 8}},  // fewer rows than a tile, a partial tile column
    {1, 33, 4, 8, {100, 16, 8}},     // partial tile row, chunks that do not divide tiles
    {1, 1, 3, 1, {1, 4, 8}},         // one row, less than a chunk's bytes
    {3, 7, 4, 5, {50, 8, 4}},        // outer > 1: a tile has rows of several outer indices
    {2, 16, 5, 17, {64, 32, 16}},
};

void Check(int world, const RunOptions& options) {
  uint32_t seed = 100 * world;
  for (const Shape& s : kShapes) {
    for (const auto& [in, out] : kProductTypes) {
      for (int way = 0; way < 4; ++way) {
        ++seed;
        const auto p = ParamsOf(Rows{world, s.outer, s.inner}, s.k, s.n, in, out, way,
                                seed % 3 == 0, seed % 2 == 0);
        ExpectRight(world, options, seed, [&](uint32_t call_seed) {
          return std::make_unique<AllToAllMatmulCall>(p, s.tiling, call_seed);
        });
      }
    }
  }
}

TEST(EqualsItsDefinition) { OnEverySchedule(Check); }

AllToAllMatmulParams Small(const Rows& rows) {
  return ParamsOf(rows, 8, 8, DType::kF32, DType::kF32, /*way=*/1, false, false);
}

TEST(AnAbsentRankIsNamed) {
  AllToAllMatmulCall call(Small(Rows{3, 1, 8}), {}, 1);
  ExpectAbsentRankIsNamed("all_to_all_matmul", call, 3, 1);
}

TEST(RanksThatDisagreeAreTold) {
  AllToAllMatmulCall rank1s(Small(Rows{3, 1, 8}), {}, 1), others(Small(Rows{3, 2, 4}), {}, 1);
  ExpectDisagreementIsTold(rank1s, others, 3);
}

constexpr Machine kH200{132};

// The configuration with the fewest waves of tiles, counting partial tiles.
TEST(ShardsThatAreNoWholeTilesCost) {
  // After attention: a rank's rows times all of w.
  EXPECT_EQ(ChooseAllToAllMatmul(2, 4096, 6144, 12288, DType::kBF16, false, kH200).tile_n, 256);
  EXPECT_EQ(ChooseAllToAllMatmul(2, 4096, 6144, 12288, DType::kBF16, false, kH200).cluster_m, 2);
  // Concatenated rows: full tiles of each shard.
  EXPECT_EQ(ChooseAllToAllMatmul(4, 128, 8192, 3072, DType::kBF16, true, kH200).cluster_m, 1);
  for (bool concat_rows : {false, true}) {
    for (int world : {1, 2, 3, 4, 8}) {
      for (int64_t rows : {1, 128, 300, 2048, 8192}) {
        for (int64_t n : {8, 128, 1000, 2048, 4096}) {
          for (double gbps : {0.0, 80.0}) {
            const Machine machine{132, gbps};
            EXPECT(IsPossible(
                ChooseAllToAllMatmul(world, rows, 1024, n, DType::kBF16, concat_rows, machine)))
                << world << " " << rows << " " << n;
          }
        }
      }
    }
  }
}

// A raster group's rows arrive while its first wave computes: slower links, fewer rows.
TEST(RasterGroupsFitTheLinks) {
  const GemmChoice c{256, 2, 16};
  EXPECT_EQ(TermGroups(c, 1, 8192, kH200).group_m, 16);
  for (int world : {2, 8}) {
    EXPECT_EQ(TermGroups(c, world, 1280, kH200).group_m, 5);  // 1441 rows in time
    EXPECT_EQ(TermGroups(c, world, 25600, kH200).group_m, 5);
    EXPECT_EQ(TermGroups(c, world, 25600, Machine{132, 80}).group_m, 1);   // 360
    EXPECT_EQ(TermGroups(c, world, 25600, Machine{132, 2.5}).group_m, 1);  // 11
  }
}

// Not seven tile rows of eight in the first one.
TEST(RasterGroupsHaveOneSize) {
  EXPECT_EQ(ChooseAllToAllMatmul(4, 2048, 3072, 12288, DType::kBF16, false, kH200).group_m, 4);
  for (int64_t tiles = 1; tiles <= 40; ++tiles) {
    const int64_t group = TermGroups({256, 2, 16}, 4, 256 * tiles, kH200).group_m;
    EXPECT(group <= 5 && group * CeilDiv(tiles, group) - tiles < CeilDiv(tiles, group)) << tiles;
  }
}

// Plans on H200s: configurations, senders and heap bytes. k: of a shard.
TEST(Plans) {
  const Fields after_attention{{"split_rows", 1}};
  const Fields before_attention{{"concat_rows", 1}};
  const Fields by_rows{{"split_rows", 1}, {"concat_rows", 1}};
  ExpectPlans(
      "all_to_all_matmul",
      {
          {2, 1, 4096, 6144, 12288, DType::kBF16, after_attention, {256, 2, 4, 1}, 44, 134480896},
          {2, 1, 4096, 6144, 12288, DType::kBF16, before_attention, {256, 2, 4, 1}, 44, 134480896},
          {8, 1, 1024, 512, 4096, DType::kBF16, after_attention, {128, 2, 2, 1}, 84, 16811008},
          {8, 1, 1024, 512, 4096, DType::kBF16, by_rows, {192, 2, 5, 1}, 84, 16811008},
          {4, 2, 512, 8192, 12288, DType::kBF16, {}, {256, 2, 4, 1}, 44, 134480896},
          {4, 1, 16, 1024, 4096, DType::kBF16, after_attention, {128, 1, 1, 1}, 132, 271360},
          {4, 1, 16, 1024, 4096, DType::kBF16, before_attention, {128, 1, 1, 1}, 132, 271360},
          {3, 1, 333, 1368, 5520, DType::kBF16, after_attention, {128, 1, 3, 1}, 47, 8406016},
      });
}

TEST(CallsThatHaveNoPlan) { ExpectProductRefusals("all_to_all_matmul"); }

}  // namespace
}  // namespace jflux

int main() { return jflux::RunAll(); }
