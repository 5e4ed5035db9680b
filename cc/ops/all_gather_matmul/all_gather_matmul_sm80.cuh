// all_gather_matmul in portable code (gpu/gemm_sm80.cuh): one kernel that sends, waits and
// multiplies, in the workspace and the order of Hopper's.
//
// The first CTAs to ask send before they multiply: a warp takes a chunk from a counter, copies it
// by vectors to a peer's workspace, and stores its signal. The other CTAs start with the local
// rows, straight from x. Tiles with other ranks' rows are read from the workspace as the signals of
// their k-panels arrive.
//
//   writes  sending warps: the peers' workspaces and signals
//   waits   the first warp of a CTA, for the k-panels of its tile; warps that copy to `gathered`,
//           after the CTA's last tile
//   order   stores of a chunk, __syncwarp, release fence and the chunk's signal. A reader acquires
//           the signal at system scope; a barrier of the CTA stands before the copies that read
//   reset   never: core/signal.h; the counters: LeaveCounters (gpu/gemm_call.cuh)
//
// Deadlock: tiles wait for sends only, and sends wait for nothing.
#ifndef JFLUX_OPS_ALL_GATHER_MATMUL_ALL_GATHER_MATMUL_SM80_CUH_
#define JFLUX_OPS_ALL_GATHER_MATMUL_ALL_GATHER_MATMUL_SM80_CUH_

#include "core/k_panel_layout.h"
#include "core/tile_order.h"
#include "gpu/copy_vectors.cuh"
#include "gpu/gemm_epilogue_sm80.cuh"
#include "gpu/gemm_sm80.cuh"
#include "gpu/k_panel_waits.cuh"
#include "ops/all_gather_matmul/all_gather_matmul.h"

namespace jflux {

struct AllGatherMatmulArgs80 {
  DeviceState* state;
  SymmetricView view;
  Rows rows;
  GatherOrder order;
  int64_t k;
  int32_t num_tiles, weights;
  uint32_t signature, op;
  bool gated, out_f32, out_f16;     // out_f16: of operands of 8 bits
  int32_t first_tile[kMaxWeights];  // tile column at which each weight starts
  int64_t n[kMaxWeights];
  WorkspaceLayout workspace;
  KPanelLayout layout;
  int32_t send_group;  // row blocks of a raster group (SendOrder)
  uint32_t senders;    // CTAs that may send
  const void* x;
  const void* w[kMaxWeights];
  void* y[kMaxWeights];
  void* sums[kMaxWeights];         // or null
  const float* bias[kMaxWeights];  // or null
  Activation activation;
  void* gathered;  // or null
  // Of operands of 8 bits: of local rows, and of all columns. Null: they have none.
  const float* x_scale;
  const float* w_scale[kMaxWeights];
  float* gathered_scale;  // of `gathered`, if x has a scale
};

// kGathers: else there is one rank, and no workspace.
template <typename Config_, bool kGathers = true>
struct AllGatherMatmulSm80 {
  using Config = Config_;
  using Args = AllGatherMatmulArgs80;
  using T = typename Config::T;
  using Schedule = OrderedTiles80<Counted>;

  // Virtual rows [first, last) of a row block.
  struct Span {
    int64_t first, last;
  };
  static __device__ Span SpanOf(const Args& args, int32_t row_block) {
    const int64_t first = static_cast<int64_t>(row_block) * Config::kTileM;
    return Span{first, Min(first + Config::kTileM, args.rows.Total())};
  }
  static __device__ bool IsLocal(const Args& args, Span s) {
    if constexpr (!kGathers) return true;
    const int64_t first = args.view.rank * args.rows.PerRank();
    return s.first >= first && s.last <= first + args.rows.PerRank();
  }
  // The weight that a tile's columns belong to, and the first of them there.
  struct Columns {
    int weight;
    int64_t n0;
  };
  static __device__ Columns ColumnsOf(const Args& args, Tile tile) {
    if (args.gated) return Columns{0, static_cast<int64_t>(tile.n) * (Config::kTileN / 2)};
    int i = 0;
    while (i + 1 < args.weights && tile.n >= args.first_tile[i + 1]) ++i;
    return Columns{i, static_cast<int64_t>(tile.n - args.first_tile[i]) * Config::kTileN};
  }

