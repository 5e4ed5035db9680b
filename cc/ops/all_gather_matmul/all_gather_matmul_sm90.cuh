// all_gather_matmul on Hopper: one kernel that sends, waits and multiplies.
//
// Send warps (gather_sender_sm90.cuh) take chunks of the local shard from a counter and copy them,
// by TMA and bulk copies through shared memory, to the peers' workspaces. A chunk's signal follows
// when its copy has completed, while the next chunk is in flight. Meanwhile the load warps start
// with the local rows, straight from x. Tiles with other ranks' rows are read from the workspace,
// k-panel by k-panel, as the signals arrive. With few rows, the CTAs of a cluster may split a
// tile's k (kClusterK): each waits for its own k-panels and finishes a slice of the columns. Scales
// of rows arrive with their k-panels, under the same signals.
//
//   writes  send warps: the peers' workspaces and signals
//   waits   scheduler warps, for the k-panels of their tiles; send warps, for copies to `gathered`
//   order   release and acquire at system scope, and proxy fences around bulk copies and TMA.
//           Consumers, which read scales, acquire at CTA scope what the scheduler warp has acquired
//           (GemmSmem::KBlocksArrived)
//   reset   never: core/signal.h
//
// Deadlock: tiles wait for sends only, and sends wait for nothing.
#ifndef JFLUX_OPS_ALL_GATHER_MATMUL_ALL_GATHER_MATMUL_SM90_CUH_
#define JFLUX_OPS_ALL_GATHER_MATMUL_ALL_GATHER_MATMUL_SM90_CUH_

#include <type_traits>

#include "core/tile_order.h"
#include "gpu/epilogue_sm90.cuh"
#include "gpu/gemm_config.h"
#include "gpu/gemm_sm90.cuh"
#include "ops/all_gather_matmul/gather_sender_sm90.cuh"
#include "runtime/gemm_instances_cuda.h"

namespace jflux {

// kGathers: whether rows come from peers.
template <typename Config_, bool kGathers = true>
struct AllGatherMatmulSm90 {
  using Config = Config_;
  using Args = AllGatherMatmulArgs;
  using T = typename Config::T;

  // Virtual rows [first, last) of a row block.
  struct Span {
    int64_t first, last;
  };
  static __device__ Span SpanOf(const Args& args, int32_t row_block) {
    const int64_t first = static_cast<int64_t>(row_block) * Config::kTileM;
    return Span{first, Min(first + Config::kTileM, args.rows.Total())};
  }
  static __device__ bool IsLocal(const Args& args, Span s) {
    const int64_t per_rank = args.rows.PerRank();
    return s.first >= args.view.rank * per_rank && s.last <= (args.view.rank + 1) * per_rank;
  }

  // The columns of a tile, or of the slice that a CTA finishes: the weight (and y) they belong to,
  // and the first column there.
  struct Columns {
    int weight;
    int64_t n0;
  };
  static __device__ Columns ColumnsOf(const Args& args, Tile tile) {
    if (Config::kTwoWeights && args.gated) {
      return Columns{0, static_cast<int64_t>(tile.n) * (Config::kTileN / 2)};
    }
    int i = 0;
    while (i + 1 < args.weights && tile.n >= args.first_tile[i + 1]) ++i;
    return Columns{i, FirstColumn<Config>(Tile{0, tile.n - args.first_tile[i], tile.split})};
  }
  struct Schedule : OrderedTiles<StaticFirst> {
    using OrderedTiles::OrderedTiles;
    // Safe: tiles wait for send warps only, never for another tile.
    static __device__ Tile FirstTile(const Args& args, int32_t cluster) {
      return Tile{args.first[cluster].m, args.first[cluster].n};
    }
  };

  struct Operands : BoxesOfA {
    // Operand coordinates: the column and its weight; the row in x, or in the workspace.
    struct alignas(16) Coords {
      int32_t n0, weight, row, k_panel_rows;  // rows from one k-panel to the next in the workspace;
                                              // 0: x
    };
    template <typename Schedule>
    static __device__ Coords CoordsOf(const Args& args, const Schedule&, int32_t row_block,
                                      Tile tile) {
      const Columns c = ColumnsOf(args, Tile{0, tile.n});
      const Span s = SpanOf(args, row_block);
      const bool is_local = s.first < s.last && IsLocal(args, s);
      const int64_t row = is_local ? s.first - args.view.rank * args.rows.PerRank()
                                   : args.layout.RowOf(row_block, 0);
      return Coords{static_cast<int32_t>(c.n0), c.weight, static_cast<int32_t>(row),
                    is_local ? 0 : args.layout.k_panel_rows};
    }
    static __device__ Rhs RhsOf(const Args& args, const Coords& coords, int) {
      return Rhs{&args.w[coords.weight], coords.n0,
                 Config::kTwoWeights && args.gated ? &args.w[1] : nullptr};
    }

