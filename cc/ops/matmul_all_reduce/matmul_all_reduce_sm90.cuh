// matmul_all_reduce on Hopper: the kernel of matmul_reduce_scatter, plus an all-gather of the
// finished tiles.
//
// Each rank owns whole tile rows, so a tile has one owner. Store warps write a finished local tile
// to y by TMA, and to a slot in each peer's workspace by bulk copies. The tile's signals follow
// when the copies have completed. A slot holds the staging as it is: swizzled boxes of 64 or 32
// columns.
//
// Scheduler warps copy the peers' finished tiles to y in their idle time, between publishing a tile
// and the load warp's start of it. Each takes one peer's tile from a counter, polls its signal once
// per opportunity, and copies its boxes through shared memory. After the last tile it waits for the
// rest.
//
//   writes  store warps: partial tiles as in matmul_reduce_scatter, and finished tiles
//   waits   send warps, for partial tiles; scheduler warps, after the last tile, for finished tiles
//   order   bulk copies complete, proxy fence, release fence, signals
//   reset   never: core/signal.h
//
// Deadlock: as in matmul_reduce_scatter; a finished tile never waits for a scheduler warp that
// waits.
#ifndef JFLUX_OPS_MATMUL_ALL_REDUCE_MATMUL_ALL_REDUCE_SM90_CUH_
#define JFLUX_OPS_MATMUL_ALL_REDUCE_MATMUL_ALL_REDUCE_SM90_CUH_

#include "gpu/box_buffers.cuh"
#include "gpu/epilogue_sm90.cuh"
#include "gpu/fragments_sm90.cuh"
#include "gpu/gemm_config.h"
#include "gpu/gemm_sm90.cuh"
#include "ops/matmul_all_reduce/matmul_all_reduce.h"
#include "ops/matmul_reduce_scatter/matmul_reduce_scatter_sm90.cuh"

namespace jflux {

// y, y_data and residual of the base are the local rows of the whole arrays.
struct MatmulAllReduceArgs : MatmulReduceScatterArgs {
  CUtensorMap all;  // the whole y
  MatmulAllReduceLayout finished;
  int32_t tiles_n;          // tile columns
  int32_t rank_row_blocks;  // row blocks of a rank
  int32_t group_m;          // row blocks of a raster group
};

template <typename Config_>
struct MatmulAllReduceSm90 : MatmulReduceScatterSm90<Config_> {
  using Config = Config_;
  using Args = MatmulAllReduceArgs;
  using Base = MatmulReduceScatterSm90<Config>;
  using Box = Staged<Config::kTileN>;

  static __device__ Signal* FinishedSignal(const Args& args, const CallContext& call, int dst,
                                           int src, Tile tile, int m64) {
    return args.view.template At<Signal>(
        dst, args.workspace.SignalOffset(call.epoch) + args.finished.SignalOffset(src, tile, m64));
  }
  static __device__ char* FinishedM64(const Args& args, const CallContext& call, int dst, int src,
                                      Tile tile, int m64) {
    return args.view.At(dst, args.workspace.DataOffset(call.epoch) +
                                 args.finished.SlotOffset(src, tile) + m64 * Config::kStagingBytes);
  }

  struct Epilogue : Base::Epilogue {
    static __device__ void Store(const Args& args, const CallContext& call,
                                 StagingReader<Config>& staging, int32_t row_block, Tile tile) {
      const int rank = args.view.rank;
      if (!Base::IsOwner(args, Base::RowsOf(args, row_block, 0))) {
        return Base::Epilogue::Store(args, call, staging, row_block, tile);
      }
      const Tile local_tile{row_block, tile.n};
      const SendSemaphore semaphore = SemaphoreOf(args);
      uint64_t start = 0;
#pragma unroll
      for (int m64 = 0; m64 < Config::kM64Blocks; ++m64) {
        const StagedM64 staged = staging.Acquire(m64);
        StoreStagedM64<Config::kTileN>(staged, &args.y, Base::FirstLocalRow(args, row_block, m64),
                                       static_cast<int64_t>(tile.n) * Config::kTileN, args.n);
        ptx::BulkCommit();
        if (m64 == 0) {
          semaphore.Acquire(call, row_block, tile.n);
          start = call.Start();
        }
        for (int step = 1; step < args.view.world; ++step) {
          const int peer = SendPeer(rank, step, args.view.world);
          semaphore.Store(FinishedM64(args, call, peer, rank, local_tile, m64),
                          ContiguousStaging<Config>(staged), Config::kStagingBytes);
        }
        staging.Release(m64);
      }
      semaphore.Release();
      // If a wait for partial tiles failed, this tile's sums may be wrong: no peer may take them
      // for right. The consumers have staged the tile after that wait, so this load sees its fault.
      const bool failed = Faulted(call.wait);
      ptx::BulkWait<0>();
      ptx::FenceProxyAsyncGlobal();
      FenceRelease();  // one for all signals
      for (int step = 1; !failed && step < args.view.world; ++step) {
        const int peer = SendPeer(rank, step, args.view.world);
#pragma unroll
        for (int m64 = 0; m64 < Config::kM64Blocks; ++m64) {
          StoreRelaxed(FinishedSignal(args, call, peer, rank, local_tile, m64), call.signal);
        }
      }
      call.Done(EventKind::kSend, start, rank, row_block);
    }
  };

