// matmul_all_to_all on Hopper: one kernel that multiplies, sends tiles and concatenates what
// arrives.
//
// A tile has one owner (core/shard_tiles.h). The store warp writes a local tile from its staging to
// y. It copies a peer's tile to the tile's slot in the owner's workspace, and signals when the
// copies have completed. A slot holds the staging as it is: boxes of 64 or 32 columns, swizzled, as
// TMA stores take them. So nothing is rearranged, and the reader's tensor map drops elements
// outside the shard.
//
// Send warps, which have nothing to send here, receive: they take the peers' tiles from a counter,
// in the order in which they are sent, wait for each tile's signal, and copy its boxes through
// shared memory to y. The peers' shards are computed first, so most of these copies overlap with
// the product; the last peer's tiles arrive while all ranks compute their local shards.
//
//   writes  store warps: the owners' workspaces and signals
//   waits   send warps only, for peers' tiles. Making those takes no send warp, so there is no
//           deadlock. Store warps wait for other store warps of their GPU (gpu/send_semaphore.cuh)
//   order   bulk copies complete, proxy fence, StoreRelease of the signal
//   reset   never: core/signal.h
#ifndef JFLUX_OPS_MATMUL_ALL_TO_ALL_MATMUL_ALL_TO_ALL_SM90_CUH_
#define JFLUX_OPS_MATMUL_ALL_TO_ALL_MATMUL_ALL_TO_ALL_SM90_CUH_

#include "core/shard_tiles.h"
#include "gpu/box_buffers.cuh"
#include "gpu/epilogue_sm90.cuh"
#include "gpu/gemm_config.h"
#include "gpu/gemm_sm90.cuh"
#include "gpu/send_semaphore.cuh"
#include "ops/matmul_all_to_all/matmul_all_to_all.h"

namespace jflux {

struct MatmulAllToAllArgs {
  CUtensorMap x;  // 4-d: k, inner, outer, world; if the rows are one range, all are `inner`
  CUtensorMap w;
  // 4-d: a shard's columns, then (inner rows, shards, outer rows) if concat_rows, else (shards,
  // rows, 1). TMA drops elements outside the shard.
  CUtensorMap y;
  DeviceState* state;
  SymmetricView view;
  WorkspaceLayout workspace;
  AllToAllLayout layout;
  Rows rows;
  ShardGrid grid;  // of cluster tiles
  int64_t k, n;    // n: columns of a shard
  uint32_t signature, op;
  int32_t a_bytes;  // bytes of a box of A
  int32_t num_tiles;
  int32_t senders;  // store warps that send at a time; 0: all (gpu/send_semaphore.cuh)
  bool split_rows, concat_rows;
  bool out_f16;  // of operands of 8 bits
  // Of operands of 8 bits: of x's rows and w's columns; or with an entry for each k-block, and of
  // blocks of columns (Scales).
  const float* x_scale;
  const float* w_scale;
  __device__ bool IsFloat16() const { return out_f16; }
};

template <typename Config_>
struct MatmulAllToAllSm90 {
  using Config = Config_;
  using Args = MatmulAllToAllArgs;
  using Box = Staged<Config::kTileN>;
  using BoxBuffers = jflux::BoxBuffers<Config>;

  // The owner of a CTA's tile and its position in the shard; m counts row blocks. The second CTA of
  // a cluster may have a tile below the shard.
  static __device__ ShardTile ShardTileOf(const Args& args, int32_t row_block, int32_t tile_n) {
    if (args.split_rows) {
      const int32_t row_blocks = args.grid.tiles_m * Config::kClusterM,
                    owner = row_block / row_blocks;
      return ShardTile{owner, row_block - owner * row_blocks, tile_n};
    }
    const int32_t owner = tile_n / args.grid.tiles_n;
    return ShardTile{owner, row_block, tile_n - owner * args.grid.tiles_n};
  }

