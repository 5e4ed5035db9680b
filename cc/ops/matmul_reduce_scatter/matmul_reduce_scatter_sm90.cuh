// matmul_reduce_scatter on Hopper: one kernel that multiplies, sends partial tiles and sums.
//
// A consumer's partial tile goes from its registers, through its staging, to the workspaces of the
// ranks that own its rows, in fragment order: the reader is the same thread of a consumer of
// the owner's CTA, so nothing is rearranged on the way, and a block is copied in bulk
// (gpu/send_semaphore.cuh). The storer sets the tile's signals when the copies have completed. The
// own tiles come last: by then the peers' partial tiles have arrived. The consumer adds them to its
// registers, in float32 and in rank order after the own part, before y is written, while the other
// consumer multiplies the next tile. There is no separate reduction.
//
// Of few rows, the CTAs of a cluster may share a tile's k (kClusterK): each sums, sends and
// finishes a slice of its columns, which has a slot of its own.
#ifndef JFLUX_OPS_MATMUL_REDUCE_SCATTER_MATMUL_REDUCE_SCATTER_SM90_CUH_
#define JFLUX_OPS_MATMUL_REDUCE_SCATTER_MATMUL_REDUCE_SCATTER_SM90_CUH_

#include "core/tile_order.h"
#include "gpu/epilogue_sm90.cuh"
#include "gpu/fragments_sm90.cuh"
#include "gpu/gemm_config.h"
#include "gpu/gemm_sm90.cuh"
#include "gpu/send_semaphore.cuh"
#include "ops/matmul_reduce_scatter/matmul_reduce_scatter.h"

namespace jflux {

// What each tile needs comes first: lines of constant memory are fetched when they are first read.
struct MatmulReduceScatterArgs {
  DeviceState* state;
  SymmetricView view;
  Rows rows;
  ScatterOrder order;  // of cluster tiles
  int32_t num_tiles;
  int32_t terms;
  int32_t a_bytes;  // of a box of rows
  uint32_t signature, op;
  bool out_f32;
  int32_t senders;  // store warps that send at a time; 0: all (gpu/send_semaphore.cuh)
  int64_t k[kMaxWeights];
  int64_t n;
  WorkspaceLayout workspace;
  ReduceScatterLayout layout;
  const float* bias;     // or null
  const void* residual;  // likewise
  void* y_data;
  // 4-d: k, inner, outer, world; with outer == 1 all rows are `inner`.
  CUtensorMap x[kMaxWeights];
  CUtensorMap w[kMaxWeights];
  CUtensorMap y;  // 16-bit types
};

template <typename Config_>
struct MatmulReduceScatterSm90 {
  using Config = Config_;
  using Args = MatmulReduceScatterArgs;
  using T = typename Config::T;

  static __device__ Tile TileAt(const Args& args, int32_t t) { return args.order.At(t); }

  static __device__ void PrefetchMaps(const Args& args) {
    ptx::PrefetchTensorMap(&args.w[0]);
    ptx::PrefetchTensorMap(&args.x[0]);
  }

  static constexpr bool kRowsArrive = false;
  static constexpr bool kFirstIsFixed = false;
  static constexpr bool kReceives = false;

