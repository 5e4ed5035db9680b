// all_to_all_matmul in portable code (gpu/gemm_sm80.cuh): one kernel that sends, waits and
// multiplies, in the workspace and the order of Hopper's.
//
// The first CTAs to ask send before they multiply: a warp takes a chunk of a peer's shard from a
// counter, copies it by vectors to the peer's workspace, and stores its signal. The other CTAs
// start with the local shard, straight from x. Peers' shards are read from the workspace as the
// signals of their k-panels arrive. Where columns are concatenated, each shard is a term of a
// tile's sum, the local one first; a term ends with zeros, up to a whole k-block.
//
//   writes  sending warps: the peers' workspaces and signals
//   waits   the first warp of a CTA, for the k-panels of its tile; warps that copy to `gathered`,
//           after the CTA's last tile
//   order   stores of a chunk, __syncwarp, release fence and the chunk's signal. A reader acquires
//           the signal at system scope; a barrier of the CTA stands before the copies that read
//   reset   never: core/signal.h; the counters: LeaveCounters (gpu/gemm_call.cuh)
//
// Deadlock: tiles wait for sends only, and sends wait for nothing.
#ifndef JFLUX_OPS_ALL_TO_ALL_MATMUL_ALL_TO_ALL_MATMUL_SM80_CUH_
#define JFLUX_OPS_ALL_TO_ALL_MATMUL_ALL_TO_ALL_MATMUL_SM80_CUH_

#include "core/shard_panels.h"
#include "gpu/copy_vectors.cuh"
#include "gpu/gemm_epilogue_sm80.cuh"
#include "gpu/gemm_sm80.cuh"
#include "gpu/k_panel_waits.cuh"
#include "ops/all_to_all_matmul/all_to_all_matmul.h"

namespace jflux {

struct AllToAllMatmulArgs80 {
  DeviceState* state;
  SymmetricView view;
  AllToAllMatmulParams p;
  ShardTileOrder order;
  int32_t num_tiles;
  int32_t terms;  // the ranks' shards if columns are concatenated, else 1
  uint32_t signature, op;
  uint32_t senders;  // CTAs that may send
  WorkspaceLayout workspace;
  ShardPanels panels;
  ShardSendOrder send_order;
  const void* x;
  const void* w;
  void* y;
  void* gathered;  // or null
};

template <typename Config_>
struct AllToAllMatmulSm80 {
  using Config = Config_;
  using Args = AllToAllMatmulArgs80;
  using T = typename Config::T;  // of y too
  using Schedule = OrderedTiles80<Counted>;

  // The signal, on `rank`, of a chunk of a row block of the shard that it receives in `step`; and
  // row `row` of a k-panel of a row block of that shard.
  static __device__ Signal* SignalOf(const Args& args, const CallContext& call, int rank, int step,
                                     int32_t row_block, int32_t chunk) {
    return args.view.template At<Signal>(
        rank,
        args.workspace.SignalOffset(call.epoch) + args.panels.SignalOffset(step, row_block, chunk));
  }
  static __device__ char* PanelRow(const Args& args, const CallContext& call, int rank, int step,
                                   int32_t row_block, int32_t k_panel, int32_t row) {
    return args.view.At(rank,
                        args.workspace.DataOffset(call.epoch) +
                            (args.panels.RowOf(step, row_block, k_panel) + row) * kBlockBytes);
  }
  static __device__ int SourceRank(const Args& args, int step) {
    return (args.view.rank + step) % args.view.world;
  }

  // The rows of a tile: the step of their shard, 0 if columns are concatenated, and the row block
  // in it.
  struct Place {
    int32_t step, row_block;
  };
  static __device__ Place PlaceOf(const Args& args, Tile tile) {
    const int32_t step = tile.m / args.order.tiles_m;
    return Place{step, tile.m - step * args.order.tiles_m};
  }
  static __device__ int64_t KBytesOf(const Args& args) { return args.p.k * sizeof(T); }

