// matmul_all_reduce in portable code (gpu/gemm_sm80.cuh): the kernel of matmul_reduce_scatter, plus
// an all-gather of the finished tiles; and few rows on two ranks (FewRowsLayout) by the same
// kernel.
//
// Each rank owns whole tile rows. Threads store a finished local tile to y, and row by row to a
// slot in each peer's workspace. Between tiles warps copy peers' finished tiles to y
// (gpu/tile_receiver_sm80.cuh).
//
// Of few rows both ranks compute all tiles, send their sums in fragment order, rounded, and add the
// peer's to their own, rounded alike.
//
//   writes  all threads: partial tiles as in matmul_reduce_scatter, and finished tiles; one thread:
//   a
//           signal per tile and peer
//   waits   all warps of a CTA, for the peers' partial tiles of its local tile; a warp, after its
//           CTA's last tile, for a peer's finished tile
//   order   stores, a barrier of the CTA, release fence, signals. One lane acquires a finished
//   tile's
//           signal, then __syncwarp
//   reset   never: core/signal.h; the counters: LeaveCounters (gpu/gemm_call.cuh)
//
// Deadlock: core/tile_order.h holds for tiles, none of which waits for a finished tile. A warp
// waits for finished tiles when no tile is left to take: each tile is finished, or its CTA is
// running, and no warp of that CTA waits for a finished tile. Of few rows: matmul_all_reduce.h.
#ifndef JFLUX_OPS_MATMUL_ALL_REDUCE_MATMUL_ALL_REDUCE_SM80_CUH_
#define JFLUX_OPS_MATMUL_ALL_REDUCE_MATMUL_ALL_REDUCE_SM80_CUH_

#include "gpu/tile_receiver_sm80.cuh"
#include "ops/matmul_all_reduce/matmul_all_reduce.h"
#include "ops/matmul_reduce_scatter/matmul_reduce_scatter_sm80.cuh"

namespace jflux {

// y and residual of the base are the local rows of the whole arrays; of few rows, all.
struct MatmulAllReduceArgs80 : MatmulReduceScatterArgs80 {
  bool few;
  FewRowsLayout few_rows;  // if few; else the others
  MatmulAllReduceLayout finished;
  int32_t tiles_n;          // tile columns
  int32_t rank_row_blocks;  // row blocks of a rank
  int32_t group_m;          // row blocks of a raster group
  void* all;                // the whole y
};

template <typename Config_>
struct MatmulAllReduceSm80 : MatmulReduceScatterSm80<Config_> {
  using Config = Config_;
  using Args = MatmulAllReduceArgs80;
  using Base = MatmulReduceScatterSm80<Config>;
  using T = typename Config::T;  // of y too

  struct Operands : Base::Operands {
    static constexpr int kMostTerms = 1;
  };

  static __device__ Signal* FinishedSignal(const Args& args, const CallContext& call, int dst,
                                           int src, Tile tile) {
    return args.view.template At<Signal>(
        dst, args.workspace.SignalOffset(call.epoch) + args.finished.SignalOffset(src, tile, 0));
  }
  static __device__ T* FinishedTile(const Args& args, const CallContext& call, int dst, int src,
                                    Tile tile) {
    return args.view.template At<T>(
        dst, args.workspace.DataOffset(call.epoch) + args.finished.SlotOffset(src, tile));
  }
  static __device__ Signal* FewSignal(const Args& args, const CallContext& call, int dst,
                                      Tile tile) {
    return args.view.template At<Signal>(
        dst, args.workspace.SignalOffset(call.epoch) + args.few_rows.SignalOffset(tile.n, 0));
  }
  static __device__ char* FewSlot(const Args& args, const CallContext& call, int dst, Tile tile) {
    return args.view.At(dst,
                        args.workspace.DataOffset(call.epoch) + args.few_rows.M64Offset(tile.n, 0));
  }

