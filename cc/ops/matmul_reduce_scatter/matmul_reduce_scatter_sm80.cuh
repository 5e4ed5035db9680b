// matmul_reduce_scatter in portable code (gpu/gemm_sm80.cuh): one kernel that multiplies, sends
// partial tiles and sums, in the order of Hopper's.
//
// Threads store their sums of other ranks' rows straight to the owners' workspaces, in fragment
// order (gpu/gemm_epilogue_sm80.cuh). Local tiles come last: by then the peers' partial tiles have
// arrived. They are added in float32, in rank order after the own one, and y is written.
//
// With a wire (kWire) partial tiles travel as rows of values and scales (gpu/wire_rows_sm80.cuh),
// by way of shared memory, and are added as y is written.
//
//   writes  all threads: the owners' workspaces; one thread: a signal per tile and owner
//   waits   all warps of a CTA, for the peers' partial tiles of its local tile
//   order   stores, a barrier of the CTA, release fence, signals
//   reset   never: core/signal.h
//
// Deadlock: core/tile_order.h. A tile is sent before its CTA waits for the same tile of peers.
#ifndef JFLUX_OPS_MATMUL_REDUCE_SCATTER_MATMUL_REDUCE_SCATTER_SM80_CUH_
#define JFLUX_OPS_MATMUL_REDUCE_SCATTER_MATMUL_REDUCE_SCATTER_SM80_CUH_

#include "core/tile_order.h"
#include "gpu/gemm_epilogue_sm80.cuh"
#include "gpu/gemm_sm80.cuh"
#include "gpu/wire_rows_sm80.cuh"
#include "ops/matmul_reduce_scatter/matmul_reduce_scatter.h"

namespace jflux {

struct MatmulReduceScatterArgs80 {
  DeviceState* state;
  SymmetricView view;
  Rows rows;
  ScatterOrder order;
  int32_t num_tiles, terms;
  uint32_t signature, op;
  bool out_f32, out_f16;  // out_f16: of operands of 8 bits
  int64_t k[kMaxWeights];
  int64_t n;
  WorkspaceLayout workspace;
  ReduceScatterLayout layout;
  const void* x[kMaxWeights];
  const void* w[kMaxWeights];
  const float* bias;     // or null
  const void* residual;  // or null
  void* y;
  // Of operands of 8 bits, of one term: of x's rows and w's columns. Null: they have none.
  const float* x_scale;
  const float* w_scale;
  DType wire;  // with kWire
};

template <typename Config_, bool kWire = false>
struct MatmulReduceScatterSm80 {
  using Config = Config_;
  using Args = MatmulReduceScatterArgs80;
  using T = typename Config::T;
  using Schedule = OrderedTiles80<Counted>;

  struct Operands {
    // One of 8 bits, and with a wire: registers for more would be spilled in the main loop.
    static constexpr int kMostTerms = Config::kNarrow || kWire ? 1 : kMaxWeights;
    static __device__ int Terms(const Args& args) { return args.terms; }
    static __device__ int64_t KBytes(const Args& args, Tile, int term) {
      return args.k[term] * sizeof(T);
    }
    static __device__ RowsToCopy<Config> LhsOf(const Args& args, const CallContext&, Tile tile,
                                               int term) {
      RowsToCopy<Config> a;
      a.skip = 0;
#pragma unroll
      for (int i = 0; i < a.kRows; ++i) {
        const int64_t row = static_cast<int64_t>(tile.m) * Config::kTileM + a.RowOf(i);
        a.row[i] = static_cast<const char*>(args.x[term]) +
                   args.rows.Actual(Min(row, args.rows.Total() - 1)) * KBytes(args, tile, term);
      }
      return a;
    }
    static __device__ Rhs80 RhsOf(const Args& args, Tile tile, int term) {
      return Rhs80{args.w[term], nullptr, static_cast<int64_t>(tile.n) * Config::kTileN, args.n};
    }
  };

