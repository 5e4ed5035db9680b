// matmul_all_reduce on Hopper: matmul_reduce_scatter's kernel, whose storers send what is summed to
// all ranks, and whose scheduler warps take what the peers have finished to y.
//
// Each rank owns whole tiles of rows, so a CTA's tile has one owner. An own tile goes from its
// staging to y, by TMA, and to a slot in each peer's workspace, by bulk copies; the tile's signals
// follow when these have arrived. A slot holds the staging as it is: swizzled boxes of 64 or 32
// columns.
//
// A scheduler that has handed on the next tile has nothing to do until the loader begins with it.
// It takes the peers' tiles from a counter then, looks once whether the one that it holds has come,
// and copies its boxes through shared memory to y. When there are no more tiles to compute, it
// waits for the rest.
//
// Who waits for whom: as in matmul_reduce_scatter; and in the end scheduler warps wait for tiles
// that peers have finished, which wait for no scheduler that waits.
#ifndef JFLUX_OPS_MATMUL_ALL_REDUCE_MATMUL_ALL_REDUCE_SM90_CUH_
#define JFLUX_OPS_MATMUL_ALL_REDUCE_MATMUL_ALL_REDUCE_SM90_CUH_

#include "gpu/box_buffers.cuh"
#include "ops/matmul_all_reduce/matmul_all_reduce.h"
#include "ops/matmul_reduce_scatter/matmul_reduce_scatter_sm90.cuh"

namespace jflux {

// y, y_data and residual of the base are the own rows of the whole arrays.
struct MatmulAllReduceArgs : MatmulReduceScatterArgs {
  CUtensorMap all;  // of the whole y
  MatmulAllReduceLayout finished;
  int32_t tiles_n;      // tile columns
  int32_t rank_blocks;  // tile rows of a rank
  int32_t group_m;      // of them, in a raster group
};

template <typename Config_>
struct MatmulAllReduceSm90 : MatmulReduceScatterSm90<Config_> {
  using Config = Config_;
  using Args = MatmulAllReduceArgs;
  using Base = MatmulReduceScatterSm90<Config>;
  using Box = Staged<Config::kTileN>;

  static __device__ Signal* FinishedSignal(const Args& args, const CallContext& call, int dst,
                                           int src, Tile tile, int block) {
    return args.view.template At<Signal>(dst, args.workspace.SignalOffset(call.epoch) +
                                                  args.finished.SignalOffset(src, tile, block));
  }
  static __device__ char* FinishedBlock(const Args& args, const CallContext& call, int dst, int src,
                                        Tile tile, int block) {
    return args.view.At(dst, args.workspace.DataOffset(call.epoch) +
                                 args.finished.SlotOffset(src, tile) +
                                 block * Config::kStagingBytes);
  }

  static __device__ void Store(const Args& args, const CallContext& call,
                               StagingReader<Config>& staging, int32_t block_m, Tile tile) {
    const int rank = args.view.rank;
    if (!Base::IsOwner(args, Base::RowsOf(args, block_m, 0))) {
      return Base::Store(args, call, staging, block_m, tile);
    }
    const Tile own{block_m, tile.n};
    const SendSemaphore semaphore = SemaphoreOf(args);
    uint64_t start = 0;
#pragma unroll
    for (int block = 0; block < Config::kBlocks; ++block) {
      const StagedBlock staged = staging.Acquire(block);
      StoreStagedBlock<Config::kTileN>(staged, &args.y, Base::FirstOwnRow(args, block_m, block),
                                       static_cast<int64_t>(tile.n) * Config::kTileN, args.n);
      ptx::BulkCommit();
      if (block == 0) {
        semaphore.Acquire(call, block_m, tile.n);
        start = call.Start();
      }
      for (int step = 1; step < args.view.world; ++step) {
        const int peer = SendPeer(rank, step, args.view.world);
        semaphore.Store(FinishedBlock(args, call, peer, rank, own, block), Whole<Config>(staged),
                        Config::kStagingBytes);
      }
      staging.Release(block);
    }
    semaphore.Release();
    ptx::BulkWait<0>();
    ptx::FenceProxyAsyncGlobal();
    FenceRelease();  // one for all signals
    for (int step = 1; step < args.view.world; ++step) {
      const int peer = SendPeer(rank, step, args.view.world);
#pragma unroll
      for (int block = 0; block < Config::kBlocks; ++block) {
        StoreRelaxed(FinishedSignal(args, call, peer, rank, own, block), call.signal);
      }
    }
    call.Done(EventKind::kSend, start, rank, block_m);
  }

