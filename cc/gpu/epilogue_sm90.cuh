// From a consumer's accumulators (gpu/wgmma.cuh says who holds what) to rows of a global array.
#ifndef JFLUX_GPU_EPILOGUE_SM90_CUH_
#define JFLUX_GPU_EPILOGUE_SM90_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "gpu/ptx.cuh"

namespace jflux {

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

// Writes the consumer's 64 x kTileN block: 16-bit types through shared memory, so that eight lanes
// write 128 contiguous bytes; float32 from registers, four lanes a 32-byte sector.
//
// row_of(r) is where row r (0..63) of the block goes, as an element index into y, or -1 for none.
template <typename T, int kTileN, typename RowOf>
__device__ __forceinline__ void StoreBlock(const float (&acc)[kTileN / 2], uint32_t smem,
                                           int barrier, void* y, bool out_f32, int64_t n,
                                           int64_t n0, RowOf&& row_of) {
  const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
  if (out_f32) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t row = row_of(16 * warp + 8 * half + lane / 4);
      if (row < 0) continue;
      auto* out = static_cast<float*>(y) + row;
#pragma unroll
      for (int j = 0; j < kTileN / 8; ++j) {
        const int64_t col = n0 + 8 * j + 2 * (lane % 4);
        if (col < n) {
          *reinterpret_cast<float2*>(out + col) =
              make_float2(acc[4 * j + 2 * half], acc[4 * j + 2 * half + 1]);
        }
      }
    }
    return;
  }
  // 64 columns at a time: a row is 128 bytes, its 16-byte pieces swizzled by the row against bank
  // conflicts.
#pragma unroll
  for (int part = 0; part < kTileN / 64; ++part) {
    ptx::BarrierSync(barrier, 128);  // the part before has been read
    const int row = 16 * warp + lane % 16;
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      const int j = part * 8 + pair * 2;  // columns 8 j .. 8 j + 15
      const int piece = pair * 2 + lane / 16;
      ptx::StoreMatrix4(
          smem + row * 128 + ((piece ^ (row & 7)) * 16), Pack<T>(acc[4 * j], acc[4 * j + 1]),
          Pack<T>(acc[4 * j + 2], acc[4 * j + 3]), Pack<T>(acc[4 * j + 4], acc[4 * j + 5]),
          Pack<T>(acc[4 * j + 6], acc[4 * j + 7]));
    }
    ptx::BarrierSync(barrier, 128);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int r = i * 16 + thread / 8, piece = thread % 8;
      const int64_t col = n0 + part * 64 + piece * 8;
      const int64_t at = row_of(r);
      if (at >= 0 && col < n) {
        ptx::StoreGlobal16(static_cast<T*>(y) + at + col,
                           ptx::LoadShared16(smem + r * 128 + ((piece ^ (r & 7)) * 16)));
      }
    }
  }
}

}  // namespace jflux

#endif  // JFLUX_GPU_EPILOGUE_SM90_CUH_
