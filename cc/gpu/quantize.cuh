// What becomes of the elements of a block that is quantised: the scale, from the largest magnitude,
// and each value. jflux/_ops/_quantize.py defines them.
#ifndef JFLUX_GPU_QUANTIZE_CUH_
#define JFLUX_GPU_QUANTIZE_CUH_

#include <cuda_fp8.h>

#include <cstdint>

#include "core/format.h"
#include "core/numbers.h"
#include "core/platform.h"

namespace jflux::quantize {

inline constexpr uint32_t kInfinity = 0x7f800000;  // and NaNs are above

__device__ __forceinline__ uint32_t MaxWord(uint32_t a, uint32_t b) { return a > b ? a : b; }

constexpr float LargestOf(DType values) {
  return values == DType::kF8E4M3FN ? 448.0f : values == DType::kF8E5M2 ? 57344.0f : 127.0f;
}

// A block's scale as ratios by it are computed: they are x * shift / shifted.
struct Scale {
  float scale;
  float shifted;     // positive, and neither it nor its reciprocal near the ends of float32
  float reciprocal;  // of that, rounded to the nearest
  float shift;       // a power of two, or of an infinite scale 0; with the scale's sign

  static __device__ __forceinline__ Scale Of(float scale) {
    const float size = fabsf(scale);
    float shift = size < 0x1p-80f ? 0x1p64f : size > 0x1p100f ? 0x1p-64f : 1.0f;
    if (__float_as_uint(size) == kInfinity) shift = 0;
    const float shifted = shift == 0 ? 1.0f : size * shift;
    return {scale, shifted, __frcp_rn(shifted), copysignf(shift, scale)};
  }
  // Whether Ratio<true> does for each x of a block with this largest magnitude.
  __device__ __forceinline__ bool IsUsual(uint32_t magnitude) const {
    return scale != scale || (shift == 1 && __uint_as_float(magnitude) <= scale * 0x1p20f);
  }
};

// The scale of a block with this largest magnitude. `given`: the one to take instead, or null.
template <DType kValues>
__device__ __forceinline__ Scale ScaleOf(uint32_t magnitude, bool power_of_two,
                                         const float* given) {
  float scale;
  if (magnitude >= kInfinity) {
    scale = __uint_as_float(0x7fc00000);
  } else if (given != nullptr) {
    scale = __ldg(given);
  } else if (magnitude == 0) {
    scale = 1;
  } else {
    scale = fmaxf(__uint_as_float(magnitude) / LargestOf(kValues), 0x1p-126f);
    constexpr uint32_t kMantissa = (1u << 23) - 1;
    if (power_of_two) {
      scale = __uint_as_float((__float_as_uint(scale) + kMantissa) & ~kMantissa);
    }
  }
  return Scale::Of(scale);
}

// x / scale, rounded once to the nearest, but where that is too small or too large for every type
// of values. x times the reciprocal is corrected by the remainder: once for an x of 16 bits, which
// is enough for all mantissas of x and of a scale, and else twice, of which the first gives a
// neighbour of the ratio, and the second the nearest number (Markstein, IBM J. Res. Dev. 34(1),
// 1990). The signs keep that of a zero. Without kUsual x is shifted, so that no remainder is below
// the normal numbers, and what is near infinity, or no number, is not corrected.
template <bool kUsual, int kCorrections>
__device__ __forceinline__ float Ratio(float x, const Scale& scale) {
  if constexpr (!kUsual) x *= scale.shift;
  const float first = x * scale.reciprocal;
  float ratio = first;
#pragma unroll
  for (int i = 0; i < kCorrections; ++i) {
    ratio = fmaf(-fmaf(scale.shifted, ratio, -x), scale.reciprocal, ratio);
  }
  return kUsual || fabsf(first) < 0x1p20f ? ratio : first;
}

// Two values, the first in the lower byte.
template <DType kValues>
__device__ __forceinline__ uint32_t Rounded(float a, float b) {
  if constexpr (kValues == DType::kS8) {
    // A NaN becomes 0.
    const int low = Max(-127, Min(127, __float2int_rn(a)));
    const int high = Max(-127, Min(127, __float2int_rn(b)));
    return (low & 0xff) | (high & 0xff) << 8;
  } else {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 890
    // No instruction converts to float8, and CUDA's header does it by way of float64.
    const auto bits_of = [](float x) -> uint32_t {
      constexpr float kLargest = LargestOf(kValues);
      return Number<kValues>::From(x > kLargest ? kLargest : x < -kLargest ? -kLargest : x).bits;
    };
    return bits_of(a) | bits_of(b) << 8;
#else
    constexpr auto kType = kValues == DType::kF8E4M3FN ? __NV_E4M3 : __NV_E5M2;
    return __nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE, kType);
#endif
  }
}

// The numbers of two values, of the first in the lower byte.
template <DType kValues>
__device__ __forceinline__ float2 FloatsOf(uint16_t pair) {
  if constexpr (kValues == DType::kS8) {
    return make_float2(static_cast<int8_t>(pair), static_cast<int8_t>(pair >> 8));
  } else {
    constexpr auto kType = kValues == DType::kF8E4M3FN ? __NV_E4M3 : __NV_E5M2;
    return __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(pair, kType)));
  }
}

}  // namespace jflux::quantize

#endif  // JFLUX_GPU_QUANTIZE_CUH_
