// matmul_reduce_scatter on Hopper: one kernel that multiplies, sends partial tiles and sums.
//
// A consumer's partial tile goes from its registers, through its staging, to the workspaces of the
// ranks that own its rows, in fragment order: the reader is the same thread of the same consumer of
// the owner's CTA, so nothing is rearranged on the way and a block is one bulk copy. The storer
// sets the tile's signals when the copy has completed. The own tiles come last: by then the peers'
// partial tiles have arrived. The loader brings them in behind the tile's operands, through the
// same stages, and the consumer adds them to its registers, in float32 and in rank order after the
// own part, before y is written. There is no separate reduction.
#ifndef JFLUX_OPS_MATMUL_REDUCE_SCATTER_MATMUL_REDUCE_SCATTER_SM90_CUH_
#define JFLUX_OPS_MATMUL_REDUCE_SCATTER_MATMUL_REDUCE_SCATTER_SM90_CUH_

#include "core/tile_order.h"
#include "gpu/epilogue_sm90.cuh"
#include "gpu/fragments_sm90.cuh"
#include "gpu/gemm_config.h"
#include "gpu/gemm_sm90.cuh"
#include "ops/matmul_reduce_scatter/matmul_reduce_scatter.h"

namespace jflux {

struct MatmulReduceScatterArgs {
  // 4-d: k, inner, outer, world; with outer == 1 all rows are `inner`.
  CUtensorMap x[kMaxWeights];
  CUtensorMap w[kMaxWeights];
  CUtensorMap y;  // 16-bit types
  DeviceState* state;
  SymmetricView view;
  ChannelLayout channel;
  ReduceScatterLayout layout;
  Rows rows;
  TileGrid grid;  // of cluster tiles
  void* y_data;
  int64_t k[kMaxWeights];
  int32_t terms;
  int64_t n;
  uint32_t signature, op;
  int32_t num_tiles;
  bool out_f32;
};

template <typename Config_>
struct MatmulReduceScatterSm90 {
  using Config = Config_;
  using Args = MatmulReduceScatterArgs;
  using T = typename Config::T;

  static __device__ Tile TileAt(const Args& args, int32_t t) {
    return ScatterTile(t, args.grid, args.view.rank, args.view.world, args.rows.PerRank(),
                       Config::kTileM * Config::kClusterM);
  }

  static __device__ void WaitForRows(const Args&, const CallContext&, int32_t) {}

  struct Source {
    const CUtensorMap* map;
    int32_t inner, outer, rank;
  };
  static __device__ int TermsOf(const Args& args) { return args.terms; }
  static __device__ KRange KOf(const Args& args, Tile, int term) {
    return KRange{0, static_cast<int32_t>(args.k[term])};
  }
  static __device__ Rhs RhsOf(const Args& args, int32_t tile_n, int term) {
    return Rhs{&args.w[term], tile_n * Config::kTileN};
  }
  static __device__ Source SourceOf(const Args& args, const CallContext&, int32_t block_m,
                                    int term) {
    const int64_t row = static_cast<int64_t>(block_m) * Config::kTileM;
    if (args.rows.outer == 1) return Source{&args.x[term], static_cast<int32_t>(row), 0, 0};
    // The launcher sees to it that a block lies within one (rank, outer).
    return Source{&args.x[term], static_cast<int32_t>(Remainder(row, args.rows.inner)),
                  static_cast<int32_t>(Remainder(Quotient(row, args.rows.inner), args.rows.outer)),
                  args.rows.OwnerOf(row)};
  }
  static __device__ void LoadA(const Source& s, uint32_t smem, uint32_t bar, int k0) {
    ptx::TmaLoad4d(smem, s.map, bar, k0, s.inner, s.outer, s.rank);
  }

  static __device__ void Send(const Args&, const CallContext&, const GemmSmem<Config>&) {}

  // The ranks that own rows of a consumer's 64 rows: [first, last]; empty for rows past the end.
  struct Owners {
    int first, last;
  };
  static __device__ Owners OwnersOf(const Args& args, int32_t block_m, int consumer) {
    const int64_t row = static_cast<int64_t>(block_m) * Config::kTileM + consumer * 64;
    const int64_t end = Min(row + 64, args.rows.Total());
    if (row >= end) return Owners{0, -1};
    return Owners{args.rows.OwnerOf(row), args.rows.OwnerOf(end - 1)};
  }

