// Hopper's kernels of the backward pass (attention_sm90.cuh, flash_attention_backward.cuh).
//
// Heads of more than 128 elements have consumers of their own
// (flash_attention_wide_backward_sm90.cuh).
#ifndef JFLUX_OPS_FLASH_ATTENTION_FLASH_ATTENTION_BACKWARD_SM90_CUH_
#define JFLUX_OPS_FLASH_ATTENTION_FLASH_ATTENTION_BACKWARD_SM90_CUH_

#include "ops/flash_attention/backward_loads_sm90.cuh"
#include "ops/flash_attention/flash_attention_backward.cuh"

namespace jflux::attention {

// s = the kept rows at `a` times the first tile of a stage, and dp = those at `b` times the second
// one, both over columns. s is complete afterwards; dp is not.
template <typename Shape>
__device__ __forceinline__ void MultiplyBoth(float (&s)[Shape::kMet / 2],
                                             float (&dp)[Shape::kMet / 2], uint32_t a, uint32_t b,
                                             const BackwardSmem<Shape>& smem, int stage) {
  using T = typename Shape::T;
  wgmma::Fence();
  MultiplyColumns<T, Shape::kWidth, Shape::kKept>(s, a, smem.Met(stage, 0));
  wgmma::Commit();
  MultiplyColumns<T, Shape::kWidth, Shape::kKept>(dp, b, smem.Met(stage, 1));
  wgmma::Commit();
  wgmma::Pin(s);
  wgmma::Wait<1>();
  wgmma::Pin(s);
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
      // base (`which` 2) or delta (3) of the queries of the columns.
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
__device__ __forceinline__ void RunBackward(const MapArgs& args, Consume&& consume) {
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
    for (int i = 0; Shape::kIsWide && i < Shape::kSecondStages; ++i) {
      ptx::MbarrierInit(smem.SecondFull(i), 1);
      ptx::MbarrierInit(smem.SecondEmpty(i), kConsumerWarps);
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
__global__ void __launch_bounds__(kThreads, 1)
    BackwardKernel(const __grid_constant__ MapArgs args) {
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
