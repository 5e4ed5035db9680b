// all_to_all_matmul on Hopper: one kernel that sends, waits and multiplies.
//
// Send warps (shard_sender_sm90.cuh) take chunks of the peers' shards from a counter and copy them,
// by TMA and bulk copies through shared memory, to the peers' workspaces. A chunk's signal follows.
// Meanwhile the load warps start with the local shard, straight from x. The peers' shards are read
// from the workspace, k-panel by k-panel, as the signals arrive.
//
//   rows concatenated     tiles of the local shard come first, then those of each peer's shard
//   columns concatenated  a tile is a sum of terms, one for each rank's shard, the local one first.
//                         It starts at once, and waits only when it has used all k-panels that have
//                         arrived. A term is a whole number of k-blocks: the maps of x and w end
//                         with the shard, so that both read zeros beyond it
//
// The order of the terms depends on the rank alone, so every run gives the same bits.
//
//   writes  send warps: the peers' workspaces and signals
//   waits   scheduler warps, for the k-panels of their tiles; send warps, for copies to `gathered`
//   order   release and acquire at system scope, and proxy fences around bulk copies and TMA
//   reset   never: core/signal.h
//
// Deadlock: tiles and copies wait for peers' sends only, and sends wait for nothing. The running
// CTAs take all chunks, so a CTA that has not started holds none; nothing waits for its static
// first tile.
#ifndef JFLUX_OPS_ALL_TO_ALL_MATMUL_ALL_TO_ALL_MATMUL_SM90_CUH_
#define JFLUX_OPS_ALL_TO_ALL_MATMUL_ALL_TO_ALL_MATMUL_SM90_CUH_

#include "gpu/epilogue_sm90.cuh"
#include "gpu/gemm_config.h"
#include "gpu/gemm_sm90.cuh"
#include "ops/all_to_all_matmul/shard_sender_sm90.cuh"

namespace jflux {

template <typename Config_>
struct AllToAllMatmulSm90 {
  using Config = Config_;
  using Args = AllToAllMatmulArgs;
  using T = typename Config::T;

  // The rows of a CTA: the step of their shard (0 if columns are concatenated) and the row block in
  // it. The second CTA of a cluster may lie below the shard.
  struct Place {
    int32_t step, row_block;
  };
  static __device__ Place PlaceOf(const Args& args, int32_t row_block) {
    if (!args.concat_rows) return Place{0, row_block};
    const int32_t row_blocks = args.order.tiles_m * Config::kClusterM,
                  step = row_block / row_blocks;
    return Place{step, row_block - step * row_blocks};
  }
  static __device__ bool HasRows(const Args& args, const Place& place, int m64) {
    return place.row_block * Config::kTileM + m64 * 64 < static_cast<int32_t>(args.rows.PerRank());
  }

  struct Schedule : OrderedTiles<StaticFirst> {
    using OrderedTiles::OrderedTiles;
    // Safe: tiles wait for send warps only, never for another tile.
    static __device__ Tile FirstTile(const Args& args, int32_t cluster) {
      return args.order.At(cluster);
    }
  };

  struct Operands : BoxesOfA {
    // Operand coordinates: the column in w; the row in x if the tile has rows of the local shard
    // (else outer < 0); the row in the workspace, of step 1 or of the tile's own step.
    struct alignas(16) Coords {
      int32_t n0, inner, outer, row;
    };
    static __device__ Coords CoordsOf(const Args& args, const Schedule&, int32_t row_block,
                                      Tile tile) {
      const Place place = PlaceOf(args, row_block);
      const int32_t n0 = tile.n * Config::kTileN;
      const RowAt at = RowOf(args, place.row_block * Config::kTileM, args.split_rows);
      // A row block below its shard is read from past the workspace's end: zeros.
      const int64_t row = HasRows(args, place, 0)
                              ? args.panels.RowOf(Max(place.step, 1), place.row_block, 0)
                              : args.panels.peers * args.panels.ShardRows();
      return Coords{n0, at.inner, place.step == 0 ? at.outer : -1, static_cast<int32_t>(row)};
    }
    static __device__ Rhs RhsOf(const Args& args, const Coords& coords, int term) {
      return Rhs{&args.w[term], coords.n0};
    }

    static __device__ int Terms(const Args& args) { return args.terms; }
    static __device__ KRange KOf(const Args& args, Tile, const Coords&, int) {
      return KRange{0, args.k};
    }

