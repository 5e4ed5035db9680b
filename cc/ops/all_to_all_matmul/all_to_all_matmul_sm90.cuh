// all_to_all_matmul on Hopper: one kernel that sends, waits and multiplies.
//
// Send warps (ShardSender) take chunks of the peers' shards from a counter and copy them,
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

#include "core/shard_panels.h"
#include "gpu/chunk_sender.cuh"
#include "gpu/epilogue_sm90.cuh"
#include "gpu/gemm_call.cuh"
#include "gpu/gemm_config.h"
#include "gpu/gemm_sm90.cuh"
#include "gpu/gemm_smem.cuh"
#include "gpu/ptx.cuh"
#include "ops/all_to_all_matmul/all_to_all_matmul.h"

namespace jflux {

// The fields that every tile needs come first: a line of constant memory is fetched when it is
// first read.
struct AllToAllMatmulArgs {
  DeviceState* state;
  SymmetricView view;
  Rows rows;
  ShardTileOrder order;  // of cluster tiles
  int64_t n;
  int32_t k;  // of a shard
  int32_t num_tiles;
  int32_t terms;    // terms of the product: the ranks' shards if columns are concatenated, else 1
  int32_t a_bytes;  // bytes of a box of A
  uint32_t signature, op;
  bool split_rows, concat_rows;
  bool gathers;  // also write all_to_all(x)
  bool out_f16;  // of operands of 8 bits
  WorkspaceLayout workspace;
  ShardPanels panels;
  ShardSendOrder send_order;
  int32_t send_box_bytes;  // of a full box
  uint32_t senders;        // CTAs that may send
  // x, y and `gathered` are 4-d: columns of a shard, inner rows, outer rows, shards. If rows are
  // not split (x) or not concatenated (y, gathered), all rows are `inner`.
  CUtensorMap x;             // the local shard, as the main loop reads it
  CUtensorMap w[kMaxRanks];  // the rows of w of each term
  CUtensorMap y;
  CUtensorMap workspace_maps[2];  // the halves' data as rows of kBlockBytes; 4-d
  CUtensorMap send_boxes;         // x, as the send warp reads it
  CUtensorMap gathered;           // to store boxes
  // Of operands of 8 bits: of y's rows and columns; or of rows and blocks of columns with so many
  // entries, of which the first is that of the first k-block (Scales).
  const float* x_scale;
  const float* w_scale;
  int32_t scale_entries;
  __device__ bool IsFloat16() const { return out_f16; }
};
static_assert(sizeof(AllToAllMatmulArgs) <= 4096);  // the limit for kernel arguments

// The signal, on `rank`, of chunk `chunk` of a row block of the shard that it receives in `step`.
__device__ __forceinline__ Signal* ShardSignal(const AllToAllMatmulArgs& args,
                                               const CallContext& call, int rank, int step,
                                               int32_t row_block, int32_t chunk) {
  return args.view.At<Signal>(rank, args.workspace.SignalOffset(call.epoch) +
                                        args.panels.SignalOffset(step, row_block, chunk));
}
// Row `row` of a k-panel of a row block of that shard.
__device__ __forceinline__ char* ShardPanelRow(const AllToAllMatmulArgs& args,
                                               const CallContext& call, int rank, int step,
                                               int32_t row_block, int32_t k_panel, int32_t row) {
  return args.view.At(rank, args.workspace.DataOffset(call.epoch) +
                                (args.panels.RowOf(step, row_block, k_panel) + row) * kBlockBytes);
}
__device__ __forceinline__ int SourceRank(const AllToAllMatmulArgs& args, int step) {
  return static_cast<int>(Remainder(args.view.rank + step, args.view.world));
}

// Coordinates of row r of a shard in x, y or `gathered`. The launcher guarantees that the rows of a
// tile lie within one outer.
struct RowAt {
  int32_t inner, outer;
};
__device__ __forceinline__ RowAt RowOf(const AllToAllMatmulArgs& args, int32_t r, bool by_rows) {
  if (!by_rows || args.rows.outer == 1) return RowAt{r, 0};
  const auto outer = static_cast<int32_t>(Quotient(r, args.rows.inner));
  return RowAt{r - outer * static_cast<int32_t>(args.rows.inner), outer};
}

// The send warp of all_to_all_matmul's kernel. It copies local shards to the peers' workspaces
// (gpu/chunk_sender.cuh) and, if asked for, all_to_all(x) to `gathered`. It waits for peers only
// while it copies to `gathered`, after the CTA's last send.

template <typename Config>
struct ShardSender : BoxesAlone {
  using Args = AllToAllMatmulArgs;
  using Buffers = SendBuffers<GemmSmem<Config>>;