    static __device__ KRange KOf(const Args& args, Tile tile, const Coords&, int) {
      return SplitOfK<Config>(args.k, tile.split);
    }
    // The rows of a row block: in x, or in the workspace, where a k-panel follows the previous one.
    struct Source {
      const CUtensorMap* map;
      int32_t row;
      int32_t k_panel_rows;  // 0: in x
      __device__ void Load(uint32_t smem, uint32_t bar, int k0) const {
        ptx::TmaLoad2d(smem, map, bar, k_panel_rows == 0 ? k0 : 0,
                       row + k0 / Config::kTileK * k_panel_rows);
      }
    };
    static __device__ Source SourceOf(const Args& args, const CallContext& call,
                                      const Coords& coords, int) {
      return Source{coords.k_panel_rows == 0 ? &args.x : &args.workspace_maps[call.epoch & 1],
                    coords.row, coords.k_panel_rows};
    }
    static __device__ void PrefetchMaps(const Args& args) {
      ptx::PrefetchTensorMap(&args.w[0]);
      ptx::PrefetchTensorMap(&args.x);
      ptx::PrefetchTensorMap(&args.workspace_maps[0]);
      ptx::PrefetchTensorMap(&args.workspace_maps[1]);
    }
  };

  // With kBlockScales: of this rank's rows, or of rows in the workspace.
  static __device__ auto ScalesOf(const Args& args, const CallContext& call, int32_t row_block,
                                  Tile tile) {
    const Columns columns = ColumnsOf(args, Tile{0, tile.n});
    const Span s = SpanOf(args, row_block);
    const int64_t k_blocks = CeilDiv<int64_t>(args.k, Config::kTileK), n = args.n[columns.weight];
    ScaleSource<Config, kGathers> scales;
    if (!kGathers || s.first >= s.last || IsLocal(args, s)) {
      const int64_t before = args.view.rank * args.rows.PerRank();
      scales.SetRows(args.x_scale, Rows{1, 1, args.rows.PerRank()}, s.first - before, k_blocks);
    } else {
      const int32_t rows = args.layout.ScaleRows();
      scales.SetPanel(KPanelScales(args, call.epoch, args.view.rank, row_block, 0), rows, rows);
    }
    if constexpr (Config::kScales == Scales::kOfVectors) {
      scales.SetVectors(args.w_scale[columns.weight], columns.n0, n);
    } else {
      const bool gated = Config::kTwoWeights && args.gated;
      scales.SetColumns(args.w_scale[columns.weight], columns.n0, n, k_blocks,
                        gated ? args.w_scale[1] : nullptr);
    }
    return scales;
  }

  struct Epilogue : EveryM64 {
    static __device__ bool HasRows(const Args& args, int32_t row_block, int m64) {
      return static_cast<int64_t>(row_block) * Config::kTileM + m64 * 64 < args.rows.Total();
    }
    // With scales of blocks a consumer takes registers and time for each k-block.
    static __device__ bool Needs(const Args& args, int32_t row_block, Tile, int m64) {
      return !Config::kBlockScales || Config::kLendsStage || HasRows(args, row_block, m64);
    }

    // How the m64 block that starts at virtual row `row0` is written to y.
    struct BlockPath {
      enum { kNone, kTma, kRows, kFloat32 } path;
      __device__ bool IsFloat32() const { return path == kFloat32; }
      __device__ bool IsStoredByTma() const { return path == kTma; }
    };
    static __device__ BlockPath PathOf(const Args& args, int64_t row0) {
      const Rows& rows = args.rows;
      const int64_t total = rows.Total();
      if (row0 >= total) return BlockPath{BlockPath::kNone};
      if (args.out_f32) return BlockPath{BlockPath::kFloat32};
      // Whether the rows are consecutive in y too.
      const int64_t last = Min(row0 + 64, total) - 1;
      const bool together =
          rows.outer == 1 || Quotient(row0, rows.inner) == Quotient(last, rows.inner);
      // A TMA store writes all 64 rows, so fewer are allowed only at the end of y.
      return BlockPath{together && (rows.outer == 1 || last - row0 == 63) ? BlockPath::kTma
                                                                          : BlockPath::kRows};
    }

