// 16-bit and 8-bit floating-point types in portable integer arithmetic, so that g++, clang++ and
// nvcc give the same bits; and the types of all formats. From rounds to nearest even, and does not
// saturate: what is too large becomes an infinity, or a NaN where the type has no infinities, as in
// ml_dtypes. (CUDA's conversions to 8 bits saturate unless they are told not to.)
#ifndef JFLUX_CORE_NUMBERS_H_
#define JFLUX_CORE_NUMBERS_H_

#include <cstdint>
#include <cstring>

#include "core/format.h"
#include "core/platform.h"

namespace jflux {

JFLUX_HD float FloatOfBits(uint32_t bits) {
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

JFLUX_HD uint32_t BitsOfFloat(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  return bits;
}

struct BF16 {
  uint16_t bits;
  JFLUX_HD operator float() const { return FloatOfBits(static_cast<uint32_t>(bits) << 16); }
  JFLUX_HD static BF16 From(float f) {
    const uint32_t u = BitsOfFloat(f);
    if (f != f) return BF16{static_cast<uint16_t>((u >> 16) | 0x40)};
    return BF16{static_cast<uint16_t>((u + 0x7fff + ((u >> 16) & 1)) >> 16)};
  }
};

struct F16 {
  uint16_t bits;
  JFLUX_HD operator float() const {
    const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16;
    const uint32_t exponent = (bits >> 10) & 31, mantissa = bits & 1023;
    if (exponent == 31) return FloatOfBits(sign | 0x7f800000 | (mantissa << 13));
    if (exponent != 0) return FloatOfBits(sign | ((exponent + 112) << 23) | (mantissa << 13));
    const float magnitude = static_cast<float>(mantissa) * 5.9604644775390625e-8f;  // 2^-24
    return sign ? -magnitude : magnitude;
  }
  JFLUX_HD static F16 From(float f) {
    const uint32_t u = BitsOfFloat(f);
    const auto sign = static_cast<uint16_t>((u >> 16) & 0x8000);
    const uint32_t magnitude = u & 0x7fffffff;
    if (magnitude > 0x7f800000) return F16{static_cast<uint16_t>(sign | 0x7e00)};
    if (magnitude >= 0x477ff000) return F16{static_cast<uint16_t>(sign | 0x7c00)};  // >= 65520
    if (magnitude < 0x38800000) {  // subnormal half: let the fp32 adder round
      const float shifted = FloatOfBits(magnitude) + 0.5f;
      return F16{static_cast<uint16_t>(sign | (BitsOfFloat(shifted) - 0x3f000000))};
    }
    const uint32_t rounded = magnitude + 0xfff + ((magnitude >> 13) & 1);
    return F16{static_cast<uint16_t>(sign | ((rounded - 0x38000000) >> 13))};
  }
};

// A sign, kExponentBits and kMantissaBits. By magnitude: the largest finite number, what greater
// numbers become (an infinity, if it is not kNaN), and the NaN that NaNs become.
template <int kExponentBits, int kMantissaBits, uint8_t kMax, uint8_t kTooLarge, uint8_t kNaN>
struct Float8 {
  static_assert(kExponentBits + kMantissaBits == 7);
  static constexpr int kBias = (1 << (kExponentBits - 1)) - 1, kShift = 23 - kMantissaBits;

  uint8_t bits;
  JFLUX_HD operator float() const {
    const uint32_t sign = static_cast<uint32_t>(bits & 0x80) << 24, magnitude = bits & 0x7f;
    if (magnitude > kMax) {
      const bool infinite = magnitude == kTooLarge && kTooLarge != kNaN;
      return FloatOfBits(sign | (infinite ? 0x7f800000 : 0x7fc00000));
    }
    if (magnitude >> kMantissaBits != 0) {
      return FloatOfBits(sign | ((magnitude << kShift) + ((127u - kBias) << 23)));
    }
    // A subnormal number: so many times the unit.
    const float unit = FloatOfBits((127u + 1 - kBias - kMantissaBits) << 23);
    const float value = static_cast<float>(magnitude) * unit;
    return sign ? -value : value;
  }
  JFLUX_HD static Float8 From(float f) {
    const uint32_t u = BitsOfFloat(f);
    const auto sign = static_cast<uint8_t>((u >> 24) & 0x80);
    const uint32_t magnitude = u & 0x7fffffff;
    if (magnitude > 0x7f800000) return Float8{static_cast<uint8_t>(sign | kNaN)};
    constexpr uint32_t kLeastNormal = (128u - kBias) << 23;
    uint32_t rounded;
    if (magnitude < kLeastNormal) {  // subnormal: let the fp32 adder round to the unit
      constexpr uint32_t kUnitIsLast = (128u - kBias + kShift) << 23;
      const float shifted = FloatOfBits(magnitude) + FloatOfBits(kUnitIsLast);
      rounded = BitsOfFloat(shifted) - kUnitIsLast;
    } else {
      const uint32_t half = (1u << (kShift - 1)) - 1 + ((magnitude >> kShift) & 1);
      rounded = (magnitude + half - ((127u - kBias) << 23)) >> kShift;
    }
    return Float8{static_cast<uint8_t>(sign | (rounded > kMax ? kTooLarge : rounded))};
  }
};
using F8E4M3FN = Float8<4, 3, 0x7e, 0x7f, 0x7f>;  // no infinities
using F8E5M2 = Float8<5, 2, 0x7b, 0x7c, 0x7e>;

template <DType>
struct NumberOf;
template <>
struct NumberOf<DType::kF16> {
  using Type = F16;
};
template <>
struct NumberOf<DType::kBF16> {
  using Type = BF16;
};
template <>
struct NumberOf<DType::kF32> {
  using Type = float;
};
template <>
struct NumberOf<DType::kF64> {
  using Type = double;
};
template <>
struct NumberOf<DType::kF8E4M3FN> {
  using Type = F8E4M3FN;
};
template <>
struct NumberOf<DType::kF8E5M2> {
  using Type = F8E5M2;
};
template <>
struct NumberOf<DType::kS8> {
  using Type = int8_t;
};
template <>
struct NumberOf<DType::kS32> {
  using Type = int32_t;
};
template <DType kFormat>
using Number = typename NumberOf<kFormat>::Type;

}  // namespace jflux

#endif  // JFLUX_CORE_NUMBERS_H_
