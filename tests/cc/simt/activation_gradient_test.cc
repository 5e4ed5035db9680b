// The kernels of activation_gradient in the simulator, against differences of the activations.
#include "ops/activation_gradient/activation_gradient.h"

#include <cmath>
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

double Activated(Activation activation, double x) {
  switch (activation) {
    case Activation::kGelu:
      return x / 2 * std::erfc(-x * std::sqrt(0.5));
    case Activation::kGeluTanh:
      return x / 2 * (1 + std::tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)));
    case Activation::kRelu:
      return x < 0 ? 0 : x;
    default:
      return x / (1 + std::exp(-x));
  }
}

double Slope(Activation activation, double x) {
  constexpr double kStep = 1e-5;
  return (Activated(activation, x + kStep) - Activated(activation, x - kStep)) / (2 * kStep);
}

template <typename T>
void Check(Activation activation, bool gated, uint32_t seed) {
  std::mt19937 random(seed);
  const int64_t rows = 70, columns = 24;
  const std::vector<int32_t> sizes{20, 0, 13};
  auto dy = RandomArray<T>(random, rows * columns), first = RandomArray<T>(random, rows * columns),
       second = RandomArray<T>(random, rows * columns);
  Array<T> found[2] = {Array<T>(rows * columns), Array<T>(rows * columns)};
  const ActivationGradientParams p{rows,  columns,    static_cast<int64_t>(sizes.size()),
                                   gated, activation, simt::kDTypeOf<T>};
  std::string error;
  EXPECT(LaunchActivationGradient(p,
                                  {dy.get(),
                                   {first.get(), gated ? second.get() : nullptr},
                                   sizes.data(),
                                   {found[0].get(), gated ? found[1].get() : nullptr}},
                                  nullptr, &error))
      << error;
  const std::string failure = simt::Run(seed);
  EXPECT(failure.empty()) << failure;
  const double rounding = sizeof(T) == 4 ? 1e-5 : 1e-2;
  int64_t wrong = 0;
  for (int64_t i = 0; i < rows * columns; ++i) {
    const double s1 = gated ? second[i] : 1.0;
    const double want[2] = {dy[i] * s1 * Slope(activation, first[i]),
                            dy[i] * Activated(activation, first[i])};
    const bool is_there = i / columns < 33;
    for (int part = 0; part < 2; ++part) {
      const double got = found[part][i];
      wrong += is_there && (gated || part == 0)
                   ? !(std::abs(got - want[part]) <= rounding * (1 + std::abs(want[part])))
                   : !std::isnan(got);  // not written
    }
  }
  EXPECT_EQ(wrong, 0) << static_cast<int>(activation) << " " << gated;
}

TEST(GradientsEqualDifferences) {
  uint32_t seed = 1;
  for (const bool gated : {false, true}) {
    for (const auto activation :
         {Activation::kGelu, Activation::kGeluTanh, Activation::kRelu, Activation::kSilu}) {
      Check<__nv_bfloat16>(activation, gated, seed++);
    }
    Check<__half>(Activation::kSilu, gated, seed++);
    Check<float>(Activation::kGelu, gated, seed++);
  }
}

}  // namespace
}  // namespace jflux

int main() { return jflux::RunAll(); }
