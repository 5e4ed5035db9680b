// matmul_all_reduce of few rows on Hopper (few_rows.h): one kernel that multiplies, sends its tiles
// to the peer and adds the peer's.
//
// Where there are many tiles, a CTA computes one. Else a cluster of two does, half of k each, and
// each CTA finishes half of the columns, a slice: so that enough SMs read w.
//
// A consumer's slice goes from its registers, through its staging, to the peer's workspace, in
// fragment order; the storer signals when it has arrived. The consumer keeps its registers, rounded
// as what was sent, adds the peer's part from its own workspace, and stages y.
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
  int32_t a_bytes;  // of a box of rows
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

  static __device__ Tile TileAt(const Args&, int32_t t) { return Tile{0, t}; }
  static __device__ int TermsOf(const Args&) { return 1; }
  static __device__ KRange KOf(const Args& args, Tile tile, int) {
    return SplitOfK<Config>(args.k, tile.split);
  }

  struct alignas(16) Where {
    int32_t n0;  // the column in w
  };
  static __device__ Where WhereOf(const Args&, int32_t, Tile tile) {
    return Where{tile.n * Config::kTileN};
  }
  static __device__ Rhs RhsOf(const Args& args, const Where& where, int) {
    return Rhs{&args.w, where.n0};
  }
  static __device__ const CUtensorMap* SourceOf(const Args& args, const CallContext&, const Where&,
                                                int) {
    return &args.x;
  }
  static __device__ void LoadA(const CUtensorMap* x, uint32_t smem, uint32_t bar, int k0) {
    ptx::TmaLoad2d(smem, x, bar, k0, 0);
  }
  static __device__ void PrefetchMaps(const Args& args) {
    ptx::PrefetchTensorMap(&args.w);
    ptx::PrefetchTensorMap(&args.x);
  }

  static constexpr bool kRowsArrive = false;
  static constexpr bool kFirstIsFixed = false;
  static constexpr bool kReceives = false;
  static __device__ void Send(const Args&, const CallContext&, const GemmSmem<Config>&) {}

  static __device__ bool HasRows(const Args& args, int32_t, int block) {
    return block * 64 < args.rows;
  }
  static __device__ Signal* SignalOf(const Args& args, const CallContext& call, int dst, Tile tile,
                                     int block) {
    return args.view.template At<Signal>(
        dst, args.workspace.SignalOffset(call.epoch) +
                 args.layout.SignalOffset(SliceOf<Config>(tile), block));
  }
  static __device__ char* BlockOf(const Args& args, const CallContext& call, int dst, Tile tile,
                                  int block) {
    return args.view.At(dst, args.workspace.DataOffset(call.epoch) +
                                 args.layout.BlockOffset(SliceOf<Config>(tile), block));
  }

  static constexpr bool kHasParts = true;
  static __device__ void WaitForParts(const Args& args, const CallContext& call, int32_t,
                                      Tile tile) {
    const uint64_t start = call.Start();
    const int block = threadIdx.x % 32;
    if (block < Config::kBlocks && HasRows(args, 0, block)) {
      AwaitPeer(call, SignalOf(args, call, args.view.rank, tile, block), 1 - args.view.rank,
                SliceOf<Config>(tile));
    }
    __syncwarp();
    if (block == 0) call.Done(EventKind::kWaitParts, start, 0, tile.n);
  }

  template <typename AwaitParts>
  static __device__ void Finish(const Args& args, const CallContext& call,
                                StagingWriter<Config>& staging, Slices<Config>& acc, int32_t,
                                Tile tile, AwaitParts&& await_parts) {
#pragma unroll
    for (int block = 0; block < Config::kBlocks; ++block) {
      if (!HasRows(args, 0, block)) continue;
      F::template Stage<false>(acc[block], 0, Whole<Config>(staging.Acquire()));
      staging.Publish();
#pragma unroll
      for (int i = 0; i < Config::kSliceAccumulators; i += 2) {
        const float2 sent = Unpack<T>(Pack<T>(acc[block][i], acc[block][i + 1]));
        acc[block][i] = sent.x;
        acc[block][i + 1] = sent.y;
      }
    }
    await_parts();
#pragma unroll
    for (int block = 0; block < Config::kBlocks; ++block) {
      if (!HasRows(args, 0, block)) continue;
      F::template Add<false>(acc[block], BlockOf(args, call, args.view.rank, tile, block));
      if (args.residual != nullptr) {
        AddRows<T, Config::kSliceN>(acc[block], args.residual, FirstColumn<Config>(tile), args.n,
                                    [&](int r) {
                                      const int64_t row = block * 64 + r;
                                      return row < args.rows ? row * args.n : -1;
                                    });
      }
      StageBlock<T, Config::kSliceN>(acc[block], staging.Acquire());
      staging.Publish();
    }
  }

  // What the peer waits for, and then y: TMA cuts off rows that y does not have.
  static __device__ void Store(const Args& args, const CallContext& call,
                               StagingReader<Config>& staging, int32_t, Tile tile) {
    const int peer = 1 - args.view.rank;
    uint64_t start = 0;
#pragma unroll
    for (int block = 0; block < Config::kBlocks; ++block) {
      if (!HasRows(args, 0, block)) continue;
      const uint32_t smem = Whole<Config>(staging.Acquire(block));
      if (block == 0) start = call.Start();
      ptx::BulkStore(BlockOf(args, call, peer, tile, block), smem, Config::kStagingBytes);
      ptx::BulkCommit();
      staging.Release(block);
    }
    ptx::BulkWait<0>();
    ptx::FenceProxyAsyncGlobal();
    FenceRelease();  // one for both signals
#pragma unroll
    for (int block = 0; block < Config::kBlocks; ++block) {
      if (!HasRows(args, 0, block)) continue;
      StoreRelaxed(SignalOf(args, call, peer, tile, block), call.signal);
    }
    call.Done(EventKind::kSend, start, peer, tile.n);
#pragma unroll
    for (int block = 0; block < Config::kBlocks; ++block) {
      if (!HasRows(args, 0, block)) continue;
      const StagedBlock staged = staging.Acquire(block);
      start = call.Start();
      StoreStagedBlock<Config::kSliceN>(staged, &args.y, block * 64, FirstColumn<Config>(tile),
                                        args.n);
      ptx::BulkCommit();
      staging.Release(block);
      call.Done(EventKind::kStore, start, 0, tile.n);
    }
  }
};

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    FewRowsKernel(const __grid_constant__ FewRowsArgs args) {
  RunGemm<FewRowsSm90<Config>>(args);
}

}  // namespace jflux

#endif  // JFLUX_OPS_MATMUL_ALL_REDUCE_FEW_ROWS_SM90_CUH_
