// The kernels of matmul in the simulator: several weights, a gate, biases, scales of sums and of
// blocks, against sums in double; and results that are quantised, against those that are not.
#include "ops/matmul/matmul.h"

#include <algorithm>
#include <cmath>
#include <random>
#include <type_traits>
#include <vector>

#include "simt/machine.h"
#include "simt/quantized.h"
#include "simt/values.h"
#include "testing.h"

namespace jflux {
namespace {

using simt::Array;
using simt::RandomArray;

struct Case {
  int64_t m, k;
  std::vector<int64_t> columns;  // of each weight
  Scales scales;
  GemmChoice choice;
  bool gated = false;
};

// relu, whose slope is at most 1.
simt::Sum Relu(const simt::Sum& x) { return {x.value > 0 ? x.value : 0, x.size}; }

// x of type T, and w of e4m3, or both of int8. Results are then quantised too, if this says how,
// and if some are no numbers.
template <typename T, typename Out>
void Run(const Case& c, uint32_t seed, Quantizing quantize = Quantizing::kNone) {
  constexpr bool kIsWhole = std::is_same_v<T, int8_t>;
  using W = std::conditional_t<kIsWhole, T, __nv_fp8_e4m3>;
  std::mt19937 random(seed);
  const int64_t k_size = HasEntriesOfK(c.scales) ? kScaleBlock : c.k;
  const int64_t n_size = c.scales == Scales::kOfBlocks ? kScaleBlock : 1;
  const int64_t k_blocks = CeilDiv(c.k, k_size);
  auto x = RandomArray<T>(random, c.m * c.k);
  auto x_scale = RandomArray<float>(random, c.m * k_blocks);
  std::vector<Array<W>> w;
  std::vector<Array<float>> w_scale, bias;
  std::vector<Array<Out>> y;
  AllGatherMatmulParams p{};
  p.rows = Rows{1, 1, c.m}, p.k = c.k, p.dtype = simt::kDTypeOf<T>, p.transpose_rhs = true;
  p.w_dtype = simt::kDTypeOf<W>;
  p.out_dtype = simt::kDTypeOf<Out>;
  AllGatherMatmulOperands operands{};
  for (const int64_t n : c.columns) {
    w.push_back(RandomArray<W>(random, n * c.k, 0.5));
    w_scale.push_back(RandomArray<float>(random, CeilDiv(n, n_size) * k_blocks));
    bias.push_back(RandomArray<float>(random, n));
    y.emplace_back(c.m * n);
    p.n += n;
  }
  operands.x = x.get();
  operands.x_scale = x_scale.get();
  operands.weights = static_cast<int32_t>(c.columns.size());
  operands.scales = c.scales;
  operands.gated = c.gated;
  operands.activation = c.gated ? Activation::kRelu : Activation::kNone;
  for (size_t i = 0; i < c.columns.size(); ++i) {
    operands.products[i] = {w[i].get(), y[c.gated ? 0 : i].get(), c.columns[i], bias[i].get(),
                            nullptr,    w_scale[i].get()};
  }
  std::string error;
  EXPECT(LaunchMatmul(p, operands, c.choice, nullptr, &error)) << error;
  EXPECT_EQ(simt::Run(seed), std::string());
  const auto product = [&](size_t i, int64_t row, int64_t column) {
    simt::Sum total;
    for (int64_t kb = 0; kb < k_blocks; ++kb) {
      simt::Sum sum;
      for (int64_t l = kb * k_size; l < Min(c.k, (kb + 1) * k_size); ++l) {
        const double term = x[row * c.k + l] * w[i][column * c.k + l];
        kIsWhole ? sum.AddWhole(term) : sum.Add(term);
      }
      // Those of vectors are [blocks of k, n].
      const int64_t of_column = c.scales == Scales::kOfVectors ? kb * c.columns[i] + column
                                                               : column / n_size * k_blocks + kb;
      sum = sum * simt::Sum(x_scale[row * k_blocks + kb] * w_scale[i][of_column]);
      total.value += sum.value;
      total.size += sum.size;
    }
    total.Add(bias[i][column]);
    return total;
  };
  for (size_t i = 0; i < (c.gated ? 1 : c.columns.size()); ++i) {
    const int64_t n = c.columns[i];
    const int64_t wrong = simt::CountWrong(y[i], [&](int64_t at) {
      const simt::Sum sum = product(i, at / n, at % n);
      return c.gated ? Relu(sum) * product(1, at / n, at % n) : sum;
    });
    EXPECT_EQ(wrong, 0) << "seed " << seed;
  }
  if constexpr (std::is_same_v<T, __nv_fp8_e4m3> && std::is_same_v<Out, float>) {
    if (quantize == Quantizing::kNone) return;
    // Rows without a number, of zeros, of denormals.
    constexpr float kScales[] = {NAN, 0, 1e-40f, 1e36f};
    for (size_t i = 0; i < std::size(kScales); ++i) {
      std::fill_n(x_scale.data.begin() + 7 * (i + 1) * k_blocks, k_blocks, kScales[i]);
    }
    const auto launch = [&](Quantizing by) {
      operands.quantize = by;
      EXPECT(LaunchMatmul(p, operands, c.choice, nullptr, &error)) << error;
      EXPECT_EQ(simt::Run(seed), std::string());
    };
    launch(Quantizing::kNone);
    std::vector<simt::QuantizedArray> got;
    for (const int64_t n : c.columns) got.emplace_back(c.m, n);
    for (size_t i = 0; i < got.size(); ++i) {
      operands.products[i].y = got[c.gated ? 0 : i].values.get();
      operands.products[i].y_scale = got[c.gated ? 0 : i].scale.get();
    }
    launch(quantize);
    for (size_t i = 0; i < (c.gated ? 1 : got.size()); ++i) {
      EXPECT_EQ(got[i].Wrong(y[i], quantize), 0) << "seed " << seed;
      // A fault: each block with the scale of the next one.
      auto& scale = got[i].scale.data;
      std::rotate(scale.begin(), scale.begin() + 1, scale.end());
      EXPECT(got[i].Wrong(y[i], quantize) > 0);
    }
  }
}

TEST(MultipliesAndScales) {
  simt::SetSmCount(3);
  constexpr Scales kOfSums = Scales::kOfSums, kOfBlocks = Scales::kOfBlocks;
  const Case cases[] = {
      {100, 144, {208}, kOfSums, {192, 1, 1}},
      {300, 272, {272, 48}, kOfSums, {256, 2, 1}},
      {20, 528, {144}, kOfSums, {128, 1, 1, 2}},
      {150, 144, {272, 272}, kOfSums, {256, 2, 1}, /*gated=*/true},
      {150, 144, {400, 336}, kOfBlocks, {192, 1, 2}},  // tiles over two blocks of columns
      {300, 400, {656}, kOfBlocks, {160, 2, 1}},
      {70, 272, {272, 272}, kOfBlocks, {128, 2, 1}, /*gated=*/true},
      {300, 656, {272, 384}, kOfBlocks, {256, 2, 1}},  // with a lent stage
      {150, 144, {272, 272}, kOfBlocks, {256, 2, 1}, /*gated=*/true},
      {300, 400, {208, 656}, Scales::kOfVectors, {128, 2, 1}},
      {150, 1040, {400}, Scales::kOfVectors, {192, 1, 1}},
      {1000, 272, {1264}, Scales::kOfVectors, {128, 1, 1}},  // many tiles of three k-blocks
      {70, 128, {272}, kOfBlocks, {192, 1, 1}},
      {20, 528, {144, 400}, kOfBlocks, {128, 1, 1, 2}},
  };
  uint32_t seed = 1;
  for (const Case& c : cases) {
    Run<__nv_fp8_e4m3, __nv_bfloat16>(c, seed++);
    Run<__nv_fp8_e4m3, float>(c, seed++);
    if (c.scales != kOfSums) continue;
    Run<__nv_fp8_e5m2, __half>(c, seed++);
    Run<int8_t, __nv_bfloat16>(c, seed++);
    Run<int8_t, float>(c, seed++);
  }
  simt::SetSmCount(11);  // of which ten are in groups of four or two
  Run<__nv_fp8_e4m3, __nv_bfloat16>({100, 656, {272}, kOfBlocks, {128, 1, 1, 4}}, seed);
}

TEST(Quantizes) {
  simt::SetSmCount(3);
  constexpr Scales kOfSums = Scales::kOfSums, kOfBlocks = Scales::kOfBlocks;
  constexpr Quantizing kAny = Quantizing::kByAnyScale, kPowers = Quantizing::kByPowersOfTwo;
  const GemmChoice choice{256, 2, 1};
  Run<__nv_fp8_e4m3, float>({300, 272, {272, 48}, kOfSums, choice}, 1, kAny);
  Run<__nv_fp8_e4m3, float>({150, 144, {272, 272}, kOfSums, choice, /*gated=*/true}, 2, kPowers);
  Run<__nv_fp8_e4m3, float>({300, 400, {656}, kOfBlocks, choice}, 3, kPowers);
  Run<__nv_fp8_e4m3, float>({70, 272, {272, 272}, kOfBlocks, choice, /*gated=*/true}, 4, kAny);
  Run<__nv_fp8_e4m3, float>({40, 144, {128, 128}, kOfBlocks, choice, /*gated=*/true}, 5, kPowers);
}

}  // namespace
}  // namespace jflux

int main() { return jflux::RunAll(); }
