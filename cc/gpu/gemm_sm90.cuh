// A persistent, warp-specialised GEMM main loop for Hopper, with hooks per tile.
//
// A CTA computes kTileM x kTileN tiles; kClusterM CTAs form a cluster that computes that many tiles
// one below the other, sharing w's tile by multicast. Or kClusterK of them compute a part of k each
// of one tile, and each finishes a slice of its columns (gpu/cluster_sum.cuh). Three warpgroups:
//
//   0, warp 0   loader: feeds the stages by TMA, one tile's operands after the other's
//   0, warp 1   Op::Send: moves this rank's data to its peers (all-gather); then, if there are
//               parts of tiles that others compute, waits for them (Op::WaitForParts)
//   0, warp 2   storer: Op::Store writes out what the consumers staged
//   0, warp 3   scheduler: takes tiles from a counter in device memory, one ahead of the loader,
//   and
//               waits for a tile's rows of A, k block by k block (Op::WaitForRows). Where nobody
//               waits for a tile, a cluster's first one is fixed (Op::kFirstIsFixed)
//   1 and 2     consumers: wgmma, then Op::Finish, which adds others' parts and stages the result.
//               They take tiles in turn; those of 224 and 256 columns they share
//
//   scheduler --tile--> loader --stages--> consumers --staging--> storer
//
// (and a stage that was staging goes from the storer back to the loader: gpu/staging.cuh).
//
// Each hands on to the next and goes on at once: while a tile is finished, written out, or waits
// for parts or rows, the other consumer keeps the tensor cores busy, unless they share a tile
// (docs/design/0003).
//
// Tiles and units of sending are taken from counters, so a kernel makes progress with whatever
// CTAs the device has room for: one that starts late, because another kernel holds its SM, finds
// its share done, but for a fixed first tile. The counters are put back when nobody takes from them
// any more, and then the epoch is published too.
//
// The Op (ops/*/*_sm90.cuh) is a struct of static device functions and an Args type; see RunGemm.
// What the roles share is in gemm_smem.cuh, staging.cuh and gemm_call.cuh.
#ifndef JFLUX_GPU_GEMM_SM90_CUH_
#define JFLUX_GPU_GEMM_SM90_CUH_

#include <cstdint>

#include "core/tile_order.h"
#include "gpu/cluster_sum.cuh"
#include "gpu/gemm_call.cuh"
#include "gpu/gemm_smem.cuh"
#include "gpu/ptx.cuh"
#include "gpu/staging.cuh"
#include "gpu/wgmma.cuh"

