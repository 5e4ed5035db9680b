// Code that the kernels of attention share. Each kernel is persistent, and has three warpgroups:
//
//   0, warp 0   load warp: one lane fills shared memory by TMA: an item's own block of rows, and
//               the stages with the blocks that it meets
//   1 and 2     consumers: wgmma. Each has 64 rows of the item's own block
//
//   pass      an item is             it keeps          and meets           sums
//   kForward  a head's 128 queries   q                 k and v             out in registers
//   kDkv      128 keys of a group    k and v           q and do, of all    dk and dv in registers
//                                                      heads of the group
//   kDq       a head's 128 queries   q and do          k and v             dq in registers
//
// Heads of more than 128 elements have other consumers for kDkv
// (flash_attention_wide_backward_sm90.cuh).
//
// Each sum has one owner, which adds in one order. An item skips the blocks in which no pair has a
// score, by its row of `blocks` (BlockKind). After the last block the load warp announces a stage
// without data, kEnd.
//
// Tiles [rows][width] lie in shared memory as columns of 64 elements, [width / 64][rows][64], in
// the swizzle that wgmma reads (gpu/wgmma.cuh). The same tile is an operand of products over its
// columns (scores) and of products over its rows (sums of rows).
#ifndef JFLUX_OPS_FLASH_ATTENTION_ATTENTION_SM90_CUH_
#define JFLUX_OPS_FLASH_ATTENTION_ATTENTION_SM90_CUH_

#include <cstdint>

#include "core/numbers.h"
#include "gpu/epilogue_sm90.cuh"
#include "gpu/machine.h"
#include "gpu/ptx.cuh"
#include "gpu/ring.cuh"
#include "gpu/wgmma.cuh"
#include "ops/flash_attention/flash_attention.h"

namespace jflux::attention {

inline constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;
inline constexpr int kThreads = 384, kConsumers = 2, kConsumerWarps = 8;
// Registers of a thread of the load warp's warpgroup, and of a consumer's. setmaxnreg redistributes
// those of the launch, 168 for each of 384 threads.
struct Registers {
  int producer, consumer;
  static constexpr bool Fit(Registers r) { return r.producer + 2 * r.consumer <= 3 * 168; }
};

struct Args {
  CUtensorMap q, k, v, d_out;
  FlashAttentionArrays arrays;
  int32_t heads, groups, width, queries, keys;  // H, G, D, s, t
  int32_t padded_queries, padded_keys;
  int32_t query_blocks, key_blocks;  // of the pass
  int32_t items;
  int32_t shared_batches;  // B, if all sequences have one row of `order`; else 1
  int32_t low;
  uint32_t span;
  bool positions_by_batch, blocks_by_batch, wide_out;
  // A score, in units of log2(e), is factor x, where x is q k, or with a softcap tanh(inner q k).
  float factor, inner;
  float scale;
};

// The sequence, head and block of rows of an item.
struct Item {
  int32_t batch, group, head, block;  // head: of kForward and kDq

  // A head's blocks of queries. Heads that share keys lie beside each other.
  static __device__ Item OfQueries(const Args& args, int32_t number) {
    const int32_t shared = args.heads / args.groups, head = number % args.heads;
    Item item = InOrder(args, args.arrays.order, number / args.heads, args.query_blocks);
    item.group = head / shared;
    item.head = head;
    return item;
  }
  static __device__ Item OfKeys(const Args& args, int32_t number) {
    Item item = InOrder(args, args.arrays.order_by_keys, number / args.groups, args.key_blocks);
    item.group = number % args.groups;
    return item;
  }

