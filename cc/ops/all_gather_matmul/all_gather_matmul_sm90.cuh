// all_gather_matmul on Hopper: one kernel that sends, waits and multiplies.
//
// Every CTA has a sender (gather_sender_sm90.cuh). Senders take chunks of the own shard from a
// counter and move them, by TMA and bulk copies through shared memory, into the peers' workspaces.
// A chunk's signal follows when its copy has completed, while the next chunk is under way.
// Meanwhile the loaders start with the own rows, straight from x; a tile with others' rows is read
// from the workspace panel by panel, as the signals come. Of few rows, the CTAs of a cluster may
// share a tile's k (kClusterK): each waits for its own panels, and finishes a slice of the columns.
#ifndef JFLUX_OPS_ALL_GATHER_MATMUL_ALL_GATHER_MATMUL_SM90_CUH_
#define JFLUX_OPS_ALL_GATHER_MATMUL_ALL_GATHER_MATMUL_SM90_CUH_

#include "core/tile_order.h"
#include "gpu/epilogue_sm90.cuh"
#include "gpu/gemm_config.h"
#include "gpu/gemm_sm90.cuh"
#include "ops/all_gather_matmul/gather_sender_sm90.cuh"

namespace jflux {

template <typename Config_>
struct AllGatherMatmulSm90 {
  using Config = Config_;
  using Args = AllGatherMatmulArgs;
  using T = typename Config::T;

  static __device__ Tile TileAt(const Args& args, int32_t t) { return args.order.At(t); }

  // Virtual rows [first, last) of a block.
  struct Span {
    int64_t first, last;
  };
  static __device__ Span SpanOf(const Args& args, int32_t block_m) {
    const int64_t first = static_cast<int64_t>(block_m) * Config::kTileM;
    return Span{first, Min(first + Config::kTileM, args.rows.Total())};
  }
  static __device__ bool IsOwn(const Args& args, Span s) {
    const int64_t per_rank = args.rows.PerRank();
    return s.first >= args.view.rank * per_rank && s.last <= (args.view.rank + 1) * per_rank;
  }

  // The columns of a tile, or of the slice of it that a CTA finishes: which w and y they belong to,
  // and where they begin there.
  struct Columns {
    int weight;
    int64_t n0;
  };
  static __device__ Columns ColumnsOf(const Args& args, Tile tile) {
    if (Config::kHalves && args.gated) {
      return Columns{0, static_cast<int64_t>(tile.n) * (Config::kTileN / 2)};
    }
    int i = 0;
    while (i + 1 < args.weights && tile.n >= args.first_tile[i + 1]) ++i;
    return Columns{i, FirstColumn<Config>(Tile{0, tile.n - args.first_tile[i], tile.split})};
  }
  static __device__ int TermsOf(const Args&) { return 1; }
  static __device__ KRange KOf(const Args& args, Tile tile, int) {
    return SplitOfK<Config>(args.k, tile.split);
  }
  // Of the operands: the column, in which w; the row in x, or in the workspace, where k goes on
  // with the next panel.
  struct alignas(16) Where {
    int32_t n0, weight, row, panel_rows;  // panel_rows: 0 in x
  };
  static __device__ Where WhereOf(const Args& args, int32_t block_m, Tile tile) {
    const Columns c = ColumnsOf(args, Tile{0, tile.n});
    const Span s = SpanOf(args, block_m);
    const bool own = s.first < s.last && IsOwn(args, s);
    const int64_t row =
        own ? s.first - args.view.rank * args.rows.PerRank() : args.layout.RowOf(block_m, 0);
    return Where{static_cast<int32_t>(c.n0), c.weight, static_cast<int32_t>(row),
                 own ? 0 : args.layout.block_rows};
  }
  static __device__ Rhs RhsOf(const Args& args, const Where& where, int) {
    return Rhs{&args.w[where.weight], where.n0,
               Config::kHalves && args.gated ? &args.w[1] : nullptr};
  }

  // Tiles wait for senders alone.
  static constexpr bool kFirstIsFixed = true;
  static __device__ Tile FirstTile(const Args& args, int32_t cluster) {
    return Tile{args.first[cluster].m, args.first[cluster].n};
  }

  static __device__ void PrefetchMaps(const Args& args) {
    ptx::PrefetchTensorMap(&args.w[0]);
    ptx::PrefetchTensorMap(&args.x);
    ptx::PrefetchTensorMap(&args.workspace_maps[0]);
    ptx::PrefetchTensorMap(&args.workspace_maps[1]);
  }