    // The rows of a term: in x, or in the workspace, where a k-panel follows the previous one.
    struct Source {
      const CUtensorMap* map;
      int32_t row, outer, rank;
      int32_t k_panel_rows;  // 0: in x
      __device__ void Load(uint32_t smem, uint32_t bar, int k0) const {
        ptx::TmaLoad4d(smem, map, bar, k_panel_rows == 0 ? k0 : 0,
                       row + k0 / Config::kTileK * k_panel_rows, outer, rank);
      }
    };
    static __device__ Source SourceOf(const Args& args, const CallContext& call,
                                      const Coords& coords, int term) {
      if (term == 0 && coords.outer >= 0) {
        return Source{&args.x, coords.inner, coords.outer, args.view.rank, 0};
      }
      const int32_t before = Max(term - 1, 0) * static_cast<int32_t>(args.panels.ShardRows());
      return Source{&args.workspace_maps[call.epoch & 1], coords.row + before, 0, 0,
                    args.panels.shard.k_panel_rows};
    }
    static __device__ void PrefetchMaps(const Args& args) {
      ptx::PrefetchTensorMap(&args.w[0]);
      ptx::PrefetchTensorMap(&args.x);
      ptx::PrefetchTensorMap(&args.workspace_maps[0]);
      ptx::PrefetchTensorMap(&args.workspace_maps[1]);
    }
  };

  struct Epilogue : EveryM64 {
    template <typename AwaitPartials>
    static __device__ void Finish(const Args& args, const CallContext&,
                                  StagingWriter<Config>& staging, Accumulators<Config>& acc,
                                  int32_t row_block, Tile, AwaitPartials&&) {
      const Place place = PlaceOf(args, row_block);
#pragma unroll
      for (int i = 0; i < Config::kConsumerM64Blocks; ++i) {
        if (!HasRows(args, place, staging.M64At(i))) continue;
        StageM64<T, Config::kTileN>(acc[i], staging.Acquire());
        staging.Publish();
      }
    }

    // TMA drops rows outside the shard and columns past the last.
    static __device__ void Store(const Args& args, const CallContext& call,
                                 StagingReader<Config>& staging, int32_t row_block, Tile tile) {
      using S = Staged<Config::kTileN>;
      const Place place = PlaceOf(args, row_block);
      const int32_t n0 = tile.n * Config::kTileN, n = static_cast<int32_t>(args.n);
      const int src = args.concat_rows ? SourceRank(args, place.step) : 0;
      for (int m64 = 0; m64 < Config::kM64Blocks; ++m64) {
        if (!HasRows(args, place, m64)) continue;
        const StagedM64 staged = staging.Acquire(m64);
        const uint64_t start = call.Start();
        const RowAt at = RowOf(args, place.row_block * Config::kTileM + m64 * 64, args.concat_rows);
#pragma unroll
        for (int box = 0; box < Config::kTileN / S::kColumns; ++box) {
          const int32_t column = n0 + box * S::kColumns;
          if (column >= n) continue;
          ptx::TmaStore4d(&args.y, S::Box(staged, box), column, at.inner, at.outer, src);
        }
        ptx::BulkCommit();
        staging.Release(m64);
        call.Done(EventKind::kStore, start, row_block, tile.n);
      }
    }
  };

  struct Exchange : PeerExchange {
    static __device__ void Send(const Args& args, const CallContext& call,
                                const GemmSmem<Config>& smem) {
      ShardSender<Config>::Run(args, call, smem);
    }

    struct Rows {
      __device__ Rows(const Args&, const GemmSmem<Config>&) {}
      // Term by term. For a peer's term, the lanes poll 32 k-panels at a time, and lane 0 waits for
      // the first missing one.
      template <typename Arrived>
      static __device__ void Await(const Args& args, const CallContext& call, int32_t row_block,
                                   Tile, const typename Operands::Coords&, int,
                                   Arrived&& set_arrived) {
        const Place place = PlaceOf(args, row_block);
        const int k_panels = args.panels.shard.k_panels;
        if (!HasRows(args, place, 0)) return set_arrived(args.terms * k_panels);
        const int lane = threadIdx.x % 32;
        for (int term = 0; term < args.terms; ++term) {
          const int step = place.step + term, before = term * k_panels;
          if (step == 0) {
            set_arrived(k_panels);
            continue;
          }
          for (int arrived = 0; arrived < k_panels;) {
            const int32_t chunk = args.panels.shard.ChunkOf(arrived + lane);
            const Signal* word =
                ShardSignal(args, call, args.view.rank, step, place.row_block, chunk);
            const bool has_arrived = arrived + lane >= k_panels || HasArrived(call, word);
            const uint32_t missing = __ballot_sync(0xffffffff, !has_arrived);
            if ((missing & 1) != 0 && lane == 0)
              AwaitPeer(call, word, SourceRank(args, step), chunk);
            ptx::FenceProxyAsyncGlobal();  // TMA reads the rows
            arrived += missing == 0 ? 32 : Max(1, __ffs(missing) - 1);
            set_arrived(before + Min(arrived, k_panels));
          }
        }
      }
    };
  };
};

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    AllToAllMatmulKernel(const __grid_constant__ AllToAllMatmulArgs args) {
  RunGemm<AllToAllMatmulSm90<Config>>(args);
}

}  // namespace jflux

#endif  // JFLUX_OPS_ALL_TO_ALL_MATMUL_ALL_TO_ALL_MATMUL_SM90_CUH_