  struct Exchange : Base::Exchange {
    // The receiver's items are the peers' tiles, each computed by one CTA, in about the order in
    // which they are finished. `item` is the one this scheduler warp holds; -1: none.
    struct Receiver {
      BoxBuffers<Config> boxes;
      int32_t item = -1;

      __device__ explicit Receiver(const GemmSmem<Config>& smem) : boxes{smem} {}
      template <typename IsOver>
      __device__ void ReceiveUntil(const Args& args, const CallContext& call, IsOver&& is_over) {
        while (!is_over() && Receive(args, call, /*waits=*/false)) {
        }
      }
      __device__ void ReceiveRest(const Args& args, const CallContext& call) {
        while (Receive(args, call, /*waits=*/true)) {
        }
        if (ptx::ElectOne()) ptx::BulkWait<0>();
        __syncwarp();
      }

     private:
      // Called by all lanes. Copies one item to y if it has arrived; with `waits`, waits for it.
      // False if it has not arrived or if there are no more. A loop that polls again and again
      // costs the product 10 % (docs/internals/gemm.md).
      __device__ bool Receive(const Args& args, const CallContext& call, bool waits) {
        const int lane = threadIdx.x % 32, peers = args.view.world - 1;
        const int items = args.rank_row_blocks * args.tiles_n * peers;
        if (item < 0) {
          item = __shfl_sync(0xffffffff, lane == 0 ? TakeTransfer(args) : 0, 0);
        }
        if (item >= items) return false;
        const int i = item / peers, step = item - i * peers + 1;
        const int src = (args.view.rank + step) % args.view.world;
        const Tile place = GroupedTile(i, args.rank_row_blocks, args.tiles_n, args.group_m);
        const Tile tile{src * args.rank_row_blocks + place.m, place.n};
        bool has_arrived = true;
        if (lane < Config::kM64Blocks) {
          const Signal* signal = FinishedSignal(args, call, args.view.rank, src, tile, lane);
          if (waits) {
            AwaitPeer(call, signal, src, args.layout.SlotOf(src, tile));
          } else {
            has_arrived = HasArrived(call, signal);
          }
          if (has_arrived) ptx::FenceProxyAsyncGlobal();  // bulk copies read the tile
        }
        if (!__all_sync(0xffffffff, has_arrived)) return false;
        __syncwarp();
        const uint64_t start = call.Start();
        if (ptx::ElectOne()) {
          Copy(args, call, src, tile);
          call.Done(EventKind::kCopy, start, src, tile.m);
        }
        __syncwarp();
        item = -1;
        return true;
      }

      __device__ void Copy(const Args& args, const CallContext& call, int src, Tile tile) {
        const auto n0 = tile.n * Config::kTileN;
        const int columns = Min(static_cast<int>(args.n) - n0, Config::kTileN);
        const int boxes_per_m64 = CeilDiv(columns, Box::kColumns),
                  count = Config::kM64Blocks * boxes_per_m64;
        const auto load = [&](int i) {
          const int m64 = i / boxes_per_m64, box = i - m64 * boxes_per_m64;
          boxes.Load(i % BoxBuffers<Config>::kCount,
                     FinishedM64(args, call, args.view.rank, src, tile, m64) + box * Box::kBoxBytes,
                     Box::kBoxBytes);
        };
        ptx::BulkWaitRead<0>();  // the previous tile's boxes
        for (int i = 0; i < Min(count, BoxBuffers<Config>::kCount); ++i) load(i);
        for (int i = 0; i < count; ++i) {
          const int m64 = i / boxes_per_m64, box = i - m64 * boxes_per_m64;
          ptx::TmaStore2d(&args.all, boxes.Await(i % BoxBuffers<Config>::kCount),
                          n0 + box * Box::kColumns, tile.m * Config::kTileM + m64 * 64);
          ptx::BulkCommit();
          if (i + BoxBuffers<Config>::kCount >= count) continue;
          ptx::BulkWaitRead<0>();
          load(i + BoxBuffers<Config>::kCount);
        }
      }
    };
  };
};

JFLUX_GEMM_KERNEL(MatmulAllReduce);

// matmul_all_reduce of few rows on Hopper (FewRowsLayout): one kernel that multiplies, sends its
// tiles to the peer and adds the peer's.
//
// A CTA computes one tile. With few tiles, a cluster of two CTAs splits the k of a tile instead,
// and each finishes half of the columns, a slice. So enough SMs read w. With scales of blocks no
// CTAs share k, and consumers share each tile.
//
// A consumer's slice is staged in fragment order and copied to the peer's workspace; the store warp
// signals when it has arrived. The consumer rounds its accumulators as the copy was rounded, adds
// the peer's slice from its own workspace, and stages y.

struct FewRowsArgs {
  DeviceState* state;
  SymmetricView view;
  int32_t num_tiles;
  int32_t a_bytes;  // bytes of a box of A
  int64_t rows, k, n;
  uint32_t signature, op;
  WorkspaceLayout workspace;
  FewRowsLayout layout;
  const void* residual;  // or null
  const float* x_scale;  // as in MatmulReduceScatterArgs
  const float* w_scale;
  bool out_f16;  // of operands of 8 bits
  CUtensorMap x;
  CUtensorMap w;
  CUtensorMap y;
  __device__ bool IsFloat16() const { return out_f16; }
};

template <typename Config_>
struct FewRowsSm90 {
  using Config = Config_;
  using Args = FewRowsArgs;

