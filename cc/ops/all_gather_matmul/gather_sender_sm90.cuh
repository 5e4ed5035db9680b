// The sender of all_gather_matmul's kernel, a warp of each CTA: own rows to the peers' workspaces,
// unless enough others do, and where they are asked for, all rows to `gathered`.
#ifndef JFLUX_OPS_ALL_GATHER_MATMUL_GATHER_SENDER_SM90_CUH_
#define JFLUX_OPS_ALL_GATHER_MATMUL_GATHER_SENDER_SM90_CUH_

#include "gpu/gemm_smem.cuh"
#include "gpu/ptx.cuh"
#include "ops/all_gather_matmul/all_gather_matmul_args.cuh"

namespace jflux {

template <typename Config>
struct GatherSender {
  using Args = AllGatherMatmulArgs;

  // Chunks are taken from counters: first those to send, by as many CTAs as may (gpu/senders.h),
  // then those to copy into `gathered`. Nothing that a peer waits for comes after something that
  // waits. The warp works out what is to be moved; one lane moves it.
  static __device__ void Run(const Args& args, const CallContext& call,
                             const GemmSmem<Config>& smem) {
    static_assert(Config::kPieces == PanelLayout::kPieces &&
                  Config::kPieceBytes == PanelLayout::kPieceRows * PanelLayout::kRowBytes);
    PieceBuffers buffers{smem};
    if (MaySend(args)) SendChunks(args, call, buffers);
    if (args.gathered != nullptr) CopyChunks(args, call, buffers);
  }

 private:
  struct PieceBuffers;

  // For a whole warp: whether this CTA is one of the first to get here.
  static __device__ bool MaySend(const Args& args) {
    if (args.senders >= gridDim.x) return true;
    auto* header = args.view.template At<ChannelHeader>(args.view.rank, 0);
    const bool leads = threadIdx.x % 32 == 0;
    return __shfl_sync(0xffffffff, leads ? atomicAdd(&header->senders, 1) : 0, 0) < args.senders;
  }

