// The send warp of all_to_all_matmul's kernel. It copies local shards to the peers' workspaces
// (gpu/chunk_sender.cuh) and, if asked for, all_to_all(x) to `gathered`. It waits for peers only
// while it copies to `gathered`, after the CTA's last send.
#ifndef JFLUX_OPS_ALL_TO_ALL_MATMUL_SHARD_SENDER_SM90_CUH_
#define JFLUX_OPS_ALL_TO_ALL_MATMUL_SHARD_SENDER_SM90_CUH_

#include "gpu/chunk_sender.cuh"
#include "gpu/gemm_smem.cuh"
#include "gpu/ptx.cuh"
#include "ops/all_to_all_matmul/all_to_all_matmul_args.cuh"

namespace jflux {

template <typename Config>
struct ShardSender {
  using Args = AllToAllMatmulArgs;
  using Buffers = SendBuffers<GemmSmem<Config>>;

  // Takes chunks from counters: first chunks to send, in as many CTAs as may send (gpu/senders.h),
  // then chunks to copy to `gathered`. Nothing that a peer waits for comes after a wait.
  static __device__ void Run(const Args& args, const CallContext& call,
                             const GemmSmem<Config>& smem) {
    static_assert(Config::kSendBoxes == KPanelLayout::kBoxes &&
                  Config::kSendBoxBytes == KPanelLayout::kBoxRows * KPanelLayout::kRowBytes);
    Buffers buffers{smem};
    if (MaySend(args)) SendChunks<ShardSender>(args, call, buffers);
    if (args.gathers) CopyChunks(args, call, buffers);
  }

  // A chunk of a shard. An empty range means nothing to do.
  struct Chunk {
    int32_t step, row_block, chunk;
    int32_t dst;  // receiver of the shard
    KPanelLayout::RowRange range;
  };
  static __device__ const ShardSendOrder& OrderOf(const Args& args) { return args.send_order; }
  static __device__ Chunk ChunkOf(const Args& args, const ChunkSend& send) {
    return Chunk{send.step, send.row_block, send.chunk,
                 SendPeer(args.view.rank, send.step, args.view.world),
                 args.panels.RangeOf(send.row_block)};
  }

  // Loads box i of a chunk from x.
  static __device__ void LoadBox(const Args& args, Buffers& buffers, const Chunk& c, int i) {
    const auto box = args.panels.shard.BoxOf(c.range, c.chunk, i);
    if (box.rows <= 0) return;
    const uint32_t bar = buffers.smem.SendBoxFull(i);
    const RowAt at = RowOf(args, c.row_block * KPanelLayout::kPanelRows + box.row, args.split_rows);
    ptx::MbarrierArriveExpectTx(bar, args.send_box_bytes);
    ptx::TmaLoad4d(buffers.smem.SendBox(i), &args.send_boxes, bar,
                   box.k_panel * KPanelLayout::kColumns, at.inner, at.outer, c.dst);
  }
  static __device__ void StoreBox(const Args& args, const CallContext& call, Buffers& buffers,
                                  const Chunk& c, int i) {
    const auto box = args.panels.shard.BoxOf(c.range, c.chunk, i);
    if (box.rows > 0) {
      ptx::BulkStore(ShardPanelRow(args, call, c.dst, c.step, c.row_block, box.k_panel, box.row),
                     buffers.Await(i), box.rows * KPanelLayout::kRowBytes);
    }
    ptx::BulkCommit();  // even if empty: BulkWait counts groups
  }
  static __device__ void SignalChunk(const Args& args, const CallContext& call, const Chunk& c,
                                     uint64_t since) {
    if (c.range.end == 0) return;
    ptx::FenceProxyAsyncGlobal();
    StoreRelease(ShardSignal(args, call, c.dst, c.step, c.row_block, c.chunk), call.signal);
    call.Done(EventKind::kSend, since, c.dst, c.chunk);
  }

 private:
  // Called by one lane. Local chunks come first, then the peers', as they arrive.
  static __device__ void CopyChunks(const Args& args, const CallContext& call, Buffers& buffers) {
    if (!ptx::ElectOne()) return;
    const int chunks = args.panels.shard.Chunks(), of_shard = args.panels.shard.row_blocks * chunks;
    for (int i = TakeCopy(args); i < args.view.world * of_shard; i = TakeCopy(args)) {
      const int step = i / of_shard, row_block = i % of_shard / chunks;
      CopyChunk(args, call, buffers,
                Chunk{step, row_block, i % chunks, args.view.rank, args.panels.RangeOf(row_block)});
    }
    ptx::BulkWait<0>();
  }

  static __device__ void CopyChunk(const Args& args, const CallContext& call, Buffers& buffers,
                                   const Chunk& c) {
    const int rank = args.view.rank, src = SourceRank(args, c.step);
    if (c.step != 0) {
      AwaitPeer(call, ShardSignal(args, call, rank, c.step, c.row_block, c.chunk), src, c.chunk);
      ptx::FenceProxyAsyncGlobal();  // bulk copies read the chunk
    }
    const uint64_t start = call.Start();
    ptx::BulkWaitRead<0>();
    for (int i = 0; i < KPanelLayout::kBoxes; ++i) {
      if (c.step == 0) {
        LoadBox(args, buffers, c, i);
        continue;
      }
      const auto box = args.panels.shard.BoxOf(c.range, c.chunk, i);
      if (box.rows <= 0) continue;
      const uint32_t bytes = box.rows * KPanelLayout::kRowBytes, bar = buffers.smem.SendBoxFull(i);
      ptx::MbarrierArriveExpectTx(bar, bytes);
      ptx::BulkLoad(buffers.smem.SendBox(i),
                    ShardPanelRow(args, call, rank, c.step, c.row_block, box.k_panel, box.row),
                    bytes, bar);
    }
    // TMA drops the part of a box outside the shard.
    for (int i = 0; i < KPanelLayout::kBoxes; ++i) {
      const auto box = args.panels.shard.BoxOf(c.range, c.chunk, i);
      if (box.rows <= 0) continue;
      const RowAt at =
          RowOf(args, c.row_block * KPanelLayout::kPanelRows + box.row, args.concat_rows);
      ptx::TmaStore4d(&args.gathered, buffers.Await(i), box.k_panel * KPanelLayout::kColumns,
                      at.inner, at.outer, src);
      ptx::BulkCommit();
    }
    call.Done(EventKind::kCopy, start, src, c.chunk);
  }
};

}  // namespace jflux

#endif  // JFLUX_OPS_ALL_TO_ALL_MATMUL_SHARD_SENDER_SM90_CUH_
