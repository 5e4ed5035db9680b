// A persistent, warp-specialised GEMM main loop for Hopper. An op plugs in through hooks (RunGemm).
//
// A CTA computes tiles of kTileM x kTileN. The CTAs of a cluster either
//
//   - compute kClusterM tiles on consecutive row blocks and share w's tile by TMA multicast, or
//   - split the k of one tile kClusterK ways; each finishes a slice of its columns
//     (gpu/cluster_sum.cuh).
//
// Three warpgroups:
//
//   0, warp 0   load warp: fills the stages by TMA, tile after tile; or A by cp.async, if the op
//               gathers its rows (gpu/gather_rows_sm90.cuh)
//   0, warp 1   send warp: Op::Send moves data between this rank and its peers; then, if the op
//               adds partial tiles of peers, waits for them (Op::WaitForPartials)
//   0, warp 2   store warp: Op::Store writes out what the consumers have staged
//   0, warp 3   scheduler warp: takes tiles from a counter in device memory, one ahead of the load
//               warp, and waits for a tile's rows of A, k-block by k-block (Op::WaitForRows)
//   1 and 2     consumers: wgmma, then Op::Epilogue, which adds partial tiles and stages the
//               result. They take tiles alternately (ping-pong), or share tiles of 224 and 256
//               columns
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
// already taken, except a static first tile (Op::kStaticFirstTile). The last warp to take work
// resets the counters and publishes the epoch (LeaveCounters).
//
// An Op (ops/*/*_sm90.cuh) is a struct of static device functions and an Args type. What the roles
// share is in gemm_smem.cuh, staging.cuh and gemm_call.cuh.
#ifndef JFLUX_GPU_GEMM_SM90_CUH_
#define JFLUX_GPU_GEMM_SM90_CUH_

#include <cstdint>

#include "core/tile_order.h"
#include "gpu/cluster_sum.cuh"
#include "gpu/gather_rows_sm90.cuh"
#include "gpu/gemm_call.cuh"
#include "gpu/gemm_smem.cuh"
#include "gpu/load_rhs_sm90.cuh"
#include "gpu/ptx.cuh"
#include "gpu/staging.cuh"
#include "gpu/wgmma.cuh"