  // The ranks that own some of the rows [first, first + rows) of all; none past the last row.
  struct Owners {
    int first, last;
  };
  static __device__ Owners OwnersOf(const Args& args, int64_t first, int rows) {
    const int64_t end = Min(first + rows, args.rows.Total());
    if (first >= end) return Owners{0, -1};
    return Owners{args.rows.OwnerOf(first), args.rows.OwnerOf(end - 1)};
  }
  static __device__ Signal* SignalOf(const Args& args, const CallContext& call, int dst, int src,
                                     Tile tile) {
    return args.view.template At<Signal>(
        dst, args.workspace.SignalOffset(call.epoch) +
                 args.layout.SignalOffset(src, args.layout.SlotOf(dst, tile), 0));
  }
  static __device__ char* SlotOf(const Args& args, const CallContext& call, int dst, int src,
                                 Tile tile) {
    return args.view.At(dst, args.workspace.DataOffset(call.epoch) +
                                 args.layout.SlotOffset(src, args.layout.SlotOf(dst, tile)));
  }

  struct Epilogue {
    // Sends a tile's sums of other ranks' rows to their owners by send(), which all threads call,
    // and waits for the peers' sums of local rows. False: the tile has none.
    template <typename Send>
    static __device__ __forceinline__ bool Meet(const Args& args, const CallContext& call,
                                                Tile tile, Send&& send) {
      const int rank = args.view.rank;
      const int64_t row0 = static_cast<int64_t>(tile.m) * Config::kTileM;
      const Owners owners = OwnersOf(args, row0, Config::kTileM);
      const bool sends = owners.first != rank || owners.last != rank;
      const bool receives = owners.first <= rank && rank <= owners.last;
      if (sends) {
        const uint64_t start = call.Start();
        send();
        __syncthreads();
        if (threadIdx.x == 0) {
          FenceRelease();
          for (int dst = owners.first; dst <= owners.last; ++dst) {
            if (dst != rank) StoreRelaxed(SignalOf(args, call, dst, rank, tile), call.signal);
          }
          call.Done(EventKind::kSend, start, owners.first, tile.m);
        }
      }
      if (!receives) return false;
      const uint64_t start = call.Start();
      if (threadIdx.x < 32) {  // a lane for each peer
        const int src = static_cast<int>(threadIdx.x);
        if (src < args.view.world && src != rank) {
          AwaitPeer(call, SignalOf(args, call, rank, src, tile), src,
                    args.layout.SlotOf(rank, tile));
        }
      }
      __syncthreads();
      if (threadIdx.x == 0) call.Done(EventKind::kWaitPartials, start, tile.m, tile.n);
      return true;
    }

    // Sends a tile's sums of other ranks' rows, as numbers of type U, and adds the peers' sums of
    // local rows. False: the tile has none.
    template <typename U>
    static __device__ __forceinline__ bool SumOverRanks(const Args& args, const CallContext& call,
                                                        Sums80<Config>& sums, Tile tile) {
      using F = Fragments80Of<U, Config>;
      const int rank = args.view.rank;
      const int64_t warp_row0 =
          static_cast<int64_t>(tile.m) * Config::kTileM + WarpPlace<Config>().row;
      const bool receives = Meet(args, call, tile, [&] {
#pragma unroll
        for (int i = 0; i < Config::kM16Blocks; ++i) {
          const Owners of = OwnersOf(args, warp_row0 + 16 * i, 16);
          for (int dst = of.first; dst <= of.last; ++dst) {
            if (dst != rank) F::Store(sums, i, SlotOf(args, call, dst, rank, tile));
          }
        }
      });
      if (!receives) return false;
#pragma unroll 1
      for (int src = 0; src < args.view.world; ++src) {
        if (src == rank) continue;
        const char* slot = SlotOf(args, call, rank, src, tile);
#pragma unroll
        for (int i = 0; i < Config::kM16Blocks; ++i) {
          // Rows that other ranks own get arbitrary values, which are not stored.
          const Owners of = OwnersOf(args, warp_row0 + 16 * i, 16);
          if (of.first <= rank && rank <= of.last) F::Add(sums, i, slot);
        }
      }
      return true;
    }

