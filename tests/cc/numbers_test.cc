// core/numbers.h: 8-bit floats against their definition. Those of 16 bits: cpu_matmul_test.cc.
#include "core/numbers.h"

#include <cmath>
#include <limits>
#include <random>
#include <type_traits>
#include <vector>

#include "testing.h"

namespace jflux {
namespace {

// The value of a code by the definition of its format (OCP OFP8), independent of the conversions.
template <typename T>
double ValueOf(int code) {
  constexpr bool kIsE4M3 = std::is_same_v<T, F8E4M3FN>;
  constexpr int kMantissaBits = kIsE4M3 ? 3 : 2, kBias = kIsE4M3 ? 7 : 15;
  const int magnitude = code & 0x7f;
  double value;
  if (kIsE4M3 ? magnitude == 0x7f : magnitude > 0x7c) {
    value = NAN;
  } else if (!kIsE4M3 && magnitude == 0x7c) {
    value = INFINITY;
  } else {
    const int exponent = magnitude >> kMantissaBits;
    const int mantissa = magnitude & ((1 << kMantissaBits) - 1);
    const int whole = exponent == 0 ? mantissa : mantissa + (1 << kMantissaBits);
    value = std::ldexp(whole, (exponent == 0 ? 1 : exponent) - kBias - kMantissaBits);
  }
  return code & 0x80 ? -value : value;
}

// What numbers become that are rounded beyond the largest one.
template <typename T>
constexpr int kTooLarge = std::is_same_v<T, F8E4M3FN> ? 0x7f : 0x7c;

// Nearest, ties to even, by search among all codes. The one after the largest counts as the number
// that it would be.
template <typename T>
int Nearest(float f) {
  const int sign = std::signbit(f) ? 0x80 : 0;
  const double target = std::fabs(static_cast<double>(f));
  constexpr int kMax = kTooLarge<T> - 1;
  const double next = 2 * ValueOf<T>(kMax) - ValueOf<T>(kMax - 1);
  int code = 0;
  while (code < kMax && ValueOf<T>(code + 1) <= target) ++code;
  const double above = code == kMax ? next : ValueOf<T>(code + 1);
  const double down = target - ValueOf<T>(code), up = above - target;
  return sign | (down < up || (down == up && code % 2 == 0) ? code : code + 1);
}

template <typename T>
void CheckCodes() {
  for (int code = 0; code < 256; ++code) {
    const float f = T{static_cast<uint8_t>(code)};
    const double want = ValueOf<T>(code);
    EXPECT(std::signbit(f) == ((code & 0x80) != 0)) << code;
    const int back = T::From(f).bits;
    if (std::isnan(want)) {
      EXPECT(std::isnan(f) && std::isnan(static_cast<float>(T{static_cast<uint8_t>(back)})));
      EXPECT_EQ(back & 0x80, code & 0x80);
    } else {
      EXPECT(f == want) << code << " is " << f << ", not " << want;
      EXPECT_EQ(back, code);
    }
  }
}
TEST(AllCodesThereAndBack) {
  CheckCodes<F8E4M3FN>();
  CheckCodes<F8E5M2>();
}

template <typename T>
void CheckRounding() {
  std::vector<float> values = {INFINITY, std::numeric_limits<float>::max(),
                               std::numeric_limits<float>::min(), 0.0f};
  for (int code = 0; code < kTooLarge<T>; ++code) {
    // Each number, the midpoint to the next, and the floats beside both.
    const double next = code + 1 == kTooLarge<T> ? 2 * ValueOf<T>(code) - ValueOf<T>(code - 1)
                                                 : ValueOf<T>(code + 1);
    for (const double v : {ValueOf<T>(code), (ValueOf<T>(code) + next) / 2}) {
      const auto f = static_cast<float>(v);
      values.insert(values.end(), {f, std::nextafter(f, INFINITY), std::nextafter(f, 0.0f)});
    }
  }
  std::mt19937 random(7);
  for (int i = 0; i < 100'000; ++i) {
    const float f = FloatOfBits(static_cast<uint32_t>(random()));
    if (!std::isnan(f)) values.push_back(f);
  }
  for (const float v : values) {
    for (const float f : {v, -v}) EXPECT_EQ(T::From(f).bits, Nearest<T>(f)) << f;
  }
}
TEST(RoundsToNearestEven) {
  CheckRounding<F8E4M3FN>();
  CheckRounding<F8E5M2>();
}

// As ml_dtypes: nothing saturates.
TEST(NumbersThatAreTooLarge) {
  EXPECT_EQ(F8E4M3FN::From(464).bits, 0x7e);     // 448: a tie
  EXPECT_EQ(F8E4M3FN::From(464.5f).bits, 0x7f);  // NaN
  EXPECT_EQ(F8E4M3FN::From(-INFINITY).bits, 0xff);
  EXPECT_EQ(F8E5M2::From(61439).bits, 0x7b);  // 57344
  EXPECT_EQ(F8E5M2::From(61440).bits, 0x7c);  // an infinity: a tie
  EXPECT_EQ(F8E5M2::From(-INFINITY).bits, 0xfc);
  EXPECT_EQ(F8E4M3FN::From(NAN).bits, 0x7f);
  EXPECT_EQ(F8E5M2::From(-NAN).bits, 0xfe);
}

}  // namespace
}  // namespace jflux

int main() { return jflux::RunAll(); }