  static __device__ Signal* SignalOf(const Args& args, const CallContext& call, int rank, int src,
                                     int32_t row_block, int32_t chunk) {
    return args.view.template At<Signal>(rank, args.workspace.SignalOffset(call.epoch) +
                                                   args.layout.SignalOffset(src, row_block, chunk));
  }
  // Row `row` of a k-panel of a row block, in the workspace of `rank`.
  static __device__ char* PanelRow(const Args& args, const CallContext& call, int rank,
                                   int32_t row_block, int32_t k_panel, int32_t row) {
    return args.view.At(rank, args.workspace.DataOffset(call.epoch) +
                                  (args.layout.RowOf(row_block, k_panel) + row) * kBlockBytes);
  }
  // The scales of a row block's rows, there.
  static __device__ float* PanelScales(const Args& args, const CallContext& call, int rank,
                                       int32_t row_block) {
    return args.view.template At<float>(
        rank, args.workspace.DataOffset(call.epoch) + args.layout.ScaleOffset(row_block, 0));
  }

  struct Operands {
    static constexpr int kMostTerms = 1;
    static __device__ int Terms(const Args&) { return 1; }
    static __device__ int64_t KBytes(const Args& args, Tile, int) { return args.k * sizeof(T); }
    static __device__ RowsToCopy<Config> LhsOf(const Args& args, const CallContext& call, Tile tile,
                                               int) {
      RowsToCopy<Config> a;
      const Span s = SpanOf(args, tile.m);
      const bool is_local = IsLocal(args, s);
      a.skip = is_local ? 0 : (args.layout.k_panel_rows - 1) * kBlockBytes;
      const char* x = static_cast<const char*>(args.x) +
                      (s.first - args.view.rank * args.rows.PerRank()) * args.k * sizeof(T);
      const char* panel = PanelRow(args, call, args.view.rank, tile.m, 0, 0);
#pragma unroll
      for (int i = 0; i < a.kRows; ++i) {
        const int64_t r = Min<int64_t>(a.RowOf(i), s.last - 1 - s.first);
        a.row[i] =
            is_local ? x + r * args.k * static_cast<int64_t>(sizeof(T)) : panel + r * kBlockBytes;
      }
      return a;
    }
    static __device__ Rhs80 RhsOf(const Args& args, Tile tile, int) {
      const Columns c = ColumnsOf(args, tile);
      return Rhs80{args.w[c.weight], args.gated ? args.w[1] : nullptr, c.n0, args.n[c.weight]};
    }
  };

  struct Epilogue {
    // Columns c on of virtual row `row` of an array as y.
    static __device__ void Store(const Args& args, const Columns8& columns, void* to, int64_t row,
                                 int64_t c, int64_t n) {
      const int64_t at = args.rows.Actual(row) * n;
      WithResult<Config>(args.out_f32, args.out_f16,
                         [&](auto u) { columns.Store(static_cast<decltype(u)*>(to) + at, c, n); });
    }
    // The scales of a tile's rows: of x's own, or those that have come with the rows.
    static __device__ const float* RowScales(const Args& args, const CallContext& call, Tile tile) {
      const Span s = SpanOf(args, tile.m);
      return IsLocal(args, s) ? args.x_scale + (s.first - args.view.rank * args.rows.PerRank())
                              : PanelScales(args, call, args.view.rank, tile.m);
    }
    // Sums of a row of the tile, with their scales if they have any.
    static __device__ void Scale(const Args& args, Columns8& columns, const float* of_rows, int row,
                                 int weight, int64_t c) {
      if constexpr (Config::kNarrow) {
        // A line of L1 may be older than what has arrived.
        if (of_rows != nullptr) columns.Scale(__ldcg(of_rows + row), args.w_scale[weight], c);
      }
    }

