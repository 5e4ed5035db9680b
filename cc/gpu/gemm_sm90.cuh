// A persistent, warp-specialised GEMM kernel for Hopper, of which an Op is the parts that differ.
//
// A CTA computes tiles of kTileM x kTileN. The CTAs of a cluster either
//
//   - compute kClusterM tiles on consecutive row blocks and share w's tile by TMA multicast, or
//   - split the k of one tile kClusterK ways; each finishes a slice of its columns
//     (gpu/cluster_sum.cuh).
//
// Three warpgroups:
//
//   0, warp 0   load warp: fills the stages, tile after tile
//   0, warp 1   send warp: moves data between this rank and its peers; then waits for partial tiles
//               of peers, if the op adds any
//   0, warp 2   store warp: writes out what the consumers have staged
//   0, warp 3   scheduler warp: takes tiles, one ahead of the load warp, and waits for a tile's
//               rows of A, k-block by k-block
//   1 and 2     consumers: wgmma, then the epilogue, which adds partial tiles and stages the result
//
//   scheduler --tile--> load --stages--> consumers --staging--> store --lent stage--> load
//                                                                   (gpu/staging.cuh)
//
// Each role hands its work on and continues at once. If consumers take tiles alternately, one keeps
// the tensor cores busy while the other finishes a tile or waits for partial tiles
// (docs/internals/gemm.md).
//
// Tiles and transfers are taken from counters, so the kernel makes progress with as many CTAs as
// fit on the GPU. A CTA that starts late, because another kernel holds its SM, finds its share
// already taken, except a static first tile (StaticFirst). The last warp to take work resets the
// counters and publishes the epoch (LeaveCounters).
//
// An Op (ops/*/*_sm90.cuh) has a Config (gpu/gemm_smem.cuh), the kernel's Args, and four policies:
//
//   policy     decides                                     contract                  asked by
//   Schedule   which tile comes next                       gemm_schedule.cuh         scheduler
//   Operands   where A and B lie, and the range of k       gemm_operands_sm90.cuh    scheduler,
//   load Epilogue   what becomes of a tile's sums               gemm_epilogue_sm90.cuh consumers,
//   store Exchange   what passes between this rank and others    gemm_exchange.cuh         send,
//   scheduler
//
// All functions of a policy are static, but for those of objects of the scheduler warp. Args have
// num_tiles (OrderedTiles), a_bytes (BoxesOfA), and state, view, signature and op (PeerExchange).
#ifndef JFLUX_GPU_GEMM_SM90_CUH_
#define JFLUX_GPU_GEMM_SM90_CUH_

#include <cstdint>

#include "core/tile_order.h"
#include "gpu/gemm_call.cuh"
#include "gpu/gemm_consumer_sm90.cuh"
#include "gpu/gemm_epilogue_sm90.cuh"
#include "gpu/gemm_exchange.cuh"
#include "gpu/gemm_load_sm90.cuh"
#include "gpu/gemm_schedule.cuh"
#include "gpu/gemm_scheduler_sm90.cuh"
#include "gpu/gemm_smem.cuh"
#include "gpu/ptx.cuh"
#include "gpu/staging.cuh"

namespace jflux {

// The send warp after Send: waits for the peers' partial tiles, in the order of the tiles.
template <typename Op>
__device__ __forceinline__ void RunPartialsWaiter(const typename Op::Args& args,
                                                  const CallContext& call,
                                                  const GemmSmem<typename Op::Config>& smem,
                                                  uint32_t cta) {
  using Config = typename Op::Config;
  TileReader<Config> reader{smem, {}};
  for (;;) {
    const int entry = reader.ring.index;
    const Tile tile = reader.Enter();
    if (IsTile(tile)) {
      Op::Exchange::Partials::Await(args, call, RowBlockOf<Config>(tile, cta), tile);
      __syncwarp();
      if (threadIdx.x % 32 == 0) ptx::MbarrierArrive(smem.PartialsReady(entry));
    }
    reader.Leave();
    if (!IsTile(tile)) return;
  }
}

// The store warp. A single lane serves both consumers: TMA takes its operands from uniform
// registers, so lanes cannot issue stores in parallel.
template <typename Op>
__device__ __forceinline__ void RunStoreWarp(const typename Op::Args& args, const CallContext& call,
                                             const GemmSmem<typename Op::Config>& smem,
                                             uint32_t cta) {
  using Config = typename Op::Config;
  TileReader<Config> reader{smem, {}};
  StagingReader<Config> staging{smem};
  for (;;) {
    const auto [tile, k_blocks] = reader.NextAlone();
    if (!IsTile(tile)) break;
    staging.Enter(k_blocks);
    Op::Epilogue::Store(args, call, staging, RowBlockOf<Config>(tile, cta), tile);
    staging.Leave();
  }
  // All staging has been read. y is complete when the kernel ends.
}

template <typename Op>
__device__ __forceinline__ void RunGemm(const typename Op::Args& args) {
  using Config = typename Op::Config;
  using Schedule = typename Op::Schedule;
  using Operands = typename Op::Operands;
  using Exchange = typename Op::Exchange;
  constexpr bool kAddsPartials = kDoes<typename Exchange::Partials>;
  static_assert(!Config::kLendsStage || (!kAddsPartials && !kDoes<typename Exchange::Receiver>));
  JFLUX_DYNAMIC_SHARED(uint8_t, 1024, storage);
  const GemmSmem<Config> smem{ptx::SmemAddress(storage)};
  const uint32_t cta = Config::kCluster == 1 ? 0 : ptx::ClusterCtaRank();
  const int warp = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 32, 0);
  const int lane = threadIdx.x % 32;