  struct Operands {
    static constexpr int kMostTerms = kMaxRanks;
    static __device__ int Terms(const Args& args) { return args.terms; }
    static __device__ int64_t KBytes(const Args& args, Tile, int) { return KBytesOf(args); }
    static __device__ RowsToCopy<Config> LhsOf(const Args& args, const CallContext& call, Tile tile,
                                               int term) {
      RowsToCopy<Config> a;
      const Place place = PlaceOf(args, tile);
      const int rank = args.view.rank, step = place.step + term;
      const int64_t row0 = static_cast<int64_t>(place.row_block) * Config::kTileM;
      a.skip = step == 0 ? 0 : (args.panels.shard.k_panel_rows - 1) * kBlockBytes;
      const char* panel =
          step == 0 ? nullptr : PanelRow(args, call, rank, step, place.row_block, 0, 0);
#pragma unroll
      for (int i = 0; i < a.kRows; ++i) {
        const int64_t r = Min<int64_t>(a.RowOf(i), args.p.rows.PerRank() - 1 - row0);
        a.row[i] = step == 0 ? static_cast<const char*>(args.x) +
                                   args.p.OffsetInX(rank, row0 + r) * int64_t{sizeof(T)}
                             : panel + r * kBlockBytes;
      }
      return a;
    }
    static __device__ Rhs80 RhsOf(const Args& args, Tile tile, int term) {
      const int64_t first_k = args.p.concat_rows ? 0 : SourceRank(args, term) * args.p.k;
      const int64_t size = sizeof(T), row_bytes = args.p.KOfW() * size;
      const char* w = static_cast<const char*>(args.w) +
                      first_k * (Config::kTransposeRhs ? size : args.p.n * size);
      return Rhs80{w, nullptr, static_cast<int64_t>(tile.n) * Config::kTileN, args.p.n, row_bytes};
    }
  };

  struct Epilogue {
    static __device__ __forceinline__ void Finish(const Args& args, const CallContext&,
                                                  uint32_t smem, Sums80<Config>& sums, Tile tile) {
      using Rows = StagedRows<Config>;
      const Place place = PlaceOf(args, tile);
      const int64_t per_rank = args.p.rows.PerRank();
      const int64_t row0 = static_cast<int64_t>(place.row_block) * Config::kTileM;
      const int64_t shard = args.p.concat_rows ? SourceRank(args, place.step) * per_rank : 0;
      const int64_t n0 = static_cast<int64_t>(tile.n) * Config::kTileN;
      ForStagedRows<Config>(sums, smem, [&](const Rows& rows) {
        rows.template ForEach<Rows::kGroups>([&](int r, int group) {
          const int64_t row = row0 + rows.first_row + r;
          const int64_t c = n0 + rows.first_column + group * Columns8::kCount;
          if (row >= per_rank || c >= args.p.n) return;
          rows.Get(r, group).Store(static_cast<T*>(args.y) + args.p.RowOfY(shard + row) * args.p.n,
                                   c, args.p.n);
        });
      });
    }
  };

  struct Exchange : PeerExchange80 {
    // The first warp waits for k-panels, term by term.
    struct Rows {
      const Args& args;
      const CallContext& call;
      Place place;
      int arrived;  // k-blocks of all terms that have; local rows are there

      __device__ Rows(const Args& a, const CallContext& c, Tile tile)
          : args(a), call(c), place(PlaceOf(a, tile)), arrived(place.step == 0 ? OfTerm(a) : 0) {}
      static __device__ int OfTerm(const Args& args) {
        return static_cast<int>(CeilDiv<int64_t>(KBytesOf(args), Config::kRowBytes));
      }
      // Returns when k-block b has arrived.
      __device__ __forceinline__ void Await(int b) {
        if (b >= arrived) arrived = ArrivedAfter(*this, b);
      }
      // Out of line, for the main loop's sake: how many k-blocks have arrived when `b` has.
      static __device__ __noinline__ int ArrivedAfter(const Rows& rows, int b) {
        const auto& [args, call, place, before] = rows;
        constexpr int kOfPanel = kBlockBytes / Config::kRowBytes;
        const int lane = threadIdx.x % 32, of_term = OfTerm(args);
        const uint64_t start = call.Start();
        int arrived = before;
        while (b >= arrived) {
          const int term = arrived / of_term, step = place.step + term;
          const auto signal = [&](int panel) {
            return SignalOf(args, call, args.view.rank, step, place.row_block,
                            args.panels.shard.ChunkOf(panel));
          };
          const int panel = arrived % of_term / kOfPanel;
          const int panels = LookAtPanels(
              panel, args.panels.shard.k_panels, [&](int i) { return HasArrived(call, signal(i)); },
              [&](int i) {
                AwaitPeer(call, signal(i), SourceRank(args, step), args.panels.shard.ChunkOf(i));
              });
          arrived = term * of_term + Min(of_term, panels * kOfPanel);
        }
        if (lane == 0) call.Done(EventKind::kWaitRows, start, place.row_block, b);
        return arrived;
      }
    };

