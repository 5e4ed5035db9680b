// 16-bit floating-point types in portable integer arithmetic, so that g++, clang++ and nvcc give
// the same bits; and the types of all formats.
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
template <DType kFormat>
using Number = typename NumberOf<kFormat>::Type;

}  // namespace jflux

#endif  // JFLUX_CORE_NUMBERS_H_
