// grouped_matmul_reduce_scatter in portable code (gpu/gemm_sm80.cuh): one kernel that multiplies,
// sums and sends, in the workspace and the order of Hopper's.
//
// A CTA stores its tile's rows to y, a result of the call, and counts its m64 blocks. Then its
// warps sum tokens of peers, as far as all tiles with their rows are counted: the other CTA of the
// SM multiplies meanwhile. After the last tile they wait for the rest, and sum own tokens.
//
//   writes  all warps: the peers' workspaces and signals
//   waits   all warps, after their CTA's last tile: for tiles of this rank, and of own tokens for
//           peers' sums
//   order   a tile's rows: stores, a barrier of the CTA, a count with release at GPU scope. Sums:
//           TokenSums
//   reset   never: core/signal.h; the counters: LeaveCounters (gpu/gemm_call.cuh)
//
// Deadlock: tiles wait for nobody. A warp waits when no tile is left to take, so each tile is
// stored, or its CTA is running. Items are taken in order, and those of peers wait for tiles only:
// an item that a warp holds while its CTA multiplies is summed after that tile, or after the last
// one.
#ifndef JFLUX_OPS_GROUPED_MATMUL_REDUCE_SCATTER_GROUPED_MATMUL_REDUCE_SCATTER_SM80_CUH_
#define JFLUX_OPS_GROUPED_MATMUL_REDUCE_SCATTER_GROUPED_MATMUL_REDUCE_SCATTER_SM80_CUH_

#include "core/scattered_tiles.h"
#include "ops/grouped_matmul/grouped_matmul_sm80.cuh"
#include "ops/grouped_matmul/span_table.cuh"
#include "ops/grouped_matmul_reduce_scatter/grouped_matmul_reduce_scatter.h"
#include "ops/grouped_matmul_reduce_scatter/token_sums.cuh"

namespace jflux {

// Of the base's groups there are no group_sizes.
struct GroupedMatmulReduceScatterArgs80 : GroupedMatmulArgs80 {
  DeviceState* state;
  SymmetricView view;
  uint32_t signature, op;
  WorkspaceLayout workspace;
  SumLayout layout;
  ScatteredTiles order;
  SumItems items;
  int32_t tokens;  // of each rank
  int32_t choices;
  const int32_t* offsets;
  const int32_t* destination;
  const int32_t* source;
  const float* weights;
  char* out;
  DType wire;  // of sums that travel quantised; those have scales in the layout

  __device__ __forceinline__ const void* Y() const { return y; }
  // Blocks of a class that have been stored (core/tile_counts.h).
  __device__ __forceinline__ uint64_t* StoredOf(int32_t tile_class) const {
    return &view.At<WorkspaceHeader>(view.rank, 0)->tiles_stored[tile_class];
  }
};

template <typename Config_>
struct GroupedMatmulReduceScatterSm80 : GroupedMatmulSm80<Config_> {
  using Config = Config_;
  using Args = GroupedMatmulReduceScatterArgs80;
  using Base = GroupedMatmulSm80<Config>;
  using T = typename Config::T;

  // Behind the stages: the table of spans, and the number of blocks of each class.
  static __device__ Spans SpansOf(const Args& args, uint32_t smem) {
    return Spans(smem + Config::kSmemBytes, args.order.Segments());
  }
  static __device__ uint32_t BlocksAt(const Args& args, uint32_t smem) {
    return SpansOf(args, smem).End(args.groups.groups);
  }

  // A tile's n counts the columns of the groups of a class, class after class.
  struct Schedule : ClassedGroups<ScatteredTiles>, Counted {
    using Groups = ClassedGroups<ScatteredTiles>;
    __device__ Schedule(const Args& args, uint32_t smem)
        : Groups(args.order, SpansOf(args, smem), args.groups.groups) {}
    __device__ Tile Find(const Args& args, int32_t t) {
      if (!Groups::Find(t)) return kNoTile80;
      return this->TileOf(t, this->tile_class() * args.groups.groups + this->group());
    }
  };

  struct Operands : Base::Operands {
    static constexpr int kMostTerms = 1;
  };

