// all_gather_grouped_matmul's CPU body on 1 to 8 threads, with random routings. Chunks straddle
// tokens, and tiles straddle ranks.
#include "ops/all_gather_grouped_matmul/all_gather_grouped_matmul.h"

#include "all_gather_grouped_matmul_call.h"
#include "expect_right.h"
#include "plans.h"
#include "rank_errors.h"
#include "testing.h"

namespace jflux {
namespace {

struct Shape {
  int64_t tokens;
  int32_t choices;
  int64_t k, n, groups, chunk_bytes;
};
const Shape kShapes[] = {
    {70, 4, 4, 3, 2, 100},    // several tiles for each expert
    {7, 2, 16, 8, 3, 64},     // chunks end within tokens
    {1, 1, 3, 5, 4, 4096},    // one token for each rank
    {13, 3, 8, 1, 1, 64},     // one expert
    {5, 2, 12, 17, 40, 256},  // most experts have no rows
};

void Check(int world, const RunOptions& options) {
  uint32_t seed = 100 * world;
  for (const Shape& s : kShapes) {
    for (const auto& [in, out] : kGroupedTypes) {
      ++seed;
      auto p = GatheredParams(world, s.tokens, s.choices, seed % 4, s.k, s.n, s.groups, in, out);
      p.product.transpose_rhs = seed % 2;
      p.product.gated = seed % 3 == 0;
      p.product.activation = seed % 3 == 2 ? Activation::kNone : Activation::kRelu;
      p.product.sums = seed % 5 < 2;
      ExpectRight(world, options, seed, [&](uint32_t call_seed) {
        return std::make_unique<AllGatherGroupedMatmulCall>(
            p, s.chunk_bytes, static_cast<Routed>(call_seed % 4), call_seed, /*own=*/seed % 2 == 1);
      });
    }
  }
}

TEST(EqualsItsDefinition) { OnEverySchedule(Check); }

AllGatherGroupedMatmulCall Small(int64_t tokens, int64_t k) {
  return AllGatherGroupedMatmulCall(
      GatheredParams(3, tokens, 2, 1, k, 8, 2, DType::kF32, DType::kF32), 64, Routed::kAnyhow, 1);
}

TEST(AnAbsentRankIsNamed) {
  AllGatherGroupedMatmulCall call = Small(8, 8);
  ExpectAbsentRankIsNamed("all_gather_grouped_matmul", call, 3, 1);
}

TEST(RanksThatDisagreeAreTold) {
  AllGatherGroupedMatmulCall rank1s = Small(4, 16), others = Small(8, 8);
  ExpectDisagreementIsTold(rank1s, others, 3);
  // What a chunk's size depends on.
  const auto with = [](int32_t parts, int64_t groups) {
    return GatheredParams(3, 8, 2, parts, 8, 8, groups, DType::kF32, DType::kF32).Signature();
  };
  EXPECT(with(1, 4) != with(1, 5) && with(1, 4) != with(2, 4));
}

TEST(OffsetsThatMakeNoSenseAreRefused) {
  ExpectBadOffsetsAreRefused([] { return Small(8, 8); }, 3);
}

// What calls take on H200s.
TEST(Plans) {
  const Op& op = *FindOp("all_gather_grouped_matmul");
  const auto plan = [&](int64_t world, int64_t tokens, int64_t choices, int64_t k, int64_t n,
                        int64_t groups, int64_t gated) {
    Fields call = GroupedCall(world, tokens, choices, k, n, groups);
    call["gated"] = gated;
    return PlanOf(op, call, Machine{132});
  };
  // Mixtral's experts on 2 ranks, with many tokens and with few; DeepSeek-V3's on 8.
  EXPECT_EQ(plan(2, 4096, 2, 4096, 7168, 8, 1)["parts"], 4);
  EXPECT_EQ(plan(2, 4096, 2, 4096, 7168, 8, 1)["tile_n"], 256);
  EXPECT_EQ(plan(2, 4096, 2, 4096, 7168, 8, 1)["senders"], 44);
  EXPECT_EQ(plan(2, 512, 2, 4096, 7168, 8, 1)["parts"], 0);
  EXPECT_EQ(plan(8, 4096, 8, 7168, 256, 64, 1)["parts"], 1);
  EXPECT_EQ(plan(8, 16384, 8, 7168, 256, 256, 1)["parts"], 1);
  // Qwen3's on 4 and on 8, and a table that there is no room for.
  EXPECT_EQ(plan(4, 4096, 8, 4096, 384, 128, 1)["parts"], 1);
  EXPECT_EQ(plan(8, 8192, 8, 4096, 192, 128, 1)["parts"], 1);
  EXPECT_EQ(plan(8, 8191, 8, 4096, 192, 128, 1)["parts"], 0);
  EXPECT_EQ(plan(8, 32768, 8, 4096, 192, 257, 1)["parts"], 0);
  EXPECT_EQ(plan(1, 4096, 2, 4096, 7168, 8, 0)["parts"], 0);
  Fields call = GroupedCall(2, 64, 2, 64, 64, 4);
  call["gated"] = 0;
  ExpectRefusals("all_gather_grouped_matmul", call);
  Fields odd = call;
  odd["k"] = 60;
  EXPECT(WhyNot(op, odd, Machine{132}).find("multiples of 8") != std::string::npos);
  EXPECT_EQ(WhyNot(op, odd, Machine{0}), "");
}

}  // namespace
}  // namespace jflux

int main() { return jflux::RunAll(); }
