// all_gather_matmul on Hopper: one kernel that sends, waits and multiplies.
//
// Every CTA has a sender warp. Senders take 16 KiB chunks of the own shard from a counter and copy
// them, by bulk copies through shared memory, into the peers' workspaces: first all of it to the
// rank that needs it first. A chunk's signal follows when its copy has completed. Meanwhile the
// loaders start with the own rows, straight from x; a tile with others' rows is read from the
// workspace once the signals of all its chunks have come.
#ifndef JFLUX_OPS_ALL_GATHER_MATMUL_ALL_GATHER_MATMUL_SM90_CUH_
#define JFLUX_OPS_ALL_GATHER_MATMUL_ALL_GATHER_MATMUL_SM90_CUH_

#include "core/tile_order.h"
#include "gpu/epilogue_sm90.cuh"
#include "gpu/gemm_sm90.cuh"
#include "ops/all_gather_matmul/all_gather_matmul.h"

namespace jflux {

struct AllGatherMatmulArgs {
  CUtensorMap x;             // own rows
  CUtensorMap workspace[2];  // all rows, in the channel's halves
  CUtensorMap w;
  DeviceState* state;
  SymmetricView view;
  ChannelLayout channel;
  AllGatherLayout layout;
  Rows rows;
  TileGrid grid;  // of cluster tiles
  const void* x_data;
  void* y;
  void* gathered;  // or null
  int64_t k, n;
  uint32_t signature, op;
  int32_t num_tiles;
  bool copy_own;  // some tile straddles the own rows' ends, and reads them from the workspace
  bool out_f32;
};

template <typename Config_>
struct AllGatherMatmulSm90 {
  using Config = Config_;
  using Args = AllGatherMatmulArgs;
  using T = typename Config::T;

  static __device__ Tile TileAt(const Args& args, int32_t t) {
    return GatherTile(t, args.grid, args.view.rank, args.rows.PerRank(),
                      Config::kTileM * Config::kClusterM);
  }

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

  static __device__ void WaitForRows(const Args& args, const CallContext& call, int32_t block_m) {
    const Span s = SpanOf(args, block_m);
    if (s.first >= s.last || IsOwn(args, s)) return;
    const int64_t per_rank = args.rows.PerRank(), row_bytes = args.k * 2;
    const int last_src = args.rows.OwnerOf(s.last - 1);
    for (int src = args.rows.OwnerOf(s.first); src <= last_src; ++src) {
      const int64_t begin = (Max(s.first, src * per_rank) - src * per_rank) * row_bytes;
      const int64_t end = (Min(s.last, (src + 1) * per_rank) - src * per_rank) * row_bytes;
      const int64_t last_chunk = (end - 1) / args.layout.chunk_bytes;
      for (int64_t c = begin / args.layout.chunk_bytes + threadIdx.x % 32; c <= last_chunk;
           c += 32) {
        AwaitPeer(call, SignalOf(args, call, args.view.rank, src, c), src, c);
      }
    }
    __syncwarp();
    ptx::FenceProxyAsync();  // the rows are read by TMA
  }

  struct Source {
    const CUtensorMap* map;
    int32_t row;
  };
  static __device__ Source SourceOf(const Args& args, const CallContext& call, int32_t block_m) {
    const Span s = SpanOf(args, block_m);
    if (s.first < s.last && IsOwn(args, s)) {
      return Source{&args.x, static_cast<int32_t>(s.first - args.view.rank * args.rows.PerRank())};
    }
    return Source{&args.workspace[call.epoch & 1], static_cast<int32_t>(s.first)};
  }
  static __device__ void LoadA(const Source& source, uint32_t smem, uint32_t bar, int k0) {
    ptx::TmaLoad2d(smem, source.map, bar, k0, source.row);
  }

  static __device__ Signal* SignalOf(const Args& args, const CallContext& call, int rank, int src,
                                     int64_t chunk) {
    return args.view.template At<Signal>(
        rank, args.channel.SignalOffset(call.epoch) + args.layout.SignalOffset(src, chunk));
  }
  static __device__ char* ChunkOf(const Args& args, const CallContext& call, int rank, int src,
                                  int64_t chunk) {
    return args.view.At(rank,
                        args.channel.DataOffset(call.epoch) + args.layout.ChunkOffset(src, chunk));
  }

