// matmul_reduce_scatter on Hopper: one kernel that multiplies, sends partial tiles and sums.
//
// A consumer stages its partial tile in fragment order (gpu/fragments_sm90.cuh), and the store warp
// copies it to the workspaces of the ranks that own its rows (gpu/send_semaphore.cuh). Local tiles
// come last: by then the peers' partial tiles have arrived. The consumer adds them to its
// accumulators, in float32, in rank order after its own, and writes y, while the other consumer
// multiplies the next tile. There is no separate reduction.
//
// With a wire (kWire) partial tiles are quantised as they are staged, and dequantised as they are
// added.
//
// With few rows, the CTAs of a cluster may split a tile's k (kClusterK): each sums, sends and
// finishes a slice of its columns, which has a slot of its own.
//
//   writes  store warps: the owners' workspaces, one signal per m64 block
//   waits   send warps (WaitForPartials), for the peers' partial tiles of a local tile
//   order   bulk copies complete, proxy fence, release fence, signals
//   reset   never: core/signal.h
//
// Deadlock: core/tile_order.h.
#ifndef JFLUX_OPS_MATMUL_REDUCE_SCATTER_MATMUL_REDUCE_SCATTER_SM90_CUH_
#define JFLUX_OPS_MATMUL_REDUCE_SCATTER_MATMUL_REDUCE_SCATTER_SM90_CUH_

#include <string>
#include <type_traits>

#include "core/tile_order.h"
#include "gpu/epilogue_sm90.cuh"
#include "gpu/fragments_sm90.cuh"
#include "gpu/gemm_config.h"
#include "gpu/gemm_sm90.cuh"
#include "gpu/send_semaphore.cuh"
#include "ops/matmul_reduce_scatter/matmul_reduce_scatter.h"
#include "runtime/gemm_instances_cuda.h"

namespace jflux {

// The fields that every tile needs come first: a line of constant memory is fetched when it is
// first read.
struct MatmulReduceScatterArgs {
  DeviceState* state;
  SymmetricView view;
  Rows rows;
  ScatterOrder order;  // of cluster tiles
  int32_t num_tiles;
  int32_t terms;
  int32_t a_bytes;  // bytes of a box of A
  uint32_t signature, op;
  bool out_f32, out_f16;  // out_f16: of operands of 8 bits
  bool wire_int8;         // with kWire: values are int8, and else e4m3
  int32_t senders;        // store warps that send at a time; 0: all (gpu/send_semaphore.cuh)
  int64_t k[kMaxWeights];
  int64_t n;
  WorkspaceLayout workspace;
  ReduceScatterLayout layout;
  const float* bias;     // or null
  const void* residual;  // or null
  void* y_data;
  // 4-d: k, inner, outer, world; with outer == 1 all rows are `inner`.
  CUtensorMap x[kMaxWeights];
  CUtensorMap w[kMaxWeights];
  CUtensorMap y;  // 16-bit types
  // Of operands of 8 bits: of all rows and all columns; or with an entry for each k-block, and of
  // blocks of columns (Scales).
  const float* x_scale;
  const float* w_scale;
};

template <typename Config_, bool kWire = false>
struct MatmulReduceScatterSm90 {
  using Config = Config_;
  using Args = MatmulReduceScatterArgs;
  using T = typename Config::Result;

  using Schedule = OrderedTiles<Counted>;

  struct Operands : BoxesOfA {
    // Operand coordinates: the column in w; the row in x as (inner, outer, rank).
    struct alignas(16) Coords {
      int32_t n0, inner, outer, rank;
    };
    static __device__ Coords CoordsOf(const Args& args, const Schedule&, int32_t row_block,
                                      Tile tile) {
      const int32_t column = tile.n * Config::kTileN;
      const int64_t row = static_cast<int64_t>(row_block) * Config::kTileM;
      if (args.rows.outer == 1) return Coords{column, static_cast<int32_t>(row), 0, 0};
      // The launcher guarantees that a row block lies within one (rank, outer).
      return Coords{
          column, static_cast<int32_t>(Remainder(row, args.rows.inner)),
          static_cast<int32_t>(Remainder(Quotient(row, args.rows.inner), args.rows.outer)),
          args.rows.OwnerOf(row)};
    }
    static __device__ int Terms(const Args& args) { return args.terms; }
    static __device__ KRange KOf(const Args& args, Tile tile, const Coords&, int term) {
      return SplitOfK<Config>(args.k[term], tile.split);
    }
    static __device__ Rhs RhsOf(const Args& args, const Coords& coords, int term) {
      return Rhs{&args.w[term], coords.n0};
    }
    struct Source {
      const CUtensorMap* map;
      int32_t inner, outer, rank;
      __device__ void Load(uint32_t smem, uint32_t bar, int k0) const {
        ptx::TmaLoad4d(smem, map, bar, k0, inner, outer, rank);
      }
    };
    static __device__ Source SourceOf(const Args& args, const CallContext&, const Coords& coords,
                                      int term) {
      return Source{&args.x[term], coords.inner, coords.outer, coords.rank};
    }
    static __device__ void PrefetchMaps(const Args& args) {
      ptx::PrefetchTensorMap(&args.w[0]);
      ptx::PrefetchTensorMap(&args.x[0]);
    }
  };

