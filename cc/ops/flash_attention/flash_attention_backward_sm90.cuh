// The backward pass (attention_sm90.cuh; arXiv 2307.08691, algorithm 2), as two kernels. With
// p = exp(score - log-sum-exp) and the slope of the score:
//
//   dv = p^T do     ds = p (do v^T - delta) slope     dk = ds^T q     dq = ds k
//
// The kernel of dk and dv computes transposed scores, k q^T: p^T and ds^T are accumulators there,
// and so operands in registers of the sums over queries. That of dq has them the other way round.
// Both compute scores and do v^T: seven products where five would do, for sums without atomics.
//
// Heads of more than 128 elements have consumers of their own
// (flash_attention_wide_backward_sm90.cuh).
#ifndef JFLUX_OPS_FLASH_ATTENTION_FLASH_ATTENTION_BACKWARD_SM90_CUH_
#define JFLUX_OPS_FLASH_ATTENTION_FLASH_ATTENTION_BACKWARD_SM90_CUH_

#include "ops/flash_attention/attention_sm90.cuh"

namespace jflux::attention {

// kKept: rows of an item's own block, in two tiles. kMet: rows of the blocks that it meets, two
// tiles and `kVectors` vectors of 4-byte numbers to a stage.
//
// dq of wide heads has no room for two stages of both tiles. So the second tile, v, is in a ring of
// its own of one stage (kHasValueRing): it is free long before the first one.
template <typename T_, int kWidth_, bool kSoftcap_, AttentionPass kPass>
struct BackwardShape {
  using T = T_;
  static constexpr int kWidth = kWidth_;
  static constexpr bool kSoftcap = kSoftcap_;
  static constexpr AttentionBlocks kBlocks = BlocksOf(kPass, kWidth);
  static constexpr bool kKeepsKeys = kPass == AttentionPass::kDkv, kIsWide = kWidth > 128;
  static constexpr int kKept = kKeepsKeys ? kBlocks.keys : kBlocks.queries;
  static constexpr int kMet = kKeepsKeys ? kBlocks.queries : kBlocks.keys;
  static_assert(kKept == (kIsWide && kKeepsKeys ? 64 : 64 * kConsumers) && kMet == 64);
  // Sums and two tiles of scores are 192. The load warp then spills a few, which costs nothing.
  static constexpr Registers kRegisters =
      kKeepsKeys && kWidth == 128 ? Registers{24, 240} : Registers{40, 232};
  static_assert(Registers::Fit(kRegisters));
  static constexpr int kVectors = kKeepsKeys ? 4 : 2;  // positions, segments; base, delta
  static constexpr bool kHasValueRing = kIsWide && !kKeepsKeys;
  static constexpr int kStages = kIsWide ? 2 : 3;
  static constexpr int kMetTiles = kHasValueRing ? kStages + 1 : 2 * kStages;
  static constexpr int kKeptBytes = kKept * kWidth * 2, kMetBytes = kMet * kWidth * 2;
  // Shared memory, in this order.
  static constexpr int kMetOffset = 2 * kKeptBytes;
  static constexpr int kKeptNumbersOffset = kMetOffset + kMetTiles * kMetBytes;
  static constexpr int kMetNumbersOffset = kKeptNumbersOffset + kKept * 8;
  static constexpr int kKindsOffset = kMetNumbersOffset + kStages * kMet * 4 * kVectors;
  static constexpr int kBarriersOffset = kKindsOffset + 16;
  static constexpr int kSmemBytes = kBarriersOffset + 8 * (2 + 2 * kStages + 2 * kHasValueRing);
  static_assert(4 * kStages <= 16 && kSmemBytes <= 232448);
};

template <typename Shape>
struct BackwardSmem {
  uint32_t base;

