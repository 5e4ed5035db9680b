// Scales with entries of k (kBlockScales): the sums of each k-block are multiplied by the scale of
// x's row and that of w's column, or of its block of kScaleBlock columns, and added to a tile's
// sums in float32 (DeepSeek-V3, arXiv 2412.19437, section 3.3.2). So sums keep the bits that the
// tensor cores' own sums of 8-bit floats do not have.
//
// Consumers share each tile. While one scales and adds a k-block's sums, the tensor cores have the
// other's to multiply. A tile of two blocks of columns has registers for the sums of one at a time.
//
// An op with such kernels provides
//
//   ScalesOf(args, call, smem, row_block, m64, tile) -> ScalesOfTile<Config>, or
//                               BlockScales of rows that arrive while the kernel runs
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
  static constexpr bool kArrive = false;

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
  // Begins with a later k-block.
  __device__ __forceinline__ void Skip(int k_blocks) {
    if (low != nullptr) low += k_blocks;
    if (high != nullptr) high += k_blocks;
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
  __device__ __forceinline__ bool HasArrived(int) const { return true; }
};

// The same of rows that may come from peers, with the k-blocks of their tile.
struct ArrivingRowScales {
  const float* low;  // of the first row
  int32_t to_high;   // entries from there to the second row's
  int32_t stride;    // entries from one k-block to the next
  bool is_local;     // this rank's, which are there; else in the workspace
  uint32_t counter;  // KBlocksArrived of the CTA's shared memory
  uint32_t before;   // what it counts for earlier tiles
  static constexpr bool kArrive = true;

  __device__ __forceinline__ void Skip(int k_blocks) { low += k_blocks * stride; }
  __device__ __forceinline__ RowScales::Entry At(int k_block) const {
    const float* from = low + k_block * stride;
    // A line of L1 may be older than what has arrived.
    return is_local ? RowScales::Entry{__ldg(from), __ldg(from + to_high)}
                    : RowScales::Entry{__ldcg(from), __ldcg(from + to_high)};
  }
  // Whether a k-block of the tile, and its scales, may be read.
  __device__ __forceinline__ bool HasArrived(int k_block) const {
    return static_cast<int32_t>(ptx::LoadSharedAcquire(counter) - (before + k_block)) > 0;
  }
  // Between the wait for a k-block's stage and reading its scales: the stage was filled after the
  // counter had counted it.
  __device__ __forceinline__ void Acquire() const { ptx::LoadSharedAcquire(counter); }
};

// Scales::kOfBlocks. The columns of a tile lie in two blocks at most: its first `boundary` columns,
// and the others.
template <typename Rows>
struct BlockScalesOf {
  Rows rows;
  const float *left, *right;  // of the columns before and from `boundary` on, by k-block
  int32_t boundary;           // a multiple of kStep

  static constexpr int kStep = 32;  // columns; tiles begin at multiples of it

  // Of a tile's columns [n0, n0 + columns) of a w, whose scale [blocks of n, k_blocks] is `scale`.
  __device__ __forceinline__ void SetColumns(const float* scale, int64_t n0, int64_t n, int columns,
                                             int64_t k_blocks) {
    const int64_t block = Quotient(n0, kScaleBlock);
    const int64_t last = Quotient(Min(n0 + columns, n) - 1, kScaleBlock);
    left = scale + block * k_blocks;
    right = scale + last * k_blocks;
    boundary = static_cast<int32_t>((block + 1) * kScaleBlock - n0);
  }
  // Begins with a later k-block, where CTAs share k.
  __device__ __forceinline__ void Skip(int k_blocks) {
    rows.Skip(k_blocks);
    left += k_blocks;
    right += k_blocks;
  }
  // What a thread has of a k-block. Read ahead of its products.
  struct Entry {
    RowScales::Entry rows;
    float left, right;
  };
  __device__ __forceinline__ Entry Read(int k_block) const {
    return Entry{rows.At(k_block), __ldg(left + k_block), __ldg(right + k_block)};
  }
  __device__ __forceinline__ void Share(const Entry&, int) const {}
  // total += sums, scaled. Two neighbouring accumulators are columns of a row.
  template <int kCount>
  __device__ __forceinline__ void Add(float (&total)[kCount], const float (&sums)[kCount],
                                      const Entry& entry, int) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const bool is_left = i * 2 / kStep * kStep < boundary;
      total[i] += sums[i] * (entry.rows.Of(i) * (is_left ? entry.left : entry.right));
    }
  }
  // The same of half a tile, which is a block.
  template <int kHalf, int kCount>
  __device__ __forceinline__ void AddHalf(float (&total)[2 * kCount], const float (&sums)[kCount],
                                          const Entry& entry) const {
    const float of = kHalf == 0 ? entry.left : entry.right;
    const RowScales::Entry by{entry.rows.low * of, entry.rows.high * of};
#pragma unroll
    for (int i = 0; i < kCount; ++i) total[kHalf * kCount + i] += sums[i] * by.Of(i);
  }
};
using BlockScales = BlockScalesOf<RowScales>;

