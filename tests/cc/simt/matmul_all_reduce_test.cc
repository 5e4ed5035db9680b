// The kernels of matmul_all_reduce in the simulator: few rows on two ranks, and whole row blocks on
// two to eight; several calls one after the other, late ranks.
#include "ops/matmul_all_reduce/matmul_all_reduce.h"

#include <memory>
#include <vector>

#include "matmul_all_reduce_call.h"
#include "simt/device_calls.h"
#include "simt/scaled.h"
#include "testing.h"

namespace jflux {
namespace {

constexpr int kSms = 3;

struct Case {
  Rows rows;
  int64_t k, n;
  DType dtype;
  bool transpose_rhs, residual;
  GemmChoice choice;
  int32_t senders = 0;  // 0: all
  TestHooks hooks = {};
  Scales scales = Scales::kNone;
  bool rolls_scales = false;       // a fault: the kernel gets those of the neighbours
  DType of_narrow = DType::kBF16;  // results of operands of 8 bits

  DType DTypeOfW() const { return dtype == DType::kF8E5M2 ? DType::kF8E4M3FN : dtype; }
  DType OutDType() const { return SizeOf(dtype) == 1 ? of_narrow : dtype; }
};

class DeviceCall : public MatmulAllReduceCall {
 public:
  DeviceCall(const Case& c, uint32_t seed)
      : DeviceCall(c, seed, {c.scales, c.rows.Total(), c.k, c.n}) {}
  WorkspaceLayout Workspace() const override { return MatmulAllReduceWorkspace(p_, c_.choice); }
  bool Launch(const CudaDevice& device, const SymmetricView& view, std::string* error) {
    const ProductPlan plan{c_.choice, c_.senders, Workspace().TotalBytes()};
    MatmulAllReduceArrays arrays = ArraysOf(view.rank);
    scales_.Give(&arrays, c_.rolls_scales);
    return LoadMatmulAllReduceKernels(error) &&
           LaunchMatmulAllReduce(p_, arrays, plan, /*site=*/0, device, view, nullptr, error);
  }
  bool SameBits() const {
    for (const Array& y : y_) {
      if (y.bytes != y_[0].bytes) return false;
    }
    return true;
  }

 private:
  DeviceCall(const Case& c, uint32_t seed, const simt::TestScales& scales)
      : MatmulAllReduceCall(
            {{c.rows, c.k, c.n, c.dtype, c.OutDType(), c.transpose_rhs, c.DTypeOfW()}}, {}, seed,
            c.residual, /*bound=*/2,
            [&](const Values& x, const Values& w) {
              return scales.Product(x, w, c.transpose_rhs);
            }),
        c_(c),
        scales_(scales) {}

