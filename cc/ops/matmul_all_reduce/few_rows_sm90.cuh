// matmul_all_reduce of few rows on Hopper (few_rows.h): one kernel that multiplies, sends its tiles
// to the peer and adds the peer's.
//
// A CTA computes one tile. With few tiles, a cluster of two CTAs splits the k of a tile instead,
// and each finishes half of the columns, a slice. So enough SMs read w.
//
// A consumer's slice is staged in fragment order and copied to the peer's workspace; the store warp
// signals when it has arrived. The consumer rounds its accumulators as the copy was rounded, adds
// the peer's slice from its own workspace, and stages y.
#ifndef JFLUX_OPS_MATMUL_ALL_REDUCE_FEW_ROWS_SM90_CUH_
#define JFLUX_OPS_MATMUL_ALL_REDUCE_FEW_ROWS_SM90_CUH_

#include "gpu/epilogue_sm90.cuh"
#include "gpu/fragments_sm90.cuh"
#include "gpu/gemm_config.h"
#include "gpu/gemm_sm90.cuh"
#include "ops/matmul_all_reduce/few_rows.h"

namespace jflux {

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
  CUtensorMap x;
  CUtensorMap w;
  CUtensorMap y;
};

template <typename Config_>
struct FewRowsSm90 {
  using Config = Config_;
  using Args = FewRowsArgs;
  using T = typename Config::T;
  using F = Fragments<Config>;

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

  struct Epilogue : EveryM64 {
    static __device__ bool HasRows(const Args& args, int32_t, int m64) {
      return m64 * 64 < args.rows;
    }
    template <typename AwaitPartials>
    static __device__ void Finish(const Args& args, const CallContext& call,
                                  StagingWriter<Config>& staging, Slices<Config>& acc, int32_t,
                                  Tile tile, AwaitPartials&& await_partials) {
#pragma unroll
      for (int m64 = 0; m64 < Config::kM64Blocks; ++m64) {
        if (!HasRows(args, 0, m64)) continue;
        F::template Stage<false>(acc[m64], 0, ContiguousStaging<Config>(staging.Acquire()));
        staging.Publish();
#pragma unroll
        for (int i = 0; i < Config::kSliceAccumulators; i += 2) {
          const float2 sent = Unpack<T>(Pack<T>(acc[m64][i], acc[m64][i + 1]));
          acc[m64][i] = sent.x;
          acc[m64][i + 1] = sent.y;
        }
      }
      await_partials();
#pragma unroll
      for (int m64 = 0; m64 < Config::kM64Blocks; ++m64) {
        if (!HasRows(args, 0, m64)) continue;
        F::template Add<false>(acc[m64], M64SlotOf(args, call, args.view.rank, tile, m64));
        if (args.residual != nullptr) {
          AddRows<T, Config::kSliceN>(acc[m64], args.residual, FirstColumn<Config>(tile), args.n,
                                      [&](int r) {
                                        const int64_t row = m64 * 64 + r;
                                        return row < args.rows ? row * args.n : -1;
                                      });
        }
        StageM64<T, Config::kSliceN>(acc[m64], staging.Acquire());
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

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    FewRowsKernel(const __grid_constant__ FewRowsArgs args) {
  RunGemm<FewRowsSm90<Config>>(args);
}

}  // namespace jflux

#endif  // JFLUX_OPS_MATMUL_ALL_REDUCE_FEW_ROWS_SM90_CUH_