    // With a wire: sends a tile's sums of other ranks' rows, and waits for those of local rows.
    // False: the tile has none.
    static __device__ __forceinline__ bool MeetInWire(const Args& args, const CallContext& call,
                                                      uint32_t smem, const Sums80<Config>& sums,
                                                      Tile tile) {
      const int64_t row0 = static_cast<int64_t>(tile.m) * Config::kTileM;
      return Meet(args, call, tile, [&] {
        const RowMagnitudes<Config> magnitudes(sums, smem);
        ForStagedRows<Config>(sums, smem, [&](const auto& rows) {
          rows.template ForEach<StagedRows<Config>::kGroups>([&](int r, int group) {
            const WireColumns<Config> at{rows.first_row + r,
                                         rows.first_column + group * Columns8::kCount};
            if (row0 + at.row >= args.rows.Total()) return;
            const int dst = args.rows.OwnerOf(row0 + at.row);
            if (dst == args.view.rank) return;
            char* slot = SlotOf(args, call, dst, args.view.rank, tile);
            const float scale =
                at.Store(rows.Get(r, group), magnitudes.Of(at.row), args.wire, slot);
            if (at.column == 0) {
              *reinterpret_cast<float*>(slot + at.ScaleOffset(at.row)) = scale;
            }
          });
        });
      });
    }
    // Adds what peers have sent of eight columns of a local row.
    static __device__ __forceinline__ void AddQuantized(const Args& args, const CallContext& call,
                                                        Tile tile, const WireColumns<Config>& at,
                                                        Columns8& y) {
      constexpr int kAtOnce = 4;
      const int rank = args.view.rank, world = args.view.world;
#pragma unroll 1
      for (int first = 0; first < world; first += kAtOnce) {
        typename WireColumns<Config>::Vector came[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const int src = first + i;
          if (src >= world || src == rank) continue;
          came[i] = at.Load(SlotOf(args, call, rank, src, tile));
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const int src = first + i;
          if (src >= world || src == rank) continue;
          WireColumns<Config>::Add(came[i], args.wire, y);
        }
      }
    }

    // Adds the bias and the residual to a tile's sums, and calls
    // f(results, row of the tile, row of y, first column) for those of y's rows 0 .. rows - 1.
    // `row0`: the tile's first row as a row of y. add(sums, row, column of the tile) comes first.
    template <typename U, typename F>
    static __device__ __forceinline__ void ForResults(const Args& args, uint32_t smem,
                                                      const Sums80<Config>& sums, Tile tile,
                                                      int64_t row0, int64_t rows_of_y, F&& f) {
      ForResults<U>(args, smem, sums, tile, row0, rows_of_y, [](Columns8&, int, int) {}, f);
    }
    template <typename U, typename Add, typename F>
    static __device__ __forceinline__ void ForResults(const Args& args, uint32_t smem,
                                                      const Sums80<Config>& sums, Tile tile,
                                                      int64_t row0, int64_t rows_of_y, Add&& add,
                                                      F&& f) {
      using Rows = StagedRows<Config>;
      const int64_t n0 = static_cast<int64_t>(tile.n) * Config::kTileN;
      ForStagedRows<Config>(sums, smem, [&](const Rows& rows) {
        rows.template ForEach<Rows::kGroups>([&](int r, int group) {
          const int64_t row = row0 + rows.first_row + r;
          const int64_t c = n0 + rows.first_column + group * Columns8::kCount;
          if (row < 0 || row >= rows_of_y || c >= args.n) return;
          Columns8 y = rows.Get(r, group);
          add(y, rows.first_row + r, rows.first_column + group * Columns8::kCount);
          y.AddBias(args.bias, c, args.n);
          if (args.residual != nullptr) {
            y.Add(static_cast<const U*>(args.residual) + row * args.n, c, args.n);
          }
          f(y, rows.first_row + r, row, c);
        });
      });
    }
    // A tile's first row as a row of y.
    static __device__ int64_t LocalRow(const Args& args, Tile tile) {
      return static_cast<int64_t>(tile.m) * Config::kTileM - args.view.rank * args.rows.PerRank();
    }

