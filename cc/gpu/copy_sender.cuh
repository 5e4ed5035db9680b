// A send warp (chunk_sender.cuh) whose chunks are byte ranges of an array, which it copies
// unchanged into the peers' workspaces. It sends all chunks in order to one peer, then to the next.
//
//   writes  the peers' workspaces and signals
//   waits   for no peer
//   order   bulk copies complete, proxy fence, StoreRelease of the chunk's signal
//   reset   the counters: LeaveCounters (gpu/gemm_call.cuh)
#ifndef JFLUX_GPU_COPY_SENDER_CUH_
#define JFLUX_GPU_COPY_SENDER_CUH_

#include <cstdint>

#include "core/tile_order.h"
#include "gpu/chunk_sender.cuh"

namespace jflux {

struct CopiedChunk {
  int32_t peer, chunk, bytes;
  const char* from;
  int64_t to;  // in a half of the peer's data
};

// Op provides
//
//   Args, Smem
//   kBoxBytes                           of one of a chunk's four boxes
//   BoxAt(smem, i)                      where box i is in shared memory
//   ChunksOf(args)                      how many a peer gets
//   ChunkOf(args, peer, chunk) -> CopiedChunk
//   SignalOf(args, call, peer, chunk)   at the peer
template <typename Op>
struct CopySender : BoxesAlone {
  using Args = typename Op::Args;
  using Buffers = SendBuffers<typename Op::Smem>;
  using Chunk = CopiedChunk;

  struct Order {
    int32_t chunks, peers;
    struct Place {
      int32_t step, chunk;
    };
    __device__ int32_t Count() const { return chunks * peers; }
    __device__ Place At(int32_t i) const { return Place{1 + i / chunks, i % chunks}; }
  };
  static __device__ Order OrderOf(const Args& args) {
    return Order{Op::ChunksOf(args), args.view.world - 1};
  }
  static __device__ Chunk ChunkOf(const Args& args, typename Order::Place place) {
    return Op::ChunkOf(args, SendPeer(args.view.rank, place.step, args.view.world), place.chunk);
  }

  static __device__ void LoadBox(const Args&, Buffers& buffers, const Chunk& c, int i) {
    const int32_t bytes = BytesOf(c, i);
    if (bytes == 0) return;
    const uint32_t bar = buffers.smem.SendBoxFull(i);
    ptx::MbarrierArriveExpectTx(bar, bytes);
    ptx::BulkLoad(Op::BoxAt(buffers.smem, i), c.from + i * Op::kBoxBytes, bytes, bar);
  }
  static __device__ void StoreBox(const Args& args, const CallContext& call, Buffers& buffers,
                                  const Chunk& c, int i) {
    if (const int32_t bytes = BytesOf(c, i); bytes != 0) {
      buffers.Await(i);
      char* to = args.view.At(c.peer, args.workspace.DataOffset(call.epoch) + c.to);
      ptx::BulkStore(to + i * Op::kBoxBytes, Op::BoxAt(buffers.smem, i), bytes);
    }
    ptx::BulkCommit();  // even if empty: BulkWait counts groups
  }
  static __device__ void SignalChunk(const Args& args, const CallContext& call, const Chunk& c,
                                     uint64_t since) {
    if (c.bytes == 0) return;
    ptx::FenceProxyAsyncGlobal();
    StoreRelease(Op::SignalOf(args, call, c.peer, c.chunk), call.signal);
    call.Done(EventKind::kSend, since, c.peer, c.chunk);
  }

 private:
  static __device__ int32_t BytesOf(const Chunk& c, int box) {
    return Max(0, Min(Op::kBoxBytes, c.bytes - box * Op::kBoxBytes));
  }
};

}  // namespace jflux

#endif  // JFLUX_GPU_COPY_SENDER_CUH_