  // The lanes look at 32 panels at a time; the first lane waits for the first one that is missing.
  static constexpr bool kRowsArrive = true;
  static constexpr bool kReceives = false;
  template <typename Mark>
  static __device__ void WaitForRows(const Args& args, const CallContext& call, int32_t block_m,
                                     Tile tile, const Where& where, Mark&& mark) {
    const KRange k = KOf(args, tile, 0);
    const int first = k.begin / Config::kTileK;
    const int count = CeilDiv(k.end - k.begin, Config::kTileK);
    if (where.panel_rows == 0) return mark(count);
    const Span s = SpanOf(args, block_m);
    if (s.first >= s.last) return mark(count);
    const int first_src = args.rows.OwnerOf(s.first), last_src = args.rows.OwnerOf(s.last - 1);
    const int lane = threadIdx.x % 32;
    for (int come = 0; come < count;) {
      const int32_t chunk = args.layout.ChunkOf(first + come + lane);
      bool is_here = true;
      if (come + lane < count) {
        for (int src = first_src; src <= last_src; ++src) {
          is_here &= HasCome(call, ChunkSignal(args, call, args.view.rank, src, block_m, chunk));
        }
      }
      const uint32_t missing = __ballot_sync(0xffffffff, !is_here);
      if ((missing & 1) != 0 && lane == 0) {
        for (int src = first_src; src <= last_src; ++src) {
          AwaitPeer(call, ChunkSignal(args, call, args.view.rank, src, block_m, chunk), src, chunk);
        }
      }
      ptx::FenceProxyAsyncGlobal();  // the rows are read by TMA
      come += missing == 0 ? 32 : Max(1, __ffs(missing) - 1);
      mark(Min(come, count));
    }
  }

  // A block's rows: in x, where k goes on along a row, or in the workspace, panel after panel.
  struct Source {
    const CUtensorMap* map;
    int32_t row;
    int32_t panel_rows;  // 0: in x
  };
  static __device__ Source SourceOf(const Args& args, const CallContext& call, const Where& where,
                                    int) {
    return Source{where.panel_rows == 0 ? &args.x : &args.workspace_maps[call.epoch & 1], where.row,
                  where.panel_rows};
  }
  static __device__ void LoadA(const Source& source, uint32_t smem, uint32_t bar, int k0) {
    ptx::TmaLoad2d(smem, source.map, bar, source.panel_rows == 0 ? k0 : 0,
                   source.row + k0 / Config::kTileK * source.panel_rows);
  }

  static __device__ bool HasRows(const Args& args, int32_t block_m, int block) {
    return static_cast<int64_t>(block_m) * Config::kTileM + block * 64 < args.rows.Total();
  }

  static constexpr bool kHasParts = false;

  static __device__ void Send(const Args& args, const CallContext& call,
                              const GemmSmem<Config>& smem) {
    GatherSender<Config>::Run(args, call, smem);
  }

  // How a block's 64 rows from virtual row `row0` on reach y.
  enum class Path { kNone, kTma, kRows, kFloat32 };
  static __device__ Path PathOf(const Args& args, int64_t row0) {
    const Rows& rows = args.rows;
    const int64_t total = rows.Total();
    if (row0 >= total) return Path::kNone;
    if (args.out_f32) return Path::kFloat32;
    // Whether the rows follow each other in y too.
    const int64_t last = Min(row0 + 64, total) - 1;
    const bool together =
        rows.outer == 1 || Quotient(row0, rows.inner) == Quotient(last, rows.inner);
    // A TMA store would write beyond them, unless y ends there.
    return together && (rows.outer == 1 || last - row0 == 63) ? Path::kTma : Path::kRows;
  }