    static __device__ __forceinline__ void Finish(const Args& args, const CallContext& call,
                                                  uint32_t smem, Sums80<Config>& sums, Tile tile) {
      using Rows = StagedRows<Config>;
      const Columns columns = ColumnsOf(args, tile);
      const int i = columns.weight;
      const int64_t n = args.n[i], row0 = static_cast<int64_t>(tile.m) * Config::kTileM;
      const float* scales = nullptr;
      if constexpr (Config::kNarrow) {
        ToFloats<Config>(sums);
        if (args.x_scale != nullptr) scales = RowScales(args, call, tile);
      }
      ForStagedRows<Config>(sums, smem, [&](const Rows& rows) {
        if (!args.gated) {
          return rows.template ForEach<Rows::kGroups>([&](int r, int group) {
            const int64_t row = row0 + rows.first_row + r;
            const int64_t c = columns.n0 + rows.first_column + group * Columns8::kCount;
            if (row >= args.rows.Total() || c >= n) return;
            Columns8 y = rows.Get(r, group);
            Scale(args, y, scales, rows.first_row + r, i, c);
            y.AddBias(args.bias[i], c, n);
            if (args.sums[i] != nullptr) Store(args, y, args.sums[i], row, c, n);
            y.Activate(args.activation);
            Store(args, y, args.y[i], row, c, n);
          });
        }
        // A warp's first columns are of w_0, and as many others of w_1 (Rhs80).
        constexpr int kHalf = Rows::kGroups / 2;
        rows.template ForEach<kHalf>([&](int r, int group) {
          const int64_t row = row0 + rows.first_row + r;
          const int64_t c = columns.n0 + rows.first_column / 2 + group * Columns8::kCount;
          if (row >= args.rows.Total() || c >= n) return;
          Columns8 y = rows.Get(r, group), gate = rows.Get(r, group + kHalf);
          Scale(args, y, scales, rows.first_row + r, 0, c);
          Scale(args, gate, scales, rows.first_row + r, 1, c);
          y.AddBias(args.bias[0], c, n);
          gate.AddBias(args.bias[1], c, n);
          if (args.sums[0] != nullptr) {
            Store(args, y, args.sums[0], row, c, n);
            Store(args, gate, args.sums[1], row, c, n);
          }
          y.Activate(args.activation);
          y.Each([&](float& x, int e) { x *= gate.v[e]; });
          Store(args, y, args.y[0], row, c, n);
        });
      });
    }
  };

  struct Exchange : PeerExchange80 {
    // The first warp waits for k-panels; its lanes poll 32 of them at a time.
    struct Rows {
      const Args& args;
      const CallContext& call;
      int32_t row_block;
      int first_src, last_src;
      int arrived;  // k-panels that have; local rows are there

      __device__ Rows(const Args& a, const CallContext& c, Tile tile)
          : args(a), call(c), row_block(tile.m), arrived(0) {
        const Span s = SpanOf(args, row_block);
        first_src = args.rows.OwnerOf(s.first), last_src = args.rows.OwnerOf(s.last - 1);
        if (IsLocal(args, s)) arrived = args.layout.k_panels;
      }
      // Returns when k-block b has arrived.
      __device__ __forceinline__ void Await(int b) {
        const int panel = b * Config::kRowBytes / kBlockBytes;
        if (panel >= arrived) arrived = ArrivedAfter(*this, panel);
      }
      // Out of line, for the main loop's sake: how many k-panels have arrived when `panel` has.
      static __device__ __noinline__ int ArrivedAfter(const Rows& rows, int panel) {
        const auto& [args, call, row_block, first_src, last_src, before] = rows;
        int arrived = before;
        const int lane = threadIdx.x % 32, count = args.layout.k_panels;
        const uint64_t start = call.Start();
        while (panel >= arrived) {
          arrived = LookAtPanels(
              arrived, count,
              [&](int i) {
                const int32_t chunk = args.layout.ChunkOf(i);
                bool has_arrived = true;
                for (int src = first_src; src <= last_src; ++src) {
                  has_arrived &=
                      HasArrived(call, SignalOf(args, call, args.view.rank, src, row_block, chunk));
                }
                return has_arrived;
              },
              [&](int i) {
                const int32_t chunk = args.layout.ChunkOf(i);
                for (int src = first_src; src <= last_src; ++src) {
                  AwaitPeer(call, SignalOf(args, call, args.view.rank, src, row_block, chunk), src,
                            chunk);
                }
              });
        }
        if (lane == 0) call.Done(EventKind::kWaitRows, start, row_block, panel);
        return arrived;
      }
    };