namespace jflux {

// Where the columns of a tile are: the tensor map of a w, and the first column in it. If there is a
// second w, half of the tile's columns are its, from the same column on.
struct Rhs {
  const CUtensorMap* map;
  int32_t n0;
  const CUtensorMap* second = nullptr;
};

// Of k, in elements; begins at a multiple of kTileK.
struct KRange {
  int32_t begin, end;
};

// Part `split` of k, where a cluster shares it: all are equal, but for rounding to k blocks.
template <typename Config>
__device__ __forceinline__ KRange SplitOfK(int64_t k, int split) {
  constexpr int32_t kSplits = Config::kClusterK;
  const auto end = static_cast<int32_t>(k);
  if (kSplits == 1) return KRange{0, end};
  const int32_t blocks = CeilDiv(end, Config::kTileK);
  return KRange{split * blocks / kSplits * Config::kTileK,
                Min(end, (split + 1) * blocks / kSplits * Config::kTileK)};
}

// w's tile for one k block: this CTA's share, to every CTA of the cluster. Boxes are 128 bytes
// wide: 64 of k if w is stored [n, k], else 64 columns.
template <typename Config>
__device__ __forceinline__ void LoadB(uint32_t smem_b, const Rhs& rhs, uint32_t bar, int k0,
                                      uint32_t cta) {
  constexpr int kHalf = Config::kTileN / 2;
  const int i = Config::kClusterM == 1 ? 0 : static_cast<int>(cta);
  const auto load = [&](int at, const CUtensorMap* map, int inner, int outer) {
    if constexpr (Config::kClusterM == 1) {
      ptx::TmaLoad2d(smem_b + at, map, bar, inner, outer);
    } else {
      constexpr auto kAll = static_cast<uint16_t>((1 << Config::kClusterM) - 1);
      ptx::TmaLoad2dMulticast(smem_b + at, map, bar, inner, outer, kAll);
    }
  };
  if constexpr (Config::kTransposeRhs) {
    constexpr int kShare = Config::kTileN / Config::kClusterM;
    if constexpr (Config::kHalves) {
      if (rhs.second != nullptr) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if (Config::kClusterM == 2 && half != i) continue;
          load(half * kHalf * 128, half == 0 ? rhs.map : rhs.second, k0, rhs.n0);
        }
        return;
      }
    }
    load(i * kShare * 128, rhs.map, k0, rhs.n0 + i * kShare);
  } else {
    const int row = i * Config::kBoxRows;
#pragma unroll
    for (int box = 0; box < Config::kLoadN / 64; ++box) {
      const bool second = Config::kHalves && box * 64 >= kHalf && rhs.second != nullptr;
      load(box * 8192 + row * 128, second ? rhs.second : rhs.map,
           rhs.n0 + box * 64 - (second ? kHalf : 0), k0 + row);
    }
  }
}

// A thread's share of a tile.
template <typename Config>
using Accumulators = float[Config::kOwnBlocks][Config::kAccumulators];

// acc += A @ B over one k block of 64, or, if not `adds`, acc = A @ B; `a` is the first own
// block's.
template <typename Config>
__device__ __forceinline__ void MultiplyStage(Accumulators<Config>& acc, uint32_t a, uint32_t b,
                                              bool adds) {
  constexpr int kTransB = Config::kTransposeRhs ? 0 : 1;
  constexpr const typename Config::T* kType = nullptr;
#pragma unroll
  for (int k = 0; k < Config::kTileK / 16; ++k) {
    const uint64_t desc_b = kTransB ? wgmma::Descriptor(b + k * 2048, 8192, 1024)
                                    : wgmma::Descriptor(b + k * 32, 16, 1024);
#pragma unroll
    for (int block = 0; block < Config::kOwnBlocks; ++block) {
      const uint64_t desc_a = wgmma::Descriptor(a + block * 8192 + k * 32, 16, 1024);
      wgmma::Multiply<kTransB>(kType, acc[block], desc_a, desc_b, adds || k > 0);
    }
  }
}

template <typename Config>
__device__ __forceinline__ void PinAll(Accumulators<Config>& acc) {
#pragma unroll
  for (int block = 0; block < Config::kOwnBlocks; ++block) wgmma::Pin(acc[block]);
}

template <typename Config>
__device__ __forceinline__ int32_t BlockRow(Tile tile, uint32_t cta) {
  return tile.m * Config::kClusterM + (Config::kClusterM == 1 ? 0 : static_cast<int32_t>(cta));
}

