// The portable kernels of the backward pass (attention_sm80.cuh, flash_attention_backward.cuh). All
// warps of a CTA copy and multiply:
//
//   kept   rows of an item's own block, of two arrays
//   met    parts of the blocks that the item meets, of two arrays. Two stages: one is copied while
//          the other is multiplied
//
//   pass   keeps      meets      a warp's rows are   and its sums
//   kDkv   k and v    q and do   keys                dk and dv
//   kDq    q and do   k and v    queries             dq
//
//   elements          64               128              256
//   warps, CTAs       4, two on an SM  8                8, dq: 4
//   kept rows         128              128              64; dq meets all keys for each half of 128
//   rows of a part    32               32               16
//   rows of a warp    32               16               16
//   sums of a thread  dk, dv: 64, 64   64, 64           128: four warps have dk, four have dv
//
// So fragments of what is met are multiplied twice where heads have 64 elements.
#ifndef JFLUX_OPS_FLASH_ATTENTION_FLASH_ATTENTION_BACKWARD_SM80_CUH_
#define JFLUX_OPS_FLASH_ATTENTION_FLASH_ATTENTION_BACKWARD_SM80_CUH_

#include "gpu/machine.h"
#include "ops/flash_attention/attention_sm80.cuh"
#include "ops/flash_attention/flash_attention_backward.cuh"

namespace jflux::attention {

template <typename T_, int kWidth_, bool kSoftcap_, AttentionPass kPass>
struct BackwardShape80 {
  using T = T_;
  static constexpr int kWidth = kWidth_;
  static constexpr bool kSoftcap = kSoftcap_, kKeepsKeys = kPass == AttentionPass::kDkv;
  static constexpr AttentionBlocks kBlocks = BlocksOf(kPass, kWidth);
  static constexpr int kOwn = kKeepsKeys ? kBlocks.keys : kBlocks.queries;  // rows of an item
  static constexpr int kBlock = kKeepsKeys ? kBlocks.queries : kBlocks.keys;
  static constexpr int kKept = kWidth <= 128 ? kOwn : 64, kMet = kWidth <= 128 ? 32 : 16;
  static_assert(kOwn % kKept == 0 && kBlock % kMet == 0);
  static constexpr int kSlabs = kWidth == 64 ? 2 : 1;  // of a warp
  // Whether dk and dv have warps of their own.
  static constexpr bool kParts = kKeepsKeys && kWidth > 128;
  static constexpr int kSums = kKeepsKeys && !kParts ? 2 : 1;
  static constexpr int kRowWarps = kKept / (16 * kSlabs);
  static constexpr int kThreads = 32 * kRowWarps * (kParts ? 2 : 1);
  static constexpr int kStages = 2, kCtasPerSm = kWidth == 64 ? 2 : 1;
  // Of what is met: positions, segments; base, delta.
  static constexpr int kVectors = kKeepsKeys ? 4 : 2;
  static constexpr int kKeptBytes = kKept * kWidth * 2, kMetBytes = kMet * kWidth * 2;
  // Shared memory, in this order: two kept tiles, two tiles to a stage, vectors of each stage.
  static constexpr int kMetOffset = 2 * kKeptBytes;
  static constexpr int kVectorsOffset = kMetOffset + 2 * kStages * kMetBytes;
  static constexpr int kSmemBytes = kVectorsOffset + kStages * kVectors * kMet * 4;
  // An SM of compute capability 8.6 has 1 KiB more than a CTA may have, and takes 1 KiB for each.
  static_assert(kCtasPerSm * (kSmemBytes + 1024) <= kPortable.smem_bytes + 1024);
};

template <typename Shape>
struct BackwardSmem80 {
  uint32_t base;

  __device__ uint32_t Kept(int tile) const { return base + tile * Shape::kKeptBytes; }
  __device__ uint32_t Met(int stage, int tile) const {
    return base + Shape::kMetOffset + (2 * stage + tile) * Shape::kMetBytes;
  }
  // Positions, segments, base, delta.
  __device__ uint32_t Vector(int stage, int which = 0) const {
    return base + Shape::kVectorsOffset + (stage * Shape::kVectors + which) * Shape::kMet * 4;
  }
};

// The parts of blocks that an item meets, kMet rows each, one after the other. All lanes of a warp.
template <typename Shape>
class MetParts80 {
 public:
  int32_t head;   // of the queries
  int32_t first;  // row
  BlockKind kind;

