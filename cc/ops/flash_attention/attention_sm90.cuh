// Code that Hopper's kernels of attention share (attention.cuh has the rest). Each has three
// warpgroups:
//
//   0, warp 0   load warp: one lane fills shared memory by TMA: an item's own block of rows, and
//               the stages with the blocks that it meets
//   1 and 2     consumers: wgmma. Each has 64 rows of the item's own block
//
// Tiles [rows][width] lie in shared memory as columns of 64 elements, [width / 64][rows][64], in
// the swizzle that wgmma reads (gpu/wgmma.cuh). The same tile is an operand of products over its
// columns (scores) and of products over its rows (sums of rows). After an item's last block the
// load warp announces a stage without data, kEnd.
//
// Heads of more than 128 elements have other consumers for kDkv
// (flash_attention_wide_backward_sm90.cuh).
#ifndef JFLUX_OPS_FLASH_ATTENTION_ATTENTION_SM90_CUH_
#define JFLUX_OPS_FLASH_ATTENTION_ATTENTION_SM90_CUH_

#include <cstdint>

#include "gpu/epilogue_sm90.cuh"
#include "gpu/machine.h"
#include "gpu/ptx.cuh"
#include "gpu/ring.cuh"
#include "gpu/wgmma.cuh"
#include "ops/flash_attention/attention.cuh"

namespace jflux::attention {

inline constexpr int kThreads = 384, kConsumers = 2, kConsumerWarps = 8;
// Registers of a thread of the load warp's warpgroup, and of a consumer's. setmaxnreg redistributes
// those of the launch, 168 for each of 384 threads.
struct Registers {
  int producer, consumer;
  static constexpr bool Fit(Registers r) { return r.producer + 2 * r.consumer <= 3 * 168; }
};

// What the load warp reads by TMA: rows of heads.
struct Maps {
  CUtensorMap q, k, v, d_out;
};
struct MapArgs : Maps, Args {};

// ---- The load warp ------------------------------------------------------------------------------

// Loads rows `first` and on of a head, zeros past the end of the array. One lane.
template <int kRows, int kWidth>
__device__ __forceinline__ void LoadRows(uint32_t smem, const CUtensorMap* map, uint32_t bar,
                                         int32_t batch, int32_t first, int32_t head) {
#pragma unroll
  for (int c = 0; c < kWidth / 64; ++c) {
    ptx::TmaLoad4d(smem + c * kRows * 128, map, bar, 64 * c, head, first, batch);
  }
}

// Positions of `kRows` rows, then their segments. One lane. Returns what `bar` has to expect.
template <int kRows>
__device__ __forceinline__ uint32_t BytesOfNumbers(const Args& args) {
  return (args.arrays.q_segments == nullptr ? 1 : 2) * kRows * 4;
}
template <int kRows>
__device__ __forceinline__ void LoadNumbers(const Args& args, uint32_t smem, uint32_t bar,
                                            const int32_t* positions, const int32_t* segments,
                                            int32_t padded, int32_t batch, int32_t first) {
  ptx::BulkLoad(smem, positions + NumbersAt(args, batch, padded, first), kRows * 4, bar);
  if (segments != nullptr) {
    ptx::BulkLoad(smem + kRows * 4, segments + SegmentsAt(batch, padded, first), kRows * 4, bar);
  }
}

// Calls load(block, kind) for each block of a row of `blocks` with scores. All lanes.
template <typename Load>
__device__ __forceinline__ void ForEachBlock(const int8_t* row, int32_t count, Load&& load) {
  const int lane = threadIdx.x % 32;
  for (int32_t first = 0; first < count; first += 32) {
    const int kind = first + lane < count ? row[first + lane] : 0;
    uint32_t left = __ballot_sync(0xffffffff, kind != 0);
    while (left != 0) {
      const int i = __ffs(left) - 1;
      left &= left - 1;
      load(first + i, __shfl_sync(0xffffffff, kind, i));
    }
  }
}

// A stage's kind, which lies beside its data.
__device__ __forceinline__ BlockKind LoadKind(uint32_t smem) {
  return static_cast<BlockKind>(__shfl_sync(0xffffffff, ptx::LoadShared4(smem), 0));
}

// All lanes of a warp of consumers have read what the barrier is about.
__device__ __forceinline__ void WarpArrive(uint32_t bar) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) ptx::MbarrierArrive(bar);
}

// ---- Products -----------------------------------------------------------------------------------

// d = A @ B^T, asynchronously: `a` are 64 rows of a tile of kRowsA, `b` is a tile. The sum is over
// their columns.
template <typename T, int kWidth, int kRowsA, int kCount>
__device__ __forceinline__ void MultiplyColumns(float (&d)[kCount], uint32_t a, uint32_t b) {
  constexpr int kRowsB = 2 * kCount;
#pragma unroll
  for (int k = 0; k < kWidth / 16; ++k) {
    wgmma::Multiply<0, 0>(static_cast<const T*>(nullptr), d,
                          wgmma::Descriptor(a + k / 4 * kRowsA * 128 + k % 4 * 32, 16, 1024),
                          wgmma::Descriptor(b + k / 4 * kRowsB * 128 + k % 4 * 32, 16, 1024),
                          k > 0);
  }
}

// d += A @ B, or d = A @ B, asynchronously: A [64, kRows] is packed accumulators, `b` a tile. The
// sum is over its rows.
template <typename T, int kSteps, int kCount>
__device__ __forceinline__ void MultiplyRows(float (&d)[kCount], const uint32_t (&a)[kSteps][4],
                                             uint32_t b, bool adds) {
  constexpr int kRows = 16 * kSteps;
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    wgmma::Multiply<1>(static_cast<const T*>(nullptr), d, a[k],
                       wgmma::Descriptor(b + k * 2048, kRows * 128, 1024), adds || k > 0);
  }
}

// Keeps the compiler from moving accesses to the operand across an asynchronous wgmma.
template <int kSteps>
__device__ __forceinline__ void PinA(uint32_t (&a)[kSteps][4]) {
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) asm volatile("" : "+r"(a[k][i])::"memory");
  }
}

// The first of a consumer thread's two rows, among the 64 of its warpgroup; the other is 8 below.
__device__ __forceinline__ int FirstRow() {
  return threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
}

}  // namespace jflux::attention

#endif  // JFLUX_OPS_FLASH_ATTENTION_ATTENTION_SM90_CUH_