  struct Schedule : OrderedTiles<Counted> {
    using OrderedTiles::OrderedTiles;
    __device__ Tile At(const Args&, int32_t t) const { return Tile{0, t}; }
  };

  struct Operands : BoxesOfA {
    struct alignas(16) Coords {
      int32_t n0;  // the column in w
    };
    static __device__ Coords CoordsOf(const Args&, const Schedule&, int32_t, Tile tile) {
      return Coords{tile.n * Config::kTileN};
    }
    static __device__ KRange KOf(const Args& args, Tile tile, const Coords&, int) {
      return SplitOfK<Config>(args.k, tile.split);
    }

    static __device__ Rhs RhsOf(const Args& args, const Coords& coords, int) {
      return Rhs{&args.w, coords.n0};
    }
    struct Source {
      const CUtensorMap* map;
      __device__ void Load(uint32_t smem, uint32_t bar, int k0) const {
        ptx::TmaLoad2d(smem, map, bar, k0, 0);
      }
    };
    static __device__ Source SourceOf(const Args& args, const CallContext&, const Coords&, int) {
      return Source{&args.x};
    }
    static __device__ void PrefetchMaps(const Args& args) {
      ptx::PrefetchTensorMap(&args.w);
      ptx::PrefetchTensorMap(&args.x);
    }
  };

  static __device__ Signal* SignalOf(const Args& args, const CallContext& call, int dst, Tile tile,
                                     int m64) {
    return args.view.template At<Signal>(dst,
                                         args.workspace.SignalOffset(call.epoch) +
                                             args.layout.SignalOffset(SliceOf<Config>(tile), m64));
  }
  static __device__ char* M64SlotOf(const Args& args, const CallContext& call, int dst, Tile tile,
                                    int m64) {
    return args.view.At(dst, args.workspace.DataOffset(call.epoch) +
                                 args.layout.M64Offset(SliceOf<Config>(tile), m64));
  }

  // With kBlockScales.
  static __device__ ScaleSource<Config> ScalesOf(const Args& args, const CallContext&, int32_t,
                                                 Tile tile) {
    const int64_t k_blocks = CeilDiv<int64_t>(args.k, Config::kTileK);
    ScaleSource<Config> scales;
    scales.SetRows(args.x_scale, Rows{1, 1, args.rows}, 0, k_blocks);
    scales.SetColumns(args.w_scale, FirstColumn<Config>(tile), args.n, k_blocks);
    return scales;
  }

  struct Epilogue : EveryM64 {
    static __device__ bool HasRows(const Args& args, int32_t, int m64) {
      return m64 * 64 < args.rows;
    }
    template <typename AwaitPartials>
    static __device__ void Finish(const Args& args, const CallContext& call,
                                  StagingWriter<Config>& staging, Slices<Config>& acc, int32_t,
                                  Tile tile, AwaitPartials&& await_partials) {
      if constexpr (Config::kScaled) {
        if (args.w_scale != nullptr) {
          ScaleM64s<Config::kSliceN, Config::kConsumerM64Blocks>(
              acc, args.x_scale, args.w_scale, FirstColumn<Config>(tile), args.n,
              [&](int i, int r) {
                const int64_t row = i * 64 + r;
                return row < args.rows ? row : -1;
              });
        }
      }
      if (IsFloat16<Config>(args)) {
        Reduce<__half>(args, call, staging, acc, tile, await_partials);
      } else {
        Reduce<typename Config::Result>(args, call, staging, acc, tile, await_partials);
      }
    }