  // kDkv keeps k and v and meets q and do; kDq the other way round.
  __device__ uint32_t Kept(int tile) const { return base + tile * Shape::kKeptBytes; }
  __device__ uint32_t Met(int stage, int tile) const {
    const int at = !Shape::kHasValueRing ? 2 * stage + tile : tile == 0 ? stage : Shape::kStages;
    return base + Shape::kMetOffset + at * Shape::kMetBytes;
  }
  __device__ uint32_t KeptNumbers() const { return base + Shape::kKeptNumbersOffset; }
  // Positions, segments, base, delta.
  __device__ uint32_t MetNumbers(int stage, int vector = 0) const {
    return base + Shape::kMetNumbersOffset + (stage * Shape::kVectors + vector) * Shape::kMet * 4;
  }
  __device__ uint32_t Kind(int stage) const { return base + Shape::kKindsOffset + 4 * stage; }
  __device__ uint32_t Bar(int i) const { return base + Shape::kBarriersOffset + 8 * i; }
  __device__ uint32_t KeptFull() const { return Bar(0); }
  __device__ uint32_t KeptEmpty() const { return Bar(1); }
  __device__ uint32_t Full(int stage) const { return Bar(2 + stage); }
  __device__ uint32_t Empty(int stage) const { return Bar(2 + Shape::kStages + stage); }
  // Of the stage of v, with kHasValueRing.
  __device__ uint32_t ValueFull() const { return Bar(2 + 2 * Shape::kStages); }
  __device__ uint32_t ValueEmpty() const { return Bar(3 + 2 * Shape::kStages); }
};

template <typename Shape>
__device__ __forceinline__ void RunBackwardLoads(const Args& args,
                                                 const BackwardSmem<Shape>& smem) {
  constexpr bool kKeepsKeys = Shape::kKeepsKeys;
  Ring<Shape::kStages> stages;
  uint32_t parity = 1, value_parity = 1;  // of KeptEmpty, and of ValueEmpty
  const bool leads = ptx::ElectOne();
  const FlashAttentionArrays& arrays = args.arrays;
  const CUtensorMap* kept[2] = {kKeepsKeys ? &args.k : &args.q, kKeepsKeys ? &args.v : &args.d_out};
  const CUtensorMap* met[2] = {kKeepsKeys ? &args.q : &args.k, kKeepsKeys ? &args.d_out : &args.v};
  const int32_t* const kept_numbers[2] = {kKeepsKeys ? arrays.k_positions : arrays.q_positions,
                                          kKeepsKeys ? arrays.k_segments : arrays.q_segments};
  const int32_t* const met_numbers[2] = {kKeepsKeys ? arrays.q_positions : arrays.k_positions,
                                         kKeepsKeys ? arrays.q_segments : arrays.k_segments};
  const int32_t kept_padded = kKeepsKeys ? args.padded_keys : args.padded_queries;
  const int32_t met_padded = kKeepsKeys ? args.padded_queries : args.padded_keys;
  const int32_t rows = kKeepsKeys ? args.key_blocks : args.query_blocks;
  const int32_t columns = kKeepsKeys ? args.query_blocks : args.key_blocks;
  const int8_t* blocks = kKeepsKeys ? arrays.blocks_by_keys : arrays.blocks;
  const int32_t shared = args.heads / args.groups;

  for (int32_t number = blockIdx.x; number < args.items; number = NextItem(number)) {
    const Item item = kKeepsKeys ? Item::OfKeys(args, number) : Item::OfQueries(args, number);
    if (leads) {
      ptx::MbarrierWait(smem.KeptEmpty(), parity);
      const uint32_t bar = smem.KeptFull();
      const int32_t first = item.block * Shape::kKept;
      ptx::MbarrierArriveExpectTx(bar, 2 * Shape::kKeptBytes + BytesOfNumbers<Shape::kKept>(args));
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        LoadRows<Shape::kKept, Shape::kWidth>(smem.Kept(tile), kept[tile], bar, item.batch, first,
                                              kKeepsKeys ? item.group : item.head);
      }
      LoadNumbers<Shape::kKept>(args, smem.KeptNumbers(), bar, kept_numbers[0], kept_numbers[1],
                                kept_padded, item.batch, first);
    }
    parity ^= 1;
    // The heads of queries that share these keys, one after the other.
    for (int32_t i = 0; i < (kKeepsKeys ? shared : 1); ++i) {
      const int32_t head = kKeepsKeys ? item.group * shared + i : item.group;
      const auto load = [&](int32_t block, int kind) {
        if (leads) {
          const int stage = stages.index;
          const uint32_t bar = smem.Full(stage);
          const int32_t first = block * Shape::kMet;
          ptx::MbarrierWait(smem.Empty(stage), stages.parity ^ 1);
          ptx::StoreShared4(smem.Kind(stage), kind);
          constexpr int kTiles = Shape::kHasValueRing ? 1 : 2;
          constexpr uint32_t kBytes =
              kTiles * Shape::kMetBytes + (kKeepsKeys ? 2 * Shape::kMet * 4 : 0);
          ptx::MbarrierArriveExpectTx(bar, kBytes + BytesOfNumbers<Shape::kMet>(args));
#pragma unroll
          for (int tile = 0; tile < kTiles; ++tile) {
            LoadRows<Shape::kMet, Shape::kWidth>(smem.Met(stage, tile), met[tile], bar, item.batch,
                                                 first, head);
          }
          LoadNumbers<Shape::kMet>(args, smem.MetNumbers(stage), bar, met_numbers[0],
                                   met_numbers[1], met_padded, item.batch, first);
          if constexpr (kKeepsKeys) {
            const int64_t at =
                (static_cast<int64_t>(item.batch) * args.heads + head) * args.padded_queries +
                first;
            ptx::BulkLoad(smem.MetNumbers(stage, 2), arrays.base + at, Shape::kMet * 4, bar);
            ptx::BulkLoad(smem.MetNumbers(stage, 3), arrays.delta + at, Shape::kMet * 4, bar);
          }
          if constexpr (Shape::kHasValueRing) {
            ptx::MbarrierWait(smem.ValueEmpty(), value_parity);
            ptx::MbarrierArriveExpectTx(smem.ValueFull(), Shape::kMetBytes);
            LoadRows<Shape::kMet, Shape::kWidth>(smem.Met(stage, 1), met[1], smem.ValueFull(),
                                                 item.batch, first, head);
            value_parity ^= 1;
          }
        }
        stages.Advance();
      };
      ForEachBlock(BlocksOfItem(args, blocks, item, rows, columns), columns, load);
    }
    if (leads) {
      ptx::MbarrierWait(smem.Empty(stages.index), stages.parity ^ 1);
      ptx::StoreShared4(smem.Kind(stages.index), static_cast<int>(BlockKind::kEnd));
      ptx::MbarrierArrive(smem.Full(stages.index));
    }
    stages.Advance();
  }
}