  __device__ MetParts80(const Args& args, const Item& item)
      : head(Shape::kKeepsKeys ? item.group * (args.heads / args.groups) : item.head),
        first(-Shape::kMet),
        kind(BlockKind::kEnd),
        after_(Shape::kKeepsKeys ? head + args.heads / args.groups : head + 1),
        columns_(Shape::kKeepsKeys ? args.query_blocks : args.key_blocks),
        row_(BlocksOfItem(args, Shape::kKeepsKeys ? args.arrays.blocks_by_keys : args.arrays.blocks,
                          item, Shape::kKeepsKeys ? args.key_blocks : args.query_blocks, columns_)),
        blocks_(row_, columns_) {}

  // False after the last one.
  __device__ __forceinline__ bool Next(const Args& args) {
    first += Shape::kMet;
    if (first % Shape::kBlock != 0 && first < (Shape::kKeepsKeys ? args.queries : args.keys)) {
      return true;
    }
    int32_t block;
    while ((kind = blocks_.Next(&block)) == BlockKind::kEnd) {
      if (++head == after_) return false;
      blocks_ = BlockWalk80(row_, columns_);
    }
    first = block * Shape::kBlock;
    return true;
  }

 private:
  int32_t after_, columns_;  // `after_`: the head after the last one
  const int8_t* row_;
  BlockWalk80 blocks_;
};

// ---- Copies -------------------------------------------------------------------------------------

// Rows of q (`tile` 0) and do, or of k and v. `head`: of queries or of keys.
template <bool kQueries>
__device__ __forceinline__ HeadRows80 RowsOf80(const Args& args, int tile, int32_t batch,
                                               int32_t head) {
  const FlashAttentionArrays& arrays = args.arrays;
  return kQueries ? HeadRows80::Of(tile == 0 ? arrays.q : arrays.d_out, batch, args.queries,
                                   args.heads, head, args.width)
                  : HeadRows80::Of(tile == 0 ? arrays.k : arrays.v, batch, args.keys, args.groups,
                                   head, args.width);
}

// Copies a part to a stage. All threads.
template <typename Shape>
__device__ __forceinline__ void CopyMet80(const Args& args, const BackwardSmem80<Shape>& smem,
                                          int stage, const Item& item,
                                          const MetParts80<Shape>& part) {
  constexpr bool kQueries = Shape::kKeepsKeys;
  const FlashAttentionArrays& arrays = args.arrays;
#pragma unroll
  for (int tile = 0; tile < 2; ++tile) {
    CopyRows80<Shape::kMet, Shape::kWidth, Shape::kThreads>(
        smem.Met(stage, tile),
        RowsOf80<kQueries>(args, tile, item.batch, kQueries ? part.head : item.group), part.first,
        args.width);
  }
  CopyPositions80<Shape::kMet>(
      args, smem.Vector(stage), kQueries ? arrays.q_positions : arrays.k_positions,
      kQueries ? arrays.q_segments : arrays.k_segments,
      kQueries ? args.padded_queries : args.padded_keys, item.batch, part.first);
  if constexpr (kQueries) {
    const int64_t at =
        (static_cast<int64_t>(item.batch) * args.heads + part.head) * args.padded_queries +
        part.first;
    const int thread = static_cast<int>(threadIdx.x) - Shape::kMet / 2;  // behind the positions'
    CopyNumbers80<Shape::kMet>(smem.Vector(stage, 2), arrays.base + at, thread);
    CopyNumbers80<Shape::kMet>(smem.Vector(stage, 3), arrays.delta + at, thread - Shape::kMet / 4);
  }
}

// Copies kKept rows from `first` on. All threads.
template <typename Shape>
__device__ __forceinline__ void CopyKept80(const Args& args, const BackwardSmem80<Shape>& smem,
                                           const Item& item, int32_t first) {
  constexpr bool kQueries = !Shape::kKeepsKeys;
#pragma unroll
  for (int tile = 0; tile < 2; ++tile) {
    CopyRows80<Shape::kKept, Shape::kWidth, Shape::kThreads>(
        smem.Kept(tile),
        RowsOf80<kQueries>(args, tile, item.batch, kQueries ? item.head : item.group), first,
        args.width);
  }
}

// ---- A warp's rows ------------------------------------------------------------------------------

// The rows of a warp, from `first` on in the array, as one of its threads has them: `first` and 8
// below it of each slab.
template <typename Shape>
struct OwnRows80 {
  int32_t first;
  uint32_t kept;                                          // where the warp's begin in a kept tile
  float base[Shape::kSlabs][2], delta[Shape::kSlabs][2];  // of queries