// Scales::kOfVectors. A thread needs a quarter of a tile's columns. Its consumer reads them all
// together, and shares them in shared memory: in two buffers, since a thread may write those of the
// next k-block while another still reads.
template <typename Config>
struct VectorScales {
  RowScales rows;
  const float* columns;  // of the two columns that the thread reads; null: none
  int64_t n;             // entries of a k-block
  int consumer;
  uint32_t shared;  // the consumer's buffers

  // Of a tile's columns from n0 on, of a w whose scale is `scale` [k_blocks, n]. Called by all
  // threads of the consumer.
  __device__ __forceinline__ void SetColumns(const GemmSmem<Config>& smem, int of_consumer,
                                             const float* scale, int64_t n0, int64_t n_of_w) {
    const int at = 2 * (threadIdx.x % 128);
    columns = at < Config::kTileN && n0 + at < n_of_w ? scale + n0 + at : nullptr;
    n = n_of_w;
    consumer = of_consumer;
    shared = smem.Scales(consumer);
    // A tile begins at the first buffer, and all have read those of the last tile.
    ptx::BarrierSync(1 + consumer, 128);
  }
  struct Entry {
    RowScales::Entry rows;
    float2 columns;
  };
  __device__ __forceinline__ Entry Read(int k_block) const {
    Entry entry{rows.At(k_block), make_float2(0.0f, 0.0f)};
    if (columns != nullptr) {
      entry.columns = __ldg(reinterpret_cast<const float2*>(columns + k_block * n));
    }
    return entry;
  }
  __device__ __forceinline__ uint32_t Buffer(int k_block) const {
    return shared + k_block % 2 * (Config::kTileN * 4);
  }
  // Called by all threads of the consumer.
  __device__ __forceinline__ void Share(const Entry& entry, int k_block) const {
    const int thread = threadIdx.x % 128;
    if (thread < Config::kTileN / 2) {
      ptx::StoreShared8(Buffer(k_block) + 8 * thread,
                        reinterpret_cast<const uint64_t&>(entry.columns));
    }
    ptx::BarrierSync(1 + consumer, 128);
  }
  template <int kCount>
  __device__ __forceinline__ void Add(float (&total)[kCount], const float (&sums)[kCount],
                                      const Entry& entry, int k_block) const {
    const uint32_t from = Buffer(k_block) + 8 * (threadIdx.x % 4);
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      const uint64_t pair = ptx::LoadShared8(from + 8 * i);
      const float2 of = reinterpret_cast<const float2&>(pair);
      total[i] += sums[i] * (entry.rows.low * of.x);
      total[i + 1] += sums[i + 1] * (entry.rows.low * of.y);
      total[i + 2] += sums[i + 2] * (entry.rows.high * of.x);
      total[i + 3] += sums[i + 3] * (entry.rows.high * of.y);
    }
  }
};

template <typename Config>
using ScalesOfTile =
    std::conditional_t<Config::kScales == Scales::kOfVectors, VectorScales<Config>, BlockScales>;

// A thread's scales of a tile's k-blocks, read a k-block ahead where that has arrived.
template <typename TileScales>
struct ScalesAhead {
  using Entry = typename TileScales::Entry;
  const TileScales& scales;
  Entry next{};
  bool has_next = false;

