// matmul_reduce_scatter on Hopper: one kernel that multiplies, sends partial tiles and sums.
//
// A consumer's partial tile goes from its registers to the workspaces of the ranks that own its
// rows, in fragment order: the reader is the same thread of the same consumer of the owner's CTA,
// so nothing is rearranged on the way, and every store and load is 512 contiguous bytes a warp. An
// announcer warp then waits for these stores and sets the tile's signals, so that the consumers
// need not. The own tiles come last: by then the peers' partial tiles have arrived, and the
// consumer adds them to its registers in rank order, in float32, before it writes y. There is no
// separate reduction.
#ifndef JFLUX_OPS_MATMUL_REDUCE_SCATTER_MATMUL_REDUCE_SCATTER_SM90_CUH_
#define JFLUX_OPS_MATMUL_REDUCE_SCATTER_MATMUL_REDUCE_SCATTER_SM90_CUH_

#include "core/tile_order.h"
#include "gpu/epilogue_sm90.cuh"
#include "gpu/gemm_sm90.cuh"
#include "ops/matmul_reduce_scatter/matmul_reduce_scatter.h"

namespace jflux {

struct MatmulReduceScatterArgs {
  CUtensorMap x;  // 4-d: k, inner, outer, world; with outer == 1 all rows are `inner`
  CUtensorMap w;
  DeviceState* state;
  SymmetricView view;
  ChannelLayout channel;
  ReduceScatterLayout layout;
  Rows rows;
  TileGrid grid;  // of cluster tiles
  void* y;
  int64_t k, n;
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
    return ScatterTile(t, args.grid, args.view.rank, args.rows.PerRank(),
                       Config::kTileM * Config::kClusterM);
  }

  static __device__ void WaitForRows(const Args&, const CallContext&, int32_t) {}

  struct Source {
    const CUtensorMap* map;
    int32_t inner, outer, rank;
  };
  static __device__ Source SourceOf(const Args& args, const CallContext&, int32_t block_m) {
    const int64_t row = static_cast<int64_t>(block_m) * Config::kTileM;
    if (args.rows.outer == 1) return Source{&args.x, static_cast<int32_t>(row), 0, 0};
    // The launcher sees to it that a block lies within one (rank, outer).
    return Source{&args.x, static_cast<int32_t>(row % args.rows.inner),
                  static_cast<int32_t>(row / args.rows.inner % args.rows.outer),
                  static_cast<int32_t>(row / args.rows.PerRank())};
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

  // Where piece 0 of this thread's row half lies in the slot. A piece is 16 bytes; pieces of one
  // thread are 2048 bytes apart.
  static __device__ char* PiecesOf(const Args& args, const CallContext& call, int dst, int src,
                                   int32_t block_m, int32_t tile_n, int consumer, int half) {
    const int32_t slot = args.layout.SlotOf(dst, Tile{block_m, tile_n});
    const int64_t half_bytes = args.layout.slot_bytes / 4;
    return args.view.At(dst, args.channel.DataOffset(call.epoch) +
                                 args.layout.SlotOffset(src, slot) +
                                 (consumer * 2 + half) * half_bytes + (threadIdx.x % 128) * 16);
  }

  static __device__ void Announce(const Args& args, const CallContext& call,
                                  const GemmSmem<Config>& smem, uint32_t cta) {
    TileReader<Config> reader{smem, {}};
    uint32_t parity = 0;
    for (;;) {
      const int32_t t = reader.Next();
      if (t >= args.num_tiles) return;
      const Tile tile = TileAt(args, t);
      const int32_t block_m = tile.m * Config::kClusterM + static_cast<int32_t>(cta);
#pragma unroll
      for (int consumer = 0; consumer < Config::kConsumers; ++consumer) {
        ptx::MbarrierWait(smem.Written(consumer), parity);
        if (threadIdx.x % 32 == 0) {
          const Owners owners = OwnersOf(args, block_m, consumer);
          const bool own_only = owners.first == args.view.rank && owners.last == args.view.rank;
          if (owners.first <= owners.last && !own_only) {
            ptx::FenceSystem();  // the consumer's stores, which the barrier ordered before this
            for (int dst = owners.first; dst <= owners.last; ++dst) {
              if (dst == args.view.rank) continue;
              StoreRelease(SignalOf(args, call, dst, args.view.rank, block_m, tile.n, consumer),
                           call.signal);
            }
          }
          ptx::MbarrierArrive(smem.Announced(consumer));
        }
        __syncwarp();
      }
      parity ^= 1;
    }
  }

  // Pieces of one row half: 16-bit types hold the columns of four j, float32 those of two.
  template <typename F>
  static __device__ __forceinline__ void ForPieces(bool out_f32, F&& f) {
    if (out_f32) {
#pragma unroll
      for (int p = 0; p < Config::kTileN / 16; ++p) f(p, std::true_type{});
    } else {
#pragma unroll
      for (int p = 0; p < Config::kTileN / 32; ++p) f(p, std::false_type{});
    }
  }

  static __device__ void SendHalf(const float (&acc)[Config::kTileN / 2], int half, bool out_f32,
                                  bool send, char* to) {
    ForPieces(out_f32, [&](int p, auto is_f32) {
      uint4 v;
      if constexpr (decltype(is_f32)::value) {
        const float* a = &acc[8 * p + 2 * half];
        v = make_uint4(__float_as_uint(a[0]), __float_as_uint(a[1]), __float_as_uint(a[4]),
                       __float_as_uint(a[5]));
      } else {
        const float* a = &acc[16 * p + 2 * half];
        v = make_uint4(Pack<T>(a[0], a[1]), Pack<T>(a[4], a[5]), Pack<T>(a[8], a[9]),
                       Pack<T>(a[12], a[13]));
      }
      ptx::StoreGlobal16If(send, to + p * 2048, v);
    });
  }

  static __device__ void Epilogue(const Args& args, const CallContext& call,
                                  const GemmSmem<Config>& smem, float (&acc)[Config::kTileN / 2],
                                  int32_t block_m, int32_t tile_n, int consumer, uint32_t turn) {
    const int thread = threadIdx.x % 128, lane = thread % 32;
    const int64_t row0 = static_cast<int64_t>(block_m) * Config::kTileM + consumer * 64;
    const int64_t total = args.rows.Total();
    const int rank = args.view.rank;
    const Owners owners = OwnersOf(args, block_m, consumer);

#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t row = row0 + 16 * (thread / 32) + 8 * half + lane / 4;
      const int dst = row < total ? args.rows.OwnerOf(row) : rank;
      // Predicated and not branched around: accumulators in divergent code serialise wgmma.
      SendHalf(acc, half, args.out_f32, dst != rank,
               PiecesOf(args, call, dst, rank, block_m, tile_n, consumer, half));
    }
    // Before the announcer's next turn can begin, its last one must have ended.
    ptx::MbarrierWait(smem.Announced(consumer), turn ^ 1);
    ptx::MbarrierArrive(smem.Written(consumer));
    if (rank < owners.first || rank > owners.last) return;

    const uint64_t start = call.Start();
    if (lane < args.view.world && lane != rank) {
      AwaitPeer(call, SignalOf(args, call, rank, lane, block_m, tile_n, consumer), lane,
                args.layout.SlotOf(rank, Tile{block_m, tile_n}));
    }
    __syncwarp();
    if (thread == 0) call.Done(EventKind::kWaitParts, start, block_m, tile_n);
    Reduce(args, call, acc, block_m, tile_n, consumer);
    StoreBlock<T, Config::kTileN>(acc, smem.Epilogue(consumer), 1 + consumer, args.y, args.out_f32,
                                  args.n, static_cast<int64_t>(tile_n) * Config::kTileN,
                                  [&](int r) {
                                    const int64_t row = row0 + r;
                                    const bool own = row < total && args.rows.OwnerOf(row) == rank;
                                    return own ? (row - rank * args.rows.PerRank()) * args.n : -1;
                                  });
  }

