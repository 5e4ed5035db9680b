// The kernel of matmul_all_to_all in the simulator, on two to eight ranks: each way to split and to
// concatenate, several calls one after the other, late ranks, few store warps that may send.
#include "ops/matmul_all_to_all/matmul_all_to_all.h"

#include <memory>
#include <vector>

#include "matmul_all_to_all_call.h"
#include "simt/device_calls.h"
#include "simt/scaled.h"
#include "testing.h"

namespace jflux {
namespace {

struct Case {
  MatmulAllToAllParams p;
  GemmChoice choice;
  int32_t senders = 0;  // 0: all
  TestHooks hooks = {};
  Scales scales = Scales::kNone;
  bool rolls_scales = false;  // a fault: the kernel gets those of the neighbours
};

class DeviceCall : public MatmulAllToAllCall {
 public:
  DeviceCall(const Case& c, uint32_t seed)
      : DeviceCall(c, seed, {c.scales, c.p.RowsOfX(), c.p.k, c.p.ColumnsOfW()}) {}
  WorkspaceLayout Workspace() const override { return CudaLayoutOf(p_, c_.choice).Workspace(); }
  bool Launch(const CudaDevice& device, const SymmetricView& view, std::string* error) {
    const ProductPlan plan{c_.choice, c_.senders, Workspace().TotalBytes()};
    MatmulAllToAllArrays arrays = ArraysOf(view.rank);
    scales_.Give(&arrays, c_.rolls_scales);
    return LoadMatmulAllToAllKernels(error) &&
           LaunchMatmulAllToAll(p_, arrays, plan, /*site=*/0, device, view, nullptr, error);
  }

 private:
  DeviceCall(const Case& c, uint32_t seed, const simt::TestScales& scales)
      : MatmulAllToAllCall(c.p, {}, seed,
                           [&](const Values& x, const Values& w) {
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
constexpr DType kE4M3 = DType::kF8E4M3FN, kE5M2 = DType::kF8E5M2, kS8 = DType::kS8;
constexpr Scales kOfSums = Scales::kOfSums, kOfBlocks = Scales::kOfBlocks;
constexpr TestHooks kLate{0, /*max_delay_us=*/30};

// rows, k, n, types; transpose_rhs, split_rows, concat_rows
const Case kCases[] = {
    {{{2, 1, 60}, 136, 200, kBF16, kBF16, false, true, false}, {192, 1, 1}},
    {{{3, 1, 70}, 72, 136, kF16, kF16, true, false, true}, {128, 1, 2}, 0, kLate},
    {{{2, 2, 128}, 72, 232, kBF16, kBF16, false, true, true}, {224, 2, 1}},
    {{{2, 1, 100}, 392, 136, kF16, kF16, false, false, false}, {128, 1, 1}, /*senders=*/1, kLate},
    {{{4, 1, 30}, 72, 72, kBF16, kBF16, true, true, false}, {160, 2, 0}, 0, kLate},
    {{{5, 1, 30}, 72, 72, kBF16, kBF16, false, false, true}, {128, 1, 1}, /*senders=*/1, kLate},
    {{{7, 1, 10}, 72, 72, kF16, kF16, true, true, true}, {128, 1, 2}},
    {{{8, 1, 20}, 72, 72, kBF16, kBF16, false, true, false}, {128, 2, 1}, /*senders=*/2, kLate},
    {{{8, 1, 20}, 72, 72, kBF16, kBF16, false, false, false}, {128, 1, 0}},
    // 8 bits.
    {{{2, 1, 60}, 144, 208, kE4M3, kF16, true, true, false}, {192, 1, 1}, 0, {}, kOfSums},
    {{{3, 1, 70}, 80, 144, kE5M2, kBF16, true, false, true, kE4M3}, {128, 1, 2}, 0, kLate, kOfSums},
    {{{2, 2, 128}, 80, 240, kE4M3, kBF16, true, true, true}, {224, 2, 1}, 0, {}, kOfSums},
    {{{2, 1, 60}, 272, 208, kE4M3, kBF16, true, true, false}, {192, 1, 1}, 0, kLate, kOfBlocks},
    {{{2, 1, 100}, 272, 128, kE4M3, kBF16, true, false, true}, {160, 2, 1}, 0, {}, kOfBlocks},
    {{{2, 1, 140}, 528, 272, kE4M3, kBF16, true, true, false}, {192, 2, 1}, 0, kLate, kOfBlocks},
    {{{2, 2, 128}, 144, 144, kE4M3, kBF16, true, true, true}, {128, 1, 1}, 1, {}, kOfBlocks},
    {{{3, 1, 70}, 80, 144, kE4M3, kBF16, true, false, false}, {128, 1, 2}},
    {{{2, 1, 140}, 272, 208, kS8, kF16, true, true, false}, {192, 2, 1}, 0, kLate, kOfSums},
    {{{3, 1, 70}, 80, 144, kS8, kBF16, true, false, true}, {128, 1, 2}, 0, {}, kOfSums},
};

TEST(MultipliesAndExchanges) {
  simt::SetSmCount(3);
  simt::ExpectNoneWrong(kCases, Run);
}

// The kernel of the portable main loop. Few k-blocks: many copies at a time take long here.
const Case kPortableCases[] = {
    {{{2, 1, 60}, 40, 200, kBF16, kBF16, false, true, false}, Portable(1)},
    {{{3, 1, 70}, 24, 136, kF16, kF16, true, false, true}, Portable(2), 0, kLate},
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