    template <typename AwaitPartials>
    static __device__ void Finish(const Args& args, const CallContext& call,
                                  StagingWriter<Config>& staging, Slices<Config>& acc,
                                  int32_t row_block, Tile tile, AwaitPartials&&) {
      if (!Config::kScaled &&
          args.no_epilogue) {  // short code path: instruction fetches are latency too
        StageTile(staging, acc, args, [&](int m64) { return HasRows(args, row_block, m64); });
        return;
      }
#pragma unroll
      for (int i = 0; i < Config::kConsumerM64Blocks; ++i) {
        const int m64 = staging.M64At(i);
        if (!HasRows(args, row_block, m64)) continue;
        FinishM64(args, Config::kScaled ? call.epoch : 0, staging, acc[i],
                  static_cast<int64_t>(row_block) * Config::kTileM + m64 * 64, tile);
      }
    }

    struct Place {
      const Args& args;
      int64_t row0, n0, n;
      __device__ int64_t Columns() const { return n; }
      __device__ int64_t RowAt(int r, int64_t n) const {
        return row0 + r < args.rows.Total() ? args.rows.Actual(row0 + r) * n : -1;
      }
      __device__ BlockPath Path() const { return PathOf(args, row0); }
      __device__ bool IsFloat16() const { return args.out_f16; }
    };
    // step::Scale of the m64 block that starts at virtual row `row0`, once its rows have arrived:
    // in this CTA, or, where CTAs share k, in the one whose slices it has waited for.
    template <int kColumns, int kFirst = 0>
    struct ScaleArrived {
      const Args& args;
      uint32_t epoch;
      int64_t row0;
      const float* const& columns;
      template <typename Block>
      __device__ __forceinline__ void operator()(const Block& block) const {
        if (columns == nullptr) return;
        const Span s = SpanOf(args, static_cast<int32_t>(row0 / Config::kTileM));
        const bool is_local = IsLocal(args, s);
        const float* rows = is_local
                                ? args.x_scale + (s.first - args.view.rank * args.rows.PerRank())
                                : KPanelScales(args, epoch, args.view.rank,
                                               static_cast<int32_t>(row0 / Config::kTileM), 0);
        // A row past the last has its scale; nobody stores what it multiplies.
        const int thread = threadIdx.x % 128;
        const int64_t low = row0 - s.first + 16 * (thread / 32) + thread % 32 / 4;
        const int64_t last = s.last - 1 - s.first;
        ptx::LoadSharedAcquire(block.staging.smem.KBlocksArrived());
        // A line of L1 may be older than what has arrived.
        ScaleM64s<kColumns, kFirst>(&block.acc, {__ldcg(rows + Min(low, last))},
                                    {__ldcg(rows + Min(low + 8, last))}, columns, block.place.n0,
                                    block.place.Columns());
      }
    };
    template <int kColumns, int kFirst = 0>
    static __device__ auto Scale(const Args& args, uint32_t epoch, int64_t row0, int w) {
      if constexpr (kGathers && Config::kScaled) {
        return ScaleArrived<kColumns, kFirst>{args, epoch, row0, args.w_scale[w]};
      } else {
        return step::Scale<kColumns, kFirst>{args.x_scale, args.w_scale[w]};
      }
    }

