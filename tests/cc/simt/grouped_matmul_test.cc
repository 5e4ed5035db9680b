// The kernels of grouped_matmul and its weight gradient in the simulator, against sums in double:
// the whole main loop (gpu/gemm_sm90.cuh), with TMA, wgmma, ping-pong and shared tiles, clusters.
#include "ops/grouped_matmul/grouped_matmul.h"

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "simt/machine.h"
#include "simt/values.h"
#include "testing.h"

namespace jflux {
namespace {

using simt::Array;
using simt::RandomArray;

struct Case {
  int64_t m, k, n;
  std::vector<int32_t> groups;  // their rows
  TileChoice tile;
  bool transpose_rhs = false, gated = false;
  Activation activation = Activation::kNone;
  int terms = 1;
};

// The group of each row; -1: none.
std::vector<int> GroupsOf(const Case& c) {
  std::vector<int> of(c.m, -1);
  int64_t row = 0;
  for (size_t e = 0; e < c.groups.size(); ++e) {
    for (int32_t i = 0; i < c.groups[e]; ++i) of[row++] = static_cast<int>(e);
  }
  return of;
}

// Its slope is at most 1.1.
simt::Sum Silu(const simt::Sum& x) {
  const double y = x.value / (1 + std::exp(-x.value));
  return {y, 1.1 * x.size + std::abs(y)};
}

template <typename T, typename Out>
void Forward(const Case& c, uint32_t seed) {
  std::mt19937 random(seed);
  const auto groups = static_cast<int64_t>(c.groups.size());
  const int weights = c.gated ? 2 : c.terms;
  std::vector<Array<T>> x;
  for (int i = 0; i < c.terms; ++i) x.push_back(RandomArray<T>(random, c.m * c.k));
  std::vector<Array<T>> w;
  for (int i = 0; i < weights; ++i) w.push_back(RandomArray<T>(random, groups * c.k * c.n, 0.5));
  auto scale = RandomArray<float>(random, c.m);
  Array<Out> y(c.m * c.n);
  GroupedMatmulParams p{};
  p.m = c.m, p.k = c.k, p.n = c.n, p.groups = groups;
  p.dtype = simt::kDTypeOf<T>, p.out_dtype = simt::kDTypeOf<Out>;
  p.transpose_rhs = c.transpose_rhs, p.gated = c.gated, p.activation = c.activation;
  p.scaled = true, p.tile = c.tile, p.terms = c.terms, p.fill = seed % 3 != 0;
  GroupedMatmulArrays arrays{};
  for (int i = 0; i < c.terms; ++i) arrays.x[i] = x[i].get();
  for (int i = 0; i < weights; ++i) arrays.w[i] = w[i].get();
  arrays.group_sizes = c.groups.data(), arrays.row_scale = scale.get(), arrays.y = y.get();
  std::string error;
  EXPECT(LaunchGroupedMatmul(p, arrays, nullptr, &error)) << error;
  const std::string failure = simt::Run(seed);
  EXPECT(failure.empty()) << failure << ", seed " << seed;
  const std::vector<int> of = GroupsOf(c);
  for (int64_t i = 0; i < y.size() && !p.fill; ++i) {
    if (of[i / c.n] >= 0) continue;
    EXPECT(std::isnan(y[i])) << i;  // not written: what it was poisoned with
    y.data[i] = Out(0.0f);
  }
  const int64_t wrong = simt::CountWrong(y, [&](int64_t i) {
    const int64_t row = i / c.n, column = i % c.n;
    if (of[row] < 0) return simt::Sum();
    simt::Sum sums[2];
    for (int s = 0; s < weights; ++s) {
      for (int64_t l = 0; l < c.k; ++l) {
        const int64_t at = c.transpose_rhs ? column * c.k + l : l * c.n + column;
        const int term = c.terms == 2 ? s : 0;
        sums[c.gated ? s : 0].Add(x[term][row * c.k + l] * w[s][of[row] * c.k * c.n + at]);
      }
    }
    const simt::Sum active = c.activation == Activation::kSilu ? Silu(sums[0]) : sums[0];
    return active * (c.gated ? sums[1] : 1) * scale[row];
  });
  EXPECT_EQ(wrong, 0) << "of " << y.size() << ", seed " << seed;
}

TEST(Forward) {
  const Case cases[] = {
      {300, 136, 264, {140, 0, 129, 20}, {192, 1}},
      {300, 200, 392, {7, 257, 30}, {192, 1}, /*transpose_rhs=*/true},
      {400, 72, 520, {300, 90}, {256, 1}},
      {530, 136, 264, {500, 0, 30}, {256, 2}, /*transpose_rhs=*/true},
      {300, 136, 136, {100, 150}, {128, 1}, false, /*gated=*/true, Activation::kSilu},
      {300, 136, 264, {140, 0, 129, 20}, {192, 1}, true, false, Activation::kNone, /*terms=*/2},
      {530, 200, 264, {500, 0, 30}, {256, 2}, false, false, Activation::kSilu, /*terms=*/2},
  };
  uint32_t seed = 1;
  for (const Case& c : cases) {
    for (int schedule = 0; schedule < simt::Schedules(2); ++schedule) {
      Forward<__nv_bfloat16, __nv_bfloat16>(c, seed++);
      Forward<__half, float>(c, seed++);
    }
  }
}

template <typename T, typename Out>
void WeightGradient(const Case& c, uint32_t seed) {
  std::mt19937 random(seed);
  const auto groups = static_cast<int64_t>(c.groups.size());
  auto x = RandomArray<T>(random, c.m * c.k), dy = RandomArray<T>(random, c.m * c.n);
  Array<Out> dw(groups * c.k * c.n);
  GroupedMatmulDwParams p{c.m, c.k, c.n, groups, simt::kDTypeOf<T>, simt::kDTypeOf<Out>, c.tile};
  std::string error;
  const GroupedMatmulDwArrays arrays{x.get(), dy.get(), c.groups.data(), dw.get()};
  EXPECT(LaunchGroupedMatmulDw(p, arrays, nullptr, &error)) << error;
  const std::string failure = simt::Run(seed);
  EXPECT(failure.empty()) << failure << ", seed " << seed;
  int64_t first = 0;
  std::vector<int64_t> begin;
  for (int32_t rows : c.groups) begin.push_back(first), first += rows;
  const int64_t wrong = simt::CountWrong(dw, [&](int64_t i) {
    const int64_t group = i / (c.k * c.n), row = i / c.n % c.k, column = i % c.n;
    simt::Sum sum;
    for (int64_t r = begin[group]; r < begin[group] + c.groups[group]; ++r) {
      sum.Add(x[r * c.k + row] * dy[r * c.n + column]);
    }
    return sum;
  });
  EXPECT_EQ(wrong, 0) << "of " << dw.size() << ", seed " << seed;
}

TEST(WeightGradient) {
  const Case cases[] = {
      {300, 136, 264, {140, 0, 129, 20}, {192, 1}},
      {200, 264, 136, {7, 150, 30}, {128, 1}},
      {150, 264, 264, {70, 80}, {256, 2}},
  };
  uint32_t seed = 100;
  for (const Case& c : cases) {
    for (int schedule = 0; schedule < simt::Schedules(2); ++schedule) {
      WeightGradient<__nv_bfloat16, __nv_bfloat16>(c, seed++);
      WeightGradient<__half, float>(c, seed++);
    }
  }
}

}  // namespace
}  // namespace jflux

int main() { return jflux::RunAll(); }