  // The rows [first, end) of an m64 block, and the ranks that own some of them: [first_owner,
  // last_owner]. Empty past the last row.
  struct M64Rows {
    int64_t first, end;
    int first_owner, last_owner;
  };
  static __device__ M64Rows RowsOf(const Args& args, int32_t row_block, int m64) {
    const int64_t first = static_cast<int64_t>(row_block) * Config::kTileM + m64 * 64;
    const int64_t end = Min(first + 64, args.rows.Total());
    if (first >= end) return M64Rows{0, 0, 0, -1};
    return M64Rows{first, end, args.rows.OwnerOf(first), args.rows.OwnerOf(end - 1)};
  }
  // The warps of a consumer that hold rows of `rank`, which is one of the owners: [begin, end).
  struct Warps {
    int begin, end;
  };
  static __device__ Warps WarpsOf(const Args& args, const M64Rows& rows, int rank) {
    const int64_t first_local = rank * args.rows.PerRank();
    const auto begin = static_cast<int>(Max(rows.first, first_local) - rows.first);
    const auto end =
        static_cast<int>(Min(rows.end, first_local + args.rows.PerRank()) - rows.first);
    return Warps{begin / 16, CeilDiv(end, 16)};
  }

  static __device__ bool IsOwner(const Args& args, const M64Rows& rows) {
    return rows.first_owner <= args.view.rank && args.view.rank <= rows.last_owner;
  }
  static __device__ bool HasOtherOwners(const Args& args, const M64Rows& rows) {
    return rows.first_owner < rows.last_owner ||
           (rows.first_owner == rows.last_owner && rows.first_owner != args.view.rank);
  }

  static __device__ Signal* SignalOf(const Args& args, const CallContext& call, int dst, int src,
                                     int32_t row_block, Tile tile, int m64) {
    const int32_t slot = args.layout.SlotOf(dst, Tile{row_block, SliceOf<Config>(tile)});
    return args.view.template At<Signal>(
        dst, args.workspace.SignalOffset(call.epoch) + args.layout.SignalOffset(src, slot, m64));
  }

  // The part of a slot for an m64 block: one staging in a 16-bit type, two in float32.
  static __device__ char* M64SlotOf(const Args& args, const CallContext& call, int dst, int src,
                                    int32_t row_block, Tile tile, int m64) {
    const int32_t slot = args.layout.SlotOf(dst, Tile{row_block, SliceOf<Config>(tile)});
    return args.view.At(dst, args.workspace.DataOffset(call.epoch) +
                                 args.layout.SlotOffset(src, slot) +
                                 m64 * (args.layout.slot_bytes / Config::kM64Blocks));
  }

  using F = std::conditional_t<kWire, QuantizedFragments<Config>, Fragments<Config>>;
  // Stagings of an m64 block.
  static __device__ int Rounds(const Args& args) { return !kWire && args.out_f32 ? 2 : 1; }

