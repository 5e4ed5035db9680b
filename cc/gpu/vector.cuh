// 16 bytes of an array, as float32.
#ifndef JFLUX_GPU_VECTOR_CUH_
#define JFLUX_GPU_VECTOR_CUH_

#include <cstdint>
#include <type_traits>

#include "gpu/types.cuh"

namespace jflux {

// T: float or a 16-bit type.
template <typename T>
struct Vector {
  static constexpr int kSize = kVectorBytes / sizeof(T);
  float v[kSize];

  static __device__ __forceinline__ Vector Of(uint4 raw) {
    Vector out;
    const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      if constexpr (std::is_same_v<T, float>) {
        out.v[w] = __uint_as_float(words[w]);
      } else {
        const float2 pair = Unpack<T>(words[w]);
        out.v[2 * w] = pair.x;
        out.v[2 * w + 1] = pair.y;
      }
    }
    return out;
  }
  __device__ __forceinline__ uint4 Rounded() const {
    if constexpr (std::is_same_v<T, float>) {
      return make_uint4(__float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]),
                        __float_as_uint(v[3]));
    } else {
      return make_uint4(Pack<T>(v[0], v[1]), Pack<T>(v[2], v[3]), Pack<T>(v[4], v[5]),
                        Pack<T>(v[6], v[7]));
    }
  }
  __device__ __forceinline__ void AddTimes(float weight, const Vector& other) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) v[i] = fmaf(weight, other.v[i], v[i]);
  }
  __device__ __forceinline__ void Add(const Vector& other) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) v[i] += other.v[i];
  }
};

}  // namespace jflux

#endif  // JFLUX_GPU_VECTOR_CUH_