    // A chunk of `src`'s rows of a row block, and where it begins in its shard.
    struct Chunk {
      int32_t row_block, chunk;
      KPanelLayout::RowRange range;
      int64_t row;
    };
    static __device__ Chunk ChunkOf(const Args& args, int src, int32_t row_block, int32_t chunk) {
      const auto range = args.layout.RangeOf(src, row_block);
      return Chunk{row_block, chunk, range,
                   static_cast<int64_t>(row_block) * KPanelLayout::kPanelRows + range.begin -
                       src * args.rows.PerRank()};
    }
    // Calls copy(k-panel, row of the range, vector of the panel's row) for a chunk's vectors, a few
    // at a time: from(..) -> address, or null for zeros; to(..) -> address, or null.
    template <typename From, typename To>
    static __device__ void CopyChunk(const Args& args, const Chunk& c, From&& from, To&& to) {
      constexpr int kVectors = kBlockBytes / kVectorBytes;
      const int rows = c.range.end - c.range.begin;
      const int first = c.chunk * args.layout.chunk_k_panels;
      const int panels = Min(args.layout.chunk_k_panels, args.layout.k_panels - first);
      const auto at = [&](auto&& f, int e) {
        const int row = e / kVectors;
        return f(first + row / rows, row % rows, e % kVectors);
      };
      CopyVectors(
          panels * rows * kVectors, [&](int e) { return at(from, e); },
          [&](int e) { return at(to, e); });
    }
    // Of a row in x or `gathered`; null past its end.
    static __device__ int64_t ByteOf(int32_t k_panel, int vector) {
      return static_cast<int64_t>(k_panel) * kBlockBytes + vector * kVectorBytes;
    }
    static __device__ const char* InX(const Args& args, int64_t row, int32_t k_panel, int vector) {
      const int64_t at = ByteOf(k_panel, vector), row_bytes = args.k * sizeof(T);
      return at < row_bytes ? static_cast<const char*>(args.x) + row * row_bytes + at : nullptr;
    }

    // Calls f(row of the range) for this lane's rows of a chunk that have scales: those of whole
    // rows are with the first k-panel.
    template <typename F>
    static __device__ __forceinline__ void ForScales(const Args& args, const Chunk& c, F&& f) {
      if constexpr (Config::kNarrow) {
        if (args.x_scale == nullptr || c.chunk != 0) return;
        for (int r = threadIdx.x % 32; r < c.range.end - c.range.begin; r += 32) f(r);
      }
    }

    static __device__ void Send(const Args& args, const CallContext& call, uint32_t) {
      if (!CtaMaySend(args)) return;
      const SendOrder order(args.layout, args.view.rank, args.send_group);
      for (int i = NextTransfer(args); i < order.Count(); i = NextTransfer(args)) {
        const ChunkSend send = order.At(i);
        const int peer = SendPeer(args.view.rank, send.step, args.view.world);
        const Chunk c = ChunkOf(args, args.view.rank, send.row_block, send.chunk);
        if (c.range.end <= c.range.begin) continue;
        const uint64_t start = call.Start();
        CopyChunk(
            args, c,
            [&](int32_t k_panel, int row, int v) { return InX(args, c.row + row, k_panel, v); },
            [&](int32_t k_panel, int row, int v) {
              return PanelRow(args, call, peer, c.row_block, k_panel, c.range.begin + row) +
                     v * kVectorBytes;
            });
        ForScales(args, c, [&](int r) {
          PanelScales(args, call, peer, c.row_block)[c.range.begin + r] =
              __ldg(args.x_scale + c.row + r);
        });
        SignalStored(SignalOf(args, call, peer, args.view.rank, c.row_block, c.chunk), call.signal);
        if (threadIdx.x % 32 == 0) call.Done(EventKind::kSend, start, peer, c.chunk);
      }
    }