  // Stages the partial sums of an m64 block for their owners.
  static __device__ __forceinline__ void StagePartial(
      const Args& args, StagingWriter<Config>& staging,
      const float (&acc)[Config::kSliceAccumulators]) {
    if constexpr (kWire) {
      F::Stage(acc, ContiguousStaging<Config>(staging.Acquire()), args.wire_int8);
    } else if (args.out_f32) {
      F::template Stage<true>(acc, 0, ContiguousStaging<Config>(staging.Acquire()));
      staging.Publish();
      F::template Stage<true>(acc, 1, ContiguousStaging<Config>(staging.Acquire()));
    } else if (Config::kNarrow && args.out_f16) {
      Fragments<Config, __half>::template Stage<false>(
          acc, 0, ContiguousStaging<Config>(staging.Acquire()));
    } else {
      F::template Stage<false>(acc, 0, ContiguousStaging<Config>(staging.Acquire()));
    }
    staging.Publish();
  }
  // Adds a peer's.
  static __device__ __forceinline__ void AddPartial(const Args& args,
                                                    float (&acc)[Config::kSliceAccumulators],
                                                    const char* partial) {
    if constexpr (kWire) {
      F::Add(acc, partial, args.wire_int8);
    } else if (args.out_f32) {
      F::template Add<true>(acc, partial);
    } else if (Config::kNarrow && args.out_f16) {
      Fragments<Config, __half>::template Add<false>(acc, partial);
    } else {
      F::template Add<false>(acc, partial);
    }
  }

  // The m64 block's first row as a row of y. If the tile straddles ranks, it may be negative, and
  // rows past y's last may follow.
  static __device__ int64_t FirstLocalRow(const Args& args, int32_t row_block, int m64) {
    return static_cast<int64_t>(row_block) * Config::kTileM + m64 * 64 -
           args.view.rank * args.rows.PerRank();
  }

  // With kBlockScales. Terms have whole k-blocks, or there is one.
  static __device__ ScaleSource<Config> ScalesOf(const Args& args, const CallContext&,
                                                 int32_t row_block, Tile tile) {
    int64_t k_blocks = 0;
    for (int i = 0; i < args.terms; ++i) k_blocks += CeilDiv<int64_t>(args.k[i], Config::kTileK);
    ScaleSource<Config> scales;
    scales.SetRows(args.x_scale, args.rows, static_cast<int64_t>(row_block) * Config::kTileM,
                   k_blocks);
    scales.SetColumns(args.w_scale, FirstColumn<Config>(tile), args.n, k_blocks);
    return scales;
  }

  struct Epilogue : EveryM64 {
    static __device__ bool HasRows(const Args& args, int32_t row_block, int m64) {
      return static_cast<int64_t>(row_block) * Config::kTileM + m64 * 64 < args.rows.Total();
    }

    template <typename AwaitPartials>
    static __device__ void Finish(const Args& args, const CallContext& call,
                                  StagingWriter<Config>& staging, Slices<Config>& acc,
                                  int32_t row_block, Tile tile, AwaitPartials&& await_partials) {
      // Send before waiting: a peer may be waiting for this partial tile while this rank waits for
      // the peer's partial tile of the same tile. A loop of its own over the scales would spill 7
      // KB of registers.
#pragma unroll
      for (int i = 0; i < Config::kConsumerM64Blocks; ++i) {
        if constexpr (Config::kScaled) {
          const int64_t row0 =
              static_cast<int64_t>(row_block) * Config::kTileM + staging.M64At(i) * 64;
          if (args.w_scale != nullptr) {
            ScaleM64s<Config::kSliceN>(
                &acc[i], args.x_scale, args.w_scale, FirstColumn<Config>(tile), args.n,
                [&](int, int r) {
                  return row0 + r < args.rows.Total() ? args.rows.Actual(row0 + r) : -1;
                });
          }
        }
        if (!HasOtherOwners(args, RowsOf(args, row_block, staging.M64At(i)))) continue;
        StagePartial(args, staging, acc[i]);
      }
      const int warp = threadIdx.x % 128 / 32;
      bool awaited = false;
#pragma unroll
      for (int i = 0; i < Config::kConsumerM64Blocks; ++i) {
        const int m64 = staging.M64At(i);
        const M64Rows rows = RowsOf(args, row_block, m64);
        if (!IsOwner(args, rows)) continue;
        if (!awaited) await_partials();
        awaited = true;
        // Rows that other ranks own get arbitrary values, which are not stored.
        const Warps local = WarpsOf(args, rows, args.view.rank);
        if (local.begin <= warp && warp < local.end) {
          for (int src = 0; src < args.view.world; ++src) {
            if (src == args.view.rank) continue;
            AddPartial(args, acc[i],
                       M64SlotOf(args, call, args.view.rank, src, row_block, tile, m64));
          }
        }
        __syncwarp();
        FinishM64(args, staging, acc[i], FirstLocalRow(args, row_block, m64), tile);
      }
    }

