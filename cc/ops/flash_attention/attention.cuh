// Code that the kernels of attention share, Hopper's (attention_sm90.cuh) and the portable ones
// (attention_sm80.cuh). Each kernel is persistent:
//
//   pass      an item is             it keeps          and meets           sums
//   kForward  a head's 128 queries   q                 k and v             out in registers
//   kDkv      128 keys of a group    k and v           q and do, of all    dk and dv in registers
//                                                      heads of the group
//   kDq       a head's 128 queries   q and do          k and v             dq in registers
//
// Each sum has one owner, which adds in one order. An item skips the blocks in which no pair has a
// score, by its row of `blocks` (BlockKind).
//
// wgmma and mma.sync give accumulators to a warp's lanes in the same way. A thread has the rows
// lane / 4 and lane / 4 + 8 of its warp's 16, and of every 8 columns 2 * (lane % 4) and the next.
#ifndef JFLUX_OPS_FLASH_ATTENTION_ATTENTION_CUH_
#define JFLUX_OPS_FLASH_ATTENTION_ATTENTION_CUH_

#include <cstdint>

#include "core/numbers.h"
#include "gpu/machine.h"
#include "gpu/ptx.cuh"
#include "gpu/types.cuh"
#include "ops/flash_attention/flash_attention.h"

namespace jflux::attention {

inline constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

struct Args {
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

// The row of an item in `blocks` [1 or B, rows, columns].
__device__ __forceinline__ const int8_t* BlocksOfItem(const Args& args, const int8_t* blocks,
                                                      const Item& item, int32_t rows,
                                                      int32_t columns) {
  const int64_t batch = args.blocks_by_batch ? item.batch : 0;
  return blocks + (batch * rows + item.block) * columns;
}

// ---- Scores -------------------------------------------------------------------------------------

// Which of a thread's two rows accumulator i is in.
__device__ __forceinline__ constexpr int HalfOf(int i) { return i / 2 % 2; }
// Accumulators as an operand A: their columns are the sum's.
template <typename T, int kCount>
__device__ __forceinline__ void PackA(const float (&s)[kCount], uint32_t (&a)[kCount / 8][4]) {
#pragma unroll
  for (int k = 0; k < kCount / 8; ++k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) a[k][i] = Pack<T>(s[8 * k + 2 * i], s[8 * k + 2 * i + 1]);
  }
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

// Positions and segments of a thread's two rows.
struct RowNumbers {
  int32_t position[2], segment[2];
};

// Gives the accumulators of pairs without a score `value`. `columns`: the positions, and behind
// them the segments, of the block that the item meets. kRowsAreKeys: the item's own block is one of
// keys.
template <bool kRowsAreKeys, int kCount>
__device__ __forceinline__ void MaskPairs(const Args& args, float (&s)[kCount],
                                          const RowNumbers& row, uint32_t columns, float value) {
  constexpr int kColumns = 2 * kCount;
  const bool by_segment = args.arrays.q_segments != nullptr;
#pragma unroll
  for (int j = 0; j < kCount / 4; ++j) {
    const uint32_t at = columns + 4 * (8 * j + threadIdx.x % 4 * 2);
    const int2 position = LoadPair(at);
    const int2 segment = by_segment ? LoadPair(at + 4 * kColumns) : int2{0, 0};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int32_t of_column = i % 2 == 0 ? position.x : position.y;
      const int32_t of_row = row.position[i / 2];
      const int32_t key = kRowsAreKeys ? of_row : of_column;
      const int32_t query = kRowsAreKeys ? of_column : of_row;
      // Unsigned, so that it may wrap: kNowhere is out of the span either way.
      const uint32_t distance = static_cast<uint32_t>(key) - static_cast<uint32_t>(query) -
                                static_cast<uint32_t>(args.low);
      const int32_t other = i % 2 == 0 ? segment.x : segment.y;
      if (distance > args.span || other != row.segment[i / 2]) s[4 * j + i] = value;
    }
  }
}

// The same of rows whose numbers are in shared memory, as `columns` are. `rows`: those of the
// item's own block of kRows; `row`: the thread's first one there.
template <bool kRowsAreKeys, int kRows, int kCount>
__device__ __forceinline__ void MaskPairs(const Args& args, float (&s)[kCount], uint32_t rows,
                                          int row, uint32_t columns, float value) {
  const bool by_segment = args.arrays.q_segments != nullptr;
  RowNumbers own{{0, 0}, {0, 0}};
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    own.position[h] = ptx::LoadShared4(rows + 4 * (row + 8 * h));
    if (by_segment) own.segment[h] = ptx::LoadShared4(rows + 4 * (kRows + row + 8 * h));
  }
  MaskPairs<kRowsAreKeys>(args, s, own, columns, value);
}

}  // namespace jflux::attention

#endif  // JFLUX_OPS_FLASH_ATTENTION_ATTENTION_CUH_