    // A chunk's vectors: copies with from(k-panel, row of the row block, vector of the panel's row)
    // -> address, or null for zeros; and to(..) -> address, or null.
    template <typename From, typename To>
    static __device__ __forceinline__ void CopyChunk(const Args& args, int32_t row_block,
                                                     int32_t chunk, From&& from, To&& to) {
      constexpr int kVectors = kBlockBytes / kVectorBytes;
      const KPanelLayout& shard = args.panels.shard;
      const int rows = args.panels.RangeOf(row_block).end;
      const int first = chunk * shard.chunk_k_panels;
      const int panels = Min(shard.chunk_k_panels, shard.k_panels - first);
      const auto at = [&](auto&& f, int e) {
        const int row = e / kVectors;
        return f(first + row / rows, row % rows, e % kVectors);
      };
      CopyVectors(
          panels * rows * kVectors, [&](int e) { return at(from, e); },
          [&](int e) { return at(to, e); });
    }
    // Byte of a shard's row; at least KBytesOf past its end.
    static __device__ int64_t ByteOf(int32_t k_panel, int vector) {
      return static_cast<int64_t>(k_panel) * kBlockBytes + vector * kVectorBytes;
    }
    // A vector of the shard for `dst`; null past a row's end.
    static __device__ const char* InX(const Args& args, int dst, int32_t row_block, int32_t k_panel,
                                      int row, int vector) {
      const int64_t byte = ByteOf(k_panel, vector);
      const int64_t r = static_cast<int64_t>(row_block) * KPanelLayout::kPanelRows + row;
      return byte < KBytesOf(args) ? static_cast<const char*>(args.x) +
                                         args.p.OffsetInX(dst, r) * int64_t{sizeof(T)} + byte
                                   : nullptr;
    }

    static __device__ void Send(const Args& args, const CallContext& call, uint32_t) {
      if (args.view.world == 1 || !CtaMaySend(args)) return;
      const int rank = args.view.rank;
      for (int i = NextTransfer(args); i < args.send_order.Count(); i = NextTransfer(args)) {
        const ChunkSend send = args.send_order.At(i);
        const int dst = SendPeer(rank, send.step, args.view.world);
        const uint64_t start = call.Start();
        CopyChunk(
            args, send.row_block, send.chunk,
            [&](int32_t k_panel, int row, int v) {
              return InX(args, dst, send.row_block, k_panel, row, v);
            },
            [&](int32_t k_panel, int row, int v) {
              return PanelRow(args, call, dst, send.step, send.row_block, k_panel, row) +
                     v * kVectorBytes;
            });
        SignalStored(SignalOf(args, call, dst, send.step, send.row_block, send.chunk), call.signal);
        if (threadIdx.x % 32 == 0) call.Done(EventKind::kSend, start, dst, send.chunk);
      }
    }

    // Copies all_to_all(x) to `gathered`: local chunks first, then the peers', as they arrive.
    static __device__ void Finally(const Args& args, const CallContext& call, uint32_t) {
      if (args.gathered == nullptr) return;
      const KPanelLayout& shard = args.panels.shard;
      const int chunks = shard.Chunks(), each = shard.row_blocks * chunks, rank = args.view.rank;
      const int64_t per_rank = args.p.rows.PerRank();
      for (;;) {
        const int i = __shfl_sync(0xffffffff, threadIdx.x % 32 == 0 ? TakeCopy(args) : 0, 0);
        if (i >= args.view.world * each) return;
        const int step = i / each, row_block = i % each / chunks, chunk = i % chunks;
        const int src = SourceRank(args, step);
        if (step != 0 && threadIdx.x % 32 == 0) {
          AwaitPeer(call, SignalOf(args, call, rank, step, row_block, chunk), src, chunk);
        }
        __syncwarp();
        CopyChunk(
            args, row_block, chunk,
            [&](int32_t k_panel, int row, int v) -> const char* {
              if (step == 0) return InX(args, rank, row_block, k_panel, row, v);
              return PanelRow(args, call, rank, step, row_block, k_panel, row) + v * kVectorBytes;
            },
            [&](int32_t k_panel, int row, int v) -> char* {
              const int64_t byte = ByteOf(k_panel, v), bytes = KBytesOf(args);
              if (byte >= bytes) return nullptr;
              const int64_t r = static_cast<int64_t>(row_block) * KPanelLayout::kPanelRows + row;
              const int64_t at = args.p.concat_rows ? args.p.RowOfY(src * per_rank + r)
                                                    : r * args.p.rows.world + src;
              return static_cast<char*>(args.gathered) + at * bytes + byte;
            });
      }
    }
  };
};

JFLUX_GEMM_KERNEL_80(AllToAllMatmul);

}  // namespace jflux

#endif  // JFLUX_OPS_ALL_TO_ALL_MATMUL_ALL_TO_ALL_MATMUL_SM80_CUH_