 private:
  // The sequence and the block at a place of `order`, which is sorted by cost: the most expensive
  // items of all heads and sequences come first.
  static __device__ Item InOrder(const Args& args, const int32_t* order, int32_t place,
                                 int32_t blocks) {
    const int32_t row = order[place / args.shared_batches];
    Item item{};
    item.batch = row / blocks + place % args.shared_batches;
    item.block = row % blocks;
    return item;
  }
};

// The CTA's item after `last`. The CTA with the first item of one round has the last item of the
// next round. Items are sorted by cost, so all CTAs have about as much to do.
__device__ __forceinline__ int32_t NextItem(int32_t last) {
  const auto ctas = static_cast<int32_t>(gridDim.x);
  return last + 2 * (ctas - last % ctas) - 1;
}

// Where a block's positions, or segments, begin in their padded array.
__device__ __forceinline__ int64_t NumbersAt(const Args& args, int32_t batch, int32_t padded,
                                             int32_t first) {
  return (args.positions_by_batch ? static_cast<int64_t>(batch) * padded : 0) + first;
}

// Segments differ from sequence to sequence.
__device__ __forceinline__ int64_t SegmentsAt(int32_t batch, int32_t padded, int32_t first) {
  return static_cast<int64_t>(batch) * padded + first;
}

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

// The row of an item in `blocks` [1 or B, rows, columns].
__device__ __forceinline__ const int8_t* BlocksOfItem(const Args& args, const int8_t* blocks,
                                                      const Item& item, int32_t rows,
                                                      int32_t columns) {
  const int64_t batch = args.blocks_by_batch ? item.batch : 0;
  return blocks + (batch * rows + item.block) * columns;
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

template <typename T, int kCount>
__device__ __forceinline__ void PackA(const float (&s)[kCount], uint32_t (&a)[kCount / 8][4]) {
#pragma unroll
  for (int k = 0; k < kCount / 8; ++k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) a[k][i] = Pack<T>(s[8 * k + 2 * i], s[8 * k + 2 * i + 1]);
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

// ---- Scores -------------------------------------------------------------------------------------

// Which of a thread's two rows accumulator i is in.
__device__ __forceinline__ constexpr int HalfOf(int i) { return i / 2 % 2; }
// The first of a consumer thread's two rows, among the 64 of its warpgroup; the other is 8 below.
__device__ __forceinline__ int FirstRow() {
  return threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
}

// tanh(x), off by 1e-7.
__device__ __forceinline__ float Tanh(float x) {
  return 1.0f - __fdividef(2.0f, 1.0f + ptx::Exp2(2 * kLog2e * x));
}

template <int kCount>
__device__ __forceinline__ void Cap(float (&s)[kCount], float inner) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) s[i] = Tanh(inner * s[i]);
}

// Two numbers from shared memory.
__device__ __forceinline__ int2 LoadPair(uint32_t smem) {
  const uint64_t both = ptx::LoadShared8(smem);
  return make_int2(static_cast<int32_t>(both), static_cast<int32_t>(both >> 32));
}

// Gives the accumulators of pairs without a score `value`. `rows` and `columns`: the positions, and
// behind them the segments, of the item's own block of kRows and of the block that it meets; `row`:
// the thread's first one in its own block. kRowsAreKeys: the item's own block is one of keys.
template <bool kRowsAreKeys, int kRows, int kCount>
__device__ __forceinline__ void MaskPairs(const Args& args, float (&s)[kCount], uint32_t rows,
                                          int row, uint32_t columns, float value) {
  constexpr int kColumns = 2 * kCount;
  const bool by_segment = args.arrays.q_segments != nullptr;
  int32_t row_position[2], row_segment[2] = {0, 0};
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    row_position[h] = ptx::LoadShared4(rows + 4 * (row + 8 * h));
    if (by_segment) row_segment[h] = ptx::LoadShared4(rows + 4 * (kRows + row + 8 * h));
  }
#pragma unroll
  for (int j = 0; j < kCount / 4; ++j) {
    const uint32_t at = columns + 4 * (8 * j + threadIdx.x % 4 * 2);
    const int2 position = LoadPair(at);
    const int2 segment = by_segment ? LoadPair(at + 4 * kColumns) : int2{0, 0};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int32_t of_column = i % 2 == 0 ? position.x : position.y;
      const int32_t of_row = row_position[i / 2];
      const int32_t key = kRowsAreKeys ? of_row : of_column;
      const int32_t query = kRowsAreKeys ? of_column : of_row;
      // Unsigned, so that it may wrap: kNowhere is out of the span either way.
      const uint32_t distance = static_cast<uint32_t>(key) - static_cast<uint32_t>(query) -
                                static_cast<uint32_t>(args.low);
      const int32_t other = i % 2 == 0 ? segment.x : segment.y;
      if (distance > args.span || other != row_segment[i / 2]) s[4 * j + i] = value;
    }
  }
}

}  // namespace jflux::attention

#endif  // JFLUX_OPS_FLASH_ATTENTION_ATTENTION_SM90_CUH_
