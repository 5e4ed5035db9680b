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

// Writes a consumer's 64 x kTileN block to its staging as TMA stores take it: blocks of 64 columns,
// rows of 128 bytes, whose 16-byte pieces are swizzled by the row.
template <typename T, int kTileN>
__device__ __forceinline__ void StageBlock(const float (&acc)[kTileN / 2], uint32_t smem) {
  const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
  const int row = 16 * warp + lane % 16;
#pragma unroll
  for (int pair = 0; pair < kTileN / 16; ++pair) {
    const float* a = &acc[8 * pair];  // columns 16 pair .. 16 pair + 15
    const int piece = pair % 4 * 2 + lane / 16;
    ptx::StoreMatrix4(smem + pair / 4 * 8192 + row * 128 + ((piece ^ (row & 7)) * 16),
                      Pack<T>(a[0], a[1]), Pack<T>(a[2], a[3]), Pack<T>(a[4], a[5]),
                      Pack<T>(a[6], a[7]));
  }
}

// The staged block, to y at (row, n0); the part that lies outside y is left out. One thread.
template <int kTileN>
__device__ __forceinline__ void StoreStagedBlock(uint32_t smem, const CUtensorMap* y, int64_t row,
                                                 int64_t n0, int64_t n) {
#pragma unroll
  for (int part = 0; part < kTileN / 64; ++part) {
    if (n0 + part * 64 < n) {
      ptx::TmaStore2d(y, smem + part * 8192, static_cast<int32_t>(n0 + part * 64),
                      static_cast<int32_t>(row));
    }
  }
}

// The staged block, by the consumer itself, for rows that do not follow each other in y.
// row_of(r) is where row r (0..63) of the block goes, as an element index into y, or -1 for none.
template <typename T, int kTileN, typename RowOf>
__device__ __forceinline__ void ScatterStagedRows(uint32_t smem, int barrier, void* y, int64_t n0,
                                                  int64_t n, RowOf&& row_of) {
  const int thread = threadIdx.x % 128;
  ptx::BarrierSync(barrier, 128);  // all of it is there
  for (int i = 0; i < kTileN / 16; ++i) {
    const int r = i % 4 * 16 + thread / 8, piece = thread % 8, part = i / 4;
    const int64_t col = n0 + part * 64 + piece * 8;
    const int64_t at = row_of(r);
    if (at >= 0 && col < n) {
      ptx::StoreGlobal16(
          static_cast<T*>(y) + at + col,
          ptx::LoadShared16(smem + part * 8192 + r * 128 + ((piece ^ (r & 7)) * 16)));
    }
  }
  ptx::BarrierSync(barrier, 128);  // all of it has been read
}

// A block in float32, from the registers: four lanes write a 32-byte sector.
template <int kTileN, typename RowOf>
__device__ __forceinline__ void StoreBlockF32(const float (&acc)[kTileN / 2], void* y, int64_t n0,
                                              int64_t n, RowOf&& row_of) {
  const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
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
}

}  // namespace jflux

#endif  // JFLUX_GPU_EPILOGUE_SM90_CUH_