namespace jflux {

// A range of k, in elements. `begin` is a multiple of kTileK, except in a local op.
struct KRange {
  int32_t begin, end;
};

// Split `split` of k, if the cluster's CTAs split it. The splits are equal up to rounding to
// k-blocks.
template <typename Config>
__device__ __forceinline__ KRange SplitOfK(int64_t k, int split) {
  constexpr int32_t kSplits = Config::kClusterK;
  const auto end = static_cast<int32_t>(k);
  if (kSplits == 1) return KRange{0, end};
  const int32_t k_blocks = CeilDiv(end, Config::kTileK);
  return KRange{split * k_blocks / kSplits * Config::kTileK,
                Min(end, (split + 1) * k_blocks / kSplits * Config::kTileK)};
}

// A thread's accumulators of a tile.
template <typename Config>
using Accumulators = float[Config::kConsumerM64Blocks][Config::kAccumulators];

// acc += A @ B over one k-block if `adds`, else acc = A @ B. `a` is the address of the consumer's
// first m64 block.
template <typename Config>
__device__ __forceinline__ void MultiplyStage(Accumulators<Config>& acc, uint32_t a, uint32_t b,
                                              bool adds) {
  constexpr int kTransA = Config::kTransposeLhs ? 1 : 0, kTransB = Config::kTransposeRhs ? 0 : 1;
  constexpr const typename Config::T* kType = nullptr;
#pragma unroll
  for (int k = 0; k < Config::kTileK / 16; ++k) {
    const uint64_t desc_b = kTransB ? wgmma::Descriptor(b + k * 2048, 8192, 1024)
                                    : wgmma::Descriptor(b + k * 32, 16, 1024);
#pragma unroll
    for (int m64 = 0; m64 < Config::kConsumerM64Blocks; ++m64) {
      const uint64_t desc_a = kTransA ? wgmma::Descriptor(a + m64 * 8192 + k * 2048, 8192, 1024)
                                      : wgmma::Descriptor(a + m64 * 8192 + k * 32, 16, 1024);
      wgmma::Multiply<kTransA, kTransB>(kType, acc[m64], desc_a, desc_b, adds || k > 0);
    }
  }
}

// Zeroes the rows of k past `valid` in a stage, in both operands, which are MN-major. Zeros in one
// operand would not do: 0 times a NaN is NaN. Called by all threads of the consumers that multiply
// the stage.
template <typename Config>
__device__ __forceinline__ void ZeroTail(const GemmSmem<Config>& smem, int stage, int valid,
                                         int consumer) {
  static_assert(Config::kTransposeLhs && !Config::kTransposeRhs);
  if (valid >= Config::kTileK) return;
  constexpr int kThreads = Config::kCooperative ? 128 * Config::kConsumers : 128;
  constexpr int kAtoms = Config::kM64Blocks + Config::kLoadN / 64, kVectors = 128 / 16;
  const int thread = Config::kCooperative ? threadIdx.x - 128 : threadIdx.x % 128;
  for (int i = thread; i < kAtoms * (Config::kTileK - valid) * kVectors; i += kThreads) {
    const int atom = i / kVectors % kAtoms, row = valid + i / (kVectors * kAtoms);
    const uint32_t base = atom < Config::kM64Blocks
                              ? smem.A(stage) + atom * 8192
                              : smem.B(stage) + (atom - Config::kM64Blocks) * 8192;
    ptx::StoreShared16(base + row * 128 + i % kVectors * 16, make_uint4(0, 0, 0, 0));
  }
  ptx::FenceProxyAsyncShared();  // wgmma reads it
  ptx::BarrierSync(Config::kCooperative ? 1 + Config::kConsumers : 1 + consumer, kThreads);
}

template <typename Config>
__device__ __forceinline__ void PinAll(Accumulators<Config>& acc) {
#pragma unroll
  for (int m64 = 0; m64 < Config::kConsumerM64Blocks; ++m64) wgmma::Pin(acc[m64]);
}

template <typename Config>
__device__ __forceinline__ int32_t RowBlockOf(Tile tile, uint32_t cta) {
  return tile.m * Config::kClusterM + (Config::kClusterM == 1 ? 0 : static_cast<int32_t>(cta));
}

// A term's range of k. In an op of groups it is part of the coordinates.
template <typename Op>
__device__ __forceinline__ KRange KOf(const typename Op::Args& args, Tile tile,
                                      const typename Op::Coords& coords, int term) {
  if constexpr (Op::kGroups) {
    return Op::KOf(args, coords);
  } else {
    return Op::KOf(args, tile, term);
  }
}

// The k-blocks of a tile, over all its terms.
template <typename Op>
__device__ __forceinline__ int KBlocksOf(const typename Op::Args& args, Tile tile) {
  int k_blocks = 0;
  for (int term = 0; term < Op::TermsOf(args); ++term) {
    const KRange k = Op::KOf(args, tile, term);
    k_blocks += CeilDiv<int>(k.end - k.begin, Op::Config::kTileK);
  }
  return k_blocks;
}

struct NoGroups {};
template <typename Op>
__device__ __forceinline__ auto MakeGroups(const typename Op::Args& args,
                                           const GemmSmem<typename Op::Config>& smem,
                                           uint32_t cta) {
  if constexpr (Op::kGroups) {
    return typename Op::Groups(args, smem, cta == 0);
  } else {
    return NoGroups{};
  }
}

struct NoReceiver {};
template <typename Op>
__device__ __forceinline__ auto MakeReceiver(const GemmSmem<typename Op::Config>& smem) {
  if constexpr (Op::kReceives) {
    return Op::MakeReceiver(smem);
  } else {
    return NoReceiver{};
  }
}

// The tile after `last`: the next one from the counter, which starts after the static first tiles.
// A local op has no counter: each cluster takes one tile of each round of as many tiles as there
// are clusters. If costs fall from tile to tile (kRaggedK), the cluster with the first tile of one
// round takes the last tile of the next.
template <typename Op>
__device__ __forceinline__ int32_t NextTile(const typename Op::Args& args, int32_t last) {
  constexpr int kCluster = Op::Config::kCluster;
  if constexpr (Op::kLocal) {
    const auto clusters = static_cast<int32_t>(gridDim.x / kCluster);
    if (last < 0) return static_cast<int32_t>(blockIdx.x / kCluster);
    if (!Op::kRaggedK) return last + clusters;
    return last + 2 * (clusters - last % clusters) - 1;
  } else {
    const uint32_t static_tiles = Op::kStaticFirstTile ? gridDim.x / kCluster : 0;
    return TakeTile(args) + static_cast<int32_t>(static_tiles);
  }
}

// Writes the CTA's part of its cluster's static first tile. Called by a warp. Readable after
// TileFull(0).
template <typename Op>
__device__ __forceinline__ void WriteFirstTile(const typename Op::Args& args,
                                               const GemmSmem<typename Op::Config>& smem,
                                               uint32_t cta) {
  using Config = typename Op::Config;
  const auto number = static_cast<int32_t>(blockIdx.x / Config::kCluster);
  const Tile tile = CtaTile<Config>(Op::FirstTile(args, number), static_cast<int>(cta));
  const auto coords = Op::CoordsOf(args, RowBlockOf<Config>(tile, cta), tile);
  if (threadIdx.x % 32 == 0)
    WriteTileEntry(smem.TileEntry(0), tile, KBlocksOf<Op>(args, tile), coords);
}

// The scheduler warp. `taken`: the first tile, if it was already taken from the counter. Returns
// the queue entry after the last one.
template <typename Op>
__device__ __forceinline__ auto RunSchedulerWarp(const typename Op::Args& args,
                                                 const CallContext& call,
                                                 const GemmSmem<typename Op::Config>& smem,
                                                 uint32_t cta, int32_t taken) {
  using Config = typename Op::Config;
  const int lane = threadIdx.x % 32;
  Ring<Config::kTileQueue> entries;
  TileReader<Config> reader{smem, {}};
  auto receiver = MakeReceiver<Op>(smem);
  auto groups = MakeGroups<Op>(args, smem, cta);
  uint32_t load_parity = 0;      // of LoadBegun
  uint32_t k_blocks_before = 0;  // of A, in earlier tiles
  bool first_is_queued = Op::kStaticFirstTile;
  const auto receive_until = [&](uint32_t bar, uint32_t parity) {
    if constexpr (Op::kReceives) {
      while (!__any_sync(0xffffffff, ptx::MbarrierTest(bar, parity)) &&
             Op::Receive(args, call, receiver, /*waits=*/false)) {
      }
    }
  };
  for (;;) {
    Tile tile = kNoTile;
    int k_blocks[Config::kCluster]{};
    typename Op::Coords coords[Config::kCluster]{};  // [0] ends up as this CTA's
    if (cta == 0 && !first_is_queued) {
      const int32_t t = __shfl_sync(0xffffffff, taken, 0);
      if constexpr (Op::kGroups) {
        if (groups.Find(t)) {
          tile = groups.At(args, t);
#pragma unroll
          for (int i = 0; i < Config::kCluster; ++i) {
            coords[i] = groups.CoordsOf(args, RowBlockOf<Config>(tile, i), tile);
            const KRange k = Op::KOf(args, coords[i]);
            k_blocks[i] = CeilDiv<int>(k.end - k.begin, Config::kTileK);
          }
        }
      } else if (t < args.num_tiles) {
        tile = Op::TileAt(args, t);
#pragma unroll
        for (int i = 0; i < Config::kCluster; ++i) {
          k_blocks[i] = KBlocksOf<Op>(args, CtaTile<Config>(tile, i));
          coords[i] = Op::CoordsOf(args, RowBlockOf<Config>(tile, i), tile);
        }
      }
      if (lane == 0) PublishTile(smem, entries, tile, k_blocks, coords);
      entries.Advance();
    } else {
      receive_until(smem.TileFull(reader.ring.index), reader.ring.parity);
      tile = reader.Enter();
      k_blocks[0] = reader.KBlocks();
      coords[0] = reader.template Coords<typename Op::Coords>();
      if (cta == 0) {
        entries.Advance();
        first_is_queued = false;
      } else {
        reader.Leave();
      }
    }
    if (!IsTile(tile)) {
      if constexpr (Op::kReceives) Op::ReceiveRest(args, call, receiver);
      return entries;
    }
    const int32_t row_block = RowBlockOf<Config>(tile, cta);
    if constexpr (Op::kWaitsForRows) {
      const uint64_t start = call.Start();
      const auto set_arrived = [&](int arrived) {
        __syncwarp();
        if (lane == 0) ptx::StoreSharedRelease(smem.KBlocksArrived(), k_blocks_before + arrived);
      };
      if constexpr (Op::kGathersRows) {
        groups.WaitForRows(args, call, coords[0]);
        set_arrived(k_blocks[0]);
      } else {
        Op::WaitForRows(args, call, row_block, tile, coords[0], set_arrived);
      }
      k_blocks_before += k_blocks[0];
      if (lane == 0) call.Done(EventKind::kWaitRows, start, row_block, tile.n);
    }
    // Only the leader's scheduler warp needs LoadBegun, and warps that wait for rows. Without waits
    // for rows, the load warp may begin two tiles before another CTA's scheduler warp looks once;
    // parity alone cannot tell those two phases apart.
    if (cta == 0 || Op::kWaitsForRows) {
      receive_until(smem.LoadBegun(), load_parity);
      ptx::MbarrierWait(smem.LoadBegun(), load_parity);
      load_parity ^= 1;
    }
    if (cta == 0 && lane == 0) taken = NextTile<Op>(args, taken);
  }
}

// The send warp after Op::Send: waits for the peers' partial tiles, in the order of the tiles.
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
      Op::WaitForPartials(args, call, RowBlockOf<Config>(tile, cta), tile);
      __syncwarp();
      if (threadIdx.x % 32 == 0) ptx::MbarrierArrive(smem.PartialsReady(entry));
    }
    reader.Leave();
    if (!IsTile(tile)) return;
  }
}