// s = the kept rows at `a` times the first tile of a stage, and dp = those at `b` times the second
// one, both over columns. s is complete afterwards; dp is not. `value_parity`: of ValueFull.
template <typename Shape>
__device__ __forceinline__ void MultiplyBoth(float (&s)[Shape::kMet / 2],
                                             float (&dp)[Shape::kMet / 2], uint32_t a, uint32_t b,
                                             const BackwardSmem<Shape>& smem, int stage,
                                             uint32_t value_parity = 0) {
  using T = typename Shape::T;
  wgmma::Fence();
  MultiplyColumns<T, Shape::kWidth, Shape::kKept>(s, a, smem.Met(stage, 0));
  wgmma::Commit();
  if constexpr (Shape::kHasValueRing) ptx::MbarrierWait(smem.ValueFull(), value_parity);
  MultiplyColumns<T, Shape::kWidth, Shape::kKept>(dp, b, smem.Met(stage, 1));
  wgmma::Commit();
  wgmma::Pin(s);
  wgmma::Wait<1>();
  wgmma::Pin(s);
}

// Two floats from shared memory.
__device__ __forceinline__ float2 LoadFloats(uint32_t smem) {
  const int2 v = LoadPair(smem);
  return make_float2(__int_as_float(v.x), __int_as_float(v.y));
}