  // Units: first (peer, chunk) to send, then (source, chunk) to copy into `gathered`. Nothing that
  // a peer waits for comes after something that waits.
  static __device__ void Send(const Args& args, const CallContext& call,
                              const GemmSmem<Config>& smem) {
    const int world = args.view.world, rank = args.view.rank, chunks = args.layout.chunks;
    const int sends = (world - 1 + (args.copy_own ? 1 : 0)) * chunks;
    const int units = sends + (args.gathered != nullptr ? world * chunks : 0);
    uint32_t* next = &args.view.template At<ChannelHeader>(rank, 0)->next_send;
    uint32_t parity = 0;
    for (;;) {
      const int unit = static_cast<int>(atomicAdd(next, 1));
      if (unit >= units) return;
      const bool sending = unit < sends;
      const int64_t chunk = (sending ? unit : unit - sends) % chunks;
      // A gathered copy starts with the own chunks and goes on as the rows arrive.
      const int step = (sending ? unit : unit - sends) / chunks;
      const int peer = SendPeer(rank, step + 1, world);  // step world - 1: the own workspace
      const int src = sending ? rank : (rank + step) % world;
      const auto* shard = static_cast<const char*>(args.x_data);
      const auto bytes = static_cast<uint32_t>(args.layout.ChunkSize(chunk));
      const char* from = shard + chunk * args.layout.chunk_bytes;
      if (!sending && src != rank) {
        from = ChunkOf(args, call, rank, src, chunk);
        AwaitPeer(call, SignalOf(args, call, rank, src, chunk), src, chunk);
        ptx::FenceProxyAsync();
      }
      const uint64_t start = call.Start();
      ptx::MbarrierArriveExpectTx(smem.SendFull(), bytes);
      ptx::BulkLoad(smem.SendBuffer(), from, bytes, smem.SendFull());
      ptx::MbarrierWait(smem.SendFull(), parity);
      parity ^= 1;
      if (sending) {
        ptx::BulkStore(ChunkOf(args, call, peer, rank, chunk), smem.SendBuffer(), bytes);
      } else {
        StoreGathered(args, smem.SendBuffer(), src, chunk, bytes);
      }
      ptx::BulkCommit();
      ptx::BulkWaitAll();
      if (sending) {
        ptx::FenceProxyAsync();
        StoreRelease(SignalOf(args, call, peer, rank, chunk), call.signal);
        call.Done(EventKind::kSend, start, peer, static_cast<int32_t>(chunk));
      }
    }
  }

  // A chunk, which lies in virtual-row order, to its actual rows: one copy for each leading index.
  static __device__ void StoreGathered(const Args& args, uint32_t smem, int src, int64_t chunk,
                                       uint32_t bytes) {
    const int64_t block = args.rows.inner * args.k * 2;  // rows that stay together
    const int64_t begin = chunk * args.layout.chunk_bytes, end = begin + bytes;
    for (int64_t at = begin; at < end;) {
      const int64_t o = at / block, stop = Min(end, (o + 1) * block);
      ptx::BulkStore(static_cast<char*>(args.gathered) + (o * args.rows.world + src) * block +
                         (at - o * block),
                     smem + static_cast<uint32_t>(at - begin), static_cast<uint32_t>(stop - at));
      at = stop;
    }
  }

  static __device__ void Announce(const Args& args, const CallContext&,
                                  const GemmSmem<Config>& smem, uint32_t) {
    TileReader<Config> reader{smem, {}};
    while (reader.Next() < args.num_tiles) {
    }
  }

  static __device__ void Epilogue(const Args& args, const CallContext&,
                                  const GemmSmem<Config>& smem,
                                  const float (&acc)[Config::kTileN / 2], int32_t block_m,
                                  int32_t tile_n, int consumer, uint32_t) {
    const int64_t row0 = static_cast<int64_t>(block_m) * Config::kTileM + consumer * 64;
    const int64_t total = args.rows.Total();
    StoreBlock<T, Config::kTileN>(
        acc, smem.Epilogue(consumer), 1 + consumer, args.y, args.out_f32, args.n,
        static_cast<int64_t>(tile_n) * Config::kTileN,
        [&](int r) { return row0 + r < total ? args.rows.Actual(row0 + r) * args.n : -1; });
  }
};

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    AllGatherMatmulKernel(const __grid_constant__ AllGatherMatmulArgs args) {
  RunGemm<AllGatherMatmulSm90<Config>>(args);
}

}  // namespace jflux

#endif  // JFLUX_OPS_ALL_GATHER_MATMUL_ALL_GATHER_MATMUL_SM90_CUH_