    struct Place {
      const Args& args;
      int64_t row0, n0;
      __device__ const int64_t& Columns() const { return args.n; }
      __device__ int64_t RowAt(int r, const int64_t& n) const {
        const bool inside = row0 + r >= 0 && row0 + r < args.rows.PerRank();
        return inside ? (row0 + r) * n : -1;
      }
      __device__ const Place& Path() const { return *this; }
      __device__ bool IsFloat32() const { return args.out_f32; }
      __device__ bool IsFloat16() const { return args.out_f16; }
    };
    // Finishes the m64 block that starts at row `row0` of y. row0 is negative if the block starts
    // with rows of the previous rank.
    static __device__ void FinishM64(const Args& args, StagingWriter<Config>& staging,
                                     float (&acc)[Config::kSliceAccumulators], int64_t row0,
                                     Tile tile) {
      constexpr int kN = Config::kSliceN;
      const Place place{args, row0, FirstColumn<Config>(tile)};
      const M64Block<Config, Place> block{staging, acc, place};
      Apply(block, step::Bias<kN>{args.bias}, step::Residual<kN>{args.residual});
      const auto row_of = [&](int r) { return place.RowAt(r, args.n); };
      if (args.out_f32) {
        StoreM64F32<kN>(acc, args.y_data, place.n0, args.n, row_of);
        return;
      }
      const StagedM64 staged = staging.Acquire();
      StageResults<Config, kN>(acc, staged, place);
      if (row0 >= 0) {
        staging.Publish();
      } else {
        ScatterStagedRows<T, kN>(staged, 1 + staging.consumer, args.y_data, place.n0, args.n,
                                 row_of);
      }
    }

    static __device__ void Store(const Args& args, const CallContext& call,
                                 StagingReader<Config>& staging, int32_t row_block, Tile tile) {
      const int rank = args.view.rank;
      const SendSemaphore semaphore = SemaphoreOf(args);
      uint64_t start = 0;
      bool sent = false;
#pragma unroll
      for (int m64 = 0; m64 < Config::kM64Blocks; ++m64) {
        const M64Rows rows = RowsOf(args, row_block, m64);
        if (!HasOtherOwners(args, rows)) continue;
        for (int round = 0; round < Rounds(args); ++round) {
          const uint32_t smem = ContiguousStaging<Config>(staging.Acquire(m64));
          if (!sent) {
            semaphore.Acquire(call, row_block, tile.n);
            start = call.Start();
          }
          sent = true;
          for (int dst = rows.first_owner; dst <= rows.last_owner; ++dst) {
            if (dst == rank) continue;
            const Warps warps = WarpsOf(args, rows, dst);
            const int at = warps.begin * F::kWarpBytes;
            semaphore.Store(M64SlotOf(args, call, dst, rank, row_block, tile, m64) +
                                round * Config::kStagingBytes + at,
                            smem + at, (warps.end - warps.begin) * F::kWarpBytes);
          }
          staging.Release(m64);
        }
      }
      if (sent) {
        semaphore.Release();
        ptx::BulkWait<0>();
        ptx::FenceProxyAsyncGlobal();
        FenceRelease();  // one for all signals
#pragma unroll
        for (int m64 = 0; m64 < Config::kM64Blocks; ++m64) {
          const M64Rows rows = RowsOf(args, row_block, m64);
          for (int dst = rows.first_owner; dst <= rows.last_owner; ++dst) {
            if (dst == rank) continue;
            StoreRelaxed(SignalOf(args, call, dst, rank, row_block, tile, m64), call.signal);
          }
        }
        call.Done(EventKind::kSend, start, RowsOf(args, row_block, 0).first_owner, row_block);
      }
      if (args.out_f32) return;
#pragma unroll
      for (int m64 = 0; m64 < Config::kM64Blocks; ++m64) {
        const int64_t row0 = FirstLocalRow(args, row_block, m64);
        // A TMA store may end outside its tensor, but must not begin before it.
        if (!IsOwner(args, RowsOf(args, row_block, m64)) || row0 < 0) continue;
        const StagedM64 staged = staging.Acquire(m64);
        start = call.Start();
        StoreStagedM64<Config::kSliceN>(staged, &args.y, row0, FirstColumn<Config>(tile), args.n);
        ptx::BulkCommit();
        staging.Release(m64);
        call.Done(EventKind::kStore, start, row_block, tile.n);
      }
    }
  };