// Products of queries and keys -> p. base(j) has those of the queries of accumulators 4 j to
// 4 j + 3. With a softcap `s` becomes x (Args::factor).
template <bool kSoftcap, int kCount, typename Base>
__device__ __forceinline__ void Probabilities(const Args& args, float (&s)[kCount],
                                              float (&p)[kCount], Base&& base) {
  if constexpr (kSoftcap) Cap(s, args.inner);
#pragma unroll
  for (int j = 0; j < kCount / 4; ++j) {
    const float4 b = base(j);
    p[4 * j] = ptx::Exp2(fmaf(s[4 * j], args.factor, -b.x));
    p[4 * j + 1] = ptx::Exp2(fmaf(s[4 * j + 1], args.factor, -b.y));
    p[4 * j + 2] = ptx::Exp2(fmaf(s[4 * j + 2], args.factor, -b.z));
    p[4 * j + 3] = ptx::Exp2(fmaf(s[4 * j + 3], args.factor, -b.w));
  }
}

// What Probabilities left in `s` -> p times the slope of the score, less the factor `scale`.
template <bool kSoftcap, int kCount>
__device__ __forceinline__ void Slopes(float (&s)[kCount], const float (&p)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) s[i] = kSoftcap ? p[i] * (1.0f - s[i] * s[i]) : p[i];
}

// do v^T in `dp`, and Slopes -> ds in `dp`. `delta` as `base` above.
template <int kCount, typename Delta>
__device__ __forceinline__ void ScoreGradients(const float (&slopes)[kCount], float (&dp)[kCount],
                                               Delta&& delta) {
#pragma unroll
  for (int j = 0; j < kCount / 4; ++j) {
    const float4 d = delta(j);
    dp[4 * j] = slopes[4 * j] * (dp[4 * j] - d.x);
    dp[4 * j + 1] = slopes[4 * j + 1] * (dp[4 * j + 1] - d.y);
    dp[4 * j + 2] = slopes[4 * j + 2] * (dp[4 * j + 2] - d.z);
    dp[4 * j + 3] = slopes[4 * j + 3] * (dp[4 * j + 3] - d.w);
  }
}

// Writes a thread's two rows, `head` of [B, rows, heads, D].
template <int kWidth>
__device__ __forceinline__ void StoreGradient(float* to, const float (&d)[kWidth / 2], float scale,
                                              int32_t batch, int32_t rows, int32_t first,
                                              int32_t heads, int32_t head, int32_t width) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int32_t row = first + 8 * h;
    if (row >= rows) continue;
    float* at = to + ((static_cast<int64_t>(batch) * rows + row) * heads + head) * width;
#pragma unroll
    for (int j = 0; j < kWidth / 8; ++j) {
      const int column = 8 * j + threadIdx.x % 4 * 2;
      if (column >= width) break;
      *reinterpret_cast<float2*>(at + column) =
          make_float2(d[4 * j + 2 * h] * scale, d[4 * j + 2 * h + 1] * scale);
    }
  }
}