  struct Schedule : OrderedTiles<Counted> {
    using OrderedTiles::OrderedTiles;
    // Tiles are numbered through all shards, along the dimension that is split.
    __device__ Tile At(const Args& args, int32_t t) const {
      const ShardTile tile = ShardTileAt(t, args.grid, args.view.rank);
      return args.split_rows ? Tile{tile.owner * args.grid.tiles_m + tile.m, tile.n}
                             : Tile{tile.m, tile.owner * args.grid.tiles_n + tile.n};
    }
  };

  struct Operands : BoxesOfA {
    // Operand coordinates: the column in w; the row in x as (inner, outer, rank).
    struct alignas(16) Coords {
      int32_t n0, inner, outer, rank;
    };
    static __device__ Coords CoordsOf(const Args& args, const Schedule&, int32_t row_block,
                                      Tile tile) {
      const ShardTile at = ShardTileOf(args, row_block, tile.n);
      const int32_t row = at.m * Config::kTileM, column = at.n * Config::kTileN;
      if (!args.split_rows) {
        return Coords{at.owner * static_cast<int32_t>(args.n) + column, row, 0, 0};
      }
      if (args.rows.outer == 1) {
        return Coords{column, static_cast<int32_t>(at.owner * args.rows.PerRank()) + row, 0, 0};
      }
      // The launcher guarantees that a tile lies within one outer.
      return Coords{column, static_cast<int32_t>(Remainder(row, args.rows.inner)),
                    static_cast<int32_t>(Quotient(row, args.rows.inner)), at.owner};
    }
    static __device__ KRange KOf(const Args& args, Tile, const Coords&, int) {
      return KRange{0, static_cast<int32_t>(args.k)};
    }
    static __device__ Rhs RhsOf(const Args& args, const Coords& coords, int) {
      return Rhs{&args.w, coords.n0};
    }
    struct Source {
      const CUtensorMap* map;
      int32_t inner, outer, rank;
      __device__ void Load(uint32_t smem, uint32_t bar, int k0) const {
        ptx::TmaLoad4d(smem, map, bar, k0, inner, outer, rank);
      }
    };
    static __device__ Source SourceOf(const Args& args, const CallContext&, const Coords& coords,
                                      int) {
      return Source{&args.x, coords.inner, coords.outer, coords.rank};
    }
    static __device__ void PrefetchMaps(const Args& args) {
      ptx::PrefetchTensorMap(&args.w);
      ptx::PrefetchTensorMap(&args.x);
    }
  };

  // The rows of x, the first one of a tile and its first column of w.
  struct Place {
    Rows rows;
    int64_t row, column;
  };
  static __device__ Place PlaceOf(const Args& args, const ShardTile& at) {
    const int64_t row = static_cast<int64_t>(at.m) * Config::kTileM;
    const int64_t column = static_cast<int64_t>(at.n) * Config::kTileN;
    if (!args.split_rows) {
      return Place{Rows{1, 1, args.rows.PerRank()}, row, at.owner * args.n + column};
    }
    return Place{args.rows, at.owner * args.rows.PerRank() + row, column};
  }
  static __device__ int64_t EndOfColumns(const Args& args, const ShardTile& at) {
    return args.split_rows ? args.n : (at.owner + 1) * args.n;
  }

  // With kBlockScales. A shard of columns has whole blocks.
  static __device__ ScaleSource<Config> ScalesOf(const Args& args, const CallContext&,
                                                 int32_t row_block, Tile tile) {
    const ShardTile at = ShardTileOf(args, row_block, tile.n);
    const Place place = PlaceOf(args, at);
    const int64_t k_blocks = CeilDiv<int64_t>(args.k, Config::kTileK);
    ScaleSource<Config> scales;
    scales.SetRows(args.x_scale, place.rows, place.row, k_blocks);
    scales.SetColumns(args.w_scale, place.column, EndOfColumns(args, at), k_blocks);
    return scales;
  }

