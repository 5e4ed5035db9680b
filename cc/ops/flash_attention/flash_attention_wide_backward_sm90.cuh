// The backward pass of heads of more than 128 elements. A sum of 64 rows is 128 registers of each
// thread of a consumer, which leaves room for two tiles of scores and for no second sum:
//
//   kDkv   an item is 64 keys. Consumer 0 computes dv, consumer 1 dk, and each the scores
//   kDq    an item is a head's 128 queries, 64 for each consumer, as in narrower heads
//
// Of dk and dv, 64 keys and 64 queries at a time, this costs five products and 64 KiB of loads.
// Others that were counted (docs/experiments/0048):
//
//   a kernel for dv and one for dk, 128 keys   the same, and dk has one stage of do
//   half of the columns to a consumer          four products, of which two have 32 columns and wait
//                                              for shared memory; scores go through shared memory
//   half of the columns to an item             six products
//
// dq meets 64 keys at a time. Of 32 there would be three whole stages, but a product of 32 columns
// reads shared memory for 24 cycles where it multiplies for 16.
#ifndef JFLUX_OPS_FLASH_ATTENTION_FLASH_ATTENTION_WIDE_BACKWARD_SM90_CUH_
#define JFLUX_OPS_FLASH_ATTENTION_FLASH_ATTENTION_WIDE_BACKWARD_SM90_CUH_

#include "ops/flash_attention/flash_attention_backward_sm90.cuh"