  __device__ __forceinline__ OwnRows80(const Args& args, const Item& item, int warp,
                                       int32_t first_kept) {
    const int slab = warp % Shape::kRowWarps * Shape::kSlabs;
    first = first_kept + 16 * slab + static_cast<int>(threadIdx.x) % 32 / 4;
    kept = slab * kSlabBytes80;
    if constexpr (!Shape::kKeepsKeys) {
      const int64_t at =
          (static_cast<int64_t>(item.batch) * args.heads + item.head) * args.padded_queries + first;
#pragma unroll
      for (int i = 0; i < Shape::kSlabs; ++i) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          base[i][h] = args.arrays.base[at + 16 * i + 8 * h];
          delta[i][h] = args.arrays.delta[at + 16 * i + 8 * h];
        }
      }
    }
  }

  // Positions and segments of a slab's. From global memory: few blocks have a mask, and shared
  // memory has no room for those of two CTAs.
  __device__ __forceinline__ RowNumbers Numbers(const Args& args, const Item& item,
                                                int slab) const {
    constexpr bool kKeepsKeys = Shape::kKeepsKeys;
    const FlashAttentionArrays& arrays = args.arrays;
    const int32_t padded = kKeepsKeys ? args.padded_keys : args.padded_queries;
    const int32_t row = first + 16 * slab;
    const int32_t* positions = (kKeepsKeys ? arrays.k_positions : arrays.q_positions) +
                               NumbersAt(args, item.batch, padded, row);
    RowNumbers numbers{{positions[0], positions[8]}, {0, 0}};
    if (arrays.q_segments != nullptr) {
      const int32_t* segments = (kKeepsKeys ? arrays.k_segments : arrays.q_segments) +
                                SegmentsAt(item.batch, padded, row);
      numbers.segment[0] = segments[0], numbers.segment[1] = segments[8];
    }
    return numbers;
  }
};

// A thread's sums of its rows.
template <typename Shape>
using RowSums80 = float[Shape::kSlabs][Shape::kWidth / 2];

// Adds a stage to ds times the first of what is met, dk or dq, and to dv.
template <typename Shape>
__device__ __forceinline__ void AddPart80(const Args& args, const BackwardSmem80<Shape>& smem,
                                          int stage, BlockKind kind, const Item& item,
                                          const OwnRows80<Shape>& own, bool sums_ds, bool sums_dv,
                                          RowSums80<Shape>& ds_sums, RowSums80<Shape>& dv) {
  using T = typename Shape::T;
  constexpr int kCount = Shape::kMet / 2, kSlabs = Shape::kSlabs;
  // Of the queries of accumulators 4 j to 4 j + 3: base (`which` 2), delta (3).
  const auto vector = [&](int slab, int which, int j) {
    if constexpr (Shape::kKeepsKeys) {
      const float2 pair = LoadFloats(smem.Vector(stage, which) + 4 * (8 * j + threadIdx.x % 4 * 2));
      return make_float4(pair.x, pair.y, pair.x, pair.y);
    } else {
      const float (&of)[2] = which == 2 ? own.base[slab] : own.delta[slab];
      return make_float4(of[0], of[0], of[1], of[1]);
    }
  };
  float s[kSlabs][kCount];
  uint32_t a[kSlabs][kCount / 8][4];
  MultiplyColumns80<T, Shape::kWidth, Shape::kKept>(s, smem.Kept(0) + own.kept, smem.Met(stage, 0));
#pragma unroll
  for (int i = 0; i < kSlabs; ++i) {
    float p[kCount];
    Probabilities<Shape::kSoftcap>(args, s[i], p, [&](int j) { return vector(i, 2, j); });
    if (kind == BlockKind::kSome) {
      MaskPairs<Shape::kKeepsKeys>(args, p, own.Numbers(args, item, i), smem.Vector(stage), 0.0f);
    }
    if constexpr (Shape::kKeepsKeys) PackA<T>(p, a[i]);
    Slopes<Shape::kSoftcap>(s[i], p);
  }
  if (sums_dv) MultiplyRows80<T>(dv, a, smem.Met(stage, 1));
  if (!sums_ds) return;
  float dp[kSlabs][kCount];
  MultiplyColumns80<T, Shape::kWidth, Shape::kKept>(dp, smem.Kept(1) + own.kept,
                                                    smem.Met(stage, 1));
#pragma unroll
  for (int i = 0; i < kSlabs; ++i) {
    ScoreGradients(s[i], dp[i], [&](int j) { return vector(i, 3, j); });
    PackA<T>(dp[i], a[i]);
  }
  MultiplyRows80<T>(ds_sums, a, smem.Met(stage, 0));
}