  static __device__ void SendChunks(const Args& args, const CallContext& call,
                                    PieceBuffers& buffers) {
    const SendOrder order(args.layout, args.view.rank, args.send_group);
    const int units = order.Units();
    int unit = NextUnit(args);
    // Three pieces are on their way in while the fourth goes out, and the next unit follows without
    // a gap: a unit's turns are latencies, all of which others can hide.
    Chunk chunk = Chunk{};
    if (unit < units) {
      chunk = ChunkOf(args, order.At(unit));
      if (ptx::ElectOne()) {
        for (int i = 0; i < 3; ++i) LoadPiece(args, buffers, chunk, i);
      }
    }
    Chunk arriving = Chunk{};  // the one before, whose signal is still owed
    uint64_t start = call.Start(), arriving_since = 0;
    while (unit < units) {
      const int next_unit = NextUnit(args);
      const Chunk next = next_unit < units ? ChunkOf(args, order.At(next_unit)) : Chunk{};
      if (ptx::ElectOne()) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          StorePiece(args, call, buffers, chunk, i);
          ptx::BulkWaitRead<1>();  // the piece before this one can be loaded again
          if (i == 0) {
            LoadPiece(args, buffers, chunk, 3);
          } else {
            LoadPiece(args, buffers, next, i - 1);
          }
          if (i == 1) {
            ptx::BulkWait<2>();
            SignalChunk(args, call, arriving, arriving_since);
          }
        }
      }
      __syncwarp();
      arriving = chunk;
      arriving_since = start;
      start = call.Start();
      chunk = next;
      unit = next_unit;
    }
    if (ptx::ElectOne()) {
      ptx::BulkWait<0>();
      SignalChunk(args, call, arriving, arriving_since);
    }
    __syncwarp();
  }

  static __device__ void CopyChunks(const Args& args, const CallContext& call,
                                    PieceBuffers& buffers) {
    const int of_rank = args.layout.rank_blocks * args.layout.Chunks();
    if (!ptx::ElectOne()) return;
    for (int i = TakeCopy(args); i < args.view.world * of_rank; i = TakeCopy(args)) {
      CopyGathered(args, call, buffers, i / of_rank, i % of_rank);
    }
    ptx::BulkWait<0>();
  }

  // For a whole warp.
  static __device__ int NextUnit(const Args& args) {
    return __shfl_sync(0xffffffff, threadIdx.x % 32 == 0 ? TakeUnit(args) : 0, 0);
  }

  // What a rank has of a block, in one chunk of k. Without rows there is nothing to be done.
  struct Chunk {
    int32_t peer, block, chunk;
    typename PanelLayout::Part part;
    int32_t row;  // of the shard
  };
  static __device__ Chunk ChunkOf(const Args& args, const SendUnit& unit) {
    return ChunkOf(args, args.view.rank, SendPeer(args.view.rank, unit.step, args.view.world),
                   unit.block, unit.chunk);
  }
  static __device__ Chunk ChunkOf(const Args& args, int src, int peer, int32_t block,
                                  int32_t chunk) {
    Chunk c{peer, block, chunk, args.layout.PartOf(src, block), 0};
    c.row = static_cast<int32_t>(static_cast<int64_t>(block) * PanelLayout::kBlockRows +
                                 c.part.begin - src * args.rows.PerRank());
    return c;
  }

  // Shared memory for four pieces of a chunk.
  struct PieceBuffers {
    GemmSmem<Config> smem;
    uint32_t parities = 0;  // a bit for each piece

    __device__ uint32_t Await(int i) {
      ptx::MbarrierWait(smem.PieceFull(i), (parities >> i) & 1);
      parities ^= 1u << i;
      return smem.Piece(i);
    }
  };

  // Piece i of an own chunk, from x.
  static __device__ void LoadPiece(const Args& args, PieceBuffers& buffers, const Chunk& c, int i) {
    const auto piece = args.layout.PieceOf(c.part, c.chunk, i);
    if (piece.rows <= 0) return;
    const uint32_t bar = buffers.smem.PieceFull(i);
    ptx::MbarrierArriveExpectTx(bar, args.piece_bytes);
    ptx::TmaLoad2d(buffers.smem.Piece(i), &args.pieces, bar, piece.panel * PanelLayout::kColumns,
                   c.row + piece.row);
  }
  static __device__ void StorePiece(const Args& args, const CallContext& call,
                                    PieceBuffers& buffers, const Chunk& c, int i) {
    const auto piece = args.layout.PieceOf(c.part, c.chunk, i);
    if (piece.rows > 0) {
      ptx::BulkStore(PanelRow(args, call, c.peer, c.block, piece.panel, c.part.begin + piece.row),
                     buffers.Await(i), piece.rows * PanelLayout::kRowBytes);
    }
    ptx::BulkCommit();  // also if it is empty: groups are counted
  }
  static __device__ void SignalChunk(const Args& args, const CallContext& call, const Chunk& c,
                                     uint64_t since) {
    if (c.part.end == 0) return;
    ptx::FenceProxyAsyncGlobal();
    StoreRelease(ChunkSignal(args, call, c.peer, args.view.rank, c.block, c.chunk), call.signal);
    call.Done(EventKind::kSend, since, c.peer, c.chunk);
  }

  // Copies begin with the own chunks and go on as the others' arrive. `i` counts a rank's.
  static __device__ void CopyGathered(const Args& args, const CallContext& call,
                                      PieceBuffers& buffers, int step, int i) {
    const int src = (args.view.rank + step) % args.view.world, chunks = args.layout.Chunks();
    if (i / chunks >= args.layout.BlocksOf(src)) return;
    const Chunk c =
        ChunkOf(args, src, args.view.rank, args.layout.FirstBlock(src) + i / chunks, i % chunks);
    const bool own = src == args.view.rank;
    if (!own) {
      AwaitPeer(call, ChunkSignal(args, call, args.view.rank, src, c.block, c.chunk), src, c.chunk);
      ptx::FenceProxyAsyncGlobal();
    }
    ptx::BulkWaitRead<0>();
    for (int p = 0; p < Config::kPieces; ++p) {
      if (own) {
        LoadPiece(args, buffers, c, p);
        continue;
      }
      const auto piece = args.layout.PieceOf(c.part, c.chunk, p);
      if (piece.rows <= 0) continue;
      const uint32_t bar = buffers.smem.PieceFull(p);
      ptx::MbarrierArriveExpectTx(bar, piece.rows * PanelLayout::kRowBytes);
      ptx::BulkLoad(
          buffers.smem.Piece(p),
          PanelRow(args, call, args.view.rank, c.block, piece.panel, c.part.begin + piece.row),
          piece.rows * PanelLayout::kRowBytes, bar);
    }
    for (int p = 0; p < Config::kPieces; ++p) {
      const auto piece = args.layout.PieceOf(c.part, c.chunk, p);
      if (piece.rows <= 0) continue;
      StoreGathered(args, buffers.Await(p), src * args.rows.PerRank() + c.row + piece.row, piece);
      ptx::BulkCommit();
    }
  }

  // A piece from virtual row `row0` on, to its actual rows: as a box, if these are as many as a box
  // has and follow each other, else row by row.
  static __device__ void StoreGathered(const Args& args, uint32_t smem, int64_t row0,
                                       const PanelLayout::Piece& piece) {
    const int64_t k0 = static_cast<int64_t>(piece.panel) * PanelLayout::kColumns;
    const int64_t actual = args.rows.Actual(row0);
    if (piece.rows == PanelLayout::kPieceRows &&
        args.rows.Actual(row0 + piece.rows - 1) == actual + piece.rows - 1) {
      ptx::TmaStore2d(&args.gathered_rows, smem, static_cast<int32_t>(k0),
                      static_cast<int32_t>(actual));
      return;
    }
    const auto bytes = static_cast<uint32_t>(2 * Min<int64_t>(PanelLayout::kColumns, args.k - k0));
    for (int r = 0; r < piece.rows; ++r) {
      ptx::BulkStore(
          static_cast<char*>(args.gathered) + 2 * (args.rows.Actual(row0 + r) * args.k + k0),
          smem + r * PanelLayout::kRowBytes, bytes);
    }
  }
};

}  // namespace jflux

#endif  // JFLUX_OPS_ALL_GATHER_MATMUL_GATHER_SENDER_SM90_CUH_