  __device__ __forceinline__ void Read(int k_block, int k_blocks) {
    has_next = k_block < k_blocks && scales.rows.HasArrived(k_block);
    if (has_next) next = scales.Read(k_block);
  }
  // Those of a k-block whose stage is full.
  __device__ __forceinline__ Entry Of(int k_block) {
    if constexpr (decltype(scales.rows)::kArrive) {
      if (!has_next) {
        scales.rows.Acquire();
        next = scales.Read(k_block);
      }
    }
    return next;
  }
};

// MultiplyBlocks of a tile of two blocks of columns.
template <typename Config, typename TileScales, typename Release>
__device__ __forceinline__ int MultiplyTwoBlocks(Accumulators<Config>& total,
                                                 const GemmSmem<Config>& smem, int consumer,
                                                 Ring<Config::kStages>& stages, int k_blocks,
                                                 const TileScales& scales, Release&& release) {
  static_assert(Config::kTileN == 2 * kScaleBlock && !Config::kLendsStage);
  int last = -1;
  ScalesAhead<TileScales> ahead{scales};
  ahead.Read(0, k_blocks);
  for (int kb = 0; kb < k_blocks; ++kb) {
    ptx::MbarrierWait(smem.Full(stages.index), stages.parity);
    const auto entry = ahead.Of(kb);
    const auto multiply = [&](auto half) {
      constexpr int kHalf = decltype(half)::value;
      float sums[1][kScaleBlock / 2];
      wgmma::Pin(sums[0]);
      wgmma::Fence();
      MultiplyStage<Config>(sums, smem.A(stages.index) + consumer * 8192,
                            smem.B(stages.index) + kHalf * kScaleBlock * kBlockBytes,
                            /*adds=*/false);
      wgmma::Commit();
      if (kHalf == 0) ahead.Read(kb + 1, k_blocks);
      wgmma::Wait<0>();
      wgmma::Pin(sums[0]);
      if (kHalf == 1) release(stages.index);
      scales.template AddHalf<kHalf>(total[0], sums[0], entry);
    };
    multiply(std::integral_constant<int, 0>{});
    multiply(std::integral_constant<int, 1>{});
    last = stages.index;
    stages.Advance();
  }
  return last;
}

// total += a tile's scaled k-blocks. release(stage) is called when a stage has been read, but not
// for a lent one. Returns the last stage.
template <typename Config, typename TileScales, typename Release>
__device__ __forceinline__ int MultiplyBlocks(Accumulators<Config>& total,
                                              const GemmSmem<Config>& smem, int consumer,
                                              Ring<Config::kStages>& stages, int k_blocks,
                                              const TileScales& scales, Release&& release) {
  static_assert(Config::kConsumerM64Blocks == 1);
  if constexpr (Config::kTileN == 2 * kScaleBlock) {
    return MultiplyTwoBlocks<Config>(total, smem, consumer, stages, k_blocks, scales, release);
  }
  constexpr int kHalf = kMultiplySteps / 2;
  int last = -1;
  ScalesAhead<TileScales> ahead{scales};
  ahead.Read(0, k_blocks);
  for (int kb = 0; kb < k_blocks; ++kb) {
    Accumulators<Config> sums;
    ptx::MbarrierWait(smem.Full(stages.index), stages.parity);
    const auto entry = ahead.Of(kb);
    const uint32_t a = smem.A(stages.index) + consumer * 8192, b = smem.B(stages.index);
    PinAll<Config>(sums);
    wgmma::Fence();
    // In one group, a product of 8192 x 7168 x 8192 has been seen to take 13 % longer.
    MultiplyStage<Config, 0, kHalf>(sums, a, b, /*adds=*/false);
    wgmma::Commit();
    MultiplyStage<Config, kHalf>(sums, a, b, /*adds=*/true);
    wgmma::Commit();
    ahead.Read(kb + 1, k_blocks);
    scales.Share(entry, kb);
    wgmma::Wait<0>();
    PinAll<Config>(sums);
    if (!Config::kLendsStage || kb + 1 < k_blocks) release(stages.index);
    last = stages.index;
    stages.Advance();
    scales.Add(total[0], sums[0], entry, kb);
  }
  return last;
}

}  // namespace jflux

#endif  // JFLUX_GPU_BLOCK_SCALES_SM90_CUH_