  // Units are the peers' tiles, each of one CTA of the peer, in about the order in which they are
  // finished; `unit` is the one that this scheduler holds.
  static constexpr bool kReceives = true;
  struct Receiver {
    BoxBuffers<Config> boxes;
    int32_t unit = -1;
  };
  static __device__ Receiver MakeReceiver(const GemmSmem<Config>& smem) { return {{smem}}; }

  // All lanes. Takes a unit to y, if it has come; with `waits`, when it has. False if it has not,
  // or if there are no more. Looking again and again would cost the product 10 %
  // (docs/design/0003).
  static __device__ bool Receive(const Args& args, const CallContext& call, Receiver& receiver,
                                 bool waits) {
    const int lane = threadIdx.x % 32, peers = args.view.world - 1;
    const int units = args.rank_blocks * args.tiles_n * peers;
    if (receiver.unit < 0) {
      receiver.unit = __shfl_sync(0xffffffff, lane == 0 ? TakeUnit(args) : 0, 0);
    }
    if (receiver.unit >= units) return false;
    const int i = receiver.unit / peers, step = receiver.unit - i * peers + 1;
    const int src = (args.view.rank + step) % args.view.world;
    const Tile place = GroupedTile(i, args.rank_blocks, args.tiles_n, args.group_m);
    const Tile tile{src * args.rank_blocks + place.m, place.n};
    bool has_come = true;
    if (lane < Config::kBlocks) {
      const Signal* signal = FinishedSignal(args, call, args.view.rank, src, tile, lane);
      if (waits) {
        AwaitPeer(call, signal, src, args.layout.SlotOf(src, tile));
      } else {
        has_come = HasCome(call, signal);
      }
      if (has_come) ptx::FenceProxyAsyncGlobal();  // bulk copies read it
    }
    if (!__all_sync(0xffffffff, has_come)) return false;
    __syncwarp();
    const uint64_t start = call.Start();
    if (ptx::ElectOne()) {
      Copy(args, call, receiver.boxes, src, tile);
      call.Done(EventKind::kCopy, start, src, tile.m);
    }
    __syncwarp();
    receiver.unit = -1;
    return true;
  }

  static __device__ void Copy(const Args& args, const CallContext& call, BoxBuffers<Config>& boxes,
                              int src, Tile tile) {
    const auto n0 = tile.n * Config::kTileN;
    const int columns = Min(static_cast<int>(args.n) - n0, Config::kTileN);
    const int in_block = CeilDiv(columns, Box::kColumns), count = Config::kBlocks * in_block;
    const auto load = [&](int i) {
      const int block = i / in_block, box = i - block * in_block;
      boxes.Load(i % BoxBuffers<Config>::kCount,
                 FinishedBlock(args, call, args.view.rank, src, tile, block) + box * Box::kBoxBytes,
                 Box::kBoxBytes);
    };
    ptx::BulkWaitRead<0>();  // of the tile before this one
    for (int i = 0; i < Min(count, BoxBuffers<Config>::kCount); ++i) load(i);
    for (int i = 0; i < count; ++i) {
      const int block = i / in_block, box = i - block * in_block;
      ptx::TmaStore2d(&args.all, boxes.Await(i % BoxBuffers<Config>::kCount),
                      n0 + box * Box::kColumns, tile.m * Config::kTileM + block * 64);
      ptx::BulkCommit();
      if (i + BoxBuffers<Config>::kCount >= count) continue;
      ptx::BulkWaitRead<0>();
      load(i + BoxBuffers<Config>::kCount);
    }
  }

  // All lanes, when there are no more tiles to compute.
  static __device__ void ReceiveRest(const Args& args, const CallContext& call,
                                     Receiver& receiver) {
    while (Receive(args, call, receiver, /*waits=*/true)) {
    }
    if (ptx::ElectOne()) ptx::BulkWait<0>();
    __syncwarp();
  }
};

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    MatmulAllReduceKernel(const __grid_constant__ MatmulAllReduceArgs args) {
  RunGemm<MatmulAllReduceSm90<Config>>(args);
}

}  // namespace jflux

#endif  // JFLUX_OPS_MATMUL_ALL_REDUCE_MATMUL_ALL_REDUCE_SM90_CUH_
