// A GPU's codecs of a quantised wire (core/wire.h).
#ifndef JFLUX_GPU_WIRE_CUH_
#define JFLUX_GPU_WIRE_CUH_

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "core/wire.h"
#include "gpu/ptx.cuh"
#include "gpu/quantize.cuh"

namespace jflux::quantize {

// Values of a block, of which this thread has consecutive ones. The bits are those of
// core/quantize.h.
template <DType kValues>
struct ValuesOf {
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

// The same of either wire, which a call has as an argument.
struct AnyValues {
  using E4M3 = ValuesOf<DType::kF8E4M3FN>;
  using Int8 = ValuesOf<DType::kS8>;
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

// So many lanes of a warp share a block.
template <int kLanes_>
struct Team {
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
};

// Codecs.
template <DType kValues>
struct EightLanes : Team<8>, ValuesOf<kValues> {};
template <int kLanes>
struct LanesOfAny : Team<kLanes>, AnyValues {};

// Consecutive elements of a block as they travel, and the block's scale, which lies elsewhere.
template <int kCount>
struct WireVector {
  static_assert(kCount == 4 || kCount == 8);
  uint32_t words[kCount / 4];
  float scale;

  __device__ __forceinline__ void StoreWords(char* to) const {
    std::memcpy(__builtin_assume_aligned(to, kCount), words, kCount);
  }
  // Past L1.
  static __device__ __forceinline__ WireVector Load(const char* words, const char* scale) {
    WireVector v;
    if constexpr (kCount == 4) {
      v.words[0] = ptx::LoadGlobal4(words);
    } else {
      const uint2 two = ptx::LoadGlobal8(words);
      v.words[0] = two.x, v.words[1] = two.y;
    }
    v.scale = __uint_as_float(ptx::LoadGlobal4(scale));
    return v;
  }
  __device__ __forceinline__ void Dequantize(DType wire, float (&x)[kCount]) const {
    AnyValues::Dequantize(words, scale, wire, x);
  }
};

}  // namespace jflux::quantize

#endif  // JFLUX_GPU_WIRE_CUH_
