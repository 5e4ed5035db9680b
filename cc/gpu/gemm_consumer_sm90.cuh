// The consumers of a GEMM kernel: wgmma over a tile's stages, then the epilogue. They take tiles
// alternately (ping-pong), or share tiles of 224 and 256 columns, and those with scales of blocks.
#ifndef JFLUX_GPU_GEMM_CONSUMER_SM90_CUH_
#define JFLUX_GPU_GEMM_CONSUMER_SM90_CUH_

#include <cstdint>

#include "gpu/block_scales_sm90.cuh"
#include "gpu/cluster_sum.cuh"
#include "gpu/gemm_exchange.cuh"
#include "gpu/gemm_load_sm90.cuh"
#include "gpu/gemm_multiply_sm90.cuh"
#include "gpu/gemm_schedule.cuh"
#include "gpu/gemm_smem.cuh"
#include "gpu/ptx.cuh"
#include "gpu/staging.cuh"
#include "gpu/wgmma.cuh"

namespace jflux {

// Zeroes the rows of k past `valid` in a stage, in both operands, which are MN-major. Zeros in one
// operand would not do: 0 times a NaN is NaN. Called by all threads of the consumers that multiply
// the stage.
template <typename Config>
__device__ __forceinline__ void ZeroTail(const GemmSmem<Config>& smem, int stage, int valid,
                                         int consumer) {
  static_assert(Config::kTransposeLhs && !Config::kTransposeRhs);
  if (valid >= Config::kTileK) return;
  constexpr int kThreads = Config::kCooperative ? 128 * Config::kConsumers : 128;
  constexpr int kAtoms = Config::kM64Blocks + Config::kLoadN / Config::kBoxN,
                kVectors = kBlockBytes / kVectorBytes;
  const int thread = Config::kCooperative ? threadIdx.x - 128 : threadIdx.x % 128;
  for (int i = thread; i < kAtoms * (Config::kTileK - valid) * kVectors; i += kThreads) {
    const int atom = i / kVectors % kAtoms, row = valid + i / (kVectors * kAtoms);
    const uint32_t base = atom < Config::kM64Blocks
                              ? smem.A(stage) + atom * 8192
                              : smem.B(stage) + (atom - Config::kM64Blocks) * 8192;
    ptx::StoreShared16(base + row * kBlockBytes + i % kVectors * kVectorBytes,
                       make_uint4(0, 0, 0, 0));
  }
  ptx::FenceProxyAsyncShared();  // wgmma reads it
  ptx::BarrierSync(Config::kCooperative ? 1 + Config::kConsumers : 1 + consumer, kThreads);
}

template <typename Op>
__device__ __forceinline__ void RunConsumer(const typename Op::Args& args, const CallContext& call,
                                            const GemmSmem<typename Op::Config>& smem, uint32_t cta,
                                            int consumer) {
  using Config = typename Op::Config;
  using Operands = typename Op::Operands;
  using Epilogue = typename Op::Epilogue;
  const int lane = threadIdx.x % 32;
  TileReader<Config> reader{smem, {}};
  StagingWriter<Config> staging{smem, consumer};
  Ring<Config::kStages> stages;
  uint32_t mma_parity = consumer == 0 ? 1 : 0;  // consumer 0 goes first
  const bool records = call.recording && threadIdx.x % 128 == 0;
  ClusterSum<Config> sum{smem, consumer, static_cast<int>(cta)};
  const auto release = [&](int stage, int arrivals) {
    if (lane < Config::kClusterM) {
      ptx::MbarrierArriveRemote(
          ptx::MapToCta(smem.Empty(stage), Config::kClusterM == 1 ? cta : lane), arrivals);
    }
  };
  // With a lent stage, the first warp also arrives for this consumer's results: only a tile's last
  // stage holds any.
  const bool is_first_warp = threadIdx.x % 128 < 32;
  const int arrivals = Config::kLendsStage && is_first_warp ? 2 : 1;
  for (int tile_consumer = 0;; tile_consumer ^= 1) {
    const Ring<Config::kTileQueue> entry = reader.ring;
    const Tile tile = reader.Enter();
    if (!IsTile(tile)) {
      sum.AwaitRemoteReads();
      return reader.Leave();
    }
    const int k_blocks = reader.KBlocks();
    if (!Config::kCooperative && tile_consumer != consumer) {
      reader.Leave();
      stages.Skip(k_blocks);
      continue;
    }
    const int32_t row_block = RowBlockOf<Config>(tile, cta);
    if constexpr (Config::kCooperative) {
      if (!Epilogue::Needs(args, row_block, tile, staging.M64At(0))) {
        const Turns<Config> turns{consumer};
        turns.Begin();
        for (int kb = 0; kb < k_blocks; ++kb) {
          ptx::MbarrierWait(smem.Full(stages.index), stages.parity);
          __syncwarp();  // a lane that waited on would find the stage's next phase
          turns.Await();
          turns.Pass(kb + 1 == k_blocks);
          release(stages.index, arrivals);
          stages.Advance();
        }
        reader.Leave();
        continue;
      }
    }
    // `acc` is defined inside the loop so that the compiler sees new registers for each tile:
    // values that flow in from the epilogue's branches would serialise wgmma.
    //
    // The accumulators are zeroed here, in code that all threads reach. If consumers share tiles,
    // no other warpgroup would multiply meanwhile, so the first wgmma overwrites them instead. With
    // partial tiles the latter would spill registers.
    constexpr bool kFirstWrites =
        Config::kCooperative && !Config::kBlockScales && !kDoes<typename Op::Exchange::Partials>;
    Accumulators<Config> acc;
    if constexpr (!kFirstWrites) {
#pragma unroll
      for (int m64 = 0; m64 < Config::kConsumerM64Blocks; ++m64) {
#pragma unroll
        for (int i = 0; i < Config::kAccumulators; ++i) acc[m64][i] = 0;
      }
    }
    if constexpr (!Config::kCooperative) {
      // Wait for the other consumer's products: until its stages are full, the parity of this
      // consumer's stages is ambiguous.
      ptx::MbarrierWait(smem.MmaOrder(consumer), mma_parity);
      mma_parity ^= 1;
    }
    int last = -1;
    if (call.recording && k_blocks > 0) {
      ptx::MbarrierWait(smem.Full(stages.index), stages.parity);
    }
    uint64_t start = call.Start();
    if constexpr (Config::kBlockScales) {
      last = MultiplyBlocks<Config>(acc, smem, consumer, stages, k_blocks, [&](int stage) {
        __syncwarp();
        release(stage, arrivals);
      });
    } else {
      // Here the first k-block is known to read no accumulators. Those of int32 would else live
      // through the epilogue, beside the numbers that it makes of them; and where results are
      // quantised, the compiler would have each k-block waited for.
      constexpr bool kBeforeLoop = kFirstWrites && (Config::kWhole || Config::kQuantizes);
      if constexpr (kBeforeLoop) {
        ptx::MbarrierWait(smem.Full(stages.index), stages.parity);
        Operands::BeforeMultiply();
        wgmma::Fence();
        MultiplyStage<Config>(acc, smem.A(stages.index) + staging.M64At(0) * 8192,
                              smem.B(stages.index), /*adds=*/false);
        wgmma::Commit();
        last = stages.index;
        stages.Advance();
      }
      for (int kb = kBeforeLoop ? 1 : 0; kb < k_blocks; ++kb) {
        ptx::MbarrierWait(smem.Full(stages.index), stages.parity);
        Operands::BeforeMultiply();
        if constexpr (kIsRagged<Operands>) {
          if (kb + 1 == k_blocks) {
            const KRange k =
                Operands::KOf(args, tile, reader.template Coords<typename Operands::Coords>(), 0);
            ZeroTail<Config>(smem, stages.index, k.end - k.begin - kb * Config::kTileK, consumer);
          }
        }
        PinAll<Config>(acc);
        wgmma::Fence();
        MultiplyStage<Config>(acc, smem.A(stages.index) + staging.M64At(0) * 8192,
                              smem.B(stages.index), !kFirstWrites || kb > 0);
        wgmma::Commit();
        PinAll<Config>(acc);
        wgmma::Wait<1>();  // the previous k-block has been read
        if (last >= 0) release(last, arrivals);
        last = stages.index;
        stages.Advance();
      }
    }
    if (!Config::kCooperative && lane == 0) ptx::MbarrierArrive(smem.MmaOrder(1 - consumer));
    wgmma::Wait<0>();
    PinAll<Config>(acc);
    if constexpr (Config::kLendsStage) {
      // Both consumers have read the last stage. There is one: every tile has a k-block unless k is
      // split, and then no stage is lent.
      ptx::BarrierSync(1 + Config::kConsumers, 128 * Config::kConsumers);
      staging.Enter(last);
    } else if (!Config::kBlockScales && last >= 0) {
      release(last, arrivals);
    }
    if (records) call.Done(EventKind::kMultiply, start, row_block, tile.n);
    start = call.Start();
    const auto await_partials = [&] {
      ptx::MbarrierWait(smem.PartialsReady(entry.index), entry.parity);
    };
    if constexpr (Config::kClusterK == 1 && !Config::kWhole) {
      Epilogue::Finish(args, call, staging, acc, row_block, tile, await_partials);
    } else {
      Slices<Config> slices;
#pragma unroll
      for (int m64 = 0; m64 < Config::kConsumerM64Blocks; ++m64) {
        if constexpr (Config::kClusterK == 1) {
          ToFloats(acc[m64], slices[m64]);
        } else {
          if (Epilogue::HasRows(args, row_block, staging.M64At(m64)))
            sum.Run(acc[m64], slices[m64]);
        }
      }
      Epilogue::Finish(args, call, staging, slices, row_block, tile, await_partials);
    }
    if constexpr (Config::kLendsStage) {
      __syncwarp();
      release(last, is_first_warp && !staging.published ? 2 : 1);
    }
    if (records) call.Done(EventKind::kEpilogue, start, row_block, tile.n);
    reader.Leave();
  }
}

}  // namespace jflux

#endif  // JFLUX_GPU_GEMM_CONSUMER_SM90_CUH_
