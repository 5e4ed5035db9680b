// Scales with entries of k (kBlockScales): the sums of each k-block are multiplied by the scale of
// x's row and that of w's column, or of its block of kScaleBlock columns, and added to a tile's
// sums in float32 (DeepSeek-V3, arXiv 2412.19437, section 3.3.2). So sums keep the bits that the
// tensor cores' own sums of 8-bit floats do not have.
//
// Consumers share each tile, and take turns (MmaOrder): while one multiplies a k-block on the
// tensor cores, the other scales and adds its own. Left alone both would do the same at the same
// time. A turn ends when half of a k-block is multiplied, so that the tensor cores always have
// work.
//
// An op with such kernels provides
//
//   ScalesOf(args, row_block, m64, tile) -> ScalesOfTile<Config>
#ifndef JFLUX_GPU_BLOCK_SCALES_SM90_CUH_
#define JFLUX_GPU_BLOCK_SCALES_SM90_CUH_

#include <cstdint>
#include <type_traits>

#include "core/platform.h"
#include "gpu/gemm_config.h"
#include "gpu/gemm_multiply_sm90.cuh"
#include "gpu/gemm_smem.cuh"
#include "gpu/ptx.cuh"
#include "gpu/ring.cuh"
#include "gpu/wgmma.cuh"

namespace jflux {

// The scales of a thread's two rows of an m64 block, with an entry for each k-block.
struct RowScales {
  const float *low, *high;  // (gpu/wgmma.cuh); null: y has no such row

  // Of an m64 block that begins at virtual row `row0`: `scale` [rows, k_blocks].
  template <typename Rows>
  __device__ __forceinline__ void Set(const float* scale, const Rows& rows, int64_t row0,
                                      int64_t k_blocks) {
    const int thread = threadIdx.x % 128;
    const int64_t first = row0 + 16 * (thread / 32) + thread % 32 / 4;
    const auto of = [&](int64_t row) {
      return row < rows.Total() ? scale + rows.Actual(row) * k_blocks : nullptr;
    };
    low = of(first);
    high = of(first + 8);
  }
  struct Entry {
    float low, high;
    // Of accumulator i.
    __device__ __forceinline__ float Of(int i) const { return i % 4 < 2 ? low : high; }
  };
  __device__ __forceinline__ Entry At(int k_block) const {
    return Entry{low == nullptr ? 0.0f : __ldg(low + k_block),
                 high == nullptr ? 0.0f : __ldg(high + k_block)};
  }
};

// Scales::kOfBlocks. The columns of a tile lie in two blocks at most: its first `boundary` columns,
// and the others.
struct BlockScales {
  RowScales rows;
  const float *left, *right;  // of the columns before and from `boundary` on, by k-block
  int32_t boundary;           // a multiple of kStep

  static constexpr int kStep = 32;  // columns; tiles begin at multiples of it
  static constexpr bool kLoadsAhead = true;

  // Of a tile's columns [n0, n0 + columns) of a w, whose scale [blocks of n, k_blocks] is `scale`.
  __device__ __forceinline__ void SetColumns(const float* scale, int64_t n0, int64_t n, int columns,
                                             int64_t k_blocks) {
    const int64_t block = Quotient(n0, kScaleBlock);
    const int64_t last = Quotient(Min(n0 + columns, n) - 1, kScaleBlock);
    left = scale + block * k_blocks;
    right = scale + last * k_blocks;
    boundary = static_cast<int32_t>((block + 1) * kScaleBlock - n0);
  }
  struct Entry {
    RowScales::Entry rows;
    float left, right;
  };
  __device__ __forceinline__ Entry At(int k_block) const {
    return Entry{rows.At(k_block), __ldg(left + k_block), __ldg(right + k_block)};
  }
  // Of accumulator i: two are neighbouring columns of a row.
  __device__ __forceinline__ float Of(const Entry& entry, int i) const {
    const bool is_left = i * 2 / kStep * kStep < boundary;
    return entry.rows.Of(i) * (is_left ? entry.left : entry.right);
  }
};

// Scales::kOfVectors.
template <int kTileN>
struct VectorScales {
  RowScales rows;
  const float* columns;  // of the thread's first column of the tile
  int64_t n;             // entries of a k-block
  int32_t valid;         // columns from there on that w has

