// Partial tiles in fragment order: as consumer threads hold their accumulators. The reader is the
// same thread of a consumer in another CTA, so nothing is rearranged.
//
// An m64 block takes one staging in a 16-bit type or quantised, and two in float32, one for each
// row half. Each warp's part of a staging (16 rows; in float32, 8 of them) is contiguous.
#ifndef JFLUX_GPU_FRAGMENTS_SM90_CUH_
#define JFLUX_GPU_FRAGMENTS_SM90_CUH_

#include <cstdint>

#include "core/quantize.h"
#include "gpu/epilogue_sm90.cuh"
#include "gpu/ptx.cuh"
#include "gpu/quantize.cuh"

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

// The same of values of 8 bits and a float32 scale for each kWireBlock columns of a row. The four
// lanes that have a row find its largest magnitude. A warp's scales are behind its values.
template <typename Config>
struct QuantizedFragments {
  static constexpr int kBlocks = static_cast<int>(Config::kSliceN / kWireBlock);
  static constexpr int kWarpBytes = 16 * (Config::kSliceN + kBlocks * 4);
  static_assert(Config::kSliceN % kWireBlock == 0 && 4 * kWarpBytes <= Config::kStagingBytes);

  static __device__ __forceinline__ void Stage(const float (&acc)[Config::kSliceAccumulators],
                                               uint32_t smem, bool int8) {
    if (int8) {
      StageAs<DType::kS8>(acc, smem);
    } else {
      StageAs<DType::kF8E4M3FN>(acc, smem);
    }
  }

  // Adds an m64 block from global memory.
  static __device__ __forceinline__ void Add(float (&acc)[Config::kSliceAccumulators],
                                             const char* m64, bool int8) {
    if (int8) {
      AddAs<DType::kS8>(acc, m64);
    } else {
      AddAs<DType::kF8E4M3FN>(acc, m64);
    }
  }

 private:
  // A thread has 2 kBlocks rows of blocks, of both row halves, each of 32 columns and two vectors.
  // The vectors of a warp's threads are adjacent.
  static constexpr int kRows = 2 * kBlocks, kColumns = static_cast<int>(kWireBlock) / 4;
  static constexpr int kScalesOffset = kRows * 2 * 512;

  static __device__ __forceinline__ uint32_t WarpOffset() {
    return threadIdx.x % 128 / 32 * kWarpBytes;
  }
  static __device__ __forceinline__ uint32_t QuadOffset() {
    return kScalesOffset + threadIdx.x % 32 / 4 * (kRows * 4);
  }
  // The accumulator of column `i` of a row of blocks.
  static constexpr __device__ int At(int row, int i) {
    return (row % kBlocks * 16 + i / 2) * 4 + 2 * (row / kBlocks) + i % 2;
  }

  template <DType kValues>
  static __device__ __forceinline__ void StageAs(const float (&acc)[Config::kSliceAccumulators],
                                                 uint32_t smem) {
    const uint32_t warp = smem + WarpOffset(), lane = threadIdx.x % 32;
    float scale = 0;
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      uint32_t most = 0;
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        most = quantize::MaxWord(most, __float_as_uint(acc[At(row, i)]) & 0x7fffffff);
      }
#pragma unroll
      for (int step = 1; step < 4; step *= 2) {
        most = quantize::MaxWord(most, __shfl_xor_sync(0xffffffff, most, step));
      }
      const float of_row = quantize::ScaleOf<kValues>(most, /*power_of_two=*/false, nullptr).scale;
      if (lane % 4 == row) scale = of_row;
      // A normal number, as the scale is: it is of the largest float32 at the most.
      const float inverse = __frcp_rn(of_row);
      const auto pair = [&](int i) {
        return quantize::Rounded<kValues>(acc[At(row, i)] * inverse, acc[At(row, i + 1)] * inverse);
      };
      const auto word = [&](int i) { return pair(i) | pair(i + 2) << 16; };
#pragma unroll
      for (int v = 0; v < 2; ++v) {
        const int i = 16 * v;
        ptx::StoreShared16(warp + (2 * row + v) * 512 + lane * 16,
                           make_uint4(word(i), word(i + 4), word(i + 8), word(i + 12)));
      }
    }
    if (lane % 4 < kRows) {
      ptx::StoreShared4(warp + QuadOffset() + lane % 4 * 4, __float_as_int(scale));
    }
  }

  template <DType kValues>
  static __device__ __forceinline__ void AddAs(float (&acc)[Config::kSliceAccumulators],
                                               const char* m64) {
    const char* warp = m64 + WarpOffset();
    uint4 v[2 * kRows];  // in flight together
#pragma unroll
    for (int i = 0; i < 2 * kRows; ++i) {
      v[i] = ptx::LoadGlobal16(warp + i * 512 + threadIdx.x % 32 * 16);
    }
    float scales[kRows];
#pragma unroll
    for (int i = 0; i < kRows; i += 2) {
      const uint2 two = ptx::LoadGlobal8(warp + QuadOffset() + i * 4);
      scales[i] = __uint_as_float(two.x);
      scales[i + 1] = __uint_as_float(two.y);
    }
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
#pragma unroll
      for (int i = 0; i < kColumns; i += 2) {
        const uint4& vector = v[2 * row + i / 16];
        const uint32_t words[4] = {vector.x, vector.y, vector.z, vector.w};
        const float2 two =
            quantize::FloatsOf<kValues>(static_cast<uint16_t>(words[i % 16 / 4] >> i % 4 * 8));
        acc[At(row, i)] += two.x * scales[row];
        acc[At(row, i + 1)] += two.y * scales[row];
      }
    }
  }
};

}  // namespace jflux

#endif  // JFLUX_GPU_FRAGMENTS_SM90_CUH_
