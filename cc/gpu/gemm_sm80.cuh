// A persistent GEMM kernel of portable code: mma.sync, ldmatrix and cp.async, which compute
// capability 8.0 has. It is for Ampere, Ada and later GPUs, and runs on Hopper in tests.
// gpu/gemm_sm90.cuh is Hopper's own; an Op has the same four policies here, for a kernel without
// roles:
//
//   policy     decides                              functions
//   Schedule   which tile comes next                Schedule(args, smem): after Send
//                                                   Next(args, last) -> t (gpu/gemm_schedule.cuh)
//                                                   Find(args, t) -> Tile, or kNoTile80: a full
//                                                   warp; t only grows
//   Operands   where A and B lie                    Terms(args)
//                                                   kMostTerms
//                                                   KBytes(args, tile, term): from 1 to 2^31
//                                                   LhsOf(args, call, tile, term)
//                                                                         -> KBlockCopies::Lhs
//                                                   RhsOf(args, tile, term) -> Rhs80
//   Epilogue   what becomes of a tile's sums        Finish(args, call, staging, sums, tile): all
//                                                   threads, which have left the tile's stages
//   Exchange   what passes between this rank and    of gpu/gemm_exchange.cuh: Send and Finally
//              others                               (args, call, smem) by all threads, before the
//                                                   first tile and after the last; Rows, of one
//                                                   warp. The launcher may ask for more smem than
//                                                   stages: behind them it is the op's
//
// A CTA takes a tile from the counter, waits for its rows, multiplies, and finishes it. Nothing of
// one tile overlaps with the next in a CTA: two CTAs share an SM, and one multiplies while the
// other waits, or writes results.
//
//   copies of k-block b + kStages - 1      fragments of the next step      mma.sync of this step
//           cp.async -> stage      ------>      ldmatrix -> registers   -->      sums
//
// Tiles and transfers are taken from counters, as on Hopper: the kernel makes progress with as many
// CTAs as fit on the GPU, and a late CTA finds its share already taken.
#ifndef JFLUX_GPU_GEMM_SM80_CUH_
#define JFLUX_GPU_GEMM_SM80_CUH_

#include <cstdint>

#include "core/tile_order.h"
#include "gpu/gemm_call.cuh"
#include "gpu/gemm_exchange.cuh"
#include "gpu/gemm_schedule.cuh"
#include "gpu/gemm_tile_sm80.cuh"
#include "gpu/ptx.cuh"

