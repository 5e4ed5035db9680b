// all_gather_matmul on Hopper: one kernel that sends, waits and multiplies.
//
// Every CTA has a sender. Senders take 16 KiB chunks of the own shard from a counter and copy them,
// by bulk copies through shared memory, into the peers' workspaces: first all of it to the rank
// that needs it first. A chunk's signal follows when its copy has completed, while the next chunk
// is under way. Meanwhile the loaders start with the own rows, straight from x; a tile with others'
// rows is read from the workspace once the signals of all its chunks have come.
#ifndef JFLUX_OPS_ALL_GATHER_MATMUL_ALL_GATHER_MATMUL_SM90_CUH_
#define JFLUX_OPS_ALL_GATHER_MATMUL_ALL_GATHER_MATMUL_SM90_CUH_

#include "core/tile_order.h"
#include "gpu/epilogue_sm90.cuh"
#include "gpu/fragments_sm90.cuh"
#include "gpu/gemm_config.h"
#include "gpu/gemm_sm90.cuh"
#include "ops/all_gather_matmul/all_gather_matmul.h"

namespace jflux {

struct AllGatherMatmulArgs {
  CUtensorMap x;             // own rows
  CUtensorMap workspace[2];  // all rows, in the channel's halves
  CUtensorMap w[kMaxWeights];
  CUtensorMap y[kMaxWeights];     // 16-bit types
  CUtensorMap sums[kMaxWeights];  // likewise
  DeviceState* state;
  SymmetricView view;
  ChannelLayout channel;
  AllGatherLayout layout;
  Rows rows;
  TileGrid grid;  // of cluster tiles
  const void* x_data;
  void* y_data[kMaxWeights];
  void* sums_data[kMaxWeights];    // or null
  const float* bias[kMaxWeights];  // or null
  Activation activation;
  bool gated;  // a tile is as many columns of both weights
  int64_t n[kMaxWeights];
  int32_t first_tile[kMaxWeights];  // tile column
  int32_t weights;
  void* gathered;  // or null
  int64_t k;
  uint32_t signature, op;
  int32_t a_bytes;    // of a box of rows
  int32_t splits;     // of k
  int32_t num_tiles;  // times splits
  bool copy_own;      // some tile straddles the own rows' ends, and reads them from the workspace
  bool out_f32;
};

template <typename Config_>
struct AllGatherMatmulSm90 {
  using Config = Config_;
  using Args = AllGatherMatmulArgs;
  using T = typename Config::T;