  // Takes chunks from counters: first chunks to send, in as many CTAs as may send (gpu/senders.h),
  // then chunks to copy to `gathered`. Nothing that a peer waits for comes after a wait.
  static __device__ void Run(const Args& args, const CallContext& call,
                             const GemmSmem<Config>& smem) {
    static_assert(Config::kSendBoxes == KPanelLayout::kBoxes &&
                  Config::kSendBoxBytes == KPanelLayout::kBoxRows * kBlockBytes);
    Buffers buffers{smem};
    if (MaySend(args)) SendChunks<ShardSender>(args, call, buffers);
    if (args.gathers) CopyChunks(args, call, buffers);
  }

  // A chunk of a shard. An empty range means nothing to do.
  struct Chunk {
    int32_t step, row_block, chunk;
    int32_t dst;  // receiver of the shard
    KPanelLayout::RowRange range;
  };
  static __device__ const ShardSendOrder& OrderOf(const Args& args) { return args.send_order; }
  static __device__ Chunk ChunkOf(const Args& args, const ChunkSend& send) {
    return Chunk{send.step, send.row_block, send.chunk,
                 SendPeer(args.view.rank, send.step, args.view.world),
                 args.panels.RangeOf(send.row_block)};
  }

  // Loads box i of a chunk from x.
  static __device__ void LoadBox(const Args& args, Buffers& buffers, const Chunk& c, int i) {
    const auto box = args.panels.shard.BoxOf(c.range, c.chunk, i);
    if (box.rows <= 0) return;
    const uint32_t bar = buffers.smem.SendBoxFull(i);
    const RowAt at = RowOf(args, c.row_block * KPanelLayout::kPanelRows + box.row, args.split_rows);
    ptx::MbarrierArriveExpectTx(bar, args.send_box_bytes);
    ptx::TmaLoad4d(buffers.smem.SendBox(i), &args.send_boxes, bar, box.k_panel * Config::kTileK,
                   at.inner, at.outer, c.dst);
  }
  static __device__ void StoreBox(const Args& args, const CallContext& call, Buffers& buffers,
                                  const Chunk& c, int i) {
    const auto box = args.panels.shard.BoxOf(c.range, c.chunk, i);
    if (box.rows > 0) {
      ptx::BulkStore(ShardPanelRow(args, call, c.dst, c.step, c.row_block, box.k_panel, box.row),
                     buffers.Await(i), box.rows * kBlockBytes);
    }
    ptx::BulkCommit();  // even if empty: BulkWait counts groups
  }
  static __device__ void SignalChunk(const Args& args, const CallContext& call, const Chunk& c,
                                     uint64_t since) {
    if (c.range.end == 0) return;
    ptx::FenceProxyAsyncGlobal();
    StoreRelease(ShardSignal(args, call, c.dst, c.step, c.row_block, c.chunk), call.signal);
    call.Done(EventKind::kSend, since, c.dst, c.chunk);
  }

 private:
  // Called by one lane. Local chunks come first, then the peers', as they arrive.
  static __device__ void CopyChunks(const Args& args, const CallContext& call, Buffers& buffers) {
    if (!ptx::ElectOne()) return;
    const int chunks = args.panels.shard.Chunks(), of_shard = args.panels.shard.row_blocks * chunks;
    for (int i = TakeCopy(args); i < args.view.world * of_shard; i = TakeCopy(args)) {
      const int step = i / of_shard, row_block = i % of_shard / chunks;
      CopyChunk(args, call, buffers,
                Chunk{step, row_block, i % chunks, args.view.rank, args.panels.RangeOf(row_block)});
    }
    ptx::BulkWait<0>();
  }