  struct Exchange : PeerExchange {
    struct Partials {
      static __device__ void Await(const Args& args, const CallContext& call, int32_t row_block,
                                   Tile tile) {
        const uint64_t start = call.Start();
        bool waited = false;
        const int src = threadIdx.x % 32 / Config::kM64Blocks,
                  m64 = threadIdx.x % Config::kM64Blocks;
        const M64Rows rows = RowsOf(args, row_block, m64);
        if (src < args.view.world && src != args.view.rank && IsOwner(args, rows)) {
          AwaitPeer(call, SignalOf(args, call, args.view.rank, src, row_block, tile, m64), src,
                    args.layout.SlotOf(args.view.rank, Tile{row_block, SliceOf<Config>(tile)}));
          waited = true;
          // The partial tile may have left L2; the consumers read it soon.
          const Warps local = WarpsOf(args, rows, args.view.rank);
          const char* partial = M64SlotOf(args, call, args.view.rank, src, row_block, tile, m64);
          for (int round = 0; round < Rounds(args); ++round) {
            ptx::BulkPrefetch(partial + round * Config::kStagingBytes + local.begin * F::kWarpBytes,
                              (local.end - local.begin) * F::kWarpBytes);
          }
        }
        if (__any_sync(0xffffffff, waited) && threadIdx.x % 32 == 0) {
          call.Done(EventKind::kWaitPartials, start, row_block, tile.n);
        }
      }
    };
  };
};

JFLUX_GEMM_KERNEL(MatmulReduceScatter);

// Fills all fields except `signature`, `op` and `senders`.
inline bool MakeScatterArgs(const MatmulReduceScatterParams& p,
                            const MatmulReduceScatterOperands& operands, const GemmChoice& choice,
                            const CudaDevice& device, const SymmetricView& view,
                            MatmulReduceScatterArgs* args, std::string* error) {
  args->layout = CudaLayoutOf(p, choice);
  args->workspace = args->layout.Workspace();
  args->state = device.state;
  args->view = view;
  args->rows = p.rows;
  const TileGrid grid = GridOf(choice, p.rows.Total(), p.n, device.sm_count);
  args->order = ScatterOrder::Make(grid, view.rank, view.world, p.rows.PerRank(),
                                   kGemmTileM * choice.cluster_m);
  args->y_data = operands.y;
  args->bias = operands.bias;
  args->residual = operands.residual;
  args->terms = operands.terms;
  args->n = p.n;
  args->num_tiles = grid.tiles_m * grid.tiles_n;
  args->out_f32 = p.out_dtype == DType::kF32;
  args->out_f16 = SizeOf(p.dtype) == 1 && p.out_dtype == DType::kF16;
  args->wire_int8 = p.wire == DType::kS8;
  args->x_scale = operands.x_scale;
  args->w_scale = operands.w_scale;
  const Rows& r = p.rows;
  // Actual row = (o * world + rank) * inner + i. With outer == 1 the rows form one range.
  const bool flat = r.outer == 1;
  const int64_t inner = flat ? r.Total() : r.inner, world = flat ? 1 : r.world;
  if (!args->out_f32 && !EncodeTensorMap(&args->y, p.out_dtype, operands.y, {r.PerRank(), p.n},
                                         {p.n}, {64, StoreColumns(choice)}, error)) {
    return false;
  }
  const int box_rows = BoxRows(p.rows.Total());
  args->a_bytes = box_rows * kBlockBytes;
  for (int i = 0; i < args->terms; ++i) {
    const auto& [x, w, k] = operands.products[i];
    args->k[i] = k;
    if (!EncodeTensorMap(&args->x[i], p.dtype, x, {world, r.outer, inner, k},
                         {r.inner * k, r.world * r.inner * k, k},
                         {1, 1, box_rows, BlockElements(p.dtype)}, error) ||
        !EncodeRhsMap(&args->w[i], p.dtype, w, k, p.n, p.transpose_rhs,
                      /*halves=*/false, choice, error)) {
      return false;
    }
  }
  return true;
}

}  // namespace jflux

#endif  // JFLUX_OPS_MATMUL_REDUCE_SCATTER_MATMUL_REDUCE_SCATTER_SM90_CUH_
