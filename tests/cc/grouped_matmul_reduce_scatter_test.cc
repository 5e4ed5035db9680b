// grouped_matmul_reduce_scatter's CPU body on 1 to 8 threads, with random routings. Tiles straddle
// ranks and segments.
#include "ops/grouped_matmul_reduce_scatter/grouped_matmul_reduce_scatter.h"

#include "expect_right.h"
#include "grouped_matmul_reduce_scatter_call.h"
#include "plans.h"
#include "rank_errors.h"
#include "testing.h"

namespace jflux {
namespace {

struct Shape {
  int64_t tokens;
  int32_t choices;
  int64_t k, n, groups;
  int32_t item_tokens;
};
const Shape kShapes[] = {
    {70, 4, 4, 3, 2, 16},  // several tiles for each expert
    {7, 2, 8, 8, 3, 3},    // the last item of a segment has fewer tokens
    {1, 1, 3, 5, 4, 16},   // one token for each rank: most segments are empty
    {13, 3, 8, 1, 1, 1},   // one expert
    {5, 2, 7, 17, 40, 2},  // most experts have no rows
};

void Check(int world, const RunOptions& options) {
  uint32_t seed = 100 * world;
  for (const Shape& s : kShapes) {
    for (const auto& [in, out] : kGroupedTypes) {
      ++seed;
      auto p = ScatteredParams(world, s.tokens, s.choices, seed % 5, s.item_tokens, s.k, s.n,
                               s.groups, in, out);
      p.product.transpose_rhs = seed % 2;
      ExpectRight(world, options, seed, [&](uint32_t call_seed) {
        return std::make_unique<GroupedMatmulReduceScatterCall>(
            p, static_cast<Routed>(call_seed % 4), call_seed, /*own=*/seed % 2 == 1);
      });
    }
  }
}

TEST(EqualsItsDefinition) { OnEverySchedule(Check); }

TEST(SumsTravelInAWire) {
  const auto check = [](int world, const RunOptions& options) {
    uint32_t seed = 100 * world;
    for (const DType wire : {DType::kF8E4M3FN, DType::kS8}) {
      for (const DType out : {DType::kF32, DType::kBF16}) {
        ++seed;
        auto p = ScatteredParams(world, 13, 3, seed % 3, 2, 7, 256, 3, out, out);
        p.wire = wire;
        ExpectRight(world, options, seed, [&](uint32_t call_seed) {
          return std::make_unique<GroupedMatmulReduceScatterCall>(
              p, static_cast<Routed>(call_seed % 4), call_seed, /*own=*/seed % 2 == 1);
        });
      }
    }
  };
  OnEverySchedule(check);
}

GroupedMatmulReduceScatterCall Small(int64_t tokens, int64_t n, int32_t parts = 1) {
  return GroupedMatmulReduceScatterCall(
      ScatteredParams(3, tokens, 2, parts, 2, 8, n, 2, DType::kF32, DType::kF32), Routed::kAnyhow,
      1);
}

TEST(AnAbsentRankIsNamed) {
  GroupedMatmulReduceScatterCall call = Small(8, 8);
  ExpectAbsentRankIsNamed("grouped_matmul_reduce_scatter", call, 3, 1);
}

TEST(RanksThatDisagreeAreTold) {
  GroupedMatmulReduceScatterCall rank1s = Small(8, 8, /*parts=*/2), others = Small(8, 8);
  ExpectDisagreementIsTold(rank1s, others, 3);
}

TEST(OffsetsThatMakeNoSenseAreRefused) {
  ExpectBadOffsetsAreRefused([] { return Small(8, 8); }, 3);
}

// What calls take on H200s.
TEST(Plans) {
  const Op& op = *FindOp("grouped_matmul_reduce_scatter");
  const auto plan = [&](auto... sizes) { return PlanOf(op, GroupedCall(sizes...), Machine{132}); };
  // Mixtral's experts on 2 ranks, with many tokens and with few; Qwen3-30B-A3B's; on one rank.
  Fields mixtral = plan(2, 4096, 2, 7168, 4096, 8);
  EXPECT_EQ(mixtral["parts"], 2);
  EXPECT_EQ(mixtral["tile_n"], 256);
  EXPECT_EQ(mixtral["item_tokens"], 1);
  EXPECT_EQ(mixtral["workspace_bytes"], WorkspaceLayout::For(8 * 4096, 4096 * 8192).TotalBytes());
  EXPECT_EQ(plan(2, 512, 2, 7168, 4096, 8)["parts"], 0);
  EXPECT_EQ(plan(2, 4096, 8, 384, 2048, 128)["parts"], 1);
  EXPECT_EQ(plan(2, 4096, 8, 384, 2048, 128)["item_tokens"], 2);
  EXPECT_EQ(plan(1, 4096, 2, 7168, 4096, 8)["parts"], 0);
  EXPECT_EQ(plan(2, 4096, 2, 7168, 64, 8)["item_tokens"], 16);
  const Fields call = GroupedCall(2, 64, 2, 64, 64, 4);
  ExpectRefusals("grouped_matmul_reduce_scatter", call);
  Fields odd = call;
  odd["n"] = 60;
  EXPECT(WhyNot(op, odd, Machine{132}).find("multiples of 8") != std::string::npos);
  EXPECT_EQ(WhyNot(op, odd, Machine{0}), "");

  // A wire halves what travels, and has kernels of the widest tiles.
  Fields wire = GroupedCall(2, 512, 2, 7168, 4096, 8);
  wire["wire"] = static_cast<int64_t>(DType::kS8);
  EXPECT_EQ(PlanOf(op, wire, Machine{132})["tile_n"], 256);
  EXPECT_EQ(PlanOf(op, wire, Machine{132})["workspace_bytes"],
            WorkspaceLayout::For(8 * 512, 512 * (4096 + 128)).TotalBytes());
  wire["n"] = 4096 + 64;
  EXPECT(WhyNot(op, wire, Machine{132}).find("multiple of 128") != std::string::npos);
  EXPECT(WhyNot(op, wire, Machine{0}).find("multiple of 128") != std::string::npos);
}

}  // namespace
}  // namespace jflux

int main() { return jflux::RunAll(); }