template <typename Shape>
__device__ __forceinline__ void StoreSums80(const Args& args, const Item& item,
                                            const OwnRows80<Shape>& own, float* to,
                                            const RowSums80<Shape>& sums, float scale) {
  constexpr bool kKeepsKeys = Shape::kKeepsKeys;
#pragma unroll
  for (int i = 0; i < Shape::kSlabs; ++i) {
    StoreGradient<Shape::kWidth>(
        to, sums[i], scale, item.batch, kKeepsKeys ? args.keys : args.queries, own.first + 16 * i,
        kKeepsKeys ? args.groups : args.heads, kKeepsKeys ? item.group : item.head, args.width);
  }
}

template <typename Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kCtasPerSm)
    BackwardKernel80(const __grid_constant__ Args args) {
  constexpr bool kKeepsKeys = Shape::kKeepsKeys;
  JFLUX_DYNAMIC_SHARED(uint8_t, 1024, storage);
  const BackwardSmem80<Shape> smem{ptx::SmemAddress(storage)};
  const int warp = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 32, 0);
  const bool sums_ds = !Shape::kParts || warp < Shape::kRowWarps;
  const bool sums_dv = kKeepsKeys && (!Shape::kParts || !sums_ds);
  for (int32_t number = blockIdx.x; number < args.items; number = NextItem(number)) {
    const Item item = kKeepsKeys ? Item::OfKeys(args, number) : Item::OfQueries(args, number);
#pragma unroll 1
    for (int32_t at = 0; at < Shape::kOwn; at += Shape::kKept) {
      const int32_t first = item.block * Shape::kOwn + at;
      if (first >= (kKeepsKeys ? args.keys : args.queries)) break;
      const OwnRows80<Shape> own(args, item, warp, first);
      MetParts80<Shape> part(args, item);
      RowSums80<Shape> sums[Shape::kSums] = {};
      RowSums80<Shape>&ds_sums = sums[0], &dv = sums[Shape::kSums - 1];
      bool has = part.Next(args);
      if (has) {
        __syncthreads();  // nobody reads the last kept rows any more
        CopyKept80(args, smem, item, first);
        CopyMet80(args, smem, 0, item, part);
        ptx::CopyAsyncCommit();
      }
      for (int stage = 0; has; stage ^= 1) {
        ptx::CopyAsyncWait<0>();
        __syncthreads();  // the stage has come, and nobody reads the other one any more
        const BlockKind kind = part.kind;
        has = part.Next(args);
        if (has) CopyMet80(args, smem, stage ^ 1, item, part);
        ptx::CopyAsyncCommit();
        AddPart80(args, smem, stage, kind, item, own, sums_ds, sums_dv, ds_sums, dv);
      }
      if (sums_ds) {
        StoreSums80(args, item, own, kKeepsKeys ? args.arrays.dk : args.arrays.dq, ds_sums,
                    args.scale);
      }
      if (sums_dv) StoreSums80(args, item, own, args.arrays.dv, dv, 1.0f);
    }
  }
}

}  // namespace jflux::attention

#endif  // JFLUX_OPS_FLASH_ATTENTION_FLASH_ATTENTION_BACKWARD_SM80_CUH_