// K blocks of a tile, over all its terms.
template <typename Op>
__device__ __forceinline__ int BlocksOf(const typename Op::Args& args, Tile tile) {
  int blocks = 0;
  for (int term = 0; term < Op::TermsOf(args); ++term) {
    const KRange k = Op::KOf(args, tile, term);
    blocks += CeilDiv<int>(k.end - k.begin, Op::Config::kTileK);
  }
  return blocks;
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

// A tile from the counter, after those that clusters begin with.
template <typename Op>
__device__ __forceinline__ int32_t NextTile(const typename Op::Args& args) {
  const uint32_t begun = Op::kFirstIsFixed ? gridDim.x / Op::Config::kCluster : 0;
  return TakeTile(args) + static_cast<int32_t>(begun);
}

// A CTA's share of its cluster's first tile, by a warp. It may be read after SlotFull(0).
template <typename Op>
__device__ __forceinline__ void WriteFirstTile(const typename Op::Args& args,
                                               const GemmSmem<typename Op::Config>& smem,
                                               uint32_t cta) {
  using Config = typename Op::Config;
  const auto number = static_cast<int32_t>(blockIdx.x / Config::kCluster);
  const Tile tile = ShareOf<Config>(Op::FirstTile(args, number), static_cast<int>(cta));
  const auto where = Op::WhereOf(args, BlockRow<Config>(tile, cta), tile);
  if (threadIdx.x % 32 == 0) WriteSlot(smem.SlotTile(0), tile, BlocksOf<Op>(args, tile), where);
}

// Returns the slot after the last. `taken`: the first tile, if it has been taken.
template <typename Op>
__device__ __forceinline__ auto RunScheduler(const typename Op::Args& args, const CallContext& call,
                                             const GemmSmem<typename Op::Config>& smem,
                                             uint32_t cta, int32_t taken) {
  using Config = typename Op::Config;
  const int lane = threadIdx.x % 32;
  Ring<Config::kSlots> slots;
  TileReader<Config> reader{smem, {}};
  auto receiver = MakeReceiver<Op>(smem);
  uint32_t begun = 0;   // parity
  uint32_t blocks = 0;  // of A, in the tiles before
  bool is_there = Op::kFirstIsFixed;
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
    typename Op::Where where[Config::kCluster]{};  // [0]: this CTA's, in the end
    if (cta == 0 && !is_there) {
      const int32_t t = __shfl_sync(0xffffffff, taken, 0);
      if (t < args.num_tiles) {
        tile = Op::TileAt(args, t);
#pragma unroll
        for (int i = 0; i < Config::kCluster; ++i) {
          k_blocks[i] = BlocksOf<Op>(args, ShareOf<Config>(tile, i));
          where[i] = Op::WhereOf(args, BlockRow<Config>(tile, i), tile);
        }
      }
      if (lane == 0) PublishTile(smem, slots, tile, k_blocks, where);
      slots.Advance();
    } else {
      receive_until(smem.SlotFull(reader.ring.index), reader.ring.parity);
      tile = reader.Enter();
      k_blocks[0] = reader.Blocks();
      where[0] = reader.template Where<typename Op::Where>();
      if (cta == 0) {
        slots.Advance();
        is_there = false;
      } else {
        reader.Leave();
      }
    }
    if (!IsTile(tile)) {
      if constexpr (Op::kReceives) Op::ReceiveRest(args, call, receiver);
      return slots;
    }
    const int32_t block_m = BlockRow<Config>(tile, cta);
    if constexpr (Op::kRowsArrive) {
      const uint64_t start = call.Start();
      Op::WaitForRows(args, call, block_m, tile, where[0], [&](int come) {
        __syncwarp();
        if (lane == 0) ptx::StoreSharedRelease(smem.RowsMark(), blocks + come);
      });
      blocks += k_blocks[0];
      if (lane == 0) call.Done(EventKind::kWaitRows, start, block_m, tile.n);
    }
    // A loader that waits for no rows may have begun with two tiles before another CTA's scheduler
    // looks once, and phases are told apart by parity alone. That scheduler has no reason to wait.
    if (cta == 0 || Op::kRowsArrive) {
      receive_until(smem.Begun(), begun);
      ptx::MbarrierWait(smem.Begun(), begun);
      begun ^= 1;
    }
    if (cta == 0 && lane == 0) taken = NextTile<Op>(args);
  }
}

// Waits for the parts of tiles that others compute.
template <typename Op>
__device__ __forceinline__ void RunPartsScheduler(const typename Op::Args& args,
                                                  const CallContext& call,
                                                  const GemmSmem<typename Op::Config>& smem,
                                                  uint32_t cta) {
  using Config = typename Op::Config;
  TileReader<Config> reader{smem, {}};
  for (;;) {
    const int slot = reader.ring.index;
    const Tile tile = reader.Enter();
    if (IsTile(tile)) {
      Op::WaitForParts(args, call, BlockRow<Config>(tile, cta), tile);
      __syncwarp();
      if (threadIdx.x % 32 == 0) ptx::MbarrierArrive(smem.PartsReady(slot));
    }
    reader.Leave();
    if (!IsTile(tile)) return;
  }
}

