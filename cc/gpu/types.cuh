// The formats of core/format.h as types of CUDA.
#ifndef JFLUX_GPU_TYPES_CUH_
#define JFLUX_GPU_TYPES_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>
#include <type_traits>

#include "core/format.h"

namespace jflux {

template <DType>
struct CudaTypeOf;
template <>
struct CudaTypeOf<DType::kF16> {
  using Type = __half;
};
template <>
struct CudaTypeOf<DType::kBF16> {
  using Type = __nv_bfloat16;
};
template <>
struct CudaTypeOf<DType::kF32> {
  using Type = float;
};
template <>
struct CudaTypeOf<DType::kF8E4M3FN> {
  using Type = __nv_fp8_e4m3;
};
template <>
struct CudaTypeOf<DType::kF8E5M2> {
  using Type = __nv_fp8_e5m2;
};
template <>
struct CudaTypeOf<DType::kS8> {
  using Type = int8_t;
};
template <DType kFormat>
using CudaType = typename CudaTypeOf<kFormat>::Type;

// Two numbers of a 16-bit type in a register.
template <typename T>
__device__ __forceinline__ uint32_t Pack(float a, float b) {
  if constexpr (std::is_same_v<T, __half>) {
    const __half2 h = __floats2half2_rn(a, b);
    return reinterpret_cast<const uint32_t&>(h);
  } else {
    const __nv_bfloat162 h = __floats2bfloat162_rn(a, b);
    return reinterpret_cast<const uint32_t&>(h);
  }
}

template <typename T>
__device__ __forceinline__ float2 Unpack(uint32_t v) {
  if constexpr (std::is_same_v<T, __half>) {
    return __half22float2(reinterpret_cast<const __half2&>(v));
  } else {
    return __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(v));
  }
}

}  // namespace jflux

#endif  // JFLUX_GPU_TYPES_CUH_
