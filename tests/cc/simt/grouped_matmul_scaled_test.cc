// The kernels of grouped_matmul_scaled in the simulator, against sums in double: scales of sums and
// of blocks, of the group of a row; m64 blocks that a consumer leaves out; a gate; both main loops.
// And results that are quantised, against those that are not. And the weight gradient, whose k are
// the rows of groups.
#include "ops/grouped_matmul_scaled/grouped_matmul_scaled.h"

#include <algorithm>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include "core/group_tiles.h"
#include "ops/grouped_matmul_dw_scaled/grouped_matmul_dw_scaled.h"
#include "simt/machine.h"
#include "simt/quantized.h"
#include "simt/values.h"
#include "testing.h"

namespace jflux {
namespace {

using simt::Array;
using simt::RandomArray;

struct Case {
  int64_t m, k, n;
  std::vector<int32_t> groups;  // their rows
  Scales scales;
  TileChoice tile;
  bool gated = false;
  int terms = 1;
  bool portable = false;
};

// relu, whose slope is at most 1.
simt::Sum Relu(const simt::Sum& x) { return {x.value > 0 ? x.value : 0, x.size}; }

// x of type T. Results are then quantised too, if this says how.
template <typename T, typename Out>
void Run(const Case& c, uint32_t seed, Quantizing quantize = Quantizing::kNone) {
  using W = std::conditional_t<std::is_same_v<T, int8_t>, int8_t, __nv_fp8_e4m3>;
  std::mt19937 random(seed);
  const auto groups = static_cast<int64_t>(c.groups.size());
  const int weights = c.gated ? 2 : 1;
  const bool of_blocks = c.scales == Scales::kOfBlocks;
  const int64_t k_size = of_blocks ? kScaleBlock : c.k, n_size = of_blocks ? kScaleBlock : 1;
  const int64_t k_blocks = CeilDiv(c.k, k_size), n_blocks = CeilDiv(c.n, n_size);
  const int64_t all_blocks = c.terms * k_blocks;  // of all terms
  std::vector<Array<T>> x;
  for (int i = 0; i < c.terms; ++i) x.push_back(RandomArray<T>(random, c.m * c.k));
  auto x_scale = RandomArray<float>(random, c.m * all_blocks);
  auto row_scale = RandomArray<float>(random, c.m);
  std::vector<Array<W>> w;
  std::vector<Array<float>> w_scale;
  for (int i = 0; i < Max(weights, c.terms); ++i) {
    w.push_back(RandomArray<W>(random, groups * c.n * c.k, 0.5));
    w_scale.push_back(RandomArray<float>(random, groups * n_blocks * all_blocks));
  }
  // Rows past the last group: no numbers.
  std::vector<int> group_of(c.m, -1);
  int64_t end = 0;
  for (int64_t e = 0; e < groups; ++e) {
    for (int32_t r = 0; r < c.groups[e]; ++r) group_of[end++] = static_cast<int>(e);
  }
  std::fill(x_scale.data.begin() + end * all_blocks, x_scale.data.end(), NAN);
  Array<Out> y(c.m * c.n);
  GroupedMatmulParams p{};
  p.m = c.m, p.k = c.k, p.n = c.n, p.groups = groups;
  p.dtype = simt::kDTypeOf<T>, p.out_dtype = simt::kDTypeOf<Out>;
  p.transpose_rhs = true, p.gated = c.gated, p.scaled = true;
  p.activation = c.gated ? Activation::kRelu : Activation::kNone;
  p.tile = c.tile, p.scales = c.scales, p.terms = c.terms, p.portable = c.portable;
  EXPECT_EQ(WhyNoGroupedMatmulScaledKernel(p, simt::kDTypeOf<W>), std::string());
  GroupedMatmulArrays arrays{};
  for (int i = 0; i < c.terms; ++i) arrays.x[i] = x[i].get(), arrays.w[i] = w[i].get();
  arrays.x_scale = x_scale.get(), arrays.row_scale = row_scale.get();
  arrays.group_sizes = c.groups.data(), arrays.y = y.get();
  for (int i = 0; i < weights; ++i) arrays.w[i] = w[i].get(), arrays.w_scale[i] = w_scale[i].get();
  std::string error;
  EXPECT(LaunchGroupedMatmulScaled(p, arrays, nullptr, &error)) << error;
  EXPECT_EQ(simt::Run(seed), std::string());
  const auto product = [&](int i, int64_t row, int64_t column) {
    simt::Sum total;
    const int64_t group = group_of[row];
    for (int64_t block = 0; block < all_blocks; ++block) {
      simt::Sum sum;
      const int64_t at = block / k_blocks, kb = block % k_blocks;  // the term, of one weight
      for (int64_t l = kb * k_size; l < Min(c.k, (kb + 1) * k_size); ++l) {
        const double term = x[at][row * c.k + l] * w[i + at][(group * c.n + column) * c.k + l];
        std::is_same_v<T, int8_t> ? sum.AddWhole(term) : sum.Add(term);
      }
      const int64_t of_column = (group * n_blocks + column / n_size) * all_blocks + block;
      sum = sum * simt::Sum(x_scale[row * all_blocks + block] * w_scale[i][of_column]);
      total.value += sum.value;
      total.size += sum.size;
    }
    return total;
  };
  const int64_t wrong = simt::CountWrong(y, [&](int64_t i) {
    const int64_t row = i / c.n, column = i % c.n;
    if (group_of[row] < 0) return simt::Sum();
    const simt::Sum sum = product(0, row, column);
    return (c.gated ? Relu(sum) * product(1, row, column) : sum) * row_scale[row];
  });
  EXPECT_EQ(wrong, 0) << "of " << y.size() << ", seed " << seed;
  if constexpr (std::is_same_v<Out, float>) {
    if (quantize == Quantizing::kNone) return;
    simt::QuantizedArray got(c.m, c.n);
    p.quantize = quantize, p.tile = {kQuantizingTile, c.tile.cluster_m};
    EXPECT_EQ(WhyNoGroupedMatmulScaledKernel(p, simt::kDTypeOf<W>), std::string());
    arrays.y = got.values.get(), arrays.y_scale = got.scale.get();
    EXPECT(LaunchGroupedMatmulScaled(p, arrays, nullptr, &error)) << error;
    EXPECT_EQ(simt::Run(seed), std::string());
    EXPECT_EQ(got.Wrong(y, quantize), 0) << "seed " << seed;
  }
}

TEST(MultipliesAndScales) {
  simt::SetSmCount(3);
  constexpr Scales kOfSums = Scales::kOfSums, kOfBlocks = Scales::kOfBlocks;
  const Case cases[] = {
      {300, 144, 272, {140, 0, 129, 20}, kOfSums, {128, 1}},
      {300, 272, 400, {7, 257, 30}, kOfSums, {256, 2}},
      {200, 144, 144, {100, 70}, kOfSums, {256, 1}, /*gated=*/true},
      // A group whose tile has rows for one consumer, and one for one CTA of two.
      {300, 272, 400, {140, 0, 129, 20}, kOfBlocks, {192, 2}},
      {300, 400, 272, {30, 190, 64, 10}, kOfBlocks, {128, 1}},
      {200, 272, 208, {100, 70}, kOfBlocks, {128, 2}, /*gated=*/true},
      {300, 528, 272, {7, 257, 30}, kOfBlocks, {256, 2}},
      {200, 256, 208, {100, 0, 70}, kOfBlocks, {192, 2}, /*gated=*/false, /*terms=*/2},
      {200, 128, 272, {40, 130}, kOfBlocks, {128, 1}, /*gated=*/false, /*terms=*/2},
  };
  uint32_t seed = 1;
  for (const Case& c : cases) {
    for (int schedule = 0; schedule < simt::Schedules(1); ++schedule) {
      Run<__nv_fp8_e4m3, __nv_bfloat16>(c, seed++);
      Run<__nv_fp8_e4m3, float>(c, seed++);
      Run<__nv_fp8_e5m2, __half>(c, seed++);
      if (c.scales == kOfSums) Run<int8_t, __nv_bfloat16>(c, seed++);
    }
  }
}

// Groups without rows, more rows than groups have, columns and k that fill no tile.
TEST(InPortableCode) {
  simt::SetSmCount(3);
  constexpr Scales kOfSums = Scales::kOfSums;
  Case cases[] = {
      {200, 144, 144, {140, 0, 20}, kOfSums, {}},
      {100, 208, 80, {40, 0, 50}, kOfSums, {}, /*gated=*/true},
      {9, 16, 16, {0, 1, 0, 8}, kOfSums, {}},
  };
  uint32_t seed = 1;
  for (Case& c : cases) {
    c.portable = true;
    for (int schedule = 0; schedule < simt::Schedules(1); ++schedule) {
      Run<__nv_fp8_e4m3, __nv_bfloat16>(c, seed++);
      Run<__nv_fp8_e5m2, __half>(c, seed++);
      Run<int8_t, float>(c, seed++);
    }
  }
}

// What portable kernels leave to the reference.
TEST(InPortableCodeNot) {
  GroupedMatmulParams p{};
  p.m = 64, p.k = 256, p.n = 256, p.groups = 2, p.dtype = DType::kF8E4M3FN;
  p.out_dtype = DType::kF32, p.transpose_rhs = true, p.portable = true;
  const auto why = [](const GroupedMatmulParams& of) {
    return WhyNoGroupedMatmulScaledKernel(of, DType::kF8E4M3FN);
  };
  p.scales = Scales::kOfSums;
  EXPECT_EQ(why(p), std::string());
  for (const Scales scales : {Scales::kOfBlocks, Scales::kOfVectors}) {
    p.scales = scales;
    EXPECT(!why(p).empty());
  }
  p.scales = Scales::kOfSums, p.quantize = Quantizing::kByAnyScale;
  EXPECT(!why(p).empty());
}

TEST(Quantizes) {
  simt::SetSmCount(3);
  constexpr Scales kOfSums = Scales::kOfSums, kOfBlocks = Scales::kOfBlocks;
  constexpr Quantizing kAny = Quantizing::kByAnyScale, kPowers = Quantizing::kByPowersOfTwo;
  const Case cases[] = {
      {300, 144, 272, {140, 0, 129, 20}, kOfSums, {256, 2}},
      {200, 144, 144, {100, 70}, kOfSums, {256, 1}, /*gated=*/true},
      {200, 272, 400, {40, 0, 129, 20}, kOfBlocks, {128, 1}},
      {200, 272, 208, {100, 70}, kOfBlocks, {128, 2}, /*gated=*/true},
  };
  uint32_t seed = 1;
  for (const Case& c : cases)
    Run<__nv_fp8_e4m3, float>(c, seed, seed % 2 == 0 ? kAny : kPowers), ++seed;
}

// Of the columns of a group's blocks, all count; those of no group are no numbers.
template <typename Out>
void WeightGradient(int64_t m, int64_t k, int64_t n, const std::vector<int32_t>& sizes,
                    TileChoice tile, uint32_t seed, Scales scales = Scales::kOfVectors) {
  std::mt19937 random(seed);
  const bool of_blocks = scales == Scales::kOfBlocks;
  const auto groups = static_cast<int64_t>(sizes.size());
  const int64_t blocks = MostGroupBlocks(m, groups, kScaleBlock), columns = blocks * kScaleBlock;
  Array<__nv_fp8_e4m3> x(k * columns), dy(n * columns);
  Array<float> x_scale(k * blocks), dy_scale(n * blocks);
  std::vector<int64_t> first = {0};  // blocks of groups
  int64_t row = 0;
  for (const int32_t size : sizes) {
    const int64_t count = Max<int64_t>(0, Min<int64_t>(size, m - row));
    first.push_back(first.back() + CeilDiv<int64_t>(count, kScaleBlock));
    row += count;
  }
  const int64_t used = first.back();
  const auto draw = [&](int64_t rows, Array<__nv_fp8_e4m3>* a, Array<float>* scale) {
    const auto of_a = RandomArray<__nv_fp8_e4m3>(random, rows * used * kScaleBlock);
    const auto of_scale = RandomArray<float>(random, rows * used);
    for (int64_t r = 0; r < rows; ++r) {
      const auto from = of_a.data.begin() + r * used * kScaleBlock;
      std::copy(from, from + used * kScaleBlock, a->data.begin() + r * columns);
    }
    std::copy(of_scale.data.begin(), of_scale.data.end(), scale->data.begin());
  };
  draw(k, &x, &x_scale);
  draw(n, &dy, &dy_scale);
  if (of_blocks) {
    dy_scale = RandomArray<float>(random, CeilDiv<int64_t>(n, kScaleBlock) * blocks);
    for (int64_t i = 0; i < dy_scale.size(); ++i) {
      if (i % blocks >= used) dy_scale.data[i] = NAN;
    }
  }
  Array<Out> dw(groups * k * n);
  GroupedMatmulDwParams p{m, k, n, groups, DType::kF8E4M3FN, simt::kDTypeOf<Out>, tile};
  p.scales = scales;
  EXPECT_EQ(WhyNoGroupedMatmulDwScaledKernel(p), std::string());
  const GroupedMatmulDwArrays arrays{x.get(),  dy.get(),      sizes.data(),
                                     dw.get(), x_scale.get(), dy_scale.get()};
  std::string error;
  EXPECT(LaunchGroupedMatmulDwScaled(p, arrays, nullptr, &error)) << error;
  EXPECT_EQ(simt::Run(seed), std::string());
  const int64_t wrong = simt::CountWrong(dw, [&](int64_t i) {
    const int64_t group = i / (k * n), of_x = i / n % k, of_dy = i % n;
    simt::Sum total;
    for (int64_t block = first[group]; block < first[group + 1]; ++block) {
      simt::Sum sum;
      for (int64_t r = block * kScaleBlock; r < (block + 1) * kScaleBlock; ++r) {
        sum.Add(x[of_x * columns + r] * dy[of_dy * columns + r]);
      }
      const int64_t at = of_blocks ? of_dy / kScaleBlock * blocks + block : block * n + of_dy;
      sum = sum * simt::Sum(x_scale[block * k + of_x] * dy_scale[at]);
      total.value += sum.value;
      total.size += sum.size;
    }
    return total;
  });
  EXPECT_EQ(wrong, 0) << "of " << dw.size() << ", seed " << seed;
}

TEST(WeightGradient) {
  simt::SetSmCount(3);
  uint32_t seed = 1;
  for (int schedule = 0; schedule < simt::Schedules(1); ++schedule) {
    WeightGradient<__nv_bfloat16>(700, 272, 400, {140, 0, 300, 20}, {192, 2}, seed++);
    WeightGradient<float>(700, 272, 400, {140, 0, 300, 20}, {192, 2}, seed++);
    WeightGradient<float>(300, 144, 272, {7, 257, 30}, {128, 1}, seed++);
    WeightGradient<__nv_bfloat16>(300, 144, 272, {7, 257, 30}, {128, 2}, seed++);
    WeightGradient<__nv_bfloat16>(9, 48, 16, {0, 1, 0, 8}, {128, 1}, seed++);
    const std::vector<int32_t> few = {140, 0, 300, 20};
    WeightGradient<__nv_bfloat16>(700, 272, 400, few, {192, 2}, seed++, Scales::kOfBlocks);
    WeightGradient<float>(700, 272, 400, few, {256, 2}, seed++, Scales::kOfBlocks);
    WeightGradient<float>(700, 144, 272, few, {128, 1}, seed++, Scales::kOfBlocks);
    WeightGradient<__nv_bfloat16>(700, 144, 272, few, {128, 2}, seed++, Scales::kOfBlocks);
  }
  // More groups than lanes; sizes of too many rows are cut off.
  std::vector<int32_t> many(40);
  for (size_t i = 0; i < many.size(); ++i) many[i] = static_cast<int32_t>(i % 5 * 40);
  WeightGradient<float>(4000, 16, 32, many, {}, seed++);
  WeightGradient<float>(200, 16, 32, {-3, 150, 100}, {}, seed++);
}

}  // namespace
}  // namespace jflux

int main() { return jflux::RunAll(); }
