// The scheduler warp of a GEMM kernel: takes tiles, one ahead of the load warp, and publishes them
// (gpu/gemm_schedule.cuh); waits for rows of A and receives tiles (gpu/gemm_exchange.cuh).
#ifndef JFLUX_GPU_GEMM_SCHEDULER_SM90_CUH_
#define JFLUX_GPU_GEMM_SCHEDULER_SM90_CUH_

#include <cstdint>

#include "core/tile_order.h"
#include "gpu/gemm_exchange.cuh"
#include "gpu/gemm_operands_sm90.cuh"
#include "gpu/gemm_schedule.cuh"
#include "gpu/gemm_smem.cuh"
#include "gpu/ptx.cuh"

namespace jflux {

// Writes the CTA's part of its cluster's static first tile. Called by a warp. Readable after
// TileFull(0).
template <typename Op>
__device__ __forceinline__ void WriteFirstTile(const typename Op::Args& args,
                                               const GemmSmem<typename Op::Config>& smem,
                                               uint32_t cta) {
  using Config = typename Op::Config;
  using Schedule = typename Op::Schedule;
  const auto number = static_cast<int32_t>(blockIdx.x / Config::kCluster);
  const Tile tile = CtaTile<Config>(Schedule::FirstTile(args, number), static_cast<int>(cta));
  const auto coords = Op::Operands::CoordsOf(args, Schedule(), RowBlockOf<Config>(tile, cta), tile);
  if (threadIdx.x % 32 == 0)
    WriteTileEntry(smem.TileEntry(0), tile, KBlocksOf<Op>(args, tile, coords), coords);
}

// The scheduler warp. `taken`: the first tile, if it was already taken from the counter. Returns
// the queue entry after the last one.
template <typename Op>
__device__ __forceinline__ auto RunSchedulerWarp(const typename Op::Args& args,
                                                 const CallContext& call,
                                                 const GemmSmem<typename Op::Config>& smem,
                                                 uint32_t cta, int32_t taken) {
  using Config = typename Op::Config;
  using Schedule = typename Op::Schedule;
  using Operands = typename Op::Operands;
  using Exchange = typename Op::Exchange;
  using Coords = typename Operands::Coords;
  const int lane = threadIdx.x % 32;
  Ring<Config::kTileQueue> entries;
  TileReader<Config> reader{smem, {}};
  Schedule schedule(args, smem, cta == 0);
  typename Exchange::Receiver receiver(smem);
  typename Exchange::Rows rows(args, smem);
  uint32_t load_parity = 0;      // of LoadBegun
  uint32_t k_blocks_before = 0;  // of A, in earlier tiles
  bool first_is_queued = kStartsStatic<Schedule>;
  const auto receive_until = [&](uint32_t bar, uint32_t parity) {
    receiver.ReceiveUntil(args, call,
                          [&] { return __any_sync(0xffffffff, ptx::MbarrierTest(bar, parity)); });
  };
  for (;;) {
    Tile tile = kNoTile;
    int k_blocks[Config::kCluster]{};
    Coords coords[Config::kCluster]{};  // [0] ends up as this CTA's
    if (cta == 0 && !first_is_queued) {
      const int32_t t = __shfl_sync(0xffffffff, taken, 0);
      if constexpr (kIsOrdered<Schedule>) {
        if (t < args.num_tiles) {
          tile = schedule.At(args, t);
#pragma unroll
          for (int i = 0; i < Config::kCluster; ++i) {
            k_blocks[i] = KBlocksOf<Op>(args, CtaTile<Config>(tile, i), Coords{});
            coords[i] = Operands::CoordsOf(args, schedule, RowBlockOf<Config>(tile, i), tile);
          }
        }
      } else if (schedule.Find(t)) {
        tile = schedule.At(args, t);
#pragma unroll
        for (int i = 0; i < Config::kCluster; ++i) {
          coords[i] = Operands::CoordsOf(args, schedule, RowBlockOf<Config>(tile, i), tile);
          k_blocks[i] = KBlocksOf<Op>(args, CtaTile<Config>(tile, i), coords[i]);
        }
      }
      if (lane == 0) PublishTile(smem, entries, tile, k_blocks, coords);
      entries.Advance();
    } else {
      receive_until(smem.TileFull(reader.ring.index), reader.ring.parity);
      tile = reader.Enter();
      k_blocks[0] = reader.KBlocks();
      coords[0] = reader.template Coords<Coords>();
      if (cta == 0) {
        entries.Advance();
        first_is_queued = false;
      } else {
        reader.Leave();
      }
    }
    if (!IsTile(tile)) {
      receiver.ReceiveRest(args, call);
      return entries;
    }
    const int32_t row_block = RowBlockOf<Config>(tile, cta);
    if constexpr (kDoes<typename Exchange::Rows>) {
      const uint64_t start = call.Start();
      const auto set_arrived = [&](int arrived) {
        __syncwarp();
        if (lane == 0) ptx::StoreSharedRelease(smem.KBlocksArrived(), k_blocks_before + arrived);
      };
      rows.Await(args, call, row_block, tile, coords[0], k_blocks[0], set_arrived);
      k_blocks_before += k_blocks[0];
      if (lane == 0) call.Done(EventKind::kWaitRows, start, row_block, tile.n);
    }
    // Only the leader's scheduler warp needs LoadBegun, and warps that wait for rows. Without waits
    // for rows, the load warp may begin two tiles before another CTA's scheduler warp looks once;
    // parity alone cannot tell those two phases apart.
    if (cta == 0 || kDoes<typename Exchange::Rows>) {
      receive_until(smem.LoadBegun(), load_parity);
      ptx::MbarrierWait(smem.LoadBegun(), load_parity);
      load_parity ^= 1;
    }
    if (cta == 0 && lane == 0) taken = Schedule::template Next<Config::kCluster>(args, taken);
  }
}

}  // namespace jflux

#endif  // JFLUX_GPU_GEMM_SCHEDULER_SM90_CUH_