  struct Source {
    const CUtensorMap* map;
    int32_t inner, outer, rank;
  };
  static __device__ int TermsOf(const Args& args) { return args.terms; }
  static __device__ KRange KOf(const Args& args, Tile tile, int term) {
    return SplitOfK<Config>(args.k[term], tile.split);
  }
  // Of the operands: the column in w; the row in x, by its inner, outer and rank.
  struct alignas(16) Where {
    int32_t n0, inner, outer, rank;
  };
  static __device__ Where WhereOf(const Args& args, int32_t block_m, Tile tile) {
    const int32_t column = tile.n * Config::kTileN;
    const int64_t row = static_cast<int64_t>(block_m) * Config::kTileM;
    if (args.rows.outer == 1) return Where{column, static_cast<int32_t>(row), 0, 0};
    // The launcher sees to it that a block lies within one (rank, outer).
    return Where{column, static_cast<int32_t>(Remainder(row, args.rows.inner)),
                 static_cast<int32_t>(Remainder(Quotient(row, args.rows.inner), args.rows.outer)),
                 args.rows.OwnerOf(row)};
  }
  static __device__ Rhs RhsOf(const Args& args, const Where& where, int term) {
    return Rhs{&args.w[term], where.n0};
  }
  static __device__ Source SourceOf(const Args& args, const CallContext&, const Where& where,
                                    int term) {
    return Source{&args.x[term], where.inner, where.outer, where.rank};
  }
  static __device__ void LoadA(const Source& s, uint32_t smem, uint32_t bar, int k0) {
    ptx::TmaLoad4d(smem, s.map, bar, k0, s.inner, s.outer, s.rank);
  }

  static __device__ void Send(const Args&, const CallContext&, const GemmSmem<Config>&) {}

  static __device__ bool HasRows(const Args& args, int32_t block_m, int block) {
    return static_cast<int64_t>(block_m) * Config::kTileM + block * 64 < args.rows.Total();
  }

  // A block's rows, [first, end), and the ranks that own some of them: [first_owner, last_owner];
  // empty for rows past the end.
  struct BlockRows {
    int64_t first, end;
    int first_owner, last_owner;
  };
  static __device__ BlockRows RowsOf(const Args& args, int32_t block_m, int block) {
    const int64_t first = static_cast<int64_t>(block_m) * Config::kTileM + block * 64;
    const int64_t end = Min(first + 64, args.rows.Total());
    if (first >= end) return BlockRows{0, 0, 0, -1};
    return BlockRows{first, end, args.rows.OwnerOf(first), args.rows.OwnerOf(end - 1)};
  }
  // The warps of a consumer that hold rows of `rank`, one of the owners: [begin, end).
  struct Warps {
    int begin, end;
  };
  static __device__ Warps WarpsOf(const Args& args, const BlockRows& rows, int rank) {
    const int64_t own = rank * args.rows.PerRank();
    const auto begin = static_cast<int>(Max(rows.first, own) - rows.first);
    const auto end = static_cast<int>(Min(rows.end, own + args.rows.PerRank()) - rows.first);
    return Warps{begin / 16, CeilDiv(end, 16)};
  }

  static __device__ bool IsOwner(const Args& args, const BlockRows& rows) {
    return rows.first_owner <= args.view.rank && args.view.rank <= rows.last_owner;
  }
  static __device__ bool HasOtherOwners(const Args& args, const BlockRows& rows) {
    return rows.first_owner < rows.last_owner ||
           (rows.first_owner == rows.last_owner && rows.first_owner != args.view.rank);
  }

  static __device__ Signal* SignalOf(const Args& args, const CallContext& call, int dst, int src,
                                     int32_t block_m, Tile tile, int block) {
    const int32_t slot = args.layout.SlotOf(dst, Tile{block_m, SliceOf<Config>(tile)});
    return args.view.template At<Signal>(
        dst, args.workspace.SignalOffset(call.epoch) + args.layout.SignalOffset(src, slot, block));
  }

  // A block of a slot: a staging's worth in a 16-bit type, two in float32.
  static __device__ char* BlockOf(const Args& args, const CallContext& call, int dst, int src,
                                  int32_t block_m, Tile tile, int block) {
    const int32_t slot = args.layout.SlotOf(dst, Tile{block_m, SliceOf<Config>(tile)});
    return args.view.At(dst, args.workspace.DataOffset(call.epoch) +
                                 args.layout.SlotOffset(src, slot) +
                                 block * (args.layout.slot_bytes / Config::kBlocks));
  }

  using F = Fragments<Config>;
  static __device__ int Rounds(const Args& args) { return args.out_f32 ? 2 : 1; }  // of staging