  // acc = sum over ranks, in rank order; the own part takes its place in it unrounded. Rows that
  // other ranks own become nonsense, which nobody stores: a branch would cost more.
  static __device__ void Reduce(const Args& args, const CallContext& call,
                                float (&acc)[Config::kTileN / 2], int32_t block_m, int32_t tile_n,
                                int consumer) {
    const int rank = args.view.rank, world = args.view.world;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const char* from = PiecesOf(args, call, rank, 0, block_m, tile_n, consumer, half);
      const int64_t src_stride = args.layout.SlotOffset(1, 0) - args.layout.SlotOffset(0, 0);
      ForPieces(args.out_f32, [&](int p, auto is_f32) {
        constexpr int kValues = decltype(is_f32)::value ? 4 : 8;
        float sum[kValues];
#pragma unroll
        for (int i = 0; i < kValues; ++i) sum[i] = 0;
        const auto at = [&](int i) -> float& {
          return acc[(kValues / 2) * 4 * p + (i / 2) * 4 + 2 * half + i % 2];
        };
        for (int src = 0; src < world; ++src) {
          if (src == rank) {
#pragma unroll
            for (int i = 0; i < kValues; ++i) sum[i] += at(i);
            continue;
          }
          const uint4 v = ptx::LoadGlobal16(from + src * src_stride + p * 2048);
          if constexpr (kValues == 4) {
            sum[0] += __uint_as_float(v.x);
            sum[1] += __uint_as_float(v.y);
            sum[2] += __uint_as_float(v.z);
            sum[3] += __uint_as_float(v.w);
          } else {
            const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              const float2 f = Unpack<T>(words[i]);
              sum[2 * i] += f.x;
              sum[2 * i + 1] += f.y;
            }
          }
        }
#pragma unroll
        for (int i = 0; i < kValues; ++i) at(i) = sum[i];
      });
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