  static __device__ void CopyChunk(const Args& args, const CallContext& call, Buffers& buffers,
                                   const Chunk& c) {
    const int rank = args.view.rank, src = SourceRank(args, c.step);
    if (c.step != 0) {
      AwaitPeer(call, ShardSignal(args, call, rank, c.step, c.row_block, c.chunk), src, c.chunk);
      ptx::FenceProxyAsyncGlobal();  // bulk copies read the chunk
    }
    const uint64_t start = call.Start();
    ptx::BulkWaitRead<0>();
    for (int i = 0; i < KPanelLayout::kBoxes; ++i) {
      if (c.step == 0) {
        LoadBox(args, buffers, c, i);
        continue;
      }
      const auto box = args.panels.shard.BoxOf(c.range, c.chunk, i);
      if (box.rows <= 0) continue;
      const uint32_t bytes = box.rows * kBlockBytes, bar = buffers.smem.SendBoxFull(i);
      ptx::MbarrierArriveExpectTx(bar, bytes);
      ptx::BulkLoad(buffers.smem.SendBox(i),
                    ShardPanelRow(args, call, rank, c.step, c.row_block, box.k_panel, box.row),
                    bytes, bar);
    }
    // TMA drops the part of a box outside the shard.
    for (int i = 0; i < KPanelLayout::kBoxes; ++i) {
      const auto box = args.panels.shard.BoxOf(c.range, c.chunk, i);
      if (box.rows <= 0) continue;
      const RowAt at =
          RowOf(args, c.row_block * KPanelLayout::kPanelRows + box.row, args.concat_rows);
      ptx::TmaStore4d(&args.gathered, buffers.Await(i), box.k_panel * Config::kTileK, at.inner,
                      at.outer, src);
      ptx::BulkCommit();
    }
    call.Done(EventKind::kCopy, start, src, c.chunk);
  }
};

template <typename Config_>
struct AllToAllMatmulSm90 {
  using Config = Config_;
  using Args = AllToAllMatmulArgs;

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

  // The rows of y as their scales lie, and the first one of a row block.
  struct ScaledRows {
    jflux::Rows rows;
    int64_t first;
  };
  static __device__ ScaledRows ScaledRowsOf(const Args& args, const Place& place) {
    const int64_t row = static_cast<int64_t>(place.row_block) * Config::kTileM;
    const int64_t rows = args.rows.PerRank();
    if (!args.concat_rows) return ScaledRows{jflux::Rows{1, 1, rows}, row};
    return ScaledRows{args.rows, SourceRank(args, place.step) * rows + row};
  }

  // With kBlockScales. Where there are several terms, each has whole blocks.
  static __device__ ScaleSource<Config> ScalesOf(const Args& args, const CallContext&,
                                                 int32_t row_block, Tile tile) {
    const ScaledRows of_y = ScaledRowsOf(args, PlaceOf(args, row_block));
    ScaleSource<Config> scales;
    scales.SetRows(args.x_scale, of_y.rows, of_y.first, args.scale_entries);
    scales.SetColumns(args.w_scale, static_cast<int64_t>(tile.n) * Config::kTileN, args.n,
                      args.scale_entries);
    return scales;
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
                                  StagingWriter<Config>& staging, Slices<Config>& acc,
                                  int32_t row_block, Tile tile, AwaitPartials&&) {
      const Place place = PlaceOf(args, row_block);
      if constexpr (Config::kScaled) {
        if (args.w_scale != nullptr) {
          const ScaledRows of_y = ScaledRowsOf(args, place);
          ScaleM64s<Config::kTileN, Config::kConsumerM64Blocks>(
              acc, args.x_scale, args.w_scale, static_cast<int64_t>(tile.n) * Config::kTileN,
              args.n, [&](int i, int r) {
                const int64_t row = of_y.first + staging.M64At(i) * 64 + r;
                return row < of_y.rows.Total() ? of_y.rows.Actual(row) : -1;
              });
        }
      }
      StageTile(staging, acc, args, [&](int m64) { return HasRows(args, place, m64); });
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

JFLUX_GEMM_KERNEL(AllToAllMatmul);

}  // namespace jflux

#endif  // JFLUX_OPS_ALL_TO_ALL_MATMUL_ALL_TO_ALL_MATMUL_SM90_CUH_