namespace jflux::attention {

// Products of queries and keys -> p times the slope of the score, less the factor `scale`. `base`
// as in Probabilities. In place: p of all of a tile would be 32 registers more.
template <bool kSoftcap, int kCount, typename Base>
__device__ __forceinline__ void ProductsToSlopes(const Args& args, float (&s)[kCount],
                                                 Base&& base) {
#pragma unroll
  for (int j = 0; j < kCount / 4; ++j) {
    const float4 b = base(j);
    const float bases[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float x = kSoftcap ? Tanh(args.inner * s[4 * j + i]) : s[4 * j + i];
      const float p = ptx::Exp2(fmaf(x, args.factor, -bases[i]));
      s[4 * j + i] = kSoftcap ? p * (1.0f - x * x) : p;
    }
  }
}

// sum += A times tile `tile` of a stage, over its rows. Complete afterwards.
template <typename Shape>
__device__ __forceinline__ void AddRows(float (&sum)[Shape::kWidth / 2],
                                        uint32_t (&a)[Shape::kMet / 16][4],
                                        const BackwardSmem<Shape>& smem, int stage, int tile) {
  wgmma::Pin(sum);
  PinA(a);
  wgmma::Fence();
  MultiplyRows<typename Shape::T>(sum, a, smem.Met(stage, tile), true);
  wgmma::Commit();
  wgmma::Wait<0>();
  wgmma::Pin(sum);
  PinA(a);
}

// Transposed p (dv) or ds (dk) of a stage, packed.
template <typename Shape, bool kIsDk>
__device__ __forceinline__ void WeighQueries(const Args& args, const BackwardSmem<Shape>& smem,
                                             int stage, BlockKind kind, int row,
                                             uint32_t (&a)[Shape::kMet / 16][4]) {
  using T = typename Shape::T;
  constexpr int kCount = Shape::kMet / 2;
  float s[kCount], weights[kCount];  // of dk: do v^T
  const auto mask = [&](float (&of)[kCount]) {
    if (kind == BlockKind::kSome) {
      MaskPairs</*kRowsAreKeys=*/true, Shape::kKept>(args, of, smem.KeptNumbers(), row,
                                                     smem.MetNumbers(stage), 0.0f);
    }
  };
  // Of the columns' queries: base or delta.
  const auto vector = [&](int which, int j) {
    const float2 pair =
        LoadFloats(smem.MetNumbers(stage, which) + 4 * (8 * j + threadIdx.x % 4 * 2));
    return make_float4(pair.x, pair.y, pair.x, pair.y);
  };
  const auto base = [&](int j) { return vector(2, j); };
  if constexpr (kIsDk) {
    MultiplyBoth<Shape>(s, weights, smem.Kept(0), smem.Kept(1), smem, stage);
    ProductsToSlopes<Shape::kSoftcap>(args, s, base);
    mask(s);
    wgmma::Pin(weights);
    wgmma::Wait<0>();
    wgmma::Pin(weights);
    ScoreGradients(s, weights, [&](int j) { return vector(3, j); });
  } else {
    wgmma::Fence();
    MultiplyColumns<T, Shape::kWidth, Shape::kKept>(s, smem.Kept(0), smem.Met(stage, 0));
    wgmma::Commit();
    wgmma::Pin(s);
    wgmma::Wait<0>();
    wgmma::Pin(s);
    Probabilities<Shape::kSoftcap>(args, s, weights, base);
    mask(weights);
  }
  PackA<T>(weights, a);
}

template <typename Shape, bool kIsDk>
__device__ __forceinline__ void RunWideDkvConsumer(const Args& args,
                                                   const BackwardSmem<Shape>& smem) {
  constexpr int kWidth = Shape::kWidth;
  Ring<Shape::kStages> stages;
  uint32_t parity = 0;  // of KeptFull
  const int row = FirstRow();
  for (int32_t number = blockIdx.x; number < args.items; number = NextItem(number)) {
    ptx::MbarrierWait(smem.KeptFull(), parity);
    parity ^= 1;
    float sum[kWidth / 2];
#pragma unroll
    for (float& x : sum) x = 0;
    for (;;) {
      const int stage = stages.index;
      ptx::MbarrierWait(smem.Full(stage), stages.parity);
      const BlockKind kind = LoadKind(smem.Kind(stage));
      if (kind == BlockKind::kEnd) break;
      uint32_t a[Shape::kMet / 16][4];
      WeighQueries<Shape, kIsDk>(args, smem, stage, kind, row, a);
      AddRows<Shape>(sum, a, smem, stage, /*tile=*/kIsDk ? 0 : 1);
      WarpArrive(smem.Empty(stage));
      stages.Advance();
    }
    WarpArrive(smem.KeptEmpty());
    WarpArrive(smem.Empty(stages.index));  // of kEnd
    stages.Advance();
    const Item item = Item::OfKeys(args, number);
    StoreGradient<kWidth>(kIsDk ? args.arrays.dk : args.arrays.dv, sum, kIsDk ? args.scale : 1.0f,
                          item.batch, args.keys, item.block * Shape::kKept + row, args.groups,
                          item.group, args.width);
  }
}

template <typename Shape>
__device__ __forceinline__ void RunWideDqConsumer(const Args& args, const BackwardSmem<Shape>& smem,
                                                  int consumer) {
  constexpr int kWidth = Shape::kWidth, kCount = Shape::kMet / 2;
  Ring<Shape::kStages> stages;
  uint32_t parity = 0, value_parity = 0;  // of KeptFull, and of ValueFull
  const int row = 64 * consumer + FirstRow();
  const uint32_t q = smem.Kept(0) + consumer * 8192, d_out = smem.Kept(1) + consumer * 8192;
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
    float dq[kWidth / 2];
#pragma unroll
    for (float& d : dq) d = 0;
    for (;;) {
      const int stage = stages.index;
      ptx::MbarrierWait(smem.Full(stage), stages.parity);
      const BlockKind kind = LoadKind(smem.Kind(stage));
      if (kind == BlockKind::kEnd) break;
      float s[kCount], dp[kCount];
      uint32_t ds[kCount / 8][4];
      MultiplyBoth<Shape>(s, dp, q, d_out, smem, stage, value_parity);
      value_parity ^= 1;
      ProductsToSlopes<Shape::kSoftcap>(
          args, s, [&](int) { return make_float4(base[0], base[0], base[1], base[1]); });
      if (kind == BlockKind::kSome) {
        MaskPairs</*kRowsAreKeys=*/false, Shape::kKept>(args, s, smem.KeptNumbers(), row,
                                                        smem.MetNumbers(stage), 0.0f);
      }
      wgmma::Pin(dp);
      wgmma::Wait<0>();
      wgmma::Pin(dp);
      WarpArrive(smem.ValueEmpty());
      ScoreGradients(s, dp,
                     [&](int) { return make_float4(delta[0], delta[0], delta[1], delta[1]); });
      PackA<typename Shape::T>(dp, ds);
      AddRows<Shape>(dq, ds, smem, stage, /*tile=*/0);
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

template <typename Shape>
__global__ void __launch_bounds__(kThreads, 1)
    WideBackwardKernel(const __grid_constant__ Args args) {
  RunBackward<Shape>(args, [&](const BackwardSmem<Shape>& smem, int consumer) {
    if constexpr (!Shape::kKeepsKeys) {
      RunWideDqConsumer<Shape>(args, smem, consumer);
    } else if (consumer == 0) {
      RunWideDkvConsumer<Shape, /*kIsDk=*/false>(args, smem);
    } else {
      RunWideDkvConsumer<Shape, /*kIsDk=*/true>(args, smem);
    }
  });
}

}  // namespace jflux::attention

#endif  // JFLUX_OPS_FLASH_ATTENTION_FLASH_ATTENTION_WIDE_BACKWARD_SM90_CUH_