  // Peers' finished tiles, in about the order in which they are finished.
  static __device__ int PeerTiles(const Args& args) {
    return args.few ? 0 : args.rank_row_blocks * args.tiles_n * (args.view.world - 1);
  }
  static __device__ PeerTile<T> PeerTileAt(const Args& args, const CallContext& call, int i) {
    const int peers = args.view.world - 1, at = i / peers;
    const int src = (args.view.rank + 1 + i - at * peers) % args.view.world;
    const Tile place = GroupedTile(at, args.rank_row_blocks, args.tiles_n, args.group_m);
    const Tile tile{src * args.rank_row_blocks + place.m, place.n};
    const int64_t row0 = static_cast<int64_t>(tile.m) * Config::kTileM;
    const int64_t n0 = static_cast<int64_t>(tile.n) * Config::kTileN;
    return PeerTile<T>{src,
                       args.layout.SlotOf(src, tile),
                       FinishedSignal(args, call, args.view.rank, src, tile),
                       FinishedTile(args, call, args.view.rank, src, tile),
                       static_cast<T*>(args.all) + row0 * args.n + n0,
                       args.n,
                       Config::kTileM,
                       static_cast<int>(Min<int64_t>(args.n - n0, Config::kTileN))};
  }
  using Receiver = TileReceiver80<MatmulAllReduceSm80>;

  struct Epilogue : Base::Epilogue {
    // Adds the peer's sums of a tile of few rows.
    static __device__ __forceinline__ void SumFew(const Args& args, const CallContext& call,
                                                  Sums80<Config>& sums, Tile tile) {
      using F = Fragments80Of<T, Config>;
      const int peer = 1 - args.view.rank, row0 = WarpPlace<Config>().row;
      uint64_t start = call.Start();
#pragma unroll
      for (int i = 0; i < Config::kM16Blocks; ++i) {
        if (row0 + 16 * i >= args.rows.Total()) continue;
        F::Store(sums, i, FewSlot(args, call, peer, tile));
        F::Round(sums, i);
      }
      __syncthreads();
      if (threadIdx.x == 0) {
        StoreRelease(FewSignal(args, call, peer, tile), call.signal);
        call.Done(EventKind::kSend, start, peer, tile.n);
        start = call.Start();
        AwaitPeer(call, FewSignal(args, call, args.view.rank, tile), peer, tile.n);
        call.Done(EventKind::kWaitPartials, start, 0, tile.n);
      }
      __syncthreads();
#pragma unroll
      for (int i = 0; i < Config::kM16Blocks; ++i) {
        if (row0 + 16 * i < args.rows.Total()) {
          F::Add(sums, i, FewSlot(args, call, args.view.rank, tile));
        }
      }
    }

    static __device__ __forceinline__ void Finish(const Args& args, const CallContext& call,
                                                  uint32_t smem, Sums80<Config>& sums, Tile tile) {
      bool has_results = true;
      if (args.few) {
        SumFew(args, call, sums, tile);
      } else {
        has_results = Base::Epilogue::template SumOverRanks<T>(args, call, sums, tile);
      }
      if (has_results) {
        const uint64_t start = call.Start();
        const int rank = args.view.rank, peers = args.few ? 0 : args.view.world - 1;
        const int64_t row0 = args.few ? 0 : Base::Epilogue::LocalRow(args, tile);
        const int64_t rows = args.few ? args.rows.Total() : args.rows.PerRank();
        const int64_t n0 = static_cast<int64_t>(tile.n) * Config::kTileN;
        Base::Epilogue::template ForResults<T>(
            args, smem, sums, tile, row0, rows,
            [&](const Columns8& y, int r, int64_t row, int64_t c) {
              y.Store(static_cast<T*>(args.y) + row * args.n, c, args.n);
#pragma unroll 1
              for (int step = 1; step <= peers; ++step) {
                const int peer = SendPeer(rank, step, args.view.world);
                y.Store(FinishedTile(args, call, peer, rank, tile) + r * Config::kTileN, c - n0,
                        args.n - n0);
              }
            });
        __syncthreads();
        // If a wait for partial tiles failed, this tile's sums may be wrong: no peer may take them
        // for right. The lanes that waited are of this warp.
        if (threadIdx.x == 0 && peers > 0 && !Faulted(call.wait)) {
          FenceRelease();
          for (int step = 1; step <= peers; ++step) {
            const int peer = SendPeer(rank, step, args.view.world);
            StoreRelaxed(FinishedSignal(args, call, peer, rank, tile), call.signal);
          }
          call.Done(EventKind::kSend, start, rank, tile.m);
        }
        __syncwarp();
      }
      // As many as a tile of each peer has for this warp.
      Receiver::ReceiveArrived(args, call, args.view.world - 1);
    }
  };

  using Exchange = ReceivingExchange80<MatmulAllReduceSm80>;
};

JFLUX_GEMM_KERNEL_80(MatmulAllReduce);

}  // namespace jflux

#endif  // JFLUX_OPS_MATMUL_ALL_REDUCE_MATMUL_ALL_REDUCE_SM80_CUH_