    // Finishes the m64 block that starts at virtual row `row0`: the sums saved for the gradient,
    // then y. Store writes them out in the same order.
    static __device__ void FinishM64(const Args& args, uint32_t epoch,
                                     StagingWriter<Config>& staging,
                                     float (&acc)[Config::kSliceAccumulators], int64_t row0,
                                     Tile tile) {
      const Columns columns = ColumnsOf(args, tile);
      const Place place{args, row0, columns.n0, args.n[columns.weight]};
      const M64Block<Config, Place> block{staging, acc, place};
      if constexpr (Config::kTwoWeights) {
        if (args.gated) {
          constexpr int kHalf = Config::kTileN / 2;
          Apply(block, Scale<kHalf>(args, epoch, row0, 0),
                Scale<kHalf, kHalf>(args, epoch, row0, 1), step::Bias<kHalf>{args.bias[0]},
                step::Bias<kHalf, kHalf>{args.bias[1]},
                step::SaveHalves<kHalf>{args.sums_data[0], args.sums_data[1]},
                step::Activate<kHalf>{args.activation}, step::Gate<kHalf>{},
                step::WriteResults<kHalf>{args.y_data[0], args.y_scale[0], args.power_of_two});
          return;
        }
      }
      // Save and Write share no code: a loop over both would halve it, and spill 2 KB of registers.
      constexpr int kN = Config::kSliceN;
      const int i = columns.weight;
      Apply(block, Scale<kN>(args, epoch, row0, i), step::Bias<kN>{args.bias[i]},
            step::Save<kN>{args.sums_data[i]}, step::Activate<kN>{args.activation},
            step::WriteResults<kN>{args.y_data[i], args.y_scale[i], args.power_of_two});
    }

    static __device__ void Store(const Args& args, const CallContext& call,
                                 StagingReader<Config>& staging, int32_t row_block, Tile tile) {
      const Columns columns = ColumnsOf(args, tile);
      const int64_t n = args.n[columns.weight];
      if (args.no_epilogue) {
        for (int m64 = 0; m64 < Config::kM64Blocks; ++m64) {
          if (!HasRows(args, row_block, m64)) continue;
          const StagedM64 staged = staging.Acquire(m64);
          const uint64_t start = call.Start();
          StoreStagedM64<Config::kSliceN>(
              staged, &args.y[columns.weight],
              static_cast<int64_t>(row_block) * Config::kTileM + m64 * 64, columns.n0, n);
          ptx::BulkCommit();
          staging.Release(m64);
          call.Done(EventKind::kStore, start, row_block, tile.n);
        }
        return;
      }
#pragma unroll
      for (int m64 = 0; m64 < Config::kM64Blocks; ++m64) {
        const int64_t row0 = static_cast<int64_t>(row_block) * Config::kTileM + m64 * 64;
        if (!PathOf(args, row0).IsStoredByTma()) continue;
        const int64_t row = args.rows.Actual(row0);
        const auto store = [&](const CUtensorMap* map) {
          const StagedM64 staged = staging.Acquire(m64);
          const uint64_t start = call.Start();
          if (Config::kTwoWeights && args.gated) {
            StoreStagedM64<Config::kTileN / 2>(staged, map, row, columns.n0, n);
          } else {
            StoreStagedM64<Config::kSliceN>(staged, map, row, columns.n0, n);
          }
          ptx::BulkCommit();
          staging.Release(m64);
          call.Done(EventKind::kStore, start, row_block, tile.n);
        };
        if (args.sums_data[columns.weight] != nullptr) {
          store(&args.sums[columns.weight]);
          if (Config::kTwoWeights && args.gated) store(&args.sums[1]);
        }
        store(&args.y[columns.weight]);
      }
    }
  };

  struct Exchange : PeerExchange {
    static __device__ void Send(const Args& args, const CallContext& call,
                                const GemmSmem<Config>& smem) {
      GatherSender<Config>::Run(args, call, smem);
    }

