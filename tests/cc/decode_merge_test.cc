// decode_merge's body, which the CPU back end and the kernel share, on 1 to 8 ranks.
#include "ops/decode_merge/decode_merge.h"

#include "decode_merge_call.h"
#include "expect_right.h"
#include "plans.h"
#include "rank_errors.h"
#include "testing.h"

namespace jflux {
namespace {

void Check(int world, const RunOptions& options) {
  uint32_t seed = 100 * world;
  for (const bool by_owner : {false, true}) {
    for (int64_t rows : {1, 7, 40}) {
      for (int64_t width : {1, 2, 5, 64}) {
        constexpr DType kTypes[] = {DType::kF32, DType::kBF16, DType::kF16};
        const DecodeMergeParams p{world, rows, width, by_owner, kTypes[seed % 3]};
        ExpectRight(world, options, ++seed, [&](uint32_t call_seed) {
          return std::make_unique<DecodeMergeCall>(p, call_seed);
        });
      }
    }
  }
}

TEST(EqualsItsDefinition) { OnEverySchedule(Check); }

void CheckThatANaNShows(bool by_owner) {
  const DecodeMergeParams p{2, 1, 2, by_owner};
  const float parts[2][3] = {{1, 2, NAN}, {3, 4, 0}};
  class WithNaN : public DecodeMergeCall {
   public:
    explicit WithNaN(const DecodeMergeParams& p, const float (*parts)[3])
        : DecodeMergeCall(p, 1), parts_(parts) {}
    bool Run(const SymmetricView& view, uint64_t epoch, WaitContext ctx) override {
      float* to = y[view.rank];
      return DecodeMergeCpu(p_, {parts_[view.rank], to, to + 2}, view, epoch, ctx);
    }
    const float (*parts_)[3];
    float y[2][3] = {};
  } call(p, parts);
  PlainHeap heap(2, p.Workspace());
  EXPECT(Join(RunRanks(heap, {&call})).empty());
  for (const auto& row : call.y) {
    for (const float v : row) EXPECT(v != v);
  }
}

TEST(ANaNShows) {
  CheckThatANaNShows(/*by_owner=*/false);
  CheckThatANaNShows(/*by_owner=*/true);
}

TEST(AnAbsentRankIsNamed) {
  const DecodeMergeParams p{3, 4, 8};
  DecodeMergeCall call(p, 1);
  ExpectAbsentRankIsNamed("decode_merge", call, PlainHeap(3, p.Workspace()), /*absent=*/1);
}

TEST(Plans) {
  Fields call{{"world", 2}, {"rows", 512}, {"width", 128}, {"by_owner", 0}, {"out_dtype", 0}};
  const Fields plan = PlanOf(*FindOp("decode_merge"), call, Machine{132});
  const int64_t packets = 2 * 512 * 65;
  EXPECT(plan.at("workspace_bytes") > 2 * 16 * packets);
  ExpectRefusals("decode_merge", call);
  call["by_owner"] = 1;
  const Fields by_owner = PlanOf(*FindOp("decode_merge"), call, Machine{132});
  EXPECT(by_owner.at("workspace_bytes") > 2 * 16 * (packets / 2 + 512 * 33));
}

}  // namespace
}  // namespace jflux

int main() { return jflux::RunAll(); }
