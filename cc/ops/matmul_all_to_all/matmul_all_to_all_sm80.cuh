// matmul_all_to_all in portable code (gpu/gemm_sm80.cuh): one kernel that multiplies, sends tiles
// and concatenates what arrives, in the order of Hopper's.
//
// A tile has one owner (core/shard_tiles.h). Threads store a local tile's rows to y, and those of a
// peer's to the tile's slot in its workspace. Between tiles warps copy peers' tiles to y
// (gpu/tile_receiver_sm80.cuh), in the order in which they are sent.
//
//   writes  all threads: the owners' workspaces; one thread: a signal per tile
//   waits   a warp, after its CTA's last tile, for peers' tiles
//   order   stores, a barrier of the CTA, release fence, signal
//   reset   never: core/signal.h; the counters: LeaveCounters (gpu/gemm_call.cuh)
//
// Deadlock: no tile waits for anything.
#ifndef JFLUX_OPS_MATMUL_ALL_TO_ALL_MATMUL_ALL_TO_ALL_SM80_CUH_
#define JFLUX_OPS_MATMUL_ALL_TO_ALL_MATMUL_ALL_TO_ALL_SM80_CUH_

#include "core/shard_tiles.h"
#include "gpu/gemm_epilogue_sm80.cuh"
#include "gpu/gemm_sm80.cuh"
#include "gpu/tile_receiver_sm80.cuh"
#include "ops/matmul_all_to_all/matmul_all_to_all.h"

namespace jflux {

struct MatmulAllToAllArgs80 {
  DeviceState* state;
  SymmetricView view;
  WorkspaceLayout workspace;
  AllToAllLayout layout;
  MatmulAllToAllParams p;
  ShardGrid grid;
  uint32_t signature, op;
  const void* x;
  const void* w;
  void* y;
};

template <typename Config_>
struct MatmulAllToAllSm80 {
  using Config = Config_;
  using Args = MatmulAllToAllArgs80;
  using T = typename Config::T;  // of y too

  // A tile is {m, n: in the shard, split: its owner}.
  struct Schedule : Counted {
    __device__ Schedule(const Args&, uint32_t) {}
    __device__ __forceinline__ Tile Find(const Args& args, int32_t t) const {
      if (t >= args.grid.Total()) return kNoTile80;
      const ShardTile tile = ShardTileAt(t, args.grid, args.view.rank);
      return Tile{tile.m, tile.n, tile.owner};
    }
  };

  struct Operands {
    static constexpr int kMostTerms = 1;
    static __device__ int Terms(const Args&) { return 1; }
    static __device__ int64_t KBytes(const Args& args, Tile, int) { return args.p.k * sizeof(T); }
    static __device__ RowsToCopy<Config> LhsOf(const Args& args, const CallContext&, Tile tile,
                                               int) {
      RowsToCopy<Config> a;
      a.skip = 0;
#pragma unroll
      for (int i = 0; i < a.kRows; ++i) {
        const int64_t r = static_cast<int64_t>(tile.m) * Config::kTileM + a.RowOf(i);
        const int64_t row = args.p.RowOfX(tile.split, Min(r, args.p.rows.PerRank() - 1));
        a.row[i] = static_cast<const char*>(args.x) + row * args.p.k * int64_t{sizeof(T)};
      }
      return a;
    }
    static __device__ Rhs80 RhsOf(const Args& args, Tile tile, int) {
      const int64_t column = static_cast<int64_t>(tile.n) * Config::kTileN;
      return Rhs80{args.w, nullptr, args.p.ColumnOfW(tile.split, column), args.p.ColumnsOfW()};
    }
  };

  static __device__ Signal* SignalOf(const Args& args, const CallContext& call, int dst,
                                     int64_t slot) {
    return args.view.template At<Signal>(
        dst, args.workspace.SignalOffset(call.epoch) + args.layout.SignalOffset(slot));
  }
  static __device__ T* SlotAt(const Args& args, const CallContext& call, int dst, int64_t slot) {
    return args.view.template At<T>(
        dst, args.workspace.DataOffset(call.epoch) + args.layout.SlotOffset(slot));
  }

  static __device__ int PeerTiles(const Args& args) {
    return (args.view.world - 1) * args.grid.PerShard();
  }
  static __device__ PeerTile<T> PeerTileAt(const Args& args, const CallContext& call, int i) {
    const int step = i / args.grid.PerShard(), rank = args.view.rank;
    const Tile tile = TileInShard(i - step * args.grid.PerShard(), args.grid);
    const int src = SendPeer(rank, step + 1, args.view.world);
    const int64_t slot = args.layout.SlotOf(rank, src, tile.m, tile.n);
    const int64_t row = static_cast<int64_t>(tile.m) * Config::kTileM;
    const int64_t column = static_cast<int64_t>(tile.n) * Config::kTileN;
    // A tile's rows follow each other in y.
    const int64_t first = args.p.OffsetInY(src, row);
    return PeerTile<T>{src,
                       slot,
                       SignalOf(args, call, rank, slot),
                       SlotAt(args, call, rank, slot),
                       static_cast<T*>(args.y) + first + column,
                       args.p.concat_rows ? args.p.n : args.p.rows.world * args.p.n,
                       static_cast<int>(Min<int64_t>(args.p.rows.PerRank() - row, Config::kTileM)),
                       static_cast<int>(Min<int64_t>(args.p.n - column, Config::kTileN))};
  }
  using Receiver = TileReceiver80<MatmulAllToAllSm80>;

  struct Epilogue {
    static __device__ __forceinline__ void Finish(const Args& args, const CallContext& call,
                                                  uint32_t smem, Sums80<Config>& sums, Tile tile) {
      using Rows = StagedRows<Config>;
      const uint64_t start = call.Start();
      const int rank = args.view.rank, owner = tile.split;
      const bool is_local = owner == rank;
      const int64_t slot = is_local ? 0 : args.layout.SlotOf(owner, rank, tile.m, tile.n);
      const int64_t row0 = static_cast<int64_t>(tile.m) * Config::kTileM;
      const int64_t n0 = static_cast<int64_t>(tile.n) * Config::kTileN;
      T* to = is_local ? static_cast<T*>(args.y) : SlotAt(args, call, owner, slot) - n0;
      ForStagedRows<Config>(sums, smem, [&](const Rows& rows) {
        rows.template ForEach<Rows::kGroups>([&](int r, int group) {
          const int64_t row = row0 + rows.first_row + r;
          const int64_t c = n0 + rows.first_column + group * Columns8::kCount;
          if (row >= args.p.rows.PerRank() || c >= args.p.n) return;
          const int64_t at = is_local ? args.p.OffsetInY(rank, row)
                                      : static_cast<int64_t>(rows.first_row + r) * Config::kTileN;
          rows.Get(r, group).Store(to + at, c, args.p.n);
        });
      });
      if (!is_local) {
        __syncthreads();
        if (threadIdx.x == 0) {
          FenceRelease();
          StoreRelaxed(SignalOf(args, call, owner, slot), call.signal);
          call.Done(EventKind::kSend, start, owner, tile.m);
        }
        __syncwarp();
      }
      // A CTA has four warps and a tile four items.
      Receiver::ReceiveArrived(args, call, /*most=*/2);
    }
  };

  using Exchange = ReceivingExchange80<MatmulAllToAllSm80>;
};

JFLUX_GEMM_KERNEL_80(MatmulAllToAll);

}  // namespace jflux

#endif  // JFLUX_OPS_MATMUL_ALL_TO_ALL_MATMUL_ALL_TO_ALL_SM80_CUH_