  template <typename AwaitParts>
  static __device__ void Finish(const Args& args, const CallContext&,
                                StagingWriter<Config>& staging, Slices<Config>& acc,
                                int32_t block_m, Tile tile, AwaitParts&&) {
    if (args.no_epilogue) {  // few instructions, close together: they have to be fetched too
#pragma unroll
      for (int i = 0; i < Config::kOwnBlocks; ++i) {
        if (!HasRows(args, block_m, staging.BlockAt(i))) continue;
        StageBlock<T, Config::kSliceN>(acc[i], staging.Acquire());
        staging.Publish();
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < Config::kOwnBlocks; ++i) {
      const int block = staging.BlockAt(i);
      if (!HasRows(args, block_m, block)) continue;
      FinishBlock(args, staging, acc[i],
                  static_cast<int64_t>(block_m) * Config::kTileM + block * 64, tile);
    }
  }

  // A block from virtual row `row0` on: what is saved for the gradient, and y. Store takes them in
  // the same order.
  static __device__ void FinishBlock(const Args& args, StagingWriter<Config>& staging,
                                     float (&acc)[Config::kSliceAccumulators], int64_t row0,
                                     Tile tile) {
    const Columns columns = ColumnsOf(args, tile);
    const int64_t n = args.n[columns.weight];
    if constexpr (Config::kHalves) {
      if (args.gated) return FinishGated(args, staging, acc, row0, columns.n0, n);
    }
    const int i = columns.weight;
    if (args.bias[i] != nullptr) AddBias<Config::kSliceN>(acc, args.bias[i], columns.n0, n);
    // (A loop over both would be half the code, and spill two kilobytes.)
    if (args.sums_data[i] != nullptr) {
      Write<Config::kSliceN, 0>(args, staging, acc, args.sums_data[i], row0, columns.n0, n);
    }
    Activate<Config::kSliceN>(acc, args.activation);
    Write<Config::kSliceN, 0>(args, staging, acc, args.y_data[i], row0, columns.n0, n);
  }

  // The first half of the columns is the gate's. A thread holds the same elements of both.
  static __device__ void FinishGated(const Args& args, StagingWriter<Config>& staging,
                                     float (&acc)[Config::kSliceAccumulators], int64_t row0,
                                     int64_t n0, int64_t n) {
    constexpr int kHalf = Config::kTileN / 2;
    if (args.bias[0] != nullptr) AddBias<kHalf, 0>(acc, args.bias[0], n0, n);
    if (args.bias[1] != nullptr) AddBias<kHalf, kHalf>(acc, args.bias[1], n0, n);
    if (args.sums_data[0] != nullptr) {
      Write<kHalf, 0>(args, staging, acc, args.sums_data[0], row0, n0, n);
      Write<kHalf, kHalf>(args, staging, acc, args.sums_data[1], row0, n0, n);
    }
    Activate<kHalf>(acc, args.activation);
#pragma unroll
    for (int i = 0; i < kHalf / 2; ++i) acc[i] *= acc[kHalf / 2 + i];
    Write<kHalf, 0>(args, staging, acc, args.y_data[0], row0, n0, n);
  }

  // kColumns of the accumulators' columns from kFirst on, to `data` [rows, n] from (row0, n0) on.
  template <int kColumns, int kFirst>
  static __device__ void Write(const Args& args, StagingWriter<Config>& staging,
                               const float (&acc)[Config::kSliceAccumulators], void* data,
                               int64_t row0, int64_t n0, int64_t n) {
    const auto row_of = [&](int r) {
      return row0 + r < args.rows.Total() ? args.rows.Actual(row0 + r) * n : -1;
    };
    const Path path = PathOf(args, row0);
    if (path == Path::kFloat32) {
      StoreBlockF32<kColumns, kFirst>(acc, data, n0, n, row_of);
      return;
    }
    const StagedBlock staged = staging.Acquire();
    StageBlock<T, kColumns, kFirst>(acc, staged);
    if (path == Path::kTma) {
      staging.Publish();
    } else {
      ScatterStagedRows<T, kColumns>(staged, 1 + staging.consumer, data, n0, n, row_of);
    }
  }

  static __device__ void Store(const Args& args, const CallContext& call,
                               StagingReader<Config>& staging, int32_t block_m, Tile tile) {
    const Columns columns = ColumnsOf(args, tile);
    const int64_t n = args.n[columns.weight];
    if (args.no_epilogue) {
      for (int block = 0; block < Config::kBlocks; ++block) {
        if (!HasRows(args, block_m, block)) continue;
        const StagedBlock staged = staging.Acquire(block);
        const uint64_t start = call.Start();
        StoreStagedBlock<Config::kSliceN>(
            staged, &args.y[columns.weight],
            static_cast<int64_t>(block_m) * Config::kTileM + block * 64, columns.n0, n);
        ptx::BulkCommit();
        staging.Release(block);
        call.Done(EventKind::kStore, start, block_m, tile.n);
      }
      return;
    }
#pragma unroll
    for (int block = 0; block < Config::kBlocks; ++block) {
      const int64_t row0 = static_cast<int64_t>(block_m) * Config::kTileM + block * 64;
      if (PathOf(args, row0) != Path::kTma) continue;
      const int64_t row = args.rows.Actual(row0);
      const auto store = [&](const CUtensorMap* map) {
        const StagedBlock staged = staging.Acquire(block);
        const uint64_t start = call.Start();
        if (Config::kHalves && args.gated) {
          StoreStagedBlock<Config::kTileN / 2>(staged, map, row, columns.n0, n);
        } else {
          StoreStagedBlock<Config::kSliceN>(staged, map, row, columns.n0, n);
        }
        ptx::BulkCommit();
        staging.Release(block);
        call.Done(EventKind::kStore, start, block_m, tile.n);
      };
      if (args.sums_data[columns.weight] != nullptr) {
        store(&args.sums[columns.weight]);
        if (Config::kHalves && args.gated) store(&args.sums[1]);
      }
      store(&args.y[columns.weight]);
    }
  }
};

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    AllGatherMatmulKernel(const __grid_constant__ AllGatherMatmulArgs args) {
  RunGemm<AllGatherMatmulSm90<Config>>(args);
}

}  // namespace jflux

#endif  // JFLUX_OPS_ALL_GATHER_MATMUL_ALL_GATHER_MATMUL_SM90_CUH_
