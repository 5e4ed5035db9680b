// The backward pass of heads of more than 128 elements. A sum of 64 rows is 128 registers of each
// thread of a consumer, which leaves room for two tiles of scores and for no second sum:
//
//   kDkv   an item is 64 keys. Consumer 0 computes dv, consumer 1 dk, and each the scores
//   kDq    an item is a head's 128 queries, 64 for each consumer, as in narrower heads
//
// For dk and dv, a step of 64 keys and 64 queries takes five products and 64 KiB of loads. Other
// divisions that were counted (docs/experiments/0048):
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

// Where a consumer is in the rings of both tiles.
template <typename Shape>
struct Places {
  Ring<Shape::kStages> first;
  Ring<Shape::kSecondStages> second;
};

// The same as MultiplyBoth, for tiles at given places.
template <typename Shape>
__device__ __forceinline__ void MultiplyBothAt(float (&s)[Shape::kMet / 2],
                                               float (&dp)[Shape::kMet / 2], uint32_t a, uint32_t b,
                                               const BackwardSmem<Shape>& smem,
                                               const Places<Shape>& at) {
  using T = typename Shape::T;
  wgmma::Fence();
  MultiplyColumns<T, Shape::kWidth, Shape::kKept>(s, a, smem.Met(at.first.index, 0));
  wgmma::Commit();
  ptx::MbarrierWait(smem.SecondFull(at.second.index), at.second.parity);
  MultiplyColumns<T, Shape::kWidth, Shape::kKept>(dp, b, smem.Met(at.second.index, 1));
  wgmma::Commit();
  wgmma::Pin(s);
  wgmma::Wait<1>();
  wgmma::Pin(s);
}

// sum += A times a tile, over its rows. Complete afterwards.
template <typename T, int kSteps, int kCount>
__device__ __forceinline__ void AddRows(float (&sum)[kCount], uint32_t (&a)[kSteps][4],
                                        uint32_t tile) {
  wgmma::Pin(sum);
  PinA(a);
  wgmma::Fence();
  MultiplyRows<T>(sum, a, tile, true);
  wgmma::Commit();
  wgmma::Wait<0>();
  wgmma::Pin(sum);
  PinA(a);
}

// Adds a stage's queries to dk or dv, and frees the stage. `kind`: of the stage; `row`: the
// thread's.
template <typename Shape, bool kIsDk>
__device__ __forceinline__ void AddQueries(const Args& args, const BackwardSmem<Shape>& smem,
                                           const Places<Shape>& at, BlockKind kind, int row,
                                           float (&sum)[Shape::kWidth / 2]) {
  using T = typename Shape::T;
  constexpr int kCount = Shape::kMet / 2;
  const int stage = at.first.index, second = at.second.index;
  float s[kCount], weights[kCount];  // weights: p of dv; do v^T and then ds of dk
  uint32_t a[kCount / 8][4];
  const auto mask = [&](float (&of)[kCount]) {
    if (kind == BlockKind::kSome) {
      MaskPairs</*kRowsAreKeys=*/true, Shape::kKept>(args, of, smem.KeptNumbers(), row,
                                                     smem.MetNumbers(stage), 0.0f);
    }
  };
  // base (`which` 2) or delta (3) of the queries of the columns.
  const auto vector = [&](int which, int j) {
    const float2 pair =
        LoadFloats(smem.MetNumbers(stage, which) + 4 * (8 * j + threadIdx.x % 4 * 2));
    return make_float4(pair.x, pair.y, pair.x, pair.y);
  };
  const auto base = [&](int j) { return vector(2, j); };
  if constexpr (kIsDk) {
    MultiplyBothAt<Shape>(s, weights, smem.Kept(0), smem.Kept(1), smem, at);
    ProductsToSlopes<Shape::kSoftcap>(args, s, base);
    mask(s);
    wgmma::Pin(weights);
    wgmma::Wait<0>();
    wgmma::Pin(weights);
    WarpArrive(smem.SecondEmpty(second));
    ScoreGradients(s, weights, [&](int j) { return vector(3, j); });
    PackA<T>(weights, a);
    AddRows<T>(sum, a, smem.Met(stage, 0));
    WarpArrive(smem.Empty(stage));
  } else {
    wgmma::Fence();
    MultiplyColumns<T, Shape::kWidth, Shape::kKept>(s, smem.Kept(0), smem.Met(stage, 0));
    wgmma::Commit();
    wgmma::Pin(s);
    wgmma::Wait<0>();
    wgmma::Pin(s);
    Probabilities<Shape::kSoftcap>(args, s, weights, base);
    mask(weights);
    WarpArrive(smem.Empty(stage));
    PackA<T>(weights, a);
    ptx::MbarrierWait(smem.SecondFull(second), at.second.parity);
    AddRows<T>(sum, a, smem.Met(second, 1));
    WarpArrive(smem.SecondEmpty(second));
  }
}

