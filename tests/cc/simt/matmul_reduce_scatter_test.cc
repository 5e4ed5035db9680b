// The kernel of matmul_reduce_scatter in the simulator, on two to eight ranks: several calls one
// after the other, late ranks, tiles that ranks share, few store warps that may send.
#include "ops/matmul_reduce_scatter/matmul_reduce_scatter.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <vector>

#include "matmul_reduce_scatter_call.h"
#include "simt/device_calls.h"
#include "simt/scaled.h"
#include "testing.h"

namespace jflux {
namespace {

constexpr int kSms = 3;

struct Case {
  Rows rows;
  int64_t k, n;
  DType dtype, out_dtype;
  bool transpose_rhs;
  GemmChoice choice;
  int32_t senders = 0;   // 0: all
  int64_t second_k = 0;  // of a second product, which is summed too
  bool residual = false, bias = false;
  TestHooks hooks = {};
  Scales scales = Scales::kNone;
  std::optional<DType> wire = {};

  DType DTypeOfW() const { return dtype == DType::kF8E5M2 ? DType::kF8E4M3FN : dtype; }
};

class DeviceCall : public MatmulReduceScatterCall {
 public:
  DeviceCall(const Case& c, uint32_t seed)
      : DeviceCall(c, seed, {c.scales, c.rows.Total(), c.k + c.second_k, c.n}) {}
  DeviceCall(const Case& c, uint32_t seed, const simt::TestScales& scales)
      : MatmulReduceScatterCall(
            {c.rows, c.k, c.n, c.dtype, c.out_dtype, c.transpose_rhs, c.DTypeOfW(), c.wire}, {},
            seed,
            [&](const Values& x, const Values& w) {
              return scales.Product(x, w, c.transpose_rhs, c.k);
            }),
        c_(c),
        scales_(scales) {
    const Rows& r = c.rows;
    if (c.wire) DrawForWire(seed);
    for (int rank = 0; rank < r.world; ++rank) {
      const Values x = RandomIntegers(r.Total() * c.second_k, 2, seed * 100 + 20 + rank);
      const Values w = RandomIntegers(c.second_k * c.n, 1, seed * 100 + 70 + rank);
      Add(scales.Product(x, w, c.transpose_rhs, c.second_k, c.k / kScaleBlock));
      second_x_.emplace_back(c.dtype, x);
      second_w_.emplace_back(c.DTypeOfW(), w);
    }
    const Values bias = RandomIntegers(c.n, 9, seed * 100 + 90);
    if (c.bias) {
      for (size_t i = 0; i < sum_.size(); ++i) sum_[i] += bias[i % c.n];
    }
    bias_.assign(bias.begin(), bias.end());
    const Values residual = RandomIntegers(r.Total() * c.n, 9, seed * 100 + 91);
    if (c.residual) Add(residual);
    for (int rank = 0; rank < r.world; ++rank) {
      residual_.emplace_back(c.out_dtype, ShardOf(residual, rank));
    }
  }

  WorkspaceLayout Workspace() const override { return CudaLayoutOf(p_, c_.choice).Workspace(); }
  bool Launch(const CudaDevice& device, const SymmetricView& view, std::string* error) {
    const int rank = view.rank;
    MatmulReduceScatterOperands operands{};
    operands.products[0] = {x_[rank].bytes.data(), w_[rank].bytes.data(), c_.k};
    operands.products[1] = {second_x_[rank].bytes.data(), second_w_[rank].bytes.data(),
                            c_.second_k};
    operands.terms = c_.second_k > 0 ? 2 : 1;
    operands.y = y_[rank].bytes.data();
    if (c_.bias) operands.bias = bias_.data();
    if (c_.residual) operands.residual = residual_[rank].bytes.data();
    scales_.Give(&operands);
    MatmulReduceScatterParams p = p_;
    p.k += c_.second_k;
    const ProductPlan plan{c_.choice, c_.senders, Workspace().TotalBytes()};
    return LoadMatmulReduceScatterKernels(error) &&
           LaunchMatmulReduceScatter(p, operands, plan, /*site=*/0, device, view, nullptr, error);
  }

