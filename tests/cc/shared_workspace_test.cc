// Calls of all products and of many shapes, one after the other on one workspace: no rank may take
// what an earlier call left behind for an answer to this one. The build includes every *_call.h of
// this folder here.
#include "expect_right.h"

namespace jflux {
namespace {

constexpr DType kTypes[] = {DType::kF16, DType::kBF16, DType::kF32, DType::kF64};

std::unique_ptr<Call> RandomCall(int world, std::mt19937* random) {
  const auto pick = [&](int64_t low, int64_t high) {
    return low + static_cast<int64_t>((*random)()) % (high - low + 1);
  };
  RandomProduct p{};
  p.rows = Rows{world, pick(0, 2) ? 1 : pick(2, 3), pick(1, 20)};
  p.k = pick(1, 16);
  p.n = pick(1, 24);
  p.in = kTypes[pick(0, 3)];
  p.out = kTypes[pick(0, 3)];
  p.tile_m = static_cast<int32_t>(4 << pick(0, 3));
  p.tile_n = static_cast<int32_t>(8 << pick(0, 1));
  p.seed = static_cast<uint32_t>(pick(1, 1 << 20));
  p.pick = pick;
  const auto ops = static_cast<int64_t>(RandomCalls().size());
  return RandomCalls()[pick(0, ops - 1)](p);
}

TEST(ManyCallsOfDifferentShapes) {
  for (int world = 1; world <= kMaxRanks; ++world) {
    for (uint32_t round = 0; round < 4; ++round) {
      std::mt19937 random(world * 100 + round);
      const WorkspaceLayout workspace{WorkspaceLayout::kMinDataBytes};
      std::vector<std::unique_ptr<Call>> calls;
      while (calls.size() < 40) {
        auto call = RandomCall(world, &random);
        if (call->Workspace().data_bytes == workspace.data_bytes) calls.push_back(std::move(call));
      }
      RunOptions options;
      options.first_epoch = round == 3 ? 0xffffffe0 : 1;
      options.max_delay_us = round % 2 ? 200 : 0;
      options.poison = round < 2;  // else old data stays, and looks right
      options.seed = round;
      ExpectRight(calls, PlainHeap(world, workspace, options.first_epoch), options);
    }
  }
}

}  // namespace
}  // namespace jflux

int main() { return jflux::RunAll(); }
