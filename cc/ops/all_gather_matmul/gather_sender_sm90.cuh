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
    static_assert(Config::kSendBoxes == KPanelLayout::kBoxes &&
                  Config::kSendBoxBytes == KPanelLayout::kBoxRows * KPanelLayout::kRowBytes);
    SendBuffers buffers{smem};
    if (MaySend(args)) SendChunks(args, call, buffers);
    if (args.gathered != nullptr) CopyChunks(args, call, buffers);
  }

 private:
  struct SendBuffers;

  // For a whole warp: whether this CTA is one of the first to get here.
  static __device__ bool MaySend(const Args& args) {
    if (args.senders >= gridDim.x) return true;
    auto* header = args.view.template At<WorkspaceHeader>(args.view.rank, 0);
    const bool leads = threadIdx.x % 32 == 0;
    return __shfl_sync(0xffffffff, leads ? atomicAdd(&header->senders, 1) : 0, 0) < args.senders;
  }

  static __device__ void SendChunks(const Args& args, const CallContext& call,
                                    SendBuffers& buffers) {
    const SendOrder order(args.layout, args.view.rank, args.send_group);
    const int units = order.Units();
    int unit = NextUnit(args);
    // Three boxes are on their way in while the fourth goes out, and the next unit follows without
    // a gap: a unit's turns are latencies, all of which others can hide.
    Chunk chunk = Chunk{};
    if (unit < units) {
      chunk = ChunkOf(args, order.At(unit));
      if (ptx::ElectOne()) {
        for (int i = 0; i < 3; ++i) LoadBox(args, buffers, chunk, i);
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
          StoreBox(args, call, buffers, chunk, i);
          ptx::BulkWaitRead<1>();  // the box before this one can be loaded again
          if (i == 0) {
            LoadBox(args, buffers, chunk, 3);
          } else {
            LoadBox(args, buffers, next, i - 1);
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
                                    SendBuffers& buffers) {
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
    typename KPanelLayout::Part part;
    int32_t row;  // of the shard
  };
  static __device__ Chunk ChunkOf(const Args& args, const SendUnit& unit) {
    return ChunkOf(args, args.view.rank, SendPeer(args.view.rank, unit.step, args.view.world),
                   unit.block, unit.chunk);
  }
  static __device__ Chunk ChunkOf(const Args& args, int src, int peer, int32_t block,
                                  int32_t chunk) {
    Chunk c{peer, block, chunk, args.layout.PartOf(src, block), 0};
    c.row = static_cast<int32_t>(static_cast<int64_t>(block) * KPanelLayout::kBlockRows +
                                 c.part.begin - src * args.rows.PerRank());
    return c;
  }

  // Shared memory for four boxes of a chunk.
  struct SendBuffers {
    GemmSmem<Config> smem;
    uint32_t parities = 0;  // a bit for each box

    __device__ uint32_t Await(int i) {
      ptx::MbarrierWait(smem.SendBoxFull(i), (parities >> i) & 1);
      parities ^= 1u << i;
      return smem.SendBox(i);
    }
  };

  // Box i of an own chunk, from x.
  static __device__ void LoadBox(const Args& args, SendBuffers& buffers, const Chunk& c, int i) {
    const auto box = args.layout.BoxOf(c.part, c.chunk, i);
    if (box.rows <= 0) return;
    const uint32_t bar = buffers.smem.SendBoxFull(i);
    ptx::MbarrierArriveExpectTx(bar, args.send_box_bytes);
    ptx::TmaLoad2d(buffers.smem.SendBox(i), &args.send_boxes, bar,
                   box.panel * KPanelLayout::kColumns, c.row + box.row);
  }
  static __device__ void StoreBox(const Args& args, const CallContext& call, SendBuffers& buffers,
                                  const Chunk& c, int i) {
    const auto box = args.layout.BoxOf(c.part, c.chunk, i);
    if (box.rows > 0) {
      ptx::BulkStore(KPanelRow(args, call, c.peer, c.block, box.panel, c.part.begin + box.row),
                     buffers.Await(i), box.rows * KPanelLayout::kRowBytes);
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
                                      SendBuffers& buffers, int step, int i) {
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
    for (int p = 0; p < Config::kSendBoxes; ++p) {
      if (own) {
        LoadBox(args, buffers, c, p);
        continue;
      }
      const auto box = args.layout.BoxOf(c.part, c.chunk, p);
      if (box.rows <= 0) continue;
      const uint32_t bar = buffers.smem.SendBoxFull(p);
      ptx::MbarrierArriveExpectTx(bar, box.rows * KPanelLayout::kRowBytes);
      ptx::BulkLoad(
          buffers.smem.SendBox(p),
          KPanelRow(args, call, args.view.rank, c.block, box.panel, c.part.begin + box.row),
          box.rows * KPanelLayout::kRowBytes, bar);
    }
    for (int p = 0; p < Config::kSendBoxes; ++p) {
      const auto box = args.layout.BoxOf(c.part, c.chunk, p);
      if (box.rows <= 0) continue;
      StoreGathered(args, buffers.Await(p), src * args.rows.PerRank() + c.row + box.row, box);
      ptx::BulkCommit();
    }
  }

  // A box from virtual row `row0` on, to its actual rows: as a box, if these are as many as a box
  // has and follow each other, else row by row.
  static __device__ void StoreGathered(const Args& args, uint32_t smem, int64_t row0,
                                       const KPanelLayout::Box& box) {
    const int64_t k0 = static_cast<int64_t>(box.panel) * KPanelLayout::kColumns;
    const int64_t actual = args.rows.Actual(row0);
    if (box.rows == KPanelLayout::kBoxRows &&
        args.rows.Actual(row0 + box.rows - 1) == actual + box.rows - 1) {
      ptx::TmaStore2d(&args.gathered_rows, smem, static_cast<int32_t>(k0),
                      static_cast<int32_t>(actual));
      return;
    }
    const auto bytes = static_cast<uint32_t>(2 * Min<int64_t>(KPanelLayout::kColumns, args.k - k0));
    for (int r = 0; r < box.rows; ++r) {
      ptx::BulkStore(
          static_cast<char*>(args.gathered) + 2 * (args.rows.Actual(row0 + r) * args.k + k0),
          smem + r * KPanelLayout::kRowBytes, bytes);
    }
  }
};

}  // namespace jflux

#endif  // JFLUX_OPS_ALL_GATHER_MATMUL_GATHER_SENDER_SM90_CUH_