  // The part of a tile inside the shard: its rows, m64 blocks and boxes of columns, and the bytes
  // of a box.
  static __device__ int32_t RowsLeft(const Args& args, int32_t m) {
    return static_cast<int32_t>(args.rows.PerRank()) - m * Config::kTileM;
  }
  static __device__ bool HasRows(const Args& args, int32_t m, int m64) {
    return RowsLeft(args, m) > m64 * 64;
  }
  static __device__ int M64BlocksOf(const Args& args, int32_t m) {
    return Min(Config::kM64Blocks, CeilDiv(RowsLeft(args, m), 64));
  }
  static __device__ int BoxesOf(const Args& args, int32_t n) {
    const int32_t columns = static_cast<int32_t>(args.n) - n * Config::kTileN;
    return CeilDiv(Min(columns, Config::kTileN), Box::kColumns);
  }
  static __device__ int BoxBytes(const Args& args, int32_t m, int m64) {
    return Min(RowsLeft(args, m) - m64 * 64, 64) * Box::kColumns * 2;
  }

  static __device__ Signal* SignalOf(const Args& args, const CallContext& call, int dst,
                                     int64_t slot) {
    return args.view.template At<Signal>(
        dst, args.workspace.SignalOffset(call.epoch) + args.layout.SignalOffset(slot));
  }
  // A slot has the size of two stagings.
  static __device__ char* SlotAt(const Args& args, const CallContext& call, int dst, int64_t slot) {
    return args.view.At(dst, args.workspace.DataOffset(call.epoch) + args.layout.SlotOffset(slot));
  }

  // Stores a box of the shard from `src` to its place in y.
  static __device__ void StoreToY(const Args& args, uint32_t smem, int src, const ShardTile& at,
                                  int m64, int box) {
    const int32_t row = at.m * Config::kTileM + m64 * 64;
    const int32_t column = at.n * Config::kTileN + box * Box::kColumns;
    if (!args.concat_rows) return ptx::TmaStore4d(&args.y, smem, column, src, row, 0);
    const int64_t outer = args.rows.outer == 1 ? 0 : Quotient(row, args.rows.inner);
    ptx::TmaStore4d(&args.y, smem, column, static_cast<int32_t>(row - outer * args.rows.inner), src,
                    static_cast<int32_t>(outer));
  }

  struct Epilogue : EveryM64 {
    template <typename AwaitPartials>
    static __device__ void Finish(const Args& args, const CallContext&,
                                  StagingWriter<Config>& staging, Slices<Config>& acc,
                                  int32_t row_block, Tile tile, AwaitPartials&&) {
      const int32_t m = ShardTileOf(args, row_block, tile.n).m;
      if constexpr (Config::kScaled) {
        if (args.w_scale != nullptr) {
          const ShardTile at = ShardTileOf(args, row_block, tile.n);
          const Place place = PlaceOf(args, at);
          ScaleM64s<Config::kTileN, Config::kConsumerM64Blocks>(
              acc, args.x_scale, args.w_scale, place.column, EndOfColumns(args, at),
              [&](int i, int r) {
                const int64_t row = place.row + staging.M64At(i) * 64 + r;
                return row < place.rows.Total() ? place.rows.Actual(row) : -1;
              });
        }
      }
#pragma unroll
      for (int i = 0; i < Config::kConsumerM64Blocks; ++i) {
        if (!HasRows(args, m, staging.M64At(i))) continue;
        StageResults<Config, Config::kTileN>(acc[i], staging.Acquire(), args);
        staging.Publish();
      }
    }

