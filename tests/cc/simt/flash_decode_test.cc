// The kernels of flash_decode in the simulator, against attention in double: cp.async in a ring,
// ldmatrix, mma.sync, shuffles, and the second kernel that merges parts.
#include <algorithm>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "ops/flash_decode/flash_decode_cuda.h"
#include "simt/machine.h"
#include "simt/values.h"
#include "testing.h"

namespace jflux {
namespace {

using simt::Array;
using simt::RandomArray;

struct Case {
  int64_t batch, heads, groups, width, positions, page_size, splits;
  double softcap;
};

template <typename T>
void Check(const Case& c, uint32_t seed) {
  std::mt19937 random(seed);
  const int64_t kv_rows = c.batch * c.positions;
  auto q = RandomArray<T>(random, c.batch * c.heads * c.width);
  auto k = RandomArray<T>(random, kv_rows * c.groups * c.width);
  auto v = RandomArray<T>(random, kv_rows * c.groups * c.width);
  std::vector<int32_t> bounds;
  for (int64_t b = 0; b < c.batch; ++b) {
    const auto first = static_cast<int32_t>(random() % 20);
    bounds.push_back(first);
    // The last sequence attends to nothing.
    bounds.push_back(b + 1 == c.batch ? first : first + 1 + random() % (c.positions - first));
  }
  // Pages in any order; one of them is missing.
  const int64_t pages = c.page_size == 0 ? 0 : kv_rows / c.page_size;
  std::vector<int32_t> table(pages);
  for (int64_t i = 0; i < pages; ++i) table[i] = static_cast<int32_t>(i);
  std::shuffle(table.begin(), table.end(), random);
  if (pages > 0) table[0] = -1;
  Array<float> out(c.batch * c.heads * (c.width + 1));
  Array<float> parts(c.splits * out.size());
  const double scale = 1 / std::sqrt(static_cast<double>(c.width));
  const FlashDecodeParams p{c.batch, c.heads,  c.groups, c.width,   c.positions,      c.page_size,
                            pages,   c.splits, scale,    c.softcap, simt::kDTypeOf<T>};
  std::string error;
  const FlashDecodeArrays arrays{
      q.get(),   k.get(),    v.get(), bounds.data(), pages == 0 ? nullptr : table.data(),
      out.get(), parts.get()};
  EXPECT(LaunchFlashDecode(p, arrays, nullptr, &error)) << error;
  const std::string failure = simt::Run(seed);
  EXPECT(failure.empty()) << failure << ", seed " << seed;

  int64_t wrong = 0;
  for (int64_t b = 0; b < c.batch; ++b) {
    for (int64_t h = 0; h < c.heads; ++h) {
      std::vector<double> mean(c.width);
      double total = 0;
      for (int64_t t = bounds[2 * b]; t < bounds[2 * b + 1]; ++t) {
        int64_t row = b * c.positions + t;
        if (pages > 0) {
          const int32_t page = table[(b * c.positions + t) / c.page_size];
          if (page < 0) continue;
          row = page * c.page_size + t % c.page_size;
        }
        const int64_t at = (row * c.groups + h / (c.heads / c.groups)) * c.width;
        double score = 0;
        for (int64_t i = 0; i < c.width; ++i)
          score += q[(b * c.heads + h) * c.width + i] * k[at + i];
        score *= scale;
        if (c.softcap > 0) score = c.softcap * std::tanh(score / c.softcap);
        total += std::exp(score);
        for (int64_t i = 0; i < c.width; ++i) mean[i] += std::exp(score) * v[at + i];
      }
      // Probabilities are rounded to T.
      const double tolerance = std::is_same_v<T, __half> ? 1e-3 : 6e-3;
      const int64_t at = (b * c.heads + h) * (c.width + 1);
      for (int64_t i = 0; i < c.width; ++i) {
        wrong += !(std::abs(out[at + i] - (total > 0 ? mean[i] / total : 0)) < tolerance);
      }
      const double lse = out[at + c.width];
      wrong += total > 0 ? !(std::abs(lse - std::log(total)) < 1e-4) : !(lse == -INFINITY);
    }
  }
  EXPECT_EQ(wrong, 0) << "of " << out.size() << ", seed " << seed;
}

TEST(EqualsAttention) {
  const Case cases[] = {
      {2, 4, 2, 64, 100, 0, 1, 0},
      {2, 20, 1, 128, 150, 0, 3, 20},
      {3, 2, 2, 256, 96, 16, 2, 0},
  };
  uint32_t seed = 1;
  for (const Case& c : cases) {
    for (int schedule = 0; schedule < simt::Schedules(1); ++schedule) {
      Check<__half>(c, seed++);
      Check<__nv_bfloat16>(c, seed++);
    }
  }
}

}  // namespace
}  // namespace jflux

int main() { return jflux::RunAll(); }
