// The kernel of all_gather_grouped_matmul in the simulator, on one to eight ranks: rows that
// cp.async gathers, routings that leave groups empty, several calls one after the other.
#include "ops/all_gather_grouped_matmul/all_gather_grouped_matmul.h"

#include <memory>
#include <vector>

#include "all_gather_grouped_matmul_call.h"
#include "simt/device_calls.h"
#include "testing.h"

namespace jflux {
namespace {

constexpr int kSms = 3;

struct Case {
  AllGatherGroupedMatmulParams p;
  GemmChoice choice;
  int32_t senders;
  TestHooks hooks = {};
};

class DeviceCall : public AllGatherGroupedMatmulCall {
 public:
  DeviceCall(const Case& c, uint32_t seed)
      : AllGatherGroupedMatmulCall(c.p, CudaLayoutOf(c.p).chunk_bytes,
                                   static_cast<Routed>(seed % 4), seed, /*own=*/seed % 2 == 1),
        c_(c) {}
  bool Launch(const CudaDevice& device, const SymmetricView& view, std::string* error) {
    return LoadAllGatherGroupedMatmulKernels(error) &&
           LaunchAllGatherGroupedMatmul(p_, ArraysOf(view.rank), c_.choice, c_.senders, /*site=*/0,
                                        device, view, nullptr, error);
  }

 private:
  const Case c_;
};

int64_t Run(const Case& c, uint32_t seed) {
  return simt::WrongOnDevices<DeviceCall>(c, c.p.world, seed);
}

constexpr DType kBF16 = DType::kBF16, kF16 = DType::kF16, kF32 = DType::kF32;
constexpr TestHooks kLate{0, /*max_delay_us=*/30};

AllGatherGroupedMatmulParams With(AllGatherGroupedMatmulParams p, bool transposed, bool gated,
                                  bool sums) {
  p.product.transpose_rhs = transposed;
  p.product.gated = gated;
  p.product.activation = gated ? Activation::kRelu : Activation::kNone;
  p.product.sums = sums;
  return p;
}

// The first ones are enough for each day; a long search runs all.
constexpr size_t kUsual = 3;
// GatheredParams(world, tokens, choices, parts, k, n, groups, ...)
const Case kCases[] = {
    {GatheredParams(2, 60, 2, 1, 136, 136, 3, kBF16, kBF16), {192, 1, 1}, 2},
    {With(GatheredParams(3, 30, 2, 2, 72, 120, 2, kF16, kF32), true, false, false),
     {128, 1, 2},
     1,
     kLate},
    {GatheredParams(8, 10, 2, 4, 72, 72, 2, kBF16, kF32), {128, 1, 1}, 2, kLate},
    // As many spans as there can be: 8064 bytes of a chunk are left, 56 tokens. Takes minutes.
    {GatheredParams(8, 70, 1, 4, 72, 72, 64, kBF16, kBF16), {128, 1, 1}, 2, kLate},
    {With(GatheredParams(2, 50, 3, 0, 136, 72, 3, kBF16, kF32), false, true, true),
     {128, 1, 1},
     3,
     kLate},
    {With(GatheredParams(2, 90, 2, 1, 72, 264, 2, kBF16, kBF16), true, false, false),
     {256, 2, 1},
     2},
    {GatheredParams(4, 20, 2, 1, 72, 136, 3, kF16, kF16), {192, 1, 1}, 2, kLate},
    {GatheredParams(1, 70, 2, 0, 136, 136, 3, kBF16, kBF16), {192, 1, 1}, 1},
    {GatheredParams(5, 20, 2, 2, 72, 72, 3, kBF16, kBF16), {128, 1, 1}, 1, kLate},
    {GatheredParams(7, 10, 2, 1, 72, 72, 3, kF16, kF16), {128, 1, 2}, 3, kLate},
};

TEST(GathersAndMultiplies) {
  simt::SetSmCount(kSms);
  simt::ExpectNoneWrong(kCases, Run, simt::Schedules(1) == 1 ? kUsual : std::size(kCases));
}

// The kernel of the portable main loop. Few k-blocks: many copies at a time take long here.
const Case kPortableCases[] = {
    {With(GatheredParams(3, 30, 2, 2, 40, 120, 2, kF16, kF32), true, false, false), Portable(2), 1,
     kLate},
    {With(GatheredParams(2, 50, 3, 0, 24, 72, 3, kBF16, kF32), false, true, true), Portable(8), 3,
     kLate},
};

TEST(InPortableCode) {
  simt::SetSmCount(2);
  simt::ExpectNoneWrong(kPortableCases, Run);
}

TEST(MissingWaitsAreFound) {
  simt::SetSmCount(kSms);
  simt::ExpectWrongWithoutWaits(kCases[1], Run, 4);
}

}  // namespace
}  // namespace jflux

int main() { return jflux::RunAll(); }