    // Adds the peer's slice, of T.
    template <typename T, typename AwaitPartials>
    static __device__ __forceinline__ void Reduce(const Args& args, const CallContext& call,
                                                  StagingWriter<Config>& staging,
                                                  Slices<Config>& acc, Tile tile,
                                                  AwaitPartials& await_partials) {
      using F = Fragments<Config, T>;
#pragma unroll
      for (int i = 0; i < Config::kConsumerM64Blocks; ++i) {
        int m64 = i;
        if constexpr (Config::kCooperative) m64 = staging.M64At(i);
        if (!HasRows(args, 0, m64)) continue;
        F::template Stage<false>(acc[i], 0, ContiguousStaging<Config>(staging.Acquire()));
        staging.Publish();
#pragma unroll
        for (int j = 0; j < Config::kSliceAccumulators; j += 2) {
          const float2 sent = Unpack<T>(Pack<T>(acc[i][j], acc[i][j + 1]));
          acc[i][j] = sent.x;
          acc[i][j + 1] = sent.y;
        }
      }
      await_partials();
#pragma unroll
      for (int i = 0; i < Config::kConsumerM64Blocks; ++i) {
        int m64 = i;
        if constexpr (Config::kCooperative) m64 = staging.M64At(i);
        if (!HasRows(args, 0, m64)) continue;
        F::template Add<false>(acc[i], M64SlotOf(args, call, args.view.rank, tile, m64));
        if (args.residual != nullptr) {
          AddRows<T, Config::kSliceN>(acc[i], args.residual, FirstColumn<Config>(tile), args.n,
                                      [&](int r) {
                                        const int64_t row = m64 * 64 + r;
                                        return row < args.rows ? row * args.n : -1;
                                      });
        }
        StageM64<T, Config::kSliceN>(acc[i], staging.Acquire());
        staging.Publish();
      }
    }

    // First the peer's copy, then y. TMA drops rows past y's last.
    static __device__ void Store(const Args& args, const CallContext& call,
                                 StagingReader<Config>& staging, int32_t, Tile tile) {
      const int peer = 1 - args.view.rank;
      uint64_t start = 0;
#pragma unroll
      for (int m64 = 0; m64 < Config::kM64Blocks; ++m64) {
        if (!HasRows(args, 0, m64)) continue;
        const uint32_t smem = ContiguousStaging<Config>(staging.Acquire(m64));
        if (m64 == 0) start = call.Start();
        ptx::BulkStore(M64SlotOf(args, call, peer, tile, m64), smem, Config::kStagingBytes);
        ptx::BulkCommit();
        staging.Release(m64);
      }
      ptx::BulkWait<0>();
      ptx::FenceProxyAsyncGlobal();
      FenceRelease();  // one for both signals
#pragma unroll
      for (int m64 = 0; m64 < Config::kM64Blocks; ++m64) {
        if (!HasRows(args, 0, m64)) continue;
        StoreRelaxed(SignalOf(args, call, peer, tile, m64), call.signal);
      }
      call.Done(EventKind::kSend, start, peer, tile.n);
#pragma unroll
      for (int m64 = 0; m64 < Config::kM64Blocks; ++m64) {
        if (!HasRows(args, 0, m64)) continue;
        const StagedM64 staged = staging.Acquire(m64);
        start = call.Start();
        StoreStagedM64<Config::kSliceN>(staged, &args.y, m64 * 64, FirstColumn<Config>(tile),
                                        args.n);
        ptx::BulkCommit();
        staging.Release(m64);
        call.Done(EventKind::kStore, start, 0, tile.n);
      }
    }
  };

  struct Exchange : PeerExchange {
    struct Partials {
      static __device__ void Await(const Args& args, const CallContext& call, int32_t, Tile tile) {
        const uint64_t start = call.Start();
        const int m64 = threadIdx.x % 32;
        if (m64 < Config::kM64Blocks && Epilogue::HasRows(args, 0, m64)) {
          AwaitPeer(call, SignalOf(args, call, args.view.rank, tile, m64), 1 - args.view.rank,
                    SliceOf<Config>(tile));
        }
        __syncwarp();
        if (m64 == 0) call.Done(EventKind::kWaitPartials, start, 0, tile.n);
      }
    };
  };
};

JFLUX_GEMM_KERNEL(FewRows);

}  // namespace jflux

#endif  // JFLUX_OPS_MATMUL_ALL_REDUCE_MATMUL_ALL_REDUCE_SM90_CUH_
