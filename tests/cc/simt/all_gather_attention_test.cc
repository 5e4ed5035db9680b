// The kernels of all_gather_attention in the simulator, on two to eight ranks, against sums in
// double: late ranks, several calls one after the other, waits that are left out.
#include "ops/all_gather_attention/all_gather_attention.h"

#include <algorithm>
#include <memory>
#include <random>
#include <vector>

#include "all_gather_attention_call.h"
#include "simt/device_calls.h"
#include "testing.h"

namespace jflux {
namespace {

constexpr DType kBF16 = DType::kBF16, kF16 = DType::kF16;

class DeviceCall : public AllGatherAttentionCall {
 public:
  DeviceCall(const AttentionCase& c, bool portable, int32_t senders, uint32_t seed)
      : AllGatherAttentionCall(c, kLogKeyChunk, seed), senders_(senders) {
    params_.attention.portable = portable;
  }
  bool Launch(const CudaDevice& device, const SymmetricView& view, std::string* error) {
    return LoadAllGatherAttentionKernels(error) &&
           LaunchAllGatherAttention(params_, ArraysOf(view.rank), senders_, /*site=*/0, device,
                                    view, nullptr, error);
  }

 private:
  const int32_t senders_;
};

// How many results are wrong of Hopper's kernel, or of the portable one.
int64_t RunOne(const AttentionCase& c, bool portable, int32_t senders, const TestHooks& hooks,
               uint32_t seed, uint32_t count) {
  std::vector<std::unique_ptr<DeviceCall>> calls;
  for (uint32_t i = 0; i < count; ++i) {
    calls.push_back(std::make_unique<DeviceCall>(c, portable, senders, count * seed + i));
  }
  simt::DeviceHeap heap(c.world, calls[0]->Workspace(), hooks);
  return simt::WrongOnDevices(heap, c.world, calls, seed);
}

int64_t Run(const AttentionCase& c, int32_t senders, const TestHooks& hooks, uint32_t seed,
            uint32_t count = 3) {
  return RunOne(c, /*portable=*/false, senders, hooks, seed, count);
}

AttentionCase With(AttentionCase c, Placed placed, DType dtype) {
  c.placed = placed;
  c.dtype = dtype;
  return c;
}

constexpr int32_t kAny = kFurthest;
constexpr TestHooks kInTime{}, kLate{0, /*max_delay_us=*/30};

// world, batch, queries, keys, heads, groups, width, low, high[, segments, softcap]
const AttentionCase kCases[] = {
    With({2, 1, 200, 200, 2, 1, 128, -kAny, kNoFurther}, Placed::kZigzag, kBF16),
    With({3, 2, 70, 70, 2, 2, 64, -kAny, kAny, 2}, Placed::kInOrder, kF16),
    With({2, 2, 130, 130, 4, 2, 72, -100, 20, 0, 5.0}, Placed::kStriped, kF16),
    With({4, 1, 40, 140, 2, 1, 128, -kAny, kNoFurther, 3}, Placed::kAnyhow, kBF16),
    With({2, 1, 90, 150, 2, 2, 256, -kAny, kNoFurther}, Placed::kAnyhow, kBF16),
    With({2, 1, 400, 400, 1, 1, 128, -150, kNoFurther}, Placed::kInOrder, kF16),
    With({5, 1, 40, 40, 2, 1, 64, -kAny, kNoFurther}, Placed::kZigzag, kBF16),
    With({8, 1, 40, 40, 2, 2, 64, -kAny, kNoFurther}, Placed::kStriped, kBF16),
};

TEST(Gathers) {
  simt::SetSmCount(3);
  uint32_t seed = 1;
  for (const AttentionCase& c : kCases) {
    for (int schedule = 0; schedule < simt::Schedules(1); ++schedule, ++seed) {
      const auto senders = static_cast<int32_t>(1 + seed % 3);
      EXPECT_EQ(Run(c, senders, seed % 2 == 0 ? kLate : kInTime, seed), 0)
          << "case " << &c - kCases << ", seed " << seed;
    }
  }
}

TEST(GathersAnything) {
  for (uint32_t seed = 1000; seed < 1000u + simt::Schedules(8); ++seed) {
    std::mt19937 random(seed);
    const auto below = [&](uint32_t n) { return static_cast<int32_t>(random() % n); };
    AttentionCase c{};
    c.world = 2 + below(7);
    c.batch = 1 + below(2);
    c.keys = 1 + below(260), c.queries = below(2) != 0 ? c.keys : 1 + below(200);
    c.groups = 1 + below(2), c.heads = c.groups * (1 + below(2));
    c.width = 8 * (1 + below(17));
    c.high = below(2) != 0 ? kNoFurther : below(3) != 0 ? kAny : below(100);
    c.low = below(2) != 0 ? -kAny : -below(150);
    c.segments = below(2) * below(5);
    c.softcap = below(3) != 0 ? 0 : 1 + below(9);
    c.placed = static_cast<Placed>(below(4));
    c.positions_by_batch = below(2) != 0, c.wide = below(2) != 0;
    c.dtype = below(2) != 0 ? kF16 : kBF16;
    simt::SetSmCount(1 + below(4));
    EXPECT_EQ(Run(c, 1 + below(4), below(2) != 0 ? kLate : kInTime, seed), 0) << "seed " << seed;
  }
}

// Fewer calls: mma.sync is an event of all lanes.
TEST(GathersInPortableCode) {
  simt::SetSmCount(3);
  const AttentionCase cases[] = {
      kCases[0], kCases[1], kCases[4],
      With({2, 1, 60, 130, 4, 2, 72, -100, 20, 0, 5.0}, Placed::kStriped, kF16)};
  uint32_t seed = 1;
  for (const AttentionCase& c : cases) {
    for (int schedule = 0; schedule < simt::Schedules(1); ++schedule, ++seed) {
      EXPECT_EQ(RunOne(c, true, 1 + seed % 3, seed % 2 == 0 ? kLate : kInTime, seed, 2), 0)
          << "case " << &c - cases << ", seed " << seed;
    }
  }
}

// In order, a causal mask needs nothing of later ranks. Still no rank may run ahead: it would
// overwrite what a late peer has yet to read.
TEST(RanksWaitForPeersThatTheyDoNotNeed) {
  simt::SetSmCount(2);
  const AttentionCase c =
      With({2, 1, 40, 40, 1, 1, 64, -kAny, kNoFurther}, Placed::kInOrder, kBF16);
  for (uint32_t seed = 1; seed <= 4; ++seed) {
    const TestHooks hooks{0, /*max_delay_us=*/1000};
    EXPECT_EQ(Run(c, 1, hooks, seed, /*count=*/8), 0) << "seed " << seed;
    if (seed == 1) EXPECT_EQ(RunOne(c, true, 1, hooks, seed, /*count=*/6), 0);
  }
}

// Each call's data are others, and the workspace is not a number before the first.
TEST(MissingWaitsAreFound) {
  simt::SetSmCount(2);
  for (const bool portable : {false, true}) {
    EXPECT(RunOne(kCases[1], portable, 1, TestHooks{1, /*max_delay_us=*/30}, 4, 2) > 0);
  }
}

}  // namespace
}  // namespace jflux

int main() { return jflux::RunAll(); }