    // Copies all rows to `gathered`, local ones first and then in the order in which they arrive.
    static __device__ void Finally(const Args& args, const CallContext& call, uint32_t) {
      if (args.gathered == nullptr) return;
      const int chunks = args.layout.Chunks(), each = args.layout.rank_row_blocks * chunks;
      for (;;) {
        const int i = __shfl_sync(0xffffffff, threadIdx.x % 32 == 0 ? TakeCopy(args) : 0, 0);
        if (i >= args.view.world * each) return;
        const int src = (args.view.rank + i / each) % args.view.world;
        if (i % each / chunks >= args.layout.RowBlocksOf(src)) continue;
        const Chunk c =
            ChunkOf(args, src, args.layout.FirstRowBlock(src) + i % each / chunks, i % chunks);
        const bool is_local = src == args.view.rank;
        if (!is_local && threadIdx.x % 32 == 0) {
          AwaitPeer(call, SignalOf(args, call, args.view.rank, src, c.row_block, c.chunk), src,
                    c.chunk);
        }
        __syncwarp();
        CopyChunk(
            args, c,
            [&](int32_t k_panel, int row, int v) -> const char* {
              if (is_local) return InX(args, c.row + row, k_panel, v);
              return PanelRow(args, call, args.view.rank, c.row_block, k_panel,
                              c.range.begin + row) +
                     v * kVectorBytes;
            },
            [&](int32_t k_panel, int row, int v) -> char* {
              const int64_t at = ByteOf(k_panel, v), row_bytes = args.k * sizeof(T);
              const int64_t to = args.rows.Actual(src * args.rows.PerRank() + c.row + row);
              return at < row_bytes ? static_cast<char*>(args.gathered) + to * row_bytes + at
                                    : nullptr;
            });
        ForScales(args, c, [&](int r) {
          const float* from =
              is_local ? args.x_scale + c.row
                       : PanelScales(args, call, args.view.rank, c.row_block) + c.range.begin;
          args.gathered_scale[args.rows.Actual(src * args.rows.PerRank() + c.row + r)] =
              __ldcg(from + r);
        });
      }
    }
  };
};

JFLUX_GEMM_KERNEL_80(AllGatherMatmul);

// Sets the arguments that do not depend on how rows travel.
inline void SetProductArgs80(const AllGatherMatmulParams& p,
                             const AllGatherMatmulOperands& operands, const GemmChoice& choice,
                             int sm_count, const SymmetricView& view, AllGatherMatmulArgs80* args) {
  args->view = view;
  args->rows = p.rows;
  args->k = p.k;
  args->weights = operands.weights;
  args->gated = operands.gated;
  args->out_f32 = p.out_dtype == DType::kF32;
  args->out_f16 = SizeOf(p.dtype) == 1 && p.out_dtype == DType::kF16;
  args->activation = operands.activation;
  args->x = operands.x;
  args->gathered = operands.gathered;
  args->x_scale = operands.x_scale;
  args->gathered_scale = operands.gathered_scale;
  TileGrid grid = GridOf(choice, p.rows.Total(), p.n, sm_count);
  grid.tiles_n = 0;
  for (int i = 0; i < args->weights; ++i) {
    const auto& product = operands.products[i];
    args->w[i] = product.w;
    args->y[i] = product.y;
    args->sums[i] = product.sums;
    args->bias[i] = product.bias;
    args->w_scale[i] = product.scale;
    args->n[i] = product.n;
    args->first_tile[i] = grid.tiles_n;
    grid.tiles_n += static_cast<int32_t>(CeilDiv<int64_t>(product.n, choice.tile_n));
  }
  if (args->gated) {  // half of a tile's columns belong to each weight
    grid.tiles_n = static_cast<int32_t>(CeilDiv<int64_t>(args->n[0], choice.tile_n / 2));
  }
  args->order = GatherOrder::Make(grid, view.rank, view.world, p.rows.PerRank(), kGemmTileM);
  args->num_tiles = grid.tiles_m * grid.tiles_n;
}

}  // namespace jflux

#endif  // JFLUX_OPS_ALL_GATHER_MATMUL_ALL_GATHER_MATMUL_SM80_CUH_
