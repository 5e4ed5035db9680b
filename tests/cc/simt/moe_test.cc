// The kernels of moe_route and moe_rows in the simulator. moe_route's are a cluster that reads each
// other's shared memory.
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "ops/moe_route/moe_route.h"
#include "ops/moe_rows/moe_rows.h"
#include "simt/machine.h"
#include "simt/values.h"
#include "testing.h"

namespace jflux {
namespace {

using simt::Array;
using simt::RandomArray;

TEST(RouteEqualsTheCpuBody) {
  struct Case {
    int64_t slots, experts, capacity;
  };
  uint32_t seed = 1;
  for (const Case& c : {Case{70, 5, -1}, Case{2500, 40, 30}}) {  // one CTA, and two
    std::mt19937 random(seed);
    std::vector<int32_t> indices(c.slots);
    for (int32_t& e : indices) e = static_cast<int32_t>(random() % (c.experts + 1)) - 1;
    const MoeRouteParams p{c.slots, c.experts, c.capacity};
    std::vector<int32_t> results[2];
    for (auto& r : results) r.assign(2 * c.experts + 1 + 2 * c.slots, -7);
    const auto arrays = [&](int i) {
      int32_t* r = results[i].data();
      return MoeRouteArrays{indices.data(), r, r + c.experts, r + 2 * c.experts + 1,
                            r + 2 * c.experts + 1 + c.slots};
    };
    std::string error;
    EXPECT(LaunchMoeRoute(p, arrays(0), nullptr, &error)) << error;
    const std::string failure = simt::Run(seed++);
    EXPECT(failure.empty()) << failure;
    EXPECT_EQ(MoeRouteCpu(p, arrays(1)), "");
    EXPECT(results[0] == results[1]);
  }
}

template <typename T>
void CheckRows(uint32_t seed, int64_t slots) {
  std::mt19937 random(seed);
  const int64_t rows = 90, tokens = 37, columns = 40;
  auto y = RandomArray<T>(random, rows * columns), g = RandomArray<T>(random, tokens * columns);
  auto w = RandomArray<float>(random, tokens * slots);
  std::vector<int32_t> source(rows, -1), destination(tokens * slots, -1);
  for (int64_t s = 0; s < tokens * slots; ++s) {
    const auto row = static_cast<int32_t>(random() % rows);
    if (source[row] >= 0) continue;
    source[row] = static_cast<int32_t>(s);
    destination[s] = row;
  }
  const auto run = [&](MoeRowsForm form, DType out_dtype, void* out, bool fill = true) {
    std::string error;
    const MoeRowsParams p{form, rows, tokens, slots, columns, simt::kDTypeOf<T>, out_dtype, fill};
    const MoeRowsArrays arrays{y.get(), g.get(), w.get(), source.data(), destination.data(), out};
    EXPECT(LaunchMoeRows(p, arrays, nullptr, &error)) << error;
    const std::string failure = simt::Run(seed);
    EXPECT(failure.empty()) << failure;
  };
  Array<float> combined(tokens * columns);
  run(MoeRowsForm::kCombine, DType::kF32, combined.get());
  EXPECT_EQ(simt::CountWrong(combined,
                             [&](int64_t i) {
                               simt::Sum sum;
                               for (int64_t j = 0; j < slots; ++j) {
                                 const int64_t s = i / columns * slots + j;
                                 if (destination[s] >= 0)
                                   sum.Add(w[s] * y[destination[s] * columns + i % columns]);
                               }
                               return sum;
                             }),
            0);
  Array<T> spread(rows * columns);
  run(MoeRowsForm::kSpread, simt::kDTypeOf<T>, spread.get());
  EXPECT_EQ(
      simt::CountWrong(spread,
                       [&](int64_t i) {
                         const int32_t s = source[i / columns];
                         return simt::Sum(s < 0 ? 0 : w[s] * g[s / slots * columns + i % columns]);
                       }),
      0);
  Array<T> touched(rows * columns);  // without zeros: NaN stays
  run(MoeRowsForm::kSpread, simt::kDTypeOf<T>, touched.get(), /*fill=*/false);
  int64_t wrong = 0;
  for (int64_t i = 0; i < rows * columns; ++i) {
    const bool is_there = source[i / columns] >= 0;
    wrong += is_there ? touched[i] != spread[i] : !std::isnan(touched[i]);
  }
  EXPECT_EQ(wrong, 0);
  Array<float> dots(tokens * slots);
  run(MoeRowsForm::kDots, DType::kF32, dots.get());
  EXPECT_EQ(
      simt::CountWrong(dots,
                       [&](int64_t s) {
                         simt::Sum sum;
                         for (int64_t i = 0; i < columns && destination[s] >= 0; ++i) {
                           sum.Add(y[destination[s] * columns + i] * g[s / slots * columns + i]);
                         }
                         return sum;
                       }),
      0);
}

TEST(RowsEqualTheirDefinition) {
  CheckRows<__half>(1, 3);
  CheckRows<__nv_bfloat16>(2, 19);  // three batches of slots
  CheckRows<float>(3, 8);
}

}  // namespace
}  // namespace jflux

int main() { return jflux::RunAll(); }
