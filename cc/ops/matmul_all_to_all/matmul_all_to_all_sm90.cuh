// matmul_all_to_all on Hopper: one kernel that multiplies, sends tiles and puts together what
// comes.
//
// A tile has one owner (core/shard_tiles.h). The storer takes what a consumer has staged to y, if
// the tile is this rank's own; else to the tile's slot in the owner's workspace, by bulk copies,
// and sets the tile's signal when they have completed. A slot holds the staging as it is: boxes of
// 64 or 32 columns, swizzled, as TMA stores take them. So nothing is rearranged on the way, and it
// is the reader's tensor map that cuts off what lies outside a shard.
//
// Every CTA's sender, who has nothing to send, takes the peers' tiles from a counter, in the order
// in which they are sent: it waits for the tile's signal, and copies the boxes through shared
// memory to y. Others' tiles are computed first, so most of these copies happen while this rank
// multiplies; the last peer's tiles come while everybody computes the own shard.
//
// Who waits for whom: only senders wait for peers, for tiles that the peer's scheduler warps,
// loaders, consumers and storers make, which wait for no sender. (Storers wait for other storers of
// their GPU: gpu/send_semaphore.cuh.)
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
  CUtensorMap x;  // 4-d: k, inner, outer, world; where rows need no such care all are `inner`
  CUtensorMap w;
  // 4-d: a shard's columns; if rows are put together inner rows, shards and outer rows, else
  // shards, rows and nothing. Stores are cut off where a shard ends.
  CUtensorMap y;
  DeviceState* state;
  SymmetricView view;
  WorkspaceLayout workspace;
  AllToAllLayout layout;
  Rows rows;
  ShardGrid grid;  // of cluster tiles
  int64_t k, n;    // n: columns of a shard
  uint32_t signature, op;
  int32_t a_bytes;  // of a box of rows
  int32_t num_tiles;
  int32_t senders;  // store warps that send at a time; 0: all (gpu/send_semaphore.cuh)
  bool split_rows, concat_rows;
};

template <typename Config_>
struct MatmulAllToAllSm90 {
  using Config = Config_;
  using Args = MatmulAllToAllArgs;
  using T = typename Config::T;
  using Box = Staged<Config::kTileN>;
  using BoxBuffers = jflux::BoxBuffers<Config>;

  // A shard's tiles are numbered on along the dimension that is split.
  static __device__ Tile TileAt(const Args& args, int32_t t) {
    const ShardTile tile = ShardTileAt(t, args.grid, args.view.rank);
    return args.split_rows ? Tile{tile.owner * args.grid.tiles_m + tile.m, tile.n}
                           : Tile{tile.m, tile.owner * args.grid.tiles_n + tile.n};
  }
  // Whose a CTA's tile is, and which of the shard: m in tiles of kTileM rows. It may lie below the
  // shard, in the second CTA of a cluster.
  static __device__ ShardTile PlaceOf(const Args& args, int32_t block_m, int32_t tile_n) {
    if (args.split_rows) {
      const int32_t blocks = args.grid.tiles_m * Config::kClusterM, owner = block_m / blocks;
      return ShardTile{owner, block_m - owner * blocks, tile_n};
    }
    const int32_t owner = tile_n / args.grid.tiles_n;
    return ShardTile{owner, block_m, tile_n - owner * args.grid.tiles_n};
  }

  static __device__ void PrefetchMaps(const Args& args) {
    ptx::PrefetchTensorMap(&args.w);
    ptx::PrefetchTensorMap(&args.x);
  }

  static constexpr bool kRowsArrive = false;
  static constexpr bool kFirstIsFixed = false;
  static constexpr bool kReceives = false;