// A CTA of a cluster must not end as long as another one may still arrive here. What that one
// arrives at are the barriers that say that a stage, or a slot, is empty again: who waits for all
// of them, `next` being the next to be filled, may leave.
template <int kSize, typename BarrierOf>
__device__ __forceinline__ void AwaitAllEmpty(Ring<kSize> next, BarrierOf&& barrier_of) {
  for (int i = 0; i < kSize; ++i) {
    ptx::MbarrierWait(barrier_of(next.index), next.parity ^ 1);
    next.Advance();
  }
}

// One lane: fills the stages with a tile's operands. Every tile has a k block of the first term.
template <typename Op>
__device__ __forceinline__ void LoadTile(const typename Op::Args& args, const CallContext& call,
                                         const GemmSmem<typename Op::Config>& smem, uint32_t cta,
                                         Tile tile, const typename Op::Where& where,
                                         Ring<Op::Config::kStages>& stages, RowsReader& rows) {
  using Config = typename Op::Config;
  const auto load_b = [&](const Ring<Config::kStages>& stage, const Rhs& rhs, int k0) {
    const uint32_t bar = smem.Full(stage.index);
    ptx::MbarrierArriveExpectTx(bar, args.a_bytes + Config::kBBytes);
    LoadB<Config>(smem.B(stage.index), rhs, bar, k0, cta);
  };
  // W goes before A: it comes from farther away, and the CTAs of a cluster need each other's share
  // of it, whoever's rows are late.
  const KRange first = Op::KOf(args, tile, 0);
  const Rhs first_rhs = Op::RhsOf(args, where, 0);
  ptx::MbarrierWait(smem.Empty(stages.index), stages.parity ^ 1);
  load_b(stages, first_rhs, first.begin);
  int staged = first.begin + Config::kTileK;  // of the first term, so far
  if constexpr (Op::kRowsArrive) {
    // As long as no rows have come, w comes to the stages that are free.
    Ring<Config::kStages> early = stages;
    early.Advance();
    const int most = Min(first.begin + Config::kStages * Config::kTileK, first.end);
    while (!rows.Look()) {
      if (staged < most && ptx::MbarrierTest(smem.Empty(early.index), early.parity ^ 1)) {
        load_b(early, first_rhs, staged);
        early.Advance();
        staged += Config::kTileK;
      }
    }
  }
  ptx::MbarrierArrive(smem.Begun());
  for (int term = 0; term < Op::TermsOf(args); ++term) {
    const auto source = Op::SourceOf(args, call, where, term);
    const Rhs rhs = term == 0 ? first_rhs : Op::RhsOf(args, where, term);
    const KRange k = term == 0 ? first : Op::KOf(args, tile, term);
    for (int k0 = k.begin; k0 < k.end; k0 += Config::kTileK) {
      if (term != 0 || k0 >= staged) {
        ptx::MbarrierWait(smem.Empty(stages.index), stages.parity ^ 1);
        load_b(stages, rhs, k0);
      }
      if constexpr (Op::kRowsArrive) rows.Take();
      Op::LoadA(source, smem.A(stages.index), smem.Full(stages.index), k0);
      stages.Advance();
    }
  }
}