 private:
  // Parts that a wire changes by less than 16 bits hold: in a block all are zeros, or as large. The
  // blocks of other rows and columns are of other sizes.
  void DrawForWire(uint32_t seed) {
    std::fill(sum_.begin(), sum_.end(), 0);
    for (int rank = 0; rank < c_.rows.world; ++rank) {
      Values x(c_.rows.Total() * c_.k), w = RandomIntegers(c_.k * c_.n, 1, seed * 100 + 30 + rank);
      for (int64_t row = 0; row < c_.rows.Total(); ++row) {
        x[row * c_.k + row * 5 % c_.k] = 1 << (row + rank) % 3;
      }
      for (int64_t i = 0; i < c_.k * c_.n; ++i) {
        const int64_t column = c_.transpose_rhs ? i / c_.k : i % c_.n;
        w[i] *= column / kWireBlock % 2 == 0 ? 8 : 16;
      }
      Add(Product(x, w, c_.rows.Total(), c_.k, c_.n, c_.transpose_rhs));
      x_[rank] = Array(c_.dtype, x);
      w_[rank] = Array(c_.DTypeOfW(), w);
    }
  }
  void Add(const Values& v) {
    for (size_t i = 0; i < sum_.size(); ++i) sum_[i] += v[i];
  }

  const Case c_;
  const simt::TestScales scales_;
  std::vector<Array> second_x_, second_w_, residual_;
  std::vector<float> bias_;
};

int64_t Run(const Case& c, uint32_t seed) {
  return simt::WrongOnDevices<DeviceCall>(c, c.rows.world, seed);
}

constexpr DType kBF16 = DType::kBF16, kF16 = DType::kF16, kF32 = DType::kF32;
constexpr DType kE4M3 = DType::kF8E4M3FN, kE5M2 = DType::kF8E5M2, kS8 = DType::kS8;
constexpr Scales kOfSums = Scales::kOfSums, kOfBlocks = Scales::kOfBlocks;
constexpr TestHooks kLate{0, /*max_delay_us=*/100};

const Case kCases[] = {
    {{2, 1, 100}, 136, 200, kBF16, kBF16, false, {192, 1, 1}, 0, 72, true, true},
    {{3, 1, 70}, 72, 264, kF16, kF32, true, {128, 1, 2}, 0, 0, true, true, kLate},
    {{2, 1, 24}, 264, 136, kBF16, kBF16, false, {128, 1, 1, 2}, 0, 0, false, false, kLate},
    {{2, 2, 128}, 72, 232, kBF16, kBF16, true, {224, 2, 1}, 0, 0, true},
    {{3, 1, 110}, 392, 392, kF16, kF16, false, {128, 1, 1}, /*senders=*/1, 0, false, true},
    {{4, 1, 40}, 72, 168, kBF16, kF32, false, {160, 2, 0}, 0, 0, false, false, kLate},
    {{5, 1, 30}, 72, 136, kBF16, kBF16, false, {128, 1, 2}, /*senders=*/1, 0, false, true, kLate},
    {{7, 1, 20}, 72, 136, kF16, kF32, true, {128, 1, 1}, 0, 0, true},
    {{8, 1, 40}, 72, 136, kBF16, kBF16, false, {128, 2, 1}, /*senders=*/2, 0, false, false, kLate},
    {{8, 1, 7}, 264, 136, kBF16, kBF16, false, {128, 1, 1, 2}, 0, 0, false, true, kLate},
    {{2, 1, 100}, 144, 208, kE4M3, kBF16, true, {192, 1, 1}, 0, 0, false, false, {}, kOfSums},
    {{2, 2, 128}, 144, 240, kE4M3, kBF16, true, {224, 2, 1}, 0, 0, false, false, kLate, kOfSums},
    {{3, 1, 70}, 144, 272, kE4M3, kF32, true, {256, 2, 1}, 0, 0, true, true, kLate, kOfSums},
    {{3, 1, 24}, 272, 144, kE4M3, kBF16, true, {128, 1, 1, 2}, 0, 0, false, false, kLate, kOfSums},
    {{2, 1, 100}, 144, 400, kE4M3, kF32, true, {192, 1, 1}, 0, 0, false, false, {}, kOfBlocks},
    {{3, 1, 70}, 272, 272, kE4M3, kF32, true, {128, 2, 1}, 0, 0, true, true, kLate, kOfBlocks},
    {{2, 1, 150}, 528, 400, kE4M3, kF32, true, {192, 2, 1}, 0, 0, true, true, kLate, kOfBlocks},
    {{2, 1, 100}, 128, 208, kE4M3, kF32, true, {192, 1, 1}, 0, 256, false, false, {}, kOfBlocks},
    {{2, 1, 100}, 144, 208, kE5M2, kF16, true, {192, 1, 1}, 0, 0, true, true, {}, kOfSums},
    {{3, 1, 70}, 272, 272, kE5M2, kF32, true, {128, 1, 1}, 0, 0, false, false, {}, kOfBlocks},
    {{3, 1, 110}, 144, 144, kE4M3, kBF16, true, {128, 1, 1}, /*senders=*/1, 80, false, true},
    {{3, 1, 70}, 144, 272, kS8, kF32, true, {224, 2, 1}, 0, 0, true, true, kLate, kOfSums},
    {{3, 1, 24}, 272, 144, kS8, kBF16, true, {128, 1, 1, 2}, 0, 0, false, false, kLate, kOfSums},
    {{3, 1, 110}, 144, 144, kS8, kF32, true, {128, 1, 1}, /*senders=*/1, 80, false, true},
};

TEST(MultipliesAndScatters) {
  simt::SetSmCount(kSms);
  simt::ExpectNoneWrong(kCases, Run);
}

const Case kWireCases[] = {
    {{2, 1, 150}, 72, 384, kBF16, kBF16, false, {256, 2, 0}, 0, 0, true, true, {}, {}, kS8},
    {{3, 1, 70}, 136, 256, kF16, kF16, true, {256, 2, 0}, 0, 0, false, false, kLate, {}, kE4M3},
    {{3, 1, 110}, 144, 128, kE4M3, kBF16, true, {256, 2, 0}, 1, 0, true, false, kLate, {}, kE4M3},
};

TEST(QuantisesParts) {
  simt::SetSmCount(kSms);
  simt::ExpectNoneWrong(kWireCases, Run);
}

// The kernels of the portable main loop. Few k-blocks: many copies at a time take long here.
const Case kPortableCases[] = {
    {{2, 1, 100}, 40, 200, kBF16, kBF16, false, Portable(8), 0, 0, true, true},
    {{2, 1, 70}, 36, 140, kF32, kF32, false, Portable(8), 0, 0, true, true},
    {{3, 1, 30}, 20, 72, kF32, kF32, true, Portable(2), 0, 12, false, false, kLate},
    {{2, 1, 150}, 24, 256, kBF16, kBF16, false, Portable(8), 0, 0, true, true, {}, {}, kS8},
    {{3, 1, 70}, 40, 256, kF16, kF32, true, Portable(2), 0, 0, true, true, kLate, {}, kE4M3},
    {{5, 1, 30}, 24, 128, kF16, kF16, true, Portable(2), 0, 0, false, false, kLate, {}, kS8},
    {{3, 1, 60}, 80, 128, kS8, kF16, true, Portable(8), 0, 0, true, false, {}, {}, kS8},
    {{2, 1, 70}, 80, 128, kE4M3, kF32, true, Portable(8), 0, 0, false, true, {}, {}, kE4M3},
    {{8, 1, 7}, 24, 128, kBF16, kBF16, false, Portable(1), 0, 0, true, false, kLate, {}, kS8},
    {{2, 2, 128}, 24, 128, kF16, kF32, true, Portable(8), 0, 0, false, true, {}, {}, kE4M3},
};

TEST(InPortableCode) {
  simt::SetSmCount(2);
  simt::ExpectNoneWrong(kPortableCases, Run);
}

TEST(MissingWaitsAreFound) {
  simt::SetSmCount(kSms);
  simt::ExpectWrongWithoutWaits(kCases[1], Run);
  simt::ExpectWrongWithoutWaits(kPortableCases[4], Run);
}

}  // namespace
}  // namespace jflux

int main() { return jflux::RunAll(); }