template <typename Shape>
__device__ __forceinline__ void RunDkvConsumer(const Args& args, const BackwardSmem<Shape>& smem,
                                               int consumer) {
  using T = typename Shape::T;
  constexpr int kWidth = Shape::kWidth, kCount = Shape::kMet / 2;
  Ring<Shape::kStages> stages;
  uint32_t parity = 0;  // of KeptFull
  const int row = 64 * consumer + FirstRow();
  for (int32_t number = blockIdx.x; number < args.items; number = NextItem(number)) {
    ptx::MbarrierWait(smem.KeptFull(), parity);
    parity ^= 1;
    const uint32_t k = smem.Kept(0) + consumer * 8192, v = smem.Kept(1) + consumer * 8192;
    float dk[kWidth / 2], dv[kWidth / 2];
#pragma unroll
    for (int i = 0; i < kWidth / 2; ++i) dk[i] = dv[i] = 0;
    for (;;) {
      const int stage = stages.index;
      ptx::MbarrierWait(smem.Full(stage), stages.parity);
      const BlockKind kind = LoadKind(smem.Kind(stage));
      if (kind == BlockKind::kEnd) break;
      float s[kCount], dp[kCount], p[kCount];
      uint32_t p_t[kCount / 8][4], ds_t[kCount / 8][4];
      MultiplyBoth<Shape>(s, dp, k, v, smem, stage);
      // Of the columns' queries.
      const auto vector = [&](int which, int j) {
        const float2 pair =
            LoadFloats(smem.MetNumbers(stage, which) + 4 * (8 * j + threadIdx.x % 4 * 2));
        return make_float4(pair.x, pair.y, pair.x, pair.y);
      };
      Probabilities<Shape::kSoftcap>(args, s, p, [&](int j) { return vector(2, j); });
      if (kind == BlockKind::kSome) {
        MaskPairs</*kRowsAreKeys=*/true, Shape::kKept>(args, p, smem.KeptNumbers(), row,
                                                       smem.MetNumbers(stage), 0.0f);
      }
      PackA<T>(p, p_t);
      Slopes<Shape::kSoftcap>(s, p);
      wgmma::Pin(dv);
      PinA(p_t);
      wgmma::Fence();
      MultiplyRows<T>(dv, p_t, smem.Met(stage, 1), true);
      wgmma::Commit();
      wgmma::Pin(dp);
      wgmma::Wait<1>();
      wgmma::Pin(dp);
      ScoreGradients(s, dp, [&](int j) { return vector(3, j); });
      PackA<T>(dp, ds_t);
      wgmma::Pin(dk);
      PinA(ds_t);
      wgmma::Fence();
      MultiplyRows<T>(dk, ds_t, smem.Met(stage, 0), true);
      wgmma::Commit();
      wgmma::Wait<0>();
      wgmma::Pin(dk);
      wgmma::Pin(dv);
      PinA(p_t);
      PinA(ds_t);
      WarpArrive(smem.Empty(stage));
      stages.Advance();
    }
    WarpArrive(smem.KeptEmpty());
    WarpArrive(smem.Empty(stages.index));  // of kEnd
    stages.Advance();
    const Item item = Item::OfKeys(args, number);
    const int32_t first = item.block * Shape::kKept + row;
    StoreGradient<kWidth>(args.arrays.dk, dk, args.scale, item.batch, args.keys, first, args.groups,
                          item.group, args.width);
    StoreGradient<kWidth>(args.arrays.dv, dv, 1.0f, item.batch, args.keys, first, args.groups,
                          item.group, args.width);
  }
}