template <typename Op>
__device__ __forceinline__ void RunLoader(const typename Op::Args& args, const CallContext& call,
                                          const GemmSmem<typename Op::Config>& smem, uint32_t cta) {
  using Config = typename Op::Config;
  TileReader<Config> reader{smem, {}};
  Ring<Config::kStages> stages;
  RowsReader rows{smem.RowsMark()};
  for (;;) {
    const Tile tile = reader.Enter();
    const auto where = reader.template Where<typename Op::Where>();
    reader.Leave();
    if (!IsTile(tile)) break;
    if (ptx::ElectOne()) LoadTile<Op>(args, call, smem, cta, tile, where, stages, rows);
    __syncwarp();
  }
  if (Config::kClusterM > 1 && ptx::ElectOne()) {
    AwaitAllEmpty(stages, [&](int stage) { return smem.Empty(stage); });
  }
}

// One lane for both consumers: TMA takes its operands from registers that a warp shares, so lanes
// must not issue stores side by side.
template <typename Op>
__device__ __forceinline__ void RunStorer(const typename Op::Args& args, const CallContext& call,
                                          const GemmSmem<typename Op::Config>& smem, uint32_t cta) {
  using Config = typename Op::Config;
  TileReader<Config> reader{smem, {}};
  StagingReader<Config> staging{smem};
  for (;;) {
    const auto [tile, k_blocks] = reader.NextAlone();
    if (!IsTile(tile)) break;
    staging.Enter(k_blocks);
    Op::Store(args, call, staging, BlockRow<Config>(tile, cta), tile);
    staging.Leave();
  }
  // All staging has been read; what has been written of y is there when the kernel ends.
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
  uint32_t turn_parity = consumer == 0 ? 1 : 0;  // the first turn is consumer 0's
  const bool records = call.recording && threadIdx.x % 128 == 0;
  ClusterSum<Config> sum{smem, consumer, static_cast<int>(cta)};
  const auto release = [&](int stage, int arrivals) {
    if (lane < Config::kClusterM) {
      ptx::MbarrierArriveRemote(
          ptx::MapToCta(smem.Empty(stage), Config::kClusterM == 1 ? cta : lane), arrivals);
    }
  };
  // Where stages are lent: also for this consumer's results, of which others than the last have
  // none.
  const bool is_first_warp = threadIdx.x % 128 < 32;
  const int arrivals = Config::kLends && is_first_warp ? 2 : 1;
  for (int turn = 0;; turn ^= 1) {
    const Ring<Config::kSlots> slot = reader.ring;
    const Tile tile = reader.Enter();
    if (!IsTile(tile)) {
      sum.AwaitReaders();
      return reader.Leave();
    }
    const int k_blocks = reader.Blocks();
    if (!Config::kCooperative && turn != consumer) {
      reader.Leave();
      stages.Skip(k_blocks);
      continue;
    }
    const int32_t block_m = BlockRow<Config>(tile, cta);
    // Other registers for each tile, as far as the compiler knows: those that come from an
    // epilogue's branches would serialise wgmma. Zeroed in code that all threads reach; or, while
    // nobody else multiplies, by the first product, which writes what it does not add to. (Where
    // parts are added that spills registers.)
    constexpr bool kFirstWrites = Config::kCooperative && !Op::kHasParts;
    Accumulators<Config> acc;
    if constexpr (!kFirstWrites) {
#pragma unroll
      for (int block = 0; block < Config::kOwnBlocks; ++block) {
#pragma unroll
        for (int i = 0; i < Config::kAccumulators; ++i) acc[block][i] = 0;
      }
    }
    if constexpr (!Config::kCooperative) {
      // Until the other's stages are full, this one's have phases that cannot be told from earlier
      // ones.
      ptx::MbarrierWait(smem.Turn(consumer), turn_parity);
      turn_parity ^= 1;
    }
    int last = -1;
    if (call.recording && k_blocks > 0) {
      ptx::MbarrierWait(smem.Full(stages.index), stages.parity);
    }
    uint64_t start = call.Start();
    for (int kb = 0; kb < k_blocks; ++kb) {
      ptx::MbarrierWait(smem.Full(stages.index), stages.parity);
      PinAll<Config>(acc);
      wgmma::Fence();
      MultiplyStage<Config>(acc, smem.A(stages.index) + staging.BlockAt(0) * 8192,
                            smem.B(stages.index), !kFirstWrites || kb > 0);
      wgmma::Commit();
      PinAll<Config>(acc);
      wgmma::Wait<1>();  // the block before this one has been read
      if (last >= 0) release(last, arrivals);
      last = stages.index;
      stages.Advance();
    }
    if (!Config::kCooperative && lane == 0) ptx::MbarrierArrive(smem.Turn(1 - consumer));
    wgmma::Wait<0>();
    PinAll<Config>(acc);
    if constexpr (Config::kLends) {
      // Both have read the last stage. (There is one: every tile has a k block, unless k is split.)
      ptx::BarrierSync(1 + Config::kConsumers, 128 * Config::kConsumers);
      staging.Enter(last);
    } else if (last >= 0) {
      release(last, arrivals);
    }
    if (records) call.Done(EventKind::kMultiply, start, block_m, tile.n);
    start = call.Start();
    const auto await_parts = [&] { ptx::MbarrierWait(smem.PartsReady(slot.index), slot.parity); };
    if constexpr (Config::kClusterK == 1) {
      Op::Finish(args, call, staging, acc, block_m, tile, await_parts);
    } else {
      Slices<Config> slices;
#pragma unroll
      for (int block = 0; block < Config::kOwnBlocks; ++block) {
        if (Op::HasRows(args, block_m, block)) sum.Run(acc[block], slices[block]);
      }
      Op::Finish(args, call, staging, slices, block_m, tile, await_parts);
    }
    if constexpr (Config::kLends) {
      __syncwarp();
      release(last, is_first_warp && !staging.published ? 2 : 1);
    }
    if (records) call.Done(EventKind::kEpilogue, start, block_m, tile.n);
    reader.Leave();
  }
}