  static __device__ Tile TileAt(const Args& args, int32_t t) {
    Tile tile =
        GatherTile(args.splits == 1 ? t : t / args.splits, args.grid, args.view.rank,
                   args.view.world, args.rows.PerRank(), Config::kTileM * Config::kClusterM);
    if (args.splits != 1) tile.split = t % args.splits;
    return tile;
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

  // The columns of a tile: which w and y they belong to, and where they begin there.
  struct Columns {
    int weight;
    int64_t n0;
  };
  static __device__ Columns ColumnsOf(const Args& args, int32_t tile_n) {
    if (Config::kHalves && args.gated) {
      return Columns{0, static_cast<int64_t>(tile_n) * (Config::kTileN / 2)};
    }
    int i = 0;
    while (i + 1 < args.weights && tile_n >= args.first_tile[i + 1]) ++i;
    return Columns{i, static_cast<int64_t>(tile_n - args.first_tile[i]) * Config::kTileN};
  }
  static __device__ int TermsOf(const Args&) { return 1; }
  static __device__ KRange KOf(const Args& args, Tile tile, int) {
    return SplitOfK<Config>(args.k, tile.split, args.splits);
  }
  static __device__ bool IsLastSplit(const Args& args, Tile tile) {
    return tile.split == args.splits - 1;
  }
  static __device__ Rhs RhsOf(const Args& args, int32_t tile_n, int) {
    const Columns c = ColumnsOf(args, tile_n);
    return Rhs{&args.w[c.weight], static_cast<int32_t>(c.n0),
               Config::kHalves && args.gated ? &args.w[1] : nullptr};
  }

  static __device__ void PrefetchMaps(const Args& args) {
    ptx::PrefetchTensorMap(&args.w[0]);
    ptx::PrefetchTensorMap(&args.x);
    ptx::PrefetchTensorMap(&args.workspace[0]);
    ptx::PrefetchTensorMap(&args.workspace[1]);
  }

  static __device__ void WaitForRows(const Args& args, const CallContext& call, int32_t block_m) {
    const Span s = SpanOf(args, block_m);
    if (s.first >= s.last || IsOwn(args, s)) return;
    const int64_t per_rank = args.rows.PerRank(), row_bytes = args.k * 2;
    const int last_src = args.rows.OwnerOf(s.last - 1);
    for (int src = args.rows.OwnerOf(s.first); src <= last_src; ++src) {
      const int64_t begin = (Max(s.first, src * per_rank) - src * per_rank) * row_bytes;
      const int64_t end = (Min(s.last, (src + 1) * per_rank) - src * per_rank) * row_bytes;
      const int64_t last_chunk = (end - 1) / Config::kChunkBytes;
      for (int64_t c = begin / Config::kChunkBytes + threadIdx.x % 32; c <= last_chunk; c += 32) {
        AwaitPeer(call, SignalOf(args, call, args.view.rank, src, c), src, c);
      }
    }
    __syncwarp();
    ptx::FenceProxyAsyncGlobal();  // the rows are read by TMA
  }

  struct Source {
    const CUtensorMap* map;
    int32_t row;
  };
  static __device__ Source SourceOf(const Args& args, const CallContext& call, int32_t block_m,
                                    int) {
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

  // Where k is split, the last split of a tile adds the others' sums, in float32 and in the order
  // of their splits; whoever has computed one leaves it in this rank's workspace. A split waits for
  // those before it only, which have been taken before it.
  using F = Fragments<Config>;
  static __device__ int64_t PartialIndex(const Args& args, Tile tile, int split, int block) {
    const int64_t tiles =
        static_cast<int64_t>(args.grid.tiles_m) * Config::kClusterM * args.grid.tiles_n;
    return (split * tiles + tile.m * args.grid.tiles_n + tile.n) * Config::kBlocks + block;
  }
  static __device__ Signal* PartialSignal(const Args& args, const CallContext& call, Tile tile,
                                          int split, int block) {
    return args.view.template At<Signal>(
        args.view.rank,
        args.channel.SignalOffset(call.epoch) +
            args.layout.PartialSignalOffset(PartialIndex(args, tile, split, block)));
  }
  static __device__ char* PartialOf(const Args& args, const CallContext& call, Tile tile, int split,
                                    int block) {
    return args.view.At(args.view.rank,
                        args.channel.DataOffset(call.epoch) +
                            args.layout.PartialOffset(PartialIndex(args, tile, split, block)));
  }
  static __device__ bool HasRows(const Args& args, int32_t block_m, int block) {
    return static_cast<int64_t>(block_m) * Config::kTileM + block * 64 < args.rows.Total();
  }

  static __device__ bool HasParts(const Args& args) { return args.splits != 1; }
  static __device__ void WaitForParts(const Args& args, const CallContext& call, int32_t block_m,
                                      Tile tile) {
    if (!IsLastSplit(args, tile)) return;
    const uint64_t start = call.Start();
    const int lane = threadIdx.x % 32, split = lane / Config::kBlocks,
              block = lane % Config::kBlocks;
    if (split < args.splits - 1 && HasRows(args, block_m, block)) {
      AwaitPeer(call, PartialSignal(args, call, tile, split, block), args.view.rank, tile.n);
    }
    if (lane == 0) call.Done(EventKind::kWaitParts, start, block_m, tile.n);
  }

  // Units are taken from a counter: first (peer, chunk) to send, then (source, chunk) to copy into
  // `gathered`. Nothing that a peer waits for comes after something that waits.
  static __device__ void Send(const Args& args, const CallContext& call,
                              const GemmSmem<Config>& smem) {
    const int chunks = args.layout.chunks;
    const int sends = (args.view.world - 1 + (args.copy_own ? 1 : 0)) * chunks;
    const int units = sends + (args.gathered != nullptr ? args.view.world * chunks : 0);
    PieceBuffers buffers{smem};
    int unit = TakeUnit(args);
    // Three pieces are on their way in while the fourth goes out, and the next unit follows without
    // a gap: a unit's turns are latencies, all of which others can hide.
    static_assert(Config::kPieces == 4);
    if (unit < sends) {
      for (int i = 0; i < 3; ++i) LoadPiece(args, buffers, unit, i);
    }
    int arriving = -1;  // the unit before, whose signal is still owed
    uint64_t start = call.Start(), arriving_since = 0;
    while (unit < sends) {
      const int next = TakeUnit(args);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        StorePiece(args, call, buffers, unit, i);
        ptx::BulkWaitRead<1>();  // the piece before this one can be loaded again
        if (i == 0) {
          LoadPiece(args, buffers, unit, 3);
        } else if (next < sends) {
          LoadPiece(args, buffers, next, i - 1);
        }
        if (i == 1) {
          ptx::BulkWait<2>();
          SignalUnit(args, call, arriving, arriving_since);
        }
      }
      arriving = unit;
      arriving_since = start;
      start = call.Start();
      unit = next;
    }
    ptx::BulkWait<0>();
    SignalUnit(args, call, arriving, arriving_since);
    for (; unit < units; unit = TakeUnit(args)) CopyGathered(args, call, buffers, unit - sends);
    ptx::BulkWait<0>();
  }

  static __device__ int TakeUnit(const Args& args) {
    return static_cast<int>(
        atomicAdd(&args.view.template At<ChannelHeader>(args.view.rank, 0)->next_send, 1));
  }

  // Shared memory for four pieces of a chunk.
  struct PieceBuffers {
    GemmSmem<Config> smem;
    uint32_t parities = 0;  // a bit for each piece

    __device__ void Load(int i, const char* from, int bytes) {
      ptx::MbarrierArriveExpectTx(smem.PieceFull(i), bytes);
      ptx::BulkLoad(smem.Piece(i), from, bytes, smem.PieceFull(i));
    }
    __device__ uint32_t Await(int i) {
      ptx::MbarrierWait(smem.PieceFull(i), (parities >> i) & 1);
      parities ^= 1u << i;
      return smem.Piece(i);
    }
  };
  // Piece i of a chunk: 0 for what lies beyond the shard's end.
  static __device__ int PieceBytes(const Args& args, int64_t chunk, int i) {
    const int64_t left = args.layout.ChunkSize(chunk) - i * Config::kPieceBytes;
    return static_cast<int>(Max<int64_t>(0, Min<int64_t>(left, Config::kPieceBytes)));
  }

  static __device__ void LoadPiece(const Args& args, PieceBuffers& buffers, int unit, int i) {
    const int chunk = unit % args.layout.chunks;
    const int bytes = PieceBytes(args, chunk, i);
    if (bytes == 0) return;
    buffers.Load(i,
                 static_cast<const char*>(args.x_data) + chunk * Config::kChunkBytes +
                     i * Config::kPieceBytes,
                 bytes);
  }
  // Whom a unit goes to; after all peers, it may be this rank's own workspace.
  static __device__ int PeerOf(const Args& args, int unit) {
    return SendPeer(args.view.rank, unit / args.layout.chunks + 1, args.view.world);
  }
  static __device__ void StorePiece(const Args& args, const CallContext& call,
                                    PieceBuffers& buffers, int unit, int i) {
    const int chunk = unit % args.layout.chunks;
    const int bytes = PieceBytes(args, chunk, i);
    if (bytes != 0) {
      ptx::BulkStore(
          ChunkOf(args, call, PeerOf(args, unit), args.view.rank, chunk) + i * Config::kPieceBytes,
          buffers.Await(i), bytes);
    }
    ptx::BulkCommit();  // also if it is empty: groups are counted
  }
  static __device__ void SignalUnit(const Args& args, const CallContext& call, int unit,
                                    uint64_t since) {
    if (unit < 0) return;
    const int chunk = unit % args.layout.chunks, peer = PeerOf(args, unit);
    ptx::FenceProxyAsyncGlobal();
    StoreRelease(SignalOf(args, call, peer, args.view.rank, chunk), call.signal);
    call.Done(EventKind::kSend, since, peer, chunk);
  }

  // Copies begin with the own chunks and go on as the others' arrive.
  static __device__ void CopyGathered(const Args& args, const CallContext& call,
                                      PieceBuffers& buffers, int unit) {
    const int chunk = unit % args.layout.chunks;
    const int src = (args.view.rank + unit / args.layout.chunks) % args.view.world;
    const char* from = static_cast<const char*>(args.x_data) + chunk * Config::kChunkBytes;
    if (src != args.view.rank) {
      from = ChunkOf(args, call, args.view.rank, src, chunk);
      AwaitPeer(call, SignalOf(args, call, args.view.rank, src, chunk), src, chunk);
      ptx::FenceProxyAsyncGlobal();
    }
    ptx::BulkWaitRead<0>();
    for (int i = 0; i < Config::kPieces; ++i) {
      const int bytes = PieceBytes(args, chunk, i);
      if (bytes != 0) buffers.Load(i, from + i * Config::kPieceBytes, bytes);
    }
    for (int i = 0; i < Config::kPieces; ++i) {
      const int bytes = PieceBytes(args, chunk, i);
      if (bytes == 0) continue;
      StoreGathered(args, buffers.Await(i), src,
                    chunk * Config::kChunkBytes + i * Config::kPieceBytes, bytes);
      ptx::BulkCommit();
    }
  }

  // Bytes of a shard from `begin` on, which lie in virtual-row order, to their actual rows: one
  // copy for each leading index.
  static __device__ void StoreGathered(const Args& args, uint32_t smem, int src, int64_t begin,
                                       uint32_t bytes) {
    const int64_t block = args.rows.inner * args.k * 2;  // rows that stay together
    const int64_t end = begin + bytes;
    for (int64_t at = begin; at < end;) {
      const int64_t o = Quotient(at / 16, block / 16), stop = Min(end, (o + 1) * block);
      ptx::BulkStore(static_cast<char*>(args.gathered) + (o * args.rows.world + src) * block +
                         (at - o * block),
                     smem + static_cast<uint32_t>(at - begin), static_cast<uint32_t>(stop - at));
      at = stop;
    }
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
  static __device__ void Finish(const Args& args, const CallContext& call,
                                StagingWriter<Config>& staging, Accumulators<Config>& acc,
                                int32_t block_m, Tile tile, AwaitParts&& await_parts) {
    const bool last = IsLastSplit(args, tile);
    if (args.splits != 1 && last) await_parts();
#pragma unroll
    for (int block = 0; block < Config::kBlocks; ++block) {
      if (!HasRows(args, block_m, block)) continue;
      if (!last) {
#pragma unroll
        for (int round = 0; round < 2; ++round) {
          F::template Stage<true>(acc[block], round, staging.Acquire());
          staging.Publish();
        }
        continue;
      }
      for (int split = 0; split < args.splits - 1; ++split) {
        F::template Add<true>(acc[block], PartialOf(args, call, tile, split, block));
      }
      FinishBlock(args, staging, acc[block],
                  static_cast<int64_t>(block_m) * Config::kTileM + block * 64, tile);
    }
  }

  // A block from virtual row `row0` on: what is saved for the gradient, and y. Store takes them in
  // the same order.
  static __device__ void FinishBlock(const Args& args, StagingWriter<Config>& staging,
                                     float (&acc)[Config::kAccumulators], int64_t row0, Tile tile) {
    const Columns columns = ColumnsOf(args, tile.n);
    const int64_t n = args.n[columns.weight];
    if constexpr (Config::kHalves) {
      if (args.gated) return FinishGated(args, staging, acc, row0, columns.n0, n);
    }
    const int i = columns.weight;
    if (args.bias[i] != nullptr) AddBias<Config::kTileN>(acc, args.bias[i], columns.n0, n);
    // (A loop over both would be half the code, and spill two kilobytes.)
    if (args.sums_data[i] != nullptr) {
      Write<Config::kTileN, 0>(args, staging, acc, args.sums_data[i], row0, columns.n0, n);
    }
    Activate<Config::kTileN>(acc, args.activation);
    Write<Config::kTileN, 0>(args, staging, acc, args.y_data[i], row0, columns.n0, n);
  }

  // The first half of the columns is the gate's. A thread holds the same elements of both.
  static __device__ void FinishGated(const Args& args, StagingWriter<Config>& staging,
                                     float (&acc)[Config::kAccumulators], int64_t row0, int64_t n0,
                                     int64_t n) {
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
                               const float (&acc)[Config::kAccumulators], void* data, int64_t row0,
                               int64_t n0, int64_t n) {
    const auto row_of = [&](int r) {
      return row0 + r < args.rows.Total() ? args.rows.Actual(row0 + r) * n : -1;
    };
    const Path path = PathOf(args, row0);
    if (path == Path::kFloat32) {
      StoreBlockF32<kColumns, kFirst>(acc, data, n0, n, row_of);
      return;
    }
    const uint32_t smem = staging.Acquire();
    StageBlock<T, kColumns, kFirst>(acc, smem);
    if (path == Path::kTma) {
      staging.Publish();
    } else {
      ScatterStagedRows<T, kColumns>(smem, 1 + staging.consumer, data, n0, n, row_of);
    }
  }

  static __device__ void StorePartial(const Args& args, const CallContext& call,
                                      StagingReader<Config>& staging, int32_t block_m, Tile tile) {
    const uint64_t start = call.Start();
#pragma unroll
    for (int block = 0; block < Config::kBlocks; ++block) {
      if (!HasRows(args, block_m, block)) continue;
      for (int round = 0; round < 2; ++round) {
        ptx::BulkStore(
            PartialOf(args, call, tile, tile.split, block) + round * Config::kStagingBytes,
            staging.Acquire(), Config::kStagingBytes);
        ptx::BulkCommit();
        staging.Release();
      }
    }
    ptx::BulkWait<0>();
    ptx::FenceProxyAsyncGlobal();
#pragma unroll
    for (int block = 0; block < Config::kBlocks; ++block) {
      if (!HasRows(args, block_m, block)) continue;
      StoreRelease(PartialSignal(args, call, tile, tile.split, block), call.signal);
    }
    call.Done(EventKind::kStore, start, block_m, tile.n);
  }

  static __device__ void Store(const Args& args, const CallContext& call,
                               StagingReader<Config>& staging, int32_t block_m, Tile tile) {
    if (!IsLastSplit(args, tile)) return StorePartial(args, call, staging, block_m, tile);
    const Columns columns = ColumnsOf(args, tile.n);
    const int64_t n = args.n[columns.weight];
#pragma unroll
    for (int block = 0; block < Config::kBlocks; ++block) {
      const int64_t row0 = static_cast<int64_t>(block_m) * Config::kTileM + block * 64;
      if (PathOf(args, row0) != Path::kTma) continue;
      const int64_t row = args.rows.Actual(row0);
      const auto store = [&](const CUtensorMap* map) {
        const uint32_t smem = staging.Acquire();
        const uint64_t start = call.Start();
        if (Config::kHalves && args.gated) {
          StoreStagedBlock<Config::kTileN / 2>(smem, map, row, columns.n0, n);
        } else {
          StoreStagedBlock<Config::kTileN>(smem, map, row, columns.n0, n);
        }
        ptx::BulkCommit();
        staging.Release();
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