    static __device__ void Store(const Args& args, const CallContext& call,
                                 StagingReader<Config>& staging, int32_t row_block, Tile tile) {
      const ShardTile at = ShardTileOf(args, row_block, tile.n);
      if (!HasRows(args, at.m, 0)) return;
      const int rank = args.view.rank, boxes = BoxesOf(args, at.n);
      const bool is_local = at.owner == rank;
      const int64_t slot = is_local ? 0 : args.layout.SlotOf(at.owner, rank, at.m, at.n);
      const SendSemaphore semaphore = SemaphoreOf(args);
      uint64_t start = 0;
#pragma unroll
      for (int m64 = 0; m64 < Config::kM64Blocks; ++m64) {
        if (!HasRows(args, at.m, m64)) continue;
        const uint32_t smem = ContiguousStaging<Config>(staging.Acquire(m64));
        if (m64 == 0) {
          if (!is_local) semaphore.Acquire(call, row_block, tile.n);
          start = call.Start();
        }
        if (is_local) {
          for (int box = 0; box < boxes; ++box) {
            StoreToY(args, smem + box * Box::kBoxBytes, rank, at, m64, box);
          }
          ptx::BulkCommit();
        } else {
          char* to = SlotAt(args, call, at.owner, slot) + m64 * Config::kStagingBytes;
          const int bytes = BoxBytes(args, at.m, m64);
          // Full boxes are contiguous: one copy.
          const bool is_full = bytes == Box::kBoxBytes;
          for (int box = 0; box < (is_full ? 1 : boxes); ++box) {
            semaphore.Store(to + box * Box::kBoxBytes, smem + box * Box::kBoxBytes,
                            is_full ? boxes * Box::kBoxBytes : bytes);
          }
        }
        staging.Release(m64);
      }
      if (is_local) return call.Done(EventKind::kStore, start, row_block, tile.n);
      semaphore.Release();
      ptx::BulkWait<0>();
      ptx::FenceProxyAsyncGlobal();
      StoreRelease(SignalOf(args, call, at.owner, slot), call.signal);
      call.Done(EventKind::kSend, start, at.owner, row_block);
    }
  };

  struct Exchange : PeerExchange {
    // Receives the peers' tiles; an item is the tile of one CTA of a peer. One lane takes and
    // copies them.
    static __device__ void Send(const Args& args, const CallContext& call,
                                const GemmSmem<Config>& smem) {
      if (!ptx::ElectOne()) return;
      const int per_shard = args.grid.PerShard() * Config::kClusterM;
      const int items = (args.view.world - 1) * per_shard;
      BoxBuffers buffers{smem};
      for (int item = TakeTransfer(args); item < items; item = TakeTransfer(args)) {
        const int step = item / per_shard, i = item - step * per_shard;
        const Tile tile = TileInShard(i / Config::kClusterM, args.grid);
        const int32_t m = tile.m * Config::kClusterM + i % Config::kClusterM;
        if (!HasRows(args, m, 0)) continue;
        Receive(args, call, buffers, SendPeer(args.view.rank, step + 1, args.view.world), m,
                tile.n);
      }
      ptx::BulkWait<0>();
    }

    static __device__ void Receive(const Args& args, const CallContext& call, BoxBuffers& buffers,
                                   int src, int32_t m, int32_t n) {
      const int64_t slot = args.layout.SlotOf(args.view.rank, src, m, n);
      uint64_t start = call.Start();
      AwaitPeer(call, SignalOf(args, call, args.view.rank, slot), src, slot);
      ptx::FenceProxyAsyncGlobal();  // bulk copies read the tile
      call.Done(EventKind::kWaitPartials, start, m, n);
      start = call.Start();
      const char* from = SlotAt(args, call, args.view.rank, slot);
      const int boxes = BoxesOf(args, n), count = M64BlocksOf(args, m) * boxes;
      const auto load = [&](int i) {
        const int m64 = i / boxes, box = i - m64 * boxes;
        buffers.Load(i % BoxBuffers::kCount,
                     from + m64 * Config::kStagingBytes + box * Box::kBoxBytes,
                     BoxBytes(args, m, m64));
      };
      ptx::BulkWaitRead<0>();  // the previous tile's boxes
      for (int i = 0; i < Min(count, BoxBuffers::kCount); ++i) load(i);
      for (int i = 0; i < count; ++i) {
        const int m64 = i / boxes;
        StoreToY(args, buffers.Await(i % BoxBuffers::kCount), src, ShardTile{src, m, n}, m64,
                 i - m64 * boxes);
        ptx::BulkCommit();
        if (i + BoxBuffers::kCount >= count) continue;
        ptx::BulkWaitRead<0>();
        load(i + BoxBuffers::kCount);
      }
      call.Done(EventKind::kCopy, start, src, m);
    }
  };
};

JFLUX_GEMM_KERNEL(MatmulAllToAll);

}  // namespace jflux

#endif  // JFLUX_OPS_MATMUL_ALL_TO_ALL_MATMUL_ALL_TO_ALL_SM90_CUH_