    struct Rows {
      __device__ Rows(const Args&, const GemmSmem<Config>&) {}
      // The lanes poll 32 k-panels at a time. Lane 0 waits for the first missing one.
      template <typename Arrived>
      static __device__ void Await(const Args& args, const CallContext& call, int32_t row_block,
                                   Tile tile, const typename Operands::Coords& coords, int,
                                   Arrived&& set_arrived) {
        const KRange k = Operands::KOf(args, tile, coords, 0);
        const int first = k.begin / Config::kTileK;
        const int count = CeilDiv(k.end - k.begin, Config::kTileK);
        if (coords.k_panel_rows == 0) return set_arrived(count);
        const Span s = SpanOf(args, row_block);
        if (s.first >= s.last) return set_arrived(count);
        const int first_src = args.rows.OwnerOf(s.first), last_src = args.rows.OwnerOf(s.last - 1);
        const int lane = threadIdx.x % 32;
        for (int arrived = 0; arrived < count;) {
          const int32_t chunk = args.layout.ChunkOf(first + arrived + lane);
          bool has_arrived = true;
          if (arrived + lane < count) {
            for (int src = first_src; src <= last_src; ++src) {
              has_arrived &=
                  HasArrived(call, ChunkSignal(args, call, args.view.rank, src, row_block, chunk));
            }
          }
          const uint32_t missing = __ballot_sync(0xffffffff, !has_arrived);
          if ((missing & 1) != 0 && lane == 0) {
            for (int src = first_src; src <= last_src; ++src) {
              AwaitPeer(call, ChunkSignal(args, call, args.view.rank, src, row_block, chunk), src,
                        chunk);
            }
          }
          ptx::FenceProxyAsyncGlobal();  // TMA reads the rows
          arrived += missing == 0 ? 32 : Max(1, __ffs(missing) - 1);
          set_arrived(Min(arrived, count));
        }
      }
    };
  };
};

JFLUX_GEMM_KERNEL(AllGatherMatmul);

// Sets the arguments that do not depend on how rows travel.
inline bool SetProductArgs(const AllGatherMatmulParams& p, const AllGatherMatmulOperands& operands,
                           const GemmChoice& choice, int sm_count, const SymmetricView& view,
                           AllGatherMatmulArgs* args, std::string* error) {
  args->view = view;
  args->rows = p.rows;
  args->k = p.k;
  TileGrid grid = GridOf(choice, p.rows.Total(), p.n, sm_count);
  grid.tiles_n = 0;
  args->weights = operands.weights;
  args->activation = operands.activation;
  args->gated = operands.gated;
  args->power_of_two = operands.quantize == Quantizing::kByPowersOfTwo;
  args->out_f32 = p.out_dtype == DType::kF32;
  args->out_f16 = SizeOf(p.dtype) == 1 && p.out_dtype == DType::kF16;
  args->x_scale = operands.x_scale;
  args->gathered_scale = operands.gathered_scale;
  args->no_epilogue = !args->out_f32 && !args->out_f16 && args->rows.outer == 1 && !args->gated &&
                      args->activation == Activation::kNone;
  for (int i = 0; i < args->weights; ++i) {
    const auto& product = operands.products[i];
    const int64_t n = product.n;
    args->y_data[i] = product.y;
    args->y_scale[i] = product.y_scale;
    args->sums_data[i] = product.sums;
    args->bias[i] = product.bias;
    args->w_scale[i] = product.scale;
    args->n[i] = n;
    args->first_tile[i] = grid.tiles_n;
    grid.tiles_n += static_cast<int32_t>(CeilDiv<int64_t>(n, choice.tile_n));
    args->no_epilogue &= product.bias == nullptr && product.sums == nullptr;
    const auto encode_result = [&](CUtensorMap* map, void* data) {
      if (args->out_f32 || data == nullptr) return true;
      return EncodeTensorMap(map, p.out_dtype, data, {p.rows.Total(), n}, {n},
                             {64, StoreColumns(choice)}, error);
    };
    if (!encode_result(&args->y[i], product.y) || !encode_result(&args->sums[i], product.sums) ||
        !EncodeRhsMap(&args->w[i], p.dtype, product.w, p.k, n, p.transpose_rhs, args->gated, choice,
                      error)) {
      return false;
    }
  }
  if (args->gated) {
    grid.tiles_n = static_cast<int32_t>(CeilDiv<int64_t>(args->n[0], choice.tile_n / 2));
  }
  args->order = GatherOrder::Make(grid, view.rank, view.world, p.rows.PerRank(),
                                  kGemmTileM * choice.cluster_m);
  args->num_tiles = grid.tiles_m * grid.tiles_n;
  const int box_rows = BoxRows(p.rows.Total());
  args->a_bytes = box_rows * kBlockBytes;
  return EncodeTensorMap(&args->x, p.dtype, operands.x, {p.rows.PerRank(), p.k}, {p.k},
                         {box_rows, BlockElements(p.dtype)}, error);
}

struct AllGatherMatmulInstances : AllGatherMatmulKernels {
  static constexpr OpFormats kFormats = kAllGatherMatmulFormats;
  static constexpr int kMostSplits = kGatherSplits, kMostSplitsOfBlocks = kGatherSplits;
  // Results go to this GPU's memory, which takes them at once.
  static constexpr bool kMayLendStage = true;
  static constexpr bool kQuantizes = true;
};

// They take as long to compile as the kernels of three other ops together.
JFLUX_INSTANCES_APART(AllGatherMatmulInstances);

}  // namespace jflux

#endif  // JFLUX_OPS_ALL_GATHER_MATMUL_ALL_GATHER_MATMUL_SM90_CUH_