  static constexpr bool kHasParts = true;
  static __device__ void WaitForParts(const Args& args, const CallContext& call, int32_t block_m,
                                      Tile tile) {
    const uint64_t start = call.Start();
    bool waited = false;
    const int src = threadIdx.x % 32 / Config::kBlocks, block = threadIdx.x % Config::kBlocks;
    const BlockRows rows = RowsOf(args, block_m, block);
    if (src < args.view.world && src != args.view.rank && IsOwner(args, rows)) {
      AwaitPeer(call, SignalOf(args, call, args.view.rank, src, block_m, tile, block), src,
                args.layout.SlotOf(args.view.rank, Tile{block_m, SliceOf<Config>(tile)}));
      waited = true;
      // They may have left L2 meanwhile; the consumers will read them soon.
      const Warps own = WarpsOf(args, rows, args.view.rank);
      const char* part = BlockOf(args, call, args.view.rank, src, block_m, tile, block);
      for (int round = 0; round < Rounds(args); ++round) {
        ptx::BulkPrefetch(part + round * Config::kStagingBytes + own.begin * F::kWarpBytes,
                          (own.end - own.begin) * F::kWarpBytes);
      }
    }
    if (__any_sync(0xffffffff, waited) && threadIdx.x % 32 == 0) {
      call.Done(EventKind::kWaitParts, start, block_m, tile.n);
    }
  }

  template <typename AwaitParts>
  static __device__ void Finish(const Args& args, const CallContext& call,
                                StagingWriter<Config>& staging, Slices<Config>& acc,
                                int32_t block_m, Tile tile, AwaitParts&& await_parts) {
    // What peers wait for first: they may be waiting for it with the same tile, and this rank for
    // theirs.
#pragma unroll
    for (int i = 0; i < Config::kOwnBlocks; ++i) {
      if (!HasOtherOwners(args, RowsOf(args, block_m, staging.BlockAt(i)))) continue;
      if (args.out_f32) {
        F::template Stage<true>(acc[i], 0, Whole<Config>(staging.Acquire()));
        staging.Publish();
        F::template Stage<true>(acc[i], 1, Whole<Config>(staging.Acquire()));
        staging.Publish();
      } else {
        F::template Stage<false>(acc[i], 0, Whole<Config>(staging.Acquire()));
        staging.Publish();
      }
    }
    const int warp = threadIdx.x % 128 / 32;
    bool awaited = false;
#pragma unroll
    for (int i = 0; i < Config::kOwnBlocks; ++i) {
      const int block = staging.BlockAt(i);
      const BlockRows rows = RowsOf(args, block_m, block);
      if (!IsOwner(args, rows)) continue;
      if (!awaited) await_parts();
      awaited = true;
      // Rows that other ranks own become nonsense, which nobody stores.
      const Warps own = WarpsOf(args, rows, args.view.rank);
      if (own.begin <= warp && warp < own.end) {
        for (int src = 0; src < args.view.world; ++src) {
          if (src == args.view.rank) continue;
          const char* part = BlockOf(args, call, args.view.rank, src, block_m, tile, block);
          if (args.out_f32) {
            F::template Add<true>(acc[i], part);
          } else {
            F::template Add<false>(acc[i], part);
          }
        }
      }
      __syncwarp();
      FinishBlock(args, staging, acc[i], FirstOwnRow(args, block_m, block), tile);
    }
  }

  // A block of y from row `row0` on, which may lie before y's first.
  static __device__ void FinishBlock(const Args& args, StagingWriter<Config>& staging,
                                     float (&acc)[Config::kSliceAccumulators], int64_t row0,
                                     Tile tile) {
    const int64_t n0 = FirstColumn<Config>(tile);
    const auto row_of = [&](int r) {
      const bool inside = row0 + r >= 0 && row0 + r < args.rows.PerRank();
      return inside ? (row0 + r) * args.n : -1;
    };
    if (args.bias != nullptr) AddBias<Config::kSliceN>(acc, args.bias, n0, args.n);
    if (args.residual != nullptr) {
      if (args.out_f32) {
        AddRows<float, Config::kSliceN>(acc, args.residual, n0, args.n, row_of);
      } else {
        AddRows<T, Config::kSliceN>(acc, args.residual, n0, args.n, row_of);
      }
    }
    if (args.out_f32) {
      StoreBlockF32<Config::kSliceN>(acc, args.y_data, n0, args.n, row_of);
      return;
    }
    const StagedBlock staged = staging.Acquire();
    StageBlock<T, Config::kSliceN>(acc, staged);
    if (row0 >= 0) {
      staging.Publish();
    } else {
      ScatterStagedRows<T, Config::kSliceN>(staged, 1 + staging.consumer, args.y_data, n0, args.n,
                                            row_of);
    }
  }

