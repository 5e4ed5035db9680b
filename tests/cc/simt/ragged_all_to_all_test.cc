// The kernels of ragged_all_to_all in the simulator: LL packets and chunks, several calls one after
// the other on one workspace, late ranks.
#include "ops/ragged_all_to_all/ragged_all_to_all.h"

#include <memory>
#include <vector>

#include "ragged_all_to_all_call.h"
#include "simt/device_calls.h"
#include "testing.h"

namespace jflux {
namespace {

class DeviceCall : public RaggedCall {
 public:
  using RaggedCall::RaggedCall;
  bool Launch(const CudaDevice& device, const SymmetricView& view, std::string* error) {
    return LoadRaggedAllToAllKernels(error) &&
           LaunchRaggedAllToAll(p_, ArraysOf(view.rank), /*site=*/0, device, view, nullptr, error);
  }
};

int64_t Run(const RaggedParams& p, const TestHooks& hooks, uint32_t seed) {
  simt::DeviceHeap heap = p.chunked ? simt::DeviceHeap(p.world, p.ChunkedWorkspace(), hooks)
                                    : simt::DeviceHeap(p.world, p.Workspace(), hooks);
  return simt::WrongOnDevices(heap, p.world, seed, [&](uint32_t of) {
    return std::make_unique<DeviceCall>(p, /*most=*/20, of);
  });
}

TEST(MovesSlices) {
  simt::SetSmCount(2);
  uint32_t seed = 1;
  for (int world : simt::kWorlds) {
    for (bool chunked : {false, true}) {
      for (int64_t row_bytes : {36, 256}) {
        const RaggedParams p =
            RaggedParamsFor(world, /*slices=*/2, /*batch=*/2, /*operand_rows=*/30,
                            /*output_rows=*/40, chunked ? 4 * row_bytes : row_bytes, chunked);
        for (int schedule = 0; schedule < simt::Schedules(1); ++schedule, ++seed) {
          EXPECT_EQ(Run(p, {0, seed % 2 == 0 ? 50u : 0u}, seed), 0)
              << "world " << world << " chunked " << chunked << " row_bytes " << row_bytes
              << " seed " << seed;
        }
      }
    }
  }
}

// More than a CTA has threads.
TEST(ManySlicesWithOneAndTwoCtasAtATime) {
  simt::SetSmCount(2);
  for (bool chunked : {false, true}) {
    for (uint32_t seed : {1u, 3u}) {
      const RaggedParams p =
          RaggedParamsFor(seed == 1 ? 2 : 3, /*slices=*/300, /*batch=*/1, /*operand_rows=*/30,
                          /*output_rows=*/900, chunked ? 100 : 8, chunked);
      EXPECT_EQ(Run(p, {0, 0}, seed), 0) << "chunked " << chunked << " seed " << seed;
    }
  }
}

}  // namespace
}  // namespace jflux

int main() { return jflux::RunAll(); }