template <typename Shape>
__device__ __forceinline__ void RunDqConsumer(const Args& args, const BackwardSmem<Shape>& smem,
                                              int consumer) {
  using T = typename Shape::T;
  constexpr int kWidth = Shape::kWidth, kCount = Shape::kMet / 2;
  Ring<Shape::kStages> stages;
  uint32_t parity = 0;  // of KeptFull
  const int row = 64 * consumer + FirstRow();
  for (int32_t number = blockIdx.x; number < args.items; number = NextItem(number)) {
    const Item item = Item::OfQueries(args, number);
    float base[2], delta[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int64_t at =
          (static_cast<int64_t>(item.batch) * args.heads + item.head) * args.padded_queries +
          item.block * Shape::kKept + row + 8 * h;
      base[h] = args.arrays.base[at];
      delta[h] = args.arrays.delta[at];
    }
    ptx::MbarrierWait(smem.KeptFull(), parity);
    parity ^= 1;
    const uint32_t q = smem.Kept(0) + consumer * 8192, d_out = smem.Kept(1) + consumer * 8192;
    float dq[kWidth / 2];
#pragma unroll
    for (float& d : dq) d = 0;
    for (;;) {
      const int stage = stages.index;
      ptx::MbarrierWait(smem.Full(stage), stages.parity);
      const BlockKind kind = LoadKind(smem.Kind(stage));
      if (kind == BlockKind::kEnd) break;
      float s[kCount], dp[kCount], p[kCount];
      uint32_t ds[kCount / 8][4];
      MultiplyBoth<Shape>(s, dp, q, d_out, smem, stage);
      Probabilities<Shape::kSoftcap>(
          args, s, p, [&](int) { return make_float4(base[0], base[0], base[1], base[1]); });
      if (kind == BlockKind::kSome) {
        MaskPairs</*kRowsAreKeys=*/false, Shape::kKept>(args, p, smem.KeptNumbers(), row,
                                                        smem.MetNumbers(stage), 0.0f);
      }
      Slopes<Shape::kSoftcap>(s, p);
      wgmma::Pin(dp);
      wgmma::Wait<0>();
      wgmma::Pin(dp);
      ScoreGradients(s, dp,
                     [&](int) { return make_float4(delta[0], delta[0], delta[1], delta[1]); });
      PackA<T>(dp, ds);
      wgmma::Pin(dq);
      PinA(ds);
      wgmma::Fence();
      MultiplyRows<T>(dq, ds, smem.Met(stage, 0), true);
      wgmma::Commit();
      wgmma::Wait<0>();
      wgmma::Pin(dq);
      PinA(ds);
      WarpArrive(smem.Empty(stage));
      stages.Advance();
    }
    WarpArrive(smem.KeptEmpty());
    WarpArrive(smem.Empty(stages.index));  // of kEnd
    stages.Advance();
    StoreGradient<kWidth>(args.arrays.dq, dq, args.scale, item.batch, args.queries,
                          item.block * Shape::kKept + row, args.heads, item.head, args.width);
  }
}

// consume(smem, consumer) is a consumer's part.
template <typename Shape, typename Consume>
__device__ __forceinline__ void RunBackward(const Args& args, Consume&& consume) {
  JFLUX_DYNAMIC_SHARED(uint8_t, 1024, storage);
  const BackwardSmem<Shape> smem{ptx::SmemAddress(storage)};
  const int warp = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 32, 0);
  if (threadIdx.x == 0) {
    ptx::MbarrierInit(smem.KeptFull(), 1);
    ptx::MbarrierInit(smem.KeptEmpty(), kConsumerWarps);
    for (int i = 0; i < Shape::kStages; ++i) {
      ptx::MbarrierInit(smem.Full(i), 1);
      ptx::MbarrierInit(smem.Empty(i), kConsumerWarps);
    }
    if constexpr (Shape::kHasValueRing) {
      ptx::MbarrierInit(smem.ValueFull(), 1);
      ptx::MbarrierInit(smem.ValueEmpty(), kConsumerWarps);
    }
    ptx::FenceMbarrierInit();
  }
  __syncthreads();
  if (warp < 4) {
    ptx::RegistersDown<Shape::kRegisters.producer>();
    if (warp == 0) RunBackwardLoads<Shape>(args, smem);
  } else {
    ptx::RegistersUp<Shape::kRegisters.consumer>();
    consume(smem, warp / 4 - 1);
  }
}

template <typename Shape>
__global__ void __launch_bounds__(kThreads, 1) BackwardKernel(const __grid_constant__ Args args) {
  RunBackward<Shape>(args, [&](const BackwardSmem<Shape>& smem, int consumer) {
    if constexpr (Shape::kKeepsKeys) {
      RunDkvConsumer<Shape>(args, smem, consumer);
    } else {
      RunDqConsumer<Shape>(args, smem, consumer);
    }
  });
}

}  // namespace jflux::attention

#endif  // JFLUX_OPS_FLASH_ATTENTION_FLASH_ATTENTION_BACKWARD_SM90_CUH_