  static constexpr bool kLoadsAhead = false;  // an entry takes many registers

  // Of a tile's columns from n0 on, of a w whose scale is `scale` [k_blocks, n].
  __device__ __forceinline__ void SetColumns(const float* scale, int64_t n0, int64_t n_of_w) {
    const int64_t first = n0 + 2 * (threadIdx.x % 4);
    columns = scale + first;
    n = n_of_w;
    valid = static_cast<int32_t>(Min<int64_t>(n_of_w - first, kTileN));
  }
  struct Entry {
    RowScales::Entry rows;
    float2 columns[kTileN / 8];
  };
  __device__ __forceinline__ Entry At(int k_block) const {
    Entry entry;
    entry.rows = rows.At(k_block);
    const float* at = columns + k_block * n;
#pragma unroll
    for (int j = 0; j < kTileN / 8; ++j) {
      entry.columns[j] = 8 * j < valid ? __ldg(reinterpret_cast<const float2*>(at + 8 * j))
                                       : make_float2(0.0f, 0.0f);
    }
    return entry;
  }
  __device__ __forceinline__ float Of(const Entry& entry, int i) const {
    const float2& of = entry.columns[i / 4];
    return entry.rows.Of(i) * (i % 2 == 0 ? of.x : of.y);
  }
};

template <typename Config>
using ScalesOfTile = std::conditional_t<Config::kScales == Scales::kOfVectors,
                                        VectorScales<Config::kTileN>, BlockScales>;

// total += a tile's scaled k-blocks. `turn` is the parity of the consumer's next turn.
// release(stage) is called when a stage has been read.
template <typename Config, typename Release>
__device__ __forceinline__ void MultiplyBlocks(Accumulators<Config>& total,
                                               const GemmSmem<Config>& smem, int consumer,
                                               uint32_t& turn, Ring<Config::kStages>& stages,
                                               int k_blocks, const ScalesOfTile<Config>& scales,
                                               Release&& release) {
  static_assert(Config::kConsumerM64Blocks == 1);
  using Entry = typename ScalesOfTile<Config>::Entry;
  constexpr bool kAhead = ScalesOfTile<Config>::kLoadsAhead;
  constexpr int kHalf = kMultiplySteps / 2;
  Entry next{};
  if (kAhead && k_blocks > 0) next = scales.At(0);
  for (int kb = 0; kb < k_blocks; ++kb) {
    Accumulators<Config> sums;
    ptx::MbarrierWait(smem.Full(stages.index), stages.parity);
    ptx::MbarrierWait(smem.MmaOrder(consumer), turn);
    turn ^= 1;
    const uint32_t a = smem.A(stages.index) + consumer * 8192, b = smem.B(stages.index);
    PinAll<Config>(sums);
    wgmma::Fence();
    MultiplyStage<Config, 0, kHalf>(sums, a, b, /*adds=*/false);
    wgmma::Commit();
    MultiplyStage<Config, kHalf>(sums, a, b, /*adds=*/true);
    wgmma::Commit();
    const Entry entry = kAhead ? next : scales.At(kb);
    if (kAhead && kb + 1 < k_blocks) next = scales.At(kb + 1);
    wgmma::Wait<1>();
    if (threadIdx.x % 32 == 0) ptx::MbarrierArrive(smem.MmaOrder(1 - consumer));
    wgmma::Wait<0>();
    PinAll<Config>(sums);
    release(stages.index);
    stages.Advance();
#pragma unroll
    for (int i = 0; i < Config::kAccumulators; ++i) total[0][i] += sums[0][i] * scales.Of(entry, i);
  }
}

// A turn of MultiplyBlocks, of a consumer that leaves its m64 block of the tile out.
template <typename Config>
__device__ __forceinline__ void PassTurn(const GemmSmem<Config>& smem, int consumer,
                                         uint32_t& turn) {
  ptx::MbarrierWait(smem.MmaOrder(consumer), turn);
  turn ^= 1;
  __syncwarp();
  if (threadIdx.x % 32 == 0) ptx::MbarrierArrive(smem.MmaOrder(1 - consumer));
}

}  // namespace jflux

#endif  // JFLUX_GPU_BLOCK_SCALES_SM90_CUH_
