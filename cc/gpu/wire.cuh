// A GPU's codec of a quantised wire (core/wire.h).
#ifndef JFLUX_GPU_WIRE_CUH_
#define JFLUX_GPU_WIRE_CUH_

#include <cstdint>
#include <type_traits>

#include "core/wire.h"
#include "gpu/quantize.cuh"

namespace jflux::quantize {

// So many lanes of a warp share a block of a quantised wire. The bits are those of core/quantize.h.
template <int kLanes_, DType kValues>
struct LanesOf {
  static constexpr int kLanes = kLanes_, kInFlight = 2;
  static __device__ int lane() { return static_cast<int>(threadIdx.x % kLanes); }
  static __device__ uint32_t Max(uint32_t magnitude) {
    const uint32_t lanes = (0xffffffffu >> (32 - kLanes)) << (threadIdx.x % 32 / kLanes * kLanes);
#pragma unroll
    for (int step = 1; step < kLanes; step *= 2) {
      magnitude = MaxWord(magnitude, __shfl_xor_sync(lanes, magnitude, step));
    }
    return magnitude;
  }
  template <bool kOf16Bits, int kCount>
  static __device__ float Quantize(const float (&x)[kCount], uint32_t magnitude, DType,
                                   uint32_t (&words)[kCount / 4]) {
    const auto by = ScaleOf<kValues>(magnitude, /*power_of_two=*/false, nullptr);
    const auto round = [&](auto usual) {
      const auto pair = [&](int i) {
        constexpr int kCorrections = kOf16Bits ? 1 : 2;
        return Rounded<kValues>(Ratio<usual, kCorrections>(x[i], by),
                                Ratio<usual, kCorrections>(x[i + 1], by));
      };
#pragma unroll
      for (int i = 0; i < kCount; i += 4) words[i / 4] = pair(i) | pair(i + 2) << 16;
    };
    if (by.IsUsual(magnitude)) {
      round(std::true_type{});
    } else {
      round(std::false_type{});
    }
    return by.scale;
  }
  // Products are not joined with additions.
  template <int kCount>
  static __device__ void Dequantize(const uint32_t (&words)[kCount / 4], float scale, DType,
                                    float (&x)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; i += 2) {
      const float2 v = FloatsOf<kValues>(static_cast<uint16_t>(words[i / 4] >> i % 4 * 8));
      x[i] = __fmul_rn(v.x, scale);
      x[i + 1] = __fmul_rn(v.y, scale);
    }
  }
};

template <DType kValues>
using EightLanes = LanesOf<8, kValues>;

// The same for values of either wire, which a call has as an argument.
template <int kLanes_>
struct LanesOfAny {
  using E4M3 = LanesOf<kLanes_, DType::kF8E4M3FN>;
  using Int8 = LanesOf<kLanes_, DType::kS8>;
  static constexpr int kLanes = kLanes_;
  static __device__ int lane() { return E4M3::lane(); }
  static __device__ uint32_t Max(uint32_t magnitude) { return E4M3::Max(magnitude); }
  template <bool kOf16Bits, int kCount>
  static __device__ float Quantize(const float (&x)[kCount], uint32_t magnitude, DType values,
                                   uint32_t (&words)[kCount / 4]) {
    return values == DType::kS8 ? Int8::template Quantize<kOf16Bits>(x, magnitude, values, words)
                                : E4M3::template Quantize<kOf16Bits>(x, magnitude, values, words);
  }
  template <int kCount>
  static __device__ void Dequantize(const uint32_t (&words)[kCount / 4], float scale, DType values,
                                    float (&x)[kCount]) {
    if (values == DType::kS8) {
      Int8::Dequantize(words, scale, values, x);
    } else {
      E4M3::Dequantize(words, scale, values, x);
    }
  }
};

}  // namespace jflux::quantize

#endif  // JFLUX_GPU_WIRE_CUH_