  // The block's first row as a row of y: before y's first, or with rows past its last, where a
  // tile straddles.
  static __device__ int64_t FirstOwnRow(const Args& args, int32_t block_m, int block) {
    return static_cast<int64_t>(block_m) * Config::kTileM + block * 64 -
           args.view.rank * args.rows.PerRank();
  }

  static __device__ void Store(const Args& args, const CallContext& call,
                               StagingReader<Config>& staging, int32_t block_m, Tile tile) {
    const int rank = args.view.rank;
    const SendSemaphore semaphore = SemaphoreOf(args);
    uint64_t start = 0;
    bool sent = false;
#pragma unroll
    for (int block = 0; block < Config::kBlocks; ++block) {
      const BlockRows rows = RowsOf(args, block_m, block);
      if (!HasOtherOwners(args, rows)) continue;
      for (int round = 0; round < Rounds(args); ++round) {
        const uint32_t smem = Whole<Config>(staging.Acquire(block));
        if (!sent) {
          semaphore.Acquire(call, block_m, tile.n);
          start = call.Start();
        }
        sent = true;
        for (int dst = rows.first_owner; dst <= rows.last_owner; ++dst) {
          if (dst == rank) continue;
          const Warps warps = WarpsOf(args, rows, dst);
          const int at = warps.begin * F::kWarpBytes;
          semaphore.Store(BlockOf(args, call, dst, rank, block_m, tile, block) +
                              round * Config::kStagingBytes + at,
                          smem + at, (warps.end - warps.begin) * F::kWarpBytes);
        }
        staging.Release(block);
      }
    }
    if (sent) {
      semaphore.Release();
      ptx::BulkWait<0>();
      ptx::FenceProxyAsyncGlobal();
      FenceRelease();  // one for all signals
#pragma unroll
      for (int block = 0; block < Config::kBlocks; ++block) {
        const BlockRows rows = RowsOf(args, block_m, block);
        for (int dst = rows.first_owner; dst <= rows.last_owner; ++dst) {
          if (dst == rank) continue;
          StoreRelaxed(SignalOf(args, call, dst, rank, block_m, tile, block), call.signal);
        }
      }
      call.Done(EventKind::kSend, start, RowsOf(args, block_m, 0).first_owner, block_m);
    }
    if (args.out_f32) return;
#pragma unroll
    for (int block = 0; block < Config::kBlocks; ++block) {
      const int64_t row0 = FirstOwnRow(args, block_m, block);
      // A TMA store may end outside its tensor, but not begin before it.
      if (!IsOwner(args, RowsOf(args, block_m, block)) || row0 < 0) continue;
      const StagedBlock staged = staging.Acquire(block);
      start = call.Start();
      StoreStagedBlock<Config::kSliceN>(staged, &args.y, row0, FirstColumn<Config>(tile), args.n);
      ptx::BulkCommit();
      staging.Release(block);
      call.Done(EventKind::kStore, start, block_m, tile.n);
    }
  }
};

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    MatmulReduceScatterKernel(const __grid_constant__ MatmulReduceScatterArgs args) {
  RunGemm<MatmulReduceScatterSm90<Config>>(args);
}

}  // namespace jflux

#endif  // JFLUX_OPS_MATMUL_REDUCE_SCATTER_MATMUL_REDUCE_SCATTER_SM90_CUH_
