// The kernel of all_to_all_matmul in the simulator, on two to eight ranks: each way to split and to
// concatenate, several calls one after the other, late ranks, few CTAs that may send.
#include "ops/all_to_all_matmul/all_to_all_matmul.h"

#include <memory>
#include <vector>

#include "all_to_all_matmul_call.h"
#include "simt/device_calls.h"
#include "simt/scaled.h"
#include "testing.h"

namespace jflux {
namespace {

struct Case {
  AllToAllMatmulParams p;
  GemmChoice choice;
  int32_t senders;
  TestHooks hooks = {};
  Scales scales = Scales::kNone;
  bool rolls_scales = false;  // a fault: the kernel gets those of the neighbours
};

class DeviceCall : public AllToAllMatmulCall {
 public:
  DeviceCall(const Case& c, uint32_t seed)
      : DeviceCall(c, seed,
                   {c.scales, c.p.RowsOfY(), c.p.KOfW(), c.p.n,
                    /*twice=*/c.scales == Scales::kOfBlocks && !c.p.concat_rows}) {}
  WorkspaceLayout Workspace() const override { return CudaLayoutOf(p_).Workspace(); }
  bool Launch(const CudaDevice& device, const SymmetricView& view, std::string* error) {
    const ProductPlan plan{c_.choice, c_.senders, Workspace().TotalBytes()};
    AllToAllMatmulArrays arrays = ArraysOf(view.rank);
    scales_.Give(&arrays, c_.rolls_scales);
    return LoadAllToAllMatmulKernels(error) &&
           LaunchAllToAllMatmul(p_, arrays, plan, /*site=*/0, device, view, nullptr, error);
  }

 private:
  DeviceCall(const Case& c, uint32_t seed, const simt::TestScales& scales)
      : AllToAllMatmulCall(c.p, {}, seed,
                           [scales, c](const Values& x, const Values& w) {
                             return scales.Product(x, w, c.p.transpose_rhs);
                           }),
        c_(c),
        scales_(scales) {}

  const Case c_;
  const simt::TestScales scales_;
};

int64_t Run(const Case& c, uint32_t seed) {
  return simt::WrongOnDevices<DeviceCall>(c, c.p.rows.world, seed);
}

constexpr DType kBF16 = DType::kBF16, kF16 = DType::kF16;
constexpr DType kE4M3 = DType::kF8E4M3FN, kS8 = DType::kS8;
constexpr Scales kOfSums = Scales::kOfSums, kOfBlocks = Scales::kOfBlocks;
constexpr TestHooks kLate{0, /*max_delay_us=*/30};

// ParamsOf(rows, k, n, types, way, transposed, gathered); way: bit 0 splits rows, bit 1 puts rows
// together.
const Case kCases[] = {
    {ParamsOf({2, 1, 60}, 136, 200, kBF16, kBF16, 1, false, true), {192, 1, 1}, 2},
    {ParamsOf({3, 1, 70}, 72, 136, kF16, kF16, 2, true, false), {128, 1, 2}, 1, kLate},
    {ParamsOf({2, 2, 128}, 72, 232, kBF16, kBF16, 3, false, true), {224, 2, 1}, 3},
    {ParamsOf({2, 1, 100}, 200, 136, kF16, kF16, 0, true, true), {128, 1, 1}, 1, kLate},
    {ParamsOf({4, 1, 30}, 72, 72, kBF16, kBF16, 1, false, false), {160, 2, 0}, 2, kLate},
    {ParamsOf({5, 1, 30}, 72, 72, kBF16, kBF16, 0, false, true), {128, 1, 1}, 1, kLate},
    {ParamsOf({7, 1, 10}, 72, 72, kF16, kF16, 3, true, false), {128, 1, 2}, 3},
    {ParamsOf({8, 1, 20}, 72, 72, kBF16, kBF16, 1, false, true), {128, 2, 1}, 2, kLate},
    {ParamsOf({8, 1, 20}, 72, 72, kBF16, kBF16, 2, false, false), {128, 1, 0}, 3},
    // 8 bits.
    {ParamsOf({2, 1, 60}, 144, 208, kE4M3, kF16, 3, true, true), {192, 1, 1}, 2, kLate, kOfSums},
    {ParamsOf({3, 1, 70}, 80, 144, kE4M3, kBF16, 2, true, false), {224, 2, 1}, 1, {}, kOfSums},
    {ParamsOf({2, 1, 60}, 144, 208, kE4M3, kF16, 3, true, false), {192, 1, 1}, 2, {}, kOfBlocks},
    {ParamsOf({3, 1, 70}, 128, 144, kE4M3, kBF16, 1, true, true), {128, 2, 1}, 1, kLate, kOfBlocks},
    {ParamsOf({2, 1, 100}, 256, 272, kE4M3, kBF16, 0, true, false), {192, 2, 1}, 2, {}, kOfBlocks},
    {ParamsOf({2, 1, 70}, 80, 144, kE4M3, kBF16, 1, true, true), {128, 1, 2}, 2},
    {ParamsOf({2, 1, 140}, 144, 208, kS8, kF16, 3, true, true), {192, 2, 1}, 2, kLate, kOfSums},
    {ParamsOf({3, 1, 70}, 80, 144, kS8, kBF16, 0, true, false), {128, 1, 2}, 1, {}, kOfSums},
};

TEST(ExchangesAndMultiplies) {
  simt::SetSmCount(3);
  simt::ExpectNoneWrong(kCases, Run);
}

// The kernel of the portable main loop. Few k-blocks: many copies at a time take long here.
const Case kPortableCases[] = {
    {ParamsOf({2, 1, 60}, 40, 200, kBF16, kBF16, 1, false, true), Portable(1), 2},
    {ParamsOf({3, 1, 30}, 40, 72, kF16, kF16, 0, true, true), Portable(1), 1, kLate},
};

TEST(InPortableCode) {
  simt::SetSmCount(2);
  simt::ExpectNoneWrong(kPortableCases, Run);
}

TEST(ScalesOfANeighbourAreFound) {
  simt::SetSmCount(3);
  for (Case c : kCases) {
    if (c.scales == Scales::kNone) continue;
    c.rolls_scales = true;
    EXPECT(Run(c, 1) > 0);
  }
}

TEST(MissingWaitsAreFound) {
  simt::SetSmCount(3);
  simt::ExpectWrongWithoutWaits(kCases[1], Run);
}

}  // namespace
}  // namespace jflux

int main() { return jflux::RunAll(); }