// Waits until all stages, or all queue entries, are empty; `next` is the next one to be filled. A
// CTA must not exit while another CTA of the cluster may still arrive at its barriers, and the
// arrivals that empty stages and entries are the last ones.
template <int kSize, typename BarrierOf>
__device__ __forceinline__ void AwaitAllEmpty(Ring<kSize> next, BarrierOf&& barrier_of) {
  for (int i = 0; i < kSize; ++i) {
    ptx::MbarrierWait(barrier_of(next.index), next.parity ^ 1);
    next.Advance();
  }
}

// Bytes of A that a k-block loads.
template <typename Op>
__device__ __forceinline__ int32_t ABytes(const typename Op::Args& args,
                                          const typename Op::Coords& coords) {
  if constexpr (Op::kGroups) {
    return Op::ABytes(args, coords);
  } else {
    return args.a_bytes;
  }
}

// One lane fills the stages with a tile's operands. Every tile has a k-block of the first term.
template <typename Op>
__device__ __forceinline__ void LoadTile(const typename Op::Args& args, const CallContext& call,
                                         const GemmSmem<typename Op::Config>& smem, uint32_t cta,
                                         Tile tile, const typename Op::Coords& coords,
                                         Ring<Op::Config::kStages>& stages, KBlocksReader& a_rows) {
  using Config = typename Op::Config;
  const auto load_b = [&](const Ring<Config::kStages>& stage, const Rhs& rhs, int k0) {
    const uint32_t bar = smem.Full(stage.index);
    ptx::MbarrierArriveExpectTx(bar, ABytes<Op>(args, coords) + Config::kBBytes);
    LoadB<Config, Op::kStackedRhs>(smem.B(stage.index), rhs, bar, k0, cta);
  };
  // w is loaded before A: it comes from device memory, and the other CTAs of the cluster need this
  // CTA's share of it even if A's rows are late.
  const KRange first = KOf<Op>(args, tile, coords, 0);
  const Rhs first_rhs = Op::RhsOf(args, coords, 0);
  ptx::MbarrierWait(smem.Empty(stages.index), stages.parity ^ 1);
  load_b(stages, first_rhs, first.begin);
  int staged = first.begin + Config::kTileK;  // first term: w is loaded up to here
  if constexpr (Op::kWaitsForRows) {
    // While no rows of A have arrived, prefetch w into the free stages.
    Ring<Config::kStages> early = stages;
    early.Advance();
    const int most = Min(first.begin + Config::kStages * Config::kTileK, first.end);
    while (!a_rows.Poll()) {
      if (staged < most && ptx::MbarrierTest(smem.Empty(early.index), early.parity ^ 1)) {
        load_b(early, first_rhs, staged);
        early.Advance();
        staged += Config::kTileK;
      }
    }
  }
  ptx::MbarrierArrive(smem.LoadBegun());
  for (int term = 0; term < Op::TermsOf(args); ++term) {
    const auto source = Op::SourceOf(args, call, coords, term);
    const Rhs rhs = term == 0 ? first_rhs : Op::RhsOf(args, coords, term);
    const KRange k = term == 0 ? first : KOf<Op>(args, tile, coords, term);
    for (int k0 = k.begin; k0 < k.end; k0 += Config::kTileK) {
      if (term != 0 || k0 >= staged) {
        ptx::MbarrierWait(smem.Empty(stages.index), stages.parity ^ 1);
        load_b(stages, rhs, k0);
      }
      if constexpr (Op::kWaitsForRows) a_rows.AwaitNext();
      Op::LoadA(source, smem.A(stages.index), smem.Full(stages.index), k0);
      stages.Advance();
    }
  }
}

