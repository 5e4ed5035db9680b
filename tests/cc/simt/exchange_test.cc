// The kernels of all_gather, all_to_all and reduce_scatter in the simulator: LL packets and chunks,
// several calls one after the other on one workspace, late ranks.
#include "ops/exchange/exchange.h"

#include <memory>
#include <vector>

#include "exchange_call.h"
#include "simt/device_calls.h"
#include "testing.h"

namespace jflux {
namespace {

class DeviceCall : public ExchangeCall {
 public:
  using ExchangeCall::ExchangeCall;
  bool Launch(const CudaDevice& device, const SymmetricView& view, std::string* error) {
    return LoadExchangeKernels(error) &&
           LaunchExchange(p_, ArraysOf(view.rank), /*site=*/0, device, view, nullptr, error);
  }
};

int64_t Run(const ExchangeParams& p, const TestHooks& hooks, uint32_t seed) {
  simt::DeviceHeap heap = p.chunked ? simt::DeviceHeap(p.world, p.Slots().Workspace(), hooks)
                                    : simt::DeviceHeap(p.world, p.Workspace(), hooks);
  return simt::WrongOnDevices(heap, p.world, seed,
                              [&](uint32_t of) { return std::make_unique<DeviceCall>(p, of); });
}

// Shards of `bytes` bytes as [2][bytes / 2], so that they are strided.
ExchangeParams ParamsFor(OpId op, int world, DType dtype, int64_t bytes, bool chunked) {
  const Shards one{1, 1, bytes}, all{world, 2, bytes / 2};
  return {op,     world, dtype, op == kAllGatherId ? one : all, op == kReduceScatterId ? one : all,
          chunked};
}

constexpr OpId kOps[] = {kAllGatherId, kAllToAllId, kReduceScatterId};

TEST(ExchangesShards) {
  simt::SetSmCount(2);
  uint32_t seed = 1;
  for (OpId op : kOps) {
    for (int world : simt::kWorlds) {
      for (bool chunked : {false, true}) {
        const DType dtype = seed % 2 == 0 ? DType::kBF16 : DType::kF32;
        const ExchangeParams p = ParamsFor(op, world, dtype, chunked ? 9016 : 1368, chunked);
        for (int schedule = 0; schedule < simt::Schedules(1); ++schedule, ++seed) {
          EXPECT_EQ(Run(p, {0, seed % 2 == 0 ? 50u : 0u}, seed), 0)
              << "op " << static_cast<int>(op) << " world " << world << " chunked " << chunked
              << " seed " << seed;
        }
      }
    }
  }
}

TEST(MissingWaitsAreFound) {
  simt::SetSmCount(2);
  for (bool chunked : {false, true}) {
    const ExchangeParams p = ParamsFor(kAllToAllId, 2, DType::kF32, 9016, chunked);
    EXPECT(Run(p, {/*skip_waits=*/1, 50}, 1) > 0) << "chunked " << chunked;
  }
}

}  // namespace
}  // namespace jflux

int main() { return jflux::RunAll(); }