  struct Source {
    const CUtensorMap* map;
    int32_t inner, outer, rank;
  };
  static __device__ int TermsOf(const Args&) { return 1; }
  static __device__ KRange KOf(const Args& args, Tile, int) {
    return KRange{0, static_cast<int32_t>(args.k)};
  }
  // Of the operands: the column in w; the row in x, by its inner, outer and rank.
  struct alignas(16) Where {
    int32_t n0, inner, outer, rank;
  };
  static __device__ Where WhereOf(const Args& args, int32_t block_m, Tile tile) {
    const ShardTile place = PlaceOf(args, block_m, tile.n);
    const int32_t row = place.m * Config::kTileM, column = place.n * Config::kTileN;
    if (!args.split_rows) {
      return Where{place.owner * static_cast<int32_t>(args.n) + column, row, 0, 0};
    }
    if (args.rows.outer == 1) {
      return Where{column, static_cast<int32_t>(place.owner * args.rows.PerRank()) + row, 0, 0};
    }
    // The launcher sees to it that a tile lies within one outer.
    return Where{column, static_cast<int32_t>(Remainder(row, args.rows.inner)),
                 static_cast<int32_t>(Quotient(row, args.rows.inner)), place.owner};
  }
  static __device__ Rhs RhsOf(const Args& args, const Where& where, int) {
    return Rhs{&args.w, where.n0};
  }
  static __device__ Source SourceOf(const Args& args, const CallContext&, const Where& where, int) {
    return Source{&args.x, where.inner, where.outer, where.rank};
  }
  static __device__ void LoadA(const Source& s, uint32_t smem, uint32_t bar, int k0) {
    ptx::TmaLoad4d(smem, s.map, bar, k0, s.inner, s.outer, s.rank);
  }

  // Blocks of 64 rows of a tile that the shard has, and boxes of columns. Rows of a block.
  static __device__ int32_t RowsLeft(const Args& args, int32_t m) {
    return static_cast<int32_t>(args.rows.PerRank()) - m * Config::kTileM;
  }
  static __device__ bool HasRows(const Args& args, int32_t m, int block) {
    return RowsLeft(args, m) > block * 64;
  }
  static __device__ int BlocksOf(const Args& args, int32_t m) {
    return Min(Config::kBlocks, CeilDiv(RowsLeft(args, m), 64));
  }
  static __device__ int BoxesOf(const Args& args, int32_t n) {
    const int32_t columns = static_cast<int32_t>(args.n) - n * Config::kTileN;
    return CeilDiv(Min(columns, Config::kTileN), Box::kColumns);
  }
  static __device__ int BoxBytes(const Args& args, int32_t m, int block) {
    return Min(RowsLeft(args, m) - block * 64, 64) * Box::kColumns * 2;
  }

  static __device__ Signal* SignalOf(const Args& args, const CallContext& call, int dst,
                                     int64_t slot) {
    return args.view.template At<Signal>(
        dst, args.workspace.SignalOffset(call.epoch) + args.layout.SignalOffset(slot));
  }
  // A slot holds as much as two stagings.
  static __device__ char* SlotAt(const Args& args, const CallContext& call, int dst, int64_t slot) {
    return args.view.At(dst, args.workspace.DataOffset(call.epoch) + args.layout.SlotOffset(slot));
  }

  static constexpr bool kHasParts = false;

  template <typename AwaitParts>
  static __device__ void Finish(const Args& args, const CallContext&,
                                StagingWriter<Config>& staging, Accumulators<Config>& acc,
                                int32_t block_m, Tile tile, AwaitParts&&) {
    const int32_t m = PlaceOf(args, block_m, tile.n).m;
#pragma unroll
    for (int i = 0; i < Config::kOwnBlocks; ++i) {
      if (!HasRows(args, m, staging.BlockAt(i))) continue;
      StageBlock<T, Config::kTileN>(acc[i], staging.Acquire());
      staging.Publish();
    }
  }

  static __device__ void Store(const Args& args, const CallContext& call,
                               StagingReader<Config>& staging, int32_t block_m, Tile tile) {
    const ShardTile place = PlaceOf(args, block_m, tile.n);
    if (!HasRows(args, place.m, 0)) return;
    const int rank = args.view.rank, boxes = BoxesOf(args, place.n);
    const bool is_own = place.owner == rank;
    const int64_t slot = is_own ? 0 : args.layout.SlotOf(place.owner, rank, place.m, place.n);
    const SendSemaphore semaphore = SemaphoreOf(args);
    uint64_t start = 0;
#pragma unroll
    for (int block = 0; block < Config::kBlocks; ++block) {
      if (!HasRows(args, place.m, block)) continue;
      const uint32_t smem = Whole<Config>(staging.Acquire(block));
      if (block == 0) {
        if (!is_own) semaphore.Acquire(call, block_m, tile.n);
        start = call.Start();
      }
      if (is_own) {
        for (int box = 0; box < boxes; ++box) {
          StoreToY(args, smem + box * Box::kBoxBytes, rank, place, block, box);
        }
        ptx::BulkCommit();
      } else {
        char* to = SlotAt(args, call, place.owner, slot) + block * Config::kStagingBytes;
        const int bytes = BoxBytes(args, place.m, block);
        // Whole boxes follow each other.
        const bool whole = bytes == Box::kBoxBytes;
        for (int box = 0; box < (whole ? 1 : boxes); ++box) {
          semaphore.Store(to + box * Box::kBoxBytes, smem + box * Box::kBoxBytes,
                          whole ? boxes * Box::kBoxBytes : bytes);
        }
      }
      staging.Release(block);
    }
    if (is_own) return call.Done(EventKind::kStore, start, block_m, tile.n);
    semaphore.Release();
    ptx::BulkWait<0>();
    ptx::FenceProxyAsyncGlobal();
    StoreRelease(SignalOf(args, call, place.owner, slot), call.signal);
    call.Done(EventKind::kSend, start, place.owner, block_m);
  }

