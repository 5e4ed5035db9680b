// The kernels of moe_dispatch and moe_combine in the simulator: warps that share items, several
// calls one after the other on one workspace, late ranks, more CTAs than run at a time.
#include "ops/moe_dispatch/moe_dispatch.h"

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "moe_dispatch_call.h"
#include "simt/device_calls.h"
#include "testing.h"

namespace jflux {
namespace {

// A call of either op. A launcher counts on `sms` SMs. The simulator has one, which holds four CTAs
// of a dispatch or eight of a combine.
struct DeviceCall {
  int sms;
  std::shared_ptr<MoeCall> call;
  std::function<bool(const CudaDevice&, const SymmetricView&, std::string*)> launch;

  bool Launch(CudaDevice device, const SymmetricView& view, std::string* error) {
    device.sm_count = sms;
    return LoadMoeDispatchKernels(error) && launch(device, view, error);
  }
  int64_t Wrong() const { return call->Wrong(); }
};

DeviceCall Dispatch(const MoeDispatchParams& p, int sms, uint32_t seed) {
  const auto call = std::make_shared<MoeDispatchCall>(p, /*blocks=*/1, /*running=*/1, seed);
  return {sms, call, [=](const CudaDevice& device, const SymmetricView& view, std::string* error) {
            return LaunchMoeDispatch(p, call->ArraysOf(view.rank), /*site=*/0, device, view,
                                     nullptr, error);
          }};
}

DeviceCall Combine(const MoeDispatchParams& p, int sms, uint32_t seed,
                   std::optional<DType> wire = std::nullopt) {
  constexpr DType kDTypes[] = {DType::kF16, DType::kBF16, DType::kF32};
  const auto call = std::make_shared<MoeCombineCall>(p, kDTypes[seed % 3], /*out_f32=*/seed % 2 > 0,
                                                     /*blocks=*/1, /*running=*/1, seed, wire);
  return {sms, call, [=](const CudaDevice& device, const SymmetricView& view, std::string* error) {
            return LaunchMoeCombine(call->params(), call->ArraysOf(view.rank), /*site=*/0, device,
                                    view, nullptr, error);
          }};
}

// `ops`: a letter for each call, d or c; e and i: c with a wire of float8_e4m3fn, of int8.
int64_t Run(const MoeDispatchParams& p, int sms, const std::string& ops, const TestHooks& hooks,
            uint32_t seed) {
  std::vector<std::unique_ptr<DeviceCall>> calls;
  for (const char op : ops) {
    const auto its_seed = static_cast<uint32_t>(ops.size() * seed + calls.size());
    std::optional<DType> wire;
    if (op == 'e' || op == 'i') wire = op == 'e' ? DType::kF8E4M3FN : DType::kS8;
    calls.push_back(std::make_unique<DeviceCall>(op == 'd' ? Dispatch(p, sms, its_seed)
                                                           : Combine(p, sms, its_seed, wire)));
  }
  const WorkspaceLayout layout = calls[0]->call->Workspace();
  for (const auto& c : calls) EXPECT_EQ(c->call->Workspace().TotalBytes(), layout.TotalBytes());
  simt::SetSmCount(1);
  simt::DeviceHeap heap(p.world, layout, hooks);
  return simt::WrongOnDevices(heap, p.world, calls, seed);
}

struct Case {
  int32_t tokens, slots, experts, vectors, capacity, alignment;
  bool masked;
  int32_t parts;
  int sms;
};

// Each with few and many ranks, which are late in every second run.
void Check(const Case& c, const std::string& ops) {
  uint32_t seed = 1;
  for (int world : simt::kWorlds) {
    auto p = MoeParamsFor(world, c.tokens, c.slots, c.experts, c.vectors, c.capacity, c.alignment,
                          c.masked, c.parts);
    for (int schedule = 0; schedule < simt::Schedules(2); ++schedule, ++seed) {
      p.fill = seed % 3 != 0;
      p.scale_vectors = seed % 2 != 0 ? c.vectors / 3 : 0;
      EXPECT_EQ(Run(p, c.sms, ops, {0, seed % 2 == 0 ? 50u : 0u}, seed), 0)
          << "ops " << ops << " world " << world << " tokens " << c.tokens << " slots " << c.slots
          << " seed " << seed;
    }
  }
}

// Fewer items than a CTA has warps; CTAs that wait for room.
constexpr Case kFew{5, 3, 2, 5, -1, 4, false, 1, 6};
// Warps with several items.
constexpr Case kMany{40, 2, 3, 3, 7, 1, false, 1, 1};
constexpr Case kParts{6, 4, 2, 70, -1, 8, true, 3, 6};
// More slots of an item's tokens than a warp has lanes.
constexpr Case kSlots{7, 17, 3, 9, 4, 2, true, 2, 2};

TEST(Dispatches) {
  for (const Case& c : {kFew, kMany, kParts, kSlots}) Check(c, "ddd");
}
TEST(Combines) {
  for (const Case& c : {kFew, kMany, kParts, kSlots}) Check(c, "ccc");
}
// Rows that end in a short block; more blocks than a warp has teams; parts without a block.
TEST(CombinesWithAWire) {
  for (const Case& c : {kFew, kMany, kParts, kSlots}) Check(c, "eie");
}
TEST(ShareAWorkspace) { Check(kFew, "dccddc"); }

// A combine's warp has more items than it sends ahead.
TEST(ManyItems) {
  const auto p = MoeParamsFor(2, 90, 3, 4, 4, -1, 1, false, 2);
  for (uint32_t seed = 1; seed <= static_cast<uint32_t>(simt::Schedules(1)); ++seed) {
    EXPECT_EQ(Run(p, /*sms=*/1, "dc", {0, 0}, seed), 0) << "seed " << seed;
  }
}

// Lanes that go separate ways would be a message.
TEST(MissingWaitsAreFound) {
  const auto p = MoeParamsFor(3, 20, 3, 2, 5, -1, 1, false, 1);
  for (const char* ops : {"ddd", "ccc", "eee"}) {
    for (uint32_t seed = 1; seed <= static_cast<uint32_t>(simt::Schedules(4)); ++seed) {
      EXPECT(Run(p, /*sms=*/1, ops, {/*skip_waits=*/1, 50}, seed) > 0) << ops << " seed " << seed;
    }
  }
}

}  // namespace
}  // namespace jflux

int main() { return jflux::RunAll(); }
