// Partial tiles in fragment order: as consumer threads hold their accumulators. The reader is the
// same thread of a consumer in another CTA, so nothing is rearranged.
//
// An m64 block takes one staging in a 16-bit type, and two in float32, one for each row half. Each
// warp's part of a staging (16 rows; in float32, 8 of them) is contiguous.
#ifndef JFLUX_GPU_FRAGMENTS_SM90_CUH_
#define JFLUX_GPU_FRAGMENTS_SM90_CUH_

#include <cstdint>

#include "gpu/epilogue_sm90.cuh"
#include "gpu/ptx.cuh"

namespace jflux {

template <typename Config, typename T = typename Config::Result>
struct Fragments {
  static constexpr int kWarpBytes = Config::kStagingBytes / 4;

  // Writes one staging: both row halves, or in float32 the row half `round`.
  template <bool kFloat32>
  static __device__ __forceinline__ void Stage(const float (&acc)[Config::kSliceAccumulators],
                                               int round, uint32_t smem) {
    const uint32_t at = smem + ThreadOffset();
#pragma unroll
    for (int p = 0; p < 2 * kVectors; ++p) {
      const uint4 v =
          kFloat32 ? Get<true>(acc, round, p) : Get<false>(acc, p / kVectors, p % kVectors);
      ptx::StoreShared16(at + p * 512, v);
    }
  }

  // Adds an m64 block from global memory.
  template <bool kFloat32>
  static __device__ __forceinline__ void Add(float (&acc)[Config::kSliceAccumulators],
                                             const char* m64) {
    const char* at = m64 + ThreadOffset();
#pragma unroll
    for (int group = 0; group < (kFloat32 ? 4 : 2); ++group) {
      // Two groups make a staging.
      const char* from = at + group / 2 * Config::kStagingBytes + group % 2 * kVectors * 512;
      uint4 v[kVectors];  // in flight together
#pragma unroll
      for (int p = 0; p < kVectors; ++p) v[p] = ptx::LoadGlobal16(from + p * 512);
#pragma unroll
      for (int p = 0; p < kVectors; ++p) {
        if constexpr (kFloat32) {
          AddVector<true>(acc, group / 2, group % 2 * kVectors + p, v[p]);
        } else {
          AddVector<false>(acc, group, p, v[p]);
        }
      }
    }
  }

 private:
  // Vectors of 16 bytes. A vector holds the columns of four j (gpu/wgmma.cuh) of a row half in a
  // 16-bit type, and the columns of two j in float32. The vectors of a warp's threads are adjacent;
  // the vectors of one thread are 512 bytes apart.
  static constexpr int kVectors = Config::kSliceN / 32;

  static __device__ __forceinline__ uint32_t ThreadOffset() {
    return threadIdx.x % 128 / 32 * kWarpBytes + threadIdx.x % 32 * 16;
  }

  template <bool kFloat32>
  static __device__ __forceinline__ uint4 Get(const float (&acc)[Config::kSliceAccumulators],
                                              int half, int p) {
    if constexpr (kFloat32) {
      const float* a = &acc[8 * p + 2 * half];
      return make_uint4(__float_as_uint(a[0]), __float_as_uint(a[1]), __float_as_uint(a[4]),
                        __float_as_uint(a[5]));
    } else {
      const float* a = &acc[16 * p + 2 * half];
      return make_uint4(Pack<T>(a[0], a[1]), Pack<T>(a[4], a[5]), Pack<T>(a[8], a[9]),
                        Pack<T>(a[12], a[13]));
    }
  }
  template <bool kFloat32>
  static __device__ __forceinline__ void AddVector(float (&acc)[Config::kSliceAccumulators],
                                                   int half, int p, uint4 v) {
    if constexpr (kFloat32) {
      float* a = &acc[8 * p + 2 * half];
      a[0] += __uint_as_float(v.x);
      a[1] += __uint_as_float(v.y);
      a[4] += __uint_as_float(v.z);
      a[5] += __uint_as_float(v.w);
    } else {
      float* a = &acc[16 * p + 2 * half];
      const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 f = Unpack<T>(words[i]);
        a[4 * i] += f.x;
        a[4 * i + 1] += f.y;
      }
    }
  }
};

}  // namespace jflux

#endif  // JFLUX_GPU_FRAGMENTS_SM90_CUH_
