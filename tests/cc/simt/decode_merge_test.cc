// The kernel of decode_merge in the simulator: three calls one after the other on one workspace,
// with late ranks.
#include "ops/decode_merge/decode_merge.h"

#include <memory>
#include <vector>

#include "decode_merge_call.h"
#include "simt/device_calls.h"
#include "testing.h"

namespace jflux {
namespace {

class DeviceCall : public DecodeMergeCall {
 public:
  using DecodeMergeCall::DecodeMergeCall;
  bool Launch(const CudaDevice& device, const SymmetricView& view, std::string* error) {
    return LoadDecodeMergeKernels(error) &&
           LaunchDecodeMerge(p_, ArraysOf(view.rank), /*site=*/0, device, view, nullptr, error);
  }
};

int64_t Run(const DecodeMergeParams& p, const TestHooks& hooks, uint32_t seed) {
  simt::DeviceHeap heap(p.world, p.Workspace(), hooks);
  return simt::WrongOnDevices(heap, p.world, seed,
                              [&](uint32_t of) { return std::make_unique<DeviceCall>(p, of); });
}

TEST(MergesRows) {
  simt::SetSmCount(2);
  uint32_t seed = 1;
  for (int world : simt::kWorlds) {
    for (int64_t width : {5, 64}) {
      for (const bool by_owner : {false, true}) {
        const DType dtype = width == 5 ? DType::kF16 : DType::kF32;
        const DecodeMergeParams p{world, 41, width, by_owner, dtype};
        for (int schedule = 0; schedule < simt::Schedules(1); ++schedule, ++seed) {
          EXPECT_EQ(Run(p, {0, seed % 2 == 0 ? 50u : 0u}, seed), 0)
              << "world " << world << " width " << width << " seed " << seed;
        }
      }
    }
  }
}

// More quads than threads, of rows that do not divide them, and of one row.
TEST(RowsGoRoundWithOneAndTwoCtasAtATime) {
  simt::SetSmCount(2);
  for (const bool by_owner : {false, true}) {
    for (const DecodeMergeParams p : {DecodeMergeParams{2, 41, 200, by_owner, DType::kBF16},
                                      DecodeMergeParams{3, 2, 4200, by_owner}}) {
      for (uint32_t seed : {1u, 3u}) {
        EXPECT_EQ(Run(p, {0, 0}, seed), 0) << "width " << p.width << " seed " << seed;
      }
    }
  }
}

TEST(MissingWaitsAreFound) {
  simt::SetSmCount(2);
  for (const bool by_owner : {false, true}) {
    EXPECT(Run({2, 41, 64, by_owner}, {/*skip_waits=*/1, 50}, 1) > 0);
  }
}

}  // namespace
}  // namespace jflux

int main() { return jflux::RunAll(); }
