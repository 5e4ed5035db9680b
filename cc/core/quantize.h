// Values of 8 bits and their scales, in portable arithmetic: the bits of jflux.quantize
// (jflux/_ops/_quantize.py), which defines them.
#ifndef JFLUX_CORE_QUANTIZE_H_
#define JFLUX_CORE_QUANTIZE_H_

#include <cmath>
#include <cstdint>

#include "core/numbers.h"

namespace jflux {

inline constexpr FormatSet kQuantizedFormats = SetOf(DType::kF8E4M3FN, DType::kF8E5M2, DType::kS8);

// Formats of a quantised wire, and elements that share a scale there.
inline constexpr FormatSet kWireFormats = SetOf(DType::kF8E4M3FN, DType::kS8);
inline constexpr int64_t kWireBlock = 128;

// The largest value of one of kQuantizedFormats.
JFLUX_HD constexpr float LargestValue(DType values) {
  return values == DType::kF8E4M3FN ? 448.0f : values == DType::kF8E5M2 ? 57344.0f : 127.0f;
}

// The scale of a block with this largest magnitude: bits of a float without the sign, whose order
// is the numbers'.
JFLUX_HD float ScaleOfBlock(uint32_t magnitude, DType values, bool power_of_two) {
  if (magnitude >= 0x7f800000) return FloatOfBits(0x7fc00000);
  if (magnitude == 0) return 1;
  const float ratio = FloatOfBits(magnitude) / LargestValue(values);
  const float scale = ratio < 0x1p-126f ? 0x1p-126f : ratio;
  constexpr uint32_t kMantissa = (1u << 23) - 1;
  return power_of_two ? FloatOfBits((BitsOfFloat(scale) + kMantissa) & ~kMantissa) : scale;
}

// The bits of x / scale, rounded to the nearest value; what is beyond the largest becomes it.
JFLUX_HD uint8_t QuantizedValue(float x, float scale, DType values) {
  const float largest = LargestValue(values), ratio = x / scale;
  const float near = ratio > largest ? largest : ratio < -largest ? -largest : ratio;
  if (values == DType::kF8E4M3FN) return F8E4M3FN::From(near).bits;
  if (values == DType::kF8E5M2) return F8E5M2::From(near).bits;
  return near != near ? 0 : static_cast<uint8_t>(static_cast<int>(std::rint(near)));
}

// The number of a value with these bits.
JFLUX_HD float FloatOfValue(uint8_t bits, DType values) {
  if (values == DType::kF8E4M3FN) return static_cast<float>(F8E4M3FN{bits});
  if (values == DType::kF8E5M2) return static_cast<float>(F8E5M2{bits});
  return static_cast<float>(static_cast<int8_t>(bits));
}

}  // namespace jflux

#endif  // JFLUX_CORE_QUANTIZE_H_