template <typename Shape, bool kIsDk>
__device__ __forceinline__ void RunWideDkvConsumer(const Args& args,
                                                   const BackwardSmem<Shape>& smem) {
  constexpr int kWidth = Shape::kWidth;
  Places<Shape> at;
  uint32_t parity = 0;  // of KeptFull
  const int row = FirstRow();
  for (int32_t number = blockIdx.x; number < args.items; number = NextItem(number)) {
    ptx::MbarrierWait(smem.KeptFull(), parity);
    parity ^= 1;
    float sum[kWidth / 2];
#pragma unroll
    for (float& x : sum) x = 0;
    for (;;) {
      ptx::MbarrierWait(smem.Full(at.first.index), at.first.parity);
      const BlockKind kind = LoadKind(smem.Kind(at.first.index));
      if (kind == BlockKind::kEnd) break;
      AddQueries<Shape, kIsDk>(args, smem, at, kind, row, sum);
      at.first.Advance();
      at.second.Advance();
    }
    WarpArrive(smem.KeptEmpty());
    WarpArrive(smem.Empty(at.first.index));  // of kEnd
    at.first.Advance();
    const Item item = Item::OfKeys(args, number);
    StoreGradient<kWidth>(kIsDk ? args.arrays.dk : args.arrays.dv, sum, kIsDk ? args.scale : 1.0f,
                          item.batch, args.keys, item.block * Shape::kKept + row, args.groups,
                          item.group, args.width);
  }
}

template <typename Shape>
__device__ __forceinline__ void RunWideDqConsumer(const Args& args, const BackwardSmem<Shape>& smem,
                                                  int consumer) {
  using T = typename Shape::T;
  constexpr int kWidth = Shape::kWidth, kCount = Shape::kMet / 2;
  Places<Shape> at;
  uint32_t parity = 0;  // of KeptFull
  const int row = 64 * consumer + FirstRow();
  const uint32_t q = smem.Kept(0) + consumer * 8192, d_out = smem.Kept(1) + consumer * 8192;
  for (int32_t number = blockIdx.x; number < args.items; number = NextItem(number)) {
    const Item item = Item::OfQueries(args, number);
    float base[2], delta[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int64_t place =
          (static_cast<int64_t>(item.batch) * args.heads + item.head) * args.padded_queries +
          item.block * Shape::kKept + row + 8 * h;
      base[h] = args.arrays.base[place];
      delta[h] = args.arrays.delta[place];
    }
    ptx::MbarrierWait(smem.KeptFull(), parity);
    parity ^= 1;
    float dq[kWidth / 2];
#pragma unroll
    for (float& d : dq) d = 0;
    for (;;) {
      const int stage = at.first.index;
      ptx::MbarrierWait(smem.Full(stage), at.first.parity);
      const BlockKind kind = LoadKind(smem.Kind(stage));
      if (kind == BlockKind::kEnd) break;
      float s[kCount], dp[kCount];
      uint32_t ds[kCount / 8][4];
      MultiplyBothAt<Shape>(s, dp, q, d_out, smem, at);
      ProductsToSlopes<Shape::kSoftcap>(
          args, s, [&](int) { return make_float4(base[0], base[0], base[1], base[1]); });
      if (kind == BlockKind::kSome) {
        MaskPairs</*kRowsAreKeys=*/false, Shape::kKept>(args, s, smem.KeptNumbers(), row,
                                                        smem.MetNumbers(stage), 0.0f);
      }
      wgmma::Pin(dp);
      wgmma::Wait<0>();
      wgmma::Pin(dp);
      WarpArrive(smem.SecondEmpty(at.second.index));
      ScoreGradients(s, dp,
                     [&](int) { return make_float4(delta[0], delta[0], delta[1], delta[1]); });
      PackA<T>(dp, ds);
      AddRows<T>(dq, ds, smem.Met(stage, 0));
      WarpArrive(smem.Empty(stage));
      at.first.Advance();
      at.second.Advance();
    }
    WarpArrive(smem.KeptEmpty());
    WarpArrive(smem.Empty(at.first.index));  // of kEnd
    at.first.Advance();
    StoreGradient<kWidth>(args.arrays.dq, dq, args.scale, item.batch, args.queries,
                          item.block * Shape::kKept + row, args.heads, item.head, args.width);
  }
}

template <typename Shape>
__global__ void __launch_bounds__(kThreads, 1)
    WideBackwardKernel(const __grid_constant__ MapArgs args) {
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
