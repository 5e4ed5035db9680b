// all_gather_attention's CPU body on 1 to 8 threads, against sums in double; its layout; its plans.
// Chunks straddle positions.
#include "ops/all_gather_attention/all_gather_attention.h"

#include <set>

#include "all_gather_attention_call.h"
#include "expect_right.h"
#include "plans.h"
#include "rank_errors.h"
#include "testing.h"

namespace jflux {
namespace {

constexpr int32_t kAny = kFurthest;

AttentionCase With(AttentionCase c, Placed placed, DType dtype) {
  c.placed = placed;
  c.dtype = dtype;
  return c;
}

// The world is set below. batch, queries, keys, heads, groups, width, low, high[, segments,
// softcap]
const AttentionCase kCases[] = {
    With({0, 1, 12, 12, 2, 1, 5, -kAny, kNoFurther}, Placed::kZigzag, DType::kF32),
    With({0, 2, 7, 7, 4, 2, 8, -kAny, kAny, 3}, Placed::kInOrder, DType::kBF16),
    With({0, 3, 5, 9, 2, 2, 12, -9, 4, 0, 2.0}, Placed::kStriped, DType::kF16),
    With({0, 1, 1, 1, 1, 1, 1, -kAny, kNoFurther}, Placed::kInOrder, DType::kF32),
    With({0, 1, 140, 150, 1, 1, 16, -kAny, kNoFurther}, Placed::kAnyhow, DType::kF32),
};

void Check(int world, const RunOptions& options) {
  uint32_t seed = 100 * world;
  for (AttentionCase c : kCases) {
    c.world = world;
    c.positions_by_batch = ++seed % 2 == 0, c.wide = seed % 3 == 0;
    ExpectRight(world, options, seed, [&](uint32_t call_seed) {
      return std::make_unique<AllGatherAttentionCall>(c, 5 + seed % 4, call_seed);
    });
  }
}

TEST(EqualsItsDefinition) { OnEverySchedule(Check); }

AllGatherAttentionCall Small(int64_t keys, int64_t width) {
  return AllGatherAttentionCall(
      With({3, 1, 4, keys, 2, 2, width, -kAny, kAny}, Placed::kInOrder, DType::kF32), 6, 1);
}

TEST(AnAbsentRankIsNamed) {
  AllGatherAttentionCall call = Small(8, 8);
  ExpectAbsentRankIsNamed("all_gather_attention", call, 3, 1);
}

TEST(RanksThatDisagreeAreTold) {
  AllGatherAttentionCall rank1s = Small(4, 16), others = Small(8, 8);
  ExpectDisagreementIsTold(rank1s, others, 3);
}

// Chunks cover each tensor once, places do not overlap, and the first chunks hold the first rows.
TEST(ChunksHoldAllRowsOnce) {
  for (int32_t world : {1, 2, 3, 8}) {
    for (int64_t batch : {1, 2}) {
      for (int64_t keys : {1, 5, 40}) {
        AllGatherAttentionParams p{};
        p.world = world;
        p.attention.batch = batch, p.attention.keys = keys;
        p.attention.groups = 3, p.attention.width = 8, p.attention.dtype = DType::kBF16;
        const KeyLayout layout = KeyLayout::Make(p, 6);
        for (int32_t rank = 0; rank < world; ++rank) {
          std::set<int64_t> bytes, signals;
          for (int32_t src = 0; src < world; ++src) {
            if (src == rank) continue;
            const int32_t slot = layout.SlotOf(rank, src);
            for (int32_t i = 0; i < layout.Chunks(); ++i) {
              const KeyLayout::Chunk c = layout.ChunkAt(i);
              EXPECT(c.bytes > 0 && c.begin + c.bytes <= layout.sequence_bytes);
              EXPECT(signals.insert(layout.SignalOffset(slot, i)).second);
              for (int64_t at = 0; at < c.bytes; ++at) {
                EXPECT(bytes.insert(layout.DataOffset(slot, c) + at).second);
              }
              for (int64_t rows = 1; rows <= keys; ++rows) {
                if (c.begin < rows * layout.row_bytes) {
                  EXPECT(i < layout.ChunksOf(c.batch, rows));
                }
              }
            }
          }
          const int64_t all = 2 * (world - 1) * batch * layout.sequence_bytes;
          EXPECT_EQ(static_cast<int64_t>(bytes.size()), all);
          EXPECT(bytes.empty() || (*bytes.begin() == 0 && *bytes.rbegin() == all - 1));
          EXPECT(all <= layout.Workspace().data_bytes);
          EXPECT(signals.empty() || *signals.rbegin() < layout.Workspace().SignalBytes());
        }
        EXPECT_EQ(layout.ChunksOf(static_cast<int32_t>(batch) - 1, keys), layout.Chunks());
      }
    }
  }
}

// What calls take on H200s.
TEST(Plans) {
  const Op& op = *FindOp("all_gather_attention");
  const auto call = [&](int64_t world, int64_t length, int64_t heads, int64_t groups,
                        int64_t width) {
    return Fields{{"world", world}, {"batch", 1},       {"queries", length}, {"keys", length},
                  {"heads", heads}, {"groups", groups}, {"width", width},    {"dtype", 1}};
  };
  const Machine h200{132};
  // 8192 and 32768 positions on two ranks; heads that share no keys; 8 ranks.
  EXPECT_EQ(PlanOf(op, call(2, 4096, 32, 8, 128), h200)["senders"], 44);
  EXPECT_EQ(PlanOf(op, call(2, 4096, 32, 32, 128), h200)["senders"], 88);
  EXPECT_EQ(PlanOf(op, call(8, 4096, 32, 8, 128), h200)["senders"], 69);
  // Two halves of what the other rank has: 16 MiB.
  const int64_t bytes = PlanOf(op, call(2, 4096, 32, 8, 128), h200)["workspace_bytes"];
  EXPECT(bytes > (32 << 20) && bytes < (33 << 20)) << bytes;
  ExpectRefusals("all_gather_attention", call(2, 64, 4, 2, 64));
  EXPECT(WhyNot(op, call(2, 64, 4, 2, 60), h200).find("multiple of 8") != std::string::npos);
  EXPECT_EQ(WhyNot(op, call(2, 64, 4, 2, 60), Machine{0}), "");
  EXPECT(WhyNot(op, call(2, 64, 4, 3, 64), h200).find("multiple of `groups`") != std::string::npos);
  Fields wide = call(2, 64, 4, 2, 64);
  wide["dtype"] = 3;
  EXPECT(WhyNot(op, wide, Machine{0}).find("float32") != std::string::npos);
}

}  // namespace
}  // namespace jflux

int main() { return jflux::RunAll(); }