template <typename Op>
__device__ __forceinline__ void RunLoadWarp(const typename Op::Args& args, const CallContext& call,
                                            const GemmSmem<typename Op::Config>& smem,
                                            uint32_t cta) {
  using Config = typename Op::Config;
  TileReader<Config> reader{smem, {}};
  Ring<Config::kStages> stages;
  KBlocksReader a_rows{smem.KBlocksArrived()};
  if constexpr (Op::kGathersRows) {
    RunGatherWarp<Op>(args, smem, cta, reader, stages, a_rows);
  } else {
    for (;;) {
      const Tile tile = reader.Enter();
      const auto coords = reader.template Coords<typename Op::Coords>();
      reader.Leave();
      if (!IsTile(tile)) break;
      if (ptx::ElectOne()) LoadTile<Op>(args, call, smem, cta, tile, coords, stages, a_rows);
      __syncwarp();
    }
  }
  if (Config::kClusterM > 1 && ptx::ElectOne()) {
    AwaitAllEmpty(stages, [&](int stage) { return smem.Empty(stage); });
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
    Op::Store(args, call, staging, RowBlockOf<Config>(tile, cta), tile);
    staging.Leave();
  }
  // All staging has been read. y is complete when the kernel ends.
}

template <typename Op>
__device__ __forceinline__ void RunConsumer(const typename Op::Args& args, const CallContext& call,
                                            const GemmSmem<typename Op::Config>& smem, uint32_t cta,
                                            int consumer) {
  using Config = typename Op::Config;
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
    if constexpr (Op::kGroups && Config::kCooperative) {
      if (!Op::HasRows(row_block, tile, staging.M64At(0))) {
        for (int kb = 0; kb < k_blocks; ++kb) {
          ptx::MbarrierWait(smem.Full(stages.index), stages.parity);
          __syncwarp();  // a lane that waited on would find the stage's next phase
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
    constexpr bool kFirstWrites = Config::kCooperative && !Op::kAddsPartials;
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
    for (int kb = 0; kb < k_blocks; ++kb) {
      ptx::MbarrierWait(smem.Full(stages.index), stages.parity);
      if constexpr (Op::kGathersRows) ptx::FenceProxyAsyncShared();  // A came by cp.async
      if constexpr (Op::kRaggedK) {
        if (kb + 1 == k_blocks) {
          const KRange k = Op::KOf(args, reader.template Coords<typename Op::Coords>());
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
    if (!Config::kCooperative && lane == 0) ptx::MbarrierArrive(smem.MmaOrder(1 - consumer));
    wgmma::Wait<0>();
    PinAll<Config>(acc);
    if constexpr (Config::kLendsStage) {
      // Both consumers have read the last stage. There is one: every tile has a k-block unless k is
      // split, and then no stage is lent.
      ptx::BarrierSync(1 + Config::kConsumers, 128 * Config::kConsumers);
      staging.Enter(last);
    } else if (last >= 0) {
      release(last, arrivals);
    }
    if (records) call.Done(EventKind::kMultiply, start, row_block, tile.n);
    start = call.Start();
    const auto await_partials = [&] {
      ptx::MbarrierWait(smem.PartialsReady(entry.index), entry.parity);
    };
    if constexpr (Config::kClusterK == 1) {
      Op::Epilogue(args, call, staging, acc, row_block, tile, await_partials);
    } else {
      Slices<Config> slices;
#pragma unroll
      for (int m64 = 0; m64 < Config::kConsumerM64Blocks; ++m64) {
        if (Op::HasRows(args, row_block, m64)) sum.Run(acc[m64], slices[m64]);
      }
      Op::Epilogue(args, call, staging, slices, row_block, tile, await_partials);
    }
    if constexpr (Config::kLendsStage) {
      __syncwarp();
      release(last, is_first_warp && !staging.published ? 2 : 1);
    }
    if (records) call.Done(EventKind::kEpilogue, start, row_block, tile.n);
    reader.Leave();
  }
}

// The kernel body. An Op provides:
//
//   Config, Args {state, view, signature, op, num_tiles, a_bytes, ...}
//
//   Tiles
//   TileAt(args, t) -> Tile             the t-th tile; m counts cluster tiles
//   kStaticFirstTile                    whether cluster i starts with tile i, which is known before
//                                       the counter answers. A late cluster still has to compute
//                                       its tile, so no CTA may wait for another's tile. If true:
//   FirstTile(args, cluster) -> Tile    TileAt(cluster), precomputed by the host
//   TermsOf(args), KOf(args, tile, term) -> KRange
//                                       a tile is the sum of TermsOf products, each over its k
//   HasRows(args, row_block, m64)       whether the m64 block has any rows; if kClusterK > 1
//
//   A local op (kLocal) has no peers and no workspace: no state, view, signature or num_tiles in
//   its Args, and nothing of "Communication" but Send.
//
//   In an op of groups (kGroups) tiles belong to groups of rows whose sizes are on the device. In
//   place of num_tiles, TileAt, TermsOf and CoordsOf it has
//
//   Groups(args, smem, leads)           made by the scheduler warp; `leads`: in a cluster's first
//                                       CTA
//     Find(t) -> bool                   whether there is a t-th tile; t only grows
//     At(args, t) -> Tile
//     CoordsOf(args, row_block, tile) -> Coords
//   KOf(args, coords) -> KRange         of one term, never empty; `begin` is any row
//   ABytes(args, coords)                bytes of A that a k-block loads
//   HasRows(row_block, tile, m64)       false for an m64 block whose products nobody needs
//   kRaggedK                            whether what is loaded past the end of k must count as
//                                       zeros; both operands are then MN-major
//
//   An op of groups may gather rows of A by address (kGathersRows, which needs kWaitsForRows;
//   gpu/gather_rows_sm90.cuh). In place of WaitForRows, SourceOf, LoadA and ABytes it has
//
//   MakeTable(args, smem)               makes the table that Groups waits for; called by all
//                                       consumer threads of a cluster's first CTA, before their
//                                       first tile
//   groups.WaitForRows(args, call, coords)
//                                       all lanes of the scheduler warp: waits for the tile's rows
//                                       and writes their addresses
//   RowTable(smem, i), RowsToLoad(coords), RowBytes(args), AnyRow(args)
//                                       the load warp's view of them
//
//   An op of groups may sum rows of its tiles (kSumsRows, with peers):
//
//   MakeTable(args, smem, cta)          all consumer threads, before their first tile
//   SumRows(args, call, smem)           all consumer threads, after their last tile, while the send
//                                       warp does the same in Send. Send returns after all of them,
//                                       so its LeaveCounters and TrapIfFaulted count for them
//
//   Operands
//   kStackedRhs                         whether w is a stack of matrices, with a map of three
//                                       dimensions (Rhs::expert)
//   PrefetchMaps(args)                  one lane
//   Coords, CoordsOf(args, row_block, tile) -> Coords
//                                       16 bytes: the coordinates of the tile's operands. The
//                                       scheduler warp computes them for the load warp
//   SourceOf(args, call, coords, term), LoadA(source, smem, bar, k0)
//   RhsOf(args, coords, term) -> Rhs
//   kWaitsForRows                       whether peers send rows of A. If true:
//   WaitForRows(args, call, row_block, tile, coords, set_arrived)
//                                       all lanes of the scheduler warp. Calls set_arrived(number
//                                       of the tile's k-blocks that have arrived) until all have
//
//   Communication
//   Send(args, call, smem)              the send warp: sends to peers, or, in matmul_all_to_all,
//                                       receives. What peers wait for must not wait for peers
//   kAddsPartials                       whether tiles add partial tiles of peers. If true:
//   WaitForPartials(args, call, row_block, tile)
//                                       all lanes of the send warp
//   kReceives                           whether the scheduler warp copies tiles of peers to y in
//                                       its idle time. If true (all lanes):
//   MakeReceiver(smem)
//   Receive(args, call, receiver, waits)   called while it returns true
//   ReceiveRest(args, call, receiver)      called after the last tile
//
//   Results
//   Epilogue(args, call, staging, acc, row_block, tile, await_partials)
//                                       the consumer: adds partial tiles, and stages the m64 blocks
//                                       in order; acc[i] is m64 block staging.M64At(i)
//   Store(args, call, staging, row_block, tile)
//                                       one lane of the store warp: writes out the staged m64
//                                       blocks, in the same order
//
// With a lent stage (kLendsStage), Epilogue and Store must not wait for peers.
template <typename Op>
__device__ __forceinline__ void RunGemm(const typename Op::Args& args) {
  using Config = typename Op::Config;
  static_assert(!Config::kLendsStage || (!Op::kAddsPartials && !Op::kReceives));
  JFLUX_DYNAMIC_SHARED(uint8_t, 1024, storage);
  const GemmSmem<Config> smem{ptx::SmemAddress(storage)};
  const uint32_t cta = Config::kCluster == 1 ? 0 : ptx::ClusterCtaRank();
  const int warp = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 32, 0);
  const int lane = threadIdx.x % 32;

  // Start the slow operations first: the counter in device memory and the tensor maps.
  const bool takes = !Op::kStaticFirstTile && warp == 3 && lane == 0 && cta == 0;
  const int32_t taken = takes ? NextTile<Op>(args, /*last=*/-1) : 0;
  if (threadIdx.x == 32) Op::PrefetchMaps(args);

  if (threadIdx.x == 128) {  // a consumer's thread: consumers are idle until the first stage is
                             // full
    for (int i = 0; i < Config::kStages; ++i) {
      ptx::MbarrierInit(smem.Full(i), kFullArrivals<Op>);
      ptx::MbarrierInit(smem.Empty(i), EmptyArrivals<Config>());
    }
    for (int i = 0; i < Config::kTileQueue; ++i) {
      ptx::MbarrierInit(smem.TileFull(i), 1);
      ptx::MbarrierInit(smem.TileEmpty(i), TileReaders<Config>(Op::kAddsPartials));
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
  if constexpr (Op::kStaticFirstTile) {
    if (warp == 3) WriteFirstTile<Op>(args, smem, cta);
  }
  const CallContext call = [&] {
    if constexpr (Op::kLocal) {
      return CallContext{};
    } else {
      return MakeContext(args);
    }
  }();
  __syncthreads();
  if (Op::kStaticFirstTile && threadIdx.x == 96) ptx::MbarrierArrive(smem.TileFull(0));
  if (Config::kCluster > 1) ptx::ClusterSyncRelaxed();

  if (warp < 4) {
    ptx::RegistersDown<Config::kProducerRegisters>();
    if constexpr (!Op::kLocal) {
      if (call.delays) DelayCall(*args.state, call.epoch, args.view.rank);
    }
    if (warp == 0) {
      RunLoadWarp<Op>(args, call, smem, cta);
    } else if (warp == 1) {
      if constexpr (!Op::kLocal) {
        if (lane == 0) EnterWorkspace(args.view);
      }
      Op::Send(args, call, smem);
      if constexpr (!Op::kLocal) {
        __syncwarp();
        if (lane == 0) LeaveCounters<Op>(args);
        if constexpr (Op::kAddsPartials) RunPartialsWaiter<Op>(args, call, smem, cta);
        if (lane == 0) {
          TrapIfFaulted(args.view, call.wait);
          LeaveWorkspace(args.view);
        }
      }
    } else if (warp == 2) {
      if (ptx::ElectOne()) {
        if constexpr (!Op::kLocal) {
          TrapIfNotAlone(args.view, call.wait);  // before the first tile is staged there is time
        }
        RunStoreWarp<Op>(args, call, smem, cta);
      }
    } else {
      if constexpr (!Op::kLocal) {
        if (lane == 0) EnterWorkspace(args.view);
      }
      const auto entries = RunSchedulerWarp<Op>(args, call, smem, cta, taken);
      if constexpr (!Op::kLocal) {
        if (lane == 0) {
          LeaveCounters<Op>(args);
          TrapIfFaulted(args.view, call.wait);
          LeaveWorkspace(args.view);
        }
      }
      if (Config::kCluster > 1 && cta == 0) {
        AwaitAllEmpty(entries, [&](int entry) { return smem.TileEmpty(entry); });
      }
    }
  } else {
    ptx::RegistersUp<Config::kConsumerRegisters>();
    if constexpr (SumsRows<Op>()) {
      Op::MakeTable(args, smem, cta);
    } else if constexpr (Op::kGathersRows) {
      if (cta == 0) Op::MakeTable(args, smem);
    }
    RunConsumer<Op>(args, call, smem, cta, warp / 4 - 1);
    if constexpr (SumsRows<Op>()) Op::SumRows(args, call, smem);
  }
}

// NameKernel<Config>, which runs NameSm90<Config> with NameArgs.
#define JFLUX_GEMM_KERNEL(Name)                               \
  template <typename Config>                                  \
  __global__ void __launch_bounds__(Config::kThreads, 1)      \
      Name##Kernel(const __grid_constant__ Name##Args args) { \
    RunGemm<Name##Sm90<Config>>(args);                        \
  }                                                           \
  static_assert(true)

}  // namespace jflux

#endif  // JFLUX_GPU_GEMM_SM90_CUH_