  // Start the slow operations first: the counter in device memory and the tensor maps.
  const bool takes = !kStartsStatic<Schedule> && warp == 3 && lane == 0 && cta == 0;
  const int32_t taken = takes ? Schedule::template Next<Config::kCluster>(args, /*last=*/-1) : 0;
  if (threadIdx.x == 32) Operands::PrefetchMaps(args);

  if (threadIdx.x == 128) {  // a consumer's thread: consumers are idle until the first stage is
                             // full
    for (int i = 0; i < Config::kStages; ++i) {
      ptx::MbarrierInit(smem.Full(i), Operands::kFullArrivals + kScaleArrivals<Config>);
      ptx::MbarrierInit(smem.Empty(i), EmptyArrivals<Config>());
    }
    for (int i = 0; i < Config::kTileQueue; ++i) {
      ptx::MbarrierInit(smem.TileFull(i), 1);
      ptx::MbarrierInit(smem.TileEmpty(i), TileReaders<Config>(kAddsPartials));
      ptx::MbarrierInit(smem.PartialsReady(i), 1);
    }
    ptx::MbarrierInit(smem.LoadBegun(), 1);
    for (int i = 0; i < Config::kConsumers; ++i) {
      ptx::MbarrierInit(smem.MmaOrder(i), 4);
      ptx::MbarrierInit(smem.Staged(i), 128);
      ptx::MbarrierInit(smem.Stored(i), 1);
      if (Config::kClusterK > 1) {
        ptx::MbarrierInit(smem.RemoteSlicesArrived(i), 1);
        ptx::MbarrierInit(smem.RemoteSlicesRead(i), 4 * Config::kClusterK);
      }
    }
    for (int i = 0; i < Config::kSendBoxes; ++i) ptx::MbarrierInit(smem.SendBoxFull(i), 1);
    ptx::StoreSharedRelease(smem.KBlocksArrived(), 0);
    ptx::FenceMbarrierInit();
  }
  if constexpr (kStartsStatic<Schedule>) {
    if (warp == 3) WriteFirstTile<Op>(args, smem, cta);
  }
  const CallContext call = Exchange::Begin(args);
  __syncthreads();
  if (kStartsStatic<Schedule> && threadIdx.x == 96) ptx::MbarrierArrive(smem.TileFull(0));
  if (Config::kCluster > 1) ptx::ClusterSyncRelaxed();

  if (warp < 4) {
    ptx::RegistersDown<Config::kProducerRegisters>();
    Exchange::Delay(args, call);
    if (warp == 0) {
      RunLoadWarp<Op>(args, call, smem, cta);
    } else if (warp == 1) {
      if (lane == 0) Exchange::Enter(args);
      Exchange::Send(args, call, smem);
      if constexpr (kDoes<Exchange>) __syncwarp();
      if (lane == 0) Exchange::LeaveCounters(args);
      if constexpr (kAddsPartials) RunPartialsWaiter<Op>(args, call, smem, cta);
      if (lane == 0) Exchange::Leave(args, call);
    } else if (warp == 2) {
      if (ptx::ElectOne()) {
        Exchange::CheckAlone(args, call);
        RunStoreWarp<Op>(args, call, smem, cta);
      }
    } else {
      if (lane == 0) Exchange::Enter(args);
      const auto entries = RunSchedulerWarp<Op>(args, call, smem, cta, taken);
      if (lane == 0) {
        Exchange::LeaveCounters(args);
        Exchange::Leave(args, call);
      }
      if (Config::kCluster > 1 && cta == 0) {
        AwaitAllEmpty(entries, [&](int entry) { return smem.TileEmpty(entry); });
      }
    }
  } else {
    ptx::RegistersUp<Config::kConsumerRegisters>();
    Schedule::MakeTable(args, smem, cta);
    RunConsumer<Op>(args, call, smem, cta, warp / 4 - 1);
    Exchange::SumRows(args, call, smem);
  }
}

// NameKernel<Config>, which runs NameSm90<Config> with NameArgs, and NameKernels, which an op's
// Instances derive from (runtime/gemm_instances_cuda.h).
#define JFLUX_GEMM_KERNEL(Name)                                    \
  template <typename Config>                                       \
  __global__ void __launch_bounds__(Config::kThreads, 1)           \
      Name##Kernel(const __grid_constant__ Name##Args args) {      \
    RunGemm<Name##Sm90<Config>>(args);                             \
  }                                                                \
  struct Name##Kernels {                                           \
    template <typename Config>                                     \
    static const void* Kernel() {                                  \
      return reinterpret_cast<const void*>(&Name##Kernel<Config>); \
    }                                                              \
  };                                                               \
  static_assert(true)

}  // namespace jflux

#endif  // JFLUX_GPU_GEMM_SM90_CUH_