  // A box of the shard from `src`, to its place in y.
  static __device__ void StoreToY(const Args& args, uint32_t smem, int src, const ShardTile& place,
                                  int block, int box) {
    const int32_t row = place.m * Config::kTileM + block * 64;
    const int32_t column = place.n * Config::kTileN + box * Box::kColumns;
    if (!args.concat_rows) return ptx::TmaStore4d(&args.y, smem, column, src, row, 0);
    const int64_t outer = args.rows.outer == 1 ? 0 : Quotient(row, args.rows.inner);
    ptx::TmaStore4d(&args.y, smem, column, static_cast<int32_t>(row - outer * args.rows.inner), src,
                    static_cast<int32_t>(outer));
  }

  // Units are the peers' tiles, each of one CTA of the peer. One lane takes and copies them.
  static __device__ void Send(const Args& args, const CallContext& call,
                              const GemmSmem<Config>& smem) {
    if (!ptx::ElectOne()) return;
    const int per_shard = args.grid.PerShard() * Config::kClusterM;
    const int units = (args.view.world - 1) * per_shard;
    BoxBuffers buffers{smem};
    for (int unit = TakeUnit(args); unit < units; unit = TakeUnit(args)) {
      const int step = unit / per_shard, i = unit - step * per_shard;
      const Tile tile = TileInShard(i / Config::kClusterM, args.grid);
      const int32_t m = tile.m * Config::kClusterM + i % Config::kClusterM;
      if (!HasRows(args, m, 0)) continue;
      Receive(args, call, buffers, SendPeer(args.view.rank, step + 1, args.view.world), m, tile.n);
    }
    ptx::BulkWait<0>();
  }

  static __device__ void Receive(const Args& args, const CallContext& call, BoxBuffers& buffers,
                                 int src, int32_t m, int32_t n) {
    const int64_t slot = args.layout.SlotOf(args.view.rank, src, m, n);
    uint64_t start = call.Start();
    AwaitPeer(call, SignalOf(args, call, args.view.rank, slot), src, slot);
    ptx::FenceProxyAsyncGlobal();  // bulk copies read it
    call.Done(EventKind::kWaitParts, start, m, n);
    start = call.Start();
    const char* from = SlotAt(args, call, args.view.rank, slot);
    const int boxes = BoxesOf(args, n), count = BlocksOf(args, m) * boxes;
    const auto load = [&](int i) {
      const int block = i / boxes, box = i - block * boxes;
      buffers.Load(i % BoxBuffers::kCount,
                   from + block * Config::kStagingBytes + box * Box::kBoxBytes,
                   BoxBytes(args, m, block));
    };
    ptx::BulkWaitRead<0>();  // of the tile before this one
    for (int i = 0; i < Min(count, BoxBuffers::kCount); ++i) load(i);
    for (int i = 0; i < count; ++i) {
      const int block = i / boxes;
      StoreToY(args, buffers.Await(i % BoxBuffers::kCount), src, ShardTile{src, m, n}, block,
               i - block * boxes);
      ptx::BulkCommit();
      if (i + BoxBuffers::kCount >= count) continue;
      ptx::BulkWaitRead<0>();
      load(i + BoxBuffers::kCount);
    }
    call.Done(EventKind::kCopy, start, src, m);
  }
};

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    MatmulAllToAllKernel(const __grid_constant__ MatmulAllToAllArgs args) {
  RunGemm<MatmulAllToAllSm90<Config>>(args);
}

}  // namespace jflux

#endif  // JFLUX_OPS_MATMUL_ALL_TO_ALL_MATMUL_ALL_TO_ALL_SM90_CUH_