namespace jflux {

inline constexpr Tile kNoTile80{-1, 0};

// The schedule of args.num_tiles tiles whose order is known.
template <typename Numbers>
struct OrderedTiles80 : Numbers {
  template <typename... Any>
  __device__ explicit OrderedTiles80(const Any&...) {}
  template <typename Args>
  __device__ __forceinline__ Tile Find(const Args& args, int32_t t) const {
    return t < args.num_tiles ? args.order.At(t) : kNoTile80;
  }
};

template <typename Op>
__device__ __forceinline__ int KBlocksOf80(const typename Op::Args& args, Tile tile) {
  int count = 0;
  for (int i = 0; i < Op::Operands::Terms(args); ++i) {
    const int64_t bytes = Op::Operands::KBytes(args, tile, i);
    count += static_cast<int>(CeilDiv<int64_t>(bytes, Op::Config::kRowBytes));
  }
  return count;
}

// sums = A @ B of a tile. `arrived(b)`: all lanes of the first warp; returns when the rows of
// k-block b have arrived.
template <typename Op, typename Arrived>
__device__ __forceinline__ void MultiplyTile(const typename Op::Args& args, const CallContext& call,
                                             uint32_t smem, Tile tile, Arrived&& arrived,
                                             Sums80<typename Op::Config>& sums) {
  using Config = typename Op::Config;
  using Operands = typename Op::Operands;
  constexpr int kAhead = Config::kStages - 1;
  static_assert(Config::kRowBytes == 2 * kMultiplyBytes);
  const bool waits = threadIdx.x < 32;
  const int k_blocks = KBlocksOf80<Op>(args, tile);
#pragma unroll
  for (auto& row : sums) {
#pragma unroll
    for (auto& four : row) four[0] = four[1] = four[2] = four[3] = 0;
  }
  KBlockCopies<Config> copies;
  const auto begin = [&](int term) {
    copies.Begin(Operands::LhsOf(args, call, tile, term), Operands::RhsOf(args, tile, term),
                 static_cast<int>(Operands::KBytes(args, tile, term)));
  };
  int term = 0;
  begin(term);
  const auto copy = [&](uint32_t stage) {
    if constexpr (Operands::kMostTerms > 1) {
      if (copies.IsDone()) begin(++term);
    }
    copies.Next(stage);
  };
  if (waits) arrived(Min(kAhead, k_blocks) - 1);
  __syncthreads();  // and nobody reads the stages any more
#pragma unroll
  for (int b = 0; b < kAhead; ++b) {
    if (b < k_blocks) copy(smem + b * Config::kStageBytes);
    ptx::CopyAsyncCommit();
  }
  // Makes k-block b readable, and the stage of the one before free.
  const auto enter = [&](int b) {
    if (waits && b + kAhead < k_blocks) arrived(b + kAhead);
    ptx::CopyAsyncWait<kAhead - 1>();
    __syncthreads();
  };
  const auto advance = [&](uint32_t stage) {
    stage += Config::kStageBytes;
    return stage == smem + Config::kSmemBytes ? smem : stage;
  };
  const FragmentPlaces<Config> places;
  Fragments80<Config> now, next;
  uint32_t reads = smem, writes = smem + kAhead * Config::kStageBytes;
  enter(0);
  now.template Load<0>(places, reads);
#pragma unroll 1
  for (int b = 0; b < k_blocks; ++b) {
    if (b + kAhead < k_blocks) copy(writes);
    ptx::CopyAsyncCommit();  // even of nothing: CopyAsyncWait counts groups
    writes = advance(writes);
    next.template Load<1>(places, reads);
    now.Multiply(sums);
    reads = advance(reads);
    if (b + 1 < k_blocks) {
      enter(b + 1);
      now.template Load<0>(places, reads);
    }
    next.Multiply(sums);
  }
  ptx::CopyAsyncWait<0>();
  __syncthreads();
}

template <typename Op>
__device__ __forceinline__ void RunGemm80(const typename Op::Args& args) {
  using Config = typename Op::Config;
  using Exchange = typename Op::Exchange;
  JFLUX_DYNAMIC_SHARED(uint8_t, 256, storage);
  JFLUX_SHARED(int32_t[3], taken);  // a Tile
  const uint32_t smem = ptx::SmemAddress(storage);
  const CallContext call = Exchange::Begin(args);
  const bool leads = threadIdx.x == 0;
  __syncthreads();  // all have read the epoch, which the last CTA to leave the counters changes
  Exchange::Delay(args, call);
  if (leads) {
    Exchange::Enter(args);
    Exchange::CheckAlone(args, call);
  }
  Exchange::Send(args, call, smem);
  typename Op::Schedule schedule(args, smem);  // the first warp's
  const bool finds = threadIdx.x < 32;
  int32_t next = -1;
  if (leads) next = Op::Schedule::template Next<1>(args, next);
  for (;;) {
    if (finds) {
      const Tile found = schedule.Find(args, __shfl_sync(0xffffffff, next, 0));
      if (leads) taken[0] = found.m, taken[1] = found.n, taken[2] = found.split;
    }
    __syncthreads();
    const Tile tile{taken[0], taken[1], taken[2]};
    if (tile.m < 0) break;
    // Looked at after the tile's products. The other threads have read `taken` by then.
    if (leads) next = Op::Schedule::template Next<1>(args, next);
    Sums80<Config> sums;
    {
      typename Exchange::Rows rows(args, call, tile);
      const uint64_t start = call.Start();
      MultiplyTile<Op>(args, call, smem, tile, [&](int b) { rows.Await(b); }, sums);
      if (leads) call.Done(EventKind::kMultiply, start, tile.m, tile.n);
    }
    const uint64_t start = call.Start();
    Op::Epilogue::Finish(args, call, smem, sums, tile);
    if (leads) call.Done(EventKind::kEpilogue, start, tile.m, tile.n);
  }
  Exchange::Finally(args, call, smem);
  __syncthreads();  // no warp of the CTA takes more work
  if (leads) {
    Exchange::LeaveCounters(args);
    Exchange::Leave(args, call);
  }
}

// The base of a portable op's Exchange without peers' rows; and with a workspace.
struct AllRows80 {
  template <typename... Any>
  __device__ explicit AllRows80(const Any&...) {}
  __device__ __forceinline__ void Await(int) {}
};
struct PeerExchange80 : PeerExchange {
  using Rows = AllRows80;
  template <typename... Any>
  static __device__ __forceinline__ void Finally(const Any&...) {}
  // One thread of each CTA, when all have taken their last.
  template <typename Args>
  static __device__ __forceinline__ void LeaveCounters(const Args& args) {
    jflux::LeaveCounters<1>(args, [](WorkspaceHeader*) {});
  }
};
struct NoExchange80 : NoExchange {
  using Rows = AllRows80;
  template <typename... Any>
  static __device__ __forceinline__ void Finally(const Any&...) {}
};

// NameKernel80<Config>, which runs NameSm80<Config> with NameArgs80.
#define JFLUX_GEMM_KERNEL_80(Name)                                        \
  template <typename Config>                                              \
  __global__ void __launch_bounds__(Config::kThreads, Config::kCtasPerSm) \
      Name##Kernel80(const __grid_constant__ Name##Args80 args) {         \
    RunGemm80<Name##Sm80<Config>>(args);                                  \
  }                                                                       \
  struct Name##Kernels80 {                                                \
    template <typename Config>                                            \
    static const void* Kernel() {                                         \
      return reinterpret_cast<const void*>(&Name##Kernel80<Config>);      \
    }                                                                     \
  };                                                                      \
  static_assert(true)

}  // namespace jflux

#endif  // JFLUX_GPU_GEMM_SM80_CUH_