// The kernel body. Op provides
//   Config, Args {state, view, signature, op, num_tiles, a_bytes, ...}
//   TileAt(args, t) -> Tile             in units of cluster tiles
//   kFirstIsFixed                       whether a cluster begins with the tile of its number, which
//                                       is known sooner. One that starts late has it to do, so
//                                       nobody may wait for a tile. If so
//   FirstTile(args, cluster) -> Tile    TileAt, which the host has worked out
//   PrefetchMaps(args)                  one lane
//   kRowsArrive                         whether peers send A's rows, and if so
//   WaitForRows(args, call, block_m, tile, where, mark)
//                                       all lanes of the scheduler: mark(how many of the tile's k
//                                       blocks can be read), until that is all
//   TermsOf(args), KOf(args, tile, term) -> KRange
//                                       a tile is the sum of so many products, each over its k
//   Where, WhereOf(args, block_m, tile) -> Where
//                                       16 bytes: all that depends on the tile of where its
//                                       operands are; so the scheduler works it out, and not the
//                                       loader
//   SourceOf(args, call, where, term), LoadA(source, smem, bar, k0)
//   RhsOf(args, where, term) -> Rhs
//   kHasParts                           whether there are tiles with parts that others compute,
//                                       and if so
//   WaitForParts(args, call, block_m, tile)                     all lanes
//   kReceives                           whether what peers send goes to y, and if so
//   MakeReceiver(smem), Receive(args, call, receiver, waits), ReceiveRest(args, call, receiver)
//                                       all lanes of the scheduler, when it has time, as long as it
//                                       is true; in the end
//   HasRows(args, block_m, block)       whether a tile's block has any, if kClusterK > 1
//   Send(args, call, smem)              a warp; everything that peers wait for without waiting
//   Finish(args, call, staging, acc, block_m, tile, await_parts)
//                                       adds the parts and stages, block by block, what Store
//                                       takes; acc[i] is block staging.BlockAt(i). Where tiles lend
//                                       stages neither may wait for peers
//   Store(args, call, staging, block_m, tile)
//                                       one lane; of each block in the same order
template <typename Op>
__device__ __forceinline__ void RunGemm(const typename Op::Args& args) {
  using Config = typename Op::Config;
  static_assert(!Config::kLends || (!Op::kHasParts && !Op::kReceives));
  extern __shared__ __align__(1024) uint8_t storage[];
  const GemmSmem<Config> smem{ptx::SmemAddress(storage)};
  const uint32_t cta = Config::kCluster == 1 ? 0 : ptx::ClusterCtaRank();
  const int warp = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 32, 0);
  const int lane = threadIdx.x % 32;

  // What takes long is asked for first.
  const bool takes = !Op::kFirstIsFixed && warp == 3 && lane == 0 && cta == 0;
  const int32_t taken = takes ? NextTile<Op>(args) : 0;
  if (threadIdx.x == 32) Op::PrefetchMaps(args);

  if (threadIdx.x == 128) {  // of a consumer, which has nothing else to do yet
    for (int i = 0; i < Config::kStages; ++i) {
      ptx::MbarrierInit(smem.Full(i), 1);
      ptx::MbarrierInit(smem.Empty(i), EmptyArrivals<Config>());
    }
    for (int i = 0; i < Config::kSlots; ++i) {
      ptx::MbarrierInit(smem.SlotFull(i), 1);
      ptx::MbarrierInit(smem.SlotEmpty(i), SlotReaders<Config>(Op::kHasParts));
      ptx::MbarrierInit(smem.PartsReady(i), 1);
    }
    ptx::MbarrierInit(smem.Begun(), 1);
    for (int i = 0; i < Config::kConsumers; ++i) {
      ptx::MbarrierInit(smem.Turn(i), 4);
      ptx::MbarrierInit(smem.Staged(i), 128);
      ptx::MbarrierInit(smem.Stored(i), 1);
      if (Config::kClusterK > 1) {
        ptx::MbarrierInit(smem.OthersCame(i), 1);
        ptx::MbarrierInit(smem.OthersRead(i), 4 * Config::kClusterK);
      }
    }
    for (int i = 0; i < Config::kSendBoxes; ++i) ptx::MbarrierInit(smem.SendBoxFull(i), 1);
    ptx::StoreSharedRelease(smem.RowsMark(), 0);
    ptx::FenceMbarrierInit();
  }
  if constexpr (Op::kFirstIsFixed) {
    if (warp == 3) WriteFirstTile<Op>(args, smem, cta);
  }
  const CallContext call = MakeContext(args);
  __syncthreads();
  if (Op::kFirstIsFixed && threadIdx.x == 96) ptx::MbarrierArrive(smem.SlotFull(0));
  if (Config::kCluster > 1) ptx::ClusterSyncRelaxed();

  if (warp < 4) {
    ptx::RegistersDown<Config::kLoaderRegisters>();
    if (call.delays) DelayCall(*args.state, call.epoch, args.view.rank);
    if (warp == 0) {
      RunLoader<Op>(args, call, smem, cta);
    } else if (warp == 1) {
      Op::Send(args, call, smem);
      __syncwarp();
      if (lane == 0) LeaveCounters(args);
      if constexpr (Op::kHasParts) RunPartsScheduler<Op>(args, call, smem, cta);
      if (lane == 0) EndOfWaits(args);
    } else if (warp == 2) {
      if (ptx::ElectOne()) RunStorer<Op>(args, call, smem, cta);
    } else {
      const auto slots = RunScheduler<Op>(args, call, smem, cta, taken);
      if (lane == 0) {
        LeaveCounters(args);
        EndOfWaits(args);
      }
      if (Config::kCluster > 1 && cta == 0) {
        AwaitAllEmpty(slots, [&](int slot) { return smem.SlotEmpty(slot); });
      }
    }
  } else {
    ptx::RegistersUp<Config::kConsumerRegisters>();
    RunConsumer<Op>(args, call, smem, cta, warp / 4 - 1);
  }
}

}  // namespace jflux

#endif  // JFLUX_GPU_GEMM_SM90_CUH_