    // U: of y, and without a wire of what travels.
    template <typename U>
    static __device__ __forceinline__ void FinishAs(const Args& args, const CallContext& call,
                                                    uint32_t smem, Sums80<Config>& sums,
                                                    Tile tile) {
      if constexpr (!kWire) {
        if (!SumOverRanks<U>(args, call, sums, tile)) return;
      }
      ForResults<U>(
          args, smem, sums, tile, LocalRow(args, tile), args.rows.PerRank(),
          [&](Columns8& y, int r, int column) {
            if constexpr (kWire) AddQuantized(args, call, tile, {r, column}, y);
          },
          [&](const Columns8& y, int, int64_t row, int64_t c) {
            y.Store(static_cast<U*>(args.y) + row * args.n, c, args.n);
          });
    }

    static __device__ __forceinline__ void Finish(const Args& args, const CallContext& call,
                                                  uint32_t smem, Sums80<Config>& sums, Tile tile) {
      if constexpr (Config::kNarrow) {
        const int64_t row0 = static_cast<int64_t>(tile.m) * Config::kTileM;
        // Always: without a branch ptxas spills registers in the main loop.
        if (args.terms == 1) ToFloats<Config>(sums);
        if (args.w_scale != nullptr) {
          ScaleSums<Config>(sums, args.w_scale, static_cast<int64_t>(tile.n) * Config::kTileN,
                            args.n, [&](int r) {
                              const int64_t row = Min(row0 + r, args.rows.Total() - 1);
                              return __ldg(args.x_scale + args.rows.Actual(row));
                            });
        }
      }
      if constexpr (kWire) {
        if (!MeetInWire(args, call, smem, sums, tile)) return;
      }
      WithResult<Config>(args.out_f32, args.out_f16,
                         [&](auto u) { FinishAs<decltype(u)>(args, call, smem, sums, tile); });
    }
  };

  using Exchange = PeerExchange80;
};

template <typename Config>
using MatmulReduceScatterWireSm80 = MatmulReduceScatterSm80<Config, /*kWire=*/true>;
using MatmulReduceScatterWireArgs80 = MatmulReduceScatterArgs80;

JFLUX_GEMM_KERNEL_80(MatmulReduceScatter);
JFLUX_GEMM_KERNEL_80(MatmulReduceScatterWire);

// The arguments that follow from a call.
inline MatmulReduceScatterArgs80 ScatterArgs80(const MatmulReduceScatterParams& p,
                                               const MatmulReduceScatterOperands& operands,
                                               const GemmChoice& choice, const CudaDevice& device,
                                               const SymmetricView& view) {
  MatmulReduceScatterArgs80 args{};
  args.state = device.state;
  args.view = view;
  args.rows = p.rows;
  args.layout = CudaLayoutOf(p, choice);
  args.workspace = args.layout.Workspace();
  const TileGrid grid = GridOf(choice, p.rows.Total(), p.n, device.sm_count);
  args.order = ScatterOrder::Make(grid, view.rank, p.rows.world, p.rows.PerRank(), kGemmTileM);
  args.num_tiles = grid.tiles_m * grid.tiles_n;
  args.terms = operands.terms;
  for (int i = 0; i < args.terms; ++i) {
    args.x[i] = operands.products[i].x;
    args.w[i] = operands.products[i].w;
    args.k[i] = operands.products[i].k;
  }
  args.n = p.n;
  args.out_f32 = p.out_dtype == DType::kF32;
  args.out_f16 = SizeOf(p.dtype) == 1 && p.out_dtype == DType::kF16;
  args.x_scale = operands.x_scale;
  args.w_scale = operands.w_scale;
  args.bias = operands.bias;
  args.residual = operands.residual;
  args.y = operands.y;
  if (p.wire) args.wire = *p.wire;
  return args;
}

}  // namespace jflux

#endif  // JFLUX_OPS_MATMUL_REDUCE_SCATTER_MATMUL_REDUCE_SCATTER_SM80_CUH_