  // Of results of type U, perhaps with a wire.
  template <typename U, bool kWire>
  struct Sums {
    // Called by a full warp. Sums one item if that can be done; with `waits`, waits until it can.
    // False if it cannot, or there are no more.
    static __device__ __forceinline__ bool One(const Args& args, const CallContext& call,
                                               uint32_t smem, bool waits) {
      const int lane = threadIdx.x % 32;
      int32_t i = 0;
      if (lane == 0) {
        if (Held() < 0) Held() = TakeCopy(args);
        i = Held();
      }
      i = __shfl_sync(0xffffffff, i, 0);
      if (i >= args.items.Count()) return false;
      const SumItems::Item item = args.items.At(i);
      const bool is_own = item.owner == args.view.rank;
      if (item.count > 0) {
        if (!waits && is_own) return false;
        bool is_there = true;
        if (lane <= item.cls) {  // fewer classes than lanes, or as many
          const int32_t blocks = ptx::LoadShared4(BlocksAt(args, smem) + 4 * lane);
          if (waits) {
            AwaitTiles(args.StoredOf(lane), blocks, lane, call.wait);
          } else {
            is_there = LoadAcquire(args.StoredOf(lane)) >= static_cast<uint64_t>(blocks);
          }
        }
        if (!__all_sync(0xffffffff, is_there)) return false;
        if (is_own && lane < args.view.world && lane != args.view.rank) {
          AwaitPeer(call, ItemSignal(args, call, item.owner, lane, item.place), lane, item.place);
        }
        __syncwarp();
        TokenSums<Args, U, /*kVectors=*/1, /*kBatch=*/4, kWire, /*kSetsAll=*/true>::SumItem(
            args, call, item);
      }
      if (lane == 0) Held() = -1;
      return true;
    }
  };
  static_assert(kMostTileClasses <= 32);
  // The item that this warp holds; -1: none. Its first lane alone uses it.
  static __device__ int32_t& Held() {
    JFLUX_SHARED(int32_t[Config::kThreads / 32], held);
    return held[threadIdx.x / 32];
  }
  static __device__ __forceinline__ bool SumOne(const Args& args, const CallContext& call,
                                                uint32_t smem, bool waits) {
    if (args.layout.scale_bytes > 0) {
      return args.out_f32 ? Sums<float, true>::One(args, call, smem, waits)
                          : Sums<T, true>::One(args, call, smem, waits);
    }
    return args.out_f32 ? Sums<float, false>::One(args, call, smem, waits)
                        : Sums<T, false>::One(args, call, smem, waits);
  }

  struct Epilogue : Base::Epilogue {
    static constexpr int kMostItems = 4;  // that a warp sums between two tiles

    static __device__ __forceinline__ void Finish(const Args& args, const CallContext& call,
                                                  uint32_t smem, Sums80<Config>& sums, Tile tile) {
      Base::Epilogue::FinishRows(args, smem, sums, tile, [](int64_t) { return true; });
      __syncthreads();
      if (threadIdx.x == 0) {
        const int32_t tile_class = tile.n / args.tiles.tiles_n / args.groups.groups;
        AddReleaseLocal(args.StoredOf(tile_class),
                        CeilDiv(Min(Config::kTileM, tile.split - tile.m), 64));
      }
      __syncwarp();
#pragma unroll 1
      for (int i = 0; i < kMostItems && SumOne(args, call, smem, false); ++i) {
      }
    }
  };

  struct Exchange : PeerExchange80 {
    static __device__ void LeaveCounters(const Args& args) {
      jflux::LeaveCounters<1>(args, [](WorkspaceHeader* header) {
        for (int32_t c = 0; c < kMostTileClasses; ++c) header->tiles_stored[c] = 0;
      });
    }
    static __device__ void Send(const Args& args, const CallContext&, uint32_t smem) {
      if (threadIdx.x % 32 == 0) Held() = -1;
      const Spans spans = SpansOf(args, smem);
      spans.Fill(args, threadIdx.x, Config::kThreads);
      __syncthreads();
      for (int32_t c = threadIdx.x / 32; c < args.order.Classes(); c += Config::kThreads / 32) {
        const int32_t blocks = BlocksOfClass(args, spans, c);
        if (threadIdx.x % 32 == 31) ptx::StoreShared4(BlocksAt(args, smem) + 4 * c, blocks);
      }
      __syncthreads();
    }
    static __device__ void Finally(const Args& args, const CallContext& call, uint32_t smem) {
      if (threadIdx.x < 32) {
        if (blockIdx.x == 0) CheckOffsets(args);
        Base::Epilogue::FillPast(args, __ldg(args.offsets + args.groups.groups));
      }
      while (SumOne(args, call, smem, true)) {
      }
    }
  };
};

JFLUX_GEMM_KERNEL_80(GroupedMatmulReduceScatter);

}  // namespace jflux

#endif  // JFLUX_OPS_GROUPED_MATMUL_REDUCE_SCATTER_GROUPED_MATMUL_REDUCE_SCATTER_SM80_CUH_
