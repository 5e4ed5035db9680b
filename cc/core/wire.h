// Blocks of a quantised wire (core/quantize.h) as kernels make and read them. A team of lanes has a
// block, of which each lane has consecutive elements. A Codec is how: the lanes of a team, how many
// blocks of an all_reduce they have in flight, the largest magnitude of their elements, and values
// from floats and back. OneLane is a CPU's; gpu/wire.cuh has a GPU's.
#ifndef JFLUX_CORE_WIRE_H_
#define JFLUX_CORE_WIRE_H_

#include <cstdint>
#include <cstring>

#include "core/numbers.h"
#include "core/platform.h"
#include "core/quantize.h"

namespace jflux {

// Quantises a lane's elements of a block. Returns the block's scale. kOf16Bits: x are such numbers.
template <typename Codec, bool kOf16Bits, int kCount>
JFLUX_HD float QuantizeForWire(const float (&x)[kCount], DType wire,
                               uint32_t (&words)[kCount / 4]) {
  uint32_t magnitude = 0;
  JFLUX_UNROLL
  for (int i = 0; i < kCount; ++i) {
    const uint32_t bits = BitsOfFloat(x[i]) & 0x7fffffff;
    magnitude = bits > magnitude ? bits : magnitude;
  }
  return Codec::template Quantize<kOf16Bits>(x, Codec::Max(magnitude), wire, words);
}

// A thread has all of a block.
struct OneLane {
  static constexpr int kLanes = 1, kInFlight = 1;
  static int lane() { return 0; }
  static uint32_t Max(uint32_t magnitude) { return magnitude; }
  template <bool kOf16Bits, int kCount>
  static float Quantize(const float (&x)[kCount], uint32_t magnitude, DType values,
                        uint32_t (&words)[kCount / 4]) {
    const float scale = ScaleOfBlock(magnitude, values, /*power_of_two=*/false);
    uint8_t bits[kCount];
    for (int i = 0; i < kCount; ++i) bits[i] = QuantizedValue(x[i], scale, values);
    std::memcpy(words, bits, kCount);
    return scale;
  }
  template <int kCount>
  static void Dequantize(const uint32_t (&words)[kCount / 4], float scale, DType values,
                         float (&x)[kCount]) {
    uint8_t bits[kCount];
    std::memcpy(bits, words, kCount);
    for (int i = 0; i < kCount; ++i) {
      // Not joined with an addition, on any CPU.
      const volatile float product = FloatOfValue(bits[i], values) * scale;
      x[i] = product;
    }
  }
};

}  // namespace jflux

#endif  // JFLUX_CORE_WIRE_H_