  static __device__ Signal* SignalOf(const Args& args, const CallContext& call, int dst, int src,
                                     int32_t block_m, int32_t tile_n, int consumer) {
    const int32_t slot = args.layout.SlotOf(dst, Tile{block_m, tile_n});
    return args.view.template At<Signal>(
        dst, args.channel.SignalOffset(call.epoch) + args.layout.SignalOffset(src, slot, consumer));
  }

  // A consumer's block of a slot: a staging's worth in a 16-bit type, two in float32.
  static __device__ char* BlockOf(const Args& args, const CallContext& call, int dst, int src,
                                  int32_t block_m, int32_t tile_n, int consumer) {
    const int32_t slot = args.layout.SlotOf(dst, Tile{block_m, tile_n});
    return args.view.At(dst, args.channel.DataOffset(call.epoch) +
                                 args.layout.SlotOffset(src, slot) +
                                 consumer * (args.layout.slot_bytes / 2));
  }
  static __device__ bool IsOwner(const Args& args, Owners o) {
    return o.first <= args.view.rank && args.view.rank <= o.last;
  }
  static __device__ bool HasOtherOwners(const Args& args, Owners o) {
    return o.first <= o.last && !(o.first == args.view.rank && o.last == args.view.rank);
  }

  // Parts: for each peer its block of the tile, in pieces.
  using F = Fragments<Config>;
  static constexpr int kPartBytes = F::kPieceBytes;
  static __device__ int PartsPerPeer(const Args& args) { return args.out_f32 ? 4 : 2; }
  static __device__ int PartsOf(const Args& args, Tile tile) {
    const int64_t first = static_cast<int64_t>(tile.m) * Config::kTileM * Config::kClusterM;
    const int64_t own = args.view.rank * args.rows.PerRank();
    const bool has_own =
        first < own + args.rows.PerRank() && first + Config::kTileM * Config::kClusterM > own;
    return has_own ? (args.view.world - 1) * PartsPerPeer(args) : 0;
  }
  static __device__ void WaitForParts(const Args& args, const CallContext& call, int32_t block_m,
                                      Tile tile) {
    const int32_t tile_n = tile.n;
    const uint64_t start = call.Start();
    const int lane = threadIdx.x % 32, src = lane / 2, consumer = lane % 2;
    if (src < args.view.world && src != args.view.rank &&
        IsOwner(args, OwnersOf(args, block_m, consumer))) {
      AwaitPeer(call, SignalOf(args, call, args.view.rank, src, block_m, tile_n, consumer), src,
                args.layout.SlotOf(args.view.rank, Tile{block_m, tile_n}));
    }
    __syncwarp();
    ptx::FenceProxyAsyncGlobal();  // bulk copies read them
    if (lane == 0) call.Done(EventKind::kWaitParts, start, block_m, tile_n);
  }
  static __device__ void LoadPart(const Args& args, const CallContext& call, uint32_t smem,
                                  uint32_t bar, int32_t block_m, Tile tile, int part) {
    const int32_t tile_n = tile.n;
    const int peer = part / PartsPerPeer(args), piece = part % PartsPerPeer(args);
    const int src = peer < args.view.rank ? peer : peer + 1;
    bool own[Config::kConsumers];
    uint32_t bytes = 0;
#pragma unroll
    for (int c = 0; c < Config::kConsumers; ++c) {
      own[c] = IsOwner(args, OwnersOf(args, block_m, c));
      bytes += own[c] ? kPartBytes : 0;
    }
    if (bytes == 0) {
      ptx::MbarrierArrive(bar);
      return;
    }
    ptx::MbarrierArriveExpectTx(bar, bytes);
#pragma unroll
    for (int c = 0; c < Config::kConsumers; ++c) {
      if (!own[c]) continue;
      ptx::BulkLoad(
          smem + c * kPartBytes,
          BlockOf(args, call, args.view.rank, src, block_m, tile_n, c) + piece * kPartBytes,
          kPartBytes, bar);
    }
  }