  const Case c_;
  const simt::TestScales scales_;
};

int64_t Run(const Case& c, uint32_t seed) {
  std::vector<std::unique_ptr<DeviceCall>> calls;
  for (uint32_t i = 0; i < 3; ++i) calls.push_back(std::make_unique<DeviceCall>(c, 3 * seed + i));
  simt::DeviceHeap heap(c.rows.world, calls[0]->Workspace(), c.hooks);
  const int64_t wrong = simt::WrongOnDevices(heap, c.rows.world, calls, seed);
  for (const auto& call : calls) EXPECT(wrong != 0 || call->SameBits()) << "seed " << seed;
  return wrong;
}

constexpr DType kBF16 = DType::kBF16, kF16 = DType::kF16;
constexpr DType kE4M3 = DType::kF8E4M3FN, kE5M2 = DType::kF8E5M2, kS8 = DType::kS8;
constexpr Scales kOfSums = Scales::kOfSums, kOfBlocks = Scales::kOfBlocks;
constexpr TestHooks kLate{0, /*max_delay_us=*/100};

const Case kCases[] = {
    // Few rows.
    {{2, 1, 12}, 264, 392, kBF16, false, true, {128, 1, 1, 2}},
    {{2, 1, 60}, 136, 264, kF16, true, false, {128, 1, 1}, 0, kLate},
    {{2, 1, 37}, 200, 136, kBF16, false, false, {128, 1, 1, 2}, 0, kLate},
    // Whole row blocks.
    {{2, 1, 128}, 136, 200, kBF16, false, true, {192, 1, 1}},
    {{3, 1, 128}, 72, 264, kF16, true, false, {128, 1, 0}, 0, kLate},
    {{2, 1, 256}, 72, 232, kBF16, false, false, {224, 2, 1}},
    {{2, 1, 128}, 392, 264, kBF16, true, true, {128, 1, 1}, /*senders=*/1, kLate},
    {{5, 1, 128}, 72, 136, kBF16, false, false, {128, 1, 1}, /*senders=*/1, kLate},
    {{8, 1, 128}, 72, 72, kF16, true, false, {128, 2, 0}, 0, kLate},
    // 8 bits: few rows, whole row blocks.
    {{2, 1, 12}, 400, 272, kE4M3, true, true, {128, 1, 1, 2}, 0, kLate, kOfSums, false, kF16},
    {{2, 1, 60}, 272, 272, kE5M2, true, false, {128, 1, 1}, 0, {}, kOfSums},
    {{2, 1, 60}, 272, 400, kE4M3, true, true, {128, 1, 1}, 0, kLate, kOfBlocks, false, kF16},
    {{2, 1, 20}, 400, 144, kE4M3, true, false, {128, 1, 1}, 0, {}, kOfBlocks},
    {{2, 1, 128}, 144, 208, kE4M3, true, true, {192, 1, 1}, 0, {}, kOfSums, false, kF16},
    {{2, 1, 256}, 144, 240, kE5M2, true, false, {224, 2, 1}, 0, kLate, kOfSums},
    {{2, 1, 128}, 272, 272, kE4M3, true, true, {192, 1, 1}, /*senders=*/1, kLate, kOfBlocks},
    {{3, 1, 128}, 144, 144, kE4M3, true, false, {128, 2, 0}, 0, {}, kOfBlocks},
    {{2, 1, 256}, 528, 272, kE4M3, true, false, {192, 2, 1}, 0, kLate, kOfBlocks},
    {{3, 1, 128}, 80, 144, kE4M3, true, false, {128, 1, 1}},
    {{2, 1, 12}, 400, 272, kS8, true, true, {128, 1, 1, 2}, 0, kLate, kOfSums},
    {{2, 1, 60}, 272, 272, kS8, true, false, {128, 1, 1}, 0, {}, kOfSums, false, kF16},
    {{2, 1, 256}, 272, 400, kS8, true, true, {192, 2, 1}, 0, kLate, kOfSums},
    {{3, 1, 128}, 144, 144, kS8, true, false, {128, 1, 1}},
};

TEST(MultipliesAndReduces) {
  simt::SetSmCount(kSms);
  simt::ExpectNoneWrong(kCases, Run);
}

// The kernel of the portable main loop. Few k-blocks: many copies at a time take long here.
const Case kPortableCases[] = {
    {{2, 1, 60}, 40, 264, kF16, true, true, Portable(0), 0, kLate},
    {{3, 1, 128}, 24, 136, kBF16, false, true, Portable(0), 0, kLate},
};

TEST(InPortableCode) {
  simt::SetSmCount(2);
  simt::ExpectNoneWrong(kPortableCases, Run);
}

TEST(ScalesOfANeighbourAreFound) {
  simt::SetSmCount(kSms);
  for (int i : {11, 15}) {
    Case c = kCases[i];
    c.rolls_scales = true;
    EXPECT(Run(c, 1) > 0) << "case " << i;
  }
}

TEST(MissingWaitsAreFound) {
  simt::SetSmCount(kSms);
  for (int i : {0, 4}) {
    Case c = kCases[i];
    c.hooks.skip_waits = 1;
    EXPECT(Run(c, 1) > 0) << "case " << i;
  }
}

}  // namespace
}  // namespace jflux

int main() { return jflux::RunAll(); }
