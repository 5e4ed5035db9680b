// core/quantize.h: values of 8 bits and their scales against their definition.
#include "core/quantize.h"

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "testing.h"

namespace jflux {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

template <DType kValues>
double Largest() {
  return kValues == DType::kF8E4M3FN ? 448 : kValues == DType::kF8E5M2 ? 57344 : 127;
}
template <DType kValues>
double ValueOf(int code) {
  return static_cast<double>(Number<kValues>{static_cast<uint8_t>(code)});
}
template <>
double ValueOf<DType::kS8>(int code) {
  return static_cast<int8_t>(code);
}

// Each number, the middle between it and the next one, and the floats beside both, times a scale;
// numbers beyond the largest.
template <DType kValues>
void CheckValues() {
  int last = 0;
  while (ValueOf<kValues>(last) < Largest<kValues>()) ++last;
  for (const float scale : {1.0f, 0x1p-100f, 0x1p20f, 0.0123f}) {
    for (int code = 0; code <= last; ++code) {
      const double value = ValueOf<kValues>(code);
      const double next = code == last ? value + 1 : ValueOf<kValues>(code + 1);
      const auto expect = [&](float x, int want) {
        EXPECT_EQ(int{QuantizedValue(x, scale, kValues)}, want) << x << " by " << scale;
        if constexpr (kValues == DType::kS8) want = -want & 0xff;
        if constexpr (kValues != DType::kS8) want |= 0x80;
        EXPECT_EQ(int{QuantizedValue(-x, scale, kValues)}, want) << -x << " by " << scale;
      };
      expect(static_cast<float>(value) * scale, code);
      const auto middle = static_cast<float>((value + next) / 2);
      const int above = Min(code + 1, last);
      // A scale that is no power of two rounds the product, so that a tie is none.
      if (scale != 0.0123f) expect(middle * scale, code % 2 == 0 ? code : above);
      expect(middle * (1 - 0x1p-20f) * scale, code);
      expect(middle * (1 + 0x1p-20f) * scale, above);
    }
    for (const float x : {1e6f, std::numeric_limits<float>::max(), kInf}) {
      EXPECT_EQ(int{QuantizedValue(x, Min(scale, 1.0f), kValues)}, last) << x;
    }
  }
  const uint8_t of_nan = QuantizedValue(NAN, 1, kValues), by_nan = QuantizedValue(1, NAN, kValues);
  for (const uint8_t value : {of_nan, by_nan}) {
    EXPECT(kValues == DType::kS8 ? value == 0 : std::isnan(ValueOf<kValues>(value)));
  }
}
TEST(Values) {
  CheckValues<DType::kF8E4M3FN>();
  CheckValues<DType::kF8E5M2>();
  CheckValues<DType::kS8>();
}

template <DType kValues>
void CheckScales() {
  EXPECT_EQ(ScaleOfBlock(0, kValues, false), 1.0f);
  EXPECT_EQ(ScaleOfBlock(0, kValues, true), 1.0f);
  EXPECT(std::isnan(ScaleOfBlock(BitsOfFloat(kInf), kValues, true)));
  EXPECT(std::isnan(ScaleOfBlock(BitsOfFloat(NAN), kValues, false)));
  const double largest = Largest<kValues>();
  std::vector<float> magnitudes = {1e-45f, std::numeric_limits<float>::max()};
  for (int exponent = -126; exponent < 110; ++exponent) {
    const auto exact = static_cast<float>(std::ldexp(largest, exponent));
    magnitudes.insert(magnitudes.end(),
                      {exact, std::nextafter(exact, 0.0f), std::nextafter(exact, kInf)});
  }
  std::mt19937 random(1);
  for (int i = 0; i < 100'000; ++i) {
    const float f = FloatOfBits(static_cast<uint32_t>(random()) & 0x7fffffff);
    if (f > 0 && f < kInf) magnitudes.push_back(f);
  }
  for (const float m : magnitudes) {
    const auto want = static_cast<float>(std::fmax(m / largest, 0x1p-126));
    EXPECT_EQ(ScaleOfBlock(BitsOfFloat(m), kValues, false), want) << m;
    const float power = ScaleOfBlock(BitsOfFloat(m), kValues, true);
    int exponent;
    EXPECT(std::frexp(power, &exponent) == 0.5f) << m << " gives " << power;
    EXPECT(m <= power * largest && (power == 0x1p-126f || m > power / 2 * largest)) << m;
  }
}
TEST(Scales) {
  CheckScales<DType::kF8E4M3FN>();
  CheckScales<DType::kF8E5M2>();
  CheckScales<DType::kS8>();
}

}  // namespace
}  // namespace jflux

int main() { return jflux::RunAll(); }