  template <typename EachPart>
  static __device__ void Finish(const Args& args, StagingWriter<Config>& staging,
                                float (&acc)[Config::kTileN / 2], int32_t block_m, Tile tile,
                                int consumer, EachPart&& each_part) {
    const int32_t tile_n = tile.n;
    const Owners owners = OwnersOf(args, block_m, consumer);
    const bool own = IsOwner(args, owners);
    if (HasOtherOwners(args, owners)) {
      if (args.out_f32) {
        F::template Stage<true>(acc, 0, staging.Acquire());
        staging.Publish();
        F::template Stage<true>(acc, 1, staging.Acquire());
        staging.Publish();
      } else {
        F::template Stage<false>(acc, 0, staging.Acquire());
        staging.Publish();
      }
    }
    // Rows that other ranks own become nonsense, which nobody stores.
    each_part([&](uint32_t smem, int part) {
      if (!own) return;
      smem += consumer * kPartBytes;
      if (args.out_f32) {
        const int piece = part % 4;
        if (piece == 0) F::template Add<true, 0>(acc, smem);
        if (piece == 1) F::template Add<true, 1>(acc, smem);
        if (piece == 2) F::template Add<true, 2>(acc, smem);
        if (piece == 3) F::template Add<true, 3>(acc, smem);
      } else if (part % 2 == 0) {
        F::template Add<false, 0>(acc, smem);
      } else {
        F::template Add<false, 1>(acc, smem);
      }
    });
    if (!own) return;
    const int64_t row0 = FirstOwnRow(args, block_m, consumer);
    const int64_t n0 = static_cast<int64_t>(tile_n) * Config::kTileN;
    const auto row_of = [&](int r) {
      const bool inside = row0 + r >= 0 && row0 + r < args.rows.PerRank();
      return inside ? (row0 + r) * args.n : -1;
    };
    if (args.out_f32) {
      StoreBlockF32<Config::kTileN>(acc, args.y_data, n0, args.n, row_of);
      return;
    }
    const uint32_t smem = staging.Acquire();
    StageBlock<T, Config::kTileN>(acc, smem);
    if (row0 >= 0) {
      staging.Publish();
    } else {
      ScatterStagedRows<T, Config::kTileN>(smem, 1 + consumer, args.y_data, n0, args.n, row_of);
    }
  }

  // The consumer's first row as a row of y: before y's first, or with rows past its last, where a
  // tile straddles.
  static __device__ int64_t FirstOwnRow(const Args& args, int32_t block_m, int consumer) {
    return static_cast<int64_t>(block_m) * Config::kTileM + consumer * 64 -
           args.view.rank * args.rows.PerRank();
  }

  static __device__ void Store(const Args& args, const CallContext& call,
                               StagingReader<Config> (&staging)[Config::kConsumers],
                               int32_t block_m, Tile tile) {
    const int32_t tile_n = tile.n;
    const int rank = args.view.rank;
    uint64_t start = 0;
    bool sent = false;
#pragma unroll
    for (int c = 0; c < Config::kConsumers; ++c) {
      const Owners owners = OwnersOf(args, block_m, c);
      if (!HasOtherOwners(args, owners)) continue;
      for (int round = 0; round < (args.out_f32 ? 2 : 1); ++round) {
        const uint32_t smem = staging[c].Acquire();
        if (!sent) start = call.Start();
        sent = true;
        for (int dst = owners.first; dst <= owners.last; ++dst) {
          if (dst == rank) continue;
          ptx::BulkStore(
              BlockOf(args, call, dst, rank, block_m, tile_n, c) + round * Config::kStagingBytes,
              smem, Config::kStagingBytes);
        }
        ptx::BulkCommit();
        staging[c].Release();
      }
    }
    if (sent) {
      ptx::BulkWait<0>();
      ptx::FenceProxyAsyncGlobal();
#pragma unroll
      for (int c = 0; c < Config::kConsumers; ++c) {
        const Owners owners = OwnersOf(args, block_m, c);
        for (int dst = owners.first; dst <= owners.last; ++dst) {
          if (dst == rank) continue;
          StoreRelease(SignalOf(args, call, dst, rank, block_m, tile_n, c), call.signal);
        }
      }
      call.Done(EventKind::kSend, start, OwnersOf(args, block_m, 0).first, block_m);
    }
    if (args.out_f32) return;
#pragma unroll
    for (int c = 0; c < Config::kConsumers; ++c) {
      const int64_t row0 = FirstOwnRow(args, block_m, c);
      // A TMA store may end outside its tensor, but not begin before it.
      if (!IsOwner(args, OwnersOf(args, block_m, c)) || row0 < 0) continue;
      const uint32_t smem = staging[c].Acquire();
      start = call.Start();
      StoreStagedBlock<Config::kTileN>(smem, &args.y, row0,
                                       static_cast<int64_t>(tile_n) * Config::kTileN, args.n);
      ptx::BulkCommit();
      staging[c].Release();
      call.Done(EventKind::kStore, start, block_m, tile_n);
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
